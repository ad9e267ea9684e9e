//! What this host has of a stream at the other one: the right to cancel it there.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::elsewhere::Elsewhere;

/// If the stream's client cancels it, the other host hears of it when this is dropped.
pub(super) struct Hold {
    to: Arc<Elsewhere>,
    /// The id that it goes on by there when the call is dropped, once it does and if it has one.
    id: Option<String>,
    cancelled: CancellationToken,
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.cancelled.is_cancelled() {
            self.cancel_soon();
        }
    }
}

impl Hold {
    /// Of a stream that the other host has not begun: what has its id there is not ours.
    pub fn new(to: &Arc<Elsewhere>, cancelled: CancellationToken) -> Self {
        Self {
            to: Arc::clone(to),
            id: None,
            cancelled,
        }
    }

    /// The other host has begun it under this id; none: it ends there with the call.
    pub fn begun(&mut self, id: Option<String>) {
        self.id = id;
    }

    /// It is the other host's alone.
    pub fn let_go(&mut self) {
        self.id = None;
    }

    /// Cancels it there, without waiting for that.
    pub fn cancel_soon(&mut self) {
        // Without a runtime nobody could tell it anything; it ends for want of a reader.
        let runtime = tokio::runtime::Handle::try_current();
        if let (Some(id), Ok(runtime)) = (self.id.take(), runtime) {
            let to = Arc::clone(&self.to);
            runtime.spawn(async move { to.cancel(id).await });
        }
    }

    /// Cancels it there.
    pub async fn cancel(&mut self) {
        if let Some(id) = self.id.take() {
            self.to.cancel(id).await;
        }
    }
}

//! Debug, passed on to the worker that is meant, for callers who may see what others do.

use std::sync::Arc;

use hotcell_proto::{
    error::{Error, Reason},
    v1::{WatchRequest, WatchSample, debug_server::Debug},
};
use tokio::sync::mpsc::{self, error::TrySendError};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::{Shared, who};
use crate::{
    access::Caller,
    admission::draining,
    fleet::{Link, believe_sample},
};

/// The service.
pub(super) struct Service(pub Shared);

type Answers<T> = ReceiverStream<Result<T, Status>>;

impl Service {
    /// Lets somebody look into a worker, and notes it.
    ///
    /// # Errors
    /// [`Reason::PermissionDenied`] for callers over TCP that nobody asked who they are: what they would see is others'.
    fn enter<T>(
        &self,
        request: &Request<T>,
        call: &str,
        worker: &str,
        detail: String,
    ) -> Result<Arc<Link>, Error> {
        let caller = Caller::of(request.extensions());
        if caller.remote && !self.0.access.asks_for_tokens() {
            let what = "over TCP only callers with a token may look into workers: give the scheduler --tokens, \
                        and the caller a token with the role debug; or use the Unix socket";
            return Err(Error::new(Reason::PermissionDenied, what));
        }
        if self.0.admission.is_closed() {
            return Err(draining());
        }
        let link = self.0.fleet.for_debug(worker)?;
        let who = who(request);
        self.0.fleet.audit_debug(&who, call, &link.worker, detail);
        tracing::info!(worker = link.worker, call, by = who.name, "somebody looks into a worker");
        Ok(link)
    }
}

/// Passes samples on until either side leaves. A watcher that does not read misses some, and nobody waits for it.
async fn pass(
    shared: Shared,
    link: Arc<Link>,
    mut samples: Streaming<WatchSample>,
    to: mpsc::Sender<Result<WatchSample, Status>>,
) {
    let mut missed = 0u64;
    loop {
        let next = tokio::select! {
            () = shared.abort.cancelled() => Err(draining()),
            () = to.closed() => return,
            next = samples.message() => match next {
                Ok(Some(sample)) => Ok(sample),
                Ok(None) => return,
                Err(status) => Err(link.said(&status).await),
            },
        };
        match next {
            Ok(said) => {
                let mut sample = believe_sample(said, &link);
                sample.missed = sample.missed.saturating_add(missed);
                missed = match to.try_send(Ok(sample)) {
                    Ok(()) => 0,
                    Err(TrySendError::Full(Ok(sample))) => sample.missed.saturating_add(1),
                    Err(_) => return,
                };
            }
            Err(error) => {
                // To a watcher that left this goes nowhere.
                let _ = to.send(Err(error.into())).await;
                return;
            }
        }
    }
}

#[tonic::async_trait]
impl Debug for Service {
    type WatchStream = Answers<WatchSample>;

    async fn watch(
        &self,
        request: Request<WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let WatchRequest {
            worker,
            interval_ms,
        } = request.get_ref();
        let link = self.enter(&request, "watch", worker, String::new())?;
        let asked = WatchRequest {
            // It goes by another name to itself than to us while it stands by.
            worker: String::new(),
            interval_ms: *interval_ms,
        };
        let mut client = link.debug().await?;
        let samples = match client.watch(asked).await {
            Ok(samples) => samples.into_inner(),
            Err(status) => return Err(link.said(&status).await.into()),
        };
        let (to, stream) = mpsc::channel(1);
        tokio::spawn(pass(self.0.clone(), link, samples, to));
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

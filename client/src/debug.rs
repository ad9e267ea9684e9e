//! Looking into one worker: what it does.

use std::time::Duration;

use hotcell_proto::{error::Error, v1};

use crate::{connect::Client, control::Messages};

/// What somebody is told to lack who does not know these calls.
const LACKS: &str = "lets nobody look into it; a worker alone does on a Unix socket only";

impl Client {
    /// What a worker does, a sample for each interval (1 s if it is zero), until the stream is dropped. Without a name, the
    /// only worker.
    ///
    /// # Errors
    /// The server's: [`Reason::NoWorker`](crate::Reason::NoWorker),
    /// [`Reason::PermissionDenied`](crate::Reason::PermissionDenied) without the role `debug`.
    pub async fn watch_worker(
        &self,
        worker: &str,
        every: Duration,
    ) -> Result<Messages<v1::WatchSample>, Error> {
        let request = v1::WatchRequest {
            worker: worker.to_owned(),
            interval_ms: u32::try_from(every.as_millis()).unwrap_or(u32::MAX),
        };
        let samples = self.debug_client().watch(request).await;
        self.messages(samples, LACKS)
    }
}

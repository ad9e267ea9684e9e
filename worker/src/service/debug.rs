//! `hotcell.v1.Debug`: looking into this worker.

use hotcell_proto::{
    error::{Error, Reason},
    limits,
    v1::{
        self,
        debug_server::{Debug, DebugServer},
    },
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use crate::{
    debug::watch::{checked_interval, watch},
    host::Host,
};

/// The service.
pub struct DebugService(Host);

/// The service with its limits.
pub fn server(host: Host) -> DebugServer<DebugService> {
    DebugServer::new(DebugService(host))
        .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
        .max_encoding_message_size(limits::MAX_MESSAGE_BYTES)
}

type Answers<T> = ReceiverStream<Result<T, Status>>;

impl DebugService {
    /// Refuses what is meant for another worker.
    fn is_for_us(&self, worker: &str) -> Result<(), Error> {
        let (own, _) = self.0.identity();
        if worker.is_empty() || worker == own {
            return Ok(());
        }
        let shown: String = worker.chars().take(limits::MAX_SESSION_NAME).collect();
        let what = format!("this is worker {own}, not {shown:?}");
        Err(Error::new(Reason::NoWorker, what))
    }
}

#[tonic::async_trait]
impl Debug for DebugService {
    type WatchStream = Answers<v1::WatchSample>;

    async fn watch(
        &self,
        request: Request<v1::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let v1::WatchRequest {
            worker,
            interval_ms,
        } = request.into_inner();
        self.is_for_us(&worker)?;
        let every = checked_interval(interval_ms)?;
        let watching = self.0.engine().observer().watch().ok_or_else(|| {
            let most = limits::MAX_DEBUGGERS;
            let what = format!("{most} others watch this worker already; try again later");
            Error::new(Reason::Overloaded, what)
        })?;
        // One: a watcher that does not read gets the latest but few.
        let (to, samples) = mpsc::channel(1);
        tokio::spawn(watch(self.0.clone(), watching, every, to));
        Ok(Response::new(ReceiverStream::new(samples)))
    }
}

//! Looking into one worker: what it does, what it computes for a request, and whether that comes again.

mod bisect;
mod compare;
mod dumped;
mod likeness;
pub mod perfetto;
mod recording;
pub(crate) mod reduce;
mod reduced;
mod tolerance;

use std::time::Duration;

use hotcell_proto::{error::Error, v1};

use crate::{connect::Client, control::Messages};

pub use bisect::{Bisected, bisect};
pub use compare::{Compared, Difference, compare};
pub use dumped::dumped;
pub use likeness::{Likeness, NodeLikeness, Ulps, liken};
pub(crate) use recording::Spool;
pub use recording::{Recorded, Recorder, Recording};
pub use reduce::Case;
pub use reduced::{Fault, Origin, Reduced};
pub use tolerance::{rounds_others, tolerance};

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

    /// What is computed for a request's tokens while it is served; a [`Recorder`] puts it together.
    ///
    /// # Errors
    /// The server's.
    pub async fn capture(
        &self,
        request: v1::CaptureRequest,
    ) -> Result<Messages<v1::Captured>, Error> {
        let told = self.debug_client().capture(request).await;
        self.messages(told, LACKS)
    }

    /// Runs a request again, on a throw-away worker where a scheduler has them, and tells what is computed for its tokens.
    ///
    /// # Errors
    /// The server's, [`Reason::RequestNotFound`](crate::Reason::RequestNotFound) among them.
    pub async fn replay(
        &self,
        request: v1::ReplayRequest,
    ) -> Result<Messages<v1::Captured>, Error> {
        let told = self.debug_client().replay(request).await;
        self.messages(told, LACKS)
    }

    /// Looks at a model's nodes in every step until the stream is dropped: how many they are, and where a condition holds.
    ///
    /// # Errors
    /// The server's.
    pub async fn guard(
        &self,
        request: v1::GuardRequest,
    ) -> Result<Messages<v1::GuardEvent>, Error> {
        let told = self.debug_client().guard(request).await;
        self.messages(told, LACKS)
    }

    /// Who holds which bytes of a worker's memory, with at most so many handles of each tensor session (0: 16).
    ///
    /// # Errors
    /// The server's.
    pub async fn memory(&self, worker: &str, handles: u32) -> Result<v1::MemoryMap, Error> {
        let request = v1::MemoryMapRequest {
            worker: worker.to_owned(),
            handles,
        };
        let map = self.debug_client().memory(request).await;
        self.scheduler_answer(map, LACKS)
    }

    /// What a worker does for a while (1 s if it is zero), on a timeline, and what its plans compute if `nodes` are wanted;
    /// [`perfetto::encode`] makes a file of it.
    ///
    /// # Errors
    /// The server's.
    pub async fn trace_worker(
        &self,
        worker: &str,
        duration: Duration,
        nodes: bool,
    ) -> Result<Messages<v1::TracePiece>, Error> {
        let duration_ms = u32::try_from(duration.as_millis()).unwrap_or(u32::MAX);
        self.trace(v1::TraceRequest {
            worker: worker.to_owned(),
            duration_ms,
            nodes,
            steps: 0,
        })
        .await
    }

    /// The same with all that can be asked for, such as an end after so many steps.
    ///
    /// # Errors
    /// The server's.
    pub async fn trace(
        &self,
        request: v1::TraceRequest,
    ) -> Result<Messages<v1::TracePiece>, Error> {
        let pieces = self.debug_client().trace(request).await;
        self.messages(pieces, LACKS)
    }
}

//! Watchpoints of one request that is captured.

use hotcell_proto::v1;
use tokio::sync::mpsc;

use crate::generate::batch::Hit;

/// Watchpoints under which a request is run.
pub(super) struct Watched {
    pub hits: mpsc::Receiver<Hit>,
    /// What a hit's point counts.
    pub nodes: Vec<v1::CapturedNode>,
    pub request: String,
}

impl Watched {
    /// The next hit of the request's.
    pub async fn next(&mut self) -> Option<Hit> {
        loop {
            let hit = self.hits.recv().await?;
            if hit.request == self.request {
                return Some(hit);
            }
        }
    }

    /// The next one, if it is there.
    pub fn try_next(&mut self) -> Option<Hit> {
        loop {
            let hit = self.hits.try_recv().ok()?;
            if hit.request == self.request {
                return Some(hit);
            }
        }
    }
}

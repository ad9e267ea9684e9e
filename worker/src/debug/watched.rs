//! Watchpoints of one request that is captured.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tokio::sync::mpsc;

use super::guard::Guarded;
use crate::generate::batch::Hit;

/// Watchpoints under which a request is run.
pub(super) struct Watched {
    /// Its hits.
    pub hits: mpsc::Receiver<Hit>,
    /// What a hit's point counts.
    pub nodes: Vec<Guarded>,
    /// Hits that are not on their way yet, for which the request waits.
    pub untold: Arc<AtomicUsize>,
}

impl Watched {
    /// A hit is on its way.
    pub fn told(&self) {
        self.untold.fetch_sub(1, Ordering::AcqRel);
    }
}

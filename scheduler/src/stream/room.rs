//! How much all streams of a scheduler may hold.

use std::sync::atomic::{AtomicUsize, Ordering};

use hotcell_proto::limits;
use tokio::sync::Notify;

/// The bytes that all streams of a scheduler hold, and how many they may.
#[derive(Debug)]
pub struct Room {
    held: AtomicUsize,
    /// Told when they hold less than they may again.
    pub(super) freed: Notify,
    /// All streams together.
    pub total: usize,
    /// One stream.
    pub each: usize,
    /// One stream, however full the others are.
    pub share: usize,
}

impl Default for Room {
    fn default() -> Self {
        Self::new(
            limits::MAX_JOURNALS_BYTES,
            limits::MAX_JOURNAL_BYTES,
            limits::JOURNAL_SHARE,
        )
    }
}

impl Room {
    /// Room for so many bytes: of all streams, of each, and of each when the others are full.
    pub fn new(total: usize, each: usize, share: usize) -> Self {
        Self {
            held: AtomicUsize::new(0),
            freed: Notify::new(),
            total,
            each,
            share,
        }
    }

    /// Bytes held now.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// Whether all streams together hold as much as they may.
    pub fn is_full(&self) -> bool {
        self.held() >= self.total
    }

    pub(super) fn take(&self, bytes: usize) {
        self.held.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn give(&self, bytes: usize) {
        let before = self.held.fetch_sub(bytes, Ordering::Relaxed);
        if before >= self.total && before - bytes < self.total {
            self.freed.notify_waiters();
        }
    }
}

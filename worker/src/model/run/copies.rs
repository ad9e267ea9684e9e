//! Noting what is copied to a device and from it, and when, while somebody wants to know.

use std::{cell::RefCell, time::Instant};

use hotcell_proto::limits;

use super::Runner;
use crate::debug::observer::CopyNote;

/// What was copied since it was last asked, if that is noted.
#[derive(Default)]
pub(super) struct Copies {
    notes: Option<RefCell<Vec<CopyNote>>>,
}

impl Copies {
    /// Before a copy: when it begins, if that is noted.
    pub fn begin(&self) -> Option<Instant> {
        self.notes.as_ref().map(|_| Instant::now())
    }

    /// After it: what was copied, and how many bytes.
    pub fn end(&self, begun: Option<Instant>, what: &'static str, bytes: usize) {
        if let (Some(notes), Some(begun)) = (&self.notes, begun) {
            let mut notes = notes.borrow_mut();
            if notes.len() < limits::MAX_TRACED_NODES {
                notes.push(CopyNote {
                    begun,
                    took: begun.elapsed(),
                    what,
                    bytes,
                });
            }
        }
    }
}

impl Runner {
    /// Notes copies from now on, until that is [taken](Runner::copied).
    pub fn note_copies(&mut self) {
        self.copies.notes.get_or_insert_default();
    }

    /// What was copied since then. No more is noted.
    pub fn copied(&mut self) -> Vec<CopyNote> {
        let notes = self.copies.notes.take();
        notes.map(RefCell::into_inner).unwrap_or_default()
    }
}

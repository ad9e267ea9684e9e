//! Memory of clients that this process computes in, and what becomes of a fault there.
//!
//! A client can shorten its file under a mapping at any time. The signal handler then puts zeroed pages in the place of
//! the mapping's and notes it ([`repair`]), the instruction that was struck goes on, and whoever asked for the call learns
//! that the memory changed: what libwayland does for a compositor's clients. Nothing that was computed of it is believed.

use std::sync::atomic::{
    AtomicBool, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};

use hotcell_ipc::unsealed::{UnsealedMapping, replace_by_zeros};
use hotcell_proto::limits::MAX_CLIENT_MAPPINGS;

/// A mapping's pages; 0 where there is none.
struct Place {
    start: AtomicUsize,
    end: AtomicUsize,
    /// Whether its pages were replaced.
    lost: AtomicBool,
}

/// A static, since a signal handler looks there at any moment. Entries are cleared before their mappings end.
static PLACES: [Place; MAX_CLIENT_MAPPINGS] = [const {
    Place {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        lost: AtomicBool::new(false),
    }
}; MAX_CLIENT_MAPPINGS];

/// A mapping of which the signal handler knows.
#[derive(Debug)]
pub struct Guarded {
    mapping: UnsealedMapping,
    place: usize,
}

impl Guarded {
    /// Has the handler know of a mapping; none if there are too many.
    pub fn new(mapping: UnsealedMapping) -> Option<Self> {
        let pages = mapping.pages();
        let place = PLACES.iter().position(|place| {
            let taken = place
                .start
                .compare_exchange(0, pages.start, Acquire, Relaxed);
            taken.is_ok()
        })?;
        if let Some(found) = PLACES.get(place) {
            found.lost.store(false, Relaxed);
            // Until now the range was empty.
            found.end.store(pages.end, Release);
        }
        Some(Self { mapping, place })
    }

    /// What is mapped.
    pub fn mapping(&self) -> &UnsealedMapping {
        &self.mapping
    }

    /// Whether some of the memory went away while it was used. It does not come back.
    pub fn is_lost(&self) -> bool {
        PLACES
            .get(self.place)
            .is_none_or(|place| place.lost.load(Acquire))
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // Before the mapping itself is dropped: from then on its addresses may be anybody's.
        if let Some(place) = PLACES.get(self.place) {
            place.end.store(0, Relaxed);
            place.start.store(0, Release);
        }
    }
}

/// Replaces the pages of the mapping that an address without anything behind it lies in. `false` if there is none, or
/// no memory for other pages. Async-signal-safe, and of use on every thread at once.
pub(crate) fn repair(address: usize) -> bool {
    for place in &PLACES {
        let pages = place.start.load(Acquire)..place.end.load(Acquire);
        if pages.contains(&address) {
            // First: who sees a zero of the new pages must find that they are new.
            place.lost.store(true, Release);
            // SAFETY: the range is a living mapping's: the thread that was struck is using it, and whoever drops it clears
            // the entry before. It is reached by raw pointers only. A second thread that was struck meanwhile replaces zeroes
            // by zeroes, or loses what is not believed any more.
            return unsafe { replace_by_zeros(pages) };
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use hotcell_ipc::memory::unsealed_memory;

    #[test]
    fn a_fault_is_repaired_in_its_mapping_only_and_while_that_lives() {
        let file = unsealed_memory("a test", 16384).unwrap();
        let guard = || Guarded::new(UnsealedMapping::of_file(&file, 0, 16384).unwrap()).unwrap();
        let (one, two) = (guard(), guard());
        let at = |guarded: &Guarded| guarded.mapping().start().addr();
        file.set_len(0).unwrap();
        assert!(repair(at(&one) + 16383));
        assert!(one.is_lost() && !two.is_lost());
        // SAFETY: its pages are there again.
        assert_eq!(unsafe { one.mapping().start().read_volatile() }, 0);
        let gone = at(&two);
        drop(two);
        assert!(!repair(gone));
        // Who takes the place next has lost nothing.
        file.set_len(16384).unwrap();
        assert!(!guard().is_lost());
    }
}

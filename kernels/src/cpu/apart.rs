//! Threads that compute together, each on a processor of its own.
//!
//! The system wakes a thread on the processor of whoever wakes it if every other one is at work, be it with something that
//! is to give way at once (`SCHED_IDLE`). Two threads that meet at barriers then take turns on one processor, and no
//! balancing comes between: hardly ever are both ready to run. Whoever finds himself in such company after a sleep leaves.

use std::{
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// Between two moves of one thread at least. Where every processor is wanted by others, to move helps nobody.
const REST: Duration = Duration::from_millis(1);

/// Nobody has said where he runs.
const NOWHERE: u32 = u32::MAX;

/// Where the threads of a pool were when they last said so.
pub(super) struct Apart {
    since: Instant,
    seats: Vec<Seat>,
}

/// A thread's, on a cache line of its own.
#[repr(align(64))]
struct Seat {
    processor: AtomicU32,
    /// Microseconds from `since` to its last move.
    moved: AtomicU64,
}

impl Apart {
    pub(super) fn new(threads: usize) -> Self {
        let seat = || Seat {
            processor: AtomicU32::new(NOWHERE),
            moved: AtomicU64::new(0),
        };
        Self {
            since: Instant::now(),
            seats: (0..threads).map(|_| seat()).collect(),
        }
    }

    /// This thread, number `me`, is about to wake others.
    pub(super) fn say(&self, me: usize) {
        if let Some(seat) = self.seats.get(me) {
            seat.processor.store(processor(), Ordering::Relaxed);
        }
    }

    /// This thread is about to sleep, and has no processor until it is [woken](Self::woken).
    pub(super) fn sleeps(&self, me: usize) {
        if let Some(seat) = self.seats.get(me) {
            seat.processor.store(NOWHERE, Ordering::Relaxed);
        }
    }

    /// This thread was woken: it leaves a processor that another one has.
    pub(super) fn woken(&self, me: usize) {
        let here = processor();
        let Some(seat) = self.seats.get(me) else {
            return;
        };
        seat.processor.store(here, Ordering::Relaxed);
        let others = || {
            let there = self.seats.iter().enumerate();
            there
                .filter(|(i, _)| *i != me)
                .map(|(_, s)| s.processor.load(Ordering::Relaxed))
        };
        if here == NOWHERE || others().all(|p| p != here) {
            return;
        }
        let now = self.since.elapsed().as_micros() as u64;
        let rested = now.saturating_sub(seat.moved.load(Ordering::Relaxed));
        if Duration::from_micros(rested) < REST {
            return;
        }
        seat.moved.store(now, Ordering::Relaxed);
        if let Some(there) = leave(others()) {
            seat.processor.store(there, Ordering::Relaxed);
        }
    }
}

#[cfg(all(target_os = "linux", not(miri)))]
fn processor() -> u32 {
    rustix::thread::sched_getcpu() as u32
}

#[cfg(not(all(target_os = "linux", not(miri))))]
fn processor() -> u32 {
    NOWHERE
}

/// Moves this thread to a processor that is none of `taken`, if it may use one, and says which.
#[cfg(all(target_os = "linux", not(miri)))]
fn leave(taken: impl Iterator<Item = u32>) -> Option<u32> {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let mine = sched_getaffinity(None).ok()?;
    let mut free = mine;
    for processor in taken.filter(|&p| (p as usize) < CpuSet::MAX_CPU) {
        free.unset(processor as usize);
    }
    if free.count() == 0 {
        return None;
    }
    sched_setaffinity(None, &free).ok()?;
    let there = processor();
    // It may use all of its own again: where it goes from there is the system's to say.
    let _ = sched_setaffinity(None, &mine);
    Some(there)
}

#[cfg(not(all(target_os = "linux", not(miri))))]
fn leave(_: impl Iterator<Item = u32>) -> Option<u32> {
    None
}

#[cfg(all(target_os = "linux", not(miri)))]
mod system {
    use std::io;

    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    /// Those that a thread may run on.
    pub(in crate::cpu) type Cores = CpuSet;

    /// This thread's.
    pub(in crate::cpu) fn cores() -> io::Result<Cores> {
        Ok(sched_getaffinity(None)?)
    }

    /// This thread may run on these.
    pub(in crate::cpu) fn allow(cores: &Cores) -> io::Result<()> {
        Ok(sched_setaffinity(None, cores)?)
    }

    /// This thread, and those that it starts, run on this core alone from here on.
    pub(in crate::cpu) fn stay_on(core: u32) -> io::Result<()> {
        let mut one = Cores::new();
        if (core as usize) < Cores::MAX_CPU {
            one.set(core as usize);
        }
        // Of none, or one that is not there, the system says itself that it cannot be.
        let error =
            |error: io::Error| io::Error::new(error.kind(), format!("core {core}: {error}"));
        allow(&one).map_err(error)
    }
}

#[cfg(not(all(target_os = "linux", not(miri))))]
mod system {
    use std::io;

    pub(in crate::cpu) type Cores = ();

    pub(in crate::cpu) fn cores() -> io::Result<Cores> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(in crate::cpu) fn allow(_: &Cores) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(in crate::cpu) fn stay_on(_: u32) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

pub(super) use system::{allow, cores, stay_on};

#[cfg(all(test, target_os = "linux", not(miri)))]
mod tests {
    use super::*;
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    /// On a thread of its own, whose affinity nobody else has.
    #[allow(clippy::unwrap_used)] // a helper that fails is a test that fails
    fn alone(test: impl FnOnce() + Send + 'static) {
        std::thread::spawn(test).join().unwrap();
    }

    #[test]
    fn a_thread_leaves_a_processor_that_another_has() {
        alone(|| {
            let mine = sched_getaffinity(None).unwrap();
            if mine.count() < 2 {
                // Nowhere to go, which the next test looks at.
                return;
            }
            let apart = Apart::new(2);
            std::thread::sleep(REST);
            for _ in 0..100 {
                let taken = processor();
                apart.seats[1].processor.store(taken, Ordering::Relaxed);
                apart.woken(0);
                assert_ne!(apart.seats[0].processor.load(Ordering::Relaxed), taken);
                assert_eq!(sched_getaffinity(None).unwrap(), mine);
                std::thread::sleep(2 * REST);
            }
        });
    }

    #[test]
    fn nobody_makes_room_for_a_thread_that_sleeps() {
        let apart = Apart::new(2);
        std::thread::sleep(2 * REST);
        apart.say(1);
        apart.sleeps(1);
        apart.woken(0);
        assert_eq!(apart.seats[0].moved.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn who_may_run_on_one_processor_only_stays() {
        alone(|| {
            let here = processor();
            let mut one = CpuSet::new();
            one.set(here as usize);
            sched_setaffinity(None, &one).unwrap();
            let apart = Apart::new(2);
            apart.seats[1].processor.store(here, Ordering::Relaxed);
            std::thread::sleep(2 * REST);
            apart.woken(0);
            assert_eq!(apart.seats[0].processor.load(Ordering::Relaxed), here);
            assert_eq!(sched_getaffinity(None).unwrap(), one);
        });
    }
}

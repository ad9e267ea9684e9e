//! Processes of one host that compute one model together, and the memory in which they give each other their parts.

use std::{
    ops::Range,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Duration,
};

use crate::{
    backend::{DeviceError, SharedRegion},
    memory::ALIGNMENT,
};

/// Bytes that a member gives the others at a time.
const PIECE: usize = 1 << 20;

/// Bytes that a member can hand to the next one before that takes them. Pages cost nothing until written.
pub const HANDED: usize = 4 << 20;

/// How often a member looks for the others without a pause, then with one, before it asks whether they are still there.
const SPINS: u32 = 1 << 14;
const YIELDS: u32 = 64;

/// After how many looks it sleeps between two of them, and for how long: who waits for a whole stage leaves the processor to it.
const AWAKE: u32 = SPINS + 1024;
const NAP: Duration = Duration::from_micros(30);

/// Which part of something a member has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Share {
    /// The member's number, below `members`.
    pub rank: usize,
    /// How many there are.
    pub members: usize,
}

/// All of it.
impl Default for Share {
    fn default() -> Self {
        Self {
            rank: 0,
            members: 1,
        }
    }
}

impl Share {
    /// The member's part of `n` things, if all parts can be equal; else all of them.
    pub fn of(self, n: usize) -> usize {
        match self.divides(n) {
            true => n / self.members,
            false => n,
        }
    }

    /// Which of `n` things are the member's.
    pub fn range(self, n: usize) -> Range<usize> {
        let first = match self.divides(n) {
            true => self.rank * self.of(n),
            false => 0,
        };
        first..first + self.of(n)
    }

    /// Whether `n` things have as many equal parts.
    pub fn divides(self, n: usize) -> bool {
        self.members > 1 && n.is_multiple_of(self.members)
    }
}

/// A member's end of the memory that all share.
///
/// What all give to all: they meet at every piece, so a member that reads one has been given it, and nobody overwrites it
/// before all have met once more: pieces lie in two places in turns.
///
/// What each hands to the next one, and the last to the first: a ring of bytes, whose two ends count what they have written
/// and taken.
pub struct Communicator {
    share: Share,
    memory: Box<dyn SharedRegion + Send + Sync>,
    /// How often this member has met the others.
    met: AtomicU64,
    /// Whether the others are still there.
    alive: Box<dyn Fn() -> bool + Send + Sync>,
}

impl Communicator {
    /// Bytes of the memory that so many members share: zeroes, at first.
    pub const fn bytes(members: usize) -> usize {
        members * (Self::COUNTERS * ALIGNMENT + 2 * PIECE + HANDED)
    }

    /// A member's counters, each in a cache line of its own: how often it met the others, how many bytes it has handed to the
    /// next one, and how many of those the next one has taken.
    const COUNTERS: usize = 3;

    /// The end of one member. `alive` is asked now and then while it waits for the others.
    ///
    /// # Errors
    /// [`DeviceError::Binding`] when the memory is too small or not aligned to a cache line, or there is no such member.
    pub fn new(
        share: Share,
        memory: Box<dyn SharedRegion + Send + Sync>,
        alive: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Result<Self, DeviceError> {
        let (start, len) = memory.span();
        if share.rank >= share.members
            || len < Self::bytes(share.members)
            || !start.addr().is_multiple_of(ALIGNMENT)
        {
            return Err(DeviceError::Binding(format!(
                "{len} bytes are not the memory of member {} of {}",
                share.rank, share.members
            )));
        }
        Ok(Self {
            share,
            memory,
            met: AtomicU64::new(0),
            alive: Box::new(alive),
        })
    }

    /// Which member it is of how many.
    pub fn share(&self) -> Share {
        self.share
    }

    /// One of a member's counters, as all can see.
    fn counter(&self, rank: usize, which: usize) -> &AtomicU64 {
        let (start, _) = self.memory.span();
        // SAFETY: `new` has seen that so many cache lines of each member lie at the beginning, aligned. They are only used as
        // atomics by all processes, and stay while `self` lives.
        unsafe {
            &*start
                .add((rank * Self::COUNTERS + which) * ALIGNMENT)
                .cast::<AtomicU64>()
        }
    }

    /// How often a member has met the others.
    fn arrived(&self, rank: usize) -> &AtomicU64 {
        self.counter(rank, 0)
    }

    /// Where the piece of a member lies that is given in the meeting after `met`.
    fn piece(&self, met: u64, rank: usize) -> *mut u8 {
        let (start, _) = self.memory.span();
        let place = (met % 2) as usize * self.share.members + rank;
        let counters = self.share.members * Self::COUNTERS * ALIGNMENT;
        // SAFETY: `new` has seen that there are two pieces of each member behind the cache lines.
        unsafe { start.add(counters + place * PIECE) }
    }

    /// Where in the ring that a member hands bytes over in the byte with this number lies, and how many there are up to the
    /// ring's end.
    fn handed(&self, rank: usize, number: u64) -> (*mut u8, usize) {
        let (start, _) = self.memory.span();
        let before = self.share.members * (Self::COUNTERS * ALIGNMENT + 2 * PIECE);
        let at = (number % HANDED as u64) as usize;
        // SAFETY: `new` has seen that there is a ring of each member behind the pieces, and `at` is within it.
        let place = unsafe { start.add(before + rank * HANDED + at) };
        (place, HANDED - at)
    }

    /// Waits until something is so that others bring about, on behalf of `op`.
    fn wait(&self, op: &'static str, is_so: impl Fn() -> bool) -> Result<(), DeviceError> {
        let mut looks = 0u32;
        while !is_so() {
            looks = looks.checked_add(1).unwrap_or(AWAKE);
            if looks < SPINS {
                std::hint::spin_loop();
            } else {
                match looks < AWAKE {
                    true => thread::yield_now(),
                    false => thread::sleep(NAP),
                }
                if looks.is_multiple_of(YIELDS) && !(self.alive)() {
                    return Err(DeviceError::Failed {
                        backend: "cpu",
                        op,
                        why: "another member of its communicator is gone".to_owned(),
                    });
                }
            }
        }
        Ok(())
    }

    /// Waits until all others are at the meeting after `met`.
    fn meet(&self, met: u64) -> Result<(), DeviceError> {
        self.arrived(self.share.rank)
            .store(met + 1, Ordering::Release);
        for rank in 0..self.share.members {
            self.wait("all_gather", || {
                self.arrived(rank).load(Ordering::Acquire) > met
            })?;
        }
        Ok(())
    }

    /// Hands bytes to the next member, or, as the last one, to the first. Waits while more of them than fit have not been
    /// taken. One thread of a process does so at a time.
    ///
    /// # Errors
    /// [`DeviceError::Failed`] when another member is gone.
    pub fn hand_on(&self, mut bytes: &[u8]) -> Result<(), DeviceError> {
        let rank = self.share.rank;
        let (handed, taken) = (self.counter(rank, 1), self.counter(rank, 2));
        let mut number = handed.load(Ordering::Relaxed);
        while !bytes.is_empty() {
            // What another process says is no reason to leave the ring.
            let free = || {
                let waiting = number.wrapping_sub(taken.load(Ordering::Acquire));
                (HANDED as u64).saturating_sub(waiting) as usize
            };
            self.wait("hand_on", || free() > 0)?;
            let (place, whole) = self.handed(rank, number);
            let (now, later) = bytes.split_at(free().min(whole).min(bytes.len()));
            // SAFETY: so many bytes lie there within the ring, and whoever takes reads none that are not counted as handed.
            unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), place, now.len()) };
            number = number.wrapping_add(now.len() as u64);
            handed.store(number, Ordering::Release);
            bytes = later;
        }
        Ok(())
    }

    /// Takes bytes from the member before this one, or, as the first, from the last. Waits until there are so many. One thread
    /// of a process does so at a time.
    ///
    /// # Errors
    /// [`DeviceError::Failed`] when another member is gone.
    pub fn take(&self, mut bytes: &mut [u8]) -> Result<(), DeviceError> {
        let Share { rank, members } = self.share;
        let from = (rank + members - 1) % members;
        let (handed, taken) = (self.counter(from, 1), self.counter(from, 2));
        let mut number = taken.load(Ordering::Relaxed);
        while !bytes.is_empty() {
            let there = || {
                let waiting = handed.load(Ordering::Acquire).wrapping_sub(number);
                waiting.min(HANDED as u64) as usize
            };
            self.wait("take", || there() > 0)?;
            let (place, whole) = self.handed(from, number);
            let (now, later) = bytes.split_at_mut(there().min(whole).min(bytes.len()));
            // SAFETY: so many bytes lie there within the ring, and whoever hands on overwrites none that are not counted as taken.
            unsafe { std::ptr::copy_nonoverlapping(place, now.as_mut_ptr(), now.len()) };
            number = number.wrapping_add(now.len() as u64);
            taken.store(number, Ordering::Release);
            bytes = later;
        }
        Ok(())
    }

    /// Gives the others `rows` rows of `width` bytes each at `mine`, and puts those of all members, row by row one
    /// after another, to `all`.
    ///
    /// # Errors
    /// [`DeviceError::Failed`] when another member is gone.
    ///
    /// # Safety
    /// There are so many bytes to read at `mine`, and as many times as there are members to write at `all`, and nobody else
    /// touches them meanwhile. No other thread is in here.
    pub unsafe fn all_gather(
        &self,
        mine: *const u8,
        all: *mut u8,
        rows: usize,
        width: usize,
    ) -> Result<(), DeviceError> {
        let Share { rank, members } = self.share;
        let total = rows * width;
        let mut at = 0;
        while at < total {
            let n = PIECE.min(total - at);
            let met = self.met.load(Ordering::Relaxed);
            // SAFETY: the piece has room for `n`, nobody reads it before the meeting, and those who read what was
            // there two meetings ago had done so when they came to the last one.
            unsafe { std::ptr::copy_nonoverlapping(mine.add(at), self.piece(met, rank), n) };
            self.meet(met)?;
            self.met.store(met + 1, Ordering::Relaxed);
            for of in 0..members {
                let piece = self.piece(met, of);
                // By rows, of which the first and the last may be cut.
                let mut done = 0;
                while done < n {
                    let (row, column) = ((at + done) / width, (at + done) % width);
                    let len = (width - column).min(n - done);
                    let to = (row * members + of) * width + column;
                    // SAFETY: its member wrote it before it came to the meeting, and `to + len` is at most all rows of all.
                    unsafe { std::ptr::copy_nonoverlapping(piece.add(done), all.add(to), len) };
                    done += len;
                }
            }
            at += n;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    /// Zeroes that threads share as processes would.
    #[derive(Clone)]
    struct Shared(Arc<crate::host::Staging>);

    // SAFETY: the memory is the value's own; nobody has a reference into it.
    unsafe impl SharedRegion for Shared {
        fn span(&self) -> (*mut u8, usize) {
            (self.0.0.start(), self.0.0.bytes())
        }
    }

    fn members(count: usize) -> Vec<Communicator> {
        let memory = crate::host::Staging::new("a test", Communicator::bytes(count)).unwrap();
        let memory = Shared(Arc::new(memory));
        let member = |rank| {
            let share = Share {
                rank,
                members: count,
            };
            Communicator::new(share, Box::new(memory.clone()), || true).unwrap()
        };
        (0..count).map(member).collect()
    }

    /// What a member gives at a place of a meeting.
    fn byte(meeting: usize, rank: usize, at: usize) -> u8 {
        (meeting * 31 + rank * 97 + at * 7) as u8
    }

    #[test]
    fn each_member_has_all_rows_of_all_whatever_their_size() {
        // None, small ones, pieces that end in the middle of a row, and rows that are longer than a piece.
        let whole = match cfg!(miri) {
            true => vec![(0, 4), (3, 5)],
            false => vec![(0, 4), (3, 5), (1, PIECE), (700, 4100), (3, PIECE + 9)],
        };
        for count in [1, 2, 3] {
            thread::scope(|scope| {
                for member in members(count) {
                    let sizes = whole.clone();
                    scope.spawn(move || {
                        let rank = member.share().rank;
                        for (meeting, (rows, width)) in
                            sizes.into_iter().cycle().take(20).enumerate()
                        {
                            let bytes = rows * width;
                            let mine: Vec<u8> =
                                (0..bytes).map(|at| byte(meeting, rank, at)).collect();
                            let mut all = vec![0; bytes * count];
                            // SAFETY: both are as long as that, and this thread's.
                            unsafe {
                                member.all_gather(mine.as_ptr(), all.as_mut_ptr(), rows, width)
                            }
                            .unwrap();
                            for (place, found) in all.into_iter().enumerate() {
                                let (row, column) = (place / width / count, place % width);
                                let of = place / width % count;
                                assert_eq!(found, byte(meeting, of, row * width + column));
                            }
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn what_is_handed_round_comes_back_whole() {
        // None, small ones, and more than there is room for.
        let sizes = match cfg!(miri) {
            true => vec![0, 4, 100],
            false => vec![0, 1, 4, 4099, HANDED - 7, HANDED, 3 * HANDED + 5, 12],
        };
        for count in [1, 2, 3] {
            thread::scope(|scope| {
                for member in members(count) {
                    let sizes = sizes.clone();
                    scope.spawn(move || {
                        let rank = member.share().rank;
                        for (round, size) in sizes.into_iter().enumerate() {
                            let own: Vec<u8> = (0..size).map(|at| byte(round, 0, at)).collect();
                            let mut taken = vec![0; size];
                            match (rank, count) {
                                // Nobody else takes what it hands on.
                                (_, 1) if size > HANDED => continue,
                                (0, _) => {
                                    member.hand_on(&own).unwrap();
                                    member.take(&mut taken).unwrap();
                                }
                                _ => {
                                    member.take(&mut taken).unwrap();
                                    member.hand_on(&taken).unwrap();
                                }
                            }
                            assert!(taken == own, "{size} bytes of member {rank} of {count}");
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn what_another_member_says_keeps_nobody_in_the_ring() {
        let mut both = members(2).into_iter();
        let (first, second) = (both.next().unwrap(), both.next().unwrap());
        // More was taken than was handed on, and more was handed on than there is room for.
        first.counter(0, 2).store(u64::MAX - 3, Ordering::Release);
        first.hand_on(&[7; 64]).unwrap();
        first.counter(0, 1).store(u64::MAX - 9, Ordering::Release);
        let mut taken = vec![0; HANDED + 64];
        second.take(&mut taken[..16]).unwrap();
        first.counter(1, 1).store(u64::MAX, Ordering::Release);
        first.take(&mut taken).unwrap();
    }

    #[test]
    fn who_waits_for_one_that_is_gone_is_told() {
        let memory = crate::host::Staging::new("a test", Communicator::bytes(2)).unwrap();
        let share = Share {
            rank: 0,
            members: 2,
        };
        let member =
            Communicator::new(share, Box::new(Shared(Arc::new(memory))), || false).unwrap();
        let handed = member.hand_on(&vec![1; HANDED + 1]);
        assert!(matches!(handed, Err(DeviceError::Failed { .. })));
        let taken = member.take(&mut [0]);
        assert!(matches!(taken, Err(DeviceError::Failed { .. })));
        let mut all = [0; 8];
        // SAFETY: four bytes to read, eight to write.
        let gathered = unsafe { member.all_gather([1; 4].as_ptr(), all.as_mut_ptr(), 1, 4) };
        assert!(matches!(gathered, Err(DeviceError::Failed { .. })));
    }

    #[test]
    fn memory_that_is_too_small_is_refused() {
        let memory = crate::host::Staging::new("a test", Communicator::bytes(2) - 1).unwrap();
        let share = Share {
            rank: 0,
            members: 2,
        };
        let member = Communicator::new(share, Box::new(Shared(Arc::new(memory))), || true);
        assert!(matches!(member, Err(DeviceError::Binding(_))));
    }

    #[test]
    fn parts_are_equal_or_all() {
        let half = Share {
            rank: 1,
            members: 2,
        };
        assert_eq!((half.of(6), half.of(7), Share::default().of(6)), (3, 7, 6));
        assert_eq!((half.range(6), half.range(7)), (3..6, 0..7));
    }
}

//! Where the engine notes its steps while somebody watches.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use hotcell_proto::limits;

/// One step of token requests.
#[derive(Clone, Copy, Debug)]
pub struct StepNote {
    /// When it began.
    pub begun: Instant,
    /// How long it took, and the part of that in which the device computed.
    pub whole: Duration,
    /// See `whole`.
    pub computing: Duration,
    /// Rows that were computed.
    pub rows: usize,
    /// Sequences that they were of.
    pub sequences: usize,
    /// Tokens that were drawn.
    pub drawn: usize,
}

#[derive(Debug, Default)]
struct Notes {
    ring: VecDeque<StepNote>,
    /// How many came before the first one that is kept.
    before: u64,
}

/// What the engine writes and watchers read. Without a watcher the engine reads one number per step.
#[derive(Debug, Default)]
pub struct Observer {
    watchers: AtomicUsize,
    notes: Mutex<Notes>,
}

impl Observer {
    fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether anybody watches.
    #[inline]
    pub fn is_watched(&self) -> bool {
        self.watchers.load(Ordering::Relaxed) > 0
    }

    /// Notes a step.
    pub fn note(&self, step: StepNote) {
        let mut notes = self.notes();
        if notes.ring.len() >= limits::MAX_WATCHED_STEPS {
            notes.ring.pop_front();
            notes.before += 1;
        }
        notes.ring.push_back(step);
    }

    /// One more watcher, of what comes from now on; none if there are too many.
    pub fn watch(self: &Arc<Self>) -> Option<Watching> {
        let more = |n: usize| (n < limits::MAX_DEBUGGERS).then_some(n + 1);
        let order = (Ordering::AcqRel, Ordering::Acquire);
        let entered = self.watchers.fetch_update(order.0, order.1, more);
        entered.ok()?;
        let notes = self.notes();
        let next = notes.before + notes.ring.len() as u64;
        drop(notes);
        Some(Watching {
            observer: Arc::clone(self),
            next,
        })
    }
}

/// A watcher, until it is dropped.
#[derive(Debug)]
pub struct Watching {
    observer: Arc<Observer>,
    /// Number of the first step that it has not seen.
    next: u64,
}

impl Watching {
    /// The steps since it last asked, and how many of them are lost.
    pub fn steps(&mut self) -> (Vec<StepNote>, u64) {
        let notes = self.observer.notes();
        let missed = notes.before.saturating_sub(self.next);
        let skip = self.next.saturating_sub(notes.before);
        let skip = usize::try_from(skip).unwrap_or(usize::MAX);
        let steps = notes.ring.iter().skip(skip).copied().collect();
        self.next = notes.before + notes.ring.len() as u64;
        (steps, missed)
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        if self.observer.watchers.fetch_sub(1, Ordering::AcqRel) == 1 {
            let mut notes = self.observer.notes();
            notes.before += notes.ring.len() as u64;
            notes.ring = VecDeque::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(rows: usize) -> StepNote {
        StepNote {
            begun: Instant::now(),
            whole: Duration::from_millis(2),
            computing: Duration::from_millis(1),
            rows,
            sequences: 1,
            drawn: 1,
        }
    }

    #[test]
    fn a_watcher_sees_each_step_once_and_is_told_what_it_missed() {
        let observer = Arc::new(Observer::default());
        assert!(!observer.is_watched());
        let mut one = observer.watch().unwrap();
        assert!(observer.is_watched());
        observer.note(step(1));
        let mut two = observer.watch().unwrap();
        observer.note(step(2));
        let rows = |w: &mut Watching| w.steps().0.iter().map(|s| s.rows).collect::<Vec<_>>();
        assert_eq!(rows(&mut one), [1, 2]);
        assert_eq!(rows(&mut two), [2]);
        assert_eq!(rows(&mut one), []);
        let most = limits::MAX_WATCHED_STEPS;
        (0..most + 3).for_each(|n| observer.note(step(n)));
        let (steps, missed) = one.steps();
        assert_eq!((steps.len(), missed, steps[0].rows), (most, 3, 3));
        drop((one, two));
        assert!(!observer.is_watched());
        assert_eq!(observer.notes().ring.capacity(), 0, "nothing is kept");
    }

    #[test]
    fn there_are_as_many_watchers_as_there_may_be() {
        let observer = Arc::new(Observer::default());
        let all: Vec<_> = (0..limits::MAX_DEBUGGERS)
            .map(|_| observer.watch().unwrap())
            .collect();
        assert!(observer.watch().is_none());
        drop(all);
        assert!(observer.watch().is_some());
    }
}

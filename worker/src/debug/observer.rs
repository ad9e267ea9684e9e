//! Where the engine notes its steps while somebody watches.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use hotcell_proto::{limits, plan_part::PlanPart};

/// One step of token requests.
#[derive(Clone, Copy, Debug)]
pub struct StepNote {
    /// When it began.
    pub begun: Instant,
    /// How long it took, and the part of that in which the device computed.
    pub whole: Duration,
    /// See `whole`.
    pub computing: Duration,
    /// When that began.
    pub computing_from: Instant,
    /// Rows that were computed.
    pub rows: usize,
    /// Those of them that read a prompt, or what had been drawn before.
    pub reading: usize,
    /// Sequences that they were of.
    pub sequences: usize,
    /// Tokens that were drawn.
    pub drawn: usize,
}

/// A request that waited, until it had a place in the batch.
#[derive(Clone, Debug)]
pub struct WaitNote {
    /// The request's id.
    pub request: String,
    /// When it began to.
    pub begun: Instant,
    /// How long it did.
    pub took: Duration,
}

/// What a plan did between two meetings of its threads.
#[derive(Clone, Copy, Debug)]
pub struct NodeNote {
    /// When that began.
    pub begun: Instant,
    /// How long it took.
    pub took: Duration,
    /// The node that began last in it, packed, and the plan that it is in, if that is known.
    pub node: u64,
    /// See `node`.
    pub part: Option<PlanPart>,
    /// Of those that compute a model together, the one that did it; 0 leads.
    pub member: u16,
}

/// Something that was copied to the device or from it, as the host saw it.
#[derive(Clone, Copy, Debug)]
pub struct CopyNote {
    /// When that began.
    pub begun: Instant,
    /// How long it took.
    pub took: Duration,
    /// What it was.
    pub what: &'static str,
    /// How much of it.
    pub bytes: usize,
}

/// A stretch of computing a client's graph: all of a call, or as much as was computed until something else went first.
#[derive(Clone, Copy, Debug)]
pub struct CallNote {
    /// When that began.
    pub begun: Instant,
    /// How long it took.
    pub took: Duration,
    /// Rows that the call is for.
    pub rows: usize,
    /// Steps of its plan.
    pub steps: u32,
}

/// The latest notes of a kind.
#[derive(Debug)]
struct Ring<T> {
    notes: VecDeque<T>,
    /// How many came before the first one that is kept.
    before: u64,
}

impl<T> Default for Ring<T> {
    fn default() -> Self {
        Self {
            notes: VecDeque::new(),
            before: 0,
        }
    }
}

impl<T: Clone> Ring<T> {
    fn push(&mut self, note: T, most: usize) {
        if self.notes.len() >= most {
            self.notes.pop_front();
            self.before += 1;
        }
        self.notes.push_back(note);
    }

    /// The number of the next one.
    fn next(&self) -> u64 {
        self.before + self.notes.len() as u64
    }

    /// Those from this number on, and how many of them are lost.
    fn from(&self, number: u64) -> (Vec<T>, u64) {
        let missed = self.before.saturating_sub(number);
        let skip = usize::try_from(number.saturating_sub(self.before)).unwrap_or(usize::MAX);
        (self.notes.iter().skip(skip).cloned().collect(), missed)
    }

    fn forget(&mut self) {
        self.before = self.next();
        self.notes = VecDeque::new();
    }
}

#[derive(Debug, Default)]
struct Notes {
    steps: Ring<StepNote>,
    nodes: Ring<NodeNote>,
    /// Until then no step's nodes are noted.
    rest_until: Option<Instant>,
    waits: Ring<WaitNote>,
    copies: Ring<CopyNote>,
    calls: Ring<CallNote>,
}

/// A second's share of [`limits::TRACED_NODES_PER_SECOND`].
const REST: Duration = Duration::from_nanos(1_000_000_000 / limits::TRACED_NODES_PER_SECOND);

impl Notes {
    /// Notes of nodes rest for as long as so many may take, which a step's may come in several goes of.
    fn rest(&mut self, count: usize) {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        let since = self.rest_until.unwrap_or_else(Instant::now);
        let since = since.max(Instant::now());
        self.rest_until = since.checked_add(REST.saturating_mul(count));
    }
}

/// What the engine writes and watchers read. Without a watcher the engine reads one number per step.
#[derive(Debug, Default)]
pub struct Observer {
    watchers: AtomicUsize,
    /// Those of them who want to know of nodes.
    tracers: AtomicUsize,
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

    /// Whether anybody wants to know of nodes.
    #[inline]
    pub fn is_traced(&self) -> bool {
        self.tracers.load(Ordering::Relaxed) > 0
    }

    /// Whether the next step's nodes are to be noted: those of as many steps as may be told in a second. Of a model whose
    /// steps are short they are too many for whoever writes, passes on and reads them beside those who are served.
    pub fn follows(&self) -> bool {
        let rested = |notes: &Notes| notes.rest_until.is_none_or(|until| until <= Instant::now());
        self.is_traced() && rested(&self.notes())
    }

    /// Notes a step.
    pub fn note(&self, step: StepNote) {
        self.notes().steps.push(step, limits::MAX_WATCHED_STEPS);
    }

    /// Notes that a request waits no more.
    pub fn note_wait(&self, wait: WaitNote) {
        self.notes().waits.push(wait, limits::MAX_WATCHED_STEPS);
    }

    /// Notes that a client's graph was computed.
    pub fn note_call(&self, call: CallNote) {
        self.notes().calls.push(call, limits::MAX_WATCHED_STEPS);
    }

    /// Notes what a step's plans did.
    pub fn note_nodes(&self, nodes: &[NodeNote]) {
        if !self.is_traced() {
            return;
        }
        let mut notes = self.notes();
        notes.rest(nodes.len());
        for node in nodes {
            notes.nodes.push(*node, limits::MAX_TRACED_NODES);
        }
    }

    /// Notes what was copied.
    pub fn note_copies(&self, copies: &[CopyNote]) {
        if copies.is_empty() || !self.is_traced() {
            return;
        }
        let mut notes = self.notes();
        notes.rest(copies.len());
        for copy in copies {
            notes.copies.push(*copy, limits::MAX_TRACED_NODES);
        }
    }

    /// One more watcher, of what comes from now on, nodes too if it `traces`; none if there are too many.
    pub fn watch(self: &Arc<Self>, traces: bool) -> Option<Watching> {
        let since = Instant::now();
        let more = |n: usize| (n < limits::MAX_DEBUGGERS).then_some(n + 1);
        let order = (Ordering::AcqRel, Ordering::Acquire);
        let entered = self.watchers.fetch_update(order.0, order.1, more);
        entered.ok()?;
        if traces {
            self.tracers.fetch_add(1, Ordering::AcqRel);
        }
        let notes = self.notes();
        let (next_step, next_node) = (notes.steps.next(), notes.nodes.next());
        let (next_wait, next_copy) = (notes.waits.next(), notes.copies.next());
        let next_call = notes.calls.next();
        drop(notes);
        Some(Watching {
            observer: Arc::clone(self),
            traces,
            since,
            next_step,
            next_node,
            next_wait,
            next_copy,
            next_call,
        })
    }
}

/// A watcher, until it is dropped.
#[derive(Debug)]
pub struct Watching {
    observer: Arc<Observer>,
    traces: bool,
    since: Instant,
    /// Numbers of the first step and node that it has not seen.
    next_step: u64,
    next_node: u64,
    next_wait: u64,
    next_copy: u64,
    next_call: u64,
}

impl Watching {
    /// When it began. Of a step that is noted node by node because of this watcher no node began before.
    pub fn since(&self) -> Instant {
        self.since
    }

    /// The steps since it last asked, and how many of them are lost.
    pub fn steps(&mut self) -> (Vec<StepNote>, u64) {
        let notes = self.observer.notes();
        let steps = notes.steps.from(self.next_step);
        self.next_step = notes.steps.next();
        steps
    }

    /// Requests that ceased to wait since it last asked; of those that are lost nobody is told.
    pub fn waits(&mut self) -> Vec<WaitNote> {
        let notes = self.observer.notes();
        let (waits, _) = notes.waits.from(self.next_wait);
        self.next_wait = notes.waits.next();
        waits
    }

    /// Clients' graphs that were computed since it last asked; of those that are lost nobody is told.
    pub fn calls(&mut self) -> Vec<CallNote> {
        let notes = self.observer.notes();
        let (calls, _) = notes.calls.from(self.next_call);
        self.next_call = notes.calls.next();
        calls
    }

    /// Copies since it last asked, if it traces; of those that are lost nobody is told.
    pub fn copies(&mut self) -> Vec<CopyNote> {
        if !self.traces {
            return Vec::new();
        }
        let notes = self.observer.notes();
        let (copies, _) = notes.copies.from(self.next_copy);
        self.next_copy = notes.copies.next();
        copies
    }

    /// The nodes since it last asked, if it traces, and how many of them are lost.
    pub fn nodes(&mut self) -> (Vec<NodeNote>, u64) {
        if !self.traces {
            return (Vec::new(), 0);
        }
        let notes = self.observer.notes();
        let nodes = notes.nodes.from(self.next_node);
        self.next_node = notes.nodes.next();
        nodes
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        let observer = &self.observer;
        if self.traces && observer.tracers.fetch_sub(1, Ordering::AcqRel) == 1 {
            let mut notes = observer.notes();
            notes.nodes.forget();
            notes.copies.forget();
            notes.rest_until = None;
        }
        if observer.watchers.fetch_sub(1, Ordering::AcqRel) == 1 {
            let mut notes = observer.notes();
            notes.steps.forget();
            notes.waits.forget();
            notes.calls.forget();
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
            computing_from: Instant::now(),
            rows,
            reading: 0,
            sequences: 1,
            drawn: 1,
        }
    }

    #[test]
    fn a_watcher_sees_each_step_once_and_is_told_what_it_missed() {
        let observer = Arc::new(Observer::default());
        assert!(!observer.is_watched());
        let mut one = observer.watch(false).unwrap();
        assert!(observer.is_watched());
        observer.note(step(1));
        let mut two = observer.watch(false).unwrap();
        observer.note(step(2));
        let rows = |w: &mut Watching| w.steps().0.iter().map(|s| s.rows).collect::<Vec<_>>();
        assert_eq!(rows(&mut one), [1, 2]);
        assert_eq!(rows(&mut two), [2]);
        assert!(rows(&mut one).is_empty());
        let most = limits::MAX_WATCHED_STEPS;
        (0..most + 3).for_each(|n| observer.note(step(n)));
        let (steps, missed) = one.steps();
        assert_eq!((steps.len(), missed, steps[0].rows), (most, 3, 3));
        drop((one, two));
        assert!(!observer.is_watched());
        assert_eq!(
            observer.notes().steps.notes.capacity(),
            0,
            "nothing is kept"
        );
    }

    #[test]
    fn nodes_are_noted_for_those_who_trace() {
        let observer = Arc::new(Observer::default());
        let mut watcher = observer.watch(false).unwrap();
        assert!(!observer.is_traced());
        let mut tracer = observer.watch(true).unwrap();
        assert!(observer.is_traced());
        let node = |node| NodeNote {
            begun: Instant::now(),
            took: Duration::from_micros(5),
            node,
            part: None,
            member: 0,
        };
        assert!(observer.follows());
        observer.note_nodes(&[node(1), node(2)]);
        observer.note(step(1));
        assert_eq!(
            tracer.nodes().0.iter().map(|n| n.node).collect::<Vec<_>>(),
            [1, 2]
        );
        assert_eq!((tracer.nodes().0.len(), tracer.steps().0.len()), (0, 1));
        // So many that the next steps' have to be left out.
        let second = usize::try_from(limits::TRACED_NODES_PER_SECOND).unwrap();
        observer.note_nodes(&vec![node(3); 60 * second]);
        assert!(!observer.follows());
        observer.note_nodes(&[node(4)]);
        assert!(!observer.follows(), "few of them end no rest");
        drop(tracer);
        assert!(!observer.is_traced() && observer.is_watched());
        assert_eq!((watcher.nodes().0.len(), watcher.steps().0.len()), (0, 1));
        let _again = observer.watch(true).unwrap();
        assert!(observer.follows());
    }

    #[test]
    fn there_are_as_many_watchers_as_there_may_be() {
        let observer = Arc::new(Observer::default());
        let all: Vec<_> = (0..limits::MAX_DEBUGGERS)
            .map(|_| observer.watch(false).unwrap())
            .collect();
        assert!(observer.watch(false).is_none());
        drop(all);
        assert!(observer.watch(false).is_some());
    }
}

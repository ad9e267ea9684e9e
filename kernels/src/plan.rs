//! The plan: a graph made ready for a device, once, and executed many times.

use std::{
    any::Any,
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant},
};

use hotcell_graph::Graph;

use crate::backend::{Buffer, DeviceError};

/// How a plan is made.
#[derive(Clone, Copy, Debug)]
pub struct PlanHints {
    /// Allocate its memory. `false`: a dry run whose [`Plan::memory`] says what it would take.
    pub allocate: bool,
    /// Replace every kernel by one that does nothing, to measure what a step costs besides them.
    pub empty_kernels: bool,
    /// Refuse, before anything is allocated, a plan that would allocate more bytes.
    pub max_bytes: Option<usize>,
    /// Make one kernel of nodes that can be: elementwise ops, and on CUDA others that follow one another. The results have the same bits
    /// either way.
    pub fuse: bool,
    /// Compute threads that executions use at most (one at least), where the device has several; `None`: all of them.
    /// The results have the same bits either way.
    pub threads: Option<usize>,
    /// Whether all members of the device's [communicator](crate::communicator) execute it, each its own part, at the same
    /// time. Without it `all_gather` is refused.
    pub together: bool,
    /// What its first step counts as in the [trail](crate::backend::Trail), for a plan that is a part of another one.
    pub first_step: usize,
}

impl Default for PlanHints {
    fn default() -> Self {
        Self {
            allocate: true,
            empty_kernels: false,
            max_bytes: None,
            fuse: true,
            threads: None,
            together: false,
            first_step: 0,
        }
    }
}

/// Memory of a plan, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlanMemory {
    /// Arena for intermediate values; what it would be without sharing places is `unshared`.
    pub arena: usize,
    /// The same if every intermediate value had a place of its own.
    pub unshared: usize,
    /// Steps that will run, and barriers between them.
    pub steps: usize,
    /// Barriers among the steps.
    pub barriers: usize,
}

/// Does what is long about a plan on any thread: a device's own thread has other things to do.
pub trait Planner: Send + Sync {
    /// All of [`Device::plan`](crate::backend::Device::plan) but the plan's memory. Of the hints, `allocate` and
    /// `max_bytes` are [`Device::finish`](crate::backend::Device::finish)'s.
    ///
    /// # Errors
    /// As [`Device::plan`](crate::backend::Device::plan).
    fn prepare(&self, graph: &Graph, hints: &PlanHints) -> Result<Box<dyn Prepared>, DeviceError>;
}

/// What a [`Planner`] made, for the device that it is of.
pub trait Prepared: Send {
    /// What the plan will take.
    fn memory(&self) -> PlanMemory;

    /// For the device, which knows its own.
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

/// Why a prepared plan was not finished.
pub struct Unfinished {
    /// What is wrong.
    pub error: DeviceError,
    /// To try again; `None`: it is of another device.
    pub prepared: Option<Box<dyn Prepared>>,
}

impl Unfinished {
    /// The answer to what another device's planner made.
    pub fn foreign() -> Self {
        Self {
            error: DeviceError::Binding("the plan was prepared for another device".to_owned()),
            prepared: None,
        }
    }
}

/// What a buffer is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// An input of the graph, by index.
    Input(usize),
    /// An output of the graph, by index.
    Output(usize),
}

/// When a step of a plan ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timed {
    /// The step, as [`Trail::pack`](crate::backend::Trail) names it; 0 without a trail.
    pub mark: u64,
    /// When it began.
    pub begun: Instant,
    /// How long it took.
    pub took: Duration,
}

/// What a step of a plan computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The graph's node, of several that are computed as one the last.
    pub node: u32,
    /// The op that runs, as the trail tells it: the node's, or one of those that a device without it computes instead.
    pub op: &'static str,
}

/// A graph made ready for a device.
pub trait Plan {
    /// Binds a buffer, from `offset`, to an input or output. Binding again replaces.
    ///
    /// # Errors
    /// [`DeviceError::Binding`] when it is too small, at an odd address, or read-only where the graph writes.
    fn bind(&mut self, slot: Slot, buffer: &Buffer, offset: usize) -> Result<(), DeviceError> {
        self.bind_for(usize::MAX, slot, buffer, offset)
    }

    /// The same for executions of at most `rows` rows, for which the buffer need only be large enough.
    ///
    /// # Errors
    /// As [`Plan::bind`].
    fn bind_for(
        &mut self,
        rows: usize,
        slot: Slot,
        buffer: &Buffer,
        offset: usize,
    ) -> Result<(), DeviceError>;

    /// Binds another form of an input, from which the plan computes the very same bits in less time: weights as
    /// [`pack`](crate::cpu::pack) makes them. The input itself must be bound as well. Binding nothing goes
    /// back to it. Says whether the plan has use for such a form.
    ///
    /// # Errors
    /// [`DeviceError::Binding`] when the buffer is too small or elsewhere.
    fn bind_packed(
        &mut self,
        slot: Slot,
        buffer: Option<&Buffer>,
        offset: usize,
    ) -> Result<bool, DeviceError> {
        let _ = (slot, buffer, offset);
        Ok(false)
    }

    /// From now until [`Plan::release`], executions end with [`DeviceError::Stopped`] soon after `flag` is set, also
    /// in the middle of a long step. Outputs are then unspecified; effects on caches may be partial.
    fn stop_when(&mut self, flag: Arc<AtomicBool>);

    /// Forgets all bindings, so that the plan keeps no buffer alive.
    fn release(&mut self);

    /// What it takes.
    fn memory(&self) -> PlanMemory;

    /// What each step computes; `None` for a step of no node. Empty: the device cannot tell. By the same numbers as the
    /// [trail](crate::backend::Trail) has, where steps of a part on another device count, too.
    fn origins(&self) -> Vec<Option<Origin>> {
        Vec::new()
    }

    /// Whether executions write output `i` and never read it, not even what they wrote: then its memory may be such as
    /// others change at any time.
    fn only_writes(&self, i: usize) -> bool {
        let _ = i;
        false
    }

    /// Whether input `i` can have a part in where an execution reads or writes; `None`: the device cannot tell. Memory that
    /// others change at any time may be bound to an input that has none, and to no other: it makes the results
    /// arbitrary, and reaches no memory but theirs.
    fn reads_as_index(&self, i: usize) -> Option<bool> {
        let _ = i;
        None
    }

    /// Whether an execution, with any number of rows, takes less time than handing it to another thread does.
    fn is_small(&self) -> bool {
        false
    }

    /// Runs it for `rows` rows; a [`Stream`](crate::backend::Stream) calls this in its order.
    ///
    /// # Errors
    /// [`DeviceError::Binding`] while something is unbound or overlaps what the graph writes, [`DeviceError::IndexOutOfRange`] when an
    /// index tensor points outside. Outputs are then unspecified; effects on caches may be partial.
    fn execute(&mut self, rows: usize) -> Result<(), DeviceError> {
        self.execute_from(rows, 0, &|| false).map(|_| ())
    }

    /// Runs the steps from `from` for `rows` rows, and asks `pause` between them now and then. When it says so, the
    /// step to go on from is returned, else `None` at the end. Between the slices of one execution nothing may be
    /// bound anew, and no other execution of the plan begun.
    ///
    /// # Errors
    /// See [`Plan::execute`]; [`DeviceError::Binding`] when there is no such step.
    fn execute_from(
        &mut self,
        rows: usize,
        from: usize,
        pause: &dyn Fn() -> bool,
    ) -> Result<Option<usize>, DeviceError>;

    /// Runs it for `rows` rows, one step after the other, and says when each ran by the device's own clock. `None`: it has
    /// none, nothing was run, and between two pauses of [`Plan::execute_from`] passes the time that their steps take.
    ///
    /// # Errors
    /// See [`Plan::execute`].
    fn execute_timed(&mut self, rows: usize) -> Result<Option<Vec<Timed>>, DeviceError> {
        let _ = rows;
        Ok(None)
    }
}

//! What the engine is told when it starts, and what it says about its device and its models.

use std::{
    collections::BTreeSet,
    fmt,
    sync::{Arc, atomic::AtomicU64},
};

use hotcell_graph::{DType, op::catalogue};
use hotcell_ipc::blackbox::{Node, Writer};
use hotcell_kernels::{
    backend::{BufferType, DeviceInfo, Trail},
    plan::Planner,
    registry::Registry,
};

use crate::model::run::{EACH, Keeps, RunShape};

/// What the engine says about a model that it made ready.
#[derive(Debug)]
pub struct Ready {
    /// Sizes it runs with.
    pub shape: RunShape,
    /// The weights that it would rather have packed.
    pub packable: BTreeSet<String>,
    /// What of it outlives this process.
    pub keeps: Keeps,
}

/// What the engine says about its device when it starts.
#[derive(Clone, Debug)]
pub struct Opened {
    /// The device.
    pub info: DeviceInfo,
    /// Its part of the numerics class.
    pub numerics: String,
    /// Whether equal inputs give equal bits.
    pub reproducible: bool,
    /// Ops it has kernels for.
    pub ops: Vec<&'static str>,
    /// What it allocates from.
    pub buffer_types: &'static [BufferType],
    /// The layout in which it likes weights, if it has a say in that.
    pub layout: Option<&'static str>,
    /// Whether weights can outlive this process in its memory.
    pub keeps_weights: bool,
    /// Processes that compute its models with it.
    pub members: usize,
}

/// Who makes the device's plans beside its thread.
#[derive(Clone)]
pub(super) struct Plans(pub Option<Arc<dyn Planner>>);

impl fmt::Debug for Plans {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Plans({})", self.0.is_some())
    }
}

/// The ops as a black box numbers them.
pub fn names() -> impl Iterator<Item = &'static str> {
    catalogue().map(|row| row.name)
}

/// What a device leaves of where it is: its signs of life, and a packed [`Node`].
pub fn trail(progress: &'static AtomicU64, node: &'static AtomicU64) -> Trail {
    Trail {
        progress,
        node,
        pack: |step, op, group| Node { step, op, group }.packed(),
        each: &EACH,
    }
}

/// How the engine runs.
#[derive(Clone)]
pub struct EngineConfig {
    /// Device id.
    pub device: String,
    /// Cores to use; empty: as probed.
    pub cores: Vec<u32>,
    /// Whether each thread that computes stays on one of them.
    pub pins: bool,
    /// How the cache stores numbers.
    pub cache_dtype: DType,
    /// Bytes that each model may take besides its weights; 1 GiB of cache, or one context's, unless told.
    pub model_memory: Option<u64>,
    /// Positions of one sequence at most, whatever the model allows.
    pub max_context: Option<u32>,
    /// Bytes that tensors may take; half of the device's memory unless told.
    pub tensor_memory: Option<u64>,
    /// Where it writes what it does; one that nobody reads unless told.
    pub blackbox: Option<Writer>,
    /// Whether it notes the very node that runs, however long that takes ([`Trail::each`](hotcell_kernels::backend::Trail)).
    pub follow: bool,
    /// Whether it leaves the processor to whoever waits for it, from step to step.
    pub gives_way: bool,
    /// Where it looks for the device.
    pub registry: Registry,
}

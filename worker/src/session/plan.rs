//! A plan under its handle.

use std::cell::{Cell, RefCell};

use hotcell_graph::{Graph, TensorSpec, op::ValueSpec};
use hotcell_kernels::plan::{Plan, PlanMemory};
use hotcell_proto::{error::Error, v1};

use super::account::Charge;
use crate::error::of_graph;

/// A compiled graph.
pub struct PlanEntry {
    /// What runs. Borrowed only while the engine is inside it.
    pub plan: RefCell<Box<dyn Plan>>,
    /// The graph's inputs.
    pub inputs: Vec<ValueSpec>,
    /// Which of these are caches.
    pub caches: Vec<usize>,
    /// The graph's outputs.
    pub outputs: Vec<TensorSpec>,
    /// Rows at most.
    pub max_rows: usize,
    /// What it takes.
    pub memory: v1::PlanMemory,
    /// Calls that have ended well.
    pub executions: Cell<u64>,
    /// The last call took but microseconds.
    pub is_quick: Cell<bool>,
    /// Running work uses its arena.
    pub busy: Cell<bool>,
    /// They end with it: the arena's, and that of its parts.
    pub charges: [Charge; 2],
}

/// A graph's outputs.
///
/// # Errors
/// For a value that is not a tensor, which a verified graph has not.
pub fn outputs(graph: &Graph) -> Result<Vec<TensorSpec>, Error> {
    let mut outputs = Vec::with_capacity(graph.outputs().len());
    for &value in graph.outputs() {
        match graph.spec(value).map_err(|e| of_graph(&e))? {
            ValueSpec::Tensor(spec) => outputs.push(spec),
            _ => return Err(super::invalid("an output is not a tensor")),
        }
    }
    Ok(outputs)
}

/// An error that says what a plan would take.
pub fn with_sizes(error: Error, memory: &v1::PlanMemory) -> Error {
    error
        .with("arena", memory.arena)
        .with("constants", memory.constants)
        .with("inputs", memory.inputs)
        .with("caches", memory.caches)
        .with("outputs", memory.outputs)
}

/// What a plan takes, with the sizes of what the graph reads and gives at the greatest number of rows.
pub fn memory(graph: &Graph, outputs: &[TensorSpec], about: PlanMemory) -> v1::PlanMemory {
    let rows = graph.max_rows();
    let size = |t: &TensorSpec| t.bytes(rows).unwrap_or(usize::MAX) as u64;
    let mut memory = v1::PlanMemory {
        arena: about.arena as u64,
        unshared: about.unshared as u64,
        outputs: outputs.iter().map(size).fold(0, u64::saturating_add),
        steps: u32::try_from(about.steps).unwrap_or(u32::MAX),
        barriers: u32::try_from(about.barriers).unwrap_or(u32::MAX),
        ..v1::PlanMemory::default()
    };
    for input in graph.inputs() {
        let (sum, bytes) = match &input.spec {
            ValueSpec::Tensor(t) if input.constant => (&mut memory.constants, size(t)),
            ValueSpec::Tensor(t) => (&mut memory.inputs, size(t)),
            ValueSpec::Cache(c) => {
                let bytes = c.bytes().unwrap_or(usize::MAX) as u64;
                (&mut memory.caches, bytes)
            }
            ValueSpec::Absent => continue,
        };
        *sum = sum.saturating_add(bytes);
    }
    memory
}

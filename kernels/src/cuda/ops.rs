//! The device's table: op → what makes a kernel for a call of it, or nothing where there is none for such inputs. What is
//! not here is decomposed, or runs on the CPU backend's kernels.

mod attention;
mod create;
mod elementwise;
mod gather;
mod gemm;
mod group;
mod index;
mod layout;
mod matmul;
mod movement;
mod norm;
mod random;
mod reduce;
mod rows;
mod scatter;
mod softmax;
mod sort;
mod wanted;

use std::rc::Rc;

use hotcell_graph::op::Call;

pub(super) use wanted::Wanted;

use super::{gpu::Gpu, join::Following, peers, plan::Side};
use crate::{backend::DeviceError, part::overflow};

/// A call made ready: everything but addresses and rows.
pub(super) trait Kernel {
    /// Bytes that it works in for so many rows; `None`: more than there can be.
    fn scratch(&self, rows: usize) -> Option<usize> {
        let _ = rows;
        Some(0)
    }

    /// What it reads besides, and of which of its step's inputs that is made; its address comes after these.
    fn wants(&self) -> Option<(Wanted, Vec<usize>)> {
        None
    }

    /// A kernel that does the same and makes what is wanted of its last result as well, as one result more.
    fn with(&self, wanted: &Wanted) -> Option<Made> {
        let _ = wanted;
        None
    }

    /// Whether it refuses indices.
    fn reads_indices(&self) -> bool {
        false
    }

    /// Gives it to the device.
    ///
    /// # Errors
    /// What the driver says.
    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError>;
}

/// Where a kernel finds its values.
pub(super) struct Cx<'a> {
    pub gpu: &'a Rc<Gpu>,
    /// Addresses of the inputs, of a step of several nodes of one after the other, and of what it wants; of an absent one, 0.
    pub inputs: &'a [u64],
    pub outputs: &'a [u64],
    /// Address of what [`Kernel::scratch`] asked for.
    pub scratch: u64,
    /// Rows of this execution.
    pub rows: usize,
    /// Where the kernel writes an index that it refuses.
    pub faults: u64,
}

impl Cx<'_> {
    /// Address of input `i`.
    fn input(&self, i: usize) -> Result<u64, DeviceError> {
        self.inputs.get(i).copied().ok_or_else(overflow)
    }

    /// Address of result `i`.
    fn output(&self, i: usize) -> Result<u64, DeviceError> {
        self.outputs.get(i).copied().ok_or_else(overflow)
    }
}

/// A kernel, and the names of what it launches.
pub(super) type Made = (Box<dyn Kernel>, Vec<&'static str>);

/// A number that kernels take as an `int`.
fn int(n: usize) -> Result<u32, DeviceError> {
    let fits = i32::try_from(n).ok();
    fits.map(i32::unsigned_abs).ok_or_else(overflow)
}

/// So many blocks of `each`.
fn blocks_of(n: Option<usize>, each: usize) -> Result<u32, DeviceError> {
    int(n.ok_or_else(overflow)?.div_ceil(each))
}

/// One row of the table.
struct Entry {
    op: &'static str,
    /// The kernel for a call.
    make: fn(&Call<'_>) -> Option<Made>,
}

static TABLES: &[&[Entry]] = &[
    attention::ENTRIES,
    create::ENTRIES,
    &elementwise::ENTRIES,
    &elementwise::FUNCTION_ENTRIES,
    elementwise::OTHERS,
    gemm::ENTRIES,
    index::ENTRIES,
    matmul::ENTRIES,
    movement::VIEWS,
    movement::ENTRIES,
    norm::ENTRIES,
    random::ENTRIES,
    &reduce::ENTRIES,
    &reduce::ARGS,
    rows::ENTRIES,
    scatter::ENTRIES,
    softmax::ENTRIES,
    sort::ENTRIES,
];

/// What the table has for a call.
fn made(call: &Call<'_>) -> Option<Made> {
    let entries = TABLES.iter().copied().flatten();
    // An op may have several, for inputs of different kinds.
    let mut entries = entries.filter(|entry| entry.op == call.op.name);
    entries.find_map(|entry| (entry.make)(call))
}

/// Whether an op's result is its first input's bytes, so that there need be nothing to do for it.
pub(super) fn is_view(op: &str) -> bool {
    movement::VIEWS.iter().any(|entry| entry.op == op)
}

/// Whether the table has a kernel for a call.
pub(super) fn has(call: &Call<'_>) -> bool {
    made(call).is_some()
}

/// The kernel for a call, if there is one, in this build's image too. One that meets other members only where all of them are
/// together.
pub(super) fn kernel(call: &Call<'_>, on: &Side, together: bool) -> Option<Box<dyn Kernel>> {
    let has = |names: &[&'static str]| names.iter().all(|name| on.gpu.has(name));
    if call.op.name == gather::OP {
        let reached = on.peers.borrow();
        let reached = reached
            .as_ref()
            .filter(|_| together && has(&peers::NAMES))?;
        return gather::kernel(call, reached);
    }
    let (kernel, names) = made(call)?;
    has(&names).then_some(kernel)
}

/// One kernel for as many of the nodes that follow one another as there is one for, and for how many; at least two. Its inputs and results
/// are theirs, one after the other.
pub(super) fn joined(nodes: &Following<'_>) -> Option<(usize, Made)> {
    let names: Vec<&str> = nodes.calls.iter().map(|call| call.op.name).collect();
    match names[..] {
        ["mul_mat", "mul_mat", ..] | ["mul_mat_scaled", "mul_mat_scaled", ..] => {
            matmul::together(nodes)
        }
        ["rope", "rope", "cache_write", ..] => Some((3, attention::turned(nodes)?)),
        ["add", "rms_norm", ..] => norm::added(nodes).map(|made| (2, made)),
        _ => group::group(nodes),
    }
}

/// Names of the ops in the table.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    TABLES.iter().copied().flatten().map(|entry| entry.op)
}

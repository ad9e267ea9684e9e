//! What kernels see: places, the launcher that plans collect steps with, and the run.

use std::{
    collections::HashMap,
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use hotcell_graph::{DType, TensorSpec};

use crate::{
    backend::{DeviceError, Trail},
    communicator::Communicator,
    cpu::{matmul::pack, path::CpuPath},
    memory,
};

/// A place that kernels read and write: an arena value, a bound input, or a bound output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Reg(u32);

impl Reg {
    /// The place of an optional input that is not given; no kernel may touch it.
    pub const ABSENT: Reg = Reg(u32::MAX);

    pub(super) fn index(self) -> usize {
        self.0 as usize
    }
}

/// What a kernel sees while it runs. Each part has its own.
#[derive(Clone, Copy)]
pub(crate) struct Run<'a> {
    pointers: &'a [*mut u8],
    fault: &'a Fault,
    stop: &'a AtomicBool,
    workspaces: Workspaces,
    /// Of each step, how many pieces of its work have been taken.
    taken: &'a [AtomicUsize],
    /// Where part 0 says that it moves; the others have none.
    trail: Option<Trail>,
    /// The step that runs.
    step: usize,
    /// Rows of this execution.
    pub rows: usize,
    /// Instruction path.
    pub path: CpuPath,
}

/// Memory that a kernel may use while it runs, a piece per part.
#[derive(Clone, Copy)]
pub(super) struct Workspaces {
    pub start: *mut u8,
    /// Bytes of a part's piece.
    pub bytes: usize,
}

// SAFETY: the pointers lead to memory that outlives the run; which part of it each thread writes is
// the kernels' contract ([`Kernel::run`]).
unsafe impl Sync for Run<'_> {}

impl<'a> Run<'a> {
    pub(super) fn new(
        pointers: &'a [*mut u8],
        fault: &'a Fault,
        stop: &'a AtomicBool,
        workspaces: Workspaces,
        taken: &'a [AtomicUsize],
        rows: usize,
        path: CpuPath,
    ) -> Self {
        Self {
            pointers,
            fault,
            stop,
            workspaces,
            taken,
            trail: None,
            step: 0,
            rows,
            path,
        }
    }

    /// For part 0: leaves a trail from now on.
    pub(super) fn leave(&mut self, trail: Option<Trail>) {
        self.trail = trail;
    }

    /// Says which step runs now, and how the trail names it.
    pub(super) fn enter(&mut self, step: usize, mark: u64) {
        self.step = step;
        if let Some(trail) = &self.trail {
            trail.node.store(mark, Ordering::Relaxed);
        }
    }

    /// Whether a step before this one failed ([`Fault::before`]).
    pub(super) fn failed_before(&self, step: usize) -> bool {
        self.fault.before(step)
    }

    /// The number of a piece of this step's work that no part has taken yet, in ascending order from 0 on: for steps
    /// whose parts may have processors of different speeds, or less than all of one.
    pub fn take_piece(&self) -> usize {
        let taken = self.taken.get(self.step);
        taken.map_or(usize::MAX, |taken| taken.fetch_add(1, Ordering::Relaxed))
    }

    /// The part's memory for as many bytes as the kernel asked for ([`Launcher::workspace`]).
    pub fn workspace(&self, part: usize) -> *mut u8 {
        self.workspaces
            .start
            .wrapping_add(part * self.workspaces.bytes)
    }

    /// Address of a place.
    pub fn pointer(&self, reg: Reg) -> *mut u8 {
        self.pointers[reg.0 as usize]
    }

    /// Whether a place that need not be bound is.
    pub fn has(&self, reg: Reg) -> bool {
        !self.pointer(reg).is_null()
    }

    /// A place as a slice.
    ///
    /// # Safety
    /// `T` must be a plain number type, the place must hold `len` of them, and nobody may write them
    /// while the slice lives.
    pub unsafe fn slice<T>(&self, reg: Reg, len: usize) -> &[T] {
        // SAFETY: the caller's promise; arena places are aligned to a cache line, `bind` checked the rest.
        unsafe { std::slice::from_raw_parts(self.pointer(reg).cast(), len) }
    }

    /// Part of a place as a slice to write.
    ///
    /// # Safety
    /// As for [`Run::slice`], and nobody else may read or write `range` while the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice_mut<T>(&self, reg: Reg, range: Range<usize>) -> &mut [T] {
        // SAFETY: the caller's promise.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.pointer(reg).cast::<T>().add(range.start),
                range.end - range.start,
            )
        }
    }

    /// Whether the execution is to end now: kernels whose work may be long ask now and then, and return. The
    /// results are not looked at any more.
    #[inline(always)]
    pub fn stopped(&self) -> bool {
        if let Some(trail) = &self.trail {
            trail.progressed();
        }
        let stop = self.stop.load(Ordering::Relaxed);
        if stop {
            self.fail(DeviceError::Stopped);
        }
        stop
    }

    /// Reports an index that is out of range; the execution ends with the first one reported.
    #[cold]
    pub fn index_out_of_range(&self, op: &'static str, index: i64, bound: usize) {
        self.fail(DeviceError::IndexOutOfRange { op, index, bound });
    }

    /// Reports what keeps a kernel from a result; the execution ends with the first report.
    #[cold]
    pub fn fail(&self, error: DeviceError) {
        self.fault.set(self.step, error);
    }
}

/// The first error of an execution, and since which step there is one.
pub(super) struct Fault {
    step: AtomicUsize,
    error: Mutex<Option<DeviceError>>,
}

impl Default for Fault {
    fn default() -> Self {
        Self {
            step: AtomicUsize::new(usize::MAX),
            error: Mutex::new(None),
        }
    }
}

impl Fault {
    fn set(&self, step: usize, error: DeviceError) {
        let mut slot = self.error.lock().unwrap_or_else(|e| e.into_inner());
        slot.get_or_insert(error);
        self.step.fetch_min(step, Ordering::Release);
    }

    /// Whether a step before this one failed. All parts that meet before `step` get the same answer after it.
    pub(super) fn before(&self, step: usize) -> bool {
        self.step.load(Ordering::Acquire) < step
    }

    pub(super) fn take(&self) -> Option<DeviceError> {
        if self.step.swap(usize::MAX, Ordering::AcqRel) == usize::MAX {
            return None;
        }
        self.error.lock().unwrap_or_else(|e| e.into_inner()).take()
    }
}

/// One step of a plan.
///
/// What a kernel reads may be memory that another process writes meanwhile ([`Plan::reads_as_index`] says of which
/// inputs a plan stands that). Its results are arbitrary then, but it must touch no memory but its places':
///
/// - Where it goes and how far is up to specs and attributes alone. So is everything of elementwise groups, reductions,
///   scans, statistics, norms, softmax, movement, joins, pooling, convolutions and matrix products; a sum, a maximum or a
///   test for zero that sees two values of one element changes numbers, and numbers are saturated, not trusted, where
///   they become narrower (a row's largest element as the scale of its blocks).
/// - What a value chooses, it chooses within a table that all its values are in, such as four bits among 16 levels in a
///   register; a `bool` is read as a byte and compared with 0, never as Rust's `bool`.
/// - Places that values decide are made of numbers of our own: `argmax` counts rows, and `sort`, `argsort` and `topk` read
///   each element once into a key in the arena, above the place that it stands at, and sort the keys.
/// - Positions of `rope` are only turned into angles, the key of `random_bits` only into bits.
/// - Inputs that say where (`is_index` in the catalogue) are never such memory, nor is what leads to them: who binds
///   has copied it. Most kernels read such an index once all the same; nothing hangs on it.
///
/// [`Plan::reads_as_index`]: crate::plan::Plan::reads_as_index
pub(crate) trait Kernel: Send + Sync {
    /// Does part `part` of `parts` of the work for `run.rows` rows. Which elements a part computes may
    /// depend on `parts`; the value of an element may not.
    ///
    /// # Safety
    /// Every place the kernel was made with is bound with the size its spec says, `part < parts`, and
    /// each part is run by at most one thread, with no other kernel that touches its results.
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize);

    /// Whether part 0 does all of it in executions of so many rows, and the others nothing: such a step need not meet another
    /// one.
    fn is_alone(&self, _rows: usize) -> bool {
        false
    }

    /// Whether it never reads what it has written.
    fn only_writes(&self) -> bool {
        false
    }
}

/// Where a place's memory comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Home {
    Arena,
    Input(usize),
    Output(usize),
    /// The packed form of an input, which need not be bound: its pointer is null then.
    Packed(usize),
}

impl Home {
    /// Whether the plan cannot run before the place is bound.
    pub fn must_be_bound(self) -> bool {
        matches!(self, Home::Input(_) | Home::Output(_))
    }
}

pub(super) struct Place {
    pub bytes: usize,
    /// Bytes of one row, where the size depends on the rows.
    pub per_row: Option<usize>,
    pub home: Home,
    pub written: bool,
    /// Some step reads it as numbers in place; weights of matrices are read as bytes at any address.
    pub aligned: bool,
    /// Bytes of a number.
    pub alignment: usize,
}

/// A step before places have addresses.
pub(super) struct Pending {
    pub kernel: Box<dyn Kernel>,
    pub reads: Vec<Reg>,
    pub writes: Vec<Reg>,
    pub purpose: Purpose,
}

/// Which node of the graph a step computes.
#[derive(Clone, Copy)]
pub(super) struct Purpose {
    /// The node's number in the lowered graph; `None`: what comes after all nodes.
    pub node: Option<usize>,
    /// Whether it is the last of several that are computed as one.
    pub group: bool,
}

impl Purpose {
    pub const NONE: Purpose = Purpose {
        node: None,
        group: false,
    };
}

/// Collects the steps of a plan; `launch` functions of the op table call it.
pub(crate) struct Launcher {
    pub(super) places: Vec<Place>,
    pub(super) steps: Vec<Pending>,
    /// What the next steps are for.
    pub(super) purpose: Purpose,
    /// Bytes that a kernel uses per part while it runs.
    pub(super) workspace: usize,
    shared: HashMap<(&'static str, Vec<Reg>), Reg>,
    /// Who executes the plan as well, at the same time.
    pub communicator: Option<Arc<Communicator>>,
    /// Rows at most.
    pub max_rows: usize,
    /// Instruction path.
    pub path: CpuPath,
    /// Parts that each step is shared among: what needs scratch memory of its own.
    pub parts: usize,
}

impl Launcher {
    pub(super) fn new(max_rows: usize, path: CpuPath, parts: usize) -> Self {
        Self {
            places: vec![],
            steps: vec![],
            purpose: Purpose::NONE,
            workspace: 0,
            shared: HashMap::new(),
            communicator: None,
            max_rows,
            path,
            parts,
        }
    }

    pub(super) fn place(&mut self, bytes: usize, home: Home, alignment: usize) -> Reg {
        self.places.push(Place {
            bytes,
            per_row: None,
            home,
            written: false,
            aligned: false,
            alignment,
        });
        Reg((self.places.len() - 1) as u32)
    }

    /// Says that the place is a tensor's, which is smaller for fewer rows.
    pub(super) fn symbolic(&mut self, reg: Reg, spec: &TensorSpec) {
        if spec.shape.is_symbolic() {
            self.places[reg.index()].per_row = spec.bytes(1);
        }
    }

    /// Memory that the op needs besides its results.
    pub fn scratch(&mut self, bytes: usize) -> Reg {
        self.place(bytes, Home::Arena, memory::ALIGNMENT)
    }

    /// A kernel wants so many bytes of its own per part while it runs ([`Run::workspace`]).
    pub fn workspace(&mut self, bytes: usize) {
        self.workspace = self.workspace.max(bytes);
    }

    /// Says that kernels read this place as numbers, so that it must be aligned.
    pub fn aligned(&mut self, reg: Reg) {
        self.places[reg.0 as usize].aligned = true;
    }

    /// Adds a step that reads and writes these places.
    pub fn step(&mut self, kernel: impl Kernel + 'static, reads: &[Reg], writes: &[Reg]) {
        reads.iter().for_each(|&reg| self.aligned(reg));
        self.step_with_bytes(kernel, reads, writes);
    }

    /// The same for a kernel that copes with any address in `reads`; `writes` must be in the arena or
    /// aligned by other steps.
    pub fn step_with_bytes(
        &mut self,
        kernel: impl Kernel + 'static,
        reads: &[Reg],
        writes: &[Reg],
    ) {
        for w in writes {
            self.places[w.0 as usize].written = true;
            self.aligned(*w);
        }
        self.steps.push(Pending {
            kernel: Box::new(kernel),
            reads: reads.to_vec(),
            writes: writes.to_vec(),
            purpose: self.purpose,
        });
    }

    /// The place of the packed form of weights `[n, k]`, if they are an input and have one.
    pub fn packed(&mut self, weights: Reg, dtype: DType, n: usize, k: usize) -> Option<Reg> {
        let Home::Input(i) = self.places.get(weights.index())?.home else {
            return None;
        };
        if !pack::packs(dtype, n, k) {
            return None;
        }
        let home = Home::Packed(i);
        let there = self.places.iter().position(|place| place.home == home);
        if let Some(there) = there {
            return Some(Reg(there as u32));
        }
        let bytes = self.places[weights.index()].bytes;
        Some(self.place(bytes, home, 1))
    }

    /// Something computed from `from` that several ops may want (activations in blocks, a table of
    /// sines): made by the first, shared by the rest. Only for values that are written once.
    pub fn shared<K: Kernel + 'static>(
        &mut self,
        what: &'static str,
        from: &[Reg],
        bytes: usize,
        kernel: impl FnOnce(Reg) -> K,
    ) -> Reg {
        let key = (what, from.to_vec());
        if let Some(&reg) = self.shared.get(&key) {
            return reg;
        }
        let reg = self.scratch(bytes);
        self.step(kernel(reg), from, &[reg]);
        self.shared.insert(key, reg);
        reg
    }
}

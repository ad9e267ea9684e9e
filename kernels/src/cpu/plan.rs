//! A graph as a flat array of kernels over an arena.

use std::{
    cell::RefCell,
    collections::HashMap,
    ops::Range,
    rc::Rc,
    sync::Mutex,
    sync::atomic::{AtomicBool, Ordering},
};

use hotcell_graph::{
    Graph, TensorSpec, Value,
    op::{Call, ValueSpec},
};

use super::{NAME, buffer::HostMemory, ops, path::CpuPath, pool::Pool};
use crate::{
    backend::{Buffer, DeviceError},
    lower::lower,
    memory::{self, Lifetime},
    plan::{Plan, PlanHints, PlanMemory, Slot},
};

/// A place that kernels read and write: an arena value, a bound input, or a bound output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Reg(u32);

impl Reg {
    /// The place of an optional input that is not given; no kernel may touch it.
    pub const ABSENT: Reg = Reg(u32::MAX);
}

/// What a kernel sees while it runs.
pub(crate) struct Run<'a> {
    pointers: &'a [*mut u8],
    fault: &'a Fault,
    /// Rows of this execution.
    pub rows: usize,
    /// Instruction path.
    pub path: CpuPath,
}

// SAFETY: the pointers lead to memory that outlives the run; which part of it each thread writes is
// the kernels' contract ([`Kernel::run`]).
unsafe impl Sync for Run<'_> {}

impl Run<'_> {
    /// Address of a place.
    pub fn pointer(&self, reg: Reg) -> *mut u8 {
        self.pointers[reg.0 as usize]
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

    /// Reports an index that is out of range; the execution ends with the first one reported.
    #[cold]
    pub fn index_out_of_range(&self, op: &'static str, index: i64, bound: usize) {
        self.fail(DeviceError::IndexOutOfRange { op, index, bound });
    }

    /// Reports what keeps a kernel from a result; the execution ends with the first report.
    #[cold]
    pub fn fail(&self, error: DeviceError) {
        self.fault.set(error);
    }
}

#[derive(Default)]
struct Fault {
    set: AtomicBool,
    error: Mutex<Option<DeviceError>>,
}

impl Fault {
    fn set(&self, error: DeviceError) {
        let mut slot = self.error.lock().unwrap_or_else(|e| e.into_inner());
        slot.get_or_insert(error);
        self.set.store(true, Ordering::Release);
    }

    fn take(&self) -> Option<DeviceError> {
        if !self.set.swap(false, Ordering::AcqRel) {
            return None;
        }
        self.error.lock().unwrap_or_else(|e| e.into_inner()).take()
    }
}

/// One step of a plan.
pub(crate) trait Kernel: Send + Sync {
    /// Does part `part` of `parts` of the work for `run.rows` rows. Which elements a part computes may
    /// depend on `parts`; the value of an element may not.
    ///
    /// # Safety
    /// Every place the kernel was made with is bound with the size its spec says, `part < parts`, and
    /// each part is run by at most one thread, with no other kernel that touches its results.
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize);
}

struct Empty;

impl Kernel for Empty {
    unsafe fn run(&self, _: &Run<'_>, _: usize, _: usize) {}
}

struct Step {
    kernel: Box<dyn Kernel>,
    /// All parts meet before this step, because it touches what an earlier one wrote or reads.
    barrier: bool,
}

/// Where a place's memory comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Home {
    Arena,
    Input(usize),
    Output(usize),
}

struct Place {
    bytes: usize,
    /// Bytes of one row, where the size depends on the rows.
    per_row: Option<usize>,
    home: Home,
    written: bool,
    /// Some step reads it as numbers in place; weights of matrices are read as bytes at any address.
    aligned: bool,
}

/// A step before places have addresses.
struct Pending {
    kernel: Box<dyn Kernel>,
    reads: Vec<Reg>,
    writes: Vec<Reg>,
}

/// Collects the steps of a plan; `launch` functions of the op table call it.
pub(crate) struct Launcher {
    places: Vec<Place>,
    steps: Vec<Pending>,
    shared: HashMap<(&'static str, Vec<Reg>), Reg>,
    /// Rows at most.
    pub max_rows: usize,
    /// Parts that each step is shared among: what needs scratch memory of its own.
    pub parts: usize,
}

impl Launcher {
    fn place(&mut self, bytes: usize, home: Home) -> Reg {
        self.places.push(Place {
            bytes,
            per_row: None,
            home,
            written: false,
            aligned: false,
        });
        Reg((self.places.len() - 1) as u32)
    }

    /// Says that the place is a tensor's, which is smaller for fewer rows.
    fn symbolic(&mut self, reg: Reg, spec: &TensorSpec) {
        if spec.shape.is_symbolic() {
            self.places[reg.0 as usize].per_row = spec.bytes(1);
        }
    }

    /// Memory that the op needs besides its results.
    pub fn scratch(&mut self, bytes: usize) -> Reg {
        self.place(bytes, Home::Arena)
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
        });
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

pub(crate) struct CpuPlan {
    steps: Vec<Step>,
    places: Vec<Place>,
    inputs: Vec<Reg>,
    outputs: Vec<Reg>,
    pointers: Vec<*mut u8>,
    /// What is bound, so that it lives as long as the plan points to it.
    bound: Vec<Option<Bound>>,
    /// Keeps the memory that arena pointers lead to; `None` for a dry run.
    arena: Option<HostMemory>,
    memory: PlanMemory,
    max_rows: usize,
    path: CpuPath,
    pool: Rc<RefCell<Pool>>,
    fault: Fault,
    ready: bool,
}

/// What a place is bound to.
#[derive(Clone)]
struct Bound {
    /// Keeps the memory alive.
    _buffer: Buffer,
    /// Its addresses.
    range: Range<usize>,
    /// Rows for which it is large enough.
    rows: usize,
}

/// Alignment of what kernels read as numbers: f32 and i32.
const PLACE_ALIGNMENT: usize = 4;

fn overflow() -> DeviceError {
    DeviceError::OutOfMemory {
        what: "the plan's arena".to_owned(),
        bytes: usize::MAX,
    }
}

impl CpuPlan {
    pub fn new(
        graph: &Graph,
        hints: &PlanHints,
        path: CpuPath,
        pool: Rc<RefCell<Pool>>,
    ) -> Result<Self, DeviceError> {
        let graph = lower(graph, NAME, &ops::supports)?;
        let mut launcher = Launcher {
            places: vec![],
            steps: vec![],
            shared: HashMap::new(),
            max_rows: graph.max_rows(),
            parts: pool.borrow().parts(),
        };
        let mut regs: HashMap<Value, Reg> = HashMap::from([(Value::Absent, Reg::ABSENT)]);
        let mut inputs = Vec::with_capacity(graph.inputs().len());
        for (i, input) in graph.inputs().iter().enumerate() {
            let bytes = match &input.spec {
                ValueSpec::Tensor(t) => t.bytes(graph.max_rows()),
                ValueSpec::Cache(c) => c.bytes(),
                ValueSpec::Absent => Some(0),
            };
            let reg = launcher.place(bytes.ok_or_else(overflow)?, Home::Input(i));
            if let ValueSpec::Tensor(t) = &input.spec {
                launcher.symbolic(reg, t);
            }
            regs.insert(Value::Input(i as u32), reg);
            inputs.push(reg);
        }
        let roots = roots(&graph);
        let mut outputs = Vec::with_capacity(graph.outputs().len());
        for (i, &value) in graph.outputs().iter().enumerate() {
            let root = roots.get(&value).copied().unwrap_or(value);
            let spec = match (root, graph.spec(root)?) {
                (Value::Node { .. }, ValueSpec::Tensor(t)) if !regs.contains_key(&root) => t,
                _ => {
                    return Err(DeviceError::Unsupported {
                        backend: NAME,
                        op: "output",
                        why: "an output must be the result of a node, once".to_owned(),
                    });
                }
            };
            let bytes = spec.bytes(graph.max_rows()).ok_or_else(overflow)?;
            let reg = launcher.place(bytes, Home::Output(i));
            launcher.symbolic(reg, &spec);
            regs.insert(root, reg);
            outputs.push(reg);
        }
        for (n, node) in graph.nodes().iter().enumerate() {
            let specs = graph.input_specs(node)?;
            let ins: Vec<Reg> = node
                .inputs
                .iter()
                .map(|v| {
                    regs.get(roots.get(v).unwrap_or(v))
                        .copied()
                        .ok_or_else(overflow)
                })
                .collect::<Result<_, _>>()?;
            let mut outs = Vec::with_capacity(node.outputs.len());
            for (o, spec) in node.outputs.iter().enumerate() {
                let value = Value::Node {
                    node: n as u32,
                    output: o as u32,
                };
                if roots.contains_key(&value) {
                    continue; // the same memory under another shape
                }
                let bytes = spec.bytes(graph.max_rows()).ok_or_else(overflow)?;
                let reg = match regs.get(&value) {
                    Some(&reg) => reg,
                    None => launcher.place(bytes, Home::Arena),
                };
                regs.insert(value, reg);
                outs.push(reg);
            }
            let call = Call {
                op: node.op,
                inputs: &specs,
                attributes: &node.attributes,
            };
            ops::launch(&mut launcher, &call, &ins, &outs)?;
        }
        Self::resolve(
            launcher,
            inputs,
            outputs,
            hints,
            path,
            pool,
            graph.max_rows(),
        )
    }

    /// Gives places their addresses and steps their barriers.
    fn resolve(
        launcher: Launcher,
        inputs: Vec<Reg>,
        outputs: Vec<Reg>,
        hints: &PlanHints,
        path: CpuPath,
        pool: Rc<RefCell<Pool>>,
        max_rows: usize,
    ) -> Result<Self, DeviceError> {
        let Launcher { places, steps, .. } = launcher;
        let mut lifetimes: Vec<Option<Lifetime>> = vec![None; places.len()];
        for (s, step) in steps.iter().enumerate() {
            for reg in step.reads.iter().chain(&step.writes) {
                let place = &places[reg.0 as usize];
                let life = lifetimes[reg.0 as usize].get_or_insert(Lifetime {
                    bytes: place.bytes,
                    first: s,
                    last: s,
                });
                life.last = s;
            }
        }
        let arena_regs: Vec<usize> = (0..places.len())
            .filter(|&r| places[r].home == Home::Arena && lifetimes[r].is_some())
            .collect();
        let values: Vec<Lifetime> = arena_regs.iter().filter_map(|&r| lifetimes[r]).collect();
        let layout = memory::layout(&values).ok_or_else(overflow)?;
        let unshared = values
            .iter()
            .map(|v| v.bytes.next_multiple_of(memory::ALIGNMENT))
            .sum();

        let mut ranges: Vec<Option<Range<usize>>> = vec![None; places.len()];
        for (&r, &offset) in arena_regs.iter().zip(&layout.offsets) {
            ranges[r] = Some(offset..offset + places[r].bytes);
        }
        let overlap = |a: Reg, b: Reg| match (&ranges[a.0 as usize], &ranges[b.0 as usize]) {
            (Some(x), Some(y)) => x.start < y.end && y.start < x.end,
            _ => a == b,
        };
        let (mut reads, mut writes): (Vec<Reg>, Vec<Reg>) = (vec![], vec![]);
        let mut barriers = 0;
        let mut ready_steps = Vec::with_capacity(steps.len());
        for step in steps {
            let touches_write = |r: &Reg| writes.iter().any(|w| overlap(*w, *r));
            let barrier = step.reads.iter().any(touches_write)
                || step.writes.iter().any(touches_write)
                || step
                    .writes
                    .iter()
                    .any(|w| reads.iter().any(|r| overlap(*r, *w)));
            if barrier {
                reads.clear();
                writes.clear();
                barriers += 1;
            }
            reads.extend(&step.reads);
            writes.extend(&step.writes);
            let kernel = if hints.empty_kernels {
                Box::new(Empty)
            } else {
                step.kernel
            };
            ready_steps.push(Step { kernel, barrier });
        }
        if hints.allocate && hints.max_bytes.is_some_and(|most| layout.total > most) {
            return Err(DeviceError::OutOfMemory {
                what: "the plan's arena".to_owned(),
                bytes: layout.total,
            });
        }
        let arena = match hints.allocate {
            true => Some(HostMemory::new("the plan's arena", layout.total)?),
            false => None,
        };
        let mut pointers = vec![std::ptr::null_mut(); places.len()];
        if let Some(arena) = &arena {
            for (pointer, range) in pointers.iter_mut().zip(&ranges) {
                if let Some(range) = range {
                    // SAFETY: the layout's total covers every range.
                    *pointer = unsafe { arena.start().add(range.start) };
                }
            }
        }
        let memory = PlanMemory {
            arena: layout.total,
            unshared,
            steps: ready_steps.len(),
            barriers,
        };
        Ok(Self {
            bound: vec![None; places.len()],
            steps: ready_steps,
            places,
            inputs,
            outputs,
            pointers,
            arena,
            memory,
            max_rows,
            path,
            pool,
            fault: Fault::default(),
            ready: false,
        })
    }

    fn unbound(&self) -> Option<&Place> {
        let external = |p: &&Place| p.home != Home::Arena;
        self.places
            .iter()
            .zip(&self.bound)
            .filter(|(_, b)| b.is_none())
            .map(|(p, _)| p)
            .find(external)
    }
}

/// Values that are another value's memory under another shape, and whose memory that is.
fn roots(graph: &Graph) -> HashMap<Value, Value> {
    let mut roots = HashMap::new();
    for (n, node) in graph.nodes().iter().enumerate() {
        if let (true, &[from]) = (ops::is_alias(node.op.name), node.inputs.as_slice()) {
            let root = roots.get(&from).copied().unwrap_or(from);
            roots.insert(
                Value::Node {
                    node: n as u32,
                    output: 0,
                },
                root,
            );
        }
    }
    roots
}

impl Plan for CpuPlan {
    fn bind_for(
        &mut self,
        rows: usize,
        slot: Slot,
        buffer: &Buffer,
        offset: usize,
    ) -> Result<(), DeviceError> {
        let fail = |what: String| Err(DeviceError::Binding(format!("{slot:?}: {what}")));
        let (list, i) = match slot {
            Slot::Input(i) => (&self.inputs, i),
            Slot::Output(i) => (&self.outputs, i),
        };
        let Some(&reg) = list.get(i) else {
            return fail("the graph has no such slot".to_owned());
        };
        let place = &self.places[reg.0 as usize];
        let Some(host) = buffer.host() else {
            return fail("the CPU cannot address this buffer".to_owned());
        };
        let rows = rows.min(self.max_rows);
        // No overflow: never more than at the greatest number of rows, which was checked.
        let bytes = place.per_row.map_or(place.bytes, |bytes| bytes * rows);
        let end = offset.checked_add(bytes).filter(|end| *end <= host.len);
        let Some(end) = end else {
            return fail(format!("needs {bytes} bytes at {offset}, has {}", host.len));
        };
        if place.aligned
            && !(host.start as usize)
                .wrapping_add(offset)
                .is_multiple_of(PLACE_ALIGNMENT)
        {
            return fail(format!("must be aligned to {PLACE_ALIGNMENT} bytes"));
        }
        let written = place.written || matches!(place.home, Home::Output(_));
        if written && !host.writable {
            return fail("the graph writes it and the buffer is read-only".to_owned());
        }
        let start = host.start as usize;
        let range = start + offset..start + end;
        for (other, bound) in self.places.iter().zip(&self.bound) {
            let Some(Bound { range: taken, .. }) = bound else {
                continue;
            };
            let same = std::ptr::eq(other, place);
            let overlaps = taken.start < range.end && range.start < taken.end;
            if !same && overlaps && (written || other.written) {
                return fail("overlaps memory that the graph writes".to_owned());
            }
        }
        // SAFETY: offset ≤ len of the buffer's memory, which `bound` keeps alive.
        self.pointers[reg.0 as usize] = unsafe { host.start.add(offset) };
        self.bound[reg.0 as usize] = Some(Bound {
            _buffer: buffer.clone(),
            range,
            rows,
        });
        self.ready = self.arena.is_some() && self.unbound().is_none();
        Ok(())
    }

    fn release(&mut self) {
        self.bound.fill(None);
        self.ready = false;
    }

    fn memory(&self) -> PlanMemory {
        self.memory
    }

    fn execute(&mut self, rows: usize) -> Result<(), DeviceError> {
        if !self.ready {
            let what = match self.unbound() {
                Some(place) => format!("{:?} is not bound", place.home),
                None => "the plan was made as a dry run".to_owned(),
            };
            return Err(DeviceError::Binding(what));
        }
        let most = self.bound.iter().flatten().map(|b| b.rows).min();
        let most = most.unwrap_or(self.max_rows);
        if rows > most {
            return Err(DeviceError::Binding(format!("{rows} rows, at most {most}")));
        }
        let run = Run {
            pointers: &self.pointers,
            fault: &self.fault,
            rows,
            path: self.path,
        };
        let steps = &self.steps;
        let mut pool = self.pool.borrow_mut();
        let parts = pool.parts();
        pool.run(|part, barrier| {
            for step in steps {
                if step.barrier {
                    barrier.wait();
                }
                // SAFETY: `ready` says that all places are bound with the sizes `bind` checked against
                // the specs; the pool gives every part to one thread; barriers separate steps that
                // touch the same memory.
                unsafe { step.kernel.run(&run, part, parts) };
            }
        });
        match self.fault.take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

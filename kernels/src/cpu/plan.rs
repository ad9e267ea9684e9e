//! A graph as a flat array of kernels over an arena.

mod launch;
mod schedule;
mod steps;

use std::{
    cell::RefCell,
    collections::HashMap,
    rc::Rc,
    sync::{Arc, atomic::AtomicBool},
};

use hotcell_graph::{
    Dim, Graph, TensorSpec, Value,
    op::{Call, Effect, ValueSpec},
};

pub(crate) use self::launch::{Kernel, Launcher, Reg, Run};
use self::{
    launch::{Fault, Home, Origin, Place, Workspaces},
    schedule::Meet,
};
use super::{
    NAME,
    buffer::HostMemory,
    elementwise::{Builder, Extent, Pattern},
    fuse::{self, Roots, Schedule, Unit},
    ops,
    path::CpuPath,
    pool::Pool,
};
use crate::{
    backend::{Buffer, DeviceError, Trail},
    bound::Bound,
    lower::lower,
    memory,
    plan::{Plan, PlanHints, PlanMemory, Slot},
};

struct Empty;

impl Kernel for Empty {
    unsafe fn run(&self, _: &Run<'_>, _: usize, _: usize) {}
}

/// An output that is not the first place its value is wanted at.
struct Copy {
    from: Reg,
    to: Reg,
    spec: TensorSpec,
}

impl Kernel for Copy {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let bytes = self.spec.bytes(run.rows).unwrap_or(0);
        let range = ops::split_if_worth(bytes, memory::ALIGNMENT, 1 << 14, part, parts);
        // SAFETY: both places have the size of the spec; parts write ranges of their own.
        unsafe {
            let from = run.slice::<u8>(self.from, bytes);
            run.slice_mut(self.to, range.clone())
                .copy_from_slice(&from[range]);
        }
    }

    fn only_writes(&self) -> bool {
        true
    }
}

struct Step {
    kernel: Box<dyn Kernel>,
    /// How the trail names it.
    mark: u64,
    meet: Meet,
}

pub(crate) struct CpuPlan {
    steps: Vec<Step>,
    places: Vec<Place>,
    inputs: Vec<Reg>,
    outputs: Vec<Reg>,
    /// Of each output: whether no step reads it.
    only_written: Vec<bool>,
    pointers: Vec<*mut u8>,
    bound: Vec<Option<Bound>>,
    /// Whether bindings came since they were last compared.
    rebound: bool,
    /// Rows for which what is bound is large enough, as of then.
    most_rows: usize,
    /// Whether waking other threads would take longer than the work.
    small: bool,
    /// Inputs and outputs without memory.
    unbound: usize,
    /// Keeps the memory that arena pointers lead to; `None` for a dry run.
    arena: Option<HostMemory>,
    workspaces: Workspaces,
    memory: PlanMemory,
    max_rows: usize,
    path: CpuPath,
    pool: Rc<RefCell<Pool>>,
    /// How many of the pool's threads it uses.
    parts: usize,
    fault: Fault,
    stop: Arc<AtomicBool>,
    trail: Option<Trail>,
}

fn overflow() -> DeviceError {
    DeviceError::OutOfMemory {
        what: "the plan's arena".to_owned(),
        bytes: usize::MAX,
    }
}

/// Alignment that kernels which read a value in place need, bytes.
fn alignment(spec: &ValueSpec) -> usize {
    match spec {
        ValueSpec::Tensor(t) if !t.dtype.is_block() => t.dtype.block_bytes(),
        _ => 4,
    }
}

/// Makes the steps of a graph.
struct Maker<'a> {
    graph: &'a Graph,
    roots: Roots,
    launcher: Launcher,
    regs: HashMap<Value, Reg>,
}

impl Maker<'_> {
    fn input(&mut self, i: usize, spec: &ValueSpec) -> Result<Reg, DeviceError> {
        let bytes = match spec {
            ValueSpec::Tensor(t) => t.bytes(self.graph.max_rows()),
            ValueSpec::Cache(c) => c.bytes(),
            ValueSpec::Absent => Some(0),
        };
        let bytes = bytes.ok_or_else(overflow)?;
        let reg = self.launcher.place(bytes, Home::Input(i), alignment(spec));
        if let ValueSpec::Tensor(t) = spec {
            self.launcher.symbolic(reg, t);
        }
        self.regs.insert(Value::Input(i as u32), reg);
        Ok(reg)
    }

    /// The place of output `i`, and whence it is copied unless a node writes it there.
    fn output(&mut self, i: usize, value: Value) -> Result<(Reg, Option<Value>), DeviceError> {
        let spec = self.graph.spec(value)?;
        let bytes = match &spec {
            ValueSpec::Tensor(t) => t.bytes(self.graph.max_rows()),
            _ => None,
        };
        let bytes = bytes.ok_or_else(overflow)?;
        let reg = self
            .launcher
            .place(bytes, Home::Output(i), alignment(&spec));
        if let ValueSpec::Tensor(t) = &spec {
            self.launcher.symbolic(reg, t);
        }
        let root = self.roots.of(value);
        if matches!(root, Value::Node { .. }) && !self.regs.contains_key(&root) {
            self.regs.insert(root, reg);
            return Ok((reg, None));
        }
        Ok((reg, Some(root)))
    }

    fn reg(&self, value: Value) -> Result<Reg, DeviceError> {
        let reg = self.regs.get(&self.roots.of(value));
        reg.copied().ok_or_else(overflow)
    }

    /// The place of a result, made if it is not an output's.
    fn result(&mut self, value: Value, spec: &TensorSpec) -> Result<Reg, DeviceError> {
        if let Some(&reg) = self.regs.get(&value) {
            return Ok(reg);
        }
        let bytes = spec.bytes(self.graph.max_rows()).ok_or_else(overflow)?;
        let reg = self.launcher.scratch(bytes);
        self.regs.insert(value, reg);
        Ok(reg)
    }

    /// Whether the node only makes tensors without elements, for any number of rows: there is nothing to do, and
    /// its other axes, which no memory bounds, must not be walked.
    fn makes_nothing(&self, n: usize) -> bool {
        let node = &self.graph.nodes()[n];
        let mut outs = node.outputs.iter();
        node.op.effect == Effect::None && outs.all(|t| t.shape.dims().contains(&Dim::Fixed(0)))
    }

    fn node(&mut self, n: usize) -> Result<(), DeviceError> {
        let node = &self.graph.nodes()[n];
        let specs = self.graph.input_specs(node)?;
        let ins: Vec<Reg> = node
            .inputs
            .iter()
            .map(|v| self.reg(*v))
            .collect::<Result<_, _>>()?;
        let mut outs = Vec::with_capacity(node.outputs.len());
        for (o, spec) in node.outputs.iter().enumerate() {
            let (node, output) = (n as u32, o as u32);
            outs.push(self.result(Value::Node { node, output }, spec)?);
        }
        if self.makes_nothing(n) {
            return Ok(());
        }
        self.launcher.origin = Origin::of(node.op.name, false);
        let call = Call {
            op: node.op,
            inputs: &specs,
            attributes: &node.attributes,
        };
        ops::launch(&mut self.launcher, &call, &ins, &outs)
    }

    fn group(&mut self, nodes: &[usize], stored: &[bool]) -> Result<(), DeviceError> {
        let graph = self.graph;
        let Some(result) = nodes
            .first()
            .and_then(|n| graph.nodes()[*n].outputs.first())
        else {
            return Ok(());
        };
        if nodes.iter().all(|n| self.makes_nothing(*n)) {
            for &node in nodes.iter().filter(|n| stored[**n]) {
                let (spec, node, output) = (result, node as u32, 0);
                self.result(Value::Node { node, output }, spec)?;
            }
            return Ok(());
        }
        let mut builder = Builder::new(Extent::of(&result.shape), self.launcher.path);
        let mut ids = HashMap::new();
        for &n in nodes {
            let node = &graph.nodes()[n];
            let missing = || DeviceError::Unsupported {
                backend: NAME,
                op: node.op.name,
                why: "it has no instruction".to_owned(),
            };
            let result = node.outputs.first().ok_or_else(missing)?;
            let mut args = Vec::with_capacity(node.inputs.len());
            for &value in &node.inputs {
                let root = self.roots.of(value);
                let ValueSpec::Tensor(spec) = graph.spec(value)? else {
                    return Err(missing());
                };
                let literal = match root {
                    Value::Node { node, .. } => fuse::scalar_literal(graph, node as usize),
                    _ => None,
                };
                let id = match (ids.get(&root), literal) {
                    (Some(id), _) => Some(*id),
                    (None, Some(bytes)) => builder.immediate(spec.dtype, bytes),
                    (None, None) => {
                        let pattern = Pattern::new(&spec.shape, &result.shape);
                        builder.operand(self.reg(value)?, spec.dtype, pattern)
                    }
                };
                args.push(id.ok_or_else(missing)?);
            }
            let id = builder.apply(node.op.name, &args, &node.attributes, result.dtype);
            let id = id.ok_or_else(missing)?;
            let (number, output) = (n as u32, 0);
            let value = Value::Node {
                node: number,
                output,
            };
            ids.insert(value, id);
            if stored[n] {
                let reg = self.result(value, result)?;
                builder.store(id, reg, result.dtype);
            }
        }
        let last = nodes.last().map_or("", |n| graph.nodes()[*n].op.name);
        self.launcher.origin = Origin::of(last, nodes.len() > 1);
        builder.finish(&mut self.launcher).ok_or_else(overflow)
    }
}

impl CpuPlan {
    pub fn new(
        graph: &Graph,
        hints: &PlanHints,
        path: CpuPath,
        pool: Rc<RefCell<Pool>>,
        trail: Option<Trail>,
    ) -> Result<Self, DeviceError> {
        let graph = lower(graph, NAME, &ops::supports)?;
        let threads = pool.borrow().parts();
        let parts = hints.threads.map_or(threads, |most| most.clamp(1, threads));
        let mut maker = Maker {
            roots: Roots::new(&graph),
            launcher: Launcher::new(graph.max_rows(), path, parts),
            regs: HashMap::from([(Value::Absent, Reg::ABSENT)]),
            graph: &graph,
        };
        let mut inputs = Vec::with_capacity(graph.inputs().len());
        for (i, input) in graph.inputs().iter().enumerate() {
            inputs.push(maker.input(i, &input.spec)?);
        }
        let mut outputs = Vec::with_capacity(graph.outputs().len());
        let mut copies = vec![];
        for (i, &value) in graph.outputs().iter().enumerate() {
            let (reg, from) = maker.output(i, value)?;
            outputs.push(reg);
            if let (Some(from), ValueSpec::Tensor(spec)) = (from, graph.spec(value)?) {
                copies.push((from, reg, spec));
            }
        }
        let Schedule { units, stored } = fuse::schedule(&graph, &maker.roots, hints.fuse)?;
        for unit in &units {
            match unit {
                Unit::Node(n) => maker.node(*n)?,
                Unit::Group(nodes) => maker.group(nodes, &stored)?,
            }
        }
        maker.launcher.origin = Origin::NONE;
        for (from, to, spec) in copies {
            let from = maker.reg(from)?;
            let copy = Copy { from, to, spec };
            maker.launcher.step_with_bytes(copy, &[from], &[to]);
        }
        Self::resolve(maker.launcher, inputs, outputs, hints, pool, trail)
    }

    /// Gives places their addresses and steps their barriers.
    fn resolve(
        launcher: Launcher,
        inputs: Vec<Reg>,
        outputs: Vec<Reg>,
        hints: &PlanHints,
        pool: Rc<RefCell<Pool>>,
        trail: Option<Trail>,
    ) -> Result<Self, DeviceError> {
        let Launcher {
            places,
            steps,
            workspace,
            max_rows,
            path,
            parts,
            ..
        } = launcher;
        let arena = schedule::arena(&places, &steps).ok_or_else(overflow)?;
        let meets = schedule::meetings(&arena, &steps);
        // Behind the values: what each part may use while a kernel runs.
        let workspace = workspace.next_multiple_of(memory::ALIGNMENT);
        let tail = workspace.checked_mul(parts).ok_or_else(overflow)?;
        let values = arena.layout.total;
        let total = values.checked_add(tail).ok_or_else(overflow)?;
        if hints.allocate && hints.max_bytes.is_some_and(|most| total > most) {
            return Err(DeviceError::OutOfMemory {
                what: "the plan's arena".to_owned(),
                bytes: total,
            });
        }
        let host = match hints.allocate {
            true => Some(HostMemory::new("the plan's arena", total)?),
            false => None,
        };
        let mut pointers = vec![std::ptr::null_mut(); places.len()];
        let mut workspaces = Workspaces {
            start: std::ptr::null_mut(),
            bytes: workspace,
        };
        if let Some(host) = &host {
            for (pointer, range) in pointers.iter_mut().zip(&arena.ranges) {
                if let Some(range) = range {
                    // SAFETY: the layout's total covers every range.
                    *pointer = unsafe { host.start().add(range.start) };
                }
            }
            // SAFETY: `total` is as long as the values and the workspaces together.
            workspaces.start = unsafe { host.start().add(values) };
        }
        let memory = PlanMemory {
            arena: total,
            unshared: arena.unshared.saturating_add(tail),
            steps: steps.len(),
            barriers: meets.iter().filter(|m| **m == Meet::Always).count(),
        };
        let only_written = outputs.iter().map(|reg| {
            let reads = |step: &launch::Pending| step.reads.contains(reg);
            let writes = |step: &launch::Pending| step.writes.contains(reg);
            let soils = |step| reads(step) || writes(step) && !step.kernel.only_writes();
            !steps.iter().any(soils)
        });
        let only_written = only_written.collect();
        let mark = |step: usize, Origin { op, group }| {
            trail.map_or(0, |trail| (trail.pack)(step as u32, op, group))
        };
        let steps: Vec<Step> = steps
            .into_iter()
            .zip(meets)
            .enumerate()
            .map(|(s, (step, meet))| Step {
                mark: mark(s, step.origin),
                kernel: match hints.empty_kernels {
                    true => Box::new(Empty),
                    false => step.kernel,
                },
                meet,
            })
            .collect();
        Ok(Self {
            bound: places.iter().map(|_| None).collect(),
            rebound: true,
            most_rows: 0,
            unbound: places.iter().filter(|p| p.home.must_be_bound()).count(),
            small: steps::is_small(&places, &steps),
            steps,
            places,
            inputs,
            outputs,
            only_written,
            pointers,
            arena: host,
            workspaces,
            memory,
            max_rows,
            path,
            pool,
            parts,
            fault: Fault::default(),
            stop: Arc::default(),
            trail,
        })
    }
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
        let place = &self.places[reg.index()];
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
        // SAFETY: offset ≤ len of the buffer's memory, which `bound` keeps alive.
        let mut pointer = unsafe { host.start.add(offset) };
        if bytes == 0 {
            // Nothing is read there, but a slice of no numbers must be aligned too.
            pointer = std::ptr::without_provenance_mut(memory::ALIGNMENT);
        }
        if place.aligned && !pointer.addr().is_multiple_of(place.alignment) {
            return fail(format!("must be aligned to {} bytes", place.alignment));
        }
        let written = place.written || matches!(place.home, Home::Output(_));
        if written && !host.writable {
            return fail("the graph writes it and the buffer is read-only".to_owned());
        }
        let start = host.start.addr();
        self.pointers[reg.index()] = pointer;
        let bound = Bound {
            buffer: buffer.clone(),
            offset,
            range: start + offset..start + end,
            rows,
            written,
            slot,
        };
        if self.bound[reg.index()].replace(bound).is_none() {
            self.unbound -= 1;
        }
        self.rebound = true;
        Ok(())
    }

    fn bind_packed(
        &mut self,
        slot: Slot,
        buffer: Option<&Buffer>,
        offset: usize,
    ) -> Result<bool, DeviceError> {
        let fail = |what: String| Err(DeviceError::Binding(format!("{slot:?}, packed: {what}")));
        let Slot::Input(i) = slot else {
            return Ok(false);
        };
        let place = |place: &Place| place.home == Home::Packed(i);
        let Some(index) = self.places.iter().position(place) else {
            return Ok(false);
        };
        let Some(buffer) = buffer else {
            self.bound[index] = None;
            self.pointers[index] = std::ptr::null_mut();
            return Ok(true);
        };
        let Some(host) = buffer.host() else {
            return fail("the CPU cannot address this buffer".to_owned());
        };
        let bytes = self.places[index].bytes;
        let end = offset.checked_add(bytes).filter(|end| *end <= host.len);
        let Some(end) = end else {
            return fail(format!("needs {bytes} bytes at {offset}, has {}", host.len));
        };
        let start = host.start.addr();
        // SAFETY: offset ≤ len of the buffer's memory, which `bound` keeps alive.
        self.pointers[index] = unsafe { host.start.add(offset) };
        self.bound[index] = Some(Bound {
            buffer: buffer.clone(),
            offset,
            range: start + offset..start + end,
            rows: self.max_rows,
            written: false,
            slot,
        });
        self.rebound = true;
        Ok(true)
    }

    fn stop_when(&mut self, flag: Arc<AtomicBool>) {
        self.stop = flag;
    }

    fn release(&mut self) {
        self.stop = Arc::default();
        self.bound.iter_mut().for_each(|bound| *bound = None);
        for (place, pointer) in self.places.iter().zip(&mut self.pointers) {
            if matches!(place.home, Home::Packed(_)) {
                *pointer = std::ptr::null_mut();
            }
        }
        self.rebound = true;
        self.unbound = self.inputs.len() + self.outputs.len();
    }

    fn memory(&self) -> PlanMemory {
        self.memory
    }

    fn is_small(&self) -> bool {
        self.small
    }

    fn only_writes(&self, i: usize) -> bool {
        self.only_written.get(i).is_some_and(|only| *only)
    }

    fn execute(&mut self, rows: usize) -> Result<(), DeviceError> {
        self.steps_from(rows, 0, None).map(|_| ())
    }

    fn execute_from(
        &mut self,
        rows: usize,
        from: usize,
        pause: &dyn Fn() -> bool,
    ) -> Result<Option<usize>, DeviceError> {
        self.steps_from(rows, from, Some(pause))
    }
}

//! Making the steps of a graph: all of a plan but its memory, on whatever thread.

use std::{any::Any, collections::HashMap, ops::Range, sync::Arc};

use hotcell_graph::{
    Dim, Graph, TensorSpec, Value,
    op::{Call, Effect, ValueSpec, number},
};

use super::{
    Step,
    launch::{Home, Kernel, Launcher, Pending, Place, Purpose, Reg, Run},
    schedule::{self, Meet},
    steps::is_small,
};
use crate::{
    backend::{DeviceError, Trail},
    communicator::Communicator,
    cpu::{
        NAME,
        elementwise::{Builder, Extent, Pattern},
        fuse::{self, Roots, Schedule, Unit},
        ops,
        path::CpuPath,
    },
    lower::{Lowered, lower},
    memory,
    plan::{Origin, PlanHints, PlanMemory, Planner, Prepared},
};

/// Nothing, with the meetings of what it is there for.
struct Empty(Box<dyn Kernel>);

impl Kernel for Empty {
    fn is_alone(&self, rows: usize) -> bool {
        self.0.is_alone(rows)
    }

    unsafe fn run(&self, _: &Run<'_>, _: usize, _: usize) {}
}

/// An output that is not the first place its value is wanted at.
struct Copy {
    from: Reg,
    to: Reg,
    spec: TensorSpec,
}

/// Bytes of a copy that are worth sharing out.
const COPIED: usize = 1 << 14;

impl Kernel for Copy {
    fn is_alone(&self, rows: usize) -> bool {
        ops::stays(
            self.spec.bytes(rows).unwrap_or(0),
            memory::ALIGNMENT,
            COPIED,
        )
    }

    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let bytes = self.spec.bytes(run.rows).unwrap_or(0);
        let range = ops::split_if_worth(bytes, memory::ALIGNMENT, COPIED, part, parts);
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
        self.launcher.purpose = Purpose {
            node: Some(n),
            group: false,
        };
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
        self.launcher.purpose = Purpose {
            node: nodes.last().copied(),
            group: nodes.len() > 1,
        };
        builder.finish(&mut self.launcher).ok_or_else(overflow)
    }
}

/// What the steps of a device's plans depend on besides their graphs.
#[derive(Clone)]
pub(crate) struct CpuPlanner {
    pub path: CpuPath,
    /// Compute threads of the device.
    pub threads: usize,
    pub trail: Option<Trail>,
    pub communicator: Option<Arc<Communicator>>,
}

/// A plan that has no memory yet.
pub(crate) struct CpuPrepared {
    pub(super) steps: Vec<Step>,
    pub(super) places: Vec<Place>,
    pub(super) inputs: Vec<Reg>,
    pub(super) outputs: Vec<Reg>,
    pub(super) only_written: Vec<bool>,
    pub(super) indices: Vec<bool>,
    /// Where places lie in the arena.
    pub(super) ranges: Vec<Option<Range<usize>>>,
    /// Bytes of the values; behind them come the workspaces.
    pub(super) values: usize,
    /// Bytes of a part's workspace.
    pub(super) workspace: usize,
    pub(super) memory: PlanMemory,
    pub(super) small: bool,
    pub(super) max_rows: usize,
    pub(super) path: CpuPath,
    pub(super) parts: usize,
    pub(super) trail: Option<Trail>,
}

impl CpuPrepared {
    /// Whether a device with so many compute threads, on this path, can run it.
    pub fn is_for(&self, threads: usize, path: CpuPath) -> bool {
        self.parts <= threads && self.path == path
    }
}

impl Prepared for CpuPrepared {
    fn memory(&self) -> PlanMemory {
        self.memory
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

impl Planner for CpuPlanner {
    fn prepare(&self, graph: &Graph, hints: &PlanHints) -> Result<Box<dyn Prepared>, DeviceError> {
        Ok(Box::new(self.steps_of(graph, hints)?))
    }
}

impl CpuPlanner {
    /// Lowers the graph, makes its steps and lays its arena out.
    pub(super) fn steps_of(
        &self,
        graph: &Graph,
        hints: &PlanHints,
    ) -> Result<CpuPrepared, DeviceError> {
        let lowered = lower(graph, NAME, &ops::supports)?;
        let graph = &lowered.graph;
        let parts = hints.threads;
        let parts = parts.map_or(self.threads, |most| most.clamp(1, self.threads));
        let mut maker = Maker {
            roots: Roots::new(graph),
            launcher: Launcher::new(graph.max_rows(), self.path, parts),
            regs: HashMap::from([(Value::Absent, Reg::ABSENT)]),
            graph,
        };
        if hints.together {
            maker.launcher.communicator = self.communicator.clone();
        }
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
        let Schedule { units, stored } = fuse::schedule(graph, &maker.roots, hints.fuse)?;
        for unit in &units {
            match unit {
                Unit::Node(n) => maker.node(*n)?,
                Unit::Group(nodes) => maker.group(nodes, &stored)?,
            }
        }
        maker.launcher.purpose = Purpose::NONE;
        for (from, to, spec) in copies {
            let from = maker.reg(from)?;
            let copy = Copy { from, to, spec };
            maker.launcher.step_with_bytes(copy, &[from], &[to]);
        }
        // Of what runs, not of what was asked for: a decomposition may pick by an input that its op only computes with.
        let indices = graph.inputs_read_as_indices();
        self.resolve(maker.launcher, &lowered, (inputs, outputs), indices, hints)
    }

    /// Gives places their place in the arena and steps their barriers.
    fn resolve(
        &self,
        launcher: Launcher,
        lowered: &Lowered,
        (inputs, outputs): (Vec<Reg>, Vec<Reg>),
        indices: Vec<bool>,
        hints: &PlanHints,
    ) -> Result<CpuPrepared, DeviceError> {
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
        let memory = PlanMemory {
            arena: total,
            unshared: arena.unshared.saturating_add(tail),
            steps: steps.len(),
            barriers: meets.iter().filter(|m| **m == Meet::Always).count(),
        };
        let only_written = outputs.iter().map(|reg| {
            let reads = |step: &Pending| step.reads.contains(reg);
            let writes = |step: &Pending| step.writes.contains(reg);
            let soils = |step| reads(step) || writes(step) && !step.kernel.only_writes();
            !steps.iter().any(soils)
        });
        let only_written = only_written.collect();
        let trail = self.trail;
        let mark = |step: usize, group: bool, origin: Option<Origin>| {
            let op = origin.and_then(|origin| number(origin.op));
            let op = op.unwrap_or(u16::MAX);
            let step = hints.first_step.saturating_add(step) as u32;
            trail.map_or(0, |trail| (trail.pack)(step, op, group))
        };
        let steps: Vec<Step> = steps
            .into_iter()
            .zip(meets)
            .enumerate()
            .map(|(s, (step, meet))| {
                let Purpose { node, group } = step.purpose;
                let origin = node.and_then(|node| lowered.origin(node));
                Step {
                    mark: mark(s, group, origin),
                    origin,
                    kernel: match hints.empty_kernels {
                        true => Box::new(Empty(step.kernel)),
                        false => step.kernel,
                    },
                    meet,
                }
            })
            .collect();
        Ok(CpuPrepared {
            small: is_small(&places, &steps),
            steps,
            places,
            inputs,
            outputs,
            only_written,
            indices,
            ranges: arena.ranges,
            values,
            workspace,
            memory,
            max_rows,
            path,
            parts,
            trail,
        })
    }
}

//! A graph in units: nodes that MLX computes together, and nodes that the CPU backend's kernels do.
//!
//! A unit of MLX records its nodes as lazy arrays and evaluates, at its end, what later units read. Between units
//! the plan can pause, stop, and says where it is.

use std::{
    cell::RefCell,
    collections::HashMap,
    rc::Rc,
    sync::{Arc, atomic::AtomicBool},
};

use hotcell_graph::{
    Graph, GraphBuilder, TensorSpec, Value,
    op::{Attribute, Call, OpRow, ValueSpec, number},
};

use super::{NAME, host::HostPart, ops, run::State, weights::Weights};
use crate::{
    backend::{Buffer, Device, DeviceError, Trail},
    bound::Bound,
    lower::lower,
    plan::{Plan, PlanHints, PlanMemory, Slot},
};

/// Nodes of one unit at most: what lies between two looks at the clock, and lives at the same time.
const MOST_NODES: usize = 64;

pub(super) fn overflow() -> DeviceError {
    DeviceError::OutOfMemory {
        what: "the plan's values".to_owned(),
        bytes: usize::MAX,
    }
}

/// A node that MLX computes.
pub(super) struct MlxNode {
    pub op: &'static OpRow,
    pub attributes: Vec<Attribute>,
    /// Specs and numbers of its inputs; an absent one has no number.
    pub specs: Vec<ValueSpec>,
    pub inputs: Vec<Option<usize>>,
    pub results: Vec<TensorSpec>,
    /// Number of its first result.
    pub first: usize,
    pub launch: ops::Launch,
}

pub(super) enum Work {
    Mlx(Vec<MlxNode>),
    Host(HostPart),
}

pub(super) struct Unit {
    pub work: Work,
    /// Values that later units, or the caller, read.
    pub kept: Vec<usize>,
    /// Values that nobody reads after it.
    pub dead: Vec<usize>,
    /// How the trail names it.
    pub mark: u64,
}

/// An input or output of the graph.
pub(super) struct Place {
    pub spec: ValueSpec,
    /// Number of the value.
    pub value: usize,
    pub constant: bool,
    /// Bytes for the greatest number of rows.
    pub bytes: usize,
    pub per_row: Option<usize>,
    pub written: bool,
}

pub(super) struct MlxPlan {
    /// What was lowered, and the device of what MLX has no op for.
    pub(super) graph: Graph,
    pub(super) cpu: Rc<dyn Device>,
    pub(super) units: Vec<Unit>,
    /// Inputs, then outputs.
    pub(super) places: Vec<Place>,
    pub(super) inputs: usize,
    pub(super) bound: Vec<Option<Bound>>,
    pub(super) rebound: bool,
    pub(super) most_rows: usize,
    pub(super) max_rows: usize,
    pub(super) allocated: bool,
    pub(super) memory: PlanMemory,
    pub(super) stop: Arc<AtomicBool>,
    pub(super) trail: Option<Trail>,
    pub(super) state: State,
}

/// Numbers of a graph's values: inputs first, then each node's results.
struct Numbers {
    inputs: usize,
    firsts: Vec<usize>,
    count: usize,
}

impl Numbers {
    fn new(graph: &Graph) -> Self {
        let inputs = graph.inputs().len();
        let mut count = inputs;
        let firsts = graph.nodes().iter().map(|node| {
            let first = count;
            count += node.outputs.len();
            first
        });
        Self {
            inputs,
            firsts: firsts.collect(),
            count,
        }
    }

    fn of(&self, value: Value) -> Option<usize> {
        match value {
            Value::Absent => None,
            Value::Input(i) => Some(i as usize).filter(|i| *i < self.inputs),
            Value::Node { node, output } => Some(self.firsts.get(node as usize)? + output as usize),
        }
    }
}

/// Whether decomposing a call only gives the same call again: what promotes its inputs, for inputs that need not be.
fn is_fixed_point(call: &Call<'_>) -> bool {
    let Some(decompose) = call.op.decompose else {
        return true;
    };
    let again = || -> Option<bool> {
        // One row is as good as any: what an op becomes does not depend on how many there are.
        let mut builder = GraphBuilder::new(1);
        let mut inputs = Vec::with_capacity(call.inputs.len());
        for spec in call.inputs {
            inputs.push(match spec {
                ValueSpec::Tensor(t) => builder.tensor("x", t.clone()).ok()?,
                ValueSpec::Cache(c) => builder.cache("c", *c).ok()?,
                ValueSpec::Absent => Value::Absent,
            });
        }
        let results = decompose(&mut builder, &inputs, call.attributes).ok()?;
        let graph = builder.finish(&results).ok()?;
        Some(graph.nodes().iter().any(|node| {
            std::ptr::eq(node.op, call.op)
                && graph
                    .input_specs(node)
                    .is_ok_and(|specs| specs == call.inputs)
        }))
    };
    again().unwrap_or(true)
}

/// A node's bytes for the greatest number of rows.
fn bytes_of(specs: &[TensorSpec], max_rows: usize) -> Result<usize, DeviceError> {
    specs.iter().try_fold(0usize, |sum, t| {
        t.bytes(max_rows)
            .and_then(|n| sum.checked_add(n))
            .ok_or_else(overflow)
    })
}

fn places(graph: &Graph, numbers: &Numbers) -> Result<Vec<Place>, DeviceError> {
    let written = |i: usize| {
        graph.nodes().iter().any(|node| match node.op.effect {
            hotcell_graph::op::Effect::Writes(at) => {
                node.inputs.get(at) == Some(&Value::Input(i as u32))
            }
            _ => false,
        })
    };
    let place = |spec: ValueSpec, value, constant, written| -> Result<Place, DeviceError> {
        let (bytes, per_row) = match &spec {
            ValueSpec::Tensor(t) => (
                t.bytes(graph.max_rows()),
                t.shape.is_symbolic().then(|| t.bytes(1)).flatten(),
            ),
            ValueSpec::Cache(c) => (c.bytes(), None),
            ValueSpec::Absent => (Some(0), None),
        };
        Ok(Place {
            bytes: bytes.ok_or_else(overflow)?,
            spec,
            value,
            constant,
            per_row,
            written,
        })
    };
    let mut all = Vec::new();
    for (i, input) in graph.inputs().iter().enumerate() {
        all.push(place(input.spec.clone(), i, input.constant, written(i))?);
    }
    for &value in graph.outputs() {
        let number = numbers.of(value).ok_or_else(overflow)?;
        all.push(place(graph.spec(value)?, number, false, true)?);
    }
    Ok(all)
}

impl MlxPlan {
    pub fn new(
        graph: &Graph,
        hints: &PlanHints,
        cpu: &Rc<dyn Device>,
        double: bool,
        weights: Rc<RefCell<Weights>>,
        trail: Option<Trail>,
    ) -> Result<Self, DeviceError> {
        // What is refused must not have been allocated.
        if let (true, Some(most)) = (hints.allocate, hints.max_bytes) {
            let dry = PlanHints {
                allocate: false,
                max_bytes: None,
                ..*hints
            };
            let plan = Self::new(graph, &dry, cpu, double, Rc::clone(&weights), None)?;
            if plan.memory.arena > most {
                return Err(DeviceError::OutOfMemory {
                    what: "the plan's values".to_owned(),
                    bytes: plan.memory.arena,
                });
            }
        }
        let max_rows = graph.max_rows();
        let native = |call: &Call<'_>| ops::fits(call, max_rows) && ops::supports(call, double);
        let graph = lower(graph, NAME, &|call| {
            native(call) || cpu.supports(call) && is_fixed_point(call)
        })?;
        let numbers = Numbers::new(&graph);
        let ranges = ranges(&graph, &native)?;
        // The last unit that reads each value; outputs are read after all.
        let mut last: HashMap<usize, usize> = HashMap::new();
        for (u, (range, _)) in ranges.iter().enumerate() {
            for node in &graph.nodes()[range.clone()] {
                last.extend(
                    node.inputs
                        .iter()
                        .filter_map(|v| Some((numbers.of(*v)?, u))),
                );
            }
        }
        for &value in graph.outputs() {
            last.extend(numbers.of(value).map(|v| (v, ranges.len())));
        }
        let mut units = Vec::new();
        let mut memory = PlanMemory::default();
        let (mut live, mut most) = (0usize, 0usize);
        let mut sizes: HashMap<usize, usize> = HashMap::new();
        for (u, (range, on_mlx)) in ranges.iter().enumerate() {
            let wanted = |value: usize| last.get(&value).is_some_and(|l| *l > u);
            let nodes = &graph.nodes()[range.clone()];
            let mut kept = vec![];
            for (n, node) in range.clone().zip(nodes) {
                for (o, spec) in node.outputs.iter().enumerate() {
                    let value = numbers.firsts[n] + o;
                    let bytes = bytes_of(std::slice::from_ref(spec), max_rows)?;
                    live = live.checked_add(bytes).ok_or_else(overflow)?;
                    memory.unshared = memory.unshared.saturating_add(bytes);
                    sizes.insert(value, bytes);
                    if wanted(value) {
                        kept.push(value);
                    }
                }
            }
            most = most.max(live);
            let mut dead: Vec<usize> = sizes.keys().copied().filter(|v| !wanted(*v)).collect();
            dead.sort_unstable();
            for value in &dead {
                live -= sizes.remove(value).unwrap_or(0);
            }
            let work = match on_mlx {
                true => Work::Mlx(mlx_nodes(&graph, range.clone(), &numbers, double)?),
                false => {
                    let number = |v| numbers.of(v);
                    let range = range.clone();
                    let part = HostPart::new(&graph, range, &number, &wanted, &**cpu, hints)?;
                    memory.arena = memory
                        .arena
                        .checked_add(part.bytes)
                        .and_then(|n| n.checked_add(part.plan.memory().arena))
                        .ok_or_else(overflow)?;
                    memory.barriers += 1;
                    Work::Host(part)
                }
            };
            let op = nodes.last().and_then(|n| number(n.op.name));
            let mark = trail.map_or(0, |trail| {
                (trail.pack)(u as u32, op.unwrap_or(u16::MAX), nodes.len() > 1)
            });
            units.push(Unit {
                work,
                kept,
                dead,
                mark,
            });
        }
        memory.arena = memory.arena.checked_add(most).ok_or_else(overflow)?;
        memory.unshared = memory.unshared.max(memory.arena);
        memory.steps = units.len();
        let places = places(&graph, &numbers)?;
        Ok(Self {
            units,
            cpu: Rc::clone(cpu),
            inputs: graph.inputs().len(),
            bound: places.iter().map(|_| None).collect(),
            places,
            rebound: true,
            most_rows: 0,
            max_rows,
            allocated: hints.allocate,
            memory,
            stop: Arc::default(),
            trail,
            state: State::new(numbers.count, weights),
            graph,
        })
    }

    fn place_of(&self, slot: Slot) -> Option<usize> {
        let at = match slot {
            Slot::Input(i) => Some(i).filter(|i| *i < self.inputs),
            Slot::Output(i) => self.inputs.checked_add(i),
        };
        at.filter(|at| *at < self.places.len())
    }
}

/// Nodes in runs of one kind.
fn ranges(
    graph: &Graph,
    native: &dyn Fn(&Call<'_>) -> bool,
) -> Result<Vec<(std::ops::Range<usize>, bool)>, DeviceError> {
    let mut ranges: Vec<(std::ops::Range<usize>, bool)> = Vec::new();
    for (n, node) in graph.nodes().iter().enumerate() {
        let specs = graph.input_specs(node)?;
        let on_mlx = native(&Call {
            op: node.op,
            inputs: &specs,
            attributes: &node.attributes,
        });
        match ranges.last_mut() {
            Some((range, kind)) if *kind == on_mlx && range.len() < MOST_NODES => {
                range.end = n + 1;
            }
            _ => ranges.push((n..n + 1, on_mlx)),
        }
    }
    Ok(ranges)
}

fn mlx_nodes(
    graph: &Graph,
    range: std::ops::Range<usize>,
    numbers: &Numbers,
    double: bool,
) -> Result<Vec<MlxNode>, DeviceError> {
    let mut nodes = Vec::with_capacity(range.len());
    for n in range {
        let node = &graph.nodes()[n];
        let specs = graph.input_specs(node)?;
        let call = Call {
            op: node.op,
            inputs: &specs,
            attributes: &node.attributes,
        };
        let launch = ops::launch(&call, double).ok_or_else(|| DeviceError::Unsupported {
            backend: NAME,
            op: node.op.name,
            why: "it is not in the table".to_owned(),
        })?;
        nodes.push(MlxNode {
            op: node.op,
            attributes: node.attributes.clone(),
            inputs: node.inputs.iter().map(|v| numbers.of(*v)).collect(),
            specs,
            results: node.outputs.clone(),
            first: numbers.firsts[n],
            launch,
        });
    }
    Ok(nodes)
}

impl Plan for MlxPlan {
    fn bind_for(
        &mut self,
        rows: usize,
        slot: Slot,
        buffer: &Buffer,
        offset: usize,
    ) -> Result<(), DeviceError> {
        let fail = |what: String| Err(DeviceError::Binding(format!("{slot:?}: {what}")));
        let Some(at) = self.place_of(slot) else {
            return fail("the graph has no such slot".to_owned());
        };
        let place = &self.places[at];
        let Some(host) = buffer.host() else {
            return fail("MLX cannot address this buffer".to_owned());
        };
        let rows = rows.min(self.max_rows);
        // No overflow: never more than at the greatest number of rows, which was checked.
        let bytes = place.per_row.map_or(place.bytes, |bytes| bytes * rows);
        let end = offset.checked_add(bytes).filter(|end| *end <= host.len);
        let Some(end) = end else {
            return fail(format!("needs {bytes} bytes at {offset}, has {}", host.len));
        };
        if place.written && !host.writable {
            return fail("the graph writes it and the buffer is read-only".to_owned());
        }
        let start = host.start.addr();
        self.bound[at] = Some(Bound {
            buffer: buffer.clone(),
            offset,
            range: start + offset..start + end,
            rows,
            written: place.written,
            slot,
        });
        self.state.forget(place.value);
        if let Slot::Input(i) = slot {
            for unit in &mut self.units {
                if let Work::Host(part) = &mut unit.work
                    && let Some(inner) = part.ins.iter().position(|p| p.value == i)
                {
                    part.plan
                        .bind_for(rows, Slot::Input(inner), buffer, offset)?;
                }
            }
        }
        self.rebound = true;
        Ok(())
    }

    fn stop_when(&mut self, flag: Arc<AtomicBool>) {
        for unit in &mut self.units {
            if let Work::Host(part) = &mut unit.work {
                part.plan.stop_when(Arc::clone(&flag));
            }
        }
        self.stop = flag;
    }

    fn release(&mut self) {
        self.stop = Arc::default();
        self.bound.iter_mut().for_each(|bound| *bound = None);
        for unit in &mut self.units {
            if let Work::Host(part) = &mut unit.work {
                part.plan.release();
            }
        }
        self.state.clear();
        self.rebound = true;
    }

    fn memory(&self) -> PlanMemory {
        self.memory
    }

    fn execute_from(
        &mut self,
        rows: usize,
        from: usize,
        pause: &dyn Fn() -> bool,
    ) -> Result<Option<usize>, DeviceError> {
        self.run_from(rows, from, pause)
    }
}

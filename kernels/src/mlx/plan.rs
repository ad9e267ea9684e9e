//! A graph in units: nodes that MLX computes together, and nodes that the CPU backend's kernels do.
//!
//! A unit of MLX records its nodes as lazy arrays and evaluates, at its end, what later units read. Between units
//! the plan can pause, stop, and says where it is.

use std::{
    collections::{HashMap, HashSet},
    rc::Rc,
    sync::{Arc, atomic::AtomicBool},
};

use hotcell_graph::{
    Graph, TensorSpec, Value,
    graph::Node,
    op::{Attribute, Call, OpRow, ValueSpec, number},
};

use super::{
    NAME, ops,
    ran::{Places, Tally, places as ops_at},
    run::State,
    weights::{Form, Weights},
};
use crate::{
    backend::{Buffer, Device, DeviceError, Trail},
    bound::Bound,
    lower::lower,
    part::{HostPart, Inputs, Numbers, is_fixed_point},
    plan::{Origin, Plan, PlanHints, PlanMemory, Slot},
};

/// Nodes of one unit at most: what lies between two looks at the clock, and lives at the same time.
const MOST_NODES: usize = 64;

/// Bytes that a unit's nodes make and take after which it ends.
const MOST_BYTES: usize = 64 << 20;

/// Products after which a unit ends: about a fifth of a second on one slow core. MLX computes a unit in one call that
/// cannot be left, so a node that has more is a unit by itself, and an execution is stopped after it.
const MOST_PRODUCTS: usize = 200_000_000;

pub(super) use crate::part::overflow;

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
    /// Which ops its nodes are.
    pub ops: Places,
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

/// What plans are made on.
pub(super) struct Side {
    /// The device of what MLX has no op for.
    pub cpu: Rc<dyn Device>,
    /// Whether MLX has f64 here.
    pub double: bool,
    /// Bytes that there are, as far as it is known.
    pub memory: usize,
    pub weights: Rc<Weights>,
    /// What ran of each op.
    pub ran: Tally,
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
    /// Of each input, whether it has a part in where something is read or written.
    indices: Vec<bool>,
    pub(super) most_rows: usize,
    pub(super) max_rows: usize,
    pub(super) allocated: bool,
    pub(super) memory: PlanMemory,
    /// The node that takes most besides its inputs and results, and how much.
    greediest: Option<(usize, &'static str)>,
    pub(super) stop: Arc<AtomicBool>,
    pub(super) trail: Option<Trail>,
    /// Of all units and the steps of those that are parts on the processor, which follow theirs.
    origins: Vec<Option<Origin>>,
    pub(super) state: State,
    pub(super) ran: Tally,
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
        on: &Side,
        trail: Option<Trail>,
    ) -> Result<Self, DeviceError> {
        let Side { cpu, double, .. } = on;
        let double = *double;
        // What is refused must not have been allocated.
        if hints.allocate {
            let dry = PlanHints {
                allocate: false,
                max_bytes: None,
                ..*hints
            };
            let plan = Self::new(graph, &dry, on, None)?;
            // MLX dies of what the machine does not have.
            let most = hints.max_bytes.unwrap_or(usize::MAX).min(on.memory);
            if plan.memory.arena > most {
                return Err(plan.too_large());
            }
        }
        let max_rows = graph.max_rows();
        let native = |call: &Call<'_>| ops::fits(call, max_rows, double);
        let lowered = lower(graph, NAME, &|call| {
            native(call) || cpu.supports(call) && is_fixed_point(call)
        })?;
        let graph = &lowered.graph;
        let numbers = Numbers::new(graph);
        let ranges = ranges(graph, &native, double)?;
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
        let mut origins = Vec::new();
        let mut memory = PlanMemory::default();
        let (mut live, mut most) = (0usize, 0usize);
        let mut sizes: HashMap<usize, usize> = HashMap::new();
        let mut greediest = None;
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
            let mut taken = 0usize;
            if *on_mlx {
                for node in nodes {
                    let takes = needs(graph, node, double)?.bytes;
                    taken = taken.checked_add(takes).ok_or_else(overflow)?;
                    greediest = greediest.max(Some((takes, node.op.name)));
                }
            }
            most = most.max(live.checked_add(taken).ok_or_else(overflow)?);
            let mut dead: Vec<usize> = sizes.keys().copied().filter(|v| !wanted(*v)).collect();
            dead.sort_unstable();
            for value in &dead {
                live -= sizes.remove(value).unwrap_or(0);
            }
            let step = origins.len();
            origins.push(lowered.origin(range.end.saturating_sub(1)));
            let work = match on_mlx {
                true => Work::Mlx(mlx_nodes(graph, range.clone(), &numbers, double)?),
                false => {
                    let range = range.clone();
                    let first_step = origins.len();
                    let hints = PlanHints {
                        first_step,
                        ..*hints
                    };
                    let part = HostPart::new(
                        &lowered,
                        range,
                        &numbers,
                        &wanted,
                        &**cpu,
                        Inputs::InPlace,
                        &hints,
                    )?;
                    origins.extend(&part.origins);
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
                (trail.pack)(step as u32, op.unwrap_or(u16::MAX), nodes.len() > 1)
            });
            units.push(Unit {
                work,
                kept,
                dead,
                mark,
                ops: ops_at(graph, range.clone()),
            });
        }
        let copies = copies(graph, &ranges)?;
        let all = memory.arena.checked_add(most);
        memory.arena = all
            .and_then(|n| n.checked_add(copies))
            .ok_or_else(overflow)?;
        memory.unshared = memory.unshared.max(memory.arena);
        memory.steps = units.len();
        let places = places(graph, &numbers)?;
        Ok(Self {
            units,
            cpu: Rc::clone(cpu),
            greediest,
            ran: on.ran.clone(),
            inputs: graph.inputs().len(),
            indices: graph.inputs_read_as_indices(),
            bound: places.iter().map(|_| None).collect(),
            places,
            rebound: true,
            most_rows: 0,
            max_rows,
            allocated: hints.allocate,
            memory,
            stop: Arc::default(),
            trail,
            origins,
            state: State::new(numbers.count, Rc::clone(&on.weights)),
            graph: lowered.graph,
        })
    }

    /// Says what is too large: one op's own, if it is more than all the rest.
    fn too_large(&self) -> DeviceError {
        let bytes = self.memory.arena;
        let what = match self.greediest {
            Some((most, op)) if most > bytes / 2 => {
                format!("the plan's values with {most} bytes for {op} besides its result")
            }
            _ => "the plan's values".to_owned(),
        };
        DeviceError::OutOfMemory { what, bytes }
    }

    fn place_of(&self, slot: Slot) -> Option<usize> {
        let at = match slot {
            Slot::Input(i) => Some(i).filter(|i| *i < self.inputs),
            Slot::Output(i) => self.inputs.checked_add(i),
        };
        at.filter(|at| *at < self.places.len())
    }
}

/// What a node of MLX takes besides its inputs and results.
fn needs(graph: &Graph, node: &Node, double: bool) -> Result<ops::Needs, DeviceError> {
    let specs = graph.input_specs(node)?;
    let call = Call {
        op: node.op,
        inputs: &specs,
        attributes: &node.attributes,
    };
    ops::needs(&call, graph.max_rows(), double).ok_or_else(overflow)
}

/// Bytes of what MLX copies of inputs, in the forms in which it computes: it reads nothing that it did not allocate. Plans
/// that read the same constants share their forms, and each counts them. While one is made, a part of it is there twice.
fn copies(graph: &Graph, ranges: &[(std::ops::Range<usize>, bool)]) -> Result<usize, DeviceError> {
    let mut made: HashSet<(u32, Form)> = HashSet::new();
    let (mut all, mut largest) = (0usize, 0);
    let on_mlx = ranges.iter().filter(|(_, on_mlx)| *on_mlx);
    for node in on_mlx.flat_map(|(range, _)| &graph.nodes()[range.clone()]) {
        let specs = graph.input_specs(node)?;
        let call = Call {
            op: node.op,
            inputs: &specs,
            attributes: &node.attributes,
        };
        for (at, value) in node.inputs.iter().enumerate() {
            let (Value::Input(i), Some(ValueSpec::Tensor(spec))) = (value, specs.get(at)) else {
                continue;
            };
            let Some(form) = ops::form_at(&call, at) else {
                continue;
            };
            if made.insert((*i, form)) {
                let bytes = match spec.shape.is_symbolic() {
                    true => spec.bytes(graph.max_rows()),
                    false => form.bytes(spec),
                };
                let bytes = bytes.ok_or_else(overflow)?;
                all = all.checked_add(bytes).ok_or_else(overflow)?;
                largest = largest.max(bytes);
            }
        }
    }
    all.checked_add(largest).ok_or_else(overflow)
}

/// Nodes in runs of one kind.
fn ranges(
    graph: &Graph,
    native: &dyn Fn(&Call<'_>) -> bool,
    double: bool,
) -> Result<Vec<(std::ops::Range<usize>, bool)>, DeviceError> {
    let mut ranges: Vec<(std::ops::Range<usize>, bool)> = Vec::new();
    let (mut bytes, mut products) = (0usize, 0usize);
    for (n, node) in graph.nodes().iter().enumerate() {
        let specs = graph.input_specs(node)?;
        let on_mlx = native(&Call {
            op: node.op,
            inputs: &specs,
            attributes: &node.attributes,
        });
        let is_full = bytes > MOST_BYTES || products > MOST_PRODUCTS;
        let begins = match ranges.last_mut() {
            Some((range, kind)) if *kind == on_mlx && range.len() < MOST_NODES && !is_full => {
                range.end = n + 1;
                false
            }
            _ => true,
        };
        if begins {
            ranges.push((n..n + 1, on_mlx));
            (bytes, products) = (0, 0);
        }
        if on_mlx {
            let needs = needs(graph, node, double)?;
            let made = bytes_of(&node.outputs, graph.max_rows())?;
            bytes = bytes.saturating_add(made).saturating_add(needs.bytes);
            products = products.saturating_add(needs.products);
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
    fn origins(&self) -> Vec<Option<Origin>> {
        self.origins.clone()
    }

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

    /// As of a plan of the CPU backend's, whose kernels run parts of this one. What MLX computes reads no memory but its own:
    /// an input is copied into an array once for an execution, and indices are checked in the copy that MLX gets.
    fn reads_as_index(&self, i: usize) -> Option<bool> {
        self.indices.get(i).copied()
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

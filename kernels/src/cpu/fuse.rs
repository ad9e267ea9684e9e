//! Which nodes of a graph become one kernel: elementwise ops whose results have equally many elements.
//!
//! One pass in the graph's order. A group runs where its first node stood, so a node may join it only if all
//! else that the node reads is there by then; that keeps the order of everything else and needs no search.

use std::collections::HashMap;

use hotcell_graph::{
    Graph, GraphError, Value,
    op::{Attribute, Call, Effect, ValueSpec},
};

use super::{
    elementwise::{self, Extent},
    ops,
};

/// Nodes of a group at most: beyond, tiles get too small to be worth it.
const MOST_NODES: usize = 32;

/// Operands of a group at most: each is one more stream of memory.
const MOST_OPERANDS: usize = 24;

/// How many units back a node may join a group that gives it nothing. Further back, its result would be kept for long.
const WINDOW: usize = 8;

/// What is launched as one.
pub(super) enum Unit {
    /// A node by itself.
    Node(usize),
    /// Elementwise nodes, in the graph's order.
    Group(Vec<usize>),
}

/// A graph's nodes in units, in the order of execution.
pub(super) struct Schedule {
    pub units: Vec<Unit>,
    /// Per node: its result is in memory, because another unit or the caller reads it.
    pub stored: Vec<bool>,
}

/// Values that are another value's memory under another shape, and whose memory that is.
pub(super) struct Roots(HashMap<Value, Value>);

impl Roots {
    pub fn new(graph: &Graph) -> Self {
        let mut roots = HashMap::new();
        for (n, node) in graph.nodes().iter().enumerate() {
            if let (true, &[from]) = (ops::is_alias(node.op.name), node.inputs.as_slice()) {
                let root = roots.get(&from).copied().unwrap_or(from);
                let (node, output) = (n as u32, 0);
                roots.insert(Value::Node { node, output }, root);
            }
        }
        Self(roots)
    }

    /// The value whose memory it is, itself if it is no other's.
    pub fn of(&self, value: Value) -> Value {
        self.0.get(&value).copied().unwrap_or(value)
    }
}

/// The bytes of a node that is a literal of one element: no kernel reads them from memory.
pub(super) fn scalar_literal(graph: &Graph, node: usize) -> Option<&[u8]> {
    let node = graph.nodes().get(node)?;
    let one = Extent::of(&node.outputs.first()?.shape).is_one();
    match (node.op.name, node.attributes.as_slice()) {
        ("literal", [_, _, Attribute::Bytes(bytes)]) if one => Some(bytes),
        _ => None,
    }
}

struct Open {
    extent: Extent,
    nodes: Vec<usize>,
    operands: Vec<Value>,
}

/// Divides the nodes that matter into units; without `fuse`, every node is one.
pub(super) fn schedule(graph: &Graph, roots: &Roots, fuse: bool) -> Result<Schedule, GraphError> {
    let nodes = graph.nodes();
    let needed = needed(graph);
    let mut schedule = Schedule {
        units: vec![],
        stored: vec![false; nodes.len()],
    };
    // Unit of each node that is in one, and the group of each unit.
    let mut unit_of: Vec<Option<usize>> = vec![None; nodes.len()];
    let mut elementwise = vec![false; nodes.len()];
    let mut open: Vec<Option<Open>> = vec![];
    let mut latest: HashMap<Extent, usize> = HashMap::new();
    for &value in graph.outputs() {
        if let Value::Node { node, .. } = roots.of(value) {
            schedule.stored[node as usize] = true;
        }
    }
    for (n, node) in nodes.iter().enumerate() {
        if !needed[n] {
            continue;
        }
        let specs = graph.input_specs(node)?;
        elementwise[n] = elementwise::supports(&Call {
            op: node.op,
            inputs: &specs,
            attributes: &node.attributes,
        });
        if !elementwise[n] && !ops::is_alias(node.op.name) {
            for &value in &node.inputs {
                if let Value::Node { node, .. } = roots.of(value) {
                    schedule.stored[node as usize] = true;
                }
            }
        }
    }
    for (n, node) in nodes.iter().enumerate() {
        if !needed[n] || ops::is_alias(node.op.name) {
            continue;
        }
        if !elementwise[n] {
            if scalar_literal(graph, n).is_some() && !schedule.stored[n] {
                continue;
            }
            unit_of[n] = Some(open.len());
            open.push(None);
            schedule.units.push(Unit::Node(n));
            continue;
        }
        let Some(extent) = node.outputs.first().map(|t| Extent::of(&t.shape)) else {
            continue;
        };
        // The first unit that the node can be in.
        let mut first = 0;
        let mut operands: Vec<Value> = vec![];
        for &value in &node.inputs {
            let root = roots.of(value);
            operands.push(root);
            let Value::Node { node: from, .. } = root else {
                continue;
            };
            let from = from as usize;
            if scalar_literal(graph, from).is_some() {
                operands.pop();
                continue;
            }
            let Some(unit) = unit_of[from] else { continue };
            let whole = match graph.spec(value)? {
                ValueSpec::Tensor(t) => Extent::of(&t.shape) == extent,
                _ => false,
            };
            let inside = elementwise[from] && whole;
            first = first.max(if inside { unit } else { unit + 1 });
        }
        let fits = |u: usize| match open.get(u) {
            Some(Some(group)) => {
                let more = operands.iter().filter(|v| !group.operands.contains(v));
                fuse && group.extent == extent
                    && group.nodes.len() < MOST_NODES
                    && group.operands.len() + more.count() <= MOST_OPERANDS
            }
            _ => false,
        };
        let recent = latest.get(&extent).copied();
        let recent = recent.filter(|u| *u >= first && u + WINDOW >= open.len());
        let unit = [Some(first), recent]
            .into_iter()
            .flatten()
            .find(|u| fits(*u));
        let unit = unit.unwrap_or_else(|| {
            open.push(Some(Open {
                extent,
                nodes: vec![],
                operands: vec![],
            }));
            schedule.units.push(Unit::Group(vec![]));
            open.len() - 1
        });
        latest.insert(extent, unit);
        unit_of[n] = Some(unit);
        if let Some(Some(group)) = open.get_mut(unit) {
            group.nodes.push(n);
            for value in operands {
                let inside = match value {
                    Value::Node { node, .. } => unit_of[node as usize] == Some(unit),
                    _ => false,
                };
                if !inside && !group.operands.contains(&value) {
                    group.operands.push(value);
                }
            }
        }
        for &value in &node.inputs {
            if let Value::Node { node: from, .. } = roots.of(value)
                && unit_of[from as usize] != Some(unit)
                && scalar_literal(graph, from as usize).is_none()
            {
                schedule.stored[from as usize] = true;
            }
        }
    }
    for (unit, group) in schedule.units.iter_mut().zip(open) {
        if let (Unit::Group(nodes), Some(group)) = (unit, group) {
            *nodes = group.nodes;
        }
    }
    Ok(schedule)
}

/// Which nodes the outputs or the caches depend on.
fn needed(graph: &Graph) -> Vec<bool> {
    let mut needed = vec![false; graph.nodes().len()];
    let mark = |needed: &mut Vec<bool>, values: &[Value]| {
        for value in values {
            if let Value::Node { node, .. } = value {
                needed[*node as usize] = true;
            }
        }
    };
    mark(&mut needed, graph.outputs());
    for (n, node) in graph.nodes().iter().enumerate().rev() {
        if needed[n] || matches!(node.op.effect, Effect::Writes(_)) {
            needed[n] = true;
            mark(&mut needed, &node.inputs);
        }
    }
    needed
}

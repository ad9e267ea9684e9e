//! Splits a graph over devices: which device computes which node, and the graphs that follow from it.
//!
//! After ggml's scheduler (spec section 3, "Scheduler"), without its effects: where the inputs lie decides first, then
//! neighbours, then what a device can compute. A function of values: nothing here knows of processes.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use hotcell_proto::limits;

use crate::{
    graph::{Graph, GraphBuilder, GraphError, Node, Value},
    op::{Effect, ValueSpec},
};

/// What is known before a graph is split. Devices are numbers from 0 on; the last one has to be able to compute everything.
pub struct Placed<'a> {
    /// How many devices there are.
    pub devices: usize,
    /// Of each input of the graph, the device that it lies on; `None`: on none yet, so that it goes where it is read.
    pub inputs: &'a [Option<usize>],
    /// Whether a device can compute a node.
    pub computes: &'a dyn Fn(usize, &Node) -> bool,
    /// Which inputs are weights.
    pub weights: &'a dyn Fn(usize) -> bool,
    /// From so many elements on which a node reads besides, a weight of the last device is worth being sent to the first
    /// device that computes the node; `None`: it never is.
    pub offload: Option<usize>,
}

/// A graph for one device.
#[derive(Clone, Debug)]
pub struct Part {
    /// Which device.
    pub device: usize,
    /// Its inputs are [`Part::inputs`], its outputs first [`Part::kept`] and then [`Part::sent`].
    pub graph: Graph,
    /// What its inputs are in the whole graph.
    pub inputs: Vec<Value>,
    /// Results that the device keeps: for parts of its own behind this one, or because the whole graph returns them.
    pub kept: Vec<Value>,
    /// Results, and the device whose parts read them.
    pub sent: Vec<(Value, usize)>,
}

/// The device of each node.
///
/// # Errors
/// [`GraphError::Limit`] for no device or more than [`limits::MAX_SPLIT_DEVICES`], [`GraphError::Malformed`] when the places are not
/// those of the graph's inputs, [`GraphError::Op`] naming an op that no device computes, or not the one where its cache is.
pub fn assign(graph: &Graph, placed: &Placed<'_>) -> Result<Vec<usize>, GraphError> {
    let devices = placed.devices;
    if !(1..=limits::MAX_SPLIT_DEVICES).contains(&devices) {
        return Err(GraphError::Limit(format!(
            "a graph is split over 1 to {} devices, not {devices}",
            limits::MAX_SPLIT_DEVICES
        )));
    }
    let there = placed.inputs.iter().flatten().all(|d| *d < devices);
    if placed.inputs.len() != graph.inputs().len() || !there {
        return Err(GraphError::Malformed(
            "the places are not those of the graph's inputs".to_owned(),
        ));
    }
    let mut on: Vec<Option<usize>> = Vec::with_capacity(graph.nodes().len());
    for node in graph.nodes() {
        on.push(by_inputs(graph, placed, node)?);
    }
    // Devices before the last one take what lies between nodes of theirs, and behind and before them; then all do.
    for least in [devices - 1, devices] {
        let takes = |device: usize| device < least;
        spread(graph.nodes().iter().zip(on.iter_mut()), placed, takes);
        spread(graph.nodes().iter().zip(on.iter_mut()).rev(), placed, takes);
    }
    let mut all = Vec::with_capacity(on.len());
    for (node, on) in graph.nodes().iter().zip(on) {
        all.push(match on {
            Some(device) => device,
            None => most_inputs(graph, placed, node, &all)?,
        });
    }
    Ok(all)
}

/// Where the greatest of the inputs is that lie on a device, if that computes the node. An effect is where its cache is.
fn by_inputs(graph: &Graph, placed: &Placed<'_>, node: &Node) -> Result<Option<usize>, GraphError> {
    let fail = |what: String| GraphError::Op {
        op: node.op.name,
        what,
    };
    let lies = |value: &Value| match value {
        Value::Input(i) => placed.inputs.get(*i as usize).copied().flatten(),
        _ => None,
    };
    if let Effect::Reads(i) | Effect::Writes(i) = node.op.effect {
        let device = node.inputs.get(i).and_then(lies);
        let device = device.ok_or_else(|| fail("its cache lies on no device".to_owned()))?;
        return match (placed.computes)(device, node) {
            true => Ok(Some(device)),
            false => Err(fail(format!(
                "its cache lies on device {device}, which does not compute it"
            ))),
        };
    }
    let mut greatest: Option<(usize, usize)> = None;
    for value in &node.inputs {
        let (Some(device), size) = (lies(value), bytes(graph, *value)) else {
            continue;
        };
        if greatest.is_none_or(|(most, _)| size > most) {
            greatest = Some((size, device));
        }
    }
    let Some((_, device)) = greatest else {
        return Ok(None);
    };
    let last = placed.devices - 1;
    if device == last
        && placed
            .offload
            .is_some_and(|least| beside(graph, placed, node) >= least)
        && let Some(first) = (0..last).find(|d| (placed.computes)(*d, node))
    {
        return Ok(Some(first));
    }
    Ok((placed.computes)(device, node).then_some(device))
}

/// Elements that a node reads besides weights, where it reads a weight.
fn beside(graph: &Graph, placed: &Placed<'_>, node: &Node) -> usize {
    let weight = |v: &Value| match v {
        Value::Input(i) => (placed.weights)(*i as usize),
        _ => false,
    };
    if !node.inputs.iter().any(weight) {
        return 0;
    }
    let read = node.inputs.iter().filter(|v| !weight(v));
    let elements = read.map(|v| match graph.spec(*v) {
        Ok(ValueSpec::Tensor(t)) => t.shape.elements(graph.max_rows()).unwrap_or(usize::MAX),
        _ => 0,
    });
    elements.fold(0, usize::saturating_add)
}

fn bytes(graph: &Graph, value: Value) -> usize {
    match graph.spec(value) {
        Ok(ValueSpec::Tensor(t)) => t.bytes(graph.max_rows()).unwrap_or(usize::MAX),
        Ok(ValueSpec::Cache(c)) => c.bytes().unwrap_or(usize::MAX),
        _ => 0,
    }
}

/// Nodes without a device go where the one before them went that these devices took.
fn spread<'a>(
    nodes: impl Iterator<Item = (&'a Node, &'a mut Option<usize>)>,
    placed: &Placed<'_>,
    takes: impl Fn(usize) -> bool,
) {
    let mut last = None;
    for (node, on) in nodes {
        match (*on, last) {
            (Some(device), _) => last = takes(device).then_some(device),
            (None, Some(device)) if (placed.computes)(device, node) => *on = Some(device),
            // What it cannot compute is somebody else's; behind it, it goes on.
            _ => {}
        }
    }
}

/// Of the devices that compute a node, the one where most of its inputs are; of several, the first.
fn most_inputs(
    graph: &Graph,
    placed: &Placed<'_>,
    node: &Node,
    before: &[usize],
) -> Result<usize, GraphError> {
    let on = |value: &Value| match value {
        Value::Absent => None,
        Value::Input(i) => placed.inputs.get(*i as usize).copied().flatten(),
        Value::Node { node, .. } => before.get(*node as usize).copied(),
    };
    let mut best: Option<(usize, usize)> = None;
    for device in (0..placed.devices).filter(|d| (placed.computes)(*d, node)) {
        let there = node.inputs.iter().filter(|v| on(v) == Some(device));
        let there = there.fold(0usize, |sum, v| sum.saturating_add(bytes(graph, *v)));
        if best.is_none_or(|(most, _)| there > most) {
            best = Some((there, device));
        }
    }
    best.map(|(_, device)| device)
        .ok_or_else(|| GraphError::Op {
            op: node.op.name,
            what: "no device computes it".to_owned(),
        })
}

/// The parts of a graph whose nodes are on these devices, in an order in which they can be executed one after the other: each
/// reads inputs of the graph and results of earlier parts. A device goes on for as long as it has nodes whose inputs are known.
///
/// # Errors
/// [`GraphError::Malformed`] when there is not a device for each node.
pub fn cut(graph: &Graph, on: &[usize]) -> Result<Vec<Part>, GraphError> {
    if on.len() != graph.nodes().len() {
        return Err(GraphError::Malformed(
            "there is not a device for each node".to_owned(),
        ));
    }
    let runs = runs(graph, on);
    // Which run makes each node, and who reads its results.
    let mut made_in = vec![0; on.len()];
    for (r, (_, nodes)) in runs.iter().enumerate() {
        for &n in nodes {
            if let Some(made) = made_in.get_mut(n) {
                *made = r;
            }
        }
    }
    let device = |run: usize| runs.get(run).map_or(0, |(device, _)| *device);
    let mut kept: Vec<BTreeSet<Value>> = vec![BTreeSet::new(); runs.len()];
    let mut sent: Vec<BTreeSet<(Value, usize)>> = vec![BTreeSet::new(); runs.len()];
    let maker = |value: &Value| match value {
        Value::Node { node, .. } => made_in.get(*node as usize).copied(),
        _ => None,
    };
    for (reader, (to, nodes)) in runs.iter().enumerate() {
        let read = nodes.iter().filter_map(|&n| graph.nodes().get(n));
        for value in read.flat_map(|node| &node.inputs) {
            let Some(maker) = maker(value).filter(|m| *m != reader) else {
                continue;
            };
            if device(maker) == *to {
                kept.get_mut(maker).map(|k| k.insert(*value));
            } else {
                sent.get_mut(maker).map(|s| s.insert((*value, *to)));
            }
        }
    }
    for value in graph.outputs() {
        if let Some(kept) = maker(value).and_then(|m| kept.get_mut(m)) {
            kept.insert(*value);
        }
    }
    let all = runs.iter().zip(kept).zip(sent);
    all.map(|(((device, nodes), kept), sent)| part(graph, *device, nodes, kept, sent))
        .collect()
}

/// Nodes by the runs in which they are computed, each run on one device.
fn runs(graph: &Graph, on: &[usize]) -> Vec<(usize, Vec<usize>)> {
    let count = graph.nodes().len();
    // What effects on one cache do, they do in their order.
    let mut before: Vec<Option<usize>> = vec![None; count];
    let mut last: BTreeMap<Value, usize> = BTreeMap::new();
    for (n, node) in graph.nodes().iter().enumerate() {
        if let Effect::Reads(i) | Effect::Writes(i) = node.op.effect
            && let Some(cache) = node.inputs.get(i)
            && let Some(before) = before.get_mut(n)
        {
            *before = last.insert(*cache, n);
        }
    }
    let mut done = vec![false; count];
    let known = |done: &[bool], n: usize, node: &Node| {
        let of_node = |v: &Value| match v {
            Value::Node { node, .. } => done.get(*node as usize).copied().unwrap_or(false),
            _ => true,
        };
        let after = before.get(n).copied().flatten();
        node.inputs.iter().all(of_node) && after.is_none_or(|b| done.get(b) == Some(&true))
    };
    let mut runs: Vec<(usize, Vec<usize>)> = Vec::new();
    let mut from = 0;
    while let Some(first) = (from..count).find(|n| done.get(*n) == Some(&false)) {
        from = first;
        let device = on.get(first).copied().unwrap_or(0);
        let mut run = Vec::new();
        // Inputs come before what reads them, so that one look from the front finds all that can be computed.
        for (n, node) in graph.nodes().iter().enumerate().skip(first) {
            let own = on.get(n) == Some(&device) && done.get(n) == Some(&false);
            if own && known(&done, n, node) {
                if let Some(done) = done.get_mut(n) {
                    *done = true;
                }
                run.push(n);
            }
        }
        runs.push((device, run));
    }
    runs
}

fn part(
    graph: &Graph,
    device: usize,
    nodes: &[usize],
    kept: BTreeSet<Value>,
    sent: BTreeSet<(Value, usize)>,
) -> Result<Part, GraphError> {
    let mut builder = GraphBuilder::new(graph.max_rows());
    let mut inputs = Vec::new();
    let mut values: HashMap<Value, Value> = HashMap::from([(Value::Absent, Value::Absent)]);
    for &n in nodes {
        let node = graph.nodes().get(n);
        let node = node.ok_or_else(|| GraphError::UnknownValue(format!("node {n}")))?;
        let mut operands = Vec::with_capacity(node.inputs.len());
        for value in &node.inputs {
            if let Some(known) = values.get(value) {
                operands.push(*known);
                continue;
            }
            let input = match (graph.spec(*value)?, value) {
                (ValueSpec::Cache(cache), _) => builder.cache(name_of(graph, *value), cache)?,
                (ValueSpec::Tensor(t), Value::Input(i))
                    if graph.inputs().get(*i as usize).is_some_and(|i| i.constant) =>
                {
                    builder.constant(name_of(graph, *value), t)?
                }
                (ValueSpec::Tensor(t), _) => builder.tensor(name_of(graph, *value), t)?,
                (ValueSpec::Absent, _) => Value::Absent,
            };
            inputs.push(*value);
            values.insert(*value, input);
            operands.push(input);
        }
        let made = builder.apply(node.op, operands, node.attributes.clone())?;
        for (output, value) in made.into_iter().enumerate() {
            let whole = Value::Node {
                node: n as u32,
                output: output as u32,
            };
            values.insert(whole, value);
        }
    }
    let kept: Vec<Value> = kept.into_iter().collect();
    let sent: Vec<(Value, usize)> = sent.into_iter().collect();
    let returned = kept.iter().chain(sent.iter().map(|(value, _)| value));
    let missing = |value: &Value| GraphError::UnknownValue(format!("{value:?}"));
    let returned = returned
        .map(|value| values.get(value).copied().ok_or_else(|| missing(value)))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(Part {
        device,
        graph: builder.finish(&returned)?,
        inputs,
        kept,
        sent,
    })
}

fn name_of(graph: &Graph, value: Value) -> String {
    match value {
        Value::Input(i) => graph.inputs().get(i as usize).map(|i| i.name.clone()),
        Value::Node { node, output } => Some(format!("result {output} of node {node}")),
        Value::Absent => None,
    }
    .unwrap_or_default()
}

//! Which nodes are a step: of the host as many as follow one another, of the device those that one kernel does, and of those that only
//! show what another one made, none.

use std::{collections::HashSet, ops::Range};

use hotcell_graph::{
    Graph, Value,
    graph::Node,
    op::{Call, ValueSpec},
};

use super::ops::{self, Kernel};
use crate::{backend::DeviceError, part::Numbers};

/// Nodes of a step at most.
const MOST: usize = 8;

/// Nodes that follow one another, all of the device.
pub(super) struct Following<'a> {
    pub calls: Vec<Call<'a>>,
    first: usize,
    nodes: &'a [Node],
    readers: &'a [Vec<usize>],
}

impl Following<'_> {
    /// What a node reads.
    pub fn input(&self, node: usize, input: usize) -> Option<Value> {
        self.nodes.get(node)?.inputs.get(input).copied()
    }

    /// Whether an input of a node is the first result of another one.
    pub fn is_result(&self, node: usize, input: usize, of: usize) -> bool {
        let result = u32::try_from(self.first + of).map(|node| Value::Node { node, output: 0 });
        result.is_ok_and(|result| self.input(node, input) == Some(result))
    }

    /// Whether nobody reads the first result of a node but the first `count` of these.
    pub fn is_within(&self, of: usize, count: usize) -> bool {
        let readers = self.readers.get(self.first + of).and_then(|r| r.first());
        let nodes = self.nodes.iter().take(count).enumerate();
        let read = nodes.flat_map(|(n, node)| (0..node.inputs.len()).map(move |i| (n, i)));
        readers == Some(&read.filter(|(n, i)| self.is_result(*n, *i, of)).count())
    }
}

pub(super) fn call<'a>(node: &'a Node, specs: &'a [ValueSpec]) -> Call<'a> {
    Call {
        op: node.op,
        inputs: specs,
        attributes: &node.attributes,
    }
}

/// How often each result of each node is read, being a result of the graph among it.
fn readers(graph: &Graph) -> Vec<Vec<usize>> {
    let nodes = graph.nodes().iter();
    let mut readers: Vec<Vec<usize>> = nodes.map(|node| vec![0; node.outputs.len()]).collect();
    let read = graph.nodes().iter().flat_map(|node| &node.inputs);
    for value in read.chain(graph.outputs()) {
        if let Value::Node { node, output } = *value
            && let Some(count) = readers
                .get_mut(node as usize)
                .and_then(|node| node.get_mut(output as usize))
        {
            *count += 1;
        }
    }
    readers
}

/// The steps' nodes. `kernels` has each node's, of which the first of several becomes that of all; with `fuse` only.
pub(super) fn steps(
    graph: &Graph,
    kernels: &mut [Option<Box<dyn Kernel>>],
    fuse: bool,
    has: &dyn Fn(&'static str) -> bool,
) -> Result<Vec<Range<usize>>, DeviceError> {
    let (nodes, readers) = (graph.nodes(), readers(graph));
    let mut steps: Vec<Range<usize>> = Vec::new();
    let mut n = 0;
    while n < nodes.len() {
        let is_device = |n: usize| kernels.get(n).is_some_and(Option::is_some);
        if !is_device(n) {
            match steps.last_mut() {
                Some(range) if !is_device(range.start) => range.end = n + 1,
                _ => steps.push(n..n + 1),
            }
            n += 1;
            continue;
        }
        let mut count = 1;
        if fuse {
            let there = (n..nodes.len()).take(MOST).take_while(|n| is_device(*n));
            let there = n..n + there.count();
            let of = nodes.get(there).unwrap_or_default();
            let specs = of.iter().map(|node| graph.input_specs(node));
            let specs = specs.collect::<Result<Vec<_>, _>>()?;
            let following = Following {
                calls: of.iter().zip(&specs).map(|(n, s)| call(n, s)).collect(),
                first: n,
                nodes: of,
                readers: &readers,
            };
            if let Some((all, (kernel, names))) = ops::joined(&following)
                && names.iter().all(|name| has(name))
                && let Some(first) = kernels.get_mut(n)
            {
                (count, *first) = (all, Some(kernel));
            }
        }
        steps.push(n..n + count);
        n += count;
    }
    Ok(steps)
}

/// Of each value the one whose bytes it is, if it is another's: nothing is computed for it, and it is where that one is.
pub(super) fn views(
    graph: &Graph,
    numbers: &Numbers,
    is_written: &dyn Fn(usize) -> bool,
) -> Vec<Option<usize>> {
    let mut views: Vec<Option<usize>> = vec![None; numbers.count];
    let is_written = |value: usize| value < graph.inputs().len() && is_written(value);
    let outputs = graph.outputs().iter();
    let outputs: HashSet<usize> = outputs.filter_map(|v| numbers.of(*v)).collect();
    for (node, &result) in graph.nodes().iter().zip(&numbers.firsts) {
        let read = node.inputs.first().and_then(|v| numbers.of(*v));
        let (true, Some(read)) = (ops::is_view(node.op.name), read) else {
            continue;
        };
        let whole = views.get(read).copied().flatten().unwrap_or(read);
        // A result is made where it is wanted; and what is written later is something else then.
        if !outputs.contains(&result)
            && !is_written(whole)
            && let Some(view) = views.get_mut(result)
        {
            *view = Some(whole);
        }
    }
    views
}

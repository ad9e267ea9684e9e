//! A graph node by node.

use hotcell_graph::{Graph, GraphBuilder, GraphError, Value, graph::Node, op::ValueSpec};

use super::{Executor, Outcome, RunError};

/// Runs every node of a graph as a graph of its own, one after the other: what a client does that evaluates each expression at
/// once. What comes of it is what the whole graph gives.
pub struct Eager<'a>(pub &'a mut dyn Executor);

/// What the values of a graph are so far.
struct Values {
    inputs: Vec<Vec<u8>>,
    results: Vec<Vec<Vec<u8>>>,
}

impl Values {
    fn get(&self, value: Value) -> Option<&Vec<u8>> {
        match value {
            Value::Absent => None,
            Value::Input(i) => self.inputs.get(i as usize),
            Value::Node { node, output } => self.results.get(node as usize)?.get(output as usize),
        }
    }
}

/// A node's own graph, and which values of the whole graph are its inputs.
fn alone(graph: &Graph, node: &Node) -> Result<(Graph, Vec<Value>), GraphError> {
    let mut builder = GraphBuilder::new(graph.max_rows());
    let (mut given, mut own): (Vec<Value>, Vec<Value>) = (Vec::new(), Vec::new());
    let mut arguments = Vec::new();
    for &value in &node.inputs {
        if value == Value::Absent {
            arguments.push(value);
            continue;
        }
        if let Some(at) = given.iter().position(|g| *g == value) {
            arguments.push(own[at]);
            continue;
        }
        let name = format!("input {}", given.len());
        let input = match graph.spec(value)? {
            // A block type is a weight, and weights are constants.
            ValueSpec::Tensor(t) if t.dtype.is_block() => builder.constant(name, t)?,
            ValueSpec::Tensor(t) => builder.tensor(name, t)?,
            ValueSpec::Cache(c) => builder.cache(name, c)?,
            ValueSpec::Absent => Value::Absent,
        };
        given.push(value);
        own.push(input);
        arguments.push(input);
    }
    let made = builder.apply(node.op, arguments, node.attributes.clone())?;
    Ok((builder.finish(&made)?, given))
}

impl Executor for Eager<'_> {
    fn name(&self) -> String {
        format!("{}, op by op", self.0.name())
    }

    fn run(&mut self, graph: &Graph, rows: usize, inputs: &[&[u8]]) -> Result<Outcome, RunError> {
        let missing = || RunError::Broken("a value that nobody made".to_owned());
        let mut values = Values {
            inputs: inputs.iter().map(|bytes| bytes.to_vec()).collect(),
            results: Vec::new(),
        };
        for node in graph.nodes() {
            let (single, given) =
                alone(graph, node).map_err(|e| RunError::Broken(e.to_string()))?;
            let bytes: Option<Vec<&[u8]>> = given
                .iter()
                .map(|&value| values.get(value).map(Vec::as_slice))
                .collect();
            let outcome = self.0.run(&single, rows, &bytes.ok_or_else(missing)?)?;
            let mut after = outcome.caches.into_iter();
            for value in given {
                let Ok(ValueSpec::Cache(_)) = graph.spec(value) else {
                    continue;
                };
                if let (Value::Input(i), Some(bytes)) = (value, after.next())
                    && let Some(cache) = values.inputs.get_mut(i as usize)
                {
                    *cache = bytes;
                }
            }
            values.results.push(outcome.outputs);
        }
        let outputs = graph.outputs().iter();
        let caches = graph.inputs().iter().zip(&values.inputs);
        Ok(Outcome {
            outputs: outputs
                .map(|&value| values.get(value).cloned().ok_or_else(missing))
                .collect::<Result<_, _>>()?,
            caches: caches
                .filter(|(input, _)| matches!(input.spec, ValueSpec::Cache(_)))
                .map(|(_, bytes)| bytes.clone())
                .collect(),
        })
    }

    fn set_fused(&mut self, fused: bool) {
        self.0.set_fused(fused);
    }
}

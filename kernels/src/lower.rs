//! Lowering: what a backend's table lacks is replaced by the row's decomposition.

use std::collections::HashMap;

use hotcell_graph::{
    Graph, GraphBuilder, Value,
    op::{Call, ValueSpec},
};

use crate::{backend::DeviceError, plan::Origin};

/// Decompositions may use composite ops themselves, this deep at most.
const MAX_DEPTH: usize = 8;

/// A graph of ops that a backend has.
#[derive(Clone, Debug)]
pub struct Lowered {
    /// The graph.
    pub graph: Graph,
    /// Of each of its nodes the one that it is a part of, by its number in the graph that was lowered.
    pub origins: Vec<u32>,
}

impl Lowered {
    /// What a step is that computes one of its nodes.
    pub fn origin(&self, node: usize) -> Option<Origin> {
        Some(Origin {
            node: *self.origins.get(node)?,
            op: self.graph.nodes().get(node)?.op.name,
        })
    }
}

/// Rewrites `graph` until `supports` accepts every node.
///
/// # Errors
/// [`DeviceError::Unsupported`] naming the op that neither the backend nor a decomposition can do.
pub fn lower(
    graph: &Graph,
    backend: &'static str,
    supports: &dyn Fn(&Call<'_>) -> bool,
) -> Result<Lowered, DeviceError> {
    let mut lowered = Lowered {
        graph: graph.clone(),
        origins: (0..graph.nodes().len() as u32).collect(),
    };
    for _ in 0..MAX_DEPTH {
        let (next, changed) = pass(&lowered.graph, supports)?;
        if !changed {
            break;
        }
        let before = |&node: &u32| lowered.origins.get(node as usize).copied();
        lowered = Lowered {
            origins: next.origins.iter().filter_map(before).collect(),
            graph: next.graph,
        };
    }
    check(&lowered.graph, backend, supports)?;
    Ok(lowered)
}

/// The graph in which one composite op is replaced by what it is in other ops, whether or not a backend has it.
///
/// # Errors
/// When a decomposition's result does not fit, which a verified graph's do.
pub fn without(graph: &Graph, op: &str) -> Result<Graph, DeviceError> {
    Ok(pass(graph, &|call| call.op.name != op)?.0.graph)
}

/// Decomposes every unsupported composite node once; says whether there was one.
fn pass(
    graph: &Graph,
    supports: &dyn Fn(&Call<'_>) -> bool,
) -> Result<(Lowered, bool), DeviceError> {
    let mut builder = GraphBuilder::new(graph.max_rows());
    let mut values: HashMap<Value, Value> = HashMap::from([(Value::Absent, Value::Absent)]);
    for (i, input) in graph.inputs().iter().enumerate() {
        let name = input.name.clone();
        let value = match &input.spec {
            ValueSpec::Tensor(t) if input.constant => builder.constant(name, t.clone())?,
            ValueSpec::Tensor(t) => builder.tensor(name, t.clone())?,
            ValueSpec::Cache(c) => builder.cache(name, *c)?,
            ValueSpec::Absent => Value::Absent,
        };
        values.insert(Value::Input(i as u32), value);
    }
    let mut changed = false;
    let mut origins = Vec::with_capacity(graph.nodes().len());
    for (i, node) in graph.nodes().iter().enumerate() {
        let specs = graph.input_specs(node)?;
        let call = Call {
            op: node.op,
            inputs: &specs,
            attributes: &node.attributes,
        };
        let inputs: Vec<Value> = node
            .inputs
            .iter()
            .filter_map(|v| values.get(v).copied())
            .collect();
        let results = match node.op.decompose {
            Some(decompose) if !supports(&call) => {
                changed = true;
                decompose(&mut builder, &inputs, &node.attributes)?
            }
            _ => builder.apply(node.op, inputs, node.attributes.clone())?,
        };
        origins.resize(builder.nodes().len(), i as u32);
        for (output, result) in results.into_iter().enumerate() {
            values.insert(
                Value::Node {
                    node: i as u32,
                    output: output as u32,
                },
                result,
            );
        }
    }
    let outputs: Vec<Value> = graph
        .outputs()
        .iter()
        .filter_map(|v| values.get(v).copied())
        .collect();
    let graph = builder.finish(&outputs)?;
    Ok((Lowered { graph, origins }, changed))
}

fn check(
    graph: &Graph,
    backend: &'static str,
    supports: &dyn Fn(&Call<'_>) -> bool,
) -> Result<(), DeviceError> {
    for node in graph.nodes() {
        let specs = graph.input_specs(node)?;
        if !supports(&Call {
            op: node.op,
            inputs: &specs,
            attributes: &node.attributes,
        }) {
            let why: Vec<String> = specs.iter().map(ToString::to_string).collect();
            return Err(DeviceError::Unsupported {
                backend,
                op: node.op.name,
                why: why.join(", "),
            });
        }
    }
    Ok(())
}

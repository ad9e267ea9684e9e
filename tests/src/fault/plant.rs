//! Wrong numbers in one node of a model, in the rows of one token only: for those who look for such a node. In a graph that
//! reads no tokens, as one that was cut out of a model has none, in all rows.
//!
//! They are part of the plan, as a broken kernel's would be. Rows of other tokens have the very bits that they would have.

use std::collections::{BTreeMap, HashMap};

use hotcell_graph::{DType, Graph, GraphBuilder, GraphError, Shape, Value, op::ValueSpec};

use super::{CACHE_TOKEN, NAN_NODE, NAN_TOKEN, WRONG_CACHE, WRONG_NODE, WRONG_TOKEN};

/// How much greater a wrong node's numbers are.
const FACTOR: f32 = 1.001;

/// A graph with faults.
pub(super) struct Planted {
    pub graph: Graph,
    /// By its number in here, each node of the graph that this was made of. Nodes after one, up to the next, are its fault.
    pub before: BTreeMap<u32, u32>,
}

/// The graph with all faults, if it is a model's body, or reads the weight or the cache of one.
pub(super) fn plant(graph: &Graph) -> Result<Option<Planted>, GraphError> {
    let named = |name: &str| graph.inputs().iter().position(|input| input.name == name);
    let tokens = named("tokens").map(|at| Value::Input(at as u32));
    let faults = [NAN_NODE, WRONG_NODE, WRONG_CACHE];
    if tokens.is_none() && faults.iter().all(|name| named(name).is_none()) {
        return Ok(None);
    }
    let mut builder = GraphBuilder::new(graph.max_rows());
    for input in graph.inputs() {
        match &input.spec {
            ValueSpec::Tensor(t) if input.constant => {
                builder.constant(input.name.clone(), t.clone())?;
            }
            ValueSpec::Tensor(t) => {
                builder.tensor(input.name.clone(), t.clone())?;
            }
            ValueSpec::Cache(c) => {
                builder.cache(input.name.clone(), *c)?;
            }
            ValueSpec::Absent => {}
        }
    }
    let mut before = BTreeMap::new();
    let mut values: HashMap<Value, Value> = HashMap::new();
    let now = |values: &HashMap<Value, Value>, value: Value| *values.get(&value).unwrap_or(&value);
    for (number, node) in graph.nodes().iter().enumerate() {
        let inputs = node.inputs.iter().map(|v| now(&values, *v)).collect();
        let results = builder.apply(node.op, inputs, node.attributes.clone())?;
        let reads = |weight: &str| {
            node.inputs.iter().any(|value| match value {
                Value::Input(i) => graph
                    .inputs()
                    .get(*i as usize)
                    .is_some_and(|i| i.name == weight),
                _ => false,
            })
        };
        for (output, result) in results.into_iter().enumerate() {
            if let Value::Node { node, .. } = result {
                before.insert(node, number as u32);
            }
            let mut planted = result;
            if reads(NAN_NODE) {
                let nan = literal(&mut builder, f32::NAN)?;
                planted = at(&mut builder, tokens, NAN_TOKEN, nan, result)?;
            }
            for (name, token) in [(WRONG_NODE, WRONG_TOKEN), (WRONG_CACHE, CACHE_TOKEN)] {
                if reads(name) {
                    let factor = literal(&mut builder, FACTOR)?;
                    let wrong = builder.mul(result, factor)?;
                    planted = at(&mut builder, tokens, token, wrong, result)?;
                }
            }
            let (node, output) = (number as u32, output as u32);
            values.insert(Value::Node { node, output }, planted);
        }
    }
    let outputs: Vec<Value> = graph.outputs().iter().map(|v| now(&values, *v)).collect();
    let graph = builder.finish(&outputs)?;
    Ok(Some(Planted { graph, before }))
}

fn literal(builder: &mut GraphBuilder, value: f32) -> Result<Value, GraphError> {
    builder.literal(DType::F32, Shape::default(), &value.to_le_bytes())
}

/// `wrong` in the rows of this token, else `right`; without tokens, `wrong`.
fn at(
    builder: &mut GraphBuilder,
    tokens: Option<Value>,
    token: u32,
    wrong: Value,
    right: Value,
) -> Result<Value, GraphError> {
    let Some(tokens) = tokens else {
        let always = builder.literal(DType::Bool, Shape::default(), &[1])?;
        return builder.where_(always, wrong, right);
    };
    let bytes = (token as i32).to_le_bytes();
    let token = builder.literal(DType::I32, Shape::default(), &bytes)?;
    let is = builder.equal(tokens, token)?;
    let rank = match builder.spec(right)? {
        ValueSpec::Tensor(spec) => spec.shape.rank(),
        _ => 1,
    };
    let is = builder.reshape(is, Shape::rows(&vec![1; rank.saturating_sub(1)])?)?;
    builder.where_(is, wrong, right)
}

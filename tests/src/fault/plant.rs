//! Wrong numbers in one node of a model, in the rows of one token only: for those who look for such a node.
//!
//! They are part of the plan, as a broken kernel's would be. Rows of other tokens have the very bits that they would have.

use std::collections::HashMap;

use hotcell_graph::{DType, Graph, GraphBuilder, GraphError, Shape, Value, op::ValueSpec};

use super::{NAN_NODE, NAN_TOKEN, WRONG_NODE, WRONG_TOKEN};

/// How much greater a wrong node's numbers are.
const FACTOR: f32 = 1.001;

/// The graph with both faults, if it is a model's body: one that reads tokens.
pub(super) fn plant(graph: &Graph) -> Result<Option<Graph>, GraphError> {
    let named = |name: &str| graph.inputs().iter().position(|input| input.name == name);
    let Some(tokens) = named("tokens") else {
        return Ok(None);
    };
    let tokens = Value::Input(tokens as u32);
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
            let planted = match (reads(NAN_NODE), reads(WRONG_NODE)) {
                (true, _) => {
                    let nan = literal(&mut builder, f32::NAN)?;
                    at(&mut builder, tokens, NAN_TOKEN, nan, result)?
                }
                (_, true) => {
                    let factor = literal(&mut builder, FACTOR)?;
                    let wrong = builder.mul(result, factor)?;
                    at(&mut builder, tokens, WRONG_TOKEN, wrong, result)?
                }
                _ => result,
            };
            let (node, output) = (number as u32, output as u32);
            values.insert(Value::Node { node, output }, planted);
        }
    }
    let outputs: Vec<Value> = graph.outputs().iter().map(|v| now(&values, *v)).collect();
    builder.finish(&outputs).map(Some)
}

fn literal(builder: &mut GraphBuilder, value: f32) -> Result<Value, GraphError> {
    builder.literal(DType::F32, Shape::default(), &value.to_le_bytes())
}

/// `wrong` in the rows of this token, else `right`.
fn at(
    builder: &mut GraphBuilder,
    tokens: Value,
    token: u32,
    wrong: Value,
    right: Value,
) -> Result<Value, GraphError> {
    let bytes = (token as i32).to_le_bytes();
    let token = builder.literal(DType::I32, Shape::default(), &bytes)?;
    let is = builder.equal(tokens, token)?;
    let is = builder.reshape(is, Shape::rows(&[1])?)?;
    builder.where_(is, wrong, right)
}

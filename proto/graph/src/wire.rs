//! Graphs to and from the wire. Decoding *is* verification: it replays the nodes through a
//! [`GraphBuilder`], which recomputes every shape and dtype and believes nothing.

use hotcell_proto::{limits, v1};
use v1::{attribute, dim, graph_input, value_ref};

use crate::{
    dtype::DType,
    graph::{Graph, GraphBuilder, GraphError, Value, brief},
    op::{self, Attribute, AttributeKind, ValueSpec},
    shape::{CacheSpec, Dim, Shape, TensorSpec},
};

fn malformed(what: impl Into<String>) -> GraphError {
    GraphError::Malformed(what.into())
}

fn size(n: u64) -> Result<usize, GraphError> {
    usize::try_from(n).map_err(|_| malformed("a size does not fit"))
}

fn decode_dtype(name: &str) -> Result<DType, GraphError> {
    DType::from_name(name).ok_or_else(|| malformed(format!("unknown dtype {:?}", brief(name, 20))))
}

fn decode_shape(dims: &[v1::Dim]) -> Result<Shape, GraphError> {
    let decode = |d: &v1::Dim| match d.kind {
        Some(dim::Kind::Fixed(n)) => size(n).map(Dim::Fixed),
        Some(dim::Kind::Rows(true)) => Ok(Dim::Rows),
        _ => Err(malformed("an axis without size")),
    };
    let dims = dims
        .iter()
        .take(limits::MAX_RANK + 1)
        .map(decode)
        .collect::<Result<Vec<_>, _>>()?;
    Shape::new(dims)
}

fn encode_shape(shape: &Shape) -> Vec<v1::Dim> {
    let encode = |d: &Dim| v1::Dim {
        kind: Some(match d {
            Dim::Fixed(n) => dim::Kind::Fixed(*n as u64),
            Dim::Rows => dim::Kind::Rows(true),
        }),
    };
    shape.dims().iter().map(encode).collect()
}

fn decode_value(value: &v1::ValueRef) -> Result<Value, GraphError> {
    match &value.kind {
        Some(value_ref::Kind::Input(i)) => Ok(Value::Input(*i)),
        Some(value_ref::Kind::Node(n)) => Ok(Value::Node {
            node: n.node,
            output: n.output,
        }),
        Some(value_ref::Kind::Absent(true)) => Ok(Value::Absent),
        Some(value_ref::Kind::Absent(false)) | None => Err(malformed("an empty value reference")),
    }
}

fn encode_value(value: Value) -> v1::ValueRef {
    v1::ValueRef {
        kind: Some(match value {
            Value::Absent => value_ref::Kind::Absent(true),
            Value::Input(i) => value_ref::Kind::Input(i),
            Value::Node { node, output } => value_ref::Kind::Node(v1::NodeOutput { node, output }),
        }),
    }
}

fn decode_attribute(
    kind: AttributeKind,
    value: &attribute::Value,
) -> Result<Attribute, GraphError> {
    Ok(match (kind, value) {
        (AttributeKind::Int(..), attribute::Value::Int(v)) => Attribute::Int(*v),
        (AttributeKind::Float(..), attribute::Value::Float(v)) => Attribute::Float(*v),
        (AttributeKind::Bool, attribute::Value::Bool(v)) => Attribute::Bool(*v),
        (AttributeKind::Shape, attribute::Value::Shape(s)) => {
            Attribute::Shape(decode_shape(&s.dims)?)
        }
        (AttributeKind::DType, attribute::Value::Dtype(d)) => Attribute::DType(decode_dtype(d)?),
        (AttributeKind::Ints(..), attribute::Value::Ints(v)) => Attribute::Ints(v.values.clone()),
        (AttributeKind::Name(_), attribute::Value::Choice(v)) => Attribute::Name(brief(v, 64)),
        (AttributeKind::Bytes(_), attribute::Value::Bytes(v)) => Attribute::Bytes(v.clone()),
        _ => return Err(malformed(format!("an attribute must be {kind}"))),
    })
}

fn encode_attribute(value: &Attribute) -> attribute::Value {
    match value {
        Attribute::Int(v) => attribute::Value::Int(*v),
        Attribute::Float(v) => attribute::Value::Float(*v),
        Attribute::Bool(v) => attribute::Value::Bool(*v),
        Attribute::Shape(s) => attribute::Value::Shape(v1::Shape {
            dims: encode_shape(s),
        }),
        Attribute::DType(d) => attribute::Value::Dtype(d.name().to_owned()),
        Attribute::Ints(v) => attribute::Value::Ints(v1::Ints { values: v.clone() }),
        Attribute::Name(v) => attribute::Value::Choice(v.clone()),
        Attribute::Bytes(v) => attribute::Value::Bytes(v.clone()),
    }
}

/// Decodes and verifies a graph.
///
/// # Errors
/// [`GraphError`] for anything that a [`GraphBuilder`] would refuse, or an incomplete message.
pub fn decode(wire: &v1::Graph) -> Result<Graph, GraphError> {
    let max_rows = size(wire.max_rows)?;
    if wire.max_rows > limits::MAX_ELEMENTS {
        return Err(GraphError::Limit(format!(
            "more than {} rows",
            limits::MAX_ELEMENTS
        )));
    }
    let mut builder = GraphBuilder::new(max_rows);
    for input in &wire.inputs {
        match &input.spec {
            Some(graph_input::Spec::Tensor(t)) => {
                let spec = decode_tensor_spec(t)?;
                if input.constant {
                    builder.constant(&input.name, spec)?;
                } else {
                    builder.tensor(&input.name, spec)?;
                }
            }
            Some(graph_input::Spec::Cache(_)) if input.constant => {
                return Err(malformed("a cache cannot be constant"));
            }
            Some(graph_input::Spec::Cache(c)) => {
                builder.cache(
                    &input.name,
                    CacheSpec {
                        dtype: decode_dtype(&c.dtype)?,
                        blocks: size(c.blocks)?,
                        block_len: size(c.block_len)?,
                        kv_heads: size(c.kv_heads)?,
                        head_dim: size(c.head_dim)?,
                    },
                )?;
            }
            None => {
                let name = brief(&input.name, 64);
                return Err(malformed(format!("input {name:?} has no spec")));
            }
        }
    }
    for node in &wire.nodes {
        let row = op::find(&node.op).ok_or_else(|| GraphError::UnknownOp(brief(&node.op, 40)))?;
        let (fewest, most) = row.arity();
        if !(fewest..=most).contains(&node.inputs.len())
            || node.attributes.len() != row.attributes.len()
        {
            return Err(malformed(format!(
                "{} has the wrong number of inputs or attributes",
                row.name
            )));
        }
        let inputs = node
            .inputs
            .iter()
            .map(decode_value)
            .collect::<Result<_, _>>()?;
        // By name, not by place: the wire form must not depend on the row's order.
        let attributes = row
            .attributes
            .iter()
            .map(|spec| {
                let found = node.attributes.iter().find(|a| a.name == spec.name);
                let value = found.and_then(|a| a.value.as_ref());
                let value =
                    value.ok_or_else(|| malformed(format!("{} lacks {}", row.name, spec.name)))?;
                decode_attribute(spec.kind, value)
            })
            .collect::<Result<_, _>>()?;
        builder.apply(row, inputs, attributes)?;
    }
    if wire.outputs.len() > limits::MAX_GRAPH_NODES {
        return Err(GraphError::Limit(format!(
            "more than {} outputs",
            limits::MAX_GRAPH_NODES
        )));
    }
    let outputs = wire
        .outputs
        .iter()
        .map(decode_value)
        .collect::<Result<Vec<_>, _>>()?;
    builder.finish(&outputs)
}

fn encode_spec(spec: &ValueSpec) -> Option<graph_input::Spec> {
    match spec {
        ValueSpec::Tensor(t) => Some(graph_input::Spec::Tensor(encode_tensor_spec(t))),
        ValueSpec::Cache(c) => Some(graph_input::Spec::Cache(v1::CacheSpec {
            dtype: c.dtype.name().to_owned(),
            blocks: c.blocks as u64,
            block_len: c.block_len as u64,
            kv_heads: c.kv_heads as u64,
            head_dim: c.head_dim as u64,
        })),
        // No builder makes such an input.
        ValueSpec::Absent => None,
    }
}

/// Encodes a tensor's spec.
pub fn encode_tensor_spec(spec: &TensorSpec) -> v1::TensorSpec {
    v1::TensorSpec {
        dtype: spec.dtype.name().to_owned(),
        dims: encode_shape(&spec.shape),
    }
}

/// Decodes and checks a tensor's spec.
///
/// # Errors
/// [`GraphError`] for an unknown dtype or a shape that cannot be.
pub fn decode_tensor_spec(spec: &v1::TensorSpec) -> Result<TensorSpec, GraphError> {
    TensorSpec::new(decode_dtype(&spec.dtype)?, decode_shape(&spec.dims)?)
}

/// A graph's inputs as they cross a process boundary.
pub fn wire_inputs(graph: &Graph) -> Vec<v1::GraphInput> {
    let inputs = graph.inputs().iter().map(|input| v1::GraphInput {
        name: input.name.clone(),
        constant: input.constant,
        spec: encode_spec(&input.spec),
    });
    inputs.collect()
}

/// Encodes a graph.
pub fn encode(graph: &Graph) -> v1::Graph {
    let nodes = graph.nodes().iter().map(|node| v1::Node {
        op: node.op.name.to_owned(),
        inputs: node.inputs.iter().map(|&v| encode_value(v)).collect(),
        attributes: node
            .op
            .attributes
            .iter()
            .zip(&node.attributes)
            .map(|(spec, value)| v1::Attribute {
                name: spec.name.to_owned(),
                value: Some(encode_attribute(value)),
            })
            .collect(),
    });
    v1::Graph {
        max_rows: graph.max_rows() as u64,
        inputs: wire_inputs(graph),
        nodes: nodes.collect(),
        outputs: graph.outputs().iter().map(|&v| encode_value(v)).collect(),
    }
}

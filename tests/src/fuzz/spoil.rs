//! What strangers may do to a message.

use hotcell_graph::{DType, op};
use hotcell_proto::v1::{self, attribute, dim, graph_input, value_ref};

use super::choices::Choices;

const SIZES: [u64; 14] = [
    0,
    1,
    2,
    3,
    5,
    31,
    33,
    64,
    4096,
    65_537,
    1 << 31,
    1 << 40,
    1 << 63,
    u64::MAX,
];

const NUMBERS: [i64; 16] = [
    0,
    1,
    -1,
    2,
    -2,
    3,
    7,
    -8,
    64,
    1 << 30,
    1 << 31,
    1 << 40,
    i64::MAX,
    i64::MIN,
    i64::MAX - 1,
    -(1 << 31),
];

const FLOATS: [f64; 10] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    1e-5,
    1e30,
    -1e30,
    1e300,
    f64::NAN,
    f64::INFINITY,
];

/// Changes some bytes.
pub fn bytes(bytes: &mut Vec<u8>, choices: &mut Choices) {
    for _ in 0..1 + choices.below(4) {
        let at = choices.below(bytes.len().max(1));
        match (choices.below(5), bytes.get_mut(at)) {
            (0, Some(byte)) => *byte ^= 1 << choices.below(8),
            (1, Some(byte)) => *byte = choices.number() as u8,
            (2, Some(_)) => {
                bytes.remove(at);
            }
            (3, _) => bytes.insert(at.min(bytes.len()), choices.number() as u8),
            _ => {
                let end = (at + choices.below(16)).min(bytes.len());
                let part = bytes.get(at..end).unwrap_or_default().to_vec();
                let to = choices.below(bytes.len() + 1);
                bytes.splice(to..to, part);
            }
        }
    }
}

/// Changes some parts of a message.
pub fn message(mut graph: v1::Graph, choices: &mut Choices) -> v1::Graph {
    for _ in 0..1 + choices.below(3) {
        one(&mut graph, choices);
    }
    graph
}

fn one(graph: &mut v1::Graph, choices: &mut Choices) {
    match choices.below(10) {
        0 => graph.max_rows = choices.pick(&SIZES),
        1 => {
            if let Some(input) = some(&mut graph.inputs, choices) {
                respecify(input, choices);
            }
        }
        2 => {
            let values = values_of(graph);
            if let Some(node) = some(&mut graph.nodes, choices)
                && let Some(input) = some(&mut node.inputs, choices)
            {
                *input = value(values, choices);
            }
        }
        3 => {
            let rows: Vec<&str> = op::catalogue().map(|r| r.name).collect();
            if let Some(node) = some(&mut graph.nodes, choices) {
                node.op = choices.pick(&rows).to_owned();
            }
        }
        4..=6 => {
            if let Some(node) = some(&mut graph.nodes, choices)
                && let Some(attribute) = some(&mut node.attributes, choices)
                && let Some(value) = &mut attribute.value
            {
                other(value, choices);
            }
        }
        7 => {
            let at = choices.below(graph.nodes.len());
            if let Some(node) = graph.nodes.get(at).cloned() {
                let to = choices.below(graph.nodes.len() + 1);
                graph.nodes.insert(to, node);
            }
        }
        8 => {
            if !graph.nodes.is_empty() {
                graph.nodes.remove(choices.below(graph.nodes.len()));
            }
        }
        _ => {
            let values = values_of(graph);
            graph.outputs.push(value(values, choices));
        }
    }
}

fn some<'a, T>(list: &'a mut [T], choices: &mut Choices) -> Option<&'a mut T> {
    let at = choices.below(list.len());
    list.get_mut(at)
}

fn values_of(graph: &v1::Graph) -> (usize, usize) {
    (graph.inputs.len(), graph.nodes.len())
}

fn value((inputs, nodes): (usize, usize), choices: &mut Choices) -> v1::ValueRef {
    let kind = match choices.below(6) {
        0..=1 => value_ref::Kind::Input(choices.below(inputs + 1) as u32),
        2..=4 => value_ref::Kind::Node(v1::NodeOutput {
            node: choices.below(nodes + 1) as u32,
            output: choices.pick(&[0, 0, 0, 1, u32::MAX]),
        }),
        _ => value_ref::Kind::Absent(true),
    };
    v1::ValueRef { kind: Some(kind) }
}

fn axis(choices: &mut Choices) -> v1::Dim {
    let kind = match choices.below(6) {
        0 => dim::Kind::Rows(true),
        _ => dim::Kind::Fixed(choices.pick(&SIZES)),
    };
    v1::Dim { kind: Some(kind) }
}

fn reshape(dims: &mut Vec<v1::Dim>, choices: &mut Choices) {
    match choices.below(4) {
        0 => {
            let at = choices.below(dims.len() + 1);
            dims.insert(at, axis(choices));
        }
        1 if !dims.is_empty() => {
            dims.remove(choices.below(dims.len()));
        }
        _ => {
            if let Some(d) = some(dims, choices) {
                *d = axis(choices);
            }
        }
    }
}

fn respecify(input: &mut v1::GraphInput, choices: &mut Choices) {
    match (&mut input.spec, choices.below(3)) {
        (_, 0) => input.constant = !input.constant,
        (Some(graph_input::Spec::Tensor(t)), 1) => {
            t.dtype = choices.pick(DType::ALL).name().to_owned();
        }
        (Some(graph_input::Spec::Tensor(t)), _) => reshape(&mut t.dims, choices),
        (Some(graph_input::Spec::Cache(c)), 1) => {
            c.dtype = choices.pick(DType::ALL).name().to_owned();
        }
        (Some(graph_input::Spec::Cache(c)), _) => {
            let size = choices.pick(&SIZES);
            let fields = [
                &mut c.blocks,
                &mut c.block_len,
                &mut c.kv_heads,
                &mut c.head_dim,
            ];
            let at = choices.below(fields.len());
            if let Some(field) = fields.into_iter().nth(at) {
                *field = size;
            }
        }
        (None, _) => {}
    }
}

fn other(value: &mut attribute::Value, choices: &mut Choices) {
    match value {
        attribute::Value::Int(v) => *v = choices.pick(&NUMBERS),
        attribute::Value::Float(v) => *v = choices.pick(&FLOATS),
        attribute::Value::Bool(v) => *v = !*v,
        attribute::Value::Shape(s) => reshape(&mut s.dims, choices),
        attribute::Value::Dtype(d) => *d = choices.pick(DType::ALL).name().to_owned(),
        attribute::Value::Ints(v) => match (choices.below(4), v.values.is_empty()) {
            (0, _) => v.values.push(choices.pick(&NUMBERS)),
            (1, false) => {
                v.values.pop();
            }
            _ => {
                if let Some(one) = some(&mut v.values, choices) {
                    *one = choices.pick(&NUMBERS);
                }
            }
        },
        attribute::Value::Choice(v) => {
            let names = [
                "set",
                "add",
                "max",
                "reflect",
                "wrap",
                "channels_last",
                "mrope",
                "average",
                "",
            ];
            *v = choices.pick(&names).to_owned();
        }
        attribute::Value::Bytes(v) => match choices.below(2) {
            0 => v.push(choices.number() as u8),
            _ => {
                v.pop();
            }
        },
    }
}

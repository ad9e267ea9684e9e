//! Names for what the nodes of a model's graph compute: the same for every device, and for every file format.

use std::collections::HashMap;

use hotcell_graph::{DType, Dim, Graph, TensorSpec, Value, op::ValueSpec};
use hotcell_kernels::plan::Origin;

/// A node's result that can be looked at: a row of it belongs to a row of the step.
#[derive(Clone, Debug)]
pub struct Point {
    /// The value in its graph.
    pub value: Value,
    /// Which one that is.
    pub graph: Graphs,
    /// `layers.3.mul_mat.0`: layer, op, and which of this op's nodes in the layer; without a layer `get_rows.0`.
    pub name: String,
    /// The op.
    pub op: &'static str,
    /// Its layer.
    pub layer: Option<u32>,
    /// The weight that it reads, as the model's files name it; empty if none.
    pub weight: String,
    /// Its dtype, f32, f16 or bf16, and shape, whose first axis is the rows.
    pub spec: TensorSpec,
    /// Whether a row of it follows from the one token, and where that stands, alone: nothing of it was read from a cache.
    pub is_of_token: bool,
}

impl Point {
    /// Bytes of one row.
    pub fn row_bytes(&self) -> Option<usize> {
        self.spec.bytes(1)
    }

    /// The axes of one row.
    pub fn row_dims(&self) -> Vec<u64> {
        let inner = self.spec.shape.dims().iter().skip(1);
        inner.map(|dim| dim.at(0) as u64).collect()
    }
}

/// The layer that a name of a weight or cache belongs to: `model.layers.3.…`, `blk.3.…`, `cache.3`.
fn layer_of(name: &str) -> Option<u32> {
    let mut parts = name.split('.');
    parts.find(|part| ["layers", "blk", "cache"].contains(part))?;
    parts.next()?.parse().ok()
}

fn is_by_row(spec: &TensorSpec) -> bool {
    let dims = spec.shape.dims();
    let rest_is_fixed = || dims.iter().skip(1).all(|dim| matches!(dim, Dim::Fixed(_)));
    matches!(dims.first(), Some(dim) if !matches!(dim, Dim::Fixed(_)))
        && rest_is_fixed()
        && [DType::F32, DType::F16, DType::BF16].contains(&spec.dtype)
}

/// Where a node belongs.
struct Named {
    /// `layers.3.mul_mat.0`.
    name: String,
    layer: Option<u32>,
    weight: String,
    /// Whether something of other tokens is in it.
    mixed: bool,
}

/// What makes logits of the body's output, in names: its nodes belong to no layer, as some of the body's do.
const HEAD: &str = "head.";

/// What the head's result is called.
pub const LOGITS: &str = "logits";

/// The op by which processes that compute a model together give each other their parts.
pub const GATHER: &str = "all_gather";

/// Which of a model's graphs nodes are in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Graphs {
    /// From tokens to hidden states.
    Body,
    /// From hidden states to logits.
    Head,
}

/// The node that gives a graph's first result, or its own part of it.
fn result(graph: &Graph) -> Option<usize> {
    let of = |value: &Value| match value {
        Value::Node { node, .. } => Some(*node as usize),
        _ => None,
    };
    let last = graph.outputs().first().and_then(of)?;
    let node = graph.nodes().get(last)?;
    match node.op.name {
        GATHER => node.inputs.first().and_then(of),
        _ => Some(last),
    }
}

/// The name of each node.
fn named(graph: &Graph, which: Graphs) -> Vec<Named> {
    let mut all = by_layer(graph);
    if which == Graphs::Head {
        for node in &mut all {
            node.name.insert_str(0, HEAD);
        }
        if let Some(node) = result(graph).and_then(|at| all.get_mut(at)) {
            LOGITS.clone_into(&mut node.name);
        }
    }
    all
}

/// Names by layer, op, and which of the op's nodes in the layer it is.
fn by_layer(graph: &Graph) -> Vec<Named> {
    let mut seen: HashMap<(Option<u32>, &str), u32> = HashMap::new();
    let mut all: Vec<Named> = Vec::with_capacity(graph.nodes().len());
    for node in graph.nodes() {
        let inputs = node.inputs.iter().filter_map(|value| match value {
            Value::Input(i) => graph.inputs().get(*i as usize),
            _ => None,
        });
        let (mut layer, mut mixed) = (None, false);
        let mut weight = String::new();
        for input in inputs {
            layer = layer.max(layer_of(&input.name));
            // Of several the first: the others scale it.
            let is_weight = input.constant && matches!(input.spec, ValueSpec::Tensor(_));
            if is_weight && weight.is_empty() {
                weight.clone_from(&input.name);
            }
            mixed |= matches!(input.spec, ValueSpec::Cache(_));
        }
        // What reads no weight belongs to the layer of what it is made of.
        for value in &node.inputs {
            if let Value::Node { node, .. } = value
                && let Some(before) = all.get(*node as usize)
            {
                layer = layer.max(before.layer);
                mixed |= before.mixed;
            }
        }
        let count = seen.entry((layer, node.op.name)).or_default();
        let layers = layer.map_or_else(String::new, |n| format!("layers.{n}."));
        all.push(Named {
            name: format!("{layers}{}.{count}", node.op.name),
            layer,
            weight,
            mixed,
        });
        *count += 1;
    }
    all
}

/// What can be looked at in a graph, in the order in which it is computed.
pub fn points(graph: &Graph, which: Graphs) -> Vec<Point> {
    let mut all = Vec::new();
    let names = named(graph, which);
    for (number, (node, named)) in graph.nodes().iter().zip(names).enumerate() {
        for (output, spec) in node.outputs.iter().enumerate() {
            if !is_by_row(spec) {
                continue;
            }
            let part = match node.outputs.len() {
                1 => String::new(),
                _ => format!(".{output}"),
            };
            all.push(Point {
                value: Value::Node {
                    node: number as u32,
                    output: output as u32,
                },
                graph: which,
                name: format!("{}{part}", named.name),
                op: node.op.name,
                layer: named.layer,
                weight: named.weight.clone(),
                spec: spec.clone(),
                // A body's result is made of all tokens so far.
                is_of_token: !named.mixed && which == Graphs::Body,
            });
        }
    }
    all
}

/// What a plan's step computes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// The node's name, as a [`Point`]'s; empty if it is of no node.
    pub name: String,
    /// The op that runs: the node's, or one of those that it is computed as.
    pub op: &'static str,
    /// See [`Point::layer`].
    pub layer: Option<u32>,
    /// See [`Point::weight`].
    pub weight: String,
}

/// What each of a plan's steps computes, by the nodes that the plan says ([`Plan::origins`]). Of a graph that has further
/// nodes than `own`, for who looks at values, these are named by the one whose values they look at.
///
/// [`Plan::origins`]: hotcell_kernels::plan::Plan::origins
pub fn steps(graph: &Graph, which: Graphs, own: usize, origins: &[Option<Origin>]) -> Vec<Step> {
    let named = named(graph, which);
    let looked_at = |mut number: usize| {
        // Inputs come before what is made of them, so that this ends.
        while number >= own {
            let mut inputs = graph.nodes().get(number)?.inputs.iter();
            number = inputs.find_map(|value| match value {
                Value::Node { node, .. } => Some(*node as usize),
                _ => None,
            })?;
        }
        Some(number)
    };
    let step = |origin: &Option<Origin>| {
        let Origin { node, op } = (*origin)?;
        let number = usize::try_from(node).ok()?;
        graph.nodes().get(number)?;
        let named = named.get(looked_at(number)?)?;
        Some(Step {
            name: named.name.clone(),
            op,
            layer: named.layer,
            weight: named.weight.clone(),
        })
    };
    let steps = origins
        .iter()
        .map(|origin| step(origin).unwrap_or_default());
    steps.collect()
}

/// Whether a text is of a pattern in which `*` stands for anything.
pub fn matches(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else {
        return false;
    };
    let mut parts: Vec<&str> = parts.collect();
    let Some(last) = parts.pop() else {
        return rest.is_empty();
    };
    // The earliest place of each leaves most for those after it.
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

/// Those whose name, op or weight is of one of the patterns (none: all), in one of the layers (none: all), by their
/// numbers.
pub fn select(points: &[Point], patterns: &[String], layers: &[u32]) -> Vec<usize> {
    let fits = |point: &Point| {
        let names = [point.name.as_str(), point.op, &point.weight];
        let named = |pattern: &String| names.iter().any(|name| matches(pattern, name));
        (patterns.is_empty() || patterns.iter().any(named))
            && (layers.is_empty() || point.layer.is_some_and(|layer| layers.contains(&layer)))
    };
    let numbered = points.iter().enumerate();
    numbered
        .filter(|(_, point)| fits(point))
        .map(|(n, _)| n)
        .collect()
}

#[cfg(test)]
mod tests {
    use hotcell_graph::{CacheSpec, GraphBuilder, Shape};

    use super::*;

    fn graph() -> Graph {
        let mut g = GraphBuilder::new(4);
        let rows = TensorSpec::new(DType::F32, Shape::rows(&[8]).unwrap()).unwrap();
        let fixed = |dims: &[usize]| TensorSpec::new(DType::F32, Shape::fixed(dims).unwrap());
        let x = g.tensor("x", rows).unwrap();
        let first = g.neg(x).unwrap();
        let mut y = first;
        for layer in 0..2 {
            let name = format!("model.layers.{layer}.mlp.up.weight");
            let w = g.constant(name, fixed(&[8, 8]).unwrap()).unwrap();
            y = g.mul_mat(y, w).unwrap();
            y = g.neg(y).unwrap();
            y = g.add(y, first).unwrap();
            let again = g.neg(y).unwrap();
            y = g.add(y, again).unwrap();
        }
        g.finish(&[y]).unwrap()
    }

    #[test]
    fn nodes_are_named_by_layer_op_and_place() {
        let all = points(&graph(), Graphs::Body);
        let names: Vec<&str> = all.iter().map(|p| p.name.as_str()).collect();
        let expected = [
            "neg.0",
            "layers.0.mul_mat.0",
            "layers.0.neg.0",
            "layers.0.add.0",
            "layers.0.neg.1",
            "layers.0.add.1",
            "layers.1.mul_mat.0",
            "layers.1.neg.0",
            "layers.1.add.0",
            "layers.1.neg.1",
            "layers.1.add.1",
        ];
        assert_eq!(names, expected);
        assert_eq!(all[6].weight, "model.layers.1.mlp.up.weight");
        assert_eq!((all[6].row_bytes(), all[6].row_dims()), (Some(32), vec![8]));
        let chosen = |patterns: &[&str], layers: &[u32]| {
            let patterns: Vec<String> = patterns.iter().map(|p| (*p).to_owned()).collect();
            select(&all, &patterns, layers)
        };
        assert_eq!(chosen(&[], &[]).len(), 11);
        assert_eq!(chosen(&["*mlp.up*"], &[]), [1, 6]);
        assert_eq!(chosen(&["neg", "get_rows"], &[1]), [7, 9]);
        assert_eq!(chosen(&["layers.0.add.1"], &[]), [5]);
        assert!(chosen(&["neg"], &[7]).is_empty());
    }

    #[test]
    fn a_plans_steps_are_named_by_what_they_compute() {
        let graph = graph();
        let named = |body, origins: &[Option<(u32, &'static str)>]| {
            let origin = |&(node, op)| Origin { node, op };
            let origins: Vec<_> = origins.iter().map(|one| one.as_ref().map(origin)).collect();
            let all = steps(&graph, Graphs::Body, body, &origins);
            let all = all.into_iter().map(|step| (step.name, step.op));
            all.collect::<Vec<_>>()
        };
        let origins = [
            Some((1, "mul_mat")),
            None,
            Some((10, "add")),
            Some((99, "add")),
            Some((8, "neg")),
        ];
        let told = named(11, &origins);
        let told: Vec<_> = told.iter().map(|(name, op)| (name.as_str(), *op)).collect();
        let expected = [
            ("layers.0.mul_mat.0", "mul_mat"),
            ("", ""),
            ("layers.1.add.1", "add"),
            ("", ""),
            // A part of what it is computed as.
            ("layers.1.add.0", "neg"),
        ];
        assert_eq!(told, expected);
        // Of what looks at a node, by that one.
        let looked = named(9, &[Some((10, "add"))]);
        assert_eq!(looked[0], ("layers.1.add.0".to_owned(), "add"));
    }

    #[test]
    fn the_heads_nodes_are_told_apart_from_the_bodys() {
        let mut g = GraphBuilder::new(4);
        let rows = TensorSpec::new(DType::F32, Shape::rows(&[8]).unwrap()).unwrap();
        let x = g.tensor("hidden", rows).unwrap();
        let x = g.neg(x).unwrap();
        let part = g.neg(x).unwrap();
        let all = g.all_gather(part, 2).unwrap();
        let graph = g.finish(&[all]).unwrap();
        let names = |which| {
            let all = points(&graph, which).into_iter().map(|p| p.name);
            all.collect::<Vec<_>>()
        };
        assert_eq!(names(Graphs::Body), ["neg.0", "neg.1", "all_gather.0"]);
        let of_head = names(Graphs::Head);
        assert_eq!(of_head, ["head.neg.0", "logits", "head.all_gather.0"]);
        let negation = Origin { node: 1, op: "neg" };
        let told = steps(&graph, Graphs::Head, 3, &[Some(negation)]);
        assert_eq!((told[0].name.as_str(), told[0].op), (LOGITS, "neg"));
    }

    #[test]
    fn what_was_read_from_a_cache_is_of_other_tokens_too() {
        let cache = CacheSpec {
            dtype: DType::F32,
            blocks: 2,
            block_len: 4,
            kv_heads: 1,
            head_dim: 8,
        };
        let mut g = GraphBuilder::new(4);
        let of = |dtype, dims: &[usize]| TensorSpec::new(dtype, Shape::rows(dims).unwrap());
        let x = g.tensor("x", of(DType::F32, &[1, 8]).unwrap()).unwrap();
        let at = g.tensor("at", of(DType::I32, &[]).unwrap()).unwrap();
        let tables = TensorSpec::new(DType::I32, Shape::fixed(&[1, 2]).unwrap());
        let tables = g.tensor("tables", tables.unwrap()).unwrap();
        let cache = g.cache("cache.0", cache).unwrap();
        let y = g.neg(x).unwrap();
        g.cache_write(cache, y, y, at).unwrap();
        let z = g
            .paged_attention(y, cache, tables, at, at, 1.0, 0, 0.0)
            .unwrap();
        let own = g.neg(y).unwrap();
        let sum = g.add(own, z).unwrap();
        let all = points(&g.finish(&[sum]).unwrap(), Graphs::Body);
        let told: Vec<_> = all.iter().map(|p| (p.op, p.is_of_token)).collect();
        let expected = [
            ("neg", true),
            ("paged_attention", false),
            ("neg", true),
            ("add", false),
        ];
        assert_eq!(told, expected);
    }

    #[test]
    fn layers_are_read_from_names() {
        assert_eq!(
            layer_of("model.layers.12.self_attn.q_proj.weight"),
            Some(12)
        );
        assert_eq!(layer_of("blk.3.attn_q.weight"), Some(3));
        assert_eq!(layer_of("cache.0"), Some(0));
        assert_eq!(layer_of("model.embed_tokens.weight"), None);
        assert_eq!(layer_of("layers"), None);
    }

    #[test]
    fn a_star_stands_for_anything() {
        for (pattern, text, is) in [
            ("*", "", true),
            ("a*c", "abc", true),
            ("a*c", "ac", true),
            ("a*c", "acd", false),
            ("*b*", "abc", true),
            ("a*b*b", "ab", false),
            ("a*b*b", "abb", true),
            ("abc", "abc", true),
            ("abc", "abcd", false),
            ("", "", true),
            ("", "a", false),
            ("é*", "éa", true),
        ] {
            assert_eq!(matches(pattern, text), is, "{pattern} {text}");
        }
    }
}

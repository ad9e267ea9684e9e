//! A node that fails, made small: as few nodes before it as it takes, and as little of each axis.
//!
//! Values of nodes that are left out become inputs, with what they were when it failed. Delta debugging: each smaller one is
//! tried, and kept if it still fails.

mod axes;

use std::collections::{BTreeSet, HashMap};

use hotcell_graph::{
    CacheSpec, Dim, Graph, GraphBuilder, GraphError, Shape, Value,
    graph::{Input, Node},
    op::{Attribute, Effect, ValueSpec},
};
use hotcell_proto::error::{Error, Reason};

use self::axes::{all_axes, elements, sliced};
use crate::{debug::tolerance::rounds_others, tensor::HostTensor};

/// How many generations of nodes before the one that fails are taken in, before it is given up.
const GENERATIONS: usize = 16;
/// How often it is tried, at most.
const TRIES: usize = 1000;

/// A graph without a symbolic axis, and a value for each tensor that it reads. Its caches begin as zeros.
#[derive(Clone, Debug)]
pub struct Case {
    /// The graph, with one output.
    pub graph: Graph,
    /// Its tensors' values, in the order of its inputs.
    pub inputs: Vec<HostTensor>,
}

/// What a cache holds of the request: f32 `[positions, heads, elements]`, from the first position on.
#[derive(Clone, Debug)]
pub(crate) struct CacheRows {
    pub keys: HostTensor,
    pub values: HostTensor,
}

/// Who knows what was computed, and whether something small fails.
pub(crate) trait World {
    /// Why it cannot be said.
    type Error: From<Error>;

    /// A value of the graph that is to be reduced, for its rows; none if nobody knows it.
    async fn value(&mut self, value: Value) -> Result<Option<HostTensor>, Self::Error>;

    /// What a cache of the graph held when the node was computed; none if nobody knows it.
    async fn cache(&mut self, cache: Value) -> Result<Option<CacheRows>, Self::Error>;

    /// What a value is called.
    fn name(&self, value: Value) -> String;

    /// Whether it fails.
    async fn fails(&mut self, case: &Case) -> Result<bool, Self::Error>;
}

fn invalid(what: impl Into<String>) -> Error {
    Error::new(Reason::InvalidArgument, what)
}

fn of_graph(error: GraphError) -> Error {
    Error::new(Reason::GraphInvalid, error.to_string())
}

/// A shape with a size for its rows.
fn sized(shape: &Shape, rows: usize) -> Result<Shape, GraphError> {
    Shape::new(shape.dims().iter().map(|dim| Dim::Fixed(dim.at(rows))))
}

/// What a reduction has found out so far.
struct Search<'a, W> {
    graph: &'a Graph,
    rows: usize,
    output: Value,
    world: &'a mut W,
    known: HashMap<Value, Option<HostTensor>>,
    caches: HashMap<Value, Option<CacheRows>>,
    tries: usize,
}

/// What a node reads that is to be known. One that reads a cache is given another one, filled with what the request's rows
/// were, and the numbers that say where these are.
fn read(node: &Node) -> &[Value] {
    match node.op.effect {
        Effect::None => &node.inputs,
        _ => node.inputs.get(..1).unwrap_or_default(),
    }
}

/// A cache for so many tokens, as a node that reads it is given it.
struct Filled {
    /// Keys, values, and the slots that they go to.
    rows: [Value; 3],
    /// The cache, tables, sequences and positions.
    read: [Value; 4],
}

/// Whole numbers below `n`, from `first` on, as a tensor of this shape.
fn counted(first: usize, n: usize, shape: &[usize]) -> Result<HostTensor, Error> {
    let all: Result<Vec<i32>, _> = (first..n).map(i32::try_from).collect();
    let all = all.map_err(|_| invalid("there are too many positions"))?;
    HostTensor::from_slice(&all, shape)
}

/// The smallest part of a graph that was found to fail at `output`, for so many rows of it; none if it does not.
///
/// # Errors
/// Those of the world; [`Reason::InvalidArgument`] if it takes a value that nobody knows.
pub(crate) async fn reduce<W: World>(
    (graph, rows): (&Graph, usize),
    output: Value,
    world: &mut W,
) -> Result<Option<Case>, W::Error> {
    let mut search = Search {
        graph,
        rows,
        output,
        world,
        known: HashMap::new(),
        caches: HashMap::new(),
        tries: 0,
    };
    let Some(nodes) = search.enough().await? else {
        return Ok(None);
    };
    let nodes = search.fewest(nodes).await?;
    let case = search.case(&nodes).await?;
    search.smallest(case).await.map(Some)
}

impl<W: World> Search<'_, W> {
    async fn fails(&mut self, case: &Case) -> Result<bool, W::Error> {
        self.tries += 1;
        match self.tries > TRIES {
            true => Ok(false),
            false => self.world.fails(case).await,
        }
    }

    async fn value(&mut self, value: Value) -> Result<Option<HostTensor>, W::Error> {
        if let Some(known) = self.known.get(&value) {
            return Ok(known.clone());
        }
        let found = self.world.value(value).await?;
        self.known.insert(value, found.clone());
        Ok(found)
    }

    /// What these nodes read that none of them computes, in the order in which they do.
    fn outer(&self, nodes: &BTreeSet<u32>) -> Vec<Value> {
        let mut all = Vec::new();
        let of = nodes
            .iter()
            .filter_map(|&n| self.graph.nodes().get(n as usize));
        for value in of.flat_map(read) {
            let is_inner = matches!(value, Value::Node { node, .. } if nodes.contains(node));
            if !is_inner && *value != Value::Absent && !all.contains(value) {
                all.push(*value);
            }
        }
        all
    }

    /// These nodes, and those before them whose values nobody knows.
    async fn closed(&mut self, mut nodes: BTreeSet<u32>) -> Result<BTreeSet<u32>, W::Error> {
        loop {
            let before = nodes.len();
            for value in self.outer(&nodes) {
                if let Value::Node { node, .. } = value
                    && self.value(value).await?.is_none()
                {
                    nodes.insert(node);
                }
            }
            if nodes.len() == before {
                return Ok(nodes);
            }
        }
    }

    /// The graph of these nodes, with what was computed before them as inputs.
    async fn case(&mut self, nodes: &BTreeSet<u32>) -> Result<Case, W::Error> {
        let mut builder = GraphBuilder::new(0);
        let mut now: HashMap<Value, Value> = HashMap::from([(Value::Absent, Value::Absent)]);
        let mut inputs = Vec::new();
        for value in self.outer(nodes) {
            let name = self.world.name(value);
            let found = self.value(value).await?.ok_or_else(|| {
                invalid(format!(
                    "it takes {name}, whose value the capture does not hold"
                ))
            })?;
            let is_constant = matches!(value, Value::Input(i)
                if self.graph.inputs().get(i as usize).is_some_and(|input| input.constant));
            let spec = found.spec().clone();
            let input = match is_constant {
                true => builder.constant(name, spec),
                false => builder.tensor(name, spec),
            };
            now.insert(value, input.map_err(of_graph)?);
            inputs.push(found);
        }
        let mut filled = HashMap::new();
        for &number in nodes {
            if let Some(node) = self.graph.nodes().get(number as usize)
                && let Effect::Reads(at) = node.op.effect
                && let Some(cache) = node.inputs.get(at)
            {
                let made = self.filled(*cache, &mut builder, &mut inputs).await?;
                filled.insert(number, made);
            }
        }
        for &number in nodes {
            let Some(node) = self.graph.nodes().get(number as usize) else {
                continue;
            };
            let mut read: Vec<Value> = read(node)
                .iter()
                .map(|v| now.get(v).copied().unwrap_or(*v))
                .collect();
            if let Some(Filled {
                rows: [keys, values, slots],
                read: rest,
            }) = filled.get(&number)
            {
                builder
                    .cache_write(rest[0], *keys, *values, *slots)
                    .map_err(of_graph)?;
                read.extend(rest);
            }
            let attributes = node.attributes.iter().map(|attribute| match attribute {
                Attribute::Shape(shape) => sized(shape, self.rows).map(Attribute::Shape),
                other => Ok(other.clone()),
            });
            let attributes = attributes
                .collect::<Result<Vec<_>, _>>()
                .map_err(of_graph)?;
            let results = builder.apply(node.op, read, attributes);
            for (output, result) in results.map_err(of_graph)?.into_iter().enumerate() {
                let output = output as u32;
                now.insert(
                    Value::Node {
                        node: number,
                        output,
                    },
                    result,
                );
            }
        }
        let output = now.get(&self.output).copied().unwrap_or(self.output);
        let graph = builder.finish(&[output]).map_err(of_graph)?;
        Ok(Case { graph, inputs })
    }

    /// Inputs for a cache of its own, and what it is filled with.
    async fn filled(
        &mut self,
        cache: Value,
        builder: &mut GraphBuilder,
        inputs: &mut Vec<HostTensor>,
    ) -> Result<Filled, W::Error> {
        let name = self.world.name(cache);
        if !self.caches.contains_key(&cache) {
            let found = self.world.cache(cache).await?;
            self.caches.insert(cache, found);
        }
        let rows = self.caches.get(&cache).cloned().flatten();
        let rows = rows.ok_or_else(|| {
            invalid(format!(
                "it reads {name}, of which nobody knows what was in it"
            ))
        })?;
        let ValueSpec::Cache(spec) = self.graph.spec(cache).map_err(of_graph)? else {
            return Err(invalid(format!("{name} is no cache")).into());
        };
        let tokens = rows.keys.shape().first().copied().unwrap_or(0);
        let blocks = tokens.div_ceil(spec.block_len.max(1)).max(1);
        let spec = CacheSpec { blocks, ..spec };
        let made = builder.cache(name.clone(), spec).map_err(of_graph)?;
        let mut add = |what: &str, value: HostTensor| {
            let spec = value.spec().clone();
            inputs.push(value);
            let name = format!("{name}.{what}");
            builder.tensor(name, spec).map_err(of_graph)
        };
        Ok(Filled {
            rows: [
                add("keys", rows.keys)?,
                add("values", rows.values)?,
                add("slots", counted(0, tokens, &[tokens])?)?,
            ],
            read: [
                made,
                add("tables", counted(0, blocks, &[1, blocks])?)?,
                add("sequences", counted(0, 1, &[1])?)?,
                add(
                    "positions",
                    counted(tokens.saturating_sub(1), tokens, &[1])?,
                )?,
            ],
        })
    }

    /// The node, with as many generations before it as it takes to fail.
    async fn enough(&mut self) -> Result<Option<BTreeSet<u32>>, W::Error> {
        let Value::Node { node, .. } = self.output else {
            return Ok(None);
        };
        let mut nodes = self.closed(BTreeSet::from([node])).await?;
        for generation in 0..GENERATIONS {
            let case = match self.case(&nodes).await {
                Ok(case) => case,
                Err(error) if generation == 0 => return Err(error),
                // What is further back cannot be had.
                Err(_) => return Ok(None),
            };
            if self.fails(&case).await? {
                return Ok(Some(nodes));
            }
            let before = nodes.len();
            let parents = self.outer(&nodes);
            nodes.extend(parents.into_iter().filter_map(|value| match value {
                Value::Node { node, .. } => Some(node),
                _ => None,
            }));
            if nodes.len() == before {
                break;
            }
            nodes = self.closed(nodes).await?;
        }
        Ok(None)
    }

    /// Those of these nodes that the output is made of.
    fn needed(&self, nodes: &BTreeSet<u32>) -> BTreeSet<u32> {
        let mut open = vec![self.output];
        let mut needed = BTreeSet::new();
        while let Some(value) = open.pop() {
            if let Value::Node { node, .. } = value
                && nodes.contains(&node)
                && needed.insert(node)
                && let Some(found) = self.graph.nodes().get(node as usize)
            {
                open.extend(&found.inputs);
            }
        }
        needed
    }

    /// Without those of the nodes that it fails without.
    async fn fewest(&mut self, mut nodes: BTreeSet<u32>) -> Result<BTreeSet<u32>, W::Error> {
        for node in nodes.clone() {
            let mut fewer = nodes.clone();
            let is_output = matches!(self.output, Value::Node { node: last, .. } if last == node);
            if is_output || !fewer.remove(&node) {
                continue;
            }
            let fewer = self.closed(self.needed(&fewer)).await?;
            if fewer.len() >= nodes.len() {
                continue;
            }
            let case = self.case(&fewer).await?;
            if self.fails(&case).await? {
                nodes = fewer;
            }
        }
        Ok(nodes)
    }

    /// With as little of each axis as it fails with.
    async fn smallest(&mut self, mut case: Case) -> Result<Case, W::Error> {
        loop {
            let before = elements(&case);
            for mut axes in all_axes(&case) {
                while let Some(length) = axes.length(&case) {
                    let unit = axes.unit(&case);
                    let half = length / 2 / unit * unit;
                    if half == 0 {
                        break;
                    }
                    let mut smaller = None;
                    for piece in [0..half, half..length] {
                        if let Some(tried) = sliced(&case, axes, &piece)
                            && self.fails(&tried).await?
                        {
                            smaller = Some((tried, piece.len()));
                            break;
                        }
                    }
                    let Some((smaller, length)) = smaller else {
                        break;
                    };
                    case = smaller;
                    axes = axes.now(length);
                }
            }
            if elements(&case) >= before {
                return Ok(case);
            }
        }
    }
}

/// What a graph reads that has a value beforehand: caches have none.
fn tensors(graph: &Graph) -> impl Iterator<Item = &Input> {
    let inputs = graph.inputs().iter();
    inputs.filter(|input| !matches!(input.spec, ValueSpec::Cache(_)))
}

impl Case {
    /// A graph and its inputs' values.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] if these are not the tensors', or the graph has not one output or a symbolic axis.
    pub fn new(graph: Graph, inputs: Vec<HostTensor>) -> Result<Self, Error> {
        let case = Self { graph, inputs };
        let count = tensors(&case.graph).count();
        let fits = |(input, value): (&Input, &HostTensor)| matches!(&input.spec, ValueSpec::Tensor(spec) if spec == value.spec());
        let all_fit = count == case.inputs.len() && case.tensors().all(fits);
        if !all_fit || case.graph.outputs().len() != 1 || case.graph.max_rows() > 0 {
            return Err(invalid("the values are not those of the graph's inputs"));
        }
        Ok(case)
    }

    /// Its tensors and their values.
    pub fn tensors(&self) -> impl Iterator<Item = (&Input, &HostTensor)> {
        tensors(&self.graph).zip(&self.inputs)
    }

    /// Whether a node reads weights in blocks.
    pub fn reads_blocks(&self) -> bool {
        let mut all = self.inputs.iter().map(|value| value.spec().dtype);
        all.any(rounds_others)
    }
}

#[cfg(test)]
mod tests {
    use hotcell_graph::{DType, TensorSpec};

    use super::*;

    /// Of a graph, what everything is, and what fails.
    struct Told<F> {
        graph: Graph,
        unknown: Vec<Value>,
        rows: Option<CacheRows>,
        fails: F,
        tries: usize,
    }

    impl<F: Fn(&Case) -> bool> World for Told<F> {
        type Error = Error;

        async fn value(&mut self, value: Value) -> Result<Option<HostTensor>, Error> {
            let ValueSpec::Tensor(spec) = self.graph.spec(value).unwrap() else {
                return Ok(None);
            };
            let spec = TensorSpec::new(spec.dtype, sized(&spec.shape, 1).unwrap()).unwrap();
            let bytes: Vec<u8> = (0..spec.bytes(0).unwrap()).map(|b| b as u8).collect();
            let known = !self.unknown.contains(&value);
            Ok(known.then(|| HostTensor::new(spec, bytes).unwrap()))
        }

        async fn cache(&mut self, _cache: Value) -> Result<Option<CacheRows>, Error> {
            Ok(self.rows.clone())
        }

        fn name(&self, value: Value) -> String {
            format!("{value:?}")
        }

        async fn fails(&mut self, case: &Case) -> Result<bool, Error> {
            self.tries += 1;
            Ok((self.fails)(case))
        }
    }

    fn node(node: u32) -> Value {
        Value::Node { node, output: 0 }
    }

    /// `neg → mul_mat by blocks → silu → add with the mul_mat → reshape → exp`, by rows.
    fn graph() -> Graph {
        let mut g = GraphBuilder::new(8);
        let rows = |inner: &[usize]| Shape::rows(inner).unwrap();
        let x = g
            .tensor("x", TensorSpec::new(DType::F32, rows(&[64])).unwrap())
            .unwrap();
        let blocks = Shape::fixed(&[96, 64]).unwrap();
        let w = g
            .constant("w", TensorSpec::new(DType::Q4_0, blocks).unwrap())
            .unwrap();
        let y = g.neg(x).unwrap();
        let y = g.mul_mat(y, w).unwrap();
        let z = g.silu(y).unwrap();
        let z = g.add(z, y).unwrap();
        let z = g.reshape(z, rows(&[96, 1])).unwrap();
        let z = g.exp(z).unwrap();
        g.finish(&[z]).unwrap()
    }

    async fn reduced(
        output: u32,
        unknown: &[Value],
        fails: impl Fn(&Case) -> bool,
    ) -> Result<Option<Case>, Error> {
        let graph = graph();
        let mut world = Told {
            graph: graph.clone(),
            unknown: unknown.to_vec(),
            rows: None,
            fails,
            tries: 0,
        };
        let found = reduce((&graph, 1), node(output), &mut world).await;
        assert!(world.tries < 100, "{}", world.tries);
        found
    }

    fn ops(case: &Case) -> Vec<&str> {
        case.graph.nodes().iter().map(|node| node.op.name).collect()
    }

    fn shapes(case: &Case) -> Vec<Vec<usize>> {
        case.inputs.iter().map(HostTensor::shape).collect()
    }

    #[tokio::test]
    async fn a_node_that_fails_alone_is_left_alone_and_small() {
        let case = reduced(1, &[], |_| true).await.unwrap().unwrap();
        assert_eq!(ops(&case), ["mul_mat"]);
        // Blocks are left whole.
        assert_eq!(shapes(&case), [vec![1, 32], vec![1, 32]]);
        assert_eq!(case.inputs[1].bytes().len(), 18);
        assert!(case.graph.inputs()[1].constant && case.reads_blocks());
        assert_eq!(case.graph.outputs(), [node(0)]);
        // Shapes that ops are told go along.
        let two = |case: &Case| case.graph.nodes().len() == 2;
        let case = reduced(5, &[node(4)], two).await.unwrap().unwrap();
        assert_eq!(
            (ops(&case), shapes(&case)),
            (vec!["reshape", "exp"], vec![vec![1, 1]])
        );
    }

    #[tokio::test]
    async fn nodes_come_in_as_far_as_it_takes_and_others_go() {
        let has = |op: &'static str| move |case: &Case| ops(case).contains(&op);
        let case = reduced(5, &[], has("mul_mat")).await.unwrap().unwrap();
        // Of the two ways from the product the longer one is not needed, and the shorter one is.
        assert_eq!(ops(&case), ["mul_mat", "add", "reshape", "exp"]);
        assert_eq!(reduced(5, &[], |_| false).await.unwrap().map(|_| ()), None);
        // What nobody knows is computed, or it cannot be done.
        let case = reduced(2, &[node(1)], |_| true).await.unwrap().unwrap();
        assert_eq!(ops(&case), ["mul_mat", "silu"]);
        let error = reduced(1, &[Value::Input(1)], |_| true).await.unwrap_err();
        assert!(error.message().contains("Input(1)"), "{error}");
    }

    #[tokio::test]
    async fn the_part_of_an_axis_that_fails_is_kept() {
        // Only the 64th of the 96 values, as it is counted up.
        let holds = |case: &Case| {
            let bytes = case.inputs[0].bytes();
            bytes.chunks_exact(4).any(|value| value[0] == 63 * 4)
        };
        let case = reduced(2, &[], holds).await.unwrap().unwrap();
        assert_eq!(shapes(&case), [[1, 1]]);
        // Three values at least.
        let three = |case: &Case| case.inputs[0].shape()[1] >= 3;
        let case = reduced(2, &[], three).await.unwrap().unwrap();
        assert_eq!(shapes(&case), [[1, 3]]);
    }

    #[tokio::test]
    async fn a_node_that_reads_a_cache_gets_one_that_is_filled_before() {
        let mut g = GraphBuilder::new(8);
        let rows =
            |inner: &[usize]| TensorSpec::new(DType::F32, Shape::rows(inner).unwrap()).unwrap();
        let numbers = |shape| TensorSpec::new(DType::I32, shape).unwrap();
        let spec = CacheSpec {
            dtype: DType::F32,
            blocks: 100,
            block_len: 4,
            kv_heads: 2,
            head_dim: 8,
        };
        let q = g.tensor("q", rows(&[4, 8])).unwrap();
        let cache = g.cache("cache.0", spec).unwrap();
        let k = g.tensor("k", rows(&[2, 8])).unwrap();
        let by_row = numbers(Shape::rows(&[]).unwrap());
        let slots = g.tensor("slots", by_row.clone()).unwrap();
        let tables = numbers(Shape::fixed(&[3, 50]).unwrap());
        let tables = g.tensor("tables", tables).unwrap();
        let at = g.tensor("positions", by_row).unwrap();
        let q = g.neg(q).unwrap();
        g.cache_write(cache, k, k, slots).unwrap();
        let y = g
            .paged_attention(q, cache, tables, slots, at, 1.0, 0, 0.0)
            .unwrap();
        let graph = g.finish(&[y]).unwrap();
        let kept = |n: f32| {
            let values: Vec<f32> = (0..6 * 2 * 8).map(|i| n + i as f32).collect();
            HostTensor::from_slice(&values, &[6, 2, 8]).unwrap()
        };
        let rows = CacheRows {
            keys: kept(0.0),
            values: kept(1000.0),
        };
        // Whatever its length: the values of the fourth position count.
        let fails = |case: &Case| {
            let values = case
                .tensors()
                .find(|(input, _)| input.name.ends_with("values"));
            let values = values.unwrap().1.to_vec::<f32>().unwrap();
            values.contains(&(1000.0 + 3.0 * 16.0))
        };
        let mut world = Told {
            graph: graph.clone(),
            unknown: vec![],
            rows: Some(rows),
            fails,
            tries: 0,
        };
        let target = node(2);
        let case = reduce((&graph, 1), target, &mut world)
            .await
            .unwrap()
            .unwrap();
        assert_eq!(ops(&case), ["cache_write", "paged_attention"]);
        let Some(ValueSpec::Cache(spec)) = case
            .graph
            .inputs()
            .iter()
            .map(|input| input.spec.clone())
            .find(|spec| matches!(spec, ValueSpec::Cache(_)))
        else {
            panic!("it has no cache");
        };
        assert_eq!((spec.blocks, spec.kv_heads, spec.head_dim), (2, 1, 1));
        let all: HashMap<String, HostTensor> = case
            .tensors()
            .map(|(input, value)| {
                (
                    input.name.rsplit('.').next().unwrap().to_owned(),
                    value.clone(),
                )
            })
            .collect();
        assert_eq!(all["values"].to_vec::<f32>().unwrap(), [1048.0]);
        assert_eq!(all["keys"].to_vec::<f32>().unwrap(), [48.0]);
        assert_eq!(all["slots"].to_vec::<i32>().unwrap(), [3]);
        assert_eq!(all["positions"].to_vec::<i32>().unwrap(), [5]);
        assert_eq!(all["tables"].to_vec::<i32>().unwrap(), [0]);
        // Without what was in it, there is nothing to be done.
        let mut world = Told {
            rows: None,
            ..world
        };
        let error = reduce((&graph, 1), target, &mut world).await.unwrap_err();
        assert!(error.message().contains("what was in it"), "{error}");
    }
}

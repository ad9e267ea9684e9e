//! What several nodes' kernel computes is what each one's computes, and a layer has few steps.

use hotcell_graph::{CacheSpec, DType, Graph, GraphBuilder, Shape, TensorSpec, Value};
use hotcell_kernels::plan::PlanHints;
use hotcell_tests::{
    chance::Chance,
    conformance::{Check, Executor, difference},
};

use super::{enter, local, open};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const D: usize = 64;
const HIDDEN: usize = HEADS * D;
const INNER: usize = 512;
const LAYERS: usize = 2;
const MOST_ROWS: usize = 70;
const TOKENS: usize = 50;
const BLOCKS: usize = 5;
const BLOCK_LEN: usize = 16;

fn fixed(dtype: DType, dims: &[usize]) -> TensorSpec {
    TensorSpec::new(dtype, Shape::fixed(dims).unwrap()).unwrap()
}

fn rows(dims: &[usize]) -> Shape {
    Shape::rows(dims).unwrap()
}

/// Bytes of a tensor.
struct Bytes(Chance);

impl Bytes {
    fn weights(&mut self, dtype: DType, n: usize) -> Vec<u8> {
        let Self(chance) = self;
        match dtype {
            DType::F32 => (0..n)
                .flat_map(|_| (chance.below(2001) as f32 / 1e3 - 1.0).to_le_bytes())
                .collect(),
            DType::BF16 => (0..n)
                .flat_map(|_| {
                    half::bf16::from_f32(chance.below(201) as f32 / 1e3 - 0.1).to_le_bytes()
                })
                .collect(),
            // Scales are among them, which must be no NaN.
            _ => (0..dtype.row_bytes(n).unwrap())
                .map(|_| chance.number() as u8 & 0x2b)
                .collect(),
        }
    }
}

/// A model of two layers, and its inputs for as many rows as there may be.
struct Model {
    g: GraphBuilder,
    inputs: Vec<Vec<u8>>,
    bytes: Bytes,
}

impl Model {
    fn weight(&mut self, name: &str, dtype: DType, dims: &[usize]) -> Value {
        let n = dims.iter().product();
        self.inputs.push(self.bytes.weights(dtype, n));
        self.g.constant(name, fixed(dtype, dims)).unwrap()
    }

    fn numbers(&mut self, name: &str, numbers: impl Iterator<Item = i32>) -> Value {
        self.inputs
            .push(numbers.flat_map(i32::to_le_bytes).collect());
        let spec = TensorSpec::new(DType::I32, rows(&[])).unwrap();
        self.g.tensor(name, spec).unwrap()
    }

    fn product(&mut self, x: Value, dtype: DType, n: usize, k: usize) -> Value {
        let name = format!("w{}", self.inputs.len());
        let w = self.weight(&name, dtype, &[n, k]);
        self.g.mul_mat(x, w).unwrap()
    }

    fn norm(&mut self, x: Value) -> Value {
        let name = format!("norm{}", self.inputs.len());
        let w = self.weight(&name, DType::F32, &[HIDDEN]);
        self.g.rms_norm(x, Some(w), 1e-5).unwrap()
    }

    /// With weights of these dtypes, of which the second is that of values, and a cache of the third.
    fn made([dtype, of_values, of_cache]: [DType; 3], interleaved: bool) -> (Graph, Vec<Vec<u8>>) {
        let mut model = Model {
            g: GraphBuilder::new(MOST_ROWS),
            inputs: Vec::new(),
            bytes: Bytes(Chance::new(0xf0)),
        };
        let all = 0..MOST_ROWS as i32;
        let tokens = model.numbers("tokens", all.clone().map(|i| i * 7 % TOKENS as i32));
        let positions = model.numbers("positions", all.clone());
        let sequences = model.numbers("sequences", all.clone().map(|_| 0));
        // The last row of all is written nowhere.
        let slots = model.numbers("slots", all.map(|i| if i == 69 { -1 } else { i }));
        let tables: Vec<u8> = (0..BLOCKS as i32).flat_map(i32::to_le_bytes).collect();
        model.inputs.push(tables);
        let spec = fixed(DType::I32, &[1, BLOCKS]);
        let tables = model.g.tensor("tables", spec).unwrap();
        let frequencies = model.weight("frequencies", DType::F32, &[D / 2]);
        let table = model.weight("table", DType::BF16, &[TOKENS, HIDDEN]);
        let mut x = model.g.get_rows(table, tokens).unwrap();
        for layer in 0..LAYERS {
            let normed = model.norm(x);
            let q = model.product(normed, dtype, HIDDEN, HIDDEN);
            let k = model.product(normed, dtype, KV_HEADS * D, HIDDEN);
            let v = model.product(normed, of_values, KV_HEADS * D, HIDDEN);
            let g = &mut model.g;
            let q = g.reshape(q, rows(&[HEADS, D])).unwrap();
            let k = g.reshape(k, rows(&[KV_HEADS, D])).unwrap();
            let v = g.reshape(v, rows(&[KV_HEADS, D])).unwrap();
            let q = g.rope(q, positions, frequencies, interleaved).unwrap();
            let k = g.rope(k, positions, frequencies, interleaved).unwrap();
            let spec = CacheSpec {
                dtype: of_cache,
                blocks: BLOCKS,
                block_len: BLOCK_LEN,
                kv_heads: KV_HEADS,
                head_dim: D,
            };
            let cache = g.cache(format!("cache{layer}"), spec).unwrap();
            model.inputs.push(vec![0; spec.bytes().unwrap()]);
            g.cache_write(cache, k, v, slots).unwrap();
            let y = g.paged_attention(q, cache, tables, sequences, positions, 0.125, 0, 0.0);
            let y = g.reshape(y.unwrap(), rows(&[HIDDEN])).unwrap();
            let y = model.product(y, dtype, HIDDEN, HIDDEN);
            x = model.g.add(x, y).unwrap();
            let normed = model.norm(x);
            let gate = model.product(normed, dtype, INNER, HIDDEN);
            let up = model.product(normed, dtype, INNER, HIDDEN);
            let y = model.g.swiglu(gate, up).unwrap();
            let y = model.product(y, of_values, HIDDEN, INNER);
            x = model.g.add(x, y).unwrap();
        }
        let normed = model.norm(x);
        let logits = model.product(normed, dtype, TOKENS, HIDDEN);
        // The residual stream, too, which an addition and a norm make together.
        (model.g.finish(&[logits, x]).unwrap(), model.inputs)
    }
}

/// Dtypes of weights, of values' weights, and of caches; steps with and without what does several nodes' work.
const KINDS: [([DType; 3], [usize; 2]); 5] = [
    ([DType::Q8_0, DType::Q8_0, DType::F16], [24, 45]),
    ([DType::Q4_0, DType::Q4_0, DType::Q8_0], [24, 45]),
    // What another dtype of the same block reads is made once, too.
    ([DType::Q4K, DType::Q6K, DType::F32], [26, 45]),
    ([DType::Q4K, DType::Q8_0, DType::BF16], [28, 47]),
    ([DType::BF16, DType::BF16, DType::BF16], [22, 36]),
];

#[test]
fn what_does_several_nodes_work_gives_what_each_gives() {
    if !enter() {
        return;
    }
    let (mut together, mut apart) = (local(), local());
    apart.set_fused(false);
    for (i, (dtypes, _)) in KINDS.into_iter().enumerate() {
        let (graph, inputs) = Model::made(dtypes, i % 2 == 1);
        for rows in [1, 3, 20, MOST_ROWS] {
            let inputs: Vec<&[u8]> = inputs
                .iter()
                .enumerate()
                .map(|(i, bytes)| match i {
                    // Tokens, positions, sequences and slots.
                    0..4 => &bytes[..rows * 4],
                    _ => &bytes[..],
                })
                .collect();
            let ours = together.run(&graph, rows, &inputs).unwrap();
            let theirs = apart.run(&graph, rows, &inputs).unwrap();
            for (i, (ours, theirs)) in ours.outputs.iter().zip(&theirs.outputs).enumerate() {
                difference(DType::F32, Check::Exact, 0.0, ours, theirs)
                    .unwrap_or_else(|wrong| panic!("{dtypes:?}, {rows} rows, {i}: {wrong}"));
            }
            assert!(ours.caches == theirs.caches, "{dtypes:?}, {rows} rows");
            assert!(
                ours.caches
                    .iter()
                    .all(|cache| cache.iter().any(|b| *b != 0))
            );
        }
    }
}

#[test]
fn a_layer_has_few_steps() {
    if !enter() {
        return;
    }
    for (dtypes, steps) in KINDS {
        let (graph, _) = Model::made(dtypes, false);
        let found = [true, false].map(|fuse| {
            let hints = PlanHints {
                allocate: false,
                fuse,
                ..PlanHints::default()
            };
            open().plan(&graph, &hints).unwrap().memory().steps
        });
        assert_eq!(found, steps, "{dtypes:?}");
    }
}

/// Elementwise ops of all kinds, with operands that are repeated, and results that are read elsewhere.
fn chain(dtype: DType) -> Graph {
    let mut g = GraphBuilder::new(9);
    let mut tensor = |name: &str, shape: Shape| {
        let spec = TensorSpec::new(dtype, shape).unwrap();
        g.tensor(name, spec).unwrap()
    };
    let a = tensor("a", rows(&[6, 5]));
    let b = tensor("b", Shape::fixed(&[5]).unwrap());
    let c = tensor("c", Shape::fixed(&[6, 1]).unwrap());
    let d = tensor("d", rows(&[6, 5]));
    let e = tensor("e", rows(&[1, 5]));
    let x = g.add(a, b).unwrap();
    let y = g.mul(x, c).unwrap();
    let z = g.tanh(y).unwrap();
    let y = g.div(z, x).unwrap();
    let y = g.maximum(y, d).unwrap();
    let y = g.neg(y).unwrap();
    let y = g.sub(y, y).unwrap();
    let u = g.add(y, z).unwrap();
    // The ninth, with a fifth operand from outside.
    let u = g.mul(u, e).unwrap();
    let v = g.exp(u).unwrap();
    // Of another shape.
    let w = g.reduce_sum(v, &[1], true).unwrap();
    let w = g.sqrt(w).unwrap();
    let w = g.add(w, e).unwrap();
    let v = g.mul(v, w).unwrap();
    g.finish(&[z, v]).unwrap()
}

#[test]
fn elementwise_ops_are_one_step_and_give_what_each_gives() {
    if !enter() {
        return;
    }
    let (mut together, mut apart) = (local(), local());
    apart.set_fused(false);
    let mut chance = Chance::new(0xe1);
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let graph = chain(dtype);
        let steps = [true, false].map(|fuse| {
            let hints = PlanHints {
                fuse,
                ..PlanHints::default()
            };
            open().plan(&graph, &hints).unwrap().memory().steps
        });
        // Eight ops, two, the sum, two, and one of another shape.
        assert_eq!(steps, [5, 14], "{dtype}");
        for rows in [1, 4, 9] {
            let mut numbers = |n: usize| -> Vec<u8> {
                let one = |_| {
                    let v = match chance.below(40) {
                        0 => f32::NAN,
                        1 => f32::INFINITY,
                        2 => -0.0,
                        3 => 0.0,
                        _ => chance.below(2001) as f32 / 250.0 - 4.0,
                    };
                    match dtype {
                        DType::F16 => half::f16::from_f32(v).to_le_bytes().to_vec(),
                        DType::BF16 => half::bf16::from_f32(v).to_le_bytes().to_vec(),
                        _ => v.to_le_bytes().to_vec(),
                    }
                };
                (0..n).flat_map(one).collect()
            };
            let inputs = [rows * 30, 5, 6, rows * 30, rows * 5].map(&mut numbers);
            let inputs = inputs.each_ref().map(Vec::as_slice);
            let ours = together.run(&graph, rows, &inputs).unwrap();
            let theirs = apart.run(&graph, rows, &inputs).unwrap();
            for (i, (ours, theirs)) in ours.outputs.iter().zip(&theirs.outputs).enumerate() {
                difference(dtype, Check::Exact, 0.0, ours, theirs)
                    .unwrap_or_else(|wrong| panic!("{dtype}, {rows} rows, {i}: {wrong}"));
            }
        }
    }
}

/// What looks like one step, but that one node reads what another one makes.
#[test]
fn nodes_that_read_each_others_results_are_steps_of_their_own() {
    if !enter() {
        return;
    }
    let (mut together, mut apart) = (local(), local());
    apart.set_fused(false);
    let mut bytes = Bytes(Chance::new(0xab));
    let mut compare = |what: &str, graph: &Graph, steps: usize, rows: usize, inputs: &[Vec<u8>]| {
        // Kernels run here in an order that hides what others would show.
        let found = open().plan(graph, &PlanHints::default()).unwrap().memory();
        assert_eq!(found.steps, steps, "{what}");
        let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
        let ours = together.run(graph, rows, &inputs).unwrap();
        let theirs = apart.run(graph, rows, &inputs).unwrap();
        assert!(ours.outputs == theirs.outputs, "{what}");
        assert!(ours.caches == theirs.caches, "{what}");
    };
    // A product that is the next one's matrix.
    let mut g = GraphBuilder::new(1);
    let x = g.tensor("x", fixed(DType::F32, &[8, 8])).unwrap();
    let w = g.tensor("w", fixed(DType::F32, &[8, 8])).unwrap();
    let y = g.mul_mat(x, w).unwrap();
    let z = g.mul_mat(x, y).unwrap();
    let graph = g.finish(&[z]).unwrap();
    let inputs = [64, 64].map(|n| bytes.weights(DType::F32, n));
    compare("products", &graph, 2, 0, &inputs);
    // What comes after products of the same tensor, and is none with a weight, though it has two inputs like one.
    let mut g = GraphBuilder::new(1);
    let x = g.tensor("x", fixed(DType::F32, &[8, 8])).unwrap();
    let w = g.tensor("w", fixed(DType::F32, &[8, 8])).unwrap();
    let v = g.tensor("v", fixed(DType::F32, &[8, 8])).unwrap();
    let a = g.mul_mat(x, w).unwrap();
    let b = g.mul_mat(x, v).unwrap();
    let c = g.matmul(x, w).unwrap();
    let d = g.mul_mat(x, w).unwrap();
    let e = g.mul_mat(x, v).unwrap();
    let f = g.add(x, v).unwrap();
    let graph = g.finish(&[a, b, c, d, e, f]).unwrap();
    let inputs = [64, 64, 64].map(|n| bytes.weights(DType::F32, n));
    compare("others", &graph, 4, 0, &inputs);
    // A norm's weight that is the sum; a sum that is read twice.
    let mut g = GraphBuilder::new(1);
    let x = g.tensor("x", fixed(DType::F32, &[300])).unwrap();
    let y = g.add(x, x).unwrap();
    let z = g.rms_norm(y, Some(y), 1e-5).unwrap();
    let graph = g.finish(&[z]).unwrap();
    compare("norm", &graph, 1, 0, &[bytes.weights(DType::F32, 300)]);
    // Keys that are the values as well, queries that are, and keys that are the turned queries.
    for case in 0..3 {
        let mut g = GraphBuilder::new(4);
        let heads = TensorSpec::new(DType::F32, rows(&[KV_HEADS, D])).unwrap();
        let numbers = TensorSpec::new(DType::I32, rows(&[])).unwrap();
        let x = g.tensor("x", heads.clone()).unwrap();
        let y = g.tensor("y", heads).unwrap();
        let positions = g.tensor("positions", numbers.clone()).unwrap();
        let slots = g.tensor("slots", numbers).unwrap();
        let spec = fixed(DType::F32, &[D / 2]);
        let frequencies = g.tensor("frequencies", spec).unwrap();
        let spec = CacheSpec {
            dtype: DType::F32,
            blocks: 1,
            block_len: BLOCK_LEN,
            kv_heads: KV_HEADS,
            head_dim: D,
        };
        let cache = g.cache("cache", spec).unwrap();
        let q = g.rope(x, positions, frequencies, false).unwrap();
        let k = if case == 2 { q } else { y };
        let k = g.rope(k, positions, frequencies, false).unwrap();
        let v = [k, q, y][case];
        g.cache_write(cache, k, v, slots).unwrap();
        let graph = g.finish(&[q]).unwrap();
        let ints = |n: [i32; 3]| n.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>();
        let inputs = [
            bytes.weights(DType::F32, 3 * KV_HEADS * D),
            bytes.weights(DType::F32, 3 * KV_HEADS * D),
            ints([5, 9, 2]),
            ints([3, 0, 7]),
            bytes.weights(DType::F32, D / 2),
            vec![0; spec.bytes().unwrap()],
        ];
        compare(&format!("cache {case}"), &graph, 4, 3, &inputs);
    }
}

//! What several nodes' kernel computes is what each one's computes, and a layer has few steps.

use hotcell_graph::{
    CacheSpec, DType, Graph, GraphBuilder, Shape, TensorSpec, Value, op::ValueSpec,
};
use hotcell_kernels::plan::PlanHints;
use hotcell_tests::{
    chance::Chance,
    conformance::{Check, Executor, Local, Outcome, difference},
    layers::{Filling, Layers, Row},
};

use super::{enter, local, open};

const MOST_ROWS: usize = 70;
const TOKENS: usize = 50;

fn fixed(dtype: DType, dims: &[usize]) -> TensorSpec {
    TensorSpec::new(dtype, Shape::fixed(dims).unwrap()).unwrap()
}

fn rows(dims: &[usize]) -> Shape {
    Shape::rows(dims).unwrap()
}

/// Two layers with weights of these dtypes, of which the second is that of values, and a cache of the third; and the inputs' bytes for
/// as many rows as there may be.
fn layers(
    [weights, of_values, cache]: [DType; 3],
    interleaved: bool,
) -> (Graph, Vec<(Filling, Vec<u8>)>) {
    let layers = Layers {
        count: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        inner: 512,
        tokens: TOKENS,
        max_rows: MOST_ROWS,
        blocks: 5,
        weights,
        of_values,
        cache,
        interleaved,
    };
    let (graph, fillings) = layers.graph().unwrap();
    let mut chance = Chance::new(0xf0);
    let all = 0..MOST_ROWS as i32;
    let words = |n: &mut dyn Iterator<Item = i32>| n.flat_map(i32::to_le_bytes).collect();
    let filled = fillings.into_iter().map(|filling| {
        let bytes = match filling {
            Filling::Rows(Row::Token) => words(&mut all.clone().map(|i| i * 7 % TOKENS as i32)),
            Filling::Rows(Row::Position) => words(&mut all.clone()),
            Filling::Rows(Row::Sequence) => words(&mut all.clone().map(|_| 0)),
            // The last row of all is written nowhere.
            Filling::Rows(Row::Slot) => {
                words(&mut all.clone().map(|i| if i == 69 { -1 } else { i }))
            }
            Filling::Blocks => words(&mut (0..5)),
            Filling::Weights(..) => filling.weights(&mut chance),
            Filling::Zeros(bytes) => vec![0; bytes],
        };
        (filling, bytes)
    });
    (graph, filled.collect())
}

/// Dtypes of weights, of values' weights, and of caches; steps with and without what does several nodes' work.
const KINDS: [([DType; 3], [usize; 2]); 6] = [
    ([DType::Q8_0, DType::Q8_0, DType::F16], [24, 45]),
    ([DType::Q4_0, DType::Q4_0, DType::Q8_0], [24, 45]),
    // What another dtype of the same block reads is made once, too.
    ([DType::Q4K, DType::Q6K, DType::F32], [26, 45]),
    ([DType::Q4K, DType::Q8_0, DType::BF16], [28, 47]),
    ([DType::BF16, DType::BF16, DType::BF16], [22, 36]),
    ([DType::F8E4M3, DType::F8E4M3, DType::F16], [22, 36]),
];

/// The device, which joins nodes, and once more without.
struct Both {
    together: Local,
    apart: Local,
}

impl Both {
    /// Nothing where the device's kernels do not run.
    fn new() -> Option<Self> {
        if !enter() {
            return None;
        }
        let (together, mut apart) = (local(), local());
        apart.set_fused(false);
        Some(Self { together, apart })
    }

    /// Computes it both ways, and compares bits of all results and caches, which it gives.
    fn compare(&mut self, what: &str, graph: &Graph, rows: usize, inputs: &[&[u8]]) -> Outcome {
        let ours = self.together.run(graph, rows, inputs).unwrap();
        let theirs = self.apart.run(graph, rows, inputs).unwrap();
        let both = ours.outputs.iter().zip(&theirs.outputs);
        for (value, (ours, theirs)) in graph.outputs().iter().zip(both) {
            let ValueSpec::Tensor(spec) = graph.spec(*value).unwrap() else {
                panic!("{what}: a result that is no tensor");
            };
            difference(spec.dtype, Check::Exact, 0.0, ours, theirs)
                .unwrap_or_else(|wrong| panic!("{what}, {rows} rows, {value:?}: {wrong}"));
        }
        assert!(ours.caches == theirs.caches, "{what}, {rows} rows");
        ours
    }
}

/// Steps of a graph where nodes are joined.
fn steps(graph: &Graph) -> usize {
    let plan = open().plan(graph, &PlanHints::default()).unwrap();
    plan.memory().steps
}

#[test]
fn what_does_several_nodes_work_gives_what_each_gives() {
    let Some(mut both) = Both::new() else { return };
    for (i, (dtypes, _)) in KINDS.into_iter().enumerate() {
        let (graph, inputs) = layers(dtypes, i % 2 == 1);
        for rows in [1, 3, 20, MOST_ROWS] {
            let inputs: Vec<&[u8]> = inputs
                .iter()
                .map(|(filling, bytes)| match filling {
                    Filling::Rows(_) => &bytes[..rows * 4],
                    _ => &bytes[..],
                })
                .collect();
            let made = both.compare(&format!("{dtypes:?}"), &graph, rows, &inputs);
            let is_written = |cache: &Vec<u8>| cache.iter().any(|b| *b != 0);
            assert!(made.caches.iter().all(is_written), "{dtypes:?}");
        }
    }
}

#[test]
fn a_layer_has_few_steps() {
    if !enter() {
        return;
    }
    for (dtypes, steps) in KINDS {
        let (graph, _) = layers(dtypes, false);
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
    let Some(mut both) = Both::new() else { return };
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
            both.compare(dtype.name(), &graph, rows, &inputs);
        }
    }
}

/// What looks like one step, but that one node reads what another one makes.
#[test]
fn nodes_that_read_each_others_results_are_steps_of_their_own() {
    let Some(mut both) = Both::new() else { return };
    let mut chance = Chance::new(0xab);
    let mut weights = |n| Filling::Weights(DType::F32, n).weights(&mut chance);
    let mut compare = |what: &str, graph: &Graph, count: usize, rows: usize, inputs: &[Vec<u8>]| {
        // Kernels run here in an order that hides what others would show.
        assert_eq!(steps(graph), count, "{what}");
        let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
        both.compare(what, graph, rows, &inputs);
    };
    // A product that is the next one's matrix.
    let mut g = GraphBuilder::new(1);
    let x = g.tensor("x", fixed(DType::F32, &[8, 8])).unwrap();
    let w = g.tensor("w", fixed(DType::F32, &[8, 8])).unwrap();
    let y = g.mul_mat(x, w).unwrap();
    let z = g.mul_mat(x, y).unwrap();
    let graph = g.finish(&[z]).unwrap();
    let inputs = [64, 64].map(&mut weights);
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
    let inputs = [64, 64, 64].map(&mut weights);
    compare("others", &graph, 4, 0, &inputs);
    // A norm's weight that is the sum; a sum that is read twice.
    let mut g = GraphBuilder::new(1);
    let x = g.tensor("x", fixed(DType::F32, &[300])).unwrap();
    let y = g.add(x, x).unwrap();
    let z = g.rms_norm(y, Some(y), 1e-5).unwrap();
    let graph = g.finish(&[z]).unwrap();
    compare("norm", &graph, 1, 0, &[weights(300)]);
    const HEADS: usize = 2;
    const D: usize = 64;
    // Keys that are the values as well, queries that are, and keys that are the turned queries.
    for case in 0..3 {
        let mut g = GraphBuilder::new(4);
        let heads = TensorSpec::new(DType::F32, rows(&[HEADS, D])).unwrap();
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
            block_len: 16,
            kv_heads: HEADS,
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
            weights(3 * HEADS * D),
            weights(3 * HEADS * D),
            ints([5, 9, 2]),
            ints([3, 0, 7]),
            weights(D / 2),
            vec![0; spec.bytes().unwrap()],
        ];
        compare(&format!("cache {case}"), &graph, 4, 3, &inputs);
    }
}

/// Fewer ops than there may be, of which one has an operand too many; and what is no float's op among them.
#[test]
fn a_launch_ends_where_it_has_all_operands_or_something_else_comes() {
    let Some(mut both) = Both::new() else { return };
    let mut chance = Chance::new(0x45);
    let mut compare = |what: &str, graph: &Graph, count: usize| {
        assert_eq!(steps(graph), count, "{what}");
        let inputs: Vec<Vec<u8>> = graph
            .inputs()
            .iter()
            .map(|input| match &input.spec {
                ValueSpec::Tensor(spec) => {
                    Filling::Weights(DType::F32, spec.bytes(0).unwrap() / 4).weights(&mut chance)
                }
                _ => Vec::new(),
            })
            .collect();
        let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
        both.compare(what, graph, 0, &inputs);
    };
    for dims in [&[3, 5][..], &[], &[0, 4]] {
        let mut g = GraphBuilder::new(1);
        let x: Vec<Value> = (0..6)
            .map(|i| g.tensor(format!("x{i}"), fixed(DType::F32, dims)).unwrap())
            .collect();
        // Three operands, then two new ones at once, of which there is room for one.
        let y = g.add(x[0], x[1]).unwrap();
        let y = g.mul(y, x[2]).unwrap();
        let z = g.sub(x[3], x[4]).unwrap();
        let y = g.mul(y, z).unwrap();
        let y = g.add(y, x[5]).unwrap();
        let graph = g.finish(&[y]).unwrap();
        compare(&format!("operands of {dims:?}"), &graph, 2);
    }
    let mut g = GraphBuilder::new(1);
    let x = g.tensor("x", fixed(DType::F32, &[7, 4])).unwrap();
    let y = g.exp(x).unwrap();
    let y = g.neg(y).unwrap();
    let less = g.less(y, x).unwrap();
    let whole = g.cast(y, DType::I32).unwrap();
    let more = g.add(whole, whole).unwrap();
    let wide = g.cast(y, DType::F64).unwrap();
    let wide = g.mul(wide, wide).unwrap();
    let y = g.mul(y, x).unwrap();
    let y = g.where_(less, y, x).unwrap();
    let y = g.sqrt(y).unwrap();
    let graph = g.finish(&[y, more, wide]).unwrap();
    // Two ops, less, a cast, a sum, a cast, a product, a product, a choice, a root.
    compare("others", &graph, 9);
}

/// One value, whatever shape it is seen in.
#[test]
fn what_products_read_is_made_once_for_all_shapes_of_a_value() {
    if !enter() {
        return;
    }
    let mut g = GraphBuilder::new(1);
    let x = g.tensor("x", fixed(DType::F32, &[6, 64])).unwrap();
    let w = g.constant("w", fixed(DType::Q8_0, &[8, 64])).unwrap();
    let v = g.constant("v", fixed(DType::Q4_0, &[8, 64])).unwrap();
    let a = g.mul_mat(x, w).unwrap();
    let seen = g.reshape(x, Shape::fixed(&[2, 3, 64]).unwrap()).unwrap();
    let b = g.mul_mat(seen, v).unwrap();
    let graph = g.finish(&[a, b]).unwrap();
    assert_eq!(steps(&graph), 3);
}

#[test]
fn a_device_has_ceilings() {
    if !enter() {
        return;
    }
    let device = super::CudaBackend::open_device("cuda:0", &[]).unwrap();
    let most = device.ceilings(1 << 16, 2).unwrap();
    for each in [most.copied, most.bf16, most.bytes] {
        assert!(each > 0.0, "{most:?}");
    }
}

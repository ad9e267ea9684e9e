//! What the engine's models ask of the device, and what of it the processor computes.

use std::collections::BTreeSet;

use hotcell_graph::{CacheSpec, DType, GraphBuilder, Shape, TensorSpec};
use hotcell_kernels::cpu::{
    CpuDevice,
    draw::{Limits, draw_among as drawn, halves},
    path::CpuPath,
};
use hotcell_tests::{
    cluster::golden,
    conformance::cases,
    model::{Solo, open},
};
use hotcell_worker::{
    model::{
        graph::{body, ending, head},
        run::{Draw, RunShape},
        weave::Pattern,
    },
    weights::ModelSource,
};

use super::{Backend, CudaBackend, enter};

/// A model of each architecture, in plain numbers and in blocks, and the ops of its graphs that run on the processor. Only to be
/// made shorter.
const LEFT: [(&str, &[&str]); 16] = [
    ("llama2", &[]),
    ("llama3", &[]),
    ("mistral", &[]),
    ("qwen2", &[]),
    ("qwen3", &[]),
    ("gemma3", &[]),
    ("gemma3-cap", &[]),
    ("qwen3_moe", &[]),
    ("qwen3_moe-step", &[]),
    // Of rectangles that are no whole chunks.
    ("qwen3-fp8", &[]),
    ("qwen3_moe-fp8", &[]),
    ("llama2-fp8", &[]),
    ("gguf/llama3-q8_0.gguf", &[]),
    ("gguf/llama3-q4_0.gguf", &[]),
    ("gguf/llama-k.gguf", &[]),
    ("gguf/qwen3_moe-q8_0.gguf", &[]),
];

/// What the processor computes of the products and rows of tables with weights of these dtypes. Only to be made shorter.
const LEFT_OF_WEIGHTS: [(DType, &[&str]); 14] = [
    (DType::F32, &[]),
    (DType::F16, &[]),
    (DType::BF16, &[]),
    (DType::Q8_0, &[]),
    (DType::Q4_0, &[]),
    (DType::Q4_1, &[]),
    (DType::Q5_0, &[]),
    (DType::Q5_1, &[]),
    (DType::Q4K, &[]),
    (DType::Q5K, &[]),
    (DType::Q6K, &[]),
    (DType::MXFP4, &[]),
    (DType::NVFP4, &[]),
    (DType::F8E4M3, &[]),
];

/// The ops that the processor computes in some conformance case, many of them in f64 or of complex numbers alone. Only to be made
/// shorter.
const LEFT_OF_THE_CATALOGUE: &[&str] = &[
    "abs",
    "acos",
    "acosh",
    "add",
    "argsort",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "cast",
    "cholesky",
    "conv",
    "cos",
    "cosh",
    "cumprod",
    "cumsum",
    "det",
    "div",
    "eig",
    "eigh",
    "equal",
    "erf",
    "erfinv",
    "exp",
    "expm1",
    "fft",
    "gated_delta",
    "get_rows",
    "log",
    "log1p",
    "log2",
    "logaddexp",
    "lu",
    "mamba2_scan",
    "matmul",
    "mul",
    "neg",
    "not_equal",
    "pool",
    "pow",
    "qr",
    "random_bits",
    "reciprocal",
    "reduce_prod",
    "reduce_sum",
    "remainder",
    "sigmoid",
    "silu",
    "sin",
    "sinh",
    "solve",
    "solve_triangular",
    "sort",
    "square",
    "sub",
    "svd",
    "tan",
    "tanh",
];

/// The ops of all graphs of a model, of which a step of any number of rows executes body and head, that are not the device's.
fn elsewhere(source: &ModelSource, cache: DType) -> Vec<&'static str> {
    let device = CudaBackend::open_device("cuda:0", &[]).unwrap();
    let shape = RunShape::for_model(&source.config, cache);
    let pattern = Pattern {
        config: &source.config,
        names: source.names,
        weights: &source.weights,
        shape: &shape,
    };
    let graphs = [body(pattern), head(pattern), ending(pattern)];
    let graphs = graphs.into_iter().map(Result::unwrap);
    graphs
        .flat_map(|graph| device.elsewhere(&graph.graph).unwrap())
        .collect()
}

#[test]
fn the_processor_computes_of_models_no_more_than_this() {
    if !enter() {
        return;
    }
    for (name, left) in LEFT {
        let source = open(&golden(name)).unwrap();
        let fits = |cache: &DType| cache.row_bytes(source.config.head_dim).is_some();
        for cache in CacheSpec::DTYPES.into_iter().filter(fits) {
            let found = elsewhere(&source, cache);
            assert_eq!(found, left, "{name} with a cache of {cache}");
        }
    }
}

#[test]
fn the_processor_multiplies_with_no_more_dtypes_than_this() {
    if !enter() {
        return;
    }
    let device = CudaBackend::open_device("cuda:0", &[]).unwrap();
    for (dtype, left) in LEFT_OF_WEIGHTS {
        let mut g = GraphBuilder::new(8);
        let k = 512;
        let spec =
            |dtype, dims: &[usize]| TensorSpec::new(dtype, Shape::fixed(dims).unwrap()).unwrap();
        let rows =
            |dtype, dims: &[usize]| TensorSpec::new(dtype, Shape::rows(dims).unwrap()).unwrap();
        let table = g.constant("table", spec(dtype, &[40, k])).unwrap();
        let experts = g.constant("experts", spec(dtype, &[4, 40, k])).unwrap();
        let tokens = g.tensor("tokens", rows(DType::I32, &[])).unwrap();
        let ids = g.tensor("ids", rows(DType::U32, &[2])).unwrap();
        let x = g.get_rows(table, tokens).unwrap();
        let y = g.mul_mat(x, table).unwrap();
        let x = g.reshape(x, Shape::rows(&[1, k]).unwrap()).unwrap();
        let z = g.mul_mat_id(experts, x, ids).unwrap();
        let graph = g.finish(&[y, z]).unwrap();
        assert_eq!(device.elsewhere(&graph).unwrap(), left, "{dtype}");
    }
}

#[test]
fn the_processor_computes_of_the_catalogue_no_more_than_this() {
    if !enter() {
        return;
    }
    let device = CudaBackend::open_device("cuda:0", &[]).unwrap();
    let mut left = BTreeSet::new();
    // What is refused has no graph.
    for graph in cases().unwrap().iter().filter_map(|case| case.graph().ok()) {
        left.extend(device.elsewhere(&graph).unwrap_or_default());
    }
    let left: Vec<&str> = left.into_iter().collect();
    assert_eq!(left, LEFT_OF_THE_CATALOGUE);
}

/// Norms and rotary positions are not in the processor's order; what an error in a kernel does is far beyond this.
#[test]
fn models_say_what_they_say_on_the_processor() {
    if !enter() {
        return;
    }
    for name in ["qwen3_moe", "gemma3-cap", "gguf/qwen3_moe-q8_0.gguf"] {
        let source = open(&golden(name)).unwrap();
        let prompt: Vec<u32> = (0..19u32).map(|i| (i * 37 + 11) % 250).collect();
        let cpu = CpuDevice::beside(&[]).unwrap();
        let expected = Solo::on(&*cpu, &source, DType::F32)
            .unwrap()
            .feed(&prompt, 64);
        let cuda = CudaBackend.open("cuda:0", &[]).unwrap();
        let mut solo = Solo::on(&*cuda, &source, DType::F32).unwrap();
        let (first, rest) = prompt.split_at(16);
        assert!(solo.runner.draws());
        let wanted = |i: u32| {
            (i % 3 < 2).then_some(Draw {
                temperature: (i % 3) as f32 * 3.0,
                limits: Limits::of([[0.0, 1.0, 0.0], [9.0, 0.8, 0.1]][i as usize / 8]),
                seed: 1 << 40 | 5,
                branch: i,
                position: 7 * i,
            })
        };
        solo.runner.want_drawn((0..16).map(wanted));
        let mut found = solo.feed(first, 16).unwrap();
        for (i, logits) in (0..).zip(&found) {
            let expected = wanted(i).and_then(|draw| {
                let [low, high] = halves(draw.seed);
                let noise = [low, high, draw.branch, draw.position];
                let path = CpuPath::detect();
                drawn(path, logits, draw.temperature, noise, draw.limits)
            });
            assert_eq!(expected.is_some(), i % 3 < 2);
            assert_eq!(solo.runner.drawn(i as usize), expected, "{name}, row {i}");
        }
        assert_eq!(solo.runner.drawn(16), None);
        found.extend(solo.feed(rest, 1).unwrap());
        // Of a step of which nothing is wanted there is nothing.
        assert_eq!(solo.runner.drawn(0), None);
        for (at, (ours, theirs)) in found.iter().zip(&expected.unwrap()).enumerate() {
            let most = theirs.iter().fold(0f32, |m, v| m.max(v.abs()));
            let apart = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs());
            let apart = apart.fold(0f32, f32::max) / most;
            println!("{name}, position {at}: {apart:e}");
            assert!(apart < 1e-4, "{name}, position {at}: {apart:e}");
        }
    }
}

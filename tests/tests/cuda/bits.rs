//! Where the order of a computation is the CPU backend's, so are the bits.

use hotcell_graph::{DType, Graph, GraphBuilder, GraphError, Shape, TensorSpec, Value};
use hotcell_kernels::cpu::CpuDevice;
use hotcell_tests::{
    chance::Chance,
    conformance::{Check, Executor, Local, difference},
};

use super::{CudaBackend, enter};

const FLOATS: [DType; 3] = [DType::F16, DType::BF16, DType::F32];

/// A float's bytes.
fn float(dtype: DType, v: f32) -> Vec<u8> {
    match dtype {
        DType::F16 => half::f16::from_f32(v).to_le_bytes().to_vec(),
        DType::BF16 => half::bf16::from_f32(v).to_le_bytes().to_vec(),
        DType::F64 => f64::from(v).to_le_bytes().to_vec(),
        _ => v.to_le_bytes().to_vec(),
    }
}

/// Bytes of a tensor: of floats numbers around 0, of which, if it is to be `wild`, a few are no ordinary ones.
fn numbers(dtype: DType, n: usize, wild: bool, chance: &mut Chance) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..n {
        let v = (chance.below(4001) as f32 - 2000.0) / 250.0;
        let v = match chance.below(100) {
            _ if !wild => v,
            0 => f32::NAN,
            1 => f32::INFINITY,
            2 => f32::NEG_INFINITY,
            3 => -0.0,
            4 => 1e-41,
            5 => v * 1e6,
            _ => v,
        };
        let whole = chance.number();
        match dtype {
            DType::Bool => bytes.push((whole % 2) as u8),
            _ if dtype.is_float() => bytes.extend(float(dtype, v)),
            _ => bytes.extend(&whole.to_le_bytes()[..dtype.block_bytes()]),
        }
    }
    bytes
}

/// Both devices, and what they are given.
struct Both {
    cuda: Local,
    cpu: Local,
    device: hotcell_kernels::cuda::CudaDevice,
    chance: Chance,
}

impl Both {
    /// Nothing where the device's kernels do not run.
    fn new() -> Option<Self> {
        if !enter() {
            return None;
        }
        Some(Self {
            cuda: super::local(),
            cpu: Local::new("cpu", || CpuDevice::beside(&[])).unwrap(),
            device: CudaBackend::open_device("cuda:0", &[]).unwrap(),
            chance: Chance::new(0xc0da),
        })
    }

    /// Computes it on both, of the device nothing by the processor, and compares bits.
    fn compare(&mut self, graph: &Graph, rows: usize, inputs: &[Vec<u8>], what: &str) {
        let elsewhere = self.device.elsewhere(graph).unwrap();
        assert_eq!(elsewhere, [""; 0], "{what}");
        let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
        let ours = self.cuda.run(graph, rows, &inputs).unwrap();
        let theirs = self.cpu.run(graph, rows, &inputs).unwrap();
        for (i, value) in graph.outputs().iter().enumerate() {
            let hotcell_graph::op::ValueSpec::Tensor(spec) = graph.spec(*value).unwrap() else {
                panic!("{what}: a result that is no tensor");
            };
            let (ours, theirs) = (&ours.outputs[i], &theirs.outputs[i]);
            difference(spec.dtype, Check::Exact, 0.0, ours, theirs)
                .unwrap_or_else(|wrong| panic!("{what}, result {i}: {wrong}"));
        }
    }

    /// Ops of one tensor of this shape, also with its first axis as rows, in ordinary numbers and in others.
    fn one(
        &mut self,
        dtype: DType,
        dims: &[usize],
        what: &str,
        op: impl Fn(&mut GraphBuilder, Value) -> Result<Vec<Value>, GraphError>,
    ) {
        for (wild, symbolic) in [(false, false), (true, true)] {
            let bytes = numbers(dtype, dims.iter().product(), wild, &mut self.chance);
            let shape = match symbolic {
                false => Shape::fixed(dims),
                true => Shape::rows(&dims[1..]),
            };
            let mut g = GraphBuilder::new(dims[0] + 2);
            let spec = TensorSpec::new(dtype, shape.unwrap()).unwrap();
            let x = g.tensor("x", spec).unwrap();
            let results = match op(&mut g, x) {
                // Not all ops take rows along all axes.
                Err(_) if symbolic => continue,
                results => results.unwrap(),
            };
            let graph = g.finish(&results).unwrap();
            let rows = if symbolic { dims[0] } else { 0 };
            let what = format!("{what} of {dtype} {dims:?}, rows {rows}");
            self.compare(&graph, rows, &[bytes], &what);
        }
    }
}

#[test]
fn reductions_add_in_the_processors_order() {
    let Some(mut both) = Both::new() else { return };
    let shapes: [(&[usize], &[i64]); 9] = [
        (&[3, 5], &[1]),
        (&[2, 9000], &[-1]),
        (&[9000, 2], &[0]),
        (&[600, 70], &[0]),
        (&[3, 300, 5], &[0, 2]),
        (&[2, 3, 4, 5], &[1, 3]),
        (&[2, 3, 4, 5], &[0, 2]),
        (&[1, 17], &[]),
        (&[40, 50], &[]),
    ];
    for &dtype in DType::REAL {
        for (dims, axes) in shapes {
            both.one(dtype, dims, "reductions", |g, x| {
                let keep = axes.len() == 2;
                let mut factor = x;
                if dtype.is_float() {
                    // Numbers near 1, whose product is one.
                    let scalar = |g: &mut GraphBuilder, v| {
                        g.literal(dtype, Shape::default(), &float(dtype, v))
                    };
                    let (little, one) = (scalar(g, 1.0 / 128.0)?, scalar(g, 1.0)?);
                    let apart = g.mul(x, little)?;
                    factor = g.add(apart, one)?;
                }
                let mut all = vec![
                    g.reduce_sum(x, axes, keep)?,
                    g.reduce_prod(factor, axes, keep)?,
                    g.reduce_max(x, axes, keep)?,
                    g.reduce_min(x, axes, keep)?,
                    g.reduce_any(x, axes, keep)?,
                    g.reduce_all(x, axes, keep)?,
                ];
                if let &[axis] = axes {
                    all.push(g.argmax(x, axis, keep)?);
                    all.push(g.argmin(x, axis, keep)?);
                }
                Ok(all)
            });
        }
    }
}

#[test]
fn rows_are_softened_in_the_processors_order() {
    let Some(mut both) = Both::new() else { return };
    for dtype in FLOATS {
        for dims in [[3, 1], [5, 7], [4, 16], [3, 128], [2, 5000]] {
            both.one(dtype, &dims, "softmax", |g, x| {
                Ok(vec![g.softmax(x, -1)?, g.log_softmax(x, 1)?])
            });
        }
    }
}

#[test]
fn functions_are_those_of_the_processor() {
    let Some(mut both) = Both::new() else { return };
    for dtype in FLOATS {
        both.one(dtype, &[40, 60], "functions", |g, x| {
            // The numbers of a row in another order.
            let y = g.slice(x, &[0, 59], &[i64::MAX, i64::MIN], &[1, -1])?;
            Ok(vec![
                g.exp(x)?,
                g.expm1(x)?,
                g.log(x)?,
                g.log1p(x)?,
                g.log2(x)?,
                g.sin(x)?,
                g.cos(x)?,
                g.tan(x)?,
                g.asin(x)?,
                g.acos(x)?,
                g.atan(x)?,
                g.sinh(x)?,
                g.cosh(x)?,
                g.tanh(x)?,
                g.asinh(x)?,
                g.acosh(x)?,
                g.atanh(x)?,
                g.erf(x)?,
                g.erfinv(x)?,
                g.sigmoid(x)?,
                g.silu(x)?,
                g.gelu(x)?,
                g.gelu_tanh(x)?,
                g.geglu(x, y)?,
                g.swiglu(x, y)?,
                g.pow(x, y)?,
                g.atan2(x, y)?,
                g.logaddexp(x, y)?,
            ])
        });
    }
}

#[test]
fn lines_are_sorted_as_by_the_processor() {
    let Some(mut both) = Both::new() else { return };
    for &dtype in DType::REAL {
        for dims in [[5, 1], [3, 33], [2, 2048]] {
            both.one(dtype, &dims, "sorting", |g, x| {
                let mut all = Vec::new();
                for axis in [0, 1] {
                    for down in [false, true] {
                        all.push(g.sort(x, axis, down)?);
                        all.push(g.argsort(x, axis, down)?);
                        let (values, places) =
                            g.topk(x, dims[axis as usize].min(3) as i64, axis, down)?;
                        all.extend([values, places]);
                    }
                }
                Ok(all)
            });
        }
    }
    both.one(
        DType::F32,
        &[2, 6000],
        "the first of a long line",
        |g, x| {
            let (values, places) = g.topk(x, 7, 1, true)?;
            let (least, at) = g.topk(x, 3, 1, false)?;
            Ok(vec![values, places, least, at])
        },
    );
}

impl Both {
    /// Indices of a dtype into axes of 4.
    fn indices(&mut self, dtype: DType, n: usize) -> Vec<u8> {
        let signed = matches!(dtype, DType::I32 | DType::I64);
        let mut index = || match signed {
            true => self.chance.below(8) as i64 - 4,
            false => self.chance.below(4) as i64,
        };
        let bytes = (0..n).flat_map(|_| index().to_le_bytes()[..dtype.block_bytes()].to_vec());
        bytes.collect()
    }
}

#[test]
fn what_indices_name_is_written_in_its_order() {
    let Some(mut both) = Both::new() else { return };
    for &dtype in DType::REAL {
        for how in ["set", "add", "mul", "max", "min"] {
            if dtype == DType::Bool && matches!(how, "add" | "mul") {
                continue;
            }
            let ids = if how == "set" { DType::I64 } else { DType::U8 };
            let mut g = GraphBuilder::new(1);
            let x = g.tensor("x", fixed(dtype, &[4, 4, 6])).unwrap();
            let each = g.tensor("each", fixed(ids, &[3, 9, 5])).unwrap();
            let updates = g.tensor("updates", fixed(dtype, &[3, 9, 5])).unwrap();
            let tuples = g.tensor("tuples", fixed(ids, &[40, 2])).unwrap();
            let slices = g.tensor("slices", fixed(dtype, &[40, 6])).unwrap();
            let results = [
                g.scatter_along_axis(x, each, updates, 1, how).unwrap(),
                g.scatter_nd(x, tuples, slices, how).unwrap(),
            ];
            let graph = g.finish(&results).unwrap();
            let wild = how != "mul";
            let inputs = [
                numbers(dtype, 96, wild, &mut both.chance),
                both.indices(ids, 135),
                numbers(dtype, 135, wild, &mut both.chance),
                both.indices(ids, 80),
                numbers(dtype, 240, wild, &mut both.chance),
            ];
            both.compare(&graph, 0, &inputs, &format!("{how} of {dtype} by {ids}"));
        }
    }
}

#[test]
fn a_wrong_index_is_told_by_its_number() {
    let Some(mut both) = Both::new() else { return };
    let mut g = GraphBuilder::new(1);
    let x = g.tensor("x", fixed(DType::F32, &[3, 2])).unwrap();
    let ids = g.tensor("ids", fixed(DType::U64, &[2, 2])).unwrap();
    let y = g.take_along_axis(x, ids, 0).unwrap();
    let graph = g.finish(&[y]).unwrap();
    let x: Vec<u8> = (0..6).flat_map(|i| (i as f32).to_le_bytes()).collect();
    for (index, told) in [(7, 7), (u64::MAX, i64::MAX)] {
        let ids: Vec<u8> = [0, 1, index, 2]
            .into_iter()
            .flat_map(u64::to_le_bytes)
            .collect();
        let error = both
            .cuda
            .run(&graph, 0, &[&x, &ids])
            .unwrap_err()
            .to_string();
        assert!(error.contains(&told.to_string()), "{error}");
    }
}

#[test]
fn tensors_are_padded_and_counted_as_by_the_processor() {
    let Some(mut both) = Both::new() else { return };
    for &dtype in DType::REAL {
        both.one(dtype, &[3, 4, 5], "padding", |g, x| {
            let bytes = [1; 8];
            let value = g.literal(dtype, Shape::default(), &bytes[..dtype.block_bytes()])?;
            let mut all = vec![
                g.pad(x, None, &[0, 2, 0], &[0, 0, 9], "constant")?,
                g.pad(x, Some(value), &[0, 0, 1], &[0, 3, 0], "constant")?,
                g.bitcast(
                    x,
                    if dtype.block_bytes() == 1 {
                        DType::I8
                    } else {
                        dtype
                    },
                )?,
            ];
            for mode in ["edge", "reflect", "wrap"] {
                all.push(g.pad(x, None, &[0, 9, 0], &[0, 1, 11], mode)?);
            }
            if dtype != DType::Bool {
                all.push(g.arange(-3.7, 1.3, 700, dtype)?);
            }
            Ok(all)
        });
    }
}

#[test]
fn what_indices_name_is_read() {
    let Some(mut both) = Both::new() else { return };
    for &dtype in DType::REAL {
        for ids in [DType::U8, DType::I32, DType::I64, DType::U64] {
            let mut g = GraphBuilder::new(1);
            let x = g.tensor("x", fixed(dtype, &[4, 5, 6])).unwrap();
            let few = g.tensor("few", fixed(ids, &[2, 3])).unwrap();
            let each = g.tensor("each", fixed(ids, &[4, 2, 6])).unwrap();
            let results = [
                g.take(x, few, 0).unwrap(),
                g.take(x, few, 1).unwrap(),
                g.take(x, few, 2).unwrap(),
                g.take_along_axis(x, each, 1).unwrap(),
                g.gather_nd(x, few, 0).unwrap(),
            ];
            let graph = g.finish(&results).unwrap();
            let inputs = [
                numbers(dtype, 120, true, &mut both.chance),
                both.indices(ids, 6),
                both.indices(ids, 48),
            ];
            both.compare(&graph, 0, &inputs, &format!("{dtype} by {ids}"));
        }
    }
}

/// The dtypes of weights.
const WEIGHTS: [DType; 11] = [
    DType::F32,
    DType::Q8_0,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::MXFP4,
    DType::NVFP4,
    DType::Q4K,
    DType::Q5K,
    DType::Q6K,
];

fn fixed(dtype: DType, dims: &[usize]) -> TensorSpec {
    TensorSpec::new(dtype, Shape::fixed(dims).unwrap()).unwrap()
}

fn rows(dtype: DType, dims: &[usize]) -> TensorSpec {
    TensorSpec::new(dtype, Shape::rows(dims).unwrap()).unwrap()
}

impl Both {
    /// Weights of ordinary numbers.
    fn weights(&mut self, dtype: DType, n: usize) -> Vec<u8> {
        match dtype.is_block() {
            // Of both signs, and no NaN.
            true if dtype == DType::F8E4M3 => {
                (0..n).map(|_| self.chance.number() as u8 & 0xbb).collect()
            }
            // Scales are among them, which must be no NaN.
            true => (0..dtype.row_bytes(n).unwrap())
                .map(|_| self.chance.number() as u8 & 0x3b)
                .collect(),
            false => numbers(dtype, n, false, &mut self.chance),
        }
    }

    fn activations(&mut self, n: usize) -> Vec<u8> {
        let mut number = || self.chance.below(2001) as f32 / 1e3 - 1.0;
        (0..n).flat_map(|_| number().to_le_bytes()).collect()
    }
}

#[test]
fn products_with_few_and_many_rows_are_the_processors() {
    let Some(mut both) = Both::new() else { return };
    for dtype in WEIGHTS {
        let (n, k) = (70, dtype.block_len().max(16) * 2);
        let mut g = GraphBuilder::new(40);
        let w = g.constant("w", fixed(dtype, &[n, k])).unwrap();
        let x = g.tensor("x", rows(DType::F32, &[k])).unwrap();
        let y = g.mul_mat(x, w).unwrap();
        let graph = g.finish(&[y]).unwrap();
        let w = both.weights(dtype, n * k);
        for rows in [1, 3, 40] {
            let x = both.activations(rows * k);
            both.compare(
                &graph,
                rows,
                &[w.clone(), x],
                &format!("{dtype}, {rows} rows"),
            );
        }
    }
}

/// Weights whose products tensor cores add, in an order of their own. Those in 8 bits have scales.
const HALVES: [DType; 3] = [DType::F16, DType::BF16, DType::F8E4M3];

/// Rectangles that have a scale each.
const RECTANGLE: [usize; 2] = [64, 32];

#[test]
fn products_with_halves_depend_on_nothing_but_their_row() {
    let Some(mut both) = Both::new() else { return };
    let (experts, n, k) = (3, 70, 144);
    for dtype in HALVES {
        let mut g = GraphBuilder::new(200);
        let w = g.constant("w", fixed(dtype, &[n, k])).unwrap();
        let x = g.tensor("x", rows(DType::F32, &[k])).unwrap();
        let [height, width] = RECTANGLE;
        let cut = [n.div_ceil(height), k.div_ceil(width)];
        let is_scaled = dtype == DType::F8E4M3;
        let by = RECTANGLE.map(|side| side as i64);
        let y = match is_scaled {
            true => {
                let scales = g.constant("s", fixed(DType::F32, &cut)).unwrap();
                g.mul_mat_scaled(x, w, scales, by[0], by[1]).unwrap()
            }
            false => g.mul_mat(x, w).unwrap(),
        };
        let graph = g.finish(&[y]).unwrap();
        let mut g = GraphBuilder::new(200);
        let w = g.constant("w", fixed(dtype, &[experts, n, k])).unwrap();
        let x = g.tensor("x", rows(DType::F32, &[1, k])).unwrap();
        let ids = g.tensor("ids", rows(DType::U32, &[1])).unwrap();
        let y = match is_scaled {
            true => {
                let dims = [experts, cut[0], cut[1]];
                let scales = g.constant("s", fixed(DType::F32, &dims)).unwrap();
                (g.mul_mat_id_scaled(w, x, ids, scales, by[0], by[1])).unwrap()
            }
            false => g.mul_mat_id(w, x, ids).unwrap(),
        };
        let of_experts = g.finish(&[y]).unwrap();
        let all = both.weights(dtype, experts * n * k);
        let w = &all[..n * dtype.row_bytes(k).unwrap()];
        let scales = match is_scaled {
            true => both.activations(experts * cut[0] * cut[1]),
            false => vec![],
        };
        let of_one = &scales[..scales.len() / experts];
        let x = both.activations(200 * k);
        let with = |scales: &[u8], inputs: &[&[u8]]| -> Vec<Vec<u8>> {
            let mut all: Vec<Vec<u8>> = inputs.iter().map(|bytes| bytes.to_vec()).collect();
            all.extend(is_scaled.then(|| scales.to_vec()));
            all
        };
        let mut product = |rows: usize, from: usize| {
            let x = &x[from * k * 4..][..rows * k * 4];
            let inputs = with(of_one, &[w, x]);
            let inputs: Vec<&[u8]> = inputs.iter().map(|bytes| &bytes[..]).collect();
            let mut ran = both.cuda.run(&graph, rows, &inputs).unwrap();
            ran.outputs.remove(0)
        };
        let expected = product(200, 0);
        for (rows, from) in [
            (1, 0),
            (1, 199),
            (7, 3),
            (9, 100),
            (20, 60),
            (64, 7),
            (65, 99),
        ] {
            let found = product(rows, from);
            let expected = &expected[from * n * 4..][..rows * n * 4];
            difference(DType::F32, Check::Exact, 0.0, &found, expected)
                .unwrap_or_else(|wrong| panic!("{dtype}, {rows} rows from {from}: {wrong}"));
        }
        // The first expert has all rows but some: one by one, in groups for few rows, and in tiles.
        for rows in [2, 40, 200] {
            let ids: Vec<u8> = (0..rows)
                .flat_map(|row| u32::from(row % 7 == 5).to_le_bytes())
                .collect();
            let inputs = with(&scales, &[&all[..], &x[..rows * k * 4], &ids]);
            let inputs: Vec<&[u8]> = inputs.iter().map(|bytes| &bytes[..]).collect();
            let ran = both.cuda.run(&of_experts, rows, &inputs).unwrap();
            for row in (0..rows).filter(|row| row % 7 != 5) {
                let [found, expected] =
                    [&ran.outputs[0], &expected].map(|all| &all[row * n * 4..][..n * 4]);
                difference(DType::F32, Check::Exact, 0.0, found, expected)
                    .unwrap_or_else(|wrong| panic!("{dtype}, row {row} of {rows}: {wrong}"));
            }
        }
    }
}

#[test]
fn products_with_chosen_experts_are_the_processors() {
    let Some(mut both) = Both::new() else { return };
    for dtype in WEIGHTS {
        for (used, shared) in [(1, true), (3, true), (3, false)] {
            let (experts, n, k) = (5, 19, dtype.block_len().max(16) * 2);
            let mut g = GraphBuilder::new(90);
            let per_token = if shared { 1 } else { used };
            let w = g.constant("w", fixed(dtype, &[experts, n, k])).unwrap();
            let x = g.tensor("x", rows(DType::F32, &[per_token, k])).unwrap();
            let ids = g.tensor("ids", rows(DType::U32, &[used])).unwrap();
            let y = g.mul_mat_id(w, x, ids).unwrap();
            let graph = g.finish(&[y]).unwrap();
            let w = both.weights(dtype, experts * n * k);
            // Choices one by one, and grouped by experts, for few rows and for tiles.
            for tokens in [1, 4, 90] {
                let x = both.activations(tokens * per_token * k);
                let ids: Vec<u8> = (0..tokens * used)
                    .flat_map(|_| (both.chance.below(experts) as u32).to_le_bytes())
                    .collect();
                let what = format!("{dtype}, {used} experts of {tokens}, shared: {shared}");
                both.compare(&graph, tokens, &[w.clone(), x, ids], &what);
            }
        }
    }
}

#[test]
fn products_with_scaled_blocks_are_the_processors() {
    let Some(mut both) = Both::new() else { return };
    for dtype in [DType::NVFP4, DType::Q4K] {
        let (experts, n, k) = (5, 19usize, dtype.block_len() * 2);
        for height in [5usize, 1 << 31] {
            let (down, by) = (n.div_ceil(height), [height as i64, k as i64]);
            let mut g = GraphBuilder::new(90);
            let x = g.tensor("x", rows(DType::F32, &[k])).unwrap();
            let mut results = Vec::new();
            for (w, s) in [("v", "of v"), ("w", "of w")] {
                let w = g.constant(w, fixed(dtype, &[n, k])).unwrap();
                let s = g.constant(s, fixed(DType::F32, &[down, 1])).unwrap();
                results.push(g.mul_mat_scaled(x, w, s, by[0], by[1]).unwrap());
            }
            let graph = g.finish(&results).unwrap();
            assert_eq!(both.device.elsewhere(&graph).unwrap(), [""; 0]);
            let mut g = GraphBuilder::new(90);
            let w = g.constant("w", fixed(dtype, &[experts, n, k])).unwrap();
            let x = g.tensor("x", rows(DType::F32, &[1, k])).unwrap();
            let ids = g.tensor("ids", rows(DType::U32, &[3])).unwrap();
            let spec = fixed(DType::F32, &[experts, down, 1]);
            let s = g.constant("s", spec).unwrap();
            let y = g.mul_mat_id_scaled(w, x, ids, s, by[0], by[1]).unwrap();
            let of_experts = g.finish(&[y]).unwrap();
            assert_eq!(both.device.elsewhere(&of_experts).unwrap(), [""; 0]);
            for tokens in [1, 4, 90] {
                let what = format!("{dtype}, {tokens} rows, scales of {height}");
                let x = both.activations(tokens * k);
                let mut inputs = vec![x.clone()];
                for _ in 0..2 {
                    inputs.push(both.weights(dtype, n * k));
                    inputs.push(both.activations(down));
                }
                both.compare(&graph, tokens, &inputs, &what);
                let ids: Vec<u8> = (0..tokens * 3)
                    .flat_map(|_| (both.chance.below(experts) as u32).to_le_bytes())
                    .collect();
                let w = both.weights(dtype, experts * n * k);
                let inputs = [w, x, ids, both.activations(experts * down)];
                both.compare(&of_experts, tokens, &inputs, &what);
            }
        }
    }
}

#[test]
fn products_of_activations_are_the_processors() {
    let Some(mut both) = Both::new() else { return };
    let shapes: [(&[usize], &[usize]); 5] = [
        (&[3, 40], &[40, 5]),
        (&[33, 70], &[70, 66]),
        (&[2, 4, 7], &[7, 3]),
        (&[2, 1, 3, 9], &[1, 4, 9, 5]),
        (&[2, 3, 0], &[2, 0, 4]),
    ];
    for dtype in FLOATS.into_iter().chain([DType::F64]) {
        for (a, b) in shapes {
            let mut g = GraphBuilder::new(1);
            let left = g.tensor("a", fixed(dtype, a)).unwrap();
            let right = g.tensor("b", fixed(dtype, b)).unwrap();
            let y = g.matmul(left, right).unwrap();
            let graph = g.finish(&[y]).unwrap();
            let bytes = [a, b].map(|dims| {
                let n = dims.iter().product();
                numbers(dtype, n, false, &mut both.chance)
            });
            both.compare(&graph, 0, &bytes, &format!("{dtype} {a:?} by {b:?}"));
        }
    }
}

#[test]
fn attention_over_dense_keys_is_the_devices() {
    let Some(both) = Both::new() else { return };
    let mut g = GraphBuilder::new(1);
    let q = g.tensor("q", fixed(DType::F32, &[2, 8, 5, 16])).unwrap();
    let k = g.tensor("k", fixed(DType::F32, &[2, 4, 7, 16])).unwrap();
    let v = g.tensor("v", fixed(DType::F32, &[2, 4, 7, 12])).unwrap();
    let sinks = g.tensor("sinks", fixed(DType::F32, &[8])).unwrap();
    let y = g.scaled_dot_product_attention(q, k, v, None, Some(sinks), 0.25, true, 4, 30.0);
    let graph = g.finish(&[y.unwrap()]).unwrap();
    assert_eq!(both.device.elsewhere(&graph).unwrap(), [""; 0]);
}

//! Softmax and layer normalisation of rows against f64, equal on every path and for any threads and rows.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;

use hotcell_graph::{DType, GraphBuilder, Shape, TensorSpec, Value};
use hotcell_kernels::{
    backend::Device,
    cpu::{CpuDevice, path::CpuPath},
    plan::{PlanHints, Slot},
};

use common::numbers;

/// Runs an op on `[rows, n]` and vectors `[n]` for the first `rows` rows of `x`.
fn run(
    (threads, path): (u32, CpuPath),
    n: usize,
    x: &[f32],
    vectors: &[&[f32]],
    rows: usize,
    op: impl Fn(&mut GraphBuilder, &[Value]) -> Value,
) -> Vec<f32> {
    let device = CpuDevice::with_path(threads, path).unwrap();
    let most = x.len() / n;
    let mut g = GraphBuilder::new(most);
    let spec = |shape| TensorSpec::new(DType::F32, shape).unwrap();
    let mut values = vec![g.tensor("x", spec(Shape::rows(&[n]).unwrap())).unwrap()];
    for i in 0..vectors.len() {
        let shape = Shape::fixed(&[n]).unwrap();
        values.push(g.tensor(format!("v{i}"), spec(shape)).unwrap());
    }
    let y = op(&mut g, &values);
    let graph = g.finish(&[y]).unwrap();
    let mut plan = device.plan(&graph, &PlanHints::default()).unwrap();
    assert_eq!(plan.memory().steps, 1, "not one kernel");
    for (i, values) in std::iter::once(&x).chain(vectors).enumerate() {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
        let buffer = device.allocate("x", bytes.len()).unwrap();
        buffer.write(0, &bytes).unwrap();
        plan.bind(Slot::Input(i), &buffer, 0).unwrap();
    }
    let out = device.allocate("y", most * n * 4).unwrap();
    plan.bind(Slot::Output(0), &out, 0).unwrap();
    plan.execute(rows).unwrap();
    let mut y = vec![0.0; rows * n];
    out.read_f32(0, &mut y).unwrap();
    y
}

const SIZES: [usize; 9] = [1, 2, 7, 16, 17, 33, 100, 1000, 4097];

/// Checks an op row by row against `exact`, within `bound` of the row's greatest magnitude.
fn check(
    scale: f32,
    vectors: usize,
    bound: f64,
    op: impl Fn(&mut GraphBuilder, &[Value]) -> Value,
    exact: impl Fn(&[f64], &[Vec<f64>]) -> Vec<f64>,
) {
    for n in SIZES {
        const MOST: usize = 9;
        let x: Vec<f32> = numbers(MOST * n, 1).iter().map(|v| v * scale).collect();
        let vectors: Vec<Vec<f32>> = (0..vectors).map(|i| numbers(n, 2 + i as u32)).collect();
        let slices: Vec<&[f32]> = vectors.iter().map(Vec::as_slice).collect();
        let wide = |v: &[f32]| -> Vec<f64> { v.iter().map(|v| (*v).into()).collect() };
        let wide_vectors: Vec<Vec<f64>> = slices.iter().map(|v| wide(v)).collect();
        let first = run((1, CpuPath::detect()), n, &x, &slices, MOST, &op);
        for (x, y) in x.chunks_exact(n).zip(first.chunks_exact(n)) {
            let exact = exact(&wide(x), &wide_vectors);
            let most = exact.iter().fold(1e-3f64, |a, v| a.max(v.abs()));
            for (y, exact) in y.iter().zip(&exact) {
                assert!(
                    (f64::from(*y) - exact).abs() <= bound * most,
                    "{n}: {y}, not {exact}"
                );
            }
        }
        for path in CpuPath::available() {
            for (threads, rows) in [(1, 1), (2, MOST), (3, 4)] {
                let ours = run((threads, path), n, &x, &slices, rows, &op);
                let equal = ours
                    .iter()
                    .zip(&first)
                    .all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(equal, "{n}, {rows} rows, {threads} threads, {path}");
            }
        }
    }
}

fn softmax_of(x: &[f64]) -> (f64, f64) {
    let most = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    (most, x.iter().map(|v| (v - most).exp()).sum())
}

#[test]
fn softmax_is_right() {
    check(
        20.0,
        0,
        1e-6,
        |g, v| g.softmax(v[0], -1).unwrap(),
        |x, _| {
            let (most, sum) = softmax_of(x);
            x.iter().map(|v| (v - most).exp() / sum).collect()
        },
    );
}

#[test]
fn log_softmax_is_right() {
    check(
        20.0,
        0,
        1e-6,
        |g, v| g.log_softmax(v[0], 1).unwrap(),
        |x, _| {
            let (most, sum) = softmax_of(x);
            x.iter().map(|v| v - most - sum.ln()).collect()
        },
    );
}

#[test]
fn layer_norm_is_right_with_and_without_weight_and_bias() {
    const EPS: f64 = 1e-5;
    let standard = |x: &[f64]| -> Vec<f64> {
        let n = x.len() as f64;
        let mean = x.iter().sum::<f64>() / n;
        let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
        x.iter()
            .map(|v| (v - mean) / (variance + EPS).sqrt())
            .collect()
    };
    check(
        3.0,
        2,
        1e-5,
        |g, v| g.layer_norm(v[0], Some(v[1]), Some(v[2]), EPS).unwrap(),
        |x, v| {
            let both = standard(x);
            (0..x.len()).map(|i| both[i] * v[0][i] + v[1][i]).collect()
        },
    );
    check(
        3.0,
        1,
        1e-5,
        |g, v| g.layer_norm(v[0], None, Some(v[1]), EPS).unwrap(),
        |x, v| standard(x).iter().zip(&v[0]).map(|(x, b)| x + b).collect(),
    );
    check(
        3.0,
        0,
        1e-5,
        |g, v| g.layer_norm(v[0], None, None, EPS).unwrap(),
        |x, _| standard(x),
    );
}

#[test]
fn rows_of_minus_infinity_and_rows_with_nan_are_nan() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let x = [[-inf, -inf, -inf], [1.0, nan, 2.0], [-inf, 0.0, 0.0]].concat();
    for path in CpuPath::available() {
        let y = run((1, path), 3, &x, &[], 3, |g, v| g.softmax(v[0], 1).unwrap());
        assert!(y[..6].iter().all(|v| v.is_nan()));
        assert_eq!(y[6..], [0.0, 0.5, 0.5]);
        let y = run((1, path), 3, &x, &[], 3, |g, v| {
            g.log_softmax(v[0], 1).unwrap()
        });
        assert!(y[..6].iter().all(|v| v.is_nan()));
        assert_eq!(y[6], -inf);
        assert!((y[7] + 2f32.ln()).abs() < 1e-7);
    }
}

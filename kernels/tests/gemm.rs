//! Products of activations: right, and with bits that depend on the numbers multiplied alone.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use hotcell_graph::{DType, GraphBuilder, Shape, TensorSpec};
use hotcell_kernels::{
    backend::Device,
    cpu::{
        CpuDevice,
        gemm::{Gemm, matmul},
        matmul::mul_mat,
        path::CpuPath,
    },
    plan::{PlanHints, Slot},
};

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

/// Numbers in [−1, 1) from a fixed sequence.
fn numbers(n: usize, seed: u32) -> Vec<f64> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f64::from(state >> 8) / f64::from(1 << 23) - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn encode(dtype: DType, values: &[f64]) -> Vec<u8> {
    let one = |v: &f64| match dtype {
        DType::F64 => v.to_ne_bytes().to_vec(),
        DType::F16 => half::f16::from_f64(*v).to_ne_bytes().to_vec(),
        DType::BF16 => half::bf16::from_f64(*v).to_ne_bytes().to_vec(),
        _ => (*v as f32).to_ne_bytes().to_vec(),
    };
    values.iter().flat_map(one).collect()
}

fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let one = |b: &[u8]| match dtype {
        DType::F64 => f64::from_ne_bytes(b.try_into().unwrap()),
        DType::F16 => half::f16::from_ne_bytes(b.try_into().unwrap()).to_f64(),
        DType::BF16 => half::bf16::from_ne_bytes(b.try_into().unwrap()).to_f64(),
        _ => f32::from_ne_bytes(b.try_into().unwrap()).into(),
    };
    bytes.chunks_exact(dtype.block_bytes()).map(one).collect()
}

/// The definition in f64.
fn naive(a: &[f64], b: &[f64], m: usize, n: usize, k: usize) -> Vec<f64> {
    let mut out = vec![0.0; m * n];
    for i in 0..m {
        for kk in 0..k {
            for j in 0..n {
                out[i * n + j] += a[i * k + kk] * b[kk * n + j];
            }
        }
    }
    out
}

/// Mean squared error over mean square.
fn nmse(ours: &[f64], exact: &[f64]) -> f64 {
    let error: f64 = ours.iter().zip(exact).map(|(a, b)| (a - b).powi(2)).sum();
    let power: f64 = exact.iter().map(|v| v * v).sum();
    if power == 0.0 { error } else { error / power }
}

/// What rounding allows.
fn bound(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-27,
        DType::F32 => 1e-11,
        DType::F16 => 1e-6,
        _ => 1e-4,
    }
}

/// Sizes around tiles, registers and blocks.
const SIZES: [(usize, usize, usize); 22] = [
    (1, 1, 1),
    (1, 7, 3),
    (2, 33, 17),
    (3, 16, 100),
    (7, 65, 64),
    (12, 100, 7),
    (13, 13, 13),
    (16, 16, 16),
    (17, 2, 33),
    (33, 17, 65),
    (64, 64, 64),
    (65, 31, 2),
    (100, 1, 100),
    (100, 12, 9),
    (121, 33, 385),
    (5, 1000, 16),
    (1, 1000, 1000),
    (1000, 3, 17),
    (1000, 65, 33),
    (25, 520, 400),
    (64, 100, 1000),
    (970, 33, 20),
];

#[test]
fn products_are_right_in_every_dtype_and_size_and_equal_on_every_path() {
    for dtype in FLOATS {
        for (m, n, k) in SIZES {
            let (a, b) = (
                encode(dtype, &numbers(m * k, 1)),
                encode(dtype, &numbers(k * n, 2)),
            );
            let exact = naive(&decode(dtype, &a), &decode(dtype, &b), m, n, k);
            let gemm = Gemm { dtype, m, n, k };
            let first = matmul(CpuPath::detect(), gemm, &a, &b);
            let error = nmse(&decode(dtype, &first), &exact);
            assert!(error < bound(dtype), "{gemm:?}: {error}");
            for path in CpuPath::available() {
                assert!(first == matmul(path, gemm, &a, &b), "{gemm:?} on {path}");
            }
        }
    }
}

#[test]
fn each_output_is_one_chain_of_fused_steps() {
    for (m, n, k) in SIZES {
        let (a, b) = (numbers(m * k, 3), numbers(k * n, 4));
        let (a, b) = (encode(DType::F32, &a), encode(DType::F32, &b));
        let dtype = DType::F32;
        let ours = decode(
            dtype,
            &matmul(CpuPath::detect(), Gemm { dtype, m, n, k }, &a, &b),
        );
        let (a, b) = (decode(dtype, &a), decode(dtype, &b));
        for i in 0..m {
            for j in 0..n {
                let mut sum = 0.0f32;
                for kk in 0..k {
                    sum = (a[i * k + kk] as f32).mul_add(b[kk * n + j] as f32, sum);
                }
                let ours = ours[i * n + j] as f32;
                assert_eq!(ours.to_bits(), sum.to_bits(), "{m} {n} {k} at {i}, {j}");
            }
        }
    }
}

#[test]
fn a_row_alone_and_a_column_alone_have_the_same_bits() {
    for dtype in FLOATS {
        let (m, n, k) = (140, 70, 401);
        let (a, b) = (
            encode(dtype, &numbers(m * k, 5)),
            encode(dtype, &numbers(k * n, 6)),
        );
        let bytes = dtype.block_bytes();
        let path = CpuPath::detect();
        let all = matmul(path, Gemm { dtype, m, n, k }, &a, &b);
        for rows in [1, 4, 5, 11, 20, 100] {
            let gemm = Gemm {
                dtype,
                m: rows,
                n,
                k,
            };
            let some = matmul(path, gemm, &a[..rows * k * bytes], &b);
            assert!(some == all[..rows * n * bytes], "{dtype}: {rows} rows");
        }
        for columns in [1, 8, 13, 33] {
            let rows = b.chunks_exact(n * bytes);
            let left: Vec<u8> = rows
                .flat_map(|row| &row[..columns * bytes])
                .copied()
                .collect();
            let gemm = Gemm {
                dtype,
                m,
                n: columns,
                k,
            };
            let some = matmul(path, gemm, &a, &left);
            let rows = all.chunks_exact(n * bytes);
            let expected: Vec<u8> = rows
                .flat_map(|row| &row[..columns * bytes])
                .copied()
                .collect();
            assert!(some == expected, "{dtype}: {columns} columns");
        }
    }
}

#[test]
fn plain_weights_are_multiplied_in_the_same_order() {
    let (m, n, k) = (40, 50, 70);
    let (a, b) = (numbers(m * k, 7), numbers(k * n, 8));
    let transposed: Vec<f64> = (0..n * k).map(|i| b[i % k * n + i / k]).collect();
    let dtype = DType::F32;
    let ours = matmul(
        CpuPath::detect(),
        Gemm { dtype, m, n, k },
        &encode(dtype, &a),
        &encode(dtype, &b),
    );
    let a: Vec<f32> = a.iter().map(|v| *v as f32).collect();
    let weights = mul_mat(
        CpuPath::detect(),
        dtype,
        &encode(dtype, &transposed),
        n,
        &a,
        m,
        k,
    );
    let weights: Vec<u8> = weights.iter().flat_map(|v| v.to_ne_bytes()).collect();
    assert!(ours == weights);
}

#[test]
fn infinities_and_nans_have_fixed_bits_on_every_path() {
    for dtype in FLOATS {
        for (m, n, k) in [(3, 40, 20), (30, 40, 20), (30, 3, 20)] {
            let mut a = numbers(m * k, 9);
            a[0] = f64::NAN;
            a[k] = f64::INFINITY;
            a[2 * k] = f64::INFINITY;
            a[2 * k + 1] = f64::NEG_INFINITY;
            let b = vec![1.0; k * n];
            let (a, b) = (encode(dtype, &a), encode(dtype, &b));
            let gemm = Gemm { dtype, m, n, k };
            let first = matmul(CpuPath::detect(), gemm, &a, &b);
            for path in CpuPath::available() {
                assert!(first == matmul(path, gemm, &a, &b), "{gemm:?} on {path}");
            }
            let values = decode(dtype, &first);
            assert!(values[..n].iter().all(|v| v.is_nan()));
            assert!(values[n..2 * n].iter().all(|v| *v == f64::INFINITY));
            assert!(values[2 * n..3 * n].iter().all(|v| v.is_nan()));
            let bits = &first[..dtype.block_bytes()];
            let quiet = encode(dtype, &[f64::from_bits(0x7ff8_0000_0000_0000)]);
            assert_eq!(bits, quiet, "{dtype}");
        }
    }
}

/// Runs `matmul` of two tensors in a plan; `a` and `b` of f64 numbers in `dtype`.
fn planned(
    dtype: DType,
    (a, a_shape): (&[f64], Shape),
    (b, b_shape): (&[f64], Shape),
    rows: usize,
    max_rows: usize,
    threads: u32,
) -> Vec<u8> {
    let device = CpuDevice::with_path(threads, CpuPath::detect()).unwrap();
    let mut g = GraphBuilder::new(max_rows);
    let av = g
        .tensor("a", TensorSpec::new(dtype, a_shape).unwrap())
        .unwrap();
    let bv = g
        .tensor("b", TensorSpec::new(dtype, b_shape).unwrap())
        .unwrap();
    let y = g.matmul(av, bv).unwrap();
    let spec = match g.spec(y).unwrap() {
        hotcell_graph::op::ValueSpec::Tensor(t) => t,
        other => panic!("{other}"),
    };
    let mut plan = device
        .plan(&g.finish(&[y]).unwrap(), &PlanHints::default())
        .unwrap();
    for (slot, values) in [(0, a), (1, b)] {
        let bytes = encode(dtype, values);
        let buffer = device.allocate("operand", bytes.len().max(1)).unwrap();
        buffer.write(0, &bytes).unwrap();
        plan.bind(Slot::Input(slot), &buffer, 0).unwrap();
    }
    let out = device
        .allocate("out", spec.bytes(max_rows).unwrap().max(1))
        .unwrap();
    plan.bind(Slot::Output(0), &out, 0).unwrap();
    plan.execute(rows).unwrap();
    let mut bytes = vec![0; spec.bytes(rows).unwrap()];
    out.read(0, &mut bytes).unwrap();
    bytes
}

fn fixed(dims: &[usize]) -> Shape {
    Shape::fixed(dims).unwrap()
}

#[test]
fn batches_broadcast_as_in_numpy_on_any_number_of_threads() {
    let (m, n, k) = (14, 35, 20);
    for dtype in [DType::F32, DType::BF16] {
        for (before_a, before_b) in [
            (vec![2, 3], vec![2, 3]),
            (vec![2, 1], vec![3]),
            (vec![3], vec![2, 1]),
            (vec![], vec![5]),
            (vec![4], vec![]),
            (vec![1, 4], vec![1, 1]),
            (vec![0], vec![0]),
        ] {
            let dims = |before: &[usize], last: [usize; 2]| [before, &last].concat();
            let count = |before: &[usize]| before.iter().product::<usize>();
            let a = numbers(count(&before_a) * m * k, 10);
            let b = numbers(count(&before_b) * k * n, 11);
            let (sa, sb) = (
                fixed(&dims(&before_a, [m, k])),
                fixed(&dims(&before_b, [k, n])),
            );
            let both = fixed(&before_a).broadcast(&fixed(&before_b)).unwrap();
            let both: Vec<usize> = both.dims().iter().map(|d| d.at(1)).collect();
            // Matrix by matrix, each found by its place in the broadcast.
            let mut expected = Vec::new();
            for i in 0..count(&both) {
                let of = |before: &[usize]| {
                    let (mut rest, mut at, mut stride) = (i, 0, 1);
                    for (axis, size) in both.iter().enumerate().rev() {
                        let place = rest % size;
                        rest /= size;
                        let own = (axis + before.len())
                            .checked_sub(both.len())
                            .map(|j| before[j]);
                        if let Some(own) = own.filter(|own| *own > 1) {
                            at += place * stride;
                            stride *= own;
                        }
                    }
                    at
                };
                let (a, b) = (
                    &a[of(&before_a) * m * k..][..m * k],
                    &b[of(&before_b) * k * n..][..k * n],
                );
                let gemm = Gemm { dtype, m, n, k };
                expected.extend(matmul(
                    CpuPath::detect(),
                    gemm,
                    &encode(dtype, a),
                    &encode(dtype, b),
                ));
            }
            for threads in 1..=3 {
                let ours = planned(dtype, (&a, sa.clone()), (&b, sb.clone()), 1, 1, threads);
                assert!(
                    ours == expected,
                    "{before_a:?} {before_b:?}, {threads} threads"
                );
            }
        }
    }
}

#[test]
fn symbolic_rows_are_rows_of_a_or_matrices_of_a_batch() {
    let (n, k) = (40, 30);
    let (most, dtype) = (50, DType::F32);
    let a = numbers(most * 2 * k, 12);
    let b = numbers(most * k * n, 13);
    for rows in [0, 1, 2, 17, 50] {
        for threads in [1, 3] {
            let shape = Shape::rows(&[k]).unwrap();
            let ours = planned(
                dtype,
                (&a[..most * k], shape),
                (&b[..k * n], fixed(&[k, n])),
                rows,
                most,
                threads,
            );
            let exact = naive(&a, &b, rows, n, k);
            assert!(nmse(&decode(dtype, &ours), &exact) < 1e-11);
            let shapes = (Shape::rows(&[2, k]).unwrap(), Shape::rows(&[k, n]).unwrap());
            let ours = planned(dtype, (&a, shapes.0), (&b, shapes.1), rows, most, threads);
            let exact: Vec<f64> = (0..rows)
                .flat_map(|r| naive(&a[r * 2 * k..], &b[r * k * n..], 2, n, k))
                .collect();
            assert!(nmse(&decode(dtype, &ours), &exact) < 1e-11);
        }
    }
}

#[test]
fn threads_and_large_products_change_no_bit() {
    for (m, n, k) in [(300, 200, 500), (2, 3000, 200), (1500, 5, 300)] {
        for dtype in [DType::F32, DType::F16, DType::F64] {
            let (a, b) = (numbers(m * k, 14), numbers(k * n, 15));
            let alone = matmul(
                CpuPath::detect(),
                Gemm { dtype, m, n, k },
                &encode(dtype, &a),
                &encode(dtype, &b),
            );
            for threads in [2, 3] {
                let ours = planned(
                    dtype,
                    (&a, fixed(&[m, k])),
                    (&b, fixed(&[k, n])),
                    1,
                    1,
                    threads,
                );
                assert!(ours == alone, "{dtype} {m} {n} {k}, {threads} threads");
            }
        }
    }
}

#[test]
fn a_sum_of_nothing_is_zero_and_empty_products_are_empty() {
    for dtype in FLOATS {
        let zeros = planned(
            dtype,
            (&[], fixed(&[3, 0])),
            (&[], fixed(&[0, 40])),
            1,
            1,
            2,
        );
        assert_eq!(zeros, vec![0; 120 * dtype.block_bytes()]);
        let some = numbers(12, 1);
        assert!(
            planned(
                dtype,
                (&[], fixed(&[0, 4])),
                (&some, fixed(&[4, 3])),
                1,
                1,
                2
            )
            .is_empty()
        );
        assert!(
            planned(
                dtype,
                (&some, fixed(&[3, 4])),
                (&[], fixed(&[4, 0])),
                1,
                1,
                2
            )
            .is_empty()
        );
    }
}

#[test]
fn complex_numbers_multiply_as_pairs_of_reals() {
    let (m, n, k) = (5, 19, 11);
    let (a, b) = (numbers(2 * m * k, 16), numbers(2 * k * n, 17));
    let bytes =
        |v: &[f64]| -> Vec<u8> { v.iter().flat_map(|v| (*v as f32).to_ne_bytes()).collect() };
    let gemm = Gemm {
        dtype: DType::C64,
        m,
        n,
        k,
    };
    let part = |v: &[f64], p: usize| -> Vec<f64> { v.iter().skip(p).step_by(2).copied().collect() };
    let (ar, ai, br, bi) = (part(&a, 0), part(&a, 1), part(&b, 0), part(&b, 1));
    let product = |x: &[f64], y: &[f64]| naive(x, y, m, n, k);
    let (rr, ii, ri, ir) = (
        product(&ar, &br),
        product(&ai, &bi),
        product(&ar, &bi),
        product(&ai, &br),
    );
    let exact: Vec<f64> = (0..m * n)
        .flat_map(|i| [rr[i] - ii[i], ri[i] + ir[i]])
        .collect();
    let first = matmul(CpuPath::detect(), gemm, &bytes(&a), &bytes(&b));
    assert!(nmse(&decode(DType::F32, &first), &exact) < 1e-11);
    for path in CpuPath::available() {
        assert!(
            first == matmul(path, gemm, &bytes(&a), &bytes(&b)),
            "{path}"
        );
    }
}

#[test]
fn vectors_are_matrices_of_one_row_or_column() {
    let device = CpuDevice::with_path(1, CpuPath::detect()).unwrap();
    let mut g = GraphBuilder::new(1);
    let spec = |dims: &[usize]| TensorSpec::new(DType::F32, fixed(dims)).unwrap();
    let a = g.tensor("a", spec(&[4])).unwrap();
    let b = g.tensor("b", spec(&[4])).unwrap();
    let y = g.matmul(a, b).unwrap();
    let plan = device.plan(&g.finish(&[y]).unwrap(), &PlanHints::default());
    let mut plan = plan.unwrap();
    let buffer = device.allocate("a", 16).unwrap();
    buffer
        .write(0, &encode(DType::F32, &[1.0, 2.0, 3.0, 4.0]))
        .unwrap();
    let out = device.allocate("y", 4).unwrap();
    plan.bind(Slot::Input(0), &buffer, 0).unwrap();
    plan.bind(Slot::Input(1), &buffer, 0).unwrap();
    plan.bind(Slot::Output(0), &out, 0).unwrap();
    plan.execute(1).unwrap();
    let mut y = [0.0];
    out.read_f32(0, &mut y).unwrap();
    assert_eq!(y, [30.0]);
}

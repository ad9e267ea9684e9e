//! Reductions and running sums against loops over elements in f64 or wide integers.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;

use common::{Numbers, Tensor, decode, flat, indices, run, run_rows};
use hotcell_graph::{DType, GraphBuilder, GraphError, Value};
use hotcell_kernels::backend::DeviceError;
use proptest::prelude::*;

fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
}

/// Numbers that every dtype holds or wraps to something else: small ones with some extremes.
fn tensor(dtype: DType, dims: &[usize], seed: u64, special: bool) -> Tensor {
    let mut numbers = Numbers::new(seed);
    let n = dims.iter().product();
    let values: Vec<f64> = (0..n)
        .map(|_| {
            let v = numbers.below(41) as f64 - 20.0;
            match numbers.below(40) {
                0 if special && is_float(dtype) => f64::NAN,
                1 if special && is_float(dtype) => f64::NEG_INFINITY,
                2 if special => -0.0,
                3 if special && !is_float(dtype) => 1e30,
                4 if special && !is_float(dtype) => -1e30,
                _ if is_float(dtype) => v / 4.0,
                _ => v,
            }
        })
        .collect();
    Tensor::of(dtype, dims, &values)
}

fn shapes() -> impl Strategy<Value = Vec<usize>> {
    prop_oneof![
        6 => prop::collection::vec(0..6usize, 0..=6usize),
        1 => prop::collection::vec(1..3usize, 8),
        1 => (1..4usize, 1..9000usize).prop_map(|(a, b)| vec![a, b]),
        1 => (1..3000usize, 1..9usize).prop_map(|(a, b)| vec![a, b]),
        1 => (1..700usize, 60..90usize).prop_map(|(a, b)| vec![a, b]),
        1 => (1..4usize, 1..30usize, 1..40usize, 1..5usize).prop_map(|(a, b, c, d)| vec![a, b, c, d]),
    ]
}

/// The elements that each result is made of, by index.
fn groups(dims: &[usize], reduced: &[bool]) -> (Vec<usize>, Vec<Vec<usize>>) {
    let kept: Vec<usize> = (0..dims.len())
        .map(|a| if reduced[a] { 1 } else { dims[a] })
        .collect();
    let mut out = vec![vec![]; kept.iter().product()];
    for index in indices(dims) {
        let to: Vec<usize> = (0..dims.len())
            .map(|a| if reduced[a] { 0 } else { index[a] })
            .collect();
        out[flat(&kept, &to)].push(flat(dims, &index));
    }
    (kept, out)
}

fn apply(
    op: &str,
    g: &mut GraphBuilder,
    x: Value,
    axes: &[i64],
    keep: bool,
) -> Result<Value, GraphError> {
    match op {
        "sum" => g.reduce_sum(x, axes, keep),
        "prod" => g.reduce_prod(x, axes, keep),
        "max" => g.reduce_max(x, axes, keep),
        "min" => g.reduce_min(x, axes, keep),
        "all" => g.reduce_all(x, axes, keep),
        _ => g.reduce_any(x, axes, keep),
    }
}

/// An integer element, exact.
fn integer(t: &Tensor, i: usize) -> i128 {
    match (t.dtype, t.at(i).try_into()) {
        (DType::U64, Ok(b)) => u64::from_ne_bytes(b).into(),
        (DType::I64, Ok(b)) => i64::from_ne_bytes(b).into(),
        _ => decode(t.dtype, t.at(i)) as i128,
    }
}

fn check(op: &str, x: &Tensor, group: &[usize], y: &Tensor, at: usize) {
    let floats = || group.iter().map(|i| decode(x.dtype, x.at(*i)));
    let got = decode(y.dtype, y.at(at));
    let label = format!("{op} {} {:?} of {}", x.dtype, x.dims, group.len());
    match op {
        "all" => assert_eq!(got != 0.0, floats().all(|v| v != 0.0), "{label}"),
        "any" => assert_eq!(got != 0.0, floats().any(|v| v != 0.0), "{label}"),
        "max" | "min" if is_float(x.dtype) => {
            let best = floats().reduce(|a, b| match () {
                () if a.is_nan() || b.is_nan() => f64::NAN,
                () if (op == "max") == (b > a) => b,
                () => a,
            });
            let best = best.unwrap();
            assert!(
                got == best || (got.is_nan() && best.is_nan()),
                "{label}: {got}, not {best}"
            );
        }
        "max" => assert_eq!(
            integer(y, at),
            group.iter().map(|i| integer(x, *i)).max().unwrap(),
            "{label}"
        ),
        "min" => assert_eq!(
            integer(y, at),
            group.iter().map(|i| integer(x, *i)).min().unwrap(),
            "{label}"
        ),
        _ if is_float(x.dtype) => {
            let (exact, scale) = if op == "sum" {
                (floats().sum::<f64>(), floats().map(f64::abs).sum::<f64>())
            } else {
                let p: f64 = floats().product();
                (p, p.abs())
            };
            let (bits, least) = match x.dtype {
                DType::F16 => (11, 6e-8),
                DType::BF16 => (8, 1e-38),
                DType::F32 => (21, 1e-38),
                _ => (49, 1e-300),
            };
            let most = match x.dtype {
                DType::F16 => 65504.0,
                DType::BF16 | DType::F32 => 3e38,
                _ => 1e308,
            };
            // Products may leave the range on the way.
            if op == "prod" && (scale > most / 1e3 || (scale < 1e-30 && scale > 0.0)) {
                return;
            }
            if scale > most {
                return;
            }
            // Sums of quarters are exact in f32 here, so that only the last rounding is left.
            let bound = exact.abs() * f64::from(2f32.powi(-bits))
                + scale * 1e-7 * f64::from(u8::from(op == "prod")) * group.len() as f64
                + least;
            assert!((got - exact).abs() <= bound, "{label}: {got}, not {exact}");
        }
        _ => {
            let values = group.iter().map(|i| integer(x, *i));
            let mask = if y.dtype.block_bytes() == 8 {
                u128::from(u64::MAX)
            } else {
                u128::from(u32::MAX)
            };
            let exact = values.fold(if op == "sum" { 0i128 } else { 1 }, |a, b| {
                if op == "sum" {
                    a.wrapping_add(b)
                } else {
                    a.wrapping_mul(b)
                }
            });
            assert_eq!(
                integer(y, at) as u128 & mask,
                exact as u128 & mask,
                "{label}"
            );
        }
    }
}

fn one(op: &str, dtype: DType, dims: &[usize], axes: &[usize], keep: bool, seed: u64) {
    let reduced: Vec<bool> = (0..dims.len())
        .map(|a| axes.is_empty() || axes.contains(&a))
        .collect();
    let (kept, groups) = groups(dims, &reduced);
    let empty = groups.iter().any(Vec::is_empty) || groups.is_empty();
    if empty && matches!(op, "max" | "min") {
        return;
    }
    let extreme = matches!(op, "max" | "min" | "all" | "any");
    let mut x = tensor(dtype, dims, seed, extreme);
    if op == "prod" && is_float(dtype) {
        // Halves and twos: every product is exact, and few leave the range.
        let mut numbers = Numbers::new(seed);
        let values = (0..x.elements()).map(|_| match numbers.below(200) {
            0 => -1.0,
            n => [0.5, 1.0, 1.0, 2.0][n % 4],
        });
        x = Tensor::of(dtype, dims, &values.collect::<Vec<_>>());
    }
    let longs: Vec<i64> = axes
        .iter()
        .map(|a| {
            *a as i64
                - if seed.is_multiple_of(2) {
                    0
                } else {
                    dims.len() as i64
                }
        })
        .collect();
    let y = run(&[&x], |g, v| apply(op, g, v[0], &longs, keep)).unwrap();
    let shape: Vec<usize> = if keep {
        kept
    } else {
        (0..dims.len())
            .filter(|a| !reduced[*a])
            .map(|a| dims[a])
            .collect()
    };
    assert_eq!(y.dims, shape);
    assert_eq!(y.elements(), groups.len());
    for (at, group) in groups.iter().enumerate() {
        check(op, &x, group, &y, at);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn reductions_agree_with_loops(
        dims in shapes(), dtype in prop::sample::select(DType::REAL.to_vec()), pick in any::<u8>(), keep in any::<bool>(), seed in any::<u64>(),
        op in prop::sample::select(vec!["sum", "prod", "max", "min", "all", "any"]),
    ) {
        let axes: Vec<usize> = (0..dims.len()).filter(|a| pick >> a & 1 == 1).collect();
        one(op, dtype, &dims, &axes, keep, seed);
    }

    #[test]
    fn arguments_are_the_first_best(dims in shapes(), dtype in prop::sample::select(DType::REAL.to_vec()), pick in any::<usize>(), seed in any::<u64>(), largest in any::<bool>()) {
        prop_assume!(!dims.is_empty());
        let axis = pick % dims.len();
        prop_assume!(dims[axis] > 0);
        let x = tensor(dtype, &dims, seed, true);
        let y = run(&[&x], |g, v| if largest { g.argmax(v[0], axis as i64, true) } else { g.argmin(v[0], axis as i64, true) }).unwrap();
        prop_assert_eq!(y.dtype, DType::U32);
        let reduced: Vec<bool> = (0..dims.len()).map(|a| a == axis).collect();
        let (_, groups) = groups(&dims, &reduced);
        for (at, group) in groups.iter().enumerate() {
            let nan = group.iter().position(|i| decode(dtype, x.at(*i)).is_nan());
            let mut best = 0;
            for (i, element) in group.iter().enumerate() {
                let better = if is_float(dtype) {
                    let (a, b) = (decode(dtype, x.at(*element)), decode(dtype, x.at(group[best])));
                    if largest { a > b } else { a < b }
                } else {
                    let (a, b) = (integer(&x, *element), integer(&x, group[best]));
                    if largest { a > b } else { a < b }
                };
                if better { best = i; }
            }
            prop_assert_eq!(decode(DType::U32, y.at(at)) as usize, nan.unwrap_or(best));
        }
    }

    #[test]
    fn running_values_agree_with_loops(
        dims in shapes(), dtype in prop::sample::select(DType::REAL[1..].to_vec()), pick in any::<usize>(), seed in any::<u64>(),
        product in any::<bool>(), exclusive in any::<bool>(), reverse in any::<bool>(),
    ) {
        prop_assume!(!dims.is_empty());
        let axis = pick % dims.len();
        let x = tensor(dtype, &dims, seed, false);
        let y = run(&[&x], |g, v| if product { g.cumprod(v[0], axis as i64, exclusive, reverse) } else { g.cumsum(v[0], axis as i64, exclusive, reverse) }).unwrap();
        prop_assert_eq!(y.dtype, dtype);
        let reduced: Vec<bool> = (0..dims.len()).map(|a| a == axis).collect();
        let bits = dtype.block_bytes() * 8;
        for group in groups(&dims, &reduced).1 {
            let order: Vec<usize> = if reverse { group.into_iter().rev().collect() } else { group };
            let (mut float, mut int) = (f64::from(u8::from(product)), i128::from(product));
            for i in order {
                let before = (float, int);
                let v = decode(dtype, x.at(i));
                float = if product { float * v } else { float + v };
                int = if product { int.wrapping_mul(integer(&x, i)) } else { int + integer(&x, i) };
                let (f, n) = if exclusive { before } else { (float, int) };
                let got = decode(dtype, y.at(i));
                if is_float(dtype) {
                    let bound = f.abs() * match dtype { DType::F16 => 1e-3, DType::BF16 => 8e-3, DType::F32 => 1e-4, _ => 1e-11 };
                    let range = match dtype { DType::F16 => 6e-5..6e4, DType::F64 => 1e-290..1e300, _ => 1e-30..1e36 };
                    if f == 0.0 || range.contains(&f.abs()) {
                        prop_assert!((got - f).abs() <= bound, "{} {}: {} not {}", dtype, product, got, f);
                    } else if product {
                        break;
                    }
                } else {
                    let mask = (1i128 << bits) - 1;
                    prop_assert_eq!(integer(&y, i) & mask, n & mask);
                }
            }
        }
    }
}

#[test]
fn every_dtype_and_op_over_every_kind_of_run() {
    let shapes: [(&[usize], &[usize]); 9] = [
        (&[70_001], &[]),
        (&[3, 9_001], &[1]),
        (&[37, 33], &[1]),
        (&[1_300, 3], &[0]),
        (&[300, 1_100], &[0]),
        (&[5, 300, 7], &[1]),
        (&[7, 5, 4_100], &[0, 2]),
        (&[6, 3, 280, 5], &[0, 2]),
        (&[4, 1, 6], &[1]),
    ];
    for (i, (dims, axes)) in shapes.iter().enumerate() {
        for &dtype in DType::REAL {
            for op in ["sum", "prod", "max", "min", "all", "any"] {
                one(op, dtype, dims, axes, false, 2 * i as u64);
            }
        }
    }
}

#[test]
fn one_plan_reduces_any_number_of_rows_to_the_same_bits() {
    const MAX: usize = 2_000;
    let mut numbers = Numbers::new(5);
    let values: Vec<f64> = (0..MAX * 9)
        .map(|_| numbers.next() as f64 / 1e12 - 0.3)
        .collect();
    let x = Tensor::of(DType::F32, &[MAX, 9], &values);
    let rows = [1, 2, 15, 700, 2_000];
    let build = |g: &mut GraphBuilder, v: &[Value]| {
        Ok(vec![
            g.reduce_sum(v[0], &[1], false)?,
            g.reduce_sum(v[0], &[0], false)?,
            g.reduce_sum(v[0], &[], false)?,
            g.reduce_max(v[0], &[0], true)?,
            g.argmin(v[0], 0, false)?,
            g.cumsum(v[0], 1, false, false)?,
        ])
    };
    let results = run_rows(&[(&x, true)], MAX, &rows, build).unwrap();
    let whole = &results[4];
    for (&n, results) in rows.iter().zip(&results) {
        let x = x.prefix(n);
        // A kept row has the same bits however many there are.
        assert_eq!(results[0].bytes, whole[0].prefix(n).bytes);
        assert_eq!(results[5].bytes, whole[5].prefix(n).bytes);
        let (_, columns) = groups(&[n, 9], &[true, false]);
        let sum = |group: &[usize]| group.iter().map(|i| x.values()[*i]).sum::<f64>();
        let total: f64 = x.values().iter().sum();
        assert!((results[2].values()[0] - total).abs() < 1e-3);
        for (c, group) in columns.iter().enumerate() {
            assert!((results[1].values()[c] - sum(group)).abs() < 1e-3);
            check("max", &x, group, &results[3], c);
        }
        // The same numbers of rows in a plan of its own.
        let alone = run_rows(&[(&x, false)], 1, &[1], build).unwrap();
        for (a, b) in alone[0].iter().zip(results) {
            assert_eq!(a.bytes, b.bytes, "{n} rows");
        }
    }
    let none = run_rows(&[(&x, true)], MAX, &[0], |g, v| {
        Ok(vec![
            g.reduce_sum(v[0], &[0], false)?,
            g.reduce_all(v[0], &[0], false)?,
        ])
    });
    assert_eq!(none.unwrap()[0][0].values(), [0.0; 9]);
    for op in 0..3 {
        let error = run_rows(&[(&x, true)], MAX, &[0], |g, v| {
            Ok(vec![match op {
                0 => g.reduce_max(v[0], &[0], false)?,
                1 => g.reduce_min(v[0], &[], false)?,
                _ => g.argmax(v[0], 0, false)?,
            }])
        });
        assert!(matches!(error, Err(DeviceError::Undefined { .. })));
    }
}

#[test]
fn long_sums_keep_their_precision() {
    // 0.1 as f32, four million times: one running f32 sum would be off by percents.
    let n = 4_000_000;
    let x = Tensor::of(DType::F32, &[n], &vec![0.1; n]);
    let exact = f64::from(0.1f32) * n as f64;
    let y = run(&[&x], |g, v| g.reduce_sum(v[0], &[], false)).unwrap();
    assert!(
        (y.values()[0] / exact - 1.0).abs() < 1e-5,
        "{:?}",
        y.values()
    );
    let x = Tensor {
        dims: vec![n / 100, 100],
        ..x
    };
    let y = run(&[&x], |g, v| g.reduce_sum(v[0], &[0], false)).unwrap();
    assert!(
        y.values()
            .iter()
            .all(|v| (v / (exact / 100.0) - 1.0).abs() < 1e-5)
    );
}

#[test]
fn complex_sums_and_products() {
    let bytes: Vec<u8> = (0..1000 * 2)
        .flat_map(|i| ((i % 7) as f32 - 3.0).to_ne_bytes())
        .collect();
    let x = Tensor {
        dtype: DType::C64,
        dims: vec![1000],
        bytes,
    };
    let part = |b: &[u8], i: usize| decode(DType::F32, &b[4 * i..][..4]);
    let y = run(&[&x], |g, v| g.reduce_sum(v[0], &[], false)).unwrap();
    let sum = |from: usize| {
        (from..2000)
            .step_by(2)
            .map(|i| (i % 7) as f64 - 3.0)
            .sum::<f64>()
    };
    assert_eq!((part(&y.bytes, 0), part(&y.bytes, 1)), (sum(0), sum(1)));
    // (1 + 2i)(3 - i)(-2i) = (5 + 5i)(-2i) = 10 - 10i, by hand.
    let bytes = [1.0f32, 2.0, 3.0, -1.0, 0.0, -2.0]
        .iter()
        .flat_map(|v| v.to_ne_bytes())
        .collect();
    let x = Tensor {
        dtype: DType::C64,
        dims: vec![3],
        bytes,
    };
    let y = run(&[&x], |g, v| g.reduce_prod(v[0], &[], false)).unwrap();
    assert_eq!((part(&y.bytes, 0), part(&y.bytes, 1)), (10.0, -10.0));
}

//! Comparisons of whole tensors against loops over elements, for any number of threads.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;

use common::{Numbers, Tensor, run};
use hotcell_graph::DType;

const FLOATS: [DType; 4] = [DType::F32, DType::F16, DType::BF16, DType::F64];

/// NumPy's definition.
fn close(a: f64, b: f64, rtol: f64, atol: f64, equal_nan: bool) -> bool {
    if a.is_nan() || b.is_nan() {
        return equal_nan && a.is_nan() && b.is_nan();
    }
    a == b || b.is_finite() && (a - b).abs() <= atol + rtol * b.abs()
}

/// Pairs of every kind, far from where rounding would decide.
fn pairs(dtype: DType, n: usize, special: bool) -> (Tensor, Tensor) {
    let mut numbers = Numbers::new(n as u64);
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    let kinds = [
        (1.0, 1.0),
        (-2.0, -2.0),
        (0.0, -0.0),
        (8.0, 8.5),
        (8.0, 10.0),
        (nan, nan),
        (inf, inf),
        (inf, -inf),
        (1.0, inf),
        (inf, 1.0),
        (nan, 1.0),
    ];
    let kinds = if special { &kinds[..] } else { &kinds[..4] };
    let chosen: Vec<(f64, f64)> = (0..n).map(|_| kinds[numbers.below(kinds.len())]).collect();
    let side = |values: Vec<f64>| Tensor::of(dtype, &[n], &values);
    (
        side(chosen.iter().map(|p| p.0).collect()),
        side(chosen.iter().map(|p| p.1).collect()),
    )
}

#[test]
fn closeness_is_numpys() {
    for dtype in FLOATS {
        for n in [0, 1, 17, 1_000, 40_001] {
            for equal_nan in [false, true] {
                let (rtol, atol) = (0.05, 0.2);
                let (a, b) = pairs(dtype, n, true);
                let pairs = || a.values().into_iter().zip(b.values());
                let each = run(&[&a, &b], |g, v| {
                    g.is_close(v[0], v[1], rtol, atol, equal_nan)
                });
                let expected = pairs().map(|(a, b)| close(a, b, rtol, atol, equal_nan));
                let expected: Vec<u8> = expected.map(u8::from).collect();
                assert_eq!(each.unwrap().bytes, expected, "{dtype} {n}");
                let all = run(&[&a, &b], |g, v| {
                    g.all_close(v[0], v[1], rtol, atol, equal_nan)
                });
                let expected = expected.iter().all(|e| *e != 0);
                assert_eq!(all.unwrap().bytes, [u8::from(expected)], "{dtype} {n}");
            }
        }
    }
}

#[test]
fn one_element_apart_is_seen_wherever_it_is() {
    for dtype in FLOATS {
        let n = 40_001;
        let (a, b) = pairs(dtype, n, false);
        let all = |a: &Tensor| {
            let all = run(&[a, &b], |g, v| g.all_close(v[0], v[1], 0.05, 0.2, false));
            all.unwrap().bytes[0] != 0
        };
        assert!(all(&a));
        for at in [0, 8_191, 8_192, 20_000, n - 1] {
            let mut values = a.values();
            values[at] = 50.0;
            assert!(!all(&Tensor::of(dtype, &[n], &values)), "{dtype} {at}");
        }
    }
}

#[test]
fn equality_is_that_of_numbers() {
    for &dtype in DType::PLAIN {
        let n = 30_011;
        let values: Vec<f64> = (0..n).map(|i| f64::from(i as u32 % 2)).collect();
        let a = Tensor::of(dtype, &[n], &values);
        let equal = |b: &Tensor, equal_nan| {
            let equal = run(&[&a, b], |g, v| g.array_equal(v[0], v[1], equal_nan));
            equal.unwrap().bytes[0] != 0
        };
        assert!(equal(&a, false), "{dtype}");
        for at in [0, 9_000, n - 1] {
            let mut values = values.clone();
            values[at] = 1.0 - values[at];
            assert!(
                !equal(&Tensor::of(dtype, &[n], &values), true),
                "{dtype} {at}"
            );
        }
    }
    for dtype in FLOATS {
        let a = Tensor::of(dtype, &[3], &[0.0, f64::NAN, f64::INFINITY]);
        let b = Tensor::of(dtype, &[3], &[-0.0, f64::NAN, f64::INFINITY]);
        for equal_nan in [false, true] {
            let equal = run(&[&a, &b], |g, v| g.array_equal(v[0], v[1], equal_nan));
            assert_eq!(equal.unwrap().bytes, [u8::from(equal_nan)], "{dtype}");
        }
    }
}

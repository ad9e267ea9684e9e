//! Reading and writing by index against loops, with every index dtype, and what happens outside.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;

use common::{Numbers, Tensor, decode, encode, flat, indices, run, run_rows};
use hotcell_graph::DType;
use hotcell_kernels::backend::DeviceError;
use proptest::prelude::*;

const INTEGERS: [DType; 8] = [
    DType::U8,
    DType::U16,
    DType::U32,
    DType::U64,
    DType::I8,
    DType::I16,
    DType::I32,
    DType::I64,
];

fn signed(dtype: DType) -> bool {
    matches!(dtype, DType::I8 | DType::I16 | DType::I32 | DType::I64)
}

/// Indices below `n`, negative ones among them where the dtype has some.
fn index_tensor(
    dtype: DType,
    dims: &[usize],
    bound: impl Fn(&[usize]) -> usize,
    seed: u64,
) -> (Tensor, Vec<usize>) {
    let mut numbers = Numbers::new(seed);
    let (mut values, mut places) = (vec![], vec![]);
    for index in indices(dims) {
        let n = bound(&index);
        let i = numbers.below(n);
        let negative = signed(dtype) && numbers.below(2) == 0;
        values.push(if negative {
            i as f64 - n as f64
        } else {
            i as f64
        });
        places.push(i);
    }
    (Tensor::of(dtype, dims, &values), places)
}

fn dims(rank: std::ops::RangeInclusive<usize>) -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(1..6usize, rank)
}

/// What an update does, in f64 and i128 for integers of 64 bits.
fn fold(dtype: DType, reduce: &str, a: &[u8], b: &[u8]) -> Vec<u8> {
    let wide = |v: &[u8]| match dtype {
        DType::U64 => i128::from(u64::from_ne_bytes(v.try_into().unwrap())),
        DType::I64 => i128::from(i64::from_ne_bytes(v.try_into().unwrap())),
        _ => decode(dtype, v) as i128,
    };
    let float = matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64);
    match reduce {
        "set" => b.to_vec(),
        _ if float => {
            let (x, y) = (decode(dtype, a), decode(dtype, b));
            let single = dtype == DType::F32;
            let v = match reduce {
                "add" if single => f64::from(x as f32 + y as f32),
                "mul" if single => f64::from(x as f32 * y as f32),
                "add" => x + y,
                "mul" => x * y,
                _ if x.is_nan() => return a.to_vec(),
                "max" if x > y => x,
                "min" if x < y => x,
                _ => y,
            };
            encode(dtype, v)
        }
        _ => {
            let (x, y) = (wide(a), wide(b));
            let v = match reduce {
                "add" => x.wrapping_add(y),
                "mul" => x.wrapping_mul(y),
                "max" => x.max(y),
                _ => x.min(y),
            };
            v.to_ne_bytes()[..dtype.block_bytes()].to_vec()
        }
    }
}

fn numbers(dtype: DType, dims: &[usize], seed: u64) -> Tensor {
    let mut numbers = Numbers::new(seed);
    let n = dims.iter().product();
    let values: Vec<f64> = (0..n).map(|_| numbers.below(33) as f64 - 16.0).collect();
    Tensor::of(dtype, dims, &values)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn take_reads_slices(
        shape in dims(1..=5), at in prop::collection::vec(0..6usize, 0..=3), dtype in prop::sample::select(DType::PLAIN.to_vec()),
        integers in prop::sample::select(INTEGERS.to_vec()), pick in any::<usize>(), seed in any::<u64>(),
    ) {
        let axis = pick % shape.len();
        let x = Tensor::random(dtype, &shape, seed);
        let (i, places) = index_tensor(integers, &at, |_| shape[axis], seed);
        let y = run(&[&x, &i], |g, v| g.take(v[0], v[1], axis as i64)).unwrap();
        let to = [&shape[..axis], &at, &shape[axis + 1..]].concat();
        prop_assert_eq!(&y.dims, &to);
        for (n, index) in indices(&to).iter().enumerate() {
            let (before, rest) = index.split_at(axis);
            let (middle, after) = rest.split_at(at.len());
            let from = [before, &[places[flat(&at, middle)]], after].concat();
            prop_assert_eq!(y.at(n), x.at(flat(&shape, &from)));
        }
    }

    #[test]
    fn take_along_axis_reads_elements(
        shape in dims(1..=6), count in 0..8usize, dtype in prop::sample::select(DType::PLAIN.to_vec()),
        integers in prop::sample::select(INTEGERS.to_vec()), pick in any::<usize>(), seed in any::<u64>(),
    ) {
        let axis = pick % shape.len();
        let x = Tensor::random(dtype, &shape, seed);
        let mut to = shape.clone();
        to[axis] = count;
        let (i, places) = index_tensor(integers, &to, |_| shape[axis], seed);
        let y = run(&[&x, &i], |g, v| g.take_along_axis(v[0], v[1], axis as i64)).unwrap();
        for (n, mut index) in indices(&to).into_iter().enumerate() {
            index[axis] = places[n];
            prop_assert_eq!(y.at(n), x.at(flat(&shape, &index)));
        }
    }

    #[test]
    fn gather_nd_and_scatter_nd_name_slices(
        shape in dims(1..=5), tuples in prop::collection::vec(1..5usize, 0..=2), dtype in prop::sample::select(DType::REAL.to_vec()),
        integers in prop::sample::select(INTEGERS.to_vec()), pick in any::<usize>(), shared in any::<usize>(), seed in any::<u64>(),
        reduce in prop::sample::select(vec!["set", "add", "mul", "max", "min"]),
    ) {
        let batch = shared % shape.len();
        let width = 1 + pick % (shape.len() - batch);
        let x = numbers(dtype, &shape, seed);
        let i_dims = [&shape[..batch], &tuples, &[width]].concat();
        prop_assume!(i_dims.len() <= 8 && i_dims.len() + shape.len() - width <= 9);
        let (i, places) = index_tensor(integers, &i_dims, |index| shape[batch + index[index.len() - 1]], seed);
        let y = run(&[&x, &i], |g, v| g.gather_nd(v[0], v[1], batch as i64)).unwrap();
        let rest = &shape[batch + width..];
        let to = [&i_dims[..i_dims.len() - 1], rest].concat();
        prop_assert_eq!(&y.dims, &to);
        let source = |index: &[usize], batch: usize| {
            let (tuple, inside) = index.split_at(i_dims.len() - 1);
            let named = (0..width).map(|w| places[flat(&i_dims, &[tuple, &[w]].concat())]);
            let mut from: Vec<usize> = index[..batch].to_vec();
            from.extend(named);
            from.extend(inside);
            flat(&shape, &from)
        };
        for (n, index) in indices(&to).iter().enumerate() {
            prop_assert_eq!(y.at(n), x.at(source(index, batch)));
        }
        if batch > 0 || (dtype == DType::Bool && matches!(reduce, "add" | "mul")) {
            return Ok(());
        }
        let updates = numbers(dtype, &to, seed ^ 3);
        let y = run(&[&x, &i, &updates], |g, v| g.scatter_nd(v[0], v[1], v[2], reduce)).unwrap();
        let mut expected = x.clone();
        for (n, index) in indices(&to).iter().enumerate() {
            let at = source(index, 0);
            let size = dtype.block_bytes();
            let new = fold(dtype, reduce, expected.at(at), updates.at(n));
            expected.bytes[at * size..][..size].copy_from_slice(&new);
        }
        prop_assert_eq!(y, expected);
    }

    #[test]
    fn scatter_along_axis_writes_in_order(
        shape in dims(1..=6), count in 0..9usize, dtype in prop::sample::select(DType::REAL.to_vec()),
        integers in prop::sample::select(INTEGERS.to_vec()), pick in any::<usize>(), seed in any::<u64>(),
        reduce in prop::sample::select(vec!["set", "add", "mul", "max", "min"]),
    ) {
        prop_assume!(dtype != DType::Bool || !matches!(reduce, "add" | "mul"));
        let axis = pick % shape.len();
        let mut random = Numbers::new(seed);
        // Smaller off the axis too.
        let mut i_dims: Vec<usize> = shape.iter().map(|n| n - random.below(2).min(n - 1)).collect();
        i_dims[axis] = count;
        let x = numbers(dtype, &shape, seed);
        let updates = numbers(dtype, &i_dims, seed ^ 3);
        let (i, places) = index_tensor(integers, &i_dims, |_| shape[axis], seed);
        let y = run(&[&x, &i, &updates], |g, v| g.scatter_along_axis(v[0], v[1], v[2], axis as i64, reduce)).unwrap();
        let mut expected = x.clone();
        for (n, mut index) in indices(&i_dims).into_iter().enumerate() {
            index[axis] = places[n];
            let at = flat(&shape, &index);
            let size = dtype.block_bytes();
            let new = fold(dtype, reduce, expected.at(at), updates.at(n));
            expected.bytes[at * size..][..size].copy_from_slice(&new);
        }
        prop_assert_eq!(y, expected);
    }
}

#[test]
fn many_duplicates_are_applied_in_order_by_all_threads() {
    let n = 60_000;
    let x = Tensor::of(DType::F32, &[97], &[0.25; 97]);
    let (i, places) = index_tensor(DType::I32, &[n], |_| 97, 1);
    let values: Vec<f64> = (0..n).map(|v| (v % 1013) as f64 * 0.37).collect();
    let updates = Tensor::of(DType::F32, &[n], &values);
    let wide = Tensor {
        dims: vec![n, 1],
        ..i.clone()
    };
    for reduce in ["set", "add", "max"] {
        let mut expected = x.clone();
        for (u, at) in places.iter().enumerate() {
            let new = fold(DType::F32, reduce, expected.at(*at), updates.at(u));
            expected.bytes[at * 4..][..4].copy_from_slice(&new);
        }
        let y = run(&[&x, &i, &updates], |g, v| {
            g.scatter_along_axis(v[0], v[1], v[2], 0, reduce)
        });
        assert_eq!(y.unwrap(), expected, "{reduce}");
        let y = run(&[&x, &wide, &updates], |g, v| {
            g.scatter_nd(v[0], v[1], v[2], reduce)
        });
        assert_eq!(y.unwrap(), expected, "{reduce}");
    }
}

#[test]
fn nan_stays_and_equal_updates_win() {
    let x = Tensor::of(DType::F32, &[3], &[f64::NAN, 0.0, 1.0]);
    let i = Tensor::of(DType::U8, &[3], &[0.0, 1.0, 2.0]);
    let updates = Tensor::of(DType::F32, &[3], &[5.0, -0.0, f64::NAN]);
    for reduce in ["max", "min"] {
        let y = run(&[&x, &i, &updates], |g, v| {
            g.scatter_along_axis(v[0], v[1], v[2], 0, reduce)
        })
        .unwrap();
        let y = y.values();
        assert!(
            y[0].is_nan() && y[1].is_sign_negative() && y[2].is_nan(),
            "{reduce}: {y:?}"
        );
    }
}

#[test]
fn an_index_outside_is_an_error_in_every_dtype() {
    let x = Tensor::random(DType::F32, &[5, 4], 1);
    let updates = Tensor::random(DType::F32, &[1, 4], 2);
    let slice = Tensor {
        dims: vec![4],
        ..updates.clone()
    };
    for dtype in INTEGERS {
        let mut bad = vec![5.0, 127.0];
        if signed(dtype) {
            bad.extend([-6.0, -128.0]);
        }
        match dtype {
            DType::I64 => bad.extend([-9e18, 9e18, 4294967296.0, -4294967296.0, f64::MIN]),
            DType::U64 => bad.extend([18446744073709551615.0, 4294967296.0, 9223372036854775808.0]),
            _ => {}
        }
        for bad in bad {
            let row = Tensor::of(dtype, &[1, 4], &[0.0, 1.0, bad, 2.0]);
            let one = Tensor::of(dtype, &[1], &[bad]);
            let results = [
                run(&[&x, &row], |g, v| g.take(v[0], v[1], 0)),
                run(&[&x, &row], |g, v| g.take_along_axis(v[0], v[1], 0)),
                run(&[&x, &one], |g, v| g.gather_nd(v[0], v[1], 0)),
                run(&[&x, &row, &updates], |g, v| {
                    g.scatter_along_axis(v[0], v[1], v[2], 0, "add")
                }),
                run(&[&x, &one, &slice], |g, v| {
                    g.scatter_nd(v[0], v[1], v[2], "set")
                }),
            ];
            for (op, result) in results.into_iter().enumerate() {
                assert!(
                    matches!(result, Err(DeviceError::IndexOutOfRange { bound: 5, .. })),
                    "{dtype} {bad}, op {op}: {result:?}"
                );
            }
        }
    }
    // Nothing to index, and nothing asked of it.
    let none = Tensor::random(DType::F32, &[0, 4], 1);
    let one = Tensor::of(DType::I32, &[1], &[0.0]);
    assert!(run(&[&none, &one], |g, v| g.take(v[0], v[1], 0)).is_err());
    let empty = Tensor::of(DType::I32, &[0], &[]);
    assert_eq!(
        run(&[&none, &empty], |g, v| g.take(v[0], v[1], 0))
            .unwrap()
            .dims,
        [0, 4]
    );
}

#[test]
fn one_plan_indexes_any_number_of_rows() {
    const MAX: usize = 30;
    let x = Tensor::random(DType::F16, &[MAX, 6], 1);
    let table = Tensor::random(DType::F16, &[11, 3], 2);
    let (i, _) = index_tensor(DType::I64, &[MAX], |_| 11, 3);
    let (columns, _) = index_tensor(DType::U8, &[2], |_| 6, 4);
    let (along, _) = index_tensor(DType::I16, &[MAX, 3], |_| 6, 5);
    let build = |g: &mut hotcell_graph::GraphBuilder, v: &[hotcell_graph::Value]| {
        let zero = g.take(v[0], v[3], 1)?;
        let updates = g.take_along_axis(v[0], v[4], 1)?;
        Ok(vec![
            g.take(v[1], v[2], 0)?,
            zero,
            updates,
            g.scatter_along_axis(v[0], v[4], updates, 1, "add")?,
            g.take(v[0], v[3], 0)?,
        ])
    };
    let symbolic = [
        (&x, true),
        (&table, false),
        (&i, true),
        (&columns, false),
        (&along, true),
    ];
    let results = run_rows(&symbolic, MAX, &[7, 30], build).unwrap();
    for (&n, results) in [7, 30].iter().zip(&results) {
        let (x, i, along) = (x.prefix(n), i.prefix(n), along.prefix(n));
        let fixed = [
            (&x, false),
            (&table, false),
            (&i, false),
            (&columns, false),
            (&along, false),
        ];
        let alone = run_rows(&fixed, 1, &[1], build).unwrap();
        assert_eq!(alone[0], *results, "{n} rows");
    }
    // The row axis of the execution is the bound, not the plan's.
    let last = Tensor::of(DType::I32, &[1], &[6.0]);
    let take = |rows: usize| {
        run_rows(&[(&x, true), (&last, false)], MAX, &[rows], |g, v| {
            Ok(vec![g.take(v[0], v[1], 0)?])
        })
    };
    assert_eq!(take(7).unwrap()[0][0].bytes, x.bytes[6 * 12..7 * 12]);
    assert!(matches!(
        take(6),
        Err(DeviceError::IndexOutOfRange {
            index: 6,
            bound: 6,
            ..
        })
    ));
}

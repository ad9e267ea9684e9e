//! Sorting against the standard library's stable sort, and random bits against MLX's.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;

use std::cmp::Ordering;

use common::{Numbers, Tensor, decode, flat, indices, run, run_rows};
use hotcell_graph::{DType, Shape};
use proptest::prelude::*;

/// NaN after everything, zeros equal.
fn order(dtype: DType, a: &[u8], b: &[u8]) -> Ordering {
    match dtype {
        DType::U64 => u64::from_ne_bytes(a.try_into().unwrap())
            .cmp(&u64::from_ne_bytes(b.try_into().unwrap())),
        DType::I64 => i64::from_ne_bytes(a.try_into().unwrap())
            .cmp(&i64::from_ne_bytes(b.try_into().unwrap())),
        _ => {
            let (a, b) = (decode(dtype, a), decode(dtype, b));
            match (a.is_nan(), b.is_nan()) {
                (true, true) => Ordering::Equal,
                (true, false) => Ordering::Greater,
                (false, true) => Ordering::Less,
                _ => a.partial_cmp(&b).unwrap(),
            }
        }
    }
}

/// The places of a line in order.
fn sorted(x: &Tensor, line: &[usize], descending: bool) -> Vec<usize> {
    let mut places: Vec<usize> = (0..line.len()).collect();
    places.sort_by(|a, b| {
        let o = order(x.dtype, x.at(line[*a]), x.at(line[*b]));
        if descending { o.reverse() } else { o }
    });
    places
}

fn lines(dims: &[usize], axis: usize) -> Vec<(Vec<usize>, Vec<usize>)> {
    let mut first = dims.to_vec();
    first[axis] = 1;
    let along = |index: Vec<usize>| {
        let at = |i: usize| {
            let mut index = index.clone();
            index[axis] = i;
            flat(dims, &index)
        };
        ((0..dims[axis]).map(at).collect(), index.clone())
    };
    indices(&first).into_iter().map(along).collect()
}

/// Few different values, with zeros of both signs, infinities and NaN among floats.
fn tensor(dtype: DType, dims: &[usize], seed: u64) -> Tensor {
    let mut numbers = Numbers::new(seed);
    if seed.is_multiple_of(3) {
        return Tensor::random(dtype, dims, seed);
    }
    let values: Vec<f64> = (0..dims.iter().product())
        .map(|_| match numbers.below(20) {
            0 => f64::NAN,
            1 => -0.0,
            2 => f64::INFINITY,
            3 => f64::NEG_INFINITY,
            n => n as f64 - 12.0,
        })
        .collect();
    Tensor::of(dtype, dims, &values)
}

fn shapes() -> impl Strategy<Value = Vec<usize>> {
    prop_oneof![
        4 => prop::collection::vec(0..7usize, 1..=4usize),
        1 => prop::collection::vec(1..3usize, 8),
        1 => (1..4usize, 1..3000usize).prop_map(|(a, b)| vec![a, b]),
        1 => (1..300usize, 1..20usize).prop_map(|(a, b)| vec![a, b]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn sorts_are_stable(
        dims in shapes(), dtype in prop::sample::select(DType::REAL.to_vec()), pick in any::<usize>(),
        seed in any::<u64>(), descending in any::<bool>(), k in any::<usize>(),
    ) {
        let axis = pick % dims.len();
        let x = tensor(dtype, &dims, seed);
        let values = run(&[&x], |g, v| g.sort(v[0], axis as i64, descending)).unwrap();
        let places = run(&[&x], |g, v| g.argsort(v[0], axis as i64 - dims.len() as i64, descending)).unwrap();
        let k = k % (dims[axis] + 1);
        let top = run_rows(&[(&x, false)], 1, &[1], |g, v| {
            let (a, b) = g.topk(v[0], k as i64, axis as i64, descending)?;
            Ok(vec![a, b])
        }).unwrap().remove(0);
        let mut top_dims = dims.clone();
        top_dims[axis] = k;
        prop_assert_eq!(&top[0].dims, &top_dims);
        for (line, mut index) in lines(&dims, axis) {
            let expected = sorted(&x, &line, descending);
            for (i, place) in expected.iter().enumerate() {
                prop_assert_eq!(values.at(line[i]), x.at(line[*place]));
                prop_assert_eq!(decode(DType::U32, places.at(line[i])) as usize, *place);
                if i < k {
                    index[axis] = i;
                    let to = flat(&top_dims, &index);
                    prop_assert_eq!(top[0].at(to), x.at(line[*place]));
                    prop_assert_eq!(decode(DType::U32, top[1].at(to)) as usize, *place);
                }
            }
        }
    }
}

#[test]
fn rows_sort_alone_and_as_an_axis() {
    let x = tensor(DType::F32, &[50, 13], 7);
    let rows = [0, 1, 9, 50];
    let results = run_rows(&[(&x, true)], 50, &rows, |g, v| {
        Ok(vec![g.argsort(v[0], 1, true)?, g.argsort(v[0], 0, false)?])
    })
    .unwrap();
    for (&n, results) in rows.iter().zip(&results) {
        let x = x.prefix(n);
        for (axis, descending) in [(1, true), (0, false)] {
            let y = &results[1 - axis];
            for (line, _) in lines(&[n, 13], axis) {
                let expected = sorted(&x, &line, descending);
                let got = line.iter().map(|i| decode(DType::U32, y.at(*i)) as usize);
                assert_eq!(got.collect::<Vec<_>>(), expected, "{n} rows, axis {axis}");
            }
        }
    }
}

/// Bits that MLX 0.32.4 gives.
#[test]
fn random_bits_are_mlxs() {
    let golden: [([u32; 2], &[u32]); 8] = [
        ([0, 0], &[1797259609]),
        ([0, 0], &[928981903, 3453687069]),
        ([0, 0], &[4146024105, 1351547692, 2718843009]),
        ([0, 42], &[2465931498, 3679230171, 255383827, 267815257]),
        (
            [0, 42],
            &[3134548294, 3733159049, 843694964, 894150801, 801545058],
        ),
        (
            [1, 5],
            &[
                1631610008, 1875303280, 2061022651, 2722447729, 2932845838, 1546672451, 1639154468,
                1157331308,
            ],
        ),
        (
            [3735928559, 305419896],
            &[
                1963549165, 3887377309, 3071379999, 2920177442, 3543199380, 3240993658, 1116219210,
                1236580239,
            ],
        ),
        (
            [3735928559, 305419896],
            &[
                1766688739, 404415361, 3628066427, 2230012164, 2027967002, 3194717748, 3624432433,
                3984639207, 2261444716, 3807170591, 2974008877,
            ],
        ),
    ];
    for (key, bits) in golden {
        let key = Tensor::of(DType::U32, &[2], &[key[0].into(), key[1].into()]);
        let shape = Shape::fixed(&[bits.len()]).unwrap();
        let y = run(&[&key], |g, v| g.random_bits(v[0], shape.clone())).unwrap();
        let expected: Vec<f64> = bits.iter().map(|b| (*b).into()).collect();
        assert_eq!(y.values(), expected);
    }
}

/// The recipe of the op's reference, word by word.
#[test]
fn many_random_bits_follow_the_recipe() {
    fn hash(k: [u32; 2], c: [u32; 2]) -> [u32; 2] {
        let ks = [k[0], k[1], k[0] ^ k[1] ^ 0x1BD1_1BDA];
        let (mut a, mut b) = (c[0].wrapping_add(ks[0]), c[1].wrapping_add(ks[1]));
        for i in 0..5u32 {
            let rotations = if i % 2 == 0 {
                [13, 15, 26, 6]
            } else {
                [17, 29, 16, 24]
            };
            for r in rotations {
                a = a.wrapping_add(b);
                b = b.rotate_left(r);
                b ^= a;
            }
            a = a.wrapping_add(ks[(i as usize + 1) % 3]);
            b = b.wrapping_add(ks[(i as usize + 2) % 3]).wrapping_add(i + 1);
        }
        [a, b]
    }
    for n in [0usize, 1, 2, 63, 64, 4095, 10_000, 10_001] {
        let key = Tensor::of(DType::U32, &[2], &[7.0, 9.0]);
        let y = run(&[&key], |g, v| g.random_bits(v[0], Shape::fixed(&[n])?)).unwrap();
        let (half, odd) = (n / 2, n % 2);
        let mut expected = vec![0u32; n];
        for i in 0..half {
            let words = hash([7, 9], [i as u32, (half + odd + i) as u32]);
            (expected[i], expected[half + odd + i]) = (words[0], words[1]);
        }
        if odd == 1 {
            expected[half] = hash([7, 9], [half as u32, 0])[0];
        }
        let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
        assert_eq!(y.values(), expected, "{n}");
    }
}

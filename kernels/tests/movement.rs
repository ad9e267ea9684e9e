//! Ops that move elements, against loops over indices, to the byte.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;

use common::{Numbers, Tensor, flat, indices, run, run_rows};
use hotcell_graph::{DType, Dim, Shape, op::find};
use proptest::prelude::*;

/// Builds a tensor by asking where each element comes from (`None`: zero).
fn moved(x: &Tensor, dims: &[usize], from: impl Fn(&[usize]) -> Option<Vec<usize>>) -> Tensor {
    let zero = vec![0; x.dtype.block_bytes()];
    let bytes = indices(dims).into_iter().flat_map(|i| match from(&i) {
        Some(i) => x.at(flat(&x.dims, &i)).to_vec(),
        None => zero.clone(),
    });
    Tensor {
        dtype: x.dtype,
        dims: dims.to_vec(),
        bytes: bytes.collect(),
    }
}

/// Shapes of any rank with few elements, and some whose tiles and threads matter.
fn shapes() -> impl Strategy<Value = Vec<usize>> {
    prop_oneof![
        6 => prop::collection::vec(0..5usize, 0..=8usize).prop_map(|mut d| {
            while d.iter().product::<usize>() > 4000 {
                let largest = d.iter().position(|n| n == d.iter().max().unwrap()).unwrap();
                d[largest] -= 1;
            }
            d
        }),
        1 => (60..150usize, 60..150usize).prop_map(|(a, b)| vec![a, b]),
        1 => (1..4usize, 40..90usize, 30..70usize, 1..4usize).prop_map(|(a, b, c, d)| vec![a, b, c, d]),
    ]
}

fn dtype() -> impl Strategy<Value = DType> {
    prop::sample::select(DType::PLAIN.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn transpose_permutes(dims in shapes(), dtype in dtype(), seed in any::<u64>()) {
        let x = Tensor::random(dtype, &dims, seed);
        let mut order: Vec<usize> = (0..dims.len()).collect();
        let mut numbers = Numbers::new(seed);
        for i in (1..order.len()).rev() {
            order.swap(i, numbers.below(i + 1));
        }
        let axes: Vec<i64> = order.iter().map(|a| *a as i64).collect();
        let to: Vec<usize> = order.iter().map(|a| dims[*a]).collect();
        let y = run(&[&x], |g, v| g.transpose(v[0], &axes)).unwrap();
        let expected = moved(&x, &to, |i| {
            let mut from = vec![0; i.len()];
            order.iter().zip(i).for_each(|(a, i)| from[*a] = *i);
            Some(from)
        });
        prop_assert_eq!(y, expected);
    }

    #[test]
    fn broadcast_to_repeats(dims in shapes(), dtype in dtype(), seed in any::<u64>()) {
        let mut numbers = Numbers::new(seed);
        let before = numbers.below(dims.len() + 1);
        let small: Vec<usize> = dims[before..]
            .iter()
            .map(|d| if numbers.below(2) == 0 { 1 } else { *d })
            .collect();
        let x = Tensor::random(dtype, &small, seed);
        let shape = Shape::fixed(&dims).unwrap();
        let y = run(&[&x], |g, v| g.broadcast_to(v[0], shape.clone())).unwrap();
        let expected = moved(&x, &dims, |i| {
            Some(i[before..].iter().zip(&small).map(|(i, n)| if *n == 1 { 0 } else { *i }).collect())
        });
        prop_assert_eq!(y, expected);
    }

    #[test]
    fn slice_follows_python(dims in shapes(), dtype in dtype(), seed in any::<u64>()) {
        let x = Tensor::random(dtype, &dims, seed);
        let mut numbers = Numbers::new(seed);
        let mut bound = |n: usize| match numbers.below(8) {
            0 => i64::MIN,
            1 => i64::MAX,
            _ => numbers.below(3 * n + 4) as i64 - n as i64 - 2,
        };
        let starts: Vec<i64> = dims.iter().map(|n| bound(*n)).collect();
        let stops: Vec<i64> = dims.iter().map(|n| bound(*n)).collect();
        let steps: Vec<i64> = dims.iter().map(|_| *[1, 1, 2, 3, -1, -1, -2, i64::MAX, i64::MIN].get(numbers.below(9)).unwrap()).collect();
        // By walking, as a person would.
        let picked: Vec<Vec<usize>> = (0..dims.len()).map(|a| {
            let n = dims[a] as i128;
            let (start, stop, step) = (i128::from(starts[a]), i128::from(stops[a]), i128::from(steps[a]));
            let wrap = |v: i128| if v < 0 { v + n } else { v };
            let (mut at, stop) = (wrap(start), wrap(stop));
            let mut picked = vec![];
            if step > 0 {
                at = at.max(0);
                while at < stop.min(n) { picked.push(at as usize); at += step; }
            } else {
                at = at.min(n - 1);
                while at > stop.max(-1) { picked.push(at as usize); at += step; }
            }
            picked
        }).collect();
        let to: Vec<usize> = picked.iter().map(Vec::len).collect();
        let y = run(&[&x], |g, v| g.slice(v[0], &starts, &stops, &steps)).unwrap();
        let expected = moved(&x, &to, |i| Some(i.iter().zip(&picked).map(|(i, p)| p[*i]).collect()));
        prop_assert_eq!(y, expected);
    }

    #[test]
    fn pad_follows_numpy(dims in shapes(), dtype in dtype(), seed in any::<u64>(), mode in 0..4usize, given in any::<bool>()) {
        let name = ["constant", "edge", "reflect", "wrap"][mode];
        let mut numbers = Numbers::new(seed);
        let mut amount = |n: usize| match numbers.below(3) {
            0 => 0,
            _ if mode > 0 && n == 0 => 0,
            _ => numbers.below(if dims.len() > 4 { 2 } else { 6 }),
        };
        let low: Vec<usize> = dims.iter().map(|n| amount(*n)).collect();
        let high: Vec<usize> = dims.iter().map(|n| amount(*n)).collect();
        let to: Vec<usize> = (0..dims.len()).map(|a| dims[a] + low[a] + high[a]).collect();
        prop_assume!(to.iter().product::<usize>() < 60_000);
        let x = Tensor::random(dtype, &dims, seed);
        let value = Tensor::random(dtype, &[], seed ^ 1);
        let longs = |v: &[usize]| v.iter().map(|n| *n as i64).collect::<Vec<_>>();
        let given = given && mode == 0;
        let inputs = if given { vec![&x, &value] } else { vec![&x] };
        let y = run(&inputs, |g, v| g.pad(v[0], v.get(1).copied(), &longs(&low), &longs(&high), name)).unwrap();
        let mut expected = moved(&x, &to, |i| {
            let mut from = vec![0; i.len()];
            for a in 0..i.len() {
                let n = dims[a] as i64;
                let mut p = i[a] as i64 - low[a] as i64;
                match mode {
                    0 if p < 0 || p >= n => return None,
                    1 => p = p.clamp(0, n - 1),
                    // Off the ends, again and again.
                    2 => while n > 1 && (p < 0 || p >= n) { p = if p < 0 { -p } else { 2 * (n - 1) - p } },
                    3 => while p < 0 || p >= n { p += if p < 0 { n } else { -n } },
                    _ => {}
                }
                from[a] = if n == 1 { 0 } else { p as usize };
            }
            Some(from)
        });
        if given {
            for (i, index) in indices(&to).iter().enumerate() {
                let outside = (0..to.len()).any(|a| index[a] < low[a] || index[a] >= low[a] + dims[a]);
                if outside {
                    let n = dtype.block_bytes();
                    expected.bytes[i * n..][..n].copy_from_slice(&value.bytes);
                }
            }
        }
        prop_assert_eq!(y, expected);
    }

    #[test]
    fn concat_joins(dims in shapes(), dtype in dtype(), seed in any::<u64>(), count in 1..5usize) {
        prop_assume!(!dims.is_empty());
        let mut numbers = Numbers::new(seed);
        let axis = numbers.below(dims.len());
        let tensors: Vec<Tensor> = (0..count).map(|i| {
            let mut dims = dims.clone();
            if i > 0 { dims[axis] = numbers.below(6); }
            Tensor::random(dtype, &dims, seed ^ i as u64)
        }).collect();
        let mut to = dims.clone();
        to[axis] = tensors.iter().map(|t| t.dims[axis]).sum();
        let inputs: Vec<&Tensor> = tensors.iter().collect();
        let y = run(&inputs, |g, v| g.concat(v, axis as i64 - dims.len() as i64)).unwrap();
        let bytes = indices(&to).into_iter().flat_map(|mut i| {
            let t = tensors.iter().find(|t| {
                let inside = i[axis] < t.dims[axis];
                if !inside { i[axis] -= t.dims[axis]; }
                inside
            }).unwrap();
            t.at(flat(&t.dims, &i)).to_vec()
        });
        prop_assert_eq!(y.bytes, bytes.collect::<Vec<u8>>());
        prop_assert_eq!(y.dims, to);
    }
}

#[test]
fn one_plan_moves_any_number_of_rows() {
    const MAX: usize = 40;
    let x = Tensor::random(DType::F32, &[MAX, 5, 7], 1);
    let rows = [0, 1, 2, 17, 40];
    let results = run_rows(&[(&x, true)], MAX, &rows, |g, v| {
        let seven = Dim::Fixed(7);
        let wide = Shape::new([Dim::Rows, Dim::Fixed(3), Dim::Fixed(5), seven])?;
        let flat = g.reshape(
            v[0],
            Shape::new([Dim::Rows, Dim::Fixed(1), Dim::Fixed(5), seven])?,
        )?;
        Ok(vec![
            g.transpose(v[0], &[0, 2, 1])?,
            g.slice(v[0], &[0, -1, 6], &[i64::MAX, i64::MIN, 0], &[1, -2, -3])?,
            g.pad(v[0], None, &[0, 1, 2], &[0, 0, 3], "reflect")?,
            g.pad(v[0], None, &[0, 0, 2], &[0, 1, 0], "constant")?,
            g.broadcast_to(flat, wide)?,
            g.concat(&[v[0], v[0]], 2)?,
        ])
    })
    .unwrap();
    for (&n, results) in rows.iter().zip(&results) {
        let x = x.prefix(n);
        let expected = [
            moved(&x, &[n, 7, 5], |i| Some(vec![i[0], i[2], i[1]])),
            moved(&x, &[n, 3, 2], |i| {
                Some(vec![i[0], 4 - 2 * i[1], 6 - 3 * i[2]])
            }),
            moved(&x, &[n, 6, 12], |i| {
                let column = [2, 1, 0, 1, 2, 3, 4, 5, 6, 5, 4, 3][i[2]];
                Some(vec![i[0], [1, 0, 1, 2, 3, 4][i[1]], column])
            }),
            moved(&x, &[n, 6, 9], |i| {
                (i[1] < 5 && i[2] >= 2).then(|| vec![i[0], i[1], i[2] - 2])
            }),
            moved(&x, &[n, 3, 5, 7], |i| Some(vec![i[0], i[2], i[3]])),
            moved(&x, &[n, 5, 14], |i| Some(vec![i[0], i[1], i[2] % 7])),
        ];
        for (y, expected) in results.iter().zip(expected) {
            assert_eq!(*y, expected, "{n} rows");
        }
    }
}

#[test]
fn large_tensors_move_whole_on_several_threads() {
    let x = Tensor::random(DType::F32, &[301, 517], 3);
    let y = run(&[&x], |g, v| g.transpose(v[0], &[])).unwrap();
    assert_eq!(y, moved(&x, &[517, 301], |i| Some(vec![i[1], i[0]])));
    let y = run(&[&x], |g, v| {
        g.slice(v[0], &[300, 516], &[i64::MIN; 2], &[-1, -1])
    })
    .unwrap();
    assert_eq!(
        y,
        moved(&x, &[301, 517], |i| Some(vec![300 - i[0], 516 - i[1]]))
    );
    let row = Tensor::random(DType::F32, &[1, 517], 4);
    let shape = Shape::fixed(&[301, 517]).unwrap();
    let y = run(&[&row], |g, v| g.broadcast_to(v[0], shape.clone())).unwrap();
    assert_eq!(y, moved(&row, &[301, 517], |i| Some(vec![0, i[1]])));
}

#[test]
fn literals_and_ranges_hold_what_was_asked_for() {
    let bytes: Vec<u8> = [1.5f32, -2.0, 3.25]
        .iter()
        .flat_map(|v| v.to_le_bytes())
        .collect();
    let y = run(&[], |g, _| {
        g.literal(DType::F32, Shape::fixed(&[3]).unwrap(), &bytes)
    })
    .unwrap();
    assert_eq!(y.values(), [1.5, -2.0, 3.25]);
    assert!(find("literal").is_some());
    // By hand: -1.5 + i * 0.75, truncated or saturated to the integer, rounded to the float.
    let range = |dtype, n| {
        let y = run(&[], |g, _| g.arange(-1.5, 0.75, n, dtype)).unwrap();
        y.values()
    };
    assert_eq!(range(DType::F32, 4), [-1.5, -0.75, 0.0, 0.75]);
    assert_eq!(range(DType::I8, 6), [-1.0, 0.0, 0.0, 0.0, 1.0, 2.0]);
    assert_eq!(range(DType::U16, 6), [0.0, 0.0, 0.0, 0.0, 1.0, 2.0]);
    assert!(range(DType::F64, 0).is_empty());
    let y = run(&[], |g, _| g.arange(0.0, 1.0, 10_000, DType::BF16)).unwrap();
    for (i, v) in y.values().into_iter().enumerate() {
        assert_eq!(v, half::bf16::from_f64(i as f64).to_f64());
    }
    // All bits count: in f64 this is a little more than 144.5, which would be rounded to an even 144.
    let almost: f64 = -3.7 + 114.0 * 1.3;
    assert!(almost > 144.5 && almost - 144.5 < 1e-12);
    let y = run(&[], |g, _| g.arange(-3.7, 1.3, 115, DType::BF16)).unwrap();
    assert_eq!(y.values()[114], 145.0);
    let y = run(&[], |g, _| g.arange(250.0, 1.0, 10, DType::U8)).unwrap();
    assert_eq!(y.values()[5..], [255.0; 5]);
}

#[test]
fn large_matrices_are_transposed_in_any_dtype() {
    // Whole squares, and edges on both sides.
    for &dtype in DType::PLAIN {
        for dims in [[128, 64], [131, 70], [5, 300], [260, 17]] {
            let x = Tensor::random(dtype, &dims, 7);
            let y = run(&[&x], |g, v| g.transpose(v[0], &[1, 0])).unwrap();
            for i in 0..dims[0] {
                for j in 0..dims[1] {
                    assert_eq!(y.at(j * dims[0] + i), x.at(i * dims[1] + j));
                }
            }
        }
    }
}

//! Kernels of the catalogue's generic ops, whose results are those of the CPU backend: here that they stay within their memory.
//!
//! All dtypes and shapes are compared by `tests/tests/cuda/bits.rs`.

use hotcell_graph::{DType, GraphBuilder, GraphError, Value};

use super::{
    common::{Numbers, Tensor, run, run_rows},
    shim::{Arg, NULL, Shim, reported},
};

/// The kernels' numbers of f32 and i32.
const F32: i32 = 11;
const I32: i32 = 7;

fn numbers(dims: &[usize], seed: u64) -> (Tensor, Vec<f32>) {
    let mut random = Numbers::new(seed);
    let n = dims.iter().product();
    let values: Vec<f64> = (0..n)
        .map(|_| random.below(4000) as f64 / 500.0 - 4.0)
        .collect();
    let narrow = values.iter().map(|v| *v as f32).collect();
    (Tensor::of(DType::F32, dims, &values), narrow)
}

fn bits(bytes: &[u8]) -> Vec<u32> {
    let (words, _) = bytes.as_chunks::<4>();
    words.iter().map(|b| u32::from_le_bytes(*b)).collect()
}

fn same(ours: &[f32], theirs: &Tensor, what: &str) {
    let ours: Vec<u32> = ours.iter().map(|v| v.to_bits()).collect();
    assert_eq!(ours, bits(&theirs.bytes), "{what}");
}

/// `Reduction` of `generic_reduce.cu`: a sum of f32 over rows of one matrix, or of each of `outer` ones.
fn sum(outer: u64, n: u64, k: u64, [chunk, phases]: [u64; 2]) -> (Vec<u64>, u64) {
    let chunks = n.div_ceil(chunk);
    let mut words = vec![
        0, F32 as u64, F32 as u64, outer, n, k, chunk, chunks, phases,
    ];
    words.extend([u64::from(chunks == 1), 1, outer, 1, 1, 1, 1, 1, 1, 1]);
    words.extend([0; 8]);
    words.extend([outer, 1]);
    (words, chunks)
}

#[test]
fn sums_of_rows_and_columns() {
    let Some(shim) = Shim::get() else { return };
    let cases = [
        (3, 5000, 1, [4096, 64]),
        (2, 15, 1, [4096, 64]),
        (1, 700, 3, [256 * 22, 22]),
        (2, 600, 70, [256, 1]),
    ];
    for (outer, n, k, order) in cases {
        let (x, values) = numbers(&[outer, n, k], 3);
        let expected = run(&[&x], |g, v| g.reduce_sum(v[0], &[1], false)).unwrap();
        let (words, chunks) = sum(outer as u64, n as u64, k as u64, order);
        let reduction = Arg::words(&words);
        let mut out = vec![0f32; outer * k];
        let mut parts = vec![0f64; outer * chunks as usize * k];
        let kernel = match k {
            1 => "reduce_rows_single",
            _ => "reduce_columns_single",
        };
        let to: Arg = match chunks {
            1 => (&mut out).into(),
            _ => (&mut parts).into(),
        };
        shim.launch(kernel, [2, 1, 1], 256, &[to, (&values).into(), reduction])
            .unwrap();
        if chunks > 1 {
            let args = [(&mut out).into(), (&parts).into(), reduction];
            shim.launch("reduce_join_single", [2, 1, 1], 256, &args)
                .unwrap();
        }
        same(&out, &expected, &format!("{outer} of [{n}, {k}]"));
    }
    let (x, values) = numbers(&[3, 50, 7], 4);
    let expected = run(&[&x], |g, v| g.argmin(v[0], 1, false)).unwrap();
    let mut places = vec![9u32; 21];
    let sizes = [3i64, 50, 7].map(Arg::from);
    let args = [
        Arg::from(F32),
        Arg::from(-1),
        (&mut places).into(),
        (&values).into(),
    ];
    let args = [&args[..], &sizes].concat();
    shim.launch("arg_extreme", [1, 1, 1], 256, &args).unwrap();
    assert_eq!(places, bits(&expected.bytes));
}

#[test]
fn lines_in_order() {
    let Some(shim) = Shim::get() else { return };
    for (kernel, n, count) in [
        ("sort_lines", 37, 37),
        ("sort_lines", 2048, 5),
        ("first_of_lines", 3000, 4),
    ] {
        let (x, values) = numbers(&[2, n, 1], 5);
        let both = |g: &mut GraphBuilder, v: &[Value]| -> Result<Vec<Value>, GraphError> {
            let (values, places) = g.topk(v[0], count as i64, 1, true)?;
            Ok(vec![values, places])
        };
        let expected = run_rows(&[(&x, false)], 1, &[1], both).unwrap().remove(0);
        let (mut sorted, mut places) = (vec![0f32; 2 * count], vec![0u32; 2 * count]);
        let words = [F32 as u64, 4, 2, n as u64, 1, count as u64, u64::MAX];
        let args = [
            (&mut sorted).into(),
            (&mut places).into(),
            (&values).into(),
            Arg::words(&words),
        ];
        shim.launch(kernel, [1, 1, 1], 256, &args).unwrap();
        same(&sorted, &expected[0], kernel);
        assert_eq!(places, bits(&expected[1].bytes), "{kernel}");
    }
}

#[test]
fn reading_and_writing_by_index() {
    let Some(shim) = Shim::get() else { return };
    let (x, values) = numbers(&[2, 5, 3], 6);
    let wanted = vec![4, -5, 0, 2];
    let index: Vec<f64> = wanted.iter().map(|i| f64::from(*i)).collect();
    let ids = Tensor::of(DType::I32, &[4], &index);
    let expected = run(&[&x, &ids], |g, v| g.take(v[0], v[1], 1)).unwrap();
    let mut out = vec![7f32; 24];
    let mut bad = vec![0u64; 2];
    let take = |out: &mut Vec<f32>, wanted: &Vec<i32>, bad: &mut Vec<u64>| {
        let sizes = [2i64, 5, 3, wanted.len() as i64].map(Arg::from);
        let args = [
            Arg::from(4),
            Arg::from(I32),
            out.into(),
            (&values).into(),
            wanted.into(),
        ];
        let args = [&args[..], &sizes, &[bad.into()]].concat();
        shim.launch("take", [1, 1, 1], 256, &args).unwrap();
    };
    take(&mut out, &wanted, &mut bad);
    same(&out, &expected, "take");
    assert_eq!(reported(&bad), None);
    let mut out = vec![7f32; 6];
    take(&mut out, &vec![5], &mut bad);
    assert_eq!((reported(&bad), out), (Some((5, 5)), vec![0.0; 6]));

    // Updates of lines of four along the middle axis, two of which meet.
    let (updates, given) = numbers(&[2, 4, 3], 7);
    let places: Vec<i32> = (0..24).map(|i| [4, 1, 4, -3][i / 3 % 4]).collect();
    let index: Vec<f64> = places.iter().map(|i| f64::from(*i)).collect();
    let ids = Tensor::of(DType::I32, &[2, 4, 3], &index);
    let expected = run(&[&x, &ids, &updates], |g, v| {
        g.scatter_along_axis(v[0], v[1], v[2], 1, "add")
    });
    let mut out = values.clone();
    let mut words = vec![1, F32 as u64, 4, 6, 4, 3, 5, 3, 3, 2, 1, 3, 1, 1, 1, 1, 1];
    words.extend([12, 3, 1, 0, 0, 0, 0, 0, 15, 3, 1, 0, 0, 0, 0, 0]);
    let mut bad = vec![0u64; 2];
    let args = [
        (&mut out).into(),
        (&given).into(),
        (&places).into(),
        Arg::from(I32),
        Arg::words(&words),
        (&mut bad).into(),
    ];
    shim.launch("scatter_along_axis", [1, 1, 1], 256, &args)
        .unwrap();
    same(&out, &expected.unwrap(), "scatter_along_axis");
    assert_eq!(reported(&bad), None);
}

#[test]
fn products_of_activations() {
    let Some(shim) = Shim::get() else { return };
    let ((a, left), (b, right)) = (numbers(&[2, 33, 40], 8), numbers(&[2, 40, 67], 9));
    let expected = run(&[&a, &b], |g, v| g.matmul(v[0], v[1])).unwrap();
    let mut out = vec![7f32; 2 * 33 * 67];
    let mut words = vec![33, 67, 40, 2, 1, 2];
    words.extend([1; 7]);
    words.extend([1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    let args = [
        (&left).into(),
        (&right).into(),
        (&mut out).into(),
        Arg::words(&words),
    ];
    shim.launch("matmul_f32", [3, 1, 1], 256, &args).unwrap();
    same(&out, &expected, "matmul");
}

#[test]
fn functions_of_all_kinds_of_numbers() {
    let Some(shim) = Shim::get() else { return };
    // Any bits: what a function makes of them has bits of its own, and no number is outside of its tables.
    let n = 5000;
    let mut random = Numbers::new(10);
    let mut any = || -> Vec<f32> {
        (0..n)
            .map(|_| f32::from_bits(random.next() as u32))
            .collect()
    };
    let (a, b) = (any(), any());
    let mut words = vec![n as u64, 1, n as u64];
    words.extend([1; 7]);
    for _ in 0..4 {
        words.extend([1, 0, 0, 0, 0, 0, 0, 0]);
    }
    for op in 0..24 {
        let mut out = vec![7f32; n];
        let args = [
            Arg::from(op),
            (&mut out).into(),
            (&a).into(),
            (&b).into(),
            Arg::words(&words),
        ];
        shim.launch("function_f32", [4, 1, 1], 256, &args).unwrap();
        assert!(out.iter().any(|v| *v != 7.0));
    }
    let mut out = vec![7f32; 12];
    let mut words = vec![4, 2, 12, 1, 12];
    words.extend([1; 7]);
    words.extend([3, 1, 1, 1, 1, 1, 1, 1, 5, 0, 0, 0, 0, 0, 0, 0]);
    let args = [(&mut out).into(), (&a).into(), NULL, Arg::words(&words)];
    shim.launch("pad", [1, 1, 1], 256, &args).unwrap();
    // A mirror at both ends of three.
    let shown = [1, 0, 1, 2, 1, 0, 1, 2, 1, 0, 1, 2].map(|i: usize| a[i].to_bits());
    assert_eq!(out.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), shown);
}

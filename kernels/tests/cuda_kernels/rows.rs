//! Tables, quantised activations and norms.

use hotcell_graph::DType;
use hotcell_kernels::cpu::{
    dequant::dequantize_row,
    path::CpuPath,
    quantize::{Activation, prepare_row, scratch_bytes},
};

use super::{
    common::{Numbers, Tensor, run},
    products::{Prepared, TYPES},
    shim::{Arg, Shim, reported},
};

/// Any bits of a table, whose scales may be anything, NaN too.
fn table(dtype: DType, n: usize, k: usize, seed: u64) -> Vec<u8> {
    Numbers::new(seed).bytes(n * dtype.row_bytes(k).unwrap())
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

#[test]
fn rows_of_tables_have_the_bits_of_the_cpus() {
    let Some(shim) = Shim::get() else { return };
    let plain = [
        (DType::F32, "f32"),
        (DType::F16, "f16"),
        (DType::BF16, "bf16"),
        (DType::F8E4M3, "f8_e4m3"),
    ];
    for (i, (dtype, name)) in TYPES.into_iter().chain(plain).enumerate() {
        let (n, k) = (7, dtype.block_len() * 5);
        let table = table(dtype, n, k, i as u64);
        let ids = vec![3, 0, 6, 3, 7, -1];
        let mut out = vec![1.0f32; ids.len() * k];
        let mut bad = vec![0u64; 2];
        let row = dtype.row_bytes(k).unwrap();
        let args = [
            (&table).into(),
            (&ids).into(),
            (&mut out).into(),
            (n as i32).into(),
            (k as i32).into(),
            (&mut bad).into(),
        ];
        let kernel = format!("get_rows_{name}");
        shim.launch(&kernel, [ids.len(), 2, 1], 64, &args).unwrap();
        let bound = reported(&bad);
        assert!(bound == Some((7, 7)) || bound == Some((-1, 7)), "{bound:?}");
        for (id, out) in ids.iter().zip(out.chunks(k)) {
            let mut expected = vec![0.0; k];
            if (0..n as i32).contains(id) {
                dequantize_row(dtype, &table[*id as usize * row..][..row], &mut expected);
            }
            let wrong = expected.iter().zip(out).position(|(a, b)| !same(*a, *b));
            assert_eq!(wrong, None, "{dtype}, row {id}");
        }
    }
}

#[test]
fn activations_are_quantised_as_on_the_cpu() {
    let mut random = Numbers::new(5);
    for (dtype, len) in [(DType::Q8_0, 32), (DType::Q4K, 256)] {
        let (rows, k, stride) = (5, len * 3, len * 3 + 7);
        let mut x: Vec<f32> = (0..rows * stride)
            .map(|_| f32::from_bits(random.next() as u32 & 0xbfff_ffff))
            .collect();
        // Blocks that have no scale, or none that is finite.
        x[..len].fill(0.0);
        x[len + 3] = f32::INFINITY;
        x[2 * len + 5] = f32::NAN;
        x[stride..stride + len].fill(1e-40);
        let Some(prepared) = Prepared::of(&x, stride, rows, k, len) else {
            return;
        };
        for row in 0..rows {
            let mut scratch = vec![0; scratch_bytes(dtype, k)];
            prepare_row(
                CpuPath::detect(),
                dtype,
                &x[row * stride..][..k],
                &mut scratch,
            );
            let record = scratch.len() / (k / len);
            for (b, record) in scratch.chunks(record).enumerate() {
                let block = row * (k / len) + b;
                let q: Vec<i8> = record[..len].iter().map(|q| *q as i8).collect();
                assert_eq!(q, prepared.q[block * len..][..len], "row {row}, block {b}");
                let da = f32::from_le_bytes(record[len..len + 4].try_into().unwrap());
                assert!(same(da, prepared.da[block]), "{da} {}", prepared.da[block]);
                for (i, q) in q.chunks(32).enumerate() {
                    let sum = q.iter().map(|q| i32::from(*q)).sum::<i32>();
                    assert_eq!(sum, prepared.sums[block * (len / 32) + i]);
                }
            }
        }
    }
    assert_eq!(Activation::of(DType::Q6K), Activation::Q8K);
}

#[test]
fn norms_are_those_of_their_formulas_and_do_not_know_their_neighbours() {
    let Some(shim) = Shim::get() else { return };
    let mut random = Numbers::new(9);
    for n in [1, 3, 255, 256, 257, 1000] {
        let rows = 3;
        let float = |random: &mut Numbers| random.below(1 << 20) as f32 / 1e5 - 5.0;
        let mut list = |n: usize| (0..n).map(|_| float(&mut random)).collect::<Vec<f32>>();
        let (x, y, weight, bias) = (list(rows * n), list(rows * n), list(n), list(n));
        let eps = 1e-5f32;
        let size = (n as i32).into();
        let mut rms = vec![0.0f32; rows * n];
        let args = [
            (&x).into(),
            (&weight).into(),
            (&mut rms).into(),
            size,
            eps.into(),
        ];
        shim.launch("rms_norm_f32", [rows, 1, 1], 256, &args)
            .unwrap();
        let (mut sum, mut added) = (vec![0.0f32; rows * n], vec![0.0f32; rows * n]);
        let args = [
            (&x).into(),
            (&y).into(),
            (&weight).into(),
            (&mut sum).into(),
            (&mut added).into(),
            size,
            eps.into(),
        ];
        shim.launch("add_rms_norm_f32", [rows, 1, 1], 256, &args)
            .unwrap();
        let mut layer = vec![0.0f32; rows * n];
        let args = [
            (&x).into(),
            (&weight).into(),
            (&bias).into(),
            (&mut layer).into(),
            size,
            eps.into(),
        ];
        shim.launch("layer_norm_f32", [rows, 1, 1], 256, &args)
            .unwrap();
        let mut alone = vec![0.0f32; n];
        let last = &x[(rows - 1) * n..];
        let args = [
            last.into(),
            (&weight).into(),
            (&bias).into(),
            (&mut alone).into(),
            size,
            eps.into(),
        ];
        shim.launch("layer_norm_f32", [1, 1, 1], 256, &args)
            .unwrap();
        assert_eq!(alone, layer[(rows - 1) * n..]);
        let near = |a: f64, b: f32| {
            assert!(
                (a - f64::from(b)).abs() <= 1e-5 * (1.0 + a.abs()),
                "{a} {b}"
            )
        };
        for r in 0..rows {
            let row = |v: &[f32]| {
                v[r * n..][..n]
                    .iter()
                    .map(|v| f64::from(*v))
                    .collect::<Vec<f64>>()
            };
            let (x, y) = (row(&x), row(&y));
            let mean_square = |v: &[f64]| v.iter().map(|v| v * v).sum::<f64>() / n as f64;
            let both: Vec<f64> = x
                .iter()
                .zip(&y)
                .map(|(x, y)| f64::from((x + y) as f32))
                .collect();
            let mean = x.iter().sum::<f64>() / n as f64;
            let centred: Vec<f64> = x.iter().map(|x| x - mean).collect();
            let scale = |m: f64| 1.0 / (m + f64::from(eps)).sqrt();
            let scales = [&x, &both, &centred].map(|v| scale(mean_square(v)));
            for i in 0..n {
                let (w, b) = (f64::from(weight[i]), f64::from(bias[i]));
                near(x[i] * scales[0] * w, rms[r * n + i]);
                assert_eq!(both[i] as f32, sum[r * n + i]);
                near(both[i] * scales[1] * w, added[r * n + i]);
                near(centred[i] * scales[2] * w + b, layer[r * n + i]);
            }
        }
    }
}

/// What a kernel makes, and the numbers of 8 bits that it makes of it, beside those that are made of it afterwards.
fn with_numbers(
    shim: &Shim,
    kernel: &str,
    blocks: usize,
    (rows, n, len): (usize, usize, usize),
    args: &dyn Fn(&mut Vec<f32>) -> Vec<Arg>,
) -> Vec<f32> {
    let mut out = vec![0.0f32; rows * n];
    let mut found = Prepared {
        q: vec![7; rows * n],
        da: vec![7.0; rows * n / len],
        sums: vec![7; rows * n / 32],
    };
    let mut all = args(&mut out);
    let parts: [Arg; 3] = [
        (&mut found.q).into(),
        (&mut found.da).into(),
        (&mut found.sums).into(),
    ];
    all.extend(parts);
    shim.launch(kernel, [blocks, 1, 1], 256, &all).unwrap();
    let expected = Prepared::of(&out, n, rows, n, len).unwrap();
    assert_eq!(found.q, expected.q, "{kernel} {n}");
    assert_eq!(found.sums, expected.sums, "{kernel} {n}");
    let all_same = found.da.iter().zip(&expected.da).all(|(a, b)| same(*a, *b));
    assert!(all_same, "{kernel} {n}: {:?} {:?}", found.da, expected.da);
    out
}

#[test]
fn what_products_read_is_made_with_what_they_read_it_of() {
    let Some(shim) = Shim::get() else { return };
    let mut random = Numbers::new(19);
    let rows = 3;
    for (n, len, name) in [
        (32, 32, "q8"),
        (288, 32, "q8"),
        (1024, 32, "q8"),
        (256, 256, "q8k"),
        (1280, 256, "q8k"),
    ] {
        let mut list = |n: usize| -> Vec<f32> {
            let mut float = || random.below(1 << 20) as f32 / 1e5 - 5.0;
            (0..n).map(|_| float()).collect()
        };
        let (mut x, y, weight) = (list(rows * n), list(rows * n), list(n));
        // A row that is no number, and one of zeros.
        x[n + 2] = f32::NAN;
        x[2 * n..].fill(0.0);
        let (size, eps) = (Arg::from(n as i32), Arg::from(1e-5f32));
        let norm = |out: &mut Vec<f32>| vec![(&x).into(), (&weight).into(), out.into(), size, eps];
        let mut alone = vec![0.0f32; rows * n];
        shim.launch("rms_norm_f32", [rows, 1, 1], 256, &norm(&mut alone))
            .unwrap();
        let sizes = (rows, n, len);
        let kernel = format!("rms_norm_{name}");
        let made = with_numbers(shim, &kernel, rows, sizes, &norm);
        assert!(alone.iter().zip(&made).all(|(a, b)| same(*a, *b)));

        let sum = vec![0.0f32; rows * n];
        let added = |out: &mut Vec<f32>| {
            let inputs: [Arg; 3] = [(&x).into(), (&y).into(), (&weight).into()];
            [&inputs[..], &[(&sum).into(), out.into(), size, eps]].concat()
        };
        shim.launch("add_rms_norm_f32", [rows, 1, 1], 256, &added(&mut alone))
            .unwrap();
        let kernel = format!("add_rms_norm_{name}");
        let made = with_numbers(shim, &kernel, rows, sizes, &added);
        assert!(alone.iter().zip(&made).all(|(a, b)| same(*a, *b)));

        let count = Arg::from((rows * n) as i64);
        let gated = |out: &mut Vec<f32>| vec![out.into(), (&x).into(), (&y).into(), count];
        shim.launch("swiglu_f32", [2, 1, 1], 256, &gated(&mut alone))
            .unwrap();
        let kernel = format!("swiglu_{name}");
        let blocks = (rows * n).div_ceil(256);
        let made = with_numbers(shim, &kernel, blocks, sizes, &gated);
        assert!(alone.iter().zip(&made).all(|(a, b)| same(*a, *b)));
    }
}

#[test]
fn softmax_has_the_bits_of_the_cpus_and_greedy_takes_the_first_largest() {
    let Some(shim) = Shim::get() else { return };
    let mut random = Numbers::new(21);
    for n in [1, 15, 33, 700, 5000] {
        let rows = 4;
        let mut x: Vec<f32> = (0..rows * n)
            .map(|_| random.below(64) as f32 / 4.0 - 8.0)
            .collect();
        x[n..2 * n].fill(f32::NEG_INFINITY);
        if n > 1 {
            x[n - 1] = f32::NEG_INFINITY;
            x[3 * n + n / 2] = f32::NAN;
        }
        let int = |n: usize| (n as i32).into();
        for log in [false, true] {
            let mut out = vec![0.0f32; rows * n];
            let args = [
                (&x).into(),
                (&mut out).into(),
                int(n),
                int(usize::from(log)),
            ];
            shim.launch("softmax_f32", [rows, 1, 1], 256, &args)
                .unwrap();
            let values: Vec<f64> = x.iter().map(|v| f64::from(*v)).collect();
            let x = Tensor::of(DType::F32, &[rows, n], &values);
            let expected = run(&[&x], |g, x| match log {
                false => g.softmax(x[0], -1),
                true => g.log_softmax(x[0], -1),
            });
            let expected = expected.unwrap().values();
            let differ = |(a, b): (&f64, &f32)| !same(*a as f32, *b);
            let wrong = expected.iter().zip(&out).position(differ);
            assert_eq!(wrong, None, "rows of {n}, logarithms: {log}");
        }
        let mut chosen = vec![7i32; rows];
        let args = [(&x).into(), (&mut chosen).into(), int(n)];
        shim.launch("greedy_f32", [rows, 1, 1], 256, &args).unwrap();
        for (r, x) in x.chunks(n).enumerate() {
            let most = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let broken = x.iter().any(|v| v.is_nan()) || most == f32::NEG_INFINITY;
            let first = x.iter().position(|v| *v == most).unwrap_or(0) as i32;
            assert_eq!(chosen[r], if broken { -1 } else { first }, "row {r} of {n}");
        }
    }
}

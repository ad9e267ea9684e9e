//! Products with weights of block types have the very bits of the CPU backend's.

use hotcell_graph::DType;
use hotcell_kernels::cpu::{matmul::mul_mat, path::CpuPath};

use super::{
    chosen::{Choices, nobody, unscaled},
    common::Numbers,
    shim::{Arg, NULL, Shim, reported},
};

/// The block types that have kernels, and what these are called.
pub const TYPES: [(DType, &str); 10] = [
    (DType::Q8_0, "q8_0"),
    (DType::Q4_0, "q4_0"),
    (DType::Q4_1, "q4_1"),
    (DType::Q5_0, "q5_0"),
    (DType::Q5_1, "q5_1"),
    (DType::MXFP4, "mxfp4"),
    (DType::NVFP4, "nvfp4"),
    (DType::Q4K, "q4_k"),
    (DType::Q5K, "q5_k"),
    (DType::Q6K, "q6_k"),
];

/// Activations as the kernels read them.
pub struct Prepared {
    /// `[rows, k]`
    pub q: Vec<i8>,
    /// `[rows, k / len]`
    pub da: Vec<f32>,
    /// `[rows, k / 32]`
    pub sums: Vec<i32>,
}

impl Prepared {
    /// For weights in blocks of `len`.
    pub fn of(x: &[f32], stride: usize, rows: usize, k: usize, len: usize) -> Option<Self> {
        let len = if len < 256 { 32 } else { len };
        let mut prepared = Self {
            q: vec![0; rows * k],
            da: vec![0.0; rows * k / len],
            sums: vec![0; rows * k / 32],
        };
        let kernel = if len == 32 {
            "quantize_q8"
        } else {
            "quantize_q8k"
        };
        let grid = [(rows * k / len).div_ceil(8), 1, 1];
        let args = [
            x.into(),
            (stride as i64).into(),
            (&mut prepared.q).into(),
            (&mut prepared.da).into(),
            (&mut prepared.sums).into(),
            (rows as i32).into(),
            (k as i32).into(),
        ];
        Shim::get()?.launch(kernel, grid, 256, &args).unwrap();
        Some(prepared)
    }
}

/// Weights of any bits whose scales are ordinary numbers.
pub fn weights(dtype: DType, n: usize, k: usize, seed: u64) -> Vec<u8> {
    let mut random = Numbers::new(seed);
    let mut bytes = random.bytes(n * dtype.row_bytes(k).unwrap());
    for block in bytes.chunks_mut(dtype.block_bytes()) {
        let mut half = |at: usize| {
            let scale = half::f16::from_f32((random.below(2000) as f32 - 1000.0) / 1e4);
            block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
        };
        match dtype {
            DType::Q6K => half(208),
            DType::MXFP4 => block[0] = 118 + block[0] % 8,
            DType::NVFP4 => {}
            DType::Q8_0 | DType::Q4_0 | DType::Q5_0 => half(0),
            _ => {
                half(0);
                half(2);
            }
        }
    }
    bytes
}

pub fn activations(n: usize, seed: u64) -> Vec<f32> {
    let mut random = Numbers::new(seed);
    (0..n)
        .map(|_| random.below(1 << 24) as f32 / (1 << 22) as f32 - 2.0)
        .collect()
}

pub fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|v| v.to_bits()).collect()
}

/// No further matrices in a launch.
pub const NO_FURTHER: Arg = NULL;

/// A product `[rows, n]` by the kernel for few rows.
fn few(
    shim: &Shim,
    (dtype, name): (DType, &str),
    each: usize,
    w: &[u8],
    x: &Prepared,
    (n, k, rows): (usize, usize, usize),
) -> Vec<f32> {
    // Something between the rows of the result, which stays.
    let stride = n + 3;
    let mut out = vec![-7.0f32; rows * stride];
    let mut bad = vec![0u64; 2];
    let mut args: Vec<Arg> = vec![
        w.into(),
        (&x.q).into(),
        (&x.da).into(),
        (&x.sums).into(),
        (&mut out).into(),
        (stride as i64).into(),
        (n as i32).into(),
        (k as i32).into(),
        (rows as i32).into(),
        NO_FURTHER,
    ];
    args.extend(nobody(&mut bad));
    args.push(unscaled());
    let kernel = format!("mul_vec_{name}_{each}");
    let grid = [n.div_ceil(8), rows.div_ceil(each), 1];
    shim.launch(&kernel, grid, 128, &args).unwrap();
    assert_eq!(reported(&bad), None, "{dtype}");
    assert!(out.chunks(stride).all(|row| row[n..] == [-7.0; 3]));
    out.chunks(stride)
        .flat_map(|row| row[..n].to_vec())
        .collect()
}

#[test]
fn products_of_few_rows_have_the_bits_of_the_cpus() {
    let Some(shim) = Shim::get() else { return };
    for (i, kind) in TYPES.into_iter().enumerate() {
        let len = kind.0.block_len();
        // Outputs that fill no block of threads, and more blocks than one panel has.
        for (n, blocks, rows) in [
            (5, 1, 1),
            (9, 3, 2),
            (17, if len == 32 { 133 } else { 35 }, 6),
        ] {
            let k = blocks * len;
            let w = weights(kind.0, n, k, i as u64);
            let mut x = activations(rows * k, 77);
            // A row that is poisoned gives NaN, others do not.
            if rows > 2 {
                x[2 * k + 1] = f32::INFINITY;
            }
            let expected = mul_mat(CpuPath::detect().vectors(), kind.0, &w, n, &x, rows, k);
            let Some(prepared) = Prepared::of(&x, k, rows, k, len) else {
                return;
            };
            // At addresses that are multiples of nothing, too.
            for skip in if rows == 2 { 0..3 } else { 0..1 } {
                let moved: Vec<u8> = std::iter::repeat_n(0, skip)
                    .chain(w.iter().copied())
                    .collect();
                for each in [1, 4] {
                    let found = few(shim, kind, each, &moved[skip..], &prepared, (n, k, rows));
                    assert_eq!(
                        bits(&found),
                        bits(&expected),
                        "{} [{n}, {k}], {rows} rows by {each}",
                        kind.0
                    );
                }
            }
        }
    }
}

/// Results of one launch with several matrices, each close together.
pub fn at_once(
    shim: &Shim,
    kernel: &str,
    [together, outputs, threads]: [usize; 3],
    w: &[Vec<u8>],
    sizes: &[usize],
    (k, rows): (usize, usize),
    begin: &dyn Fn(Arg) -> Vec<Arg>,
) -> Vec<Vec<f32>> {
    let mut out: Vec<Vec<f32>> = sizes.iter().map(|n| vec![-7.0; n * rows]).collect();
    let mut further = [0; 6];
    for i in 1..sizes.len() {
        further[i - 1] = w[i].as_ptr() as u64;
        further[2 + i - 1] = out[i].as_mut_ptr() as u64;
        further[4 + i - 1] = sizes[i] as u64;
    }
    let mut bad = vec![0u64; 2];
    let mut args = begin((&w[0]).into());
    args.extend([
        (&mut out[0]).into(),
        (sizes[0] as i64).into(),
        (sizes[0] as i32).into(),
        (k as i32).into(),
        (rows as i32).into(),
        Arg::words(&further),
    ]);
    args.extend(nobody(&mut bad));
    if kernel.starts_with("mul_vec") || kernel.starts_with("mul_tile") {
        args.push(unscaled());
    }
    let blocks = sizes.iter().map(|n| n.div_ceil(outputs)).sum();
    let grid = [blocks, rows.div_ceil(together), 1];
    shim.launch(kernel, grid, threads, &args).unwrap();
    assert_eq!(reported(&bad), None);
    out
}

#[test]
fn several_matrices_in_a_launch_give_what_each_gives() {
    let Some(shim) = Shim::get() else { return };
    let check =
        |dtype, w: &[Vec<u8>], sizes: &[usize], x: &[f32], rows, k, found: Vec<Vec<f32>>| {
            for ((w, n), found) in w.iter().zip(sizes).zip(found) {
                let expected = mul_mat(CpuPath::detect().vectors(), dtype, w, *n, x, rows, k);
                assert_eq!(bits(&found), bits(&expected), "{dtype} {n} of {sizes:?}");
            }
        };
    for sizes in [&[9, 17, 3][..], &[8, 1], &[64, 16, 130], &[5]] {
        for kind in TYPES {
            let (len, rows) = (kind.0.block_len().max(32), 3);
            let k = 2 * len.next_multiple_of(64);
            let x = activations(rows * k, 21);
            let seeded = |(i, n): (usize, &usize)| weights(kind.0, *n, k, i as u64 + 3);
            let w: Vec<Vec<u8>> = sizes.iter().enumerate().map(seeded).collect();
            let prepared = Prepared::of(&x, k, rows, k, kind.0.block_len()).unwrap();
            let begin = |w: Arg| {
                let parts = [(&prepared.q).into(), (&prepared.da).into()];
                [vec![w], parts.to_vec(), vec![(&prepared.sums).into()]].concat()
            };
            let vec = |each| (format!("mul_vec_{}_{each}", kind.1), [each, 8, 128]);
            let tile = (format!("mul_tile_{}", kind.1), [64, 64, 128]);
            for (kernel, each) in [vec(1), vec(4), tile] {
                let found = at_once(shim, &kernel, each, &w, sizes, (k, rows), &begin);
                check(kind.0, &w, sizes, &x, rows, k, found);
            }
        }
        let (k, rows) = (37, 9);
        let x = activations(rows * k, 22);
        let plain = |n: usize| {
            let numbers = activations(n * k, n as u64);
            numbers.iter().flat_map(|v| v.to_le_bytes()).collect()
        };
        let w: Vec<Vec<u8>> = sizes.iter().map(|n| plain(*n)).collect();
        let begin = |w: Arg| vec![w, (&x).into(), Arg::from(k as i64)];
        let each = [8, 64, 128];
        let found = at_once(shim, "mul_mat_f32", each, &w, sizes, (k, rows), &begin);
        check(DType::F32, &w, sizes, &x, rows, k, found);
    }
}

#[test]
fn products_with_plain_weights_have_the_bits_of_the_cpus() {
    let Some(shim) = Shim::get() else { return };
    let dtype = DType::F32;
    for (n, k, rows) in [(1, 1, 1), (65, 37, 9), (130, 96, 3)] {
        let numbers = activations(n * k, 4);
        let w: Vec<u8> = numbers.iter().flat_map(|v| v.to_le_bytes()).collect();
        let x = activations(rows * k, 5);
        let expected = mul_mat(CpuPath::detect().vectors(), dtype, &w, n, &x, rows, k);
        let begin = |w: Arg| vec![w, (&x).into(), Arg::from(k as i64)];
        let each = [8, 64, 128];
        let found = at_once(shim, "mul_mat_f32", each, &[w], &[n], (k, rows), &begin);
        assert_eq!(bits(&found[0]), bits(&expected), "[{n}, {k}], {rows} rows");
    }
}

#[test]
fn each_row_is_multiplied_by_its_expert_and_a_wrong_one_is_reported() {
    let Some(shim) = Shim::get() else { return };
    let n = 10;
    let plain = (DType::F32, "f32");
    for (dtype, name) in TYPES.into_iter().chain([plain]) {
        let k = 2 * dtype.block_len().max(32);
        // By how many rows, and a block's outputs and threads.
        let (alone, together, tile) = match dtype {
            DType::F32 => ("mul_mat_f32".to_owned(), "mul_mat_f32".to_owned(), None),
            _ => (
                format!("mul_vec_{name}_1"),
                format!("mul_vec_{name}_4"),
                Some((format!("mul_tile_{name}"), Some(64), 64)),
            ),
        };
        let (size, outputs) = if dtype == DType::F32 { (8, 64) } else { (4, 8) };
        let ways = [(alone, None, outputs), (together, Some(size), outputs)];
        for (kernel, together, outputs) in ways.into_iter().chain(tile) {
            let tokens = if together == Some(64) { 90 } else { 4 };
            for shared in [true, false] {
                let choices = Choices::of_three(tokens, shared);
                let experts = choices.experts;
                let w = match dtype {
                    DType::F32 => activations(experts * n * k, 6)
                        .iter()
                        .flat_map(|v| v.to_le_bytes())
                        .collect(),
                    _ => weights(dtype, experts * n, k, 6),
                };
                let each = w.len() / experts;
                let x = activations(choices.rows() * k, 7);
                let len = dtype.block_len().max(32);
                let prepared = Prepared::of(&x, k, choices.rows(), k, len).unwrap();
                let begin: Vec<Arg> = match dtype {
                    DType::F32 => vec![(&w).into(), (&x).into(), Arg::from(k as i64)],
                    _ => vec![
                        (&w).into(),
                        (&prepared.q).into(),
                        (&prepared.da).into(),
                        (&prepared.sums).into(),
                    ],
                };
                // Of every expert one for some outputs and one for the others.
                let height = 7;
                let scales = activations(experts * n.div_ceil(height), 8);
                let scale = |expert: usize, output: usize| match dtype {
                    DType::F32 => 1.0,
                    _ => scales[expert * n.div_ceil(height) + output / height],
                };
                let last = (dtype != DType::F32).then(|| {
                    let sizes = [height, k.div_ceil(32), 1, n.div_ceil(height)];
                    let [height, wide, across, each] = sizes.map(|size| size as u64);
                    let address = scales.as_ptr() as u64;
                    Arg::words(&[address, 0, 0, height | wide << 32, across | each << 32])
                });
                let taken = choices.taken(shim, together);
                let by = (kernel.as_str(), outputs, 128);
                let out = taken.products(shim, by, &begin, [n, k], last);
                for row in 0..choices.ids.len() {
                    let x = &x[choices.from(row) * k..][..k];
                    let expected = choices.expert(row).map_or(vec![0.0; n], |expert| {
                        let w = &w[expert * each..][..each];
                        let sums = mul_mat(CpuPath::detect().vectors(), dtype, w, n, x, 1, k);
                        let all = sums.iter().enumerate();
                        all.map(|(i, sum)| sum * scale(expert, i)).collect()
                    });
                    let found = &out[row * n..][..n];
                    assert_eq!(bits(found), bits(&expected), "{kernel}, row {row}");
                }
            }
        }
    }
}

/// A product `[rows, n]` by the kernel for many rows.
fn many(
    shim: &Shim,
    (dtype, name): (DType, &str),
    w: &[u8],
    x: &Prepared,
    (n, k, rows): (usize, usize, usize),
) -> Vec<f32> {
    // Something between the rows of the result, which stays.
    let stride = n + 1;
    let mut out = vec![-7.0f32; rows * stride];
    let mut bad = vec![0u64; 2];
    let int = |n: usize| Arg::from(n as i32);
    let mut args = vec![
        w.into(),
        (&x.q).into(),
        (&x.da).into(),
        (&x.sums).into(),
        (&mut out).into(),
        Arg::from(stride as i64),
        int(n),
        int(k),
        int(rows),
        NO_FURTHER,
    ];
    args.extend(nobody(&mut bad));
    args.push(unscaled());
    let grid = [n.div_ceil(64), rows.div_ceil(64), 1];
    shim.launch(&format!("mul_tile_{name}"), grid, 128, &args)
        .unwrap();
    assert_eq!(reported(&bad), None, "{dtype}");
    assert!(out.chunks(stride).all(|row| row[n] == -7.0), "{dtype}");
    out.chunks(stride)
        .flat_map(|row| row[..n].to_vec())
        .collect()
}

#[test]
fn products_of_many_rows_have_the_bits_of_the_cpus() {
    let Some(shim) = Shim::get() else { return };
    for (i, kind) in TYPES.into_iter().enumerate() {
        let (dtype, len) = (kind.0, kind.0.block_len());
        let several = match len {
            32 => 6,
            64 => 3,
            _ => 2,
        };
        for (n, blocks, rows) in [(5, 1, 1), (66, several, 67), (3, several, 13)] {
            let k = blocks * len;
            let w = weights(dtype, n, k, i as u64);
            let mut x = activations(rows * k, 78);
            x[(rows - 1) * k] = f32::NAN;
            let expected = mul_mat(CpuPath::detect().vectors(), dtype, &w, n, &x, rows, k);
            let Some(prepared) = Prepared::of(&x, k, rows, k, len) else {
                return;
            };
            let out = many(shim, kind, &w, &prepared, (n, k, rows));
            for (r, (found, expected)) in out.chunks(n).zip(expected.chunks(n)).enumerate() {
                assert_eq!(bits(found), bits(expected), "{dtype} [{n}, {k}], row {r}");
            }
        }
    }
}

/// The integer that a block of 256 makes is rounded once, where it has more bits than `f32` keeps.
#[test]
fn large_sums_have_the_bits_of_the_cpus() {
    let Some(shim) = Shim::get() else { return };
    let (n, k, rows) = (9, 512, 5);
    for (i, kind) in TYPES.into_iter().enumerate() {
        if kind.0.block_len() != 256 {
            continue;
        }
        let mut random = Numbers::new(i as u64);
        let mut w = random.bytes(n * kind.0.row_bytes(k).unwrap());
        let one = half::f16::ONE.to_le_bytes();
        for block in w.chunks_mut(kind.0.block_bytes()) {
            block
                .iter_mut()
                .for_each(|byte| *byte = 0xff - (*byte & 0x11));
            if kind.0 == DType::Q6K {
                block[192..208].fill(0x7f);
                block[208..].copy_from_slice(&one);
            } else {
                block[..2].copy_from_slice(&one);
                block[2..4].fill(0);
            }
        }
        let x: Vec<f32> = (0..rows * k)
            .map(|i| {
                if i % 256 == 0 {
                    127.0
                } else {
                    100.0 + random.below(28) as f32
                }
            })
            .collect();
        let expected = mul_mat(CpuPath::detect().vectors(), kind.0, &w, n, &x, rows, k);
        assert!(
            expected.iter().all(|sum| *sum > (1 << 25) as f32),
            "{}",
            kind.0
        );
        let Some(prepared) = Prepared::of(&x, k, rows, k, 256) else {
            return;
        };
        for each in [1, 4] {
            let found = few(shim, kind, each, &w, &prepared, (n, k, rows));
            assert_eq!(bits(&found), bits(&expected), "{} by {each}", kind.0);
        }
        let found = many(shim, kind, &w, &prepared, (n, k, rows));
        assert_eq!(bits(&found), bits(&expected), "{}", kind.0);
    }
}

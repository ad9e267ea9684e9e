//! The multiplication gives the very bits that its documentation promises, for every dtype, on every
//! instruction path, for any number of rows, any split of the outputs and any alignment of the weights.

use std::ops::Range;

use half::{bf16, f16};
use hotcell_graph::DType;
use hotcell_kernels::cpu::dequant::{dequantize_row, is_weight_dtype};
use hotcell_kernels::cpu::matmul::{Kept, MulMat, mul_mat, pack};
use hotcell_kernels::cpu::path::CpuPath;
use hotcell_kernels::cpu::quantize::{prepare_row, scratch_bytes};

/// xorshift64*, so that cases are the same everywhere.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    /// Within ±1.
    fn float(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
    fn activations(&mut self, count: usize) -> Vec<f32> {
        (0..count)
            .map(|i| match i % 97 {
                5 => 0.0,
                6 => -0.0,
                7 => 30.0 * self.float(),
                8 => 1e-30 * self.float(),
                _ => self.float(),
            })
            .collect()
    }
    fn weights(&mut self, dtype: DType, rows: usize, k: usize) -> Vec<u8> {
        let blocks = rows * k / dtype.block_len();
        let mut out = Vec::new();
        for _ in 0..blocks {
            match dtype {
                DType::F32 => out.extend(self.float().to_le_bytes()),
                DType::F16 => out.extend(f16::from_f32(self.float()).to_le_bytes()),
                DType::BF16 => out.extend(bf16::from_f32(self.float()).to_le_bytes()),
                // Any number, the smallest ones too.
                DType::F8E4M3 => out.push(match self.bits() as u8 {
                    nan @ (0x7f | 0xff) => nan & 0x80,
                    code => code,
                }),
                _ => {
                    let mut block: Vec<u8> = (0..dtype.block_bytes())
                        .map(|_| self.bits() as u8)
                        .collect();
                    let halves: &[usize] = match dtype {
                        DType::Q8_0 | DType::Q4_0 | DType::Q5_0 => &[0],
                        DType::Q6K => &[208],
                        DType::MXFP4 | DType::NVFP4 => &[],
                        _ => &[0, 2],
                    };
                    match dtype {
                        // From 2^-9 to 2^-2 for the numbers as the blocks have them.
                        DType::MXFP4 => block[0] = 119 + block[0] % 8,
                        // Subnormal ones too, the code of the NaN and a sign that does not count.
                        DType::NVFP4 => block[..4].iter_mut().for_each(|scale| {
                            *scale = match *scale % 64 {
                                63 => *scale | 0x7f,
                                other => other | *scale & 0x80,
                            };
                        }),
                        _ => {}
                    }
                    for &at in halves {
                        let scale = f16::from_f32(0.05 * self.float());
                        block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
                    }
                    out.extend(block);
                }
            }
        }
        out
    }
}

/// One quantised block of activations, by the letter of `quantize`'s documentation.
struct Quantized {
    q: Vec<i32>,
    da: f32,
}

fn quantize(x: &[f32], half: bool) -> Quantized {
    if x.iter().any(|v| !v.is_finite()) {
        return Quantized {
            q: vec![0; x.len()],
            da: f32::NAN,
        };
    }
    let amax = x.iter().fold(0.0f32, |a, v| a.max(v.abs()));
    let inverse = 127.0 / amax;
    if !inverse.is_finite() {
        return Quantized {
            q: vec![0; x.len()],
            da: 0.0,
        };
    }
    let d = amax / 127.0;
    Quantized {
        q: x.iter()
            .map(|v| ((v * inverse).round_ties_even() as i32).clamp(-127, 127))
            .collect(),
        da: if half { f16::from_f32(d).to_f32() } else { d },
    }
}

fn half_at(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

/// Twice the number of E2M1 with this code, from its sign, exponent and mantissa.
fn e2m1_twice(code: u8) -> i32 {
    let (exponent, mantissa) = (code >> 1 & 3, i32::from(code & 1));
    let size = match exponent {
        0 => mantissa,
        exponent => (2 + mantissa) << (exponent - 1),
    };
    if code & 8 == 0 { size } else { -size }
}

/// What E4M3 says, from its sign, exponent and mantissa.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 512.0,
        _ => (8.0 + mantissa) / 8.0 * 2f32.powi(exponent - 7),
    };
    if code & 0x80 == 0 { size } else { -size }
}

/// Integer weights of NVFP4's four sub-blocks, and half of their scales.
fn block64(b: &[u8]) -> Vec<(Vec<i32>, f32)> {
    let half = |scale: u8| {
        let (exponent, mantissa) = (i32::from(scale >> 3 & 15), f32::from(scale & 7));
        match (scale, exponent) {
            (0x7f, _) => 0.0,
            (_, 0) => mantissa / 1024.0,
            _ => (8.0 + mantissa) / 16.0 * 2f32.powi(exponent - 7),
        }
    };
    let subs = b[..4].iter().zip(b[4..].chunks(8));
    subs.map(|(&scale, qs)| {
        let low = qs.iter().map(|b| e2m1_twice(b & 15));
        let all = low.chain(qs.iter().map(|b| e2m1_twice(b >> 4)));
        (all.collect(), half(scale))
    })
    .collect()
}

/// Signed integer weights of a 32-element block (unsigned where there is a minimum), d and m.
fn block32(dtype: DType, b: &[u8]) -> (Vec<i32>, f32, Option<f32>) {
    let d = half_at(b, 0);
    let nibbles = |qs: &[u8]| -> Vec<i32> {
        let low = qs.iter().map(|b| (b & 15) as i32);
        low.chain(qs.iter().map(|b| (b >> 4) as i32)).collect()
    };
    let five = |qh: &[u8], qs: &[u8]| -> Vec<i32> {
        let bits = u32::from_le_bytes([qh[0], qh[1], qh[2], qh[3]]);
        nibbles(qs)
            .into_iter()
            .enumerate()
            .map(|(i, q)| q + 16 * (bits >> i & 1) as i32)
            .collect()
    };
    let minus = |q: Vec<i32>, zero: i32| q.into_iter().map(|q| q - zero).collect();
    match dtype {
        DType::Q8_0 => (b[2..34].iter().map(|&b| b as i8 as i32).collect(), d, None),
        DType::Q4_0 => (minus(nibbles(&b[2..18]), 8), d, None),
        DType::Q4_1 => (nibbles(&b[4..20]), d, Some(half_at(b, 2))),
        DType::Q5_0 => (minus(five(&b[2..6], &b[6..22]), 16), d, None),
        DType::Q5_1 => (five(&b[4..8], &b[8..24]), d, Some(half_at(b, 2))),
        DType::MXFP4 => {
            let codes = nibbles(&b[1..17]).into_iter();
            // In f64 the power of two is a normal number, and it fits into f32.
            let d = 2f64.powi(i32::from(b[0]) - 128) as f32;
            (codes.map(|code| e2m1_twice(code as u8)).collect(), d, None)
        }
        other => panic!("{other}"),
    }
}

/// Integer weights, scales and minima of a super-block.
fn block256(dtype: DType, b: &[u8]) -> (Vec<i32>, Vec<i32>, Vec<i32>) {
    if dtype == DType::Q6K {
        let mut q = vec![0; 256];
        for half in 0..2 {
            let (ql, qh) = (&b[64 * half..], &b[128 + 32 * half..]);
            for l in 0..32 {
                let at = |run: usize| 128 * half + 32 * run + l;
                q[at(0)] = (ql[l] & 15 | (qh[l] & 3) << 4) as i32 - 32;
                q[at(1)] = (ql[l + 32] & 15 | (qh[l] >> 2 & 3) << 4) as i32 - 32;
                q[at(2)] = (ql[l] >> 4 | (qh[l] >> 4 & 3) << 4) as i32 - 32;
                q[at(3)] = (ql[l + 32] >> 4 | (qh[l] >> 6) << 4) as i32 - 32;
            }
        }
        return (
            q,
            b[192..208].iter().map(|&s| s as i8 as i32).collect(),
            vec![],
        );
    }
    let s = &b[4..16];
    let (mut scales, mut minima) = (vec![], vec![]);
    for j in 0..8 {
        let (sc, m) = match j {
            0..4 => (s[j] & 63, s[j + 4] & 63),
            _ => (
                s[j + 4] & 15 | s[j - 4] >> 6 << 4,
                s[j + 4] >> 4 | s[j] >> 6 << 4,
            ),
        };
        scales.push(sc as i32);
        minima.push(m as i32);
    }
    let qs = &b[b.len() - 128..];
    let q = (0..256)
        .map(|i| {
            let (j, l) = (i / 32, i % 32);
            let low = qs[j / 2 * 32 + l] >> (4 * (j % 2)) & 15;
            let high = if dtype == DType::Q5K {
                b[16 + l] >> j & 1
            } else {
                0
            };
            (low + 16 * high) as i32
        })
        .collect();
    (q, scales, minima)
}

fn dot(a: &[i32], b: &[i32]) -> i32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// A weight that is no block.
fn number(dtype: DType, b: &[u8]) -> f32 {
    match dtype {
        DType::F32 => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        DType::F16 => half_at(b, 0),
        DType::BF16 => bf16::from_le_bytes([b[0], b[1]]).to_f32(),
        _ => e4m3(b[0]),
    }
}

/// One output, by the letter of `matmul`'s documentation.
fn reference(dtype: DType, w: &[u8], x: &[f32]) -> f32 {
    let mut acc = 0.0f32;
    let blocks = w
        .chunks(dtype.block_bytes())
        .zip(x.chunks(dtype.block_len()));
    for (b, x) in blocks {
        match dtype {
            DType::F32 | DType::F16 | DType::BF16 | DType::F8E4M3 => {
                acc = number(dtype, b).mul_add(x[0], acc)
            }
            DType::Q4K | DType::Q5K | DType::Q6K => {
                let x = quantize(x, false);
                let (w, scales, minima) = block256(dtype, b);
                let sub = 256 / scales.len();
                let mut inner = 0;
                for (j, &scale) in scales.iter().enumerate() {
                    let range = sub * j..sub * (j + 1);
                    inner += scale * dot(&w[range.clone()], &x.q[range]);
                }
                let inner = inner as f32;
                if dtype == DType::Q6K {
                    acc = (inner * half_at(b, 208)).mul_add(x.da, acc);
                } else {
                    let sums: Vec<i32> = x.q.chunks(32).map(|q| q.iter().sum()).collect();
                    let low = dot(&minima, &sums) as f32 * half_at(b, 2);
                    acc = inner.mul_add(half_at(b, 0), -low).mul_add(x.da, acc);
                }
            }
            DType::NVFP4 => {
                let halves: Vec<Quantized> = x.chunks(32).map(|x| quantize(x, true)).collect();
                for (j, (w, d)) in block64(b).into_iter().enumerate() {
                    let x = &halves[j / 2];
                    let dot = dot(&w, &x.q[j % 2 * 16..][..16]);
                    acc = (dot as f32 * x.da).mul_add(d, acc);
                }
            }
            _ => {
                let x = quantize(x, true);
                let (w, d, m) = block32(dtype, b);
                acc = (dot(&w, &x.q) as f32 * x.da).mul_add(d, acc);
                if let Some(m) = m {
                    let sum: i32 = x.q.iter().sum();
                    acc = (sum as f32 * x.da).mul_add(m, acc);
                }
            }
        }
    }
    if acc.is_nan() {
        f32::from_bits(0x7fc0_0000)
    } else {
        acc
    }
}

/// The same on a path, for products of some weights are summed in another order on one of them.
fn reference_on(path: CpuPath, dtype: DType, w: &[u8], x: &[f32]) -> f32 {
    match (path, dtype) {
        (CpuPath::Amx, DType::BF16 | DType::F8E4M3) => reference_of_tiles(dtype, w, x),
        _ => reference(dtype, w, x),
    }
}

/// What arithmetic makes of a subnormal number, given or computed.
fn flush(v: f32) -> f32 {
    if v.is_subnormal() {
        0.0f32.copysign(v)
    } else {
        v
    }
}

/// One output on the path of AMX, by the letter of `matmul`'s documentation.
fn reference_of_tiles(dtype: DType, w: &[u8], x: &[f32]) -> f32 {
    let upper = |v: f32| f32::from_bits(v.to_bits() & 0xffff_0000);
    let parts = |v: f32| {
        if !v.is_finite() {
            return [v, 0.0, 0.0];
        }
        let second = upper(v - upper(v));
        [upper(v), second, v - upper(v) - second]
    };
    let w: Vec<f32> = w
        .chunks(dtype.block_bytes())
        .map(|b| number(dtype, b))
        .collect();
    let x: Vec<[f32; 3]> = x.iter().copied().map(parts).collect();
    let of = |count: usize| {
        let mut sum = 0.0f32;
        for (w, x) in w.chunks(32).zip(x.chunks(32)) {
            for part in 0..count {
                let mut chains = [0.0f32; 2];
                for (i, (&w, x)) in w.iter().zip(x).enumerate() {
                    let chain = &mut chains[i % 2];
                    *chain = flush(flush(w).mul_add(flush(x[part]), *chain));
                }
                sum = flush(sum + flush(chains[0] + chains[1]));
            }
        }
        sum
    };
    match of(3) {
        sum if !sum.is_nan() => sum,
        _ => match of(1) {
            sum if sum.is_nan() => f32::from_bits(0x7fc0_0000),
            sum => sum,
        },
    }
}

fn weight_dtypes() -> impl Iterator<Item = DType> {
    DType::ALL.iter().copied().filter(|&d| is_weight_dtype(d))
}

fn ks(dtype: DType) -> &'static [usize] {
    match dtype.block_len() {
        32 => &[0, 32, 96, 32 * 45],
        64 => &[0, 64, 192, 64 * 23],
        256 => &[0, 256, 512, 768],
        // The last is more than one pass of tiles over many rows.
        _ => &[0, 1, 7, 16, 31, 33, 400, 1100],
    }
}

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|v| v.to_bits()).collect()
}

/// `parts` ranges with starts at multiples of 16, and one split at an odd place.
fn splits(n: usize, parts: usize) -> Vec<Range<usize>> {
    let step = n.div_ceil(parts).next_multiple_of(16);
    (0..n)
        .step_by(step)
        .map(|start| start..n.min(start + step))
        .collect()
}

#[test]
fn every_path_and_every_split_gives_the_documented_bits() {
    for dtype in weight_dtypes() {
        let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ dtype as u64);
        for &k in ks(dtype) {
            // The most rows are more than a kernel keeps the sums of at once: of some 144, of some 288.
            for (n, many) in [(1, 150), (15, 150), (17, 150), (33, 300), (100, 150)] {
                let w = random.weights(dtype, n, k);
                let row_bytes = dtype.row_bytes(k).expect("whole blocks");
                let x = random.activations(many * k);
                let expected_on = |path| -> Vec<u32> {
                    (0..many * n)
                        .map(|i| (&w[i % n * row_bytes..][..row_bytes], &x[i / n * k..][..k]))
                        .map(|(w, x)| reference_on(path, dtype, w, x).to_bits())
                        .collect()
                };
                let same = expected_on(CpuPath::Portable);
                for path in CpuPath::available() {
                    let other = (path == CpuPath::Amx).then(|| expected_on(path));
                    let expected = other.as_ref().unwrap_or(&same);
                    for rows in [1, 2, 3, 7, 16, 40, 64, many] {
                        let offset = (n + rows) % 4;
                        let mut moved = vec![0xaa; offset];
                        moved.extend(&w);
                        let parts = 1 + (n + rows) % 3;
                        let out = split_product(
                            path,
                            dtype,
                            &moved[offset..],
                            n,
                            &x,
                            rows,
                            k,
                            &splits(n, parts),
                        );
                        let case =
                            format!("{dtype} on {path}: n {n}, k {k}, {rows} rows, {parts} parts");
                        assert_eq!(bits(&out), expected[..rows * n], "{case}");
                    }
                }
            }
        }
    }
}

/// The product in pieces, with the outputs spread wider than they need and everything else untouched.
#[allow(clippy::too_many_arguments)]
fn split_product(
    path: CpuPath,
    dtype: DType,
    w: &[u8],
    n: usize,
    x: &[f32],
    rows: usize,
    k: usize,
    ranges: &[Range<usize>],
) -> Vec<f32> {
    product_of(path, dtype, w, false, n, x, rows, k, ranges)
}

/// The same of weights that are packed or not.
#[allow(clippy::too_many_arguments)]
fn product_of(
    path: CpuPath,
    dtype: DType,
    w: &[u8],
    packed: bool,
    n: usize,
    x: &[f32],
    rows: usize,
    k: usize,
    ranges: &[Range<usize>],
) -> Vec<f32> {
    let size = scratch_bytes(dtype, k);
    let mut prepared = vec![0; rows * size];
    for r in 0..rows {
        prepare_row(
            path,
            dtype,
            &x[r * k..][..k],
            &mut prepared[r * size..][..size],
        );
    }
    // The activations lie apart as well, with NaN between them: nothing past a row is read.
    let x_stride = k + 3;
    let mut spread = vec![f32::NAN; rows * x_stride];
    for r in 0..rows {
        spread[r * x_stride..][..k].copy_from_slice(&x[r * k..][..k]);
    }
    let product = MulMat {
        dtype,
        w,
        packed,
        k,
        x: &spread,
        x_stride,
        prepared: &prepared,
        rows,
    };
    let out_stride = n + 5;
    let mut out = vec![-77.0; rows * out_stride];
    for range in ranges {
        // SAFETY: rows · out_stride outputs, n <= out_stride; one thread.
        unsafe { product.run(path, range.clone(), out.as_mut_ptr(), out_stride) };
    }
    out.chunks(out_stride)
        .flat_map(|row| {
            assert!(
                row[n..].iter().all(|&v| v == -77.0),
                "wrote past the outputs"
            );
            row[..n].to_vec()
        })
        .collect()
}

/// Sums rest while the rest of `k` is multiplied, of more outputs than rest at once, and of rows for which there is no room in
/// one piece.
#[test]
fn long_rows_are_summed_in_one_order() {
    let mut random = Random(23);
    for (dtype, n, k, rows) in [
        (DType::BF16, 560, 2112, 130),
        (DType::BF16, 1056, 4160, 60),
        (DType::BF16, 52, 66_048, 35),
        (DType::F8E4M3, 560, 4160, 130),
        (DType::F8E4M3, 70, 4130, 130),
        (DType::F8E4M3, 36, 66_048, 17),
    ] {
        let row_bytes = dtype.row_bytes(k).expect("whole blocks");
        let w = random.weights(dtype, n, k);
        let x = random.activations(rows * k);
        let mut packed = w.clone();
        let packs = pack::packs(dtype, n, k);
        if packs {
            pack::pack(dtype, k, &w, &mut packed);
        }
        for path in CpuPath::available() {
            let all = splits(n, 1);
            let stored = product_of(path, dtype, &w, false, n, &x, rows, k, &all);
            let of_packed = product_of(path, dtype, &packed, packs, n, &x, rows, k, &all);
            assert_eq!(
                bits(&of_packed),
                bits(&stored),
                "{dtype} [{n}, {k}] on {path}"
            );
            for row in [0, rows / 3, rows - 1] {
                let x = &x[row * k..][..k];
                let one = product_of(path, dtype, &packed, packs, n, x, 1, k, &all);
                let out = &stored[row * n..][..n];
                assert_eq!(bits(out), bits(&one), "row {row} of [{n}, {k}] on {path}");
                for i in [0, 17, n - 1] {
                    let expected = reference_on(path, dtype, &w[i * row_bytes..][..row_bytes], x);
                    assert_eq!(out[i].to_bits(), expected.to_bits(), "{row}, {i} on {path}");
                }
            }
        }
    }
}

/// Activations that are near an infinity, or whose upper half is one though they are none, and such as have all or hardly any bits.
#[test]
fn activations_at_the_edge_of_bf16_are_cut_as_documented() {
    let bits_of = [
        0x7f7f_7fff,
        0x7f7f_8000,
        0x7f7f_ffff,
        0xff7f_8000,
        0xff7f_ffff,
        0x7f80_0000,
        0xff80_0000,
        0x7f80_0001,
        0x7fff_ffff,
        0xffff_ffff,
        0x3f80_8000,
        0xbf80_8000,
        0x3f81_8000,
        0x3fff_ffff,
        0x3f80_7f80,
        0x3f80_8080,
        0x0080_0000,
        0x007f_ffff,
        0x0080_8001,
        0x8000_0001,
        0x0000_0000_u32,
    ];
    let k = 32;
    for path in CpuPath::available() {
        // A half, and infinities, which are none times the zeros that a part has.
        let of_weight = |at: usize| match at {
            1 => 0x7f80_u16,
            16 => 0xff80,
            _ => 0x3f00,
        };
        for at in [0, 1, 15, 16, 31] {
            let mut w = vec![0x3f00_u16; 16 * k];
            w.iter_mut()
                .skip(at)
                .step_by(k)
                .for_each(|w| *w = of_weight(at));
            let w: Vec<u8> = w.into_iter().flat_map(u16::to_le_bytes).collect();
            let mut x = vec![0.0; bits_of.len() * k];
            for (x, bits) in x.chunks_mut(k).zip(bits_of) {
                x[at] = f32::from_bits(bits);
            }
            let out = mul_mat(path, DType::BF16, &w, 16, &x, bits_of.len(), k);
            for (row, x) in x.chunks(k).enumerate() {
                let expected = reference_on(path, DType::BF16, &w[..2 * k], x);
                let what = format!("{:08x} at {at} on {path}", bits_of[row]);
                assert_eq!(out[row * 16].to_bits(), expected.to_bits(), "{what}");
            }
        }
    }
}

/// An infinite weight makes an infinity with any number of rows, however much of `k` is multiplied at a time, and a NaN where an
/// activation is zero.
#[test]
fn infinite_weights_make_infinities() {
    let dtype = DType::BF16;
    let mut random = Random(29);
    let n = 33;
    for (k, most) in [(32, 40), (4160, 130), (66_048, 17)] {
        let mut w = random.weights(dtype, n, k);
        for (output, at) in [(0, 1), (16, k - 1), (17, k / 2), (32, 7), (32, 8)] {
            let sign = if output == 16 { 0xff80_u16 } else { 0x7f80 };
            w[2 * (output * k + at)..][..2].copy_from_slice(&sign.to_le_bytes());
        }
        let mut x = random.activations(most * k);
        for (row, x) in x.chunks_mut(k).enumerate() {
            // Numbers that are one of BF16, and one that is three; every fifth row's is zero.
            for (i, x) in x.iter_mut().enumerate().filter(|(i, _)| i % 3 > 0) {
                *x = if row % 5 == 4 {
                    0.0
                } else {
                    1.0 + (i % 4) as f32
                };
            }
        }
        let mut packed = vec![0; w.len()];
        pack::pack(dtype, k, &w, &mut packed);
        let as_stored = &w;
        for path in CpuPath::available() {
            for (w, is_packed) in [(&w, false), (&packed, true)] {
                for rows in [1, 5, 16, 17, most] {
                    let all = splits(n, 1);
                    let out = product_of(path, dtype, w, is_packed, n, &x, rows, k, &all);
                    let some = |row: usize| [0, 1, 16, 17, 32].map(|output| (row, output));
                    for (row, output) in [0, 4.min(rows - 1), rows - 1].into_iter().flat_map(some) {
                        let of_output = &as_stored[output * 2 * k..][..2 * k];
                        let expected = reference_on(path, dtype, of_output, &x[row * k..][..k]);
                        let what = format!("{row}, {output} of {rows} rows of {k} on {path}");
                        assert_eq!(
                            out[row * n + output].to_bits(),
                            expected.to_bits(),
                            "{what}"
                        );
                    }
                }
            }
        }
    }
}

/// What a thread keeps of activations is theirs: other ones come between, of the same rows and of others, and other dtypes.
#[test]
fn activations_that_are_kept_are_no_other_ones() {
    let mut random = Random(11);
    let (n, rows) = (64, 80);
    for path in CpuPath::available() {
        for (dtype, other_dtype, k) in [
            (DType::Q4_0, DType::Q8_0, 512),
            (DType::Q4K, DType::Q6K, 512),
            (DType::Q8_0, DType::Q4K, 512),
            (DType::BF16, DType::Q4_0, 512),
            (DType::F8E4M3, DType::BF16, 512),
            // Of these there is room for a part of a row only.
            (DType::BF16, DType::BF16, 65_568),
        ] {
            if k > 512 && path != CpuPath::Amx {
                continue;
            }
            let prepare = |dtype, x: &[f32]| {
                let size = scratch_bytes(dtype, k);
                let mut prepared = vec![0; rows * size];
                if size > 0 {
                    for (x, record) in x.chunks_exact(k).zip(prepared.chunks_exact_mut(size)) {
                        prepare_row(path, dtype, x, record);
                    }
                }
                prepared
            };
            let weights = [dtype, other_dtype].map(|dtype| (dtype, random.weights(dtype, n, k)));
            let inputs: Vec<_> = (0..2).map(|_| random.activations(rows * k)).collect();
            let products: Vec<_> = weights
                .iter()
                .flat_map(|(dtype, w)| inputs.iter().map(move |x| (*dtype, w, x)))
                .map(|(dtype, w, x)| (dtype, w, x, prepare(dtype, x)))
                .collect();
            let expected: Vec<_> = products
                .iter()
                .map(|(dtype, w, x, _)| bits(&mul_mat(path, *dtype, w, n, x, rows, k)))
                .collect();
            let mut kept = [Kept::default(), Kept::default()];
            for step in 0..48 {
                // The same one two or three times, then another one.
                let which = step / 3 % products.len();
                let (dtype, w, x, prepared) = &products[which];
                let product = MulMat {
                    dtype: *dtype,
                    w,
                    packed: false,
                    k,
                    x,
                    x_stride: k,
                    prepared,
                    rows,
                };
                let some = [0..rows, 0..40, 40..rows][step / 16].clone();
                let columns = step % 4 * 16..(step % 4 + 1) * 16;
                let mut out = vec![f32::NAN; some.len() * n];
                let of_rows = product.of_rows(some.clone());
                let kept = &mut kept[usize::from(step % 7 == 6)];
                // SAFETY: those rows' outputs, and one thread.
                unsafe { of_rows.run_keeping(path, columns.clone(), (out.as_mut_ptr(), n), kept) };
                let pairs = bits(&out)
                    .into_iter()
                    .zip(&expected[which][some.start * n..]);
                for (i, (one, other)) in pairs.enumerate() {
                    if columns.contains(&(i % n)) {
                        assert_eq!(
                            one, *other,
                            "step {step} of {dtype} and {other_dtype} on {path}"
                        );
                    }
                }
                if step % 5 == 4 {
                    // Nothing is kept of these, and what was is lost.
                    let (dtype, w, x, _) = &products[(which + 1) % products.len()];
                    mul_mat(path, *dtype, w, n, x, rows, k);
                }
            }
        }
    }
}

#[test]
fn ranges_may_start_anywhere() {
    let mut random = Random(7);
    for dtype in weight_dtypes() {
        let (n, k) = (75, 256);
        let w = random.weights(dtype, n, k);
        for (path, rows) in CpuPath::available()
            .into_iter()
            .flat_map(|path| [(path, 9), (path, 40), (path, 57)])
        {
            let x = random.activations(rows * k);
            let whole = bits(&mul_mat(path, dtype, &w, n, &x, rows, k));
            for cut in [1, 15, 16, 31, 74] {
                let out = split_product(path, dtype, &w, n, &x, rows, k, &[cut..n, 0..cut]);
                assert_eq!(bits(&out), whole, "{dtype} on {path} cut at {cut}");
            }
        }
    }
}

/// More activations than a kernel has room for at once, in rows that are few, or longer than all of that room.
#[test]
fn rows_of_any_length_have_the_same_bits() {
    let mut random = Random(29);
    for dtype in [
        DType::Q8_0,
        DType::Q4_1,
        DType::NVFP4,
        DType::Q4K,
        DType::Q6K,
    ] {
        for (k, rows) in [(4096, 290), (16 << 10, 70), (48 << 10, 40), (257 << 8, 40)] {
            let n = 17;
            let mut w = random.weights(dtype, n, k);
            let x = random.activations(rows * k);
            let expected = bits(&mul_mat(CpuPath::Portable, dtype, &w, n, &x, rows, k));
            for path in CpuPath::available() {
                let out = mul_mat(path, dtype, &w, n, &x, rows, k);
                assert!(
                    bits(&out) == expected,
                    "{dtype} on {path}: k {k}, {rows} rows"
                );
            }
            // Packed, which is as many whole panels as there are.
            w.truncate(16 * dtype.row_bytes(k).expect("whole blocks"));
            let mut packed = vec![0; w.len()];
            pack::pack(dtype, k, &w, &mut packed);
            let expected: Vec<u32> = expected
                .chunks(n)
                .flat_map(|row| &row[..16])
                .copied()
                .collect();
            for path in CpuPath::available() {
                let out = product_of(path, dtype, &packed, true, 16, &x, rows, k, &splits(16, 1));
                assert!(
                    bits(&out) == expected,
                    "{dtype} packed on {path}: k {k}, {rows} rows"
                );
            }
        }
    }
}

/// The layout in its own words: panels of sixteen rows; per block (as many as their numbers fill a line, where a block has
/// a number beside its words) the numbers, then the words of all rows side by side, in the order that Q6_K's kernel reads them.
fn packed_by_the_letter(dtype: DType, w: &[u8], k: usize) -> Vec<u8> {
    let (bytes, stride) = (
        dtype.block_bytes(),
        dtype.row_bytes(k).expect("whole blocks"),
    );
    // What is moved as one: 64 bytes of a row of plain numbers, or a block.
    let bytes = if dtype.block_len() > 1 { bytes } else { 64 };
    // Its place and size.
    let number = match dtype {
        DType::Q4_0 | DType::Q5_0 | DType::Q8_0 => Some((0, 2)),
        DType::Q6K => Some((208, 2)),
        DType::MXFP4 => Some((0, 1)),
        _ => None,
    };
    let words: Vec<usize> = match dtype {
        DType::Q6K => {
            let mut order: Vec<usize> = (192..208).step_by(4).collect();
            for (half, sixteen) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                let low = 64 * half + 16 * sixteen;
                order.extend((low..low + 16).step_by(4));
                order.extend((low + 32..low + 48).step_by(4));
                let high = 128 + 32 * half + 16 * sixteen;
                order.extend((high..high + 16).step_by(4));
            }
            order
        }
        _ => (number.map_or(0, |(_, size)| size)..bytes)
            .step_by(4)
            .collect(),
    };
    let mut out = Vec::new();
    let mut panels = w.chunks_exact(16 * stride);
    for panel in &mut panels {
        let row = |r: usize| &panel[r * stride..][..stride];
        let blocks: Vec<usize> = (0..stride / bytes).collect();
        for together in blocks.chunks(number.map_or(1, |(_, size)| 4 / size)) {
            for (b, (at, size)) in together.iter().filter_map(|b| Some((b, number?))) {
                (0..16).for_each(|r| out.extend(&row(r)[b * bytes + at..][..size]));
            }
            for b in together {
                // Of F16 the lower halves of words lie before the upper ones.
                let (parts, size) = match dtype {
                    DType::F16 => (&[0, 2][..], 2),
                    _ => (&[0][..], 4),
                };
                for at in &words {
                    for part in parts {
                        let from = b * bytes + at + part;
                        (0..16).for_each(|r| out.extend(&row(r)[from..][..size]));
                    }
                }
            }
        }
    }
    out.extend(panels.remainder());
    out
}

#[test]
fn packed_weights_are_a_permutation_and_give_the_same_bits() {
    let mut random = Random(9);
    for dtype in weight_dtypes() {
        // An odd number of blocks and an even one; whole panels only, and rows left over; more blocks than are unpacked at a
        // time, so that the next ones begin amid those that are kept together.
        for (n, blocks) in [(32, 3), (171, 2), (16, 1), (203, 5), (16, 6), (112, 45)] {
            let k = blocks
                * match dtype {
                    DType::F8E4M3 => 64,
                    _ if dtype.block_len() == 1 => 32,
                    _ => dtype.block_len(),
                };
            let w = random.weights(dtype, n, k);
            assert!(pack::packs(dtype, n, k));
            let mut packed = vec![0; w.len()];
            pack::pack(dtype, k, &w, &mut packed);
            assert!(
                packed == packed_by_the_letter(dtype, &w, k),
                "{dtype} [{n}, {k}]"
            );
            // In pieces, as a whole.
            let (mut pieces, cut) = (
                vec![0; w.len()],
                16 * dtype.row_bytes(k).expect("whole blocks"),
            );
            pack::pack(dtype, k, &w[..cut], &mut pieces[..cut]);
            pack::pack(dtype, k, &w[cut..], &mut pieces[cut..]);
            assert!(pieces == packed);
            for rows in [1, 2, 3, 4, 5, 8, 9, 23, 40, 57] {
                let x = random.activations(rows * k);
                for path in CpuPath::available() {
                    let whole = bits(&mul_mat(path, dtype, &w, n, &x, rows, k));
                    let cut = n / 2 / 16 * 16;
                    for cut in [0, cut, 16] {
                        let ranges = [cut..n, 0..cut];
                        let out = product_of(path, dtype, &packed, true, n, &x, rows, k, &ranges);
                        assert!(
                            bits(&out) == whole,
                            "{dtype} [{n}, {k}] on {path}, {rows} rows in {ranges:?}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn what_cannot_be_packed_says_so() {
    assert!(!pack::packs(DType::Q4_0, 15, 64), "less than a panel");
    assert!(!pack::packs(DType::BF16, 64, 48), "no whole blocks");
    assert!(!pack::packs(DType::Q4K, 64, 128), "no whole blocks");
    assert!(!pack::packs(DType::Q8_0, 64, 0), "nothing");
    assert!(!pack::packs(DType::I32, 64, 64), "no weights");
}

#[test]
fn products_are_near_those_of_the_dequantised_weights() {
    let mut random = Random(11);
    for dtype in weight_dtypes() {
        let (n, k) = (19, 768);
        let w = random.weights(dtype, n, k);
        let x: Vec<f32> = (0..k).map(|_| random.float()).collect();
        let out = mul_mat(CpuPath::detect(), dtype, &w, n, &x, 1, k);
        for (row, y) in w.chunks(w.len() / n).zip(out) {
            let mut wide = vec![0.0; k];
            dequantize_row(dtype, row, &mut wide);
            let products = wide.iter().zip(&x).map(|(&w, &x)| w as f64 * x as f64);
            let exact: f64 = products.clone().sum();
            // An activation is at most half a step off, and a step is amax / 127 (half a unit in the last
            // place of a half more for the rounded scale); a chain of k roundings adds k · 2^-24.
            let magnitude: f64 = wide.iter().map(|w| w.abs() as f64).sum();
            let step = if dtype.block_len() > 1 {
                0.5 / 127.0 + 1.0 / 2048.0
            } else {
                0.0
            };
            let bound = magnitude * (step + k as f64 / (1u64 << 24) as f64);
            assert!(
                (y as f64 - exact).abs() <= bound,
                "{dtype}: {y}, not {exact} ± {bound}"
            );
        }
    }
}

#[test]
fn a_poisoned_activation_poisons_its_row_and_no_other() {
    let mut random = Random(13);
    for dtype in weight_dtypes() {
        let (n, k, rows) = (40, 512, 6);
        let w = random.weights(dtype, n, k);
        let clean: Vec<f32> = (0..rows * k).map(|_| random.float()).collect();
        for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = clean.clone();
            x[2 * k + 300] = poison;
            for path in CpuPath::available() {
                let good = mul_mat(path, dtype, &w, n, &clean, rows, k);
                let bad = mul_mat(path, dtype, &w, n, &x, rows, k);
                for (r, (good, bad)) in good.chunks(n).zip(bad.chunks(n)).enumerate() {
                    if r == 2 {
                        assert!(
                            bad.iter().all(|v| !v.is_finite()),
                            "{dtype} on {path}, {poison}"
                        );
                    } else {
                        assert_eq!(
                            bits(good),
                            bits(bad),
                            "{dtype} on {path}, {poison}, row {r}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn extreme_weights_and_activations_agree_on_every_path() {
    let mut random = Random(17);
    for dtype in weight_dtypes() {
        let (n, k, rows) = (33, 512, 40);
        // Any bytes at all: scales of every kind, NaN and infinities too; -128 in Q8_0.
        let bytes = n * dtype.row_bytes(k).expect("whole blocks");
        let mut w: Vec<u8> = (0..bytes).map(|_| random.bits() as u8).collect();
        w[100..140].fill(0x80);
        let mut x = random.activations(rows * k);
        for (i, v) in x.iter_mut().enumerate() {
            *v *= [1.0, 1e-38, 1e-41, 3e38, 1e7][i / k % 5];
        }
        x[0..64].fill(1.0);
        x[64..96].fill(-1.0);
        let row_bytes = bytes / n;
        for path in CpuPath::available() {
            let expected: Vec<u32> = (0..rows * n)
                .map(|i| (&w[i % n * row_bytes..][..row_bytes], &x[i / n * k..][..k]))
                .map(|(w, x)| reference_on(path, dtype, w, x).to_bits())
                .collect();
            for rows in [20, rows] {
                let out = mul_mat(path, dtype, &w, n, &x[..rows * k], rows, k);
                let what = format!("{dtype} on {path}, {rows} rows");
                assert_eq!(bits(&out), expected[..rows * n], "{what}");
            }
        }
    }
}

/// Of a block of 256 the integer that is rounded to `f32`, where it has more bits than that keeps; up to the largest ones.
#[test]
fn sums_beyond_24_bits_are_rounded_once() {
    let mut random = Random(23);
    for dtype in [DType::Q4K, DType::Q5K, DType::Q6K] {
        let (n, k, rows) = (32, 512, 40);
        let mut w = vec![0; n * dtype.row_bytes(k).expect("whole blocks")];
        let one = half::f16::ONE.to_le_bytes();
        for (i, b) in w.chunks_exact_mut(dtype.block_bytes()).enumerate() {
            // Near the largest weights, and scales; the first ones exactly, of Q6_K the most negative ones.
            for byte in b.iter_mut() {
                let bits = random.bits() as u8;
                *byte = if i < 2 { 0xff } else { 0xff - (bits & 0x11) };
            }
            if dtype == DType::Q6K {
                b[192..208].fill(0x7f);
                if i < 2 {
                    b[..192].fill(0);
                    b[192..208].fill(0x80);
                }
                b[208..].copy_from_slice(&one);
            } else {
                b[..2].copy_from_slice(&one);
                b[2..4].fill(0);
            }
        }
        let x: Vec<f32> = (0..rows * k)
            .map(|i| match (i / k, i % 256) {
                (0, _) | (_, 0) => 127.0,
                (1, _) => -127.0,
                _ => (100 + random.bits() % 28) as f32,
            })
            .collect();
        let row_bytes = w.len() / n;
        let expected: Vec<f32> = (0..rows * n)
            .map(|i| (&w[i % n * row_bytes..][..row_bytes], &x[i / n * k..][..k]))
            .map(|(w, x)| reference(dtype, w, x))
            .collect();
        assert!(
            expected.iter().all(|sum| sum.abs() > (1 << 25) as f32),
            "{dtype}"
        );
        if dtype == DType::Q6K {
            assert_eq!(expected[0], (2 * 256 * 128 * 32 * 127) as f32);
        }
        let expected = bits(&expected);
        let mut packed = vec![0; w.len()];
        pack::pack(dtype, k, &w, &mut packed);
        for (form, w, is_packed) in [("stored", &w, false), ("packed", &packed, true)] {
            for path in CpuPath::available() {
                for rows in [1, 4, 8, 16, rows] {
                    let x = &x[..rows * k];
                    let all = splits(n, 1);
                    let out = product_of(path, dtype, w, is_packed, n, x, rows, k, &all);
                    let what = format!("{dtype} {form} on {path}, {rows} rows");
                    assert_eq!(bits(&out), expected[..rows * n], "{what}");
                }
            }
        }
    }
}

/// What the system puts on a signal's stack grows by the tiles once a thread has used them.
#[cfg(target_os = "linux")]
#[test]
fn a_thread_that_used_tiles_has_room_for_a_signals_handler() {
    if !CpuPath::Amx.is_available() {
        return;
    }
    let room = std::thread::spawn(|| {
        mul_mat(
            CpuPath::Amx,
            DType::BF16,
            &[0; 64 * 16],
            16,
            &[1.0; 32],
            1,
            32,
        );
        let mut stack = std::mem::MaybeUninit::<libc::stack_t>::zeroed();
        // SAFETY: it writes what there is to where a stack's description has room, and changes nothing.
        let done = unsafe { libc::sigaltstack(std::ptr::null(), stack.as_mut_ptr()) };
        assert_eq!(done, 0);
        // SAFETY: zeros are such a description, and so is what was written.
        let stack = unsafe { stack.assume_init() };
        assert_eq!(stack.ss_flags & libc::SS_DISABLE, 0);
        // SAFETY: it reads what the system told the process at its start.
        stack.ss_size - unsafe { libc::getauxval(libc::AT_MINSIGSTKSZ) } as usize
    });
    assert!(room.join().expect("no panic") >= 32 << 10);
}

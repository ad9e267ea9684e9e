//! Weights as `f32`: the definition of every weight dtype, one row at a time.
//!
//! `take` (the embedding lookup) and tests use it; matrix multiplication never dequantises. The block
//! layouts and the order of roundings are those of GGUF's reference (`gguf-py`'s `quants.py`, which
//! computes in float32): a product, then a sum, each rounded, never fused.

use hotcell_graph::DType;

use super::lanes::{bf16_to_f32, f16_to_f32};

mod coarse;
mod grids;

/// Whether [`dequantize_row`] reads this dtype.
pub const fn is_decoded(dtype: DType) -> bool {
    use DType::{
        IQ1M, IQ1S, IQ2S, IQ2XS, IQ2XXS, IQ3S, IQ3XXS, IQ4NL, IQ4XS, Q2K, Q3K, TQ1_0, TQ2_0,
    };
    let only = matches!(
        dtype,
        Q2K | Q3K
            | IQ1S
            | IQ1M
            | IQ2XXS
            | IQ2XS
            | IQ2S
            | IQ3XXS
            | IQ3S
            | IQ4NL
            | IQ4XS
            | TQ1_0
            | TQ2_0
    );
    only || is_weight_dtype(dtype)
}

/// Whether the matrix multiplication reads this dtype as it is stored; [`dequantize_row`] does too.
pub const fn is_weight_dtype(dtype: DType) -> bool {
    matches!(
        dtype,
        DType::F32
            | DType::F16
            | DType::BF16
            | DType::F8E4M3
            | DType::Q8_0
            | DType::Q4_0
            | DType::Q4_1
            | DType::Q5_0
            | DType::Q5_1
            | DType::Q4K
            | DType::Q5K
            | DType::Q6K
            | DType::MXFP4
            | DType::NVFP4
    )
}

/// Writes one row of weights, stored as in GGUF or safetensors files at any alignment, as `f32`.
///
/// # Panics
///
/// When `dtype` is not one of [`is_decoded`], or `bytes` is not exactly the size of
/// `out.len()` elements. Both are decided by whoever verified the graph, not by file contents.
pub fn dequantize_row(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(
        dtype.row_bytes(out.len()),
        Some(bytes.len()),
        "a row of {} {dtype}",
        out.len()
    );
    let each = |out: &mut [f32], block: fn(&[u8], &mut [f32])| {
        let (len, size) = (dtype.block_len(), dtype.block_bytes());
        for (b, o) in bytes.chunks_exact(size).zip(out.chunks_exact_mut(len)) {
            block(b, o);
        }
    };
    match dtype {
        DType::F32 => {
            for (b, o) in bytes.as_chunks::<4>().0.iter().zip(out) {
                *o = f32::from_le_bytes(*b);
            }
        }
        DType::F16 => {
            for (b, o) in bytes.as_chunks::<2>().0.iter().zip(out) {
                *o = f16_to_f32(u16::from_le_bytes(*b));
            }
        }
        DType::BF16 => {
            for (b, o) in bytes.as_chunks::<2>().0.iter().zip(out) {
                *o = bf16_to_f32(u16::from_le_bytes(*b));
            }
        }
        DType::F8E4M3 => {
            for (&b, o) in bytes.iter().zip(out) {
                *o = e4m3(b);
            }
        }
        DType::Q8_0 => each(out, q8_0),
        DType::Q4_0 => each(out, q4_0),
        DType::Q4_1 => each(out, q4_1),
        DType::Q5_0 => each(out, q5_0),
        DType::Q5_1 => each(out, q5_1),
        DType::Q4K => each(out, q4_k),
        DType::Q5K => each(out, q5_k),
        DType::Q6K => each(out, q6_k),
        DType::MXFP4 => each(out, mxfp4),
        DType::NVFP4 => each(out, nvfp4),
        DType::Q2K => each(out, coarse::q2_k),
        DType::Q3K => each(out, coarse::q3_k),
        DType::IQ2XXS => each(out, coarse::iq2_xxs),
        DType::IQ2XS => each(out, coarse::iq2_xs),
        DType::IQ3XXS => each(out, coarse::iq3_xxs),
        DType::IQ1S => each(out, coarse::iq1_s),
        DType::IQ4NL => each(out, coarse::iq4_nl),
        DType::IQ3S => each(out, coarse::iq3_s),
        DType::IQ2S => each(out, coarse::iq2_s),
        DType::IQ4XS => each(out, coarse::iq4_xs),
        DType::IQ1M => each(out, coarse::iq1_m),
        DType::TQ1_0 => each(out, coarse::tq1_0),
        DType::TQ2_0 => each(out, coarse::tq2_0),
        _ => panic!("{dtype} is no weight dtype"),
    }
}

fn half(b: &[u8], at: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([b[at], b[at + 1]]))
}

fn q8_0(b: &[u8], out: &mut [f32]) {
    let d = half(b, 0);
    for (o, &q) in out.iter_mut().zip(&b[2..34]) {
        *o = q as i8 as f32 * d;
    }
}

/// Element `l` of packed nibbles, two in a byte: low nibbles first, then the high ones.
fn nibble(qs: &[u8], l: usize) -> u8 {
    let half = qs.len();
    if l < half {
        qs[l] & 15
    } else {
        qs[l - half] >> 4
    }
}

fn q4_0(b: &[u8], out: &mut [f32]) {
    let d = half(b, 0);
    for (l, o) in out.iter_mut().enumerate() {
        *o = d * (nibble(&b[2..18], l) as i32 - 8) as f32;
    }
}

fn q4_1(b: &[u8], out: &mut [f32]) {
    let (d, m) = (half(b, 0), half(b, 2));
    for (l, o) in out.iter_mut().enumerate() {
        *o = d * nibble(&b[4..20], l) as f32 + m;
    }
}

fn fifth_bit(b: &[u8], at: usize, l: usize) -> u8 {
    (b[at + l / 8] >> (l % 8) & 1) << 4
}

fn q5_0(b: &[u8], out: &mut [f32]) {
    let d = half(b, 0);
    for (l, o) in out.iter_mut().enumerate() {
        *o = d * ((nibble(&b[6..22], l) | fifth_bit(b, 2, l)) as i32 - 16) as f32;
    }
}

fn q5_1(b: &[u8], out: &mut [f32]) {
    let (d, m) = (half(b, 0), half(b, 2));
    for (l, o) in out.iter_mut().enumerate() {
        *o = d * (nibble(&b[8..24], l) | fifth_bit(b, 4, l)) as f32 + m;
    }
}

/// The 6-bit scale and minimum of sub-block `j` out of the 12 bytes of Q4_K and Q5_K.
fn scale_min(s: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (s[j] & 63, s[j + 4] & 63)
    } else {
        (
            (s[j + 4] & 15) | (s[j - 4] >> 6 << 4),
            (s[j + 4] >> 4) | (s[j] >> 6 << 4),
        )
    }
}

fn q4_k(b: &[u8], out: &mut [f32]) {
    q45_k(b, out, |b, j, l| b[16 + j / 2 * 32 + l] >> (j % 2 * 4) & 15);
}

fn q5_k(b: &[u8], out: &mut [f32]) {
    q45_k(b, out, |b, j, l| {
        (b[48 + j / 2 * 32 + l] >> (j % 2 * 4) & 15) | (b[16 + l] >> j & 1) << 4
    });
}

/// Eight sub-blocks of 32: `(d · scale) · q − (dmin · min)`.
fn q45_k(b: &[u8], out: &mut [f32], q: impl Fn(&[u8], usize, usize) -> u8) {
    let (d, dmin) = (half(b, 0), half(b, 2));
    for (j, sub) in out.chunks_exact_mut(32).enumerate() {
        let (sc, m) = scale_min(&b[4..16], j);
        let (scale, min) = (d * sc as f32, dmin * m as f32);
        for (l, o) in sub.iter_mut().enumerate() {
            *o = scale * q(b, j, l) as f32 - min;
        }
    }
}

/// Two halves of 128, each four runs of 32 with 4 low bits in `ql` and 2 high bits in `qh`; sixteen
/// signed scales: `(d · scale) · (q − 32)`.
fn q6_k(b: &[u8], out: &mut [f32]) {
    let d = half(b, 208);
    for (i, o) in out.iter_mut().enumerate() {
        let (h, run, l) = (i / 128, i % 128 / 32, i % 32);
        let low = b[h * 64 + run % 2 * 32 + l] >> (run / 2 * 4) & 15;
        let high = b[128 + h * 32 + l] >> (run * 2) & 3;
        let q = (low | high << 4) as i32 - 32;
        *o = d * (b[192 + i / 16] as i8 as f32) * q as f32;
    }
}

/// Twice the numbers of E2M1, by their code: sign, two bits of exponent, one of mantissa. Source: OCP Microscaling Formats
/// (MX) 1.0, section 5.3.3; ggml stores and computes with the doubled ones.
pub(super) const E2M1_TWICE: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// `2^(e − 128)`: half of what E8M0 says. As in ggml, 255 is no NaN.
pub(super) fn half_power(e: u8) -> f32 {
    f32::from_bits(match e {
        0 | 1 => 0x0020_0000 << e,
        _ => u32::from(e - 1) << 23,
    })
}

fn mxfp4(b: &[u8], out: &mut [f32]) {
    let d = half_power(b[0]);
    for (l, o) in out.iter_mut().enumerate() {
        *o = d * f32::from(E2M1_TWICE[usize::from(nibble(&b[1..17], l))]);
    }
}

/// What E4M3 says: a half-precision number with the same exponent and mantissa is 2^-8 of it. Source: OCP's 8-bit floating
/// point (OFP8) 1.0, which has one NaN and no infinity.
fn e4m3(x: u8) -> f32 {
    let sign = u16::from(x & 0x80) << 8;
    match x & 0x7f {
        0x7f => f32::NAN,
        rest => f16_to_f32(sign | u16::from(rest) << 7) * 256.0,
    }
}

/// Half of what E4M3 says. As in ggml, a sign does not count, and the NaN that has none is 0.
fn half_e4m3(x: u8) -> f32 {
    match x {
        0x7f => 0.0,
        // Where it says a number, half of it: see `e4m3`.
        _ => f16_to_f32(u16::from(x & 0x7f) << 7) * 128.0,
    }
}

/// Four scales, then for each of them 8 bytes of nibbles.
fn nvfp4(b: &[u8], out: &mut [f32]) {
    let (scales, qs) = b.split_at(4);
    let subs = qs.chunks_exact(8).zip(out.chunks_exact_mut(16));
    for (&scale, (qs, out)) in scales.iter().zip(subs) {
        let d = half_e4m3(scale);
        for (l, o) in out.iter_mut().enumerate() {
            *o = d * f32::from(E2M1_TWICE[usize::from(nibble(qs, l))]);
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// The bytes of a tensor in a safetensors file, by the little that our goldens need of the format.
    pub(in crate::cpu) fn tensor<'a>(file: &'a [u8], name: &str) -> &'a [u8] {
        let size: [u8; 8] = file[..8].try_into().expect("eight bytes");
        let (header, data) = file[8..].split_at(u64::from_le_bytes(size) as usize);
        let header = std::str::from_utf8(header).expect("a JSON header");
        let entry = header
            .split(&format!("\"{name}\":"))
            .nth(1)
            .expect("the tensor");
        let range = entry.split("\"data_offsets\":[").nth(1).expect("its place");
        let mut ends = range.split(']').next().expect("its end").split(',');
        let mut end = || {
            ends.next()
                .and_then(|n| n.trim().parse().ok())
                .expect("a number")
        };
        &data[end()..end()]
    }

    #[test]
    fn rows_are_bit_for_bit_those_of_gguf_py() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/blocks");
        for &dtype in DType::ALL {
            if !is_decoded(dtype) || dtype == DType::F32 {
                continue;
            }
            let file =
                std::fs::read(format!("{folder}/{dtype}.safetensors")).expect("a golden file");
            let (raw, values) = (tensor(&file, "raw"), tensor(&file, "values"));
            let mut ours = vec![0.0; values.len() / 4];
            dequantize_row(dtype, raw, &mut ours);
            for (i, (ours, theirs)) in ours.iter().zip(values.chunks_exact(4)).enumerate() {
                let theirs = f32::from_le_bytes(theirs.try_into().expect("four bytes"));
                let equal = ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan();
                assert!(equal, "{dtype}, value {i}: {ours}, not {theirs}");
            }
        }
    }
}

//! `f32` rows as block types, where GGUF's rule for it is public: the bytes that `gguf-py`'s `quants.py` writes (in float32,
//! each operation rounded), which are those of ggml's reference. The K and IQ types are searched for by heuristics of ggml's own.
//!
//! What those rules leave open is decided here. A block that holds a NaN or an infinity gets a scale of NaN, so that all of it
//! is NaN again (of MXFP4, which has none, all is infinite): a poisoned input cannot turn into a plausible number. A scale
//! whose inverse is no number is as one of 0. The exponent of MXFP4 is exact, where ggml floors a rounded logarithm, and at
//! least 0.

use hotcell_graph::DType;

use super::{
    dequant::{E2M1_TWICE, half_power},
    lanes::f32_to_f16,
};

/// Writes `x` as whole blocks.
///
/// # Panics
///
/// When `dtype` is not one of [`DType::is_encoded`], or `out` is not exactly the size of `x.len()` elements. Both are decided
/// by whoever verified the graph.
pub fn encode_row(dtype: DType, x: &[f32], out: &mut [u8]) {
    assert_eq!(
        dtype.row_bytes(x.len()),
        Some(out.len()),
        "a row of {} {dtype}",
        x.len()
    );
    let block: fn(&[f32], &mut [u8]) = match dtype {
        DType::Q8_0 => q8_0,
        DType::Q4_0 => |x, out| from_zero::<8>(x, out),
        DType::Q5_0 => |x, out| from_zero::<16>(x, out),
        DType::Q4_1 => |x, out| from_least::<15>(x, out),
        DType::Q5_1 => |x, out| from_least::<31>(x, out),
        DType::TQ1_0 => tq1_0,
        DType::TQ2_0 => tq2_0,
        DType::MXFP4 => mxfp4,
        _ => panic!("nothing is encoded as {dtype}"),
    };
    let blocks = x.chunks_exact(dtype.block_len());
    for (x, out) in blocks.zip(out.chunks_exact_mut(dtype.block_bytes())) {
        block(x, out);
    }
}

/// The value with the greatest absolute one, the first of several; NaN for a block that holds none that counts.
fn greatest(x: &[f32]) -> f32 {
    if !x.iter().all(|v| v.is_finite()) {
        return f32::NAN;
    }
    let first = x.first().copied().unwrap_or_default();
    let above = |most: f32, &v: &f32| if v.abs() > most.abs() { v } else { most };
    x.iter().fold(first, above)
}

fn inverse(d: f32) -> f32 {
    let inverse = 1.0 / d;
    if inverse.is_finite() { inverse } else { 0.0 }
}

fn put_half(out: &mut [u8], value: f32) {
    out.copy_from_slice(&f32_to_f16(value).to_le_bytes());
}

fn q8_0(x: &[f32], out: &mut [u8]) {
    let (head, qs) = out.split_at_mut(2);
    let d = greatest(x).abs() / 127.0;
    let id = inverse(d);
    put_half(head, d);
    for (q, v) in qs.iter_mut().zip(x) {
        *q = (v * id).round() as i8 as u8;
    }
}

/// Codes of four or five bits: fifth bits first, if there are, then nibbles, those of the first half low.
fn put_codes(codes: &[u8; 32], out: &mut [u8]) {
    let (fifth, nibbles) = out.split_at_mut(out.len() - 16);
    for (byte, codes) in fifth.iter_mut().zip(codes.chunks_exact(8)) {
        let bit = |all: u8, (l, code): (usize, &u8)| all | (code >> 4) << l;
        *byte = codes.iter().enumerate().fold(0, bit);
    }
    let (low, high) = codes.split_at(16);
    for (byte, (low, high)) in nibbles.iter_mut().zip(low.iter().zip(high)) {
        *byte = low & 15 | high << 4;
    }
}

/// `d · (q − HALF)`: the value furthest from zero is the least code.
fn from_zero<const HALF: u8>(x: &[f32], out: &mut [u8]) {
    let (head, rest) = out.split_at_mut(2);
    let half = f32::from(HALF);
    let d = greatest(x) / -half;
    let id = inverse(d);
    put_half(head, d);
    let mut codes = [0; 32];
    for (code, v) in codes.iter_mut().zip(x) {
        *code = ((v * id + (half + 0.5)) as u8).min(2 * HALF - 1);
    }
    put_codes(&codes, rest);
}

/// `d · q + m`, where `m` is the least value.
fn from_least<const MOST: u8>(x: &[f32], out: &mut [u8]) {
    let (head, rest) = out.split_at_mut(4);
    let (d_at, m_at) = head.split_at_mut(2);
    let first = greatest(x);
    let least = x.iter().fold(first, |a, &v| if v < a { v } else { a });
    let most = x.iter().fold(first, |a, &v| if v > a { v } else { a });
    let d = (most - least) / f32::from(MOST);
    let id = inverse(d);
    put_half(d_at, d);
    put_half(m_at, least);
    let mut codes = [0; 32];
    for (code, v) in codes.iter_mut().zip(x) {
        *code = (((v - least) * id + 0.5) as u8).min(MOST);
    }
    put_codes(&codes, rest);
}

/// What TQ1_0 and TQ2_0 have in common: 0, 1 and 2 for −d, 0 and d.
fn ternary(x: &[f32], d_at: &mut [u8]) -> [u8; 256] {
    let d = greatest(x).abs();
    let id = inverse(d);
    put_half(d_at, d);
    let mut codes = [0; 256];
    for (code, v) in codes.iter_mut().zip(x) {
        // Of shared memory another number may be read by now.
        *code = ((v * id).round().clamp(-1.0, 1.0) as i8 + 1) as u8;
    }
    codes
}

/// Five numbers to base 3 in a byte, as the fraction of 243 that they are, scaled to 256: 32 bytes, 16, and 4 of four.
fn tq1_0(x: &[f32], out: &mut [u8]) {
    let (qs, d_at) = out.split_at_mut(52);
    let codes = ternary(x, d_at);
    let mut written = qs.iter_mut();
    for (from, to, width) in [(0, 160, 32), (160, 240, 16), (240, 256, 4)] {
        for (l, byte) in written.by_ref().take(width).enumerate() {
            let digits = codes[from..to].iter().skip(l).step_by(width);
            let places = [81, 27, 9, 3, 1u16];
            let sum: u16 = digits.zip(places).map(|(q, p)| u16::from(*q) * p).sum();
            *byte = (sum * 256).div_ceil(243) as u8;
        }
    }
}

/// Two halves, each four runs of 32 with two bits in each byte.
fn tq2_0(x: &[f32], out: &mut [u8]) {
    let (qs, d_at) = out.split_at_mut(64);
    let codes = ternary(x, d_at);
    for (i, byte) in qs.iter_mut().enumerate() {
        let run = |r: usize| codes[i / 32 * 128 + r * 32 + i % 32] << (2 * r);
        *byte = run(0) | run(1) | run(2) | run(3);
    }
}

/// The code of E2M1 that is nearest; of two, the one nearer to zero.
fn mxfp4(x: &[f32], out: &mut [u8]) {
    let (head, rest) = out.split_at_mut(1);
    let amax = greatest(x).abs();
    let mut codes = [0; 32];
    let e = if amax.is_nan() {
        for (code, v) in codes.iter_mut().zip(x) {
            *code = 7 | u8::from(v.is_sign_negative()) << 3;
        }
        255
    } else {
        // Its own exponent less that of the greatest code, 4; a denormal number's is below all that there are.
        let e = ((amax.to_bits() >> 23) as u8).saturating_sub(2);
        let d = half_power(e);
        for (code, v) in codes.iter_mut().zip(x) {
            let off = |c: usize| (d * f32::from(E2M1_TWICE[c]) - v).abs();
            let nearer = |best: usize, c: usize| if off(c) < off(best) { c } else { best };
            *code = (1..16).fold(0, nearer) as u8;
        }
        e
    };
    head.fill(e);
    put_codes(&codes, rest);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::dequant::{dequantize_row, tests::tensor};

    #[test]
    fn bytes_are_those_of_gguf_py() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/blocks");
        let mut seen = 0;
        for &dtype in DType::ALL {
            if !dtype.is_encoded() {
                continue;
            }
            let file =
                std::fs::read(format!("{folder}/{dtype}.safetensors")).expect("a golden file");
            let (raw, source) = (tensor(&file, "raw"), tensor(&file, "source"));
            let source = source
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes(b.try_into().expect("four bytes")));
            let source: Vec<f32> = source.collect();
            let (len, size) = (dtype.block_len(), dtype.block_bytes());
            for (i, (x, theirs)) in source
                .chunks_exact(len)
                .zip(raw.chunks_exact(size))
                .enumerate()
            {
                let mut ours = vec![0xaa; size];
                encode_row(dtype, x, &mut ours);
                assert_eq!(ours, theirs, "{dtype}, block {i}: {x:?}");
                seen += 1;
            }
        }
        assert!(seen > 8 * 20, "only {seen} blocks");
    }

    #[test]
    fn what_is_no_number_stays_none() {
        for &dtype in DType::ALL.iter().filter(|d| d.is_encoded()) {
            for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x: Vec<f32> = (0..2 * dtype.block_len()).map(|i| i as f32).collect();
                x[5] = poison;
                let mut bytes = vec![0; 2 * dtype.block_bytes()];
                encode_row(dtype, &x, &mut bytes);
                let mut back = vec![0.0; x.len()];
                dequantize_row(dtype, &bytes, &mut back);
                let (sick, well) = back.split_at(dtype.block_len());
                assert!(
                    sick.iter().all(|v| !v.is_finite()),
                    "{dtype} {poison}: {sick:?}"
                );
                assert!(
                    well.iter().all(|v| v.is_finite()),
                    "{dtype} {poison}: {well:?}"
                );
            }
        }
    }

    #[test]
    fn the_smallest_numbers_become_zeros() {
        for &dtype in DType::ALL.iter().filter(|d| d.is_encoded()) {
            let x = vec![f32::from_bits(1); dtype.block_len()];
            let mut bytes = vec![0xff; dtype.block_bytes()];
            encode_row(dtype, &x, &mut bytes);
            let mut back = vec![1.0; x.len()];
            dequantize_row(dtype, &bytes, &mut back);
            assert!(back.iter().all(|v| *v == 0.0), "{dtype}: {back:?}");
        }
    }
}

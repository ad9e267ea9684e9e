//! Block types that are decoded only: K-quants of two and three bits, IQ and TQ. There are no products of them with 8-bit integers: what
//! multiplies them does so in f32.
//!
//! Layouts and the order of roundings are those of `gguf-py`'s `quants.py`, as for the others.

use super::{grids, half, nibble};

/// A u16 at a byte.
fn word(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

/// A u32 at a byte.
fn long(b: &[u8], at: usize) -> u32 {
    u32::from(word(b, at)) | u32::from(word(b, at + 2)) << 16
}

/// Element `i` of two-bit numbers: two groups of 32 bytes, each four runs of 32.
fn crumb(qs: &[u8], i: usize) -> u8 {
    qs[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3
}

/// Half `j` of bytes of two scales, the low one first.
fn scale4(b: &[u8], j: usize) -> u8 {
    b[j / 2] >> (j % 2 * 4) & 15
}

/// Sixteen sub-blocks: `(d · scale) · q − (dmin · min)`.
pub(super) fn q2_k(b: &[u8], out: &mut [f32]) {
    let (d, dmin) = (half(b, 80), half(b, 82));
    for (i, o) in out.iter_mut().enumerate() {
        let s = b[i / 16];
        let (scale, min) = (d * f32::from(s & 15), dmin * f32::from(s >> 4));
        *o = scale * f32::from(crumb(&b[16..80], i)) - min;
    }
}

/// Sixteen sub-blocks with scales of six bits; a third bit that is not set takes 4 off.
pub(super) fn q3_k(b: &[u8], out: &mut [f32]) {
    let d = half(b, 108);
    let scales = &b[96..108];
    for (i, o) in out.iter_mut().enumerate() {
        let j = i / 16;
        let low = scales[j % 8] >> (j / 8 * 4) & 15;
        let high = scales[8 + j % 4] >> (j / 4 * 2) & 3;
        let scale = d * f32::from((low | high << 4) as i8 - 32);
        let set = b[i % 32] >> (i / 32) & 1;
        let q = crumb(&b[32..96], i) as i8 - ((set ^ 1) << 2) as i8;
        *o = scale * f32::from(q);
    }
}

/// Five ternary digits in a byte, as a fraction of 256.
pub(super) fn tq1_0(b: &[u8], out: &mut [f32]) {
    let d = half(b, 52);
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    for (i, o) in out.iter_mut().enumerate() {
        let (byte, digit) = match i {
            0..160 => (i % 32, i / 32),
            160..240 => (32 + i % 16, (i - 160) / 16),
            _ => (48 + i % 4, (i - 240) / 4),
        };
        let q = b[byte].wrapping_mul(POWERS[digit]);
        let q = ((u16::from(q) * 3) >> 8) as i8 - 1;
        *o = d * f32::from(q);
    }
}

pub(super) fn tq2_0(b: &[u8], out: &mut [f32]) {
    let d = half(b, 64);
    for (i, o) in out.iter_mut().enumerate() {
        *o = d * f32::from(crumb(&b[..64], i) as i8 - 1);
    }
}

/// Levels that lie closer near 0.
const LEVELS: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

pub(super) fn iq4_nl(b: &[u8], out: &mut [f32]) {
    let d = half(b, 0);
    for (l, o) in out.iter_mut().enumerate() {
        *o = d * f32::from(LEVELS[usize::from(nibble(&b[2..18], l))]);
    }
}

pub(super) fn iq4_xs(b: &[u8], out: &mut [f32]) {
    let (d, high) = (half(b, 0), word(b, 2));
    let subs = b[8..136].chunks_exact(16).zip(out.chunks_exact_mut(32));
    for (j, (qs, out)) in subs.enumerate() {
        let high = (high >> (2 * j) & 3) as u8;
        let scale = d * f32::from((scale4(&b[4..8], j) | high << 4) as i8 - 32);
        for (l, o) in out.iter_mut().enumerate() {
            *o = scale * f32::from(LEVELS[usize::from(nibble(qs, l))]);
        }
    }
}

/// Levels of IQ2's codebooks.
const TWO: [u8; 4] = [0x08, 0x19, 0x2b, 0];
/// Levels of IQ3's, of three bits.
const XXS: [u8; 8] = [0x04, 0x0c, 0x14, 0x1c, 0x24, 0x2c, 0x34, 0x3e];
const S: [u8; 8] = [1, 3, 5, 7, 9, 11, 13, 15];

/// Eight signs of which seven are given: they are even in number.
fn signs(seven: u32) -> u8 {
    let seven = (seven & 127) as u8;
    seven | (seven.count_ones() as u8 & 1) << 7
}

fn sign(signs: u8, i: usize) -> f32 {
    match signs >> i & 1 {
        0 => 1.0,
        _ => -1.0,
    }
}

/// Eight numbers of a point of IQ2's.
fn two(point: u16, scale: f32, signs: u8, out: &mut [f32]) {
    for (i, o) in out.iter_mut().enumerate() {
        let level = TWO[usize::from(point >> (2 * i) & 3)];
        *o = scale * f32::from(level) * sign(signs, i);
    }
}

/// Eight numbers of two points of IQ3's.
fn three(points: [u16; 2], levels: &[u8; 8], scale: f32, signs: u8, out: &mut [f32]) {
    for (i, o) in out.iter_mut().enumerate() {
        let level = levels[usize::from(points[i / 4] >> (3 * (i % 4)) & 7)];
        *o = scale * f32::from(level) * sign(signs, i);
    }
}

pub(super) fn iq2_xxs(b: &[u8], out: &mut [f32]) {
    let d = half(b, 0);
    let groups = b[2..66].chunks_exact(8).zip(out.chunks_exact_mut(32));
    for (qs, out) in groups {
        let rest = long(qs, 4);
        let scale = d * (0.5 + (rest >> 28) as f32) * 0.25;
        for (k, out) in out.chunks_exact_mut(8).enumerate() {
            let point = grids::IQ2_XXS[usize::from(qs[k])];
            two(point, scale, signs(rest >> (7 * k)), out);
        }
    }
}

pub(super) fn iq2_xs(b: &[u8], out: &mut [f32]) {
    let d = half(b, 0);
    for (k, out) in out.chunks_exact_mut(8).enumerate() {
        let q = word(b, 2 + 2 * k);
        let scale = d * (0.5 + f32::from(scale4(&b[66..74], k / 2))) * 0.25;
        let point = grids::IQ2_XS[usize::from(q & 511)];
        two(point, scale, signs(u32::from(q >> 9)), out);
    }
}

pub(super) fn iq2_s(b: &[u8], out: &mut [f32]) {
    let d = half(b, 0);
    for (k, out) in out.chunks_exact_mut(8).enumerate() {
        let high = u16::from(b[66 + k / 4] >> (2 * (k % 4)) & 3);
        let scale = d * (0.5 + f32::from(scale4(&b[74..82], k / 2))) * 0.25;
        let point = grids::IQ2_S[usize::from(u16::from(b[2 + k]) | high << 8)];
        two(point, scale, b[34 + k], out);
    }
}

pub(super) fn iq3_xxs(b: &[u8], out: &mut [f32]) {
    let d = half(b, 0);
    for (k, out) in out.chunks_exact_mut(8).enumerate() {
        let rest = long(b, 66 + k / 4 * 4);
        let scale = d * (0.5 + (rest >> 28) as f32) * 0.5;
        let points = [0, 1].map(|i| grids::IQ3_XXS[usize::from(b[2 + 2 * k + i])]);
        three(points, &XXS, scale, signs(rest >> (7 * (k % 4))), out);
    }
}

pub(super) fn iq3_s(b: &[u8], out: &mut [f32]) {
    let d = half(b, 0);
    for (k, out) in out.chunks_exact_mut(8).enumerate() {
        let scale = d * f32::from(1 + 2 * scale4(&b[106..110], k / 4));
        let points = [2 * k, 2 * k + 1].map(|i| {
            let high = u16::from(b[66 + i / 8] >> (i % 8) & 1);
            grids::IQ3_S[usize::from(u16::from(b[2 + i]) | high << 8)]
        });
        three(points, &S, scale, b[74 + k], out);
    }
}

/// Eight numbers of a point of IQ1's, all a little more or less.
fn one(point: u16, scale: f32, less: bool, out: &mut [f32]) {
    let delta = if less { -0.125 } else { 0.125 };
    for (i, o) in out.iter_mut().enumerate() {
        let level = (point >> (2 * i) & 3) as i8 - 1;
        *o = scale * (f32::from(level) + delta);
    }
}

pub(super) fn iq1_s(b: &[u8], out: &mut [f32]) {
    let d = half(b, 0);
    for (k, out) in out.chunks_exact_mut(8).enumerate() {
        let rest = word(b, 34 + k / 4 * 2);
        let scale = d * f32::from(2 * (rest >> 12 & 7) + 1);
        let high = rest >> (3 * (k % 4)) & 7;
        let point = grids::IQ1[usize::from(u16::from(b[2 + k]) | high << 8)];
        one(point, scale, rest & 0x8000 != 0, out);
    }
}

/// The scale of all lies in the highest four bits of four words.
pub(super) fn iq1_m(b: &[u8], out: &mut [f32]) {
    let scales: [u16; 4] = std::array::from_fn(|i| word(b, 48 + 2 * i));
    let bits = (0..4).fold(0, |d, i| d | scales[i] >> 12 << (4 * i));
    let d = half(&bits.to_le_bytes(), 0);
    for (k, out) in out.chunks_exact_mut(8).enumerate() {
        let j = k / 2;
        let scale = d * f32::from(2 * (scales[j / 4] >> (3 * (j % 4)) & 7) + 1);
        let high = scale4(&b[32..48], k);
        let point = grids::IQ1[usize::from(u16::from(b[k]) | u16::from(high & 7) << 8)];
        one(point, scale, high & 8 != 0, out);
    }
}

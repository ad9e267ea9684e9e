//! The 32-element block dtypes: Q4_0, Q4_1, Q5_0, Q5_1 (nibbles, with a fifth bit, with a minimum) and Q8_0.

use std::ptr;

use super::format::Format;
use super::simd::Simd;
use crate::cpu::quantize::Q8_RECORD;

/// A block of sixteen rows.
#[derive(Clone, Copy)]
pub(super) struct Block<S: Simd> {
    /// Word `g` holds elements `4 g .. 4 g + 4`.
    q: [S::I; 8],
    d: S::F,
    /// Where the dtype has one.
    m: S::F,
}

/// `acc = fma(f32(S) · da, d, acc)`, and with a minimum `acc = fma(f32(Σ q) · da, m, acc)` after it.
///
/// # Safety
///
/// As for [`Format::step`].
#[inline(always)]
unsafe fn step<S: Simd, const R: usize, const P: usize>(
    w: &[Block<S>; P],
    x: [*const u8; R],
    acc: &mut [[S::F; P]; R],
    dot: impl Fn(S::I, S::I, S::I) -> S::I,
    // `Σ q · zero`: what the weights' zero point makes too much, as a shift of `−Σ q`.
    correct: impl Fn(S::I) -> S::I,
    minimum: bool,
) {
    // SAFETY: the caller's promise; all reads are within the record.
    unsafe {
        let word = |x: *const u8, at: usize| ptr::read_unaligned(x.add(at).cast::<i32>());
        let float = |x: *const u8, at: usize| ptr::read_unaligned(x.add(at).cast::<f32>());
        let mut sums: [[S::I; P]; R] =
            std::array::from_fn(|r| [correct(S::splat_i(word(x[r], 36))); P]);
        for g in 0..8 {
            for r in 0..R {
                let q = S::splat_i(word(x[r], 4 * g));
                for p in 0..P {
                    sums[r][p] = dot(sums[r][p], w[p].q[g], q);
                }
            }
        }
        for r in 0..R {
            let da = S::splat_f(float(x[r], 32));
            for p in 0..P {
                acc[r][p] = S::fma(S::mul(S::to_f(sums[r][p]), da), w[p].d, acc[r][p]);
            }
            if minimum {
                let sum = S::splat_f(float(x[r], 40));
                for p in 0..P {
                    acc[r][p] = S::fma(sum, w[p].m, acc[r][p]);
                }
            }
        }
    }
}

/// Q4_0, Q4_1, Q5_0 and Q5_1: scale, minimum if any, 32 fifth bits if any, 16 bytes of nibbles.
pub(super) struct Nibbles<const FIVE: bool, const MINIMUM: bool>;

impl<const FIVE: bool, const MINIMUM: bool> Format for Nibbles<FIVE, MINIMUM> {
    const LEN: usize = 32;
    const BYTES: usize = 18 + 4 * FIVE as usize + 2 * MINIMUM as usize;
    const RECORD: usize = Q8_RECORD;
    const PLAIN: bool = false;

    type Block<S: Simd> = Block<S>;

    #[inline(always)]
    unsafe fn unpack<S: Simd>(from: *const u8, stride: usize) -> Block<S> {
        // SAFETY: the caller's promise; all reads are within the block.
        unsafe {
            let [d, m] = S::halves(S::gather(from, stride));
            let nibbles = S::gather4(from.add(Self::BYTES - 16), stride);
            let mask = S::splat_i(0x0f0f_0f0f);
            let mut q: [S::I; 8] = std::array::from_fn(|g| {
                let word = nibbles[g % 4];
                S::and(if g < 4 { word } else { S::shr::<4>(word) }, mask)
            });
            if FIVE {
                let bits = S::gather(from.add(Self::BYTES - 20), stride);
                for (g, q) in q.iter_mut().enumerate() {
                    let four = S::shr_by(bits, 4 * g as u32);
                    // Bit i of the four to bit 4 of byte i.
                    let low = S::or(
                        S::shl::<4>(S::and(four, S::splat_i(1))),
                        S::shl::<11>(S::and(four, S::splat_i(2))),
                    );
                    let high = S::or(
                        S::shl::<18>(S::and(four, S::splat_i(4))),
                        S::shl::<25>(S::and(four, S::splat_i(8))),
                    );
                    *q = S::or(*q, S::or(low, high));
                }
            }
            Block { q, d, m }
        }
    }

    #[inline(always)]
    unsafe fn step<S: Simd, const R: usize, const P: usize>(
        w: &[Block<S>; P],
        x: [*const u8; R],
        _count: usize,
        acc: &mut [[S::F; P]; R],
    ) {
        // SAFETY: the caller's promise.
        let correct = |negative: S::I| unsafe {
            match (MINIMUM, FIVE) {
                (true, _) => S::splat_i(0),
                (false, false) => S::shl::<3>(negative),
                (false, true) => S::shl::<4>(negative),
            }
        };
        // SAFETY: the caller's promise. Weights are at most 31.
        unsafe { step(w, x, acc, |a, w, x| S::dot_u7(a, w, x), correct, MINIMUM) }
    }
}

/// Q8_0: scale and 32 signed bytes.
pub(super) struct Bytes;

impl Format for Bytes {
    const LEN: usize = 32;
    const BYTES: usize = 34;
    const RECORD: usize = Q8_RECORD;
    const PLAIN: bool = false;

    type Block<S: Simd> = Block<S>;

    #[inline(always)]
    unsafe fn unpack<S: Simd>(from: *const u8, stride: usize) -> Block<S> {
        // SAFETY: the caller's promise; all reads are within the block.
        unsafe {
            let [d, m] = S::halves(S::gather(from, stride));
            let (low, high) = (S::gather4(from.add(2), stride), S::gather4(from.add(18), stride));
            let bias = S::splat_i(0x8080_8080_u32 as i32);
            let q = std::array::from_fn(|g| {
                let word = if g < 4 { low[g] } else { high[g - 4] };
                if S::BIASED { S::xor(word, bias) } else { word }
            });
            Block { q, d, m }
        }
    }

    #[inline(always)]
    unsafe fn step<S: Simd, const R: usize, const P: usize>(
        w: &[Block<S>; P],
        x: [*const u8; R],
        _count: usize,
        acc: &mut [[S::F; P]; R],
    ) {
        // SAFETY: the caller's promise.
        let correct = |negative: S::I| unsafe {
            if S::BIASED { S::shl::<7>(negative) } else { S::splat_i(0) }
        };
        // SAFETY: the caller's promise. Activations are never −128.
        unsafe { step(w, x, acc, |a, w, x| S::dot_i8(a, w, x), correct, false) }
    }
}

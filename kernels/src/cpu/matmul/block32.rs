//! The 32-element block dtypes: Q4_0, Q4_1, Q5_0, Q5_1 (nibbles, with a fifth bit, with a minimum), Q8_0 and MXFP4.

use std::ops::Range;
use std::ptr;

use super::format::Format;
use super::place::{Beside, Place};
use super::simd::{Simd, together};
use crate::cpu::{dequant::E2M1_TWICE, quantize::Q8_RECORD};

/// A block of sixteen rows.
#[derive(Clone, Copy)]
pub(super) struct Block<S: Simd> {
    /// Word `g` holds elements `4 g .. 4 g + 4`.
    pub q: [S::I; 8],
    pub d: S::F,
    /// Where the dtype has one.
    pub m: S::F,
}

/// What tells the dtypes apart once they are unpacked; constants everywhere.
struct Kind {
    signed: bool,
    /// What was added to the weights to make them unsigned: 0, 8, 12, 16 or 128.
    zero: u32,
    /// The largest weight, unsigned.
    most: u32,
    minimum: bool,
}

/// # Safety
///
/// `at + 4` bytes are readable at `x`.
#[inline(always)]
unsafe fn word(x: *const u8, at: usize) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { ptr::read_unaligned(x.add(at).cast()) }
}

/// What is added to twice the numbers of E2M1 to make them unsigned.
pub(super) const E2M1_ZERO: i8 = 12;

/// [`E2M1_TWICE`], unsigned.
pub(super) const E2M1_UNSIGNED: [u8; 16] = {
    let mut table = [0; 16];
    let mut code = 0;
    while code < table.len() {
        table[code] = (E2M1_TWICE[code] + E2M1_ZERO) as u8;
        code += 1;
    }
    table
};

/// [`E2M1_ZERO`] times a word.
///
/// # Safety
///
/// As for [`Simd`].
#[inline(always)]
pub(super) unsafe fn twelve<S: Simd>(a: S::I) -> S::I {
    // SAFETY: the caller's promise.
    unsafe { S::add(S::shl::<3>(a), S::shl::<2>(a)) }
}

/// Adds the products of some words of weights, at most as many as [`together`] says.
///
/// # Safety
///
/// As for [`Format::step`].
#[inline(always)]
unsafe fn small_weights<S: Simd, const R: usize, const P: usize>(
    w: &[Block<S>; P],
    x: [*const u8; R],
    words: Range<usize>,
    sums: &mut [[S::I; P]; R],
) {
    // SAFETY: the caller's promise; all reads are within the record.
    unsafe {
        let mut small = [[S::open(sums[0][0]); P]; R];
        for r in 0..R {
            small[r] = [S::open(sums[r][0]); P];
        }
        for g in words {
            for r in 0..R {
                let q = S::splat_i(word(x[r], 4 * g) as i32);
                for p in 0..P {
                    small[r][p] = S::add_small(small[r][p], w[p].q[g], q);
                    if R > 1 {
                        S::settle(&mut small[r][p]);
                    }
                }
            }
        }
        for r in 0..R {
            for p in 0..P {
                sums[r][p] = S::close(sums[r][p], small[r][p]);
            }
        }
    }
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
    Kind {
        signed,
        zero,
        most,
        minimum,
    }: Kind,
) {
    // SAFETY: the caller's promise; all reads are within the record.
    unsafe {
        let mut sums = [[S::splat_i(0); P]; R];
        for r in 0..R {
            let negative = S::splat_i(word(x[r], 36) as i32);
            sums[r] = [match zero {
                8 => S::shl::<3>(negative),
                12 => twelve::<S>(negative),
                16 => S::shl::<4>(negative),
                128 => S::shl::<7>(negative),
                _ => S::splat_i(0),
            }; P];
        }
        if signed {
            for g in 0..8 {
                for r in 0..R {
                    let q = S::splat_i(word(x[r], 4 * g) as i32);
                    for p in 0..P {
                        sums[r][p] = S::dot_i8(sums[r][p], w[p].q[g], q);
                        if R > 1 {
                            S::settle_i(&mut sums[r][p]);
                        }
                    }
                }
            }
        } else {
            let some = together::<S>(8, most);
            for first in (0..8).step_by(some) {
                small_weights::<S, R, P>(w, x, first..first + some, &mut sums);
            }
        }
        for r in 0..R {
            let da = S::splat_f(f32::from_bits(word(x[r], 32)));
            for p in 0..P {
                acc[r][p] = S::fma(S::mul(S::to_f(sums[r][p]), da), w[p].d, acc[r][p]);
            }
            if minimum {
                let sum = S::splat_f(f32::from_bits(word(x[r], 40)));
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
    const MANY: (usize, usize) = (3, 4);
    const BESIDE: Beside = if MINIMUM { Beside::None } else { Beside::First };

    type Block<S: Simd> = Block<S>;

    #[inline(always)]
    unsafe fn unpack<S: Simd, W: Place>(from: W, into: *mut Block<S>) {
        // SAFETY: the caller's promise; all reads are within the block.
        unsafe {
            from.ask::<S, Self>(0, 1);
            let [d, m] = if MINIMUM {
                S::halves(from.word::<S, Self>(0))
            } else {
                [from.half::<S, Self>(); 2]
            };
            let nibbles = from.words4::<S, Self>(Self::BYTES - 16);
            let mask = S::splat_i(0x0f0f_0f0f);
            let mut q = [mask; 8];
            for g in 0..4 {
                q[g] = S::and(nibbles[g], mask);
                q[4 + g] = S::and(S::shr::<4>(nibbles[g]), mask);
            }
            if FIVE {
                let bits = from.word::<S, Self>(Self::BYTES - 20);
                for (g, q) in q.iter_mut().enumerate() {
                    *q = S::or(*q, S::fifth_bits(bits, g as u32));
                }
            }
            into.write(Block { q, d, m });
        }
    }

    #[inline(always)]
    unsafe fn step<S: Simd, const R: usize, const P: usize>(
        w: &[Block<S>; P],
        x: [*const u8; R],
        _count: usize,
        acc: &mut [[S::F; P]; R],
    ) {
        let zero = match (MINIMUM, FIVE) {
            (true, _) => 0,
            (false, false) => 8,
            (false, true) => 16,
        };
        // SAFETY: the caller's promise. Weights are at most 31.
        unsafe {
            step(
                w,
                x,
                acc,
                Kind {
                    signed: false,
                    zero,
                    most: if FIVE { 31 } else { 15 },
                    minimum: MINIMUM,
                },
            )
        }
    }
}

/// Q8_0: scale and 32 signed bytes.
pub(super) struct Bytes;

impl Format for Bytes {
    const LEN: usize = 32;
    const BYTES: usize = 34;
    const RECORD: usize = Q8_RECORD;
    const PLAIN: bool = false;
    const MANY: (usize, usize) = (3, 4);
    const BESIDE: Beside = Beside::First;

    type Block<S: Simd> = Block<S>;

    #[inline(always)]
    unsafe fn unpack<S: Simd, W: Place>(from: W, into: *mut Block<S>) {
        // SAFETY: the caller's promise; all reads are within the block.
        unsafe {
            from.ask::<S, Self>(0, 1);
            let d = from.half::<S, Self>();
            let (low, high) = (from.words4::<S, Self>(2), from.words4::<S, Self>(18));
            let bias = S::splat_i(0x8080_8080_u32 as i32);
            let mut q = [bias; 8];
            for g in 0..8 {
                let word = if g < 4 { low[g] } else { high[g - 4] };
                q[g] = if S::BIASED { S::xor(word, bias) } else { word };
            }
            into.write(Block { q, d, m: d });
        }
    }

    #[inline(always)]
    unsafe fn step<S: Simd, const R: usize, const P: usize>(
        w: &[Block<S>; P],
        x: [*const u8; R],
        _count: usize,
        acc: &mut [[S::F; P]; R],
    ) {
        let zero = if S::BIASED { 128 } else { 0 };
        // SAFETY: the caller's promise. Activations are never −128.
        unsafe {
            step(
                w,
                x,
                acc,
                Kind {
                    signed: true,
                    zero,
                    most: 255,
                    minimum: false,
                },
            )
        }
    }
}

/// MXFP4: the exponent of a power of two, and 16 bytes of nibbles that name numbers of E2M1.
pub(super) struct Mxfp4;

impl Format for Mxfp4 {
    const LEN: usize = 32;
    const BYTES: usize = 17;
    const RECORD: usize = Q8_RECORD;
    const PLAIN: bool = false;
    const MANY: (usize, usize) = (3, 4);
    const BESIDE: Beside = Beside::FirstByte;

    type Block<S: Simd> = Block<S>;

    #[inline(always)]
    unsafe fn unpack<S: Simd, W: Place>(from: W, into: *mut Block<S>) {
        // SAFETY: the caller's promise; all reads are within the block.
        unsafe {
            from.ask::<S, Self>(0, 1);
            // 2^(e − 128) is below what an exponent field can say where e is 0 or 1: it is the product, without rounding,
            // of two powers that are not, 2^(h − 64) and 2^(e − h − 64) with h half of e.
            let e = from.byte::<S, Self>();
            let bias = S::splat_i(127 - 64);
            let half = S::shr::<1>(e);
            let rest = S::add(half, S::and(e, S::splat_i(1)));
            let power = S::bits_f(S::shl::<23>(S::add(half, bias)));
            let other = S::bits_f(S::shl::<23>(S::add(rest, bias)));
            let d = S::mul(power, other);
            let nibbles = from.words4::<S, Self>(1);
            let mask = S::splat_i(0x0f0f_0f0f);
            let mut q = [mask; 8];
            for g in 0..4 {
                q[g] = S::lookup(&E2M1_UNSIGNED, S::and(nibbles[g], mask));
                let high = S::and(S::shr::<4>(nibbles[g]), mask);
                q[4 + g] = S::lookup(&E2M1_UNSIGNED, high);
            }
            into.write(Block { q, d, m: d });
        }
    }

    #[inline(always)]
    unsafe fn step<S: Simd, const R: usize, const P: usize>(
        w: &[Block<S>; P],
        x: [*const u8; R],
        _count: usize,
        acc: &mut [[S::F; P]; R],
    ) {
        // SAFETY: the caller's promise. Weights are at most 24.
        unsafe {
            step(
                w,
                x,
                acc,
                Kind {
                    signed: false,
                    zero: E2M1_ZERO as u32,
                    most: 24,
                    minimum: false,
                },
            )
        }
    }
}

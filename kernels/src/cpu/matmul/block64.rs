//! The 64-element block dtype: NVFP4, four sub-blocks of sixteen with a scale each.

use std::ptr;

use super::block32::{E2M1_UNSIGNED, twelve};
use super::format::Format;
use super::place::{Beside, Place};
use super::simd::{Simd, together};
use crate::cpu::quantize::Q8_RECORD;

/// A block of sixteen rows.
#[derive(Clone, Copy)]
pub(super) struct Block<S: Simd> {
    /// Word `g` holds elements `4 g .. 4 g + 4`.
    pub q: [S::I; 16],
    pub d: [S::F; 4],
}

/// NVFP4: four scales in E4M3, and for each 8 bytes of nibbles that name numbers of E2M1.
pub(super) struct Nvfp4;

/// The word at `x + at`, in every lane.
///
/// # Safety
///
/// As for [`Format::step`]; `at` is within the records.
#[inline(always)]
unsafe fn word<S: Simd>(x: *const u8, at: usize) -> S::I {
    // SAFETY: the caller's promise.
    unsafe { S::splat_i(ptr::read_unaligned(x.add(at).cast())) }
}

/// Half of each of the four numbers of E4M3 in a word, whose sign does not count; 0 for the code of a NaN, which has none.
///
/// # Safety
///
/// As for [`Simd`].
#[inline(always)]
unsafe fn scales<S: Simd>(bytes: S::I) -> [S::F; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let seven = S::and(bytes, S::splat_i(0x7f7f_7f7f));
        // The NaN's seven bits are all ones, to which adding one carries into the eighth; that one spread over the seven
        // takes them away. The last shift brings an eighth bit into the byte below.
        let carried = S::add(seven, S::splat_i(0x0101_0101));
        let unsigned = S::and(
            S::xor(bytes, S::splat_i(-1)),
            S::splat_i(0x8080_8080_u32 as i32),
        );
        let carried = S::and(carried, unsigned);
        let two = S::or(S::shr::<1>(carried), S::shr::<2>(carried));
        let four = S::or(two, S::shr::<2>(two));
        let numbers = S::xor(seven, S::or(four, S::shr::<4>(four)));
        // As half-precision numbers they are 2^-8 of what they are; half of that is wanted.
        let even = S::splat_i(0x007f_007f);
        let [a, c] = S::halves(S::shl::<7>(S::and(numbers, even)));
        let [b, d] = S::halves(S::shl::<7>(S::and(S::shr::<8>(numbers), even)));
        let unit = S::splat_f(128.0);
        [
            S::mul(a, unit),
            S::mul(b, unit),
            S::mul(c, unit),
            S::mul(d, unit),
        ]
    }
}

impl Format for Nvfp4 {
    const LEN: usize = 64;
    const BYTES: usize = 36;
    const RECORD: usize = 2 * Q8_RECORD;
    const PLAIN: bool = false;
    const FEW: usize = 4;
    const BESIDE: Beside = Beside::None;

    type Block<S: Simd> = Block<S>;

    #[inline(always)]
    unsafe fn unpack<S: Simd, W: Place>(from: W, into: *mut Block<S>) {
        // SAFETY: the caller's promise; all reads are within the block.
        unsafe {
            from.ask::<S, Self>(0, 1);
            let d = scales::<S>(from.word::<S, Self>(0));
            let words = [from.words4::<S, Self>(4), from.words4::<S, Self>(20)];
            let mask = S::splat_i(0x0f0f_0f0f);
            let mut q = [mask; 16];
            for j in 0..4 {
                for i in 0..2 {
                    let nibbles = words[j / 2][j % 2 * 2 + i];
                    let high = S::and(S::shr::<4>(nibbles), mask);
                    q[4 * j + i] = S::lookup(&E2M1_UNSIGNED, S::and(nibbles, mask));
                    q[4 * j + 2 + i] = S::lookup(&E2M1_UNSIGNED, high);
                }
            }
            into.write(Block { q, d });
        }
    }

    /// `acc = fma(f32(S_j) · da, d_j, acc)` for each sub-block.
    #[inline(always)]
    unsafe fn step<S: Simd, const R: usize, const P: usize>(
        w: &[Block<S>; P],
        x: [*const u8; R],
        _count: usize,
        acc: &mut [[S::F; P]; R],
    ) {
        const { assert!(together::<S>(4, 24) == 4) };
        // SAFETY: the caller's promise; all reads are within the records. Weights are at most 24.
        unsafe {
            let ones = S::splat_i(0x0101_0101);
            for j in 0..4 {
                let record = j / 2 * Q8_RECORD;
                let from = record + j % 2 * 16;
                let mut sums = [[S::splat_i(0); P]; R];
                for r in 0..R {
                    // The record has the negative sum of two sub-blocks. That of the first is made here, which is the
                    // complement and one more; the second's is what is left.
                    let mut first = S::splat_i(0);
                    for g in 0..4 {
                        first = S::dot_u7(first, ones, word::<S>(x[r], record + 4 * g));
                    }
                    let negative = if j % 2 == 0 {
                        S::add(S::xor(first, S::splat_i(-1)), S::splat_i(1))
                    } else {
                        S::add(first, word::<S>(x[r], record + 36))
                    };
                    sums[r] = [twelve::<S>(negative); P];
                }
                let mut small = [[S::open(sums[0][0]); P]; R];
                for r in 0..R {
                    small[r] = [S::open(sums[r][0]); P];
                }
                for g in 0..4 {
                    for r in 0..R {
                        let q = word::<S>(x[r], from + 4 * g);
                        for p in 0..P {
                            small[r][p] = S::add_small(small[r][p], w[p].q[4 * j + g], q);
                            if R > 1 {
                                S::settle(&mut small[r][p]);
                            }
                        }
                    }
                }
                for r in 0..R {
                    let da = S::bits_f(word::<S>(x[r], record + 32));
                    for p in 0..P {
                        sums[r][p] = S::close(sums[r][p], small[r][p]);
                        acc[r][p] = S::fma(S::mul(S::to_f(sums[r][p]), da), w[p].d[j], acc[r][p]);
                    }
                }
            }
        }
    }
}

//! The 256-element block dtypes: Q4_K, Q5_K (8 sub-blocks with 6-bit scales and minima) and Q6_K (16
//! sub-blocks with signed 8-bit scales).

use std::ptr;

use super::format::Format;
use super::simd::Simd;
use crate::cpu::quantize::Q8K_RECORD;

/// The word at `x + at`, in every lane.
///
/// # Safety
///
/// As for [`Format::step`]; `at` is within the record.
#[inline(always)]
unsafe fn word<S: Simd>(x: *const u8, at: usize) -> S::I {
    // SAFETY: the caller's promise.
    unsafe { S::splat_i(ptr::read_unaligned(x.add(at).cast())) }
}

/// The record's `da`, in every lane.
///
/// # Safety
///
/// As for [`Format::step`].
#[inline(always)]
unsafe fn da<S: Simd>(x: *const u8) -> S::F {
    // SAFETY: the caller's promise.
    unsafe { S::splat_f(ptr::read_unaligned(x.add(256).cast())) }
}

/// Q4_K and Q5_K.
pub(super) struct Mixed<const FIVE: bool>;

/// A super-block of sixteen rows.
#[derive(Clone, Copy)]
pub(super) struct MixedBlock<S: Simd> {
    q: [[S::I; 8]; 8],
    scales: [S::F; 8],
    /// Pairs of 16-bit minima of sub-blocks 0 2, 1 3, 4 6, 5 7.
    minima: [S::I; 4],
    d: S::F,
    dmin: S::F,
}

impl<const FIVE: bool> Format for Mixed<FIVE> {
    const LEN: usize = 256;
    const BYTES: usize = 144 + 32 * FIVE as usize;
    const RECORD: usize = Q8K_RECORD;
    const PLAIN: bool = false;

    type Block<S: Simd> = MixedBlock<S>;

    #[inline(always)]
    unsafe fn unpack<S: Simd>(from: *const u8, stride: usize, into: *mut MixedBlock<S>) {
        // SAFETY: the caller's promise; all reads are within the super-(*into).
        unsafe {
            // d, dmin and the 12 bytes of scales. Sub-blocks 0..4 have their 6 bits in the low bits of the
            // first two words; 4..8 have 4 bits in the third and 2 in the upper bits of the others.
            let [ends, a, b, c] = S::gather4(from, stride);
            let [d, dmin] = S::halves(ends);
            let six = S::splat_i(0x3f3f_3f3f);
            let four = S::splat_i(0x0f0f_0f0f);
            let upper = S::splat_i(0x3030_3030);
            let scales = [
                S::and(a, six),
                S::or(S::and(c, four), S::and(S::shr::<2>(a), upper)),
            ];
            let minima = [
                S::and(b, six),
                S::or(S::and(S::shr::<4>(c), four), S::and(S::shr::<2>(b), upper)),
            ];
            let byte = S::splat_i(0xff);
            let even = S::splat_i(0x00ff_00ff);
            // Field by field, in place: as one value it would be copied.
            (*into).d = d;
            (*into).dmin = dmin;
            for (i, (&scales, &minima)) in scales.iter().zip(&minima).enumerate() {
                (*into).scales[4 * i] = S::to_f(S::and(scales, byte));
                (*into).scales[4 * i + 1] = S::to_f(S::and(S::shr::<8>(scales), byte));
                (*into).scales[4 * i + 2] = S::to_f(S::and(S::shr::<16>(scales), byte));
                (*into).scales[4 * i + 3] = S::to_f(S::shr::<24>(scales));
                (*into).minima[2 * i] = S::and(minima, even);
                (*into).minima[2 * i + 1] = S::and(S::shr::<8>(minima), even);
            }
            let mut fifth = [byte; 8];
            if FIVE {
                fifth[..4].copy_from_slice(&S::gather4(from.add(16), stride));
                fifth[4..].copy_from_slice(&S::gather4(from.add(32), stride));
            }
            let ones = S::splat_i(0x0101_0101);
            for pair in 0..4 {
                for half in 0..2 {
                    let at = Self::BYTES - 128 + 32 * pair + 16 * half;
                    let words = S::gather4(from.add(at), stride);
                    for (i, &nibbles) in words.iter().enumerate() {
                        let g = 4 * half + i;
                        let mut low = S::and(nibbles, four);
                        let mut high = S::and(S::shr::<4>(nibbles), four);
                        if FIVE {
                            let bits = S::shr_by(fifth[g], 2 * pair as u32);
                            low = S::or(low, S::shl::<4>(S::and(bits, ones)));
                            high = S::or(high, S::shl::<4>(S::and(S::shr::<1>(bits), ones)));
                        }
                        (*into).q[2 * pair][g] = low;
                        (*into).q[2 * pair + 1][g] = high;
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn step<S: Simd, const R: usize, const P: usize>(
        w: &[MixedBlock<S>; P],
        x: [*const u8; R],
        _count: usize,
        acc: &mut [[S::F; P]; R],
    ) {
        // SAFETY: the caller's promise; all reads are within the record. Weights are at most 31.
        unsafe {
            let mut inner = [[S::splat_f(0.0); P]; R];
            for j in 0..8 {
                let mut dots = [[S::splat_i(0); P]; R];
                for g in 0..8 {
                    for r in 0..R {
                        let q = word::<S>(x[r], 32 * j + 4 * g);
                        for p in 0..P {
                            dots[r][p] = S::dot_u7(dots[r][p], w[p].q[j][g], q);
                        }
                    }
                }
                for r in 0..R {
                    for p in 0..P {
                        inner[r][p] = S::fma(S::to_f(dots[r][p]), w[p].scales[j], inner[r][p]);
                    }
                }
            }
            for r in 0..R {
                for p in 0..P {
                    let mut total = S::splat_i(0);
                    for i in 0..4 {
                        total = S::dot_i16(total, w[p].minima[i], word::<S>(x[r], 260 + 4 * i));
                    }
                    let low = S::mul(S::to_f(total), w[p].dmin);
                    let value = S::fms(inner[r][p], w[p].d, low);
                    acc[r][p] = S::fma(value, da::<S>(x[r]), acc[r][p]);
                }
            }
        }
    }
}

/// Q6_K.
pub(super) struct Six;

/// A super-block of sixteen rows.
#[derive(Clone, Copy)]
pub(super) struct SixBlock<S: Simd> {
    q: [[S::I; 4]; 16],
    scales: [S::F; 16],
    d: S::F,
}

impl Format for Six {
    const LEN: usize = 256;
    const BYTES: usize = 210;
    const RECORD: usize = Q8K_RECORD;
    const PLAIN: bool = false;

    type Block<S: Simd> = SixBlock<S>;

    #[inline(always)]
    unsafe fn unpack<S: Simd>(from: *const u8, stride: usize, into: *mut SixBlock<S>) {
        // SAFETY: the caller's promise; all reads are within the super-(*into).
        unsafe {
            let scales = S::gather4(from.add(192), stride);
            // The last two bytes, read as the upper half of a word that ends with the (*into).
            let [_, d] = S::halves(S::gather(from.add(206), stride));
            let four = S::splat_i(0x0f0f_0f0f);
            let upper = S::splat_i(0x3030_3030);
            (*into).d = d;
            for (i, &scales) in scales.iter().enumerate() {
                (*into).scales[4 * i] = S::to_f(S::sar::<24>(S::shl::<24>(scales)));
                (*into).scales[4 * i + 1] = S::to_f(S::sar::<24>(S::shl::<16>(scales)));
                (*into).scales[4 * i + 2] = S::to_f(S::sar::<24>(S::shl::<8>(scales)));
                (*into).scales[4 * i + 3] = S::to_f(S::sar::<24>(scales));
            }
            // Quarter h, l of the nibbles: 16 elements of runs 0 and 1 (low), 2 and 3 (high); see the
            // reference in `dequant`.
            for h in 0..2 {
                for l in 0..2 {
                    let even = S::gather4(from.add(64 * h + 16 * l), stride);
                    let odd = S::gather4(from.add(64 * h + 32 + 16 * l), stride);
                    let bits = S::gather4(from.add(128 + 32 * h + 16 * l), stride);
                    for g in 0..4 {
                        let b = bits[g];
                        let runs = [
                            S::or(S::and(even[g], four), S::and(S::shl::<4>(b), upper)),
                            S::or(S::and(odd[g], four), S::and(S::shl::<2>(b), upper)),
                            S::or(S::and(S::shr::<4>(even[g]), four), S::and(b, upper)),
                            S::or(
                                S::and(S::shr::<4>(odd[g]), four),
                                S::and(S::shr::<2>(b), upper),
                            ),
                        ];
                        for (run, q) in runs.into_iter().enumerate() {
                            (*into).q[8 * h + 2 * run + l][g] = q;
                        }
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn step<S: Simd, const R: usize, const P: usize>(
        w: &[SixBlock<S>; P],
        x: [*const u8; R],
        _count: usize,
        acc: &mut [[S::F; P]; R],
    ) {
        // SAFETY: the caller's promise; all reads are within the record. Weights are at most 63.
        unsafe {
            let zero = S::splat_i(0);
            let mut inner = [[S::splat_f(0.0); P]; R];
            for j in 0..16 {
                // Weights are stored plus 32.
                let mut dots = [[zero; P]; R];
                for r in 0..R {
                    dots[r] = [word::<S>(x[r], 276 + 4 * j); P];
                }
                for g in 0..4 {
                    for r in 0..R {
                        let q = word::<S>(x[r], 16 * j + 4 * g);
                        for p in 0..P {
                            dots[r][p] = S::dot_u7(dots[r][p], w[p].q[j][g], q);
                        }
                    }
                }
                for r in 0..R {
                    for p in 0..P {
                        inner[r][p] = S::fma(S::to_f(dots[r][p]), w[p].scales[j], inner[r][p]);
                    }
                }
            }
            for r in 0..R {
                for p in 0..P {
                    let value = S::mul(inner[r][p], w[p].d);
                    acc[r][p] = S::fma(value, da::<S>(x[r]), acc[r][p]);
                }
            }
        }
    }
}

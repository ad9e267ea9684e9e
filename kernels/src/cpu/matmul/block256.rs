//! The 256-element block dtypes Q4_K and Q5_K: 8 sub-blocks with 6-bit scales and minima.

#![expect(
    clippy::needless_range_loop,
    reason = "an index runs over several arrays at once, and its order is the point"
)]

use std::ptr;

use super::format::Format;
use super::place::{Beside, Place};
use super::simd::{Simd, together};
use crate::cpu::quantize::Q8K_RECORD;

/// The word at `x + at`, in every lane.
///
/// # Safety
///
/// As for [`Format::step`]; `at` is within the record.
#[inline(always)]
pub(super) unsafe fn word<S: Simd>(x: *const u8, at: usize) -> S::I {
    // SAFETY: the caller's promise.
    unsafe { S::splat_i(ptr::read_unaligned(x.add(at).cast())) }
}

/// Where a record has what follows the activations: `da` and the sums.
pub(super) const BESIDE: usize = 256;

/// The `da` of a record, in every lane, of which `beside` is what is at [`BESIDE`].
///
/// # Safety
///
/// As for [`Simd`]; the four bytes are there.
#[inline(always)]
pub(super) unsafe fn da<S: Simd>(beside: *const u8) -> S::F {
    // SAFETY: the caller's promise.
    unsafe { S::splat_f(ptr::read_unaligned(beside.cast())) }
}

/// `start + Σ q · x` over the `4 W` weights `q` and the activations at `x + at`.
///
/// # Safety
///
/// As for [`Format::step`]; `at + 4 W` is within the record, the weights are at most 127.
#[inline(always)]
pub(super) unsafe fn dot<S: Simd, const W: usize>(
    start: S::I,
    q: [S::I; W],
    x: *const u8,
    at: usize,
) -> S::I {
    // Two chains: their sum is exact in any order.
    let mut even = start;
    // SAFETY: the caller's promise.
    unsafe {
        let mut odd = S::splat_i(0);
        for g in (0..W).step_by(2) {
            even = S::dot_u7(even, q[g], word::<S>(x, at + 4 * g));
            odd = S::dot_u7(odd, q[g + 1], word::<S>(x, at + 4 * g + 4));
        }
        S::add(even, odd)
    }
}

/// `Σ q · x` over 32 weights and the activations of `R` rows.
///
/// # Safety
///
/// As for [`dot`].
#[inline(always)]
unsafe fn dots<S: Simd, const R: usize>(q: &[S::I; 8], x: [*const u8; R], at: usize) -> [S::I; R] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut dots = [S::splat_i(0); R];
        if R < 8 {
            for r in 0..R {
                dots[r] = dot::<S, 8>(dots[r], *q, x[r], at);
            }
            return dots;
        }
        // So many chains side by side that one of each row will do.
        for g in 0..8 {
            for r in 0..R {
                dots[r] = S::dot_u7(dots[r], q[g], word::<S>(x[r], at + 4 * g));
            }
        }
        dots
    }
}

/// `acc + factor · Σ q · x` over the `4 W` weights `q`, of which none is above `most`, and the activations at `x + at`.
///
/// # Safety
///
/// As for [`dot`].
#[inline(always)]
pub(super) unsafe fn dot_times<S: Simd, const W: usize>(
    mut acc: S::I,
    q: &[S::I; W],
    x: *const u8,
    at: usize,
    factor: S::I,
    most: u32,
) -> S::I {
    // SAFETY: the caller's promise.
    unsafe {
        let some = together::<S>(W, most);
        for first in (0..W).step_by(some) {
            let mut sums = S::open(S::splat_i(0));
            for g in first..first + some {
                sums = S::add_small(sums, q[g], word::<S>(x, at + 4 * g));
            }
            acc = S::close_times(acc, sums, factor);
        }
        acc
    }
}

/// Q4_K and Q5_K.
pub(super) struct Mixed<const FIVE: bool>;

/// A super-block of sixteen rows.
#[derive(Clone, Copy)]
pub(super) struct MixedBlock<S: Simd> {
    pub q: [[S::I; 8]; 8],
    pub head: MixedHead<S>,
}

/// All of a super-block but its weights.
#[derive(Clone, Copy)]
pub(super) struct MixedHead<S: Simd> {
    pub scales: [S::I; 8],
    /// Pairs of 16-bit minima of sub-blocks 0 2, 1 3, 4 6, 5 7.
    minima: [S::I; 4],
    d: S::F,
    dmin: S::F,
}

impl<const FIVE: bool> Mixed<FIVE> {
    /// The largest weight.
    const MOST: u32 = if FIVE { 31 } else { 15 };

    /// # Safety
    ///
    /// As for [`Format::unpack`].
    #[inline(always)]
    unsafe fn head<S: Simd, W: Place>(from: W) -> MixedHead<S> {
        // SAFETY: the caller's promise; all reads are within the super-block.
        unsafe {
            // d, dmin and the 12 bytes of scales. Sub-blocks 0..4 have their 6 bits in the low bits of the
            // first two words; 4..8 have 4 bits in the third and 2 in the upper bits of the others.
            let [ends, a, b, c] = from.words4::<S, Self>(0);
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
            let mut head = MixedHead {
                scales: [byte; 8],
                minima: [byte; 4],
                d,
                dmin,
            };
            for i in 0..2 {
                head.scales[4 * i] = S::factor(S::and(scales[i], byte));
                head.scales[4 * i + 1] = S::factor(S::and(S::shr::<8>(scales[i]), byte));
                head.scales[4 * i + 2] = S::factor(S::and(S::shr::<16>(scales[i]), byte));
                head.scales[4 * i + 3] = S::factor(S::shr::<24>(scales[i]));
                head.minima[2 * i] = S::and(minima[i], even);
                head.minima[2 * i + 1] = S::and(S::shr::<8>(minima[i]), even);
            }
            head
        }
    }

    /// The fifth bits, where there are any: bit `j` of each byte belongs to sub-block `j`.
    ///
    /// # Safety
    ///
    /// As for [`Format::unpack`].
    #[inline(always)]
    unsafe fn fifth<S: Simd, W: Place>(from: W) -> [S::I; 8] {
        // SAFETY: the caller's promise; all reads are within the super-block.
        unsafe {
            let mut fifth = [S::splat_i(0); 8];
            if FIVE {
                fifth[..4].copy_from_slice(&from.words4::<S, Self>(16));
                fifth[4..].copy_from_slice(&from.words4::<S, Self>(32));
            }
            fifth
        }
    }

    /// The weights of sub-blocks `2 pair` (low nibbles) and `2 pair + 1` (high ones).
    ///
    /// # Safety
    ///
    /// As for [`Format::unpack`]; `pair` is below 4.
    #[inline(always)]
    unsafe fn pair<S: Simd, W: Place>(from: W, fifth: &[S::I; 8], pair: usize) -> [[S::I; 8]; 2] {
        // SAFETY: the caller's promise; all reads are within the super-block.
        unsafe {
            let four = S::splat_i(0x0f0f_0f0f);
            let ones = S::splat_i(0x0101_0101);
            let mut q = [[four; 8]; 2];
            for half in 0..2 {
                let at = Self::BYTES - 128 + 32 * pair + 16 * half;
                let words = from.words4::<S, Self>(at);
                for i in 0..4 {
                    let g = 4 * half + i;
                    q[0][g] = S::and(words[i], four);
                    q[1][g] = S::and(S::shr::<4>(words[i]), four);
                    if FIVE {
                        let bits = S::shr_by(fifth[g], 2 * pair as u32);
                        q[0][g] = S::or(q[0][g], S::shl::<4>(S::and(bits, ones)));
                        q[1][g] = S::or(q[1][g], S::shl::<4>(S::and(S::shr::<1>(bits), ones)));
                    }
                }
            }
            q
        }
    }

    /// `acc = fma(fma(f32(inner), d, −(f32(T) · dmin)), da, acc)`.
    ///
    /// # Safety
    ///
    /// As for [`Simd`]; the twenty bytes that a record has from [`BESIDE`] on are at `beside`.
    #[inline(always)]
    pub unsafe fn finish<S: Simd>(
        head: &MixedHead<S>,
        inner: S::I,
        beside: *const u8,
        acc: S::F,
    ) -> S::F {
        // SAFETY: the caller's promise.
        unsafe {
            let mut total = S::splat_i(0);
            for i in 0..4 {
                total = S::dot_i16(total, head.minima[i], word::<S>(beside, 4 + 4 * i));
            }
            let low = S::mul(S::to_f(total), head.dmin);
            let sum = S::fms(S::to_f(inner), head.d, low);
            S::fma(sum, da::<S>(beside), acc)
        }
    }
}

impl<const FIVE: bool> Format for Mixed<FIVE> {
    const LEN: usize = 256;
    const BYTES: usize = 144 + 32 * FIVE as usize;
    const RECORD: usize = Q8K_RECORD;
    const PLAIN: bool = false;
    const MANY: (usize, usize) = (6, 2);
    const BESIDE: Beside = Beside::None;

    type Block<S: Simd> = MixedBlock<S>;

    #[inline(always)]
    unsafe fn unpack<S: Simd, W: Place>(from: W, into: *mut MixedBlock<S>) {
        // SAFETY: the caller's promise. Field by field, in place: as one value it would be copied.
        unsafe {
            (*into).head = Self::head::<S, W>(from);
            let fifth = Self::fifth::<S, W>(from);
            for pair in 0..4 {
                from.ask::<S, Self>(pair, 4);
                let [low, high] = Self::pair::<S, W>(from, &fifth, pair);
                (*into).q[2 * pair] = low;
                (*into).q[2 * pair + 1] = high;
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
            let mut inner = [[S::splat_i(0); P]; R];
            let some = together::<S>(8, Self::MOST);
            for j in 0..8 {
                for first in (0..8).step_by(some) {
                    let mut dots = [[S::open(S::splat_i(0)); P]; R];
                    for g in first..first + some {
                        for r in 0..R {
                            let q = word::<S>(x[r], 32 * j + 4 * g);
                            for p in 0..P {
                                dots[r][p] = S::add_small(dots[r][p], w[p].q[j][g], q);
                                if R > 1 {
                                    S::settle(&mut dots[r][p]);
                                }
                            }
                        }
                    }
                    for r in 0..R {
                        for p in 0..P {
                            inner[r][p] =
                                S::close_times(inner[r][p], dots[r][p], w[p].head.scales[j]);
                        }
                    }
                }
            }
            for r in 0..R {
                for p in 0..P {
                    let beside = x[r].add(BESIDE);
                    acc[r][p] = Self::finish::<S>(&w[p].head, inner[r][p], beside, acc[r][p]);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn stream<S: Simd, W: Place, const R: usize>(
        from: W,
        x: [*const u8; R],
        acc: &mut [[S::F; 1]; R],
    ) {
        // SAFETY: the caller's promise; all reads are within the record. Weights are at most 31.
        unsafe {
            let head = Self::head::<S, W>(from);
            let fifth = Self::fifth::<S, W>(from);
            let mut inner = [S::splat_i(0); R];
            for pair in 0..4 {
                from.ask::<S, Self>(pair, 4);
                let q = Self::pair::<S, W>(from, &fifth, pair);
                for half in 0..2 {
                    let j = 2 * pair + half;
                    if S::NARROW {
                        for r in 0..R {
                            inner[r] = dot_times::<S, 8>(
                                inner[r],
                                &q[half],
                                x[r],
                                32 * j,
                                head.scales[j],
                                Self::MOST,
                            );
                        }
                        continue;
                    }
                    let dots = dots::<S, R>(&q[half], x, 32 * j);
                    for r in 0..R {
                        inner[r] = S::add(inner[r], S::times(dots[r], head.scales[j]));
                    }
                }
            }
            for r in 0..R {
                acc[r][0] = Self::finish::<S>(&head, inner[r], x[r].add(BESIDE), acc[r][0]);
            }
        }
    }
}

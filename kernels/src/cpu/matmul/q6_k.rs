//! The 256-element block dtype Q6_K: 16 sub-blocks with signed 8-bit scales.

#![expect(
    clippy::needless_range_loop,
    reason = "an index runs over several arrays at once, and its order is the point"
)]

use super::block256::{BESIDE, da, dot, dot_times, word};
use super::format::Format;
use super::place::{Beside, Place};
use super::simd::{Simd, together};
use crate::cpu::quantize::Q8K_RECORD;

/// Q6_K.
pub(super) struct Six;

/// A super-block of sixteen rows.
#[derive(Clone, Copy)]
pub(super) struct SixBlock<S: Simd> {
    pub q: [[S::I; 4]; 16],
    pub head: SixHead<S>,
}

/// All of a super-block but its weights.
#[derive(Clone, Copy)]
pub(super) struct SixHead<S: Simd> {
    pub scales: [S::I; 16],
    d: S::F,
}

/// Where a record has the sums for each sixteen that make up for what weights are stored plus: in words, and in halves of words.
const SUMS: usize = 276;
const HALF_SUMS: usize = 340;

/// The largest weight as it is stored, which is plus 32.
const MOST: u32 = 63;

impl Six {
    /// What weights stored plus 32 make too much, negative, of `R` rows, where sums are narrow.
    ///
    /// # Safety
    ///
    /// As for [`Format::step`].
    #[inline(always)]
    unsafe fn start<S: Simd, const R: usize>(head: &SixHead<S>, x: [*const u8; R]) -> [S::I; R] {
        // SAFETY: the caller's promise; all reads are within the record.
        unsafe {
            let mut start = [S::splat_i(0); R];
            for i in 0..8 {
                let j = i / 2 * 4 + i % 2;
                let scales = S::two_factors(head.scales[j], head.scales[j + 2]);
                for r in 0..R {
                    let sums = word::<S>(x[r], HALF_SUMS + 4 * i);
                    start[r] = S::dot_i16(start[r], scales, sums);
                }
            }
            for r in 0..R {
                start[r] = S::shl::<5>(start[r]);
            }
            start
        }
    }

    /// The sums of all sub-blocks, where sums are narrow.
    ///
    /// # Safety
    ///
    /// As for [`Format::step`].
    #[inline(always)]
    unsafe fn narrow<S: Simd, const R: usize, const P: usize>(
        w: &[SixBlock<S>; P],
        x: [*const u8; R],
        inner: &mut [[S::I; P]; R],
    ) {
        // SAFETY: the caller's promise; all reads are within the record.
        unsafe {
            for p in 0..P {
                let start = Self::start::<S, R>(&w[p].head, x);
                for r in 0..R {
                    inner[r][p] = start[r];
                }
            }
            let some = together::<S>(4, MOST);
            for first in (0..64).step_by(some) {
                let mut dots = [[S::open(S::splat_i(0)); P]; R];
                for g in first..first + some {
                    for r in 0..R {
                        let q = word::<S>(x[r], 4 * g);
                        for p in 0..P {
                            dots[r][p] = S::add_small(dots[r][p], w[p].q[g / 4][g % 4], q);
                            if R > 1 {
                                S::settle(&mut dots[r][p]);
                            }
                        }
                    }
                }
                for r in 0..R {
                    for p in 0..P {
                        let factor = w[p].head.scales[first / 4];
                        inner[r][p] = S::close_times(inner[r][p], dots[r][p], factor);
                    }
                }
            }
        }
    }

    /// # Safety
    ///
    /// As for [`Format::unpack`].
    #[inline(always)]
    unsafe fn head<S: Simd, W: Place>(from: W) -> SixHead<S> {
        // SAFETY: the caller's promise; all reads are within the super-block.
        unsafe {
            let words = from.words4::<S, Self>(192);
            let d = from.half::<S, Self>();
            let mut scales = [S::splat_i(0); 16];
            for i in 0..4 {
                scales[4 * i] = S::factor(S::sar::<24>(S::shl::<24>(words[i])));
                scales[4 * i + 1] = S::factor(S::sar::<24>(S::shl::<16>(words[i])));
                scales[4 * i + 2] = S::factor(S::sar::<24>(S::shl::<8>(words[i])));
                scales[4 * i + 3] = S::factor(S::sar::<24>(words[i]));
            }
            SixHead { scales, d }
        }
    }

    /// Sixteen weights of each of the four runs of 32 in half `h`: the first sixteen or (`l` = 1) the
    /// last. The layout is told in `dequant`.
    ///
    /// # Safety
    ///
    /// As for [`Format::unpack`]; `h` and `l` are below 2.
    #[inline(always)]
    unsafe fn runs<S: Simd, W: Place>(from: W, h: usize, l: usize) -> [[S::I; 4]; 4] {
        // SAFETY: the caller's promise; all reads are within the super-block.
        unsafe {
            let four = S::splat_i(0x0f0f_0f0f);
            let upper = S::splat_i(0x3030_3030);
            let even = from.words4::<S, Self>(64 * h + 16 * l);
            let odd = from.words4::<S, Self>(64 * h + 32 + 16 * l);
            let bits = from.words4::<S, Self>(128 + 32 * h + 16 * l);
            let mut runs = [[four; 4]; 4];
            for g in 0..4 {
                let b = bits[g];
                runs[0][g] = S::or(S::and(even[g], four), S::and(S::shl::<4>(b), upper));
                runs[1][g] = S::or(S::and(odd[g], four), S::and(S::shl::<2>(b), upper));
                runs[2][g] = S::or(S::and(S::shr::<4>(even[g]), four), S::and(b, upper));
                runs[3][g] = S::or(
                    S::and(S::shr::<4>(odd[g]), four),
                    S::and(S::shr::<2>(b), upper),
                );
            }
            runs
        }
    }

    /// The weights of sub-blocks `2 run` and `2 run + 1` of half `h`.
    ///
    /// # Safety
    ///
    /// As for [`Format::unpack`]; `h` is below 2 and `run` below 4.
    #[inline(always)]
    unsafe fn run<S: Simd, W: Place>(from: W, h: usize, run: usize) -> [[S::I; 4]; 2] {
        // SAFETY: the caller's promise; all reads are within the super-block.
        unsafe {
            let four = S::splat_i(0x0f0f_0f0f);
            let upper = S::splat_i(0x3030_3030);
            let mut q = [[four; 4]; 2];
            for l in 0..2 {
                let low = from.words4::<S, Self>(64 * h + 32 * (run % 2) + 16 * l);
                let bits = from.words4::<S, Self>(128 + 32 * h + 16 * l);
                for g in 0..4 {
                    let (low, bits) = match run {
                        0 => (low[g], S::shl::<4>(bits[g])),
                        1 => (low[g], S::shl::<2>(bits[g])),
                        2 => (S::shr::<4>(low[g]), bits[g]),
                        _ => (S::shr::<4>(low[g]), S::shr::<2>(bits[g])),
                    };
                    q[l][g] = S::or(S::and(low, four), S::and(bits, upper));
                }
            }
            q
        }
    }

    /// As [`Format::stream`], with each word loaded twice, and sub-blocks in order: a few rows wait for registers, not for
    /// loads.
    ///
    /// # Safety
    ///
    /// As for [`Format::stream`].
    #[inline(always)]
    unsafe fn in_order<S: Simd, W: Place, const R: usize>(
        from: W,
        x: [*const u8; R],
        acc: &mut [[S::F; 1]; R],
    ) {
        // SAFETY: the caller's promise; all reads are within the record. Weights are at most 63.
        unsafe {
            let head = Self::head::<S, W>(from);
            let mut inner = [S::splat_i(0); R];
            if S::NARROW {
                inner = Self::start::<S, R>(&head, x);
            }
            for h in 0..2 {
                for run in 0..4 {
                    from.ask::<S, Self>(4 * h + run, 8);
                    let q = Self::run::<S, W>(from, h, run);
                    for l in 0..2 {
                        let j = 8 * h + 2 * run + l;
                        for r in 0..R {
                            if S::NARROW {
                                let factor = head.scales[j];
                                inner[r] =
                                    dot_times::<S, 4>(inner[r], &q[l], x[r], 16 * j, factor, MOST);
                                continue;
                            }
                            let mut dot = word::<S>(x[r], SUMS + 4 * j);
                            for g in 0..4 {
                                dot = S::dot_u7(dot, q[l][g], word::<S>(x[r], 16 * j + 4 * g));
                            }
                            inner[r] = S::add(inner[r], S::times(dot, head.scales[j]));
                        }
                    }
                }
            }
            for r in 0..R {
                acc[r][0] = Self::finish::<S>(&head, inner[r], x[r].add(BESIDE), acc[r][0]);
            }
        }
    }

    /// `acc = fma(f32(inner) · d, da, acc)`.
    ///
    /// # Safety
    ///
    /// As for [`Simd`]; the four bytes that a record has from [`BESIDE`] on are at `beside`.
    #[inline(always)]
    pub unsafe fn finish<S: Simd>(
        head: &SixHead<S>,
        inner: S::I,
        beside: *const u8,
        acc: S::F,
    ) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { S::fma(S::mul(S::to_f(inner), head.d), da::<S>(beside), acc) }
    }
}

impl Format for Six {
    const LEN: usize = 256;
    const BYTES: usize = 210;
    const RECORD: usize = Q8K_RECORD;
    const PLAIN: bool = false;
    const FEW: usize = 4;
    const BESIDE: Beside = Beside::Last;

    /// The scales, then for each sixteen of a half their lower four bits and their upper two.
    #[inline(always)]
    fn packed(at: usize) -> usize {
        let (h, l, run) = match at {
            // Sixteen low nibbles of runs 0 and 2, or 1 and 3.
            0..128 => (at / 64, at / 16 % 2, at / 32 % 2),
            128..192 => ((at - 128) / 32, at / 16 % 2, 2),
            _ => return at - 192,
        };
        16 + 48 * (2 * h + l) + 16 * run + at % 16
    }

    type Block<S: Simd> = SixBlock<S>;

    #[inline(always)]
    unsafe fn unpack<S: Simd, W: Place>(from: W, into: *mut SixBlock<S>) {
        // SAFETY: the caller's promise. Field by field, in place: as one value it would be copied.
        unsafe {
            (*into).head = Self::head::<S, W>(from);
            for h in 0..2 {
                for l in 0..2 {
                    from.ask::<S, Self>(2 * h + l, 4);
                    let runs = Self::runs::<S, W>(from, h, l);
                    for run in 0..4 {
                        (*into).q[8 * h + 2 * run + l] = runs[run];
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
            let mut inner = [[S::splat_i(0); P]; R];
            if S::NARROW {
                Self::narrow::<S, R, P>(w, x, &mut inner);
            }
            let wide = if S::NARROW { 0 } else { 16 };
            for j in 0..wide {
                // Weights are stored plus 32.
                let mut dots = [[S::splat_i(0); P]; R];
                for r in 0..R {
                    dots[r] = [word::<S>(x[r], SUMS + 4 * j); P];
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
                        inner[r][p] =
                            S::add(inner[r][p], S::times(dots[r][p], w[p].head.scales[j]));
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
        // SAFETY: the caller's promise; all reads are within the record. Weights are at most 63.
        unsafe {
            if R > 1 && W::PACKED {
                return Self::in_order::<S, W, R>(from, x, acc);
            }
            let head = Self::head::<S, W>(from);
            let mut inner = [S::splat_i(0); R];
            if S::NARROW {
                inner = Self::start::<S, R>(&head, x);
            }
            for h in 0..2 {
                // The bytes hold the sub-blocks out of order: the exact sums come first.
                let mut dots = [[S::splat_i(0); R]; 8];
                for l in 0..2 {
                    from.ask::<S, Self>(2 * h + l, 4);
                    let runs = Self::runs::<S, W>(from, h, l);
                    for run in 0..4 {
                        let j = 8 * h + 2 * run + l;
                        for r in 0..R {
                            if S::NARROW {
                                let (q, factor) = (&runs[run], head.scales[j]);
                                inner[r] =
                                    dot_times::<S, 4>(inner[r], q, x[r], 16 * j, factor, MOST);
                                continue;
                            }
                            let start = word::<S>(x[r], SUMS + 4 * j);
                            dots[2 * run + l][r] = dot::<S, 4>(start, runs[run], x[r], 16 * j);
                        }
                    }
                }
                let wide = if S::NARROW { 0 } else { 8 };
                for i in 0..wide {
                    for r in 0..R {
                        inner[r] = S::add(inner[r], S::times(dots[i][r], head.scales[8 * h + i]));
                    }
                }
            }
            for r in 0..R {
                acc[r][0] = Self::finish::<S>(&head, inner[r], x[r].add(BESIDE), acc[r][0]);
            }
        }
    }
}

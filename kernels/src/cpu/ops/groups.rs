//! Running values on AVX-512: what [`scanners`](super::scanners) does through buffers, in registers and with the same
//! order.

use std::{arch::x86_64::*, marker::PhantomData, mem::transmute};

use super::scanners::{Mode, Scan};
use crate::cpu::{
    elementwise::half::{Bf16Avx512, Convert, F16Avx512},
    lanes::LANES,
};

/// Sixteen values next to each other.
///
/// # Safety
/// All functions: the processor has AVX-512.
pub(super) trait Group<S: Scan>: Copy {
    /// From memory, backwards if `reverse`.
    unsafe fn read(s: S, from: &[S::Of; LANES], reverse: bool) -> Self;
    unsafe fn write(self, s: S, to: &mut [S::Of; LANES], reverse: bool);
    /// One value, sixteen times.
    unsafe fn splat(v: S::Acc) -> Self;
    /// The one in lane `i`.
    unsafe fn lane(self, i: usize) -> S::Acc;
    unsafe fn fold(self, s: S, later: Self) -> Self;
    /// Those that lie `D` before each, where `before` are the sixteen in front. `D` is 1, 2, 4 or 8.
    unsafe fn earlier<const D: usize>(self, before: Self) -> Self;
}

/// As [`Scan::rows`].
///
/// # Safety
/// The processor has AVX-512.
#[inline(always)]
pub(super) unsafe fn rows<S: Scan, G: Group<S>>(
    s: S,
    x: &[S::Of],
    n: usize,
    mode: Mode,
    before: S::Acc,
    out: &mut [S::Of],
) -> S::Acc {
    let mut total = s.identity();
    for (x, out) in x.chunks_exact(n).zip(out.chunks_exact_mut(n)) {
        // SAFETY: the caller's promise.
        total = unsafe { chunk::<S, G>(s, x, mode, before, Some(out)) };
    }
    total
}

/// Scans a chunk after `before`, into `out` where there is one. What its elements alone fold to.
///
/// # Safety
/// As for [`rows`].
#[inline(always)]
pub(super) unsafe fn chunk<S: Scan, G: Group<S>>(
    s: S,
    x: &[S::Of],
    mode: Mode,
    before: S::Acc,
    out: Option<&mut [S::Of]>,
) -> S::Acc {
    // Whole groups, and what is left over at the scan's end.
    let n = x.len();
    let whole = n / LANES * LANES;
    let split = if mode.reverse { n - whole } else { whole };
    let (a, b) = x.split_at(split);
    let (x, x_left) = if mode.reverse { (b, a) } else { (a, b) };
    let (x, _) = x.as_chunks::<LANES>();
    let (mut out, out_left) = match out {
        Some(out) => {
            let (a, b) = out.split_at_mut(split);
            let (out, left) = if mode.reverse { (b, a) } else { (a, b) };
            (Some(out.as_chunks_mut::<LANES>().0), left)
        }
        None => (None, &mut [][..]),
    };
    // SAFETY: the caller's promise.
    unsafe {
        let mut running = Running::<S, G>::new(s, mode, before);
        for i in 0..x.len() {
            let i = if mode.reverse { x.len() - 1 - i } else { i };
            let v = running.next(&x[i]);
            if let Some(out) = &mut out {
                v.write(s, &mut out[i], mode.reverse);
            }
        }
        let left = x_left.len();
        if left > 0 {
            let mut filled = [s.store(s.identity()); LANES];
            let place = if mode.reverse {
                LANES - left..LANES
            } else {
                0..left
            };
            filled[place.clone()].copy_from_slice(x_left);
            let v = running.next(&filled);
            if !out_left.is_empty() {
                v.write(s, &mut filled, mode.reverse);
                out_left.copy_from_slice(&filled[place]);
            }
        }
        match n {
            0 => s.identity(),
            n => running.lanes.lane((n - 1) % LANES),
        }
    }
}

struct Running<S, G> {
    s: S,
    mode: Mode,
    before: G,
    /// The sixteen in front: themselves, and what two, four and eight that end with each fold to.
    front: [G; 4],
    /// What all so far fold to: up to each lane's last element.
    lanes: G,
    /// The last results, before they were moved on.
    previous: G,
}

impl<S: Scan, G: Group<S>> Running<S, G> {
    /// # Safety
    /// The processor has AVX-512, here and below.
    #[inline(always)]
    unsafe fn new(s: S, mode: Mode, before: S::Acc) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let none = G::splat(s.identity());
            let before = G::splat(before);
            Self {
                s,
                mode,
                before,
                front: [none; 4],
                lanes: none,
                previous: before,
            }
        }
    }

    /// The results for the next sixteen elements.
    #[inline(always)]
    unsafe fn next(&mut self, x: &[S::Of; LANES]) -> G {
        let s = self.s;
        // SAFETY: the caller's promise.
        unsafe {
            let one = G::read(s, x, self.mode.reverse);
            let two = one.earlier::<1>(self.front[0]).fold(s, one);
            let four = two.earlier::<2>(self.front[1]).fold(s, two);
            let eight = four.earlier::<4>(self.front[2]).fold(s, four);
            let sixteen = eight.earlier::<8>(self.front[3]).fold(s, eight);
            self.front = [one, two, four, eight];
            self.lanes = self.lanes.fold(s, sixteen);
            let running = self.before.fold(s, self.lanes);
            let previous = std::mem::replace(&mut self.previous, running);
            match self.mode.exclusive {
                true => running.earlier::<1>(previous),
                false => running,
            }
        }
    }
}

/// How sixteen elements become f32 and back.
pub(super) trait Memory: Copy {
    type Of: Copy;
    unsafe fn read(from: &[Self::Of; LANES]) -> __m512;
    unsafe fn write(v: __m512, to: &mut [Self::Of; LANES]);
}

#[derive(Clone, Copy)]
pub(super) struct Same;

impl Memory for Same {
    type Of = f32;
    #[inline(always)]
    unsafe fn read(from: &[f32; LANES]) -> __m512 {
        // SAFETY: sixteen lie there; here and below, the caller's promise.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }
    #[inline(always)]
    unsafe fn write(v: __m512, to: &mut [f32; LANES]) {
        // SAFETY: as above.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), v) }
    }
}

macro_rules! half {
    ($name:ident, $convert:ident) => {
        #[derive(Clone, Copy)]
        pub(super) struct $name;

        impl Memory for $name {
            type Of = u16;
            #[inline(always)]
            unsafe fn read(from: &[u16; LANES]) -> __m512 {
                // SAFETY: as above; the sizes are equal.
                unsafe { transmute($convert::widen(from)) }
            }
            #[inline(always)]
            unsafe fn write(v: __m512, to: &mut [u16; LANES]) {
                // SAFETY: as above.
                unsafe { *to = $convert::narrow(&transmute::<__m512, [f32; LANES]>(v)) }
            }
        }
    };
}
half!(F16, F16Avx512);
half!(Bf16, Bf16Avx512);

#[inline(always)]
unsafe fn backwards(v: __m512, reverse: bool) -> __m512 {
    // SAFETY: as above.
    unsafe {
        let places = _mm512_setr_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        if reverse {
            _mm512_permutexvar_ps(places, v)
        } else {
            v
        }
    }
}

/// Sums in f32.
#[derive(Clone, Copy)]
pub(super) struct Sums<M>(__m512, PhantomData<M>);

fn sums<M>(v: __m512) -> Sums<M> {
    Sums(v, PhantomData)
}

impl<M: Memory, S: Scan<Acc = f32, Of = M::Of>> Group<S> for Sums<M> {
    #[inline(always)]
    unsafe fn read(_: S, from: &[M::Of; LANES], reverse: bool) -> Self {
        // SAFETY: as above.
        unsafe { sums(backwards(M::read(from), reverse)) }
    }
    #[inline(always)]
    unsafe fn write(self, _: S, to: &mut [M::Of; LANES], reverse: bool) {
        // SAFETY: as above.
        unsafe { M::write(backwards(self.0, reverse), to) }
    }
    #[inline(always)]
    unsafe fn splat(v: f32) -> Self {
        // SAFETY: as above.
        unsafe { sums(_mm512_set1_ps(v)) }
    }
    #[inline(always)]
    unsafe fn lane(self, i: usize) -> f32 {
        // SAFETY: as above; the sizes are equal.
        unsafe { transmute::<__m512, [f32; LANES]>(self.0)[i] }
    }
    #[inline(always)]
    unsafe fn fold(self, _: S, later: Self) -> Self {
        // SAFETY: as above.
        unsafe { sums(_mm512_add_ps(self.0, later.0)) }
    }
    #[inline(always)]
    unsafe fn earlier<const D: usize>(self, before: Self) -> Self {
        // SAFETY: as above.
        unsafe {
            let (v, before) = (_mm512_castps_si512(self.0), _mm512_castps_si512(before.0));
            sums(_mm512_castsi512_ps(match D {
                1 => _mm512_alignr_epi32::<15>(v, before),
                2 => _mm512_alignr_epi32::<14>(v, before),
                4 => _mm512_alignr_epi32::<12>(v, before),
                _ => _mm512_alignr_epi32::<8>(v, before),
            }))
        }
    }
}

/// Keys of extremes.
#[derive(Clone, Copy)]
pub(super) struct Keys(__m512i);

impl<S: Scan<Acc = i32, Of = i32>> Group<S> for Keys {
    #[inline(always)]
    unsafe fn read(s: S, from: &[i32; LANES], reverse: bool) -> Self {
        // SAFETY: as above; the sizes are equal.
        unsafe {
            let keys = from.map(|v| s.load(v));
            let keys = transmute::<[i32; LANES], __m512>(keys);
            Self(_mm512_castps_si512(backwards(keys, reverse)))
        }
    }
    #[inline(always)]
    unsafe fn write(self, s: S, to: &mut [i32; LANES], reverse: bool) {
        // SAFETY: as above.
        unsafe {
            let keys = backwards(_mm512_castsi512_ps(self.0), reverse);
            *to = transmute::<__m512, [i32; LANES]>(keys).map(|key| s.store(key));
        }
    }
    #[inline(always)]
    unsafe fn splat(v: i32) -> Self {
        // SAFETY: as above.
        unsafe { Self(_mm512_set1_epi32(v)) }
    }
    #[inline(always)]
    unsafe fn lane(self, i: usize) -> i32 {
        // SAFETY: as above; the sizes are equal.
        unsafe { transmute::<__m512i, [i32; LANES]>(self.0)[i] }
    }
    #[inline(always)]
    unsafe fn fold(self, _: S, later: Self) -> Self {
        // SAFETY: as above.
        unsafe { Self(_mm512_max_epi32(self.0, later.0)) }
    }
    #[inline(always)]
    unsafe fn earlier<const D: usize>(self, before: Self) -> Self {
        // SAFETY: as above.
        unsafe {
            Self(match D {
                1 => _mm512_alignr_epi32::<15>(self.0, before.0),
                2 => _mm512_alignr_epi32::<14>(self.0, before.0),
                4 => _mm512_alignr_epi32::<12>(self.0, before.0),
                _ => _mm512_alignr_epi32::<8>(self.0, before.0),
            })
        }
    }
}

/// All but the last of `v` after the last of `before`: eight less `rest` of those.
macro_rules! later {
    ($rest:literal, $v:expr, $before:expr) => {
        _mm512_castsi512_pd(_mm512_alignr_epi64::<$rest>(
            _mm512_castpd_si512($v),
            _mm512_castpd_si512($before),
        ))
    };
}

/// Products in f64.
#[derive(Clone, Copy)]
pub(super) struct Products<M>([__m512d; 2], PhantomData<M>);

fn products<M>(v: [__m512d; 2]) -> Products<M> {
    Products(v, PhantomData)
}

impl<M: Memory, S: Scan<Acc = f64, Of = M::Of>> Group<S> for Products<M> {
    #[inline(always)]
    unsafe fn read(_: S, from: &[M::Of; LANES], reverse: bool) -> Self {
        // SAFETY: as above.
        unsafe {
            let v = backwards(M::read(from), reverse);
            let high = _mm512_extractf32x8_ps::<1>(v);
            products([
                _mm512_cvtps_pd(_mm512_castps512_ps256(v)),
                _mm512_cvtps_pd(high),
            ])
        }
    }
    #[inline(always)]
    unsafe fn write(self, _: S, to: &mut [M::Of; LANES], reverse: bool) {
        // SAFETY: as above.
        unsafe {
            let low = _mm512_castps256_ps512(_mm512_cvtpd_ps(self.0[0]));
            let v = _mm512_insertf32x8::<1>(low, _mm512_cvtpd_ps(self.0[1]));
            M::write(backwards(v, reverse), to);
        }
    }
    #[inline(always)]
    unsafe fn splat(v: f64) -> Self {
        // SAFETY: as above.
        unsafe { products([_mm512_set1_pd(v); 2]) }
    }
    #[inline(always)]
    unsafe fn lane(self, i: usize) -> f64 {
        // SAFETY: as above; the sizes are equal.
        unsafe { transmute::<[__m512d; 2], [f64; LANES]>(self.0)[i] }
    }
    #[inline(always)]
    unsafe fn fold(self, _: S, Self([a, b], _): Self) -> Self {
        // SAFETY: as above.
        unsafe { products([_mm512_mul_pd(self.0[0], a), _mm512_mul_pd(self.0[1], b)]) }
    }
    #[inline(always)]
    unsafe fn earlier<const D: usize>(self, before: Self) -> Self {
        let [low, high] = self.0;
        let before = before.0[1];
        // SAFETY: as above.
        unsafe {
            products(match D {
                1 => [later!(7, low, before), later!(7, high, low)],
                2 => [later!(6, low, before), later!(6, high, low)],
                4 => [later!(4, low, before), later!(4, high, low)],
                _ => [before, low],
            })
        }
    }
}

//! Factors as numbers of BF16.

use std::arch::x86_64::*;

use super::super::super::avx512::Avx512;
use super::super::super::format::{BF16, E4M3, Format, Plain};
use super::super::super::place::Place;
use super::super::Line;
use super::STEP;
use crate::cpu::lanes::LANES;

/// Numbers of BF16 that make an activation.
pub(super) const PARTS: usize = 3;

/// Weights that are numbers of BF16, or stored in fewer bits.
pub(in super::super::super) trait OfBF16: Format {
    /// Whether they lie in memory as the instruction wants them, where they are packed.
    const AS_STORED: bool = false;

    /// Writes one of a block's words, those of sixteen rows, into the block's tiles from `to` on.
    ///
    /// # Safety
    ///
    /// As for [`Simd`](super::super::super::simd::Simd); the block's tiles are valid for writes.
    unsafe fn bring<W: Place>(word: __m512i, number: usize, to: *mut Line);
}

/// Writes a block of sixteen rows as tiles from `to` on.
///
/// # Safety
///
/// As for [`OfBF16::bring`].
#[inline(always)]
pub(super) unsafe fn bring<F: OfBF16, W: Place>(from: W, to: *mut Line) {
    // SAFETY: the caller's promise.
    unsafe {
        if W::PACKED {
            for number in 0..LANES {
                F::bring::<W>(from.word::<Avx512, F>(4 * number), number, to);
            }
        } else {
            let words = from.words16::<Avx512, F>(0);
            for (number, word) in words.into_iter().enumerate() {
                F::bring::<W>(word, number, to);
            }
        }
    }
}

impl OfBF16 for Plain<BF16, 2> {
    const AS_STORED: bool = true;

    #[inline(always)]
    unsafe fn bring<W: Place>(word: __m512i, number: usize, to: *mut Line) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_store_si512(to.add(number).cast(), word) }
    }
}

/// Of each magnitude in E4M3 the number in BF16, its lower and its upper byte.
static OF_E4M3: [[u8; 128]; 2] = {
    let mut bytes = [[0; 128]; 2];
    let mut at = 0;
    while at < 128 {
        let (exponent, mantissa) = (at >> 3, at & 7);
        // The number as a multiple of 2^-9, which is what the last bit of the smallest ones is.
        let units: usize = match exponent {
            0 => mantissa,
            _ => (8 + mantissa) << (exponent - 1),
        };
        let bits = match units {
            _ if at == 127 => 0x7fc0,
            0 => 0,
            _ => {
                let log = usize::BITS - 1 - units.leading_zeros();
                ((log as usize + 127 - 9) << 7) | ((units << 7 >> log) & 127)
            }
        };
        bytes[0][at] = bits as u8;
        bytes[1][at] = (bits >> 8) as u8;
        at += 1;
    }
    bytes
};

impl OfBF16 for Plain<E4M3, 4> {
    #[inline(always)]
    unsafe fn bring<W: Place>(word: __m512i, number: usize, to: *mut Line) {
        // SAFETY: the caller's promise; tables are as long as what is read of them.
        unsafe {
            let [low, high] = OF_E4M3.each_ref().map(|bytes| bytes.as_ptr());
            let (low, low_end) = (
                _mm512_loadu_si512(low.cast()),
                _mm512_loadu_si512(low.add(64).cast()),
            );
            let (high, high_end) = (
                _mm512_loadu_si512(high.cast()),
                _mm512_loadu_si512(high.add(64).cast()),
            );
            let low = _mm512_permutex2var_epi8(low, word, low_end);
            let high = _mm512_permutex2var_epi8(high, word, high_end);
            // The sign's bit is the word's: `sign & word | !sign & high`.
            let high = _mm512_ternarylogic_epi32::<0xca>(_mm512_set1_epi8(-128), word, high);
            // Of each word the bytes of its first two numbers, and of its last two.
            let bytes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
            let bytes = _mm512_mullo_epi32(bytes, _mm512_set1_epi32(0x0404_0404));
            let first = _mm512_add_epi8(bytes, _mm512_set1_epi32(0x4101_4000));
            let last = _mm512_add_epi8(bytes, _mm512_set1_epi32(0x4303_4202));
            let to = to.add(2 * number).cast();
            _mm512_store_si512(to, _mm512_permutex2var_epi8(low, first, high));
            _mm512_store_si512(to.add(1), _mm512_permutex2var_epi8(low, last, high));
        }
    }
}

/// A step of activations from `at` on, of which there are so many, in parts; zeros are past them. Of what is no finite number all
/// parts but the first are zero.
///
/// # Safety
///
/// As for [`Simd`](super::super::super::simd::Simd); so many can be read, if they are fewer than a step.
#[inline(always)]
pub(super) unsafe fn activations(at: *const f32, there: usize) -> [__m512i; PARTS] {
    // SAFETY: the caller's promise.
    unsafe {
        let (low, high) = if there >= STEP {
            (_mm512_loadu_ps(at), _mm512_loadu_ps(at.add(LANES)))
        } else {
            let mask = |count: usize| ((1_u32 << count) - 1) as u16;
            (
                _mm512_maskz_loadu_ps(mask(there.min(LANES)), at),
                _mm512_maskz_loadu_ps(mask(there.saturating_sub(LANES)), at.wrapping_add(LANES)),
            )
        };
        let ([a, b, c], [d, e, f]) = (parts_of(low), parts_of(high));
        [upper_halves(a, d), upper_halves(b, e), upper_halves(c, f)]
    }
}

/// The parts of sixteen activations, in the upper half of each lane.
///
/// # Safety
///
/// As for [`Simd`](super::super::super::simd::Simd).
#[inline(always)]
unsafe fn parts_of(x: __m512) -> [__m512; PARTS] {
    // SAFETY: the caller's promise.
    unsafe {
        let first = upper_part(x);
        let rest = _mm512_maskz_sub_ps(is_finite(x), x, first);
        let second = upper_part(rest);
        // A NaN whose upper half is an infinity's would be one.
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
        let quiet = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc0_0000));
        let first = _mm512_mask_mov_ps(first, nan, quiet);
        [first, second, _mm512_sub_ps(rest, second)]
    }
}

/// # Safety
///
/// As for [`Simd`](super::super::super::simd::Simd).
#[inline(always)]
unsafe fn is_finite(v: __m512) -> u16 {
    const NONE: i32 = 0x01 | 0x08 | 0x10 | 0x80;
    // SAFETY: the caller's promise.
    unsafe { !_mm512_fpclass_ps_mask::<NONE>(v) }
}

/// The number that the upper half of each lane is.
///
/// # Safety
///
/// As for [`Simd`](super::super::super::simd::Simd).
#[inline(always)]
unsafe fn upper_part(v: __m512) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe {
        let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
        _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v), upper))
    }
}

/// The upper halves of each lane of the one, and then of the other.
///
/// # Safety
///
/// As for [`Simd`](super::super::super::simd::Simd).
#[inline(always)]
unsafe fn upper_halves(low: __m512, high: __m512) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let odd = _mm512_set_epi16(
            63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23, 21,
            19, 17, 15, 13, 11, 9, 7, 5, 3, 1,
        );
        _mm512_permutex2var_epi16(_mm512_castps_si512(low), odd, _mm512_castps_si512(high))
    }
}

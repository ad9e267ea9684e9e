//! The vector operations of attention on AVX-512 and AVX2.

use std::arch::x86_64::*;

use super::vector::Vector;
use crate::cpu::lanes::LANES;

/// One register is sixteen lanes.
#[derive(Clone, Copy)]
pub(super) struct Avx512;

// SAFETY for the whole impl: the caller vouches for the instructions (the trait's contract); only the loads and `store`
// touch memory, exactly the bytes that the trait names, with unaligned accesses.
impl Vector for Avx512 {
    type F = __m512;
    type I = __m512i;

    const WIDE: bool = true;

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> __m512 {
        // SAFETY: see the impl.
        unsafe {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn splat_f16(bits: u16) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_cvtph_ps(_mm256_set1_epi16(bits as i16)) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: __m512) {
        // SAFETY: see the impl.
        unsafe { _mm512_storeu_ps(to, value) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn fnma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_fnmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn where_below(a: __m512, b: __m512, then: __m512, otherwise: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_mask_mov_ps(otherwise, _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), then) }
    }

    #[inline(always)]
    unsafe fn bits(a: __m512) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_castps_si512(a) }
    }
    #[inline(always)]
    unsafe fn of_bits(a: __m512i) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_castsi512_ps(a) }
    }
    #[inline(always)]
    unsafe fn splat_i(value: i32) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_set1_epi32(value) }
    }
    #[inline(always)]
    unsafe fn add_i(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_add_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn sub_i(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_sub_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn half_i(a: __m512i) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_srai_epi32::<1>(a) }
    }
    #[inline(always)]
    unsafe fn shl_23(a: __m512i) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_slli_epi32::<23>(a) }
    }

    #[inline(always)]
    unsafe fn transpose(rows: &mut [__m512; LANES]) {
        // SAFETY: see the impl.
        unsafe {
            // Four rows at a time inside the quarters, then the quarters among the four.
            let mut fours = [[rows[0]; 4]; 4];
            for (g, four) in fours.iter_mut().enumerate() {
                let (a, b) = (rows[4 * g], rows[4 * g + 1]);
                let (c, d) = (rows[4 * g + 2], rows[4 * g + 3]);
                let ab_low = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
                let ab_high = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
                let cd_low = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
                let cd_high = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
                *four = [
                    _mm512_castpd_ps(_mm512_unpacklo_pd(ab_low, cd_low)),
                    _mm512_castpd_ps(_mm512_unpackhi_pd(ab_low, cd_low)),
                    _mm512_castpd_ps(_mm512_unpacklo_pd(ab_high, cd_high)),
                    _mm512_castpd_ps(_mm512_unpackhi_pd(ab_high, cd_high)),
                ];
            }
            let [a, b, c, d] = fours;
            for i in 0..4 {
                let ab_low = _mm512_shuffle_f32x4::<0b10_00_10_00>(a[i], b[i]);
                let ab_high = _mm512_shuffle_f32x4::<0b11_01_11_01>(a[i], b[i]);
                let cd_low = _mm512_shuffle_f32x4::<0b10_00_10_00>(c[i], d[i]);
                let cd_high = _mm512_shuffle_f32x4::<0b11_01_11_01>(c[i], d[i]);
                rows[i] = _mm512_shuffle_f32x4::<0b10_00_10_00>(ab_low, cd_low);
                rows[4 + i] = _mm512_shuffle_f32x4::<0b10_00_10_00>(ab_high, cd_high);
                rows[8 + i] = _mm512_shuffle_f32x4::<0b11_01_11_01>(ab_low, cd_low);
                rows[12 + i] = _mm512_shuffle_f32x4::<0b11_01_11_01>(ab_high, cd_high);
            }
        }
    }

    #[inline(always)]
    unsafe fn prefetch(address: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
    }
}

/// Two registers are sixteen lanes.
#[derive(Clone, Copy)]
pub(super) struct Avx2;

/// The same operation on both halves.
macro_rules! both {
    ($f:path, $($arg:ident),+) => {
        // SAFETY: see the impl.
        unsafe { [$f($($arg[0]),+), $f($($arg[1]),+)] }
    };
}

// SAFETY for the whole impl: as for AVX-512.
impl Vector for Avx2 {
    type F = [__m256; 2];
    type I = [__m256i; 2];

    const WIDE: bool = false;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::F {
        // SAFETY: see the impl.
        unsafe { [_mm256_set1_ps(value); 2] }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::F {
        // SAFETY: see the impl.
        unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))] }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self::F {
        // SAFETY: see the impl.
        unsafe {
            [
                _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(from.add(16).cast())),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> Self::F {
        // SAFETY: see the impl.
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(16).cast()));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self::F {
        // SAFETY: see the impl.
        unsafe {
            let low = _mm_loadl_epi64(from.cast());
            let high = _mm_loadl_epi64(from.add(8).cast());
            [
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn splat_f16(bits: u16) -> Self::F {
        // SAFETY: see the impl.
        unsafe { [_mm256_cvtph_ps(_mm_set1_epi16(bits as i16)); 2] }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::F) {
        // SAFETY: see the impl.
        unsafe {
            _mm256_storeu_ps(to, value[0]);
            _mm256_storeu_ps(to.add(8), value[1]);
        }
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_add_ps, a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_sub_ps, a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_mul_ps, a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        both!(_mm256_fmadd_ps, a, b, c)
    }
    #[inline(always)]
    unsafe fn fnma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        both!(_mm256_fnmadd_ps, a, b, c)
    }
    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_max_ps, a, b)
    }
    #[inline(always)]
    unsafe fn where_below(a: Self::F, b: Self::F, then: Self::F, otherwise: Self::F) -> Self::F {
        // SAFETY: see the impl.
        unsafe {
            let low = _mm256_cmp_ps::<_CMP_LT_OQ>(a[0], b[0]);
            let high = _mm256_cmp_ps::<_CMP_LT_OQ>(a[1], b[1]);
            [
                _mm256_blendv_ps(otherwise[0], then[0], low),
                _mm256_blendv_ps(otherwise[1], then[1], high),
            ]
        }
    }

    #[inline(always)]
    unsafe fn bits(a: Self::F) -> Self::I {
        both!(_mm256_castps_si256, a)
    }
    #[inline(always)]
    unsafe fn of_bits(a: Self::I) -> Self::F {
        both!(_mm256_castsi256_ps, a)
    }
    #[inline(always)]
    unsafe fn splat_i(value: i32) -> Self::I {
        // SAFETY: see the impl.
        unsafe { [_mm256_set1_epi32(value); 2] }
    }
    #[inline(always)]
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_add_epi32, a, b)
    }
    #[inline(always)]
    unsafe fn sub_i(a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_sub_epi32, a, b)
    }
    #[inline(always)]
    unsafe fn half_i(a: Self::I) -> Self::I {
        both!(_mm256_srai_epi32::<1>, a)
    }
    #[inline(always)]
    unsafe fn shl_23(a: Self::I) -> Self::I {
        both!(_mm256_slli_epi32::<23>, a)
    }

    #[inline(always)]
    unsafe fn transpose(rows: &mut [Self::F; LANES]) {
        // SAFETY: see the impl.
        unsafe {
            // Four squares of eight; those off the diagonal change places.
            let old = *rows;
            for (down, across) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                let mut square = [old[0][0]; 8];
                for (i, row) in square.iter_mut().enumerate() {
                    *row = old[8 * down + i][across];
                }
                let square = square_of_8(square);
                for (i, row) in square.into_iter().enumerate() {
                    rows[8 * across + i][down] = row;
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn prefetch(address: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
    }
}

/// Eight vectors of eight lanes, transposed.
///
/// # Safety
///
/// The processor has AVX.
#[inline(always)]
unsafe fn square_of_8(rows: [__m256; 8]) -> [__m256; 8] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut fours = [[rows[0]; 4]; 2];
        for (g, four) in fours.iter_mut().enumerate() {
            let (a, b) = (rows[4 * g], rows[4 * g + 1]);
            let (c, d) = (rows[4 * g + 2], rows[4 * g + 3]);
            let ab_low = _mm256_castps_pd(_mm256_unpacklo_ps(a, b));
            let ab_high = _mm256_castps_pd(_mm256_unpackhi_ps(a, b));
            let cd_low = _mm256_castps_pd(_mm256_unpacklo_ps(c, d));
            let cd_high = _mm256_castps_pd(_mm256_unpackhi_ps(c, d));
            *four = [
                _mm256_castpd_ps(_mm256_unpacklo_pd(ab_low, cd_low)),
                _mm256_castpd_ps(_mm256_unpackhi_pd(ab_low, cd_low)),
                _mm256_castpd_ps(_mm256_unpacklo_pd(ab_high, cd_high)),
                _mm256_castpd_ps(_mm256_unpackhi_pd(ab_high, cd_high)),
            ];
        }
        let [a, b] = fours;
        let mut out = rows;
        for i in 0..4 {
            out[i] = _mm256_permute2f128_ps::<0x20>(a[i], b[i]);
            out[4 + i] = _mm256_permute2f128_ps::<0x31>(a[i], b[i]);
        }
        out
    }
}

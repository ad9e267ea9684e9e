//! AVX-512 with VNNI: one register is sixteen lanes.

use std::arch::x86_64::*;
use std::ptr;

use super::simd::Simd;

/// AVX-512 F, BW, VL, DQ and VNNI.
#[derive(Clone, Copy)]
pub(super) struct Avx512;

// SAFETY for the whole impl: the caller vouches for the instructions (the trait's contract); only
// the loads, `store_f` and the gathers touch memory, exactly the bytes that the trait names, with
// unaligned accesses.
impl Simd for Avx512 {
    type F = __m512;
    type I = __m512i;
    type Sums = __m512i;

    const BIASED: bool = true;
    const WIDE: bool = true;
    const NARROW: bool = false;

    #[inline(always)]
    unsafe fn splat_f(value: f32) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn store_f(to: *mut f32, value: __m512) {
        // SAFETY: see the impl.
        unsafe { _mm512_storeu_ps(to, value) }
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
    unsafe fn fms(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_fmsub_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn one_nan(value: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe {
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value);
            _mm512_mask_mov_ps(
                value,
                nan,
                _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc0_0000)),
            )
        }
    }

    #[inline(always)]
    unsafe fn splat_i(value: i32) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_set1_epi32(value) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_add_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn times(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_mullo_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn and(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_and_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_or_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn xor(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_xor_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn shl<const N: u32>(a: __m512i) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_slli_epi32::<N>(a) }
    }
    #[inline(always)]
    unsafe fn shr<const N: u32>(a: __m512i) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_srli_epi32::<N>(a) }
    }
    #[inline(always)]
    unsafe fn shr_by(a: __m512i, count: u32) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_srl_epi32(a, _mm_cvtsi32_si128(count as i32)) }
    }
    #[inline(always)]
    unsafe fn sar<const N: u32>(a: __m512i) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_srai_epi32::<N>(a) }
    }
    #[inline(always)]
    unsafe fn to_f(a: __m512i) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_cvtepi32_ps(a) }
    }
    #[inline(always)]
    unsafe fn bits_f(a: __m512i) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_castsi512_ps(a) }
    }
    #[inline(always)]
    unsafe fn halves_in_order(a: __m512i) -> [__m512; 2] {
        // SAFETY: see the impl.
        unsafe {
            [
                _mm512_cvtph_ps(_mm512_castsi512_si256(a)),
                _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(a)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn halves(a: __m512i) -> [__m512; 2] {
        // SAFETY: see the impl.
        unsafe {
            // Even 16-bit elements into the lower half of the register, odd ones into the upper.
            let order = _mm512_set_epi16(
                31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 30, 28, 26, 24, 22, 20,
                18, 16, 14, 12, 10, 8, 6, 4, 2, 0,
            );
            let split = _mm512_permutexvar_epi16(order, a);
            [
                _mm512_cvtph_ps(_mm512_castsi512_si256(split)),
                _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(split)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn lookup(table: &[u8; 16], at: __m512i) -> __m512i {
        // SAFETY: see the impl; the table has 16 bytes.
        unsafe {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, at)
        }
    }

    #[inline(always)]
    unsafe fn dot_u7(acc: __m512i, w: __m512i, x: __m512i) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_dpbusd_epi32(acc, w, x) }
    }
    #[inline(always)]
    unsafe fn open(start: Self::I) -> Self::I {
        start
    }
    #[inline(always)]
    unsafe fn add_small(sums: Self::I, w: Self::I, x: Self::I) -> Self::I {
        // SAFETY: see the impl.
        unsafe { Self::dot_u7(sums, w, x) }
    }
    #[inline(always)]
    unsafe fn close(_: Self::I, sums: Self::I) -> Self::I {
        sums
    }
    #[inline(always)]
    unsafe fn factor(value: Self::I) -> Self::I {
        value
    }
    #[inline(always)]
    unsafe fn two_factors(a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: see the impl.
        unsafe { Self::or(Self::and(a, Self::splat_i(0xffff)), Self::shl::<16>(b)) }
    }
    #[inline(always)]
    unsafe fn close_times(acc: Self::I, sums: Self::I, factor: Self::I) -> Self::I {
        // SAFETY: see the impl.
        unsafe { Self::add(acc, Self::times(sums, factor)) }
    }
    #[inline(always)]
    unsafe fn dot_i8(acc: __m512i, w: __m512i, x: __m512i) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_dpbusd_epi32(acc, w, x) }
    }
    #[inline(always)]
    unsafe fn dot_i16(acc: __m512i, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_dpwssd_epi32(acc, a, b) }
    }

    #[inline(always)]
    unsafe fn load_i(from: *const u8) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    #[inline(always)]
    unsafe fn load_halves(from: *const u8) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast())) }
    }
    #[inline(always)]
    unsafe fn gather(from: *const u8, stride: usize) -> __m512i {
        // SAFETY: see the impl. Masked broadcasts: one load and one blend a row.
        unsafe {
            macro_rules! rows {
                ($first:literal $($r:literal)*) => {{
                    let mut v = _mm512_set1_epi32(ptr::read_unaligned(from.add($first * stride).cast()));
                    $(
                        let word = ptr::read_unaligned(from.add($r * stride).cast());
                        v = _mm512_mask_set1_epi32(v, 1 << $r, word);
                    )*
                    v
                }};
            }
            let a = rows!(0 1 2 3 4 5 6 7);
            let b = rows!(8 9 10 11 12 13 14 15);
            _mm512_mask_mov_epi32(a, 0xff00, b)
        }
    }
    #[inline(always)]
    unsafe fn gather4(from: *const u8, stride: usize) -> [__m512i; 4] {
        // SAFETY: see the impl.
        unsafe {
            // Register i holds the 16 bytes of rows i, 4 + i, 8 + i, 12 + i: what is left to do is a
            // transposition of 4 × 4 words inside each quarter.
            macro_rules! row {
                ($r:expr) => {
                    _mm_loadu_si128(from.add($r * stride).cast())
                };
            }
            macro_rules! rows {
                ($i:literal) => {{
                    let v = _mm512_castsi128_si512(row!($i));
                    let v = _mm512_inserti32x4::<1>(v, row!(4 + $i));
                    let v = _mm512_inserti32x4::<2>(v, row!(8 + $i));
                    _mm512_inserti32x4::<3>(v, row!(12 + $i))
                }};
            }
            let (a, b, c, d) = (rows!(0), rows!(1), rows!(2), rows!(3));
            let (ab_low, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
            let (cd_low, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
            [
                _mm512_unpacklo_epi64(ab_low, cd_low),
                _mm512_unpackhi_epi64(ab_low, cd_low),
                _mm512_unpacklo_epi64(ab_high, cd_high),
                _mm512_unpackhi_epi64(ab_high, cd_high),
            ]
        }
    }
    #[inline(always)]
    unsafe fn gather16(from: *const u8, stride: usize) -> [__m512i; 16] {
        // SAFETY: see the impl.
        unsafe {
            // Four rows at a time inside the quarters, then the quarters among the four.
            macro_rules! four {
                ($first:literal) => {{
                    let a = _mm512_loadu_si512(from.add($first * stride).cast());
                    let b = _mm512_loadu_si512(from.add(($first + 1) * stride).cast());
                    let c = _mm512_loadu_si512(from.add(($first + 2) * stride).cast());
                    let d = _mm512_loadu_si512(from.add(($first + 3) * stride).cast());
                    let (ab_low, ab_high) =
                        (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
                    let (cd_low, cd_high) =
                        (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
                    [
                        _mm512_unpacklo_epi64(ab_low, cd_low),
                        _mm512_unpackhi_epi64(ab_low, cd_low),
                        _mm512_unpacklo_epi64(ab_high, cd_high),
                        _mm512_unpackhi_epi64(ab_high, cd_high),
                    ]
                }};
            }
            let (a, b, c, d) = (four!(0), four!(4), four!(8), four!(12));
            let mut words = [a[0]; 16];
            for i in 0..4 {
                let ab_low = _mm512_shuffle_i32x4::<0b10_00_10_00>(a[i], b[i]);
                let ab_high = _mm512_shuffle_i32x4::<0b11_01_11_01>(a[i], b[i]);
                let cd_low = _mm512_shuffle_i32x4::<0b10_00_10_00>(c[i], d[i]);
                let cd_high = _mm512_shuffle_i32x4::<0b11_01_11_01>(c[i], d[i]);
                words[i] = _mm512_shuffle_i32x4::<0b10_00_10_00>(ab_low, cd_low);
                words[4 + i] = _mm512_shuffle_i32x4::<0b10_00_10_00>(ab_high, cd_high);
                words[8 + i] = _mm512_shuffle_i32x4::<0b11_01_11_01>(ab_low, cd_low);
                words[12 + i] = _mm512_shuffle_i32x4::<0b11_01_11_01>(ab_high, cd_high);
            }
            words
        }
    }

    #[inline(always)]
    unsafe fn prefetch(address: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
    }
    #[inline(always)]
    unsafe fn prefetch_near(address: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
}

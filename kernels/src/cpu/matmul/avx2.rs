//! AVX2 with FMA and F16C: two registers are sixteen lanes. With AVX-VNNI products of bytes are one instruction.

use std::arch::asm;
use std::arch::x86_64::*;
use std::ptr;

use super::simd::Simd;

/// AVX2, FMA and F16C.
pub(super) type Avx2 = On<false>;
/// The same and AVX-VNNI.
pub(super) type AvxVnni = On<true>;

/// Either of them.
#[derive(Clone, Copy)]
pub(super) struct On<const VNNI: bool>;

// Not closures: a closure that calls an intrinsic is compiled without the instructions of the function
// it is written in, and stays a call.
macro_rules! both {
    ($op:ident, $a:expr) => {{
        let a = $a;
        [$op(a[0]), $op(a[1])]
    }};
    ($op:ident, $a:expr, each $b:expr) => {{
        let (a, b) = ($a, $b);
        [$op(a[0], b[0]), $op(a[1], b[1])]
    }};
    ($op:ident, $a:expr, $b:expr) => {{
        let (a, b) = ($a, $b);
        [$op(a[0], b), $op(a[1], b)]
    }};
}

/// Four consecutive words of eight rows, transposed.
///
/// # Safety
///
/// The processor has AVX2; 16 bytes of each row are readable.
#[inline(always)]
unsafe fn gather4_of8(from: *const u8, stride: usize) -> [__m256i; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        macro_rules! rows {
            ($i:literal) => {{
                let low = _mm_loadu_si128(from.add($i * stride).cast());
                let high = _mm_loadu_si128(from.add((4 + $i) * stride).cast());
                _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high)
            }};
        }
        let (a, b, c, d) = (rows!(0), rows!(1), rows!(2), rows!(3));
        let (ab_low, ab_high) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        let (cd_low, cd_high) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
        [
            _mm256_unpacklo_epi64(ab_low, cd_low),
            _mm256_unpackhi_epi64(ab_low, cd_low),
            _mm256_unpacklo_epi64(ab_high, cd_high),
            _mm256_unpackhi_epi64(ab_high, cd_high),
        ]
    }
}

/// See [`Simd::settle`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn settle(a: &mut __m256i, b: &mut __m256i) {
    let (mut x, mut y) = (*a, *b);
    // SAFETY: no instruction.
    unsafe {
        asm!("/* {0} {1} */", inout(ymm_reg) x, inout(ymm_reg) y, options(nomem, nostack, preserves_flags));
    }
    (*a, *b) = (x, y);
}

/// See [`Simd::settle_f`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn settle_f(a: &mut __m256, b: &mut __m256) {
    let (mut x, mut y) = (*a, *b);
    // SAFETY: no instruction.
    unsafe {
        asm!("/* {0} {1} */", inout(ymm_reg) x, inout(ymm_reg) y, options(nomem, nostack, preserves_flags));
    }
    (*a, *b) = (x, y);
}

/// `acc + Σ w_i · x_i` over the four bytes of each word: `w` unsigned, `x` signed.
///
/// # Safety
///
/// The processor has AVX2 and AVX-VNNI.
#[inline(always)]
unsafe fn dot_bytes(acc: [__m256i; 2], w: [__m256i; 2], x: [__m256i; 2]) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        [
            _mm256_dpbusd_avx_epi32(acc[0], w[0], x[0]),
            _mm256_dpbusd_avx_epi32(acc[1], w[1], x[1]),
        ]
    }
}

// SAFETY for the whole impl: the caller vouches for the instructions (the trait's contract); only
// the loads, `store_f` and the gathers touch memory, exactly the bytes that the trait names, with
// unaligned accesses.
impl<const VNNI: bool> Simd for On<VNNI> {
    type F = [__m256; 2];
    type I = [__m256i; 2];
    /// Without AVX-VNNI pairs of products, in 16 bits.
    type Sums = [__m256i; 2];

    const BIASED: bool = VNNI;
    const WIDE: bool = false;
    const NARROW: bool = !VNNI;

    #[inline(always)]
    unsafe fn splat_f(value: f32) -> Self::F {
        // SAFETY: see the impl.
        unsafe { [_mm256_set1_ps(value); 2] }
    }
    #[inline(always)]
    unsafe fn store_f(to: *mut f32, value: Self::F) {
        // SAFETY: see the impl.
        unsafe {
            _mm256_storeu_ps(to, value[0]);
            _mm256_storeu_ps(to.add(8), value[1]);
        }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: see the impl.
        unsafe { both!(_mm256_mul_ps, a, each b) }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // SAFETY: see the impl.
        unsafe {
            [
                _mm256_fmadd_ps(a[0], b[0], c[0]),
                _mm256_fmadd_ps(a[1], b[1], c[1]),
            ]
        }
    }
    #[inline(always)]
    unsafe fn fms(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // SAFETY: see the impl.
        unsafe {
            [
                _mm256_fmsub_ps(a[0], b[0], c[0]),
                _mm256_fmsub_ps(a[1], b[1], c[1]),
            ]
        }
    }
    #[inline(always)]
    unsafe fn one_nan(value: Self::F) -> Self::F {
        // SAFETY: see the impl.
        unsafe {
            let nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc0_0000));
            let [a, b] = value;
            [
                _mm256_blendv_ps(a, nan, _mm256_cmp_ps::<_CMP_UNORD_Q>(a, a)),
                _mm256_blendv_ps(b, nan, _mm256_cmp_ps::<_CMP_UNORD_Q>(b, b)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn splat_i(value: i32) -> Self::I {
        // SAFETY: see the impl.
        unsafe { [_mm256_set1_epi32(value); 2] }
    }
    #[inline(always)]
    unsafe fn add(a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: see the impl.
        unsafe { both!(_mm256_add_epi32, a, each b) }
    }
    #[inline(always)]
    unsafe fn times(a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: see the impl.
        unsafe { both!(_mm256_mullo_epi32, a, each b) }
    }
    #[inline(always)]
    unsafe fn and(a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: see the impl.
        unsafe { both!(_mm256_and_si256, a, each b) }
    }
    #[inline(always)]
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: see the impl.
        unsafe { both!(_mm256_or_si256, a, each b) }
    }
    #[inline(always)]
    unsafe fn xor(a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: see the impl.
        unsafe { both!(_mm256_xor_si256, a, each b) }
    }
    #[inline(always)]
    unsafe fn shl<const N: u32>(a: Self::I) -> Self::I {
        // SAFETY: see the impl.
        unsafe {
            let count = _mm_cvtsi32_si128(N as i32);
            both!(_mm256_sll_epi32, a, count)
        }
    }
    #[inline(always)]
    unsafe fn shr<const N: u32>(a: Self::I) -> Self::I {
        // SAFETY: see the impl.
        unsafe {
            let count = _mm_cvtsi32_si128(N as i32);
            both!(_mm256_srl_epi32, a, count)
        }
    }
    #[inline(always)]
    unsafe fn shr_by(a: Self::I, count: u32) -> Self::I {
        // SAFETY: see the impl.
        unsafe {
            let count = _mm_cvtsi32_si128(count as i32);
            both!(_mm256_srl_epi32, a, count)
        }
    }
    #[inline(always)]
    unsafe fn sar<const N: u32>(a: Self::I) -> Self::I {
        // SAFETY: see the impl.
        unsafe {
            let count = _mm_cvtsi32_si128(N as i32);
            both!(_mm256_sra_epi32, a, count)
        }
    }
    #[inline(always)]
    unsafe fn to_f(a: Self::I) -> Self::F {
        // SAFETY: see the impl.
        unsafe { both!(_mm256_cvtepi32_ps, a) }
    }
    #[inline(always)]
    unsafe fn bits_f(a: Self::I) -> Self::F {
        // SAFETY: see the impl.
        unsafe { both!(_mm256_castsi256_ps, a) }
    }
    #[inline(always)]
    unsafe fn halves(a: Self::I) -> [Self::F; 2] {
        // SAFETY: see the impl.
        unsafe {
            // Even 16-bit elements of each quarter into its lower 8 bytes, odd ones into the upper;
            // then the quarters' lower 8 bytes together.
            let order = _mm256_setr_epi8(
                0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1, 4, 5, 8, 9, 12, 13, 2,
                3, 6, 7, 10, 11, 14, 15,
            );
            let [a, b] = both!(_mm256_shuffle_epi8, a, order);
            let a = _mm256_permute4x64_epi64::<0b11_01_10_00>(a);
            let b = _mm256_permute4x64_epi64::<0b11_01_10_00>(b);
            [
                [
                    _mm256_cvtph_ps(_mm256_castsi256_si128(a)),
                    _mm256_cvtph_ps(_mm256_castsi256_si128(b)),
                ],
                [
                    _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(a)),
                    _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(b)),
                ],
            ]
        }
    }

    #[inline(always)]
    unsafe fn halves_in_order(a: Self::I) -> [Self::F; 2] {
        // SAFETY: see the impl.
        unsafe {
            macro_rules! sixteen {
                ($a:expr) => {
                    [
                        _mm256_cvtph_ps(_mm256_castsi256_si128($a)),
                        _mm256_cvtph_ps(_mm256_extracti128_si256::<1>($a)),
                    ]
                };
            }
            [sixteen!(a[0]), sixteen!(a[1])]
        }
    }

    #[inline(always)]
    unsafe fn lookup(table: &[u8; 16], at: Self::I) -> Self::I {
        // SAFETY: see the impl; the table has 16 bytes.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            [
                _mm256_shuffle_epi8(table, at[0]),
                _mm256_shuffle_epi8(table, at[1]),
            ]
        }
    }

    #[inline(always)]
    unsafe fn fifth_bits(bits: Self::I, g: u32) -> Self::I {
        // SAFETY: see the impl.
        unsafe {
            // The byte that has the four, four times; of each one its own bit.
            let byte = _mm256_set1_epi32((g / 2 * 0x0101_0101) as i32);
            let words = _mm256_setr_epi32(
                0,
                0x0404_0404,
                0x0808_0808,
                0x0c0c_0c0c,
                0,
                0x0404_0404,
                0x0808_0808,
                0x0c0c_0c0c,
            );
            let order = _mm256_add_epi8(words, byte);
            let own = _mm256_set1_epi32(match g % 2 {
                0 => 0x0804_0201,
                _ => 0x8040_2010_u32 as i32,
            });
            let fifth = _mm256_set1_epi8(16);
            let bytes = both!(_mm256_shuffle_epi8, bits, order);
            let set = both!(_mm256_and_si256, bytes, own);
            let set = both!(_mm256_cmpeq_epi8, set, own);
            both!(_mm256_and_si256, set, fifth)
        }
    }

    #[inline(always)]
    unsafe fn dot_u7(acc: Self::I, w: Self::I, x: Self::I) -> Self::I {
        // SAFETY: see the impl.
        unsafe {
            if VNNI {
                return dot_bytes(acc, w, x);
            }
            // At most 2 · 127 · 127 in 16 bits: nothing saturates.
            let ones = _mm256_set1_epi16(1);
            let pairs = both!(_mm256_maddubs_epi16, w, each x);
            let sums = both!(_mm256_madd_epi16, pairs, ones);
            both!(_mm256_add_epi32, acc, each sums)
        }
    }
    #[inline(always)]
    unsafe fn open(start: Self::I) -> Self::Sums {
        if VNNI {
            return start;
        }
        // SAFETY: see the impl.
        unsafe { [_mm256_setzero_si256(); 2] }
    }
    #[inline(always)]
    unsafe fn add_small(sums: Self::Sums, w: Self::I, x: Self::I) -> Self::Sums {
        // SAFETY: see the impl.
        unsafe {
            if VNNI {
                return dot_bytes(sums, w, x);
            }
            let pairs = both!(_mm256_maddubs_epi16, w, each x);
            both!(_mm256_add_epi16, sums, each pairs)
        }
    }
    #[inline(always)]
    unsafe fn settle([a, b]: &mut Self::Sums) {
        // SAFETY: see the impl.
        unsafe { settle(a, b) }
    }
    #[inline(always)]
    unsafe fn settle_i([a, b]: &mut Self::I) {
        // SAFETY: see the impl.
        unsafe { settle(a, b) }
    }
    #[inline(always)]
    unsafe fn settle_f([a, b]: &mut Self::F) {
        // SAFETY: see the impl.
        unsafe { settle_f(a, b) }
    }
    #[inline(always)]
    unsafe fn close(start: Self::I, sums: Self::Sums) -> Self::I {
        if VNNI {
            return sums;
        }
        // SAFETY: see the impl.
        unsafe { Self::close_times(start, sums, [_mm256_set1_epi16(1); 2]) }
    }
    #[inline(always)]
    unsafe fn factor(value: Self::I) -> Self::I {
        // SAFETY: see the impl. Once in each half of the word.
        unsafe {
            if VNNI {
                return value;
            }
            let [a, b] = value;
            let (upper_a, upper_b) = (_mm256_slli_epi32::<16>(a), _mm256_slli_epi32::<16>(b));
            [
                _mm256_blend_epi16::<0b1010_1010>(a, upper_a),
                _mm256_blend_epi16::<0b1010_1010>(b, upper_b),
            ]
        }
    }
    #[inline(always)]
    unsafe fn two_factors(a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: see the impl.
        unsafe {
            let b = match VNNI {
                true => [_mm256_slli_epi32::<16>(b[0]), _mm256_slli_epi32::<16>(b[1])],
                false => b,
            };
            [
                _mm256_blend_epi16::<0b1010_1010>(a[0], b[0]),
                _mm256_blend_epi16::<0b1010_1010>(a[1], b[1]),
            ]
        }
    }
    #[inline(always)]
    unsafe fn close_times(acc: Self::I, sums: Self::Sums, factor: Self::I) -> Self::I {
        // SAFETY: see the impl.
        unsafe {
            let products = match VNNI {
                true => both!(_mm256_mullo_epi32, sums, each factor),
                false => both!(_mm256_madd_epi16, sums, each factor),
            };
            both!(_mm256_add_epi32, acc, each products)
        }
    }
    #[inline(always)]
    unsafe fn dot_i8(acc: Self::I, w: Self::I, x: Self::I) -> Self::I {
        // SAFETY: see the impl.
        unsafe {
            if VNNI {
                return dot_bytes(acc, w, x);
            }
            // |w| · (x with the sign of w): at most 2 · 128 · 127 in 16 bits, nothing saturates.
            let ones = _mm256_set1_epi16(1);
            let sizes = both!(_mm256_abs_epi8, w);
            let signed = both!(_mm256_sign_epi8, x, each w);
            let pairs = both!(_mm256_maddubs_epi16, sizes, each signed);
            let sums = both!(_mm256_madd_epi16, pairs, ones);
            both!(_mm256_add_epi32, acc, each sums)
        }
    }
    #[inline(always)]
    unsafe fn dot_i16(acc: Self::I, a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: see the impl.
        unsafe {
            let sums = both!(_mm256_madd_epi16, a, each b);
            both!(_mm256_add_epi32, acc, each sums)
        }
    }

    #[inline(always)]
    unsafe fn load_i(from: *const u8) -> Self::I {
        // SAFETY: see the impl.
        unsafe {
            [
                _mm256_loadu_si256(from.cast()),
                _mm256_loadu_si256(from.add(32).cast()),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_halves(from: *const u8) -> Self::F {
        // SAFETY: see the impl.
        unsafe {
            [
                _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(from.add(16).cast())),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> Self::I {
        // SAFETY: see the impl.
        unsafe {
            [
                _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast())),
                _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.add(8).cast())),
            ]
        }
    }
    #[inline(always)]
    unsafe fn gather(from: *const u8, stride: usize) -> Self::I {
        // SAFETY: see the impl.
        unsafe {
            macro_rules! eight {
                ($($r:literal)*) => {
                    _mm256_setr_epi32($(ptr::read_unaligned(from.add($r * stride).cast())),*)
                };
            }
            [eight!(0 1 2 3 4 5 6 7), eight!(8 9 10 11 12 13 14 15)]
        }
    }
    #[inline(always)]
    unsafe fn gather4(from: *const u8, stride: usize) -> [Self::I; 4] {
        // SAFETY: see the impl.
        unsafe {
            let low = gather4_of8(from, stride);
            let high = gather4_of8(from.add(8 * stride), stride);
            [
                [low[0], high[0]],
                [low[1], high[1]],
                [low[2], high[2]],
                [low[3], high[3]],
            ]
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

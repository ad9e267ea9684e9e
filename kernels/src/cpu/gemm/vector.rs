//! One register of floating-point lanes: what the GEMM needs of an instruction path, and how elements of each
//! dtype get into it. Lanes are independent outputs, so their number is a matter of speed only.

use std::ops::{Add, Div};

use half::{bf16, f16};

use crate::cpu::lanes::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};

/// What products are summed in.
pub(in crate::cpu) trait Number:
    Copy + PartialOrd + Add<Output = Self> + Div<Output = Self>
{
    const ZERO: Self;
    /// Below every number.
    const LEAST: Self;
    /// The nearest value.
    fn from_f64(value: f64) -> Self;
    fn is_nan(self) -> bool;
    /// `a · b + c`, rounded once.
    fn fma(a: Self, b: Self, c: Self) -> Self;
    /// The value, but every NaN with the bits of [`f32::NAN`].
    fn one_nan(self) -> Self;
}

macro_rules! number {
    ($type:ty, $nan:expr) => {
        impl Number for $type {
            const ZERO: Self = 0.0;
            const LEAST: Self = <$type>::NEG_INFINITY;
            fn from_f64(value: f64) -> Self {
                value as $type
            }
            #[inline(always)]
            fn is_nan(self) -> bool {
                <$type>::is_nan(self)
            }
            #[inline(always)]
            fn fma(a: Self, b: Self, c: Self) -> Self {
                a.mul_add(b, c)
            }
            #[inline(always)]
            fn one_nan(self) -> Self {
                if self.is_nan() { $nan } else { self }
            }
        }
    };
}
number!(f32, f32::from_bits(0x7fc0_0000));
number!(f64, f64::from_bits(0x7ff8_0000_0000_0000));

/// A dtype of the operands and the result.
pub(in crate::cpu) trait Element: Copy + 'static {
    /// The registers of each path.
    #[cfg(target_arch = "x86_64")]
    type Avx512: Load<Self, Lane = Self::Sum>;
    #[cfg(target_arch = "x86_64")]
    type Avx2: Load<Self, Lane = Self::Sum>;
    type Portable: Load<Self, Lane = Self::Sum>;
    /// What it is converted to, exactly, before it is multiplied.
    type Sum: Number;
    fn widen(self) -> Self::Sum;
    /// The nearest value, ties to even.
    fn narrow(sum: Self::Sum) -> Self;
}

impl Element for f32 {
    #[cfg(target_arch = "x86_64")]
    type Avx512 = std::arch::x86_64::__m512;
    #[cfg(target_arch = "x86_64")]
    type Avx2 = std::arch::x86_64::__m256;
    type Portable = [f32; 8];
    type Sum = f32;
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn narrow(sum: f32) -> f32 {
        sum
    }
}

impl Element for f64 {
    #[cfg(target_arch = "x86_64")]
    type Avx512 = std::arch::x86_64::__m512d;
    #[cfg(target_arch = "x86_64")]
    type Avx2 = std::arch::x86_64::__m256d;
    type Portable = [f64; 4];
    type Sum = f64;
    #[inline(always)]
    fn widen(self) -> f64 {
        self
    }
    #[inline(always)]
    fn narrow(sum: f64) -> f64 {
        sum
    }
}

impl Element for f16 {
    #[cfg(target_arch = "x86_64")]
    type Avx512 = std::arch::x86_64::__m512;
    #[cfg(target_arch = "x86_64")]
    type Avx2 = std::arch::x86_64::__m256;
    type Portable = [f32; 8];
    type Sum = f32;
    #[inline(always)]
    fn widen(self) -> f32 {
        f16_to_f32(self.to_bits())
    }
    #[inline(always)]
    fn narrow(sum: f32) -> f16 {
        f16::from_bits(f32_to_f16(sum))
    }
}

impl Element for bf16 {
    #[cfg(target_arch = "x86_64")]
    type Avx512 = std::arch::x86_64::__m512;
    #[cfg(target_arch = "x86_64")]
    type Avx2 = std::arch::x86_64::__m256;
    type Portable = [f32; 8];
    type Sum = f32;
    #[inline(always)]
    fn widen(self) -> f32 {
        bf16_to_f32(self.to_bits())
    }
    #[inline(always)]
    fn narrow(sum: f32) -> bf16 {
        bf16::from_bits(f32_to_bf16(sum))
    }
}

/// A register.
///
/// # Safety
///
/// The processor has the instructions, and pointers are valid for all lanes, at any alignment.
pub(in crate::cpu) trait Vector: Copy {
    type Lane: Number;
    const LANES: usize;
    unsafe fn splat(value: Self::Lane) -> Self;
    unsafe fn load(from: *const Self::Lane) -> Self;
    unsafe fn store(self, to: *mut Self::Lane);
    unsafe fn fma(a: Self, b: Self, c: Self) -> Self;
    unsafe fn one_nan(self) -> Self;
}

/// A register filled with elements of a dtype, widened.
///
/// # Safety
///
/// As for [`Vector`].
pub(in crate::cpu) trait Load<T>: Vector {
    unsafe fn widen(from: *const T) -> Self;
}

macro_rules! arrays {
    ($lane:ty, $lanes:literal, $($element:ty),+) => {
        // SAFETY for the whole impl: memory is touched by `load` and `store` only, as the trait says.
        impl Vector for [$lane; $lanes] {
            type Lane = $lane;
            const LANES: usize = $lanes;
            #[inline(always)]
            unsafe fn splat(value: $lane) -> Self {
                [value; $lanes]
            }
            #[inline(always)]
            unsafe fn load(from: *const $lane) -> Self {
                // SAFETY: see the impl.
                unsafe { from.cast::<Self>().read_unaligned() }
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut $lane) {
                // SAFETY: see the impl.
                unsafe { to.cast::<Self>().write_unaligned(self) }
            }
            #[inline(always)]
            unsafe fn fma(a: Self, b: Self, mut c: Self) -> Self {
                for i in 0..$lanes {
                    c[i] = a[i].mul_add(b[i], c[i]);
                }
                c
            }
            #[inline(always)]
            unsafe fn one_nan(mut self) -> Self {
                for lane in &mut self {
                    *lane = lane.one_nan();
                }
                self
            }
        }
        $(impl Load<$element> for [$lane; $lanes] {
            #[inline(always)]
            unsafe fn widen(from: *const $element) -> Self {
                let mut lanes = [0.0; $lanes];
                for (i, lane) in lanes.iter_mut().enumerate() {
                    // SAFETY: the trait's contract.
                    *lane = Element::widen(unsafe { from.add(i).read_unaligned() });
                }
                lanes
            }
        })+
    };
}
arrays!(f32, 8, f32, f16, bf16);
arrays!(f64, 4, f64);

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use half::{bf16, f16};

    use super::{Load, Number, Vector};

    macro_rules! register {
        ($register:ty, $lane:ty, $lanes:literal, $splat:ident, $load:ident, $store:ident, $fma:ident,
         $value:ident => $one_nan:expr) => {
            // SAFETY for the whole impl: the trait's contract; accesses are unaligned ones.
            impl Vector for $register {
                type Lane = $lane;
                const LANES: usize = $lanes;
                #[inline(always)]
                unsafe fn splat(value: $lane) -> Self {
                    // SAFETY: see the impl.
                    unsafe { $splat(value) }
                }
                #[inline(always)]
                unsafe fn load(from: *const $lane) -> Self {
                    // SAFETY: see the impl.
                    unsafe { $load(from) }
                }
                #[inline(always)]
                unsafe fn store(self, to: *mut $lane) {
                    // SAFETY: see the impl.
                    unsafe { $store(to, self) }
                }
                #[inline(always)]
                unsafe fn fma(a: Self, b: Self, c: Self) -> Self {
                    // SAFETY: see the impl.
                    unsafe { $fma(a, b, c) }
                }
                #[inline(always)]
                unsafe fn one_nan(self) -> Self {
                    let $value = self;
                    // SAFETY: see the impl.
                    unsafe { $one_nan }
                }
            }
            impl Load<$lane> for $register {
                #[inline(always)]
                unsafe fn widen(from: *const $lane) -> Self {
                    // SAFETY: the trait's contract.
                    unsafe { $load(from) }
                }
            }
        };
    }
    register!(__m512, f32, 16, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_fmadd_ps,
        v => _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v), _mm512_set1_ps(f32::NAN.one_nan())));
    register!(__m512d, f64, 8, _mm512_set1_pd, _mm512_loadu_pd, _mm512_storeu_pd, _mm512_fmadd_pd,
        v => _mm512_mask_mov_pd(v, _mm512_cmp_pd_mask::<_CMP_UNORD_Q>(v, v), _mm512_set1_pd(f64::NAN.one_nan())));
    register!(__m256, f32, 8, _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_fmadd_ps,
        v => _mm256_blendv_ps(v, _mm256_set1_ps(f32::NAN.one_nan()), _mm256_cmp_ps::<_CMP_UNORD_Q>(v, v)));
    register!(__m256d, f64, 4, _mm256_set1_pd, _mm256_loadu_pd, _mm256_storeu_pd, _mm256_fmadd_pd,
        v => _mm256_blendv_pd(v, _mm256_set1_pd(f64::NAN.one_nan()), _mm256_cmp_pd::<_CMP_UNORD_Q>(v, v)));

    macro_rules! halves {
        ($register:ty, $element:ty, $from:ident => $value:expr) => {
            impl Load<$element> for $register {
                #[inline(always)]
                unsafe fn widen($from: *const $element) -> Self {
                    // SAFETY: the trait's contract.
                    unsafe { $value }
                }
            }
        };
    }
    halves!(__m512, f16, from => _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())));
    halves!(__m256, f16, from => _mm256_cvtph_ps(_mm_loadu_si128(from.cast())));
    halves!(__m512, bf16, from => _mm512_castsi512_ps(_mm512_slli_epi32::<16>(
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast())))));
    halves!(__m256, bf16, from => _mm256_castsi256_ps(_mm256_slli_epi32::<16>(
        _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast())))));
}

//! The vector operations that attention is written in: sixteen lanes of `f32` on every path, each operation rounded once.
//!
//! The processors' functions are safe to call only where their instructions exist, and are only fast where the caller was
//! compiled for them: everything between such a caller and these is `#[inline(always)]`, without closures.

use crate::cpu::lanes::{LANES, bf16_to_f32, f16_to_f32};

/// One instruction path.
///
/// # Safety
///
/// The processor has the path's instructions. Functions that take pointers read or write exactly what they say, at any
/// alignment.
pub(super) trait Vector: Copy {
    /// Sixteen `f32`.
    type F: Copy;
    /// Sixteen `i32`.
    type I: Copy;

    /// Whether there are registers for four by four vectors of sums.
    const WIDE: bool;

    unsafe fn splat(value: f32) -> Self::F;
    /// Reads 64 bytes.
    unsafe fn load(from: *const f32) -> Self::F;
    /// Reads sixteen half-precision numbers, 32 bytes.
    unsafe fn load_f16(from: *const u8) -> Self::F;
    /// Reads sixteen bfloat16 numbers, 32 bytes.
    unsafe fn load_bf16(from: *const u8) -> Self::F;
    /// Reads sixteen signed bytes.
    unsafe fn load_i8(from: *const u8) -> Self::F;
    /// A half-precision number in every lane.
    unsafe fn splat_f16(bits: u16) -> Self::F;
    /// Writes 64 bytes.
    unsafe fn store(to: *mut f32, value: Self::F);
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// `a · b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `c − a · b`, rounded once.
    unsafe fn fnma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The greater of each pair; the second where one is NaN.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// `then` in the lanes where `a < b`, else `otherwise`.
    unsafe fn where_below(a: Self::F, b: Self::F, then: Self::F, otherwise: Self::F) -> Self::F;

    unsafe fn bits(a: Self::F) -> Self::I;
    unsafe fn of_bits(a: Self::I) -> Self::F;
    unsafe fn splat_i(value: i32) -> Self::I;
    /// Wraps.
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I;
    /// Wraps.
    unsafe fn sub_i(a: Self::I, b: Self::I) -> Self::I;
    /// Half, rounded down.
    unsafe fn half_i(a: Self::I) -> Self::I;
    unsafe fn shl_23(a: Self::I) -> Self::I;

    /// Lane `i` of vector `j` becomes lane `j` of vector `i`.
    unsafe fn transpose(rows: &mut [Self::F; LANES]);

    /// Asks for the cache line of an address that need not exist.
    #[inline(always)]
    unsafe fn prefetch(address: *const u8) {
        let _ = address;
    }

    /// [`lanes::exp`](crate::cpu::lanes::exp) of every lane, bit for bit.
    #[inline(always)]
    unsafe fn exp(x: Self::F) -> Self::F {
        const MAGIC: f32 = 12_582_912.0;
        // SAFETY: the caller's promise; no memory is touched.
        unsafe {
            let magic = Self::splat(MAGIC);
            let shifted = Self::fma(x, Self::splat(std::f32::consts::LOG2_E), magic);
            let n = Self::sub_i(Self::bits(shifted), Self::bits(magic));
            let nf = Self::sub(shifted, magic);
            let r = Self::fnma(nf, Self::splat(0.693_359_4), x);
            let r = Self::fnma(nf, Self::splat(-2.121_944_4e-4), r);
            let p = Self::splat(1.987_569_1e-4);
            let p = Self::fma(p, r, Self::splat(1.398_2e-3));
            let p = Self::fma(p, r, Self::splat(8.333_452e-3));
            let p = Self::fma(p, r, Self::splat(4.166_579_6e-2));
            let p = Self::fma(p, r, Self::splat(1.666_666_5e-1));
            let p = Self::fma(p, r, Self::splat(5.0e-1));
            let p = Self::fma(p, Self::mul(r, r), r);
            let p = Self::add(p, Self::splat(1.0));
            let half = Self::half_i(n);
            let bias = Self::splat_i(127);
            let low = Self::of_bits(Self::shl_23(Self::add_i(half, bias)));
            let high = Self::of_bits(Self::shl_23(Self::add_i(Self::sub_i(n, half), bias)));
            let y = Self::mul(Self::mul(p, low), high);
            let zero = Self::splat(0.0);
            let y = Self::where_below(y, Self::splat(f32::MIN_POSITIVE), zero, y);
            let y = Self::where_below(x, Self::splat(-87.4), zero, y);
            Self::where_below(Self::splat(88.8), x, Self::splat(f32::INFINITY), y)
        }
    }
}

/// The path without intrinsics.
#[derive(Clone, Copy)]
pub(super) struct Portable;

/// Sixteen lanes by a loop that the compiler can unroll and vectorise.
macro_rules! lanes {
    ($zero:expr, $i:ident => $value:expr) => {{
        let mut out = [$zero; LANES];
        for $i in 0..LANES {
            out[$i] = $value;
        }
        out
    }};
}

// SAFETY for the whole impl: only the loads and `store` touch memory, and exactly the bytes that the trait names, which
// the caller vouches for.
impl Vector for Portable {
    type F = [f32; LANES];
    type I = [i32; LANES];

    const WIDE: bool = false;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::F {
        [value; LANES]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::F {
        // SAFETY: see the impl.
        unsafe { from.cast::<Self::F>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self::F {
        // SAFETY: see the impl.
        let bits = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        lanes!(0.0, i => f16_to_f32(bits[i]))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> Self::F {
        // SAFETY: see the impl.
        let bits = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        lanes!(0.0, i => bf16_to_f32(bits[i]))
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self::F {
        // SAFETY: see the impl.
        let bytes = unsafe { from.cast::<[i8; LANES]>().read_unaligned() };
        lanes!(0.0, i => f32::from(bytes[i]))
    }
    #[inline(always)]
    unsafe fn splat_f16(bits: u16) -> Self::F {
        [f16_to_f32(bits); LANES]
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::F) {
        // SAFETY: see the impl.
        unsafe { to.cast::<Self::F>().write_unaligned(value) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        lanes!(0.0, i => a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        lanes!(0.0, i => a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        lanes!(0.0, i => a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        lanes!(0.0, i => a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    unsafe fn fnma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        lanes!(0.0, i => (-a[i]).mul_add(b[i], c[i]))
    }
    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        lanes!(0.0, i => if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn where_below(a: Self::F, b: Self::F, then: Self::F, otherwise: Self::F) -> Self::F {
        lanes!(0.0, i => if a[i] < b[i] { then[i] } else { otherwise[i] })
    }

    #[inline(always)]
    unsafe fn bits(a: Self::F) -> Self::I {
        lanes!(0, i => a[i].to_bits() as i32)
    }
    #[inline(always)]
    unsafe fn of_bits(a: Self::I) -> Self::F {
        lanes!(0.0, i => f32::from_bits(a[i] as u32))
    }
    #[inline(always)]
    unsafe fn splat_i(value: i32) -> Self::I {
        [value; LANES]
    }
    #[inline(always)]
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I {
        lanes!(0, i => a[i].wrapping_add(b[i]))
    }
    #[inline(always)]
    unsafe fn sub_i(a: Self::I, b: Self::I) -> Self::I {
        lanes!(0, i => a[i].wrapping_sub(b[i]))
    }
    #[inline(always)]
    unsafe fn half_i(a: Self::I) -> Self::I {
        lanes!(0, i => a[i] >> 1)
    }
    #[inline(always)]
    unsafe fn shl_23(a: Self::I) -> Self::I {
        lanes!(0, i => a[i] << 23)
    }

    #[inline(always)]
    unsafe fn transpose(rows: &mut [Self::F; LANES]) {
        let old = *rows;
        for (i, row) in rows.iter_mut().enumerate() {
            for (to, from) in row.iter_mut().zip(&old) {
                *to = from[i];
            }
        }
    }
}

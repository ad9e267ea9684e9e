//! The vector operations that the multiplication is written in, and their portable form.
//!
//! Sixteen lanes on every path; a lane is a weight row, that is, an output. All operations are exact
//! or round once as IEEE 754 says, so that the paths agree in every bit.

use std::ptr;

use crate::cpu::lanes::{LANES, f16_to_f32};

/// One instruction path.
///
/// # Safety
///
/// Every function may only be called where the processor has the path's instructions, and is only fast
/// where the caller was compiled for them: all are inlined into such a caller, and so must everything
/// between be, down to the last helper. No closures and no `array::from_fn` around these calls: they
/// are compiled without the path's instructions and stay calls (fifty times slower). Functions that take
/// pointers read or write exactly what they say, at any alignment.
pub(super) trait Simd: Copy {
    /// Sixteen `f32`.
    type F: Copy;
    /// Sixteen 32-bit words.
    type I: Copy;
    /// Sums of products of small weights; see [`Simd::open`].
    type Sums: Copy;

    /// Whether [`Simd::dot_i8`] wants its weights as `w + 128`, unsigned, and so counts `128 Σ x` too much.
    const BIASED: bool;
    /// Whether there are registers for large tiles.
    const WIDE: bool;
    /// Whether [`Simd::Sums`] have 16 bits.
    const NARROW: bool;

    unsafe fn splat_f(value: f32) -> Self::F;
    /// Writes 64 bytes.
    unsafe fn store_f(to: *mut f32, value: Self::F);
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// `a · b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a · b − c`, rounded once.
    unsafe fn fms(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// Every NaN as the bits `0x7fc00000`: processors and compilers pick among the payloads of operands.
    unsafe fn one_nan(value: Self::F) -> Self::F;

    unsafe fn splat_i(value: i32) -> Self::I;
    /// Wraps.
    unsafe fn add(a: Self::I, b: Self::I) -> Self::I;
    /// The lower half of the product.
    unsafe fn times(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn and(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn xor(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn shl<const N: u32>(a: Self::I) -> Self::I;
    /// Shift right, zeros come in.
    unsafe fn shr<const N: u32>(a: Self::I) -> Self::I;
    /// Shift right by a count known at run time only.
    unsafe fn shr_by(a: Self::I, count: u32) -> Self::I;
    /// Shift right, copies of the sign come in.
    unsafe fn sar<const N: u32>(a: Self::I) -> Self::I;
    /// The nearest `f32` of each `i32`; ties to even; within 24 bits it is exact.
    unsafe fn to_f(a: Self::I) -> Self::F;
    unsafe fn bits_f(a: Self::I) -> Self::F;
    /// The two half-precision numbers in each word as `f32`, low one first.
    unsafe fn halves(a: Self::I) -> [Self::F; 2];
    /// The thirty-two half-precision numbers in order as `f32`, of which each half has sixteen.
    unsafe fn halves_in_order(a: Self::I) -> [Self::F; 2];
    /// Each byte of `at`, which is below 16, replaced by the table's byte at that place.
    unsafe fn lookup(table: &[u8; 16], at: Self::I) -> Self::I;

    /// Bit `4 g + i` of each word as bit 4 of byte `i`, for `g` below 8.
    #[inline(always)]
    unsafe fn fifth_bits(bits: Self::I, g: u32) -> Self::I {
        // SAFETY: the caller's promise.
        unsafe {
            let four = Self::shr_by(bits, 4 * g);
            let low = Self::or(
                Self::shl::<4>(Self::and(four, Self::splat_i(1))),
                Self::shl::<11>(Self::and(four, Self::splat_i(2))),
            );
            let high = Self::or(
                Self::shl::<18>(Self::and(four, Self::splat_i(4))),
                Self::shl::<25>(Self::and(four, Self::splat_i(8))),
            );
            Self::or(low, high)
        }
    }

    /// `acc + Σ w_i · x_i` over the four bytes of each word: `w` unsigned and at most 127, `x` signed.
    unsafe fn dot_u7(acc: Self::I, w: Self::I, x: Self::I) -> Self::I;
    /// The same with signed `w`, biased where [`Simd::BIASED`] says so; `x` is never −128.
    unsafe fn dot_i8(acc: Self::I, w: Self::I, x: Self::I) -> Self::I;
    /// `acc + Σ a_i · b_i` over the two signed 16-bit halves of each word.
    unsafe fn dot_i16(acc: Self::I, a: Self::I, b: Self::I) -> Self::I;

    /// Sums that begin with `start`, which [`Simd::close`] wants once more: where they are [`Simd::NARROW`], there is room for
    /// [`together`] words of small weights, and none for a start.
    unsafe fn open(start: Self::I) -> Self::Sums;
    /// As [`Simd::dot_u7`], of weights as small as [`together`] was told.
    unsafe fn add_small(sums: Self::Sums, w: Self::I, x: Self::I) -> Self::Sums;
    /// Keeps what the sums are made of before this apart from what comes after it: where there are few registers, the compiler
    /// orders a long run of independent sums such that they do not suffice.
    #[inline(always)]
    unsafe fn settle(sums: &mut Self::Sums) {
        let _ = sums;
    }
    /// The same for words.
    #[inline(always)]
    unsafe fn settle_i(sums: &mut Self::I) {
        let _ = sums;
    }
    /// The same for floats.
    #[inline(always)]
    unsafe fn settle_f(sums: &mut Self::F) {
        let _ = sums;
    }
    /// The sums.
    unsafe fn close(start: Self::I, sums: Self::Sums) -> Self::I;
    /// A number of at most 16 bits with its sign, as [`Simd::close_times`] wants it.
    unsafe fn factor(value: Self::I) -> Self::I;
    /// Two factors in one word, for [`Simd::dot_i16`] with two numbers.
    unsafe fn two_factors(a: Self::I, b: Self::I) -> Self::I;
    /// `acc + factor · sums`, of sums that began with zero.
    unsafe fn close_times(acc: Self::I, sums: Self::Sums, factor: Self::I) -> Self::I;

    /// Reads 64 bytes.
    unsafe fn load_i(from: *const u8) -> Self::I;
    /// Sixteen half-precision numbers as `f32`: reads 32 bytes.
    unsafe fn load_halves(from: *const u8) -> Self::F;
    /// Sixteen bytes as words.
    unsafe fn load_bytes(from: *const u8) -> Self::I;
    /// Lane `r` is the word at `from + r · stride`: reads 4 bytes in each of sixteen rows.
    unsafe fn gather(from: *const u8, stride: usize) -> Self::I;
    /// Four consecutive words of sixteen rows, transposed: reads 16 bytes in each.
    unsafe fn gather4(from: *const u8, stride: usize) -> [Self::I; 4];
    /// The same for sixteen words: reads 64 bytes in each row.
    #[inline(always)]
    unsafe fn gather16(from: *const u8, stride: usize) -> [Self::I; 16] {
        // SAFETY: the caller's promise.
        unsafe {
            let [a, b, c, d] = Self::gather4(from, stride);
            let [e, f, g, h] = Self::gather4(from.add(16), stride);
            let [i, j, k, l] = Self::gather4(from.add(32), stride);
            let [m, n, o, p] = Self::gather4(from.add(48), stride);
            [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p]
        }
    }

    /// Asks for the cache line of an address that need not exist, into the second-level cache.
    #[inline(always)]
    unsafe fn prefetch(address: *const u8) {
        let _ = address;
    }
    /// The same, into the first-level cache.
    #[inline(always)]
    unsafe fn prefetch_near(address: *const u8) {
        let _ = address;
    }
}

/// Of `words` words, a power of two, of weights that are at most `most`, how many [`Simd::add_small`] may take: their products
/// with activations of at most 127 stay within 16 bits.
#[inline(always)]
pub(super) const fn together<S: Simd>(words: usize, most: u32) -> usize {
    let mut some = words;
    while S::NARROW && some as u32 * 2 * 127 * most > i16::MAX as u32 {
        some /= 2;
    }
    some
}

/// The path without intrinsics.
#[derive(Clone, Copy)]
pub(super) struct Portable;

/// Sixteen lanes by a loop that the compiler can unroll and vectorise (closures sometimes stay calls).
macro_rules! lanes {
    ($zero:expr, $i:ident => $value:expr) => {{
        let mut out = [$zero; LANES];
        for $i in 0..LANES {
            out[$i] = $value;
        }
        out
    }};
}

// SAFETY for the whole impl: only the loads, `store_f` and the gathers touch memory, and exactly the
// bytes that the trait names, which the caller vouches for.
impl Simd for Portable {
    type F = [f32; LANES];
    type I = [u32; LANES];
    type Sums = Self::I;

    const BIASED: bool = false;
    const WIDE: bool = false;
    const NARROW: bool = false;

    #[inline(always)]
    unsafe fn splat_f(value: f32) -> Self::F {
        [value; LANES]
    }
    #[inline(always)]
    unsafe fn store_f(to: *mut f32, value: Self::F) {
        // SAFETY: the caller vouches for 64 writable bytes.
        unsafe { ptr::write_unaligned(to.cast(), value) }
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
    unsafe fn fms(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        lanes!(0.0, i => a[i].mul_add(b[i], -c[i]))
    }
    #[inline(always)]
    unsafe fn one_nan(value: Self::F) -> Self::F {
        lanes!(0.0, i => if value[i].is_nan() { f32::from_bits(0x7fc0_0000) } else { value[i] })
    }

    #[inline(always)]
    unsafe fn splat_i(value: i32) -> Self::I {
        [value as u32; LANES]
    }
    #[inline(always)]
    unsafe fn add(a: Self::I, b: Self::I) -> Self::I {
        lanes!(0, i => a[i].wrapping_add(b[i]))
    }
    #[inline(always)]
    unsafe fn times(a: Self::I, b: Self::I) -> Self::I {
        lanes!(0, i => a[i].wrapping_mul(b[i]))
    }
    #[inline(always)]
    unsafe fn and(a: Self::I, b: Self::I) -> Self::I {
        lanes!(0, i => a[i] & b[i])
    }
    #[inline(always)]
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I {
        lanes!(0, i => a[i] | b[i])
    }
    #[inline(always)]
    unsafe fn xor(a: Self::I, b: Self::I) -> Self::I {
        lanes!(0, i => a[i] ^ b[i])
    }
    #[inline(always)]
    unsafe fn shl<const N: u32>(a: Self::I) -> Self::I {
        lanes!(0, i => a[i] << N)
    }
    #[inline(always)]
    unsafe fn shr<const N: u32>(a: Self::I) -> Self::I {
        lanes!(0, i => a[i] >> N)
    }
    #[inline(always)]
    unsafe fn shr_by(a: Self::I, count: u32) -> Self::I {
        lanes!(0, i => a[i] >> count)
    }
    #[inline(always)]
    unsafe fn sar<const N: u32>(a: Self::I) -> Self::I {
        lanes!(0, i => (a[i] as i32 >> N) as u32)
    }
    #[inline(always)]
    unsafe fn to_f(a: Self::I) -> Self::F {
        lanes!(0.0, i => a[i] as i32 as f32)
    }
    #[inline(always)]
    unsafe fn bits_f(a: Self::I) -> Self::F {
        lanes!(0.0, i => f32::from_bits(a[i]))
    }
    #[inline(always)]
    unsafe fn halves(a: Self::I) -> [Self::F; 2] {
        [
            lanes!(0.0, i => f16_to_f32(a[i] as u16)),
            lanes!(0.0, i => f16_to_f32((a[i] >> 16) as u16)),
        ]
    }
    #[inline(always)]
    unsafe fn halves_in_order(a: Self::I) -> [Self::F; 2] {
        [
            lanes!(0.0, i => f16_to_f32((a[i / 2] >> (i % 2 * 16)) as u16)),
            lanes!(0.0, i => f16_to_f32((a[LANES / 2 + i / 2] >> (i % 2 * 16)) as u16)),
        ]
    }
    #[inline(always)]
    unsafe fn lookup(table: &[u8; 16], at: Self::I) -> Self::I {
        lanes!(0, i => {
            let mut bytes = at[i].to_le_bytes();
            for byte in &mut bytes {
                *byte = table[*byte as usize % 16];
            }
            u32::from_le_bytes(bytes)
        })
    }

    #[inline(always)]
    unsafe fn dot_u7(acc: Self::I, w: Self::I, x: Self::I) -> Self::I {
        // SAFETY: no memory is touched. Weights of at most 127 are the same read as signed.
        unsafe { Self::dot_i8(acc, w, x) }
    }
    #[inline(always)]
    unsafe fn open(start: Self::I) -> Self::I {
        start
    }
    #[inline(always)]
    unsafe fn add_small(sums: Self::I, w: Self::I, x: Self::I) -> Self::I {
        // SAFETY: no memory is touched.
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
        // SAFETY: no memory is touched.
        unsafe { Self::or(Self::and(a, Self::splat_i(0xffff)), Self::shl::<16>(b)) }
    }
    #[inline(always)]
    unsafe fn close_times(acc: Self::I, sums: Self::I, factor: Self::I) -> Self::I {
        // SAFETY: no memory is touched.
        unsafe { Self::add(acc, Self::times(sums, factor)) }
    }
    #[inline(always)]
    unsafe fn dot_i8(acc: Self::I, w: Self::I, x: Self::I) -> Self::I {
        lanes!(0, i => {
            let (mut sum, w, x) = (acc[i] as i32, w[i].to_le_bytes(), x[i].to_le_bytes());
            for b in 0..4 {
                sum += w[b] as i8 as i32 * (x[b] as i8 as i32);
            }
            sum as u32
        })
    }
    #[inline(always)]
    unsafe fn dot_i16(acc: Self::I, a: Self::I, b: Self::I) -> Self::I {
        lanes!(0, i => {
            let low = a[i] as i16 as i32 * (b[i] as i16 as i32);
            let high = (a[i] as i32 >> 16) * (b[i] as i32 >> 16);
            (acc[i] as i32 + low + high) as u32
        })
    }

    #[inline(always)]
    unsafe fn load_i(from: *const u8) -> Self::I {
        // SAFETY: the caller vouches for 64 readable bytes.
        unsafe { Self::gather(from, 4) }
    }
    #[inline(always)]
    unsafe fn load_halves(from: *const u8) -> Self::F {
        lanes!(0.0, r => {
            // SAFETY: the caller vouches for 32 readable bytes.
            f16_to_f32(u16::from_le(unsafe { ptr::read_unaligned(from.add(2 * r).cast()) }))
        })
    }
    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> Self::I {
        lanes!(0, r => {
            // SAFETY: the caller vouches for 16 readable bytes.
            u32::from(unsafe { *from.add(r) })
        })
    }
    #[inline(always)]
    unsafe fn gather(from: *const u8, stride: usize) -> Self::I {
        lanes!(0, r => {
            // SAFETY: the caller vouches for 4 readable bytes in each of sixteen rows.
            u32::from_le(unsafe { ptr::read_unaligned(from.add(r * stride).cast()) })
        })
    }
    #[inline(always)]
    unsafe fn gather4(from: *const u8, stride: usize) -> [Self::I; 4] {
        let mut words = [[0; LANES]; 4];
        for (g, words) in words.iter_mut().enumerate() {
            // SAFETY: the caller vouches for 16 readable bytes in each of sixteen rows.
            *words = unsafe { Self::gather(from.add(4 * g), stride) };
        }
        words
    }
}

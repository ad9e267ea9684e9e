//! Small pieces shared by all CPU kernels: one body compiled for every instruction path, and scalar
//! functions that the compiler can vectorise without changing a bit.
//!
//! A kernel is written once as an `#[inline(always)]` function over slices and `[f32; 16]` arrays
//! and handed to [`dispatch!`], which compiles it once per [`CpuPath`](super::path::CpuPath) with that
//! path's instructions enabled. Rust never contracts or reorders floating-point operations, so the
//! copies give equal bits as long as the body uses `f32::mul_add` where it wants a fused operation,
//! keeps its own order of summation (sixteen explicit lanes, then [`sum16`]), and calls [`exp`] instead
//! of the C library.

/// Lanes of an explicit vector. Sixteen on every path: the width is part of the order of summation.
pub const LANES: usize = 16;

/// Compiles an `#[inline(always)]` function once per instruction path.
///
/// ```
/// use hotcell_kernels::cpu::{lanes, path::CpuPath};
///
/// #[inline(always)]
/// fn scale_body(values: &mut [f32], by: f32) {
///     for v in values {
///         *v *= by;
///     }
/// }
/// lanes::dispatch! {
///     /// Multiplies every value.
///     fn scale(values: &mut [f32], by: f32) = scale_body;
/// }
/// let mut v = [1.0, 2.0];
/// scale(CpuPath::detect(), &mut v, 3.0);
/// assert_eq!(v, [3.0, 6.0]);
/// ```
///
/// The generated function takes the path first. `unsafe fn name(…) = body;` makes and calls unsafe
/// functions instead. No generics: wrap each instance.
#[macro_export]
#[doc(hidden)]
macro_rules! __cpu_dispatch {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:path;) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name(path: $crate::cpu::path::CpuPath, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
                fn avx512($($arg: $ty),*) $(-> $ret)? { $body($($arg),*) }
                #[target_feature(enable = "avx2,fma,f16c")]
                fn avx2($($arg: $ty),*) $(-> $ret)? { $body($($arg),*) }
                match path.vectors() {
                    // SAFETY: `vectors` returned the path, so the processor has its instructions.
                    $crate::cpu::path::CpuPath::Avx512Vnni => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::cpu::path::CpuPath::Avx2 => return unsafe { avx2($($arg),*) },
                    _ => {}
                }
            }
            let _ = path;
            $body($($arg),*)
        }
    };
    ($(#[$meta:meta])* $vis:vis unsafe fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:path;) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments, clippy::missing_safety_doc)]
        $vis unsafe fn $name(path: $crate::cpu::path::CpuPath, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
                unsafe fn avx512($($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: the caller's promise to the outer function.
                    unsafe { $body($($arg),*) }
                }
                #[target_feature(enable = "avx2,fma,f16c")]
                unsafe fn avx2($($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: the caller's promise to the outer function.
                    unsafe { $body($($arg),*) }
                }
                match path.vectors() {
                    // SAFETY: `vectors` returned the path, so the processor has its instructions;
                    // the rest is the caller's promise.
                    $crate::cpu::path::CpuPath::Avx512Vnni => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::cpu::path::CpuPath::Avx2 => return unsafe { avx2($($arg),*) },
                    _ => {}
                }
            }
            let _ = path;
            // SAFETY: the caller's promise.
            unsafe { $body($($arg),*) }
        }
    };
}
pub use crate::__cpu_dispatch as dispatch;

/// The sum of sixteen lanes by a fixed tree: distances 8, 4, 2, 1.
#[inline(always)]
pub fn sum16(v: [f32; LANES]) -> f32 {
    tree(v, |a, b| a + b)
}

/// The largest of sixteen lanes by the same tree. It may lose a NaN: a kernel that must not, tests for
/// NaN where it reads the values.
#[inline(always)]
pub fn max16(v: [f32; LANES]) -> f32 {
    tree(v, |a, b| if a > b { a } else { b })
}

#[inline(always)]
fn tree(v: [f32; LANES], op: impl Fn(f32, f32) -> f32) -> f32 {
    let mut a = [0.0; 8];
    for i in 0..8 {
        a[i] = op(v[i], v[i + 8]);
    }
    let mut b = [0.0; 4];
    for i in 0..4 {
        b[i] = op(a[i], a[i + 4]);
    }
    op(op(b[0], b[2]), op(b[1], b[3]))
}

/// Bytes that memory is asked for before a loop comes to it.
const AHEAD: usize = 4096;

/// Asks for memory that a loop comes to [`AHEAD`] bytes after what it takes now. By itself a processor runs ahead within a
/// page, and no further than its window of instructions reaches, which arithmetic fills.
#[inline(always)]
pub fn ask_ahead<T>(now: &[T]) {
    for line in (0..size_of_val(now)).step_by(64) {
        ask_for(now.as_ptr().cast::<u8>().wrapping_add(line + AHEAD));
    }
}

/// Asks for the line of memory at an address, which may lead nowhere.
#[inline(always)]
pub fn ask_for<T>(at: *const T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: every x86-64 processor has it, and it reads nothing: an address that leads nowhere is let be.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = at;
}

/// [`ask_for`] a line that is to be written.
#[inline(always)]
pub fn ask_to_write<T>(at: *const T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: as in `ask_for`; a processor without this instruction takes it for one that does nothing.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_ET0>(at.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = at;
}

/// `e^x`, within 1.02 ulp, by fused operations only: equal bits on every path, vectorisable.
///
/// `-inf` and everything whose result is below the normal range give 0 (subnormals would cost a
/// microcode assist each, and a softmax has no use for them); what overflows gives `inf`; NaN gives NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // x = n ln 2 + r, |r| <= ln 2 / 2; n is rounded by adding 1.5 * 2^23, which leaves it in the low bits, here twice what
    // exponents are stored with above it.
    const MAGIC: f32 = 12_582_912.0 + 254.0;
    // ln 2 in two parts; n * LN2_HI is exact inside the fma, LN2_LO restores the rest.
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    let shifted = x.mul_add(std::f32::consts::LOG2_E, MAGIC);
    let n = shifted.to_bits();
    let nf = shifted - MAGIC;
    let r = (-nf).mul_add(LN2_LO, (-nf).mul_add(LN2_HI, x));
    // Minimax for (e^r - 1 - r) / r^2 (Cephes expf).
    let p = 1.987_569_1e-4_f32;
    let p = p.mul_add(r, 1.398_2e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 1.666_666_5e-1);
    let p = p.mul_add(r, 5.0e-1);
    let p = p.mul_add(r * r, r) + 1.0;
    // 2^n in two factors: 2^128 is no f32, but p * 2^64 * 2^64 may be finite for p < 1.
    let half = n >> 1;
    // Of MAGIC's own bits there are none among the nine that stay.
    let power = |e: u32| f32::from_bits(e << 23);
    let y = p * power(half) * power(n.wrapping_sub(half));
    let y = if y < f32::MIN_POSITIVE { 0.0 } else { y };
    let y = if x < -87.4 { 0.0 } else { y };
    if x > 88.8 { f32::INFINITY } else { y }
}

/// An IEEE half-precision number as `f32`: exact, without branches, a signalling NaN made quiet.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    let magnitude = (bits & 0x7fff) as u32;
    let sign = ((bits & 0x8000) as u32) << 16;
    let normal = (magnitude << 13) + (112 << 23);
    let special = (magnitude << 13) | 0x7f80_0000;
    let special = if magnitude > 0x7c00 {
        special | 0x0040_0000
    } else {
        special
    };
    let subnormal = (magnitude as i32 as f32 * f32::from_bits(103 << 23)).to_bits();
    let value = if magnitude < 0x0400 {
        subnormal
    } else {
        normal
    };
    let value = if magnitude >= 0x7c00 { special } else { value };
    f32::from_bits(value | sign)
}

/// An f64 as f32 that still tells on which side of it the f64 was (round to odd), so that rounding it again to
/// fewer bits is as rounding once.
#[inline(always)]
pub fn to_odd(x: f64) -> f32 {
    let y = x as f32;
    let bits = y.to_bits();
    let bits = if (y as f64).abs() > x.abs() {
        bits - 1
    } else {
        bits
    };
    f32::from_bits(if y as f64 == x { bits } else { bits | 1 })
}

/// An `f32` rounded to half precision, ties to even; NaN stays NaN.
#[inline(always)]
pub fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    let magnitude = bits & 0x7fff_ffff;
    // Normal results: move the exponent, round by adding half of the dropped bits.
    let normal = (magnitude.wrapping_sub(112 << 23))
        .wrapping_add(0x0fff)
        .wrapping_add((magnitude >> 13) & 1)
        >> 13;
    // Subnormal results: adding 0.5 aligns 2^-24 with the last bit, and the addition rounds.
    let subnormal = (f32::from_bits(magnitude) + 0.5)
        .to_bits()
        .wrapping_sub(0.5f32.to_bits());
    let value = if magnitude < 113 << 23 {
        subnormal
    } else {
        normal
    };
    let value = if magnitude >= 143 << 23 {
        0x7c00
    } else {
        value
    };
    let nan = 0x7e00 | ((magnitude >> 13) & 0x03ff);
    let value = if magnitude > 0x7f80_0000 { nan } else { value };
    value as u16 | sign
}

/// A bfloat16 number as `f32`: exact.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// An `f32` rounded to bfloat16, ties to even; NaN stays NaN.
#[inline(always)]
pub fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let nan = (bits >> 16) | 0x0040;
    (if value.is_nan() { nan } else { rounded }) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::path::CpuPath;

    #[inline(always)]
    fn exp_body(values: &mut [f32]) {
        for v in values {
            *v = exp(*v);
        }
    }
    dispatch! {
        fn exp_all(values: &mut [f32]) = exp_body;
    }

    #[test]
    fn exp_is_within_its_bound_and_equal_on_every_path() {
        // Every 1,009th float of both signs; all of them were tried once.
        let inputs: Vec<f32> = (0..=u32::MAX).step_by(1009).map(f32::from_bits).collect();
        let mut first: Option<Vec<f32>> = None;
        for path in CpuPath::available() {
            let mut out = inputs.clone();
            exp_all(path, &mut out);
            let first = first.get_or_insert_with(|| out.clone());
            for (&x, (&y, &z)) in inputs.iter().zip(out.iter().zip(first.iter())) {
                let exact = (x as f64).exp();
                if x.is_nan() {
                    assert!(y.is_nan() && z.is_nan());
                    continue;
                }
                assert_eq!(y.to_bits(), z.to_bits(), "exp({x}) on {path}");
                if exact < f32::MIN_POSITIVE as f64 {
                    assert!(y == 0.0 || y == f32::MIN_POSITIVE, "exp({x}) = {y}");
                } else if y.is_infinite() {
                    assert!(exact > f32::MAX as f64 * (1.0 - 1e-7), "exp({x}) = {y}");
                } else {
                    let ulp = f32::from_bits(y.to_bits() + 1) as f64 - y as f64;
                    assert!(
                        (y as f64 - exact).abs() <= 1.02 * ulp,
                        "exp({x}) = {y}, not {exact}"
                    );
                }
            }
        }
        assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
    }

    #[test]
    fn half_and_bfloat_conversions_agree_with_the_half_crate() {
        for bits in 0..=u16::MAX {
            let ours = f16_to_f32(bits);
            let theirs = half::f16::from_bits(bits).to_f32_const();
            assert_eq!(ours.to_bits(), theirs.to_bits(), "{bits:#x}");
        }
        for bits in (0..=u32::MAX).step_by(257) {
            let value = f32::from_bits(bits);
            let h = half::f16::from_f32_const(value);
            assert_eq!(f32_to_f16(value), h.to_bits(), "{bits:#x}");
            assert_eq!(
                f32_to_bf16(value),
                half::bf16::from_f32_const(value).to_bits(),
                "{bits:#x}"
            );
        }
    }

    #[test]
    fn trees_are_fixed() {
        let v: [f32; 16] = std::array::from_fn(|i| [1e8, 1.0, -1e8, 0.5][i % 4] * (i + 1) as f32);
        let mut t = v;
        for distance in [8, 4, 2, 1] {
            for i in 0..distance {
                t[i] += t[i + distance];
            }
        }
        assert_eq!(sum16(v).to_bits(), t[0].to_bits());
        assert_eq!(max16(v), v.iter().copied().fold(f32::MIN, f32::max));
    }
}

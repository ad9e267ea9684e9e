//! What one instruction of a fused kernel is: a loop over a tile, compiled per instruction path.

use std::slice::{from_raw_parts, from_raw_parts_mut};

use crate::cpu::path::CpuPath;

/// Writes `n` elements to the first address from those at up to three others.
///
/// # Safety
/// The addresses lead to `n` elements of the types the code was made for; what is written overlaps nothing
/// that is read. The processor has the path the code was picked for.
pub(crate) type Code = unsafe fn(*mut u8, [*const u8; 3], usize);

/// A function of one element. [`unary`](super::unary) writes them.
pub(super) trait Unary {
    type In: Copy;
    type Out;
    /// Whether `outside` elements are done again by `rescue`, one at a time.
    const RESCUE: bool = false;
    fn call(x: Self::In) -> Self::Out;
    #[inline(always)]
    fn outside(_: Self::In) -> bool {
        false
    }
    fn rescue(x: Self::In) -> Self::Out {
        Self::call(x)
    }
}

/// A function of two elements.
pub(super) trait Binary {
    type In: Copy;
    type Out;
    fn call(a: Self::In, b: Self::In) -> Self::Out;
}

#[inline(always)]
unsafe fn unary_body<I: Unary>(out: *mut u8, args: [*const u8; 3], n: usize) {
    // SAFETY: the caller's promise ([`Code`]).
    let (out, x) = unsafe {
        (
            from_raw_parts_mut(out.cast::<I::Out>(), n),
            from_raw_parts(args[0].cast::<I::In>(), n),
        )
    };
    for (o, x) in out.iter_mut().zip(x) {
        *o = I::call(*x);
    }
    if I::RESCUE {
        let mut any = false;
        for x in x {
            any |= I::outside(*x);
        }
        if any {
            rescue::<I>(out, x);
        }
    }
}

#[cold]
#[inline(never)]
fn rescue<I: Unary>(out: &mut [I::Out], x: &[I::In]) {
    for (o, x) in out.iter_mut().zip(x) {
        if I::outside(*x) {
            *o = I::rescue(*x);
        }
    }
}

#[inline(always)]
unsafe fn binary_body<I: Binary>(out: *mut u8, args: [*const u8; 3], n: usize) {
    // SAFETY: the caller's promise ([`Code`]).
    let (out, a, b) = unsafe {
        (
            from_raw_parts_mut(out.cast::<I::Out>(), n),
            from_raw_parts(args[0].cast::<I::In>(), n),
            from_raw_parts(args[1].cast::<I::In>(), n),
        )
    };
    for ((o, a), b) in out.iter_mut().zip(a).zip(b) {
        *o = I::call(*a, *b);
    }
}

#[inline(always)]
unsafe fn select_body<T: Copy>(out: *mut u8, args: [*const u8; 3], n: usize) {
    // SAFETY: the caller's promise ([`Code`]).
    let (out, c, a, b) = unsafe {
        (
            from_raw_parts_mut(out.cast::<T>(), n),
            from_raw_parts(args[0], n),
            from_raw_parts(args[1].cast::<T>(), n),
            from_raw_parts(args[2].cast::<T>(), n),
        )
    };
    for (((o, c), a), b) in out.iter_mut().zip(c).zip(a).zip(b) {
        *o = if *c != 0 { *a } else { *b };
    }
}

/// Compiles a body per path. `wide` uses every path; `narrow` leaves AVX-512 out, for what is bound by memory or
/// does not vectorise: each copy costs compile time.
macro_rules! paths {
    ($wide:ident, $narrow:ident, $body:ident, $bound:path) => {
        pub(super) fn $wide<I: $bound>(path: CpuPath) -> Code {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(
                    enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c"
                )]
                unsafe fn avx512<I: $bound>(out: *mut u8, args: [*const u8; 3], n: usize) {
                    // SAFETY: the caller's promise.
                    unsafe { $body::<I>(out, args, n) }
                }
                if path.or_portable() == CpuPath::Avx512Vnni {
                    return avx512::<I>;
                }
            }
            $narrow::<I>(path)
        }

        pub(super) fn $narrow<I: $bound>(path: CpuPath) -> Code {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma,f16c")]
                unsafe fn avx2<I: $bound>(out: *mut u8, args: [*const u8; 3], n: usize) {
                    // SAFETY: the caller's promise.
                    unsafe { $body::<I>(out, args, n) }
                }
                // AVX-512's path has AVX2's instructions.
                if path.or_portable() != CpuPath::Portable {
                    return avx2::<I>;
                }
            }
            let _ = path;
            $body::<I>
        }
    };
}
paths!(wide1, narrow1, unary_body, Unary);
paths!(wide2, narrow2, binary_body, Binary);
paths!(wide_select, narrow_select, select_body, Copy);

/// `where` for elements of so many bytes.
pub(super) fn select(bytes: usize, path: CpuPath) -> Option<Code> {
    match bytes {
        1 => Some(narrow_select::<u8>(path)),
        2 => Some(narrow_select::<u16>(path)),
        4 => Some(wide_select::<u32>(path)),
        8 => Some(wide_select::<u64>(path)),
        _ => None,
    }
}

/// A [`Code`] of an expression over one element: `unary!(wide1, path, f32 => f32, |x| -x)`.
macro_rules! unary {
    ($pick:ident, $path:expr, $in:ty => $out:ty, |$x:ident| $e:expr) => {{
        struct Op;
        impl $crate::cpu::elementwise::code::Unary for Op {
            type In = $in;
            type Out = $out;
            #[inline(always)]
            fn call($x: $in) -> $out {
                $e
            }
        }
        Some($crate::cpu::elementwise::code::$pick::<Op>($path))
    }};
}

/// A [`Code`] of an expression over two elements.
macro_rules! binary {
    ($pick:ident, $path:expr, $in:ty => $out:ty, |$a:ident, $b:ident| $e:expr) => {{
        struct Op;
        impl $crate::cpu::elementwise::code::Binary for Op {
            type In = $in;
            type Out = $out;
            #[inline(always)]
            fn call($a: $in, $b: $in) -> $out {
                $e
            }
        }
        Some($crate::cpu::elementwise::code::$pick::<Op>($path))
    }};
}

pub(super) use {binary, unary};

//! What one instruction of a fused kernel is: a loop over a tile, compiled per instruction path.

use std::slice::{from_raw_parts, from_raw_parts_mut};

use crate::cpu::{lanes::ask_ahead, path::CpuPath};

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
    /// Whether memory has to be asked for ahead, since there is so much to compute.
    const ASKS: bool = false;
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
    /// As for [`Unary`].
    const RESCUE: bool = false;
    fn call(a: Self::In, b: Self::In) -> Self::Out;
    #[inline(always)]
    fn outside(_: Self::In, _: Self::In) -> bool {
        false
    }
    fn rescue(a: Self::In, b: Self::In) -> Self::Out {
        Self::call(a, b)
    }
}

/// A function of three elements.
pub(super) trait Ternary {
    type In: Copy;
    type Out;
    fn call(a: Self::In, b: Self::In, c: Self::In) -> Self::Out;
}

/// A loop of its own over the elements.
pub(super) trait Loop {
    /// # Safety
    /// As for [`Code`].
    unsafe fn run(out: *mut u8, args: [*const u8; 3], n: usize);
}

/// Elements from which on they are not those of a tile, which is in the nearest cache.
pub(super) const LONG: usize = 1 << 14;

/// Elements that memory is asked for at once.
const PIECE: usize = 256;

/// Elements after which what may need rescue is looked at again, while the cache has it.
const RESCUE_BLOCK: usize = 512;

#[inline(always)]
unsafe fn unary_body<I: Unary>(out: *mut u8, args: [*const u8; 3], n: usize) {
    // SAFETY: the caller's promise ([`Code`]).
    let (out, x) = unsafe {
        (
            from_raw_parts_mut(out.cast::<I::Out>(), n),
            from_raw_parts(args[0].cast::<I::In>(), n),
        )
    };
    if !I::RESCUE {
        let asks = I::ASKS && n >= LONG;
        let piece = if asks { PIECE } else { n.max(1) };
        for (out, x) in out.chunks_mut(piece).zip(x.chunks(piece)) {
            if asks {
                ask_ahead(x);
            }
            for (o, x) in out.iter_mut().zip(x) {
                *o = I::call(*x);
            }
        }
        return;
    }
    for (out, x) in out.chunks_mut(RESCUE_BLOCK).zip(x.chunks(RESCUE_BLOCK)) {
        let mut any = false;
        for (o, x) in out.iter_mut().zip(x) {
            *o = I::call(*x);
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
    if !I::RESCUE {
        for ((o, a), b) in out.iter_mut().zip(a).zip(b) {
            *o = I::call(*a, *b);
        }
        return;
    }
    let (a, b) = (a.chunks(RESCUE_BLOCK), b.chunks(RESCUE_BLOCK));
    for ((out, a), b) in out.chunks_mut(RESCUE_BLOCK).zip(a).zip(b) {
        let mut any = false;
        for ((o, a), b) in out.iter_mut().zip(a).zip(b) {
            *o = I::call(*a, *b);
            any |= I::outside(*a, *b);
        }
        if any {
            rescue_pair::<I>(out, a, b);
        }
    }
}

#[cold]
#[inline(never)]
fn rescue_pair<I: Binary>(out: &mut [I::Out], a: &[I::In], b: &[I::In]) {
    for ((o, a), b) in out.iter_mut().zip(a).zip(b) {
        if I::outside(*a, *b) {
            *o = I::rescue(*a, *b);
        }
    }
}

#[inline(always)]
unsafe fn loop_body<I: Loop>(out: *mut u8, args: [*const u8; 3], n: usize) {
    // SAFETY: the caller's promise.
    unsafe { I::run(out, args, n) }
}

#[inline(always)]
unsafe fn ternary_body<I: Ternary>(out: *mut u8, args: [*const u8; 3], n: usize) {
    // SAFETY: the caller's promise ([`Code`]).
    let (out, a, b, c) = unsafe {
        (
            from_raw_parts_mut(out.cast::<I::Out>(), n),
            from_raw_parts(args[0].cast::<I::In>(), n),
            from_raw_parts(args[1].cast::<I::In>(), n),
            from_raw_parts(args[2].cast::<I::In>(), n),
        )
    };
    for (((o, a), b), c) in out.iter_mut().zip(a).zip(b).zip(c) {
        *o = I::call(*a, *b, *c);
    }
}

/// Bits of an element that is chosen or not.
pub(super) trait Bits: Copy {
    /// By masks: the compiler makes a choice of addresses of a condition, and loads them one by one.
    fn choose(condition: bool, a: Self, b: Self) -> Self;
}

macro_rules! bits {
    ($($t:ident)*) => {$(
        impl Bits for $t {
            #[inline(always)]
            fn choose(condition: bool, a: $t, b: $t) -> $t {
                let mask = (condition as $t).wrapping_neg();
                (a & mask) | (b & !mask)
            }
        }
    )*};
}
bits!(u8 u16 u32 u64);

#[inline(always)]
unsafe fn select_body<T: Bits>(out: *mut u8, args: [*const u8; 3], n: usize) {
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
        *o = T::choose(*c != 0, *a, *b);
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
                if path.vectors() == CpuPath::Avx512Vnni {
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
                if path.vectors() != CpuPath::Portable {
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
paths!(wide_loop, narrow_loop, loop_body, Loop);
paths!(wide3, narrow3, ternary_body, Ternary);
paths!(wide_select, narrow_select, select_body, Bits);

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

/// A [`Code`] of an expression over one element: `unary!(wide1, path, f32 => f32, |x| -x)`; of one that takes long,
/// `unary!(wide1 asks, …)`.
macro_rules! unary {
    ($pick:ident, $($rest:tt)*) => {
        $crate::cpu::elementwise::code::unary!($pick false, $($rest)*)
    };
    ($pick:ident asks, $($rest:tt)*) => {
        $crate::cpu::elementwise::code::unary!($pick true, $($rest)*)
    };
    ($pick:ident $asks:literal, $path:expr, $in:ty => $out:ty, |$x:ident| $e:expr) => {{
        struct Op;
        impl $crate::cpu::elementwise::code::Unary for Op {
            type In = $in;
            type Out = $out;
            const ASKS: bool = $asks;
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

/// A [`Code`] of an expression over three elements.
macro_rules! ternary {
    ($pick:ident, $path:expr, $in:ty => $out:ty, |$a:ident, $b:ident, $c:ident| $e:expr) => {{
        struct Op;
        impl $crate::cpu::elementwise::code::Ternary for Op {
            type In = $in;
            type Out = $out;
            #[inline(always)]
            fn call($a: $in, $b: $in, $c: $in) -> $out {
                $e
            }
        }
        Some($crate::cpu::elementwise::code::$pick::<Op>($path))
    }};
}

pub(super) use {binary, ternary, unary};

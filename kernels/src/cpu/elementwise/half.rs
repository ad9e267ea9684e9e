//! f16 and bf16: between memory and f32 registers sixteen at a time, by the processor's own conversions where it has
//! them, and single ops that go from memory to memory without a tile in between.

use std::{
    arch::x86_64::*,
    mem::transmute,
    slice::{from_raw_parts, from_raw_parts_mut},
};

use hotcell_graph::DType;

use super::{
    code::{Binary, Code, LONG, Unary},
    float::gelu_tanh,
};
use crate::cpu::{
    lanes::ask_ahead,
    math::{Real, exp_avx512},
    path::CpuPath,
};

/// Elements that are converted at once.
const LANES: usize = 16;

/// How a half type becomes f32 and back, rounded to nearest even. All conversions of a type give the same bits.
pub(crate) trait Convert {
    /// # Safety
    /// The processor has the instructions that the type is named for.
    unsafe fn widen(x: &[u16; LANES]) -> [f32; LANES];
    /// # Safety
    /// As for `widen`.
    unsafe fn narrow(x: &[f32; LANES]) -> [u16; LANES];
    /// The same of what an instruction computed of numbers of this type: a NaN is quiet then, and has zeros where a wider one
    /// has more.
    ///
    /// # Safety
    /// As for `widen`.
    #[inline(always)]
    unsafe fn narrow_computed(x: &[f32; LANES]) -> [u16; LANES] {
        // SAFETY: the caller's promise.
        unsafe { Self::narrow(x) }
    }
    /// `e^x`, with the same bits everywhere.
    ///
    /// # Safety
    /// As for `widen`.
    #[inline(always)]
    unsafe fn exp(mut x: [f32; LANES]) -> [f32; LANES] {
        for x in &mut x {
            *x = Real::exp(*x);
        }
        x
    }
}

/// A half type, with its conversion on each path.
trait Half {
    type Avx2: Convert;
    type Avx512: Convert;
}

struct Bf16;

impl Half for Bf16 {
    type Avx2 = Bf16Avx2;
    type Avx512 = Bf16Avx512;
}

struct F16;

impl Half for F16 {
    type Avx2 = F16c;
    type Avx512 = F16Avx512;
}

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;

struct F16c;

impl Convert for F16c {
    #[inline(always)]
    unsafe fn widen(x: &[u16; LANES]) -> [f32; LANES] {
        // SAFETY: arrays of plain numbers with the sizes of the registers; the caller's promise.
        unsafe {
            let [low, high]: [__m128i; 2] = transmute(*x);
            transmute([_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)])
        }
    }
    #[inline(always)]
    unsafe fn narrow(x: &[f32; LANES]) -> [u16; LANES] {
        // SAFETY: as in `widen`.
        unsafe {
            let [low, high]: [__m256; 2] = transmute(*x);
            transmute([
                _mm256_cvtps_ph::<NEAREST>(low),
                _mm256_cvtps_ph::<NEAREST>(high),
            ])
        }
    }
}

pub(crate) struct F16Avx512;

impl Convert for F16Avx512 {
    #[inline(always)]
    unsafe fn widen(x: &[u16; LANES]) -> [f32; LANES] {
        // SAFETY: as in `F16c`.
        unsafe { transmute(_mm512_cvtph_ps(transmute::<[u16; LANES], __m256i>(*x))) }
    }
    #[inline(always)]
    unsafe fn narrow(x: &[f32; LANES]) -> [u16; LANES] {
        // SAFETY: as in `F16c`.
        unsafe {
            transmute(_mm512_cvtps_ph::<NEAREST>(
                transmute::<[f32; LANES], __m512>(*x),
            ))
        }
    }
    #[inline(always)]
    unsafe fn exp(x: [f32; LANES]) -> [f32; LANES] {
        // SAFETY: as in `F16c`.
        unsafe { transmute(exp_avx512(transmute::<[f32; LANES], __m512>(x))) }
    }
}

struct Bf16Avx2;

/// Bits of f32 as those of bfloat16, one in the low half of each lane.
#[inline(always)]
unsafe fn bf16(x: __m256i) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let kept = _mm256_srli_epi32::<16>(x);
        let odd = _mm256_and_si256(kept, _mm256_set1_epi32(1));
        let half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
        let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(x, half));
        let quiet = _mm256_or_si256(kept, _mm256_set1_epi32(0x0040));
        let x = _mm256_castsi256_ps(x);
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
        _mm256_blendv_epi8(rounded, quiet, nan)
    }
}

impl Convert for Bf16Avx2 {
    #[inline(always)]
    unsafe fn widen(x: &[u16; LANES]) -> [f32; LANES] {
        // SAFETY: as in `F16c`.
        unsafe {
            let [low, high]: [__m128i; 2] = transmute(*x);
            transmute([
                _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(low)),
                _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(high)),
            ])
        }
    }
    #[inline(always)]
    unsafe fn narrow(x: &[f32; LANES]) -> [u16; LANES] {
        // SAFETY: as in `F16c`.
        unsafe {
            let [low, high]: [__m256i; 2] = transmute(*x);
            let both = _mm256_packus_epi32(bf16(low), bf16(high));
            transmute(_mm256_permute4x64_epi64::<0b11_01_10_00>(both))
        }
    }
}

pub(crate) struct Bf16Avx512;

/// Where the high halves of sixteen lanes are, among all halves.
const HIGH_HALVES: [u16; 32] = {
    let mut at = [0; 32];
    let mut lane = 0;
    while lane < LANES {
        at[lane] = 2 * lane as u16 + 1;
        lane += 1;
    }
    at
};

impl Convert for Bf16Avx512 {
    #[inline(always)]
    unsafe fn widen(x: &[u16; LANES]) -> [f32; LANES] {
        // SAFETY: as in `F16c`.
        unsafe {
            let x = _mm512_cvtepu16_epi32(transmute::<[u16; LANES], __m256i>(*x));
            transmute(_mm512_slli_epi32::<16>(x))
        }
    }
    #[inline(always)]
    unsafe fn narrow(x: &[f32; LANES]) -> [u16; LANES] {
        // SAFETY: as in `F16c`.
        unsafe {
            let x: __m512i = transmute(*x);
            let odd = _mm512_test_epi32_mask(x, _mm512_set1_epi32(1 << 16));
            let rounded = _mm512_add_epi32(x, _mm512_set1_epi32(0x7fff));
            let rounded = _mm512_mask_add_epi32(rounded, odd, rounded, _mm512_set1_epi32(1));
            let f = _mm512_castsi512_ps(x);
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(f, f);
            let quiet = _mm512_set1_epi32(0x0040 << 16);
            let all = _mm512_mask_or_epi32(rounded, nan, x, quiet);
            high_halves(all)
        }
    }
    #[inline(always)]
    unsafe fn narrow_computed(x: &[f32; LANES]) -> [u16; LANES] {
        // SAFETY: as in `F16c`. Rounding carries nothing out of zeros.
        unsafe {
            let x: __m512i = transmute(*x);
            let odd = _mm512_test_epi32_mask(x, _mm512_set1_epi32(1 << 16));
            let rounded = _mm512_add_epi32(x, _mm512_set1_epi32(0x7fff));
            let one = _mm512_set1_epi32(1);
            high_halves(_mm512_mask_add_epi32(rounded, odd, rounded, one))
        }
    }
    #[inline(always)]
    unsafe fn exp(x: [f32; LANES]) -> [f32; LANES] {
        // SAFETY: as in `F16c`.
        unsafe { transmute(exp_avx512(transmute::<[f32; LANES], __m512>(x))) }
    }
}

/// The high half of each lane.
///
/// # Safety
/// The processor has AVX-512.
#[inline(always)]
unsafe fn high_halves(all: __m512i) -> [u16; LANES] {
    // SAFETY: as in `F16c`.
    unsafe {
        let high = transmute::<[u16; 32], __m512i>(HIGH_HALVES);
        transmute(_mm512_castsi512_si256(_mm512_permutexvar_epi16(high, all)))
    }
}

/// What [`walk`] does with sixteen elements.
trait Lanes {
    type In: Copy;
    type Out: Copy;
    const ARGS: usize;
    /// As for [`Unary`].
    const ASKS: bool = false;
    const ZERO: (Self::In, Self::Out);
    unsafe fn call<C: Convert>(x: [&[Self::In; LANES]; 2]) -> [Self::Out; LANES];
}

struct Widen;
impl Lanes for Widen {
    type In = u16;
    type Out = f32;
    const ARGS: usize = 1;
    const ZERO: (u16, f32) = (0, 0.0);
    #[inline(always)]
    unsafe fn call<C: Convert>([x, _]: [&[u16; LANES]; 2]) -> [f32; LANES] {
        // SAFETY: the caller's promise.
        unsafe { C::widen(x) }
    }
}

struct Narrow;
impl Lanes for Narrow {
    type In = f32;
    type Out = u16;
    const ARGS: usize = 1;
    const ZERO: (f32, u16) = (0.0, 0);
    #[inline(always)]
    unsafe fn call<C: Convert>([x, _]: [&[f32; LANES]; 2]) -> [u16; LANES] {
        // SAFETY: the caller's promise.
        unsafe { C::narrow(x) }
    }
}

struct Round;
impl Lanes for Round {
    type In = f32;
    type Out = f32;
    const ARGS: usize = 1;
    const ZERO: (f32, f32) = (0.0, 0.0);
    #[inline(always)]
    unsafe fn call<C: Convert>([x, _]: [&[f32; LANES]; 2]) -> [f32; LANES] {
        // SAFETY: the caller's promise.
        unsafe { C::widen(&C::narrow(x)) }
    }
}

/// An f32 op of one operand between half memory; one that computes, so that no NaN leaves it as it came, or may not.
struct One<I, const COMPUTES: bool>(I);
impl<I: Unary<In = f32, Out = f32>, const COMPUTES: bool> Lanes for One<I, COMPUTES> {
    type In = u16;
    type Out = u16;
    const ARGS: usize = 1;
    const ASKS: bool = true;
    const ZERO: (u16, u16) = (0, 0);
    #[inline(always)]
    unsafe fn call<C: Convert>([x, _]: [&[u16; LANES]; 2]) -> [u16; LANES] {
        // SAFETY: the caller's promise.
        unsafe {
            let mut x = C::widen(x);
            for x in &mut x {
                *x = I::call(*x);
            }
            match COMPUTES {
                true => C::narrow_computed(&x),
                false => C::narrow(&x),
            }
        }
    }
}

/// [`Convert::exp`].
struct Exp;
impl Lanes for Exp {
    type In = u16;
    type Out = u16;
    const ARGS: usize = 1;
    const ASKS: bool = true;
    const ZERO: (u16, u16) = (0, 0);
    #[inline(always)]
    unsafe fn call<C: Convert>([x, _]: [&[u16; LANES]; 2]) -> [u16; LANES] {
        // SAFETY: the caller's promise.
        unsafe { C::narrow_computed(&C::exp(C::widen(x))) }
    }
}

/// Of two operands.
struct Two<I>(I);
impl<I: Binary<In = f32, Out = f32>> Lanes for Two<I> {
    type In = u16;
    type Out = u16;
    const ARGS: usize = 2;
    const ZERO: (u16, u16) = (0, 0);
    #[inline(always)]
    unsafe fn call<C: Convert>([a, b]: [&[u16; LANES]; 2]) -> [u16; LANES] {
        // SAFETY: the caller's promise.
        unsafe {
            let (mut a, b) = (C::widen(a), C::widen(b));
            for (a, b) in a.iter_mut().zip(b) {
                *a = I::call(*a, b);
            }
            C::narrow(&a)
        }
    }
}

/// All elements, sixteen at a time; what is left over goes the same way, filled up.
#[inline(always)]
unsafe fn walk<C: Convert, L: Lanes>(out: *mut u8, args: [*const u8; 3], n: usize) {
    // SAFETY: the caller's promise ([`Code`]); an op of one operand is not given a second.
    unsafe {
        let out = from_raw_parts_mut(out.cast::<L::Out>(), n);
        let a = from_raw_parts(args[0].cast::<L::In>(), n);
        let b = match L::ARGS {
            1 => a,
            _ => from_raw_parts(args[1].cast::<L::In>(), n),
        };
        let (out, out_left) = out.as_chunks_mut::<LANES>();
        let ((a, a_left), (b, b_left)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
        let asks = L::ASKS && n >= LONG;
        // Two at a time, which leaves more of the processor's window to them.
        let (pairs, rest) = out.as_chunks_mut::<2>();
        let ((a_pairs, a_rest), (b_pairs, b_rest)) = (a.as_chunks::<2>(), b.as_chunks::<2>());
        for ((out, a), b) in pairs.iter_mut().zip(a_pairs).zip(b_pairs) {
            if asks {
                ask_ahead(a);
            }
            *out = [L::call::<C>([&a[0], &b[0]]), L::call::<C>([&a[1], &b[1]])];
        }
        for ((out, a), b) in rest.iter_mut().zip(a_rest).zip(b_rest) {
            *out = L::call::<C>([a, b]);
        }
        if !out_left.is_empty() {
            let filled = |left: &[L::In]| {
                let mut all = [L::ZERO.0; LANES];
                all[..left.len()].copy_from_slice(left);
                all
            };
            let all = L::call::<C>([&filled(a_left), &filled(b_left)]);
            out_left.copy_from_slice(&all[..out_left.len()]);
        }
    }
}

fn pick<H: Half, L: Lanes>(path: CpuPath) -> Option<Code> {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn avx512<H: Half, L: Lanes>(out: *mut u8, args: [*const u8; 3], n: usize) {
        // SAFETY: the caller's promise.
        unsafe { walk::<H::Avx512, L>(out, args, n) }
    }
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn avx2<H: Half, L: Lanes>(out: *mut u8, args: [*const u8; 3], n: usize) {
        // SAFETY: the caller's promise.
        unsafe { walk::<H::Avx2, L>(out, args, n) }
    }
    match path.vectors() {
        CpuPath::Avx512Vnni => Some(avx512::<H, L>),
        CpuPath::Avx2 => Some(avx2::<H, L>),
        _ => None,
    }
}

/// For a half type; `None` for others, and on the portable path.
fn of<L: Lanes>(dtype: DType, path: CpuPath) -> Option<Code> {
    match dtype {
        DType::F16 => pick::<F16, L>(path),
        DType::BF16 => pick::<Bf16, L>(path),
        _ => None,
    }
}

/// Memory of a half type into an f32 register; `None` as for [`of`].
pub(super) fn widen(from: DType, path: CpuPath) -> Option<Code> {
    of::<Widen>(from, path)
}

/// An f32 register into memory of a half type; `None` as for [`of`].
pub(super) fn narrow(to: DType, path: CpuPath) -> Option<Code> {
    of::<Narrow>(to, path)
}

/// Rounds an f32 register to what a half type holds; `None` as for [`of`].
pub(super) fn round(to: DType, path: CpuPath) -> Option<Code> {
    of::<Round>(to, path)
}

macro_rules! one {
    ($dtype:expr, $path:expr, |$x:ident| $e:expr) => {
        one!(false, $dtype, $path, |$x| $e)
    };
    ($computes:literal, $dtype:expr, $path:expr, |$x:ident| $e:expr) => {{
        struct Op;
        impl Unary for Op {
            type In = f32;
            type Out = f32;
            #[inline(always)]
            fn call($x: f32) -> f32 {
                $e
            }
        }
        of::<One<Op, $computes>>($dtype, $path)
    }};
}
macro_rules! two {
    ($dtype:expr, $path:expr, |$a:ident, $b:ident| $e:expr) => {{
        struct Op;
        impl Binary for Op {
            type In = f32;
            type Out = f32;
            #[inline(always)]
            fn call($a: f32, $b: f32) -> f32 {
                $e
            }
        }
        of::<Two<Op>>($dtype, $path)
    }};
}

/// An op from half memory to half memory: what the f32 instruction gives, rounded once. Only what is common.
pub(super) fn whole(op: &str, dtype: DType, path: CpuPath) -> Option<Code> {
    match op {
        "neg" => one!(dtype, path, |x| -x),
        "abs" => one!(dtype, path, |x| x.abs()),
        "square" => one!(dtype, path, |x| x * x),
        "sqrt" => one!(dtype, path, |x| x.sqrt()),
        "exp" => of::<Exp>(dtype, path),
        "tanh" => one!(dtype, path, |x| Real::tanh(x)),
        "sigmoid" => one!(true, dtype, path, |x| Real::sigmoid(x)),
        "silu" => one!(true, dtype, path, |x| Real::silu(x)),
        "gelu_tanh" => one!(dtype, path, |x| gelu_tanh(x)),
        "add" => two!(dtype, path, |a, b| a + b),
        "sub" => two!(dtype, path, |a, b| a - b),
        "mul" => two!(dtype, path, |a, b| a * b),
        "div" => two!(dtype, path, |a, b| a / b),
        "maximum" => two!(dtype, path, |a, b| if a > b || a.is_nan() { a } else { b }),
        "minimum" => two!(dtype, path, |a, b| if a < b || a.is_nan() { a } else { b }),
        "swiglu" => two!(dtype, path, |a, b| Real::silu(a) * b),
        "geglu" => two!(dtype, path, |a, b| gelu_tanh(a) * b),
        _ => None,
    }
}

//! Several f32 instructions in one, each on the result of the one before and rounded by itself: what lies between
//! never leaves the registers.

use hotcell_graph::DType;

use crate::cpu::path::CpuPath;

/// What may be a link of a chain: the value so far with another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arith {
    Add,
    Sub,
    Mul,
    Div,
    Abs,
    Neg,
}

impl Arith {
    /// The op's, on operands of a dtype.
    pub fn of(op: &str, dtype: DType) -> Option<Self> {
        match (op, dtype) {
            ("add", DType::F32) => Some(Arith::Add),
            ("sub", DType::F32) => Some(Arith::Sub),
            ("mul", DType::F32) => Some(Arith::Mul),
            ("div", DType::F32) => Some(Arith::Div),
            ("abs", DType::F32) => Some(Arith::Abs),
            ("neg", DType::F32) => Some(Arith::Neg),
            _ => None,
        }
    }

    /// Whether its operands may change places, as far as numbers go. Of two NaNs, processors take the first one's bits,
    /// and compilers change places as they like: so a link has to have the value so far in front, as alone.
    pub fn commutes(self) -> bool {
        matches!(self, Arith::Add | Arith::Mul)
    }
}

/// One instruction of a chain.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    pub arith: Arith,
    /// Whether the value so far is the first operand, as it [must](Arith::commutes) be in some.
    pub first: bool,
    /// Entry of the table that leads to the other operand; any, where there is none.
    pub arg: usize,
}

/// Writes `n` elements: those at `start`, gone through the links, whose operands the table leads to.
///
/// # Safety
/// All addresses that are named lead to `n` f32, and what is written overlaps nothing that is read. The processor
/// has the path the code was picked for.
pub(super) type Chain = unsafe fn(*mut f32, *const f32, &[Link], &[*mut u8], usize);

/// The code for a path.
pub(super) fn code(path: CpuPath) -> Chain {
    match path.vectors() {
        #[cfg(target_arch = "x86_64")]
        CpuPath::Avx512Vnni => wide::avx512,
        #[cfg(target_arch = "x86_64")]
        CpuPath::Avx2 => wide::avx2,
        _ => narrow,
    }
}

unsafe fn narrow(out: *mut f32, start: *const f32, links: &[Link], table: &[*mut u8], n: usize) {
    // SAFETY: the caller's promise.
    unsafe { portable(out, start, links, table, 0, n) }
}

/// Elements that go through the chain together where registers are not named.
const BLOCK: usize = 64;

/// One link on a few elements.
#[inline(always)]
fn apply(link: Link, v: &mut [f32], c: &[f32]) {
    macro_rules! each {
        (|$v:ident, $c:ident| $e:expr) => {
            for ($v, $c) in v.iter_mut().zip(c) {
                *$v = $e;
            }
        };
    }
    match (link.arith, link.first) {
        (Arith::Add, _) => each!(|v, c| *v + c),
        (Arith::Sub, true) => each!(|v, c| *v - c),
        (Arith::Sub, false) => each!(|v, c| c - *v),
        (Arith::Mul, _) => each!(|v, c| *v * c),
        (Arith::Div, true) => each!(|v, c| *v / c),
        (Arith::Div, false) => each!(|v, c| c / *v),
        (Arith::Abs, _) => v.iter_mut().for_each(|v| *v = v.abs()),
        (Arith::Neg, _) => v.iter_mut().for_each(|v| *v = -*v),
    }
}

/// Elements from `from` to `n`; else as [`Chain`].
#[inline(always)]
unsafe fn portable(
    out: *mut f32,
    start: *const f32,
    links: &[Link],
    table: &[*mut u8],
    from: usize,
    n: usize,
) {
    let mut block = [0.0; BLOCK];
    for at in (from..n).step_by(BLOCK) {
        let v = &mut block[..BLOCK.min(n - at)];
        // SAFETY: the caller's promise ([`Chain`]); `at` and as many as `v` has lie inside of `n`.
        unsafe {
            start
                .add(at)
                .copy_to_nonoverlapping(v.as_mut_ptr(), v.len());
            for link in links {
                let c = match link.arith {
                    Arith::Abs | Arith::Neg => &[][..],
                    _ => {
                        let c = table[link.arg].cast::<f32>().add(at);
                        std::slice::from_raw_parts(c, v.len())
                    }
                };
                apply(*link, v, c);
            }
            out.add(at).copy_from_nonoverlapping(v.as_ptr(), v.len());
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod wide {
    use std::arch::x86_64::*;

    use super::{Arith, Link, portable};

    /// A register of f32.
    ///
    /// All functions: the processor has the instructions that the register is of, and addresses lead to its lanes.
    trait Register: Copy {
        const LANES: usize;
        unsafe fn load(from: *const f32) -> Self;
        unsafe fn store(self, to: *mut f32);
        unsafe fn add(self, b: Self) -> Self;
        unsafe fn sub(self, b: Self) -> Self;
        unsafe fn mul(self, b: Self) -> Self;
        unsafe fn div(self, b: Self) -> Self;
        unsafe fn abs(self) -> Self;
        unsafe fn neg(self) -> Self;
    }

    macro_rules! register {
        ($t:ident, $lanes:literal, $load:ident $store:ident $add:ident $sub:ident $mul:ident $div:ident,
         $and:ident $xor:ident $set:ident $from:ident $to:ident) => {
            impl Register for $t {
                const LANES: usize = $lanes;
                #[inline(always)]
                unsafe fn load(from: *const f32) -> Self {
                    // SAFETY: the caller's promise.
                    unsafe { $load(from) }
                }
                #[inline(always)]
                unsafe fn store(self, to: *mut f32) {
                    // SAFETY: the caller's promise.
                    unsafe { $store(to, self) }
                }
                #[inline(always)]
                unsafe fn add(self, b: Self) -> Self {
                    // SAFETY: the caller's promise.
                    unsafe { $add(self, b) }
                }
                #[inline(always)]
                unsafe fn sub(self, b: Self) -> Self {
                    // SAFETY: the caller's promise.
                    unsafe { $sub(self, b) }
                }
                #[inline(always)]
                unsafe fn mul(self, b: Self) -> Self {
                    // SAFETY: the caller's promise.
                    unsafe { $mul(self, b) }
                }
                #[inline(always)]
                unsafe fn div(self, b: Self) -> Self {
                    // SAFETY: the caller's promise.
                    unsafe { $div(self, b) }
                }
                #[inline(always)]
                unsafe fn abs(self) -> Self {
                    // SAFETY: the caller's promise.
                    unsafe { $from($and($to(self), $set(i32::MAX))) }
                }
                #[inline(always)]
                unsafe fn neg(self) -> Self {
                    // SAFETY: the caller's promise.
                    unsafe { $from($xor($to(self), $set(i32::MIN))) }
                }
            }
        };
    }
    register!(__m512, 16, _mm512_loadu_ps _mm512_storeu_ps _mm512_add_ps _mm512_sub_ps _mm512_mul_ps _mm512_div_ps,
        _mm512_and_si512 _mm512_xor_si512 _mm512_set1_epi32 _mm512_castsi512_ps _mm512_castps_si512);
    register!(__m256, 8, _mm256_loadu_ps _mm256_storeu_ps _mm256_add_ps _mm256_sub_ps _mm256_mul_ps _mm256_div_ps,
        _mm256_and_si256 _mm256_xor_si256 _mm256_set1_epi32 _mm256_castsi256_ps _mm256_castps_si256);

    /// Registers that go through the chain together: as many as hide the time that one instruction takes.
    const TOGETHER: usize = 8;

    /// What does not fill the registers goes the portable way, which rounds the same.
    #[inline(always)]
    unsafe fn run<R: Register>(
        out: *mut f32,
        start: *const f32,
        links: &[Link],
        table: &[*mut u8],
        n: usize,
    ) {
        let block = TOGETHER * R::LANES;
        let whole = n / block * block;
        for at in (0..whole).step_by(block) {
            // SAFETY: the caller's promise ([`super::Chain`]): the block at `at` lies inside of `n`.
            unsafe {
                let mut v = [R::load(start); TOGETHER];
                for (k, v) in v.iter_mut().enumerate() {
                    *v = R::load(start.add(at + k * R::LANES));
                }
                for link in links {
                    // Not read where the link has no other operand.
                    let c = table[link.arg].cast::<f32>().wrapping_add(at);
                    macro_rules! each {
                        (|$v:ident| $e:expr) => {
                            for v in &mut v {
                                let $v = *v;
                                *v = $e;
                            }
                        };
                        (|$v:ident, $c:ident| $e:expr) => {
                            for (k, v) in v.iter_mut().enumerate() {
                                let ($v, $c) = (*v, R::load(c.add(k * R::LANES)));
                                *v = $e;
                            }
                        };
                    }
                    match (link.arith, link.first) {
                        (Arith::Add, _) => each!(|v, c| v.add(c)),
                        (Arith::Sub, true) => each!(|v, c| v.sub(c)),
                        (Arith::Sub, false) => each!(|v, c| c.sub(v)),
                        (Arith::Mul, _) => each!(|v, c| v.mul(c)),
                        (Arith::Div, true) => each!(|v, c| v.div(c)),
                        (Arith::Div, false) => each!(|v, c| c.div(v)),
                        (Arith::Abs, _) => each!(|v| v.abs()),
                        (Arith::Neg, _) => each!(|v| v.neg()),
                    }
                }
                for (k, v) in v.into_iter().enumerate() {
                    v.store(out.add(at + k * R::LANES));
                }
            }
        }
        if whole < n {
            // SAFETY: the caller's promise.
            unsafe { portable(out, start, links, table, whole, n) }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    pub(super) unsafe fn avx512(
        out: *mut f32,
        start: *const f32,
        links: &[Link],
        table: &[*mut u8],
        n: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe { run::<__m512>(out, start, links, table, n) }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn avx2(
        out: *mut f32,
        start: *const f32,
        links: &[Link],
        table: &[*mut u8],
        n: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe { run::<__m256>(out, start, links, table, n) }
    }
}

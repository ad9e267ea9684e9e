//! The power of f32, many elements at a time: on AVX-512 without special cases where sixteen have none.

use super::code::{Code, Loop, wide_loop};
use crate::cpu::{
    math::power::{LOGARITHMS, RECIPROCALS, ROOTS, entry, product, result, root},
    path::CpuPath,
};

/// Elements that go through one step before the next, so that all steps but the tables' are vectors.
const BLOCK: usize = 64;

/// Any number of elements, at most [`BLOCK`].
#[inline(always)]
fn block(x: &[f32], y: &[f32], out: &mut [f32]) {
    let (mut reciprocals, mut logarithms) = ([0.0; BLOCK], [0.0; BLOCK]);
    let (mut entries, mut roots) = ([0; BLOCK], [0; BLOCK]);
    let mut products = [[0.0; BLOCK]; 2];
    let n = x.len().min(BLOCK);
    let (x, y, out) = (&x[..n], &y[..n], &mut out[..n]);
    for i in 0..n {
        entries[i] = entry(x[i]) as u64;
    }
    for i in 0..n {
        let entry = entries[i] as usize % RECIPROCALS.len();
        (reciprocals[i], logarithms[i]) = (RECIPROCALS[entry], LOGARITHMS[entry]);
    }
    for i in 0..n {
        (products[0][i], products[1][i]) = product(x[i], y[i], reciprocals[i], logarithms[i]);
    }
    for i in 0..n {
        roots[i] = ROOTS[root(products[0][i])];
    }
    for i in 0..n {
        out[i] = result(x[i], y[i], (products[0][i], products[1][i]), roots[i]);
    }
}

struct Pow;

impl Loop for Pow {
    #[inline(always)]
    unsafe fn run(out: *mut u8, args: [*const u8; 3], n: usize) {
        // SAFETY: the caller's promise ([`Code`]).
        let (out, x, y) = unsafe {
            (
                std::slice::from_raw_parts_mut(out.cast::<f32>(), n),
                std::slice::from_raw_parts(args[0].cast::<f32>(), n),
                std::slice::from_raw_parts(args[1].cast::<f32>(), n),
            )
        };
        let (x, y) = (x.chunks(BLOCK), y.chunks(BLOCK));
        for ((out, x), y) in out.chunks_mut(BLOCK).zip(x).zip(y) {
            block(x, y, out);
        }
    }
}

/// `pow` of f32, with the bits of [`power`](crate::cpu::math::power::power) on every path.
pub(super) fn code(path: CpuPath) -> Code {
    #[cfg(target_arch = "x86_64")]
    if path.vectors() == CpuPath::Avx512Vnni {
        return wide::avx512;
    }
    wide_loop::<Pow>(path)
}

#[cfg(target_arch = "x86_64")]
mod wide {
    use std::arch::x86_64::*;

    use super::{BLOCK, block};
    use crate::cpu::lanes::{ask_for, ask_to_write};
    use crate::cpu::math::power::{
        ENTRY, EXP, EXPONENT, LEAST, LOG, LOGARITHMS, RECIPROCALS, ROOTS, ROUND,
    };

    /// Elements of a register of f32.
    const LANES: usize = 16;

    /// Elements that are asked for before they are needed: they would come too late by themselves.
    const AHEAD: usize = 96;

    struct Tables {
        reciprocals: __m512d,
        logarithms: __m512d,
        roots: __m512d,
    }

    /// Registers of eight that go through the same steps side by side: alone, each would wait for its own last step.
    const TOGETHER: usize = LANES / 8;

    /// Numbers of eighths (as `number + NUMBERS`, below `2 NUMBERS`) that no exponent of f64 is too small for.
    const NUMBERS: u64 = 8 << 9;

    /// What does not fit the steps of [`sixteen`]: bits that are set in the numbers of eighths, and signs.
    struct Odd {
        numbers: __m512i,
        signs: __m512i,
    }

    impl Odd {
        /// # Safety
        /// The processor has AVX-512.
        #[inline(always)]
        unsafe fn none() -> Self {
            // SAFETY: the caller's promise.
            unsafe {
                Self {
                    numbers: _mm512_setzero_si512(),
                    signs: _mm512_setzero_si512(),
                }
            }
        }

        /// # Safety
        /// As for `none`.
        #[inline(always)]
        unsafe fn is_any(&self) -> bool {
            // SAFETY: the caller's promise.
            unsafe {
                let far = _mm512_set1_epi64(-(2 * NUMBERS as i64));
                let numbers = _mm512_test_epi64_mask(self.numbers, far);
                numbers != 0 || _mm512_movepi32_mask(self.signs) != 0
            }
        }
    }

    /// Sixteen powers of finite bases above 0, unless they are odd.
    ///
    /// # Safety
    /// The processor has AVX-512, and sixteen elements lie at `x`, `y` and `out`.
    #[inline(always)]
    unsafe fn sixteen(t: &Tables, odd: &mut Odd, x: *const f32, y: *const f32, out: *mut f32) {
        macro_rules! each {
            (|$i:ident| $e:expr) => {{
                let mut all = [_mm512_setzero_pd(); TOGETHER];
                for $i in 0..TOGETHER {
                    all[$i] = $e;
                }
                all
            }};
        }
        // SAFETY: the caller's promise.
        unsafe {
            let set = |v: f64| _mm512_set1_pd(v);
            let int = |v: u64| _mm512_set1_epi64(v as i64);
            let (bits, double) = (_mm512_castpd_si512, _mm512_castsi512_pd);
            let load = |v: *const f32| _mm512_cvtps_pd(_mm256_loadu_ps(v));
            let a = each!(|i| load(x.add(8 * i)));
            let from = each!(|i| double(_mm512_sub_epi64(bits(a[i]), int(LEAST))));
            let entry = each!(|i| double(_mm512_srli_epi64::<ENTRY>(bits(from[i]))));
            let e = each!(|i| double(_mm512_and_si512(bits(from[i]), int(0xfff0_0000_0000_0000))));
            let z = each!(|i| double(_mm512_sub_epi64(bits(a[i]), bits(e[i]))));
            let r = each!(|i| {
                let reciprocal = _mm512_permutexvar_pd(bits(entry[i]), t.reciprocals);
                _mm512_fmadd_pd(z[i], reciprocal, set(-1.0))
            });
            let whole = each!(|i| {
                let logarithm = _mm512_permutexvar_pd(bits(entry[i]), t.logarithms);
                let one = set(1.0 / (1u64 << 52) as f64);
                _mm512_fmadd_pd(_mm512_cvtepi64_pd(bits(e[i])), one, logarithm)
            });
            let p = each!(|i| _mm512_fmadd_pd(set(LOG[6]), r[i], set(LOG[5])));
            let p = each!(|i| _mm512_fmadd_pd(p[i], r[i], set(LOG[4])));
            let p = each!(|i| _mm512_fmadd_pd(p[i], r[i], set(LOG[3])));
            let p = each!(|i| _mm512_fmadd_pd(p[i], r[i], set(LOG[2])));
            let p = each!(|i| _mm512_fmadd_pd(p[i], r[i], set(LOG[1])));
            let p = each!(|i| _mm512_fmadd_pd(p[i], r[i], set(LOG[0])));
            let log2 = each!(|i| _mm512_fmadd_pd(p[i], r[i], whole[i]));
            let y = each!(|i| load(y.add(8 * i)));
            let shifted = each!(|i| _mm512_fmadd_pd(y[i], log2[i], set(ROUND)));
            let less = each!(|i| _mm512_sub_pd(set(ROUND), shifted[i]));
            let f = each!(|i| _mm512_fmadd_pd(y[i], log2[i], less[i]));
            let root = each!(|i| {
                let root = bits(_mm512_permutexvar_pd(bits(shifted[i]), t.roots));
                let number = _mm512_slli_epi64::<EXPONENT>(bits(shifted[i]));
                double(_mm512_add_epi64(root, number))
            });
            let p = each!(|i| _mm512_fmadd_pd(set(EXP[3]), f[i], set(EXP[2])));
            let p = each!(|i| _mm512_fmadd_pd(p[i], f[i], set(EXP[1])));
            let p = each!(|i| _mm512_fmadd_pd(p[i], f[i], set(EXP[0])));
            let result = each!(|i| _mm512_fmadd_pd(_mm512_mul_pd(root[i], f[i]), p[i], root[i]));
            for i in 0..TOGETHER {
                _mm256_storeu_ps(out.add(8 * i), _mm512_cvtpd_ps(result[i]));
                // What is no number has bits far above.
                let least = int(ROUND.to_bits() - NUMBERS);
                let number = _mm512_sub_epi64(bits(shifted[i]), least);
                odd.numbers = _mm512_or_si512(odd.numbers, number);
            }
            // Of what is below 0, 0, infinite or no number, one of these has a sign.
            let x = _mm512_loadu_si512(x.cast());
            let low = _mm512_sub_epi32(x, _mm512_set1_epi32(1));
            let high = _mm512_add_epi32(x, _mm512_set1_epi32(1 << 23));
            odd.signs = _mm512_ternarylogic_epi32::<0xfe>(odd.signs, low, high);
        }
    }

    /// Writes powers, sixteen at a time. Whether any of them may not be what it should be.
    ///
    /// # Safety
    /// The processor has AVX-512.
    #[inline(always)]
    unsafe fn ordinary(t: &Tables, x: &[f32], y: &[f32], out: &mut [f32]) -> bool {
        let (x, _) = x.as_chunks::<LANES>();
        let (y, _) = y.as_chunks::<LANES>();
        let (out, _) = out.as_chunks_mut::<LANES>();
        // SAFETY: sixteen elements lie at each; the caller's promise.
        unsafe {
            let mut odd = Odd::none();
            for ((out, x), y) in out.iter_mut().zip(x).zip(y) {
                let (x, y, out) = (x.as_ptr(), y.as_ptr(), out.as_mut_ptr());
                ask_for(x.wrapping_add(AHEAD));
                ask_for(y.wrapping_add(AHEAD));
                ask_to_write(out.wrapping_add(AHEAD).cast_const());
                sixteen(t, &mut odd, x, y, out);
            }
            odd.is_any()
        }
    }

    /// Any elements.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    #[inline(never)]
    fn any(x: &[f32], y: &[f32], out: &mut [f32]) {
        block(x, y, out);
    }

    /// # Safety
    /// As for [`Code`](super::Code).
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    pub(super) unsafe fn avx512(out: *mut u8, args: [*const u8; 3], n: usize) {
        // SAFETY: the caller's promise: `n` elements lie at each address, and the processor has the path.
        let (out, x, y, tables) = unsafe {
            (
                std::slice::from_raw_parts_mut(out.cast::<f32>(), n),
                std::slice::from_raw_parts(args[0].cast::<f32>(), n),
                std::slice::from_raw_parts(args[1].cast::<f32>(), n),
                Tables {
                    reciprocals: _mm512_loadu_pd(RECIPROCALS.as_ptr()),
                    logarithms: _mm512_loadu_pd(LOGARITHMS.as_ptr()),
                    roots: _mm512_loadu_pd(ROOTS.as_ptr().cast()),
                },
            )
        };
        let (x, y) = (x.chunks(BLOCK), y.chunks(BLOCK));
        for ((out, x), y) in out.chunks_mut(BLOCK).zip(x).zip(y) {
            // SAFETY: the processor has the path.
            if x.len() < BLOCK || unsafe { ordinary(&tables, x, y, out) } {
                any(x, y, out);
            }
        }
    }
}

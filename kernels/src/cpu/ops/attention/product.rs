//! The product that attention is made of twice: queries by keys, and weights by values.

use std::ops::Range;

use super::vector::Vector;
use crate::cpu::lanes::LANES;

/// Three matrices, row-major: `c += a @ b`.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    pub a: *const f32,
    pub a_stride: usize,
    pub b: *const f32,
    pub b_stride: usize,
    pub c: *mut f32,
    pub c_stride: usize,
}

impl Matrix {
    /// From a row of `a` and `c` on.
    ///
    /// # Safety
    ///
    /// There is such a row.
    #[inline(always)]
    pub unsafe fn row(self, i: usize) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            Self {
                a: self.a.add(i * self.a_stride),
                c: self.c.add(i * self.c_stride),
                ..self
            }
        }
    }

    /// Adds `a[i, k] · b[k, …]` to the vectors of `M` rows of `c` in ascending order of `k`, one fused operation each. With
    /// `FRESH`, `c` is zero at first, whatever is there.
    ///
    /// # Safety
    ///
    /// The rows exist, and `ks` and `vectors` are inside of them; the processor has the instructions of `V`.
    #[inline(always)]
    pub unsafe fn product<V: Vector, const M: usize, const FRESH: bool>(
        self,
        ks: Range<usize>,
        vectors: Range<usize>,
    ) {
        if ks.is_empty() {
            return;
        }
        let mut at = vectors.start;
        // SAFETY: the caller's promise.
        unsafe {
            if V::WIDE || M < 4 {
                while at + 4 <= vectors.end {
                    self.block::<V, M, 4, FRESH>(ks.clone(), at);
                    at += 4;
                }
            }
            while at < vectors.end {
                self.block::<V, M, 1, FRESH>(ks.clone(), at);
                at += 1;
            }
        }
    }

    /// # Safety
    ///
    /// As for [`Matrix::product`].
    #[inline(always)]
    unsafe fn block<V: Vector, const M: usize, const N: usize, const FRESH: bool>(
        self,
        ks: Range<usize>,
        at: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let (b, c) = (self.b.add(at * LANES), self.c.add(at * LANES));
            let mut sums = [[V::splat(0.0); N]; M];
            if !FRESH {
                for (i, sums) in sums.iter_mut().enumerate() {
                    for (j, sum) in sums.iter_mut().enumerate() {
                        *sum = V::load(c.add(i * self.c_stride + j * LANES));
                    }
                }
            }
            for k in ks {
                let mut row = [V::splat(0.0); N];
                for (j, row) in row.iter_mut().enumerate() {
                    *row = V::load(b.add(k * self.b_stride + j * LANES));
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    let a = V::splat(*self.a.add(i * self.a_stride + k));
                    for (sum, b) in sums.iter_mut().zip(row) {
                        *sum = V::fma(a, b, *sum);
                    }
                }
            }
            for (i, sums) in sums.iter().enumerate() {
                for (j, sum) in sums.iter().enumerate() {
                    V::store(c.add(i * self.c_stride + j * LANES), *sum);
                }
            }
        }
    }
}

//! Products of complex numbers, without packing.

use std::ops::Range;

use super::{Gemm, Operands, vector::Number};
use crate::cpu::{lanes::dispatch, path::CpuPath};

/// `c += a · b` for a row of complex numbers as pairs.
#[inline(always)]
fn add_row_body(a: [f32; 2], b: &[[f32; 2]], c: &mut [[f32; 2]]) {
    let [re, im] = a;
    for (c, b) in c.iter_mut().zip(b) {
        c[0] = (-im).mul_add(b[1], re.mul_add(b[0], c[0]));
        c[1] = im.mul_add(b[0], re.mul_add(b[1], c[1]));
    }
}

dispatch! {
    fn add_row(a: [f32; 2], b: &[[f32; 2]], c: &mut [[f32; 2]]) = add_row_body;
}

/// # Safety
///
/// As for [`Gemm::run`]; operands are aligned to four bytes.
pub(super) unsafe fn product(
    path: CpuPath,
    gemm: &Gemm,
    at: Operands,
    rows: Range<usize>,
    columns: Range<usize>,
) {
    let Gemm { n, k, .. } = *gemm;
    for row in rows {
        // SAFETY: the caller's promise: the rows have these sizes and the results are this thread's.
        unsafe {
            let a = std::slice::from_raw_parts(at.a.cast::<[f32; 2]>().add(row * k), k);
            let c = at.out.cast::<[f32; 2]>().add(row * n + columns.start);
            let c = std::slice::from_raw_parts_mut(c, columns.len());
            c.fill([0.0; 2]);
            for (kk, a) in a.iter().enumerate() {
                let b = at.b.cast::<[f32; 2]>().add(kk * n + columns.start);
                add_row(path, *a, std::slice::from_raw_parts(b, columns.len()), c);
            }
            for v in c.iter_mut().flatten() {
                *v = v.one_nan();
            }
        }
    }
}

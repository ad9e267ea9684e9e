//! Weights with a scale for each rectangle of them.
//!
//! Where there are several rectangles side by side, activations are multiplied with the scales of a band of them, rounded once,
//! and then with the weights, as [`MulMat`] does it. Where there is one, the sums are multiplied with its scale instead.

use std::ops::Range;

use super::MulMat;
use crate::cpu::{
    lanes::{LANES, dispatch},
    path::CpuPath,
};

/// The scales of a product's weights.
#[derive(Clone, Copy, Debug)]
pub struct Scales<'a> {
    /// One for each rectangle, those of a band of rows after one another: `⌈k / columns⌉` for each `rows` rows of the matrix.
    pub values: &'a [f32],
    /// Rows of a rectangle, at least 1.
    pub rows: usize,
    /// Columns of a rectangle, at least 1.
    pub columns: usize,
    /// Which row of the matrix the product's first one is.
    pub first: usize,
}

/// Rows of activations that take scales on at a time: so many that what is done to the weights for each time is little.
const ROWS: usize = 96;

/// Numbers of the room that [`run`] wants for at most so many rows of `k`.
pub const fn room(rows: usize, k: usize) -> usize {
    let rows = if rows < ROWS { rows } else { ROWS };
    rows.saturating_mul(k)
}

dispatch! {
    fn multiply(x: &[f32], scales: &[f32], columns: usize, out: &mut [f32]) = multiply_body;
}

#[inline(always)]
fn multiply_body(x: &[f32], scales: &[f32], columns: usize, out: &mut [f32]) {
    let each = x.chunks(columns).zip(out.chunks_mut(columns));
    for ((x, out), &scale) in each.zip(scales) {
        for (x, out) in x.iter().zip(out) {
            *out = x * scale;
        }
    }
}

impl Scales<'_> {
    /// Whether these outputs' weights may be read packed, sixteen rows at a time.
    pub const fn fit_panels(rows: usize, columns: usize, [n, k]: [usize; 2]) -> bool {
        columns >= k || rows >= n || rows.is_multiple_of(LANES)
    }
}

/// As products have it.
fn one_nan(v: f32) -> f32 {
    if v.is_nan() {
        f32::from_bits(0x7fc0_0000)
    } else {
        v
    }
}

/// [`MulMat::run`] of weights times their scales. Activations must be numbers, and `room` is [`room`] long.
///
/// # Panics
///
/// As [`MulMat::run`], and when there are fewer scales or less room than that.
///
/// # Safety
///
/// As for [`MulMat::run`].
pub unsafe fn run(
    product: &MulMat<'_>,
    scales: &Scales<'_>,
    path: CpuPath,
    n: Range<usize>,
    (out, out_stride): (*mut f32, usize),
    room: &mut [f32],
) {
    let &MulMat {
        x,
        x_stride,
        k,
        rows,
        ..
    } = product;
    let across = k.div_ceil(scales.columns);
    if across <= 1 {
        // SAFETY: the caller's promise. What was written is read again.
        unsafe {
            product.run(path, n.clone(), out, out_stride);
            // Without columns there is nothing to multiply.
            for row in 0..rows * across {
                for n in n.clone() {
                    let sum = out.add(row * out_stride + n);
                    *sum = one_nan(*sum * scales.values[(scales.first + n) / scales.rows]);
                }
            }
        }
        return;
    }
    let mut start = n.start;
    while start < n.end && rows > 0 {
        let band = (scales.first + start) / scales.rows;
        let end = (band + 1).saturating_mul(scales.rows) - scales.first;
        let piece = start..end.min(n.end);
        start = piece.end;
        let of_band = &scales.values[band * across..][..across];
        for first in (0..rows).step_by(ROWS) {
            let rows = ROWS.min(rows - first);
            for r in 0..rows {
                let x = &x[(first + r) * x_stride..][..k];
                multiply(path, x, of_band, scales.columns, &mut room[r * k..][..k]);
            }
            let scaled = MulMat {
                x: &room[..rows * k],
                x_stride: k,
                rows,
                ..*product
            };
            // SAFETY: the caller's promise, of some of the outputs and rows.
            unsafe {
                let out = out.add(first * out_stride);
                scaled.run(path, piece.clone(), out, out_stride);
            }
        }
    }
}

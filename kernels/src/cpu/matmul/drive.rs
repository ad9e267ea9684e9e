//! The loops around a [`Format`]: panels of sixteen outputs, tiles of rows, chunks of `k`. None of
//! them can change a bit: an accumulator only ever sees its own blocks in ascending order.

use std::mem::{MaybeUninit, size_of};
use std::ops::Range;

use super::format::{Ahead, Format};
use super::simd::Simd;
use crate::cpu::lanes::LANES;

/// What is to be multiplied, as checked pointers. See [`super::MulMat::run`], which makes it.
pub(super) struct Job {
    /// The first byte of weight row 0, and the bytes of a row.
    pub w: *const u8,
    pub stride: usize,
    pub k: usize,
    /// The outputs (weight rows) to compute.
    pub n: Range<usize>,
    /// The first byte of row 0 of the activations, prepared where the format wants it; bytes of a row.
    pub x: *const u8,
    pub x_stride: usize,
    pub rows: usize,
    /// Output 0 of row 0, and outputs from row to row.
    pub out: *mut f32,
    pub out_stride: usize,
}

/// How many bytes ahead of the block at hand a row's weights are asked for: measured, with a wide optimum.
const fn ahead<F: Format>() -> usize {
    if F::PLAIN { 768 } else { 2048 }
}

/// Room for unpacked blocks, meant to stay in the first-level cache beside the activations.
const SCRATCH: usize = 24 * 1024;

#[repr(align(64))]
struct Scratch(MaybeUninit<[u8; SCRATCH]>);

/// Does the job.
///
/// # Safety
///
/// The processor has the instructions of `S`. The job's pointers are valid for the weight rows
/// `n`, for `rows` rows of activations and, for writing and from this thread only, for the outputs `n` of
/// each row.
#[inline(always)]
pub(super) unsafe fn run<S: Simd, F: Format>(job: &Job) {
    // SAFETY: the caller's promise.
    unsafe {
        match job.rows {
            // Rows for which there are registers share a block as it is unpacked; for more of them
            // it is unpacked to memory.
            0 => {}
            1 => few_rows::<S, F, 1>(job),
            2..5 => few_rows::<S, F, 4>(job),
            5..9 if S::WIDE && F::LEN < 256 => few_rows::<S, F, 8>(job),
            _ if F::PLAIN && S::WIDE => many_rows::<S, F, 8, 2>(job),
            _ if S::WIDE => many_rows::<S, F, 4, 2>(job),
            _ => many_rows::<S, F, 4, 1>(job),
        }
    }
}

/// Sixteen weight rows, fewer at the end of the range.
#[derive(Clone, Copy)]
struct Panel {
    w: *const u8,
    stride: usize,
    /// The output of the panel's first row, in activation row 0.
    out: *mut f32,
    rows: usize,
}

/// A block's bytes of sixteen rows: where rows or elements are missing, what there is gets copied
/// here, so that the kernel never reads past the end.
type Stage = [u8; LANES * 256];

impl Panel {
    /// # Safety
    ///
    /// As for [`run`]. A panel past the end has no rows.
    #[inline(always)]
    unsafe fn of(job: &Job, first: usize) -> Panel {
        let first_there = first.min(job.n.end);
        // SAFETY: within the matrix and the row of outputs, or one past them.
        let (w, out) = unsafe {
            (
                job.w.add(first_there * job.stride),
                job.out.add(first_there),
            )
        };
        Panel {
            w,
            stride: job.stride,
            out,
            rows: (job.n.end - first_there).min(LANES),
        }
    }

    /// Where to read block `b`, of which `count` elements exist, and the distance of its rows there: in
    /// place if it is a whole block of sixteen rows, else in the stage.
    ///
    /// # Safety
    ///
    /// As for [`run`], `b` is a block of the row.
    #[inline(always)]
    unsafe fn block<F: Format>(
        &self,
        b: usize,
        count: usize,
        stage: &mut Stage,
    ) -> (*const u8, usize) {
        // SAFETY: within the row.
        unsafe {
            let at = self.w.add(b * F::BYTES);
            if self.rows == LANES && count == F::LEN {
                return (at, self.stride);
            }
            self.copy(at, F::BYTES, count * F::BYTES / F::LEN, stage);
            (stage.as_ptr(), F::BYTES)
        }
    }

    /// # Safety
    ///
    /// `bytes` bytes are readable at `at` and the panel's other rows below it.
    #[cold]
    #[inline(never)]
    unsafe fn copy(&self, at: *const u8, block: usize, bytes: usize, stage: &mut Stage) {
        stage[..LANES * block].fill(0);
        for (r, to) in stage.chunks_exact_mut(block).take(self.rows).enumerate() {
            // SAFETY: the caller's promise.
            let from = unsafe { std::slice::from_raw_parts(at.add(r * self.stride), bytes) };
            to[..bytes].copy_from_slice(from);
        }
    }

    /// What to ask for while block `b` is worked on.
    #[inline(always)]
    fn ahead<F: Format>(&self, b: usize) -> Ahead {
        let position = b * F::BYTES + ahead::<F>();
        // Past the end of these rows come the rows of the next panel.
        let past = if position < self.stride {
            0
        } else {
            self.stride * (LANES - 1)
        };
        let first = b * (LANES * F::BYTES).div_ceil(64);
        Ahead {
            at: self.w.wrapping_add(position + past),
            stride: self.stride,
            first,
        }
    }

    /// # Safety
    ///
    /// As for [`run`]; the outputs of the row have been written.
    #[inline(always)]
    unsafe fn load<S: Simd>(&self, row_offset: usize) -> S::F {
        // SAFETY: the panel's outputs in that row belong to this job; fewer than sixteen are copied.
        unsafe {
            let out = self.out.add(row_offset);
            if self.rows == LANES {
                return S::load_f(out);
            }
            let mut lanes = [0.0f32; LANES];
            out.copy_to_nonoverlapping(lanes.as_mut_ptr(), self.rows);
            S::load_f(lanes.as_ptr())
        }
    }

    /// # Safety
    ///
    /// As for [`run`].
    #[inline(always)]
    unsafe fn store<S: Simd>(&self, row_offset: usize, value: S::F) {
        // SAFETY: as in `load`.
        unsafe {
            let out = self.out.add(row_offset);
            let value = S::one_nan(value);
            if self.rows == LANES {
                return S::store_f(out, value);
            }
            let mut lanes = [0.0f32; LANES];
            S::store_f(lanes.as_mut_ptr(), value);
            out.copy_from_nonoverlapping(lanes.as_ptr(), self.rows);
        }
    }
}

/// Elements of block `b` in rows of `k`.
#[inline(always)]
fn count_of<F: Format>(k: usize, b: usize) -> usize {
    if F::PLAIN {
        (k - b * F::LEN).min(F::LEN)
    } else {
        F::LEN
    }
}

/// The activations of rows `first..first + R`; rows past the last one repeat it.
///
/// # Safety
///
/// As for [`run`]; there is at least one row.
#[inline(always)]
unsafe fn rows_of<const R: usize>(job: &Job, first: usize) -> [*const u8; R] {
    let mut x = [job.x; R];
    for (r, x) in x.iter_mut().enumerate() {
        // SAFETY: within the activations.
        *x = unsafe { x.add((first + r).min(job.rows - 1) * job.x_stride) };
    }
    x
}

/// The activations of block `b`.
///
/// # Safety
///
/// The rows have that block.
#[inline(always)]
unsafe fn at_block<F: Format, const R: usize>(mut x: [*const u8; R], b: usize) -> [*const u8; R] {
    for x in &mut x {
        // SAFETY: the caller's promise.
        *x = unsafe { x.add(b * F::RECORD) };
    }
    x
}

/// One to `R` rows: weights go from memory through registers once.
///
/// # Safety
///
/// As for [`run`], with at least one and at most `R` rows.
#[inline(always)]
unsafe fn few_rows<S: Simd, F: Format, const R: usize>(job: &Job) {
    // SAFETY: the caller's promise; panels, blocks and rows stay inside the job's.
    unsafe {
        let mut stage: Stage = [0; _];
        let rows = rows_of::<R>(job, 0);
        let whole = job.k / F::LEN;
        for first in job.n.clone().step_by(LANES) {
            let panel = Panel::of(job, first);
            let mut acc = [[S::splat_f(0.0); 1]; R];
            for b in 0..whole {
                let (from, stride) = panel.block::<F>(b, F::LEN, &mut stage);
                F::stream::<S, R>(
                    from,
                    stride,
                    panel.ahead::<F>(b),
                    at_block::<F, R>(rows, b),
                    &mut acc,
                );
            }
            let rest = job.k % F::LEN;
            if rest > 0 {
                let mut w = MaybeUninit::<[F::Block<S>; 1]>::uninit();
                let (from, stride) = panel.block::<F>(whole, rest, &mut stage);
                F::unpack::<S>(from, stride, panel.ahead::<F>(whole), w.as_mut_ptr().cast());
                let x = at_block::<F, R>(rows, whole);
                F::step::<S, R, 1>(w.assume_init_ref(), x, rest, &mut acc);
            }
            for (r, acc) in acc.iter().enumerate().take(job.rows) {
                panel.store::<S>(r * job.out_stride, acc[0]);
            }
        }
    }
}

/// Many rows: a chunk of blocks of `P` panels is unpacked into the first-level cache, then used by every
/// tile of `R` rows; between chunks the accumulators rest in the output.
///
/// # Safety
///
/// As for [`run`], with at least one row.
#[inline(always)]
unsafe fn many_rows<S: Simd, F: Format, const R: usize, const P: usize>(job: &Job) {
    // SAFETY: the caller's promise; panels, blocks and rows stay inside the job's. The scratch has room
    // for `room` groups of blocks, those below `end - start` are written before they are read.
    unsafe {
        let mut stage: Stage = [0; _];
        let mut scratch = Scratch(MaybeUninit::uninit());
        let scratch = scratch.0.as_mut_ptr().cast::<[F::Block<S>; P]>();
        let room = const { SCRATCH / size_of::<[F::Block<S>; P]>() };
        let blocks = job.k.div_ceil(F::LEN);
        for first in job.n.clone().step_by(LANES * P) {
            let mut panels = [Panel::of(job, first); P];
            for (p, panel) in panels.iter_mut().enumerate().skip(1) {
                *panel = Panel::of(job, first + LANES * p);
            }
            let mut start = 0;
            loop {
                let end = blocks.min(start + room);
                for b in start..end {
                    let count = count_of::<F>(job.k, b);
                    let group = scratch.add(b - start).cast::<F::Block<S>>();
                    for (p, panel) in panels.iter().enumerate() {
                        let (from, stride) = panel.block::<F>(b, count, &mut stage);
                        F::unpack::<S>(from, stride, panel.ahead::<F>(b), group.add(p));
                    }
                }
                for row in (0..job.rows).step_by(R) {
                    let x = rows_of::<R>(job, row);
                    let there = R.min(job.rows - row);
                    let mut acc = [[S::splat_f(0.0); P]; R];
                    if start > 0 {
                        for (r, acc) in acc.iter_mut().enumerate().take(there) {
                            for (panel, acc) in panels.iter().zip(acc) {
                                *acc = panel.load::<S>((row + r) * job.out_stride);
                            }
                        }
                    }
                    for b in start..end {
                        let x = at_block::<F, R>(x, b);
                        F::step::<S, R, P>(
                            &*scratch.add(b - start),
                            x,
                            count_of::<F>(job.k, b),
                            &mut acc,
                        );
                    }
                    for (r, acc) in acc.iter().enumerate().take(there) {
                        for (panel, &acc) in panels.iter().zip(acc) {
                            panel.store::<S>((row + r) * job.out_stride, acc);
                        }
                    }
                }
                start = end;
                if start == blocks {
                    break;
                }
            }
        }
    }
}

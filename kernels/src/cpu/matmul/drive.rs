//! The loops around a [`Format`]: panels of sixteen outputs, tiles of rows, chunks of `k`. None of
//! them can change a bit: an accumulator only ever sees its own blocks in ascending order.

#![expect(
    clippy::needless_range_loop,
    reason = "an index runs over several arrays at once, and its order is the point"
)]

use std::cell::UnsafeCell;
use std::mem::{MaybeUninit, align_of, size_of};
use std::ops::Range;

use super::format::Format;
use super::kept::Brought;
use super::place::{Panel, Place, Stage};
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
    /// [`room`].
    pub room: *mut Room,
    /// Which activations this thread has in memory of its own. Nobody else's.
    #[cfg_attr(
        not(all(target_arch = "x86_64", target_os = "linux")),
        allow(dead_code, reason = "AMX alone makes something of activations")
    )]
    pub kept: *mut Brought,
    /// Whether packed weights are asked for from several pages in turn.
    pub pages: bool,
    /// Output 0 of row 0, and outputs from row to row.
    pub out: *mut f32,
    pub out_stride: usize,
}

/// Bytes of unpacked blocks, meant to stay in the first-level cache beside the activations.
pub(super) const SCRATCH: usize = 24 * 1024;

/// Rows whose sums rest in memory of a thread's own between chunks: a multiple of every tile's rows.
pub(super) const RESTING: usize = 144;

/// Panels of a tile at most.
const MOST_PANELS: usize = 4;

/// What a thread keeps while it multiplies. Not on the stack: of a function that returns at once where there are no rows, and
/// whose frame takes so many pages that a loop touches them, LLVM 22 loses a register to that loop.
#[repr(C, align(64))]
pub(super) struct Room {
    pub blocks: [u8; SCRATCH],
    pub sums: [[[f32; LANES]; MOST_PANELS]; RESTING],
}

thread_local! {
    static ROOM: UnsafeCell<Room> = const {
        UnsafeCell::new(Room {
            blocks: [0; SCRATCH],
            sums: [[[0.0; LANES]; MOST_PANELS]; RESTING],
        })
    };
}

/// This thread's.
pub(super) fn room() -> *mut Room {
    ROOM.with(UnsafeCell::get)
}

/// Does the job.
///
/// # Safety
///
/// The processor has the instructions of `S`. The room is this thread's, and so is what is kept, which nobody else uses meanwhile.
/// The job's pointers are valid for the weight rows `n`, which lie as `W` says (packed: from a multiple of sixteen to one), for
/// `rows` rows of activations and, for reading and writing and from this thread only, for the outputs `n` of each row.
#[inline(always)]
pub(super) unsafe fn run<S: Simd, F: Format, W: Place>(job: &Job) {
    // SAFETY: the caller's promise.
    unsafe {
        match job.rows {
            // Rows for which there are registers share a block as it is unpacked; for more of them
            // it is unpacked to memory.
            0 => {}
            // One panel is one long stream of memory, which is the fastest; sums of plain numbers wait for each other.
            1 if W::PACKED && F::PLAIN && !job.pages => few_rows::<S, F, W, 1, 2>(job),
            1 => few_rows::<S, F, W, 1, 1>(job),
            2..5 => few_rows::<S, F, W, 4, 1>(job),
            5..9 if S::WIDE && F::FEW > 4 && (W::PACKED || F::LEN < 256) => {
                few_rows::<S, F, W, 8, 1>(job)
            }
            5..9 if S::WIDE && W::PACKED => one_tile::<S, F, W, 8>(job),
            _ if F::PLAIN && S::WIDE => many_rows::<S, F, W, 8, 2>(job),
            // The last tile may have few of its rows, and blocks unpacked for it few users, which is little only among many.
            48.. if S::WIDE && F::MANY == (6, 2) => many_rows::<S, F, W, 6, 2>(job),
            48.. if S::WIDE && F::MANY == (3, 4) => {
                // Panels that are not there would be computed along.
                let rest = job.n.len() % (4 * LANES);
                let end = job.n.end - if rest > 2 * LANES { 0 } else { rest };
                let (wide, few) = (job.n.start..end, end..job.n.end);
                many_rows::<S, F, W, 3, 4>(&Job { n: wide, ..*job });
                many_rows::<S, F, W, 4, 2>(&Job { n: few, ..*job });
            }
            _ if S::WIDE => many_rows::<S, F, W, 4, 2>(job),
            _ => many_rows::<S, F, W, 4, 1>(job),
        }
    }
}

/// The panel of output `first`.
///
/// # Safety
///
/// As for [`run`].
#[inline(always)]
unsafe fn panel_of(job: &Job, first: usize) -> Panel {
    // SAFETY: the caller's promise.
    unsafe { Panel::of(job.w, job.stride, &job.n, first).with_pages(job.pages) }
}

/// `P` panels from output `first` on. Where there is none, the first one once more, to be computed along and stored nowhere.
///
/// # Safety
///
/// As for [`run`].
#[inline(always)]
pub(super) unsafe fn panels_of<const P: usize>(job: &Job, first: usize) -> [Panel; P] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut panels = [panel_of(job, first); P];
        for p in 1..P {
            panels[p] = panel_of(job, first + LANES * p);
            if panels[p].rows == 0 {
                panels[p].w = panels[0].w;
            }
        }
        panels
    }
}

/// # Safety
///
/// As for [`run`].
#[inline(always)]
pub(super) unsafe fn store<S: Simd>(
    job: &Job,
    panel: &Panel,
    first: usize,
    row: usize,
    value: S::F,
) {
    // SAFETY: the panel's outputs in that row belong to this job; fewer than sixteen are copied.
    unsafe {
        let out = job.out.wrapping_add(row * job.out_stride + first);
        let value = S::one_nan(value);
        if panel.rows == LANES {
            return S::store_f(out, value);
        }
        let mut lanes = [0.0f32; LANES];
        S::store_f(lanes.as_mut_ptr(), value);
        out.copy_from_nonoverlapping(lanes.as_ptr(), panel.rows);
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
pub(super) unsafe fn rows_of<const R: usize>(job: &Job, first: usize) -> [*const u8; R] {
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

/// One to `R` rows: weights go from memory through registers once, from `P` panels side by side.
///
/// # Safety
///
/// As for [`run`], with at least one and at most `R` rows.
#[inline(always)]
unsafe fn few_rows<S: Simd, F: Format, W: Place, const R: usize, const P: usize>(job: &Job) {
    // SAFETY: the caller's promise; panels, blocks and rows stay inside the job's.
    unsafe {
        let mut first = job.n.start;
        if P > 1 {
            while job.n.end - first >= LANES * P {
                some_panels::<S, F, W, R, P>(job, first);
                first += LANES * P;
            }
        }
        while first < job.n.end {
            some_panels::<S, F, W, R, 1>(job, first);
            first += LANES;
        }
    }
}

/// # Safety
///
/// As for [`few_rows`]; all panels but the last are whole.
#[inline(always)]
unsafe fn some_panels<S: Simd, F: Format, W: Place, const R: usize, const P: usize>(
    job: &Job,
    first: usize,
) {
    // SAFETY: the caller's promise; panels, blocks and rows stay inside the job's.
    unsafe {
        let mut stage = MaybeUninit::<Stage>::uninit();
        let rows = rows_of::<R>(job, 0);
        let (whole, rest) = (job.k / F::LEN, job.k % F::LEN);
        let mut panels = [panel_of(job, first); P];
        for p in 1..P {
            panels[p] = panel_of(job, first + LANES * p);
        }
        let mut acc = [[[S::splat_f(0.0); 1]; R]; P];
        for b in 0..whole {
            let x = at_block::<F, R>(rows, b);
            for p in 0..P {
                let from = W::block::<F, P>(&panels[p], b, F::LEN, &mut stage);
                F::stream::<S, W, R>(from, x, &mut acc[p]);
            }
        }
        if rest > 0 {
            let x = at_block::<F, R>(rows, whole);
            for p in 0..P {
                let mut w = MaybeUninit::<[F::Block<S>; 1]>::uninit();
                let from = W::block::<F, P>(&panels[p], whole, rest, &mut stage);
                F::unpack::<S, W>(from, w.as_mut_ptr().cast());
                F::step::<S, R, 1>(w.assume_init_ref(), x, rest, &mut acc[p]);
            }
        }
        for p in 0..P {
            for r in 0..R.min(job.rows) {
                store::<S>(job, &panels[p], first + LANES * p, r, acc[p][r][0]);
            }
        }
    }
}

/// One to `R` rows where a block has more weights than there are registers: it is unpacked into the first-level cache,
/// while those that come later are asked for, and used once.
///
/// # Safety
///
/// As for [`run`], with at least one and at most `R` rows.
#[inline(always)]
unsafe fn one_tile<S: Simd, F: Format, W: Place, const R: usize>(job: &Job) {
    // SAFETY: the caller's promise; panels, blocks and rows stay inside the job's. A block is written before it is read.
    unsafe {
        let mut stage = MaybeUninit::<Stage>::uninit();
        let mut block = MaybeUninit::<[F::Block<S>; 1]>::uninit();
        let rows = rows_of::<R>(job, 0);
        for first in job.n.clone().step_by(LANES) {
            let panel = panel_of(job, first);
            let mut acc = [[S::splat_f(0.0); 1]; R];
            for b in 0..job.k.div_ceil(F::LEN) {
                let count = count_of::<F>(job.k, b);
                let from = W::block::<F, 1>(&panel, b, count, &mut stage);
                F::unpack::<S, W>(from, block.as_mut_ptr().cast());
                let x = at_block::<F, R>(rows, b);
                F::step::<S, R, 1>(block.assume_init_ref(), x, count, &mut acc);
            }
            for r in 0..R.min(job.rows) {
                store::<S>(job, &panel, first, r, acc[r][0]);
            }
        }
    }
}

/// The packed bytes that are unpacked next where many rows use what is.
pub(super) struct NextChunk<const P: usize> {
    at: [*const u8; P],
    /// Lines of each panel that are left, and how many to ask for in a step.
    left: usize,
    share: usize,
}

impl<const P: usize> NextChunk<P> {
    /// What comes after block `end` of these panels, in `steps` shares.
    ///
    /// # Safety
    ///
    /// As for [`run`].
    #[inline(always)]
    pub unsafe fn of<W: Place, F: Format>(
        job: &Job,
        panels: &[Panel; P],
        first: usize,
        end: usize,
        room: usize,
        steps: usize,
    ) -> Self {
        let block = LANES * F::BYTES;
        let blocks = job.k.div_ceil(F::LEN);
        let mut at = [job.w; P];
        for p in 0..P {
            at[p] = if end < blocks {
                panels[p].w.wrapping_add(end * block)
            } else {
                // SAFETY: the caller's promise.
                unsafe { panel_of(job, first + LANES * (P + p)).w }
            };
        }
        let there = if end < blocks { blocks - end } else { blocks };
        let lines = (there.min(room) * block).div_ceil(64);
        NextChunk {
            at,
            left: if W::PACKED { lines } else { 0 },
            share: lines.div_ceil(steps.max(1)),
        }
    }

    /// Asks for a share.
    ///
    /// # Safety
    ///
    /// As for [`Simd`].
    #[inline(always)]
    pub unsafe fn ask<S: Simd>(&mut self) {
        let share = self.share.min(self.left);
        for p in 0..P {
            for line in 0..share {
                // SAFETY: prefetching is allowed anywhere.
                unsafe { S::prefetch(self.at[p].wrapping_add(64 * line)) };
            }
            self.at[p] = self.at[p].wrapping_add(64 * share);
        }
        self.left -= share;
    }
}

/// Many rows: a chunk of blocks of `P` panels is unpacked into the first-level cache, then used by every
/// tile of `R` rows; between chunks the accumulators rest.
///
/// # Safety
///
/// As for [`run`], with at least one row.
#[inline(always)]
unsafe fn many_rows<S: Simd, F: Format, W: Place, const R: usize, const P: usize>(job: &Job) {
    // SAFETY: the caller's promise; panels, blocks and rows stay inside the job's.
    unsafe {
        for first in job.n.clone().step_by(LANES * P) {
            let panels = panels_of::<P>(job, first);
            for start in (0..job.rows).step_by(RESTING) {
                let rows = start..job.rows.min(start + RESTING);
                resting_rows::<S, F, W, R, P>(job, &panels, first, rows);
            }
        }
    }
}

/// Some rows, at most [`RESTING`], of the panels of output `first` and after it. Sums rest here and not in the output, whose rows
/// are far apart and fall into the same few places of a cache.
///
/// # Safety
///
/// As for [`many_rows`].
#[inline(always)]
unsafe fn resting_rows<S: Simd, F: Format, W: Place, const R: usize, const P: usize>(
    job: &Job,
    panels: &[Panel; P],
    first: usize,
    rows: Range<usize>,
) {
    const {
        assert!(RESTING.is_multiple_of(R) && P <= MOST_PANELS);
        assert!(size_of::<S::F>() == size_of::<[f32; LANES]>());
        assert!(align_of::<F::Block<S>>() <= align_of::<Room>());
    }
    // SAFETY: the caller's promise; panels, blocks and rows stay inside the job's. Nobody else uses the thread's room, which has
    // place for `room` groups of blocks and the sums of the rows' tiles; both are written before they are read.
    unsafe {
        let mut stage = MaybeUninit::<Stage>::uninit();
        let scratch = (&raw mut (*job.room).blocks).cast::<[F::Block<S>; P]>();
        let resting = (&raw mut (*job.room).sums).cast::<[[S::F; P]; R]>();
        let room = const { SCRATCH / size_of::<[F::Block<S>; P]>() };
        let blocks = job.k.div_ceil(F::LEN);
        let mut start = 0;
        loop {
            let end = blocks.min(start + room);
            for b in start..end {
                let count = count_of::<F>(job.k, b);
                let group = scratch.add(b - start).cast::<F::Block<S>>();
                for p in 0..P {
                    let from = W::block::<F, 0>(&panels[p], b, count, &mut stage);
                    F::unpack::<S, W>(from, group.add(p));
                }
            }
            // The next chunk is asked for little by little while this one is worked on: at once it would
            // wait for memory, and the multiplication with it.
            let steps = rows.len().div_ceil(R) * (end - start);
            let mut next = NextChunk::<P>::of::<W, F>(job, panels, first, end, room, steps);
            for (tile, row) in rows.clone().step_by(R).enumerate() {
                let x = rows_of::<R>(job, row);
                let there = R.min(rows.end - row);
                let mut acc = match start {
                    0 => [[S::splat_f(0.0); P]; R],
                    _ => resting.add(tile).read(),
                };
                for b in start..end {
                    next.ask::<S>();
                    let x = at_block::<F, R>(x, b);
                    F::step::<S, R, P>(
                        &*scratch.add(b - start),
                        x,
                        count_of::<F>(job.k, b),
                        &mut acc,
                    );
                }
                if end < blocks {
                    resting.add(tile).write(acc);
                    continue;
                }
                for r in 0..there {
                    for p in 0..P {
                        store::<S>(job, &panels[p], first + LANES * p, row + r, acc[r][p]);
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

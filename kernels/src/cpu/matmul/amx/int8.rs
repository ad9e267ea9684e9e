//! Block dtypes by AMX: the exact integer dots of a sub-block with sixteen rows of activations and sixteen outputs are one
//! instruction. What is made of them is what every path makes of them, in the same order, so that the bits are the same.

use std::arch::x86_64::*;
use std::cell::UnsafeCell;
use std::mem::{MaybeUninit, size_of};
use std::ops::Range;
use std::ptr;

use super::super::avx512::Avx512;
use super::super::drive::{self, Job, NextChunk, RESTING, SCRATCH};
use super::super::kept::Time;
use super::super::on_avx512;
use super::super::place::{Panel, Place, Stage};
use super::tiled::Tiled;
use super::{LINE, Line, configure, height, release, tile, zeros};
use crate::cpu::lanes::LANES;
use crate::cpu::quantize::Q8_RECORD;

/// Rows of activations that are multiplied together: those of a tile.
const GROUP: usize = LANES;

/// Elements of a row of activations that lie together, and lines that those of a group take.
const STEP: usize = 32;
const STEP_LINES: usize = GROUP * STEP / LINE;

/// Lines of activations for which there is room, in the second-level cache.
const ROOM_LINES: usize = 1 << 14;

/// Rows below which few of a tile's would be used.
const LEAST: usize = 9;

/// Rows that are multiplied at a time at most.
const ROWS: usize = RESTING;

/// Sums of a sub-block: of each row those with sixteen outputs.
type Dots = [[i32; LANES]; GROUP];

/// Of each row of a group one.
type Numbers = [f32; GROUP];

/// Sub-blocks whose dots are being made, stored or read, so that none waits for another.
const TOGETHER: usize = 4;

/// What a thread keeps while it multiplies.
#[repr(C, align(64))]
struct Room {
    /// When the activations were brought.
    brought: Time,
    /// Activations: of each group the steps, of each step the rows.
    x: [Line; ROOM_LINES],
    /// What a record has beside them, of each group the steps, of each step the rows: `da`, and `f32(Σ q) · da`. One line, where
    /// the rows' records are many.
    da: [Numbers; ROOM_LINES / STEP_LINES],
    sums: [Numbers; ROOM_LINES / STEP_LINES],
    dots: [Dots; TOGETHER],
}

thread_local! {
    // On the heap, and only in threads that multiply so: of a thread's own memory it would be taken from every thread's stack.
    static ROOM: UnsafeCell<Option<Box<Room>>> = const { UnsafeCell::new(None) };
}

/// Groups of rows of `k` activations for which there is room.
fn groups(k: usize) -> usize {
    let lines = k.div_ceil(STEP).max(1).saturating_mul(STEP_LINES);
    (ROOM_LINES / lines).min(ROWS / GROUP)
}

/// Rows of `k` that are multiplied at a time; none where tiles are not used.
pub(in super::super) fn rows(k: usize) -> usize {
    groups(k) * GROUP
}

/// Does the job.
///
/// # Safety
///
/// As for [`drive::run`]; the processor has AVX-512 and AMX for bytes, and this process may use its tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(in super::super) unsafe fn run<F: Tiled, W: Place>(job: &Job) {
    let groups = groups(job.k);
    let height = height(job.rows, groups);
    if job.rows < LEAST || groups == 0 {
        // SAFETY: the caller's promise.
        return unsafe { on_avx512::<F, W>(job) };
    }
    // SAFETY: the caller's promise. The room is this thread's, and nothing below calls this function again; all of it is
    // numbers. So many rows have room.
    unsafe {
        let room = (*ROOM.with(UnsafeCell::get)).get_or_insert_with(|| zeros());
        configure(F::CONFIG);
        for start in (0..job.rows).step_by(height) {
            let rows = start..job.rows.min(start + height);
            let x = job.x.add(start * job.x_stride);
            if (*job.kept).renew(&mut room.brought, (x, job.x_stride), rows.len(), job.k) {
                bring::<F>(job, &rows, room);
            }
            for first in job.n.clone().step_by(LANES) {
                panel::<F, W>(job, &rows, first, room);
            }
        }
        release();
    }
}

/// Brings the activations of some rows into tiles.
///
/// # Safety
///
/// As for [`run`]; there is room for them.
#[inline(always)]
unsafe fn bring<F: Tiled>(job: &Job, rows: &Range<usize>, room: &mut Room) {
    let steps = job.k / STEP;
    for (group, first) in rows.clone().step_by(GROUP).enumerate() {
        // SAFETY: the caller's promise; a record has the bytes.
        unsafe {
            let lines = room.x.as_mut_ptr().add(group * steps * STEP_LINES);
            let x = job.x.add(first * job.x_stride);
            let there = (rows.end - first).min(GROUP);
            // Step after step, so that lines are written whole.
            for step in 0..steps {
                let to = lines.add(step * STEP_LINES).cast::<u8>();
                let at = group * steps + step;
                for r in 0..there {
                    let record = x.add(r * job.x_stride + step * Q8_RECORD);
                    let values = _mm256_loadu_si256(record.cast());
                    _mm256_store_si256(to.add(r * STEP).cast(), values);
                    room.da[at][r] = ptr::read_unaligned(record.add(32).cast());
                    room.sums[at][r] = ptr::read_unaligned(record.add(40).cast());
                }
            }
        }
    }
}

/// Multiplies rows with the panel of output `first`.
///
/// # Safety
///
/// As for [`run`]; the room has the rows' activations.
#[inline(always)]
unsafe fn panel<F: Tiled, W: Place>(job: &Job, rows: &Range<usize>, first: usize, room: &mut Room) {
    // SAFETY: the caller's promise; blocks stay inside the panel. Nobody else uses the thread's rooms, which have place for
    // the blocks of a chunk and the sums of the rows; both are written before they are read.
    unsafe {
        let panels = [Panel::of(job.w, job.stride, &job.n, first)];
        let mut stage = MaybeUninit::<Stage>::uninit();
        let scratch = (&raw mut (*job.room).blocks).cast::<F::Block<Avx512>>();
        let resting = (&raw mut (*job.room).sums).cast::<[f32; LANES]>();
        let most = const { SCRATCH / size_of::<F::Block<Avx512>>() };
        let (blocks, steps) = (job.k / F::LEN, job.k / STEP);
        let groups = rows.len().div_ceil(GROUP);
        let mut start = 0;
        loop {
            let end = blocks.min(start + most);
            for b in start..end {
                let from = W::block::<F, 0>(&panels[0], b, F::LEN, &mut stage);
                let block = scratch.add(b - start);
                F::unpack::<Avx512, W>(from, block);
                sign::<F>(block);
            }
            let mut next =
                NextChunk::<1>::of::<W, F>(job, &panels, first, end, most, groups * (end - start));
            for group in 0..groups {
                let row = rows.start + group * GROUP;
                let there = (rows.end - row).min(GROUP);
                let mut work = Work::<F> {
                    blocks: scratch,
                    count: end - start,
                    x: room
                        .x
                        .as_ptr()
                        .add((group * steps + start * F::LEN / STEP) * STEP_LINES),
                    da: room.da.as_ptr().add(group * steps + start * F::LEN / STEP),
                    sums: room
                        .sums
                        .as_ptr()
                        .add(group * steps + start * F::LEN / STEP),
                    dots: &raw mut room.dots,
                    next: &mut next,
                };
                let sums = resting.add(group * GROUP).cast::<__m512>();
                if start == 0 {
                    for r in 0..GROUP {
                        sums.add(r).write(_mm512_setzero_ps());
                    }
                }
                macro_rules! add {
                    ($rows:expr) => {{
                        let sums = sums.cast::<[__m512; $rows]>();
                        sums.write(work.add(sums.read()));
                    }};
                }
                if there > GROUP / 2 {
                    add!(GROUP);
                } else {
                    add!(GROUP / 2);
                }
                if end == blocks {
                    for r in 0..there {
                        drive::store::<Avx512>(job, &panels[0], first, row + r, sums.add(r).read());
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

/// Makes unpacked weights signed.
///
/// # Safety
///
/// The block is there.
#[inline(always)]
unsafe fn sign<F: Tiled>(block: *mut F::Block<Avx512>) {
    if F::ZERO == 0 {
        return;
    }
    // SAFETY: the caller's promise; a block has four weights of sixteen rows in each register.
    unsafe {
        let zero = _mm512_set1_epi8(F::ZERO);
        let weights = F::weights(block).cast::<__m512i>().cast_mut();
        for g in 0..F::LEN / 4 {
            let at = weights.add(g);
            at.write(_mm512_sub_epi8(at.read(), zero));
        }
    }
}

/// A chunk of a panel and a group of rows.
struct Work<'a, F: Tiled> {
    blocks: *const F::Block<Avx512>,
    count: usize,
    /// The rows' activations, step after step.
    x: *const Line,
    da: *const Numbers,
    sums: *const Numbers,
    dots: *mut [Dots; TOGETHER],
    next: &'a mut NextChunk<1>,
}

impl<F: Tiled> Work<'_, F> {
    /// Adds the products with `R` rows to their sums. While something is made of the dots of one sub-block, those of the next
    /// ones are made.
    ///
    /// # Safety
    ///
    /// As for [`run`].
    #[inline(always)]
    unsafe fn add<const R: usize>(&mut self, mut sums: [__m512; R]) -> [__m512; R] {
        let all = self.count * (F::LEN / F::SUB);
        // SAFETY: the caller's promise; sub-blocks are within the chunk.
        unsafe {
            macro_rules! begin {
                ($sub:expr, $c:literal, $x:literal, $w:literal) => {
                    if $sub < all {
                        let at = $sub * F::SUB;
                        let x = self.x.cast::<u8>();
                        let x = x.add(at / STEP * (GROUP * STEP) + at % STEP);
                        let block = self.blocks.add(at / F::LEN);
                        let w = F::weights(block).add(at % F::LEN * LANES);
                        tile!(load $x, x, apart STEP);
                        tile!(load $w, w);
                        tile!(zero $c);
                        tile!(int8 $c, $x, $w);
                    }
                };
            }
            let to = self.dots.cast::<Dots>();
            macro_rules! put {
                ($sub:expr, $c:literal) => {
                    if $sub < all {
                        tile!(store $c, to.add($c));
                    }
                };
            }
            macro_rules! take {
                ($sub:expr, $c:literal) => {
                    if $sub < all {
                        sums = self.take($sub, &*to.add($c), sums);
                    }
                };
            }
            begin!(0, 0, 4, 5);
            begin!(1, 1, 6, 7);
            put!(0, 0);
            begin!(2, 2, 4, 5);
            put!(1, 1);
            for sub in (0..all).step_by(TOGETHER) {
                begin!(sub + 3, 3, 6, 7);
                put!(sub + 2, 2);
                take!(sub, 0);
                begin!(sub + 4, 0, 4, 5);
                put!(sub + 3, 3);
                take!(sub + 1, 1);
                begin!(sub + 5, 1, 6, 7);
                put!(sub + 4, 0);
                take!(sub + 2, 2);
                begin!(sub + 6, 2, 4, 5);
                put!(sub + 5, 1);
                take!(sub + 3, 3);
            }
            sums
        }
    }

    /// `acc = fma(f32(S) · da, d, acc)`, and with a minimum `acc = fma(f32(Σ q) · da, m, acc)` after it. The sums go in and out as
    /// values, which stay in registers.
    ///
    /// # Safety
    ///
    /// As for [`run`]; the dots are those of sub-block `sub` of the chunk.
    #[inline(always)]
    unsafe fn take<const R: usize>(
        &mut self,
        sub: usize,
        dots: &Dots,
        mut sums: [__m512; R],
    ) -> [__m512; R] {
        let subs = F::LEN / F::SUB;
        // SAFETY: the caller's promise; a record has the numbers.
        unsafe {
            let block = self.blocks.add(sub / subs);
            if sub.is_multiple_of(subs) {
                self.next.ask::<Avx512>();
            }
            let d = F::scale(block, sub % subs);
            let step = sub * F::SUB / STEP;
            let da = &*self.da.add(step);
            for r in 0..R {
                let dots = _mm512_loadu_si512((&raw const dots[r]).cast());
                let product = _mm512_mul_ps(_mm512_cvtepi32_ps(dots), _mm512_set1_ps(da[r]));
                sums[r] = _mm512_fmadd_ps(product, d, sums[r]);
            }
            if let Some(m) = F::minimum(block) {
                let of_x = &*self.sums.add(step);
                for r in 0..R {
                    sums[r] = _mm512_fmadd_ps(_mm512_set1_ps(of_x[r]), m, sums[r]);
                }
            }
            sums
        }
    }
}

//! BF16 weights by AMX: tiles of sixteen rows by 64 bytes, and one instruction that multiplies two of them.
//!
//! The instruction multiplies BF16 with BF16. An activation is therefore cut into three BF16 numbers whose sum it is, exactly:
//! its first eight significant bits, the next eight, the last eight. Each row of activations is three rows of tiles then, of
//! which each is summed by itself, in the order that [`matmul`](super::super) documents.
//!
//! Weights are the second operand, whose layout (pairs of `k`, sixteen outputs side by side) is that of a packed panel. Rows as
//! the file has them are brought into it on the way.

mod next;

use std::arch::x86_64::*;
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;

use super::super::avx512::Avx512;
use super::super::drive::{self, Job};
use super::super::format::{BF16, Plain};
use super::super::kept::Time;
use super::super::place::{Panel, Place, Stage};
use super::{Config, LINE, Line, TILE, configure, height, release, tile, zeros};
use crate::cpu::lanes::LANES;
use next::Next;

/// Elements of `k` that one instruction takes in.
const STEP: usize = LINE / 2;

/// BF16 numbers that make an activation.
const PARTS: usize = 3;

/// Rows of activations that are multiplied together: three tiles.
const GROUP: usize = 3 * LANES / PARTS;

/// Lines of a group's activations in one step.
const LINES: usize = GROUP * PARTS;

/// Panels that are multiplied together.
const PANELS: usize = 2;

/// Rows that go through the weights together at most: of a model's step.
const ROWS: usize = 128;
const MOST_GROUPS: usize = ROWS.div_ceil(GROUP);

/// Lines of activations for which there is room, and how many are read again and again at a time: half of a second-level cache.
const ROOM_LINES: usize = 3 << 15;
const CHUNK_LINES: usize = 1 << 14;

/// Steps of weights that are brought into the layout of a panel at a time.
const BROUGHT_STEPS: usize = 192;

/// Sums of panels and groups that rest between chunks.
const MOST_SUMS: usize = 16 * MOST_GROUPS;

/// Sums of a group of rows with [`PANELS`] panels.
type Sums = [[Sum; LINES]; PANELS];
type Sum = [f32; LANES];

/// What a thread keeps while it multiplies.
#[repr(C, align(64))]
struct Room {
    /// When the activations were brought.
    brought: Time,
    /// Activations in parts: of each group the steps, of each step the lines of its rows.
    x: [Line; ROOM_LINES],
    /// Weights brought into the layout of a panel.
    w: [[Line; LANES]; PANELS * BROUGHT_STEPS],
    sums: [Sums; MOST_SUMS],
}

thread_local! {
    // On the heap, and only in threads that multiply so: of a thread's own memory it would be taken from every thread's stack.
    static ROOM: UnsafeCell<Option<Box<Room>>> = const { UnsafeCell::new(None) };
}

/// Weights as the instruction wants them, from where they lie.
type Weights = Plain<BF16, 2>;

/// Rows of `k` that are multiplied at a time, and whether all of them have room at once.
pub(in super::super) fn rows(k: usize) -> (usize, bool) {
    let fit = ROOM_LINES / k.div_ceil(STEP).max(1) / PARTS / LANES * LANES;
    (fit.clamp(LANES, ROWS), fit > 0)
}

/// Does the job.
///
/// # Safety
///
/// As for [`drive::run`], of weights in BF16 and activations in `f32`; the processor has AVX-512 and AMX for BF16, and this process
/// may use its tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(in super::super) unsafe fn run<W: Place>(job: &Job) {
    // SAFETY: the caller's promise. The room is this thread's, and nothing below calls this function again; all of it is numbers.
    unsafe {
        let room = (*ROOM.with(UnsafeCell::get)).get_or_insert_with(|| zeros());
        configure(&CONFIG);
        let (most, fit) = rows(job.k);
        let height = height(job.rows, most / LANES);
        for first in (0..job.rows).step_by(height) {
            let rows = Rows {
                first,
                count: (job.rows - first).min(height),
                steps: job.k.div_ceil(STEP),
                fit,
            };
            all::<W>(job, &rows, room);
        }
        release();
    }
}

/// All eight tiles are whole: rows that do not exist are multiplied along, and read by nobody.
static CONFIG: Config = Config::new([[LANES as u8, LINE as u8]; 8]);

/// Multiplies rows with all panels.
///
/// # Safety
///
/// As for [`run`].
#[inline(always)]
unsafe fn all<W: Place>(job: &Job, rows: &Rows, room: &mut Room) {
    // SAFETY: the caller's promise; the rows have room, or those of a chunk have, and so do the sums of the outputs that rest.
    unsafe {
        if rows.fit {
            let x = job.x.add(rows.first * job.x_stride);
            if (*job.kept).renew(&mut room.brought, (x, job.x_stride), rows.count, job.k) {
                let whole = rows.whole();
                for group in 0..rows.groups() {
                    split_group(job, rows, group, &whole, room);
                }
            }
        }
        let chunks = Chunks::of::<W>(rows);
        let width = match chunks.count {
            1 => usize::MAX,
            _ => PANELS * LANES * (MOST_SUMS / rows.groups()),
        };
        let mut first = job.n.start;
        while first < job.n.end {
            let end = job.n.end.min(first.saturating_add(width));
            for c in 0..chunks.count {
                let chunk = chunks.chunk(c);
                if !rows.fit {
                    // What is there is nobody's any more.
                    (*job.kept).renew(&mut room.brought, (std::ptr::null(), 0), 0, 0);
                    for group in 0..rows.groups() {
                        split_group(job, rows, group, &chunk, room);
                    }
                }
                for (pair, output) in (first..end).step_by(PANELS * LANES).enumerate() {
                    let after = output + PANELS * LANES;
                    let next = if after < end {
                        (after, &chunk)
                    } else if chunk.last {
                        (end, &chunks.chunk(0))
                    } else {
                        (first, &chunks.chunk(c + 1))
                    };
                    panels::<W>(job, rows, &chunk, (pair, output), next, room);
                }
            }
            first = end;
        }
    }
}

/// Rows of activations that go through the weights together.
struct Rows {
    first: usize,
    count: usize,
    /// Along `k`.
    steps: usize,
    /// Whether all of it has room.
    fit: bool,
}

impl Rows {
    fn groups(&self) -> usize {
        self.count.div_ceil(GROUP)
    }

    /// Rows of a group.
    fn of_group(&self, group: usize) -> usize {
        (self.count - group * GROUP).min(GROUP)
    }

    /// Tiles of a group.
    fn tiles(&self, group: usize) -> usize {
        (self.of_group(group) * PARTS).div_ceil(LANES)
    }

    /// Lines of all groups in a step.
    fn lines(&self) -> usize {
        let last = self.groups() - 1;
        last * LINES + self.tiles(last) * LANES
    }

    fn whole(&self) -> Chunk {
        Chunk {
            start: 0,
            end: self.steps,
            last: true,
        }
    }

    /// The lines that the room has of a group, from the first step of a chunk on.
    fn lines_of(&self, group: usize, chunk: &Chunk) -> usize {
        let (steps, first) = match self.fit {
            true => (self.steps, chunk.start),
            false => (chunk.len(), 0),
        };
        group * LINES * steps + first * self.tiles(group) * LANES
    }
}

/// Steps along `k`, in chunks whose activations stay in a cache.
struct Chunks {
    steps: usize,
    most: usize,
    count: usize,
}

impl Chunks {
    fn of<W: Place>(rows: &Rows) -> Chunks {
        // Whole pages of weights.
        let most = (CHUNK_LINES / rows.lines() / LANES * LANES).max(LANES);
        let most = if W::PACKED {
            most
        } else {
            most.min(BROUGHT_STEPS)
        };
        Chunks {
            steps: rows.steps,
            most,
            count: rows.steps.div_ceil(most).max(1),
        }
    }

    fn chunk(&self, index: usize) -> Chunk {
        let start = index * self.most;
        Chunk {
            start,
            end: self.steps.min(start + self.most),
            last: index + 1 == self.count,
        }
    }
}

/// Steps along `k`.
struct Chunk {
    start: usize,
    end: usize,
    last: bool,
}

impl Chunk {
    fn len(&self) -> usize {
        self.end - self.start
    }
}

/// Cuts a group's activations in parts.
///
/// # Safety
///
/// As for [`run`]; the chunk fits into the room.
#[inline(always)]
unsafe fn split_group(job: &Job, rows: &Rows, group: usize, chunk: &Chunk, room: &mut Room) {
    // SAFETY: the caller's promise; lines past the activations' end become zeros.
    unsafe {
        let per_step = rows.tiles(group) * LANES;
        let lines = room.x.as_mut_ptr().add(rows.lines_of(group, chunk));
        for r in 0..rows.of_group(group) {
            let row = rows.first + group * GROUP + r;
            let x = job.x.add(row * job.x_stride).cast::<f32>();
            let mut to = lines.add(r * PARTS);
            for step in chunk.start..chunk.end {
                let there = job.k - step * STEP;
                let at = x.add(step * STEP);
                let parts = if there >= STEP {
                    [
                        split(_mm512_loadu_ps(at)),
                        split(_mm512_loadu_ps(at.add(LANES))),
                    ]
                } else {
                    let (low, high) = (there.min(LANES), there.saturating_sub(LANES));
                    let mask = |count: usize| ((1_u32 << count) - 1) as u16;
                    [
                        split(_mm512_maskz_loadu_ps(mask(low), at)),
                        split(_mm512_maskz_loadu_ps(mask(high), at.wrapping_add(LANES))),
                    ]
                };
                for (part, (low, high)) in parts[0].into_iter().zip(parts[1]).enumerate() {
                    _mm512_store_si512(to.add(part).cast(), upper_halves(low, high));
                }
                to = to.wrapping_add(per_step);
            }
        }
    }
}

/// The parts of sixteen activations, in the upper half of each lane. Those of an infinity are itself and NaNs, of which nothing
/// comes: see [`finish`].
///
/// # Safety
///
/// As for [`Simd`](super::super::simd::Simd).
#[inline(always)]
unsafe fn split(x: __m512) -> [__m512i; PARTS] {
    // SAFETY: the caller's promise.
    unsafe {
        let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
        let cut = |v| _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v), upper));
        let first = cut(x);
        let rest = _mm512_sub_ps(x, first);
        let second = cut(rest);
        let third = _mm512_sub_ps(rest, second);
        // A NaN whose upper half is an infinity's would be one.
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
        let first = _mm512_mask_mov_ps(
            first,
            nan,
            _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc0_0000)),
        );
        [first, second, third].map(|v| _mm512_castps_si512(v))
    }
}

/// The upper half of each lane of both.
///
/// # Safety
///
/// As for [`Simd`](super::super::simd::Simd).
#[inline(always)]
unsafe fn upper_halves(a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let odd = _mm512_set_epi16(
            63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23, 21,
            19, 17, 15, 13, 11, 9, 7, 5, 3, 1,
        );
        _mm512_permutex2var_epi16(a, odd, b)
    }
}

/// Multiplies all rows with the panels of output `output` and after it. Those of `next` in its chunk come after them.
///
/// # Safety
///
/// As for [`run`]; the room has the chunk's activations, and the sums of pair `pair` if the chunk is not the first.
#[inline(always)]
unsafe fn panels<W: Place>(
    job: &Job,
    rows: &Rows,
    chunk: &Chunk,
    (pair, output): (usize, usize),
    (next, next_chunk): (usize, &Chunk),
    room: &mut Room,
) {
    // SAFETY: the caller's promise; panels stay inside the job's.
    unsafe {
        let panels = [0, 1].map(|p| Panel::of(job.w, job.stride, &job.n, output + LANES * p));
        let there = if panels[1].rows == 0 { 1 } else { PANELS };
        let mut w = [panels[0].w; PANELS];
        for p in 0..there {
            w[p] = if W::PACKED {
                panels[p].w.add(chunk.start * TILE)
            } else {
                bring::<W>(job, &panels[p], chunk, p, room)
            };
        }
        // A panel that is not there is computed along.
        if there == 1 {
            w[1] = w[0];
        }
        let stream = W::PACKED && rows.groups() == 1;
        let mut next = Next::of::<W>(job, next_chunk, next, rows.groups());
        for group in 0..rows.groups() {
            let index = if chunk.last && chunk.start == 0 {
                0
            } else {
                pair * rows.groups() + group
            };
            let work = Work {
                x: room.x.as_ptr().add(rows.lines_of(group, chunk)),
                w,
                steps: chunk.len(),
                sums: &raw mut room.sums[index],
                first: chunk.start == 0,
            };
            macro_rules! multiply {
                ($panels:literal, $work:expr, $next:expr) => {
                    match rows.tiles(group) {
                        1 => tiles::<1, $panels>($work, $next),
                        2 => tiles::<2, $panels>($work, $next),
                        _ => tiles::<3, $panels>($work, $next),
                    }
                };
            }
            if stream {
                // One after the other, as memory has them.
                for (p, &w) in w[..there].iter().enumerate() {
                    let work = Work {
                        w: [w; PANELS],
                        sums: work.sums.cast::<[Sum; LINES]>().add(p).cast(),
                        ..work
                    };
                    multiply!(1, &work, &mut Next::ahead(job, chunk, w));
                }
            } else {
                multiply!(2, &work, &mut next);
            }
            if chunk.last {
                let sums = &room.sums[index];
                for r in 0..rows.of_group(group) {
                    for p in 0..there {
                        let [first, second, third] = [0, 1, 2]
                            .map(|part| _mm512_loadu_ps(sums[p][r * PARTS + part].as_ptr()));
                        let value = finish(first, second, third);
                        let row = rows.first + group * GROUP + r;
                        drive::store::<Avx512>(job, &panels[p], output + LANES * p, row, value);
                    }
                }
            }
        }
    }
}

/// The sum of the parts' sums. Where the first one is no number, it is the result: the others are made of what an infinity's parts
/// are, or of an infinite weight and zeros.
///
/// # Safety
///
/// As for [`Simd`](super::super::simd::Simd).
#[inline(always)]
unsafe fn finish(first: __m512, second: __m512, third: __m512) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe {
        const NO_NUMBER: i32 = 0x01 | 0x08 | 0x10 | 0x80;
        let sum = _mm512_add_ps(first, _mm512_add_ps(second, third));
        _mm512_mask_mov_ps(sum, _mm512_fpclass_ps_mask::<NO_NUMBER>(first), first)
    }
}

/// Brings a panel's rows into the layout of a packed one.
///
/// # Safety
///
/// As for [`run`]; the chunk fits into the room.
#[inline(always)]
unsafe fn bring<W: Place>(
    job: &Job,
    panel: &Panel,
    chunk: &Chunk,
    p: usize,
    room: &mut Room,
) -> *const u8 {
    // SAFETY: the caller's promise; the panel has rows.
    unsafe {
        let mut stage = MaybeUninit::<Stage>::uninit();
        let to = room.w.as_mut_ptr().add(p * BROUGHT_STEPS);
        for step in chunk.start..chunk.end {
            let count = (job.k - step * STEP).min(STEP);
            let from = W::block::<Weights, 1>(panel, step, count, &mut stage);
            from.ask::<Avx512, Weights>(0, 1);
            let words = from.words16::<Avx512, Weights>(0);
            let to = to.add(step - chunk.start).cast::<__m512i>();
            for (i, word) in words.into_iter().enumerate() {
                _mm512_store_si512(to.add(i), word);
            }
        }
        to.cast()
    }
}

/// A group of rows and a pair of panels.
struct Work {
    /// The rows' lines, step after step.
    x: *const Line,
    w: [*const u8; PANELS],
    steps: usize,
    sums: *mut Sums,
    /// Whether the sums begin here.
    first: bool,
}

/// The sums of a group's rows, in `A` tiles of activations, with `P` panels.
///
/// # Safety
///
/// As for [`run`]; tiles are configured, and the work's pointers valid for its steps.
#[inline(always)]
unsafe fn tiles<const A: usize, const P: usize>(work: &Work, next: &mut Next) {
    // SAFETY: the caller's promise.
    unsafe {
        let sums = work.sums.cast::<u8>();
        let other = sums.add(size_of::<Sums>() / PANELS);
        macro_rules! each_sum {
            ($how:ident) => {
                tile!($how 0, sums);
                if A > 1 {
                    tile!($how 1, sums.add(TILE));
                }
                if A > 2 {
                    tile!($how 2, sums.add(2 * TILE));
                }
                if P > 1 {
                    tile!($how 3, other);
                }
                if P > 1 && A > 1 {
                    tile!($how 4, other.add(TILE));
                }
                if P > 1 && A > 2 {
                    tile!($how 5, other.add(2 * TILE));
                }
            };
        }
        if work.first {
            tile!(zero 0);
            tile!(zero 1);
            tile!(zero 2);
            tile!(zero 3);
            tile!(zero 4);
            tile!(zero 5);
        } else {
            each_sum!(load);
        }
        for step in 0..work.steps {
            let x = work.x.add(step * LANES * A).cast::<u8>();
            let w = work.w.map(|w| w.add(step * TILE));
            next.ask();
            tile!(load 7, w[0]);
            tile!(load 6, x);
            tile!(bf16 0, 6, 7);
            if A > 1 {
                tile!(load 6, x.add(TILE));
                tile!(bf16 1, 6, 7);
            }
            if A > 2 {
                tile!(load 6, x.add(2 * TILE));
                tile!(bf16 2, 6, 7);
            }
            if P == 1 {
                continue;
            }
            // The last tile of activations is there.
            tile!(load 7, w[1]);
            if A > 2 {
                tile!(bf16 5, 6, 7);
                tile!(load 6, x.add(TILE));
            }
            if A > 1 {
                tile!(bf16 4, 6, 7);
                tile!(load 6, x);
            }
            tile!(bf16 3, 6, 7);
        }
        each_sum!(store);
    }
}

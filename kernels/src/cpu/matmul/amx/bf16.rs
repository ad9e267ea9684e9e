//! Weights in BF16 and E4M3 by AMX: tiles of sixteen rows by 64 bytes, and one instruction that multiplies two of them.
//!
//! The instruction multiplies BF16 with BF16. An activation is therefore cut into three BF16 numbers whose sum it is ([`cut`]):
//! its first eight significant bits, the next eight, the last eight. What all of them make with the weights, of which each is one, is
//! a single sum, in the order that [`matmul`](super::super) documents.
//!
//! Weights are the second operand, whose layout (pairs of `k`, sixteen outputs side by side) is that of a packed panel in BF16.
//! Other ones are brought into it on the way.

mod cut;
mod next;

use std::arch::x86_64::*;
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;

use super::super::avx512::Avx512;
use super::super::drive::{self, Job};
use super::super::kept::Time;
use super::super::place::{Panel, Place, Stage};
use super::{Config, LINE, Line, TILE, configure, height, release, tile, zeros};
use crate::cpu::lanes::LANES;
pub(in super::super) use cut::OfBF16;
use cut::{PARTS, activations};
use next::Next;

/// Elements of `k` that one instruction takes in.
const STEP: usize = LINE / 2;

/// Rows of activations of a tile.
const GROUP: usize = LANES;

/// Panels that are multiplied together.
const PANELS: usize = 4;

/// Rows that go through the weights together at most: of a model's step.
const ROWS: usize = 128;
const MOST_GROUPS: usize = ROWS.div_ceil(GROUP);

/// Lines of activations for which there is room, and how many are read again and again at a time: half of a second-level cache.
const ROOM_LINES: usize = 3 << 15;
const CHUNK_LINES: usize = 1 << 14;

/// Steps of weights that are brought into the layout of a panel at a time, in whole blocks.
const BROUGHT_STEPS: usize = 192;

/// Sums of panels and groups that rest between chunks.
const MOST_SUMS: usize = 8 * MOST_GROUPS;

/// Sums of a group of rows with [`PANELS`] panels.
type Sums = [[Sum; GROUP]; PANELS];
type Sum = [f32; LANES];

/// What a thread keeps while it multiplies.
#[repr(C, align(64))]
struct Room {
    /// When the activations were brought.
    brought: Time,
    /// Whether an output was no number.
    none: bool,
    /// Activations in parts: of each group the steps, of each step the parts, of each part a line of each row.
    x: [Line; ROOM_LINES],
    /// Weights brought into the layout of a panel.
    w: [[Line; LANES]; PANELS * BROUGHT_STEPS],
    sums: [Sums; MOST_SUMS],
}

thread_local! {
    // On the heap, and only in threads that multiply so: of a thread's own memory it would be taken from every thread's stack.
    static ROOM: UnsafeCell<Option<Box<Room>>> = const { UnsafeCell::new(None) };
}

/// Rows of `k` that are multiplied at a time, and whether all of them have room at once.
pub(in super::super) fn rows(k: usize) -> (usize, bool) {
    let fit = ROOM_LINES / k.div_ceil(STEP).max(1) / PARTS / LANES * LANES;
    (fit.clamp(LANES, ROWS), fit > 0)
}

/// Does the job.
///
/// # Safety
///
/// As for [`drive::run`], of weights in `F` and activations in `f32`; the processor has AVX-512 with VBMI and AMX for BF16, and
/// this process may use its tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx2,fma,f16c")]
pub(in super::super) unsafe fn run<F: OfBF16, W: Place>(job: &Job) {
    // SAFETY: the caller's promise. The room is this thread's, and nothing below calls this function again; all of it is numbers.
    unsafe {
        let room = (*ROOM.with(UnsafeCell::get)).get_or_insert_with(|| zeros());
        let (most, fit) = rows(job.k);
        let height = height(job.rows, most / LANES);
        for first in (0..job.rows).step_by(height) {
            let rows = Rows {
                first,
                count: (job.rows - first).min(height),
                steps: job.k.div_ceil(STEP),
                fit,
            };
            configure(&CONFIGS[rows.height() - 1]);
            room.none = false;
            all::<F, W, true>(job, &rows, room);
            if room.none {
                all::<F, W, false>(job, &rows, room);
            }
        }
        release();
    }
}

/// Tiles of activations and of sums have as many rows as there are, if that is no more than one tile has. Else all are whole: rows
/// that do not exist are multiplied along, and read by nobody.
static CONFIGS: [Config; GROUP] = {
    const WHOLE: Config = Config::new([[LANES as u8, LINE as u8]; 8]);
    let mut configs = [WHOLE; GROUP];
    let mut rows = 1;
    while rows < GROUP {
        let mut tiles = [[rows as u8, LINE as u8]; 8];
        tiles[7] = [LANES as u8, LINE as u8];
        configs[rows - 1] = Config::new(tiles);
        rows += 1;
    }
    configs
};

/// Multiplies rows with all panels: with all parts of activations, or with the first ones alone, for the outputs that are no numbers.
///
/// # Safety
///
/// As for [`run`].
#[inline(always)]
unsafe fn all<F: OfBF16, W: Place, const ALL: bool>(job: &Job, rows: &Rows, room: &mut Room) {
    // SAFETY: the caller's promise; the rows have room, or those of a chunk have, and so do the sums of the outputs that rest.
    unsafe {
        if rows.fit {
            let x = job.x.add(rows.first * job.x_stride);
            if (*job.kept).renew(&mut room.brought, (x, job.x_stride), rows.count, job.k) {
                for group in 0..rows.groups() {
                    cut_group(job, rows, group, &rows.whole(), room);
                }
            }
            if rows.groups() == 1 {
                return stream::<F, W, ALL>(job, rows, room);
            }
        }
        let chunks = Chunks::of::<F, W>(rows);
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
                        cut_group(job, rows, group, &chunk, room);
                    }
                }
                for (number, output) in (first..end).step_by(PANELS * LANES).enumerate() {
                    let after = output + PANELS * LANES;
                    let (after, of) = if after < end {
                        (after, &chunk)
                    } else if chunk.last {
                        (end, &chunks.chunk(0))
                    } else {
                        (first, &chunks.chunk(c + 1))
                    };
                    let next = Next::of::<F, W>(job, of, after, rows.groups());
                    panels::<F, W, ALL>(job, rows, &chunk, (number, output), next, room);
                }
            }
            first = end;
        }
    }
}

/// Whether weights lie as the instruction wants them.
const fn are_tiles<F: OfBF16, W: Place>() -> bool {
    W::PACKED && F::AS_STORED
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

    /// Rows of a tile.
    fn height(&self) -> usize {
        self.count.min(GROUP)
    }

    /// Lines of a group in a step.
    fn lines(&self) -> usize {
        self.height() * PARTS
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
        (group * steps + first) * self.lines()
    }
}

/// Steps along `k`, in chunks whose activations stay in a cache.
struct Chunks {
    steps: usize,
    most: usize,
    count: usize,
}

impl Chunks {
    fn of<F: OfBF16, W: Place>(rows: &Rows) -> Chunks {
        // Whole pages of weights.
        let lines = rows.groups() * rows.lines();
        let most = (CHUNK_LINES / lines / LANES * LANES).max(LANES);
        let most = if are_tiles::<F, W>() {
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
unsafe fn cut_group(job: &Job, rows: &Rows, group: usize, chunk: &Chunk, room: &mut Room) {
    // SAFETY: the caller's promise; lines past the activations' end become zeros.
    unsafe {
        let lines = room.x.as_mut_ptr().add(rows.lines_of(group, chunk));
        for r in 0..rows.of_group(group) {
            let row = rows.first + group * GROUP + r;
            let x = job.x.add(row * job.x_stride).cast::<f32>();
            let mut to = lines.add(r);
            for step in chunk.start..chunk.end {
                let parts = activations(x.add(step * STEP), job.k - step * STEP);
                for (part, line) in parts.into_iter().enumerate() {
                    _mm512_store_si512(to.add(part * rows.height()).cast(), line);
                }
                to = to.wrapping_add(rows.lines());
            }
        }
    }
}

/// Multiplies all rows with the panels of output `output` and after it.
///
/// # Safety
///
/// As for [`run`]; the room has the chunk's activations, and the sums of panels `number` if the chunk is not the first.
#[inline(always)]
unsafe fn panels<F: OfBF16, W: Place, const ALL: bool>(
    job: &Job,
    rows: &Rows,
    chunk: &Chunk,
    (number, output): (usize, usize),
    mut next: Next,
    room: &mut Room,
) {
    // SAFETY: the caller's promise; panels stay inside the job's.
    unsafe {
        let panels = [0, 1, 2, 3].map(|p| Panel::of(job.w, job.stride, &job.n, output + LANES * p));
        let there = panels.iter().filter(|panel| panel.rows > 0).count();
        let mut w = [panels[0].w; PANELS];
        for p in 0..there {
            w[p] = if are_tiles::<F, W>() {
                panels[p].w.add(chunk.start * TILE)
            } else {
                let to = room.w.as_mut_ptr().add(p * BROUGHT_STEPS);
                bring::<F, W>(job, &panels[p], chunk, to.cast())
            };
        }
        for group in 0..rows.groups() {
            let index = if chunk.last && chunk.start == 0 {
                0
            } else {
                number * rows.groups() + group
            };
            let work = Work {
                x: room.x.as_ptr().add(rows.lines_of(group, chunk)),
                height: rows.height(),
                w,
                steps: chunk.len(),
                sums: &raw mut room.sums[index],
                first: chunk.start == 0,
            };
            match there {
                1 => tiles::<F, 1, ALL>(&work, &mut next),
                2 => tiles::<F, 2, ALL>(&work, &mut next),
                3 => tiles::<F, 3, ALL>(&work, &mut next),
                _ => tiles::<F, 4, ALL>(&work, &mut next),
            }
            if chunk.last {
                for (p, panel) in panels[..there].iter().enumerate() {
                    let to = (output + LANES * p, group);
                    store::<ALL>(job, rows, panel, to, &room.sums[index][p], &mut room.none);
                }
            }
        }
    }
}

/// Multiplies a single group with one panel after the other, as memory has them.
///
/// # Safety
///
/// As for [`run`]; the room has all of the group's activations.
#[inline(always)]
unsafe fn stream<F: OfBF16, W: Place, const ALL: bool>(job: &Job, rows: &Rows, room: &mut Room) {
    // SAFETY: the caller's promise; panels stay inside the job's.
    unsafe {
        let x = room.x.as_ptr();
        for output in job.n.clone().step_by(LANES) {
            let panel = Panel::of(job.w, job.stride, &job.n, output).with_pages(job.pages);
            tile!(zero 0);
            if are_tiles::<F, W>() {
                let mut next = Next::ahead(job, rows.steps, panel.w);
                for step in 0..rows.steps {
                    load_step::<ALL>(x.add(step * rows.lines()), rows.height());
                    next.ask();
                    multiply!(ALL, 0, panel.w.add(step * TILE));
                }
            } else {
                // A block is brought while the one before it is multiplied.
                const SLOTS: usize = 4;
                let steps = F::LEN / STEP;
                let slots = room.w.as_mut_ptr();
                let slot = |block: usize| slots.add(block % SLOTS * steps).cast::<Line>();
                let blocks = job.k.div_ceil(F::LEN);
                let mut stage = MaybeUninit::<Stage>::uninit();
                for block in 0..=blocks {
                    if block < blocks {
                        let count = (job.k - block * F::LEN).min(F::LEN);
                        let from = W::block::<F, 1>(&panel, block, count, &mut stage);
                        from.ask::<Avx512, F>(0, 1);
                        cut::bring::<F, W>(from, slot(block));
                    }
                    let Some(before) = block.checked_sub(1) else {
                        continue;
                    };
                    for s in 0..steps.min(rows.steps - before * steps) {
                        let step = before * steps + s;
                        load_step::<ALL>(x.add(step * rows.lines()), rows.height());
                        let w = slot(before).add(s * LANES).cast::<u8>();
                        multiply!(ALL, 0, w);
                    }
                }
            }
            let sums = room.sums[0][0].as_mut_ptr();
            tile!(store 0, sums);
            let sums = &room.sums[0][0];
            store::<ALL>(job, rows, &panel, (output, 0), sums, &mut room.none);
        }
    }
}

/// Stores a group's sums with a panel. Sums of the first parts alone are for outputs that are no numbers: see
/// [`matmul`](super::super).
///
/// # Safety
///
/// As for [`run`]; they are sums of that panel.
#[inline(always)]
unsafe fn store<const ALL: bool>(
    job: &Job,
    rows: &Rows,
    panel: &Panel,
    (output, group): (usize, usize),
    sums: &[Sum; GROUP],
    none: &mut bool,
) {
    // SAFETY: the caller's promise. What there is of an output was written by this thread.
    unsafe {
        for (r, sum) in sums[..rows.of_group(group)].iter().enumerate() {
            let row = rows.first + group * GROUP + r;
            let mut value = _mm512_loadu_ps(sum.as_ptr());
            let there = ((1_u32 << panel.rows) - 1) as u16;
            if ALL {
                *none |= _mm512_mask_cmp_ps_mask::<_CMP_UNORD_Q>(there, value, value) != 0;
            } else {
                let out = job.out.wrapping_add(row * job.out_stride + output);
                let stored = _mm512_maskz_loadu_ps(there, out);
                let is_none = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(stored, stored);
                value = _mm512_mask_mov_ps(stored, is_none, value);
            }
            drive::store::<Avx512>(job, panel, output, row, value);
        }
    }
}

/// Brings a panel's rows into the layout of a packed one in BF16, at `to`.
///
/// # Safety
///
/// As for [`run`]; there is room for the chunk, in whole blocks.
#[inline(always)]
unsafe fn bring<F: OfBF16, W: Place>(
    job: &Job,
    panel: &Panel,
    chunk: &Chunk,
    to: *mut Line,
) -> *const u8 {
    // SAFETY: the caller's promise; the panel has rows. Chunks begin with a block.
    unsafe {
        let mut stage = MaybeUninit::<Stage>::uninit();
        let mut line = to;
        for block in chunk.start * STEP / F::LEN..(chunk.end * STEP).div_ceil(F::LEN) {
            let count = (job.k - block * F::LEN).min(F::LEN);
            let from = W::block::<F, 0>(panel, block, count, &mut stage);
            if !W::PACKED {
                from.ask::<Avx512, F>(0, 1);
            }
            cut::bring::<F, W>(from, line);
            line = line.wrapping_add(F::LEN / STEP * LANES);
        }
        to.cast()
    }
}

/// Loads the parts of a step's activations, in so many rows each, or the first one.
///
/// # Safety
///
/// As for [`tiles`].
#[inline(always)]
unsafe fn load_step<const ALL: bool>(x: *const Line, height: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        tile!(load 4, x);
        if ALL {
            tile!(load 5, x.add(height));
            tile!(load 6, x.add(2 * height));
        }
    }
}

/// Adds the products of a step's activations and a panel's weights at an address to a sum: of all parts, or of the first ones.
macro_rules! multiply {
    ($all:expr, $sum:literal, $w:expr) => {
        tile!(load 7, $w);
        tile!(bf16 $sum, 4, 7);
        if $all {
            tile!(bf16 $sum, 5, 7);
            tile!(bf16 $sum, 6, 7);
        }
    };
}
use multiply;

/// A group of rows and some panels.
struct Work {
    /// The rows' lines, step after step, and how many rows a tile has.
    x: *const Line,
    height: usize,
    /// Tiles, step after step.
    w: [*const u8; PANELS],
    steps: usize,
    sums: *mut Sums,
    /// Whether the sums begin here.
    first: bool,
}

/// The sums of a group's rows with `P` panels, of all parts of activations or of the first ones.
///
/// # Safety
///
/// As for [`run`]; tiles are configured, and the work's pointers valid for its steps.
#[inline(always)]
unsafe fn tiles<F: OfBF16, const P: usize, const ALL: bool>(work: &Work, next: &mut Next) {
    // SAFETY: the caller's promise.
    unsafe {
        let sums = work.sums.cast::<u8>();
        macro_rules! each_sum {
            ($how:ident) => {
                tile!($how 0, sums);
                if P > 1 {
                    tile!($how 1, sums.add(TILE));
                }
                if P > 2 {
                    tile!($how 2, sums.add(2 * TILE));
                }
                if P > 3 {
                    tile!($how 3, sums.add(3 * TILE));
                }
            };
        }
        if work.first {
            tile!(zero 0);
            tile!(zero 1);
            tile!(zero 2);
            tile!(zero 3);
        } else {
            each_sum!(load);
        }
        for step in 0..work.steps {
            load_step::<ALL>(work.x.add(step * PARTS * work.height), work.height);
            macro_rules! panel {
                ($sum:literal) => {
                    if $sum < P {
                        multiply!(ALL, $sum, work.w[$sum].add(step * TILE));
                    }
                };
            }
            panel!(0);
            next.ask();
            panel!(1);
            panel!(2);
            panel!(3);
        }
        each_sum!(store);
    }
}

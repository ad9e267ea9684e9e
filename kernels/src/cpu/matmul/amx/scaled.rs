//! The block dtypes of 256 weights by AMX. Their integer scales are multiplied into the weights, which makes two bytes of each, so
//! that tiles sum whole blocks and not each sub-block by itself. All of it is exact: the bits are every path's.

#![expect(
    clippy::needless_range_loop,
    reason = "an index runs over several arrays at once, and its order is the point"
)]

use std::arch::x86_64::*;
use std::cell::UnsafeCell;
use std::mem::{MaybeUninit, align_of, size_of};
use std::ops::Range;

use super::super::avx512::Avx512;
use super::super::block256::{BESIDE, Mixed, MixedHead};
use super::super::drive::{self, Job, NextChunk, SCRATCH};
use super::super::format::Format;
use super::super::kept::Time;
use super::super::on_avx512;
use super::super::place::{Place, Stage};
use super::super::q6_k::{Six, SixHead};
use super::{Config, LINE, Line, configure, height, release, tile, zeros};
use crate::cpu::lanes::LANES;

/// Weights of a block, those that are multiplied by an instruction, and instructions of a block.
const LEN: usize = 256;
const STEP: usize = LINE;
const STEPS: usize = LEN / STEP;

/// Rows of activations of a tile, and tiles whose products are made side by side: as many as there are registers for.
const GROUP: usize = LANES;
const PAIR: usize = 2;

/// Lines of activations for which there is room, in the second-level cache.
const ROOM_LINES: usize = 1 << 14;

/// Rows below which what is made of a block's weights would be used too seldom: measured.
const LEAST: usize = 32;

/// Rows that are multiplied at a time at most.
const ROWS: usize = 288;

/// Panels of which a block is unpacked at a time: activations that are in the first-level cache are multiplied with each, and
/// with what is read meanwhile it has no room for more.
const PANELS: usize = 2;

static CONFIG: Config = Config::new([[LANES as u8, LINE as u8]; 8]);

/// The weights of a block of sixteen outputs, times their scales: `high · 2^SHIFT + low`. Line `i` has weights `4 i` to
/// `4 i + 3` of each output.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Parts {
    low: [[Line; LANES]; STEPS],
    high: [[Line; LANES]; STEPS],
}

/// Sums of sixteen rows with sixteen outputs.
#[repr(C, align(64))]
struct Sums([[i32; LANES]; GROUP]);

/// What a row's outputs of a panel have come to.
#[repr(C, align(64))]
struct Outputs([f32; LANES]);

/// Those of low and high parts, of each of the rows' tiles.
type Products = [[Sums; 2]; PAIR];

/// A block dtype that has integer scales.
///
/// # Safety
///
/// As for [`Format`]; the block is unpacked, and the processor has AVX-512.
pub(in super::super) trait Scaled: Format {
    /// What of an unpacked block is not weights.
    type Head: Copy;
    /// The low part's bits.
    const SHIFT: u32;
    /// Whether parts are bytes without a sign.
    const UNSIGNED: bool;

    unsafe fn head(block: *const Self::Block<Avx512>) -> Self::Head;

    /// Both parts of the weights; writes 64 lines each.
    unsafe fn split(block: *const Self::Block<Avx512>, low: *mut __m512i, high: *mut __m512i);

    /// `acc` with what the block adds, of which `sum` is `Σ_j scale_j · dot_j`; at `beside` is what the row's record has from
    /// [`BESIDE`] on.
    unsafe fn finish(head: &Self::Head, sum: __m512i, beside: *const u8, acc: __m512) -> __m512;
}

/// Of a scale of six bits: what either half makes of a weight of five fits into a byte.
const HALF: u32 = 3;

/// Of a product of thirteen bits and a sign.
const LOWER: u32 = 6;

impl<const FIVE: bool> Scaled for Mixed<FIVE> {
    type Head = MixedHead<Avx512>;
    const SHIFT: u32 = HALF;
    const UNSIGNED: bool = true;

    #[inline(always)]
    unsafe fn head(block: *const Self::Block<Avx512>) -> Self::Head {
        // SAFETY: the caller's promise.
        unsafe { (*block).head }
    }

    #[inline(always)]
    unsafe fn split(block: *const Self::Block<Avx512>, low: *mut __m512i, high: *mut __m512i) {
        // SAFETY: the caller's promise. A product of a pair of bytes by one of at most seven: nothing is carried from the
        // lower to the upper one.
        unsafe {
            for j in 0..8 {
                let scale = twice((*block).head.scales[j]);
                let upper = _mm512_srli_epi16::<HALF>(scale);
                let lower = _mm512_and_si512(scale, _mm512_set1_epi16((1 << HALF) - 1));
                for g in 0..8 {
                    let q = (*block).q[j][g];
                    low.add(8 * j + g).write(_mm512_mullo_epi16(q, lower));
                    high.add(8 * j + g).write(_mm512_mullo_epi16(q, upper));
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn finish(head: &Self::Head, sum: __m512i, beside: *const u8, acc: __m512) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { Self::finish::<Avx512>(head, sum, beside, acc) }
    }
}

impl Scaled for Six {
    type Head = SixHead<Avx512>;
    const SHIFT: u32 = LOWER;
    const UNSIGNED: bool = false;

    #[inline(always)]
    unsafe fn head(block: *const Self::Block<Avx512>) -> Self::Head {
        // SAFETY: the caller's promise.
        unsafe { (*block).head }
    }

    #[inline(always)]
    unsafe fn split(block: *const Self::Block<Avx512>, low: *mut __m512i, high: *mut __m512i) {
        // SAFETY: the caller's promise.
        unsafe {
            let mask = _mm512_set1_epi8((1 << LOWER) - 1);
            let zero = _mm512_set1_epi8(32);
            const EVEN: __mmask64 = 0x5555_5555_5555_5555;
            for j in 0..16 {
                let scale = twice((*block).head.scales[j]);
                for g in 0..4 {
                    let q = _mm512_sub_epi8((*block).q[j][g], zero);
                    let even = _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(q));
                    let even = _mm512_mullo_epi16(even, scale);
                    let odd = _mm512_mullo_epi16(_mm512_srai_epi16::<8>(q), scale);
                    let lower = _mm512_mask_blend_epi8(EVEN, _mm512_slli_epi16::<8>(odd), even);
                    let upper = _mm512_mask_blend_epi8(
                        EVEN,
                        _mm512_slli_epi16::<{ 8 - LOWER }>(odd),
                        _mm512_srli_epi16::<LOWER>(even),
                    );
                    low.add(4 * j + g).write(_mm512_and_si512(lower, mask));
                    high.add(4 * j + g).write(upper);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn finish(head: &Self::Head, sum: __m512i, beside: *const u8, acc: __m512) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { Self::finish::<Avx512>(head, sum, beside, acc) }
    }
}

/// The lower half of each word in both of its halves.
///
/// # Safety
///
/// The processor has AVX-512.
#[inline(always)]
unsafe fn twice(words: __m512i) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        _mm512_mullo_epi32(
            _mm512_and_si512(words, _mm512_set1_epi32(0xffff)),
            _mm512_set1_epi32(0x1_0001),
        )
    }
}

/// What a thread keeps while it multiplies, beside what it keeps for every dtype.
#[repr(C, align(64))]
struct Room {
    /// When the activations were brought.
    brought: Time,
    /// Activations: of each group the steps, of each step the rows.
    x: [Line; ROOM_LINES],
    /// What else of their records is read, close together: of each group the blocks, of each block the rows.
    beside: [Beside; ROOM_LINES * LINE / LEN],
    parts: [Parts; PANELS],
    /// Those of which something is made, and the next ones.
    products: [Products; 2],
    sums: [[Outputs; PANELS]; ROWS],
}

/// What follows the activations in a record.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
struct Beside([u8; 32]);

thread_local! {
    // On the heap, and only in threads that multiply so: of a thread's own memory it would be taken from every thread's stack.
    static ROOM: UnsafeCell<Option<Box<Room>>> = const { UnsafeCell::new(None) };
}

/// A block as it is unpacked, and what stays of it.
#[repr(C)]
struct Unpacked<F: Scaled> {
    block: F::Block<Avx512>,
    heads: [F::Head; PANELS],
}

/// Groups of rows of `k` activations for which there is room.
fn groups(k: usize) -> usize {
    let lines = k.div_ceil(STEP).max(1).saturating_mul(GROUP);
    (ROOM_LINES / lines).min(ROWS / GROUP)
}

/// Rows of `k` that are multiplied at a time; none where tiles are not used.
pub(in super::super) fn rows(k: usize) -> usize {
    let rows = groups(k) * GROUP;
    if rows < LEAST { 0 } else { rows }
}

/// Does the job.
///
/// # Safety
///
/// As for [`drive::run`]; the processor has AVX-512 and AMX for bytes, and this process may use its tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(in super::super) unsafe fn run<F: Scaled, W: Place>(job: &Job) {
    let groups = groups(job.k);
    let height = height(job.rows, groups);
    if height.min(job.rows) < LEAST || groups == 0 {
        // SAFETY: the caller's promise.
        return unsafe { on_avx512::<F, W>(job) };
    }
    // SAFETY: the caller's promise. The room is this thread's, and nothing below calls this function again; all of it is
    // numbers. So many rows have room.
    unsafe {
        let room = (*ROOM.with(UnsafeCell::get)).get_or_insert_with(|| zeros());
        configure(&CONFIG);
        for start in (0..job.rows).step_by(height) {
            let rows = start..job.rows.min(start + height);
            let x = job.x.add(start * job.x_stride);
            if (*job.kept).renew(&mut room.brought, (x, job.x_stride), rows.len(), job.k) {
                bring::<F>(job, &rows, room);
            }
            for first in job.n.clone().step_by(PANELS * LANES) {
                panels::<F, W>(job, &rows, first, room);
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
unsafe fn bring<F: Scaled>(job: &Job, rows: &Range<usize>, room: &mut Room) {
    let steps = job.k / STEP;
    for (group, first) in rows.clone().step_by(GROUP).enumerate() {
        // SAFETY: the caller's promise; a record has the bytes.
        unsafe {
            let lines = room.x.as_mut_ptr().add(group * steps * GROUP);
            let beside = room
                .beside
                .as_mut_ptr()
                .add(group * (steps / STEPS) * GROUP);
            for (r, row) in (first..rows.end.min(first + GROUP)).enumerate() {
                let x = job.x.add(row * job.x_stride);
                for block in 0..job.k / LEN {
                    let x = x.add(block * F::RECORD);
                    for step in 0..STEPS {
                        let values = _mm512_loadu_si512(x.add(step * STEP).cast());
                        let to = lines.add((block * STEPS + step) * GROUP + r);
                        _mm512_store_si512(to.cast(), values);
                    }
                    beside
                        .add(block * GROUP + r)
                        .write(x.add(BESIDE).cast::<Beside>().read_unaligned());
                }
            }
        }
    }
}

/// Multiplies rows with the panels of output `first` and after it.
///
/// # Safety
///
/// As for [`run`]; the room has the rows' activations.
#[inline(always)]
unsafe fn panels<F: Scaled, W: Place>(
    job: &Job,
    rows: &Range<usize>,
    first: usize,
    room: &mut Room,
) {
    const {
        assert!(size_of::<Unpacked<F>>() <= SCRATCH);
        assert!(align_of::<Unpacked<F>>() <= align_of::<drive::Room>());
    }
    // SAFETY: the caller's promise; blocks stay inside the panels. Nobody else uses the thread's rooms, which have place for a
    // block of each panel and the sums of whole groups of rows; both are written before they are read.
    unsafe {
        let panels = drive::panels_of::<PANELS>(job, first);
        let mut stage = MaybeUninit::<Stage>::uninit();
        let unpacked = (&raw mut (*job.room).blocks).cast::<Unpacked<F>>();
        let block = &raw mut (*unpacked).block;
        let heads = (&raw mut (*unpacked).heads).cast::<F::Head>();
        let sums = (&raw mut room.sums).cast::<[__m512; PANELS]>();
        let (groups, blocks) = (rows.len().div_ceil(GROUP), job.k / LEN);
        for row in 0..groups * GROUP {
            sums.add(row).write([_mm512_setzero_ps(); PANELS]);
        }
        let x = (&raw const room.x).cast::<Line>();
        let beside = (&raw const room.beside).cast::<Beside>();
        for b in 0..blocks {
            for p in 0..PANELS {
                let from = W::block::<F, 0>(&panels[p], b, LEN, &mut stage);
                F::unpack::<Avx512, W>(from, block);
                let parts = &raw mut room.parts[p];
                let (low, high) = (&raw mut (*parts).low, &raw mut (*parts).high);
                F::split(block, low.cast(), high.cast());
                heads.add(p).write(F::head(block));
            }
            let steps = groups.div_ceil(PAIR) * PANELS;
            let mut next = NextChunk::<PANELS>::of::<W, F>(job, &panels, first, b + 1, 1, steps);
            // Group after group they lie as far apart as all blocks of one are long.
            let (apart, x) = (blocks * STEPS * GROUP, x.add(b * STEPS * GROUP));
            let (beside_apart, beside) = (blocks * GROUP, beside.add(b * GROUP));
            // While something is made of some products, the next ones are made.
            for step in 0..=steps {
                let (group, p) = (step / PANELS * PAIR, step % PANELS);
                let multiply = Multiply {
                    x: x.wrapping_add(group * apart),
                    apart,
                    parts: &raw const room.parts[p],
                    to: &raw mut room.products[step % 2],
                    groups: groups.saturating_sub(group),
                };
                let done = step.saturating_sub(1);
                let (group, p) = (done / PANELS * PAIR, done % PANELS);
                let there = if step == 0 { 0 } else { groups - group };
                let products = (&raw const room.products[done % 2]).cast::<[Sums; 2]>();
                let beside = beside.add(group * beside_apart);
                let sums = sums.add(group * GROUP).cast::<__m512>();
                next.ask::<Avx512>();
                multiply.begin();
                for part in 0..STEPS {
                    multiply.step::<F>(part);
                    let rows = part * (GROUP / STEPS)..(part + 1) * (GROUP / STEPS);
                    for g in 0..there.min(PAIR) {
                        let beside = beside.add(g * beside_apart);
                        let sums = sums.add(g * GROUP * PANELS + p);
                        take::<F>(
                            &*products.add(g),
                            &*heads.add(p),
                            beside,
                            sums,
                            rows.clone(),
                        );
                    }
                }
                multiply.end();
            }
        }
        for row in rows.clone() {
            for p in 0..PANELS {
                let sum = sums.add(row - rows.start).cast::<__m512>().add(p).read();
                drive::store::<Avx512>(job, &panels[p], first + LANES * p, row, sum);
            }
        }
    }
}

/// Some rows, and a panel's block to be multiplied with them.
struct Multiply {
    /// The first group's activations, and lines to the next one's.
    x: *const Line,
    apart: usize,
    parts: *const Parts,
    to: *mut Products,
    /// Groups that are left: two are multiplied, one, or none.
    groups: usize,
}

impl Multiply {
    /// # Safety
    ///
    /// As for [`run`].
    #[inline(always)]
    unsafe fn begin(&self) {
        // SAFETY: the caller's promise.
        unsafe {
            tile!(zero 0);
            tile!(zero 1);
            tile!(zero 2);
            tile!(zero 3);
        }
    }

    /// One of [`STEPS`].
    ///
    /// # Safety
    ///
    /// As for [`run`]; all lines are there.
    #[inline(always)]
    unsafe fn step<F: Scaled>(&self, step: usize) {
        macro_rules! times {
            ($c:literal, $x:literal, $w:literal) => {
                if F::UNSIGNED {
                    tile!(uint8 $c, $x, $w);
                } else {
                    tile!(int8 $c, $x, $w);
                }
            };
        }
        if self.groups == 0 {
            return;
        }
        // SAFETY: the caller's promise.
        unsafe {
            let x = self.x.add(step * GROUP);
            tile!(load 4, x);
            tile!(load 6, &raw const (*self.parts).low[step]);
            tile!(load 7, &raw const (*self.parts).high[step]);
            times!(0, 4, 6);
            times!(1, 4, 7);
            if self.groups > 1 {
                tile!(load 5, x.add(self.apart));
                times!(2, 5, 6);
                times!(3, 5, 7);
            }
        }
    }

    /// # Safety
    ///
    /// As for [`run`].
    #[inline(always)]
    unsafe fn end(&self) {
        if self.groups == 0 {
            return;
        }
        // SAFETY: the caller's promise.
        unsafe {
            tile!(store 0, &raw mut (*self.to)[0][0]);
            tile!(store 1, &raw mut (*self.to)[0][1]);
            if self.groups > 1 {
                tile!(store 2, &raw mut (*self.to)[1][0]);
                tile!(store 3, &raw mut (*self.to)[1][1]);
            }
        }
    }
}

/// Makes of some rows of a group's products what the dtype says, and adds it to their sums. Rows that are not there are
/// computed along.
///
/// # Safety
///
/// As for [`run`]; the sums of a panel lie [`PANELS`] apart.
#[inline(always)]
unsafe fn take<F: Scaled>(
    [low, high]: &[Sums; 2],
    head: &F::Head,
    beside: *const Beside,
    sums: *mut __m512,
    rows: Range<usize>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let shift = _mm_cvtsi32_si128(F::SHIFT as i32);
        for r in rows {
            let low = _mm512_load_si512((&raw const low.0[r]).cast());
            let high = _mm512_load_si512((&raw const high.0[r]).cast());
            let sum = _mm512_add_epi32(low, _mm512_sll_epi32(high, shift));
            let at = sums.add(PANELS * r);
            at.write(F::finish(head, sum, beside.add(r).cast(), at.read()));
        }
    }
}

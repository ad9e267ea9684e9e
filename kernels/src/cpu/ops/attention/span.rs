//! Attention of the queries of some rows to one key head: spans of keys, each summed by itself, and their sum.

use std::ops::Range;

use super::{
    element::Element,
    tile::{Cache, MAX_QUERIES, TILE, one_tile, seen, widen},
    vector::Vector,
};
use crate::cpu::{
    lanes::{LANES, exp, sum16},
    path::CpuPath,
    plan::Run,
};

/// Keys that are summed by themselves before their sum is added to the one before.
pub(super) const SPAN: usize = 512;

/// Rows of one sequence, and for each the query heads of one key head.
pub(super) struct Job<'a> {
    pub cache: Cache<'a>,
    /// First and last key that each row sees.
    pub rows: &'a [(usize, usize)],
    /// The queries `[rows, heads, d]` from the first head of the first row on.
    pub queries: &'a [f32],
    /// From one row of the queries to the next.
    pub stride: usize,
    /// Query heads of each row.
    pub heads: usize,
    pub scale: f32,
    /// 0: none.
    pub soft_cap: f32,
}

impl Job<'_> {
    pub fn count(&self) -> usize {
        self.rows.len() * self.heads
    }
}

/// The sums of a softmax over some keys, and of the values with its weights.
pub(super) struct Sums<'a> {
    pub highest: f32,
    pub total: f32,
    pub values: &'a mut [f32],
}

/// What exponents are taken against: no score at all, or only −∞, gives weights of 0 and not NaN.
#[inline(always)]
pub(super) fn reference(highest: f32) -> f32 {
    if highest == f32::NEG_INFINITY {
        0.0
    } else {
        highest
    }
}

impl Sums<'_> {
    /// Adds the sums of the next span.
    #[inline(always)]
    pub fn add(&mut self, highest: f32, total: f32, values: &[f32]) {
        let top = match highest > self.highest {
            true => highest,
            false => self.highest,
        };
        let (old, new) = (
            exp(self.highest - reference(top)),
            exp(highest - reference(top)),
        );
        self.highest = top;
        self.total = total.mul_add(new, self.total * old);
        for (sum, value) in self.values.iter_mut().zip(values) {
            *sum = value.mul_add(new, *sum * old);
        }
    }

    /// Makes the attention of the values.
    #[inline(always)]
    pub fn finish(&mut self) {
        let inverse = 1.0 / self.total;
        for value in self.values.iter_mut() {
            let mean = *value * inverse;
            // Processors and compilers pick among the payloads of operands.
            *value = if mean.is_nan() { f32::NAN } else { mean };
        }
    }
}

/// Memory of one part, in `f32`s.
pub(super) struct Room<'a> {
    /// `[queries, d]`
    pub queries: &'a mut [f32],
    /// `[d, TILE]`, a key per lane
    pub keys: &'a mut [f32],
    /// `[TILE, d]`
    pub values: &'a mut [f32],
    /// `[queries, TILE]`: scores, then weights
    pub scores: &'a mut [f32],
    /// `[queries, d]`: weighted values of the span
    pub sums: &'a mut [f32],
    /// `[queries, LANES]`: weights of the span
    pub totals: &'a mut [f32],
    /// `[queries, d]`: weighted values of all spans so far
    all: &'a mut [f32],
    /// Highest score of the span.
    pub highest: [f32; MAX_QUERIES],
    /// Highest score and sum of weights of all spans so far; nothing before a query's first span.
    so_far: [Option<(f32, f32)>; MAX_QUERIES],
}

impl<'a> Room<'a> {
    /// Bytes for heads of `d`.
    pub fn bytes(d: usize) -> usize {
        let d = d.next_multiple_of(LANES);
        size_of::<f32>() * (3 * MAX_QUERIES * d + 2 * TILE * d + MAX_QUERIES * (TILE + LANES))
    }

    pub fn new(memory: &'a mut [f32], d: usize) -> Self {
        let d = d.next_multiple_of(LANES);
        let (queries, rest) = memory.split_at_mut(MAX_QUERIES * d);
        let (keys, rest) = rest.split_at_mut(TILE * d);
        let (values, rest) = rest.split_at_mut(TILE * d);
        let (scores, rest) = rest.split_at_mut(MAX_QUERIES * TILE);
        let (sums, rest) = rest.split_at_mut(MAX_QUERIES * d);
        let (totals, rest) = rest.split_at_mut(MAX_QUERIES * LANES);
        let (all, _) = rest.split_at_mut(MAX_QUERIES * d);
        Self {
            queries,
            keys,
            values,
            scores,
            sums,
            totals,
            all,
            highest: [f32::NEG_INFINITY; MAX_QUERIES],
            so_far: [None; MAX_QUERIES],
        }
    }
}

/// Where the result of a job goes: memory laid out like the queries, or a record per span.
#[derive(Clone, Copy)]
pub(super) enum Out {
    /// The attention, from the first head of the first row on, rows as far apart as those of the queries.
    Attention(*mut f32),
    /// What [`Sums`] says for each span by itself: highest, total, values.
    Spans {
        /// The record of span 0 of the first head of the first row.
        start: *mut f32,
        /// Numbers from span to span.
        record: usize,
        /// Numbers from head to head.
        head: usize,
        /// Numbers from row to row.
        row: usize,
    },
}

/// Computes spans of a job: all that its rows see, in ascending order, where [`Out::Attention`] is wanted.
///
/// # Safety
///
/// What `out` leads to exists and is this thread's.
pub(super) unsafe fn attend<E: Element>(
    path: CpuPath,
    run: &Run<'_>,
    job: &Job<'_>,
    spans: Range<usize>,
    room: &mut Room<'_>,
    out: Out,
) {
    match path.vectors() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `vectors` returned the path, so the processor has its instructions; the rest is the caller's promise.
        CpuPath::Avx512Vnni => unsafe { on_avx512::<E>(run, job, spans, room, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        CpuPath::Avx2 => unsafe { on_avx2::<E>(run, job, spans, room, out) },
        // SAFETY: as above.
        _ => unsafe { body::<super::vector::Portable, E>(run, job, spans, room, out) },
    }
}

/// # Safety
///
/// As for [`attend`], and the processor has these instructions.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn on_avx512<E: Element>(
    run: &Run<'_>,
    job: &Job<'_>,
    spans: Range<usize>,
    room: &mut Room<'_>,
    out: Out,
) {
    // SAFETY: the caller's promise.
    unsafe { body::<super::x86::Avx512, E>(run, job, spans, room, out) }
}

/// # Safety
///
/// As for [`attend`], and the processor has these instructions.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn on_avx2<E: Element>(
    run: &Run<'_>,
    job: &Job<'_>,
    spans: Range<usize>,
    room: &mut Room<'_>,
    out: Out,
) {
    // SAFETY: the caller's promise.
    unsafe { body::<super::x86::Avx2, E>(run, job, spans, room, out) }
}

/// # Safety
///
/// As for [`attend`], and the processor has the instructions of `V`.
#[inline(always)]
unsafe fn body<V: Vector, E: Element>(
    run: &Run<'_>,
    job: &Job<'_>,
    spans: Range<usize>,
    room: &mut Room<'_>,
    out: Out,
) {
    let (d, heads) = (job.cache.d, job.heads);
    let wide = d.next_multiple_of(LANES);
    let count = job.count().min(MAX_QUERIES);
    for q in 0..count {
        let from = q / heads * job.stride + q % heads * d;
        room.queries[q * wide..][..d].copy_from_slice(&job.queries[from..from + d]);
        room.so_far[q] = None;
    }
    for span in spans {
        // SAFETY: the caller's promise.
        unsafe { one_span::<V, E>(run, job, span, room) };
        for q in 0..count {
            let (row, head) = (q / heads, q % heads);
            if seen(job.rows[row], &(span * SPAN..(span + 1) * SPAN)).is_empty() {
                continue;
            }
            let (totals, _) = room.totals[q * LANES..].as_chunks::<LANES>();
            let (highest, total) = (room.highest[q], sum16(totals[0]));
            let values = &room.sums[q * wide..][..d];
            match out {
                Out::Attention(_) => {
                    let all = &mut room.all[q * wide..][..d];
                    room.so_far[q] = Some(match room.so_far[q] {
                        None => {
                            all.copy_from_slice(values);
                            (highest, total)
                        }
                        Some((before, sum)) => {
                            let mut sums = Sums {
                                highest: before,
                                total: sum,
                                values: all,
                            };
                            sums.add(highest, total, values);
                            (sums.highest, sums.total)
                        }
                    });
                }
                Out::Spans {
                    start,
                    record,
                    head: per_head,
                    row: per_row,
                } => {
                    let at = row * per_row + head * per_head + span * record;
                    // SAFETY: the caller's promise; a record has two numbers and a head.
                    let to = unsafe { std::slice::from_raw_parts_mut(start.add(at), 2 + d) };
                    (to[0], to[1]) = (highest, total);
                    to[2..].copy_from_slice(values);
                }
            }
        }
    }
    if let Out::Attention(start) = out {
        for q in 0..count {
            let at = q / heads * job.stride + q % heads * d;
            let (highest, total) = room.so_far[q].unwrap_or((f32::NEG_INFINITY, 0.0));
            let mut sums = Sums {
                highest,
                total,
                values: &mut room.all[q * wide..][..d],
            };
            sums.finish();
            // SAFETY: the caller's promise.
            unsafe { std::slice::from_raw_parts_mut(start.add(at), d) }
                .copy_from_slice(sums.values);
        }
    }
}

/// # Safety
///
/// As for [`body`].
#[inline(always)]
unsafe fn one_span<V: Vector, E: Element>(
    run: &Run<'_>,
    job: &Job<'_>,
    span: usize,
    room: &mut Room<'_>,
) {
    let (d, count) = (job.cache.d, job.count().min(MAX_QUERIES));
    let wide = d.next_multiple_of(LANES);
    room.highest[..count].fill(f32::NEG_INFINITY);
    room.totals[..count * LANES].fill(0.0);
    room.sums[..count * wide].fill(0.0);
    let tile_at = |tile: usize| span * SPAN + tile * TILE;
    let union = |start: usize| {
        let (mut from, mut to) = (usize::MAX, 0);
        for &row in job.rows {
            let keys = seen(row, &(start..start + TILE));
            if !keys.is_empty() {
                (from, to) = (from.min(keys.start), to.max(keys.end));
            }
        }
        from..to
    };
    let mut next = union(tile_at(0));
    let mut next_places = job.cache.places::<E>(run, tile_at(0), next.clone());
    for tile in 0..SPAN / TILE {
        let (keys, places) = (next.clone(), next_places);
        if tile + 1 < SPAN / TILE {
            let start = tile_at(tile + 1);
            next = union(start);
            next_places = job.cache.places::<E>(run, start, next.clone());
        }
        if keys.is_empty() {
            continue;
        }
        if run.stopped() {
            return;
        }
        let start = tile_at(tile);
        let keys = keys.start - start..keys.end - start;
        // SAFETY: the caller's promise.
        unsafe {
            widen::<V, E>(&job.cache, keys, &places, &next_places, room);
            one_tile::<V>(job, start, room);
        }
    }
}

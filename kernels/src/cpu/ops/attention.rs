//! The paged cache and attention over it.
//!
//! # The order of summation
//!
//! Keys are counted by their places in the sequence. A query's attention depends on its position, its sequence's entries
//! and nothing else: not on the chunk, the batch, the threads, the other heads, nor on how the cache is cut into blocks. Every
//! operation is rounded once, to nearest even; `exp` and `tanh` are those of [`lanes`](crate::cpu::lanes) and [`math`](crate::cpu::math).
//!
//! - A stored number is widened to `f32` exactly; one of `q8_0` is its scale times its byte, which is exact too.
//! - A score is one chain from `+0.0`: `acc = fma(q_i, k_i, acc)` for `i` ascending; then `acc · scale`; with a soft cap `c`,
//!   `tanh(score / c) · c`.
//! - Keys come in tiles of 64, tile `t` being the keys from `64 t` on. A tile raises the running maximum once: sums so far are
//!   multiplied by `exp(old − new)`, a key's weight is `exp(score − new)`.
//! - Weights are added in sixteen lanes, lane `j` having the keys of remainder `j`, ascending, then by the fixed tree of
//!   [`sum16`](crate::cpu::lanes::sum16). Each number of the result is one chain `acc = fma(weight, value, acc)`, keys ascending.
//! - Eight tiles make a span, summed by itself. The sums of spans are added in ascending order, `a` being what there is
//!   and `b` the next: `fma(b, exp(highest_b − highest), a · exp(highest_a − highest))`.
//! - The result is the sum times `1 / Σ weights`. A NaN has the bits `0x7fc00000`.
//!
//! # Threads
//!
//! Where there are rows and key heads enough, a thread computes all spans of some rows. Where there are few, as
//! in decoding, the threads share the spans and write down the sums of each, and a second step adds them in their order.

use hotcell_graph::{
    CacheSpec, DType, Dim,
    op::{Call, ValueSpec},
};

use super::{Entry, unsupported};
use crate::{
    backend::DeviceError,
    cpu::{
        lanes::dispatch,
        plan::{Kernel, Launcher, Reg, Run},
    },
};

mod element;
mod product;
mod span;
mod tile;
mod vector;
mod write;
#[cfg(target_arch = "x86_64")]
mod x86;

use element::{Bf16, Element, F16, F32, Q8};
use span::{Job, Out, Room, SPAN, Sums, attend};
use tile::{Cache, MAX_HEAD_DIM, MAX_QUERIES};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "cache_write",
        supports: cache_fits,
        launch: write::cache_write,
    },
    Entry {
        op: "paged_attention",
        supports: fits,
        launch: paged_attention,
    },
];

/// Bytes at most for sums of spans that threads share.
const SHARED_BYTES: usize = 4 << 20;

fn spec_fits(cache: &CacheSpec) -> bool {
    (1..=MAX_HEAD_DIM).contains(&cache.head_dim)
        && cache.block_len > 0
        && i32::try_from(cache.slots()).is_ok()
        && cache.bytes().is_some()
}

fn cache_fits(call: &Call<'_>) -> bool {
    call.cache(0).is_ok_and(spec_fits)
}

fn fits(call: &Call<'_>) -> bool {
    call.cache(1).is_ok_and(spec_fits)
}

/// An index as it is now, read once: what was checked is what is used, even if others write the memory.
#[inline(always)]
fn once(index: &i32) -> i32 {
    // SAFETY: a reference is valid for reads.
    unsafe { std::ptr::from_ref(index).read_volatile() }
}

/// Runs `$kernel` with `$element` being how a cache of this dtype stores numbers.
macro_rules! with_element {
    ($call:expr, $dtype:expr, $element:ident => $kernel:expr) => {
        match $dtype {
            DType::F32 => {
                type $element = F32;
                $kernel
            }
            DType::F16 => {
                type $element = F16;
                $kernel
            }
            DType::BF16 => {
                type $element = Bf16;
                $kernel
            }
            DType::Q8_0 => {
                type $element = Q8;
                $kernel
            }
            _ => return Err(unsupported($call)),
        }
    };
}
use with_element;

/// What both steps of an attention know.
#[derive(Clone, Copy)]
struct Frame {
    sequences: Reg,
    positions: Reg,
    out: Reg,
    spec: CacheSpec,
    count: Dim,
    heads: usize,
    max_sequences: usize,
    max_blocks: usize,
    window: usize,
    /// Where the threads write sums of spans down, and for how many rows there is room.
    shared: Option<(Reg, usize)>,
}

/// How the work is cut: into tiles of rows, key heads, and, where these have very many query heads, chunks of them.
struct Cut {
    /// Rows of a tile.
    rows: usize,
    tiles: usize,
    /// Query heads of a chunk.
    chunk: usize,
    chunks: usize,
    /// Whether that is less than all threads want.
    few: bool,
    /// Whether threads share spans.
    spans: bool,
}

impl Frame {
    /// Query heads of a key head.
    fn group(&self) -> usize {
        self.heads / self.spec.kv_heads
    }

    /// Spans of a sequence at most.
    fn spans(&self) -> usize {
        (self.max_blocks.saturating_mul(self.spec.block_len)).div_ceil(SPAN)
    }

    /// Numbers of the sums of a span.
    fn record(&self) -> usize {
        2 + self.spec.head_dim
    }

    /// By the number of rows and threads alone, never by data: others might change it between two looks.
    fn cut(&self, count: usize, parts: usize) -> Cut {
        let chunk = self.group().min(MAX_QUERIES);
        let chunks = self.group().div_ceil(chunk);
        // Rows share a tile of keys where enough work for all threads is left.
        let per_row = self.spec.kv_heads * chunks;
        let rows = (count * per_row).div_ceil(2 * parts);
        let rows = rows.clamp(1, MAX_QUERIES / chunk);
        let tiles = count.div_ceil(rows);
        let few = tiles * per_row < 2 * parts;
        Cut {
            rows,
            tiles,
            chunk,
            chunks,
            few,
            spans: few && self.shared.is_some_and(|(_, most)| count <= most),
        }
    }

    /// A row's sequence and its first and last key, or which index is wrong.
    fn range(&self, sequence: i32, position: i32) -> Result<(usize, usize, usize), (i64, usize)> {
        let seq = usize::try_from(sequence)
            .ok()
            .filter(|s| *s < self.max_sequences);
        let seq = seq.ok_or((i64::from(sequence), self.max_sequences))?;
        let tokens = self.max_blocks * self.spec.block_len;
        let last = usize::try_from(position).ok().filter(|p| *p < tokens);
        let last = last.ok_or((i64::from(position), tokens))?;
        let first = if self.window == 0 {
            0
        } else {
            (last + 1).saturating_sub(self.window)
        };
        // More keys than the cache has are blocks named twice: work that no memory bounds.
        if last - first >= self.spec.slots() {
            return Err((i64::from(position), first + self.spec.slots()));
        }
        Ok((seq, first, last))
    }
}

struct Attention<E> {
    frame: Frame,
    queries: Reg,
    cache: Reg,
    tables: Reg,
    scale: f32,
    /// 0: none.
    soft_cap: f32,
    element: std::marker::PhantomData<E>,
}

/// Rows of a tile, and query heads of one key head.
struct Item {
    number: usize,
    rows: std::ops::Range<usize>,
    kv_head: usize,
    /// The first query head, and how many.
    head: usize,
    heads: usize,
}

impl<E: Element> Attention<E> {
    /// # Safety
    ///
    /// As for [`Kernel::run`]; the item's results are this part's, or, where spans are shared, those of its spans.
    unsafe fn item(
        &self,
        run: &Run<'_>,
        item: &Item,
        shared: Option<(usize, usize)>,
        room: &mut Room<'_>,
    ) {
        let Frame {
            spec, heads, count, ..
        } = self.frame;
        let (d, count) = (spec.head_dim, count.at(run.rows));
        let half = E::bytes(spec.slots() * spec.kv_heads * d);
        // SAFETY: sizes as the specs say; the cache is not written in this step.
        let (queries, cache, tables, sequences, positions) = unsafe {
            (
                run.slice::<f32>(self.queries, count * heads * d),
                run.slice::<u8>(self.cache, 2 * half),
                run.slice::<i32>(
                    self.tables,
                    self.frame.max_sequences * self.frame.max_blocks,
                ),
                run.slice::<i32>(self.frame.sequences, count),
                run.slice::<i32>(self.frame.positions, count),
            )
        };
        let mut seen = [(0, 0); MAX_QUERIES];
        let mut row = item.rows.start;
        while row < item.rows.end {
            // Neighbours of one sequence share its keys.
            let (first, mut n, mut sequence) = (row, 0, 0);
            while row < item.rows.end {
                match self
                    .frame
                    .range(once(&sequences[row]), once(&positions[row]))
                {
                    Ok((seq, from, to)) if n == 0 || seq == sequence => {
                        (sequence, seen[n]) = (seq, (from, to));
                        n += 1;
                        row += 1;
                    }
                    Err((index, bound)) if n == 0 => {
                        run.index_out_of_range("paged_attention", index, bound);
                        row += 1;
                        break;
                    }
                    _ => break,
                }
            }
            let at = (first * heads + item.head) * d;
            if n == 0 {
                if shared.is_none() {
                    // SAFETY: this part's heads of the row.
                    unsafe { run.slice_mut::<f32>(self.frame.out, at..at + item.heads * d) }
                        .fill(0.0);
                }
                continue;
            }
            let rows = &seen[..n];
            let job = Job {
                cache: Cache {
                    keys: &cache[..half],
                    values: &cache[half..],
                    table: &tables[sequence * self.frame.max_blocks..][..self.frame.max_blocks],
                    blocks: spec.blocks,
                    block_len: spec.block_len,
                    kv_heads: spec.kv_heads,
                    kv_head: item.kv_head,
                    d,
                },
                rows,
                queries: &queries[at..],
                stride: heads * d,
                heads: item.heads,
                scale: self.scale,
                soft_cap: self.soft_cap,
            };
            let start = rows.iter().map(|r| r.0).min().unwrap_or(0) / SPAN;
            let end = rows.iter().map(|r| r.1).max().unwrap_or(0) / SPAN + 1;
            let Some((part, parts)) = shared else {
                // SAFETY: inside of the result, and of the item's heads only.
                unsafe {
                    let out = run.pointer(self.frame.out).cast::<f32>().add(at);
                    attend::<E>(run.path, run, &job, start..end, room, Out::Attention(out));
                }
                continue;
            };
            let Some((sums, _)) = self.frame.shared else {
                return;
            };
            let record = self.frame.record();
            let head = self.frame.spans() * record;
            for span in (start..end).filter(|span| (span + item.number) % parts == part) {
                // SAFETY: `shared` has room for this many rows, and the sums of a span are one part's.
                unsafe {
                    let start = run.pointer(sums).cast::<f32>();
                    let out = Out::Spans {
                        start: start.add((first * heads + item.head) * head),
                        record,
                        head,
                        row: heads * head,
                    };
                    attend::<E>(run.path, run, &job, span..span + 1, room, out);
                }
            }
        }
    }
}

impl<E: Element> Kernel for Attention<E> {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let count = self.frame.count.at(run.rows);
        let Cut {
            rows,
            tiles,
            chunk,
            chunks,
            spans,
            ..
        } = self.frame.cut(count, parts);
        let d = self.frame.spec.head_dim;
        // SAFETY: the launch asked for as many bytes, which are this part's and hold numbers of any bits.
        let memory = unsafe {
            let memory = run.workspace(part).cast::<f32>();
            std::slice::from_raw_parts_mut(memory, Room::bytes(d) / size_of::<f32>())
        };
        let mut room = Room::new(memory, d);
        let (group, mut number) = (self.frame.group(), 0);
        for tile in 0..tiles {
            for kv_head in 0..self.frame.spec.kv_heads {
                for first in (0..chunks).map(|c| c * chunk) {
                    number += 1;
                    // Neighbours go to different parts: later rows of a prompt have more keys.
                    if !spans && number % parts != part {
                        continue;
                    }
                    if run.stopped() {
                        return;
                    }
                    let item = Item {
                        number,
                        rows: tile * rows..count.min((tile + 1) * rows),
                        kv_head,
                        head: kv_head * group + first,
                        heads: chunk.min(group - first),
                    };
                    let shared = spans.then_some((part, parts));
                    // SAFETY: each item, or each span of one, is one part's.
                    unsafe { self.item(run, &item, shared, &mut room) };
                }
            }
        }
    }
}

/// Adds the sums of spans, where threads shared them.
struct AddSpans(Frame);

#[inline(always)]
fn add_body(records: &[f32], record: usize, out: &mut [f32]) {
    let mut records = records.chunks_exact(record);
    let Some(&[highest, total, ref values @ ..]) = records.next() else {
        return;
    };
    out.copy_from_slice(values);
    let mut sums = Sums {
        highest,
        total,
        values: out,
    };
    for next in records {
        if let &[highest, total, ref values @ ..] = next {
            sums.add(highest, total, values);
        }
    }
    sums.finish();
}

dispatch! {
    fn add_spans(records: &[f32], record: usize, out: &mut [f32]) = add_body;
}

impl Kernel for AddSpans {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let frame = &self.0;
        let (count, heads, d) = (frame.count.at(run.rows), frame.heads, frame.spec.head_dim);
        let Some((sums, _)) = frame.shared.filter(|_| frame.cut(count, parts).spans) else {
            return;
        };
        let (spans, record) = (frame.spans(), frame.record());
        // SAFETY: sizes as the specs say; there is room for as many rows, or `cut` would have said otherwise.
        let (sums, sequences, positions) = unsafe {
            (
                run.slice::<f32>(sums, count * heads * spans * record),
                run.slice::<i32>(frame.sequences, count),
                run.slice::<i32>(frame.positions, count),
            )
        };
        for item in (part..count * heads).step_by(parts) {
            let row = item / heads;
            // SAFETY: each head of a row is one part's.
            let out = unsafe { run.slice_mut::<f32>(frame.out, item * d..(item + 1) * d) };
            // What is wrong with an index was said by the step before.
            match frame.range(once(&sequences[row]), once(&positions[row])) {
                Ok((_, first, last)) => {
                    let of = item * spans + first / SPAN..item * spans + last / SPAN + 1;
                    let records = &sums[of.start * record..of.end * record];
                    add_spans(run.path, records, record, out);
                }
                Err(_) => out.fill(0.0),
            }
        }
    }
}

fn paged_attention(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (
        [ValueSpec::Tensor(q), _, ValueSpec::Tensor(t), ..],
        &[queries, cache, tables, sequences, positions],
        &[out],
    ) = (call.inputs, ins, outs)
    else {
        return Err(unsupported(call));
    };
    let (&[count, Dim::Fixed(heads), _], &[Dim::Fixed(max_sequences), Dim::Fixed(max_blocks)]) =
        (q.shape.dims(), t.shape.dims())
    else {
        return Err(unsupported(call));
    };
    let spec = *call.cache(1)?;
    let mut frame = Frame {
        sequences,
        positions,
        out,
        spec,
        count,
        heads,
        max_sequences,
        max_blocks,
        window: usize::try_from(call.int(1)?).unwrap_or(0),
        shared: None,
    };
    if launcher.parts > 1 && frame.spans() > 1 && frame.cut(1, launcher.parts).few {
        let row = heads
            .checked_mul(frame.spans())
            .and_then(|n| n.checked_mul(frame.record() * size_of::<f32>()))
            .unwrap_or(usize::MAX);
        let most = (4 * launcher.parts).div_ceil(spec.kv_heads);
        let rows = most
            .min(count.at(launcher.max_rows))
            .min(SHARED_BYTES / row);
        if rows > 0 {
            frame.shared = Some((launcher.scratch(rows * row), rows));
        }
    }
    let scale = call.float(0)? as f32;
    let soft_cap = match call.float(2)? {
        // The limit where f32 has none so small: every score is next to nothing.
        cap if cap > 0.0 => (cap as f32).max(f32::MIN_POSITIVE),
        _ => 0.0,
    };
    launcher.workspace(Room::bytes(spec.head_dim));
    let mut writes = vec![out];
    writes.extend(frame.shared.map(|(reg, _)| reg));
    with_element!(call, spec.dtype, E => launcher.step(
        Attention::<E> {
            frame,
            queries,
            cache,
            tables,
            scale,
            soft_cap,
            element: std::marker::PhantomData,
        },
        &[queries, cache, tables, sequences, positions],
        &writes,
    ));
    if let Some((sums, _)) = frame.shared {
        launcher.step(AddSpans(frame), &[sums, sequences, positions], &[out]);
    }
    Ok(())
}

//! The paged cache and attention over it.
//!
//! Order of summation: a score is sixteen lanes of fma over the head, ascending, then the fixed tree.
//! Keys come in tiles of one cache block, aligned to the sequence's start; within a tile the running
//! maximum is raised once, then weights and values are added key by key. So a row's result depends on
//! its position and its sequence's entries, never on the chunk, the batch or the threads.

use hotcell_graph::{
    CacheSpec, DType, Dim,
    op::{Call, ValueSpec},
};

use super::{Entry, split, unsupported};
use crate::{
    backend::DeviceError,
    cpu::{
        lanes::{LANES, bf16_to_f32, dispatch, exp, f16_to_f32, f32_to_bf16, f32_to_f16, sum16},
        math::Real,
        plan::{Kernel, Launcher, Reg, Run},
    },
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "cache_write",
        supports: cache_fits,
        launch: cache_write,
    },
    Entry {
        op: "paged_attention",
        supports: fits,
        launch: paged_attention,
    },
];

/// Bounds of the arrays on the stack.
const MAX_HEAD_DIM: usize = 512;
const MAX_BLOCK_LEN: usize = 64;

fn spec_fits(cache: &CacheSpec) -> bool {
    (1..=MAX_HEAD_DIM).contains(&cache.head_dim)
        && (1..=MAX_BLOCK_LEN).contains(&cache.block_len)
        && i32::try_from(cache.slots()).is_ok()
        && matches!(cache.dtype, DType::F32 | DType::F16 | DType::BF16)
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

/// How a cache stores a number.
trait Element: Copy + Send + Sync + 'static {
    fn store(value: f32) -> Self;
    fn load(self) -> f32;
}

impl Element for f32 {
    #[inline(always)]
    fn store(value: f32) -> Self {
        value
    }
    #[inline(always)]
    fn load(self) -> f32 {
        self
    }
}

#[derive(Clone, Copy)]
#[repr(transparent)]
struct F16(u16);

impl Element for F16 {
    #[inline(always)]
    fn store(value: f32) -> Self {
        F16(f32_to_f16(value))
    }
    #[inline(always)]
    fn load(self) -> f32 {
        f16_to_f32(self.0)
    }
}

#[derive(Clone, Copy)]
#[repr(transparent)]
struct Bf16(u16);

impl Element for Bf16 {
    #[inline(always)]
    fn store(value: f32) -> Self {
        Bf16(f32_to_bf16(value))
    }
    #[inline(always)]
    fn load(self) -> f32 {
        bf16_to_f32(self.0)
    }
}

struct CacheWrite<T> {
    cache: Reg,
    keys: Reg,
    values: Reg,
    slots: Reg,
    spec: CacheSpec,
    count: Dim,
    element: std::marker::PhantomData<T>,
}

impl<T: Element> Kernel for CacheWrite<T> {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let CacheSpec {
            block_len,
            kv_heads,
            head_dim: d,
            ..
        } = self.spec;
        let (count, width) = (self.count.at(run.rows), kv_heads * d);
        // Rows in order and their columns shared: where two rows name one slot, the last wins whatever the parts.
        let columns = match (count.saturating_mul(width) < 4096, part) {
            (true, 0) => 0..width,
            (true, _) => return,
            (false, _) => split(width, LANES, part, parts),
        };
        let heads = columns.start / d..columns.end.div_ceil(d);
        let half = self.spec.slots() * width;
        // SAFETY: sizes as the specs say.
        let (keys, values, slots) = unsafe {
            (
                run.slice::<f32>(self.keys, count * width),
                run.slice::<f32>(self.values, count * width),
                run.slice::<i32>(self.slots, count),
            )
        };
        for (row, slot) in slots.iter().enumerate() {
            let slot = once(slot);
            if slot == -1 {
                continue;
            }
            let Some(slot) = usize::try_from(slot)
                .ok()
                .filter(|s| *s < self.spec.slots())
            else {
                if part == 0 {
                    run.index_out_of_range("cache_write", slot.into(), self.spec.slots());
                }
                continue;
            };
            let (block, place) = (slot / block_len, slot % block_len);
            for head in heads.clone() {
                // The part's columns of this head.
                let from = columns.start.max(head * d);
                let n = columns.end.min((head + 1) * d).saturating_sub(from);
                let at = ((block * kv_heads + head) * block_len + place) * d + (from - head * d);
                for (source, base) in [(keys, 0), (values, half)] {
                    // SAFETY: slot < slots and from + n is inside the head, so `at + n ≤ half` and
                    // `half + at + n` is the cache's size at most; no other part has these columns.
                    let target =
                        unsafe { run.slice_mut::<T>(self.cache, base + at..base + at + n) };
                    let source = &source[row * width + from..][..n];
                    for (t, s) in target.iter_mut().zip(source) {
                        *t = T::store(*s);
                    }
                }
            }
        }
    }
}

fn cache_write(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    _: &[Reg],
) -> Result<(), DeviceError> {
    let (Some(ValueSpec::Tensor(t)), &[cache, keys, values, slots]) = (call.inputs.get(1), ins)
    else {
        return Err(unsupported(call));
    };
    let (spec, count) = (*call.cache(0)?, t.shape.dims()[0]);
    macro_rules! kernel {
        ($t:ty) => {
            launcher.step(
                CacheWrite::<$t> {
                    cache,
                    keys,
                    values,
                    slots,
                    spec,
                    count,
                    element: std::marker::PhantomData,
                },
                &[keys, values, slots],
                &[cache],
            )
        };
    }
    match spec.dtype {
        DType::F32 => kernel!(f32),
        DType::F16 => kernel!(F16),
        DType::BF16 => kernel!(Bf16),
        _ => return Err(unsupported(call)),
    }
    Ok(())
}

struct Attention<T> {
    queries: Reg,
    cache: Reg,
    tables: Reg,
    sequences: Reg,
    positions: Reg,
    out: Reg,
    spec: CacheSpec,
    count: Dim,
    heads: usize,
    max_sequences: usize,
    max_blocks: usize,
    scale: f32,
    window: usize,
    /// 0: none.
    soft_cap: f32,
    element: std::marker::PhantomData<T>,
}

/// One query head over the keys `first ..= last` of its sequence.
struct Head<'a, T> {
    query: &'a [f32],
    keys: &'a [T],
    values: &'a [T],
    /// Physical block of each logical block, as the caller gave it.
    table: &'a [i32],
    blocks: usize,
    first: usize,
    last: usize,
    block_len: usize,
    kv_heads: usize,
    kv_head: usize,
    scale: f32,
    soft_cap: f32,
}

#[inline(always)]
fn score<T: Element>(query: &[f32], key: &[T]) -> f32 {
    let mut sums = [0.0f32; LANES];
    let ((q, q_tail), (k, k_tail)) = (query.as_chunks::<LANES>(), key.as_chunks::<LANES>());
    for (q, k) in q.iter().zip(k) {
        for i in 0..LANES {
            sums[i] = q[i].mul_add(k[i].load(), sums[i]);
        }
    }
    for (s, (q, k)) in sums.iter_mut().zip(q_tail.iter().zip(k_tail)) {
        *s = q.mul_add(k.load(), *s);
    }
    sum16(sums)
}

#[inline(always)]
fn attend_body<T: Element>(head: &Head<'_, T>, out: &mut [f32]) -> Result<(), i32> {
    let (d, block_len) = (head.query.len(), head.block_len);
    let mut highest = f32::NEG_INFINITY;
    let mut total = 0.0f32;
    out.fill(0.0);
    for tile in head.first / block_len..=head.last / block_len {
        let start = tile * block_len;
        let from = head.first.max(start) - start;
        let to = (head.last + 1).min(start + block_len) - start;
        let block = head.table.get(tile).map_or(-1, once);
        let Some(physical) = usize::try_from(block).ok().filter(|b| *b < head.blocks) else {
            return Err(block);
        };
        let base = (physical * head.kv_heads + head.kv_head) * block_len * d;
        let keys = &head.keys[base..base + block_len * d];
        let values = &head.values[base..base + block_len * d];
        let mut scores = [f32::NEG_INFINITY; MAX_BLOCK_LEN];
        let mut tile_highest = highest;
        for i in from..to {
            let s = score(head.query, &keys[i * d..(i + 1) * d]) * head.scale;
            let s = match head.soft_cap > 0.0 {
                true => Real::tanh(s / head.soft_cap) * head.soft_cap,
                false => s,
            };
            scores[i] = s;
            // A NaN score stays NaN in its weight below, so that the row is NaN, not plausible.
            tile_highest = if s > tile_highest { s } else { tile_highest };
        }
        if tile_highest > highest {
            let shrink = exp(highest - tile_highest);
            total *= shrink;
            for o in out.iter_mut() {
                *o *= shrink;
            }
            highest = tile_highest;
        }
        for i in from..to {
            let weight = exp(scores[i] - highest);
            total += weight;
            for (o, v) in out.iter_mut().zip(&values[i * d..(i + 1) * d]) {
                *o = weight.mul_add(v.load(), *o);
            }
        }
    }
    let inverse = 1.0 / total;
    for o in out {
        *o *= inverse;
    }
    Ok(())
}

dispatch! {
    fn attend_f32(head: &Head<'_, f32>, out: &mut [f32]) -> Result<(), i32> = attend_body;
}
dispatch! {
    fn attend_f16(head: &Head<'_, F16>, out: &mut [f32]) -> Result<(), i32> = attend_body;
}
dispatch! {
    fn attend_bf16(head: &Head<'_, Bf16>, out: &mut [f32]) -> Result<(), i32> = attend_body;
}

/// Chooses the compiled copy for an element type.
trait Attend: Element {
    /// Fails with the block that the cache does not have.
    fn attend(
        path: crate::cpu::path::CpuPath,
        head: &Head<'_, Self>,
        out: &mut [f32],
    ) -> Result<(), i32>;
}

macro_rules! attend {
    ($($t:ty => $f:ident),*) => { $(impl Attend for $t {
        fn attend(
            path: crate::cpu::path::CpuPath,
            head: &Head<'_, Self>,
            out: &mut [f32],
        ) -> Result<(), i32> {
            $f(path, head, out)
        }
    })* };
}
attend!(f32 => attend_f32, F16 => attend_f16, Bf16 => attend_bf16);

impl<T: Attend> Attention<T> {
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

impl<T: Attend> Kernel for Attention<T> {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let d = self.spec.head_dim;
        let count = self.count.at(run.rows);
        let half = self.spec.slots() * self.spec.kv_heads * d;
        // SAFETY: sizes as the specs say; the cache is not written in this step.
        let (queries, cache, tables, sequences, positions) = unsafe {
            (
                run.slice::<f32>(self.queries, count * self.heads * d),
                run.slice::<T>(self.cache, 2 * half),
                run.slice::<i32>(self.tables, self.max_sequences * self.max_blocks),
                run.slice::<i32>(self.sequences, count),
                run.slice::<i32>(self.positions, count),
            )
        };
        let (keys, values) = cache.split_at(half);
        // Neighbouring heads and rows go to different parts: later rows of a prompt have more keys.
        for item in (part..count * self.heads).step_by(parts) {
            if run.stopped() {
                return;
            }
            let (row, h) = (item / self.heads, item % self.heads);
            // SAFETY: each item is one part's, and items are disjoint.
            let out = unsafe { run.slice_mut::<f32>(self.out, item * d..(item + 1) * d) };
            let (seq, first, last) = match self.range(once(&sequences[row]), once(&positions[row]))
            {
                Ok(range) => range,
                Err((index, bound)) => {
                    run.index_out_of_range("paged_attention", index, bound);
                    out.fill(0.0);
                    continue;
                }
            };
            let head = Head {
                query: &queries[item * d..(item + 1) * d],
                keys,
                values,
                table: &tables[seq * self.max_blocks..][..self.max_blocks],
                blocks: self.spec.blocks,
                first,
                last,
                block_len: self.spec.block_len,
                kv_heads: self.spec.kv_heads,
                kv_head: h / (self.heads / self.spec.kv_heads),
                scale: self.scale,
                soft_cap: self.soft_cap,
            };
            if let Err(block) = T::attend(run.path, &head, out) {
                run.index_out_of_range("paged_attention", block.into(), self.spec.blocks);
                out.fill(0.0);
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
    let scale = call.float(0)? as f32;
    let window = usize::try_from(call.int(1)?).unwrap_or(0);
    let soft_cap = match call.float(2)? {
        // The limit where f32 has none so small: every score is next to nothing.
        cap if cap > 0.0 => (cap as f32).max(f32::MIN_POSITIVE),
        _ => 0.0,
    };
    macro_rules! kernel {
        ($t:ty) => {
            launcher.step(
                Attention::<$t> {
                    queries,
                    cache,
                    tables,
                    sequences,
                    positions,
                    out,
                    spec,
                    count,
                    heads,
                    max_sequences,
                    max_blocks,
                    scale,
                    window,
                    soft_cap,
                    element: std::marker::PhantomData,
                },
                &[queries, cache, tables, sequences, positions],
                &[out],
            )
        };
    }
    match spec.dtype {
        DType::F32 => kernel!(f32),
        DType::F16 => kernel!(F16),
        DType::BF16 => kernel!(Bf16),
        _ => return Err(unsupported(call)),
    }
    Ok(())
}

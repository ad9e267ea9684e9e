//! Attention over the paged cache, which MLX does not have: each sequence's keys and values are gathered, then attended
//! to. What a gather costs stands in `BENCHMARKS.md`.

use std::ops::Range;

use hotcell_graph::{CacheSpec, DType, Dim, op::Call};
use mlx_rs::{Array, error::Exception, fast, ops};

use super::{
    array,
    ops::{
        Entry, Needs, array_of, checked, dtype, elements, has_elements, product, scalar, sliced,
        sum,
    },
    plan::overflow,
    run::Cx,
};
use crate::{backend::DeviceError, bound::Bound};

pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "paged_attention",
        supports: plain_cache,
        needs: paged_needs,
        launch: paged_attention,
    },
    Entry {
        op: "scaled_dot_product_attention",
        supports: whole,
        needs: whole_needs,
        launch: whole_attention,
    },
];

/// Bytes of the scores that are computed at a time, where one row has no more: rows are attended to in pieces.
const SCORES_BYTES: usize = 32 << 20;

/// Scores are in memory as often: products, masked ones, shares.
const TIMES_SCORES: usize = 3;

/// Rows of one sequence that are attended to at a time.
fn rows_at_once(heads: usize, tokens: usize) -> usize {
    let row = heads.saturating_mul(tokens).saturating_mul(4).max(1);
    (SCORES_BYTES / row).max(1)
}

/// One sequence's keys and values at a time, and the scores of a piece of its rows.
fn paged_needs(call: &Call<'_>, rows: usize) -> Option<Needs> {
    let (queries, cache) = (call.tensor(0).ok()?, call.cache(1).ok()?);
    let &[_, Dim::Fixed(heads), Dim::Fixed(depth)] = queries.shape.dims() else {
        return None;
    };
    let &[_, Dim::Fixed(width)] = call.tensor(2).ok()?.shape.dims() else {
        return None;
    };
    let tokens = product(&[width, cache.block_len])?;
    let numbers = array_of(&[tokens, cache.kv_heads, cache.head_dim])?;
    // Of each as the cache has them, the same as MLX's, in order, and as f32 in one piece; and once for each query head.
    let stored = product(&[numbers, 3, cache.dtype.block_bytes()])?;
    let single = product(&[numbers, 2, size_of::<f32>()])?;
    let spread = product(&[tokens, heads, depth, size_of::<f32>()])?;
    let gathered = product(&[2, sum(&[stored, single, spread])?])?;
    let rows = elements(queries, rows)?.checked_div(product(&[heads, depth])?)?;
    let piece = rows_at_once(heads, tokens).min(rows);
    let scores = product(&[array_of(&[piece, heads, tokens])?, 4, TIMES_SCORES])?;
    let masks = product(&[piece, tokens, 2])?;
    let given = checked(sum(&[elements(call.tensor(2).ok()?, rows)?, 2 * rows])?)?;
    // Queries and results, in order and by heads.
    let turned = product(&[rows, heads, depth, 4, size_of::<f32>()])?;
    Some(Needs {
        bytes: sum(&[gathered, scores, masks, given, turned])?,
        products: product(&[2, rows, heads, tokens, depth])?,
    })
}

/// MLX on the processor has no kernel for it and computes all scores at once.
fn whole_needs(call: &Call<'_>, rows: usize) -> Option<Needs> {
    let size = |i: usize, axis: usize| {
        let dims = call.tensor(i).ok()?.shape.dims();
        dims.get(axis).map(|d| d.at(rows))
    };
    let (batch, heads, queries) = (size(0, 0)?, size(0, 1)?, size(0, 2)?);
    let (tokens, depth) = (size(1, 2)?, size(0, 3)?.max(size(2, 3)?));
    let scores = array_of(&[batch, heads, queries, tokens])?;
    let floats = sum(&[
        product(&[scores, TIMES_SCORES])?,
        // Scaled queries and what is attended to; keys and values once for each query head.
        product(&[2, batch, heads, queries, depth])?,
        product(&[2, batch, heads, tokens, depth])?,
        product(&[queries, tokens])?,
    ])?;
    Some(Needs {
        bytes: product(&[floats, size_of::<f32>()])?,
        products: product(&[2, scores, depth])?,
    })
}

/// Caches whose numbers MLX has; blocks of Q8_0 are read by the CPU backend's kernel.
fn plain_cache(call: &Call<'_>) -> bool {
    let Ok(cache) = call.cache(1) else {
        return false;
    };
    let rows = call.tensor(0).map(|t| t.shape.dims().first().copied());
    !cache.dtype.is_block() && !matches!(rows, Ok(Some(Dim::Fixed(0))))
}

/// Attention as MLX's kernel has it: f32, all keys or causal, without window and cap. With a mask it decomposes: a row
/// that sees nothing is NaN in the catalogue, and anything in MLX.
fn whole(call: &Call<'_>) -> bool {
    let single = |i| dtype(call, i).is_none_or(|d| d == DType::F32);
    let plain = matches!((call.int(2), call.float(3)), (Ok(0), Ok(cap)) if cap == 0.0);
    let causal = call.bool(1).is_ok_and(|c| c);
    let tokens = |i: usize| {
        let dims = call.tensor(i).map(|t| t.shape.dims().get(2).copied());
        dims.ok().flatten().map(|d| d.at(0))
    };
    // Of more queries than keys the first see nothing either.
    let all_see = !causal || tokens(0) <= tokens(1);
    (0..3).all(single)
        && single(4)
        && dtype(call, 3).is_none()
        && all_see
        && plain
        && has_elements(call)
}

fn whole_attention(cx: &Cx<'_>) -> Result<Vec<Array>, DeviceError> {
    let call = cx.call();
    let (q, k, v) = (cx.array(0)?, cx.array(1)?, cx.array(2)?);
    let sinks = cx.optional(4)?;
    let (scale, sinks) = (call.float(0)? as f32, sinks.as_deref());
    let attended = match call.bool(1)? {
        true => {
            let mask = fast::ScaledDotProductAttentionMask::Causal;
            fast::scaled_dot_product_attention(&*q, &*k, &*v, scale, mask, sinks)
        }
        false => fast::scaled_dot_product_attention(&*q, &*k, &*v, scale, None, sinks),
    };
    Ok(vec![attended.map_err(array::failed(cx.op()))?])
}

/// Rows that follow one another, of one sequence.
struct Run {
    rows: Range<usize>,
    sequence: usize,
}

fn runs(sequences: &[i32]) -> Result<Vec<Run>, DeviceError> {
    let mut runs: Vec<Run> = array::room("a batch's sequences", sequences.len())?;
    for (row, sequence) in sequences.iter().enumerate() {
        // Checked: no index is negative.
        let sequence = usize::try_from(*sequence).unwrap_or(usize::MAX);
        match runs.last_mut() {
            Some(run) if run.sequence == sequence => run.rows.end = row + 1,
            _ => runs.push(Run {
                rows: row..row + 1,
                sequence,
            }),
        }
    }
    Ok(runs)
}

/// Keys or values of tokens `tokens` of a sequence, `[1, kv_heads, tokens, head_dim]`, as f32.
fn gather(
    cache: &CacheSpec,
    memory: &Bound,
    values: bool,
    table: &[i64],
    tokens: &Range<usize>,
) -> Result<Array, DeviceError> {
    let failed = array::failed("paged_attention");
    let (heads, len, depth) = (cache.kv_heads, cache.block_len, cache.head_dim);
    let block = cache
        .dtype
        .row_bytes(heads * len * depth)
        .ok_or_else(overflow)?;
    let half = match values {
        true => cache.half_bytes().ok_or_else(overflow)?,
        false => 0,
    };
    let blocks = tokens.start / len..tokens.end.div_ceil(len);
    let size = block.checked_mul(blocks.len()).ok_or_else(overflow)?;
    let mut bytes = array::zeros("what a sequence attends to", size)?;
    for (piece, at) in bytes.chunks_exact_mut(block).zip(blocks.clone()) {
        let index = table.get(at).copied().unwrap_or(-1);
        let number = usize::try_from(index).ok().filter(|n| *n < cache.blocks);
        let number = number.ok_or(DeviceError::IndexOutOfRange {
            op: "paged_attention",
            index,
            bound: cache.blocks,
        })?;
        memory
            .buffer
            .read(memory.offset + half + number * block, piece)?;
    }
    let size = |n: usize| i32::try_from(n).map_err(|_| overflow());
    let dims = [size(blocks.len())?, size(heads)?, size(len)?, size(depth)?];
    let gathered = array::from_bytes(&bytes, cache.dtype, &dims)?;
    let first = size(tokens.start - blocks.start * len)?;
    let end = first + size(tokens.len())?;
    let made = || -> Result<Array, Exception> {
        // Heads outermost, then a head's tokens in order.
        let turned = gathered.transpose_axes(&[1, 0, 2, 3])?;
        let [n, h, l, d] = dims;
        let rows = turned.reshape(&[1, h, n * l, d])?;
        // What was never written may be anything, also NaN, which a mask does not hide.
        let rows = sliced(&rows, &[0, 0, first, 0], &[1; 4], &[1, h, end - first, d])?;
        rows.as_dtype(mlx_rs::Dtype::Float32)
    };
    made().map_err(failed)
}

/// Rows of one sequence.
struct Part<'a> {
    queries: Array,
    keys: &'a Array,
    values: &'a Array,
    mask: Option<Array>,
    /// Query heads per key head.
    group: i32,
    scale: f32,
    soft_cap: f64,
}

impl Part<'_> {
    fn attend(&self) -> Result<Array, DeviceError> {
        if self.soft_cap > 0.0 {
            return self.capped();
        }
        let failed = array::failed("paged_attention");
        let mask = self
            .mask
            .as_ref()
            .map(fast::ScaledDotProductAttentionMask::Array);
        let (q, k, v) = (&self.queries, self.keys, self.values);
        let attended = match mask {
            Some(mask) => fast::scaled_dot_product_attention(q, k, v, self.scale, mask, None),
            None => fast::scaled_dot_product_attention(q, k, v, self.scale, None, None),
        };
        attended.map_err(failed)
    }

    /// MLX's kernel knows of no cap.
    fn capped(&self) -> Result<Array, DeviceError> {
        let failed = array::failed("paged_attention");
        let (scale, cap) = (
            scalar(f64::from(self.scale), DType::F32)?,
            scalar(self.soft_cap, DType::F32)?,
        );
        let hidden = scalar(f64::NEG_INFINITY, DType::F32)?;
        let made = || -> Result<Array, Exception> {
            // A group of query heads shares a key head: [1, kv, group, rows, d].
            let &[b, h, r, d] = self.queries.shape() else {
                return Err(Exception::custom("queries have four axes"));
            };
            let q = self
                .queries
                .reshape(&[b, h / self.group, self.group, r, d])?;
            let (k, v) = (self.keys.expand_dims(2)?, self.values.expand_dims(2)?);
            let scores = q.multiply(&scale)?.matmul(k.swap_axes(-1, -2)?)?;
            let mut scores = ops::tanh(scores.divide(&cap)?)?.multiply(&cap)?;
            if let Some(mask) = &self.mask {
                scores = ops::select(mask.expand_dims(2)?, &scores, &hidden)?;
            }
            let shares = ops::softmax_axis(&scores, -1, true)?;
            shares.matmul(&v)?.reshape(&[b, h, r, d])
        };
        made().map_err(failed)
    }
}

fn paged_attention(cx: &Cx<'_>) -> Result<Vec<Array>, DeviceError> {
    let failed = array::failed(cx.op());
    let call = cx.call();
    let cache = *call.cache(1)?;
    let (scale, window, soft_cap) = (call.float(0)?, call.int(1)?, call.float(2)?);
    let &[Dim::Fixed(count), Dim::Fixed(width)] = call.tensor(2)?.shape.dims() else {
        return Err(overflow());
    };
    let tables = cx.integers(2)?;
    let sequences = cx.indices(3, count)?;
    let reach = width.checked_mul(cache.block_len).ok_or_else(overflow)?;
    let positions = cx.indices(4, reach)?;
    let queries = cx.array(0)?;
    let dims = cx.dims(0)?;
    let &[_, heads, depth] = dims.as_slice() else {
        return Err(overflow());
    };
    let kv_heads = i32::try_from(cache.kv_heads).map_err(|_| overflow())?;
    let place = |row: usize| positions.get(row).map_or(0, |p| *p as usize);
    let window = usize::try_from(window).unwrap_or(0);
    let first = |row| match window {
        0 => 0,
        window => (place(row) + 1).saturating_sub(window),
    };
    let size = |n: usize| i32::try_from(n).map_err(|_| overflow());
    let runs = runs(&sequences)?;
    let mut parts = array::room("parts of a batch", runs.len())?;
    for run in &runs {
        cx.goes_on()?;
        let last = run.rows.clone().map(place).max().unwrap_or(0);
        let start = run.rows.clone().map(first).min().unwrap_or(0);
        let tokens = start..last + 1;
        let table = tables.get(run.sequence * width..(run.sequence + 1) * width);
        let table = table.ok_or_else(overflow)?;
        let memory = cx.cache(1)?;
        let keys = gather(&cache, memory, false, table, &tokens)?;
        let values = gather(&cache, memory, true, table, &tokens)?;
        let at_once = rows_at_once(usize::try_from(heads).unwrap_or(1), tokens.len());
        let pieces = run.rows.clone().step_by(at_once);
        let is_all = runs.len() == 1 && run.rows.len() <= at_once;
        for from in pieces {
            let piece = from..run.rows.end.min(from.saturating_add(at_once));
            let rows = size(piece.len())?;
            // One row sees all that was gathered for it alone.
            let mask = match run.rows.len() {
                1 => None,
                _ => {
                    let count = piece.len().checked_mul(tokens.len());
                    let mut seen = array::room("a mask", count.ok_or_else(overflow)?)?;
                    for row in piece.clone() {
                        let sees = first(row)..=place(row);
                        seen.extend(tokens.clone().map(|t| u8::from(sees.contains(&t))));
                    }
                    let dims = [1, 1, rows, size(tokens.len())?];
                    Some(array::from_bytes(&seen, DType::Bool, &dims)?)
                }
            };
            let from = size(from)?;
            let mine = || -> Result<Array, Exception> {
                let mine = sliced(&queries, &[from, 0, 0], &[1; 3], &[rows, heads, depth])?;
                mine.transpose_axes(&[1, 0, 2])?.expand_dims(0)
            };
            let part = Part {
                queries: mine().map_err(&failed)?,
                keys: &keys,
                values: &values,
                mask,
                group: heads / kv_heads,
                scale: scale as f32,
                soft_cap,
            };
            // [1, heads, rows, depth] → [rows, heads, depth]
            let attended = part.attend()?;
            let made = || attended.squeeze_axes(&[0])?.transpose_axes(&[1, 0, 2]);
            let made = made().map_err(&failed)?;
            if !is_all {
                // So that what was gathered for it, and its scores, are gone before the next.
                array::evaluate([&made])?;
                cx.goes_on()?;
            }
            parts.push(made);
        }
    }
    let result = match parts.len() {
        0 => queries.as_dtype(mlx_rs::Dtype::Float32),
        1 => return Ok(parts),
        _ => ops::concatenate(&parts, 0),
    };
    Ok(vec![result.map_err(failed)?])
}

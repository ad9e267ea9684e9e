//! Rotary positions, the paged cache, and attention over it.

use hotcell_graph::{CacheSpec, DType, Shape, op::Call};

use super::{Cx, Entry, Kernel, Made, Wanted, blocks_of, int, wanted::Table};
use crate::{
    backend::DeviceError,
    cuda::{
        gpu::{Arguments, Grid},
        join::Following,
    },
    part::overflow,
};

pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "rope",
        make: rope,
    },
    Entry {
        op: "cache_write",
        make: cache_write,
    },
    Entry {
        op: "paged_attention",
        make: paged_attention,
    },
];

/// Keys of a span, which a block of threads has by itself where there are few rows (`SPAN` in `attention.cu`).
const SPAN: usize = 512;

/// Threads of a block that has a span, or all of them (`THREADS` there).
const THREADS: u32 = 256;

/// Rows up to which spans are computed apart: more fill the device by themselves, and would take much memory.
const FEW_ROWS: usize = 8;

/// Blocks of 128 threads.
fn grid(blocks: [u32; 3]) -> Grid {
    of_threads(blocks, 128)
}

fn of_threads(blocks: [u32; 3], threads: u32) -> Grid {
    Grid {
        blocks,
        threads: [threads, 1, 1],
        shared: 0,
    }
}

/// Heads of rows: `[rows, heads, d]`.
struct Heads {
    x: Shape,
    heads: usize,
    d: usize,
}

impl Heads {
    fn of(call: &Call<'_>, i: usize) -> Option<Self> {
        let x = call.tensor(i).ok()?;
        let [_, heads, d] = x.shape.dims() else {
            return None;
        };
        let (heads, d) = (heads.at(0), d.at(0));
        int(heads).and_then(|_| int(d)).ok()?;
        Some(Self {
            x: x.shape.clone(),
            heads,
            d,
        })
    }

    fn rows(&self, rows: usize) -> usize {
        self.x.dims().first().map_or(0, |dim| dim.at(rows))
    }
}

impl Heads {
    /// The cosines and sines that turn them.
    fn table(&self) -> Option<Wanted> {
        let rows = *self.x.dims().first()?;
        let half = self.d / 2;
        Some(Wanted::Table(Table { rows, half }))
    }
}

struct Rope {
    x: Heads,
    table: Wanted,
    interleaved: bool,
}

impl Rope {
    const NAME: &str = "rope_f32";

    fn of(call: &Call<'_>) -> Option<Self> {
        let x = Heads::of(call, 0)?;
        Some(Self {
            table: x.table()?,
            x,
            interleaved: call.bool(0).ok()?,
        })
    }

    /// Blocks of 128 threads.
    fn blocks(&self, rows: usize) -> Result<u32, DeviceError> {
        let pairs = self.x.rows(rows).checked_mul(self.x.d / 2);
        blocks_of(pairs.and_then(|n| n.checked_mul(self.x.heads)), 128)
    }
}

fn rope(call: &Call<'_>) -> Option<Made> {
    Some((Box::new(Rope::of(call)?), vec![Table::NAME, Rope::NAME]))
}

impl Kernel for Rope {
    fn wants(&self) -> Option<(Wanted, Vec<usize>)> {
        Some((self.table.clone(), vec![1, 2]))
    }

    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let Heads { heads, d, .. } = self.x;
        let arguments = Arguments::default()
            .word(cx.input(0)?)
            .word(cx.input(3)?)
            .word(cx.output(0)?)
            .int(int(self.x.rows(cx.rows))?)
            .int(int(heads)?)
            .int(int(d / 2)?)
            .int(self.interleaved.into());
        let grid = grid([self.blocks(cx.rows)?, 1, 1]);
        // SAFETY: the kernel's arguments (rope.cu), with a table for these rows.
        unsafe { cx.gpu.launch(Self::NAME, grid, &arguments) }
    }
}

/// What kernels are told of a cache.
fn cache_sizes(cache: &CacheSpec) -> Option<[u32; 4]> {
    let each = [
        cache.kv_heads,
        cache.head_dim,
        cache.blocks,
        cache.block_len,
    ];
    cache.bytes()?;
    let mut sizes = [0; 4];
    for (size, n) in sizes.iter_mut().zip(each) {
        *size = int(n).ok()?;
    }
    Some(sizes)
}

struct CacheWrite {
    name: &'static str,
    /// The kernel that turns as well.
    turning: &'static str,
    keys: Heads,
    sizes: [u32; 4],
}

impl CacheWrite {
    fn of(call: &Call<'_>) -> Option<Self> {
        let cache = call.cache(0).ok()?;
        let (name, turning) = match cache.dtype {
            DType::F32 => ("cache_write_f32", "rope_write_f32"),
            DType::F16 => ("cache_write_f16", "rope_write_f16"),
            DType::BF16 => ("cache_write_bf16", "rope_write_bf16"),
            DType::Q8_0 => ("cache_write_q8_0", "rope_write_q8_0"),
            _ => return None,
        };
        Some(Self {
            name,
            turning,
            keys: Heads::of(call, 1)?,
            sizes: cache_sizes(cache)?,
        })
    }

    /// Blocks of 128 threads.
    fn blocks(&self, rows: usize) -> Result<u32, DeviceError> {
        let warps = self.keys.rows(rows).checked_mul(self.keys.heads);
        let warps = warps.and_then(|n| n.checked_mul(self.keys.d.div_ceil(32))?.checked_mul(2));
        blocks_of(warps, 4)
    }

    /// What kernels are told: keys, values and slots, and what turns the keys, if they are to be turned.
    fn told(
        &self,
        arguments: Arguments,
        [keys, values, cache, slots]: [u64; 4],
        (table, interleaved): (u64, bool),
        cx: &Cx<'_>,
    ) -> Result<Arguments, DeviceError> {
        let [kv_heads, d, blocks, block_len] = self.sizes;
        Ok(arguments
            .word(keys)
            .word(values)
            .word(table)
            .word(cache)
            .word(slots)
            .int(int(self.keys.rows(cx.rows))?)
            .int(kv_heads)
            .int(d)
            .int(blocks)
            .int(block_len)
            .int(interleaved.into())
            .word(cx.faults))
    }
}

fn cache_write(call: &Call<'_>) -> Option<Made> {
    let kernel = CacheWrite::of(call)?;
    let names = vec![kernel.name];
    Some((Box::new(kernel), names))
}

impl Kernel for CacheWrite {
    fn reads_indices(&self) -> bool {
        true
    }

    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let [cache, keys, values, slots] = [0, 1, 2, 3].map(|i| cx.input(i));
        let all = [keys?, values?, cache?, slots?];
        let arguments = self.told(Arguments::default(), all, (0, false), cx)?;
        let grid = grid([self.blocks(cx.rows)?, 1, 1]);
        // SAFETY: the kernel's arguments (rope.cu), of a cache of this size.
        unsafe { cx.gpu.launch(self.name, grid, &arguments) }
    }
}

/// Queries that are turned, and keys that are turned and written: what three nodes do.
struct Turned {
    queries: Rope,
    write: CacheWrite,
}

/// What turns the one of both ropes and writes the other's result, which nobody else reads.
pub(super) fn turned(nodes: &Following<'_>) -> Option<Made> {
    let [of_queries, of_keys, written, ..] = &nodes.calls[..] else {
        return None;
    };
    let (queries, keys) = (Rope::of(of_queries)?, Rope::of(of_keys)?);
    let write = CacheWrite::of(written)?;
    let same = |i| nodes.input(0, i) == nodes.input(1, i);
    // What one of them makes must not be what another one reads, but for the keys that are written.
    let is_read_too =
        nodes.is_result(1, 0, 0) || nodes.is_result(2, 2, 0) || nodes.is_result(2, 2, 1);
    let is_one = same(1)
        && same(2)
        && queries.table == keys.table
        && queries.interleaved == keys.interleaved
        && nodes.is_result(2, 1, 1)
        && nodes.is_within(1, 3)
        && !is_read_too;
    let names = vec![Table::NAME, write.turning];
    is_one.then(|| -> Made { (Box::new(Turned { queries, write }), names) })
}

impl Kernel for Turned {
    fn wants(&self) -> Option<(Wanted, Vec<usize>)> {
        self.queries.wants()
    }

    fn reads_indices(&self) -> bool {
        true
    }

    /// Of its inputs the first three are the queries', the next three the keys', and the next four those of what writes. It does not write
    /// the keys' result.
    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let first = self.queries.blocks(cx.rows)?;
        let arguments = Arguments::default()
            .word(cx.input(0)?)
            .word(cx.output(0)?)
            .int(int(self.queries.x.heads)?)
            .int(first);
        let [keys, cache, values, slots] = [3, 6, 8, 9].map(|i| cx.input(i));
        let all = [keys?, values?, cache?, slots?];
        let table = (cx.input(10)?, self.queries.interleaved);
        let arguments = self.write.told(arguments, all, table, cx)?;
        let blocks = first.checked_add(self.write.blocks(cx.rows)?);
        let grid = grid([blocks.ok_or_else(overflow)?, 1, 1]);
        // SAFETY: the kernel's arguments (rope.cu), of a cache of this size and a table for these rows.
        unsafe { cx.gpu.launch(self.write.turning, grid, &arguments) }
    }
}

struct PagedAttention {
    whole: &'static str,
    spans: &'static str,
    queries: Heads,
    sizes: [u32; 4],
    sequences: u32,
    max_blocks: u32,
    /// Spans of the longest sequence that tables can name.
    most_spans: usize,
    scale: f32,
    window: u32,
    soft_cap: f32,
}

/// The two kernels of a cache's dtype for heads of up to 128 or 256.
macro_rules! attention {
    ($dtype:literal, $d:expr) => {
        match $d {
            1..=128 => Some((
                concat!("attention_whole_", $dtype, "_128"),
                concat!("attention_spans_", $dtype, "_128"),
            )),
            129..=256 => Some((
                concat!("attention_whole_", $dtype, "_256"),
                concat!("attention_spans_", $dtype, "_256"),
            )),
            _ => None,
        }
    };
}

fn paged_attention(call: &Call<'_>) -> Option<Made> {
    let cache = call.cache(1).ok()?;
    let (whole, spans) = match cache.dtype {
        DType::F32 => attention!("f32", cache.head_dim),
        DType::F16 => attention!("f16", cache.head_dim),
        DType::BF16 => attention!("bf16", cache.head_dim),
        DType::Q8_0 => attention!("q8_0", cache.head_dim),
        _ => None,
    }?;
    let [sequences, max_blocks] = call.tensor(2).ok()?.shape.dims() else {
        return None;
    };
    let (sequences, max_blocks) = (sequences.at(0), max_blocks.at(0));
    let kernel = PagedAttention {
        whole,
        spans,
        queries: Heads::of(call, 0)?,
        sizes: cache_sizes(cache)?,
        sequences: int(sequences).ok()?,
        max_blocks: int(max_blocks).ok()?,
        most_spans: max_blocks.checked_mul(cache.block_len)?.div_ceil(SPAN),
        scale: call.float(0).ok()? as f32,
        window: u32::try_from(call.int(1).ok()?).ok()?,
        soft_cap: call.float(2).ok()? as f32,
    };
    Some((Box::new(kernel), vec![whole, spans, "attention_add"]))
}

impl Kernel for PagedAttention {
    fn reads_indices(&self) -> bool {
        true
    }

    fn scratch(&self, rows: usize) -> Option<usize> {
        if self.most_spans <= 1 {
            return Some(0);
        }
        let rows = self.queries.rows(rows).min(FEW_ROWS);
        rows.checked_mul(self.queries.heads)?
            .checked_mul(self.most_spans)?
            .checked_mul((2 + self.queries.d) * 4)
    }

    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let Heads { heads, d, .. } = self.queries;
        let rows = self.queries.rows(cx.rows);
        let [kv_heads, _, cache_blocks, block_len] = self.sizes;
        let groups = heads
            .checked_div(kv_heads as usize)
            .map(|each| each.div_ceil(8));
        let groups = groups.and_then(|n| n.checked_mul(kv_heads as usize));
        let apart = rows <= FEW_ROWS && self.most_spans > 1;
        let spans = if apart { int(self.most_spans)? } else { 1 };
        let arguments = Arguments::default()
            .word(cx.input(0)?)
            .word(cx.input(1)?)
            .word(cx.input(2)?)
            .word(cx.input(3)?)
            .word(cx.input(4)?)
            .word(0)
            .word(cx.output(0)?)
            .word(cx.scratch)
            .int(int(heads)?)
            .int(kv_heads)
            .int(int(d)?)
            .int(cache_blocks)
            .int(block_len)
            .int(self.sequences)
            .int(self.max_blocks)
            .int(self.scale.to_bits())
            .int(self.window)
            .int(self.soft_cap.to_bits())
            .int(spans)
            .word(cx.faults);
        let name = if apart { self.spans } else { self.whole };
        let blocks = [int(rows)?, int(groups.ok_or_else(overflow)?)?, spans];
        // SAFETY: the kernel's arguments (attention.cu), of a cache and tables of these sizes.
        unsafe {
            cx.gpu
                .launch(name, of_threads(blocks, THREADS), &arguments)?;
        }
        if !apart {
            return Ok(());
        }
        let added = Arguments::default()
            .word(cx.scratch)
            .word(cx.input(3)?)
            .word(cx.input(4)?)
            .word(0)
            .word(cx.output(0)?)
            .int(int(heads)?)
            .int(int(d)?)
            .int(cache_blocks)
            .int(block_len)
            .int(self.sequences)
            .int(self.max_blocks)
            .int(self.window)
            .int(spans);
        let blocks = [int(rows)?, int(heads)?, 1];
        // SAFETY: as above; the records are those that the kernel before left.
        unsafe { cx.gpu.launch("attention_add", grid(blocks), &added) }
    }
}

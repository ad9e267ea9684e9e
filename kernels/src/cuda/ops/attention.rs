//! Rotary positions, the paged cache, and attention over it.

use hotcell_graph::{CacheSpec, DType, Shape, op::Call};

use super::{Cx, Entry, Kernel, Made, int};
use crate::{
    backend::DeviceError,
    cuda::gpu::{Arguments, Grid},
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

/// Rows up to which spans are computed apart: more fill the device by themselves, and would take much memory.
const FEW_ROWS: usize = 8;

/// Blocks of 128 threads.
fn grid(blocks: [u32; 3]) -> Grid {
    Grid {
        blocks,
        threads: [128, 1, 1],
        shared: 0,
    }
}

/// So many blocks of `each`.
fn blocks(n: Option<usize>, each: usize) -> Result<u32, DeviceError> {
    int(n.ok_or_else(overflow)?.div_ceil(each))
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

struct Rope {
    x: Heads,
    interleaved: bool,
}

fn rope(call: &Call<'_>) -> Option<Made> {
    let kernel = Rope {
        x: Heads::of(call, 0)?,
        interleaved: call.bool(0).ok()?,
    };
    Some((Box::new(kernel), vec!["rope_table", "rope_f32"]))
}

impl Kernel for Rope {
    fn scratch(&self, rows: usize) -> Option<usize> {
        self.x.rows(rows).checked_mul(self.x.d)?.checked_mul(4)
    }

    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let Heads { heads, d, .. } = self.x;
        let (rows, half) = (self.x.rows(cx.rows), d / 2);
        let table = Arguments::default()
            .word(cx.input(1)?)
            .word(cx.input(2)?)
            .word(cx.scratch)
            .int(int(rows)?)
            .int(int(half)?);
        let pairs = rows.checked_mul(half);
        let of_table = grid([blocks(pairs, 128)?, 1, 1]);
        // SAFETY: the kernel's arguments (rope.cu); the scratch memory is as large as `scratch` says.
        unsafe { cx.gpu.launch("rope_table", of_table, &table)? };
        let turned = Arguments::default()
            .word(cx.input(0)?)
            .word(cx.scratch)
            .word(cx.output(0)?)
            .int(int(rows)?)
            .int(int(heads)?)
            .int(int(half)?)
            .int(self.interleaved.into());
        let pairs = pairs.and_then(|n| n.checked_mul(heads));
        let of_heads = grid([blocks(pairs, 128)?, 1, 1]);
        // SAFETY: as above.
        unsafe { cx.gpu.launch("rope_f32", of_heads, &turned) }
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
    keys: Heads,
    sizes: [u32; 4],
}

fn cache_write(call: &Call<'_>) -> Option<Made> {
    let cache = call.cache(0).ok()?;
    let name = match cache.dtype {
        DType::F32 => "cache_write_f32",
        DType::F16 => "cache_write_f16",
        DType::BF16 => "cache_write_bf16",
        DType::Q8_0 => "cache_write_q8_0",
        _ => return None,
    };
    let kernel = CacheWrite {
        name,
        keys: Heads::of(call, 1)?,
        sizes: cache_sizes(cache)?,
    };
    Some((Box::new(kernel), vec![name]))
}

impl Kernel for CacheWrite {
    fn reads_indices(&self) -> bool {
        true
    }

    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let rows = self.keys.rows(cx.rows);
        let [kv_heads, d, cache_blocks, block_len] = self.sizes;
        let warps = rows
            .checked_mul(self.keys.heads)
            .and_then(|n| n.checked_mul(self.keys.d.div_ceil(32))?.checked_mul(2));
        let arguments = Arguments::default()
            .word(cx.input(1)?)
            .word(cx.input(2)?)
            .word(0)
            .word(cx.input(0)?)
            .word(cx.input(3)?)
            .int(int(rows)?)
            .int(kv_heads)
            .int(d)
            .int(cache_blocks)
            .int(block_len)
            .int(0)
            .word(cx.faults);
        // SAFETY: the kernel's arguments (rope.cu), of a cache of this size.
        unsafe {
            cx.gpu
                .launch(self.name, grid([blocks(warps, 4)?, 1, 1]), &arguments)
        }
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
        unsafe { cx.gpu.launch(name, grid(blocks), &arguments)? };
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

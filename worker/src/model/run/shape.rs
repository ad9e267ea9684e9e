//! The sizes that a model is run with, and how much of its memory each kind of cache blocks has.

use std::ops::Range;

use hotcell_graph::DType;
use hotcell_kernels::{
    backend::{Device, DeviceError},
    communicator::Share,
    plan::PlanHints,
};

use super::{
    RunError,
    draws::{self, ROW_BYTES, draws_on},
    pattern,
};
use crate::{
    model::{
        config::ModelConfig,
        constants::stack_bytes,
        graph::{body, ending, head},
        weave::{BuildError, Source},
    },
    weights::ModelSource,
};

/// Tokens of one cache block.
const BLOCK_LEN: usize = 16;
/// Rows one step computes at most: decoding sequences first, prompt chunks in the rest.
const MAX_ROWS: usize = 128;
/// Sequences that run at once.
const MAX_SEQUENCES: usize = 64;
/// Bytes that the cache takes unless one whole context needs more. Pages cost nothing until written.
const CACHE_BUDGET: usize = 1 << 30;
/// Bytes that the cache takes at most; a context that needs more is cut to what fits.
const CACHE_CEILING: usize = 32 << 30;
/// Whole contexts that the cache holds at most.
const MAX_CONTEXTS: usize = 16;

/// Kinds of layers of one model, by how far back they look, at most: without a window, and with one.
pub const KINDS: usize = 2;

/// Sizes that a model is run with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunShape {
    /// Rows of one step at most.
    pub max_rows: usize,
    /// Sequences at once at most; also rows of logits of one step.
    pub max_sequences: usize,
    /// Positions of one sequence at most.
    pub context: usize,
    /// Tokens per cache block.
    pub block_len: usize,
    /// Cache blocks in all, of the first kind of layers.
    pub blocks: usize,
    /// Cache blocks in all for layers with a window, in a model that has others too.
    pub window_blocks: usize,
    /// How the cache stores numbers.
    pub cache_dtype: DType,
    /// Which part of the model is computed here.
    pub parts: Parts,
}

/// How processes that compute a model together divide it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Division {
    /// Each has its part of the heads, and of what every other matrix gives: tensor parallelism.
    #[default]
    Columns,
    /// Each has its part of the layers, and hands on what these give: a pipeline.
    Layers,
}

/// The part of a model that is one process's; by default all of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// Which process it is of how many.
    pub share: Share,
    /// How they divide it.
    pub division: Division,
}

impl Parts {
    /// Its part of the heads, and of what every matrix gives.
    pub fn columns(&self) -> Share {
        match self.division {
            Division::Columns => self.share,
            Division::Layers => Share::default(),
        }
    }

    /// Its part of the layers.
    pub fn stage(&self) -> Share {
        match self.division {
            Division::Columns => Share::default(),
            Division::Layers => self.share,
        }
    }

    /// Which of so many layers are its own. Parts differ by one at most; there may be none.
    pub fn layers(&self, all: usize) -> Range<usize> {
        let Share { rank, members } = self.stage();
        let first = |rank: usize| rank.saturating_mul(all) / members.max(1);
        first(rank)..first(rank + 1)
    }
}

/// Bytes that a model takes besides its weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Its cache, once all of it is written.
    pub cache: u64,
    /// Everything else.
    pub work: u64,
}

/// Whether a cache can store the model's heads in this dtype.
pub(super) fn check_cache(config: &ModelConfig, cache_dtype: DType) -> Result<(), DeviceError> {
    let d = config.head_dim;
    match cache_dtype.row_bytes(d) {
        Some(_) => Ok(()),
        None => Err(DeviceError::Unsupported {
            backend: "cpu",
            op: "cache_write",
            why: format!(
                "heads of {d} are no whole blocks of {cache_dtype}; choose another dtype of the KV cache"
            ),
        }),
    }
}

/// What a model of this shape takes besides its weights and its cache, by a dry run.
fn bytes_besides_cache(
    device: &dyn Device,
    source: &ModelSource,
    shape: &RunShape,
) -> Result<usize, RunError> {
    let ModelSource {
        config, weights, ..
    } = source;
    let dry = PlanHints {
        allocate: false,
        together: shape.parts.columns().members > 1,
        ..PlanHints::default()
    };
    let kinds = config.kinds();
    let rows = shape.max_rows.max(shape.max_sequences) * (4 + kinds)
        + kinds * shape.max_sequences * shape.blocks_per_sequence();
    let states = match shape.parts.stage().members {
        1 => 2,
        // On their way to the next stage, in two places.
        _ => 4,
    };
    let values = states * shape.max_rows * config.hidden + shape.max_sequences * config.vocab;
    let mut bytes = (rows + values) * 4;
    if draws_on(device, config.vocab) {
        let graph = draws::graph(shape.max_sequences, config.vocab).map_err(BuildError::from)?;
        bytes += shape.max_sequences * ROW_BYTES + device.plan(&graph, &dry)?.memory().arena;
    }
    let pattern = pattern(source, shape);
    for graph in [body(pattern)?, head(pattern)?, ending(pattern)?] {
        bytes += device.plan(&graph.graph, &dry)?.memory().arena;
        for from in &graph.sources {
            if let Source::Stack(pieces) = from {
                bytes = bytes.saturating_add(stack_bytes(weights, pieces)?);
            }
        }
    }
    Ok(bytes)
}

/// What blocks take, and how many of them are of use.
struct BlockSizes {
    /// Bytes of a block, by kind of layers; 0 for a kind that the model has not.
    bytes: [usize; KINDS],
    /// Blocks of one whole context.
    context: usize,
    /// Blocks of the second kind that one sequence has at most.
    window: usize,
}

impl BlockSizes {
    fn new(config: &ModelConfig, cache_dtype: DType) -> Self {
        // Where a head is no whole blocks, there is no cache ([`check_cache`]).
        let head = cache_dtype.row_bytes(config.head_dim).unwrap_or(0);
        let token = head.saturating_mul(2).saturating_mul(config.kv_heads);
        let mut bytes = [0usize; KINDS];
        for layer in 0..config.layers {
            let bytes = &mut bytes[config.kind(layer)];
            *bytes = bytes.saturating_add(token.saturating_mul(BLOCK_LEN).max(1));
        }
        let context = config.context.div_ceil(BLOCK_LEN).max(1);
        // Those of the window, of a step's rows, of a beginning and an end, and a copy of one that was shared.
        let window = config.sliding_window.unwrap_or(0).saturating_add(MAX_ROWS);
        let window = (window.div_ceil(BLOCK_LEN).saturating_add(2)).min(context);
        Self {
            bytes,
            context,
            window,
        }
    }

    /// The same of blocks that so many processes have each.
    fn held(mut self, holders: usize) -> Self {
        self.bytes = self.bytes.map(|bytes| bytes.saturating_mul(holders));
        self
    }

    /// Bytes of one whole context.
    fn whole(&self) -> usize {
        let window = self.window.saturating_mul(self.bytes[1]);
        self.context
            .saturating_mul(self.bytes[0])
            .saturating_add(window)
    }

    /// How many blocks of each kind fit into so many bytes. Of an even split, blocks for windows give up to a half, so that
    /// longer contexts fit; but one sequence comes first.
    fn within(&self, bytes: usize) -> [usize; KINDS] {
        let [whole, window] = self.bytes;
        let most = self.context.saturating_mul(MAX_CONTEXTS);
        let mut windows = 0;
        if window > 0 {
            let even = bytes / whole.saturating_add(window).max(1);
            let spare = bytes.saturating_sub(self.context.saturating_mul(whole)) / window;
            let all = self.window.saturating_mul(MAX_SEQUENCES);
            windows = even.min(self.window.max((even / 2).min(spare).min(all)));
        }
        let left = bytes.saturating_sub(windows.saturating_mul(window));
        [(left / whole.max(1)).min(most), windows.min(most)]
    }

    /// Positions of one sequence for which there is room.
    fn context(&self, config: &ModelConfig, [whole, windows]: [usize; KINDS]) -> usize {
        let blocks = match self.bytes[1] > 0 && windows < self.window {
            true => whole.min(windows),
            false => whole,
        };
        config.context.min(blocks.saturating_mul(BLOCK_LEN))
    }
}

/// Of each kind of layers: how many the model has, and the bytes of one block in all of them.
pub(super) fn kind_sizes(config: &ModelConfig, shape: &RunShape) -> Vec<(usize, usize)> {
    let of = |kind| {
        let layers = (0..config.layers).filter(|layer| config.kind(*layer) == kind);
        let (layers, spec) = (layers.count(), shape.cache(config, kind));
        let block = spec.bytes().unwrap_or(usize::MAX) / spec.blocks.max(1);
        (layers, layers.saturating_mul(block))
    };
    (0..config.kinds()).map(of).collect()
}

impl RunShape {
    /// Sizes for a model with this cache dtype.
    pub fn for_model(config: &ModelConfig, cache_dtype: DType) -> Self {
        let sizes = BlockSizes::new(config, cache_dtype);
        let least = sizes.bytes[0].saturating_add(sizes.bytes[1]);
        let bytes = CACHE_BUDGET
            .max(sizes.whole())
            .min(CACHE_CEILING)
            .max(least);
        Self::with_blocks(config, cache_dtype, &sizes, sizes.within(bytes))
    }

    fn with_blocks(
        config: &ModelConfig,
        cache_dtype: DType,
        sizes: &BlockSizes,
        blocks: [usize; KINDS],
    ) -> Self {
        Self {
            max_rows: MAX_ROWS,
            max_sequences: MAX_SEQUENCES,
            context: sizes.context(config, blocks),
            block_len: BLOCK_LEN,
            blocks: blocks[0],
            window_blocks: blocks[1],
            cache_dtype,
            parts: Parts::default(),
        }
    }

    /// The same within so many bytes of all members together: what plans and rows take, as a dry run finds it, and the rest for the cache. A
    /// context for which there is too little is cut.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when nothing is left for the cache, and what [`Runner::new`](super::Runner::new) says.
    pub fn within(
        device: &dyn Device,
        source: &ModelSource,
        cache_dtype: DType,
        bytes: u64,
        parts: Parts,
    ) -> Result<Self, RunError> {
        let config = &source.config;
        check_cache(config, cache_dtype)?;
        let whole = Self {
            parts,
            ..Self::for_model(config, cache_dtype)
        };
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let besides = whole.besides(device, source)?;
        let sizes = BlockSizes::new(config, cache_dtype).held(whole.holders(config));
        let blocks = sizes.within(bytes.saturating_sub(besides));
        let shape = Self {
            parts,
            ..Self::with_blocks(config, cache_dtype, &sizes, blocks)
        };
        if shape.context == 0 {
            let [one, other] = sizes.bytes;
            return Err(DeviceError::OutOfMemory {
                what: "a model within its budget, with one block of cache,".to_owned(),
                bytes: besides.saturating_add(one).saturating_add(other),
            }
            .into());
        }
        Ok(shape)
    }

    /// Memory that a model of this shape takes, by a dry run.
    ///
    /// # Errors
    /// What [`Runner::new`](super::Runner::new) says of its graphs.
    pub fn sizes(&self, device: &dyn Device, source: &ModelSource) -> Result<Sizes, RunError> {
        let config = &source.config;
        let of = BlockSizes::new(config, self.cache_dtype).held(self.holders(config));
        let of = of.bytes;
        let bytes = |kind| self.blocks_of(kind).saturating_mul(of[kind]);
        Ok(Sizes {
            cache: bytes(0).saturating_add(bytes(1)) as u64,
            work: self.besides(device, source)? as u64,
        })
    }

    /// What all members of the communicator take besides the cache.
    fn besides(&self, device: &dyn Device, source: &ModelSource) -> Result<usize, RunError> {
        let members = self.parts.share.members;
        if self.parts.division == Division::Columns {
            let each = bytes_besides_cache(device, source, self)?;
            return Ok(each.saturating_mul(members));
        }
        // Some have more layers than others.
        let mut all = 0usize;
        for rank in 0..members {
            let share = Share { rank, members };
            let parts = Parts {
                share,
                ..self.parts
            };
            let own = bytes_besides_cache(device, source, &Self { parts, ..*self })?;
            all = all.saturating_add(own);
        }
        Ok(all)
    }

    /// How many of them hold the whole cache, if they share neither its heads nor its layers.
    fn holders(&self, config: &ModelConfig) -> usize {
        match self.share_of_heads(config).members {
            1 => self.parts.columns().members,
            _ => 1,
        }
    }

    /// Cache blocks in all of a kind of layers.
    pub fn blocks_of(&self, kind: usize) -> usize {
        match kind {
            0 => self.blocks,
            _ => self.window_blocks,
        }
    }

    /// Blocks of one sequence at most.
    pub fn blocks_per_sequence(&self) -> usize {
        self.context.div_ceil(self.block_len)
    }
}

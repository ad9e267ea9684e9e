//! A model's graphs, whatever its architecture.
//!
//! The *body* from token ids to hidden states, writing the cache; the *head* from chosen hidden states to
//! logits, so that logits are computed only where a token is drawn; the *ending* to what the head would read.

use hotcell_graph::{CacheSpec, DType, Shape, Value};
use hotcell_kernels::communicator::Share;

use super::{
    config::{Architecture, ModelConfig},
    gemma3, llama,
    parts::Rows,
    qwen3_moe,
    run::RunShape,
    weave::{BuildError, Pattern, Source, Sourced, Weaver},
};

/// The body: token ids to hidden states `[rows, hidden]`. Of one that several processes divide by layers, this one's
/// part: from what the process before it hands on, if there is one.
///
/// # Errors
/// When a tensor is missing or has another shape than the configuration says.
pub fn body(pattern: Pattern<'_>) -> Result<Sourced, BuildError> {
    let mut w = Weaver::new(pattern, pattern.shape.max_rows);
    let config = pattern.config;
    let parts = pattern.shape.parts;
    let (rows, mut x) = match parts.stage().rank {
        0 => {
            let tokens = w.per_row(Source::Tokens, "tokens")?;
            let rows = Rows::new(&mut w)?;
            (rows, embedded(&mut w, tokens)?)
        }
        _ => {
            let hidden = Shape::rows(&[config.hidden])?;
            let x = w.input(Source::Handed, "handed on", DType::F32, hidden)?;
            (Rows::new(&mut w)?, x)
        }
    };
    let layer = match config.architecture {
        Architecture::Gemma3 => gemma3::layer,
        Architecture::Qwen3Moe => qwen3_moe::layer,
        Architecture::Llama | Architecture::Mistral | Architecture::Qwen2 | Architecture::Qwen3 => {
            llama::layer
        }
    };
    for i in parts.layers(config.layers) {
        x = layer(&mut w, &rows, i, x)?;
    }
    w.finish(x)
}

/// What the first layer reads of each token.
fn embedded(w: &mut Weaver<'_>, tokens: Value) -> Result<Value, BuildError> {
    let (config, name) = (w.config, w.names.token_embedding());
    let embedding = w.weight(name, &[config.vocab, config.hidden])?;
    let x = w.builder.get_rows(embedding, tokens)?;
    match config.architecture {
        Architecture::Gemma3 => gemma3::scaled(w, x),
        _ => Ok(x),
    }
}

/// Final states of the picked rows.
fn picked_states(w: &mut Weaver<'_>) -> Result<Value, BuildError> {
    let (width, final_norm) = (w.config.hidden, w.names.final_norm());
    let hidden = Shape::fixed(&[w.shape.max_rows, width])?;
    let hidden = w.input(Source::Hidden, "hidden", DType::F32, hidden)?;
    let picks = w.per_row(Source::Picks, "picks")?;
    let x = w.builder.get_rows(hidden, picks)?;
    w.norm(x, final_norm, width)
}

/// The ending: hidden states of the picked rows to final states `[rows, hidden]`, which the head makes logits of.
///
/// # Errors
/// When a tensor is missing or has another shape than the configuration says.
pub fn ending(pattern: Pattern<'_>) -> Result<Sourced, BuildError> {
    let mut w = Weaver::new(pattern, pattern.shape.max_rows);
    let states = picked_states(&mut w)?;
    w.finish(states)
}

/// The head: hidden states of the picked rows to logits `[rows, vocab]`.
///
/// # Errors
/// When a tensor is missing or has another shape than the configuration says.
pub fn head(pattern: Pattern<'_>) -> Result<Sourced, BuildError> {
    let mut w = Weaver::new(pattern, pattern.shape.max_sequences);
    let x = picked_states(&mut w)?;
    let (config, names) = (pattern.config, pattern.names);
    let weight = if config.tied_embeddings {
        names.token_embedding()
    } else {
        names.output_head()
    };
    let mut logits = w.linear(x, weight, None, config.vocab, config.hidden)?;
    if let Some(cap) = config.logit_cap {
        let cap = w.scalar(cap as f32)?;
        let share = w.builder.div(logits, cap)?;
        let share = w.builder.tanh(share)?;
        logits = w.builder.mul(share, cap)?;
    }
    w.finish(logits)
}

impl RunShape {
    /// The cache of a layer of a kind.
    pub fn cache(&self, config: &ModelConfig, kind: usize) -> CacheSpec {
        CacheSpec {
            dtype: self.cache_dtype,
            blocks: self.blocks_of(kind),
            block_len: self.block_len,
            kv_heads: self.share_of_heads(config).of(config.kv_heads),
            head_dim: config.head_dim,
        }
    }

    /// Which part of the heads is computed here: all of them, where they cannot be shared out whole.
    pub fn share_of_heads(&self, config: &ModelConfig) -> Share {
        let columns = self.parts.columns();
        let shared = [config.heads, config.kv_heads].map(|n| columns.divides(n));
        match shared {
            [true, true] => columns,
            _ => Share::default(),
        }
    }
}

//! The Llama family as graphs: Llama, Mistral, Qwen2, Qwen3.
//!
//! They differ in biases, norms of heads, windows and frequencies, all of which [`ModelConfig`] names.
//! Two graphs: the *body* from token ids to hidden states, writing the cache; the *head* from chosen
//! hidden states to logits, so that logits are computed only where a token is drawn.

use hotcell_graph::{CacheSpec, DType, Graph, GraphBuilder, GraphError, Shape, TensorSpec, Value};

use super::config::ModelConfig;
use crate::{
    format::ModelError,
    model::run::RunShape,
    weights::{NameScheme, Weights},
};

/// Where the bytes of a graph's input come from.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// A weight, in place in its file.
    Weight(String),
    /// A small weight (norm, bias) converted to f32.
    Vector(String),
    /// The inverse frequencies of the positions.
    Frequencies,
    /// The KV cache of a layer.
    Cache(usize),
    /// Token ids, one per row.
    Tokens,
    /// Positions in their sequences, one per row.
    Positions,
    /// Which block table a row reads, one per row.
    Sequences,
    /// Where a row's keys and values go, one per row.
    Slots,
    /// Block tables of all sequences.
    Tables,
    /// Hidden states that the body computed.
    Hidden,
    /// Which of them the head reads, one per row.
    Picks,
}

/// A graph and where each of its inputs comes from.
#[derive(Debug)]
pub struct Sourced {
    /// The graph.
    pub graph: Graph,
    /// One source per input of the graph.
    pub sources: Vec<Source>,
}

/// Why a model has no graphs.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// A tensor is missing or has another shape.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Sizes that the catalogue refuses.
    #[error("the model's sizes do not fit together: {0}")]
    Graph(#[from] GraphError),
}

struct Weaver<'a> {
    builder: GraphBuilder,
    sources: Vec<Source>,
    weights: &'a Weights,
}

impl<'a> Weaver<'a> {
    fn new(max_rows: usize, weights: &'a Weights) -> Self {
        Self {
            builder: GraphBuilder::new(max_rows),
            sources: vec![],
            weights,
        }
    }

    fn matrix(&mut self, name: &str, n: usize, k: usize) -> Result<Value, BuildError> {
        let dtype = self.weights.expect(name, &[n, k])?.dtype;
        let spec = TensorSpec::new(dtype, Shape::fixed(&[n, k])?)?;
        self.sources.push(Source::Weight(name.to_owned()));
        Ok(self.builder.constant(name, spec)?)
    }

    fn vector(&mut self, name: &str, n: usize) -> Result<Value, BuildError> {
        self.weights.expect(name, &[n])?;
        self.sources.push(Source::Vector(name.to_owned()));
        Ok(self
            .builder
            .constant(name, TensorSpec::new(DType::F32, Shape::fixed(&[n])?)?)?)
    }

    fn input(
        &mut self,
        source: Source,
        name: &str,
        dtype: DType,
        shape: Shape,
    ) -> Result<Value, BuildError> {
        self.sources.push(source);
        Ok(self.builder.tensor(name, TensorSpec::new(dtype, shape)?)?)
    }

    fn per_row(&mut self, source: Source, name: &str) -> Result<Value, BuildError> {
        self.input(source, name, DType::I32, Shape::rows(&[])?)
    }

    /// `x @ wᵀ (+ bias)`.
    fn linear(
        &mut self,
        x: Value,
        weight: &str,
        bias: Option<&str>,
        n: usize,
        k: usize,
    ) -> Result<Value, BuildError> {
        let w = self.matrix(weight, n, k)?;
        let y = self.builder.mul_mat(x, w)?;
        match bias {
            Some(name) => {
                let b = self.vector(name, n)?;
                Ok(self.builder.add(y, b)?)
            }
            None => Ok(y),
        }
    }

    fn norm(&mut self, x: Value, weight: &str, n: usize, eps: f32) -> Result<Value, BuildError> {
        let w = self.vector(weight, n)?;
        Ok(self.builder.rms_norm(x, Some(w), f64::from(eps))?)
    }
}

/// What every layer reads besides its weights.
#[derive(Clone, Copy)]
struct Rows {
    positions: Value,
    sequences: Value,
    slots: Value,
    tables: Value,
    frequencies: Value,
}

/// The body: token ids to hidden states `[rows, hidden]`.
///
/// # Errors
/// When a tensor is missing or has another shape than the configuration says.
pub fn body(
    config: &ModelConfig,
    names: NameScheme,
    weights: &Weights,
    shape: &RunShape,
) -> Result<Sourced, BuildError> {
    let mut w = Weaver::new(shape.max_rows, weights);
    let tokens = w.per_row(Source::Tokens, "tokens")?;
    let positions = w.per_row(Source::Positions, "positions")?;
    let sequences = w.per_row(Source::Sequences, "sequences")?;
    let slots = w.per_row(Source::Slots, "slots")?;
    let tables = Shape::fixed(&[shape.max_sequences, shape.blocks_per_sequence()])?;
    let tables = w.input(Source::Tables, "tables", DType::I32, tables)?;
    let half = Shape::fixed(&[config.head_dim / 2])?;
    let frequencies = w.input(Source::Frequencies, "frequencies", DType::F32, half)?;
    let rows = Rows {
        positions,
        sequences,
        slots,
        tables,
        frequencies,
    };

    let embedding = w.matrix(names.token_embedding(), config.vocab, config.hidden)?;
    let mut x = w.builder.get_rows(embedding, tokens)?;
    for layer in 0..config.layers {
        x = attention(&mut w, config, names, shape, layer, rows, x)?;
        x = feed_forward(&mut w, config, names, layer, x)?;
    }
    Ok(Sourced {
        graph: w.builder.finish(&[x])?,
        sources: w.sources,
    })
}

fn attention(
    w: &mut Weaver<'_>,
    config: &ModelConfig,
    names: NameScheme,
    shape: &RunShape,
    layer: usize,
    rows: Rows,
    x: Value,
) -> Result<Value, BuildError> {
    let ModelConfig {
        hidden,
        heads,
        kv_heads,
        head_dim: d,
        rms_eps: eps,
        ..
    } = *config;
    let normed = w.norm(x, &names.attn_norm(layer), hidden, eps)?;
    let bias = |name: String, has: bool| has.then_some(name);
    let q_bias = bias(names.q_bias(layer), config.qkv_bias);
    let k_bias = bias(names.k_bias(layer), config.qkv_bias);
    let v_bias = bias(names.v_bias(layer), config.qkv_bias);
    let o_bias = bias(names.o_bias(layer), config.o_bias);
    let q = w.linear(
        normed,
        &names.q(layer),
        q_bias.as_deref(),
        heads * d,
        hidden,
    )?;
    let k = w.linear(
        normed,
        &names.k(layer),
        k_bias.as_deref(),
        kv_heads * d,
        hidden,
    )?;
    let v = w.linear(
        normed,
        &names.v(layer),
        v_bias.as_deref(),
        kv_heads * d,
        hidden,
    )?;
    let mut q = w.builder.reshape(q, Shape::rows(&[heads, d])?)?;
    let mut k = w.builder.reshape(k, Shape::rows(&[kv_heads, d])?)?;
    let v = w.builder.reshape(v, Shape::rows(&[kv_heads, d])?)?;
    if config.qk_norm {
        q = w.norm(q, &names.q_norm(layer), d, eps)?;
        k = w.norm(k, &names.k_norm(layer), d, eps)?;
    }
    let interleaved = config.rope.interleaved;
    let q = w
        .builder
        .rope(q, rows.positions, rows.frequencies, interleaved)?;
    let k = w
        .builder
        .rope(k, rows.positions, rows.frequencies, interleaved)?;
    w.sources.push(Source::Cache(layer));
    let cache = w
        .builder
        .cache(format!("cache.{layer}"), shape.cache(config))?;
    w.builder.cache_write(cache, k, v, rows.slots)?;
    let scale = 1.0 / (d as f64).sqrt();
    let window = config.window(layer).unwrap_or(0) as i64;
    let attended = w.builder.paged_attention(
        q,
        cache,
        rows.tables,
        rows.sequences,
        rows.positions,
        scale,
        window,
        0.0,
    )?;
    let attended = w.builder.reshape(attended, Shape::rows(&[heads * d])?)?;
    let o = w.linear(
        attended,
        &names.o(layer),
        o_bias.as_deref(),
        hidden,
        heads * d,
    )?;
    Ok(w.builder.add(x, o)?)
}

fn feed_forward(
    w: &mut Weaver<'_>,
    config: &ModelConfig,
    names: NameScheme,
    layer: usize,
    x: Value,
) -> Result<Value, BuildError> {
    let ModelConfig {
        hidden,
        intermediate,
        ..
    } = *config;
    let normed = w.norm(x, &names.ffn_norm(layer), hidden, config.rms_eps)?;
    let gate = w.linear(normed, &names.gate(layer), None, intermediate, hidden)?;
    let up = w.linear(normed, &names.up(layer), None, intermediate, hidden)?;
    let inner = w.builder.swiglu(gate, up)?;
    let down = w.linear(inner, &names.down(layer), None, hidden, intermediate)?;
    Ok(w.builder.add(x, down)?)
}

/// Final states of the picked rows.
fn picked_states(
    w: &mut Weaver<'_>,
    config: &ModelConfig,
    names: NameScheme,
    shape: &RunShape,
) -> Result<Value, BuildError> {
    let hidden = Shape::fixed(&[shape.max_rows, config.hidden])?;
    let hidden = w.input(Source::Hidden, "hidden", DType::F32, hidden)?;
    let picks = w.per_row(Source::Picks, "picks")?;
    let x = w.builder.get_rows(hidden, picks)?;
    w.norm(x, names.final_norm(), config.hidden, config.rms_eps)
}

/// The ending: hidden states of the picked rows to final states `[rows, hidden]`, which the head makes logits of.
///
/// # Errors
/// When a tensor is missing or has another shape than the configuration says.
pub fn ending(
    config: &ModelConfig,
    names: NameScheme,
    weights: &Weights,
    shape: &RunShape,
) -> Result<Sourced, BuildError> {
    let mut w = Weaver::new(shape.max_rows, weights);
    let states = picked_states(&mut w, config, names, shape)?;
    Ok(Sourced {
        graph: w.builder.finish(&[states])?,
        sources: w.sources,
    })
}

/// The head: hidden states of the picked rows to logits `[rows, vocab]`.
///
/// # Errors
/// When a tensor is missing or has another shape than the configuration says.
pub fn head(
    config: &ModelConfig,
    names: NameScheme,
    weights: &Weights,
    shape: &RunShape,
) -> Result<Sourced, BuildError> {
    let mut w = Weaver::new(shape.max_sequences, weights);
    let x = picked_states(&mut w, config, names, shape)?;
    let weight = if config.tied_embeddings {
        names.token_embedding()
    } else {
        names.output_head()
    };
    let logits = w.linear(x, weight, None, config.vocab, config.hidden)?;
    Ok(Sourced {
        graph: w.builder.finish(&[logits])?,
        sources: w.sources,
    })
}

impl RunShape {
    /// One layer's cache.
    pub fn cache(&self, config: &ModelConfig) -> CacheSpec {
        CacheSpec {
            dtype: self.cache_dtype,
            blocks: self.blocks,
            block_len: self.block_len,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
        }
    }
}

//! Parts that several architectures share: attention over the paged cache, and gated feed-forward layers.
//!
//! Biases, norms of heads, windows, frequencies, scales and caps are those that the configuration names.

use hotcell_graph::{DType, GraphBuilder, GraphError, Shape, Value};

use super::{
    config::ModelConfig,
    weave::{BuildError, Source, Weaver},
};

/// What every layer reads besides its weights.
pub(super) struct Rows {
    positions: Value,
    sequences: Value,
    /// Slots and tables, by kind of layers.
    kinds: Vec<(Value, Value)>,
    frequencies: Value,
    /// Of the layers with a window, where they are others.
    local_frequencies: Option<Value>,
}

impl Rows {
    pub fn new(w: &mut Weaver<'_>) -> Result<Self, BuildError> {
        let positions = w.per_row(Source::Positions, "positions")?;
        let sequences = w.per_row(Source::Sequences, "sequences")?;
        let mut kinds = Vec::new();
        for kind in 0..w.config.kinds() {
            let (slots, tables) = match kind {
                0 => ("slots", "tables"),
                _ => ("window slots", "window tables"),
            };
            let slots = w.per_row(Source::Slots(kind), slots)?;
            let shape = Shape::fixed(&[w.shape.max_sequences, w.shape.blocks_per_sequence()])?;
            kinds.push((
                slots,
                w.input(Source::Tables(kind), tables, DType::I32, shape)?,
            ));
        }
        let half = Shape::fixed(&[w.config.head_dim / 2])?;
        let frequencies = w.input(Source::Frequencies, "frequencies", DType::F32, half.clone())?;
        let mut local_frequencies = None;
        if w.config.local_rope.is_some() {
            let (source, name) = (Source::LocalFrequencies, "local frequencies");
            local_frequencies = Some(w.input(source, name, DType::F32, half)?);
        }
        Ok(Self {
            positions,
            sequences,
            kinds,
            frequencies,
            local_frequencies,
        })
    }
}

/// A layer's attention: what comes after its norm to what is added to the residual stream, both `[rows, hidden]`.
pub(super) fn attention(
    w: &mut Weaver<'_>,
    rows: &Rows,
    layer: usize,
    normed: Value,
) -> Result<Value, BuildError> {
    let (config, names) = (w.config, w.names);
    let ModelConfig {
        hidden,
        heads,
        kv_heads,
        head_dim: d,
        ..
    } = *config;
    let bias = |name: String, has: bool| has.then_some(name);
    let q_bias = bias(names.q_bias(layer), config.qkv_bias);
    let k_bias = bias(names.k_bias(layer), config.qkv_bias);
    let v_bias = bias(names.v_bias(layer), config.qkv_bias);
    let o_bias = bias(names.o_bias(layer), config.o_bias);
    // Heads are whole: a member that has some of them has their keys and values as well.
    let share = w.shape.share_of_heads(config);
    let (heads_here, kv_here) = (share.of(heads), share.of(kv_heads));
    let mut part = |name: String, bias: Option<String>, n: usize| {
        w.linear_part(share, normed, &name, bias.as_deref(), n, hidden)
    };
    let q = part(names.q(layer), q_bias, heads * d)?;
    let k = part(names.k(layer), k_bias, kv_heads * d)?;
    let v = part(names.v(layer), v_bias, kv_heads * d)?;
    let mut q = w.builder.reshape(q, Shape::rows(&[heads_here, d])?)?;
    let mut k = w.builder.reshape(k, Shape::rows(&[kv_here, d])?)?;
    let v = w.builder.reshape(v, Shape::rows(&[kv_here, d])?)?;
    if config.qk_norm {
        q = w.norm(q, &names.q_norm(layer), d)?;
        k = w.norm(k, &names.k_norm(layer), d)?;
    }
    let frequencies = match rows.local_frequencies {
        Some(local) if config.is_local(layer) => local,
        _ => rows.frequencies,
    };
    let interleaved = config.rope.interleaved;
    let q = w
        .builder
        .rope(q, rows.positions, frequencies, interleaved)?;
    let k = w
        .builder
        .rope(k, rows.positions, frequencies, interleaved)?;
    let cache = w.cache(layer)?;
    let (slots, tables) = rows.kinds[config.kind(layer)];
    w.builder.cache_write(cache, k, v, slots)?;
    let window = config.window(layer).unwrap_or(0) as i64;
    let attended = w.builder.paged_attention(
        q,
        cache,
        tables,
        rows.sequences,
        rows.positions,
        config.attention_scale,
        window,
        config.attention_cap.unwrap_or(0.0),
    )?;
    let attended = (w.builder).reshape(attended, Shape::rows(&[heads_here * d])?)?;
    let attended = w.gathered(share, attended, heads * d)?;
    w.linear(
        attended,
        &names.o(layer),
        o_bias.as_deref(),
        hidden,
        heads * d,
    )
}

/// How a gate and what it lets through become one.
pub(super) type Gate = fn(&mut GraphBuilder, Value, Value) -> Result<Value, GraphError>;

/// A layer's dense feed-forward part, from after its norm to what is added to the residual stream.
pub(super) fn feed_forward(
    w: &mut Weaver<'_>,
    layer: usize,
    normed: Value,
    through: Gate,
) -> Result<Value, BuildError> {
    let (names, hidden) = (w.names, w.config.hidden);
    let intermediate = w.config.intermediate;
    let share = w.shape.parts.columns();
    let gate = names.gate(layer);
    let gate = w.linear_part(share, normed, &gate, None, intermediate, hidden)?;
    let up = names.up(layer);
    let up = w.linear_part(share, normed, &up, None, intermediate, hidden)?;
    let inner = through(&mut w.builder, gate, up)?;
    let inner = w.gathered(share, inner, intermediate)?;
    w.linear(inner, &names.down(layer), None, hidden, intermediate)
}

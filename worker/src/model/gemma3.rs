//! Layers of Gemma 3 (text): norms before and after attention and the feed-forward part, a GELU gate, and layers
//! with a window, which turn positions by frequencies of their own, between layers without one.
//!
//! Source: transformers `modeling_gemma3.py`.

use half::{bf16, f16};
use hotcell_graph::{DType, GraphBuilder, Value};

use super::{
    parts::{Rows, attention, feed_forward},
    weave::{BuildError, Weaver},
};

/// Embeddings times the root of their width, which transformers rounds to the dtype that they are stored in.
pub(super) fn scaled(w: &mut Weaver<'_>, x: Value) -> Result<Value, BuildError> {
    let root = (w.config.hidden as f64).sqrt() as f32;
    let stored = w.weights.get(w.names.token_embedding())?.dtype;
    let scale = w.scalar(match stored {
        DType::BF16 => bf16::from_f32(root).to_f32(),
        DType::F16 => f16::from_f32(root).to_f32(),
        _ => root,
    })?;
    Ok(w.builder.mul(x, scale)?)
}

/// A layer: the residual stream `[rows, hidden]` before it to that after it.
pub(super) fn layer(
    w: &mut Weaver<'_>,
    rows: &Rows,
    layer: usize,
    x: Value,
) -> Result<Value, BuildError> {
    let (names, hidden) = (w.names, w.config.hidden);
    let normed = w.norm(x, &names.attn_norm(layer), hidden)?;
    let attended = attention(w, rows, layer, normed)?;
    let attended = w.norm(attended, &names.attn_post_norm(layer), hidden)?;
    let x = w.builder.add(x, attended)?;
    let normed = w.norm(x, &names.ffn_pre_norm(layer), hidden)?;
    let fed = feed_forward(w, layer, normed, GraphBuilder::geglu)?;
    let fed = w.norm(fed, &names.ffn_post_norm(layer), hidden)?;
    Ok(w.builder.add(x, fed)?)
}

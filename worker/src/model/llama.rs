//! Layers of the Llama family: Llama, Mistral, Qwen2, Qwen3.
//!
//! They differ in biases, norms of heads, windows and frequencies, all of which the configuration names.

use hotcell_graph::{GraphBuilder, Value};

use super::{
    parts::{Rows, attention, feed_forward},
    weave::{BuildError, Weaver},
};

/// A layer: the residual stream `[rows, hidden]` before it to that after it.
pub(super) fn layer(
    w: &mut Weaver<'_>,
    rows: &Rows,
    layer: usize,
    x: Value,
) -> Result<Value, BuildError> {
    let x = attended(w, rows, layer, x)?;
    let normed = w.norm(x, &w.names.ffn_norm(layer), w.config.hidden)?;
    let fed = feed_forward(w, layer, normed, GraphBuilder::swiglu)?;
    Ok(w.builder.add(x, fed)?)
}

/// The residual stream after a layer's attention.
pub(super) fn attended(
    w: &mut Weaver<'_>,
    rows: &Rows,
    layer: usize,
    x: Value,
) -> Result<Value, BuildError> {
    let normed = w.norm(x, &w.names.attn_norm(layer), w.config.hidden)?;
    let attended = attention(w, rows, layer, normed)?;
    Ok(w.builder.add(x, attended)?)
}

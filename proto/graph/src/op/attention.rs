//! Rotary positions, the paged KV cache and attention over it.

use crate::{
    dtype::DType,
    graph::GraphError,
    op::{Call, Effect, ops},
    shape::{Dim, Shape, TensorSpec},
};

ops! {
    /// Rotary position embedding (Su et al. 2021) of `x` f32 `[m, heads, d]` at `positions` i32 `[m]`:
    /// pair `i` turns by `position · inverse_frequencies[i]` (f32 `[d/2]`). Pairs are `(i, i + d/2)`, or
    /// `(2i, 2i+1)` when interleaved. The angle's sine and cosine are exact to f32 rounding.
    rope(x, positions, inverse_frequencies; interleaved: Bool) -> one
    { shapes: "x", dtypes: "x f32; positions i32; inverse_frequencies f32", effect: Effect::None, infer: rope_spec, decompose: None }

    /// Writes keys and values (f32 `[m, kv_heads, d]`), rounded to the cache's dtype, at `slots` i32
    /// `[m]`; slot −1 writes nothing. A slot outside the cache is an error of the execution.
    cache_write(cache, keys, values, slots;) -> none
    { shapes: "none", dtypes: "keys, values f32; slots i32", effect: Effect::Writes(0), infer: cache_write_spec, decompose: None }

    /// Causal attention over a paged cache (Kwon et al. 2023). Row `r` of `queries` (f32
    /// `[m, heads, d]`) stands at `positions[r]` of sequence `sequences[r]`, whose token `t` lies in block
    /// `tables[sequence, t / block_len]`; it attends to tokens `0 ..= position`, or the last `window` of
    /// them (0: all). Query head `h` reads key head `h / (heads / kv_heads)`. Softmax in f32, keys in
    /// ascending order. Result f32 `[m, heads, d]`.
    paged_attention(queries, cache, tables, sequences, positions; scale: Float(0.0, 1e3), window: Int(0, i32::MAX as i64)) -> one
    { shapes: "queries", dtypes: "queries f32; tables, sequences, positions i32", effect: Effect::Reads(1), infer: attention_spec, decompose: None }
}

/// `[m, heads, d]` of an f32 input.
fn heads(call: &Call<'_>, i: usize) -> Result<(Dim, usize, usize), GraphError> {
    let t = call.tensor_of(i, DType::F32)?;
    match *t.shape.dims() {
        [m, Dim::Fixed(h), Dim::Fixed(d)] if h > 0 && d > 0 => Ok((m, h, d)),
        _ => Err(call.error(format_args!(
            "{} must be [m, heads, d], not {}",
            call.input_name(i),
            t.shape
        ))),
    }
}

/// Checks that input `i` is i32 `[m]`.
fn per_row(call: &Call<'_>, i: usize, m: Dim) -> Result<(), GraphError> {
    let t = call.tensor_of(i, DType::I32)?;
    if t.shape.dims() != [m] {
        return Err(call.error(format_args!(
            "{} must be [{m}], not {}",
            call.input_name(i),
            t.shape
        )));
    }
    Ok(())
}

fn rope_spec(call: &Call<'_>) -> Result<Vec<TensorSpec>, GraphError> {
    let (m, h, d) = heads(call, 0)?;
    per_row(call, 1, m)?;
    let freqs = call.tensor_of(2, DType::F32)?;
    if d % 2 != 0 || freqs.shape.dims() != [Dim::Fixed(d / 2)] {
        return Err(call.error(format_args!(
            "inverse_frequencies must be [{}], not {}",
            d / 2,
            freqs.shape
        )));
    }
    Ok(vec![TensorSpec::new(
        DType::F32,
        Shape::new([m, h.into(), d.into()])?,
    )?])
}

fn cache_write_spec(call: &Call<'_>) -> Result<Vec<TensorSpec>, GraphError> {
    let cache = call.cache(0)?;
    let (keys, values) = (heads(call, 1)?, heads(call, 2)?);
    if keys != values || (keys.1, keys.2) != (cache.kv_heads, cache.head_dim) {
        return Err(call.error(format_args!(
            "keys and values must be [m, {}, {}]",
            cache.kv_heads, cache.head_dim
        )));
    }
    per_row(call, 3, keys.0)?;
    Ok(vec![])
}

fn attention_spec(call: &Call<'_>) -> Result<Vec<TensorSpec>, GraphError> {
    let (m, h, d) = heads(call, 0)?;
    let cache = call.cache(1)?;
    if cache.kv_heads == 0 || h % cache.kv_heads != 0 || d != cache.head_dim {
        return Err(call.error(format_args!(
            "{h} heads of {d} do not share {} key heads of {}",
            cache.kv_heads, cache.head_dim
        )));
    }
    let tables = call.tensor_of(2, DType::I32)?;
    if !matches!(tables.shape.dims(), [Dim::Fixed(_), Dim::Fixed(_)]) {
        return Err(call.error(format_args!(
            "tables must be [sequences, blocks], not {}",
            tables.shape
        )));
    }
    per_row(call, 3, m)?;
    per_row(call, 4, m)?;
    Ok(vec![TensorSpec::new(
        DType::F32,
        Shape::new([m, h.into(), d.into()])?,
    )?])
}

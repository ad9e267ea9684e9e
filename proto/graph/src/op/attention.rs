//! Rotary positions, the paged KV cache and attention over it.

use crate::{
    dtype::DType,
    graph::{GraphBuilder, GraphError, Value},
    op::{
        Attribute, Call, Effect,
        fit::{Parts, float, inside, optional_vector, pair, shaped, swapped},
        ops,
        rules::{Specs, Values, cast_to, one, plain, scalar},
    },
    shape::{Dim, Shape, TensorSpec},
};

ops! {
    /// Rotary position embedding (Su et al. 2021) of `x` f32 `[m, heads, d]` at `positions` i32 `[m]`:
    /// pair `i` turns by `position · inverse_frequencies[i]` (f32 `[d/2]`). Pairs are `(i, i + d/2)`, or
    /// `(2i, 2i+1)` when interleaved. The angle's sine and cosine are exact to f32 rounding.
    rope(x, positions, inverse_frequencies; interleaved: Bool) -> one
    { shapes: "x", dtypes: "x f32; positions i32; inverse_frequencies f32", effect: Effect::None, infer: rope_spec, decompose: None }

    /// Writes keys and values (f32 `[m, kv_heads, d]`), rounded to the cache's dtype, at `slots` i32
    /// `[m]`; slot −1 writes nothing. A slot outside the cache is an error of the execution. A `q8_0` cache stores each 32
    /// numbers of a head as one block: `s = max |x| / 127` rounded to f16, and `round(x · 127 / max |x|)`, ties to even.
    cache_write(cache, keys, values, slots = index;) -> none
    { shapes: "none", dtypes: "keys, values f32; slots i32", effect: Effect::Writes(0), infer: cache_write_spec, decompose: None }

    /// Causal attention over a paged cache (Kwon et al. 2023). Row `r` of `queries` (f32
    /// `[m, heads, d]`) stands at `positions[r]` of sequence `sequences[r]`, whose token `t` lies in block
    /// `tables[sequence, t / block_len]`; it attends to tokens `0 ..= position`, or the last `window` of
    /// them (0: all). Query head `h` reads key head `h / (heads / kv_heads)`. A `soft_cap` c above 0 makes
    /// `c · tanh(score / c)` of each score. Softmax in f32. Result f32 `[m, heads, d]`.
    paged_attention(queries, cache, tables = index, sequences = index, positions = index; scale: Float(0.0, 1e3), window: Int(0, i32::MAX as i64), soft_cap: Float(0.0, 1e6)) -> one
    { shapes: "queries", dtypes: "queries f32; tables, sequences, positions i32", effect: Effect::Reads(1), infer: attention_spec, decompose: None }

    /// `softmax(scale · queries @ keysᵀ + mask) @ values` (Vaswani et al. 2017): query head `h` reads key head
    /// `h / (hq / hkv)`. A bool `mask` says which keys are seen, another one is added; it broadcasts to `[b, hq, t, s]`.
    /// Queries stand at the end of the keys, query `i` at place `p = i + s − t`: `causal` hides keys after `p`, and a
    /// `window` above 0 those up to `p − window`. A `soft_cap` c above 0 makes `c · tanh(score / c)` of each score before
    /// the mask. `sinks` `[hq]` add one score per head that takes part in the softmax and has no value. Where all keys
    /// are hidden and there is no sink, the result is NaN. The insides are f32, of f64 inputs f64.
    scaled_dot_product_attention(queries, keys, values, mask = optional, sinks = optional; scale: Float(0.0, 1e6), causal: Bool, window: Int(0, 1 << 31), soft_cap: Float(0.0, 1e6)) -> one
    { shapes: "[b, hq, t, d], [b, hkv, s, d], [b, hkv, s, dv], mask, [hq] → [b, hq, t, dv]", dtypes: "float, mask float or bool → promote(queries, keys, values)", effect: Effect::None, infer: sdpa_spec, decompose: Some(sdpa_of_parts) }
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

/// Sizes of the inputs of `scaled_dot_product_attention`.
struct Sizes {
    batch: Dim,
    heads: usize,
    key_heads: usize,
    queries: usize,
    keys: usize,
    depth: usize,
    values: usize,
    dtype: DType,
}

impl Sizes {
    fn of(call: &Call<'_>) -> Result<Self, GraphError> {
        let (q, k, v) = (float(call, 0)?, float(call, 1)?, float(call, 2)?);
        let axes = |t: &TensorSpec| match *t.shape.dims() {
            [b, Dim::Fixed(h), Dim::Fixed(n), Dim::Fixed(d)] => Some((b, h, n, d)),
            _ => None,
        };
        let sizes = match (axes(q), axes(k), axes(v)) {
            (Some((b, hq, t, d)), Some((b2, hkv, s, d2)), Some((b3, hkv2, s2, dv)))
                if (b, d, hkv, s) == (b2, d2, hkv2, s2)
                    && b == b3
                    && s > 0
                    && hkv > 0
                    && hq.is_multiple_of(hkv) =>
            {
                Some((b, hq, hkv, t, s, d, dv))
            }
            _ => None,
        };
        let Some((batch, heads, key_heads, queries, keys, depth, values)) = sizes else {
            return Err(call.error(format_args!(
                "queries {}, keys {} and values {} must be [b, hq, t, d], [b, hkv, s, d] and [b, hkv, s, dv], where \
                 hkv divides hq and s is not 0",
                q.shape, k.shape, v.shape
            )));
        };
        let dtype = pair(call, q.dtype, pair(call, k.dtype, v.dtype)?)?;
        Ok(Self {
            batch,
            heads,
            key_heads,
            queries,
            keys,
            depth,
            values,
            dtype,
        })
    }

    /// Heads of one key head.
    fn group(&self) -> usize {
        self.heads / self.key_heads.max(1)
    }
}

fn sdpa_spec(call: &Call<'_>) -> Specs {
    let sizes = Sizes::of(call)?;
    let (t, s) = (sizes.queries, sizes.keys);
    let scores = Shape::new([sizes.batch, sizes.heads.into(), t.into(), s.into()])
        .map_err(|e| call.error(e))?;
    if call.optional(3)?.is_some() {
        let mask = plain(call, 3)?;
        if !(mask.dtype == DType::Bool || mask.dtype.is_float()) {
            return Err(call.error(format_args!("mask cannot be {}", mask.dtype)));
        }
        if mask.shape.broadcast(&scores).ok().as_ref() != Some(&scores) {
            return Err(call.error(format_args!(
                "mask {} must broadcast to {scores}",
                mask.shape
            )));
        }
    }
    optional_vector(call, 4, sizes.heads)?;
    let dims = [
        sizes.batch,
        sizes.heads.into(),
        t.into(),
        sizes.values.into(),
    ];
    one(call, sizes.dtype, dims)
}

/// Adds −∞ to scores where `seen` is false.
fn hide(
    graph: &mut GraphBuilder,
    scores: Value,
    seen: Value,
    work: DType,
) -> Result<Value, GraphError> {
    let hidden = scalar(graph, f64::NEG_INFINITY, work)?;
    graph.where_(seen, scores, hidden)
}

/// Scores `[b, hkv, g, t, s]` with what the mask and the places hide.
fn masked(
    graph: &mut GraphBuilder,
    call: &Call<'_>,
    sizes: &Sizes,
    scores: Value,
    mask: Value,
) -> Result<Value, GraphError> {
    let work = inside(sizes.dtype);
    let mut scores = scores;
    if let Some(spec) = call.optional(3)? {
        // Its heads, where it has them, become key heads and groups.
        let missing = std::iter::repeat_n(Dim::Fixed(1), 4 - spec.shape.rank().min(4));
        let dims: Vec<Dim> = missing.chain(spec.shape.dims().iter().copied()).collect();
        let &[b, h, t, s] = dims.as_slice() else {
            return Err(GraphError::NoResult);
        };
        let heads = match h {
            Dim::Fixed(1) => [1, 1],
            _ => [sizes.key_heads, sizes.group()],
        };
        let mask = shaped(graph, mask, [b, heads[0].into(), heads[1].into(), t, s])?;
        scores = match spec.dtype {
            DType::Bool => hide(graph, scores, mask, work)?,
            _ => {
                let mask = cast_to(graph, mask, work)?;
                graph.add(scores, mask)?
            }
        };
    }
    let (causal, window) = (call.bool(1)?, call.int(2)?);
    if !causal && window == 0 {
        return Ok(scores);
    }
    let (t, s) = (sizes.queries, sizes.keys);
    let first = s as f64 - t as f64;
    let place = graph.arange(first, 1.0, t as i64, DType::I64)?;
    let place = shaped(graph, place, [t.into(), Dim::Fixed(1)])?;
    let key = graph.arange(0.0, 1.0, s as i64, DType::I64)?;
    if causal {
        let seen = graph.less_equal(key, place)?;
        scores = hide(graph, scores, seen, work)?;
    }
    if window > 0 {
        let window = scalar(graph, window as f64, DType::I64)?;
        let before = graph.sub(place, window)?;
        let seen = graph.less(before, key)?;
        scores = hide(graph, scores, seen, work)?;
    }
    Ok(scores)
}

fn sdpa_of_parts(graph: &mut GraphBuilder, inputs: &[Value], attributes: &[Attribute]) -> Values {
    let parts = Parts::of(&scaled_dot_product_attention, graph, inputs, attributes)?;
    let call = parts.call();
    let sizes = Sizes::of(&call)?;
    let &[queries, keys, values, mask, sinks] = inputs else {
        return Err(GraphError::NoResult);
    };
    let work = inside(sizes.dtype);
    let (b, hkv, g) = (sizes.batch, sizes.key_heads, sizes.group());
    let (t, s) = (sizes.queries, sizes.keys);
    // A group of query heads shares a key head: [b, hkv, g, …] against [b, hkv, 1, …].
    let q = cast_to(graph, queries, work)?;
    let q = shaped(
        graph,
        q,
        [b, hkv.into(), g.into(), t.into(), sizes.depth.into()],
    )?;
    let k = cast_to(graph, keys, work)?;
    let k = shaped(
        graph,
        k,
        [b, hkv.into(), Dim::Fixed(1), s.into(), sizes.depth.into()],
    )?;
    let k = swapped(graph, k)?;
    let v = cast_to(graph, values, work)?;
    let v = shaped(
        graph,
        v,
        [b, hkv.into(), Dim::Fixed(1), s.into(), sizes.values.into()],
    )?;
    let scores = graph.matmul(q, k)?;
    let scale = scalar(graph, call.float(0)?, work)?;
    let mut scores = graph.mul(scores, scale)?;
    let cap = call.float(3)?;
    if cap > 0.0 {
        let cap = scalar(graph, cap, work)?;
        let part = graph.div(scores, cap)?;
        let part = graph.tanh(part)?;
        scores = graph.mul(part, cap)?;
    }
    let scores = masked(graph, &call, &sizes, scores, mask)?;
    let weights = match sinks {
        Value::Absent => graph.softmax(scores, -1)?,
        sinks => {
            let sinks = cast_to(graph, sinks, work)?;
            let one = Dim::Fixed(1);
            let sinks = shaped(graph, sinks, [hkv.into(), g.into(), one, one])?;
            let most = graph.reduce_max(scores, &[-1], true)?;
            let most = graph.maximum(most, sinks)?;
            let scores = graph.sub(scores, most)?;
            let powers = graph.exp(scores)?;
            let sum = graph.reduce_sum(powers, &[-1], true)?;
            let sinks = graph.sub(sinks, most)?;
            let sinks = graph.exp(sinks)?;
            let sum = graph.add(sum, sinks)?;
            graph.div(powers, sum)?
        }
    };
    let y = graph.matmul(weights, v)?;
    let dims = [b, sizes.heads.into(), t.into(), sizes.values.into()];
    let y = shaped(graph, y, dims)?;
    Ok(vec![cast_to(graph, y, sizes.dtype)?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::fit::testing::{decomposes, int, number, table, yes};

    fn with(causal: bool, window: i64, cap: f64) -> [Attribute; 4] {
        [number(0.125), yes(causal), int(window), number(cap)]
    }

    #[test]
    fn heads_keys_and_masks_must_fit() {
        let plain = with(false, 0, 0.0);
        let (q, k, v) = ("f32[2, 8, 5, 16]", "f16[2, 4, 7, 16]", "bf16[2, 4, 7, 12]");
        table(
            &scaled_dot_product_attention,
            &[
                (&[q, k, v, "-", "-"], &plain, "f32[2, 8, 5, 12]"),
                (
                    &[
                        "f16[rows, 8, 5, 16]",
                        "f16[rows, 4, 7, 16]",
                        "f16[rows, 4, 7, 16]",
                        "bool[rows, 1, 1, 7]",
                        "f32[8]",
                    ],
                    &plain,
                    "f16[rows, 8, 5, 16]",
                ),
                (&[q, k, v, "bool[8, 5, 7]", "-"], &plain, "f32[2, 8, 5, 12]"),
                (&[q, k, v, "f16[]", "-"], &plain, "f32[2, 8, 5, 12]"),
                (&[q, k, v, "i32[5, 7]", "-"], &plain, "!mask cannot be i32"),
                (&[q, k, v, "bool[4, 5, 7]", "-"], &plain, "!mask"),
                (&[q, k, v, "bool[1, 2, 8, 5, 7]", "-"], &plain, "!mask"),
                (&[q, k, v, "bool[rows, 1, 1, 7]", "-"], &plain, "!mask"),
                (&[q, k, v, "-", "f32[4]"], &plain, "!sinks must be [8]"),
                (&["f32[2, 6, 5, 16]", k, v, "-", "-"], &plain, "!divides"),
                (&["f32[2, 8, 5, 15]", k, v, "-", "-"], &plain, "!divides"),
                (&["f32[3, 8, 5, 16]", k, v, "-", "-"], &plain, "!divides"),
                (&["f32[rows, 8, 5, 16]", k, v, "-", "-"], &plain, "!divides"),
                (&[q, k, "f32[2, 4, 6, 12]", "-", "-"], &plain, "!divides"),
                (
                    &[q, "f32[2, 4, 0, 16]", "f32[2, 4, 0, 12]", "-", "-"],
                    &plain,
                    "!s is not 0",
                ),
                (&["i32[2, 8, 5, 16]", k, v, "-", "-"], &plain, "!float"),
                (&["f32[8, 5, 16]", k, v, "-", "-"], &plain, "!divides"),
            ],
        );
    }

    #[test]
    fn the_decomposition_has_the_spec_of_the_row() {
        for dtype in ["f16", "bf16", "f32", "f64"] {
            for b in ["rows", "2", "0"] {
                let q = format!("{dtype}[{b}, 8, 5, 16]");
                let k = format!("{dtype}[{b}, 4, 7, 16]");
                let v = format!("{dtype}[{b}, 4, 7, 12]");
                let whole = format!("{dtype}[{b}, 8, 5, 7]");
                for mask in [
                    "-",
                    "bool[7]",
                    "bool[5, 7]",
                    "f16[8, 1, 7]",
                    "f64[1, 8, 5, 1]",
                    "bool[]",
                    &whole,
                ] {
                    for sinks in ["-", "f32[8]"] {
                        for attributes in [
                            with(false, 0, 0.0),
                            with(true, 0, 30.0),
                            with(true, 3, 0.0),
                            with(false, 1 << 31, 0.0),
                        ] {
                            decomposes(
                                &scaled_dot_product_attention,
                                &[&q, &k, &v, mask, sinks],
                                &attributes,
                            );
                        }
                    }
                }
            }
        }
    }
}

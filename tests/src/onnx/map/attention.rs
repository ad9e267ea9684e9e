//! Attention and position embeddings.

use anyhow::{Result, bail};
use hotcell_graph::{DType, Value, op::Attribute};

use super::Mapper;

pub fn map(m: &Mapper<'_>, op: &str) -> Result<Option<Vec<Value>>> {
    match op {
        "Attention" => attention(m).map(Some),
        "FlexAttention" => {
            if m.attribute("score_mod").is_some() || m.attribute("prob_mod").is_some() {
                bail!("there are no graphs within ops");
            }
            let (q, k, v) = (m.x(0)?, m.x(1)?, m.x(2)?);
            let scale = scale(m, q)?;
            let y = sdpa(m, [q, k, v, Value::Absent], scale, 0.0)?;
            Ok(Some(vec![y]))
        }
        "LinearAttention" => linear(m).map(Some),
        "RotaryEmbedding" => rotary(m).map(|v| Some(vec![v])),
        _ => Ok(None),
    }
}

fn scale(m: &Mapper<'_>, q: Value) -> Result<f64> {
    let width = m.dims(q)?.last().copied().unwrap_or(1) as f64;
    Ok(m.float("scale", 1.0 / width.sqrt()))
}

fn sdpa(m: &Mapper<'_>, inputs: [Value; 4], scale: f64, cap: f64) -> Result<Value> {
    let [q, k, v, mask] = inputs;
    let attributes = vec![
        Attribute::Float(scale),
        Attribute::Bool(false),
        Attribute::Int(0),
        Attribute::Float(cap),
    ];
    let inputs = [q, k, v, mask, Value::Absent];
    m.one("scaled_dot_product_attention", &inputs, attributes)
}

/// [batch, tokens, heads·width] as [batch, heads, tokens, width]; four axes stay.
fn heads(m: &Mapper<'_>, x: Value, name: &str) -> Result<Value> {
    let &[batch, tokens, width] = m.dims(x)?.as_slice() else {
        return Ok(x);
    };
    let heads = m.int(name, 1) as usize;
    let split = m.reshape(x, &[batch, tokens, heads, width / heads])?;
    m.transpose(split, &[0, 2, 1, 3])
}

fn attention(m: &Mapper<'_>) -> Result<Vec<Value>> {
    let flat = m.dims(m.x(0)?)?.len() == 3;
    let q = heads(m, m.x(0)?, "q_num_heads")?;
    let with_past = |i: usize, past: usize| {
        let new = heads(m, m.x(i)?, "kv_num_heads")?;
        match m.optional(past)? {
            Some(past) => m.concat(&[past, new], 2),
            None => Ok(new),
        }
    };
    let (k, v) = (with_past(1, 4)?, with_past(2, 5)?);
    let mask = mask(m, q, k)?;
    let (scale, cap) = (scale(m, q)?, m.float("softcap", 0.0));
    let mut y = sdpa(m, [q, k, v, mask], scale, cap)?;
    if flat {
        let dims = m.dims(y)?;
        let turned = m.transpose(y, &[0, 2, 1, 3])?;
        y = m.reshape(turned, &[dims[0], dims[2], dims[1] * dims[3]])?;
    }
    let mut results = vec![y, k, v];
    if m.wants_output(3) {
        results.push(scores(m, [q, k, mask], scale, cap)?);
    }
    Ok(results)
}

/// What is added to the scores or hides them: the given mask, later tokens and padding together.
fn mask(m: &Mapper<'_>, q: Value, k: Value) -> Result<Value> {
    let (tokens, keys) = (m.dims(q)?[2], m.dims(k)?[2]);
    let mut seen = Vec::new();
    if m.int("is_causal", 0) != 0 {
        // The first query stands after the past, whatever the number of keys.
        let past = m.given(4)?.map_or(0, |p| p.dims[2]);
        let last = m.shift(m.places(tokens, 2, 4)?, past as f64)?;
        seen.push(m.binary("less_equal", m.places(keys, 3, 4)?, last)?);
    }
    if let Some(lengths) = m.optional(6)? {
        let batch = m.dims(lengths)?[0];
        let lengths = m.reshape(lengths, &[batch, 1, 1, 1])?;
        seen.push(m.binary("less", m.places(keys, 3, 4)?, lengths)?);
    }
    let mut additive = Value::Absent;
    if let Some(given) = m.optional(3)? {
        let dims = m.dims(given)?;
        let missing = keys - dims[dims.len() - 1];
        let bool_mask = m.dtype(given)? == DType::Bool;
        let hidden = if bool_mask { 0.0 } else { f64::NEG_INFINITY };
        let mut high = vec![0; dims.len()];
        high[dims.len() - 1] = missing as i64;
        let given = match missing {
            0 => given,
            _ => {
                let attributes = vec![
                    super::ints(&vec![0; dims.len()]),
                    super::ints(&high),
                    super::word("constant"),
                ];
                m.one("pad", &[given, m.like(hidden, given)?], attributes)?
            }
        };
        match bool_mask {
            true => seen.push(given),
            false => additive = given,
        }
    }
    let mut visible = None;
    for part in seen {
        visible = Some(match visible {
            Some(others) => m.binary("logical_and", others, part)?,
            None => part,
        });
    }
    match (visible, additive) {
        (Some(visible), Value::Absent) => Ok(visible),
        (Some(visible), bias) => m.select(visible, bias, m.like(f64::NEG_INFINITY, bias)?),
        (None, bias) => Ok(bias),
    }
}

/// The optional fourth output: scores at one of four stages.
fn scores(m: &Mapper<'_>, inputs: [Value; 3], scale: f64, cap: f64) -> Result<Value> {
    let [q, k, mask] = inputs;
    let mode = m.int("qk_matmul_output_mode", 0);
    let groups = m.dims(q)?[1] / m.dims(k)?[1];
    let attributes = vec![Attribute::Int(groups as i64), Attribute::Int(1)];
    let k = m.one("repeat", &[k], attributes)?;
    let mut s = m.scale(
        m.binary("matmul", q, m.transpose(k, &[0, 1, 3, 2])?)?,
        scale,
    )?;
    if mode == 0 {
        return Ok(s);
    }
    if cap > 0.0 {
        s = m.scale(m.unary("tanh", m.scale(s, 1.0 / cap)?)?, cap)?;
    }
    if mode == 1 {
        return Ok(s);
    }
    s = match mask {
        Value::Absent => s,
        mask if m.dtype(mask)? == DType::Bool => {
            m.select(mask, s, m.like(f64::NEG_INFINITY, s)?)?
        }
        mask => m.add(s, mask)?,
    };
    if mode == 2 {
        return Ok(s);
    }
    m.one("softmax", &[s], vec![Attribute::Int(-1)])
}

/// Rotation by tables of cosines and sines, which our op computes from frequencies instead.
fn rotary(m: &Mapper<'_>) -> Result<Value> {
    let input = m.x(0)?;
    let flat = m.dims(input)?.len() == 3;
    let x = heads(m, input, "num_heads")?;
    let dims = m.dims(x)?;
    let width = match m.int("rotary_embedding_dim", 0) {
        0 => dims[3],
        n => n as usize,
    };
    let half = (width / 2) as i64;
    let table = |i: usize| {
        let table = m.x(i)?;
        let rows = match m.optional(3)? {
            Some(positions) => m.take(table, positions, 0)?,
            None => table,
        };
        m.reshape(rows, &[dims[0], 1, dims[2], width / 2])
    };
    let (cos, sin) = (table(1)?, table(2)?);
    let turn = |a: Value, b: Value| {
        let real = m.sub(m.mul(cos, a)?, m.mul(sin, b)?)?;
        let imaginary = m.add(m.mul(sin, a)?, m.mul(cos, b)?)?;
        Ok::<_, anyhow::Error>([real, imaginary])
    };
    let rotated = m.slice(x, 3, 0, width as i64, 1)?;
    let mut y = if m.int("interleaved", 0) != 0 {
        let parts = turn(
            m.slice(rotated, 3, 0, i64::MAX, 2)?,
            m.slice(rotated, 3, 1, i64::MAX, 2)?,
        )?;
        let pairs = m.one("stack", &parts, vec![Attribute::Int(-1)])?;
        m.reshape(pairs, &[dims[0], dims[1], dims[2], width])?
    } else {
        let parts = turn(
            m.slice(rotated, 3, 0, half, 1)?,
            m.slice(rotated, 3, half, i64::MAX, 1)?,
        )?;
        m.concat(&parts, 3)?
    };
    if width < dims[3] {
        y = m.concat(&[y, m.slice(x, 3, width as i64, i64::MAX, 1)?], 3)?;
    }
    if flat {
        y = m.reshape(m.transpose(y, &[0, 2, 1, 3])?, &m.dims(input)?)?;
    }
    Ok(y)
}

/// A state of keys by values for each head that each token decays, corrects and reads, one token after another.
fn linear(m: &Mapper<'_>) -> Result<Vec<Value>> {
    let wide = |i: usize| m.cast(m.x(i)?, DType::F32);
    let q = heads(m, wide(0)?, "q_num_heads")?;
    let (k, v) = (
        heads(m, wide(1)?, "kv_num_heads")?,
        heads(m, wide(2)?, "kv_num_heads")?,
    );
    let (keys, values) = (m.dims(k)?, m.dims(v)?);
    let (tokens, groups) = (keys[2], m.dims(q)?[1] / keys[1]);
    let mut state = match m.optional(3)? {
        Some(past) => m.cast(past, DType::F32)?,
        None => m.broadcast(
            m.number(0.0, DType::F32)?,
            &[keys[0], keys[1], keys[3], values[3]],
        )?,
    };
    // [batch, heads, tokens, 1 or the key's width].
    let gate = |i: usize, heads: usize| {
        let Some(x) = m.optional(i)? else {
            return Ok(None);
        };
        let x = m.cast(x, DType::F32)?;
        let all = m.dims(x)?[2];
        let split = m.reshape(x, &[keys[0], tokens, heads, all / heads])?;
        m.transpose(split, &[0, 2, 1, 3]).map(Some)
    };
    let decay = gate(4, keys[1])?;
    let beta = match m.given(5)? {
        Some(beta) => gate(5, beta.dims[2])?,
        None => None,
    };
    let scale = match m.float("scale", 0.0) {
        0.0 => 1.0 / (keys[3] as f64).sqrt(),
        scale => scale,
    };
    let mut outputs = Vec::new();
    for t in 0..tokens as i64 {
        let now = |x: Value| m.slice(x, 2, t, t + 1, 1);
        if let Some(decay) = decay {
            let fade = m.transpose(m.unary("exp", now(decay)?)?, &[0, 1, 3, 2])?;
            state = m.mul(state, fade)?;
        }
        let (key, mut value) = (now(k)?, now(v)?);
        if let Some(beta) = beta {
            let known = m.binary("matmul", key, state)?;
            value = m.mul(m.sub(value, known)?, now(beta)?)?;
        }
        state = m.add(state, m.mul(m.transpose(key, &[0, 1, 3, 2])?, value)?)?;
        let attributes = vec![Attribute::Int(groups as i64), Attribute::Int(1)];
        let read = m.one("repeat", &[state], attributes)?;
        outputs.push(m.scale(m.binary("matmul", now(q)?, read)?, scale)?);
    }
    let y = m.transpose(m.concat(&outputs, 2)?, &[0, 2, 1, 3])?;
    let dims = m.dims(y)?;
    let y = m.reshape(y, &[dims[0], dims[1], dims[2] * dims[3]])?;
    Ok(vec![m.cast(y, m.wanted(0)?)?, m.cast(state, m.wanted(1)?)?])
}

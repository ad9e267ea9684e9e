//! Softmax and normalisations.

use anyhow::{Result, bail};
use hotcell_graph::{DType, Value, op::Attribute};

use super::{Mapper, axis_of};

pub fn map(m: &Mapper<'_>, op: &str) -> Result<Option<Vec<Value>>> {
    let axis = |default| Attribute::Int(m.int("axis", default));
    let epsilon = m.float("epsilon", 1e-5);
    let value = match op {
        "Softmax" => m.one("softmax", &[m.x(0)?], vec![axis(-1)])?,
        "LogSoftmax" => m.one("log_softmax", &[m.x(0)?], vec![axis(-1)])?,
        "Hardmax" => hardmax(m)?,
        "LayerNormalization" => return layer_norm(m, epsilon).map(Some),
        "RMSNormalization" => {
            let (x, dims, inner) = flat(m)?;
            let weight = m.reshape(m.x(1)?, &[inner])?;
            let y = m.one("rms_norm", &[x, weight], vec![Attribute::Float(epsilon)])?;
            m.reshape(y, &dims)?
        }
        "GroupNormalization" => {
            let groups = Attribute::Int(m.int("num_groups", 1));
            let inputs = [m.x(0)?, m.x(1)?, m.x(2)?];
            m.one(
                "group_norm",
                &inputs,
                vec![groups, Attribute::Float(epsilon)],
            )?
        }
        "InstanceNormalization" => {
            let x = m.x(0)?;
            let groups = Attribute::Int(m.dims(x)?[1] as i64);
            let inputs = [x, m.x(1)?, m.x(2)?];
            m.one(
                "group_norm",
                &inputs,
                vec![groups, Attribute::Float(epsilon)],
            )?
        }
        "BatchNormalization" => return batch_norm(m, epsilon).map(Some),
        "LpNormalization" => lp_norm(m)?,
        "MeanVarianceNormalization" => {
            let x = m.x(0)?;
            let axes = m.list("axes").unwrap_or_else(|| vec![0, 2, 3]);
            let mean = m.reduce("mean", x, &axes, true)?;
            let deviation = m.one(
                "standard_deviation",
                &[x],
                vec![super::ints(&axes), Attribute::Bool(true), Attribute::Int(0)],
            )?;
            m.div(m.sub(x, mean)?, m.shift(deviation, 1e-9)?)?
        }
        "LRN" => lrn(m)?,
        _ => return Ok(None),
    };
    Ok(Some(vec![value]))
}

fn hardmax(m: &Mapper<'_>) -> Result<Value> {
    let x = m.x(0)?;
    let dims = m.dims(x)?;
    let axis = axis_of(m.int("axis", -1), dims.len())?;
    let attributes = vec![Attribute::Int(axis as i64), Attribute::Bool(true)];
    let first = m.cast(m.one("argmax", &[x], attributes)?, DType::I64)?;
    let hit = m.binary("equal", m.places(dims[axis], axis, dims.len())?, first)?;
    m.cast(hit, m.dtype(x)?)
}

/// Input 0 with the axes from `axis` on as one, its shape and that axis's size.
fn flat(m: &Mapper<'_>) -> Result<(Value, Vec<usize>, usize)> {
    let x = m.x(0)?;
    let dims = m.dims(x)?;
    let (outer, inner) = dims.split_at(axis_of(m.int("axis", -1), dims.len())?);
    let inner: usize = inner.iter().product();
    let flat = m.reshape(x, &[outer.iter().product(), inner])?;
    Ok((flat, dims, inner))
}

fn layer_norm(m: &Mapper<'_>, epsilon: f64) -> Result<Vec<Value>> {
    let (x, dims, inner) = flat(m)?;
    let weight = m.reshape(m.x(1)?, &[inner])?;
    let bias = match m.optional(2)? {
        Some(bias) => m.reshape(bias, &[inner])?,
        None => Value::Absent,
    };
    let y = m.one(
        "layer_norm",
        &[x, weight, bias],
        vec![Attribute::Float(epsilon)],
    )?;
    let y = m.reshape(y, &dims)?;
    if !m.wants_output(1) {
        return Ok(vec![y]);
    }
    let axis = axis_of(m.int("axis", -1), dims.len())?;
    let kept: Vec<usize> = dims
        .iter()
        .enumerate()
        .map(|(i, &d)| if i < axis { d } else { 1 })
        .collect();
    let mean = m.reduce("mean", x, &[-1], true)?;
    let variance = variance(m, x, &[-1])?;
    let inverse = m.unary("rsqrt", m.shift(variance, epsilon)?)?;
    Ok(vec![y, m.reshape(mean, &kept)?, m.reshape(inverse, &kept)?])
}

fn variance(m: &Mapper<'_>, x: Value, axes: &[i64]) -> Result<Value> {
    let attributes = vec![super::ints(axes), Attribute::Bool(true), Attribute::Int(0)];
    m.one("variance", &[x], attributes)
}

fn batch_norm(m: &Mapper<'_>, epsilon: f64) -> Result<Vec<Value>> {
    let x = m.x(0)?;
    let dims = m.dims(x)?;
    let mut channel = vec![1; dims.len()];
    channel[1] = dims[1];
    let wide = |i: usize| m.reshape(m.x(i)?, &channel);
    let normal = |mean: Value, variance: Value| {
        let scale = m.mul(wide(1)?, m.unary("rsqrt", m.shift(variance, epsilon)?)?)?;
        m.add(m.mul(m.sub(x, mean)?, scale)?, wide(2)?)
    };
    let (old_mean, old_variance) = (wide(3)?, wide(4)?);
    if m.int("training_mode", 0) == 0 {
        return Ok(vec![normal(old_mean, old_variance)?]);
    }
    let others: Vec<i64> = (0..dims.len() as i64).filter(|&a| a != 1).collect();
    let mean = m.reduce("mean", x, &others, true)?;
    let variance = variance(m, x, &others)?;
    let momentum = m.float("momentum", 0.9);
    let running = |old: Value, new: Value| {
        let mixed = m.add(m.scale(old, momentum)?, m.scale(new, 1.0 - momentum)?)?;
        m.reshape(mixed, &[dims[1]])
    };
    Ok(vec![
        normal(mean, variance)?,
        running(old_mean, mean)?,
        running(old_variance, variance)?,
    ])
}

/// x / ‖x‖, and 0 where the norm is 0.
fn lp_norm(m: &Mapper<'_>) -> Result<Value> {
    let x = m.x(0)?;
    let axis = [m.int("axis", -1)];
    let norm = match m.int("p", 2) {
        1 => m.reduce("reduce_sum", m.unary("abs", x)?, &axis, true)?,
        2 => m.unary(
            "sqrt",
            m.reduce("reduce_sum", m.unary("square", x)?, &axis, true)?,
        )?,
        p => bail!("ONNX has no norm of order {p}"),
    };
    let zero = m.like(0.0, x)?;
    let none = m.binary("equal", norm, zero)?;
    m.select(none, zero, m.div(x, norm)?)
}

fn lrn(m: &Mapper<'_>) -> Result<Value> {
    let x = m.x(0)?;
    let size = m.int("size", 1);
    let channels = m.dims(x)?[1] as i64;
    let (low, high) = ((size - 1) / 2, size / 2);
    let padded = m.pad(m.unary("square", x)?, &[0, low, 0, 0], &[0, high, 0, 0])?;
    let mut sum = m.slice(padded, 1, 0, channels, 1)?;
    for i in 1..size {
        sum = m.add(sum, m.slice(padded, 1, i, i + channels, 1)?)?;
    }
    let alpha = m.float("alpha", 1e-4) / size as f64;
    let base = m.shift(m.scale(sum, alpha)?, m.float("bias", 1.0))?;
    m.div(x, m.binary("pow", base, m.like(m.float("beta", 0.75), x)?)?)
}

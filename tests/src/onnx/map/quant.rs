//! Linear quantisation.

use anyhow::{Result, bail, ensure};
use hotcell_graph::{DType, Value, op::Attribute};

use super::{Mapper, axis_of, dtype_attribute, pool};

pub fn map(m: &Mapper<'_>, op: &str) -> Result<Option<Vec<Value>>> {
    let value = match op {
        "QuantizeLinear" => {
            let x = m.x(0)?;
            let dtype = match m.given(2)? {
                Some(zero) => zero.dtype,
                None => dtype_attribute(m, "output_dtype", 2)?,
            };
            let scale = spread(m, m.x(1)?, x)?;
            let zero = match m.optional(2)? {
                Some(zero) => Some(spread(m, zero, x)?),
                None => None,
            };
            quantize(m, x, scale, zero, dtype)?
        }
        "DequantizeLinear" => {
            let x = m.x(0)?;
            let scale = spread(m, m.x(1)?, x)?;
            let zero = match m.optional(2)? {
                Some(zero) => Some(spread(m, zero, x)?),
                None => None,
            };
            m.cast(dequantize(m, x, scale, zero)?, m.wanted(0)?)?
        }
        "DynamicQuantizeLinear" => return dynamic(m).map(Some),
        "QLinearMatMul" => {
            let a = dequantize(m, m.x(0)?, m.x(1)?, Some(m.x(2)?))?;
            let b = dequantize(m, m.x(3)?, m.x(4)?, Some(m.x(5)?))?;
            let y = m.binary("matmul", a, b)?;
            quantize(m, y, m.x(6)?, Some(m.x(7)?), m.wanted(0)?)?
        }
        "QLinearConv" => {
            let (x, w) = (m.x(0)?, m.x(3)?);
            ensure!(
                m.given(4)?.is_some_and(|s| s.elements() == 1),
                "one scale only"
            );
            let scalar = |i: usize| m.reshape(m.x(i)?, &[]);
            let a = dequantize(m, x, scalar(1)?, Some(scalar(2)?))?;
            let b = dequantize(m, w, scalar(4)?, Some(scalar(5)?))?;
            let y = pool::plain_conv(m, a, b)?;
            quantize(m, y, scalar(6)?, Some(scalar(7)?), m.wanted(0)?)?
        }
        _ => return Ok(None),
    };
    Ok(Some(vec![value]))
}

/// A scale or zero point for each element: of all, of an axis, or of blocks along it.
fn spread(m: &Mapper<'_>, value: Value, x: Value) -> Result<Value> {
    let (dims, own) = (m.dims(x)?, m.dims(value)?);
    if own.is_empty() || own == [1] {
        return m.reshape(value, &[]);
    }
    let axis = axis_of(m.int("axis", 1), dims.len())?;
    let block = m.int("block_size", 0);
    if block == 0 {
        let mut at = vec![1; dims.len()];
        at[axis] = dims[axis];
        return m.reshape(value, &at);
    }
    let attributes = vec![Attribute::Int(block), Attribute::Int(axis as i64)];
    let repeated = m.one("repeat", &[value], attributes)?;
    m.slice(repeated, axis, 0, dims[axis] as i64, 1)
}

fn dequantize(m: &Mapper<'_>, x: Value, scale: Value, zero: Option<Value>) -> Result<Value> {
    let scale = m.cast(scale, DType::F32)?;
    let mut x = m.cast(x, DType::F32)?;
    if let Some(zero) = zero {
        x = m.sub(x, m.cast(zero, DType::F32)?)?;
    }
    m.mul(x, scale)
}

fn bounds(dtype: DType) -> Result<(f64, f64)> {
    Ok(match dtype {
        DType::U8 => (0.0, 255.0),
        DType::I8 => (-128.0, 127.0),
        DType::U16 => (0.0, 65535.0),
        DType::I16 => (-32768.0, 32767.0),
        other => bail!("nothing is quantised to {other}"),
    })
}

fn quantize(
    m: &Mapper<'_>,
    x: Value,
    scale: Value,
    zero: Option<Value>,
    dtype: DType,
) -> Result<Value> {
    let (low, high) = bounds(dtype)?;
    let (x, scale) = (m.cast(x, DType::F32)?, m.cast(scale, DType::F32)?);
    let mut steps = m.unary("round", m.div(x, scale)?)?;
    if let Some(zero) = zero {
        steps = m.add(steps, m.cast(zero, DType::F32)?)?;
    }
    m.cast(m.clamp(steps, low, high)?, dtype)
}

fn dynamic(m: &Mapper<'_>) -> Result<Vec<Value>> {
    let x = m.x(0)?;
    let nothing = m.like(0.0, x)?;
    let most = m.binary("maximum", m.reduce("reduce_max", x, &[], false)?, nothing)?;
    let least = m.binary("minimum", m.reduce("reduce_min", x, &[], false)?, nothing)?;
    let range = m.sub(most, least)?;
    let flat = m.binary("equal", range, nothing)?;
    let scale = m.scale(m.select(flat, m.like(1.0, x)?, range)?, 1.0 / 255.0)?;
    let zero = m.unary("neg", m.div(least, scale)?)?;
    let zero = m.unary("round", m.clamp(zero, 0.0, 255.0)?)?;
    let zero = m.cast(zero, DType::U8)?;
    let y = quantize(m, x, scale, Some(zero), DType::U8)?;
    Ok(vec![y, scale, zero])
}

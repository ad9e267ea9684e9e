//! Ops that read or write where indices say, and sorting.

use anyhow::{Context, Result, bail, ensure};
use hotcell_graph::{DType, Value, op::Attribute};

use super::{Mapper, axis_of, word};

pub fn map(m: &Mapper<'_>, op: &str) -> Result<Option<Vec<Value>>> {
    let axis = Attribute::Int(m.int("axis", 0));
    let value = match op {
        "Gather" => m.one("take", &[m.x(0)?, m.x(1)?], vec![axis])?,
        "GatherElements" => m.one("take_along_axis", &[m.x(0)?, m.x(1)?], vec![axis])?,
        "GatherND" => {
            let batch = Attribute::Int(m.int("batch_dims", 0));
            m.one("gather_nd", &[m.x(0)?, m.x(1)?], vec![batch])?
        }
        "Scatter" | "ScatterElements" => {
            let inputs = [m.x(0)?, m.x(1)?, m.x(2)?];
            m.one("scatter_along_axis", &inputs, vec![axis, reduction(m)])?
        }
        "ScatterND" => {
            let inputs = [m.x(0)?, m.x(1)?, m.x(2)?];
            m.one("scatter_nd", &inputs, vec![reduction(m)])?
        }
        "TensorScatter" => tensor_scatter(m)?,
        "OneHot" => one_hot(m)?,
        "ReverseSequence" => reverse_sequence(m)?,
        "TopK" => {
            let k = m.given_ints(1)?.and_then(|k| k.first().copied());
            let attributes = vec![
                Attribute::Int(k.context("TopK without k")?),
                Attribute::Int(m.int("axis", -1)),
                Attribute::Bool(m.int("largest", 1) != 0),
            ];
            let results = m.op("topk", &[m.x(0)?], attributes)?;
            let &[values, indices] = results.as_slice() else {
                bail!("topk has two results");
            };
            return Ok(Some(vec![values, m.cast(indices, DType::I64)?]));
        }
        "Compress" | "NonZero" | "Unique" | "NonMaxSuppression" => {
            bail!("the result's shape depends on values")
        }
        _ => return Ok(None),
    };
    Ok(Some(vec![value]))
}

fn reduction(m: &Mapper<'_>) -> Attribute {
    word(match m.text("reduction", "none") {
        "none" => "set",
        other => other,
    })
}

/// Rows of an update to where each batch's write index says, round the end when circular.
fn tensor_scatter(m: &Mapper<'_>) -> Result<Value> {
    let (cache, update, first) = (m.x(0)?, m.x(1)?, m.x(2)?);
    let (dims, new) = (m.dims(cache)?, m.dims(update)?);
    let axis = axis_of(m.int("axis", -2), dims.len())?;
    let mut batch = vec![1; dims.len()];
    batch[0] = dims[0];
    let first = m.reshape(first, &batch)?;
    let mut place = m.add(first, m.places(new[axis], axis, dims.len())?)?;
    if m.text("mode", "linear") == "circular" {
        place = m.binary("remainder", place, m.like(dims[axis] as f64, place)?)?;
    }
    let place = m.broadcast(place, &new)?;
    let attributes = vec![Attribute::Int(axis as i64), word("set")];
    m.one("scatter_along_axis", &[cache, place, update], attributes)
}

fn one_hot(m: &Mapper<'_>) -> Result<Value> {
    let indices = m.cast(m.x(0)?, DType::I64)?;
    let depth = m.given_number(1)?.context("OneHot without depth")?;
    let mut dims = m.dims(indices)?;
    let axis = axis_of(m.int("axis", -1), dims.len() + 1)?;
    dims.insert(axis, 1);
    let indices = m.reshape(indices, &dims)?;
    let negative = m.binary("less", indices, m.like(0.0, indices)?)?;
    let indices = m.select(negative, m.shift(indices, depth)?, indices)?;
    let places = m.places(depth as usize, axis, dims.len())?;
    let hot = m.binary("equal", places, indices)?;
    let values = m.x(2)?;
    let off = m.reshape(m.slice(values, 0, 0, 1, 1)?, &[])?;
    let on = m.reshape(m.slice(values, 0, 1, 2, 1)?, &[])?;
    m.select(hot, on, off)
}

/// The first `length` places of each sequence turned round.
fn reverse_sequence(m: &Mapper<'_>) -> Result<Value> {
    let x = m.x(0)?;
    let dims = m.dims(x)?;
    let (batch, time) = (m.int("batch_axis", 1), m.int("time_axis", 0));
    let (batch, time) = (axis_of(batch, dims.len())?, axis_of(time, dims.len())?);
    ensure!(batch != time, "one axis cannot be both batch and time");
    let mut at = vec![1; dims.len()];
    at[batch] = dims[batch];
    let length = m.reshape(m.cast(m.x(1)?, DType::I64)?, &at)?;
    let place = m.places(dims[time], time, dims.len())?;
    let within = m.binary("less", place, length)?;
    let turned = m.sub(m.shift(length, -1.0)?, place)?;
    let from = m.broadcast(m.select(within, turned, place)?, &dims)?;
    m.one(
        "take_along_axis",
        &[x, from],
        vec![Attribute::Int(time as i64)],
    )
}

//! Ops that move, join, cut or make elements.

use std::f64::consts::TAU;

use anyhow::{Context, Result, bail, ensure};
use hotcell_graph::{DType, Value, op::Attribute};

use super::{Mapper, as_i64, axis_of, dtype_attribute, ints, word};
use crate::onnx::case::Tensor;

pub fn map(m: &Mapper<'_>, op: &str) -> Result<Option<Vec<Value>>> {
    let value = match op {
        "Reshape" => reshape(m)?,
        "Transpose" => m.transpose(m.x(0)?, &m.list("perm").unwrap_or_default())?,
        "Concat" => m.concat(&m.all_inputs()?, m.int("axis", 0))?,
        "Split" => return split(m).map(Some),
        "Slice" => slice(m)?,
        "Squeeze" => {
            let axes = m.given_ints(1)?.unwrap_or_default();
            m.one("squeeze", &[m.x(0)?], vec![ints(&axes)])?
        }
        "Unsqueeze" => {
            let axes = m.given_ints(1)?.context("Unsqueeze without axes")?;
            m.one("expand_dims", &[m.x(0)?], vec![ints(&axes)])?
        }
        "Flatten" => {
            let x = m.x(0)?;
            let dims = m.dims(x)?;
            let (before, after) = dims.split_at(axis_of(m.int("axis", 1), dims.len())?);
            m.reshape(x, &[before.iter().product(), after.iter().product()])?
        }
        "Expand" => {
            let x = m.x(0)?;
            let to = m.given_ints(1)?.context("Expand without shape")?;
            let dims = joint(&m.dims(x)?, &to)?;
            m.broadcast(x, &dims)?
        }
        "Tile" => {
            let repeats = m.given_ints(1)?.context("Tile without repeats")?;
            m.one("tile", &[m.x(0)?], vec![ints(&repeats)])?
        }
        "Pad" => pad(m)?,
        "CenterCropPad" => center_crop_pad(m)?,
        "Shape" => {
            let dims = as_i64(&m.given(0)?.context("Shape of nothing")?.dims);
            let rank = dims.len() as i64;
            let place = |v: i64| (if v < 0 { v + rank } else { v }).clamp(0, rank) as usize;
            let (start, end) = (place(m.int("start", 0)), place(m.int("end", rank)));
            let kept = dims.get(start..end).unwrap_or_default();
            m.i64s(&[kept.len()], kept)?
        }
        "Size" => {
            let n = m.given(0)?.context("Size of nothing")?.elements();
            m.i64s(&[], &[n as i64])?
        }
        "DepthToSpace" => depth_to_space(m)?,
        "SpaceToDepth" => space_to_depth(m)?,
        "Trilu" => trilu(m)?,
        "EyeLike" => {
            let dims = m.given(0)?.context("EyeLike without example")?.dims.clone();
            let &[rows, columns] = dims.as_slice() else {
                bail!("EyeLike is of two axes");
            };
            let far = m.sub(m.places(columns, 1, 2)?, m.places(rows, 0, 2)?)?;
            let on = m.binary("equal", far, m.number(m.int("k", 0) as f64, DType::I64)?)?;
            m.cast(on, m.wanted(0)?)?
        }
        "Range" => {
            let number = |i| m.given_number(i)?.context("Range without a bound");
            let (start, limit, delta) = (number(0)?, number(1)?, number(2)?);
            let length = ((limit - start) / delta).ceil().max(0.0);
            m.arange(start, delta, length as usize, m.wanted(0)?)?
        }
        "Constant" => m.literal(&attribute_tensor(m)?)?,
        "ConstantOfShape" => {
            let dims = m.given_ints(0)?.context("ConstantOfShape without shape")?;
            let dims: Vec<usize> = dims.iter().map(|&d| d as usize).collect();
            let mut value = attribute_tensor(m)?;
            value.dims.clear();
            m.broadcast(m.literal(&value)?, &dims)?
        }
        "HannWindow" => window(m, &[0.5, 0.5])?,
        "HammingWindow" => window(m, &[25.0 / 46.0, 21.0 / 46.0])?,
        "BlackmanWindow" => window(m, &[0.42, 0.5, 0.08])?,
        "Dropout" => return dropout(m).map(Some),
        _ => return Ok(None),
    };
    Ok(Some(vec![value]))
}

fn attribute_tensor(m: &Mapper<'_>) -> Result<Tensor> {
    let value = m.attribute("value").and_then(|a| a.t.as_ref());
    Tensor::read(value.context("a constant without value")?)
}

/// NumPy's broadcast of a shape and a wanted one.
fn joint(dims: &[usize], to: &[i64]) -> Result<Vec<usize>> {
    let rank = dims.len().max(to.len());
    let from_end = |i: usize, len: usize| (i + len).checked_sub(rank);
    (0..rank)
        .map(|i| {
            let a = from_end(i, dims.len()).map_or(1, |j| dims[j]);
            let b = from_end(i, to.len()).map_or(1, |j| to[j] as usize);
            ensure!(a == b || a == 1 || b == 1, "{a} and {b} do not broadcast");
            Ok(if a == 1 { b } else { a })
        })
        .collect()
}

fn reshape(m: &Mapper<'_>) -> Result<Value> {
    let x = m.x(0)?;
    let dims = m.dims(x)?;
    let wanted = m.given_ints(1)?.context("Reshape without shape")?;
    let keep = m.int("allowzero", 0) == 0;
    let mut to: Vec<usize> = wanted
        .iter()
        .enumerate()
        .map(|(i, &d)| match d {
            0 if keep => dims.get(i).copied().unwrap_or(0),
            -1 => 1,
            d => d as usize,
        })
        .collect();
    if let Some(free) = wanted.iter().position(|&d| d == -1) {
        to[free] = dims.iter().product::<usize>() / to.iter().product::<usize>().max(1);
    }
    m.reshape(x, &to)
}

fn split(m: &Mapper<'_>) -> Result<Vec<Value>> {
    let x = m.x(0)?;
    let axis = m.int("axis", 0);
    let dims = m.dims(x)?;
    let size = dims[axis_of(axis, dims.len())?];
    let sizes = match m.given_ints(1)? {
        Some(sizes) => sizes,
        None => {
            let parts = m.case.node.output.len();
            let each = size.div_ceil(parts);
            let ends = (0..=parts).map(|i| (i * each).min(size));
            let ends: Vec<usize> = ends.collect();
            ends.windows(2).map(|w| (w[1] - w[0]) as i64).collect()
        }
    };
    m.op("split", &[x], vec![ints(&sizes), Attribute::Int(axis)])
}

fn slice(m: &Mapper<'_>) -> Result<Value> {
    let x = m.x(0)?;
    let rank = m.dims(x)?.len();
    let (starts, ends) = (m.given_ints(1)?, m.given_ints(2)?);
    let (starts, ends) = (starts.context("no starts")?, ends.context("no ends")?);
    let axes = m.given_ints(3)?;
    let axes = axes.unwrap_or_else(|| (0..starts.len() as i64).collect());
    let steps = m.given_ints(4)?.unwrap_or_else(|| vec![1; starts.len()]);
    let mut full = [vec![0; rank], vec![i64::MAX; rank], vec![1; rank]];
    for (i, &axis) in axes.iter().enumerate() {
        let axis = axis_of(axis, rank)?;
        full[0][axis] = starts[i];
        full[1][axis] = ends[i];
        full[2][axis] = steps[i];
    }
    m.one("slice", &[x], full.iter().map(|v| ints(v)).collect())
}

fn pad(m: &Mapper<'_>) -> Result<Value> {
    let x = m.x(0)?;
    let rank = m.dims(x)?.len();
    let pads = m.given_ints(1)?.context("Pad without pads")?;
    let axes = m.given_ints(3)?;
    let axes = axes.unwrap_or_else(|| (0..rank as i64).collect());
    let (mut low, mut high) = (vec![0; rank], vec![0; rank]);
    for (i, &axis) in axes.iter().enumerate() {
        let axis = axis_of(axis, rank)?;
        low[axis] = pads[i];
        high[axis] = pads[i + axes.len()];
    }
    let value = m.optional(2)?.unwrap_or(Value::Absent);
    let mode = word(m.text("mode", "constant"));
    m.one("pad", &[x, value], vec![ints(&low), ints(&high), mode])
}

fn center_crop_pad(m: &Mapper<'_>) -> Result<Value> {
    let mut x = m.x(0)?;
    let rank = m.dims(x)?.len();
    let shape = m.given_ints(1)?.context("CenterCropPad without shape")?;
    let axes = m.list("axes");
    let axes = axes.unwrap_or_else(|| (0..rank as i64).collect());
    for (&axis, &to) in axes.iter().zip(&shape) {
        let axis = axis_of(axis, rank)?;
        let from = m.dims(x)?[axis] as i64;
        if to <= from {
            let start = (from - to) / 2;
            x = m.slice(x, axis, start, start + to, 1)?;
        } else {
            let (mut low, mut high) = (vec![0; rank], vec![0; rank]);
            low[axis] = (to - from) / 2;
            high[axis] = to - from - low[axis];
            x = m.pad(x, &low, &high)?;
        }
    }
    Ok(x)
}

fn depth_to_space(m: &Mapper<'_>) -> Result<Value> {
    let x = m.x(0)?;
    let b = m.int("blocksize", 1) as usize;
    let &[n, c, h, w] = m.dims(x)?.as_slice() else {
        bail!("DepthToSpace is of four axes");
    };
    let inner = c / (b * b);
    let (split, order) = match m.text("mode", "DCR") {
        "CRD" => ([n, inner, b, b, h, w], [0, 1, 4, 2, 5, 3]),
        _ => ([n, b, b, inner, h, w], [0, 3, 4, 1, 5, 2]),
    };
    let turned = m.transpose(m.reshape(x, &split)?, &order)?;
    m.reshape(turned, &[n, inner, h * b, w * b])
}

fn space_to_depth(m: &Mapper<'_>) -> Result<Value> {
    let x = m.x(0)?;
    let b = m.int("blocksize", 1) as usize;
    let &[n, c, h, w] = m.dims(x)?.as_slice() else {
        bail!("SpaceToDepth is of four axes");
    };
    let split = m.reshape(x, &[n, c, h / b, b, w / b, b])?;
    let turned = m.transpose(split, &[0, 3, 5, 1, 2, 4])?;
    m.reshape(turned, &[n, c * b * b, h / b, w / b])
}

fn trilu(m: &Mapper<'_>) -> Result<Value> {
    let k = m.given_number(1)?.unwrap_or(0.0);
    let name = if m.int("upper", 1) != 0 {
        "triu"
    } else {
        "tril"
    };
    m.one(name, &[m.x(0)?], vec![Attribute::Int(k as i64)])
}

/// Σ ±aᵢ·cos(2πi·n/N), N the size of the periodic or one less of the symmetric window.
fn window(m: &Mapper<'_>, terms: &[f64]) -> Result<Value> {
    let size = m.given_number(0)?.context("a window without size")?;
    let dtype = dtype_attribute(m, "output_datatype", 1)?;
    let period = if m.int("periodic", 1) != 0 {
        size
    } else {
        size - 1.0
    };
    let mut sum = m.number(0.0, DType::F64)?;
    for (i, term) in terms.iter().enumerate() {
        let step = TAU * i as f64 / period;
        let angle = m.arange(0.0, step, size as usize, DType::F64)?;
        let sign = if i % 2 == 0 { *term } else { -term };
        sum = m.add(sum, m.scale(m.unary("cos", angle)?, sign)?)?;
    }
    m.cast(sum, dtype)
}

/// Outside of training, and with a ratio of 0, nothing is dropped.
fn dropout(m: &Mapper<'_>) -> Result<Vec<Value>> {
    let training = m.given_number(2)?.unwrap_or(0.0) != 0.0;
    if training && m.given_number(1)? != Some(0.0) {
        bail!("which elements are dropped depends on the generator");
    }
    let x = m.x(0)?;
    let mask = m.broadcast(m.number(1.0, DType::Bool)?, &m.dims(x)?)?;
    Ok(vec![x, mask])
}

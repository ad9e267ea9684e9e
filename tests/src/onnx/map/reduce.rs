//! Reductions and scans.

use anyhow::{Context, Result};
use hotcell_graph::{DType, Value, op::Attribute};

use super::{Mapper, axis_of};

pub fn map(m: &Mapper<'_>, op: &str) -> Result<Option<Vec<Value>>> {
    let value = match op {
        "ReduceSum" => reduce(m, |m, x, axes, keep| m.reduce("reduce_sum", x, axes, keep))?,
        "ReduceProd" => reduce(m, |m, x, axes, keep| m.reduce("reduce_prod", x, axes, keep))?,
        "ReduceMean" => reduce(m, |m, x, axes, keep| m.reduce("mean", x, axes, keep))?,
        "ReduceMax" => reduce(m, |m, x, axes, keep| {
            let any = m.dtype(x)? == DType::Bool;
            m.reduce(if any { "reduce_any" } else { "reduce_max" }, x, axes, keep)
        })?,
        "ReduceMin" => reduce(m, |m, x, axes, keep| {
            let all = m.dtype(x)? == DType::Bool;
            m.reduce(if all { "reduce_all" } else { "reduce_min" }, x, axes, keep)
        })?,
        "ReduceL1" => reduce(m, |m, x, axes, keep| {
            m.reduce("reduce_sum", m.unary("abs", x)?, axes, keep)
        })?,
        "ReduceL2" => reduce(m, |m, x, axes, keep| {
            m.unary(
                "sqrt",
                m.reduce("reduce_sum", m.unary("square", x)?, axes, keep)?,
            )
        })?,
        "ReduceSumSquare" => reduce(m, |m, x, axes, keep| {
            m.reduce("reduce_sum", m.unary("square", x)?, axes, keep)
        })?,
        "ReduceLogSum" => reduce(m, |m, x, axes, keep| {
            m.unary("log", m.reduce("reduce_sum", x, axes, keep)?)
        })?,
        "ReduceLogSumExp" => reduce(m, |m, x, axes, keep| {
            // The greatest of nothing is an error; nothing needs no shift.
            if m.dims(x)?.contains(&0) {
                let sum = m.reduce("reduce_sum", m.unary("exp", x)?, axes, keep)?;
                return m.unary("log", sum);
            }
            m.reduce("logsumexp", x, axes, keep)
        })?,
        "ArgMax" => arg(m, "argmax")?,
        "ArgMin" => arg(m, "argmin")?,
        "CumSum" => scan(m, "cumsum")?,
        "CumProd" => scan(m, "cumprod")?,
        _ => return Ok(None),
    };
    Ok(Some(vec![value]))
}

type Reduce = fn(&Mapper<'_>, Value, &[i64], bool) -> Result<Value>;

/// Axes are an input since opset 13 or 18, an attribute before; none are all, or with a flag none.
fn reduce(m: &Mapper<'_>, apply: Reduce) -> Result<Value> {
    let axes = m.given_ints(1)?.or_else(|| m.list("axes"));
    let axes = axes.unwrap_or_default();
    let x = m.x(0)?;
    if axes.is_empty() && m.int("noop_with_empty_axes", 0) != 0 {
        return Ok(x);
    }
    apply(m, x, &axes, m.int("keepdims", 1) != 0)
}

fn arg(m: &Mapper<'_>, name: &str) -> Result<Value> {
    let (axis, keep) = (m.int("axis", 0), m.int("keepdims", 1) != 0);
    let last = m.int("select_last_index", 0) != 0;
    let mut x = m.x(0)?;
    let dims = m.dims(x)?;
    let size = dims[axis_of(axis, dims.len())?];
    if last {
        x = m.one("flip", &[x], vec![super::ints(&[axis])])?;
    }
    let found = m.one(
        name,
        &[x],
        vec![Attribute::Int(axis), Attribute::Bool(keep)],
    )?;
    let found = m.cast(found, DType::I64)?;
    if !last {
        return Ok(found);
    }
    m.sub(m.number(size as f64 - 1.0, DType::I64)?, found)
}

fn scan(m: &Mapper<'_>, name: &str) -> Result<Value> {
    let axis = m.given_ints(1)?.and_then(|a| a.first().copied());
    let attributes = vec![
        Attribute::Int(axis.context("a scan without axis")?),
        Attribute::Bool(m.int("exclusive", 0) != 0),
        Attribute::Bool(m.int("reverse", 0) != 0),
    ];
    m.one(name, &[m.x(0)?], attributes)
}

//! Losses.

use anyhow::Result;
use hotcell_graph::{Value, op::Attribute};

use super::Mapper;

pub fn map(m: &Mapper<'_>, op: &str) -> Result<Option<Vec<Value>>> {
    match op {
        "NegativeLogLikelihoodLoss" => Ok(Some(vec![likelihood(m, m.x(0)?)?])),
        "SoftmaxCrossEntropyLoss" => {
            let logs = m.one("log_softmax", &[m.x(0)?], vec![Attribute::Int(1)])?;
            Ok(Some(vec![likelihood(m, logs)?, logs]))
        }
        _ => Ok(None),
    }
}

/// −w[target]·logs[target] over the classes on axis 1, where the target is not the ignored one.
fn likelihood(m: &Mapper<'_>, logs: Value) -> Result<Value> {
    let target = m.x(1)?;
    let zero = m.like(0.0, target)?;
    // An ignored target may be no class at all, so it reads class 0 and its weight is 0.
    let (counts, class) = match m.attribute("ignore_index") {
        Some(ignored) => {
            let counts = m.binary("not_equal", target, m.like(ignored.i as f64, target)?)?;
            (Some(counts), m.select(counts, target, zero)?)
        }
        None => (None, target),
    };
    let mut at = m.dims(target)?;
    at.insert(1, 1);
    let one = vec![Attribute::Int(1)];
    let picked = m.one("take_along_axis", &[logs, m.reshape(class, &at)?], one)?;
    let loss = m.unary("neg", m.reshape(picked, &m.dims(target)?)?)?;
    let mut weight = match m.optional(2)? {
        Some(weights) => m.take(weights, class, 0)?,
        None => m.broadcast(m.like(1.0, logs)?, &m.dims(target)?)?,
    };
    if let Some(counts) = counts {
        weight = m.select(counts, weight, m.like(0.0, weight)?)?;
    }
    let loss = m.mul(loss, weight)?;
    match m.text("reduction", "mean") {
        "none" => Ok(loss),
        "sum" => m.reduce("reduce_sum", loss, &[], false),
        _ => {
            let sum = m.reduce("reduce_sum", loss, &[], false)?;
            m.div(sum, m.reduce("reduce_sum", weight, &[], false)?)
        }
    }
}

//! Fourier transforms as sums over cosines and sines, and the overlap-add of Col2Im.

use std::f64::consts::TAU;

use anyhow::{Context, Result, bail};
use hotcell_graph::{DType, Value};

use super::{Mapper, axis_of, ints};

pub fn map(m: &Mapper<'_>, op: &str) -> Result<Option<Vec<Value>>> {
    let value = match op {
        "DFT" => dft(m)?,
        "Col2Im" => col2im(m)?,
        "STFT" => stft(m)?,
        _ => return Ok(None),
    };
    Ok(Some(vec![value]))
}

/// cos and sin of 2π·r·c/n, `[rows, columns]`, f64: results of 0 must come out as 0 to within 1e-7.
fn waves(m: &Mapper<'_>, rows: usize, columns: usize, n: usize) -> Result<[Value; 2]> {
    let product = m.mul(m.places(rows, 0, 2)?, m.places(columns, 1, 2)?)?;
    let turn = m.binary("remainder", product, m.like(n as f64, product)?)?;
    let angle = m.scale(m.cast(turn, DType::F64)?, TAU / n as f64)?;
    Ok([m.unary("cos", angle)?, m.unary("sin", angle)?])
}

fn dft(m: &Mapper<'_>) -> Result<Value> {
    if m.given(1)?.is_some() {
        bail!("a DFT of another length");
    }
    let x = m.cast(m.x(0)?, DType::F64)?;
    let dims = m.dims(x)?;
    let rank = dims.len();
    let axis = match m.case.opset {
        ..20 => m.int("axis", 1),
        _ => m.given_number(2)?.unwrap_or(-2.0) as i64,
    };
    let axis = axis_of(axis, rank)?;
    let (inverse, onesided) = (m.int("inverse", 0) != 0, m.int("onesided", 0) != 0);
    // Real and imaginary parts with the axis last, without the axis of the parts.
    let mut order: Vec<i64> = (0..rank as i64 - 1).collect();
    order.swap(axis, rank - 2);
    let part = |i: i64| {
        let part = m.slice(x, rank - 1, i, i + 1, 1)?;
        m.transpose(m.reshape(part, &dims[..rank - 1])?, &order)
    };
    let size = dims[axis];
    let n = if inverse && onesided {
        2 * (size - 1)
    } else {
        size
    };
    let results = if onesided && !inverse { n / 2 + 1 } else { n };
    let [cos, mut sin] = waves(m, size, results, n)?;
    if !inverse {
        sin = m.unary("neg", sin)?;
    }
    let times = |a: Value, b: Value| m.binary("matmul", a, b);
    let mut real = part(0)?;
    let mut imaginary = match dims[rank - 1] {
        2 => Some(part(1)?),
        _ => None,
    };
    if inverse {
        // Half a spectrum stands for its mirror image too, but for the ends.
        let twice = |k: usize| if k == 0 || 2 * k == n { 1.0 } else { 2.0 };
        let weights: Vec<f32> = (0..size)
            .map(|k| if onesided { twice(k) } else { 1.0 } / n as f32)
            .collect();
        let weights = m.f32s(&[size], &weights)?;
        real = m.mul(real, weights)?;
        imaginary = imaginary.map(|i| m.mul(i, weights)).transpose()?;
    }
    let (mut re, mut im) = (times(real, cos)?, times(real, sin)?);
    if let Some(i) = imaginary {
        re = m.sub(re, times(i, sin)?)?;
        im = m.add(im, times(i, cos)?)?;
    }
    let back = |v: Value| {
        let v = m.cast(m.transpose(v, &order)?, m.wanted(0)?)?;
        let mut dims = m.dims(v)?;
        dims.push(1);
        m.reshape(v, &dims)
    };
    match inverse && onesided {
        true => back(re),
        false => m.concat(&[back(re)?, back(im)?], -1),
    }
}

/// Fourier transforms of frames of a real signal `[batch, length, 1]`: `[batch, frames, results, 2]`.
fn stft(m: &Mapper<'_>) -> Result<Value> {
    let x = m.cast(m.x(0)?, DType::F64)?;
    let &[batch, length, 1] = m.dims(x)?.as_slice() else {
        bail!("a signal that is not real");
    };
    let step = m.given_number(1)?.context("no step")? as usize;
    let window = m.optional(2)?;
    let n = match (m.given_number(3)?, window) {
        (Some(n), _) => n as usize,
        (None, Some(window)) => m.dims(window)?[0],
        (None, None) => bail!("frames of no length"),
    };
    let frames = (length - n) / step + 1;
    let places: Vec<i64> = (0..frames)
        .flat_map(|f| (0..n).map(move |i| (f * step + i) as i64))
        .collect();
    let places = m.i64s(&[frames, n], &places)?;
    let mut cut = m.take(m.reshape(x, &[batch, length])?, places, 1)?;
    if let Some(window) = window {
        cut = m.mul(cut, m.cast(window, DType::F64)?)?;
    }
    let results = match m.int("onesided", 1) {
        0 => n,
        _ => n / 2 + 1,
    };
    let [cos, sin] = waves(m, n, results, n)?;
    let part = |wave: Value| {
        let part = m.cast(m.binary("matmul", cut, wave)?, m.wanted(0)?)?;
        m.reshape(part, &[batch, frames, results, 1])
    };
    m.concat(&[part(cos)?, part(m.unary("neg", sin)?)?], -1)
}

/// Adds each block's elements to the places of the image they came from.
fn col2im(m: &Mapper<'_>) -> Result<Value> {
    let x = m.x(0)?;
    let image = m.given_ints(1)?.context("no image shape")?;
    let block = m.given_ints(2)?.context("no block shape")?;
    let rank = image.len();
    let ones = || vec![1; rank];
    let strides = m.list("strides").unwrap_or_else(ones);
    let dilations = m.list("dilations").unwrap_or_else(ones);
    let pads = m.list("pads").unwrap_or_else(|| vec![0; 2 * rank]);
    let (low, high) = pads.split_at(rank);
    let lists = [&image[..], &block, &strides, low, high, &dilations];
    m.one("col2im", &[x], lists.map(ints).to_vec())
}

//! Resizing: each axis is interpolated by itself, by a matrix that follows from the sizes alone.

use anyhow::{Context, Result, bail};
use hotcell_graph::{DType, Value};

use super::{Mapper, axis_of};
use crate::onnx::case::Tensor;

pub fn map(m: &Mapper<'_>, op: &str) -> Result<Option<Vec<Value>>> {
    let value = match op {
        "Resize" => resize(m)?,
        "Upsample" => {
            let mut x = m.x(0)?;
            let scales = m.given(1)?.context("Upsample without scales")?.numbers()?;
            for (axis, scale) in scales.into_iter().enumerate() {
                let from = m.dims(x)?[axis];
                let sampling = Sampling {
                    transform: "asymmetric",
                    nearest: "floor",
                    ..Sampling::read(m, "nearest")
                };
                let to = (from as f64 * scale).floor() as usize;
                x = along(m, x, axis, to, scale, &sampling, None)?;
            }
            x
        }
        _ => return Ok(None),
    };
    Ok(Some(vec![value]))
}

/// How positions of the result become positions of the input, and what is read there.
struct Sampling<'c> {
    mode: &'c str,
    transform: &'c str,
    nearest: &'c str,
    cubic: f64,
    antialias: bool,
    inside_only: bool,
    outside: f64,
}

impl<'c> Sampling<'c> {
    fn read(m: &Mapper<'c>, mode: &'static str) -> Self {
        Self {
            mode: m.text("mode", mode),
            transform: m.text("coordinate_transformation_mode", "half_pixel"),
            nearest: m.text("nearest_mode", "round_prefer_floor"),
            cubic: m.float("cubic_coeff_a", -0.75),
            antialias: m.int("antialias", 0) != 0,
            inside_only: m.int("exclude_outside", 0) != 0,
            outside: m.float("extrapolation_value", 0.0),
        }
    }
}

fn resize(m: &Mapper<'_>) -> Result<Value> {
    let mut x = m.x(0)?;
    let dims = m.dims(x)?;
    let axes = m.list("axes");
    let axes = axes.unwrap_or_else(|| (0..dims.len() as i64).collect());
    let roi = m.given(1)?.map(Tensor::numbers).transpose()?;
    let sampling = Sampling::read(m, "nearest");
    let from = |i: usize| Ok::<_, anyhow::Error>(dims[axis_of(axes[i], dims.len())?] as f64);
    let mut wanted = Vec::new();
    match (m.given(2)?.filter(|s| s.elements() > 0), m.given_ints(3)?) {
        (Some(scales), _) => {
            for (i, scale) in scales.numbers()?.into_iter().enumerate() {
                wanted.push(((from(i)? * scale).floor(), scale));
            }
        }
        (None, Some(sizes)) => {
            for (i, &size) in sizes.iter().enumerate() {
                wanted.push((size as f64, size as f64 / from(i)?));
            }
            let scales = wanted.iter().map(|w| w.1);
            let one = match m.text("keep_aspect_ratio_policy", "stretch") {
                "not_larger" => Some(scales.fold(f64::INFINITY, f64::min)),
                "not_smaller" => Some(scales.fold(0.0, f64::max)),
                _ => None,
            };
            if let Some(scale) = one {
                for (i, w) in wanted.iter_mut().enumerate() {
                    *w = ((scale * from(i)? + 0.5).floor(), scale);
                }
            }
        }
        (None, None) => bail!("Resize without sizes"),
    }
    for (i, (size, scale)) in wanted.into_iter().enumerate() {
        let axis = axis_of(axes[i], dims.len())?;
        let crop = roi
            .as_ref()
            .and_then(|r| Some((*r.get(i)?, *r.get(i + axes.len())?)));
        x = along(m, x, axis, size as usize, scale, &sampling, crop)?;
    }
    Ok(x)
}

/// One axis resized to `to` elements.
fn along(
    m: &Mapper<'_>,
    x: Value,
    axis: usize,
    to: usize,
    scale: f64,
    sampling: &Sampling<'_>,
    crop: Option<(f64, f64)>,
) -> Result<Value> {
    let dims = m.dims(x)?;
    let from = dims[axis];
    if from == to && scale == 1.0 && crop.is_none() {
        return Ok(x);
    }
    let (mut weights, mut out) = (vec![0.0f32; to * from], vec![false; to]);
    let mut nearest = Vec::new();
    for i in 0..to {
        let at = position(i as f64, from as f64, to as f64, scale, sampling, crop)?;
        let last = from as f64 - 1.0;
        if sampling.transform == "tf_crop_and_resize" && !(0.0..=last).contains(&at) {
            out[i] = true;
            nearest.push(0);
            continue;
        }
        if sampling.mode == "nearest" {
            let pick = match sampling.nearest {
                "floor" => at.floor(),
                "ceil" => at.ceil(),
                "round_prefer_ceil" => (at + 0.5).floor(),
                _ => (at - 0.5).ceil(),
            };
            nearest.push(pick.clamp(0.0, last) as i64);
            continue;
        }
        let (first, taps) = taps(at, scale, sampling)?;
        let inside = |j: usize| (0..from as i64).contains(&(first + j as i64));
        let counts = |j: &usize| !sampling.inside_only || inside(*j);
        let total: f64 = match sampling.inside_only {
            true => (0..taps.len()).filter(counts).map(|j| taps[j]).sum(),
            false => 1.0,
        };
        for j in (0..taps.len()).filter(counts) {
            let k = (first + j as i64).clamp(0, from as i64 - 1) as usize;
            weights[i * from + k] += (taps[j] / total) as f32;
        }
    }
    let mut y = if sampling.mode == "nearest" {
        m.take(x, m.i64s(&[to], &nearest)?, axis as i64)?
    } else {
        let w = m.f32s(&[to, from], &weights)?;
        // The axis last, times the matrix, and back.
        let mut order: Vec<i64> = (0..dims.len() as i64).collect();
        order.swap(axis, dims.len() - 1);
        let product = m.binary("matmul", m.transpose(x, &order)?, m.transpose(w, &[1, 0])?)?;
        m.transpose(product, &order)?
    };
    if out.contains(&true) {
        let mut at = vec![1; dims.len()];
        at[axis] = to;
        let outside = m.literal(&Tensor {
            dtype: DType::Bool,
            dims: at,
            bytes: out.iter().map(|&o| u8::from(o)).collect(),
        })?;
        y = m.select(outside, m.like(sampling.outside, y)?, y)?;
    }
    Ok(y)
}

/// Where in the input element `i` of the result lies.
fn position(
    i: f64,
    from: f64,
    to: f64,
    scale: f64,
    sampling: &Sampling<'_>,
    crop: Option<(f64, f64)>,
) -> Result<f64> {
    let width = scale * from;
    let half_pixel = (i + 0.5) / scale - 0.5;
    Ok(match sampling.transform {
        "half_pixel" => half_pixel,
        "asymmetric" => i / scale,
        "align_corners" if width == 1.0 => 0.0,
        "align_corners" => i * (from - 1.0) / (width - 1.0),
        "pytorch_half_pixel" if width == 1.0 => -0.5,
        "pytorch_half_pixel" => half_pixel,
        "half_pixel_symmetric" => from / 2.0 * (1.0 - to / width) + half_pixel,
        "tf_crop_and_resize" => {
            let (start, end) = crop.context("a crop without region")?;
            let step = match width == 1.0 {
                true => (end - start) * (from - 1.0) / 2.0,
                false => i * (end - start) * (from - 1.0) / (width - 1.0),
            };
            step + start * (from - 1.0)
        }
        other => bail!("ONNX has no transformation {other}"),
    })
}

/// The first element that is read at a position, and the weights from there on.
fn taps(at: f64, scale: f64, sampling: &Sampling<'_>) -> Result<(i64, Vec<f64>)> {
    // Between elements base and base + 1, the latter included.
    let base = at.ceil() - 1.0;
    let ratio = at - base;
    // Shrinking widens the kernel, so that every element counts somewhere.
    let wide = if sampling.antialias {
        scale.min(1.0)
    } else {
        1.0
    };
    let (radius, weight): (f64, &dyn Fn(f64) -> f64) = match sampling.mode {
        "linear" => (1.0, &|d: f64| (1.0 - d.abs()).max(0.0)),
        "cubic" => (2.0, &|d: f64| cubic(d.abs(), sampling.cubic)),
        other => bail!("ONNX has no mode {other}"),
    };
    let start = (-radius / wide).floor() as i64 + 1;
    let mut taps: Vec<f64> = (start..2 - start)
        .map(|j| weight((j as f64 - ratio) * wide))
        .collect();
    let sum: f64 = taps.iter().sum();
    taps.iter_mut().for_each(|t| *t /= sum);
    Ok((base as i64 + start, taps))
}

/// Keys' cubic convolution kernel.
fn cubic(d: f64, a: f64) -> f64 {
    match d {
        d if d <= 1.0 => ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0,
        d if d < 2.0 => ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a,
        _ => 0.0,
    }
}

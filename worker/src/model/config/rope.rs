//! Rotary position embedding: its frequencies, and what the two formats say about it.

use hotcell_graph::DType;
use serde_json::Value;

use super::fields::{Checked, FACTOR, Fields, Key, THETA, brief};
use crate::format::gguf::{GgufError, Metadata};
use crate::format::{ModelError, limits, shown};
use crate::weights::Weights;

/// GGUF's tensor of factors by which frequencies are divided.
const FACTORS: &str = "rope_freqs.weight";

/// How rotary frequencies are stretched for a longer context.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All frequencies are divided by `factor`.
    Linear {
        /// At least 1.
        factor: f64,
    },
    /// Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between blended.
    Llama3 {
        /// At least 1.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are scaled.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` are kept; above `low_freq_factor`.
        high_freq_factor: f64,
        /// The context the model was first trained for.
        original_context: usize,
    },
    /// Each frequency is divided by its own factor (GGUF `rope_freqs.weight`): `head_dim / 2` positive numbers.
    Factors(Vec<f32>),
}

/// Rotary position embedding over the whole head.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// The base of the frequencies, at least 1.
    pub theta: f64,
    /// The stretching.
    pub scaling: RopeScaling,
    /// Whether elements 2i and 2i+1 turn together, else i and i + head_dim/2.
    pub interleaved: bool,
}

impl Rope {
    /// The angle per position of each pair of elements: `head_dim / 2` numbers, computed in `f64` (with
    /// libm's `pow`, which is the same on every machine) and rounded once.
    /// Source: transformers `modeling_rope_utils.py`, which computes the same in `f32`.
    pub fn inverse_frequencies(&self, head_dim: usize) -> Vec<f32> {
        let frequency =
            |pair: usize| 1.0 / libm::pow(self.theta, (2 * pair) as f64 / head_dim as f64);
        let plain = (0..head_dim / 2).map(frequency);
        match &self.scaling {
            RopeScaling::None => plain.map(|f| f as f32).collect(),
            RopeScaling::Linear { factor } => plain.map(|f| (f / factor) as f32).collect(),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_context,
            } => {
                let context = *original_context as f64;
                let stretch = |f: f64| {
                    let wavelength = 2.0 * std::f64::consts::PI / f;
                    if wavelength < context / high {
                        f
                    } else if wavelength > context / low {
                        f / factor
                    } else {
                        let smooth = (context / wavelength - low) / (high - low);
                        (1.0 - smooth) * f / factor + smooth * f
                    }
                };
                plain.map(|f| stretch(f) as f32).collect()
            }
            RopeScaling::Factors(factors) => plain
                .zip(factors)
                .map(|(f, &x)| (f / f64::from(x)) as f32)
                .collect(),
        }
    }
}

/// The value of a rope field: newer files keep them in `rope_parameters`, older ones in `rope_scaling`.
pub(super) fn from_hugging_face(fields: Fields<'_>, theta: &mut f64) -> Checked<RopeScaling> {
    let mut scaling = RopeScaling::None;
    refuse_partial(fields)?;
    for name in ["rope_scaling", "rope_parameters"] {
        if let Some(value) = fields.json(name) {
            scaling = from_object(fields, name, value, theta)?;
        }
    }
    Ok(scaling)
}

/// Heads that turn in part only.
pub(super) fn refuse_partial(fields: Fields<'_>) -> Checked<()> {
    let partial = fields.float(&Key("partial_rotary_factor", ""))?;
    if let Some(partial) = partial.filter(|&partial| partial != 1.0) {
        return Err(fields.unsupported(format!(
            "partial_rotary_factor {partial:?} is not supported, only 1.0 is"
        )));
    }
    Ok(())
}

/// What one object, the value of the field `name`, says.
pub(super) fn from_object(
    fields: Fields<'_>,
    name: &str,
    value: &Value,
    theta: &mut f64,
) -> Checked<RopeScaling> {
    let whole = |name: &'static str| Key(name, name);
    let map = value.as_object().ok_or_else(|| {
        fields.corrupt(format!("{name} is {} but must be an object", brief(value)))
    })?;
    let rope = Fields::HuggingFace {
        file: "config.json",
        map,
    };
    *theta = rope.float_in(&THETA, 1.0, 1e12)?.unwrap_or(*theta);
    refuse_partial(rope)?;
    let required = |key: Key, low: f64| {
        rope.float_in(&key, low, 1e6)?
            .ok_or_else(|| fields.corrupt(format!("{name} has no {}", key.0)))
    };
    let kind = rope.json("rope_type").or_else(|| rope.json("type"));
    match kind.map_or(Some("default"), Value::as_str) {
        Some("default") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear {
            factor: required(FACTOR, 1.0)?,
        }),
        Some("llama3") => {
            let original = whole("original_max_position_embeddings");
            let (low, high) = (
                required(whole("low_freq_factor"), 1e-6)?,
                required(whole("high_freq_factor"), 1e-6)?,
            );
            if low >= high {
                let what = format!(
                    "{name}: low_freq_factor ({low:?}) must be below high_freq_factor ({high:?})"
                );
                return Err(fields.corrupt(what));
            }
            Ok(RopeScaling::Llama3 {
                factor: required(FACTOR, 1.0)?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_context: rope.required(&original, limits::CONTEXT)?,
            })
        }
        Some(other) => Err(bad_scaling(fields, other)),
        None => Err(fields.corrupt(format!("rope_type in {name} is not a text"))),
    }
}

fn bad_scaling(fields: Fields<'_>, kind: &str) -> ModelError {
    let supported = match fields {
        Fields::HuggingFace { .. } => "'default', 'linear' and 'llama3'",
        Fields::Gguf { .. } => "'none', 'linear' and rope_freqs.weight",
    };
    fields.unsupported(format!(
        "unsupported rope scaling {}; supported are {supported}",
        shown(kind)
    ))
}

pub(super) fn from_gguf(
    fields: Fields<'_>,
    metadata: Metadata<'_>,
    weights: &Weights,
    head_dim: usize,
) -> Checked<RopeScaling> {
    for key in [
        Key("", "rope.dimension_count"),
        Key("", "attention.value_length"),
    ] {
        if let Some(found) = fields.uint(&key)?.filter(|&found| found != head_dim as u64) {
            let what = format!(
                "{} {found} is not supported for heads {head_dim} wide",
                fields.name(&key)
            );
            return Err(fields.unsupported(what));
        }
    }
    let fail = |error: GgufError| error.in_file(&fields.file());
    let kind = metadata
        .get_str(&fields.name(&Key("", "rope.scaling.type")))
        .map_err(fail)?;
    let scaling = match kind {
        None => match fields.float_in(&Key("", "rope.scale_linear"), 1.0, 1e6)? {
            Some(factor) if factor != 1.0 => RopeScaling::Linear { factor },
            _ => RopeScaling::None,
        },
        Some("none") => RopeScaling::None,
        Some("linear") => {
            let factor = fields.float_in(&FACTOR, 1.0, 1e6)?;
            RopeScaling::Linear {
                factor: factor.ok_or_else(|| fields.missing(&FACTOR))?,
            }
        }
        Some(other) => return Err(bad_scaling(fields, other)),
    };
    if !weights.contains(FACTORS) {
        return Ok(scaling);
    }
    if scaling != RopeScaling::None {
        let what = format!("linear rope scaling together with tensor '{FACTORS}' is not supported");
        return Err(fields.unsupported(what));
    }
    let weight = weights.expect(FACTORS, &[head_dim / 2])?;
    if weight.dtype != DType::F32 {
        let what = format!(
            "tensor '{FACTORS}' is stored as {}, not as f32",
            weight.dtype
        );
        return Err(fields.unsupported(what));
    }
    let chunks = weight.bytes().as_chunks().0.iter();
    let factors: Vec<f32> = chunks.map(|bytes| f32::from_le_bytes(*bytes)).collect();
    if let Some(bad) = factors
        .iter()
        .find(|factor| !(1e-6..=1e6).contains(*factor))
    {
        let what = format!("tensor '{FACTORS}' holds {bad:?}, which is not between 1e-6 and 1e6");
        return Err(fields.corrupt(what));
    }
    Ok(RopeScaling::Factors(factors))
}

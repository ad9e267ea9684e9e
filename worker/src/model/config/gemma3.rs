//! Gemma 3: layers with a window between layers without one, their two ropes, scales and caps.
//!
//! Sources: transformers `configuration_gemma3.py`, whose defaults these are; llama.cpp's `gemma3`.

use super::fields::{Checked, Fields, Key, THETA, WINDOW};
use super::rope::{self, Rope, RopeScaling};
use super::{ModelConfig, window};
use crate::format::limits;

/// One in so many layers has no window.
const PATTERN: Key = Key("sliding_window_pattern", "attention.sliding_window_pattern");
const USUAL_PATTERN: usize = 6;
/// The base of the frequencies of layers with a window.
const LOCAL_THETA: Key = Key("rope_local_base_freq", "rope.freq_base_swa");
const USUAL_LOCAL_THETA: f64 = 10_000.0;
/// The root of this divides scores.
const QUERY_SCALE: Key = Key("query_pre_attn_scalar", "");
const ATTENTION_CAP: Key = Key("attn_logit_softcapping", "attn_logit_softcapping");
const LOGIT_CAP: Key = Key("final_logit_softcapping", "final_logit_softcapping");

pub(super) fn from_hugging_face(fields: Fields<'_>, model: &mut ModelConfig) -> Checked<()> {
    if fields.flag("use_bidirectional_attention")? {
        return Err(fields.unsupported(
            "use_bidirectional_attention is not supported: models that embed text are not"
                .to_owned(),
        ));
    }
    let layers = model.layers;
    let windowed = match window::layer_types(fields, layers)? {
        Some(windowed) => windowed,
        None => in_pattern(fields, layers)?,
    };
    let window = fields.uint(&WINDOW)?.unwrap_or(4096);
    set_window(fields, model, window, windowed)?;

    rope::refuse_partial(fields)?;
    let mut rope = Rope {
        theta: fields.float_in(&THETA, 1.0, 1e12)?.unwrap_or(1e6),
        scaling: RopeScaling::None,
        interleaved: false,
    };
    let mut local = local_rope(fields)?;
    if let Some(scaling) = fields.json("rope_scaling") {
        rope.scaling = rope::from_object(fields, "rope_scaling", scaling, &mut rope.theta)?;
    }
    if let Some(parameters) = fields.json("rope_parameters") {
        let kinds = [
            ("full_attention", &mut rope),
            ("sliding_attention", &mut local),
        ];
        if kinds.iter().all(|(kind, _)| parameters.get(kind).is_none()) {
            let what = "rope_parameters has neither full_attention nor sliding_attention";
            return Err(fields.corrupt(what.to_owned()));
        }
        for (kind, rope) in kinds {
            if let Some(value) = parameters.get(kind).filter(|value| !value.is_null()) {
                rope.scaling = rope::from_object(fields, kind, value, &mut rope.theta)?;
            }
        }
    }
    (model.rope, model.local_rope) = (rope, Some(local));
    let scalar = fields.float_in(&QUERY_SCALE, 1e-3, 1e6)?.unwrap_or(256.0);
    model.attention_scale = 1.0 / scalar.sqrt();
    model.norms_less_one = true;
    model.tied_embeddings = match fields.json("tie_word_embeddings") {
        None => true,
        Some(_) => fields.flag("tie_word_embeddings")?,
    };
    set_caps(fields, model)
}

/// Converters have added the one to the weights of norms.
pub(super) fn from_gguf(fields: Fields<'_>, model: &mut ModelConfig) -> Checked<()> {
    let window = fields
        .uint(&WINDOW)?
        .ok_or_else(|| fields.missing(&WINDOW))?;
    let windowed = in_pattern(fields, model.layers)?;
    set_window(fields, model, window, windowed)?;
    model.local_rope = Some(local_rope(fields)?);
    // llama.cpp tells the one size whose scale is another by its number of layers: 27B.
    if model.layers == 62 {
        model.attention_scale = 1.0 / ((model.hidden / model.heads) as f64).sqrt();
    }
    set_caps(fields, model)
}

fn in_pattern(fields: Fields<'_>, layers: usize) -> Checked<Vec<bool>> {
    let pattern = fields
        .size(&PATTERN, limits::LAYERS)?
        .unwrap_or(USUAL_PATTERN);
    Ok((1..=layers).map(|n| !n.is_multiple_of(pattern)).collect())
}

/// Which layers are local holds even where their window is no narrower than the context: they have another rope.
fn set_window(
    fields: Fields<'_>,
    model: &mut ModelConfig,
    window: u64,
    windowed: Vec<bool>,
) -> Checked<()> {
    let window = fields.sized(&fields.name(&WINDOW), window, limits::CONTEXT)?;
    model.sliding_window = Some(window).filter(|&window| window < model.context);
    model.windowed = windowed;
    Ok(())
}

fn local_rope(fields: Fields<'_>) -> Checked<Rope> {
    let theta = fields.float_in(&LOCAL_THETA, 1.0, 1e12)?;
    Ok(Rope {
        theta: theta.unwrap_or(USUAL_LOCAL_THETA),
        scaling: RopeScaling::None,
        interleaved: false,
    })
}

fn set_caps(fields: Fields<'_>, model: &mut ModelConfig) -> Checked<()> {
    // In GGUF a cap of 0 is none.
    let gguf = matches!(fields, Fields::Gguf { .. });
    let cap = |key: &Key| match fields.float(key)? {
        Some(0.0) if gguf => Ok(None),
        _ => fields.float_in(key, 1e-3, 1e6),
    };
    (model.attention_cap, model.logit_cap) = (cap(&ATTENTION_CAP)?, cap(&LOGIT_CAP)?);
    Ok(())
}

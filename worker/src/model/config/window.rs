//! Which layers look through a sliding window.

use serde_json::Value;

use super::ModelConfig;
use super::fields::{Checked, Fields, Key, WINDOW, brief};

/// Whether `config.json` of an architecture may ask for a sliding window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Window {
    /// `sliding_window` is ignored.
    Never,
    /// `sliding_window` holds for all layers.
    Always,
    /// `sliding_window` holds if `use_sliding_window`, for the layers from `max_window_layers` on or those
    /// that `layer_types` names.
    IfAsked,
    /// `sliding_window` holds if `use_sliding_window`, for all layers.
    AllIfAsked,
    /// `sliding_window` holds in a pattern, which is read with what else depends on it.
    InPattern,
}

/// Which layers look through a window. Source: `layer_types` in transformers' Qwen2Config.
pub(super) fn from_hugging_face(
    fields: Fields<'_>,
    row: Window,
    model: &mut ModelConfig,
) -> Checked<()> {
    let (asked, all) = match row {
        Window::Never | Window::InPattern => (false, false),
        Window::Always => (true, true),
        Window::IfAsked => (fields.flag("use_sliding_window")?, false),
        Window::AllIfAsked => (fields.flag("use_sliding_window")?, true),
    };
    if !asked {
        return Ok(());
    }
    let window = fields.uint(&WINDOW)?;
    if all {
        return model.set_window(window, fields, |_| true);
    }
    match layer_types(fields, model.layers)? {
        Some(sliding) => model.set_window(window, fields, |layer| {
            sliding.get(layer).is_some_and(|&sliding| sliding)
        }),
        None => {
            let first = fields.uint(&Key("max_window_layers", ""))?.unwrap_or(0);
            model.set_window(window, fields, |layer| layer as u64 >= first)
        }
    }
}

/// Whether each layer slides, if `layer_types` says so.
pub(super) fn layer_types(fields: Fields<'_>, layers: usize) -> Checked<Option<Vec<bool>>> {
    let Some(types) = fields.json("layer_types") else {
        return Ok(None);
    };
    let types = types.as_array().map(Vec::as_slice).unwrap_or_default();
    if types.len() != layers {
        let what = format!(
            "layer_types lists {} layers where num_hidden_layers is {layers}",
            types.len(),
        );
        return Err(fields.corrupt(what));
    }
    let sliding = |kind: &Value| match kind.as_str() {
        Some("full_attention") => Ok(false),
        Some("sliding_attention") => Ok(true),
        _ => Err(fields.unsupported(format!("layer type {} is not supported", brief(kind)))),
    };
    types.iter().map(sliding).collect::<Checked<_>>().map(Some)
}

//! Weights in 8-bit floats: what `quantization_config` says of them. Which tensors are stored so, and with how many scales, is seen
//! from the files.

use serde_json::Value;

use super::fields::{Checked, Fields, brief};

/// Rows or columns of a rectangle of weights that has a scale, at most.
const MOST: u64 = 1 << 16;

/// Height and width of the rectangles that have a scale each, if weights have more than one for each row. Everything else
/// than weights of E4M3 is refused.
///
/// How activations would be rounded is not read: they are not.
pub(super) fn from_hugging_face(fields: Fields<'_>) -> Checked<Option<[usize; 2]>> {
    let Some(quantised) = fields.json("quantization_config") else {
        return Ok(None);
    };
    let text = |name: &str| quantised.get(name).and_then(Value::as_str);
    let refused = |what: String| {
        fields.unsupported(format!(
            "{what} are not supported; use the original model, one in 8-bit floats (E4M3) or a GGUF file"
        ))
    };
    let (name, rectangle) = match text("quant_method") {
        Some("fp8") => match text("fmt") {
            None | Some("e4m3") => ("weight_block_size", quantised.get("weight_block_size")),
            Some(other) => return Err(refused(format!("weights of {}", brief(&other.into())))),
        },
        Some("fbgemm_fp8") => return Ok(None),
        Some("modelopt") if text("quant_algo") == Some("FP8") => return Ok(None),
        Some("compressed-tensors") if text("format") == Some("float-quantized") => {
            let groups = quantised.get("config_groups").and_then(Value::as_object);
            let weights = groups
                .into_iter()
                .flat_map(|groups| groups.values())
                .find_map(|group| group.get("weights"));
            let name = "block_structure";
            (name, weights.and_then(|weights| weights.get(name)))
        }
        method => {
            let format = match method {
                Some("compressed-tensors") => text("format"),
                Some("modelopt") => text("quant_algo"),
                _ => None,
            };
            let method = method.map_or_else(
                || "an unnamed method".to_owned(),
                |method| brief(&method.into()),
            );
            let of = format.map_or_else(String::new, |of| format!(" ({})", brief(&of.into())));
            return Err(refused(format!("weights quantised with {method}{of}")));
        }
    };
    let Some(rectangle) = rectangle.filter(|value| !value.is_null()) else {
        return Ok(None);
    };
    let size = |value: &Value| value.as_u64().filter(|size| (1..=MOST).contains(size));
    match rectangle.as_array().map(Vec::as_slice) {
        Some([height, width]) if size(height).is_some() && size(width).is_some() => {
            let size = |value| size(value).map_or(1, |size| size as usize);
            Ok(Some([size(height), size(width)]))
        }
        _ => Err(fields.corrupt(format!(
            "{name} is {} but must be two whole numbers from 1 to {MOST}",
            brief(rectangle)
        ))),
    }
}

//! Weights in 8-bit floats: what `quantization_config` says of them. Which tensors are stored so, and with how many scales, is seen
//! from the files.

use serde_json::Value;

use super::fields::{Checked, Fields, brief};

/// Rows or columns of a rectangle of weights that has a scale, at most.
const MOST: u64 = 1 << 16;

/// What is said of weights in 8-bit floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Floats8 {
    /// Height and width of the rectangles that have a scale each, if weights have more than one for each row.
    pub rectangle: Option<[usize; 2]>,
}

/// What the configuration says, if it says that weights are quantised. Everything else than weights of E4M3 is refused.
///
/// How activations would be rounded is not read: they are not.
pub(super) fn from_hugging_face(fields: Fields<'_>) -> Checked<Option<Floats8>> {
    let plain = Floats8 { rectangle: None };
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
        Some("fbgemm_fp8") => return Ok(Some(plain)),
        Some("modelopt") if text("quant_algo") == Some("FP8") => return Ok(Some(plain)),
        Some("compressed-tensors") if text("format") == Some("float-quantized") => {
            let is_none = |value: &Value| match value {
                Value::Object(map) => map.is_empty(),
                value => value.is_null(),
            };
            if !quantised.get("transform_config").is_none_or(is_none) {
                return Err(refused("weights that were transformed".to_owned()));
            }
            let name = "block_structure";
            let groups = quantised.get("config_groups").and_then(Value::as_object);
            let groups = groups.into_iter().flat_map(|groups| groups.values());
            let mut all = groups.filter_map(|group| group.get("weights")?.get(name));
            let first = all.by_ref().find(|value| !value.is_null());
            if all.any(|value| !value.is_null() && Some(value) != first) {
                return Err(refused("rectangles of several sizes".to_owned()));
            }
            (name, first)
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
        return Ok(Some(plain));
    };
    let size = |value: &Value| value.as_u64().filter(|size| (1..=MOST).contains(size));
    match rectangle.as_array().map(Vec::as_slice) {
        Some([height, width]) if size(height).is_some() && size(width).is_some() => {
            let size = |value| size(value).map_or(1, |size| size as usize);
            let rectangle = Some([size(height), size(width)]);
            Ok(Some(Floats8 { rectangle }))
        }
        _ => Err(fields.corrupt(format!(
            "{name} is {} but must be two whole numbers from 1 to {MOST}",
            brief(rectangle)
        ))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, json};

    use super::*;

    fn of(said: Value) -> Result<Option<Option<[usize; 2]>>, String> {
        let mut map = Map::new();
        map.insert("quantization_config".to_owned(), said);
        let fields = Fields::HuggingFace {
            file: "config.json",
            map: &map,
        };
        let found = from_hugging_face(fields).map_err(|error| error.to_string())?;
        Ok(found.map(|found| found.rectangle))
    }

    #[test]
    fn floats_of_8_bits_are_known_by_their_methods() {
        assert_eq!(of(Value::Null), Ok(None));
        let blocks = json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 64]});
        assert_eq!(of(blocks), Ok(Some(Some([128, 64]))));
        for plain in [
            json!({"quant_method": "fp8", "weight_block_size": null}),
            json!({"quant_method": "fbgemm_fp8"}),
            json!({"quant_method": "modelopt", "quant_algo": "FP8"}),
            json!({"quant_method": "compressed-tensors", "format": "float-quantized"}),
        ] {
            assert_eq!(of(plain.clone()), Ok(Some(None)), "{plain}");
        }
        let groups = |groups: Value| json!({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups, "transform_config": {}});
        let two = groups(json!({
            "a": {"weights": {"strategy": "channel", "block_structure": null}},
            "b": {"weights": {"strategy": "block", "block_structure": [128, 128]}},
        }));
        assert_eq!(of(two), Ok(Some(Some([128, 128]))));
    }

    #[test]
    fn what_is_not_computed_is_refused_by_name() {
        let tensors = "compressed-tensors";
        let of_sizes = json!({
            "a": {"weights": {"block_structure": [64, 64]}},
            "b": {"weights": {"block_structure": [128, 128]}},
        });
        for (said, what) in [
            (json!({"quant_method": "gptq"}), "quantised with 'gptq' are"),
            (json!({}), "an unnamed method"),
            (json!({"quant_method": "fp8", "fmt": "e5m2"}), "'e5m2'"),
            (
                json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}),
                "('NVFP4')",
            ),
            (
                json!({"quant_method": tensors, "format": "pack-quantized"}),
                "('pack-quantized')",
            ),
            (
                json!({"quant_method": tensors, "format": "float-quantized", "transform_config": {"a": 1}}),
                "transformed",
            ),
            (
                json!({"quant_method": tensors, "format": "float-quantized", "config_groups": of_sizes}),
                "several sizes",
            ),
            (
                json!({"quant_method": "fp8", "weight_block_size": [128, 0]}),
                "weight_block_size is a list but must be two",
            ),
            (
                json!({"quant_method": "fp8", "weight_block_size": 128}),
                "must be two",
            ),
        ] {
            let refused = of(said.clone()).expect_err("refused");
            assert!(refused.contains(what), "{said}: {refused}");
        }
    }
}

//! Fields of `config.json` or of GGUF metadata, read with one set of checks.

use serde_json::{Map, Value};

use crate::format::gguf::{GgufError, Metadata, ValueType};
use crate::format::{ModelError, limits, shown};

/// A field's name in `config.json`, and in GGUF after the architecture's.
pub(super) struct Key(pub(super) &'static str, pub(super) &'static str);

pub(super) const VOCAB: Key = Key("vocab_size", "vocab_size");
pub(super) const HIDDEN: Key = Key("hidden_size", "embedding_length");
pub(super) const LAYERS: Key = Key("num_hidden_layers", "block_count");
pub(super) const HEADS: Key = Key("num_attention_heads", "attention.head_count");
pub(super) const KV_HEADS: Key = Key("num_key_value_heads", "attention.head_count_kv");
pub(super) const HEAD_DIM: Key = Key("head_dim", "attention.key_length");
pub(super) const INTERMEDIATE: Key = Key("intermediate_size", "feed_forward_length");
pub(super) const CONTEXT: Key = Key("max_position_embeddings", "context_length");
pub(super) const RMS_EPS: Key = Key("rms_norm_eps", "attention.layer_norm_rms_epsilon");
pub(super) const THETA: Key = Key("rope_theta", "rope.freq_base");
pub(super) const WINDOW: Key = Key("sliding_window", "attention.sliding_window");
pub(super) const EXPERTS: Key = Key("num_experts", "expert_count");
pub(super) const FACTOR: Key = Key("factor", "rope.scaling.factor");

/// Fields of either format, read with checks.
#[derive(Clone, Copy)]
pub(super) enum Fields<'a> {
    HuggingFace {
        file: &'a str,
        map: &'a Map<String, Value>,
    },
    Gguf {
        file: &'a str,
        metadata: Metadata<'a>,
        architecture: &'a str,
    },
}

pub(super) type Checked<T> = Result<T, ModelError>;

impl<'a> Fields<'a> {
    pub(super) fn file(self) -> String {
        match self {
            Fields::HuggingFace { file, .. } | Fields::Gguf { file, .. } => file.to_owned(),
        }
    }

    pub(super) fn name(self, key: &Key) -> String {
        match self {
            Fields::HuggingFace { .. } => key.0.to_owned(),
            Fields::Gguf { architecture, .. } => format!("{architecture}.{}", key.1),
        }
    }

    pub(super) fn corrupt(self, what: String) -> ModelError {
        ModelError::Corrupt {
            file: self.file(),
            what,
        }
    }

    pub(super) fn unsupported(self, what: String) -> ModelError {
        ModelError::Unsupported {
            file: self.file(),
            what,
        }
    }

    pub(super) fn json(self, name: &str) -> Option<&'a Value> {
        match self {
            Fields::HuggingFace { map, .. } => map.get(name).filter(|value| !value.is_null()),
            Fields::Gguf { .. } => None,
        }
    }

    pub(super) fn uint(self, key: &Key) -> Checked<Option<u64>> {
        let name = self.name(key);
        match self {
            Fields::HuggingFace { .. } => self
                .json(&name)
                .map(|value| self.whole(&name, value))
                .transpose(),
            Fields::Gguf { file, metadata, .. } => {
                let fail = |error: GgufError| error.in_file(file);
                if metadata.kind(&name) != Some(ValueType::Array) {
                    return metadata.get_u64(&name).map_err(fail);
                }
                // One number per layer, which we take if they are all the same.
                let mut numbers = metadata
                    .get_ints(&name)
                    .map_err(fail)?
                    .into_iter()
                    .flatten();
                let first = numbers.next();
                if numbers.any(|number| Some(number) != first) {
                    return Err(self.unsupported(format!(
                        "{name} differs from layer to layer, which is not supported"
                    )));
                }
                let negative = |_| self.corrupt(format!("{name} is negative"));
                first
                    .map(|number| u64::try_from(number).map_err(negative))
                    .transpose()
            }
        }
    }

    /// A JSON number as a whole one.
    pub(super) fn whole(self, name: &str, value: &Value) -> Checked<u64> {
        let wrong = || {
            self.corrupt(format!(
                "{name} is {} but must be a whole number",
                brief(value)
            ))
        };
        value.as_u64().ok_or_else(wrong)
    }

    pub(super) fn float(self, key: &Key) -> Checked<Option<f64>> {
        let name = self.name(key);
        let value = match self {
            Fields::HuggingFace { .. } => match self.json(&name) {
                None => None,
                Some(value) => {
                    let wrong =
                        || self.corrupt(format!("{name} is {} but must be a number", brief(value)));
                    Some(value.as_f64().ok_or_else(wrong)?)
                }
            },
            Fields::Gguf { file, metadata, .. } => metadata
                .get_f64(&name)
                .map_err(|error| error.in_file(file))?,
        };
        if value.is_some_and(|value| !value.is_finite()) {
            return Err(self.corrupt(format!("{name} is not a finite number")));
        }
        Ok(value)
    }

    /// A float between bounds.
    pub(super) fn float_in(self, key: &Key, low: f64, high: f64) -> Checked<Option<f64>> {
        let value = self.float(key)?;
        if let Some(value) = value.filter(|value| !(low..=high).contains(value)) {
            let name = self.name(key);
            return Err(self.corrupt(format!(
                "{name} is {value:?} but must be between {low:?} and {high:?}"
            )));
        }
        Ok(value)
    }

    pub(super) fn flag(self, name: &str) -> Checked<bool> {
        match self.json(name) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(value) => Err(self.corrupt(format!(
                "{name} is {} but must be true or false",
                brief(value)
            ))),
        }
    }

    /// A truth value of GGUF metadata.
    pub(super) fn gguf_flag(self, name: &'static str) -> Checked<Option<bool>> {
        match self {
            Fields::HuggingFace { .. } => Ok(None),
            Fields::Gguf { file, metadata, .. } => metadata
                .get_bool(&self.name(&Key("", name)))
                .map_err(|error| error.in_file(file)),
        }
    }

    /// A number from 1 to `max`.
    pub(super) fn size(self, key: &Key, max: usize) -> Checked<Option<usize>> {
        self.uint(key)?
            .map(|value| self.sized(&self.name(key), value, max))
            .transpose()
    }

    pub(super) fn sized(self, name: &str, value: u64, max: usize) -> Checked<usize> {
        match usize::try_from(value) {
            Ok(0) => Err(self.corrupt(format!("{name} is 0 but must be at least 1"))),
            Ok(value) if value <= max => Ok(value),
            _ => {
                let what = format!("{name} is {value} where the limit is {max}");
                Err(ModelError::TooLarge {
                    file: self.file(),
                    what,
                })
            }
        }
    }

    pub(super) fn required(self, key: &Key, max: usize) -> Checked<usize> {
        self.size(key, max)?.ok_or_else(|| self.missing(key))
    }

    pub(super) fn missing(self, key: &Key) -> ModelError {
        self.corrupt(format!(
            "it has no {}; take the file that was published with the model",
            self.name(key)
        ))
    }
}

/// A JSON value for a message.
pub(super) fn brief(value: &Value) -> String {
    match value {
        Value::String(text) => shown(text),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
        other => other.to_string(),
    }
}

pub(super) fn token_id(fields: Fields<'_>, name: &str, id: u64, vocab: usize) -> Checked<u32> {
    let small = u32::try_from(id).ok().filter(|&id| (id as usize) < vocab);
    small.ok_or_else(|| {
        fields.corrupt(format!(
            "{name} is {id} but the vocabulary has {vocab} tokens"
        ))
    })
}

/// A token id or a list of them.
pub(super) fn token_ids(fields: Fields<'_>, name: &str, vocab: usize) -> Checked<Vec<u32>> {
    let list = match fields.json(name) {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) => list.as_slice(),
        Some(single) => std::slice::from_ref(single),
    };
    if list.len() > limits::EOS_TOKENS {
        let what = format!(
            "{name} lists {} tokens where the limit is {}",
            list.len(),
            limits::EOS_TOKENS
        );
        return Err(ModelError::TooLarge {
            file: fields.file(),
            what,
        });
    }
    let mut ids = Vec::new();
    for value in list {
        let id = token_id(fields, name, fields.whole(name, value)?, vocab)?;
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    Ok(ids)
}

//! A model's files opened: which format they are, what is where, and whether all are there.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use hotcell_ipc::memory::Mapping;
use serde_json::Value;

use super::gguf::{Gguf, Metadata};
use super::{ModelError, limits, safetensors, shown};
use crate::model::config::ModelConfig;
use crate::weights::{Fnv, ModelFile, NameScheme, Weights};

/// A GGUF file and its index.
#[derive(Clone)]
pub struct GgufFile {
    name: Arc<str>,
    mapping: Mapping,
    index: Arc<Gguf>,
}

impl GgufFile {
    /// Indexes a file.
    pub fn open(file: &ModelFile) -> Result<GgufFile, ModelError> {
        let index = Gguf::parse(file.mapping.bytes()).map_err(|error| error.in_file(&file.name))?;
        Ok(GgufFile {
            name: file.name.as_str().into(),
            mapping: file.mapping.clone(),
            index: Arc::new(index),
        })
    }

    /// The file's name, for errors.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The index.
    pub fn index(&self) -> &Gguf {
        &self.index
    }

    /// The metadata, in place.
    pub fn metadata(&self) -> Metadata<'_> {
        self.index.metadata(self.mapping.bytes())
    }
}

impl fmt::Debug for GgufFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GgufFile")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// What a model's tokenizer and chat template are made from. None of it has been interpreted.
#[derive(Clone)]
pub enum TextSource {
    /// Files of a Hugging Face folder.
    HuggingFace {
        /// `tokenizer.json`.
        tokenizer_json: Mapping,
        /// `tokenizer_config.json`, of which it is only certain that it is an object.
        tokenizer_config: Option<Value>,
        /// The chat template: `chat_template.jinja`, or the one (the one named `default`) in
        /// `tokenizer_config.json`.
        chat_template: Option<String>,
        /// `generation_config.json`, of which it is only certain that it is an object.
        generation_config: Option<Value>,
    },
    /// Metadata `tokenizer.*` of a GGUF file.
    Gguf(GgufFile),
}

impl fmt::Debug for TextSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TextSource::HuggingFace { chat_template, .. } => f
                .debug_struct("HuggingFace")
                .field("chat_template", chat_template)
                .finish_non_exhaustive(),
            TextSource::Gguf(file) => f.debug_tuple("Gguf").field(file).finish(),
        }
    }
}

/// A model, opened.
#[derive(Clone, Debug)]
pub struct ModelSource {
    /// Its tensors, in place.
    pub weights: Weights,
    /// Its sizes and constants, checked against limits and each other, not against the weights.
    pub config: ModelConfig,
    /// How its tensors are named.
    pub names: NameScheme,
    /// What its tokenizer is made from.
    pub text: TextSource,
}

impl ModelSource {
    /// Opens a model from its files: GGUF if exactly one of them is `*.gguf`, else a Hugging Face folder
    /// (`config.json`, `tokenizer.json`, and `model.safetensors` or an index and its shards). Files that are
    /// neither are ignored. Nothing of the tensors' data is read or copied.
    pub fn open(files: Vec<ModelFile>) -> Result<ModelSource, ModelError> {
        if files.len() > limits::FILES {
            let what = format!(
                "it has {} files where the limit is {}",
                files.len(),
                limits::FILES
            );
            return Err(ModelError::TooLarge {
                file: "the model's folder".to_owned(),
                what,
            });
        }
        let mut folder = BTreeMap::new();
        for file in &files {
            if folder.insert(file.name.as_str(), file).is_some() {
                return Err(ModelError::NotAModel {
                    what: format!("two of its files are named {}", shown(&file.name)),
                });
            }
        }
        let gguf: Vec<&ModelFile> = files
            .iter()
            .filter(|file| file.name.ends_with(".gguf"))
            .collect();
        match gguf.as_slice() {
            [file] => open_gguf(file),
            [first, second, ..] if !folder.contains_key("config.json") => {
                let (first, second) = (shown(&first.name), shown(&second.name));
                let what = format!(
                    "its folder holds several GGUF files, {first} and {second} among them; name one"
                );
                Err(ModelError::NotAModel { what })
            }
            _ => open_folder(&folder),
        }
    }

    /// [`Weights::fingerprint`] with the configuration in it: a number that identifies what the model
    /// computes, as little cryptographic as that one. It is stable for one version of Hotcell.
    pub fn fingerprint(&self) -> u128 {
        let mut hash = Fnv(self.weights.fingerprint());
        hash.field(format!("{:?} {:?}", self.config, self.names).as_bytes());
        hash.0
    }
}

fn open_gguf(file: &ModelFile) -> Result<ModelSource, ModelError> {
    let gguf = GgufFile::open(file)?;
    let mut weights = Weights::default();
    weights.add(file, gguf.index().tensors().to_vec())?;
    let config = ModelConfig::from_gguf(&file.name, gguf.metadata(), &weights)?;
    Ok(ModelSource {
        weights,
        config,
        names: NameScheme::Gguf,
        text: TextSource::Gguf(gguf),
    })
}

fn open_folder(folder: &BTreeMap<&str, &ModelFile>) -> Result<ModelSource, ModelError> {
    if !folder.contains_key("config.json") {
        let tensors = folder.keys().any(|name| name.ends_with(".safetensors"));
        return Err(if tensors {
            let why = "a safetensors model needs it beside its tensors; open the folder rather than the file";
            ModelError::MissingFile {
                file: "config.json".to_owned(),
                why: why.to_owned(),
            }
        } else {
            let what = "give one GGUF file, or a folder with config.json, tokenizer.json and model.safetensors";
            ModelError::NotAModel {
                what: what.to_owned(),
            }
        });
    }
    let config = object(folder, "config.json", limits::CONFIG_BYTES)?.unwrap_or_default();
    let generation_config = object(folder, "generation_config.json", limits::CONFIG_BYTES)?;
    let config = ModelConfig::from_hugging_face(&config, generation_config.as_ref())?;

    let names: BTreeSet<&str> = folder.keys().copied().collect();
    let index = folder
        .get(safetensors::INDEX)
        .map(|file| file.mapping.bytes());
    let shards = safetensors::shards(&names, index)?;
    let mut weights = Weights::default();
    let mut found = BTreeMap::new();
    for name in &shards.files {
        let Some(file) = folder.get(name.as_str()) else {
            continue;
        };
        let stored = safetensors::parse(name, file.mapping.bytes())?;
        if !shards.placed.is_empty() {
            found.extend(
                stored
                    .iter()
                    .map(|tensor| (tensor.name.clone(), name.as_str())),
            );
        }
        weights.add(file, stored)?;
    }
    for (tensor, file) in &shards.placed {
        if found.get(tensor) != Some(&file.as_str()) {
            let what = format!(
                "tensor {} is not in it although {} says so; download both anew",
                shown(tensor),
                safetensors::INDEX
            );
            return Err(ModelError::Corrupt {
                file: file.clone(),
                what,
            });
        }
    }

    let Some(tokenizer) = folder.get("tokenizer.json") else {
        let why = "a Hugging Face model needs it for its text; convert tokenizer.model with the transformers library";
        return Err(ModelError::MissingFile {
            file: "tokenizer.json".to_owned(),
            why: why.to_owned(),
        });
    };
    let tokenizer_config = object(
        folder,
        "tokenizer_config.json",
        limits::TOKENIZER_CONFIG_BYTES,
    )?;
    let chat_template = chat_template(folder, tokenizer_config.as_ref())?;
    let tokenizer_config = tokenizer_config.map(Value::Object);
    let generation_config = generation_config.map(Value::Object);
    let tokenizer_json = tokenizer.mapping.clone();
    let text = TextSource::HuggingFace {
        tokenizer_json,
        tokenizer_config,
        chat_template,
        generation_config,
    };
    Ok(ModelSource {
        weights,
        config,
        names: NameScheme::HuggingFace,
        text,
    })
}

type Object = serde_json::Map<String, Value>;

/// A file's JSON object; `None` if there is no such file.
fn object(
    folder: &BTreeMap<&str, &ModelFile>,
    name: &str,
    limit: usize,
) -> Result<Option<Object>, ModelError> {
    let Some(file) = folder.get(name) else {
        return Ok(None);
    };
    let bytes = file.mapping.bytes();
    if bytes.len() > limit {
        let what = format!("it has {} bytes where the limit is {limit}", bytes.len());
        return Err(ModelError::TooLarge {
            file: name.to_owned(),
            what,
        });
    }
    let corrupt = |what: String| ModelError::Corrupt {
        file: name.to_owned(),
        what,
    };
    // A byte-order mark is not JSON, and Windows editors write it.
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(object)) => Ok(Some(object)),
        Ok(_) => Err(corrupt("it is JSON but not an object".to_owned())),
        Err(error) => Err(corrupt(format!("it is not JSON: {error}"))),
    }
}

/// The chat template of a folder, as transformers finds it: the file first, then `tokenizer_config.json`,
/// where it is a string or a list of `{name, template}`.
fn chat_template(
    folder: &BTreeMap<&str, &ModelFile>,
    config: Option<&Object>,
) -> Result<Option<String>, ModelError> {
    const FILE: &str = "chat_template.jinja";
    const CONFIG: &str = "tokenizer_config.json";
    let bounded = |file: &str, text: &[u8]| {
        let file = file.to_owned();
        if text.len() > limits::CHAT_TEMPLATE_BYTES {
            let (found, limit) = (text.len(), limits::CHAT_TEMPLATE_BYTES);
            let what = format!("its chat template has {found} bytes where the limit is {limit}");
            return Err(ModelError::TooLarge { file, what });
        }
        match std::str::from_utf8(text) {
            Ok(text) => Ok(Some(text.to_owned())),
            Err(_) => {
                let what = "its chat template is not UTF-8".to_owned();
                Err(ModelError::Corrupt { file, what })
            }
        }
    };
    if let Some(file) = folder.get(FILE) {
        return bounded(FILE, file.mapping.bytes());
    }
    let corrupt = |what: &str| ModelError::Corrupt {
        file: CONFIG.to_owned(),
        what: what.to_owned(),
    };
    match config.and_then(|config| config.get("chat_template")) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => bounded(CONFIG, text.as_bytes()),
        Some(Value::Array(list)) => {
            let named =
                |entry: &Value| entry.get("name").and_then(Value::as_str) == Some("default");
            let chosen = list.iter().find(|entry| named(entry)).or(list.first());
            let Some(chosen) = chosen else {
                return Ok(None);
            };
            let text = chosen.get("template").and_then(Value::as_str);
            let text = text.ok_or_else(|| {
                corrupt("a template in its list 'chat_template' has no text 'template'")
            })?;
            bounded(CONFIG, text.as_bytes())
        }
        Some(_) => Err(corrupt(
            "its 'chat_template' is neither a text nor a list of named templates",
        )),
    }
}

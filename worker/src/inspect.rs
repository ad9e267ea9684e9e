//! Looking into a model's files without loading it: what is in them, and what about it is odd.
//!
//! Readers that would refuse a file say so here as well; what was read before that is told all the same.

use std::collections::BTreeMap;

use hotcell_proto::{error::Error, limits as bounds, v1};

use crate::{
    error::{of_model, of_text},
    format::{
        StoredDType, StoredTensor,
        gguf::{Gguf, Metadata, ValueType},
        limits, safetensors, shown,
    },
    model::text::ModelText,
    text::TextError,
    weights::{ModelFile, ModelSource, TextSource},
};

/// Bytes of padding that a file may end with, or have between tensors, before it is odd.
const PADDING: usize = 64;
/// Bytes of a metadata entry that nobody reads, from which on it is odd.
const LARGE_UNKNOWN: usize = 4 << 10;
/// Alignments of GGUF files that are usual.
const ALIGNMENTS: std::ops::RangeInclusive<u32> = 8..=4096;
/// Bytes that a template makes of one short message at most, unless it is odd.
const LARGE_CHAT: usize = 64 << 10;
/// Prefixes of the metadata keys that GGUF defines, besides the architecture's own.
const KNOWN_KEYS: [&str; 4] = ["general.", "tokenizer.", "quantize.", "split."];

/// What is found on the way.
#[derive(Default)]
struct Found {
    report: v1::Inspected,
    types: BTreeMap<String, v1::TensorType>,
}

impl Found {
    fn odd(&mut self, kind: &str, what: String) {
        if self.report.findings.len() < bounds::MAX_FINDINGS {
            self.report.findings.push(v1::Finding {
                kind: kind.to_owned(),
                what,
            });
        }
    }

    fn entry(&mut self, key: &str, kind: String, value: &str, bytes: usize) {
        self.report.metadata_count += 1;
        if self.report.metadata.len() < bounds::MAX_INSPECTED_ENTRIES {
            self.report.metadata.push(v1::MetadataEntry {
                key: shown(key).trim_matches('\'').to_owned(),
                kind,
                value: beginning(value),
                bytes: bytes as u64,
            });
        }
    }

    fn tensors(&mut self, stored: &[StoredTensor]) {
        for tensor in stored {
            let (dtype, supported) = match &tensor.dtype {
                StoredDType::Known(dtype) => (dtype.name(), true),
                StoredDType::Other(name) => (name.as_str(), false),
            };
            let bytes = tensor.range.len() as u64;
            let entry = self
                .types
                .entry(dtype.to_owned())
                .or_insert_with(|| v1::TensorType {
                    dtype: dtype.to_owned(),
                    supported,
                    ..v1::TensorType::default()
                });
            entry.count += 1;
            entry.bytes += bytes;
            self.report.tensor_count += 1;
            self.report.tensor_bytes += bytes;
        }
    }

    fn refuse(&mut self, error: &Error) {
        error.reason().name().clone_into(&mut self.report.reason);
        error.message().clone_into(&mut self.report.problem);
    }

    fn done(mut self) -> v1::Inspected {
        let mut types: Vec<_> = self.types.into_values().collect();
        types.sort_by(|a, b| (b.bytes, &a.dtype).cmp(&(a.bytes, &b.dtype)));
        types.truncate(bounds::MAX_FINDINGS);
        self.report.tensor_types = types;
        self.report
    }
}

/// The beginning of a value, on one line.
fn beginning(value: &str) -> String {
    let mut out = String::new();
    for c in value.chars() {
        let c = if c.is_control() { ' ' } else { c };
        if out.len() + c.len_utf8() > bounds::MAX_INSPECTED_VALUE {
            out.push('…');
            break;
        }
        out.push(c);
    }
    out
}

/// Reads a model's files as loading it would, and tells what is in them. With it comes the model, if it can be opened.
pub fn read(files: &[ModelFile]) -> (v1::Inspected, Option<ModelSource>) {
    let mut found = Found::default();
    let gguf: Vec<_> = files.iter().filter(|f| f.name.ends_with(".gguf")).collect();
    match gguf.as_slice() {
        [file] => gguf_file(&mut found, file),
        _ => folder(&mut found, files),
    }
    let source = match ModelSource::open(files.to_vec()) {
        Ok(source) => source,
        Err(error) => {
            found.refuse(&of_model(&error));
            return (found.done(), None);
        }
    };
    let config = &source.config;
    found.report.architecture = format!("{:?}", config.architecture).to_lowercase();
    found.report.layers = config.layers as u64;
    found.report.context_length = config.context as u64;
    found.report.vocabulary = config.vocab as u64;
    let weights = source.weights.iter();
    found.report.parameters =
        weights.fold(0u64, |sum, (_, w)| sum.saturating_add(w.elements() as u64));
    unread_files(&mut found, files, &source);
    match ModelText::open(&source) {
        Ok(text) => {
            found.report.tokenizer_tokens = text.tokenizer.vocab_size().into();
            template(&mut found, &source, &text);
        }
        Err(error) => {
            found.refuse(&error);
            return (found.done(), None);
        }
    }
    (found.done(), Some(source))
}

fn gguf_file(found: &mut Found, file: &ModelFile) {
    let bytes = file.mapping.bytes();
    // What is wrong with it is said where it is opened as a model.
    let Ok(index) = Gguf::parse(bytes) else {
        return;
    };
    found.report.format = format!("gguf {}", index.version());
    let meta = index.metadata(bytes);
    let architecture = meta.get_str("general.architecture").ok().flatten();
    let architecture = architecture.unwrap_or_default();
    found.report.architecture = beginning(architecture);
    for key in meta.keys() {
        gguf_entry(found, meta, key, architecture);
    }
    found.tensors(index.tensors());
    let alignment = index.alignment();
    if !ALIGNMENTS.contains(&alignment) {
        let what = format!("its tensors are aligned to {alignment} bytes; 32 are usual");
        found.odd("odd_alignment", what);
    }
    room(found, index.tensors(), bytes.len(), alignment as usize);
}

/// Bytes that belong to no tensor.
fn room(found: &mut Found, tensors: &[StoredTensor], file: usize, alignment: usize) {
    let allowed = alignment.max(PADDING);
    let mut by_place: Vec<_> = tensors.iter().map(|t| t.range.clone()).collect();
    by_place.sort_unstable_by_key(|range| range.start);
    let Some(last) = by_place.last() else {
        return;
    };
    let gap = |pair: &[std::ops::Range<usize>]| match pair {
        [first, second] => second.start.saturating_sub(first.end),
        _ => 0,
    };
    let hidden: usize = by_place
        .windows(2)
        .map(gap)
        .filter(|gap| *gap > allowed)
        .sum();
    let trailing = file.saturating_sub(last.end);
    if hidden > 0 {
        let what = format!("{hidden} bytes lie between its tensors and belong to none");
        found.odd("hidden_bytes", what);
    }
    if trailing > allowed {
        let what = format!("{trailing} bytes come after the last tensor");
        found.odd("trailing_bytes", what);
    }
}

fn gguf_entry(found: &mut Found, meta: Metadata<'_>, key: &str, architecture: &str) {
    let Some(kind) = meta.kind(key) else { return };
    let (kind, value, bytes) = match kind {
        ValueType::Str => {
            let text = meta.get_str(key).ok().flatten().unwrap_or_default();
            let steers = |c: char| c.is_control() && !c.is_whitespace();
            if key.starts_with("general.") && text.contains(steers) {
                let what = format!("the text of {} holds control characters", shown(key));
                found.odd("control_characters", what);
            }
            ("string".to_owned(), beginning(text), text.len())
        }
        ValueType::Array => match meta.get_array(key).ok().flatten() {
            Some(array) => (
                format!("array of {}", array.element().name()),
                format!("{} elements", array.len()),
                array.bytes().len(),
            ),
            None => return,
        },
        number => (
            number.name().to_owned(),
            scalar(meta, key),
            number.size().unwrap_or(0),
        ),
    };
    let own = key
        .strip_prefix(architecture)
        .is_some_and(|rest| rest.starts_with('.'));
    let known = own || KNOWN_KEYS.iter().any(|known| key.starts_with(known));
    if !known && bytes > LARGE_UNKNOWN {
        let what = format!(
            "the metadata key {}, which nobody reads, has {bytes} bytes",
            shown(key)
        );
        found.odd("unknown_key", what);
    }
    found.entry(key, kind, &value, bytes);
}

/// A number or truth value in words.
fn scalar(meta: Metadata<'_>, key: &str) -> String {
    if let Ok(Some(number)) = meta.get_u64(key) {
        return number.to_string();
    }
    if let Ok(Some(number)) = meta.get_f64(key) {
        return number.to_string();
    }
    match meta.get_bool(key) {
        Ok(Some(truth)) => truth.to_string(),
        _ => "below zero".to_owned(),
    }
}

fn folder(found: &mut Found, files: &[ModelFile]) {
    let tensors = files.iter().filter(|f| f.name.ends_with(".safetensors"));
    for file in tensors {
        "safetensors".clone_into(&mut found.report.format);
        let Ok(stored) = safetensors::parse(&file.name, file.mapping.bytes()) else {
            continue;
        };
        found.tensors(&stored);
        let crooked = stored.iter().filter(|tensor| match &tensor.dtype {
            StoredDType::Known(dtype) => {
                let size = dtype.row_bytes(1).unwrap_or(1).max(1);
                !tensor.range.start.is_multiple_of(size)
            }
            StoredDType::Other(_) => false,
        });
        let crooked = crooked.count();
        if crooked > 0 {
            let what = format!(
                "{crooked} tensors of {} are not aligned to their elements",
                shown(&file.name)
            );
            found.odd("odd_alignment", what);
        }
    }
    let Some(config) = files.iter().find(|f| f.name == "config.json") else {
        return;
    };
    let bytes = config.mapping.bytes();
    if bytes.len() > limits::CONFIG_BYTES {
        return;
    }
    let Ok(serde_json::Value::Object(config)) = serde_json::from_slice(bytes) else {
        return;
    };
    for (key, value) in &config {
        let text = match value {
            serde_json::Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        found.entry(key, json_kind(value).to_owned(), &text, text.len());
    }
    if let Some(family) = config.get("model_type").and_then(|t| t.as_str()) {
        found.report.architecture = beginning(family);
    }
    if config.contains_key("auto_map") {
        let what = "config.json asks for Python code of its own (auto_map), which is not run here";
        found.odd("python_code", what.to_owned());
    }
}

fn json_kind(value: &serde_json::Value) -> &'static str {
    match value {
        serde_json::Value::Null => "null",
        serde_json::Value::Bool(_) => "bool",
        serde_json::Value::Number(_) => "number",
        serde_json::Value::String(_) => "string",
        serde_json::Value::Array(_) => "array",
        serde_json::Value::Object(_) => "object",
    }
}

/// Files of tensors that are no part of the model.
fn unread_files(found: &mut Found, files: &[ModelFile], source: &ModelSource) {
    let read = source.weights.files();
    for file in files {
        let tensors = file.name.ends_with(".safetensors") || file.name.ends_with(".gguf");
        if tensors && !read.iter().any(|f| f.name == file.name) {
            let what = format!("{} holds tensors and is not read", shown(&file.name));
            found.odd("unread_file", what);
        }
    }
}

/// Renders a conversation of one message, within the bounds that every rendering has.
fn template(found: &mut Found, source: &ModelSource, text: &ModelText) {
    let length = match &source.text {
        TextSource::HuggingFace { chat_template, .. } => chat_template.as_ref().map(String::len),
        TextSource::Gguf(file) => {
            let template = file.metadata().get_str("tokenizer.chat_template");
            template.ok().flatten().map(str::len)
        }
    };
    let mut report = v1::ChatTemplateReport {
        present: length.is_some(),
        bytes: length.unwrap_or(0) as u64,
        ..v1::ChatTemplateReport::default()
    };
    match text.chat_template() {
        Err(TextError::NoChatTemplate) => {}
        Err(error) => {
            of_text(error).message().clone_into(&mut report.problem);
            found.odd("template_unreadable", report.problem.clone());
        }
        Ok(_) => {
            let message = v1::ChatMessage {
                role: "user".to_owned(),
                content: "Hello".to_owned(),
                ..v1::ChatMessage::default()
            };
            let chat = v1::Chat {
                messages: vec![message],
                ..v1::Chat::default()
            };
            let prompt = v1::Prompt {
                kind: Some(v1::prompt::Kind::Chat(chat)),
            };
            match text.prepare(Some(&prompt), false) {
                Ok(prepared) => {
                    report.renders = true;
                    report.rendered_bytes = prepared.text.len() as u64;
                    if prepared.text.len() > LARGE_CHAT {
                        let what = format!("it makes {} bytes of one word", prepared.text.len());
                        found.odd("template_output", what);
                    }
                }
                Err(error) => {
                    error.message().clone_into(&mut report.problem);
                    found.odd("template_fails", report.problem.clone());
                }
            }
        }
    }
    found.report.template = Some(report);
}

//! Tokenizers from Hugging Face's tokenizer.json.
//!
//! Read into our own types first: then every id and size is checked before the `tokenizers` crate, whose own reader
//! trusts the file in places, gets any of it. What the file says about truncation and padding is left out; both would
//! change a prompt silently.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::AddedToken;

use super::bounded::{List, Small, Table};
use super::detokenizer::DecoderKind;
use super::gguf::part;
use super::tokenizer::{ModelOptions, Parts, Tokenizer, clip};
use super::{MAX_ADDED_TOKENS, MAX_MERGES, MAX_TOKENIZER_BYTES, MAX_VOCAB, TextError, bounded};

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    added_tokens: List<Added, MAX_ADDED_TOKENS>,
    #[serde(default)]
    normalizer: Small,
    #[serde(default)]
    pre_tokenizer: Small,
    #[serde(default)]
    post_processor: Small,
    #[serde(default)]
    decoder: Small,
    model: Model,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    #[serde(flatten)]
    token: AddedToken,
}

#[derive(Deserialize)]
struct Model {
    vocab: Table<MAX_VOCAB>,
    merges: List<Merge, MAX_MERGES>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    dropout: Option<f32>,
    #[serde(default)]
    fuse_unk: bool,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair(String, String),
    Joined(String),
}

/// Just the model's type, to name it if it is not BPE.
#[derive(Deserialize)]
struct Peek {
    model: PeekModel,
}

#[derive(Deserialize)]
struct PeekModel {
    #[serde(rename = "type")]
    kind: Option<String>,
}

const NORMALIZERS: &[&str] = &[
    "Sequence",
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Lowercase",
    "Strip",
    "StripAccents",
    "Replace",
    "Prepend",
];
const PRE_TOKENIZERS: &[&str] = &[
    "Sequence",
    "ByteLevel",
    "Split",
    "Digits",
    "Metaspace",
    "Punctuation",
    "Whitespace",
    "WhitespaceSplit",
    "UnicodeScripts",
];

impl Tokenizer {
    /// The tokenizer of a tokenizer.json.
    ///
    /// # Errors
    /// Not JSON or not a tokenizer; parts that are not supported, by name; values that contradict each other; sizes
    /// over the limits.
    pub fn from_json(json: &[u8]) -> Result<Self, TextError> {
        bounded("tokenizer.json, in bytes,", json.len(), MAX_TOKENIZER_BYTES)?;
        let bad =
            |error: serde_json::Error| TextError::BadTokenizer(format!("tokenizer.json: {error}"));
        let peek: Peek = serde_json::from_slice(json).map_err(bad)?;
        match peek.model.kind.as_deref() {
            None | Some("BPE") => {}
            Some(other) => {
                return Err(TextError::Unsupported(format!(
                    "the model type {}",
                    clip(other)
                )));
            }
        }
        let file: File = serde_json::from_slice(json).map_err(bad)?;
        Self::assemble(parts(file)?)
    }
}

fn parts(file: File) -> Result<Parts, TextError> {
    let File {
        added_tokens: List(added_tokens),
        normalizer: Small(normalizer),
        pre_tokenizer: Small(pre_tokenizer),
        post_processor: Small(post_processor),
        decoder: Small(decoder),
        model,
    } = file;
    for (what, value) in [
        (
            "a continuing_subword_prefix",
            &model.continuing_subword_prefix,
        ),
        ("an end_of_word_suffix", &model.end_of_word_suffix),
    ] {
        if value.as_deref().is_some_and(|value| !value.is_empty()) {
            return Err(TextError::Unsupported(what.into()));
        }
    }
    if model.dropout.is_some_and(|dropout| dropout != 0.0) {
        return Err(TextError::Unsupported("BPE dropout (it is random)".into()));
    }
    let tokens = tokens_by_id(model.vocab.0, &added_tokens)?;
    if let Some(unk) = &model.unk_token
        && !tokens.iter().flatten().any(|token| token == unk)
    {
        return Err(TextError::BadTokenizer(format!(
            "unk_token {:?} is not in the vocabulary",
            clip(unk)
        )));
    }
    let merges = model.merges.0.into_iter().map(|merge| match merge {
        Merge::Pair(left, right) => Ok((left, right)),
        Merge::Joined(joined) => match joined.split_once(' ') {
            Some((left, right)) if !right.contains(' ') => Ok((left.to_owned(), right.to_owned())),
            _ => Err(TextError::BadTokenizer(format!(
                "merge {:?} is not two tokens",
                clip(&joined)
            ))),
        },
    });
    let (prefix, suffix) = around(&post_processor, 0)?;
    let mut seen = Seen {
        parts: 0,
        growth: 1,
    };
    check(
        &normalizer,
        "normalizer",
        "normalizers",
        NORMALIZERS,
        &mut seen,
    )?;
    check(
        &pre_tokenizer,
        "pre-tokenizer",
        "pretokenizers",
        PRE_TOKENIZERS,
        &mut seen,
    )?;
    Ok(Parts {
        tokens,
        merges: merges.collect::<Result<_, _>>()?,
        options: ModelOptions {
            unk: model.unk_token,
            fuse_unk: model.fuse_unk,
            byte_fallback: model.byte_fallback,
            ignore_merges: model.ignore_merges,
        },
        normalizer: if normalizer.is_null() {
            None
        } else {
            Some(part(normalizer)?)
        },
        pre_tokenizer: if pre_tokenizer.is_null() {
            None
        } else {
            Some(part(pre_tokenizer)?)
        },
        added: added_tokens.into_iter().map(|added| added.token).collect(),
        decoder: DecoderKind::from_json(&decoder),
        prefix,
        suffix,
        bos: None,
        eos: None,
    })
}

/// Model vocabulary and added tokens in one list. An id with two texts, or an added token whose text has another id, is a
/// damaged file: the crate would follow one and ignore the other.
fn tokens_by_id(
    vocab: HashMap<String, u32>,
    added: &[Added],
) -> Result<Vec<Option<String>>, TextError> {
    bounded("list of added tokens", added.len(), MAX_ADDED_TOKENS)?;
    let ids = vocab
        .values()
        .copied()
        .chain(added.iter().map(|added| added.id));
    let size = ids.max().map_or(0, |id| id as usize + 1);
    bounded("vocabulary, as the largest id,", size, MAX_VOCAB)?;
    for added in added {
        if vocab
            .get(&added.token.content)
            .is_some_and(|&id| id != added.id)
        {
            let (text, id) = (clip(&added.token.content), added.id);
            return Err(TextError::BadTokenizer(format!(
                "added token {text:?} has id {id} and another in the vocabulary"
            )));
        }
    }
    let mut tokens: Vec<Option<String>> = vec![None; size];
    let added = added
        .iter()
        .map(|added| (added.token.content.clone(), added.id));
    for (token, id) in vocab.into_iter().chain(added) {
        let place = &mut tokens[id as usize];
        match place {
            Some(other) if *other != token => {
                let (a, b) = (clip(other), clip(&token));
                return Err(TextError::BadTokenizer(format!(
                    "id {id} is both {a:?} and {b:?}"
                )));
            }
            _ => *place = Some(token),
        }
    }
    Ok(tokens)
}

/// Ids before and after the text, from the post-processor.
fn around(processor: &Value, depth: usize) -> Result<(Vec<u32>, Vec<u32>), TextError> {
    let name = processor["type"].as_str().unwrap_or_default();
    let bad =
        || TextError::BadTokenizer(format!("the post-processor {} makes no sense", clip(name)));
    let id = |value: &Value| {
        value
            .as_u64()
            .and_then(|id| u32::try_from(id).ok())
            .ok_or_else(bad)
    };
    let (mut before, mut after) = (Vec::new(), Vec::new());
    match name {
        _ if processor.is_null() => {}
        "ByteLevel" => {}
        "Sequence" if depth < 4 => {
            for inner in processor["processors"]
                .as_array()
                .ok_or_else(bad)?
                .iter()
                .take(16)
            {
                let (first, last) = around(inner, depth + 1)?;
                before.splice(0..0, first);
                after.extend(last);
            }
        }
        "BertProcessing" | "RobertaProcessing" => {
            before.push(id(&processor["cls"][1])?);
            after.push(id(&processor["sep"][1])?);
        }
        "TemplateProcessing" => {
            let mut sequences = 0;
            for piece in processor["single"].as_array().ok_or_else(bad)? {
                if let Some(token) = piece["SpecialToken"]["id"].as_str() {
                    let ids = processor["special_tokens"][token]["ids"]
                        .as_array()
                        .ok_or_else(bad)?;
                    let side = if sequences == 0 {
                        &mut before
                    } else {
                        &mut after
                    };
                    for value in ids {
                        side.push(id(value)?);
                    }
                } else if piece["Sequence"]["id"] == "A" {
                    sequences += 1;
                } else {
                    return Err(bad());
                }
            }
            if sequences != 1 {
                return Err(bad());
            }
        }
        _ => {
            return Err(TextError::Unsupported(format!(
                "the post-processor {}",
                clip(name)
            )));
        }
    }
    bounded("the tokens around a text", before.len() + after.len(), 64)?;
    Ok((before, after))
}

/// What [`check`] has met so far.
struct Seen {
    parts: usize,
    /// By how much a text's bytes may be multiplied.
    growth: usize,
}

/// Only known parts, few of them, with short patterns, that do not blow a text up. Regular expressions are bounded
/// further by the regex crates: size when compiled, backtracking when run.
fn check(
    part: &Value,
    what: &str,
    list: &str,
    known: &[&str],
    seen: &mut Seen,
) -> Result<(), TextError> {
    if part.is_null() {
        return Ok(());
    }
    seen.parts += 1;
    bounded("the list of normalizers and pre-tokenizers", seen.parts, 64)?;
    let name = part["type"].as_str().unwrap_or("(without a type)");
    if !known.contains(&name) {
        return Err(TextError::Unsupported(format!("the {what} {}", clip(name))));
    }
    for inner in part[list].as_array().into_iter().flatten() {
        check(inner, what, list, known, seen)?;
    }
    let (regex, string) = (
        part["pattern"]["Regex"].as_str(),
        part["pattern"]["String"].as_str(),
    );
    if let Some(pattern) = regex.or(string) {
        bounded("a pattern, in bytes,", pattern.len(), 16 << 10)?;
        if pattern.is_empty() {
            return Err(TextError::BadTokenizer(format!(
                "the {what} {name} has an empty pattern"
            )));
        }
    }
    let longest = part["content"]
        .as_str()
        .map_or(0, str::len)
        .max(part["prepend"].as_str().map_or(0, str::len));
    bounded("a replacement, in bytes,", longest, 256)?;
    let factor = match name {
        // A regex may match nothing between any two bytes.
        "Replace" => string.map_or(longest + 1, |pattern| longest.div_ceil(pattern.len())),
        // Each byte may become two, and each piece, which may be one byte, may get a character before it.
        "ByteLevel" | "Metaspace" => 4,
        _ => 1,
    };
    seen.growth = seen.growth.saturating_mul(factor.max(1));
    bounded("the growth of a text by its parts", seen.growth, 1024)
}

//! Tokenizers from GGUF's `tokenizer.ggml.*` values.
//!
//! GGUF has the vocabulary but only names how text is split and normalised; what the names mean is written here, by the
//! tokenizer.json files of the models that they come from.

use std::collections::HashMap;

use serde_json::{Value, json};
use tokenizers::{AddedToken, NormalizerWrapper, PreTokenizerWrapper};

use super::detokenizer::{DecoderKind, Lead, fallback_byte};
use super::tokenizer::{ModelOptions, Parts, Tokenizer, clip};
use super::{MAX_MERGES, MAX_TOKENIZER_BYTES, MAX_VOCAB, TextError, bounded, caught};

/// The values of GGUF's `tokenizer.ggml.*` keys that make a tokenizer. Ids are indices into `tokens`.
#[derive(Clone, Debug, Default, serde::Deserialize)]
pub struct GgufVocab {
    /// `tokenizer.ggml.model`: `gpt2` (byte-level BPE) or `llama` (SentencePiece BPE).
    pub model: String,
    /// `tokenizer.ggml.pre`: how text is split before BPE.
    pub pre: Option<String>,
    /// `tokenizer.ggml.tokens`.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.merges`, best first, each "left right"; only `gpt2` has them.
    pub merges: Vec<String>,
    /// `tokenizer.ggml.scores`; only `llama` needs them.
    pub scores: Vec<f32>,
    /// `tokenizer.ggml.token_type`: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte. Empty means all
    /// normal.
    pub token_types: Vec<i32>,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos: Option<u32>,
    /// `tokenizer.ggml.unknown_token_id`.
    pub unk: Option<u32>,
    /// `tokenizer.ggml.add_bos_token`; the default depends on the model.
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_eos_token`; false by default.
    pub add_eos: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`; true by default, and only `llama` heeds it.
    pub add_space_prefix: Option<bool>,
}

const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

/// The most work that finding `llama`'s merges may take: the squares of all pieces' lengths, added up. Gemma needs 2^25.
const MAX_MERGE_WORK: usize = 1 << 30;

/// One row of the table of pre-tokenizers.
struct Pre {
    names: &'static [&'static str],
    steps: &'static [Step],
    /// A word that is a token is that token, whatever the merges would make of it.
    ignore_merges: bool,
    /// The default of `add_bos_token`.
    add_bos: bool,
    /// Text is brought into Unicode's composed form first.
    nfc: bool,
}

enum Step {
    /// Cut out what matches.
    Split(&'static str),
    /// Cut out every digit.
    Digits,
    /// GPT-2's own regex.
    Gpt2,
}

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK_V3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

const PLAIN: Pre = Pre {
    names: &[],
    steps: &[Step::Gpt2],
    ignore_merges: false,
    add_bos: false,
    nfc: false,
};

/// The names are those of llama.cpp's converter.
const PRES: &[Pre] = &[
    Pre {
        // "default" and none at all are old files, most of them of models with GPT-2's tokenizer.
        names: &[
            "default", "gpt-2", "gpt2", "phi-2", "olmo", "mpt", "jais", "trillion", "jina-es",
            "jina-de",
        ],
        ..PLAIN
    },
    Pre {
        names: &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "lfm2",
            "midm-2.0",
        ],
        steps: &[Step::Split(LLAMA3)],
        ignore_merges: true,
        add_bos: true,
        ..PLAIN
    },
    Pre {
        names: &["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"],
        steps: &[Step::Split(LLAMA3)],
        ..PLAIN
    },
    Pre {
        names: &["qwen2", "qwen3"],
        steps: &[Step::Split(QWEN2)],
        nfc: true,
        ..PLAIN
    },
    Pre {
        names: &["qwen35"],
        steps: &[Step::Split(QWEN35)],
        nfc: true,
        ..PLAIN
    },
    Pre {
        names: &["deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"],
        steps: &[Step::Split(QWEN2)],
        ..PLAIN
    },
    Pre {
        names: &[
            "smollm",
            "starcoder",
            "refact",
            "codeshell",
            "exaone",
            "minerva-7b",
        ],
        steps: &[Step::Digits, Step::Gpt2],
        ..PLAIN
    },
    Pre {
        names: &["tekken"],
        steps: &[Step::Split(TEKKEN)],
        ignore_merges: true,
        add_bos: true,
        ..PLAIN
    },
    Pre {
        names: &["gpt-4o", "llama4"],
        steps: &[Step::Split(GPT4O)],
        ..PLAIN
    },
    Pre {
        names: &["deepseek-v3", "hunyuan-dense"],
        steps: &[
            Step::Split(r"\p{N}{1,3}"),
            Step::Split("[一-龥぀-ゟ゠-ヿ]+"),
            Step::Split(DEEPSEEK_V3),
        ],
        ..PLAIN
    },
];

impl Tokenizer {
    /// The tokenizer of a GGUF file.
    ///
    /// # Errors
    /// A kind that is not known, by its name; values that contradict each other; sizes over the limits.
    pub fn from_gguf(vocab: GgufVocab) -> Result<Self, TextError> {
        bounded("vocabulary, in tokens,", vocab.tokens.len(), MAX_VOCAB)?;
        bounded(
            "vocabulary, in bytes,",
            vocab.tokens.iter().map(String::len).sum(),
            MAX_TOKENIZER_BYTES,
        )?;
        bounded("list of merges", vocab.merges.len(), MAX_MERGES)?;
        let count = vocab.tokens.len();
        if !vocab.token_types.is_empty() && vocab.token_types.len() != count {
            let what = format!(
                "{count} tokens, but {} token types",
                vocab.token_types.len()
            );
            return Err(TextError::BadTokenizer(what));
        }
        for &token in [vocab.bos, vocab.eos, vocab.unk].iter().flatten() {
            if token as usize >= count {
                return Err(TextError::UnknownToken {
                    token,
                    vocab: count as u32,
                });
            }
        }
        let parts = match vocab.model.as_str() {
            "gpt2" => byte_level(vocab)?,
            "llama" => sentence_piece(vocab)?,
            other => {
                return Err(TextError::Unsupported(format!(
                    "the GGUF tokenizer model '{}'",
                    clip(other)
                )));
            }
        };
        Self::assemble(parts)
    }
}

impl GgufVocab {
    fn kind(&self, id: usize) -> i32 {
        self.token_types.get(id).copied().unwrap_or(NORMAL)
    }

    /// What is matched in the text before it is split.
    fn added(&self) -> Vec<AddedToken> {
        let token = |(id, token): (usize, &String)| match self.kind(id) {
            _ if token.is_empty() => None,
            CONTROL | UNKNOWN => Some(AddedToken::from(token.as_str(), true)),
            USER_DEFINED => Some(AddedToken::from(token.as_str(), false).normalized(false)),
            _ => None,
        };
        self.tokens.iter().enumerate().filter_map(token).collect()
    }

    /// What to put around a text.
    fn around(&self, add_bos: bool) -> (Vec<u32>, Vec<u32>) {
        let bos = self.bos.filter(|_| self.add_bos.unwrap_or(add_bos));
        let eos = self.eos.filter(|_| self.add_eos.unwrap_or(false));
        (bos.into_iter().collect(), eos.into_iter().collect())
    }
}

fn byte_level(vocab: GgufVocab) -> Result<Parts, TextError> {
    let name = vocab.pre.as_deref().unwrap_or("default");
    let pre = PRES.iter().find(|pre| pre.names.contains(&name));
    let pre = pre.ok_or_else(|| TextError::UnknownPreTokenizer(clip(name)))?;
    let (added, (prefix, suffix)) = (vocab.added(), vocab.around(pre.add_bos));
    let split = |merge: String| match merge.split_once(' ') {
        Some((left, right)) if !left.is_empty() && !right.is_empty() && !right.contains(' ') => {
            Ok((left.to_owned(), right.to_owned()))
        }
        _ => Err(TextError::BadTokenizer(format!(
            "merge {:?} is not two tokens",
            clip(&merge)
        ))),
    };
    Ok(Parts {
        merges: vocab
            .merges
            .into_iter()
            .map(split)
            .collect::<Result<_, _>>()?,
        tokens: vocab.tokens.into_iter().map(Some).collect(),
        options: ModelOptions {
            ignore_merges: pre.ignore_merges,
            ..ModelOptions::default()
        },
        normalizer: if pre.nfc {
            Some(part(json!({"type": "NFC"}))?)
        } else {
            None
        },
        pre_tokenizer: Some(pre_tokenizer(pre.steps)?),
        added,
        decoder: Ok(DecoderKind {
            byte_level: true,
            ..DecoderKind::default()
        }),
        prefix,
        suffix,
        bos: vocab.bos,
        eos: vocab.eos,
    })
}

fn pre_tokenizer(steps: &[Step]) -> Result<PreTokenizerWrapper, TextError> {
    let gpt2 = matches!(steps.last(), Some(Step::Gpt2));
    let split = |step: &Step| match step {
        Step::Split(regex) => Some(
            json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false}),
        ),
        Step::Digits => Some(json!({"type": "Digits", "individual_digits": true})),
        Step::Gpt2 => None,
    };
    let mut parts: Vec<Value> = steps.iter().filter_map(split).collect();
    parts.push(json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": gpt2}));
    part(json!({"type": "Sequence", "pretokenizers": parts}))
}

/// A part of a tokenizer from its tokenizer.json form.
pub(super) fn part<T: serde::de::DeserializeOwned>(value: Value) -> Result<T, TextError> {
    caught("reading the tokenizer", || {
        serde_json::from_value(value).map_err(|error| TextError::BadTokenizer(error.to_string()))
    })
}

/// SentencePiece BPE joins the pair whose piece has the best score; the merges say the same, as in transformers'
/// LlamaConverter. (They differ where one piece comes about in two overlapping ways at once. None is known in a real vocabulary.)
fn sentence_piece(mut vocab: GgufVocab) -> Result<Parts, TextError> {
    if vocab.scores.len() != vocab.tokens.len() {
        let what = format!(
            "{} tokens, but {} scores",
            vocab.tokens.len(),
            vocab.scores.len()
        );
        return Err(TextError::BadTokenizer(what));
    }
    if let Some(id) = vocab.scores.iter().position(|score| score.is_nan()) {
        return Err(TextError::BadTokenizer(format!(
            "the score of token {id} is NaN"
        )));
    }
    // Matched in the raw text, which has spaces and not SentencePiece's mark for them.
    for id in 0..vocab.tokens.len() {
        if vocab.kind(id) == USER_DEFINED {
            vocab.tokens[id] = vocab.tokens[id].replace('▁', " ");
        }
    }
    let merges = merges_from_scores(&vocab)?;
    let add_space = vocab.add_space_prefix.unwrap_or(true);
    let space = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    // The prefix comes at the beginning and after every special token, as in llama.cpp.
    let normalizer = match add_space {
        true => {
            json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, space]})
        }
        false => space,
    };
    let unk = vocab.unk.or_else(|| {
        (0..vocab.tokens.len())
            .find(|&id| vocab.kind(id) == UNKNOWN)
            .map(|id| id as u32)
    });
    let byte_fallback = vocab
        .tokens
        .iter()
        .any(|token| fallback_byte(token).is_some());
    let (added, (prefix, suffix)) = (vocab.added(), vocab.around(true));
    Ok(Parts {
        merges,
        options: ModelOptions {
            unk: unk.and_then(|id| vocab.tokens.get(id as usize).cloned()),
            fuse_unk: true,
            byte_fallback,
            ignore_merges: false,
        },
        normalizer: Some(part::<NormalizerWrapper>(normalizer)?),
        pre_tokenizer: None,
        added,
        decoder: Ok(DecoderKind {
            byte_level: false,
            replace: vec![("▁".into(), " ".into())],
            byte_fallback,
            lead: if add_space {
                Lead::Strip(b' ', 1)
            } else {
                Lead::Nothing
            },
        }),
        prefix,
        suffix,
        bos: vocab.bos,
        eos: vocab.eos,
        tokens: vocab.tokens.into_iter().map(Some).collect(),
    })
}

fn merges_from_scores(vocab: &GgufVocab) -> Result<Vec<(String, String)>, TextError> {
    let work: usize = vocab
        .tokens
        .iter()
        .map(|token| token.len().saturating_mul(token.len()))
        .sum();
    bounded(
        "the vocabulary's pieces, lengths squared,",
        work,
        MAX_MERGE_WORK,
    )?;
    // Only ordinary pieces take part: SentencePiece never makes a control, byte or unknown token from text.
    let normal = |id: &usize| vocab.kind(*id) == NORMAL;
    let mut ids: HashMap<&str, u32> = HashMap::new();
    for id in (0..vocab.tokens.len()).filter(normal) {
        ids.entry(&vocab.tokens[id]).or_insert(id as u32);
    }
    let mut merges: Vec<(f32, [usize; 2], &str, &str)> = Vec::new();
    for id in (0..vocab.tokens.len()).filter(normal) {
        let piece = vocab.tokens[id].as_str();
        if ids.get(piece) != Some(&(id as u32)) {
            continue;
        }
        let mut ways: Vec<(u32, u32, &str, &str)> = Vec::new();
        for (at, _) in piece.char_indices().skip(1) {
            let (left, right) = piece.split_at(at);
            if let (Some(&left_id), Some(&right_id)) = (ids.get(left), ids.get(right)) {
                ways.push((left_id, right_id, left, right));
            }
        }
        ways.sort_unstable();
        for (_, _, left, right) in ways {
            merges.push((
                vocab.scores[id],
                [left.chars().count(), right.chars().count()],
                left,
                right,
            ));
        }
    }
    bounded("list of merges", merges.len(), MAX_MERGES)?;
    // Stable; best score first, of equals the one with the longer left part.
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)));
    Ok(merges
        .into_iter()
        .map(|(_, _, left, right)| (left.to_owned(), right.to_owned()))
        .collect())
}

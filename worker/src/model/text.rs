//! A loaded model's text side: rendering, tokenising and detokenising, calls of their own.

use std::sync::Arc;

use hotcell_proto::{
    error::{Error, Reason},
    limits, v1,
};

use crate::{
    error::{of_model, of_text},
    format::gguf::{GgufError, Metadata},
    text::{
        ChatTemplate, Family, GgufVocab, MAX_MERGES, MAX_VOCAB, TextError, Tokenizer,
        TokenizerConfig,
    },
    weights::{ModelSource, TextSource},
};

pub(crate) mod chat;
mod files;

/// Tokenizer and chat template of a model.
#[derive(Debug)]
pub struct ModelText {
    /// The tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// A broken or missing template is an error of the requests that need one, not of the model.
    template: Result<ChatTemplate, TextError>,
    /// Its text, for who renders chats elsewhere; none if it cannot be used here.
    template_text: Option<String>,
    /// How the model writes calls of tools and thoughts.
    pub family: Family,
}

/// A prompt in its two forms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// Token ids.
    pub ids: Vec<u32>,
    /// What was tokenised; empty for a prompt given as ids.
    pub text: String,
}

impl ModelText {
    /// Builds tokenizer and template from what the model's files say.
    ///
    /// # Errors
    /// When the tokenizer is damaged, unsupported, or has more tokens than the model.
    pub fn open(source: &ModelSource) -> Result<Self, Error> {
        let (tokenizer, template) = match &source.text {
            TextSource::HuggingFace {
                tokenizer_json,
                tokenizer_config,
                chat_template,
                ..
            } => {
                let mut tokenizer =
                    Tokenizer::from_json(tokenizer_json.bytes()).map_err(|e| of_text(&e))?;
                if let Some(config) = tokenizer_config {
                    let config = TokenizerConfig::from_json(config.to_string().as_bytes());
                    tokenizer
                        .set_named(&config.map_err(|e| of_text(&e))?)
                        .map_err(|e| of_text(&e))?;
                }
                (tokenizer, chat_template.clone())
            }
            TextSource::Gguf(file) => {
                let fail = |e: GgufError| of_model(&e.in_file(file.name()));
                let vocab = vocabulary(file.metadata()).map_err(fail)?;
                let template = file
                    .metadata()
                    .get_str("tokenizer.chat_template")
                    .map_err(fail)?;
                let tokenizer = Tokenizer::from_gguf(vocab).map_err(|e| of_text(&e))?;
                (tokenizer, template.map(str::to_owned))
            }
        };
        let (tokens, vocab) = (tokenizer.vocab_size() as usize, source.config.vocab);
        if tokens > vocab {
            return Err(Error::new(
                Reason::ModelCorrupt,
                format!(
                    "the tokenizer has {tokens} tokens and the model only {vocab}; they do not belong together"
                ),
            ));
        }
        let family = Family::of(template.as_deref(), &tokenizer);
        let (template, text) = match template {
            Some(text) => (ChatTemplate::new(&text), Some(text)),
            None => (Err(TextError::NoChatTemplate), None),
        };
        let template_text = text.filter(|_| template.is_ok());
        Ok(Self {
            tokenizer: Arc::new(tokenizer),
            template,
            template_text,
            family,
        })
    }

    /// The chat template.
    ///
    /// # Errors
    /// That there is none, or why it cannot be used.
    pub fn chat_template(&self) -> Result<&ChatTemplate, &TextError> {
        self.template.as_ref()
    }

    /// Whether chats can be rendered.
    pub fn has_chat_template(&self) -> bool {
        self.template.is_ok()
    }

    /// Whether thoughts can be told from answers.
    pub fn thinks(&self) -> bool {
        self.family.thinks()
    }

    /// Renders and tokenises a prompt.
    ///
    /// # Errors
    /// When it is missing, too long, names tokens that do not exist, or the template refuses it.
    pub fn prepare(
        &self,
        prompt: Option<&v1::Prompt>,
        without_special: bool,
    ) -> Result<Prepared, Error> {
        let kind = prompt.and_then(|p| p.kind.as_ref()).ok_or_else(|| {
            Error::new(
                Reason::InvalidArgument,
                "the request has no prompt; give text, ids or chat",
            )
        })?;
        let prepared = match kind {
            v1::prompt::Kind::Text(text) => {
                let ids = self.encode(text, !without_special)?;
                Prepared {
                    ids,
                    text: text.clone(),
                }
            }
            v1::prompt::Kind::Ids(ids) => Prepared {
                ids: ids.ids.clone(),
                text: String::new(),
            },
            v1::prompt::Kind::Chat(chat) => {
                let text = self.render(chat)?;
                // The template wrote the special tokens itself.
                let ids = self.encode(&text, false)?;
                Prepared { ids, text }
            }
        };
        if prepared.ids.len() > limits::MAX_PROMPT_TOKENS {
            return Err(Error::new(
                Reason::LimitExceeded,
                format!(
                    "the prompt has {} tokens; the limit is {}",
                    prepared.ids.len(),
                    limits::MAX_PROMPT_TOKENS
                ),
            ));
        }
        Ok(prepared)
    }

    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, Error> {
        if text.len() > limits::MAX_PROMPT_BYTES {
            return Err(Error::new(
                Reason::LimitExceeded,
                format!(
                    "the prompt has {} bytes; the limit is {}",
                    text.len(),
                    limits::MAX_PROMPT_BYTES
                ),
            ));
        }
        self.tokenizer
            .encode(text, add_special)
            .map_err(|e| of_text(&e))
    }

    fn render(&self, chat: &v1::Chat) -> Result<String, Error> {
        let template = self.template.as_ref().map_err(of_text)?;
        chat::render(template, chat, &self.tokenizer, &self.family)
    }

    /// Text of token ids.
    ///
    /// # Errors
    /// When there are too many, or the tokenizer's decoder is not supported.
    pub fn detokenize(&self, ids: &[u32], with_special: bool) -> Result<String, Error> {
        if ids.len() > limits::MAX_PROMPT_TOKENS {
            return Err(Error::new(
                Reason::LimitExceeded,
                format!(
                    "{} ids; the limit is {}",
                    ids.len(),
                    limits::MAX_PROMPT_TOKENS
                ),
            ));
        }
        let bytes = ids
            .iter()
            .filter_map(|id| self.tokenizer.id_to_piece(*id))
            .map(<[u8]>::len)
            .sum::<usize>();
        if bytes > limits::MAX_PROMPT_BYTES {
            return Err(Error::new(
                Reason::LimitExceeded,
                format!(
                    "these ids stand for {bytes} bytes of text; the limit is {}",
                    limits::MAX_PROMPT_BYTES
                ),
            ));
        }
        self.tokenizer
            .decode(ids, !with_special)
            .map_err(|e| of_text(&e))
    }
}

/// The tokenizer's part of a GGUF file's metadata.
fn vocabulary(meta: Metadata<'_>) -> Result<GgufVocab, GgufError> {
    // Each takes ten times its place in the file: how many they are is asked first.
    let strings = |key: &str, limit: usize| -> Result<Vec<String>, GgufError> {
        match meta.get_strings(key)? {
            Some(all) if all.len() > limit => Err(GgufError::TooLong {
                what: key.to_owned(),
                len: all.len() as u64,
                unit: "texts",
                limit: limit as u64,
            }),
            Some(all) => all.map(|s| s.map(str::to_owned)).collect(),
            None => Ok(Vec::new()),
        }
    };
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    Ok(GgufVocab {
        model: meta.get_str(&key("model"))?.unwrap_or_default().to_owned(),
        pre: meta.get_str(&key("pre"))?.map(str::to_owned),
        tokens: strings(&key("tokens"), MAX_VOCAB)?,
        merges: strings(&key("merges"), MAX_MERGES)?,
        scores: meta
            .get_floats(&key("scores"))?
            .map(Iterator::collect)
            .unwrap_or_default(),
        token_types: meta
            .get_ints(&key("token_type"))?
            .map(|ints| ints.map(|i| i32::try_from(i).unwrap_or(0)).collect())
            .unwrap_or_default(),
        bos: meta.get_u32(&key("bos_token_id"))?,
        eos: meta.get_u32(&key("eos_token_id"))?,
        unk: meta.get_u32(&key("unknown_token_id"))?,
        add_bos: meta.get_bool(&key("add_bos_token"))?,
        add_eos: meta.get_bool(&key("add_eos_token"))?,
        add_space_prefix: meta.get_bool(&key("add_space_prefix"))?,
    })
}

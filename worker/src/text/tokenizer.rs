//! One tokenizer, whichever file it came from.

use std::sync::{Arc, OnceLock};

use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::{AddedToken, NormalizerWrapper, PreTokenizerWrapper};

use super::detokenizer::{DecoderKind, Pieces};
use super::{
    MAX_ADDED_TOKENS, MAX_MERGES, MAX_TEXT_BYTES, MAX_TOKEN_BYTES, MAX_TOKENIZER_BYTES, MAX_VOCAB,
    MAX_WHITE_SPACE, TextError, bounded, caught,
};

/// Text to token ids and back, for one model. Share it by `Arc`: nothing in it changes.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The same, but blind to special tokens in the text. Made when first needed, because it doubles the memory.
    literal: OnceLock<Box<tokenizers::Tokenizer>>,
    pieces: Arc<Pieces>,
    /// How those were made of the vocabulary's strings.
    decoder: DecoderKind,
    /// Why ids cannot become text, for a decoder that is not supported.
    no_decoder: Option<TextError>,
    prefix: Vec<u32>,
    suffix: Vec<u32>,
    bos: Option<u32>,
    eos: Option<u32>,
}

/// What both file formats are brought to.
pub(super) struct Parts {
    /// By id; `None` where the file leaves a hole.
    pub tokens: Vec<Option<String>>,
    pub merges: Vec<(String, String)>,
    pub options: ModelOptions,
    pub normalizer: Option<NormalizerWrapper>,
    pub pre_tokenizer: Option<PreTokenizerWrapper>,
    pub added: Vec<AddedToken>,
    pub decoder: Result<DecoderKind, TextError>,
    /// Ids before and after the text, if special tokens are to be added.
    pub prefix: Vec<u32>,
    pub suffix: Vec<u32>,
    pub bos: Option<u32>,
    pub eos: Option<u32>,
}

/// Switches of the BPE model.
#[derive(Default)]
pub(super) struct ModelOptions {
    pub unk: Option<String>,
    pub fuse_unk: bool,
    pub byte_fallback: bool,
    pub ignore_merges: bool,
}

impl Tokenizer {
    pub(super) fn assemble(parts: Parts) -> Result<Self, TextError> {
        let Parts {
            tokens,
            merges,
            options,
            ..
        } = parts;
        bounded("vocabulary, in tokens,", tokens.len(), MAX_VOCAB)?;
        bounded("list of merges", merges.len(), MAX_MERGES)?;
        bounded("list of added tokens", parts.added.len(), MAX_ADDED_TOKENS)?;
        if tokens.is_empty() {
            return Err(TextError::BadTokenizer("it has no tokens".into()));
        }
        if let Some(long) = tokens
            .iter()
            .flatten()
            .find(|token| token.len() > MAX_TOKEN_BYTES)
        {
            bounded("a token, in bytes,", long.len(), MAX_TOKEN_BYTES)?;
        }
        bounded(
            "vocabulary, in bytes,",
            tokens.iter().flatten().map(String::len).sum(),
            MAX_TOKENIZER_BYTES,
        )?;
        let vocab_size = tokens.len() as u32;
        for &token in parts
            .prefix
            .iter()
            .chain(&parts.suffix)
            .chain(&parts.bos)
            .chain(&parts.eos)
        {
            if token >= vocab_size {
                return Err(TextError::UnknownToken {
                    token,
                    vocab: vocab_size,
                });
            }
        }
        let special: std::collections::HashSet<&str> = parts
            .added
            .iter()
            .filter(|token| token.special)
            .map(|token| token.content.as_str())
            .collect();
        let (kind, no_decoder) = match parts.decoder {
            Ok(kind) => (kind, None),
            Err(error) => (DecoderKind::default(), Some(error)),
        };
        let pieces = Pieces::new(&tokens, &special, kind.clone());
        // Of two tokens with the same text the first is the one that encoding gives, as in llama.cpp.
        let mut vocab = Vocab::with_capacity(tokens.len());
        for (id, token) in tokens.into_iter().enumerate() {
            if let Some(token) = token {
                vocab.entry(token).or_insert(id as u32);
            }
        }
        for token in &parts.added {
            if !vocab.contains_key(&token.content) || token.content.is_empty() {
                let what = format!("added token {:?} has no id", clip(&token.content));
                return Err(TextError::BadTokenizer(what));
            }
        }
        let inner = caught("building the tokenizer", || {
            let mut model = BPE::builder()
                .vocab_and_merges(vocab, merges)
                .fuse_unk(options.fuse_unk)
                .byte_fallback(options.byte_fallback)
                .ignore_merges(options.ignore_merges);
            if let Some(unk) = options.unk {
                model = model.unk_token(unk);
            }
            let model = model
                .build()
                .map_err(|error| TextError::BadTokenizer(error.to_string()))?;
            let mut inner = tokenizers::Tokenizer::new(model);
            inner.with_normalizer(parts.normalizer);
            inner.with_pre_tokenizer(parts.pre_tokenizer);
            // At once: every call builds the matcher anew.
            inner.add_tokens(&parts.added);
            Ok(inner)
        })?;
        Ok(Self {
            inner,
            literal: OnceLock::new(),
            pieces: Arc::new(pieces),
            decoder: kind,
            no_decoder,
            prefix: parts.prefix,
            suffix: parts.suffix,
            bos: parts.bos,
            eos: parts.eos,
        })
    }

    /// The ids of `text`. Special tokens written out in it (`<|eot_id|>`) become the special token, as chat templates
    /// need; `add_special` puts the model's own before and after (begin of text, mostly). A prompt from a chat
    /// template has them already: pass `false`.
    ///
    /// # Errors
    /// Text over [`MAX_TEXT_BYTES`] or with white space over [`MAX_WHITE_SPACE`], or a failure inside the tokenizer.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        let ids = self.run(&self.inner, text)?;
        if !add_special || (self.prefix.is_empty() && self.suffix.is_empty()) {
            return Ok(ids);
        }
        Ok([self.prefix.as_slice(), &ids, &self.suffix].concat())
    }

    /// The ids of `text` in which special tokens are ordinary text, for input that must not be able to forge them. This is
    /// what SentencePiece itself gives.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_literal(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let literal = self.literal.get_or_init(|| {
            let mut literal = self.inner.clone();
            literal.set_encode_special_tokens(true);
            Box::new(literal)
        });
        self.run(literal, text)
    }

    fn run(&self, tokenizer: &tokenizers::Tokenizer, text: &str) -> Result<Vec<u32>, TextError> {
        bounded("the text, in bytes,", text.len(), MAX_TEXT_BYTES)?;
        let mut run = 0;
        for character in text.chars() {
            run = if character.is_whitespace() {
                run + 1
            } else {
                0
            };
            bounded("a run of white space", run, MAX_WHITE_SPACE)?;
        }
        let vocab = self.vocab_size();
        caught("tokenising", || {
            let encoding = tokenizer
                .encode_fast(text, false)
                .map_err(|error| TextError::Encode(error.to_string()))?;
            let ids = encoding.get_ids();
            match ids.iter().find(|&&token| token >= vocab) {
                Some(&token) => Err(TextError::UnknownToken { token, vocab }),
                None => Ok(ids.to_vec()),
            }
        })
    }

    /// The text of all of `ids`: what a [`Detokenizer`] would have given piece by piece.
    ///
    /// # Errors
    /// A decoder that is not supported.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TextError> {
        let mut detokenizer = self.detokenizer(skip_special)?;
        let mut text = String::new();
        for &id in ids {
            detokenizer.push_into(id, &mut text);
        }
        text.push_str(&detokenizer.finish());
        Ok(text)
    }

    /// Starts turning ids into text, from the beginning of a sequence.
    ///
    /// # Errors
    /// A decoder that is not supported.
    pub fn detokenizer(&self, skip_special: bool) -> Result<super::Detokenizer, TextError> {
        match &self.no_decoder {
            Some(error) => Err(error.clone()),
            None => Ok(super::Detokenizer::new(
                Arc::clone(&self.pieces),
                skip_special,
            )),
        }
    }

    /// What does the work.
    pub(super) fn inner(&self) -> &tokenizers::Tokenizer {
        &self.inner
    }

    /// How the vocabulary's strings stand for bytes.
    ///
    /// # Errors
    /// A decoder that is not supported.
    pub(super) fn decoder_kind(&self) -> Result<&DecoderKind, TextError> {
        match &self.no_decoder {
            Some(error) => Err(error.clone()),
            None => Ok(&self.decoder),
        }
    }

    /// The ids that [`encode`](Self::encode) puts before and after a text.
    pub(crate) fn around(&self) -> (&[u32], &[u32]) {
        (&self.prefix, &self.suffix)
    }

    /// The number of ids: one more than the largest. A model's logits may be wider (padding), never narrower.
    #[must_use]
    pub fn vocab_size(&self) -> u32 {
        self.pieces.len() as u32
    }

    /// The bytes that this token alone stands for; not necessarily UTF-8. `None` outside the vocabulary.
    #[must_use]
    pub fn id_to_piece(&self, id: u32) -> Option<&[u8]> {
        self.pieces.get(id)
    }

    /// The id of a token by its text as the vocabulary file writes it.
    #[must_use]
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Whether the token is special: not text, but a mark (begin, end, role).
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.pieces.is_special(id)
    }

    /// All special ids, ascending.
    pub fn special_ids(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.vocab_size()).filter(|&id| self.is_special(id))
    }

    /// The token that begins a text, if the file names one. tokenizer.json does not: see
    /// [`set_named`](Self::set_named).
    #[must_use]
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token that ends a text, if the file names one. A model may have further ones (generation_config.json).
    #[must_use]
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// The text of the token that begins a sequence, as chat templates want it.
    #[must_use]
    pub fn bos_text(&self) -> String {
        self.bos
            .and_then(|id| self.inner.id_to_token(id))
            .unwrap_or_default()
    }

    /// The text of the token that ends a sequence, as chat templates want it.
    #[must_use]
    pub fn eos_text(&self) -> String {
        self.eos
            .and_then(|id| self.inner.id_to_token(id))
            .unwrap_or_default()
    }

    /// Takes over what tokenizer_config.json says: the begin and end tokens by name, and, for the Llama and Gemma
    /// classes, whether `encode` adds them (there transformers lets the config overrule tokenizer.json).
    ///
    /// # Errors
    /// A name that is not in the vocabulary.
    pub fn set_named(&mut self, config: &super::TokenizerConfig) -> Result<(), TextError> {
        let find = |name: &Option<String>| match name {
            None => Ok(None),
            Some(name) => self.inner.token_to_id(name).map(Some).ok_or_else(|| {
                TextError::BadTokenizer(format!(
                    "tokenizer_config.json names {:?}, not in the vocabulary",
                    clip(name)
                ))
            }),
        };
        let (bos, eos) = (find(&config.bos_token)?, find(&config.eos_token)?);
        self.bos = bos.or(self.bos);
        self.eos = eos.or(self.eos);
        if config.overrules_post_processor() {
            if let Some(add) = config.add_bos_token {
                self.prefix = self.bos.filter(|_| add).into_iter().collect();
            }
            if let Some(add) = config.add_eos_token {
                self.suffix = self.eos.filter(|_| add).into_iter().collect();
            }
        }
        Ok(())
    }
}

/// The beginning of a foreign string, for an error message.
pub(super) fn clip(text: &str) -> String {
    text.chars().take(64).collect()
}

//! Everything about text in a worker: tokenizer, chat template, detokeniser, stop strings.
//!
//! Tokenizer files and templates come with a model, and a model may be hostile. So nothing here trusts them: sizes
//! and ids are checked before the `tokenizers` crate sees them, templates run with bounds on steps, memory and
//! output, and where a panic inside a dependency cannot be excluded by checking, it is caught and becomes
//! [`TextError::Panicked`] (this needs `panic = "unwind"`, the default).
//!
//! | Road | Types |
//! |---|---|
//! | messages → prompt | [`ChatTemplate`], [`Message`] |
//! | prompt → ids | [`Tokenizer::encode`] |
//! | ids → text, as they come | [`Detokenizer`] |
//! | text → what the client gets | [`StopStrings`] |
//! | text → what it means | [`Parser`] |

mod bounded;
mod chat;
mod chat_guard;
mod chat_message;
mod chat_values;
mod detokenizer;
mod export;
mod gguf;
mod huggingface;
mod parts;
mod stop;
mod tokenizer;

pub use chat::{
    Call, CalledFunction, ChatInput, ChatTemplate, Message, TokenizerConfig, tool_value,
};
pub use detokenizer::Detokenizer;
pub use gguf::GgufVocab;
pub use parts::{Calls, Family, Mark, Parser};
pub use stop::{StopOutcome, StopStrings};
pub use tokenizer::Tokenizer;

/// The largest tokenizer.json; Gemma's, the largest in use, has 33 MB.
pub const MAX_TOKENIZER_BYTES: usize = 128 << 20;
/// The most tokens in a vocabulary; Gemma, the largest in use, has 262 144.
pub const MAX_VOCAB: usize = 1 << 20;
/// The most merges of a vocabulary.
pub const MAX_MERGES: usize = 4 * MAX_VOCAB;
/// The longest token, in bytes.
pub const MAX_TOKEN_BYTES: usize = 8 << 10;
/// The most tokens that are matched in the text before it is split.
pub const MAX_ADDED_TOKENS: usize = 1 << 16;
/// The longest text that is tokenised at once, in bytes.
pub const MAX_TEXT_BYTES: usize = 16 << 20;
/// The longest run of white space in a text, in characters. `\s+(?!\S)`, which most models split by, takes a step for
/// each, and the regex engine gives up after 10^6 steps, upon which the `tokenizers` crate leaves the rest of the text
/// unsplit: other tokens than the model was trained with, and no error.
pub const MAX_WHITE_SPACE: usize = 500_000;
/// The longest chat template, in bytes.
pub const MAX_TEMPLATE_BYTES: usize = 256 << 10;

/// Why text could not be made into tokens or tokens into text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// The model's tokenizer contradicts itself or is damaged.
    #[error("the model's tokenizer is unusable: {0}")]
    BadTokenizer(String),
    /// The model's tokenizer needs something that this worker does not have.
    #[error("the model's tokenizer needs {0}, which is not supported")]
    Unsupported(String),
    /// GGUF names a way of splitting text that this worker does not know. Guessing one would give wrong tokens.
    #[error(
        "unknown pre-tokenizer '{0}' (tokenizer.ggml.pre); converting the model anew, or its tokenizer.json, may help"
    )]
    UnknownPreTokenizer(String),
    /// Something is over its limit.
    #[error("{what} has {size}; the limit is {limit}")]
    TooLarge {
        /// What, with its unit.
        what: &'static str,
        /// Its size.
        size: usize,
        /// The limit.
        limit: usize,
    },
    /// The `tokenizers` crate refused the text.
    #[error("the text could not be tokenised: {0}")]
    Encode(String),
    /// A token id outside the vocabulary.
    #[error("token {token} is not in the vocabulary of {vocab}")]
    UnknownToken {
        /// The id.
        token: u32,
        /// The vocabulary's size.
        vocab: u32,
    },
    /// A dependency panicked on this model's data; the worker goes on.
    #[error("internal failure while {0}: the model's tokenizer or template is probably damaged")]
    Panicked(&'static str),
    /// Chat messages for a model that has no template.
    #[error(
        "the model has no chat template; send a prompt instead of messages, or configure a template"
    )]
    NoChatTemplate,
    /// The chat template is wrong, or refused these messages (`raise_exception`).
    #[error("chat template, line {line}: {message}")]
    Template {
        /// Line in the template, from 1; 0 if not known.
        line: usize,
        /// What is wrong.
        message: String,
    },
    /// The chat template used more steps, memory or output than a template may.
    #[error("chat template, line {line}: over its limit of {what}")]
    TemplateLimit {
        /// Line in the template, from 1; 0 if not known.
        line: usize,
        /// The limit.
        what: &'static str,
    },
    /// A stop string is empty, or there is something else wrong with the list.
    #[error("stop strings: {0}")]
    Stop(String),
}

/// Runs code of a dependency that may panic on hostile data.
fn caught<T>(
    doing: &'static str,
    work: impl FnOnce() -> Result<T, TextError>,
) -> Result<T, TextError> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work))
        .unwrap_or(Err(TextError::Panicked(doing)))
}

/// Refuses what is over its limit.
fn bounded(what: &'static str, size: usize, limit: usize) -> Result<(), TextError> {
    if size > limit {
        Err(TextError::TooLarge { what, size, limit })
    } else {
        Ok(())
    }
}

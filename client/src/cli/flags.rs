//! Flags that several commands share, each defined once.

use std::{io::Read, path::Path, time::Duration};

use clap::Args;
use hotcell_proto::{
    error::{Error, Reason},
    limits, v1,
};

use crate::tokens::{GenerateOptions, Grammar, Prompt};

use super::{exit::Failure, ui::Ui};

/// How tokens are chosen and when to stop.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingFlags {
    /// Randomness; 0 always takes the most likely token
    #[arg(
        long,
        value_name = "T",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    pub temperature: f32,
    /// Choose among the K most likely tokens only
    #[arg(long, value_name = "K")]
    pub top_k: Option<u32>,
    /// Choose among the most likely tokens that together have probability P
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Leave out tokens less likely than this share of the most likely one
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Make tokens seen so far less likely; above 1, for example 1.1
    #[arg(long, value_name = "R", allow_negative_numbers = true)]
    pub repetition_penalty: Option<f32>,
    /// Subtract this from the logit of every token generated so far
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,
    /// Subtract this from a token's logit once for each time it was generated
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,
    /// Add BIAS to a token's logit; may be given several times
    #[arg(long, value_name = "ID=BIAS", value_parser = logit_bias)]
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the randomness, to get the same text again; drawn and told if missing
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Tokens to generate at most; 0: until the model stops or its context is full [default: 128, in chat 0]
    #[arg(short = 'n', long, value_name = "N")]
    pub max_tokens: Option<u32>,
    /// Stop before this text; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Stop at this token; may be given several times
    #[arg(long, value_name = "ID")]
    pub stop_token: Vec<u32>,
    /// Go on past the model's own end token
    #[arg(long)]
    pub ignore_eos: bool,
    /// If the worker dies and none like it comes up, go on with another kind instead of failing; the rest may differ
    #[arg(long)]
    pub continue_across: bool,
    /// Give up after this long: 500ms, 30s, 2m; a bare number means seconds
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub deadline: Option<Duration>,
}

impl SamplingFlags {
    /// The one place where flags become a request's options. Ranges are the server's to check.
    pub(crate) fn options(&self, model: &str, max_tokens: u32) -> GenerateOptions {
        GenerateOptions {
            model: model.to_owned(),
            sampling: v1::Sampling {
                temperature: Some(self.temperature),
                top_k: self.top_k,
                top_p: self.top_p,
                min_p: self.min_p,
                repetition_penalty: self.repetition_penalty,
                presence_penalty: self.presence_penalty,
                frequency_penalty: self.frequency_penalty,
                logit_bias: (self.logit_bias.iter())
                    .map(|&(token, bias)| v1::LogitBias { token, bias })
                    .collect(),
            },
            max_tokens: self.max_tokens.unwrap_or(max_tokens),
            stop: self.stop.clone(),
            stop_tokens: self.stop_token.clone(),
            ignore_eos: self.ignore_eos,
            seed: self.seed,
            deadline: self.deadline,
            continue_across: self.continue_across,
            ..GenerateOptions::default()
        }
    }
}

/// Tokens that `run` and `generate` make unless told otherwise.
pub(crate) const DEFAULT_MAX_TOKENS: u32 = 128;

/// A prompt in one of its forms.
#[derive(Args, Clone, Debug)]
#[group(multiple = false)]
pub struct PromptFlags {
    /// The prompt; read from standard input if missing
    pub prompt: Option<String>,
    /// Token ids instead of text, for example 0,312,17
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    pub ids: Vec<u32>,
    /// A chat instead of text: a JSON file with [{"role": "user", "content": "…"}, …]; - reads standard input
    #[arg(long, value_name = "FILE")]
    pub chat_file: Option<String>,
}

impl PromptFlags {
    pub(crate) fn read(&self, ui: &mut Ui) -> Result<Prompt, Failure> {
        if let Some(file) = &self.chat_file {
            return Ok(Prompt::Chat(chat_file(file, ui)?));
        }
        if !self.ids.is_empty() {
            return Ok(Prompt::Ids(self.ids.clone()));
        }
        text_or_input(self.prompt.as_deref(), ui).map(Prompt::Text)
    }
}

/// What a text has to be, in one of its forms.
#[derive(Args, Clone, Debug)]
#[group(multiple = false)]
#[command(next_help_heading = "Structure")]
pub struct GrammarFlags {
    /// Write a JSON value that is valid against the schema in this file
    #[arg(long, value_name = "FILE", conflicts_with = "ignore_eos")]
    pub json_schema: Option<String>,
    /// Write a JSON object
    #[arg(long, conflicts_with = "ignore_eos")]
    pub json_object: bool,
    /// Write a text that this regular expression matches as a whole
    #[arg(long, value_name = "R", conflicts_with = "ignore_eos")]
    pub regex: Option<String>,
    /// Write a text of the Lark grammar in this file
    #[arg(long, value_name = "FILE", conflicts_with = "ignore_eos")]
    pub grammar: Option<String>,
}

impl GrammarFlags {
    pub(crate) fn read(&self) -> Result<Option<Grammar>, Failure> {
        let Self {
            json_schema,
            json_object,
            regex,
            grammar,
        } = self;
        Ok(match (json_schema, regex, grammar) {
            (Some(file), ..) => Some(Grammar::JsonSchema(grammar_file(file)?)),
            (_, Some(regex), _) => Some(Grammar::Regex(regex.clone())),
            (.., Some(file)) => Some(Grammar::Lark(grammar_file(file)?)),
            _ => json_object.then_some(Grammar::JsonObject(true)),
        })
    }
}

fn grammar_file(file: &str) -> Result<String, Failure> {
    let fail = |reason, what: String| Failure::Call(Error::new(reason, what));
    let open = || -> std::io::Result<String> {
        // One more than may be, so that the server says what is too long.
        let mut most = std::fs::File::open(file)?.take(limits::MAX_GRAMMAR_BYTES as u64 + 1);
        let mut text = String::new();
        most.read_to_string(&mut text)?;
        Ok(text)
    };
    open().map_err(|e| fail(Reason::FileNotFound, format!("cannot read {file}: {e}")))
}

/// The text given, or standard input if that is no terminal.
pub(crate) fn text_or_input(text: Option<&str>, ui: &mut Ui) -> Result<String, Failure> {
    match text {
        Some(text) => Ok(text.to_owned()),
        None if ui.in_terminal => Err(Failure::Usage(
            "there is no prompt; give one in quotes, or pipe it in".to_owned(),
        )),
        None => ui.read_all(),
    }
}

#[derive(serde::Deserialize)]
struct Message {
    role: String,
    content: String,
}

#[derive(serde::Deserialize)]
#[serde(untagged)]
enum ChatFile {
    Messages(Vec<Message>),
    Request { messages: Vec<Message> },
}

fn chat_file(file: &str, ui: &mut Ui) -> Result<Vec<v1::ChatMessage>, Failure> {
    let text = if file == "-" {
        ui.read_all()?
    } else {
        std::fs::read_to_string(file).map_err(|e| {
            Error::new(
                Reason::FileNotFound,
                format!("cannot read the chat file {file}: {e}"),
            )
        })?
    };
    let parsed: ChatFile = serde_json::from_str(&text).map_err(|_| {
        Error::new(
            Reason::InvalidArgument,
            format!(
                "the chat file {file} is not of the form [{{\"role\": \"user\", \"content\": \"…\"}}]"
            ),
        )
    })?;
    let (ChatFile::Messages(messages) | ChatFile::Request { messages }) = parsed;
    let messages = messages.into_iter().map(|m| v1::ChatMessage {
        role: m.role,
        content: m.content,
        ..v1::ChatMessage::default()
    });
    Ok(messages.collect())
}

/// A model as a user names it: by name, or by where its files are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelRef {
    /// A name the scheduler knows.
    Name(String),
    /// A folder or a `.gguf` file.
    Path(String),
}

impl ModelRef {
    /// A path if it begins with `/`, `./`, `../` or `~/`, ends in `.gguf`, or holds a `/` and exists here. So a
    /// bare word is always a name, whatever lies in the current folder.
    pub fn parse(text: &str) -> Self {
        let marked = ["/", "./", "../", "~/"].iter().any(|p| text.starts_with(p));
        let gguf = Path::new(text)
            .extension()
            .is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
        let dots = text == "." || text == "..";
        if marked || gguf || dots || (text.contains('/') && Path::new(text).exists()) {
            Self::Path(text.to_owned())
        } else {
            Self::Name(text.to_owned())
        }
    }

    /// The path as a scheduler on this host, whose working folder is another, can use it.
    ///
    /// # Errors
    /// [`Reason::FileNotFound`] when nothing is there.
    pub(crate) fn absolute(path: &str) -> Result<String, Error> {
        let full = std::path::absolute(path).ok().filter(|full| full.exists());
        let full = full.ok_or_else(|| {
            Error::new(
                Reason::FileNotFound,
                format!("there is no model at {path}; give a folder or a .gguf file that exists"),
            )
        })?;
        full.into_os_string().into_string().map_err(|_| {
            Error::new(
                Reason::InvalidArgument,
                format!("the path {path} is not UTF-8; rename it or link to it"),
            )
        })
    }
}

/// `12=-3.5`.
fn logit_bias(text: &str) -> Result<(u32, f32), String> {
    let parts = text.split_once('=');
    let parsed = parts.and_then(|(id, bias)| Some((id.parse().ok()?, bias.parse().ok()?)));
    parsed.ok_or_else(|| "write TOKEN_ID=BIAS, for example 42=-1.5".to_owned())
}

/// `500ms`, `30s`, `2m`, `1.5`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = match text.find(|c: char| c.is_ascii_alphabetic()) {
        Some(at) => text.split_at(at),
        None => (text, "s"),
    };
    let factor = match unit {
        "ms" => 0.001,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => f64::NAN,
    };
    let seconds = number.trim().parse::<f64>().unwrap_or(f64::NAN) * factor;
    let time = Duration::try_from_secs_f64(seconds)
        .ok()
        .filter(|t| !t.is_zero());
    time.ok_or_else(|| "write a time above zero such as 500ms, 30s or 2m".to_owned())
}

/// How often a worker is looked at that is watched.
pub(crate) fn watch_interval(text: &str) -> Result<Duration, String> {
    let time = duration(text)?;
    let range = limits::WATCH_INTERVALS;
    let fits = u32::try_from(time.as_millis()).is_ok_and(|ms| range.contains(&ms));
    let (least, most) = (range.start(), range.end());
    fits.then_some(time)
        .ok_or_else(|| format!("write a time from {least} to {most} ms"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_with_and_without_unit() {
        for (text, ms) in [
            ("500ms", 500),
            ("30s", 30_000),
            ("2m", 120_000),
            ("1.5", 1500),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "0", "-1s", "5 years", "s", "inf", "nan", "1e400"] {
            assert!(duration(text).is_err(), "{text}");
        }
        assert_eq!(watch_interval("50ms"), Ok(Duration::from_millis(50)));
        for text in ["49ms", "1h", "0s", "1"] {
            assert_eq!(watch_interval(text).is_ok(), text == "1", "{text}");
        }
    }

    #[test]
    fn a_bias_needs_both_sides() {
        assert_eq!(logit_bias("42=-1.5"), Ok((42, -1.5)));
        for text in ["42", "=1", "42=", "a=1"] {
            assert!(logit_bias(text).is_err(), "{text}");
        }
    }

    #[test]
    fn names_and_paths_are_told_apart() {
        for path in ["/m", "./m", "../m", ".", "m.gguf", "m/x.GGUF", "/"] {
            assert!(matches!(ModelRef::parse(path), ModelRef::Path(_)), "{path}");
        }
        // `src` is a folder here, and yet a name.
        for name in ["kjv", "src", "org/model", "a.b:c"] {
            assert!(matches!(ModelRef::parse(name), ModelRef::Name(_)), "{name}");
        }
    }
}

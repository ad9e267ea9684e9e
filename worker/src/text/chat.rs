//! Chat templates as Hugging Face's transformers runs them, with bounds.

use std::collections::BTreeMap;
use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{Environment, ErrorKind};

use super::chat_guard::{Meter, Rewritten, rewrite};
use super::chat_message::{MessageValue, json_value};
use super::chat_values::install;
use super::{MAX_TEMPLATE_BYTES, TextError, bounded, caught};

/// Steps of minijinja's machine that every rendering has.
const BASE_FUEL: u64 = 50_000;
/// Steps that every message, tool and call adds; real templates take 50 to 500.
const FUEL_PER_MESSAGE: u64 = 2_000;
/// Steps that a byte of tools' and calls' JSON adds: some templates go through a schema's properties.
const FUEL_PER_JSON_BYTE: u64 = 8;
/// Bytes of values that a rendering may make besides [`MEMORY_PER_BYTE`] times its input.
const BASE_MEMORY: u64 = 16 << 20;
const MEMORY_PER_BYTE: u64 = 32;
/// Plain text inside loops is written without being charged; steps are lowered to keep it below this.
const MAX_REPEATED_TEXT: u64 = 256 << 20;
/// Bytes of output besides four times the input.
const BASE_OUTPUT: usize = 1 << 20;
/// minijinja counts a macro call as 4.
const MAX_RECURSION: usize = 200;

/// One message of a conversation. What is empty is not there for the template, role and content apart.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(default)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, or what the template knows.
    pub role: String,
    /// The text.
    pub content: String,
    /// What was thought before it.
    #[serde(rename = "reasoning_content")]
    pub reasoning: String,
    /// The call that it answers.
    pub tool_call_id: String,
    /// The tool that answers, or who speaks.
    pub name: String,
    /// Calls that it makes.
    pub tool_calls: Vec<Call>,
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
pub struct Call {
    /// Its id, if it has one.
    #[serde(default)]
    pub id: String,
    /// What is called, and with what.
    pub function: CalledFunction,
}

/// What a call calls.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
pub struct CalledFunction {
    /// Its name.
    pub name: String,
    /// What it is called with, an object.
    pub arguments: serde_json::Value,
}

impl Call {
    /// As transformers passes it.
    pub(super) fn value(&self) -> Value {
        let mut call = serde_json::Map::new();
        if !self.id.is_empty() {
            call.insert("id".to_owned(), self.id.as_str().into());
        }
        call.insert("type".to_owned(), "function".into());
        let function = serde_json::json!({
            "name": self.function.name, "arguments": self.function.arguments,
        });
        call.insert("function".to_owned(), function);
        json_value(&serde_json::Value::Object(call))
    }
}

/// A tool as transformers passes it to a template.
#[must_use]
pub fn tool_value(
    name: &str,
    description: &str,
    parameters: serde_json::Value,
) -> serde_json::Value {
    serde_json::json!({
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    })
}

/// What a rendering depends on; nothing else does it, not even the clock.
#[derive(Clone, Copy, Debug)]
pub struct ChatInput<'a> {
    /// The conversation.
    pub messages: &'a [Message],
    /// What may be called, as [`tool_value`] makes it.
    pub tools: &'a [serde_json::Value],
    /// Bytes of the JSON that tools and calls were read from.
    pub json_bytes: usize,
    /// Whether to open the assistant's turn at the end.
    pub add_generation_prompt: bool,
    /// The text of the model's begin token, empty if there is none.
    pub bos_token: &'a str,
    /// The text of the model's end token, empty if there is none.
    pub eos_token: &'a str,
    /// Further variables (`enable_thinking`, `date_string`); they overrule the ones above, messages and tools apart.
    pub extra: &'a BTreeMap<String, serde_json::Value>,
    /// For `strftime_now`: seconds since 1970, UTC. The same on every worker that renders this request.
    pub now: i64,
}

/// A chat template, checked and ready.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    rewritten: Rewritten,
}

impl ChatTemplate {
    /// Checks a template's syntax and size.
    ///
    /// # Errors
    /// [`TextError::Template`] with the line, or a limit.
    pub fn new(source: &str) -> Result<Self, TextError> {
        bounded(
            "the chat template, in bytes,",
            source.len(),
            MAX_TEMPLATE_BYTES,
        )?;
        let rewritten = rewrite(source)?;
        let meter = Meter::new(0);
        let compiled = caught("reading the chat template", || {
            let environment = environment();
            let checked = environment
                .template_from_named_str("chat", &rewritten.source)
                .map(drop);
            checked.map_err(|error| describe(&error, &meter))
        });
        compiled.map(|()| Self { rewritten })
    }

    /// The prompt for a conversation. Tokenise it without adding special tokens: the template writes them.
    ///
    /// # Errors
    /// [`TextError::Template`] with line and message if the template refuses the messages or is wrong;
    /// [`TextError::TemplateLimit`] if it does not come to an end or grows too big.
    pub fn render(&self, input: &ChatInput<'_>) -> Result<String, TextError> {
        let size: usize = input
            .messages
            .iter()
            .map(|m| {
                let about = m.role.len() + m.name.len() + m.tool_call_id.len();
                about + m.content.len() + m.reasoning.len() + 64
            })
            .sum();
        let size = size.saturating_add(input.json_bytes);
        let meter = Meter::new(BASE_MEMORY + MEMORY_PER_BYTE * size as u64);
        let calls: usize = input.messages.iter().map(|m| m.tool_calls.len()).sum();
        let spoken = input.messages.len() + input.tools.len() + calls;
        let fuel = BASE_FUEL
            + FUEL_PER_MESSAGE * spoken as u64
            + FUEL_PER_JSON_BYTE * input.json_bytes as u64;
        let fuel = fuel.min(MAX_REPEATED_TEXT / (self.rewritten.repeated_text as u64).max(1));
        caught("rendering the chat template", || {
            let mut environment = environment();
            environment.set_fuel(Some(fuel));
            install(&mut environment, &meter, input.now);
            let template = environment.template_from_named_str("chat", &self.rewritten.source);
            let mut output = Output {
                text: Vec::new(),
                left: BASE_OUTPUT + 4 * size,
                full: false,
            };
            let rendered = template.and_then(|template| {
                let captured = template.render_captured_to(variables(input), &mut output)?;
                drop(captured);
                Ok(())
            });
            match rendered {
                Ok(()) => {}
                Err(_) if output.full => {
                    return Err(TextError::TemplateLimit {
                        line: 0,
                        what: "output",
                    });
                }
                Err(error) => return Err(describe(&error, &meter)),
            }
            Ok(String::from_utf8_lossy(&output.text).into_owned())
        })
    }
}

fn environment<'a>() -> Environment<'a> {
    let mut environment = Environment::new();
    // As transformers sets up Jinja. Building fails for odd delimiters only, and these are the default ones.
    if let Ok(syntax) = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
    {
        environment.set_syntax(syntax);
    }
    environment.set_recursion_limit(MAX_RECURSION);
    environment
}

fn variables(input: &ChatInput<'_>) -> Value {
    let messages: Vec<Value> = input
        .messages
        .iter()
        .map(|message| Value::from_object(MessageValue::from(message)))
        .collect();
    let mut variables: BTreeMap<&str, Value> = BTreeMap::from([
        ("messages", Value::from(messages)),
        (
            "add_generation_prompt",
            Value::from(input.add_generation_prompt),
        ),
        ("bos_token", Value::from(input.bos_token)),
        ("eos_token", Value::from(input.eos_token)),
        // transformers passes both as None when there are none.
        ("documents", Value::from(())),
    ]);
    for (name, value) in input.extra {
        if name != "messages" && name != "tools" {
            variables.insert(name, json_value(value));
        }
    }
    let tools: Vec<Value> = input.tools.iter().map(json_value).collect();
    let tools = match tools.is_empty() {
        true => Value::from(()),
        false => Value::from(tools),
    };
    variables.insert("tools", tools);
    Value::from(variables)
}

fn describe(error: &minijinja::Error, meter: &Meter) -> TextError {
    let line = error.line().unwrap_or(0);
    if error.kind() == ErrorKind::OutOfFuel {
        return TextError::TemplateLimit {
            line,
            what: "steps",
        };
    }
    if meter.late() {
        return TextError::TemplateLimit { line, what: "time" };
    }
    if meter.exceeded() {
        return TextError::TemplateLimit {
            line,
            what: "memory",
        };
    }
    let message = match error.detail() {
        Some(detail) if meter.raised() => detail.to_owned(),
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    // A message can quote a value, and a value can be the whole conversation.
    TextError::Template {
        line,
        message: message.chars().take(1024).collect(),
    }
}

/// Takes what a template writes, up to a limit.
struct Output {
    text: Vec<u8>,
    left: usize,
    full: bool,
}

impl io::Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > self.left {
            self.full = true;
            return Err(io::Error::other("the output is too long"));
        }
        self.left -= bytes.len();
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What tokenizer_config.json has that tokenizer.json lacks.
#[derive(Clone, Debug, Default)]
pub struct TokenizerConfig {
    /// The begin token, by its text.
    pub bos_token: Option<String>,
    /// The end token, by its text.
    pub eos_token: Option<String>,
    /// Whether to begin every text with the begin token.
    pub add_bos_token: Option<bool>,
    /// Whether to end every text with the end token.
    pub add_eos_token: Option<bool>,
    class: String,
    templates: BTreeMap<String, String>,
}

impl TokenizerConfig {
    /// Reads a tokenizer_config.json.
    ///
    /// # Errors
    /// Not JSON, or too long.
    pub fn from_json(json: &[u8]) -> Result<Self, TextError> {
        bounded(
            "tokenizer_config.json, in bytes,",
            json.len(),
            super::MAX_TOKENIZER_BYTES,
        )?;
        let file: serde_json::Value = serde_json::from_slice(json)
            .map_err(|error| TextError::BadTokenizer(format!("tokenizer_config.json: {error}")))?;
        // A token is its text, or an object with the text and how it is matched.
        let token = |name: &str| {
            let token = &file[name];
            token
                .as_str()
                .or_else(|| token["content"].as_str())
                .map(str::to_owned)
        };
        let template = &file["chat_template"];
        let named = template.as_array().into_iter().flatten().take(64);
        let mut templates: BTreeMap<String, String> = named
            .filter_map(|entry| {
                Some((
                    entry["name"].as_str()?.to_owned(),
                    entry["template"].as_str()?.to_owned(),
                ))
            })
            .collect();
        if let Some(only) = template.as_str() {
            templates.insert("default".into(), only.to_owned());
        }
        Ok(Self {
            bos_token: token("bos_token"),
            eos_token: token("eos_token"),
            add_bos_token: file["add_bos_token"].as_bool(),
            add_eos_token: file["add_eos_token"].as_bool(),
            class: file["tokenizer_class"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
            templates,
        })
    }

    /// The chat template of this name; most models have one, named `default`. (Newer models have it in a file of its
    /// own, chat_template.jinja, which goes before this one.)
    ///
    /// # Errors
    /// [`TextError::NoChatTemplate`], or what [`ChatTemplate::new`] says.
    pub fn chat_template(&self, name: &str) -> Result<ChatTemplate, TextError> {
        ChatTemplate::new(self.templates.get(name).ok_or(TextError::NoChatTemplate)?)
    }

    /// The classes in which transformers lets `add_bos_token` overrule tokenizer.json's post-processor.
    pub(super) fn overrules_post_processor(&self) -> bool {
        matches!(
            self.class.trim_end_matches("Fast"),
            "LlamaTokenizer" | "CodeLlamaTokenizer" | "GemmaTokenizer"
        )
    }
}

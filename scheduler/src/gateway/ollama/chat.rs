//! Chats, and texts that are gone on with.

use std::time::{Duration, Instant};

use axum::{
    Json,
    body::Body,
    extract::State,
    http::Extensions,
    response::{IntoResponse, Response},
};
use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    v1::{
        Chat, ChatMessage, GenerateRequest, ModelInfo, Prompt, generate_event::Event, prompt::Kind,
    },
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{KeepAlive, Options, answered, ended, failed, grammar, merge, models::find, now};
use crate::{
    access::{Caller, Role},
    fleet::Using,
    gateway::{
        ask::{self, Branches, Call, Piece, Tell, pieces},
        body,
        openai::tools::{self, CallSpec, ToolSpec},
        sse::{Framing, Gone, Out},
    },
    service::Shared,
};

/// What chats and texts have in common.
#[derive(Debug, Deserialize)]
struct Common {
    model: String,
    stream: Option<bool>,
    format: Option<Value>,
    options: Option<Options>,
    /// `true`, `false`, or how much, for models that think before they answer.
    think: Option<Value>,
    keep_alive: Option<KeepAlive>,
}

#[derive(Debug, Deserialize)]
struct ChatRequest {
    #[serde(default)]
    messages: Vec<Message>,
    tools: Option<Vec<ToolSpec>>,
    #[serde(flatten)]
    common: Common,
}

#[derive(Debug, Deserialize)]
struct Message {
    role: String,
    content: Option<String>,
    thinking: Option<String>,
    images: Option<Vec<Value>>,
    tool_calls: Option<Vec<CallSpec>>,
    tool_name: Option<String>,
    tool_call_id: Option<String>,
}

#[derive(Debug, Deserialize)]
struct TextRequest {
    #[serde(default)]
    prompt: String,
    suffix: Option<String>,
    system: Option<String>,
    raw: Option<bool>,
    template: Option<String>,
    images: Option<Vec<Value>>,
    #[serde(flatten)]
    common: Common,
}

fn refused(field: &str, why: &str) -> Error {
    Error::new(Reason::InvalidArgument, why).with("field", field)
}

fn no_images(images: Option<&Vec<Value>>) -> Result<(), Error> {
    match images.is_none_or(Vec::is_empty) {
        true => Ok(()),
        false => Err(refused("images", "the models here read text only")),
    }
}

fn message(message: Message) -> Result<ChatMessage, Error> {
    no_images(message.images.as_ref())?;
    let calls = message.tool_calls.unwrap_or_default();
    let calls = calls.into_iter().map(Into::into);
    Ok(ChatMessage {
        role: message.role,
        content: message.content.unwrap_or_default(),
        tool_calls: calls.collect(),
        tool_call_id: message.tool_call_id.unwrap_or_default(),
        name: message.tool_name.unwrap_or_default(),
        reasoning: message.thinking.unwrap_or_default(),
    })
}

/// The form that an answer takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Chat,
    Text,
}

impl Form {
    /// A line with more of an answer.
    fn line(self, model: &str, content: &str, thinking: &str, calls: &[Call]) -> Value {
        let mut value = json!({"model": model, "created_at": now(), "done": false});
        let mut message = match self {
            Self::Chat => json!({"role": "assistant", "content": content}),
            Self::Text => json!({ "response": content }),
        };
        if !thinking.is_empty() {
            message["thinking"] = Value::from(thinking);
        }
        if !calls.is_empty() {
            let calls = calls.iter().map(|call| {
                let arguments = ask::arguments(&call.arguments);
                json!({"id": call.id, "function": {"name": call.name, "arguments": arguments}})
            });
            message["tool_calls"] = calls.collect();
        }
        match self {
            Self::Chat => value["message"] = message,
            Self::Text => merge(&mut value, message),
        }
        value
    }
}

/// A request as it is asked.
struct Asked {
    form: Form,
    /// The model's name as the client said it, which it is told again.
    model: String,
    stream: bool,
    request: GenerateRequest,
}

fn asked(
    form: Form,
    (common, model): (Common, String),
    prompt: Option<Prompt>,
    parsed: bool,
) -> Result<Asked, Error> {
    let options = common.options.unwrap_or_default();
    Ok(Asked {
        form,
        stream: common.stream.unwrap_or(true),
        request: GenerateRequest {
            model,
            prompt,
            sampling: Some(options.sampling()),
            max_tokens: options.max_tokens(),
            stop: options.stop(),
            seed: options.seed(),
            grammar: grammar(common.format.as_ref())?,
            parse_output: parsed,
            ..GenerateRequest::default()
        },
        model: common.model,
    })
}

/// What a template is told of whether its model should think.
fn thinking(think: Option<&Value>) -> String {
    match think {
        Some(Value::Bool(yes)) => json!({ "enable_thinking": yes }).to_string(),
        Some(Value::String(effort)) => Value::from(ask::effort(effort)).to_string(),
        _ => String::new(),
    }
}

/// Has a model stay in memory for as long as a request says, of who may load models; whether it does.
pub(super) fn keep_for(
    shared: &Shared,
    known: &ModelInfo,
    keep: Option<KeepAlive>,
    caller: &Caller,
) -> Result<bool, Error> {
    let Some(KeepAlive(keep)) = keep.filter(|_| caller.roles.has(Role::Load)) else {
        return Ok(false);
    };
    let name = ModelName::new(known.name.as_str())?;
    shared.fleet.keep_for(&name, keep);
    Ok(true)
}

/// The model of a request, in memory while the second result is there: how to ask it stands in its files. One that is asked
/// for nothing but to be unloaded is not loaded for it.
async fn awake(
    shared: &Shared,
    common: &Common,
    nothing: bool,
    caller: &Caller,
) -> Result<(ModelInfo, Using), Error> {
    let known = find(shared, &common.model)?;
    shared.may_name(&known.name, caller)?;
    let keeps = keep_for(shared, &known, common.keep_alive, caller)?;
    if nothing && keeps && common.keep_alive == Some(KeepAlive(Some(Duration::ZERO))) {
        let using = shared.fleet.using(&ModelName::new(known.name.as_str())?);
        return Ok((known, using));
    }
    shared.fleet.awake(&known.name).await
}

/// `POST /api/chat`.
pub(super) async fn chat(
    State(shared): State<Shared>,
    extensions: Extensions,
    body: Body,
) -> Response {
    let run = async {
        let asked_for: ChatRequest = body::json(body).await?;
        let caller = Caller::of(&extensions);
        let (model, _using) = awake(
            &shared,
            &asked_for.common,
            asked_for.messages.is_empty(),
            &caller,
        )
        .await?;
        let common = asked_for.common;
        if asked_for.messages.is_empty() {
            return Ok(loaded(Form::Chat, &common));
        }
        let messages = asked_for.messages.into_iter().map(message);
        let tools = asked_for.tools.unwrap_or_default();
        let chat = Chat {
            messages: messages.collect::<Result<_, _>>()?,
            tools: tools::tools(tools)?,
            template_arguments: thinking(common.think.as_ref()),
        };
        let asked = asked(Form::Chat, (common, model.name), ask::chat(chat), true)?;
        tell(&shared, &caller, asked).await
    };
    answered(run.await)
}

/// `POST /api/generate`: a prompt as a chat's only message, or, raw, as it is.
pub(super) async fn generate(
    State(shared): State<Shared>,
    extensions: Extensions,
    body: Body,
) -> Response {
    let run = async {
        let asked_for: TextRequest = body::json(body).await?;
        let caller = Caller::of(&extensions);
        no_images(asked_for.images.as_ref())?;
        if asked_for.suffix.is_some_and(|suffix| !suffix.is_empty()) {
            return Err(refused("suffix", "suffix is not supported; leave it out"));
        }
        if asked_for
            .template
            .is_some_and(|template| !template.is_empty())
        {
            let why = "a template of the request's own is not supported; send raw text";
            return Err(refused("template", why));
        }
        let common = asked_for.common;
        let (model, _using) = awake(&shared, &common, asked_for.prompt.is_empty(), &caller).await?;
        if asked_for.prompt.is_empty() {
            return Ok(loaded(Form::Text, &common));
        }
        let templated = model.summary.as_ref().is_some_and(|s| s.has_chat_template);
        let raw = asked_for.raw.unwrap_or(false) || !templated;
        let say = |role: &str, content: String| ChatMessage {
            role: role.to_owned(),
            content,
            ..ChatMessage::default()
        };
        let prompt = match raw {
            true => Some(Prompt {
                kind: Some(Kind::Text(asked_for.prompt)),
            }),
            false => {
                let system = asked_for.system.filter(|s| !s.is_empty());
                let system = system.map(|s| say("system", s));
                let user = say("user", asked_for.prompt);
                ask::chat(Chat {
                    messages: system.into_iter().chain([user]).collect(),
                    template_arguments: thinking(common.think.as_ref()),
                    ..Chat::default()
                })
            }
        };
        let asked = asked(Form::Text, (common, model.name), prompt, !raw)?;
        tell(&shared, &caller, asked).await
    };
    answered(run.await)
}

/// A request for nothing, which clients send to have a model loaded: it is.
fn loaded(form: Form, common: &Common) -> Response {
    let mut value = form.line(&common.model, "", "", &[]);
    let goes = common.keep_alive == Some(KeepAlive(Some(Duration::ZERO)));
    let reason = if goes { "unload" } else { "load" };
    merge(&mut value, json!({"done": true, "done_reason": reason}));
    Json(value).into_response()
}

async fn tell(shared: &Shared, caller: &Caller, asked: Asked) -> Result<Response, Error> {
    let began = Instant::now();
    let (form, model, parsed) = (asked.form, asked.model, asked.request.parse_output);
    let branches = Branches::begin(shared, asked.request, 1, None, caller)?;
    if !asked.stream {
        let answers = ask::complete(branches, 1, parsed).await?;
        let answer = answers.into_iter().next().unwrap_or_default();
        let mut value = form.line(&model, &answer.content, &answer.reasoning, &answer.calls);
        merge(&mut value, ended(&answer.finished, began.elapsed()));
        return Ok(Json(value).into_response());
    }
    let telling = Telling {
        form,
        model,
        parsed,
        began,
        answer: ask::Answer::default(),
        told: 0,
    };
    ask::stream(branches, telling).await
}

/// Tells a stream's events as lines.
struct Telling {
    form: Form,
    model: String,
    parsed: bool,
    began: Instant,
    /// What came so far: calls are told whole.
    answer: ask::Answer,
    /// Calls that were told.
    told: usize,
}

impl Tell for Telling {
    const FRAMING: Framing = Framing::Lines;

    async fn tell(&mut self, out: &Out, (_, event): (u32, Event)) -> Result<(), Gone> {
        let (mut content, mut reasoning) = (String::new(), String::new());
        let mut finished = None;
        match event {
            Event::Accepted(accepted) => self.answer.accepted = accepted,
            Event::Delta(delta) => {
                for piece in pieces(&delta, self.parsed) {
                    match piece {
                        Piece::Content(text) => content.push_str(text),
                        Piece::Reasoning(text) => reasoning.push_str(text),
                        Piece::Call {
                            index,
                            name,
                            arguments,
                        } => self.answer.call(index, name, arguments),
                    }
                }
            }
            Event::Finished(end) => finished = Some(end),
        }
        // One is whole once the next one begins.
        let whole = match finished {
            Some(_) => self.answer.calls.len(),
            None => self.answer.calls.len().saturating_sub(1).max(self.told),
        };
        let calls = self.answer.calls.get(self.told..whole).unwrap_or_default();
        if !content.is_empty() || !reasoning.is_empty() || !calls.is_empty() {
            let line = self.form.line(&self.model, &content, &reasoning, calls);
            out.line(&line).await?;
        }
        self.told = whole;
        let Some(finished) = finished else {
            return Ok(());
        };
        let mut value = self.form.line(&self.model, "", "", &[]);
        merge(&mut value, ended(&finished, self.began.elapsed()));
        out.line(&value).await
    }

    async fn fail(&mut self, out: &Out, error: &Error) -> Result<(), Gone> {
        out.line(&failed(error)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_may_have_no_content() {
        for said in [
            json!({"role": "assistant", "content": null, "tool_calls": []}),
            json!({"role": "assistant"}),
        ] {
            let read: Message = serde_json::from_value(said).unwrap();
            assert_eq!(message(read).unwrap().content, "");
        }
    }

    #[test]
    fn how_much_to_think_is_told_to_the_template() {
        let of = |think: Value| thinking(Some(&think));
        assert_eq!(of(json!(false)), r#"{"enable_thinking":false}"#);
        assert_eq!(of(json!("none")), r#"{"enable_thinking":false}"#);
        let high = serde_json::from_str::<Value>(&of(json!("high"))).unwrap();
        assert_eq!(
            high,
            json!({"enable_thinking": true, "reasoning_effort": "high"})
        );
    }
}

//! Responses: the part of OpenAI's newer API that keeps nothing between calls.

use axum::{body::Body, extract::State, http::Extensions, response::Response};
use hotcell_proto::{
    error::Error,
    v1::{
        Accepted, Chat, ChatMessage, Finished, GenerateRequest, Grammar, Sampling, Tool, ToolCall,
        generate_event::Event, grammar,
    },
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    answered,
    options::{Content, refused, text_of},
    tools::{self, NamedFunction, ToolChoice},
};
use crate::{
    access::Caller,
    gateway::{
        ask::{
            self, Answer, Branches, Call, Piece, Tell, call_id, complete, is_cut, now, pieces,
            stream,
        },
        body,
        failure::Flavor,
        sse::{Framing, Gone, Out},
    },
    service::Shared,
};

#[derive(Debug, Deserialize)]
struct Request {
    #[serde(default)]
    model: String,
    input: Input,
    instructions: Option<String>,
    max_output_tokens: Option<u32>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    stream: Option<bool>,
    previous_response_id: Option<String>,
    background: Option<bool>,
    tools: Option<Vec<ToolSpec>>,
    tool_choice: Option<Choice>,
    parallel_tool_calls: Option<bool>,
    text: Option<TextOptions>,
    metadata: Option<Value>,
    reasoning: Option<Thinking>,
    include: Option<Vec<String>>,
    top_logprobs: Option<u32>,
}

#[derive(Debug, Deserialize)]
struct Thinking {
    effort: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Input {
    Text(String),
    Items(Vec<Item>),
}

/// A piece of the conversation; fields are those of all types.
#[derive(Debug, Deserialize)]
struct Item {
    #[serde(rename = "type")]
    kind: Option<String>,
    role: Option<String>,
    content: Option<Content>,
    call_id: Option<String>,
    name: Option<String>,
    arguments: Option<String>,
    output: Option<Content>,
}

#[derive(Debug, Deserialize)]
struct ToolSpec {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    description: Option<String>,
    parameters: Option<Value>,
    strict: Option<bool>,
}

impl ToolSpec {
    /// What a response says of it.
    fn echo(&self) -> Value {
        json!({
            "type": self.kind,
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict,
        })
    }
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Choice {
    Word(String),
    Named { name: String },
}

#[derive(Debug, Deserialize)]
struct TextOptions {
    format: Option<Format>,
}

#[derive(Debug, Deserialize)]
struct Format {
    #[serde(rename = "type")]
    kind: String,
    schema: Option<Value>,
}

fn short(text: &str) -> String {
    text.chars().take(40).collect()
}

fn messages(instructions: Option<String>, input: Input) -> Result<Vec<ChatMessage>, Error> {
    let say = |role: &str| ChatMessage {
        role: role.to_owned(),
        ..ChatMessage::default()
    };
    let mut all = Vec::new();
    if let Some(content) = instructions {
        all.push(ChatMessage {
            content,
            ..say("system")
        });
    }
    let items = match input {
        Input::Text(content) => {
            all.push(ChatMessage {
                content,
                ..say("user")
            });
            return Ok(all);
        }
        Input::Items(items) => items,
    };
    for item in items {
        match item.kind.as_deref().unwrap_or("message") {
            "message" => {
                let role = item.role.unwrap_or_else(|| "user".to_owned());
                let role = if role == "developer" { "system" } else { &role };
                all.push(ChatMessage {
                    content: text_of(item.content)?,
                    ..say(role)
                });
            }
            "function_call" => {
                let call = ToolCall {
                    id: item.call_id.unwrap_or_default(),
                    name: item.name.unwrap_or_default(),
                    arguments: item.arguments.unwrap_or_else(|| "{}".to_owned()),
                };
                // Calls that were made together are one message.
                match all.last_mut() {
                    Some(last) if !last.tool_calls.is_empty() => last.tool_calls.push(call),
                    _ => all.push(ChatMessage {
                        tool_calls: vec![call],
                        ..say("assistant")
                    }),
                }
            }
            "function_call_output" => all.push(ChatMessage {
                content: text_of(item.output)?,
                tool_call_id: item.call_id.unwrap_or_default(),
                ..say("tool")
            }),
            // What it thought is for its maker to read.
            "reasoning" => {}
            other => {
                let why = format!(
                    "input has an item of type {:?}; there are message, function_call and function_call_output",
                    short(other)
                );
                return Err(refused("input", why));
            }
        }
    }
    Ok(all)
}

fn tool(spec: ToolSpec) -> Result<Tool, Error> {
    match (spec.kind.as_str(), spec.name) {
        ("function", Some(name)) => Ok(Tool {
            name,
            description: spec.description.unwrap_or_default(),
            parameters: spec.parameters.map(|p| p.to_string()).unwrap_or_default(),
        }),
        (kind, _) => {
            let why = format!("a tool of type {:?}; there are functions only", short(kind));
            Err(refused("tools", why))
        }
    }
}

fn follow(text: Option<TextOptions>) -> Result<Option<Grammar>, Error> {
    let Some(format) = text.and_then(|text| text.format) else {
        return Ok(None);
    };
    let kind = match (format.kind.as_str(), format.schema) {
        ("text", _) => return Ok(None),
        ("json_object", _) => grammar::Kind::JsonObject(true),
        ("json_schema", Some(schema)) => grammar::Kind::JsonSchema(schema.to_string()),
        (kind, _) => {
            let why = format!(
                "text.format of type {:?}; there are text, json_object and json_schema with a schema",
                short(kind)
            );
            return Err(refused("text.format", why));
        }
    };
    Ok(Some(Grammar { kind: Some(kind) }))
}

struct Asked {
    request: GenerateRequest,
    stream: bool,
    one_call: bool,
    echo: Value,
}

fn read(request: Request) -> Result<Asked, Error> {
    if request.previous_response_id.is_some() {
        let why = "responses are not kept here; send the whole conversation as input";
        return Err(refused("previous_response_id", why));
    }
    if request.background.unwrap_or(false) {
        let why = "responses are not kept here; leave out background";
        return Err(refused("background", why));
    }
    let odds = "message.output_text.logprobs";
    let wants = |what: &str| request.include.iter().flatten().any(|one| one == what);
    if wants(odds) {
        let why = "include: logprobs are told by /v1/chat/completions only; leave it out";
        return Err(refused("include", why));
    }
    if request.top_logprobs.is_some_and(|count| count > 0) {
        let why = "logprobs are told by /v1/chat/completions only; leave out top_logprobs";
        return Err(refused("top_logprobs", why));
    }
    let effort = request.reasoning.and_then(|r| r.effort);
    let thinks = effort.as_deref().map(ask::effort);
    let told = request.tools.unwrap_or_default();
    let tools: Vec<Value> = told.iter().map(ToolSpec::echo).collect();
    let told = told.into_iter().map(tool);
    let (choice, said) = match request.tool_choice {
        Some(Choice::Word(word)) => (Some(ToolChoice::Word(word.clone())), json!(word)),
        Some(Choice::Named { name }) => {
            let said = json!({"type": "function", "name": name});
            let function = NamedFunction { name };
            (Some(ToolChoice::Named { function }), said)
        }
        None => (None, json!("auto")),
    };
    let one_call = request.parallel_tool_calls == Some(false);
    let told = told.collect::<Result<_, _>>()?;
    let (told, must) = tools::choose(choice.as_ref(), told, one_call)?;
    let chat = Chat {
        messages: messages(request.instructions.clone(), request.input)?,
        tools: told,
        template_arguments: thinks
            .map(|told| Value::from(told).to_string())
            .unwrap_or_default(),
    };
    Ok(Asked {
        stream: request.stream.unwrap_or(false),
        one_call,
        echo: json!({
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata.unwrap_or_else(|| json!({})),
            "temperature": request.temperature.unwrap_or(1.0),
            "top_p": request.top_p.unwrap_or(1.0),
            "parallel_tool_calls": !one_call,
            "tool_choice": said,
            "tools": tools,
            "reasoning": {"effort": effort, "summary": null},
            "error": null,
            "incomplete_details": null,
        }),
        request: GenerateRequest {
            model: request.model,
            prompt: ask::chat(chat),
            sampling: Some(Sampling {
                temperature: Some(request.temperature.unwrap_or(1.0)),
                top_p: request.top_p,
                ..Sampling::default()
            }),
            max_tokens: request.max_output_tokens.unwrap_or(0),
            grammar: must.map_or_else(|| follow(request.text), |must| Ok(Some(must)))?,
            parse_output: true,
            ..GenerateRequest::default()
        },
    })
}

/// `POST /v1/responses`.
pub(super) async fn create(
    State(shared): State<Shared>,
    extensions: Extensions,
    body: Body,
) -> Response {
    answered(run(&shared, &Caller::of(&extensions), body).await)
}

async fn run(shared: &Shared, caller: &Caller, body: Body) -> Result<Response, Error> {
    let asked = read(body::json(body).await?)?;
    let echo = asked.echo;
    let branches = Branches::begin(shared, asked.request, 1, None, caller)?;
    let branches = branches.one_call(asked.one_call);
    if !asked.stream {
        let answers = complete(branches, 1, true).await?;
        let answer = answers.into_iter().next().unwrap_or_default();
        let items = Items::of(&answer);
        return Ok(super::json_response(items.response(&echo, &answer)));
    }
    stream(branches, Telling::new(echo)).await
}

fn message_item(request: &str, status: &str, text: Option<&str>) -> Value {
    let content = text.map(|text| json!({"type": "output_text", "text": text, "annotations": []}));
    json!({
        "type": "message",
        "id": format!("msg_{request}"),
        "status": status,
        "role": "assistant",
        "content": content.into_iter().collect::<Vec<_>>(),
    })
}

fn thought_item(request: &str, index: usize, status: &str, text: Option<&str>) -> Value {
    let content = text.map(|text| json!({"type": "reasoning_text", "text": text}));
    json!({
        "type": "reasoning",
        "id": format!("rs_{request}_{index}"),
        "status": status,
        "summary": [],
        "content": content.into_iter().collect::<Vec<_>>(),
    })
}

fn call_item(request: &str, index: u32, status: &str, call: &Call) -> Value {
    json!({
        "type": "function_call",
        "id": format!("fc_{request}_{index}"),
        "call_id": call_id(request, index),
        "status": status,
        "name": call.name,
        "arguments": call.arguments,
    })
}

/// What an answer consists of, each with its number in the order in which they began.
#[derive(Default)]
struct Items(Vec<Value>);

impl Items {
    fn of(answer: &Answer) -> Self {
        let request = &answer.accepted.request_id;
        let mut all = Vec::new();
        if !answer.reasoning.is_empty() {
            all.push(thought_item(
                request,
                0,
                "completed",
                Some(&answer.reasoning),
            ));
        }
        if !answer.content.is_empty() || answer.calls.is_empty() {
            all.push(message_item(request, "completed", Some(&answer.content)));
        }
        let calls = answer.calls.iter().zip(0..);
        all.extend(calls.map(|(call, index)| call_item(request, index, "completed", call)));
        Self(all)
    }

    /// The whole response.
    fn response(&self, echo: &Value, answer: &Answer) -> Value {
        let mut value = head(&answer.accepted, echo, "completed");
        if is_cut(&answer.finished) {
            value["status"] = Value::from("incomplete");
            value["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        value["output"] = Value::from(self.0.clone());
        value["usage"] = usage(answer);
        value
    }
}

fn usage(answer: &Answer) -> Value {
    let usage = answer.usage();
    let (prompt, generated) = (
        u64::from(usage.prompt_tokens),
        u64::from(usage.generated_tokens),
    );
    json!({
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": answer.thought_tokens},
        "total_tokens": prompt + generated,
    })
}

fn head(accepted: &Accepted, echo: &Value, status: &str) -> Value {
    let mut value = json!({
        "id": format!("resp_{}", accepted.request_id),
        "object": "response",
        "created_at": now(),
        "status": status,
        "model": accepted.model,
        "output": [],
        "usage": null,
    });
    if let (Value::Object(value), Value::Object(echo)) = (&mut value, echo) {
        value.extend(echo.clone());
    }
    value
}

/// What is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Open {
    Message,
    Thought,
    Call(u32),
}

/// Tells a stream's events as theirs, each with its number.
struct Telling {
    echo: Value,
    answer: Answer,
    number: u64,
    open: Option<Open>,
    /// Items that are told whole.
    items: Items,
    /// The text of the open message or thought.
    text: String,
}

impl Telling {
    fn new(echo: Value) -> Self {
        Self {
            echo,
            answer: Answer::default(),
            number: 0,
            open: None,
            items: Items::default(),
            text: String::new(),
        }
    }

    async fn say(&mut self, out: &Out, kind: &str, mut value: Value) -> Result<(), Gone> {
        value["type"] = Value::from(kind);
        value["sequence_number"] = Value::from(self.number);
        self.number += 1;
        out.event(kind, &value).await
    }

    fn index(&self) -> usize {
        self.items.0.len()
    }

    fn request(&self) -> String {
        self.answer.accepted.request_id.clone()
    }

    async fn close(&mut self, out: &Out) -> Result<(), Gone> {
        let (request, index) = (self.request(), self.index());
        let item = match self.open.take() {
            None => return Ok(()),
            Some(Open::Message) => {
                let text = std::mem::take(&mut self.text);
                let about = json!({"item_id": format!("msg_{request}"), "output_index": index, "content_index": 0});
                let mut done = about.clone();
                done["text"] = Value::from(text.as_str());
                done["logprobs"] = json!([]);
                self.say(out, "response.output_text.done", done).await?;
                let mut part = about;
                part["part"] = json!({"type": "output_text", "text": text, "annotations": []});
                self.say(out, "response.content_part.done", part).await?;
                message_item(&request, "completed", Some(&text))
            }
            Some(Open::Thought) => {
                let text = std::mem::take(&mut self.text);
                let done = json!({
                    "item_id": format!("rs_{request}_{index}"),
                    "output_index": index,
                    "content_index": 0,
                    "text": text,
                });
                self.say(out, "response.reasoning_text.done", done).await?;
                thought_item(&request, index, "completed", Some(&text))
            }
            Some(Open::Call(call)) => {
                let whole = self
                    .answer
                    .calls
                    .get(call as usize)
                    .cloned()
                    .unwrap_or_default();
                let done = json!({
                    "item_id": format!("fc_{request}_{call}"),
                    "output_index": index,
                    "name": whole.name,
                    "arguments": whole.arguments,
                });
                self.say(out, "response.function_call_arguments.done", done)
                    .await?;
                call_item(&request, call, "completed", &whole)
            }
        };
        let done = json!({"output_index": index, "item": item});
        self.items.0.push(item);
        self.say(out, "response.output_item.done", done).await
    }

    async fn open(&mut self, out: &Out, open: Open, name: &str) -> Result<(), Gone> {
        if self.open == Some(open) {
            return Ok(());
        }
        self.close(out).await?;
        self.open = Some(open);
        let (request, index) = (self.request(), self.index());
        let item = match open {
            Open::Message => message_item(&request, "in_progress", None),
            Open::Thought => thought_item(&request, index, "in_progress", None),
            Open::Call(call) => {
                let begun = Call {
                    name: name.to_owned(),
                    ..Call::default()
                };
                call_item(&request, call, "in_progress", &begun)
            }
        };
        let added = json!({"output_index": index, "item": item});
        self.say(out, "response.output_item.added", added).await?;
        if open == Open::Message {
            let part = json!({
                "item_id": format!("msg_{request}"),
                "output_index": index,
                "content_index": 0,
                "part": {"type": "output_text", "text": "", "annotations": []},
            });
            self.say(out, "response.content_part.added", part).await?;
        }
        Ok(())
    }

    async fn piece(&mut self, out: &Out, piece: Piece<'_>) -> Result<(), Gone> {
        let request = self.request();
        match piece {
            Piece::Content(text) => {
                self.open(out, Open::Message, "").await?;
                self.text.push_str(text);
                let delta = json!({
                    "item_id": format!("msg_{request}"),
                    "output_index": self.index(),
                    "content_index": 0,
                    "delta": text,
                    "logprobs": [],
                });
                self.say(out, "response.output_text.delta", delta).await
            }
            Piece::Reasoning(text) => {
                self.open(out, Open::Thought, "").await?;
                self.text.push_str(text);
                let index = self.index();
                let delta = json!({
                    "item_id": format!("rs_{request}_{index}"),
                    "output_index": index,
                    "content_index": 0,
                    "delta": text,
                });
                self.say(out, "response.reasoning_text.delta", delta).await
            }
            Piece::Call {
                index,
                name,
                arguments,
            } => {
                self.answer.call(index, name, arguments);
                self.open(out, Open::Call(index), name).await?;
                if arguments.is_empty() {
                    return Ok(());
                }
                let delta = json!({
                    "item_id": format!("fc_{request}_{index}"),
                    "output_index": self.index(),
                    "delta": arguments,
                });
                self.say(out, "response.function_call_arguments.delta", delta)
                    .await
            }
        }
    }
}

impl Tell for Telling {
    const FRAMING: Framing = Framing::Events;

    async fn tell(&mut self, out: &Out, (_, event): (u32, Event)) -> Result<(), Gone> {
        match event {
            Event::Accepted(accepted) => {
                let value = head(&accepted, &self.echo, "in_progress");
                self.answer.accepted = accepted;
                let begun = json!({ "response": value });
                self.say(out, "response.created", begun.clone()).await?;
                self.say(out, "response.in_progress", begun).await
            }
            Event::Delta(delta) => {
                self.answer.count(&delta);
                for piece in pieces(&delta, true) {
                    self.piece(out, piece).await?;
                }
                Ok(())
            }
            Event::Finished(finished) => {
                if self.items.0.is_empty() && self.open.is_none() {
                    self.open(out, Open::Message, "").await?;
                }
                self.close(out).await?;
                let kind = match is_cut(&finished) {
                    true => "response.incomplete",
                    false => "response.completed",
                };
                self.answer.finished = finished;
                let value = self.items.response(&self.echo, &self.answer);
                self.say(out, kind, json!({ "response": value })).await
            }
        }
    }

    async fn fail(&mut self, out: &Out, error: &Error) -> Result<(), Gone> {
        let mut value = head(&self.answer.accepted, &self.echo, "failed");
        let told = Flavor::Openai.body(error);
        value["error"] = json!({"code": "server_error", "message": told["error"]["message"]});
        self.say(out, "response.failed", json!({ "response": value }))
            .await
    }
}

#[cfg(test)]
mod tests {
    use hotcell_proto::v1::prompt::Kind;

    use super::*;

    fn chat(value: Value) -> Result<Chat, Error> {
        let asked = read(serde_json::from_value(value).unwrap())?;
        match asked.request.prompt.and_then(|p| p.kind) {
            Some(Kind::Chat(chat)) => Ok(chat),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_conversation_is_read_from_its_items() {
        let chat = chat(json!({
            "instructions": "be brief",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "4?"}]},
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "4"},
            ],
        }))
        .unwrap();
        let roles: Vec<_> = chat.messages.iter().map(|m| m.role.as_str()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "tool"]);
        assert_eq!(chat.messages[2].tool_calls.len(), 2);
        assert_eq!(chat.messages[3].tool_call_id, "a");
    }

    #[test]
    fn a_thought_is_an_item_and_its_tokens_are_counted() {
        let answer = Answer {
            reasoning: "hm".to_owned(),
            content: "4".to_owned(),
            thought_tokens: 3,
            ..Answer::default()
        };
        let whole = Items::of(&answer).response(&json!({}), &answer);
        assert_eq!(whole["output"][0]["type"], "reasoning");
        assert_eq!(whole["output"][0]["content"][0]["text"], "hm");
        assert_eq!(whole["output"][1]["type"], "message");
        assert_eq!(
            whole["usage"]["output_tokens_details"]["reasoning_tokens"],
            3
        );
    }

    #[test]
    fn what_would_change_the_answer_is_read_or_refused() {
        let thinks = chat(json!({"input": "x", "reasoning": {"effort": "none"}})).unwrap();
        assert_eq!(thinks.template_arguments, r#"{"enable_thinking":false}"#);
        let odds = json!(["message.output_text.logprobs"]);
        let error = chat(json!({"input": "x", "include": odds})).unwrap_err();
        assert_eq!(error.get("field"), Some("include"));
        assert!(chat(json!({"input": "x", "top_logprobs": 2})).is_err());
        let nothing =
            json!({"input": "x", "include": ["reasoning.encrypted_content"], "top_logprobs": 0});
        assert!(chat(nothing).is_ok());
    }

    #[test]
    fn what_would_have_to_be_kept_is_refused() {
        let error = chat(json!({"input": "x", "previous_response_id": "resp_1"})).unwrap_err();
        assert_eq!(error.get("field"), Some("previous_response_id"));
        assert!(chat(json!({"input": "x", "background": true})).is_err());
        assert!(chat(json!({"input": [{"type": "image_generation_call"}]})).is_err());
    }
}

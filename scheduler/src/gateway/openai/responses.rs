//! Responses: the part of OpenAI's newer API that keeps nothing between calls.

mod tell;

use axum::{body::Body, extract::State, http::Extensions, response::Response};
use hotcell_proto::{
    error::Error,
    v1::{Chat, ChatMessage, GenerateRequest, Grammar, Sampling, Tool, ToolCall, grammar},
};
use serde::Deserialize;
use serde_json::{Value, json};

use self::tell::{Items, Telling};
use super::{
    answered,
    options::{Content, at_most, refused, text_of},
    tools::{self, NamedFunction, ToolChoice},
};
use crate::{
    access::Caller,
    gateway::{
        ask::{self, Branches, complete, stream},
        body,
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
    conversation: Option<Value>,
    prompt: Option<Value>,
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
    if request.conversation.is_some() {
        let why = "conversations are not kept here; send the whole conversation as input";
        return Err(refused("conversation", why));
    }
    if request.prompt.is_some() {
        let why = "templates are not kept here; send instructions and input";
        return Err(refused("prompt", why));
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
            max_tokens: at_most("max_output_tokens", request.max_output_tokens)?.unwrap_or(0),
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
        assert!(chat(json!({"input": "x", "conversation": null, "prompt": null})).is_ok());
        for field in ["conversation", "prompt"] {
            let error = chat(json!({"input": "x", field: {"id": "a"}})).unwrap_err();
            assert_eq!(error.get("field"), Some(field));
        }
        let error = chat(json!({"input": "x", "max_output_tokens": 0})).unwrap_err();
        assert_eq!(error.get("field"), Some("max_output_tokens"));
        assert!(chat(json!({"input": [{"type": "image_generation_call"}]})).is_err());
    }
}

//! What requests of Anthropic's form ask for, and what that is in Hotcell's.

use hotcell_proto::{
    error::{Error, Reason},
    v1::{
        Chat, ChatMessage, GenerateRequest, Grammar, Sampling, Tool, ToolCall, ToolCalls,
        grammar::Kind,
    },
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::gateway::ask;

#[derive(Debug, Deserialize)]
pub(super) struct Request {
    max_tokens: u32,
    stop_sequences: Option<Vec<String>>,
    stream: Option<bool>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<u32>,
    tool_choice: Option<ToolChoice>,
    /// What `output_config.format` was called at first.
    output_format: Option<Format>,
    #[serde(flatten)]
    conversation: Conversation,
}

/// What a model is told.
#[derive(Debug, Deserialize)]
pub(super) struct Conversation {
    #[serde(default)]
    model: String,
    messages: Vec<Message>,
    system: Option<Content>,
    tools: Option<Vec<ToolSpec>>,
    thinking: Option<Thinking>,
    output_config: Option<OutputConfig>,
}

#[derive(Debug, Deserialize)]
struct OutputConfig {
    format: Option<Format>,
    effort: Option<String>,
}

/// What the text has to be.
#[derive(Debug, Deserialize)]
struct Format {
    #[serde(rename = "type")]
    kind: String,
    schema: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct Thinking {
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Debug, Deserialize)]
struct Message {
    role: String,
    content: Content,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Blocks(Vec<Block>),
}

/// A piece of a message; fields are those of all types.
#[derive(Debug, Deserialize)]
struct Block {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
    thinking: Option<String>,
    id: Option<String>,
    name: Option<String>,
    input: Option<Value>,
    tool_use_id: Option<String>,
    content: Option<Content>,
}

#[derive(Debug, Deserialize)]
struct ToolSpec {
    name: String,
    description: Option<String>,
    input_schema: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct ToolChoice {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    #[serde(default)]
    disable_parallel_tool_use: bool,
}

/// A request in Hotcell's form.
pub(super) struct Asked {
    pub request: GenerateRequest,
    pub stream: bool,
    /// Whether one tool is called at most.
    pub one_call: bool,
}

fn refused(field: &str, why: impl Into<String>) -> Error {
    Error::new(Reason::InvalidArgument, why).with("field", field)
}

fn unknown(kind: &str) -> Error {
    let kind: String = kind.chars().take(40).collect();
    let why = format!("a message has content of type {kind:?}; the models here read text only");
    refused("messages", why)
}

/// The text of content that is nothing else.
fn text(content: Content) -> Result<String, Error> {
    let blocks = match content {
        Content::Text(text) => return Ok(text),
        Content::Blocks(blocks) => blocks,
    };
    let mut all = String::new();
    for block in blocks {
        match (block.kind.as_str(), block.text) {
            ("text", Some(text)) => all.push_str(&text),
            (kind, _) => return Err(unknown(kind)),
        }
    }
    Ok(all)
}

/// One message of Anthropic's is several of a template's when it brings answers of tools.
fn push(messages: &mut Vec<ChatMessage>, message: Message) -> Result<(), Error> {
    let say = |role: &str| ChatMessage {
        role: role.to_owned(),
        ..ChatMessage::default()
    };
    let mut own = say(&message.role);
    let mut said = false;
    let blocks = match message.content {
        Content::Text(text) => {
            own.content = text;
            messages.push(own);
            return Ok(());
        }
        Content::Blocks(blocks) => blocks,
    };
    for block in blocks {
        match block.kind.as_str() {
            "text" => own.content.push_str(&block.text.unwrap_or_default()),
            "thinking" => own.reasoning.push_str(&block.thinking.unwrap_or_default()),
            // What it thought, and nobody but its maker can read.
            "redacted_thinking" => {}
            "tool_use" => own.tool_calls.push(ToolCall {
                id: block.id.unwrap_or_default(),
                name: block.name.unwrap_or_default(),
                arguments: block.input.unwrap_or_else(|| json!({})).to_string(),
            }),
            "tool_result" => {
                messages.push(ChatMessage {
                    tool_call_id: block.tool_use_id.unwrap_or_default(),
                    content: block.content.map_or_else(|| Ok(String::new()), text)?,
                    ..say("tool")
                });
                continue;
            }
            kind => return Err(unknown(kind)),
        }
        said = true;
    }
    if said {
        messages.push(own);
    }
    Ok(())
}

fn chat(conversation: Conversation) -> Result<Chat, Error> {
    let mut messages = Vec::with_capacity(conversation.messages.len() + 1);
    if let Some(system) = conversation.system {
        messages.push(ChatMessage {
            role: "system".to_owned(),
            content: text(system)?,
            ..ChatMessage::default()
        });
    }
    for message in conversation.messages {
        push(&mut messages, message)?;
    }
    let tools = conversation.tools.unwrap_or_default();
    let tools = tools.into_iter().map(|spec| Tool {
        name: spec.name,
        description: spec.description.unwrap_or_default(),
        parameters: spec.input_schema.map(|s| s.to_string()).unwrap_or_default(),
    });
    let mut told = Map::new();
    let effort = conversation.output_config.and_then(|config| config.effort);
    if let Some(effort) = effort {
        told.insert("reasoning_effort".to_owned(), Value::from(effort));
    }
    if let Some(thinking) = conversation.thinking {
        let thinks = Value::from(thinking.kind != "disabled");
        told.insert("enable_thinking".to_owned(), thinks);
    }
    let arguments = (!told.is_empty()).then(|| Value::from(told).to_string());
    Ok(Chat {
        messages,
        tools: tools.collect(),
        template_arguments: arguments.unwrap_or_default(),
    })
}

/// What a choice makes of the tools.
fn choose(choice: Option<ToolChoice>, chat: &mut Chat) -> Result<Option<Grammar>, Error> {
    let Some(choice) = choice else {
        return Ok(None);
    };
    let tools = match (choice.kind.as_str(), &choice.name) {
        ("auto", _) => return Ok(None),
        ("none", _) => {
            chat.tools.clear();
            return Ok(None);
        }
        ("any", _) => chat.tools.clone(),
        ("tool", Some(name)) => {
            let named = chat.tools.iter().filter(|tool| tool.name == *name);
            named.cloned().collect()
        }
        _ => {
            let why = "tool_choice is of type auto, any, tool (with a name) or none";
            return Err(refused("tool_choice", why));
        }
    };
    if tools.is_empty() {
        return Err(refused(
            "tool_choice",
            "tool_choice asks for a tool that is not among the tools",
        ));
    }
    let kind = Kind::ToolCalls(ToolCalls {
        tools,
        single: choice.disable_parallel_tool_use,
    });
    Ok(Some(Grammar { kind: Some(kind) }))
}

/// What the text has to be, by the one format that is given.
fn follow(one: Option<Format>, other: Option<Format>) -> Result<Option<Grammar>, Error> {
    let format = match (one, other) {
        (Some(_), Some(_)) => {
            let why = "output_format and output_config.format are two names of one thing; give one";
            return Err(refused("output_format", why));
        }
        (one, other) => one.or(other),
    };
    let Some(format) = format else {
        return Ok(None);
    };
    match (format.kind.as_str(), format.schema) {
        ("json_schema", Some(schema)) => Ok(Some(Grammar {
            kind: Some(Kind::JsonSchema(schema.to_string())),
        })),
        (kind, _) => {
            let kind: String = kind.chars().take(40).collect();
            let why = format!("a format of type {kind:?}; there is json_schema with a schema");
            Err(refused("output_config.format", why))
        }
    }
}

/// A request for an answer.
pub(super) fn asked(mut request: Request) -> Result<Asked, Error> {
    let model = request.conversation.model.clone();
    let config = request.conversation.output_config.as_mut();
    let format = config.and_then(|config| config.format.take());
    let format = follow(request.output_format, format)?;
    let mut chat = chat(request.conversation)?;
    let choice = request.tool_choice.as_ref();
    let one_call = choice.is_some_and(|choice| choice.disable_parallel_tool_use);
    let grammar = match (choose(request.tool_choice, &mut chat)?, format) {
        (Some(_), Some(_)) => {
            let why = "the text cannot be both a call of a tool and follow output_config.format";
            return Err(refused("output_config.format", why));
        }
        (must, format) => must.or(format),
    };
    Ok(Asked {
        one_call,
        stream: request.stream.unwrap_or(false),
        request: GenerateRequest {
            model,
            prompt: ask::chat(chat),
            sampling: Some(Sampling {
                temperature: Some(request.temperature.unwrap_or(1.0)),
                top_p: request.top_p,
                top_k: request.top_k,
                ..Sampling::default()
            }),
            // 0 stands for "as many as fit" inside.
            max_tokens: match request.max_tokens {
                0 => return Err(refused("max_tokens", "max_tokens is at least 1")),
                some => some,
            },
            stop: request.stop_sequences.unwrap_or_default(),
            grammar,
            parse_output: true,
            ..GenerateRequest::default()
        },
    })
}

/// A conversation whose tokens are counted, and for which model.
pub(super) fn counted(conversation: Conversation) -> Result<(String, Chat), Error> {
    let model = conversation.model.clone();
    Ok((model, chat(conversation)?))
}

#[cfg(test)]
mod tests {
    use hotcell_proto::v1::prompt;

    use super::*;

    fn read(value: Value) -> Result<Asked, Error> {
        asked(serde_json::from_value(value).unwrap())
    }

    fn chat_of(asked: Asked) -> Chat {
        match asked.request.prompt.unwrap().kind {
            Some(prompt::Kind::Chat(chat)) => chat,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn answers_of_tools_are_messages_of_their_own() {
        let asked = read(json!({
            "model": "m", "max_tokens": 9, "system": [{"type": "text", "text": "be brief"}],
            "messages": [
                {"role": "user", "content": "4?"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "tool_use", "id": "t", "name": "f", "input": {"x": 1}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "4"}]},
                    {"type": "text", "text": "so?"}]},
            ],
        }))
        .unwrap();
        let chat = chat_of(asked);
        let roles: Vec<_> = chat.messages.iter().map(|m| m.role.as_str()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "tool", "user"]);
        assert_eq!(chat.messages[2].reasoning, "hm");
        assert_eq!(chat.messages[2].tool_calls[0].arguments, r#"{"x":1}"#);
        assert_eq!(chat.messages[3].tool_call_id, "t");
        assert_eq!(chat.messages[4].content, "so?");
    }

    #[test]
    fn a_choice_names_a_tool_that_is_there() {
        let with = |choice: Value| {
            read(json!({
                "max_tokens": 9, "messages": [], "tool_choice": choice,
                "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            }))
        };
        assert!(
            with(json!({"type": "any"}))
                .unwrap()
                .request
                .grammar
                .is_some()
        );
        assert!(
            with(json!({"type": "auto"}))
                .unwrap()
                .request
                .grammar
                .is_none()
        );
        assert!(with(json!({"type": "tool", "name": "g"})).is_err());
        assert!(
            chat_of(with(json!({"type": "none"})).unwrap())
                .tools
                .is_empty()
        );
    }

    #[test]
    fn a_text_follows_the_schema_it_is_given() {
        let format = json!({"type": "json_schema", "schema": {"type": "object"}});
        let config = json!({"format": format, "effort": "low"});
        let with = |more: Value| {
            let mut all = json!({"max_tokens": 9, "messages": [], "tools": [{"name": "f"}]});
            all.as_object_mut()
                .unwrap()
                .extend(more.as_object().unwrap().clone());
            read(all)
        };
        for more in [
            json!({ "output_format": format }),
            json!({ "output_config": config }),
        ] {
            let kind = with(more).unwrap().request.grammar.unwrap().kind;
            assert_eq!(kind, Some(Kind::JsonSchema(r#"{"type":"object"}"#.into())));
        }
        let told = chat_of(with(json!({ "output_config": config })).unwrap());
        assert_eq!(told.template_arguments, r#"{"reasoning_effort":"low"}"#);
        for bad in [
            json!({"output_format": format, "output_config": config}),
            json!({"output_format": {"type": "xml"}}),
            json!({"output_format": {"type": "json_schema"}}),
            json!({"output_format": format, "tool_choice": {"type": "any"}}),
        ] {
            assert!(with(bad.clone()).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let image = json!([{"type": "image", "source": {}}]);
        let error =
            read(json!({"max_tokens": 1, "messages": [{"role": "user", "content": image}]}));
        assert!(error.err().unwrap().message().contains("\"image\""));
        assert!(read(json!({"max_tokens": 0, "messages": []})).is_err());
    }
}

//! Chats as requests have them, made into what templates see.

use std::{
    collections::BTreeMap,
    time::{SystemTime, UNIX_EPOCH},
};

use hotcell_proto::{
    error::{Error, Reason},
    limits, v1,
};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::{
    error::of_text,
    text::{
        Call, CalledFunction, Calls, ChatInput, ChatTemplate, Family, Message, Tokenizer,
        tool_value,
    },
};

/// Variables that are not a request's to set.
const OURS: [&str; 2] = ["messages", "tools"];

fn invalid(what: impl Into<String>) -> Error {
    Error::new(Reason::InvalidArgument, what)
}

/// An object; of no text it is empty.
fn object(text: &str, what: impl Fn() -> String) -> Result<Map<String, Value>, Error> {
    if text.trim_ascii().is_empty() {
        return Ok(Map::new());
    }
    match serde_json::from_str(text) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(invalid(format!("{} are no JSON object", what()))),
        Err(error) => Err(invalid(format!("{}: {error}", what()))),
    }
}

/// The JSON schema of a tool's arguments. One that says nothing is that of any object.
///
/// # Errors
/// [`Reason::InvalidArgument`] naming the tool, if it is no JSON object.
pub(crate) fn parameters(tool: &v1::Tool) -> Result<Value, Error> {
    let what = || format!("the parameters of the tool {:?}", tool.name);
    let mut schema = object(&tool.parameters, what)?;
    if schema.is_empty() {
        schema.insert("type".to_owned(), "object".into());
        schema.insert("properties".to_owned(), Map::new().into());
    }
    Ok(Value::Object(schema))
}

/// A call's id as a model of this family takes it: Mistral's templates refuse all but nine letters and digits, and
/// clients have ids of their own.
fn id(id: &str, family: &Family) -> String {
    let fits = id.len() == 9 && id.bytes().all(|b| b.is_ascii_alphanumeric());
    if id.is_empty() || fits || !matches!(family.calls, Calls::List | Calls::Named) {
        return id.to_owned();
    }
    let hash = Sha256::digest(id);
    let digit = |byte: &u8| char::from_digit(u32::from(byte % 36), 36);
    hash.iter().filter_map(digit).take(9).collect()
}

fn call(call: &v1::ToolCall, family: &Family) -> Result<Call, Error> {
    let what = || format!("the arguments of a call of {:?}", call.name);
    Ok(Call {
        id: id(&call.id, family),
        function: CalledFunction {
            name: call.name.clone(),
            arguments: Value::Object(object(&call.arguments, what)?),
        },
    })
}

fn message(message: &v1::ChatMessage, family: &Family) -> Result<Message, Error> {
    at_most(
        "calls of tools in a message",
        message.tool_calls.len(),
        limits::MAX_TOOL_CALLS,
    )?;
    let calls = message.tool_calls.iter().map(|c| call(c, family));
    Ok(Message {
        role: message.role.clone(),
        content: message.content.clone(),
        reasoning: message.reasoning.clone(),
        tool_call_id: id(&message.tool_call_id, family),
        name: message.name.clone(),
        tool_calls: calls.collect::<Result<_, _>>()?,
    })
}

fn at_most(what: &str, count: usize, limit: usize) -> Result<(), Error> {
    if count > limit {
        let what = format!("the chat has {count} {what}; the limit is {limit}");
        return Err(Error::new(Reason::LimitExceeded, what));
    }
    Ok(())
}

/// The prompt that a template makes of a chat.
///
/// # Errors
/// When the chat is too long, JSON in it cannot be read, or the template refuses it.
pub(super) fn render(
    template: &ChatTemplate,
    chat: &v1::Chat,
    tokenizer: &Tokenizer,
    family: &Family,
) -> Result<String, Error> {
    at_most("messages", chat.messages.len(), limits::MAX_CHAT_MESSAGES)?;
    at_most("tools", chat.tools.len(), limits::MAX_TOOLS)?;
    let calls = chat.messages.iter().flat_map(|m| &m.tool_calls);
    let calls = calls.map(|c| c.id.len() + c.name.len() + c.arguments.len() + 64);
    let tools = chat.tools.iter();
    let tools = tools.map(|t| t.name.len() + t.description.len() + t.parameters.len() + 64);
    let json_bytes = calls
        .chain(tools)
        .fold(chat.template_arguments.len(), usize::saturating_add);
    at_most("bytes of JSON", json_bytes, limits::MAX_PROMPT_BYTES)?;
    let messages: Vec<Message> = chat
        .messages
        .iter()
        .map(|m| message(m, family))
        .collect::<Result<_, _>>()?;
    let tool = |tool: &v1::Tool| {
        let parameters = parameters(tool)?;
        Ok(tool_value(&tool.name, &tool.description, parameters))
    };
    let tools: Vec<Value> = chat.tools.iter().map(tool).collect::<Result<_, Error>>()?;
    let extra = object(&chat.template_arguments, || {
        "the template's arguments".to_owned()
    })?;
    if let Some(name) = OURS.iter().find(|name| extra.contains_key(**name)) {
        let what = format!("the template's arguments cannot set {name}; the chat has them");
        return Err(invalid(what));
    }
    let extra: BTreeMap<String, Value> = extra.into_iter().collect();
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_secs() as i64);
    let input = ChatInput {
        messages: &messages,
        tools: &tools,
        json_bytes,
        add_generation_prompt: true,
        bos_token: &tokenizer.bos_text(),
        eos_token: &tokenizer.eos_text(),
        extra: &extra,
        now,
    };
    template.render(&input).map_err(|e| of_text(&e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_of_the_form_that_the_family_takes() {
        let of = |calls, text: &str| id(text, &Family::plain(calls, false));
        let long = "call_0123456789abcdef_0";
        let short = of(Calls::List, long);
        assert!(short.len() == 9 && short.bytes().all(|b| b.is_ascii_alphanumeric()));
        assert_eq!(short, of(Calls::Named, long));
        assert_ne!(short, of(Calls::List, "call_0123456789abcdef_1"));
        assert_eq!(of(Calls::List, "abcDEF123"), "abcDEF123");
        assert_eq!(of(Calls::List, ""), "");
        assert_eq!(of(Calls::Tagged, long), long);
    }

    #[test]
    fn json_that_cannot_be_read_is_named() {
        let tool = |parameters: &str| v1::Tool {
            name: "get_weather".into(),
            parameters: parameters.into(),
            ..v1::Tool::default()
        };
        let empty = parameters(&tool(" ")).unwrap();
        assert_eq!(
            empty,
            serde_json::json!({"type": "object", "properties": {}})
        );
        for bad in ["{", "[]", "1", "nothing"] {
            let error = parameters(&tool(bad)).unwrap_err();
            assert_eq!(error.reason(), Reason::InvalidArgument);
            assert!(error.message().contains("get_weather"), "{error}");
        }
        let called = v1::ToolCall {
            name: "f".into(),
            arguments: "[1]".into(),
            ..v1::ToolCall::default()
        };
        let family = Family::plain(Calls::Tagged, false);
        assert!(
            call(&called, &family)
                .unwrap_err()
                .message()
                .contains("\"f\"")
        );
    }
}

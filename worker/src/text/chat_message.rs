//! Messages and JSON as Hugging Face's chat templates see them.

use std::sync::Arc;

use minijinja::value::{Enumerator, Object, Serde, Value};

use super::chat::{Call, Message};

/// A message as templates see it: a dict of the keys it has, in this order.
#[derive(Debug)]
pub(super) struct MessageValue(Vec<(&'static str, Value)>);

impl From<&Message> for MessageValue {
    fn from(message: &Message) -> Self {
        let mut keys = vec![
            ("role", Value::from(message.role.as_str())),
            ("content", Value::from(message.content.as_str())),
        ];
        // Templates ask whether these are there.
        let mut add = |key, text: &str| {
            if !text.is_empty() {
                keys.push((key, Value::from(text)));
            }
        };
        add("reasoning_content", &message.reasoning);
        add("tool_call_id", &message.tool_call_id);
        add("name", &message.name);
        if !message.tool_calls.is_empty() {
            let calls = message.tool_calls.iter().map(Call::value);
            keys.push(("tool_calls", Value::from(calls.collect::<Vec<_>>())));
        }
        Self(keys)
    }
}

impl Object for MessageValue {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let key = key.as_str()?;
        let found = self.0.iter().find(|(name, _)| *name == key);
        found.map(|(_, value)| value.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.0.iter().map(|(name, _)| Value::from(*name)).collect())
    }
}

/// A JSON object with its keys in their order, as Python's dicts have them.
#[derive(Debug)]
struct JsonObject(Vec<(String, Value)>);

impl Object for JsonObject {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let key = key.as_str()?;
        let found = self.0.iter().find(|(name, _)| name == key);
        found.map(|(_, value)| value.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let keys = self.0.iter().map(|(name, _)| Value::from(name.as_str()));
        Enumerator::Values(keys.collect())
    }
}

/// JSON as templates see it. It goes as deep as its reader let it.
pub(super) fn json_value(json: &serde_json::Value) -> Value {
    match json {
        serde_json::Value::Object(map) => {
            let entries = map
                .iter()
                .map(|(key, value)| (key.clone(), json_value(value)));
            Value::from_object(JsonObject(entries.collect()))
        }
        serde_json::Value::Array(items) => Value::from_iter(items.iter().map(json_value)),
        other => Value::from(Serde(other)),
    }
}

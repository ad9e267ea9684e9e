//! Tools in OpenAI's form.

use hotcell_proto::{
    error::Error,
    v1::{Grammar, Tool, ToolCall, ToolCalls, grammar::Kind},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::options::refused;
use crate::gateway::ask::Call;

/// A tool as a request describes it.
#[derive(Debug, Deserialize)]
pub(in crate::gateway) struct ToolSpec {
    #[serde(rename = "type")]
    kind: Option<String>,
    function: FunctionSpec,
}

#[derive(Debug, Deserialize)]
struct FunctionSpec {
    name: String,
    description: Option<String>,
    parameters: Option<Value>,
}

/// Which tools a request offers.
///
/// # Errors
/// For one that is no function.
pub(in crate::gateway) fn tools(specs: Vec<ToolSpec>) -> Result<Vec<Tool>, Error> {
    let tool = |spec: ToolSpec| match spec.kind.as_deref() {
        None | Some("function") => Ok(Tool {
            name: spec.function.name,
            description: spec.function.description.unwrap_or_default(),
            parameters: spec
                .function
                .parameters
                .map(|p| p.to_string())
                .unwrap_or_default(),
        }),
        Some(other) => {
            let other: String = other.chars().take(40).collect();
            Err(refused(
                "tools",
                format!("a tool of type {other:?}; there are functions only"),
            ))
        }
    };
    specs.into_iter().map(tool).collect()
}

/// Whether tools may, must or must not be called.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum ToolChoice {
    Word(String),
    Named { function: NamedFunction },
}

#[derive(Debug, Deserialize)]
pub(super) struct NamedFunction {
    pub name: String,
}

/// What a choice makes of the tools: those that the model is told of, and what it has to write; a `single` call, if it may
/// be but one.
///
/// # Errors
/// For a choice that is none, or names none of the tools.
pub(super) fn choose(
    choice: Option<&ToolChoice>,
    tools: Vec<Tool>,
    single: bool,
) -> Result<(Vec<Tool>, Option<Grammar>), Error> {
    let must = |tools: Vec<Tool>| {
        let kind = Kind::ToolCalls(ToolCalls { tools, single });
        Some(Grammar { kind: Some(kind) })
    };
    match choice {
        None => Ok((tools, None)),
        Some(ToolChoice::Word(word)) => match word.as_str() {
            "auto" => Ok((tools, None)),
            "none" => Ok((Vec::new(), None)),
            "required" if tools.is_empty() => Err(refused(
                "tool_choice",
                "tool_choice is required, and there are no tools",
            )),
            "required" => Ok((tools.clone(), must(tools))),
            other => {
                let other: String = other.chars().take(40).collect();
                let why = format!(
                    "tool_choice is {other:?}; there are none, auto, required and a function's name"
                );
                Err(refused("tool_choice", why))
            }
        },
        Some(ToolChoice::Named { function }) => {
            let named: Vec<_> = tools
                .iter()
                .filter(|t| t.name == function.name)
                .cloned()
                .collect();
            if named.is_empty() {
                let name: String = function.name.chars().take(64).collect();
                let why = format!("tool_choice names {name:?}, which is none of the tools");
                return Err(refused("tool_choice", why));
            }
            Ok((tools, must(named)))
        }
    }
}

/// A call in a message of the conversation.
#[derive(Debug, Deserialize)]
pub(in crate::gateway) struct CallSpec {
    id: Option<String>,
    function: CalledFunction,
}

#[derive(Debug, Deserialize)]
struct CalledFunction {
    name: String,
    arguments: Option<Value>,
}

impl From<CallSpec> for ToolCall {
    fn from(spec: CallSpec) -> Self {
        let arguments = match spec.function.arguments {
            Some(Value::String(text)) => text,
            // Some clients send the object itself.
            Some(other) => other.to_string(),
            None => "{}".to_owned(),
        };
        Self {
            id: spec.id.unwrap_or_default(),
            name: spec.function.name,
            arguments,
        }
    }
}

/// A call that a model made, whole.
#[derive(Debug, Serialize)]
pub(super) struct CallView<'a> {
    id: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    function: FunctionView<'a>,
}

#[derive(Debug, Serialize)]
struct FunctionView<'a> {
    name: &'a str,
    arguments: &'a str,
}

impl<'a> From<&'a Call> for CallView<'a> {
    fn from(call: &'a Call) -> Self {
        Self {
            id: &call.id,
            kind: "function",
            function: FunctionView {
                name: &call.name,
                arguments: &call.arguments,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn two() -> Vec<Tool> {
        let specs = json!([
            {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}},
            {"type": "function", "function": {"name": "b", "description": "does b"}},
        ]);
        tools(serde_json::from_value(specs).unwrap()).unwrap()
    }

    fn choice(value: Value) -> Result<(usize, Option<usize>), Error> {
        let choice: ToolChoice = serde_json::from_value(value).unwrap();
        let (told, grammar) = choose(Some(&choice), two(), false)?;
        let must = grammar.map(|g| match g.kind {
            Some(Kind::ToolCalls(calls)) => calls.tools.len(),
            other => panic!("{other:?}"),
        });
        Ok((told.len(), must))
    }

    #[test]
    fn a_choice_says_what_may_and_must_be_called() {
        assert_eq!(choice(json!("auto")).unwrap(), (2, None));
        assert_eq!(choice(json!("none")).unwrap(), (0, None));
        assert_eq!(choice(json!("required")).unwrap(), (2, Some(2)));
        let named = |name: &str| choice(json!({"type": "function", "function": {"name": name}}));
        assert_eq!(named("b").unwrap(), (2, Some(1)));
        assert_eq!(named("c").unwrap_err().get("field"), Some("tool_choice"));
        assert!(choice(json!("maybe")).is_err());
    }

    #[test]
    fn calls_of_the_conversation_are_read_in_both_forms() {
        let of = |arguments: Value| {
            let spec = json!({"id": "1", "type": "function", "function": {"name": "a", "arguments": arguments}});
            ToolCall::from(serde_json::from_value::<CallSpec>(spec).unwrap()).arguments
        };
        assert_eq!(of(json!("{\"x\": 1}")), "{\"x\": 1}");
        assert_eq!(of(json!({"x": 1})), "{\"x\":1}");
    }
}

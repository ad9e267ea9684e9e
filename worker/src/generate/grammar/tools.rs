//! Calls of tools as a grammar: what [`crate::text::Parser`] reads as calls of the same family.

use hotcell_proto::{
    error::Error,
    limits,
    v1::{Tool, ToolCalls},
};
use serde_json::Value;

use super::{invalid, spaced};
use crate::{
    model::text::chat::parameters,
    text::{Calls, Family, Mark},
};

/// A Lark grammar of one or more calls of these tools (of one, if it is to be a `single` one), and nothing else.
pub(super) fn lark(calls: &ToolCalls, family: &Family) -> Result<String, Error> {
    let tools = &calls.tools;
    if tools.is_empty() || tools.len() > limits::MAX_TOOLS {
        let most = limits::MAX_TOOLS;
        return Err(invalid(format!(
            "{} tools to call; from 1 to {most} can be",
            tools.len()
        )));
    }
    let mark = |mark: Mark| match family.call_mark(mark) {
        // In no text: the token itself.
        Some((_, Some(id))) => format!("<[{id}]>"),
        Some((text, None)) => quoted(text),
        None => String::new(),
    };
    let (call, end) = (mark(Mark::Call), mark(Mark::CallEnd));
    let most = match calls.single {
        true => 1,
        false => limits::MAX_TOOL_CALLS,
    };
    // None at all is no number of repetitions.
    let further = |text: &str| match most - 1 {
        0 => String::new(),
        more => format!(" ({text}){{0,{more}}}"),
    };
    let start = match family.calls {
        Calls::Tagged => {
            let tagged = format!("{call} \"\\n\" call \"\\n\" {end}");
            format!("{tagged}{}", further(&format!("\"\\n\" {tagged}")))
        }
        Calls::Python => format!("call{}", further("\"; \" call")),
        Calls::Bare => format!("call{}", further("\"\\n\" call")),
        Calls::List => format!("{call} \"[\" call{} \"]\"", further("\", \" call")),
        Calls::Named => format!("({call} call){{1,{}}}", most),
    };
    let names: Vec<String> = (0..tools.len()).map(|n| format!("call_{n}")).collect();
    let mut grammar = format!("start: {start}\ncall: {}\n", names.join(" | "));
    for (n, tool) in tools.iter().enumerate() {
        let schema = arguments(tool)?;
        let (before, after) = match family.calls {
            Calls::Named => (
                format!("{} {}", quoted(&tool.name), mark(Mark::Arguments)),
                "",
            ),
            calls => {
                let key = match calls {
                    Calls::Python => "parameters",
                    _ => "arguments",
                };
                let head = format!("{{\"name\": \"{}\", \"{key}\": ", tool.name);
                (quoted(&head), " \"}\"")
            }
        };
        grammar += &format!("call_{n}: {before} args_{n}{after}\nargs_{n}: %json {schema}\n");
    }
    Ok(grammar)
}

/// A Lark string, which is written as JSON's are.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// The schema of a tool's arguments, which are an object whatever it says.
fn arguments(tool: &Tool) -> Result<Value, Error> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    let fits = (1..=limits::MAX_TOOL_NAME).contains(&tool.name.len());
    if !fits || !tool.name.chars().all(plain) {
        let name = tool.name.get(..limits::MAX_TOOL_NAME).unwrap_or(&tool.name);
        return Err(invalid(format!("a tool cannot have the name {name:?}")));
    }
    let mut schema = parameters(tool)?;
    if let Some(members) = schema.as_object_mut() {
        members.entry("type").or_insert_with(|| "object".into());
        if tool.parameters.trim_ascii().is_empty() {
            // A tool that takes nothing is given nothing.
            members.insert("additionalProperties".to_owned(), false.into());
        }
    }
    if schema.get("type").is_some_and(|kind| kind != "object") {
        return Err(invalid(format!(
            "the parameters of the tool {:?} are no object",
            tool.name
        )));
    }
    Ok(spaced(schema))
}

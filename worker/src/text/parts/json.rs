//! A call's JSON as it comes: where it opens and closes, and what stands around its arguments.

use serde_json::Value;

/// Where a character of JSON leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// On.
    Inside,
    /// Into an object or array, at this depth.
    Opened(u32),
    /// Out of one, to this depth.
    Closed(u32),
    /// It stands in no JSON.
    Wrong,
}

/// Follows JSON, without looking whether all of it is well formed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Scan {
    depth: u32,
    string: bool,
    escaped: bool,
}

impl Scan {
    pub fn in_string(&self) -> bool {
        self.string
    }

    pub fn step(&mut self, c: char) -> Step {
        if self.string {
            match c {
                _ if self.escaped => self.escaped = false,
                '\\' => self.escaped = true,
                '"' => self.string = false,
                _ => {}
            }
            return Step::Inside;
        }
        match c {
            '"' => self.string = true,
            '{' | '[' => {
                self.depth = self.depth.saturating_add(1);
                return Step::Opened(self.depth);
            }
            '}' | ']' => {
                self.depth = self.depth.saturating_sub(1);
                return Step::Closed(self.depth);
            }
            ',' | ':' | '+' | '-' | '.' | '0'..='9' | 'E' => {}
            // Of true, false and null, and of exponents.
            'a' | 'e' | 'f' | 'l' | 'n' | 'r' | 's' | 't' | 'u' => {}
            c if is_space(c) => {}
            _ => return Step::Wrong,
        }
        Step::Inside
    }
}

/// JSON's white space.
pub(super) fn is_space(c: char) -> bool {
    matches!(c, ' ' | '\n' | '\r' | '\t')
}

/// The names that arguments go by.
const ARGUMENTS: [&str; 2] = ["arguments", "parameters"];

fn arguments(call: &Value) -> Option<&Value> {
    ARGUMENTS.iter().find_map(|key| call.get(key))
}

fn name(call: &Value) -> Option<String> {
    call.get("name")?.as_str().map(str::to_owned)
}

/// Of the beginning of a call's object, up to a value that is one too: if that is the arguments, the name that was
/// said before.
pub(super) fn before_arguments(head: &str) -> Option<Option<String>> {
    let before = head.strip_suffix('{')?;
    // A string that no text has by chance, so that it is certain which key the value belongs to.
    let open = "\u{1}open";
    let whole = format!("{before}{}}}", Value::from(open));
    let call: Value = serde_json::from_str(&whole).ok()?;
    (arguments(&call)?.as_str() == Some(open)).then(|| name(&call))
}

/// Name and arguments of a call's whole object. `inner` is the text of its first inner object, if that is the
/// arguments; only some families leave arguments out.
pub(super) fn whole(object: &str, inner: Option<&str>, optional: bool) -> Option<(String, String)> {
    let call: Value = serde_json::from_str(object).ok()?;
    let name = name(&call)?;
    let text = match (inner, arguments(&call)) {
        (Some(inner), _) => inner.to_owned(),
        // As OpenAI's protocol has them.
        (None, Some(Value::String(text))) => {
            let value = serde_json::from_str::<Value>(text).ok()?;
            value.is_object().then(|| text.clone())?
        }
        (None, None) if optional => "{}".to_owned(),
        (None, _) => return None,
    };
    Some((name, text))
}

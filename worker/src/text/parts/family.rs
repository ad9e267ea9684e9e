//! How a model writes calls of tools and what it thinks: decided by its chat template, and by its vocabulary where the
//! template says nothing.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use hotcell_proto::v1::{Tool, grammar::Kind};

use super::{Parser, lexer::Lexer};
use crate::text::Tokenizer;

/// What a mark says of the text around it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// A thought begins.
    Think,
    /// It ends.
    ThinkEnd,
    /// A call begins, or a list of calls.
    Call,
    /// It ends.
    CallEnd,
    /// A call's arguments begin.
    Arguments,
    /// A call's id begins.
    Id,
}

/// How calls are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calls {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen.
    Tagged,
    /// `{"name": …, "parameters": {…}}` and nothing before it but `<|python_tag|>`: Llama 3.1 and later.
    Python,
    /// `[TOOL_CALLS][{"name": …, "arguments": {…}}]`: Mistral.
    List,
    /// `[TOOL_CALLS]name[ARGS]{…}`: Mistral, since 2025.
    Named,
    /// `{"name": …, "arguments": {…}}` and nothing before it: where nothing is known.
    Bare,
}

impl Calls {
    fn marks(self) -> &'static [(&'static str, Mark)] {
        match self {
            Self::Tagged => &[("<tool_call>", Mark::Call), ("</tool_call>", Mark::CallEnd)],
            Self::Python => &[("<|python_tag|>", Mark::Call)],
            Self::List | Self::Named => &[
                ("[TOOL_CALLS]", Mark::Call),
                ("[ARGS]", Mark::Arguments),
                ("[CALL_ID]", Mark::Id),
            ],
            Self::Bare => &[],
        }
    }
}

/// The marks around thoughts that are known.
const THOUGHTS: &[[(&str, Mark); 2]] = &[
    [("<think>", Mark::Think), ("</think>", Mark::ThinkEnd)],
    [("[THINK]", Mark::Think), ("[/THINK]", Mark::ThinkEnd)],
];

/// Tokens at a prompt's end among which the mark that opens a thought is looked for.
const TAIL: usize = 16;
/// Names of tools that are looked for in a prompt.
const MAX_NAMES: usize = 4096;

/// How a model writes calls and thoughts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Family {
    /// How it writes calls.
    pub calls: Calls,
    thoughts: &'static [(&'static str, Mark)],
    /// Of the marks, those that are special tokens: a detokeniser leaves them out of the text.
    special: Arc<HashMap<u32, Mark>>,
}

impl Family {
    /// The family of a model with this template and vocabulary.
    pub fn of(template: Option<&str>, tokenizer: &Tokenizer) -> Self {
        let written = |mark: &str| template.is_some_and(|template| template.contains(mark));
        let token = |mark: &str| tokenizer.token_to_id(mark).is_some();
        let calls = if written("<tool_call>") {
            Calls::Tagged
        } else if written("[TOOL_CALLS]") {
            match written("[ARGS]") {
                true => Calls::Named,
                false => Calls::List,
            }
        } else if written("<|python_tag|>") || token("<|python_tag|>") {
            Calls::Python
        } else if token("<tool_call>") {
            Calls::Tagged
        } else if token("[TOOL_CALLS]") {
            match token("[ARGS]") {
                true => Calls::Named,
                false => Calls::List,
            }
        } else {
            Calls::Bare
        };
        let known = |by: &dyn Fn(&str) -> bool| {
            let found = THOUGHTS.iter().find(|[_, (end, _)]| by(end));
            found.map(<[_; 2]>::as_slice)
        };
        // A template that only cuts thoughts out of earlier answers knows their end alone.
        let thoughts = known(&written).or_else(|| known(&token));
        let mut family = Self {
            calls,
            thoughts: thoughts.unwrap_or_default(),
            special: Arc::default(),
        };
        let id = |&(text, mark): &(&str, Mark)| Some((tokenizer.token_to_id(text)?, mark));
        let special = family.marks().iter().filter_map(id).collect::<Vec<_>>();
        let special = special.into_iter().filter(|m| tokenizer.is_special(m.0));
        family.special = Arc::new(special.collect());
        family
    }

    /// Whether thoughts can be told from answers.
    #[must_use]
    pub fn thinks(&self) -> bool {
        !self.thoughts.is_empty()
    }

    /// A family without special tokens.
    #[must_use]
    pub fn plain(calls: Calls, thinks: bool) -> Self {
        let first = THOUGHTS.first().map(<[_; 2]>::as_slice);
        Self {
            calls,
            thoughts: first.filter(|_| thinks).unwrap_or_default(),
            special: Arc::default(),
        }
    }

    /// All its marks.
    pub(super) fn marks(&self) -> Vec<(&'static str, Mark)> {
        [self.thoughts, self.calls.marks()].concat()
    }

    /// The text of the mark that begins or ends a call, and its token if that is special; none if the family has none.
    pub fn call_mark(&self, mark: Mark) -> Option<(&'static str, Option<u32>)> {
        let &(text, _) = self.calls.marks().iter().find(|(_, m)| *m == mark)?;
        let id = self.special.iter().find(|(_, m)| **m == mark);
        Some((text, id.map(|(id, _)| *id)))
    }

    /// The mark that a special token is.
    pub fn special(&self, token: u32) -> Option<Mark> {
        self.special.get(&token).copied()
    }

    /// What reads the text that comes after a prompt and follows a grammar.
    pub fn parser(&self, tokenizer: &Tokenizer, prompt: &[u32], grammar: Option<&Kind>) -> Parser {
        let decoded = |ids: &[u32]| tokenizer.decode(ids, false).unwrap_or_default();
        match grammar {
            // The text is JSON and nothing else, whatever it looks like.
            Some(Kind::JsonSchema(_) | Kind::JsonObject(_)) => Parser::literal(),
            Some(Kind::ToolCalls(calls)) => {
                let names = calls.tools.iter().map(|t: &Tool| t.name.clone());
                let family = Self {
                    thoughts: &[],
                    ..self.clone()
                };
                Parser::new(&family, names.collect(), false)
            }
            Some(Kind::Regex(_) | Kind::Lark(_)) | None => {
                let names = match self.calls {
                    // Nothing tells a call from an answer in JSON but that it names something that the prompt named.
                    Calls::Bare | Calls::Python => names(&decoded(prompt)),
                    _ => HashSet::new(),
                };
                let tail = prompt.split_at(prompt.len().saturating_sub(TAIL)).1;
                let open = self.thoughts.iter().find(|(_, m)| *m == Mark::Think);
                let opened = grammar.is_none()
                    && open.is_some_and(|(text, _)| decoded(tail).trim_end().ends_with(text));
                Parser::new(self, names, opened)
            }
        }
    }

    pub(super) fn lexer(&self) -> Lexer {
        Lexer::new(self.marks())
    }
}

/// What a text calls `"name": "…"`, as templates write tools.
fn names(text: &str) -> HashSet<String> {
    let name = |rest: &str| {
        let rest = rest.trim_start().strip_prefix(':')?.trim_start();
        let (name, _) = rest.strip_prefix('"')?.split_once('"')?;
        let fits = name.len() <= hotcell_proto::limits::MAX_TOOL_NAME;
        fits.then(|| name.to_owned())
    };
    let after = text.split("\"name\"").skip(1);
    after.filter_map(name).take(MAX_NAMES).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_as_templates_write_them() {
        let text = r#"{"name": "a"} {"type":"x","name":"b-c"} {"name"
            : "d"} "name": "unfinished"#;
        let found = names(text);
        let mut found: Vec<&str> = found.iter().map(String::as_str).collect();
        found.sort_unstable();
        assert_eq!(found, ["a", "b-c", "d"]);
    }
}

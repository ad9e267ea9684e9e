//! What requests of OpenAI's form ask for, and what that is in Hotcell's.

use std::collections::BTreeMap;

use hotcell_proto::{
    error::{Error, Reason},
    v1::{Grammar, LogitBias, Sampling, grammar::Kind},
};
use serde::Deserialize;
use serde_json::Value;

/// Refuses a field's value.
pub(super) fn refused(field: &str, why: impl Into<String>) -> Error {
    Error::new(Reason::InvalidArgument, why).with("field", field)
}

/// So many tokens at most, where a field says how many.
pub(super) fn at_most(field: &str, count: Option<u32>) -> Result<Option<u32>, Error> {
    match count {
        Some(0) => Err(refused(field, format!("{field} is 0; it is at least 1"))),
        other => Ok(other),
    }
}

/// One or several.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(in crate::gateway) enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl<T> OneOrMany<T> {
    pub fn into_vec(self) -> Vec<T> {
        match self {
            Self::One(one) => vec![one],
            Self::Many(many) => many,
        }
    }
}

/// How tokens are chosen and when a text ends: what chats and completions have in common. Fields that are not here are
/// left unread, as OpenAI's clients send whatever they know; those that would change what comes out are read, or refused by name
/// where chats and Responses are read.
#[derive(Debug, Default, Deserialize)]
pub(in crate::gateway) struct Options {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub n: Option<u32>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    pub stop: Option<OneOrMany<String>>,
    pub seed: Option<i64>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub logit_bias: Option<BTreeMap<String, f32>>,
    // What other servers read besides OpenAI's own.
    pub top_k: Option<i64>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub stop_token_ids: Option<Vec<u32>>,
    pub ignore_eos: Option<bool>,
    pub priority: Option<i64>,
    pub response_format: Option<ResponseFormat>,
    pub guided_json: Option<Value>,
    pub guided_regex: Option<String>,
    pub guided_choice: Option<Vec<String>>,
    pub guided_grammar: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
pub(in crate::gateway) struct StreamOptions {
    pub include_usage: Option<bool>,
}

#[derive(Debug, Deserialize)]
pub(in crate::gateway) struct ResponseFormat {
    #[serde(rename = "type")]
    pub kind: String,
    pub json_schema: Option<NamedSchema>,
}

#[derive(Debug, Deserialize)]
pub(in crate::gateway) struct NamedSchema {
    pub schema: Option<Value>,
}

impl Options {
    pub fn streams(&self) -> bool {
        self.stream.unwrap_or(false)
    }

    pub fn includes_usage(&self) -> bool {
        let options = self.stream_options.as_ref();
        options.and_then(|o| o.include_usage).unwrap_or(false)
    }

    /// How tokens are chosen. OpenAI's default temperature is 1.
    pub fn sampling(&self) -> Result<Sampling, Error> {
        let bias = self.logit_bias.iter().flatten().map(|(token, bias)| {
            let token = token.parse().map_err(|_| {
                let token: String = token.chars().take(40).collect();
                refused(
                    "logit_bias",
                    format!("logit_bias: {token:?} is no token id"),
                )
            })?;
            Ok(LogitBias { token, bias: *bias })
        });
        let top_k =
            match self.top_k {
                // Others' word for "all of them".
                None | Some(-1) => None,
                Some(k) => Some(u32::try_from(k).map_err(|_| {
                    refused("top_k", format!("top_k is {k}; it is a number from 0"))
                })?),
            };
        Ok(Sampling {
            temperature: Some(self.temperature.unwrap_or(1.0)),
            top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: bias.collect::<Result<_, Error>>()?,
        })
    }

    /// What the text has to be.
    pub fn grammar(&self) -> Result<Option<Grammar>, Error> {
        let format = match &self.response_format {
            None => None,
            Some(format) => match (format.kind.as_str(), &format.json_schema) {
                ("text", _) => None,
                ("json_object", _) => Some(Kind::JsonObject(true)),
                (
                    "json_schema",
                    Some(NamedSchema {
                        schema: Some(schema),
                    }),
                ) => Some(Kind::JsonSchema(schema.to_string())),
                ("json_schema", _) => {
                    return Err(refused(
                        "response_format",
                        "response_format of type json_schema has no json_schema.schema",
                    ));
                }
                (other, _) => {
                    let other: String = other.chars().take(40).collect();
                    return Err(refused(
                        "response_format",
                        format!(
                            "response_format of type {other:?}; there are text, json_object and json_schema"
                        ),
                    ));
                }
            },
        };
        if self.guided_choice.as_ref().is_some_and(Vec::is_empty) {
            let why = "guided_choice is an empty list; give at least one text";
            return Err(refused("guided_choice", why));
        }
        let guided = [
            self.guided_json.as_ref().map(|schema| {
                Kind::JsonSchema(match schema {
                    Value::String(text) => text.clone(),
                    other => other.to_string(),
                })
            }),
            self.guided_regex.clone().map(Kind::Regex),
            self.guided_choice.as_deref().map(one_of),
            self.guided_grammar.clone().map(Kind::Lark),
        ];
        let mut all = format.into_iter().chain(guided.into_iter().flatten());
        let first = all.next();
        if all.next().is_some() {
            return Err(refused(
                "response_format",
                "the text cannot follow two grammars; give one of response_format, guided_json, guided_regex, guided_choice and guided_grammar",
            ));
        }
        Ok(first.map(|kind| Grammar { kind: Some(kind) }))
    }

    /// A seed as a bit pattern: OpenAI's may be negative.
    pub fn seed(&self) -> Option<u64> {
        self.seed.map(i64::cast_unsigned)
    }

    pub fn priority(&self) -> Result<u32, Error> {
        let given = self.priority.unwrap_or(0);
        u32::try_from(given).map_err(|_| {
            refused(
                "priority",
                format!("priority is {given}; it is a number from 0"),
            )
        })
    }
}

/// One of these texts.
pub(in crate::gateway) fn one_of(choices: &[String]) -> Kind {
    let escaped = choices.iter().map(|choice| {
        let mut text = String::with_capacity(choice.len() + 8);
        for c in choice.chars() {
            if !c.is_alphanumeric() && !c.is_whitespace() {
                text.push('\\');
            }
            text.push(c);
        }
        text
    });
    Kind::Regex(escaped.collect::<Vec<_>>().join("|"))
}

/// A message's content: a text, or parts of which those that are text can be read.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Content {
    Text(String),
    Parts(Vec<ContentPart>),
}

#[derive(Debug, Deserialize)]
pub(super) struct ContentPart {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
    refusal: Option<String>,
}

/// The text of a message's content.
///
/// # Errors
/// For what is no text, such as an image.
pub(super) fn text_of(content: Option<Content>) -> Result<String, Error> {
    let parts = match content {
        None => return Ok(String::new()),
        Some(Content::Text(text)) => return Ok(text),
        Some(Content::Parts(parts)) => parts,
    };
    let mut all = String::new();
    for part in parts {
        match (part.kind.as_str(), part.text, part.refusal) {
            ("text" | "input_text" | "output_text", Some(text), _) => all.push_str(&text),
            ("refusal", _, Some(text)) => all.push_str(&text),
            (kind, ..) => {
                let kind: String = kind.chars().take(40).collect();
                let why = format!(
                    "a message has content of type {kind:?}; the models here read text only"
                );
                return Err(refused("messages", why));
            }
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn options(value: Value) -> Options {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn what_is_null_is_missing() {
        let o = options(
            json!({"stop": null, "seed": null, "logit_bias": null, "n": null, "user": "me"}),
        );
        assert!(o.stop.is_none() && o.seed().is_none());
        assert_eq!(o.sampling().unwrap().temperature, Some(1.0));
        assert_eq!(o.grammar().unwrap(), None);
    }

    #[test]
    fn a_text_follows_one_grammar() {
        let schema = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}});
        let grammar = options(json!({ "response_format": schema }))
            .grammar()
            .unwrap();
        let text = r#"{"type":"object"}"#.to_owned();
        assert_eq!(grammar.unwrap().kind, Some(Kind::JsonSchema(text)));
        for bad in [
            json!({"response_format": {"type": "json_schema"}}),
            json!({"response_format": {"type": "xml"}}),
            json!({"response_format": {"type": "json_object"}, "guided_regex": "a"}),
        ] {
            assert!(options(bad).grammar().is_err());
        }
    }

    #[test]
    fn choices_are_taken_literally() {
        let grammar = options(json!({"guided_choice": ["a.b", "c|d"]}))
            .grammar()
            .unwrap();
        assert_eq!(
            grammar.unwrap().kind,
            Some(Kind::Regex(r"a\.b|c\|d".into()))
        );
    }

    #[test]
    fn values_that_make_no_sense_are_named() {
        let error = options(json!({"logit_bias": {"x": 1}}))
            .sampling()
            .unwrap_err();
        assert_eq!(error.get("field"), Some("logit_bias"));
        assert_eq!(
            options(json!({"top_k": -1})).sampling().unwrap().top_k,
            None
        );
        assert!(options(json!({"top_k": -2})).sampling().is_err());
        assert_eq!(options(json!({"seed": -1})).seed(), Some(u64::MAX));
        assert!(options(json!({"priority": -1})).priority().is_err());
    }

    #[test]
    fn content_is_text() {
        let of = |value| text_of(serde_json::from_value(value).unwrap());
        assert_eq!(of(json!("a")).unwrap(), "a");
        assert_eq!(
            of(json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])).unwrap(),
            "ab"
        );
        assert!(of(json!([{"type": "image_url", "image_url": {"url": "x"}}])).is_err());
    }
}

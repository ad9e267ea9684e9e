//! What requests say about how text is made: vLLM's names, as a JSON text or as the request's own parameters.

use std::collections::HashMap;

use hotcell_gateways::inference::{InferParameter, infer_parameter::ParameterChoice};
use hotcell_proto::{error::Error, v1::GenerateRequest};
use serde_json::{Map, Value};

use super::tensor::{invalid, short};
use crate::gateway::openai::Options;

/// vLLM's default, which clients of this protocol are made for.
const MAX_TOKENS: u32 = 16;

/// What changes the text, and is read.
const READ: &[&str] = &[
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logit_bias",
    "max_tokens",
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
];

/// Those of them that are texts; numbers come as texts, too.
const TEXTS: &[&str] = &["stop", "guided_json", "guided_regex", "guided_grammar"];

/// What changes nothing here, or only if it has another value than this one.
const NEUTRAL: &[(&str, &[&str])] = &[
    ("n", &["1"]),
    ("best_of", &["1"]),
    ("min_tokens", &["0"]),
    ("use_beam_search", &["false"]),
    ("skip_special_tokens", &["true"]),
    ("spaces_between_special_tokens", &["true"]),
    ("include_stop_str_in_output", &["false"]),
    ("detokenize", &["true"]),
    ("logprobs", &["0"]),
];

/// Whether this says how text is made.
pub(super) fn is_known(name: &str) -> bool {
    READ.contains(&name) || NEUTRAL.iter().any(|(known, _)| *known == name)
}

/// A value as it is meant: numbers and truths may be written as texts.
fn meant(name: &str, value: Value) -> Value {
    match value {
        Value::String(text) if !TEXTS.contains(&name) => {
            // Python's words for truths are not JSON's. What is JSON stays as it is: lists and schemas hold names.
            let read = serde_json::from_str(&text);
            let read = read.or_else(|_| serde_json::from_str(&text.to_ascii_lowercase()));
            read.unwrap_or(Value::String(text))
        }
        other => other,
    }
}

/// Reads the JSON text of `sampling_parameters`. What is not known is refused, as it may matter.
///
/// # Errors
/// [`Reason::InvalidArgument`](hotcell_proto::error::Reason), naming what is wrong.
pub(super) fn of_text(text: &str) -> Result<Map<String, Value>, Error> {
    let map: Map<String, Value> = serde_json::from_str(text)
        .map_err(|e| invalid(format!("sampling_parameters is no JSON object: {e}")))?;
    let mut read = Map::new();
    for (name, value) in map {
        if value.is_null() {
            continue;
        }
        let value = meant(&name, value);
        if READ.contains(&name.as_str()) {
            read.insert(name, value);
            continue;
        }
        let row = NEUTRAL.iter().find(|(known, _)| *known == name);
        let Some((_, neutral)) = row else {
            let what = format!("sampling_parameters: {:?} is not known here", short(&name));
            return Err(invalid(what));
        };
        if !neutral.contains(&value.to_string().as_str()) {
            let value = short(&value.to_string());
            let what = format!("sampling_parameters: {name} cannot be {value} here");
            return Err(invalid(what));
        }
    }
    Ok(read)
}

/// Those of a request's parameters that say how text is made. Others are their sender's own.
pub(super) fn of_parameters(parameters: &HashMap<String, InferParameter>) -> Map<String, Value> {
    let known = parameters
        .iter()
        .filter(|(name, _)| READ.contains(&name.as_str()));
    let known = known.filter_map(|(name, parameter)| {
        let value = match parameter.parameter_choice.clone()? {
            ParameterChoice::BoolParam(value) => Value::from(value),
            ParameterChoice::Int64Param(value) => Value::from(value),
            ParameterChoice::Uint64Param(value) => Value::from(value),
            ParameterChoice::DoubleParam(value) => Value::from(value),
            ParameterChoice::StringParam(value) => meant(name, Value::from(value)),
        };
        Some((name.clone(), value))
    });
    known.collect()
}

/// The request for a text that is made so.
///
/// # Errors
/// [`Reason::InvalidArgument`](hotcell_proto::error::Reason), naming what is wrong.
pub(super) fn request(mut parameters: Map<String, Value>) -> Result<GenerateRequest, Error> {
    let max_tokens = match parameters.remove("max_tokens") {
        None => MAX_TOKENS,
        Some(value) => {
            let count = value.as_u64().and_then(|count| u32::try_from(count).ok());
            let count = count.filter(|count| *count > 0);
            count.ok_or_else(|| invalid("max_tokens is a number from 1"))?
        }
    };
    let options: Options = serde_json::from_value(Value::Object(parameters)).map_err(|e| {
        invalid(format!(
            "the parameters cannot be read: {}",
            short(&e.to_string())
        ))
    })?;
    Ok(GenerateRequest {
        sampling: Some(options.sampling()?),
        max_tokens,
        seed: options.seed(),
        ignore_eos: options.ignore_eos.unwrap_or(false),
        grammar: options.grammar()?,
        stop: options.stop.map(|stop| stop.into_vec()).unwrap_or_default(),
        stop_tokens: options.stop_token_ids.unwrap_or_default(),
        ..GenerateRequest::default()
    })
}

#[cfg(test)]
mod tests {
    use hotcell_proto::v1::grammar::Kind;

    use super::*;

    fn read(text: &str) -> Result<GenerateRequest, Error> {
        request(of_text(text)?)
    }

    #[test]
    fn numbers_may_be_texts_and_texts_stay_texts() {
        let asked = read(
            r#"{"temperature": "0.5", "max_tokens": "7", "ignore_eos": "True", "stop": "1", "seed": 3}"#,
        );
        let asked = asked.unwrap();
        assert_eq!(asked.sampling.unwrap().temperature, Some(0.5));
        assert_eq!(
            (asked.max_tokens, asked.ignore_eos, asked.seed),
            (7, true, Some(3))
        );
        assert_eq!(asked.stop, ["1"]);
    }

    #[test]
    fn names_in_lists_and_schemas_keep_their_case() {
        let asked = read(r#"{"guided_choice": "[\"Adam\", \"Eve\"]"}"#).unwrap();
        let kind = asked.grammar.and_then(|grammar| grammar.kind);
        assert_eq!(kind, Some(Kind::Regex("Adam|Eve".to_owned())));
    }

    #[test]
    fn what_would_change_the_text_and_is_not_served_is_refused_by_name() {
        assert_eq!(read("{}").unwrap().max_tokens, MAX_TOKENS);
        assert!(read(r#"{"n": 1, "min_tokens": "0", "top_k": -1, "seed": null}"#).is_ok());
        for (bad, named) in [
            (r#"{"n": 2}"#, "n cannot be 2"),
            (r#"{"lora_name": "x"}"#, "lora_name"),
            (r#"{"max_tokens": 0}"#, "max_tokens"),
            (r#"{"max_tokens": -1}"#, "max_tokens"),
            (r#"{"temperature": "hot"}"#, "cannot be read"),
            ("[]", "no JSON object"),
            ("", "no JSON object"),
        ] {
            let error = read(bad).unwrap_err();
            assert!(error.message().contains(named), "{bad}: {error}");
        }
    }

    #[test]
    fn of_a_requests_own_parameters_those_are_read_that_are_known() {
        let of = |choice| InferParameter {
            parameter_choice: Some(choice),
        };
        let parameters = HashMap::from([
            ("temperature".to_owned(), of(ParameterChoice::Int64Param(0))),
            (
                "max_tokens".to_owned(),
                of(ParameterChoice::StringParam("5".into())),
            ),
            ("my_own".to_owned(), of(ParameterChoice::BoolParam(true))),
            ("seed".to_owned(), InferParameter::default()),
        ]);
        let asked = request(of_parameters(&parameters)).unwrap();
        assert_eq!(asked.sampling.unwrap().temperature, Some(0.0));
        assert_eq!((asked.max_tokens, asked.seed), (5, None));
    }
}

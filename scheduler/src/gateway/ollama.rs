//! Ollama's HTTP API, so that tools made for it can be pointed here.
//!
//! Options that change what comes out are read; those that say how a model is run (`num_ctx`, `num_gpu`) are not the client's
//! to choose here and are left out. `keep_alive` is heeded of who may load models.

mod chat;
mod embed;
mod models;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::{
    Router,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    v1::{Finished, Grammar, Sampling, grammar::Kind},
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    ask::is_cut,
    failure::{Failed, Flavor},
};
use crate::{
    access::{Caller, Role},
    service::Shared,
};

/// Its paths.
pub(super) fn routes() -> Router<Shared> {
    Router::new()
        .route("/", get(async || "Hotcell is running\n"))
        .route("/api/version", get(models::version))
        .route("/api/tags", get(models::tags))
        .route("/api/ps", get(models::ps))
        .route("/api/show", post(models::show))
        .route("/api/chat", post(chat::chat))
        .route("/api/generate", post(chat::generate))
        .route("/api/embed", post(embed::embed))
        .route("/api/embeddings", post(embed::embed_one))
}

fn answered(result: Result<Response, Error>) -> Response {
    result.unwrap_or_else(|error| Failed(Flavor::Ollama, error).into_response())
}

fn failed(error: &Error) -> Value {
    Flavor::Ollama.body(error)
}

/// A model's name as Ollama's clients say it, whose tag is `latest` unless they say another one.
fn untagged(name: &str) -> &str {
    name.strip_suffix(":latest").unwrap_or(name)
}

/// How tokens are chosen.
#[derive(Debug, Default, Deserialize)]
struct Options {
    temperature: Option<f32>,
    top_k: Option<i64>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    seed: Option<i64>,
    num_predict: Option<i64>,
    stop: Option<Stop>,
    repeat_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
}

/// How long a model stays in memory after a request: a number of seconds, or a time such as `5m` or `1h30m`; for ever if it is
/// negative.
#[derive(Clone, Copy, Debug, PartialEq)]
struct KeepAlive(Option<Duration>);

impl<'de> Deserialize<'de> for KeepAlive {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Said {
            Seconds(f64),
            Time(String),
        }
        let seconds = match Said::deserialize(from)? {
            Said::Seconds(seconds) => Some(seconds),
            Said::Time(text) => seconds(&text),
        };
        let wrong = || serde::de::Error::custom("keep_alive is no time such as 300, \"5m\" or -1");
        let seconds = seconds.filter(|s| s.is_finite()).ok_or_else(wrong)?;
        let keep = Duration::try_from_secs_f64(seconds.abs()).map_err(|_| wrong())?;
        Ok(Self((seconds >= 0.0).then_some(keep)))
    }
}

/// Keeps a model in memory for as long as a request says, if its caller may load models: whether it does.
fn keep(
    shared: &Shared,
    model: &str,
    keep_alive: Option<KeepAlive>,
    caller: &Caller,
) -> Result<bool, Error> {
    match keep_alive {
        Some(KeepAlive(keep)) if caller.roles.has(Role::Load) => {
            shared.fleet.keep_for(&ModelName::new(model)?, keep);
            Ok(true)
        }
        _ => Ok(false),
    }
}

/// The seconds of a time as Go writes it, such as `1h30m` or `-1m`, or of a number.
fn seconds(text: &str) -> Option<f64> {
    if let Ok(number) = text.parse::<f64>() {
        return Some(number);
    }
    let (sign, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (-1.0, rest),
        None => (1.0, text),
    };
    let mut sum = 0.0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, more) = rest.split_at(digits);
        let end = more.find(|c: char| c.is_ascii_digit() || c == '.');
        let (unit, next) = more.split_at(end.unwrap_or(more.len()));
        let unit = match unit {
            "ns" => 1e-9,
            "us" | "µs" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            _ => return None,
        };
        sum += number.parse::<f64>().ok()? * unit;
        rest = next;
    }
    Some(sign * sum)
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Stop {
    One(String),
    Many(Vec<String>),
}

impl Options {
    /// With Ollama's defaults, but for its penalty on repetition, which counts a window that there is none of here.
    fn sampling(&self) -> Sampling {
        Sampling {
            temperature: Some(self.temperature.unwrap_or(0.8)),
            // 0 and less: all of them.
            top_k: Some(u32::try_from(self.top_k.unwrap_or(40)).unwrap_or(0)),
            top_p: Some(self.top_p.unwrap_or(0.9)),
            min_p: self.min_p,
            repetition_penalty: self.repeat_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: Vec::new(),
        }
    }

    /// Tokens at most; 0 for as many as fit, which Ollama says as -1 or -2.
    fn max_tokens(&self) -> u32 {
        let given = self.num_predict.unwrap_or(-1);
        u32::try_from(given).unwrap_or(0)
    }

    fn stop(&self) -> Vec<String> {
        match &self.stop {
            None => Vec::new(),
            Some(Stop::One(one)) => vec![one.clone()],
            Some(Stop::Many(many)) => many.clone(),
        }
    }

    /// Ollama draws a seed for 0 and for a missing one.
    fn seed(&self) -> Option<u64> {
        self.seed.filter(|&seed| seed != 0).map(i64::cast_unsigned)
    }
}

/// What the text has to be: `"json"`, or a schema.
fn grammar(format: Option<&Value>) -> Result<Option<Grammar>, Error> {
    let kind = match format {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(word)) if word.is_empty() => return Ok(None),
        Some(Value::String(word)) if word == "json" => Kind::JsonObject(true),
        Some(schema @ Value::Object(_)) => Kind::JsonSchema(schema.to_string()),
        Some(_) => {
            let why = "format is \"json\" or a JSON schema";
            return Err(Error::new(Reason::InvalidArgument, why).with("field", "format"));
        }
    };
    Ok(Some(Grammar { kind: Some(kind) }))
}

/// What an answer took, as its last line says it. Times are in nanoseconds.
fn ended(finished: &Finished, took: Duration) -> Value {
    let usage = finished.usage.unwrap_or_default();
    let timings = finished.timings.unwrap_or_default();
    // Negative and NaN become 0.
    let nanos = |ms: f64| (ms * 1e6) as u64;
    json!({
        "done": true,
        "done_reason": if is_cut(finished) { "length" } else { "stop" },
        "total_duration": u64::try_from(took.as_nanos()).unwrap_or(u64::MAX),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": nanos(timings.prefill_ms),
        "eval_count": usage.generated_tokens,
        "eval_duration": nanos(timings.decode_ms),
    })
}

/// Adds an object's members to another one's.
fn merge(into: &mut Value, more: Value) {
    if let (Value::Object(into), Value::Object(more)) = (into, more) {
        into.extend(more);
    }
}

/// The time in RFC 3339, as of now.
fn now() -> String {
    at(Duration::ZERO)
}

/// The time in RFC 3339, so much later than now.
fn at(later: Duration) -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let at = since.unwrap_or_default().saturating_add(later);
    hotcell_proto::token::write_time(at.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_gos_and_negative_ones_have_no_end() {
        let of = |value| serde_json::from_value::<KeepAlive>(value).ok().map(|k| k.0);
        let seconds = |s| Some(Some(Duration::from_secs(s)));
        assert_eq!(of(json!(300)), seconds(300));
        assert_eq!(of(json!("5m")), seconds(300));
        assert_eq!(of(json!("1h30m")), seconds(5400));
        assert_eq!(of(json!("0")), seconds(0));
        assert_eq!(of(json!("1.5s")), Some(Some(Duration::from_millis(1500))));
        assert_eq!(of(json!(-1)), Some(None));
        assert_eq!(of(json!("-1m")), Some(None));
        for wrong in [
            json!("5 minutes"),
            json!("m"),
            json!("5"),
            json!(true),
            json!("nan"),
            json!(1e300),
        ] {
            let expected = (wrong == json!("5")).then_some(Some(Duration::from_secs(5)));
            assert_eq!(of(wrong.clone()), expected, "{wrong}");
        }
    }

    #[test]
    fn options_have_ollamas_defaults_and_words() {
        let of = |value| serde_json::from_value::<Options>(value).unwrap();
        let plain = of(json!({"num_ctx": 4096})).sampling();
        assert_eq!(
            (plain.temperature, plain.top_k, plain.top_p),
            (Some(0.8), Some(40), Some(0.9))
        );
        let own = of(json!({"top_k": -1, "num_predict": -2, "seed": 0, "stop": "x"}));
        assert_eq!(
            (own.sampling().top_k, own.max_tokens(), own.seed()),
            (Some(0), 0, None)
        );
        assert_eq!(own.stop(), ["x"]);
        assert_eq!(untagged("kjv:latest"), "kjv");
        assert_eq!(untagged("kjv:q4"), "kjv:q4");
    }

    #[test]
    fn a_format_is_json_or_a_schema() {
        assert_eq!(grammar(Some(&json!(""))).unwrap(), None);
        assert!(grammar(Some(&json!("json"))).unwrap().is_some());
        assert!(grammar(Some(&json!({"type": "object"}))).unwrap().is_some());
        assert!(grammar(Some(&json!("xml"))).is_err());
    }
}

//! OpenAI's HTTP API: models, chats, completions, embeddings, and the stateless part of responses.

mod chat;
mod completions;
mod embeddings;
mod logprobs;
mod models;
mod options;
mod responses;
pub(super) mod tools;

use axum::{
    Json, Router,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use hotcell_proto::{
    error::Error,
    v1::{Accepted, Finished, Usage},
};
use serde::Serialize;
use serde_json::{Value, json};

pub(super) use self::options::one_of;
use super::{
    ask::{is_cut, now},
    failure::{Failed, Flavor},
    sse::{Gone, Out},
};
use crate::service::Shared;

pub(super) use options::Options;

/// Its paths.
pub(super) fn routes() -> Router<Shared> {
    Router::new()
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*model}", get(models::get))
        .route("/v1/chat/completions", post(chat::chat))
        .route("/v1/completions", post(completions::complete))
        .route("/v1/embeddings", post(embeddings::embed))
        .route("/v1/responses", post(responses::create))
}

/// An answer, or an error in OpenAI's form.
fn answered(result: Result<Response, Error>) -> Response {
    result.unwrap_or_else(|error| Failed(Flavor::Openai, error).into_response())
}

/// What every answer to a request begins with.
#[derive(Serialize)]
struct Head {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    system_fingerprint: String,
    /// The beginning of a piece of a stream, up to its one choice. There is a piece for every token, which all begin alike.
    #[serde(skip)]
    before: String,
}

impl Head {
    /// Of what was accepted; ids begin with the `kind` of answer.
    fn of((kind, object): (&str, &'static str), accepted: &Accepted) -> Self {
        // Same fingerprint, request and seed: same tokens. That is what OpenAI's word for it promises, too.
        let numerics = accepted.numerics.as_ref();
        let mut head = Self {
            id: format!("{kind}-{}", accepted.request_id),
            object,
            created: now(),
            model: accepted.model.clone(),
            system_fingerprint: numerics.map(|n| n.id.clone()).unwrap_or_default(),
            before: String::new(),
        };
        // Strings and a number always serialise.
        let fields = serde_json::to_string(&head).unwrap_or_default();
        let fields = fields.strip_suffix('}').unwrap_or_default();
        head.before = format!("data: {fields},\"choices\":[");
        head
    }

    fn json(&self, choices: Value) -> Value {
        let mut value = json!(self);
        value["choices"] = choices;
        value
    }

    /// Sends a piece of a stream with one choice; a last piece tells the usage, if it is to be told.
    async fn piece(
        &self,
        out: &Out,
        choice: &impl Serialize,
        tells_usage: bool,
    ) -> Result<(), Gone> {
        let after = match tells_usage {
            true => "],\"usage\":null}\n\n",
            false => "]}\n\n",
        };
        out.framed(&self.before, choice, after).await
    }
}

/// An error within a stream.
fn failed(error: &Error) -> Value {
    Flavor::Openai.body(error)
}

fn json_response(value: impl Serialize) -> Response {
    Json(value).into_response()
}

/// OpenAI's word for an end.
fn finish_reason(finished: &Finished, calls: bool) -> &'static str {
    match (is_cut(finished), calls) {
        (true, _) => "length",
        (false, true) => "tool_calls",
        (false, false) => "stop",
    }
}

/// What several continuations of one prompt took together.
fn usage(all: impl Iterator<Item = Usage>) -> Value {
    let (mut prompt, mut cached, mut generated) = (0, 0, 0u64);
    for usage in all {
        // The prompt is read once, however many continuations it has.
        prompt = usage.prompt_tokens;
        cached = cached.max(usage.cached_tokens);
        generated += u64::from(usage.generated_tokens);
    }
    usage_of(u64::from(prompt), u64::from(cached), generated)
}

fn usage_of(prompt: u64, cached: u64, generated: u64) -> Value {
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    })
}

//! Embeddings, several at once and one by one.

use std::time::Instant;

use axum::{
    Json,
    body::Body,
    extract::State,
    http::Extensions,
    response::{IntoResponse, Response},
};
use hotcell_proto::{
    error::Error,
    v1::{EmbedRequest, EmbedResponse, Prompt, prompt::Kind},
};
use serde::Deserialize;
use serde_json::json;

use super::{KeepAlive, answered, keep, models::find, untagged};
use crate::{
    access::Caller,
    gateway::{
        ask::{self, of_length},
        body,
    },
    service::Shared,
};

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Input {
    One(String),
    Many(Vec<String>),
}

/// What both ways to ask have in common. `truncate` is not read: a text that is too long is refused, and not cut, since only
/// a worker knows where its tokens end.
#[derive(Debug, Deserialize)]
struct Common {
    model: String,
    keep_alive: Option<KeepAlive>,
    dimensions: Option<usize>,
}

#[derive(Debug, Deserialize)]
struct Several {
    input: Input,
    #[serde(flatten)]
    common: Common,
}

#[derive(Debug, Deserialize)]
struct Single {
    prompt: String,
    #[serde(flatten)]
    common: Common,
}

async fn vectors(
    shared: &Shared,
    caller: &Caller,
    common: &Common,
    texts: Vec<String>,
) -> Result<EmbedResponse, Error> {
    let model = untagged(&common.model);
    shared.may_name(model, caller)?;
    if common.keep_alive.is_some() {
        // By the name that it was loaded under, if it has others.
        let known = find(shared, &common.model)?;
        keep(shared, &known.name, common.keep_alive, caller)?;
    }
    let prompts = texts.into_iter().map(|text| Prompt {
        kind: Some(Kind::Text(text)),
    });
    let request = EmbedRequest {
        model: model.to_owned(),
        prompts: prompts.collect(),
        ..EmbedRequest::default()
    };
    let answer = ask::embed(shared, request, caller).await?;
    of_length(&answer, common.dimensions)?;
    Ok(answer)
}

/// `POST /api/embed`.
pub(super) async fn embed(
    State(shared): State<Shared>,
    extensions: Extensions,
    body: Body,
) -> Response {
    let run = async {
        let began = Instant::now();
        let asked: Several = body::json(body).await?;
        let texts = match asked.input {
            Input::One(text) => vec![text],
            Input::Many(texts) => texts,
        };
        let answer = vectors(&shared, &Caller::of(&extensions), &asked.common, texts).await?;
        let all = &answer.embeddings;
        let tokens: u64 = all.iter().map(|e| u64::from(e.prompt_tokens)).sum();
        let value = json!({
            "model": asked.common.model,
            "embeddings": all.iter().map(|e| &e.values).collect::<Vec<_>>(),
            "total_duration": u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX),
            "load_duration": 0,
            "prompt_eval_count": tokens,
        });
        Ok(Json(value).into_response())
    };
    answered(run.await)
}

/// `POST /api/embeddings`, which came before.
pub(super) async fn embed_one(
    State(shared): State<Shared>,
    extensions: Extensions,
    body: Body,
) -> Response {
    let run = async {
        let asked: Single = body::json(body).await?;
        let texts = vec![asked.prompt];
        let answer = vectors(&shared, &Caller::of(&extensions), &asked.common, texts).await?;
        let values = answer.embeddings.first().map(|e| &e.values);
        Ok(Json(json!({ "embedding": values })).into_response())
    };
    answered(run.await)
}

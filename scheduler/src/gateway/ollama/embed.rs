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
    error::{Error, Reason},
    v1::{EmbedRequest, EmbedResponse, Prompt, prompt::Kind},
};
use serde::Deserialize;
use serde_json::json;

use super::{KeepAlive, answered, chat::keep_for, models::find, untagged};
use crate::{access::Caller, gateway::body, service::Shared};

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Input {
    One(String),
    Many(Vec<String>),
}

#[derive(Debug, Deserialize)]
struct Several {
    model: String,
    input: Input,
    keep_alive: Option<KeepAlive>,
    dimensions: Option<usize>,
    /// A text that is too long is refused, never cut: who asks for that is answered as long as nothing had to be cut.
    #[serde(rename = "truncate")]
    _truncate: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct Single {
    model: String,
    prompt: String,
    keep_alive: Option<KeepAlive>,
}

async fn vectors(
    shared: &Shared,
    caller: &Caller,
    (model, keep): (&str, Option<KeepAlive>),
    texts: Vec<String>,
) -> Result<EmbedResponse, Error> {
    let model = untagged(model);
    shared.may_name(model, caller)?;
    if keep.is_some() {
        keep_for(shared, &find(shared, model)?, keep, caller)?;
    }
    let prompts = texts.into_iter().map(|text| Prompt {
        kind: Some(Kind::Text(text)),
    });
    let request = EmbedRequest {
        model: model.to_owned(),
        prompts: prompts.collect(),
        ..EmbedRequest::default()
    };
    shared.embed(request, None, caller).await
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
        let of = (asked.model.as_str(), asked.keep_alive);
        let answer = vectors(&shared, &Caller::of(&extensions), of, texts).await?;
        let all = &answer.embeddings;
        let length = all.first().map_or(0, |one| one.values.len());
        if let Some(wanted) = asked.dimensions.filter(|&d| d != 0 && d != length) {
            let why = format!(
                "dimensions is {wanted}; the model gives vectors of {length} and no others"
            );
            return Err(Error::new(Reason::InvalidArgument, why).with("field", "dimensions"));
        }
        let tokens: u64 = all.iter().map(|e| u64::from(e.prompt_tokens)).sum();
        let value = json!({
            "model": asked.model,
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
        let of = (asked.model.as_str(), asked.keep_alive);
        let answer = vectors(&shared, &Caller::of(&extensions), of, texts).await?;
        let values = answer.embeddings.first().map(|e| &e.values);
        Ok(Json(json!({ "embedding": values })).into_response())
    };
    answered(run.await)
}

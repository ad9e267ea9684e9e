//! Embeddings.

use axum::{body::Body, extract::State, http::Extensions, response::Response};
use base64::{Engine, prelude::BASE64_STANDARD};
use hotcell_proto::{
    error::Error,
    v1::{EmbedRequest, Prompt, TokenIds, prompt::Kind},
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{answered, json_response, options::refused};
use crate::{
    access::Caller,
    gateway::{
        ask::{self, of_length},
        body,
    },
    service::Shared,
};

/// What is to be embedded, or completed: texts or token ids, one or several.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Input {
    Text(String),
    Texts(Vec<String>),
    Ids(Vec<u32>),
    ManyIds(Vec<Vec<u32>>),
}

impl Input {
    /// As prompts.
    pub fn prompts(self) -> Vec<Prompt> {
        let text = |text| Kind::Text(text);
        let ids = |ids| Kind::Ids(TokenIds { ids });
        let kinds: Vec<Kind> = match self {
            Self::Text(one) => vec![text(one)],
            Self::Texts(all) => all.into_iter().map(text).collect(),
            Self::Ids(one) => vec![ids(one)],
            Self::ManyIds(all) => all.into_iter().map(ids).collect(),
        };
        let prompts = kinds.into_iter().map(|kind| Prompt { kind: Some(kind) });
        prompts.collect()
    }
}

#[derive(Debug, Deserialize)]
struct Request {
    #[serde(default)]
    model: String,
    input: Input,
    encoding_format: Option<String>,
    dimensions: Option<usize>,
}

/// `POST /v1/embeddings`.
pub(super) async fn embed(
    State(shared): State<Shared>,
    extensions: Extensions,
    body: Body,
) -> Response {
    answered(run(&shared, &Caller::of(&extensions), body).await)
}

async fn run(shared: &Shared, caller: &Caller, body: Body) -> Result<Response, Error> {
    let request: Request = body::json(body).await?;
    let as_base64 = match request.encoding_format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            let other: String = other.chars().take(40).collect();
            let why = format!("encoding_format is {other:?}; there are float and base64");
            return Err(refused("encoding_format", why));
        }
    };
    let wanted = EmbedRequest {
        model: request.model,
        prompts: request.input.prompts(),
        ..EmbedRequest::default()
    };
    shared.may_name(&wanted.model, caller)?;
    let answer = ask::embed(shared, wanted, caller).await?;
    of_length(&answer, request.dimensions)?;
    let model = &answer.model;
    let mut data = Vec::with_capacity(answer.embeddings.len());
    for (index, embedding) in answer.embeddings.iter().enumerate() {
        let value = match as_base64 {
            false => json!(embedding.values),
            true => {
                let bytes = embedding.values.iter().flat_map(|v| v.to_le_bytes());
                Value::String(BASE64_STANDARD.encode(bytes.collect::<Vec<_>>()))
            }
        };
        data.push(json!({"object": "embedding", "index": index, "embedding": value}));
    }
    let tokens: u64 = answer
        .embeddings
        .iter()
        .map(|e| u64::from(e.prompt_tokens))
        .sum();
    Ok(json_response(json!({
        "object": "list",
        "data": data,
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    })))
}

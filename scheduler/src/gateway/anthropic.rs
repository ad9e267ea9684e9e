//! Anthropic's HTTP API: messages, whole and streamed, and how many tokens they have.

mod read;
mod tell;

use axum::{
    Json, Router,
    body::Body,
    extract::State,
    http::Extensions,
    response::{IntoResponse, Response},
    routing::post,
};
use hotcell_proto::{error::Error, v1::TokenizeRequest};
use serde_json::json;

use super::{
    ask::{self, Branches},
    body,
    failure::{Failed, Flavor},
};
use crate::{access::Caller, service::Shared};

/// Its paths.
pub(super) fn routes() -> Router<Shared> {
    Router::new()
        .route("/v1/messages", post(messages))
        .route("/v1/messages/count_tokens", post(count))
}

fn answered(result: Result<Response, Error>) -> Response {
    result.unwrap_or_else(|error| Failed(Flavor::Anthropic, error).into_response())
}

/// `POST /v1/messages`.
async fn messages(State(shared): State<Shared>, extensions: Extensions, body: Body) -> Response {
    let run = async {
        let asked = read::asked(body::json(body).await?)?;
        let caller = Caller::of(&extensions);
        let branches = Branches::begin(&shared, asked.request, 1, None, &caller)?;
        let branches = branches.one_call(asked.one_call);
        if !asked.stream {
            let answers = ask::complete(branches, 1, true).await?;
            let answer = answers.into_iter().next().unwrap_or_default();
            return Ok(Json(tell::whole(&answer)).into_response());
        }
        ask::stream(branches, tell::Telling::default()).await
    };
    answered(run.await)
}

/// `POST /v1/messages/count_tokens`.
async fn count(State(shared): State<Shared>, extensions: Extensions, body: Body) -> Response {
    let run = async {
        let chat = read::counted(body::json(body).await?)?;
        let request = TokenizeRequest {
            model: chat.0,
            prompt: ask::chat(chat.1),
            without_special: false,
        };
        let answer = shared
            .tokenize(request, None, &Caller::of(&extensions))
            .await?;
        Ok(Json(json!({"input_tokens": answer.ids.len()})).into_response())
    };
    answered(run.await)
}

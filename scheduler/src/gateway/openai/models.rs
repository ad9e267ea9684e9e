//! The models there are.

use axum::{
    extract::{Path, State, rejection::PathRejection},
    response::{IntoResponse, Response},
};
use hotcell_proto::{
    error::{Error, Reason},
    v1::ModelInfo,
};
use serde_json::{Value, json};

use super::{Failed, Flavor, json_response};
use crate::service::Shared;

/// One model. When it was made nobody knows; OpenAI's clients want a number.
fn view(name: &str, info: &ModelInfo) -> Value {
    let context = info.summary.as_ref().map(|s| s.context_length);
    json!({
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "hotcell",
        // As vLLM tells what a further name means.
        "root": info.name,
        "max_model_len": context,
    })
}

/// `GET /v1/models`: those that can be asked now.
pub(super) async fn list(State(shared): State<Shared>) -> Response {
    let offered = shared.fleet.offered();
    let data: Vec<_> = offered
        .iter()
        .map(|(name, info)| view(name, info))
        .collect();
    json_response(json!({"object": "list", "data": data}))
}

/// `GET /v1/models/NAME`.
pub(super) async fn get(
    State(shared): State<Shared>,
    name: Result<Path<String>, PathRejection>,
) -> Response {
    // One that is no text is nobody's.
    let name = name.map_or_else(|_| String::new(), |Path(name)| name);
    match shared.fleet.model(&name).ok().filter(|_| !name.is_empty()) {
        Some(info) => json_response(view(&name, &info)),
        None => {
            let name: String = name.chars().take(128).collect();
            let what = format!("there is no model named {name:?}; GET /v1/models lists them");
            Failed(Flavor::Openai, Error::new(Reason::ModelNotFound, what)).into_response()
        }
    }
}

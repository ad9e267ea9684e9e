//! The models there are, as Ollama lists them.

use std::time::Duration;

use axum::{Json, body::Body, extract::State, response::IntoResponse, response::Response};
use hotcell_proto::{
    error::{Error, Reason},
    v1::{ModelInfo, ModelState},
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{answered, at, now, untagged};
use crate::{gateway::body, service::Shared};

/// The version of Ollama whose API this is: tools look here for what they may ask for, and some refuse an old one.
const SPOKEN: &str = "0.12.6";

/// `GET /api/version`.
pub(super) async fn version() -> Response {
    Json(json!({ "version": SPOKEN })).into_response()
}

/// A count of parameters in words: `4.7M`.
fn rounded(parameters: u64) -> String {
    let all = parameters as f64;
    match parameters {
        1_000_000_000.. => format!("{:.1}B", all / 1e9),
        1_000_000.. => format!("{:.1}M", all / 1e6),
        _ => format!("{:.1}K", all / 1e3),
    }
}

fn details(info: &ModelInfo) -> Value {
    let summary = info.summary.clone().unwrap_or_default();
    let format = if info.source.ends_with(".gguf") {
        "gguf"
    } else {
        "safetensors"
    };
    json!({
        "parent_model": "",
        "format": format,
        "family": summary.architecture,
        "families": [summary.architecture],
        "parameter_size": rounded(summary.parameters),
        "quantization_level": summary.weights_dtype.to_uppercase(),
    })
}

fn row(name: &str, info: &ModelInfo) -> Value {
    let summary = info.summary.clone().unwrap_or_default();
    json!({
        "name": name,
        "model": name,
        "modified_at": now(),
        "size": info.file_bytes,
        "digest": summary.model_hash,
        "details": details(info),
    })
}

/// `GET /api/tags`: those that can be asked.
pub(super) async fn tags(State(shared): State<Shared>) -> Response {
    let offered = shared.fleet.offered();
    let rows: Vec<_> = offered.iter().map(|(name, info)| row(name, info)).collect();
    Json(json!({ "models": rows })).into_response()
}

/// When a model goes out of memory if nobody asks for it.
fn expires(info: &ModelInfo) -> String {
    let keep = info.serving.as_ref().and_then(|s| s.keep_alive_ms);
    match keep {
        Some(keep) => at(Duration::from_millis(keep.saturating_sub(info.idle_ms))),
        None => "9999-12-31T23:59:59Z".to_owned(),
    }
}

/// `GET /api/ps`: those that workers have in memory.
pub(super) async fn ps(State(shared): State<Shared>) -> Response {
    let models = shared.fleet.models().into_iter();
    let held = models.filter(|m| m.state() == ModelState::Loaded && !m.workers.is_empty());
    let rows = held.map(|info| {
        let mut row = row(&info.name, &info);
        row["expires_at"] = Value::from(expires(&info));
        row["size_vram"] = Value::from(info.file_bytes);
        row
    });
    Json(json!({"models": rows.collect::<Vec<_>>()})).into_response()
}

#[derive(Debug, Deserialize)]
struct Show {
    model: Option<String>,
    /// Its old name. Ollama's own client sends both, and one of them empty.
    name: Option<String>,
}

impl Show {
    fn named(self) -> String {
        let model = self.model.filter(|model| !model.is_empty());
        model.or(self.name).unwrap_or_default()
    }
}

/// `POST /api/show`.
pub(super) async fn show(State(shared): State<Shared>, body: Body) -> Response {
    answered(shown(&shared, body).await)
}

/// A model by its name, with or without its tag.
///
/// # Errors
/// [`Reason::ModelNotFound`].
pub(super) fn find(shared: &Shared, name: &str) -> Result<ModelInfo, Error> {
    let known = shared.fleet.model(untagged(name)).ok();
    known.filter(|_| !name.is_empty()).ok_or_else(|| {
        let name: String = name.chars().take(128).collect();
        let what = format!("model {name:?} not found; load it with `hotcell load`");
        Error::new(Reason::ModelNotFound, what)
    })
}

async fn shown(shared: &Shared, body: Body) -> Result<Response, Error> {
    let asked: Show = body::json(body).await?;
    let named = asked.named();
    if named.is_empty() {
        let what = "the request names no model; give it in `model`";
        return Err(Error::new(Reason::InvalidArgument, what));
    }
    let info = find(shared, &named)?;
    let summary = info.summary.clone().unwrap_or_default();
    let architecture = &summary.architecture;
    let mut capabilities = vec!["completion", "embedding"];
    if summary.has_chat_template {
        capabilities.push("tools");
        if summary.thinks {
            capabilities.push("thinking");
        }
    }
    let value = json!({
        "modelfile": "",
        "parameters": "",
        // It stays in the worker that reads it.
        "template": "",
        "details": details(&info),
        "model_info": {
            "general.architecture": architecture,
            "general.parameter_count": summary.parameters,
            format!("{architecture}.context_length"): summary.context_length,
            format!("{architecture}.embedding_length"): summary.embedding_length,
            format!("{architecture}.vocab_size"): summary.vocabulary,
        },
        "capabilities": capabilities,
        "modified_at": now(),
    });
    Ok(Json(value).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_to_show_has_a_new_name_or_an_old_one() {
        let named = |body: Value| serde_json::from_value::<Show>(body).unwrap().named();
        assert_eq!(named(json!({"model": "kjv"})), "kjv");
        assert_eq!(named(json!({"name": "kjv"})), "kjv");
        // As Ollama's client in Go sends it.
        let both = json!({"model": "kjv", "system": "", "template": "", "verbose": false, "options": null, "name": ""});
        assert_eq!(named(both), "kjv");
        assert_eq!(named(json!({"model": "", "name": "kjv"})), "kjv");
        assert_eq!(named(json!({})), "");
    }
}

//! The protocol as JSON over HTTP, under `/v2`, with Triton's binary tensors and its `generate`.

mod json;
mod paths;
mod told;

use axum::{
    Json, Router,
    body::Body,
    extract::{Path, State},
    http::{Extensions, HeaderMap, Method, StatusCode, header},
    response::{IntoResponse, Response},
    routing::{any, get, post},
};
use bytes::Bytes;
use hotcell_proto::error::{Error, Reason};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::{
    EXTENSIONS,
    grpc::no_devices_memory,
    infer::{By, Responses},
    model, peer, repository,
    tensor::invalid,
    work::Work,
};
use crate::{
    access::Caller,
    audit::Who,
    gateway::{
        ask::PING,
        body,
        failure::{self, Failed, Flavor},
        sse::{Framing, respond},
    },
    service::Shared,
};

/// How many bytes of a message are JSON; tensors' bytes follow.
pub(super) const JSON_LENGTH: &str = "inference-header-content-length";

/// Its paths.
pub(in crate::gateway) fn routes() -> Router<Shared> {
    Router::new()
        .route("/v2", get(server))
        .route("/v2/health/live", get(async || told(json!({"live": true}))))
        .route("/v2/health/ready", get(ready))
        .route("/v2/models/{*rest}", any(of_model))
        .route("/v2/repository/index", post(index))
        .route("/v2/repository/models/{*rest}", post(change))
        .route("/v2/systemsharedmemory/{*rest}", any(regions))
        .route("/v2/cudasharedmemory/{*rest}", any(devices_memory))
}

fn answered(result: Result<Response, Error>) -> Response {
    result.unwrap_or_else(|error| Failed(Flavor::Oip, error).into_response())
}

fn told(value: Value) -> Response {
    Json(value).into_response()
}

/// Whether something is ready: by the status, and in words for clients that read them.
fn is_ready(ready: bool) -> Response {
    let status = match ready {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    };
    (status, Json(json!({ "ready": ready }))).into_response()
}

async fn server() -> Response {
    told(json!({
        "name": "hotcell",
        "version": env!("CARGO_PKG_VERSION"),
        "extensions": EXTENSIONS,
    }))
}

async fn ready(State(shared): State<Shared>) -> Response {
    is_ready(shared.is_serving())
}

/// Who calls, for the audit log.
fn who(extensions: &Extensions) -> Who {
    Caller::of(extensions).who(extensions)
}

/// A body of JSON; none is an empty object.
async fn object(body: Body) -> Result<Value, Error> {
    let bytes = body::read(body).await?;
    if bytes.is_empty() {
        return Ok(json!({}));
    }
    json::read(&bytes)
}

async fn index(State(shared): State<Shared>, extensions: Extensions, body: Body) -> Response {
    let caller = Caller::of(&extensions);
    answered(object(body).await.map(|asked| {
        let ready = asked.get("ready").and_then(Value::as_bool).unwrap_or(false);
        let models = model::index(&shared, ready, &caller).models.into_iter().map(
            |m| json!({"name": m.name, "version": m.version, "state": m.state, "reason": m.reason}),
        );
        told(models.collect())
    }))
}

async fn change(
    State(shared): State<Shared>,
    Path(rest): Path<String>,
    extensions: Extensions,
    body: Body,
) -> Response {
    let caller = Caller::of(&extensions);
    let done = async {
        let asked = object(body).await?;
        let parameters = asked.get("parameters").and_then(Value::as_object);
        repository::check_parameters(
            parameters
                .into_iter()
                .flat_map(|p| p.keys())
                .map(String::as_str),
        )?;
        match rest.rsplit_once('/') {
            Some((name, "load")) => {
                repository::load(&shared, &caller, who(&extensions), name).await?
            }
            Some((name, "unload")) => {
                repository::unload(&shared, &caller, &who(&extensions), name).await?;
            }
            _ => return Err(invalid("a model of the repository is loaded or unloaded")),
        }
        Ok(told(json!({})))
    };
    answered(done.await)
}

/// All that is said about one model, or to it.
async fn of_model(State(shared): State<Shared>, request: axum::extract::Request) -> Response {
    let (parts, body) = request.into_parts();
    let Some(asked) = paths::model(parts.uri.path()) else {
        return answered(Err(invalid("the path is no model's")));
    };
    let caller = Caller::of(&parts.extensions);
    let named = (asked.name.as_str(), asked.version.as_str());
    let found = || model::find(&shared, named, &caller);
    let by = By {
        caller: &caller,
        deadline: None,
    };
    let answer = match (&parts.method, asked.action) {
        (&Method::GET, "") => found().map(|m| told(json::metadata(model::metadata(&m)))),
        (&Method::GET, "config") => found().map(|m| told(json::config(model::config(&m)))),
        (&Method::GET, "ready") => found().map(|m| is_ready(model::is_ready(&shared, &m))),
        (&Method::GET, "stats") => {
            model::statistics(&shared, named, &caller).map(|all| told(json::statistics(all)))
        }
        (&Method::POST, "infer") => infer(&shared, &by, named, &parts.headers, body).await,
        (&Method::POST, "generate") => generate(&shared, &by, named, body).await,
        (&Method::POST, "generate_stream") => generate_stream(&shared, &by, named, body).await,
        _ => {
            return failure::no_such_method(axum::extract::Request::from_parts(
                parts,
                Body::empty(),
            ))
            .await;
        }
    };
    answered(answer)
}

async fn infer(
    shared: &Shared,
    by: &By<'_>,
    (name, version): (&str, &str),
    headers: &HeaderMap,
    body: Body,
) -> Result<Response, Error> {
    if let Some(encoding) = headers.get(header::CONTENT_ENCODING)
        && encoding != "identity"
    {
        return Err(invalid(
            "a body that is compressed is not read; send it as it is",
        ));
    }
    let bytes = body::read(body).await?;
    let length = match headers.get(JSON_LENGTH) {
        None => bytes.len(),
        Some(length) => length
            .to_str()
            .ok()
            .and_then(|length| length.parse().ok())
            .filter(|length| *length <= bytes.len())
            .ok_or_else(|| invalid(format!("{JSON_LENGTH} is no length within the body")))?,
    };
    let (asked, binary) = json::request(&bytes, length)?;
    let asked = hotcell_gateways::inference::ModelInferRequest {
        model_name: name.to_owned(),
        model_version: version.to_owned(),
        ..asked
    };
    let response = shared.oip.infer(shared, by, asked).await?;
    let (text, tensors) = json::response(response, &binary);
    let text = text.to_string();
    if tensors.is_empty() {
        return Ok(([(header::CONTENT_TYPE, "application/json")], text).into_response());
    }
    let length = text.len();
    let mut whole = text.into_bytes();
    tensors
        .iter()
        .for_each(|tensor| whole.extend_from_slice(tensor));
    let headers = [
        (
            header::CONTENT_TYPE.as_str(),
            "application/octet-stream".to_owned(),
        ),
        (JSON_LENGTH, length.to_string()),
    ];
    Ok((headers, Bytes::from(whole)).into_response())
}

async fn generate(
    shared: &Shared,
    by: &By<'_>,
    named: (&str, &str),
    body: Body,
) -> Result<Response, Error> {
    let asked = json::generate(&body::read(body).await?, named)?;
    let response = shared.oip.infer(shared, by, asked).await?;
    Ok(told(json::generated(&response)))
}

async fn generate_stream(
    shared: &Shared,
    by: &By<'_>,
    named: (&str, &str),
    body: Body,
) -> Result<Response, Error> {
    let asked = json::generate(&body::read(body).await?, named)?;
    let ask = Work::read(&shared.oip, shared, by, asked)?.text()?;
    let mut responses = Responses::begin(&shared.oip, shared, by.caller, ask, false)?;
    // What is refused is refused before anything is said.
    let first = responses.next().await.transpose()?;
    Ok(respond(Framing::Events, move |out| async move {
        if let Some(first) = first {
            out.data(&json::generated(&first)).await?;
        }
        loop {
            match timeout(PING, responses.next()).await {
                Err(_) => out.ping().await?,
                Ok(None) => return Ok(()),
                Ok(Some(Ok(response))) => out.data(&json::generated(&response)).await?,
                Ok(Some(Err(error))) => return out.data(&Flavor::Oip.body(&error)).await,
            }
        }
    }))
}

async fn regions(
    State(shared): State<Shared>,
    Path(rest): Path<String>,
    method: Method,
    extensions: Extensions,
    body: Body,
) -> Response {
    let caller = Caller::of(&extensions);
    let tenant = caller.tenant("");
    let (name, action) = paths::region(&rest);
    let all = &shared.oip.regions;
    let done = async {
        match (&method, action) {
            (&Method::GET, "status") => {
                let found = all.status(tenant, name)?.into_iter().map(|(name, region)| {
                    json!({
                        "name": name,
                        "key": region.key,
                        "offset": region.offset,
                        "byte_size": region.size,
                    })
                });
                Ok(told(found.collect()))
            }
            (&Method::POST, "register") => {
                let user = peer::user(&extensions).await?;
                let asked = object(body).await?;
                let number = |field: &str| asked.get(field).and_then(Value::as_u64);
                let key = asked.get("key").and_then(Value::as_str).unwrap_or_default();
                let within = (
                    number("offset").unwrap_or(0),
                    number("byte_size").unwrap_or(0),
                );
                all.register((tenant, name), key, within, user)?;
                Ok(told(json!({})))
            }
            (&Method::POST, "unregister") => {
                all.unregister(tenant, name);
                Ok(told(json!({})))
            }
            _ => Err(invalid(
                "shared memory is registered, unregistered, or its status asked for",
            )),
        }
    };
    answered(done.await)
}

async fn devices_memory(method: Method, Path(rest): Path<String>) -> Response {
    let (_, action) = paths::region(&rest);
    match (&method, action) {
        (&Method::GET, "status") => told(json!([])),
        // Nothing is registered, so nothing is to be done.
        (&Method::POST, "unregister") => told(json!({})),
        (&Method::POST, "register") => answered(Err(no_devices_memory())),
        _ => answered(Err(Error::new(
            Reason::InvalidArgument,
            "nothing is served here",
        ))),
    }
}

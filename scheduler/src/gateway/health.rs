//! Whether the process lives, and whether a request would get anywhere.

use axum::{Router, extract::State, http::StatusCode, routing::get};

use crate::service::Shared;

/// `/healthz` and `/readyz`.
pub(super) fn routes() -> Router<Shared> {
    Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready))
}

/// Ready while a worker is, which has given its known answer and makes progress, and nothing drains.
async fn ready(State(shared): State<Shared>) -> (StatusCode, &'static str) {
    if shared.admission.is_closed() {
        return (StatusCode::SERVICE_UNAVAILABLE, "draining\n");
    }
    match shared.fleet.ready() {
        0 => (StatusCode::SERVICE_UNAVAILABLE, "no worker is ready\n"),
        _ => (StatusCode::OK, "ready\n"),
    }
}

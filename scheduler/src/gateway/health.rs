//! Whether the process lives, and whether a request would get anywhere.

use axum::{Router, extract::State, http::StatusCode, routing::get};

use crate::service::Shared;

/// `/healthz` and `/readyz`.
pub(super) fn routes() -> Router<Shared> {
    Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready))
}

async fn ready(State(shared): State<Shared>) -> (StatusCode, &'static str) {
    match shared.is_serving() {
        true => (StatusCode::OK, "ready\n"),
        false => (
            StatusCode::SERVICE_UNAVAILABLE,
            "draining, or no worker is ready\n",
        ),
    }
}

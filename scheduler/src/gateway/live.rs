//! The live page under `/live`: what this host does now, for people with a browser.
//!
//! Its three files hold nothing of this host and ask nobody else for anything. What the page shows comes as server-sent
//! events and JSON, for callers with the role `debug`: as little as [`Watch`](hotcell_proto::v1::WatchSample) and Control
//! tell, never prompts or tokens.

mod look;
mod tell;

use axum::{
    Json, Router,
    extract::{Path, State},
    http::{Extensions, HeaderName, HeaderValue, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use hotcell_proto::error::{Error, Reason};
use tokio::sync::Semaphore;

use super::{
    failure::{Failed, Flavor},
    sse::{self, Framing},
};
use crate::{access::Caller, admission::draining, discover::clip, service::Shared};

/// Pages that are open at once. Each looks into every worker, and others who look must find a place there, too.
const PAGES: usize = 4;

/// Places for pages.
static PLACES: Semaphore = Semaphore::const_new(PAGES);

/// Nothing but these files runs or is shown, nobody frames it, and it talks to nobody but this door.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; \
                      form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types";

/// The page, and what it asks for.
pub(super) fn routes() -> Router<Shared> {
    let html = include_str!("live/page.html");
    let (css, js) = (include_str!("live/page.css"), include_str!("live/page.js"));
    Router::new()
        .route(
            "/live",
            get(async move || file("text/html; charset=utf-8", html)),
        )
        .route(
            "/live/page.css",
            get(async move || file("text/css; charset=utf-8", css)),
        )
        .route(
            "/live/page.js",
            get(async move || file("text/javascript; charset=utf-8", js)),
        )
        .route("/live/events", get(events))
        .route("/live/crashes/{id}", get(crash))
        .route("/live/trace/{worker}/{ms}", post(trace))
}

/// One of the page's files.
fn file(kind: &'static str, text: &'static str) -> Response {
    let mut response = Response::new(text.into());
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_TYPE, kind),
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        (
            HeaderName::from_static("cross-origin-opener-policy"),
            "same-origin",
        ),
        (
            HeaderName::from_static("cross-origin-resource-policy"),
            "same-origin",
        ),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Lets somebody look, and notes it.
///
/// # Errors
/// When this host drains.
fn enter(
    shared: &Shared,
    extensions: &Extensions,
    call: &str,
    worker: &str,
) -> Result<(), Box<Failed>> {
    if shared.admission.is_closed() {
        return Err(Box::new(Failed(Flavor::Openai, draining())));
    }
    let who = Caller::of(extensions).who(extensions);
    let worker = clip(worker);
    tracing::info!(worker, call, by = %who.name, "somebody looks at the live page");
    let detail = "by the live page".to_owned();
    shared.fleet.audit_debug(&who, call, &worker, detail);
    Ok(())
}

async fn events(State(shared): State<Shared>, extensions: Extensions) -> Response {
    if let Err(failed) = enter(&shared, &extensions, "watch", "") {
        return failed.into_response();
    }
    let Ok(place) = PLACES.try_acquire() else {
        let what = format!("{PAGES} live pages are open already; close one");
        let error = Error::new(Reason::Overloaded, what);
        return Failed(Flavor::Openai, error).into_response();
    };
    sse::respond(Framing::Events, move |out| async move {
        let _place = place;
        look::show(shared, out).await
    })
}

async fn crash(
    State(shared): State<Shared>,
    Path(id): Path<String>,
    extensions: Extensions,
) -> Response {
    if let Err(failed) = enter(&shared, &extensions, "crash", "") {
        return failed.into_response();
    }
    match shared.fleet.crashes.get(&id) {
        Ok(crash) => Json(tell::crash_whole(&crash)).into_response(),
        Err(error) => Failed(Flavor::Openai, error).into_response(),
    }
}

async fn trace(
    State(shared): State<Shared>,
    Path((worker, ms)): Path<(String, u32)>,
    extensions: Extensions,
) -> Response {
    if let Err(failed) = enter(&shared, &extensions, "trace", &worker) {
        return failed.into_response();
    }
    let traced = tokio::select! {
        traced = look::trace(&shared, &worker, ms) => traced,
        () = shared.abort.cancelled() => Err(draining()),
    };
    match traced {
        Ok(timeline) => Json(timeline).into_response(),
        Err(error) => Failed(Flavor::Openai, error).into_response(),
    }
}

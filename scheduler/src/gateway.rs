//! The protocols of others, each a thin door before the same requests that Hotcell's own clients make.
//!
//! A door translates: what comes in becomes a [`GenerateRequest`](hotcell_proto::v1::GenerateRequest) or a call of the
//! fleet, what goes out takes the protocol's form. No tokenizer, chat template or model byte is parsed here.

mod anthropic;
mod ask;
mod body;
mod failure;
mod guard;
mod health;
mod live;
pub mod metrics;
pub(crate) mod oip;
mod ollama;
mod openai;
mod sse;
mod vllm;
mod web;

use axum::{Router, middleware};
use tonic::service::Routes;

use crate::service::Shared;
pub use web::WebOrigin;

/// A protocol that others made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// OpenAI's HTTP API, under /v1
    Openai,
    /// Ollama's HTTP API, under /api
    Ollama,
    /// Anthropic's HTTP API, under /v1/messages
    Anthropic,
    /// The Open Inference Protocol, version 2, over gRPC and under /v2
    Oip,
    /// What the router SMG says to engines of vLLM, over gRPC
    Vllm,
    /// Prometheus' format, under /metrics
    Metrics,
    /// No protocol but a page for people, under /live: what this host does, for callers with the role debug
    Live,
}

impl Protocol {
    /// The gRPC service that it is, if it is one.
    pub fn service(self) -> Option<&'static str> {
        match self {
            Protocol::Vllm => Some(vllm::SERVICE_NAME),
            Protocol::Oip => Some(oip::SERVICE_NAME),
            Protocol::Openai
            | Protocol::Ollama
            | Protocol::Anthropic
            | Protocol::Metrics
            | Protocol::Live => None,
        }
    }
}

/// Adds those of these protocols that are gRPC services.
pub fn services(shared: &Shared, protocols: &[Protocol], routes: Routes) -> Routes {
    protocols
        .iter()
        .fold(routes, |routes, protocol| match protocol {
            Protocol::Vllm => routes.add_service(vllm::server(shared)),
            Protocol::Oip => routes.add_service(oip::server(shared)),
            Protocol::Openai
            | Protocol::Ollama
            | Protocol::Anthropic
            | Protocol::Metrics
            | Protocol::Live => routes,
        })
}

/// What is served over HTTP, with our own services in gRPC-Web's form.
pub fn router(
    shared: &Shared,
    protocols: &[Protocol],
    routes: Routes,
    origins: &[WebOrigin],
) -> Router {
    let mut router = Router::new().merge(health::routes());
    for protocol in protocols {
        router = match protocol {
            Protocol::Openai => router.merge(openai::routes()),
            Protocol::Ollama => router.merge(ollama::routes()),
            Protocol::Anthropic => router.merge(anthropic::routes()),
            Protocol::Metrics => router.merge(metrics::routes()),
            Protocol::Oip => router.merge(oip::routes()),
            Protocol::Live => router.merge(live::routes()),
            Protocol::Vllm => router,
        };
    }
    router
        .fallback(failure::no_such_path)
        .method_not_allowed_fallback(failure::no_such_method)
        .layer(middleware::from_fn_with_state(routes, web::translated))
        .layer(middleware::from_fn_with_state(shared.clone(), guard::guard))
        .layer(web::consent(shared, origins))
        .with_state(shared.clone())
}

//! Web pages: our own gRPC services in the form that browsers can speak, and which pages may call at all.

use std::{fmt, str::FromStr, time::Duration};

use axum::{
    body::Body,
    extract::{Request, State},
    http::{HeaderName, HeaderValue, Method, header, request::Parts},
    middleware::Next,
    response::{IntoResponse, Response},
};
use serde::{Deserialize, Deserializer, de::Error as _};
use tonic::service::Routes;
use tonic_web::GrpcWebLayer;
use tower::{Layer, ServiceExt};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use crate::{service::Shared, traces::TRACEPARENT};

/// How long a browser may remember what it may send.
const REMEMBERED: Duration = Duration::from_secs(600);

/// Headers of answers that pages read.
const EXPOSED: [HeaderName; 5] = [
    HeaderName::from_static("grpc-status"),
    HeaderName::from_static("grpc-message"),
    HeaderName::from_static("grpc-status-details-bin"),
    header::RETRY_AFTER,
    TRACEPARENT,
];

/// Where web pages come from that may call: scheme, host and port if it is not the usual one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebOrigin(HeaderValue);

impl WebOrigin {
    /// Whether a request's `Origin` is this.
    pub(super) fn is(&self, origin: &HeaderValue) -> bool {
        self.0 == *origin
    }
}

impl fmt::Display for WebOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.to_str().unwrap_or_default())
    }
}

impl FromStr for WebOrigin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no origin such as https://app.example.com");
        let uri = text.parse::<axum::http::Uri>().map_err(|_| wrong())?;
        let web = matches!(uri.scheme_str(), Some("http" | "https"));
        let host = uri.authority().filter(|a| !a.as_str().contains('@'));
        // Browsers send it without a path, and in lower case.
        let plain = text.to_ascii_lowercase() == text && !text.ends_with('/') && uri.path() == "/";
        match (web && plain && uri.query().is_none(), host) {
            (true, Some(_)) => HeaderValue::from_str(text).map(Self).map_err(|_| wrong()),
            _ => Err(wrong()),
        }
    }
}

impl<'de> Deserialize<'de> for WebOrigin {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map_err(D::Error::custom)
    }
}

/// Whether a host, with or without a port, is this machine's by its name alone.
pub(super) fn is_here(host: &str) -> bool {
    let (name, port) = match host.strip_prefix('[').and_then(|v6| v6.split_once(']')) {
        Some((v6, "")) => (v6, None),
        Some((v6, rest)) => match rest.strip_prefix(':') {
            Some(port) => (v6, Some(port)),
            None => return false,
        },
        None => match host.split_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (host, None),
        },
    };
    if port.is_some_and(|port| port.parse::<u16>().is_err()) {
        return false;
    }
    name.eq_ignore_ascii_case("localhost")
        || name
            .parse::<std::net::IpAddr>()
            .is_ok_and(|ip| ip.is_loopback())
}

/// Whether a request's `Origin` is a page of this machine.
pub(super) fn is_page_of_here(origin: &HeaderValue) -> bool {
    let origin = origin.to_str().unwrap_or("?");
    let host = origin.split_once("://").map_or("", |(_, host)| host);
    is_here(host)
}

/// Tells browsers which pages may read what is answered: those that may call.
pub(super) fn consent(shared: &Shared, origins: &[WebOrigin]) -> CorsLayer {
    let (shared, origins) = (shared.clone(), origins.to_vec());
    let may = move |origin: &HeaderValue, _: &Parts| {
        origins.iter().any(|known| known.is(origin))
            || (!shared.access.asks_for_tokens() && is_page_of_here(origin))
    };
    let layer = CorsLayer::new()
        .allow_methods([Method::GET, Method::POST, Method::DELETE])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(EXPOSED)
        .max_age(REMEMBERED);
    layer.allow_origin(AllowOrigin::predicate(may))
}

/// Answers calls in gRPC-Web's form by our own services; all others go on.
pub(super) async fn translated(
    State(routes): State<Routes>,
    request: Request,
    next: Next,
) -> Response {
    let kind = request.headers().get(header::CONTENT_TYPE);
    let kind = kind.map_or(&b""[..], HeaderValue::as_bytes);
    if !kind.starts_with(b"application/grpc-web") {
        return next.run(request).await;
    }
    let service = GrpcWebLayer::new().layer(routes);
    let answered = service.oneshot(request.map(tonic::body::Body::new)).await;
    match answered {
        Ok(response) => response.map(Body::new),
        Err(never) => match never {},
    }
    .into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_this_machine_are_known_by_their_host() {
        let is = |origin| is_page_of_here(&HeaderValue::from_static(origin));
        assert!(is("http://localhost:3000") && is("http://127.0.0.1") && is("http://[::1]:80"));
        assert!(!is("null") && !is("https://app.example") && !is("http://localhost.example"));
        assert!(!is("http://localhost:3000.evil.example") && !is("http://localhost:x@evil"));
        assert!(!is("http://[::1].evil.example") && !is("http://[::1]80"));
    }

    #[test]
    fn an_origin_is_what_a_browser_sends() {
        for good in [
            "https://app.example.com",
            "http://localhost:3000",
            "http://[::1]:8000",
        ] {
            let origin: WebOrigin = good.parse().unwrap();
            assert!(origin.is(&HeaderValue::from_static(good)));
            assert!(!origin.is(&HeaderValue::from_static("null")));
            assert_eq!(origin.to_string(), good);
        }
        for bad in [
            "",
            "*",
            "null",
            "app.example.com",
            "https://",
            "https://a.example/",
            "https://a.example/x",
            "https://A.example",
            "ftp://a.example",
            "https://u@a.example",
            "https://a.example?x",
        ] {
            assert!(bad.parse::<WebOrigin>().is_err(), "{bad}");
        }
    }
}

//! Errors in the form that each protocol's clients read.

use axum::{
    Json,
    extract::Request,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use hotcell_proto::error::{Error, Reason};
use serde_json::{Value, json};
use tonic::Code;

/// Whose form an error takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flavor {
    Openai,
    Ollama,
    Anthropic,
    Oip,
}

impl Flavor {
    /// By a request's path.
    pub fn of(path: &str) -> Self {
        match path {
            _ if path.starts_with("/api/") => Self::Ollama,
            _ if path.starts_with("/v1/messages") => Self::Anthropic,
            _ if path.starts_with("/v2") => Self::Oip,
            _ => Self::Openai,
        }
    }

    /// An error's body.
    pub fn body(self, error: &Error) -> Value {
        let status = status(error);
        let message = error.message();
        match self {
            Self::Openai => {
                let param = error.get("field");
                json!({"error": {
                    "message": message,
                    "type": kind(status),
                    "param": param,
                    "code": error.reason().name().to_ascii_lowercase(),
                }})
            }
            Self::Ollama | Self::Oip => json!({ "error": message }),
            Self::Anthropic => json!({
                "type": "error",
                "error": {"type": anthropic_kind(status), "message": message},
            }),
        }
    }
}

/// The field that an error names which is about a body as a whole: it is too large, or does not come.
pub(super) const BODY: &str = "body";

/// The status that says the same as an error.
pub(super) fn status(error: &Error) -> StatusCode {
    match error.reason().code() {
        Code::DeadlineExceeded if error.get("field") == Some(BODY) => StatusCode::REQUEST_TIMEOUT,
        _ if error.get("field") == Some(BODY) => StatusCode::PAYLOAD_TOO_LARGE,
        Code::Ok => StatusCode::OK,
        Code::InvalidArgument | Code::FailedPrecondition | Code::OutOfRange => {
            StatusCode::BAD_REQUEST
        }
        Code::Unauthenticated => StatusCode::UNAUTHORIZED,
        Code::PermissionDenied => StatusCode::FORBIDDEN,
        Code::NotFound => StatusCode::NOT_FOUND,
        // Clients send a 409 again by themselves, which would not help here.
        Code::AlreadyExists | Code::Aborted => StatusCode::UNPROCESSABLE_ENTITY,
        Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
        Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        Code::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
        Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
        Code::Cancelled | Code::Unknown | Code::Internal | Code::DataLoss => {
            StatusCode::INTERNAL_SERVER_ERROR
        }
    }
}

/// OpenAI's word for a status.
fn kind(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        _ if status.is_client_error() => "invalid_request_error",
        _ => "server_error",
    }
}

/// Anthropic's word for a status.
fn anthropic_kind(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        _ if status.is_client_error() => "invalid_request_error",
        _ => "api_error",
    }
}

/// An error on its way to a client.
#[derive(Debug)]
pub(super) struct Failed(pub Flavor, pub Error);

impl IntoResponse for Failed {
    fn into_response(self) -> Response {
        let Failed(flavor, error) = self;
        let status = status(&error);
        let mut response = (status, Json(flavor.body(&error))).into_response();
        if let Some(seconds) = error.reason().retry_after() {
            let value = HeaderValue::from(seconds);
            response.headers_mut().insert(header::RETRY_AFTER, value);
        }
        if status == StatusCode::UNAUTHORIZED {
            let value = HeaderValue::from_static("Bearer");
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, value);
        }
        response
    }
}

/// For paths that nothing is served under.
pub(super) async fn no_such_path(request: Request) -> Response {
    let path: String = request.uri().path().chars().take(200).collect();
    let error = Error::new(
        Reason::InvalidArgument,
        format!("nothing is served under {path}; see the protocols in README"),
    );
    let body = Flavor::of(&path).body(&error);
    (StatusCode::NOT_FOUND, Json(body)).into_response()
}

/// For paths that are served, but not so.
pub(super) async fn no_such_method(request: Request) -> Response {
    let what = format!("{} is not served here", request.method());
    let error = Error::new(Reason::InvalidArgument, what);
    let body = Flavor::of(request.uri().path()).body(&error);
    (StatusCode::METHOD_NOT_ALLOWED, Json(body)).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_says_whose_fault_it_is_and_what_would_help() {
        let answer = |error| Failed(Flavor::Openai, error).into_response();
        let stranger = answer(Error::new(Reason::Unauthenticated, "who are you?"));
        assert_eq!(stranger.status(), StatusCode::UNAUTHORIZED);
        assert_eq!(stranger.headers()[header::WWW_AUTHENTICATE], "Bearer");
        let late = Error::new(Reason::DeadlineExceeded, "late");
        let own = answer(late.clone());
        assert_eq!(own.status(), StatusCode::GATEWAY_TIMEOUT);
        assert!(own.headers().get(header::WWW_AUTHENTICATE).is_none());
        let body = answer(late.with("field", BODY));
        assert_eq!(body.status(), StatusCode::REQUEST_TIMEOUT);
        let large = Error::new(Reason::LimitExceeded, "large").with("field", BODY);
        assert_eq!(answer(large).status(), StatusCode::PAYLOAD_TOO_LARGE);
    }
}

//! The guard before all HTTP doors: who calls, whether that one may, and whether a web page made the call.

use axum::{
    extract::{Request, State},
    http::{HeaderMap, HeaderValue, StatusCode, Uri, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use hotcell_proto::error::{Error, Reason};

use super::{
    failure::{Failed, Flavor, no_such_path},
    web::{WebOrigin, is_here, is_page_of_here},
};
use crate::{
    access::{self, Need, Outcome, bearer},
    service::Shared,
    traces::Arrival,
};

/// Headers in which clients put their key, besides `Authorization`.
const KEYS: [&str; 2] = ["x-api-key", "api-key"];

/// Lets a call through that may be made.
pub(super) async fn guard(
    State(shared): State<Shared>,
    mut request: Request,
    next: Next,
) -> Response {
    let flavor = Flavor::of(request.uri().path());
    // Not even asked for by whom: what is in no row of the table is not served, whatever else is there.
    if access::row(request.uri().path()).is_none() {
        return no_such_path(request).await;
    }
    let mark = access::came_by(request.extensions_mut());
    let (response, _begun) = match check(&shared, &mut request, mark.as_ref()) {
        Ok((begun, arrival)) => {
            let mut response = next.run(request).await;
            arrival.answer(response.headers_mut());
            (response, begun)
        }
        Err(error) => {
            tracing::debug!(path = request.uri().path(), %error, "refused");
            (Failed(flavor, error).into_response(), None)
        }
    };
    if let Some(mark) = mark {
        mark.came_to(match response.status() {
            StatusCode::TOO_MANY_REQUESTS => Outcome::NotNow,
            // Whoever it is was not let in. Mistakes in requests are told, and are a client's whose address others share.
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Outcome::Refused,
            _ => Outcome::Answered,
        });
    }
    response
}

/// Refuses a request that says in two ways how long it is: whoever passed it on may have believed the other one.
fn one_length(headers: &HeaderMap) -> Result<(), Error> {
    let both = headers.contains_key(header::CONTENT_LENGTH)
        && headers.contains_key(header::TRANSFER_ENCODING);
    match both {
        true => Err(Error::new(
            Reason::InvalidArgument,
            "the request has both content-length and transfer-encoding",
        )),
        false => Ok(()),
    }
}

fn check(
    shared: &Shared,
    request: &mut Request,
    mark: Option<&access::Mark>,
) -> Result<(Option<access::Begun>, Arrival), Error> {
    one_length(request.headers())?;
    let begun = mark.map(access::Mark::begin).transpose()?;
    let path = request.uri().path();
    let need = access::need(path);
    if need == Need::Nobody {
        return Ok((begun, Arrival::default()));
    }
    if !shared.access.asks_for_tokens() {
        not_from_a_page(request.uri(), request.headers(), &shared.web_origins)?;
    }
    let mut caller = shared.access.over_tcp(mark, || key(request.headers()))?;
    caller.check_noting((need, path), request.extensions(), shared.fleet.audit())?;
    if let Some(mark) = mark {
        mark.keeps();
        if shared.access.knows_by_name(mark) {
            mark.came_to(Outcome::Answered);
        }
    }
    let arrival = shared.traces.arrive(request.headers());
    caller.trace = arrival.clone();
    request.extensions_mut().insert(caller);
    // Nobody behind this needs the secret.
    let headers = request.headers_mut();
    headers.remove(header::AUTHORIZATION);
    for name in KEYS {
        headers.remove(name);
    }
    Ok((begun, arrival))
}

/// The key of a call, wherever its client put it.
fn key(headers: &HeaderMap) -> Result<Option<&str>, Error> {
    if let Some(token) = bearer(headers)? {
        return Ok(Some(token));
    }
    let mut keys = KEYS.iter().filter_map(|name| headers.get(*name));
    Ok(keys.next().and_then(|value| value.to_str().ok()))
}

/// Where nobody shows a token, whoever sits at this machine is let in, and so would be every web page that its browser
/// shows: by a request that needs no consent (`Origin` tells), or by a name that was made to lead here (`Host` tells).
fn not_from_a_page(uri: &Uri, headers: &HeaderMap, known: &[WebOrigin]) -> Result<(), Error> {
    let refused = |what: &str, value: &str| {
        let value: String = value.chars().take(200).collect();
        let why = format!(
            "{what} {value:?} is not this machine; name the pages that may call with --web-origins, or give the scheduler --tokens"
        );
        Err(Error::new(Reason::PermissionDenied, why))
    };
    let origin = headers.get(header::ORIGIN);
    let may = |origin: &HeaderValue| known.iter().any(|k| k.is(origin)) || is_page_of_here(origin);
    if let Some(origin) = origin.filter(|origin| !may(origin)) {
        return refused("the call's origin", origin.to_str().unwrap_or("?"));
    }
    let host = headers.get(header::HOST).map(|h| h.to_str().unwrap_or("?"));
    let host = uri.authority().map(|a| a.as_str()).or(host);
    match host {
        Some(host) if !is_here(host) && host.parse::<std::net::SocketAddr>().is_err() => {
            refused("the host", host)
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(host: &str, origin: Option<&str>) -> Result<(), Error> {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, host.parse().unwrap());
        if let Some(origin) = origin {
            headers.insert(header::ORIGIN, origin.parse().unwrap());
        }
        let known = ["https://app.example".parse().unwrap()];
        not_from_a_page(&Uri::from_static("/v1/models"), &headers, &known)
    }

    #[test]
    fn pages_from_elsewhere_do_not_get_in() {
        assert!(call("localhost:8080", None).is_ok());
        assert!(call("127.0.0.1:8080", Some("http://localhost:3000")).is_ok());
        assert!(call("[::1]:8080", None).is_ok());
        assert!(call("localhost", Some("https://evil.example")).is_err());
        assert!(call("localhost", Some("null")).is_err());
        assert!(call("localhost", Some("https://app.example")).is_ok());
        assert!(call("evil.example", Some("https://app.example")).is_err());
        // A name that was made to lead to 127.0.0.1.
        assert!(call("evil.example:8080", None).is_err());
        assert!(call("localhost.evil.example", None).is_err());
    }

    #[test]
    fn a_key_is_found_wherever_clients_put_it() {
        let with = |name: &'static str, value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, value.parse().unwrap());
            key(&headers).map(|key| key.map(str::to_owned))
        };
        assert_eq!(with("authorization", "Bearer a").unwrap(), Some("a".into()));
        assert_eq!(with("x-api-key", "b").unwrap(), Some("b".into()));
        assert_eq!(with("api-key", "c").unwrap(), Some("c".into()));
        assert_eq!(with("accept", "d").unwrap(), None);
        assert!(with("authorization", "Basic a").is_err());
    }
}

//! Bodies of requests, read within bounds of size and time.

use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use hotcell_proto::{
    error::{Error, Reason},
    limits,
};
use http_body::Body as _;
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;
use tokio::time::timeout;

/// Reads a body of at most [`limits::MAX_HTTP_BODY_BYTES`].
///
/// # Errors
/// [`Reason::LimitExceeded`], [`Reason::DeadlineExceeded`] for one that does not come, [`Reason::InvalidArgument`].
pub(super) async fn read(mut body: Body) -> Result<Bytes, Error> {
    let most = limits::MAX_HTTP_BODY_BYTES;
    let too_large = || {
        let what = format!("the request's body has more than the limit of {most} bytes");
        let error = Error::new(Reason::LimitExceeded, what);
        error
            .with("limit", most)
            .with("field", super::failure::BODY)
    };
    // Nothing of what says itself that it is too much.
    if body.size_hint().lower() > most as u64 {
        return Err(too_large());
    }
    let patience = Duration::from_secs(limits::MAX_HTTP_BODY_SECONDS);
    let mut whole = Vec::new();
    let mut first = None;
    while let Some(frame) = timeout(patience, body.frame()).await.map_err(|_| {
        let what = "the request's body did not come in time; send it again";
        Error::new(Reason::DeadlineExceeded, what).with("field", super::failure::BODY)
    })? {
        let frame = frame.map_err(|e| {
            let what = format!("the request's body cannot be read: {e}");
            Error::new(Reason::InvalidArgument, what)
        })?;
        let Ok(data) = frame.into_data() else {
            continue;
        };
        let before = whole.len() + first.as_ref().map_or(0, Bytes::len);
        if before + data.len() > most {
            return Err(too_large());
        }
        // Most bodies come in one piece, which is not copied.
        match first.take() {
            None if whole.is_empty() => first = Some(data),
            earlier => {
                whole.extend_from_slice(&earlier.unwrap_or_default());
                whole.extend_from_slice(&data);
            }
        }
    }
    Ok(first.unwrap_or_else(|| whole.into()))
}

/// Reads a body that is JSON, whatever its client says that it is.
///
/// # Errors
/// As [`read`], and [`Reason::InvalidArgument`] that names what is wrong and where.
pub(super) async fn json<T: DeserializeOwned>(body: Body) -> Result<T, Error> {
    let bytes = read(body).await?;
    serde_json::from_slice(&bytes).map_err(|e| {
        let what: String = e.to_string().chars().take(limits::MAX_WORD).collect();
        Error::new(
            Reason::InvalidArgument,
            format!("the request's body cannot be read: {what}"),
        )
    })
}

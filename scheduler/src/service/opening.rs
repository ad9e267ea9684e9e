//! OpenSession, as far as it concerns what a tenant may have: its place, and the bytes that the session may hold.

use std::{future::poll_fn, pin::Pin};

use hotcell_proto::{
    error::{Error, Reason},
    v1::OpenSessionRequest,
};
use http::Request;
use http_body::Body as _;
use prost::{Message, bytes::Buf};
use tonic::body::Body;

use super::Shared;
use crate::access::{Held, Want};

/// Bytes before a message: whether it is compressed, and its length.
const PREFIX: usize = 5;
/// Longest body; the message has a name and some numbers.
const MAX_BODY: usize = 64 << 10;

/// Takes what a session needs of what its tenant may have. A tenant whose bytes are limited gets a session that may
/// hold what was asked for, or half of what is left; for that the message is read and written anew.
///
/// # Errors
/// [`Reason::QuotaExceeded`], [`Reason::InvalidArgument`] for a message that cannot be read.
pub(super) async fn allow(
    shared: &Shared,
    tenant: &str,
    request: Request<Body>,
) -> Result<(Request<Body>, Held), Error> {
    let access = &shared.access;
    let mut want = Want {
        sessions: 1,
        ..Want::default()
    };
    let limits = access.limits(tenant);
    if limits.tensor_bytes.is_none() {
        return Ok((request, access.tenants.take(tenant, &limits, want)?));
    }
    let (mut parts, body) = request.into_parts();
    let mut asked = read(body).await?;
    if !asked.dry_run {
        let left = access.tenants.bytes_left(tenant, &limits).unwrap_or(0);
        want.tensor_bytes = match asked.max_bytes {
            // One at least, which there is not when nothing is left.
            0 => (left / 2).max(1),
            bytes => bytes,
        };
        asked.max_bytes = want.tensor_bytes;
    }
    let held = access.tenants.take(tenant, &limits, want)?;
    // Of what was asked before.
    parts.headers.remove(http::header::CONTENT_LENGTH);
    Ok((Request::from_parts(parts, write(&asked)), held))
}

fn wrong(what: &str) -> Error {
    Error::new(
        Reason::InvalidArgument,
        format!("OpenSession cannot be read: {what}"),
    )
}

async fn read(mut body: Body) -> Result<OpenSessionRequest, Error> {
    let mut bytes = Vec::new();
    while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
        let frame = frame.map_err(|e| wrong(e.message()))?;
        let Ok(mut data) = frame.into_data() else {
            break;
        };
        if bytes.len() + data.remaining() > MAX_BODY {
            return Err(wrong("it is too long"));
        }
        while data.has_remaining() {
            let chunk = data.chunk();
            bytes.extend_from_slice(chunk);
            let read = chunk.len();
            data.advance(read);
        }
    }
    let (prefix, message) = bytes
        .split_at_checked(PREFIX)
        .ok_or_else(|| wrong("it ends early"))?;
    let [compressed, length @ ..] = prefix else {
        return Err(wrong("it ends early"));
    };
    let length = length
        .iter()
        .fold(0, |all, byte| all << 8 | usize::from(*byte));
    if *compressed != 0 || length != message.len() {
        return Err(wrong("it is compressed, or not one message"));
    }
    OpenSessionRequest::decode(message).map_err(|e| wrong(&e.to_string()))
}

fn write(message: &OpenSessionRequest) -> Body {
    let message = message.encode_to_vec();
    let mut framed = vec![0];
    framed.extend(
        u32::try_from(message.len())
            .unwrap_or(u32::MAX)
            .to_be_bytes(),
    );
    framed.extend(message);
    Body::new(Whole(Some(framed.into())))
}

/// A body of one piece.
struct Whole(Option<prost::bytes::Bytes>);

impl http_body::Body for Whole {
    type Data = prost::bytes::Bytes;
    type Error = tonic::Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<Self::Data>, tonic::Status>>> {
        std::task::Poll::Ready(self.0.take().map(|data| Ok(http_body::Frame::data(data))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked() -> OpenSessionRequest {
        OpenSessionRequest {
            name: "mine".to_owned(),
            max_bytes: 7,
            ..OpenSessionRequest::default()
        }
    }

    #[tokio::test]
    async fn a_message_is_what_it_was() {
        assert_eq!(read(write(&asked())).await.unwrap(), asked());
        let empty = OpenSessionRequest::default();
        assert_eq!(read(write(&empty)).await.unwrap(), empty);
    }

    #[tokio::test]
    async fn what_is_no_message_is_refused() {
        for bytes in [
            vec![],
            vec![0, 0, 0],
            vec![1, 0, 0, 0, 0],
            vec![0, 0, 0, 0, 9, 1],
            vec![0, 0, 0, 0, 1, 0xff],
            vec![0; MAX_BODY + 1],
        ] {
            let body = Body::new(Whole(Some(bytes.into())));
            assert_eq!(
                read(body).await.unwrap_err().reason(),
                Reason::InvalidArgument
            );
        }
    }
}

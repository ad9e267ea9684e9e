//! Streams of events to HTTP clients: server-sent events, and lines of JSON.

use std::{
    convert::Infallible,
    fmt::Write as _,
    pin::Pin,
    task::{Context, Poll},
};

use axum::{
    body::Body,
    http::{HeaderName, HeaderValue, header},
    response::Response,
};
use bytes::Bytes;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio_stream::Stream;

/// Pieces between who makes them and the connection that sends them. What comes while the client reads nothing
/// waits in its request's journal, which has the bound.
const AHEAD: usize = 4;

/// Bytes of a token's own part of an event, mostly.
const VALUE: usize = 128;

/// The writing end of a response.
#[derive(Clone, Debug)]
pub(super) struct Out {
    to: mpsc::Sender<Bytes>,
}

/// The client went away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gone;

impl Out {
    /// Sends bytes as they are.
    pub async fn raw(&self, text: impl Into<Bytes>) -> Result<(), Gone> {
        self.to.send(text.into()).await.map_err(|_| Gone)
    }

    /// Sends a server-sent event of JSON without a name.
    pub async fn data(&self, value: &impl Serialize) -> Result<(), Gone> {
        self.raw(framed("data: ", value, "\n\n")).await
    }

    /// Sends a server-sent event of JSON with a name.
    pub async fn event(&self, name: &str, value: &impl Serialize) -> Result<(), Gone> {
        let mut before = String::new();
        // Writing into a string cannot fail.
        let _ = write!(before, "event: {name}\ndata: ");
        self.raw(framed(&before, value, "\n\n")).await
    }

    /// Sends a line of JSON.
    pub async fn line(&self, value: &impl Serialize) -> Result<(), Gone> {
        self.raw(framed("", value, "\n")).await
    }

    /// Sends JSON between these, which frame it.
    pub async fn framed(
        &self,
        before: &str,
        value: &impl Serialize,
        after: &str,
    ) -> Result<(), Gone> {
        self.raw(framed(before, value, after)).await
    }

    /// Sends a comment, which every client of server-sent events leaves out.
    pub async fn ping(&self) -> Result<(), Gone> {
        self.raw(Bytes::from_static(b": ping\n\n")).await
    }
}

fn framed(before: &str, value: &impl Serialize, after: &str) -> Bytes {
    let mut bytes = Vec::with_capacity(before.len() + VALUE + after.len());
    bytes.extend_from_slice(before.as_bytes());
    // Our own types: strings, numbers, lists and maps with string keys, which always serialise.
    if let Err(error) = serde_json::to_writer(&mut bytes, value) {
        tracing::error!(%error, "an event cannot be written");
    }
    bytes.extend_from_slice(after.as_bytes());
    bytes.into()
}

/// How a stream is framed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Framing {
    /// `text/event-stream`.
    Events,
    /// `application/x-ndjson`.
    Lines,
}

/// What is written, as the connection asks for it: whoever writes has no task of its own, which saves one change of tasks for
/// every token. Dropping it, when the client goes away, ends the writing.
struct Written<F> {
    writing: Option<Pin<Box<F>>>,
    from: mpsc::Receiver<Bytes>,
}

impl<F: Future<Output = Result<(), Gone>>> Stream for Written<F> {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        loop {
            // Only the writing itself sends, so only what is there is asked for: nothing else could wake this.
            if !this.from.is_empty() || this.writing.is_none() {
                return this.from.poll_recv(cx).map(|piece| piece.map(Ok));
            }
            let Some(writing) = &mut this.writing else {
                continue;
            };
            match writing.as_mut().poll(cx) {
                // With it goes what it sent to.
                Poll::Ready(_) => this.writing = None,
                Poll::Pending if this.from.is_empty() => return Poll::Pending,
                Poll::Pending => {}
            }
        }
    }
}

/// A response that `write` writes while it is sent.
pub(super) fn respond<F>(framing: Framing, write: impl FnOnce(Out) -> F) -> Response
where
    F: Future<Output = Result<(), Gone>> + Send + 'static,
{
    let (to, from) = mpsc::channel(AHEAD);
    let writing = Some(Box::pin(write(Out { to })));
    let mut response = Response::new(Body::from_stream(Written { writing, from }));
    let kind = match framing {
        Framing::Events => "text/event-stream; charset=utf-8",
        Framing::Lines => "application/x-ndjson",
    };
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_TYPE, kind),
        (header::CACHE_CONTROL, "no-cache"),
        // nginx would otherwise collect the stream before it passes anything on.
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

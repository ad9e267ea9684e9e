//! A connection on which each call shows the client's token.

use std::task::{Context, Poll};

use http::{HeaderValue, Request, Response, header::AUTHORIZATION};
use tonic::{
    body::Body,
    transport::{Channel, channel::ResponseFuture},
};
use tower::Service;

/// A channel, and what is shown on it.
#[derive(Clone, Debug)]
pub(crate) struct Wire {
    channel: Channel,
    shown: Option<HeaderValue>,
}

impl Wire {
    /// Calls go over `channel`, each with `shown`.
    pub fn new(channel: Channel, shown: Option<HeaderValue>) -> Self {
        Self { channel, shown }
    }
}

impl Service<Request<Body>> for Wire {
    type Response = Response<Body>;
    type Error = tonic::transport::Error;
    type Future = ResponseFuture;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.channel.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> ResponseFuture {
        if let Some(shown) = &self.shown {
            request.headers_mut().insert(AUTHORIZATION, shown.clone());
        }
        self.channel.call(request)
    }
}

//! `hotcell.v1.Tensors`, passed on to workers without being read: a call's session is in its metadata.

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use hotcell_proto::{
    error::{Error, Reason},
    session::{DEVICE_KEY, SESSION_KEY, SessionId, WORKER_KEY},
    v1::tensors_server::SERVICE_NAME,
};
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body::{Frame, SizeHint};
use tokio_util::{
    sync::{CancellationToken, WaitForCancellationFutureOwned},
    task::task_tracker::TaskTrackerToken,
};
use tonic::{Status, body::Body, metadata::MetadataMap, server::NamedService};
use tower::{Service, ServiceExt};

use super::{Shared, opening};
use crate::{
    access::Caller,
    fleet::Link,
    tensors::{Call, Lease},
};

type Bytes = <Body as http_body::Body>::Data;

/// The service.
#[derive(Clone)]
pub struct Passed(pub Shared);

impl NamedService for Passed {
    const NAME: &'static str = SERVICE_NAME;
}

impl Service<Request<Body>> for Passed {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let shared = self.0.clone();
        Box::pin(async move {
            Ok(match pass(&shared, request).await {
                Ok(response) => response,
                Err(error) => Status::from(error).into_http(),
            })
        })
    }
}

/// A value of the call's metadata.
fn word<'a>(headers: &'a HeaderMap, key: &str) -> Result<Option<&'a str>, Error> {
    let odd = |_| Error::new(Reason::InvalidArgument, format!("{key} is no plain text"));
    headers
        .get(key)
        .map(HeaderValue::to_str)
        .transpose()
        .map_err(odd)
}

async fn pass(shared: &Shared, mut request: Request<Body>) -> Result<Response<Body>, Error> {
    let caller = Caller::of(request.extensions());
    let opens = request.uri().path().ends_with("/OpenSession");
    let held = match opens {
        true => {
            let (allowed, held) = opening::allow(shared, caller.tenant(""), request).await?;
            request = allowed;
            Some(held)
        }
        false => None,
    };
    let method = request.uri().path().rsplit('/').next().unwrap_or_default();
    let headers = request.headers();
    let (link, channel, lease, over) = match (method, held) {
        (_, Some(held)) => {
            if shared.admission.is_closed() {
                let what = "the scheduler is shutting down";
                return Err(Error::new(Reason::Draining, what));
            }
            let (worker, device) = (word(headers, WORKER_KEY)?, word(headers, DEVICE_KEY)?);
            let link = shared.fleet.for_tensors(worker, device)?;
            let tenant = caller.tenant("");
            let (lease, session) = shared.tensors.open(link, tenant, held).await?;
            (
                Arc::clone(&session.link),
                session.channel(),
                Some(lease),
                session.over.clone(),
            )
        }
        ("Describe", _) if !headers.contains_key(SESSION_KEY) => {
            let (worker, device) = (word(headers, WORKER_KEY)?, word(headers, DEVICE_KEY)?);
            let link = shared.fleet.for_tensors(worker, device)?;
            let channel = link.tensors();
            (link, channel, None, CancellationToken::new())
        }
        _ => {
            let metadata = MetadataMap::from_headers(headers.clone());
            let id = SessionId::of(&metadata)?;
            let session = shared.tensors.find(&id, &shared.fleet, &caller)?;
            (
                Arc::clone(&session.link),
                session.channel(),
                None,
                session.over.clone(),
            )
        }
    };
    let internal = |e| {
        Error::new(
            Reason::Internal,
            format!("a session's name is no header: {e}"),
        )
    };
    let name = lease
        .as_ref()
        .map(|l| HeaderValue::try_from(l.id().to_string()));
    let name = name.transpose().map_err(internal)?;
    match &name {
        Some(name) => {
            request.headers_mut().insert(SESSION_KEY, name.clone());
        }
        // The session's name is all that a worker is to know of where the call came from.
        None => {
            request.headers_mut().remove(WORKER_KEY);
            request.headers_mut().remove(DEVICE_KEY);
        }
    }
    // A session's lease is no call: it ends when the scheduler does.
    let call = lease.is_none().then(|| shared.tensors.enter());
    let answer = channel.oneshot(request);
    let answered = tokio::select! {
        () = shared.abort.cancelled() => return Err(draining()),
        () = over.cancelled() => return Err(broken(&link).await),
        answered = answer => answered,
    };
    let mut response = match answered {
        Ok(response) => response,
        Err(error) => {
            tracing::debug!(worker = link.worker, %error, "a tensor call broke");
            return Err(broken(&link).await);
        }
    };
    if let Some(name) = name {
        response.headers_mut().insert(SESSION_KEY, name);
    }
    let watched = |inner| {
        Body::new(Watched {
            inner,
            state: State::Passing,
            link: Some(Arc::clone(&link)),
            abort: Box::pin(shared.abort.clone().cancelled_owned()),
            over: Box::pin(over.cancelled_owned()),
            _lease: lease,
            _call: call,
            _token: shared.streams.reader(),
        })
    };
    Ok(response.map(watched))
}

fn draining() -> Error {
    Error::new(Reason::Draining, "the scheduler is shutting down")
}

/// Why a call to a worker broke.
async fn broken(link: &Link) -> Error {
    let (what, reason) = match link.is_lost().await {
        true => (
            "died; what its sessions held is lost, open a new one",
            Reason::WorkerLost,
        ),
        false => (
            "ended the session's connection; open a new one",
            Reason::SessionNotFound,
        ),
    };
    Error::new(reason, format!("worker {} {what}", link.worker))
        .with("worker", &link.worker)
        .with("epoch", link.epoch)
}

enum State {
    Passing,
    /// It broke: finding out why.
    Ending(Pin<Box<dyn Future<Output = Error> + Send>>),
    Over,
}

/// A response's body, which ends with a typed status whatever happens to the worker.
struct Watched {
    inner: Body,
    state: State,
    link: Option<Arc<Link>>,
    abort: Pin<Box<WaitForCancellationFutureOwned>>,
    over: Pin<Box<WaitForCancellationFutureOwned>>,
    _lease: Option<Lease>,
    _call: Option<Call>,
    _token: TaskTrackerToken,
}

impl Watched {
    /// Ends with why the conversation with the worker is over.
    fn find_out(&mut self) {
        let link = self.link.take();
        self.state = State::Ending(Box::pin(async move {
            match link {
                Some(link) => broken(&link).await,
                None => draining(),
            }
        }));
    }
}

impl http_body::Body for Watched {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        loop {
            match &mut this.state {
                State::Over => return Poll::Ready(None),
                State::Ending(why) => {
                    let error = ready!(why.as_mut().poll(cx));
                    this.state = State::Over;
                    return Poll::Ready(Some(Ok(trailers(error))));
                }
                State::Passing => {}
            }
            if this.abort.as_mut().poll(cx).is_ready() {
                this.state = State::Over;
                return Poll::Ready(Some(Ok(trailers(draining()))));
            }
            if this.over.as_mut().poll(cx).is_ready() {
                this.find_out();
                continue;
            }
            match ready!(Pin::new(&mut this.inner).poll_frame(cx)) {
                Some(Err(error)) => {
                    tracing::debug!(%error, "a tensor stream broke");
                    this.find_out();
                }
                Some(Ok(frame)) => {
                    if frame.is_trailers() {
                        this.state = State::Over;
                    }
                    return Poll::Ready(Some(Ok(frame)));
                }
                None => {
                    this.state = State::Over;
                    return Poll::Ready(None);
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.state, State::Over)
            || (matches!(self.state, State::Passing) && self.inner.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

fn trailers(error: Error) -> Frame<Bytes> {
    let mut headers = HeaderMap::new();
    // Fails only for a message that is no header, which percent-encoding rules out.
    if Status::from(error).add_header(&mut headers).is_err() {
        headers.insert("grpc-status", HeaderValue::from_static("14"));
    }
    Frame::trailers(headers)
}

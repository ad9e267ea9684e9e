//! OpenSession: a stream whose end frees the session.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
};

use hotcell_proto::{
    error::{Error, Reason},
    limits,
    session::{SESSION_KEY, SessionId},
    v1::{self, session_event::Event},
};
use tokio_stream::Stream;
use tonic::{Request, Response, Status};

use crate::{engine::Engine, host::Host};

/// The stream of a session's events. Dropping it ends the session.
pub struct Lease {
    opened: Option<v1::SessionOpened>,
    over: Arc<AtomicBool>,
    engine: Engine,
}

impl Stream for Lease {
    type Item = Result<v1::SessionEvent, Status>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        match self.opened.take() {
            Some(opened) => Poll::Ready(Some(Ok(v1::SessionEvent {
                event: Some(Event::Opened(opened)),
            }))),
            // Never woken: this side has no reason to end a session but its own end.
            None => Poll::Pending,
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        self.engine.wake();
    }
}

/// Opens a session under the name in the metadata, or a new one.
pub async fn open(
    host: &Host,
    request: Request<v1::OpenSessionRequest>,
) -> Result<Response<Lease>, Error> {
    let (worker, epoch) = host.identity();
    let id = match request.metadata().contains_key(SESSION_KEY) {
        true => SessionId::of(request.metadata())?,
        false => SessionId::random(&worker, epoch)?,
    };
    if id.epoch() != epoch || id.worker() != worker {
        let what = format!("this is worker {worker} of epoch {epoch}, not the session's");
        return Err(Error::new(Reason::InvalidArgument, what));
    }
    let request = request.into_inner();
    if request.name.chars().count() > limits::MAX_SESSION_NAME {
        let limit = limits::MAX_SESSION_NAME;
        let what = format!("a session's name has at most {limit} characters");
        return Err(Error::new(Reason::LimitExceeded, what).with("limit", limit));
    }
    let name = id.to_string();
    // Before the session is there: a caller that leaves while it opens must not leave it behind.
    let mut lease = Lease {
        opened: None,
        over: Arc::default(),
        engine: host.engine().clone(),
    };
    let over = Arc::clone(&lease.over);
    let opened = host
        .engine()
        .tensors(move |plane| plane.open(id, &request, over));
    lease.opened = Some(opened.await?);
    let mut response = Response::new(lease);
    let value = name
        .parse()
        .map_err(|_| Error::new(Reason::Internal, "a session's name is no metadata"))?;
    response.metadata_mut().insert(SESSION_KEY, value);
    Ok(response)
}

//! A tensor session of the scheduler's own on a worker.

use std::sync::Arc;

use hotcell_proto::{
    error::{Error, Reason},
    limits,
    session::SESSION_KEY,
    v1::{self, OpenSessionRequest, session_event::Event, tensors_client::TensorsClient},
};
use tonic::{
    Request, Response, Status, Streaming,
    metadata::{Ascii, MetadataValue},
    transport::Channel,
};

use crate::{
    access::Want,
    fleet::{Link, is_broken, words},
    service::Shared,
    tensors::Lease,
};

/// A session, open until it is dropped.
pub(super) struct Session {
    pub link: Arc<Link>,
    client: TensorsClient<Channel>,
    name: MetadataValue<Ascii>,
    _lease: Lease,
    /// The worker's end of the lease.
    _events: Streaming<v1::SessionEvent>,
}

fn internal(what: impl std::fmt::Display) -> Error {
    Error::new(Reason::Internal, what.to_string())
}

impl Session {
    /// Opens one on a worker, for what a tenant saved. In a `dry_run` nothing takes memory.
    ///
    /// # Errors
    /// The worker's words, [`Reason::WorkerLost`], [`Reason::Overloaded`].
    pub(super) async fn open(
        shared: &Shared,
        link: Arc<Link>,
        tenant: &str,
        dry_run: bool,
    ) -> Result<Self, Error> {
        let held = shared.access.tenants.note(tenant, Want::default());
        let opened = shared.tensors.open(Arc::clone(&link), tenant, held).await?;
        let (lease, session) = opened;
        let name = MetadataValue::try_from(lease.id().to_string()).map_err(internal)?;
        let mut client = TensorsClient::new(session.channel())
            .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
            .max_encoding_message_size(limits::MAX_MESSAGE_BYTES);
        let mut request = Request::new(OpenSessionRequest {
            name: "saved graphs".to_owned(),
            dry_run,
            ..OpenSessionRequest::default()
        });
        request.metadata_mut().insert(SESSION_KEY, name.clone());
        let said = client.open_session(request).await;
        let mut events = answer(&link, said)?;
        let first = events.message().await.map_err(|s| error(&link, &s))?;
        match first.and_then(|event| event.event) {
            Some(Event::Opened(_)) => Ok(Self {
                link,
                client,
                name,
                _lease: lease,
                _events: events,
            }),
            Some(Event::Closed(closed)) => Err(Error::new(
                Reason::Overloaded,
                crate::discover::clip(&closed.reason),
            )),
            None => Err(internal("a worker opened no session and did not say why")),
        }
    }

    /// What to call, and with what.
    pub(super) fn call<T>(&self, message: T) -> (TensorsClient<Channel>, Request<T>) {
        let mut request = Request::new(message);
        let name = self.name.clone();
        request.metadata_mut().insert(SESSION_KEY, name);
        (self.client.clone(), request)
    }

    /// What a call was answered.
    ///
    /// # Errors
    /// The worker's words, or [`Reason::WorkerLost`].
    pub(super) fn said<T>(&self, said: Result<Response<T>, Status>) -> Result<T, Error> {
        answer(&self.link, said)
    }
}

fn error(link: &Link, status: &Status) -> Error {
    match is_broken(status) {
        true => Error::new(
            Reason::WorkerLost,
            format!("worker {} ended amid a call", link.worker),
        ),
        false => words(status),
    }
}

fn answer<T>(link: &Link, said: Result<Response<T>, Status>) -> Result<T, Error> {
    said.map(Response::into_inner).map_err(|s| error(link, &s))
}

//! Tensor sessions that run through this scheduler: which worker each is on, and its connection there.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use hotcell_ipc::transport::Windows;
use hotcell_proto::{
    error::{Error, Reason},
    ids::Epoch,
    limits,
    session::SessionId,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use crate::{
    access::{Caller, Held},
    fleet::{Fleet, Link},
};

/// Sessions of one scheduler.
const MAX_SESSIONS: usize = limits::MAX_SESSIONS * limits::MAX_DEVICES;
/// Connections that one session's client is given to its worker.
const MAX_CONNECTIONS: usize = 4;

/// The sessions. Clones share them.
#[derive(Clone)]
pub struct Sessions(Arc<Inner>);

struct Inner {
    by_id: Mutex<HashMap<SessionId, Arc<Session>>>,
    places: Arc<Semaphore>,
    /// Calls under way.
    calls: watch::Sender<usize>,
}

/// One session: a worker, and a connection of its own to it.
pub struct Session {
    /// Its worker.
    pub link: Arc<Link>,
    /// Whose it is.
    tenant: String,
    channel: Channel,
    /// Cancelled when its lease ends: so do its calls.
    pub over: CancellationToken,
    /// Connections of its own that its client may still be given.
    connections: AtomicUsize,
}

impl Session {
    /// Its connection.
    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// Counts a connection that the client is given.
    ///
    /// # Errors
    /// [`Reason::QuotaExceeded`] when it has had enough.
    pub fn take_connection(&self) -> Result<(), Error> {
        let taken = self
            .connections
            .fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1));
        taken.map(|_| ()).map_err(|_| {
            let what = format!("the session was given {MAX_CONNECTIONS} connections; use those");
            Error::new(Reason::QuotaExceeded, what)
        })
    }
}

/// Ends a session when dropped: its connection closes, and the worker frees what it held.
pub struct Lease {
    sessions: Sessions,
    id: SessionId,
    _place: OwnedSemaphorePermit,
    _held: Held,
}

impl Lease {
    /// The session's name.
    pub fn id(&self) -> &SessionId {
        &self.id
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(session) = self.sessions.table().remove(&self.id) {
            session.over.cancel();
        }
    }
}

/// Counts a call while it lives.
pub struct Call(Sessions);

impl Drop for Call {
    fn drop(&mut self) {
        self.0.0.calls.send_modify(|calls| *calls -= 1);
    }
}

impl Default for Sessions {
    fn default() -> Self {
        Self(Arc::new(Inner {
            by_id: Mutex::default(),
            places: Arc::new(Semaphore::new(MAX_SESSIONS)),
            calls: watch::Sender::new(0),
        }))
    }
}

impl Sessions {
    fn table(&self) -> MutexGuard<'_, HashMap<SessionId, Arc<Session>>> {
        self.0.by_id.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a session on a worker for a tenant, which has it by what it `held`.
    ///
    /// # Errors
    /// [`Reason::Overloaded`] when there are too many, [`Reason::WorkerLost`] when the worker takes no connection.
    pub async fn open(
        &self,
        link: Arc<Link>,
        tenant: &str,
        held: Held,
    ) -> Result<(Lease, Arc<Session>), Error> {
        let full = |_| {
            let what = format!("{MAX_SESSIONS} tensor sessions are open; close one");
            Error::new(Reason::Overloaded, what)
        };
        let place = Arc::clone(&self.0.places)
            .try_acquire_owned()
            .map_err(full)?;
        let id = SessionId::random(&link.worker, Epoch(link.epoch))?;
        let lost = |e: std::io::Error| {
            let what = format!("worker {} took no connection: {e}", link.worker);
            Error::new(Reason::WorkerLost, what)
        };
        let wire = link.connect_tensors().await?;
        let channel = wire.channel(Windows::default()).await.map_err(lost)?;
        let session = Arc::new(Session {
            link,
            tenant: tenant.to_owned(),
            channel,
            over: CancellationToken::new(),
            connections: AtomicUsize::new(MAX_CONNECTIONS),
        });
        self.table().insert(id.clone(), Arc::clone(&session));
        let lease = Lease {
            sessions: self.clone(),
            id,
            _place: place,
            _held: held,
        };
        Ok((lease, session))
    }

    /// The session of this name, if it is the caller's.
    ///
    /// # Errors
    /// [`Reason::HandleStale`] when its worker's process is another one now, [`Reason::WorkerLost`] when there is none, else
    /// [`Reason::SessionNotFound`].
    pub fn find(
        &self,
        id: &SessionId,
        fleet: &Fleet,
        caller: &Caller,
    ) -> Result<Arc<Session>, Error> {
        let table = self.table();
        if let Some(session) = table.get(id).filter(|s| caller.owns(&s.tenant)) {
            return Ok(Arc::clone(session));
        }
        drop(table);
        Err(match fleet.for_tensors(Some(id.worker()), None) {
            Ok(link) if link.epoch != id.epoch().0 => Error::new(
                Reason::HandleStale,
                format!(
                    "the session was on worker {} in epoch {}, now it is epoch {}; open a new session",
                    link.worker,
                    id.epoch(),
                    link.epoch
                ),
            )
            .with("worker", &link.worker)
            .with("epoch", link.epoch),
            Ok(_) => Error::new(
                Reason::SessionNotFound,
                "there is no such session; it ended, open a new one",
            ),
            Err(_) => Error::new(
                Reason::WorkerLost,
                format!(
                    "worker {}, which the session was on, is not there; what it held is lost, open a new one",
                    id.worker()
                ),
            ),
        })
    }

    /// Sessions that are open.
    pub fn count(&self) -> usize {
        self.table().len()
    }

    /// Counts a call until the result is dropped.
    pub fn enter(&self) -> Call {
        self.0.calls.send_modify(|calls| *calls += 1);
        Call(self.clone())
    }

    /// Waits until no call is under way.
    pub async fn idle(&self) {
        // An error would mean that the sender, which is ours, is gone.
        let _ = self.0.calls.subscribe().wait_for(|calls| *calls == 0).await;
    }
}

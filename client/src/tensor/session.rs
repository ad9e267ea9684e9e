//! A client's session on a worker: its connection, what it holds there, its memory.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex, OnceLock, Weak,
        atomic::{AtomicU32, Ordering},
    },
};

use hotcell_graph::{TensorSpec, wire};
use hotcell_proto::{error::Error, v1};

use super::{
    array::{Tensor, invalid, of_graph},
    backend::FlashAttention,
    checked::Road,
    connection::{Connection, Lease, Way, locked},
    recipe::Recipe,
    recover::{Recovering, Recovery, again},
    spread::Group,
};
use crate::connect::{Address, Client, Identity};

/// What a session is opened with.
#[derive(Clone, Debug, Default)]
pub struct SessionOptions {
    /// For listings.
    pub name: String,
    /// Worker, for example `w0`; none: one is chosen.
    pub worker: Option<String>,
    /// Device, for example `cpu:0`; none: one is chosen.
    pub device: Option<String>,
    /// Bytes it may hold; 0: the worker's quota. More are refused with
    /// [`Reason::QuotaExceeded`](crate::Reason::QuotaExceeded), as more tensors and plans are.
    pub max_bytes: u64,
    /// Tensors and caches it may hold; 0: the worker's quota.
    pub max_tensors: u32,
    /// Plans it may hold; 0: the worker's quota.
    pub max_plans: u32,
    /// Compute threads that its graphs may use, of those that the worker has; 0: all. No result depends on it.
    pub threads: u32,
    /// Whether attention may be one kernel.
    pub flash_attention: FlashAttention,
    /// Make nothing, only say what it would take.
    pub dry_run: bool,
    /// Speak through the scheduler even where it could hand over a connection to the worker itself.
    pub relayed: bool,
    /// Go on after the worker died; see [`Recovery`]. None: what it held is lost, and every call says so.
    pub recovery: Option<Recovery>,
    /// What is shown to a scheduler over TCP; none: what the environment says.
    pub identity: Option<Identity>,
}

/// A session. Clones share it; when the last clone and the last tensor are dropped, the worker frees all it held.
#[derive(Clone)]
pub struct Session(Arc<Inner>);

pub(super) struct Inner {
    /// Another one after each loss, in a session that recovers.
    at: Mutex<Arc<Connection>>,
    dry_run: bool,
    /// How further connections are made, and as whom.
    way: Way,
    identity: Option<Identity>,
    streams: AtomicU32,
    /// Ids of streams that are gone, for new ones.
    idle_streams: Arc<Mutex<BTreeSet<u32>>>,
    recovery: Option<Recovering>,
    /// The sessions that it computes expressions with.
    group: OnceLock<Arc<Group>>,
}

impl Session {
    /// Connects to a scheduler, or to a worker run alone, and opens a session there. A scheduler on this host hands over a
    /// connection to the worker itself.
    ///
    /// # Errors
    /// When nobody listens, no worker can serve it, or the quotas are exhausted.
    pub async fn open(address: &Address, options: SessionOptions) -> Result<Self, Error> {
        Self::begin(Way::Address(address.clone()), options).await
    }

    /// Opens a session over a client's connection.
    ///
    /// # Errors
    /// As [`Session::open`].
    pub async fn over(client: &Client, options: SessionOptions) -> Result<Self, Error> {
        Self::begin(Way::Over(client.clone()), options).await
    }

    async fn begin(way: Way, options: SessionOptions) -> Result<Self, Error> {
        let at = way.open(&options).await?.finish(0);
        let dry_run = options.dry_run;
        let identity = options.identity.clone();
        let recovery = match options.recovery.clone() {
            Some(recovery) => Some(Recovering::begin(recovery, way.clone(), options, &at).await?),
            None => None,
        };
        Ok(Self(Arc::new(Inner {
            at: Mutex::new(at),
            dry_run,
            way,
            identity,
            streams: AtomicU32::new(1),
            idle_streams: Arc::default(),
            recovery,
            group: OnceLock::new(),
        })))
    }

    /// Its connection now.
    pub(super) fn connection(&self) -> Arc<Connection> {
        Arc::clone(&locked(&self.0.at))
    }

    /// It goes on over another connection.
    pub(super) fn go_on(&self, connection: Arc<Connection>) {
        let before = std::mem::replace(&mut *locked(&self.0.at), connection);
        drop(before);
    }

    /// A way for a transfer that may break without the session: another connection to the scheduler. One to the worker itself
    /// has nobody in between, and breaks with it.
    pub(super) async fn road(&self, at: &Connection) -> Result<Road, Error> {
        let another = match at.direct {
            true => None,
            false => self.0.way.another(self.0.identity.as_ref()).await?,
        };
        Ok(match another {
            Some(client) => Road::Another(client.tensors_client(), client.peer().to_owned()),
            None => Road::Own(at.rpc()),
        })
    }

    /// What it needs for going on after a loss.
    pub(super) fn recovering(&self) -> Option<&Recovering> {
        self.0.recovery.as_ref()
    }

    pub(super) fn is_same(&self, other: &Session) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(super) fn downgrade(&self) -> Weak<Inner> {
        Arc::downgrade(&self.0)
    }

    pub(super) fn upgrade(weak: &Weak<Inner>) -> Option<Self> {
        weak.upgrade().map(Self)
    }

    /// Takes part in a group from now on.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`](crate::Reason::InvalidArgument) when it is in one.
    pub(super) fn join(&self, group: &Arc<Group>) -> Result<(), Error> {
        let joined = self.0.group.set(Arc::clone(group));
        joined.map_err(|_| invalid("the session is in a spread already"))
    }

    pub(super) fn group(&self) -> Option<Arc<Group>> {
        self.0.group.get().map(Arc::clone)
    }

    /// Whether the tensors of both may be in one expression.
    pub(super) fn mixes_with(&self, other: &Session) -> bool {
        let same = |(a, b): (&Arc<Group>, &Arc<Group>)| Arc::ptr_eq(a, b);
        self.is_same(other)
            || self
                .0
                .group
                .get()
                .zip(other.0.group.get())
                .is_some_and(same)
    }

    pub(super) fn is_dry_run(&self) -> bool {
        self.0.dry_run
    }

    /// Epoch of the worker that serves it; its handles are of this epoch. Another one after a recovery.
    pub fn epoch(&self) -> u64 {
        self.connection().opened.epoch
    }

    /// Compute threads that its graphs may use: what was asked for, or all that the worker has if those are fewer.
    pub fn threads(&self) -> u32 {
        self.connection().opened.threads
    }

    /// Numerics class of what its graphs compute: the device's, and the choices of the session that change numbers. Empty for
    /// a worker of an older release.
    pub fn numerics(&self) -> String {
        self.connection().opened.numerics.clone()
    }

    /// Its name: whoever knows it may use the session. Another one after a recovery.
    pub fn name(&self) -> String {
        self.connection().opened.session.clone()
    }

    /// Why it ended, if it did.
    pub fn closed(&self) -> Option<String> {
        self.connection().closed()
    }

    /// An id for a stream, and where it is given back. The least that is idle: the worker keeps a stream once it has taken a
    /// call, so greater ones may be among those that it refused as too many.
    pub(super) fn next_stream(&self) -> (u32, Arc<Mutex<BTreeSet<u32>>>) {
        let idle = locked(&self.0.idle_streams).pop_first();
        let id = idle.unwrap_or_else(|| self.0.streams.fetch_add(1, Ordering::Relaxed));
        (id, Arc::clone(&self.0.idle_streams))
    }

    /// Why calls go through the scheduler although a connection to the worker was wanted.
    pub fn relayed_because(&self) -> Option<Error> {
        self.connection().relayed_because.clone()
    }

    /// Whether calls go to the worker itself.
    pub fn is_direct(&self) -> bool {
        self.connection().direct
    }

    /// A loaded model's weight, readable and usable in any graph of the session.
    ///
    /// # Errors
    /// [`Reason::ModelNotFound`](crate::Reason::ModelNotFound) or [`Reason::HandleNotFound`](crate::Reason::HandleNotFound).
    pub async fn weight(&self, model: &str, name: &str) -> Result<Tensor, Error> {
        let (remote, spec) = again!(self, at => self.weight_at(&at, model, name))?;
        self.note(&remote, |_| Recipe::weight(model, name));
        Ok(self.tensor_at(remote, spec, "a weight").named(name))
    }

    /// Names, dtypes and shapes of a loaded model's weights.
    ///
    /// # Errors
    /// [`Reason::ModelNotFound`](crate::Reason::ModelNotFound).
    pub async fn weights(&self, model: &str) -> Result<Vec<(String, TensorSpec)>, Error> {
        let request = v1::ListWeightsRequest {
            model: model.to_owned(),
        };
        let answer = again!(self, at => async {
            at.answer(at.rpc().list_weights(at.request(request.clone())).await)
        });
        answer?
            .weights
            .into_iter()
            .map(|w| {
                let spec = wire::decode_tensor_spec(&w.spec.unwrap_or_default());
                Ok((w.name, spec.map_err(|e| of_graph(&e))?))
            })
            .collect()
    }

    /// What the worker's device can do.
    ///
    /// # Errors
    /// When the connection broke.
    pub async fn describe(&self) -> Result<v1::DescribeResponse, Error> {
        again!(self, at => async {
            at.answer(at.rpc().describe(at.request(v1::DescribeRequest {})).await)
        })
    }

    /// What the session holds on the worker.
    ///
    /// # Errors
    /// When the session is gone.
    pub async fn list(&self) -> Result<v1::ListResponse, Error> {
        again!(self, at => async {
            at.answer(at.rpc().list(at.request(v1::ListRequest {})).await)
        })
    }

    /// Computes tensors and keeps them on the worker while the lease lives.
    ///
    /// # Errors
    /// What went wrong computing them.
    pub async fn keep(&self, tensors: &[Tensor]) -> Result<Lease, Error> {
        self.eval(tensors).await?;
        Ok(Lease::of(tensors))
    }

    /// Reports dropped tensors to the worker now, instead of in a moment.
    ///
    /// # Errors
    /// When the session is gone.
    pub async fn flush(&self) -> Result<(), Error> {
        again!(self, at => at.flush())
    }

    /// Stops the queued and running work of all streams; returns how many calls will not be done.
    ///
    /// # Errors
    /// When the session is gone.
    pub async fn cancel(&self) -> Result<u32, Error> {
        let request = v1::CancelRequest {
            stream: 0,
            all: true,
        };
        let answer = again!(self, at => async {
            at.answer(at.rpc().cancel(at.request(request)).await)
        });
        Ok(answer?.cancelled)
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Session(epoch {})", self.epoch())
    }
}

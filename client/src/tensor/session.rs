//! A client's session on a worker: its connection, what it holds there, its memory.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, Weak,
        atomic::{AtomicU32, Ordering},
    },
};

use hotcell_graph::{TensorSpec, wire};
use hotcell_ipc::handoff::{self, Ask};
use hotcell_proto::{
    error::{Error, Reason},
    ids::Epoch,
    limits,
    session::{DEVICE_KEY, HandleId, SESSION_KEY, WORKER_KEY},
    v1::{self, session_event, tensors_client::TensorsClient},
};
use tokio::sync::Notify;
use tonic::{
    Request, Response, Status, Streaming,
    metadata::{AsciiMetadataValue, MetadataMap},
    transport::Channel,
};

use super::{
    array::{State, Tensor, invalid, of_graph},
    program::PlanKey,
};
use crate::connect::{Address, Client, is_unreachable, read_status};

/// Plans that a session keeps for expressions it has seen.
const KEPT_PLANS: usize = 64;

/// What a session is opened with.
#[derive(Clone, Debug, Default)]
pub struct SessionOptions {
    /// For listings.
    pub name: String,
    /// Worker, for example `w0`; none: one is chosen.
    pub worker: Option<String>,
    /// Device, for example `cpu:0`; none: one is chosen.
    pub device: Option<String>,
    /// Bytes it may hold; 0: the worker's quota.
    pub max_bytes: u64,
    /// Compute threads that its graphs may use, of those that the worker has; 0: all. No result depends on it.
    pub threads: u32,
    /// Make nothing, only say what it would take.
    pub dry_run: bool,
    /// Speak through the scheduler even where it could hand over a connection to the worker itself.
    pub relayed: bool,
}

/// A session. Clones share it; when the last clone and the last tensor are dropped, the worker frees all it held.
#[derive(Clone)]
pub struct Session(Arc<Inner>);

struct Inner {
    client: TensorsClient<Channel>,
    channel: Channel,
    peer: String,
    /// The scheduler's socket, where descriptors can be had.
    socket: Option<PathBuf>,
    /// Calls go to the worker itself.
    direct: bool,
    relayed_because: Option<Error>,
    name: AsciiMetadataValue,
    opened: v1::SessionOpened,
    dry_run: bool,
    plans: Mutex<Plans>,
    freed: Arc<Freed>,
    closed: Mutex<Option<String>>,
    streams: AtomicU32,
    /// Ids of streams that are gone, for new ones.
    idle_streams: Arc<Mutex<Vec<u32>>>,
}

/// Handles whose last owner is gone, until they are reported.
#[derive(Default)]
struct Freed {
    handles: Mutex<Vec<v1::Handle>>,
    some: Notify,
}

#[derive(Default)]
struct Plans {
    by_key: HashMap<PlanKey, (Arc<RemotePlan>, u64)>,
    clock: u64,
}

/// A plan on the worker.
pub(super) struct RemotePlan {
    pub handle: v1::Handle,
    freed: Weak<Freed>,
}

/// A tensor on the worker.
pub(super) struct Remote {
    pub handle: v1::Handle,
    freed: Weak<Freed>,
}

fn give_up(freed: &Weak<Freed>, handle: &v1::Handle) {
    if let Some(freed) = freed.upgrade() {
        locked(&freed.handles).push(handle.clone());
        freed.some.notify_one();
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        give_up(&self.freed, &self.handle);
    }
}

impl Drop for RemotePlan {
    fn drop(&mut self) {
        give_up(&self.freed, &self.handle);
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while one of these locks is held.
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

/// Keeps tensors computed and on the worker until it is dropped or released.
#[must_use = "the tensors are only kept while the lease lives"]
pub struct Lease {
    _tensors: Vec<Tensor>,
}

impl Lease {
    /// Ends it; a tensor whose other clones are gone is freed.
    pub fn release(self) {}
}

/// A session that is being opened.
struct Opening {
    rpc: TensorsClient<Channel>,
    channel: Channel,
    peer: String,
    socket: Option<PathBuf>,
    direct: bool,
    name: AsciiMetadataValue,
    opened: v1::SessionOpened,
    events: Streaming<v1::SessionEvent>,
    dry_run: bool,
    relayed_because: Option<Error>,
}

impl Opening {
    async fn begin(client: &Client, options: SessionOptions) -> Result<Self, Error> {
        let peer = client.peer().to_owned();
        let mut rpc = client.tensors_client();
        let mut request = Request::new(v1::OpenSessionRequest {
            name: options.name,
            max_bytes: options.max_bytes,
            dry_run: options.dry_run,
            threads: options.threads,
            ..Default::default()
        });
        let mut put = |key: &'static str, value: &Option<String>| match value {
            Some(value) => {
                let odd = |_| invalid(format!("{key} cannot be {value:?}"));
                let value = value.parse().map_err(odd)?;
                request.metadata_mut().insert(key, value);
                Ok(())
            }
            None => Ok::<_, Error>(()),
        };
        put(WORKER_KEY, &options.worker)?;
        put(DEVICE_KEY, &options.device)?;
        let answer = rpc.open_session(request).await;
        let mut events = answer.map_err(|s| read_status(&peer, &s))?.into_inner();
        let broken = || {
            Error::new(
                Reason::ProtocolViolation,
                "the session's stream does not begin with its name",
            )
        };
        let first = events.message().await.map_err(|s| read_status(&peer, &s))?;
        let Some(session_event::Event::Opened(opened)) = first.and_then(|e| e.event) else {
            return Err(broken());
        };
        Ok(Self {
            rpc,
            channel: client.channel(),
            peer,
            socket: None,
            direct: false,
            name: opened.session.parse().map_err(|_| broken())?,
            opened,
            events,
            dry_run: options.dry_run,
            relayed_because: None,
        })
    }

    /// Has the scheduler hand over a connection to the session's worker. A worker alone is that connection already.
    async fn go_direct(&mut self, socket: &Path) -> Result<(), Error> {
        let path = handoff::path_beside(socket);
        if !path.exists() {
            return Ok(());
        }
        let ask = Ask::Connection {
            session: self.opened.session.clone(),
        };
        let broken = |e: std::io::Error| {
            let what = format!("{} gave no connection: {e}", path.display());
            Error::new(Reason::NoWorker, what)
        };
        let given = handoff::ask(&path, &ask).await.map_err(broken)?;
        let given = given.map_err(|what| Error::new(Reason::WorkerLost, what))?;
        let worker = Client::over_for_tensors(given.fd).await?;
        self.rpc = worker.tensors_client();
        self.channel = worker.channel();
        self.socket = Some(socket.to_owned());
        self.direct = true;
        Ok(())
    }

    fn finish(self) -> Session {
        let session = Session(Arc::new(Inner {
            client: self.rpc,
            channel: self.channel,
            peer: self.peer,
            socket: self.socket,
            direct: self.direct,
            relayed_because: self.relayed_because,
            name: self.name,
            opened: self.opened,
            dry_run: self.dry_run,
            plans: Mutex::default(),
            freed: Arc::default(),
            closed: Mutex::default(),
            streams: AtomicU32::new(1),
            idle_streams: Arc::default(),
        }));
        // Its stream is the lease.
        tokio::spawn(session.clone().downgrade().attend(self.events));
        session
    }
}

impl Session {
    /// Connects to a scheduler, or to a worker run alone, and opens a session there. A scheduler on this host hands over a
    /// connection to the worker itself.
    ///
    /// # Errors
    /// When nobody listens, no worker can serve it, or the quotas are exhausted.
    pub async fn open(address: &Address, options: SessionOptions) -> Result<Self, Error> {
        // Of its own connection: an unread download must not hold up anybody else.
        let client = Client::connect_for_tensors(address).await?;
        let relayed = options.relayed;
        let mut opening = Opening::begin(&client, options).await?;
        if let (Address::Unix(path), false) = (address, relayed) {
            // Without it, the calls go through the scheduler.
            if let Err(error) = opening.go_direct(path).await {
                opening.relayed_because = Some(error);
            }
        }
        Ok(opening.finish())
    }

    /// Opens a session over a client's connection.
    ///
    /// # Errors
    /// As [`Session::open`].
    pub async fn over(client: &Client, options: SessionOptions) -> Result<Self, Error> {
        Ok(Opening::begin(client, options).await?.finish())
    }

    fn downgrade(self) -> Attendant {
        Attendant {
            freed: Arc::clone(&self.0.freed),
            client: self.0.client.clone(),
            name: self.0.name.clone(),
            session: Arc::downgrade(&self.0),
        }
    }

    pub(super) fn is_same(&self, other: &Session) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(super) fn is_dry_run(&self) -> bool {
        self.0.dry_run
    }

    /// Epoch of the worker that serves it; its handles are of this epoch.
    pub fn epoch(&self) -> u64 {
        self.0.opened.epoch
    }

    /// Compute threads that its graphs may use: what was asked for, or all that the worker has if those are fewer.
    pub fn threads(&self) -> u32 {
        self.0.opened.threads
    }

    /// Its name: whoever knows it may use the session.
    pub fn name(&self) -> &str {
        &self.0.opened.session
    }

    /// Why it ended, if it did.
    pub fn closed(&self) -> Option<String> {
        locked(&self.0.closed).clone()
    }

    /// An id for a stream, and where it is given back.
    pub(super) fn next_stream(&self) -> (u32, Arc<Mutex<Vec<u32>>>) {
        let idle = locked(&self.0.idle_streams).pop();
        let id = idle.unwrap_or_else(|| self.0.streams.fetch_add(1, Ordering::Relaxed));
        (id, Arc::clone(&self.0.idle_streams))
    }

    /// The calls of the worker.
    pub(super) fn rpc(&self) -> TensorsClient<Channel> {
        self.0.client.clone()
    }

    /// The connection to the worker.
    pub(super) fn channel(&self) -> Channel {
        self.0.channel.clone()
    }

    /// A request that names the session.
    pub(super) fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        self.sign(request.metadata_mut());
        request
    }

    pub(super) fn sign(&self, metadata: &mut MetadataMap) {
        metadata.insert(SESSION_KEY, self.0.name.clone());
    }

    /// A call's answer, its failure typed.
    pub(super) fn answer<T>(&self, answer: Result<Response<T>, Status>) -> Result<T, Error> {
        answer
            .map(Response::into_inner)
            .map_err(|s| self.status(&s))
    }

    pub(super) fn status(&self, status: &Status) -> Error {
        let error = read_status(&self.0.peer, status);
        // Nobody stands between us and the worker who could say so.
        match self.0.direct && is_unreachable(&error) {
            true => Error::new(
                Reason::WorkerLost,
                "the session's worker died; what it held is lost, open a new session",
            ),
            false => error,
        }
    }

    /// The scheduler's socket, where descriptors can be had.
    pub(super) fn socket(&self) -> Option<&Path> {
        self.0.socket.as_deref()
    }

    /// Why calls go through the scheduler although a connection to the worker was wanted.
    pub fn relayed_because(&self) -> Option<&Error> {
        self.0.relayed_because.as_ref()
    }

    /// Whether calls go to the worker itself.
    pub fn is_direct(&self) -> bool {
        self.0.direct
    }

    /// Takes care of a handle that the worker made.
    pub(super) fn own(&self, handle: v1::Handle) -> Arc<Remote> {
        let freed = Arc::downgrade(&self.0.freed);
        Arc::new(Remote { handle, freed })
    }

    /// The handle of an id that this client chose.
    pub(super) fn named(&self, id: HandleId) -> Arc<Remote> {
        self.own(id.handle(Epoch(self.0.opened.epoch)))
    }

    /// A tensor for what the worker says it holds.
    pub(super) fn adopt(&self, info: v1::TensorInfo) -> Result<Tensor, Error> {
        let odd = || Error::new(Reason::ProtocolViolation, "the worker described no tensor");
        let (Some(handle), Some(v1::tensor_info::Spec::Tensor(spec))) = (info.handle, info.spec)
        else {
            return Err(odd());
        };
        let spec = wire::decode_tensor_spec(&spec).map_err(|e| of_graph(&e))?;
        let state = State::Remote(self.own(handle));
        Ok(Tensor::new(Some(self.clone()), Some(spec), state))
    }

    /// The plan of this key, or what `make` compiles.
    pub(super) fn kept_plan(&self, key: &PlanKey) -> Option<Arc<RemotePlan>> {
        let mut plans = locked(&self.0.plans);
        plans.clock += 1;
        let now = plans.clock;
        let (plan, used) = plans.by_key.get_mut(key)?;
        *used = now;
        Some(Arc::clone(plan))
    }

    pub(super) fn keep_plan(&self, key: PlanKey, plan: &Arc<RemotePlan>) {
        let mut plans = locked(&self.0.plans);
        plans.clock += 1;
        let now = plans.clock;
        if plans.by_key.len() >= KEPT_PLANS {
            let oldest = plans.by_key.iter().min_by_key(|(_, (_, used))| *used);
            if let Some(key) = oldest.map(|(key, _)| key.clone()) {
                plans.by_key.remove(&key);
            }
        }
        plans.by_key.insert(key, (Arc::clone(plan), now));
    }

    /// Compiles a graph; without a handle (a dry run) the plan is empty.
    pub(super) async fn compile_graph(
        &self,
        graph: v1::Graph,
        dry_run: bool,
    ) -> Result<(Option<Arc<RemotePlan>>, v1::PlanMemory), Error> {
        let request = self.request(v1::CompileRequest {
            graph: Some(graph),
            dry_run: dry_run || self.0.dry_run,
            no_fusion: false,
        });
        let answer = self.answer(self.rpc().compile(request).await)?;
        let memory = answer.memory.unwrap_or_default();
        let plan = answer.plan.map(|handle| {
            Arc::new(RemotePlan {
                handle,
                freed: Arc::downgrade(&self.0.freed),
            })
        });
        Ok((plan, memory))
    }

    /// A loaded model's weight, readable and usable in any graph of the session.
    ///
    /// # Errors
    /// [`Reason::ModelNotFound`] or [`Reason::HandleNotFound`].
    pub async fn weight(&self, model: &str, name: &str) -> Result<Tensor, Error> {
        let request = self.request(v1::GetWeightRequest {
            model: model.to_owned(),
            name: name.to_owned(),
        });
        let info = self.answer(self.rpc().get_weight(request).await)?;
        self.adopt(info)
    }

    /// Names, dtypes and shapes of a loaded model's weights.
    ///
    /// # Errors
    /// [`Reason::ModelNotFound`].
    pub async fn weights(&self, model: &str) -> Result<Vec<(String, TensorSpec)>, Error> {
        let request = self.request(v1::ListWeightsRequest {
            model: model.to_owned(),
        });
        let list = self.answer(self.rpc().list_weights(request).await)?.weights;
        list.into_iter()
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
        let request = self.request(v1::DescribeRequest {});
        self.answer(self.rpc().describe(request).await)
    }

    /// What the session holds on the worker.
    ///
    /// # Errors
    /// When the session is gone.
    pub async fn list(&self) -> Result<v1::ListResponse, Error> {
        self.answer(self.rpc().list(self.request(v1::ListRequest {})).await)
    }

    /// Computes tensors and keeps them on the worker while the lease lives.
    ///
    /// # Errors
    /// What went wrong computing them.
    pub async fn keep(&self, tensors: &[Tensor]) -> Result<Lease, Error> {
        self.eval(tensors).await?;
        Ok(Lease {
            _tensors: tensors.to_vec(),
        })
    }

    /// Reports dropped tensors to the worker now, instead of in a moment.
    ///
    /// # Errors
    /// When the session is gone.
    pub async fn flush(&self) -> Result<(), Error> {
        while let Some(request) = self.0.freed.take() {
            let request = self.request(request);
            match self.answer(self.rpc().free(request).await) {
                // A result of a call that was refused was never there; the others of the batch are freed.
                Err(error) if error.reason() == Reason::HandleNotFound => {}
                answered => answered.map(|_| ())?,
            }
        }
        Ok(())
    }

    /// Stops the queued and running work of all streams; returns how many calls will not be done.
    ///
    /// # Errors
    /// When the session is gone.
    pub async fn cancel(&self) -> Result<u32, Error> {
        let request = self.request(v1::CancelRequest {
            stream: 0,
            all: true,
        });
        Ok(self.answer(self.rpc().cancel(request).await)?.cancelled)
    }
}

impl Freed {
    fn take(&self) -> Option<v1::FreeRequest> {
        let mut handles = locked(&self.handles);
        let count = handles.len().min(limits::MAX_CALL_HANDLES);
        let handles: Vec<v1::Handle> = handles.drain(..count).collect();
        (!handles.is_empty()).then_some(v1::FreeRequest { handles })
    }
}

/// The session's background work: it must not keep the session alive.
struct Attendant {
    freed: Arc<Freed>,
    client: TensorsClient<Channel>,
    name: AsciiMetadataValue,
    session: Weak<Inner>,
}

impl Attendant {
    /// Frees what was dropped, and notices the end. Its stream is the lease: when the session is dropped, so is this.
    async fn attend(mut self, mut events: Streaming<v1::SessionEvent>) {
        let gone = loop {
            tokio::select! {
                event = events.message() => match event {
                    Ok(Some(event)) => if let Some(session_event::Event::Closed(closed)) = event.event {
                        break closed.reason;
                    },
                    Ok(None) => break "the worker ended it".to_owned(),
                    Err(status) => break status.message().to_owned(),
                },
                () = self.freed.some.notified() => {
                    while let Some(message) = self.freed.take() {
                        let mut request = Request::new(message);
                        request.metadata_mut().insert(SESSION_KEY, self.name.clone());
                        // What is not there needs no freeing; whoever uses the session next hears of anything else.
                        if let Err(status) = self.client.free(request).await
                            && status.code() != tonic::Code::NotFound
                        {
                            break;
                        }
                    }
                    if self.session.strong_count() == 0 {
                        return;
                    }
                }
            }
        };
        if let Some(session) = self.session.upgrade() {
            *locked(&session.closed) = Some(gone);
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // The attendant sees that nobody is left, and drops the lease.
        self.freed.some.notify_one();
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Session(epoch {})", self.epoch())
    }
}

//! A session's connection to one process of a worker: how it is opened, what is held there, what waits to be freed.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, Weak},
};

use bytes::Bytes;
use hotcell_graph::wire;
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
};

use super::{
    array::{Tensor, invalid, of_graph},
    backend::FlashAttention,
    program::PlanKey,
    recent::Recent,
    recipe::Recipe,
    session::{Session, SessionOptions},
};
use crate::connect::{Address, Client, Identity, Wire, is_unreachable, read_status};

/// Plans that a session keeps for expressions it has seen.
const KEPT_PLANS: usize = 64;

/// A connection. A session has one; one that recovers has another one after each loss.
pub(super) struct Connection {
    /// How many the session had before this one.
    pub generation: u64,
    client: TensorsClient<Wire>,
    channel: Wire,
    peer: String,
    /// The scheduler's socket, where descriptors can be had.
    pub socket: Option<PathBuf>,
    /// Calls go to the worker itself.
    pub direct: bool,
    pub relayed_because: Option<Error>,
    name: AsciiMetadataValue,
    pub opened: v1::SessionOpened,
    plans: Mutex<Recent<PlanKey, Arc<RemotePlan>>>,
    freed: Arc<Freed>,
    closed: Mutex<Option<String>>,
}

/// Handles whose last owner is gone, until they are reported.
#[derive(Default)]
struct Freed {
    handles: Mutex<Vec<v1::Handle>>,
    some: Notify,
    /// Held by whoever reports some of them, until the worker has answered.
    reporting: tokio::sync::Mutex<()>,
}

/// A plan on the worker.
pub(super) struct RemotePlan {
    pub handle: v1::Handle,
    /// The connection it was made over.
    pub generation: u64,
    /// What it is a plan of.
    pub graph: PlanKey,
    freed: Weak<Freed>,
}

/// A tensor on the worker.
pub(super) struct Remote {
    place: Mutex<Place>,
    /// How it can be made again, in a session that recovers.
    recipe: Mutex<Option<Arc<Recipe>>>,
    /// It is a model's weight: it never changes, and costs its session nothing.
    pub is_weight: bool,
}

/// Where a tensor is.
struct Place {
    handle: v1::Handle,
    generation: u64,
    freed: Weak<Freed>,
}

fn give_up(freed: &Weak<Freed>, handle: &v1::Handle) {
    if let Some(freed) = freed.upgrade() {
        locked(&freed.handles).push(handle.clone());
        freed.some.notify_one();
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        give_up(&self.freed, &self.handle);
    }
}

impl Drop for RemotePlan {
    fn drop(&mut self) {
        give_up(&self.freed, &self.handle);
    }
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while one of these locks is held.
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

impl Remote {
    /// Its handle for calls over this connection; `None` when it is not there.
    pub fn handle(&self, at: &Connection) -> Option<v1::Handle> {
        let place = locked(&self.place);
        (place.generation == at.generation).then(|| place.handle.clone())
    }

    /// The same for a call that cannot do without.
    ///
    /// # Errors
    /// [`Reason::WorkerLost`] when it is not there: whoever made sure that it was has been overtaken.
    pub fn handle_for(&self, at: &Connection) -> Result<v1::Handle, Error> {
        self.handle(at).ok_or_else(moved)
    }

    /// How it can be made again; `None` in a session that does not recover.
    pub fn recipe(&self) -> Option<Arc<Recipe>> {
        locked(&self.recipe).clone()
    }

    pub fn set_recipe(&self, recipe: Option<Arc<Recipe>>) -> Option<Arc<Recipe>> {
        std::mem::replace(&mut *locked(&self.recipe), recipe)
    }

    /// Takes the place of another one, which gets this one's.
    pub fn trade(&self, other: &Remote) {
        // In one order, whoever trades with whom: only one restoration runs in a session.
        std::mem::swap(&mut *locked(&self.place), &mut *locked(&other.place));
    }
}

/// The loss of a connection that somebody else found first.
pub(super) fn moved() -> Error {
    Error::new(
        Reason::WorkerLost,
        "the session's worker died while the call was made ready",
    )
}

/// By which way sessions are opened.
#[derive(Clone)]
pub(super) enum Way {
    /// Each over a connection of its own: an unread download must not hold up anybody else.
    Address(Address),
    Over(Client),
}

impl Way {
    /// Another connection to the same scheduler, or worker run alone.
    pub async fn another(&self, identity: Option<&Identity>) -> Result<Option<Client>, Error> {
        match self {
            Self::Over(_) => Ok(None),
            Self::Address(address) => {
                let client = Client::connect_for_tensors(address, identity).await?;
                Ok(Some(client))
            }
        }
    }

    pub async fn open(&self, options: &SessionOptions) -> Result<Opening, Error> {
        let address = match self {
            Self::Over(client) => return Opening::begin(client, options).await,
            Self::Address(address) => address,
        };
        let client = Client::connect_for_tensors(address, options.identity.as_ref()).await?;
        let mut opening = Opening::begin(&client, options).await?;
        if let (Address::Unix(path), false) = (address, options.relayed) {
            // Without it, the calls go through the scheduler.
            if let Err(error) = opening.go_direct(path).await {
                opening.relayed_because = Some(error);
            }
        }
        Ok(opening)
    }
}

/// A session that is being opened.
pub(super) struct Opening {
    rpc: TensorsClient<Wire>,
    channel: Wire,
    peer: String,
    socket: Option<PathBuf>,
    direct: bool,
    name: AsciiMetadataValue,
    opened: v1::SessionOpened,
    events: Streaming<v1::SessionEvent>,
    relayed_because: Option<Error>,
}

impl Opening {
    async fn begin(client: &Client, options: &SessionOptions) -> Result<Self, Error> {
        let peer = client.peer().to_owned();
        let mut rpc = client.tensors_client();
        let mut request = Request::new(v1::OpenSessionRequest {
            name: options.name.clone(),
            max_bytes: options.max_bytes,
            dry_run: options.dry_run,
            threads: options.threads,
            max_tensors: options.max_tensors,
            max_plans: options.max_plans,
            fused_attention: options.flash_attention.to_wire().into(),
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
        // It tells what it computes in, or it does not know what was asked for.
        if options.flash_attention != FlashAttention::Auto && opened.numerics.is_empty() {
            let what = format!(
                "{peer} has a release that cannot choose how attention is computed; choose auto"
            );
            return Err(Error::new(Reason::OpUnsupported, what));
        }
        Ok(Self {
            rpc,
            channel: client.channel(),
            peer,
            socket: None,
            direct: false,
            name: opened.session.parse().map_err(|_| broken())?,
            opened,
            events,
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

    pub fn finish(self, generation: u64) -> Arc<Connection> {
        let connection = Arc::new(Connection {
            generation,
            client: self.rpc,
            channel: self.channel,
            peer: self.peer,
            socket: self.socket,
            direct: self.direct,
            relayed_because: self.relayed_because,
            name: self.name,
            opened: self.opened,
            plans: Mutex::new(Recent::new(KEPT_PLANS)),
            freed: Arc::default(),
            closed: Mutex::default(),
        });
        // Its stream is the lease.
        tokio::spawn(Attendant::of(&connection).attend(self.events));
        connection
    }
}

impl Connection {
    /// Why the session ended, if it did.
    pub fn closed(&self) -> Option<String> {
        locked(&self.closed).clone()
    }

    /// The calls of the worker.
    pub fn rpc(&self) -> TensorsClient<Wire> {
        self.client.clone()
    }

    /// The connection to the worker.
    pub fn channel(&self) -> Wire {
        self.channel.clone()
    }

    /// A request that names the session.
    pub fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        self.sign(request.metadata_mut());
        request
    }

    fn sign(&self, metadata: &mut MetadataMap) {
        metadata.insert(SESSION_KEY, self.name.clone());
    }

    /// A call's answer, its failure typed.
    pub fn answer<T>(&self, answer: Result<Response<T>, Status>) -> Result<T, Error> {
        answer
            .map(Response::into_inner)
            .map_err(|s| self.status(&s))
    }

    pub fn status(&self, status: &Status) -> Error {
        let error = read_status(&self.peer, status);
        // Nobody stands between us and the worker who could say so.
        match self.direct && is_unreachable(&error) {
            true => Error::new(
                Reason::WorkerLost,
                "the session's worker died; what it held is lost, open a new session",
            ),
            false => error,
        }
    }

    /// Takes care of a handle that the worker made.
    fn own(&self, handle: v1::Handle, is_weight: bool) -> Arc<Remote> {
        Arc::new(Remote {
            place: Mutex::new(Place {
                handle,
                generation: self.generation,
                freed: Arc::downgrade(&self.freed),
            }),
            recipe: Mutex::default(),
            is_weight,
        })
    }

    /// The handle of an id that this client chose.
    pub fn named(&self, id: HandleId) -> Arc<Remote> {
        self.own(id.handle(Epoch(self.opened.epoch)), false)
    }

    /// What the worker says it holds, and its dtype and shape.
    pub fn adopt(
        &self,
        info: v1::TensorInfo,
    ) -> Result<(Arc<Remote>, hotcell_graph::TensorSpec), Error> {
        let odd = || Error::new(Reason::ProtocolViolation, "the worker described no tensor");
        let (Some(handle), Some(v1::tensor_info::Spec::Tensor(spec))) = (info.handle, info.spec)
        else {
            return Err(odd());
        };
        let spec = wire::decode_tensor_spec(&spec).map_err(|e| of_graph(&e))?;
        Ok((self.own(handle, !info.model.is_empty()), spec))
    }

    /// The plan of this key, if it is kept.
    pub fn kept_plan(&self, key: &PlanKey) -> Option<Arc<RemotePlan>> {
        locked(&self.plans).get(key)
    }

    pub fn keep_plan(&self, plan: &Arc<RemotePlan>) {
        let forgotten = locked(&self.plans).insert(plan.graph.clone(), Arc::clone(plan));
        drop(forgotten);
    }

    /// Compiles a graph; without a handle (a dry run) the plan is empty.
    pub async fn compile(
        &self,
        graph: v1::Graph,
        key: PlanKey,
        dry_run: bool,
    ) -> Result<(Option<Arc<RemotePlan>>, v1::PlanMemory), Error> {
        let request = self.request(v1::CompileRequest {
            graph: Some(graph),
            dry_run,
            no_fusion: false,
            encoded: Vec::new(),
        });
        let answer = self.answer(self.rpc().compile(request).await)?;
        let memory = answer.memory.unwrap_or_default();
        let plan = answer.plan.map(|handle| {
            Arc::new(RemotePlan {
                handle,
                generation: self.generation,
                graph: key,
                freed: Arc::downgrade(&self.freed),
            })
        });
        Ok((plan, memory))
    }

    /// Reports dropped tensors to the worker now. When it returns, the worker knows of all that were dropped before.
    pub async fn flush(&self) -> Result<(), Error> {
        let _reporting = self.freed.reporting.lock().await;
        while let Some(request) = self.freed.take() {
            let request = self.request(request);
            match self.answer(self.rpc().free(request).await) {
                // A result of a call that was refused was never there; the others of the batch are freed.
                Err(error) if error.reason() == Reason::HandleNotFound => {}
                answered => answered.map(|_| ())?,
            }
        }
        Ok(())
    }

    /// Uploads bytes from the target's offset on.
    pub async fn send(
        &self,
        target: v1::UploadTarget,
        bytes: Bytes,
    ) -> Result<v1::TensorInfo, Error> {
        let answer = self.answer(self.rpc().upload(self.request(chunks(target, bytes))).await)?;
        let missing = || {
            Error::new(
                Reason::ProtocolViolation,
                "the upload's answer names no tensor",
            )
        };
        answer.tensor.ok_or_else(missing)
    }
}

/// An upload's messages: bytes from the target's offset on.
pub(super) fn chunks(
    target: v1::UploadTarget,
    bytes: Bytes,
) -> impl tokio_stream::Stream<Item = v1::UploadChunk> + Send + 'static {
    let first = v1::UploadChunk {
        target: Some(target),
        data: Bytes::new(),
    };
    let chunks = (0..bytes.len())
        .step_by(limits::TENSOR_CHUNK)
        .map(move |start| {
            let end = bytes.len().min(start + limits::TENSOR_CHUNK);
            v1::UploadChunk {
                target: None,
                data: bytes.slice(start..end),
            }
        });
    tokio_stream::iter(std::iter::once(first).chain(chunks))
}

impl Freed {
    fn take(&self) -> Option<v1::FreeRequest> {
        let mut handles = locked(&self.handles);
        let count = handles.len().min(limits::MAX_CALL_HANDLES);
        let handles: Vec<v1::Handle> = handles.drain(..count).collect();
        (!handles.is_empty()).then_some(v1::FreeRequest { handles })
    }
}

/// A connection's background work: it must not keep the session alive.
struct Attendant {
    freed: Arc<Freed>,
    client: TensorsClient<Wire>,
    name: AsciiMetadataValue,
    connection: Weak<Connection>,
}

impl Attendant {
    fn of(connection: &Arc<Connection>) -> Self {
        Self {
            freed: Arc::clone(&connection.freed),
            client: connection.client.clone(),
            name: connection.name.clone(),
            connection: Arc::downgrade(connection),
        }
    }

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
                    let _reporting = self.freed.reporting.lock().await;
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
                    if self.connection.strong_count() == 0 {
                        return;
                    }
                }
            }
        };
        if let Some(connection) = self.connection.upgrade() {
            *locked(&connection.closed) = Some(gone);
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The attendant sees that nobody is left, and drops the lease.
        self.freed.some.notify_one();
    }
}

/// Keeps tensors computed and on the worker until it is dropped or released.
#[must_use = "the tensors are only kept while the lease lives"]
pub struct Lease {
    _tensors: Vec<Tensor>,
}

impl Lease {
    pub(super) fn of(tensors: &[Tensor]) -> Self {
        let _tensors = tensors.to_vec();
        Self { _tensors }
    }

    /// Ends it; a tensor whose other clones are gone is freed.
    pub fn release(self) {}
}

impl Session {
    /// A tensor for what is on the worker; `made` says in an error how it was made.
    pub(super) fn tensor_at(
        &self,
        remote: Arc<Remote>,
        spec: hotcell_graph::TensorSpec,
        made: &'static str,
    ) -> Tensor {
        if let Some(recipe) = remote.recipe() {
            recipe.describe(&spec, made, None);
        }
        Tensor::new(
            Some(self.clone()),
            Some(spec),
            super::array::State::Remote(remote),
        )
    }
}

//! What this worker has: its engine, its loaded models, and the descriptors that arrived for it.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use hotcell_ipc::{
    descriptors::{BatchError, Collector, DescriptorReceiver, is_end},
    memory::SharedMapping,
    transport::{Windows, incoming_once},
    unsealed::{UnsealedMapping, is_clients_memory},
};
use hotcell_proto::{
    error::{Error, Reason},
    ids::Epoch,
    limits, v1,
};
use tokio::{
    sync::{Notify, Semaphore},
    task::spawn_blocking,
};

use crate::{
    confine::Report,
    engine::Engine,
    generate::grammar::Grammars,
    last_words::MappedFiles,
    model::text::ModelText,
    packing::{Copies, Packer, Wanted},
    repair::Guarded,
    service::{debug_server, tensors_server},
    session::shared::Mapped,
    weights::Weights,
};

mod loading;

pub use loading::map_file;

/// How long the descriptors of a load may take after its call.
const DESCRIPTOR_WAIT: Duration = Duration::from_secs(5);

/// How long a packing may wait for the end of the one before it.
const PACKER_WAIT: Duration = Duration::from_secs(60);

/// Rendering and tokenising calls at once.
const TEXT_THREADS: usize = 2;

/// Tensors hashed whole at once.
const HASH_THREADS: usize = 2;
/// Graphs verified and planned at once.
const GRAPH_THREADS: usize = 2;
/// Calls at once on one connection for tensors; the session's lease is one of them.
pub const TENSOR_STREAMS: u32 = 64;
/// Sets of descriptors for shared memory that no call has asked for yet, at most.
const SHARED_SETS: usize = 64;
/// Descriptors of one load: a model's files, a packed copy of each, its weights on the device, and a socket.
const LOAD_SET: usize = 2 * limits::MAX_MODEL_FILES + limits::MAX_KEPT_PIECES + 1;
/// Sets of the scheduler's own that no call has asked for yet, at most.
const OWN_SETS: usize = limits::MAX_MODELS + TENSOR_CONNECTIONS;

/// Connections for tensors besides the first, at once: two roads for every session.
const TENSOR_CONNECTIONS: usize = 2 * limits::MAX_SESSIONS;

/// A model that is ready.
#[derive(Debug)]
pub struct Loaded {
    /// Its name.
    pub name: String,
    /// Tokenizer and template.
    pub text: ModelText,
    /// Positions of one sequence at most.
    pub context: usize,
    /// Width of its logits.
    pub vocab: u32,
    /// Its end tokens.
    pub end_tokens: Vec<u32>,
    /// What its requests need to follow grammars.
    pub grammars: Grammars,
    /// Where equal requests give equal bits.
    pub numerics: v1::NumericsClass,
    /// For people and for the scheduler.
    pub summary: v1::ModelSummary,
    /// Tokens its cache holds.
    pub cache_tokens: u64,
    /// Tokens of one of its blocks.
    pub block_tokens: u32,
    /// Its tensors, in place in its files.
    pub weights: Weights,
    /// What of it the device likes packed.
    pub packing: Wanted,
    /// What of it stays in the device's memory, if the scheduler has not known.
    pub kept: Option<v1::KeptWeights>,
    /// Whether it was found there.
    pub found: bool,
    /// Whether what was left there is not what it was.
    pub damaged: bool,
    /// Bytes of it that stay there.
    kept_bytes: u64,
    /// What it is computed from, if that is packed.
    packed: Mutex<Option<(Copies, MappedFiles)>>,
    /// Set once it is unloaded.
    gone: AtomicBool,
    /// Tells a fault in its files from any other.
    _mapped: MappedFiles,
}

impl Loaded {
    /// Whether it is computed from packed copies.
    pub fn is_packed(&self) -> bool {
        locked(&self.packed).is_some()
    }

    /// Whether it was unloaded.
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// The first file that was changed since it was handed out, if any.
    fn changed_file(&self) -> String {
        if let Some(file) = self.weights.changed_file() {
            return file.to_owned();
        }
        let packed = locked(&self.packed);
        let mut changed = packed.iter().flat_map(|(copies, _)| copies.all());
        match changed.any(|copy| !copy.unchanged()) {
            true => "a packed copy".to_owned(),
            false => String::new(),
        }
    }
}

/// Descriptors that arrived, by tag.
#[derive(Default)]
struct Arrived {
    sets: Mutex<Sets>,
    notify: Notify,
}

/// Clients can have memory shared as often as they like, so that is kept apart from what the scheduler needs.
#[derive(Default)]
struct Sets {
    own: BTreeMap<u64, Vec<OwnedFd>>,
    /// The oldest first.
    shared: VecDeque<(u64, Vec<OwnedFd>)>,
}

impl Sets {
    fn insert(&mut self, tag: u64, set: Vec<OwnedFd>) {
        // Sets that no call asks for must not pile up: the oldest goes.
        if tag < limits::FIRST_SHARED_TAG {
            if self.own.len() >= OWN_SETS {
                self.own.pop_first();
            }
            self.own.insert(tag, set);
        } else {
            if self.shared.len() >= SHARED_SETS {
                self.shared.pop_front();
            }
            self.shared.push_back((tag, set));
        }
    }

    fn remove(&mut self, tag: u64) -> Option<Vec<OwnedFd>> {
        if tag < limits::FIRST_SHARED_TAG {
            return self.own.remove(&tag);
        }
        let at = self.shared.iter().position(|(t, _)| *t == tag)?;
        self.shared.remove(at).map(|(_, set)| set)
    }
}

/// The worker's shared state. Clones share it.
#[derive(Clone)]
pub struct Host(Arc<Inner>);

struct Inner {
    engine: Engine,
    confinement: Report,
    models: Mutex<HashMap<String, Arc<Loaded>>>,
    places: Arc<AtomicUsize>,
    draining: AtomicBool,
    arrived: Arc<Arrived>,
    /// Who this is: name and epoch.
    identity: Mutex<Option<(String, Epoch)>>,
    tensor_connections: Arc<Semaphore>,
    /// Bounds the text work that waits for a thread: a call that was given up must not leave its prompt behind.
    text: Arc<Semaphore>,
    /// Bounds hashing of whole tensors.
    hashing: Arc<Semaphore>,
    /// Bounds the graphs that are verified and planned, whichever connection they came on.
    graphs: Arc<Semaphore>,
    /// One thread packs weights.
    packing: Arc<Semaphore>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while the lock was held cannot have left a half-changed map: inserts and removes are single calls.
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

impl Host {
    /// A worker without models.
    pub fn new(engine: Engine, confinement: Report) -> Self {
        Self(Arc::new(Inner {
            engine,
            confinement,
            models: Mutex::default(),
            places: Arc::default(),
            draining: AtomicBool::new(false),
            arrived: Arc::default(),
            identity: Mutex::default(),
            tensor_connections: Arc::new(Semaphore::new(TENSOR_CONNECTIONS)),
            text: Arc::new(Semaphore::new(TEXT_THREADS)),
            hashing: Arc::new(Semaphore::new(HASH_THREADS)),
            graphs: Arc::new(Semaphore::new(GRAPH_THREADS)),
            packing: Arc::new(Semaphore::new(1)),
        }))
    }

    /// The engine.
    pub fn engine(&self) -> &Engine {
        &self.0.engine
    }

    /// Says who this is. A standby is told again when it takes a worker's place, before anybody has a session.
    pub fn set_identity(&self, worker: &str, epoch: Epoch) {
        *locked(&self.0.identity) = Some((worker.to_owned(), epoch));
    }

    /// Name and epoch of this worker.
    pub fn identity(&self) -> (String, Epoch) {
        let unnamed = || ("w0".to_owned(), Epoch(0));
        locked(&self.0.identity).clone().unwrap_or_else(unnamed)
    }

    /// Names of the loaded models.
    pub fn models(&self) -> Vec<String> {
        let mut names: Vec<String> = locked(&self.0.models).keys().cloned().collect();
        names.sort_unstable();
        names
    }

    /// Bytes of the mapped files of each model, and of their packed copies.
    pub fn weights_in_use(&self) -> Vec<v1::MemoryUse> {
        let mut uses = Vec::new();
        for model in locked(&self.0.models).values() {
            let mut add = |kind: &str, bytes: u64| {
                uses.push(v1::MemoryUse {
                    kind: kind.to_owned(),
                    model: model.name.clone(),
                    bytes,
                });
            };
            let files = model.weights.files().iter();
            add("weights", files.map(|file| file.mapping.len() as u64).sum());
            if model.kept_bytes > 0 {
                add("weights_kept", model.kept_bytes);
            }
            if let Some((copies, _)) = &*locked(&model.packed) {
                add("packed", copies.all().map(|copy| copy.len() as u64).sum());
            }
        }
        uses.sort_unstable_by(|a, b| (&a.model, &a.kind).cmp(&(&b.model, &b.kind)));
        uses
    }

    /// What of its confinement is in force.
    pub fn confinement(&self) -> &Report {
        &self.0.confinement
    }

    /// Counts the requests inside.
    pub fn places(&self) -> &Arc<AtomicUsize> {
        &self.0.places
    }

    /// Refuses new requests and returns when the running ones have ended.
    ///
    /// # Errors
    /// When the engine has ended.
    pub async fn drain(&self) -> Result<(), Error> {
        self.0.draining.store(true, Ordering::Release);
        self.0.engine.drain().await
    }

    /// Whether new requests are refused.
    ///
    /// # Errors
    /// [`Reason::Draining`] if so.
    pub fn accepting(&self) -> Result<(), Error> {
        if self.0.draining.load(Ordering::Acquire) {
            return Err(Error::new(Reason::Draining, "this worker is shutting down"));
        }
        Ok(())
    }

    /// The model of this name; without a name, the only one.
    ///
    /// # Errors
    /// [`Reason::ModelNotFound`] naming what there is.
    pub fn model(&self, name: &str) -> Result<Arc<Loaded>, Error> {
        let models = locked(&self.0.models);
        let found = match (name, models.len()) {
            ("", 1) => models.values().next(),
            _ => models.get(name),
        };
        found.cloned().ok_or_else(|| {
            let mut names: Vec<&str> = models.keys().map(String::as_str).collect();
            names.sort_unstable();
            let what = match (name, names.as_slice()) {
                (_, []) => format!("no model {name:?}: none is loaded"),
                ("", _) => format!("which model? There are {}", names.join(", ")),
                _ => format!("no model {name:?}; loaded are {}", names.join(", ")),
            };
            Error::new(Reason::ModelNotFound, what).with("model", name)
        })
    }

    /// Places for those who hash whole tensors.
    pub fn hashing(&self) -> Arc<Semaphore> {
        Arc::clone(&self.0.hashing)
    }

    /// Places for those who verify and plan graphs.
    pub fn graphs(&self) -> Arc<Semaphore> {
        Arc::clone(&self.0.graphs)
    }

    /// Runs text work beside the event loop, a few calls at a time, so that a long prompt stalls no stream.
    ///
    /// # Errors
    /// What the work says, or [`Reason::Internal`] when it panicked.
    pub async fn text_work<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let failed = |e: &dyn std::fmt::Display| {
            Error::new(Reason::Internal, format!("text work failed: {e}"))
        };
        // Waited for here, where a caller that leaves stops waiting; on the thread it could not.
        let permit = Arc::clone(&self.0.text)
            .acquire_owned()
            .await
            .map_err(|e| failed(&e))?;
        let work = move || {
            let result = work();
            drop(permit);
            result
        };
        tokio::task::spawn_blocking(work)
            .await
            .map_err(|e| failed(&e))?
    }

    /// Starts the thread that receives descriptors.
    ///
    /// # Errors
    /// When the socket is not one for descriptors or the system gives no thread.
    pub fn receive_descriptors(&self, socket: OwnedFd) -> std::io::Result<()> {
        let receiver = DescriptorReceiver::new(socket)?;
        let arrived = Arc::clone(&self.0.arrived);
        let receive = move || {
            let mut collector = Collector::new(limits::MAX_MODELS, LOAD_SET);
            loop {
                let batch = match receiver.recv() {
                    Ok(batch) => batch,
                    // What one packet lacks says nothing about the next.
                    Err(error) if error.get_ref().is_some_and(|e| e.is::<BatchError>()) => {
                        tracing::warn!(%error, "descriptors refused");
                        continue;
                    }
                    Err(error) => {
                        if !is_end(&error) {
                            tracing::error!(%error, "the descriptor socket failed; no further model can be loaded");
                        }
                        return;
                    }
                };
                match collector.add(batch) {
                    Ok(Some((tag, set))) => {
                        locked(&arrived.sets).insert(tag, set);
                        arrived.notify.notify_waiters();
                    }
                    Ok(None) => {}
                    Err(error) => tracing::warn!(%error, "descriptors refused"),
                }
            }
        };
        thread::Builder::new()
            .name("descriptors".to_owned())
            .spawn(receive)?;
        Ok(())
    }

    pub(crate) async fn descriptors(&self, tag: u64) -> Result<Vec<OwnedFd>, Error> {
        let arrived = &self.0.arrived;
        let take = async {
            loop {
                let notified = arrived.notify.notified();
                tokio::pin!(notified);
                notified.as_mut().enable();
                if let Some(set) = locked(&arrived.sets).remove(tag) {
                    return set;
                }
                notified.await;
            }
        };
        tokio::time::timeout(DESCRIPTOR_WAIT, take)
            .await
            .map_err(|_| {
                Error::new(
                    Reason::ProtocolViolation,
                    format!("the descriptors under tag {tag} did not come"),
                )
            })
    }

    async fn descriptor(&self, tag: u64) -> Result<OwnedFd, Error> {
        let mut set = self.descriptors(tag).await?;
        match (set.pop(), set.len()) {
            (Some(only), 0) => Ok(only),
            (_, more) => {
                let what = format!("{} descriptors came where one is due", more + 1);
                Err(Error::new(Reason::ProtocolViolation, what))
            }
        }
    }

    /// Maps the shared memory whose descriptor comes under `tag`: all of what the scheduler made and sealed; `bytes` from
    /// `at` on of a client's own, which is the only other thing that the scheduler hands out under such a tag.
    ///
    /// # Errors
    /// When it does not come, is neither, or has fewer bytes.
    pub async fn shared_memory(&self, tag: u64, at: u64, bytes: usize) -> Result<Mapped, Error> {
        // The tag is a client's word: that nothing comes under it is no fault of the scheduler's.
        let refused = |what: String| Error::new(Reason::InvalidArgument, what);
        if tag < limits::FIRST_SHARED_TAG {
            return Err(refused(format!("{tag} is no tag of shared memory")));
        }
        let fd = self.descriptor(tag).await;
        let fd = fd.map_err(|error| refused(error.message().to_owned()))?;
        if !is_clients_memory(&fd).unwrap_or(false) {
            let mapping = SharedMapping::of_memory(fd).map_err(|e| refused(e.to_string()))?;
            return Ok(Mapped::Sealed(mapping));
        }
        // Beside the event loop: all its pages are looked for.
        let mapping = spawn_blocking(move || UnsealedMapping::of_file(fd, at, bytes)).await;
        let mapping = mapping.map_err(|e| Error::new(Reason::Internal, e.to_string()))?;
        let mapping = mapping.map_err(|e| refused(e.to_string()))?;
        let guarded = Guarded::new(mapping).ok_or_else(|| {
            let what = "the worker has as much memory of clients mapped as it can guard";
            Error::new(Reason::LimitExceeded, what)
        })?;
        Ok(Mapped::Client(guarded))
    }

    /// Serves tensors on one more connection, whose end comes under `tag`, until it is closed; or, if it is `for_debug`, one
    /// who looks into this worker. Ends for tensors are handed to clients, who may not.
    ///
    /// # Errors
    /// When it does not come, or there are too many.
    pub async fn open_tensors(&self, tag: u64, for_debug: bool) -> Result<(), Error> {
        let fd = self.descriptor(tag).await?;
        let places = Arc::clone(&self.0.tensor_connections);
        let place = places.try_acquire_owned().map_err(|_| {
            let what = format!("there are {TENSOR_CONNECTIONS} connections for tensors already");
            Error::new(Reason::Overloaded, what)
        })?;
        let (incoming, end) = incoming_once(fd);
        let (_, health) = tonic_health::server::health_reporter();
        let server = Windows::default()
            .server()
            .max_concurrent_streams(TENSOR_STREAMS)
            .add_optional_service((!for_debug).then(|| tensors_server(self.clone())))
            .add_optional_service(for_debug.then(|| debug_server(self.clone(), false)))
            .add_service(health);
        tokio::spawn(async move {
            let served = server.serve_with_incoming_shutdown(incoming, async move {
                end.wait().await;
            });
            if let Err(error) = served.await {
                tracing::warn!(%error, "a connection for tensors failed");
            }
            drop(place);
        });
        Ok(())
    }

    /// Computes a model's known answer, and hashes a part of its weights if one is asked for.
    ///
    /// # Errors
    /// As [`Engine::check`].
    pub async fn check(
        &self,
        model: &str,
        steps: u32,
        part: Option<u32>,
    ) -> Result<v1::CheckResponse, Error> {
        let model = self.model(model)?;
        let answers = self.0.engine.check(model.name.clone(), steps).await?;
        let hash = move || {
            let weights = &model.weights;
            let count = weights.parts();
            let index = part.and_then(|part| part.checked_rem(count));
            let part = index.and_then(|index| {
                Some(v1::WeightsPart {
                    index,
                    count,
                    hash: weights.part(index)?.to_vec(),
                })
            });
            // It is not computed from: its pages go as they came.
            if let (Some(part), true) = (&part, model.is_packed()) {
                weights.forget_part(part.index);
            }
            (part, model.changed_file())
        };
        // Beside the event loop: what the kernel dropped comes from the disk again.
        let hashed = tokio::task::spawn_blocking(hash).await;
        let (weights, changed_file) = hashed
            .map_err(|e| Error::new(Reason::Internal, format!("hashing weights failed: {e}")))?;
        Ok(v1::CheckResponse {
            answers: answers.iter().map(|hash| hash.to_vec()).collect(),
            weights,
            changed_file,
        })
    }

    /// Begins to pack weights of a model into the memory whose descriptor comes under the request's tag.
    ///
    /// # Errors
    /// [`Reason::Overloaded`] while others are packed; when there is no such model, or no such memory.
    pub async fn packer(&self, request: v1::PackRequest) -> Result<Packer, Error> {
        let memory = self.descriptor(request.tag).await?;
        let refused = |e: std::io::Error| Error::new(Reason::InvalidArgument, e.to_string());
        let memory = SharedMapping::of_memory(memory).map_err(refused)?;
        // One that was given up ends with its piece.
        let one = Arc::clone(&self.0.packing).acquire_owned();
        let one = tokio::time::timeout(PACKER_WAIT, one).await;
        let one = one
            .ok()
            .and_then(Result::ok)
            .ok_or_else(|| Error::new(Reason::Overloaded, "other weights are packed just now"))?;
        Packer::new(self.model(&request.model)?, &request.files, memory, one)
    }

    /// Computes a model from packed copies, whose descriptors come under the request's tag, from its next step on.
    ///
    /// # Errors
    /// When they do not come, or [`Reason::ModelChanged`] when they are no such copies.
    pub async fn use_packed(&self, request: v1::UsePackedRequest) -> Result<(), Error> {
        let fds = self.descriptors(request.tag).await?;
        let model = self.model(&request.model)?;
        let copies = Copies::map(request.packed.unwrap_or_default(), fds)?;
        self.take_copies(&model, copies).await
    }

    /// Forgets a model; its requests end.
    ///
    /// # Errors
    /// [`Reason::ModelNotFound`] when there is none of this name.
    pub async fn unload(&self, name: &str) -> Result<(), Error> {
        let model = self.model(name)?;
        model.gone.store(true, Ordering::Release);
        let name = model.name.clone();
        drop(model);
        self.0.engine.unload(name.clone()).await?;
        locked(&self.0.models).remove(&name);
        Ok(())
    }
}

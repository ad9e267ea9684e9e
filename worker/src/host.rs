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
    memory::{Mapping, SharedMapping},
    transport::{Windows, incoming_once},
};
use hotcell_proto::{
    error::{Error, Reason},
    ids::Epoch,
    limits, v1,
};
use tokio::sync::{Notify, Semaphore, mpsc};

use crate::{
    engine::Engine,
    error::of_model,
    generate::grammar::Grammars,
    last_words::MappedFiles,
    model::{run::RunShape, text::ModelText},
    service::tensors_server,
    weights::{ModelFile, ModelSource, Weights},
};

/// How long the descriptors of a load may take after its call.
const DESCRIPTOR_WAIT: Duration = Duration::from_secs(5);
/// Bytes between two progress reports of a load.
const PROGRESS_BYTES: usize = 32 << 20;
/// Page size assumed when touching pages; touching more often than needed is harmless.
const PAGE: usize = 4096;

/// Rendering and tokenising calls at once.
const TEXT_THREADS: usize = 2;

/// Tensors hashed whole at once.
const HASH_THREADS: usize = 2;
/// Graphs verified at once.
const GRAPH_THREADS: usize = 2;
/// Calls at once on one connection for tensors; the session's lease is one of them.
pub const TENSOR_STREAMS: u32 = 64;
/// Sets of descriptors for shared memory that no call has asked for yet, at most.
const SHARED_SETS: usize = 64;
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
    /// Its tensors, in place in its files.
    pub weights: Weights,
    /// Tells a fault in its files from any other.
    _mapped: MappedFiles,
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
    confinement: String,
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
    /// Bounds the graphs that are verified, whichever connection they came on.
    graphs: Arc<Semaphore>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while the lock was held cannot have left a half-changed map: inserts and removes are single calls.
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

impl Host {
    /// A worker without models.
    pub fn new(engine: Engine, confinement: String) -> Self {
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

    /// What of its confinement is in force.
    pub fn confinement(&self) -> &str {
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
            let what = match names.as_slice() {
                [] => format!("no model {name:?}: none is loaded"),
                _ => format!("no model {name:?}; loaded are {}", names.join(", ")),
            };
            Error::new(Reason::ModelNotFound, what).with("model", name)
        })
    }

    /// Places for those who hash whole tensors.
    pub fn hashing(&self) -> Arc<Semaphore> {
        Arc::clone(&self.0.hashing)
    }

    /// Places for those who verify graphs.
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
            let mut collector = Collector::new(limits::MAX_MODELS, limits::MAX_MODEL_FILES);
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

    /// Maps the shared memory whose descriptor comes under `tag`.
    ///
    /// # Errors
    /// When it does not come or its length could change.
    pub async fn shared_memory(&self, tag: u64) -> Result<SharedMapping, Error> {
        // The tag is a client's word: that nothing comes under it is no fault of the scheduler's.
        let refused = |what: String| Error::new(Reason::InvalidArgument, what);
        if tag < limits::FIRST_SHARED_TAG {
            return Err(refused(format!("{tag} is no tag of shared memory")));
        }
        let fd = self.descriptor(tag).await;
        let fd = fd.map_err(|error| refused(error.message().to_owned()))?;
        SharedMapping::of_memory(fd).map_err(|error| refused(error.to_string()))
    }

    /// Serves tensors on one more connection, whose end comes under `tag`, until it is closed.
    ///
    /// # Errors
    /// When it does not come, or there are too many.
    pub async fn open_tensors(&self, tag: u64) -> Result<(), Error> {
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
            .add_service(tensors_server(self.clone()))
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

    /// Loads a model whose descriptors come under `tag`, in the order of `files`.
    ///
    /// # Errors
    /// When they do not come, or are no model that this worker can run.
    pub async fn load_by_descriptor(
        &self,
        name: String,
        tag: u64,
        files: Vec<v1::FileHandle>,
        progress: mpsc::Sender<v1::LoadProgress>,
    ) -> Result<Arc<Loaded>, Error> {
        let descriptors = self.descriptors(tag).await?;
        if descriptors.len() != files.len() {
            let what = format!(
                "{} descriptors came for {} files",
                descriptors.len(),
                files.len()
            );
            return Err(Error::new(Reason::ProtocolViolation, what));
        }
        let files = files
            .into_iter()
            .zip(descriptors)
            .map(|(file, fd)| map_file(file.name, fd))
            .collect::<Result<Vec<_>, _>>()?;
        self.load(name, files, progress).await
    }

    /// Loads a model from mapped files.
    ///
    /// # Errors
    /// When they are no model that this worker can run.
    pub async fn load(
        &self,
        name: String,
        files: Vec<ModelFile>,
        progress: mpsc::Sender<v1::LoadProgress>,
    ) -> Result<Arc<Loaded>, Error> {
        let internal = |e: tokio::task::JoinError| {
            Error::new(Reason::Internal, format!("the load failed: {e}"))
        };
        if locked(&self.0.models).contains_key(&name) {
            let what = format!("model {name} is loaded already; unload it first");
            return Err(Error::new(Reason::ModelExists, what).with("model", name));
        }
        let mapped = MappedFiles::note(files.iter().map(|f| f.mapping.bytes().as_ptr_range()));
        let read = move || -> Result<(ModelSource, ModelText, String), Error> {
            let source = ModelSource::open(files).map_err(|e| of_model(&e))?;
            let text = ModelText::open(&source)?;
            touch(&source, &progress);
            let fingerprint = format!("{:032x}", source.fingerprint());
            Ok((source, text, fingerprint))
        };
        let (source, text, fingerprint) = tokio::task::spawn_blocking(read)
            .await
            .map_err(internal)??;
        let summary = summary(&source, &text, &fingerprint);
        let weights = source.weights.clone();
        let (vocab, end_tokens) = (source.config.vocab as u32, source.config.eos.clone());
        let shape: RunShape = self.0.engine.load(name.clone(), source).await?;
        let opened = self.0.engine.opened();
        let loaded = Arc::new(Loaded {
            text,
            context: shape.context,
            vocab,
            end_tokens,
            grammars: Grammars::default(),
            numerics: v1::NumericsClass {
                id: format!(
                    "{}/w:{fingerprint}/kv:{}",
                    opened.numerics,
                    self.0.engine.cache_dtype()
                ),
                reproducible: opened.reproducible,
                model_hash: fingerprint,
            },
            summary: v1::ModelSummary {
                context_length: shape.context as u32,
                ..summary
            },
            cache_tokens: (shape.blocks * shape.block_len) as u64,
            weights,
            name: name.clone(),
            _mapped: mapped,
        });
        locked(&self.0.models).insert(name, Arc::clone(&loaded));
        Ok(loaded)
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
            let changed = weights.changed_file().unwrap_or_default().to_owned();
            (part, changed)
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

    /// Forgets a model; its requests end.
    ///
    /// # Errors
    /// [`Reason::ModelNotFound`] when there is none of this name.
    pub async fn unload(&self, name: &str) -> Result<(), Error> {
        let name = self.model(name)?.name.clone();
        self.0.engine.unload(name.clone()).await?;
        locked(&self.0.models).remove(&name);
        Ok(())
    }
}

/// Maps a model's file.
///
/// # Errors
/// [`Reason::NotAModel`] when it cannot be mapped.
pub fn map_file(name: String, fd: OwnedFd) -> Result<ModelFile, Error> {
    match Mapping::of_file(fd) {
        Ok(mapping) => Ok(ModelFile { name, mapping }),
        Err(error) => Err(Error::new(
            Reason::NotAModel,
            format!("{name} cannot be mapped: {error}"),
        )),
    }
}

/// Touches every page of the weights, so that the first request does not wait for the disk, and reports.
fn touch(source: &ModelSource, progress: &mpsc::Sender<v1::LoadProgress>) {
    let total: usize = source.weights.files().iter().map(|f| f.mapping.len()).sum();
    let report = |done: usize| {
        let event = v1::LoadProgress {
            bytes_done: done as u64,
            bytes_total: total as u64,
            stage: "mapping".to_owned(),
            loaded: None,
        };
        // A reader that is behind misses a report, nothing else.
        let _ = progress.try_send(event);
    };
    let mut done = 0usize;
    report(done);
    for file in source.weights.files() {
        for chunk in file.mapping.bytes().chunks(PROGRESS_BYTES) {
            let sum = chunk.iter().step_by(PAGE).fold(0u8, |a, b| a ^ b);
            std::hint::black_box(sum);
            done += chunk.len();
            report(done);
        }
    }
}

fn summary(source: &ModelSource, text: &ModelText, fingerprint: &str) -> v1::ModelSummary {
    let mut bytes_by_dtype: HashMap<&str, usize> = HashMap::new();
    for (_, weight) in source.weights.iter() {
        *bytes_by_dtype.entry(weight.dtype.name()).or_default() += weight.range.len();
    }
    let most = bytes_by_dtype
        .into_iter()
        .max_by_key(|&(name, bytes)| (bytes, name));
    v1::ModelSummary {
        architecture: format!("{:?}", source.config.architecture).to_lowercase(),
        parameters: source
            .weights
            .iter()
            .map(|(_, w)| w.elements() as u64)
            .sum(),
        context_length: source.config.context as u32,
        vocabulary: source.config.vocab as u32,
        weights_dtype: most.map_or_else(String::new, |(name, _)| name.to_owned()),
        model_hash: fingerprint.to_owned(),
        has_chat_template: text.has_chat_template(),
    }
}

//! The engine: one OS thread that owns the device. A bounded queue of commands goes in, streams come out. While it
//! waits for commands, a caller may use the device for something short on its own thread.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    panic::AssertUnwindSafe,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Instant,
};

use hotcell_graph::DType;
use hotcell_ipc::blackbox::{Doing, Writer};
use hotcell_kernels::{
    backend::{Device, DeviceError},
    communicator::Communicator,
    cpu::pack::LAYOUT,
    plan::Planner,
};
use hotcell_proto::{
    error::{Error, Reason},
    limits,
    v1::CacheStatus,
};
use tokio::sync::{Semaphore, oneshot};

mod about;
mod caches;
mod command;
mod debug;
mod load;
mod owned;
mod tensors;

use self::about::Plans;
pub use self::about::{EngineConfig, Opened, Ready, names, trail};
pub use self::debug::{Inside, Look, Place};
use self::{
    command::{Command, TensorWork},
    owned::Owned,
};
use crate::{
    debug::observer::Observer,
    error::{of_device, of_run},
    generate::{batch::Batch, check::Hash, task::Task},
    members::Members,
    model::run::{EACH, GIVES_WAY, Keeping, Sizes},
    session::plane::TensorPlane,
    weights::{ModelFile, ModelSource, Weight},
};

/// Commands that wait at most. Each request is one, plus wakes and loads.
const QUEUE: usize = limits::MAX_WORKER_REQUESTS * 4;
/// Commands about tensors among them; further ones wait where their callers can leave.
const TENSOR_COMMANDS: usize = limits::MAX_WORKER_REQUESTS;

/// Talks to the engine thread. Clones share it; when the last is dropped the engine ends.
#[derive(Clone, Debug)]
pub struct Engine {
    commands: mpsc::SyncSender<Command>,
    opened: Arc<Opened>,
    plans: Plans,
    cache_dtype: DType,
    /// A wake is in the queue already.
    woken: Arc<AtomicBool>,
    /// Commands in the queue: what computes looks at it between two nodes.
    queued: Arc<AtomicUsize>,
    /// Bounds the commands about tensors.
    tensor_commands: Arc<Semaphore>,
    blackbox: Writer,
    observer: Arc<Observer>,
    /// What the engine owns; `None` where only its thread may touch it.
    owned: Option<Arc<Owned>>,
}

impl Engine {
    /// Starts the thread and opens the device on it.
    ///
    /// # Errors
    /// When there is no such device or the system gives no thread.
    pub fn start(config: EngineConfig) -> Result<Self, Error> {
        Self::leading(config, None)
    }

    /// The same with these other processes, which compute its models together with it.
    ///
    /// # Errors
    /// As for [`Engine::start`], and when the device computes no models together with others.
    pub fn leading(
        config: EngineConfig,
        members: Option<(Members, Communicator)>,
    ) -> Result<Self, Error> {
        let (commands, queue) = mpsc::sync_channel(QUEUE);
        let (opened, answer) = mpsc::sync_channel(1);
        let cache_dtype = config.cache_dtype;
        let woken = Arc::new(AtomicBool::new(false));
        let engine_woken = Arc::clone(&woken);
        let queued = Arc::new(AtomicUsize::new(0));
        let engine_queued = Arc::clone(&queued);
        let owned = Arc::new(Owned::default());
        let engine_owned = Arc::clone(&owned);
        let blackbox = config.blackbox.unwrap_or_else(|| Writer::private(names()));
        let observer = Arc::<Observer>::default();
        let told = Arc::clone(&observer);
        let open = move || {
            let device = config.registry.open(&config.device, &config.cores)?;
            if config.pins
                && let Err(error) = device.pin()
            {
                tracing::warn!(%error, "compute threads go where the system has them");
            }
            let members = match members {
                Some((members, communicator)) => {
                    device.join(communicator)?;
                    members.meet(device.as_ref())?;
                    Some(Rc::new(members))
                }
                None => None,
            };
            Ok((device, members))
        };
        let run = move || match open() {
            Ok((device, members)) => {
                blackbox.owns_device();
                let (progress, node) = blackbox.trail();
                if config.follow {
                    EACH.store(true, Ordering::Relaxed);
                }
                GIVES_WAY.store(config.gives_way, Ordering::Relaxed);
                device.leave(trail(progress, node));
                let about = Opened {
                    info: device.info().clone(),
                    numerics: device.numerics(),
                    reproducible: device.reproducible(),
                    ops: device.ops(),
                    buffer_types: device.buffer_types(),
                    layout: (device.info().backend == "cpu").then_some(LAYOUT),
                    keeps_weights: device.keeps_weights(),
                    members: members.as_ref().map_or(0, |members| members.others()),
                };
                let is_bound = device.is_bound_to_thread();
                let plans = Plans(device.planner());
                let state = Loop {
                    tensors: TensorPlane::new(
                        Rc::clone(&device),
                        config.tensor_memory,
                        Arc::clone(&told),
                    ),
                    queued: engine_queued,
                    device,
                    members,
                    cache_dtype,
                    model_memory: config.model_memory,
                    max_context: config.max_context,
                    models: HashMap::new(),
                    tensor_work: VecDeque::new(),
                    drain: Vec::new(),
                    woken: engine_woken,
                    blackbox,
                    observer: told,
                };
                if opened.send(Ok((about, plans, is_bound))).is_ok() {
                    engine_owned.run(state, &queue);
                }
            }
            Err(error) => {
                let _ = opened.send(Err(error));
            }
        };
        let internal = |what: String| Error::new(Reason::Internal, what);
        thread::Builder::new()
            .name("engine".to_owned())
            // A worker without its engine would answer health checks and fail every request: better none.
            .spawn(move || {
                if std::panic::catch_unwind(AssertUnwindSafe(run)).is_err() {
                    std::process::abort();
                }
            })
            .map_err(|e| internal(format!("no thread for the engine: {e}")))?;
        let opened = answer
            .recv()
            .map_err(|_| internal("the engine died while it started".to_owned()))?;
        let (opened, plans, is_bound) = opened.map_err(|e: DeviceError| of_device(&e))?;
        Ok(Self {
            owned: (!is_bound).then_some(owned),
            blackbox,
            observer,
            commands,
            opened: Arc::new(opened),
            plans,
            cache_dtype,
            woken,
            queued,
            tensor_commands: Arc::new(Semaphore::new(TENSOR_COMMANDS)),
        })
    }

    /// What it said about its device.
    pub fn opened(&self) -> &Opened {
        &self.opened
    }

    /// Who makes most of a plan on other threads than the engine's; `None`: the device does not allow it.
    pub fn planner(&self) -> Option<Arc<dyn Planner>> {
        self.plans.0.clone()
    }

    /// How the cache stores numbers.
    pub fn cache_dtype(&self) -> DType {
        self.cache_dtype
    }

    fn try_send(&self, command: Command) -> Result<(), mpsc::TrySendError<Command>> {
        // Counted before it is there, so that the count never goes below zero.
        self.queued.fetch_add(1, Ordering::AcqRel);
        let sent = self.commands.try_send(command);
        if sent.is_err() {
            self.queued.fetch_sub(1, Ordering::AcqRel);
        }
        sent
    }

    fn send(&self, command: Command) -> Result<(), Error> {
        self.try_send(command).map_err(|e| match e {
            mpsc::TrySendError::Full(_) => Error::new(
                Reason::Overloaded,
                "the worker's queue is full; try again in a moment",
            ),
            mpsc::TrySendError::Disconnected(_) => {
                Error::new(Reason::Internal, "the engine has ended")
            }
        })
    }

    fn gone<T>(_: T) -> Error {
        Error::new(Reason::Internal, "the engine has ended")
    }

    /// Makes a model ready on the device.
    ///
    /// # Errors
    /// When the device lacks something that it needs, or memory is short.
    pub async fn load(
        &self,
        name: String,
        source: ModelSource,
        files: Vec<ModelFile>,
        keeping: Keeping,
    ) -> Result<Ready, Error> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Load {
            name,
            source: Box::new((source, files)),
            keeping,
            reply,
        })?;
        answer.await.map_err(Self::gone)?
    }

    /// What memory a model would take, by a dry run.
    ///
    /// # Errors
    /// When the device lacks something that it needs.
    pub async fn measure(&self, source: ModelSource) -> Result<Sizes, Error> {
        let (reply, answer) = oneshot::channel();
        let source = Box::new(source);
        self.send(Command::Measure { source, reply })?;
        answer.await.map_err(Self::gone)?
    }

    /// Computes a model from these packed weights from its next step on.
    ///
    /// # Errors
    /// When the device does not take them, the engine has ended or its queue is full.
    pub async fn use_packed(
        &self,
        name: String,
        weights: BTreeMap<String, Weight>,
    ) -> Result<(), Error> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::UsePacked {
            name,
            weights,
            reply,
        })?;
        answer.await.map_err(Self::gone)?
    }

    /// Where this worker writes what it does.
    pub fn blackbox(&self) -> Writer {
        self.blackbox
    }

    /// Forgets a model; its requests end with an error. Returns whether there was one.
    ///
    /// # Errors
    /// When the engine has ended or its queue is full.
    pub async fn unload(&self, name: String) -> Result<bool, Error> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Unload { name, reply })?;
        answer.await.map_err(Self::gone)
    }

    /// Computes a stream of tokens or an embedding.
    ///
    /// # Errors
    /// When the queue is full.
    pub fn compute(&self, model: String, task: Task) -> Result<(), Error> {
        self.send(Command::Compute { model, task })
    }

    /// Computes the first `steps` steps of a model's known answer, a step at a time between those of its requests, and
    /// returns the hash of each one's logits.
    ///
    /// # Errors
    /// [`Reason::Overloaded`] when there is no room for it beside the requests, and what the device says.
    pub async fn check(&self, model: String, steps: u32) -> Result<Vec<Hash>, Error> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Check {
            model,
            steps,
            reply,
        })?;
        answer.await.map_err(Self::gone)?
    }

    /// Returns when no request is left.
    ///
    /// # Errors
    /// When the engine has ended or its queue is full.
    pub async fn drain(&self) -> Result<(), Error> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Drain { reply })?;
        answer.await.map_err(Self::gone)
    }

    /// Tells the engine to look at its sequences and leases again.
    pub fn wake(&self) {
        if !self.woken.swap(true, Ordering::SeqCst) && self.try_send(Command::Wake).is_err() {
            // A full queue wakes it as well.
            self.woken.store(false, Ordering::SeqCst);
        }
    }
}

/// The engine thread's own state.
struct Loop {
    device: Rc<dyn Device>,
    /// Who computes its models together with it.
    members: Option<Rc<Members>>,
    cache_dtype: DType,
    model_memory: Option<u64>,
    max_context: Option<u32>,
    models: HashMap<String, Batch>,
    tensors: TensorPlane,
    /// Commands about tensors that have come; as many as there are permits at most.
    tensor_work: VecDeque<TensorWork>,
    queued: Arc<AtomicUsize>,
    drain: Vec<oneshot::Sender<()>>,
    woken: Arc<AtomicBool>,
    blackbox: Writer,
    observer: Arc<Observer>,
}

impl Loop {
    /// One round: what `command` asks, a step of each model, and tensor work. Returns whether there is more to do.
    fn round(&mut self, command: Option<Command>, queue: &mpsc::Receiver<Command>) -> bool {
        if let Some(command) = command {
            self.perform(command);
            // Take all that is there before the next step; what is about tensors only waits in line.
            while let Ok(command) = queue.try_recv() {
                self.perform(command);
            }
            self.tensors.sweep();
        }
        // Where there is none it is not told: who dies between two steps was at the steps.
        if !self.tensor_work.is_empty() {
            self.blackbox.doing(Doing::Tensors);
            self.perform_tensor_work();
        }
        let mut worked = false;
        // Of several models, none has a step on its way while another one computes. Who is busy is asked once: whoever waits
        // for a reader may be able to go on at any moment.
        let busy = |batch: &Batch| batch.is_busy() || batch.is_checking();
        let busy: Vec<bool> = self.models.values().map(busy).collect();
        let several = busy.iter().filter(|busy| **busy).count() > 1;
        if several {
            self.models.values_mut().for_each(Batch::land);
        }
        // Models in fair turns, one step each.
        for ((name, batch), busy) in self.models.iter_mut().zip(busy) {
            if batch.is_empty() {
                continue;
            }
            worked |= match busy {
                true => {
                    self.blackbox.doing(Doing::Stepping);
                    self.blackbox.model(name);
                    batch.step_beside(several)
                }
                false => batch.tidy(),
            };
        }
        for (name, batch) in self.models.iter_mut().filter(|(_, b)| b.is_checking()) {
            self.blackbox.doing(Doing::Checking);
            self.blackbox.model(name);
            worked |= batch.check_step();
        }
        self.models.values_mut().for_each(Batch::tell_blocks);
        // Then tensor work, for as long as nobody asks for anything and no sequence waits long.
        if !self.tensors.is_idle() {
            self.blackbox.doing(Doing::Tensors);
        }
        let generating = self.is_generating();
        let queued = &self.queued;
        let interrupted = || queued.load(Ordering::Relaxed) > 0;
        worked |= self.tensors.turn(&interrupted, worked && generating);
        if self.is_idle() {
            for reply in self.drain.drain(..) {
                let _ = reply.send(());
            }
        }
        worked || !self.tensor_work.is_empty()
    }

    fn is_generating(&self) -> bool {
        !self.models.values().all(Batch::is_empty)
    }

    /// Whether nothing is there to be done, nor waited for.
    fn is_idle(&self) -> bool {
        !self.is_generating() && self.tensor_work.is_empty() && self.tensors.is_idle()
    }

    /// The moment at which a sequence is to be looked at even if nobody asks for anything.
    fn next_deadline(&self) -> Option<Instant> {
        self.models.values().filter_map(Batch::next_deadline).min()
    }

    fn perform(&mut self, command: Command) {
        // Tensor work that waits in line still counts: what computes makes way for it.
        if !matches!(command, Command::Tensors(_)) {
            self.queued.fetch_sub(1, Ordering::AcqRel);
        }
        if command.takes_its_time() {
            // A step on its way would seem to.
            self.models.values_mut().for_each(Batch::land);
        }
        match command {
            Command::Load {
                name,
                source,
                keeping,
                reply,
            } => {
                if self.models.contains_key(&name) {
                    let what = format!("model {name} is loaded already; unload it first");
                    let _ = reply.send(Err(Error::new(Reason::ModelExists, what)));
                    return;
                }
                self.blackbox.doing(Doing::Loading);
                self.blackbox.model(&name);
                let _ = reply.send(self.load(name, &source.0, &source.1, keeping));
            }
            Command::Measure { source, reply } => {
                let shape = self.shape(&source);
                let sizes = shape.and_then(|s| s.sizes(self.device.as_ref(), &source));
                let _ = reply.send(sizes.map_err(|e| of_run(&e)));
            }
            Command::UsePacked {
                name,
                weights,
                reply,
            } => {
                let device = self.device.as_ref();
                let used = match self.models.get_mut(&name) {
                    Some(batch) => batch.runner().use_packed(device, &weights),
                    None => return drop(reply.send(Err(not_loaded(&name)))),
                };
                let _ = reply.send(used.map_err(|e| of_device(&e)));
            }
            Command::Unload { name, reply } => {
                let found = self.models.remove(&name);
                let had = found.is_some();
                if let Some(mut batch) = found {
                    let what = format!("model {name} was unloaded");
                    batch.fail_all(&Error::new(Reason::ModelNotFound, what).with("model", &name));
                }
                let _ = reply.send(had);
            }
            Command::Compute { model, task } => match self.models.get_mut(&model) {
                Some(batch) => batch.push(task),
                None => task.fail(not_loaded(&model)),
            },
            Command::Status { reply } => {
                let status = |(name, batch): (&String, &Batch)| batch.status(name);
                let mut all: Vec<CacheStatus> = self.models.iter().map(status).collect();
                all.sort_unstable_by(|a, b| a.model.cmp(&b.model));
                let memory = all.iter().filter_map(|cache| {
                    let batch = self.models.get(&cache.model)?;
                    Some(batch.memory(&cache.model))
                });
                let memory = memory.flatten().chain(self.tensors.memory()).collect();
                let _ = reply.send((all, memory));
            }
            Command::Blocks {
                model,
                watcher,
                begins,
                reply,
            } => {
                // Without the model nobody answers.
                if let Some(batch) = self.models.get_mut(&model) {
                    batch.ask_blocks(&watcher, begins, reply);
                }
            }
            Command::Check {
                model,
                steps,
                reply,
            } => match self.models.get_mut(&model) {
                Some(batch) => batch.check(steps, reply),
                None => {
                    // Who left meanwhile misses it.
                    let _ = reply.send(Err(not_loaded(&model)));
                }
            },
            Command::Drain { reply } => self.drain.push(reply),
            Command::Tensors(work) => self.tensor_work.push_back(work),
            Command::Debug(work) => self.look_inside(work),
            Command::Wake => self.woken.store(false, Ordering::SeqCst),
        }
    }
}

fn not_loaded(model: &str) -> Error {
    let what = format!("model {model} is not loaded");
    Error::new(Reason::ModelNotFound, what).with("model", model)
}

//! The live table of devices, workers and models, and the tasks that keep it true.
//!
//! [`supervisor`](crate::supervisor) and [`placement`](crate::placement) decide; here it is done. All of the
//! table is behind one lock that is never held across an await.

mod adopt;
mod aside;
mod autopsy;
mod caches;
mod catalog;
mod changes;
mod debug;
mod drain;
mod examine;
mod gate;
mod guests;
mod handover;
mod inspect;
mod keeper;
mod keeping;
mod late;
mod launch;
mod link;
mod loading;
mod loads;
mod models;
mod packing;
mod pieces;
mod places;
mod release;
mod replace;
mod replay;
mod replicas;
mod room;
mod seen;
mod serving;
mod signs;
mod sleep;
mod slot;
mod solo;
mod standby;
mod tensors;
mod ticket;
mod tokenizer;
mod turns;
mod watch;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicU64},
    time::Duration,
};

use hotcell_proto::{
    ids::ModelName,
    limits,
    v1::{Device, EventKind, HandshakeResponse, Loaded, NumericsClass, WorkerInfo, WorkerState},
};
use tokio::{sync::Semaphore, time::Instant};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub use adopt::{Heir, Inherited, Live};
pub use catalog::Model;
pub use changes::Changes;
pub use debug::{
    believe as believe_sample, believe_captured, believe_guarded, believe_memory_map,
    believe_traced,
};
pub use drain::checked_patience;
pub use handover::Joined;
pub use launch::{
    Allowance, Boxed, Duplex, Handover, Launch, Launched, Order, Process, Processes, Role,
    TensorDoor, Wire,
};
pub use link::{Condemnation, Fate, Link, Sockets, TOKENS_WINDOWS, is_broken, words};
pub use loading::LoadFailure;
use loads::Loads;
pub use models::ProgressSender;
pub use replay::Replayer;
pub use serving::Using;
pub use serving::Wanted;
pub(crate) use serving::checked as checked_serving;
pub use solo::{Alone, Lost};

use crate::{
    audit::Audit,
    config::Timeouts,
    crash::Crashes,
    death::Death,
    events::{About, Events},
    gauges::Gauges,
    hang::Patience,
    journal::Bounds,
    known::Book,
    meters::Meters,
    packed::Packs,
    policy::ModelPolicy,
    prefixes::{Prefixes, Prints},
    supervisor::{Phase, Policy, State},
    suspicion::{self, Explained},
    testimony::Testimony,
    vault::OpenModel,
};
use aside::Asides;
use changes::Teller;
use gate::Gate;
use serving::{Aliases, Uses};
use slot::{Load, Slot};
use solo::Leash;
use standby::Standbys;
use turns::{Held, Turns};

#[derive(Default)]
struct Table {
    devices: Vec<Device>,
    workers: BTreeMap<String, Slot>,
    models: BTreeMap<ModelName, Model>,
    aliases: Aliases,
    default_model: Option<ModelName>,
}

/// What the fleet is made of.
pub struct Parts {
    /// How workers are started.
    pub launcher: Arc<dyn Launch>,
    /// When they are restarted.
    pub policy: Policy,
    /// When a request is suspected of killing them.
    pub suspicion: suspicion::Policy,
    /// Whether each has a standby that takes its place when it dies.
    pub standby: bool,
    /// How long they may stand still.
    pub patience: Patience,
    /// Where their deaths are described.
    pub crashes: Crashes,
    /// How devices are.
    pub gauges: Gauges,
    /// Bounds on waiting.
    pub timeouts: Timeouts,
    /// Where packed copies of models are made and found.
    pub packs: Packs,
    /// Folders that links may lead into.
    pub model_roots: Vec<std::path::PathBuf>,
    /// Which models may be loaded, and how.
    pub model_policy: Arc<ModelPolicy>,
    /// Where loads, verdicts and deaths are noted.
    pub audit: Audit,
    /// For requests without a model's name.
    pub default_model: Option<ModelName>,
    /// Bytes that models may take in each memory; none: as many as its devices have.
    pub device_memory: Option<u64>,
}

/// All workers of this scheduler.
pub struct Fleet {
    table: Mutex<Table>,
    /// Told whenever the table changed.
    changed: Teller,
    /// Where happenings are told.
    pub events: Events,
    /// What workers have to answer when they are checked.
    book: Mutex<Book>,
    /// Loads and unloads that are under way.
    loads: Loads,
    stop: CancellationToken,
    keepers: TaskTracker,
    launcher: Arc<dyn Launch>,
    policy: Policy,
    suspicion: suspicion::Policy,
    /// Deaths that poisonous requests were found to have caused.
    explained: Mutex<Explained>,
    /// What requests tell about devices.
    testimony: Mutex<Testimony>,
    /// Who waits for a place, and has one.
    turns: Turns,
    /// Who read which beginnings of prompts.
    prefixes: Mutex<Prefixes>,
    /// Workers beside the devices' own.
    asides: Asides,
    /// Where standbys are asked for; nowhere if there are to be none.
    standbys: Option<Standbys>,
    /// Places for throw-away workers, and how many there have been.
    replays: Arc<Semaphore>,
    replays_made: AtomicU64,
    solos: Arc<Semaphore>,
    /// Of these, those that saved graphs may have.
    graph_solos: Arc<Semaphore>,
    solos_made: AtomicU64,
    /// Workers of untrusted models that there have been.
    guests_made: AtomicU64,
    /// What models pass before they are loaded.
    gate: Gate,
    patience: Patience,
    /// What is known about workers that died.
    pub crashes: Crashes,
    /// How devices are.
    pub gauges: Gauges,
    /// What is counted while requests are served.
    pub meters: Meters,
    timeouts: Timeouts,
    packs: Arc<Packs>,
    model_roots: Vec<std::path::PathBuf>,
    device_memory: Option<u64>,
    began: Instant,
}

/// A place for a request, given back when dropped.
#[derive(Debug)]
pub struct Placed {
    /// The worker to talk to.
    pub link: Arc<Link>,
    /// Its numerics class for the model, as it declared it and as that was checked.
    pub class: NumericsClass,
    /// The worker that is or would be the device's own: `link.worker`, except on a throw-away worker.
    pub home: String,
    ticket: Ticket,
    leash: Option<Leash>,
}

#[derive(Debug)]
struct Ticket {
    load: Arc<Load>,
    changed: Teller,
    prefill: u64,
    decode: u64,
    /// Those of its model.
    uses: Arc<Uses>,
    /// Counts as its tenant's.
    held: Option<Held>,
}

/// What a starting worker was asked to load, from which files, and what came of it: nothing if it refused, and is
/// not to be asked again.
type Asked = BTreeMap<ModelName, (Arc<OpenModel>, Option<Loaded>)>;

/// What a starting worker is told when it has loaded what it was asked to.
enum Offer {
    /// It serves now.
    Accepted,
    /// Its process is gone or was told to go.
    TooLate,
    /// First it has to load these, and forget those.
    Change {
        missing: Vec<(ModelName, Arc<OpenModel>)>,
        unwanted: Vec<ModelName>,
    },
}

impl Fleet {
    /// A fleet without workers.
    pub fn new(parts: Parts) -> Arc<Fleet> {
        let table = Table {
            default_model: parts.default_model,
            ..Table::default()
        };
        Arc::new(Fleet {
            table: Mutex::new(table),
            changed: Teller::default(),
            events: Events::default(),
            book: Mutex::default(),
            loads: Loads::default(),
            stop: CancellationToken::new(),
            keepers: TaskTracker::new(),
            launcher: parts.launcher,
            policy: parts.policy,
            suspicion: parts.suspicion,
            explained: Mutex::default(),
            testimony: Mutex::default(),
            turns: Turns::default(),
            prefixes: Mutex::default(),
            asides: Asides::default(),
            standbys: parts.standby.then(Standbys::default),
            replays: Arc::new(Semaphore::new(limits::MAX_REPLAYS)),
            replays_made: AtomicU64::new(0),
            solos: Arc::new(Semaphore::new(limits::MAX_SOLO_WORKERS)),
            graph_solos: Arc::new(Semaphore::new(limits::MAX_SOLO_WORKERS / 2)),
            solos_made: AtomicU64::new(0),
            guests_made: AtomicU64::new(0),
            gate: Gate::new(parts.model_policy, parts.audit),
            patience: parts.patience,
            crashes: parts.crashes,
            gauges: parts.gauges,
            meters: Meters::default(),
            timeouts: parts.timeouts,
            packs: Arc::new(parts.packs),
            model_roots: parts.model_roots,
            device_memory: parts.device_memory,
            began: Instant::now(),
        })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn explained(&self) -> MutexGuard<'_, Explained> {
        self.explained
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells everyone who waits that the table changed.
    fn tell(&self) {
        self.changed.tell();
    }

    /// Hears that the table changed.
    pub fn changes(&self) -> Changes {
        self.changed.listen()
    }

    /// Has everyone who hears changes look again.
    pub fn nudge(&self) {
        self.tell();
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// Starts a worker on each device that has no problem: w0, w1 and so on.
    pub fn start(self: &Arc<Self>, devices: Vec<Device>) {
        self.start_with(devices, Vec::new());
    }

    /// Ends all workers, and returns once they are reaped or the kernel takes too long.
    pub async fn stop(&self) {
        self.stop.cancel();
        self.keepers.close();
        let patience = 4 * self.policy.stop_timeout;
        if tokio::time::timeout(patience, self.keepers.wait())
            .await
            .is_err()
        {
            tracing::warn!("a worker did not end in time");
        }
    }

    /// The devices, also those with a problem.
    pub fn devices(&self) -> Vec<Device> {
        self.table().devices.clone()
    }

    /// Workers that serve now.
    pub fn ready(&self) -> usize {
        let table = self.table();
        table.workers.values().filter(|s| s.link.is_some()).count()
    }

    /// Whether a step can progress: there is a worker that gets on, or has nothing to do.
    pub fn can_step(&self) -> bool {
        let table = self.table();
        let mut serving = table.workers.values().filter_map(Slot::serving);
        serving.any(|link| !link.fate.is_stalled())
    }

    /// All workers, also those beside the devices' own.
    pub fn workers(&self) -> Vec<WorkerInfo> {
        let mut all = self.asides.infos();
        {
            let own = self.table();
            all.extend(own.workers.iter().map(|(id, slot)| slot.info(id)));
        }
        for worker in all.iter_mut().filter(|worker| worker.pid != 0) {
            worker.resident_bytes = slot::resident(worker.pid);
        }
        all.sort_by(|a, b| a.id.cmp(&b.id));
        all
    }

    /// The bounds of a model's requests, once a worker has it.
    pub fn bounds(&self, model: &ModelName) -> Option<Bounds> {
        let table = self.table();
        let model = table.models.get(model)?;
        let summary = model.summary.as_ref()?;
        Some(Bounds {
            vocabulary: summary.vocabulary,
            context: summary.context_length,
        })
    }

    /// How long it has been there.
    pub fn uptime(&self) -> Duration {
        self.began.elapsed()
    }

    /// How long a request waits for a place while every worker is full.
    pub fn queue_patience(&self) -> Duration {
        self.timeouts.queue
    }

    /// How long a worker's stream may be silent before the worker is asked whether it still answers. By then a hang that
    /// its black box shows has been found.
    pub fn silence_patience(&self) -> Duration {
        2 * self.patience.engine.max(self.patience.events)
    }

    /// How long a stream waits for its client to come back.
    pub fn reattach_patience(&self) -> Duration {
        self.timeouts.reattach
    }

    fn prefixes(&self) -> MutexGuard<'_, Prefixes> {
        self.prefixes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A prompt's beginnings, by which workers that read them lately are found.
    pub fn prints(&self, tenant: &str, model: &ModelName, ids: &[u32]) -> Prints {
        self.prefixes().prints(tenant, model, ids)
    }

    // What keepers report.

    fn launched(&self, id: &str, process: &dyn Process, epoch: u64) {
        let pid = process.pid();
        if let Some(slot) = self.table().workers.get_mut(id) {
            slot.launched(pid, epoch);
            slot.handover = process.handover();
        }
        let about = About {
            worker: id,
            epoch,
            model: "",
        };
        self.events
            .tell(EventKind::WorkerStarted, about, format!("process {pid}"));
    }

    fn publish(self: &Arc<Self>, id: &str, state: &State) {
        let mut table = self.table();
        if let Some(slot) = table.workers.get_mut(id) {
            slot.state = match state.phase {
                Phase::New | Phase::Starting { .. } => WorkerState::Starting,
                Phase::Ready => WorkerState::Ready,
                Phase::Draining { .. } | Phase::Restarting { .. } | Phase::Stopped => {
                    WorkerState::Draining
                }
                Phase::Wedged { .. } => WorkerState::Wedged,
                Phase::Corrupt { .. } => WorkerState::Corrupt,
                Phase::Dead { .. } => WorkerState::Dead,
                Phase::Backoff { .. } => WorkerState::Backoff,
                Phase::Quarantined { .. } => WorkerState::Quarantined,
            };
            slot.supervised = state.clone();
            slot.hopeful = state.is_hopeful();
            slot.deaths = state.deaths;
        }
        table.settle();
        drop(table);
        self.tell();
        self.move_models();
    }

    /// Takes a worker out of service.
    fn withdraw(&self, id: &str) {
        if let Some(slot) = self.table().workers.get_mut(id) {
            slot.emptied();
        }
        self.tell();
    }

    /// Notes a death. The model that was being loaded gets a strike.
    fn buried(&self, id: &str, death: &Death) {
        let mut table = self.table();
        let Some(slot) = table.workers.get_mut(id) else {
            return;
        };
        let unexamined = std::mem::take(&mut slot.unexamined);
        slot.emptied();
        slot.handover = None;
        slot.pid = 0;
        let loading = slot.loading.take();
        for model in unexamined {
            table.strike(&model, death);
        }
        if let Some(model) = loading {
            table.strike(&model, death);
            table.give_up_kept(&model, id);
        }
    }

    /// A starting worker works on it.
    fn note_progress(&self, id: &str, epoch: u64) {
        let mut table = self.table();
        if let Some(slot) = table.workers.get_mut(id).filter(|s| s.is_alive(epoch)) {
            slot.progresses = true;
        }
        drop(table);
        self.tell();
    }

    /// Notes why a worker died, as its supervisor sees it.
    fn note_exit(&self, id: &str, death: &Death) {
        if let Some(slot) = self.table().workers.get_mut(id) {
            slot.last_exit = Some(death.clone());
        }
    }

    /// Puts a worker into service if it has loaded all that is wanted, in one act with looking.
    fn offer(&self, link: &Arc<Link>, hello: &HandshakeResponse, loaded: &Asked) -> Offer {
        let mut table = self.table();
        let alive = |s: &Slot| s.is_alive(link.epoch) && !link.fate.gone.is_cancelled();
        if !table.workers.get(&link.worker).is_some_and(alive) {
            return Offer::TooLate;
        }
        let Some(slot) = table.workers.get(&link.worker) else {
            return Offer::TooLate;
        };
        let (missing, unwanted) = table.difference(slot.guest.as_ref(), &slot.device.id, loaded);
        if !missing.is_empty() || !unwanted.is_empty() {
            return Offer::Change { missing, unwanted };
        }
        if let Some(slot) = table.workers.get_mut(&link.worker) {
            slot.models = loaded
                .iter()
                .filter_map(|(name, (_, got))| Some((name.clone(), got.clone()?)))
                .collect();
            slot.loading = None;
            slot.heard(hello);
            slot.state = WorkerState::Ready;
            slot.link = Some(Arc::clone(link));
        }
        drop(table);
        self.tell();
        Offer::Accepted
    }
}

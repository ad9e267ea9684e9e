//! One worker's row of the table.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use hotcell_proto::{
    ids::ModelName,
    v1::{ConfinementLayer, Device, HandshakeResponse, Lease, Loaded, WorkerInfo, WorkerState},
};
use tokio::{sync::Notify, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{Link, guests::Guest, launch::Handover};
use crate::{crash::Dead, death::Death, placement, supervisor::State};

/// The trust domain of a device's own worker and of its standby.
pub(super) const TRUSTED: &str = "trusted";
/// That of a worker which one untrusted model has for itself.
pub(super) const UNTRUSTED: &str = "untrusted";
/// That of a worker which runs one suspected request.
pub(super) const SUSPECT: &str = "suspect";
/// That of a worker which looks into a model.
pub(super) const INSPECTION: &str = "inspection";

/// That of a worker which runs a request again for somebody who looks into it.
pub(super) const REPLAY: &str = "replay";

/// What a worker has to do, as the scheduler counts it.
#[derive(Debug, Default)]
pub(super) struct Load {
    pub(super) outstanding: AtomicU64,
    pub(super) running: AtomicU32,
}

/// A worker in the table.
pub(super) struct Slot {
    pub(super) device: Device,
    /// Whom it runs work for.
    pub(super) domain: &'static str,
    /// The one model it is for, unless it is a device's own.
    pub(super) guest: Option<Guest>,
    pub(super) epoch: u64,
    pub(super) pid: u32,
    pub(super) state: WorkerState,
    /// As its keeper sees it.
    pub(super) supervised: State,
    /// What of its process is handed to who takes this program's place; none before it has one.
    pub(super) handover: Option<Arc<Handover>>,
    /// Whether it may yet come to serve.
    pub(super) hopeful: bool,
    /// Set while it serves.
    pub(super) link: Option<Arc<Link>>,
    /// Those it has; also while it loads others and does not serve yet.
    pub(super) models: BTreeMap<ModelName, Loaded>,
    /// The model it is loading, which is to blame if it dies.
    pub(super) loading: Option<ModelName>,
    /// Which packed copy of each model it was asked to compute with.
    pub(super) offered: BTreeMap<ModelName, u64>,
    /// Models that it serves before it was asked for their known answer, which are to blame if it dies before.
    pub(super) unexamined: BTreeSet<ModelName>,
    /// Models that this process will not load.
    pub(super) refused: BTreeSet<ModelName>,
    /// Whether this process has given a sign of life. If it gives no more its start is cut off.
    pub(super) progresses: bool,
    /// Whether this process was told to end.
    pub(super) leaving: bool,
    pub(super) load: Arc<Load>,
    pub(super) deaths: u32,
    pub(super) last_exit: Option<Death>,
    /// Told when it is let out of quarantine.
    pub(super) release: Arc<Notify>,
    /// Somebody wants another process in its place.
    pub(super) restart: Arc<Notify>,
    /// Set while it gets no new requests; cancelled when that is over.
    pub(super) drained: Option<CancellationToken>,
    pub(super) since: Instant,
    pub(super) confinement: String,
    pub(super) layers: Vec<ConfinementLayer>,
}

impl Slot {
    /// Whether it serves the model and takes another request that begins.
    pub(super) fn has_place(&self, model: &ModelName) -> bool {
        self.serving().is_some()
            && !self.is_drained()
            && self.models.contains_key(model)
            && !placement::is_full(self.load.running.load(Ordering::Relaxed))
    }

    /// Tokens it still has to compute.
    pub(super) fn outstanding(&self) -> u64 {
        self.load.outstanding.load(Ordering::Relaxed)
    }

    pub(super) fn new(device: Device) -> Self {
        Self {
            device,
            domain: TRUSTED,
            guest: None,
            epoch: 0,
            pid: 0,
            state: WorkerState::Starting,
            supervised: State::default(),
            handover: None,
            hopeful: true,
            link: None,
            models: BTreeMap::new(),
            loading: None,
            offered: BTreeMap::new(),
            unexamined: BTreeSet::new(),
            refused: BTreeSet::new(),
            progresses: false,
            leaving: false,
            load: Arc::default(),
            deaths: 0,
            last_exit: None,
            release: Arc::default(),
            restart: Arc::default(),
            drained: None,
            since: Instant::now(),
            confinement: String::new(),
            layers: Vec::new(),
        }
    }

    /// A new process.
    pub(super) fn launched(&mut self, pid: u32, epoch: u64) {
        self.emptied();
        self.pid = pid;
        self.epoch = epoch;
        self.since = Instant::now();
        self.leaving = false;
        self.confinement.clear();
        self.layers.clear();
        // The old one's tickets count down on the old one's count.
        self.load = Arc::default();
    }

    /// What it said of itself.
    pub(super) fn heard(&mut self, hello: &HandshakeResponse) {
        self.confinement.clone_from(&hello.confinement);
        self.layers.clone_from(&hello.layers);
    }

    /// Its process serves no more.
    pub(super) fn emptied(&mut self) {
        self.link = None;
        self.models.clear();
        self.offered.clear();
        self.refused.clear();
        self.progresses = false;
        self.leaving = true;
    }

    /// Whether this process is there and to stay.
    pub(super) fn is_alive(&self, epoch: u64) -> bool {
        self.epoch == epoch && self.pid != 0 && !self.leaving
    }

    /// The worker to talk to, unless it is about to go.
    pub(super) fn serving(&self) -> Option<&Arc<Link>> {
        self.link.as_ref().filter(|link| !link.fate.is_sealed())
    }

    /// Whether it may come to have a model that it lacks, if that is one for it.
    pub(super) fn may_get(&self, model: &ModelName) -> bool {
        let asked = self.serving().is_none() || self.loading.as_ref() == Some(model);
        self.hopeful && asked && !self.refused.contains(model)
    }

    /// What a report tells of its process.
    pub(super) fn dead(&self, id: &str) -> Dead {
        Dead {
            worker: id.to_owned(),
            epoch: self.epoch,
            pid: self.pid,
            device: self.device.id.clone(),
            uptime: self.since.elapsed(),
            models: self.models.keys().map(|m| m.as_str().to_owned()).collect(),
        }
    }

    pub(super) fn info(&self, id: &str) -> WorkerInfo {
        let alive = self.pid != 0;
        let uptime = if alive {
            self.since.elapsed()
        } else {
            Duration::ZERO
        };
        WorkerInfo {
            id: id.to_owned(),
            epoch: self.epoch,
            pid: self.pid,
            state: self.told_state().into(),
            lease: Some(Lease {
                device: self.device.id.clone(),
                trust_domain: self.domain.to_owned(),
                memory_bytes: self.device.memory_bytes,
                cores: self.device.cores.clone(),
            }),
            models: self.models.keys().map(|m| m.as_str().to_owned()).collect(),
            outstanding_tokens: self.outstanding(),
            running_requests: self.load.running.load(Ordering::Relaxed),
            deaths: self.deaths,
            last_exit: self
                .last_exit
                .as_ref()
                .map(Death::to_string)
                .unwrap_or_default(),
            last_exit_kind: self
                .last_exit
                .as_ref()
                .map_or("", |death| death.kind.name())
                .to_owned(),
            uptime_ms: u64::try_from(uptime.as_millis()).unwrap_or(u64::MAX),
            // Asked of the kernel, without the table.
            resident_bytes: 0,
            confinement: self.confinement.clone(),
            layers: self.layers.clone(),
            // Known to the worker only.
            caches: Vec::new(),
            memory: Vec::new(),
        }
    }
}

/// Resident bytes of a process by `/proc`; 0 if it cannot be told.
pub(super) fn resident(pid: u32) -> u64 {
    let pages = std::fs::read_to_string(format!("/proc/{pid}/statm"))
        .ok()
        .and_then(|statm| statm.split_whitespace().nth(1)?.parse::<u64>().ok());
    pages
        .unwrap_or(0)
        .saturating_mul(rustix::param::page_size() as u64)
}

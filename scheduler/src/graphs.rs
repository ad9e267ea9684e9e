//! Graphs that clients saved under names, and where they run.
//!
//! A graph's bytes and those of its constants lie in sealed memory; nothing of them is read here. What its inputs and outputs
//! are is a worker's word, within bounds. A saved graph runs on any worker: each that ran it once has it planned, and its
//! constants, in a session of the scheduler's own, until nobody asked for a while. A call has no effect but its results, so
//! one whose worker died is made again on another, and nobody notices.

mod folder;
mod lane;
mod plan;
mod saved;
mod session;

use std::{
    collections::{BTreeMap, HashMap},
    io,
    os::fd::OwnedFd,
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    limits,
    v1::{HeldGraph, SaveGraphHead},
};
use tokio::{
    sync::OnceCell,
    time::{Instant, timeout_at},
};

pub use lane::{Fill, Sink, Source};
pub use saved::{Constants, Port, Saved};

use crate::{
    access::{Caller, Want},
    fleet::Link,
    service::Shared,
};
use folder::Folder;
use plan::Plan;

/// How long a call without a deadline waits for a worker.
const PATIENCE: Duration = Duration::from_secs(30);
/// Workers that may die under one call while they compute it; as many as under a tensor session's call.
const MAX_DEATHS: u32 = limits::TENSOR_RECOVERIES;
/// Workers that may die under one call, whatever they did.
const MAX_TRIES: u32 = limits::MAX_CONTINUATIONS;
/// How long a worker keeps a graph that nobody asks for.
const IDLE: Duration = Duration::from_secs(60);

/// What a call brings, and what becomes of its results.
pub struct Call {
    /// Rows of the symbolic dimension; 0 if the graph has none.
    pub rows: u64,
    /// One for each input that is no constant.
    pub inputs: Vec<Source>,
    /// One for each output.
    pub outputs: Vec<Sink>,
    /// When its client waits no longer.
    pub deadline: Option<Instant>,
}

/// What a call gave.
#[derive(Debug)]
pub struct Done {
    /// Bytes of each output; none of one that went elsewhere.
    pub outputs: Vec<Bytes>,
    /// Time on the device.
    pub compute: Duration,
}

/// A graph on a worker: which, the worker's name, its epoch.
type Place = (u64, String, u64);

#[derive(Default)]
struct Table {
    by_name: BTreeMap<ModelName, Arc<Saved>>,
    bytes: u64,
}

#[derive(Default)]
struct Inner {
    table: Mutex<Table>,
    plans: Mutex<HashMap<Place, Arc<OnceCell<Arc<Plan>>>>>,
    next: AtomicU64,
    /// Where they are kept for the next start.
    folder: OnceLock<Folder>,
}

/// The saved graphs. Clones share them.
#[derive(Clone, Default)]
pub struct Graphs(Arc<Inner>);

/// A graph of this name is not there.
fn unknown(name: &str) -> Error {
    let short: String = name.chars().take(80).collect();
    let what = format!("no graph is saved as {short:?}");
    Error::new(Reason::ModelNotFound, what).with("model", short)
}

fn taken(name: &ModelName, by: &str) -> Error {
    let what = format!("{name} is the name of {by}; choose another one");
    Error::new(Reason::ModelExists, what).with("model", name)
}

impl Graphs {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn plans(&self) -> MutexGuard<'_, HashMap<Place, Arc<OnceCell<Arc<Plan>>>>> {
        self.0.plans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The graph of this name, if the caller may know of it.
    pub fn find(&self, name: &str, caller: &Caller) -> Option<Arc<Saved>> {
        let name = ModelName::new(name).ok()?;
        let table = self.table();
        let saved = table.by_name.get(&name);
        saved.filter(|saved| caller.owns(&saved.tenant)).cloned()
    }

    /// Whether a graph of anybody has this name.
    pub fn has(&self, name: &ModelName) -> bool {
        self.table().by_name.contains_key(name)
    }

    /// Those that the caller may know of, by name.
    pub fn list(&self, caller: &Caller) -> Vec<Arc<Saved>> {
        let table = self.table();
        let its = table.by_name.values();
        its.filter(|saved| caller.owns(&saved.tenant))
            .cloned()
            .collect()
    }

    /// Whether there is room for one more of so many bytes, and its name is free.
    fn admit(
        &self,
        shared: &Shared,
        table: &Table,
        (name, replace): (&ModelName, bool),
        bytes: u64,
        caller: &Caller,
    ) -> Result<(), Error> {
        if shared.fleet.resolve(name.as_str()).is_ok() {
            return Err(taken(name, "a model"));
        }
        let before = table.by_name.get(name);
        match before {
            Some(before) if !caller.owns(&before.tenant) => {
                return Err(taken(name, "another tenant's graph"));
            }
            Some(_) if !replace => {
                return Err(taken(name, "a saved graph, and it was not to be replaced"));
            }
            _ => {}
        }
        let count = table.by_name.len() + usize::from(before.is_none());
        let own = before.map_or(0, |before| before.bytes());
        let all = (table.bytes - own).saturating_add(bytes);
        for (what, have, limit) in [
            (
                "saved graphs",
                count as u64,
                limits::MAX_SAVED_GRAPHS as u64,
            ),
            (
                "bytes of saved graphs",
                all,
                limits::MAX_SAVED_GRAPHS_BYTES as u64,
            ),
        ] {
            if have > limit {
                let what = format!(
                    "{have} {what} are more than the {limit} that are kept here; forget some first"
                );
                return Err(Error::new(Reason::LimitExceeded, what).with("limit", limit));
            }
        }
        Ok(())
    }

    /// Keeps a graph, once a worker has looked at it.
    ///
    /// # Errors
    /// [`Reason::ModelExists`], [`Reason::GraphInvalid`] and what else a worker finds wrong, [`Reason::LimitExceeded`],
    /// [`Reason::QuotaExceeded`], [`Reason::NoWorker`].
    pub async fn save(
        &self,
        shared: &Shared,
        caller: &Caller,
        head: SaveGraphHead,
        constants: Constants,
    ) -> Result<Arc<Saved>, Error> {
        let name = ModelName::new(head.name.as_str())?;
        let replace = head.replace;
        let bytes = constants.bytes().saturating_add(head.graph.len() as u64);
        // Before a worker has any work with it, and again once it has.
        self.admit(shared, &self.table(), (&name, replace), bytes, caller)?;
        let tenant = caller.tenant("").to_owned();
        let limits = shared.access.limits(&tenant);
        let want = Want {
            tensor_bytes: bytes,
            ..Want::default()
        };
        let held = shared.access.tenants.take(&tenant, &limits, want)?;
        let until = Instant::now() + PATIENCE;
        let mut deaths = Deaths::default();
        let found = loop {
            let link = self.worker(shared, until).await?;
            match plan::examine(shared, Arc::clone(&link), &head).await {
                Ok(found) => break found,
                Err(error) => deaths.count(&link, error, false).await?,
            }
        };
        let saved = Saved::new(name.clone(), tenant, head, constants, found, held)?;
        let saved = Arc::new(saved.numbered(self.0.next.fetch_add(1, Ordering::Relaxed)));
        let mut table = self.table();
        self.admit(shared, &table, (&name, replace), bytes, caller)?;
        if let Some(folder) = self.0.folder.get() {
            // Under the lock: of two who save under one name, the later one's is kept in both places.
            folder.write(&saved)?;
        }
        table.bytes += saved.bytes();
        if let Some(before) = table.by_name.insert(name, Arc::clone(&saved)) {
            table.bytes -= before.bytes();
            drop(table);
            self.drop_plans(before.id);
        }
        Ok(saved)
    }

    /// Forgets a graph. Calls that run end.
    ///
    /// # Errors
    /// [`Reason::ModelNotFound`].
    pub fn forget(&self, name: &str, caller: &Caller) -> Result<(), Error> {
        let saved = self.find(name, caller).ok_or_else(|| unknown(name))?;
        let mut table = self.table();
        // Unless another one took its place meanwhile.
        if table
            .by_name
            .get(&saved.name)
            .is_some_and(|s| s.id == saved.id)
        {
            if let Some(folder) = self.0.folder.get() {
                folder.remove(&saved.name)?;
            }
            table.by_name.remove(&saved.name);
            table.bytes -= saved.bytes();
        }
        drop(table);
        self.drop_plans(saved.id);
        Ok(())
    }

    fn drop_plans(&self, id: u64) {
        self.plans().retain(|(of, ..), _| *of != id);
    }

    /// A worker that serves, the one with the least to do.
    async fn worker(&self, shared: &Shared, until: Instant) -> Result<Arc<Link>, Error> {
        let mut changes = shared.fleet.changes();
        loop {
            if shared.admission.is_closed() {
                return Err(crate::admission::draining());
            }
            changes.see();
            let busy = |link: &Link| self.running(&link.worker, link.epoch);
            let error = match shared.fleet.for_graphs(busy) {
                Ok(link) => return Ok(link),
                Err(error) => error,
            };
            tokio::select! {
                () = shared.abort.cancelled() => return Err(crate::admission::draining()),
                waited = timeout_at(until, changes.changed()) => if waited.is_err() {
                    return Err(error);
                },
            }
        }
    }

    /// Calls of saved graphs that this worker computes.
    fn running(&self, worker: &str, epoch: u64) -> u64 {
        let plans = self.plans();
        let here = plans
            .iter()
            .filter(|((_, w, e), _)| w == worker && *e == epoch);
        here.filter_map(|(_, plan)| Some(plan.get()?.running()))
            .sum()
    }

    /// The graph on this worker, planned now if it is not yet.
    async fn plan(
        &self,
        shared: &Shared,
        saved: &Arc<Saved>,
        link: &Arc<Link>,
    ) -> Result<Arc<Plan>, Error> {
        let place = (saved.id, link.worker.clone(), link.epoch);
        let cell = {
            let mut plans = self.plans();
            Arc::clone(plans.entry(place.clone()).or_default())
        };
        let make = async || {
            let plan = Plan::make(shared, saved, Arc::clone(link)).await?;
            let plan = Arc::new(plan);
            tokio::spawn(keep(
                Arc::downgrade(&self.0),
                place.clone(),
                Arc::clone(&plan),
            ));
            Ok(plan)
        };
        let made = cell.get_or_try_init(make).await.cloned();
        if made.is_err() {
            let mut plans = self.plans();
            if plans.get(&place).is_some_and(|c| Arc::ptr_eq(c, &cell)) && cell.get().is_none() {
                plans.remove(&place);
            }
        }
        made
    }

    /// Computes a graph.
    ///
    /// # Errors
    /// What the worker says, [`Reason::DeadlineExceeded`], [`Reason::NoWorker`], [`Reason::Draining`];
    /// [`Reason::RequestPoisoned`] if workers die of it.
    pub async fn run(
        &self,
        shared: &Shared,
        saved: &Arc<Saved>,
        call: &Call,
    ) -> Result<Done, Error> {
        let late = || {
            let what = format!("graph {} took longer than its client waits", saved.name);
            Error::new(Reason::DeadlineExceeded, what)
        };
        let attempts = async {
            let mut deaths = Deaths::default();
            loop {
                let until = call.deadline.unwrap_or_else(|| Instant::now() + PATIENCE);
                let link = self.worker(shared, until).await?;
                let planned = self.plan(shared, saved, &link).await;
                let computes = planned.is_ok();
                let done = match planned {
                    Ok(plan) => plan.run(call).await,
                    Err(error) => Err(error),
                };
                match done {
                    Ok(done) => return Ok(done),
                    Err(error) => deaths.count(&link, error, computes).await?,
                }
                let place = (saved.id, link.worker.clone(), link.epoch);
                self.plans().remove(&place);
            }
        };
        let all = async {
            tokio::select! {
                () = shared.abort.cancelled() => Err(crate::admission::draining()),
                done = attempts => done,
            }
        };
        match call.deadline {
            None => all.await,
            Some(deadline) => timeout_at(deadline, all)
                .await
                .unwrap_or_else(|_| Err(late())),
        }
    }

    /// Keeps them in this folder from now on, and takes what is there and not known yet.
    ///
    /// # Errors
    /// If it is no folder of this user's, or cannot be read.
    pub fn keep_in(&self, shared: &Shared, folder: &Path) -> io::Result<()> {
        let folder = Folder::open(folder)?;
        for file in folder.files()? {
            let restored = folder.read(&file).and_then(|memory| {
                let saved = held(shared, memory)?;
                saved.verify()?;
                self.keep(saved)
            });
            if let Err(error) = restored {
                tracing::warn!(file, %error, "a saved graph is left out");
            }
        }
        for saved in self.table().by_name.values() {
            folder.write(saved).map_err(io::Error::other)?;
        }
        let _ = self.0.folder.set(folder);
        Ok(())
    }

    /// All of them, for another program.
    pub fn hold(&self) -> Vec<HeldGraph> {
        self.table()
            .by_name
            .values()
            .map(|saved| saved.hold())
            .collect()
    }

    /// Takes what another program held.
    ///
    /// # Errors
    /// If it contradicts itself.
    pub fn restore(&self, shared: &Shared, memory: OwnedFd) -> Result<(), Error> {
        self.keep(held(shared, memory)?)
    }

    fn keep(&self, saved: Saved) -> Result<(), Error> {
        let saved = saved.numbered(self.0.next.fetch_add(1, Ordering::Relaxed));
        let mut table = self.table();
        if table.by_name.contains_key(&saved.name) {
            // It was handed over by the program before this one, and lies in the folder too.
            return Ok(());
        }
        if table.by_name.len() >= limits::MAX_SAVED_GRAPHS {
            let what = format!("there is no place for the graph {}", saved.name);
            return Err(Error::new(Reason::LimitExceeded, what));
        }
        table.bytes += saved.bytes();
        table.by_name.insert(saved.name.clone(), Arc::new(saved));
        Ok(())
    }
}
/// A graph in this memory, its bytes counted.
fn held(shared: &Shared, memory: OwnedFd) -> Result<Saved, Error> {
    Saved::restore(memory, |tenant, bytes| {
        let want = Want {
            tensor_bytes: bytes,
            ..Want::default()
        };
        shared.access.tenants.note(tenant, want)
    })
}

/// Workers that died under one call.
#[derive(Default)]
struct Deaths {
    all: u32,
    /// While they computed it.
    computing: u32,
}

impl Deaths {
    /// Counts the worker if it died of this or meanwhile, so that the call is made again.
    ///
    /// # Errors
    /// The error if the worker lives; [`Reason::RequestPoisoned`] after too many deaths.
    async fn count(&mut self, link: &Link, error: Error, computes: bool) -> Result<(), Error> {
        let ended = matches!(
            error.reason(),
            Reason::WorkerLost | Reason::SessionNotFound | Reason::HandleStale
        );
        if !ended || !link.is_lost().await {
            return Err(error);
        }
        self.all += 1;
        self.computing += u32::from(computes);
        if self.computing > MAX_DEATHS || self.all > MAX_TRIES {
            let what = format!(
                "{} workers died under this call; it is not made again",
                self.all
            );
            return Err(Error::new(Reason::RequestPoisoned, what));
        }
        Ok(())
    }
}

/// Forgets a plan once nobody asked for it for a while, or its worker is gone.
async fn keep(inner: std::sync::Weak<Inner>, place: Place, plan: Arc<Plan>) {
    loop {
        plan.idle(IDLE).await;
        let Some(inner) = inner.upgrade() else { return };
        let graphs = Graphs(inner);
        let mut plans = graphs.plans();
        match plans.get(&place) {
            // Another one by now, or none.
            Some(cell) if !cell.get().is_some_and(|p| Arc::ptr_eq(p, &plan)) => return,
            None => return,
            // Nobody has it but the table and this: whoever takes it does so under the lock.
            Some(_) if Arc::strong_count(&plan) <= 2 => {
                plans.remove(&place);
                return;
            }
            Some(_) => {}
        }
    }
}

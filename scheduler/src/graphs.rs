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
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    limits,
    v1::SaveGraphHead,
};
use tokio::{
    sync::watch,
    task::spawn_blocking,
    time::{Instant, sleep_until, timeout_at},
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
/// Workers that may die under one call; as many as under a tensor session's call.
const MAX_DEATHS: u32 = limits::TENSOR_RECOVERIES;
/// Graphs that one worker has planned at once: its other sessions are its clients'.
const MAX_PLANS: usize = limits::MAX_SESSIONS / 4;
/// Graphs of one tenant.
const MAX_OF_TENANT: usize = limits::MAX_SAVED_GRAPHS / 4;
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
    /// Whose it is.
    pub tenant: String,
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

/// A plan that is being made, or was.
type Made = watch::Receiver<Option<Result<Arc<Plan>, Error>>>;

#[derive(Default)]
struct Inner {
    table: Mutex<Table>,
    /// Held by who changes what is saved, while a file is written.
    changing: tokio::sync::Mutex<()>,
    plans: Mutex<HashMap<Place, Made>>,
    next: AtomicU64,
    /// Where they are kept for the next start.
    folder: OnceLock<Arc<Folder>>,
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

    fn plans(&self) -> MutexGuard<'_, HashMap<Place, Made>> {
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
        let tenant = caller.tenant("");
        let others = table
            .by_name
            .values()
            .filter(|saved| saved.tenant == tenant);
        let own_count = match tenant {
            "" => 0,
            _ => others.count() + usize::from(before.is_none()),
        };
        for (what, have, limit) in [
            (
                "saved graphs",
                count as u64,
                limits::MAX_SAVED_GRAPHS as u64,
            ),
            (
                "saved graphs of one tenant",
                own_count as u64,
                MAX_OF_TENANT as u64,
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

    /// Whether a graph may be saved under its name, before its constants come.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    pub fn may_save(
        &self,
        shared: &Shared,
        head: &SaveGraphHead,
        caller: &Caller,
    ) -> Result<(), Error> {
        let name = ModelName::new(head.name.as_str())?;
        let bytes = head.graph.len() as u64;
        self.admit(shared, &self.table(), (&name, head.replace), bytes, caller)
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
        // What is replaced stays whose it is, whoever replaces it.
        let before = self
            .table()
            .by_name
            .get(&name)
            .map(|saved| saved.tenant.clone());
        let tenant = before.unwrap_or_else(|| caller.tenant("").to_owned());
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
                Err(error) => deaths.count(&link, error).await?,
            }
        };
        let saved = Saved::new(name.clone(), tenant, head, constants, found, held)?;
        let saved = Arc::new(saved.numbered(self.0.next.fetch_add(1, Ordering::Relaxed)));
        // Of two who save under one name, the later one's is kept in both places.
        let _changing = self.0.changing.lock().await;
        self.admit(shared, &self.table(), (&name, replace), bytes, caller)?;
        if let Some(folder) = self.0.folder.get().cloned() {
            let saved = Arc::clone(&saved);
            beside(move || folder.write(&saved)).await?;
        }
        let mut table = self.table();
        table.bytes += saved.bytes();
        let before = table.by_name.insert(name, Arc::clone(&saved));
        if let Some(before) = &before {
            table.bytes -= before.bytes();
        }
        drop(table);
        if let Some(before) = before {
            self.drop_plans(before.id);
        }
        Ok(saved)
    }

    /// Forgets a graph. Calls that run end.
    ///
    /// # Errors
    /// [`Reason::ModelNotFound`].
    pub async fn forget(&self, name: &str, caller: &Caller) -> Result<(), Error> {
        let _changing = self.0.changing.lock().await;
        let saved = self.find(name, caller).ok_or_else(|| unknown(name))?;
        if let Some(folder) = self.0.folder.get().cloned() {
            let name = saved.name.clone();
            beside(move || folder.remove(&name)).await?;
        }
        let mut table = self.table();
        if table.by_name.remove(&saved.name).is_some() {
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
        here.filter_map(|(_, made)| Some(made.borrow().as_ref()?.as_ref().ok()?.running()))
            .sum()
    }

    /// The graph on this worker, planned now if it is not yet. That goes on if who asked for it first leaves.
    async fn plan(
        &self,
        shared: &Shared,
        saved: &Arc<Saved>,
        link: &Arc<Link>,
    ) -> Result<Arc<Plan>, Error> {
        let place = (saved.id, link.worker.clone(), link.epoch);
        let mut made = {
            let mut plans = self.plans();
            match plans.get(&place) {
                Some(made) => made.clone(),
                None => {
                    make_room(&mut plans, &place)?;
                    let (to, made) = watch::channel(None);
                    plans.insert(place.clone(), made.clone());
                    let making = Making {
                        graphs: self.clone(),
                        shared: shared.clone(),
                        saved: Arc::clone(saved),
                        link: Arc::clone(link),
                        place,
                    };
                    tokio::spawn(making.run(to));
                    made
                }
            }
        };
        let made = made.wait_for(Option::is_some).await;
        let lost = |_| Error::new(Reason::Internal, "a plan was not made");
        made.map_err(lost)?
            .clone()
            .unwrap_or_else(|| Err(Error::new(Reason::Internal, "a plan is none")))
    }

    /// Forgets the plan, unless another one took its place.
    fn forget_plan(&self, place: &Place, plan: &Arc<Plan>) {
        let mut plans = self.plans();
        let same =
            |made: &Made| matches!(&*made.borrow(), Some(Ok(known)) if Arc::ptr_eq(known, plan));
        if plans.get(place).is_some_and(same) {
            plans.remove(place);
        }
    }

    async fn try_once(
        &self,
        shared: &Shared,
        saved: &Arc<Saved>,
        link: &Arc<Link>,
        call: &Call,
    ) -> Result<Done, Error> {
        let plan = self.plan(shared, saved, link).await?;
        let done = plan.run(call).await;
        if done.as_ref().is_err_and(is_over) {
            let place = (saved.id, link.worker.clone(), link.epoch);
            self.forget_plan(&place, &plan);
        }
        done
    }

    /// Computes a graph.
    ///
    /// # Errors
    /// What the worker says, [`Reason::DeadlineExceeded`], [`Reason::NoWorker`], [`Reason::Draining`],
    /// [`Reason::QuotaExceeded`]; [`Reason::RequestPoisoned`] if workers die of it.
    pub async fn run(
        &self,
        shared: &Shared,
        saved: &Arc<Saved>,
        call: &Call,
    ) -> Result<Done, Error> {
        if shared.admission.is_closed() {
            return Err(crate::admission::draining());
        }
        // A drain waits for it.
        let _call = shared.tensors.enter();
        let limits = shared.access.limits(&call.tenant);
        let want = Want {
            requests: 1,
            ..Want::default()
        };
        let _held = shared.access.tenants.take(&call.tenant, &limits, want)?;
        let late = || {
            let what = format!("graph {} took longer than its client waits", saved.name);
            Error::new(Reason::DeadlineExceeded, what)
        };
        let attempts = async {
            let mut deaths = Deaths::default();
            loop {
                let until = call.deadline.unwrap_or_else(|| Instant::now() + PATIENCE);
                let link = self.worker(shared, until).await?;
                match self.try_once(shared, saved, &link, call).await {
                    Ok(done) => return Ok(done),
                    Err(error) => deaths.count(&link, error).await?,
                }
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
        let _ = self.0.folder.set(Arc::new(folder));
        Ok(())
    }

    /// All of them, by name.
    pub fn all(&self) -> Vec<Arc<Saved>> {
        self.table().by_name.values().cloned().collect()
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
        let bytes = table.bytes.saturating_add(saved.bytes());
        if table.by_name.len() >= limits::MAX_SAVED_GRAPHS
            || bytes > limits::MAX_SAVED_GRAPHS_BYTES as u64
        {
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

/// Does something with files beside the event loop.
async fn beside(work: impl FnOnce() -> Result<(), Error> + Send + 'static) -> Result<(), Error> {
    let failed = |e| Error::new(Reason::Internal, format!("a file was not changed: {e}"));
    spawn_blocking(work).await.map_err(failed)?
}

/// Room for one more plan on a worker, perhaps that of the one which nobody asked for for longest.
fn make_room(plans: &mut HashMap<Place, Made>, place: &Place) -> Result<(), Error> {
    let (_, worker, epoch) = place;
    let here = plans
        .iter()
        .filter(|((_, w, e), _)| (w, e) == (worker, epoch));
    if here.clone().count() < MAX_PLANS {
        return Ok(());
    }
    let idle = here.filter_map(|(place, made)| {
        let made = made.borrow();
        let plan = made
            .as_ref()?
            .as_ref()
            .ok()
            .filter(|plan| plan.running() == 0)?;
        Some((plan.idle_at(Duration::ZERO), place.clone()))
    });
    let oldest = idle.min_by_key(|(since, _)| *since);
    let (_, oldest) = oldest.ok_or_else(|| {
        let what =
            format!("worker {worker} computes {MAX_PLANS} saved graphs already; try again later");
        Error::new(Reason::Overloaded, what)
    })?;
    plans.remove(&oldest);
    Ok(())
}

/// Makes a plan, whoever waits for it.
struct Making {
    graphs: Graphs,
    shared: Shared,
    saved: Arc<Saved>,
    link: Arc<Link>,
    place: Place,
}

impl Making {
    async fn run(self, to: watch::Sender<Option<Result<Arc<Plan>, Error>>>) {
        let made = tokio::select! {
            () = self.shared.abort.cancelled() => Err(crate::admission::draining()),
            made = Plan::make(&self.shared, &self.saved, self.link) => made.map(Arc::new),
        };
        match &made {
            Ok(plan) => {
                let inner = Arc::downgrade(&self.graphs.0);
                tokio::spawn(keep(inner, self.place, Arc::downgrade(plan)));
            }
            Err(_) => {
                let mut plans = self.graphs.plans();
                let same = |made: &Made| made.same_channel(&to.subscribe());
                if plans.get(&self.place).is_some_and(same) {
                    plans.remove(&self.place);
                }
            }
        }
        to.send_replace(Some(made));
    }
}

/// Whether an error tells that a worker, or the session on it, is there no more.
fn is_over(error: &Error) -> bool {
    matches!(
        error.reason(),
        Reason::WorkerLost | Reason::SessionNotFound | Reason::HandleStale
    )
}

/// What was lost under one call.
#[derive(Default)]
struct Deaths {
    workers: u32,
    /// Sessions whose workers live.
    sessions: u32,
}

impl Deaths {
    /// Counts what was lost, so that the call is made again.
    ///
    /// # Errors
    /// The error if nothing was; [`Reason::RequestPoisoned`] after too many deaths.
    async fn count(&mut self, link: &Link, error: Error) -> Result<(), Error> {
        if !is_over(&error) {
            return Err(error);
        }
        if !link.is_lost().await {
            self.sessions += 1;
            return match self.sessions {
                1 => Ok(()),
                _ => Err(error),
            };
        }
        self.workers += 1;
        if self.workers > MAX_DEATHS {
            let what = format!(
                "{} workers died under this call; it is not made again",
                self.workers
            );
            return Err(Error::new(Reason::RequestPoisoned, what));
        }
        Ok(())
    }
}

/// Forgets a plan once nobody asked for it for a while.
async fn keep(inner: Weak<Inner>, place: Place, plan: Weak<Plan>) {
    loop {
        let at = match plan.upgrade() {
            Some(plan) => plan.idle_at(IDLE),
            None => return,
        };
        if at > Instant::now() {
            sleep_until(at).await;
            continue;
        }
        if let (Some(inner), Some(plan)) = (inner.upgrade(), plan.upgrade()) {
            Graphs(inner).forget_plan(&place, &plan);
        }
        return;
    }
}

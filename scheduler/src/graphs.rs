//! Graphs that clients saved under names, and where they run.
//!
//! A graph's bytes and those of its constants lie in sealed memory; nothing of them is read here. What its inputs and outputs
//! are is a worker's word, within bounds. A saved graph runs on any worker: each that ran it once has it planned, and its
//! constants, in a session of the scheduler's own, until nobody asked for a while. A call has no effect but its results, so
//! one whose worker died is made again on another, and nobody notices.

mod constants;
mod folder;
mod in_place;
mod lane;
mod plan;
mod run;
mod saved;
mod session;
mod suspect;

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
use tokio::{sync::watch, task::spawn_blocking, time::Instant};

pub use constants::Constants;
pub use in_place::{ClientMemory, Look, Spot};
pub use lane::{Fill, Sink, Source};
pub use saved::{Port, Saved};

use crate::{
    access::{Caller, Want},
    service::Shared,
};
use folder::Folder;
use plan::Plan;
use run::{Deaths, PATIENCE};

/// Graphs of one tenant.
const MAX_OF_TENANT: usize = limits::MAX_SAVED_GRAPHS / 4;

/// Bytes of all graphs, with those that are gone but for their last calls.
const MAX_THERE: u64 = 2 * limits::MAX_SAVED_GRAPHS_BYTES as u64;

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
    /// Bytes of all graphs that are there, with those that were replaced or forgotten and whose last calls run.
    there: Arc<AtomicU64>,
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
        let there = self.0.there.load(Ordering::Relaxed).saturating_add(bytes);
        if there > MAX_THERE {
            let what = format!(
                "graphs that were replaced or forgotten are still computed, and all of them have {there} bytes; try again later"
            );
            return Err(Error::new(Reason::Overloaded, what));
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
        let before = self.table().by_name.get(&name).cloned();
        let (tenant, own) = before.map_or_else(
            || (caller.tenant("").to_owned(), 0),
            |before| (before.tenant.clone(), before.bytes()),
        );
        let limits = shared.access.limits(&tenant);
        let tenants = &shared.access.tenants;
        let held = tenants.take_instead(&tenant, &limits, of_bytes(bytes), of_bytes(own))?;
        let until = Instant::now() + PATIENCE;
        let mut deaths = Deaths::default();
        let found = loop {
            let link = self.worker(shared, until).await?;
            match plan::examine(shared, Arc::clone(&link), &head).await {
                Ok(found) => break found,
                Err(error) => deaths.count(&link, error).await?,
            };
            deaths.bear()?;
        };
        let own = name.clone();
        let saved = move || Saved::new(own, tenant, head, constants, found, held);
        let saved = beside(saved).await?;
        // Of two who save under one name, the later one's is kept in both places, also if who asked for it leaves.
        let (graphs, shared, caller) = (self.clone(), shared.clone(), caller.clone());
        let keeping = async move { graphs.take(&shared, saved, (replace, bytes), &caller).await };
        let kept = tokio::spawn(keeping).await;
        kept.unwrap_or_else(|_| Err(Error::new(Reason::Internal, "the graph was not kept")))
    }

    /// Keeps a graph that was looked at, in the folder and in the table.
    async fn take(
        &self,
        shared: &Shared,
        saved: Saved,
        (replace, bytes): (bool, u64),
        caller: &Caller,
    ) -> Result<Arc<Saved>, Error> {
        let _changing = self.0.changing.lock().await;
        let name = saved.name.clone();
        self.admit(shared, &self.table(), (&name, replace), bytes, caller)?;
        let saved = Arc::new(self.numbered(saved));
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
        // In both places, also if who asked for it leaves.
        let (graphs, name, caller) = (self.clone(), name.to_owned(), caller.clone());
        let forgetting = async move { graphs.remove(&name, &caller).await };
        let forgotten = tokio::spawn(forgetting).await;
        forgotten.unwrap_or_else(|_| Err(Error::new(Reason::Internal, "it was not forgotten")))
    }

    async fn remove(&self, name: &str, caller: &Caller) -> Result<(), Error> {
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

    /// Serves a graph again that was refused, and forgets what was known against it.
    ///
    /// # Errors
    /// [`Reason::ModelNotFound`].
    pub fn clear(&self, name: &str, caller: &Caller) -> Result<(), Error> {
        let saved = self.find(name, caller).ok_or_else(|| unknown(name))?;
        saved.suspect.clear();
        Ok(())
    }

    /// Takes what another program held.
    ///
    /// # Errors
    /// If it contradicts itself.
    pub fn restore(&self, shared: &Shared, memory: OwnedFd, known: HeldGraph) -> Result<(), Error> {
        let saved = held(shared, memory)?;
        self.keep(saved.known_for(known.deaths, known.blamed))
    }

    /// The graph under a number of its own, its bytes counted for as long as it is there.
    fn numbered(&self, saved: Saved) -> Saved {
        let id = self.0.next.fetch_add(1, Ordering::Relaxed);
        saved.numbered(id, Arc::clone(&self.0.there))
    }

    fn keep(&self, saved: Saved) -> Result<(), Error> {
        let saved = self.numbered(saved);
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

/// So many bytes, as tenants have them.
fn of_bytes(tensor_bytes: u64) -> Want {
    Want {
        tensor_bytes,
        ..Want::default()
    }
}

/// A graph in this memory, its bytes counted.
fn held(shared: &Shared, memory: OwnedFd) -> Result<Saved, Error> {
    Saved::restore(memory, |tenant, bytes| {
        shared.access.tenants.note(tenant, of_bytes(bytes))
    })
}

/// Does something with files, or memory that is to be sealed, beside the event loop.
async fn beside<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let failed = |e| {
        Error::new(
            Reason::Internal,
            format!("files or memory of graphs were not changed: {e}"),
        )
    };
    spawn_blocking(work).await.map_err(failed)?
}

//! What a model passes before it is loaded: it is opened, its files are compared with what the policy lists, and it is
//! looked into.

use std::{
    collections::VecDeque,
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    limits,
    v1::{ModelState, Serving},
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::timeout,
};

use super::{Fleet, catalog::Model, checked_serving};
use crate::{
    audit::{Audit, Entry, Who},
    config::Timeouts,
    death::Death,
    digest::{self, Sha},
    policy::ModelPolicy,
    vault::{self, OpenModel, Source},
};

/// The gate, and what is remembered there.
pub(super) struct Gate {
    pub(super) policy: Arc<ModelPolicy>,
    pub(super) audit: Audit,
    /// Verdicts by digest, the oldest first.
    verdicts: Mutex<VecDeque<(Sha, Result<(), Error>)>>,
    /// Places for workers that look into models, and how many there have been.
    places: Arc<Semaphore>,
    looks: AtomicU64,
}

impl Gate {
    pub(super) fn new(policy: Arc<ModelPolicy>, audit: Audit) -> Self {
        Self {
            policy,
            audit,
            verdicts: Mutex::default(),
            places: Arc::new(Semaphore::new(limits::MAX_INSPECTIONS)),
            looks: AtomicU64::new(0),
        }
    }

    /// A place to look into a model, and the number of that look.
    ///
    /// # Errors
    /// [`Reason::Overloaded`] when there is none for as long as a request waits.
    pub(super) async fn place(
        &self,
        timeouts: &Timeouts,
    ) -> Result<(OwnedSemaphorePermit, u64), Error> {
        let place = Arc::clone(&self.places).acquire_owned();
        let place = timeout(timeouts.queue, place)
            .await
            .ok()
            .and_then(Result::ok);
        let place = place.ok_or_else(|| {
            let why = format!(
                "{} models are being looked into already; try again later",
                limits::MAX_INSPECTIONS
            );
            Error::new(Reason::Overloaded, why)
        })?;
        Ok((place, self.looks.fetch_add(1, Ordering::Relaxed) + 1))
    }

    fn known(&self, sha: &Sha) -> Option<Result<(), Error>> {
        let verdicts = self.verdicts.lock().unwrap_or_else(PoisonError::into_inner);
        let found = verdicts.iter().find(|(known, _)| known == sha);
        found.map(|(_, verdict)| verdict.clone())
    }

    fn remember(&self, sha: Sha, verdict: &Result<(), Error>) {
        let mut verdicts = self.verdicts.lock().unwrap_or_else(PoisonError::into_inner);
        if verdicts.len() >= limits::KEPT_VERDICTS {
            verdicts.pop_front();
        }
        verdicts.push_back((sha, verdict.clone()));
    }
}

impl Fleet {
    /// Opens a model's files as the policy says.
    ///
    /// # Errors
    /// As [`vault::open`].
    pub(super) async fn open(&self, path: PathBuf) -> Result<OpenModel, Error> {
        let (roots, policy) = (self.model_roots.clone(), Arc::clone(&self.gate.policy));
        // Not on this thread: a dead network share may take minutes, and a copy takes as long as its bytes.
        let opened = tokio::task::spawn_blocking(move || vault::open(&path, &roots, &policy)).await;
        opened.map_err(|e| Error::new(Reason::Internal, format!("cannot open it: {e}")))?
    }

    /// Lets a model's files in, or not. What is looked into once is remembered by its bytes.
    ///
    /// # Errors
    /// Why it may not be loaded.
    pub(super) async fn admit(
        self: &Arc<Self>,
        source: &Source,
        files: &Arc<OpenModel>,
        who: &Who,
    ) -> Result<(), Error> {
        let policy = &self.gate.policy;
        if !policy.has_gates() {
            return Ok(());
        }
        let hashes = digest::of_model(files).await.map_err(|error| {
            let what = format!("the model's files cannot be read: {error}");
            Error::new(Reason::ModelChanged, what)
        })?;
        files.check()?;
        let names = || files.each().map(|(name, ..)| name).zip(&hashes);
        policy.check_hashes(names())?;
        if !policy.require_inspection {
            return Ok(());
        }
        let sha = digest::of_all(names());
        if let Some(verdict) = self.gate.known(&sha) {
            return verdict;
        }
        let found = self.inspect(source, files, who).await?;
        let verdict = policy.judge(&found);
        // The bytes that were hashed are those that were looked into, unless they changed.
        files.check()?;
        self.gate.remember(sha, &verdict);
        verdict
    }

    /// Makes a model known that is loaded once it has passed the gate.
    ///
    /// # Errors
    /// [`Reason::ModelExists`] when another one has one of its names.
    pub fn announce(&self, name: ModelName, path: PathBuf, serving: &Serving) -> Result<(), Error> {
        let mut model = Model::new(Source::Path(path), true);
        // Requests for it wait.
        model.state = ModelState::Loading;
        let aliases = checked_serving(serving)?;
        {
            let mut table = self.table();
            table.is_nobodys(&name)?;
            table.give_names(&name, &aliases)?;
            model.serving = serving.clone();
            model.configured_serving = Some(serving.clone());
            table.models.insert(name.clone(), model);
        }
        self.tell();
        Ok(())
    }

    /// Loads the models that were made known so, one after the other, beside everything else.
    pub fn load_expected(self: &Arc<Self>, names: Vec<ModelName>) {
        let fleet = Arc::clone(self);
        self.keepers.spawn(async move {
            for name in names {
                let (progress, _) = mpsc::channel(1);
                let load = fleet.load_key(Who::configuration(), name.clone(), None, None, progress);
                let loaded = tokio::select! {
                    () = fleet.stop.cancelled() => return,
                    loaded = load => loaded,
                };
                if let Err(error) = loaded {
                    fleet.give_up(&name, error);
                }
            }
        });
    }

    /// A model is not to be had.
    pub(super) fn give_up(&self, name: &ModelName, error: Error) {
        let mut table = self.table();
        if let Some(model) = table.models.get_mut(name)
            && !matches!(model.state, ModelState::Loaded | ModelState::Failed)
        {
            tracing::error!(model = %name, %error, "a model is not loaded");
            model.fail(error);
        }
        drop(table);
        self.tell();
    }

    /// Notes a load in the audit log.
    pub(super) fn audit_load(
        &self,
        who: &Who,
        name: &str,
        source: &str,
        loaded: Result<&str, &Error>,
    ) {
        let entry = Entry {
            event: "load",
            who: Some(who),
            model: name,
            source: source.to_owned(),
            ..Entry::default()
        };
        self.gate.audit.note(match loaded {
            Ok(trust_domain) => Entry {
                outcome: "loaded",
                trust_domain,
                ..entry
            },
            Err(error) => Entry {
                outcome: "refused",
                reason: error.reason().name(),
                detail: error.message().to_owned(),
                ..entry
            },
        });
    }

    /// Unloads a model for somebody whom the audit log names.
    ///
    /// # Errors
    /// As [`unload`](Self::unload).
    pub async fn unload_for(self: &Arc<Self>, who: &Who, name: &ModelName) -> Result<(), Error> {
        let unloaded = self.unload(name).await;
        let failed = unloaded.as_ref().err();
        self.gate.audit.note(Entry {
            event: "unload",
            who: Some(who),
            model: name.as_str(),
            outcome: if failed.is_none() {
                "unloaded"
            } else {
                "refused"
            },
            reason: failed.map_or("", |error| error.reason().name()),
            ..Entry::default()
        });
        unloaded
    }

    /// Notes a death in the audit log.
    pub(super) fn audit_death(&self, worker: &str, epoch: u64, death: &Death) {
        self.gate.audit.note(Entry {
            event: "death",
            worker,
            epoch: Some(epoch),
            outcome: death.kind.name(),
            detail: death.to_string(),
            ..Entry::default()
        });
    }

    /// Refuses a remote client a model that is not configured, if there is a policy.
    ///
    /// # Errors
    /// [`Reason::ModelNotAllowed`].
    pub fn check_remote(&self, name: &ModelName) -> Result<(), Error> {
        let table = self.table();
        let model = table.key(name).and_then(|key| table.models.get(key));
        if !self.gate.policy.is_given() || model.is_none_or(|model| model.configured) {
            return Ok(());
        }
        let what = format!(
            "model {name} is not configured; a client over TCP can name configured models only"
        );
        Err(Error::new(Reason::ModelNotAllowed, what).with("model", name))
    }
}

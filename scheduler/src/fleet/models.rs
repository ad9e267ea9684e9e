//! Models: which are wanted, which worker has which, and loading them.

use std::{path::PathBuf, sync::Arc};

use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    v1::{EventKind, LoadModelProgress, Loaded, ModelInfo, ModelState},
};
use tokio::{sync::mpsc, task::JoinSet};

use super::{
    Condemnation, Fleet, Link, LoadFailure, Wanted,
    catalog::{Model, Standing},
    slot::Slot,
};
use crate::{
    audit::Who,
    events::About,
    vault::{self, OpenModel, Source},
};

/// Where a load's progress goes. What does not fit is left out: a client that does not read delays no load.
pub type ProgressSender = mpsc::Sender<LoadModelProgress>;

impl Fleet {
    /// Makes a model known before workers start; they load it then. What is wrong with it is kept as its
    /// problem.
    pub fn configure(&self, name: ModelName, source: Source, files: Result<OpenModel, Error>) {
        let mut model = Model::new(source, true);
        match files {
            Ok(files) => {
                model.files = Some(Arc::new(files));
                model.has_room = true;
                model.state = ModelState::Loading;
            }
            Err(error) => {
                tracing::error!(model = %name, %error, "a configured model cannot be opened");
                model.fail(error);
            }
        }
        self.table().models.insert(name, model);
        self.tell();
    }

    /// All models.
    pub fn models(&self) -> Vec<ModelInfo> {
        let table = self.table();
        let models = table.models.iter();
        models.map(|(name, m)| table.info(name, m)).collect()
    }

    /// The model that a request means; an empty name means the default one, or the only one.
    ///
    /// # Errors
    /// [`Reason::ModelNotFound`] or [`Reason::InvalidArgument`], with the names there are.
    pub fn resolve(&self, name: &str) -> Result<ModelName, Error> {
        self.table().resolve(name)
    }

    pub(super) fn note_loading(&self, worker: &str, model: Option<&ModelName>) {
        if let Some(slot) = self.table().workers.get_mut(worker) {
            slot.loading = model.cloned();
        }
    }

    /// A worker has a model, as these files are it.
    pub(super) fn note_loaded(
        &self,
        worker: &str,
        epoch: u64,
        name: &ModelName,
        files: &Arc<OpenModel>,
        got: &Loaded,
    ) {
        let mut table = self.table();
        // Whatever has become of the model meanwhile, the worker is done with it.
        if let Some(slot) = table.workers.get_mut(worker).filter(|s| s.is_alive(epoch))
            && slot.loading.as_ref() == Some(name)
        {
            slot.loading = None;
        }
        let model = table.models.get_mut(name).filter(|m| m.is_wanted());
        let Some(model) = model.filter(|m| m.files.as_ref().is_some_and(|f| Arc::ptr_eq(f, files)))
        else {
            return;
        };
        let first = model.state == ModelState::Loading;
        if first {
            model.uses.touch();
        }
        model.state = ModelState::Loaded;
        model.problem = None;
        model.strikes = 0;
        if model.summary.is_none() {
            model.summary.clone_from(&got.summary);
        }
        let slot = table.workers.get_mut(worker);
        if let Some(slot) = slot.filter(|s| s.is_alive(epoch)) {
            slot.models.insert(name.clone(), got.clone());
        }
        drop(table);
        if first {
            tracing::info!(model = %name, worker, "model loaded");
            let about = About {
                worker,
                epoch,
                model: name.as_str(),
            };
            self.events.tell(EventKind::ModelLoaded, about, "");
        }
        self.tell();
    }

    /// A starting worker will not have a model. If none has it or may come to, it has failed.
    pub(super) fn note_refused(&self, worker: &str, name: &ModelName, error: &Error) {
        tracing::error!(model = %name, worker, %error, "a worker cannot load a model");
        let mut table = self.table();
        if let Some(slot) = table.workers.get_mut(worker) {
            slot.loading = None;
            slot.refused.insert(name.clone());
        }
        if let Some(model) = table.models.get_mut(name).filter(|m| m.is_wanted()) {
            model.problem = Some(error.clone());
        }
        table.settle();
        drop(table);
        self.tell();
    }

    /// Loads a model on every ready worker, and on those that come up meanwhile; returns once one has it. The
    /// same name and source again is no error. Goes on if the caller stops waiting.
    ///
    /// # Errors
    /// Why it cannot be opened or loaded; it stays known as failed then.
    pub async fn load(
        self: &Arc<Self>,
        name: Option<ModelName>,
        path: Option<PathBuf>,
        progress: ProgressSender,
    ) -> Result<ModelInfo, Error> {
        self.load_for(Who::default(), name, path, progress).await
    }

    /// [`load_as`](Self::load_as), as it is served already, or as it is configured.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub async fn load_for(
        self: &Arc<Self>,
        who: Who,
        name: Option<ModelName>,
        path: Option<PathBuf>,
        progress: ProgressSender,
    ) -> Result<ModelInfo, Error> {
        self.load_as(who, name, path, None, progress).await
    }

    /// [`load`](Self::load), for somebody whom the audit log names, and served as they say.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub async fn load_as(
        self: &Arc<Self>,
        who: Who,
        name: Option<ModelName>,
        path: Option<PathBuf>,
        serving: Option<Wanted>,
        progress: ProgressSender,
    ) -> Result<ModelInfo, Error> {
        let name = match (name, &path) {
            (Some(name), _) => name,
            (None, Some(path)) => vault::name_of(path)?,
            (None, None) => {
                let what = "name a configured model, or give a path";
                return Err(Error::new(Reason::InvalidArgument, what));
            }
        };
        let key = self.table().key(&name).cloned().unwrap_or(name);
        self.load_key(who, key, path, serving, progress).await
    }

    /// The same for a model by its own name.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub(super) async fn load_key(
        self: &Arc<Self>,
        who: Who,
        name: ModelName,
        path: Option<PathBuf>,
        serving: Option<Wanted>,
        progress: ProgressSender,
    ) -> Result<ModelInfo, Error> {
        let fleet = Arc::clone(self);
        let load = async move {
            let asked = name.to_string();
            let from = path
                .as_ref()
                .map_or_else(String::new, |p| p.display().to_string());
            let loaded = fleet.load_now(&who, (name, path), serving, progress).await;
            match &loaded {
                Ok(m) => fleet.audit_load(&who, &m.name, &m.source, Ok(&m.trust_domain)),
                Err(error) => fleet.audit_load(&who, &asked, &from, Err(error)),
            }
            loaded
        };
        tokio::spawn(load)
            .await
            .unwrap_or_else(|e| Err(Error::new(Reason::Internal, format!("loading failed: {e}"))))
    }

    async fn load_now(
        self: &Arc<Self>,
        who: &Who,
        (name, path): (ModelName, Option<PathBuf>),
        serving: Option<Wanted>,
        progress: ProgressSender,
    ) -> Result<ModelInfo, Error> {
        let _one_at_a_time = self.loads.one(&name).await;
        let (source, same) = self.identify(&name, path).await?;
        let (files, preparing) = match self.known_files(&name, same)? {
            Some(files) => {
                files.check()?;
                (files, None)
            }
            None => {
                let Source::Path(path) = source.clone() else {
                    return Err(Error::new(
                        Reason::ModelNotFound,
                        format!("model {name} has no bytes any more; restart the scheduler"),
                    ));
                };
                let preparing = self.loads.prepare().await;
                let files = Arc::new(self.open(path).await?);
                self.admit(&source, &files, who).await?;
                (files, preparing)
            }
        };
        let footprint = match self.is_tight(&name, &files) {
            true => Some(self.measure(&files).await?),
            false => None,
        };
        drop(preparing);
        let entered = self.enter_memory(&name, || {
            let mut table = self.table();
            // Others may have come meanwhile.
            table.has_room_for(&name)?;
            table.is_nobodys(&name)?;
            let names = serving.as_ref().map(Wanted::names).transpose()?;
            if let Some(names) = names.flatten() {
                table.give_names(&name, &names)?;
            }
            let model = table
                .models
                .entry(name.clone())
                .or_insert_with(|| Model::new(source.clone(), false));
            if !model.files.as_ref().is_some_and(|f| Arc::ptr_eq(f, &files)) {
                model.source = source.clone();
                model.files = Some(Arc::clone(&files));
                model.summary = None;
                model.footprint = None;
            }
            model.footprint = footprint.or(model.footprint);
            if let Some(serving) = &serving {
                model.serving = serving.over(std::mem::take(&mut model.serving));
            }
            table.choose_homes(&name);
            Ok(())
        });
        let _spreads = match entered.await {
            Ok(spreads) => spreads,
            Err(error) => {
                // Nothing has become of it if it was there already, or may come to be.
                if !matches!(error.reason(), Reason::ModelExists | Reason::LimitExceeded) {
                    self.give_up(&name, error.clone());
                }
                return Err(error);
            }
        };
        self.spread(&name, &progress).await?;
        self.withdraw_strays(&name).await;
        let table = self.table();
        match table.models.get(&name) {
            Some(model) => Ok(table.info(&name, model)),
            None => Err(table.unknown(&name)),
        }
    }

    /// Source of the model that is meant, and whether that is the one it has already.
    async fn identify(
        &self,
        name: &ModelName,
        path: Option<PathBuf>,
    ) -> Result<(Source, bool), Error> {
        let Some(path) = path else {
            let table = self.table();
            let model = table.models.get(name).ok_or_else(|| table.unknown(name))?;
            return Ok((model.source.clone(), true));
        };
        let held = {
            let table = self.table();
            table.has_room_for(name)?;
            table.models.get(name).map(|m| m.source.clone())
        };
        // Two ways to write a path are one source. What cannot be resolved will be refused when it is opened.
        // Not on this thread, nor under the lock: a dead network share may take minutes.
        let resolve = |path: PathBuf| std::fs::canonicalize(&path).unwrap_or(path);
        let resolved = tokio::task::spawn_blocking(move || {
            let path = resolve(path);
            let same = match held {
                Some(Source::Path(held)) => held == path || resolve(held) == path,
                _ => false,
            };
            (path, same)
        });
        let (path, same) = resolved
            .await
            .map_err(|e| Error::new(Reason::Internal, format!("cannot resolve a path: {e}")))?;
        Ok((Source::Path(path), same))
    }

    /// The open files of a model that is loaded already, or was and kept them.
    fn known_files(&self, name: &ModelName, same: bool) -> Result<Option<Arc<OpenModel>>, Error> {
        let table = self.table();
        let Some(model) = table.models.get(name) else {
            return Ok(None);
        };
        if model.is_wanted() && !same {
            return Err(Error::new(
                Reason::ModelExists,
                format!(
                    "a model called {name} is loaded from {}; unload it or choose another name",
                    model.source
                ),
            )
            .with("model", name));
        }
        let keep = same && (model.is_wanted() || !model.source.can_be_read_again());
        Ok(model.files.clone().filter(|_| keep))
    }

    /// Has every ready worker without the model load it, and waits until one has it or none will.
    pub(super) async fn spread(
        self: &Arc<Self>,
        name: &ModelName,
        progress: &ProgressSender,
    ) -> Result<(), Error> {
        let mut changed = self.changes();
        let (lacking, alone) = {
            let mut table = self.table();
            let guest = table.guest(name);
            let Some(model) = table.models.get_mut(name) else {
                return Err(table.unknown(name));
            };
            let Some(files) = model.files.clone() else {
                return table.usable(name).map(drop);
            };
            // What is to take another one's place has to prove itself.
            let open = model.standing == Standing::Open;
            model.problem = None;
            model.strikes = 0;
            let held = table.has(name);
            if let Some(model) = table.models.get_mut(name) {
                model.state = match (model.state, held) {
                    (ModelState::Loaded, _) | (_, true) => ModelState::Loaded,
                    _ => ModelState::Loading,
                };
            }
            let homes = table.models.get(name).and_then(|m| m.homes.clone());
            let is_home = |slot: &Slot| {
                let homes = homes.as_ref().filter(|_| slot.guest.is_none());
                homes.is_none_or(|homes| homes.contains(&slot.device.id))
            };
            let mut lacking = Vec::new();
            for slot in table.workers.values_mut() {
                slot.refused.remove(name);
                if let Some(link) = slot.link.clone()
                    && !slot.models.contains_key(name)
                    && slot.guest == guest
                    && is_home(slot)
                {
                    slot.loading = Some(name.clone());
                    lacking.push((link, Arc::clone(&files)));
                }
            }
            let many = table.workers.values().filter(|s| table.may_get(s, name));
            let alone = open && !held && many.count() == 1;
            (lacking, alone)
        };
        self.tell();
        if let Err(error) = self.host_guest(name) {
            self.give_up(name, error.clone());
            return Err(error);
        }
        let mut loads = JoinSet::new();
        for (link, files) in lacking {
            let (fleet, name, progress) = (Arc::clone(self), name.clone(), progress.clone());
            loads.spawn(async move {
                let load = fleet.load_on(&link, &name, &files, alone, &progress);
                load.await
            });
        }
        let mut refusal = None;
        while let Some(done) = loads.join_next().await {
            if let Ok(Some(error)) = done {
                refusal = Some(error);
            }
        }
        // Workers that died on the way or are starting load it before they serve.
        loop {
            changed.see();
            {
                let mut table = self.table();
                let hope = table.workers.values().any(|s| table.may_get(s, name));
                let serves = |s: &Slot| s.link.is_some() && s.models.contains_key(name);
                let has = table.workers.values().any(serves);
                let Some(model) = table.models.get_mut(name) else {
                    return Err(table.unknown(name));
                };
                match (model.state, &model.problem) {
                    (ModelState::Loaded, _) if has || !hope => return Ok(()),
                    (ModelState::Loaded, _) => {}
                    (ModelState::Failed, Some(problem)) => return Err(problem.clone()),
                    _ if refusal.is_none() && hope => {}
                    _ => {
                        let error = refusal.or(model.problem.take()).unwrap_or_else(|| {
                            Error::new(
                                Reason::NoWorker,
                                "no worker is there to load it; `hotcell ps` shows why",
                            )
                        });
                        model.fail(error.clone());
                        drop(table);
                        self.tell();
                        return Err(error);
                    }
                }
            }
            changed.changed().await;
        }
    }

    /// Loads a model on one ready worker, which may be `alone` to have it; returns why it refused.
    async fn load_on(
        self: &Arc<Self>,
        link: &Arc<Link>,
        name: &ModelName,
        files: &Arc<OpenModel>,
        alone: bool,
        progress: &ProgressSender,
    ) -> Option<Error> {
        let report = |bytes_done, bytes_total, stage: &str| {
            let _ = progress.try_send(LoadModelProgress {
                name: name.as_str().to_owned(),
                worker: link.worker.clone(),
                bytes_done,
                bytes_total,
                stage: crate::discover::clip(stage),
                ..LoadModelProgress::default()
            });
        };
        let load = self.hand_over(link, name, files, true, self.policy.start_timeout, |p| {
            report(p.bytes_done, p.bytes_total, &p.stage);
        });
        let got = tokio::select! {
            biased;
            () = link.fate.gone.cancelled() => return None,
            got = load => got,
        };
        match got {
            Ok(got) => {
                // With nobody to differ from, the answer would only keep those waiting who want the model.
                if alone && self.is_the_first(name, &got) {
                    self.examine_soon(link, name, &got);
                } else {
                    let examined = tokio::select! {
                        () = link.fate.gone.cancelled() => return None,
                        examined = self.examine(link, name, &got) => examined,
                    };
                    if let Err(why) = examined {
                        self.note_loading(&link.worker, None);
                        link.fate.condemn(why);
                        link.fate.gone.cancelled().await;
                        return None;
                    }
                }
                self.note_loaded(&link.worker, link.epoch, name, files, &got);
                report(files.bytes(), files.bytes(), "ready");
                None
            }
            Err(LoadFailure::Refused(error)) => {
                self.note_loading(&link.worker, None);
                tracing::error!(model = %name, worker = link.worker, %error, "a worker cannot load a model");
                Some(error)
            }
            // Its model stays noted as loading, so that the death counts against it.
            Err(LoadFailure::Broken(kind, why)) => {
                let why = format!("while loading {name}: {why}");
                link.fate.condemn(Condemnation::new(kind, why));
                link.fate.gone.cancelled().await;
                None
            }
        }
    }

    /// Has every worker forget a model. Running requests for it end as the workers decide. Goes on if the caller
    /// stops waiting.
    ///
    /// # Errors
    /// [`Reason::ModelNotFound`] for an unknown one.
    pub async fn unload(self: &Arc<Self>, name: &ModelName) -> Result<(), Error> {
        let name = self.table().key(name).unwrap_or(name).clone();
        self.unload_key(name).await
    }

    /// The same for a model by its own name.
    ///
    /// # Errors
    /// As [`unload`](Self::unload).
    pub(super) async fn unload_key(self: &Arc<Self>, name: ModelName) -> Result<(), Error> {
        let fleet = Arc::clone(self);
        tokio::spawn(async move { fleet.unload_now(&name).await })
            .await
            .unwrap_or_else(|e| {
                Err(Error::new(
                    Reason::Internal,
                    format!("unloading failed: {e}"),
                ))
            })
    }

    async fn unload_now(&self, name: &ModelName) -> Result<(), Error> {
        let _one_at_a_time = self.loads.one(name).await;
        let _spreads = self.loads.spread().await;
        let (links, files) = {
            let mut table = self.table();
            let Some(model) = table.models.get_mut(name) else {
                return Err(table.unknown(name));
            };
            model.state = ModelState::Available;
            model.has_room = false;
            model.problem = None;
            model.summary = None;
            let files = model.files.clone();
            if !model.configured {
                table.models.remove(name);
                table.drop_names();
            } else if model.source.can_be_read_again() {
                // Opened again when it is loaded again.
                model.files = None;
            }
            (table.take_away(name), files)
        };
        self.forget_answers(name);
        self.tell();
        self.unload_from(links, name).await;
        if let Some(files) = files {
            self.release_unwanted(name, &files).await;
        }
        let about = About {
            model: name.as_str(),
            ..About::default()
        };
        self.events.tell(EventKind::ModelUnloaded, about, "");
        Ok(())
    }
}

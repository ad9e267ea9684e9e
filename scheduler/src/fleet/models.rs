//! Models: which are wanted, which worker has which, and loading them.

use std::{path::PathBuf, sync::Arc};

use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    limits,
    v1::{EventKind, LoadModelProgress, Loaded, ModelInfo, ModelState, ModelSummary},
};
use tokio::{sync::mpsc, task::JoinSet};

use super::{Condemnation, Fleet, Link, LoadFailure, Table};
use crate::{
    events::About,
    vault::{self, OpenModel, Source},
};

/// Where a load's progress goes. What does not fit is left out: a client that does not read delays no load.
pub type ProgressSender = mpsc::Sender<LoadModelProgress>;

/// Workers that may die while they load a model before it is given up; one may have been killed for another
/// reason just then.
const STRIKES: u32 = 3;

/// A model the scheduler knows.
#[derive(Clone, Debug)]
pub struct Model {
    /// Where its bytes come from.
    pub source: Source,
    /// Whether it stays known after it is unloaded.
    pub configured: bool,
    /// What is happening to it.
    pub state: ModelState,
    /// Its files, once opened.
    pub files: Option<Arc<OpenModel>>,
    /// A worker's words about it, once one has it.
    pub summary: Option<ModelSummary>,
    /// Why it could not be loaded.
    pub problem: Option<Error>,
    strikes: u32,
}

impl Model {
    fn new(source: Source, configured: bool) -> Self {
        Self {
            source,
            configured,
            state: ModelState::Available,
            files: None,
            summary: None,
            problem: None,
            strikes: 0,
        }
    }

    fn is_wanted(&self) -> bool {
        matches!(self.state, ModelState::Loading | ModelState::Loaded)
    }

    fn fail(&mut self, problem: Error) {
        self.state = ModelState::Failed;
        self.problem = Some(problem);
    }
}

impl Table {
    /// Every model that each worker should have.
    pub(super) fn wanted(&self) -> Vec<(ModelName, Arc<OpenModel>)> {
        let wanted = self.models.iter().filter(|(_, m)| m.is_wanted());
        wanted
            .filter_map(|(name, m)| Some((name.clone(), Arc::clone(m.files.as_ref()?))))
            .collect()
    }

    /// Whether requests for a model may wait for it (`true` while it is being loaded).
    pub(super) fn usable(&self, name: &ModelName) -> Result<bool, Error> {
        let model = self.models.get(name).ok_or_else(|| self.unknown(name))?;
        match (model.state, &model.problem) {
            (ModelState::Loaded, _) => Ok(false),
            (ModelState::Loading, _) => Ok(true),
            (_, Some(problem)) => Err(Error::new(
                problem.reason(),
                format!("model {name} could not be loaded: {problem}"),
            )
            .with("model", name)),
            _ => Err(Error::new(
                Reason::ModelNotFound,
                format!("model {name} is not loaded; load it with `hotcell load {name}`"),
            )
            .with("model", name)),
        }
    }

    fn unknown(&self, name: &ModelName) -> Error {
        let known: Vec<_> = self.models.keys().take(8).map(ModelName::as_str).collect();
        let way_out = match &known[..] {
            [] => "no model is loaded; load one with `hotcell load PATH`".to_owned(),
            names => format!("there is {}", names.join(", ")),
        };
        Error::new(
            Reason::ModelNotFound,
            format!("no model is called {name}; {way_out}"),
        )
        .with("model", name)
    }

    pub(super) fn strike(&mut self, name: &ModelName, reason: &str) {
        let Some(model) = self.models.get_mut(name).filter(|m| m.is_wanted()) else {
            return;
        };
        model.strikes += 1;
        tracing::warn!(model = %name, strikes = model.strikes, reason, "a worker died while loading");
        if model.strikes >= STRIKES {
            model.fail(
                Error::new(
                    Reason::WorkerLost,
                    format!("{STRIKES} workers died while loading it, the last one: {reason}"),
                )
                .with("model", name),
            );
        }
    }

    fn has(&self, name: &ModelName) -> bool {
        self.workers.values().any(|s| s.models.contains_key(name))
    }

    fn info(&self, name: &ModelName, model: &Model) -> ModelInfo {
        let workers = self.workers.iter();
        let only = self.models.len() == 1;
        let default = self.default_model.as_ref();
        ModelInfo {
            name: name.as_str().to_owned(),
            state: model.state.into(),
            source: model.source.to_string(),
            summary: model.summary.clone(),
            file_bytes: model.files.as_ref().map_or(0, |f| f.bytes()),
            workers: workers
                .filter(|(_, slot)| slot.models.contains_key(name))
                .map(|(id, _)| id.clone())
                .collect(),
            problem: model
                .problem
                .as_ref()
                .map(|p| p.message().to_owned())
                .unwrap_or_default(),
            is_default: default.map_or(only, |d| d == name),
        }
    }
}

impl Fleet {
    /// Makes a model known before workers start; they load it then. What is wrong with it is kept as its
    /// problem.
    pub fn configure(&self, name: ModelName, source: Source, files: Result<OpenModel, Error>) {
        let mut model = Model::new(source, true);
        match files {
            Ok(files) => {
                model.files = Some(Arc::new(files));
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
        let table = self.table();
        if !name.is_empty() {
            let name = ModelName::new(name)?;
            return match table.models.contains_key(&name) {
                true => Ok(name),
                false => Err(table.unknown(&name)),
            };
        }
        if let Some(default) = &table.default_model {
            return Ok(default.clone());
        }
        let mut wanted = table.models.iter().filter(|(_, m)| m.is_wanted());
        let first = wanted.next().or_else(|| table.models.iter().next());
        match (first, wanted.next()) {
            (Some((name, _)), None) => Ok(name.clone()),
            (None, _) => Err(Error::new(
                Reason::ModelNotFound,
                "no model is loaded; load one with `hotcell load PATH`",
            )),
            _ => {
                let names: Vec<_> = table.models.keys().take(8).map(ModelName::as_str).collect();
                Err(Error::new(
                    Reason::ModelNotFound,
                    format!(
                        "the request names no model and there are several: name one of {}, or set default_model",
                        names.join(", ")
                    ),
                ))
            }
        }
    }

    pub(super) fn note_loading(&self, worker: &str, model: Option<&ModelName>) {
        if let Some(slot) = self.table().workers.get_mut(worker) {
            slot.loading = model.cloned();
        }
    }

    /// A worker has a model. One that is in service may be given requests for it from now on.
    pub(super) fn note_loaded(
        &self,
        worker: &str,
        epoch: u64,
        name: &ModelName,
        got: &Loaded,
        in_service: bool,
    ) {
        let mut table = self.table();
        let Some(model) = table.models.get_mut(name).filter(|m| m.is_wanted()) else {
            return;
        };
        let first = model.state != ModelState::Loaded;
        model.state = ModelState::Loaded;
        model.strikes = 0;
        if model.summary.is_none() {
            model.summary.clone_from(&got.summary);
        }
        let slot = table.workers.get_mut(worker);
        if let Some(slot) = slot.filter(|s| in_service && s.epoch == epoch && s.link.is_some()) {
            slot.loading = None;
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

    /// A worker will not have a model. If none has it, it has failed.
    pub(super) fn note_refused(&self, worker: &str, name: &ModelName, error: &Error) {
        tracing::error!(model = %name, worker, %error, "a worker cannot load a model");
        let mut table = self.table();
        let nobody = !table.has(name);
        if let Some(model) = table.models.get_mut(name)
            && model.state == ModelState::Loading
            && nobody
        {
            model.fail(error.clone());
        }
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
        let fleet = Arc::clone(self);
        tokio::spawn(async move { fleet.load_now(name, path, progress).await })
            .await
            .unwrap_or_else(|e| Err(Error::new(Reason::Internal, format!("loading failed: {e}"))))
    }

    async fn load_now(
        self: &Arc<Self>,
        name: Option<ModelName>,
        path: Option<PathBuf>,
        progress: ProgressSender,
    ) -> Result<ModelInfo, Error> {
        let _one_at_a_time = self.loading.lock().await;
        let (name, source) = self.identify(name, path)?;
        if let Some(files) = self.known_files(&name, &source)? {
            files.check()?;
        } else {
            let Source::Path(path) = source.clone() else {
                return Err(Error::new(
                    Reason::ModelNotFound,
                    format!("model {name} has no bytes any more; restart the scheduler"),
                ));
            };
            let roots = self.model_roots.clone();
            let opened = tokio::task::spawn_blocking(move || vault::open(&path, &roots)).await;
            let files = opened
                .map_err(|e| Error::new(Reason::Internal, format!("cannot open {name}: {e}")))??;
            let mut table = self.table();
            let model = table
                .models
                .entry(name.clone())
                .or_insert_with(|| Model::new(source.clone(), false));
            model.source = source;
            model.files = Some(Arc::new(files));
            model.summary = None;
        }
        self.spread(&name, &progress).await?;
        let table = self.table();
        match table.models.get(&name) {
            Some(model) => Ok(table.info(&name, model)),
            None => Err(table.unknown(&name)),
        }
    }

    /// Name and source of the model that is meant.
    fn identify(
        &self,
        name: Option<ModelName>,
        path: Option<PathBuf>,
    ) -> Result<(ModelName, Source), Error> {
        let table = self.table();
        let Some(path) = path else {
            let name = name.ok_or_else(|| {
                Error::new(
                    Reason::InvalidArgument,
                    "name a configured model, or give a path",
                )
            })?;
            let model = table
                .models
                .get(&name)
                .ok_or_else(|| table.unknown(&name))?;
            return Ok((name, model.source.clone()));
        };
        let name = name.map_or_else(|| vault::name_of(&path), Ok)?;
        if !table.models.contains_key(&name) && table.models.len() >= limits::MAX_MODELS {
            return Err(Error::new(
                Reason::LimitExceeded,
                format!(
                    "{} models are known already; unload one",
                    limits::MAX_MODELS
                ),
            ));
        }
        // Two ways to write a path are one source. What cannot be resolved will be refused when it is opened.
        let path = std::fs::canonicalize(&path).unwrap_or(path);
        Ok((name, Source::Path(path)))
    }

    /// The open files of a model that is loaded already, or was and kept them.
    fn known_files(
        &self,
        name: &ModelName,
        source: &Source,
    ) -> Result<Option<Arc<OpenModel>>, Error> {
        let table = self.table();
        let Some(model) = table.models.get(name) else {
            return Ok(None);
        };
        let same = match (&model.source, source) {
            (Source::Path(held), Source::Path(new)) => {
                held == new || std::fs::canonicalize(held).is_ok_and(|held| held == *new)
            }
            (held, new) => held == new,
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
        let keep = same && (model.is_wanted() || model.source == Source::Bundled);
        Ok(model.files.clone().filter(|_| keep))
    }

    /// Has every ready worker without the model load it, and waits until one has it or none will.
    async fn spread(
        self: &Arc<Self>,
        name: &ModelName,
        progress: &ProgressSender,
    ) -> Result<(), Error> {
        let mut changed = self.changes();
        let lacking = {
            let mut table = self.table();
            let Some(model) = table.models.get_mut(name) else {
                return Err(table.unknown(name));
            };
            let Some(files) = model.files.clone() else {
                return table.usable(name).map(drop);
            };
            if model.state != ModelState::Loaded {
                model.state = ModelState::Loading;
            }
            model.problem = None;
            model.strikes = 0;
            let mut lacking = Vec::new();
            for slot in table.workers.values_mut() {
                if let Some(link) = slot.link.clone()
                    && !slot.models.contains_key(name)
                {
                    slot.loading = Some(name.clone());
                    lacking.push((link, Arc::clone(&files)));
                }
            }
            lacking
        };
        self.tell();
        let mut loads = JoinSet::new();
        for (link, files) in lacking {
            let (fleet, name, progress) = (Arc::clone(self), name.clone(), progress.clone());
            loads.spawn(async move { fleet.load_on(&link, &name, &files, &progress).await });
        }
        let mut refusal = None;
        while let Some(done) = loads.join_next().await {
            if let Ok(Some(error)) = done {
                refusal = Some(error);
            }
        }
        // Workers that died on the way or are starting load it before they serve.
        loop {
            changed.borrow_and_update();
            {
                let mut table = self.table();
                let hope = table
                    .workers
                    .values()
                    .any(|s| s.hopeful && s.link.is_none());
                let has = table.has(name);
                let Some(model) = table.models.get_mut(name) else {
                    return Err(table.unknown(name));
                };
                match (model.state, &model.problem) {
                    (ModelState::Loaded, _) if has || !hope => return Ok(()),
                    (ModelState::Loaded, _) => {}
                    (_, Some(problem)) => return Err(problem.clone()),
                    _ if refusal.is_none() && hope => {}
                    _ => {
                        let error = refusal.unwrap_or_else(|| {
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
            let _ = changed.changed().await;
        }
    }

    /// Loads a model on one ready worker; returns why it refused.
    async fn load_on(
        &self,
        link: &Arc<Link>,
        name: &ModelName,
        files: &OpenModel,
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
        let load = link.load(name, files, self.policy.start_timeout, |p| {
            report(p.bytes_done, p.bytes_total, &p.stage);
        });
        let got = tokio::select! {
            () = link.fate.gone.cancelled() => return None,
            got = load => got,
        };
        match got {
            Ok(got) => {
                self.note_loaded(&link.worker, link.epoch, name, &got, true);
                report(files.bytes(), files.bytes(), "ready");
                None
            }
            Err(LoadFailure::Refused(error)) => {
                self.note_loading(&link.worker, None);
                tracing::error!(model = %name, worker = link.worker, %error, "a worker cannot load a model");
                Some(error)
            }
            // Its model stays noted as loading, so that the death counts against it.
            Err(LoadFailure::Broken(why)) => {
                let why = format!("while loading {name}: {why}");
                link.fate.condemn(Condemnation::new(why));
                link.fate.gone.cancelled().await;
                None
            }
        }
    }

    /// Has every worker forget a model. Running requests for it end as the workers decide.
    ///
    /// # Errors
    /// [`Reason::ModelNotFound`] for an unknown one.
    pub async fn unload(&self, name: &ModelName) -> Result<(), Error> {
        let _one_at_a_time = self.loading.lock().await;
        let links: Vec<_> = {
            let mut table = self.table();
            let Some(model) = table.models.get_mut(name) else {
                return Err(table.unknown(name));
            };
            model.state = ModelState::Available;
            model.problem = None;
            model.summary = None;
            if !model.configured {
                table.models.remove(name);
            } else if model.source != Source::Bundled {
                // Opened again when it is loaded again.
                model.files = None;
            }
            let holders = table.workers.values_mut();
            holders
                .filter_map(|slot| slot.models.remove(name).and(slot.link.clone()))
                .collect()
        };
        self.tell();
        for link in links {
            if let Err(error) = link.unload(name).await {
                tracing::warn!(model = %name, worker = link.worker, %error, "a worker cannot unload a model");
            }
        }
        let about = About {
            model: name.as_str(),
            ..About::default()
        };
        self.events.tell(EventKind::ModelUnloaded, about, "");
        Ok(())
    }
}

//! The models of the table: what is known of each, without effects.

use std::{
    collections::BTreeSet,
    sync::{Arc, atomic::Ordering},
};

use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    limits,
    v1::{ModelInfo, ModelState, ModelSummary, PackedInfo, Serving},
};

use super::{
    Asked, Link, Table,
    guests::Guest,
    serving::Uses,
    slot::{Slot, TRUSTED, UNTRUSTED},
};
use crate::{
    death::Death,
    room::Footprint,
    vault::{OpenModel, Source},
};

/// Workers that may die while they load a model before it is given up; one may have been killed for another
/// reason just then.
const STRIKES: u32 = 3;

/// Whether requests come to a model by its names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Standing {
    /// They do.
    #[default]
    Open,
    /// Not yet: it is to take another one's place.
    Coming,
    /// No more: another one has its place, and it ends with those that came before.
    Replaced,
}

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
    /// Why it could not be loaded, or why a worker would not while others may.
    pub problem: Option<Error>,
    /// How it is served.
    pub serving: Serving,
    /// How the configuration says that it is, if that names it.
    pub(super) configured_serving: Option<Serving>,
    /// What it takes, once that was measured.
    pub(super) footprint: Option<Footprint>,
    /// The devices that are to have it; none: all.
    pub(super) homes: Option<BTreeSet<String>>,
    pub(super) uses: Arc<Uses>,
    pub(super) standing: Standing,
    /// Whether memory is set apart for it: it is there or on its way.
    pub(super) has_room: bool,
    pub(super) strikes: u32,
}

impl Model {
    pub(super) fn new(source: Source, configured: bool) -> Self {
        Self {
            source,
            configured,
            state: ModelState::Available,
            files: None,
            summary: None,
            problem: None,
            serving: Serving::default(),
            configured_serving: configured.then(Serving::default),
            footprint: None,
            homes: None,
            uses: Arc::default(),
            standing: Standing::Open,
            has_room: false,
            strikes: 0,
        }
    }

    /// Whether workers are to have it.
    pub(super) fn is_wanted(&self) -> bool {
        matches!(self.state, ModelState::Loading | ModelState::Loaded)
    }

    /// Whether requests that name no model may mean it.
    fn is_open(&self) -> bool {
        use ModelState::{Asleep, Loaded, Loading};
        self.standing == Standing::Open && matches!(self.state, Loading | Loaded | Asleep)
    }

    /// Whether a request for it would be served.
    pub(super) fn can_be_asked(&self) -> bool {
        use ModelState::{Asleep, Loaded};
        self.standing == Standing::Open && matches!(self.state, Loaded | Asleep)
    }

    /// What there is to say of its state.
    pub(super) fn told_state(&self) -> ModelState {
        match (self.standing, self.state) {
            (Standing::Replaced, state) if state != ModelState::Failed => ModelState::Retiring,
            (_, state) => state,
        }
    }

    /// Its trust domain, once it is open.
    pub(super) fn domain(&self) -> &'static str {
        match &self.files {
            None => "",
            Some(files) if files.alone().is_some() => UNTRUSTED,
            Some(_) => TRUSTED,
        }
    }

    pub(super) fn fail(&mut self, problem: Error) {
        self.state = ModelState::Failed;
        self.has_room = false;
        self.problem = Some(problem);
    }
}

impl Table {
    /// Every model that workers should have.
    pub(super) fn wanted(&self) -> impl Iterator<Item = (ModelName, Arc<OpenModel>)> {
        let wanted = self.models.iter().filter(|(_, m)| m.is_wanted());
        wanted.filter_map(|(name, m)| Some((name.clone(), Arc::clone(m.files.as_ref()?))))
    }

    /// What a worker that was asked to load `loaded` has to load still, and to forget. A device's own has all that are
    /// trusted, another one its guest.
    pub(super) fn difference(
        &self,
        guest: Option<&Guest>,
        device: &str,
        loaded: &Asked,
    ) -> (Vec<(ModelName, Arc<OpenModel>)>, Vec<ModelName>) {
        let homes = |name: &ModelName| self.models.get(name).and_then(|m| m.homes.as_ref());
        let its = |(name, files): &(ModelName, Arc<OpenModel>)| {
            Guest::of(name, files).as_ref() == guest
                && (guest.is_some() || homes(name).is_none_or(|homes| homes.contains(device)))
        };
        let wanted: Vec<_> = self.wanted().filter(its).collect();
        let missing = wanted.iter().filter(|(name, files)| {
            let asked = loaded.get(name);
            !asked.is_some_and(|(asked, _)| Arc::ptr_eq(asked, files))
        });
        // Those that it would not load among them: what is remembered of them holds their files.
        let unwanted = loaded.iter().filter(|(name, (files, _))| {
            let still = |(w, f): &(ModelName, _)| w == *name && Arc::ptr_eq(f, files);
            !wanted.iter().any(still)
        });
        let unwanted = unwanted.map(|(name, _)| name.clone()).collect();
        (missing.cloned().collect(), unwanted)
    }

    /// Whether requests for a model may wait for it (`true` while it is being loaded).
    pub(super) fn usable(&self, name: &ModelName) -> Result<bool, Error> {
        let model = self.models.get(name).ok_or_else(|| self.unknown(name))?;
        match (model.state, &model.problem) {
            (ModelState::Loaded, _) => Ok(false),
            (ModelState::Loading | ModelState::Asleep, _) => Ok(true),
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

    /// Whether a model of that name may be known.
    ///
    /// # Errors
    /// [`Reason::LimitExceeded`] if there are too many others.
    pub(super) fn has_room_for(&self, name: &ModelName) -> Result<(), Error> {
        if self.models.contains_key(name) || self.models.len() < limits::MAX_MODELS {
            return Ok(());
        }
        let known = limits::MAX_MODELS;
        let what = format!("{known} models are known already; unload one");
        Err(Error::new(Reason::LimitExceeded, what))
    }

    pub(super) fn unknown(&self, name: &ModelName) -> Error {
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

    /// Counts a worker that died while it loaded a model. One that another worker has is not to blame.
    pub(super) fn strike(&mut self, name: &ModelName, death: &Death) {
        let held = self.has(name);
        let Some(model) = self.models.get_mut(name).filter(|m| m.is_wanted()) else {
            return;
        };
        if held {
            tracing::warn!(model = %name, %death, "a worker died while loading what another one has");
            return;
        }
        model.strikes += 1;
        tracing::warn!(model = %name, strikes = model.strikes, %death, "a worker died while loading");
        if model.strikes >= STRIKES {
            model.fail(
                Error::new(
                    Reason::WorkerLost,
                    format!("{STRIKES} workers died while loading it, the last one: {death}"),
                )
                .with("model", name),
            );
        }
    }

    /// Whether a worker has a model, in service or about to be.
    pub(super) fn has(&self, name: &ModelName) -> bool {
        self.workers.values().any(|s| s.models.contains_key(name))
    }

    /// Fails the models that a worker refused and that none has or may yet come to have.
    pub(super) fn settle(&mut self) {
        let lost = |name: &ModelName| {
            !self.has(name) && !self.workers.values().any(|slot| self.may_get(slot, name))
        };
        let refused = self.models.iter().filter(|(_, m)| m.is_wanted());
        let refused: Vec<_> = refused
            .filter(|(name, m)| m.problem.is_some() && lost(name))
            .map(|(name, _)| name.clone())
            .collect();
        for name in refused {
            if let Some(model) = self.models.get_mut(&name) {
                model.state = ModelState::Failed;
            }
        }
    }

    /// The model of requests that name none: the configured default, else the only one that is wanted, else the
    /// only one there is.
    pub(super) fn default_name(&self) -> Option<&ModelName> {
        fn only<'a>(mut names: impl Iterator<Item = &'a ModelName>) -> Option<&'a ModelName> {
            names.next().filter(|_| names.next().is_none())
        }
        let wanted = || self.models.iter().filter(|(_, m)| m.is_open());
        self.default_model
            .as_ref()
            .or_else(|| match wanted().next() {
                Some(_) => only(wanted().map(|(name, _)| name)),
                None => only(self.models.keys()),
            })
    }

    pub(super) fn info(&self, name: &ModelName, model: &Model) -> ModelInfo {
        let workers = self.workers.iter();
        ModelInfo {
            name: name.as_str().to_owned(),
            state: model.told_state().into(),
            source: model.source.to_string(),
            summary: model.summary.clone(),
            file_bytes: model.files.as_ref().map_or(0, |f| f.bytes()),
            workers: workers
                .filter(|(_, slot)| slot.link.is_some() && slot.models.contains_key(name))
                .map(|(id, _)| id.clone())
                .collect(),
            problem: model
                .problem
                .as_ref()
                .filter(|_| model.state == ModelState::Failed)
                .map(|p| p.message().to_owned())
                .unwrap_or_default(),
            is_default: self.default_name().and_then(|n| self.key(n)) == Some(name),
            packed: self.packed(name, model),
            trust_domain: model.domain().to_owned(),
            serving: Some(Serving {
                aliases: self.names_of(name),
                ..model.serving.clone()
            }),
            running_requests: model.uses.running(),
            idle_ms: model.uses.idle().map_or(0, |idle| {
                u64::try_from(idle.as_millis()).unwrap_or(u64::MAX)
            }),
            memory_bytes: model.footprint.map_or(0, Footprint::alone),
        }
    }

    /// Whether a model has as many requests as it may have at once.
    pub(super) fn is_at_limit(&self, name: &ModelName) -> bool {
        self.models.get(name).is_some_and(|m| {
            let most = m.serving.max_running;
            most > 0 && m.uses.placed.load(Ordering::Relaxed) >= most
        })
    }

    /// Takes a model from all workers in the table; the links of those that had it.
    pub(super) fn take_away(&mut self, name: &ModelName) -> Vec<Arc<Link>> {
        let holders = self.workers.values_mut();
        holders
            .filter_map(|slot| {
                slot.unexamined.remove(name);
                slot.models.remove(name).and(slot.link.clone())
            })
            .collect()
    }

    /// The model that a request means.
    ///
    /// # Errors
    /// [`Reason::ModelNotFound`] or [`Reason::InvalidArgument`], with the names there are.
    pub(super) fn resolve(&self, name: &str) -> Result<ModelName, Error> {
        if !name.is_empty() {
            let name = ModelName::new(name)?;
            let key = self.key(&name).cloned();
            return key.ok_or_else(|| self.unknown(&name));
        }
        if let Some(name) = self.default_name() {
            return Ok(self.key(name).unwrap_or(name).clone());
        }
        let what = match self.models.is_empty() {
            true => "no model is loaded; load one with `hotcell load PATH`".to_owned(),
            false => {
                let names: Vec<_> = self.models.keys().take(8).map(ModelName::as_str).collect();
                format!(
                    "the request names no model and there are several: name one of {}, or set default_model",
                    names.join(", ")
                )
            }
        };
        Err(Error::new(Reason::ModelNotFound, what))
    }

    fn packed(&self, name: &ModelName, model: &Model) -> Vec<PackedInfo> {
        let mut packed = match &model.files {
            Some(files) if model.is_wanted() => files.copies().infos(),
            _ => return Vec::new(),
        };
        for info in &mut packed {
            let uses = |slot: &Slot| {
                let loaded = slot.models.get(name).filter(|_| slot.link.is_some());
                loaded.is_some_and(|loaded| loaded.packed && loaded.packing == info.layout)
            };
            let workers = self.workers.iter().filter(|(_, slot)| uses(slot));
            info.workers = workers.map(|(id, _)| id.clone()).collect();
        }
        packed
    }
}

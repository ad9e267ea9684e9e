//! How models are served: their further names, who uses them, and their own limits.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    limits,
    v1::{ModelInfo, Serving, ServingChange},
};
use tokio::time::Instant;

use super::{Fleet, Table, catalog::Standing, changes::Teller};

/// The requests for a model.
#[derive(Debug)]
pub(super) struct Uses {
    running: AtomicU32,
    /// Those that have a place on a worker.
    pub(super) placed: AtomicU32,
    /// When it was loaded, or when the last of them ended.
    last: Mutex<Instant>,
}

impl Default for Uses {
    fn default() -> Self {
        Self {
            running: AtomicU32::new(0),
            placed: AtomicU32::new(0),
            last: Mutex::new(Instant::now()),
        }
    }
}

impl Uses {
    /// Requests that are under way, those that wait included.
    pub(super) fn running(&self) -> u32 {
        self.running.load(Ordering::Relaxed)
    }

    /// From now on it counts as unused.
    pub(super) fn touch(&self) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// How long nobody has used it; none while somebody does.
    pub(super) fn idle(&self) -> Option<Duration> {
        let last = *self.last.lock().unwrap_or_else(PoisonError::into_inner);
        (self.running() == 0).then(|| last.elapsed())
    }
}

/// A request uses a model, until this is dropped: it is neither put to sleep nor retired.
#[derive(Debug)]
pub struct Using {
    uses: Arc<Uses>,
    changed: Teller,
}

impl Drop for Using {
    fn drop(&mut self) {
        self.uses.touch();
        if self.uses.running.fetch_sub(1, Ordering::Relaxed) == 1 {
            // Somebody may wait for that.
            self.changed.tell();
        }
    }
}

/// Checks how a model is to be served.
///
/// # Errors
/// [`Reason::InvalidArgument`] for a name that is none, [`Reason::LimitExceeded`] for too many.
pub(crate) fn checked(serving: &Serving) -> Result<Vec<ModelName>, Error> {
    if serving.aliases.len() > limits::MAX_ALIASES {
        let what = format!("a model has at most {} further names", limits::MAX_ALIASES);
        return Err(Error::new(Reason::LimitExceeded, what));
    }
    serving.aliases.iter().map(ModelName::new).collect()
}

/// How a model is to be served.
#[derive(Clone, Debug, PartialEq)]
pub enum Wanted {
    /// So.
    As(Serving),
    /// As it is, but for this.
    With(ServingChange),
}

impl Wanted {
    /// Its further names from now on; none: those that it has.
    ///
    /// # Errors
    /// As [`checked`].
    pub(crate) fn names(&self) -> Result<Option<Vec<ModelName>>, Error> {
        match self {
            Self::As(serving) => checked(serving).map(Some),
            Self::With(change) => {
                let aliases = change.aliases.clone();
                let names = checked(&Serving {
                    aliases,
                    ..Serving::default()
                })?;
                Ok((!names.is_empty()).then_some(names))
            }
        }
    }

    /// What becomes of how it was served.
    pub(crate) fn over(&self, was: Serving) -> Serving {
        let change = match self {
            Self::As(serving) => return serving.clone(),
            Self::With(change) => change,
        };
        Serving {
            replicas: change.replicas.unwrap_or(was.replicas),
            keep_alive_ms: change.keep_alive_ms.or(was.keep_alive_ms),
            // One that is to sleep after a while is not to be kept for ever.
            pinned: (change.pinned).unwrap_or(was.pinned && change.keep_alive_ms.is_none()),
            aliases: match change.aliases.is_empty() {
                true => was.aliases,
                false => change.aliases.clone(),
            },
            max_running: change.max_running.unwrap_or(was.max_running),
            max_context: change.max_context.unwrap_or(was.max_context),
        }
    }
}

/// The name of a model's first version.
pub(super) fn first_name(key: &ModelName) -> &str {
    let name = key.as_str();
    match name.rsplit_once(".v") {
        Some((first, number)) if number.parse::<u32>().is_ok() => first,
        _ => name,
    }
}

impl Table {
    /// The model that a name means: that of a further name, else its own.
    pub(super) fn key<'t>(&'t self, name: &'t ModelName) -> Option<&'t ModelName> {
        let own = self.models.get_key_value(name).map(|(key, _)| key);
        self.aliases.get(name).or(own)
    }

    /// Gives a model its further names.
    ///
    /// # Errors
    /// [`Reason::ModelExists`] when another one has one of them.
    pub(super) fn give_names(
        &mut self,
        model: &ModelName,
        aliases: &[ModelName],
    ) -> Result<(), Error> {
        for alias in aliases {
            // One that gave way has given up its names.
            let retires = |holder: &ModelName| {
                let holder = self.models.get(holder);
                holder.is_some_and(|m| m.standing == Standing::Replaced)
            };
            let taken = self.key(alias);
            let taken = taken.filter(|holder| *holder != model && !retires(holder));
            if let Some(holder) = taken {
                let what = format!(
                    "model {holder} has the name {alias}; unload it, or choose another name"
                );
                return Err(Error::new(Reason::ModelExists, what).with("model", alias));
            }
        }
        // The name under which its first version was known stays.
        let first = first_name(model);
        self.aliases
            .retain(|alias, key| key != model || alias.as_str() == first);
        let own = aliases.iter().filter(|alias| *alias != model);
        self.aliases
            .extend(own.map(|alias| (alias.clone(), model.clone())));
        Ok(())
    }

    /// Whether no other model has this name.
    ///
    /// # Errors
    /// [`Reason::ModelExists`].
    pub(super) fn is_nobodys(&self, name: &ModelName) -> Result<(), Error> {
        match self.aliases.get(name).filter(|key| *key != name) {
            // The one that gave its name up is loaded by it still.
            Some(_)
                if self
                    .models
                    .get(name)
                    .is_some_and(|m| m.standing == Standing::Replaced) =>
            {
                Ok(())
            }
            Some(holder) => {
                let what = format!(
                    "model {holder} has the name {name}; unload it, or choose another name"
                );
                Err(Error::new(Reason::ModelExists, what).with("model", name))
            }
            None => Ok(()),
        }
    }

    /// A model's further names.
    pub(super) fn names_of(&self, model: &ModelName) -> Vec<String> {
        let own = self.aliases.iter().filter(|(_, key)| *key == model);
        own.map(|(alias, _)| alias.to_string()).collect()
    }

    /// Forgets the further names of models that are gone.
    pub(super) fn drop_names(&mut self) {
        let models = &self.models;
        self.aliases.retain(|_, key| models.contains_key(key));
    }
}

impl Fleet {
    /// The model that a request means, in use until the result is dropped; an empty name means the default one, or the only
    /// one.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve).
    pub fn engage(&self, name: &str) -> Result<(ModelName, Using), Error> {
        let table = self.table();
        let key = table.resolve(name)?;
        let using = self.using_of(&table, &key);
        Ok((key, using))
    }

    /// The name by which others are likely to know a model too: its first version's, if it has that.
    pub fn name_of(&self, model: &ModelName) -> String {
        let table = self.table();
        let first = ModelName::new(first_name(model)).ok();
        let first = first.filter(|first| table.key(first) == Some(model));
        first.as_ref().unwrap_or(model).to_string()
    }

    /// Uses a model that a request was resolved to before.
    pub fn using(&self, model: &ModelName) -> Using {
        self.using_of(&self.table(), model)
    }

    /// How many tokens a request's answer may have, by the model's own limit of tokens; 0 if it has none. Tokens that were
    /// asked for are told the same way.
    ///
    /// # Errors
    /// [`Reason::LimitExceeded`] for a prompt that leaves no room for an answer.
    pub fn most_tokens(&self, model: &ModelName, prompt: usize, asked: u32) -> Result<u32, Error> {
        let table = self.table();
        let most = table.models.get(model).map_or(0, |m| m.serving.max_context);
        if most == 0 {
            return Ok(asked);
        }
        let prompt = u32::try_from(prompt).unwrap_or(u32::MAX);
        match (most.saturating_sub(prompt), asked) {
            (0, _) => {
                let what = format!(
                    "the prompt has {prompt} tokens; model {model} is served with at most {most}, prompt and answer together"
                );
                Err(Error::new(Reason::LimitExceeded, what).with("limit", most))
            }
            (room, 0) => Ok(room),
            (room, asked) => Ok(room.min(asked)),
        }
    }

    /// The count of a model's requests.
    pub(super) fn uses(&self, model: &ModelName) -> Arc<Uses> {
        let table = self.table();
        let uses = table.models.get(model).map(|m| Arc::clone(&m.uses));
        uses.unwrap_or_default()
    }

    fn using_of(&self, table: &Table, model: &ModelName) -> Using {
        let uses = table.models.get(model).map(|m| Arc::clone(&m.uses));
        let uses = uses.unwrap_or_default();
        uses.running.fetch_add(1, Ordering::Relaxed);
        Using {
            uses,
            changed: self.changed.clone(),
        }
    }

    /// What there is to say of the model that a name means.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve).
    pub fn model(&self, name: &str) -> Result<ModelInfo, Error> {
        let table = self.table();
        let key = table.resolve(name)?;
        let model = table.models.get(&key).ok_or_else(|| table.unknown(&key))?;
        Ok(table.info(&key, model))
    }

    /// The models that requests may name, by each of their names.
    pub fn offered(&self) -> Vec<(String, ModelInfo)> {
        let table = self.table();
        let mut all = Vec::new();
        for (key, model) in table.models.iter().filter(|(_, m)| m.can_be_asked()) {
            let info = table.info(key, model);
            let names = table.names_of(key);
            all.extend(names.into_iter().map(|name| (name, info.clone())));
            all.push((key.to_string(), info));
        }
        all.sort_by(|(a, _), (b, _)| a.cmp(b));
        all
    }
}

/// Further names of models, and the models they mean.
pub(super) type Aliases = BTreeMap<ModelName, ModelName>;

//! One model in the place of another: requests go to the new one once it is ready, and the old one ends with its last.

use std::{path::PathBuf, sync::Arc};

use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    v1::{EventKind, ModelInfo, Serving},
};

use super::{
    Fleet, ProgressSender, Table, Wanted,
    catalog::{Model, Standing},
    serving::first_name,
};
use crate::{audit::Who, events::About, vault::Source};

impl Table {
    /// Makes the next version of a model known beside it, under a name of its own that nobody else has. Requests do not
    /// come to it yet.
    fn next_version(
        &mut self,
        old: &ModelName,
        path: PathBuf,
        serving: Serving,
    ) -> Result<ModelName, Error> {
        let first = first_name(old);
        let free = |name: &Result<ModelName, Error>| match name {
            Ok(name) => !self.models.contains_key(name) && !self.aliases.contains_key(name),
            Err(_) => true,
        };
        let mut names = (2u32..).map(|n| ModelName::new(format!("{first}.v{n}")));
        let name = names.find(free).unwrap_or_else(|| {
            let what = "there are too many versions";
            Err(Error::new(Reason::LimitExceeded, what))
        })?;
        self.has_room_for(&name)?;
        let mut model = Model::new(Source::Path(path), false);
        model.standing = Standing::Coming;
        model.serving = serving;
        self.models.insert(name.clone(), model);
        Ok(name)
    }

    /// Gives a model's names to another one, and leaves it to its last requests.
    fn give_way(&mut self, old: &ModelName, new: &ModelName) {
        for key in self.aliases.values_mut().filter(|key| *key == old) {
            key.clone_from(new);
        }
        if let Ok(first) = ModelName::new(first_name(old)) {
            self.aliases.insert(first, new.clone());
        }
        if self.default_model.as_ref() == Some(old) {
            self.default_model = Some(new.clone());
        }
        let was_configured = self.models.get_mut(old).is_some_and(|model| {
            model.standing = Standing::Replaced;
            std::mem::take(&mut model.configured)
        });
        if let Some(model) = self.models.get_mut(new) {
            model.standing = Standing::Open;
            model.configured = was_configured;
        }
    }
}

impl Fleet {
    /// Loads a model in the place of the one that has this name: as it was served, unless `serving` says otherwise. No
    /// request goes to it before a worker has it and gave its known answer; where memory is short, the old one may be put to
    /// sleep for it meanwhile. Goes on if the caller stops waiting.
    ///
    /// # Errors
    /// As [`load`](Self::load), and [`Reason::ModelNotFound`] if there is none to replace.
    pub async fn replace(
        self: &Arc<Self>,
        who: Who,
        public: ModelName,
        path: PathBuf,
        serving: Option<Wanted>,
        progress: ProgressSender,
    ) -> Result<ModelInfo, Error> {
        let fleet = Arc::clone(self);
        let work = async move {
            fleet
                .replace_now(who, public, path, serving, progress)
                .await
        };
        tokio::spawn(work).await.unwrap_or_else(|e| {
            let what = format!("replacing failed: {e}");
            Err(Error::new(Reason::Internal, what))
        })
    }

    async fn replace_now(
        self: &Arc<Self>,
        who: Who,
        public: ModelName,
        path: PathBuf,
        serving: Option<Wanted>,
        progress: ProgressSender,
    ) -> Result<ModelInfo, Error> {
        let _one_at_a_time = self.loads.replace().await;
        let names = serving.as_ref().map(Wanted::names).transpose()?.flatten();
        let (old, new) = {
            let mut table = self.table();
            let old = table.key(&public).cloned();
            let old = old.ok_or_else(|| table.unknown(&public))?;
            let was = table.models.get(&old).map(|m| m.serving.clone());
            let was = was.unwrap_or_default();
            let mut serving = match &serving {
                Some(wanted) => wanted.over(was),
                None => was,
            };
            // They are the old one's until then.
            serving.aliases.clear();
            let new = table.next_version(&old, path.clone(), serving)?;
            (old, new)
        };
        let load = self.load_key(who, new.clone(), Some(path), None, progress);
        if let Err(error) = load.await {
            // The old one goes on as if nothing had been.
            let _ = self.unload_key(new).await;
            return Err(error);
        }
        {
            // Nobody loads or unloads the old one just now.
            let _one = self.loads.one(&old).await;
            let _spreads = self.loads.spread().await;
            let mut table = self.table();
            table.give_way(&old, &new);
            if let Some(mut names) = names {
                names.push(public.clone());
                if let Err(error) = table.give_names(&new, &names) {
                    tracing::warn!(model = %new, %error, "a model has fewer names than it was to have");
                }
            }
        }
        tracing::info!(model = %public, %old, %new, "a model is replaced");
        let about = About {
            model: public.as_str(),
            ..About::default()
        };
        let what = format!("{new} takes the place of {old}");
        self.events.tell(EventKind::ModelReplaced, about, what);
        self.tell();
        self.retire(old);
        self.model(new.as_str())
    }

    /// Has a replaced model end with the last request for it.
    fn retire(self: &Arc<Self>, name: ModelName) {
        let fleet = Arc::clone(self);
        self.keepers.spawn(async move {
            let mut changed = fleet.changes();
            loop {
                changed.see();
                {
                    let table = fleet.table();
                    let model = table.models.get(&name);
                    let Some(model) = model.filter(|m| m.standing == Standing::Replaced) else {
                        return;
                    };
                    if model.uses.running() == 0 {
                        break;
                    }
                }
                tokio::select! {
                    () = fleet.stop.cancelled() => return,
                    () = changed.changed() => {}
                }
            }
            if let Err(error) = fleet.unload_key(name.clone()).await {
                tracing::warn!(model = %name, %error, "a replaced model cannot be unloaded");
            }
        });
    }

    /// Has all replaced models end so that another program handed over; to be told once their requests go on here.
    pub fn retire_all(self: &Arc<Self>) {
        let retiring: Vec<_> = {
            let table = self.table();
            let all = table.models.iter();
            all.filter(|(_, m)| m.standing == Standing::Replaced)
                .map(|(name, _)| name.clone())
                .collect()
        };
        for name in retiring {
            self.retire(name);
        }
    }
}

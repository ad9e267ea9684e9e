//! One model in the place of another: requests go to the new one once it is ready, and the old one ends with its last.

use std::{path::PathBuf, sync::Arc};

use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    v1::{EventKind, ModelInfo, ModelState, Serving},
};

use super::{Fleet, ProgressSender, Table};
use crate::{audit::Who, events::About};

impl Table {
    /// The name under which a model's next version is known beside it.
    fn next_version(&self, public: &ModelName) -> Result<ModelName, Error> {
        let names = (2u32..).map(|n| ModelName::new(format!("{public}.v{n}")));
        let free = |name: &Result<ModelName, Error>| match name {
            Ok(name) => !self.models.contains_key(name) && !self.aliases.contains_key(name),
            Err(_) => true,
        };
        let mut free = names.filter(free);
        free.next().unwrap_or_else(|| {
            let what = "there are too many versions";
            Err(Error::new(Reason::LimitExceeded, what))
        })
    }

    /// Gives a model's names to another one, and leaves it to its last requests.
    fn give_way(&mut self, old: &ModelName, public: &ModelName, new: &ModelName) {
        for key in self.aliases.values_mut().filter(|key| *key == old) {
            key.clone_from(new);
        }
        self.aliases.insert(public.clone(), new.clone());
        if self.default_model.as_ref() == Some(old) {
            self.default_model = Some(new.clone());
        }
        let was_configured = match self.models.get_mut(old) {
            Some(model) => {
                if model.state != ModelState::Loaded {
                    // Nobody can be using it.
                    model.files = None;
                }
                model.state = ModelState::Retiring;
                model.configured
            }
            None => false,
        };
        if let Some(model) = self.models.get_mut(new) {
            model.configured = was_configured;
        }
    }
}

impl Fleet {
    /// Loads a model in the place of the one that has this name: as it was served, unless `serving` says otherwise.
    /// Nothing changes before a worker has it and gave its known answer. Goes on if the caller stops waiting.
    ///
    /// # Errors
    /// As [`load`](Self::load), and [`Reason::ModelNotFound`] if there is none to replace.
    pub async fn replace(
        self: &Arc<Self>,
        who: Who,
        public: ModelName,
        path: PathBuf,
        serving: Option<Serving>,
        progress: ProgressSender,
    ) -> Result<ModelInfo, Error> {
        let fleet = Arc::clone(self);
        let work = async move {
            let _one_at_a_time = fleet.loads.replace().await;
            let (old, new, serving) = {
                let mut table = fleet.table();
                let old = table.key(&public).cloned();
                let old = old.ok_or_else(|| table.unknown(&public))?;
                let new = table.next_version(&public)?;
                let was = table.models.get(&old).map(|m| m.serving.clone());
                let mut serving = serving.or(was).unwrap_or_default();
                // They are the old one's until then.
                serving.aliases.clear();
                table.drop_names();
                (old, new, serving)
            };
            let load = fleet.load_as(who, Some(new.clone()), Some(path), Some(serving), progress);
            if let Err(error) = load.await {
                // The old one goes on as if nothing had been.
                let _ = fleet.unload_key(new).await;
                return Err(error);
            }
            fleet.table().give_way(&old, &public, &new);
            tracing::info!(model = %public, %old, %new, "a model is replaced");
            let about = About {
                model: public.as_str(),
                ..About::default()
            };
            let what = format!("{new} takes the place of {old}");
            fleet.events.tell(EventKind::ModelReplaced, about, what);
            fleet.tell();
            fleet.retire(old);
            fleet.model(new.as_str())
        };
        tokio::spawn(work).await.unwrap_or_else(|e| {
            Err(Error::new(
                Reason::Internal,
                format!("replacing failed: {e}"),
            ))
        })
    }

    /// Has a replaced model end with the last request for it.
    pub(super) fn retire(self: &Arc<Self>, name: ModelName) {
        let fleet = Arc::clone(self);
        self.keepers.spawn(async move {
            let mut changed = fleet.changes();
            loop {
                changed.see();
                {
                    let mut table = fleet.table();
                    let model = table.models.get_mut(&name);
                    let Some(model) = model.filter(|m| m.state == ModelState::Retiring) else {
                        return;
                    };
                    if model.uses.running() == 0 {
                        model.configured = false;
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
            all.filter(|(_, m)| m.state == ModelState::Retiring)
                .map(|(name, _)| name.clone())
                .collect()
        };
        for name in retiring {
            self.retire(name);
        }
    }
}

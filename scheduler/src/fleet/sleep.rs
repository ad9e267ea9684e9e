//! Models that are in no worker's memory until somebody asks for them, and go out of it when nobody does.

use std::{future::pending, path::PathBuf, sync::Arc, time::Duration};

use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    v1::{ModelInfo, ModelState, Serving},
};
use tokio::time::sleep;

use super::{Fleet, Using, catalog::Model, checked_serving};
use crate::vault::Source;

impl Fleet {
    /// Makes a model known that its first request loads.
    ///
    /// # Errors
    /// [`Reason::ModelExists`] when another one has one of its names, [`Reason::LimitExceeded`] for too many models.
    pub fn expect(
        &self,
        name: ModelName,
        path: PathBuf,
        configured: bool,
        serving: &Serving,
    ) -> Result<(), Error> {
        {
            let aliases = checked_serving(serving)?;
            let mut table = self.table();
            table.has_room_for(&name)?;
            table.is_nobodys(&name)?;
            let known = table.models.get(&name);
            if known.is_some_and(|m| m.is_wanted()) {
                let what = format!("a model called {name} is loaded; unload it first");
                return Err(Error::new(Reason::ModelExists, what).with("model", &name));
            }
            let said = match configured {
                true => Some(serving.clone()),
                false => known.and_then(|m| m.configured_serving.clone()),
            };
            let configured = configured || known.is_some_and(|m| m.configured);
            table.give_names(&name, &aliases)?;
            let mut model = Model::new(Source::Path(path), configured);
            model.state = ModelState::Asleep;
            model.serving = serving.clone();
            model.configured_serving = said;
            table.models.insert(name, model);
        }
        self.tell();
        Ok(())
    }

    /// Has a model loaded that sleeps, for somebody who asks for it: as well one that found no room, file or worker, if `new`
    /// says that this one has not waited for it yet.
    pub(super) fn wake(self: &Arc<Self>, name: &ModelName, new: bool) {
        {
            let mut table = self.table();
            let Some(model) = table.models.get_mut(name) else {
                return;
            };
            // What may be otherwise by now, and costs nobody anything to try.
            let may_pass = || {
                use Reason::{FileNotFound, NoWorker, Overloaded};
                let problem = model.problem.as_ref().map(Error::reason);
                matches!(problem, Some(Overloaded | FileNotFound | NoWorker))
            };
            match model.state {
                ModelState::Asleep => {}
                ModelState::Failed if new && may_pass() => {}
                _ => return,
            }
            // Requests for it wait from now on, and its files are opened anew.
            if model.source.can_be_read_again() {
                model.files = None;
            }
            model.state = ModelState::Loading;
            model.problem = None;
        }
        tracing::info!(model = %name, "a request wakes a model");
        self.load_expected(vec![name.clone()]);
    }

    /// The model that a name means, in memory, for as long as the second result is there; one that sleeps is woken.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve), and why it cannot be loaded.
    pub async fn awake(self: &Arc<Self>, name: &str) -> Result<(ModelInfo, Using), Error> {
        let (key, using) = self.engage(name)?;
        let mut changed = self.changes();
        let mut new = true;
        loop {
            changed.see();
            self.wake(&key, std::mem::take(&mut new));
            {
                let table = self.table();
                if !table.usable(&key)? {
                    let model = table.models.get(&key).ok_or_else(|| table.unknown(&key))?;
                    return Ok((table.info(&key, model), using));
                }
            }
            // Bounded by what a load may take.
            changed.changed().await;
        }
    }

    /// Keeps a model in memory for so long after its last request, from now on; without a time, until others need the room.
    pub fn keep_for(&self, name: &ModelName, keep: Option<Duration>) {
        if let Some(model) = self.table().models.get_mut(name) {
            let keep = keep.map(|keep| u64::try_from(keep.as_millis()).unwrap_or(u64::MAX));
            model.serving.keep_alive_ms = keep;
        }
        self.tell();
    }

    /// The model that has been unused too long, or how long the next one has until then; nothing if none is to go.
    fn due(&self) -> Option<Result<ModelName, Duration>> {
        let table = self.table();
        let left = |name: &ModelName, model: &Model| {
            let keep = Duration::from_millis(model.serving.keep_alive_ms?);
            let may_go = !model.serving.pinned
                && model.state == ModelState::Loaded
                && model.source.can_be_read_again()
                && table.guest(name).is_none();
            let idle = model.uses.idle().filter(|_| may_go)?;
            Some(keep.saturating_sub(idle))
        };
        let all = table.models.iter();
        let all = all.filter_map(|(name, model)| Some((left(name, model)?, name)));
        let (left, name) = all.min()?;
        Some(match left.is_zero() {
            true => Ok(name.clone()),
            false => Err(left),
        })
    }

    /// Puts models to sleep that nobody has used for as long as they are to be kept.
    pub(super) fn keep_alive(self: &Arc<Self>) {
        let fleet = Arc::clone(self);
        self.keepers.spawn(async move {
            let mut changed = fleet.changes();
            loop {
                changed.see();
                let next = fleet.due();
                let wait = async {
                    match next {
                        Some(Err(left)) => sleep(left).await,
                        _ => pending().await,
                    }
                };
                if let Some(Ok(name)) = &fleet.due() {
                    let _one_at_a_time = fleet.loads.one(name).await;
                    let _spreads = fleet.loads.spread().await;
                    // Somebody may have come, or pinned it, meanwhile.
                    if fleet.due().is_some_and(|due| due.as_ref() == Ok(name)) {
                        fleet.put_to_sleep(name, "nobody asked for it").await;
                    }
                    continue;
                }
                tokio::select! {
                    () = fleet.stop.cancelled() => return,
                    () = changed.changed() => {}
                    () = wait => {}
                }
            }
        });
    }
}

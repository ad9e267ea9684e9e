//! Memory for models: measured before anything is loaded, and made by those that nobody has asked for longest.

use std::{collections::BTreeMap, sync::Arc};

use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    v1::{Device, EventKind, Inspected, ModelState},
};
use tokio::{
    sync::MutexGuard,
    task::JoinSet,
    time::{Instant, timeout_at},
};

use super::{Fleet, Link, LoadFailure, Table};
use crate::{
    events::About,
    room::{Footprint, Resident, Shortage, make_room},
    vault::OpenModel,
};

/// Bytes that a model's cache and work usually take on a device.
const USUAL_CACHE: u64 = 2 << 30;

/// The memory that a device is in: CPU devices share the host's, and MLX computes in it as well.
fn memory(device: &Device) -> &str {
    match device.backend.as_str() {
        "cpu" | "mlx" => "the host's memory",
        _ => &device.id,
    }
}

fn footprint(said: &Inspected) -> Footprint {
    Footprint {
        weights: said.tensor_bytes,
        each: said.cache_bytes.saturating_add(said.work_bytes),
    }
}

impl Table {
    /// All memories that are in use, with their bytes.
    fn memories(&self, configured: Option<u64>) -> BTreeMap<&str, u64> {
        // CPU devices have parts of the host's memory, MLX has all of it.
        let mut parts = BTreeMap::new();
        for slot in self.workers.values().filter(|s| s.guest.is_none()) {
            let device = &slot.device;
            let key = (memory(device), device.backend.as_str());
            let members = (self.devices.iter())
                .filter(|d| device.members.contains(&d.id))
                .map(|d| d.memory_bytes);
            let all = members.fold(device.memory_bytes, u64::saturating_add);
            let bytes = parts.entry(key).or_insert(0u64);
            *bytes = bytes.saturating_add(all);
        }
        let mut all = BTreeMap::new();
        for ((memory, _), bytes) in parts {
            let most = all.entry(memory).or_insert(0u64);
            *most = bytes.max(*most);
        }
        all.retain(|_, bytes| *bytes > 0);
        // Of one device, and of as many where they compute together.
        if let Some(bytes) = configured {
            for (memory, has) in &mut all {
                let leader = self.devices.iter().find(|d| d.id == *memory);
                let members = leader.map_or(0, |d| d.members.len() as u64);
                *has = bytes.saturating_mul(members + 1);
            }
        }
        all
    }

    /// On how many devices of each memory a model is, or will be.
    fn devices_of(&self, name: &ModelName) -> BTreeMap<&str, u64> {
        let mut all = BTreeMap::new();
        let own = self.workers.values().filter(|s| s.guest.is_none());
        for slot in own.filter(|s| s.hopeful && self.is_home(&s.device, name)) {
            *all.entry(memory(&slot.device)).or_insert(0) += 1;
        }
        all
    }

    fn resident<'t>(&'t self, name: &'t ModelName) -> Option<Resident<'t>> {
        let model = self.models.get(name)?;
        let may_go = !model.serving.pinned
            && model.state == ModelState::Loaded
            && self.guest(name).is_none()
            && model.source.can_be_read_again();
        Some(Resident {
            model: name,
            footprint: model.footprint.unwrap_or_default(),
            devices: self.devices_of(name),
            idle: model.uses.idle().filter(|_| may_go),
        })
    }

    /// Which models have to go for this one.
    fn room_for(
        &self,
        name: &ModelName,
        configured: Option<u64>,
    ) -> Result<Vec<ModelName>, Shortage> {
        // Workers of untrusted models have bounds of their own.
        if self.guest(name).is_some() {
            return Ok(Vec::new());
        }
        let others = self.models.iter();
        let others = others.filter(|(other, m)| *other != name && m.is_wanted() && m.has_room);
        let others: Vec<_> = others
            .filter_map(|(other, _)| self.resident(other))
            .collect();
        let Some(new) = self.resident(name) else {
            return Ok(Vec::new());
        };
        let gone = make_room(&self.memories(configured), &others, &new)?;
        Ok(gone.into_iter().cloned().collect())
    }
}

impl Fleet {
    /// A worker that may read a trusted model's files: waited for, if none is there yet but some may come.
    async fn measurer(&self) -> Option<Arc<Link>> {
        let until = Instant::now() + self.policy.start_timeout;
        let mut changed = self.changes();
        loop {
            changed.see();
            {
                let table = self.table();
                let own = || table.workers.values().filter(|s| s.guest.is_none());
                let least = own()
                    .filter_map(|slot| Some((slot.outstanding(), slot.serving()?)))
                    .min_by_key(|(outstanding, _)| *outstanding);
                if let Some((_, link)) = least {
                    return Some(Arc::clone(link));
                }
                if !own().any(|slot| slot.hopeful) {
                    return None;
                }
            }
            if timeout_at(until, changed.changed()).await.is_err() {
                return None;
            }
        }
    }

    /// What a model takes, by a dry run on a worker; as much as its files have if none can tell.
    ///
    /// # Errors
    /// Why the worker would not load it.
    pub(super) async fn measure(&self, files: &OpenModel) -> Result<Footprint, Error> {
        let guess = Footprint {
            weights: files.bytes(),
            each: 0,
        };
        // It has a worker for itself, with bounds; nobody else reads it.
        if files.alone().is_some() {
            return Ok(guess);
        }
        let Some(link) = self.measurer().await else {
            return Ok(guess);
        };
        let said = tokio::select! {
            () = link.fate.gone.cancelled() => return Ok(guess),
            said = link.inspect(files, self.policy.start_timeout) => said,
        };
        match said {
            // What is wrong with it loading will tell, in the words that it has for it.
            Ok(said) if said.reason.is_empty() => Ok(footprint(&said)),
            Ok(_) => Ok(guess),
            Err(LoadFailure::Refused(error)) => Err(error),
            Err(LoadFailure::Broken(kind, why)) => {
                tracing::warn!(
                    worker = link.worker,
                    ?kind,
                    why,
                    "a model cannot be measured"
                );
                Ok(guess)
            }
        }
    }

    /// Measures those that are in memory and were not measured yet: they came with the start.
    async fn measure_residents(&self) {
        let unknown: Vec<_> = {
            let table = self.table();
            let wanted = table.wanted();
            let models = &table.models;
            let known = |name: &ModelName| models.get(name).is_some_and(|m| m.footprint.is_some());
            wanted.filter(|(name, _)| !known(name)).collect()
        };
        for (name, files) in unknown {
            let Ok(found) = self.measure(&files).await else {
                continue;
            };
            if let Some(model) = self.table().models.get_mut(&name) {
                model.footprint.get_or_insert(found);
            }
        }
    }

    /// Whether memory may be short for a model: otherwise nobody need measure anything.
    pub(super) fn is_tight(&self, name: &ModelName, files: &OpenModel) -> bool {
        let table = self.table();
        let guess = |files: &OpenModel| files.bytes().saturating_add(USUAL_CACHE);
        let others = table.wanted().filter(|(other, _)| other != name);
        let all = others.map(|(_, files)| guess(&files));
        let all = all.fold(guess(files), u64::saturating_add);
        let devices = table.workers.values().filter(|s| s.guest.is_none()).count() as u64;
        let all = all.saturating_mul(devices.max(1));
        let memories = table.memories(self.device_memory);
        files.alone().is_none() && memories.values().any(|has| all > has / 2)
    }

    fn set_apart(&self, name: &ModelName) {
        if let Some(model) = self.table().models.get_mut(name) {
            model.has_room = true;
        }
    }

    /// Makes a model known, and room for it. Nobody else spreads models while the result is held. Waits for those that are in
    /// its way, as long as requests wait for a place.
    ///
    /// # Errors
    /// Those of `know`, [`Reason::OutOfMemory`] if it does not fit alone, [`Reason::Overloaded`] if others stay in its way.
    pub(super) async fn enter_memory(
        &self,
        name: &ModelName,
        know: impl Fn() -> Result<(), Error>,
    ) -> Result<MutexGuard<'_, ()>, Error> {
        // From the first time that there is none: another load may take longer than that.
        let mut until = None;
        let mut changed = self.changes();
        loop {
            changed.see();
            let spreads = self.loads.spread().await;
            know()?;
            let measured = self
                .table()
                .models
                .get(name)
                .is_some_and(|m| m.footprint.is_some());
            if !measured {
                self.set_apart(name);
                return Ok(spreads);
            }
            self.measure_residents().await;
            let (found, all_pinned) = {
                let table = self.table();
                let others = table.models.iter().filter(|(other, _)| *other != name);
                let mut others = others.filter(|(_, m)| m.is_wanted() && m.has_room);
                let stuck = others.all(|(_, m)| m.serving.pinned);
                (table.room_for(name, self.device_memory), stuck)
            };
            let shortage = match found {
                Ok(gone) => {
                    let mut all_went = true;
                    for other in gone {
                        let why = format!("to make room for {name}");
                        all_went &= self.put_to_sleep(&other, &why).await;
                    }
                    match all_went {
                        true => {
                            self.set_apart(name);
                            return Ok(spreads);
                        }
                        // Somebody asked for one of them just now.
                        false => continue,
                    }
                }
                Err(shortage) => shortage,
            };
            drop(spreads);
            let until = *until.get_or_insert_with(|| Instant::now() + self.timeouts.queue);
            let late = shortage.is_hopeless()
                || all_pinned
                || timeout_at(until, changed.changed()).await.is_err();
            if late {
                let error = match shortage.is_hopeless() {
                    true => {
                        let what = format!("model {name} does not fit: {shortage}");
                        Error::new(Reason::OutOfMemory, what)
                    }
                    false => {
                        let what = format!(
                            "there is no room for model {name} now: {shortage}; try again later, or unload one"
                        );
                        Error::new(Reason::Overloaded, what)
                    }
                };
                return Err(error.with("model", name));
            }
        }
    }

    /// Takes a model out of memory that nobody uses; the next request for it loads it again. Returns whether it did.
    pub(super) async fn put_to_sleep(&self, name: &ModelName, why: &str) -> bool {
        let (links, files) = {
            let mut table = self.table();
            let Some(model) = table.models.get_mut(name) else {
                return false;
            };
            // Somebody may have come since it was chosen.
            if model.state != ModelState::Loaded || model.uses.running() > 0 {
                return false;
            }
            model.state = ModelState::Asleep;
            model.has_room = false;
            let files = model.files.take();
            (table.take_away(name), files)
        };
        tracing::info!(model = %name, why, "a model goes to sleep");
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
        self.events.tell(EventKind::ModelAsleep, about, why);
        true
    }

    /// Has workers forget a model.
    pub(super) async fn unload_from(&self, links: Vec<Arc<Link>>, name: &ModelName) {
        let patience = self.policy.start_timeout;
        let mut unloads = JoinSet::new();
        for link in links {
            let name = name.clone();
            unloads.spawn(async move {
                if let Err(error) = link.unload(&name, patience).await {
                    tracing::warn!(model = %name, worker = link.worker, %error, "a worker cannot unload a model");
                }
            });
        }
        while unloads.join_next().await.is_some() {}
    }
}

//! What devices keep of models: given to the next worker there that loads one, taken from it, and given back where no
//! worker is to have the model any more.

use std::{sync::Arc, time::Duration};

use hotcell_proto::{
    error::Reason,
    ids::ModelName,
    v1::{LoadProgress, Loaded},
};
use rustix::process::Signal;

use super::{
    Fleet, Link, Table,
    link::Condemnation,
    loading::{Beside, LoadFailure},
};
use crate::{
    death::{Death, DeathKind},
    discover::leader_of,
    kept::{self, Kept},
    vault::OpenModel,
};

impl Table {
    /// Whether workers on a device are to have a model of these files.
    fn is_to_have(&self, device: &str, name: &ModelName, files: &Arc<OpenModel>) -> bool {
        self.models.get(name).is_some_and(|model| {
            let same = model.files.as_ref().is_some_and(|f| Arc::ptr_eq(f, files));
            let homes = model.homes.as_ref();
            same && model.is_wanted() && homes.is_none_or(|homes| homes.contains(device))
        })
    }

    /// Gives up what a worker's device keeps of a model that the worker died of while it loaded it: it may have died of that,
    /// and its next process is not to be given it.
    pub(super) fn give_up_kept(&self, model: &ModelName, worker: &str) {
        let files = self.models.get(model).and_then(|m| m.files.as_ref());
        let (Some(files), Some(slot)) = (files, self.workers.get(worker)) else {
            return;
        };
        // Who dropped them last closes them beside this.
        if !(files.kept().take_unless(|on| on != slot.device.id)).is_empty() {
            tracing::warn!(%model, worker, "what its device kept is given up");
        }
    }
}

impl Fleet {
    /// The device that a worker was started on, also of one beside the devices' own. What it says itself is its own word.
    fn device_of(&self, worker: &str) -> Option<String> {
        let slot = |slot: &super::slot::Slot| slot.device.id.clone();
        let own = self.table().workers.get(worker).map(slot);
        own.or_else(|| self.asides.device_of(worker))
    }

    /// Has a worker load a model, from packed copies as far as there are any, and from what an earlier worker left in its
    /// device's memory. What it puts there itself outlives it if `stays`, which is not for one that is soon gone.
    ///
    /// # Errors
    /// As [`Link::load`].
    pub(super) async fn hand_over(
        &self,
        link: &Link,
        model: &ModelName,
        files: &Arc<OpenModel>,
        stays: bool,
        patience: Duration,
        mut progress: impl FnMut(&LoadProgress),
    ) -> Result<Loaded, LoadFailure> {
        let offered = self.copies_for(link, files).await;
        // An untrusted model shares no memory with anybody.
        let shares = link.keeps_weights() && files.alone().is_none();
        let device = shares.then(|| self.device_of(&link.worker)).flatten();
        let of_as_many = |kept: &Arc<Kept>| kept.told.members.len() == link.members() as usize;
        let mut given = (device.as_ref())
            .and_then(|device| files.kept().get(device))
            .filter(of_as_many);
        let (got, left) = loop {
            let beside = Beside {
                packed: offered.as_ref().map(|(layout, set)| (layout, set)),
                kept: given.clone(),
                leaves: stays && device.is_some(),
            };
            let loaded = link.load(model, files, beside, patience, &mut progress);
            let failure = match loaded.await {
                Ok(loaded) => break loaded,
                Err(failure) => failure,
            };
            let (Some(device), Some(of)) = (&device, given.take()) else {
                return Err(failure);
            };
            let for_room = match &failure {
                LoadFailure::Refused(error) => error.reason() == Reason::OutOfMemory,
                LoadFailure::Broken(..) => false,
            };
            if for_room || matches!(failure, LoadFailure::Broken(..)) {
                // It may have died of what it was given; and what is of no use to it takes the room that it needs.
                tracing::warn!(%model, worker = link.worker, "what its device kept is given up");
                files.kept().forget(device, &of);
                kept::close(vec![of]).await;
            }
            if !for_room {
                return Err(failure);
            }
        };
        if let Some(device) = &device {
            // What its next process would be given in vain.
            let stale = stays && left.is_none() && !got.found;
            let given = (given, stale || got.damaged);
            self.note_kept((link, device), (model, files), (given, left), &got)
                .await;
        }
        if let Some((layout, set)) = offered {
            self.note_offered(model, files, &layout, &set, &got);
        }
        Ok(got)
    }

    /// Notes what a worker made of what its device kept of a model, and what the device keeps from now on.
    async fn note_kept(
        &self,
        (link, device): (&Link, &str),
        (model, files): (&ModelName, &Arc<OpenModel>),
        ((given, is_void), left): ((Option<Arc<Kept>>, bool), Option<Kept>),
        got: &Loaded,
    ) {
        let worker = link.worker.as_str();
        if given.is_some() {
            let (found, damaged) = (got.found, got.damaged);
            tracing::info!(%model, worker, found, damaged, "weights were kept on the device");
        }
        if let Some(of) = given.filter(|_| is_void) {
            files.kept().forget(device, &of);
            kept::close(vec![of]).await;
            if got.damaged {
                self.condemn_others(link, device, model);
            }
        }
        if let Some(left) = left {
            let bytes = left.told.bytes;
            // Under the table's lock: who takes the model away meanwhile finds it here, or it is not kept.
            let table = self.table();
            if table.is_to_have(device, model, files) {
                tracing::info!(%model, worker, device, bytes, "weights outlive the worker");
                files.kept().keep(device, left);
            }
        }
    }

    /// Others on a device that compute from memory that was found damaged.
    fn condemn_others(&self, finder: &Link, device: &str, model: &ModelName) {
        let table = self.table();
        let all = table.workers.iter().filter(|(id, slot)| {
            let other = **id != finder.worker || slot.epoch != finder.epoch;
            other && slot.device.id == device && slot.models.contains_key(model)
        });
        for link in all.filter_map(|(_, slot)| slot.link.as_ref()) {
            let why = format!("the weights of {model} in the memory of {device} are damaged");
            let sentence = Condemnation::new(DeathKind::Corrupt, why);
            link.fate.condemn(sentence);
        }
    }

    /// Gives up what a worker's device keeps, if the worker died of a call that is forbidden to it: somebody else may have
    /// computed in its name, and written where it had read.
    pub(super) fn distrust_device(&self, worker: &str, death: &Death) {
        let forbidden = DeathKind::Signal {
            number: Signal::SYS.as_raw(),
        };
        let Some(device) = self.device_of(worker).filter(|_| death.kind == forbidden) else {
            return;
        };
        let table = self.table();
        let files = table.models.values().filter_map(|m| m.files.as_ref());
        let taken = files.flat_map(|files| files.kept().take_unless(|on| on != device));
        // They are closed beside this.
        if taken.count() > 0 {
            tracing::warn!(
                worker,
                device,
                "what the device kept is not trusted any more"
            );
        }
    }

    /// Gives back what devices keep of which others are members now, or that are members of others: they were arranged
    /// otherwise under the program before this one.
    pub(super) fn release_rearranged(&self) {
        let table = self.table();
        let stays = |device: &str, kept: &Kept| {
            let known = table.devices.iter().find(|d| d.id == device);
            let is_led = || leader_of(device, &table.devices).is_some();
            known.is_none_or(|d| d.members.len() == kept.told.members.len() && !is_led())
        };
        let files = table.models.values().filter_map(|m| m.files.as_ref());
        for taken in files.flat_map(|files| files.kept().take_unless_so(stays)) {
            // It is closed beside this.
            tracing::info!(
                bytes = taken.told.bytes,
                "what a device kept is of no use any more"
            );
        }
    }

    /// Gives devices back what they keep of a model of these files that no worker there is to have. Returns once that is
    /// free, as far as it is ours.
    pub(super) async fn release_unwanted(&self, name: &ModelName, files: &Arc<OpenModel>) {
        let taken = {
            let table = self.table();
            let stays = |device: &str| table.is_to_have(device, name, files);
            files.kept().take_unless(stays)
        };
        if !taken.is_empty() {
            kept::close(taken).await;
        }
    }

    /// The same of a model as it is now, where its devices may be others.
    pub(super) async fn release_elsewhere(&self, name: &ModelName) {
        let files = self.table().models.get(name).and_then(|m| m.files.clone());
        if let Some(files) = files {
            self.release_unwanted(name, &files).await;
        }
    }
}

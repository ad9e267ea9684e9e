//! Workers that one untrusted model each has for itself. Supervised as a device's own worker is, with less to take, and
//! gone with the model.

use std::sync::{Arc, atomic::Ordering};

use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    limits,
    v1::Device,
};

use super::{
    Allowance, Fleet, Table,
    adopt::Adopted,
    keeper,
    slot::{Slot, UNTRUSTED},
};
use crate::{supervisor::Past, vault::OpenModel};

/// The one model of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Guest {
    pub(super) model: ModelName,
    /// Its files' number: the same name may mean another model later.
    pub(super) number: u64,
}

impl Guest {
    pub(super) fn of(model: &ModelName, files: &OpenModel) -> Option<Self> {
        Some(Self {
            model: model.clone(),
            number: files.alone()?,
        })
    }
}

impl Table {
    /// Whose a model's worker is; none if it shares those of the devices.
    pub(super) fn guest(&self, name: &ModelName) -> Option<Guest> {
        let files = self.models.get(name)?.files.as_ref()?;
        Guest::of(name, files)
    }

    /// Whether a worker may have a model at all.
    pub(super) fn belongs(&self, slot: &Slot, name: &ModelName) -> bool {
        self.guest(name) == slot.guest && (slot.guest.is_some() || self.is_home(&slot.device, name))
    }

    /// Whether a worker may come to have a model that it lacks.
    pub(super) fn may_get(&self, slot: &Slot, name: &ModelName) -> bool {
        slot.may_get(name) && self.belongs(slot, name)
    }

    /// Whether a guest's model is still wanted.
    fn is_needed(&self, guest: &Guest) -> bool {
        let model = self.models.get(&guest.model).filter(|m| m.is_wanted());
        let files = model.and_then(|m| m.files.as_ref());
        files.is_some_and(|files| files.alone() == Some(guest.number))
    }
}

impl Fleet {
    /// What a worker may take; none for a device's own.
    pub(super) fn allowance(&self, id: &str) -> Option<Allowance> {
        let table = self.table();
        let slot = table.workers.get(id)?;
        slot.guest.as_ref().map(|_| self.gate.policy.allowance)
    }

    /// The same for a throw-away worker that runs a request of a model.
    pub(super) fn allowance_for(&self, model: &ModelName) -> Option<Allowance> {
        let guest = self.table().guest(model);
        guest.map(|_| self.gate.policy.allowance)
    }

    /// Sees to it that an untrusted model has a worker for itself.
    ///
    /// # Errors
    /// [`Reason::LimitExceeded`] when there are too many, [`Reason::NoWorker`] when there is no device for it.
    pub(super) fn host_guest(self: &Arc<Self>, name: &ModelName) -> Result<(), Error> {
        let (id, device) = {
            let mut table = self.table();
            let Some(guest) = table.guest(name) else {
                return Ok(());
            };
            let of = |slot: &Slot| slot.guest.clone();
            if table
                .workers
                .values()
                .any(|slot| of(slot).as_ref() == Some(&guest))
            {
                return Ok(());
            }
            let guests: Vec<_> = table
                .workers
                .iter()
                .filter(|(_, s)| s.guest.is_some())
                .collect();
            if guests.len() >= limits::MAX_GUESTS {
                let what = format!(
                    "{} untrusted models have workers for themselves already; unload one",
                    limits::MAX_GUESTS
                );
                return Err(Error::new(Reason::LimitExceeded, what));
            }
            let on = |home: &str| {
                let prefix = format!("{home}.");
                guests
                    .iter()
                    .filter(|(id, _)| id.starts_with(&prefix))
                    .count()
            };
            let homes = table.workers.iter().filter(|(_, s)| s.guest.is_none());
            let homes = homes.filter(|(_, s)| s.hopeful);
            let home = homes.min_by_key(|(id, _)| (on(id), id.as_str()));
            let home = home.map(|(id, slot)| (id.clone(), slot.device.clone()));
            let (home, device) = home.ok_or_else(|| {
                let what = "there is no device for it; `hotcell ps` shows why";
                Error::new(Reason::NoWorker, what)
            })?;
            // Never a name that was used before: reports go by it.
            let number = self.guests_made.fetch_add(1, Ordering::Relaxed) + 1;
            let id = format!("{home}.guest{number}");
            table.workers.insert(id.clone(), guest_slot(&device, guest));
            (id, device)
        };
        tracing::info!(model = %name, worker = id, "an untrusted model gets a worker for itself");
        self.keep_guest(id, device, None);
        self.tell();
        Ok(())
    }

    /// Goes on with a guest's worker that another program kept, if its model was handed over as well.
    pub(super) fn inherit_guest(
        self: &Arc<Self>,
        id: String,
        device: Device,
        (name, drained): (&ModelName, bool),
        heir: (Past, Option<Adopted>),
    ) {
        let number = id
            .rsplit_once(".guest")
            .and_then(|(_, n)| n.parse::<u64>().ok());
        self.guests_made
            .fetch_max(number.unwrap_or(0), Ordering::Relaxed);
        {
            let mut table = self.table();
            let Some(guest) = table.guest(name) else {
                return;
            };
            let mut slot = guest_slot(&device, guest);
            slot.drain(drained);
            table.workers.insert(id.clone(), slot);
        }
        self.keep_guest(id, device, Some(heir));
    }

    /// Gives every untrusted model that was handed over a worker, if it has none yet.
    pub(super) fn host_guests(self: &Arc<Self>) {
        let names: Vec<_> = self.table().wanted().map(|(name, _)| name).collect();
        for name in names {
            if let Err(error) = self.host_guest(&name) {
                tracing::error!(model = %name, %error, "an untrusted model has no worker");
            }
        }
    }

    fn keep_guest(
        self: &Arc<Self>,
        id: String,
        device: Device,
        heir: Option<(Past, Option<Adopted>)>,
    ) {
        let fleet = Arc::clone(self);
        self.keepers.spawn(async move {
            keeper::keep(Arc::clone(&fleet), id.clone(), device, heir).await;
            fleet.table().workers.remove(&id);
            fleet.tell();
        });
    }

    /// Returns once nobody wants a guest's model any more; never for a device's own worker.
    pub(super) async fn unwanted(&self, id: &str) {
        let guest = self
            .table()
            .workers
            .get(id)
            .and_then(|slot| slot.guest.clone());
        let Some(guest) = guest else {
            return std::future::pending().await;
        };
        let mut changed = self.changes();
        loop {
            changed.see();
            if !self.table().is_needed(&guest) {
                return;
            }
            changed.changed().await;
        }
    }
}

fn guest_slot(device: &Device, guest: Guest) -> Slot {
    let mut slot = Slot::new(device.clone());
    slot.domain = UNTRUSTED;
    slot.guest = Some(guest);
    slot
}

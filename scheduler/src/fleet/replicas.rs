//! Which devices have a model, where not all have it.

use std::{collections::BTreeSet, sync::Arc};

use hotcell_proto::{ids::ModelName, v1::Device};
use tokio::sync::mpsc;

use super::{Fleet, Link, Table, slot::Slot};
use crate::placement::{self, Home};

impl Table {
    /// Whether a device is to have a model that shares workers.
    pub(super) fn is_home(&self, device: &Device, name: &ModelName) -> bool {
        let homes = self.models.get(name).and_then(|m| m.homes.as_ref());
        homes.is_none_or(|homes| homes.contains(&device.id))
    }

    /// Chooses the devices of a model again; returns whether they are others now.
    pub(super) fn choose_homes(&mut self, name: &ModelName) -> bool {
        let Some(model) = self.models.get(name) else {
            return false;
        };
        let replicas = model.serving.replicas as usize;
        let homes = (replicas > 0).then(|| {
            let own = self.workers.values().filter(|s| s.guest.is_none());
            let all: Vec<_> = own
                .map(|slot| {
                    let others = self.models.iter();
                    let others = others.filter(|(other, m)| *other != name && m.is_wanted());
                    let others = others.filter(|(other, _)| self.is_home(&slot.device, other));
                    let bytes = others.map(|(_, m)| match (m.footprint, &m.files) {
                        (Some(found), _) => found.alone(),
                        (None, files) => files.as_ref().map_or(0, |files| files.bytes()),
                    });
                    Home {
                        device: &slot.device.id,
                        hopeful: slot.hopeful,
                        has: model
                            .homes
                            .as_ref()
                            .is_some_and(|h| h.contains(&slot.device.id))
                            || slot.models.contains_key(name),
                        taken: bytes.fold(0, u64::saturating_add),
                    }
                })
                .collect();
            let chosen = placement::homes(&all, replicas).into_iter();
            chosen.map(str::to_owned).collect::<BTreeSet<_>>()
        });
        let changed = homes != model.homes;
        if let Some(model) = self.models.get_mut(name) {
            model.homes = homes;
        }
        changed
    }

    /// Workers that have a model and are not to have it any more; it is taken from them in the table.
    fn strays(&mut self, name: &ModelName) -> Vec<Arc<Link>> {
        let stray: Vec<_> = {
            let all = self.workers.iter();
            let all = all.filter(|(_, s)| s.guest.is_none() && s.models.contains_key(name));
            all.filter(|(_, s)| !self.is_home(&s.device, name))
                .map(|(id, _)| id.clone())
                .collect()
        };
        let mut links = Vec::new();
        for id in stray {
            if let Some(slot) = self.workers.get_mut(&id) {
                slot.models.remove(name);
                slot.unexamined.remove(name);
                links.extend(slot.link.clone());
            }
        }
        links
    }
}

impl Fleet {
    /// Whether a worker lacks a model that others have or are to have.
    pub fn has_moved(&self, name: &ModelName, from: &str) -> bool {
        let table = self.table();
        let wanted = table.models.get(name).is_some_and(|m| m.is_wanted());
        let lacks =
            |slot: &Slot| !slot.models.contains_key(name) && !table.is_home(&slot.device, name);
        wanted && table.workers.get(from).is_some_and(lacks)
    }

    /// Takes a model from devices that are not to have it any more.
    pub(super) async fn withdraw_strays(&self, name: &ModelName) {
        let links = self.table().strays(name);
        if !links.is_empty() {
            self.tell();
            self.unload_from(links, name).await;
        }
        self.release_elsewhere(name).await;
    }

    /// Gives models other devices in place of those that are lost for good.
    pub(super) fn move_models(self: &Arc<Self>) {
        let moved: Vec<_> = {
            let mut table = self.table();
            let counted = table.models.iter();
            let counted = counted.filter(|(_, m)| m.is_wanted() && m.serving.replicas > 0);
            let names: Vec<_> = counted.map(|(name, _)| name.clone()).collect();
            names
                .into_iter()
                .filter(|name| table.choose_homes(name))
                .collect()
        };
        for name in moved {
            let fleet = Arc::clone(self);
            self.keepers.spawn(async move {
                let _one_at_a_time = fleet.loads.one(&name).await;
                let _spreads = fleet.loads.spread().await;
                let (progress, _) = mpsc::channel(1);
                let spread = fleet.spread(&name, &progress);
                let spread = tokio::select! {
                    () = fleet.stop.cancelled() => return,
                    spread = spread => spread,
                };
                if let Err(error) = spread {
                    tracing::warn!(model = %name, %error, "a model cannot move to another device");
                }
                fleet.release_elsewhere(&name).await;
            });
        }
    }
}

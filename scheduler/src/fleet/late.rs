//! Devices that are found after the others have their workers.

use std::sync::Arc;

use tokio::task::JoinHandle;

use super::{Fleet, Slot, keeper};
use crate::discover::{Found, Search};

impl Fleet {
    /// Gives devices workers as they are found. What is returned ends when the search does.
    pub fn expect_devices(self: &Arc<Self>, mut search: Search) -> JoinHandle<()> {
        let fleet = Arc::clone(self);
        self.keepers.spawn(async move {
            loop {
                let found = tokio::select! {
                    () = fleet.stop.cancelled() => return,
                    found = search.next() => found,
                };
                match found {
                    Some(found) => fleet.found(found),
                    None => return,
                }
            }
        })
    }

    /// Hears how those devices are that a management library knows.
    pub(super) fn follow_devices(&self) {
        let devices = self.table().devices.clone();
        self.gauges.follow(&devices, &self.crashes);
    }

    /// Lists what a program found, and starts a worker on each device that has no problem.
    fn found(self: &Arc<Self>, found: Found) {
        let mut workers = Vec::new();
        {
            let mut table = self.table();
            let (before, usable) = found.settle(&mut table.devices);
            for (index, device) in usable.into_iter().enumerate() {
                // As another program would number them that took this one's place.
                let id = format!("w{}", before + index);
                table.workers.insert(id.clone(), Slot::new(device.clone()));
                workers.push((id, device));
            }
        }
        self.follow_devices();
        self.release_rearranged();
        for (id, device) in workers {
            self.keep_standby(&id, &device);
            let fleet = Arc::clone(self);
            self.keepers.spawn(keeper::keep(fleet, id, device, None));
        }
        self.host_guests();
        self.tell();
    }
}

//! Letting a worker out of quarantine, or have requests again, and having another process in its place.

use std::sync::Arc;

use hotcell_proto::{
    error::{Error, Reason},
    v1::{EventKind, WorkerState},
};

use tokio::sync::Notify;

use super::{Fleet, slot::Slot};
use crate::{audit::Who, discover::clip, events::About};

pub(super) fn unknown(worker: &str) -> Error {
    let what = format!(
        "no worker is called {}; `hotcell ps` lists them",
        clip(worker)
    );
    Error::new(Reason::NoWorker, what)
}

pub(super) fn not_so(worker: &str, wanted: &str, state: WorkerState) -> Error {
    let state = state.as_str_name().trim_start_matches("WORKER_STATE_");
    let what = format!(
        "worker {worker} is not {wanted} but {}",
        state.to_lowercase()
    );
    Error::new(Reason::InvalidArgument, what).with("worker", worker)
}

impl Slot {
    /// Has its keeper put another process in its place.
    pub(super) fn ask_for_another(&mut self) {
        // Who asks again finds it on its way.
        self.state = WorkerState::Draining;
        self.restart.notify_one();
    }
}

impl Fleet {
    /// Has a worker started again that was given up. What it died of before is not held against it any more. One that is
    /// drained gets new requests again.
    ///
    /// # Errors
    /// [`Reason::NoWorker`] if there is none of that name, [`Reason::InvalidArgument`] if it is neither.
    pub fn release(&self, worker: &str) -> Result<(), Error> {
        let mut table = self.table();
        let slot = table.workers.get_mut(worker);
        let slot = slot.ok_or_else(|| unknown(worker))?;
        let quarantined = slot.state == WorkerState::Quarantined;
        if !slot.undrain() && !quarantined {
            return Err(not_so(worker, "quarantined or drained", slot.state));
        }
        if quarantined {
            // Requests may wait for it from now on; and a second release finds it released.
            slot.state = WorkerState::Starting;
            slot.hopeful = true;
            slot.release.notify_one();
        }
        let epoch = slot.epoch;
        drop(table);
        tracing::info!(worker, "released");
        let about = About {
            worker,
            epoch,
            ..About::default()
        };
        self.events.tell(EventKind::WorkerReleased, about, "");
        self.tell();
        Ok(())
    }

    /// Has another process take the place of a worker's, for which it is drained no more. What it computed goes on there,
    /// or on another worker; no death is counted.
    ///
    /// # Errors
    /// [`Reason::NoWorker`] if there is none of that name, [`Reason::InvalidArgument`] if it does not serve.
    pub fn restart(&self, worker: &str, who: &Who) -> Result<(), Error> {
        let mut table = self.table();
        let slot = table.workers.get_mut(worker);
        let slot = slot.ok_or_else(|| unknown(worker))?;
        if slot.state != WorkerState::Ready {
            return Err(not_so(worker, "ready", slot.state));
        }
        slot.undrain();
        slot.ask_for_another();
        drop(table);
        tracing::info!(worker, by = %who.name, "another process takes its place");
        self.audit_debug(who, "restart", worker, String::new());
        self.tell();
        Ok(())
    }

    /// Returns once somebody wants another process in a worker's place.
    pub(super) async fn restarted(&self, worker: &str) {
        self.notified(worker, |slot| &slot.restart).await;
    }

    /// Returns once a quarantined worker is released.
    pub(super) async fn released(&self, worker: &str) {
        self.notified(worker, |slot| &slot.release).await;
    }

    async fn notified(&self, worker: &str, of: fn(&Slot) -> &Arc<Notify>) {
        let told = {
            let table = self.table();
            table.workers.get(worker).map(|slot| Arc::clone(of(slot)))
        };
        match told {
            Some(told) => told.notified().await,
            None => std::future::pending().await,
        }
    }
}

//! Letting a worker out of quarantine.

use std::sync::Arc;

use hotcell_proto::{
    error::{Error, Reason},
    v1::{EventKind, WorkerState},
};

use super::Fleet;
use crate::{discover::clip, events::About};

impl Fleet {
    /// Has a worker started again that was given up. What it died of before is not held against it any more.
    ///
    /// # Errors
    /// [`Reason::NoWorker`] if there is none of that name, [`Reason::InvalidArgument`] if it is not quarantined.
    pub fn release(&self, worker: &str) -> Result<(), Error> {
        let mut table = self.table();
        let slot = table.workers.get_mut(worker).ok_or_else(|| {
            let what = format!(
                "no worker is called {}; `hotcell ps` lists them",
                clip(worker)
            );
            Error::new(Reason::NoWorker, what)
        })?;
        if slot.state != WorkerState::Quarantined {
            let state = slot.state.as_str_name().trim_start_matches("WORKER_STATE_");
            let what = format!(
                "worker {worker} is not quarantined but {}",
                state.to_lowercase()
            );
            return Err(Error::new(Reason::InvalidArgument, what).with("worker", worker));
        }
        // Requests may wait for it from now on; and a second release finds it released.
        slot.state = WorkerState::Starting;
        slot.hopeful = true;
        slot.release.notify_one();
        let epoch = slot.epoch;
        drop(table);
        tracing::info!(worker, "released from quarantine");
        let about = About {
            worker,
            epoch,
            ..About::default()
        };
        self.events.tell(EventKind::WorkerReleased, about, "");
        self.tell();
        Ok(())
    }

    /// Returns once a quarantined worker is released.
    pub(super) async fn released(&self, worker: &str) {
        let release = {
            let table = self.table();
            table.workers.get(worker).map(|s| Arc::clone(&s.release))
        };
        match release {
            Some(release) => release.notified().await,
            None => std::future::pending().await,
        }
    }
}

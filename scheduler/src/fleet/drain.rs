//! Giving a worker no new requests, until somebody takes that back.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use hotcell_proto::{
    error::{Error, Reason},
    v1::{EventKind, WorkerState},
};
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use super::{
    Fleet,
    release::{not_so, unknown},
    slot::Slot,
};
use crate::{audit::Who, events::About};

/// How long its requests have unless its caller says otherwise, and at most.
const PATIENCE: Duration = Duration::from_secs(60);
const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

/// The time that is asked for; none: what it is unless somebody says otherwise.
///
/// # Errors
/// [`Reason::InvalidArgument`] if it is too long.
pub fn checked_patience(millis: u32) -> Result<Duration, Error> {
    match Duration::from_millis(millis.into()) {
        Duration::ZERO => Ok(PATIENCE),
        asked if asked <= LONGEST => Ok(asked),
        asked => {
            let what = format!("requests have {LONGEST:?} to end at most, not {asked:?}");
            Err(Error::new(Reason::InvalidArgument, what))
        }
    }
}

impl Slot {
    /// Whether it gets no new requests.
    pub(super) fn is_drained(&self) -> bool {
        self.drained.is_some()
    }

    fn running(&self) -> u32 {
        self.load.running.load(Ordering::Relaxed)
    }

    /// Its state as it is told: one that is drained has that before it serves.
    pub(super) fn told_state(&self) -> WorkerState {
        match self.state {
            WorkerState::Ready if self.is_drained() && self.running() > 0 => WorkerState::Draining,
            WorkerState::Ready if self.is_drained() => WorkerState::Drained,
            state => state,
        }
    }

    /// As another program left it, which gave its requests as long as they need.
    pub(super) fn drain(&mut self, drained: bool) {
        self.drained = drained.then(CancellationToken::new);
    }

    /// It gets requests as any other. Returns whether it did not before.
    pub(super) fn undrain(&mut self) -> bool {
        let was = self.drained.take();
        was.as_ref().inspect(|until| until.cancel()).is_some()
    }
}

impl Fleet {
    /// Gives a worker no new requests until it is released or restarted. What it still runs after `patience` goes on
    /// elsewhere, or in another process in its place if no other worker is of the class.
    ///
    /// # Errors
    /// [`Reason::NoWorker`] if there is none of that name, [`Reason::InvalidArgument`] if it does not serve or is drained.
    pub fn drain(
        self: &Arc<Self>,
        worker: &str,
        patience: Duration,
        who: &Who,
    ) -> Result<(), Error> {
        let until = CancellationToken::new();
        let mut table = self.table();
        let slot = table.workers.get_mut(worker);
        let slot = slot.ok_or_else(|| unknown(worker))?;
        if slot.told_state() != WorkerState::Ready {
            return Err(not_so(worker, "ready", slot.told_state()));
        }
        slot.drained = Some(until.clone());
        let about = About {
            worker,
            epoch: slot.epoch,
            ..About::default()
        };
        tracing::info!(worker, by = %who.name, "it gets no new requests");
        self.events.tell(
            EventKind::WorkerDrained,
            about,
            format!("its requests have {patience:?}"),
        );
        drop(table);
        self.audit_debug(who, "drain", worker, format!("{patience:?}"));
        self.tell();
        let fleet = Arc::clone(self);
        let worker = worker.to_owned();
        self.keepers.spawn(async move {
            tokio::select! {
                () = until.cancelled() => {}
                () = fleet.stop.cancelled() => {}
                () = fleet.empty(&worker, patience) => {}
            }
        });
        Ok(())
    }

    /// Waits until a worker has no requests; has another process take its place if it has some after so long.
    async fn empty(&self, worker: &str, patience: Duration) {
        let until = Instant::now() + patience;
        let mut changed = self.changes();
        loop {
            changed.see();
            let running = |slot: &Slot| slot.running() > 0;
            if !self.table().workers.get(worker).is_some_and(running) {
                return;
            }
            if timeout_at(until, changed.changed()).await.is_err() {
                break;
            }
        }
        match self.table().workers.get_mut(worker) {
            Some(slot) if slot.state == WorkerState::Ready => slot.ask_for_another(),
            // It died by itself: what ran there runs elsewhere.
            _ => return,
        }
        tracing::info!(worker, "what it still runs goes on elsewhere");
        self.tell();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_has_a_default_and_a_bound() {
        assert_eq!(checked_patience(0).unwrap(), PATIENCE);
        assert_eq!(checked_patience(1500).unwrap().as_millis(), 1500);
        let error = checked_patience(u32::MAX).unwrap_err();
        assert_eq!(error.reason(), Reason::InvalidArgument);
    }
}

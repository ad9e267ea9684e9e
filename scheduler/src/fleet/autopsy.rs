//! Looking into the black boxes of live and dead processes.

use std::{sync::Arc, time::Duration};

use hotcell_ipc::blackbox::Reader;
use tokio::time::{Instant, sleep};
use tokio_util::task::AbortOnDropHandle;

use super::{
    Condemnation, Fate, Fleet, Process,
    changes::Teller,
    replay::{SLOWER, is_traced},
};
use crate::{
    crash::{self, Dead},
    death::{Death, DeathKind, Ended},
    hang::{Hang, Patience},
};

/// How long a thread that hangs may take to write down where.
const POINT_OUT: Duration = Duration::from_millis(50);

/// Condemns a process once it hangs, and tells of it when it may. Cancelled with the process.
pub(super) async fn watch(
    blackbox: Arc<Reader>,
    fate: Fate,
    patience: Patience,
    changed: Option<Teller>,
    // One that may stand still while a debugger is attached.
    traced: Option<u32>,
) {
    let mut seen = Duration::ZERO;
    let mut hang = Hang::new(blackbox.pulse(), seen);
    let interval = patience.interval();
    loop {
        let slept = Instant::now();
        sleep(interval).await;
        // Who overslept was stopped, or starved as much as the worker: that time says nothing about it.
        seen += slept.elapsed().min(2 * interval);
        if traced.is_some_and(is_traced) {
            hang = Hang::new(blackbox.pulse(), seen);
            continue;
        }
        if let Some(why) = hang.look(blackbox.pulse(), seen, &patience) {
            fate.condemn(Condemnation::new(DeathKind::Wedged, why));
            return;
        }
        if fate.stalls(hang.is_stalled())
            && let Some(changed) = &changed
        {
            changed.tell();
        }
    }
}

/// Has the thread that owns the device write down where it hangs, before it is killed.
pub(super) async fn point_out(process: &dyn Process) {
    let blackbox = process.blackbox();
    if let Some(thread) = blackbox.and_then(|b| b.engine_thread()) {
        process.point_out(thread);
        sleep(POINT_OUT).await;
    }
}

impl Fleet {
    /// Begins to watch for a hang, if the process has a black box. Ends when dropped.
    pub(super) fn watch(
        &self,
        process: &dyn Process,
        fate: &Fate,
    ) -> Option<AbortOnDropHandle<()>> {
        self.watch_with(process, fate, self.patience, None)
    }

    /// As [`watch`](Self::watch), of one that computes on the time that others leave, and that may stand still while a
    /// debugger is attached.
    pub(super) fn watch_background(
        &self,
        process: &dyn Process,
        fate: &Fate,
    ) -> Option<AbortOnDropHandle<()>> {
        let patience = self.patience.times(SLOWER);
        self.watch_with(process, fate, patience, Some(process.pid()))
    }

    fn watch_with(
        &self,
        process: &dyn Process,
        fate: &Fate,
        patience: Patience,
        traced: Option<u32>,
    ) -> Option<AbortOnDropHandle<()>> {
        let blackbox = Arc::clone(process.blackbox()?);
        let changed = Some(self.changed.clone());
        let watching = watch(blackbox, fate.clone(), patience, changed, traced);
        Some(AbortOnDropHandle::new(tokio::spawn(watching)))
    }

    /// Makes the report of a worker's death. To be called while the table still knows what the process had.
    pub(super) fn autopsy(&self, id: &str, death: &Death, ended: &Ended, process: &dyn Process) {
        let dead = self.table().workers.get(id).map(|slot| slot.dead(id));
        if let Some(dead) = dead {
            self.autopsy_of(dead, death, ended, Some(process));
        }
    }

    /// Makes the report of any process's death.
    pub(super) fn autopsy_of(
        &self,
        dead: Dead,
        death: &Death,
        ended: &Ended,
        process: Option<&dyn Process>,
    ) {
        let missing = || Err(std::io::Error::other("there is none"));
        let blackbox = process.and_then(Process::blackbox);
        let seen = blackbox.map_or_else(missing, |blackbox| blackbox.snapshot());
        let device = dead.device.clone();
        self.crashes.keep(crash::report(dead, death, ended, seen));
        // Those that are told from here on find the report.
        for fault in self.gauges.recent_faults(&device, crash::TOGETHER) {
            self.crashes.fault(&device, fault);
        }
    }
}

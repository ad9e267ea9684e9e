//! What the service manager is told: ready, how many workers serve, ending, and again and again that all is well.

use std::{sync::Arc, time::Duration};

use hotcell_ipc::notify::Manager;
use hotcell_proto::v1::WorkerState;
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::{fleet::Fleet, service::Shared, store};

/// Pings within the time after which the manager would give this process up.
const PINGS: u32 = 4;
/// How long changes are gathered before they are told: workers come and go faster than anybody reads.
const GATHER: Duration = Duration::from_millis(100);

/// The manager that started this process, if it wants to hear from it. A private scheduler tells nobody: what is in its
/// environment is about the program that it belongs to.
pub fn find(private: bool) -> Option<Arc<Manager>> {
    if private {
        return None;
    }
    match Manager::find() {
        Ok(manager) => manager.map(Arc::new),
        Err(error) => {
            tracing::warn!(%error, "the service manager cannot be told anything");
            None
        }
    }
}

/// Tells it how things are, for as long as this is polled. Ready is once a worker serves, with all its models.
pub async fn keep_informed(manager: Arc<Manager>, shared: Shared) {
    tokio::join!(
        tell(&manager, &shared),
        ping(&manager, &shared.fleet),
        store::keep(&manager, &shared)
    );
}

/// This process is ending.
pub fn stopping(manager: Option<&Arc<Manager>>, why: &str) {
    if let Some(manager) = manager {
        heard(manager.stopping(why));
        heard(store::forget(manager));
    }
}

fn heard(told: std::io::Result<()>) {
    if let Err(error) = told {
        tracing::debug!(%error, "the service manager did not hear");
    }
}

fn status(fleet: &Fleet) -> String {
    let workers = fleet.workers();
    let count = |state| workers.iter().filter(|w| w.state() == state).count();
    let ready = count(WorkerState::Ready);
    let mut status = format!("{ready} of {} workers ready", workers.len());
    for (state, what) in [
        (WorkerState::Standby, "standing by"),
        (WorkerState::Quarantined, "quarantined"),
    ] {
        if count(state) > 0 {
            status.push_str(&format!(", {} {what}", count(state)));
        }
    }
    status
}

async fn tell(manager: &Manager, shared: &Shared) {
    let mut changed = shared.fleet.changes();
    let (mut ready, mut told) = (false, String::new());
    loop {
        changed.see();
        let status = status(&shared.fleet);
        // What is said once it ends stays.
        if shared.admission.is_closed() {
            return;
        }
        if !ready && shared.fleet.ready() > 0 {
            ready = true;
            heard(manager.ready(&status));
        } else if status != told {
            heard(manager.status(&status));
        }
        told = status;
        changed.changed().await;
        sleep(GATHER).await;
    }
}

/// Says that all is well as long as it is: timers fire, new tasks run, and the table can be looked into.
async fn ping(manager: &Manager, fleet: &Arc<Fleet>) {
    let Some(patience) = manager.watchdog() else {
        return;
    };
    let mut rounds = interval((patience / PINGS).max(Duration::from_millis(1)));
    rounds.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        rounds.tick().await;
        let fleet = Arc::clone(fleet);
        // On whichever thread takes it: were all of them stuck, it would not come back.
        let looked = tokio::spawn(async move { fleet.ready() }).await;
        if looked.is_ok() {
            heard(manager.alive());
        }
    }
}

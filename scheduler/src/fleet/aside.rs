//! Workers beside the devices' own: listed, started, greeted and mourned here. A standby waits to take a worker's
//! place (`standby`), a throw-away worker runs one request alone (`solo`).
//!
//! None of them is in the table of workers that requests are placed on.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use hotcell_proto::v1::{Device, EventKind, WorkerInfo};
use tokio::time::timeout;

use super::{Fate, Fleet, Link, Order, Process, Role, replay::SLOWER, slot::Slot};
use crate::{
    crash::Dead,
    death::{Death, DeathKind, Ended, classify},
    events::About,
};

/// How long the end of a process may take to show after a conversation with it broke.
const POST_MORTEM: Duration = Duration::from_millis(200);

/// Those that there are, by name.
#[derive(Clone, Default)]
pub(super) struct Asides(Arc<Mutex<BTreeMap<String, Slot>>>);

impl Asides {
    fn list(&self) -> MutexGuard<'_, BTreeMap<String, Slot>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, id: &str, slot: Slot) -> Listed {
        self.list().insert(id.to_owned(), slot);
        Listed {
            id: id.to_owned(),
            asides: self.clone(),
        }
    }

    /// The device that one of them was started on.
    pub(super) fn device_of(&self, id: &str) -> Option<String> {
        self.list().get(id).map(|slot| slot.device.id.clone())
    }

    /// For people.
    pub(super) fn infos(&self) -> Vec<WorkerInfo> {
        let list = self.list();
        list.iter().map(|(id, slot)| slot.info(id)).collect()
    }
}

/// A line in the list, struck out when this is dropped.
pub(super) struct Listed {
    id: String,
    asides: Asides,
}

impl Listed {
    /// Changes the line, and returns what `change` does.
    pub(super) fn edit<T: Default>(&self, change: impl FnOnce(&mut Slot) -> T) -> T {
        let mut list = self.asides.list();
        list.get_mut(&self.id).map(change).unwrap_or_default()
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.asides.list().remove(&self.id);
    }
}

/// A process that was started and greeted, and has nothing to do yet. Dropping it kills it.
pub(super) struct Aside {
    pub(super) listed: Listed,
    pub(super) process: Box<dyn Process>,
    pub(super) link: Link,
}

impl Aside {
    /// Ends it, and returns once it is reaped or the kernel takes too long.
    pub(super) async fn end(mut self, patience: Duration) {
        self.process.kill();
        let _ = timeout(patience, self.process.wait()).await;
    }
}

/// Works with a process for as long as it lives. What it died of says more than that the work broke off.
pub(super) async fn while_alive<T>(
    process: &mut Box<dyn Process>,
    work: impl Future<Output = Result<T, Death>>,
) -> Result<T, Death> {
    let broke = tokio::select! {
        biased;
        ended = process.wait() => return Err(classify(&ended)),
        done = work => match done {
            Ok(done) => return Ok(done),
            Err(broke) => broke,
        },
    };
    match timeout(POST_MORTEM, process.wait()).await {
        Ok(ended) => Err(crate::death::cause(&broke, classify(&ended))),
        Err(_) => Err(broke),
    }
}

impl Fleet {
    /// Starts a process on a device and greets it.
    ///
    /// # Errors
    /// What became of it.
    pub(super) async fn begin_aside(
        &self,
        order: Order<'_>,
        domain: &'static str,
    ) -> Result<Aside, Death> {
        let Order {
            worker,
            epoch,
            device,
            role,
            ..
        } = order;
        let launched = self.launcher.launch(order).await;
        let launched = launched.map_err(|e| Death::new(DeathKind::CannotStart, e.to_string()))?;
        let (mut process, sockets) = launched.split();
        let mut slot = Slot::new(Device::clone(device));
        slot.launched(process.pid(), epoch);
        slot.domain = domain;
        let listed = self.asides.enter(worker, slot);
        let about = About {
            worker,
            epoch,
            ..About::default()
        };
        let started = format!("process {}", process.pid());
        self.events.tell(EventKind::WorkerStarted, about, started);
        let greeting = async {
            let link = Link::connect(worker, epoch, Fate::new(), sockets).await;
            let link = link.map_err(|why| why.death())?;
            let hello = link.handshake().await.map_err(|why| why.death())?;
            Ok((link, hello))
        };
        let slower = match role {
            Role::Serves => 1,
            Role::Replays { .. } => SLOWER,
        };
        let patience = self.policy.start_timeout.saturating_mul(slower);
        let in_time = async {
            timeout(patience, greeting).await.unwrap_or_else(|_| {
                let silence = format!("no sign of life for {patience:?} while starting");
                Err(Death::new(DeathKind::Deadline, silence))
            })
        };
        let (link, hello) = while_alive(&mut process, in_time).await?;
        listed.edit(|slot| slot.heard(&hello));
        Ok(Aside {
            listed,
            process,
            link,
        })
    }

    /// Tells everyone that one of them died, and makes the report if it is still listed.
    pub(super) fn mourn_aside(
        &self,
        worker: &str,
        epoch: u64,
        death: &Death,
        ended: &Ended,
        process: Option<&dyn Process>,
    ) {
        let dead = self.asides.list().get(worker).map(|slot| slot.dead(worker));
        let unlisted = || Dead {
            worker: worker.to_owned(),
            epoch,
            ..Dead::default()
        };
        self.autopsy_of(dead.unwrap_or_else(unlisted), death, ended, process);
        tracing::warn!(worker, epoch, %death, "worker died");
        let about = About {
            worker,
            epoch,
            ..About::default()
        };
        self.audit_death(worker, epoch, death);
        self.distrust_device(worker, death);
        self.events.tell_death(about, death);
    }
}

//! Standby workers: beside each device's own, one that is spawned, confined, greeted, has the models mapped, and
//! does nothing. When a worker dies its standby takes its place, and the next one is made behind it.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    future::pending,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use hotcell_proto::{
    ids::ModelName,
    v1::{Device, WorkerState},
};
use tokio::{
    sync::{mpsc, oneshot},
    time::{sleep, timeout},
};

use super::{
    Asked, Fleet, Link, LoadFailure, Order, Process, Role,
    aside::{Aside, while_alive},
    slot::TRUSTED,
};
use crate::{
    death::{Death, DeathKind, Ended, classify},
    vault::OpenModel,
};

/// How long a worker has served before the standby behind it is made: the start of one takes cores from streams that
/// are just going on.
const SETTLE: Duration = Duration::from_millis(250);
/// How long one that is to take a place may take to answer. A new process takes about as long to start.
const ANSWER: Duration = Duration::from_millis(500);

/// One that is ready, on its way to the keeper of the worker whose place it takes.
pub(super) struct Standby {
    pub(super) process: Box<dyn Process>,
    pub(super) link: Link,
    /// What it has loaded.
    pub(super) loaded: Asked,
}

/// Asks for a standby; dropped if there is none.
type Ask = oneshot::Sender<Standby>;

/// Where the standbys of each worker are asked for.
#[derive(Default)]
pub(super) struct Standbys(Mutex<BTreeMap<String, mpsc::Sender<Ask>>>);

impl Standbys {
    /// Announces the keeper of a worker's standbys.
    fn enter(&self, worker: &str) -> mpsc::Receiver<Ask> {
        let (sender, receiver) = mpsc::channel(1);
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert(worker.to_owned(), sender);
        receiver
    }

    /// A worker's standby, if one is ready now.
    async fn take(&self, worker: &str) -> Option<Standby> {
        let sender = {
            let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            all.get(worker)?.clone()
        };
        let (ask, answer) = oneshot::channel();
        sender.try_send(ask).ok()?;
        answer.await.ok()
    }
}

/// How a standby's wait ended.
enum Wait {
    Promoted,
    /// Mourned already.
    Died,
    Stopped,
}

impl Fleet {
    /// Begins to keep a standby behind a worker, if there are to be any.
    pub(super) fn keep_standby(self: &Arc<Self>, worker: &str, device: &Device) {
        let Some(standbys) = &self.standbys else {
            return;
        };
        let asked = standbys.enter(worker);
        let fleet = Arc::clone(self);
        self.keepers
            .spawn(keep(fleet, worker.to_owned(), device.clone(), asked));
    }

    /// A worker's standby, if one is ready now.
    pub(super) async fn take_standby(&self, worker: &str) -> Option<Standby> {
        self.standbys.as_ref()?.take(worker).await
    }

    /// Returns once a worker serves and has done so for a while.
    async fn settled(&self, worker: &str) {
        let mut changed = self.changes();
        loop {
            changed.see();
            let serves = {
                let table = self.table();
                table.workers.get(worker).is_some_and(|s| s.link.is_some())
            };
            if serves {
                return sleep(SETTLE).await;
            }
            changed.changed().await;
        }
    }
}

/// Says no to everyone who asks.
async fn refuse(asked: &mut mpsc::Receiver<Ask>) -> Infallible {
    while let Some(ask) = asked.recv().await {
        drop(ask);
    }
    pending().await
}

async fn keep(fleet: Arc<Fleet>, worker: String, device: Device, mut asked: mpsc::Receiver<Ask>) {
    let id = format!("{worker}.standby");
    let (mut epoch, mut failures) = (0, 0u32);
    loop {
        tokio::select! {
            biased;
            () = fleet.stop.cancelled() => return,
            never = refuse(&mut asked) => match never {},
            () = fleet.settled(&worker) => {}
        }
        epoch += 1;
        let order = Order {
            worker: &id,
            epoch,
            device: &device,
            allowance: None,
            role: Role::Serves,
        };
        let begun = tokio::select! {
            biased;
            () = fleet.stop.cancelled() => return,
            never = refuse(&mut asked) => match never {},
            begun = fleet.begin_aside(order, TRUSTED) => begun,
        };
        let waited = match begun {
            Ok(aside) => wait(&fleet, &device.id, aside, &mut asked).await,
            Err(death) => {
                fleet.mourn_aside(&id, epoch, &death, &Ended::default(), None);
                Wait::Died
            }
        };
        match waited {
            Wait::Stopped => return,
            Wait::Promoted => failures = 0,
            Wait::Died => {
                let policy = &fleet.policy;
                let pause = policy.backoff.saturating_mul(2u32.saturating_pow(failures));
                failures = failures.saturating_add(1);
                tokio::select! {
                    biased;
                    () = fleet.stop.cancelled() => return,
                    never = refuse(&mut asked) => match never {},
                    () = sleep(pause.min(policy.backoff_max)) => {}
                }
            }
        }
    }
}

/// Has a standby load what workers are to have, and waits until it is asked for.
async fn wait(
    fleet: &Fleet,
    device: &str,
    mut aside: Aside,
    asked: &mut mpsc::Receiver<Ask>,
) -> Wait {
    let mut loaded = Asked::new();
    let mut changed = fleet.changes();
    loop {
        changed.see();
        let (missing, unwanted) = fleet.table().difference(None, device, &loaded);
        // The worker itself is to give the first answer.
        let mut missing = missing.into_iter();
        let change = missing.find(|(name, _)| !fleet.is_unexamined(name));
        let gone = unwanted.into_iter().next();
        if change.is_some() || gone.is_some() {
            let Aside { process, link, .. } = &mut aside;
            let adapt = adapt(fleet, link, &mut loaded, change, gone);
            let adapted = tokio::select! {
                biased;
                () = fleet.stop.cancelled() => None,
                // Half a load cannot be handed over.
                never = refuse(asked) => match never {},
                adapted = while_alive(process, adapt) => Some(adapted),
            };
            let patience = fleet.policy.stop_timeout;
            match adapted {
                None => {
                    aside.end(patience).await;
                    return Wait::Stopped;
                }
                Some(Err(death)) => {
                    return bury(fleet, aside, death, None).await;
                }
                Some(Ok(())) => {}
            }
            let models: BTreeMap<_, _> = loaded
                .iter()
                .filter_map(|(name, (_, got))| Some((name.clone(), got.clone()?)))
                .collect();
            aside.listed.edit(|slot| slot.models = models);
            continue;
        }
        aside.listed.edit(|slot| slot.state = WorkerState::Standby);
        tokio::select! {
            biased;
            () = fleet.stop.cancelled() => {
                aside.end(fleet.policy.stop_timeout).await;
                return Wait::Stopped;
            }
            ended = aside.process.wait() => return bury(fleet, aside, classify(&ended), Some(ended)).await,
            Some(ask) = asked.recv() => {
                let Aside { process, link, .. } = &mut aside;
                let answers = async { link.ask_tokens(ANSWER).await.map_err(|why| why.death()) };
                if let Err(death) = while_alive(process, answers).await {
                    // Without an answer the place goes to a new process, at once.
                    drop(ask);
                    return bury(fleet, aside, death, None).await;
                }
                let Aside { listed, process, link } = aside;
                // Not twice in the list.
                drop(listed);
                // What it would not load it is asked for again, so that the table learns why.
                loaded.retain(|_, (_, got)| got.is_some());
                let standby = Standby { process, link, loaded };
                // A keeper that asks waits for the answer, unless the fleet is gone.
                return match ask.send(standby) {
                    Ok(()) => Wait::Promoted,
                    Err(_) => Wait::Stopped,
                };
            }
            () = changed.changed() => {}
        }
    }
}

/// Sees to the end of a standby that is of no use, and tells everyone.
async fn bury(fleet: &Fleet, mut aside: Aside, death: Death, ended: Option<Ended>) -> Wait {
    let ended = match ended {
        Some(ended) => ended,
        None => {
            aside.process.kill();
            let patience = fleet.policy.stop_timeout;
            let reaped = timeout(patience, aside.process.wait()).await;
            reaped.unwrap_or_default()
        }
    };
    let (id, epoch) = (&aside.link.worker, aside.link.epoch);
    fleet.mourn_aside(id, epoch, &death, &ended, Some(aside.process.as_ref()));
    Wait::Died
}

/// Loads one model and forgets another.
///
/// # Errors
/// When the process is of no use any more.
async fn adapt(
    fleet: &Fleet,
    link: &Link,
    loaded: &mut Asked,
    missing: Option<(ModelName, Arc<OpenModel>)>,
    unwanted: Option<ModelName>,
) -> Result<(), Death> {
    let patience = fleet.policy.start_timeout;
    if let Some(name) = unwanted {
        if loaded.get(&name).is_some_and(|(_, got)| got.is_some()) {
            let unloaded = link.unload(&name, patience).await;
            unloaded.map_err(|error| {
                Death::new(
                    DeathKind::Protocol,
                    format!("cannot unload {name}: {error}"),
                )
            })?;
        }
        if let Some((files, _)) = loaded.remove(&name) {
            fleet.release_unwanted(&name, &files).await;
        }
        return Ok(());
    }
    let Some((name, files)) = missing else {
        return Ok(());
    };
    let got = match fleet
        .hand_over(link, &name, &files, true, patience, |_| {})
        .await
    {
        Ok(got) => {
            let examined = fleet.examine(link, &name, &got).await;
            examined.map_err(|why| why.death())?;
            Some(got)
        }
        Err(LoadFailure::Refused(error)) => {
            tracing::warn!(model = %name, worker = link.worker, %error, "a standby cannot load a model");
            None
        }
        Err(LoadFailure::Broken(kind, why)) => {
            return Err(Death::new(kind, format!("while loading {name}: {why}")));
        }
    };
    loaded.insert(name, (files, got));
    Ok(())
}

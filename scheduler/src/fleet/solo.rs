//! Throw-away workers: one suspected request each, alone, on a process that nobody else uses and that ends with it.

use std::sync::{Arc, MutexGuard, PoisonError, atomic::Ordering};

use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    v1::{Device, Loaded, WorkerState},
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{sleep, timeout_at},
};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{
    Fleet, LoadFailure, Order, Placed, Role, Ticket,
    aside::{Aside, while_alive},
    autopsy,
    link::Link,
    slot::{Load, SUSPECT},
};
use crate::{
    death::{Death, DeathKind, Ended, classify},
    placement::{Estimate, Wish},
    suspicion::{Next, Process, Record, Witnessed},
    testimony::Testimony,
    vault::OpenModel,
};

/// Throw-away workers that may die before their request reaches them; it is not to blame for those.
const ATTEMPTS: u32 = 3;

/// Holds a throw-away worker: dropping it ends the process.
#[derive(Debug)]
pub(super) struct Leash {
    pub(super) _end: DropGuard,
}

/// A throw-away worker that has no model. Dropping it ends the process.
#[derive(Debug)]
pub struct Alone {
    /// The worker.
    pub link: Arc<Link>,
    /// The worker whose device it runs on.
    pub home: String,
    _leash: Leash,
}

/// Why a suspect gets no worker of its own.
enum NoSolo {
    /// It is no suspect any more.
    Cleared,
    Failed(Error),
}

impl From<Error> for NoSolo {
    fn from(error: Error) -> Self {
        NoSolo::Failed(error)
    }
}

/// A worker that was lost under a request.
#[derive(Clone, Copy, Debug)]
pub struct Lost<'a> {
    /// The request's id.
    pub request: &'a str,
    /// The worker.
    pub link: &'a Link,
    /// The worker whose device it ran on.
    pub home: &'a str,
    /// Whether no other request ran there.
    pub alone: bool,
    /// Whether it had accepted the request.
    pub accepted: bool,
}

/// Whether a request may have caused a death of this kind.
fn blames(kind: DeathKind, accepted: bool) -> bool {
    match kind {
        // A connection that was broken before is found out by whoever uses it next.
        DeathKind::Protocol => accepted,
        DeathKind::Exit { .. }
        | DeathKind::Signal { .. }
        | DeathKind::Deadline
        | DeathKind::Wedged
        | DeathKind::Unknown => true,
        // The host was short, a file changed, the device computes wrongly, or it was told to go.
        DeathKind::OutOfMemory { .. }
        | DeathKind::ModelChanged
        | DeathKind::Corrupt
        | DeathKind::CannotStart
        | DeathKind::Stopped => false,
    }
}

impl Fleet {
    /// Notes in a request's record that its worker was lost, and decides what becomes of the request. The deaths of one
    /// that is poison are held against nobody else from then on.
    pub fn witness(&self, record: &mut Record, lost: &Lost<'_>) -> Next {
        let Lost {
            request,
            link,
            home,
            alone,
            accepted,
        } = *lost;
        let process = Process {
            worker: link.worker.clone(),
            epoch: link.epoch,
        };
        let kind = link.fate.kind().unwrap_or(DeathKind::Unknown);
        let blames = blames(kind, accepted) && !link.died_packing();
        let mut told = self.told();
        let sound = blames && record.testify(&mut told, request, home, &process, alone);
        drop(told);
        let death = Witnessed {
            process,
            blames,
            alone,
            sound,
        };
        let mut explained = self.explained();
        let next = record.witness(&self.suspicion, death, &explained);
        if next == Next::Poison {
            explained.explain(record.blamed());
            drop(explained);
            // Those who wait for a worker of their own may need none any more.
            self.tell();
        }
        next
    }

    /// Notes that a device served a request: whoever kills workers there does so by itself.
    pub fn served(&self, home: &str, request: &str) {
        self.told().served(home, request);
    }

    fn told(&self) -> MutexGuard<'_, Testimony> {
        self.testimony
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether so many deaths speak against a request that it is run alone.
    pub fn suspects(&self, record: &Record) -> bool {
        record.is_suspect(&self.suspicion, &self.explained())
    }

    /// Deaths that make a suspect.
    pub fn suspect_after(&self) -> u32 {
        self.suspicion.suspect_after
    }

    /// A place for a suspect: alone on a throw-away worker, on the device of `home` if that is in use; or among
    /// others, once somebody else turned out to have killed the workers it is suspected for.
    ///
    /// # Errors
    /// As [`Fleet::acquire`], and [`Reason::Overloaded`] when too many suspects wait.
    pub async fn acquire_alone(
        self: &Arc<Self>,
        model: &ModelName,
        wish: Wish<'_>,
        home: &str,
        record: &Record,
        cost: impl Fn() -> Estimate,
    ) -> Result<Placed, Error> {
        match self.solo(model, wish, home, record, &cost).await {
            Ok(placed) => Ok(placed),
            Err(NoSolo::Cleared) => self.acquire(model, wish, cost).await,
            Err(NoSolo::Failed(error)) => Err(error.with("model", model)),
        }
    }

    async fn solo(
        self: &Arc<Self>,
        model: &ModelName,
        wish: Wish<'_>,
        home: &str,
        record: &Record,
        cost: &impl Fn() -> Estimate,
    ) -> Result<Placed, NoSolo> {
        let suspected = || record.is_suspect(&self.suspicion, &self.explained());
        let mut permit = Some(self.solo_permit(&self.solos, suspected).await?);
        let mut attempt = 0;
        loop {
            let (home, device) = self.solo_device(model, wish, home, record)?;
            let files = self.solo_files(model)?;
            let id = self.solo_name(&home);
            let order = Order {
                worker: &id,
                epoch: 1,
                device: &device,
                allowance: self.allowance_for(model),
                role: Role::Serves,
            };
            let death = match self.begin_solo(order, model, &files).await {
                Ok((aside, got)) => {
                    let got = got?;
                    let class = got.numerics.unwrap_or_default();
                    if wish.class.is_some_and(|wanted| wanted != class.id) {
                        return Err(no_class(model, &home).into());
                    }
                    let (link, load, leash) = self.leash(aside, &id, [permit.take(), None]);
                    return Ok(Placed {
                        link,
                        class,
                        home,
                        ticket: Ticket::new(&load, &self.changed, cost(), &self.uses(model), None),
                        leash: Some(leash),
                    });
                }
                Err(death) => death,
            };
            self.mourn_aside(&id, 1, &death, &Ended::default(), None);
            attempt += 1;
            if attempt == ATTEMPTS {
                return Err(Error::new(
                    Reason::NoWorker,
                    format!("no worker of its own came up for a suspected request, the last one: {death}"),
                )
                .into());
            }
            sleep(self.policy.backoff).await;
        }
    }

    /// A throw-away worker without a model, for a call of a suspected graph: on the device of `home` if that is in use.
    /// None once it is `suspected` no more.
    ///
    /// # Errors
    /// [`Reason::Overloaded`] when too many suspects wait, [`Reason::NoWorker`].
    pub async fn alone_for_graph(
        self: &Arc<Self>,
        home: &str,
        suspected: impl Fn() -> bool,
    ) -> Result<Option<Alone>, Error> {
        let no = |no| match no {
            NoSolo::Cleared => Ok(None),
            NoSolo::Failed(error) => Err(error),
        };
        // Token streams that wait for such a place as well always find some that no graph can have.
        let own = match self.solo_permit(&self.graph_solos, &suspected).await {
            Ok(own) => own,
            Err(error) => return no(error),
        };
        let mut permit = match self.solo_permit(&self.solos, suspected).await {
            Ok(permit) => Some((permit, own)),
            Err(error) => return no(error),
        };
        let mut attempt = 0;
        loop {
            let (home, device) = self.bare_device(home)?;
            let id = self.solo_name(&home);
            let order = Order {
                worker: &id,
                epoch: 1,
                device: &device,
                allowance: None,
                role: Role::Serves,
            };
            let death = match self.begin_aside(order, SUSPECT).await {
                Ok(aside) => {
                    let (permit, own) = permit.take().unzip();
                    let (link, _, leash) = self.leash(aside, &id, [permit, own]);
                    return Ok(Some(Alone {
                        link,
                        home,
                        _leash: leash,
                    }));
                }
                Err(death) => death,
            };
            self.mourn_aside(&id, 1, &death, &Ended::default(), None);
            attempt += 1;
            if attempt == ATTEMPTS {
                let what = format!(
                    "no worker of its own came up for a suspected graph, the last one: {death}"
                );
                return Err(Error::new(Reason::NoWorker, what));
            }
            sleep(self.policy.backoff).await;
        }
    }

    /// A device's own worker that is in use or may be again, rather `home`, and its device.
    fn bare_device(&self, home: &str) -> Result<(String, Device), Error> {
        let table = self.table();
        let own = table.workers.iter();
        let own = own.filter(|(_, slot)| slot.hopeful && slot.guest.is_none());
        let found = own.min_by_key(|(id, _)| *id != home);
        let (id, slot) = found.ok_or_else(|| {
            let what = "no device can run a suspected graph alone; `hotcell ps` shows why";
            Error::new(Reason::NoWorker, what)
        })?;
        Ok((id.clone(), slot.device.clone()))
    }

    fn solo_name(&self, home: &str) -> String {
        let number = self.solos_made.fetch_add(1, Ordering::Relaxed) + 1;
        format!("{home}.solo{number}")
    }

    /// Puts a throw-away worker to work, until what comes last of these is dropped.
    fn leash(
        self: &Arc<Self>,
        aside: Aside,
        id: &str,
        permits: [Option<OwnedSemaphorePermit>; 2],
    ) -> (Arc<Link>, Arc<Load>, Leash) {
        let Aside {
            listed,
            process,
            mut link,
            ..
        } = aside;
        id.clone_into(&mut link.worker);
        let load = listed.edit(|slot| {
            slot.state = WorkerState::Ready;
            Arc::clone(&slot.load)
        });
        let link = Arc::new(link);
        let end = CancellationToken::new();
        let watched = Watched {
            link: Arc::clone(&link),
            process,
            end: end.clone(),
            is_background: false,
            _listed: listed,
            _permits: permits,
        };
        self.keepers.spawn(watch(Arc::clone(self), watched));
        let leash = Leash {
            _end: end.drop_guard(),
        };
        (link, load, leash)
    }

    /// Waits for one of the few places that there are for throw-away workers.
    async fn solo_permit(
        &self,
        places: &Arc<Semaphore>,
        suspected: impl Fn() -> bool,
    ) -> Result<OwnedSemaphorePermit, NoSolo> {
        let mut changed = self.changes();
        let until = tokio::time::Instant::now() + self.timeouts.queue;
        let mut place = std::pin::pin!(Arc::clone(places).acquire_owned());
        loop {
            changed.see();
            if !suspected() {
                return Err(NoSolo::Cleared);
            }
            let next = async {
                tokio::select! {
                    biased;
                    permit = &mut place => Some(permit),
                    () = changed.changed() => None,
                }
            };
            match timeout_at(until, next).await {
                Ok(None) => {}
                Ok(Some(Ok(permit))) => return Ok(permit),
                Ok(Some(Err(_))) | Err(_) => {
                    let why = format!(
                        "as many requests as may be run alone, because workers died under them, were for {:?}; try again later",
                        self.timeouts.queue
                    );
                    return Err(Error::new(Reason::Overloaded, why).into());
                }
            }
        }
    }

    /// The worker whose name and device a throw-away worker takes: the one that died if it may come back, else
    /// another one of the class; rather one on which the request did not lose a worker of its own yet.
    fn solo_device(
        &self,
        model: &ModelName,
        wish: Wish<'_>,
        home: &str,
        record: &Record,
    ) -> Result<(String, Device), Error> {
        let table = self.table();
        let class = |slot: &super::Slot| {
            let loaded = slot.models.get(model)?;
            loaded.numerics.as_ref().map(|n| n.id.clone())
        };
        let fits = |id: &str, slot: &super::Slot| match wish.class {
            _ if !slot.hopeful => false,
            _ if id == home => true,
            Some(wanted) => class(slot).is_some_and(|class| class == wanted),
            None => true,
        };
        let fitting = table.workers.iter().filter(|(id, slot)| fits(id, slot));
        let (home, slot) = fitting
            .min_by_key(|(id, _)| (record.was_alone_on(id), *id != home))
            .ok_or_else(|| no_class(model, home))?;
        Ok((home.clone(), slot.device.clone()))
    }

    pub(super) fn solo_files(&self, model: &ModelName) -> Result<Arc<OpenModel>, Error> {
        let table = self.table();
        table.usable(model)?;
        let files = table.models.get(model).and_then(|m| m.files.clone());
        files.ok_or_else(|| table.unknown(model))
    }

    /// Starts a process and has it load the one model.
    ///
    /// # Errors
    /// What it died of. If it refuses the model, that is inside.
    async fn begin_solo(
        &self,
        order: Order<'_>,
        model: &ModelName,
        files: &Arc<OpenModel>,
    ) -> Result<(Aside, Result<Loaded, Error>), Death> {
        let mut aside = self.begin_aside(order, SUSPECT).await?;
        let load = async {
            let patience = self.policy.start_timeout;
            match self
                .hand_over(&aside.link, model, files, false, patience, |_| {})
                .await
            {
                Ok(got) => {
                    let examined = self.examine(&aside.link, model, &got).await;
                    examined.map_err(|why| why.death())?;
                    Ok(Ok(got))
                }
                Err(LoadFailure::Refused(error)) => Ok(Err(error)),
                Err(LoadFailure::Broken(kind, why)) => {
                    Err(Death::new(kind, format!("while loading {model}: {why}")))
                }
            }
        };
        let got = while_alive(&mut aside.process, load).await?;
        if let Ok(got) = &got {
            let entry = (model.clone(), got.clone());
            aside.listed.edit(|slot| slot.models.extend([entry]));
        }
        Ok((aside, got))
    }
}

fn no_class(model: &ModelName, home: &str) -> Error {
    let why = format!(
        "no device can run a suspected request of model {model} alone as worker {home} ran it; `hotcell ps` shows why"
    );
    Error::new(Reason::NoWorker, why)
}

/// A throw-away worker at work.
pub(super) struct Watched {
    pub(super) link: Arc<Link>,
    pub(super) process: Box<dyn super::Process>,
    /// Cancelled once its request has ended.
    pub(super) end: CancellationToken,
    /// Whether it computes on the time that others leave, and may stand still while a debugger is attached.
    pub(super) is_background: bool,
    pub(super) _listed: super::aside::Listed,
    pub(super) _permits: [Option<OwnedSemaphorePermit>; 2],
}

/// Sees to a throw-away worker's end: by itself, by a sentence, or because nobody needs it any more.
pub(super) async fn watch(fleet: Arc<Fleet>, mut watched: Watched) {
    let link = Arc::clone(&watched.link);
    let process = watched.process.as_ref();
    let _watcher = match watched.is_background {
        true => fleet.watch_background(process, &link.fate),
        false => fleet.watch(process, &link.fate),
    };
    let mut condemned = link.fate.condemned.subscribe();
    let sentence = async {
        let told = condemned.wait_for(Option::is_some).await;
        let told = told.ok().and_then(|told| told.clone());
        told.map(|sentence| sentence.death())
    };
    let sentence = tokio::select! {
        biased;
        ended = watched.process.wait() => {
            let death = classify(&ended);
            let process = Some(watched.process.as_ref());
            fleet.mourn_aside(&link.worker, link.epoch, &death, &ended, process);
            link.fate.end(death);
            return;
        }
        Some(death) = sentence => Some(death),
        () = watched.end.cancelled() => None,
        () = fleet.stop.cancelled() => None,
    };
    if sentence
        .as_ref()
        .is_some_and(|death| death.kind.stands_still())
    {
        autopsy::point_out(watched.process.as_ref()).await;
    }
    watched.process.kill();
    let ended = watched.process.wait().await;
    let end = classify(&ended);
    let death = match &sentence {
        Some(sentence) => crate::death::cause(sentence, end),
        None => Death::new(DeathKind::Stopped, "its request has ended"),
    };
    match sentence {
        Some(_) => {
            let process = Some(watched.process.as_ref());
            fleet.mourn_aside(&link.worker, link.epoch, &death, &ended, process);
        }
        None => tracing::debug!(worker = link.worker, "a throw-away worker was thrown away"),
    }
    link.fate.end(death);
}

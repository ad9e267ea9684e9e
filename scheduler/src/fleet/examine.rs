//! Asking workers for known answers: before they serve, soon after where nobody could differ, and from time to time when
//! they are idle.

use std::{
    sync::{Arc, MutexGuard, PoisonError},
    time::Duration,
};

use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    limits,
    v1::{CheckResponse, Loaded},
};
use tokio::time::{Instant, sleep, timeout};

use super::{Condemnation, Fleet, Link, Slot, is_broken};
use crate::{
    death::DeathKind,
    discover::clip,
    known::{Answer, Book, Pace, Subject, Verdict, Witness},
};

/// How long the end of a process may take to show after a conversation with it broke: on a busy host a killed one is seldom
/// found dead within 200 ms, and would be said to have broken the protocol.
const POST_MORTEM: Duration = Duration::from_secs(2);
/// So many times as long as it may stand still a worker may take for its answer in all.
const LONGEST: u32 = 10;
/// How long a worker serves a model that no other one has computed before it is asked for the first answer: whoever waited for
/// the model has had the first token of a short prompt by then.
const HEAD_START: Duration = Duration::from_millis(250);
/// Between two looks whether a contested answer is decided.
const ROUND: Duration = Duration::from_millis(10);
/// Rounds of looking for a worker that is due, in one interval.
const ROUNDS: u32 = 16;

/// How much is asked for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Depth {
    /// The first step: a stream may wait for this worker. If nobody was asked before, there is nothing to hold it to, and
    /// the others follow when it is idle.
    Spawn,
    /// All steps and a part of the weights.
    Patrol,
}

/// What came of asking.
enum Said {
    Answered(Answer, CheckResponse),
    /// Not now: it is full, or does not have the model any more.
    Excused,
}

fn witness(link: &Link) -> Witness {
    Witness {
        worker: link.worker.clone(),
        epoch: link.epoch,
    }
}

/// Whether a worker that is condemned for this while it is asked may have come to that by the model, which it could not compute.
pub(super) fn ends_over_it(kind: DeathKind) -> bool {
    matches!(kind, DeathKind::Protocol | DeathKind::Deadline)
}

/// The subject of a check, if equal input has to give equal bits there.
fn subject(model: &ModelName, loaded: &Loaded) -> Option<Subject> {
    let class = loaded.numerics.as_ref().filter(|n| n.reproducible)?;
    Some(Subject {
        model: model.clone(),
        class: class.id.clone(),
    })
}

/// The sentence on a worker that differs from `record`; it was right `ago`.
fn wrong(
    model: &ModelName,
    record: &Witness,
    ago: Option<Duration>,
    weights: bool,
) -> Condemnation {
    let what = match weights {
        true => "the bytes of its weights are",
        false => "its answer to the known input is",
    };
    let since = match ago {
        Some(ago) => format!(
            "it was right {:.1} s before, and what it computed since then is in doubt",
            ago.as_secs_f64()
        ),
        None => "it never was right, and all it computed is in doubt".to_owned(),
    };
    let why = format!(
        "{what} not what {} (epoch {}) has for model {model}; {since}",
        record.worker, record.epoch
    );
    Condemnation::new(DeathKind::Corrupt, why)
}

impl Fleet {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks a worker that has just loaded a model and does not serve it yet.
    ///
    /// # Errors
    /// Why it must not serve.
    pub(super) async fn examine(
        &self,
        link: &Link,
        model: &ModelName,
        loaded: &Loaded,
    ) -> Result<(), Condemnation> {
        self.ask(link, model, loaded, Depth::Spawn).await
    }

    /// Whether there is nothing yet that the answer of a worker which has just loaded a model could be held to.
    pub(super) fn is_the_first(&self, model: &ModelName, loaded: &Loaded) -> bool {
        subject(model, loaded).is_some_and(|subject| !self.book().has(&subject))
    }

    /// Has a worker serve a model that it has not been asked about, of which nobody has an answer that would tell whether it
    /// computes rightly. It gives the first one soon after; copies of the weights and standbys wait for it.
    pub(super) fn examine_soon(
        self: &Arc<Self>,
        link: &Arc<Link>,
        model: &ModelName,
        loaded: &Loaded,
    ) {
        if let Some(slot) = self.table().workers.get_mut(&link.worker)
            && slot.is_alive(link.epoch)
        {
            slot.unexamined.insert(model.clone());
        }
        let (fleet, link) = (Arc::clone(self), Arc::clone(link));
        let (model, loaded) = (model.clone(), loaded.clone());
        self.keepers.spawn(async move {
            let by = witness(&link);
            loop {
                tokio::select! {
                    () = fleet.stop.cancelled() => return,
                    () = link.fate.gone.cancelled() => return,
                    () = sleep(HEAD_START) => {}
                }
                let still = |slot: &Slot| {
                    slot.is_alive(link.epoch) && slot.models.get(&model) == Some(&loaded)
                };
                // Another load of this name sees to itself.
                if !fleet.table().workers.get(&link.worker).is_some_and(still) {
                    return;
                }
                fleet.inquire(&link, &model, &loaded, Depth::Spawn).await;
                // One that had no room for it is asked again.
                if fleet.book().asked(&by, &model) {
                    break;
                }
            }
            if let Some(slot) = fleet.table().workers.get_mut(&link.worker)
                && slot.is_alive(link.epoch)
            {
                slot.unexamined.remove(&model);
            }
            fleet.tell();
        });
    }

    /// Whether a model is served by a worker that has yet to give the first answer for it.
    pub(super) fn is_unexamined(&self, model: &ModelName) -> bool {
        let table = self.table();
        let mut all = table.workers.values();
        all.any(|slot| slot.unexamined.contains(model))
    }

    /// Asks a worker that serves, until it has answered or is gone, and has it replaced if it is wrong.
    async fn inquire(&self, link: &Link, model: &ModelName, loaded: &Loaded, depth: Depth) {
        let asking = self.ask(link, model, loaded, depth);
        tokio::select! {
            () = self.stop.cancelled() => {}
            () = link.fate.gone.cancelled() => {}
            asked = asking => if let Err(why) = asked {
                let gone = timeout(POST_MORTEM, link.fate.gone.cancelled());
                // If the conversation broke because the process ended, its end says more.
                if why.kind != DeathKind::Protocol || gone.await.is_err() {
                    self.sentence(link, why);
                }
            }
        }
    }

    async fn ask(
        &self,
        link: &Link,
        model: &ModelName,
        loaded: &Loaded,
        depth: Depth,
    ) -> Result<(), Condemnation> {
        let asked = self.question(link, model, loaded, depth).await;
        // Its copy of the weights may be what is wrong: nobody is to follow it with that.
        if loaded.packed
            && let Err(why) = &asked
            && why.kind == DeathKind::Corrupt
        {
            self.distrust_copies(model, &why.reason);
        }
        asked
    }

    async fn question(
        &self,
        link: &Link,
        model: &ModelName,
        loaded: &Loaded,
        depth: Depth,
    ) -> Result<(), Condemnation> {
        let Some(subject) = subject(model, loaded) else {
            return Ok(());
        };
        let (steps, part) = {
            let part = || self.book().next_part(&link.worker, model);
            match depth {
                Depth::Spawn => (1, None),
                Depth::Patrol => (limits::MAX_CHECK_STEPS, Some(part())),
            }
        };
        let began = Instant::now();
        let patience = self.policy.start_timeout;
        // Large models take long steps; and one that is busy all the time must answer some time.
        let mut signs = link.signs(patience);
        let check = signs.wait(link.check(model, steps, part));
        let said = match timeout(LONGEST * patience, check).await.ok().flatten() {
            Some(Ok(said)) => match Answer::believe(&said, steps) {
                Ok(answer) => Ok(Said::Answered(answer, said)),
                Err(lie) => Err((DeathKind::Protocol, format!("it said {lie}"))),
            },
            Some(Err(status)) if is_broken(&status) => Err((
                DeathKind::Protocol,
                "its control connection broke".to_owned(),
            )),
            Some(Err(status)) => match Error::from_status(&status).reason() {
                Reason::Overloaded | Reason::ModelNotFound => Ok(Said::Excused),
                _ => Err((DeathKind::Corrupt, clip(status.message()))),
            },
            None => Err((DeathKind::Deadline, format!("nothing for {patience:?}"))),
        };
        let (answer, words) = match said {
            Ok(Said::Answered(answer, words)) => (answer, words),
            Ok(Said::Excused) => {
                // The next turn comes as if it had answered; one that was to serve at once is due right away.
                if depth == Depth::Patrol {
                    let (now, none) = (self.now(), Answer::default());
                    self.book()
                        .checked(&witness(link), model, &none, now, Duration::ZERO);
                }
                return Ok(());
            }
            Err((kind, why)) => {
                let why = format!("asked for the known answer of model {model}: {why}");
                return Err(Condemnation::new(kind, why));
            }
        };
        let (now, by) = (self.now(), witness(link));
        let took = began.elapsed();
        self.book().checked(&by, model, &answer, now, took);
        let judge = || self.book().judge(&subject, &by, &answer, now);
        let mut verdict = judge();
        if let Verdict::Contested(single) = &verdict
            && depth == Depth::Spawn
            && self.accuse(single, model, &by)
        {
            verdict = self.decided(&judge).await;
        }
        match verdict {
            Verdict::Right => Ok(()),
            Verdict::Overturned(accused) => {
                for one in accused {
                    self.accuse(&one, model, &by);
                }
                Ok(())
            }
            Verdict::Wrong { .. } | Verdict::Contested(_) if !words.changed_file.is_empty() => {
                let why = format!("{} of model {model} changed", clip(&words.changed_file));
                Err(Condemnation::new(DeathKind::ModelChanged, why))
            }
            Verdict::Contested(record) => Err(wrong(model, &record, None, false)),
            Verdict::Wrong {
                record,
                right_at,
                weights,
            } => {
                let ago = right_at.map(|at| now.saturating_sub(at));
                Err(wrong(model, &record, ago, weights))
            }
        }
    }

    /// Judges again and again until the one that was accused has a successor that decides, or none comes.
    async fn decided(&self, judge: &(impl Fn() -> Verdict + Sync)) -> Verdict {
        let until = Instant::now() + self.policy.start_timeout / 2;
        loop {
            sleep(ROUND).await;
            let verdict = judge();
            if !matches!(verdict, Verdict::Contested(_)) || Instant::now() >= until {
                return verdict;
            }
        }
    }

    /// Replaces a process whose answer others contradict; returns whether it was still there.
    fn accuse(&self, accused: &Witness, model: &ModelName, by: &Witness) -> bool {
        let link = {
            let table = self.table();
            let slot = table.workers.get(&accused.worker);
            slot.and_then(|slot| slot.link.clone())
        };
        let Some(link) = link.filter(|link| link.epoch == accused.epoch) else {
            return false;
        };
        let why = format!(
            "its answer to the known input for model {model} is contradicted, the last time by {} (epoch {}); what it computed is in doubt",
            by.worker, by.epoch
        );
        self.sentence(&link, Condemnation::new(DeathKind::Corrupt, why));
        true
    }

    /// Takes a serving worker out at once and has it replaced.
    pub(super) fn sentence(&self, link: &Link, why: Condemnation) {
        let current = |id: &str| {
            let table = self.table();
            let slot = table.workers.get(id);
            slot.is_some_and(|slot| slot.is_alive(link.epoch))
        };
        if current(&link.worker) {
            // Who answers wrongly does not die of the model.
            if !ends_over_it(why.kind)
                && let Some(slot) = self.table().workers.get_mut(&link.worker)
            {
                slot.unexamined.clear();
            }
            self.withdraw(&link.worker);
        }
        link.fate.condemn(why);
    }

    /// A process that was checked takes a worker's place: what it answered counts as that worker's.
    pub(super) fn rename_witness(&self, link: &Link, worker: &str, epoch: u64) {
        let to = Witness {
            worker: worker.to_owned(),
            epoch,
        };
        self.book().rename(&witness(link), &to, self.now());
    }

    /// Forgets what is known about a model.
    pub(super) fn forget_answers(&self, model: &ModelName) {
        self.book().forget(model);
    }

    /// Begins to check workers that are idle, each once in an interval, until the fleet stops.
    pub fn check_every(self: &Arc<Self>, pace: Pace) {
        self.keepers.spawn(Arc::clone(self).patrol(pace));
    }

    async fn patrol(self: Arc<Self>, pace: Pace) {
        loop {
            let Some((link, model, loaded)) = self.most_overdue(pace) else {
                tokio::select! {
                    () = self.stop.cancelled() => return,
                    () = sleep(pace.interval / ROUNDS) => continue,
                }
            };
            self.inquire(&link, &model, &loaded, Depth::Patrol).await;
        }
    }

    /// The worker and model whose check should have been made first, if one is due.
    fn most_overdue(&self, pace: Pace) -> Option<(Arc<Link>, ModelName, Loaded)> {
        let now = self.now();
        let table = self.table();
        let book = self.book();
        let serving = table.workers.values().filter_map(|slot| {
            let busy = slot.load.running.load(std::sync::atomic::Ordering::Relaxed) > 0;
            Some((slot, slot.link.as_ref()?, busy))
        });
        serving
            .flat_map(|(slot, link, busy)| {
                let models = slot.models.iter();
                let models = models.filter(|(model, _)| !slot.unexamined.contains(*model));
                models.map(move |m| (link, busy, m))
            })
            .filter(|(_, _, (model, loaded))| subject(model, loaded).is_some())
            .map(|(link, busy, m)| (book.due(&witness(link), m.0, busy, pace), link, m))
            .filter(|(due, ..)| *due <= now)
            .min_by_key(|(due, ..)| *due)
            .map(|(_, link, (model, loaded))| (Arc::clone(link), model.clone(), loaded.clone()))
    }
}

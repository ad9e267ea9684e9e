//! A place on a worker for a request, waited for if there is none.

use std::sync::{Arc, atomic::Ordering};

use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
};
use tokio::time::{Instant, timeout_at};

use super::{Fleet, Link, Placed, Ticket, slot::Slot, turns::Waiting};
use crate::placement::{self, Candidate, Estimate, NoPlace, Wish};

/// Why a request has no place now.
enum Wait {
    /// The model or a worker is coming up.
    Coming,
    /// A worker died and is coming back.
    Absent,
    /// All are full.
    Full,
}

/// Why nobody serves a model, and nobody will.
fn no_worker(model: &ModelName, ready: &[Candidate<'_>]) -> Error {
    let drained = ready.iter().find(|candidate| candidate.drained);
    let why = match drained.map(|candidate| candidate.worker) {
        Some(id) => format!("{id} is drained; `hotcell release {id}` gives it requests again"),
        None => "none is left that would; `hotcell ps` shows why".to_owned(),
    };
    let what = format!("no worker can serve model {model}: {why}");
    Error::new(Reason::NoWorker, what)
}

impl Fleet {
    /// How many requests wait for a place on a full worker.
    pub fn waiting(&self) -> usize {
        self.turns.waiting()
    }

    /// How many of them wait for this model.
    pub fn waiting_for(&self, model: &str) -> usize {
        self.turns.waiting_for(model)
    }

    /// Has tenants take turns by these shares, each at least 1, as they are at the time; to be told once. Without them all
    /// have the same.
    pub fn weigh_tenants(&self, weigh: impl Fn(&str) -> u64 + Send + Sync + 'static) {
        self.turns.weigh_by(Box::new(weigh));
    }

    /// A ready worker that has the model, waited for within the configured bounds. Where workers are full, tenants take
    /// turns.
    ///
    /// # Errors
    /// [`Reason::NoWorker`], [`Reason::Overloaded`], or why the model cannot be used.
    pub async fn acquire(
        self: &Arc<Self>,
        model: &ModelName,
        wish: Wish<'_>,
        cost: impl Fn() -> Estimate,
    ) -> Result<Placed, Error> {
        self.acquire_after(None, model, wish, cost).await
    }

    /// As [`Self::acquire`], for a request that has a place already, for another part of its work: it has had its turn, and
    /// keeps that place if there is no better one.
    ///
    /// # Errors
    /// As [`Self::acquire`].
    pub async fn acquire_after(
        self: &Arc<Self>,
        mut had: Option<Placed>,
        model: &ModelName,
        wish: Wish<'_>,
        cost: impl Fn() -> Estimate,
    ) -> Result<Placed, Error> {
        let began = Instant::now();
        let mut changed = self.changes();
        // What goes on elsewhere has had its turn.
        let new = !wish.goes_on() && had.is_none();
        let in_turn = wish.tenant.filter(|_| new);
        let mut waiting = None;
        self.wake(model, true);
        loop {
            changed.see();
            // It may have gone to sleep since.
            self.wake(model, false);
            let turn = in_turn.map(|_| waiting.as_ref());
            let why = match self.try_place(model, wish, cost(), turn, &mut had)? {
                Ok(placed) => return Ok(placed),
                Err(why) => why,
            };
            // The worker where it was is gone.
            had = None;
            if let (Wait::Full, None, Some(tenant)) = (&why, &waiting, in_turn) {
                waiting = Some(self.turns.wait(tenant, model, &self.changed));
                continue;
            }
            let (until, error) = match why {
                // Bounded by the start's own patience and the restart budget.
                Wait::Coming => {
                    changed.changed().await;
                    continue;
                }
                Wait::Absent => (
                    began + self.timeouts.resume,
                    Error::new(
                        Reason::NoWorker,
                        format!(
                            "no worker that can serve model {model} came up within {:?}; `hotcell ps` shows why",
                            self.timeouts.resume
                        ),
                    ),
                ),
                Wait::Full => (
                    began + self.timeouts.queue,
                    Error::new(
                        Reason::Overloaded,
                        format!(
                            "there was no place for another request for {:?}; try again later",
                            self.timeouts.queue
                        ),
                    ),
                ),
            };
            let told = async {
                match &waiting {
                    // Those before it come first, whatever changes.
                    Some(waiting) if !waiting.is_first() => waiting.told().await,
                    _ => changed.changed().await,
                }
            };
            if timeout_at(until, told).await.is_err() {
                return Err(error.with("model", model));
            }
        }
    }

    fn try_place(
        &self,
        model: &ModelName,
        wish: Wish<'_>,
        cost: Estimate,
        turn: Option<Option<&Waiting>>,
        had: &mut Option<Placed>,
    ) -> Result<Result<Placed, Wait>, Error> {
        let table = self.table();
        let loading = table.usable(model)?;
        let open = |model: &ModelName| {
            !table.is_at_limit(model) && table.workers.values().any(|slot| slot.has_place(model))
        };
        // What goes on elsewhere has been let in.
        if turn.is_some() && table.is_at_limit(model) {
            return Ok(Err(Wait::Full));
        }
        if let Some(waiting) = turn
            && open(model)
            && !self.turns.comes_first(waiting, open)
        {
            return Ok(Err(Wait::Full));
        }
        let has_here = |slot: &Slot| {
            let had = had.as_ref();
            had.is_some_and(|had| Arc::ptr_eq(&had.ticket.load, &slot.load))
        };
        let ready: Vec<(Candidate<'_>, &Slot, &Arc<Link>)> = table
            .workers
            .iter()
            .filter_map(|(id, slot)| {
                let (link, loaded) = (slot.serving()?, slot.models.get(model)?);
                let candidate = Candidate {
                    worker: id,
                    class: loaded.numerics.as_ref().map_or("", |n| n.id.as_str()),
                    outstanding: slot.outstanding(),
                    running: (slot.load.running.load(Ordering::Relaxed))
                        .saturating_sub(has_here(slot).into()),
                    known: wish
                        .prints
                        .map_or(0, |p| self.prefixes().known(p, id, link.epoch)),
                    stalled: link.fate.is_stalled(),
                    drained: slot.is_drained(),
                };
                Some((candidate, slot, link))
            })
            .collect();
        let candidates: Vec<_> = ready.iter().map(|(c, ..)| c.clone()).collect();
        let chosen = match placement::choose(&candidates, wish) {
            Ok(chosen) => chosen,
            Err(NoPlace::AllFull) => return Ok(Err(Wait::Full)),
            Err(NoPlace::NoneReady) => {
                let coming = |s: &Slot| table.may_get(s, model);
                let any = table.workers.values().any(coming);
                // One that stops giving signs of life is killed, and is absent then.
                let near = |s: &Slot| table.may_get(s, model) && s.progresses;
                return match (loading || table.workers.values().any(near), any) {
                    (true, _) if table.workers.values().any(|s| s.hopeful) => Ok(Err(Wait::Coming)),
                    (false, true) => Ok(Err(Wait::Absent)),
                    _ => Err(no_worker(model, &candidates).with("model", model)),
                };
            }
        };
        let found = ready.iter().find(|(c, ..)| c.worker == chosen.worker);
        let Some((_, slot, link)) = found else {
            return Ok(Err(Wait::Absent));
        };
        if let Some(prints) = wish.prints {
            self.prefixes().note(prints, chosen.worker, link.epoch);
        }
        let loaded = slot.models.get(model);
        let uses = table.models.get(model).map(|m| Arc::clone(&m.uses));
        let stays = has_here(slot);
        let ticket = match had.take() {
            // One place is never counted twice.
            Some(had) if stays => had.ticket.for_more(cost),
            _ => Ticket::new(
                &slot.load,
                &self.changed,
                cost,
                &uses.unwrap_or_default(),
                wish.tenant.map(|tenant| self.turns.hold(tenant)),
            ),
        };
        Ok(Ok(Placed {
            link: Arc::clone(link),
            class: loaded.and_then(|l| l.numerics.clone()).unwrap_or_default(),
            home: link.worker.clone(),
            ticket,
            leash: None,
        }))
    }
}

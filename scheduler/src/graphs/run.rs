//! Where saved graphs run: which worker has which of them planned, and calls that are made again when one dies.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::Duration,
};

use hotcell_proto::{
    error::{Error, Reason},
    limits,
};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout_at},
};

use super::{Call, Done, Graphs, Inner, Made, Place, Saved, plan::Plan};
use crate::{access::Want, admission::draining, fleet::Link, service::Shared};

/// How long a call without a deadline waits for a worker.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);
/// Workers that may die under one call; as many as under a tensor session's call.
const MAX_DEATHS: u32 = limits::TENSOR_RECOVERIES;
/// How long a worker keeps a graph that nobody asks for.
const IDLE: Duration = Duration::from_secs(60);
/// Graphs that one worker has planned at once: its other sessions are its clients'.
const MAX_PLANS: usize = limits::MAX_SESSIONS / 4;
impl Graphs {
    pub(super) fn drop_plans(&self, id: u64) {
        self.plans().retain(|(of, ..), _| *of != id);
    }

    /// A worker that serves, the one with the least to do.
    pub(super) async fn worker(&self, shared: &Shared, until: Instant) -> Result<Arc<Link>, Error> {
        let mut changes = shared.fleet.changes();
        loop {
            if shared.admission.is_closed() {
                return Err(draining());
            }
            changes.see();
            let busy = |link: &Link| self.running(&link.worker, link.epoch);
            let error = match shared.fleet.for_graphs(busy) {
                Ok(link) => return Ok(link),
                Err(error) => error,
            };
            tokio::select! {
                () = shared.abort.cancelled() => return Err(draining()),
                waited = timeout_at(until, changes.changed()) => if waited.is_err() {
                    return Err(error);
                },
            }
        }
    }

    /// Calls of saved graphs that this worker computes.
    fn running(&self, worker: &str, epoch: u64) -> u64 {
        let plans = self.plans();
        let here = plans
            .iter()
            .filter(|((_, w, e), _)| w == worker && *e == epoch);
        here.filter_map(|(_, made)| Some(made.borrow().as_ref()?.as_ref().ok()?.running()))
            .sum()
    }

    /// The graph on this worker, planned now if it is not yet. That goes on if who asked for it first leaves.
    async fn plan(
        &self,
        shared: &Shared,
        saved: &Arc<Saved>,
        link: &Arc<Link>,
    ) -> Result<Arc<Plan>, Error> {
        let place = (saved.id, link.worker.clone(), link.epoch);
        let mut made = {
            let mut plans = self.plans();
            match plans.get(&place) {
                Some(made) => made.clone(),
                None => {
                    make_room(&mut plans, &place)?;
                    let (to, made) = watch::channel(None);
                    plans.insert(place.clone(), made.clone());
                    let making = Making {
                        graphs: self.clone(),
                        shared: shared.clone(),
                        saved: Arc::clone(saved),
                        link: Arc::clone(link),
                        place,
                    };
                    tokio::spawn(making.run(to));
                    made
                }
            }
        };
        let made = made.wait_for(Option::is_some).await;
        let lost = |_| Error::new(Reason::Internal, "a plan was not made");
        made.map_err(lost)?
            .clone()
            .unwrap_or_else(|| Err(Error::new(Reason::Internal, "a plan is none")))
    }

    /// Forgets the plan, unless another one took its place.
    fn forget_plan(&self, place: &Place, plan: &Arc<Plan>) {
        let mut plans = self.plans();
        let same =
            |made: &Made| matches!(&*made.borrow(), Some(Ok(known)) if Arc::ptr_eq(known, plan));
        if plans.get(place).is_some_and(same) {
            plans.remove(place);
        }
    }

    async fn try_once(
        &self,
        shared: &Shared,
        saved: &Arc<Saved>,
        link: &Arc<Link>,
        call: &Call,
    ) -> Result<Done, Error> {
        let plan = self.plan(shared, saved, link).await?;
        let done = plan.run(call).await;
        if done.as_ref().is_err_and(is_over) {
            let place = (saved.id, link.worker.clone(), link.epoch);
            self.forget_plan(&place, &plan);
        }
        done
    }

    /// Computes a graph.
    ///
    /// # Errors
    /// What the worker says, [`Reason::DeadlineExceeded`], [`Reason::NoWorker`], [`Reason::Draining`],
    /// [`Reason::QuotaExceeded`]; [`Reason::RequestPoisoned`] if workers die of it.
    pub async fn run(
        &self,
        shared: &Shared,
        saved: &Arc<Saved>,
        call: &Call,
    ) -> Result<Done, Error> {
        if shared.admission.is_closed() {
            return Err(draining());
        }
        // A drain waits for it.
        let _call = shared.tensors.enter();
        let limits = shared.access.limits(&call.tenant);
        let want = Want {
            requests: 1,
            ..Want::default()
        };
        let _held = shared.access.tenants.take(&call.tenant, &limits, want)?;
        let late = || {
            let what = format!("graph {} took longer than its client waits", saved.name);
            Error::new(Reason::DeadlineExceeded, what)
        };
        let attempts = async {
            let mut deaths = Deaths::default();
            loop {
                let until = call.deadline.unwrap_or_else(|| Instant::now() + PATIENCE);
                let link = self.worker(shared, until).await?;
                match self.try_once(shared, saved, &link, call).await {
                    Ok(done) => return Ok(done),
                    Err(error) => deaths.count(&link, error).await?,
                }
            }
        };
        let all = async {
            tokio::select! {
                () = shared.abort.cancelled() => Err(draining()),
                done = attempts => done,
            }
        };
        match call.deadline {
            None => all.await,
            Some(deadline) => timeout_at(deadline, all)
                .await
                .unwrap_or_else(|_| Err(late())),
        }
    }
}

/// Room for one more plan on a worker, perhaps that of the one which nobody asked for for longest.
fn make_room(plans: &mut HashMap<Place, Made>, place: &Place) -> Result<(), Error> {
    let (_, worker, epoch) = place;
    let here = plans
        .iter()
        .filter(|((_, w, e), _)| (w, e) == (worker, epoch));
    if here.clone().count() < MAX_PLANS {
        return Ok(());
    }
    let idle = here.filter_map(|(place, made)| {
        let made = made.borrow();
        let plan = made
            .as_ref()?
            .as_ref()
            .ok()
            .filter(|plan| plan.running() == 0)?;
        Some((plan.idle_at(Duration::ZERO), place.clone()))
    });
    let oldest = idle.min_by_key(|(since, _)| *since);
    let (_, oldest) = oldest.ok_or_else(|| {
        let what =
            format!("worker {worker} computes {MAX_PLANS} saved graphs already; try again later");
        Error::new(Reason::Overloaded, what)
    })?;
    plans.remove(&oldest);
    Ok(())
}

/// Makes a plan, whoever waits for it.
struct Making {
    graphs: Graphs,
    shared: Shared,
    saved: Arc<Saved>,
    link: Arc<Link>,
    place: Place,
}

impl Making {
    async fn run(self, to: watch::Sender<Option<Result<Arc<Plan>, Error>>>) {
        let made = tokio::select! {
            () = self.shared.abort.cancelled() => Err(draining()),
            made = Plan::make(&self.shared, &self.saved, self.link) => made.map(Arc::new),
        };
        match &made {
            Ok(plan) => {
                let inner = Arc::downgrade(&self.graphs.0);
                tokio::spawn(keep(inner, self.place, Arc::downgrade(plan)));
            }
            Err(_) => {
                let mut plans = self.graphs.plans();
                let same = |made: &Made| made.same_channel(&to.subscribe());
                if plans.get(&self.place).is_some_and(same) {
                    plans.remove(&self.place);
                }
            }
        }
        to.send_replace(Some(made));
    }
}

/// Whether an error tells that a worker, or the session on it, is there no more.
fn is_over(error: &Error) -> bool {
    matches!(
        error.reason(),
        Reason::WorkerLost | Reason::SessionNotFound | Reason::HandleStale
    )
}

/// What was lost under one call.
#[derive(Default)]
pub(super) struct Deaths {
    workers: u32,
    /// Sessions whose workers live.
    sessions: u32,
}

impl Deaths {
    /// Counts what was lost, so that the call is made again.
    ///
    /// # Errors
    /// The error if nothing was; [`Reason::RequestPoisoned`] after too many deaths.
    pub(super) async fn count(&mut self, link: &Link, error: Error) -> Result<(), Error> {
        if !is_over(&error) {
            return Err(error);
        }
        if !link.is_lost().await {
            self.sessions += 1;
            return match self.sessions {
                1 => Ok(()),
                _ => Err(error),
            };
        }
        self.workers += 1;
        if self.workers > MAX_DEATHS {
            let what = format!(
                "{} workers died under this call; it is not made again",
                self.workers
            );
            return Err(Error::new(Reason::RequestPoisoned, what));
        }
        Ok(())
    }
}

/// Forgets a plan once nobody asked for it for a while.
async fn keep(inner: Weak<Inner>, place: Place, plan: Weak<Plan>) {
    loop {
        let at = match plan.upgrade() {
            Some(plan) => plan.idle_at(IDLE),
            None => return,
        };
        if at > Instant::now() {
            sleep_until(at).await;
            continue;
        }
        if let (Some(inner), Some(plan)) = (inner.upgrade(), plan.upgrade()) {
            Graphs(inner).forget_plan(&place, &plan);
        }
        return;
    }
}

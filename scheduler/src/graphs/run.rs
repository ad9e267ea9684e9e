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
    time::{Instant, sleep_until, timeout, timeout_at},
};

use super::{Call, Done, Graphs, Inner, Made, Place, Saved, plan::Plan};
use crate::{
    access::Want,
    admission::draining,
    death::DeathKind,
    fleet::{Alone, Link, Lost},
    service::Shared,
};

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

    /// Where the next try of a call runs.
    async fn place(
        &self,
        shared: &Shared,
        saved: &Saved,
        deaths: &Deaths,
        until: Instant,
    ) -> Result<At, Error> {
        let alone = || {
            saved
                .suspect
                .is_alone(|record| shared.fleet.suspects(record))
        };
        // Whoever lost so many workers is not let among others again because another call went well.
        let own = || deaths.workers >= shared.fleet.suspect_after();
        if !alone() && !own() {
            return self.worker(shared, until).await.map(At::Among);
        }
        let suspected = || own() || alone();
        let found = shared.fleet.alone_for_graph(&deaths.home, suspected);
        match found.await? {
            Some(alone) => {
                // Others may have lost theirs while this one waited.
                saved.suspect.admit(&saved.name)?;
                Ok(At::Alone(Arc::new(alone)))
            }
            None => self.worker(shared, until).await.map(At::Among),
        }
    }

    async fn try_at(
        &self,
        shared: &Shared,
        saved: &Arc<Saved>,
        at: &At,
        call: &Call,
    ) -> Result<Done, Error> {
        let link = match at {
            At::Among(link) => link,
            At::Alone(alone) => {
                let mut left = LeftAlone {
                    shared,
                    saved,
                    alone: Some(alone),
                };
                let plan = Plan::make(shared, saved, Arc::clone(&alone.link)).await;
                let done = match plan {
                    // Under which workers die gets nobody else's memory.
                    Ok(plan) => plan.run_copied(call).await,
                    Err(error) => Err(error),
                };
                left.alone = None;
                let done = done?;
                saved.suspect.served_alone();
                shared.fleet.served(&alone.home, saved.name.as_str());
                return Ok(done);
            }
        };
        let plan = self.plan(shared, saved, link).await?;
        let mut left = Left {
            shared,
            plan: Some(&plan),
        };
        let done = plan.run(call).await;
        left.plan = None;
        if done.is_ok() {
            shared.fleet.served(&link.worker, saved.name.as_str());
        }
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
    /// [`Reason::QuotaExceeded`]; [`Reason::RequestPoisoned`] if workers die of it, [`Reason::GraphPoisoned`] once it is
    /// known that they die of the graph.
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
                saved.suspect.admit(&saved.name)?;
                let until = call.deadline.unwrap_or_else(|| Instant::now() + PATIENCE);
                let at = self.place(shared, saved, &deaths, until).await?;
                let error = match self.try_at(shared, saved, &at, call).await {
                    Ok(done) => return Ok(done),
                    Err(error) => error,
                };
                let died = deaths.count(at.link(), error).await?;
                if died {
                    at.home().clone_into(&mut deaths.home);
                    blame(shared, saved, &at);
                }
                // What is known of the graph says more than that this call is given up.
                saved.suspect.admit(&saved.name)?;
                deaths.bear()?;
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

/// Where one try of a call runs.
enum At {
    /// Among others.
    Among(Arc<Link>),
    /// On a throw-away worker.
    Alone(Arc<Alone>),
}

impl At {
    fn link(&self) -> &Arc<Link> {
        match self {
            Self::Among(link) => link,
            Self::Alone(alone) => &alone.link,
        }
    }

    /// The worker on whose device that is.
    fn home(&self) -> &str {
        match self {
            Self::Among(link) => &link.worker,
            Self::Alone(alone) => &alone.home,
        }
    }
}

/// Holds the death of a worker under a call against the graph.
fn blame(shared: &Shared, saved: &Saved, at: &At) {
    let alone = matches!(at, At::Alone(_));
    let lost = Lost {
        request: saved.name.as_str(),
        link: at.link(),
        home: at.home(),
        alone,
        // Among others, a broken connection is found out by whoever uses it next.
        accepted: alone,
    };
    let before = saved.suspect.is_refused();
    saved
        .suspect
        .witness(|record| shared.fleet.witness(record, &lost));
    if saved.suspect.is_refused() && !before {
        let (graph, deaths) = (&saved.name, saved.suspect.deaths());
        tracing::error!(%graph, deaths, "a saved graph is refused from now on: workers died of it");
    }
}

/// A call that its client may leave: if the worker is found to hang after that, the call was there.
struct Left<'a> {
    shared: &'a Shared,
    /// None once it has its answer.
    plan: Option<&'a Arc<Plan>>,
}

impl Drop for Left<'_> {
    fn drop(&mut self) {
        let Some(plan) = self.plan.filter(|plan| plan.is_left()) else {
            return;
        };
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        let (plan, shared) = (Arc::clone(plan), self.shared.clone());
        runtime.spawn(async move {
            let (link, saved) = plan.of();
            let (link, saved) = (Arc::clone(link), Arc::clone(saved));
            let gone = timeout(shared.fleet.silence_patience(), link.fate.gone.cancelled()).await;
            if gone.is_ok() && link.fate.kind() == Some(DeathKind::Wedged) {
                blame(&shared, &saved, &At::Among(link));
            }
            plan.note_left();
        });
    }
}

/// The same of a call on a throw-away worker, which is kept until it is known whether it hangs.
struct LeftAlone<'a> {
    shared: &'a Shared,
    saved: &'a Arc<Saved>,
    /// None once the call has its answer.
    alone: Option<&'a Arc<Alone>>,
}

impl Drop for LeftAlone<'_> {
    fn drop(&mut self) {
        let (Some(alone), Ok(runtime)) = (self.alone, tokio::runtime::Handle::try_current()) else {
            return;
        };
        let (shared, saved) = (self.shared.clone(), Arc::clone(self.saved));
        let alone = Arc::clone(alone);
        runtime.spawn(async move {
            let gone = alone.link.fate.gone.cancelled();
            let gone = timeout(shared.fleet.silence_patience(), gone).await;
            if gone.is_ok() && alone.link.fate.kind() == Some(DeathKind::Wedged) {
                blame(&shared, &saved, &At::Alone(alone));
            }
        });
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
    /// On whose device the last worker was.
    home: String,
}

impl Deaths {
    /// Counts what was lost, so that the call is made again. Whether that was a worker.
    ///
    /// # Errors
    /// The error if nothing was.
    pub(super) async fn count(&mut self, link: &Link, error: Error) -> Result<bool, Error> {
        if !is_over(&error) {
            return Err(error);
        }
        if !link.is_lost().await {
            self.sessions += 1;
            return match self.sessions {
                1 => Ok(false),
                _ => Err(error),
            };
        }
        self.workers += 1;
        Ok(true)
    }

    /// Whether the call may be made again.
    ///
    /// # Errors
    /// [`Reason::RequestPoisoned`] after too many deaths.
    pub(super) fn bear(&self) -> Result<(), Error> {
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

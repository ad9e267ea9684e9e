//! The task that keeps one worker alive: performs what the supervisor decides.

use std::{future::pending, sync::Arc, time::Duration};

use hotcell_proto::v1::{Device, EventKind};
use tokio::{
    sync::watch,
    time::{sleep_until, timeout},
};
use tokio_util::task::AbortOnDropHandle;

use super::{
    Allowance, Asked, Condemnation, Fate, Fleet, Link, LoadFailure, Offer, Order, Process, Role,
    adopt::Adopted, autopsy, examine::ends_over_it, standby::Standby,
};
use crate::{
    death::{Death, DeathKind, classify},
    events::About,
    supervisor::{Action, Event, Past, Phase, State, step},
};

/// How long the end of a process may take to show after its start failed, before it is killed.
const POST_MORTEM: Duration = Duration::from_millis(200);

/// How long a worker that was taken over may take to answer; it has nothing to load.
const ADOPTION: Duration = Duration::from_secs(5);

/// A process and the task that gets it ready.
struct Running {
    process: Box<dyn Process>,
    _watcher: Option<AbortOnDropHandle<()>>,
    fate: Fate,
    condemned: watch::Receiver<Option<Condemnation>>,
    progress: watch::Receiver<()>,
    starter: Option<AbortOnDropHandle<()>>,
}

/// Runs a worker's whole life, through all its processes, until the fleet stops. `heir` is what another program knew
/// about it, and its process.
pub(super) async fn keep(
    fleet: Arc<Fleet>,
    id: String,
    device: Device,
    heir: Option<(Past, Option<Adopted>)>,
) {
    let (mut state, mut running) = match heir {
        Some((past, adopted)) => adopt(&fleet, &id, past, adopted),
        None => (State::default(), None),
    };
    let mut event = Event::Begin;
    loop {
        let (next, actions) = step(&fleet.policy, state, event, fleet.now());
        state = next;
        let mut stillborn = None;
        for action in actions {
            if let Err(death) = perform(&fleet, &id, &device, &state, &mut running, action).await {
                stillborn = Some(death);
            }
        }
        fleet.publish(&id, &state);
        if state.is_over() {
            fleet.withdraw(&id);
            return;
        }
        event = match stillborn {
            Some(death) => Event::Exited {
                death,
                jitter: fleet.launcher.jitter(),
            },
            None => next_event(&fleet, &id, &state, &mut running).await,
        };
    }
}

/// Performs one action.
///
/// # Errors
/// Why a process could not be made.
async fn perform(
    fleet: &Arc<Fleet>,
    id: &str,
    device: &Device,
    state: &State,
    running: &mut Option<Running>,
    action: Action,
) -> Result<(), Death> {
    let about = About {
        worker: id,
        epoch: state.epoch,
        ..About::default()
    };
    match action {
        Action::Spawn { epoch } => {
            let order = Order {
                worker: id,
                epoch,
                device,
                allowance: fleet.allowance(id),
                role: Role::Serves,
            };
            if let Some(standby) = fleet.take_standby(id).await {
                fleet.launched(id, standby.process.as_ref(), epoch);
                *running = Some(promote(fleet, id, epoch, standby));
                return Ok(());
            }
            let launched = fleet.launcher.launch(order).await.map_err(|e| {
                let death = Death::new(DeathKind::CannotStart, e.to_string());
                fleet.buried(id, &death);
                death
            })?;
            let (process, sockets) = launched.split();
            fleet.launched(id, process.as_ref(), epoch);
            *running = Some(begin(fleet, id, epoch, Adopted::fresh(process, sockets)));
        }
        Action::Terminate => {
            fleet.withdraw(id);
            if let Some(running) = running {
                running.starter = None;
                running.process.terminate();
            }
        }
        Action::Kill => {
            fleet.withdraw(id);
            if let Some(running) = running {
                if state
                    .sentence()
                    .is_some_and(|death| death.kind.stands_still())
                {
                    autopsy::point_out(running.process.as_ref()).await;
                }
                running.process.kill();
            }
        }
        Action::ReportDeath { death, pause } => {
            // The reaped process's epoch: a spawn at once has raised it already.
            let spawned = matches!(pause, Some(p) if p.is_zero());
            let epoch = state.epoch - u64::from(spawned && state.epoch > 0);
            tracing::warn!(worker = id, epoch, %death, ?pause, "worker died");
            fleet.note_exit(id, &death);
            fleet.audit_death(id, epoch, &death);
            fleet.distrust_device(id, &death);
            fleet.events.tell_death(About { epoch, ..about }, &death);
        }
        Action::ReportQuarantine { reason } => {
            tracing::error!(
                worker = id,
                device = device.id,
                reason,
                "device quarantined"
            );
            fleet
                .events
                .tell(EventKind::WorkerQuarantined, about, reason);
        }
    }
    Ok(())
}

/// Goes on with a worker that another program kept.
fn adopt(
    fleet: &Arc<Fleet>,
    id: &str,
    past: Past,
    adopted: Option<Adopted>,
) -> (State, Option<Running>) {
    let (now, policy) = (fleet.now(), &fleet.policy);
    let until = now + ADOPTION.min(policy.start_timeout);
    let state = State::inherit(past, policy, now, adopted.is_some().then_some(until));
    let epoch = state.epoch;
    let running = adopted.map(|adopted| {
        fleet.launched(id, adopted.process.as_ref(), epoch);
        fleet.note_uptime(id, adopted.uptime);
        tracing::info!(
            worker = id,
            epoch,
            pid = adopted.process.pid(),
            "a worker is taken over"
        );
        begin(fleet, id, epoch, adopted)
    });
    (state, running)
}

fn begin(fleet: &Arc<Fleet>, id: &str, epoch: u64, adopted: Adopted) -> Running {
    let Adopted {
        process,
        sockets,
        loaded,
        next_tag,
        ..
    } = adopted;
    let fate = Fate::new();
    let (told, progress) = watch::channel(());
    let started = {
        let (fleet, id, fate) = (Arc::clone(fleet), id.to_owned(), fate.clone());
        async move {
            let link = Link::connect(&id, epoch, fate, sockets).await?;
            link.tags_from(next_tag);
            greet_and_serve(&fleet, link, loaded, &told).await
        }
    };
    Running {
        _watcher: fleet.watch(process.as_ref(), &fate),
        process,
        condemned: fate.condemned.subscribe(),
        starter: Some(starter(started, fate.clone())),
        fate,
        progress,
    }
}

/// Has a standby take the worker's place.
fn promote(fleet: &Arc<Fleet>, id: &str, epoch: u64, standby: Standby) -> Running {
    let Standby {
        mut process,
        mut link,
        loaded,
    } = standby;
    let fate = link.fate.clone();
    let (told, progress) = watch::channel(());
    tracing::info!(
        worker = id,
        epoch,
        standby = link.worker,
        "a standby takes the place"
    );
    process.rename(id, epoch);
    let started = {
        let fleet = Arc::clone(fleet);
        fleet.rename_witness(&link, id, epoch);
        link.worker = id.to_owned();
        link.epoch = epoch;
        // Greeted once more, so that it goes by its new name.
        async move { greet_and_serve(&fleet, link, loaded, &told).await }
    };
    Running {
        _watcher: fleet.watch(process.as_ref(), &fate),
        process,
        condemned: fate.condemned.subscribe(),
        starter: Some(starter(started, fate.clone())),
        fate,
        progress,
    }
}

/// Runs a start, and condemns the process if it fails.
fn starter(
    start: impl Future<Output = Result<(), Condemnation>> + Send + 'static,
    fate: Fate,
) -> AbortOnDropHandle<()> {
    AbortOnDropHandle::new(tokio::spawn(async move {
        if let Err(why) = start.await {
            // If the conversation broke because the process ended, its end says more.
            let _ = timeout(POST_MORTEM, fate.gone.cancelled()).await;
            fate.condemn(why);
        }
    }))
}

/// Gets a process ready: greets it, and has it load every model until none is missing.
async fn greet_and_serve(
    fleet: &Fleet,
    link: Link,
    mut loaded: Asked,
    progress: &watch::Sender<()>,
) -> Result<(), Condemnation> {
    let link = Arc::new(link);
    let (id, epoch) = (link.worker.as_str(), link.epoch);
    let hello = link.handshake().await?;
    let _ = progress.send(());
    fleet.note_progress(id, epoch);
    tracing::debug!(
        worker = id,
        epoch,
        confinement = hello.confinement,
        "handshake"
    );
    loop {
        let (missing, unwanted) = match fleet.offer(&link, &hello, &loaded) {
            Offer::Accepted => return Ok(()),
            Offer::TooLate => {
                return Err(Condemnation::new(DeathKind::Stopped, "before it was ready"));
            }
            Offer::Change { missing, unwanted } => (missing, unwanted),
        };
        for name in unwanted {
            let has_it = loaded.get(&name).is_some_and(|(_, got)| got.is_some());
            if has_it && let Err(error) = link.unload(&name, fleet.policy.start_timeout).await {
                let why = format!("cannot unload {name}: {error}");
                return Err(Condemnation::new(DeathKind::Protocol, why));
            }
            if let Some((files, _)) = loaded.remove(&name) {
                fleet.release_unwanted(&name, &files).await;
            }
        }
        for (name, files) in missing {
            fleet.note_loading(id, Some(&name));
            let patience = fleet.policy.start_timeout;
            let sign = |_: &_| {
                let _ = progress.send(());
            };
            let load = fleet.hand_over(&link, &name, &files, true, patience, sign);
            let got = match fleet.allowance(id) {
                Some(Allowance { load_time, .. }) => {
                    let late = || format!("it was not loaded after {load_time:?}");
                    let loaded = timeout(load_time, load).await;
                    loaded.unwrap_or_else(|_| Err(LoadFailure::Broken(DeathKind::Deadline, late())))
                }
                None => load.await,
            };
            let _ = progress.send(());
            match got {
                Ok(got) => {
                    if let Err(why) = fleet.examine(&link, &name, &got).await {
                        if !ends_over_it(why.kind) {
                            fleet.note_loading(id, None);
                        }
                        return Err(why);
                    }
                    fleet.note_loading(id, None);
                    fleet.note_loaded(id, epoch, &name, &files, &got);
                    loaded.insert(name, (files, Some(got)));
                }
                Err(LoadFailure::Refused(error)) => {
                    fleet.note_refused(id, &name, &error);
                    loaded.insert(name, (files, None));
                }
                // Its model stays noted as loading, so that the death counts against it.
                Err(LoadFailure::Broken(kind, why)) => {
                    return Err(Condemnation::new(
                        kind,
                        format!("while loading {name}: {why}"),
                    ));
                }
            }
        }
    }
}

/// Waits for what happens next to a worker.
async fn next_event(
    fleet: &Arc<Fleet>,
    id: &str,
    state: &State,
    running: &mut Option<Running>,
) -> Event {
    let due = async {
        match state.wake_at() {
            Some(at) => sleep_until(fleet.began + at).await,
            None => pending().await,
        }
    };
    let stopping = matches!(state.phase, crate::supervisor::Phase::Draining { .. });
    let stop = async {
        if stopping {
            pending::<()>().await;
        }
        tokio::select! {
            () = fleet.stop.cancelled() => {}
            () = fleet.unwanted(id) => {}
        }
    };
    let Some(held) = running else {
        let released = async {
            match state.phase {
                Phase::Quarantined { .. } => fleet.released(id).await,
                _ => pending().await,
            }
        };
        return tokio::select! {
            biased;
            () = stop => Event::Stop,
            () = released => Event::Release,
            () = due => Event::Tick,
        };
    };
    let restart = async {
        match state.phase {
            Phase::Ready => fleet.restarted(id).await,
            _ => pending().await,
        }
    };
    let Running {
        process,
        condemned,
        progress,
        starter,
        ..
    } = held;
    let started = async {
        match starter {
            Some(task) => {
                let _ = task.await;
            }
            None => pending().await,
        }
    };
    let sentence = async {
        let told = condemned.wait_for(Option::is_some).await;
        told.ok().and_then(|told| told.clone())
    };
    tokio::select! {
        biased;
        ended = process.wait() => {
            let death = state.cause(classify(&ended));
            if !matches!(state.phase, Phase::Draining { .. } | Phase::Restarting { .. }) {
                fleet.autopsy(id, &death, &ended, held.process.as_ref());
            }
            // The table first: who hears that it is gone looks there for another.
            fleet.buried(id, &death);
            held.fate.end(death.clone());
            *running = None;
            Event::Exited { death, jitter: fleet.launcher.jitter() }
        }
        Some(sentence) = sentence, if !is_doomed(state) => {
            Event::Condemned { death: sentence.death(), hopeless: sentence.hopeless }
        }
        () = started => {
            held.starter = None;
            if held.fate.condemned.borrow().is_some() {
                return Event::Progress;
            }
            tracing::info!(worker = id, epoch = state.epoch, "worker ready");
            let about = About { worker: id, epoch: state.epoch, ..About::default() };
            fleet.events.tell(EventKind::WorkerReady, about, "");
            Event::Ready
        }
        Ok(()) = progress.changed() => Event::Progress,
        () = stop => Event::Stop,
        () = restart => Event::Restart,
        () = due => Event::Tick,
    }
}

fn is_doomed(state: &State) -> bool {
    let ends = matches!(
        state.phase,
        Phase::Draining { .. } | Phase::Restarting { .. } | Phase::Stopped
    );
    state.sentence().is_some() || ends
}

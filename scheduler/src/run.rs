//! A scheduler's whole life: open the doors, find devices, start workers, serve, drain.

use std::{path::Path, sync::Arc, time::Duration};

use hotcell_ipc::{group::Groups, spawn::Spawner};
use hotcell_proto::v1::{Device, EventKind};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    time::{Instant, timeout, timeout_at},
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tonic_health::server::HealthReporter;

use crate::{
    access::Access,
    audit::Audit,
    config::{Config, ConfiguredModel},
    crash::Crashes,
    discover::{self, Search},
    elsewhere::DrainTo,
    events::About,
    exit::{Exit, Failure},
    fleet::{Fleet, Parts, Processes},
    gauges::Gauges,
    inherit::Inherited,
    manager,
    packed::Packs,
    service::{self, Doors, Ended, Shared},
    takeover::{Left, Takeover},
    traces::Traces,
    vault::{self, Source},
};

/// How long devices that are still looked for hold up the doors, while workers of the others start.
const SEARCH: Duration = Duration::from_millis(500);
/// How long clients may take at least to read the last words of their streams.
const GOODBYE: Duration = Duration::from_secs(1);
/// How long the last spans may take to be sent.
const LAST_SPANS: Duration = Duration::from_secs(1);

/// SIGTERM and SIGINT.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn listen() -> Result<Self, Failure> {
        let listen = |kind| {
            signal(kind)
                .map_err(|e| Failure::new(Exit::Internal, format!("cannot hear signals: {e}")))
        };
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

/// Runs a scheduler until it is told to end, or its private connection ends.
///
/// # Errors
/// A [`Failure`] with its exit code.
pub async fn run(
    config: Config,
    inherited: Inherited,
    mut left: Option<Left>,
) -> Result<(), Failure> {
    let mut signals = Signals::listen()?;
    // Those that came since the program began are heard now.
    hotcell_ipc::signals::hear();
    let access = Arc::new(Access::load(&config.access)?);
    if let Some(to) = &config.drain_to {
        let wrong = |why| Failure::new(Exit::Usage, format!("drain_to: {why}"));
        to.open().map_err(wrong)?;
    }
    let mut doors = Doors::open_or_keep(&config, inherited.private, &mut left)?;
    if !config.worker.binary.is_file() {
        return Err(Failure::new(
            Exit::NoWorkerBinary,
            format!(
                "the worker's program {} is missing; build or install it beside this one, or name it with --worker-binary PATH",
                config.worker.binary.display()
            ),
        ));
    }
    let spawner = Spawner::start()
        .map_err(|e| Failure::new(Exit::Internal, format!("cannot start processes: {e}")))?;
    let choice = format!(
        "{:?}, {} together, {} in turn",
        config.devices, config.worker.tensor_parallel, config.worker.pipeline_parallel
    );
    let mut confinement = Vec::new();
    let inherited_devices = left.as_ref().and_then(|left| left.devices(&choice));
    let known = inherited_devices.as_deref().unwrap_or_default();
    let patience = config.timeouts.probe;
    let mut search = Search::begin(&spawner, &config.worker, config.devices, patience, known);
    let mut devices = match inherited_devices {
        // Its workers say themselves what confines them.
        Some(devices) => devices,
        None => tokio::select! {
            found = discover::probe(&spawner, &config.worker, patience) => {
                if config.worker.require_confinement && let Some(lacks) = found.unconfined() {
                    return Err(Failure::new(
                        Exit::Unconfined,
                        format!("confinement is required and cannot be had: {lacks}; `hotcell doctor` shows every layer"),
                    ));
                }
                confinement = found.confinement;
                discover::choose(found.devices, config.devices)
            }
            _ = signals.next() => return Ok(()),
        },
    };
    search.list(&mut devices);
    let unusable = |devices: &[Device]| discover::with_workers(devices).next().is_none();
    while unusable(&devices) {
        let found = tokio::select! {
            found = search.next() => found,
            _ = signals.next() => return Ok(()),
        };
        let Some(found) = found else {
            let problems: Vec<_> = devices.iter().map(|d| d.problem.as_str()).collect();
            return Err(Failure::new(
                Exit::NoDevice,
                format!("no device can be used: {}", problems.join("; ")),
            ));
        };
        found.settle(&mut devices);
    }

    let takeover = match config.private_fd {
        Some(_) => Takeover::default(),
        None => {
            let shared = doors.share(&config).map_err(|e| {
                Failure::new(Exit::Internal, format!("cannot share the doors: {e}"))
            })?;
            Takeover::new(spawner.clone(), choice, shared)
        }
    };
    let audit = match &config.audit_log {
        Some(path) => Audit::open(path).map_err(|e| {
            let what = format!("the audit log {} cannot be opened: {e}", path.display());
            Failure::new(Exit::Usage, what)
        })?,
        None => Audit::default(),
    };
    let groups = control_groups(config.control_group.as_deref())?;
    let gauges = Gauges::new(spawner.clone(), config.worker.clone());
    let processes = Processes::new(spawner, config.worker.clone()).grouped(groups);
    let processes = Arc::new(processes);
    let fleet = Fleet::new(Parts {
        launcher: Arc::clone(&processes) as _,
        policy: config.restart,
        suspicion: config.suspicion,
        standby: config.standby,
        patience: config.patience,
        crashes: Crashes::new(config.crash_dir.clone()),
        gauges,
        timeouts: config.timeouts,
        packs: match &config.packs {
            Some(packs) => Packs::new(packs.folder.clone(), packs.limit),
            None => Packs::off(),
        },
        model_roots: config.model_roots.clone(),
        model_policy: Arc::clone(&config.model_policy),
        audit,
        default_model: config.default_model.clone(),
        device_memory: config.device_memory,
    });
    for (name, files) in inherited.bundled {
        let files = vault::adopt(&name, files);
        fleet.configure(name, Source::Bundled, files);
    }
    let policy = &config.model_policy;
    let left_models = |left: &mut Left| left.give_models(&fleet, &config.models);
    let mut expected = left.as_mut().map_or_else(Vec::new, left_models);
    for model in &config.models {
        let ConfiguredModel { name, path, .. } = model;
        if fleet.knows(name) {
            continue;
        }
        if model.on_request {
            if let Err(error) = fleet.expect(name.clone(), path.clone(), true, &model.serving) {
                tracing::error!(model = %name, %error, "a configured model is left out");
            }
            continue;
        }
        if policy.is_given() || config.device_memory.is_some() || !model.is_plain() {
            // Names that one of before has, which lived on under another configuration.
            match fleet.announce(name.clone(), path.clone(), &model.serving) {
                Ok(()) => expected.push(name.clone()),
                Err(error) => {
                    tracing::error!(model = %name, %error, "a configured model is left out");
                }
            }
            continue;
        }
        let files = vault::open(path, &config.model_roots, policy);
        fleet.configure(name.clone(), Source::Path(path.clone()), files);
    }
    let heirs = left.as_mut().map(|left| left.workers(&processes));
    let heirs = heirs.unwrap_or_default();
    let live = heirs.iter().filter(|heir| heir.live.is_some());
    let kept = live
        .map(|heir| (heir.id.clone(), heir.past.epoch))
        .collect();
    fleet.start_with(devices, heirs);
    // Clients that come back want the devices they had: those that are found in ordinary time are there when they come.
    let _ = timeout(SEARCH, fleet.expect_devices(search)).await;
    fleet.load_expected(expected);
    fleet.keep_packed();
    if let Some(pace) = config.checks {
        fleet.check_every(pace);
    }

    let _following = access.follow(&config.access);
    let weights = Arc::clone(&access);
    fleet.weigh_tenants(move |tenant| weights.limits(tenant).weight());
    let traces = match &config.traces {
        Some(collector) => Traces::to(collector).map_err(|e| {
            let what = format!("traces cannot be sent to {}: {e}", collector.endpoint);
            Failure::new(Exit::Usage, what)
        })?,
        None => Traces::default(),
    };
    let shared = Shared {
        takeover,
        traces,
        confinement: confinement.into(),
        web_origins: config.web_origins.clone().into(),
        access,
        ..Shared::new(Arc::clone(&fleet))
    };
    if config.drain_to.is_none() {
        shared.streams.stay();
    }
    let asker = left.map(|left| left.resume(&shared, kept));
    if let Some(folder) = &config.graphs {
        shared.graphs.keep_in(&shared, folder).map_err(|e| {
            let what = format!("the folder {} for graphs: {e}", folder.display());
            Failure::new(Exit::Usage, what)
        })?;
    }
    fleet.retire_all();
    let (routes, health) = service::routes(&shared, &config.protocols)
        .map_err(|e| Failure::new(Exit::Internal, format!("cannot offer reflection: {e}")))?;
    let _health = AbortOnDropHandle::new(tokio::spawn(service::report_health(
        shared.clone(),
        health.clone(),
    )));
    let manager = manager::find(config.private_fd.is_some());
    let _informed = manager.clone().map(|manager| {
        let informed = manager::keep_informed(manager, shared.clone());
        AbortOnDropHandle::new(tokio::spawn(informed))
    });
    tracing::info!("serving on {}", doors.describe());
    let _sockets = doors.guards();
    let stop = CancellationToken::new();
    let mut serving = AbortOnDropHandle::new(tokio::spawn({
        let (shared, stop) = (shared.clone(), stop.clone());
        let protocols = config.protocols.clone();
        async move { service::serve(doors, (routes, &protocols), shared, stop).await }
    }));

    if let Some(asker) = asker {
        tokio::spawn(asker.tell(Arc::clone(&fleet)));
    }

    let ended = tokio::select! {
        ended = &mut serving => Some(ended),
        name = signals.next() => {
            tracing::info!("{name}: draining; a second signal ends at once");
            None
        }
    };
    let told = ended.is_none();
    manager::stopping(
        manager.as_ref(),
        "ending: running streams go on to their end",
    );
    let outcome = match ended {
        Some(Ok(Ok(Ended::ConnectionOver | Ended::Asked))) => Ok(()),
        Some(Ok(Ok(Ended::DoorFailed))) => {
            Err(Failure::new(Exit::Internal, "serving failed; see the log"))
        }
        Some(Ok(Err(failure))) => Err(failure),
        Some(Err(error)) => Err(Failure::new(
            Exit::Internal,
            format!("serving failed: {error}"),
        )),
        None => tokio::select! {
            () = async {
                shared.leaving.cancel();
                shared.fleet.nudge();
                tokio::time::sleep(config.timeouts.drain_delay).await;
                let how = (config.timeouts.drain, config.drain_to.as_ref());
                drain(&shared, health, &stop, how, &mut serving).await;
            } => Ok(()),
            name = signals.next() => {
                return Err(Failure::new(
                    Exit::Interrupted,
                    format!("{name} during the drain: ended at once"),
                ));
            }
        },
    };
    shared.abort.cancel();
    let stopped = async {
        fleet.stop().await;
        shared.traces.flush(LAST_SPANS).await;
    };
    tokio::select! {
        () = stopped => outcome,
        // If serving ended by itself (whoever owned the private connection may signal as well as hang up), this
        // is the first one and asks for what is happening already.
        name = signals.next(), if told => Err(Failure::new(
            Exit::Interrupted,
            format!("{name} while workers were ending: ended at once"),
        )),
    }
}

/// Where workers' control groups are made, if anywhere.
fn control_groups(named: Option<&Path>) -> Result<Option<Groups>, Failure> {
    if let Some(folder) = named {
        let failed = |e| {
            let what = format!("control group {} cannot be used: {e}", folder.display());
            Failure::new(Exit::Usage, what)
        };
        return Groups::within(folder).map(Some).map_err(failed);
    }
    Ok(Groups::delegated().unwrap_or_else(|error| {
        tracing::warn!(%error, "workers get no control groups of their own");
        None
    }))
}

/// Has the streams that run go on at the other Hotcell, as far as it takes them.
fn leave(shared: &Shared, to: Option<&DrainTo>) {
    let Some(to) = to else { return };
    // Anew: a token may have been exchanged since the start.
    match to.open() {
        Ok(elsewhere) => {
            tracing::info!(to = %elsewhere, "streams go on there");
            shared.streams.leave_to(Arc::new(elsewhere));
        }
        Err(error) => tracing::error!(error, to = %to.address, "streams cannot go there"),
    }
}

/// Lets nobody in, waits for those inside at most that long, ends their streams, and closes the doors.
async fn drain(
    shared: &Shared,
    health: HealthReporter,
    stop: &CancellationToken,
    (patience, to): (Duration, Option<&DrainTo>),
    serving: &mut AbortOnDropHandle<Result<Ended, Failure>>,
) {
    let until = Instant::now() + patience;
    shared.admission.close();
    shared.fleet.nudge();
    let inside = shared.admission.count();
    shared.fleet.events.tell(
        EventKind::Draining,
        About::default(),
        format!("{inside} requests are running"),
    );
    leave(shared, to);
    let done = async {
        shared.admission.empty().await;
        shared.tensors.idle().await;
    };
    if timeout_at(until, done).await.is_err() {
        let left = shared.admission.count();
        tracing::warn!(left, "streams did not end within {patience:?}");
    }
    if let Some(to) = to {
        let ((taken, refused), to) = (shared.streams.handed(), &to.address);
        let left = shared.admission.count();
        let message = format!(
            "{taken} of {inside} requests went on at {to}; {refused} times it refused or lost one; {left} are left"
        );
        tracing::info!("{message}");
        let events = &shared.fleet.events;
        events.tell(EventKind::Draining, About::default(), message);
    }
    // Streams end with a status, watchers with the end of their stream.
    shared.abort.cancel();
    // Those that ended may still wait for a slow client to take their last events.
    let readers = shared.streams.readers();
    readers.close();
    let until = until.max(Instant::now() + GOODBYE);
    if timeout_at(until, readers.wait()).await.is_err() {
        let left = readers.len();
        tracing::warn!(left, "clients did not read their streams' ends in time");
    }
    shared.takeover.close();
    stop.cancel();
    service::end_health(health).await;
    // A last piece may be on its way below the streams.
    let until = until.max(Instant::now() + GOODBYE);
    if timeout_at(until, serving).await.is_err() {
        tracing::debug!("a client did not hang up");
    }
}

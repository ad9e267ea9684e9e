//! The program: confine first, then threads, then the first byte from anybody.

mod gauges;
mod together;

use std::{
    fs::File,
    io::Write,
    os::fd::{OwnedFd, RawFd},
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use hotcell_ipc::{background, blackbox::Writer, socket, transport::Windows, turns};
use hotcell_kernels::{
    backend::{Backend, on_loss},
    registry::Registry,
};
use hotcell_proto::{
    PROTOCOL_VERSION,
    error::Error,
    ids::Epoch,
    limits,
    v1::{tensors_server::TensorsServer, tokens_server::TokensServer},
};
use tokio::sync::mpsc;
use tracing_subscriber::EnvFilter;

use self::together::{be_member, divided, member_lost};
use crate::{
    config::{Alone, Cli, Common, Mode, Serve},
    confine::{self, Report},
    engine::{self, Engine, EngineConfig},
    exit::Exit,
    host::{Host, map_file},
    last_words,
    members::{Leads, Members, Side},
    serve::{self, Connections, Controls, MAX_STREAMS, tokens_server},
    service::{AUDIT, TensorsService, TokensService, debug_server, tensors_server},
    weights::ModelFile,
};

/// Time between two signs of the event loop's life.
const BEAT: Duration = Duration::from_millis(500);

/// Runs the program with the devices of these backends, and says how it ended.
pub fn run(cli: Cli, backends: &'static [&'static dyn Backend]) -> Exit {
    let registry = match Registry::of(backends) {
        Ok(registry) => registry,
        Err(error) => return fail(Exit::Internal, error),
    };
    // What passes messages on wants its moment soon, and who computes gives its processor away now and then, for no longer than
    // this. A system that refuses is one that serves later.
    let _ = turns::take(turns::SHORT);
    match cli.mode {
        Some(Mode::Probe) => probe(registry),
        Some(Mode::Gauges(how)) => gauges::tell(registry, how.every),
        Some(Mode::Serve(serve)) => serve_scheduler(serve, registry),
        None => serve_alone(&cli.alone, registry),
    }
}

/// A failure before there is anybody to answer: one line, and a code.
fn fail(exit: Exit, what: impl std::fmt::Display) -> Exit {
    eprintln!("error: {what}");
    exit
}

fn probe(registry: Registry) -> Exit {
    let found = registry.devices();
    if let (true, Some(why)) = (found.is_empty(), registry.why_none()) {
        return fail(Exit::NoDevice, why);
    }
    let devices: Vec<serde_json::Value> = found
        .into_iter()
        .map(|d| {
            serde_json::json!({
                "id": d.id,
                "backend": d.backend,
                "description": d.description,
                "memory_bytes": d.memory_bytes,
                "cores": d.cores,
                "path": d.path,
                "pci_id": d.pci_id,
                "integrated": d.integrated,
                "driver": d.driver,
            })
        })
        .collect();
    // As a worker would be: what is said of this host was tried on it.
    let report = confine::confine(confine::Mode::Inherited);
    let confinement: Vec<serde_json::Value> = report
        .wire()
        .into_iter()
        .map(|l| {
            serde_json::json!({
                "layer": l.layer,
                "state": l.state().as_str_name(),
                "detail": l.detail,
            })
        })
        .collect();
    let line = serde_json::json!({
        "version": env!("CARGO_PKG_VERSION"),
        "protocol": PROTOCOL_VERSION,
        "devices": devices,
        "confinement": confinement,
    })
    .to_string();
    match writeln!(std::io::stdout(), "{line}") {
        Ok(()) => Exit::Ok,
        Err(error) => fail(Exit::Internal, format_args!("cannot print: {error}")),
    }
}

fn start_log(level: &str) {
    // Who looks into others' requests is told however little else is.
    let filter = |level: &str| EnvFilter::try_new(format!("{level},{AUDIT}=info"));
    let filter = filter(level).or_else(|_| filter("info"));
    let filter = filter.unwrap_or_else(|_| EnvFilter::new("info"));
    // Whoever started us adds time and name; a second subscriber in one process would be a test's.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .without_time()
        .try_init();
}

/// Binds this thread, and so all later ones, to its cores. Best effort: a core may be gone. Where a control group gives
/// less time than there are cores, which of them have it is the system's to say: all groups of a host would
/// bind to its first cores.
fn bind_cores(cores: &[u32]) {
    let allowed = rustix::thread::sched_getaffinity(None).map_or(0, |set| set.count());
    let time = std::thread::available_parallelism().map_or(1, |n| n.get());
    if cores.is_empty() || time < allowed as usize {
        return;
    }
    let mut set = rustix::thread::CpuSet::new();
    cores.iter().for_each(|&core| set.set(core as usize));
    if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
        tracing::warn!(?cores, %error, "cannot bind to these cores; running on any");
    }
}

/// Whether every requested core exists, so that a thread is not started for one that does not.
fn usable_cores(common: &Common) -> Vec<u32> {
    let there = std::thread::available_parallelism().map_or(1, |n| n.get());
    match common.cores.is_empty() {
        true => (0..there as u32).collect(),
        false => common.cores.clone(),
    }
}

/// The cores that this process may run on, and no more than it has time for; none: the system does not tell.
fn allowed_cores() -> Vec<u32> {
    let time = std::thread::available_parallelism().map_or(1, |n| n.get());
    let Ok(set) = rustix::thread::sched_getaffinity(None) else {
        return Vec::new();
    };
    let all = 0..rustix::thread::CpuSet::MAX_CPU;
    let allowed = all.filter(|core| set.is_set(*core));
    allowed.map(|core| core as u32).take(time).collect()
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    // One thread for I/O: the cores are for computing.
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(8)
        .build()
}

/// Everything that may open a file or look at the system, before confinement forbids it.
struct Prepared {
    engine: EngineConfig,
    blackbox: Writer,
    require_confinement: bool,
}

fn prepare(common: &Common, registry: Registry, blackbox: Writer) -> Prepared {
    start_log(&common.log);
    let cores = usable_cores(common);
    bind_cores(&common.cores);
    Prepared {
        engine: EngineConfig {
            device: common.device.clone(),
            cores,
            pins: common.pin,
            cache_dtype: common.kv_cache,
            model_memory: common.model_memory,
            max_context: common.max_context,
            tensor_memory: common.tensor_memory,
            blackbox: Some(blackbox),
            follow: false,
            gives_way: false,
            registry,
        },
        blackbox,
        require_confinement: common.require_confinement,
    }
}

/// A device's library says that it computes nothing any more in this process.
fn lost(why: &str) {
    last_words::error(why);
    eprintln!("error: {why}");
    // SAFETY: ends the process at once. What a library would do at an orderly exit could wait for the device for ever.
    unsafe { libc::_exit(Exit::DeviceError.code()) }
}

/// Has crashes leave their traces. A worker does without if the system refuses.
fn record(blackbox: Writer) {
    on_loss(lost);
    if let Err(error) = last_words::install(blackbox) {
        tracing::warn!(%error, "a crash will leave no backtrace");
    }
}

/// Shows, round after round, that the event loop runs.
async fn beat(blackbox: Writer) {
    let mut rounds = tokio::time::interval(BEAT);
    loop {
        rounds.tick().await;
        blackbox.beat();
    }
}

/// Takes this process's freedom, after its device's libraries have opened what they need.
fn confined(mode: confine::Mode, engine: &EngineConfig) -> Result<Report, Exit> {
    let mut loaded = Ok(());
    let files = engine.registry.files(&engine.device);
    let report = confine::confine_around(mode, &files, || {
        loaded = engine.registry.load(&engine.device);
    });
    match loaded {
        Ok(()) => Ok(report),
        Err(error) => Err(fail(Exit::NoDevice, error)),
    }
}

/// Whether it may go on with what freedom it still has.
fn accept(prepared: &Prepared, report: &Report) -> Result<(), Exit> {
    if !report.is_complete() && prepared.require_confinement {
        let what = format_args!("confinement is required and incomplete: {report}");
        return Err(fail(Exit::Unconfined, what));
    }
    if !report.is_complete() {
        tracing::warn!("confinement is incomplete: {report}");
    }
    Ok(())
}

fn open_host(prepared: Prepared, report: Report, leads: Option<Leads>) -> Result<Host, Exit> {
    accept(&prepared, &report)?;
    let members = leads
        .map(|leads| Members::new(leads, member_lost))
        .transpose();
    let members = members.map_err(|error| {
        let what = format_args!("the members of its communicator cannot be led: {error}");
        fail(Exit::Internal, what)
    })?;
    let engine = Engine::leading(prepared.engine, members);
    let engine = engine.map_err(|e| fail(Exit::NoDevice, e))?;
    Ok(Host::new(engine, report))
}

/// Takes over an inherited descriptor.
fn inherited(fd: RawFd) -> Result<OwnedFd, Exit> {
    hotcell_ipc::inherit::take(fd).map_err(|error| fail(Exit::Usage, error))
}

fn serve_scheduler(mut serve: Serve, registry: Registry) -> Exit {
    let fds = [
        serve.control_fd,
        serve.tokens_fd,
        serve.tensors_fd,
        serve.descriptors_fd,
        serve.blackbox_fd,
    ];
    let [control, tokens, tensors, descriptors, blackbox] = match fds.map(inherited) {
        [Ok(a), Ok(b), Ok(c), Ok(d), Ok(e)] => [a, b, c, d, e],
        _ => return Exit::Usage,
    };
    let blackbox = match Writer::open(blackbox, engine::names()) {
        Ok(blackbox) => blackbox,
        Err(error) => {
            return fail(
                Exit::Usage,
                format_args!("the black box cannot be used: {error}"),
            );
        }
    };
    let leads = match divided(&mut serve.common) {
        Ok(None) => None,
        Ok(Some(Side::Leader(leads))) => Some(leads),
        Ok(Some(Side::Member(member))) => {
            // The leader's: whoever holds the other ends is to notice when it ends.
            drop((control, tokens, tensors, descriptors));
            let mode = confine::Mode::Inherited;
            return be_member(member, &serve.common, registry, mode, blackbox);
        }
        Err(exit) => return exit,
    };
    let mut prepared = prepare(&serve.common, registry, blackbox);
    prepared.engine.follow = serve.follow;
    // Whoever started it has tried.
    if serve.background {
        if let Err(error) = background::insist() {
            tracing::warn!(%error, "it computes with the same right as others");
        }
        prepared.engine.gives_way = true;
    }
    record(blackbox);
    let report = match confined(confine::Mode::Inherited, &prepared.engine) {
        Ok(report) => report,
        Err(exit) => return exit,
    };
    tracing::debug!(worker = serve.worker_id, "confined: {report}");
    let host = match open_host(prepared, report, leads) {
        Ok(host) => host,
        Err(exit) => return exit,
    };
    if let Err(error) = host.receive_descriptors(descriptors) {
        return fail(
            Exit::Protocol,
            format_args!("the descriptor socket cannot be used: {error}"),
        );
    }
    let runtime = match runtime() {
        Ok(runtime) => runtime,
        Err(error) => return fail(Exit::Internal, format_args!("no event loop: {error}")),
    };
    let connections = Connections {
        control,
        tokens,
        tensors,
    };
    runtime.block_on(async move {
        let controls = Controls::default();
        let first = serve::serve(host, connections, controls.enter());
        tokio::select! {
            // The scheduler is gone, or wants us to be; and nobody took its place.
            () = controls.none() => Exit::Ok,
            Err((what, error)) = first => fail(
                Exit::Protocol,
                format_args!("the {what} connection failed: {error}"),
            ),
            () = beat(blackbox) => Exit::Internal,
        }
    })
}

fn ended_early(what: &str, ended: Result<(), tonic::transport::Error>) -> Exit {
    match ended {
        Ok(()) => Exit::Ok,
        Err(error) => fail(
            Exit::Protocol,
            format_args!("the {what} connection failed: {error}"),
        ),
    }
}

/// The regular files of a model, opened: the folder's with known extensions, or the one file.
fn open_files(path: &Path) -> std::io::Result<Vec<(String, OwnedFd)>> {
    let name = |p: &Path| {
        p.file_name()
            .map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default()
    };
    if !path.is_dir() {
        return Ok(vec![(name(path), File::open(path)?.into())]);
    }
    let mut files = Vec::new();
    for entry in path.read_dir()? {
        let path = entry?.path();
        let known = path
            .extension()
            .is_some_and(|e| limits::MODEL_EXTENSIONS.iter().any(|k| e == *k));
        if known && path.is_file() && files.len() < limits::MAX_MODEL_FILES {
            files.push((name(&path), File::open(&path)?.into()));
        }
    }
    Ok(files)
}

enum Listener {
    Unix(std::os::unix::net::UnixListener, socket::SocketGuard),
    Tcp(std::net::TcpListener),
}

fn listen(address: &str) -> Result<Listener, String> {
    if let Some(path) = address.strip_prefix("unix:") {
        let (listener, guard) = socket::listen_unix(path).map_err(|e| e.to_string())?;
        listener.set_nonblocking(true).map_err(|e| e.to_string())?;
        return Ok(Listener::Unix(listener, guard));
    }
    let bound = std::net::TcpListener::bind(address)
        .and_then(|l| l.set_nonblocking(true).map(|()| l))
        .map_err(|e| format!("cannot listen on {address}: {e}; give unix:/path or host:port"))?;
    Ok(Listener::Tcp(bound))
}

fn serve_alone(alone: &Alone, registry: Registry) -> Exit {
    let mut common = alone.common.clone();
    let Some(address) = &alone.listen else {
        let what =
            "give --listen to run alone; `hotcell serve` starts workers by itself (see --help)";
        return fail(Exit::Usage, what);
    };
    let blackbox = Writer::private(engine::names());
    let leads = match divided(&mut common) {
        Ok(None) => None,
        Ok(Some(Side::Leader(leads))) => Some(leads),
        Ok(Some(Side::Member(member))) => {
            return be_member(
                member,
                &common,
                registry,
                confine::Mode::Listening,
                blackbox,
            );
        }
        Err(exit) => return exit,
    };
    let prepared = prepare(&common, registry, blackbox);
    record(prepared.blackbox);
    let model = match alone.model.as_deref().map(|path| (path, open_files(path))) {
        None => None,
        Some((path, Ok(files))) => {
            let stem = path
                .file_stem()
                .map(|n| n.to_string_lossy().into_owned())
                .unwrap_or_default();
            Some((alone.name.clone().unwrap_or(stem), files))
        }
        Some((path, Err(error))) => {
            return fail(
                Exit::Usage,
                format_args!("cannot read {}: {error}", path.display()),
            );
        }
    };
    let listener = match listen(address) {
        Ok(listener) => listener,
        Err(what) => return fail(Exit::CannotListen, what),
    };
    let report = match confined(confine::Mode::Listening, &prepared.engine) {
        Ok(report) => report,
        Err(exit) => return exit,
    };
    let host = match open_host(prepared, report, leads) {
        Ok(host) => host,
        Err(exit) => return exit,
    };
    let runtime = match runtime() {
        Ok(runtime) => runtime,
        Err(error) => return fail(Exit::Internal, format_args!("no event loop: {error}")),
    };
    runtime.block_on(async move {
        // Handles of an earlier process at this address must not be taken for this one's.
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        host.set_identity("w0", Epoch(since.map_or(0, |d| d.as_micros() as u64)));
        if let Some((name, files)) = model {
            let loaded: Result<_, Error> = async {
                let files = files
                    .into_iter()
                    .map(|(name, fd)| map_file(name, fd))
                    .collect::<Result<Vec<ModelFile>, _>>()?;
                // Nobody watches the progress of a load that happens before anyone can connect.
                let (progress, _) = mpsc::channel(1);
                host.load(name, files, progress).await
            }
            .await;
            match loaded {
                Ok(model) => tracing::info!(model = model.name, "loaded"),
                Err(error) => return fail(Exit::Usage, error),
            }
        }
        tracing::info!(%address, "serving");
        let (reporter, health) = tonic_health::server::health_reporter();
        reporter
            .set_serving::<TensorsServer<TensorsService>>()
            .await;
        reporter.set_serving::<TokensServer<TokensService>>().await;
        // Debuggers see prompts: over TCP, where nobody says who they are, there is no such service.
        let is_local = matches!(listener, Listener::Unix(..));
        let debugger = is_local.then(|| debug_server(host.clone(), true));
        let router = Windows::default()
            .server()
            .max_concurrent_streams(MAX_STREAMS)
            // A client that vanished without a word holds its sessions no longer than this.
            .http2_keepalive_interval(Some(Duration::from_secs(30)))
            .http2_keepalive_timeout(Some(Duration::from_secs(20)))
            .add_service(tokens_server(host.clone()))
            .add_service(tensors_server(host))
            .add_optional_service(debugger)
            .add_service(health);
        let served = match listener {
            Listener::Unix(listener, _guard) => {
                match tokio::net::UnixListener::from_std(listener) {
                    Ok(listener) => {
                        let incoming = tokio_stream::wrappers::UnixListenerStream::new(listener);
                        router.serve_with_incoming(incoming).await
                    }
                    Err(error) => return fail(Exit::CannotListen, error),
                }
            }
            Listener::Tcp(listener) => match tokio::net::TcpListener::from_std(listener) {
                Ok(listener) => {
                    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
                    router.serve_with_incoming(incoming).await
                }
                Err(error) => return fail(Exit::CannotListen, error),
            },
        };
        ended_early("listening", served)
    })
}

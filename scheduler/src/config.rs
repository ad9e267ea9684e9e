//! What the scheduler is told: flags over environment over file over defaults.
//!
//! One list (`settings!` below) makes the flags, the environment variables and the keys of the TOML file, so
//! that they cannot drift apart: key `restart_budget`, flag `--restart-budget`, variable
//! `HOTCELL_RESTART_BUDGET`. A key given higher up replaces the whole value from below, tables and lists too.

mod parts;
mod reach;
mod surroundings;
mod values;

use std::{
    net::SocketAddr,
    os::fd::RawFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use clap::{Parser, ValueEnum};
use hotcell_proto::{address::default_socket, ids::ModelName, limits};

pub use parts::{BACKENDS_APART, PackConfig, Timeouts, WorkerConfig, program_apart};
pub use surroundings::Surroundings;
pub use values::{
    AllowedUsers, BundledFiles, CollectorAddress, ConfiguredModel, DeviceChoice, Every, KvCache,
    Members, NamedModels, Share, Span,
};

use reach::{check_reach, drain_to, tls_files};

use crate::{
    access::{self, AccessConfig, Network, TlsDoor},
    elsewhere::{Address, DrainTo},
    exit::{Exit, Failure},
    gateway::{Protocol, WebOrigin},
    hang::Patience,
    known::{self, Pace},
    policy::ModelPolicy,
    supervisor::Policy,
    suspicion,
    traces::Collector,
};

macro_rules! settings {
    ($($(#[$($meta:tt)*])* $name:ident: $type:ty = $env:literal;)*) => {
        /// Every setting, each as one layer (flags and environment, or the file) gave it.
        #[derive(Clone, Debug, Default, clap::Args, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct Settings {
            $($(#[$($meta)*])* #[arg(long, env = $env)] pub $name: Option<$type>,)*
        }

        impl Settings {
            /// Each setting with its environment variable.
            pub const KEYS: &'static [(&'static str, &'static str)] = &[$((stringify!($name), $env),)*];

            /// These settings, and where one is missing that of `below`.
            #[must_use]
            pub fn over(self, below: Settings) -> Settings {
                Settings { $($name: self.$name.or(below.$name),)* }
            }
        }
    };
}

settings! {
    /// Unix socket to listen on [default: $XDG_RUNTIME_DIR/hotcell/hotcell.sock, else /tmp/hotcell-UID/hotcell.sock]
    #[arg(value_name = "PATH")]
    socket: PathBuf = "HOTCELL_SOCKET";
    /// TCP address to listen on as well, for example 127.0.0.1:4100; beyond this host only with TLS, and tokens or clients' certificates
    #[arg(value_name = "ADDRESS")]
    listen: SocketAddr = "HOTCELL_LISTEN";
    /// TCP address to listen on for HTTP: the protocols of OpenAI, Ollama, Anthropic and others, health and metrics; without an address 127.0.0.1:8080 [default: none]
    #[arg(value_name = "ADDRESS", num_args = 0..=1, default_missing_value = "127.0.0.1:8080")]
    http: SocketAddr = "HOTCELL_HTTP";
    /// Protocols of others to speak, over HTTP and beside Hotcell's own over gRPC [default: all]
    #[arg(value_enum, value_name = "PROTOCOL", value_delimiter = ',')]
    protocols: Vec<Protocol> = "HOTCELL_PROTOCOLS";
    /// Origins of web pages that may call over HTTP, for example https://app.example.com; those of this machine may where no tokens are asked for [default: none]
    #[arg(value_name = "ORIGIN", value_delimiter = ',')]
    web_origins: Vec<WebOrigin> = "HOTCELL_WEB_ORIGINS";
    /// File of the bearer tokens that clients over TCP have to show, and of tenants' limits; see `hotcell token new` [default: none are asked for]
    #[arg(value_name = "PATH")]
    tokens: PathBuf = "HOTCELL_TOKENS";
    /// Certificate for TLS on the TCP address, in PEM, with those between it and its authority; read again when it changes
    #[arg(value_name = "PATH")]
    tls_cert: PathBuf = "HOTCELL_TLS_CERT";
    /// Its key, in PEM
    #[arg(value_name = "PATH")]
    tls_key: PathBuf = "HOTCELL_TLS_KEY";
    /// Authority whose certificates clients over TCP have to show, in PEM [default: none are asked for]
    #[arg(value_name = "PATH")]
    tls_client_ca: PathBuf = "HOTCELL_TLS_CLIENT_CA";
    /// Doors that speak TLS where there is a certificate [default: both]
    #[arg(value_enum, value_name = "DOOR", value_delimiter = ',')]
    tls_doors: Vec<TlsDoor> = "HOTCELL_TLS_DOORS";
    /// Addresses of proxies, for example 10.0.0.7 or 10.1.0.0/16, that keep their own clients apart: one client's refused calls are then not held against all that come by the same way [default: none]
    #[arg(value_name = "ADDRESS", value_delimiter = ',')]
    trusted_proxies: Vec<Network> = "HOTCELL_TRUSTED_PROXIES";
    /// Users who may use the Unix socket besides this one and root, UID[:ROLE+ROLE…][,…], with the role use unless another is given; its directory may then be one that others can enter
    #[arg(value_name = "UID")]
    allow_uid: AllowedUsers = "HOTCELL_ALLOW_UID";
    /// Devices to use: auto (what the probe finds) or cpu:N (N CPU devices that share the cores) [default: auto]
    #[arg(value_name = "CHOICE")]
    devices: DeviceChoice = "HOTCELL_DEVICES";
    /// Models to load at start, NAME=PATH[,NAME=PATH…]; in the file a table, whose values are paths or say how a model is served: { path, replicas, keep_alive, pinned, aliases, max_running, max_context, on_request }
    #[arg(value_name = "NAME=PATH")]
    models: NamedModels = "HOTCELL_MODELS";
    /// Folders that links inside a model's folder may lead into, such as a Hugging Face cache
    #[arg(value_name = "PATH", value_delimiter = ',')]
    model_roots: Vec<PathBuf> = "HOTCELL_MODEL_ROOTS";
    /// TOML file that says which models may be loaded, and which of them are trusted to share a worker [default: every local file is]
    #[arg(value_name = "PATH")]
    models_config: PathBuf = "HOTCELL_MODELS_CONFIG";
    /// File for a JSON line about each load, verdict and death, and who asked [default: none]
    #[arg(value_name = "PATH")]
    audit_log: PathBuf = "HOTCELL_AUDIT_LOG";
    /// Folder in which graphs that clients save are kept for the next start [default: none]
    #[arg(value_name = "PATH")]
    graphs: PathBuf = "HOTCELL_GRAPHS";
    /// Model that requests without a name go to [default: the only one]
    #[arg(value_name = "NAME")]
    default_model: String = "HOTCELL_DEFAULT_MODEL";
    /// The worker's program [default: hotcell-worker beside this one]
    #[arg(value_name = "PATH")]
    worker_binary: PathBuf = "HOTCELL_WORKER_BINARY";
    /// Refuse to start, and workers to serve, where the kernel cannot enforce a layer of the workers' confinement; `hotcell doctor` shows them
    #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    require_confinement: bool = "HOTCELL_REQUIRE_CONFINEMENT";
    /// Keep each compute thread of a worker on a core of its own, where nobody else wants these cores [default: the system decides]
    #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pin: bool = "HOTCELL_PIN";
    /// Processes that compute each model of a worker together, every one a part of it, on as many of its device's cores each, or on as many devices of CUDA; the results are the same [default: 1]
    #[arg(value_name = "COUNT")]
    tensor_parallel: Members = "HOTCELL_TENSOR_PARALLEL";
    /// Processes that have the layers of each model of a worker together, every one some of them, for models that one of them should not hold alone, or cannot, with a device of CUDA each: parts of a prompt are computed at once, a token by one process after another; the results are the same [default: 1]
    #[arg(value_name = "COUNT")]
    pipeline_parallel: Members = "HOTCELL_PIPELINE_PARALLEL";
    /// Bytes that one worker may take of memory, where control groups can be made [default: its device's memory]
    #[arg(value_name = "BYTES")]
    worker_memory: u64 = "HOTCELL_WORKER_MEMORY";
    /// Folder of a control group of memory in which each worker gets one of its own [default: this process's own, if systemd delegates it]
    #[arg(value_name = "PATH")]
    control_group: PathBuf = "HOTCELL_CONTROL_GROUP";
    /// Dtype of the workers' KV caches [default: f16]
    #[arg(value_enum, value_name = "DTYPE")]
    kv_cache: KvCache = "HOTCELL_KV_CACHE";
    /// Bytes that each model may take in a worker besides its weights [default: 1 GiB of cache, more if one context needs it]
    #[arg(value_name = "BYTES")]
    model_memory: u64 = "HOTCELL_MODEL_MEMORY";
    /// Bytes that models may take on one device (CPU devices: on this host); the one that was asked least recently makes room for another [default: the device's memory]
    #[arg(value_name = "BYTES")]
    device_memory: u64 = "HOTCELL_DEVICE_MEMORY";
    /// Folder for packed copies of models larger than 64 MiB, which only this user may read [default: packed in $CACHE_DIRECTORY, else hotcell/packed in $XDG_CACHE_HOME or ~/.cache]
    #[arg(value_name = "PATH")]
    pack_dir: PathBuf = "HOTCELL_PACK_DIR";
    /// Bytes that the copies in that folder may take, those of earlier schedulers included; the least recently used goes first [default: as much as leaves 5 % of the disk free]
    #[arg(value_name = "BYTES")]
    pack_limit: u64 = "HOTCELL_PACK_LIMIT";
    /// Compute from models' files as they are, without packed copies
    #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    no_pack: bool = "HOTCELL_NO_PACK";
    /// How long the probe of devices may take [default: 10s]
    #[arg(value_name = "TIME")]
    probe_timeout: Span = "HOTCELL_PROBE_TIMEOUT";
    /// How long a starting worker may show no sign of life [default: 30s]
    #[arg(value_name = "TIME")]
    start_timeout: Span = "HOTCELL_START_TIMEOUT";
    /// How long a worker's engine may make no progress on work it has before it is killed [default: 30s]
    #[arg(value_name = "TIME")]
    hang_timeout: Span = "HOTCELL_HANG_TIMEOUT";
    /// Folder for a JSON file about each worker that died [default: none; `hotcell crashes` shows the last ones]
    #[arg(value_name = "PATH")]
    crash_dir: PathBuf = "HOTCELL_CRASH_DIR";
    /// How long a request waits for a worker after its own has died [default: 30s]
    #[arg(value_name = "TIME")]
    continue_timeout: Span = "HOTCELL_CONTINUE_TIMEOUT";
    /// How long a request waits for a place while every worker is full [default: 60s]
    #[arg(value_name = "TIME")]
    queue_timeout: Span = "HOTCELL_QUEUE_TIMEOUT";
    /// How long the stream of a request with an id of its client's goes on, and is kept, while nobody reads it [default: 60s]
    #[arg(value_name = "TIME")]
    reattach_timeout: Span = "HOTCELL_REATTACH_TIMEOUT";
    /// How long running streams may go on after SIGTERM [default: 30s]
    #[arg(value_name = "TIME")]
    drain_timeout: Span = "HOTCELL_DRAIN_TIMEOUT";
    /// How long to say that this host is not ready after SIGTERM, and still to take what comes, so that gateways look elsewhere before anything is refused [default: none]
    #[arg(value_name = "TIME")]
    drain_delay: Span = "HOTCELL_DRAIN_DELAY";
    /// Another Hotcell that running streams go on at after SIGTERM: unix:/path, http://host:port or https://host:port; their clients notice nothing [default: none, they go on here]
    #[arg(value_name = "ADDRESS")]
    drain_to: Address = "HOTCELL_DRAIN_TO";
    /// File of the bearer token that it asks for, of the role admin there
    #[arg(value_name = "PATH")]
    drain_to_token_file: PathBuf = "HOTCELL_DRAIN_TO_TOKEN_FILE";
    /// Authority of its certificate, in PEM [default: those that this host believes]
    #[arg(value_name = "PATH")]
    drain_to_ca: PathBuf = "HOTCELL_DRAIN_TO_CA";
    /// Deaths of one worker within the window after which its device is quarantined [default: 20]
    #[arg(value_name = "N")]
    restart_budget: u32 = "HOTCELL_RESTART_BUDGET";
    /// The window of the restart budget [default: 60s]
    #[arg(value_name = "TIME")]
    restart_window: Span = "HOTCELL_RESTART_WINDOW";
    /// Pause after the second death within the window; doubles with each further one [default: 50ms]
    #[arg(value_name = "TIME")]
    restart_backoff: Span = "HOTCELL_RESTART_BACKOFF";
    /// The longest such pause [default: 5s]
    #[arg(value_name = "TIME")]
    restart_backoff_max: Span = "HOTCELL_RESTART_BACKOFF_MAX";
    /// Deaths of workers under one request after which it is suspected and run alone [default: 2]
    #[arg(value_name = "N")]
    suspect_after: u32 = "HOTCELL_SUSPECT_AFTER";
    /// Keep one more worker per device ready to take the place of one that dies
    #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    standby: bool = "HOTCELL_STANDBY";
    /// How often an idle worker computes a known answer again, or 0: only when it begins to serve [default: 60s]
    #[arg(value_name = "TIME")]
    check_interval: Every = "HOTCELL_CHECK_INTERVAL";
    /// How many times as long as such a check the pause after it is at least: 1000 costs 0.1 % of the time [default: 1000]
    #[arg(value_name = "N")]
    check_share: u32 = "HOTCELL_CHECK_SHARE";
    /// Collector that gets a trace of each request over OTLP (gRPC), for example http://127.0.0.1:4317 [default: $OTEL_EXPORTER_OTLP_ENDPOINT, else none]
    #[arg(value_name = "URL")]
    otlp_endpoint: CollectorAddress = "HOTCELL_OTLP_ENDPOINT";
    /// Authority of the collector's certificate, in PEM, for one at https:// [default: those that this host believes]
    #[arg(value_name = "PATH")]
    otlp_ca: PathBuf = "HOTCELL_OTLP_CA";
    /// Share of the requests that are traced, 0 to 1; those whose client has decided by its traceparent aside [default: 1]
    #[arg(value_name = "SHARE")]
    otlp_sample: Share = "HOTCELL_OTLP_SAMPLE";
    /// What to log: off, error, warn, info, debug, trace or a tracing filter [default: info]
    #[arg(value_name = "FILTER")]
    log: String = "HOTCELL_LOG";
    /// Log one JSON object per line
    #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    log_json: bool = "HOTCELL_LOG_JSON";
}

/// Discovers the devices of this host, runs one worker process on each, and relays token requests to them.
///
/// Settings come from flags, then environment variables, then a TOML file, then defaults. The file has the
/// same names with underscores, for example `restart_budget = 20` and `models = { llama = "/models/llama" }`;
/// an unknown key is an error.
#[derive(Clone, Debug, Parser)]
#[command(name = "hotcell-scheduler", version, after_help = after_help())]
pub struct Cli {
    /// TOML file to read [default: $XDG_CONFIG_HOME/hotcell/scheduler.toml if there is one]
    #[arg(long, value_name = "PATH", env = "HOTCELL_CONFIG")]
    pub config: Option<PathBuf>,
    /// Serve the one connection inherited at this descriptor instead of listening, and end with it
    #[arg(long, value_name = "FD")]
    pub private_fd: Option<RawFd>,
    /// Take the place of the scheduler that runs on the same socket: it becomes this program, with these flags; its workers and streams go on
    #[arg(long, conflicts_with = "private_fd")]
    pub takeover: bool,
    /// How long running streams may end first, before a takeover [default: not at all]
    #[arg(long, value_name = "TIME", requires = "takeover")]
    pub takeover_drain: Option<Span>,
    /// Say which state of another scheduler this one can take over, and end
    #[arg(long, hide = true)]
    pub takeover_check: bool,
    /// A model inherited as descriptors, as the `hotcell` command passes its own
    #[arg(long, value_name = "NAME:FILE=FD,…")]
    pub bundled: Vec<BundledFiles>,
    /// The settings.
    #[command(flatten)]
    pub settings: Settings,
}

fn after_help() -> String {
    format!("{}\n{}", access::help(), crate::exit::help())
}

/// Everything, resolved and checked once, and then passed around.
#[derive(Clone, Debug)]
pub struct Config {
    /// Unix socket to listen on; none when private.
    pub socket: Option<PathBuf>,
    /// TCP address to listen on.
    pub listen: Option<SocketAddr>,
    /// TCP address to listen on for HTTP.
    pub http: Option<SocketAddr>,
    /// Protocols of others that are spoken.
    pub protocols: Vec<Protocol>,
    /// The web pages that may call over HTTP.
    pub web_origins: Vec<WebOrigin>,
    /// Who may come in.
    pub access: AccessConfig,
    /// The one inherited connection to serve instead.
    pub private_fd: Option<RawFd>,
    /// Which devices.
    pub devices: DeviceChoice,
    /// Models from paths.
    pub models: Vec<ConfiguredModel>,
    /// Bytes that models may take in each memory; none: as many as there are.
    pub device_memory: Option<u64>,
    /// Models from inherited descriptors.
    pub bundled: Vec<BundledFiles>,
    /// Folders that links may lead into.
    pub model_roots: Vec<PathBuf>,
    /// Where it is said which models may be loaded.
    pub models_config: Option<PathBuf>,
    /// The same, read.
    pub model_policy: Arc<ModelPolicy>,
    /// Where loads, verdicts and deaths are noted.
    pub audit_log: Option<PathBuf>,
    /// Where saved graphs are kept.
    pub graphs: Option<PathBuf>,
    /// For requests without a model's name.
    pub default_model: Option<ModelName>,
    /// What workers are started with.
    pub worker: WorkerConfig,
    /// Where workers' control groups are made, if somebody says so.
    pub control_group: Option<PathBuf>,
    /// Where packed copies of models go; none if there are to be none.
    pub packs: Option<PackConfig>,
    /// Bounds on waiting.
    pub timeouts: Timeouts,
    /// Where streams go on after SIGTERM.
    pub drain_to: Option<DrainTo>,
    /// When a worker is restarted.
    pub restart: Policy,
    /// When a request is suspected of killing workers.
    pub suspicion: suspicion::Policy,
    /// Whether each worker has a standby.
    pub standby: bool,
    /// When one hangs.
    pub patience: Patience,
    /// Where deaths are described in files.
    pub crash_dir: Option<PathBuf>,
    /// How often an idle one is checked, if at all.
    pub checks: Option<Pace>,
    /// Who gets traces, if anybody.
    pub traces: Option<Collector>,
    /// The log's filter.
    pub log: String,
    /// Whether the log is JSON.
    pub log_json: bool,
}

fn usage(message: impl Into<String>) -> Failure {
    Failure::new(Exit::Usage, message)
}

/// Reads the layer of the TOML file.
///
/// # Errors
/// For text that is not TOML, an unknown key or a value of the wrong kind; names `path` and the key.
pub fn parse_file(path: &Path, text: &str) -> Result<Settings, Failure> {
    toml::from_str(text).map_err(|e| usage(format!("{}: {e}", path.display())))
}

/// Whether there is simply no such file: nothing there, or something else than a folder on the way.
fn is_absent(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{NotADirectory, NotFound};
    matches!(error.kind(), NotFound | NotADirectory)
}

fn read_file(cli: &Cli, around: &Surroundings) -> Result<Settings, Failure> {
    let (path, asked) = match (&cli.config, &around.config_home) {
        (Some(path), _) => (path.clone(), true),
        (None, Some(home)) => (home.join("hotcell/scheduler.toml"), false),
        (None, None) => return Ok(Settings::default()),
    };
    match std::fs::read_to_string(&path) {
        Ok(text) => parse_file(&path, &text),
        Err(e) if !asked && is_absent(&e) => Ok(Settings::default()),
        Err(e) => Err(usage(format!(
            "cannot read the config file {}: {e}",
            path.display()
        ))),
    }
}

impl Config {
    /// Reads the file that `cli` names, or the default one, and resolves all settings.
    ///
    /// # Errors
    /// [`Exit::Usage`] for a file that cannot be read or a value that makes no sense.
    pub fn load(cli: Cli, around: &Surroundings) -> Result<Config, Failure> {
        let file = read_file(&cli, around)?;
        let mut config = Config::resolve(cli, file, around)?;
        if let Some(path) = &config.models_config {
            let policy = ModelPolicy::load(path).map_err(usage)?;
            for (name, path) in &policy.models {
                let has = |known: &ConfiguredModel| {
                    known.name == *name || known.serving.aliases.contains(&name.to_string())
                };
                if config.models.iter().any(has) {
                    return Err(usage(format!("models: {name} is in both config files")));
                }
                config
                    .models
                    .push(ConfiguredModel::plain(name.clone(), path.clone()));
            }
            config.model_policy = Arc::new(policy);
        }
        Ok(config)
    }

    /// Puts `cli` over `file` over the defaults.
    ///
    /// # Errors
    /// [`Exit::Usage`] for a value that makes no sense.
    pub fn resolve(cli: Cli, file: Settings, around: &Surroundings) -> Result<Config, Failure> {
        let private = cli.private_fd.is_some();
        let s = cli.settings.over(file);
        let time = |span: Option<Span>, default: Duration| span.map_or(default, |s| s.0);
        // A private one serves what it was given; the file and the environment are about the host's.
        let models = s.models.filter(|_| !private).unwrap_or_default().0;
        let default_model = s
            .default_model
            .filter(|_| !private)
            .map(ModelName::new)
            .transpose()
            .map_err(|e| usage(format!("default_model: {e}")))?;
        let restart = Policy {
            budget: s.restart_budget.unwrap_or(20),
            window: time(s.restart_window, Duration::from_secs(60)),
            backoff: time(s.restart_backoff, Duration::from_millis(50)),
            backoff_max: time(s.restart_backoff_max, Duration::from_secs(5)),
            start_timeout: time(s.start_timeout, Duration::from_secs(30)),
            stop_timeout: Duration::from_secs(1),
        };
        if restart.budget == 0 || restart.budget > 10_000 {
            return Err(usage("restart_budget must be between 1 and 10000"));
        }
        if restart.backoff > restart.backoff_max {
            return Err(usage(
                "restart_backoff must not be greater than restart_backoff_max",
            ));
        }
        let suspicion = suspicion::Policy {
            suspect_after: s.suspect_after.unwrap_or(2),
            continuations: limits::MAX_CONTINUATIONS,
        };
        if suspicion.suspect_after == 0 {
            return Err(usage("suspect_after must be at least 1"));
        }
        let members = |given: Option<Members>| given.map_or(1, |members| members.0);
        let (tensor_parallel, pipeline_parallel) =
            (members(s.tensor_parallel), members(s.pipeline_parallel));
        if tensor_parallel > 1 && pipeline_parallel > 1 {
            return Err(usage(
                "tensor_parallel and pipeline_parallel cannot both be more than 1; choose one",
            ));
        }
        let binary = match (s.worker_binary, &around.executable) {
            (Some(path), _) => path,
            (None, Some(own)) => own.with_file_name("hotcell-worker"),
            (None, None) => {
                return Err(usage(
                    "cannot tell where this program is; say where the worker is with --worker-binary PATH",
                ));
            }
        };
        let listen = s.listen.filter(|_| !private);
        let access = match private {
            true => AccessConfig::default(),
            false => AccessConfig {
                tls: tls_files((s.tls_cert, s.tls_key, s.tls_client_ca), s.tls_doors)?,
                tokens: s.tokens,
                users: s.allow_uid.unwrap_or_default().0,
                proxies: s.trusted_proxies.unwrap_or_default(),
            },
        };
        let http = s.http.filter(|_| !private);
        check_reach("--listen", (listen, TlsDoor::Grpc), &access)?;
        check_reach("--http", (http, TlsDoor::Http), &access)?;
        let log = s.log.unwrap_or_else(|| "info".to_owned());
        Ok(Config {
            socket: (!private).then(|| {
                s.socket
                    .unwrap_or_else(|| default_socket(around.runtime_dir.as_deref(), around.uid))
            }),
            listen,
            http,
            // One that is named twice is served once.
            protocols: Protocol::value_variants()
                .iter()
                .copied()
                .filter(|known| s.protocols.as_ref().is_none_or(|n| n.contains(known)))
                .collect(),
            web_origins: s.web_origins.unwrap_or_default(),
            access,
            private_fd: cli.private_fd,
            devices: s.devices.unwrap_or_default(),
            models,
            device_memory: s.device_memory,
            bundled: cli.bundled,
            model_roots: s.model_roots.unwrap_or_default(),
            models_config: s.models_config.filter(|_| !private),
            model_policy: Arc::default(),
            audit_log: s.audit_log.filter(|_| !private),
            graphs: s.graphs.filter(|_| !private),
            default_model,
            worker: WorkerConfig {
                binary,
                kv_cache: s.kv_cache.unwrap_or_default(),
                model_memory: s.model_memory,
                log: values::plain_level(&log),
                require_confinement: s.require_confinement.unwrap_or(false),
                pin: s.pin.unwrap_or(false),
                tensor_parallel,
                pipeline_parallel,
                memory: s.worker_memory,
            },
            control_group: s.control_group,
            packs: (!s.no_pack.unwrap_or(false)).then(|| PackConfig {
                folder: s
                    .pack_dir
                    .or_else(|| around.cache.as_ref().map(|cache| cache.join("packed"))),
                limit: s.pack_limit,
            }),
            timeouts: Timeouts {
                probe: time(s.probe_timeout, Duration::from_secs(10)),
                resume: time(s.continue_timeout, Duration::from_secs(30)),
                queue: time(s.queue_timeout, Duration::from_secs(60)),
                reattach: time(s.reattach_timeout, Duration::from_secs(60)),
                drain: time(s.drain_timeout, Duration::from_secs(30)),
                drain_delay: time(s.drain_delay, Duration::ZERO),
            },
            drain_to: match private {
                true => None,
                false => drain_to(s.drain_to, s.drain_to_token_file, s.drain_to_ca)?,
            },
            restart,
            suspicion,
            standby: s.standby.unwrap_or(false),
            patience: Patience {
                engine: time(s.hang_timeout, Duration::from_secs(30)),
                // It has nothing long to do; only a machine that is short of everything keeps it waiting.
                events: time(s.hang_timeout, Duration::from_secs(30)),
            },
            crash_dir: s.crash_dir,
            checks: s
                .check_interval
                .map_or(Some(Duration::from_secs(60)), |every| every.0)
                .map(|interval| Pace {
                    interval,
                    share: s.check_share.unwrap_or(known::SHARE),
                }),
            traces: match private {
                true => None,
                false => around.traces((s.otlp_endpoint, s.otlp_ca), s.otlp_sample)?,
            },
            log,
            log_json: s.log_json.unwrap_or(false),
        })
    }
}

#[cfg(test)]
mod tests;

//! Starting a worker's process and the sockets it is born with.

use std::{
    future::Future,
    io,
    os::fd::OwnedFd,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use hotcell_ipc::{
    blackbox::{self, Reader},
    group::{Group, Groups},
    log::{BoundedLog, LogLimits},
    oom::OomCounts,
    socket::{descriptor_pair, stream_pair},
    spawn::{Child, Command, ExitStatus, Signal, Spawner},
    transport::{Windows, channel_on, channel_over},
};
use hotcell_proto::{limits, v1::Device};
use rustix::process::{Resource, getrlimit};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    task::JoinHandle,
};
use tonic::transport::Channel;

use crate::{
    config::WorkerConfig,
    death::{Ended, Shortage},
    discover::WORKER_ENVIRONMENT,
};

/// A boxed future, for the traits here.
pub type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Which worker to start.
#[derive(Clone, Copy, Debug)]
pub struct Order<'a> {
    /// Its name.
    pub worker: &'a str,
    /// Counts its processes.
    pub epoch: u64,
    /// Its device.
    pub device: &'a Device,
    /// What it may take; none: as the host's own.
    pub allowance: Option<Allowance>,
    /// What it is there for.
    pub role: Role,
}

/// What a worker is there for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// To serve clients.
    Serves,
    /// To run again what was computed, for who looks into it.
    Replays {
        /// Whether it takes turns with those who serve, instead of running on the time that they leave.
        hurries: bool,
    },
}

/// What a worker for one model may take at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowance {
    /// Bytes of memory of its own.
    pub memory: u64,
    /// Threads that compute.
    pub threads: usize,
    /// Tokens of one sequence, prompt and answer together.
    pub tokens: u32,
    /// How long loading may take, progress or not.
    pub load_time: Duration,
}

impl Default for Allowance {
    fn default() -> Self {
        Self {
            memory: 8 << 30,
            threads: 4,
            tokens: 32 << 10,
            load_time: Duration::from_secs(120),
        }
    }
}

impl Allowance {
    /// The last ones of a device's cores: its own worker begins with the first.
    fn cores(&self, cores: &[u32]) -> Vec<u32> {
        let spare = cores.len().saturating_sub(self.threads.max(1));
        cores.iter().skip(spare).copied().collect()
    }

    /// Bytes for a model's cache and work, so that the rest of the process fits beside it.
    fn model_memory(&self, configured: Option<u64>) -> u64 {
        configured.unwrap_or(u64::MAX).min(self.memory / 2)
    }
}

/// Carries bytes both ways.
pub trait Duplex: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Duplex for T {}

/// Our end of a connection to a worker.
pub enum Wire {
    /// A stream socket.
    Socket(OwnedFd),
    /// A connection within this process, for workers that are simulated.
    Memory(Box<dyn Duplex>),
}

impl Wire {
    /// A gRPC channel over it, which has this one connection and no other.
    pub(crate) async fn channel(self, windows: Windows) -> io::Result<Channel> {
        match self {
            Wire::Socket(fd) => channel_over(fd, windows).await,
            Wire::Memory(stream) => channel_on(stream, windows).await,
        }
    }
}

impl From<OwnedFd> for Wire {
    fn from(fd: OwnedFd) -> Self {
        Wire::Socket(fd)
    }
}

/// A running worker: its process, and our ends of its sockets.
pub struct Launched {
    /// The process.
    pub process: Box<dyn Process>,
    /// Worker and health.
    pub control: Wire,
    /// Tokens.
    pub tokens: Wire,
    /// Tensors.
    pub tensors: Wire,
    /// Descriptors go out here.
    pub descriptors: OwnedFd,
}

/// Makes a connection for tensors within this process.
pub type TensorDoor = Arc<dyn Fn() -> Wire + Send + Sync>;

/// What of a process is handed to a program that takes this one's place, besides its connections.
#[derive(Debug)]
pub struct Handover {
    /// Its black box.
    pub blackbox: OwnedFd,
    /// Where its log comes from.
    pub log: OwnedFd,
    lines: BoundedLog,
}

impl Handover {
    /// What it said last.
    pub fn lines(&self) -> Vec<String> {
        self.lines.lines()
    }
}

/// A worker's process; dropping it kills it.
pub trait Process: Send + Sync {
    /// Its id, for messages and `/proc`.
    fn pid(&self) -> u32;

    /// Asks it to end.
    fn terminate(&self);

    /// Ends it.
    fn kill(&self);

    /// Says whose process of which epoch it is from now on: a standby took a worker's place.
    fn rename(&mut self, worker: &str, epoch: u64) {
        let _ = (worker, epoch);
    }

    /// What it writes about itself.
    fn blackbox(&self) -> Option<&Arc<Reader>> {
        None
    }

    /// How to come to a connection for tensors if not by a descriptor: that of a worker that is simulated.
    fn tensor_door(&self) -> Option<TensorDoor> {
        None
    }

    /// What of it is handed on, if it can be.
    fn handover(&self) -> Option<Arc<Handover>> {
        None
    }

    /// Has one of its threads write into the black box where it is, if it can.
    fn point_out(&self, thread: i32) {
        let _ = thread;
    }

    /// Waits for its end. May be dropped and called again.
    fn wait(&mut self) -> Boxed<'_, Ended>;
}

/// Starts workers. Tests have their own.
pub trait Launch: Send + Sync + 'static {
    /// Starts one.
    fn launch<'a>(&'a self, order: Order<'a>) -> Boxed<'a, io::Result<Launched>>;

    /// A number from 0 to 1 that spreads the pauses before restarts.
    fn jitter(&self) -> f64 {
        // Without random numbers the pause is merely not spread.
        f64::from(getrandom::u32().unwrap_or(u32::MAX)) / f64::from(u32::MAX)
    }
}

/// Starts workers as processes.
#[derive(Debug)]
pub struct Processes {
    spawner: Spawner,
    config: WorkerConfig,
    groups: Option<Groups>,
    /// Kills for memory that a death was blamed on: one kill explains one death.
    blamed: Arc<AtomicU64>,
}

/// The numbers at which a worker finds its sockets.
const CONTROL_FD: i32 = 3;
const TOKENS_FD: i32 = 4;
const TENSORS_FD: i32 = 5;
const DESCRIPTORS_FD: i32 = 6;
const BLACKBOX_FD: i32 = 7;

impl Processes {
    /// Workers of this configuration.
    pub fn new(spawner: Spawner, config: WorkerConfig) -> Self {
        Self {
            spawner,
            config,
            groups: None,
            blamed: Arc::default(),
        }
    }

    /// Gives each worker a control group of its own, if there is a place for them.
    #[must_use]
    pub fn grouped(mut self, groups: Option<Groups>) -> Self {
        self.groups = groups;
        self
    }

    async fn start(&self, order: Order<'_>) -> io::Result<Launched> {
        let (control, its_control) = stream_pair()?;
        let (tokens, its_tokens) = stream_pair()?;
        let (tensors, its_tensors) = stream_pair()?;
        let (descriptors, its_descriptors) = descriptor_pair()?;
        let memory = blackbox::make()?;
        let held = memory.try_clone()?;
        let cores = match &order.allowance {
            Some(allowance) => allowance.cores(&order.device.cores),
            None => order.device.cores.clone(),
        };
        let cores: Vec<String> = cores.iter().map(u32::to_string).collect();
        let mut command = Command::new(self.config.program(order.device))
            .arg("serve")
            .arg("--device")
            .arg(&order.device.id)
            .arg("--worker-id")
            .arg(order.worker);
        if !cores.is_empty() {
            command = command.arg("--cores").arg(cores.join(","));
        }
        for (flag, fd, number) in [
            ("--control-fd", its_control, CONTROL_FD),
            ("--tokens-fd", its_tokens, TOKENS_FD),
            ("--tensors-fd", its_tensors, TENSORS_FD),
            ("--descriptors-fd", its_descriptors, DESCRIPTORS_FD),
            ("--blackbox-fd", memory, BLACKBOX_FD),
        ] {
            command = command.arg(flag).arg(number.to_string()).fd(fd, number);
        }
        command = command
            .arg("--kv-cache")
            .arg(self.config.kv_cache.to_string())
            .arg("--log")
            .arg(self.config.log)
            .inherit_env(WORKER_ENVIRONMENT);
        let configured = self.config.model_memory;
        let model_memory = match &order.allowance {
            Some(allowance) => Some(allowance.model_memory(configured)),
            None => configured,
        };
        if let Some(bytes) = model_memory {
            command = command.arg("--model-memory").arg(bytes.to_string());
        }
        if self.config.require_confinement {
            command = command.arg("--require-confinement");
        }
        // Who computes beside a device's own worker has no core of its own.
        let own = order.role == Role::Serves && order.allowance.is_none();
        if self.config.pin && own {
            command = command.arg("--pin");
        }
        // The host's own workers: who computes for others' eyes, or a stranger's model, is small. Members share the processor;
        // of other kinds each has a device of its own.
        let enough = |members| match order.device.backend.as_str() {
            "cpu" => true,
            _ => order.device.members.len() + 1 == members,
        };
        let together = [
            ("--tensor-parallel", self.config.tensor_parallel),
            ("--pipeline-parallel", self.config.pipeline_parallel),
        ];
        for (flag, members) in together {
            if members > 1 && own && enough(members) {
                command = command.arg(flag).arg(members.to_string());
            }
        }
        if let Role::Replays { hurries } = order.role {
            command = command.arg("--follow");
            if !hurries {
                command = command.arg("--background");
                command.background = true;
            }
        }
        if let Some(allowance) = order.allowance {
            let tokens = allowance.tokens.to_string();
            command = command.arg("--max-context").arg(tokens);
            command.data = Some(allowance.memory);
        }
        command.nofile = Some(file_limit());
        let all = order.device.members.len() as u64 + 1;
        let memory = order.device.memory_bytes.saturating_mul(all);
        let memory = self.config.memory.unwrap_or(memory);
        let memory = order.allowance.map_or(memory, |a| memory.min(a.memory));
        let group = match &self.groups {
            Some(groups) if memory > 0 => {
                let group = groups.make(memory)?;
                command.group = Some(group.door()?);
                Some(group)
            }
            _ => None,
        };
        let before = self.counters();
        let child = self.spawner.spawn(command).await?;
        let name = (order.worker.to_owned(), order.epoch);
        let mut worker = self.worker(child, name, held, before, Vec::new())?;
        worker.group = group;
        Ok(Launched {
            process: Box::new(worker),
            control: control.into(),
            tokens: tokens.into(),
            tensors: tensors.into(),
            descriptors,
        })
    }

    /// Takes charge of a worker that another program started: its process with its log, its black box, and what it said
    /// last.
    ///
    /// # Errors
    /// If log or black box cannot be used.
    pub fn adopt(
        &self,
        child: Child,
        (worker, epoch): (&str, u64),
        blackbox: OwnedFd,
        lines: Vec<String>,
    ) -> io::Result<Box<dyn Process>> {
        let name = (worker.to_owned(), epoch);
        let worker = self.worker(child, name, blackbox, self.counters(), lines)?;
        Ok(Box::new(worker))
    }

    /// What memory was short of so far, and how much of that is explained.
    fn counters(&self) -> (OomCounts, u64) {
        (OomCounts::read(), self.blamed.load(Ordering::Relaxed))
    }

    fn worker(
        &self,
        mut child: Child,
        name: (String, u64),
        blackbox: OwnedFd,
        (before, blamed_before): (OomCounts, u64),
        lines: Vec<String>,
    ) -> io::Result<Worker> {
        let reader = Reader::open(&blackbox)?;
        let name = Arc::new(Mutex::new(name));
        let stderr = child.stderr.take();
        let stderr = stderr.ok_or_else(|| io::Error::other("a worker without a log"))?;
        let held = stderr.try_clone()?;
        let limits = LogLimits {
            line_bytes: limits::MAX_LOG_LINE,
            lines: limits::KEPT_LOG_LINES,
            ..LogLimits::default()
        };
        let under = Arc::clone(&name);
        let (log, drained) = BoundedLog::start(stderr, limits, move |line| {
            let (worker, epoch) = &*named(&under);
            tracing::info!(target: "worker", worker, epoch, "{line}");
        })?;
        log.remember(lines);
        Ok(Worker {
            child,
            name,
            handover: Arc::new(Handover {
                blackbox,
                log: held,
                lines: log.clone(),
            }),
            log,
            drained,
            blackbox: Arc::new(reader),
            before,
            blamed_before,
            blamed: Arc::clone(&self.blamed),
            group: None,
            shortage: None,
        })
    }
}

/// Most files a worker may have open: all of a model's and to spare, and never more than this process's limit,
/// which only root may raise.
fn file_limit() -> u64 {
    let own = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    own.min(4 * limits::MAX_MODEL_FILES as u64)
}

impl Launch for Processes {
    fn launch<'a>(&'a self, order: Order<'a>) -> Boxed<'a, io::Result<Launched>> {
        Box::pin(self.start(order))
    }
}

/// Under which name and epoch a process logs.
type Name = Arc<Mutex<(String, u64)>>;

fn named(name: &Name) -> MutexGuard<'_, (String, u64)> {
    name.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Worker {
    child: Child,
    name: Name,
    log: BoundedLog,
    drained: JoinHandle<io::Result<()>>,
    blackbox: Arc<Reader>,
    handover: Arc<Handover>,
    /// Counters when it was started.
    before: OomCounts,
    blamed_before: u64,
    blamed: Arc<AtomicU64>,
    /// Its own; removed after its process, which is dropped before.
    group: Option<Group>,
    /// Once it was killed.
    shortage: Option<Shortage>,
}

impl Worker {
    fn signal(&self, signal: Signal) {
        if let Err(error) = self.child.kill(signal) {
            tracing::warn!(pid = self.child.pid(), %error, "cannot signal a worker");
        }
    }

    /// Whether memory was short when it was killed.
    fn shortage(&mut self) -> Shortage {
        let child = &self.child;
        let own = self.group.as_ref().map(Group::counts);
        let (before, blamed_before, blamed) = (&self.before, self.blamed_before, &self.blamed);
        *self.shortage.get_or_insert_with(|| {
            let mut counted = OomCounts::read().since(before);
            if let Some(own) = own.filter(|own| own.group.is_some()) {
                // Nobody else is in it.
                return Shortage {
                    counted: OomCounts {
                        host: counted.host,
                        ..own
                    },
                    peak_resident: child.peak_resident(),
                };
            }
            if let Some(kills) = &mut counted.group {
                let others = blamed.load(Ordering::Relaxed).saturating_sub(blamed_before);
                *kills = kills.saturating_sub(others);
                if *kills > 0 {
                    blamed.fetch_add(1, Ordering::Relaxed);
                }
            }
            Shortage {
                counted,
                peak_resident: child.peak_resident(),
            }
        })
    }
}

impl Process for Worker {
    fn pid(&self) -> u32 {
        self.child.pid()
    }

    fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    fn kill(&self) {
        self.signal(Signal::KILL);
    }

    fn rename(&mut self, worker: &str, epoch: u64) {
        *named(&self.name) = (worker.to_owned(), epoch);
    }

    fn blackbox(&self) -> Option<&Arc<Reader>> {
        Some(&self.blackbox)
    }

    fn handover(&self) -> Option<Arc<Handover>> {
        Some(Arc::clone(&self.handover))
    }

    fn point_out(&self, thread: i32) {
        if let Err(error) = self.child.signal_thread(thread, blackbox::POINT_OUT) {
            tracing::debug!(pid = self.child.pid(), thread, %error, "cannot signal a thread");
        }
    }

    fn wait(&mut self) -> Boxed<'_, Ended> {
        Box::pin(async {
            let status = match self.child.wait().await {
                Ok(status) => Some(status),
                Err(error) => {
                    tracing::warn!(pid = self.child.pid(), %error, "cannot tell how a worker ended");
                    None
                }
            };
            let shortage = match status {
                Some(ExitStatus::Signal { signal, .. }) if signal == Signal::KILL.as_raw() => {
                    self.shortage()
                }
                _ => Shortage::default(),
            };
            // A program that gives up says why, last; by its words an abort for want of memory is told from others.
            // One that was killed is not waited for: a stream may hang on the next one's start.
            let gave_up = match status {
                Some(ExitStatus::Code(code)) => code != 0,
                Some(ExitStatus::Signal { signal, .. }) => signal == Signal::ABORT.as_raw(),
                None => false,
            };
            if gave_up && !self.drained.is_finished() {
                let _ = tokio::time::timeout(Duration::from_millis(50), &mut self.drained).await;
            }
            Ended {
                status,
                last_lines: self.log.lines(),
                shortage,
            }
        })
    }
}

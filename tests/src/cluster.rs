//! The one fixture: real processes of the real binaries, in a folder of their own.

use std::{
    fs::Permissions,
    io::{BufRead, BufReader},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::{Arc, Mutex, Once, OnceLock},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use hotcell_client::{Address, Client, v1};
use tempfile::TempDir;

/// How long anything that should happen soon may take on a busy machine.
pub const SOON: Duration = Duration::from_secs(30);

/// The bundled model's folder.
pub fn kjv() -> PathBuf {
    repository().join("deploy/models/kjv")
}

/// Makes a folder with a copy of what a worker reads of the bundled model.
///
/// # Errors
/// When it cannot be made.
pub fn copy_kjv(to: &Path) -> std::io::Result<()> {
    std::fs::create_dir(to)?;
    for file in [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        std::fs::copy(kjv().join(file), to.join(file))?;
    }
    Ok(())
}

/// A golden model's path.
pub fn golden(name: &str) -> PathBuf {
    repository().join("tests/golden/models").join(name)
}

/// A new folder that is this user's alone, as a scheduler wants the one of its socket to be.
///
/// # Errors
/// When none can be made.
pub fn private_folder() -> std::io::Result<TempDir> {
    let own = Permissions::from_mode(0o700);
    tempfile::Builder::new().permissions(own).tempdir()
}

/// The root of the repository; where `HOTCELL_REPOSITORY` says, for tests that are taken to another machine
/// (`deploy/gpu-check`).
pub fn repository() -> PathBuf {
    if let Some(there) = std::env::var_os("HOTCELL_REPOSITORY") {
        return there.into();
    }
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}

/// Builds the binaries in the profile that this test was built in, once per process, and returns their
/// folder. `cargo test -p hotcell-tests` builds no other package's binaries by itself.
///
/// # Errors
/// When cargo fails.
pub fn binaries() -> Result<PathBuf> {
    // Tests outside of this workspace say where they are.
    if let Some(there) = std::env::var_os("HOTCELL_TEST_BINARIES") {
        return Ok(there.into());
    }
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let packages = ["hotcell-worker", "hotcell-scheduler", "hotcell-client"];
    let built = BUILT.get_or_init(|| build(&packages, "--bins").map_err(|e| format!("{e:#}")));
    built.clone().map_err(anyhow::Error::msg)
}

/// Builds the client's examples. Where they are.
///
/// # Errors
/// When cargo fails.
pub fn examples() -> Result<PathBuf> {
    Ok(build(&["hotcell-client"], "--examples")?.join("examples"))
}

pub(crate) fn build(packages: &[&str], what: &str) -> Result<PathBuf> {
    let this = std::env::current_exe()?;
    // target/PROFILE/deps/this-test
    let folder = this
        .ancestors()
        .nth(2)
        .context("no target folder")?
        .to_owned();
    let target = folder.parent().context("no target folder")?;
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .args(["build", "--quiet"])
        .current_dir(repository())
        .arg("--target-dir")
        .arg(target);
    // What cargo told this test about its package would look like a change to build scripts that read it (ring's does),
    // and much would be compiled once more, now here and then outside.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            cargo.env_remove(&name);
        }
    }
    for package in packages {
        cargo.args(["-p", package]);
    }
    cargo.arg(what);
    match folder.file_name().and_then(|n| n.to_str()) {
        // A test along with them, so that everything has the features that it had when this test was built, tokio's
        // paused clock for one: else all of it would be compiled once more. Benches measure it as it is shipped.
        Some("debug") => {
            cargo.args(["-p", "hotcell-tests", "--test", "tidy"]);
        }
        Some(profile) => {
            cargo.args(["--profile", profile]);
        }
        None => bail!("no profile in {}", folder.display()),
    }
    let output = cargo.output()?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(folder)
}

/// An address of this host that nobody listens on.
///
/// # Errors
/// When there is none.
pub fn free_address() -> Result<std::net::SocketAddr> {
    let free = std::net::TcpListener::bind("127.0.0.1:0")?;
    Ok(free.local_addr()?)
}

/// Tokens of the prompt and of the answer. What a worker knew of the prompt from before is its own, and another one may
/// know more or less.
pub fn counted(finished: &v1::Finished) -> Option<(u32, u32)> {
    finished
        .usage
        .map(|u| (u.prompt_tokens, u.generated_tokens))
}

/// A child that is killed when the test ends, however it ends.
pub struct Process {
    child: Child,
    log: Arc<Mutex<Vec<String>>>,
}

impl Process {
    /// Starts a program and keeps what it says on standard error.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(command: &mut Command) -> Result<Self> {
        end_in_time();
        let mut child = command
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let log = Arc::<Mutex<Vec<String>>>::default();
        if let Some(stderr) = child.stderr.take() {
            let log = Arc::clone(&log);
            thread::spawn(move || {
                for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                    log.lock().unwrap_or_else(|e| e.into_inner()).push(line);
                }
            });
        }
        Ok(Self { child, log })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it said so far.
    pub fn log(&self) -> String {
        self.log
            .lock()
            .unwrap_or_else(|e| e.into_inner())
            .join("\n")
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// When it is gone.
    pub fn signal(&self, signal: rustix::process::Signal) -> Result<()> {
        signal_pid(self.pid(), signal)
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// When it does not end soon.
    pub fn wait(&mut self) -> Result<std::process::ExitStatus> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            ensure!(
                start.elapsed() < SOON,
                "still running; it said:\n{}",
                self.log()
            );
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("--- process {} said:\n{}", self.child.id(), self.log());
        }
    }
}

/// Sends a signal to any process.
///
/// # Errors
/// When it is gone.
pub fn signal_pid(pid: u32, signal: rustix::process::Signal) -> Result<()> {
    let pid = rustix::process::Pid::from_raw(pid as i32).context("no pid")?;
    Ok(rustix::process::kill_process(pid, signal)?)
}

/// How long the tests of one program may take together, on a busy machine as well. Benchmarks take what they take.
const PATIENCE: Duration = Duration::from_secs(15 * 60);

/// Ends this program when its tests do not: one that waits for ever would cost whoever runs them all their time, and say
/// nothing.
fn end_in_time() {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // Cargo says so to benchmarks; what is no test lies elsewhere than tests do.
        let here = std::env::current_exe().unwrap_or_default();
        let is_test = here.parent().is_some_and(|folder| folder.ends_with("deps"));
        if !is_test || std::env::args().any(|argument| argument == "--bench") {
            return;
        }
        thread::spawn(|| {
            thread::sleep(PATIENCE);
            eprintln!("the tests of this program did not end within {PATIENCE:?}; its children:");
            for pid in children(std::process::id()).unwrap_or_default() {
                let about = |name| std::fs::read_to_string(format!("/proc/{pid}/{name}"));
                let command = about("cmdline").unwrap_or_default().replace('\0', " ");
                let wchan = about("wchan").unwrap_or_default();
                eprintln!("  {pid} [{wchan}] {command}");
            }
            std::process::exit(124);
        });
    });
}

/// Whether a process is there, and has not ended.
pub fn lives(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(')').next().unwrap_or_default().trim_start();
    !matches!(state.chars().next(), None | Some('Z' | 'X'))
}

/// The program that a process runs.
///
/// # Errors
/// When it is gone.
pub fn program(pid: u32) -> Result<PathBuf> {
    Ok(std::fs::read_link(format!("/proc/{pid}/exe"))?)
}

/// Children of a process, those that are dead and not reaped included.
///
/// # Errors
/// When it is gone.
pub fn children(pid: u32) -> Result<Vec<u32>> {
    let mut all = Vec::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread may end meanwhile.
        let listed = std::fs::read_to_string(task?.path().join("children")).unwrap_or_default();
        all.extend(
            listed
                .split_whitespace()
                .filter_map(|id| id.parse::<u32>().ok()),
        );
    }
    all.sort_unstable();
    Ok(all)
}

/// A process's resident bytes.
///
/// # Errors
/// When it is gone.
pub fn resident(pid: u32) -> Result<i64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    let kib: i64 = line
        .and_then(|l| l.trim().strip_suffix(" kB"))
        .context("no VmRSS")?
        .trim()
        .parse()?;
    Ok(kib * 1024)
}

/// The most bytes that a process had resident.
///
/// # Errors
/// When it is gone.
pub fn most_resident(pid: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    let kib = line.and_then(|l| l.split_whitespace().next());
    let kib: u64 = kib.context("no VmHWM")?.parse()?;
    Ok(kib << 10)
}

/// A process's resident bytes and open descriptors.
///
/// # Errors
/// When it is gone, or another user's.
pub fn holds(pid: u32) -> Result<(i64, i64)> {
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd"))?.count();
    Ok((resident(pid)?, descriptors as i64))
}

/// Seconds of a processor that a process has used so far, in user and kernel mode, by all its threads.
///
/// # Errors
/// When it is gone.
pub fn cpu_seconds(pid: u32) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // After the name, which may hold anything: state is the third field, time in user and kernel mode the 14th and 15th.
    let (_, fields) = stat.rsplit_once(')').context("no name")?;
    let ticks = fields.split_whitespace().skip(11).take(2);
    let ticks: f64 = ticks.map(str::parse::<f64>).sum::<Result<f64, _>>()?;
    Ok(ticks / rustix::param::clock_ticks_per_second() as f64)
}

/// A scheduler with its workers on a Unix socket.
pub struct Cluster {
    /// The scheduler.
    pub scheduler: Process,
    /// Its socket.
    pub socket: PathBuf,
    /// Where it and its socket live.
    pub folder: TempDir,
}

/// Further arguments of a scheduler for a test that is also compiled as one of the worker that is linked with MLX
/// (`worker/mlx/tests/client.rs`): there, that its workers are such.
#[macro_export]
macro_rules! worker_tested {
    () => {
        match option_env!("CARGO_BIN_EXE_hotcell-worker-mlx") {
            Some(program) => &["--worker-binary", program],
            None => &[],
        }
    };
}

impl Cluster {
    /// A scheduler without further arguments, all of whose workers are ready.
    ///
    /// # Errors
    /// As [`Cluster::start`], or when the workers do not come up in time.
    pub async fn ready() -> Result<Self> {
        Self::ready_with(&[]).await
    }

    /// The same, with these further arguments.
    ///
    /// # Errors
    /// As [`Cluster::ready`].
    pub async fn ready_with(arguments: &[&str]) -> Result<Self> {
        let cluster = Self::start(arguments).await?;
        let ready = |workers: &[v1::WorkerInfo]| {
            !workers.is_empty() && workers.iter().all(|w| w.state() == v1::WorkerState::Ready)
        };
        cluster.workers(ready).await?;
        Ok(cluster)
    }

    /// Starts a scheduler with these further arguments and waits until it answers.
    ///
    /// # Errors
    /// When it does not.
    pub async fn start(arguments: &[&str]) -> Result<Self> {
        let folder = private_folder()?;
        let socket = folder.path().join("hotcell.sock");
        let mut command = Command::new(binaries()?.join("hotcell-scheduler"));
        command.arg("--socket").arg(&socket).args(arguments);
        // Nothing of the machine's own configuration.
        command
            .env_clear()
            .env("XDG_CONFIG_HOME", folder.path())
            .env("XDG_CACHE_HOME", folder.path())
            .current_dir(folder.path());
        let mut passed = vec!["HOTCELL_CPU_PATH"];
        if std::env::var_os("HOTCELL_GPU").is_some() {
            // Where this machine has its driver.
            passed.extend(["LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES"]);
        }
        for name in passed {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        let scheduler = Process::start(&mut command)?;
        let cluster = Self {
            scheduler,
            socket,
            folder,
        };
        let start = Instant::now();
        while cluster.client().await.is_err() {
            ensure!(
                start.elapsed() < SOON,
                "no scheduler:\n{}",
                cluster.scheduler.log()
            );
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(cluster)
    }

    /// Starts a scheduler with one model loaded and waits until a worker has it.
    ///
    /// # Errors
    /// When that does not happen.
    pub async fn with_model(name: &str, path: &Path, arguments: &[&str]) -> Result<Self> {
        let cluster = Self::start(arguments).await?;
        let path = path.to_str().context("path is not UTF-8")?;
        cluster.client().await?.load(name, path).await?;
        Ok(cluster)
    }

    /// A new connection.
    ///
    /// # Errors
    /// When the scheduler does not answer.
    pub async fn client(&self) -> Result<Client> {
        let address: Address = format!("unix:{}", self.socket.display()).parse()?;
        Ok(Client::connect(&address).await?)
    }

    /// The workers, once `ready` says that they are as wanted.
    ///
    /// # Errors
    /// When that does not happen soon.
    pub async fn workers(
        &self,
        ready: impl Fn(&[v1::WorkerInfo]) -> bool,
    ) -> Result<Vec<v1::WorkerInfo>> {
        let client = self.client().await?;
        let start = Instant::now();
        loop {
            let workers = client.workers().await?;
            if ready(&workers) {
                return Ok(workers);
            }
            ensure!(
                start.elapsed() < SOON,
                "workers are {workers:#?}\n{}",
                self.scheduler.log()
            );
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// The command by which an operator has the scheduler replaced.
    ///
    /// # Errors
    /// When it cannot be built.
    pub fn takeover(&self, arguments: &[&str]) -> Result<Command> {
        let mut command = Command::new(binaries()?.join("hotcell-scheduler"));
        command
            .arg("--takeover")
            .arg("--socket")
            .arg(&self.socket)
            .args(arguments)
            .env_clear()
            .env("XDG_CONFIG_HOME", self.folder.path())
            .current_dir(self.folder.path());
        if let Ok(path) = std::env::var("HOTCELL_CPU_PATH") {
            command.env("HOTCELL_CPU_PATH", path);
        }
        Ok(command)
    }

    /// Runs the `hotcell` command against this scheduler.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn hotcell(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = hotcell(self.folder.path())?;
        command
            .arg("--address")
            .arg(format!("unix:{}", self.socket.display()));
        Ok(command.args(arguments).output()?)
    }
}

/// The `hotcell` command with an environment of its own.
///
/// # Errors
/// When it cannot be built.
pub fn hotcell(folder: &Path) -> Result<Command> {
    let mut command = Command::new(binaries()?.join("hotcell"));
    command
        .env_clear()
        .env("XDG_CONFIG_HOME", folder)
        .env("XDG_RUNTIME_DIR", folder)
        .current_dir(folder);
    command.stdin(Stdio::null());
    Ok(command)
}

/// The report of a process's death, once it is there.
///
/// # Errors
/// When it is not there soon.
pub async fn report(client: &Client, id: &str) -> Result<v1::CrashReport> {
    let start = Instant::now();
    loop {
        match client.crash(id).await {
            Ok(report) => return Ok(report),
            Err(error) => ensure!(start.elapsed() < SOON, "no report {id}: {error}"),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Whether this is a device's own worker, not one beside it such as w0.standby.
pub fn is_own(worker: &v1::WorkerInfo) -> bool {
    !worker.id.contains('.')
}

/// Whether every device's own worker is ready and has this model.
pub fn all_have(model: &'static str) -> impl Fn(&[v1::WorkerInfo]) -> bool {
    move |workers| {
        !workers.is_empty()
            && workers
                .iter()
                .filter(|w| is_own(w))
                .all(|w| w.state() == v1::WorkerState::Ready && w.models.iter().any(|m| m == model))
    }
}

//! A scheduler of one's own: a private one that ends with this process, or this process become one.
//!
//! The scheduler is a separate program, `hotcell-scheduler`, found beside this executable; it finds its worker
//! beside itself.

use std::{
    ffi::OsString,
    io,
    os::{
        fd::{AsRawFd, OwnedFd, RawFd},
        unix::process::CommandExt,
    },
    path::{Path, PathBuf},
    time::Duration,
};

use hotcell_ipc::{
    log::{BoundedLog, LogLimits},
    memory::sealed_memory,
    socket::stream_pair,
    spawn::{Child, Command, ExitStatus, Signal, Spawner},
};
use hotcell_proto::error::Error;
use tokio::task::JoinHandle;

use crate::connect::{ADDRESS_VARIABLE, Client, SOCKET_VARIABLE, cannot_start, is_unreachable};

/// File name of the scheduler's program.
pub const SCHEDULER: &str = "hotcell-scheduler";
/// The worker's program.
const WORKER: &str = "hotcell-worker";

/// Variables that tell a scheduler, or its clients, where it listens. A private one listens nowhere.
const DOORS: &[&str] = &[ADDRESS_VARIABLE, SOCKET_VARIABLE, "HOTCELL_LISTEN"];

/// How long a private scheduler may take to answer for the first time.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// How long it may take to end by itself before it is killed.
const STOP_TIMEOUT: Duration = Duration::from_millis(1500);
/// How long after a broken connection the scheduler's end may take to show.
const POST_MORTEM: Duration = Duration::from_millis(500);

/// One file of a model that is part of this program.
#[derive(Clone, Copy, Debug)]
pub struct BundledFile {
    /// Name inside the model's folder.
    pub name: &'static str,
    /// Its bytes.
    pub bytes: &'static [u8],
}

/// A model that is part of this program, so that a copied binary still works.
#[derive(Clone, Copy, Debug)]
pub struct Bundled {
    /// The name requests use.
    pub model: &'static str,
    /// Its files.
    pub files: &'static [BundledFile],
}

impl Bundled {
    /// Copies each file into sealed memory.
    fn descriptors(&self) -> io::Result<Vec<OwnedFd>> {
        let files = self.files.iter();
        files.map(|f| sealed_memory(f.name, f.bytes)).collect()
    }

    /// The flags that tell a scheduler at which numbers it finds the files.
    fn flags(&self, numbers: impl IntoIterator<Item = RawFd>) -> [OsString; 2] {
        let files: Vec<String> = (self.files.iter().zip(numbers))
            .map(|(file, number)| format!("{}={number}", file.name))
            .collect();
        let value = format!("{}:{}", self.model, files.join(","));
        ["--bundled".into(), value.into()]
    }
}

/// How to start a scheduler.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The scheduler's program.
    pub program: PathBuf,
    /// A model to hand over.
    pub bundled: Option<Bundled>,
    /// Further flags, passed as they are.
    pub flags: Vec<OsString>,
}

/// This program's own path, links resolved.
fn own_path() -> io::Result<PathBuf> {
    std::env::current_exe()?.canonicalize()
}

/// The worker's program, if it is installed beside this one.
pub(crate) fn worker_beside_this_program() -> Option<PathBuf> {
    let program = own_path().ok()?.parent()?.join(WORKER);
    program.is_file().then_some(program)
}

impl Launch {
    /// The scheduler beside this executable, without a model or flags.
    ///
    /// # Errors
    /// One for which [`is_unreachable`] holds when there is none.
    pub fn beside_this_program() -> Result<Self, Error> {
        let own = own_path().map_err(|e| {
            cannot_start(format!(
                "cannot tell where this program is installed: {e}; run it by its full path"
            ))
        })?;
        let program = own.parent().unwrap_or(Path::new("/")).join(SCHEDULER);
        if !program.is_file() {
            return Err(missing(&program));
        }
        Ok(Self {
            program,
            bundled: None,
            flags: Vec::new(),
        })
    }

    /// Replaces this process by the scheduler. Returns only if that failed.
    ///
    /// Call it before threads are started that have something to clean up.
    pub fn become_scheduler(self) -> Error {
        let run = || -> io::Result<io::Error> {
            let mut command = std::process::Command::new(&self.program);
            let descriptors = match &self.bundled {
                None => Vec::new(),
                Some(bundled) => bundled.descriptors()?,
            };
            for descriptor in &descriptors {
                rustix::io::fcntl_setfd(descriptor, rustix::io::FdFlags::empty())?;
            }
            if let Some(bundled) = &self.bundled {
                command.args(bundled.flags(descriptors.iter().map(AsRawFd::as_raw_fd)));
            }
            Ok(command.args(&self.flags).exec())
        };
        let error = run().unwrap_or_else(|e| e);
        not_started(&self.program, &error)
    }
}

/// A scheduler that serves this process alone, over a socketpair. It dies when this is dropped, and with this
/// process however that ends.
#[derive(Debug)]
pub struct PrivateScheduler {
    child: Child,
    log: BoundedLog,
    draining: JoinHandle<io::Result<()>>,
}

impl PrivateScheduler {
    /// Starts one and waits until it answers. Each line of its log goes to `on_line` too.
    ///
    /// # Errors
    /// One for which [`is_unreachable`] holds, with the scheduler's last words.
    pub async fn start(
        launch: Launch,
        on_line: impl FnMut(&str) + Send + 'static,
    ) -> Result<(Self, Client), Error> {
        let failed = |e: io::Error| not_started(&launch.program, &e);
        let (ours, theirs) = stream_pair().map_err(failed)?;
        let mut command = Command::new(&launch.program)
            .arg("--private-fd")
            .arg("3")
            .fd(theirs, 3);
        // Its own environment is ours; it hands its workers an allow-listed part. Names that cannot be passed on
        // are left out, and so is what says where to listen.
        for (name, value) in std::env::vars_os() {
            let text = name.to_string_lossy();
            let usable = !text.is_empty() && !text.contains('=');
            if usable && !DOORS.contains(&&*text) {
                command = command.env(name, value);
            }
        }
        if let Some(bundled) = &launch.bundled {
            command.args.extend(bundled.flags(4..));
            for (number, fd) in (4..).zip(bundled.descriptors().map_err(failed)?) {
                command = command.fd(fd, number);
            }
        }
        command.args.extend(launch.flags.iter().cloned());
        let spawner = Spawner::start().map_err(failed)?;
        let mut child = spawner.spawn(command).await.map_err(failed)?;
        let stderr = child.stderr.take();
        let stderr = stderr.ok_or_else(|| failed(io::Error::other("it has no standard error")))?;
        let (log, draining) =
            BoundedLog::start(stderr, LogLimits::default(), on_line).map_err(failed)?;
        let mut scheduler = Self {
            child,
            log,
            draining,
        };
        let answering = async {
            let client = Client::over(ours).await?;
            client.models().await?;
            Ok(client)
        };
        match tokio::time::timeout(START_TIMEOUT, answering).await {
            Ok(Ok(client)) => Ok((scheduler, client)),
            Ok(Err(error)) => Err(scheduler.explain(error).await),
            Err(_) => Err(cannot_start(format!(
                "the private scheduler did not answer within {START_TIMEOUT:?}; \
                 run `hotcell serve` to see what it is doing"
            ))),
        }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.pid()
    }

    /// The last lines of its log.
    pub fn log_lines(&self) -> Vec<String> {
        self.log.lines()
    }

    /// Says what became of the scheduler, if `error` is that it cannot be reached any more.
    pub async fn explain(&mut self, error: Error) -> Error {
        if !is_unreachable(&error) {
            return error;
        }
        let Ok(Ok(status)) = tokio::time::timeout(POST_MORTEM, self.child.wait()).await else {
            return error;
        };
        // Its last words may still be in the pipe.
        let _ = tokio::time::timeout(POST_MORTEM, &mut self.draining).await;
        cannot_start(ended(status, &self.log.lines()))
    }

    /// Asks it to end, and kills it if it does not.
    pub async fn stop(mut self) {
        // What fails here is done by dropping the child.
        let _ = self.child.kill(Signal::TERM);
        let _ = tokio::time::timeout(STOP_TIMEOUT, self.child.wait()).await;
    }
}

impl Drop for PrivateScheduler {
    fn drop(&mut self) {
        self.draining.abort();
    }
}

fn ended(status: ExitStatus, lines: &[String]) -> String {
    // Hints come after what is wrong.
    let last = |is: &dyn Fn(&str) -> bool| lines.iter().rev().find(|line| is(line.trim()));
    let words =
        last(&|line| line.starts_with("error: ")).or_else(|| last(&|line| !line.is_empty()));
    match words {
        Some(line) => {
            let line = line.trim();
            let line = line.strip_prefix("error: ").unwrap_or(line);
            format!("the private scheduler ended ({status}): {line}")
        }
        None => format!(
            "the private scheduler ended ({status}) without a word; \
             run `hotcell serve` to see what is wrong"
        ),
    }
}

fn missing(program: &Path) -> Error {
    cannot_start(format!(
        "the scheduler's program {} is missing; build or install the whole of Hotcell \
         (`cargo build --release` in its checkout), or name a running scheduler with --address",
        program.display()
    ))
}

fn not_started(program: &Path, error: &io::Error) -> Error {
    if error.kind() == io::ErrorKind::NotFound {
        return missing(program);
    }
    cannot_start(format!(
        "cannot start {}: {error}; check its permissions and the limits of this system",
        program.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TINY: Bundled = Bundled {
        model: "tiny",
        files: &[
            BundledFile {
                name: "config.json",
                bytes: b"{}",
            },
            BundledFile {
                name: "model.safetensors",
                bytes: b"error: weights\n",
            },
        ],
    };

    #[test]
    fn what_is_wrong_is_quoted_and_not_the_hint_after_it() {
        let status = ExitStatus::Code(2);
        let lines = |lines: &[&str]| lines.iter().map(|l| (*l).to_owned()).collect::<Vec<_>>();
        let said = lines(&[
            "x",
            "error: invalid value 'foo'",
            "",
            "For more information, try '--help'.",
            "",
        ]);
        let why = ended(status, &said);
        assert!(why.ends_with(": invalid value 'foo'"), "{why}");
        assert!(ended(status, &lines(&["x", "y", ""])).ends_with(": y"));
        assert!(ended(status, &[]).contains("hotcell serve"));
    }

    #[tokio::test]
    async fn a_scheduler_that_ends_at_once_is_quoted_and_finds_its_descriptors() {
        // A file of the repository: one written here could be open in a child of another test just forked.
        let launch = Launch {
            program: Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake/scheduler.sh"),
            bundled: Some(TINY),
            flags: vec!["--devices".into(), "cpu:2".into()],
        };
        let (sender, lines) = std::sync::mpsc::channel();
        let started = PrivateScheduler::start(launch, move |line| {
            let _ = sender.send(line.to_owned());
        });
        let error = started.await.unwrap_err();
        assert!(is_unreachable(&error), "{error}");
        assert_eq!(
            error.message(),
            "the private scheduler ended (exit code 3): weights"
        );
        let flags = "--bundled tiny:config.json=4,model.safetensors=5 --devices cpu:2";
        assert_eq!(lines.recv().unwrap(), format!("got --private-fd 3 {flags}"));
    }

    #[tokio::test]
    async fn a_missing_program_is_named() {
        let launch = Launch {
            program: PathBuf::from("/nowhere/hotcell-scheduler"),
            bundled: None,
            flags: Vec::new(),
        };
        let error = PrivateScheduler::start(launch, |_| {}).await.unwrap_err();
        assert!(is_unreachable(&error));
        assert!(error.message().contains("/nowhere/hotcell-scheduler"));
    }
}

//! Child processes that cannot outlive this one, and that inherit nothing which was not named.
//!
//! Not `tokio::process` and not `std::process`: `PR_SET_PDEATHSIG` fires when the spawning *thread* ends, and
//! tokio's blocking threads end; and `std` keeps its own pipe for exec's error open in the child, at a number
//! that may be one of those the caller wants to place something at.

use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, PoisonError, mpsc};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::pipe::PipeFlags;
use rustix::process::{Pid, PidfdFlags};

pub use crate::child::{Child, ExitStatus, Killer, Signal, signal_name};
use crate::image::Image;
use crate::{background, signals, terminal::Place, vfork::vfork};

/// Where a child's output goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// To `/dev/null`.
    Null,
    /// Where this process's goes.
    Inherit,
    /// To a pipe, whose reading end is in the [`Child`].
    Pipe,
}

/// A program to start. Its standard input is `/dev/null`, its umask 077, core dumps are off, signals are at
/// their defaults and unblocked, and SIGKILL comes if this process ends.
#[derive(Debug)]
pub struct Command {
    /// Path of the program; `PATH` is not searched.
    pub program: PathBuf,
    /// Arguments after the program's name.
    pub args: Vec<OsString>,
    /// The whole environment. Nothing is inherited.
    pub env: Vec<(OsString, OsString)>,
    /// Descriptors and the numbers, 3 or greater, at which the child finds them. It has no others. This
    /// process's are closed when the child runs, so that only the child holds its end of a pair.
    pub fds: Vec<(OwnedFd, RawFd)>,
    /// Its working folder, if not this process's.
    pub directory: Option<OwnedFd>,
    /// Standard output; [`Output::Null`] unless told.
    pub stdout: Output,
    /// Standard error; [`Output::Pipe`] unless told.
    pub stderr: Output,
    /// Whether it leads its own process group, away from a terminal's Ctrl-C, and a session too if this process's has a terminal
    /// or it is to be in the background ([`crate::terminal`] says why).
    pub apart: bool,
    /// Most open files (`RLIMIT_NOFILE`, soft and hard), if not this process's.
    pub nofile: Option<u64>,
    /// Most bytes of private writable memory (`RLIMIT_DATA`), if not this process's.
    pub data: Option<u64>,
    /// Whether it [gives way](crate::background::give_way) to all others, from its first instruction on, if the system lets it.
    pub background: bool,
    /// The [door](crate::group::Group::door) of a control group that it joins before its program begins.
    pub group: Option<OwnedFd>,
}

impl Command {
    /// A program without arguments, environment or descriptors, in its own process group.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Command {
            program: program.into(),
            args: Vec::new(),
            env: Vec::new(),
            fds: Vec::new(),
            directory: None,
            stdout: Output::Null,
            stderr: Output::Pipe,
            apart: true,
            nofile: None,
            data: None,
            background: false,
            group: None,
        }
    }

    /// Adds an argument.
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// Sets an environment variable, instead of an earlier one of that name.
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        let name = name.into();
        self.env.retain(|(other, _)| *other != name);
        self.env.push((name, value.into()));
        self
    }

    /// Passes on those of this process's environment variables that are set.
    pub fn inherit_env<'a>(mut self, names: impl IntoIterator<Item = &'a str>) -> Self {
        for name in names {
            if let Some(value) = std::env::var_os(name) {
                self = self.env(name, value);
            }
        }
        self
    }

    /// Places a descriptor at a number in the child.
    pub fn fd(mut self, fd: OwnedFd, target: RawFd) -> Self {
        self.fds.push((fd, target));
        self
    }
}

enum Request {
    Spawn(Command, Box<dyn FnOnce(io::Result<Child>) + Send>),
    Reap(Arc<OwnedFd>),
    Become(Image, mpsc::SyncSender<io::Error>),
    End,
}

/// How often the spawner looks after killed children that were not gone at once.
const REAP_EVERY: Duration = Duration::from_millis(20);

/// Starts children from the one thread of this process that never ends. Handles are cheap and all the same.
#[derive(Clone, Debug)]
pub struct Spawner {
    requests: mpsc::Sender<Request>,
}

// A static, so that the channel never closes and the thread never ends: each child's life hangs on it.
static SPAWNER: OnceLock<Spawner> = OnceLock::new();
static STARTING: std::sync::Mutex<()> = std::sync::Mutex::new(());

impl Spawner {
    /// The process's spawner; its thread is made by the first call.
    ///
    /// # Errors
    /// If the thread cannot be made.
    pub fn start() -> io::Result<Spawner> {
        let _one = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(spawner) = SPAWNER.get() {
            return Ok(spawner.clone());
        }
        let (requests, inbox) = mpsc::channel();
        std::thread::Builder::new()
            .name("spawner".to_owned())
            .spawn(move || run(&inbox))?;
        Ok(SPAWNER.get_or_init(|| Spawner { requests }).clone())
    }

    /// Makes the calling thread, which has to be the program's first, the process's spawner for as long as `app` runs on
    /// another one. So all children are the first thread's, before and after [`become_program`](Self::become_program)
    /// any number of times: with a spawner beside it, the second time would end the thread whose children the first
    /// time left, and them with it.
    ///
    /// `app` begins without SIGTERM and SIGINT, which wait until it calls [`signals::hear`].
    ///
    /// # Errors
    /// `AlreadyExists` if there is a spawner; what making a thread reports.
    pub fn host<T: Send>(app: impl FnOnce() -> T + Send) -> io::Result<T> {
        let (requests, inbox) = mpsc::channel();
        {
            let _one = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
            let spawner = Spawner {
                requests: requests.clone(),
            };
            if SPAWNER.set(spawner).is_err() {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
        }
        /// Ends the spawner however the app ends.
        struct Over(mpsc::Sender<Request>);
        impl Drop for Over {
            fn drop(&mut self) {
                let _ = self.0.send(Request::End);
            }
        }
        std::thread::scope(|scope| {
            let app = std::thread::Builder::new()
                .name("app".to_owned())
                .stack_size(APP_STACK)
                .spawn_scoped(scope, move || {
                    let _over = Over(requests);
                    signals::mask(&[Signal::TERM, Signal::INT]);
                    app()
                })?;
            run(&inbox);
            Ok(app
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    }

    /// Turns this process into another program: same id, same children, if this is a [hosted](Self::host) spawner.
    /// Returns only if that failed; then everything is as it was.
    pub fn become_program(&self, image: Image) -> io::Error {
        let (answer, answered) = mpsc::sync_channel(1);
        if self.requests.send(Request::Become(image, answer)).is_err() {
            return gone();
        }
        answered.recv().unwrap_or_else(|_| gone())
    }

    /// Starts a program. If the future is dropped, the child is killed.
    ///
    /// # Errors
    /// `InvalidInput` for a command that cannot be expressed to the kernel; what `fork`, `pipe` and the like
    /// report; and what happened in the child until and including `execve` (such as `NotFound`).
    pub async fn spawn(&self, command: Command) -> io::Result<Child> {
        let (answer, answered) = tokio::sync::oneshot::channel();
        self.request(
            command,
            // Nobody waits any more: dropping the child kills it.
            Box::new(move |child| drop(answer.send(child))),
        )?;
        answered.await.unwrap_or_else(|_| Err(gone()))
    }

    /// [`spawn`](Self::spawn), blocking the thread (for about a millisecond).
    ///
    /// # Errors
    /// As [`spawn`](Self::spawn).
    pub fn spawn_blocking(&self, command: Command) -> io::Result<Child> {
        let (answer, answered) = mpsc::sync_channel(1);
        self.request(command, Box::new(move |child| drop(answer.send(child))))?;
        answered.recv().unwrap_or_else(|_| Err(gone()))
    }

    fn request(
        &self,
        command: Command,
        answer: Box<dyn FnOnce(io::Result<Child>) + Send>,
    ) -> io::Result<()> {
        self.requests
            .send(Request::Spawn(command, answer))
            .map_err(|_| gone())
    }
}

fn gone() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, "the spawner's thread is gone")
}

/// Lets the spawner's thread reap a killed child.
pub(crate) fn reap_later(pidfd: Arc<OwnedFd>) {
    // There is a spawner, for there is a child.
    if let Some(spawner) = SPAWNER.get() {
        let _ = spawner.requests.send(Request::Reap(pidfd));
    }
}

/// The main thread's usual stack: an app expects it.
const APP_STACK: usize = 8 << 20;

fn run(inbox: &mpsc::Receiver<Request>) {
    // Signals are for other threads: no handler of this process may run in a child between fork and exec.
    signals::mask_all();
    let mut dying: Vec<Arc<OwnedFd>> = Vec::new();
    loop {
        let request = if dying.is_empty() {
            inbox.recv().ok()
        } else {
            inbox.recv_timeout(REAP_EVERY).ok()
        };
        match request {
            Some(Request::Spawn(command, answer)) => answer(launch(command)),
            Some(Request::Reap(pidfd)) => dying.push(pidfd),
            Some(Request::Become(image, answer)) => drop(answer.send(image.execute())),
            Some(Request::End) => return,
            // The static sender lives for ever, so this is the timeout.
            None => {}
        }
        // An error (somebody else reaped it) leaves nothing to do either.
        dying.retain(|pidfd| matches!(crate::child::reap(pidfd.as_fd()), Ok(None)));
    }
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

pub(crate) fn c_string(text: &OsStr) -> io::Result<CString> {
    CString::new(text.as_bytes()).map_err(|_| invalid("a NUL in a path, argument or variable"))
}

/// Everything the child needs, made before it: until it is another program it has this process's memory, which others go on
/// to use, and may do no more than ask the system.
struct Plan {
    program: CString,
    /// Pointers into strings that live as long as the plan, ended by null.
    argv: Vec<*const libc::c_char>,
    envp: Vec<*const libc::c_char>,
    _strings: Vec<CString>,
    /// Where each descriptor is and where it belongs.
    moves: Vec<(RawFd, RawFd)>,
    /// Room for where each is parked meanwhile.
    parked: Vec<RawFd>,
    /// Above all targets.
    floor: RawFd,
    place: Place,
    background: bool,
    directory: Option<RawFd>,
    limits: Vec<(Resource, u64)>,
    group: Option<RawFd>,
    parent: libc::pid_t,
    failure: RawFd,
}

#[cfg(target_env = "gnu")]
type Resource = libc::__rlimit_resource_t;
#[cfg(not(target_env = "gnu"))]
type Resource = libc::c_int;

impl Plan {
    fn new(command: &Command, stdio: [RawFd; 3], failure: RawFd) -> io::Result<Plan> {
        let mut moves: Vec<(RawFd, RawFd)> =
            (0..).zip(stdio).map(|(to, from)| (from, to)).collect();
        for (fd, target) in &command.fds {
            if *target < 3 || moves.iter().any(|(_, taken)| taken == target) {
                return Err(invalid(
                    "a descriptor's number in a child is 3 or greater, and used once",
                ));
            }
            moves.push((fd.as_raw_fd(), *target));
        }
        let floor = moves.iter().map(|(_, to)| *to).max().unwrap_or(2);
        let floor = floor
            .checked_add(1)
            .ok_or_else(|| invalid("a descriptor's number in a child is too large"))?;

        let program = c_string(command.program.as_os_str())?;
        let mut args = vec![program.clone()];
        for arg in &command.args {
            args.push(c_string(arg)?);
        }
        let mut env = Vec::new();
        for (index, (name, value)) in command.env.iter().enumerate() {
            let again = command.env[..index].iter().any(|(other, _)| other == name);
            if name.is_empty() || name.as_bytes().contains(&b'=') || again {
                return Err(invalid(
                    "a variable's name is not empty, has no '=' and comes once",
                ));
            }
            let mut pair = name.clone();
            pair.push("=");
            pair.push(value);
            env.push(c_string(&pair)?);
        }
        let pointers = |strings: &[CString]| -> Vec<*const libc::c_char> {
            let all = strings.iter().map(|string| string.as_ptr());
            all.chain([std::ptr::null()]).collect()
        };
        let (argv, envp) = (pointers(&args), pointers(&env));
        // Moving a `CString` moves no bytes, so the pointers stay good.
        args.append(&mut env);

        // At 0 a program that collects core dumps is asked all the same; at 1 it is not.
        let core = rustix::process::getrlimit(rustix::process::Resource::Core).maximum;
        let mut limits = vec![(libc::RLIMIT_CORE, core.unwrap_or(1).min(1))];
        limits.extend(command.nofile.map(|files| (libc::RLIMIT_NOFILE, files)));
        limits.extend(command.data.map(|bytes| (libc::RLIMIT_DATA, bytes)));
        Ok(Plan {
            program,
            argv,
            envp,
            _strings: args,
            parked: vec![-1; moves.len()],
            moves,
            floor,
            place: Place::of(command.apart, command.background),
            background: command.background,
            directory: command.directory.as_ref().map(AsRawFd::as_raw_fd),
            limits,
            group: command.group.as_ref().map(AsRawFd::as_raw_fd),
            // SAFETY: always succeeds.
            parent: unsafe { libc::getpid() },
            failure,
        })
    }

    /// Turns this, the forked child, into the program. Returns only on failure, with the step that failed;
    /// `errno` tells why.
    ///
    /// # Safety
    /// Only in a just forked child. Uses nothing but system calls that are safe after a fork, and neither
    /// allocates nor panics.
    unsafe fn become_program(&mut self) -> Step {
        // SAFETY: system calls on numbers and on pointers into `self`, which outlives them.
        unsafe {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) != 0 {
                return Step::DeathSignal;
            }
            // Without this, a parent that died before the line above would never be noticed.
            if libc::getppid() != self.parent {
                libc::_exit(127);
            }
            if !self.place.take() {
                return Step::Session;
            }
            if let Some(door) = self.group
                && libc::write(door, c"0".as_ptr().cast(), 1) != 1
            {
                return Step::Group;
            }
            libc::umask(0o077);
            if let Some(directory) = self.directory
                && libc::fchdir(directory) != 0
            {
                return Step::Directory;
            }

            // Every descriptor first moves above all targets, then down to its own: whatever the overlap, none
            // is overwritten before it was moved. The pipe for failures has to get out of the way as well.
            self.failure = libc::fcntl(self.failure, libc::F_DUPFD_CLOEXEC, self.floor);
            if self.failure < 0 {
                return Step::Descriptors;
            }
            for (parked, (from, _)) in self.parked.iter_mut().zip(&self.moves) {
                *parked = libc::fcntl(*from, libc::F_DUPFD_CLOEXEC, self.floor);
                if *parked < 0 {
                    return Step::Descriptors;
                }
            }
            // Marks instead of closing, so that a failing exec can still be told; `dup2` below unmarks.
            if libc::syscall(
                libc::SYS_close_range,
                3 as libc::c_uint,
                libc::c_uint::MAX,
                libc::CLOSE_RANGE_CLOEXEC,
            ) != 0
            {
                return Step::CloseRange;
            }
            for (parked, (_, to)) in self.parked.iter().zip(&self.moves) {
                if libc::dup2(*parked, *to) < 0 {
                    return Step::Descriptors;
                }
            }
            for (resource, most) in &self.limits {
                let limit = libc::rlimit {
                    rlim_cur: *most,
                    rlim_max: *most,
                };
                if libc::setrlimit(*resource, &limit) != 0 {
                    return Step::Limits;
                }
            }
            signals::reset();
            // Without it, it runs with the same right as others. Last, for whoever wants the next child waits for this one.
            if self.background {
                let _ = background::give_way();
            }
            libc::execve(
                self.program.as_ptr(),
                self.argv.as_ptr(),
                self.envp.as_ptr(),
            );
            Step::Exec
        }
    }
}

/// What the child was doing when it failed. The discriminants cross the pipe.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Step {
    DeathSignal,
    Session,
    Group,
    Directory,
    Descriptors,
    CloseRange,
    Limits,
    Exec,
}

impl Step {
    const NAMES: [&str; 8] = [
        "set the parent-death signal",
        "make a session or a process group",
        "join its control group",
        "enter its working folder",
        "place its descriptors",
        "close other descriptors",
        "set its resource limits",
        "execute the program",
    ];
}

fn launch(mut command: Command) -> io::Result<Child> {
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let output =
        |kind: Output, inherited: RawFd| -> io::Result<(Option<OwnedFd>, Option<OwnedFd>, RawFd)> {
            Ok(match kind {
                Output::Null => (None, None, null.as_raw_fd()),
                Output::Inherit => (None, None, inherited),
                Output::Pipe => {
                    let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
                    let number = write.as_raw_fd();
                    (Some(read), Some(write), number)
                }
            })
        };
    let (stdout, stdout_write, out) = output(command.stdout, 1)?;
    let (stderr, stderr_write, err) = output(command.stderr, 2)?;
    let (failure, failure_write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    let mut plan = Plan::new(
        &command,
        [null.as_raw_fd(), out, err],
        failure_write.as_raw_fd(),
    )?;

    let mut child = || {
        // SAFETY: this is the just forked child. `errno` is read before anything else can set it.
        unsafe {
            let step = plan.become_program();
            let [a, b, c, d] = (*libc::__errno_location()).to_ne_bytes();
            let told = [step as u8, a, b, c, d];
            libc::write(plan.failure, told.as_ptr().cast(), told.len());
        }
        127
    };
    // SAFETY: the child calls only `become_program` and `write`; the spawner's thread hears no signals.
    let pid = unsafe { vfork(&mut child) }?;
    // Before the answer is read: this process's writing ends would keep the pipes open.
    drop((failure_write, stdout_write, stderr_write, null));
    command.fds.clear();
    command.group = None;

    // Not a stranger's: the child is not reaped yet, so its number cannot have been reused.
    let pidfd = Pid::from_raw(pid)
        .ok_or(rustix::io::Errno::SRCH)
        .and_then(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()));
    let pidfd = match pidfd {
        Ok(pidfd) => pidfd,
        Err(error) => {
            // SAFETY: our own unreaped child.
            unsafe {
                libc::kill(pid, libc::SIGKILL);
                libc::waitpid(pid, std::ptr::null_mut(), 0);
            }
            return Err(error.into());
        }
    };
    // From here on, a return drops, kills and reaps.
    let child = Child::new(pid.unsigned_abs(), pidfd, stderr, stdout);

    // Ends without a byte when exec closes the child's end, or when the child is killed before; then its exit
    // status tells.
    let mut told = Vec::with_capacity(5);
    File::from(failure).take(5).read_to_end(&mut told)?;
    match *told {
        [step, a, b, c, d] => {
            let error = io::Error::from_raw_os_error(i32::from_ne_bytes([a, b, c, d]));
            if step == Step::Exec as u8 {
                return Err(error);
            }
            let step = Step::NAMES.get(usize::from(step)).unwrap_or(&"start");
            Err(io::Error::new(
                error.kind(),
                format!("a child could not {step}: {error}"),
            ))
        }
        _ => Ok(child),
    }
}

/// Makes the kernel send `signal` to this process when the thread that started it ends. For programs started by
/// somebody else than [`Spawner`], which arranges for it already; mind whose *thread* that is.
///
/// `expected` is the parent's process id, if the starter told it; without it, a parent that ended before this
/// call goes unnoticed.
///
/// # Errors
/// `NotConnected` if the parent has ended already: no signal will come, so the caller should exit. Otherwise
/// what `prctl` reports.
pub fn die_with_parent(signal: Signal, expected: Option<u32>) -> io::Result<()> {
    let before = std::os::unix::process::parent_id();
    rustix::process::set_parent_process_death_signal(Some(signal))?;
    if std::os::unix::process::parent_id() != expected.unwrap_or(before) {
        return Err(io::Error::new(
            io::ErrorKind::NotConnected,
            "the process that started this one has ended",
        ));
    }
    Ok(())
}

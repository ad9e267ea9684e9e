//! A child process, followed by its pidfd: no process id is ever signalled that might have been reused.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};

pub use rustix::process::Signal;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExitStatus {
    /// It exited with this code.
    Code(i32),
    /// A signal killed it.
    Signal {
        /// The signal's number.
        signal: i32,
        /// Whether the kernel wrote a core dump.
        core: bool,
    },
}

impl ExitStatus {
    /// Whether it exited with code 0.
    pub fn success(self) -> bool {
        self == ExitStatus::Code(0)
    }
}

impl fmt::Display for ExitStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            ExitStatus::Code(code) => write!(f, "exit code {code}"),
            ExitStatus::Signal { signal, core } => {
                match signal_name(signal) {
                    Some(name) => write!(f, "killed by {name}")?,
                    None => write!(f, "killed by signal {signal}")?,
                }
                if core {
                    f.write_str(" (core dumped)")?;
                }
                Ok(())
            }
        }
    }
}

/// A signal's name, such as `SIGSEGV`; `None` for real-time signals and what is no signal.
pub fn signal_name(signal: i32) -> Option<&'static str> {
    Some(match signal {
        libc::SIGHUP => "SIGHUP",
        libc::SIGINT => "SIGINT",
        libc::SIGQUIT => "SIGQUIT",
        libc::SIGILL => "SIGILL",
        libc::SIGTRAP => "SIGTRAP",
        libc::SIGABRT => "SIGABRT",
        libc::SIGBUS => "SIGBUS",
        libc::SIGFPE => "SIGFPE",
        libc::SIGKILL => "SIGKILL",
        libc::SIGUSR1 => "SIGUSR1",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGUSR2 => "SIGUSR2",
        libc::SIGPIPE => "SIGPIPE",
        libc::SIGALRM => "SIGALRM",
        libc::SIGTERM => "SIGTERM",
        libc::SIGSTKFLT => "SIGSTKFLT",
        libc::SIGCHLD => "SIGCHLD",
        libc::SIGCONT => "SIGCONT",
        libc::SIGSTOP => "SIGSTOP",
        libc::SIGTSTP => "SIGTSTP",
        libc::SIGTTIN => "SIGTTIN",
        libc::SIGTTOU => "SIGTTOU",
        libc::SIGURG => "SIGURG",
        libc::SIGXCPU => "SIGXCPU",
        libc::SIGXFSZ => "SIGXFSZ",
        libc::SIGVTALRM => "SIGVTALRM",
        libc::SIGPROF => "SIGPROF",
        libc::SIGWINCH => "SIGWINCH",
        libc::SIGIO => "SIGIO",
        libc::SIGPWR => "SIGPWR",
        libc::SIGSYS => "SIGSYS",
        _ => return None,
    })
}

/// Signals a child from anywhere, also while its owner waits for it.
#[derive(Clone, Debug)]
pub struct Killer(Arc<OwnedFd>);

impl Killer {
    /// Sends a signal; a child that has ended already is no error.
    ///
    /// # Errors
    /// What `pidfd_send_signal` reports.
    pub fn kill(&self, signal: Signal) -> io::Result<()> {
        match rustix::process::pidfd_send_signal(&self.0, signal) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// A child process and the duty to reap it.
///
/// It cannot outlive its owner. `Drop` kills it (SIGKILL) and does not wait: if it is not gone at once, the
/// spawner's thread reaps it as soon as it is, however long the kernel takes to free its memory. If the owner is
/// killed itself, the parent-death signal does it.
#[derive(Debug)]
pub struct Child {
    pid: u32,
    pidfd: Arc<OwnedFd>,
    status: Option<ExitStatus>,
    peak_resident: u64,
    /// Reading end of its standard error, if that is a pipe. Drain it (see [`crate::log`]): a child whose pipe
    /// is full hangs in `write`.
    pub stderr: Option<OwnedFd>,
    /// Reading end of its standard output, if that is a pipe.
    pub stdout: Option<OwnedFd>,
}

impl Child {
    pub(crate) fn new(
        pid: u32,
        pidfd: OwnedFd,
        stderr: Option<OwnedFd>,
        stdout: Option<OwnedFd>,
    ) -> Self {
        Child {
            pid,
            pidfd: Arc::new(pidfd),
            status: None,
            peak_resident: 0,
            stderr,
            stdout,
        }
    }

    /// Takes charge of a child that this process had before it became this program.
    ///
    /// # Errors
    /// `NotFound` if no child of this process has that id; what `pidfd_open` reports.
    pub fn adopt(pid: u32, stderr: Option<OwnedFd>) -> io::Result<Child> {
        let none = || {
            io::Error::new(
                io::ErrorKind::NotFound,
                format!("process {pid} is no child of this one"),
            )
        };
        let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let raw = raw.ok_or_else(none)?;
        let pidfd = match rustix::process::pidfd_open(raw, PidfdFlags::empty()) {
            Err(Errno::SRCH) => return Err(none()),
            opened => opened?,
        };
        match ended(pidfd.as_fd()) {
            Ok(_) => Ok(Child::new(pid, pidfd, stderr, None)),
            Err(_) => Err(none()),
        }
    }

    /// Its process id: for messages and `/proc`, not for signals.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Sends a signal; a child that has ended already is no error.
    ///
    /// # Errors
    /// What `pidfd_send_signal` reports.
    pub fn kill(&self, signal: Signal) -> io::Result<()> {
        self.killer().kill(signal)
    }

    /// Signals one of its threads, whose number may be the child's own claim; nothing happens if it has no such thread,
    /// or has been reaped.
    ///
    /// # Errors
    /// What `tgkill` reports.
    pub fn signal_thread(&self, thread: i32, signal: Signal) -> io::Result<()> {
        let Ok(pid) = libc::c_int::try_from(self.pid) else {
            return Ok(());
        };
        if self.status.is_some() || thread <= 0 {
            return Ok(());
        }
        // The number is the child's until it is reaped, which only this handle does. The kernel wants the thread to be
        // of that process.
        // SAFETY: plain numbers.
        let done = unsafe { libc::syscall(libc::SYS_tgkill, pid, thread, signal.as_raw()) };
        match io::Error::last_os_error() {
            error if done < 0 && error.raw_os_error() != Some(libc::ESRCH) => Err(error),
            _ => Ok(()),
        }
    }

    /// A handle that can signal the child while this one is borrowed by [`wait`](Self::wait).
    pub fn killer(&self) -> Killer {
        Killer(Arc::clone(&self.pidfd))
    }

    /// How it ended, if it has; reaps it the first time.
    ///
    /// # Errors
    /// What `waitid` reports: `ECHILD` if somebody else reaped it.
    pub fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        if self.status.is_none()
            && let Some(reaped) = reap(self.pidfd.as_fd())?
        {
            self.status = Some(reaped.status);
            self.peak_resident = reaped.peak_resident;
        }
        Ok(self.status)
    }

    /// The most bytes it had resident, once it was reaped; 0 before.
    pub fn peak_resident(&self) -> u64 {
        self.peak_resident
    }

    /// Waits for its end, in the current tokio runtime. It may be dropped and called again; after the end it
    /// returns the same status again.
    ///
    /// # Errors
    /// As [`try_wait`](Self::try_wait), and what epoll reports.
    pub async fn wait(&mut self) -> io::Result<ExitStatus> {
        if let Some(status) = self.try_wait()? {
            return Ok(status);
        }
        let watched = crate::socket::readiness(Arc::clone(&self.pidfd))?;
        loop {
            let mut ready = watched.readable().await?;
            if let Some(status) = self.try_wait()? {
                return Ok(status);
            }
            ready.clear_ready();
        }
    }

    /// Waits for its end at most that long, blocking the thread; `None` if it still runs.
    ///
    /// # Errors
    /// As [`try_wait`](Self::try_wait), and what `poll` reports.
    pub fn wait_blocking(&mut self, timeout: Duration) -> io::Result<Option<ExitStatus>> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.try_wait()? {
                return Ok(Some(status));
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            let left = Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            let mut polled = [PollFd::new(&self.pidfd, PollFlags::IN)];
            match rustix::event::poll(&mut polled, Some(&left)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl AsFd for Child {
    /// The pidfd, readable when the child has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if self.status.is_some() {
            return;
        }
        let _ = self.kill(Signal::KILL);
        if matches!(self.try_wait(), Ok(None)) {
            crate::spawn::reap_later(Arc::clone(&self.pidfd));
        }
    }
}

/// The child behind a pidfd, if it has ended and was not reaped.
fn ended(pidfd: BorrowedFd<'_>) -> io::Result<Option<Pid>> {
    loop {
        // SAFETY: an all-zero value of this plain C struct is valid, and the kernel gets a pointer to it.
        let (done, info) = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let id = libc::id_t::try_from(pidfd.as_raw_fd()).unwrap_or_default();
            let look = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
            let done = libc::waitid(libc::P_PIDFD, id, &raw mut info, look);
            (done, info)
        };
        if done == 0 {
            // SAFETY: `waitid` filled it in, or left it zero, which has no process.
            return Ok(Pid::from_raw(unsafe { info.si_pid() }));
        }
        match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::Interrupted => {}
            error => return Err(error),
        }
    }
}

/// What is left of a process once it was reaped.
pub(crate) struct Reaped {
    status: ExitStatus,
    /// Bytes.
    peak_resident: u64,
}

/// Reaps the child behind a pidfd if it has ended, and kills what it leaves of a process group that it led.
pub(crate) fn reap(pidfd: BorrowedFd<'_>) -> io::Result<Option<Reaped>> {
    if let Some(pid) = ended(pidfd)? {
        // Until it is reaped its number is its own, and so is a group of that number. One that led none leaves none; and
        // whoever may not be signalled is not.
        let _ = rustix::process::kill_process_group(pid, Signal::KILL);
    }
    // The system call, which also tells of resources; glibc's function of the name does not.
    loop {
        // SAFETY: all-zero values of these plain C structs are valid, and the kernel gets pointers to them.
        let (done, info, usage) = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let mut usage: libc::rusage = std::mem::zeroed();
            let done = libc::syscall(
                libc::SYS_waitid,
                libc::P_PIDFD as libc::c_long,
                libc::c_long::from(pidfd.as_raw_fd()),
                &raw mut info,
                libc::c_long::from(libc::WEXITED | libc::WNOHANG),
                &raw mut usage,
            );
            (done, info, usage)
        };
        if done != 0 {
            match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => continue,
                error => return Err(error),
            }
        }
        // SAFETY: `waitid` filled it in, or left it zero, which has no process.
        let (pid, value) = unsafe { (info.si_pid(), info.si_status()) };
        if pid == 0 {
            return Ok(None);
        }
        let status = match info.si_code {
            libc::CLD_EXITED => ExitStatus::Code(value),
            code => ExitStatus::Signal {
                signal: value,
                core: code == libc::CLD_DUMPED,
            },
        };
        // The kernel counts in KiB.
        let peak_resident = u64::try_from(usage.ru_maxrss)
            .unwrap_or(0)
            .saturating_mul(1024);
        return Ok(Some(Reaped {
            status,
            peak_resident,
        }));
    }
}

//! Children that are this very program, for a process that is still alone with itself.

use std::io;

use rustix::process::{Pid, WaitOptions, waitpid};

use crate::child::ExitStatus;
#[cfg(target_os = "linux")]
use crate::spawn::{Signal, die_with_parent};

/// A child that was made by [`fork`].
#[derive(Debug)]
pub struct Forked(Pid);

impl Forked {
    /// How it ended, if it has and nobody was told so yet. `None` also if the system does not say.
    pub fn ended(&self) -> Option<ExitStatus> {
        let (_, status) = waitpid(Some(self.0), WaitOptions::NOHANG).ok()??;
        match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Some(ExitStatus::Code(code)),
            (None, Some(signal)) => Some(ExitStatus::Signal {
                signal,
                core: status.as_raw() & 0x80 != 0,
            }),
            (None, None) => None,
        }
    }
}

/// Makes a child that goes on from here as this process does, and is killed when this process ends. `None` in the child.
///
/// Only for a process of one thread: what other threads hold, a lock for one, the child would never get.
///
/// # Errors
/// What the system refuses; `InvalidInput` when there are other threads, as far as `/proc` tells; in the child,
/// `NotConnected` when this process ended meanwhile.
#[cfg(target_os = "linux")]
pub fn fork() -> io::Result<Option<Forked>> {
    if std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() > 1) {
        let what = "a process with several threads does not fork";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    let parent = std::process::id();
    // SAFETY: this is the process's only thread, so that no lock is held by one that the child does not have.
    match unsafe { libc::fork() } {
        0 => die_with_parent(Signal::KILL, Some(parent)).map(|()| None),
        child => match Pid::from_raw(child).filter(|_| child > 0) {
            Some(child) => Ok(Some(Forked(child))),
            None => Err(io::Error::last_os_error()),
        },
    }
}

/// There is no signal for a parent's end here.
///
/// # Errors
/// `Unsupported`.
#[cfg(not(target_os = "linux"))]
pub fn fork() -> io::Result<Option<Forked>> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    #[cfg(target_os = "linux")]
    #[test]
    fn a_process_with_threads_is_refused() {
        // The tests' own threads.
        let error = super::fork().unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
    }
}

//! What takes a worker's freedom before it reads the first byte from anybody.
//!
//! A worker needs no file, no socket that it was not given, no other program and no other process. [`confine`] makes
//! the kernel enforce that, in four layers that do not depend on one another: no new privileges, no capabilities,
//! landlock without any path, and seccomp filters. What the kernel lacks is in the [`Report`].
//!
//! | System call | Answer |
//! |---|---|
//! | needed by sockets it has, memory, threads, clocks | performed |
//! | by path: `open`, `stat`, `unlink`, … | `EACCES`: innocents try, and cope |
//! | arguments that go too far, harmlessly | `EPERM`, `ENOTTY`, … |
//! | `socket`, `connect`, `execve`, `ptrace`, `mmap` with `PROT_EXEC`, … | reported by name, and the process ends |
//! | any other | `ENOSYS` |
//!
//! The process stays *dumpable*: that protects a process from others of its user, while the danger here comes from
//! within, and without it an unprivileged scheduler could not read `/proc/PID/smaps`. Its parent-death signal must be
//! set before, and every file that it is going to need must be open.

use std::fmt;

use landlock::{
    ABI, Access, AccessFs, AccessNet, LandlockStatus, Ruleset, RulesetAttr, RulesetStatus, Scope,
};
use rustix::thread::{CapabilitySet, CapabilitySets};

mod filter;
mod rules;
mod trap;

pub use rules::Answer;

/// How the worker is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// By the sockets it inherited only.
    Inherited,
    /// By a socket that listens already, too: it may accept connections.
    Listening,
}

/// Why a layer of the confinement is missing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Lack(String);

impl Lack {
    fn new(why: impl Into<String>) -> Self {
        Lack(why.into())
    }
}

/// Whether there were capabilities to drop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capabilities {
    /// All were dropped; not even root's programs would get them back.
    Dropped,
    /// There were none.
    None,
}

/// What is in force. It displays as one line for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct Report {
    /// No program it could execute would have more privileges.
    pub no_new_privs: Result<(), Lack>,
    /// No capability is left.
    pub capabilities: Result<Capabilities, Lack>,
    /// No file can be opened by path, no TCP port used, no process outside signalled (as far as the ABI in force,
    /// given here, knows them).
    pub landlock: Result<i32, Lack>,
    /// System calls are filtered.
    pub seccomp: Result<(), Lack>,
}

impl Report {
    /// Whether every layer is in force.
    pub fn is_complete(&self) -> bool {
        self.no_new_privs.is_ok()
            && self.capabilities.is_ok()
            && self.landlock.is_ok()
            && self.seccomp.is_ok()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.no_new_privs {
            Ok(()) => write!(f, "no-new-privs")?,
            Err(lack) => write!(f, "without no-new-privs ({lack})")?,
        }
        match &self.capabilities {
            Ok(Capabilities::Dropped) => write!(f, ", capabilities dropped")?,
            Ok(Capabilities::None) => write!(f, ", no capabilities")?,
            Err(lack) => write!(f, ", with capabilities ({lack})")?,
        }
        match &self.landlock {
            Ok(abi) => write!(f, ", landlock {abi}")?,
            Err(lack) => write!(f, ", without landlock ({lack})")?,
        }
        match &self.seccomp {
            Ok(()) => write!(f, ", seccomp"),
            Err(lack) => write!(f, ", without seccomp ({lack})"),
        }
    }
}

/// Confines this process for the rest of its life. To be called in a synchronous `main`, while there is one thread:
/// landlock and seccomp bind the calling thread and those it starts.
///
/// Never fails as a whole: a layer that is missing is in the report, and the others are in force nevertheless. From
/// here on, a forbidden system call ends the process with [`ForbiddenSystemCall`](crate::exit::Exit), after one line
/// "forbidden system call NAME(NUMBER)" on standard error; or, if the thread has blocked all signals (as in glibc's
/// `posix_spawn`), by SIGSYS itself and without a word.
pub fn confine(mode: Mode) -> Report {
    let alone = alone();
    Report {
        no_new_privs: rustix::thread::set_no_new_privs(true)
            .map_err(|error| Lack::new(error.to_string())),
        capabilities: drop_capabilities().map_err(|error| Lack::new(error.to_string())),
        landlock: restrict_paths().and_then(|abi| alone.clone().map(|()| abi)),
        seccomp: trap::install()
            .map_err(|error| Lack::new(error.to_string()))
            .and_then(|()| filter::install(mode))
            .and(alone),
    }
}

/// Every system call that has a rule of its own, with its number and its most severe answer, which may depend on its
/// arguments. All others get `ENOSYS`.
pub fn answers() -> impl Iterator<Item = (&'static str, i64, Answer)> {
    let mut answers = std::collections::BTreeMap::new();
    for rule in rules::RULES {
        for (number, name) in rule.calls {
            let answer = answers
                .entry(*number)
                .or_insert((rules::short(name), rule.answer));
            answer.1 = answer.1.max(rule.answer);
        }
    }
    answers
        .into_iter()
        .map(|(number, (name, answer))| (name, number, answer))
}

/// A lack if other threads run, which the layers would not bind. If `/proc` cannot tell, the caller is believed.
fn alone() -> Result<(), Lack> {
    match std::fs::read_dir("/proc/self/task").map(Iterator::count) {
        Ok(threads @ 2..) => Err(Lack::new(format!(
            "{} threads were started before it",
            threads - 1
        ))),
        _ => Ok(()),
    }
}

fn drop_capabilities() -> rustix::io::Result<Capabilities> {
    let held = rustix::thread::capabilities(None)?;
    if held.permitted.contains(CapabilitySet::SETPCAP) {
        // Without the right to, the bounding set stays; no new privileges makes it harmless.
        let setpcap = CapabilitySet::SETPCAP;
        let effective = held.effective | setpcap;
        rustix::thread::set_capabilities(None, CapabilitySets { effective, ..held })?;
        for number in 0..64 {
            let capability = CapabilitySet::from_bits_retain(1 << number);
            match rustix::thread::remove_capability_from_bounding_set(capability) {
                Ok(()) => {}
                // Past the kernel's last one.
                Err(rustix::io::Errno::INVAL) => break,
                Err(error) => return Err(error),
            }
        }
    }
    // The ambient set cannot exceed the two below.
    let none = CapabilitySet::empty();
    rustix::thread::set_capabilities(
        None,
        CapabilitySets {
            effective: none,
            permitted: none,
            inheritable: none,
        },
    )?;
    Ok(if held.permitted.is_empty() {
        Capabilities::None
    } else {
        Capabilities::Dropped
    })
}

/// Landlock without any rule: whatever the kernel's version can forbid, is.
fn restrict_paths() -> Result<i32, Lack> {
    // The newest that the crate knows; it leaves out what the kernel does not.
    let newest = ABI::V9;
    let status = Ruleset::default()
        .handle_access(AccessFs::from_all(newest))
        .and_then(|ruleset| ruleset.handle_access(AccessNet::from_all(newest)))
        .and_then(|ruleset| ruleset.scope(Scope::from_all(newest)))
        .and_then(Ruleset::create)
        .and_then(|ruleset| ruleset.restrict_self())
        .map_err(|error| Lack::new(error.to_string()))?;
    match (status.landlock, status.ruleset) {
        (LandlockStatus::NotImplemented, _) => Err(Lack::new("the kernel lacks it")),
        (LandlockStatus::NotEnabled, _) => Err(Lack::new("the kernel has it switched off")),
        (_, RulesetStatus::NotEnforced) => Err(Lack::new("the kernel did not enforce it")),
        (LandlockStatus::Available { effective_abi, .. }, _) => Ok(effective_abi as i32),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_reads_as_one_line() {
        let mut report = Report {
            no_new_privs: Ok(()),
            capabilities: Ok(Capabilities::Dropped),
            landlock: Ok(7),
            seccomp: Ok(()),
        };
        assert!(report.is_complete());
        assert_eq!(
            report.to_string(),
            "no-new-privs, capabilities dropped, landlock 7, seccomp"
        );
        report.landlock = Err(Lack::new("the kernel lacks it"));
        report.capabilities = Ok(Capabilities::None);
        assert!(!report.is_complete());
        assert_eq!(
            report.to_string(),
            "no-new-privs, no capabilities, without landlock (the kernel lacks it), seccomp"
        );
    }

    #[test]
    fn what_the_worker_lives_on_is_allowed_and_the_rest_is_not() {
        let answer = |wanted| {
            answers()
                .find(|(name, ..)| *name == wanted)
                .map(|(.., answer)| answer)
        };
        assert_eq!(answer("futex"), Some(Answer::Allow));
        assert_eq!(answer("openat"), Some(Answer::Errno(libc::EACCES)));
        assert_eq!(answer("execve"), Some(Answer::Trap));
        assert_eq!(answer("fcntl"), Some(Answer::Trap));
        assert_eq!(answer("io_uring_setup"), None);
    }
}

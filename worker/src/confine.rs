//! What takes a worker's freedom before it reads the first byte from anybody.
//!
//! A worker needs no file, no socket that it was not given, no other program and no other process. [`confine`] makes
//! the kernel enforce that, in layers that do not depend on one another; what the kernel lacks is in the [`Report`].
//!
//! | Layer | What it means |
//! |---|---|
//! | `no-new-privs` | no program it could execute would have more privileges |
//! | `session` | no terminal, and no signals for a group of others |
//! | `memory group` | a control group bounds its memory, if the scheduler may make one |
//! | `user` | started by root, it is a user that owns no file and no other process |
//! | `user namespace`, `network namespace` | no right counts outside; no network, no queues or memory by name |
//! | `limits` | no bytes in files, no core dumps, so many threads |
//! | `capabilities` | none |
//! | `landlock` | no path, no TCP port, no signal to processes outside |
//! | `seccomp` | the table below |
//!
//! | System call | Answer |
//! |---|---|
//! | needed by sockets it has, memory, threads, clocks | performed |
//! | by path: `open`, `stat`, `unlink`, … | `EACCES`: innocents try, and cope |
//! | arguments that go too far, harmlessly | `EPERM`, `ENOTTY`, … |
//! | `socket`, `connect`, `execve`, `ptrace`, `mmap` with `PROT_EXEC`, … | reported by name, and the process ends |
//! | any other | `ENOSYS` |
//!
//! A device that is reached by files (CUDA's) changes five things: while its libraries are loaded, these and what they read
//! can be opened, and its threads be named; afterwards its own files still can, which landlock holds it to; whether a file exists is
//! told, which the driver asks of its own before it opens them; and `ioctl` is performed, pipes are made, and who tries to start a process is refused
//! it and goes on.
//!
//! The process stays *dumpable*: that protects a process from others of its user, while the danger here comes from
//! within, and without it an unprivileged scheduler could not read `/proc/PID/smaps`. Its parent-death signal must be
//! set before, and every file that it is going to need must be open: as another user it could not even see them.

use hotcell_ipc::terminal::has_terminal;
use hotcell_kernels::backend::Files;
use landlock::{
    ABI, Access, AccessFs, AccessNet, LandlockStatus, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetStatus, Scope, path_beneath_rules,
};

mod filter;
mod identity;
mod limits;
mod report;
mod rules;
mod trap;

pub use report::{Lack, Layer, Report, Standing};
pub use rules::Answer;

/// How the worker is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// By the sockets it inherited only.
    Inherited,
    /// By a socket that listens already, too: it may accept connections.
    Listening,
}

/// Confines this process for the rest of its life. To be called in a synchronous `main`, while there is one thread:
/// the layers bind the calling thread and those it starts.
///
/// Never fails as a whole: a layer that is missing is in the report, and the others are in force nevertheless. From
/// here on, a forbidden system call ends the process with [`ForbiddenSystemCall`](crate::exit::Exit), after one line
/// "forbidden system call NAME(NUMBER)" on standard error; or, if the thread has blocked all signals (as in glibc's
/// `posix_spawn`), by SIGSYS itself and without a word.
pub fn confine(mode: Mode) -> Report {
    confine_around(mode, &Files::default(), || {})
}

/// The same around `load`, which has libraries open files and start threads of their own: no path but `files` from before
/// it on, and no path but their devices from after it on. It runs as the user that the process ends up as, and before the
/// layer `seccomp`, which then binds the threads that it left, too.
pub fn confine_around(mode: Mode, files: &Files, load: impl FnOnce()) -> Report {
    let alone = alone();
    let plain = |done: Result<(), Lack>| done.map(|()| String::new());
    let mut layers = vec![
        Layer::new(
            "no-new-privs",
            plain(rustix::thread::set_no_new_privs(true).map_err(Lack::from)),
        ),
        session(mode),
        limits::memory_group(),
    ];
    let identity = identity::leave();
    let counted_apart = identity
        .iter()
        .any(|l| l.name.starts_with("user") && l.is_in_force());
    layers.extend(identity);
    layers.push(Layer::new("limits", limits::set(counted_apart)));
    layers.push(Layer::new("capabilities", identity::drop_capabilities()));
    let has_devices = !files.devices.is_empty();
    let mut landlock = restrict_paths(files);
    load();
    if !files.read.is_empty() || !files.written.is_empty() {
        let lasting = Files {
            read: vec![],
            written: vec![],
            ..files.clone()
        };
        landlock = landlock.and_then(|_| restrict_paths(&lasting));
    }
    let landlock = landlock.and_then(|abi| alone.clone().map(|()| abi));
    layers.push(Layer::new("landlock", landlock));
    let seccomp = trap::install()
        .map_err(Lack::from)
        .and_then(|()| filter::install(mode, has_devices))
        .and(alone);
    layers.push(Layer::new("seccomp", plain(seccomp)));
    Report { layers }
}

/// Leads a session of its own if a scheduler started it, or a process group in the scheduler's if that has no terminal; or stays
/// in that of the worker whose member it is. Who starts it by hand keeps it in the terminal's.
fn session(mode: Mode) -> Layer {
    const NAME: &str = "session";
    // rustix takes no 0, which the kernel says where the session's leader is outside this PID namespace.
    // SAFETY: it only reads a number.
    let session = unsafe { libc::getsid(0) };
    let own = rustix::process::getpid().as_raw_pid();
    let leads = session == own;
    let group = rustix::process::getpgrp().as_raw_pid();
    let has_terminal = has_terminal();
    if mode == Mode::Listening && !leads {
        return Layer::not_needed(NAME, "it was started by hand");
    }
    // Who ends a worker's group ends its members.
    let parent = rustix::process::getppid().map(|pid| pid.as_raw_pid());
    if mode == Mode::Inherited
        && (parent == Some(session) || parent == Some(group) && !has_terminal)
    {
        return Layer::not_needed(NAME, "it is in the one that its leader leads");
    }
    let done = match leads {
        true => Ok(String::new()),
        // A session's leader alone could give it a terminal.
        false if group == own && !has_terminal => {
            Ok("its scheduler's, which has no terminal".to_owned())
        }
        false => rustix::process::setsid().map(|_| String::new()),
    };
    Layer::new(NAME, done.map_err(Lack::from))
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

/// Landlock without any rule but for these files: whatever else the kernel's version can forbid, is. The layers of several
/// calls add up. The last binds the calling thread only: what `load` left has those before it.
fn restrict_paths(files: &Files) -> Result<String, Lack> {
    // The newest that the crate knows; it leaves out what the kernel does not.
    let newest = ABI::V9;
    let status = Ruleset::default()
        .handle_access(AccessFs::from_all(newest))
        .and_then(|ruleset| ruleset.handle_access(AccessNet::from_all(newest)))
        .and_then(|ruleset| ruleset.scope(Scope::from_all(newest)))
        .and_then(Ruleset::create)
        .and_then(|ruleset| {
            let read = AccessFs::from_read(newest);
            let all = files.read.iter().chain(&files.kept);
            ruleset.add_rules(path_beneath_rules(all, read))
        })
        .and_then(|ruleset| {
            let written = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::Truncate;
            ruleset.add_rules(path_beneath_rules(&files.written, written))
        })
        .and_then(|ruleset| {
            let used =
                AccessFs::ReadFile | AccessFs::ReadDir | AccessFs::WriteFile | AccessFs::IoctlDev;
            ruleset.add_rules(path_beneath_rules(&files.devices, used))
        })
        .and_then(|ruleset| ruleset.restrict_self())
        .map_err(|error| Lack::new(error.to_string()))?;
    match (status.landlock, status.ruleset) {
        (LandlockStatus::NotImplemented, _) => Err(Lack::new("the kernel lacks it")),
        (LandlockStatus::NotEnabled, _) => Err(Lack::new("the kernel has it switched off")),
        (_, RulesetStatus::NotEnforced) => Err(Lack::new("the kernel did not enforce it")),
        (LandlockStatus::Available { effective_abi, .. }, _) => {
            Ok(format!("ABI {}", effective_abi as i32))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

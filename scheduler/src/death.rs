//! Why a worker died: one kind out of a closed list, and the details in words. Without effects.

use std::fmt;

use hotcell_ipc::{
    oom::OomCounts,
    spawn::{ExitStatus, Signal, signal_name},
};
use hotcell_proto::exit::WorkerExit;

use crate::discover::clip;

const SIGKILL: i32 = Signal::KILL.as_raw();
const SIGABRT: i32 = Signal::ABORT.as_raw();

/// How Rust's allocator says on standard error that it got no memory, before it aborts.
const ALLOCATION_FAILED: &str = "memory allocation of ";

/// Lines among which they are looked for.
const LAST_WORDS: usize = 3;

/// What a death was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeathKind {
    /// It exited.
    Exit {
        /// With this code.
        code: i32,
    },
    /// A signal killed it that nobody here had sent.
    Signal {
        /// The signal's number.
        number: i32,
    },
    /// It was killed, or gave up, for want of memory.
    OutOfMemory {
        /// Whether the kernel counted it for this very group, or it is only likely.
        certain: bool,
    },
    /// It broke the conversation or its rules.
    Protocol,
    /// It did not do in time what it was asked to do.
    Deadline,
    /// It stopped making steps while it had work.
    Wedged,
    /// A model's file changed under its mapping. No request is to blame.
    ModelChanged,
    /// Its answers were wrong.
    Corrupt,
    /// Its process could not be made, or refused to begin.
    CannotStart,
    /// It was told to end.
    Stopped,
    /// Nobody can tell.
    Unknown,
}

impl DeathKind {
    /// Whether it was killed because it did nothing any more: where it stands may be asked first.
    pub fn stands_still(self) -> bool {
        matches!(self, DeathKind::Wedged | DeathKind::Deadline)
    }

    /// A stable name for programs: snake case, without the numbers.
    pub fn name(self) -> &'static str {
        match self {
            DeathKind::Exit { .. } => "exit",
            DeathKind::Signal { .. } => "signal",
            DeathKind::OutOfMemory { .. } => "out_of_memory",
            DeathKind::Protocol => "protocol",
            DeathKind::Deadline => "deadline",
            DeathKind::Wedged => "wedged",
            DeathKind::ModelChanged => "model_changed",
            DeathKind::Corrupt => "corrupt",
            DeathKind::CannotStart => "cannot_start",
            DeathKind::Stopped => "stopped",
            DeathKind::Unknown => "unknown",
        }
    }
}

impl fmt::Display for DeathKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match *self {
            DeathKind::Exit { code } => {
                return match WorkerExit::from_code(code) {
                    Some(exit) => {
                        write!(
                            f,
                            "exit code {code} ({})",
                            exit.to_string().trim_end_matches('.')
                        )
                    }
                    None => write!(f, "exit code {code}"),
                };
            }
            DeathKind::Signal { number } => {
                return match signal_name(number) {
                    Some(name) => write!(f, "killed by {name}"),
                    None => write!(f, "killed by signal {number}"),
                };
            }
            DeathKind::OutOfMemory { certain: true } => "out of memory",
            DeathKind::OutOfMemory { certain: false } => "probably out of memory",
            DeathKind::Protocol => "broke the protocol",
            DeathKind::Deadline => "missed a deadline",
            DeathKind::Wedged => "wedged",
            DeathKind::ModelChanged => "a model's file changed under its mapping",
            DeathKind::Corrupt => "gave wrong answers",
            DeathKind::CannotStart => "cannot be started",
            DeathKind::Stopped => "told to end",
            DeathKind::Unknown => "cannot tell how it ended",
        })
    }
}

/// A worker's death.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Death {
    /// What it was.
    pub kind: DeathKind,
    /// What else is known, in words, short enough to be passed on; may be empty.
    pub detail: String,
}

impl Death {
    /// A death of this kind; `detail` may hold a worker's own words.
    pub fn new(kind: DeathKind, detail: impl AsRef<str>) -> Self {
        Self {
            kind,
            detail: clip(detail.as_ref()),
        }
    }
}

impl fmt::Display for Death {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.kind, self.detail.as_str()) {
            (kind, "") => kind.fmt(f),
            (kind @ (DeathKind::Exit { .. } | DeathKind::Signal { .. }), detail) => {
                write!(f, "{kind}; {detail}")
            }
            (kind, detail) => write!(f, "{kind}: {detail}"),
        }
    }
}

/// What the system tells about want of memory around a death.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shortage {
    /// Counters' rise since the process was started, less what was blamed on other deaths already.
    pub counted: OomCounts,
    /// Most bytes the process had resident; 0 if unknown.
    pub peak_resident: u64,
}

/// The end of a process, as far as it shows from outside.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// How it ended; none if that cannot be told.
    pub status: Option<ExitStatus>,
    /// The last lines it wrote to standard error, the newest last.
    pub last_lines: Vec<String>,
    /// Whether memory was short.
    pub shortage: Shortage,
}

impl From<ExitStatus> for Ended {
    fn from(status: ExitStatus) -> Self {
        Self {
            status: Some(status),
            ..Self::default()
        }
    }
}

/// Classifies the end of a process that nobody here had ordered.
pub fn classify(ended: &Ended) -> Death {
    // Of a log's lines those alone that say that something is wrong.
    let is_calm = |line: &str| {
        let line = line.trim_start();
        ["INFO ", "DEBUG ", "TRACE "]
            .iter()
            .any(|level| line.starts_with(level))
    };
    let mut words = ended.last_lines.iter().rev();
    let last = words.find(|line| !is_calm(line)).map_or("", String::as_str);
    let said = match last {
        "" => String::new(),
        last => format!("it said last: {last}"),
    };
    match ended.status {
        None => Death::new(DeathKind::Unknown, said),
        Some(ExitStatus::Code(code)) => match WorkerExit::from_code(code) {
            Some(WorkerExit::ModelChanged) => Death::new(DeathKind::ModelChanged, said),
            Some(WorkerExit::Protocol) => Death::new(DeathKind::Protocol, said),
            Some(
                WorkerExit::Usage
                | WorkerExit::CannotListen
                | WorkerExit::NoDevice
                | WorkerExit::Unconfined,
            ) => {
                let kind = DeathKind::Exit { code };
                let said = if said.is_empty() {
                    said
                } else {
                    format!("; {said}")
                };
                Death::new(DeathKind::CannotStart, format!("{kind}{said}"))
            }
            Some(WorkerExit::Ok) => Death::new(DeathKind::Exit { code }, "nobody had asked it to"),
            _ => Death::new(DeathKind::Exit { code }, said),
        },
        Some(ExitStatus::Signal {
            signal: SIGKILL, ..
        }) => killed(&ended.shortage),
        Some(ExitStatus::Signal {
            signal: SIGABRT, ..
        }) if let Some(line) = out_of_memory(&ended.last_lines) => {
            let said = format!("it said last: {line}");
            Death::new(DeathKind::OutOfMemory { certain: false }, said)
        }
        Some(ExitStatus::Signal { signal, core }) => {
            let dumped = if core { "core dumped" } else { "" };
            let between = if core && !said.is_empty() { "; " } else { "" };
            Death::new(
                DeathKind::Signal { number: signal },
                format!("{dumped}{between}{said}"),
            )
        }
    }
}

/// The allocator's last words, if it had some.
fn out_of_memory(lines: &[String]) -> Option<&String> {
    // How to get a backtrace may be said after them.
    let mut last = lines.iter().rev().take(LAST_WORDS);
    last.find(|line| line.starts_with(ALLOCATION_FAILED))
}

/// Tells the kernel's out-of-memory killer from anybody else who sends SIGKILL.
fn killed(shortage: &Shortage) -> Death {
    let Shortage {
        counted,
        peak_resident,
    } = *shortage;
    let had = match peak_resident {
        0 => String::new(),
        bytes => format!("; it had up to {} MiB resident", bytes >> 20),
    };
    let out_of_memory = |certain, evidence: String| {
        Death::new(
            DeathKind::OutOfMemory { certain },
            format!("{evidence}{had}"),
        )
    };
    match counted {
        OomCounts {
            group: Some(1..), ..
        } => out_of_memory(
            true,
            "killed by SIGKILL, and the kernel counted a kill in this memory group".to_owned(),
        ),
        // The group counts every kill of its own, whoever ran short, and it counted none.
        OomCounts { group: Some(0), .. } => plain(),
        OomCounts { host: 1.., .. } => out_of_memory(
            false,
            format!(
                "killed by SIGKILL, and the host's kernel killed {} for memory meanwhile",
                match counted.host {
                    1 => "a process".to_owned(),
                    many => format!("{many} processes"),
                }
            ),
        ),
        OomCounts {
            limit_hits: 1.., ..
        } => out_of_memory(
            false,
            format!(
                "killed by SIGKILL, and its memory group ran against its limit {} times meanwhile",
                counted.limit_hits
            ),
        ),
        _ => plain(),
    }
}

fn plain() -> Death {
    Death::new(DeathKind::Signal { number: SIGKILL }, "")
}

/// What a process died of that was condemned for `sentence` and then ended by itself or by our SIGKILL, as `end`.
///
/// What it was killed for says more than that it was killed. But a broken conversation is what a crash looks like
/// from here, so the crash, if there was one, says more than that.
pub fn cause(sentence: &Death, end: Death) -> Death {
    let by_us = matches!(end.kind, DeathKind::Signal { number: SIGKILL });
    match sentence.kind {
        DeathKind::Protocol if !by_us => end,
        _ => sentence.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIGSEGV: i32 = 11;

    fn code(code: i32) -> Ended {
        Ended::from(ExitStatus::Code(code))
    }

    fn signal(signal: i32) -> Ended {
        Ended::from(ExitStatus::Signal {
            signal,
            core: false,
        })
    }

    fn saying(mut ended: Ended, line: &str) -> Ended {
        ended.last_lines = vec!["an earlier line".to_owned(), line.to_owned()];
        ended
    }

    fn short(group: Option<u64>, limit_hits: u64, host: u64) -> Ended {
        Ended {
            shortage: Shortage {
                counted: OomCounts {
                    group,
                    limit_hits,
                    host,
                },
                peak_resident: 512 << 20,
            },
            ..signal(SIGKILL)
        }
    }

    #[test]
    fn every_exit_code_has_its_kind() {
        for exit in WorkerExit::ALL {
            let kind = classify(&code(exit.code())).kind;
            let right = match exit {
                WorkerExit::ModelChanged => DeathKind::ModelChanged,
                WorkerExit::Protocol => DeathKind::Protocol,
                WorkerExit::Usage
                | WorkerExit::CannotListen
                | WorkerExit::NoDevice
                | WorkerExit::Unconfined => DeathKind::CannotStart,
                WorkerExit::Ok
                | WorkerExit::ForbiddenSystemCall
                | WorkerExit::DeviceError
                | WorkerExit::Internal => DeathKind::Exit { code: exit.code() },
            };
            assert_eq!(kind, right, "{exit}");
        }
        assert_eq!(classify(&code(99)).to_string(), "exit code 99");
    }

    #[test]
    fn what_a_process_said_last_is_told() {
        let trapped = classify(&saying(code(20), "socket(2) is forbidden")).to_string();
        assert!(
            trapped.starts_with("exit code 20 (Attempted a forbidden system call"),
            "{trapped}"
        );
        assert!(
            trapped.ends_with("; it said last: socket(2) is forbidden"),
            "{trapped}"
        );
        let crashed = classify(&saying(signal(SIGSEGV), "w")).to_string();
        assert_eq!(crashed, "killed by SIGSEGV; it said last: w");
        let calm = " INFO hotcell_worker::engine::load: memory of a model";
        let crashed = classify(&saying(signal(SIGSEGV), calm)).to_string();
        assert_eq!(crashed, "killed by SIGSEGV; it said last: an earlier line");
        let flags = classify(&saying(code(2), "no such flag"));
        assert_eq!(flags.kind.name(), "cannot_start");
        assert!(flags.detail.contains("exit code 2"), "{}", flags.detail);
        let endless = classify(&saying(code(70), &"x".repeat(100_000)));
        assert!(endless.detail.len() < 4096);
    }

    #[test]
    fn a_kill_for_memory_is_certain_if_the_group_counted_it_and_probable_by_other_signs() {
        for (group, hits, host, right) in [
            (Some(1), 0, 0, Some(true)),
            (Some(2), 5, 2, Some(true)),
            (Some(0), 5, 0, None),
            (Some(0), 0, 1, None),
            (None, 0, 1, Some(false)),
            (None, 3, 0, Some(false)),
            (None, 0, 0, None),
        ] {
            let death = classify(&short(group, hits, host));
            match right {
                Some(certain) => {
                    assert_eq!(death.kind, DeathKind::OutOfMemory { certain });
                    assert!(death.detail.contains("512 MiB"), "{}", death.detail);
                }
                None => assert_eq!(death.to_string(), "killed by SIGKILL"),
            }
        }
        // Whatever was counted, a crash is a crash.
        let crashed = Ended {
            status: signal(SIGSEGV).status,
            ..short(Some(1), 1, 1)
        };
        assert_eq!(
            classify(&crashed).kind,
            DeathKind::Signal { number: SIGSEGV }
        );
    }

    #[test]
    fn an_allocation_that_failed_is_want_of_memory_by_its_own_words() {
        let aborted = saying(signal(SIGABRT), "memory allocation of 64 bytes failed");
        let death = classify(&aborted);
        assert_eq!(death.kind, DeathKind::OutOfMemory { certain: false });
        let mut aborted = aborted;
        aborted
            .last_lines
            .push("note: run with `RUST_BACKTRACE=1`".to_owned());
        let death = classify(&aborted);
        assert_eq!(death.kind, DeathKind::OutOfMemory { certain: false });
        assert_eq!(
            death.detail,
            "it said last: memory allocation of 64 bytes failed"
        );
        let aborted = saying(signal(SIGABRT), "assertion failed");
        assert_eq!(
            classify(&aborted).kind,
            DeathKind::Signal { number: SIGABRT }
        );
    }

    #[test]
    fn a_sentence_outweighs_its_execution_and_a_crash_a_broken_conversation() {
        let wedged = Death::new(DeathKind::Wedged, "no step for 10 s");
        let broken = Death::new(DeathKind::Protocol, "handshake failed");
        let killed = classify(&signal(SIGKILL));
        let crashed = classify(&signal(SIGSEGV));
        assert_eq!(cause(&wedged, killed.clone()), wedged);
        // A watcher may use SIGABRT so that the process writes a backtrace.
        assert_eq!(cause(&wedged, crashed.clone()), wedged);
        assert_eq!(cause(&broken, killed), broken);
        assert_eq!(cause(&broken, crashed.clone()), crashed);
        assert_eq!(cause(&broken, cause(&broken, crashed.clone())), crashed);
    }

    #[test]
    fn what_cannot_be_told_is_not_made_up() {
        let death = classify(&Ended::default());
        assert_eq!(death.to_string(), "cannot tell how it ended");
    }
}

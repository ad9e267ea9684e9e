//! Exit codes of `hotcell-worker`: what the scheduler blames a death on, and what the worker's `--help` shows.

use std::fmt;
use std::process::ExitCode;

macro_rules! exits {
    ($(#[doc = $doc:literal] $variant:ident = $code:literal;)*) => {
        /// How the program ends. A code not listed here, or a signal, is a crash. The doc comments are the texts shown.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum WorkerExit { $(#[doc = $doc] $variant = $code,)* }

        impl WorkerExit {
            /// Every exit, in the order of the codes.
            pub const ALL: &'static [WorkerExit] = &[$(WorkerExit::$variant,)*];

            const fn doc(self) -> &'static str {
                match self { $(WorkerExit::$variant => $doc,)* }
            }
        }
    };
}

exits! {
    /// Ended as asked, or because the scheduler is gone.
    Ok = 0;
    /// The flags or the environment are wrong.
    Usage = 2;
    /// Cannot listen: the port or socket is in use, or the path is no good.
    CannotListen = 3;
    /// No such device, or it cannot be opened.
    NoDevice = 4;
    /// The other end of the control connection does not speak this worker's protocol.
    Protocol = 10;
    /// Attempted a forbidden system call; the last line on standard error names it.
    ForbiddenSystemCall = 20;
    /// The kernel lacks a part of the confinement that is required.
    Unconfined = 21;
    /// The device reported an error that only a new process gets rid of.
    DeviceError = 30;
    /// A model's file changed under its mapping.
    ModelChanged = 40;
    /// A fault of the worker or the system.
    Internal = 70;
}

impl WorkerExit {
    /// The number the process ends with.
    pub const fn code(self) -> i32 {
        self as i32
    }

    /// The exit with this number, if it is one of ours.
    pub fn from_code(code: i32) -> Option<WorkerExit> {
        WorkerExit::ALL
            .iter()
            .copied()
            .find(|exit| exit.code() == code)
    }
}

impl fmt::Display for WorkerExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.doc().trim())
    }
}

impl From<WorkerExit> for ExitCode {
    fn from(exit: WorkerExit) -> ExitCode {
        ExitCode::from(exit as u8)
    }
}

/// The table of exit codes as `--help` shows it.
pub fn help() -> String {
    let mut text = String::from("Exit codes:\n");
    for exit in WorkerExit::ALL {
        text.push_str(&format!("  {:>3}  {exit}\n", exit.code()));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_come_back_as_the_exits_they_were() {
        for exit in WorkerExit::ALL {
            assert_eq!(WorkerExit::from_code(exit.code()), Some(*exit));
        }
        assert_eq!(WorkerExit::from_code(1), None);
        assert_eq!(WorkerExit::from_code(256), None);
        assert!(help().contains("\n   20  Attempted a forbidden system call; "));
    }
}

//! Exit codes of `hotcell-scheduler`, and the failures behind them.

use std::process::ExitCode;

macro_rules! exits {
    ($($(#[doc = $doc:literal])* $variant:ident = $code:literal, $words:literal;)*) => {
        /// How the program ends. Scripts and `hotcell serve` tell failures apart by it.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Exit { $($(#[doc = $doc])* $variant = $code,)* }

        impl Exit {
            /// Every exit code with what it means, for `--help`.
            pub const ALL: &'static [(Exit, &'static str)] = &[$((Exit::$variant, $words),)*];
        }
    };
}

exits! {
    /// Ended as asked.
    Ok = 0, "ended as asked";
    /// The flags, the environment or the config file are wrong.
    Usage = 2, "flags, environment or config file are wrong";
    /// A door cannot be opened: the port or socket is in use, or the path is no good.
    CannotListen = 3, "cannot listen: port or socket in use, or path no good";
    /// The probe found no device that can be used.
    NoDevice = 4, "no usable device";
    /// The worker's program is not where it should be.
    NoWorkerBinary = 5, "worker program missing";
    /// The running scheduler did not become this program; it goes on as it was, or there is none.
    TakeoverRefused = 6, "the running scheduler did not become this one (it goes on), or there is none";
    /// The scheduler was to become this program, and does not serve.
    TakeoverFailed = 7, "the running scheduler was to become this one, and does not serve";
    /// Confinement is required, and a layer of it cannot be had.
    Unconfined = 8, "confinement is required, and a layer of it cannot be had";
    /// A fault of the scheduler or the system.
    Internal = 70, "internal fault";
    /// A second signal cut the drain short.
    Interrupted = 130, "a second signal cut the drain short";
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(exit as u8)
    }
}

/// The table of exit codes as `--help` shows it.
pub fn help() -> String {
    let mut text = String::from("Exit codes:\n");
    for (exit, words) in Exit::ALL {
        text.push_str(&format!("  {:>3}  {words}\n", *exit as u8));
    }
    text
}

/// Why the scheduler ended: one sentence and the code it exits with.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// The code to exit with.
    pub exit: Exit,
    /// What happened and the way out.
    pub message: String,
}

impl Failure {
    /// A failure that exits with `exit`.
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self {
            exit,
            message: message.into(),
        }
    }
}

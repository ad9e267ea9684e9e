//! Exit codes, and what a command fails with.

use std::{collections::BTreeMap, fmt::Write as _, io};

use hotcell_proto::error::{Error, Reason};
use serde::Serialize;

use crate::connect::is_unreachable;

macro_rules! exits {
    ($($(#[doc = $doc:literal])* $variant:ident = $code:literal $words:literal;)*) => {
        /// How the command ends. Scripts may rely on the numbers.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum Exit { $($(#[doc = $doc])* $variant = $code,)* }

        impl Exit {
            /// Every code, as `--help` lists them.
            pub const ALL: &'static [Exit] = &[$(Exit::$variant,)*];

            /// What it means.
            pub const fn words(self) -> &'static str { match self { $(Exit::$variant => $words,)* } }
        }
    };
}

exits! {
    /// All went well.
    Success = 0 "success";
    /// The request failed for a reason without a code of its own.
    Failed = 1 "the request failed, or a fault inside Hotcell";
    /// The command line is wrong.
    Usage = 2 "the command line is wrong";
    /// No scheduler.
    Unreachable = 3 "no scheduler could be reached or started";
    /// Something named does not exist.
    NotFound = 4 "a model or file was not found";
    /// The request asks for what cannot be.
    InvalidInput = 5 "the input is invalid: prompt too long, sampling value out of range, name taken";
    /// The model cannot be used.
    ModelUnusable = 6 "the model is corrupt, incomplete, unsupported or too large";
    /// Later it may work.
    Unavailable = 7 "unavailable, overloaded or a worker lost; try again later";
    /// Out of time.
    Deadline = 8 "the deadline passed";
    /// `verify`: not equal.
    Differs = 9 "verify: the answer differs, or cannot be compared here";
    /// Not for this caller.
    Refused = 10 "refused: no token, a wrong one, or one without the role that it takes";
    /// `inspect`: something about it is odd.
    Suspicious = 11 "inspect: the model can be used, and something about it is suspicious";
    /// Ctrl-C.
    Interrupted = 130 "interrupted by Ctrl-C";
    /// Whoever read the output has gone, as in `hotcell … | head`.
    BrokenPipe = 141 "the reader of the output went away; nothing is printed about it";
}

/// Which exit code each reason gets.
pub const REASONS: &[(Reason, Exit)] = &[
    (Reason::InvalidArgument, Exit::InvalidInput),
    (Reason::InvalidSampling, Exit::InvalidInput),
    (Reason::GrammarInvalid, Exit::InvalidInput),
    (Reason::LimitExceeded, Exit::InvalidInput),
    (Reason::PromptTooLong, Exit::InvalidInput),
    (Reason::TemplateFailed, Exit::InvalidInput),
    (Reason::CrashNotFound, Exit::NotFound),
    (Reason::ModelNotFound, Exit::NotFound),
    (Reason::FileNotFound, Exit::NotFound),
    (Reason::ModelExists, Exit::InvalidInput),
    (Reason::NotAModel, Exit::ModelUnusable),
    (Reason::ModelUnsupported, Exit::ModelUnusable),
    (Reason::ModelCorrupt, Exit::ModelUnusable),
    (Reason::ModelNotAllowed, Exit::ModelUnusable),
    (Reason::ModelChanged, Exit::ModelUnusable),
    (Reason::OutOfMemory, Exit::ModelUnusable),
    (Reason::RequestExists, Exit::InvalidInput),
    (Reason::RequestNotFound, Exit::NotFound),
    (Reason::TakenOver, Exit::Failed),
    (Reason::TokensForgotten, Exit::Failed),
    (Reason::Overloaded, Exit::Unavailable),
    (Reason::WorkerLost, Exit::Unavailable),
    (Reason::RequestPoisoned, Exit::Failed),
    (Reason::GraphPoisoned, Exit::Failed),
    (Reason::RegionNotFound, Exit::NotFound),
    (Reason::RegionChanged, Exit::Failed),
    (Reason::Unimplemented, Exit::Failed),
    (Reason::NoWorker, Exit::Unavailable),
    (Reason::Draining, Exit::Unavailable),
    (Reason::ProtocolMismatch, Exit::Failed),
    (Reason::ProtocolViolation, Exit::Failed),
    (Reason::DeadlineExceeded, Exit::Deadline),
    (Reason::Cancelled, Exit::Failed),
    (Reason::NumericsFailed, Exit::Failed),
    (Reason::GraphInvalid, Exit::InvalidInput),
    (Reason::IndexOutOfRange, Exit::InvalidInput),
    (Reason::OpUnsupported, Exit::InvalidInput),
    (Reason::HandleNotFound, Exit::NotFound),
    (Reason::HandleStale, Exit::Failed),
    (Reason::TensorNotReady, Exit::Failed),
    (Reason::TensorLost, Exit::Failed),
    (Reason::SessionNotFound, Exit::NotFound),
    (Reason::QuotaExceeded, Exit::Unavailable),
    (Reason::ChecksumMismatch, Exit::Failed),
    (Reason::Unauthenticated, Exit::Refused),
    (Reason::PermissionDenied, Exit::Refused),
    (Reason::Internal, Exit::Failed),
];

impl Exit {
    /// The code of a failed call.
    pub fn of(error: &Error) -> Self {
        if is_unreachable(error) {
            return Self::Unreachable;
        }
        let row = REASONS.iter().find(|(reason, _)| *reason == error.reason());
        row.map_or(Self::Failed, |(_, exit)| *exit)
    }

    /// The number.
    pub const fn code(self) -> u8 {
        self as u8
    }
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

/// The table of codes for `--help`.
pub(crate) fn help() -> String {
    let mut text = "Exit codes:\n".to_owned();
    for exit in Exit::ALL {
        let _ = writeln!(text, "  {:>3}  {}", exit.code(), exit.words());
    }
    text
}

/// The codes of `hotcell-scheduler`, which `hotcell serve` becomes. Its own table is in its crate.
pub(crate) const SERVE: &str = "\
Exit codes of `hotcell serve`, which are hotcell-scheduler's once it has started:
    0  ended as asked
    2  flags, environment or config file are wrong
    3  cannot listen: port or socket in use, or path no good
    4  no usable device
    5  worker program missing
    8  confinement is required, and a layer of it cannot be had
   70  internal fault
  130  a second signal cut the drain short
";

/// Why a command failed.
#[derive(Debug)]
pub enum Failure {
    /// A call, or something as typed.
    Call(Error),
    /// What was asked for contradicts itself.
    Usage(String),
    /// An answer did not come again; what differs, and where.
    Differs(Error),
    /// A model that was looked into can be used, and something about it is odd.
    Suspicious(Error),
    /// One that was refused, or killed the worker that looked into it.
    Unusable(Error),
    /// Ctrl-C.
    Interrupted,
    /// Output could not be written.
    Output(io::Error),
}

/// A failure as `--json` prints it.
#[derive(Serialize)]
pub(crate) struct FailureView {
    error: Inner,
}

#[derive(Serialize)]
struct Inner {
    reason: &'static str,
    message: String,
    metadata: BTreeMap<String, String>,
    exit_code: u8,
}

impl Failure {
    /// The process's exit code.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Call(error) => Exit::of(error),
            Self::Usage(_) => Exit::Usage,
            Self::Differs(_) => Exit::Differs,
            Self::Suspicious(_) => Exit::Suspicious,
            Self::Unusable(_) => Exit::ModelUnusable,
            Self::Interrupted => Exit::Interrupted,
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => Exit::BrokenPipe,
            Self::Output(_) => Exit::Failed,
        }
    }

    /// One sentence; never nothing, whatever a server says.
    pub fn message(&self) -> String {
        match self {
            Self::Call(error) if error.message().trim().is_empty() => format!(
                "the request failed ({}) and the other side did not say why; look into its log",
                error.reason().name()
            ),
            Self::Call(error)
            | Self::Differs(error)
            | Self::Suspicious(error)
            | Self::Unusable(error) => error.message().to_owned(),
            Self::Usage(message) => message.clone(),
            Self::Interrupted => "interrupted".to_owned(),
            Self::Output(error) => format!("cannot write the output: {error}"),
        }
    }

    pub(crate) fn view(&self) -> FailureView {
        let (reason, metadata) = match self {
            Self::Call(error) if is_unreachable(error) => ("UNREACHABLE", Some(error)),
            Self::Call(error) => (error.reason().name(), Some(error)),
            Self::Usage(_) => ("USAGE", None),
            Self::Differs(error) => ("DIFFERS", Some(error)),
            Self::Suspicious(error) => ("SUSPICIOUS", Some(error)),
            Self::Unusable(error) => (error.reason().name(), Some(error)),
            Self::Interrupted => ("INTERRUPTED", None),
            Self::Output(_) => ("OUTPUT", None),
        };
        let metadata = metadata.into_iter().flat_map(Error::metadata);
        FailureView {
            error: Inner {
                reason,
                message: self.message(),
                metadata: metadata
                    .map(|(k, v)| (k.to_owned(), v.to_owned()))
                    .collect(),
                exit_code: self.exit().code(),
            },
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Call(error)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connect::cannot_start;

    #[test]
    fn every_reason_has_one_exit_code() {
        for &reason in Reason::ALL {
            let rows = REASONS.iter().filter(|(r, _)| *r == reason).count();
            assert_eq!(rows, 1, "{reason:?} must stand once in REASONS");
            assert_ne!(Exit::of(&Error::new(reason, "")), Exit::Success);
        }
        assert_eq!(REASONS.len(), Reason::ALL.len());
    }

    #[test]
    fn unreachable_is_told_from_unavailable() {
        assert_eq!(Exit::of(&cannot_start(String::new())), Exit::Unreachable);
        let busy = Error::new(Reason::NoWorker, "all workers are starting");
        assert_eq!(Exit::of(&busy), Exit::Unavailable);
    }

    #[test]
    fn a_failure_without_words_gets_some() {
        let failure = Failure::from(Error::new(Reason::Internal, " "));
        assert!(failure.message().contains("(INTERNAL)"));
    }

    #[test]
    fn help_lists_every_code() {
        for exit in Exit::ALL {
            assert!(help().contains(&format!("{:>3}  {}", exit.code(), exit.words())));
        }
    }
}

//! `hotcell debug`: looking into a worker.

mod capture;
mod guard;
mod replay;
pub(super) mod told;
pub(super) mod trace;
pub(super) mod watch;

use clap::{Args, Subcommand};

use super::{GlobalFlags, exit::Failure, interrupt::Interrupt, session::Session, ui::Ui};

pub use capture::{CaptureFlags, Layers, LookFlags};
pub use guard::GuardFlags;
pub use replay::{CompareFlags, ReplayFlags};
pub use trace::TraceFlags;
pub use watch::DebugWatchFlags;

/// `hotcell debug`.
#[derive(Args, Clone, Debug)]
pub struct DebugFlags {
    /// What to do.
    #[command(subcommand)]
    pub command: DebugCommand,
}

/// What `hotcell debug` does.
#[derive(Clone, Debug, Subcommand)]
#[non_exhaustive]
pub enum DebugCommand {
    /// Show what a worker does, line by line, until Ctrl-C
    ///
    /// STEPS/S, TOKENS/S: of token requests. ROWS: tokens computed per step, those of prompts among them. P50, P99: time
    /// of a step. BUSY: share of the time in steps, COMPUTE: share in which the device computed. RUN, WAIT: requests. CACHE:
    /// share of its blocks in use. WHERE: at which op plans were found most often. --verbose adds requests, memory, tensor
    /// sessions and further ops.
    Watch(DebugWatchFlags),
    /// Look at what is computed for a request while it is served, and write it into a file
    ///
    /// For each token: the rows of the nodes' results that it was drawn from, as statistics and hashes, and with --values
    /// some or all of their numbers. The request does not wait: tokens that come too fast are left out and counted. The
    /// file (.hotcell: a JSON header, and a safetensors file) is there once it is whole.
    Capture(Box<CaptureFlags>),
    /// Run a request again in a throw-away worker, and say whether the same comes of it
    ///
    /// Of a file, every row of every node is compared bit by bit, and the first that differs is named. Of a request's id,
    /// the tokens are. Exit code 9 if something differs.
    Replay(Box<ReplayFlags>),
    /// Compare two captures, and name the first node that differs
    Compare(CompareFlags),
    /// Watchpoints: tell where nodes' values are what they must not be, until Ctrl-C
    ///
    /// The device looks at every step while this runs. Of each request the first such node of a step is told.
    Guard(Box<GuardFlags>),
    /// Write a timeline of what a worker does, for Perfetto: steps, device, requests, counters
    Trace(TraceFlags),
}

pub(crate) async fn debug(
    ui: &mut Ui,
    global: &GlobalFlags,
    flags: &DebugFlags,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    if let DebugCommand::Compare(flags) = &flags.command {
        return replay::compare_files(ui, flags);
    }
    let session = Session::running(global).await?;
    match &flags.command {
        DebugCommand::Capture(flags) => capture::capture(ui, &session, flags, interrupt).await,
        DebugCommand::Replay(flags) => replay::replay(ui, &session, flags, interrupt).await,
        DebugCommand::Compare(_) => Ok(()),
        DebugCommand::Guard(flags) => guard::guard(ui, &session, flags, interrupt).await,
        DebugCommand::Trace(flags) => trace::trace(ui, &session, flags, interrupt).await,
        DebugCommand::Watch(flags) => watch::watch(ui, &session, flags, interrupt).await,
    }
}

//! `hotcell debug`: looking into a worker.

mod capture;
mod compare;
mod dump;
mod guard;
mod memory;
mod prompt;
mod reduce;
mod replay;
mod report;
mod sides;
pub(super) mod told;
pub(super) mod trace;
pub(super) mod watch;

use clap::{Args, Subcommand};

use super::{GlobalFlags, exit::Failure, interrupt::Interrupt, session::Session, ui::Ui};
use crate::local::Bundled;

pub(super) use capture::condition;
pub use capture::{CaptureFlags, Layers, LookFlags, When};
pub use compare::CompareFlags;
pub use dump::{DumpFlags, DumpStyle};
pub use guard::GuardFlags;
pub(super) use guard::{line as hit_line, view as hit_view};
pub use memory::MemoryFlags;
pub use reduce::{FaultFlags, ReduceFlags, RerunFlags};
pub use replay::ReplayFlags;
pub use trace::TraceFlags;
pub use watch::DebugWatchFlags;

/// `hotcell debug`.
#[derive(Args, Clone, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub struct DebugFlags {
    /// Open a prompt for this worker, with completion and help [default: the only one]
    pub worker: Option<String>,
    /// What to do.
    #[command(subcommand)]
    pub command: Option<DebugCommand>,
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
    /// Of a file, every row of every node is compared bit by bit, and the first that differs is named. Of a request's id, or
    /// that of the crash report of the process that ran it, the tokens are. Exit code 9 if something differs.
    Replay(Box<ReplayFlags>),
    /// Compare what two backends, worker programs, models or captures compute, and name the first node that is further off
    /// than its op may be
    ///
    /// Two captures are compared as they are, and a capture with tensors of another program by their names in a safetensors
    /// file. With --backend, --worker, --program, --model-path or --kv-cache the capture's request is run again so: once, and
    /// compared with the capture; or, with two of one kind, on both, the second being the reference. NMSE: normalised mean
    /// square error. BOUND: what of that the op may have, by which backends are tested. Exit code 9 if a row is beyond it.
    Compare(Box<CompareFlags>),
    /// Of a capture that fails somewhere, cut out the smallest graph that still does
    ///
    /// Finds the first token and node at which two sides differ (as compare does), or one has what --nan, --inf or --above
    /// say, or kills its worker (--dies). That node alone is computed again, of the values that it had; then with nodes before
    /// it, if it does not fail alone; then with less and less of each axis. What is left is a file that `rerun` computes
    /// anywhere.
    Reduce(Box<ReduceFlags>),
    /// Compute what reduce has left of a capture, and say whether it fails here
    ///
    /// On a worker of the scheduler that runs, or with --program on one of its own. Exit code 9 if it fails.
    Rerun(Box<RerunFlags>),
    /// Watchpoints: tell where nodes' values are what they must not be, until Ctrl-C
    ///
    /// The device looks at every step while this runs. Of each request the first such node of a step is told.
    Guard(Box<GuardFlags>),
    /// Write a timeline of what a worker does, for Perfetto: steps, device, requests, counters
    Trace(TraceFlags),
    /// Show who holds which bytes of a worker's memory: weights, caches and requests, plans, tensor sessions and handles
    ///
    /// What several share counts for each: blocks of a prompt that requests begin with alike, weights that sessions read.
    Memory(MemoryFlags),
    /// Write the values in a capture's file as text, as arrays in brackets
    Dump(DumpFlags),
}

impl DebugCommand {
    /// Has it mean this worker unless it names one.
    fn at(&mut self, worker: &str) {
        let meant = match self {
            Self::Watch(flags) => &mut flags.worker,
            Self::Capture(flags) => &mut flags.worker,
            // A backend says where.
            Self::Replay(flags) if flags.backend.is_some() => return,
            Self::Replay(flags) => &mut flags.worker,
            Self::Guard(flags) => &mut flags.worker,
            Self::Trace(flags) => &mut flags.worker,
            Self::Memory(flags) => &mut flags.worker,
            Self::Rerun(flags) if flags.sides.count() == 0 => {
                flags.sides.workers.push(worker.to_owned());
                return;
            }
            // Their sides are others, or a file.
            Self::Compare(_) | Self::Dump(_) | Self::Reduce(_) | Self::Rerun(_) => return,
        };
        meant.get_or_insert_with(|| worker.to_owned());
    }
}

pub(crate) async fn debug(
    ui: &mut Ui,
    global: &GlobalFlags,
    flags: &DebugFlags,
    bundled: Bundled,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    // Boxed, as what a prompt does is: the states of all commands inside of each other would be more than rustc lays out.
    match &flags.command {
        Some(command) => Box::pin(run(ui, global, command, bundled, interrupt)).await,
        None => {
            let worker = flags.worker.as_deref();
            Box::pin(prompt::prompt(ui, global, worker, bundled, interrupt)).await
        }
    }
}

async fn run(
    ui: &mut Ui,
    global: &GlobalFlags,
    command: &DebugCommand,
    bundled: Bundled,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    match command {
        DebugCommand::Compare(flags) => {
            return compare::compare(ui, global, flags, bundled, interrupt).await;
        }
        DebugCommand::Reduce(flags) => {
            return Box::pin(reduce::reduce(ui, global, flags, bundled, interrupt)).await;
        }
        DebugCommand::Rerun(flags) => {
            return reduce::rerun(ui, global, flags, bundled, interrupt).await;
        }
        DebugCommand::Dump(flags) => return dump::dump(ui, flags),
        _ => {}
    }
    let session = Session::running(global).await?;
    match command {
        DebugCommand::Capture(flags) => capture::capture(ui, &session, flags, interrupt).await,
        DebugCommand::Replay(flags) => replay::replay(ui, &session, flags, interrupt).await,
        // Above: they have sessions of their own, or none.
        DebugCommand::Compare(_)
        | DebugCommand::Dump(_)
        | DebugCommand::Reduce(_)
        | DebugCommand::Rerun(_) => Ok(()),
        DebugCommand::Memory(flags) => memory::memory(ui, &session, flags).await,
        DebugCommand::Guard(flags) => guard::guard(ui, &session, flags, interrupt).await,
        DebugCommand::Trace(flags) => trace::trace(ui, &session, flags, interrupt).await,
        DebugCommand::Watch(flags) => watch::watch(ui, &session, flags, interrupt).await,
    }
}

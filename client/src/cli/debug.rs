//! `hotcell debug`: looking into a worker.

mod watch;

use clap::{Args, Subcommand};

use super::{GlobalFlags, exit::Failure, interrupt::Interrupt, session::Session, ui::Ui};

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
}

pub(crate) async fn debug(
    ui: &mut Ui,
    global: &GlobalFlags,
    flags: &DebugFlags,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    let session = Session::running(global).await?;
    match &flags.command {
        DebugCommand::Watch(flags) => watch::watch(ui, &session, flags, interrupt).await,
    }
}

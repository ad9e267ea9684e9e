//! `hotcell release`, `hotcell restart` and `hotcell drain`: what becomes of one worker.

use std::time::Duration;

use clap::Args;
use serde_json::json;

use super::{GlobalFlags, exit::Failure, flags::duration, session::Session, ui::Ui};

/// `hotcell release` and `hotcell restart`.
#[derive(Args, Clone, Debug)]
pub struct ReleaseFlags {
    /// The worker's name, as `hotcell ps` shows it
    pub worker: String,
}

/// `hotcell drain`.
#[derive(Args, Clone, Debug)]
pub struct DrainFlags {
    /// The worker's name, as `hotcell ps` shows it
    pub worker: String,
    /// How long its requests have before they go on elsewhere: 500ms, 30s, 2h
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    pub within: Duration,
}

/// Says that it was done to a worker.
fn done(ui: &mut Ui, what: &str, worker: &str) -> Result<(), Failure> {
    match ui.manner.json {
        true => ui.print_json(&json!({ what: worker })),
        false => ui.print(&format!("{what} {worker}\n")),
    }
}

pub(crate) async fn release(
    ui: &mut Ui,
    global: &GlobalFlags,
    flags: &ReleaseFlags,
) -> Result<(), Failure> {
    let session = Session::running(global).await?;
    session.client.release(&flags.worker).await?;
    done(ui, "released", &flags.worker)
}

pub(crate) async fn restart(
    ui: &mut Ui,
    global: &GlobalFlags,
    flags: &ReleaseFlags,
) -> Result<(), Failure> {
    let session = Session::running(global).await?;
    session.client.restart(&flags.worker).await?;
    done(ui, "restarted", &flags.worker)
}

pub(crate) async fn drain(
    ui: &mut Ui,
    global: &GlobalFlags,
    flags: &DrainFlags,
) -> Result<(), Failure> {
    let session = Session::running(global).await?;
    session.client.drain(&flags.worker, flags.within).await?;
    done(ui, "drained", &flags.worker)
}

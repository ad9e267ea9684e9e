//! `hotcell-worker`: one process, one device.

use std::process::ExitCode;

use clap::Parser;
use hotcell_kernels::registry::Registry;
use hotcell_worker::{config::Cli, program};

fn main() -> ExitCode {
    program::run(Cli::parse(), Registry::default()).into()
}

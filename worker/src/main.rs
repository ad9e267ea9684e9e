//! `hotcell-worker`: one process, one device.

use std::process::ExitCode;

use clap::Parser;
use hotcell_kernels::registry::BACKENDS;
use hotcell_worker::{config::Cli, program};

fn main() -> ExitCode {
    program::run(Cli::parse(), BACKENDS).into()
}

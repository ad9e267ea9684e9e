//! `hotcell-worker`, which breaks on command.

use std::process::ExitCode;

use clap::Parser;
use hotcell_tests::fault;
use hotcell_worker::config::Cli;

fn main() -> ExitCode {
    fault::run(Cli::parse()).into()
}

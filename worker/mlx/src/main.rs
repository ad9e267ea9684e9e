//! `hotcell-worker-mlx`: the worker, linked with MLX.

use std::process::ExitCode;

use clap::Parser;
use hotcell_kernels::{mlx::MlxBackend, registry::Registry};
use hotcell_worker::{config::Cli, program};

fn main() -> ExitCode {
    program::run(Cli::parse(), Registry::of(&[&MlxBackend])).into()
}

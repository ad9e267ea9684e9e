//! `hotcell-worker-mlx`: the worker, linked with MLX.

use std::process::ExitCode;

use clap::Parser;
use hotcell_kernels::mlx::MlxBackend;
use hotcell_worker::{config::Cli, program};

fn main() -> ExitCode {
    program::run(Cli::parse(), &[&MlxBackend]).into()
}

//! `hotcell-worker-cuda`: the worker, with CUDA devices. It links nothing of CUDA; a program of its own, so that a driver that
//! crashes or hangs while it looks for devices costs no other device.

use std::process::ExitCode;

use clap::Parser;
use hotcell_kernels::cuda::CudaBackend;
use hotcell_worker::{config::Cli, program};

fn main() -> ExitCode {
    program::run(Cli::parse(), &[&CudaBackend]).into()
}

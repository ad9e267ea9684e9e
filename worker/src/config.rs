//! How the worker is started.

use std::{os::fd::RawFd, path::PathBuf};

use clap::{Args, Parser, Subcommand};
use hotcell_graph::{CacheSpec, DType};
use hotcell_proto::limits;

use crate::exit;

/// Runs one device in one process: loads models, computes, streams tokens.
///
/// A scheduler starts it with `serve`. Run alone with `--listen` it serves the same Tokens service.
#[derive(Debug, Parser)]
#[command(name = "hotcell-worker", version, after_help = exit::help())]
#[command(args_conflicts_with_subcommands = true)]
pub struct Cli {
    /// What to do; without it, run alone.
    #[command(subcommand)]
    pub mode: Option<Mode>,
    /// How to run alone.
    #[command(flatten)]
    pub alone: Alone,
}

/// What a scheduler asks of the program.
#[derive(Debug, Subcommand)]
pub enum Mode {
    /// Print the devices of this host as JSON and exit.
    Probe,
    /// Print how the devices of this host are, as a line of JSON every time, until nobody reads it.
    #[command(hide = true)]
    Gauges(Gauges),
    /// Serve a scheduler over inherited descriptors.
    #[command(hide = true)]
    Serve(Serve),
}

/// How often it is told.
#[derive(Clone, Debug, Args)]
pub struct Gauges {
    /// Milliseconds between two lines; a fault is told at once.
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(10..))]
    pub every: u64,
}

/// What every way of running has.
#[derive(Clone, Debug, Args)]
pub struct Common {
    /// Device to run on, as `probe` lists it.
    #[arg(long, default_value = "cpu:0")]
    pub device: String,
    /// Cores to compute on, for example 0,1; all that there are by default.
    #[arg(long, value_delimiter = ',')]
    pub cores: Vec<u32>,
    /// Keep each compute thread on a core of its own, in their order.
    #[arg(long)]
    pub pin: bool,
    /// Processes that compute each model together, every one a part of it, on as many cores each, or on a device of CUDA each, from this one on; the results are the same.
    #[arg(long, default_value_t = 1, value_parser = members)]
    pub tensor_parallel: usize,
    /// Processes that have each model's layers together, every one some of them: parts of a prompt are computed at once, a
    /// token by one after another; the results are the same. Not beside --tensor-parallel.
    #[arg(long, default_value_t = 1, value_parser = members)]
    pub pipeline_parallel: usize,
    /// How the KV cache stores numbers: f32, f16, bf16 or q8_0.
    #[arg(long, default_value = "f16", value_parser = cache_dtype)]
    pub kv_cache: DType,
    /// Bytes that each model may take besides its weights; by default 1 GiB of cache, more if one context needs it.
    #[arg(long)]
    pub model_memory: Option<u64>,
    /// Tokens of one sequence at most, prompt and answer together, however many the model allows.
    #[arg(long)]
    pub max_context: Option<u32>,
    /// Bytes that clients' tensors and plans may take; half of the device's memory by default.
    #[arg(long)]
    pub tensor_memory: Option<u64>,
    /// End at once where a layer of the confinement cannot be had.
    #[arg(long)]
    pub require_confinement: bool,
    /// What to log on standard error: error, warn, info, debug or trace.
    #[arg(long, default_value = "info")]
    pub log: String,
}

/// Alone: a socket of its own, and a model if it is to generate.
#[derive(Clone, Debug, Args)]
pub struct Alone {
    /// Where to listen: unix:/path or host:port.
    #[arg(long)]
    pub listen: Option<String>,
    /// The model: a folder or a .gguf file; without one, it only serves tensors.
    #[arg(long)]
    pub model: Option<PathBuf>,
    /// The name that requests use for it; the last part of its path by default.
    #[arg(long)]
    pub name: Option<String>,
    /// Device, cores, cache, log.
    #[command(flatten)]
    pub common: Common,
}

/// With a scheduler: connected sockets.
#[derive(Clone, Debug, Args)]
pub struct Serve {
    /// The worker's name.
    #[arg(long)]
    pub worker_id: String,
    /// Connected socket for `hotcell.v1.Worker` and health; its end ends the worker.
    #[arg(long)]
    pub control_fd: RawFd,
    /// Connected socket for `hotcell.v1.Tokens`.
    #[arg(long)]
    pub tokens_fd: RawFd,
    /// Connected socket for tensors.
    #[arg(long)]
    pub tensors_fd: RawFd,
    /// Socket that descriptors arrive on.
    #[arg(long)]
    pub descriptors_fd: RawFd,
    /// Memory in which this process writes what it does.
    #[arg(long)]
    pub blackbox_fd: RawFd,
    /// Note the very node that runs, however long that takes.
    #[arg(long)]
    pub follow: bool,
    /// Compute when nobody else wants the processor.
    #[arg(long)]
    pub background: bool,
    /// Device, cores, cache, log.
    #[command(flatten)]
    pub common: Common,
}

fn members(text: &str) -> Result<usize, String> {
    let count = text.parse().ok();
    let count = count.filter(|n| (1..=limits::MAX_MEMBERS).contains(n));
    count.ok_or_else(|| format!("must be 1 to {}", limits::MAX_MEMBERS))
}

fn cache_dtype(name: &str) -> Result<DType, String> {
    let dtype = DType::from_name(name).filter(|d| CacheSpec::DTYPES.contains(d));
    dtype.ok_or_else(|| "must be f32, f16, bf16 or q8_0".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn flags_are_consistent() {
        Cli::command().debug_assert();
        let cli = Cli::parse_from(["hotcell-worker", "--listen", "127.0.0.1:1", "--model", "m"]);
        assert!(cli.mode.is_none());
        assert!(Cli::try_parse_from(["hotcell-worker", "--kv-cache", "q8_0"]).is_ok());
        assert!(Cli::try_parse_from(["hotcell-worker", "--kv-cache", "q4_0"]).is_err());
    }
}

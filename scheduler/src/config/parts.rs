//! Settings that go together, and together to who needs them.

use std::{path::PathBuf, time::Duration};

use super::KvCache;

/// How long things may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// The probe of devices.
    pub probe: Duration,
    /// A request's wait for a worker that comes back.
    pub resume: Duration,
    /// A request's wait while every worker is full.
    pub queue: Duration,
    /// A stream's wait for its client to come back.
    pub reattach: Duration,
    /// Streams after SIGTERM.
    pub drain: Duration,
    /// How long it says that it is not ready before it drains.
    pub drain_delay: Duration,
}

/// Where packed copies of models go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PackConfig {
    /// The folder for the larger ones, if there is one.
    pub folder: Option<PathBuf>,
    /// Bytes that those may take.
    pub limit: Option<u64>,
}

/// What workers are started with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerConfig {
    /// The program.
    pub binary: PathBuf,
    /// Dtype of the KV cache.
    pub kv_cache: KvCache,
    /// Bytes that each model may take besides its weights; none: the worker's own default.
    pub model_memory: Option<u64>,
    /// What it logs: off, error, warn, info, debug or trace.
    pub log: &'static str,
    /// Whether it ends where a layer of its confinement is missing.
    pub require_confinement: bool,
    /// Bytes of memory that its control group may take; none: as much as its device has.
    pub memory: Option<u64>,
}

/// Backends whose native library may be missing or broken: each has a worker's program of its own.
pub const BACKENDS_APART: [&str; 1] = ["mlx"];

impl WorkerConfig {
    /// The program for a backend's devices: for one of [`BACKENDS_APART`] the one of its name beside the others'.
    pub fn program(&self, backend: &str) -> PathBuf {
        match BACKENDS_APART.contains(&backend) {
            true => self
                .binary
                .with_file_name(format!("hotcell-worker-{backend}")),
            false => self.binary.clone(),
        }
    }
}

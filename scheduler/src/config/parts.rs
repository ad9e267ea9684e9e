//! Settings that go together, and together to who needs them.

use std::{path::PathBuf, time::Duration};

use hotcell_proto::v1::Device;

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
    /// Whether each of its compute threads stays on a core of its own.
    pub pin: bool,
    /// Processes that compute each of its models together, every layer shared out.
    pub tensor_parallel: usize,
    /// The same, each with some of the layers. One of the two is 1.
    pub pipeline_parallel: usize,
    /// Bytes of memory that its control group may take; none: as much as its device has.
    pub memory: Option<u64>,
}

/// Backends whose native library may be missing or broken: each has a worker's program of its own.
pub const BACKENDS_APART: [&str; 2] = ["cuda", "mlx"];

/// The name of the program of one of [`BACKENDS_APART`].
pub fn program_apart(backend: &str) -> String {
    format!("hotcell-worker-{backend}")
}

impl WorkerConfig {
    /// The program of one of [`BACKENDS_APART`], beside the others'.
    pub fn apart(&self, backend: &str) -> PathBuf {
        self.binary.with_file_name(program_apart(backend))
    }

    /// The program that serves a device, which is the one that found it.
    pub fn program(&self, device: &Device) -> PathBuf {
        // Devices may come from another program's memory, so that a name is one of ours or none.
        let mut apart = BACKENDS_APART.iter();
        match apart.find(|backend| program_apart(backend) == device.program) {
            Some(backend) => self.apart(backend),
            None => self.binary.clone(),
        }
    }
}

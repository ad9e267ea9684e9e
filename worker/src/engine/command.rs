//! What goes into the engine's queue.

use std::{collections::BTreeMap, sync::Arc};

use hotcell_proto::{
    error::Error,
    v1::{CacheStatus, MemoryUse},
};
use tokio::sync::oneshot;

use super::{Ready, debug::DebugWork};
use crate::{
    generate::{check, ledger, task::Task},
    model::run::{Keeping, Sizes},
    session::plane::TensorPlane,
    weights::{ModelFile, ModelSource, Weight},
};

/// Something to do with the tensors.
pub(super) type TensorWork = Box<dyn FnOnce(&mut TensorPlane) + Send>;

/// What the engine is asked to do.
pub(super) enum Command {
    Load {
        name: String,
        /// And what it was opened from.
        source: Box<(ModelSource, Vec<ModelFile>)>,
        keeping: Keeping,
        reply: oneshot::Sender<Result<Ready, Error>>,
    },
    Measure {
        source: Box<ModelSource>,
        reply: oneshot::Sender<Result<Sizes, Error>>,
    },
    UsePacked {
        name: String,
        weights: BTreeMap<String, Weight>,
        reply: oneshot::Sender<Result<(), Error>>,
    },
    Unload {
        name: String,
        reply: oneshot::Sender<bool>,
    },
    Compute {
        model: String,
        task: Task,
    },
    Status {
        reply: oneshot::Sender<(Vec<CacheStatus>, Vec<MemoryUse>)>,
    },
    Blocks {
        model: String,
        watcher: Arc<()>,
        begins: bool,
        reply: ledger::Reply,
    },
    Check {
        model: String,
        steps: u32,
        reply: check::Reply,
    },
    Drain {
        reply: oneshot::Sender<()>,
    },
    Tensors(TensorWork),
    Debug(DebugWork),
    /// Somebody made room or went away: look again.
    Wake,
}

impl Command {
    /// Whether it keeps the engine from computing for more than a moment.
    pub fn takes_its_time(&self) -> bool {
        match self {
            Self::Load { .. }
            | Self::Measure { .. }
            | Self::UsePacked { .. }
            | Self::Unload { .. }
            | Self::Debug(_) => true,
            Self::Compute { .. }
            | Self::Status { .. }
            | Self::Blocks { .. }
            | Self::Check { .. }
            | Self::Drain { .. }
            | Self::Tensors(_)
            | Self::Wake => false,
        }
    }
}

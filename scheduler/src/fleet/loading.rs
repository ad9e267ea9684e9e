//! Handing a model over to a worker, for as long as it takes and makes progress, and taking it back.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use hotcell_ipc::descriptors::{DescriptorReceiver, descriptor_pair};

use hotcell_proto::{
    error::{Error, Reason},
    ids::{Layout, ModelName},
    limits,
    v1::{
        KeptWeights, LoadProgress, LoadRequest, Loaded, ModelSummary, NumericsClass, PackedFiles,
        UnloadRequest,
    },
};
use tokio::{task::spawn_blocking, time::timeout};
use tonic::Status;

use super::link::{Condemnation, Link, words};
use crate::{death::DeathKind, discover::clip, kept::Kept, packed::Set, vault::OpenModel};

/// Why a worker did not load a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadFailure {
    /// It said so, or the model cannot be handed out: the model's fault.
    Refused(Error),
    /// The conversation broke: the worker's fault.
    Broken(DeathKind, String),
}

/// What a worker gets with a model's files.
#[derive(Default)]
pub struct Beside<'a> {
    /// Copies in a layout that its device likes.
    pub packed: Option<(&'a Layout, &'a Set)>,
    /// What an earlier worker left in its device's memory.
    pub kept: Option<Arc<Kept>>,
    /// Whether what it puts there is to outlive it.
    pub leaves: bool,
}

impl Link {
    /// Sends a model's files, and more after them, and returns their tag.
    ///
    /// # Errors
    /// [`LoadFailure`].
    pub(super) async fn send_files<'a>(
        &self,
        files: &'a OpenModel,
        more: impl Iterator<Item = BorrowedFd<'a>>,
    ) -> Result<u64, LoadFailure> {
        let mut fds = files.hand_out().map_err(LoadFailure::Refused)?;
        fds.extend(more);
        let tag = self.tags.fetch_add(1, Ordering::Relaxed);
        self.descriptors
            .send_async(tag, &fds)
            .await
            .map_err(|e| broke(format!("cannot hand over files: {e}")))?;
        Ok(tag)
    }

    /// Hands over a model's files and what there is beside them, and waits until it is loaded; `patience` bounds the time between two signs
    /// of progress: bytes that were read, or movement of the engine in its black box once all are. What it says of the model,
    /// and what it left in its device's memory.
    ///
    /// # Errors
    /// [`LoadFailure`].
    pub async fn load(
        &self,
        model: &ModelName,
        files: &OpenModel,
        beside: Beside<'_>,
        patience: Duration,
        mut progress: impl FnMut(&LoadProgress),
    ) -> Result<(Loaded, Option<Kept>), LoadFailure> {
        let Beside {
            packed,
            kept,
            leaves,
        } = beside;
        let silent = || {
            let why = format!("no progress for {patience:?} while loading");
            LoadFailure::Broken(DeathKind::Deadline, why)
        };
        let (sends, takes) = match leaves {
            true => pair().map_err(|e| broke(format!("no socket to take its weights: {e}")))?,
            false => (None, None),
        };
        let copies = packed.iter().flat_map(|(_, set)| set.iter());
        let copies = copies.map(|(_, copy)| copy.as_fd());
        let pieces = kept.iter().flat_map(|kept| &kept.pieces).map(AsFd::as_fd);
        let more = copies.chain(pieces).chain(sends.iter().map(AsFd::as_fd));
        let tag = self.send_files(files, more).await?;
        drop(sends);
        let packed = packed.map(|(layout, set)| PackedFiles {
            layout: layout.as_str().to_owned(),
            files: set.iter().map(|(index, _)| *index).collect(),
        });
        let request = LoadRequest {
            model: model.as_str().to_owned(),
            tag,
            files: files.handles(),
            packed,
            kept: kept.map(|kept| kept.told.clone()),
            keeps: leaves,
        };
        let mut control = self.control();
        let mut signs = self.signs(patience);
        let answer = signs.wait(control.load(request)).await;
        let answer = answer.ok_or_else(silent)?;
        let mut stream = answer.map_err(failure)?.into_inner();
        let mut last = LoadProgress::default();
        loop {
            let next = signs.wait(stream.message()).await.ok_or_else(silent)?;
            match next.map_err(failure)? {
                Some(LoadProgress {
                    loaded: Some(loaded),
                    ..
                }) => {
                    let mut loaded = believe(loaded).map_err(LoadFailure::Refused)?;
                    let left = self.take(loaded.kept.take(), takes).await;
                    return Ok((loaded, left));
                }
                // It says the same again and again while it waits: its event loop lives, which is no progress.
                Some(step) => {
                    if step != last {
                        signs.shown();
                    } else if signs.is_over() {
                        return Err(silent());
                    }
                    // What else the engine does while bytes are read says nothing about them.
                    signs.count_pulse(step.bytes_done >= step.bytes_total);
                    progress(&step);
                    last = step;
                }
                None => {
                    return Err(broke("its load ended without a result"));
                }
            }
        }
    }
}

impl Link {
    /// Lets it forget a model. A worker that does not answer within `patience` is condemned.
    ///
    /// # Errors
    /// Its words, or those about the broken connection or its silence.
    pub async fn unload(&self, model: &ModelName, patience: Duration) -> Result<(), Error> {
        let request = UnloadRequest {
            model: model.as_str().to_owned(),
        };
        match timeout(patience, self.control().unload(request)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(status)) => Err(words(&status)),
            Err(_) => {
                let why = format!("it did not unload {model} within {patience:?}");
                self.fate
                    .condemn(Condemnation::new(DeathKind::Deadline, why.clone()));
                Err(Error::new(Reason::WorkerLost, why))
            }
        }
    }

    /// Takes what a worker says that it left in its device's memory.
    async fn take(
        &self,
        told: Option<KeptWeights>,
        takes: Option<DescriptorReceiver>,
    ) -> Option<Kept> {
        let (told, takes) = told.zip(takes)?;
        match spawn_blocking(move || Kept::receive(told, &takes)).await {
            Ok(Ok(kept)) => return Some(kept),
            Ok(Err(error)) => {
                tracing::warn!(worker = self.worker, %error, "a worker's weights end with it");
            }
            Err(error) => tracing::error!(%error, "taking a worker's weights failed"),
        }
        None
    }
}

/// The end that a worker sends on, and ours.
fn pair() -> std::io::Result<(Option<OwnedFd>, Option<DescriptorReceiver>)> {
    let (its, ours) = descriptor_pair()?;
    Ok((Some(its), Some(DescriptorReceiver::new(ours)?)))
}

fn broke(why: impl Into<String>) -> LoadFailure {
    LoadFailure::Broken(DeathKind::Protocol, why.into())
}

pub(super) fn failure(status: Status) -> LoadFailure {
    match Error::typed(&status) {
        Some(_) => LoadFailure::Refused(words(&status)),
        None => broke(format!("load failed: {}", clip(status.message()))),
    }
}

/// Checks what a worker says about a model it loaded.
pub(super) fn believe(loaded: Loaded) -> Result<Loaded, Error> {
    let doubt = |what: &str| {
        Error::new(
            Reason::ProtocolViolation,
            format!("the worker describes the model wrongly: {what}"),
        )
    };
    let summary = loaded.summary.ok_or_else(|| doubt("no summary"))?;
    let numerics = loaded.numerics.ok_or_else(|| doubt("no numerics class"))?;
    if !(1..=limits::MAX_VOCABULARY).contains(&summary.vocabulary) {
        return Err(doubt("vocabulary out of range"));
    }
    if summary.context_length == 0 {
        return Err(doubt("no context"));
    }
    if numerics.id.is_empty() || numerics.id.len() > limits::MAX_WORD {
        return Err(doubt("numerics class without a proper id"));
    }
    if !loaded.packing.is_empty() {
        Layout::new(loaded.packing.as_str()).map_err(|_| doubt("an odd layout of weights"))?;
    }
    let mut files = loaded.packing_files;
    files.sort_unstable();
    files.dedup();
    if files.len() > limits::MAX_MODEL_FILES {
        return Err(doubt("more files to pack than there can be"));
    }
    Ok(Loaded {
        packing: loaded.packing,
        packing_files: files,
        packed: loaded.packed,
        kept: loaded.kept,
        found: loaded.found,
        damaged: loaded.damaged,
        summary: Some(ModelSummary {
            architecture: clip(&summary.architecture),
            weights_dtype: clip(&summary.weights_dtype),
            // No request may be longer, whatever the model could do.
            context_length: summary.context_length.min(limits::MAX_PROMPT_TOKENS as u32),
            model_hash: clip(&summary.model_hash),
            end_tokens: summary
                .end_tokens
                .into_iter()
                .take(limits::MAX_STOP_TOKENS)
                .collect(),
            ..summary
        }),
        numerics: Some(NumericsClass {
            model_hash: clip(&numerics.model_hash),
            ..numerics
        }),
        cache_tokens: loaded.cache_tokens,
    })
}

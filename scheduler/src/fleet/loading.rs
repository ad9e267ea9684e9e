//! Handing a model over to a worker, for as long as it takes and makes progress.

use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::atomic::Ordering,
    time::Duration,
};

use hotcell_proto::{
    error::{Error, Reason},
    ids::{Layout, ModelName},
    limits,
    v1::{LoadProgress, LoadRequest, Loaded, ModelSummary, NumericsClass, PackedFiles},
};
use tonic::Status;

use super::link::{Link, words};
use crate::{death::DeathKind, discover::clip, packed::Set, vault::OpenModel};

/// Why a worker did not load a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadFailure {
    /// It said so, or the model cannot be handed out: the model's fault.
    Refused(Error),
    /// The conversation broke: the worker's fault.
    Broken(DeathKind, String),
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

    /// Hands over a model's files, with packed copies of some, and waits until it is loaded; `patience` bounds the time between two signs
    /// of progress: bytes that were read, or movement of the engine in its black box once all are.
    ///
    /// # Errors
    /// [`LoadFailure`].
    pub async fn load(
        &self,
        model: &ModelName,
        files: &OpenModel,
        packed: Option<(&Layout, &Set)>,
        patience: Duration,
        mut progress: impl FnMut(&LoadProgress),
    ) -> Result<Loaded, LoadFailure> {
        let silent = || {
            let why = format!("no progress for {patience:?} while loading");
            LoadFailure::Broken(DeathKind::Deadline, why)
        };
        let copies = packed.iter().flat_map(|(_, set)| set.iter());
        let tag = self
            .send_files(files, copies.map(|(_, copy)| copy.as_fd()))
            .await?;
        let packed = packed.map(|(layout, set)| PackedFiles {
            layout: layout.as_str().to_owned(),
            files: set.iter().map(|(index, _)| *index).collect(),
        });
        let request = LoadRequest {
            model: model.as_str().to_owned(),
            tag,
            files: files.handles(),
            packed,
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
                }) => return believe(loaded).map_err(LoadFailure::Refused),
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

//! Handing a model over to a worker, for as long as it takes and makes progress.

use std::{sync::atomic::Ordering, time::Duration};

use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    limits,
    v1::{LoadProgress, LoadRequest, Loaded, ModelSummary, NumericsClass},
};
use tonic::Status;

use super::link::{Link, words};
use crate::{death::DeathKind, discover::clip, vault::OpenModel};

/// Why a worker did not load a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadFailure {
    /// It said so, or the model cannot be handed out: the model's fault.
    Refused(Error),
    /// The conversation broke: the worker's fault.
    Broken(DeathKind, String),
}

impl Link {
    /// Hands over a model's files and waits until it is loaded; `patience` bounds the time between two signs
    /// of progress: bytes that were read, or movement of the engine in its black box once all are.
    ///
    /// # Errors
    /// [`LoadFailure`].
    pub async fn load(
        &self,
        model: &ModelName,
        files: &OpenModel,
        patience: Duration,
        mut progress: impl FnMut(&LoadProgress),
    ) -> Result<Loaded, LoadFailure> {
        let silent = || {
            let why = format!("no progress for {patience:?} while loading");
            LoadFailure::Broken(DeathKind::Deadline, why)
        };
        let fds = files.hand_out().map_err(LoadFailure::Refused)?;
        let tag = self.tags.fetch_add(1, Ordering::Relaxed);
        self.descriptors
            .send_async(tag, &fds)
            .await
            .map_err(|e| broke(format!("cannot hand over files: {e}")))?;
        let request = LoadRequest {
            model: model.as_str().to_owned(),
            tag,
            files: files.handles(),
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

fn failure(status: Status) -> LoadFailure {
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
    Ok(Loaded {
        summary: Some(ModelSummary {
            architecture: clip(&summary.architecture),
            weights_dtype: clip(&summary.weights_dtype),
            // No request may be longer, whatever the model could do.
            context_length: summary.context_length.min(limits::MAX_PROMPT_TOKENS as u32),
            model_hash: clip(&summary.model_hash),
            ..summary
        }),
        numerics: Some(NumericsClass {
            model_hash: clip(&numerics.model_hash),
            ..numerics
        }),
        cache_tokens: loaded.cache_tokens,
    })
}

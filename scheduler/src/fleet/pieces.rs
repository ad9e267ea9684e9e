//! The conversation with a worker about packed weights.

use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::atomic::Ordering,
    time::Duration,
};

use hotcell_proto::{
    error::{Error, Reason},
    ids::{Layout, ModelName},
    v1::{PackPiece, PackRequest, PackedFiles, UsePackedRequest},
};
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::link::{Link, is_broken, words};
use crate::packed::Set;

/// How long one piece, or the change to a complete copy, may take. It is done when there is nothing better to do, so this
/// only bounds a wait for a thread that is stuck.
const PATIENCE: Duration = Duration::from_secs(600);

/// While it is held, the worker's death is not its requests' fault, unless it shows otherwise.
struct Blamed<'a>(Option<&'a Link>);

impl<'a> Blamed<'a> {
    fn new(link: &'a Link) -> Self {
        link.packs.store(true, Ordering::Release);
        Self(Some(link))
    }

    /// The worker died of it, or so it seems.
    async fn broken(mut self) {
        if let Some(link) = self.0.take()
            && !link.is_lost().await
        {
            link.packs.store(false, Ordering::Release);
        }
    }
}

impl Drop for Blamed<'_> {
    fn drop(&mut self) {
        // One that is gone died while it was held: whoever asks later must hear so.
        if let Some(link) = self.0
            && !link.fate.gone.is_cancelled()
        {
            link.packs.store(false, Ordering::Release);
        }
    }
}

/// Packed weights, as a worker makes them.
pub(super) struct Pieces<'a> {
    ask: mpsc::Sender<PackRequest>,
    pieces: Streaming<PackPiece>,
    blamed: Option<Blamed<'a>>,
}

fn lost(link: &Link, why: &str) -> Error {
    Error::new(Reason::WorkerLost, format!("worker {} {why}", link.worker))
}

/// Its words, or those about the broken connection.
async fn said(link: &Link, blamed: Option<Blamed<'_>>, status: &Status) -> Error {
    match is_broken(status) {
        true => {
            if let Some(blamed) = blamed {
                blamed.broken().await;
            }
            lost(link, "died over the weights that it packed")
        }
        false => words(status),
    }
}

impl Link {
    /// Has it begin to pack these files of a model into memory, a piece at a time.
    ///
    /// # Errors
    /// Its words, or those about the broken connection or its silence.
    pub(super) async fn pack(
        &self,
        model: &ModelName,
        files: &[u32],
        memory: BorrowedFd<'_>,
    ) -> Result<Pieces<'_>, Error> {
        let tag = self.tags.fetch_add(1, Ordering::Relaxed);
        let blamed = Blamed::new(self);
        let sent = self.descriptors.send_async(tag, &[memory]).await;
        sent.map_err(|error| lost(self, &format!("cannot be handed memory: {error}")))?;
        let (ask, asked) = mpsc::channel(1);
        let first = PackRequest {
            model: model.as_str().to_owned(),
            tag,
            files: files.to_vec(),
        };
        // There is room for one.
        let _ = ask.try_send(first);
        let mut control = self.control();
        let answer = timeout(PATIENCE, control.pack(ReceiverStream::new(asked))).await;
        match answer {
            Ok(Ok(answer)) => Ok(Pieces {
                ask,
                pieces: answer.into_inner(),
                blamed: Some(blamed),
            }),
            Ok(Err(status)) => Err(said(self, Some(blamed), &status).await),
            Err(_) => Err(lost(self, "does not begin to pack weights")),
        }
    }

    /// Has it compute from packed copies of a model's files from its next step on.
    ///
    /// # Errors
    /// Its words, or those about the broken connection or its silence.
    pub(super) async fn use_packed(
        &self,
        model: &ModelName,
        layout: &Layout,
        set: &Set,
    ) -> Result<(), Error> {
        let tag = self.tags.fetch_add(1, Ordering::Relaxed);
        let blamed = Blamed::new(self);
        let fds: Vec<_> = set.iter().map(|(_, copy)| copy.as_fd()).collect();
        let sent = self.descriptors.send_async(tag, &fds).await;
        sent.map_err(|error| lost(self, &format!("cannot be handed packed weights: {error}")))?;
        let request = UsePackedRequest {
            model: model.as_str().to_owned(),
            tag,
            packed: Some(PackedFiles {
                layout: layout.as_str().to_owned(),
                files: set.iter().map(|(index, _)| *index).collect(),
            }),
        };
        match timeout(PATIENCE, self.control().use_packed(request)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(status)) => Err(said(self, Some(blamed), &status).await),
            Err(_) => Err(lost(self, "does not take packed weights")),
        }
    }
}

impl Pieces<'_> {
    /// Waits for the piece that is on its way.
    ///
    /// # Errors
    /// The worker's words, or those about the broken connection or its silence.
    pub(super) async fn next(&mut self, link: &Link) -> Result<PackPiece, Error> {
        let status = match timeout(PATIENCE, self.pieces.message()).await {
            Ok(Ok(Some(piece))) => return Ok(piece),
            Ok(Ok(None)) => {
                if let Some(blamed) = self.blamed.take() {
                    blamed.broken().await;
                }
                return Err(lost(link, "stopped packing weights"));
            }
            Ok(Err(status)) => status,
            Err(_) => return Err(lost(link, "does not get on with packing weights")),
        };
        Err(said(link, self.blamed.take(), &status).await)
    }

    /// Asks for the next piece: the last one was taken out of the memory.
    pub(super) fn ask(&self) {
        // One that does not take it will not answer either.
        let _ = self.ask.try_send(PackRequest::default());
    }
}

//! Bytes in and out: uploads into memory that the engine then adopts, downloads from memory that it shares.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use hotcell_proto::{
    error::{Error, Reason},
    limits,
    session::{HandleId, SessionId},
    v1::{self, upload_target::Kind},
};
use sha2::{Digest, Sha256};
use tokio::sync::oneshot;
use tokio_stream::Stream;
use tonic::{Status, Streaming};

use super::{TensorsService, chosen};
use crate::session::{
    invalid,
    plane::session_gone,
    read::Readable,
    tensor::read_tensor_spec,
    upload::{Upload, sha256},
};

/// How often an upload that says nothing looks whether there is its session.
const LOOK: Duration = Duration::from_secs(1);

/// Where an upload's chunks go.
enum Sink {
    /// Into memory that becomes the tensor's.
    New { upload: Arc<Upload>, call: u64 },
    /// Into a finished tensor.
    Over,
}

fn within_chunk(data: &Bytes) -> Result<(), Error> {
    if data.len() > limits::TENSOR_CHUNK {
        let limit = limits::TENSOR_CHUNK;
        let what = format!("a chunk of {} bytes; send {limit} at most", data.len());
        return Err(Error::new(Reason::LimitExceeded, what).with("limit", limit));
    }
    Ok(())
}

/// Stops what hashes for a call that was dropped.
struct StopWhenDropped(Arc<AtomicBool>);

impl Drop for StopWhenDropped {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl TensorsService {
    /// Hashes beside the event loop, a few calls of the worker at a time, until its caller leaves.
    async fn hash<T: Send + 'static>(
        &self,
        work: impl FnOnce(&AtomicBool) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let failed = |e: &dyn std::fmt::Display| {
            Error::new(Reason::Internal, format!("hashing failed: {e}"))
        };
        let place = self.host.hashing().acquire_owned();
        let place = place.await.map_err(|e| failed(&e))?;
        let stop = StopWhenDropped(Arc::default());
        let stopped = Arc::clone(&stop.0);
        let work = move || {
            let result = work(&stopped);
            drop(place);
            result
        };
        let done = tokio::task::spawn_blocking(work).await;
        done.map_err(|e| failed(&e))?
    }

    async fn target(
        &self,
        session: &SessionId,
        target: &v1::UploadTarget,
    ) -> Result<(HandleId, usize, Sink), Error> {
        if !target.sha256.is_empty() && target.sha256.len() != 32 {
            return Err(invalid("a SHA-256 has 32 bytes"));
        }
        let offset = usize::try_from(target.offset).map_err(|_| invalid("an offset too large"))?;
        let (id, upload) = match &target.kind {
            Some(Kind::Create(spec)) => {
                if offset != 0 {
                    return Err(invalid("a new tensor is written from byte 0"));
                }
                let (spec, bytes) = read_tensor_spec(Some(spec))?;
                let id = chosen(&target.id)?;
                let begin = self.with(session.clone(), move |s| s.begin_upload(id, spec, bytes));
                let (id, upload) = begin.await?;
                (id, Some(upload))
            }
            Some(Kind::Tensor(handle)) => {
                let id = HandleId::of(Some(handle), self.epoch())?;
                // What is queued to write it comes first.
                let (done, settled) = oneshot::channel();
                self.with(session.clone(), move |s| s.when_settled(id, done))
                    .await?;
                // A value that was replaced before it was settled ends the wait as well.
                let _ = settled.await;
                let upload = self.with(session.clone(), move |s| s.upload_of(id)).await?;
                (id, upload)
            }
            None => return Err(invalid("the upload names neither a spec nor a tensor")),
        };
        let sink = match upload {
            Some(upload) => {
                let call = upload.begin(offset, !target.sha256.is_empty())?;
                Sink::New { upload, call }
            }
            None => Sink::Over,
        };
        Ok((id, offset, sink))
    }

    /// The next chunk, for as long as there is the session.
    async fn next(
        &self,
        session: &SessionId,
        chunks: &mut Streaming<v1::UploadChunk>,
    ) -> Result<Option<v1::UploadChunk>, Status> {
        loop {
            match tokio::time::timeout(LOOK, chunks.message()).await {
                Ok(chunk) => return chunk,
                Err(_) => self.with(session.clone(), |_| Ok(())).await?,
            }
        }
    }

    /// Receives an upload.
    pub(super) async fn receive(
        &self,
        session: SessionId,
        mut chunks: Streaming<v1::UploadChunk>,
    ) -> Result<v1::TensorInfo, Status> {
        let first = chunks.message().await?;
        let first = first.ok_or_else(|| invalid("the upload has no chunks"))?;
        let target = first
            .target
            .ok_or_else(|| invalid("the first chunk names no target"))?;
        let (id, mut at, sink) = self.target(&session, &target).await?;
        let over = self.with(session.clone(), |s| Ok(Arc::clone(&s.over)));
        let over = over.await?;
        let mut data = first.data;
        loop {
            within_chunk(&data)?;
            if over.load(Ordering::Acquire) {
                return Err(session_gone().into());
            }
            let len = data.len();
            match &sink {
                Sink::New { upload, call } => upload.write(*call, at, &data)?,
                // A tensor that was just freed is not found even for no bytes.
                Sink::Over => {
                    let offset = at as u64;
                    let write = move |s: &mut crate::session::state::Session| {
                        s.overwrite(id, offset, &data)
                    };
                    self.with(session.clone(), write).await?;
                }
            }
            at = at.saturating_add(len);
            data = match self.next(&session, &mut chunks).await? {
                None => break,
                Some(chunk) if chunk.target.is_some() => {
                    return Err(invalid("only the first chunk names a target").into());
                }
                Some(chunk) => chunk.data,
            };
        }
        let info = match sink {
            Sink::New { upload, call } => {
                if !target.sha256.is_empty() && upload.uploaded() == upload.total() {
                    // What came in order was hashed as it came; else all of it is read again.
                    if !upload.verify_at_once(call, &target.sha256)? {
                        let (upload, expected) = (Arc::clone(&upload), target.sha256);
                        self.hash(move |stop| upload.verify(call, &expected, stop))
                            .await?;
                    }
                }
                self.with(session, move |s| s.end_upload(id, &upload, call))
                    .await?
            }
            Sink::Over => {
                if !target.sha256.is_empty() {
                    let all = self.read(session.clone(), id, 0, 0).await?.bytes;
                    let found = self.hash(move |stop| sha256(&all, stop)).await?;
                    if found.as_slice() != target.sha256 {
                        let what = "the tensor now has another SHA-256 than was promised";
                        return Err(Error::new(Reason::ChecksumMismatch, what).into());
                    }
                }
                self.with(session, move |s| s.info(id)).await?
            }
        };
        Ok(info)
    }

    async fn read(
        &self,
        session: SessionId,
        id: HandleId,
        offset: u64,
        length: u64,
    ) -> Result<Readable, Error> {
        let (reply, answer) = oneshot::channel();
        self.with(session, move |s| s.read(id, offset, length, reply))
            .await?;
        answer.await.map_err(|_| session_gone())?
    }

    /// Begins a download.
    pub(super) async fn send(
        &self,
        session: SessionId,
        request: v1::DownloadRequest,
    ) -> Result<Chunks, Error> {
        let id = HandleId::of(request.tensor.as_ref(), self.epoch())?;
        let read = self.read(session, id, request.offset, request.length);
        let Readable { info, bytes, over } = read.await?;
        Ok(Chunks {
            info: Some(info),
            bytes: Some(bytes),
            hash: request.checksum.then(Sha256::new),
            over,
        })
    }
}

/// A download. It ends early when its session is over.
pub struct Chunks {
    info: Option<v1::TensorInfo>,
    /// What is left; `None` after the last chunk.
    bytes: Option<Bytes>,
    /// Of what was sent: a chunk is hashed as it leaves, so that a reader that left costs no more.
    hash: Option<Sha256>,
    over: Arc<AtomicBool>,
}

impl Stream for Chunks {
    type Item = Result<v1::DownloadChunk, Status>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(mut left) = self.bytes.take() else {
            return Poll::Ready(None);
        };
        if self.over.load(Ordering::Acquire) {
            return Poll::Ready(Some(Err(session_gone().into())));
        }
        let data = left.split_to(left.len().min(limits::TENSOR_CHUNK));
        if let Some(hash) = &mut self.hash {
            hash.update(&data);
        }
        let sha256 = match left.is_empty() {
            true => self.hash.take().map(|h| h.finalize().to_vec()),
            false => {
                self.bytes = Some(left);
                None
            }
        };
        Poll::Ready(Some(Ok(v1::DownloadChunk {
            data,
            sha256: sha256.unwrap_or_default(),
            tensor: self.info.take(),
        })))
    }
}

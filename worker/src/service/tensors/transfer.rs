//! Bytes in and out: uploads into memory that the engine then adopts, downloads from memory that it shares.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use hotcell_proto::{
    error::{Error, Reason},
    limits,
    session::{HandleId, SessionId},
    v1::{self, upload_target::Kind},
};
use tokio::{sync::oneshot, task::JoinHandle};
use tokio_stream::Stream;
use tonic::{Status, Streaming};

use super::{TensorsService, chosen};
use crate::session::{
    invalid,
    plane::session_gone,
    state::Readable,
    tensor::read_tensor_spec,
    upload::{Upload, sha256},
};

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

fn hash_failed(error: &tokio::task::JoinError) -> Error {
    Error::new(Reason::Internal, format!("hashing failed: {error}"))
}

impl TensorsService {
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
                let wait = self.with(session.clone(), move |s| {
                    s.when_settled(
                        id,
                        Box::new(move || {
                            // Whoever waited may have left.
                            let _ = done.send(());
                        }),
                    )
                });
                wait.await?;
                // A value that was replaced before it was settled ends the wait as well.
                let _ = settled.await;
                let upload = self.with(session.clone(), move |s| s.upload_of(id)).await?;
                (id, upload)
            }
            None => return Err(invalid("the upload names neither a spec nor a tensor")),
        };
        let sink = match upload {
            Some(upload) => {
                let call = upload.begin(offset)?;
                Sink::New { upload, call }
            }
            None => Sink::Over,
        };
        Ok((id, offset, sink))
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
        let mut data = first.data;
        loop {
            within_chunk(&data)?;
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
            data = match chunks.message().await? {
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
                    let (upload, expected) = (Arc::clone(&upload), target.sha256);
                    let verify = move || upload.verify(call, &expected);
                    let verified = tokio::task::spawn_blocking(verify).await;
                    verified.map_err(|e| hash_failed(&e))??;
                }
                self.with(session, move |s| s.end_upload(id, &upload, call))
                    .await?
            }
            Sink::Over => {
                if !target.sha256.is_empty() {
                    let all = self.read(session.clone(), id, 0, 0).await?.bytes;
                    let found = tokio::task::spawn_blocking(move || sha256(&all)).await;
                    if found.map_err(|e| hash_failed(&e))?.as_slice() != target.sha256 {
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
        let reply = Box::new(move |result| drop(reply.send(result)));
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
        let Readable { info, bytes } = read.await?;
        let hash = request.checksum.then(|| {
            let bytes = bytes.clone();
            tokio::task::spawn_blocking(move || sha256(&bytes))
        });
        Ok(Chunks {
            info: Some(info),
            bytes: Some(bytes),
            hash,
        })
    }
}

/// A download.
pub struct Chunks {
    info: Option<v1::TensorInfo>,
    /// What is left; `None` after the last chunk.
    bytes: Option<Bytes>,
    hash: Option<JoinHandle<[u8; 32]>>,
}

impl Stream for Chunks {
    type Item = Result<v1::DownloadChunk, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(left) = self.bytes.as_ref().map(Bytes::len) else {
            return Poll::Ready(None);
        };
        let last = left <= limits::TENSOR_CHUNK;
        let mut sum = Vec::new();
        if last && let Some(hash) = &mut self.hash {
            match ready!(Pin::new(hash).poll(cx)) {
                Ok(found) => sum = found.to_vec(),
                Err(error) => {
                    self.bytes = None;
                    return Poll::Ready(Some(Err(hash_failed(&error).into())));
                }
            }
        }
        let data = match last {
            true => self.bytes.take(),
            false => self
                .bytes
                .as_mut()
                .map(|b| b.split_to(limits::TENSOR_CHUNK)),
        };
        Poll::Ready(Some(Ok(v1::DownloadChunk {
            data: data.unwrap_or_default(),
            sha256: sum,
            tensor: self.info.take(),
        })))
    }
}

//! Tensors on their way: bounded chunks, as fast as the other side takes them.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use hotcell_graph::{TensorSpec, wire};
use hotcell_proto::{
    error::{Error, Reason},
    limits,
    session::HandleId,
    v1::{self, upload_target},
};

use super::{
    array::{State, Tensor, invalid},
    download::{self, Broken},
    host::HostTensor,
    session::{Remote, Session},
};

/// Times a broken upload is taken up again.
const RESUMES: usize = 3;

impl Session {
    /// Uploads a tensor now.
    ///
    /// # Errors
    /// [`Reason::QuotaExceeded`], [`Reason::OutOfMemory`], or the connection broke for good.
    pub async fn upload(&self, data: &HostTensor) -> Result<Tensor, Error> {
        let remote = self.upload_bytes(data).await?;
        let state = State::Remote(remote);
        Ok(Tensor::new(
            Some(self.clone()),
            Some(data.spec().clone()),
            state,
        ))
    }

    async fn upload_bytes(&self, data: &HostTensor) -> Result<Arc<Remote>, Error> {
        let id = HandleId::random()?;
        let remote = self.named(id);
        let mut target = v1::UploadTarget {
            kind: Some(upload_target::Kind::Create(wire::encode_tensor_spec(
                data.spec(),
            ))),
            offset: 0,
            id: id.to_wire(),
            sha256: vec![],
        };
        for attempt in 0.. {
            let sent = self
                .send(target.clone(), data.bytes().slice(target.offset as usize..))
                .await;
            match sent {
                Ok(_) => return Ok(remote),
                // A stream that broke although the session lives: what arrived is still there.
                Err(error) if attempt < RESUMES && error.reason() == Reason::Cancelled => {
                    let Ok(arrived) = self.uploaded(&remote.handle).await else {
                        return Err(error);
                    };
                    target.kind = Some(upload_target::Kind::Tensor(remote.handle.clone()));
                    target.offset = arrived.min(data.bytes().len() as u64);
                }
                Err(error) => return Err(error),
            }
        }
        Err(Error::new(Reason::Internal, "an upload without end"))
    }

    /// Bytes of an unfinished upload that have arrived.
    async fn uploaded(&self, handle: &v1::Handle) -> Result<u64, Error> {
        let list = self.list().await?.tensors;
        let found = list.into_iter().find(|t| t.handle.as_ref() == Some(handle));
        let gone = || Error::new(Reason::HandleNotFound, "the unfinished upload is gone");
        Ok(found.ok_or_else(gone)?.uploaded)
    }

    async fn send(&self, target: v1::UploadTarget, bytes: Bytes) -> Result<v1::TensorInfo, Error> {
        let first = v1::UploadChunk {
            target: Some(target),
            data: Bytes::new(),
        };
        let chunks = (0..bytes.len())
            .step_by(limits::TENSOR_CHUNK)
            .map(move |start| {
                let end = bytes.len().min(start + limits::TENSOR_CHUNK);
                v1::UploadChunk {
                    target: None,
                    data: bytes.slice(start..end),
                }
            });
        let stream = tokio_stream::iter(std::iter::once(first).chain(chunks));
        let answer = self.answer(self.rpc().upload(self.request(stream)).await)?;
        let missing = || {
            Error::new(
                Reason::ProtocolViolation,
                "the upload's answer names no tensor",
            )
        };
        answer.tensor.ok_or_else(missing)
    }

    /// A download as the messages come, for whoever wants to read at a pace of their own.
    ///
    /// # Errors
    /// As [`Tensor::fetch`].
    pub async fn raw_download(
        &self,
        request: v1::DownloadRequest,
    ) -> Result<tonic::Streaming<v1::DownloadChunk>, Error> {
        self.answer(self.rpc().download(self.request(request)).await)
    }

    /// Reads a status of a raw call.
    pub fn read_error(&self, status: &tonic::Status) -> Error {
        self.status(status)
    }

    pub(super) async fn download(
        &self,
        remote: &Remote,
        spec: &TensorSpec,
    ) -> Result<HostTensor, Error> {
        let size = spec
            .bytes(0)
            .ok_or_else(|| invalid("the tensor is too large"))?;
        let mut bytes = BytesMut::new();
        let take = |piece: &[u8]| {
            if piece.len() > size - bytes.len() {
                return Err(too_many());
            }
            // Reserved once something arrives: the size is our own, the worker only fills it.
            bytes.reserve(size - bytes.len());
            bytes.extend_from_slice(piece);
            Ok(())
        };
        self.download_to(remote, take).await?;
        HostTensor::new(spec.clone(), bytes.freeze())
    }

    /// Downloads a tensor; `take` gets its bytes in order.
    async fn download_to(
        &self,
        remote: &Remote,
        take: impl FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let request = self.request(v1::DownloadRequest {
            tensor: Some(remote.handle.clone()),
            offset: 0,
            length: 0,
            checksum: false,
        });
        let done = download::download(self.channel(), request, take).await;
        done.map_err(|broken| match broken {
            Broken::Status(status) => self.status(&status),
            Broken::Wrong(error) => error,
        })
    }
}

fn too_many() -> Error {
    Error::new(Reason::ProtocolViolation, "more bytes than the tensor has")
}

impl Tensor {
    /// Computes it and copies its bytes, row-major and little-endian, into memory of the caller's, which may serve
    /// again and again: fresh memory costs a large tensor as much time as the way through the connection does. It
    /// stays on the worker. After an error the memory holds anything.
    ///
    /// # Errors
    /// As [`Session::eval`], and [`Reason::InvalidArgument`] when `bytes` is not exactly as long as the tensor.
    pub async fn fetch_into(&self, bytes: &mut [u8]) -> Result<(), Error> {
        let (size, given) = (self.nbytes()?, bytes.len());
        if size != given {
            return Err(invalid(format!(
                "a tensor of {size} bytes does not go into {given}"
            )));
        }
        self.eval().await?;
        let mut left = bytes;
        let mut take = |piece: &[u8]| {
            let rest = std::mem::take(&mut left);
            let (now, later) = rest
                .split_at_mut_checked(piece.len())
                .ok_or_else(too_many)?;
            now.copy_from_slice(piece);
            left = later;
            Ok(())
        };
        match self.state() {
            State::Host { data, .. } => take(data.bytes())?,
            State::Remote(remote) => self.session()?.download_to(&remote, take).await?,
            _ => {
                let what = "an evaluated tensor has no value";
                return Err(Error::new(Reason::Internal, what));
            }
        }
        match left.len() {
            0 => Ok(()),
            missing => {
                let what = format!("{missing} bytes of the tensor did not come");
                Err(Error::new(Reason::ProtocolViolation, what))
            }
        }
    }

    /// Moves a tensor of this process to the worker.
    pub(super) async fn place(&self, session: &Session) -> Result<(), Error> {
        if let State::Host { data, .. } = self.state() {
            let remote = session.upload_bytes(&data).await?;
            // Somebody else may have been as quick; one of the two copies is enough.
            if let State::Host { .. } = self.state() {
                self.set(State::Remote(remote));
            }
        }
        Ok(())
    }

    /// Overwrites bytes of a computed tensor on the worker, from `offset` on. Everything that shares the tensor sees it.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] when they do not fit or the tensor is not computed.
    pub async fn write(&self, offset: usize, bytes: impl Into<Bytes>) -> Result<(), Error> {
        let session = self.session()?;
        self.place(session).await?;
        let State::Remote(remote) = self.state() else {
            return Err(invalid(
                "only a computed tensor can be written; evaluate it first",
            ));
        };
        let target = v1::UploadTarget {
            kind: Some(upload_target::Kind::Tensor(remote.handle.clone())),
            offset: offset as u64,
            id: vec![],
            sha256: vec![],
        };
        session.send(target, bytes.into()).await.map(|_| ())
    }
}

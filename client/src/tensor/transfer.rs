//! Tensors on their way: bounded chunks, as fast as the other side takes them.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use hotcell_graph::{TensorSpec, wire};
use hotcell_proto::{
    error::{Error, Reason},
    session::HandleId,
    v1::{self, upload_target},
};

use super::{
    array::{State, Tensor, invalid},
    connection::{Connection, Remote},
    download::{self, Broken},
    host::HostTensor,
    recipe::Recipe,
    recover::again,
    session::Session,
};

/// Times a broken transfer is taken up again.
pub(super) const RESUMES: u32 = 3;

impl Session {
    /// Uploads a tensor now.
    ///
    /// # Errors
    /// [`Reason::QuotaExceeded`], [`Reason::OutOfMemory`], or the connection broke, and with it the session ended; see
    /// [`Session::upload_checked`].
    pub async fn upload(&self, data: &HostTensor) -> Result<Tensor, Error> {
        let remote = again!(self, at => self.upload_at(&at, data))?;
        self.note(&remote, |ledger| Recipe::host(ledger, data));
        Ok(self.tensor_at(remote, data.spec().clone(), "uploaded"))
    }

    /// Uploads a tensor over this connection.
    pub(super) async fn upload_at(
        &self,
        at: &Connection,
        data: &HostTensor,
    ) -> Result<Arc<Remote>, Error> {
        let id = HandleId::random()?;
        let remote = at.named(id);
        let mut target = v1::UploadTarget {
            kind: Some(upload_target::Kind::Create(wire::encode_tensor_spec(
                data.spec(),
            ))),
            offset: 0,
            id: id.to_wire(),
            sha256: vec![],
        };
        for attempt in 0.. {
            let sent = at
                .send(target.clone(), data.bytes().slice(target.offset as usize..))
                .await;
            match sent {
                Ok(_) => return Ok(remote),
                // A stream that broke although the session lives: what arrived is still there.
                Err(error) if attempt < RESUMES && error.reason() == Reason::Cancelled => {
                    let handle = remote.handle_for(at)?;
                    let Ok(info) = arrived(at, &handle).await else {
                        return Err(error);
                    };
                    target.kind = Some(upload_target::Kind::Tensor(handle));
                    target.offset = info.uploaded.min(data.bytes().len() as u64);
                }
                Err(error) => return Err(error),
            }
        }
        Err(Error::new(Reason::Internal, "an upload without end"))
    }

    /// A download as the messages come, for whoever wants to read at a pace of their own. It does not go on after a loss, even
    /// in a session that does.
    ///
    /// # Errors
    /// As [`Tensor::fetch`].
    pub async fn raw_download(
        &self,
        request: v1::DownloadRequest,
    ) -> Result<tonic::Streaming<v1::DownloadChunk>, Error> {
        let at = self.connection();
        at.answer(at.rpc().download(at.request(request)).await)
    }

    /// Reads a status of a raw call.
    pub fn read_error(&self, status: &tonic::Status) -> Error {
        self.connection().status(status)
    }

    pub(super) async fn download(
        &self,
        remote: &Arc<Remote>,
        spec: &TensorSpec,
    ) -> Result<HostTensor, Error> {
        let size = spec
            .bytes(0)
            .ok_or_else(|| invalid("the tensor is too large"))?;
        let mut bytes = BytesMut::new();
        let take = |offset: usize, piece: &[u8]| {
            bytes.truncate(offset);
            if piece.len() > size - bytes.len() {
                return Err(too_many());
            }
            // Reserved once something arrives: the size is our own, the worker only fills it.
            bytes.reserve(size - bytes.len());
            bytes.extend_from_slice(piece);
            Ok(())
        };
        self.download_to(remote, size, take).await?;
        HostTensor::new(spec.clone(), bytes.freeze())
    }

    /// Downloads a tensor; `take` gets its bytes in order, and where they belong. Where equal calls have equal results, a
    /// download that was interrupted goes on where it was.
    async fn download_to(
        &self,
        remote: &Arc<Remote>,
        size: usize,
        mut take: impl FnMut(usize, &[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut come = 0;
        let resumes = self.recovering().is_some_and(|r| r.reproducible);
        again!(self, at => async {
            if come > 0 && come == size {
                return Ok(());
            }
            self.restore(&at, std::slice::from_ref(remote)).await?;
            if !resumes {
                come = 0;
            }
            let request = at.request(v1::DownloadRequest {
                tensor: Some(remote.handle_for(&at)?),
                offset: come as u64,
                length: 0,
                checksum: false,
            });
            let take = |piece: &[u8]| {
                take(come, piece)?;
                come += piece.len();
                Ok(())
            };
            let done = download::download(at.channel(), request, take).await;
            done.map_err(|broken| match broken {
                Broken::Status(status) => at.status(&status),
                Broken::Wrong(error) => error,
            })
        })
    }
}

/// How a tensor is that was being uploaded: how many of its bytes have arrived, if not all.
pub(super) async fn arrived(at: &Connection, handle: &v1::Handle) -> Result<v1::TensorInfo, Error> {
    let list = at.answer(at.rpc().list(at.request(v1::ListRequest {})).await)?;
    let mut tensors = list.tensors.into_iter();
    let found = tensors.find(|t| t.handle.as_ref() == Some(handle));
    let gone = || Error::new(Reason::HandleNotFound, "the unfinished upload is gone");
    found.ok_or_else(gone)
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
        let mut come = 0;
        let mut take = |offset: usize, piece: &[u8]| {
            let end = offset.checked_add(piece.len());
            let place = end.and_then(|end| bytes.get_mut(offset..end));
            place.ok_or_else(too_many)?.copy_from_slice(piece);
            come = offset + piece.len();
            Ok(())
        };
        match self.state() {
            State::Host { data, .. } => take(0, data.bytes())?,
            State::Remote(remote) => self.session()?.download_to(&remote, size, take).await?,
            _ => {
                let what = "an evaluated tensor has no value";
                return Err(Error::new(Reason::Internal, what));
            }
        }
        match size - come {
            0 => Ok(()),
            missing => {
                let what = format!("{missing} bytes of the tensor did not come");
                Err(Error::new(Reason::ProtocolViolation, what))
            }
        }
    }

    /// Moves a tensor of this process to the worker.
    pub(super) async fn place(&self, session: &Session, at: &Connection) -> Result<(), Error> {
        if let State::Host { data, .. } = self.state() {
            let remote = session.upload_at(at, &data).await?;
            session.note(&remote, |ledger| Recipe::host(ledger, &data));
            // Somebody else may have been as quick; one of the two copies is enough.
            if let State::Host { .. } = self.state() {
                self.computed(remote);
            }
        }
        Ok(())
    }

    /// Overwrites bytes of a computed tensor on the worker, from `offset` on. Everything that shares the tensor sees it. It cannot
    /// be made again then (see [`super::Recovery`]), and a write during which the worker dies is not done again.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] when they do not fit or the tensor is not computed.
    pub async fn write(&self, offset: usize, bytes: impl Into<Bytes>) -> Result<(), Error> {
        let (session, bytes) = (self.session()?, bytes.into());
        if let State::Host { literal: true, .. } = self.state() {
            return Err(invalid(
                "a scalar is written into the graphs that it is in; Session::upload makes a tensor that can be overwritten",
            ));
        }
        // The worker takes chunk by chunk: what does not fit at the end must not be begun.
        let (size, given) = (self.nbytes()?, bytes.len());
        if offset.checked_add(given).is_none_or(|end| end > size) {
            return Err(invalid(format!(
                "{given} bytes at {offset} do not fit into a tensor of {size}"
            )));
        }
        let (at, remote) = again!(session, at => async {
            self.place(session, &at).await?;
            let State::Remote(remote) = self.state() else {
                return Err(invalid(
                    "only a computed tensor can be written; evaluate it first",
                ));
            };
            session.restore(&at, std::slice::from_ref(&remote)).await?;
            Ok((at.clone(), remote))
        })?;
        let target = v1::UploadTarget {
            kind: Some(upload_target::Kind::Tensor(remote.handle_for(&at)?)),
            offset: offset as u64,
            id: vec![],
            sha256: vec![],
        };
        let before = remote.recipe();
        if let Some(before) = &before {
            let gone = Recipe::gone(
                "it was overwritten in place; Tensor::checkpoint after that avoids this",
            );
            gone.describe_as(before);
            gone.bind(&remote);
            // What was made of it before was made of what it was.
            before.rebind(None);
        }
        match at.send(target, bytes).await {
            // Nothing was written.
            Err(error) if error.reason() == Reason::InvalidArgument => {
                if let Some(before) = before {
                    before.rebind(Some(&remote));
                    remote.set_recipe(Some(before));
                }
                Err(error)
            }
            done => done.map(|_| ()),
        }
    }
}

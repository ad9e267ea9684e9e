//! Transfers that are compared by their SHA-256, and that go on where their connection broke.
//!
//! The session's own connection is its lease and ends with it. So these take another one where that can be had: if it breaks, the
//! session lives, and what has arrived stays.

use std::{ops::Range, sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use hotcell_graph::wire;
use hotcell_proto::{
    error::{Error, Reason},
    session::HandleId,
    v1::{self, tensors_client::TensorsClient, upload_target},
};
use sha2::{Digest, Sha256};
use tokio::time::sleep;
use tonic::Status;

use super::{
    array::{State, Tensor, invalid},
    connection::{Connection, Remote, chunks},
    host::HostTensor,
    recipe::Recipe,
    recover::again,
    session::Session,
    transfer::{RESUMES, arrived},
};
use crate::connect::{Wire, is_unreachable, read_status};

/// Bytes of a download that are compared at a time: what a broken connection has to bring again at most.
const PIECE: usize = 4 << 20;
/// How long to wait before a transfer goes on, times the tries in a row that brought nothing.
const PAUSE: Duration = Duration::from_millis(50);

/// A connection for a transfer.
pub(super) enum Road {
    /// The session's own.
    Own(TensorsClient<Wire>),
    /// Another one, to this peer.
    Another(TensorsClient<Wire>, String),
}

impl Road {
    fn rpc(&self) -> TensorsClient<Wire> {
        match self {
            Self::Own(rpc) | Self::Another(rpc, _) => rpc.clone(),
        }
    }

    fn error(&self, at: &Connection, status: &Status) -> Error {
        match self {
            Self::Own(_) => at.status(status),
            Self::Another(_, peer) => read_status(peer, status),
        }
    }

    /// Sends a tensor's bytes from the target's offset on.
    async fn send(
        &self,
        at: &Connection,
        target: v1::UploadTarget,
        bytes: Bytes,
    ) -> Result<(), Error> {
        let request = at.request(chunks(target, bytes));
        let answer = self.rpc().upload(request).await;
        answer.map(|_| ()).map_err(|s| self.error(at, &s))
    }

    /// Appends bytes of a tensor, if they are those that were sent.
    async fn receive(
        &self,
        at: &Connection,
        tensor: v1::Handle,
        range: Range<usize>,
        bytes: &mut BytesMut,
    ) -> Result<(), Error> {
        let read = |status| self.error(at, &status);
        let request = at.request(v1::DownloadRequest {
            tensor: Some(tensor),
            offset: range.start as u64,
            length: range.len() as u64,
            checksum: true,
        });
        let before = bytes.len();
        let mut sum = Vec::new();
        let mut stream = self
            .rpc()
            .download(request)
            .await
            .map_err(read)?
            .into_inner();
        while let Some(chunk) = stream.message().await.map_err(read)? {
            if bytes.len() - before + chunk.data.len() > range.len() {
                let what = "more bytes than were asked for";
                return Err(Error::new(Reason::ProtocolViolation, what));
            }
            bytes.extend_from_slice(&chunk.data);
            sum = chunk.sha256;
        }
        let got = bytes.get(before..).unwrap_or_default();
        match got.len() == range.len() && Sha256::digest(got)[..] == sum[..] {
            true => Ok(()),
            false => {
                let what = "the downloaded bytes have another SHA-256 than was promised";
                Err(Error::new(Reason::ChecksumMismatch, what))
            }
        }
    }
}

/// Tries in a row that brought nothing.
#[derive(Default)]
struct Patience(u32);

impl Patience {
    /// Waits a little if a transfer that ended so may go on.
    ///
    /// # Errors
    /// `error` if not.
    async fn after(&mut self, error: Error, brought: bool) -> Result<(), Error> {
        let passing = [Reason::Cancelled, Reason::ChecksumMismatch];
        if brought {
            self.0 = 0;
        }
        if !(is_unreachable(&error) || passing.contains(&error.reason())) || self.0 >= RESUMES {
            return Err(error);
        }
        self.0 += 1;
        sleep(PAUSE * self.0).await;
        Ok(())
    }
}

impl Session {
    /// Uploads a tensor over a connection of its own, where there is one, and has the worker compare its SHA-256 before it can be
    /// used. If the connection breaks, the upload goes on behind what has arrived; if the bytes differ, it begins again.
    ///
    /// # Errors
    /// As [`Session::upload`]; [`Reason::ChecksumMismatch`] when the bytes arrived changed each time.
    pub async fn upload_checked(&self, data: &HostTensor) -> Result<Tensor, Error> {
        let remote = again!(self, at => self.upload_checked_at(&at, data))?;
        self.note(&remote, |ledger| Recipe::host(ledger, data));
        Ok(self.tensor_at(remote, data.spec().clone(), "uploaded"))
    }

    async fn upload_checked_at(
        &self,
        at: &Connection,
        data: &HostTensor,
    ) -> Result<Arc<Remote>, Error> {
        let road = self.road(at).await?;
        let id = HandleId::random()?;
        let remote = at.named(id);
        let handle = remote.handle_for(at)?;
        let spec = wire::encode_tensor_spec(data.spec());
        let mut target = v1::UploadTarget {
            kind: Some(upload_target::Kind::Create(spec)),
            offset: 0,
            id: id.to_wire(),
            sha256: Sha256::digest(data.bytes()).to_vec(),
        };
        let mut patience = Patience::default();
        loop {
            let rest = data.bytes().slice(target.offset as usize..);
            let Err(error) = road.send(at, target.clone(), rest).await else {
                return Ok(remote);
            };
            let (brought, offset) = match arrived(at, &handle).await {
                // Only its answer was lost.
                Ok(info) if info.state() == v1::TensorState::Ready => return Ok(remote),
                Ok(info) => (
                    info.uploaded > target.offset,
                    info.uploaded.min(data.bytes().len() as u64),
                ),
                // It broke before the worker heard of the tensor.
                Err(gone) if gone.reason() == Reason::HandleNotFound => {
                    patience.after(error, false).await?;
                    continue;
                }
                Err(gone) => return Err(gone),
            };
            patience.after(error, brought).await?;
            target.kind = Some(upload_target::Kind::Tensor(handle.clone()));
            target.offset = offset;
        }
    }

    async fn download_checked(
        &self,
        remote: &Arc<Remote>,
        range: Range<usize>,
    ) -> Result<Bytes, Error> {
        let mut bytes = BytesMut::with_capacity(range.len());
        let resumes = self.recovering().is_some_and(|r| r.reproducible);
        again!(self, at => async {
            self.restore(&at, std::slice::from_ref(remote)).await?;
            if !resumes {
                bytes.clear();
            }
            let road = self.road(&at).await?;
            let mut patience = Patience::default();
            let mut brought = false;
            while bytes.len() < range.len() {
                let come = bytes.len();
                let start = range.start + come;
                let piece = start..range.end.min(start + PIECE);
                let handle = remote.handle_for(&at)?;
                match road.receive(&at, handle, piece, &mut bytes).await {
                    Ok(()) => brought = true,
                    Err(error) => {
                        bytes.truncate(come);
                        patience.after(error, std::mem::take(&mut brought)).await?;
                    }
                }
            }
            Ok(())
        })?;
        Ok(bytes.freeze())
    }
}

impl Tensor {
    /// Computes it and fetches its value as [`Tensor::fetch`] does, but over a connection of its own, where there is one: it is
    /// compared by SHA-256 as it comes, and goes on where it was when that connection breaks. It stays on the worker.
    ///
    /// # Errors
    /// As [`Session::eval`]; [`Reason::ChecksumMismatch`] when the bytes came changed each time.
    pub async fn fetch_checked(&self) -> Result<HostTensor, Error> {
        let bytes = self.fetch_range(0..self.nbytes()?).await?;
        HostTensor::new(self.spec()?.clone(), bytes)
    }

    /// Computes it and fetches these of its bytes, row-major and little-endian, as [`Tensor::fetch_checked`] does.
    ///
    /// # Errors
    /// As [`Tensor::fetch_checked`], and [`Reason::InvalidArgument`] when it has not so many bytes.
    pub async fn fetch_range(&self, range: Range<usize>) -> Result<Bytes, Error> {
        let size = self.nbytes()?;
        if range.start > range.end || range.end > size {
            let what = format!("bytes {range:?} are outside of a tensor of {size}");
            return Err(invalid(what));
        }
        self.eval().await?;
        match self.state() {
            State::Host { data, .. } => Ok(data.bytes().slice(range)),
            State::Remote(remote) => self.session()?.download_checked(&remote, range).await,
            _ => Err(Error::new(
                Reason::Internal,
                "an evaluated tensor has no value",
            )),
        }
    }
}

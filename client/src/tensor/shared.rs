//! Memory that a client on the worker's host shares with it: what is written here, the worker reads in place.

use std::sync::Arc;

use hotcell_graph::{DType, Shape, TensorSpec, wire};
use hotcell_ipc::{
    handoff::{self, Ask},
    memory::SharedMapping,
};
use hotcell_proto::{
    error::{Error, Reason},
    v1,
};

use super::{
    array::{Tensor, invalid, of_graph},
    connection::{Connection, Remote},
    host::Element,
    recipe::Recipe,
    recover::again,
    session::Session,
};

/// A tensor in shared memory. It is the worker's and this process's at once: write it while nothing computes with it, and read a
/// result once its computation is done. Index tensors are copied by the worker before they are used.
pub struct SharedTensor {
    tensor: Tensor,
    memory: SharedMapping,
}

impl Session {
    /// A tensor of zeros in memory shared with the worker.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] when the session does not run through a scheduler's socket on this host;
    /// [`Reason::QuotaExceeded`].
    pub async fn shared(&self, dtype: DType, shape: &[usize]) -> Result<SharedTensor, Error> {
        let shape = Shape::fixed(shape).map_err(|e| of_graph(&e))?;
        let spec = TensorSpec::new(dtype, shape).map_err(|e| of_graph(&e))?;
        let bytes = spec
            .bytes(0)
            .ok_or_else(|| invalid("the tensor is too large"))?;
        let (remote, spec, memory) = again!(self, at => share(&at, &spec, bytes))?;
        self.note(&remote, |_| {
            Recipe::gone("it is memory that was shared with the worker; share another one")
        });
        Ok(SharedTensor {
            tensor: self.tensor_at(remote, spec, "shared memory"),
            memory,
        })
    }
}

async fn share(
    at: &Connection,
    spec: &TensorSpec,
    bytes: usize,
) -> Result<(Arc<Remote>, TensorSpec, SharedMapping), Error> {
    let ask = Ask::Memory {
        session: at.opened.session.clone(),
        bytes: bytes.max(1) as u64,
    };
    let given = at.hand_out(&ask).await?;
    let memory = SharedMapping::of_memory(&given.fd).map_err(|e| {
        Error::new(
            Reason::Internal,
            format!("shared memory cannot be mapped: {e}"),
        )
    })?;
    let (remote, spec) = import(at, given.tag, spec).await?;
    Ok((remote, spec, memory))
}

/// A tensor in memory that the scheduler gave the worker, under this tag.
pub(super) async fn import(
    at: &Connection,
    tag: u64,
    spec: &TensorSpec,
) -> Result<(Arc<Remote>, TensorSpec), Error> {
    let request = at.request(v1::ImportSharedRequest {
        tag,
        spec: Some(wire::encode_tensor_spec(spec)),
        offset: 0,
    });
    at.adopt(at.answer(at.rpc().import_shared(request).await)?)
}

impl Connection {
    /// Asks the scheduler for what only a descriptor can carry.
    pub(super) async fn hand_out(&self, ask: &Ask) -> Result<handoff::Given, Error> {
        let far = || {
            let what = "only a session through a scheduler's Unix socket can share memory or have a connection of its own";
            invalid(what)
        };
        let path = handoff::path_beside(self.socket.as_deref().ok_or_else(far)?);
        let broken = |e: std::io::Error| {
            let what = format!("{} gave nothing: {e}", path.display());
            Error::new(Reason::NoWorker, what)
        };
        let given = handoff::ask(&path, ask).await.map_err(broken)?;
        given.map_err(|what| Error::new(Reason::SessionNotFound, what))
    }
}

impl SharedTensor {
    /// The tensor, for expressions.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Writes bytes at an offset.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] when they do not fit.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        let written = self.memory.write(offset, bytes);
        written.map_err(|e| invalid(format!("shared memory: {e}")))
    }

    /// Reads bytes from an offset.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] when there are not as many.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Error> {
        let read = self.memory.read(offset, bytes);
        read.map_err(|e| invalid(format!("shared memory: {e}")))
    }

    /// Reads all elements.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] when the dtype is not `T`'s.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>, Error> {
        let spec = self.tensor.spec()?;
        let mut bytes = vec![0; self.tensor.nbytes()?];
        self.read(0, &mut bytes)?;
        super::HostTensor::new(spec.clone(), bytes)?.to_vec()
    }

    /// Computes a tensor of the same dtype and shape into this memory.
    ///
    /// # Errors
    /// As [`Session::eval`], and [`Reason::InvalidArgument`] when dtype or shape differ.
    pub async fn assign(&self, value: &Tensor) -> Result<(), Error> {
        if value.spec()? != self.tensor.spec()? {
            return Err(invalid(format!(
                "{} cannot be stored as {}",
                value.spec()?,
                self.tensor.spec()?
            )));
        }
        self.tensor
            .session()?
            .compute_into(value, &self.tensor)
            .await
    }
}

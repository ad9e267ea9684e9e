//! The values of a graph's constants while they come.

use std::{fs::File, io, os::unix::fs::FileExt};

use hotcell_ipc::memory::unsealed_memory;
use hotcell_proto::{
    error::{Error, Reason},
    limits,
};
use sha2::{Digest, Sha256};

/// The values of a graph's constants as they come, one after another.
pub struct Constants {
    pub(super) file: File,
    pub(super) bytes: u64,
    pub(super) sha: Sha256,
}

impl Constants {
    /// None yet.
    ///
    /// # Errors
    /// [`Reason::OutOfMemory`].
    pub fn new() -> Result<Self, Error> {
        Ok(Self {
            file: unsealed_memory("hotcell-graph", 0).map_err(|e| no_memory(&e))?,
            bytes: 0,
            sha: Sha256::new(),
        })
    }

    /// Adds bytes.
    ///
    /// # Errors
    /// [`Reason::LimitExceeded`], [`Reason::OutOfMemory`].
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let end = self.bytes.saturating_add(bytes.len() as u64);
        if end > limits::MAX_SAVED_GRAPH_BYTES as u64 {
            let limit = limits::MAX_SAVED_GRAPH_BYTES;
            let what = format!("a saved graph has at most {limit} bytes of constants");
            return Err(Error::new(Reason::LimitExceeded, what).with("limit", limit));
        }
        let written = self.file.write_all_at(bytes, self.bytes);
        written.map_err(|e| no_memory(&e))?;
        self.sha.update(bytes);
        self.bytes = end;
        Ok(())
    }

    /// How many bytes came.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

pub(super) fn no_memory(error: &io::Error) -> Error {
    let what = format!("no memory for a graph: {error}");
    Error::new(Reason::OutOfMemory, what)
}

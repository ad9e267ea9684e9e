//! Weights in a device's memory that outlives the process that put them there.
//!
//! A device that has such memory exports it by descriptors. Whoever holds these holds the memory; a process that is handed
//! them maps it, and finds the weights where the one before it left them.

use std::{io, os::fd::OwnedFd};

use crate::backend::{Buffer, DeviceError};

/// Memory that was exported, and how to tell that it is what it was.
#[derive(Debug)]
pub struct Kept {
    /// The [`Wish::layout`] that it was made for.
    pub layout: String,
    /// Bytes of all weights, with what is between them.
    pub bytes: u64,
    /// A number for all of the bytes, as the device computes it.
    pub checksum: u64,
    /// Its descriptors, in order.
    pub pieces: Vec<OwnedFd>,
}

impl Kept {
    /// The same memory by other descriptors.
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn try_clone(&self) -> io::Result<Self> {
        let pieces = self.pieces.iter().map(OwnedFd::try_clone);
        Ok(Self {
            layout: self.layout.clone(),
            bytes: self.bytes,
            checksum: self.checksum,
            pieces: pieces.collect::<io::Result<_>>()?,
        })
    }
}

/// What is to be there.
#[derive(Clone, Copy, Debug)]
pub struct Wish<'a> {
    /// Tells one set of weights from another, and one order of them.
    pub layout: &'a str,
    /// Bytes of each weight.
    pub sizes: &'a [usize],
}

/// Memory for a model's weights, by their numbers among the [`Wish::sizes`].
pub trait Vault {
    /// A weight that is there already; none where it must be [put](Vault::put) there. Either holds for all.
    fn find(&self, number: usize) -> Option<Buffer>;

    /// Puts a weight there. Read-only from here on.
    ///
    /// # Errors
    /// [`DeviceError::Binding`] when it is of another size or there is none of this number; what the device says.
    fn put(&mut self, number: usize, bytes: &[u8]) -> Result<Buffer, DeviceError>;

    /// Whether what was handed over was made for this, and is not what it was: whoever else computes from it is wrong.
    fn is_damaged(&self) -> bool;

    /// Ends it, when all weights are there: from now on the device itself refuses to write to them where this process has
    /// them mapped. What is new to whoever keeps it; `None` where all was found.
    ///
    /// # Errors
    /// What the device says. The weights are there all the same.
    fn close(self: Box<Self>) -> Result<Option<Kept>, DeviceError>;
}

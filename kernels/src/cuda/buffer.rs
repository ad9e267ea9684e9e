//! Memory of a device.

use std::rc::Rc;

use super::{gpu::Gpu, mapped::Mapped};
use crate::backend::{DeviceError, DeviceMemory, DeviceSpan, HostSpan};

/// Addresses of what is allocated are multiples of this.
pub(super) const ALIGNMENT: usize = 256;

/// Bytes that only the device can address. Zeroed when it is made: what was freed may have been another session's.
pub(super) struct Memory {
    gpu: Rc<Gpu>,
    start: u64,
    bytes: usize,
    writable: bool,
    /// What it is a part of, and is given back with; none if it is by itself.
    within: Option<Rc<Mapped>>,
}

impl Memory {
    /// Zeroed memory.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn new(gpu: &Rc<Gpu>, what: &str, bytes: usize) -> Result<Self, DeviceError> {
        let fail = || DeviceError::OutOfMemory {
            what: what.to_owned(),
            bytes,
        };
        // The driver has nothing of no bytes.
        let size = bytes.max(1).checked_next_multiple_of(ALIGNMENT);
        let size = size.ok_or_else(fail)?;
        let start = gpu.driver.allocate(size).map_err(|error| match error {
            DeviceError::OutOfMemory { .. } => fail(),
            error => error,
        })?;
        let memory = Self {
            gpu: Rc::clone(gpu),
            start,
            bytes,
            writable: true,
            within: None,
        };
        gpu.zero(start, size)?;
        Ok(memory)
    }

    /// The same bytes as the host's, read-only.
    ///
    /// # Errors
    /// As [`Memory::new`].
    pub fn of(gpu: &Rc<Gpu>, what: &str, data: &[u8], writable: bool) -> Result<Self, DeviceError> {
        let mut memory = Self::new(gpu, what, data.len())?;
        gpu.upload(memory.start, data)?;
        memory.writable = writable;
        Ok(memory)
    }

    /// Bytes of mapped memory that nobody writes any more: a place within it.
    pub fn within(gpu: &Rc<Gpu>, mapped: &Rc<Mapped>, offset: usize, bytes: usize) -> Self {
        Self {
            gpu: Rc::clone(gpu),
            start: mapped.start() + offset as u64,
            bytes,
            writable: false,
            within: Some(Rc::clone(mapped)),
        }
    }

    /// Address of the first byte.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Address of `offset`, from where there must be `count` bytes.
    fn at(&self, offset: usize, count: usize) -> Result<u64, DeviceError> {
        match offset.checked_add(count) {
            Some(end) if end <= self.bytes => Ok(self.start + offset as u64),
            _ => Err(DeviceError::Binding(format!(
                "{count} bytes at {offset} are outside of {}",
                self.bytes
            ))),
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.within.is_some() {
            return;
        }
        if let Err(error) = self.gpu.driver.free(self.start) {
            tracing::warn!(%error, "memory of a device was not freed");
        }
    }
}

impl DeviceMemory for Memory {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn write(&self, offset: usize, data: &[u8]) -> Result<(), DeviceError> {
        let at = self.at(offset, data.len())?;
        match self.writable {
            true => self.gpu.upload(at, data),
            false => Err(DeviceError::Binding(
                "imported memory is read-only".to_owned(),
            )),
        }
    }

    fn read(&self, offset: usize, data: &mut [u8]) -> Result<(), DeviceError> {
        let at = self.at(offset, data.len())?;
        self.gpu.download(data, at)
    }

    fn host(&self) -> Option<HostSpan> {
        None
    }

    fn device(&self) -> Option<DeviceSpan> {
        Some(DeviceSpan {
            owner: self.gpu.owner,
            start: self.start,
            writable: self.writable,
        })
    }
}

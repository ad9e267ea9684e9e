//! Host memory: owned and aligned, or the caller's own.

use std::{
    alloc::{self, Layout},
    ptr::NonNull,
    rc::Rc,
};

use crate::{
    backend::{DeviceError, DeviceMemory, HostRegion, HostSpan},
    memory::ALIGNMENT,
};

/// Zeroed memory, aligned to a cache line. Pages come from the system when first touched.
pub(crate) struct HostMemory {
    start: NonNull<u8>,
    layout: Layout,
}

impl HostMemory {
    pub(crate) fn new(what: &str, bytes: usize) -> Result<Self, DeviceError> {
        let fail = || DeviceError::OutOfMemory {
            what: what.to_owned(),
            bytes,
        };
        let layout = Layout::from_size_align(bytes.max(1), ALIGNMENT).map_err(|_| fail())?;
        // SAFETY: the layout has a size above zero.
        let start = NonNull::new(unsafe { alloc::alloc_zeroed(layout) }).ok_or_else(fail)?;
        Ok(Self { start, layout })
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, freed once.
        unsafe { alloc::dealloc(self.start.as_ptr(), self.layout) }
    }
}

fn check(len: usize, offset: usize, count: usize) -> Result<(), DeviceError> {
    match offset.checked_add(count) {
        Some(end) if end <= len => Ok(()),
        _ => Err(DeviceError::Binding(format!(
            "{count} bytes at {offset} are outside of {len}"
        ))),
    }
}

impl DeviceMemory for HostMemory {
    fn bytes(&self) -> usize {
        self.layout.size()
    }

    fn write(&self, offset: usize, data: &[u8]) -> Result<(), DeviceError> {
        check(self.bytes(), offset, data.len())?;
        // SAFETY: in bounds; buffers are not `Sync` and compute threads only run inside `execute`,
        // which the same thread is not in now, so nobody else looks.
        unsafe { std::ptr::copy(data.as_ptr(), self.start().add(offset), data.len()) };
        Ok(())
    }

    fn read(&self, offset: usize, data: &mut [u8]) -> Result<(), DeviceError> {
        check(self.bytes(), offset, data.len())?;
        // SAFETY: as in `write`; the memory was zeroed, so all of it is initialised.
        unsafe { std::ptr::copy(self.start().add(offset), data.as_mut_ptr(), data.len()) };
        Ok(())
    }

    fn host(&self) -> Option<HostSpan> {
        Some(HostSpan {
            start: self.start(),
            len: self.bytes(),
            writable: true,
        })
    }
}

/// The caller's own memory, read-only.
pub(crate) struct Imported(pub(crate) Rc<dyn HostRegion>);

impl DeviceMemory for Imported {
    fn bytes(&self) -> usize {
        self.0.bytes().len()
    }

    fn write(&self, _: usize, _: &[u8]) -> Result<(), DeviceError> {
        Err(DeviceError::Binding(
            "imported memory is read-only".to_owned(),
        ))
    }

    fn read(&self, offset: usize, data: &mut [u8]) -> Result<(), DeviceError> {
        let bytes = self.0.bytes();
        check(bytes.len(), offset, data.len())?;
        data.copy_from_slice(&bytes[offset..offset + data.len()]);
        Ok(())
    }

    fn host(&self) -> Option<HostSpan> {
        let bytes = self.0.bytes();
        Some(HostSpan {
            start: bytes.as_ptr().cast_mut(),
            len: bytes.len(),
            writable: false,
        })
    }
}

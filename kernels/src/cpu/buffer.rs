//! Host memory as buffers: the device's own, the caller's to read, and the caller's to share.

use std::{marker::PhantomData, rc::Rc, sync::Arc};

use crate::{
    backend::{DeviceError, DeviceMemory, HostRegion, HostSpan, SharedRegion},
    host::{SharedBytes, is_held_elsewhere},
};

pub(crate) use crate::host::HostMemory;

fn check(len: usize, offset: usize, count: usize) -> Result<(), DeviceError> {
    match offset.checked_add(count) {
        Some(end) if end <= len => Ok(()),
        _ => Err(DeviceError::Binding(format!(
            "{count} bytes at {offset} are outside of {len}"
        ))),
    }
}

fn read_only(what: &str) -> DeviceError {
    DeviceError::Binding(format!("{what} memory is read-only"))
}

/// The device's own memory. Not `Send`: its bytes are only written by whoever owns the device.
pub(crate) struct Owned(Arc<HostMemory>, PhantomData<*mut u8>);

impl Owned {
    pub(crate) fn new(memory: Arc<HostMemory>) -> Self {
        Self(memory, PhantomData)
    }
}

impl DeviceMemory for Owned {
    fn bytes(&self) -> usize {
        self.0.bytes()
    }

    fn write(&self, offset: usize, data: &[u8]) -> Result<(), DeviceError> {
        check(self.bytes(), offset, data.len())?;
        if self.is_shared() {
            return Err(read_only("shared"));
        }
        // SAFETY: in bounds and not shared; compute threads only run inside `execute`, which the device's owner,
        // this thread, is not in now, so nobody else looks.
        unsafe { std::ptr::copy(data.as_ptr(), self.0.start().add(offset), data.len()) };
        Ok(())
    }

    fn read(&self, offset: usize, data: &mut [u8]) -> Result<(), DeviceError> {
        check(self.bytes(), offset, data.len())?;
        // SAFETY: as in `write`; the memory was zeroed, so all of it is initialised.
        unsafe { std::ptr::copy(self.0.start().add(offset), data.as_mut_ptr(), data.len()) };
        Ok(())
    }

    fn host(&self) -> Option<HostSpan> {
        Some(HostSpan {
            start: self.0.start(),
            len: self.bytes(),
            writable: !self.is_shared(),
        })
    }

    fn share(&self) -> Option<SharedBytes> {
        Some(SharedBytes::new(&self.0))
    }

    fn is_shared(&self) -> bool {
        is_held_elsewhere(&self.0)
    }
}

/// The caller's own memory, read-only.
pub(crate) struct Imported(pub(crate) Rc<dyn HostRegion>);

impl DeviceMemory for Imported {
    fn bytes(&self) -> usize {
        self.0.bytes().len()
    }

    fn write(&self, _: usize, _: &[u8]) -> Result<(), DeviceError> {
        Err(read_only("imported"))
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

/// Memory that another process may change at any time.
pub(crate) struct Volatile(pub(crate) Rc<dyn SharedRegion>);

impl DeviceMemory for Volatile {
    fn bytes(&self) -> usize {
        self.0.span().1
    }

    fn write(&self, offset: usize, data: &[u8]) -> Result<(), DeviceError> {
        let (start, len) = self.0.span();
        check(len, offset, data.len())?;
        // SAFETY: in bounds of memory that stays mapped and writable. Another process may touch it meanwhile,
        // which makes the bytes there arbitrary; no reference to them is ever made.
        unsafe { std::ptr::copy(data.as_ptr(), start.add(offset), data.len()) };
        Ok(())
    }

    fn read(&self, offset: usize, data: &mut [u8]) -> Result<(), DeviceError> {
        let (start, len) = self.0.span();
        check(len, offset, data.len())?;
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy(start.add(offset), data.as_mut_ptr(), data.len()) };
        Ok(())
    }

    fn host(&self) -> Option<HostSpan> {
        let (start, len) = self.0.span();
        Some(HostSpan {
            start,
            len,
            writable: true,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{backend::Buffer, host::Staging};

    #[test]
    fn shared_memory_is_not_written() {
        let Staging(memory) = Staging::new("a test", 16).unwrap();
        let buffer = Buffer::new(Rc::new(Owned::new(memory)));
        buffer.write(4, &[1, 2, 3]).unwrap();
        let share = buffer.share().unwrap();
        assert!(buffer.is_shared());
        assert!(buffer.write(0, &[9]).is_err());
        assert!(buffer.host().is_some_and(|h| !h.writable));
        assert_eq!(share.as_ref()[..8], [0, 0, 0, 0, 1, 2, 3, 0]);
        drop(share);
        assert!(!buffer.is_shared());
        buffer.write(0, &[9]).unwrap();
    }

    struct Region(Vec<std::cell::Cell<u8>>);

    // SAFETY: the vector is never changed, so its cells stay where they are; a cell may be written by pointer.
    unsafe impl SharedRegion for Region {
        fn span(&self) -> (*mut u8, usize) {
            (self.0.as_ptr().cast_mut().cast(), self.0.len())
        }
    }

    #[test]
    fn memory_of_others_is_bounded() {
        let buffer = Buffer::new(Rc::new(Volatile(Rc::new(Region(vec![
            std::cell::Cell::new(
                5
            );
            8
        ])))));
        assert!(buffer.share().is_none());
        buffer.write(6, &[1, 2]).unwrap();
        assert!(buffer.write(7, &[1, 2]).is_err());
        assert!(buffer.write(usize::MAX, &[1, 2]).is_err());
        let mut read = [0; 3];
        buffer.read(5, &mut read).unwrap();
        assert_eq!(read, [5, 1, 2]);
    }
}

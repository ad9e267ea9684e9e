//! Memory of the host that one thread fills, a device adopts, and others read.
//!
//! Buffers stay on the engine's thread. What crosses threads is either a [`Staging`], which has one owner, or a
//! [`SharedBytes`], which nobody writes while it lives.

use std::{
    alloc::{self, Layout},
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{Ordering, fence},
    },
};

use crate::{backend::DeviceError, memory::ALIGNMENT};

/// Alignment up to which the allocator takes zeroed pages from the system instead of clearing memory itself.
const CHEAP_ALIGNMENT: usize = 16;

/// Zeroed memory, aligned to a cache line. Pages come from the system when first touched.
pub(crate) struct HostMemory {
    base: NonNull<u8>,
    layout: Layout,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: plain memory. It gives out nothing but a raw pointer; who may use it when is its holders' rule.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    pub(crate) fn new(what: &str, bytes: usize) -> Result<Self, DeviceError> {
        let fail = || DeviceError::OutOfMemory {
            what: what.to_owned(),
            bytes,
        };
        let size = bytes.checked_add(ALIGNMENT).ok_or_else(fail)?;
        let layout = Layout::from_size_align(size, CHEAP_ALIGNMENT).map_err(|_| fail())?;
        // SAFETY: the layout has a size above zero.
        let base = NonNull::new(unsafe { alloc::alloc_zeroed(layout) }).ok_or_else(fail)?;
        let shift = base.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        // SAFETY: at most ALIGNMENT of the `bytes + ALIGNMENT` bytes lie before it.
        let start = unsafe { base.add(shift) };
        Ok(Self {
            base,
            layout,
            start,
            bytes,
        })
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, freed once.
        unsafe { alloc::dealloc(self.base.as_ptr(), self.layout) }
    }
}

/// Whether somebody else holds this memory. A `false` stays so as long as only the asker can hand out more.
pub(crate) fn is_held_elsewhere(memory: &Arc<HostMemory>) -> bool {
    let held = Arc::strong_count(memory) > 1;
    // What the last other holder read happens before whatever the asker writes now.
    fence(Ordering::Acquire);
    held
}

/// Zeroed memory with one owner, to be filled on any thread and adopted by a device.
pub struct Staging(pub(crate) Arc<HostMemory>);

impl Staging {
    /// Zeroed memory.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn new(what: &str, bytes: usize) -> Result<Self, DeviceError> {
        HostMemory::new(what, bytes).map(|memory| Self(Arc::new(memory)))
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: initialised (zeroed), alive with `self`, and nobody else has a share.
        unsafe { std::slice::from_raw_parts(self.0.start(), self.0.bytes()) }
    }

    /// The bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `bytes`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.0.start(), self.0.bytes()) }
    }
}

/// A share of a buffer's memory, to be read on any thread.
pub struct SharedBytes(Arc<HostMemory>);

impl SharedBytes {
    pub(crate) fn new(memory: &Arc<HostMemory>) -> Self {
        Self(Arc::clone(memory))
    }

    /// The memory as its only owner's, if nobody else has a share.
    pub fn into_staging(self) -> Option<Staging> {
        (!is_held_elsewhere(&self.0)).then_some(Staging(self.0))
    }
}

impl AsRef<[u8]> for SharedBytes {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: initialised, alive with `self`; buffers refuse to write memory that is shared, and whoever
        // shares does so between executions ([`Buffer::share`](crate::backend::Buffer::share)).
        unsafe { std::slice::from_raw_parts(self.0.start(), self.0.bytes()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_zeroed_and_of_the_size_asked_for() {
        for bytes in [0, 1, 63, 64, 65, 1 << 20] {
            let mut staging = Staging::new("a test", bytes).unwrap();
            assert_eq!(staging.bytes().len(), bytes);
            assert_eq!(staging.bytes().as_ptr() as usize % ALIGNMENT, 0);
            assert!(staging.bytes().iter().all(|&b| b == 0));
            staging.bytes_mut().fill(7);
            assert!(staging.bytes().iter().all(|&b| b == 7));
        }
        for bytes in [usize::MAX, isize::MAX as usize] {
            assert!(Staging::new("a test", bytes).is_err());
        }
    }

    #[test]
    fn a_share_becomes_the_owner_when_it_is_the_last() {
        let Staging(memory) = Staging::new("a test", 8).unwrap();
        let (one, two) = (SharedBytes::new(&memory), SharedBytes::new(&memory));
        drop(memory);
        assert!(one.into_staging().is_none());
        assert!(two.into_staging().is_some());
    }
}

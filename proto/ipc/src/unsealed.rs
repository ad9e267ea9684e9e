//! Memory whose length another process may change at any time, mapped where a signal handler knows of it.
//!
//! A file that is shortened takes the pages behind its new end away from whoever has them mapped: the next touch raises
//! SIGBUS. So this is for a process that can do without the pages, with a handler that puts others in their place
//! ([`replace_by_zeros`]); the scheduler, which must outlive everybody, never maps such memory.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

/// A writable mapping of a part of a regular file that others write, and may shorten.
///
/// As with [`SharedMapping`](crate::memory::SharedMapping), it is reached through a raw pointer only.
#[derive(Debug)]
pub struct UnsealedMapping {
    map: memmap2::MmapRaw,
    memory: (u64, u64),
    at: u64,
}

impl UnsealedMapping {
    /// Maps `len` bytes from `at` on of the file behind `fd`, which need not stay open, with all pages that are there.
    ///
    /// # Errors
    /// `InvalidInput` if it is not a regular file, or has fewer bytes now; otherwise what `fstat` and `mmap` report.
    pub fn of_file(fd: impl AsFd, at: u64, len: usize) -> io::Result<UnsealedMapping> {
        let refused = |why| io::Error::new(io::ErrorKind::InvalidInput, why);
        let file = File::from(fd.as_fd().try_clone_to_owned()?);
        let found = file.metadata()?;
        if !found.is_file() {
            return Err(refused("only a regular file can be mapped"));
        }
        let end = at.checked_add(len as u64);
        if len == 0 || end.is_none_or(|end| end > found.size()) {
            return Err(refused("the file has fewer bytes than are to be mapped"));
        }
        // Populated: a fault for each page of a large tensor takes as long as computing with it.
        let map = memmap2::MmapOptions::new()
            .offset(at)
            .len(len)
            .populate()
            .map_raw(&file)?;
        Ok(UnsealedMapping {
            map,
            memory: (found.dev(), found.ino()),
            at,
        })
    }

    /// First byte; the mapping stays there until it is dropped.
    pub fn start(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Whether there are none, which is never.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Device and inode of the file, and where in it the mapping begins.
    pub fn origin(&self) -> ((u64, u64), u64) {
        (self.memory, self.at)
    }

    /// Addresses of the whole pages that the mapping takes.
    pub fn pages(&self) -> Range<usize> {
        // SAFETY: it only asks for a number, which the C library knows without a system call.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        let page = usize::try_from(page).unwrap_or(4096);
        let start = self.start().addr();
        start - start % page..(start + self.len()).next_multiple_of(page)
    }
}

/// Whether this is a file of shared memory that a client made: one of the kernel's file system for that, with no seal but
/// the one that all files there have who were not made to be sealed.
///
/// # Errors
/// What `fcntl(F_GET_SEALS)` reports, except that a descriptor that cannot have seals is simply `false`.
pub fn is_clients_memory(fd: impl AsFd) -> io::Result<bool> {
    match rustix::fs::fcntl_get_seals(fd) {
        Ok(held) => Ok(held == rustix::fs::SealFlags::SEAL),
        Err(rustix::io::Errno::INVAL) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Puts zeroed private pages in the place of all pages at these addresses, and says whether it could. Async-signal-safe:
/// one system call.
///
/// # Safety
/// The range must be that of a living mapping of this process ([`UnsealedMapping::pages`]), so that it takes nobody
/// else's pages away; and no Rust reference may lead into it, since its bytes change.
pub unsafe fn replace_by_zeros(pages: Range<usize>) -> bool {
    let start = std::ptr::without_provenance_mut::<libc::c_void>(pages.start);
    // SAFETY: the caller's promise; what was mapped there is dropped by the kernel as one step with the new mapping, and
    // whoever unmaps the range later unmaps this.
    let there = unsafe {
        libc::mmap(
            start,
            pages.len(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    there == start
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::unsealed_memory;

    #[test]
    fn a_part_of_a_file_is_mapped_and_its_pages_can_be_replaced() {
        let file = unsealed_memory("a test", 64 << 10).unwrap();
        let mapping = UnsealedMapping::of_file(&file, 4096 + 64, 8192).unwrap();
        assert_eq!((mapping.len(), mapping.origin().1), (8192, 4160));
        let pages = mapping.pages();
        assert!(pages.contains(&mapping.start().addr()) && pages.len() >= 8192);
        // SAFETY: inside the mapping, on one thread.
        unsafe { mapping.start().write_volatile(7) };
        let mut seen = [0];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut seen, 4160).unwrap();
        assert_eq!(seen, [7]);
        file.set_len(0).unwrap();
        // SAFETY: the mapping lives, and nobody makes references into it.
        assert!(unsafe { replace_by_zeros(pages) });
        // SAFETY: as above; without the new pages, this would end the process.
        assert_eq!(unsafe { mapping.start().read_volatile() }, 0);
        let short = UnsealedMapping::of_file(&file, 0, 1).unwrap_err();
        assert_eq!(short.kind(), io::ErrorKind::InvalidInput);
        for (at, len) in [(u64::MAX, 1), (0, 0)] {
            assert!(UnsealedMapping::of_file(&file, at, len).is_err());
        }
    }
}

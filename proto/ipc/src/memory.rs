//! Memory that is handed from process to process by descriptor: sealed memfds, and read-only mappings.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::ops::{Deref, Range};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;

/// Seals under which neither the bytes nor the length can change any more, whoever holds the descriptor.
const IMMUTABLE: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::WRITE)
    .union(SealFlags::SEAL);

/// Seals under which the bytes may change but the length cannot, so that no holder can make another one's
/// mapping fault with SIGBUS.
const FIXED_SIZE: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// How often it is tried to make memory immutable, and how long between two times. The kernel refuses while somebody has it
/// mapped to write, and also while it has a page in hand itself, which passes.
const TRIES: usize = 10;
const BETWEEN: Duration = Duration::from_millis(20);

/// Makes memory immutable that has been in use: it may wait for the kernel.
fn fix(memory: impl AsFd) -> io::Result<()> {
    for _ in 1..TRIES {
        match rustix::fs::fcntl_add_seals(&memory, IMMUTABLE) {
            Err(Errno::BUSY) => thread::sleep(BETWEEN),
            sealed => return Ok(sealed?),
        }
    }
    Ok(rustix::fs::fcntl_add_seals(&memory, IMMUTABLE)?)
}

/// Copies `bytes` into anonymous memory that nobody can write, grow, shrink or unseal afterwards.
///
/// The descriptor is close-on-exec, its offset is 0, and the memory cannot be executed where the kernel knows
/// `MFD_NOEXEC_SEAL` (6.3). `name` is only for `/proc` (at most 249 bytes, no NUL).
///
/// # Errors
/// What `memfd_create`, `write` or `fcntl(F_ADD_SEALS)` report; a bad name is `InvalidInput`.
pub fn sealed_memory(name: &str, bytes: &[u8]) -> io::Result<OwnedFd> {
    let mut file = File::from(sealable(name)?);
    file.write_all(bytes)?;
    // The offset belongs to the open file, which the receiver shares: it would read nothing from the end.
    file.rewind()?;
    rustix::fs::fcntl_add_seals(&file, IMMUTABLE)?;
    Ok(file.into())
}

/// Makes `len` zero bytes of shared, writable anonymous memory whose length is sealed.
///
/// It must be sealed *before* it is handed out: otherwise the other side's `ftruncate` kills whoever reads its
/// mapping. The bytes stay writable for both sides, so they are to be read through raw pointers and atomics,
/// never as `&[T]`.
///
/// # Errors
/// What `memfd_create`, `ftruncate` or `fcntl(F_ADD_SEALS)` report; a bad name is `InvalidInput`.
pub fn shared_memory(name: &str, len: u64) -> io::Result<OwnedFd> {
    let fd = sealable(name)?;
    rustix::fs::ftruncate(&fd, len)?;
    rustix::fs::fcntl_add_seals(&fd, FIXED_SIZE)?;
    Ok(fd)
}

/// Makes `len` zero bytes of anonymous memory for this process to fill and then to [`seal`]. Until then it is to be
/// handed to nobody. Its pages take room once they are written.
///
/// # Errors
/// What `memfd_create` or `ftruncate` report; a bad name is `InvalidInput`.
pub fn unsealed_memory(name: &str, len: u64) -> io::Result<File> {
    let fd = sealable(name)?;
    rustix::fs::ftruncate(&fd, len)?;
    Ok(fd.into())
}

/// Seals memory of [`unsealed_memory`] for good, and gives a descriptor by which it can be read only.
///
/// # Errors
/// What `fcntl(F_ADD_SEALS)` reports: `ResourceBusy` while somebody has it mapped to write, for which it waits up to a fifth of
/// a second. Otherwise that `/proc` is missing.
pub fn seal(memory: &File) -> io::Result<OwnedFd> {
    fix(memory)?;
    // The other one may still change the file's times.
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    Ok(File::open(path)?.into())
}

/// Whether `fd` is memory whose bytes and length can no longer change, as [`sealed_memory`] makes it.
///
/// # Errors
/// What `fcntl(F_GET_SEALS)` reports, except that a descriptor that cannot have seals is simply `false`.
pub fn is_immutable(fd: impl AsFd) -> io::Result<bool> {
    has(fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE)
}

/// Whether `fd` is memory whose length can no longer change, as [`shared_memory`] makes it. To be asked before
/// mapping memory that a stranger made.
///
/// # Errors
/// As [`is_immutable`].
pub fn is_fixed_size(fd: impl AsFd) -> io::Result<bool> {
    has(fd, SealFlags::SHRINK | SealFlags::GROW)
}

fn has(fd: impl AsFd, seals: SealFlags) -> io::Result<bool> {
    match rustix::fs::fcntl_get_seals(fd) {
        Ok(held) => Ok(held.contains(seals)),
        Err(rustix::io::Errno::INVAL) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn sealable(name: &str) -> io::Result<OwnedFd> {
    // NUL and length would come back as EINVAL, which the fallback below must not mistake for an old kernel.
    if name.len() > 249 || name.bytes().any(|byte| byte == 0) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "a memory's name has at most 249 bytes and no NUL",
        ));
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        Err(rustix::io::Errno::INVAL) => Ok(rustix::fs::memfd_create(name, flags)?),
        made => Ok(made?),
    }
}

/// No page of the systems that this runs on is larger, and all are parts of it. To ask the system takes a file that a
/// confined process cannot open.
const PAGE_AT_MOST: usize = 64 << 10;

/// What tells one state of a file from another without reading it.
///
/// The kernel stamps times with a clock tick's grain on older kernels, and writes through somebody's shared
/// mapping stamp late: equality means "no change was seen", not a proof of equal bytes. Renaming, linking or unlinking a
/// file, or changing who may read it, changes its ctime, and so its identity, but not its [bytes](FileIdentity::has_bytes_of).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    /// Device number of the filesystem.
    pub dev: u64,
    /// Inode number.
    pub ino: u64,
    /// Length in bytes.
    pub len: u64,
    /// Last change of the bytes, in nanoseconds since 1970.
    pub mtime_ns: i128,
    /// Last change of the inode, in nanoseconds since 1970; a user cannot set it back.
    pub ctime_ns: i128,
}

impl FileIdentity {
    /// The present identity of the file behind `fd`.
    ///
    /// # Errors
    /// What `dup` or `fstat` report.
    pub fn of(fd: impl AsFd) -> io::Result<FileIdentity> {
        Self::of_open(&File::from(fd.as_fd().try_clone_to_owned()?))
    }

    /// Whether it is the same file, and no change of its bytes was seen between the two. Whoever writes to a file and sets its
    /// time back is not found out.
    pub fn has_bytes_of(&self, other: &FileIdentity) -> bool {
        let bytes = |i: &FileIdentity| (i.dev, i.ino, i.len, i.mtime_ns);
        bytes(self) == bytes(other)
    }

    fn of_open(file: &File) -> io::Result<FileIdentity> {
        let data = file.metadata()?;
        let ns = |seconds: i64, rest: i64| i128::from(seconds) * 1_000_000_000 + i128::from(rest);
        Ok(FileIdentity {
            dev: data.dev(),
            ino: data.ino(),
            len: data.size(),
            mtime_ns: ns(data.mtime(), data.mtime_nsec()),
            ctime_ns: ns(data.ctime(), data.ctime_nsec()),
        })
    }
}

/// A read-only mapping of a whole regular file or memfd. Clones share it; the last one unmaps.
///
/// **Trap.** Unless the file is sealed memory ([`is_immutable`]), another process may still change it. Bytes
/// then change under the reader, and if the file is *shortened*, touching a page past its new end raises SIGBUS
/// in this process. So a mapping of an unsealed file is for trusted files only, in a process whose SIGBUS
/// handler knows the mapping's range (the worker), and [`Mapping::unchanged`] is asked whenever the bytes are
/// handed out or a result is believed. The scheduler must map sealed or fixed-size memory only.
#[derive(Clone, Debug)]
pub struct Mapping(Arc<Mapped>);

#[derive(Debug)]
struct Mapped {
    map: memmap2::Mmap,
    /// Kept to ask for the identity again: a path could name another file by then.
    file: File,
    identity: FileIdentity,
}

impl Mapping {
    /// Maps the whole file behind `fd`, which is duplicated, not kept. An empty file gives an empty mapping.
    ///
    /// # Errors
    /// `InvalidInput` if `fd` is not a regular file or memfd, or is too large to address; otherwise what
    /// `fstat` and `mmap` report.
    pub fn of_file(fd: impl AsFd) -> io::Result<Mapping> {
        let file = File::from(fd.as_fd().try_clone_to_owned()?);
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "only a regular file or sealed memory can be mapped",
            ));
        }
        let identity = FileIdentity::of_open(&file)?;
        let len = usize::try_from(identity.len)
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "file too large to map"))?;
        // Private, because kernels before 6.7 refuse a shared mapping of write-sealed memory even to readers;
        // nothing writes to it, so its pages are the page cache's all the same.
        // SAFETY: read-only, and never more than the length seen. That the file may be changed by somebody
        // else is this type's documented trap; it is never handed out as anything but bytes.
        let map = unsafe {
            memmap2::MmapOptions::new()
                .len(len)
                .map_copy_read_only(&file)
        }?;
        Ok(Mapping(Arc::new(Mapped {
            map,
            file,
            identity,
        })))
    }

    /// The mapped bytes; see the type's trap.
    pub fn bytes(&self) -> &[u8] {
        &self.0.map
    }

    /// Number of bytes mapped.
    pub fn len(&self) -> usize {
        self.0.map.len()
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.map.is_empty()
    }

    /// Whether this is the same mapping, not just one of the same bytes.
    pub fn is(&self, other: &Mapping) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The file's descriptor, for whoever is to map it as well.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.file.as_fd()
    }

    /// The file's identity when it was mapped.
    pub fn identity(&self) -> FileIdentity {
        self.0.identity
    }

    /// Lets go of the resident pages that lie in `range` as a whole. They come back from the file when they are read.
    ///
    /// # Errors
    /// `InvalidInput` when the range is outside of the mapping; otherwise what `madvise` reports.
    pub fn forget(&self, range: Range<usize>) -> io::Result<()> {
        if range.start > range.end || range.end > self.len() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the range is outside of the mapping",
            ));
        }
        let page = PAGE_AT_MOST;
        let start = range.start.next_multiple_of(page);
        // The last page of all is a whole one as well: nothing comes after the file's end.
        let end = match range.end == self.len() {
            true => range.end,
            false => range.end - range.end % page,
        };
        if start >= end {
            return Ok(());
        }
        // SAFETY: nobody writes to this private mapping, so that it has no pages but the file's: those that are dropped
        // are read from it again, with the same bytes as far as the file has them (the type's trap).
        unsafe {
            self.0.map.unchecked_advise_range(
                memmap2::UncheckedAdvice::DontNeed,
                start,
                end - start,
            )
        }
    }

    /// Whether no change of the file's bytes was seen since it was mapped (see [`FileIdentity`] for what that misses).
    /// A failing `fstat` counts as changed.
    pub fn unchanged(&self) -> bool {
        FileIdentity::of_open(&self.0.file).is_ok_and(|now| now.has_bytes_of(&self.0.identity))
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes()
    }
}

impl AsRef<[u8]> for Mapping {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}

/// A writable mapping of memory that another process shares, as [`shared_memory`] makes it.
///
/// The other process may read and write it at any time: it is reached through a raw pointer only, and what was read
/// once may be something else the next time.
#[derive(Debug)]
pub struct SharedMapping {
    map: memmap2::MmapRaw,
    /// Device and inode.
    memory: (u64, u64),
}

impl SharedMapping {
    /// Maps the whole memory behind `fd`, which need not stay open.
    ///
    /// # Errors
    /// `InvalidInput` if its length is not sealed against change, seals included; otherwise what `fcntl`, `fstat`
    /// and `mmap` report.
    pub fn of_memory(fd: impl AsFd) -> io::Result<SharedMapping> {
        let refused = |why| io::Error::new(io::ErrorKind::InvalidInput, why);
        if !has(&fd, FIXED_SIZE)? {
            return Err(refused(
                "shared memory must be a memfd sealed against shrinking, growing and further seals",
            ));
        }
        let file = File::from(fd.as_fd().try_clone_to_owned()?);
        let found = file.metadata()?;
        let len = usize::try_from(found.size());
        let len = len.map_err(|_| refused("the shared memory is too large to map"))?;
        if len == 0 {
            return Err(refused("the shared memory is empty"));
        }
        let map = memmap2::MmapOptions::new().len(len).map_raw(&file)?;
        Ok(SharedMapping {
            map,
            memory: (found.dev(), found.ino()),
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

    /// Whether both are mappings of the same memory, whose bytes then are at the same offsets in both.
    pub fn is_of_same_memory(&self, other: &SharedMapping) -> bool {
        self.memory == other.memory
    }

    /// Device and inode of the memory.
    pub fn memory(&self) -> (u64, u64) {
        self.memory
    }

    /// Whether there are none, which is never.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn within(&self, offset: usize, count: usize) -> io::Result<*mut u8> {
        match offset.checked_add(count) {
            // SAFETY: `offset` is inside the mapping, or just past its end when nothing is copied.
            Some(end) if end <= self.len() => Ok(unsafe { self.start().add(offset) }),
            _ => {
                let what = format!("{count} bytes at {offset} are outside of {}", self.len());
                Err(io::Error::new(io::ErrorKind::InvalidInput, what))
            }
        }
    }

    /// Copies `bytes` to `offset`. What the other process reads meanwhile is some of the old and some of the new.
    ///
    /// # Errors
    /// `InvalidInput` when they do not fit.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        let to = self.within(offset, bytes.len())?;
        // SAFETY: `within` checked the range; `bytes` is a slice of this process, which cannot overlap a mapping that nobody
        // makes references into.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Copies from `offset` into `bytes`, whatever the other process makes of them meanwhile.
    ///
    /// # Errors
    /// `InvalidInput` when there are not as many.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> io::Result<()> {
        let from = self.within(offset, bytes.len())?;
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Reads `count` bytes of a file from `at` on to `offset`, without a copy in between.
    ///
    /// # Errors
    /// `InvalidInput` when they do not fit, `UnexpectedEof` when the file has fewer, otherwise what `pread` reports.
    pub fn fill(&self, offset: usize, count: usize, file: &File, at: u64) -> io::Result<()> {
        let to = self.within(offset, count)?;
        whole(count, at, |done, place| {
            // SAFETY: `within` checked the range, and `done` is less than `count`; nobody makes references into the mapping.
            unsafe { libc::pread(file.as_raw_fd(), to.add(done).cast(), count - done, place) }
        })
    }

    /// Writes `count` bytes from `offset` on to a file from `at` on, without a copy in between.
    ///
    /// # Errors
    /// `InvalidInput` when there are not as many, `UnexpectedEof` when the file takes no more, otherwise what `pwrite` reports.
    pub fn empty_to(&self, offset: usize, count: usize, file: &File, at: u64) -> io::Result<()> {
        let from = self.within(offset, count)?;
        whole(count, at, |done, place| {
            // SAFETY: as in `fill`.
            unsafe { libc::pwrite(file.as_raw_fd(), from.add(done).cast(), count - done, place) }
        })
    }
}

/// Repeats a transfer that may end early until `count` bytes are done.
fn whole(
    count: usize,
    at: u64,
    mut transfer: impl FnMut(usize, libc::off_t) -> libc::ssize_t,
) -> io::Result<()> {
    let mut done = 0;
    while done < count {
        let place = at.checked_add(done as u64);
        let place = place.and_then(|place| libc::off_t::try_from(place).ok());
        let place = place.ok_or(io::ErrorKind::InvalidInput)?;
        match usize::try_from(transfer(done, place)) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(more) => done += more,
            Err(_) => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => {}
                e => return Err(e),
            },
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_files_bytes_come_and_go_and_what_is_not_there_is_an_error() {
        let fd = shared_memory("a test", 4096).unwrap();
        let mapping = SharedMapping::of_memory(&fd).unwrap();
        let file = unsealed_memory("a file", 100).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"abcdef", 10).unwrap();
        mapping.fill(4090, 6, &file, 10).unwrap();
        let mut got = [0; 6];
        mapping.read(4090, &mut got).unwrap();
        assert_eq!(&got, b"abcdef");
        mapping.empty_to(4092, 4, &file, 0).unwrap();
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut got[..4], 0).unwrap();
        assert_eq!(&got[..4], b"cdef");
        let kind = |r: io::Result<()>| r.unwrap_err().kind();
        assert_eq!(
            kind(mapping.fill(0, 10, &file, 95)),
            io::ErrorKind::UnexpectedEof
        );
        assert_eq!(
            kind(mapping.fill(4091, 6, &file, 0)),
            io::ErrorKind::InvalidInput
        );
        assert_eq!(
            kind(mapping.empty_to(usize::MAX, 2, &file, 0)),
            io::ErrorKind::InvalidInput
        );
        assert_eq!(
            kind(mapping.fill(0, 1, &file, u64::MAX)),
            io::ErrorKind::InvalidInput
        );
        mapping.fill(4096, 0, &file, 0).unwrap();
    }

    #[test]
    fn only_memory_of_sealed_length_is_mapped_and_writes_are_seen() {
        let fd = shared_memory("a test", 4096).unwrap();
        let (one, two) = (
            SharedMapping::of_memory(&fd).unwrap(),
            SharedMapping::of_memory(&fd).unwrap(),
        );
        assert_eq!(one.len(), 4096);
        assert!(one.is_of_same_memory(&two));
        let other = SharedMapping::of_memory(shared_memory("a test", 4096).unwrap()).unwrap();
        assert!(!one.is_of_same_memory(&other));
        one.write(4090, b"shared").unwrap();
        let mut read = [0; 6];
        two.read(4090, &mut read).unwrap();
        assert_eq!(&read, b"shared");
        for offset in [4091, 4097, usize::MAX] {
            assert!(one.write(offset, b"shared").is_err());
            assert!(two.read(offset, &mut read).is_err());
        }
        // SAFETY: inside both mappings, on one thread.
        let seen = unsafe {
            one.start().add(7).write_volatile(42);
            two.start().add(7).read_volatile()
        };
        assert_eq!(seen, 42);
        let growing = sealable("a test").unwrap();
        rustix::fs::ftruncate(&growing, 4096).unwrap();
        assert!(SharedMapping::of_memory(&growing).is_err());
        let immutable = sealed_memory("a test", &[1; 64]).unwrap();
        assert!(SharedMapping::of_memory(&immutable).is_err());
    }
}

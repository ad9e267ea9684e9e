//! Memory that other processes can map too (`cuMemCreate` and what goes with it): files beside this library, and addresses
//! that are reserved apart from them.
//!
//! A worker may neither make files nor open any by the time that it has the driver make memory. So whoever starts it makes
//! `fakecuda-memory-N`, and has this library loaded before the program begins (`LD_PRELOAD`), which takes some that nobody
//! has. Which these are their locks say: they are those of open files, and go with them from process to process.

use std::{
    collections::{BTreeMap, HashMap},
    ffi::{c_int, c_void},
    fs,
    os::fd::IntoRawFd,
    ptr,
};

use crate::{config::folder, state::state};

/// What sizes are multiples of.
pub const UNIT: usize = 2 << 20;

/// Bytes of memory in a file at most; a page follows, which begins with how many there are.
const LARGEST: usize = 1 << 30;
const PAGE: usize = 4096;

/// Files that one process takes, unless `FAKECUDA_FILES` says how many.
const MOST: usize = 32;

/// Runs when the library is loaded.
#[used]
#[unsafe(link_section = ".init_array")]
static PREPARE: extern "C" fn() = {
    extern "C" fn prepare() {
        // A process that is made of this one needs files of its own: locks are those of open files, which both have.
        extern "C" fn again() {
            let mut state = state();
            state.pieces.leave_files();
            state.pieces.take_files();
        }
        state().pieces.take_files();
        // SAFETY: a function that stays.
        unsafe { libc::pthread_atfork(None, None, Some(again)) };
    }
    prepare
};

/// A reserved range's pieces, by where they are in it.
#[derive(Default)]
struct Range {
    bytes: usize,
    pieces: BTreeMap<u64, Piece>,
}

#[derive(Clone, Copy)]
struct Piece {
    bytes: usize,
    /// What may be done with it: a `CUmemAccess_flags`.
    access: c_int,
}

/// Handles, and ranges of addresses.
#[derive(Default)]
pub struct Pieces {
    spare: Vec<c_int>,
    /// Descriptor and bytes.
    handles: HashMap<u64, (c_int, usize)>,
    ranges: BTreeMap<u64, Range>,
}

/// Has what a file's last page begins with, which is how many bytes of memory are in it; nothing if it is none of the files.
fn with_size<T>(fd: c_int, work: impl FnOnce(&mut usize) -> T) -> Option<T> {
    // SAFETY: room for the answer; a page of the file, if it is as long, which begins with a number whatever is in it.
    unsafe {
        let mut about: libc::stat = std::mem::zeroed();
        if libc::fstat(fd, &mut about) != 0 || about.st_size != (LARGEST + PAGE) as libc::off_t {
            return None;
        }
        let may = libc::PROT_READ | libc::PROT_WRITE;
        let end = LARGEST as libc::off_t;
        let page = libc::mmap(ptr::null_mut(), PAGE, may, libc::MAP_SHARED, fd, end);
        if page == libc::MAP_FAILED {
            return None;
        }
        let done = work(&mut *page.cast());
        libc::munmap(page, PAGE);
        Some(done)
    }
}

impl Pieces {
    /// Takes files that nobody has.
    fn take_files(&mut self) {
        let most = std::env::var("FAKECUDA_FILES").ok();
        let most = most.and_then(|n| n.parse().ok()).unwrap_or(MOST);
        let files = fs::read_dir(folder()).into_iter().flatten().flatten();
        for file in files {
            let is_memory = file
                .file_name()
                .to_string_lossy()
                .starts_with("fakecuda-memory");
            if !is_memory || self.spare.len() == most {
                continue;
            }
            let opened = fs::File::options().read(true).write(true).open(file.path());
            let Ok(opened) = opened else { continue };
            let fd = opened.into_raw_fd();
            // SAFETY: an open descriptor, which is closed if somebody has the file.
            unsafe {
                match libc::flock(fd, libc::LOCK_EX | libc::LOCK_NB) {
                    0 => self.spare.push(fd),
                    _ => drop(libc::close(fd)),
                }
            }
        }
    }

    /// Leaves the files that nobody has asked for to the process that took them.
    fn leave_files(&mut self) {
        for fd in self.spare.drain(..) {
            // SAFETY: its own.
            unsafe { libc::close(fd) };
        }
    }

    /// Memory of so many bytes by a new handle.
    pub fn create(&mut self, handle: u64, bytes: usize) -> bool {
        let whole = bytes > 0 && bytes.is_multiple_of(UNIT) && bytes <= LARGEST;
        let Some(fd) = whole.then(|| self.spare.pop()).flatten() else {
            return false;
        };
        self.handles.insert(handle, (fd, bytes));
        with_size(fd, |size| *size = bytes).is_some()
    }

    /// The same memory as a descriptor's, by a new handle: its bytes.
    pub fn import(&mut self, handle: u64, descriptor: c_int) -> Option<usize> {
        let bytes = with_size(descriptor, |size| *size)?;
        // SAFETY: an open descriptor.
        let fd = unsafe { libc::dup(descriptor) };
        self.handles.insert(handle, (fd, bytes));
        Some(bytes)
    }

    /// A descriptor of a handle's memory.
    pub fn export(&self, handle: u64) -> Option<c_int> {
        let (fd, _) = self.handles.get(&handle)?;
        // SAFETY: an open descriptor.
        let fd = unsafe { libc::dup(*fd) };
        (fd >= 0).then_some(fd)
    }

    /// Forgets a handle. What is mapped stays.
    pub fn release(&mut self, handle: u64) -> Option<usize> {
        let (fd, bytes) = self.handles.remove(&handle)?;
        // SAFETY: its own.
        unsafe { libc::close(fd) };
        Some(bytes)
    }

    /// Addresses for so many bytes, which lead nowhere yet.
    pub fn reserve(&mut self, bytes: usize, tag: u64) -> Option<u64> {
        if bytes == 0 || !bytes.is_multiple_of(UNIT) {
            return None;
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: new addresses.
        let start = unsafe { libc::mmap(ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return None;
        }
        let address = start.expose_provenance() as u64 | tag;
        let pieces = BTreeMap::new();
        self.ranges.insert(address, Range { bytes, pieces });
        Some(address)
    }

    /// Gives addresses back, at which nothing is mapped.
    pub fn unreserve(&mut self, address: u64, bytes: usize) -> bool {
        let fits = |range: &Range| range.bytes == bytes && range.pieces.is_empty();
        if !self.ranges.get(&address).is_some_and(fits) {
            return false;
        }
        self.ranges.remove(&address);
        // SAFETY: reserved above, and nothing is there.
        unsafe { libc::munmap(host(address), bytes) == 0 }
    }

    fn range(&mut self, address: u64, bytes: usize) -> Option<&mut Range> {
        let (start, range) = self.ranges.range_mut(..=address).next_back()?;
        (address + bytes as u64 <= start + range.bytes as u64).then_some(range)
    }

    /// Puts a handle's memory at reserved addresses. Nobody may do anything with it.
    pub fn map(&mut self, address: u64, bytes: usize, handle: u64) -> bool {
        let Some(&(fd, size)) = self.handles.get(&handle) else {
            return false;
        };
        let Some(range) = self.range(address, bytes) else {
            return false;
        };
        if size != bytes {
            return false;
        }
        let piece = Piece { bytes, access: 0 };
        range.pieces.insert(address, piece);
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: at addresses that were reserved.
        let at = unsafe { libc::mmap(host(address), bytes, libc::PROT_NONE, flags, fd, 0) };
        at != libc::MAP_FAILED
    }

    /// Takes memory away from addresses, which stay reserved.
    pub fn unmap(&mut self, address: u64, bytes: usize) -> bool {
        let Some(range) = self.range(address, bytes) else {
            return false;
        };
        if range.pieces.get(&address).is_none_or(|p| p.bytes != bytes) {
            return false;
        }
        range.pieces.remove(&address);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: as above.
        let at = unsafe { libc::mmap(host(address), bytes, libc::PROT_NONE, flags, -1, 0) };
        at != libc::MAP_FAILED
    }

    /// Says what may be done with a piece.
    pub fn allow(&mut self, address: u64, bytes: usize, access: c_int) -> bool {
        let Some(range) = self.range(address, bytes) else {
            return false;
        };
        let Some(piece) = range.pieces.get_mut(&address).filter(|p| p.bytes == bytes) else {
            return false;
        };
        piece.access = access;
        let may = match access {
            1 => libc::PROT_READ,
            3 => libc::PROT_READ | libc::PROT_WRITE,
            _ => libc::PROT_NONE,
        };
        // SAFETY: a piece that is mapped.
        unsafe { libc::mprotect(host(address), bytes, may) == 0 }
    }

    /// Whether all of these bytes may be read, or written.
    pub fn allows(&self, address: u64, bytes: usize, write: bool) -> bool {
        let Some((_, range)) = self.ranges.range(..=address).next_back() else {
            return false;
        };
        let need = if write { 3 } else { 1 };
        let (mut at, end) = (address, address + bytes as u64);
        while at < end {
            let piece = range.pieces.range(..=at).next_back();
            let piece =
                piece.filter(|(start, p)| p.access & need == need && at < *start + p.bytes as u64);
            let Some((start, piece)) = piece else {
                return false;
            };
            at = start + piece.bytes as u64;
        }
        true
    }
}

fn host(address: u64) -> *mut c_void {
    crate::state::to_host(address).cast()
}

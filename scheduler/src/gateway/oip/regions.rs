//! Memory that clients on this host share: registered under a name, read and written by system calls, never mapped here.
//! A worker may map it ([`Spot`]).
//!
//! What a client registers must be a regular file of `/dev/shm` that belongs to the user at the other end of the
//! connection, by the kernel's word: so nobody has the scheduler read or write for them what is another user's. The client
//! can change it at any time; whatever is read is looked at after it was copied, once, and what is no longer there, or no
//! longer what was registered, is an error and not a signal.

use std::{
    collections::BTreeMap,
    ffi::CString,
    io,
    num::NonZero,
    ops::Range,
    os::{fd::OwnedFd, unix::fs::FileExt},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use bytes::Bytes;
use hotcell_ipc::memory::SharedMapping;
use hotcell_proto::{
    error::{Error, Reason},
    limits,
};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, fstat, openat, statat};

use super::tensor::{invalid, short};
use crate::graphs::{ClientMemory, Fill, Look, Spot};

/// Where the host keeps shared memory.
const FOLDER: &str = "/dev/shm";

/// A piece of memory as it was registered.
#[derive(Debug)]
pub(super) struct Region {
    /// As its file is called.
    pub key: String,
    /// Where it begins in the file, bytes.
    pub offset: u64,
    /// Its length, bytes.
    pub size: u64,
    memory: Arc<ClientMemory>,
}

/// A place within a piece of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub region: String,
    pub offset: u64,
    pub size: u64,
}

/// Whose a piece of memory is, and its name.
type Name = (String, String);

/// All pieces of memory that were registered.
#[derive(Clone, Debug, Default)]
pub(super) struct Regions(Arc<Mutex<BTreeMap<Name, Arc<Region>>>>);

fn changed(name: &str, what: &str) -> Error {
    let what = format!(
        "shared memory {:?} {what}; unregister it and register it again",
        short(name)
    );
    Error::new(Reason::RegionChanged, what)
}

/// The name of the file that a key stands for: one of the folder itself.
fn file_name(key: &str) -> Result<CString, Error> {
    let name = key.strip_prefix('/').unwrap_or(key);
    let plain = !name.is_empty() && name != "." && name != ".." && !name.contains('/');
    let fits = plain && key.len() <= limits::MAX_REGION_NAME;
    let name = CString::new(name).ok().filter(|_| fits);
    name.ok_or_else(|| invalid(format!("{:?} is no key of shared memory", short(key))))
}

fn folder() -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(FOLDER, flags, Mode::empty())?)
}

fn open(key: &str, offset: u64, size: u64, user: u32) -> Result<Region, Error> {
    let name = file_name(key)?;
    let end = offset.checked_add(size).filter(|_| size > 0);
    let end =
        end.ok_or_else(|| invalid("shared memory has a length, and ends where numbers do"))?;
    let cannot = |e: io::Error| {
        let reason = match e.kind() {
            io::ErrorKind::NotFound => Reason::FileNotFound,
            io::ErrorKind::PermissionDenied => Reason::PermissionDenied,
            _ => Reason::InvalidArgument,
        };
        let what = format!("shared memory {:?} cannot be opened: {e}", short(key));
        Error::new(reason, what)
    };
    let folder = folder().map_err(cannot)?;
    // Neither followed nor waited for, whatever it is.
    let flags =
        OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = openat(&folder, &name, flags, Mode::empty()).map_err(|e| cannot(e.into()))?;
    let found = fstat(&file).map_err(|e| cannot(e.into()))?;
    let around = fstat(&folder).map_err(|e| cannot(e.into()))?;
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile
        || found.st_dev != around.st_dev
    {
        return Err(invalid(format!("{:?} is no shared memory", short(key))));
    }
    if user != 0 && found.st_uid != user {
        let what = format!(
            "shared memory {:?} belongs to user {}, and user {user} asks",
            short(key),
            found.st_uid
        );
        return Err(Error::new(Reason::PermissionDenied, what));
    }
    if u64::try_from(found.st_size).unwrap_or(0) < end {
        return Err(invalid(format!(
            "shared memory {:?} has {} bytes, and {end} were named",
            short(key),
            found.st_size
        )));
    }
    Ok(Region {
        key: key.to_owned(),
        offset,
        size,
        memory: Arc::new(ClientMemory::new(file.into(), (found.st_dev, found.st_ino))),
    })
}

impl Region {
    /// Where `place` begins in the file, if the memory still is what was registered.
    fn locate(&self, place: &Place) -> Result<u64, Error> {
        let end = place.offset.checked_add(place.size);
        if end.is_none_or(|end| end > self.size) {
            return Err(invalid(format!(
                "{} bytes from {} are not within the {} of shared memory {:?}",
                place.size,
                place.offset,
                self.size,
                short(&place.region)
            )));
        }
        let lost = |e: io::Error| changed(&place.region, &format!("cannot be reached: {e}"));
        let found = fstat(self.memory.file()).map_err(|e| lost(e.into()))?;
        // Neither sum overflows: the one was looked at when it was registered, the other is smaller.
        if u64::try_from(found.st_size).unwrap_or(0) < self.offset.saturating_add(self.size) {
            return Err(changed(&place.region, "is shorter than it was registered"));
        }
        let folder = folder().map_err(lost)?;
        // One without a name is as good as before: whoever has it open shares it still.
        let named = file_name(&self.key)
            .ok()
            .and_then(|name| statat(&folder, &name, AtFlags::SYMLINK_NOFOLLOW).ok());
        if named.is_some_and(|named| (named.st_dev, named.st_ino) != self.memory.identity()) {
            return Err(changed(
                &place.region,
                "is another one under the same key now",
            ));
        }
        Ok(self.offset.saturating_add(place.offset))
    }
}

impl Region {
    /// So many bytes of a place, for who computes in them.
    fn spot(self: &Arc<Self>, place: &Place, bytes: u64) -> Result<Spot, Error> {
        let at = self.locate(place)?;
        let (region, its) = (Arc::clone(self), place.clone());
        let look: Look = Arc::new(move || region.locate(&its).map(|_| ()));
        Ok(Spot {
            memory: Arc::clone(&self.memory),
            at,
            bytes,
            look,
        })
    }
}

/// Bytes that are copied at once. At most so many are still written after their client was told that its call failed.
const PIECE: usize = 1 << 20;

/// Threads that copy one tensor, at most, and bytes for which one more is worth its start.
const COPIERS: usize = 4;
const WORTH: usize = 8 << 20;

/// Copies so many bytes in pieces, each named by where it begins and how long it is, until nobody waits any more.
fn by_pieces(
    bytes: usize,
    over: &AtomicBool,
    copy: impl Fn(usize, usize) -> io::Result<()> + Sync,
) -> io::Result<()> {
    let some = |range: Range<usize>| {
        for at in range.clone().step_by(PIECE) {
            if over.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            copy(at, PIECE.min(range.end - at))?;
        }
        Ok(())
    };
    // The system is asked by opening files.
    static CORES: OnceLock<usize> = OnceLock::new();
    let copiers = match bytes / WORTH {
        0 | 1 => 1,
        worth => {
            let cores =
                CORES.get_or_init(|| thread::available_parallelism().map_or(1, NonZero::get));
            worth.min(COPIERS).min(*cores)
        }
    };
    let each = bytes.div_ceil(copiers).next_multiple_of(PIECE);
    thread::scope(|scope| {
        let some = &some;
        let others = (1..copiers).map(|i| i * each..bytes.min((i + 1) * each));
        let others = others.filter(|range| !range.is_empty());
        // One that the system has no thread for is copied here.
        let others: Vec<_> = others
            .map(|range| {
                let its = range.clone();
                let named = thread::Builder::new().name("copy".to_owned());
                (named.spawn_scoped(scope, move || some(its)), range)
            })
            .collect();
        let mut end = some(0..each.min(bytes));
        for (other, range) in others {
            end = end.and(match other {
                Ok(thread) => thread.join().unwrap_or(Err(io::ErrorKind::Other.into())),
                Err(_) => some(range),
            });
        }
        end
    })
}

impl Regions {
    fn all(&self) -> MutexGuard<'_, BTreeMap<Name, Arc<Region>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, tenant: &str, name: &str) -> Result<Arc<Region>, Error> {
        let key = (tenant.to_owned(), name.to_owned());
        self.all().get(&key).cloned().ok_or_else(|| {
            let what = format!("no shared memory is registered as {:?}", short(name));
            Error::new(Reason::RegionNotFound, what)
        })
    }

    /// Registers memory for a tenant, on behalf of a user of this host.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`], [`Reason::LimitExceeded`], [`Reason::FileNotFound`], [`Reason::PermissionDenied`].
    pub fn register(
        &self,
        (tenant, name): (&str, &str),
        key: &str,
        (offset, size): (u64, u64),
        user: u32,
    ) -> Result<(), Error> {
        if name.is_empty() || name.len() > limits::MAX_REGION_NAME {
            let what = format!(
                "shared memory has a name of 1 to {} bytes",
                limits::MAX_REGION_NAME
            );
            return Err(invalid(what));
        }
        let region = open(key, offset, size, user)?;
        let mut all = self.all();
        if all.len() >= limits::MAX_REGIONS {
            let what = format!(
                "{} pieces of shared memory are registered already",
                all.len()
            );
            return Err(Error::new(Reason::LimitExceeded, what));
        }
        let name = (tenant.to_owned(), name.to_owned());
        if all.contains_key(&name) {
            let what = format!(
                "shared memory is registered as {:?} already; unregister it first",
                short(&name.1)
            );
            return Err(invalid(what));
        }
        all.insert(name, Arc::new(region));
        Ok(())
    }

    /// Forgets a tenant's memory of this name, or all of the tenant's for an empty one.
    pub fn unregister(&self, tenant: &str, name: &str) {
        let its = |(of, known): &Name| of == tenant && (name.is_empty() || known == name);
        self.all().retain(|known, region| {
            let stays = !its(known);
            if !stays {
                // Workers let go of it as well.
                region.memory.leave();
            }
            stays
        });
    }

    /// A tenant's memory of this name, or all of the tenant's for an empty one.
    ///
    /// # Errors
    /// [`Reason::RegionNotFound`].
    pub fn status(&self, tenant: &str, name: &str) -> Result<Vec<(String, Arc<Region>)>, Error> {
        if !name.is_empty() {
            return Ok(vec![(name.to_owned(), self.find(tenant, name)?)]);
        }
        let all = self.all();
        let its = all.iter().filter(|((of, _), _)| of == tenant);
        Ok(its
            .map(|((_, name), region)| (name.clone(), Arc::clone(region)))
            .collect())
    }

    /// Looks whether a place is there, before something is computed for it.
    ///
    /// # Errors
    /// [`Reason::RegionNotFound`], [`Reason::InvalidArgument`], [`Reason::RegionChanged`].
    pub fn check(&self, tenant: &str, place: &Place) -> Result<(), Error> {
        self.find(tenant, &place.region)?.locate(place).map(|_| ())
    }

    /// Copies what is in a place.
    ///
    /// # Errors
    /// As [`check`](Self::check), and [`Reason::LimitExceeded`].
    pub fn read(&self, tenant: &str, place: &Place) -> Result<Bytes, Error> {
        let region = self.find(tenant, &place.region)?;
        let from = region.locate(place)?;
        let size = usize::try_from(place.size).ok();
        let size = size.filter(|size| *size <= limits::MAX_MESSAGE_BYTES);
        let size = size.ok_or_else(|| {
            let what = format!("a tensor has at most {} bytes", limits::MAX_MESSAGE_BYTES);
            Error::new(Reason::LimitExceeded, what)
        })?;
        let mut data = vec![0; size];
        let read = region.memory.file().read_exact_at(&mut data, from);
        read.map_err(|e| changed(&place.region, &format!("cannot be read: {e}")))?;
        Ok(data.into())
    }

    /// Reads a place into memory, each time it is called; and where it is, for who reads it there.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn fill(&self, tenant: &str, place: &Place) -> Result<(Spot, Fill), Error> {
        let region = self.find(tenant, &place.region)?;
        let spot = region.spot(place, place.size)?;
        let place = place.clone();
        let fill: Fill = Arc::new(move |memory: &SharedMapping, over: &AtomicBool| {
            let from = region.locate(&place)?;
            let read = by_pieces(memory.len(), over, |at, bytes| {
                memory.fill(
                    at,
                    bytes,
                    region.memory.file(),
                    from.saturating_add(at as u64),
                )
            });
            read.map_err(|e| changed(&place.region, &format!("cannot be read: {e}")))
        });
        Ok((spot, fill))
    }

    /// Writes so many bytes of memory to a place, each time it is called; and where it is, for who writes it there.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn empty(&self, tenant: &str, place: &Place, bytes: u64) -> Result<(Spot, Fill), Error> {
        let region = self.find(tenant, &place.region)?;
        let spot = region.spot(place, bytes)?;
        if bytes > place.size {
            return Err(invalid(format!(
                "{bytes} bytes do not fit into the {} of shared memory {:?} that were named",
                place.size,
                short(&place.region)
            )));
        }
        let place = place.clone();
        let empty: Fill = Arc::new(move |memory: &SharedMapping, over: &AtomicBool| {
            let to = region.locate(&place)?;
            let written = by_pieces(memory.len(), over, |at, bytes| {
                memory.empty_to(
                    at,
                    bytes,
                    region.memory.file(),
                    to.saturating_add(at as u64),
                )
            });
            written.map_err(|e| changed(&place.region, &format!("cannot be written: {e}")))
        });
        Ok((spot, empty))
    }

    /// Writes to a place; how many bytes it then has.
    ///
    /// # Errors
    /// As [`check`](Self::check), and [`Reason::InvalidArgument`] if there is more than fits.
    pub fn write(&self, tenant: &str, place: &Place, data: &[u8]) -> Result<u64, Error> {
        let region = self.find(tenant, &place.region)?;
        let to = region.locate(place)?;
        let size = u64::try_from(data.len()).unwrap_or(u64::MAX);
        if size > place.size {
            return Err(invalid(format!(
                "{} bytes of shared memory {:?} were set aside for an output of {size}",
                place.size,
                short(&place.region)
            )));
        }
        let written = region.memory.file().write_all_at(data, to);
        written.map_err(|e| changed(&place.region, &format!("cannot be written: {e}")))?;
        Ok(size)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    struct Shared(String);

    impl Shared {
        fn new(what: &str, bytes: usize) -> Self {
            let key = format!("hotcell-test-{}-{what}", std::process::id());
            fs::write(format!("{FOLDER}/{key}"), vec![7; bytes]).unwrap();
            Self(key)
        }

        fn path(&self) -> String {
            format!("{FOLDER}/{}", self.0)
        }
    }

    impl Drop for Shared {
        fn drop(&mut self) {
            let _ = fs::remove_file(self.path());
        }
    }

    fn user() -> u32 {
        rustix::process::geteuid().as_raw()
    }

    fn place(offset: u64, size: u64) -> Place {
        Place {
            region: "r".into(),
            offset,
            size,
        }
    }

    fn registered(memory: &Shared, offset: u64, size: u64) -> Regions {
        let regions = Regions::default();
        regions
            .register(("t", "r"), &memory.0, (offset, size), user())
            .unwrap();
        regions
    }

    #[test]
    fn what_is_within_is_read_and_written_and_nothing_else_is() {
        let memory = Shared::new("bounds", 64);
        let regions = registered(&memory, 16, 32);
        regions.write("t", &place(30, 2), b"ab").unwrap();
        assert_eq!(
            &regions.read("t", &place(28, 4)).unwrap()[..],
            [7, 7, b'a', b'b']
        );
        assert_eq!(fs::read(memory.path()).unwrap()[46..50], [b'a', b'b', 7, 7]);
        for (offset, size) in [(0, 33), (32, 1), (u64::MAX, 1), (1, u64::MAX)] {
            let reason = |r: Result<(), Error>| r.unwrap_err().reason();
            let place = place(offset, size);
            assert_eq!(reason(regions.check("t", &place)), Reason::InvalidArgument);
            assert!(regions.read("t", &place).is_err());
            assert!(regions.write("t", &place, b"x").is_err());
        }
        assert!(regions.write("t", &place(0, 1), b"xy").is_err());
        assert_eq!(
            regions.read("other", &place(0, 1)).unwrap_err().reason(),
            Reason::RegionNotFound
        );
    }

    #[test]
    fn memory_that_shrank_or_was_replaced_is_no_longer_it() {
        let memory = Shared::new("changes", 64);
        let regions = registered(&memory, 0, 64);
        let reason = || regions.read("t", &place(0, 4)).unwrap_err().reason();
        let file = fs::OpenOptions::new()
            .write(true)
            .open(memory.path())
            .unwrap();
        file.set_len(63).unwrap();
        assert_eq!(reason(), Reason::RegionChanged);
        file.set_len(64).unwrap();
        assert!(regions.read("t", &place(0, 4)).is_ok());
        fs::remove_file(memory.path()).unwrap();
        // Whoever has it open shares it still.
        assert!(regions.read("t", &place(0, 4)).is_ok());
        fs::write(memory.path(), [8; 64]).unwrap();
        assert_eq!(reason(), Reason::RegionChanged);
    }

    #[test]
    fn only_a_users_own_files_of_the_folder_are_registered() {
        let memory = Shared::new("own", 64);
        let regions = Regions::default();
        let register =
            |key: &str, size: u64, user: u32| regions.register(("t", "r"), key, (0, size), user);
        let reason = |r: Result<(), Error>| r.unwrap_err().reason();
        assert_eq!(
            reason(register(&memory.0, 64, user() + 1)),
            Reason::PermissionDenied
        );
        for key in ["", "/", "..", "/..", "a/b", "../etc/passwd", "a\0b"] {
            assert_eq!(
                reason(register(key, 1, user())),
                Reason::InvalidArgument,
                "{key:?}"
            );
        }
        assert_eq!(
            reason(register(&memory.0, 65, user())),
            Reason::InvalidArgument
        );
        assert_eq!(
            reason(register(&memory.0, 0, user())),
            Reason::InvalidArgument
        );
        assert_eq!(
            reason(register("hotcell-test-nothing", 1, user())),
            Reason::FileNotFound
        );
        let link = Shared::new("link", 0);
        fs::remove_file(link.path()).unwrap();
        std::os::unix::fs::symlink(memory.path(), link.path()).unwrap();
        assert!(register(&link.0, 64, user()).is_err());
        register(&format!("/{}", memory.0), 64, user()).unwrap();
        // A name is used once.
        assert_eq!(
            reason(register(&memory.0, 64, user())),
            Reason::InvalidArgument
        );
        regions.unregister("other", "");
        assert_eq!(regions.status("t", "").unwrap().len(), 1);
        regions.unregister("t", "r");
        assert!(regions.status("t", "r").is_err());
    }
}

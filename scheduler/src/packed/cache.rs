//! A private folder of packed copies, for this scheduler and those after it.
//!
//! A copy is a file named after what it is a copy of. Beside it lies a note of what the file was when it was complete:
//! one that has none, or is something else by now, is of no use. Whoever has a copy holds a shared lock of it, and only
//! what nobody has is removed to make room: first what was not used for the longest time.

use std::{
    fs::{DirBuilder, File},
    io::{self, Read, Write},
    os::{
        fd::OwnedFd,
        unix::fs::{DirBuilderExt, MetadataExt},
    },
    path::{Path, PathBuf},
    time::SystemTime,
};

use hotcell_ipc::memory::FileIdentity;
use rustix::{
    fs::{AtFlags, Dir, FallocateFlags, FlockOperation, Mode, OFlags, Timestamps},
    io::Errno,
};

use super::Key;

/// Copies at most, however small.
const MAX_COPIES: usize = 1024;
/// Bytes of a note at most.
const MAX_NOTE: u64 = 1024;
/// This part of the disk stays free, in 1/n, but not more than so many bytes: a large disk that is nearly full still
/// has room for small copies.
const RESERVED_PART: u64 = 20;
const MAX_RESERVED: u64 = 4 << 30;

/// How files end: copies, their notes, and copies that are being made.
const COPY: &str = ".packed";
const NOTE: &str = ".note";
const DRAFT: &str = ".draft";

/// The folder.
#[derive(Debug)]
pub struct Cache {
    folder: OwnedFd,
    path: PathBuf,
    limit: Option<u64>,
    /// Bytes of the disk that stay free at most.
    max_reserved: u64,
}

/// A copy that is being made; its file goes when this is dropped.
#[derive(Debug)]
pub(super) struct Draft {
    file: File,
    name: String,
    folder: OwnedFd,
}

impl Draft {
    pub(super) fn file(&self) -> &File {
        &self.file
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // A complete one has another name by now.
        let _ = rustix::fs::unlinkat(&self.folder, &self.name, AtFlags::empty());
    }
}

/// What there is of a copy.
struct Entry {
    name: String,
    bytes: u64,
    used: Option<SystemTime>,
}

fn name_of(key: &Key) -> String {
    let FileIdentity {
        dev,
        ino,
        len,
        mtime_ns,
        ctime_ns,
    } = key.file;
    format!(
        "{dev:x}-{ino:x}-{len:x}-{mtime_ns:x}-{ctime_ns:x}-{}",
        key.layout
    )
}

/// What a note says of a complete copy. The number of the disk is not in it: that may change with each start of the host.
fn note_of(identity: &FileIdentity) -> String {
    let FileIdentity {
        ino,
        len,
        mtime_ns,
        ctime_ns,
        ..
    } = identity;
    format!("hotcell packed copy 1\n{ino} {len} {mtime_ns} {ctime_ns}\n")
}

fn refused<T>(why: impl Into<String>) -> io::Result<T> {
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why.into()))
}

impl Cache {
    /// Opens the folder, and makes it if there is none. What others left half made is removed.
    ///
    /// # Errors
    /// When it cannot be made or read, or belongs to or is open to somebody else.
    pub fn open(path: &Path, limit: Option<u64>) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = rustix::fs::open(path, flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&folder)?;
        if stat.st_uid != rustix::process::geteuid().as_raw() {
            return refused("it belongs to somebody else");
        }
        if stat.st_mode & 0o077 != 0 {
            return refused("it is open to others; chmod 700 it");
        }
        let cache = Self {
            folder,
            path: path.to_owned(),
            limit,
            max_reserved: MAX_RESERVED,
        };
        for name in cache.names(DRAFT)? {
            cache.remove_unused(&name);
        }
        Ok(cache)
    }

    /// A complete copy, open to be read, and locked for as long as the descriptor or a duplicate is open.
    pub(super) fn find(&self, key: &Key) -> Option<OwnedFd> {
        let name = name_of(key);
        let (copy, note) = (format!("{name}{COPY}"), format!("{name}{NOTE}"));
        let file = self.open_file(&copy).ok()?;
        // One that is being removed or made just now is of no use.
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared).ok()?;
        match self.check(&file, &note, key) {
            Ok(()) => Some(file.into()),
            Err(error) => {
                let path = self.path.join(&copy);
                tracing::warn!(path = %path.display(), %error, "a packed copy is not used");
                drop(file);
                // One that somebody uses may be without its note for a moment yet.
                self.remove_unused(&copy);
                None
            }
        }
    }

    fn check(&self, file: &File, note: &str, key: &Key) -> io::Result<()> {
        let data = file.metadata()?;
        if !data.is_file() || data.uid() != rustix::process::geteuid().as_raw() {
            return refused("it is no file of this user");
        }
        if data.mode() & 0o222 != 0 {
            return refused("it can be written");
        }
        if data.len() != key.file.len {
            return refused(format!(
                "it has {} bytes instead of {}",
                data.len(),
                key.file.len
            ));
        }
        let mut said = String::new();
        let mut note = self.open_file(note)?;
        (&mut note).take(MAX_NOTE).read_to_string(&mut said)?;
        if said != note_of(&FileIdentity::of(file)?) {
            return refused("it is not what it was when it was complete");
        }
        // When it was used last.
        let now = rustix::fs::Timespec {
            tv_sec: 0,
            tv_nsec: rustix::fs::UTIME_NOW,
        };
        let times = Timestamps {
            last_access: now,
            last_modification: now,
        };
        Ok(rustix::fs::futimens(&note, &times)?)
    }

    fn open_file(&self, name: &str) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        Ok(rustix::fs::openat(&self.folder, name, flags, Mode::empty())?.into())
    }

    fn create(&self, name: &str) -> io::Result<File> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        Ok(rustix::fs::openat(&self.folder, name, flags, mode)?.into())
    }

    /// Names that end so.
    fn names(&self, end: &str) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.folder)? {
            let entry = entry?;
            let name = entry.file_name().to_str();
            names.extend(name.ok().filter(|n| n.ends_with(end)).map(str::to_owned));
        }
        Ok(names)
    }

    /// Makes room for a copy, and begins it.
    ///
    /// # Errors
    /// In words, why there is no room.
    pub(super) fn begin(&self, key: &Key) -> Result<Draft, String> {
        let shown = self.path.display();
        let bytes = key.file.len;
        self.make_room(bytes)?;
        let broken = |error: io::Error| format!("{shown} cannot be written: {error}");
        let number = getrandom::u64().map_err(|e| format!("no random number: {e}"))?;
        let name = format!("{number:016x}{DRAFT}");
        let file = self.create(&name).map_err(broken)?;
        let folder = self.folder.try_clone().map_err(broken)?;
        let draft = Draft { file, name, folder };
        let lock = FlockOperation::NonBlockingLockExclusive;
        rustix::fs::flock(&draft.file, lock).map_err(|e| broken(e.into()))?;
        // All of its room now, where the disk can do that.
        match rustix::fs::fallocate(&draft.file, FallocateFlags::empty(), 0, bytes) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => draft.file.set_len(bytes).map_err(broken)?,
            done => done.map_err(|e| broken(e.into()))?,
        }
        Ok(draft)
    }

    /// Removes what nobody uses, the longest unused first, until so many bytes fit.
    fn make_room(&self, bytes: u64) -> Result<(), String> {
        let shown = self.path.display();
        if let Some(limit) = self.limit.filter(|limit| *limit < bytes) {
            return Err(format!(
                "its packed copy takes {bytes} bytes, and --pack-limit is {limit}"
            ));
        }
        let mut entries = self.entries().map_err(|e| format!("{shown}: {e}"))?;
        // The most recently used first, so that the last one goes.
        entries.sort_by_key(|entry| std::cmp::Reverse(entry.used));
        let mut kept = 0usize;
        let mut held = 0u64;
        loop {
            let count = entries.len() + kept;
            let taken = entries
                .iter()
                .fold(held, |sum, e| sum.saturating_add(e.bytes));
            let fits = self
                .limit
                .is_none_or(|limit| taken.saturating_add(bytes) <= limit);
            let free = self.free().map_err(|e| format!("{shown}: {e}"))?;
            if fits && free >= bytes && count < MAX_COPIES {
                return Ok(());
            }
            let Some(oldest) = entries.pop() else {
                return Err(match fits {
                    true => format!(
                        "{shown} has room for {free} bytes beside what stays free on its disk, and {bytes} are needed"
                    ),
                    false => format!(
                        "copies that are in use leave no room for {bytes} bytes within --pack-limit"
                    ),
                });
            };
            let copy = format!("{}{COPY}", oldest.name);
            if self.remove_unused(&copy) {
                tracing::info!(copy, bytes = oldest.bytes, "a packed copy made room");
            } else {
                kept += 1;
                held = held.saturating_add(oldest.bytes);
            }
        }
    }

    /// Bytes that may be written.
    fn free(&self) -> io::Result<u64> {
        let disk = rustix::fs::fstatvfs(&self.folder)?;
        let bytes = |blocks: u64| blocks.saturating_mul(disk.f_frsize);
        let reserved = (bytes(disk.f_blocks) / RESERVED_PART).min(self.max_reserved);
        Ok(bytes(disk.f_bavail).saturating_sub(reserved))
    }

    fn entries(&self) -> io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for copy in self.names(COPY)? {
            let Some(name) = copy.strip_suffix(COPY) else {
                continue;
            };
            let data = match self.open_file(&copy) {
                Ok(file) => file.metadata()?,
                // Another one removed it just now, or it is no file.
                Err(_) => continue,
            };
            let note = self.open_file(&format!("{name}{NOTE}"));
            entries.push(Entry {
                used: note.and_then(|note| note.metadata()?.modified()).ok(),
                name: name.to_owned(),
                bytes: data.len(),
            });
        }
        Ok(entries)
    }

    /// Makes a copy complete: by its name, on the disk, to be read only. Gives it as [`Cache::find`] does.
    ///
    /// # Errors
    /// What the disk reports.
    pub(super) fn finish(&self, draft: Draft, key: &Key) -> io::Result<OwnedFd> {
        let name = name_of(key);
        let (copy, note) = (format!("{name}{COPY}"), format!("{name}{NOTE}"));
        rustix::fs::fchmod(&draft.file, Mode::RUSR)?;
        draft.file.sync_all()?;
        // What was there under these names is of no use: it would have been found.
        let _ = rustix::fs::unlinkat(&self.folder, &note, AtFlags::empty());
        rustix::fs::renameat(&self.folder, &draft.name, &self.folder, &copy)?;
        let file = self.open_file(&copy)?;
        let place =
            |file: &File| Ok::<_, io::Error>((file.metadata()?.dev(), file.metadata()?.ino()));
        if place(&file)? != place(&draft.file)? {
            return refused("another file came in its place");
        }
        for held in [&draft.file, &file] {
            rustix::fs::flock(held, FlockOperation::NonBlockingLockShared)?;
        }
        // Nobody else ever had it open to write.
        drop(draft);
        let mut note = self.create(&note)?;
        note.write_all(note_of(&FileIdentity::of(&file)?).as_bytes())?;
        note.sync_all()?;
        rustix::fs::fsync(&self.folder)?;
        Ok(file.into())
    }

    /// Removes a copy's names. Who has it open keeps it.
    pub(super) fn remove(&self, key: &Key) {
        let name = name_of(key);
        for end in [NOTE, COPY] {
            // What is not there is removed.
            let _ = rustix::fs::unlinkat(&self.folder, format!("{name}{end}"), AtFlags::empty());
        }
    }

    /// Removes a file, and its note, if nobody has a lock on it.
    fn remove_unused(&self, file: &str) -> bool {
        let Ok(open) = self.open_file(file) else {
            return false;
        };
        if rustix::fs::flock(&open, FlockOperation::NonBlockingLockExclusive).is_err() {
            return false;
        }
        if let Some(name) = file.strip_suffix(COPY) {
            let note = format!("{name}{NOTE}");
            let _ = rustix::fs::unlinkat(&self.folder, note, AtFlags::empty());
        }
        rustix::fs::unlinkat(&self.folder, file, AtFlags::empty()).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use hotcell_proto::ids::Layout;

    use super::*;

    fn key(ino: u64, len: u64) -> Key {
        Key {
            file: FileIdentity {
                dev: 1,
                ino,
                len,
                mtime_ns: -3,
                ctime_ns: 1 << 70,
            },
            layout: Layout::new("panel16-1").unwrap(),
            alone: 0,
        }
    }

    fn folder() -> (tempfile::TempDir, PathBuf) {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("a/b");
        (home, path)
    }

    /// A cache on a disk that may be nearly full.
    fn open(path: &Path, limit: Option<u64>) -> io::Result<Cache> {
        let cache = Cache::open(path, limit)?;
        Ok(Cache {
            max_reserved: 0,
            ..cache
        })
    }

    fn make(cache: &Cache, key: &Key) -> Result<OwnedFd, String> {
        let draft = cache.begin(key)?;
        let bytes = vec![7; key.file.len as usize];
        draft.file().write_all(&bytes).unwrap();
        Ok(cache.finish(draft, key).unwrap())
    }

    impl Draft {
        fn file_mut(&mut self) -> &mut File {
            &mut self.file
        }
    }

    fn files(path: &Path) -> Vec<PathBuf> {
        let mut all: Vec<_> = fs::read_dir(path)
            .unwrap()
            .map(|e| e.unwrap().path())
            .collect();
        all.sort();
        all
    }

    fn the_copy(path: &Path) -> PathBuf {
        let end = |p: &PathBuf| p.to_str().unwrap().ends_with(COPY);
        files(path).into_iter().find(end).unwrap()
    }

    #[test]
    fn what_was_made_is_found_by_others_and_drafts_are_not() {
        let (_home, path) = folder();
        let cache = open(&path, None).unwrap();
        assert!(cache.find(&key(1, 100)).is_none());
        let made = make(&cache, &key(1, 100)).unwrap();
        let other = open(&path, None).unwrap();
        let found = other.find(&key(1, 100)).unwrap();
        let same = |fd: &OwnedFd| FileIdentity::of(fd).unwrap();
        assert_eq!(same(&made), same(&found));
        assert!(rustix::io::write(&found, b"x").is_err());
        for other_key in [key(2, 100), key(1, 99)] {
            assert!(other.find(&other_key).is_none());
        }
        let layout = Layout::new("panel16-2").unwrap();
        let key = Key {
            layout,
            ..key(1, 100)
        };
        assert!(other.find(&key).is_none());
        let mut draft = cache.begin(&key).unwrap();
        draft.file_mut().write_all(b"half").unwrap();
        assert!(other.find(&key).is_none());
        // It is locked: nobody takes it for a dead one's.
        Cache::open(&path, None).unwrap();
        assert_eq!(files(&path).len(), 3);
        drop(draft);
        assert_eq!(files(&path).len(), 2);
        fs::write(path.join("0123.draft"), b"of one that was killed").unwrap();
        Cache::open(&path, None).unwrap();
        assert_eq!(files(&path).len(), 2);
    }

    #[test]
    fn a_copy_that_changed_in_any_way_is_not_used_and_goes() {
        type Spoil = fn(&Path);
        let writable = |path: &Path| {
            fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
        };
        let spoils: [(&str, Spoil); 6] = [
            ("shorter", |p| {
                File::options()
                    .write(true)
                    .open(p)
                    .unwrap()
                    .set_len(9)
                    .unwrap()
            }),
            ("other bytes", |p| {
                File::options()
                    .write(true)
                    .open(p)
                    .unwrap()
                    .write_all(b"?")
                    .unwrap()
            }),
            ("can be written", |_| {}),
            ("another file", |p| {
                fs::remove_file(p).unwrap();
                fs::write(p, [7; 100]).unwrap();
                fs::set_permissions(p, fs::Permissions::from_mode(0o400)).unwrap();
            }),
            ("a link", |p| {
                fs::rename(p, p.with_extension("away")).unwrap();
                std::os::unix::fs::symlink(p.with_extension("away"), p).unwrap();
            }),
            ("no note", |p| {
                fs::remove_file(p.with_extension("note")).unwrap()
            }),
        ];
        for (what, spoil) in spoils {
            let (_home, path) = folder();
            let cache = open(&path, None).unwrap();
            drop(make(&cache, &key(1, 100)).unwrap());
            let copy = the_copy(&path);
            writable(&copy);
            spoil(&copy);
            if what != "can be written" && what != "a link" {
                fs::set_permissions(&copy, fs::Permissions::from_mode(0o400)).unwrap();
            }
            assert!(cache.find(&key(1, 100)).is_none(), "{what}");
            // Made again, it is one.
            drop(make(&cache, &key(1, 100)).unwrap());
            assert!(cache.find(&key(1, 100)).is_some(), "{what}");
        }
    }

    #[test]
    fn the_least_recently_used_makes_room_and_what_is_in_use_does_not() {
        let (_home, path) = folder();
        let cache = open(&path, Some(250)).unwrap();
        let one = make(&cache, &key(1, 100)).unwrap();
        drop(make(&cache, &key(2, 100)).unwrap());
        let why = cache.begin(&key(3, 251)).unwrap_err();
        assert!(why.contains("--pack-limit is 250"), "{why}");
        // The older one is in use.
        let three = make(&cache, &key(3, 100)).unwrap();
        assert!(cache.find(&key(1, 100)).is_some());
        assert!(cache.find(&key(2, 100)).is_none());
        let why = cache.begin(&key(4, 100)).unwrap_err();
        assert!(why.contains("in use"), "{why}");
        drop((one, three));
        // Used last, whatever was made last.
        let note = the_note(&path, 3);
        let old = fs::FileTimes::new().set_modified(SystemTime::UNIX_EPOCH);
        File::options()
            .write(true)
            .open(note)
            .unwrap()
            .set_times(old)
            .unwrap();
        drop(make(&cache, &key(4, 100)).unwrap());
        assert!(cache.find(&key(1, 100)).is_some());
        assert!(cache.find(&key(3, 100)).is_none());
        let none = Cache::open(&path, Some(0)).unwrap();
        assert!(none.begin(&key(5, 100)).is_err());
        assert!(cache.begin(&key(6, 1 << 60)).is_err());
    }

    fn the_note(path: &Path, ino: u64) -> PathBuf {
        path.join(format!("{}{NOTE}", name_of(&key(ino, 100))))
    }

    #[test]
    fn a_folder_that_is_not_private_is_refused() {
        let (_home, path) = folder();
        Cache::open(&path, None).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o750)).unwrap();
        let error = Cache::open(&path, None).unwrap_err();
        assert!(error.to_string().contains("chmod 700"), "{error}");
        let file = path.join("file");
        fs::write(&file, b"").unwrap();
        assert!(Cache::open(&file, None).is_err());
    }
}

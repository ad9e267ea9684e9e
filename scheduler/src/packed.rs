//! Packed copies of models' files: the same bytes, the weights among them arranged as a device likes them best.
//!
//! Nothing is packed or read here. A worker packs, into memory that it shares with this process, which copies each piece
//! to its place: nobody but this process ever has a copy open to write, and a full disk is an error here instead of a
//! signal there. What is complete can be written by nobody any more, and is handed to every worker that has the model.
//!
//! Small and inherited files are copied into sealed memory, others into files of a private folder ([`Cache`]), where
//! later schedulers find them.

mod cache;
mod copies;

use std::{
    collections::HashMap,
    fs::File,
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::FileExt,
    },
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
};

use hotcell_ipc::{
    memory::{FileIdentity, is_immutable, seal, unsealed_memory},
    oom,
};
use hotcell_proto::ids::Layout;

pub use cache::Cache;
pub use copies::{Copies, Set};

/// Files of at most so many bytes are copied into memory.
pub const SMALL: u64 = 64 << 20;

/// What a copy is one of: a file as it was when it was opened, and the layout.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// The file.
    pub file: FileIdentity,
    /// How its weights are arranged.
    pub layout: Layout,
    /// Unless its model is trusted, the model's number: nobody else's copy, and a copy for nobody else.
    pub alone: u64,
}

/// A complete copy, which nobody can write.
#[derive(Debug)]
pub struct Copy {
    fd: OwnedFd,
    identity: FileIdentity,
    sealed: bool,
    /// Where it lies, unless in memory.
    kept: Option<(Arc<Cache>, Key)>,
}

impl Copy {
    /// One whose descriptor came from the program before this one, if it is what it was then.
    pub fn inherit(fd: OwnedFd, identity: FileIdentity) -> Option<Self> {
        let sealed = is_immutable(&fd).unwrap_or(false);
        let copy = Self {
            fd,
            identity,
            sealed,
            kept: None,
        };
        copy.is_unchanged().then_some(copy)
    }

    /// What it was when it was complete.
    pub fn identity(&self) -> FileIdentity {
        self.identity
    }

    /// The same one once more.
    ///
    /// # Errors
    /// For want of descriptors.
    pub fn share(&self) -> io::Result<OwnedFd> {
        self.fd.try_clone()
    }

    /// Whether no change was seen. That its name is gone, as when a cache is cleared, is none.
    pub fn is_unchanged(&self) -> bool {
        self.sealed || FileIdentity::of(&self.fd).is_ok_and(|now| now.has_bytes_of(&self.identity))
    }

    /// Has nobody find it any more.
    fn discard(&self) {
        if let Some((cache, key)) = &self.kept {
            cache.remove(key);
        }
    }
}

impl AsFd for Copy {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A copy that is being made. Dropped before it is complete, it leaves nothing behind.
#[derive(Debug)]
pub struct Draft {
    key: Key,
    place: Place,
}

#[derive(Debug)]
enum Place {
    Memory(File),
    Folder(cache::Draft, Arc<Cache>),
}

impl Draft {
    /// How many it will have.
    pub fn bytes(&self) -> u64 {
        self.key.file.len
    }

    /// Puts bytes in their place.
    ///
    /// # Errors
    /// `InvalidInput` when they do not fit; otherwise what writing reports.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let end = u64::try_from(bytes.len())
            .ok()
            .and_then(|n| offset.checked_add(n));
        if end.is_none_or(|end| end > self.key.file.len) {
            let what = "a piece of a packed copy lies outside of it";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        match &self.place {
            Place::Memory(file) => file.write_all_at(bytes, offset),
            Place::Folder(draft, _) => draft.file().write_all_at(bytes, offset),
        }
    }

    /// Makes it complete: nobody can write it any more.
    ///
    /// # Errors
    /// What sealing, or writing it down, reports.
    fn finish(self) -> io::Result<Copy> {
        let (fd, kept) = match self.place {
            Place::Memory(file) => (seal(&file)?, None),
            Place::Folder(draft, cache) => {
                let fd = cache.finish(draft, &self.key)?;
                (fd, Some((cache, self.key)))
            }
        };
        Ok(Copy {
            identity: FileIdentity::of(&fd)?,
            fd,
            sealed: kept.is_none(),
            kept,
        })
    }
}

/// Where copies are made and found.
#[derive(Debug, Default)]
pub struct Packs {
    on: bool,
    folder: Option<PathBuf>,
    limit: Option<u64>,
    /// Opened at its first use.
    cache: OnceLock<Result<Arc<Cache>, String>>,
    /// Those that somebody has.
    known: Mutex<HashMap<Key, Weak<Copy>>>,
}

impl Packs {
    /// There will be none.
    pub fn off() -> Self {
        Self::default()
    }

    /// Larger ones in this folder, of `limit` bytes in all.
    pub fn new(folder: Option<PathBuf>, limit: Option<u64>) -> Self {
        Self {
            on: true,
            folder,
            limit,
            ..Self::default()
        }
    }

    /// Whether there may be any.
    pub fn is_on(&self) -> bool {
        self.on
    }

    fn known(&self) -> MutexGuard<'_, HashMap<Key, Weak<Copy>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn cache(&self) -> Result<&Arc<Cache>, String> {
        let open = || {
            let folder = self.folder.as_ref().ok_or_else(|| {
                "there is no folder for packed copies; name one with --pack-dir".to_owned()
            })?;
            let cache = Cache::open(folder, self.limit);
            cache
                .map(Arc::new)
                .map_err(|error| format!("{} cannot be used: {error}", folder.display()))
        };
        self.cache.get_or_init(open).as_ref().map_err(String::clone)
    }

    /// Whether a copy of such a file lies in memory.
    fn in_memory(key: &Key, is_inherited: bool) -> bool {
        is_inherited || key.alone != 0 || key.file.len <= SMALL
    }

    /// A copy that there is already. Asks the disk.
    pub fn find(&self, key: &Key, is_inherited: bool) -> Option<Arc<Copy>> {
        if !self.on {
            return None;
        }
        let held = self.known().get(key).and_then(Weak::upgrade);
        if let Some(copy) = held.filter(|copy| copy.is_unchanged()) {
            return Some(copy);
        }
        if Self::in_memory(key, is_inherited) {
            return None;
        }
        let cache = self.cache().ok()?;
        let fd = cache.find(key)?;
        let copy = Copy {
            identity: FileIdentity::of(&fd).ok()?,
            fd,
            sealed: false,
            kept: Some((Arc::clone(cache), key.clone())),
        };
        Some(self.note(key, copy))
    }

    /// Makes room for a copy. Asks the disk.
    ///
    /// # Errors
    /// In words, why there is none.
    pub fn begin(&self, key: &Key, is_inherited: bool) -> Result<Draft, String> {
        let bytes = key.file.len;
        let place = if Self::in_memory(key, is_inherited) {
            if oom::room().is_some_and(|room| room / 2 < bytes) {
                return Err(format!(
                    "{bytes} bytes are more than half of the free memory"
                ));
            }
            let memory = unsealed_memory("hotcell-packed", bytes);
            Place::Memory(memory.map_err(|error| format!("no memory: {error}"))?)
        } else {
            let cache = self.cache()?;
            Place::Folder(cache.begin(key)?, Arc::clone(cache))
        };
        Ok(Draft {
            key: key.clone(),
            place,
        })
    }

    /// Makes a copy complete.
    ///
    /// # Errors
    /// In words, what went wrong.
    pub fn finish(&self, draft: Draft) -> Result<Arc<Copy>, String> {
        let key = draft.key.clone();
        let copy = draft.finish();
        let copy = copy.map_err(|error| format!("the copy cannot be kept: {error}"))?;
        Ok(self.note(&key, copy))
    }

    fn note(&self, key: &Key, copy: Copy) -> Arc<Copy> {
        let copy = Arc::new(copy);
        let mut known = self.known();
        known.retain(|_, copy| copy.strong_count() > 0);
        known.insert(key.clone(), Arc::downgrade(&copy));
        copy
    }

    /// Has nobody find a copy any more.
    pub fn discard(&self, copy: &Arc<Copy>) {
        self.known()
            .retain(|_, known| !std::ptr::eq(known.as_ptr(), Arc::as_ptr(copy)));
        copy.discard();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(len: u64) -> Key {
        Key {
            file: FileIdentity {
                dev: 1,
                ino: 2,
                len,
                mtime_ns: -3,
                ctime_ns: 4,
            },
            layout: Layout::new("panel16-1").unwrap(),
            alone: 0,
        }
    }

    #[test]
    fn a_small_copy_is_sealed_memory_and_shared_while_somebody_has_it() {
        let packs = Packs::new(None, None);
        let draft = packs.begin(&key(100), false).unwrap();
        draft.write(90, b"0123456789").unwrap();
        assert!(draft.write(91, b"0123456789").is_err());
        assert!(draft.write(u64::MAX, b"0").is_err());
        let copy = packs.finish(draft).unwrap();
        assert!(copy.sealed && copy.is_unchanged());
        let found = packs.find(&key(100), false).unwrap();
        assert!(Arc::ptr_eq(&copy, &found));
        let fd = copy.share().unwrap();
        assert!(File::from(fd).write_at(b"x", 0).is_err());
        packs.discard(&copy);
        assert!(packs.find(&key(100), false).is_none());
        drop((copy, found));
        assert!(packs.find(&key(100), false).is_none());
    }

    #[test]
    fn a_large_copy_needs_a_folder_and_an_inherited_one_does_not() {
        let packs = Packs::new(None, None);
        let why = packs.begin(&key(SMALL + 1), false).unwrap_err();
        assert!(why.contains("--pack-dir"), "{why}");
        assert!(packs.begin(&key(SMALL + 1), true).is_ok());
        assert!(packs.begin(&key(1 << 60), true).is_err());
        assert!(!Packs::off().is_on());
    }
}

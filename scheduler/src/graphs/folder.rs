//! Where saved graphs are kept from one start to the next: a file for each, written whole or not at all.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write},
    os::{
        fd::OwnedFd,
        unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

use hotcell_ipc::memory::{seal, unsealed_memory};
use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    limits,
};
use sha2::{Digest, Sha256};

use super::saved::Saved;
use crate::digest;

/// What the files' names end with.
const ENDING: &str = ".graph";
/// Bytes of one file: a graph, its constants, and what is known of both.
const MAX_BYTES: u64 = (limits::MAX_SAVED_GRAPH_BYTES + 16 * limits::MAX_GRAPH_BYTES) as u64;

/// The folder.
#[derive(Debug)]
pub(super) struct Folder(PathBuf);

fn cannot(what: &str, error: &io::Error) -> Error {
    Error::new(Reason::Internal, format!("{what}: {error}"))
}

/// A name of a model's may be none of a file's.
fn file_name(name: &ModelName) -> String {
    let hash = Sha256::digest(name.as_str());
    format!("{}{ENDING}", digest::hex(&hash.into()))
}

impl Folder {
    /// The folder of this path, made if there is none.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        match DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let found = fs::metadata(path)?;
        let own = rustix::process::geteuid().as_raw();
        if !found.is_dir() || found.uid() != own || found.mode() & 0o022 != 0 {
            let what = "it is no folder of this user's alone; others may not write there";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
        }
        Ok(Self(path.to_owned()))
    }

    /// The names of the files that are there.
    pub(super) fn files(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.0)? {
            let name = entry?.file_name();
            if let Some(name) = name.to_str().filter(|name| name.ends_with(ENDING)) {
                names.push(name.to_owned());
            }
        }
        names.sort();
        Ok(names)
    }

    /// A file's bytes in memory that nobody can change.
    pub(super) fn read(&self, name: &str) -> Result<OwnedFd, Error> {
        let copy = || {
            let flags = (rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK).bits();
            let mut file = OpenOptions::new()
                .read(true)
                .custom_flags(flags.cast_signed())
                .open(self.0.join(name))?;
            let found = file.metadata()?;
            if !found.is_file() || found.len() > MAX_BYTES {
                return Err(io::Error::from(io::ErrorKind::InvalidData));
            }
            let mut memory = unsealed_memory("hotcell-graph", 0)?;
            io::copy(&mut file, &mut memory)?;
            seal(&memory)
        };
        copy().map_err(|error| cannot("the file cannot be read", &error))
    }

    /// Keeps a graph, in place of one of its name.
    pub(super) fn write(&self, saved: &Saved) -> Result<(), Error> {
        let path = self.0.join(file_name(&saved.name));
        let unfinished = path.with_extension("unfinished");
        let write = || {
            let mut file: File = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&unfinished)?;
            saved.copy_to(&mut file)?;
            file.flush()?;
            file.sync_all()?;
            fs::rename(&unfinished, &path)
        };
        write().map_err(|error| {
            let _ = fs::remove_file(&unfinished);
            cannot("the graph cannot be kept", &error)
        })
    }

    /// Keeps the graph of this name no more.
    pub(super) fn remove(&self, name: &ModelName) -> Result<(), Error> {
        match fs::remove_file(self.0.join(file_name(name))) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(cannot("the graph cannot be forgotten", &error))
            }
            _ => Ok(()),
        }
    }
}

//! Models' bytes, held by descriptor: weights belong to the host, and outlive every worker.
//!
//! Nothing is read here. A model is the regular files of one folder, or one `.gguf` file, or descriptors that
//! were inherited; what they mean is for a worker to find out.

use std::{
    collections::BTreeMap,
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use hotcell_ipc::{
    memory::{FileIdentity, is_immutable},
    oom, takeover,
};
use hotcell_proto::{
    error::{Error, Reason},
    ids::{Layout, ModelName},
    limits,
    v1::{self, FileHandle},
};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};

use crate::{
    digest,
    kept::KeptOn,
    packed::{Copies, Copy, Key},
    policy::ModelPolicy,
};

/// Where a model's bytes come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A folder or a `.gguf` file.
    Path(PathBuf),
    /// Descriptors inherited at the start.
    Bundled,
}

impl Source {
    /// Whether its files can be opened again once they are closed.
    pub fn can_be_read_again(&self) -> bool {
        matches!(self, Source::Path(_))
    }
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Source::Path(path) => path.display().fmt(f),
            Source::Bundled => f.write_str("bundled"),
        }
    }
}

/// One open file of a model.
#[derive(Debug)]
struct HeldFile {
    name: String,
    fd: OwnedFd,
    identity: FileIdentity,
    /// Its bytes cannot change, whatever its times say.
    sealed: bool,
}

/// A model's files, open.
#[derive(Debug)]
pub struct OpenModel {
    files: Vec<HeldFile>,
    /// Whether the files came as descriptors: nobody finds them again by a path.
    inherited: bool,
    /// Unless it is trusted, a number that no other model has.
    alone: u64,
    copies: Copies,
    kept: KeptOn,
}

/// Numbers untrusted models, from 1.
static ALONE: AtomicU64 = AtomicU64::new(1);

fn alone() -> u64 {
    ALONE.fetch_add(1, Ordering::Relaxed)
}

impl OpenModel {
    /// Bytes of all files together.
    pub fn bytes(&self) -> u64 {
        self.files
            .iter()
            .fold(0, |sum: u64, f| sum.saturating_add(f.identity.len))
    }

    /// The files' names and sizes, in the order of their descriptors.
    pub fn handles(&self) -> Vec<FileHandle> {
        let handle = |f: &HeldFile| FileHandle {
            name: f.name.clone(),
            bytes: f.identity.len,
        };
        self.files.iter().map(handle).collect()
    }

    /// The files' names, sizes and descriptors, in their order.
    pub fn each(&self) -> impl Iterator<Item = (&str, u64, BorrowedFd<'_>)> {
        let files = self.files.iter();
        files.map(|f| (f.name.as_str(), f.identity.len, f.fd.as_fd()))
    }

    /// The same files once more, and their packed copies.
    ///
    /// # Errors
    /// For want of descriptors.
    pub fn share(&self) -> io::Result<Vec<OwnedFd>> {
        let files = self.files.iter().map(|f| f.fd.try_clone());
        let copies = self.copies.held();
        let copies = copies.iter().map(|(_, _, copy, _)| copy.share());
        files.chain(copies).collect()
    }

    /// The number of an untrusted model, which may share nothing with any other; none if it is trusted.
    pub fn alone(&self) -> Option<u64> {
        (self.alone != 0).then_some(self.alone)
    }

    /// Its packed copies.
    pub fn copies(&self) -> &Copies {
        &self.copies
    }

    /// Its weights in devices' memory.
    pub fn kept(&self) -> &KeptOn {
        &self.kept
    }

    /// What a file's packed copy goes by.
    pub fn key(&self, index: u32, layout: &Layout) -> Option<Key> {
        let file = self.files.get(index as usize)?;
        Some(Key {
            file: file.identity,
            layout: layout.clone(),
            alone: self.alone,
        })
    }

    /// Whether the files came as descriptors.
    pub fn is_inherited(&self) -> bool {
        self.inherited
    }

    /// The files, for a program that takes this one's place.
    pub fn hold(&self) -> Vec<v1::HeldFile> {
        let hold = |f: &HeldFile| held(&f.name, &f.fd, f.identity);
        let mut files: Vec<_> = self.files.iter().map(hold).collect();
        for (layout, index, copy, packings) in self.copies.held() {
            if let Some(file) = files.get_mut(index as usize) {
                file.packed.push(v1::HeldPacked {
                    layout: layout.as_str().to_owned(),
                    file: Some(held("", copy.as_fd(), copy.identity())),
                    packings,
                });
            }
        }
        files
    }

    /// Refuses if a file is not what it was when it was opened. That another one has its name now, or none, changes nothing.
    ///
    /// # Errors
    /// [`Reason::ModelChanged`], naming the file.
    pub fn check(&self) -> Result<(), Error> {
        for file in self.files.iter().filter(|f| !f.sealed) {
            if !FileIdentity::of(&file.fd).is_ok_and(|now| now.has_bytes_of(&file.identity)) {
                return Err(changed(&file.name));
            }
        }
        Ok(())
    }

    /// The descriptors to hand to a worker.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn hand_out(&self) -> Result<Vec<BorrowedFd<'_>>, Error> {
        self.check()?;
        Ok(self.files.iter().map(|f| f.fd.as_fd()).collect())
    }
}

fn changed(file: &str) -> Error {
    let what = format!(
        "the model's file {file} changed after it was opened; unload the model and load it again"
    );
    Error::new(Reason::ModelChanged, what).with("file", file)
}

fn not_found(path: &Path, error: &io::Error) -> Error {
    let way_out = match error.kind() {
        io::ErrorKind::NotFound => "it does not exist; check the path as the scheduler sees it",
        io::ErrorKind::PermissionDenied => "permission denied; let the scheduler's user read it",
        _ => return unreadable(path, error),
    };
    Error::new(
        Reason::FileNotFound,
        format!("cannot open {}: {way_out}", path.display()),
    )
    .with("path", path.display())
}

fn unreadable(path: &Path, error: &io::Error) -> Error {
    Error::new(
        Reason::FileNotFound,
        format!("cannot open {}: {error}", path.display()),
    )
    .with("path", path.display())
}

fn not_a_model(path: &Path, why: &str) -> Error {
    Error::new(
        Reason::NotAModel,
        format!(
            "{} {why}; give a Hugging Face folder (config.json, *.safetensors, tokenizer.json) or a .gguf file",
            path.display()
        ),
    )
    .with("path", path.display())
}

/// The name a model gets from its path when nobody names it: the last part without `.gguf`.
///
/// # Errors
/// [`Reason::InvalidArgument`] if that is no name.
pub fn name_of(path: &Path) -> Result<ModelName, Error> {
    let last = match extension(path) {
        Some("gguf") => path.file_stem(),
        _ => path.file_name(),
    };
    let name = last.and_then(|n| n.to_str()).unwrap_or_default();
    ModelName::new(name).map_err(|_| {
        Error::new(
            Reason::InvalidArgument,
            format!(
                "{} gives no usable model name; name the model yourself",
                path.display()
            ),
        )
    })
}

fn extension(path: &Path) -> Option<&str> {
    path.extension().and_then(|e| e.to_str())
}

/// Opens the model at `path`. Links are followed if they end inside the model's own folder, one of `roots`, or one of the
/// policy's. If the policy does not trust it, it is copied into sealed memory as far as the policy says.
///
/// # Errors
/// [`Reason::FileNotFound`], [`Reason::NotAModel`], [`Reason::LimitExceeded`], [`Reason::ModelNotAllowed`] or
/// [`Reason::InvalidArgument`] (a link that leads outside), each naming the path and the way out.
pub fn open(path: &Path, roots: &[PathBuf], policy: &ModelPolicy) -> Result<OpenModel, Error> {
    let real = fs::canonicalize(path).map_err(|e| not_found(path, &e))?;
    let data = fs::metadata(&real).map_err(|e| not_found(path, &e))?;
    let (home, entries) = if data.is_dir() {
        (real.clone(), folder(&real)?)
    } else if data.is_file() && extension(path) == Some("gguf") {
        // A link given by name is meant as it is: its target's folder is the model's.
        let home = real.parent().unwrap_or(Path::new("/")).to_owned();
        (home, vec![real.clone()])
    } else {
        return Err(not_a_model(path, "is neither a folder nor a .gguf file"));
    };
    let mut allowed = vec![home];
    // A root that does not exist allows nothing.
    allowed.extend(roots.iter().filter_map(|r| fs::canonicalize(r).ok()));

    let mut files = Vec::new();
    let mut trusted = true;
    for entry in entries {
        if let Some((file, beneath)) = open_entry(&entry, &allowed, policy)? {
            trusted &= beneath || !policy.is_given();
            files.push(file);
        }
    }
    if files.is_empty() {
        return Err(not_a_model(path, "holds no files of a model"));
    }
    if data.is_file() {
        // The worker should see the name that was asked for, not that of a blob behind a link.
        if let (Some(file), Some(name)) =
            (files.first_mut(), path.file_name().and_then(|n| n.to_str()))
        {
            file.name = name.to_owned();
        }
    }
    let sizes = files.iter().map(|f| (f.name.as_str(), f.identity.len));
    policy.check(sizes, trusted)?;
    let mut model = OpenModel {
        files,
        inherited: false,
        alone: if trusted { 0 } else { alone() },
        copies: Copies::default(),
        kept: KeptOn::default(),
    };
    if !trusted {
        model.seal(policy.sealed_bytes)?;
    }
    Ok(model)
}

impl OpenModel {
    /// Copies all files into memory that nobody can change, if they have no more than so many bytes and half of the free
    /// memory holds them.
    fn seal(&mut self, most: u64) -> Result<(), Error> {
        let bytes = self.bytes();
        if bytes > most || oom::room().is_some_and(|room| room / 2 < bytes) {
            tracing::warn!(
                bytes,
                "an untrusted model is mapped as it is: no sealed copy of it fits"
            );
            return Ok(());
        }
        for file in &mut self.files {
            let copy = digest::sealed_copy(file.fd.as_fd(), file.identity.len);
            let copy = copy.and_then(|fd| Ok((FileIdentity::of(&fd)?, fd)));
            let before = file.identity;
            let unchanged = FileIdentity::of(&file.fd).is_ok_and(|now| now.has_bytes_of(&before));
            let (identity, fd) = match (copy, unchanged) {
                (Ok(copy), true) => copy,
                (Err(error), true) => {
                    let what = format!("no copy can be made of its file {}: {error}", file.name);
                    return Err(Error::new(Reason::OutOfMemory, what));
                }
                (_, false) => return Err(changed(&file.name)),
            };
            (file.fd, file.identity, file.sealed) = (fd, identity, true);
        }
        Ok(())
    }
}

/// The entries of a folder that may belong to a model, in the order of their names.
fn folder(path: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut entries = Vec::new();
    for entry in fs::read_dir(path).map_err(|e| not_found(path, &e))? {
        let entry = entry.map_err(|e| unreadable(path, &e))?.path();
        if extension(&entry).is_some_and(|e| limits::MODEL_EXTENSIONS.contains(&e)) {
            entries.push(entry);
        }
        if entries.len() > limits::MAX_MODEL_FILES {
            return Err(Error::new(
                Reason::LimitExceeded,
                format!(
                    "{} holds more than {} files of a model; give it a folder of its own",
                    path.display(),
                    limits::MAX_MODEL_FILES
                ),
            ));
        }
    }
    entries.sort();
    Ok(entries)
}

/// Opens a file, if it is one, and says whether it lies beneath one of the policy's roots.
fn open_entry(
    entry: &Path,
    allowed: &[PathBuf],
    policy: &ModelPolicy,
) -> Result<Option<(HeldFile, bool)>, Error> {
    let Some(name) = entry.file_name().and_then(|n| n.to_str()) else {
        return Ok(None);
    };
    let real = fs::canonicalize(entry).map_err(|e| not_found(entry, &e))?;
    let inside = |root: &PathBuf| real.starts_with(root);
    if !allowed.iter().any(inside) && !policy.covers(&real) {
        return Err(Error::new(
            Reason::InvalidArgument,
            format!(
                "{} is a link to {}, outside the model's folder; copy the file or add that folder to model_roots",
                entry.display(),
                real.display()
            ),
        )
        .with("path", entry.display()));
    }
    let beneath = policy.open(&real, OPEN);
    let trusted = beneath.is_some();
    let fd = beneath.unwrap_or_else(|| open_resolved(&real));
    let file = fs::File::from(fd.map_err(|e| not_found(entry, &e))?);
    if !file
        .metadata()
        .map_err(|e| unreadable(entry, &e))?
        .is_file()
    {
        return Ok(None);
    }
    let fd = OwnedFd::from(file);
    let identity = FileIdentity::of(&fd).map_err(|e| unreadable(entry, &e))?;
    let file = HeldFile {
        name: name.to_owned(),
        fd,
        identity,
        sealed: false,
    };
    Ok(Some((file, trusted)))
}

/// How files are opened. Non-blocking, since a pipe would otherwise wait for a writer.
const OPEN: OFlags = OFlags::RDONLY
    .union(OFlags::CLOEXEC)
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY);

/// Opens a path that has no links in it, and fails if one was put there since it was resolved.
fn open_resolved(real: &Path) -> io::Result<OwnedFd> {
    let strict = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    match rustix::fs::openat2(CWD, real, OPEN, Mode::empty(), strict) {
        // Kernels before 5.6, and sandboxes that do not know the call: at least the last part is no link.
        Err(rustix::io::Errno::NOSYS | rustix::io::Errno::PERM) => Ok(rustix::fs::open(
            real,
            OPEN | OFlags::NOFOLLOW,
            Mode::empty(),
        )?),
        opened => Ok(opened?),
    }
}

/// Takes a model that was inherited as descriptors.
///
/// # Errors
/// [`Reason::NotAModel`] for a descriptor that is not a regular file or memfd.
pub fn adopt(name: &ModelName, files: Vec<(String, OwnedFd)>) -> Result<OpenModel, Error> {
    let mut held = Vec::new();
    for (file, fd) in files {
        let wrong = |why: &str| {
            Error::new(
                Reason::NotAModel,
                format!("the bundled model {name} cannot be used: its file {file} {why}"),
            )
        };
        let data = fs::File::from(fd);
        if !data.metadata().is_ok_and(|m| m.is_file()) {
            return Err(wrong("is not a regular file or memory"));
        }
        let fd = OwnedFd::from(data);
        let identity = FileIdentity::of(&fd).map_err(|e| wrong(&e.to_string()))?;
        let sealed = is_immutable(&fd).unwrap_or(false);
        held.push(HeldFile {
            name: file,
            fd,
            identity,
            sealed,
        });
    }
    held.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(OpenModel {
        files: held,
        inherited: true,
        alone: 0,
        copies: Copies::default(),
        kept: KeptOn::default(),
    })
}

const NS: i128 = 1_000_000_000;

fn split(ns: i128) -> (i64, u32) {
    let seconds = i64::try_from(ns.div_euclid(NS)).unwrap_or(i64::MAX);
    (seconds, u32::try_from(ns.rem_euclid(NS)).unwrap_or(0))
}

fn held(name: &str, fd: impl AsFd, identity: FileIdentity) -> v1::HeldFile {
    let (modified_s, modified_ns) = split(identity.mtime_ns);
    let (changed_s, changed_ns) = split(identity.ctime_ns);
    v1::HeldFile {
        name: name.to_owned(),
        descriptor: takeover::number(fd),
        device: identity.dev,
        inode: identity.ino,
        bytes: identity.len,
        modified_s,
        modified_ns,
        changed_s,
        changed_ns,
        packed: Vec::new(),
    }
}

fn identity(file: &v1::HeldFile) -> FileIdentity {
    let join = |s: i64, ns: u32| i128::from(s) * NS + i128::from(ns);
    FileIdentity {
        dev: file.device,
        ino: file.inode,
        len: file.bytes,
        mtime_ns: join(file.modified_s, file.modified_ns),
        ctime_ns: join(file.changed_s, file.changed_ns),
    }
}

/// Takes a model from the program before this one; `inherited` says whether that one got it as descriptors, and
/// `untrusted` that it did not trust it. It is what it was when that one opened it.
///
/// # Errors
/// [`Reason::NotAModel`] if a file's descriptor did not come.
pub fn inherit(
    files: Vec<v1::HeldFile>,
    inherited: bool,
    untrusted: bool,
    claim: &mut impl FnMut(i32) -> Option<OwnedFd>,
) -> Result<OpenModel, Error> {
    let mut sets = BTreeMap::<Layout, (Vec<_>, u32)>::new();
    let held = files.into_iter().zip(0..).map(|(file, index)| {
        for packed in &file.packed {
            let Ok(layout) = Layout::new(packed.layout.as_str()) else {
                continue;
            };
            let copy = packed.file.as_ref().and_then(|held| {
                let identity = identity(held);
                let copy = Copy::inherit(claim(held.descriptor)?, identity)?;
                // A copy is as long as what it is a copy of.
                (identity.len == file.bytes).then(|| (index, Arc::new(copy)))
            });
            let (set, packings) = sets.entry(layout).or_default();
            *packings = packed.packings;
            set.push(copy);
        }
        let fd = claim(file.descriptor).ok_or_else(|| {
            let what = format!("its file {} was not handed over", file.name);
            Error::new(Reason::NotAModel, what)
        })?;
        Ok(HeldFile {
            identity: identity(&file),
            name: file.name,
            sealed: is_immutable(&fd).unwrap_or(false),
            fd,
        })
    });
    let files = held.collect::<Result<Vec<_>, Error>>()?;
    let copies = Copies::default();
    for (layout, (set, packings)) in sets {
        // All of them, or it is looked for anew.
        if let Some(set) = set.into_iter().collect::<Option<Vec<_>>>() {
            copies.inherit(&layout, Arc::new(set), packings);
        }
    }
    Ok(OpenModel {
        files,
        inherited,
        alone: if untrusted { alone() } else { 0 },
        copies,
        kept: KeptOn::default(),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn write(dir: &Path, name: &str, bytes: &[u8]) {
        fs::write(dir.join(name), bytes).unwrap();
    }

    /// No policy.
    fn any() -> ModelPolicy {
        ModelPolicy::default()
    }

    fn names(model: &OpenModel) -> Vec<String> {
        model.handles().into_iter().map(|h| h.name).collect()
    }

    fn reason(result: Result<OpenModel, Error>) -> Reason {
        result.unwrap_err().reason()
    }

    #[test]
    fn a_folder_gives_its_own_regular_files_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path();
        write(path, "model.safetensors", b"1234");
        write(path, "config.json", b"{}");
        write(path, "run.py", b"import os");
        write(path, ".git", b"");
        fs::create_dir(path.join("sub.json")).unwrap();
        write(&path.join("sub.json"), "deep.json", b"{}");
        let model = open(path, &[], &any()).unwrap();
        assert_eq!(names(&model), ["config.json", "model.safetensors"]);
        assert_eq!(model.bytes(), 6);
        assert_eq!(model.hand_out().unwrap().len(), 2);
    }

    #[test]
    fn what_is_missing_or_no_model_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path();
        assert_eq!(
            reason(open(&path.join("no"), &[], &any())),
            Reason::FileNotFound
        );
        assert_eq!(reason(open(path, &[], &any())), Reason::NotAModel);
        write(path, "model.bin", b"x");
        let file = path.join("model.bin");
        let error = open(&file, &[], &any()).unwrap_err();
        assert_eq!(error.reason(), Reason::NotAModel);
        assert!(error.message().contains("model.bin"));
    }

    #[test]
    fn links_lead_out_only_into_configured_roots() {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write(other.path(), "blob", b"secret");
        write(dir.path(), "config.json", b"{}");
        symlink("config.json", dir.path().join("copy.json")).unwrap();
        symlink(other.path().join("blob"), dir.path().join("m.safetensors")).unwrap();
        let error = open(dir.path(), &[], &any()).unwrap_err();
        assert_eq!(error.reason(), Reason::InvalidArgument);
        assert!(error.message().contains("model_roots"));
        let model = open(dir.path(), &[other.path().to_owned()], &any()).unwrap();
        assert_eq!(names(&model), ["config.json", "copy.json", "m.safetensors"]);
    }

    #[test]
    fn a_path_that_gained_a_link_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "real.json", b"{}");
        symlink("real.json", dir.path().join("link.json")).unwrap();
        let path = dir.path().canonicalize().unwrap().join("link.json");
        assert!(open_resolved(&path).is_err());
    }

    #[test]
    fn a_gguf_file_is_a_model_under_the_name_it_was_asked_by() {
        let (dir, blobs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write(blobs.path(), "0123", b"GGUF");
        let link = dir.path().join("m.gguf");
        symlink(blobs.path().join("0123"), &link).unwrap();
        let model = open(&link, &[], &any()).unwrap();
        assert_eq!(names(&model), ["m.gguf"]);
        assert_eq!(name_of(&link).unwrap().as_str(), "m");
        assert_eq!(
            name_of(Path::new("/a/llama-3.2/")).unwrap().as_str(),
            "llama-3.2"
        );
        assert!(name_of(Path::new("/")).is_err());
    }

    #[test]
    fn a_file_that_changed_is_not_handed_out() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "config.json", b"{}");
        let model = open(dir.path(), &[], &any()).unwrap();
        write(dir.path(), "config.json", b"{\"a\":1}");
        let error = model.hand_out().unwrap_err();
        assert_eq!(error.reason(), Reason::ModelChanged);
        assert_eq!(error.get("file"), Some("config.json"));
    }

    #[test]
    fn inherited_memory_is_a_model_and_a_socket_is_not() {
        let name = ModelName::new("m").unwrap();
        let fd = hotcell_ipc::memory::sealed_memory("x", b"abc").unwrap();
        let model = adopt(&name, vec![("config.json".into(), fd)]).unwrap();
        assert_eq!((model.bytes(), model.check()), (3, Ok(())));
        let (socket, _other) = hotcell_ipc::socket::stream_pair().unwrap();
        assert_eq!(
            reason(adopt(&name, vec![("config.json".into(), socket)])),
            Reason::NotAModel
        );
    }

    #[test]
    fn what_lies_outside_of_the_roots_is_sealed_and_alone() {
        let (root, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let real = root.path().canonicalize().unwrap();
        let text = format!(
            "roots = [\"{}\"]\n[untrusted]\nsealed_bytes = 8",
            real.display()
        );
        let policy = ModelPolicy::parse(&text).unwrap();
        write(root.path(), "m.gguf", b"GGUF");
        let model = open(&root.path().join("m.gguf"), &[], &policy).unwrap();
        assert_eq!((model.alone(), model.files[0].sealed), (None, false));

        write(other.path(), "m.gguf", b"GGUF");
        let path = other.path().join("m.gguf");
        let model = open(&path, &[], &policy).unwrap();
        assert!(model.alone().is_some() && model.files[0].sealed);
        write(other.path(), "m.gguf", b"GGUFGGUF");
        assert_eq!((model.check(), model.bytes()), (Ok(()), 4));
        // Each is another one, and so are their copies.
        let again = open(&path, &[], &policy).unwrap();
        assert_ne!(again.alone(), model.alone());
        let layout = Layout::new("panel16-1").unwrap();
        assert_ne!(again.key(0, &layout), model.key(0, &layout));
        write(other.path(), "m.gguf", b"GGUFGGUF.");
        let model = open(&path, &[], &policy).unwrap();
        assert!(
            model.alone().is_some() && !model.files[0].sealed,
            "too large"
        );
        // By a link under the root it is what it is where it lies.
        symlink(&path, root.path().join("link.gguf")).unwrap();
        let model = open(&root.path().join("link.gguf"), &[], &policy).unwrap();
        assert!(model.alone().is_some());
        // A folder beneath the root, of which one file is not.
        let folder = root.path().join("folder");
        fs::create_dir(&folder).unwrap();
        write(&folder, "config.json", b"{}");
        symlink(&path, folder.join("m.gguf")).unwrap();
        assert_eq!(reason(open(&folder, &[], &policy)), Reason::InvalidArgument);
        let model = open(&folder, &[other.path().to_owned()], &policy).unwrap();
        assert!(model.alone().is_some());
    }
}

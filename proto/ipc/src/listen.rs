//! Listening on a path: exactly one server wins, and what a crashed one left behind does not block the next.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Bytes in a socket's path at most: `sun_path` without its NUL.
pub const MAX_PATH: usize = 107;

/// Why a path cannot be listened on. Nothing was changed on disk, except that a missing parent directory and
/// the lock file may have been made.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another server answers there, or is about to.
    #[error("{}: a server is already running there", path.display())]
    InUse {
        /// The socket's path.
        path: PathBuf,
    },
    /// Something else has that name; it is left alone.
    #[error("{}: exists and is not a socket; remove it or choose another path", path.display())]
    NotASocket {
        /// The socket's path.
        path: PathBuf,
    },
    /// The kernel's addresses have no room for it.
    #[error("{}: a socket's path has between 1 and {MAX_PATH} bytes, not {}, and no NUL", path.display(), path.as_os_str().len())]
    BadPath {
        /// The socket's path.
        path: PathBuf,
    },
    /// Others may enter its folder, or own it.
    #[error("{}: {why}", path.display())]
    OpenFolder {
        /// The folder.
        path: PathBuf,
        /// What is wrong with it, and the way out.
        why: String,
    },
    /// A system call failed.
    #[error("{}: cannot {what}: {source}", path.display())]
    Io {
        /// The path the call was about.
        path: PathBuf,
        /// What was being done.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// Holds the path: when dropped, removes the socket (if it is still the same one) and frees the lock.
///
/// The lock file `PATH.lock` stays: were it removed, a server that had just opened it could lock the removed
/// file while a third one locks a new file of that name, and both would win.
#[derive(Debug)]
pub struct SocketGuard {
    path: PathBuf,
    identity: Option<(u64, u64)>,
    _lock: OwnedFd,
}

impl SocketGuard {
    /// The socket's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The lock.
    pub fn lock(&self) -> BorrowedFd<'_> {
        self._lock.as_fd()
    }

    /// Guards a path again whose socket was inherited, and perhaps its lock.
    ///
    /// # Errors
    /// As [`ListenError`] if the lock is somebody else's; `InvalidInput` if `listener` does not listen there, or `lock` is not the lock of that path.
    pub fn adopt(
        path: PathBuf,
        listener: BorrowedFd<'_>,
        held: Option<OwnedFd>,
    ) -> io::Result<SocketGuard> {
        let refused = |why| io::Error::new(io::ErrorKind::InvalidInput, why);
        crate::socket::expect_type(listener, SocketType::STREAM)?;
        if !rustix::net::sockopt::socket_acceptconn(listener)? {
            return Err(refused("the inherited socket does not listen"));
        }
        let bound: SocketAddrUnix = rustix::net::getsockname(listener)?
            .try_into()
            .map_err(|_| refused("the inherited socket is of another family"))?;
        // Bound by a path that may have been relative to another folder.
        let bound = bound.path().and_then(|bound| {
            Some(
                Path::new(OsStr::from_bytes(bound.to_bytes()))
                    .file_name()?
                    .to_owned(),
            )
        });
        if bound.as_deref() != path.file_name() {
            return Err(refused("the inherited socket listens elsewhere"));
        }
        let identity = identity(&path);
        if identity.is_none() {
            return Err(refused("the inherited socket's path is gone"));
        }
        let lock = match held {
            Some(held) => held,
            None => lock(&path).map_err(io::Error::other)?,
        };
        let (held, named) = (rustix::fs::fstat(&lock)?, fs::metadata(lock_path(&path))?);
        if (held.st_dev, held.st_ino) != (named.dev(), named.ino()) {
            return Err(refused("the inherited lock is that of another path"));
        }
        // Held already, if it was inherited from who listened there.
        rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        Ok(SocketGuard {
            identity,
            path,
            _lock: lock,
        })
    }
}

impl Drop for SocketGuard {
    fn drop(&mut self) {
        // Under the lock, which is a field and freed after this. A socket that somebody put there instead is
        // not ours to remove.
        if self.identity.is_some() && identity(&self.path) == self.identity {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    let data = fs::symlink_metadata(path).ok()?;
    Some((data.dev(), data.ino()))
}

/// Whom a socket is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// This user and root: the folder is theirs alone, and so is the socket.
    Own,
    /// Whoever may enter the folder, which this user or root owns and nobody else can change. Who is at the other end is
    /// to be looked at when it connects.
    Others,
}

/// [`listen_unix`] for `socket`, in a folder that is fit for `folder`.
///
/// # Errors
/// [`ListenError::OpenFolder`] for one that is not; see [`ListenError`] for the others.
pub fn listen_in_own_folder(
    path: impl AsRef<Path>,
    folder: Reach,
    socket: Reach,
) -> Result<(UnixListener, SocketGuard), ListenError> {
    let path = path.as_ref();
    make_folder(path)?;
    check_folder(path, folder)?;
    listen_for(path, socket)
}

/// Whether the folder of a path, links followed, is one in which nobody else can put a socket in the place of ours, or reach it.
///
/// # Errors
/// [`ListenError::OpenFolder`], with the way out.
pub fn check_folder(path: &Path, reach: Reach) -> Result<(), ListenError> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let refused = |why: String| {
        Err(ListenError::OpenFolder {
            path: folder.to_owned(),
            why,
        })
    };
    let data = fs::metadata(folder).map_err(|source| ListenError::Io {
        path: folder.to_owned(),
        what: "look at the socket's directory",
        source,
    })?;
    let own = rustix::process::geteuid().as_raw();
    if data.uid() != own && !(reach == Reach::Others && data.uid() == 0) {
        return refused(format!(
            "the socket's directory belongs to user {}, not to {own}; choose another path",
            data.uid()
        ));
    }
    let shown = folder.display();
    // What belongs to the system, or to everybody, is not to be closed.
    let depth = folder.canonicalize().map_or(0, |f| f.components().count());
    let close = |mode: u32, to: &str| match mode & 0o1000 != 0 || depth <= 2 {
        true => String::new(),
        false => format!("`chmod {to} {shown}`, or "),
    };
    match (reach, data.mode() & 0o7777) {
        (Reach::Own, mode) if mode & 0o077 != 0 => refused(format!(
            "others may enter the socket's directory (mode {mode:04o}); {}choose a path in a directory of its own",
            close(mode, "700")
        )),
        (Reach::Others, mode) if mode & 0o022 != 0 => refused(format!(
            "others may write into the socket's directory (mode {mode:04o}); {}choose a path in a directory of its own",
            close(mode, "711")
        )),
        _ => Ok(()),
    }
}

/// Makes a missing folder, for this user alone.
fn make_folder(path: &Path) -> Result<(), ListenError> {
    let Some(parent) = path.parent().filter(|p| !p.as_os_str().is_empty()) else {
        return Ok(());
    };
    let made = fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(parent);
    made.map_err(|source| ListenError::Io {
        path: path.to_owned(),
        what: "make its directory",
        source,
    })
}

/// Listens on a Unix path that only this user can connect to (mode 0600); makes a missing parent directory
/// (mode 0700); replaces a socket that nobody answers on.
///
/// The listener is close-on-exec and blocking. Keep the guard as long as the server serves.
///
/// # Errors
/// See [`ListenError`].
pub fn listen_unix(path: impl AsRef<Path>) -> Result<(UnixListener, SocketGuard), ListenError> {
    listen_for(path.as_ref(), Reach::Own)
}

fn listen_for(path: &Path, reach: Reach) -> Result<(UnixListener, SocketGuard), ListenError> {
    let io = |what: &'static str| {
        move |source: io::Error| ListenError::Io {
            path: path.to_owned(),
            what,
            source,
        }
    };
    let bytes = path.as_os_str().as_bytes();
    if bytes.is_empty() || bytes.len() > MAX_PATH || bytes.contains(&0) {
        return Err(ListenError::BadPath {
            path: path.to_owned(),
        });
    }
    let address = SocketAddrUnix::new(path).map_err(|error| io("use the path")(error.into()))?;

    make_folder(path)?;
    let lock = lock(path)?;
    remove_stale(path, &address)?;

    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(|error| io("make a socket")(error.into()))?;
    // Linux gives the path the socket's own mode: set before `bind`, there is no moment in which others could
    // connect, and the process's umask need not be touched.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)
        .map_err(|error| io("set the socket's mode")(error.into()))?;
    rustix::net::bind(&socket, &address).map_err(|error| match error {
        Errno::ADDRINUSE => ListenError::InUse {
            path: path.to_owned(),
        },
        error => io("bind")(error.into()),
    })?;
    let guard = SocketGuard {
        path: path.to_owned(),
        identity: identity(path),
        _lock: lock,
    };
    if reach == Reach::Others {
        // By name, since the mode at `bind` was subject to the umask; nobody else can put anything there.
        rustix::fs::chmod(path, Mode::from_raw_mode(0o666))
            .map_err(|error| io("let others connect")(error.into()))?;
    }
    rustix::net::listen(&socket, 1024).map_err(|error| io("listen")(error.into()))?;
    Ok((UnixListener::from(socket), guard))
}

fn lock_path(path: &Path) -> PathBuf {
    let mut name: OsString = path.as_os_str().to_owned();
    name.push(".lock");
    name.into()
}

/// Two servers that start at once would both find a stale socket, and the second would remove the first's new
/// one. The lock makes looking and replacing one act; it goes with the process, however that ends.
fn lock(path: &Path) -> Result<OwnedFd, ListenError> {
    let name = lock_path(path);
    let io = |what: &'static str, source: Errno| ListenError::Io {
        path: name.clone(),
        what,
        source: source.into(),
    };
    let file = rustix::fs::open(
        &name,
        OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK,
        Mode::RUSR | Mode::WUSR,
    )
    .map_err(|error| io("open the lock file", error))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(Errno::WOULDBLOCK) => Err(ListenError::InUse {
            path: path.to_owned(),
        }),
        Err(error) => Err(io("lock", error)),
    }
}

fn remove_stale(path: &Path, address: &SocketAddrUnix) -> Result<(), ListenError> {
    let io = |what: &'static str, source: io::Error| ListenError::Io {
        path: path.to_owned(),
        what,
        source,
    };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(io("look at it", error)),
        Ok(data) if !data.file_type().is_socket() => {
            return Err(ListenError::NotASocket {
                path: path.to_owned(),
            });
        }
        Ok(_) => {}
    }
    // Non-blocking, because connecting to a live server with a full backlog would wait.
    let probe = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
    .map_err(|error| io("make a socket", error.into()))?;
    match rustix::net::connect(&probe, address) {
        Err(Errno::CONNREFUSED) => {
            fs::remove_file(path).map_err(|error| io("remove the stale socket", error))
        }
        Ok(()) | Err(Errno::AGAIN | Errno::INPROGRESS) => Err(ListenError::InUse {
            path: path.to_owned(),
        }),
        Err(error) => Err(io("see whether a server is running there", error.into())),
    }
}

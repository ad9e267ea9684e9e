//! Connected sockets between processes, and who is at the other end.
//!
//! Descriptor passing and listening have files of their own ([`crate::descriptors`], [`crate::listen`]) and are
//! re-exported here.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

pub use crate::descriptors::{
    Batch, BatchError, CollectError, Collector, DescriptorReceiver, DescriptorSender, MAX_BATCH,
    descriptor_pair, is_end,
};
pub use crate::listen::{
    ListenError, Reach, SocketGuard, check_folder, listen_in_own_folder, listen_unix,
};

/// Two connected, close-on-exec, blocking ends of an `AF_UNIX` byte stream.
///
/// # Errors
/// What `socketpair` reports.
pub fn stream_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    pair(SocketType::STREAM)
}

pub(crate) fn pair(kind: SocketType) -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(
        AddressFamily::UNIX,
        kind,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

/// Makes a stream socket non-blocking and registers it with the current tokio runtime.
///
/// # Errors
/// `NotConnected` outside a tokio runtime (tokio itself would panic), `InvalidInput` if `fd` is not a Unix
/// stream socket, otherwise what `fcntl` or epoll report.
pub fn into_tokio(fd: OwnedFd) -> io::Result<tokio::net::UnixStream> {
    in_runtime()?;
    expect_type(&fd, SocketType::STREAM)?;
    let stream = std::os::unix::net::UnixStream::from(fd);
    stream.set_nonblocking(true)?;
    tokio::net::UnixStream::from_std(stream)
}

/// Registers a descriptor with the current tokio runtime, to be told when it can be read.
pub(crate) fn readiness(fd: Arc<OwnedFd>) -> io::Result<AsyncFd<Arc<OwnedFd>>> {
    in_runtime()?;
    // SAFETY: the `AsyncFd` holds a share of the descriptor, which is closed with the last share, and an
    // `OwnedFd` never changes its number.
    Ok(unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?)
}

/// Where tokio would panic.
fn in_runtime() -> io::Result<()> {
    match tokio::runtime::Handle::try_current() {
        Ok(_) => Ok(()),
        Err(error) => Err(io::Error::new(io::ErrorKind::NotConnected, error)),
    }
}

/// Refuses a descriptor that is not a Unix socket of that type: a wrong number in somebody's configuration must
/// fail here and not as a strange error of the first read.
pub(crate) fn expect_type(fd: impl AsFd, kind: SocketType) -> io::Result<()> {
    let wrong = || {
        io::Error::new(
            io::ErrorKind::InvalidInput,
            "the descriptor is not a Unix socket of the expected type",
        )
    };
    match rustix::net::sockopt::socket_domain(&fd) {
        Ok(AddressFamily::UNIX) => {}
        Ok(_) | Err(rustix::io::Errno::NOTSOCK) => return Err(wrong()),
        Err(error) => return Err(error.into()),
    }
    if rustix::net::sockopt::socket_type(&fd)? != kind {
        return Err(wrong());
    }
    Ok(())
}

/// Who made the other end of a Unix socket, as the kernel noted it when the connection was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCredentials {
    /// Process id, 0 if it lives in a process namespace that this one cannot see. It may have been reused:
    /// never decide about access by it.
    pub pid: u32,
    /// Effective user id.
    pub uid: u32,
    /// Effective group id.
    pub gid: u32,
}

/// Reads `SO_PEERCRED`. For a socketpair, the peer is whoever made the pair.
///
/// # Errors
/// What `getsockopt` reports, and `NotConnected` for a socket without a peer.
pub fn peer_credentials(fd: impl AsFd) -> io::Result<PeerCredentials> {
    // Not rustix's: its process id is non-zero by type, the kernel's is not.
    let mut raw = libc::ucred {
        pid: 0,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `raw` and `len` outlive the call, and `len` is the size of `raw`.
    let result = unsafe {
        libc::getsockopt(
            fd.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut raw).cast(),
            &mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // What the kernel gives for a socket without a peer, or of another family: nobody.
    if raw.uid == u32::MAX {
        return Err(io::ErrorKind::NotConnected.into());
    }
    Ok(PeerCredentials {
        pid: u32::try_from(raw.pid).unwrap_or(0),
        uid: raw.uid,
        gid: raw.gid,
    })
}

//! Asking a running program to become another one, over the socket that [`handoff`](crate::handoff) serves:
//!
//! ```text
//! takeover BYTES\n | BYTES bytes, a message | one byte, with two descriptors: executable and working folder
//!                                                             → a message, to the end
//! ```
//!
//! The answer comes from whoever serves then: the connection is handed on with the state.

use std::{
    io::{self, IoSlice, IoSliceMut, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    path::Path,
    time::Duration,
};

use hotcell_proto::limits;
use rustix::{
    fs::{Mode, OFlags},
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags,
    },
};
use tokio::io::{AsyncReadExt, Interest};

use crate::spawn::Child;

/// Bytes of an answer at most.
const MAX_ANSWER: u64 = 64 << 10;
/// How long the asker's message may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// Where a program finds the state that it was left.
pub const STATE_VARIABLE: &str = "HOTCELL_TAKEOVER_FD";

/// This program's open file, whatever has become of its name.
///
/// # Errors
/// What opening it reports.
pub fn own_program() -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    Ok(rustix::fs::open("/proc/self/exe", flags, Mode::empty())?)
}

/// Asks who serves at `path` (see [`handoff::path_beside`](crate::handoff::path_beside)) to become `program`, in the
/// caller's working folder, and returns the answer, empty if it ended without one. Blocks, at most about `patience` at
/// a time.
///
/// # Errors
/// What connecting, sending and receiving report; `WouldBlock` once patience ended.
pub fn ask(
    path: &Path,
    message: &[u8],
    program: impl AsFd,
    patience: Duration,
) -> io::Result<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(".", flags, Mode::empty())?;
    let mut stream = UnixStream::connect(path)?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.set_read_timeout(Some(patience))?;
    stream.write_all(format!("takeover {}\n", message.len()).as_bytes())?;
    stream.write_all(message)?;
    let fds = [program.as_fd(), directory.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    rustix::net::sendmsg(
        &stream,
        &[IoSlice::new(&[0])],
        &mut control,
        SendFlags::NOSIGNAL,
    )?;
    let mut answer = Vec::new();
    stream.take(MAX_ANSWER).read_to_end(&mut answer)?;
    Ok(answer)
}

/// What was asked.
#[derive(Debug)]
pub struct Asked {
    /// The message.
    pub message: Vec<u8>,
    /// The program to become.
    pub program: OwnedFd,
    /// Its working folder.
    pub directory: OwnedFd,
}

/// Reads what follows the line of an asker.
///
/// # Errors
/// What reading reports, `TimedOut` for one that stops, `InvalidData` for what is too long or lacks its descriptors.
pub async fn receive(stream: &mut tokio::net::UnixStream, bytes: usize) -> io::Result<Asked> {
    let broken = |why| io::Error::new(io::ErrorKind::InvalidData, why);
    if bytes > limits::MAX_TAKEOVER_REQUEST {
        return Err(broken("the arguments and the environment are too long"));
    }
    let read = async {
        let mut message = vec![0; bytes];
        stream.read_exact(&mut message).await?;
        let fds = stream
            .async_io(Interest::READABLE, || receive_descriptors(stream.as_fd()))
            .await?;
        match <[OwnedFd; 2]>::try_from(fds) {
            Ok([program, directory]) => Ok(Asked {
                message,
                program,
                directory,
            }),
            Err(_) => Err(broken("no executable and working folder came with it")),
        }
    };
    match tokio::time::timeout(PATIENCE, read).await {
        Ok(done) => done,
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
    }
}

fn receive_descriptors(socket: impl AsFd) -> io::Result<Vec<OwnedFd>> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut buffers = [IoSliceMut::new(&mut byte)];
    let message =
        rustix::net::recvmsg(socket, &mut buffers, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    if message.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let rights = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    Ok(rights.flatten().collect())
}

/// Answers over the connection of an asker. One that has left is no error to anybody else.
///
/// # Errors
/// What sending reports.
pub fn answer(stream: OwnedFd, message: &[u8]) -> io::Result<()> {
    let mut stream = UnixStream::from(stream);
    stream.set_nonblocking(false)?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(message)
}

/// The number at which this program was left a state, if it was.
pub fn state_descriptor() -> Option<RawFd> {
    std::env::var(STATE_VARIABLE).ok()?.parse().ok()
}

/// Reads a state, which has to be memory that nobody can change any more.
///
/// # Errors
/// `InvalidData` for anything else and for one that is too long; what reading reports.
pub fn read_state(state: OwnedFd) -> io::Result<Vec<u8>> {
    let broken = |why| io::Error::new(io::ErrorKind::InvalidData, why);
    if !crate::memory::is_immutable(&state)? {
        return Err(broken("it is not sealed memory"));
    }
    let file = std::fs::File::from(state);
    let len = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX);
    if len > limits::MAX_TAKEOVER_STATE {
        return Err(broken("it is too long"));
    }
    let mut bytes = vec![0; len];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, 0)?;
    Ok(bytes)
}

/// Ends the children that this process had before it became this program, but for those `kept`. To be called before it
/// starts any of its own.
///
/// # Errors
/// What reading `/proc` reports: kernels without `CONFIG_PROC_CHILDREN` do not tell.
pub fn end_strays(kept: &[u32]) -> io::Result<()> {
    let pid = std::process::id();
    let children = std::fs::read_to_string(format!("/proc/self/task/{pid}/children"))?;
    let children = children.split_whitespace().filter_map(|id| id.parse().ok());
    for stray in children.filter(|id| !kept.contains(id)) {
        // Dropping it kills and reaps it.
        drop(Child::adopt(stray, None)?);
    }
    Ok(())
}

/// The number of a descriptor, for a state.
pub fn number(fd: impl AsFd) -> RawFd {
    fd.as_fd().as_raw_fd()
}

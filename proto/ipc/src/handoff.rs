//! Handing a client on the same host what gRPC cannot carry: a connection to a worker, or memory shared with it.
//!
//! A client connects to the socket beside the scheduler's own (`PATH.fd`), sends one line, and gets one answer:
//!
//! ```text
//! connection SESSION\n                  → 0 | tag: u64 | a stream socket
//! memory BYTES SESSION\n                → 0 | tag: u64 | a memfd of that length, sealed against resizing
//! lane BYTES SESSION SESSION\n          → 0 | tag: u64 | such a memfd | the second session's tag: u64
//!                                         1 | tag: 0   | what went wrong, UTF-8, to the end
//! ```
//!
//! The operator's `takeover BYTES\n` has a conversation of its own ([`takeover`](crate::takeover)).

use std::{
    ffi::OsString,
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, Interest},
    net::UnixStream,
    time::timeout,
};

/// Bytes of a line at most.
const MAX_LINE: usize = 256;
/// Bytes of an error's words at most.
const MAX_WORDS: usize = 1024;
/// Status and tag.
const HEADER: usize = 9;
/// How long either side waits for the other.
const PATIENCE: Duration = Duration::from_secs(10);

/// Where the descriptors of the scheduler at `socket` are handed out.
pub fn path_beside(socket: &Path) -> PathBuf {
    let mut path = OsString::from(socket);
    path.push(".fd");
    path.into()
}

/// What a client asks for, in the name of its session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// A connection to the session's worker.
    Connection {
        /// The session.
        session: String,
    },
    /// Memory shared with the session's worker.
    Memory {
        /// The session.
        session: String,
        /// Its length.
        bytes: u64,
    },
    /// Memory shared with the workers of two sessions.
    Lane {
        /// The sessions.
        sessions: [String; 2],
        /// Its length.
        bytes: u64,
    },
    /// That the scheduler becomes another program.
    Takeover {
        /// Bytes of the message that follows.
        bytes: usize,
    },
}

/// What was handed over.
#[derive(Debug)]
pub struct Given {
    /// Names it to the worker (memory); 0 for a connection.
    pub tag: u64,
    /// Names it to the second session's worker (a lane); else 0.
    pub also: u64,
    /// The connection or memory.
    pub fd: OwnedFd,
}

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

async fn patient<T>(work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    match timeout(PATIENCE, work).await {
        Ok(done) => done,
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
    }
}

/// Asks at `path`. The inner error is the other side's words.
///
/// # Errors
/// What connecting, sending or receiving report; `InvalidData` for an answer that breaks the protocol.
pub async fn ask(path: &Path, ask: &Ask) -> io::Result<Result<Given, String>> {
    let line = match ask {
        Ask::Connection { session } => format!("connection {session}\n"),
        Ask::Memory { session, bytes } => format!("memory {bytes} {session}\n"),
        Ask::Lane {
            sessions: [one, other],
            bytes,
        } => format!("lane {bytes} {one} {other}\n"),
        Ask::Takeover { .. } => return Err(io::ErrorKind::InvalidInput.into()),
    };
    let is_lane = matches!(ask, Ask::Lane { .. });
    patient(async {
        let mut stream = UnixStream::connect(path).await?;
        stream.write_all(line.as_bytes()).await?;
        let mut header = [0u8; HEADER];
        let (read, fd) = stream
            .async_io(Interest::READABLE, || receive(stream.as_fd(), &mut header))
            .await?;
        // A descriptor travels with the first byte; the rest may come later.
        stream
            .read_exact(header.get_mut(read..).unwrap_or_default())
            .await?;
        let [status, tag @ ..] = header;
        match (status, fd) {
            (0, Some(fd)) => {
                let mut also = [0; 8];
                if is_lane {
                    stream.read_exact(&mut also).await?;
                }
                Ok(Ok(Given {
                    tag: u64::from_le_bytes(tag),
                    also: u64::from_le_bytes(also),
                    fd,
                }))
            }
            (1, _) => {
                let mut words = Vec::new();
                stream
                    .take(MAX_WORDS as u64)
                    .read_to_end(&mut words)
                    .await?;
                Ok(Err(String::from_utf8_lossy(&words).into_owned()))
            }
            _ => Err(broken("an answer without its descriptor")),
        }
    })
    .await
}

fn receive(socket: BorrowedFd<'_>, header: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(header)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let mut fds = control.drain().filter_map(|m| match m {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let fd = fds.next().and_then(|mut fds| fds.next());
    match message.bytes {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        n => Ok((n, fd)),
    }
}

/// Reads what a client asks for.
///
/// # Errors
/// What reading reports, `TimedOut` for one that says nothing, `InvalidData` for a line that asks for nothing known.
pub async fn read_ask(stream: &mut UnixStream) -> io::Result<Ask> {
    patient(async {
        let mut line = Vec::with_capacity(MAX_LINE);
        loop {
            let byte = stream.read_u8().await?;
            if byte == b'\n' {
                break;
            }
            if line.len() == MAX_LINE {
                return Err(broken("the line is too long"));
            }
            line.push(byte);
        }
        let line = String::from_utf8(line).map_err(|_| broken("the line is no text"))?;
        let mut words = line.split(' ');
        let ask = match (words.next(), words.next(), words.next()) {
            (Some("connection"), Some(session), None) => Ask::Connection {
                session: session.to_owned(),
            },
            (Some("memory"), Some(bytes), Some(session)) => Ask::Memory {
                session: session.to_owned(),
                bytes: bytes.parse().map_err(|_| broken("bytes is no number"))?,
            },
            (Some("lane"), Some(bytes), Some(one)) => {
                let other = words.next().ok_or_else(|| broken("a lane has two ends"))?;
                Ask::Lane {
                    sessions: [one.to_owned(), other.to_owned()],
                    bytes: bytes.parse().map_err(|_| broken("bytes is no number"))?,
                }
            }
            (Some("takeover"), Some(bytes), None) => Ask::Takeover {
                bytes: bytes.parse().map_err(|_| broken("bytes is no number"))?,
            },
            _ => return Err(broken("neither `connection` nor `memory` nor `lane`")),
        };
        match words.next() {
            Some(_) => Err(broken("too many words")),
            None => Ok(ask),
        }
    })
    .await
}

/// Answers with a descriptor and its tags (the second one of a lane alone), or with what went wrong.
///
/// # Errors
/// What sending reports.
pub async fn answer(
    stream: &mut UnixStream,
    given: Result<(u64, Option<u64>, BorrowedFd<'_>), &str>,
) -> io::Result<()> {
    patient(async {
        match given {
            Ok((tag, also, fd)) => {
                let mut header = [0u8; HEADER];
                let [_, rest @ ..] = &mut header;
                rest.copy_from_slice(&tag.to_le_bytes());
                let send = || {
                    let fds = [fd];
                    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                    let mut control = SendAncillaryBuffer::new(&mut space);
                    control.push(SendAncillaryMessage::ScmRights(&fds));
                    let sent = rustix::net::sendmsg(
                        stream.as_fd(),
                        &[IoSlice::new(&header)],
                        &mut control,
                        SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
                    )?;
                    Ok(sent)
                };
                let sent = stream.async_io(Interest::WRITABLE, send).await?;
                stream
                    .write_all(header.get(sent..).unwrap_or_default())
                    .await?;
                match also {
                    Some(also) => stream.write_all(&also.to_le_bytes()).await,
                    None => Ok(()),
                }
            }
            Err(what) => {
                let mut message = vec![1u8];
                message.extend_from_slice(&[0; HEADER - 1]);
                message.extend(what.bytes().take(MAX_WORDS));
                stream.write_all(&message).await
            }
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn exchange(sent: &str) -> io::Result<Ask> {
        let (mut a, mut b) = UnixStream::pair().unwrap();
        a.write_all(sent.as_bytes()).await.unwrap();
        drop(a);
        read_ask(&mut b).await
    }

    #[tokio::test]
    async fn lines_are_read_and_others_refused() {
        let session = "w0.1.ff".to_owned();
        let memory = Ask::Memory {
            session,
            bytes: 4096,
        };
        assert_eq!(exchange("memory 4096 w0.1.ff\n").await.unwrap(), memory);
        let sessions = ["w0.1.ff".to_owned(), "w1.2.0".to_owned()];
        let lane = Ask::Lane { sessions, bytes: 1 };
        assert_eq!(exchange("lane 1 w0.1.ff w1.2.0\n").await.unwrap(), lane);
        for bad in [
            "",
            "x\n",
            "memory\n",
            "memory -1 s\n",
            "memory 1 s t\n",
            "lane 1 s\n",
            "lane x s t\n",
            "lane 1 s t u\n",
            "connection\n",
            "connection a b\n",
        ] {
            assert!(exchange(bad).await.is_err(), "{bad:?}");
        }
        assert!(exchange(&"y".repeat(MAX_LINE + 1)).await.is_err());
    }

    #[tokio::test]
    async fn descriptors_and_words_arrive() {
        let dir = tempfile::tempdir().unwrap();
        let path = path_beside(&dir.path().join("s"));
        assert!(path.ends_with("s.fd"));
        let listener = tokio::net::UnixListener::bind(&path).unwrap();
        let server = tokio::spawn(async move {
            let memory = crate::memory::shared_memory("test", 4096).unwrap();
            for _ in 0..3 {
                let (mut stream, _) = listener.accept().await.unwrap();
                match read_ask(&mut stream).await.unwrap() {
                    Ask::Memory { bytes: 4096, .. } => {
                        let given = Ok((7, None, memory.as_fd()));
                        answer(&mut stream, given).await.unwrap();
                    }
                    Ask::Lane { bytes: 4096, .. } => {
                        let given = Ok((8, Some(9), memory.as_fd()));
                        answer(&mut stream, given).await.unwrap();
                    }
                    _ => answer(&mut stream, Err("no such session")).await.unwrap(),
                }
            }
        });
        let session = "s".to_owned();
        let want = Ask::Memory {
            session: session.clone(),
            bytes: 4096,
        };
        let given = ask(&path, &want).await.unwrap().unwrap();
        assert_eq!((given.tag, given.also), (7, 0));
        assert!(crate::memory::is_fixed_size(&given.fd).unwrap());
        let want = Ask::Lane {
            sessions: [session.clone(), "t".to_owned()],
            bytes: 4096,
        };
        let given = ask(&path, &want).await.unwrap().unwrap();
        assert_eq!((given.tag, given.also), (8, 9));
        assert!(crate::memory::is_fixed_size(&given.fd).unwrap());
        let refused = ask(&path, &Ask::Connection { session }).await.unwrap();
        assert_eq!(refused.unwrap_err(), "no such session");
        server.await.unwrap();
    }
}

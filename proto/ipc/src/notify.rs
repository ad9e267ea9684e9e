//! Telling the service manager how this process is: `sd_notify(3)`, over its datagram socket.
//!
//! A dozen lines of protocol, so no dependency: `KEY=VALUE` lines in one datagram to the address in `NOTIFY_SOCKET`.

use std::{
    ffi::OsStr,
    io::{self, IoSlice},
    mem::MaybeUninit,
    os::{
        fd::BorrowedFd,
        linux::net::SocketAddrExt,
        unix::{
            ffi::OsStrExt,
            net::{SocketAddr, UnixDatagram},
        },
    },
    time::Duration,
};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix};

/// Descriptors in one message.
const STORED_AT_ONCE: usize = 64;

/// Most bytes of a status line; a longer one is cut.
const MAX_STATUS: usize = 256;

/// The service manager, if one started this process and wants to hear from it.
#[derive(Debug)]
pub struct Manager {
    socket: UnixDatagram,
    address: SocketAddr,
    watchdog: Option<Duration>,
}

/// What a service manager put into the environment.
#[derive(Clone, Copy, Debug, Default)]
pub struct Environment<'a> {
    /// `NOTIFY_SOCKET`: a path, or `@` and an abstract name.
    pub socket: Option<&'a OsStr>,
    /// `WATCHDOG_USEC`.
    pub watchdog_usec: Option<&'a str>,
    /// `WATCHDOG_PID`: whom the watchdog is about.
    pub watchdog_pid: Option<&'a str>,
}

impl Manager {
    /// Finds it by this process's environment; none if nobody wants to hear.
    ///
    /// # Errors
    /// When there is one that cannot be reached, because its address is no good.
    pub fn find() -> io::Result<Option<Self>> {
        let socket = std::env::var_os("NOTIFY_SOCKET");
        let usec = std::env::var("WATCHDOG_USEC").ok();
        let pid = std::env::var("WATCHDOG_PID").ok();
        Self::of(Environment {
            socket: socket.as_deref(),
            watchdog_usec: usec.as_deref(),
            watchdog_pid: pid.as_deref(),
        })
    }

    /// Finds it by an environment.
    ///
    /// # Errors
    /// As [`Manager::find`].
    pub fn of(environment: Environment<'_>) -> io::Result<Option<Self>> {
        let Some(name) = environment.socket.filter(|name| !name.is_empty()) else {
            return Ok(None);
        };
        let address = match name.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
            [b'/', ..] => SocketAddr::from_pathname(name)?,
            _ => {
                let what =
                    format!("NOTIFY_SOCKET is {name:?}, neither a path nor an abstract name");
                return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
            }
        };
        let about_us = environment.watchdog_pid.is_none_or(|pid| {
            pid.parse::<u32>()
                .is_ok_and(|pid| pid == std::process::id())
        });
        let usec = environment.watchdog_usec.filter(|_| about_us);
        let watchdog = usec
            .and_then(|usec| usec.parse().ok())
            .filter(|&usec| usec > 0)
            .map(Duration::from_micros);
        let socket = UnixDatagram::unbound()?;
        // A manager that does not read must not stop this process.
        socket.set_nonblocking(true)?;
        Ok(Some(Self {
            socket,
            address,
            watchdog,
        }))
    }

    /// Within which time it wants to hear [`Manager::alive`] again and again, if it does.
    pub fn watchdog(&self) -> Option<Duration> {
        self.watchdog
    }

    /// This process serves now.
    ///
    /// # Errors
    /// What the socket reports, here and below.
    pub fn ready(&self, status: &str) -> io::Result<()> {
        self.send(&format!("READY=1\nSTATUS={}\n", line(status)))
    }

    /// This process is about to end.
    ///
    /// # Errors
    /// As above.
    pub fn stopping(&self, status: &str) -> io::Result<()> {
        self.send(&format!("STOPPING=1\nSTATUS={}\n", line(status)))
    }

    /// What it does, for people.
    ///
    /// # Errors
    /// As above.
    pub fn status(&self, status: &str) -> io::Result<()> {
        self.send(&format!("STATUS={}\n", line(status)))
    }

    /// It is well.
    ///
    /// # Errors
    /// As above.
    pub fn alive(&self) -> io::Result<()> {
        self.send("WATCHDOG=1\n")
    }

    /// Has it keep copies of these descriptors under a name, for the process that it starts after this one. Whoever
    /// wants fewer there has to [`forget`](Manager::forget) the name.
    ///
    /// # Errors
    /// As above.
    pub fn store(&self, name: &str, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let address = match (self.address.as_pathname(), self.address.as_abstract_name()) {
            (Some(path), _) => SocketAddrUnix::new(path)?,
            (None, Some(name)) => SocketAddrUnix::new_abstract_name(name)?,
            (None, None) => return Err(io::ErrorKind::InvalidInput.into()),
        };
        let message = format!("FDSTORE=1\nFDNAME={}\n", line(name));
        for fds in fds.chunks(STORED_AT_ONCE) {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(STORED_AT_ONCE))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            control.push(SendAncillaryMessage::ScmRights(fds));
            let text = [IoSlice::new(message.as_bytes())];
            let flags = SendFlags::NOSIGNAL;
            rustix::net::sendmsg_addr(&self.socket, &address, &text, &mut control, flags)?;
        }
        Ok(())
    }

    /// Has it close what it keeps under a name.
    ///
    /// # Errors
    /// As above.
    pub fn forget(&self, name: &str) -> io::Result<()> {
        self.send(&format!("FDSTOREREMOVE=1\nFDNAME={}\n", line(name)))
    }

    fn send(&self, message: &str) -> io::Result<()> {
        let sent = self
            .socket
            .send_to_addr(message.as_bytes(), &self.address)?;
        match sent == message.len() {
            true => Ok(()),
            false => Err(io::ErrorKind::WriteZero.into()),
        }
    }
}

/// One line of bounded length, whatever is in it: a line break would begin another assignment.
fn line(text: &str) -> String {
    let mut line = String::new();
    for c in text.chars().map(|c| if c.is_control() { ' ' } else { c }) {
        if line.len() + c.len_utf8() > MAX_STATUS {
            break;
        }
        line.push(c);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(socket: &UnixDatagram) -> String {
        let mut buffer = [0; 1024];
        let bytes = socket.recv(&mut buffer).expect("a datagram");
        String::from_utf8_lossy(&buffer[..bytes]).into_owned()
    }

    #[test]
    fn a_manager_hears_what_it_is_told_by_path_and_by_abstract_name() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("notify");
        let by_path = UnixDatagram::bind(&path)?;
        let name = format!("hotcell-notify-{}", std::process::id());
        let abstractly = SocketAddr::from_abstract_name(&name)?;
        let by_name = UnixDatagram::bind_addr(&abstractly)?;
        let name = format!("@{name}");
        for (socket, at) in [(by_path, path.as_os_str()), (by_name, OsStr::new(&name))] {
            let manager = Manager::of(Environment {
                socket: Some(at),
                ..Environment::default()
            })?;
            let manager = manager.expect("a manager");
            manager.ready("2 workers\nREADY=0")?;
            assert_eq!(heard(&socket), "READY=1\nSTATUS=2 workers READY=0\n");
            manager.status(&"x".repeat(999))?;
            assert_eq!(heard(&socket).len(), "STATUS=\n".len() + MAX_STATUS);
            manager.alive()?;
            assert_eq!(heard(&socket), "WATCHDOG=1\n");
            manager.stopping("draining")?;
            assert_eq!(heard(&socket), "STOPPING=1\nSTATUS=draining\n");
        }
        Ok(())
    }

    #[test]
    fn a_manager_that_does_not_read_stops_nobody() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("notify");
        let _deaf = UnixDatagram::bind(&path)?;
        let manager = Manager::of(Environment {
            socket: Some(path.as_os_str()),
            ..Environment::default()
        })?;
        let manager = manager.expect("a manager");
        let full = (0..100_000).map(|_| manager.alive()).find(Result::is_err);
        let error = full.and_then(Result::err).expect("an error");
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        Ok(())
    }

    #[test]
    fn the_watchdog_is_for_whom_it_names() -> io::Result<()> {
        let own = std::process::id().to_string();
        let watchdog = |usec, pid| -> io::Result<Option<Duration>> {
            let manager = Manager::of(Environment {
                socket: Some(OsStr::new("/run/x")),
                watchdog_usec: Some(usec),
                watchdog_pid: pid,
            })?;
            Ok(manager.and_then(|manager| manager.watchdog()))
        };
        let second = Some(Duration::from_secs(1));
        assert_eq!(watchdog("1000000", Some(&own))?, second);
        assert_eq!(watchdog("1000000", None)?, second);
        for (usec, pid) in [("1000000", Some("1")), ("0", None), ("soon", None)] {
            assert_eq!(watchdog(usec, pid)?, None, "{usec} {pid:?}");
        }
        assert!(Manager::of(Environment::default())?.is_none());
        let relative = Environment {
            socket: Some(OsStr::new("notify")),
            ..Environment::default()
        };
        assert!(Manager::of(relative).is_err());
        Ok(())
    }
}

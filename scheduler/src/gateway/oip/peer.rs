//! Which user of this host is at the other end of a connection, by the kernel's word.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use hotcell_proto::error::{Error, Reason};
use http::Extensions;
use tonic::transport::server::{TcpConnectInfo, UdsConnectInfo};

/// The kernel's lists of connections over TCP, with the user that each end belongs to.
const LISTS: [&str; 2] = ["/proc/net/tcp", "/proc/net/tcp6"];

/// Whom the kernel names where it means somebody that this process cannot know.
const NOBODY: u32 = 65534;

/// The user at the other end of the connection that a call came by.
///
/// # Errors
/// [`Reason::PermissionDenied`] for one on another host, or that cannot be told.
pub(super) async fn user(extensions: &Extensions) -> Result<u32, Error> {
    let unknown = |what: &str| Err(Error::new(Reason::PermissionDenied, what));
    if let Some(local) = extensions.get::<UdsConnectInfo>() {
        return match local.peer_cred {
            Some(peer) => Ok(peer.uid()),
            None => unknown("the kernel does not tell who is at the other end"),
        };
    }
    let Some(tcp) = extensions.get::<TcpConnectInfo>() else {
        // The connection that whoever started this process gave it.
        return Ok(rustix::process::geteuid().as_raw());
    };
    let (Some(theirs), Some(ours)) = (tcp.remote_addr(), tcp.local_addr()) else {
        return unknown("the connection does not tell who is at the other end");
    };
    if !theirs.ip().to_canonical().is_loopback() {
        return unknown("memory is shared on one host; send the tensors instead");
    }
    let found = tokio::task::spawn_blocking(move || {
        LISTS.iter().find_map(|list| {
            let list = fs::read_to_string(list).ok()?;
            list.lines().find_map(|line| owner(line, theirs, ours))
        })
    });
    match found.await {
        Ok(Some(user)) if user != NOBODY => Ok(user),
        _ => unknown("the kernel does not tell who is at the other end; use the Unix socket"),
    }
}

/// The user of the line's socket, if it is the end at `here` of a connection to `there`.
fn owner(line: &str, here: SocketAddr, there: SocketAddr) -> Option<u32> {
    let mut words = line.split_ascii_whitespace().skip(1);
    let same = |word: &str, address: SocketAddr| {
        address_of(word).is_some_and(|(ip, port)| {
            ip.to_canonical() == address.ip().to_canonical() && port == address.port()
        })
    };
    let is_it = same(words.next()?, here) && same(words.next()?, there);
    // State, queues, timer, retransmissions; then the user.
    words.nth(4)?.parse().ok().filter(|_| is_it)
}

/// An address as the kernel's lists have it: words of four bytes in this machine's order, and a port.
fn address_of(word: &str) -> Option<(IpAddr, u16)> {
    let (ip, port) = word.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let part = |at: usize| {
        let part = u32::from_str_radix(ip.get(at * 8..at * 8 + 8)?, 16).ok()?;
        Some(part.to_ne_bytes())
    };
    let ip = match ip.len() {
        8 => IpAddr::V4(Ipv4Addr::from(part(0)?)),
        32 => {
            let mut bytes = [0; 16];
            for (at, four) in bytes.chunks_exact_mut(4).enumerate() {
                four.copy_from_slice(&part(at)?);
            }
            IpAddr::V6(Ipv6Addr::from(bytes))
        }
        _ => return None,
    };
    Some((ip, port))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn the_kernels_list_names_the_user_of_each_end() {
        let own = rustix::process::geteuid().as_raw();
        for host in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(host) else {
                continue;
            };
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (here, there) = (stream.local_addr().unwrap(), stream.peer_addr().unwrap());
            let find = |here, there| {
                LISTS.iter().find_map(|list| {
                    let list = fs::read_to_string(list).ok()?;
                    list.lines().find_map(|line| owner(line, here, there))
                })
            };
            assert_eq!(find(here, there), Some(own), "{host}");
            let mut other = here;
            other.set_port(1);
            assert_eq!(find(other, there), None, "{host}");
        }
    }

    #[test]
    fn a_line_that_is_no_connection_names_nobody() {
        let at: SocketAddr = "127.0.0.1:80".parse().unwrap();
        for line in [
            "",
            "  sl  local_address rem_address",
            "0: 0100007F:0050",
            "0: zz:0050 0100007F:0050 01 0 0 0 5",
        ] {
            assert_eq!(owner(line, at, at), None, "{line:?}");
        }
    }
}

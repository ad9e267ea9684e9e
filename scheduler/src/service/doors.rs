//! Where clients come in: a Unix socket, TCP, or one inherited connection.

use std::{
    net::{SocketAddr, TcpListener},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{ffi::OsStringExt, net::UnixListener},
    },
    path::Path,
    sync::Arc,
    time::Duration,
};

use hotcell_ipc::{
    handoff,
    socket::{ListenError, Reach, SocketGuard, check_folder, listen_in_own_folder},
    transport::{Windows, incoming_once},
};
use hotcell_proto::{limits, v1::DoorKind};
use tokio::task::JoinSet;
use tokio_util::{either::Either, sync::CancellationToken};
use tonic::{service::Routes, transport::Server};

use super::{
    Shared,
    accept::{Listen, TlsListener, accept},
    handout, http,
};
use crate::{
    access::{Entrance, Guard, Network, Room, TlsDoor},
    config::Config,
    exit::{Exit, Failure},
    gateway::{self, Protocol},
    takeover::{Door, Left, OwnDoor},
};

/// Open doors, not served yet. They are opened first of all, so that a port in use is told before anything was
/// started.
#[derive(Debug, Default)]
pub struct Doors {
    unix: Option<UnixListener>,
    /// Where descriptors are handed out.
    handout: Option<UnixListener>,
    guards: Vec<SocketGuard>,
    tcp: Option<TcpListener>,
    http: Option<TcpListener>,
    private: Option<OwnedFd>,
}

fn cannot_listen(message: String) -> Failure {
    Failure::new(Exit::CannotListen, message)
}

impl Doors {
    /// Opens what the config asks for; `private` is the inherited connection.
    ///
    /// # Errors
    /// [`Exit::CannotListen`], naming the path or address and the way out.
    pub fn open(config: &Config, private: Option<OwnedFd>) -> Result<Doors, Failure> {
        Self::open_or_keep(config, private, &mut None)
    }

    /// [`open`](Self::open), except for those that the program before this one left open.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_or_keep(
        config: &Config,
        private: Option<OwnedFd>,
        left: &mut Option<Left>,
    ) -> Result<Doors, Failure> {
        if private.is_some() {
            return Ok(Doors {
                private,
                ..Doors::default()
            });
        }
        let mut keep = |kind: DoorKind, address: &[u8]| left.as_mut()?.door(kind, address);
        let reach = match config.access.users.is_empty() {
            true => Reach::Own,
            false => Reach::Others,
        };
        let mut listen = |kind: DoorKind, path: &Path, socket: Reach| {
            if let Some(door) = keep(kind, &absolute(path)) {
                match kept(path, door) {
                    Ok(kept) => {
                        // Whose streams go on is not shut out over it.
                        if let Err(error) = check_folder(path, reach) {
                            tracing::warn!(%error, "the socket is not as it should be");
                        }
                        return Ok(kept);
                    }
                    Err(error) => {
                        tracing::warn!(path = %path.display(), %error, "a listening socket cannot be kept");
                    }
                }
            }
            listen_in_own_folder(path, reach, socket).map_err(|e| {
                cannot_listen(match e {
                    ListenError::InUse { .. } => format!(
                        "{e}; use that one (`hotcell ps`), stop it, or give this one another --socket PATH"
                    ),
                    ListenError::OpenFolder { .. } => {
                        format!("{e}; name it with --socket PATH")
                    }
                    other => other.to_string(),
                })
            })
        };
        let mut guards = Vec::new();
        let mut unix = None;
        let mut handout = None;
        if let Some(path) = &config.socket {
            let (listener, guard) = listen(DoorKind::Unix, path, reach)?;
            unix = Some(listener);
            guards.push(guard);
            // Who has a connection to a worker itself is past all that is counted here.
            let beside = handoff::path_beside(path);
            let (listener, guard) = listen(DoorKind::Handout, &beside, Reach::Own)?;
            handout = Some(listener);
            guards.push(guard);
        }
        let mut tcp = |kind: DoorKind, flag: &str, address: Option<SocketAddr>| {
            let listener =
                address.map(|address| match keep(kind, address.to_string().as_bytes()) {
                    Some(door) => Ok(TcpListener::from(door.listener)),
                    None => tcp_listener(flag, address),
                });
            listener.transpose()
        };
        let http = tcp(DoorKind::Http, "--http", config.http)?;
        let tcp = tcp(DoorKind::Tcp, "--listen", config.listen)?;
        Ok(Doors {
            unix,
            handout,
            guards,
            tcp,
            http,
            private: None,
        })
    }

    /// The same doors once more, to be handed on. To be asked before the guards are taken.
    ///
    /// # Errors
    /// For want of descriptors.
    pub fn share(&self, config: &Config) -> std::io::Result<Vec<OwnDoor>> {
        let mut shared = Vec::new();
        let unix = [
            (DoorKind::Unix, &self.unix),
            (DoorKind::Handout, &self.handout),
        ];
        for ((kind, listener), guard) in unix.into_iter().zip(&self.guards) {
            if let Some(listener) = listener {
                shared.push(OwnDoor {
                    kind,
                    address: absolute(guard.path()),
                    listener: listener.as_fd().try_clone_to_owned()?,
                    lock: Some(guard.lock().try_clone_to_owned()?),
                });
            }
        }
        let tcp = [
            (DoorKind::Tcp, &self.tcp, config.listen),
            (DoorKind::Http, &self.http, config.http),
        ];
        for (kind, listener, address) in tcp {
            if let (Some(listener), Some(address)) = (listener, address) {
                shared.push(OwnDoor {
                    kind,
                    address: address.to_string().into_bytes(),
                    listener: listener.as_fd().try_clone_to_owned()?,
                    lock: None,
                });
            }
        }
        Ok(shared)
    }

    /// What removes the sockets when it is dropped. The caller keeps it: a task that serves may still be there
    /// when the process ends.
    pub fn guards(&mut self) -> Vec<SocketGuard> {
        std::mem::take(&mut self.guards)
    }

    /// The doors in words, for the log.
    pub fn describe(&self) -> String {
        let unix = self
            .guards
            .iter()
            .take(1)
            .map(|g| g.path().display().to_string());
        let tcp = self.tcp.iter().filter_map(|t| t.local_addr().ok());
        let http = self.http.iter().filter_map(|t| t.local_addr().ok());
        let private = self
            .private
            .iter()
            .map(|_| "one private connection".to_owned());
        let all: Vec<_> = unix
            .chain(tcp.map(|t| t.to_string()))
            .chain(http.map(|t| format!("http://{t}")))
            .chain(private)
            .collect();
        all.join(" and ")
    }
}

/// A path that means the same in every working folder.
fn absolute(path: &Path) -> Vec<u8> {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    path.into_os_string().into_vec()
}

/// Goes on listening where the program before this one did.
fn kept(path: &Path, door: Door) -> std::io::Result<(UnixListener, SocketGuard)> {
    let guard = SocketGuard::adopt(path.to_owned(), door.listener.as_fd(), door.lock)?;
    Ok((UnixListener::from(door.listener), guard))
}

fn tcp_listener(flag: &str, address: SocketAddr) -> Result<TcpListener, Failure> {
    let listener = TcpListener::bind(address).map_err(|e| {
        cannot_listen(match e.kind() {
            std::io::ErrorKind::AddrInUse => format!(
                "cannot listen on {address}: the port is in use; choose another with {flag}"
            ),
            _ => format!("cannot listen on {address}: {e}"),
        })
    })?;
    Ok(listener)
}

/// Why serving ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The private connection is over.
    ConnectionOver,
    /// A door failed, which was logged.
    DoorFailed,
    /// It was told to.
    Asked,
}

fn server(entrance: Entrance) -> Server {
    let server = Windows::default().server();
    let (server, calls) = match entrance {
        Entrance::Tcp => (
            server
                .http2_max_pending_accept_reset_streams(Some(limits::MAX_REMOTE_RESETS))
                .http2_max_local_error_reset_streams(Some(limits::MAX_REMOTE_MISTAKES)),
            limits::MAX_REMOTE_CALLS,
        ),
        Entrance::Unix | Entrance::Private => (server, limits::MAX_CALLS),
    };
    server
        .max_concurrent_streams(calls)
        // A client that vanished without a word holds its streams no longer than this.
        .http2_keepalive_interval(Some(Duration::from_secs(30)))
        .http2_keepalive_timeout(Some(Duration::from_secs(20)))
}

/// What a door has room for.
fn room(calls_from_one: usize) -> Room {
    Room {
        connections: limits::MAX_CONNECTIONS,
        calls: limits::MAX_SCHEDULER_REQUESTS,
        calls_from_one,
    }
}

/// Serves those who come in at one door, until `stop`.
async fn serve_door<L: Listen>(
    listener: L,
    guard: Guard,
    routes: Routes,
    (room, proxies): (Room, Arc<[Network]>),
    stop: CancellationToken,
) -> (Result<(), tonic::transport::Error>, Ended) {
    let incoming = accept(listener, room, proxies);
    let router = server(guard.entrance()).layer(guard).add_routes(routes);
    let served = router.serve_with_incoming_shutdown(incoming, stop.cancelled_owned());
    (served.await, Ended::DoorFailed)
}

/// Serves until `stop`, or until the private connection ends. Returns once all calls have ended.
///
/// # Errors
/// [`Exit::Internal`] if a door cannot be registered with the runtime.
pub async fn serve(
    doors: Doors,
    (routes, protocols): (Routes, &[Protocol]),
    shared: Shared,
    stop: CancellationToken,
) -> Result<Ended, Failure> {
    let internal = |e: std::io::Error| Failure::new(Exit::Internal, format!("cannot serve: {e}"));
    let mut serving = JoinSet::new();
    let guard = |entrance| {
        let access = Arc::clone(&shared.access);
        let audit = shared.fleet.audit().clone();
        Guard::new(access, entrance, (shared.traces.clone(), audit))
    };
    if let Some(listener) = doors.unix {
        listener.set_nonblocking(true).map_err(internal)?;
        let listener = tokio::net::UnixListener::from_std(listener).map_err(internal)?;
        let door = serve_door(
            listener,
            guard(Entrance::Unix),
            routes.clone(),
            (room(limits::MAX_SCHEDULER_REQUESTS), Arc::default()),
            stop.clone(),
        );
        serving.spawn(door);
    }
    if let Some(listener) = doors.tcp {
        listener.set_nonblocking(true).map_err(internal)?;
        let listener = tokio::net::TcpListener::from_std(listener).map_err(internal)?;
        let (guard, routes, stop) = (guard(Entrance::Tcp), routes.clone(), stop.clone());
        let room = (
            room(limits::MAX_CALLS_FROM_ADDRESS),
            shared.access.proxies(),
        );
        match shared.access.tls(TlsDoor::Grpc) {
            None => serving.spawn(serve_door(listener, guard, routes, room, stop)),
            Some(tls) => {
                let listener = TlsListener {
                    socket: listener,
                    tls,
                    http: false,
                };
                serving.spawn(serve_door(listener, guard, routes, room, stop))
            }
        };
    }
    if let Some(listener) = doors.http {
        listener.set_nonblocking(true).map_err(internal)?;
        let listener = tokio::net::TcpListener::from_std(listener).map_err(internal)?;
        let router = gateway::router(&shared, protocols, routes.clone(), &shared.web_origins);
        let (room, proxies) = (
            room(limits::MAX_CALLS_FROM_ADDRESS),
            shared.access.proxies(),
        );
        let stop = stop.clone();
        let served = match shared.access.tls(TlsDoor::Http) {
            None => Either::Left(http::serve(accept(listener, room, proxies), router, stop)),
            Some(tls) => {
                let listener = TlsListener {
                    socket: listener,
                    tls,
                    http: true,
                };
                Either::Right(http::serve(accept(listener, room, proxies), router, stop))
            }
        };
        serving.spawn(async move {
            served.await;
            (Ok(()), Ended::DoorFailed)
        });
    }
    if let Some(fd) = doors.private {
        let (incoming, end) = incoming_once(fd);
        let (guard, stop) = (guard(Entrance::Private), stop.clone());
        serving.spawn(async move {
            let over = async move {
                tokio::select! {
                    () = end.wait() => {}
                    () = stop.cancelled() => {}
                }
            };
            let router = server(guard.entrance()).layer(guard).add_routes(routes);
            let served = router.serve_with_incoming_shutdown(incoming, over);
            (served.await, Ended::ConnectionOver)
        });
    }
    if let Some(listener) = doors.handout {
        listener.set_nonblocking(true).map_err(internal)?;
        let listener = tokio::net::UnixListener::from_std(listener).map_err(internal)?;
        tokio::spawn(handout::serve(listener, shared, stop.clone()));
    }
    let mut ended = Ended::Asked;
    while let Some(done) = serving.join_next().await {
        let Ok((result, why)) = done else {
            return Err(Failure::new(Exit::Internal, "a door's task failed"));
        };
        if let Err(error) = result {
            tracing::error!(%error, "serving failed");
        }
        if !stop.is_cancelled() {
            ended = why;
            stop.cancel();
        }
    }
    Ok(ended)
}

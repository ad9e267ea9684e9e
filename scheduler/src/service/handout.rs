//! What clients on this host are given by descriptor: connections to workers, and memory shared with them.
//!
//! Only this user and root can connect here, whoever else may use the socket beside it.

use std::{os::fd::AsFd, sync::Arc, time::Duration};

use hotcell_ipc::{
    handoff::{self, Ask},
    memory::shared_memory,
};
use hotcell_proto::{
    error::{Error, Reason},
    limits,
    session::SessionId,
};
use tokio::{
    net::{UnixListener, UnixStream},
    sync::Semaphore,
};
use tokio_util::sync::CancellationToken;

use super::Shared;
use crate::access::Caller;

/// Clients that ask at once; further ones wait in the socket.
const MAX_ASKING: usize = 64;
/// Pause after a connection could not be accepted, mostly for want of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Hands out until `stop`.
pub async fn serve(listener: UnixListener, shared: Shared, stop: CancellationToken) {
    let places = Arc::new(Semaphore::new(MAX_ASKING));
    let accept = async {
        // Never an error: nobody closes it.
        while let Ok(place) = Arc::clone(&places).acquire_owned().await {
            match listener.accept().await {
                Ok((stream, _)) => {
                    let shared = shared.clone();
                    tokio::spawn(async move {
                        if let Err(error) = give(stream, &shared).await {
                            tracing::debug!(%error, "a client was not given what it asked for");
                        }
                        drop(place);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    };
    tokio::select! {
        () = accept => {}
        () = stop.cancelled() => {}
    }
}

/// Answers one client.
async fn give(mut stream: UnixStream, shared: &Shared) -> std::io::Result<()> {
    let made = match handoff::read_ask(&mut stream).await {
        Ok(Ask::Takeover { bytes }) => return shared.takeover.serve(stream, bytes, shared).await,
        Ok(Ask::Connection { session }) => {
            connection(&session, shared).await.map(|fd| (0, None, fd))
        }
        Ok(Ask::Memory { session, bytes }) => {
            let made = memory([&session], bytes, shared).await;
            made.map(|([tag], fd)| (tag, None, fd))
        }
        Ok(Ask::Lane { sessions, bytes }) => {
            let made = memory(sessions.each_ref().map(String::as_str), bytes, shared).await;
            made.map(|([tag, also], fd)| (tag, Some(also), fd))
        }
        Err(error) => Err(Error::new(Reason::InvalidArgument, error.to_string())),
    };
    match &made {
        Ok((tag, also, fd)) => handoff::answer(&mut stream, Ok((*tag, *also, fd.as_fd()))).await,
        Err(error) => handoff::answer(&mut stream, Err(error.message())).await,
    }
}

async fn connection(session: &str, shared: &Shared) -> Result<std::os::fd::OwnedFd, Error> {
    let session =
        shared
            .tensors
            .find(&SessionId::parse(session)?, &shared.fleet, &Caller::own())?;
    session.take_connection()?;
    session.link.open_tensors().await
}

/// Memory for the workers of these sessions, and its tag with each.
async fn memory<const N: usize>(
    sessions: [&str; N],
    bytes: u64,
    shared: &Shared,
) -> Result<([u64; N], std::os::fd::OwnedFd), Error> {
    let mut links = Vec::with_capacity(N);
    for session in sessions {
        let id = SessionId::parse(session)?;
        let session = shared.tensors.find(&id, &shared.fleet, &Caller::own())?;
        links.push(session.link.clone());
    }
    if !(1..=limits::MAX_SHARED_BYTES).contains(&bytes) {
        let what = format!(
            "shared memory has 1 to {} bytes, not {bytes}",
            limits::MAX_SHARED_BYTES
        );
        return Err(Error::new(Reason::LimitExceeded, what));
    }
    let none = |e| {
        Error::new(
            Reason::OutOfMemory,
            format!("no shared memory of {bytes} bytes: {e}"),
        )
    };
    // Sealed before anybody else has it.
    let memory = shared_memory("hotcell-shared", bytes).map_err(none)?;
    let mut tags = [0; N];
    for (tag, link) in tags.iter_mut().zip(&links) {
        *tag = link.share(memory.as_fd()).await?;
    }
    Ok((tags, memory))
}

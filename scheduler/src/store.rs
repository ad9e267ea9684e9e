//! What the service manager keeps for the scheduler that it starts after this one was killed: listening sockets, in
//! which clients go on to wait, and the models' files, so that what was loaded is there again.
//!
//! Beside the descriptors goes a state as a [takeover](crate::takeover) has it, without workers and streams: those end
//! with the process.

use std::{
    net::TcpListener,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Duration,
};

use hotcell_ipc::{memory::sealed_memory, notify::Manager};
use hotcell_proto::v1::{DoorKind, HeldModel, TakeoverState};
use prost::Message;
use tokio::time::{Instant, sleep_until};

use crate::{
    service::Shared,
    takeover::{STATE_VERSION, held},
};

/// What all names begin with.
pub const PREFIX: &str = "hotcell-";
/// The state.
pub const STATE: &str = "hotcell-state";
/// The models' files, which the state tells apart by device and inode.
pub const FILE: &str = "hotcell-file";

/// Between two looks at what is to be kept.
const GATHER: Duration = Duration::from_millis(100);

/// The name of a listening socket.
pub fn name_of(kind: DoorKind) -> &'static str {
    match kind {
        DoorKind::Unix => "hotcell-unix",
        DoorKind::Handout => "hotcell-handout",
        DoorKind::Tcp => "hotcell-tcp",
        DoorKind::Http => "hotcell-http",
        DoorKind::Unspecified => "hotcell-door",
    }
}

const DOORS: [DoorKind; 4] = [
    DoorKind::Unix,
    DoorKind::Handout,
    DoorKind::Tcp,
    DoorKind::Http,
];

/// What a socket is for that the service manager opened (`FileDescriptorName=` of its unit is the name), and where it
/// listens.
pub(crate) fn activated(name: &str, socket: &OwnedFd) -> Option<(DoorKind, Vec<u8>)> {
    let kind = DOORS.into_iter().find(|kind| name_of(*kind) == name)?;
    let socket = socket.try_clone().ok()?;
    let address = match kind {
        DoorKind::Tcp | DoorKind::Http => {
            let address = TcpListener::from(socket).local_addr().ok()?;
            address.to_string().into_bytes()
        }
        // Its path is this program's, and goes when it ends.
        DoorKind::Unix | DoorKind::Handout | DoorKind::Unspecified => return None,
    };
    Some((kind, address))
}

/// Keeps the store as things are, for as long as this is polled.
pub async fn keep(manager: &Manager, shared: &Shared) {
    let mut changed = shared.fleet.changes();
    let mut stored = None;
    loop {
        changed.see();
        if shared.admission.is_closed() {
            return;
        }
        // By which files they are: a model that was opened again is another one.
        match shared.fleet.held_files() {
            Ok((models, _)) if stored.as_ref() == Some(&models) => {}
            Ok((models, files)) => {
                stored = Some(models.clone());
                if let Err(error) = store(manager, shared, models, &files) {
                    tracing::warn!(%error, "the service manager does not keep models and sockets");
                }
            }
            Err(error) => tracing::warn!(%error, "models cannot be kept by the service manager"),
        }
        // Each request that ends is a change, and looking opens all files again.
        let looked = Instant::now();
        changed.changed().await;
        sleep_until(looked + GATHER).await;
    }
}

fn store(
    manager: &Manager,
    shared: &Shared,
    models: Vec<HeldModel>,
    files: &[OwnedFd],
) -> std::io::Result<()> {
    forget(manager)?;
    let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
    manager.store(FILE, &files)?;
    let state = shared.takeover.with_doors(|doors| {
        for door in doors {
            manager.store(name_of(door.kind), &[door.listener.as_fd()])?;
        }
        Ok::<_, std::io::Error>(TakeoverState {
            version: STATE_VERSION,
            doors: doors.iter().map(held).collect(),
            models,
            ..TakeoverState::default()
        })
    })?;
    let memory = sealed_memory(STATE, &state.encode_to_vec())?;
    manager.store(STATE, &[memory.as_fd()])
}

/// Has the manager close all of it: this process ends in order.
///
/// # Errors
/// What telling it reports.
pub fn forget(manager: &Manager) -> std::io::Result<()> {
    let doors = DOORS.into_iter().map(name_of);
    doors
        .chain([FILE, STATE])
        .try_for_each(|name| manager.forget(name))
}

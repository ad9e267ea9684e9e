//! Memory of each member's device that the others write into: they agree whether all of them reach it. Where one does not,
//! all give each other their parts through the host's memory.

use std::{
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use hotcell_ipc::descriptors::{DescriptorReceiver, DescriptorSender};
use hotcell_kernels::backend::Device;
use hotcell_proto::error::Reason;

use super::{
    follow::collect,
    lead::To,
    wire::{self, Left, Loaded},
};

/// What sets of these descriptors go by, beside those of models.
const TAG: u64 = u64::MAX;

/// What the own device has; nothing where it has none, or cannot now.
fn own(device: &dyn Device) -> Vec<OwnedFd> {
    device.door().unwrap_or_else(|error| {
        tracing::warn!(%error, "parts of models go through the host's memory");
        Vec::new()
    })
}

/// Shows the leader what this member's device has.
pub(super) fn show(
    device: &dyn Device,
    to: &DescriptorSender,
    orders: &mut UnixStream,
) -> io::Result<()> {
    let door = own(device);
    if !door.is_empty() {
        let descriptors: Vec<BorrowedFd<'_>> = door.iter().map(AsFd::as_fd).collect();
        to.send(TAG, &descriptors)?;
    }
    let said = match door.is_empty() {
        true => Loaded::Failed(Reason::Internal, "its device shows no memory".to_owned()),
        false => Loaded::Done(Left::default()),
    };
    wire::write(orders, &said.put())
}

/// As a set that has come, those of each of so many members.
fn by_members(all: &[OwnedFd], members: usize) -> Vec<Vec<BorrowedFd<'_>>> {
    let each = (all.len() / members.max(1)).max(1);
    let mut doors = Vec::with_capacity(members);
    for door in all.chunks(each) {
        doors.push(door.iter().map(AsFd::as_fd).collect());
    }
    doors
}

/// Reaches for what the leader says that all have. What is to be said of it.
pub(super) fn open(
    device: &dyn Device,
    files: &DescriptorReceiver,
    members: usize,
    each: usize,
) -> Loaded {
    let reached = match each {
        0 => device.reach(&[]).map_err(|error| error.to_string()),
        _ => collect(files, TAG)
            .map_err(|error| error.to_string())
            .and_then(|all| {
                let reached = device.reach(&by_members(&all, members));
                reached.map_err(|error| error.to_string())
            }),
    };
    answer(reached)
}

fn answer(done: Result<(), String>) -> Loaded {
    match done {
        Ok(()) => Loaded::Done(Left::default()),
        Err(why) => Loaded::Failed(Reason::Internal, why),
    }
}

/// Whether what all wrote has come here. What is to be said of it.
pub(super) fn met(device: &dyn Device) -> Loaded {
    answer(device.met().map_err(|error| error.to_string()))
}

/// As the leader: has all reach for what each has, or none.
///
/// # Errors
/// When a member is gone.
pub(super) fn meet(device: &dyn Device, others: &[To]) -> io::Result<()> {
    let mut doors = vec![own(device)];
    let mut why = doors
        .iter()
        .any(Vec::is_empty)
        .then(|| "this device shows no memory".to_owned());
    for to in others {
        match said(to)? {
            Ok(()) => doors.push(collect(&to.door, TAG)?),
            Err(other) => why = Some(other),
        }
    }
    let each = doors.first().map_or(0, Vec::len);
    if doors.iter().any(|door| door.len() != each) {
        why = why.or(Some(
            "their devices show memory of several sizes".to_owned(),
        ));
    }
    if why.is_none() {
        let all: Vec<OwnedFd> = doors.into_iter().flatten().collect();
        let descriptors: Vec<BorrowedFd<'_>> = all.iter().map(AsFd::as_fd).collect();
        for to in others {
            wire::write(&mut *to.orders.borrow_mut(), &wire::doors(each))?;
            to.files.send(TAG, &descriptors)?;
        }
        let reached = device.reach(&by_members(&all, others.len() + 1));
        why = reached.err().map(|error| error.to_string());
        for to in others {
            if let Err(other) = said(to)? {
                why = Some(other);
            }
        }
    }
    if why.is_none() {
        // All of them have written to all: now each looks.
        for to in others {
            wire::write(&mut *to.orders.borrow_mut(), &wire::met())?;
        }
        why = device.met().err().map(|error| error.to_string());
        for to in others {
            if let Err(other) = said(to)? {
                why = Some(other);
            }
        }
    }
    let Some(why) = why else {
        tracing::info!(
            members = others.len() + 1,
            "devices give each other their parts"
        );
        return Ok(());
    };
    tracing::debug!(why, "parts of models go through the host's memory");
    let through_host = |error| io::Error::other(format!("{error}"));
    device.reach(&[]).map_err(through_host)?;
    for to in others {
        wire::write(&mut *to.orders.borrow_mut(), &wire::doors(0))?;
    }
    for to in others {
        said(to)?.map_err(io::Error::other)?;
    }
    Ok(())
}

/// What a member says; the error is that it is gone.
fn said(to: &To) -> io::Result<Result<(), String>> {
    let mut orders = to.orders.borrow_mut();
    match wire::read(&mut *orders)?.as_deref().map(Loaded::take) {
        Some(Some(Loaded::Done(_))) => Ok(Ok(())),
        Some(Some(Loaded::Failed(_, why))) => Ok(Err(why)),
        Some(_) => Err(io::Error::other("a member says what nobody understands")),
        None => Err(io::Error::other("a member is gone")),
    }
}

//! What comes between the worker and the connections of tensor sessions: lies about handles.
//!
//! Sessions' connections arrive as descriptors. Each is replaced by a pair of its own, and what the worker says is
//! passed on frame by frame.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::fd::{AsFd, IntoRawFd, OwnedFd},
    sync::{Mutex, PoisonError},
    thread,
};

use hotcell_ipc::{
    inherit,
    socket::{Collector, DescriptorReceiver, DescriptorSender, descriptor_pair, stream_pair},
};
use hotcell_proto::limits;
use hotcell_worker::config::Serve;
use rustix::{io::FdFlags, net::SocketType};

use super::{Fault, trespass};

/// HTTP/2's frame header.
const HEADER: usize = 9;
/// The field of a handle's id, and its length.
const ID: [u8; 2] = [0x12, 16];

/// The real socket for descriptors, and our end of the one that the worker takes for it.
static BETWEEN: Mutex<Option<(OwnedFd, OwnedFd)>> = Mutex::new(None);

pub(super) fn prepare(serve: &mut Serve) -> io::Result<()> {
    let real = inherit::take(serve.descriptors_fd)?;
    let (ours, its) = descriptor_pair()?;
    // As if inherited: the worker takes only such.
    rustix::io::fcntl_setfd(&its, FdFlags::empty())?;
    serve.descriptors_fd = its.into_raw_fd();
    *BETWEEN.lock().unwrap_or_else(PoisonError::into_inner) = Some((real, ours));
    Ok(())
}

/// Starts to pass on. From the engine's thread.
pub(super) fn begin() {
    let held = BETWEEN
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .take();
    if let Some((real, ours)) = held {
        thread::spawn(move || {
            // The end of the scheduler is an end as well.
            let _ = pass_descriptors(real, ours);
        });
    }
}

fn pass_descriptors(real: OwnedFd, ours: OwnedFd) -> io::Result<()> {
    let receiver = DescriptorReceiver::new(real)?;
    let sender = DescriptorSender::new(ours)?;
    let mut collector = Collector::new(limits::MAX_MODELS, limits::MAX_MODEL_FILES);
    loop {
        let set = collector.add(receiver.recv()?);
        let Some((tag, fds)) = set.map_err(io::Error::other)? else {
            continue;
        };
        let fds = fds
            .into_iter()
            .map(replace)
            .collect::<io::Result<Vec<_>>>()?;
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        sender.send(tag, &borrowed)?;
    }
}

/// A connection becomes one that we hold the other end of; anything else stays as it is.
fn replace(fd: OwnedFd) -> io::Result<OwnedFd> {
    let kind = rustix::net::sockopt::socket_type(&fd);
    if !matches!(kind, Ok(SocketType::STREAM)) {
        trespass::note_shared(fd.try_clone()?);
        return Ok(fd);
    }
    let (ours, its) = stream_pair()?;
    let (towards, back) = (fd.try_clone()?, ours.try_clone()?);
    thread::spawn(move || end(io::copy(&mut File::from(fd), &mut File::from(ours))));
    thread::spawn(move || end(pass_frames(&mut File::from(back), &mut File::from(towards))));
    Ok(its)
}

/// However it ended, it has ended.
fn end<T>(_: io::Result<T>) {}

fn pass_frames(from: &mut File, to: &mut File) -> io::Result<()> {
    loop {
        let mut frame = vec![0; HEADER];
        from.read_exact(&mut frame)?;
        let length =
            usize::from(frame[0]) << 16 | usize::from(frame[1]) << 8 | usize::from(frame[2]);
        let is_data = frame[3] == 0;
        frame.resize(HEADER + length, 0);
        from.read_exact(&mut frame[HEADER..])?;
        if is_data && Fault::LieAboutHandles.is_on() {
            lie(&mut frame[HEADER..]);
        }
        to.write_all(&frame)?;
    }
}

/// Changes the ids of handles in a message.
fn lie(message: &mut [u8]) {
    for at in 0..message.len().saturating_sub(ID.len() + 15) {
        if message[at..].starts_with(&ID) {
            message[at + ID.len()] ^= 1;
        }
    }
}

//! Descriptors in sets, over a one-way `AF_UNIX` `SOCK_SEQPACKET` pair.
//!
//! A set (a model's files, say) has a tag that the two sides agreed on elsewhere, and may be larger than what
//! the kernel passes at once. Each packet carries a header of 20 bytes, little-endian, and `count` descriptors:
//!
//! ```text
//! tag: u64 | first: u32 | count: u32 | total: u32
//! ```

use std::collections::HashMap;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketType,
};

/// Most descriptors in one packet; the kernel's own limit (`SCM_MAX_FD`) is 253.
pub const MAX_BATCH: usize = 250;

const KERNEL_MAX: usize = 253;
const HEADER: usize = 20;
const RETRY: Duration = Duration::from_millis(2);

/// Two connected ends for a [`DescriptorSender`] and a [`DescriptorReceiver`], close-on-exec.
///
/// # Errors
/// What `socketpair` reports.
pub fn descriptor_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    crate::socket::pair(SocketType::SEQPACKET)
}

/// A packet that does not keep the protocol. It travels inside an [`io::Error`] of kind `InvalidData`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    /// Not a header, or more than one.
    #[error("a descriptor packet of {0} bytes where {HEADER} are due")]
    Length(usize),
    /// The kernel left descriptors out, which it does when this process may not open more files.
    #[error("descriptors were cut off: this process has too many open files")]
    CutOff,
    /// Header and descriptors disagree.
    #[error("a descriptor packet announces {announced} descriptors and carries {carried}")]
    Count {
        /// What the header says.
        announced: u32,
        /// What came.
        carried: usize,
    },
    /// A packet without descriptors, with too many of them, or outside its own set.
    #[error("a descriptor packet with {count} descriptors from {first} in a set of {total}")]
    Range {
        /// Index of the packet's first descriptor.
        first: u32,
        /// Descriptors in the packet.
        count: u32,
        /// Descriptors in the set.
        total: u32,
    },
}

impl From<BatchError> for io::Error {
    fn from(error: BatchError) -> Self {
        io::Error::new(io::ErrorKind::InvalidData, error)
    }
}

/// Marks the end of the stream inside an [`io::Error`] of kind `UnexpectedEof`; see [`is_end`].
#[derive(Debug, thiserror::Error)]
#[error("the sender of descriptors is gone")]
struct End;

/// Whether [`DescriptorReceiver::recv`] failed only because the sender closed its end.
pub fn is_end(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<End>())
}

/// The sending end.
///
/// Sending never blocks in the kernel. Where a packet has to wait (the receiver does not read, or this user has
/// too many descriptors in flight), [`send`](Self::send) sleeps and [`send_async`](Self::send_async) awaits, both
/// until the timeout. Some 50,000 descriptors fit into the socket before that, so from async code `send` is
/// fine for a model's files if the receiver is a thread that reads, and `send_async` in every case.
#[derive(Debug)]
pub struct DescriptorSender {
    socket: OwnedFd,
    timeout: Duration,
}

impl DescriptorSender {
    /// Takes one end of a [`descriptor_pair`] and closes its receiving direction: what the other side stuffed
    /// into it would count against this user's descriptors in flight.
    ///
    /// # Errors
    /// `InvalidInput` if `socket` is not a Unix `SOCK_SEQPACKET` socket; what `shutdown` reports.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        crate::socket::expect_type(&socket, SocketType::SEQPACKET)?;
        rustix::net::shutdown(&socket, Shutdown::Read)?;
        Ok(DescriptorSender {
            socket,
            timeout: Duration::from_secs(1),
        })
    }

    /// Sets how long sending one set may take in all (1 s unless told).
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sends one set in as many packets as it takes; blocks the thread while it waits.
    ///
    /// # Errors
    /// `InvalidInput` for an empty set; `TimedOut`; `BrokenPipe` if the receiver is gone. If it fails after the
    /// first packet, the socket is shut down: a receiver must not wait for the rest of a set.
    pub fn send(&self, tag: u64, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut progress = Progress::new(tag, fds, self.timeout)?;
        while !progress.step(&self.socket)? {
            std::thread::sleep(RETRY);
        }
        Ok(())
    }

    /// Like [`send`](Self::send), but awaits while it waits. A dropped future counts as a failure.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub async fn send_async(&self, tag: u64, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        struct Unfinished<'a>(&'a OwnedFd, bool);
        impl Drop for Unfinished<'_> {
            fn drop(&mut self) {
                if self.1 {
                    abandon(self.0);
                }
            }
        }
        let mut progress = Progress::new(tag, fds, self.timeout)?;
        let mut guard = Unfinished(&self.socket, false);
        loop {
            let done = progress.step(&self.socket);
            guard.1 = matches!(done, Ok(false)) && progress.sent > 0;
            if done? {
                return Ok(());
            }
            tokio::time::sleep(RETRY).await;
        }
    }
}

/// A set on its way.
struct Progress<'a> {
    tag: u64,
    fds: &'a [BorrowedFd<'a>],
    total: u32,
    sent: usize,
    deadline: Instant,
}

impl<'a> Progress<'a> {
    fn new(tag: u64, fds: &'a [BorrowedFd<'a>], timeout: Duration) -> io::Result<Self> {
        let total = u32::try_from(fds.len())
            .ok()
            .filter(|&total| total > 0)
            .ok_or_else(|| {
                io::Error::new(
                    io::ErrorKind::InvalidInput,
                    "a set of descriptors has at least one and at most 2^32 - 1",
                )
            })?;
        Ok(Progress {
            tag,
            fds,
            total,
            sent: 0,
            deadline: Instant::now() + timeout,
        })
    }

    /// Sends what can be sent now: `true` once the whole set has gone, `false` if it has to wait.
    fn step(&mut self, socket: &OwnedFd) -> io::Result<bool> {
        let result = self.try_step(socket);
        if result.is_err() && self.sent > 0 {
            abandon(socket);
        }
        result
    }

    fn try_step(&mut self, socket: &OwnedFd) -> io::Result<bool> {
        while let Some(rest) = self.fds.get(self.sent..).filter(|rest| !rest.is_empty()) {
            let batch = &rest[..rest.len().min(MAX_BATCH)];
            // Both fit: the set's length does.
            let header = encode(self.tag, self.sent as u32, batch.len() as u32, self.total);
            match send_packet(socket, &header, batch) {
                Ok(()) => self.sent += batch.len(),
                Err(Errno::INTR) => {}
                // TOOMANYREFS: this user's descriptors in flight exceed its open-files limit until somebody
                // receives some.
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::TOOMANYREFS) => {
                    if Instant::now() >= self.deadline {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    return Ok(false);
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }
}

fn abandon(socket: &OwnedFd) {
    // Can only fail if the socket is not connected any more, which is what is wanted.
    let _ = rustix::net::shutdown(socket, Shutdown::Both);
}

fn encode(tag: u64, first: u32, count: u32, total: u32) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(&tag.to_le_bytes());
    header[8..12].copy_from_slice(&first.to_le_bytes());
    header[12..16].copy_from_slice(&count.to_le_bytes());
    header[16..].copy_from_slice(&total.to_le_bytes());
    header
}

fn send_packet(socket: &OwnedFd, header: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_BATCH))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::MSGSIZE);
    }
    rustix::net::sendmsg(
        socket,
        &[IoSlice::new(header)],
        &mut control,
        SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

/// Descriptors that arrived in one packet: number `first` and following of a set of `total`.
#[derive(Debug)]
pub struct Batch {
    /// The set's tag.
    pub tag: u64,
    /// Index of the first of `fds` in its set.
    pub first: u32,
    /// Descriptors in the whole set; at least `first + fds.len()`.
    pub total: u32,
    /// The descriptors, close-on-exec, between 1 and [`MAX_BATCH`].
    pub fds: Vec<OwnedFd>,
}

/// The receiving end. It blocks, and so wants a thread of its own.
#[derive(Debug)]
pub struct DescriptorReceiver {
    socket: OwnedFd,
}

impl DescriptorReceiver {
    /// Takes one end of a [`descriptor_pair`] and closes its sending direction.
    ///
    /// # Errors
    /// `InvalidInput` if `socket` is not a Unix `SOCK_SEQPACKET` socket; what `shutdown` reports.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        crate::socket::expect_type(&socket, SocketType::SEQPACKET)?;
        rustix::net::shutdown(&socket, Shutdown::Write)?;
        Ok(DescriptorReceiver { socket })
    }

    /// Has [`recv`](Self::recv) wait for so long at most; forever unless told.
    ///
    /// # Errors
    /// `InvalidInput` for no time at all; what `setsockopt` reports.
    pub fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        let which = rustix::net::sockopt::Timeout::Recv;
        rustix::net::sockopt::set_socket_timeout(&self.socket, which, Some(timeout))?;
        Ok(())
    }

    /// Waits for the next packet.
    ///
    /// # Errors
    /// An error for which [`is_end`] holds once the sender has closed; [`BatchError`] inside `InvalidData` for a
    /// packet that breaks the protocol, whose descriptors are closed; otherwise what `recvmsg` reports. After
    /// anything but success the stream should be given up.
    pub fn recv(&self) -> io::Result<Batch> {
        let mut header = [0_u8; HEADER];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(KERNEL_MAX))];
        // Closes on drop what is not taken out of it, so every early return below closes.
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let message = rustix::io::retry_on_intr(|| {
            rustix::net::recvmsg(
                &self.socket,
                &mut [IoSliceMut::new(&mut header)],
                &mut control,
                RecvFlags::CMSG_CLOEXEC | RecvFlags::TRUNC,
            )
        })?;
        let mut fds: Vec<OwnedFd> = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                fds.extend(received);
            }
        }
        if message.flags.contains(ReturnFlags::CTRUNC) {
            return Err(BatchError::CutOff.into());
        }
        // An empty packet cannot be told from the end; a peer that sends one has ended.
        if message.bytes == 0 && fds.is_empty() {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, End));
        }
        // With TRUNC, the length before truncation.
        if message.bytes != HEADER {
            return Err(BatchError::Length(message.bytes).into());
        }
        Ok(checked(&header, fds)?)
    }
}

impl AsFd for DescriptorReceiver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl AsFd for DescriptorSender {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn checked(header: &[u8; HEADER], fds: Vec<OwnedFd>) -> Result<Batch, BatchError> {
    let [
        t0,
        t1,
        t2,
        t3,
        t4,
        t5,
        t6,
        t7,
        f0,
        f1,
        f2,
        f3,
        c0,
        c1,
        c2,
        c3,
        n0,
        n1,
        n2,
        n3,
    ] = *header;
    let tag = u64::from_le_bytes([t0, t1, t2, t3, t4, t5, t6, t7]);
    let first = u32::from_le_bytes([f0, f1, f2, f3]);
    let count = u32::from_le_bytes([c0, c1, c2, c3]);
    let total = u32::from_le_bytes([n0, n1, n2, n3]);
    if usize::try_from(count) != Ok(fds.len()) {
        return Err(BatchError::Count {
            announced: count,
            carried: fds.len(),
        });
    }
    let inside = first.checked_add(count).is_some_and(|end| end <= total);
    if fds.is_empty() || fds.len() > MAX_BATCH || !inside {
        return Err(BatchError::Range {
            first,
            count,
            total,
        });
    }
    Ok(Batch {
        tag,
        first,
        total,
        fds,
    })
}

/// A batch that does not fit the sets begun so far. The sender broke the protocol or the agreed limits: its
/// stream should be given up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CollectError {
    /// More sets begun than allowed.
    #[error("more than {0} sets of descriptors under way")]
    TooManySets(usize),
    /// A set larger than allowed.
    #[error("a set of {total} descriptors where {limit} are allowed")]
    TooLarge {
        /// Descriptors announced.
        total: u32,
        /// Descriptors allowed.
        limit: usize,
    },
    /// Two packets of one set announce different totals.
    #[error("a set of descriptors announced as {before} and then as {now}")]
    TotalChanged {
        /// The first packet's total.
        before: usize,
        /// This packet's.
        now: u32,
    },
    /// The same place in a set twice.
    #[error("descriptor {0} of a set came twice")]
    Twice(usize),
}

/// Puts batches together to whole sets, within bounds: at most `max_sets * max_fds` descriptors are held.
#[derive(Debug)]
pub struct Collector {
    max_sets: usize,
    max_fds: usize,
    pending: HashMap<u64, Pending>,
}

#[derive(Debug)]
struct Pending {
    slots: Vec<Option<OwnedFd>>,
    missing: usize,
}

impl Collector {
    /// Allows `max_sets` incomplete sets at once and `max_fds` descriptors in each set.
    pub fn new(max_sets: usize, max_fds: usize) -> Self {
        Collector {
            max_sets,
            max_fds,
            pending: HashMap::new(),
        }
    }

    /// Takes a batch, and returns its set's tag and descriptors, in order, if that completes it.
    ///
    /// # Errors
    /// See [`CollectError`]. The batch is closed, and so is what had come of its set.
    pub fn add(&mut self, batch: Batch) -> Result<Option<(u64, Vec<OwnedFd>)>, CollectError> {
        let tag = batch.tag;
        // Taken out and put back, so that an error drops the set.
        let mut set = match self.pending.remove(&tag) {
            Some(set) => set,
            None => self.begin(batch.total)?,
        };
        if usize::try_from(batch.total) != Ok(set.slots.len()) {
            return Err(CollectError::TotalChanged {
                before: set.slots.len(),
                now: batch.total,
            });
        }
        let first = batch.first as usize;
        for (index, fd) in (first..).zip(batch.fds) {
            match set.slots.get_mut(index) {
                Some(slot @ None) => *slot = Some(fd),
                Some(Some(_)) => return Err(CollectError::Twice(index)),
                // A hand-made batch: those that were received are inside their set.
                None => {
                    return Err(CollectError::TooLarge {
                        total: batch.total,
                        limit: set.slots.len(),
                    });
                }
            }
            set.missing -= 1;
        }
        if set.missing > 0 {
            self.pending.insert(tag, set);
            return Ok(None);
        }
        Ok(Some((tag, set.slots.into_iter().flatten().collect())))
    }

    /// Closes what has come of a set that nobody wants any more.
    pub fn forget(&mut self, tag: u64) {
        self.pending.remove(&tag);
    }

    /// Number of sets begun and not complete.
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    fn begin(&self, total: u32) -> Result<Pending, CollectError> {
        let limit = self.max_fds;
        let slots = usize::try_from(total)
            .ok()
            .filter(|&slots| slots <= limit)
            .ok_or(CollectError::TooLarge { total, limit })?;
        if self.pending.len() >= self.max_sets {
            return Err(CollectError::TooManySets(self.max_sets));
        }
        Ok(Pending {
            slots: std::iter::repeat_with(|| None).take(slots).collect(),
            missing: slots,
        })
    }
}

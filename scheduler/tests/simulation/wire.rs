//! A worker's end of a connection in memory, which can break at any byte.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use hotcell_proto::error::Reason;
use tokio::{
    io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf},
    time::{Sleep, sleep},
};
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::transport::server::Connected;

use crate::world::{Conversation, How, Life};

/// What happens to a connection at a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Break {
    /// The process dies.
    Die(How),
    /// The connection ends, and the process lives on.
    Cut,
    /// Nothing goes through any more; somebody kills the process after so long.
    Hang(Duration),
    /// Nothing goes through for so long.
    Late(Duration),
    /// Bytes that mean nothing come first.
    Garbage,
    /// A frame, counted from 0 instead of by bytes, is written twice.
    Repeat,
}

/// A break and where it is.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// Bytes that went through before it.
    pub at: u64,
    /// Whether it counts what the worker writes; otherwise what it reads.
    pub writing: bool,
    pub what: Break,
}

/// Where frames of HTTP/2 end in what is written.
#[derive(Default)]
struct Frames {
    /// The frame so far.
    current: Vec<u8>,
    whole: u64,
}

impl Frames {
    const HEADER: usize = 9;

    /// Bytes until something is known: the header, or the whole frame.
    fn left(&self) -> usize {
        let Some(&[a, b, c]) = self.current.first_chunk() else {
            return Self::HEADER - self.current.len();
        };
        let length = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
        let all = match self.current.len() < Self::HEADER {
            true => Self::HEADER,
            false => Self::HEADER + length,
        };
        all - self.current.len()
    }

    /// Adds at most `left` bytes; a frame that is whole with them.
    fn add(&mut self, bytes: &[u8]) -> Option<Vec<u8>> {
        self.current.extend_from_slice(bytes);
        if self.current.len() < Self::HEADER || self.left() > 0 {
            return None;
        }
        self.whole += 1;
        Some(std::mem::take(&mut self.current))
    }

    /// Adds any number of bytes, and counts the frames that are whole with them.
    fn count(&mut self, mut bytes: &[u8]) -> u64 {
        let before = self.whole;
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(self.left().min(bytes.len()));
            self.add(now);
            bytes = later;
        }
        self.whole - before
    }
}

/// The worker's end.
pub struct End {
    conversation: Conversation,
    frames: Frames,
    /// What is to be written again.
    again: Vec<u8>,
    inner: Option<DuplexStream>,
    life: Arc<Life>,
    dead: Pin<Box<WaitForCancellationFutureOwned>>,
    fault: Option<Fault>,
    /// Most bytes that go through at once.
    piece: usize,
    read: u64,
    written: u64,
    pause: Option<Pin<Box<Sleep>>>,
    hung: bool,
}

fn gone<T>() -> Poll<io::Result<T>> {
    Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()))
}

impl End {
    pub fn new(
        inner: DuplexStream,
        life: Arc<Life>,
        conversation: Conversation,
        piece: usize,
    ) -> Self {
        let fault = life.wire_fault(conversation);
        Self {
            conversation,
            frames: Frames::default(),
            again: vec![],
            dead: Box::pin(life.token().clone().cancelled_owned()),
            inner: Some(inner),
            life,
            fault,
            piece,
            read: 0,
            written: 0,
            pause: None,
            hung: false,
        }
    }

    /// Whether it still carries bytes, and how many before something happens.
    fn room(&mut self, cx: &mut Context<'_>, writing: bool) -> Poll<io::Result<usize>> {
        loop {
            if self.dead.as_mut().poll(cx).is_ready() {
                self.inner = None;
            }
            if self.inner.is_none() {
                return gone();
            }
            if self.hung {
                return Poll::Pending;
            }
            if let Some(pause) = &mut self.pause {
                ready!(pause.as_mut().poll(cx));
                self.pause = None;
            }
            let Some(fault) = self
                .fault
                .filter(|f| f.writing == writing && f.what != Break::Repeat)
            else {
                return Poll::Ready(Ok(self.piece));
            };
            let done = if writing { self.written } else { self.read };
            if let Some(left) = usize::try_from(fault.at - done).ok().filter(|&n| n > 0) {
                return Poll::Ready(Ok(left.min(self.piece)));
            }
            self.fault = None;
            self.life.note(format!("{fault:?}"));
            if self.conversation == Conversation::Tensors {
                self.life.world.excuse_all(Reason::SessionNotFound);
                self.life.world.excuse_all(Reason::WorkerLost);
            }
            match fault.what {
                Break::Die(how) => self.life.die(how),
                Break::Cut => self.inner = None,
                Break::Hang(until) => {
                    self.hung = true;
                    self.life.die_in(until);
                }
                Break::Late(pause) => self.pause = Some(Box::pin(sleep(pause))),
                Break::Garbage => {
                    let inner = self.inner.as_mut().map(Pin::new);
                    if let Some(inner) = inner {
                        // An empty connection has room for them.
                        let _ = inner.poll_write(cx, &[0xff; 64]);
                    }
                }
                // That has a place of its own.
                Break::Repeat => {}
            }
        }
    }
}

impl End {
    /// Writes what is to be written again.
    fn repeat(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.again.is_empty() {
            let Some(inner) = &mut self.inner else {
                return gone();
            };
            let count = ready!(Pin::new(inner).poll_write(cx, &self.again))?;
            self.again.drain(..count);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for End {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let room = ready!(self.room(cx, false))?;
        let this = &mut *self;
        let Some(inner) = &mut this.inner else {
            return gone();
        };
        let mut bytes = [0; 4096];
        let most = room.min(bytes.len()).min(buf.remaining());
        let mut part = ReadBuf::new(&mut bytes[..most]);
        ready!(Pin::new(inner).poll_read(cx, &mut part))?;
        let count = part.filled().len();
        buf.put_slice(part.filled());
        this.read += count as u64;
        this.life.count(this.conversation, false, count, 0);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for End {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let mut room = ready!(self.room(cx, true))?;
        ready!(self.repeat(cx))?;
        let this = &mut *self;
        let Some(inner) = &mut this.inner else {
            return gone();
        };
        let repeat = this.fault.filter(|f| f.what == Break::Repeat);
        if repeat.is_some() {
            room = room.min(this.frames.left());
        }
        let part = &bytes[..bytes.len().min(room)];
        let count = ready!(Pin::new(inner).poll_write(cx, part))?;
        this.written += count as u64;
        let mut frames = 0;
        match repeat {
            None => frames = this.frames.count(&bytes[..count]),
            Some(fault) => {
                if let Some(frame) = this.frames.add(&bytes[..count])
                    && this.frames.whole == fault.at + 1
                {
                    this.life.note(format!("{fault:?}"));
                    this.fault = None;
                    this.again = frame;
                }
            }
        }
        this.life.count(this.conversation, true, count, frames);
        Poll::Ready(Ok(count))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.repeat(cx))?;
        match &mut self.inner {
            Some(inner) => Pin::new(inner).poll_flush(cx),
            None => gone(),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.inner {
            Some(inner) => Pin::new(inner).poll_shutdown(cx),
            None => Poll::Ready(Ok(())),
        }
    }
}

impl Connected for End {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

//! A worker's end of a connection in memory, which can break at any byte.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf},
    time::{Sleep, sleep},
};
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::transport::server::Connected;

use crate::world::{How, Life};

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

/// The worker's end.
pub struct End {
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
    pub fn new(inner: DuplexStream, life: Arc<Life>, fault: Option<Fault>, piece: usize) -> Self {
        Self {
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
            let Some(fault) = self.fault.filter(|f| f.writing == writing) else {
                return Poll::Ready(Ok(self.piece));
            };
            let done = if writing { self.written } else { self.read };
            if let Some(left) = usize::try_from(fault.at - done).ok().filter(|&n| n > 0) {
                return Poll::Ready(Ok(left.min(self.piece)));
            }
            self.fault = None;
            self.life.note(format!("{fault:?}"));
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
            }
        }
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
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for End {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let room = ready!(self.room(cx, true))?;
        let this = &mut *self;
        let Some(inner) = &mut this.inner else {
            return gone();
        };
        let part = &bytes[..bytes.len().min(room)];
        let count = ready!(Pin::new(inner).poll_write(cx, part))?;
        this.written += count as u64;
        Poll::Ready(Ok(count))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
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

//! gRPC over sockets that are connected already: a worker opens none of its own, it is given them.

use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio_stream::Stream;
use tonic::transport::server::{Connected, UdsConnectInfo};
use tonic::transport::{Channel, Endpoint, Server};

/// HTTP/2 flow control, in bytes. Both sides of a connection have their own; give both the same.
///
/// tonic's defaults cost half the throughput, and let five unread streams of 1 MiB starve all others of a
/// connection. Measured over a Unix socket; see the design's traps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// What one stream's receiver may leave unread.
    pub stream: u32,
    /// What all streams' receivers together may leave unread.
    pub connection: u32,
    /// Largest DATA frame; between 16 KiB and 16 MiB - 1.
    pub frame: u32,
}

impl Default for Windows {
    fn default() -> Self {
        Windows {
            stream: 8 << 20,
            connection: 16 << 20,
            frame: 1 << 20,
        }
    }
}

/// Cancelled streams of one connection that HTTP/2 keeps in mind. More at once ends the connection (as a server)
/// or frames that were under way count as the peer's errors (as a client): the defaults are 20 and 50, which a
/// burst of clients that leave goes past.
const MAX_RESETS: usize = 1024;

impl Windows {
    /// A server builder with these windows.
    pub fn server(&self) -> Server {
        Server::builder()
            .http2_max_pending_accept_reset_streams(Some(MAX_RESETS))
            .initial_stream_window_size(self.stream)
            .initial_connection_window_size(self.connection)
            .max_frame_size(self.frame)
    }

    /// A client's endpoint with these windows.
    pub fn endpoint(&self, endpoint: Endpoint) -> Endpoint {
        endpoint
            .http2_max_concurrent_reset_streams(MAX_RESETS)
            .initial_stream_window_size(self.stream)
            .initial_connection_window_size(self.connection)
            .max_frame_size(self.frame)
    }
}

/// A channel over one connected stream socket, registered with the current tokio runtime.
///
/// It has this one connection and no other: once that is lost, every call fails promptly with `UNAVAILABLE`.
/// tonic would ask its connector for a new one; this one refuses.
///
/// # Errors
/// As [`crate::socket::into_tokio`], and `Other` holding tonic's error if the connection is dead from the start.
pub async fn channel_over(fd: OwnedFd, windows: Windows) -> io::Result<Channel> {
    channel_on(crate::socket::into_tokio(fd)?, windows).await
}

/// [`channel_over`], for anything that carries bytes both ways.
///
/// # Errors
/// `Other` holding tonic's error if the connection is dead from the start.
pub async fn channel_on<S>(stream: S, windows: Windows) -> io::Result<Channel>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let once = Arc::new(Mutex::new(Some(stream)));
    let connector = tower::service_fn(move |_: http::Uri| {
        let stream = once.lock().unwrap_or_else(PoisonError::into_inner).take();
        std::future::ready(stream.map(TokioIo::new).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotConnected,
                "the process at the other end is gone",
            )
        }))
    });
    // The name is never resolved; it becomes the `:authority` of each request.
    windows
        .endpoint(Endpoint::from_static("http://worker.invalid"))
        .connect_with_connector(connector)
        .await
        .map_err(io::Error::other)
}

/// Serves one connected stream socket: a stream for `serve_with_incoming` that yields this connection, and a
/// way to notice its end.
///
/// The stream then stays pending for ever. If it ended, tonic would shut the server down gracefully while the
/// connection is in use. So the server ends by `serve_with_incoming_shutdown` with
/// [`ConnectionEnd::wait`], or by the process's exit.
pub fn incoming_once(fd: OwnedFd) -> (IncomingOnce, ConnectionEnd) {
    let (signal, end) = watch::channel(false);
    let incoming = IncomingOnce {
        next: Some((fd, signal)),
    };
    (incoming, ConnectionEnd(end))
}

/// See [`incoming_once`].
#[derive(Debug)]
pub struct IncomingOnce {
    next: Option<(OwnedFd, watch::Sender<bool>)>,
}

impl Stream for IncomingOnce {
    type Item = io::Result<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        // Registered only now, inside the runtime that serves it. On failure the signal is dropped, and that
        // is an end as well.
        match self.next.take() {
            Some((fd, end)) => Poll::Ready(Some(
                crate::socket::into_tokio(fd).map(|stream| Connection { stream, end }),
            )),
            // Never woken, and need not be: there is no further connection.
            None => Poll::Pending,
        }
    }
}

/// Tells when a connection of [`incoming_once`] is over: the peer closed it or died, it failed, or the server
/// dropped it. Clones tell the same.
#[derive(Clone, Debug)]
pub struct ConnectionEnd(watch::Receiver<bool>);

impl ConnectionEnd {
    /// Resolves when the connection is over, at once if it is already.
    pub async fn wait(&self) {
        // An error means that the connection, with the sender in it, was dropped.
        let _ = self.0.clone().wait_for(|&over| over).await;
    }

    /// Whether the connection is over.
    pub fn is_over(&self) -> bool {
        *self.0.borrow() || self.0.has_changed().is_err()
    }
}

/// A served connection that signals its end.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    end: watch::Sender<bool>,
}

impl Connection {
    fn over(&self) {
        self.end.send_replace(true);
    }

    fn note<T>(&self, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if matches!(result, Poll::Ready(Err(_))) {
            self.over();
        }
        result
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.over();
    }
}

impl Connected for Connection {
    type ConnectInfo = UdsConnectInfo;

    fn connect_info(&self) -> UdsConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let room = buf.remaining();
        let result = Pin::new(&mut self.stream).poll_read(cx, buf);
        if matches!(result, Poll::Ready(Ok(()))) && room > 0 && buf.filled().len() == before {
            self.over();
        }
        self.note(result)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.note(result)
    }

    // Passed on, or every frame would be copied into one buffer before it is written.
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.note(result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

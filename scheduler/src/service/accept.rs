//! Connections of a listening socket: so many at once, so many in a second from each address, and none given up because one
//! could not be accepted.

use std::{
    future::ready,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::mpsc,
    time::timeout,
};
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::{Connected, TcpConnectInfo};

use crate::access::{Came, Network, Origin, Room, Seat, Seats, Tls, name_of};

/// Pause after a connection could not be accepted, mostly for want of descriptors. tonic would end the server.
const PAUSE: Duration = Duration::from_millis(100);

/// How long a client may take to agree on keys.
const GREETING: Duration = Duration::from_secs(10);

/// A socket that listens.
pub(super) trait Listen: Send + Sync + 'static {
    /// Its connections as they come.
    type Raw: Send + 'static;
    /// Its connections as they are served.
    type Stream: AsyncRead + AsyncWrite + Connected + Send + Unpin + 'static;

    /// Where it comes from.
    fn from(raw: &Self::Raw, proxies: &[Network]) -> Origin;

    /// The next one.
    fn next(&self) -> impl Future<Output = io::Result<Self::Raw>> + Send;

    /// The name in the client's certificate, if it has shown one; none if that has no name of use.
    fn certificate(_: &Self::Stream) -> Option<Option<Arc<str>>> {
        None
    }

    /// Makes it one that can be served, while others come in.
    fn greet(
        &self,
        raw: Self::Raw,
    ) -> impl Future<Output = io::Result<Self::Stream>> + Send + 'static;
}

impl Listen for UnixListener {
    type Raw = UnixStream;
    type Stream = UnixStream;

    fn from(_: &UnixStream, _: &[Network]) -> Origin {
        Origin::default()
    }

    async fn next(&self) -> io::Result<UnixStream> {
        Ok(self.accept().await?.0)
    }

    fn greet(
        &self,
        raw: UnixStream,
    ) -> impl Future<Output = io::Result<UnixStream>> + Send + 'static {
        ready(Ok(raw))
    }
}

impl Listen for TcpListener {
    type Raw = TcpStream;
    type Stream = TcpStream;

    fn from(raw: &TcpStream, proxies: &[Network]) -> Origin {
        // One that is gone already comes from nowhere.
        let peer = raw.peer_addr().map(|peer| peer.ip().to_canonical());
        match peer {
            Ok(peer) if proxies.iter().any(|proxy| proxy.has(peer)) => Origin::Proxy,
            Ok(peer) => Origin::address(peer),
            Err(_) => Origin::Local,
        }
    }

    async fn next(&self) -> io::Result<TcpStream> {
        let stream = self.accept().await?.0;
        // Events are small, and each is waited for. Fails for one that is gone already, which will show.
        let _ = stream.set_nodelay(true);
        Ok(stream)
    }

    fn greet(
        &self,
        raw: TcpStream,
    ) -> impl Future<Output = io::Result<TcpStream>> + Send + 'static {
        ready(Ok(raw))
    }
}

/// A TCP socket on which TLS is spoken.
pub(super) struct TlsListener {
    pub socket: TcpListener,
    pub tls: Arc<Tls>,
    /// Whether it is the door for HTTP.
    pub http: bool,
}

impl Listen for TlsListener {
    type Raw = TcpStream;
    type Stream = TlsClient;

    fn from(raw: &TcpStream, proxies: &[Network]) -> Origin {
        <TcpListener as Listen>::from(raw, proxies)
    }

    async fn next(&self) -> io::Result<TcpStream> {
        self.socket.next().await
    }

    fn certificate(stream: &TlsClient) -> Option<Option<Arc<str>>> {
        let chain = stream.0.get_ref().1.peer_certificates()?;
        chain.first().map(|own| name_of(own))
    }

    fn greet(
        &self,
        raw: TcpStream,
    ) -> impl Future<Output = io::Result<TlsClient>> + Send + 'static {
        // That of now: the files may have changed since the last one came.
        let greeting = self.tls.acceptor(self.http).accept(raw);
        async move { Ok(TlsClient(Box::new(greeting.await?))) }
    }
}

/// A client that speaks TLS.
#[derive(Debug)]
pub(super) struct TlsClient(Box<TlsStream<TcpStream>>);

impl Connected for TlsClient {
    // That of the connection below, so that nobody takes a remote client for a local one.
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.0.get_ref().0.connect_info()
    }
}

impl AsyncRead for TlsClient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for TlsClient {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

/// Accepts connections for as long as the stream is there, as many at once as there is `room` for. Over further ones those leave that have not
/// made a call yet; if all have, further ones wait.
pub(super) fn accept<L: Listen>(
    listener: L,
    room: Room,
    proxies: Arc<[Network]>,
) -> ReceiverStream<io::Result<Counted<L::Stream>>> {
    let (sender, receiver) = mpsc::channel(1);
    let seats = Seats::new(room);
    tokio::spawn(async move {
        let serve = async {
            loop {
                match listener.next().await {
                    Ok(raw) => {
                        let from = L::from(&raw, &proxies);
                        // Before anything is done for it.
                        if !seats.lets_in(from) {
                            continue;
                        }
                        let Some(mut seat) = seats.take(from).await else {
                            return;
                        };
                        let greeting = timeout(GREETING, listener.greet(raw));
                        let sender = sender.clone();
                        // It holds its place meanwhile, so there are never more of them.
                        tokio::spawn(async move {
                            let greeted = tokio::select! {
                                greeted = greeting => greeted.unwrap_or_else(|late| Err(late.into())),
                                () = seat.left() => return,
                                () = sender.closed() => return,
                            };
                            match greeted {
                                Ok(stream) => {
                                    if let Some(name) = L::certificate(&stream) {
                                        seat.certified(name);
                                    }
                                    let counted = Counted { stream, seat };
                                    // An error means that the door is closed.
                                    let _ = sender.send(Ok(counted)).await;
                                }
                                Err(error) => tracing::debug!(%error, "a client did not come in"),
                            }
                        });
                    }
                    // Left before it came in.
                    Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept a connection");
                        tokio::time::sleep(PAUSE).await;
                    }
                }
            }
        };
        tokio::select! {
            () = serve => {}
            () = sender.closed() => {}
        }
    });
    ReceiverStream::new(receiver)
}

/// A connection and its place among those of its door.
#[derive(Debug)]
pub(super) struct Counted<S> {
    stream: S,
    seat: Seat,
}

/// Why a connection ends that has to leave.
fn left() -> io::Error {
    let why = "it made no call, and another connection wants its place; or its calls were refused again and again";
    io::Error::new(io::ErrorKind::ConnectionAborted, why)
}

impl<S: Connected> Connected for Counted<S> {
    type ConnectInfo = Came<S::ConnectInfo>;

    fn connect_info(&self) -> Came<S::ConnectInfo> {
        Came {
            info: self.stream.connect_info(),
            mark: self.seat.mark(),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Counted<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.seat.must_leave(cx) {
            return Poll::Ready(Err(left()));
        }
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Counted<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    // Passed on, or every frame would be copied into one buffer before it is written.
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use tokio::{io::AsyncReadExt, time::timeout};
    use tokio_stream::StreamExt;

    use super::*;

    const ROOM: Room = Room {
        connections: 2,
        calls: 2,
        calls_from_one: 2,
    };

    /// Fails every other time.
    struct Flaky(UnixListener, AtomicU32);

    impl Listen for Flaky {
        type Raw = UnixStream;
        type Stream = UnixStream;

        fn from(_: &UnixStream, _: &[Network]) -> Origin {
            Origin::default()
        }

        async fn next(&self) -> io::Result<UnixStream> {
            if self.1.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) {
                return Err(io::Error::other("too many open files"));
            }
            self.0.next().await
        }

        fn greet(
            &self,
            raw: UnixStream,
        ) -> impl Future<Output = io::Result<UnixStream>> + Send + 'static {
            self.0.greet(raw)
        }
    }

    #[tokio::test]
    async fn so_many_come_in_at_once_and_a_failed_one_ends_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = Flaky(UnixListener::bind(&path).unwrap(), AtomicU32::new(0));
        let mut incoming = accept(listener, ROOM, Arc::default());
        let mut clients = Vec::new();
        for _ in 0..4 {
            clients.push(UnixStream::connect(&path).await.unwrap());
        }
        let first = incoming.next().await.unwrap().unwrap();
        let mut second = incoming.next().await.unwrap().unwrap();
        first.connect_info().mark.keeps();
        // The third comes in once the second, which made no call, has gone.
        let left = second.read_u8().await.unwrap_err();
        assert_eq!(left.kind(), io::ErrorKind::ConnectionAborted);
        drop(second);
        let third = incoming.next().await.unwrap().unwrap();
        third.connect_info().mark.keeps();
        let fourth = timeout(5 * PAUSE, incoming.next()).await;
        assert!(fourth.is_err());
        drop(first);
        incoming.next().await.unwrap().unwrap();
    }
}

//! HTTP/1.1 and HTTP/2 over what a door accepts, with bounds on what a client may send and on how long it may take.

use std::{
    io,
    pin::pin,
    time::{Duration, Instant},
};

use axum::Router;
use hotcell_proto::limits;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{conn::auto::Builder, graceful::GracefulShutdown},
    service::TowerToHyperService,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_stream::{Stream, StreamExt};
use tokio_util::sync::CancellationToken;
use tonic::transport::server::{Connected, TcpConnectInfo};
use tower::ServiceExt;

use super::{
    accept::Counted,
    pace::{self, Pace},
};
use crate::access::Came;

/// A client that vanished without a word holds its streams no longer than these two together.
const PING: Duration = Duration::from_secs(30);
const PONG: Duration = Duration::from_secs(20);

/// Of one connection, which has this pace.
fn builder(pace: Pace) -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        // A token is a piece of some two hundred bytes between two lines: copied together and written as one slice.
        .writev(false)
        .timer(pace)
        .header_read_timeout(pace::IDLE)
        .max_headers(limits::MAX_HTTP_HEADERS)
        .max_buf_size(limits::MAX_HTTP_HEAD_BYTES);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(limits::MAX_HTTP_CALLS)
        .max_header_list_size(limits::MAX_HTTP_HEAD_BYTES as u32)
        .keep_alive_interval(PING)
        .keep_alive_timeout(PONG);
    builder
}

/// Serves every connection until `stop`, and returns when those that are there have ended.
pub(super) async fn serve<S>(
    incoming: impl Stream<Item = io::Result<Counted<S>>> + Send,
    router: Router,
    stop: CancellationToken,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    Counted<S>: Connected<ConnectInfo = Came<TcpConnectInfo>>,
{
    let graceful = GracefulShutdown::new();
    let mut incoming = pin!(incoming);
    loop {
        let connection = tokio::select! {
            next = incoming.next() => match next {
                Some(Ok(connection)) => connection,
                Some(Err(error)) => {
                    tracing::debug!(%error, "a connection over HTTP did not come in");
                    continue;
                }
                None => break,
            },
            () = stop.cancelled() => break,
        };
        // Every request tells where it came from, as those over gRPC do.
        let came = connection.connect_info();
        let service = router
            .clone()
            .map_request(move |mut request: http::Request<_>| {
                request.extensions_mut().insert(came.clone());
                request
            });
        let (connection, pace) = Pace::over(connection);
        let served = builder(pace)
            .serve_connection(TokioIo::new(connection), TowerToHyperService::new(service))
            .into_owned();
        let served = graceful.watch(served);
        tokio::spawn(async move {
            let began = Instant::now();
            if let Err(error) = served.await {
                tracing::debug!(%error, after = ?began.elapsed(), "a connection over HTTP broke");
            }
        });
    }
    graceful.shutdown().await;
}

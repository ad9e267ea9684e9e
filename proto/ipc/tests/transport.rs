//! gRPC over a socketpair: it works, it ends visibly, and it does not pretend to reconnect.
#![allow(clippy::unwrap_used)]

use std::os::fd::OwnedFd;
use std::time::Duration;

use hotcell_ipc::socket::{into_tokio, stream_pair};
use hotcell_ipc::transport::{ConnectionEnd, Windows, channel_over, incoming_once};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_stream::StreamExt;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

const SOON: Duration = Duration::from_secs(5);
const A_WHILE: Duration = Duration::from_millis(100);

type Served = JoinHandle<Result<(), tonic::transport::Error>>;

fn serve(fd: OwnedFd) -> (Served, ConnectionEnd) {
    let (incoming, end) = incoming_once(fd);
    let (_, service) = tonic_health::server::health_reporter();
    let server = Windows::default()
        .server()
        .add_service(service)
        .serve_with_incoming(incoming);
    (tokio::spawn(server), end)
}

async fn check(channel: &Channel) -> Result<i32, tonic::Status> {
    let request = HealthCheckRequest {
        service: String::new(),
    };
    let answer = HealthClient::new(channel.clone()).check(request).await?;
    Ok(answer.into_inner().status)
}

#[tokio::test]
async fn calls_go_through_and_the_end_is_noticed() {
    let (here, there) = stream_pair().unwrap();
    let (server, end) = serve(there);
    let channel = channel_over(here, Windows::default()).await.unwrap();
    for _ in 0..3 {
        let status = timeout(SOON, check(&channel)).await.unwrap().unwrap();
        assert_eq!(status, 1, "SERVING");
    }
    assert!(timeout(A_WHILE, end.wait()).await.is_err());
    assert!(!end.is_over());
    assert!(!server.is_finished());

    let other = end.clone();
    drop(channel);
    timeout(SOON, end.wait()).await.unwrap();
    timeout(SOON, other.wait()).await.unwrap();
    assert!(end.is_over());
    tokio::time::sleep(A_WHILE).await;
    assert!(!server.is_finished(), "only the process decides to end");
    server.abort();
}

#[tokio::test]
async fn a_peer_that_never_spoke_ends_the_connection_too() {
    let (here, there) = stream_pair().unwrap();
    let (server, end) = serve(there);
    assert!(timeout(A_WHILE, end.wait()).await.is_err());
    drop(here);
    timeout(SOON, end.wait()).await.unwrap();
    server.abort();
}

#[tokio::test]
async fn a_connection_that_is_never_served_ends_with_its_stream() {
    let (_here, there) = stream_pair().unwrap();
    let (incoming, end) = incoming_once(there);
    drop(incoming);
    timeout(SOON, end.wait()).await.unwrap();
    assert!(end.is_over());
}

#[tokio::test]
async fn a_second_connection_never_comes_and_the_stream_never_ends() {
    let (_here, there) = stream_pair().unwrap();
    let (mut incoming, _end) = incoming_once(there);
    assert!(incoming.next().await.unwrap().is_ok());
    assert!(timeout(A_WHILE, incoming.next()).await.is_err());
}

#[tokio::test]
async fn after_the_servers_death_calls_fail_and_do_not_hang() {
    let (here, there) = stream_pair().unwrap();
    // A runtime of its own, which takes the connections' tasks with it as a process would.
    let worker = tokio::runtime::Runtime::new().unwrap();
    let (_server, end) = {
        let _inside = worker.enter();
        serve(there)
    };
    let channel = channel_over(here, Windows::default()).await.unwrap();
    check(&channel).await.unwrap();
    let request = HealthCheckRequest {
        service: String::new(),
    };
    let mut open = HealthClient::new(channel.clone())
        .watch(request)
        .await
        .unwrap()
        .into_inner();
    assert!(open.message().await.unwrap().is_some());

    worker.shutdown_background();
    timeout(SOON, end.wait()).await.unwrap();
    let cut = timeout(SOON, open.message()).await.unwrap();
    assert!(cut.is_err(), "a stream that is cut must not look finished");
    for _ in 0..3 {
        let error = timeout(SOON, check(&channel)).await.unwrap().unwrap_err();
        // A call that was on its way meets the reset itself; later ones find no connection.
        let reset = std::error::Error::source(&error).is_some();
        let away = error.code() == tonic::Code::Unavailable;
        assert!(reset || away, "{error:?}");
    }
}

#[tokio::test]
async fn a_dead_end_gives_no_working_channel() {
    let (here, there) = stream_pair().unwrap();
    drop(there);
    match timeout(SOON, channel_over(here, Windows::default()))
        .await
        .unwrap()
    {
        Err(_) => {}
        Ok(channel) => {
            timeout(SOON, check(&channel)).await.unwrap().unwrap_err();
        }
    }
}

#[test]
fn outside_a_runtime_there_is_an_error_and_no_panic() {
    let (here, _there) = stream_pair().unwrap();
    assert!(into_tokio(here).is_err());
}

#[tokio::test]
async fn only_a_stream_socket_becomes_a_channel() {
    let file = hotcell_ipc::memory::sealed_memory("file", b"").unwrap();
    let error = channel_over(file, Windows::default()).await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
    let file = hotcell_ipc::memory::sealed_memory("file", b"").unwrap();
    let (mut incoming, end) = incoming_once(file);
    assert!(incoming.next().await.unwrap().is_err());
    timeout(SOON, end.wait()).await.unwrap();
}

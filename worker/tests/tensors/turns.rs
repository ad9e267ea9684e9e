//! Long calls stop and make way between two nodes.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use hotcell_proto::{error::Reason, v1};
use tokio_stream::StreamExt;

use crate::{order::long, support::*};

const MIB: u64 = 1 << 20;

#[tokio::test]
async fn a_cancelled_stream_stops_between_two_nodes() {
    let host = worker(256 * MIB);
    let client = Client::open(&host).await;
    let long = long(&client).await;
    let begun = Instant::now();
    client.execute(long.clone()).await.unwrap();
    let whole = begun.elapsed();

    let begun = Instant::now();
    let running = client.execute(long.clone());
    let queued = client.execute(long.clone());
    let mut elsewhere = long.clone();
    elsewhere.stream = 1;
    elsewhere.detached = true;
    let elsewhere = client.execute(elsewhere).await.unwrap();
    let stop = async {
        tokio::time::sleep(whole / 20).await;
        client.cancel(0, false).await
    };
    let (running, queued, count) = tokio::join!(running, queued, stop);
    assert_eq!(
        (reason(running), reason(queued)),
        (Reason::Cancelled, Reason::Cancelled)
    );
    assert_eq!(count, 2);
    assert!(
        begun.elapsed() < whole * 2 / 3,
        "{:?} of {whole:?}",
        begun.elapsed()
    );
    // The other stream goes on, until everything is stopped.
    assert_eq!(client.cancel(0, true).await, 1);
    let left = kept(&elsewhere, 0).handle.unwrap();
    assert_eq!(
        reason(client.try_download(&left, 0, 0).await),
        Reason::TensorNotReady
    );
    client.synchronize(None).await.unwrap();

    // A caller that leaves is a cancellation, and what it would have kept is freed.
    let held = client.list().await.tensors.len();
    let begun = Instant::now();
    tokio::time::timeout(whole / 20, client.execute(long))
        .await
        .unwrap_err();
    client.synchronize(None).await.unwrap();
    assert!(
        begun.elapsed() < whole * 2 / 3,
        "{:?} of {whole:?}",
        begun.elapsed()
    );
    assert_eq!(client.list().await.tensors.len(), held);
}

#[tokio::test]
async fn short_calls_do_not_wait_for_the_end_of_long_ones() {
    let host = worker(256 * MIB);
    let (slow, quick) = (Client::open(&host).await, Client::open(&host).await);
    let long = long(&slow).await;
    let slow_call = tokio::spawn(async move {
        let response = slow.execute(long).await.unwrap();
        (slow, response)
    });
    tokio::time::sleep(Duration::from_millis(20)).await;
    let plan = quick.compile(&add_graph(&[4])).await;
    for _ in 0..5 {
        let one = f32s(&[1.0; 4]);
        let request = call(&plan, vec![data(one.clone()), data(one)], vec![inline()]);
        quick.execute(request).await.unwrap();
    }
    assert!(
        !slow_call.is_finished(),
        "the long call was over too soon to tell"
    );
    let (_slow, response) = slow_call.await.unwrap();
    assert!(response.compute_ns > 0);
}

#[tokio::test]
async fn what_is_not_about_tensors_does_not_wait_for_all_that_is() {
    let host = worker(MIB);
    let done = Arc::new(AtomicUsize::new(0));
    let slow = || {
        let (engine, done) = (host.engine().clone(), Arc::clone(&done));
        tokio::spawn(async move {
            let work = engine.tensors(move |_| {
                std::thread::sleep(Duration::from_millis(20));
                done.fetch_add(1, Ordering::SeqCst);
                Ok(())
            });
            work.await.unwrap();
        })
    };
    let mut all: Vec<_> = (0..20).map(|_| slow()).collect();
    tokio::time::sleep(Duration::from_millis(5)).await;
    assert!(!host.engine().unload("none".to_owned()).await.unwrap());
    assert!(done.load(Ordering::SeqCst) <= 3);
    // What nobody waits for any more is not done.
    for left in all.drain(10..) {
        left.abort();
        let _ = left.await;
    }
    for wanted in all {
        wanted.await.unwrap();
    }
    host.engine().tensors(|_| Ok(())).await.unwrap();
    assert_eq!(done.load(Ordering::SeqCst), 10);
}

#[tokio::test]
async fn an_upload_that_says_nothing_ends_with_its_session() {
    let host = worker(MIB);
    let client = Client::open(&host).await;
    let kind = v1::upload_target::Kind::Create(wire_spec(&[1024]));
    let first = upload_chunk(kind, 0, vec![0; 4]);
    let chunks = tokio_stream::iter([first]).chain(tokio_stream::pending());
    let request = client.of(chunks);
    let mut raw = client.raw.clone();
    let upload = tokio::spawn(async move { raw.upload(request).await });
    while client.list().await.tensors.is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(client);
    let ended = tokio::time::timeout(Duration::from_secs(20), upload).await;
    assert_eq!(reason(ended.unwrap().unwrap()), Reason::SessionNotFound);
}

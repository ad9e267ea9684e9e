//! Long calls stop and make way between two nodes.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use hotcell_graph::wire;
use hotcell_proto::{
    error::Reason,
    v1::{self, TensorState, output_wish},
};
use tokio_stream::StreamExt;

use crate::{
    order::{BIG, long},
    support::*,
};

const MIB: u64 = 1 << 20;

#[tokio::test]
async fn a_cancelled_stream_stops_between_two_nodes() {
    let host = worker(256 * MIB);
    let client = Client::open(&host).await;
    // Two plans: one serves one call at a time.
    let (mut elsewhere, long) = (long(&client).await, long(&client).await);
    client.execute(long.clone()).await.unwrap();
    let ended = async || {
        let plans = client.list().await.plans;
        plans.iter().map(|p| p.executions).sum::<u64>()
    };
    assert_eq!(ended().await, 1);

    elsewhere.stream = 1;
    elsewhere.detached = true;
    let elsewhere = client.execute(elsewhere).await.unwrap();
    let running = client.execute(long.clone());
    let queued = client.execute(long.clone());
    let stop = async {
        runs_beside(&client, 3).await;
        client.cancel(0, false).await
    };
    let (running, queued, count) = tokio::join!(running, queued, stop);
    assert_eq!(
        (reason(running), reason(queued)),
        (Reason::Cancelled, Reason::Cancelled)
    );
    assert_eq!(count, 2);
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
    tokio::select! {
        answer = client.execute(long) => panic!("over too soon to tell: {answer:?}"),
        () = runs_beside(&client, 1) => {}
    }
    client.synchronize(None).await.unwrap();
    assert_eq!(client.list().await.tensors.len(), held);
    // None of them came to its last node.
    assert_eq!(ended().await, 1);
}

/// Waits until so many calls have results to come, and the engine has gone on with them.
async fn runs_beside(client: &Client, calls: usize) {
    loop {
        let tensors = client.list().await.tensors;
        let pending = tensors.iter().filter(|t| t.state() == TensorState::Pending);
        if pending.count() == calls {
            break;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // Each of these is answered between two turns.
    for _ in 0..calls {
        client.list().await;
    }
}

#[tokio::test]
async fn short_calls_do_not_wait_for_the_end_of_long_ones() {
    let host = worker(256 * MIB);
    let (slow, quick) = (Client::open(&host).await, Client::open(&host).await);
    let mut long = long(&slow).await;
    long.detached = true;
    let slow_call = slow.execute(long).await.unwrap();
    let result = kept(&slow_call, 0).handle.unwrap();
    runs_beside(&slow, 1).await;
    let plan = quick.compile(&add_graph(&[4])).await;
    for _ in 0..5 {
        let one = f32s(&[1.0; 4]);
        let request = call(&plan, vec![data(one.clone()), data(one)], vec![inline()]);
        quick.execute(request).await.unwrap();
    }
    // By then the long one has not come to its end.
    assert_eq!(slow.list().await.plans[0].executions, 0);
    slow.synchronize(slow_call.fence).await.unwrap();
    assert_eq!(slow.list().await.plans[0].executions, 1);
    assert_eq!(slow.download(&result).await[0], 0.0);
}

#[tokio::test]
async fn streams_of_one_session_share_the_engine_node_by_node() {
    let host = worker(512 * MIB);
    let client = Client::open(&host).await;
    let mut long = long(&client).await;
    (long.stream, long.detached) = (1, true);
    let first = client.execute(long.clone()).await.unwrap();
    // As much work in 40 calls of another stream, whose results nobody wants.
    let short = client.of(v1::CompileRequest {
        graph: Some(wire::encode(&chain(&[BIG], 50))),
        dry_run: false,
        no_fusion: true,
        encoded: Vec::new(),
    });
    let short = client.raw.clone().compile(short).await.unwrap();
    let short = short.into_inner().plan.unwrap();
    let drop = || vec![wish(output_wish::Kind::Drop(true))];
    let mut last = None;
    for _ in 0..40 {
        let mut request = call(&short, long.inputs.clone(), drop());
        (request.stream, request.detached) = (2, true);
        last = client.execute(request).await.unwrap().fence;
    }
    let counts = async || {
        let list = client.list().await;
        let of = |plan: &v1::Handle| {
            let found = list.plans.iter().find(|p| p.handle.as_ref() == Some(plan));
            found.unwrap().executions
        };
        (of(long.plan.as_ref().unwrap()), of(&short))
    };
    // The short ones are not behind the long one's last node, nor it behind the last of them.
    client.synchronize(first.fence).await.unwrap();
    let (long_done, short_done) = counts().await;
    assert_eq!(long_done, 1);
    assert!((5..=40).contains(&short_done), "{short_done} of 40");
    client.synchronize(last).await.unwrap();
    assert_eq!(counts().await, (1, 40));
    // The long one again, and one short call after the other beside it.
    let again = client.execute(long.clone()).await.unwrap();
    for _ in 0..3 {
        let request = call(&short, long.inputs.clone(), drop());
        client.execute(request).await.unwrap();
    }
    assert_eq!(counts().await, (1, 43));
    client.synchronize(again.fence).await.unwrap();
}

#[tokio::test]
async fn a_call_waits_for_the_events_it_names_though_it_reads_nothing_of_theirs() {
    let host = worker(256 * MIB);
    let client = Client::open(&host).await;
    let mut long = long(&client).await;
    (long.stream, long.detached) = (1, true);
    let plan = client.compile(&add_graph(&[4])).await;
    let short = |stream: u32, wait: Vec<v1::Fence>| {
        let one = f32s(&[1.0; 4]);
        let request = call(&plan, vec![data(one.clone()), data(one)], vec![inline()]);
        v1::ExecuteRequest {
            stream,
            wait,
            ..request
        }
    };
    let ended = async || {
        let plans = client.list().await.plans;
        let long = plans.iter().find(|p| p.handle == long.plan).unwrap();
        long.executions
    };
    let fence = client.execute(long.clone()).await.unwrap().fence.unwrap();
    // Whoever names no event overtakes.
    client.execute(short(2, vec![])).await.unwrap();
    assert_eq!(ended().await, 0);
    client.execute(short(3, vec![fence])).await.unwrap();
    assert_eq!(ended().await, 1);
    // Behind a call that waits, its stream waits.
    let fence = client.execute(long.clone()).await.unwrap().fence.unwrap();
    let mut waits = short(4, vec![fence]);
    (waits.detached, waits.outputs) = (true, vec![]);
    client.execute(waits).await.unwrap();
    client.execute(short(2, vec![])).await.unwrap();
    assert_eq!(ended().await, 1);
    client.execute(short(4, vec![])).await.unwrap();
    assert_eq!(ended().await, 2);
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

//! What a session may have at once: one more is refused by the limit's name, what is there goes on, and an end makes room.

use hotcell_proto::{
    error::{Error, Reason},
    limits::{MAX_SESSION_CALLS, MAX_SESSION_STREAMS},
    v1::{self, output_wish},
};
use tonic::Status;

use crate::{order::long_of, support::*};

const MIB: u64 = 1 << 20;

/// What is said of one more than there may be.
fn refused<T: std::fmt::Debug>(result: Result<T, Status>, limit: usize, what: &str) {
    let error = Error::typed(&result.unwrap_err()).unwrap();
    assert_eq!(error.reason(), Reason::QuotaExceeded, "{error:?}");
    assert_eq!(error.get("limit"), Some(limit.to_string().as_str()));
    let say = format!("the session may have {limit} {what} at most");
    assert!(error.message().starts_with(&say), "{error:?}");
}

/// A call whose result nobody wants.
fn small(plan: &v1::Handle) -> v1::ExecuteRequest {
    let one = f32s(&[1.0; 4]);
    let drop = wish(output_wish::Kind::Drop(true));
    call(plan, vec![data(one.clone()), data(one)], vec![drop])
}

#[tokio::test]
async fn calls_that_wait_or_run_are_counted_and_each_that_ends_makes_room_for_one() {
    let host = worker(256 * MIB);
    let (client, other) = (Client::open(&host).await, Client::open(&host).await);
    // One after the other: the first takes a good while, and the second is what all others wait for.
    let two = [long_of(&client, 8000).await, long_of(&client, 2000).await];
    let plan = client.compile(&add_graph(&[4])).await;
    let mut fences = Vec::new();
    for long in &two {
        let mut long = long.clone();
        (long.stream, long.detached) = (1, true);
        fences.push(client.execute(long).await.unwrap().fence.unwrap());
    }
    let (first, last) = (fences[0], fences[1]);
    let done = async || {
        let plans = client.list().await.plans;
        let done = |plan: &v1::Handle| {
            let found = plans.iter().find(|p| p.handle.as_ref() == Some(plan));
            found.unwrap().executions as usize
        };
        let long = two.iter().map(|long| done(long.plan.as_ref().unwrap()));
        (long.sum::<usize>(), done(&plan))
    };
    let waits = |stream: u32| {
        let request = small(&plan);
        v1::ExecuteRequest {
            stream,
            detached: true,
            wait: vec![last],
            ..request
        }
    };
    // Each is taken between two nodes of the first, which has eight times as many.
    for n in 2..MAX_SESSION_CALLS {
        client.execute(waits(2 + n as u32 % 7)).await.unwrap();
    }
    assert_eq!(done().await, (0, 0));
    let what = "calls that wait or run";
    for stream in [1, 2, 9] {
        refused(client.execute(waits(stream)).await, MAX_SESSION_CALLS, what);
        refused(client.execute(small(&plan)).await, MAX_SESSION_CALLS, what);
    }
    // So is one of many in a stream of calls, which goes on.
    let request = client.of(tokio_stream::iter([waits(2), small(&plan)]));
    let mut answers = client.raw.clone().execute_many(request).await.unwrap();
    for _ in 0..2 {
        let answer = answers.get_mut().message().await.unwrap().unwrap();
        assert_eq!(answer.error.unwrap().reason, "QUOTA_EXCEEDED");
    }
    assert!(answers.get_mut().message().await.unwrap().is_none());
    // Another session has calls of its own.
    let elsewhere = other.compile(&add_graph(&[4])).await;
    other.execute(small(&elsewhere)).await.unwrap();
    // What was refused is not there.
    assert_eq!(done().await, (0, 0));
    client.synchronize(Some(first)).await.unwrap();
    assert_eq!(done().await, (1, 0));
    // One has ended, so there is room for one, which nothing keeps waiting: it ends, and makes room for the next.
    for n in 1..4 {
        client.execute(small(&plan)).await.unwrap();
        assert_eq!(done().await, (1, n));
    }
    client.execute(waits(2)).await.unwrap();
    refused(client.execute(waits(3)).await, MAX_SESSION_CALLS, what);
    // Without what they wait for, all that were taken are done: those first ones, three small ones, and one more.
    assert_eq!(client.cancel(1, false).await, 1);
    client.synchronize(None).await.unwrap();
    assert_eq!(done().await, (1, MAX_SESSION_CALLS - 2 + 3 + 1));
    client.execute(waits(2)).await.unwrap();
    client.synchronize(None).await.unwrap();
}

#[tokio::test]
async fn streams_are_counted_and_what_was_refused_takes_no_place() {
    let host = worker(256 * MIB);
    let (client, other) = (Client::open(&host).await, Client::open(&host).await);
    let plan = client.compile(&add_graph(&[4])).await;
    let on = |stream: u32| v1::ExecuteRequest {
        stream,
        ..small(&plan)
    };
    let ids = |n: usize| (n as u32).wrapping_mul(0x9e37_79b1);
    for n in 0..MAX_SESSION_STREAMS - 1 {
        client.execute(on(ids(n))).await.unwrap();
    }
    // A call that is refused has no stream.
    let mut wrong = on(ids(1000));
    wrong.inputs.pop();
    assert_eq!(reason(client.execute(wrong).await), Reason::GraphInvalid);
    client.execute(on(ids(MAX_SESSION_STREAMS))).await.unwrap();
    for n in [MAX_SESSION_STREAMS - 1, 1000, 1001] {
        let more = client.execute(on(ids(n))).await;
        refused(more, MAX_SESSION_STREAMS, "streams");
    }
    // Those that are there go on, and another session has its own.
    for n in 0..MAX_SESSION_STREAMS - 1 {
        client.execute(on(ids(n))).await.unwrap();
    }
    let elsewhere = other.compile(&add_graph(&[4])).await;
    for stream in 0..MAX_SESSION_STREAMS as u32 {
        let request = small(&elsewhere);
        let request = v1::ExecuteRequest { stream, ..request };
        other.execute(request).await.unwrap();
    }
}

//! Debuggers that do not read: nobody waits for them, what they miss is counted, and a worker's memory stays where it is.

use std::time::Duration;

use hotcell_client::{Client, GenerateOptions, v1};
use hotcell_tests::cluster::{SOON, resident};

use super::{kjv_cluster, long};

/// Bytes that a worker may come to hold for those who do not read.
const MOST: i64 = 96 << 20;

fn options(id: &str, tokens: u32) -> GenerateOptions {
    GenerateOptions {
        max_tokens: tokens,
        deadline: Some(SOON * 2),
        ..long(id)
    }
}

async fn said(client: &Client, id: &str, tokens: u32) -> Vec<u32> {
    let stream = client
        .generate("In the beginning", options(id, tokens))
        .await;
    stream.unwrap().complete().await.unwrap().token_ids
}

#[tokio::test]
async fn a_watcher_that_does_not_read_misses_samples_and_is_told_how_many() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let every = Duration::from_millis(50);
    let mut samples = client.watch_worker("w0", every).await.unwrap();
    let first = samples.next().await.unwrap().unwrap();
    assert_eq!(first.missed, 0);
    // Far more than may wait on the way: windows hold some.
    tokio::time::sleep(Duration::from_secs(4)).await;
    let begun = std::time::Instant::now();
    let (mut missed, mut read) = (0, 0);
    // Once it reads again it is told, and misses no more.
    loop {
        let sample = samples.next().await.unwrap().unwrap();
        (missed, read) = (missed + sample.missed, read + 1);
        if begun.elapsed() > Duration::from_millis(500) {
            assert_eq!(sample.missed, 0, "{missed} of {read}");
            break;
        }
    }
    println!("{missed} missed, {read} read");
}

#[tokio::test]
async fn a_worker_serves_on_beside_debuggers_that_do_not_read() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let expected = said(&client, "before", 400).await;
    let pid = client.workers().await.unwrap()[0].pid;

    let every = Duration::from_millis(50);
    let _watch = client.watch_worker("w0", every).await.unwrap();
    let _trace = client
        .trace_worker("w0", Duration::from_secs(60), true)
        .await
        .unwrap();
    let above = v1::Condition {
        kind: Some(v1::condition::Kind::Above(0.0)),
    };
    let guard = v1::GuardRequest {
        conditions: vec![above],
        ..v1::GuardRequest::default()
    };
    let mut hits = client.guard(guard).await.unwrap();
    let capture = v1::CaptureRequest {
        which: Some(v1::capture_request::Which::RequestId("first".into())),
        options: Some(v1::CaptureOptions {
            values: u32::MAX,
            max_bytes: 4 << 30,
            reveal: true,
            ..v1::CaptureOptions::default()
        }),
        ..v1::CaptureRequest::default()
    };
    let mut captured = client.capture(capture).await.unwrap();
    // The second pass shows whether it goes on growing.
    assert_eq!(said(&client, "first", 400).await, expected);
    let once = resident(pid).unwrap();
    for pass in 0..3 {
        assert_eq!(said(&client, &format!("pass{pass}"), 400).await, expected);
    }
    let grown = resident(pid).unwrap() - once;
    assert!(grown < MOST, "{grown} more bytes after three passes");

    // What each of them missed is told once it reads.
    let mut left_out = 0;
    let end = loop {
        let message = tokio::time::timeout(SOON, captured.next()).await.unwrap();
        match message.unwrap().unwrap().kind.unwrap() {
            v1::captured::Kind::Token(token) => left_out += token.missed,
            v1::captured::Kind::End(end) => break end,
            _ => {}
        }
    };
    assert!(
        end.tokens + left_out <= 400,
        "{} and {left_out}",
        end.tokens
    );
    let mut missed = 0;
    let reading = async {
        while missed == 0 {
            let event = hits.next().await.unwrap().unwrap();
            if let Some(v1::guard_event::Kind::Hit(hit)) = event.kind {
                missed += hit.missed;
            }
            // Only with a hit after it it is told how many were missed before.
            if missed == 0 {
                continue;
            }
        }
    };
    let more = async {
        for pass in 0..10 {
            said(&client, &format!("more{pass}"), 50).await;
        }
    };
    tokio::select! {
        () = async { tokio::join!(reading, more); } => {}
        () = tokio::time::sleep(SOON * 2) => panic!("nothing says what was missed"),
    }
}

//! Debuggers that do not read: nobody waits for them, what they miss is counted, and a worker's memory stays where it is.

use std::time::{Duration, Instant};

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
async fn a_worker_serves_on_beside_debuggers_that_do_not_read() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let expected = said(&client, "before", 200).await;
    let pid = client.workers().await.unwrap()[0].pid;

    let every = Duration::from_millis(50);
    let mut samples = client.watch_worker("w0", every).await.unwrap();
    let begun = Instant::now();
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
    assert_eq!(said(&client, "first", 200).await, expected);
    let once = resident(pid).unwrap();
    for pass in 0..2 {
        assert_eq!(said(&client, &format!("pass{pass}"), 200).await, expected);
    }
    let grown = resident(pid).unwrap() - once;
    assert!(grown < MOST, "{grown} more bytes after two passes");

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
        end.tokens + left_out <= 200,
        "{} and {left_out}",
        end.tokens
    );
    // Each step met the condition: those of which nothing is told are counted.
    let mut met = 0;
    let quiet = Duration::from_secs(1);
    let mut pass = 0;
    while pass < 2 {
        match tokio::time::timeout(quiet, hits.next()).await {
            Ok(event) => {
                if let Some(v1::guard_event::Kind::Hit(hit)) = event.unwrap().unwrap().kind {
                    met += 1 + hit.missed;
                }
            }
            // What was missed at last is told with the next one.
            Err(_) => {
                said(&client, &format!("more{pass}"), 2).await;
                pass += 1;
            }
        }
    }
    assert!(met >= 3 * 200, "{met}");
    let (until, mut covered) = (begun.elapsed(), 0.0);
    while covered < until.as_secs_f64() * 1e3 * 0.8 {
        let sample = tokio::time::timeout(SOON, samples.next()).await.unwrap();
        let sample = sample.unwrap().unwrap();
        covered += sample.span_ms * (1 + sample.missed) as f64;
        assert!(begun.elapsed() < until * 2, "{covered} of {until:?}");
    }
}

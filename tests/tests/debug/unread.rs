//! Debuggers that do not read: nobody waits for them, what they miss is counted, and a worker's memory stays where it is.

use std::time::{Duration, Instant};

use hotcell_client::{Client, Event, GenerateOptions, v1};
use hotcell_tests::{
    cluster::{SOON, resident},
    debugged::spans,
};

use super::{guards::at, kjv_cluster, long};

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
    let guard = at(&[], &[v1::condition::Kind::Above(0.0)]);
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

/// Of each step that is computed in a while, the last place in its plan of a node, the first of them first: a plan that hands
/// out every node has more places.
async fn last_places(client: &Client) -> Vec<u32> {
    let time = Duration::from_millis(200);
    let pieces = client.trace_worker("w0", time, true).await.unwrap();
    let spans = spans(pieces).await.unwrap();
    let of = |track: v1::TraceTrack| spans.iter().filter(move |span| span.track() == track);
    let places = of(v1::TraceTrack::Device).map(|step| {
        let within = step.begin_ns..step.begin_ns + step.duration_ns;
        let nodes = of(v1::TraceTrack::Nodes).filter(|node| within.contains(&node.begin_ns));
        nodes.map(|node| node.step).max()
    });
    // Not all steps' nodes are told.
    let mut places: Vec<u32> = places.flatten().collect();
    places.sort_unstable();
    assert!(places.len() > 2, "{places:?}");
    places
}

#[tokio::test]
async fn steps_that_nobody_has_room_to_see_are_computed_as_any() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    // Of a stream, once it has drawn so many tokens.
    let places = async |id: &str, drawn: usize| {
        let options = GenerateOptions {
            no_speculation: true,
            ..options(id, 950)
        };
        let stream = client.generate("In the beginning", options).await;
        let mut stream = stream.unwrap();
        let mut tokens = 0;
        while tokens < drawn {
            if let Event::Delta(delta) = stream.next().await.unwrap().unwrap() {
                tokens += delta.token_ids.len();
            }
        }
        let places = last_places(&client).await;
        stream.complete().await.unwrap();
        places
    };
    let plain = places("plain", 1).await;
    let usual = plain[plain.len() / 2];
    let capture = |id: &str| {
        let options = v1::CaptureOptions {
            values: u32::MAX,
            max_bytes: 4 << 30,
            ..v1::CaptureOptions::default()
        };
        client.capture(v1::CaptureRequest {
            which: Some(v1::capture_request::Which::RequestId(id.to_owned())),
            options: Some(options),
            ..v1::CaptureRequest::default()
        })
    };
    let mut captured = capture("read").await.unwrap();
    let reads = tokio::spawn(async move { while captured.next().await.is_some() {} });
    let seen = places("read", 1).await;
    assert!(seen[seen.len() - 1] > usual, "{seen:?} {plain:?}");
    reads.await.unwrap();
    let _unread = capture("unread").await.unwrap();
    let unread = places("unread", 600).await;
    assert_eq!(unread[unread.len() / 2], usual, "{unread:?} {plain:?}");
}

//! Watchpoints at what makes logits: the model's head, which has rows of those tokens only that are drawn.

use std::collections::BTreeMap;

use hotcell_client::{
    Client, GenerateOptions, Reason,
    v1::{self, capture_request::Which, captured, condition::Kind, guard_event},
};
use hotcell_tests::cluster::{Cluster, SOON};
use tokio::time::timeout;

use super::{
    guards::{armed, at},
    kjv_cluster, long,
};

const TOKENS: u32 = 24;

fn options(id: &str) -> GenerateOptions {
    GenerateOptions {
        max_tokens: TOKENS,
        ignore_eos: true,
        ..long(id)
    }
}

/// Hits until one is of this token.
async fn hits(
    events: &mut hotcell_client::control::Messages<v1::GuardEvent>,
    last: u64,
) -> Vec<v1::GuardHit> {
    let mut hits = Vec::new();
    while hits
        .last()
        .is_none_or(|hit: &v1::GuardHit| hit.token < last)
    {
        let event = timeout(SOON, events.next()).await.unwrap();
        match event.unwrap().unwrap().kind {
            Some(guard_event::Kind::Hit(hit)) => hits.push(hit),
            other => panic!("{other:?}"),
        }
    }
    hits
}

async fn cluster() -> (Cluster, Client) {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    (cluster, client)
}

#[tokio::test]
async fn what_a_watchpoint_says_of_logits_is_what_a_capture_has_of_them() {
    let (_cluster, client) = cluster().await;
    let guard = at(&["logits"], &[Kind::Above(0.0)]);
    let (nodes, mut events) = armed(&client, guard).await;
    assert_eq!(nodes, 1);
    let request = v1::CaptureRequest {
        which: Some(Which::RequestId("both".to_owned())),
        options: Some(v1::CaptureOptions {
            only_logits: true,
            ..v1::CaptureOptions::default()
        }),
        ..v1::CaptureRequest::default()
    };
    let mut captured = client.capture(request).await.unwrap();
    let stream = client.generate("In the beginning", options("both"));
    let whole = tokio::spawn(stream.await.unwrap().complete());
    let mut expected = BTreeMap::new();
    while let Some(said) = captured.next().await {
        if let Some(captured::Kind::Token(token)) = said.unwrap().kind {
            assert_eq!((token.nodes.len(), token.missed), (1, 0));
            let of = &token.nodes[0];
            let peak = of.greatest.abs().max(of.least.abs());
            expected.insert(token.index, (token.position, peak, of.rms));
        }
    }
    assert_eq!(
        whole.await.unwrap().unwrap().token_ids.len(),
        TOKENS as usize
    );
    assert_eq!(expected.len(), TOKENS as usize);
    let hits = hits(&mut events, u64::from(TOKENS) - 1).await;
    assert_eq!(hits.len(), TOKENS as usize);
    for hit in hits {
        let (position, peak, rms) = expected[&hit.token];
        let node = hit.node.unwrap();
        assert_eq!((node.name.as_str(), node.layer), ("logits", None));
        assert_eq!((hit.position, hit.further), (position, 0));
        assert_eq!(f64::from(hit.peak), peak, "token {}", hit.token);
        let off = (f64::from(hit.rms) - rms).abs();
        assert!(off < 1e-4 * rms, "token {}: {} {rms}", hit.token, hit.rms);
    }
}

/// Guesses have rows of their own, whether they are right or not.
#[tokio::test]
async fn every_token_is_looked_at_once_beside_others_and_where_tokens_are_guessed() {
    let (_cluster, client) = cluster().await;
    let guard = at(&["head.*", "logits"], &[Kind::Above(0.0)]);
    let (nodes, mut events) = armed(&client, guard).await;
    assert!(nodes > 1, "{nodes}");
    let prompts = ["begat Isaac; and Isaac begat Jacob; and Jacob begat", "In"];
    let mut streams = Vec::new();
    for (number, prompt) in prompts.into_iter().enumerate() {
        let options = options(&format!("one-{number}"));
        let stream = client.generate(prompt, options).await.unwrap();
        streams.push(tokio::spawn(stream.complete()));
    }
    for stream in streams {
        stream.await.unwrap().unwrap();
    }
    let mut of: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    while of.values().map(Vec::len).sum::<usize>() < 2 * TOKENS as usize {
        let event = timeout(SOON, events.next()).await.expect("all are told");
        let Some(guard_event::Kind::Hit(hit)) = event.unwrap().unwrap().kind else {
            continue;
        };
        let node = hit.node.unwrap();
        assert!(node.name.starts_with("head."), "{}", node.name);
        assert_eq!(hit.further + 1, nodes, "all of them are of that row");
        assert_eq!(hit.missed, 0);
        of.entry(hit.request_id).or_default().push(hit.token);
    }
    let all: Vec<u64> = (0..u64::from(TOKENS)).collect();
    assert_eq!(of.into_values().collect::<Vec<_>>(), [all.clone(), all]);
}

#[tokio::test]
async fn a_request_ends_at_its_logits() {
    let (_cluster, client) = cluster().await;
    let range = v1::Range {
        least: 0.0,
        most: 1e-3,
    };
    let mut guard = at(&["logits"], &[Kind::RmsOutside(range)]);
    guard.end = true;
    let (_, mut events) = armed(&client, guard).await;
    let stream = client.generate("In the beginning", options("ends"));
    let error = match stream.await {
        Ok(stream) => stream.complete().await.unwrap_err(),
        Err(error) => error,
    };
    assert_eq!(error.reason(), Reason::NumericsFailed);
    assert!(error.message().contains("at node logits"), "{error}");
    let hits = hits(&mut events, 0).await;
    assert!(hits[0].ended && hits[0].token == 0);
    // Nodes of layers are not among them.
    let mut of_layer = at(&["logits"], &[Kind::Nan(true)]);
    of_layer.layers = vec![0];
    let refused = match client.guard(of_layer).await {
        Ok(mut events) => events.next().await.unwrap().unwrap_err(),
        Err(error) => error,
    };
    assert!(refused.message().contains("no node"), "{refused}");
}

//! Whoever is looked at stands back where others' prompts are read, which would wait for the values that are handed out.

use hotcell_client::{
    GenerateOptions, Prompt,
    v1::{self, TraceTrack, capture_request::Which, captured, trace_piece},
};

use hotcell_tests::cluster::SOON;

use super::{kjv_cluster, long};

/// Tokens of the one that is looked at, of others' prompts, and how many of these come.
const TOKENS: u32 = 900;
const PROMPT: u32 = 40;
const OTHERS: u32 = 12;

#[tokio::test(flavor = "multi_thread")]
async fn others_prompts_are_read_beside_nobody_who_is_looked_at() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let options = GenerateOptions {
        max_tokens: TOKENS,
        no_speculation: true,
        ..long("looked-at")
    };
    let undisturbed = GenerateOptions {
        request_id: String::new(),
        ..options.clone()
    };
    let expected = client
        .generate("In the beginning", undisturbed)
        .await
        .unwrap();
    let expected = expected.complete().await.unwrap().token_ids;

    // Of little, so that whoever tells it has always room for more.
    let request = v1::CaptureRequest {
        which: Some(Which::RequestId("looked-at".to_owned())),
        options: Some(v1::CaptureOptions {
            only_logits: true,
            ..v1::CaptureOptions::default()
        }),
        ..v1::CaptureRequest::default()
    };
    let mut captured = client.capture(request).await.unwrap();
    let mut stream = client.generate("In the beginning", options).await.unwrap();
    stream.next().await.unwrap().unwrap();
    let whole = tokio::spawn(stream.complete());
    let looks = tokio::spawn(async move {
        let mut tokens = 0;
        while let Some(said) = captured.next().await {
            if let Some(captured::Kind::Token(token)) = said.unwrap().kind {
                tokens += u64::from(!token.more);
            }
        }
        tokens
    });
    let mut pieces = client.trace_worker("w0", SOON, false).await.unwrap();
    pieces.next().await.unwrap().unwrap();
    for other in 0..OTHERS {
        let ids = (0..PROMPT).map(|n| 300 + 50 * other + n).collect();
        let options = GenerateOptions {
            max_tokens: 1,
            ..GenerateOptions::default()
        };
        let stream = client.generate(Prompt::Ids(ids), options).await.unwrap();
        stream.complete().await.unwrap();
    }
    let mut steps = Vec::new();
    let of = |steps: &[v1::TraceSpan], reads: bool| {
        let its = steps.iter().filter(|step| (step.reading > 1) == reads);
        its.map(|step| step.sequences).collect::<Vec<_>>()
    };
    // All of them were read by now.
    while of(&steps, true).len() < OTHERS as usize {
        let piece = pieces.next().await.unwrap();
        if let Some(trace_piece::Kind::Spans(some)) = piece.unwrap().kind {
            let its = some.spans.into_iter();
            steps.extend(its.filter(|span| span.track() == TraceTrack::Steps));
        }
    }
    drop(pieces);
    // It was there all the time, in steps of its own.
    assert!(of(&steps, false).contains(&1), "{steps:?}");
    let reading = of(&steps, true);
    let alone = reading.iter().filter(|sequences| **sequences == 1).count();
    // It stands back but once in a row.
    assert!(2 * alone >= reading.len(), "{reading:?}");
    let drawn = whole.await.unwrap().unwrap().token_ids;
    // The first may have been taken already.
    assert!(drawn.len() + 1 >= expected.len() && expected.ends_with(&drawn));
    assert!(looks.await.unwrap() > 50);
}

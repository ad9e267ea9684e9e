//! Whoever is looked at stands back where others' prompts are read, which would wait for the values that are handed out.

use hotcell_client::{
    Event, GenerateOptions, Prompt,
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
    let looks = tokio::spawn(async move {
        let mut tokens = 0;
        while let Some(said) = captured.next().await {
            if let Some(captured::Kind::Token(token)) = said.unwrap().kind {
                tokens += u64::from(!token.more);
            }
        }
        tokens
    });
    let mut stream = client.generate("In the beginning", options).await.unwrap();
    // Its own prompt is read before the trace begins.
    let mut drawn = Vec::new();
    while drawn.is_empty() {
        if let Event::Delta(delta) = stream.next().await.unwrap().unwrap() {
            drawn.extend(delta.token_ids);
        }
    }
    let whole = tokio::spawn(stream.complete());
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
    assert!(!whole.is_finished(), "it ended before the last prompt");
    let reads = |step: &v1::TraceSpan| step.reading > 0;
    let mut steps: Vec<v1::TraceSpan> = Vec::new();
    // All prompts were read by now, and it draws on after them.
    while steps.iter().map(|step| step.reading).sum::<u32>() < OTHERS * PROMPT
        || steps.last().is_none_or(reads)
    {
        let piece = pieces.next().await;
        let piece = piece.unwrap_or_else(|| panic!("the trace has no more: {steps:?}"));
        if let Some(trace_piece::Kind::Spans(some)) = piece.unwrap().kind {
            let its = some.spans.into_iter();
            steps.extend(its.filter(|span| span.track() == TraceTrack::Steps));
            steps.sort_by_key(|step| step.begin_ns);
        }
    }
    drop(pieces);
    let (first, last) = (
        steps.iter().position(reads).unwrap(),
        steps.iter().rposition(reads).unwrap(),
    );
    let all = &steps[first..=last];
    let reading: Vec<_> = all.iter().filter(|step| reads(step)).collect();
    let alone = reading.iter().filter(|step| step.sequences == 1).count();
    // It stands back but once in a row.
    assert!(2 * alone >= reading.len(), "{reading:?}");
    // From each prompt to the next it draws: in steps of its own, or beside who reads.
    assert!(all.len() - alone >= OTHERS as usize - 1, "{all:?}");
    drawn.extend(whole.await.unwrap().unwrap().token_ids);
    assert!(drawn == expected);
    assert!(looks.await.unwrap() > 50);
}

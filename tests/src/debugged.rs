//! Looking into a worker, whatever its backend: what a debugger's calls give of one that computes as it should.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context, Result, ensure};
use hotcell_client::{
    Client, Error, GenerateOptions, Prompt,
    control::Messages,
    debug::{Recorder, Recording, compare, liken},
    v1::{
        self, TraceTrack, capture_request, condition, guard_event, replay_request,
        trace_piece::Kind,
    },
};
use tokio::time::timeout;

use crate::cluster::SOON;

/// A model's node of each kind that every architecture has, and one that comes last.
const NODES: [&str; 3] = ["layers.0.rms_norm.0", "layers.4.mul_mat.6", "logits"];

/// Tokens that are looked at.
const TOKENS: u32 = 10;

/// Steps of a trace.
const STEPS: u32 = 6;

/// All spans of a trace, read to its end.
///
/// # Errors
/// The trace's.
pub async fn spans(mut pieces: Messages<v1::TracePiece>) -> Result<Vec<v1::TraceSpan>> {
    let mut spans = Vec::new();
    while let Some(piece) = pieces.next().await {
        if let Some(Kind::Spans(some)) = piece?.kind {
            spans.extend(some.spans);
        }
    }
    Ok(spans)
}

/// A capture of a request of this id.
pub fn of(id: &str, options: Option<v1::CaptureOptions>) -> v1::CaptureRequest {
    v1::CaptureRequest {
        which: Some(capture_request::Which::RequestId(id.to_owned())),
        options,
        ..v1::CaptureRequest::default()
    }
}

/// All that a capture tells.
///
/// # Errors
/// What it ends with.
pub async fn put_together(mut told: Messages<v1::Captured>) -> Result<Recording, Error> {
    let (mut recorder, mut tokens) = (Recorder::default(), Vec::new());
    while let Some(message) = told.next().await {
        tokens.extend(recorder.push(message?)?);
    }
    Ok(Recording {
        head: recorder.head().cloned().unwrap_or_default(),
        tokens,
        end: recorder.end().cloned(),
        ..Recording::default()
    })
}

/// The request of a capture, to go on from where that began.
///
/// # Errors
/// It did not tell it.
pub fn again(
    recording: &Recording,
    options: Option<v1::CaptureOptions>,
) -> Result<v1::ReplayRequest> {
    let request = recording.head.request.clone();
    let mut request = request.context("the request was not revealed")?;
    request.model.clone_from(&recording.head.model);
    let begun = request.resume.as_ref().context("nothing to resume")?;
    let at = begun.generated_ids.len() as u64;
    Ok(v1::ReplayRequest {
        which: Some(replay_request::Which::Request(request)),
        at,
        options,
        ..v1::ReplayRequest::default()
    })
}

fn whole() -> Option<v1::CaptureOptions> {
    Some(v1::CaptureOptions {
        reveal: true,
        values: u32::MAX,
        ..v1::CaptureOptions::default()
    })
}

async fn draw(client: &Client, id: &str) -> Result<Vec<u32>> {
    let options = GenerateOptions {
        max_tokens: TOKENS,
        ignore_eos: true,
        no_speculation: true,
        seed: Some(0),
        request_id: id.to_owned(),
        deadline: Some(SOON),
        ..GenerateOptions::default()
    };
    let prompt = Prompt::Text("In the beginning".to_owned());
    let stream = client.generate(prompt, options).await?;
    Ok(stream.complete().await?.token_ids)
}

/// Watchpoints at all nodes: none is hit of what is right, and each of what every row meets.
async fn guarded(client: &Client) -> Result<Vec<u32>> {
    let when = |kind| v1::GuardRequest {
        conditions: vec![v1::Condition { kind: Some(kind) }],
        reveal: true,
        ..v1::GuardRequest::default()
    };
    let mut quiet = client.guard(when(condition::Kind::Nan(true))).await?;
    let armed = quiet.next().await.context("not armed")??;
    let Some(guard_event::Kind::Armed(nodes)) = armed.kind else {
        anyhow::bail!("{armed:?}");
    };
    ensure!(nodes > 50, "{nodes} nodes are looked at");
    let drawn = draw(client, "guarded").await?;
    let hit = timeout(Duration::from_millis(300), quiet.next()).await;
    ensure!(hit.is_err(), "a number is none: {hit:?}");
    drop(quiet);
    let mut loud = client.guard(when(condition::Kind::Above(0.0))).await?;
    loud.next().await.context("not armed")??;
    draw(client, "hit").await?;
    let hit = timeout(SOON, loud.next()).await?.context("no hit")??;
    let Some(guard_event::Kind::Hit(hit)) = hit.kind else {
        anyhow::bail!("{hit:?}");
    };
    ensure!(hit.request_id == "hit" && hit.peak > 0.0, "{hit:?}");
    ensure!(hit.rms > 0.0 && hit.rms <= hit.peak, "{hit:?}");
    Ok(drawn)
}

/// The spans of some steps with a request in them, which name these ops and are of these nodes. `whole`: no node runs as
/// several that it is made of.
async fn traced(
    client: &Client,
    ops: &[&str],
    nodes: &[v1::CapturedNode],
    whole: bool,
) -> Result<Vec<v1::TraceSpan>> {
    let request = v1::TraceRequest {
        nodes: true,
        steps: STEPS,
        ..v1::TraceRequest::default()
    };
    let mut pieces = client.trace(request).await?;
    pieces.next().await.context("no head")??;
    draw(client, "traced").await?;
    let spans = spans(pieces).await?;
    let of = |track: TraceTrack| spans.iter().filter(move |span| span.track() == track);
    let steps = of(TraceTrack::Steps).count();
    ensure!(steps == STEPS as usize, "{steps} steps");
    let names: BTreeSet<_> = of(TraceTrack::Nodes).map(|span| &*span.name).collect();
    for op in ops {
        ensure!(names.contains(op), "no {op} among {names:?}");
    }
    // By what a capture calls them, where a node was replaced by others as well; what is drawn of logits has no name.
    let nodes: BTreeSet<_> = nodes.iter().map(|node| &*node.name).collect();
    for span in of(TraceTrack::Nodes).filter(|span| span.name != "draw") {
        let is_its = span.node == "logits" || span.node.contains(&format!("{}.", span.name));
        ensure!(
            is_its || !whole && nodes.contains(&*span.node),
            "{} is called {:?}",
            span.name,
            span.node
        );
    }
    for what in ["rows", "picks"] {
        let copied = |span: &&v1::TraceSpan| span.name == what && span.bytes > 0;
        let found = of(TraceTrack::Copies).find(copied);
        ensure!(found.is_some(), "no copies of {what}");
    }
    Ok(spans)
}

/// Looks at a model `kjv` in every way, and at what `reference`, a scheduler with a CPU worker, computes for the same
/// request. Returns the spans of a trace, which name `ops`: where nodes run as one
/// step, the last of them.
///
/// # Errors
/// The first way that does not give what it should.
pub async fn looked_into(
    client: &Client,
    reference: &Client,
    reproducible: bool,
    ops: &[&str],
) -> Result<Vec<v1::TraceSpan>> {
    let expected = guarded(client).await?;
    ensure!(expected.len() == TOKENS as usize, "{expected:?}");
    let told = client.capture(of("looked", whole())).await?;
    let capture = tokio::spawn(put_together(told));
    ensure!(draw(client, "looked").await? == expected, "other tokens");
    let seen = timeout(SOON, capture).await???;
    ensure!(!seen.tokens.is_empty() && seen.end.is_some(), "not seen");
    for name in NODES {
        let found = seen.head.nodes.iter().any(|node| node.name == name);
        ensure!(found, "no {name}");
    }
    for token in &seen.tokens {
        let drawn = usize::try_from(token.index)
            .ok()
            .and_then(|at| expected.get(at));
        ensure!(token.token.as_ref() == drawn, "{token:?}");
        let right = |row: &v1::NodeValues| row.nan == 0 && row.infinite == 0 && row.rms >= 0.0;
        ensure!(token.nodes.iter().all(right), "a value is no number");
    }
    // The whole request, from its prompt on: by its id, and then by itself on another backend.
    let by_id = v1::ReplayRequest {
        which: Some(replay_request::Which::RequestId("looked".to_owned())),
        options: whole(),
        expected: expected.clone(),
        ..v1::ReplayRequest::default()
    };
    let replayed = put_together(client.replay(by_id).await?).await?;
    let end = replayed.end.clone().context("the replay broke off")?;
    ensure!(end.as_expected == u64::from(TOKENS), "{end:?}");
    let compared = compare(&replayed, &seen);
    ensure!(compared.tokens == seen.tokens.len(), "{compared:?}");
    ensure!(
        !reproducible || compared.first.is_none(),
        "{:?}",
        compared.first
    );
    let other = reference.replay(again(&replayed, whole())?).await?;
    let other = put_together(other).await?;
    let other_class = |one: &Recording| one.head.numerics.as_ref().map(|n| n.id.clone());
    ensure!(
        other_class(&other) != other_class(&seen),
        "the same backend"
    );
    let likeness = liken(&replayed, &other, 1.0);
    ensure!(likeness.tokens == u64::from(TOKENS), "{}", likeness.tokens);
    ensure!(likeness.same() < likeness.rows(), "another backend's bits");
    let beyond = likeness.first_beyond();
    ensure!(beyond.is_none(), "{beyond:?}");
    traced(client, ops, &seen.head.nodes, reproducible).await
}

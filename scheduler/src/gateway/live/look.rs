//! Gathers what the live page shows, for as long as it is open. Workers that do not answer are shown as they were.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use hotcell_proto::{
    error::{Error, Reason},
    limits,
    v1::{TraceEnd, TraceRequest, TraceSpan, TraceTrack, WatchRequest, trace_piece::Kind},
};
use serde_json::{Value, json};
use tokio::{
    sync::{broadcast::error::RecvError, mpsc},
    time::{MissedTickBehavior, interval, timeout},
};
use tokio_util::task::AbortOnDropHandle;

use super::{
    super::sse::{Gone, Out},
    tell,
};
use crate::{
    events::missed,
    fleet::{Fleet, Link, believe_sample, believe_traced},
    service::Shared,
};

/// How often the page is told how things are.
const EVERY: Duration = Duration::from_secs(1);
/// Samples that wait for the page; it is told of the latest ones when it reads again.
const AHEAD: usize = 32;
/// How long a page may read nothing before it is left.
const STALLED: Duration = Duration::from_secs(30);
/// Workers that are looked into; the others are listed only.
const WATCHED: usize = 64;
/// Milliseconds that the page traces, at most.
const MOST_TRACED: u32 = 5000;
/// Spans of one timeline.
const SPANS: usize = 20_000;
/// Nodes that are told of it.
const LONGEST: usize = 20;

/// Tells the page what happens, until it is closed.
pub(super) async fn show(shared: Shared, out: Out) -> Result<(), Gone> {
    let (to, mut samples) = mpsc::channel(AHEAD);
    let mut watched: BTreeMap<(String, u64), AbortOnDropHandle<()>> = BTreeMap::new();
    let mut events = shared.fleet.events.watch();
    let mut ticks = interval(EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        let (name, told) = tokio::select! {
            () = shared.abort.cancelled() => return Ok(()),
            _ = ticks.tick() => {
                follow(&shared.fleet, &mut watched, &to);
                let workers = shared.fleet.workers_and_caches().await;
                ("state", tell::state(&shared, &workers))
            }
            Some(sample) = samples.recv() => ("sample", sample),
            event = events.recv() => match event {
                Ok(event) => ("event", tell::event(&event)),
                Err(RecvError::Lagged(count)) => ("event", tell::event(&missed(count))),
                Err(RecvError::Closed) => return Ok(()),
            },
        };
        let sent = timeout(STALLED, out.event(name, &told)).await;
        sent.unwrap_or(Err(Gone))?;
    }
}

/// Looks into the workers that serve now, and into no others.
fn follow(
    fleet: &Arc<Fleet>,
    watched: &mut BTreeMap<(String, u64), AbortOnDropHandle<()>>,
    to: &mpsc::Sender<Value>,
) {
    let links: Vec<Arc<Link>> = fleet
        .workers()
        .iter()
        .take(WATCHED)
        .filter_map(|worker| fleet.for_debug(&worker.id).ok())
        .collect();
    let key = |link: &Link| (link.worker.clone(), link.epoch);
    watched.retain(|one, task| !task.is_finished() && links.iter().any(|link| key(link) == *one));
    for link in links {
        watched
            .entry(key(&link))
            .or_insert_with(|| AbortOnDropHandle::new(tokio::spawn(watch(link, to.clone()))));
    }
}

/// Passes one worker's samples on. Whoever looks after this begins again when it ended.
async fn watch(link: Arc<Link>, to: mpsc::Sender<Value>) {
    let request = WatchRequest {
        worker: String::new(),
        interval_ms: u32::try_from(EVERY.as_millis()).unwrap_or(u32::MAX),
    };
    let asked = async {
        let mut client = link.debug().await?;
        let samples = client.watch(request).await;
        match samples {
            Ok(samples) => Ok(samples.into_inner()),
            Err(status) => Err(link.said(&status).await),
        }
    };
    let mut samples = match asked.await {
        Ok(samples) => samples,
        Err(error) => {
            tracing::debug!(worker = link.worker, %error, "the live page does not see a worker");
            return;
        }
    };
    while let Ok(Some(sample)) = samples.message().await {
        let told = tell::sample(&believe_sample(sample, &link));
        // A page that does not read misses some.
        if let Err(mpsc::error::TrySendError::Closed(_)) = to.try_send(told) {
            return;
        }
    }
}

/// What a worker does for a while, as a timeline.
///
/// # Errors
/// [`Reason::InvalidArgument`] for one that is too long, [`Reason::NoWorker`], what the worker says.
pub(super) async fn trace(shared: &Shared, worker: &str, ms: u32) -> Result<Value, Error> {
    if !(1..=MOST_TRACED).contains(&ms) {
        let what = format!("a trace of {ms} ms; the page takes 1 to {MOST_TRACED} ms");
        return Err(Error::new(Reason::InvalidArgument, what));
    }
    let link = shared.fleet.for_debug(worker)?;
    let mut client = link.debug().await?;
    let asked = TraceRequest {
        worker: String::new(),
        duration_ms: ms,
        nodes: true,
        steps: 0,
    };
    let mut pieces = match client.trace(asked).await {
        Ok(pieces) => pieces.into_inner(),
        Err(status) => return Err(link.said(&status).await),
    };
    let (mut spans, mut left_out, mut end) = (Vec::new(), 0usize, TraceEnd::default());
    let (mut begun_ns, mut nodes) = (0, Nodes::default());
    loop {
        let piece = match pieces.message().await {
            Ok(Some(piece)) => believe_traced(piece, &link),
            Ok(None) => break,
            // What came before it died is of use, too.
            Err(_) if !spans.is_empty() => break,
            Err(status) => return Err(link.said(&status).await),
        };
        match piece.kind {
            Some(Kind::Head(head)) => begun_ns = head.begun_ns,
            Some(Kind::Spans(mut some)) => {
                // Those that are drawn.
                some.spans.retain(|span| match span.track() {
                    TraceTrack::Copies | TraceTrack::Tensors => false,
                    _ => !nodes.take(span),
                });
                let room = SPANS.saturating_sub(spans.len());
                left_out = left_out.saturating_add(some.spans.len().saturating_sub(room));
                spans.extend(some.spans.iter().take(room).map(span));
            }
            Some(Kind::End(said)) => end = said,
            None => {}
        }
    }
    Ok(json!({
        "worker": link.worker,
        "epoch": link.epoch,
        "begun_ms": begun_ns / 1_000_000,
        "spans": spans,
        "nodes": nodes.longest(),
        "left_out": left_out,
        "missed_steps": end.missed_steps,
        "missed_nodes": end.missed_nodes,
    }))
}

/// What nodes took together. A page has no use for each time that each of them was computed.
#[derive(Default)]
struct Nodes(HashMap<String, (u64, u64)>);

impl Nodes {
    /// Whether it is a node's, which is taken.
    fn take(&mut self, span: &TraceSpan) -> bool {
        if span.track() != TraceTrack::Nodes {
            return false;
        }
        // What others do beside the one who leads has no names.
        if span.member > 0 {
            return true;
        }
        let name = match span.node.as_str() {
            "" => &span.name,
            name => name,
        };
        // No model has so many; a worker that says so is not believed.
        if self.0.len() < limits::MAX_GRAPH_NODES || self.0.contains_key(name) {
            let (times, took) = self.0.entry(name.to_owned()).or_default();
            *times += 1;
            *took = took.saturating_add(span.duration_ns);
        }
        true
    }

    /// Those that took longest, in microseconds.
    fn longest(self) -> Vec<Value> {
        let mut all: Vec<_> = self.0.into_iter().collect();
        all.sort_unstable_by(|a, b| (b.1.1, &a.0).cmp(&(a.1.1, &b.0)));
        let told = |(name, (times, took)): (String, (u64, u64))| json!({ "name": name, "times": times, "took": took as f64 / 1e3 });
        all.into_iter().take(LONGEST).map(told).collect()
    }
}

/// Times in microseconds since the beginning.
fn span(span: &TraceSpan) -> Value {
    let track = match span.track() {
        TraceTrack::Steps => "steps",
        TraceTrack::Device => "device",
        TraceTrack::Nodes => "nodes",
        TraceTrack::Requests => "requests",
        TraceTrack::Scheduler => "scheduler",
        TraceTrack::Events => "events",
        TraceTrack::Queue => "queue",
        TraceTrack::Copies => "copies",
        TraceTrack::Tensors => "tensors",
        TraceTrack::Unspecified => "",
    };
    json!({
        "track": track,
        "begin": span.begin_ns as f64 / 1e3,
        "took": span.duration_ns as f64 / 1e3,
        "name": span.name,
        "rows": span.rows,
        "reading": span.reading,
        "drawn": span.drawn,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_told_by_what_they_took_together() {
        let mut nodes = Nodes::default();
        let span = |track: TraceTrack, node: &str, duration_ns| TraceSpan {
            track: track.into(),
            name: "mul_mat".to_owned(),
            node: node.to_owned(),
            duration_ns,
            ..TraceSpan::default()
        };
        assert!(!nodes.take(&TraceSpan::default()));
        assert!(!nodes.take(&span(TraceTrack::Device, "a", 9)));
        for (node, took) in [("a", 1000), ("b", 1500), ("a", 2000), ("", 500)] {
            assert!(nodes.take(&span(TraceTrack::Nodes, node, took)));
        }
        let expected = json!([
            { "name": "a", "times": 2, "took": 3.0 },
            { "name": "b", "times": 1, "took": 1.5 },
            { "name": "mul_mat", "times": 1, "took": 0.5 },
        ]);
        assert_eq!(json!(nodes.longest()), expected);
        let mut many = Nodes::default();
        for n in 0..limits::MAX_GRAPH_NODES + 3 {
            many.take(&span(TraceTrack::Nodes, &n.to_string(), 1));
        }
        assert_eq!(many.0.len(), limits::MAX_GRAPH_NODES);
        assert_eq!(many.longest().len(), LONGEST);
    }
}

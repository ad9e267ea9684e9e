//! A timeline of what the engine does for a while: steps, nodes, requests and counters.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use hotcell_ipc::blackbox::Node;
use hotcell_proto::{
    error::{Error, Reason},
    limits,
    v1::{self, TraceTrack, trace_piece::Kind},
};
use tokio::{
    sync::mpsc,
    time::{MissedTickBehavior, timeout},
};
use tonic::Status;

use super::observer::{CallNote, CopyNote, NodeNote, StepNote, WaitNote, Watching};
use crate::{
    engine::{Place, names as op_names},
    host::Host,
};

/// Time between two looks at requests and counters.
const LOOK: Duration = Duration::from_millis(50);

/// How long the engine may take to answer them, and where it is asked what nodes are called.
const PATIENCE: Duration = Duration::from_millis(40);
const NAMING: Duration = Duration::from_secs(5);

/// How long after its end a trace may still be read.
const GRACE: Duration = Duration::from_secs(10);

/// Spans and counts of one message.
const PIECE: usize = 8 << 10;

/// Until when to trace: a while, or so many steps if they come sooner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    duration: Duration,
    steps: Option<u32>,
}

impl Extent {
    /// How long that is.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] if it is out of range.
    pub fn checked(ms: u32, steps: u32) -> Result<Self, Error> {
        let steps = Some(steps).filter(|steps| *steps > 0);
        let ms = match (ms, steps) {
            (0, None) => limits::TRACE_MILLIS,
            (0, Some(_)) => limits::MAX_TRACE_MILLIS,
            (ms, _) => ms,
        };
        if ms > limits::MAX_TRACE_MILLIS {
            let most = limits::MAX_TRACE_MILLIS;
            let what = format!("a trace of {ms} ms; at most {most}");
            return Err(Error::new(Reason::InvalidArgument, what));
        }
        let duration = Duration::from_millis(ms.into());
        Ok(Self { duration, steps })
    }
}

fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// What was gathered, in times since the beginning.
struct Timeline {
    begun: Instant,
    spans: Vec<v1::TraceSpan>,
    counts: Vec<v1::TraceCount>,
    end: v1::TraceEnd,
    /// When requests that are inside came, or the trace began.
    inside: HashMap<String, u64>,
    /// Steps that are told yet.
    steps_left: Option<u32>,
}

impl Timeline {
    fn since(&self, at: Instant) -> u64 {
        ns(at.saturating_duration_since(self.begun))
    }

    /// When something began, and how long it took; of what began before the trace did, the part since then.
    fn part(&self, begun: Instant, took: Duration) -> (u64, u64) {
        let begin = self.since(begun);
        let end = self.since(begun.checked_add(took).unwrap_or(begun));
        (begin, end.saturating_sub(begin))
    }

    fn steps(&mut self, notes: &[StepNote]) {
        let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        for step in notes {
            match &mut self.steps_left {
                Some(0) => return,
                Some(left) => *left -= 1,
                None => {}
            }
            let (begin_ns, duration_ns) = self.part(step.begun, step.whole);
            self.spans.push(v1::TraceSpan {
                track: TraceTrack::Steps.into(),
                begin_ns,
                duration_ns,
                rows: number(step.rows),
                reading: number(step.reading),
                sequences: number(step.sequences),
                drawn: number(step.drawn),
                ..v1::TraceSpan::default()
            });
            let (begin_ns, duration_ns) = self.part(step.computing_from, step.computing);
            self.spans.push(v1::TraceSpan {
                track: TraceTrack::Device.into(),
                begin_ns,
                duration_ns,
                rows: number(step.rows),
                ..v1::TraceSpan::default()
            });
        }
    }

    fn nodes(&mut self, notes: &[NodeNote], ops: &Ops, names: &HashMap<Place, String>) {
        // Of what other processes noted, some may be older.
        for note in notes.iter().filter(|note| note.begun >= self.begun) {
            let node = Node::unpacked(note.node);
            let name = ops.place(note).and_then(|place| names.get(&place));
            self.spans.push(v1::TraceSpan {
                track: TraceTrack::Nodes.into(),
                begin_ns: self.since(note.begun),
                duration_ns: ns(note.took),
                name: ops.of(node).to_owned(),
                node: name.cloned().unwrap_or_default(),
                step: node.step,
                group: node.group,
                member: note.member.into(),
                ..v1::TraceSpan::default()
            });
        }
    }

    fn calls(&mut self, notes: &[CallNote]) {
        for note in notes {
            let (begin_ns, duration_ns) = self.part(note.begun, note.took);
            self.spans.push(v1::TraceSpan {
                track: TraceTrack::Tensors.into(),
                begin_ns,
                duration_ns,
                rows: u32::try_from(note.rows).unwrap_or(u32::MAX),
                step: note.steps,
                ..v1::TraceSpan::default()
            });
        }
    }

    fn copies(&mut self, notes: &[CopyNote]) {
        for note in notes.iter().filter(|note| note.begun >= self.begun) {
            self.spans.push(v1::TraceSpan {
                track: TraceTrack::Copies.into(),
                begin_ns: self.since(note.begun),
                duration_ns: ns(note.took),
                name: note.what.to_owned(),
                bytes: note.bytes as u64,
                ..v1::TraceSpan::default()
            });
        }
    }

    fn waits(&mut self, notes: Vec<WaitNote>) {
        for note in notes {
            let (begin_ns, duration_ns) = self.part(note.begun, note.took);
            let span = (begin_ns, begin_ns + duration_ns);
            self.request(TraceTrack::Queue, note.request, span);
        }
    }

    fn count(&mut self, at_ns: u64, name: &str, value: u64) {
        self.counts.push(v1::TraceCount {
            at_ns,
            name: name.to_owned(),
            value,
        });
    }

    /// Requests that are inside now, and since when: those that are not any more were, until now.
    fn requests(&mut self, now: u64, inside: &[(String, u64)]) {
        let gone = |id: &&String| !inside.iter().any(|(other, _)| other == *id);
        let over: Vec<String> = self.inside.keys().filter(gone).cloned().collect();
        for id in over {
            if let Some(begin_ns) = self.inside.remove(&id) {
                self.request(TraceTrack::Requests, id, (begin_ns, now));
            }
        }
        for (id, since) in inside.iter().filter(|(id, _)| !id.is_empty()) {
            self.inside.entry(id.clone()).or_insert(*since);
        }
    }

    fn request(&mut self, track: TraceTrack, name: String, (begin_ns, end_ns): (u64, u64)) {
        self.spans.push(v1::TraceSpan {
            track: track.into(),
            begin_ns,
            duration_ns: end_ns.saturating_sub(begin_ns),
            name,
            ..v1::TraceSpan::default()
        });
    }

    /// Counts what there is, and returns how the nodes at these places are called.
    async fn look(
        &mut self,
        host: &Host,
        (places, since): (Vec<Place>, Instant),
    ) -> HashMap<Place, String> {
        // In a long step it does not answer: there is nothing to count then.
        let patience = if places.is_empty() { PATIENCE } else { NAMING };
        let look = timeout(patience, host.engine().look(places.clone(), since)).await;
        let Ok(Ok(look)) = look else {
            return HashMap::new();
        };
        let now = self.since(Instant::now());
        let used = |cache: &v1::CacheStatus| {
            let layers = cache.layers.iter();
            let bytes = layers.map(|l| l.block_bytes.saturating_mul(l.used_blocks));
            bytes.fold(0, u64::saturating_add)
        };
        self.count(now, "cache", look.caches.iter().map(used).sum());
        self.count(now, "running", look.caches.iter().map(|c| c.running).sum());
        self.count(now, "waiting", look.caches.iter().map(|c| c.waiting).sum());
        self.count(now, "queue", host.engine().queued() as u64);
        let mut kinds = BTreeMap::<String, u64>::new();
        for part in host.weights_in_use().into_iter().chain(look.memory) {
            let of_kind = kinds.entry(format!("memory.{}", part.kind)).or_default();
            *of_kind = of_kind.saturating_add(part.bytes);
        }
        for (kind, bytes) in kinds {
            self.count(now, &kind, bytes);
        }
        let inside = look.requests.into_iter().map(|request| {
            let age = Duration::try_from_secs_f64(request.age_ms / 1e3).unwrap_or_default();
            (request.request_id, now.saturating_sub(ns(age)))
        });
        let inside: Vec<(String, u64)> = inside.collect();
        self.requests(now, &inside);
        places.into_iter().zip(look.names).collect()
    }

    /// Messages of what was gathered since they were last taken.
    fn pieces(&mut self) -> Vec<v1::TracePiece> {
        let (mut spans, mut counts) = (
            std::mem::take(&mut self.spans),
            std::mem::take(&mut self.counts),
        );
        let mut pieces = Vec::new();
        while !spans.is_empty() || !counts.is_empty() {
            let some = v1::TraceSpans {
                spans: spans.drain(..spans.len().min(PIECE)).collect(),
                counts: counts.drain(..counts.len().min(PIECE)).collect(),
            };
            pieces.push(v1::TracePiece {
                kind: Some(Kind::Spans(some)),
            });
        }
        pieces
    }
}

/// The ops as notes number them.
struct Ops(Vec<&'static str>);

impl Ops {
    fn of(&self, node: Node) -> &'static str {
        self.0
            .get(usize::from(node.op))
            .copied()
            .unwrap_or_default()
    }

    /// Where a node is that may have a name.
    fn place(&self, note: &NodeNote) -> Option<Place> {
        let node = Node::unpacked(note.node);
        Some(Place {
            part: Some(note.part?),
            step: node.step,
            op: self.of(node),
        })
    }

    /// Each place of these nodes once. Plans may be others the next time that they are asked for.
    fn places(&self, notes: &[NodeNote]) -> Vec<Place> {
        let places: HashSet<Place> = notes.iter().filter_map(|note| self.place(note)).collect();
        places.into_iter().collect()
    }
}

/// Sends a piece, if it is taken by then: nothing is noted for ever for who does not read.
async fn send(
    to: &mpsc::Sender<Result<v1::TracePiece, Status>>,
    piece: v1::TracePiece,
    until: Instant,
) -> Result<(), ()> {
    let sent = tokio::time::timeout_at(until.into(), to.send(Ok(piece))).await;
    sent.map_err(|_| ())?.map_err(|_| ())
}

/// Traces for so long, or until nobody reads.
pub async fn trace(
    host: Host,
    mut watching: Watching,
    Extent { duration, steps }: Extent,
    to: mpsc::Sender<Result<v1::TracePiece, Status>>,
) {
    let ops = Ops(op_names().collect());
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let begun = watching.since();
    let (worker, epoch) = host.identity();
    let head = v1::TraceHead {
        worker,
        epoch: epoch.0,
        begun_ns: since.map_or(0, ns).saturating_sub(ns(begun.elapsed())),
    };
    let mut timeline = Timeline {
        begun,
        spans: Vec::new(),
        counts: Vec::new(),
        end: v1::TraceEnd::default(),
        inside: HashMap::new(),
        steps_left: steps,
    };
    let mut next = vec![v1::TracePiece {
        kind: Some(Kind::Head(head)),
    }];
    let mut looking = tokio::time::interval(LOOK);
    looking.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        for piece in next {
            if send(&to, piece, begun + duration + GRACE).await.is_err() {
                return;
            }
        }
        tokio::select! {
            () = to.closed() => return,
            _ = looking.tick() => {}
        }
        // Before what there is is taken: what comes while the engine is asked is of the next time.
        let mut is_over = begun.elapsed() >= duration;
        let (steps, missed_steps) = watching.steps();
        let (nodes, missed_nodes) = watching.nodes();
        timeline.end.missed_steps += missed_steps;
        timeline.end.missed_nodes += missed_nodes;
        timeline.steps(&steps);
        timeline.copies(&watching.copies());
        timeline.calls(&watching.calls());
        timeline.waits(watching.waits());
        let first = nodes.iter().map(|note| note.begun).min();
        let seen = (ops.places(&nodes), first.unwrap_or_else(Instant::now));
        let names = tokio::select! {
            () = to.closed() => return,
            names = timeline.look(&host, seen) => names,
        };
        timeline.nodes(&nodes, &ops, &names);
        is_over |= timeline.steps_left == Some(0);
        if is_over {
            timeline.requests(timeline.since(Instant::now()), &[]);
        }
        next = timeline.pieces();
        if is_over {
            break;
        }
    }
    let end = v1::TracePiece {
        kind: Some(Kind::End(timeline.end)),
    };
    for piece in next.into_iter().chain([end]) {
        if send(&to, piece, begun + duration + GRACE).await.is_err() {
            return;
        }
    }
}

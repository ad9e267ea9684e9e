//! A worker's trace, and its scheduler's and client's parts of it, as Perfetto reads it: the part of its schema that is needed, by its field numbers
//! (perfetto/trace/trace_packet.proto, track_event/*.proto). Opens in <https://ui.perfetto.dev>.

use std::collections::BTreeMap;

use hotcell_proto::v1::{TraceCount, TraceHead, TraceSpan, TraceTrack};
use prost::{Message, Oneof};

/// A whole trace.
#[derive(Clone, PartialEq, Message)]
pub struct Trace {
    /// Its packets.
    #[prost(message, repeated, tag = "1")]
    pub packet: Vec<Packet>,
}

/// `TracePacket`.
#[derive(Clone, PartialEq, Message)]
pub struct Packet {
    /// Nanoseconds.
    #[prost(uint64, optional, tag = "8")]
    pub timestamp: Option<u64>,
    /// Who wrote it.
    #[prost(uint32, optional, tag = "10")]
    pub trusted_packet_sequence_id: Option<u32>,
    /// 1 in the first packet: nothing of before counts.
    #[prost(uint32, optional, tag = "13")]
    pub sequence_flags: Option<u32>,
    /// What it says.
    #[prost(oneof = "Data", tags = "11, 60")]
    pub data: Option<Data>,
}

/// What a packet says.
#[derive(Clone, PartialEq, Oneof)]
pub enum Data {
    /// Something on a track.
    #[prost(message, tag = "11")]
    Event(Event),
    /// A track.
    #[prost(message, tag = "60")]
    Track(Track),
}

/// `TrackEvent`.
#[derive(Clone, PartialEq, Message)]
pub struct Event {
    /// What it is about.
    #[prost(message, repeated, tag = "4")]
    pub debug_annotations: Vec<Annotation>,
    /// 1: a slice begins, 2: it ends, 3: a moment, 4: a counter.
    #[prost(int32, optional, tag = "9")]
    pub kind: Option<i32>,
    /// Which track.
    #[prost(uint64, optional, tag = "11")]
    pub track_uuid: Option<u64>,
    /// Of a slice.
    #[prost(string, repeated, tag = "22")]
    pub categories: Vec<String>,
    /// Of a slice.
    #[prost(string, optional, tag = "23")]
    pub name: Option<String>,
    /// Of a counter.
    #[prost(int64, optional, tag = "30")]
    pub counter_value: Option<i64>,
}

/// `DebugAnnotation`: a name and a number.
#[derive(Clone, PartialEq, Message)]
pub struct Annotation {
    /// What it says.
    #[prost(uint64, optional, tag = "3")]
    pub uint_value: Option<u64>,
    /// What it says, in words.
    #[prost(string, optional, tag = "6")]
    pub string_value: Option<String>,
    /// Its name.
    #[prost(string, optional, tag = "10")]
    pub name: Option<String>,
}

/// `TrackDescriptor`.
#[derive(Clone, PartialEq, Message)]
pub struct Track {
    /// Its own number.
    #[prost(uint64, optional, tag = "1")]
    pub uuid: Option<u64>,
    /// Its name.
    #[prost(string, optional, tag = "2")]
    pub name: Option<String>,
    /// Set for a process.
    #[prost(message, optional, tag = "3")]
    pub process: Option<ProcessDescriptor>,
    /// The track that it is under.
    #[prost(uint64, optional, tag = "5")]
    pub parent_uuid: Option<u64>,
    /// Set for a counter.
    #[prost(message, optional, tag = "8")]
    pub counter: Option<Counter>,
}

/// `ProcessDescriptor`.
#[derive(Clone, PartialEq, Message)]
pub struct ProcessDescriptor {
    /// Its id.
    #[prost(int32, optional, tag = "1")]
    pub pid: Option<i32>,
    /// Its name.
    #[prost(string, optional, tag = "6")]
    pub process_name: Option<String>,
}

/// `CounterDescriptor`.
#[derive(Clone, PartialEq, Message)]
pub struct Counter {
    /// 3: bytes, 2: a count.
    #[prost(int32, optional, tag = "3")]
    pub unit: Option<i32>,
}

const BEGIN: i32 = 1;
const END: i32 = 2;
const MOMENT: i32 = 3;
const COUNTER: i32 = 4;
const COUNT: i32 = 2;
const BYTES: i32 = 3;
/// `SEQ_INCREMENTAL_STATE_CLEARED`.
const CLEARED: u32 = 1;

/// The one writer.
const SEQUENCE: u32 = 1;
/// The worker's own track; those under it come after it.
const PROCESS: u64 = 1;
/// The scheduler's.
const SCHEDULER: u64 = 50;
/// Where tracks of counters begin, and those of requests, which may lie over each other: in the worker, waiting
/// there, in the scheduler.
const COUNTERS: u64 = 100;
const REQUESTS: u64 = 1000;
const QUEUED: u64 = 1 << 19;
const PASSED: u64 = 1 << 20;
/// Where tracks of the nodes of those begin whom a worker leads.
const MEMBERS: u64 = 1 << 18;
/// The client's, and where the tracks of its calls begin.
const CLIENT: u64 = 60;
const CALLS: u64 = 1 << 40;

/// A call of this client, or a part of one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientSpan {
    /// The call that it is, or is a part of: `Tokens.Generate`.
    pub call: String,
    /// What it is; parts lie inside of what comes before them.
    pub name: String,
    /// When it began, nanoseconds since 1970.
    pub begin_ns: u64,
    /// How long it took, in nanoseconds.
    pub duration_ns: u64,
    /// The trace that it is in, as 32 hexadecimal digits; empty if none.
    pub trace_id: String,
}

fn packet(timestamp: Option<u64>, data: Data) -> Packet {
    Packet {
        timestamp,
        trusted_packet_sequence_id: Some(SEQUENCE),
        sequence_flags: None,
        data: Some(data),
    }
}

fn track(uuid: u64, name: &str, counter: Option<i32>) -> Packet {
    let parent = match uuid {
        CALLS.. => CLIENT,
        PASSED.. => SCHEDULER,
        _ => PROCESS,
    };
    packet(
        None,
        Data::Track(Track {
            uuid: Some(uuid),
            name: Some(name.to_owned()),
            parent_uuid: Some(parent),
            counter: counter.map(|unit| Counter { unit: Some(unit) }),
            process: None,
        }),
    )
}

/// A process's own track.
fn process(uuid: u64, pid: i32, name: String) -> Packet {
    let process = ProcessDescriptor {
        pid: Some(pid),
        process_name: Some(name),
    };
    packet(
        None,
        Data::Track(Track {
            uuid: Some(uuid),
            process: Some(process),
            ..Track::default()
        }),
    )
}

fn annotations(span: &TraceSpan) -> Vec<Annotation> {
    let number = u64::from;
    let all: &[(&str, u64)] = match span.track() {
        TraceTrack::Steps => &[
            ("rows", number(span.rows)),
            ("reading", number(span.reading)),
            ("sequences", number(span.sequences)),
            ("drawn", number(span.drawn)),
        ],
        TraceTrack::Device => &[("rows", number(span.rows))],
        TraceTrack::Nodes => &[
            ("step", number(span.step)),
            ("group", u64::from(span.group)),
        ],
        TraceTrack::Copies => &[("bytes", span.bytes)],
        TraceTrack::Tensors => &[("rows", number(span.rows)), ("steps", number(span.step))],
        TraceTrack::Requests
        | TraceTrack::Scheduler
        | TraceTrack::Queue
        | TraceTrack::Events
        | TraceTrack::Unspecified => &[],
    };
    let annotation = |(name, value): &(&str, u64)| Annotation {
        uint_value: Some(*value),
        string_value: None,
        name: Some((*name).to_owned()),
    };
    let all = all.iter().map(annotation);
    let op = (!span.node.is_empty()).then(|| words("op", &span.name));
    all.chain(op).chain(of_trace(&span.trace_id)).collect()
}

/// What a step is for: what comes, what is drawn, or both.
fn phase(step: &TraceSpan) -> &'static str {
    match (step.reading, step.rows.saturating_sub(step.reading)) {
        (0, _) => "decode",
        (_, 0) => "prefill",
        _ => "prefill and decode",
    }
}

/// Which trace a span is in.
fn of_trace(id: &str) -> Option<Annotation> {
    (!id.is_empty()).then(|| words("trace_id", id))
}

fn words(name: &str, value: &str) -> Annotation {
    Annotation {
        uint_value: None,
        string_value: Some(value.to_owned()),
        name: Some(name.to_owned()),
    }
}

/// A trace of one worker.
pub fn encode(head: &TraceHead, spans: &[TraceSpan], counts: &[TraceCount]) -> Vec<u8> {
    encode_with(head, spans, counts, &[])
}

/// A trace of one worker, and of what this client asked for meanwhile, on the worker's clock.
pub fn encode_with(
    head: &TraceHead,
    spans: &[TraceSpan],
    counts: &[TraceCount],
    calls: &[ClientSpan],
) -> Vec<u8> {
    let (worker, epoch) = (&head.worker, head.epoch);
    let mut first = process(
        PROCESS,
        1,
        format!("hotcell worker {worker} (epoch {epoch})"),
    );
    first.sequence_flags = Some(CLEARED);
    let mut packets = vec![first];
    for (kind, name) in [
        (TraceTrack::Steps, "steps"),
        (TraceTrack::Device, "device"),
        (TraceTrack::Nodes, "nodes"),
        (TraceTrack::Copies, "copies"),
        (TraceTrack::Tensors, "tensors"),
        (TraceTrack::Events, "events"),
    ] {
        packets.push(track(PROCESS + kind as u64, name, None));
    }
    let is_passed = |span: &TraceSpan| span.track() == TraceTrack::Scheduler;
    if spans.iter().any(is_passed) {
        packets.push(process(SCHEDULER, 2, "hotcell scheduler".to_owned()));
    }
    let (mut requests, mut passed) = (BTreeMap::new(), BTreeMap::new());
    let (mut queued, mut members) = (BTreeMap::new(), BTreeMap::new());
    let mut timed = Vec::with_capacity(2 * spans.len() + counts.len());
    // What took no time is no slice; what happened at a moment is none, and is told.
    let is_moment = |span: &TraceSpan| span.duration_ns == 0 && span.track() == TraceTrack::Events;
    for span in spans
        .iter()
        .filter(|span| span.duration_ns > 0 || is_moment(span))
    {
        let uuid = match span.track() {
            TraceTrack::Queue => {
                let next = QUEUED + queued.len() as u64;
                *queued.entry(span.name.clone()).or_insert(next)
            }
            TraceTrack::Requests => {
                let next = REQUESTS + requests.len() as u64;
                *requests.entry(span.name.clone()).or_insert(next)
            }
            TraceTrack::Scheduler => {
                let next = PASSED + passed.len() as u64;
                *passed.entry(span.name.clone()).or_insert(next)
            }
            TraceTrack::Nodes if span.member > 0 => {
                let next = MEMBERS + members.len() as u64;
                *members.entry(span.member).or_insert(next)
            }
            kind => PROCESS + kind as u64,
        };
        let name = match (span.track(), span.name.as_str()) {
            (TraceTrack::Steps, _) => phase(span),
            (TraceTrack::Queue, _) => "waits",
            (TraceTrack::Device, _) => "compute",
            (TraceTrack::Tensors, _) => "graph",
            (TraceTrack::Nodes, _) if !span.node.is_empty() => &span.node,
            (_, "") => "?",
            (_, name) => name,
        };
        let at = head.begun_ns.saturating_add(span.begin_ns);
        let event = |kind| Event {
            kind: Some(kind),
            track_uuid: Some(uuid),
            ..Event::default()
        };
        let begin = Event {
            name: Some(name.to_owned()),
            categories: vec!["hotcell".to_owned()],
            debug_annotations: annotations(span),
            ..event(if is_moment(span) { MOMENT } else { BEGIN })
        };
        // Of two that begin at one moment the longer one holds the other.
        timed.push((at, 1u8, u64::MAX - span.duration_ns, begin));
        if !is_moment(span) {
            let end = at.saturating_add(span.duration_ns);
            timed.push((end, 0, span.duration_ns, event(END)));
        }
    }
    let mut called = BTreeMap::new();
    if !calls.is_empty() {
        packets.push(process(CLIENT, 3, "hotcell client".to_owned()));
    }
    for span in calls.iter().filter(|span| span.duration_ns > 0) {
        let next = CALLS + called.len() as u64;
        let uuid = *called.entry(span.call.clone()).or_insert(next);
        let event = |kind| Event {
            kind: Some(kind),
            track_uuid: Some(uuid),
            ..Event::default()
        };
        let begin = Event {
            name: Some(span.name.clone()),
            categories: vec!["hotcell".to_owned()],
            debug_annotations: of_trace(&span.trace_id).into_iter().collect(),
            ..event(BEGIN)
        };
        timed.push((span.begin_ns, 1u8, u64::MAX - span.duration_ns, begin));
        let end = span.begin_ns.saturating_add(span.duration_ns);
        timed.push((end, 0, span.duration_ns, event(END)));
    }
    for (name, uuid) in &called {
        packets.push(track(*uuid, name, None));
    }
    for (member, uuid) in &members {
        packets.push(track(*uuid, &format!("nodes of member {member}"), None));
    }
    for (name, uuid) in requests.iter().chain(&passed) {
        packets.push(track(*uuid, &format!("request {name}"), None));
    }
    for (name, uuid) in &queued {
        packets.push(track(*uuid, &format!("queue {name}"), None));
    }
    let mut counters = BTreeMap::new();
    for count in counts {
        let next = COUNTERS + counters.len() as u64;
        let uuid = *counters.entry(count.name.clone()).or_insert(next);
        let value = Event {
            kind: Some(COUNTER),
            track_uuid: Some(uuid),
            counter_value: Some(i64::try_from(count.value).unwrap_or(i64::MAX)),
            ..Event::default()
        };
        let at = head.begun_ns.saturating_add(count.at_ns);
        timed.push((at, 2, 0, value));
    }
    for (name, uuid) in &counters {
        let unit = match name.as_str() {
            "cache" => BYTES,
            name if name.starts_with("memory.") => BYTES,
            _ => COUNT,
        };
        packets.push(track(*uuid, name, Some(unit)));
    }
    // At one moment what ends goes before what begins.
    timed.sort_by_key(|(at, order, length, _)| (*at, *order, *length));
    packets.extend(
        timed
            .into_iter()
            .map(|(at, _, _, event)| packet(Some(at), Data::Event(event))),
    );
    Trace { packet: packets }.encode_to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_begin_and_end_on_their_tracks() {
        let head = TraceHead {
            worker: "w0".into(),
            epoch: 2,
            begun_ns: 1000,
        };
        let span = |track: TraceTrack, begin_ns, duration_ns, name: &str| TraceSpan {
            track: track.into(),
            begin_ns,
            duration_ns,
            name: name.to_owned(),
            rows: 3,
            ..TraceSpan::default()
        };
        let spans = [
            span(TraceTrack::Steps, 10, 20, ""),
            span(TraceTrack::Steps, 30, 20, ""),
            TraceSpan {
                reading: 2,
                ..span(TraceTrack::Steps, 50, 2, "")
            },
            TraceSpan {
                reading: 3,
                ..span(TraceTrack::Steps, 52, 2, "")
            },
            span(TraceTrack::Events, 40, 0, "w0 died"),
            span(TraceTrack::Queue, 0, 9, "r1"),
            span(TraceTrack::Nodes, 12, 5, "mul_mat"),
            TraceSpan {
                member: 3,
                ..span(TraceTrack::Nodes, 13, 5, "mul_mat")
            },
            span(TraceTrack::Nodes, 17, 0, "no time"),
            TraceSpan {
                node: "layers.0.add.1".into(),
                ..span(TraceTrack::Nodes, 17, 3, "add")
            },
            TraceSpan {
                bytes: 400,
                ..span(TraceTrack::Copies, 20, 3, "logits")
            },
            span(TraceTrack::Tensors, 30, 3, ""),
            span(TraceTrack::Requests, 0, 60, "r1"),
            TraceSpan {
                trace_id: "4bf9".into(),
                ..span(TraceTrack::Scheduler, 0, 70, "r1")
            },
        ];
        let counts = [TraceCount {
            at_ns: 5,
            name: "cache".into(),
            value: 77,
        }];
        let call = |name: &str, begin_ns, duration_ns| ClientSpan {
            call: "Tokens.Generate".into(),
            name: name.to_owned(),
            begin_ns,
            duration_ns,
            trace_id: "4bf9".into(),
        };
        // A call, and its two parts inside of it.
        let calls = [
            call("whole", 1000, 50),
            call("first", 1000, 20),
            call("second", 1020, 30),
        ];
        let encoded = encode_with(&head, &spans, &counts, &calls);
        let trace = Trace::decode(encoded.as_slice()).unwrap();
        let events: Vec<_> = trace
            .packet
            .iter()
            .filter_map(|p| match &p.data {
                Some(Data::Event(e)) => Some((p.timestamp.unwrap(), e.clone())),
                _ => None,
            })
            .collect();
        assert!(events.windows(2).all(|pair| pair[0].0 <= pair[1].0));
        let mut open = BTreeMap::<u64, i32>::new();
        for (_, event) in &events {
            let depth = open.entry(event.track_uuid.unwrap()).or_default();
            match event.kind {
                Some(BEGIN) => *depth += 1,
                Some(END) => *depth -= 1,
                Some(MOMENT) => assert_eq!(event.name.as_deref(), Some("w0 died")),
                _ => assert_eq!(event.counter_value, Some(77)),
            }
            let most = if event.track_uuid == Some(CALLS) {
                2
            } else {
                1
            };
            assert!((0..=most).contains(depth), "slices lie beside each other");
        }
        assert!(open.values().all(|depth| *depth == 0));
        let named = |name: &str| {
            events
                .iter()
                .filter(|(_, e)| e.name.as_deref() == Some(name))
                .count()
        };
        let phases = ["prefill", "decode", "prefill and decode"].map(named);
        assert_eq!((phases, named("waits")), ([1, 2, 1], 1));
        let tracks = trace.packet.iter().filter_map(|p| match &p.data {
            Some(Data::Track(t)) => t.name.clone(),
            _ => None,
        });
        let tracks: Vec<_> = tracks.collect();
        let expected = [
            "steps",
            "device",
            "nodes",
            "copies",
            "tensors",
            "events",
            "Tokens.Generate",
            "nodes of member 3",
            "request r1",
            "request r1",
            "queue r1",
            "cache",
        ];
        assert_eq!(tracks, expected);
        let notes = events
            .iter()
            .flat_map(|(_, event)| &event.debug_annotations);
        let mut words = notes.filter_map(|note| note.string_value.as_deref());
        assert!(words.any(|word| word == "4bf9"));
        // A node by its name, with its op; a copy with its bytes; a graph.
        let noted = |name: &str| {
            let (_, event) = events
                .iter()
                .find(|(_, e)| e.name.as_deref() == Some(name))
                .unwrap();
            event.debug_annotations.clone()
        };
        let op = Some("add".to_owned());
        assert!(
            noted("layers.0.add.1")
                .iter()
                .any(|note| note.string_value == op)
        );
        assert_eq!((named("add"), named("mul_mat")), (0, 2));
        assert_eq!(noted("logits")[0].uint_value, Some(400));
        assert_eq!(noted("graph").len(), 2);
    }
}

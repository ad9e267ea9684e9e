//! Traces: a timeline that Perfetto reads, on which nodes lie inside of steps.

use std::{collections::HashMap, time::Duration};

use hotcell_client::{
    Address, GenerateOptions,
    debug::perfetto::{Data, Trace},
    tensor::{Session, SessionOptions},
    v1::{self, TraceTrack, trace_piece::Kind},
};
use hotcell_proto::limits;
use hotcell_tests::{
    cluster::{SOON, signal_pid},
    debugged::spans,
};
use prost::Message;
use rustix::process::Signal;

use super::{hotcell, kjv_cluster, long};

#[tokio::test]
async fn nodes_lie_inside_of_the_steps_that_compute_them() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    // It is there for longer than the trace takes.
    let beyond = GenerateOptions {
        max_tokens: 1000,
        ..long("traced")
    };
    let stream = client.generate("In the beginning", beyond).await.unwrap();
    let whole = tokio::spawn(stream.complete());
    let time = Duration::from_millis(300);
    let mut pieces = client.trace_worker("w0", time, true).await.unwrap();
    let (mut spans, mut counts, mut end) = (Vec::new(), Vec::new(), None);
    while let Some(piece) = pieces.next().await {
        match piece.unwrap().kind.unwrap() {
            Kind::Head(head) => assert_eq!(head.worker, "w0"),
            Kind::Spans(some) => {
                spans.extend(some.spans);
                counts.extend(some.counts);
            }
            Kind::End(said) => end = Some(said),
        }
    }
    let end = end.unwrap();
    assert_eq!((end.missed_steps, end.missed_nodes), (0, 0));
    let of = |track: TraceTrack| spans.iter().filter(move |span| span.track() == track);
    let device: Vec<_> = of(TraceTrack::Device).collect();
    assert!(!device.is_empty() && of(TraceTrack::Steps).count() == device.len());
    let nodes: Vec<_> = of(TraceTrack::Nodes).collect();
    // All of a step's nodes are told, or none.
    let within = |step: &hotcell_client::v1::TraceSpan| {
        let end = step.begin_ns + step.duration_ns;
        let inside = nodes
            .iter()
            .filter(|node| (step.begin_ns..end).contains(&node.begin_ns));
        inside.count()
    };
    let told: Vec<usize> = device.iter().map(|step| within(step)).collect();
    let steps = told.iter().filter(|nodes| **nodes > 10).count();
    assert!(steps > 10, "{told:?}");
    let most = limits::TRACED_NODES_PER_SECOND as usize;
    assert!(nodes.len() < most, "{} in 300 ms", nodes.len());
    let inside = nodes.iter().filter(|node| {
        let end = node.begin_ns + node.duration_ns;
        let holds = |step: &&&_| {
            let step: &hotcell_client::v1::TraceSpan = step;
            step.begin_ns <= node.begin_ns && end <= step.begin_ns + step.duration_ns
        };
        device.iter().find(holds).is_some()
    });
    // Those of a step that began before the trace did have none.
    assert!(inside.count() * 10 >= nodes.len() * 9);
    assert!(nodes.iter().any(|node| node.name == "mul_mat"));
    // By what they are called in captures, too: those of layers, and the one that gives logits.
    let named = |op: &str, name: &str| {
        let is_it = |node: &&v1::TraceSpan| node.name == op && node.node == name;
        nodes.iter().copied().filter(is_it).count()
    };
    let found = nodes.iter().map(|n| n.node.as_str());
    let found: std::collections::BTreeSet<&str> = found.collect();
    assert!(named("mul_mat", "layers.1.mul_mat.3") > 10, "{found:?}");
    assert!(named("mul_mat", "logits") > 10, "{found:?}");
    // Every step is given its rows and its pick, and a row of logits comes back.
    let copies: Vec<_> = of(TraceTrack::Copies).collect();
    let copied = |what: &str| {
        let its = copies.iter().filter(|copy| copy.name == what);
        let bytes: Vec<u64> = its.map(|copy| copy.bytes).collect();
        assert!(bytes.len() > 10, "{what}: {bytes:?}");
        bytes
    };
    assert!(copied("rows").iter().all(|bytes| bytes % 4 == 0));
    let logits = copied("logits");
    assert!(
        logits
            .iter()
            .all(|bytes| *bytes == logits[0] && *bytes > 1_000)
    );
    assert!(of(TraceTrack::Requests).any(|span| span.name == "traced"));
    // The scheduler has had it as long as the trace went on, under its client's trace if that named one.
    let passed: Vec<_> = of(TraceTrack::Scheduler).collect();
    assert_eq!((passed.len(), passed[0].name.as_str()), (1, "traced"));
    assert!(
        passed[0].begin_ns < 100_000_000 && passed[0].duration_ns > 150_000_000,
        "{passed:?}"
    );
    for kind in ["cache", "memory.weights", "memory.cache", "memory.plans"] {
        let of_kind = |count: &&v1::TraceCount| count.name == kind && count.value > 0;
        assert!(counts.iter().find(of_kind).is_some(), "{kind}");
    }
    assert_eq!(whole.await.unwrap().unwrap().token_ids.len(), 1000);
}

#[tokio::test]
async fn a_trace_ends_after_so_many_steps_and_says_what_each_is_for() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let request = v1::TraceRequest {
        steps: 9,
        ..v1::TraceRequest::default()
    };
    let begun = std::time::Instant::now();
    let mut pieces = client.trace(request).await.unwrap();
    // It is there before anything is computed.
    pieces.next().await.unwrap().unwrap();
    let options = GenerateOptions {
        no_speculation: true,
        ..long("counted")
    };
    let stream = client.generate("In the beginning", options).await.unwrap();
    let whole = tokio::spawn(stream.complete());
    let spans = spans(pieces).await.unwrap();
    assert!(begun.elapsed() < SOON, "it waits for its minute");
    let of = |track: TraceTrack| spans.iter().filter(move |span| span.track() == track);
    let steps: Vec<(u32, u32)> = of(TraceTrack::Steps).map(|s| (s.rows, s.reading)).collect();
    assert_eq!(steps.len(), 9, "{steps:?}");
    let (rows, reading) = steps[0];
    assert!(
        rows > 1 && reading == rows,
        "the prompt is read first: {steps:?}"
    );
    assert!(steps[1..].iter().all(|step| *step == (1, 0)), "{steps:?}");
    let waited: Vec<_> = of(TraceTrack::Queue).collect();
    assert_eq!((waited.len(), waited[0].name.as_str()), (1, "counted"));
    let first = of(TraceTrack::Steps).next().unwrap();
    // It waits until the step begins in which it has a part.
    let until = waited[0].begin_ns + waited[0].duration_ns;
    assert!(until <= first.begin_ns + 1_000, "{waited:?} {first:?}");
    whole.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_trace_outlives_the_process_that_it_began_with_and_marks_its_death() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let time = Duration::from_secs(8);
    let mut pieces = client.trace_worker("w0", time, false).await.unwrap();
    pieces.next().await.unwrap().unwrap();
    let beyond = GenerateOptions {
        max_tokens: 900,
        ..long("outlives")
    };
    let mut stream = client
        .generate("In the beginning", beyond.clone())
        .await
        .unwrap();
    // With company it takes a few times as long as what comes now.
    let mut company = Vec::new();
    for number in 0..6 {
        let options = GenerateOptions {
            request_id: format!("beside-{number}"),
            ..beyond.clone()
        };
        let stream = client.generate("And God said", options).await.unwrap();
        company.push(tokio::spawn(stream.complete()));
    }
    // Some of it is drawn, and more than a look of the trace's ago.
    let mut drawn = 0;
    let begun = std::time::Instant::now();
    while drawn < 20 || begun.elapsed() < Duration::from_millis(200) {
        let event = stream.next().await.unwrap().unwrap();
        drawn += usize::from(matches!(event, hotcell_client::Event::Delta(_)));
    }
    let pid = client.workers().await.unwrap()[0].pid;
    signal_pid(pid, Signal::KILL).unwrap();
    let (mut spans, mut end, mut heads) = (Vec::new(), None, 1);
    let whole = tokio::spawn(stream.complete());
    while let Some(piece) = pieces.next().await {
        match piece.unwrap().kind.unwrap() {
            Kind::Head(_) => heads += 1,
            Kind::Spans(some) => spans.extend(some.spans),
            Kind::End(said) => end = Some(said),
        }
    }
    whole.await.unwrap().unwrap();
    for stream in company {
        stream.await.unwrap().unwrap();
    }
    assert_eq!((heads, end.unwrap().deaths), (1, 1));
    let of = |track: TraceTrack| spans.iter().filter(move |span| span.track() == track);
    let event = |what: &str| {
        let mut its = of(TraceTrack::Events).filter(|span| span.name.contains(what));
        let found = its
            .next()
            .unwrap_or_else(|| panic!("no {what:?}: {spans:?}"));
        assert!(its.next().is_none(), "{what:?} once");
        found
    };
    let died = event("w0 (epoch 1) died: ");
    let went_on = event("request outlives goes on after ");
    let gone = event("w0 is not traced");
    assert!(died.begin_ns < went_on.begin_ns && went_on.duration_ns == 0);
    let steps: Vec<_> = of(TraceTrack::Steps).collect();
    let back = gone.begin_ns + gone.duration_ns;
    let before = steps.iter().filter(|step| step.begin_ns < gone.begin_ns);
    let after: Vec<_> = steps.iter().filter(|step| step.begin_ns >= back).collect();
    let (before, rest) = (before.count(), after.len());
    assert!(before > 5 && rest > 5, "{before} {rest}");
    assert_eq!(
        before + rest,
        steps.len(),
        "none of a time that is not traced"
    );
    // The scheduler had it all along.
    let mut had = of(TraceTrack::Scheduler).filter(|span| span.name == "outlives");
    let had = had.next().unwrap();
    assert!(had.begin_ns < gone.begin_ns && had.begin_ns + had.duration_ns > back);
}

#[tokio::test]
async fn the_command_writes_a_file_for_perfetto() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let file = cluster.folder.path().join("w0.pftrace");
    let path = file.to_str().unwrap();
    let client = cluster.client().await.unwrap();
    let stream = client
        .generate("In the beginning", long("traced"))
        .await
        .unwrap();
    let whole = tokio::spawn(stream.complete());
    let said = hotcell(
        &cluster,
        &["debug", "trace", "--for", "200ms", "--nodes", "-o", path],
    );
    assert!(said.contains("spans"), "{said}");
    whole.await.unwrap().unwrap();
    let trace = Trace::decode(std::fs::read(&file).unwrap().as_slice()).unwrap();
    let names = trace.packet.iter().filter_map(|packet| match &packet.data {
        Some(Data::Event(event)) => event.name.clone(),
        _ => None,
    });
    let names: std::collections::HashSet<String> = names.collect();
    for name in [
        "decode",
        "compute",
        "layers.2.mul_mat.3",
        "logits",
        "traced",
    ] {
        assert!(names.contains(name), "{names:?}");
    }
}

#[tokio::test]
async fn the_clients_calls_are_on_the_timeline_of_those_who_serve_them() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let file = cluster.folder.path().join("asked.pftrace");
    let path = file.to_str().unwrap();
    let arguments = ["debug", "trace", "--for", "1500ms", "-o", path];
    let asked = ["--prompt", "In the beginning", "--tokens", "20"];
    hotcell(&cluster, &[&arguments[..], &asked].concat());
    let trace = Trace::decode(std::fs::read(&file).unwrap().as_slice()).unwrap();
    // Slices as they begin and end, each on its track's stack: name, begin, end, trace.
    let (mut open, mut slices) = (HashMap::new(), Vec::new());
    for packet in &trace.packet {
        let (Some(at), Some(Data::Event(event))) = (packet.timestamp, &packet.data) else {
            continue;
        };
        let stack: &mut Vec<_> = open.entry(event.track_uuid).or_default();
        match event.kind {
            Some(1) => stack.push((event, at)),
            Some(2) => {
                let (begun, from) = stack.pop().unwrap();
                let mut notes = begun.debug_annotations.iter();
                let trace = notes.find_map(|note| note.string_value.clone());
                slices.push((begun.name.clone().unwrap(), from, at, trace));
            }
            _ => {}
        }
    }
    let named = |name: &str| {
        let mut found = slices.iter().filter(|slice| slice.0 == name);
        found
            .next()
            .unwrap_or_else(|| panic!("no {name:?}: {slices:?}"))
    };
    let (_, begin, end, id) = named("Tokens.Generate");
    let parts = ["until it is accepted", "until the first token", "tokens"].map(named);
    assert_eq!((parts[0].1, parts[2].2), (*begin, *end));
    assert!(
        parts.windows(2).all(|pair| pair[0].2 == pair[1].1),
        "{parts:?}"
    );
    // The scheduler had it under the client's trace, and the worker computed it, in between.
    let of_trace = slices
        .iter()
        .filter(|slice| slice.3 == *id && slice.0.starts_with("r-"));
    let (_, from, to, _) = of_trace
        .clone()
        .next()
        .unwrap_or_else(|| panic!("{slices:?}"));
    // It may note the end after it has told it.
    assert!(
        begin <= from && from < end && begin < to,
        "{begin} {from} {to} {end}"
    );
    let inside = slices
        .iter()
        .filter(|slice| slice.0.ends_with("decode") && begin <= &slice.1 && &slice.2 <= end);
    assert!(inside.count() > 2, "{slices:?}");
    let (_, asked, done, _) = named("Debug.Trace");
    assert!(asked < begin && end < done);
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_graphs_are_on_the_timeline() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let address: Address = format!("unix:{}", cluster.socket.display())
        .parse()
        .unwrap();
    let session = Session::open(&address, SessionOptions::default())
        .await
        .unwrap();
    let one = session
        .tensor(&vec![1f32; 1 << 12], &[1 << 6, 1 << 6])
        .unwrap();
    let mut pieces = client
        .trace_worker("w0", Duration::from_millis(500), false)
        .await
        .unwrap();
    pieces.next().await.unwrap().unwrap();
    const CALLS: usize = 5;
    for _ in 0..CALLS {
        (&one + &one).eval().await.unwrap();
    }
    let spans = spans(pieces).await.unwrap();
    let of = |track: TraceTrack| spans.iter().filter(move |span| span.track() == track);
    assert_eq!(of(TraceTrack::Steps).count(), 0);
    let graphs: Vec<_> = of(TraceTrack::Tensors).collect();
    // One that was paused is there in pieces.
    assert!(graphs.len() >= CALLS, "{graphs:?}");
    for graph in graphs {
        assert!(graph.duration_ns > 0 && graph.step > 0, "{graph:?}");
    }
}

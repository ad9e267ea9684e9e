//! Traces: a timeline that Perfetto reads, on which nodes lie inside of steps.

use std::time::Duration;

use hotcell_client::{
    debug::perfetto::{Data, Trace},
    v1::{TraceTrack, trace_piece::Kind},
};
use prost::Message;

use super::{hotcell, kjv_cluster, long};

#[tokio::test]
async fn nodes_lie_inside_of_the_steps_that_compute_them() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let stream = client
        .generate("In the beginning", long("traced"))
        .await
        .unwrap();
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
    assert!(
        nodes.len() > 10 * device.len(),
        "{} in {} steps",
        nodes.len(),
        device.len()
    );
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
    assert!(of(TraceTrack::Requests).any(|span| span.name == "traced"));
    assert!(
        counts
            .iter()
            .any(|count| count.name == "cache" && count.value > 0)
    );
    assert_eq!(whole.await.unwrap().unwrap().token_ids.len(), 400);
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
    for name in ["step", "compute", "mul_mat", "traced"] {
        assert!(names.contains(name), "{names:?}");
    }
}

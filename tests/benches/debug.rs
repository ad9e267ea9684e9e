//! What it costs others when somebody looks into their worker, and how long that takes to begin.
//!
//! `cargo bench -p hotcell-tests --bench debug`

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use hotcell_client::{
    Client, GenerateOptions, Prompt,
    debug::perfetto,
    v1::{self, condition::Kind, trace_piece},
};
use hotcell_tests::{
    bench::{Goal, figure, median},
    cluster::{Cluster, all_have, kjv},
};
use tokio::task::{JoinHandle, JoinSet};

/// Streams at once, tokens of each, and rounds of each kind.
const STREAMS: u32 = 8;
const TOKENS: u32 = 200;
const ROUNDS: usize = 9;

/// Who looks meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Looker {
    Watch,
    Trace,
    TraceNodes,
    GuardOne,
    GuardAll,
}

impl Looker {
    const ALL: [(Self, &'static str, Goal); 5] = [
        (Self::Watch, "watch", Goal::AtMost(1.0)),
        (Self::Trace, "trace", Goal::None),
        (Self::TraceNodes, "trace_nodes", Goal::None),
        (Self::GuardOne, "watchpoint_one_node", Goal::None),
        (Self::GuardAll, "watchpoint_all_nodes", Goal::None),
    ];

    /// Looks until the task is aborted. Returns once it does.
    async fn begin(self, client: Client) -> Result<JoinHandle<()>> {
        let guard = |nodes: &[&str]| v1::GuardRequest {
            nodes: nodes.iter().map(|node| (*node).to_owned()).collect(),
            conditions: vec![v1::Condition {
                kind: Some(Kind::Nan(true)),
            }],
            ..v1::GuardRequest::default()
        };
        Ok(match self {
            Self::Watch => {
                let every = Duration::from_millis(100);
                let mut samples = client.watch_worker("", every).await?;
                samples.next().await.context("no sample")??;
                tokio::spawn(async move { while samples.next().await.is_some() {} })
            }
            Self::Trace | Self::TraceNodes => {
                let nodes = self == Self::TraceNodes;
                let time = Duration::from_secs(60);
                let mut pieces = client.trace_worker("", time, nodes).await?;
                pieces.next().await.context("no head")??;
                tokio::spawn(async move { while pieces.next().await.is_some() {} })
            }
            Self::GuardOne | Self::GuardAll => {
                let nodes: &[&str] = match self {
                    Self::GuardOne => &["layers.2.mul_mat.6"],
                    _ => &[],
                };
                let mut hits = client.guard(guard(nodes)).await?;
                hits.next().await.context("not armed")??;
                tokio::spawn(async move { while hits.next().await.is_some() {} })
            }
        })
    }
}

/// Tokens per second of all streams together.
async fn speed(client: &Client) -> Result<f64> {
    let start = Instant::now();
    let mut streams = JoinSet::new();
    for stream in 0..STREAMS {
        let options = GenerateOptions {
            max_tokens: TOKENS,
            ignore_eos: true,
            ..GenerateOptions::default()
        };
        let prompt = Prompt::Ids((0..16).map(|i| 300 + 17 * stream + i).collect());
        let stream = client.generate(prompt, options).await?;
        streams.spawn(stream.complete());
    }
    let mut tokens = 0;
    while let Some(done) = streams.join_next().await {
        tokens += done??.token_ids.len();
    }
    Ok(tokens as f64 / start.elapsed().as_secs_f64())
}

async fn overheads(client: &Client) -> Result<()> {
    speed(client).await?;
    for (looker, name, goal) in Looker::ALL {
        // In turns, so that what else the machine does hits both alike.
        let mut costs = Vec::new();
        for _ in 0..ROUNDS {
            let without = speed(client).await?;
            let looking = looker.begin(client.clone()).await?;
            let with = speed(client).await?;
            looking.abort();
            let _ = looking.await;
            costs.push((1.0 - with / without) * 100.0);
        }
        figure(&format!("debug_{name}_cost"), median(costs), "%", goal);
    }
    Ok(())
}

async fn attaching(client: &Client) -> Result<()> {
    let (mut arming, mut replaying) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let start = Instant::now();
        let looking = Looker::GuardAll.begin(client.clone()).await?;
        arming.push(start.elapsed().as_secs_f64() * 1e3);
        looking.abort();
        let id = format!("again-{round}");
        let options = GenerateOptions {
            max_tokens: 1,
            request_id: id.clone(),
            ..GenerateOptions::default()
        };
        let stream = client.generate("In the beginning", options).await?;
        stream.complete().await?;
        let start = Instant::now();
        let request = v1::ReplayRequest {
            which: Some(v1::replay_request::Which::RequestId(id)),
            ..v1::ReplayRequest::default()
        };
        let mut told = client.replay(request).await?;
        told.next().await.context("nothing was computed")??;
        replaying.push(start.elapsed().as_secs_f64() * 1e3);
    }
    figure("debug_attach_watchpoint", median(arming), "ms", Goal::None);
    figure("debug_attach_replay", median(replaying), "ms", Goal::None);
    Ok(())
}

async fn size(client: &Client) -> Result<()> {
    let time = Duration::from_millis(500);
    let mut pieces = client.trace_worker("", time, true).await?;
    let running = tokio::spawn({
        let client = client.clone();
        async move { speed(&client).await }
    });
    let (mut head, mut spans, mut counts) = (None, Vec::new(), Vec::new());
    while let Some(piece) = pieces.next().await {
        match piece?.kind {
            Some(trace_piece::Kind::Head(said)) => head = Some(said),
            Some(trace_piece::Kind::Spans(some)) => {
                spans.extend(some.spans);
                counts.extend(some.counts);
            }
            _ => {}
        }
    }
    running.await??;
    let steps = spans
        .iter()
        .filter(|span| span.track() == v1::TraceTrack::Steps);
    let steps = steps.count().max(1);
    let bytes = perfetto::encode(&head.context("no head")?, &spans, &counts).len();
    let per_step = bytes as f64 / steps as f64;
    figure("debug_trace_bytes_per_step", per_step, "B", Goal::None);
    Ok(())
}

async fn run() -> Result<()> {
    let cluster = Cluster::with_model("kjv", &kjv(), &["--devices", "cpu:1"]).await?;
    cluster.workers(all_have("kjv")).await?;
    let client = cluster.client().await?;
    overheads(&client).await?;
    attaching(&client).await?;
    size(&client).await
}

fn main() -> Result<()> {
    // `cargo test` runs benches with --test; there is nothing to check here.
    if std::env::args().any(|a| a == "--test") {
        return Ok(());
    }
    tokio::runtime::Runtime::new()?.block_on(run())
}

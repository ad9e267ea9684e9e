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
    bench::{Goal, figure, median, p99},
    cluster::{Cluster, all_have, kjv, signal_pid},
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
    let (mut watching, mut arming, mut replaying) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let start = Instant::now();
        // Until the first sample, which covers 50 ms.
        let every = Duration::from_millis(50);
        let mut samples = client.watch_worker("", every).await?;
        samples.next().await.context("no sample")??;
        watching.push(start.elapsed().as_secs_f64() * 1e3);
        drop(samples);
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
    figure("debug_attach_watch", median(watching), "ms", Goal::None);
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

/// Milliseconds between two events of streams that others read, while they are served.
async fn gaps(client: &Client) -> Result<Vec<f64>> {
    let mut streams = JoinSet::new();
    for stream in 0..STREAMS / 2 {
        let options = GenerateOptions {
            max_tokens: TOKENS,
            ignore_eos: true,
            ..GenerateOptions::default()
        };
        let prompt = Prompt::Ids((0..16).map(|i| 300 + 17 * stream + i).collect());
        let mut stream = client.generate(prompt, options).await?;
        streams.spawn(async move {
            let (mut gaps, mut last) = (Vec::new(), None);
            while let Some(event) = stream.next().await {
                event?;
                let now = Instant::now();
                let before = last.replace(now);
                gaps.extend(before.map(|before| (now - before).as_secs_f64() * 1e3));
            }
            anyhow::Ok(gaps)
        });
    }
    let mut all = Vec::new();
    while let Some(done) = streams.join_next().await {
        all.extend(done??);
    }
    Ok(all)
}

/// The request that is looked at: it runs for longer than the others, and until the task is aborted.
async fn debugged(client: &Client, id: &str) -> Result<JoinHandle<()>> {
    let options = GenerateOptions {
        max_tokens: 2 * TOKENS,
        ignore_eos: true,
        request_id: id.to_owned(),
        ..GenerateOptions::default()
    };
    let mut stream = client.generate("And God said", options).await?;
    stream.next().await.context("no event")??;
    Ok(tokio::spawn(async move {
        while stream.next().await.is_some() {}
    }))
}

/// Ways to look at a worker and at one of its requests, while others are served.
#[derive(Clone, Copy, Debug)]
struct Ways {
    watch: bool,
    trace: bool,
    capture: bool,
    replay: bool,
}

impl Ways {
    const NONE: Self = Self {
        watch: false,
        trace: false,
        capture: false,
        replay: false,
    };
    const ALL: [(Self, &'static str); 5] = [
        (
            Self {
                watch: true,
                ..Self::NONE
            },
            "_by_watch",
        ),
        (
            Self {
                trace: true,
                ..Self::NONE
            },
            "_by_trace",
        ),
        (
            Self {
                capture: true,
                ..Self::NONE
            },
            "_by_capture",
        ),
        (
            Self {
                replay: true,
                ..Self::NONE
            },
            "_by_replay",
        ),
        (
            Self {
                watch: true,
                trace: true,
                capture: true,
                replay: true,
            },
            "",
        ),
    ];

    /// Begins one long request and looks at it, until what it returns is dropped. A replay is begun again and again.
    async fn begin(self, client: &Client, id: &str) -> Result<Vec<Aborted>> {
        let mut all = Vec::new();
        for (looks, looker) in [
            (self.watch, Looker::Watch),
            (self.trace, Looker::TraceNodes),
        ] {
            if looks {
                all.push(Aborted(looker.begin(client.clone()).await?));
            }
        }
        if self.capture {
            let request = v1::CaptureRequest {
                which: Some(v1::capture_request::Which::RequestId(id.to_owned())),
                ..v1::CaptureRequest::default()
            };
            let mut capture = client.capture(request).await?;
            let captured = async move { while capture.next().await.is_some() {} };
            all.push(Aborted(tokio::spawn(captured)));
        }
        all.push(Aborted(debugged(client, id).await?));
        if self.replay {
            let (client, id) = (client.clone(), id.to_owned());
            all.push(Aborted(tokio::spawn(async move {
                loop {
                    let request = v1::ReplayRequest {
                        which: Some(v1::replay_request::Which::RequestId(id.clone())),
                        ..v1::ReplayRequest::default()
                    };
                    let Ok(mut told) = client.replay(request).await else {
                        return;
                    };
                    while told.next().await.is_some() {}
                }
            })));
        }
        Ok(all)
    }
}

/// What is done until this is dropped.
struct Aborted(JoinHandle<()>);

impl Drop for Aborted {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// How much later others have their tokens. The request runs either way: what counts is that somebody looks at it.
async fn others(client: &Client) -> Result<()> {
    gaps(client).await?;
    for (ways, name) in Ways::ALL {
        let mut more = Vec::new();
        for round in 0..ROUNDS {
            let alone = Ways::NONE
                .begin(client, &format!("alone{name}-{round}"))
                .await?;
            let without = p99(gaps(client).await?);
            drop(alone);
            let looked = ways.begin(client, &format!("looked{name}-{round}")).await?;
            let with = p99(gaps(client).await?);
            drop(looked);
            more.push((with / without - 1.0) * 100.0);
        }
        let goal = match name {
            "" => Goal::AtMost(10.0),
            _ => Goal::None,
        };
        figure(
            &format!("debug_others_p99_growth{name}"),
            median(more),
            "%",
            goal,
        );
    }
    Ok(())
}

/// From a signal that kills the worker until the report of its death is there.
async fn reporting(cluster: &Cluster, client: &Client) -> Result<()> {
    let mut times = Vec::new();
    for round in 0..ROUNDS {
        let worker = cluster.workers(all_have("kjv")).await?;
        let worker = worker.first().context("no worker")?;
        let options = GenerateOptions {
            max_tokens: TOKENS,
            ignore_eos: true,
            ..GenerateOptions::default()
        };
        let mut stream = client.generate("In the beginning", options).await?;
        stream.next().await.context("no event")??;
        let start = Instant::now();
        signal_pid(worker.pid, rustix::process::Signal::SEGV)?;
        while client.crashes().await?.len() <= round {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        times.push(start.elapsed().as_secs_f64() * 1e3);
        // It goes on on the next process.
        while let Some(event) = stream.next().await {
            event?;
        }
    }
    figure("debug_crash_to_report", median(times), "ms", Goal::None);
    Ok(())
}

async fn run() -> Result<()> {
    let cluster = Cluster::with_model("kjv", &kjv(), &["--devices", "cpu:1"]).await?;
    cluster.workers(all_have("kjv")).await?;
    let client = cluster.client().await?;
    overheads(&client).await?;
    attaching(&client).await?;
    size(&client).await?;
    others(&client).await?;
    reporting(&cluster, &client).await
}

fn main() -> Result<()> {
    // `cargo test` runs benches with --test; there is nothing to check here.
    if std::env::args().any(|a| a == "--test") {
        return Ok(());
    }
    tokio::runtime::Runtime::new()?.block_on(run())
}

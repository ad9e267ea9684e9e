//! What it costs others when somebody looks into their worker, and how long that takes to begin.
//!
//! `cargo bench -p hotcell-tests --bench debug [-- SECTION…]`, of these sections: overheads, attaching, size, others, or
//! one way of looking at others as in `others_by_trace`, some of them (`others_by_trace_capture`), and all, `others_at_once`; reporting. Only where they are
//! named: others_1b, or `others_1b_by_trace` and the like, the same with a model of a billion parameters; and large, a
//! capture of more than 4 GiB, which takes twice that of the disk.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use hotcell_client::{
    Client, GenerateOptions, Prompt,
    debug::perfetto,
    v1::{self, condition::Kind, trace_piece},
};
use hotcell_ipc::turns;
use hotcell_proto::limits;
use hotcell_tests::{
    bench::{Goal, figure, median},
    cluster::{Cluster, Process, all_have, children, hotcell, kjv, most_resident, signal_pid},
    synthetic::{
        Measures,
        gguf::{self, Weights},
    },
};
use tokio::task::{JoinHandle, JoinSet};

#[allow(dead_code)] // the engine's benchmark asks for more
#[path = "engine/models.rs"]
mod models;
#[path = "debug/others.rs"]
mod others;

use others::{FEW, LONG, MANY, SHORT, look, others};

/// Streams at once, tokens of each, and rounds of each kind.
const STREAMS: u32 = 8;
const TOKENS: u32 = 200;
const ROUNDS: usize = 10;

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
            max_tokens: LONG,
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
        let rounds = match goal {
            Goal::None => ROUNDS,
            // One run of ten rounds differs from the next by as much as the goal.
            _ => 4 * ROUNDS,
        };
        for round in 0..rounds {
            let (mut with, mut without) = (0.0, 0.0);
            // Each first as often as second.
            for looks in [round % 2 == 0, round % 2 == 1] {
                if !looks {
                    without = speed(client).await?;
                    continue;
                }
                let looking = looker.begin(client.clone()).await?;
                with = speed(client).await?;
                looking.abort();
                let _ = looking.await;
            }
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

/// A model whose logits are large, and nothing else is.
const WIDE: Measures = Measures {
    hidden: 64,
    layers: 1,
    heads: 1,
    kv_heads: 1,
    inner: 64,
    vocab: 1 << 18,
    context: 8192,
    tied: true,
};

/// Bytes that a capture may have, of the values of so many tokens.
const BUDGET: u64 = limits::MAX_CAPTURE_BYTES;
const WIDE_TOKENS: u32 = 4200;

/// A capture of more values than any may have: what it takes of its processes, and what it says of those left out.
async fn large() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let model = folder.path().join("wide.gguf");
    let stored = Weights::from_name("bf16").context("no such type")?;
    gguf::write(&model, "wide", &WIDE, stored)?;
    let cluster = Cluster::with_model("wide", &model, &["--devices", "cpu:1"]).await?;
    cluster.workers(all_have("wide")).await?;
    let client = cluster.client().await?;
    let options = GenerateOptions {
        max_tokens: WIDE_TOKENS,
        ignore_eos: true,
        request_id: "wide".to_owned(),
        ..GenerateOptions::default()
    };
    let stream = client
        .generate(Prompt::Ids(vec![300, 301]), options)
        .await?;
    let drawn = stream.complete().await?.token_ids.len();
    ensure!(drawn == WIDE_TOKENS as usize, "{drawn} tokens");
    let own = cluster.scheduler.pid();
    let (before, serving) = (most_resident(own)?, children(own)?);
    let file = folder.path().join("large.hotcell");
    let mut command = hotcell(folder.path())?;
    let address = format!("unix:{}", cluster.socket.display());
    command.args(["--address", &address, "--json", "debug", "replay", "wide"]);
    let budget = BUDGET.to_string();
    command.args(["--values", "all", "--max-bytes", &budget, "-o"]);
    let said = std::fs::File::create(folder.path().join("said"))?;
    let start = Instant::now();
    let mut replay = Process::start(command.arg(&file).stdout(said))?;
    // What the command and the throw-away worker had at most.
    let (mut command_had, mut worker_had) = (0, 0);
    while let Ok(had) = most_resident(replay.pid()) {
        command_had = command_had.max(had);
        let all = children(own)?.into_iter();
        for pid in all.filter(|pid| !serving.contains(pid)) {
            worker_had = worker_had.max(most_resident(pid).unwrap_or(0));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    ensure!(replay.wait()?.success(), "{}", replay.log());
    let took = start.elapsed().as_secs_f64();
    let said = std::fs::read_to_string(folder.path().join("said"))?;
    let told: serde_json::Value = serde_json::from_str(said.lines().last().context("silent")?)?;
    let number = |key: &str| told[key].as_u64().with_context(|| format!("no {key}"));
    ensure!(number("tokens")? == u64::from(WIDE_TOKENS), "{told}");
    let size = std::fs::metadata(&file)?.len();
    let row = 4 * WIDE.vocab as u64;
    let left_out = number("left_out_bytes")?;
    println!("{told}");
    // All but less than the row that did not fit is there; and all of the logits are there, or left out.
    ensure!(size <= BUDGET + 2 * limits::MAX_CAPTURE_HEADER, "{size}");
    ensure!(size + row > BUDGET, "{size} bytes");
    ensure!(size + left_out > row * u64::from(WIDE_TOKENS), "{left_out}");
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let most = Goal::AtMost(256.0);
    figure("debug_capture_4gib_command", mib(command_had), "MiB", most);
    figure("debug_capture_4gib_worker", mib(worker_had), "MiB", most);
    let more = most_resident(own)?.saturating_sub(before);
    figure("debug_capture_4gib_scheduler", mib(more), "MiB", most);
    let rate = mib(size) / took;
    figure("debug_capture_4gib_rate", rate, "MiB/s", Goal::None);
    Ok(())
}

async fn run() -> Result<()> {
    let cluster = Cluster::with_model("kjv", &kjv(), &["--devices", "cpu:1"]).await?;
    cluster.workers(all_have("kjv")).await?;
    let client = cluster.client().await?;
    if wants("overheads") {
        overheads(&client).await?;
    }
    if wants("attaching") {
        attaching(&client).await?;
    }
    if wants("size") {
        size(&client).await?;
    }
    others(&cluster, &client, ("", LONG, MANY)).await?;
    if wants("reporting") {
        reporting(&cluster, &client).await?;
    }
    drop((client, cluster));
    if std::env::args().skip(1).any(|a| a == "large") {
        large().await?;
    }
    if std::env::args().skip(1).any(|a| a.starts_with("others_1b")) {
        let model = models::Model::get("llama-1b", "q4_0")?;
        model.warm()?;
        let cluster = Cluster::with_model("1b", model.path(), &["--devices", "cpu:1"]).await?;
        cluster.workers(all_have("1b")).await?;
        let client = cluster.client().await?;
        others(&cluster, &client, ("_1b", SHORT, FEW)).await?;
    }
    Ok(())
}

/// Whether a section is asked for: all are if none is named.
fn wants(section: &str) -> bool {
    let mut named = std::env::args().skip(1).filter(|a| !a.starts_with('-'));
    let mut none = true;
    let wanted = named.any(|name| {
        none = false;
        name == section
    });
    wanted || none
}

fn main() -> Result<()> {
    // `cargo test` runs benches with --test; there is nothing to check here.
    if std::env::args().any(|a| a == "--test") {
        return Ok(());
    }
    let arguments: Vec<String> = std::env::args().collect();
    let work = async {
        match arguments.as_slice() {
            [_, look_at, address, id, ways @ ..] if look_at == "look" => {
                look(address, id, ways).await
            }
            _ => run().await,
        }
    };
    // The others' programs run elsewhere as well: what they are sent they have when it comes.
    if arguments.get(1).is_none_or(|a| a != "look") {
        turns::take(turns::SHORT)?;
    }
    tokio::runtime::Runtime::new()?.block_on(work)
}

//! The road: how fast the bundled model runs, and what processes and plans cost on top.
//!
//! `cargo bench -p hotcell-tests --bench road`

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use hotcell_client::{Client, Event, GenerateOptions, Prompt};
use hotcell_graph::{DType, op::ValueSpec};
use hotcell_kernels::{
    backend::Device,
    cpu::{CpuDevice, path::CpuPath},
    plan::{PlanHints, Slot},
    registry::Registry,
};
use hotcell_tests::{
    bench::{Goal, figure, median},
    cluster::{Cluster, all_have, kjv, signal_pid},
    model::{Solo, argmax, open},
    synthetic::{Measures, write},
};
use hotcell_worker::{
    engine::{Engine, EngineConfig},
    model::{graph, run::RunShape, weave::Pattern},
};
use rustix::process::Signal;
use tokio::sync::mpsc;

const PROMPT: &str = "In the beginning";
const TOKENS: u32 = 256;

fn threads() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| n.get() as u32)
}

/// Prefill and decode of the bundled model by plans alone: no process, no sampling.
fn engine_speed() -> Result<()> {
    let source = open(&kjv())?;
    let mut solo = Solo::new(&source, threads(), CpuPath::detect(), DType::F16)?;
    let prompt: Vec<u32> = (0..512u32).map(|i| 300 + i % 700).collect();
    let mut prefill = Vec::new();
    let mut decode = Vec::new();
    for _ in 0..5 {
        solo.reset();
        let start = Instant::now();
        let logits = solo.feed(&prompt, 64)?;
        prefill.push(prompt.len() as f64 / start.elapsed().as_secs_f64());
        let mut token = argmax(logits.last().context("no logits")?) as u32;
        solo.reset();
        let start = Instant::now();
        for _ in 0..TOKENS {
            token = argmax(&solo.feed(&[token], 1)?[0]) as u32;
        }
        decode.push(f64::from(TOKENS) / start.elapsed().as_secs_f64());
    }
    figure("kjv_prefill", median(prefill), "tokens/s", Goal::None);
    figure("kjv_decode", median(decode), "tokens/s", Goal::None);
    Ok(())
}

/// A step of a 15M-parameter model (6 layers, width 288: `stories15M`) whose kernels do nothing: what
/// plan, barriers and wake-ups cost.
fn empty_step() -> Result<()> {
    let folder = hotcell_tests::cluster::private_folder()?;
    let measures = Measures {
        context: 256,
        ..Measures::LLAMA_15M
    };
    write(folder.path(), &measures)?;
    let source = open(folder.path())?;
    let config = &source.config;
    let shape = RunShape {
        max_rows: 8,
        max_sequences: 1,
        ..RunShape::for_model(config, DType::F16)
    };
    let device = CpuDevice::with_path(threads(), CpuPath::detect())?;
    let pattern = Pattern {
        config,
        names: source.names,
        weights: &source.weights,
        shape: &shape,
    };
    let (body, head) = (graph::body(pattern)?, graph::head(pattern)?);
    let mut plans = Vec::new();
    let mut keep = Vec::new();
    for sourced in [&body, &head] {
        let mut plan = device.plan(
            &sourced.graph,
            &PlanHints {
                empty_kernels: true,
                ..PlanHints::default()
            },
        )?;
        for (i, input) in sourced.graph.inputs().iter().enumerate() {
            let bytes = match &input.spec {
                ValueSpec::Tensor(t) => t.bytes(shape.max_rows),
                ValueSpec::Cache(c) => c.bytes(),
                ValueSpec::Absent => None,
            };
            let buffer = device.allocate("input", bytes.context("too large")?)?;
            plan.bind(Slot::Input(i), &buffer, 0)?;
            keep.push(buffer);
        }
        let bytes = 4 * shape.max_rows * config.vocab.max(config.hidden);
        plan.bind(Slot::Output(0), &device.allocate("output", bytes)?, 0)?;
        plans.push(plan);
    }
    let mut stream = device.stream();
    let mut times = Vec::new();
    for _ in 0..2000 {
        let start = Instant::now();
        for plan in &mut plans {
            stream.execute(plan.as_mut(), 1)?;
        }
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    let steps: usize = plans.iter().map(|p| p.memory().steps).sum();
    let barriers: usize = plans.iter().map(|p| p.memory().barriers).sum();
    println!(
        "empty step: {steps} kernels, {barriers} barriers, {} threads",
        threads()
    );
    figure("empty_step_15m", median(times), "us", Goal::AtMost(100.0));
    Ok(())
}

fn options() -> GenerateOptions {
    GenerateOptions {
        max_tokens: TOKENS,
        ignore_eos: true,
        ..GenerateOptions::default()
    }
}

/// Microseconds per token of a stream, from its first token to its last.
async fn per_token(client: &Client, ids: &[u32]) -> Result<f64> {
    let mut stream = client
        .generate(Prompt::Ids(ids.to_vec()), options())
        .await?;
    let (mut first, mut last, mut tokens) = (None, Instant::now(), 0usize);
    while let Some(event) = stream.next().await {
        if let Event::Delta(delta) = event? {
            last = Instant::now();
            first.get_or_insert(last);
            tokens += delta.token_ids.len();
        }
    }
    let first = first.context("no token")?;
    Ok((last - first).as_secs_f64() * 1e6 / (tokens.max(2) - 1) as f64)
}

/// The same by the engine in this process: sampling, detokenising, channel; no gRPC, no other process.
async fn engine_alone(ids: &[u32]) -> Result<Vec<f64>> {
    use hotcell_proto::v1::{GenerateRequest, Prompt, TokenIds, prompt, tokens_server::Tokens};
    use hotcell_worker::{host::Host, service::TokensService};
    use tokio_stream::StreamExt;
    let engine = Engine::start(EngineConfig {
        device: "cpu:0".to_owned(),
        cores: (0..threads()).collect(),
        cache_dtype: DType::F16,
        model_memory: None,
        max_context: None,
        tensor_memory: None,
        blackbox: None,
        follow: false,
        gives_way: false,
        pins: false,
        registry: Registry::default(),
    })?;
    let host = Host::new(engine, hotcell_worker::confine::Report::default());
    let files = hotcell_tests::model::files(&kjv())?;
    host.load("kjv".to_owned(), files, mpsc::channel(1).0)
        .await?;
    let service = TokensService(host);
    let mut times = Vec::new();
    for _ in 0..9 {
        let request = GenerateRequest {
            prompt: Some(Prompt {
                kind: Some(prompt::Kind::Ids(TokenIds { ids: ids.to_vec() })),
            }),
            max_tokens: TOKENS,
            ignore_eos: true,
            ..GenerateRequest::default()
        };
        let mut stream = service
            .generate(tonic::Request::new(request))
            .await?
            .into_inner();
        let (mut first, mut last, mut tokens) = (None, Instant::now(), 0usize);
        while let Some(event) = stream.next().await {
            if let Some(hotcell_proto::v1::generate_event::Event::Delta(delta)) = event?.event {
                last = Instant::now();
                first.get_or_insert(last);
                tokens += delta.token_ids.len();
            }
        }
        times.push(
            (last - first.context("no token")?).as_secs_f64() * 1e6 / (tokens.max(2) - 1) as f64,
        );
    }
    Ok(times)
}

async fn road() -> Result<()> {
    let cluster = Cluster::with_model(
        "kjv",
        &kjv(),
        &["--restart-budget", "1000", "--restart-backoff", "1ms"],
    )
    .await?;
    cluster.workers(all_have("kjv")).await?;
    let client = cluster.client().await?;
    let ids = client
        .tokenize("kjv", Prompt::from(PROMPT), false)
        .await?
        .ids;

    let alone = median(engine_alone(&ids).await?);
    let mut whole = Vec::new();
    let mut first_token = Vec::new();
    for _ in 0..9 {
        whole.push(per_token(&client, &ids).await?);
        let start = Instant::now();
        let mut stream = client.generate(PROMPT, options()).await?;
        while let Some(event) = stream.next().await {
            if let Event::Delta(_) = event? {
                first_token.push(start.elapsed().as_secs_f64() * 1e3);
                break;
            }
        }
    }
    let whole = median(whole);
    println!("per token: engine alone {alone:.1} us, whole road {whole:.1} us");
    figure("road_tokens", 1e6 / whole, "tokens/s", Goal::None);
    figure(
        "road_overhead",
        whole - alone,
        "us/token",
        Goal::AtMost(150.0),
    );
    figure("road_first_token", median(first_token), "ms", Goal::None);
    figure(
        "kill_to_next_token",
        median(recovery(&cluster, &client, &ids).await?),
        "ms",
        Goal::None,
    );
    Ok(())
}

/// Milliseconds from SIGKILL of the worker to the next token of its stream.
async fn recovery(cluster: &Cluster, client: &Client, ids: &[u32]) -> Result<Vec<f64>> {
    let mut times = Vec::new();
    for _ in 0..15 {
        let pid = cluster
            .workers(all_have("kjv"))
            .await?
            .first()
            .context("no worker")?
            .pid;
        let mut stream = client
            .generate(
                Prompt::Ids(ids.to_vec()),
                GenerateOptions {
                    max_tokens: 1000,
                    ..options()
                },
            )
            .await?;
        for _ in 0..20 {
            stream.next().await.context("ended early")??;
        }
        let killed = Instant::now();
        signal_pid(pid, Signal::KILL)?;
        // What was on its way already still comes; the next token after the longest pause is the new worker's.
        let (mut longest, mut before, mut at) = (Duration::ZERO, killed, killed);
        while let Some(event) = stream.next().await {
            let now = Instant::now();
            if let Event::Delta(_) = event?
                && now - before > longest
            {
                (longest, at) = (now - before, now);
            }
            before = now;
        }
        times.push((at - killed).as_secs_f64() * 1e3);
        cluster
            .workers(|w| all_have("kjv")(w) && w[0].pid != pid)
            .await?;
    }
    Ok(times)
}

fn main() -> Result<()> {
    // `cargo test` runs benches with --test; there is nothing to check here.
    if std::env::args().any(|a| a == "--test") {
        return Ok(());
    }
    engine_speed()?;
    empty_step()?;
    tokio::runtime::Runtime::new()?.block_on(road())
}

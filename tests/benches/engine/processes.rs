//! What processes cost: memory, and what stands between a client and the engine.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use hotcell_client::load::{self, Bounds, Load};
use hotcell_proto::limits;
use hotcell_tests::{bench::Goal, cluster::cpu_seconds};
use tokio::task::JoinSet;

use crate::{
    Bench,
    direct::Direct,
    models::Model,
    served::{SHORT, Served, options, prompt},
};

/// Requests at once.
const CONCURRENCY: usize = 64;
/// Tokens of an answer.
const TOKENS: usize = 16;
/// Requests before which and after which a scheduler is measured: it keeps the streams of fewer.
const EARLIER: usize = 2 * limits::MAX_KEPT_STREAMS;
/// Those that members draw, and of the prompt that they read.
const MEMBERS_TOKENS: usize = 128;
const MEMBERS_PROMPT: usize = 512;
/// And streams beside each other.
const MEMBERS_STREAMS: usize = 16;

/// Bytes of memory that are a process's: of what several have mapped, its share (PSS).
fn memory_share(pid: u32) -> Result<f64> {
    let maps = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let line = maps.lines().find_map(|line| line.strip_prefix("Pss:"));
    let kib = line.and_then(|line| line.split_whitespace().next());
    Ok(kib.context("no Pss")?.parse::<f64>()? * 1024.0)
}

/// Resident memory of all workers (the sum of their PSS, so that what they share counts once), after each of them has
/// drawn tokens: two workers, which share the machine's cores, beside one.
pub async fn memory(bench: &Bench, model: &Model) -> Result<()> {
    let mut bytes = Vec::new();
    for count in [1usize, 2] {
        let devices = format!("cpu:{count}");
        let served = Served::start(model, &["--devices", &devices]).await?;
        // Both are busy then: requests go to where less is waited for.
        served.together(2 * count, options(TOKENS)).await?;
        served.idle().await?;
        let workers = served.workers().await?;
        ensure!(workers.len() == count, "{} workers", workers.len());
        bytes.push(workers.into_iter().map(memory_share).sum::<Result<f64>>()?);
    }
    let [one, two] = bytes[..] else {
        anyhow::bail!("two measurements");
    };
    let mib = |bytes: f64| vec![bytes / f64::from(1 << 20)];
    bench.figure("memory_one", mib(one), "MiB", Goal::None);
    bench.figure("memory_two", mib(two), "MiB", Goal::None);
    let unit = "of one worker's memory";
    bench.figure("memory", vec![two / one], unit, Goal::AtMost(1.15));
    Ok(())
}

/// As many processes of one thread each as there are cores, which compute the model together, each a part of every layer or
/// every one some layers, beside one process of as many threads: a stream's tokens, and a prompt until its first token.
pub async fn members(bench: &Bench, model: &Model) -> Result<()> {
    let count = bench.machine.threads().to_string();
    let one = Served::start(model, &[]).await?;
    for (name, division) in [
        ("members", "--tensor-parallel"),
        ("stages", "--pipeline-parallel"),
    ] {
        let several = Served::start(model, &[division, &count]).await?;
        let (mut decode, mut batch, mut prefill) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..bench.rounds() {
            let (mut rates, mut many, mut seconds) = (Vec::new(), Vec::new(), Vec::new());
            for served in [&one, &several] {
                rates.push(served.together(1, options(MEMBERS_TOKENS)).await?);
                let options = options(MEMBERS_TOKENS);
                many.push(served.together(MEMBERS_STREAMS, options).await?);
                let prompt = served.prompt(MEMBERS_PROMPT);
                seconds.push(served.until_first(prompt).await?);
            }
            decode.push(rates[1] / rates[0]);
            batch.push(many[1] / many[0]);
            prefill.push(seconds[0] / seconds[1]);
        }
        let unit = "of one process with threads";
        bench.figure(&format!("{name}_decode"), decode, unit, Goal::None);
        bench.figure(&format!("{name}_batch"), batch, unit, Goal::None);
        bench.figure(&format!("{name}_prefill"), prefill, unit, Goal::None);
    }
    Ok(())
}

/// What scheduler and worker take of a processor while nobody asks anything of them, with a model loaded and packed.
pub async fn idle(bench: &Bench, model: &Model) -> Result<()> {
    let served = Served::start(model, &[]).await?;
    let mut all = served.workers().await?;
    all.push(served.cluster.scheduler.pid());
    let used = || all.iter().copied().map(cpu_seconds).sum::<Result<f64>>();
    let (start, before) = (Instant::now(), used()?);
    let seconds = if bench.quick { 2 } else { 30 };
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    let percent = (used()? - before) / start.elapsed().as_secs_f64() * 100.0;
    let unit = "% of a core";
    bench.figure("idle", vec![percent], unit, Goal::AtMost(1.0));
    Ok(())
}

/// Many short requests through the scheduler, beside the same by the engine in this process; both from packed weights.
pub async fn requests(bench: &Bench, model: &Model) -> Result<()> {
    let requests = if bench.quick { 200 } else { 1000 };
    let served = Served::start(model, &[]).await?;
    let mut load = Load {
        options: options(TOKENS),
        prompt_tokens: SHORT as u32,
        vocabulary: model.vocabulary,
        streams: CONCURRENCY,
        requests: CONCURRENCY,
        seed: 1 << 32,
        bounds: Bounds::default(),
    };
    load::run(&served.client, &load, || {}).await?;
    (load.requests, load.seed) = (requests, 2 << 32);
    let scheduler = served.cluster.scheduler.pid();
    let before = cpu_seconds(scheduler)?;
    let outcome = load::run(&served.client, &load, || {}).await?;
    let used = cpu_seconds(scheduler)? - before;
    ensure!(outcome.failed == 0, "{:?}", outcome.problem);
    drop(served);

    let direct = Arc::new(Direct::load(model).await?);
    all(&direct, model, CONCURRENCY).await?;
    let seconds = all(&direct, model, requests).await?;
    let rate = (requests * TOKENS) as f64 / seconds;

    let unit = "of the engine's tokens/s without";
    let share = outcome.tokens_per_second / rate;
    bench.figure("requests", vec![share], unit, Goal::AtLeast(0.95));
    let rate = vec![outcome.tokens_per_second];
    bench.figure("requests_rate", rate, "tokens/s", Goal::None);
    let percent = vec![used / outcome.seconds * 100.0];
    bench.figure(
        "requests_scheduler",
        percent,
        "% of a core",
        Goal::AtMost(10.0),
    );
    Ok(())
}

/// What a request takes of a scheduler that has had thousands before, beside one that has not, in turns: nothing may grow
/// with them, and one that keeps as many streams as it may forgets one for each that ends. Of a model so small that requests
/// are most of the work.
pub async fn late(bench: &Bench) -> Result<()> {
    let model = Model::get("llama-15m", "q4_0")?;
    let mut seed = 3 << 32;
    let mut several = async |served: &Served, requests: usize| -> Result<(f64, f64)> {
        seed += 1 << 32;
        let load = Load {
            options: options(TOKENS),
            prompt_tokens: SHORT as u32,
            vocabulary: model.vocabulary,
            streams: CONCURRENCY,
            requests,
            seed,
            bounds: Bounds::default(),
        };
        let scheduler = served.cluster.scheduler.pid();
        let before = cpu_seconds(scheduler)?;
        let outcome = load::run(&served.client, &load, || {}).await?;
        ensure!(outcome.failed == 0, "{:?}", outcome.problem);
        let used = cpu_seconds(scheduler)? - before;
        Ok((outcome.tokens_per_second, used / requests as f64))
    };
    let (rounds, each, earlier) = match bench.quick {
        true => (2, 100, 200),
        false => (8, 400, EARLIER),
    };
    let old = Served::start(&model, &[]).await?;
    several(&old, earlier).await?;
    let new = Served::start(&model, &[]).await?;
    several(&new, CONCURRENCY).await?;
    let (mut rates, mut rate, mut times, mut time) = (vec![], vec![], vec![], vec![]);
    for _ in 0..rounds {
        let (first, last) = (several(&new, each).await?, several(&old, each).await?);
        rates.push(last.0 / first.0);
        rate.push(last.0);
        times.push(last.1 / first.1);
        time.push(last.1 * 1e6);
    }
    let unit = "of a new scheduler's tokens/s";
    bench.figure("late", rates, unit, Goal::AtLeast(0.95));
    bench.figure("late_rate", rate, "tokens/s", Goal::None);
    let unit = "of a new scheduler's processor time";
    bench.figure("late_scheduler", times, unit, Goal::AtMost(1.2));
    bench.figure("late_request", time, "us", Goal::None);
    Ok(())
}

/// Runs so many requests by the engine; seconds.
async fn all(direct: &Arc<Direct>, model: &Model, requests: usize) -> Result<f64> {
    let next = Arc::new(AtomicU64::new(0));
    let mut streams = JoinSet::new();
    let start = Instant::now();
    for _ in 0..CONCURRENCY.min(requests) {
        let (direct, next) = (Arc::clone(direct), Arc::clone(&next));
        // None of them like those that came before.
        let (vocabulary, first) = (model.vocabulary, requests as u64);
        streams.spawn(async move {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= requests as u64 {
                    return anyhow::Ok(());
                }
                let prompt = prompt(first + number, SHORT, vocabulary);
                direct.stream(prompt, TOKENS).await?;
            }
        });
    }
    for done in streams.join_all().await {
        done?;
    }
    Ok(start.elapsed().as_secs_f64())
}

//! Known answers: what it costs to ask a worker for them, when it begins to serve and when it is idle.
//!
//! `cargo bench -p hotcell-tests --bench known`

use std::{path::Path, time::Instant};

use anyhow::Result;
use hotcell_graph::DType;
use hotcell_proto::limits;
use hotcell_tests::{
    bench::{Goal, figure, median},
    cluster::kjv,
    model::files,
    synthetic::{Measures, write},
};
use hotcell_worker::{
    engine::{Engine, EngineConfig},
    host::Host,
};
use tokio::sync::mpsc;

/// Seconds between two checks of an idle worker, unless told otherwise.
const INTERVAL: f64 = 60.0;

async fn host(path: &Path) -> Result<Host> {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
    let engine = Engine::start(EngineConfig {
        device: "cpu:0".to_owned(),
        cores: (0..threads).collect(),
        cache_dtype: DType::F16,
        model_memory: None,
        max_context: None,
        tensor_memory: None,
        blackbox: None,
        follow: false,
        gives_way: false,
        pins: false,
        registry: hotcell_kernels::registry::Registry::default(),
    })?;
    let host = Host::new(engine, hotcell_worker::confine::Report::default());
    host.load("m".to_owned(), files(path)?, mpsc::channel(1).0)
        .await?;
    Ok(host)
}

/// Milliseconds of a check of so many steps, the first one of a process and the median of later ones.
async fn check(path: &Path, steps: u32, part: bool, times: u32) -> Result<(f64, f64)> {
    let host = host(path).await?;
    let mut took = Vec::new();
    for round in 0..times {
        let start = Instant::now();
        host.check("m", steps, part.then_some(round)).await?;
        took.push(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok((took.first().copied().unwrap_or(f64::NAN), median(took)))
}

async fn measure(name: &str, path: &Path, times: u32, goal: Goal) -> Result<()> {
    let (first, _) = check(path, 1, false, 1).await?;
    let (_, idle) = check(path, limits::MAX_CHECK_STEPS, true, times).await?;
    // What a stream waits for longer when its worker is spawned again.
    figure(&format!("known_answer_spawn_{name}"), first, "ms", goal);
    figure(&format!("known_answer_idle_{name}"), idle, "ms", Goal::None);
    // A check that took long is followed by a longer pause.
    let pause = INTERVAL.max(idle / 1e3 * f64::from(hotcell_scheduler::known::SHARE));
    figure(
        &format!("known_answer_cost_percent_{name}"),
        idle / 1e3 / pause * 100.0,
        "%",
        Goal::AtMost(0.1),
    );
    Ok(())
}

async fn run() -> Result<()> {
    measure("kjv", &kjv(), 50, Goal::AtMost(5.0)).await?;
    let folder = hotcell_tests::cluster::private_folder()?;
    write(folder.path(), &Measures::GIB)?;
    measure("1gib", folder.path(), 5, Goal::None).await
}

fn main() -> Result<()> {
    // `cargo test` runs benches with --test; there is nothing to check here.
    if std::env::args().any(|a| a == "--test") {
        return Ok(());
    }
    tokio::runtime::Runtime::new()?.block_on(run())
}

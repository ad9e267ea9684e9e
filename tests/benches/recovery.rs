//! What a client sees of a death: the time from SIGKILL of its worker to the next token of its stream.
//!
//! `cargo bench -p hotcell-tests --bench recovery`

use std::path::Path;

use anyhow::{Context, Result};
use hotcell_client::{GenerateOptions, v1::WorkerState};
use hotcell_tests::{
    bench::{Goal, figure, median, p99},
    cluster::{Cluster, all_have, kjv},
    killed::killed_after,
    synthetic::{Measures, write},
};

/// How one of the runs is done.
struct Run {
    name: &'static str,
    /// Kills.
    kills: usize,
    /// Tokens that a stream has said when its worker is killed.
    before: usize,
    /// Tokens of a whole stream.
    tokens: u32,
    standby: bool,
    goal: Goal,
}

/// Resident memory of a process, its own and that of mapped files.
fn memory(pid: u32) -> Result<String> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let resident = status.lines().filter(|line| line.starts_with("Rss"));
    let words = resident.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    Ok(words.collect::<Vec<_>>().join(", "))
}

async fn measure(model: &'static str, path: &Path, run: Run) -> Result<()> {
    // Each death is a first one: what a client sees of a rare crash, without the pauses that hold back a storm.
    let mut flags = vec!["--restart-budget", "10000", "--restart-window", "1ms"];
    if run.standby {
        flags.push("--standby");
    }
    let cluster = Cluster::with_model(model, path, &flags).await?;
    let client = cluster.client().await?;
    let mut times = Vec::new();
    for _ in 0..run.kills {
        let workers = cluster
            .workers(|all| {
                let waits = |w: &hotcell_client::v1::WorkerInfo| w.state() == WorkerState::Standby;
                all_have(model)(all) && (!run.standby || all.iter().any(waits))
            })
            .await?;
        let worker = workers.iter().find(|w| w.id == "w0").context("no w0")?;
        let options = GenerateOptions {
            max_tokens: run.tokens,
            ignore_eos: true,
            ..GenerateOptions::default()
        };
        let killed = killed_after(&client, worker.pid, run.before, options).await?;
        times.push(killed.milliseconds);
    }
    if run.standby {
        let workers = client.workers().await?;
        for worker in &workers {
            println!("{}: {} has {}", run.name, worker.id, memory(worker.pid)?);
        }
    }
    figure(
        &format!("{}_median_ms", run.name),
        median(times.clone()),
        "ms",
        run.goal,
    );
    figure(
        &format!("{}_p99_ms", run.name),
        p99(times),
        "ms",
        Goal::None,
    );
    Ok(())
}

async fn all() -> Result<()> {
    let small = |name, standby, goal| Run {
        name,
        kills: 100,
        before: 20,
        tokens: 200,
        standby,
        goal,
    };
    measure("kjv", &kjv(), small("recovery", false, Goal::AtMost(150.0))).await?;
    let standby = small("recovery_standby", true, Goal::AtMost(50.0));
    measure("kjv", &kjv(), standby).await?;

    let folder = hotcell_tests::cluster::private_folder()?;
    let bytes = write(folder.path(), &Measures::GIB)?;
    println!("synthetic model: {bytes} bytes of weights");
    for (name, standby) in [("recovery_1gib", false), ("recovery_1gib_standby", true)] {
        let run = Run {
            name,
            kills: 20,
            before: 4,
            tokens: 10,
            standby,
            goal: Goal::None,
        };
        measure("gib", folder.path(), run).await?;
    }
    Ok(())
}

fn main() -> Result<()> {
    // `cargo test` runs benches with --test; there is nothing to check here.
    if std::env::args().any(|a| a == "--test") {
        return Ok(());
    }
    tokio::runtime::Runtime::new()?.block_on(all())
}

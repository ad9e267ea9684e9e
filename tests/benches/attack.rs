//! What clients notice of attacks on the scheduler's TCP door: times of short calls while each goes on, against those of
//! a quiet scheduler, and the scheduler's memory. Attackers have one core, and the rest is shared by scheduler, worker and
//! the client that measures, in quiet as well.
//!
//! `cargo bench -p hotcell-tests --bench attack`

use std::{
    net::TcpListener,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use hotcell_client::{Address, Client, GenerateOptions};
use hotcell_tests::{
    attack::{ATTACKS, Attacker, part_cores},
    bench::{Goal, figure, median, p99},
    cluster::{Cluster, all_have, holds, kjv},
};
use rustix::thread::CpuSet;

/// Calls of each kind while one attack goes on.
const CALLS: usize = 400;
/// How long an attack goes on before the first of them.
const AHEAD: Duration = Duration::from_secs(2);

/// Milliseconds of calls over a connection that was there before, and of new connections with one call each.
struct Times {
    old: Vec<f64>,
    new: Vec<f64>,
}

async fn measure(old: &Client, address: &Address) -> Result<Times> {
    let mut times = Times {
        old: Vec::new(),
        new: Vec::new(),
    };
    for _ in 0..CALLS {
        let options = GenerateOptions {
            max_tokens: 8,
            ..GenerateOptions::default()
        };
        let start = Instant::now();
        let answer = old.generate("In the beginning", options).await?;
        let tokens = answer.complete().await?.token_ids;
        times.old.push(start.elapsed().as_secs_f64() * 1e3);
        ensure!(tokens.len() == 8, "{} tokens", tokens.len());
        let start = Instant::now();
        let new = Client::connect(address).await?;
        new.models().await?;
        times.new.push(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(times)
}

async fn run(theirs: Option<CpuSet>) -> Result<()> {
    let listen = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let cluster = Cluster::with_model("kjv", &kjv(), &["--listen", &listen.to_string()]).await?;
    cluster.workers(all_have("kjv")).await?;
    let address: Address = listen.to_string().parse()?;
    let client = Client::connect(&address).await?;
    measure(&client, &address).await?;
    let quiet = measure(&client, &address).await?;
    let (old, new) = (p99(quiet.old.clone()), p99(quiet.new.clone()));
    figure("quiet_call", median(quiet.old), "ms", Goal::None);
    figure("quiet_call_p99", old, "ms", Goal::None);
    figure("quiet_connect_p99", new, "ms", Goal::None);
    let (before, _) = holds(cluster.scheduler.pid())?;
    let (mut most, mut worst, mut worst_new) = (0, 0.0_f64, 0.0_f64);
    for (seed, attack) in (1..).zip(ATTACKS) {
        let attacker = Attacker::start_on(attack, listen, seed, theirs)?;
        tokio::time::sleep(AHEAD).await;
        let (begun, start) = (attacker.blows(), Instant::now());
        let times = measure(&client, &address).await?;
        let rate = (attacker.blows() - begun) as f64 / start.elapsed().as_secs_f64();
        let (now, _) = holds(cluster.scheduler.pid())?;
        let growth = now - before;
        most = most.max(growth);
        drop(attacker);
        let (during, connecting) = (p99(times.old) / old, p99(times.new) / new);
        worst = worst.max(during);
        worst_new = worst_new.max(connecting);
        let name = attack.name();
        figure(&format!("{name}_rate"), rate, "blows/s", Goal::None);
        figure(
            &format!("{name}_memory"),
            growth as f64 / f64::from(1 << 20),
            "MiB",
            Goal::None,
        );
        figure(
            &format!("{name}_p99"),
            during,
            "of the quiet p99",
            Goal::None,
        );
        figure(
            &format!("{name}_connect_p99"),
            connecting,
            "of the quiet p99",
            Goal::None,
        );
    }
    let unit = "of the quiet p99";
    figure("attack_p99", worst, unit, Goal::AtMost(2.0));
    figure("attack_connect_p99", worst_new, unit, Goal::None);
    let growth = most as f64 / f64::from(1 << 20);
    figure("attack_memory", growth, "MiB", Goal::AtMost(64.0));
    Ok(())
}

fn main() -> Result<()> {
    // `cargo test` runs benches with --test; there is nothing to check here.
    if std::env::args().any(|argument| argument == "--test") {
        return Ok(());
    }
    // Before any thread or process: all of them stay where this one is.
    let theirs = part_cores()?;
    match &theirs {
        Some(_) => println!("attackers have a core of their own, and all others share the rest"),
        None => println!("attackers share the only core"),
    }
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?
        .block_on(run(theirs))
}

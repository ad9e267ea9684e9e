//! Chaos: what clients see of workers that are broken five times a second.
//!
//! `cargo bench -p hotcell-tests --bench chaos -- [--seconds N] [--seed N]`

use std::{path::PathBuf, time::Duration};

use anyhow::{Context, Result};
use hotcell_tests::{
    bench::{Goal, figure, median, p99},
    chaos::{Outcome, Plan, run},
};

fn number(name: &str, default: u64) -> Result<u64> {
    let mut arguments = std::env::args().skip_while(|a| a != name);
    match arguments.next() {
        None => Ok(default),
        Some(_) => {
            let value = arguments.next().with_context(|| format!("{name} N"))?;
            value.parse().with_context(|| format!("{name} {value}"))
        }
    }
}

fn tell(outcome: Outcome) {
    println!("faults: {:?}", outcome.faults);
    println!("deaths: {:?}", outcome.deaths);
    println!("ends with a status: {:?}", outcome.reasons);
    for wrong in &outcome.wrongs {
        println!("WRONG: {wrong}");
    }
    let deaths: u64 = outcome.deaths.values().sum();
    let good = (outcome.exact + outcome.justified) as f64 / outcome.streams.max(1) as f64;
    let count = |name, value: u64, goal| figure(name, value as f64, "", goal);
    count("streams", outcome.streams, Goal::None);
    count("deaths", deaths, Goal::None);
    count("continuations", outcome.continuations, Goal::None);
    count("ended_typed", outcome.justified, Goal::None);
    count("lost_tokens", outcome.lost, Goal::AtMost(0.0));
    count("duplicated_tokens", outcome.duplicated, Goal::AtMost(0.0));
    count("hung_streams", outcome.hung, Goal::AtMost(0.0));
    figure("exact_or_typed", good, "", Goal::AtLeast(1.0));
    let recovery = outcome.recovery;
    figure(
        "chaos_recovery_p50",
        median(recovery.clone()),
        "ms",
        Goal::None,
    );
    figure("chaos_recovery_p99", p99(recovery), "ms", Goal::None);
    figure("slowest_answer", outcome.slowest_answer, "ms", Goal::None);
    let grown = outcome.memory_growth as f64 / f64::from(1 << 20);
    figure("scheduler_memory_growth", grown, "MiB", Goal::AtMost(4.0));
    let grown = outcome.descriptor_growth as f64;
    figure("scheduler_descriptor_growth", grown, "", Goal::AtMost(0.0));
}

fn main() -> Result<()> {
    // `cargo test` runs benches with --test; `tests/chaos.rs` has a short run.
    if std::env::args().any(|a| a == "--test") {
        return Ok(());
    }
    let plan = Plan {
        worker: PathBuf::from(env!("CARGO_BIN_EXE_hotcell-worker-fault")),
        time: Duration::from_secs(number("--seconds", 60)?),
        every: Duration::from_millis(200),
        streams: 32,
        seed: number("--seed", 1)?,
    };
    println!("{plan:?}");
    tell(tokio::runtime::Runtime::new()?.block_on(run(plan))?);
    Ok(())
}

//! Hostile model files: what comes of each, how long it takes and how much memory.
//!
//! `cargo bench -p hotcell-tests --bench hostile -- [--only WORDS]`

use anyhow::Result;
use hotcell_tests::{
    bench::{Goal, figure},
    hostile::{
        corpus,
        run::{Host, Summary, cap},
    },
};

/// What is told whatever comes of it: slower than this, in seconds, or larger, in bytes.
const NOTABLE: (f64, u64) = (1.0, 512 << 20);

async fn all(only: Option<String>) -> Result<()> {
    let host = Host::start().await?;
    let mut summary = Summary::default();
    let chosen = |name: &str| only.as_ref().is_none_or(|words| name.contains(words));
    for case in corpus().iter().filter(|case| chosen(&case.to_string())) {
        let told = host.look(case).await?;
        let notable = told.took.as_secs_f64() > NOTABLE.0 || told.memory > NOTABLE.1;
        if notable || told.wrong.is_some() || only.is_some() {
            println!("{told}");
        }
        summary.add(&told);
    }
    if let Err(harm) = host.ends_well().await {
        summary.wrong.push(format!("{harm:#}"));
        println!("WRONG: {harm:#}");
    }
    println!("verdicts: {:?}", summary.verdicts);
    let files = summary.verdicts.values().sum::<usize>() as f64;
    figure("files", files, "files", Goal::AtLeast(300.0));
    let escaped = summary.wrong.len() as f64;
    figure("escaped", escaped, "files", Goal::AtMost(0.0));
    let slowest = summary.slowest.as_secs_f64();
    figure("slowest_s", slowest, "s", Goal::AtMost(5.0));
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let largest = mib(summary.largest);
    figure(
        "largest_memory_mib",
        largest,
        "MiB",
        Goal::AtMost(mib(cap())),
    );
    Ok(())
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    // `cargo test` runs benches with --test; `tests/hostile.rs` has a part of the corpus.
    if arguments.iter().any(|a| a == "--test") {
        return Ok(());
    }
    let only = arguments.iter().skip_while(|a| *a != "--only").nth(1);
    tokio::runtime::Runtime::new()?.block_on(all(only.cloned()))
}

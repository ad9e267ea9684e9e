//! How long a first token takes.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use hotcell_tests::bench::{Goal, median};

use crate::{
    Bench,
    models::Model,
    served::{NAME, SHORT, Served, options, stream},
};

/// Tokens that prompts share.
const SHARED: usize = 2000;
/// Tokens of a prompt that takes long.
const LONG: usize = 4000;

/// A prompt whose first 2,000 tokens the worker has read before, beside the first one that had them.
pub async fn prefix(bench: &Bench, served: &Served) -> Result<()> {
    let mut ratios = Vec::new();
    for _ in 0..bench.rounds() {
        let shared = served.prompt(SHARED);
        let cold = [&shared[..], &served.prompt(SHORT)].concat();
        let cold = served.until_first(cold).await?;
        let hit = [&shared[..], &served.prompt(SHORT)].concat();
        ratios.push(served.until_first(hit).await? / cold);
    }
    let unit = "of the cold time to first token";
    bench.figure("prefix", ratios, unit, Goal::AtMost(0.05));
    Ok(())
}

/// Short prompts, one after another while a long one is read, beside short ones alone.
pub async fn stall(bench: &Bench, served: &Served) -> Result<()> {
    let (mut ratios, mut firsts) = (Vec::new(), Vec::new());
    let (mut times, mut rates) = (Vec::new(), Vec::new());
    for _ in 0..bench.rounds() {
        let mut alone = Vec::new();
        for _ in 0..5 {
            alone.push(served.until_first(served.prompt(SHORT)).await?);
        }
        times.push(median(alone.clone()) * 1e3);
        let (client, prompt) = (served.client.clone(), served.prompt(LONG));
        let begun = Instant::now();
        let long = tokio::spawn(async move { stream(&client, prompt, options(1)).await });
        // The long one is to come first.
        tokio::time::sleep(Duration::from_millis(20)).await;
        let mut beside = Vec::new();
        while !long.is_finished() {
            let seconds = served.until_first(served.prompt(SHORT)).await?;
            beside.push((Instant::now(), seconds));
        }
        let first = beside.first().map_or(f64::NAN, |(_, seconds)| *seconds);
        firsts.push(first / median(alone.clone()));
        // Only those that had their token before the long one had its.
        let end = long.await??.first()?;
        rates.push(LONG as f64 / end.duration_since(begun).as_secs_f64());
        let within = beside.into_iter().filter(|(at, _)| *at < end);
        let within: Vec<f64> = within.map(|(_, seconds)| seconds).collect();
        ensure!(
            !within.is_empty(),
            "no short prompt was read beside a long one"
        );
        ratios.push(median(within) / median(alone));
    }
    let unit = "of the time to first token alone";
    bench.figure("stall", ratios, unit, Goal::AtMost(3.0));
    bench.figure("stall_alone", times, "ms", Goal::None);
    // What the long one gets meanwhile.
    bench.figure("stall_long_rate", rates, "tokens/s", Goal::None);
    // Before it nobody had come beside a long prompt.
    bench.figure("stall_of_the_first", firsts, unit, Goal::None);
    Ok(())
}

/// From the start of scheduler and worker to the first token of a short prompt, of a model that is in the page cache;
/// and what of it came after the request to load it. llama.cpp's is a whole process too.
pub async fn load(bench: &Bench, model: &Model) -> Result<()> {
    let (mut times, mut loads, mut beside) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..bench.rounds() {
        model.warm()?;
        let start = Instant::now();
        let served = Served::without_model(model, &[]).await?;
        // Not while the worker still starts.
        served
            .cluster
            .workers(|all| {
                let ready = hotcell_client::v1::WorkerState::Ready;
                !all.is_empty() && all.iter().all(|worker| worker.state() == ready)
            })
            .await?;
        let ready = Instant::now();
        served.load(model).await?;
        served.until_first(served.prompt(1)).await?;
        let seconds = start.elapsed().as_secs_f64();
        times.push(seconds * 1e3);
        loads.push(ready.elapsed().as_secs_f64() * 1e3);
        served.client.unload(NAME).await?;
        drop(served);
        if let Some(llama) = &bench.llama {
            model.warm()?;
            beside.extend(llama.load(model.path()).map(|peer| seconds / peer));
        }
    }
    bench.figure("load_from_start", times, "ms", Goal::None);
    bench.figure("load", loads, "ms", Goal::None);
    if !beside.is_empty() {
        let unit = "of llama.cpp's";
        bench.figure("load_llama", beside, unit, Goal::AtMost(0.5));
    }
    Ok(())
}

//! What a second device is worth: requests a second of a model on both devices of `cpu:2`, which share the host's cores,
//! against the same model on one of them.
//!
//! `cargo bench -p hotcell-tests --bench replicas`

use std::{path::Path, time::Instant};

use anyhow::{Context, Result, ensure};
use hotcell_client::{Client, GenerateOptions, Prompt, v1};
use hotcell_tests::{
    bench::{Goal, figure, median},
    chance::Chance,
    cluster::{Cluster, private_folder},
    synthetic::{Measures, write},
};

const MODEL: Measures = Measures {
    hidden: 1024,
    layers: 8,
    heads: 16,
    kv_heads: 8,
    inner: 2816,
    vocab: 4096,
    context: 1024,
    tied: true,
};
/// Clients that each ask again as soon as they are answered: as many as one worker computes for at once, so that it is
/// arithmetic that both have to share out and not the reading of weights, which each does for itself.
const CLIENTS: usize = 64;
/// Answers that each of them waits for in one round.
const ANSWERS: usize = 1;
const TOKENS: u32 = 32;
/// Rounds, which take turns.
const ROUNDS: usize = 3;

async fn client(client: Client, mut chance: Chance) -> Result<()> {
    for _ in 0..ANSWERS {
        let options = GenerateOptions {
            max_tokens: TOKENS,
            ignore_eos: true,
            ..GenerateOptions::default()
        };
        // No two prompts begin alike, in no round: nothing is known of any.
        let prompt = Prompt::Ids((0..32).map(|_| 5 + chance.below(4000) as u32).collect());
        let done = client.generate(prompt, options).await?.complete().await?;
        ensure!(done.token_ids.len() == TOKENS as usize);
    }
    Ok(())
}

/// Requests a second.
async fn round(of: &Client, number: u64) -> Result<f64> {
    let start = Instant::now();
    let seeds = (0..CLIENTS as u64).map(|at| number * CLIENTS as u64 + at);
    let all: Vec<_> = seeds
        .map(|seed| tokio::spawn(client(of.clone(), Chance::new(seed))))
        .collect();
    for one in all {
        one.await??;
    }
    Ok((CLIENTS * ANSWERS) as f64 / start.elapsed().as_secs_f64())
}

async fn place(client: &Client, path: &Path, replicas: u32) -> Result<()> {
    let mut steps = client
        .load_request(v1::LoadModelRequest {
            name: "m".to_owned(),
            path: path.to_str().context("path is not UTF-8")?.to_owned(),
            serving: Some(v1::Serving {
                replicas,
                ..v1::Serving::default()
            }),
            ..v1::LoadModelRequest::default()
        })
        .await?;
    let mut last = None;
    while let Some(step) = steps.next().await {
        last = step?.model;
    }
    let workers = last.context("no end of the load")?.workers.len();
    ensure!(workers == replicas as usize, "{workers} have it");
    Ok(())
}

async fn run() -> Result<()> {
    let folder = private_folder()?;
    let bytes = write(folder.path(), &MODEL)?;
    println!("synthetic model: {bytes} bytes of weights");
    let cluster = Cluster::start(&["--devices", "cpu:2"]).await?;
    let client = cluster.client().await?;
    let (mut one, mut both) = (Vec::new(), Vec::new());
    let mut number = 0;
    for _ in 0..ROUNDS {
        for (replicas, rates) in [(1, &mut one), (2, &mut both)] {
            place(&client, folder.path(), replicas).await?;
            number += 1;
            rates.push(round(&client, number).await?);
        }
    }
    let (one, both) = (median(one), median(both));
    figure("replicas_one", one, "requests/s", Goal::None);
    figure("replicas_two", both, "requests/s", Goal::None);
    figure(
        "replicas_gain",
        both / one,
        "of one's requests/s",
        Goal::AtLeast(1.8),
    );
    Ok(())
}

fn main() -> Result<()> {
    // `cargo test` runs benches with --test; there is nothing to check here.
    if std::env::args().any(|argument| argument == "--test") {
        return Ok(());
    }
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?
        .block_on(run())
}

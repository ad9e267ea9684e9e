//! What a second device is worth: requests a second of a model on both devices of `cpu:2`, which share the host's cores,
//! against the same model on one of them.
//!
//! `cargo bench -p hotcell-tests --bench replicas`

use std::{path::Path, time::Instant};

use anyhow::{Context, Result, ensure};
use hotcell_client::{Client, GenerateOptions, Prompt, v1};
use hotcell_tests::{
    bench::{Goal, figure, median},
    cluster::{Cluster, private_folder},
    synthetic::{Measures, write},
};

const MODEL: Measures = Measures {
    hidden: 512,
    layers: 8,
    heads: 8,
    kv_heads: 4,
    inner: 1408,
    vocab: 4096,
    context: 1024,
    tied: true,
};
/// Clients that each ask again as soon as they are answered.
const CLIENTS: usize = 8;
/// Answers that each of them waits for in one round.
const ANSWERS: usize = 3;
const TOKENS: u32 = 32;
/// Rounds, which take turns.
const ROUNDS: usize = 5;

async fn client(client: Client, number: usize) -> Result<()> {
    for answer in 0..ANSWERS {
        let options = GenerateOptions {
            max_tokens: TOKENS,
            ignore_eos: true,
            ..GenerateOptions::default()
        };
        // No two prompts begin alike: nothing is known of any.
        let first = 10 + (number * ANSWERS + answer) as u32;
        let prompt = Prompt::Ids(
            (0..32)
                .map(|at| (first * 37 + at * 11) % 2000 + 5)
                .collect(),
        );
        let done = client.generate(prompt, options).await?.complete().await?;
        ensure!(done.token_ids.len() == TOKENS as usize);
    }
    Ok(())
}

/// Requests a second.
async fn round(of: &Client) -> Result<f64> {
    let start = Instant::now();
    let all: Vec<_> = (0..CLIENTS)
        .map(|number| tokio::spawn(client(of.clone(), number)))
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
    for _ in 0..ROUNDS {
        for (replicas, rates) in [(1, &mut one), (2, &mut both)] {
            place(&client, folder.path(), replicas).await?;
            rates.push(round(&client).await?);
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

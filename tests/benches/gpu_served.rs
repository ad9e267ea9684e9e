//! Models on a GPU through the processes that serve them: whether they say what the CPU says, how fast, and what a client sees of a
//! death.
//!
//! `cargo bench -p hotcell-tests --bench gpu_served -- [shapes…] [--quick]` on a machine with a GPU and its driver; the synthetic models
//! `llama-1b` and `llama-8b` when no shape is named. With `HOTCELL_PEER=deploy/gpu-check/peer.py` PyTorch computes the same shapes in between, where
//! `python3` has it. `deploy/gpu-check` takes it to machines that have nothing else. `--quick` serves the
//! bundled model on the driver without a device (`tests/fakecuda`): it shows that all of it works, and no time of it means anything.

use std::{path::Path, process::Command, time::Instant};

use anyhow::{Context, Result, ensure};
use hotcell_client::{Client, Event, GenerateOptions, Prompt, v1};
use hotcell_kernels::cuda::CudaBackend;
use hotcell_tests::{
    bench::{Goal, figure, median},
    cluster::{Cluster, all_have, kjv, private_folder},
    fakecuda::{FakeDriver, worker},
    killed::killed_after,
    synthetic::{
        Measures,
        gguf::{self, Size, Weights},
    },
};

/// What synthetic models are stored as; the last one is what PyTorch has too.
const STORED: [&str; 2] = ["q4_k_m", "bf16"];
/// How far two devices' log probabilities of a token may lie apart: activations are rounded to 8 bits by both, and a sum that
/// falls on the other side of a half makes another integer.
const APART: f32 = 0.05;
/// The name that models are served under.
const NAME: &str = "m";

struct Bench {
    quick: bool,
    /// The workers' program, and the driver without a device that it was made for.
    worker: String,
    driver: Option<FakeDriver>,
}

/// Tokens drawn as the likeliest ones, one by one.
fn options(tokens: usize) -> GenerateOptions {
    GenerateOptions {
        max_tokens: tokens as u32,
        sampling: v1::Sampling {
            temperature: Some(0.0),
            ..v1::Sampling::default()
        },
        ignore_eos: true,
        no_speculation: true,
        ..GenerateOptions::default()
    }
}

/// The likeliest tokens after a prompt, and their log probabilities.
async fn likeliest(client: &Client, prompt: &str, tokens: usize) -> Result<Vec<(u32, f32)>> {
    let options = GenerateOptions {
        logprobs: true,
        ..options(tokens)
    };
    let prompt = Prompt::Text(prompt.to_owned());
    let all = client.generate(prompt, options).await?.complete().await?;
    ensure!(
        all.logprobs.len() == all.token_ids.len(),
        "log probabilities are missing"
    );
    let told = all.logprobs.iter().map(|told| told.logprob);
    Ok(all.token_ids.into_iter().zip(told).collect())
}

/// What PyTorch says of a shape.
struct Peer {
    rate: f64,
    first: f64,
}

/// Has PyTorch compute a shape; nothing where it is not asked for or not installed.
fn peer(measures: &Measures) -> Result<Option<Peer>> {
    let Some(script) = std::env::var_os("HOTCELL_PEER") else {
        return Ok(None);
    };
    let shape = serde_json::json!({
        "hidden_size": measures.hidden,
        "num_hidden_layers": measures.layers,
        "num_attention_heads": measures.heads,
        "num_key_value_heads": measures.kv_heads,
        "intermediate_size": measures.inner,
        "vocab_size": measures.vocab,
        "max_position_embeddings": measures.context,
        "tie_word_embeddings": measures.tied,
    });
    let output = Command::new("python3")
        .arg(script)
        .arg(shape.to_string())
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(3) {
        println!("no PyTorch here: {}", said.trim());
        return Ok(None);
    }
    ensure!(output.status.success(), "PyTorch failed: {said}");
    let told: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let number = |name: &str| {
        told[name]
            .as_f64()
            .with_context(|| format!("no {name}: {told}"))
    };
    Ok(Some(Peer {
        rate: number("rate")?,
        first: number("first")?,
    }))
}

impl Bench {
    fn figure(&self, name: &str, value: f64, unit: &str, goal: Goal) {
        match self.quick {
            true => figure(&format!("quick_{name}"), value, unit, Goal::None),
            false => figure(name, value, unit, goal),
        }
    }

    /// A scheduler whose only worker is CUDA's, with a model.
    async fn served(&self, path: &Path) -> Result<(Cluster, Client)> {
        // Each death is a first one, and idle workers are not examined meanwhile.
        let flags = ["--worker-binary", &self.worker, "--check-interval", "0"];
        let deaths = ["--restart-budget", "10000", "--restart-window", "1ms"];
        let cluster = Cluster::start(&[&flags[..], &deaths[..]].concat()).await?;
        let client = cluster.client().await?;
        let path = path.to_str().context("path is not UTF-8")?;
        client.load(NAME, path).await?;
        cluster.workers(all_have(NAME)).await?;
        Ok((cluster, client))
    }

    /// What the bundled model says on the device beside what it says on the CPU: the same tokens, until two are as likely.
    async fn parity(&self) -> Result<()> {
        let cpu = Cluster::with_model(NAME, &kjv(), &["--devices", "cpu:1"]).await?;
        cpu.workers(all_have(NAME)).await?;
        let cpu = cpu.client().await.map(|client| (cpu, client))?;
        let (_cluster, client) = self.served(&kjv()).await?;
        let (tokens, prompts) = if self.quick { (12, 2) } else { (100, 6) };
        let said = [
            "In the beginning",
            "And the LORD said",
            "Blessed are the",
            "Now it came to pass",
            "The words of",
            "Then answered",
        ];
        let (mut same, mut all, mut furthest) = (0, 0, 0.0f32);
        for prompt in said.iter().take(prompts) {
            let here = likeliest(&client, prompt, tokens).await?;
            let there = likeliest(&cpu.1, prompt, tokens).await?;
            all += tokens;
            for (i, (&(a, pa), &(b, pb))) in here.iter().zip(&there).enumerate() {
                // Where they part, each has its own for the likeliest: both are as likely, or one of them is wrong.
                furthest = furthest.max((pa - pb).abs());
                ensure!(
                    (pa - pb).abs() <= APART,
                    "{prompt:?}: token {i} is {a} with {pa} on the device and {b} with {pb} on the CPU"
                );
                if a != b {
                    println!("{prompt:?}: from token {i} on they are others");
                    break;
                }
                same += 1;
            }
        }
        println!("log probabilities are at most {furthest} apart");
        let share = f64::from(same) / all as f64;
        self.figure(
            "gpu_parity",
            share,
            "of the CPU's tokens",
            Goal::AtLeast(0.5),
        );
        Ok(())
    }

    /// Streams of a model whose worker is killed.
    async fn deaths(&self, name: &str, path: &Path) -> Result<()> {
        let (kills, before, tokens) = if self.quick { (2, 4, 16) } else { (7, 20, 100) };
        let (cluster, client) = self.served(path).await?;
        let options = GenerateOptions {
            seed: Some(7),
            max_tokens: tokens,
            ignore_eos: true,
            ..GenerateOptions::default()
        };
        let (mut times, mut said): (Vec<f64>, Vec<Vec<u32>>) = (Vec::new(), Vec::new());
        for _ in 0..kills {
            let worker = cluster.workers(all_have(NAME)).await?.remove(0);
            let killed = killed_after(&client, worker.pid, before, options.clone()).await?;
            times.push(killed.milliseconds);
            said.push(killed.tokens);
        }
        cluster.workers(all_have(NAME)).await?;
        let prompt = Prompt::Ids(vec![300, 301, 302, 303]);
        let calm = client.generate(prompt, options).await?.complete().await?;
        ensure!(
            said.iter().all(|tokens| *tokens == calm.token_ids),
            "after a death there were other tokens"
        );
        let found = cluster.scheduler.log().matches(" found=true").count();
        println!(
            "{name}: of {kills} deaths {found} left the weights on the device: {times:.0?} ms"
        );
        let goal = Goal::AtMost(1000.0);
        self.figure(&format!("gpu_recovery_{name}"), median(times), "ms", goal);
        let share = found as f64 / kills as f64;
        let goal = Goal::AtLeast(1.0);
        self.figure(&format!("gpu_kept_{name}"), share, "of the deaths", goal);
        Ok(())
    }

    /// How fast one stream is: its tokens per second, and seconds until the first one.
    async fn speed(&self, name: &str, path: &Path, size: &Size) -> Result<(f64, f64)> {
        let begun = Instant::now();
        let (_cluster, client) = self.served(path).await?;
        let seconds = begun.elapsed().as_secs_f64();
        self.figure(&format!("gpu_load_{name}"), seconds, "s", Goal::None);
        let (mut rates, mut firsts) = (Vec::new(), Vec::new());
        for round in 0..5u32 {
            // Nobody has seen it.
            let prompt = (0..512).map(|i| 600 + (i * 31 + round * 7919) % 20_000);
            let begun = Instant::now();
            let mut stream = client
                .generate(Prompt::Ids(prompt.collect()), options(200))
                .await?;
            let (mut first, mut last, mut count) = (None, begun, 0);
            while let Some(event) = stream.next().await {
                if let Event::Delta(delta) = event?
                    && !delta.token_ids.is_empty()
                {
                    last = Instant::now();
                    first.get_or_insert(last);
                    count += delta.token_ids.len();
                }
            }
            let first = first.context("no token")?;
            firsts.push((first - begun).as_secs_f64());
            rates.push((count - 1) as f64 / (last - first).as_secs_f64());
        }
        let (rate, first) = (median(rates), median(firsts));
        let read = rate * size.bytes_per_token as f64 / 1e9;
        self.figure(&format!("gpu_decode_{name}"), rate, "tokens/s", Goal::None);
        self.figure(&format!("gpu_decode_{name}_read"), read, "GB/s", Goal::None);
        self.figure(
            &format!("gpu_first_{name}"),
            first * 1e3,
            "ms after 512 tokens",
            Goal::None,
        );
        Ok((rate, first))
    }

    async fn run(&self, shapes: &[String]) -> Result<()> {
        self.parity().await?;
        self.deaths("kjv", &kjv()).await?;
        if self.quick {
            return Ok(());
        }
        for shape in shapes {
            let named = Measures::NAMED.iter().find(|(name, _)| name == shape);
            let (_, measures) = named.with_context(|| format!("no shape {shape}"))?;
            for stored in STORED {
                let weights = Weights::from_name(stored).context("no such type")?;
                let folder = private_folder()?;
                let path = folder.path().join("model.gguf");
                let size = gguf::write(&path, shape, measures, weights)?;
                println!("{shape} in {stored}: {} bytes", size.bytes);
                let name = format!("{}_{stored}", shape.replace('-', "_"));
                // In turns: the device may be slower in one minute than in another.
                let has_peer = stored == "bf16";
                let before = if has_peer { peer(measures)? } else { None };
                let (rate, first) = self.speed(&name, &path, &size).await?;
                let after = if before.is_some() {
                    peer(measures)?
                } else {
                    None
                };
                if let (Some(before), Some(after)) = (before, after) {
                    let [of_rate, of_first] = [
                        rate * 2.0 / (before.rate + after.rate),
                        (before.first + after.first) / 2.0 / first,
                    ];
                    let (unit, goal) = ("of PyTorch's tokens/s", Goal::AtLeast(1.5));
                    self.figure(&format!("gpu_decode_{name}_torch"), of_rate, unit, goal);
                    let unit = "of PyTorch's prompts/s";
                    self.figure(
                        &format!("gpu_first_{name}_torch"),
                        of_first,
                        unit,
                        Goal::None,
                    );
                }
                self.deaths(&name, &path).await?;
            }
        }
        Ok(())
    }
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| arg != "--bench")
        .collect();
    // `cargo test` runs benches with --test; there is nothing to check here.
    if args.iter().any(|arg| arg == "--test") {
        return Ok(());
    }
    let (flags, mut shapes): (Vec<_>, Vec<_>) =
        args.into_iter().partition(|arg| arg.starts_with("--"));
    let quick = flags.iter().any(|flag| flag == "--quick");
    ensure!(flags.iter().all(|flag| flag == "--quick"), "{flags:?}");
    let bench = if quick {
        let (driver, has_kernels) = FakeDriver::new("devices = 1\n")?.with_kernels()?;
        ensure!(has_kernels, "g++ is not installed");
        let worker = driver.worker("hotcell-worker")?;
        Bench {
            quick,
            worker: worker.to_str().context("path is not UTF-8")?.to_owned(),
            driver: Some(driver),
        }
    } else {
        if let (Err(why), true) = (
            CudaBackend::look(),
            std::env::var_os("HOTCELL_GPU").is_none(),
        ) {
            println!("not measured: {why}");
            return Ok(());
        }
        let worker = worker()?;
        Bench {
            quick,
            worker: worker.to_str().context("path is not UTF-8")?.to_owned(),
            driver: None,
        }
    };
    if shapes.is_empty() {
        shapes = ["llama-1b", "llama-8b"].map(str::to_owned).to_vec();
    }
    let ran = tokio::runtime::Runtime::new()?.block_on(bench.run(&shapes));
    drop(bench.driver);
    ran
}

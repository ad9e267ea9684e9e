//! Models on a GPU through the processes that serve them: whether they say what the CPU says, how fast, and what a client sees of a
//! death. With `HOTCELL_PEER=deploy/gpu-check/peer.py` PyTorch computes the same shapes in between, where `python3` has it.

use std::{path::Path, process::Command, time::Instant};

use anyhow::{Context, Result, bail, ensure};
use hotcell_client::{Client, Event, GenerateOptions, Prompt, v1};
use hotcell_tests::{
    bench::{Goal, median},
    cluster::{Cluster, all_have, kjv, private_folder, repository},
    fakecuda::{FakeDriver, worker},
    killed::killed_after,
    synthetic::{
        Measures,
        gguf::{self, Size, Weights},
    },
};

/// What synthetic models are stored as; the last one is what PyTorch has too.
const STORED: [&str; 2] = ["q4_k_m", "bf16"];
/// How far two devices' log probabilities of a token of the bundled model, whose weights are BF16, may lie apart.
const APART: f32 = 0.01;
/// How many of the likeliest tokens are told of each place.
const TOLD: u32 = 8;
/// The bundled model's name, and what is served where nothing is named.
const BUNDLED: &str = "kjv";
pub const MODELS: [&str; 3] = [BUNDLED, "llama-1b", "llama-8b"];
/// The name that models are served under.
const NAME: &str = "m";

/// What serves.
pub struct Served {
    quick: bool,
    /// The workers' program, and the driver without a device that it was made for.
    worker: String,
    _driver: Option<FakeDriver>,
    /// What is not as it should be, whatever it takes.
    wrong: Vec<String>,
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

/// The likeliest tokens after a prompt, and the log probabilities of some that could have been there.
async fn likeliest(client: &Client, prompt: &str, tokens: usize) -> Result<Vec<v1::TokenLogprob>> {
    let options = GenerateOptions {
        logprobs: true,
        top_logprobs: TOLD,
        ..options(tokens)
    };
    let prompt = Prompt::Text(prompt.to_owned());
    let all = client.generate(prompt, options).await?.complete().await?;
    let count = all.logprobs.len();
    ensure!(
        count == tokens,
        "{count} log probabilities of {tokens} tokens"
    );
    Ok(all.logprobs)
}

/// The log probability of a token in this place, if it is among those that are told.
fn of(told: &v1::TokenLogprob, token: u32) -> Option<f32> {
    let top = told.top.iter().find(|one| one.token == token);
    top.map(|one| one.logprob)
}

/// What PyTorch says of a shape.
struct Peer {
    rate: f64,
    first: f64,
}

/// Has PyTorch compute a shape; nothing where it is not asked for, not installed, or fails.
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
    // It compiles, which takes a while.
    let output = Command::new("timeout")
        .args(["600", "python3"])
        .arg(repository().join(script))
        .arg(shape.to_string())
        .output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        println!(
            "not compared with PyTorch, which ended with {}: {}",
            output.status,
            said.trim()
        );
        return Ok(None);
    }
    let told: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    if told["skips"] != 0 {
        println!("PyTorch has not recorded all of its steps, so that no share of it means much");
    }
    let number = |name: &str| {
        told[name]
            .as_f64()
            .with_context(|| format!("no {name}: {told}"))
    };
    println!("PyTorch: {told}");
    Ok(Some(Peer {
        rate: number("rate")?,
        first: number("first")?,
    }))
}

impl Served {
    /// On this machine's driver, or on the one without a device.
    ///
    /// # Errors
    /// When its programs cannot be made.
    pub fn new(quick: bool) -> Result<Self> {
        let driver = match quick {
            true => {
                let (driver, has_kernels) = FakeDriver::new("devices = 1\n")?.with_kernels()?;
                ensure!(has_kernels, "g++ is not installed");
                Some(driver)
            }
            false => None,
        };
        let worker = match &driver {
            Some(driver) => driver.worker("hotcell-worker")?,
            None => worker()?,
        };
        Ok(Self {
            quick,
            worker: worker.to_str().context("path is not UTF-8")?.to_owned(),
            _driver: driver,
            wrong: Vec::new(),
        })
    }

    fn figure(&self, name: &str, value: f64, unit: &str, goal: Goal) {
        super::figure_of(self.quick, name, value, unit, goal);
    }

    /// A scheduler whose only worker is CUDA's, with a model.
    async fn served(&self, path: &Path) -> Result<(Cluster, Client)> {
        // Each death is a first one, and idle workers are not examined meanwhile. A driver that nobody uses takes a while to begin, and so
        // do weights that were lost after all.
        let flags = ["--worker-binary", &self.worker, "--check-interval", "0"];
        let deaths = ["--restart-budget", "10000", "--restart-window", "1ms"];
        let patience = ["--probe-timeout", "60s", "--continue-timeout", "10m"];
        let cluster = Cluster::start(&[&flags[..], &deaths[..], &patience[..]].concat()).await?;
        let client = cluster.client().await?;
        let path = path.to_str().context("path is not UTF-8")?;
        client.load(NAME, path).await?;
        cluster.workers(all_have(NAME)).await?;
        Ok((cluster, client))
    }

    /// What the bundled model says on the device beside what it says on the CPU: the same tokens, until two are as likely.
    async fn parity(&mut self) -> Result<()> {
        let cpu = Cluster::with_model(NAME, &kjv(), &["--devices", "cpu:1"]).await?;
        cpu.workers(all_have(NAME)).await?;
        let reference = cpu.client().await?;
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
            let there = likeliest(&reference, prompt, tokens).await?;
            all += tokens;
            for (i, (a, b)) in here.iter().zip(&there).enumerate() {
                // Where they part, both are as likely here and there, or one of them is wrong.
                for token in [a.token, b.token] {
                    let (Some(here), Some(there)) = (of(a, token), of(b, token)) else {
                        bail!("{prompt:?}: token {i} is {a:?} on the device and {b:?} on the CPU");
                    };
                    furthest = furthest.max((here - there).abs());
                    ensure!(
                        (here - there).abs() <= APART,
                        "{prompt:?}: token {i} may be {token} by {here} on the device, and by {there} on the CPU"
                    );
                }
                if a.token != b.token {
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
        if share < 0.5 {
            let wrong = "the device soon says other things than the CPU";
            self.wrong.push(wrong.to_owned());
        }
        Ok(())
    }

    /// Streams of a model whose worker is killed.
    async fn deaths(&mut self, name: &str, path: &Path) -> Result<()> {
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
        if found != kills {
            self.wrong
                .push(format!("{name}: weights did not stay on the device"));
        }
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
            let (mut first, mut last, mut after) = (None, begun, 0);
            while let Some(event) = stream.next().await {
                if let Event::Delta(delta) = event?
                    && !delta.token_ids.is_empty()
                {
                    last = Instant::now();
                    match first {
                        None => first = Some(last),
                        Some(_) => after += delta.token_ids.len(),
                    }
                }
            }
            let first = first.context("no token")?;
            firsts.push((first - begun).as_secs_f64());
            rates.push(after as f64 / (last - first).as_secs_f64());
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

    pub async fn run(&mut self, models: &[String]) -> Result<()> {
        for name in models {
            if name == BUNDLED {
                self.parity().await?;
                self.deaths(BUNDLED, &kjv()).await?;
                continue;
            }
            let named = Measures::NAMED.iter().find(|(shape, _)| shape == name);
            let (shape, measures) = named.with_context(|| format!("no shape {name}"))?;
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
        ensure!(self.wrong.is_empty(), "{}", self.wrong.join("; "));
        Ok(())
    }
}

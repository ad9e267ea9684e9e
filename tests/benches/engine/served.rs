//! A scheduler with one model, and streams that are read as a client reads them.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use hotcell_client::{Client, Event, GenerateOptions, Prompt};
use hotcell_tests::{
    chance::{Chance, nth},
    cluster::{Cluster, all_have, cpu_seconds},
};
use tokio::task::JoinSet;

use crate::models::Model;

/// The name that models are served under.
pub const NAME: &str = "m";
/// Tokens of a prompt that is only there to have one.
pub const SHORT: usize = 16;
/// Ids below this are special ones and bytes.
const FIRST_ID: u32 = 512;
/// How long workers are waited for to have nothing to do, and how long they must have had nothing.
const IDLE_LIMIT: Duration = Duration::from_secs(300);
const IDLE: Duration = Duration::from_secs(3);
/// How many rounds are run at most until two are alike.
const WARM_UP: usize = 12;

/// A prompt that nobody has seen: the `number`-th one.
pub fn prompt(number: u64, tokens: usize, vocabulary: u32) -> Vec<u32> {
    let mut chance = Chance::new(nth(1, number));
    let span = vocabulary.saturating_sub(FIRST_ID).max(1);
    let id = |chance: &mut Chance| FIRST_ID + chance.below(span as usize) as u32;
    (0..tokens).map(|_| id(&mut chance)).collect()
}

/// So many tokens, each drawn by itself, the likeliest one.
pub fn options(tokens: usize) -> GenerateOptions {
    GenerateOptions {
        model: NAME.to_owned(),
        max_tokens: tokens as u32,
        ignore_eos: true,
        no_speculation: true,
        ..GenerateOptions::default()
    }
}

/// When a stream's tokens came.
#[derive(Clone, Debug)]
pub struct Times {
    pub start: Instant,
    /// How many came at once, and when.
    pub arrivals: Vec<(Instant, usize)>,
}

impl Times {
    pub fn now() -> Self {
        Self {
            start: Instant::now(),
            arrivals: Vec::new(),
        }
    }

    pub fn arrived(&mut self, tokens: usize) {
        if tokens > 0 {
            self.arrivals.push((Instant::now(), tokens));
        }
    }

    pub fn first(&self) -> Result<Instant> {
        Ok(self.arrivals.first().context("no token")?.0)
    }

    pub fn last(&self) -> Result<Instant> {
        Ok(self.arrivals.last().context("no token")?.0)
    }

    /// Seconds until the first token.
    pub fn until_first(&self) -> Result<f64> {
        Ok((self.first()? - self.start).as_secs_f64())
    }
}

/// Tokens per second of all streams together, while all of them had their first token and none its last.
pub fn rate(streams: &[Times]) -> Result<f64> {
    let (mut from, mut to) = (None, None);
    for stream in streams {
        from = from.max(Some(stream.first()?));
        let last = stream.last()?;
        to = Some(to.map_or(last, |to: Instant| to.min(last)));
    }
    let (from, to) = (from.context("no stream")?, to.context("no stream")?);
    ensure!(to > from, "the streams never ran all together");
    let arrivals = streams.iter().flat_map(|stream| &stream.arrivals);
    let within = arrivals.filter(|(at, _)| *at > from && *at <= to);
    let tokens: usize = within.map(|(_, tokens)| tokens).sum();
    Ok(tokens as f64 / (to - from).as_secs_f64())
}

/// Reads a stream to its end.
pub async fn stream(client: &Client, prompt: Vec<u32>, options: GenerateOptions) -> Result<Times> {
    let mut times = Times::now();
    let mut stream = client.generate(Prompt::Ids(prompt), options).await?;
    while let Some(event) = stream.next().await {
        if let Event::Delta(delta) = event? {
            times.arrived(delta.token_ids.len());
        }
    }
    Ok(times)
}

/// Processes with one model.
pub struct Served {
    pub cluster: Cluster,
    pub client: Client,
    vocabulary: u32,
    prompts: AtomicU64,
}

impl Served {
    /// Starts them, and waits until nothing more is prepared behind the first streams.
    pub async fn start(model: &Model, flags: &[&str]) -> Result<Self> {
        let served = Self::without_model(model, flags).await?;
        served.load(model).await?;
        served.settle().await?;
        Ok(served)
    }

    /// Starts them with nothing loaded.
    pub async fn without_model(model: &Model, flags: &[&str]) -> Result<Self> {
        // Idle workers are not examined meanwhile.
        let flags = [&["--check-interval", "0"], flags].concat();
        let cluster = Cluster::start(&flags).await?;
        Ok(Self {
            client: cluster.client().await?,
            cluster,
            vocabulary: model.vocabulary,
            prompts: AtomicU64::new(0),
        })
    }

    pub async fn load(&self, model: &Model) -> Result<()> {
        let path = model.path().to_str().context("path is not UTF-8")?;
        self.client.load(NAME, path).await?;
        Ok(())
    }

    /// A prompt that was not there before.
    pub fn prompt(&self, tokens: usize) -> Vec<u32> {
        let number = self.prompts.fetch_add(1, Ordering::Relaxed);
        prompt(number, tokens, self.vocabulary)
    }

    /// Reads one stream to its end.
    pub async fn stream(&self, prompt: Vec<u32>, options: GenerateOptions) -> Result<Times> {
        stream(&self.client, prompt, options).await
    }

    /// Tokens per second of so many streams.
    pub async fn together(&self, streams: usize, options: GenerateOptions) -> Result<f64> {
        let mut all = JoinSet::new();
        for _ in 0..streams {
            let (client, prompt) = (self.client.clone(), self.prompt(SHORT));
            let options = options.clone();
            all.spawn(async move { stream(&client, prompt, options).await });
        }
        let done = all.join_all().await.into_iter();
        rate(&done.collect::<Result<Vec<_>>>()?)
    }

    /// Seconds until the first token of a prompt.
    pub async fn until_first(&self, prompt: Vec<u32>) -> Result<f64> {
        self.stream(prompt, options(1)).await?.until_first()
    }

    /// Ids of the workers' processes.
    pub async fn workers(&self) -> Result<Vec<u32>> {
        let workers = self.cluster.workers(all_have(NAME)).await?;
        Ok(workers.iter().map(|worker| worker.pid).collect())
    }

    /// Waits until the workers have nothing to do. After a load they may lay out weights anew behind the streams.
    pub async fn idle(&self) -> Result<()> {
        const LOOK: Duration = Duration::from_millis(250);
        let begun = Instant::now();
        let mut idle_since = begun;
        let mut used = f64::NAN;
        while idle_since.elapsed() < IDLE && begun.elapsed() < IDLE_LIMIT {
            let workers = self.workers().await?;
            let now: f64 = workers.into_iter().map(cpu_seconds).sum::<Result<f64>>()?;
            // More than a twentieth of a core is work.
            if (now - used) > LOOK.as_secs_f64() / 20.0 {
                idle_since = Instant::now();
            }
            used = now;
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    /// Waits until the workers have nothing to do, and runs streams until two take as long.
    pub async fn settle(&self) -> Result<()> {
        self.idle().await?;
        let mut before = f64::NAN;
        for _ in 0..WARM_UP {
            let now = self.together(1, options(48)).await?;
            if (now / before - 1.0).abs() < 0.03 {
                break;
            }
            before = now;
        }
        Ok(())
    }
}

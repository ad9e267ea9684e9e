//! Hostile models before a real scheduler: what comes of each, and whether anybody else noticed.

use std::{
    collections::BTreeMap,
    fmt,
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use hotcell_client::{Client, Error, GenerateOptions, Reason, v1};
use hotcell_scheduler::fleet::Allowance;
use tempfile::TempDir;
use v1::Verdict;

use super::Case;
use crate::cluster::{Cluster, all_have, is_own, kjv, most_resident};

/// After this a look hangs.
const LONGEST: Duration = Duration::from_secs(120);
/// How often the process that looks is looked at.
const EVERY: Duration = Duration::from_millis(4);
/// What may become of a request.
const PROMPT: &str = "In the beginning";

/// Bytes that a process may take which looks into a model.
pub fn cap() -> u64 {
    Allowance::default().memory
}

/// What came of a case.
#[derive(Debug)]
pub struct Told {
    /// The case's name.
    pub case: String,
    /// The verdict, and the beginning of the words with it.
    pub verdict: Verdict,
    /// Its words.
    pub words: String,
    /// How long it took, from outside.
    pub took: Duration,
    /// The most memory that its process was seen to have, mapped files included, in bytes.
    pub memory: u64,
    /// What is wrong about it.
    pub wrong: Option<String>,
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ms, mib) = (self.took.as_millis(), self.memory >> 20);
        write!(
            f,
            "{:?} after {ms} ms with {mib} MiB: {} ({})",
            self.verdict, self.case, self.words
        )?;
        match &self.wrong {
            Some(why) => write!(f, " WRONG: {why}"),
            None => Ok(()),
        }
    }
}

/// A scheduler that serves the bundled model, before which hostile ones come.
pub struct Host {
    cluster: Cluster,
    client: Client,
    folder: TempDir,
    worker: (u32, u64),
    tokens: Vec<u32>,
}

/// What the process that looks was seen to do.
#[derive(Default)]
struct Seen {
    memory: AtomicU64,
    done: AtomicBool,
}

impl Host {
    /// Starts it.
    ///
    /// # Errors
    /// When it does not serve.
    pub async fn start() -> Result<Self> {
        let cluster = Cluster::with_model("kjv", &kjv(), &[]).await?;
        let workers = cluster.workers(all_have("kjv")).await?;
        let worker = workers.first().context("no worker")?;
        let mut host = Self {
            client: cluster.client().await?,
            folder: TempDir::new()?,
            worker: (worker.pid, worker.epoch),
            tokens: Vec::new(),
            cluster,
        };
        host.tokens = host.serve().await?;
        Ok(host)
    }

    async fn serve(&self) -> Result<Vec<u32>> {
        let options = GenerateOptions {
            model: "kjv".to_owned(),
            max_tokens: 8,
            ..GenerateOptions::default()
        };
        let stream = self.client.generate(PROMPT, options).await?;
        Ok(stream.complete().await?.token_ids)
    }

    /// Makes a case, has the scheduler look into it, and says what came of that.
    ///
    /// # Errors
    /// When the case cannot be made.
    pub async fn look(&self, case: &Case) -> Result<Told> {
        let place = TempDir::new_in(self.folder.path())?;
        let path = case.make(place.path())?;
        let name = path.to_str().context("a path that is not UTF-8")?;
        let seen = Seen::default();
        let start = Instant::now();
        let look = async {
            let looked = tokio::time::timeout(LONGEST, self.client.inspect("", name)).await;
            let took = start.elapsed();
            seen.done.store(true, Relaxed);
            (looked, took)
        };
        let ((looked, took), ()) = tokio::join!(look, self.watch(case, &path, &seen));
        let mut told = Told {
            case: case.to_string(),
            verdict: Verdict::Unspecified,
            words: String::new(),
            took,
            memory: seen.memory.load(Relaxed),
            wrong: None,
        };
        match looked {
            Err(_) => told.wrong = Some("it hangs".to_owned()),
            Ok(answer) => {
                let found = answer.unwrap_or_else(|error| refused(&error));
                told.verdict = found.verdict();
                told.words = words(&found);
                told.memory = told.memory.max(found.peak_bytes);
                told.wrong = case.judge(&found).err();
            }
        }
        if let Err(harm) = self.unharmed().await {
            told.wrong = Some(format!("{harm:#}"));
        }
        Ok(told)
    }

    /// Follows the process that looks, and does to the model what is to be done meanwhile.
    async fn watch(&self, case: &Case, path: &Path, seen: &Seen) {
        while !seen.done.load(Relaxed) {
            let workers = self.client.workers().await.unwrap_or_default();
            if let Some(worker) = workers.iter().find(|worker| !is_own(worker)) {
                seen.memory
                    .fetch_max(most_resident(worker.pid).unwrap_or(0), Relaxed);
                if let Some(spoil) = &case.meanwhile {
                    spoil(path);
                }
            }
            tokio::time::sleep(EVERY).await;
        }
    }

    /// Whether the scheduler's own worker is the one that it was.
    async fn unharmed(&self) -> Result<()> {
        let workers = self.cluster.workers(|all| all.iter().all(is_own)).await?;
        let worker = workers.first().context("no worker")?;
        ensure!(
            (worker.pid, worker.epoch, worker.deaths) == (self.worker.0, self.worker.1, 0),
            "the scheduler's own worker was harmed: {worker:#?}"
        );
        Ok(())
    }

    /// Whether it serves as in the beginning, and nothing came in.
    ///
    /// # Errors
    /// When it does not.
    pub async fn ends_well(&self) -> Result<()> {
        self.unharmed().await?;
        let tokens = self.serve().await?;
        ensure!(
            tokens == self.tokens,
            "other tokens: {tokens:?}, {:?}",
            self.tokens
        );
        let models = self.client.models().await?;
        ensure!(models.len() == 1, "a hostile model was loaded: {models:#?}");
        for crash in self.client.crashes().await? {
            ensure!(crash.worker.contains(".inspect"), "{crash:#?}");
        }
        Ok(())
    }
}

/// A refusal before there was a verdict.
fn refused(error: &Error) -> v1::Inspection {
    let ours = [Reason::FileNotFound, Reason::InvalidArgument];
    let mut found = v1::Inspection {
        reason: error.reason().name().to_owned(),
        problem: error.message().to_owned(),
        ..v1::Inspection::default()
    };
    if ours.contains(&error.reason()) {
        found.set_verdict(Verdict::Refused);
    }
    found
}

/// What was said, shortly.
fn words(found: &v1::Inspection) -> String {
    let findings = found
        .findings
        .iter()
        .map(|f| format!("{}: {}", f.kind, f.what));
    let death = found
        .death
        .iter()
        .map(|death| format!("{}: {}", death.kind, death.reason));
    let refusal = [format!("{} {}", found.reason, found.problem)];
    let all: Vec<String> = refusal.into_iter().chain(death).chain(findings).collect();
    all.join("; ").trim().chars().take(300).collect()
}

/// What is told of all.
#[derive(Debug, Default)]
pub struct Summary {
    /// Cases by verdict.
    pub verdicts: BTreeMap<String, usize>,
    /// Those of which something is wrong.
    pub wrong: Vec<String>,
    /// The slowest.
    pub slowest: Duration,
    /// The most memory.
    pub largest: u64,
}

impl Summary {
    /// Takes one in.
    pub fn add(&mut self, told: &Told) {
        *self
            .verdicts
            .entry(format!("{:?}", told.verdict))
            .or_default() += 1;
        self.slowest = self.slowest.max(told.took);
        self.largest = self.largest.max(told.memory);
        if told.wrong.is_some() {
            self.wrong.push(told.to_string());
        }
    }
}

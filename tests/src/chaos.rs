//! Chaos: many streams on workers that are broken again and again, as a seed says.
//!
//! Every stream must end complete, with the very tokens of an undisturbed run, or with a status that a fault justifies,
//! and none may outlast its deadline. What the scheduler holds must not grow.

mod requests;
mod strikes;

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use hotcell_client::{Client, Event, Reason, v1};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::{
    chance,
    cluster::{Cluster, all_have, holds, kjv},
};
use requests::{Request, catalogue};

/// A stream's deadline.
const DEADLINE: Duration = Duration::from_secs(30);
/// How much later its end may show on a busy machine.
const GRACE: Duration = Duration::from_secs(5);
/// The bound on hangs.
const HANG: &str = "500ms";

/// Statuses with which a stream may end because a worker broke. Its deadline is not among them: it leaves time for
/// every death that a request may survive.
const JUSTIFIED: [Reason; 3] = [
    Reason::WorkerLost,
    Reason::RequestPoisoned,
    Reason::NoWorker,
];

/// What is done.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The worker that breaks on command.
    pub worker: PathBuf,
    /// How long workers are broken.
    pub time: Duration,
    /// Time from one fault to the next.
    pub every: Duration,
    /// Streams at once.
    pub streams: u32,
    /// Determines requests and faults.
    pub seed: u64,
}

/// What came of it.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Streams that ended, or should have.
    pub streams: u64,
    /// Those that are complete and exact.
    pub exact: u64,
    /// Those that ended with a status that a fault justifies, and were exact until then.
    pub justified: u64,
    /// Tokens that complete streams lack.
    pub lost: u64,
    /// Tokens that came although they had come before.
    pub duplicated: u64,
    /// Streams without an end at their deadline.
    pub hung: u64,
    /// Times that streams went on after a death.
    pub continuations: u64,
    /// Milliseconds that streams stood still which survived one death.
    pub recovery: Vec<f64>,
    /// Ends by reason, complete ones apart.
    pub reasons: BTreeMap<&'static str, u64>,
    /// Faults by name.
    pub faults: BTreeMap<&'static str, u64>,
    /// Deaths by kind.
    pub deaths: BTreeMap<String, u64>,
    /// What must not be, in words; the first of them.
    pub wrongs: Vec<String>,
    /// The longest time in which the scheduler answered a question, milliseconds.
    pub slowest_answer: f64,
    /// Growth of the scheduler's resident memory between two quiet moments, bytes.
    pub memory_growth: i64,
    /// Growth of its count of descriptors.
    pub descriptor_growth: i64,
}

/// What one part of a run decides by.
#[derive(Clone, Debug)]
pub(crate) struct Chance(chance::Chance);

impl Chance {
    fn of(seed: u64, part: u64) -> Self {
        let mut chance = chance::Chance::new(seed ^ part.wrapping_mul(0xd134_2543_de82_ef95));
        chance.number();
        Self(chance)
    }

    fn next(&mut self) -> u64 {
        self.0.number()
    }

    /// One of them.
    fn pick<'a, T>(&mut self, from: &'a [T]) -> Option<&'a T> {
        let at = self.next().checked_rem(from.len() as u64)?;
        from.get(usize::try_from(at).ok()?)
    }

    /// From `from` to `to` milliseconds.
    fn ms(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(from + self.next() % (to - from + 1))
    }
}

/// What all tasks share.
struct Run {
    catalogue: Vec<Request>,
    outcome: Mutex<Outcome>,
    over: AtomicBool,
    quiet: AtomicBool,
    running: AtomicU64,
}

impl Run {
    fn outcome(&self) -> std::sync::MutexGuard<'_, Outcome> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wrong(&self, what: String) {
        let mut outcome = self.outcome();
        if outcome.wrongs.len() < 20 {
            outcome.wrongs.push(what);
        }
    }
}

/// Does it.
///
/// # Errors
/// When the scheduler does not start or does not recover.
pub async fn run(plan: Plan) -> Result<Outcome> {
    let worker = plan.worker.to_str().context("path is not UTF-8")?;
    let arguments = [
        "--worker-binary",
        worker,
        "--devices",
        "cpu:2",
        "--hang-timeout",
        HANG,
        "--restart-budget",
        "10000",
        "--restart-backoff",
        "1ms",
        // Streams that are kept for clients that come back are not growth, nor wanted in its figure.
        "--reattach-timeout",
        "1s",
        "--restart-backoff-max",
        "5ms",
        "--log",
        "error",
    ];
    let cluster = Cluster::with_model("kjv", &kjv(), &arguments).await?;
    let whole = |all: &[v1::WorkerInfo]| all.len() == 2 && all_have("kjv")(all);
    cluster.workers(whole).await?;
    let client = cluster.client().await?;
    let mut events = client.watch().await?;
    let run = Arc::new(Run {
        catalogue: catalogue(&client).await?,
        outcome: Mutex::default(),
        over: AtomicBool::new(false),
        quiet: AtomicBool::new(false),
        running: AtomicU64::new(0),
    });

    let mut streams = JoinSet::new();
    for number in 0..plan.streams {
        // A connection for some, as clients have.
        let client = match number % 8 {
            0 => cluster.client().await?,
            _ => client.clone(),
        };
        let chance = Chance::of(plan.seed, 1 + u64::from(number));
        streams.spawn(request_after_request(Arc::clone(&run), client, chance));
    }
    let listening = Arc::clone(&run);
    let listener = tokio::spawn(async move {
        while let Some(Ok(event)) = events.next().await {
            if event.kind() == v1::EventKind::WorkerDied {
                *listening
                    .outcome()
                    .deaths
                    .entry(event.exit_kind)
                    .or_default() += 1;
            }
        }
    });

    let mut chance = Chance::of(plan.seed, 0);
    let pid = cluster.scheduler.pid();
    // What the first deaths make it hold for good is not growth.
    let settled = plan.time / 4;
    strikes::strike(&run, &client, &mut chance, settled, plan.every).await?;
    let before = quiet(&run, &cluster, whole, pid).await?;
    run.quiet.store(false, Ordering::Relaxed);
    strikes::strike(&run, &client, &mut chance, plan.time - settled, plan.every).await?;
    run.over.store(true, Ordering::Relaxed);
    while let Some(ended) = streams.join_next().await {
        ended?;
    }
    let after = quiet(&run, &cluster, whole, pid).await?;
    listener.abort();
    // It is as good as new.
    for request in &run.catalogue {
        let ended = request.run(&client).await?;
        if ended.ids != request.ids {
            run.wrong(format!("{} differs after the run", request.name));
        }
    }
    let mut outcome = std::mem::take(&mut *run.outcome());
    outcome.memory_growth = after.0 - before.0;
    outcome.descriptor_growth = after.1 - before.1;
    Ok(outcome)
}

/// Waits until nothing runs and every worker is back, and looks at what the scheduler holds.
async fn quiet(
    run: &Run,
    cluster: &Cluster,
    whole: impl Fn(&[v1::WorkerInfo]) -> bool,
    pid: u32,
) -> Result<(i64, i64)> {
    run.quiet.store(true, Ordering::Relaxed);
    let start = Instant::now();
    while run.running.load(Ordering::Relaxed) > 0 {
        ensure!(start.elapsed() < DEADLINE + 2 * GRACE, "streams do not end");
        sleep(Duration::from_millis(20)).await;
    }
    cluster.workers(whole).await?;
    sleep(Duration::from_millis(500)).await;
    holds(pid)
}

async fn request_after_request(run: Arc<Run>, client: Client, mut chance: Chance) {
    while !run.over.load(Ordering::Relaxed) {
        if run.quiet.load(Ordering::Relaxed) {
            sleep(Duration::from_millis(10)).await;
            continue;
        }
        let Some(request) = chance.pick(&run.catalogue) else {
            return;
        };
        run.running.fetch_add(1, Ordering::Relaxed);
        judge(&run, request, &client).await;
        run.running.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Runs one request and compares it with its undisturbed run.
async fn judge(run: &Run, request: &Request, client: &Client) {
    let mut got = Vec::new();
    let mut pause = Duration::ZERO;
    let reading = read(request, client, &mut got, &mut pause);
    let ended = timeout(DEADLINE + GRACE, reading).await;
    let expected = &request.ids;
    let same = got.iter().zip(expected).take_while(|(a, b)| a == b).count();
    let mut outcome = run.outcome();
    outcome.streams += 1;
    let exact_so_far = same == got.len();
    if !exact_so_far {
        // What follows a difference is either said again or belongs further on.
        match got.get(same..).unwrap_or_default().first() {
            Some(id) if got.get(..same).is_some_and(|said| said.contains(id)) => {
                outcome.duplicated += 1;
            }
            _ => outcome.lost += 1,
        }
    }
    let complaint = match ended {
        Err(_) => {
            outcome.hung += 1;
            Some("hangs past its deadline".to_owned())
        }
        Ok(Ok(finished)) => {
            outcome.continuations += u64::from(finished.deaths_survived);
            if finished.deaths_survived == 1 {
                outcome.recovery.push(pause.as_secs_f64() * 1e3);
            }
            if exact_so_far && got.len() < expected.len() {
                outcome.lost += (expected.len() - got.len()) as u64;
            }
            let exact = got == *expected && finished.reason == request.reason;
            outcome.exact += u64::from(exact);
            let what = || {
                let deaths = finished.deaths_survived;
                format!(
                    "differs at {same} of {} after {deaths} deaths",
                    expected.len()
                )
            };
            (!exact).then(what)
        }
        Ok(Err(error)) => {
            *outcome.reasons.entry(error.reason().name()).or_default() += 1;
            let justified = JUSTIFIED.contains(&error.reason()) && exact_so_far;
            outcome.justified += u64::from(justified);
            (!justified).then(|| format!("ends with {error} after {same} exact of {}", got.len()))
        }
    };
    drop(outcome);
    if let Some(complaint) = complaint {
        run.wrong(format!("{} {complaint}", request.name));
    }
}

/// Reads a stream to its end, and notes its longest pause after the first token.
async fn read(
    request: &Request,
    client: &Client,
    got: &mut Vec<u32>,
    pause: &mut Duration,
) -> Result<v1::Finished, hotcell_client::Error> {
    let mut stream = request.begin(client).await?;
    let mut last = Instant::now();
    while let Some(event) = stream.next().await {
        match event? {
            Event::Accepted(_) => {}
            Event::Delta(delta) => {
                if !got.is_empty() {
                    *pause = (*pause).max(last.elapsed());
                }
                last = Instant::now();
                got.extend(delta.token_ids);
            }
            Event::Finished(finished) => return Ok(finished),
        }
    }
    Err(hotcell_client::Error::new(
        Reason::ProtocolViolation,
        "ended without Finished",
    ))
}

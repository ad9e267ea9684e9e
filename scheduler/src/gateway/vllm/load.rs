//! How busy this host is, as one engine: all its workers together.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use hotcell_gateways::{smg::EngineLoad, vllm::SchedulerLoad};
use hotcell_ipc::blackbox::{Doing, Pulse};
use hotcell_proto::{
    limits,
    v1::{CacheStatus, WorkerInfo, WorkerState},
};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};

use crate::service::Shared;

/// How often it is told at least; engines of vLLM tell as often.
const EVERY: Duration = Duration::from_secs(1);
/// How often at most.
const GAP: Duration = Duration::from_millis(250);

/// How busy it is.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Load {
    pub running: u32,
    pub waiting: u32,
    /// Requests that run at once at most.
    pub most_running: u32,
    /// Tokens in the caches, and for how many there is room.
    pub used_tokens: u64,
    pub most_tokens: u64,
    /// Tokens of a block of them.
    pub block_tokens: u64,
    /// Tokens per second that went out at this door.
    pub throughput: f64,
    /// Prompt tokens so far, and those of them that were in a cache.
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    /// Since when no worker got on that has work.
    pub silence: Duration,
}

impl Load {
    /// The share of the caches that is used.
    fn usage(&self) -> f64 {
        share(self.used_tokens, self.most_tokens)
    }

    /// In the words of those who are told unasked.
    pub(super) fn told(&self, sample: u64) -> EngineLoad {
        EngineLoad {
            running_requests: self.running,
            waiting_requests: self.waiting,
            token_usage: self.usage(),
            gen_throughput: self.throughput,
            max_running_requests: self.most_running,
            sample,
            load_only: true,
            cache_hit_rate: Some(share(self.cached_tokens, self.prompt_tokens)),
            num_used_tokens: Some(int(self.used_tokens)),
            max_total_num_tokens: Some(int(self.most_tokens)),
            engine_silence_ms: Some(u32::try_from(self.silence.as_millis()).unwrap_or(u32::MAX)),
            engine_reports_steps: Some(true),
            ..EngineLoad::default()
        }
    }

    /// In the words of those who ask.
    pub(super) fn asked(&self) -> SchedulerLoad {
        let (running, waiting) = (int(self.running.into()), int(self.waiting.into()));
        SchedulerLoad {
            num_running_reqs: running,
            num_waiting_reqs: waiting,
            num_total_reqs: running.saturating_add(waiting),
            num_used_tokens: int(self.used_tokens),
            max_total_num_tokens: int(self.most_tokens),
            token_usage: self.usage(),
            gen_throughput: self.throughput,
            cache_hit_rate: share(self.cached_tokens, self.prompt_tokens),
            utilization: share(self.running.into(), self.most_running.into()),
            max_running_requests: int(self.most_running.into()),
            ..SchedulerLoad::default()
        }
    }
}

fn share(part: u64, whole: u64) -> f64 {
    match whole {
        0 => 0.0,
        whole => part as f64 / whole as f64,
    }
}

fn int(number: u64) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

/// Tokens for which a model's cache in a worker has blocks, those in use first: of the layers that look furthest back, as
/// the others give back what is behind them.
fn tokens(cache: &CacheStatus) -> (u64, u64) {
    let whole = cache.layers.iter().find(|layers| layers.window == 0);
    let (used, all) = whole.map_or((cache.used_blocks, cache.blocks), |layers| {
        (layers.used_blocks, layers.blocks)
    });
    let tokens = |blocks: u64| blocks.saturating_mul(cache.block_tokens);
    (tokens(used), tokens(all))
}

/// All workers together. A worker in a long step does not answer; what it was given counts as running then.
fn sum(workers: &[WorkerInfo], waiting: usize) -> Load {
    let mut load = Load {
        waiting: u32::try_from(waiting).unwrap_or(u32::MAX),
        ..Load::default()
    };
    let most = limits::MAX_WORKER_REQUESTS as u32;
    for worker in workers.iter().filter(|w| w.state() == WorkerState::Ready) {
        load.most_running = load.most_running.saturating_add(most);
        if worker.caches.is_empty() {
            load.running = load.running.saturating_add(worker.running_requests);
        }
        for cache in &worker.caches {
            let number = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
            load.running = load.running.saturating_add(number(cache.running));
            load.waiting = load.waiting.saturating_add(number(cache.waiting));
            let (used, all) = tokens(cache);
            load.used_tokens = load.used_tokens.saturating_add(used);
            load.most_tokens = load.most_tokens.saturating_add(all);
            load.block_tokens = cache.block_tokens;
            load.prompt_tokens = load.prompt_tokens.saturating_add(cache.prompt_tokens);
            load.cached_tokens = load.cached_tokens.saturating_add(cache.cached_tokens);
        }
    }
    load
}

/// A worker's process: its name and epoch.
type Process = (String, u64);

/// Since when each worker's engine has not got on.
#[derive(Debug)]
struct Silence {
    seen: HashMap<Process, (Pulse, Instant)>,
    /// Since when no worker serves.
    none: Option<Instant>,
}

impl Silence {
    fn new() -> Self {
        Self {
            seen: HashMap::new(),
            none: None,
        }
    }

    /// How long the host has been silent: as long as the worker that got on last. One that waits for work is not silent;
    /// that one worker of several hangs is not the gateway's business.
    fn look(&mut self, pulses: Vec<(Process, Option<Pulse>)>, now: Instant) -> Duration {
        if pulses.is_empty() {
            self.seen.clear();
            return now - *self.none.get_or_insert(now);
        }
        self.none = None;
        let mut seen = HashMap::new();
        let mut least = None;
        for (process, pulse) in pulses {
            let since = match pulse {
                None => now,
                Some(pulse) => {
                    let idle = matches!(
                        pulse.doing,
                        Some(Doing::Idle | Doing::Starting | Doing::Loading | Doing::Ending)
                    );
                    let before = self.seen.get(&process);
                    let before = before.filter(|(then, _)| !idle && !pulse.moved_since(then));
                    let since = before.map_or(now, |(_, since)| *since);
                    seen.insert(process, (pulse, since));
                    since
                }
            };
            let silent = now - since;
            least = Some(least.map_or(silent, |least: Duration| least.min(silent)));
        }
        self.seen = seen;
        least.unwrap_or_default()
    }
}

/// Tokens that went out, and how many per second lately.
#[derive(Debug)]
struct Rate {
    at: Instant,
    tokens: u64,
    per_second: f64,
}

/// What is known between two looks.
#[derive(Debug)]
struct Inner {
    tokens: AtomicU64,
    rate: Mutex<Rate>,
    silence: Mutex<Silence>,
    told: Mutex<Option<watch::Sender<(u64, Load)>>>,
}

/// Looks at the load, for all who want to know. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Gauge(Arc<Inner>);

impl Gauge {
    pub(super) fn new() -> Self {
        let rate = Rate {
            at: Instant::now(),
            tokens: 0,
            per_second: 0.0,
        };
        Self(Arc::new(Inner {
            tokens: AtomicU64::new(0),
            rate: Mutex::new(rate),
            silence: Mutex::new(Silence::new()),
            told: Mutex::default(),
        }))
    }

    /// So many tokens went out.
    pub(super) fn went(&self, tokens: usize) {
        self.0.tokens.fetch_add(tokens as u64, Ordering::Relaxed);
    }

    /// Over the last second or more.
    fn throughput(&self, now: Instant) -> f64 {
        let mut rate = self.0.rate.lock().unwrap_or_else(PoisonError::into_inner);
        let passed = now - rate.at;
        if passed >= EVERY {
            let tokens = self.0.tokens.load(Ordering::Relaxed);
            rate.per_second = (tokens - rate.tokens) as f64 / passed.as_secs_f64();
            (rate.at, rate.tokens) = (now, tokens);
        }
        rate.per_second
    }

    /// How busy it is now.
    pub(super) async fn look(&self, shared: &Shared) -> Load {
        let fleet = &shared.fleet;
        let workers = fleet.workers_and_caches().await;
        let load = sum(&workers, fleet.waiting());
        let now = Instant::now();
        let mut silence = (self.0.silence.lock()).unwrap_or_else(PoisonError::into_inner);
        Load {
            throughput: self.throughput(now),
            silence: silence.look(fleet.pulses(), now),
            ..load
        }
    }

    /// Hears of it each second, and soon after it changed; with the number of the look, from 1. However many listen, one
    /// looks.
    pub(super) fn listen(&self, shared: &Shared) -> watch::Receiver<(u64, Load)> {
        let mut told = self.0.told.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(told) = told.as_ref().filter(|told| told.receiver_count() > 0) {
            return told.subscribe();
        }
        let (to, from) = watch::channel((0, Load::default()));
        *told = Some(to.clone());
        tokio::spawn(self.clone().tell(shared.clone(), to));
        from
    }

    async fn tell(self, shared: Shared, to: watch::Sender<(u64, Load)>) {
        let mut changed = shared.fleet.changes();
        let mut sample = 0;
        let mut last = Instant::now();
        loop {
            changed.see();
            let load = self.look(&shared).await;
            let now = Instant::now();
            if sample == 0 || now - last >= EVERY || to.borrow().1 != load {
                sample += 1;
                last = now;
                to.send_replace((sample, load));
            }
            let next = async {
                sleep(GAP).await;
                let _ = timeout(EVERY - GAP, changed.changed()).await;
            };
            tokio::select! {
                () = to.closed() => return,
                () = shared.abort.cancelled() => return,
                () = next => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use hotcell_ipc::blackbox::{self, Reader, Writer};
    use hotcell_proto::v1::CacheLayers;

    use super::*;

    fn process(name: &str) -> Process {
        (name.to_owned(), 1)
    }

    #[test]
    fn the_host_is_as_busy_as_all_its_workers() {
        let cache = |running, window, used_blocks| CacheStatus {
            running,
            waiting: 2,
            block_tokens: 16,
            prompt_tokens: 100,
            cached_tokens: 50,
            layers: vec![CacheLayers {
                window,
                blocks: 10,
                used_blocks,
                ..CacheLayers::default()
            }],
            // All kinds of layers together.
            blocks: 99,
            used_blocks: 99,
            ..CacheStatus::default()
        };
        let worker = |caches, state: WorkerState| WorkerInfo {
            state: state.into(),
            running_requests: 5,
            caches,
            ..WorkerInfo::default()
        };
        let workers = [
            worker(vec![cache(3, 0, 4)], WorkerState::Ready),
            worker(vec![], WorkerState::Ready),
            worker(vec![cache(7, 0, 9)], WorkerState::Starting),
        ];
        let load = sum(&workers, 1);
        assert_eq!((load.running, load.waiting), (8, 3));
        assert_eq!((load.used_tokens, load.most_tokens), (64, 160));
        let asked = load.asked();
        assert_eq!((asked.num_total_reqs, asked.token_usage), (11, 0.4));
        assert_eq!(
            (asked.cache_hit_rate, asked.max_running_requests),
            (0.5, 512)
        );
        let told = load.told(7);
        assert!(told.load_only && told.sample == 7);
        assert_eq!((told.running_requests, told.waiting_requests), (8, 3));
        assert_eq!(told.num_used_tokens, Some(64));
        assert_eq!(sum(&[], 0).told(1).token_usage, 0.0);
    }

    #[test]
    fn silence_is_that_of_the_worker_that_got_on_last() {
        let black_box = || {
            let memory = blackbox::make().unwrap();
            let writer = Writer::open(&memory, std::iter::empty()).unwrap();
            (writer, Reader::open(&memory).unwrap())
        };
        let (one, other) = (black_box(), black_box());
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut silence = Silence::new();
        let both = || {
            vec![
                (process("w0"), Some(one.1.pulse())),
                (process("w1"), Some(other.1.pulse())),
            ]
        };
        one.0.doing(Doing::Stepping);
        other.0.doing(Doing::Stepping);
        assert_eq!(silence.look(both(), at(0)), Duration::ZERO);
        assert_eq!(silence.look(both(), at(3)).as_secs(), 3);
        other.0.stepped();
        assert_eq!(silence.look(both(), at(5)).as_secs(), 0);
        assert_eq!(silence.look(both(), at(6)).as_secs(), 1);
        // Who waits for work is not silent.
        one.0.doing(Doing::Idle);
        assert_eq!(silence.look(both(), at(9)).as_secs(), 0);
        // Nobody serves.
        assert_eq!(silence.look(vec![], at(10)).as_secs(), 0);
        assert_eq!(silence.look(vec![], at(70)).as_secs(), 60);
        // One without a black box says nothing about itself.
        assert_eq!(
            silence.look(vec![(process("w0"), None)], at(71)).as_secs(),
            0
        );
    }

    #[tokio::test(start_paused = true)]
    async fn throughput_is_of_the_last_second_or_more() {
        let gauge = Gauge::new();
        gauge.went(30);
        assert_eq!(gauge.throughput(Instant::now()), 0.0);
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(gauge.throughput(Instant::now()), 15.0);
        tokio::time::advance(Duration::from_millis(500)).await;
        assert_eq!(gauge.throughput(Instant::now()), 15.0);
    }
}

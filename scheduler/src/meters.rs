//! What is counted while requests are served, for each model. What can be looked up when somebody asks is not counted.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use hotcell_proto::{
    ids::ModelName,
    limits,
    v1::{FinishReason, Finished},
};

/// Upper ends of a histogram's buckets, in its unit.
pub type Bounds = &'static [f64];

/// Of whole requests and of times to a first token.
pub const REQUESTS: Bounds = &[
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
];
/// Of times between two tokens.
pub const TOKENS: Bounds = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5,
];

/// Of tokens in a prompt or an answer.
pub const LENGTHS: Bounds = &[
    1.0, 4.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0,
    65536.0, 131072.0,
];

/// How often something took how long, in seconds, or was how many.
#[derive(Debug)]
pub struct Histogram {
    /// Upper ends of the buckets but the last, which has none.
    pub bounds: Bounds,
    counts: Vec<AtomicU64>,
    /// In millionths of its unit.
    sum: AtomicU64,
}

impl Histogram {
    fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            counts: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(),
            sum: AtomicU64::new(0),
        }
    }

    /// It took so long, `times` times.
    pub fn observe(&self, took: Duration, times: u64) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.note(took.as_secs_f64(), micros, times);
    }

    /// It was so many, once.
    pub fn observe_count(&self, count: u32) {
        self.note(f64::from(count), 1_000_000 * u64::from(count), 1);
    }

    fn note(&self, value: f64, millionths: u64, times: u64) {
        let place = self.bounds.partition_point(|&end| end < value);
        if let Some(count) = self.counts.get(place) {
            count.fetch_add(times, Ordering::Relaxed);
        }
        add(&self.sum, millionths.saturating_mul(times));
    }

    /// Of each bucket how often it or one below it was meant, and the sum in its unit.
    pub fn read(&self) -> (Vec<u64>, f64) {
        let mut all = 0;
        let counts = self.counts.iter().map(|count| {
            all += count.load(Ordering::Relaxed);
            all
        });
        let counts = counts.collect();
        (counts, self.sum.load(Ordering::Relaxed) as f64 / 1e6)
    }
}

fn add(to: &AtomicU64, more: u64) {
    to.fetch_add(more, Ordering::Relaxed);
}

/// What is counted of one model.
#[derive(Debug)]
pub struct Meter {
    /// Requests that ended, by how: `stop`, `length`, or the reason of the error.
    ended: Mutex<BTreeMap<&'static str, u64>>,
    /// Tokens of finished requests' prompts, and those of them that a worker had in its cache.
    pub prompt_tokens: AtomicU64,
    /// See `prompt_tokens`.
    pub cached_tokens: AtomicU64,
    /// Tokens that were generated, those of requests that go on included.
    pub generated_tokens: AtomicU64,
    /// Times that a stream went on after its worker's death.
    pub continuations: AtomicU64,
    /// From a request's arrival to its first token.
    pub first_token: Histogram,
    /// Between tokens.
    pub between: Histogram,
    /// Between tokens, on average over each request that came to an end.
    pub each_token: Histogram,
    /// What requests that came to an end waited, here for a worker and there for their first step.
    pub queue: Histogram,
    /// Tokens of their prompts.
    pub prompt_length: Histogram,
    /// Tokens of their answers.
    pub answer_length: Histogram,
    /// From a request's arrival to its end, if it came to one.
    pub whole: Histogram,
    /// From a worker's death to a stream's next event.
    pub pause: Histogram,
}

impl Default for Meter {
    fn default() -> Self {
        Self {
            ended: Mutex::default(),
            prompt_tokens: AtomicU64::new(0),
            cached_tokens: AtomicU64::new(0),
            generated_tokens: AtomicU64::new(0),
            continuations: AtomicU64::new(0),
            first_token: Histogram::new(REQUESTS),
            between: Histogram::new(TOKENS),
            each_token: Histogram::new(TOKENS),
            queue: Histogram::new(REQUESTS),
            prompt_length: Histogram::new(LENGTHS),
            answer_length: Histogram::new(LENGTHS),
            whole: Histogram::new(REQUESTS),
            pause: Histogram::new(REQUESTS),
        }
    }
}

impl Meter {
    fn count(&self, how: &'static str) {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        *ended.entry(how).or_default() += 1;
    }

    /// A request finished.
    pub fn finished(&self, finished: &Finished, took: Duration) {
        self.count(match finished.reason() {
            FinishReason::MaxTokens | FinishReason::ContextFull => "length",
            _ => "stop",
        });
        self.whole.observe(took, 1);
        let usage = finished.usage.unwrap_or_default();
        add(&self.prompt_tokens, u64::from(usage.prompt_tokens));
        add(&self.cached_tokens, u64::from(usage.cached_tokens));
        self.prompt_length.observe_count(usage.prompt_tokens);
        self.answer_length.observe_count(usage.generated_tokens);
    }

    /// A request failed, for this reason.
    pub fn failed(&self, reason: &'static str) {
        self.count(reason);
    }

    /// So many tokens came, this long after what came before; none if they are the first.
    pub fn generated(&self, tokens: usize, after: Option<Duration>) {
        let tokens = tokens as u64;
        add(&self.generated_tokens, tokens);
        if let Some(after) = after {
            let each = after / u32::try_from(tokens).unwrap_or(u32::MAX).max(1);
            self.between.observe(each, tokens);
        }
    }

    /// A stream went on after a death, after so long.
    pub fn continued(&self, pause: Duration) {
        add(&self.continuations, 1);
        self.pause.observe(pause, 1);
    }

    /// Requests that ended, by how.
    pub fn ended(&self) -> Vec<(&'static str, u64)> {
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.iter().map(|(how, count)| (*how, *count)).collect()
    }
}

/// The meters of all models that were asked for.
#[derive(Debug, Default)]
pub struct Meters {
    models: Mutex<BTreeMap<ModelName, Arc<Meter>>>,
}

impl Meters {
    fn models(&self) -> MutexGuard<'_, BTreeMap<ModelName, Arc<Meter>>> {
        self.models.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those of a model. Models that come and go under ever new names share one past a bound.
    pub fn of(&self, model: &ModelName) -> Arc<Meter> {
        let mut models = self.models();
        if let Some(meter) = models.get(model) {
            return Arc::clone(meter);
        }
        if models.len() >= 2 * limits::MAX_MODELS
            && let Some(meter) = models.values().next_back()
        {
            return Arc::clone(meter);
        }
        let meter = Arc::<Meter>::default();
        models.insert(model.clone(), Arc::clone(&meter));
        meter
    }

    /// All of them.
    pub fn all(&self) -> Vec<(ModelName, Arc<Meter>)> {
        let models = self.models();
        let all = models.iter().map(|(name, m)| (name.clone(), Arc::clone(m)));
        all.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_hold_what_is_not_greater_than_their_end() {
        let histogram = Histogram::new(&[0.1, 1.0]);
        for ms in [50, 100, 101, 1000, 5000] {
            histogram.observe(Duration::from_millis(ms), 1);
        }
        let (counts, sum) = histogram.read();
        assert_eq!(counts, [2, 4, 5]);
        assert!((sum - 6.251).abs() < 1e-9);
    }

    #[test]
    fn counts_are_told_as_they_are() {
        let histogram = Histogram::new(LENGTHS);
        for count in [0, 16, 17] {
            histogram.observe_count(count);
        }
        let (counts, sum) = histogram.read();
        assert_eq!(counts[..4], [1, 1, 2, 3]);
        assert!((sum - 33.0).abs() < 1e-9);
    }

    #[test]
    fn tokens_that_come_together_share_the_time() {
        let meter = Meter::default();
        meter.generated(1, None);
        meter.generated(4, Some(Duration::from_millis(8)));
        let (counts, sum) = meter.between.read();
        assert_eq!(counts.last(), Some(&4));
        assert!((sum - 0.008).abs() < 1e-9);
        assert_eq!(meter.generated_tokens.load(Ordering::Relaxed), 5);
    }
}

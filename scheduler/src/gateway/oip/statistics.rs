//! What was served through this door, by model.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use hotcell_gateways::inference::{
    InferBatchStatistics, InferStatistics, ModelStatistics, StatisticDuration,
};
use hotcell_proto::{limits, v1::Timings};

use super::model::VERSION;

/// A number of happenings, and how long they took together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Total {
    count: u64,
    ns: u64,
}

impl Total {
    fn add(&mut self, took: Duration) {
        self.count = self.count.saturating_add(1);
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.ns = self.ns.saturating_add(ns);
    }

    fn told(self) -> Option<StatisticDuration> {
        let Total { count, ns } = self;
        Some(StatisticDuration { count, ns })
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    success: Total,
    fail: Total,
    queue: Total,
    input: Total,
    infer: Total,
    output: Total,
    /// Milliseconds since 1970.
    last: u64,
}

/// How long the parts of one request took.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Took {
    /// From its arrival until the end.
    pub all: Duration,
    /// Until it was rendered and tokenised.
    pub input: Duration,
    /// To put its answers together.
    pub output: Duration,
    /// In the worker.
    pub worker: Timings,
}

/// What was served, by model.
#[derive(Clone, Debug, Default)]
pub(super) struct Statistics(Arc<Mutex<BTreeMap<String, Counts>>>);

/// A worker's word about a time.
fn milliseconds(said: f64) -> Duration {
    Duration::try_from_secs_f64(said / 1e3).unwrap_or_default()
}

impl Statistics {
    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Counts>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn edit(&self, model: &str, change: impl FnOnce(&mut Counts)) {
        let mut all = self.all();
        // Names come and go with their models.
        if all.len() >= limits::MAX_MODELS && !all.contains_key(model) {
            let oldest = all.iter().min_by_key(|(_, counts)| counts.last);
            if let Some(name) = oldest.map(|(name, _)| name.clone()) {
                all.remove(&name);
            }
        }
        let counts = all.entry(model.to_owned()).or_default();
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = since.map_or(0, |since| since.as_millis());
        counts.last = u64::try_from(now).unwrap_or(u64::MAX);
        change(counts);
    }

    /// Counts a request that was served.
    pub fn served(&self, model: &str, took: Took) {
        self.edit(model, |counts| {
            counts.success.add(took.all);
            counts.queue.add(milliseconds(took.worker.queue_ms));
            counts.input.add(took.input);
            let computed = took.worker.prefill_ms + took.worker.decode_ms;
            counts.infer.add(milliseconds(computed));
            counts.output.add(took.output);
        });
    }

    /// Counts a request that failed, or whose client left.
    pub fn failed(&self, model: &str, after: Duration) {
        self.edit(model, |counts| counts.fail.add(after));
    }

    /// Forgets a model, whose name may come to be another one's.
    pub fn forget(&self, model: &str) {
        self.all().remove(model);
    }

    /// What is told of a model. Each request is one inference, and a batch by itself: the steps that it shared with others are
    /// not counted here.
    pub fn of(&self, model: &str) -> ModelStatistics {
        let counts = self.all().get(model).copied().unwrap_or_default();
        let alone = InferBatchStatistics {
            batch_size: 1,
            compute_input: counts.input.told(),
            compute_infer: counts.infer.told(),
            compute_output: counts.output.told(),
        };
        ModelStatistics {
            name: model.to_owned(),
            version: VERSION.to_owned(),
            last_inference: counts.last,
            inference_count: counts.success.count,
            execution_count: counts.success.count,
            inference_stats: Some(InferStatistics {
                success: counts.success.told(),
                fail: counts.fail.told(),
                queue: counts.queue.told(),
                compute_input: counts.input.told(),
                compute_infer: counts.infer.told(),
                compute_output: counts.output.told(),
                cache_hit: Total::default().told(),
                cache_miss: Total::default().told(),
            }),
            batch_stats: match counts.success.count {
                0 => Vec::new(),
                _ => vec![alone],
            },
            ..ModelStatistics::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_add_up_and_a_workers_nonsense_is_no_time() {
        let statistics = Statistics::default();
        let worker = Timings {
            queue_ms: f64::NAN,
            prefill_ms: 1.5,
            decode_ms: 0.5,
        };
        let took = Took {
            all: Duration::from_millis(5),
            worker,
            ..Took::default()
        };
        statistics.served("m", took);
        statistics.served("m", took);
        statistics.failed("m", Duration::from_nanos(7));
        let told = statistics.of("m").inference_stats.unwrap();
        let of = |total: Option<StatisticDuration>| total.map(|t| (t.count, t.ns));
        assert_eq!(of(told.success), Some((2, 10_000_000)));
        assert_eq!(of(told.queue), Some((2, 0)));
        assert_eq!(of(told.compute_infer), Some((2, 4_000_000)));
        assert_eq!(of(told.fail), Some((1, 7)));
        let batches = statistics.of("m").batch_stats;
        assert_eq!((batches.len(), batches[0].batch_size), (1, 1));
        assert_eq!(of(batches[0].compute_infer), Some((2, 4_000_000)));
        assert_eq!(statistics.of("other").inference_count, 0);
        assert!(statistics.of("other").batch_stats.is_empty());
    }

    #[test]
    fn there_is_an_end_to_names() {
        let statistics = Statistics::default();
        for i in 0..limits::MAX_MODELS + 9 {
            statistics.failed(&format!("m{i}"), Duration::ZERO);
        }
        assert_eq!(statistics.all().len(), limits::MAX_MODELS);
    }
}

//! Load for a scheduler or worker: many token requests at once, and how long each took.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use serde::Serialize;
use tokio::task::JoinSet;

use crate::{Client, Error, Event, GenerateOptions, Prompt, Reason};

/// Token ids below this are often a model's special ones, and are not put into prompts.
const FIRST_ID: u32 = 256;

/// What is asked for, and by how many at once.
#[derive(Clone, Debug)]
pub struct Load {
    /// Each request; its seed is replaced. It should ignore the model's end, so that all are equally long.
    pub options: GenerateOptions,
    /// Tokens of each prompt. Prompts are random and all different, so that none is known from before.
    pub prompt_tokens: u32,
    /// Ids that the model knows.
    pub vocabulary: u32,
    /// Streams at once; each begins a request when its last one ended.
    pub streams: usize,
    /// Requests in all.
    pub requests: usize,
    /// Determines prompts and noise.
    pub seed: u64,
    /// What a request that counts as good may take.
    pub bounds: Bounds,
}

/// A request is good if it keeps within these; none: any is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bounds {
    /// Until its first token.
    pub first: Option<Duration>,
    /// From one token to the next, in the mean.
    pub between: Option<Duration>,
}

/// Times of many, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Quantiles {
    /// Half take no longer.
    pub p50: f64,
    /// Nine in ten.
    pub p90: f64,
    /// 99 in 100.
    pub p99: f64,
}

impl Quantiles {
    /// By the nearest rank; zeros of nothing.
    pub fn of(mut times: Vec<f64>) -> Self {
        times.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let rank = (share * times.len() as f64).ceil() as usize;
            times.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
        };
        Self {
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
        }
    }
}

/// How a load went.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// Streams at once.
    pub streams: usize,
    /// Tokens of each prompt.
    pub prompt_tokens: u32,
    /// Tokens that were asked for.
    pub max_tokens: u32,
    /// Requests that ended as they should.
    pub complete: usize,
    /// Requests that failed.
    pub failed: usize,
    /// Why the first of them did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// From the first request's beginning to the last one's end.
    pub seconds: f64,
    /// Generated tokens of all streams together, per second.
    pub tokens_per_second: f64,
    /// Tokens of prompts, per second.
    pub prompt_tokens_per_second: f64,
    /// Until a request's first token.
    pub first_token_ms: Quantiles,
    /// From one token to the next.
    pub between_tokens_ms: Quantiles,
    /// Until a request's end.
    pub request_ms: Quantiles,
    /// Complete requests per second that kept within the bounds.
    pub goodput: f64,
    /// Deaths of workers that requests survived.
    pub deaths_survived: u32,
}

/// One request's times in milliseconds.
#[derive(Debug, Default)]
struct Times {
    first: f64,
    between: Vec<f64>,
    whole: f64,
    tokens: usize,
    deaths: u32,
}

/// Numbers that a seed determines (SplitMix64).
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A prompt of ordinary tokens.
    fn prompt(&mut self, tokens: u32, vocabulary: u32) -> Vec<u32> {
        let first = FIRST_ID.min(vocabulary / 2);
        let span = u64::from(vocabulary - first).max(1);
        // Less than `span`, which fits.
        let id = |n: u64| first + u32::try_from(n % span).unwrap_or(0);
        (0..tokens).map(|_| id(self.next())).collect()
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

async fn one(client: &Client, prompt: Vec<u32>, options: GenerateOptions) -> Result<Times, Error> {
    let start = Instant::now();
    let mut stream = client.generate(Prompt::Ids(prompt), options).await?;
    let mut times = Times::default();
    let mut last = start;
    while let Some(event) = stream.next().await {
        match event? {
            Event::Accepted(_) => {}
            // Text alone is no token.
            Event::Delta(delta) if delta.token_ids.is_empty() => {}
            Event::Delta(delta) => {
                let now = Instant::now();
                let each = ms(now - last) / delta.token_ids.len() as f64;
                let mut fresh = delta.token_ids.len();
                if times.tokens == 0 {
                    times.first = ms(now - start);
                    // Those that came with the first were there as soon.
                    fresh -= 1;
                    times.between.extend((0..fresh).map(|_| 0.0));
                } else {
                    times.between.extend((0..fresh).map(|_| each));
                }
                times.tokens += delta.token_ids.len();
                last = now;
            }
            Event::Finished(finished) => {
                times.whole = ms(start.elapsed());
                times.deaths = finished.deaths_survived;
                return Ok(times);
            }
        }
    }
    let lost = "the stream ended without its last event";
    Err(Error::new(Reason::ProtocolViolation, lost))
}

impl Bounds {
    fn hold(&self, times: &Times) -> bool {
        let within = |bound: Option<Duration>, time: f64| bound.is_none_or(|b| time <= ms(b));
        let count = times.between.len().max(1) as f64;
        let mean = times.between.iter().sum::<f64>() / count;
        within(self.first, times.first) && within(self.between, mean)
    }
}

/// Runs a load. `done` is called after each request.
///
/// # Errors
/// The first failure, if no request is complete.
pub async fn run(
    client: &Client,
    load: &Load,
    done: impl Fn() + Clone + Send + Sync + 'static,
) -> Result<Outcome, Error> {
    let next = Arc::new(AtomicUsize::new(0));
    let mut streams = JoinSet::new();
    let start = Instant::now();
    for _ in 0..load.streams.min(load.requests) {
        let (client, load) = (client.clone(), load.clone());
        let (next, done) = (Arc::clone(&next), done.clone());
        streams.spawn(async move {
            let mut results = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= load.requests {
                    return results;
                }
                let seed = load.seed.wrapping_add(number as u64);
                let prompt = Chance(seed).prompt(load.prompt_tokens, load.vocabulary);
                let mut options = load.options.clone();
                options.seed = Some(seed);
                results.push(one(&client, prompt, options).await);
                done();
            }
        });
    }
    let (mut complete, mut failed, mut problem) = (Vec::new(), 0, None);
    while let Some(results) = streams.join_next().await {
        let results = results.map_err(|e| Error::new(Reason::Internal, e.to_string()))?;
        for result in results {
            match result {
                Ok(times) => complete.push(times),
                Err(error) => {
                    failed += 1;
                    problem.get_or_insert(error);
                }
            }
        }
    }
    let seconds = start.elapsed().as_secs_f64().max(f64::MIN_POSITIVE);
    if let (true, Some(problem)) = (complete.is_empty(), &problem) {
        return Err(problem.clone());
    }
    let per_second = |count: usize| count as f64 / seconds;
    let good = complete.iter().filter(|t| load.bounds.hold(t)).count();
    Ok(Outcome {
        streams: load.streams,
        prompt_tokens: load.prompt_tokens,
        max_tokens: load.options.max_tokens,
        complete: complete.len(),
        failed,
        problem: problem.map(|error| error.to_string()),
        seconds,
        tokens_per_second: per_second(complete.iter().map(|t| t.tokens).sum()),
        prompt_tokens_per_second: per_second(complete.len()) * f64::from(load.prompt_tokens),
        first_token_ms: Quantiles::of(complete.iter().map(|t| t.first).collect()),
        request_ms: Quantiles::of(complete.iter().map(|t| t.whole).collect()),
        goodput: per_second(good),
        deaths_survived: complete.iter().map(|t| t.deaths).sum(),
        between_tokens_ms: Quantiles::of(complete.into_iter().flat_map(|t| t.between).collect()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_the_nearest_rank() {
        let times = (1..=100).rev().map(f64::from).collect();
        let expected = Quantiles {
            p50: 50.0,
            p90: 90.0,
            p99: 99.0,
        };
        assert_eq!(Quantiles::of(times), expected);
        assert_eq!(Quantiles::of(vec![7.0]).p99, 7.0);
        assert_eq!(Quantiles::of(vec![]), Quantiles::default());
    }

    #[test]
    fn prompts_are_known_ids_and_differ() {
        for vocabulary in [1, 2, 300, 32_000] {
            let prompt = Chance(1).prompt(50, vocabulary);
            assert!(prompt.iter().all(|id| *id < vocabulary), "{prompt:?}");
        }
        assert_ne!(Chance(1).prompt(50, 300), Chance(2).prompt(50, 300));
        assert_eq!(Chance(1).prompt(50, 300), Chance(1).prompt(50, 300));
    }

    #[test]
    fn bounds_hold_for_the_first_token_and_the_mean_of_the_rest() {
        let bounds = Bounds {
            first: Some(Duration::from_millis(10)),
            between: Some(Duration::from_millis(2)),
        };
        let times = |first, between: &[f64]| Times {
            first,
            between: between.to_vec(),
            ..Times::default()
        };
        assert!(bounds.hold(&times(10.0, &[1.0, 3.0])));
        assert!(!bounds.hold(&times(10.1, &[1.0])));
        assert!(!bounds.hold(&times(1.0, &[1.0, 3.1])));
        assert!(bounds.hold(&times(1.0, &[])));
        assert!(Bounds::default().hold(&times(1e9, &[1e9])));
    }
}

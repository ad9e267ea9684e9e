//! Streams that run together.

use std::time::{Duration, Instant};

use anyhow::Result;
use hotcell_client::{GenerateOptions, Grammar, v1::Sampling};
use hotcell_tests::{bench::Goal, chance::Chance};
use tokio::task::JoinSet;

use crate::{
    Bench, Stored,
    served::{Served, options, stream},
};

/// Tokens that each stream of a batch draws; a small model draws more, so that streams run long enough together.
fn tokens(bench: &Bench) -> usize {
    if bench.quick { 512 } else { 96 }
}

/// Eight streams beside one.
pub async fn batch(bench: &Bench, served: &Served, stored: Stored) -> Result<()> {
    let mut ratios = Vec::new();
    for _ in 0..bench.rounds() {
        let one = served.together(1, options(tokens(bench))).await?;
        ratios.push(served.together(8, options(tokens(bench))).await? / one);
    }
    let goal = Goal::AtLeast(if stored.quantised { 5.0 } else { 4.6 });
    let name = format!("batch_{}", stored.name);
    bench.figure(&name, ratios, "of one stream's tokens/s", goal);
    Ok(())
}

/// A request of the mixture: tokens of its prompt and answer, and when it comes, from 0 to 1.
#[derive(Clone, Copy)]
struct Mixed {
    prompt: usize,
    tokens: usize,
    when: f64,
}

/// Runs requests; all come within `spread` of the first one. Returns tokens of answers per second, from the first
/// request to the end of the last one.
async fn run(served: &Served, mixture: &[Mixed], spread: Duration) -> Result<f64> {
    let start = Instant::now();
    let mut all = JoinSet::new();
    for mixed in mixture.iter().copied() {
        let (client, prompt) = (served.client.clone(), served.prompt(mixed.prompt));
        all.spawn(async move {
            tokio::time::sleep(spread.mul_f64(mixed.when)).await;
            stream(&client, prompt, options(mixed.tokens)).await
        });
    }
    for done in all.join_all().await {
        done?;
    }
    let tokens: usize = mixture.iter().map(|mixed| mixed.tokens).sum();
    Ok(tokens as f64 / start.elapsed().as_secs_f64())
}

/// 32 streams, prompts of 16 to 256 tokens and answers of 16 to 128, which come at random within the first quarter of
/// the time that they take if all come at once.
pub async fn arrivals(bench: &Bench, served: &Served) -> Result<()> {
    let mut ratios = Vec::new();
    let mut chance = Chance::new(32);
    for _ in 0..bench.rounds().min(3) {
        let mut mixture: Vec<Mixed> = (0..32)
            .map(|_| Mixed {
                prompt: 16 + chance.below(241),
                tokens: 16 + chance.below(113),
                when: chance.share(),
            })
            .collect();
        // Time begins with the first one.
        mixture[0].when = 0.0;
        let tokens: usize = mixture.iter().map(|mixed| mixed.tokens).sum();
        let known = run(served, &mixture, Duration::ZERO).await?;
        let spread = Duration::from_secs_f64(tokens as f64 / known / 4.0);
        ratios.push(run(served, &mixture, spread).await? / known);
    }
    let unit = "of the tokens/s if all come at once";
    bench.figure("arrivals", ratios, unit, Goal::AtLeast(0.9));
    Ok(())
}

/// What a text is to be that goes on for as long as it is drawn.
const SCHEMA: &str = r#"{
    "type": "array", "minItems": 1000,
    "items": {
        "type": "object", "additionalProperties": false,
        "required": ["name", "count", "tags", "kind"],
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "count": {"type": "integer", "minimum": 0, "maximum": 100000},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
            "kind": {"enum": ["small", "large", "neither"]}
        }
    }
}"#;

/// Streams that have to be JSON of a schema, beside streams that may be anything: one of each, and eight.
pub async fn structured(bench: &Bench, served: &Served) -> Result<()> {
    for (name, streams) in [("structured", 1), ("structured_batch", 8)] {
        let mut ratios = Vec::new();
        for round in 0..bench.rounds() as u64 {
            let free = GenerateOptions {
                sampling: Sampling {
                    temperature: Some(1.0),
                    ..Sampling::default()
                },
                seed: Some(round),
                ..options(tokens(bench))
            };
            let bound = GenerateOptions {
                // The schema's text ends later than this stream.
                ignore_eos: false,
                grammar: Some(Grammar::JsonSchema(SCHEMA.to_owned())),
                ..free.clone()
            };
            let rate = served.together(streams, free).await?;
            ratios.push(served.together(streams, bound).await? / rate);
        }
        let unit = "of the tokens/s without";
        bench.figure(name, ratios, unit, Goal::AtLeast(0.95));
    }
    Ok(())
}

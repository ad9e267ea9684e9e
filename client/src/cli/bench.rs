//! `bench`: how fast a model is, by how many stream at once and how long prompts and answers are.

mod plot;

use std::time::Duration;

use clap::Args;
use serde_json::json;

use crate::{
    GenerateOptions, Reason,
    load::{Bounds, Load, Outcome, Quantiles, run},
    local::Bundled,
};

use super::{
    GlobalFlags,
    exit::Failure,
    flags::{ModelRef, duration},
    interrupt::Interrupt,
    session::Session,
    table::Table,
    ui::{DIM, Ui},
};

/// Ids that a model is taken to know which does not say: one for each byte.
const VOCABULARY: u32 = 256;

/// `hotcell bench`.
#[derive(Args, Clone, Debug)]
pub struct BenchFlags {
    /// A loaded or configured model's name, or the path of a model to load [default: kjv, the bundled model]
    #[arg(short, long, value_name = "NAME-or-PATH")]
    pub model: Option<String>,
    /// Start a private scheduler even if one runs already
    #[arg(long)]
    pub private: bool,
    /// Streams at once, one row each
    #[arg(short, long, value_name = "N,…", value_delimiter = ',', default_values_t = [1, 2, 4, 8], value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub concurrency: Vec<u32>,
    /// Tokens of a prompt; random ones, so that no prompt is known from before
    #[arg(short, long, value_name = "N,…", value_delimiter = ',', default_values_t = [64], value_parser = clap::value_parser!(u32).range(1..))]
    pub prompt_tokens: Vec<u32>,
    /// Tokens of an answer
    #[arg(short = 'n', long, value_name = "N,…", value_delimiter = ',', default_values_t = [64], value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: Vec<u32>,
    /// Requests of each row [default: 4 per stream, 16 at least]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub requests: Option<u32>,
    /// Requests before each row that do not count [default: one per stream]
    #[arg(long, value_name = "N")]
    pub warm_up: Option<u32>,
    /// A good request's first token comes within this: 200ms, 1s
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub within: Option<Duration>,
    /// A good request's tokens come this far apart at most, in the mean
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub apart: Option<Duration>,
    /// Randomness of tokens; 0 always takes the most likely one
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    pub temperature: f32,
    /// Seed of prompts and randomness
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Draw tokens per second and times over concurrency into this file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<std::path::PathBuf>,
}

impl BenchFlags {
    /// The rows: every prompt length with every answer length at every concurrency.
    fn loads(&self, model: &str, vocabulary: u32) -> Vec<Load> {
        let mut loads = Vec::new();
        for &prompt_tokens in &self.prompt_tokens {
            for &max_tokens in &self.max_tokens {
                loads.extend(self.concurrency.iter().map(|&streams| Load {
                    options: GenerateOptions {
                        model: model.to_owned(),
                        sampling: crate::v1::Sampling {
                            temperature: Some(self.temperature),
                            ..crate::v1::Sampling::default()
                        },
                        max_tokens,
                        ignore_eos: true,
                        ..GenerateOptions::default()
                    },
                    prompt_tokens,
                    vocabulary,
                    streams: streams as usize,
                    requests: self.requests.unwrap_or((4 * streams).max(16)) as usize,
                    seed: 0,
                    bounds: Bounds {
                        first: self.within,
                        between: self.apart,
                    },
                }));
            }
        }
        // Rows have no prompt in common: the second one would find the first one's in the cache.
        for (row, load) in loads.iter_mut().enumerate() {
            load.seed = self.seed.wrapping_add((row as u64) << 32);
        }
        loads
    }
}

pub(crate) async fn bench(
    ui: &mut Ui,
    global: &GlobalFlags,
    flags: &BenchFlags,
    bundled: Bundled,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    let model = match &flags.model {
        Some(model) => ModelRef::parse(model),
        None => ModelRef::Name(bundled.model.to_owned()),
    };
    let mut session = tokio::select! {
        session = Session::running_or_private(ui, global, flags.private, &model, bundled) => session?,
        () = interrupt.pressed() => return Err(Failure::Interrupted),
    };
    let outcomes = sweep(ui, &mut session, flags, &model, interrupt).await;
    session.end().await;
    let outcomes = outcomes?;
    if let Some(file) = &flags.svg {
        plot::draw(file, &outcomes)?;
        ui.note(DIM, &format!("drawn into {}", file.display()));
    }
    Ok(())
}

/// All rows, told as they are measured with `--json`, else in a table.
async fn sweep(
    ui: &mut Ui,
    session: &mut Session,
    flags: &BenchFlags,
    model: &ModelRef,
    interrupt: &mut Interrupt,
) -> Result<Vec<Outcome>, Failure> {
    let name = session
        .prepare(ui, interrupt, model, flags.model.is_some())
        .await?;
    let models = session.client.models().await.unwrap_or_default();
    let info = models.iter().find(|m| m.name == name);
    let summary = info.and_then(|m| m.summary.as_ref());
    let vocabulary = summary.map_or(VOCABULARY, |s| s.vocabulary.max(1));
    let context = summary.map_or(u32::MAX, |s| s.context_length);
    let loads = flags.loads(&name, vocabulary);
    for load in &loads {
        let tokens = load.prompt_tokens.saturating_add(load.options.max_tokens);
        if tokens > context {
            return Err(Failure::Usage(format!(
                "{} prompt tokens and {} more do not fit into the context of {name}, which has {context}",
                load.prompt_tokens, load.options.max_tokens
            )));
        }
    }
    let mut outcomes = Vec::new();
    for load in &loads {
        let warm_up = Load {
            requests: flags.warm_up.map_or(load.streams, |n| n as usize),
            // Other prompts than those that count.
            seed: !load.seed,
            ..load.clone()
        };
        let all = (warm_up.requests + load.requests) as u64;
        let bar = ui.progress(&format!(
            "{} streams, {} + {} tokens",
            load.streams, load.prompt_tokens, load.options.max_tokens
        ));
        bar.set_length(all);
        let tick = {
            let bar = bar.clone();
            move || {
                bar.inc(1);
                bar.set_prefix(format!("{}/{all}", bar.position()));
            }
        };
        let measured = async {
            if warm_up.requests > 0 {
                run(&session.client, &warm_up, tick.clone()).await?;
            }
            run(&session.client, load, tick).await
        };
        let outcome = tokio::select! {
            outcome = measured => outcome,
            () = interrupt.pressed() => return Err(Failure::Interrupted),
        };
        bar.finish_and_clear();
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(error) => return Err(session.explain(error).await.into()),
        };
        if ui.manner.json {
            ui.print_json(&json!({ "event": "row", "model": name, "row": outcome }))?;
        }
        outcomes.push(outcome);
    }
    if !ui.manner.json {
        table(ui, flags, &outcomes)?;
    }
    let failed: usize = outcomes.iter().map(|o| o.failed).sum();
    if let (1.., Some(problem)) = (failed, outcomes.iter().find_map(|o| o.problem.as_ref())) {
        let message = format!("{failed} requests failed, the first one so: {problem}");
        return Err(crate::Error::new(Reason::WorkerLost, message).into());
    }
    Ok(outcomes)
}

fn table(ui: &mut Ui, flags: &BenchFlags, outcomes: &[Outcome]) -> Result<(), Failure> {
    let mut table = Table::new(&[
        "PROMPT",
        "ANSWER",
        "STREAMS",
        "TOKENS/S",
        "FIRST TOKEN p50/p90/p99",
        "BETWEEN TOKENS p50/p90/p99",
        "REQUESTS/S",
        "GOOD/S",
    ]);
    let times = |q: Quantiles| format!("{:.1} / {:.1} / {:.1} ms", q.p50, q.p90, q.p99);
    let bounded = flags.within.is_some() || flags.apart.is_some();
    for o in outcomes {
        table.row([
            o.prompt_tokens.to_string(),
            o.max_tokens.to_string(),
            o.streams.to_string(),
            format!("{:.0}", o.tokens_per_second),
            times(o.first_token_ms),
            times(o.between_tokens_ms),
            format!("{:.1}", o.complete as f64 / o.seconds),
            match bounded {
                true => format!("{:.1}", o.goodput),
                false => String::new(),
            },
        ]);
    }
    table.print(ui, "nothing was measured")?;
    let deaths: u32 = outcomes.iter().map(|o| o.deaths_survived).sum();
    if deaths > 0 {
        ui.note(
            DIM,
            &format!("workers died; requests survived {deaths} deaths"),
        );
    }
    Ok(())
}

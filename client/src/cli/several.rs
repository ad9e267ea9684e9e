//! Several continuations of one prompt: all of them, or the likeliest.

use std::time::{Duration, Instant};

use hotcell_proto::{error::Error, v1};
use serde::Serialize;
use tokio::{sync::mpsc, task::JoinSet, time::timeout};

use crate::{
    connect::Client,
    tokens::{Event, GenerateOptions, Prompt},
};

use super::{
    exit::Failure,
    interrupt::Interrupt,
    json::{self, Clock, EventView},
    session::Session,
    ui::{BOLD, DIM, Ui},
};

/// How many events may wait to be shown.
const WAITING: usize = 64;

/// How long streams may take to be cancelled.
const FAREWELL: Duration = Duration::from_secs(1);

/// How many continuations to make, and how many of them to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) shown: u32,
    pub(crate) made: u32,
}

/// One continuation.
#[derive(Debug, Default)]
struct Answer {
    branch: u32,
    text: String,
    tokens: usize,
    logprobs: f64,
    deaths: u32,
}

impl Answer {
    /// The mean of its tokens' log probabilities; the least possible if it has none.
    fn likelihood(&self) -> f64 {
        match self.tokens {
            0 => f64::NEG_INFINITY,
            n => self.logprobs / n as f64,
        }
    }
}

#[derive(Serialize)]
struct BranchView<'a> {
    branch: u32,
    #[serde(flatten)]
    event: EventView<'a>,
}

#[derive(Serialize)]
struct ChosenView {
    event: &'static str,
    /// The likeliest first.
    branches: Vec<u32>,
    mean_logprobs: Vec<f64>,
}

/// Opens a stream and reads it to its end.
async fn follow(
    client: Client,
    prompt: Prompt,
    options: GenerateOptions,
    events: mpsc::Sender<(u32, Event)>,
) -> Result<(), Error> {
    let branch = options.branch;
    let mut stream = client.generate(prompt, options).await?;
    while let Some(event) = stream.next().await.transpose()? {
        if events.send((branch, event)).await.is_err() {
            // Nobody wants it any more.
            stream.cancel().await;
            break;
        }
    }
    Ok(())
}

/// Generates `choice.made` continuations at once, with one seed and the branches from `options.branch` on, and shows the likeliest
/// `choice.shown` of them: each when all are there, or with `--json` every event as it comes. Says whether Ctrl-C
/// ended it.
pub(crate) async fn several(
    ui: &mut Ui,
    session: &mut Session,
    interrupt: &mut Interrupt,
    prompt: Prompt,
    mut options: GenerateOptions,
    choice: Choice,
) -> Result<bool, Failure> {
    let start = Instant::now();
    options.logprobs |= choice.made > choice.shown;
    let first = options.branch;
    let branches = first..first.saturating_add(choice.made);
    let mut answers: Vec<Answer> = branches.map(Answer::new).collect();
    let (sender, mut events) = mpsc::channel(WAITING);
    let mut streams = JoinSet::new();
    let spawn = |streams: &mut JoinSet<_>, options| {
        let (client, prompt) = (session.client.clone(), prompt.clone());
        streams.spawn(follow(client, prompt, options, sender.clone()));
    };
    spawn(&mut streams, options.clone());
    let mut begun = false;
    while !streams.is_empty() || !events.is_empty() {
        tokio::select! {
            // What a stream said comes before its end.
            biased;
            () = interrupt.pressed() => {
                // Streams whose events nobody takes are cancelled; this process may be gone before the scheduler
                // would notice by itself.
                events.close();
                let all = async { while streams.join_next().await.is_some() {} };
                let _ = timeout(FAREWELL, all).await;
                return Ok(true);
            }
            Some((branch, event)) = events.recv() => {
                if let (false, Event::Accepted(accepted)) = (begun, &event) {
                    // The others share the seed that the scheduler drew for the first.
                    begun = true;
                    options.seed = Some(accepted.seed);
                    for answer in answers.iter().skip(1) {
                        let branch = answer.branch;
                        spawn(&mut streams, GenerateOptions { branch, ..options.clone() });
                    }
                }
                if ui.manner.json {
                    let clock = Clock {
                        total_ms: start.elapsed().as_secs_f64() * 1000.0,
                        ..Clock::default()
                    };
                    let event = json::event(&event, &clock);
                    ui.print_json(&BranchView { branch, event })?;
                }
                let answer = answers.iter_mut().find(|answer| answer.branch == branch);
                if let Some(answer) = answer {
                    answer.note(&event);
                }
            }
            Some(ended) = streams.join_next() => match ended {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return Err(session.explain(error).await.into()),
                // Not cancelled here, so it panicked: let the program end as for any panic.
                Err(error) => std::panic::resume_unwind(error.into_panic()),
            },
        }
    }
    if choice.made > choice.shown {
        // Equally likely ones keep their order.
        answers.sort_by(|a, b| b.likelihood().total_cmp(&a.likelihood()));
        answers.truncate(choice.shown as usize);
    }
    show(ui, &answers, choice, start)?;
    Ok(false)
}

fn show(ui: &mut Ui, answers: &[Answer], choice: Choice, start: Instant) -> Result<(), Failure> {
    if ui.manner.json {
        return match choice.made > choice.shown {
            true => ui.print_json(&ChosenView {
                event: "chosen",
                branches: answers.iter().map(|a| a.branch).collect(),
                mean_logprobs: answers.iter().map(Answer::likelihood).collect(),
            }),
            false => Ok(()),
        };
    }
    for answer in answers {
        if choice.shown > 1 {
            let heading = ui.styled(BOLD, &format!("--- branch {} ---", answer.branch));
            ui.print(&heading)?;
            ui.print("\n")?;
        }
        ui.print_text(&answer.text)?;
        if !answer.text.is_empty() && !answer.text.ends_with('\n') {
            ui.print("\n")?;
        }
    }
    if ui.err_terminal || ui.manner.verbose {
        let (tokens, deaths) = answers
            .iter()
            .fold((0, 0), |(t, d), a| (t + a.tokens, d + a.deaths));
        let mut parts = vec![format!("{tokens} tokens")];
        if let [best] = answers
            && choice.made > 1
        {
            let likelihood = best.likelihood();
            parts.push(format!(
                "the likeliest of {} (branch {}, {likelihood:.3} per token)",
                choice.made, best.branch
            ));
        }
        if deaths > 0 {
            parts.push(format!("survived {deaths} deaths of workers"));
        }
        parts.push(format!("{:.0} ms", start.elapsed().as_secs_f64() * 1000.0));
        ui.note(DIM, &parts.join(" · "));
    }
    Ok(())
}

impl Answer {
    fn new(branch: u32) -> Self {
        Self {
            branch,
            ..Self::default()
        }
    }

    fn note(&mut self, event: &Event) {
        match event {
            Event::Accepted(_) => {}
            Event::Delta(v1::Delta {
                text,
                token_ids,
                logprobs,
                ..
            }) => {
                self.text.push_str(text);
                self.tokens += token_ids.len();
                self.logprobs += logprobs.iter().map(|l| f64::from(l.logprob)).sum::<f64>();
            }
            Event::Finished(finished) => self.deaths = finished.deaths_survived,
        }
    }
}

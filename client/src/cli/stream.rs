//! Shows a token stream while it comes, and sums it up.

use std::time::Instant;

use hotcell_proto::{error::Error, v1};

use crate::tokens::{Event, GenerateOptions, Generation, Prompt};

use super::{
    exit::Failure,
    interrupt::Interrupt,
    json::{self, Clock},
    session::Session,
    ui::{DIM, Ui, harmless},
};

/// How a stream went, as the client saw it.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) text: String,
    pub(crate) tokens: Vec<u32>,
    pub(crate) interrupted: bool,
    pub(crate) accepted: Option<v1::Accepted>,
    pub(crate) finished: Option<v1::Finished>,
    returns: u32,
    /// Deaths that were shown.
    told: usize,
    first_tokens: usize,
    first: Option<f64>,
    last: f64,
}

impl Report {
    fn note(&mut self, event: &Event, ms: f64) {
        match event {
            Event::Accepted(accepted) => self.accepted = Some(accepted.clone()),
            Event::Delta(delta) => {
                self.text.push_str(&delta.text);
                self.tokens.extend_from_slice(&delta.token_ids);
                if !delta.token_ids.is_empty() {
                    if self.first.is_none() {
                        self.first = Some(ms);
                        self.first_tokens = delta.token_ids.len();
                    }
                    self.last = ms;
                }
            }
            Event::Finished(finished) => self.finished = Some(finished.clone()),
        }
    }

    /// Tokens per second after the first ones, whose time is told apart.
    fn rate(&self) -> Option<f64> {
        let seconds = (self.last - self.first?) / 1000.0;
        let tokens = self.tokens.len() - self.first_tokens;
        (tokens > 0 && seconds > 0.0).then(|| tokens as f64 / seconds)
    }

    fn summary(&self) -> String {
        let mut parts = vec![match self.tokens.len() {
            1 => "1 token".to_owned(),
            n => format!("{n} tokens"),
        }];
        if let Some(first) = self.first {
            parts.push(format!("first after {first:.0} ms"));
        }
        if let Some(rate) = self.rate() {
            let digits = usize::from(rate < 10.0);
            parts.push(format!("{rate:.digits$} tokens/s"));
        }
        match self.finished.as_ref().map_or(0, |f| f.deaths_survived) {
            0 => {}
            1 => parts.push("survived the death of a worker".to_owned()),
            n => parts.push(format!("survived {n} deaths of workers")),
        }
        match self.returns {
            0 => {}
            1 => parts.push("came back once after the connection broke".to_owned()),
            n => parts.push(format!("came back {n} times after the connection broke")),
        }
        if self.interrupted {
            parts.push("interrupted".to_owned());
        }
        parts.join(" · ")
    }

    /// What only `--verbose` wants to know.
    fn details(&self) -> Option<String> {
        let (accepted, finished) = self.accepted.as_ref().zip(self.finished.as_ref())?;
        let class = finished.numerics.as_ref().or(accepted.numerics.as_ref());
        let timings = finished.timings.unwrap_or_default();
        Some(format!(
            "model {} · {} prompt tokens · ended by {} · seed {} · {} · \
             queue {:.1} ms, prefill {:.1} ms, decode {:.1} ms · request {}",
            accepted.model,
            finished.usage.unwrap_or_default().prompt_tokens,
            json::finish_reason(finished.reason),
            accepted.seed,
            class.map_or("", |c| &c.id),
            timings.queue_ms,
            timings.prefill_ms,
            timings.decode_ms,
            accepted.request_id,
        ))
    }
}

/// A worker's death that a stream went on after, in words.
fn told(survived: &v1::Survived) -> String {
    let v1::Survived {
        worker,
        epoch,
        exit_kind,
        generated,
        pause_ms,
        continued_on,
    } = survived;
    let how = match exit_kind.as_str() {
        "" => String::new(),
        kind => format!(" ({})", kind.replace('_', " ")),
    };
    harmless(&format!(
        "{worker} (epoch {epoch}) died{how} after {generated} tokens; went on with {continued_on} {pause_ms:.0} ms later"
    ))
}

/// Generates and shows what comes. Ctrl-C cancels the stream; the report then says so.
pub(crate) async fn show(
    ui: &mut Ui,
    session: &mut Session,
    interrupt: &mut Interrupt,
    prompt: Prompt,
    options: GenerateOptions,
) -> Result<Report, Failure> {
    let mut report = Report::default();
    let result = follow(ui, session, interrupt, prompt, options, &mut report).await;
    if !ui.manner.json {
        // An error, and the shell's prompt, begin on a line of their own.
        if !report.text.is_empty() && !report.text.ends_with('\n') {
            ui.print("\n")?;
        }
        if ui.err_terminal || ui.manner.verbose {
            if result.is_ok() {
                ui.note(DIM, &report.summary());
            }
            if let Some(details) = report.details().filter(|_| ui.manner.verbose) {
                ui.note(DIM, &details);
            }
        }
    }
    match result {
        Ok(()) => Ok(report),
        Err(Failure::Call(error)) => Err(session.explain(error).await.into()),
        Err(failure) => Err(failure),
    }
}

async fn follow(
    ui: &mut Ui,
    session: &Session,
    interrupt: &mut Interrupt,
    prompt: Prompt,
    options: GenerateOptions,
    report: &mut Report,
) -> Result<(), Failure> {
    let start = Instant::now();
    let mut stream = None;
    loop {
        let next = async {
            match &mut stream {
                None => {
                    let opened = session
                        .client
                        .generate(prompt.clone(), options.clone())
                        .await?;
                    Ok::<_, Error>(stream.insert(opened).next().await)
                }
                Some(stream) => Ok(stream.next().await),
            }
        };
        let event = tokio::select! {
            event = next => event?,
            () = interrupt.pressed() => {
                report.interrupted = true;
                if let Some(stream) = stream {
                    // This process may be gone before it could be told by the way.
                    stream.cancel().await;
                }
                return Ok(());
            }
        };
        let Some(event) = event.transpose()? else {
            return Ok(());
        };
        let ms = start.elapsed().as_secs_f64() * 1000.0;
        if let Some(stream) = stream
            .as_ref()
            .filter(|_| ui.manner.verbose && !ui.manner.json)
        {
            for survived in stream.survived().iter().skip(report.told) {
                // On a terminal the text so far stands on the same line.
                let apart = ui.out_terminal && ui.err_terminal && !report.text.is_empty();
                let apart = if apart { "\n" } else { "" };
                ui.note(DIM, &format!("{apart}{}", told(survived)));
            }
            report.told = stream.survived().len();
        }
        report.returns = stream.as_ref().map_or(0, Generation::returns);
        report.note(&event, ms);
        if ui.manner.json {
            let clock = Clock {
                first_token_ms: report.first,
                total_ms: ms,
                tokens_per_second: report.rate(),
            };
            ui.print_json(&json::event(&event, &clock))?;
        } else if let Event::Delta(delta) = &event
            && !delta.text.is_empty()
        {
            ui.print_text(&delta.text)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delta(tokens: usize) -> Event {
        Event::Delta(v1::Delta {
            token_ids: vec![1; tokens],
            ..v1::Delta::default()
        })
    }

    #[test]
    fn the_summary_tells_first_token_and_rate_apart() {
        let mut report = Report::default();
        assert_eq!(report.summary(), "0 tokens");
        report.note(&delta(1), 35.4);
        assert_eq!(report.summary(), "1 token · first after 35 ms");
        report.note(&delta(47), 187.0);
        assert_eq!(
            report.summary(),
            "48 tokens · first after 35 ms · 310 tokens/s"
        );
        report.finished = Some(v1::Finished {
            deaths_survived: 1,
            ..v1::Finished::default()
        });
        assert!(report.summary().ends_with("survived the death of a worker"));
        let survived = v1::Survived {
            worker: "w0".into(),
            epoch: 3,
            exit_kind: "out_of_memory".into(),
            generated: 17,
            pause_ms: 120.4,
            continued_on: "w1".into(),
        };
        assert_eq!(
            told(&survived),
            "w0 (epoch 3) died (out of memory) after 17 tokens; went on with w1 120 ms later"
        );
    }
}

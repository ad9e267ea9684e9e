//! A stream whose worker is killed amid it.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use hotcell_client::{Client, Event, GenerateOptions, Prompt, v1::EventKind};
use rustix::process::Signal;

use crate::cluster::signal_pid;

/// What a client got of one.
pub struct Killed {
    /// From SIGKILL of the worker to the next token.
    pub milliseconds: f64,
    /// All tokens.
    pub tokens: Vec<u32>,
}

/// A prompt's stream, whose worker is killed once so many tokens are there.
///
/// # Errors
/// When the stream fails, or nobody continued it.
pub async fn killed_after(
    client: &Client,
    pid: u32,
    before: usize,
    options: GenerateOptions,
) -> Result<Killed> {
    let mut events = client.watch().await?;
    let mut stream = client
        .generate(Prompt::Ids(vec![300, 301, 302, 303]), options)
        .await?;
    let (mut killed, mut arrived, mut tokens) = (None, Vec::new(), Vec::new());
    while let Some(event) = stream.next().await {
        if let Event::Delta(delta) = event? {
            arrived.extend(delta.token_ids.iter().map(|_| Instant::now()));
            tokens.extend(delta.token_ids);
        }
        if arrived.len() >= before && killed.is_none() {
            killed = Some(Instant::now());
            signal_pid(pid, Signal::KILL)?;
        }
    }
    let survived = stream.survived().len();
    ensure!(
        survived > 0,
        "the stream was over before its worker was dead"
    );
    // What was on its way already still came from the old worker; the scheduler says how much that was.
    let event = loop {
        let event = events.next().await.context("no more events")??;
        if event.kind() == EventKind::StreamContinued {
            break event;
        }
    };
    let words = event.message.split(" after ").nth(1);
    let count = words.and_then(|words| words.split(' ').next());
    let count: usize = count.context("no count")?.parse()?;
    let next = arrived.get(count).context("no token of the new worker's")?;
    Ok(Killed {
        milliseconds: (*next - killed.context("not killed")?).as_secs_f64() * 1e3,
        tokens,
    })
}

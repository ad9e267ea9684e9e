//! `hotcell top`: a host's workers, models and requests on a screen that stays, and what to do about them.

mod devices;
mod feed;
mod screen;
mod state;
mod streams;
mod view;

use std::{path::PathBuf, time::Duration};

use clap::Args;
use hotcell_proto::v1::{self, TraceRequest};
use tokio::{sync::mpsc, time::MissedTickBehavior};

use super::{
    GlobalFlags, crashes,
    debug::{told, trace},
    exit::Failure,
    flags::watch_interval,
    interrupt::Interrupt,
    session::Session,
    table::time_of_day,
    ui::Ui,
};
use crate::connect::Client;
use feed::{Feed, Update};
use screen::{Asked, Keys, Screen, is_gone};
use state::{Action, State};

/// `hotcell top`.
#[derive(Args, Clone, Debug)]
pub struct TopFlags {
    /// How often it is looked again: 200ms, 1s
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = watch_interval)]
    pub every: Duration,
}

/// At most so often the screen is drawn.
const FRAME: Duration = Duration::from_millis(50);
/// How soon it is seen that the terminal is closed.
const LOOKED: Duration = Duration::from_millis(500);
/// How long `t` traces.
const TRACED: u32 = 1000;
/// How long requests have to end after `d`.
const DRAINED: Duration = Duration::from_secs(60);
/// Tokens that `c` captures.
const CAPTURED: u64 = 16;

pub(super) async fn top(
    ui: &mut Ui,
    global: &GlobalFlags,
    flags: &TopFlags,
) -> Result<(), Failure> {
    if ui.manner.json {
        let what = "hotcell top draws a screen; for JSON there are `hotcell ps --json` and `hotcell debug watch --json`";
        return Err(Failure::Usage(what.to_owned()));
    }
    if !(ui.in_terminal && ui.out_terminal) {
        let what = "hotcell top needs a terminal; without one there are `hotcell ps` and `hotcell debug watch`";
        return Err(Failure::Usage(what.to_owned()));
    }
    let client = Session::running(global).await?.client;
    // Who cannot list workers is told so before the screen is taken.
    client.workers().await?;
    let mut state = State::new(client.peer());
    let (mut feed, mut updates) = Feed::start(client.clone(), flags.every);
    let mut asked = Asked::listen().map_err(Failure::Output)?;
    let mut screen = Screen::take().map_err(Failure::Output)?;
    let (keys, mut pressed) = Keys::read();
    let mut frames = tokio::time::interval(FRAME);
    frames.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut looks = tokio::time::interval(LOOKED);
    looks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut dirty = true;
    let result = loop {
        let action = tokio::select! {
            Some(update) = updates.recv() => {
                if let Update::Lists(lists) = &update {
                    feed.follow(&lists.workers);
                }
                state.take(update);
                dirty = true;
                None
            }
            key = pressed.recv() => {
                dirty = true;
                match key {
                    // The terminal is gone.
                    None => break Ok(()),
                    Some(event) => state.event(&event),
                }
            }
            _ = frames.tick(), if dirty => {
                dirty = false;
                if let Err(error) = screen.draw(&mut state) {
                    break Err(Failure::Output(error));
                }
                None
            }
            _ = looks.tick() => match is_gone() {
                true => break Ok(()),
                false => None,
            },
            () = asked.end() => break Ok(()),
        };
        match action {
            Some(Action::Quit) => break Ok(()),
            Some(action) => {
                tokio::spawn(act(client.clone(), action, feed.updates()));
            }
            None => {}
        }
    };
    keys.end().await;
    drop(screen);
    result
}

/// Where a file of this worker goes: the folder that the command was started in.
fn file(worker: &str, now: u64, ending: &str) -> PathBuf {
    let time = time_of_day(now).replace(':', "");
    let time = time.split('.').next().unwrap_or_default().to_owned();
    let harmless = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    let worker: String = worker.chars().filter(|&c| harmless(c)).collect();
    format!("{worker}-{time}.{ending}").into()
}

/// Does it, and says how that went.
async fn act(client: Client, action: Action, updates: mpsc::Sender<Update>) {
    let done = match action {
        Action::Quit => return,
        Action::Crash(worker) => match report(&client, &worker).await {
            Ok(report) => {
                // Nobody is there to read it if that fails.
                let _ = updates.send(Update::Report(report)).await;
                return;
            }
            Err(failure) => Err(failure),
        },
        Action::Release(worker) => {
            let released = client.release(&worker).await;
            released
                .map(|()| format!("{worker} was released"))
                .map_err(Failure::from)
        }
        Action::Drain(worker) => {
            let drained = client.drain(&worker, DRAINED).await;
            drained
                .map(|()| format!("{worker} gets no new requests; r gives it some again"))
                .map_err(Failure::from)
        }
        Action::Restart(worker) => {
            let restarted = client.restart(&worker).await;
            restarted
                .map(|()| format!("another process takes the place of {worker}"))
                .map_err(Failure::from)
        }
        Action::Trace(worker, now) => {
            let path = file(&worker, now, "pftrace");
            let request = TraceRequest {
                worker,
                duration_ms: TRACED,
                nodes: true,
                steps: 0,
            };
            let traced = trace::write(&client, request, None, &path).await;
            traced.map(|written| {
                let path = path.display();
                format!("{path}: {written}; open it in https://ui.perfetto.dev")
            })
        }
        Action::Capture(worker, now) => {
            let path = file(&worker, now, "hotcell");
            capture(&client, &worker, path).await
        }
    };
    let said = done.unwrap_or_else(|failure| failure.message());
    let _ = updates.send(Update::Said(said)).await;
}

/// The report of a worker's last death.
async fn report(client: &Client, worker: &str) -> Result<String, Failure> {
    let all = client.crashes().await?;
    match all.iter().find(|crash| crash.worker == worker) {
        Some(crash) => Ok(crashes::in_words(&client.crash(&crash.id).await?)),
        None => Ok(format!("no report of a death of {worker} is kept\n")),
    }
}

/// What is computed for the next request that comes to a worker, into a file.
async fn capture(client: &Client, worker: &str, path: PathBuf) -> Result<String, Failure> {
    let request = v1::CaptureRequest {
        worker: worker.to_owned(),
        which: Some(v1::capture_request::Which::Next(true)),
        options: Some(v1::CaptureOptions {
            tokens: CAPTURED,
            ..v1::CaptureOptions::default()
        }),
        ..v1::CaptureRequest::default()
    };
    let messages = client.capture(request).await?;
    let (_pressed_by_nobody, mut interrupt) = Interrupt::manual();
    let recording = told::follow(messages, &mut interrupt, |_, _| Ok(())).await?;
    recording.write(&path)?;
    let (path, tokens) = (path.display(), recording.tokens.len());
    Ok(format!(
        "{path}: {tokens} tokens of {} nodes, without the prompt",
        recording.head.nodes.len()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_stay_in_the_folder() {
        let name = file("../w0/..", 3_723_004, "pftrace");
        assert_eq!(name, PathBuf::from("..w0..-010203.pftrace"));
        assert_eq!(name.components().count(), 1);
    }
}

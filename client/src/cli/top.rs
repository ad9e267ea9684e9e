//! `hotcell top`: a host's workers, models and requests on a screen that stays, and what to do about them.

mod devices;
mod feed;
mod state;
mod streams;
mod view;

use std::{
    io::{self, BufWriter, Stdout},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use clap::Args;
use hotcell_proto::v1::{self, TraceRequest};
use ratatui::{
    Terminal,
    backend::CrosstermBackend,
    crossterm::{
        cursor, event, execute, queue,
        terminal::{
            BeginSynchronizedUpdate, EndSynchronizedUpdate, EnterAlternateScreen,
            LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
        },
    },
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, oneshot},
    time::MissedTickBehavior,
};

use super::{
    GlobalFlags, crashes,
    debug::{told, trace},
    exit::Failure,
    flags::duration,
    interrupt::Interrupt,
    session::Session,
    table::time_of_day,
    ui::Ui,
};
use crate::connect::Client;
use feed::{Feed, Update};
use state::{Action, State};

/// `hotcell top`.
#[derive(Args, Clone, Debug)]
pub struct TopFlags {
    /// How often it is looked again: 200ms, 1s
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration)]
    pub every: Duration,
}

/// At most so often the screen is drawn.
const FRAME: Duration = Duration::from_millis(50);
/// How soon the thread that reads keys hears that it is over.
const KEYS: Duration = Duration::from_millis(100);
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
    interrupt: &mut Interrupt,
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
    let mut stops = signal(SignalKind::terminate()).map_err(Failure::Output)?;
    let mut hangs = signal(SignalKind::hangup()).map_err(Failure::Output)?;
    let mut screen = Screen::take().map_err(Failure::Output)?;
    let (keys, mut pressed) = Keys::read();
    let mut frames = tokio::time::interval(FRAME);
    frames.set_missed_tick_behavior(MissedTickBehavior::Skip);
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
            () = interrupt.pressed() => break Ok(()),
            _ = stops.recv() => break Ok(()),
            _ = hangs.recv() => break Ok(()),
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

/// Bytes that are gathered before they go to the terminal: more than a frame of a large one has.
const GATHERED: usize = 1 << 16;

/// The terminal, which is as it was once this is dropped.
struct Screen {
    terminal: Terminal<CrosstermBackend<BufWriter<Stdout>>>,
}

impl Screen {
    fn take() -> io::Result<Self> {
        enable_raw_mode()?;
        // From here on dropping it gives the terminal back.
        let out = BufWriter::with_capacity(GATHERED, io::stdout());
        let mut screen = Self {
            terminal: Terminal::new(CrosstermBackend::new(out))?,
        };
        execute!(
            screen.terminal.backend_mut(),
            EnterAlternateScreen,
            cursor::Hide
        )?;
        Ok(screen)
    }

    /// Draws what has changed since the frame before. A terminal that knows synchronized updates shows a frame once all of
    /// it is there; others do not listen to them.
    fn draw(&mut self, state: &mut State) -> io::Result<()> {
        queue!(self.terminal.backend_mut(), BeginSynchronizedUpdate)?;
        let drawn = self.terminal.draw(|frame| view::draw(frame, state));
        let drawn = drawn.map(|_| ());
        // After a failure as well: until then the terminal shows nothing.
        let ended = execute!(self.terminal.backend_mut(), EndSynchronizedUpdate);
        drawn.and(ended)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // Whoever closed the terminal does not need it back.
        let _ = execute!(
            self.terminal.backend_mut(),
            LeaveAlternateScreen,
            cursor::Show
        );
        let _ = disable_raw_mode();
    }
}

/// The thread that reads keys and sizes.
struct Keys {
    over: Arc<AtomicBool>,
    ended: oneshot::Receiver<()>,
}

impl Keys {
    fn read() -> (Self, mpsc::Receiver<event::Event>) {
        let (sender, events) = mpsc::channel(64);
        let over = Arc::new(AtomicBool::new(false));
        let (tell, ended) = oneshot::channel::<()>();
        std::thread::spawn({
            let over = Arc::clone(&over);
            move || {
                // Dropped when nothing reads the terminal any more.
                let _tell = tell;
                while !over.load(Ordering::Relaxed) && is_there() {
                    let read = match event::poll(Duration::ZERO) {
                        Ok(true) => event::read(),
                        Ok(false) => continue,
                        Err(error) => Err(error),
                    };
                    let sent = read.map(|event| sender.blocking_send(event).is_ok());
                    if !matches!(sent, Ok(true)) {
                        break;
                    }
                }
            }
        });
        (Self { over, ended }, events)
    }

    /// Waits until nothing reads the terminal any more, as long as that can take where there is one.
    async fn end(self) {
        self.over.store(true, Ordering::Relaxed);
        // It tells nothing but that it ended.
        let _ = tokio::time::timeout(3 * KEYS, self.ended).await;
    }
}

/// Waits for keys for a while; says whether the terminal is still there. crossterm asks one that is not for ever, and a
/// terminal may go between this and that: nobody waits for the thread that reads keys without end.
fn is_there() -> bool {
    let stdin = rustix::stdio::stdin();
    let mut keys = [PollFd::new(&stdin, PollFlags::IN)];
    let timeout = Timespec::try_from(KEYS).ok();
    match poll(&mut keys, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => !keys[0]
            .revents()
            .intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL),
        Err(_) => false,
    }
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

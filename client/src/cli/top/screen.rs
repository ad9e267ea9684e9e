//! The terminal: its screen, its keys, and what there is to hear when it or its user goes.

use std::{
    io::{self, BufWriter, Stdout},
    mem::ManuallyDrop,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

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
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, oneshot},
    task::JoinHandle,
    time::{sleep, timeout},
};

use super::{super::exit::Exit, state::State, view};

/// How soon the thread that reads keys hears that it is over.
const KEYS: Duration = Duration::from_millis(100);
/// How long the screen has to be given back once a signal asks for the end.
const GIVEN_BACK: Duration = Duration::from_secs(1);

/// Bytes that are gathered before they go to the terminal: more than a frame of a large one has.
const GATHERED: usize = 1 << 16;

/// The terminal, which is as it was once this is dropped.
pub(super) struct Screen {
    /// Never dropped: it would say on stderr, which is closed as well then, that a closed terminal cannot show its cursor.
    terminal: ManuallyDrop<Terminal<CrosstermBackend<BufWriter<Stdout>>>>,
}

impl Screen {
    pub(super) fn take() -> io::Result<Self> {
        let out = BufWriter::with_capacity(GATHERED, io::stdout());
        let mut screen = Self {
            terminal: ManuallyDrop::new(Terminal::new(CrosstermBackend::new(out))?),
        };
        // From here on dropping it gives the terminal back.
        enable_raw_mode()?;
        execute!(
            screen.terminal.backend_mut(),
            EnterAlternateScreen,
            cursor::Hide
        )?;
        Ok(screen)
    }

    /// Draws what has changed since the frame before. A terminal that knows synchronized updates shows a frame once all of
    /// it is there; others do not listen to them.
    pub(super) fn draw(&mut self, state: &mut State) -> io::Result<()> {
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
pub(super) struct Keys {
    over: Arc<AtomicBool>,
    ended: oneshot::Receiver<()>,
}

impl Keys {
    pub(super) fn read() -> (Self, mpsc::Receiver<event::Event>) {
        let (sender, events) = mpsc::channel(64);
        let over = Arc::new(AtomicBool::new(false));
        let (tell, ended) = oneshot::channel::<()>();
        std::thread::spawn({
            let over = Arc::clone(&over);
            move || {
                // Dropped when nothing reads the terminal any more.
                let _tell = tell;
                while !over.load(Ordering::Relaxed) {
                    let read = match event::poll(KEYS) {
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

    /// Waits until nothing reads the terminal any more, for as long as that takes where there is one.
    pub(super) async fn end(self) {
        self.over.store(true, Ordering::Relaxed);
        // It tells nothing but that it ended.
        let _ = timeout(3 * KEYS, self.ended).await;
    }
}

/// Whether the terminal is closed. The thread that reads keys does not tell: crossterm asks one that is gone without end.
pub(super) fn is_gone() -> bool {
    let stdin = rustix::stdio::stdin();
    // No events that are waited for: these three are told in any case.
    let mut terminal = [PollFd::new(&stdin, PollFlags::empty())];
    let told = poll(&mut terminal, Some(&Timespec::default()));
    let gone = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
    told.is_ok() && terminal[0].revents().intersects(gone)
}

/// Signals that ask the process to end.
pub(super) struct Asked {
    told: oneshot::Receiver<()>,
    task: JoinHandle<()>,
}

impl Asked {
    /// From now on, until this is dropped. A terminal that takes no more bytes, as after Ctrl-S, holds who draws on it: then the
    /// process ends without having given back the screen.
    pub(super) fn listen() -> io::Result<Self> {
        let mut stops = signal(SignalKind::terminate())?;
        let mut hangs = signal(SignalKind::hangup())?;
        // Ctrl-C is a key here; this is another process's signal.
        let mut interrupts = signal(SignalKind::interrupt())?;
        let (tell, told) = oneshot::channel();
        let task = tokio::spawn(async move {
            tokio::select! {
                _ = stops.recv() => {}
                _ = hangs.recv() => {}
                _ = interrupts.recv() => {}
            }
            // Who is held hears it later, if at all.
            let _ = tell.send(());
            sleep(GIVEN_BACK).await;
            let _ = disable_raw_mode();
            std::process::exit(Exit::Interrupted.code().into());
        });
        Ok(Self { told, task })
    }

    /// Waits for the first one.
    pub(super) async fn end(&mut self) {
        // The task that tells does not panic.
        let _ = (&mut self.told).await;
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        self.task.abort();
    }
}

//! Ctrl-C: the first one asks the command to stop, a second one before it did ends the process.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use ratatui::crossterm::terminal::disable_raw_mode;
use tokio::sync::watch;

use super::exit::Exit;

/// Tells a command that the user pressed Ctrl-C.
#[derive(Clone, Debug)]
pub struct Interrupt {
    presses: watch::Receiver<u64>,
    pending: Arc<AtomicBool>,
}

/// Presses Ctrl-C in tests.
#[derive(Debug)]
pub struct Trigger {
    presses: watch::Sender<u64>,
    pending: Arc<AtomicBool>,
}

impl Trigger {
    /// Presses it. Returns whether the press before was not heard yet.
    pub fn press(&self) -> bool {
        self.presses.send_modify(|n| *n += 1);
        self.pending.swap(true, Ordering::SeqCst)
    }
}

impl Interrupt {
    /// One pressed by hand.
    pub fn manual() -> (Trigger, Self) {
        let (sender, presses) = watch::channel(0);
        let pending = Arc::new(AtomicBool::new(false));
        let trigger = Trigger {
            presses: sender,
            pending: Arc::clone(&pending),
        };
        (trigger, Self { presses, pending })
    }

    /// The process's own Ctrl-C, in the current tokio runtime.
    pub fn install() -> Self {
        let (trigger, interrupt) = Self::manual();
        tokio::spawn(async move {
            while tokio::signal::ctrl_c().await.is_ok() {
                if trigger.press() {
                    // A private scheduler dies with us; who draws on the whole terminal has changed its modes.
                    let _ = disable_raw_mode();
                    std::process::exit(Exit::Interrupted.code().into());
                }
            }
            // Without a handler Ctrl-C ends the process by itself; keep the sender for those who wait.
            std::future::pending::<()>().await;
        });
        interrupt
    }

    /// Waits for Ctrl-C.
    pub(crate) async fn pressed(&mut self) {
        if self.presses.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Says that the command has reacted: the next Ctrl-C is a first one again.
    pub(crate) fn heard(&mut self) {
        self.presses.mark_unchanged();
        self.pending.store(false, Ordering::SeqCst);
    }
}

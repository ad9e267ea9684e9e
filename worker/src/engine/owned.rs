//! What the engine owns, and who may use it: the engine's thread, and while that waits, one caller at a time.

use std::{
    sync::{Mutex, MutexGuard, PoisonError, TryLockError, mpsc},
    time::{Duration, Instant},
};

use hotcell_ipc::blackbox::Doing;

use super::{Command, Loop};
use crate::model::run::begin_anew;

/// The engine's state, or none before its device is open and after its end.
#[derive(Default)]
pub(super) struct Owned(Mutex<Together>);

#[derive(Default)]
struct Together(Option<Loop>);

// SAFETY: the state is one closed world: what is in it refers by `Rc` and `Cell` to its own parts only. They never
// leave it, because all that goes in and comes out of it from elsewhere (commands, answers, `Owned::with`) is `Send`.
// So whoever holds the lock has all of it. A device that must stay on the engine's thread is never lent
// (`Engine::start` keeps such an engine's state to itself), and the engine's thread drops the state.
unsafe impl Send for Together {}

impl std::fmt::Debug for Owned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Owned")
    }
}

/// What panics while it changes the state leaves it half changed: the process is better over.
struct AbortOnUnwind;

impl Drop for AbortOnUnwind {
    fn drop(&mut self) {
        std::process::abort();
    }
}

impl Owned {
    fn lock(&self) -> MutexGuard<'_, Together> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lends the state, if the engine's thread waits and nobody else has it.
    pub(super) fn with<T: Send>(&self, work: impl FnOnce(&mut Loop) -> T + Send) -> Option<T> {
        let mut held = match self.0.try_lock() {
            Ok(held) => held,
            Err(TryLockError::Poisoned(held)) => held.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let state = held.0.as_mut()?;
        let guard = AbortOnUnwind;
        let done = work(state);
        std::mem::forget(guard);
        Some(done)
    }

    /// The engine thread's life: it holds the state except while it waits for commands.
    pub(super) fn run(&self, state: Loop, queue: &mpsc::Receiver<Command>) {
        let mut held = self.lock();
        held.0 = Some(state);
        let mut more = false;
        while let Some(state) = &mut held.0 {
            // With work to do, take what is there; without, wait for a command or the next deadline.
            let command = if more {
                take(queue)
            } else {
                let deadline = state.next_deadline();
                state.blackbox.doing(Doing::Idle);
                drop(held);
                let command = wait(queue, deadline);
                begin_anew();
                held = self.lock();
                command
            };
            let (Some(state), Ok(command)) = (&mut held.0, command) else {
                break;
            };
            more = state.round(command, queue);
        }
        // Here, where the device was opened.
        held.0 = None;
    }
}

/// A command that is there. An error: nobody can send any more.
fn take(queue: &mpsc::Receiver<Command>) -> Result<Option<Command>, mpsc::RecvError> {
    match queue.try_recv() {
        Ok(command) => Ok(Some(command)),
        Err(mpsc::TryRecvError::Empty) => Ok(None),
        Err(mpsc::TryRecvError::Disconnected) => Err(mpsc::RecvError),
    }
}

/// The same, but waits for one until the deadline.
fn wait(
    queue: &mpsc::Receiver<Command>,
    deadline: Option<Instant>,
) -> Result<Option<Command>, mpsc::RecvError> {
    let Some(at) = deadline else {
        return queue.recv().map(Some);
    };
    // Not exactly at the deadline: a moment after it.
    let timeout = at.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
    match queue.recv_timeout(timeout) {
        Ok(command) => Ok(Some(command)),
        Err(mpsc::RecvTimeoutError::Timeout) => Ok(None),
        Err(mpsc::RecvTimeoutError::Disconnected) => Err(mpsc::RecvError),
    }
}

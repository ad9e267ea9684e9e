//! Work about tensors: queued for the engine's thread, done on the caller's where that waits, and done in slices between
//! the steps of models.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use hotcell_ipc::blackbox::Doing;
use hotcell_proto::error::Error;
use tokio::sync::oneshot;

use super::{Command, Engine, Loop};
use crate::session::plane::TensorPlane;

/// How long commands about tensors are performed before the models get their next step.
const SLICE: Duration = Duration::from_millis(1);

impl Engine {
    /// Does something with the tensors, on the engine's thread between two nodes of whatever it computes.
    ///
    /// # Errors
    /// What `work` says, and when the engine has ended or its queue is full. Work whose caller left before its turn
    /// is not done.
    pub async fn tensors<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut TensorPlane) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let permits = Arc::clone(&self.tensor_commands);
        let permit = permits.acquire_owned().await.map_err(Self::gone)?;
        let (reply, answer) = oneshot::channel();
        self.send(Command::Tensors(Box::new(move |plane| {
            drop(permit);
            // Nobody waits for it: its caller left while it was queued.
            if reply.is_closed() {
                return;
            }
            // A caller that left meanwhile misses the answer.
            let _ = reply.send(work(plane));
        })))?;
        answer.await.map_err(Self::gone)?
    }

    /// Does something short with the tensors now, on this thread, if the engine has nothing to do: two threads need not
    /// wake each other for it. `None`: it has, or its device is bound to its thread; `work` was not called then. What
    /// `work` leaves queued the engine takes up.
    ///
    /// `work` is also told whether somebody asks for the engine meanwhile.
    pub fn tensors_at_once<T: Send>(
        &self,
        work: impl FnOnce(&mut TensorPlane, &dyn Fn() -> bool) -> T + Send,
    ) -> Option<T> {
        let asked = || self.queued.load(Ordering::Acquire) > 0;
        // Commands that came before go first.
        let (done, is_idle) = self.owned.as_ref()?.with(|engine| {
            if asked() || !engine.is_idle() {
                return None;
            }
            engine.blackbox.doing(Doing::Tensors);
            let done = work(&mut engine.tensors, &asked);
            engine.blackbox.doing(Doing::Idle);
            Some((done, engine.is_idle() && engine.drain.is_empty()))
        })??;
        if !is_idle {
            self.wake();
        }
        Some(done)
    }
}

impl Loop {
    /// Does what is asked about tensors, one thing at least, until its slice is over: tokens wait no longer.
    pub(super) fn perform_tensor_work(&mut self) {
        let begun = Instant::now();
        while let Some(work) = self.tensor_work.pop_front() {
            self.queued.fetch_sub(1, Ordering::AcqRel);
            work(&mut self.tensors);
            if begun.elapsed() >= SLICE {
                return;
            }
        }
    }
}

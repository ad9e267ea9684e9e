//! Streams and events: order between calls.

use std::{
    cmp::Ordering,
    collections::BTreeSet,
    sync::{Arc, Mutex},
};

use hotcell_proto::{
    error::{Error, Reason},
    limits, v1,
};

use super::{array::Tensor, connection::Connection, recover::again, session::Session};

/// How a call is queued.
#[derive(Clone, Default)]
pub(super) struct Order {
    pub stream: u32,
    pub detached: bool,
    progress: Option<Arc<Mutex<Progress>>>,
}

struct Progress {
    /// The connection that the fence of the last call is of.
    generation: u64,
    /// Fence of the last call.
    last: u64,
    /// Events the next call waits for, and the connections they are of.
    wait: Vec<(u64, v1::Fence)>,
    /// The stream's id, and where it goes when the last clone of the stream is dropped. Its fences go on rising, so an
    /// event that outlives the stream has passed when its calls have.
    id: u32,
    idle: Arc<Mutex<BTreeSet<u32>>>,
}

impl Drop for Progress {
    fn drop(&mut self) {
        // Nothing panics while it is held.
        self.idle
            .lock()
            .unwrap_or_else(|e| e.into_inner())
            .insert(self.id);
    }
}

fn locked(progress: &Mutex<Progress>) -> std::sync::MutexGuard<'_, Progress> {
    // Nothing panics while it is held.
    progress.lock().unwrap_or_else(|e| e.into_inner())
}

impl Order {
    /// On the session's own stream, answered when queued.
    pub fn detached() -> Self {
        Self {
            detached: true,
            ..Self::default()
        }
    }

    /// The same, answered when it is done.
    pub fn waited(&self) -> Self {
        Self {
            detached: false,
            ..self.clone()
        }
    }

    /// Fences to wait for. They stay until a call was taken. Those of a lost connection have passed: what their calls made
    /// is made again when it is needed.
    pub fn wait(&self, at: &Connection) -> Vec<v1::Fence> {
        let Some(progress) = &self.progress else {
            return vec![];
        };
        let progress = locked(progress);
        let own = progress.wait.iter().filter(|(g, _)| *g == at.generation);
        own.map(|(_, fence)| *fence).collect()
    }

    /// A call was taken over this connection and has this fence.
    pub fn done(&self, at: &Connection, fence: Option<v1::Fence>) {
        if let (Some(progress), Some(fence)) = (&self.progress, fence) {
            let mut progress = locked(progress);
            progress.last = match at.generation.cmp(&progress.generation) {
                Ordering::Less => return,
                Ordering::Equal => progress.last.max(fence.value),
                Ordering::Greater => fence.value,
            };
            progress.generation = at.generation;
            progress.wait.clear();
        }
    }
}

/// An ordered queue of a session's calls. Calls of different streams may overtake each other; what one needs of another is
/// waited for. Without a stream, calls go through the session's own.
#[derive(Clone)]
pub struct Stream {
    session: Session,
    id: u32,
    progress: Arc<Mutex<Progress>>,
}

impl Session {
    /// A new stream. A session has [`limits::MAX_SESSION_STREAMS`] at a time, its own included; calls of further ones are
    /// refused with [`Reason::QuotaExceeded`].
    pub fn stream(&self) -> Stream {
        let (id, idle) = self.next_stream();
        let progress = Progress {
            generation: self.connection().generation,
            last: 0,
            wait: vec![],
            id,
            idle,
        };
        Stream {
            session: self.clone(),
            id,
            progress: Arc::new(Mutex::new(progress)),
        }
    }

    /// Waits until everything that is queued is done.
    ///
    /// # Errors
    /// When the session is gone. What went wrong in a call is told to who reads its results.
    pub async fn synchronize(&self) -> Result<(), Error> {
        again!(self, at => async {
            let request = at.request(v1::SynchronizeRequest { fence: None });
            at.answer(at.rpc().synchronize(request).await).map(|_| ())
        })
    }
}

impl Stream {
    fn order(&self, detached: bool) -> Order {
        Order {
            stream: self.id,
            detached,
            progress: Some(Arc::clone(&self.progress)),
        }
    }

    /// Computes tensors in this stream's order; see [`Session::eval`].
    ///
    /// # Errors
    /// As [`Session::eval`].
    pub async fn eval(&self, tensors: &[Tensor]) -> Result<(), Error> {
        self.session.compute(tensors, &self.order(false)).await
    }

    /// Queues the computation of tensors on this stream and returns.
    ///
    /// # Errors
    /// As [`Session::async_eval`].
    pub async fn async_eval(&self, tensors: &[Tensor]) -> Result<(), Error> {
        self.session.compute(tensors, &self.order(true)).await
    }

    /// An event that happens when all calls this stream has taken so far are done.
    pub fn record(&self) -> Event {
        let progress = locked(&self.progress);
        Event {
            session: self.session.clone(),
            generation: progress.generation,
            fence: v1::Fence {
                stream: self.id,
                value: progress.last,
            },
        }
    }

    /// The next call of this stream, hence all later ones, waits for the event.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] for an event of another session, [`Reason::LimitExceeded`] when too many are waited for.
    pub fn wait(&self, event: &Event) -> Result<(), Error> {
        if !event.session.is_same(&self.session) {
            return Err(super::array::invalid(
                "the event belongs to another session",
            ));
        }
        let mut progress = locked(&self.progress);
        if progress.wait.len() >= limits::MAX_CALL_FENCES {
            let what = format!("more than {} events for one call", limits::MAX_CALL_FENCES);
            return Err(Error::new(Reason::LimitExceeded, what));
        }
        progress.wait.push((event.generation, event.fence));
        Ok(())
    }

    /// Waits until all calls this stream has taken so far are done.
    ///
    /// # Errors
    /// When the session is gone.
    pub async fn synchronize(&self) -> Result<(), Error> {
        self.record().synchronize().await
    }

    /// Stops its queued and running calls; returns how many will not be done.
    ///
    /// # Errors
    /// When the session is gone.
    pub async fn cancel(&self) -> Result<u32, Error> {
        let request = v1::CancelRequest {
            stream: self.id,
            all: false,
        };
        let answer = again!(&self.session, at => async {
            at.answer(at.rpc().cancel(at.request(request)).await)
        });
        Ok(answer?.cancelled)
    }
}

/// A point in a stream's order.
#[derive(Clone)]
pub struct Event {
    session: Session,
    /// The connection that the fence is of.
    generation: u64,
    fence: v1::Fence,
}

impl Event {
    /// Waits until it has happened.
    ///
    /// # Errors
    /// When the session is gone.
    pub async fn synchronize(&self) -> Result<(), Error> {
        again!(&self.session, at => async {
            if self.generation != at.generation {
                return Ok(());
            }
            let request = at.request(v1::SynchronizeRequest {
                fence: Some(self.fence),
            });
            at.answer(at.rpc().synchronize(request).await).map(|_| ())
        })
    }
}

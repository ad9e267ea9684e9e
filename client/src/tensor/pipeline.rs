//! Calls that follow each other without waiting for answers.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
};

use hotcell_proto::{
    error::{Error, Reason},
    v1,
};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;

use super::{
    array::{State, Tensor},
    compile::Compiled,
    execute::Ready,
    session::{Remote, RemotePlan, Session},
    stream::Order,
};

/// Calls that are under way at most.
const DEPTH: usize = 64;

/// A call that has no answer yet.
struct Under {
    done: oneshot::Sender<Result<(), Error>>,
    /// What it names and makes, which must not be freed before it has come.
    _plan: Arc<RemotePlan>,
    _held: Vec<Arc<Remote>>,
}

type Waiting = HashMap<u64, Under>;

#[derive(Default)]
struct Shared {
    waiting: Waiting,
    /// Why no further answer will come.
    over: Option<Error>,
}

/// One stream of calls of compiled functions. Each is sent as soon as its arguments are named; a result may be the argument
/// of the next call before it is computed.
pub struct Pipeline {
    session: Session,
    calls: mpsc::Sender<v1::ExecuteRequest>,
    shared: Arc<Mutex<Shared>>,
    next: u64,
}

/// A call under way.
pub struct Pending {
    /// Its results. Other calls of the pipeline can use them at once; reading one waits for it.
    pub results: Vec<Tensor>,
    done: oneshot::Receiver<Result<(), Error>>,
}

impl Pending {
    /// Waits until it is computed.
    ///
    /// # Errors
    /// What went wrong in this call.
    pub async fn wait(self) -> Result<Vec<Tensor>, Error> {
        let gone = || {
            Error::new(
                Reason::Cancelled,
                "the pipeline ended before the call was done",
            )
        };
        self.done.await.map_err(|_| gone())??;
        Ok(self.results)
    }
}

fn locked(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    // Nothing panics while it is held.
    shared.lock().unwrap_or_else(|e| e.into_inner())
}

impl Session {
    /// Opens a pipeline.
    ///
    /// # Errors
    /// When the session is gone.
    pub async fn pipeline(&self) -> Result<Pipeline, Error> {
        let (calls, queue) = mpsc::channel(DEPTH);
        let shared: Arc<Mutex<Shared>> = Arc::default();
        let request = self.request(ReceiverStream::new(queue));
        let mut answers = self.answer(self.rpc().execute_many(request).await)?;
        let session = self.clone();
        let reader = Arc::clone(&shared);
        tokio::spawn(async move {
            let end = loop {
                match answers.message().await {
                    Ok(Some(answer)) => {
                        let waiting = locked(&reader).waiting.remove(&answer.tag);
                        if let Some(waiting) = waiting {
                            // Whoever dropped the call does not want its end.
                            let _ = waiting.done.send(read(answer.error));
                        }
                    }
                    Ok(None) => break Error::new(Reason::Cancelled, "the pipeline ended"),
                    Err(status) => break session.status(&status),
                }
            };
            let mut shared = locked(&reader);
            for (_, waiting) in shared.waiting.drain() {
                let _ = waiting.done.send(Err(end.clone()));
            }
            shared.over = Some(end);
        });
        Ok(Pipeline {
            session: self.clone(),
            calls,
            shared,
            next: 1,
        })
    }
}

fn read(error: Option<v1::CallError>) -> Result<(), Error> {
    let Some(error) = error else { return Ok(()) };
    let reason = Reason::from_name(&error.reason).unwrap_or(Reason::Internal);
    let typed = Error::new(reason, error.message);
    Err(error
        .metadata
        .into_iter()
        .fold(typed, |e, (key, value)| e.with(key, value)))
}

impl Pipeline {
    /// Sends a call; waits only while too many are under way.
    ///
    /// # Errors
    /// As [`Compiled::call`], or why the pipeline has ended.
    pub async fn call(
        &mut self,
        function: &Compiled,
        arguments: &[Tensor],
    ) -> Result<Pending, Error> {
        if !function.session().is_same(&self.session) {
            return Err(super::array::invalid(
                "the function belongs to another session",
            ));
        }
        let prepared = function.prepare(arguments).await?;
        let plan = prepared.plan.ok_or_else(|| {
            super::array::invalid("a dry-run session computes nothing; open another one")
        })?;
        let order = Order::default();
        let count = prepared.specs.len();
        let made = self
            .session
            .request_for(&plan, prepared.rows, &prepared.inputs, count, &order);
        let Ready {
            mut request,
            results: remotes,
            mut held,
        } = made.await?;
        held.extend(remotes.iter().cloned());
        let tag = self.next;
        self.next += 1;
        request.tag = tag;
        let (done, wait) = oneshot::channel();
        {
            let mut shared = locked(&self.shared);
            if let Some(over) = &shared.over {
                return Err(over.clone());
            }
            let under = Under {
                done,
                _plan: plan,
                _held: held,
            };
            shared.waiting.insert(tag, under);
        }
        if self.calls.send(request).await.is_err() {
            let over = locked(&self.shared).over.clone();
            let ended = || Error::new(Reason::Cancelled, "the pipeline ended");
            return Err(over.unwrap_or_else(ended));
        }
        let session = &self.session;
        let tensor =
            |(spec, remote)| Tensor::new(Some(session.clone()), Some(spec), State::Remote(remote));
        Ok(Pending {
            results: prepared
                .specs
                .into_iter()
                .zip(remotes)
                .map(tensor)
                .collect(),
            done: wait,
        })
    }
}

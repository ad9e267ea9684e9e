//! Calls that follow each other without waiting for answers.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use hotcell_proto::{
    error::{Error, Reason},
    v1,
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::timeout,
};
use tokio_stream::wrappers::ReceiverStream;

use super::{
    array::{State, Tensor, invalid},
    compile::{Compiled, Prepared},
    connection::{Connection, Remote, RemotePlan, locked},
    execute::Ready,
    recover::{Tries, again},
    session::Session,
    stream::Order,
};

/// Calls that are under way at most.
const DEPTH: usize = 64;
/// How long a stream that takes no more calls may take to say why.
const END: Duration = Duration::from_secs(5);

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
    line: Line,
    next: u64,
}

/// The stream over one connection.
struct Line {
    at: Arc<Connection>,
    calls: mpsc::Sender<v1::ExecuteRequest>,
    shared: Arc<Mutex<Shared>>,
    /// Closed once `over` is said.
    end: watch::Receiver<()>,
}

/// A call under way.
pub struct Pending {
    /// Its results. Other calls of the pipeline can use them at once; reading one waits for it.
    pub results: Vec<Tensor>,
    session: Session,
    at: Arc<Connection>,
    done: oneshot::Receiver<Result<(), Error>>,
}

impl Pending {
    /// Waits until it is computed. If its worker died and the session recovers, it is computed again, unless what it read
    /// cannot be made again.
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
        let Err(error) = self.done.await.map_err(|_| gone())? else {
            return Ok(self.results);
        };
        let mut tries = Tries::of(&self.session);
        tries.again(&self.at, error).await?;
        let remotes = self
            .results
            .iter()
            .filter_map(|result| match result.state() {
                State::Remote(remote) => Some(remote),
                _ => None,
            });
        let remotes: Vec<_> = remotes.collect();
        loop {
            let at = self.session.connection();
            match self.session.restore(&at, &remotes).await {
                Ok(()) => return Ok(self.results),
                Err(error) => tries.again(&at, error).await?,
            }
        }
    }
}

impl Session {
    /// Opens a pipeline.
    ///
    /// # Errors
    /// When the session is gone.
    pub async fn pipeline(&self) -> Result<Pipeline, Error> {
        Ok(Pipeline {
            session: self.clone(),
            line: again!(self, at => Line::open(at.clone()))?,
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

impl Line {
    async fn open(at: Arc<Connection>) -> Result<Self, Error> {
        let (calls, queue) = mpsc::channel(DEPTH);
        let shared: Arc<Mutex<Shared>> = Arc::default();
        let request = at.request(ReceiverStream::new(queue));
        let mut answers = at.answer(at.rpc().execute_many(request).await)?;
        let connection = Arc::clone(&at);
        let reader = Arc::clone(&shared);
        let (ended, end) = watch::channel(());
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
                    Err(status) => break connection.status(&status),
                }
            };
            let mut shared = locked(&reader);
            for (_, waiting) in shared.waiting.drain() {
                let _ = waiting.done.send(Err(end.clone()));
            }
            shared.over = Some(end);
            drop(ended);
        });
        Ok(Self {
            at,
            calls,
            shared,
            end,
        })
    }

    /// Why it ended, once it takes no further call.
    async fn why(&mut self) -> Error {
        // Nothing is ever sent: it ends when the sender is gone.
        let _ = timeout(END, self.end.changed()).await;
        let over = locked(&self.shared).over.clone();
        over.unwrap_or_else(|| Error::new(Reason::Cancelled, "the pipeline ended"))
    }
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
            return Err(invalid("the function belongs to another session"));
        }
        let prepared = function.prepare(arguments).await?;
        let session = self.session.clone();
        again!(&session, at => self.send(&at, &prepared))
    }

    async fn send(&mut self, at: &Arc<Connection>, prepared: &Prepared) -> Result<Pending, Error> {
        if self.line.at.generation != at.generation {
            self.line = Line::open(Arc::clone(at)).await?;
        }
        let session = &self.session;
        let plan = prepared.trace.plan(session, at).await?;
        let plan =
            plan.ok_or_else(|| invalid("a dry-run session computes nothing; open another one"))?;
        let order = Order::default();
        let count = prepared.specs.len();
        let made = session.request_for(at, &plan, prepared.rows, &prepared.inputs, count, &order);
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
            let mut shared = locked(&self.line.shared);
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
        if self.line.calls.send(request).await.is_err() {
            return Err(self.line.why().await);
        }
        Ok(Pending {
            results: prepared.results(session, remotes),
            session: session.clone(),
            at: Arc::clone(at),
            done: wait,
        })
    }
}

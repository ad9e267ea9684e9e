//! Sessions that go on after their worker died, if they were opened so: another session is opened in the place of the lost one,
//! and what a call needs there is made again from its recipe (`recipe.rs`) before the call is done again.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use hotcell_graph::{TensorSpec, wire};
use hotcell_proto::{
    error::{Error, Reason},
    limits,
    session::HandleId,
    v1,
};
use tokio::time::{Instant, sleep, timeout_at};

use super::{
    Tensor,
    array::State,
    connection::{Connection, Remote, Way, locked, moved},
    host::HostTensor,
    recipe::{Call, Kind, Ledger, Recipe, Source, Step, Steps, address},
    session::{Session, SessionOptions},
};
use crate::connect::is_unreachable;

/// How long to wait before the second try to open a session; twice as long before each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// The longest such wait.
const LAST_PAUSE: Duration = Duration::from_secs(1);
/// Dropped tensors that a restoration leaves unreported at most.
const UNREPORTED: usize = 16;

/// What a session does when its worker dies, or its connection breaks: it opens another one, on any worker of the same
/// numerics class, and does the calls again that this interrupted. A tensor is made again when it is next needed: from bytes
/// of this process (tensors of host data, files and keys, which stay in memory for that), as a weight of its model, or by doing
/// again the calls that made it.
///
/// What was overwritten in place ([`Tensor::write`]) or is shared memory cannot be made again; who needs it gets
/// [`Reason::TensorLost`], which names it. [`Tensor::checkpoint`] makes anything restorable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recovery {
    /// How often one call is done again. An expression too long for one graph is several calls.
    pub tries: u32,
    /// How long each time to wait for a worker.
    pub patience: Duration,
    /// Bytes that this process may hold so that tensors can be made again. A tensor beyond that cannot.
    pub max_bytes: usize,
    /// Go on in another numerics class too; what is made again may then differ from what it was.
    pub across: bool,
}

impl Default for Recovery {
    fn default() -> Self {
        Self {
            tries: limits::TENSOR_RECOVERIES,
            patience: Duration::from_secs(60),
            max_bytes: limits::RECIPE_BYTES,
            across: false,
        }
    }
}

/// What a session that recovers needs for it.
pub(super) struct Recovering {
    options: Recovery,
    way: Way,
    open: SessionOptions,
    /// Numerics class, and whether equal calls have equal results in it.
    numerics: String,
    pub reproducible: bool,
    device: String,
    /// Held while a session is opened in the place of the lost one.
    opening: tokio::sync::Mutex<()>,
    /// Held while tensors are made again.
    restoring: tokio::sync::Mutex<()>,
    count: AtomicU64,
    pub ledger: Arc<Ledger>,
    /// Limits that were set since the session was opened.
    limits: Mutex<v1::MemoryRequest>,
}

/// Whether an error says that what the session held is gone.
fn is_lost(error: &Error) -> bool {
    use Reason::{Draining, HandleStale, SessionNotFound, WorkerLost};
    let reasons = [WorkerLost, HandleStale, SessionNotFound, Draining];
    is_unreachable(error) || reasons.contains(&error.reason())
}

/// Whether a session may be had a little later.
fn is_passing(error: &Error) -> bool {
    is_lost(error) || [Reason::NoWorker, Reason::Overloaded].contains(&error.reason())
}

/// How often one call has been done.
pub(super) struct Tries<'a> {
    session: &'a Session,
    made: u32,
}

impl<'a> Tries<'a> {
    pub fn of(session: &'a Session) -> Self {
        Self { session, made: 0 }
    }

    /// Sees to it that a call that failed with `error` over `at` can be done again.
    ///
    /// # Errors
    /// `error`, if it is none that doing it again would mend, or it was done too often; why there is no other session.
    pub async fn again(&mut self, at: &Connection, error: Error) -> Result<(), Error> {
        let recovering = match self.session.recovering() {
            Some(recovering) if is_lost(&error) => recovering,
            _ => return Err(error),
        };
        if self.made >= recovering.options.tries {
            let what = format!(
                "{}; the call was done {} times, and each time its worker was lost",
                error.message(),
                self.made + 1
            );
            let error = error
                .metadata()
                .fold(Error::new(error.reason(), what), |e, (k, v)| e.with(k, v));
            return Err(error.with("recoveries", self.made));
        }
        self.made += 1;
        recovering.recover(self.session, at, error).await
    }
}

/// Does something over the session's connection, and again over the next one if that was lost and the session recovers.
macro_rules! again {
    ($session:expr, $at:ident => $work:expr) => {{
        let session: &$crate::tensor::Session = $session;
        let mut tries = $crate::tensor::recover::Tries::of(session);
        loop {
            let $at = session.connection();
            match $work.await {
                Err(error) => tries.again(&$at, error).await?,
                done => break done,
            }
        }
    }};
}
pub(super) use again;

impl Recovering {
    /// For a session that was just opened.
    ///
    /// # Errors
    /// When the worker does not say what it is.
    pub async fn begin(
        options: Recovery,
        way: Way,
        open: SessionOptions,
        at: &Connection,
    ) -> Result<Self, Error> {
        let about = describe(at).await?;
        Ok(Self {
            ledger: Ledger::new(options.max_bytes),
            options,
            way,
            open,
            numerics: about.numerics,
            reproducible: about.reproducible,
            device: about.device,
            opening: tokio::sync::Mutex::default(),
            restoring: tokio::sync::Mutex::default(),
            count: AtomicU64::new(0),
            limits: Mutex::default(),
        })
    }

    /// Notes limits that the session was given.
    pub fn limited(&self, request: &v1::MemoryRequest) {
        let mut limits = locked(&self.limits);
        limits.memory_limit = request.memory_limit.or(limits.memory_limit);
        limits.cache_limit = request.cache_limit.or(limits.cache_limit);
    }

    /// Opens another session in the place of the one lost, unless somebody else did.
    async fn recover(&self, session: &Session, lost: &Connection, why: Error) -> Result<(), Error> {
        let _one = self.opening.lock().await;
        let generation = session.connection().generation;
        if generation != lost.generation {
            return Ok(());
        }
        let deadline = Instant::now() + self.options.patience;
        let mut pause = FIRST_PAUSE;
        let mut last = why;
        loop {
            match timeout_at(deadline, self.open(generation + 1)).await {
                Ok(Ok(connection)) => {
                    session.go_on(connection);
                    self.count.fetch_add(1, Ordering::Relaxed);
                    return Ok(());
                }
                Ok(Err(error)) if is_passing(&error) => last = error,
                Ok(Err(error)) => return Err(error),
                Err(_) => {}
            }
            if Instant::now() + pause >= deadline {
                let what = format!(
                    "{}; no other session could be opened within {:?}",
                    last.message(),
                    self.options.patience
                );
                return Err(Error::new(last.reason(), what));
            }
            sleep(pause).await;
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }

    /// Opens a session where the first one was, or elsewhere if its caller did not say where.
    async fn open(&self, generation: u64) -> Result<Arc<Connection>, Error> {
        let anywhere = self.open.worker.is_none() && self.open.device.is_none();
        let here = SessionOptions {
            device: anywhere.then(|| self.device.clone()),
            ..self.open.clone()
        };
        let opening = match self
            .way
            .open(if anywhere { &here } else { &self.open })
            .await
        {
            Err(error)
                if anywhere && error.reason() == Reason::NoWorker && !is_unreachable(&error) =>
            {
                self.way.open(&self.open).await?
            }
            opened => opened?,
        };
        let connection = opening.finish(generation);
        let about = describe(&connection).await?;
        if about.numerics != self.numerics && !self.options.across {
            let what = format!(
                "worker {} computes in numerics class {}, the session's tensors are of {}",
                about.worker, about.numerics, self.numerics
            );
            return Err(Error::new(Reason::NoWorker, what));
        }
        let limits = *locked(&self.limits);
        if limits != v1::MemoryRequest::default() {
            let request = connection.request(limits);
            connection.answer(connection.rpc().memory(request).await)?;
        }
        Ok(connection)
    }
}

async fn describe(at: &Connection) -> Result<v1::DescribeResponse, Error> {
    let request = at.request(v1::DescribeRequest {});
    at.answer(at.rpc().describe(request).await)
}

impl Session {
    /// How often another session was opened in the place of a lost one; see [`Recovery`].
    pub fn recoveries(&self) -> u64 {
        let count = |r: &Recovering| r.count.load(Ordering::Relaxed);
        self.recovering().map_or(0, count)
    }

    /// Sees to it that tensors are there for calls over this connection.
    ///
    /// # Errors
    /// [`Reason::TensorLost`] for one that cannot be made again, what making it says, or the connection is lost, too.
    pub(super) async fn restore(
        &self,
        at: &Connection,
        wanted: &[Arc<Remote>],
    ) -> Result<(), Error> {
        if wanted.iter().all(|remote| remote.handle(at).is_some()) {
            return Ok(());
        }
        let recovering = self.recovering().ok_or_else(moved)?;
        let _one = recovering.restoring.lock().await;
        if self.connection().generation != at.generation {
            return Err(moved());
        }
        let Steps {
            steps,
            mut there,
            mut uses,
        } = Steps::plan(at, wanted)?;
        for (i, step) in steps.iter().enumerate() {
            match step {
                Step::Make(recipe) => {
                    let remote = self.make(at, recipe).await?;
                    settle(&mut there, recipe, remote);
                }
                Step::Execute(call, outputs) => {
                    let results = self.execute_again(at, call, outputs, &there).await?;
                    for ((_, recipe), remote) in outputs.iter().zip(results) {
                        settle(&mut there, recipe, remote);
                    }
                    // What nobody needs any more is freed at once.
                    for input in call.tensors().map(address) {
                        let left = uses.entry(input).or_default();
                        *left = left.saturating_sub(1);
                        if *left == 0 {
                            there.remove(&input);
                        }
                    }
                }
            }
            if i % UNREPORTED == UNREPORTED - 1 {
                at.flush().await?;
            }
        }
        drop(there);
        at.flush().await
    }

    /// Makes a tensor out of what this process or the host holds.
    async fn make(&self, at: &Connection, recipe: &Recipe) -> Result<Arc<Remote>, Error> {
        match &recipe.kind {
            Kind::Host(spec, held) => {
                let data = HostTensor::new(spec.clone(), held.bytes().clone())?;
                self.upload_at(at, &data).await
            }
            Kind::Weight { model, name } => Ok(self.weight_at(at, model, name).await?.0),
            Kind::Zeros(spec) => Ok(self.zeros_at(at, spec).await?.0),
            Kind::Result { .. } | Kind::Gone(_) => {
                let what = "a tensor is made by a call, or not at all";
                Err(Error::new(Reason::Internal, what))
            }
        }
    }

    async fn execute_again(
        &self,
        at: &Connection,
        call: &Call,
        outputs: &[(usize, Arc<Recipe>)],
        there: &HashMap<usize, Arc<Remote>>,
    ) -> Result<Vec<Arc<Remote>>, Error> {
        let plan = match at.kept_plan(&call.graph) {
            Some(plan) => plan,
            None => {
                let graph = call.graph.decode()?;
                let (plan, _) = at.compile(graph, call.graph.clone(), false).await?;
                let none = || Error::new(Reason::ProtocolViolation, "the worker made no plan");
                let plan = plan.ok_or_else(none)?;
                at.keep_plan(&plan);
                plan
            }
        };
        let operand = |source: &Source| {
            let kind = match source {
                Source::Data(held) => v1::operand::Kind::Data(held.bytes().clone()),
                Source::Tensor(recipe) => {
                    let remote = there.get(&address(recipe)).ok_or_else(moved)?;
                    v1::operand::Kind::Tensor(remote.handle_for(at)?)
                }
            };
            Ok(v1::Operand { kind: Some(kind) })
        };
        let mut wishes = vec![None; call.outputs];
        let mut results = Vec::with_capacity(outputs.len());
        for (output, _) in outputs {
            let id = HandleId::random()?;
            if let Some(wish) = wishes.get_mut(*output) {
                *wish = Some(id);
            }
            results.push(at.named(id));
        }
        let wish = |id: Option<HandleId>| v1::OutputWish {
            kind: Some(match id {
                Some(id) => v1::output_wish::Kind::Id(id.to_wire()),
                None => v1::output_wish::Kind::Drop(true),
            }),
        };
        let request = v1::ExecuteRequest {
            plan: Some(plan.handle.clone()),
            rows: call.rows as u64,
            inputs: call
                .inputs
                .iter()
                .map(operand)
                .collect::<Result<_, Error>>()?,
            outputs: wishes.into_iter().map(wish).collect(),
            ..v1::ExecuteRequest::default()
        };
        at.answer(at.rpc().execute(at.request(request)).await)?;
        Ok(results)
    }

    /// A weight over this connection. A worker that has only just started may not have its models yet.
    pub(super) async fn weight_at(
        &self,
        at: &Connection,
        model: &str,
        name: &str,
    ) -> Result<(Arc<Remote>, TensorSpec), Error> {
        let patience = self.recovering().map(|r| r.options.patience);
        let deadline = Instant::now() + patience.unwrap_or_default();
        let mut pause = FIRST_PAUSE;
        loop {
            let request = at.request(v1::GetWeightRequest {
                model: model.to_owned(),
                name: name.to_owned(),
            });
            let answer = at.answer(at.rpc().get_weight(request).await);
            match answer {
                Err(error)
                    if error.reason() == Reason::ModelNotFound
                        && at.generation > 0
                        && Instant::now() + pause < deadline =>
                {
                    sleep(pause).await;
                    pause = (pause * 2).min(LAST_PAUSE);
                }
                answer => return at.adopt(answer?),
            }
        }
    }

    /// Zeros that have their memory at once.
    pub(super) async fn zeros_at(
        &self,
        at: &Connection,
        spec: &TensorSpec,
    ) -> Result<(Arc<Remote>, TensorSpec), Error> {
        let spec = wire::encode_tensor_spec(spec);
        let request = at.request(v1::CreateRequest {
            spec: Some(v1::create_request::Spec::Tensor(spec)),
            id: vec![],
        });
        at.adopt(at.answer(at.rpc().create(request).await)?)
    }

    /// Notes how a tensor can be made again, if the session recovers.
    pub(super) fn note(&self, remote: &Arc<Remote>, recipe: impl FnOnce(&Arc<Ledger>) -> Recipe) {
        if let Some(recovering) = self.recovering() {
            recipe(&recovering.ledger).bind(remote);
        }
    }
}

/// A value is there again: its tensor's, or, if nobody has that any more, one for the calls that read it.
fn settle(there: &mut HashMap<usize, Arc<Remote>>, recipe: &Arc<Recipe>, remote: Arc<Remote>) {
    let remote = match recipe.made() {
        Some(owner) => {
            owner.trade(&remote);
            owner
        }
        None => remote,
    };
    there.insert(address(recipe), remote);
}

impl Tensor {
    /// Computes it if need be, and fetches its value into this process, from which it can be made again when its worker dies,
    /// whatever it was made of. Without [`Recovery`] this does nothing.
    ///
    /// # Errors
    /// As [`Session::eval`], and [`Reason::LimitExceeded`] when the session holds too much already.
    pub async fn checkpoint(&self) -> Result<(), Error> {
        let session = self.session()?;
        let Some(recovering) = session.recovering() else {
            return Ok(());
        };
        let data = self.fetch().await?;
        let State::Remote(remote) = self.state() else {
            return Ok(()); // it still is in this process
        };
        let recipe = Recipe::host(&recovering.ledger, &data);
        if let Kind::Gone(why) = &recipe.kind {
            let what = format!("the tensor cannot be kept: {why}");
            return Err(Error::new(Reason::LimitExceeded, what));
        }
        let before = remote.recipe();
        if let Some(before) = &before {
            recipe.describe_as(before);
        }
        recipe.bind(&remote);
        Ok(())
    }
}

//! A session's queued work: ordered streams of calls, and how a call runs.
//!
//! A call waits only for what was queued before it (values, fences, a plan or cache in use), so none waits for ever.

use std::{
    cell::Cell,
    collections::{BTreeMap, VecDeque},
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use hotcell_kernels::{backend::DeviceError, plan::Slot};
use hotcell_proto::{
    error::{Error, Reason},
    limits,
    session::HandleId,
    v1,
};
use tokio::sync::oneshot;

use super::{
    account::Charge,
    call::{Answer, Reply},
    invalid,
    memory::{Home, Storage},
    plan::PlanEntry,
    quota,
    shared::{Region, SharedPlace, lost},
    state::Session,
    tensor::{Tensor, may_hold_indices},
    value::{State, Value},
};
use crate::{debug::observer::CallNote, error::of_plan};

/// Calls of a plan that took less may run on the thread that they came to, which then does nothing else: about what it
/// takes to wake another.
const QUICK: Duration = Duration::from_micros(100);

/// Where a result goes.
pub(super) enum Goal {
    /// To a value under this id.
    Keep(HandleId, Tensor),
    /// Over the value that its tensor had before, as its new one.
    Into(HandleId, Tensor, Rc<Value>),
    /// Into the answer.
    Inline,
    /// Nowhere.
    Drop,
}

/// A result of a call.
pub(super) struct Output {
    pub(super) bytes: usize,
    pub(super) goal: Goal,
    /// `None` until the call starts, where it overwrites something.
    pub(super) storage: Option<Storage>,
}

/// A queued call.
pub(super) struct Job {
    pub(super) fence: u64,
    pub(super) plan: Rc<PlanEntry>,
    pub(super) rows: usize,
    pub(super) inputs: Vec<Rc<Value>>,
    pub(super) outputs: Vec<Output>,
    pub(super) wait: Vec<(u32, u64)>,
    /// Set when its caller left.
    pub(super) cancelled: Arc<AtomicBool>,
    /// Its stream was cancelled.
    pub(super) stopped: bool,
    pub(super) reply: Option<Reply>,
    /// How many values, first of those it reads and then of those in whose place it writes, are known to be settled: they stay so.
    pub(super) settled: Cell<usize>,
    /// The node it has come to, once it started.
    pub(super) at: Option<usize>,
    pub(super) compute: Duration,
    /// Copies of inputs that others could change.
    pub(super) copies: Vec<Storage>,
    /// For what the call itself takes.
    pub(super) _charge: Charge,
}

impl Job {
    /// The caches among what it reads.
    fn caches(&self) -> impl Iterator<Item = &Rc<Value>> {
        let places = self.plan.caches.iter();
        places.filter_map(|&place| self.inputs.get(place))
    }

    /// Whether nothing queued changes what it reads or replaces any more. Asked again and again, it looks at each value once.
    fn is_settled(&self) -> bool {
        let replaced = |o: &Output| match &o.goal {
            Goal::Into(_, _, before) => before.is_settled(),
            _ => true,
        };
        let known = self.settled.get();
        let reads = self.inputs.iter().skip(known);
        let mut now = known + reads.take_while(|value| value.is_settled()).count();
        if now >= self.inputs.len() {
            let writes = self.outputs.iter().skip(now - self.inputs.len());
            now += writes.take_while(|output| replaced(output)).count();
        }
        self.settled.set(now);
        now == self.inputs.len() + self.outputs.len()
    }

    fn is_cancelled(&self) -> bool {
        self.stopped || self.cancelled.load(Ordering::Acquire)
    }
}

/// An ordered queue.
#[derive(Default)]
pub(super) struct Stream {
    pub(super) queue: VecDeque<Job>,
    pub(super) issued: u64,
    pub(super) passed: u64,
}

/// A session's queues.
#[derive(Default)]
pub struct Streams {
    pub(super) streams: BTreeMap<u32, Stream>,
    /// Calls in all of them.
    pub(super) calls: usize,
}

impl Streams {
    fn has_passed(&self, (stream, value): (u32, u64)) -> bool {
        self.streams.get(&stream).map_or(0, |s| s.passed) >= value
    }

    pub(super) fn was_issued(&self, (stream, value): (u32, u64)) -> bool {
        self.streams.get(&stream).map_or(0, |s| s.issued) >= value
    }

    /// Whether nothing is queued.
    pub fn is_empty(&self) -> bool {
        self.calls == 0
    }
}

/// Somebody who waits for fences.
pub struct Waiting {
    fences: Vec<(u32, u64)>,
    reply: oneshot::Sender<()>,
}

/// Of each output of a call: the memory of another process that it may be computed in, which costs no copy.
///
/// Nodes may read what a node before them has written, and whoever shares the memory can change it in between. So that is
/// for results that the plan only writes, and that nothing else of the call lies in, through whichever mapping.
fn shared_places(job: &Job) -> Vec<Option<Rc<SharedPlace>>> {
    let place = |output: &Output| match &output.goal {
        Goal::Into(_, tensor, _) => tensor.shared.clone(),
        _ => None,
    };
    let places: Vec<_> = job.outputs.iter().map(place).collect();
    let read = |place: &SharedPlace| {
        let shares = |storage: &Storage| match storage.home() {
            // A place that cannot be told is taken for one that overlaps.
            Home::Shared(region) => storage.place().map_or(true, |(_, offset)| {
                place.overlaps_part(region, offset, storage.bytes())
            }),
            _ => false,
        };
        job.inputs.iter().any(|value| match &*value.state() {
            State::Ready(storage) => shares(storage),
            _ => true,
        })
    };
    let plan = job.plan.plan.borrow();
    let alone = |i: usize, place: &Rc<SharedPlace>| {
        let mut others = places.iter().enumerate().filter(|(o, _)| *o != i);
        let overlaps = |(_, other): (usize, &Option<Rc<SharedPlace>>)| {
            other.as_ref().is_some_and(|other| place.overlaps(other))
        };
        plan.only_writes(i) && !read(place) && !others.any(overlaps)
    };
    let in_place = |(i, place): (usize, &Option<Rc<SharedPlace>>)| {
        place.clone().filter(|place| alone(i, place))
    };
    places.iter().enumerate().map(in_place).collect()
}

/// The memory of other processes that a call reads or writes.
fn shared_memory(job: &Job) -> Vec<Rc<Region>> {
    let read = job.inputs.iter().filter_map(|value| match &*value.state() {
        State::Ready(storage) => match storage.home() {
            Home::Shared(region) => Some(Rc::clone(region)),
            _ => None,
        },
        _ => None,
    });
    let written = job.outputs.iter().filter_map(|output| match &output.goal {
        Goal::Into(_, tensor, _) => tensor
            .shared
            .as_ref()
            .map(|place| Rc::clone(place.region())),
        _ => None,
    });
    read.chain(written).collect()
}

fn cancelled() -> Error {
    Error::new(Reason::Cancelled, "the call was cancelled")
}

impl Session {
    /// An output as the answer has it; `inline` are its bytes.
    pub(super) fn answer(&self, output: &Output, inline: Option<bytes::Bytes>) -> v1::Output {
        let kind = match &output.goal {
            Goal::Keep(id, tensor) | Goal::Into(id, tensor, _) => {
                Some(v1::output::Kind::Tensor(tensor.info(*id, self.epoch)))
            }
            Goal::Inline | Goal::Drop => inline.map(v1::output::Kind::Data),
        };
        v1::Output { kind }
    }

    /// Whether the stream has work.
    pub fn has_work(&self, stream: u32) -> bool {
        let stream = self.streams.streams.get(&stream);
        stream.is_some_and(|s| !s.queue.is_empty())
    }

    /// Whether the stream has work that can go on now.
    pub fn is_runnable(&self, stream: u32) -> bool {
        let front = self
            .streams
            .streams
            .get(&stream)
            .and_then(|s| s.queue.front());
        let Some(job) = front else { return false };
        if job.is_cancelled() || job.at.is_some() {
            return true;
        }
        !job.plan.busy.get()
            && job.wait.iter().all(|f| self.streams.has_passed(*f))
            && job.is_settled()
            && !job.caches().any(|cache| cache.busy.get())
    }

    /// Runs the stream's first call until it ends or `pause` says so between two nodes. Returns whether it ended.
    pub fn advance(&mut self, stream: u32, pause: &dyn Fn() -> bool) -> bool {
        let Some(mut job) = self
            .streams
            .streams
            .get_mut(&stream)
            .and_then(|s| s.queue.pop_front())
        else {
            return true;
        };
        let begun = Instant::now();
        let result = self.run(&mut job, pause);
        let took = begun.elapsed();
        job.compute += took;
        let observer = self.pool.observer();
        if observer.is_watched() {
            observer.note_call(CallNote {
                begun,
                took,
                rows: job.rows,
                steps: job.plan.memory.steps,
            });
        }
        match result {
            Ok(false) => {
                if let Some(s) = self.streams.streams.get_mut(&stream) {
                    s.queue.push_front(job);
                }
                false
            }
            Ok(true) => {
                self.finish(stream, job, None);
                true
            }
            Err(error) => {
                self.finish(stream, job, Some(error));
                true
            }
        }
    }

    /// `Ok(true)`: it is done.
    fn run(&self, job: &mut Job, pause: &dyn Fn() -> bool) -> Result<bool, Error> {
        if job.is_cancelled() {
            return Err(cancelled());
        }
        let from = match job.at {
            Some(at) => at,
            None => {
                self.start(job)?;
                0
            }
        };
        if self.pool.dry_run() {
            return Ok(true);
        }
        let stop = Arc::clone(&job.cancelled);
        let pause = move || stop.load(Ordering::Acquire) || pause();
        let mut plan = job.plan.plan.borrow_mut();
        let next = plan
            .execute_from(job.rows, from, &pause)
            .map_err(|e| match e {
                DeviceError::Stopped => cancelled(),
                e => of_plan(&e),
            })?;
        drop(plan);
        job.at = next;
        Ok(next.is_none())
    }

    fn start(&self, job: &mut Job) -> Result<(), Error> {
        for value in &job.inputs {
            if let State::Failed(error) = &*value.state() {
                return Err(error.clone());
            }
        }
        let in_place = shared_places(job);
        for (output, in_place) in job.outputs.iter_mut().zip(in_place) {
            if output.storage.is_none()
                && let Goal::Into(_, tensor, before) = &mut output.goal
            {
                output.storage = Some(match (in_place, &tensor.shared) {
                    (Some(place), _) => place.storage(),
                    (None, Some(_)) => self.pool.allocate("a result", output.bytes)?,
                    (None, None) => self.target(before, output.bytes)?,
                });
            }
        }
        job.at = Some(0);
        job.plan.busy.set(true);
        job.caches().for_each(|cache| cache.busy.set(true));
        if self.pool.dry_run() {
            return Ok(());
        }
        let mut plan = job.plan.plan.borrow_mut();
        // Long steps end with their caller; those whose caller does not wait, with the session.
        plan.stop_when(match job.reply {
            Some(_) => Arc::clone(&job.cancelled),
            None => Arc::clone(&self.over),
        });
        for (i, (spec, value)) in job.plan.inputs.iter().zip(&job.inputs).enumerate() {
            let indices = plan.reads_as_index(i);
            let indices = indices.unwrap_or_else(|| may_hold_indices(spec));
            value.with(|storage| {
                let mut bind = |storage: &Storage| {
                    let (buffer, offset) = storage.place()?;
                    plan.bind_for(job.rows, Slot::Input(i), buffer, offset)
                        .map_err(|e| of_plan(&e))
                };
                // An index is checked and then used: nobody may change it in between. What else is read may change under
                // the plan, which promises to stay in bounds then; see its `reads_as_index`.
                if matches!(storage.home(), Home::Shared(_)) && indices {
                    let copy = storage.copy(&self.pool)?;
                    bind(&copy)?;
                    job.copies.push(copy);
                    return Ok(());
                }
                bind(storage)
            })?;
        }
        for (i, output) in job.outputs.iter().enumerate() {
            if let Some(storage) = &output.storage {
                let (buffer, offset) = storage.place()?;
                plan.bind_for(job.rows, Slot::Output(i), buffer, offset)
                    .map_err(|e| of_plan(&e))?;
            }
        }
        Ok(())
    }

    /// Memory for a result that overwrites a value: the value's own if nobody else sees it.
    fn target(&self, before: &mut Rc<Value>, bytes: usize) -> Result<Storage, Error> {
        match before.steal() {
            Some(storage) => Ok(storage),
            None => self.pool.allocate("a result", bytes),
        }
    }

    /// Copies a result into the memory that another process sees, unless it [is there](shared_places).
    fn publish(&self, place: &SharedPlace, result: Storage) -> Result<Storage, Error> {
        if matches!(result.home(), Home::Shared(_)) {
            return Ok(result);
        }
        let shared = place.storage();
        if !self.pool.dry_run() {
            shared.write(0, &result.read(&self.pool, 0..result.bytes())?)?;
        }
        Ok(shared)
    }

    fn finish(&mut self, stream: u32, mut job: Job, error: Option<Error>) {
        if job.at.is_some() || error.is_none() {
            job.plan.plan.borrow_mut().release();
            job.plan.busy.set(false);
            job.caches().for_each(|cache| cache.busy.set(false));
        }
        let shared = shared_memory(&job);
        job.copies.clear();
        job.inputs.clear();
        let mut outputs = Vec::with_capacity(job.outputs.len());
        let mut kept = Vec::new();
        let mut failed = error;
        for mut output in job.outputs {
            let storage = output.storage.take();
            let mut inline = None;
            if let Goal::Keep(_, tensor) | Goal::Into(_, tensor, _) = &output.goal {
                let storage = match (&tensor.shared, storage, &failed) {
                    (Some(place), Some(result), None) => match self.publish(place, result) {
                        Ok(storage) => Some(storage),
                        Err(error) => {
                            failed = Some(error);
                            None
                        }
                    },
                    (_, storage, _) => storage,
                };
                tensor.value.settle(match (&failed, storage) {
                    (None, Some(storage)) => State::Ready(storage),
                    (Some(error), _) => State::Failed(error.clone()),
                    (None, None) => State::Failed(cancelled()),
                });
            } else if let (Goal::Inline, Some(storage), None) = (&output.goal, storage, &failed) {
                match storage.read(&self.pool, 0..output.bytes) {
                    Ok(bytes) => inline = Some(bytes),
                    Err(error) => failed = Some(error),
                }
            }
            outputs.push(self.answer(&output, inline));
            if let Goal::Keep(id, tensor) = output.goal {
                kept.push((id, tensor.value));
            }
        }
        // After the last touch. Whatever else went wrong may have come of what was not there.
        if shared.iter().any(|region| region.is_lost()) {
            failed = Some(lost());
        }
        if failed.is_none() {
            let done = &job.plan.executions;
            done.set(done.get() + 1);
            self.pool.executed();
        }
        // One that did not come to its end says nothing of those that do, unless it took long.
        let is_quick = job.compute < QUICK;
        job.plan
            .is_quick
            .set(is_quick && (failed.is_none() || job.plan.is_quick.get()));
        if let Some(s) = self.streams.streams.get_mut(&stream) {
            s.passed = job.fence;
        }
        self.streams.calls = self.streams.calls.saturating_sub(1);
        let mut left = job.cancelled.load(Ordering::Acquire);
        if let Some(reply) = job.reply {
            left |= !reply(match failed {
                Some(error) => Err(error),
                None => Ok(Answer {
                    outputs,
                    fence: v1::Fence {
                        stream,
                        value: job.fence,
                    },
                    compute_ns: u64::try_from(job.compute.as_nanos()).unwrap_or(u64::MAX),
                }),
            });
        }
        if left {
            // Nobody learned of them, so nobody would free them.
            for (id, value) in kept {
                let same = self.tensors.get(&id);
                if same.is_some_and(|t| Rc::ptr_eq(&t.value, &value)) {
                    self.tensors.remove(&id);
                }
            }
        }
        self.tell();
    }

    /// Tells those whose fences have all passed.
    fn tell(&mut self) {
        let streams = &self.streams;
        let passed = |w: &mut Waiting| w.fences.iter().all(|f| streams.has_passed(*f));
        for waiting in self.waiting.extract_if(.., passed) {
            let _ = waiting.reply.send(());
        }
    }

    /// Lets `reply` know when a fence has passed; without one, all that is queued now.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] for a fence that no call has, [`Reason::QuotaExceeded`] when too many wait.
    pub fn synchronize(
        &mut self,
        fence: Option<(u32, u64)>,
        reply: oneshot::Sender<()>,
    ) -> Result<(), Error> {
        if let Some((stream, value)) = fence.filter(|f| !self.streams.was_issued(*f)) {
            let what = format!("stream {stream} has no fence {value} yet; queue its work first");
            return Err(invalid(what));
        }
        self.waiting.retain(|w| !w.reply.is_closed());
        if self.waiting.len() >= limits::MAX_SESSION_CALLS {
            return Err(quota("synchronizing calls", limits::MAX_SESSION_CALLS));
        }
        let all = || {
            let streams = self.streams.streams.iter();
            streams.map(|(id, s)| (*id, s.issued)).collect()
        };
        let fences = fence.map_or_else(all, |f| vec![f]);
        self.waiting.push(Waiting { fences, reply });
        self.tell();
        Ok(())
    }

    /// Marks the calls of a stream, or of all, so that they end without being done. Returns how many.
    pub fn cancel(&mut self, stream: Option<u32>) -> usize {
        let streams = self.streams.streams.iter_mut();
        let chosen = streams.filter(|(id, _)| stream.is_none_or(|s| s == **id));
        let mut count = 0;
        for job in chosen.flat_map(|(_, s)| &mut s.queue) {
            count += usize::from(!job.is_cancelled());
            job.stopped = true;
        }
        count
    }

    /// Ends all work with an error.
    pub fn fail_all(&mut self, error: &Error) {
        let ids: Vec<u32> = self.streams.streams.keys().copied().collect();
        for id in ids {
            while let Some(job) = self
                .streams
                .streams
                .get_mut(&id)
                .and_then(|s| s.queue.pop_front())
            {
                self.finish(id, job, Some(error.clone()));
            }
        }
    }
}

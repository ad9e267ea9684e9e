//! All sessions of the worker, and whose turn it is.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    rc::Rc,
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant},
};

use hotcell_kernels::backend::Device;
use hotcell_proto::{
    error::{Error, Reason},
    limits,
    session::SessionId,
    v1,
};

use super::{
    compile,
    memory::Hub,
    state::{Quotas, Session},
};
use crate::debug::observer::Observer;

/// How long one stream runs while others wait.
const SLICE: Duration = Duration::from_millis(1);
/// After a session that held so many bytes at some time, libraries are asked to give back what they keep.
const MUCH: u64 = 32 << 20;
/// What tensors may take where the device does not say how much memory it has, bytes.
const UNKNOWN_MEMORY: u64 = 4 << 30;

/// The engine's tensor side.
pub struct TensorPlane {
    hub: Rc<Hub>,
    sessions: BTreeMap<u64, Session>,
    names: HashMap<SessionId, u64>,
    next: u64,
    /// Streams that may have work, the next one first.
    turns: VecDeque<(u64, u32)>,
}

/// Where a call's session went.
pub fn session_gone() -> Error {
    let what = "no session of this name: it ended or was never opened; open a new one";
    Error::new(Reason::SessionNotFound, what)
}

impl TensorPlane {
    /// Without sessions. Tensors take `limit` bytes at most; by default half of the device's memory. Calls are noted at `observer`.
    pub fn new(device: Rc<dyn Device>, limit: Option<u64>, observer: Arc<Observer>) -> Self {
        let half = match device.info().memory_bytes {
            0 => UNKNOWN_MEMORY,
            bytes => bytes / 2,
        };
        Self {
            hub: Hub::new(device, limit.unwrap_or(half), observer),
            sessions: BTreeMap::new(),
            names: HashMap::new(),
            next: 0,
            turns: VecDeque::new(),
        }
    }

    /// Opens a session, until `over` is set.
    ///
    /// # Errors
    /// [`Reason::InvalidArgument`] when there is one of this name, [`Reason::Overloaded`] when there are too many,
    /// [`Reason::OpUnsupported`] when it demands what the device has not.
    pub fn open(
        &mut self,
        id: SessionId,
        request: &v1::OpenSessionRequest,
        over: Arc<AtomicBool>,
    ) -> Result<v1::SessionOpened, Error> {
        self.sweep();
        if self.names.contains_key(&id) {
            return Err(super::invalid("there is a session of this name already"));
        }
        if self.sessions.len() >= limits::MAX_SESSIONS {
            let what = format!(
                "this worker has its {} sessions already; try again later",
                limits::MAX_SESSIONS
            );
            return Err(Error::new(Reason::Overloaded, what));
        }
        let device = self.hub.device.as_ref();
        compile::admits(device, request.fused_attention())?;
        let threads = device.info().cores.len().max(1);
        let quotas = Quotas::of(request, self.hub.account.usage().limit, threads);
        let opened = v1::SessionOpened {
            session: id.to_string(),
            epoch: id.epoch().0,
            max_bytes: quotas.bytes,
            max_tensors: quotas.tensors as u32,
            max_plans: quotas.plans as u32,
            threads: quotas.threads as u32,
            numerics: compile::numerics(&device.numerics(), quotas.attention),
        };
        self.next += 1;
        let session = Session::new(&self.hub, id.epoch(), quotas, over);
        self.sessions.insert(self.next, session);
        self.names.insert(id, self.next);
        Ok(opened)
    }

    /// The session of this name.
    ///
    /// # Errors
    /// [`Reason::SessionNotFound`].
    pub fn session(&mut self, id: &SessionId) -> Result<&mut Session, Error> {
        let key = self.names.get(id).ok_or_else(session_gone)?;
        let session = self.sessions.get_mut(key).filter(|s| !s.is_over());
        session.ok_or_else(session_gone)
    }

    /// Queues a call of a session.
    ///
    /// # Errors
    /// As [`Session::submit`].
    pub fn submit(
        &mut self,
        id: &SessionId,
        submitted: super::call::Submitted,
    ) -> Result<super::call::Answer, Error> {
        let answer = self.session(id)?.submit(submitted)?;
        if let (Some(key), stream) = (self.names.get(id), answer.fence.stream) {
            let turn = (*key, stream);
            if !self.turns.contains(&turn) {
                self.turns.push_back(turn);
            }
        }
        Ok(answer)
    }

    /// Takes and queues a call and runs what can go on, if it is one that takes no longer than waking another thread
    /// does. Else it leaves the call where it is.
    ///
    /// # Errors
    /// As [`Session::submit`].
    pub fn submit_if_short(
        &mut self,
        id: &SessionId,
        submitted: &mut Option<super::call::Submitted>,
        interrupted: &dyn Fn() -> bool,
    ) -> Option<Result<super::call::Answer, Error>> {
        let session = self.session(id).ok()?;
        let submitted = submitted.take_if(|s| session.is_short(&s.request))?;
        let answer = self.submit(id, submitted);
        if answer.is_ok() {
            self.turn(interrupted, false);
        }
        Some(answer)
    }

    /// Frees the sessions whose leases are over.
    pub fn sweep(&mut self) {
        let over: Vec<u64> = self
            .sessions
            .iter()
            .filter(|(_, s)| s.is_over())
            .map(|(key, _)| *key)
            .collect();
        for key in over {
            if let Some(mut session) = self.sessions.remove(&key) {
                session.fail_all(&session_gone());
                let much = session.pool.account().usage().peak >= MUCH;
                drop(session);
                if much {
                    self.hub.device.trim();
                }
            }
            self.names.retain(|_, k| *k != key);
            self.turns.retain(|(k, _)| *k != key);
        }
    }

    /// Bytes that all sessions hold, freed ones that are kept among them.
    pub fn bytes(&self) -> u64 {
        let usage = self.hub.account.usage();
        usage.active + usage.cached
    }

    /// The sessions, by their numbers.
    pub(super) fn sessions(&self) -> impl Iterator<Item = (u64, &Session)> {
        self.sessions.iter().map(|(key, session)| (*key, session))
    }

    /// How many sessions there are, and what they hold.
    pub fn census(&self) -> v1::TensorCensus {
        let all = |count: fn(&Session) -> usize| self.sessions.values().map(count).sum::<usize>();
        let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let holders = self.sessions.iter().map(|(key, session)| {
            let usage = session.pool.account().usage();
            v1::SessionHoldings {
                number: *key,
                tensors: number(session.tensors.len()),
                plans: number(session.plans.len()),
                bytes: usage.active.saturating_add(usage.cached),
            }
        });
        let mut holders: Vec<_> = holders.collect();
        holders.sort_unstable_by_key(|one| (std::cmp::Reverse(one.bytes), one.number));
        holders.truncate(limits::MAX_TOLD_SESSIONS);
        v1::TensorCensus {
            sessions: number(self.sessions.len()),
            tensors: number(all(|session| session.tensors.len())),
            plans: number(all(|session| session.plans.len())),
            holders,
            compiled: self.hub.compiled.get(),
            executed: self.hub.executed.get(),
        }
    }

    /// Bytes that all sessions hold, by kind, and those that the device's library says it holds for all of the worker.
    pub fn memory(&self) -> Vec<v1::MemoryUse> {
        let usage = self.hub.account.usage();
        let part = |kind: &str, bytes| v1::MemoryUse {
            kind: kind.to_owned(),
            model: String::new(),
            bytes,
        };
        let mut all = vec![
            part("tensors", usage.active),
            part("tensors_kept", usage.cached),
        ];
        if let Some(library) = self.hub.device.usage() {
            all.push(part("library", library.active as u64));
            all.push(part("library_kept", library.cached as u64));
        }
        all
    }

    /// Whether nothing is queued that can go on.
    pub fn is_idle(&self) -> bool {
        !self.turns.iter().any(|turn| self.is_runnable(*turn))
    }

    fn is_runnable(&self, (key, stream): (u64, u32)) -> bool {
        self.sessions
            .get(&key)
            .is_some_and(|s| s.is_runnable(stream))
    }

    /// Gives one stream its turn: to the end of its work if nobody else has any, else for a slice. It ends between
    /// two nodes as soon as `interrupted` says so. `contended`: others than tensor work wait for the engine.
    /// Returns whether there was something to do.
    pub fn turn(&mut self, interrupted: &dyn Fn() -> bool, contended: bool) -> bool {
        for _ in 0..self.turns.len() {
            let Some(turn) = self.turns.pop_front() else {
                return false;
            };
            if !self.is_runnable(turn) {
                if self.has_work(turn) {
                    self.turns.push_back(turn);
                }
                continue;
            }
            let contended = contended || self.turns.iter().any(|other| self.is_runnable(*other));
            let begun = Instant::now();
            let pause = || interrupted() || contended && begun.elapsed() >= SLICE;
            let (key, stream) = turn;
            while let Some(session) = self.sessions.get_mut(&key) {
                let ended = session.advance(stream, &pause);
                // What it gave may let others go on, which have waited.
                if !ended || pause() || !session.is_runnable(stream) {
                    break;
                }
                if begun.elapsed() >= SLICE {
                    break;
                }
            }
            if self.has_work(turn) {
                self.turns.push_back(turn);
            }
            return true;
        }
        false
    }

    fn has_work(&self, (key, stream): (u64, u32)) -> bool {
        let session = self.sessions.get(&key);
        session.is_some_and(|s| s.has_work(stream))
    }
}

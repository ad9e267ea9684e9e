//! The batch of one model: which sequences compute which rows in the next step.
//!
//! A sequence is its tokens and how many of them are in the cache. The rows of a step are tokens that
//! are not: one for a sequence that decodes, and its guesses; a chunk for one that reads its prompt. Nothing that a row
//! computes depends on the others, so requests may join and leave at every step.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use hotcell_ipc::blackbox::{Slot, Writer};
use hotcell_kernels::backend::DeviceError;
use hotcell_proto::{
    error::{Error, Reason},
    v1,
};

mod admit;
mod compute;
mod guards;
mod look;
mod probe;
mod rows;

use super::{
    blocks::Key,
    cache::{Cache, Chain, Kind, Room},
    check::{self, Check},
    ledger,
    lookup::Pays,
    masks::Masks,
    pace::{Load, Pace},
    schedule::Schedule,
    task::{Member, Task},
};
pub use guards::{Condition, Guard, Hit, Own};
use probe::Lookers;
pub use probe::{Aim, Look, Looker, Probe};
#[cfg(test)]
pub use rows::Rows;

use crate::{
    debug::observer::Observer,
    error::of_device,
    model::run::{Row, Runner},
};

/// The root of what belongs to no tenant.
const NOBODY: Key = [0; 32];

/// How long a reader that does not read keeps a place, or blocks, that others wait for.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long it is remembered that requests come while prompts are read.
const MEMORY: Duration = Duration::from_secs(5);

/// A member with a table and blocks.
struct Running {
    member: Member,
    /// How many of its tokens are in the cache.
    computed: usize,
    table: usize,
    chain: Chain,
    /// Its place in the black box, if there was one.
    slot: Option<Slot>,
    /// Tokens that may come next, computed in this step.
    guesses: Vec<u32>,
    /// How many more were computed for nothing, since a condition holds at one.
    given_up: usize,
    /// Whether it has rows in a step that has begun and not ended: it stays where it is until then.
    flies: bool,
    /// Since when its reader has not read.
    stalled: Option<Instant>,
}

impl Running {
    fn pending(&self) -> usize {
        self.member.task.tokens().len() - self.computed
    }
}

/// What has happened so far.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    prompt: u64,
    cached: u64,
    preemptions: u64,
    guessed: u64,
    right: u64,
}

/// Rows of one sequence in the step that is made, and what they are for.
#[derive(Clone, Copy, Debug)]
struct Part {
    /// Whose: others may leave before the step ends.
    id: u64,
    /// Which of the running ones that is now.
    at: usize,
    /// Its first row in the step.
    first: usize,
    /// Rows of tokens that it has; rows of guesses come after them.
    rows: usize,
    /// The first of its rows of logits, one for the last token and one for each guess; none while it reads.
    pick: Option<usize>,
    /// Whether these are of its prompt, or of what it had drawn before it moved: no token was drawn in the step before.
    reads: bool,
}

/// A step that has begun and not ended.
struct Flight {
    parts: Vec<Part>,
    load: Load,
    /// What the row of a guess costs of a token in it.
    guess_cost: f32,
    /// Whether somebody looks at it.
    looked: bool,
    /// Whether what its plans do is noted.
    followed: bool,
    /// When its rows were chosen, and when computing them began.
    made: Instant,
    begun: Instant,
}

/// Sequences of one model.
pub struct Batch {
    runner: Runner,
    cache: Cache,
    tables: Vec<usize>,
    waiting: Vec<Member>,
    running: Vec<Running>,
    check: Option<Check>,
    schedule: Schedule,
    pace: Pace,
    masks: Masks,
    /// When a request last came while another one's prompt was read.
    company: Option<Instant>,
    /// When a reader's patience ends whose place others wait for.
    looks_again: Option<Instant>,
    /// What the row of a guess costs of a token in the step that is made, or that ends.
    guess_cost: f32,
    tally: Tally,
    arrivals: u64,
    rows: Vec<Row>,
    parts: Vec<Part>,
    pick_rows: Vec<usize>,
    /// Steps that have begun, the oldest one first. There are several where several processes have the model's layers.
    flights: VecDeque<Flight>,
    /// Other processes were asked what they noted, and answer once so many of these have ended.
    answers_after: Option<usize>,
    /// When the last one ended.
    ended: Option<Instant>,
    /// Rows of the one that began last.
    before: usize,
    /// Whose grammars are away.
    lent: Vec<u64>,
    /// Tokens drawn in the step that ends.
    drawn: usize,
    logits: Vec<f32>,
    state: Vec<f32>,
    blackbox: Writer,
    observer: Arc<Observer>,
    lookers: Lookers,
    /// Whether the step that comes is noted node by node.
    follows: bool,
}

impl Batch {
    /// No sequences yet. `secret` must be random: it keeps tenants from each other's cached prompts.
    pub fn new(mut runner: Runner, secret: Key, blackbox: Writer) -> Self {
        runner.tell(blackbox);
        let shape = *runner.shape();
        let kind = |(kind, &window)| Kind {
            window,
            blocks: shape.blocks_of(kind),
        };
        let kinds: Vec<Kind> = runner.windows().iter().enumerate().map(kind).collect();
        Self {
            cache: Cache::new(&kinds, shape.block_len, secret),
            tables: (0..shape.max_sequences).rev().collect(),
            waiting: Vec::new(),
            running: Vec::with_capacity(shape.max_sequences),
            check: None,
            schedule: Schedule::default(),
            pace: Pace::default(),
            masks: Masks::default(),
            company: None,
            looks_again: None,
            guess_cost: 1.0,
            tally: Tally::default(),
            arrivals: 0,
            rows: Vec::with_capacity(shape.max_rows),
            parts: Vec::with_capacity(shape.max_sequences),
            pick_rows: Vec::with_capacity(shape.max_sequences),
            flights: VecDeque::new(),
            answers_after: None,
            ended: None,
            before: 0,
            lent: Vec::new(),
            drawn: 0,
            logits: vec![0.0; runner.vocab()],
            state: vec![0.0; runner.hidden()],
            blackbox,
            observer: Arc::default(),
            lookers: Lookers::default(),
            follows: false,
            runner,
        }
    }

    /// Notes its steps there from now on, while somebody watches.
    pub fn tell(&mut self, observer: &Arc<Observer>) {
        self.observer = Arc::clone(observer);
    }

    /// The model on its device.
    pub fn runner(&mut self) -> &mut Runner {
        &mut self.runner
    }

    /// Decides by this pace from now on.
    pub fn set_pace(&mut self, pace: Pace) {
        self.pace = pace;
    }

    /// Adds a task.
    pub fn push(&mut self, task: Task) {
        if self.running.iter().any(|running| running.pending() > 1) {
            self.company = Some(Instant::now());
        }
        self.schedule.arrived(task.class());
        let root = self.cache.root(&task.class().tenant);
        self.waiting.push(Member {
            id: self.arrivals,
            task,
            root,
            keys: Vec::new(),
            preempted: 0,
            pays: Pays::default(),
            behind: None,
        });
        self.arrivals += 1;
    }

    /// Whether somebody who comes while a prompt is read would not be the first lately.
    fn expects_company(&self, now: Instant) -> bool {
        self.company
            .is_some_and(|last| now.saturating_duration_since(last) < MEMORY)
    }

    /// Tasks inside.
    pub fn len(&self) -> usize {
        self.waiting.len() + self.running.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What is in its cache now, under this model's name.
    pub fn status(&self, model: &str) -> v1::CacheStatus {
        let (windows, counts) = (self.runner.windows(), self.cache.counts());
        let layers = windows.iter().zip(counts).enumerate();
        let layers = layers.map(|(kind, (window, counts))| {
            let (layers, block_bytes) = self.runner.kind_size(kind);
            v1::CacheLayers {
                layers: u32::try_from(layers).unwrap_or(u32::MAX),
                window: window.unwrap_or(0) as u64,
                block_bytes: block_bytes as u64,
                blocks: counts.blocks as u64,
                used_blocks: counts.used as u64,
                kept_blocks: counts.kept as u64,
            }
        });
        let layers: Vec<v1::CacheLayers> = layers.collect();
        v1::CacheStatus {
            model: model.to_owned(),
            bytes: self.runner.cache_bytes() as u64,
            block_tokens: self.runner.shape().block_len as u64,
            blocks: layers.iter().map(|l| l.blocks).sum(),
            used_blocks: layers.iter().map(|l| l.used_blocks).sum(),
            kept_blocks: layers.iter().map(|l| l.kept_blocks).sum(),
            running: self.running.len() as u64,
            waiting: self.waiting.len() as u64,
            prompt_tokens: self.tally.prompt,
            cached_tokens: self.tally.cached,
            preemptions: self.tally.preemptions,
            guessed_tokens: self.tally.guessed,
            guessed_right: self.tally.right,
            requests: self.running.iter().map(|r| memory(r, &layers)).collect(),
            layers,
        }
    }

    /// Somebody wants to know which blocks its cache keeps, and what changes: see [`ledger::Ledger::ask`].
    pub fn ask_blocks(&mut self, watcher: &Arc<()>, begins: bool, reply: ledger::Reply) {
        self.cache.ask(watcher, begins, reply);
    }

    /// Tells who asked which blocks have changed.
    pub fn tell_blocks(&mut self) {
        self.cache.tell();
    }

    /// Begins to compute the known answer, in room that nobody has. One is computed at a time.
    pub fn check(&mut self, steps: u32, reply: check::Reply) {
        let refuse = |what: &str, reply: check::Reply| {
            // Who left meanwhile misses it.
            let _ = reply.send(Err(Error::new(Reason::Overloaded, what)));
        };
        if self.check.is_some() {
            return refuse("a check of this model runs already", reply);
        }
        let shape = *self.runner.shape();
        let tokens = Check::tokens(&shape, steps);
        let mut chain = Chain::new(NOBODY);
        let room = Room::all(0, tokens);
        // As for a newcomer: a block for every running sequence stays free.
        if !self.cache.fits(&chain, room, self.running.len()) {
            return refuse("there is no room for a check now", reply);
        }
        let Some(table) = self.tables.pop() else {
            return refuse("there is no room for a check now", reply);
        };
        match self.make_ready(&mut chain, table, room) {
            Ok(true) => self.check = Some(Check::new(&shape, steps, table, chain, reply)),
            Ok(false) => {
                self.release(table, chain, None);
                refuse("there is no room for a check now", reply);
            }
            Err(error) => {
                self.release(table, chain, None);
                let _ = reply.send(Err(of_device(&error)));
            }
        }
    }

    /// Whether a known answer is being computed.
    pub fn is_checking(&self) -> bool {
        self.check.is_some()
    }

    /// Computes a step of the known answer. Returns whether there was one to compute.
    pub fn check_step(&mut self) -> bool {
        if self.check.is_some() {
            self.land();
        }
        let Some(mut check) = self.check.take() else {
            return false;
        };
        let done = match check.is_abandoned() {
            true => Ok(true),
            false => check.step(&mut self.runner, &mut self.logits),
        };
        let failure = match done {
            Ok(false) => {
                self.check = Some(check);
                return true;
            }
            Ok(true) => None,
            Err(error) => Some(of_device(&error)),
        };
        let (table, chain) = check.end(failure);
        self.release(table, chain, None);
        true
    }

    /// The nearest deadline, or when somebody may have to make room whose reader does not read.
    pub fn next_deadline(&self) -> Option<Instant> {
        let running = self.running.iter().map(|r| &r.member);
        let all = running.chain(&self.waiting);
        let deadlines = all.filter_map(|member| member.task.deadline());
        deadlines.chain(self.looks_again).min()
    }

    /// Ends every task with an error.
    pub fn fail_all(&mut self, error: &Error) {
        self.looks_again = None;
        self.flights.clear();
        self.runner.forget_steps();
        // What a step that failed has begun.
        self.runner.use_tap(false);
        drop(self.runner.followed());
        while self.return_grammar() {}
        for at in (0..self.running.len()).rev() {
            let member = self.remove(at);
            self.end(member).fail(error.clone());
        }
        for member in std::mem::take(&mut self.waiting) {
            self.end(member).fail(error.clone());
        }
        if let Some(check) = self.check.take() {
            let (table, chain) = check.end(Some(error.clone()));
            self.release(table, chain, None);
        }
        // What failed may have left anything in the cache.
        self.cache.forget();
    }

    fn release(&mut self, table: usize, chain: Chain, slot: Option<Slot>) {
        if let Some(slot) = slot {
            self.blackbox.end(slot);
        }
        self.tables.push(table);
        self.cache.close(chain);
    }

    /// Takes a member out of the running ones.
    fn remove(&mut self, at: usize) -> Member {
        let Running {
            member,
            table,
            chain,
            slot,
            ..
        } = self.running.remove(at);
        self.release(table, chain, slot);
        member
    }

    /// Takes leave of a member.
    fn end(&mut self, member: Member) -> Task {
        self.schedule.left(member.task.class());
        member.task
    }

    /// Takes out what nobody waits for any more: abandoned streams and passed deadlines. Those with rows on their way are next
    /// when their step has ended.
    fn sweep(&mut self, now: Instant) {
        let over = |t: &Task| t.is_abandoned() || t.deadline().is_some_and(|d| d <= now);
        let late = |task: Task| {
            // To an abandoned stream this goes nowhere.
            task.fail(Error::new(
                Reason::DeadlineExceeded,
                "the request's deadline passed",
            ));
        };
        for at in (0..self.running.len()).rev() {
            if !self.running[at].flies && over(&self.running[at].member.task) {
                let member = self.remove(at);
                late(self.end(member));
            }
        }
        for at in (0..self.waiting.len()).rev() {
            if over(&self.waiting[at].task) {
                let member = self.waiting.remove(at);
                late(self.end(member));
            }
        }
    }

    /// For which of so many tokens a sequence has blocks, when the first `computed` are computed: for all of them, so
    /// that it can go on; but where layers have a window for those of the next step.
    fn room(&self, computed: usize, tokens: usize) -> Room {
        Room {
            from: computed,
            to: tokens,
            soon: computed + self.runner.shape().max_rows,
        }
    }

    /// Makes room for a chain behind a table. False if there are too few blocks.
    fn make_ready(
        &mut self,
        chain: &mut Chain,
        table: usize,
        room: Room,
    ) -> Result<bool, DeviceError> {
        let Some(works) = self.cache.ready(chain, room) else {
            return Ok(false);
        };
        for (kind, work) in works.into_iter().enumerate() {
            for block in work.wipe {
                self.runner.wipe_block(kind, block)?;
            }
            for (from, to) in work.copy {
                self.runner.copy_block(kind, from, to)?;
            }
            let blocks = &chain.blocks(kind)[work.changed..];
            if !blocks.is_empty() {
                self.runner.set_table(kind, table, work.changed, blocks)?;
            }
        }
        Ok(true)
    }

    /// Computes one step, or begins one and ends the one that began first. Returns whether there was something to compute.
    pub fn step(&mut self) -> bool {
        self.step_beside(false)
    }

    /// The same beside `others`, models that have something to compute as well: no step is left on its way, for theirs would
    /// be behind it.
    pub fn step_beside(&mut self, others: bool) -> bool {
        self.leave_alone();
        let inside = self.len();
        // Who looks sees one step after the other.
        let lanes = match !others && self.lookers.is_empty() {
            true => self.runner.lanes(),
            false => 1,
        };
        // Of a step all is noted, or nothing.
        self.follows = self.observer.follows();
        if self.follows {
            self.runner.note_copies();
        }
        let computed = self.advance(Instant::now(), lanes);
        if self.follows {
            let copied = self.runner.copied();
            self.observer.note_copies(&copied);
        }
        let worked = match computed {
            // One that failed has made room for others.
            Ok(worked) => worked || self.len() < inside,
            Err(error) => {
                self.failed(&error);
                true
            }
        };
        self.leave_alone();
        worked
    }

    fn failed(&mut self, error: &DeviceError) {
        tracing::error!(%error, "a step failed; its requests end");
        self.fail_all(&of_device(error));
    }

    /// Takes leave of whoever left where nothing can be computed. Returns whether somebody did.
    pub fn tidy(&mut self) -> bool {
        let inside = self.len();
        self.leave_alone();
        self.sweep(Instant::now());
        self.len() < inside
    }

    /// Whether a step would compute something now, or one is on its way.
    pub fn is_busy(&self) -> bool {
        let able = |r: &Running| r.pending() > 0 && r.member.task.has_room();
        !self.flights.is_empty()
            || self.running.iter().any(able)
            || self.waiting.iter().any(|member| member.task.has_room())
    }

    /// Ends all steps that have begun.
    pub fn land(&mut self) {
        if let Err(error) = self.end_steps(0) {
            self.failed(&error);
        }
    }
}

/// What a running one holds, of blocks of these kinds.
fn memory(running: &Running, layers: &[v1::CacheLayers]) -> v1::RequestMemory {
    let held = |kind| running.chain.held(kind) as u64;
    let bytes = |(kind, of): (usize, &v1::CacheLayers)| held(kind).saturating_mul(of.block_bytes);
    v1::RequestMemory {
        request_id: running.member.task.id().to_owned(),
        tokens: running.computed as u64,
        blocks: (0..layers.len()).map(held).sum(),
        bytes: layers.iter().enumerate().map(bytes).sum(),
    }
}

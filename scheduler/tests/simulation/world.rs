//! What a simulated host knows: its time, its processes, the faults they have, and what those excuse.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use hotcell_ipc::{
    blackbox::{self, Doing, Reader, Writer},
    oom::OomCounts,
    spawn::ExitStatus,
};
use hotcell_proto::error::Reason;
use hotcell_scheduler::death::{Ended, Shortage};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::{
    chance::Chance,
    wire::{Break, Fault},
};

/// How a process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    Crash,
    Kill,
    Exit(i32),
    OutOfMemory,
}

impl How {
    pub fn draw(chance: &mut Chance) -> Self {
        match chance.below(8) {
            0 => How::Exit(0),
            1 => How::Exit(70),
            2 => How::Exit(40),
            3 => How::OutOfMemory,
            4 => How::Kill,
            _ => How::Crash,
        }
    }

    fn ended(self) -> Ended {
        let signal = |signal| ExitStatus::Signal {
            signal,
            core: false,
        };
        match self {
            How::Crash => signal(11).into(),
            How::Kill => signal(9).into(),
            How::Exit(code) => ExitStatus::Code(code).into(),
            How::OutOfMemory => Ended {
                shortage: Shortage {
                    counted: OomCounts {
                        group: Some(1),
                        ..OomCounts::default()
                    },
                    peak_resident: 1 << 30,
                },
                ..signal(9).into()
            },
        }
    }
}

/// A connection with a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conversation {
    Control,
    Tokens,
    Tensors,
}

/// The only fault of a run: that of one connection with the first process.
#[derive(Clone, Copy, Debug)]
pub struct Script {
    pub conversation: Conversation,
    pub fault: Fault,
}

/// Bytes that went through the connections with the first process, read and written by it, and the frames it wrote.
#[derive(Clone, Copy, Debug, Default)]
pub struct Traffic([[u64; 3]; 3]);

impl Traffic {
    pub fn bytes(&self, conversation: Conversation, writing: bool) -> u64 {
        self.0[conversation as usize][usize::from(writing)]
    }

    pub fn frames(&self, conversation: Conversation) -> u64 {
        self.0[conversation as usize][2]
    }
}

/// What the run has shown so far, and what the faults that happened excuse.
#[derive(Default)]
struct Record {
    trace: Vec<String>,
    wrongs: Vec<String>,
    /// Workers with a process.
    alive: BTreeSet<String>,
    /// Ends that a fault of one stream excuses, by the request's seed.
    excused: BTreeMap<u64, BTreeSet<&'static str>>,
    /// Ends that a fault excuses for everybody.
    excused_all: BTreeSet<&'static str>,
    /// Models and classes whose right answer some worker gave and then served with.
    proven: BTreeSet<(String, String)>,
    /// Tensor sessions, by process.
    sessions: BTreeSet<(u32, String)>,
}

/// A simulated host.
pub struct World {
    pub seed: u64,
    /// Within which an engine that stands still must be found; none if processes have no black box.
    pub patience: Option<Duration>,
    began: Instant,
    record: Mutex<Record>,
    /// Faults that may still happen: a run that had them all ends well.
    faults: AtomicU32,
    pids: AtomicU64,
    /// Whether streams have so little room that what was read is forgotten.
    tight: AtomicBool,
    /// None: connections break by chance.
    script: Option<Option<Script>>,
    traffic: Mutex<Traffic>,
}

impl World {
    pub fn new(seed: u64, faults: u32, patience: Option<Duration>) -> Arc<Self> {
        Arc::new(Self {
            seed,
            patience,
            began: Instant::now(),
            record: Mutex::default(),
            faults: AtomicU32::new(faults),
            pids: AtomicU64::new(1 << 30),
            tight: AtomicBool::new(false),
            script: None,
            traffic: Mutex::default(),
        })
    }

    /// A world in which nothing breaks but what the script says.
    pub fn scripted(script: Option<Script>) -> Arc<Self> {
        let mut world = Self::new(0, 0, None);
        if let Some(world) = Arc::get_mut(&mut world) {
            world.script = Some(script);
        }
        world
    }

    /// What the connections with the first process carried.
    pub fn traffic(&self) -> Traffic {
        *self.traffic.lock().unwrap()
    }

    pub fn chance(&self, part: &str) -> Chance {
        Chance::of(self.seed, part)
    }

    pub fn note(&self, what: impl AsRef<str>) {
        let ms = self.began.elapsed().as_secs_f64() * 1e3;
        let mut line = String::new();
        let _ = write!(line, "{ms:.3} {}", what.as_ref());
        self.record.lock().unwrap().trace.push(line);
    }

    /// Something that must never happen, happened.
    pub fn wrong(&self, what: impl Into<String>) {
        let what = what.into();
        self.note(format!("WRONG: {what}"));
        self.record.lock().unwrap().wrongs.push(what);
    }

    pub fn excuse(&self, seed: u64, reason: Reason) {
        let mut record = self.record.lock().unwrap();
        record
            .excused
            .entry(seed)
            .or_default()
            .insert(reason.name());
    }

    pub fn excuse_all(&self, reason: Reason) {
        self.record
            .lock()
            .unwrap()
            .excused_all
            .insert(reason.name());
    }

    pub fn is_excused(&self, seed: u64, reason: Reason) -> bool {
        let record = self.record.lock().unwrap();
        let name = reason.name();
        record.excused_all.contains(name)
            || record.excused.get(&seed).is_some_and(|r| r.contains(name))
    }

    pub fn tighten(&self) {
        self.tight.store(true, Ordering::Relaxed);
    }

    pub fn is_tight(&self) -> bool {
        self.tight.load(Ordering::Relaxed)
    }

    /// Whether the right answer is on record, so that a wrong one must be found out.
    pub fn is_proven(&self, model: &str, class: &str) -> bool {
        let key = (model.to_owned(), class.to_owned());
        self.record.lock().unwrap().proven.contains(&key)
    }

    /// Sessions that processes which live have.
    pub fn sessions(&self) -> usize {
        self.record.lock().unwrap().sessions.len()
    }

    /// Whether another fault may happen, and counts it.
    pub fn fault(&self) -> bool {
        let one_less = |left: u32| left.checked_sub(1);
        let order = Ordering::Relaxed;
        self.faults.fetch_update(order, order, one_less).is_ok()
    }

    pub fn no_more_faults(&self) {
        self.faults.store(0, Ordering::Relaxed);
    }

    pub fn trace(&self) -> Vec<String> {
        self.record.lock().unwrap().trace.clone()
    }

    pub fn wrongs(&self) -> Vec<String> {
        self.record.lock().unwrap().wrongs.clone()
    }

    pub fn alive(&self) -> BTreeSet<String> {
        self.record.lock().unwrap().alive.clone()
    }

    /// A new process of a worker.
    pub fn begin(self: &Arc<Self>, worker: &str, epoch: u64) -> Arc<Life> {
        // A standby takes another worker's place and keeps running, while the next one is made.
        let name = match worker.ends_with(".standby") {
            true => format!("{worker}/{epoch}"),
            false => worker.to_owned(),
        };
        let again = !self.record.lock().unwrap().alive.insert(name.clone());
        if again {
            self.wrong(format!("{worker} has two processes"));
        }
        self.note(format!("{worker}/{epoch} starts"));
        let blackbox = self.patience.map(|_| {
            let memory = blackbox::make().unwrap();
            let writer = Writer::open(&memory, std::iter::empty()).unwrap();
            writer.doing(Doing::Idle);
            (writer, Arc::new(Reader::open(&memory).unwrap()))
        });
        Arc::new(Life {
            world: Arc::clone(self),
            blackbox,
            stuck: Mutex::default(),
            name,
            worker: worker.to_owned(),
            epoch,
            pid: self.pids.fetch_add(1, Ordering::Relaxed) as u32,
            dead: CancellationToken::new(),
            how: Mutex::new(None),
            sums: Mutex::default(),
            chance: Mutex::new(self.chance(&format!("{worker}/{epoch}"))),
        })
    }
}

/// A simulated process, while it lives and after.
pub struct Life {
    pub world: Arc<World>,
    blackbox: Option<(Writer, Arc<Reader>)>,
    /// Since when its engine stands still.
    stuck: Mutex<Option<Instant>>,
    /// Its name among those that live.
    name: String,
    pub worker: String,
    pub epoch: u64,
    pub pid: u32,
    dead: CancellationToken,
    how: Mutex<Option<How>>,
    sums: Mutex<Sums>,
    chance: Mutex<Chance>,
}

/// How a process computes.
#[derive(Default)]
struct Sums {
    /// Wrongly, from some time on.
    wrong: bool,
    /// Models for which it gave the right answer.
    right: BTreeSet<String>,
}

impl Life {
    pub fn note(&self, what: impl AsRef<str>) {
        let what = what.as_ref();
        self.world
            .note(format!("{}/{} {what}", self.worker, self.epoch));
    }

    pub fn token(&self) -> &CancellationToken {
        &self.dead
    }

    pub fn is_dead(&self) -> bool {
        self.dead.is_cancelled()
    }

    /// Draws from the process's own numbers.
    pub fn draw<T>(&self, draw: impl FnOnce(&mut Chance) -> T) -> T {
        draw(&mut self.chance.lock().unwrap())
    }

    pub fn blackbox(&self) -> Option<&Arc<Reader>> {
        self.blackbox.as_ref().map(|(_, reader)| reader)
    }

    /// Its engine stands still in the middle of a step. If it has a black box the scheduler must find that out; else
    /// somebody kills it after a while.
    pub fn hang(self: &Arc<Self>, time: Duration) {
        let Some((writer, _)) = &self.blackbox else {
            return self.die_in(time);
        };
        writer.doing(Doing::Stepping);
        self.stuck.lock().unwrap().get_or_insert_with(Instant::now);
    }

    /// Its answer to the known input. It may be wrong from now on, once the right one is on record.
    pub fn answer(&self, model: &str, class: &str) -> [u8; 32] {
        let mut sums = self.sums.lock().unwrap();
        if self.world.is_proven(model, class) {
            let turns = self.draw(|c| c.percent(4)) && self.world.fault();
            if turns {
                self.note("computes wrongly");
            }
            sums.wrong |= turns;
            if sums.wrong {
                // No two wrong ones agree: that would be a vote.
                let mut answer = [1; 32];
                answer[..4].copy_from_slice(&self.pid.to_ne_bytes());
                return answer;
            }
        }
        sums.right.insert(model.to_owned());
        [0; 32]
    }

    /// It is to serve a model: its answer must have been right.
    pub fn serve(&self, model: &str, class: &str) {
        let right = self.sums.lock().unwrap().right.contains(model);
        if !right {
            let (worker, epoch) = (&self.worker, self.epoch);
            return self.world.wrong(format!(
                "{worker}/{epoch} serves {model}, for which it never gave the right answer"
            ));
        }
        let mut record = self.world.record.lock().unwrap();
        // What is unloaded is forgotten, and the next answer on record may be anybody's.
        if model == "a" {
            let key = (model.to_owned(), class.to_owned());
            record.proven.insert(key);
        }
    }

    pub fn open_session(&self, id: &str) {
        self.note("opens a session");
        let mut record = self.world.record.lock().unwrap();
        record.sessions.insert((self.pid, id.to_owned()));
    }

    pub fn close_session(&self, id: &str) {
        self.note("closes a session");
        let mut record = self.world.record.lock().unwrap();
        record.sessions.remove(&(self.pid, id.to_owned()));
    }

    pub fn has_session(&self, id: &str) -> bool {
        let record = self.world.record.lock().unwrap();
        record.sessions.contains(&(self.pid, id.to_owned()))
    }

    /// Ends it. The first end counts.
    pub fn die(&self, how: How) {
        let mut held = self.how.lock().unwrap();
        if held.is_none() {
            *held = Some(how);
            drop(held);
            // Streams may be lost from here on, and a device be given up.
            self.world.excuse_all(Reason::WorkerLost);
            self.world.excuse_all(Reason::NoWorker);
            self.note(format!("dies: {how:?}"));
            let stood = self.stuck.lock().unwrap().map(|at| at.elapsed());
            let limit = self.world.patience.unwrap_or_default() + Duration::from_secs(3);
            if let Some(stood) = stood.filter(|&stood| stood > limit) {
                self.world.wrong(format!(
                    "{}/{} stood still for {stood:?} before it was killed",
                    self.worker, self.epoch
                ));
            }
            if self.worker.contains(".solo") {
                // Whatever killed it: nothing else ran there.
                self.world.excuse_all(Reason::RequestPoisoned);
            }
            self.dead.cancel();
        }
    }

    /// Somebody kills it after a while, if it still lives.
    pub fn die_in(self: &Arc<Self>, time: Duration) {
        let life = Arc::clone(self);
        tokio::spawn(async move {
            tokio::select! {
                biased;
                () = life.dead.cancelled() => {}
                () = sleep(time) => life.die(How::Kill),
            }
        });
    }

    /// Its end, as its parent reaps it.
    pub fn reap(&self) -> Ended {
        let how = self.how.lock().unwrap().unwrap_or(How::Kill);
        if self.world.record.lock().unwrap().alive.remove(&self.name) {
            self.note("reaped");
        }
        how.ended()
    }

    /// Counts what went through one of its connections.
    pub fn count(&self, conversation: Conversation, writing: bool, bytes: usize, frames: u64) {
        if self.epoch == 1 {
            let counts = &mut self.world.traffic.lock().unwrap().0[conversation as usize];
            counts[usize::from(writing)] += bytes as u64;
            counts[2] += frames;
        }
    }

    /// A fault of one of its connections, if it is to have one.
    pub fn wire_fault(&self, conversation: Conversation) -> Option<Fault> {
        if let Some(script) = self.world.script {
            let mine = |s: &Script| s.conversation == conversation && self.epoch == 1;
            return script.filter(mine).map(|s| s.fault);
        }
        let fault = self.draw(|c| {
            if !c.percent(12) {
                return None;
            }
            let size = 1 << c.within(4, 13);
            let what = match c.below(10) {
                0..=3 => Break::Die(How::draw(c)),
                4..=5 => Break::Cut,
                6..=7 => Break::Hang(c.ms(50, 15_000)),
                8 => Break::Late(c.ms(1, 8_000)),
                _ => Break::Garbage,
            };
            let writing = c.percent(60) || what == Break::Garbage;
            let at = match what {
                Break::Garbage => 0,
                // A session's name is random, and so is how many bytes HTTP/2 takes for it.
                _ if conversation == Conversation::Tensors => 0,
                _ => c.below(size),
            };
            Some(Fault { at, writing, what })
        });
        fault.filter(|_| self.world.fault())
    }
}

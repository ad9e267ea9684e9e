//! Who looks at what a batch computes: probes at the tokens of one request, guards at every row of a step.
//!
//! Steps in which nobody looks at anything are computed by the plan that they are always computed by. Nobody waits for
//! those who look, except a request that was begun to be looked at.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use hotcell_graph::Graph;
use hotcell_kernels::backend::{Device, DeviceError};
use hotcell_proto::{
    error::{Error, Reason},
    limits,
    plan_part::PlanPart,
    v1,
};
use tokio::sync::mpsc;

use super::{
    Batch, Part,
    compute::Outcome,
    rows::{Rows, Spares},
};
use crate::{
    generate::task::{Member, Task},
    model::{
        points::{Point, Step},
        run::{RowSize, Wanted},
    },
};

/// Which request a probe looks at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Aim {
    /// The one of this id, also if it comes later.
    Request(String),
    /// The next one that comes.
    Next,
}

/// Looks at what is computed for the tokens of one request.
pub struct Probe {
    /// Which request.
    pub aim: Aim,
    /// Nodes, by their numbers among the points.
    pub points: Vec<usize>,
    /// Tokens that it looks at, at most.
    pub tokens: u64,
    /// Whether the request waits for whoever reads this. Else tokens are left out, and counted.
    pub waits: bool,
    /// Whether it looks at rows from which no token is drawn, too.
    pub prefix: bool,
    /// Where it is told. Once the request has ended, it is dropped.
    pub to: mpsc::Sender<Look>,
    member: Option<u64>,
    since: u64,
    told: bool,
    missed: u64,
    spares: Spares,
    /// Whether it had room for what the last step that its request is part of shows of it.
    looks: bool,
    /// Whether its request was left out of the last step for it.
    stood_back: bool,
}

impl Probe {
    /// One that looks at so many tokens.
    pub fn new(aim: Aim, points: Vec<usize>, tokens: u64, to: mpsc::Sender<Look>) -> Self {
        Self {
            aim,
            points,
            tokens,
            waits: false,
            prefix: false,
            to,
            member: None,
            since: 0,
            told: false,
            missed: 0,
            spares: Spares::default(),
            looks: false,
            stood_back: false,
        }
    }
}

/// What was computed for a token, and for the rows before its own if they are wanted.
#[derive(Debug)]
pub struct Look {
    /// The request, before the first of its tokens that is looked at.
    pub request: Option<Box<v1::GenerateRequest>>,
    /// Which of the generated tokens it is.
    pub index: u64,
    /// The position of the row that it was drawn from.
    pub position: u64,
    /// The token, if one could be drawn.
    pub token: Option<u32>,
    /// Rows of the nodes' values, in the order of [`Probe::points`]; none for a step that no token was drawn after.
    pub rows: Rows,
    /// What it was drawn from.
    pub logits: Vec<f32>,
    /// How many rows were computed before that one in the same step.
    pub before: usize,
    /// These rows' values, likewise.
    pub rows_before: Rows,
    /// Tokens that were left out before this one.
    pub missed: u64,
}

/// What must not be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Condition {
    /// A value is NaN.
    Nan,
    /// A value is infinite, and none NaN.
    Infinite,
    /// An absolute value is above.
    Above(f32),
    /// The root of the mean square is outside.
    RmsOutside(f32, f32),
    /// All values are zero.
    Zero,
}

impl Condition {
    /// Whether it holds for a row's values.
    pub fn holds(self, size: RowSize) -> bool {
        match self {
            Self::Nan => size.peak.is_nan(),
            Self::Infinite => size.peak.is_infinite(),
            Self::Above(most) => size.peak > most,
            Self::RmsOutside(least, most) => !(least..=most).contains(&size.mean_square.sqrt()),
            Self::Zero => size.peak == 0.0,
        }
    }
}

/// The one request that a guard is for, which waits until each hit is on its way to who wants to know: its next step may end
/// this process.
#[derive(Clone, Debug)]
pub struct Own {
    /// The request's id.
    pub request: String,
    /// Hits that are not on their way yet.
    pub untold: Arc<AtomicUsize>,
}

/// Looks at the values of some nodes in every row of every step.
pub struct Guard {
    /// Nodes, by their numbers among the points.
    pub points: Vec<usize>,
    /// What must not be.
    pub conditions: Vec<Condition>,
    /// Whether a request ends for which it is.
    pub ends: bool,
    /// Where it is told; what has no room is counted instead.
    pub to: mpsc::Sender<Hit>,
    /// Whether it is for one request alone.
    pub own: Option<Own>,
    missed: u64,
}

impl Guard {
    /// One for these conditions.
    pub fn new(points: Vec<usize>, conditions: Vec<Condition>, to: mpsc::Sender<Hit>) -> Self {
        Self {
            points,
            conditions,
            ends: false,
            to,
            own: None,
            missed: 0,
        }
    }

    /// Whether it looks at a request.
    fn is_for(&self, request: &str) -> bool {
        self.own.as_ref().is_none_or(|own| own.request == request)
    }

    /// Whether a request has to wait until hits are told.
    fn holds_up(&self, request: &str) -> bool {
        let own = self.own.as_ref().filter(|own| own.request == request);
        own.is_some_and(|own| own.untold.load(Ordering::Acquire) > 0) && !self.to.is_closed()
    }

    /// Tells a hit, or counts it where there is no room.
    fn tell(&mut self, mut hit: Hit) {
        hit.missed = self.missed;
        let untold = self.own.as_ref().map(|own| &own.untold);
        // Before it is there: whoever takes it counts it out again.
        if let Some(untold) = untold {
            untold.fetch_add(1, Ordering::AcqRel);
        }
        let told = self.to.try_send(hit).is_ok();
        if let (Some(untold), false) = (untold, told) {
            untold.fetch_sub(1, Ordering::AcqRel);
        }
        self.missed = if told {
            0
        } else {
            self.missed.saturating_add(1)
        };
    }
}

/// The first node at which a request met a condition in a step.
#[derive(Clone, Debug)]
pub struct Hit {
    /// The request; empty for an embedding.
    pub request: String,
    /// The node, by its number among the points.
    pub point: usize,
    /// Which of the conditions.
    pub condition: usize,
    /// The position of the row.
    pub position: u64,
    /// Tokens of the request's prompt.
    pub prompt: u64,
    /// What the device said of the row.
    pub size: RowSize,
    /// Further nodes of the same row at which a condition holds.
    pub further: u32,
    /// Whether the request ended for it.
    pub ended: bool,
    /// Hits that were left out before this one.
    pub missed: u64,
}

/// Those who look.
#[derive(Default)]
pub(super) struct Lookers {
    probes: Vec<Probe>,
    guards: Vec<Guard>,
}

/// Somebody who wants to look.
pub enum Looker {
    /// At one request.
    Probe(Probe),
    /// At all of them.
    Guard(Guard),
}

impl Lookers {
    pub fn is_empty(&self) -> bool {
        self.probes.is_empty() && self.guards.is_empty()
    }

    fn wanted(&self) -> Wanted {
        Wanted {
            whole: (self.probes.iter())
                .flat_map(|p| p.points.iter().copied())
                .collect(),
            sizes: (self.guards.iter())
                .flat_map(|g| g.points.iter().copied())
                .collect(),
        }
    }

    fn push(&mut self, looker: Looker) {
        match looker {
            Looker::Probe(probe) => self.probes.push(probe),
            Looker::Guard(guard) => self.guards.push(guard),
        }
    }

    fn pop(&mut self, guard: bool) {
        match guard {
            true => drop(self.guards.pop()),
            false => drop(self.probes.pop()),
        }
    }
}

impl Batch {
    /// What can be looked at by guards.
    pub fn points(&self) -> &[Point] {
        self.runner.points()
    }

    /// Those of them, the first ones, that probes can look at, too.
    pub fn points_of_body(&self) -> &[Point] {
        self.runner.points_of_body()
    }

    /// The graph that they are in.
    pub fn graph(&self) -> &Graph {
        self.runner.graph()
    }

    /// The graph that makes logits of that one's output.
    pub fn head_graph(&self) -> &Graph {
        self.runner.head_graph()
    }

    /// What the steps of one of the plans compute.
    pub fn plan_steps(&self, part: PlanPart) -> &[Step] {
        self.runner.plan_steps(part)
    }

    /// Lets somebody look from the next step on.
    ///
    /// # Errors
    /// [`Reason::Overloaded`] when too many do, and what the device says of looking at so much.
    pub fn look(&mut self, device: &dyn Device, looker: Looker) -> Result<(), Error> {
        self.land();
        self.leave_alone();
        let most = limits::MAX_DEBUGGERS;
        if self.lookers.probes.len() + self.lookers.guards.len() >= most {
            let what = format!("{most} others look into this model already; try again later");
            return Err(Error::new(Reason::Overloaded, what));
        }
        let is_guard = matches!(looker, Looker::Guard(_));
        let looker = match looker {
            Looker::Probe(probe) => Looker::Probe(Probe {
                since: self.arrivals,
                ..probe
            }),
            guard => guard,
        };
        self.lookers.push(looker);
        if let Err(error) = self.runner.tap(device, &self.lookers.wanted()) {
            // What was there before is still there: a plan that was not made changes nothing.
            self.lookers.pop(is_guard);
            let reason = match error {
                DeviceError::OutOfMemory { .. } => Reason::LimitExceeded,
                _ => Reason::Internal,
            };
            return Err(Error::new(reason, error.to_string()));
        }
        Ok(())
    }

    /// Forgets those who left, and those whose request has ended.
    pub fn leave_alone(&mut self) {
        if self.lookers.is_empty() {
            return;
        }
        let running = self.running.iter().map(|running| running.member.id);
        let waiting = self.waiting.iter().map(|member| member.id);
        let inside: Vec<u64> = running.chain(waiting).collect();
        self.lookers.guards.retain(|guard| !guard.to.is_closed());
        self.lookers.probes.retain(|probe| {
            let there = probe.member.is_none_or(|id| inside.contains(&id));
            there && probe.tokens > 0 && !probe.to.is_closed()
        });
        if self.lookers.is_empty() {
            self.runner.untap();
        }
    }

    /// Finds the requests that probes are for.
    pub(super) fn aim(&mut self) {
        let open = self
            .lookers
            .probes
            .iter_mut()
            .filter(|p| p.member.is_none());
        let mut taken = Vec::new();
        for probe in open {
            let since = probe.since;
            let mut found = self.running.iter().map(|running| &running.member);
            let found = found.find(|member| match &probe.aim {
                Aim::Request(id) => member.task.id() == id,
                Aim::Next => {
                    member.id >= since
                        && !taken.contains(&member.id)
                        && matches!(member.task, Task::Generate(_))
                }
            });
            probe.member = found.map(|member| member.id);
            taken.extend(probe.member);
        }
    }

    /// Whether a request is looked at.
    pub(super) fn is_probed(&self, member: u64) -> bool {
        let mut probes = self.lookers.probes.iter();
        probes.any(|probe| probe.member == Some(member))
    }

    /// Whether conditions hold for all that is computed.
    pub(super) fn is_guarded(&self) -> bool {
        !self.lookers.guards.is_empty()
    }

    /// Whether whoever looks at a request has room for what a step shows of it, or is not waited for.
    pub(super) fn has_reader(&self, member: &Member) -> bool {
        let (mut probes, mut guards) = (self.lookers.probes.iter(), self.lookers.guards.iter());
        !probes.any(|p| p.member == Some(member.id) && p.waits && p.to.capacity() == 0)
            && !guards.any(|guard| guard.holds_up(member.task.id()))
    }

    /// Leaves those who draw and are looked at out of a step in which prompts are read: one that somebody looks at takes longer
    /// for each of its rows, and others would wait for it. Not twice in a row, however many prompts come.
    pub(super) fn stand_back(&mut self, able: &mut Vec<usize>) {
        let (running, guarded) = (&self.running, self.is_guarded());
        let reads = able.iter().any(|at| running[*at].pending() > 1);
        let probes = &mut self.lookers.probes;
        if !reads || guarded {
            probes.iter_mut().for_each(|probe| probe.stood_back = false);
            return;
        }
        able.retain(|&at| {
            let member = running[at].member.id;
            let mut stays = true;
            for probe in probes.iter_mut().filter(|p| p.member == Some(member)) {
                // For who has no room a step is not looked at, and who is waited for has no others beside.
                let looks = !probe.waits && probe.to.capacity() > 0;
                let draws = running[at].pending() == 1;
                probe.stood_back = looks && draws && !probe.stood_back;
                stays &= !probe.stood_back;
            }
            stays
        });
    }

    /// Before a step: whether somebody looks at it, for which the plan that hands out more is used.
    pub(super) fn begin_looking(&mut self) -> bool {
        let mut looked = self.is_guarded();
        for part in &self.parts {
            let member = self.running[part.at].member.id;
            let probes = self.lookers.probes.iter_mut();
            for probe in probes.filter(|probe| probe.member == Some(member)) {
                let shown = part.pick.is_some() || probe.prefix;
                // For who has no room others' rows are not computed more slowly.
                probe.looks = shown && probe.to.capacity() > 0;
                looked |= probe.looks;
            }
        }
        self.runner.use_tap(looked);
        looked
    }

    /// After a step: tells where conditions hold, and ends the requests that end for it. Guesses from one on at which a
    /// condition holds are given up: if it was right, its token is computed by itself next, and told of then.
    pub(super) fn guard(
        &mut self,
        rows: usize,
        ended: &mut Vec<(usize, Outcome)>,
    ) -> Result<(), DeviceError> {
        let mut given_up = Vec::new();
        // The head has rows of those that draw, and of their guesses.
        let of_body = self.runner.points_of_body().len();
        let ends = self.parts.iter().filter_map(|part| {
            let guesses = self.running[part.at].guesses.len();
            part.pick.map(|pick| pick + 1 + guesses)
        });
        let picks = ends.max().unwrap_or(0);
        for guard in &mut self.lookers.guards {
            let mut sizes = Vec::with_capacity(guard.points.len());
            for &point in &guard.points {
                let rows = if point < of_body { rows } else { picks };
                sizes.push((point, self.runner.tapped_sizes(point, rows)?));
            }
            let mut hits = Vec::new();
            for part in &self.parts {
                let running = &self.running[part.at];
                let task = &running.member.task;
                if !guard.is_for(task.id()) {
                    continue;
                }
                let last = part.first + part.rows - 1;
                let holds = |&(point, ref of): &(usize, Vec<RowSize>), row: usize| {
                    let place = match point < of_body {
                        true => row,
                        false => part.pick? + row.checked_sub(last)?,
                    };
                    let size = *of.get(place)?;
                    let mut all = guard.conditions.iter();
                    let condition = all.position(|condition| condition.holds(size))?;
                    Some((point, condition, size))
                };
                let own = part.first..part.first + part.rows;
                let mut guessed = own.end..own.end + running.guesses.len();
                let caught = |row: usize| sizes.iter().any(|point| holds(point, row).is_some());
                given_up.extend(guessed.position(caught).map(|right| (part.at, right)));
                let first = own.clone().find_map(|row| {
                    let mut hits = sizes.iter().filter_map(|point| holds(point, row));
                    let first = hits.next()?;
                    Some((row, first, hits.count()))
                });
                let Some((row, (point, condition, size), further)) = first else {
                    continue;
                };
                let hit = Hit {
                    request: task.id().to_owned(),
                    point,
                    condition,
                    position: (running.computed + row - part.first) as u64,
                    prompt: task.prompt_len() as u64,
                    size,
                    further: u32::try_from(further).unwrap_or(u32::MAX),
                    ended: guard.ends,
                    missed: 0,
                };
                hits.push(hit);
                if guard.ends && !ended.iter().any(|(at, _)| *at == part.at) {
                    let name = self.runner.points().get(point).map(|p| p.name.as_str());
                    let what = format!(
                        "a watchpoint ended this request at node {}",
                        name.unwrap_or_default()
                    );
                    let error = Error::new(Reason::NumericsFailed, what);
                    let error = error.with("node", name.unwrap_or_default());
                    ended.push((part.at, Outcome::Failed(error)));
                }
            }
            for hit in hits {
                guard.tell(hit);
            }
        }
        for (at, right) in given_up {
            let running = &mut self.running[at];
            running.given_up = running.guesses.len() - right;
            running.guesses.truncate(right);
        }
        Ok(())
    }

    /// After a step: what is seen of the token that is about to be drawn, by the probes' places. Who had no room when the step
    /// began missed it.
    pub(super) fn peek(&mut self, part: &Part) -> Result<Vec<(usize, Look)>, DeviceError> {
        let mut all = Vec::new();
        let running = &self.running[part.at];
        let Task::Generate(sequence) = &running.member.task else {
            return Ok(all);
        };
        let member = running.member.id;
        for (place, probe) in self.lookers.probes.iter_mut().enumerate() {
            let shown = part.pick.is_some() || probe.prefix;
            if probe.member != Some(member) || probe.tokens == 0 || !shown {
                continue;
            }
            if !probe.looks || probe.to.capacity() == 0 {
                probe.missed = probe.missed.saturating_add(1);
                continue;
            }
            let end = part.first + part.rows;
            let own = end - usize::from(part.pick.is_some());
            let before = if probe.prefix { own - part.first } else { 0 };
            let points = self.runner.points();
            let bytes_of = |&point: &usize| points.get(point)?.row_bytes();
            let row_bytes: usize = probe.points.iter().filter_map(bytes_of).sum();
            let read = |rows: Range<usize>| {
                let mut read = probe.spares.rows(row_bytes.saturating_mul(rows.len()));
                for &point in &probe.points {
                    read.push(|to| self.runner.tapped_rows(point, rows.clone(), to))?;
                }
                Ok::<_, DeviceError>(read)
            };
            let rows_before = match before {
                0 => Rows::default(),
                _ => read(part.first..own)?,
            };
            let (mut rows, mut logits) = (Rows::default(), Vec::new());
            if let Some(pick) = part.pick {
                rows = read(own..end)?;
                logits = vec![0.0; self.runner.vocab()];
                self.runner.logits(pick, &mut logits)?;
            }
            let generated = sequence.tokens().len() - sequence.prompt_len();
            let first = !std::mem::replace(&mut probe.told, true);
            let look = Look {
                request: first.then(|| Box::new(sequence.asked())),
                index: generated as u64,
                position: (running.computed + part.rows).saturating_sub(1) as u64,
                token: None,
                rows,
                logits,
                before,
                rows_before,
                missed: std::mem::take(&mut probe.missed),
            };
            all.push((place, look));
        }
        Ok(all)
    }

    /// Tells what was seen, with the token that was drawn, if one was.
    pub(super) fn tell_probes(&mut self, at: usize, seen: Vec<(usize, Look)>) {
        let tokens = self.running[at].member.task.tokens();
        for (place, mut look) in seen {
            let next = usize::try_from(look.position).map_or(usize::MAX, |p| p.saturating_add(1));
            let drawn = u64::from(!look.logits.is_empty());
            look.token = tokens.get(next).copied().filter(|_| drawn > 0);
            if let Some(probe) = self.lookers.probes.get_mut(place) {
                probe.tokens = probe.tokens.saturating_sub(drawn);
                // There was room before the token was drawn; one who left is forgotten at the next step.
                let _ = probe.to.try_send(look);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_hold_for_what_they_name_and_nothing_else() {
        let size = |peak: f32, mean_square: f32| RowSize { peak, mean_square };
        let all = [
            Condition::Nan,
            Condition::Infinite,
            Condition::Above(10.0),
            Condition::RmsOutside(0.5, 2.0),
            Condition::Zero,
        ];
        let held = |size| all.map(|condition| condition.holds(size));
        assert_eq!(held(size(3.0, 1.0)), [false; 5]);
        let nan = size(f32::NAN, f32::NAN);
        assert_eq!(held(nan), [true, false, false, true, false]);
        let infinite = size(f32::INFINITY, f32::INFINITY);
        assert_eq!(held(infinite), [false, true, true, true, false]);
        assert_eq!(held(size(11.0, 4.0)), [false, false, true, false, false]);
        assert_eq!(held(size(11.0, 4.1)), [false, false, true, true, false]);
        assert_eq!(held(size(0.0, 0.0)), [false, false, false, true, true]);
    }
}

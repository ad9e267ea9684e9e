//! Who looks at what a batch computes: probes at the tokens of one request, [guards](super::guards) at every row of a step.
//!
//! Steps in which nobody looks at anything are computed by the plan that they are always computed by. Nobody waits for
//! those who look, except a request that was begun to be looked at.

use std::{ops::Range, time::Instant};

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
    guards::Guard,
    rows::{Rows, Spares},
};
use crate::{
    generate::task::{Member, Task},
    model::{
        points::{Point, Step},
        run::Wanted,
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

/// Those who look.
#[derive(Default)]
pub(super) struct Lookers {
    probes: Vec<Probe>,
    pub(super) guards: Vec<Guard>,
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

    /// The graph that those of the body are in.
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

    /// The same of a step that was seen at some time, if the plan is that one's: plans for who looks are others for the next
    /// who does.
    pub fn plan_steps_since(&self, part: PlanPart, seen: Instant) -> &[Step] {
        let is_others = match part {
            PlanPart::Looked | PlanPart::LookedLogits => {
                self.runner.tapped_since().is_some_and(|since| since > seen)
            }
            PlanPart::Body | PlanPart::Logits | PlanPart::Draws | PlanPart::States => false,
        };
        match is_others {
            true => &[],
            false => self.plan_steps(part),
        }
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

    /// Whether whoever looks at a request has room for what a step shows of it, or is not waited for.
    pub(super) fn has_reader(&self, member: &Member) -> bool {
        let (mut probes, mut guards) = (self.lookers.probes.iter(), self.lookers.guards.iter());
        !probes.any(|p| p.member == Some(member.id) && p.waits && p.to.capacity() == 0)
            && !guards.any(|guard| guard.holds_up(member.task.id()))
    }

    /// Those who draw and are looked at, who stand back from a step in which prompts are read: one that somebody looks at takes
    /// longer for each of its rows, and others would wait for it. Nobody does twice in a row, however many prompts come.
    pub(super) fn stand_back(&mut self, able: &[usize]) -> Vec<usize> {
        let (running, guarded) = (&self.running, self.is_guarded());
        let reads = able.iter().any(|at| running[*at].pending() > 1);
        let probes = &mut self.lookers.probes;
        if !reads || guarded {
            probes.iter_mut().for_each(|probe| probe.stood_back = false);
            return Vec::new();
        }
        let stands_back = |at: &usize| {
            let member = running[*at].member.id;
            let draws = running[*at].pending() == 1;
            let (mut looks, mut stood_back) = (false, false);
            let its = |probe: &&mut Probe| probe.member == Some(member);
            for probe in probes.iter_mut().filter(its) {
                // For who has no room a step is not looked at, and who is waited for has no others beside.
                looks |= !probe.waits && probe.to.capacity() > 0;
                stood_back |= probe.stood_back;
            }
            let stands_back = looks && draws && !stood_back;
            for probe in probes.iter_mut().filter(its) {
                probe.stood_back = stands_back;
            }
            stands_back
        };
        able.iter().copied().filter(stands_back).collect()
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

//! Who comes in, and who goes out again when memory is short.

use std::time::Instant;

use hotcell_kernels::backend::DeviceError;
use hotcell_proto::error::{Error, Reason};

use super::{Batch, PATIENCE, Running};
use crate::{
    debug::observer::WaitNote,
    generate::{
        cache::Chain,
        schedule::{Holder, Schedule, Waiting},
        task::Task,
    },
};

/// What became of one that wanted to come in.
enum Admitted {
    Yes,
    /// Not now; others may.
    Later,
    /// There is no room for it, and it is its turn.
    NoRoom,
}

fn alike(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

impl Batch {
    /// Lets waiting ones in, in the order that [`Schedule`] says, while there are tables, and blocks for all tokens
    /// they have so far. One block per running sequence stays free, so that a newcomer is not thrown out again at
    /// once. Those whose readers have no room wait on, and are passed; those inside whose readers have had none for long make
    /// room for others.
    pub(super) fn admit(&mut self, now: Instant) -> Result<(), DeviceError> {
        self.looks_again = None;
        for running in &mut self.running {
            running.stalled = match running.member.task.has_room() {
                true => None,
                false => running.stalled.or(Some(now)),
            };
        }
        let has_room = |&at: &usize| self.waiting[at].task.has_room();
        let mut open: Vec<usize> = (0..self.waiting.len()).filter(has_room).collect();
        while !open.is_empty() && (!self.tables.is_empty() || self.put_back(now)) {
            let waiting: Vec<Waiting<'_>> = (open.iter())
                .map(|&at| Waiting {
                    class: self.waiting[at].task.class(),
                    arrival: self.waiting[at].id,
                })
                .collect();
            let Some(chosen) = self.schedule.next(&waiting) else {
                break;
            };
            let at = open.swap_remove(chosen);
            match self.try_admit(at, now)? {
                Admitted::Yes => {
                    // Places after it moved down by one.
                    for other in open.iter_mut().filter(|other| **other > at) {
                        *other -= 1;
                    }
                }
                Admitted::Later => {}
                Admitted::NoRoom if self.put_back(now) => open.push(at),
                Admitted::NoRoom => break,
            }
        }
        Ok(())
    }

    /// Has one make room whose reader has not read for long: it computes its tokens again when somebody reads. Returns whether
    /// there was one; if one may be there later, it notes when.
    fn put_back(&mut self, now: Instant) -> bool {
        let stalled = |running: &Running| running.stalled.filter(|_| !running.flies);
        let ends = |since: Instant| since + PATIENCE;
        let ripe = |running: &Running| stalled(running).is_some_and(|since| ends(since) <= now);
        let all = 0..self.running.len();
        let victim = all
            .filter(|&at| ripe(&self.running[at]))
            .min_by_key(|&at| holder(&self.running[at]).rank());
        match victim {
            Some(at) => {
                // For what its reader does it is not spared the next time.
                self.preempt(at, self.running[at].member.preempted.max(1));
                true
            }
            None => {
                let soonest = self.running.iter().filter_map(stalled).min();
                self.looks_again = soonest.map(ends);
                false
            }
        }
    }

    /// Has one inside wait again, who has made room so often then.
    fn preempt(&mut self, at: usize, preempted: u32) {
        let mut member = self.remove(at);
        member.preempted = preempted;
        self.tally.preemptions += 1;
        self.waiting.push(member);
    }

    /// Whether this one is about to compute tokens that others wait for.
    fn is_reading(running: &Running) -> bool {
        running.pending() > 1 && running.member.task.has_room()
    }

    /// A chain with what is there already for one that waits, and how many of its tokens that are. None: another one
    /// is about to compute more of them, which it does better to wait for.
    fn begin(&mut self, at: usize) -> Option<(Chain, usize)> {
        let member = &mut self.waiting[at];
        if !member.task.may_skip() {
            return Some((Chain::new(member.root), 0));
        }
        if let Some((id, until)) = member.behind.take() {
            let before = self.running.iter().find(|r| r.member.id == id);
            if before.is_some_and(|r| r.computed < until && Self::is_reading(r)) {
                member.behind = Some((id, until));
                return None;
            }
        }
        let tokens = member.task.tokens();
        let priority = member.task.class().priority;
        let (mut chain, mut cached) = self.cache.open(member.root, tokens, &mut member.keys);
        let block_len = self.runner.shape().block_len;
        let skippable = &tokens[..tokens.len() - 1];
        let mut best = None;
        for other in &self.running {
            if other.chain.root() != member.root {
                continue;
            }
            let common = alike(skippable, other.member.task.tokens());
            if common >= cached.max(other.computed) + block_len
                && Self::is_reading(other)
                && other.member.task.class().priority >= priority
            {
                member.behind = Some((other.member.id, common));
                self.cache.close(chain);
                return None;
            }
            // It may have more than whole blocks.
            let there = common.min(other.computed);
            if there > cached && self.cache.can_fork(&other.chain, there) {
                (cached, best) = (there, Some(other));
            }
        }
        if let Some(other) = best
            && let Some(fork) = self.cache.fork(&other.chain, cached)
        {
            self.cache.close(std::mem::replace(&mut chain, fork));
        }
        Some((chain, cached))
    }

    fn try_admit(&mut self, at: usize, now: Instant) -> Result<Admitted, DeviceError> {
        let Some((mut chain, mut from)) = self.begin(at) else {
            return Ok(Admitted::Later);
        };
        let len = self.waiting[at].task.tokens().len();
        let mut room = self.room(from, len);
        let alone = self.running.is_empty() && self.check.is_none();
        let fits =
            |batch: &Self, chain: &Chain, room| batch.cache.fits(chain, room, batch.running.len());
        if !fits(self, &chain, room) && alone && from > 0 {
            // A copy of what is shared may be what there is no room for.
            let root = chain.root();
            self.cache
                .close(std::mem::replace(&mut chain, Chain::new(root)));
            from = 0;
            room = self.room(from, len);
        }
        if !fits(self, &chain, room) {
            self.cache.close(chain);
            if alone {
                let member = self.waiting.remove(at);
                self.end(member).fail(too_large(len));
            }
            return Ok(Admitted::NoRoom);
        }
        let Some(table) = self.tables.pop() else {
            self.cache.close(chain);
            return Ok(Admitted::NoRoom);
        };
        let ready = self.set_whole_table(table, &chain);
        let ready = ready.and_then(|()| self.make_ready(&mut chain, table, room));
        if !matches!(ready, Ok(true)) {
            self.release(table, chain, None);
            return ready.map(|_| Admitted::NoRoom);
        }
        let mut member = self.waiting.remove(at);
        self.schedule.worked(member.task.class(), len - from);
        if member.preempted == 0
            && let Task::Generate(sequence) = &member.task
        {
            self.tally.prompt += sequence.prompt_len() as u64;
            self.tally.cached += from.min(sequence.prompt_len()) as u64;
        }
        if self.observer.is_watched() && member.preempted == 0 && !member.task.id().is_empty() {
            let took = member.task.age(now);
            self.observer.note_wait(WaitNote {
                request: member.task.id().to_owned(),
                begun: now.checked_sub(took).unwrap_or(now),
                took,
            });
        }
        member.keys = Vec::new();
        member.task.start(from, now);
        self.running.push(Running {
            slot: self.blackbox.begin(member.task.id()),
            member,
            computed: from,
            table,
            chain,
            guesses: Vec::new(),
            given_up: 0,
            flies: false,
            stalled: None,
        });
        Ok(Admitted::Yes)
    }

    fn set_whole_table(&mut self, table: usize, chain: &Chain) -> Result<(), DeviceError> {
        for kind in 0..self.runner.windows().len() {
            match chain.blocks(kind) {
                [] => {}
                blocks => self.runner.set_table(kind, table, 0, blocks)?,
            }
        }
        Ok(())
    }

    /// Gives every running sequence blocks for the tokens it has. When none is left, [`Schedule::victim`] says who goes
    /// back to the queue; it computes its tokens again later, which changes no bit of what follows.
    pub(super) fn grow(&mut self) -> Result<(), DeviceError> {
        let mut at = 0;
        while at < self.running.len() {
            let running = &self.running[at];
            let (from, len) = (running.computed, running.member.task.tokens().len());
            let room = self.room(from, len);
            let running = &mut self.running[at];
            let (table, mut chain) = (running.table, std::mem::take(&mut running.chain));
            let ready = self.make_ready(&mut chain, table, room);
            self.running[at].chain = chain;
            if ready? {
                at += 1;
                continue;
            }
            if !self.flights.is_empty() {
                // Nobody with rows on their way makes room, and some of them may be about to leave.
                self.end_steps(0)?;
                at = 0;
                continue;
            }
            let holders: Vec<Holder> = self.running.iter().map(holder).collect();
            let Some(victim) = Schedule::victim(&holders, at) else {
                return Ok(());
            };
            let alone = self.running.len() == 1 && self.check.is_none();
            if alone {
                let member = self.remove(victim);
                self.end(member).fail(too_large(len));
                return Ok(());
            }
            self.preempt(victim, self.running[victim].member.preempted + 1);
            // Places after the victim moved down by one.
            at -= usize::from(victim < at);
        }
        Ok(())
    }
}

fn holder(running: &Running) -> Holder {
    Holder {
        priority: running.member.task.class().priority,
        arrival: running.member.id,
        preempted: running.member.preempted,
        stalled: !running.member.task.has_room(),
    }
}

fn too_large(tokens: usize) -> Error {
    Error::new(
        Reason::OutOfMemory,
        format!("the worker's cache has no room for a request of {tokens} tokens, even alone"),
    )
}

//! The batch of one model: which sequences compute which rows in the next step.
//!
//! A sequence is its tokens and how many of them are in the cache. The rows of a step are tokens that
//! are not: one for a sequence that decodes, a chunk for one that reads its prompt. Nothing that a row
//! computes depends on the others, so requests may join and leave at every step.

use std::{collections::VecDeque, time::Instant};

use hotcell_ipc::blackbox::{Slot, Writer};
use hotcell_kernels::backend::DeviceError;
use hotcell_proto::error::{Error, Reason};

use super::{
    blocks::BlockPool,
    check::{self, Check},
    sampler,
    sequence::Sequence,
};
use crate::{
    error::{of_device, of_sampling},
    model::run::{Row, Runner},
};

/// A sequence with a table and blocks.
struct Running {
    sequence: Sequence,
    table: usize,
    blocks: Vec<i32>,
    /// Its place in the black box, if there was one.
    slot: Option<Slot>,
}

/// Sequences of one model.
pub struct Batch {
    runner: Runner,
    pool: BlockPool,
    tables: Vec<usize>,
    waiting: VecDeque<Sequence>,
    running: Vec<Running>,
    check: Option<Check>,
    rows: Vec<Row>,
    /// Per pick: which running sequence draws from it, and its row.
    picks: Vec<(usize, usize)>,
    pick_rows: Vec<usize>,
    logits: Vec<f32>,
    blackbox: Writer,
}

impl Batch {
    /// No sequences yet.
    pub fn new(runner: Runner, blackbox: Writer) -> Self {
        let shape = *runner.shape();
        Self {
            pool: BlockPool::new(shape.blocks),
            tables: (0..shape.max_sequences).rev().collect(),
            waiting: VecDeque::new(),
            running: Vec::with_capacity(shape.max_sequences),
            check: None,
            rows: Vec::with_capacity(shape.max_rows),
            picks: Vec::with_capacity(shape.max_sequences),
            pick_rows: Vec::with_capacity(shape.max_sequences),
            logits: vec![0.0; runner.vocab()],
            blackbox,
            runner,
        }
    }

    /// Adds a sequence at the end of the queue.
    pub fn push(&mut self, sequence: Sequence) {
        self.waiting.push_back(sequence);
    }

    /// Sequences inside.
    pub fn len(&self) -> usize {
        self.waiting.len() + self.running.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
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
        let needed = Check::blocks(&shape, steps);
        // As for a newcomer: a block for every running sequence stays free.
        if self.tables.is_empty() || self.pool.free() < needed + self.running.len() {
            return refuse("there is no room for a check now", reply);
        }
        let (Some(table), Some(blocks)) = (self.tables.pop(), self.pool.take(needed)) else {
            return refuse("there is no room for a check now", reply);
        };
        if let Err(error) = self.runner.set_table(table, 0, &blocks) {
            self.release(table, blocks, None);
            let _ = reply.send(Err(of_device(&error)));
            return;
        }
        self.check = Some(Check::new(&shape, steps, table, blocks, reply));
    }

    /// Whether a known answer is being computed.
    pub fn is_checking(&self) -> bool {
        self.check.is_some()
    }

    /// Computes a step of the known answer. Returns whether there was one to compute.
    pub fn check_step(&mut self) -> bool {
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
        let (table, blocks) = check.end(failure);
        self.release(table, blocks, None);
        true
    }

    /// The nearest deadline.
    pub fn next_deadline(&self) -> Option<Instant> {
        let running = self.running.iter().map(|r| &r.sequence);
        running
            .chain(&self.waiting)
            .filter_map(Sequence::deadline)
            .min()
    }

    /// Ends every sequence with an error.
    pub fn fail_all(&mut self, error: &Error) {
        for running in std::mem::take(&mut self.running) {
            self.release(running.table, running.blocks, running.slot);
            running.sequence.fail(error.clone());
        }
        for sequence in std::mem::take(&mut self.waiting) {
            sequence.fail(error.clone());
        }
        if let Some(check) = self.check.take() {
            let (table, blocks) = check.end(Some(error.clone()));
            self.release(table, blocks, None);
        }
    }

    fn release(&mut self, table: usize, blocks: Vec<i32>, slot: Option<Slot>) {
        if let Some(slot) = slot {
            self.blackbox.end(slot);
        }
        self.tables.push(table);
        self.pool.give(blocks);
    }

    fn remove(&mut self, index: usize) -> Sequence {
        let Running {
            sequence,
            table,
            blocks,
            slot,
        } = self.running.remove(index);
        self.release(table, blocks, slot);
        sequence
    }

    /// Takes out what nobody waits for any more: abandoned streams and passed deadlines.
    fn sweep(&mut self, now: Instant) {
        let over = |s: &Sequence| s.is_abandoned() || s.deadline().is_some_and(|d| d <= now);
        let late = |s: Sequence| {
            // To an abandoned stream this goes nowhere.
            s.fail(Error::new(
                Reason::DeadlineExceeded,
                "the request's deadline passed",
            ));
        };
        for i in (0..self.running.len()).rev() {
            if over(&self.running[i].sequence) {
                late(self.remove(i));
            }
        }
        for i in (0..self.waiting.len()).rev() {
            if over(&self.waiting[i])
                && let Some(sequence) = self.waiting.remove(i)
            {
                late(sequence);
            }
        }
    }

    /// Starts waiting sequences in the order of arrival, while there are tables and blocks for all tokens
    /// they have so far. One block per running sequence stays free, so that a newcomer is not thrown out
    /// again at once. Those whose readers have no room wait on, and are passed.
    fn admit(&mut self, now: Instant) -> Result<(), DeviceError> {
        let mut at = 0;
        while let (Some(next), false) = (self.waiting.get(at), self.tables.is_empty()) {
            if !next.has_room() {
                at += 1;
                continue;
            }
            let needed = next.tokens().len().div_ceil(self.runner.shape().block_len);
            if self.pool.free() < needed + self.running.len() {
                break;
            }
            let (Some(table), Some(blocks)) = (self.tables.pop(), self.pool.take(needed)) else {
                break;
            };
            if let Err(error) = self.runner.set_table(table, 0, &blocks) {
                self.release(table, blocks, None);
                return Err(error);
            }
            if let Some(mut sequence) = self.waiting.remove(at) {
                sequence.start(now);
                self.running.push(Running {
                    slot: self.blackbox.begin(sequence.id()),
                    sequence,
                    table,
                    blocks,
                });
            }
        }
        Ok(())
    }

    /// Gives every running sequence blocks for the tokens it has, oldest first. When none is left, a
    /// sequence whose reader has no room goes back to the queue, else the youngest; it computes its
    /// tokens again later, which changes no bit of what follows.
    fn grow(&mut self) -> Result<(), DeviceError> {
        let block_len = self.runner.shape().block_len;
        let mut i = 0;
        while i < self.running.len() {
            let running = &self.running[i];
            let (table, have) = (running.table, running.blocks.len());
            let missing = running
                .sequence
                .tokens()
                .len()
                .div_ceil(block_len)
                .saturating_sub(have);
            match self.pool.take(missing) {
                Some(more) => {
                    if missing > 0 {
                        self.runner.set_table(table, have, &more)?;
                        self.running[i].blocks.extend(more);
                    }
                    i += 1;
                }
                None => {
                    let stalled = |r: &Running| !r.sequence.has_room();
                    let victim = (0..self.running.len())
                        .rev()
                        .find(|&v| v != i && stalled(&self.running[v]));
                    let victim = victim.unwrap_or(self.running.len() - 1);
                    let mut sequence = self.remove(victim);
                    sequence.computed = 0;
                    self.waiting.push_front(sequence);
                    // Indices after the victim moved down by one.
                    i -= usize::from(victim < i);
                }
            }
        }
        Ok(())
    }

    /// Fills `rows` and `picks`: sequences with one token to compute first, prompts in what is left.
    fn gather(&mut self) {
        self.rows.clear();
        self.picks.clear();
        let shape = *self.runner.shape();
        let pending = |r: &Running| r.sequence.tokens().len() - r.sequence.computed;
        for decoding in [true, false] {
            for (i, running) in self.running.iter().enumerate() {
                let count = pending(running).min(shape.max_rows - self.rows.len());
                if (pending(running) == 1) != decoding || count == 0 || !running.sequence.has_room()
                {
                    continue;
                }
                let first = running.sequence.computed;
                for position in first..first + count {
                    let block = running.blocks[position / shape.block_len] as usize;
                    self.rows.push(Row {
                        token: running.sequence.tokens()[position],
                        position,
                        sequence: running.table,
                        slot: block * shape.block_len + position % shape.block_len,
                    });
                }
                if count == pending(running) {
                    self.picks.push((i, self.rows.len() - 1));
                }
            }
        }
    }

    /// Computes one step. Returns whether there was something to compute.
    pub fn step(&mut self) -> bool {
        let now = Instant::now();
        self.sweep(now);
        if let Err(error) = self.admit(now).and_then(|()| self.grow()) {
            self.fail_all(&of_device(&error));
            return true;
        }
        self.gather();
        if self.rows.is_empty() {
            return false;
        }
        self.pick_rows.clear();
        self.pick_rows
            .extend(self.picks.iter().map(|&(_, row)| row));
        if let Err(error) = self.runner.step(&self.rows, &self.pick_rows) {
            tracing::error!(%error, "a step failed; its requests end");
            self.fail_all(&of_device(&error));
            return true;
        }
        for row in &self.rows {
            let running = self.running.iter_mut().find(|r| r.table == row.sequence);
            if let Some(running) = running {
                running.sequence.computed = row.position + 1;
            }
        }
        self.blackbox.stepped();
        for running in &self.running {
            if let Some(slot) = &running.slot {
                self.blackbox.computed(slot, running.sequence.computed);
            }
        }
        self.draw();
        true
    }

    /// Draws a token for every pick, and ends the sequences that are at their end.
    fn draw(&mut self) {
        let mut ended = Vec::new();
        for (pick, &(i, _)) in self.picks.iter().enumerate() {
            let sequence = &mut self.running[i].sequence;
            let position = u32::try_from(sequence.tokens().len()).unwrap_or(u32::MAX);
            let drawn = match self.runner.logits(pick, &mut self.logits) {
                Ok(()) => {
                    let (params, state) = sequence.sampler();
                    sampler::sample(params, state, &mut self.logits, position)
                        .map_err(|e| of_sampling(&e))
                }
                Err(error) => Err(of_device(&error)),
            };
            match drawn {
                Ok(sampled) => {
                    if let Some(end) = sequence.accept(&sampled, Instant::now()) {
                        ended.push((i, Ok(end)));
                    }
                }
                Err(error) => ended.push((i, Err(error))),
            }
        }
        // From the end, so that indices stay right.
        ended.sort_by_key(|(i, _)| std::cmp::Reverse(*i));
        for (i, end) in ended {
            let sequence = self.remove(i);
            match end {
                Ok(end) => sequence.finish(end, Instant::now()),
                Err(error) => sequence.fail(error),
            }
        }
    }
}

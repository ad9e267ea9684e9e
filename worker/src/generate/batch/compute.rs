//! A step: its rows, what the model makes of them, and what is drawn.

use std::time::{Duration, Instant};

use hotcell_kernels::backend::DeviceError;
use hotcell_proto::error::Error;

use super::{Batch, Flight, Part, Running};
use crate::{
    debug::observer::StepNote,
    error::of_device,
    generate::{
        cache::Room,
        lookup,
        pace::Load,
        sampler::Sampled,
        schedule::{Budget, Want},
        sequence::End,
        task::Task,
    },
    model::run::Row,
};

/// How long a step may take in which some read prompts while others draw, or come one after another: the pause between
/// two tokens of a stream, and what one that comes waits at most before it has a part in a step.
const PATIENCE: Duration = Duration::from_millis(60);

/// Rows of prompts that there is always time for.
const LEAST: usize = 16;

/// A short prompt alone.
const SHORT: Load = Load {
    rows: LEAST,
    attended: LEAST * (LEAST + 1) / 2,
};

/// How long, where some come one after another, of what a [`SHORT`] prompt takes alone: it may have to wait for a whole
/// step and be part of a second one, and is to take no more than three times as long.
const COMPANY: f64 = 1.4;

/// How a task ended.
pub(super) enum Outcome {
    Drawn(End),
    Read,
    Failed(Error),
}

impl Batch {
    /// Begins a step of those who have none on its way, where there is anything to compute, and ends as many as leave room for
    /// `lanes` - 1 others. Returns whether there was something to do.
    pub(super) fn advance(&mut self, now: Instant, lanes: usize) -> Result<bool, DeviceError> {
        let more = lanes.saturating_sub(1);
        let mut worked = self.end_steps(more)?;
        self.sweep(now);
        self.admit(now)?;
        self.grow()?;
        self.gather(lanes)?;
        let begins = !self.rows.is_empty();
        if begins {
            self.begin_step(now)?;
        }
        // One that is alone ends at once, and where all wait for steps, the oldest one ends.
        let most = match begins {
            true if more == 0 => 0,
            true => lanes,
            false => self.flights.len().saturating_sub(1),
        };
        worked |= self.end_steps(most)?;
        Ok(worked || begins)
    }

    /// Ends steps, the oldest first, until no more than so many are on their way. Returns whether there was one.
    pub(super) fn end_steps(&mut self, most: usize) -> Result<bool, DeviceError> {
        let mut worked = false;
        while self.flights.len() > most
            && let Some(flight) = self.flights.pop_front()
        {
            self.end_step(flight)?;
            worked = true;
        }
        Ok(worked)
    }

    /// Fills `rows`, `parts` and `pick_rows`.
    fn gather(&mut self, lanes: usize) -> Result<(), DeviceError> {
        self.rows.clear();
        self.parts.clear();
        self.pick_rows.clear();
        let shape = *self.runner.shape();
        if !self.lookers.is_empty() {
            self.aim();
        }
        let able = |at: &usize| {
            let running = &self.running[*at];
            running.pending() > 0
                && running.member.task.has_room()
                && (self.lookers.is_empty() || self.has_reader(&running.member))
        };
        let able: Vec<usize> = (0..self.running.len()).filter(able).collect();
        if able.iter().all(|&at| self.running[at].flies) {
            return Ok(());
        }
        let stands_back = match self.lookers.is_empty() {
            true => Vec::new(),
            false => self.stand_back(&able),
        };
        // Others are as patient with them as with those whose step is on its way.
        let away = |at: usize| self.running[at].flies || stands_back.contains(&at);
        let wants: Vec<Want<'_>> = (able.iter())
            .map(|&at| Want {
                id: self.running[at].member.id,
                class: self.running[at].member.task.class(),
                arrival: self.running[at].member.id,
                pending: self.running[at].pending(),
                flies: away(at),
            })
            .collect();
        // Who draws, and how far the prompt is of which most was read.
        let (mut draws, mut flying, mut deepest) = (Load::default(), Load::default(), 0);
        for &at in &able {
            let computed = self.running[at].computed;
            match self.running[at].pending() {
                1 => {
                    let load = if away(at) { &mut flying } else { &mut draws };
                    load.rows += 1;
                    load.attended += computed;
                }
                _ => deepest = deepest.max(computed),
            }
        }
        // Those on their way wait for this step as well.
        let waiting = Load {
            rows: draws.rows + flying.rows,
            attended: draws.attended + flying.attended,
        };
        let beside = self.pace.rows_beside(waiting, deepest, PATIENCE);
        let most = self.runner.most_rows();
        // Large steps read a prompt fastest, and are for those who are alone.
        let rows = match self.expects_company(Instant::now()) {
            true => {
                let short = self.pace.step(SHORT);
                let patience = short.map_or(PATIENCE, |short| short.mul_f64(COMPANY).min(PATIENCE));
                let rows = self.pace.rows_beside(waiting, deepest, patience);
                // An estimate may be wrong, but not by so much at once.
                let most = 2 * self.before.max(LEAST);
                let rows = rows.map(|rows| rows.min(most).max(LEAST));
                rows.map_or(most, |rows| rows.saturating_add(draws.rows))
            }
            false => most,
        };
        // Those who draw come in as many groups as there are lanes.
        let budget = Budget {
            rows: rows.min(most),
            beside: beside.unwrap_or(most).max(LEAST),
            draws: waiting.rows.div_ceil(lanes),
        };
        let grants = self.schedule.grant(&wants, budget);
        let mut free = most - grants.iter().map(|g| g.1).sum::<usize>();
        let ends = |&&(i, rows): &&(usize, usize)| rows == self.running[able[i]].pending();
        let drawing = grants.iter().filter(ends).count();
        let mut picks = shape.max_sequences.saturating_sub(drawing);
        // Rows of prompts are worth more than guesses.
        let guesses = grants.iter().all(|g| g.1 == 1);
        self.guess_cost = self.pace.guess_cost(Load {
            rows: grants.len().max(1),
            ..draws
        });
        for (i, rows) in grants {
            let at = able[i];
            self.running[at].guesses.clear();
            if guesses && self.running[at].pending() == 1 {
                let most = free.min(picks);
                self.guess(at, most)?;
                free -= self.running[at].guesses.len();
                picks -= self.running[at].guesses.len();
            }
            self.place(at, rows);
        }
        Ok(())
    }

    /// Guesses tokens for a sequence that draws, where there is room for them without anyone making any.
    fn guess(&mut self, at: usize, most: usize) -> Result<(), DeviceError> {
        let Running {
            member,
            computed,
            chain,
            ..
        } = &self.running[at];
        let Task::Generate(sequence) = &member.task else {
            return Ok(());
        };
        // Of a token that is looked at there is one row.
        if !sequence.speculates() || self.is_probed(member.id) {
            return Ok(());
        }
        let most = most
            .min(member.pays.most(self.guess_cost))
            .min(sequence.more());
        if most == 0 {
            return Ok(());
        }
        let guesses = lookup::guess(sequence.tokens(), most);
        let room = Room::all(*computed, sequence.tokens().len() + guesses.len());
        if guesses.is_empty() || !self.cache.fits(chain, room, self.running.len()) {
            return Ok(());
        }
        let running = &mut self.running[at];
        let (table, mut chain) = (running.table, std::mem::take(&mut running.chain));
        let ready = self.make_ready(&mut chain, table, room);
        self.running[at].chain = chain;
        if ready? {
            self.running[at].guesses = guesses;
        }
        Ok(())
    }

    /// Adds a sequence's next rows, and those of its guesses, to the step.
    fn place(&mut self, at: usize, rows: usize) {
        let block_len = self.runner.shape().block_len;
        let Running {
            member,
            computed,
            table,
            chain,
            guesses,
            ..
        } = &self.running[at];
        let first = self.rows.len();
        let tokens = &member.task.tokens()[*computed..*computed + rows];
        for (i, &token) in tokens.iter().chain(guesses).enumerate() {
            let position = computed + i;
            let slot = |kind| {
                // A kind that the model has not has no blocks, and nobody looks there.
                let block = chain.blocks(kind).get(position / block_len);
                block.map_or(0, |&b| b as usize * block_len + position % block_len)
            };
            self.rows.push(Row {
                token,
                position,
                sequence: *table,
                slots: std::array::from_fn(slot),
            });
        }
        let ends = computed + rows == member.task.tokens().len();
        let draws = ends && matches!(member.task, Task::Generate(_));
        let pick = draws.then_some(self.pick_rows.len());
        // A prompt's last row may come alone, and its first token is drawn from it.
        let known = member.task.tokens().len();
        let reads = known - computed > 1 || !draws || known <= member.task.prompt_len();
        if draws {
            self.pick_rows.extend(first + rows - 1..self.rows.len());
        }
        self.parts.push(Part {
            id: member.id,
            at,
            first,
            rows,
            pick,
            reads,
        });
    }

    /// Begins to compute the rows.
    fn begin_step(&mut self, made: Instant) -> Result<(), DeviceError> {
        let looked = !self.lookers.is_empty() && self.begin_looking();
        let begun = Instant::now();
        self.lend_grammars();
        let followed = self.follows;
        if followed {
            self.follow();
        }
        self.before = self.rows.len();
        for part in &self.parts {
            self.running[part.at].flies = true;
        }
        self.flights.push_back(Flight {
            parts: std::mem::take(&mut self.parts),
            load: Load {
                rows: self.rows.len(),
                attended: self.rows.iter().map(|row| row.position + 1).sum(),
            },
            guess_cost: self.guess_cost,
            looked,
            followed,
            made,
            begun,
        });
        self.runner.begin(&self.rows, &self.pick_rows)
    }

    /// After a step: has what other processes did in it noted, which tell it once they have ended those that have begun.
    fn note_elsewhere(&mut self, followed: bool) -> Result<(), DeviceError> {
        self.answers_after = match self.answers_after {
            Some(steps) => Some(steps.saturating_sub(1)),
            None if followed => {
                self.runner.ask_elsewhere();
                Some(self.flights.len())
            }
            None => None,
        };
        if self.answers_after == Some(0) {
            self.answers_after = None;
            let noted = self.runner.noted_elsewhere()?;
            self.observer.note_nodes(&noted);
        }
        Ok(())
    }

    /// Has what the next plans do noted.
    fn follow(&mut self) {
        self.runner.follow(self.blackbox.trail().1);
    }

    /// Tells of what was noted, and notes no more.
    fn tell_followed(&mut self) {
        if let Some(nodes) = self.runner.followed() {
            self.observer.note_nodes(&nodes);
        }
    }

    /// Waits for what was begun, and takes what comes out.
    fn end_step(&mut self, flight: Flight) -> Result<(), DeviceError> {
        let Flight {
            parts,
            load,
            guess_cost,
            looked,
            followed,
            made,
            begun,
        } = flight;
        (self.parts, self.guess_cost) = (parts, guess_cost);
        // Places may have moved: some have left since. These could not.
        let running = &self.running;
        let is_of = |r: &Running, part: &Part| r.member.id == part.id;
        (self.parts).retain_mut(|part| {
            let stays = running.get(part.at).is_some_and(|r| is_of(r, part));
            let place = match stays {
                true => Some(part.at),
                false => running.iter().position(|r| is_of(r, part)),
            };
            part.at = place.unwrap_or(part.at);
            place.is_some()
        });
        self.want_drawn();
        // A step is noted wholly or not at all: its end alone would look like all that it did. Between its beginning and
        // its end, others may have ended and begun.
        match followed {
            true => self.follow(),
            false => self.tell_followed(),
        }
        let ended = self.runner.finish();
        self.return_grammars();
        self.runner.use_tap(false);
        // Of one that waited for the step before it, what it took beyond that.
        let beyond = |then: Instant| self.ended.map_or(then, |before| before.max(then));
        let (made, since) = (beyond(made), beyond(begun));
        let time = since.elapsed();
        self.ended = Some(Instant::now());
        let note = StepNote {
            begun: made,
            whole: Duration::ZERO,
            computing: time,
            computing_from: since,
            rows: load.rows,
            reading: (self.parts.iter().filter(|part| part.reads))
                .map(|part| part.rows)
                .sum(),
            sequences: self.parts.len(),
            drawn: 0,
        };
        self.drawn = 0;
        self.tell_followed();
        for part in &self.parts {
            self.running[part.at].flies = false;
        }
        let taken = ended.and_then(|()| {
            self.pace.note(load, time);
            self.blackbox.stepped();
            self.take(load.rows, looked)?;
            self.note_elsewhere(followed)
        });
        if self.observer.is_watched() {
            self.observer.note(StepNote {
                whole: made.elapsed(),
                drawn: self.drawn,
                ..note
            });
        }
        taken
    }

    /// Takes what came of the step: draws tokens, and lets those go who are done.
    fn take(&mut self, rows: usize, looked: bool) -> Result<(), DeviceError> {
        let mut ended = Vec::new();
        if looked {
            self.guard(rows, &mut ended)?;
        }
        let stopped = ended.len();
        self.read(&mut ended)?;
        for part in std::mem::take(&mut self.parts) {
            if ended.iter().take(stopped).any(|(at, _)| *at == part.at) {
                // Nobody else is to find in the cache what went wrong.
                continue;
            }
            let seen = self.peek(&part)?;
            let running = &mut self.running[part.at];
            running.computed += part.rows;
            if let Some(pick) = part.pick
                && let Some(outcome) = self.draw(part.at, pick)
            {
                ended.push((part.at, outcome));
            }
            self.tell_probes(part.at, seen);
            self.settle(part.at);
        }
        // From the end, so that places stay right. The first outcome of each is the one that it has.
        ended.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
        ended.dedup_by_key(|(at, _)| *at);
        for (at, outcome) in ended {
            let member = self.remove(at);
            match (self.end(member), outcome) {
                (Task::Generate(sequence), Outcome::Drawn(end)) => {
                    sequence.finish(end, Instant::now());
                }
                (task, Outcome::Failed(error)) => task.fail(error),
                (Task::Embed(reading), _) => reading.finish(),
                (Task::Generate(_), Outcome::Read) => {}
            }
        }
        Ok(())
    }

    /// Has the device draw, where it can, for whom no more is wanted than a draw.
    fn want_drawn(&mut self) {
        if !self.runner.draws() {
            return;
        }
        let (running, parts) = (&self.running, &self.parts);
        let draws = parts.iter().filter(|part| part.pick.is_some());
        let wanted = draws.flat_map(|part| {
            let Running {
                member, guesses, ..
            } = &running[part.at];
            (0..=guesses.len()).map(|i| match &member.task {
                Task::Generate(sequence) => sequence.plain_draw(i),
                Task::Embed(_) => None,
            })
        });
        self.runner.want_drawn(wanted);
    }

    /// Lets masks that take their time be computed beside the model.
    fn lend_grammars(&mut self) {
        let most = self.runner.shape().max_sequences;
        for part in self.parts.iter().filter(|part| part.pick.is_some()) {
            if let Task::Generate(sequence) = &mut self.running[part.at].member.task
                && let Some(grammar) = sequence.lend_grammar()
            {
                match self.masks.lend(part.id, grammar, most) {
                    Some(grammar) => sequence.return_grammar(grammar),
                    None => self.lent.push(part.id),
                }
            }
        }
    }

    /// Waits for the grammars of the step that ends.
    fn return_grammars(&mut self) {
        let is_away = |own: &Self| own.parts.iter().any(|part| own.lent.contains(&part.id));
        while is_away(self) && self.return_grammar() {}
    }

    /// Waits for a grammar that is away. False: none is.
    pub(super) fn return_grammar(&mut self) -> bool {
        let Some((id, grammar)) = self.masks.back() else {
            self.lent.clear();
            return false;
        };
        self.lent.retain(|away| *away != id);
        let mut running = self.running.iter_mut();
        if let Some(running) = running.find(|running| running.member.id == id)
            && let Task::Generate(sequence) = &mut running.member.task
        {
            sequence.return_grammar(grammar);
        }
        true
    }

    /// Draws a token, and one more for each guess that was right. Says how the sequence ended, if it did.
    fn draw(&mut self, at: usize, pick: usize) -> Option<Outcome> {
        let Running {
            member,
            computed,
            guesses,
            given_up,
            ..
        } = &mut self.running[at];
        let Task::Generate(sequence) = &mut member.task else {
            return None;
        };
        let mut right = 0;
        let outcome = loop {
            let drawn = match self.runner.drawn(pick + right) {
                Some(token) => Ok(Sampled::plain(token)),
                None => {
                    let logits = &mut self.logits;
                    let drawn = self.runner.logits(pick + right, logits);
                    (drawn.map_err(|e| of_device(&e))).and_then(|()| sequence.draw(logits))
                }
            };
            let sampled = match drawn {
                Ok(sampled) => sampled,
                Err(error) => break Some(Outcome::Failed(error)),
            };
            if let Some(end) = sequence.accept(&sampled, Instant::now()) {
                break Some(Outcome::Drawn(end));
            }
            if guesses.get(right) != Some(&sampled.token) {
                break None;
            }
            // Its row was computed with the right token: it is in the cache.
            right += 1;
            *computed += 1;
        };
        let guessed = guesses.len() + std::mem::take(given_up);
        let drawn = right + 1;
        if outcome.is_none() {
            member.pays.note(guessed, right, drawn, self.guess_cost);
        }
        self.drawn += drawn;
        self.tally.guessed += guessed as u64;
        self.tally.right += right as u64;
        guesses.clear();
        self.schedule.worked(member.task.class(), drawn);
        outcome
    }

    /// Takes the states that embeddings need.
    fn read(&mut self, ended: &mut Vec<(usize, Outcome)>) -> Result<(), DeviceError> {
        let mut rows = Vec::new();
        for part in &self.parts {
            let running = &self.running[part.at];
            if let Task::Embed(reading) = &running.member.task {
                let from = running.computed;
                let needs = reading.needs(from, from + part.rows);
                rows.extend(needs.map(|position| part.first + position - from));
            }
        }
        self.runner.finish_states(&rows)?;
        let mut next = 0;
        for part in &self.parts {
            let running = &mut self.running[part.at];
            let from = running.computed;
            let all = from + part.rows == running.member.task.tokens().len();
            if let Task::Embed(reading) = &mut running.member.task {
                for _ in reading.needs(from, from + part.rows) {
                    self.runner.state(next, &mut self.state)?;
                    reading.push(&self.state);
                    next += 1;
                }
                if all {
                    ended.push((part.at, Outcome::Read));
                }
            }
        }
        Ok(())
    }

    /// Lets others find what is in the cache now, and gives back what nobody looks at any more.
    fn settle(&mut self, at: usize) {
        let Running {
            member,
            computed,
            chain,
            slot,
            ..
        } = &mut self.running[at];
        let (tokens, tenant) = (member.task.tokens(), &member.task.class().tenant);
        self.cache.publish(chain, tokens, *computed, tenant);
        self.cache.trim(chain, *computed);
        if let Some(slot) = slot {
            self.blackbox.computed(slot, *computed);
        }
    }
}

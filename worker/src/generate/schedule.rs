//! Who comes in, who computes how many rows of the next step, and who makes room: decisions without effects.
//!
//! What is decided here changes when a token comes, never which: nothing that a row computes depends on the others.
//!
//! Sequences that draw compute a row in each step, or, where several steps are on their way, in one of them. What is left of the step is for prompts, in pieces of
//! [`PIECE`] rows, each for the tenant and priority that got the least so far ([`Shares`]); among requests of one
//! class for the one that has the least left, and one in [`TURNS`] for the oldest one, so that a short prompt need not
//! wait for a long one, nor a long one for ever. A piece that would keep a prompt from ending with the step may come later.

use std::{cmp::Reverse, collections::BTreeMap};

use super::fair::{Class, Shares};

/// Rows that a prompt gets at once.
const PIECE: usize = 8;
/// One in so many pieces is the oldest request's, the others are that one's that has the least left.
const TURNS: u64 = 4;
/// Part of a step that is for prompts if there are any.
const PROMPTS: usize = 4;

/// A sequence in the batch that can compute.
#[derive(Clone, Debug)]
pub struct Want<'a> {
    /// Names it.
    pub id: u64,
    /// Whose it is.
    pub class: &'a Class,
    /// Orders requests by arrival.
    pub arrival: u64,
    /// Tokens that are not computed: one, if it draws.
    pub pending: usize,
    /// Whether some of them are in a step on its way: it has no part in the next one.
    pub flies: bool,
}

/// How large the next step may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Rows in all.
    pub rows: usize,
    /// Rows of prompts in a step in which others draw, or while others do.
    pub beside: usize,
    /// Rows of sequences that draw.
    pub draws: usize,
}

/// A sequence that waits to come in.
#[derive(Clone, Debug)]
pub struct Waiting<'a> {
    /// Whose it is.
    pub class: &'a Class,
    /// Orders requests by arrival.
    pub arrival: u64,
}

/// A sequence that holds blocks.
#[derive(Clone, Copy, Debug)]
pub struct Holder {
    /// Its priority.
    pub priority: u32,
    /// Orders requests by arrival.
    pub arrival: u64,
    /// How often it made room already.
    pub preempted: u32,
    /// Whether it cannot go on now, because its reader does not read.
    pub stalled: bool,
}

impl Holder {
    /// Whoever has the least makes room first: the one of the lowest priority, of these the latest. Whoever made room counts one
    /// priority higher each time, so that it is the others' turn at last.
    pub fn rank(&self) -> (u64, Reverse<u64>) {
        let priority = u64::from(self.priority) + u64::from(self.preempted);
        (priority, Reverse(self.arrival))
    }
}

/// Remembers who got what.
#[derive(Debug, Default)]
pub struct Schedule {
    /// Work of those inside, by which others are let in.
    work: Shares,
    /// Rows of prompts.
    prompts: Shares,
    /// Sequences that read their prompts, as of the last step.
    reading: BTreeMap<u64, Class>,
    /// When each sequence that draws had its last turn.
    served: BTreeMap<u64, u64>,
    turns: u64,
    steps: u64,
    /// Of each class of which several read prompts.
    contests: BTreeMap<Class, Contest>,
}

/// Prompts of one class beside each other.
#[derive(Clone, Copy, Debug, Default)]
struct Contest {
    /// Pieces for which the oldest one was not the one that had the least left.
    pieces: u64,
    /// Pieces that the oldest one is still to get.
    owed: u64,
}

impl Schedule {
    /// A request has come.
    pub fn arrived(&mut self, class: &Class) {
        self.work.enter(class);
    }

    /// It is gone.
    pub fn left(&mut self, class: &Class) {
        self.work.leave(class);
    }

    /// So many tokens are computed for it: its prompt's when it comes in, and those that it draws.
    pub fn worked(&mut self, class: &Class, tokens: usize) {
        self.work.charge(class, tokens);
    }

    /// Which of those who wait is next: the oldest one of the class that got the least.
    pub fn next(&self, waiting: &[Waiting<'_>]) -> Option<usize> {
        let class = self.work.next(waiting.iter().map(|w| w.class))?;
        (0..waiting.len())
            .filter(|&i| waiting[i].class == class)
            .min_by_key(|&i| waiting[i].arrival)
    }

    /// Which of those who hold blocks makes room for one of them: one that is stalled, else any, by [rank](Holder::rank). It may
    /// be `needy` itself.
    pub fn victim(holders: &[Holder], needy: usize) -> Option<usize> {
        let stalled = |i: usize| i != needy && holders[i].stalled;
        (0..holders.len()).min_by_key(|&i| (!stalled(i), holders[i].rank()))
    }

    /// How many rows each computes in the next step, by place in `wants`: first those that draw, then prompts.
    pub fn grant(&mut self, wants: &[Want<'_>], budget: Budget) -> Vec<(usize, usize)> {
        self.steps += 1;
        self.note(wants);
        let here = (0..wants.len()).filter(|&i| !wants[i].flies);
        let (mut draw, read): (Vec<usize>, Vec<usize>) = here.partition(|&i| wants[i].pending <= 1);
        draw.retain(|&i| wants[i].pending == 1);
        // Who computed longest ago goes first, where there is not room for all.
        let served = &self.served;
        let last = |i: usize| served.get(&wants[i].id).copied().unwrap_or(0);
        draw.sort_by_key(|&i| (last(i), wants[i].arrival));
        let for_prompts = match (read.is_empty(), budget.rows) {
            (true, _) => 0,
            (false, 1) => usize::from(self.steps.is_multiple_of(2)),
            (false, rows) => rows.div_ceil(PROMPTS),
        };
        draw.truncate((budget.rows - for_prompts.min(budget.rows)).min(budget.draws));
        let left = budget.rows - draw.len();
        let on_their_way = wants.iter().any(|want| want.flies && want.pending == 1);
        let left = match draw.is_empty() && !on_their_way {
            true => left,
            false => left.min(budget.beside.max(1)),
        };
        for &i in &draw {
            self.turns += 1;
            self.served.insert(wants[i].id, self.turns);
        }
        let mut grants: Vec<(usize, usize)> = draw.into_iter().map(|i| (i, 1)).collect();
        grants.extend(self.pieces(wants, &read, left));
        grants
    }

    /// Knows who reads a prompt now, and forgets who is gone.
    fn note(&mut self, wants: &[Want<'_>]) {
        let mut reading = BTreeMap::new();
        for want in wants.iter().filter(|w| w.pending > 1) {
            let class = match self.reading.remove(&want.id) {
                Some(class) => class,
                None => {
                    self.prompts.enter(want.class);
                    want.class.clone()
                }
            };
            reading.insert(want.id, class);
        }
        let gone = std::mem::replace(&mut self.reading, reading);
        for class in gone.into_values() {
            self.prompts.leave(&class);
        }
        let reading = &self.reading;
        self.contests
            .retain(|class, _| reading.values().any(|reads| reads == class));
        self.served
            .retain(|id, _| wants.iter().any(|want| want.id == *id));
    }

    /// Gives `left` rows to those who read prompts.
    fn pieces(
        &mut self,
        wants: &[Want<'_>],
        read: &[usize],
        mut left: usize,
    ) -> Vec<(usize, usize)> {
        let mut given: BTreeMap<usize, usize> = BTreeMap::new();
        while left > 0 {
            let rest = |i: usize| wants[i].pending - given.get(&i).copied().unwrap_or(0);
            let open: Vec<usize> = read.iter().copied().filter(|&i| rest(i) > 0).collect();
            let Some(class) = self.prompts.next(open.iter().map(|&i| wants[i].class)) else {
                break;
            };
            let alike = open.iter().copied().filter(|&i| wants[i].class == class);
            let oldest = alike.clone().min_by_key(|&i| wants[i].arrival);
            let shortest = alike.min_by_key(|&i| (rest(i), wants[i].arrival));
            let (Some(oldest), Some(shortest)) = (oldest, shortest) else {
                break;
            };
            let class = class.clone();
            let chosen = match oldest == shortest {
                true => {
                    // It has what the others leave, too.
                    if let Some(contest) = self.contests.get_mut(&class) {
                        contest.owed = contest.owed.saturating_sub(1);
                    }
                    oldest
                }
                false => {
                    let contest = self.contests.entry(class.clone()).or_default();
                    contest.pieces += 1;
                    contest.owed += u64::from(contest.pieces.is_multiple_of(TURNS));
                    // Whose prompt ends with this step is not kept from it, or not by the first piece that is owed.
                    let is_due = contest.owed > u64::from(rest(shortest) <= left);
                    contest.owed -= u64::from(is_due);
                    if is_due { oldest } else { shortest }
                }
            };
            let rows = PIECE.min(rest(chosen)).min(left);
            *given.entry(chosen).or_default() += rows;
            self.prompts.charge(&class, rows);
            left -= rows;
        }
        given.into_iter().collect()
    }
}

#[cfg(test)]
mod tests;

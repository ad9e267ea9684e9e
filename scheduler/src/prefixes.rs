//! Which worker read which beginnings of prompts last: a guess at what the workers' prefix caches hold, so that a
//! request goes where its beginning need not be computed again. It decides where a request runs, never what comes out.

use std::{
    collections::{HashMap, VecDeque},
    hash::{BuildHasher, RandomState},
};

use hotcell_proto::ids::ModelName;

/// Tokens by which beginnings grow.
const BLOCK: usize = 64;
/// Blocks of one prompt that are looked at.
const MAX_BLOCKS: usize = 1024;
/// Beginnings that are remembered; of more, those that were read longest ago are forgotten.
const MAX_KNOWN: usize = 1 << 16;

/// A prompt's beginnings: one number for its first block, one for its first two, and so on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prints(Vec<u64>);

/// Who read a beginning, and when.
#[derive(Clone, Copy, Debug)]
struct Reader {
    worker: u64,
    turn: u64,
}

/// What is known about all workers.
#[derive(Debug, Default)]
pub struct Prefixes {
    /// Keyed at random, so that nobody can make prompts whose beginnings look alike.
    keys: RandomState,
    readers: HashMap<u64, Reader>,
    /// Beginnings by the turn in which they were read; those that were read again since are stale.
    turns: VecDeque<(u64, u64)>,
    turn: u64,
}

impl Prefixes {
    /// The beginnings of a prompt. Tenants share no cached prompts, so theirs are others.
    pub fn prints(&self, tenant: &str, model: &ModelName, ids: &[u32]) -> Prints {
        let mut print = self.keys.hash_one((tenant, model.as_str()));
        let blocks = ids.chunks_exact(BLOCK).take(MAX_BLOCKS);
        Prints(
            blocks
                .map(|block| {
                    print = self.keys.hash_one((print, block));
                    print
                })
                .collect(),
        )
    }

    fn key(&self, worker: &str, epoch: u64) -> u64 {
        self.keys.hash_one((worker, epoch))
    }

    /// How many of a prompt's first tokens this worker, in this life, was the last to read.
    pub fn known(&self, prints: &Prints, worker: &str, epoch: u64) -> u64 {
        let worker = self.key(worker, epoch);
        let read = |print: &u64| self.readers.get(print).is_some_and(|r| r.worker == worker);
        let blocks = prints.0.iter().rposition(read).map_or(0, |last| last + 1);
        (blocks * BLOCK) as u64
    }

    /// A worker reads a prompt.
    pub fn note(&mut self, prints: &Prints, worker: &str, epoch: u64) {
        let worker = self.key(worker, epoch);
        self.turn += 1;
        let turn = self.turn;
        // The shortest beginning last, so that it is forgotten last: without it the longer ones are of no use.
        for &print in prints.0.iter().rev() {
            self.readers.insert(print, Reader { worker, turn });
            self.turns.push_back((print, turn));
        }
        while self.turns.len() > MAX_KNOWN {
            let Some((print, turn)) = self.turns.pop_front() else {
                break;
            };
            if self.readers.get(&print).is_some_and(|r| r.turn == turn) {
                self.readers.remove(&print);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(name: &str) -> ModelName {
        ModelName::new(name).expect("a name")
    }

    fn ids(n: u32, from: u32) -> Vec<u32> {
        (from..from + n).collect()
    }

    #[test]
    fn a_worker_knows_the_beginnings_that_it_read_last() {
        let mut prefixes = Prefixes::default();
        let m = model("m");
        let long = prefixes.prints("t", &m, &ids(1000, 0));
        assert_eq!(prefixes.known(&long, "w0", 1), 0);
        prefixes.note(&long, "w0", 1);
        // Whole blocks.
        assert_eq!(prefixes.known(&long, "w0", 1), 960);
        let shared = [ids(300, 0), ids(500, 5000)].concat();
        let shared = prefixes.prints("t", &m, &shared);
        assert_eq!(prefixes.known(&shared, "w0", 1), 256);
        // Another life, worker, tenant, model.
        assert_eq!(prefixes.known(&long, "w0", 2), 0);
        assert_eq!(prefixes.known(&long, "w1", 1), 0);
        for (tenant, name) in [("u", "m"), ("t", "n")] {
            let other = prefixes.prints(tenant, &model(name), &ids(1000, 0));
            assert_eq!(prefixes.known(&other, "w0", 1), 0);
        }
        prefixes.note(&shared, "w1", 1);
        assert_eq!(prefixes.known(&shared, "w1", 1), 768);
        assert_eq!(prefixes.known(&long, "w1", 1), 256);
        assert_eq!(prefixes.known(&long, "w0", 1), 960, "the longer ones still");
        let short = prefixes.prints("t", &m, &ids(63, 0));
        assert_eq!(short, Prints::default());
    }

    #[test]
    fn what_was_read_longest_ago_is_forgotten() {
        let mut prefixes = Prefixes::default();
        let m = model("m");
        let first = prefixes.prints("", &m, &ids(6400, 0));
        let again = prefixes.prints("", &m, &ids(640, 9_000_000));
        prefixes.note(&first, "w", 1);
        prefixes.note(&again, "w", 1);
        for i in 1..700 {
            let other = prefixes.prints("", &m, &ids(6400, 10_000 * i));
            prefixes.note(&other, "w", 1);
            // Read again and again, it stays.
            prefixes.note(&again, "w", 1);
        }
        assert_eq!(prefixes.known(&first, "w", 1), 0);
        assert_eq!(prefixes.known(&again, "w", 1), 640);
        assert!(prefixes.readers.len() <= MAX_KNOWN && prefixes.turns.len() <= MAX_KNOWN);
    }
}

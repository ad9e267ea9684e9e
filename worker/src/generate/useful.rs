//! Which blocks of a cache with windows are of use, kept up to date by what changed.
//!
//! A block of a beginning is found if all blocks before it are, and the beginning is of use up to where each kind of layers
//! has what the next row looks at; what is before something of use is of use, too. That is a tree: what changed is looked
//! at anew, then those after it as far as that makes a difference to them, and those before it as far as it does to those.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use super::{
    blocks::Key,
    ledger::{Change, Entries, Kept},
};
use crate::model::run::KINDS;

/// What is known of the blocks that can be found, beside where they stand.
pub trait Found {
    /// Whether there is a block with this key for a kind of layers.
    fn has(&self, kind: usize, key: &Key) -> bool;

    /// The first block, of those before the end of so many, that the row after them looks at in a kind of layers.
    fn first_seen(&self, kind: usize, blocks: usize) -> usize;

    /// How many blocks a row looks at in a kind of layers at most; none: all.
    fn most_seen(&self, kind: usize) -> Option<usize>;

    /// Kinds of layers that there are.
    fn kinds(&self) -> usize;
}

/// A block that can be found.
#[derive(Clone, Debug)]
struct Node {
    key: Key,
    kept: Arc<Kept>,
    /// For each kind of layers how many of the last blocks up to this one are there, as far as that counts; none if one
    /// before it is gone, so that nobody gets here.
    runs: Option<[usize; KINDS]>,
    /// Whether a beginning that ends with it is of use.
    enough: bool,
    /// How many of those right after it are of use.
    below: usize,
    /// Whether it was told.
    told: bool,
}

impl Node {
    fn is_of_use(&self) -> bool {
        self.enough || self.below > 0
    }
}

/// The tree of them, by their hashes.
#[derive(Debug, Default)]
pub struct Useful {
    nodes: HashMap<u64, Node>,
    /// Those right after each, whether or not that is there itself.
    after: HashMap<u64, Vec<u64>>,
    /// Those of which may have changed whether they are of use.
    touched: HashSet<u64>,
    /// Those that were told and are gone.
    gone: Vec<u64>,
}

impl Useful {
    /// All keys that it knows.
    pub fn keys(&self) -> impl Iterator<Item = Key> {
        self.nodes.values().map(|node| node.key)
    }

    /// What of these has to be told after something about these blocks changed: that they can be found, or that another kind
    /// of layers has them. `kept` are all that can be found.
    pub fn update(&mut self, changed: &[Key], kept: &Entries, found: &impl Found) -> Vec<Change> {
        let mut again = Vec::new();
        for key in changed {
            let hash = super::ledger::hash(key);
            match (kept.get(key), self.nodes.contains_key(&hash)) {
                (Some(kept), false) => self.enter(hash, *key, kept),
                (None, true) => self.leave(hash),
                _ => {}
            }
            again.push(hash);
            again.extend(self.after.get(&hash).into_iter().flatten());
        }
        while let Some(hash) = again.pop() {
            if self.judge(hash, found) {
                again.extend(self.after.get(&hash).into_iter().flatten());
            }
        }
        self.tell()
    }

    fn enter(&mut self, hash: u64, key: Key, kept: &Arc<Kept>) {
        // Nothing after it was found without it.
        let node = Node {
            key,
            kept: Arc::clone(kept),
            runs: None,
            enough: false,
            below: 0,
            told: false,
        };
        if let Some(parent) = kept.parent {
            self.after.entry(parent).or_default().push(hash);
        }
        self.nodes.insert(hash, node);
    }

    fn leave(&mut self, hash: u64) {
        let Some(node) = self.nodes.remove(&hash) else {
            return;
        };
        if node.told {
            self.gone.push(hash);
        }
        let Some(parent) = node.kept.parent else {
            return;
        };
        if let Some(after) = self.after.get_mut(&parent) {
            after.retain(|other| *other != hash);
            if after.is_empty() {
                self.after.remove(&parent);
            }
        }
        if node.is_of_use() {
            self.turn(parent, false);
        }
    }

    /// Looks at a block anew; whether that makes a difference to those after it.
    fn judge(&mut self, hash: u64, found: &impl Found) -> bool {
        let Some(node) = self.nodes.get(&hash) else {
            return false;
        };
        let before = match node.kept.parent {
            None => Some([0; KINDS]),
            Some(parent) => self.nodes.get(&parent).and_then(|parent| parent.runs),
        };
        let count = node.kept.depth + 1;
        let mut enough = before.is_some();
        let runs = before.map(|mut runs| {
            for (kind, run) in runs.iter_mut().enumerate().take(found.kinds()) {
                *run = if found.has(kind, &node.key) {
                    *run + 1
                } else {
                    0
                };
                enough &= *run + found.first_seen(kind, count) >= count;
                // More make no difference.
                *run = found.most_seen(kind).map_or(*run, |most| most.min(*run));
            }
            runs
        });
        let differs = runs != node.runs;
        let (was, parent) = (node.is_of_use(), node.kept.parent);
        let Some(node) = self.nodes.get_mut(&hash) else {
            return false;
        };
        (node.runs, node.enough) = (runs, enough);
        let is = node.is_of_use();
        self.touched.insert(hash);
        if let Some(parent) = parent.filter(|_| was != is) {
            self.turn(parent, is);
        }
        differs
    }

    /// One more, or one less, right after this block is of use.
    fn turn(&mut self, mut hash: u64, to: bool) {
        while let Some(node) = self.nodes.get_mut(&hash) {
            let was = node.is_of_use();
            node.below = match to {
                true => node.below.saturating_add(1),
                false => node.below.saturating_sub(1),
            };
            self.touched.insert(hash);
            match node.kept.parent {
                Some(parent) if was != node.is_of_use() => hash = parent,
                _ => return,
            }
        }
    }

    fn tell(&mut self) -> Vec<Change> {
        let mut stored = Vec::new();
        let gone = std::mem::take(&mut self.gone);
        let mut changes: Vec<_> = gone.into_iter().map(Change::Removed).collect();
        for hash in self.touched.drain() {
            let Some(node) = self.nodes.get_mut(&hash) else {
                continue;
            };
            let is = node.is_of_use();
            match std::mem::replace(&mut node.told, is) {
                was if was == is => {}
                true => changes.push(Change::Removed(hash)),
                false => stored.push(Arc::clone(&node.kept)),
            }
        }
        stored.sort_unstable_by_key(|kept| kept.depth);
        changes.extend(stored.into_iter().map(Change::Stored));
        changes
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// One kind of layers that looks at everything, and one that looks at two blocks, whose blocks these are.
    struct Blocks {
        behind: HashSet<Key>,
        asked: Cell<usize>,
    }

    impl Found for Blocks {
        fn has(&self, kind: usize, key: &Key) -> bool {
            self.asked.set(self.asked.get() + 1);
            kind == 0 || self.behind.contains(key)
        }

        fn first_seen(&self, kind: usize, blocks: usize) -> usize {
            if kind == 0 {
                0
            } else {
                blocks.saturating_sub(2)
            }
        }

        fn most_seen(&self, kind: usize) -> Option<usize> {
            (kind == 1).then_some(2)
        }

        fn kinds(&self) -> usize {
            2
        }
    }

    fn key(number: usize) -> Key {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&(number as u64).to_le_bytes());
        key
    }

    fn kept(depth: usize) -> Arc<Kept> {
        Arc::new(Kept {
            hash: depth as u64,
            parent: depth.checked_sub(1).map(|parent| parent as u64),
            depth,
            tokens: Box::default(),
            tenant: Box::default(),
        })
    }

    /// Hashes of what was stored and what was removed.
    fn hashes(changes: &[Change]) -> (Vec<u64>, Vec<u64>) {
        let (mut stored, mut removed) = (Vec::new(), Vec::new());
        for change in changes {
            match change {
                Change::Stored(kept) => stored.push(kept.hash),
                Change::Removed(hash) => removed.push(*hash),
            }
        }
        removed.sort_unstable();
        (stored, removed)
    }

    #[test]
    fn one_change_in_a_long_beginning_is_looked_at_and_not_all_of_it() {
        const LONG: usize = 10_000;
        let mut all: Entries = (0..LONG).map(|i| (key(i), kept(i))).collect();
        let mut found = Blocks {
            behind: (0..LONG).map(key).collect(),
            asked: Cell::default(),
        };
        let mut useful = Useful::default();
        let keys: Vec<Key> = all.keys().copied().collect();
        let (stored, removed) = hashes(&useful.update(&keys, &all, &found));
        assert!(stored.iter().copied().eq(0..LONG as u64) && removed.is_empty());

        let mut update = |changed: &[Key], all: &Entries, found: &Blocks| {
            found.asked.set(0);
            let said = hashes(&useful.update(changed, all, found));
            assert!(found.asked.get() < 20, "{}", found.asked.get());
            said
        };
        // It goes on.
        all.insert(key(LONG), kept(LONG));
        found.behind.insert(key(LONG));
        let last = LONG as u64;
        assert_eq!(update(&[key(LONG)], &all, &found), (vec![last], vec![]));
        // A block in the middle that only others look at changes nothing, nor does the end, as long as one is left.
        found.behind.remove(&key(500));
        assert_eq!(update(&[key(500)], &all, &found), (vec![], vec![]));
        found.behind.remove(&key(LONG - 1));
        let gone = vec![last - 1, last];
        assert_eq!(
            update(&[key(LONG - 1)], &all, &found),
            (vec![], gone.clone())
        );
        found.behind.insert(key(LONG - 1));
        assert_eq!(update(&[key(LONG - 1)], &all, &found), (gone, vec![]));
        all.remove(&key(LONG));
        assert_eq!(update(&[key(LONG)], &all, &found), (vec![], vec![last]));
        assert_eq!(update(&[], &all, &found), (vec![], vec![]));
    }
}

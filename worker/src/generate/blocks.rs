//! Who has which block of a cache: references, the blocks kept for prompts that begin alike, and the free ones.
//!
//! A block is *free* (nothing in it is of use), *held* (so many chains have it), or *kept* (no chain has it, but its
//! tokens are known by a key, under which it is found again until the room is needed). What has a key is never
//! written again.

use std::collections::{BTreeMap, HashMap};

use hotcell_proto::limits;

use super::ledger::{Beginning, Ledger};

/// Stands for all that a block's keys and values depend on: see [`super::cache`].
pub type Key = [u8; 32];

/// A block that was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// The block.
    pub block: u32,
    /// Another tenant wrote into it before: it has to be zeroed.
    pub wipe: bool,
}

#[derive(Clone, Debug, Default)]
struct Block {
    references: u32,
    key: Option<Key>,
    /// Whose tokens are in it, also when it is free.
    owner: Option<Key>,
    /// When it was kept last; orders the kept ones.
    kept_at: u64,
}

/// The blocks of one model's cache.
#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    /// The next one to take is the last.
    free: Vec<u32>,
    /// Kept blocks by age, the oldest first.
    kept: BTreeMap<u64, u32>,
    by_key: HashMap<Key, u32>,
    clock: u64,
    /// Notes which blocks are found, if that is told to anybody.
    ledger: Option<Ledger>,
    /// What came to be found or is no more, for who watches that.
    changed: Option<Changed>,
}

/// What changed since it was asked last.
#[derive(Debug, Default)]
pub struct Changed {
    /// These.
    pub keys: Vec<Key>,
    /// More than are noted: all may have.
    pub all: bool,
}

impl Changed {
    fn note(&mut self, key: Key) {
        if self.keys.len() < limits::MAX_BLOCK_CHANGES {
            self.keys.push(key);
        } else {
            self.all = true;
        }
    }
}

impl BlockPool {
    /// All of `total` blocks are free.
    pub fn new(total: usize) -> Self {
        let total = u32::try_from(total).unwrap_or(u32::MAX);
        Self {
            blocks: vec![Block::default(); total as usize],
            free: (0..total).rev().collect(),
            kept: BTreeMap::new(),
            by_key: HashMap::new(),
            clock: 0,
            ledger: None,
            changed: None,
        }
    }

    /// The same, which notes what can be found in it.
    pub fn noted(self) -> Self {
        let ledger = Some(Ledger::default());
        Self { ledger, ..self }
    }

    /// What can be found in it, if that is noted.
    pub fn ledger(&mut self) -> &mut Option<Ledger> {
        &mut self.ledger
    }

    /// What changed since this was asked last, if it was; it is noted from now on.
    pub fn take_changed(&mut self) -> Option<Changed> {
        self.changed.replace(Changed::default())
    }

    /// Nobody asks for that any more.
    pub fn forget_changed(&mut self) {
        self.changed = None;
    }

    /// What was in a block is found no more.
    fn lose(&mut self, block: u32) {
        if let Some(key) = self.at_mut(block).key.take() {
            self.by_key.remove(&key);
            if let Some(changed) = &mut self.changed {
                changed.note(key);
            }
            if let Some(ledger) = &mut self.ledger {
                ledger.removed(&key);
            }
        }
    }

    fn at(&self, block: u32) -> &Block {
        &self.blocks[block as usize]
    }

    fn at_mut(&mut self, block: u32) -> &mut Block {
        &mut self.blocks[block as usize]
    }

    /// All blocks.
    pub fn total(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks that can be taken: free ones and kept ones.
    pub fn available(&self) -> usize {
        self.free.len() + self.kept.len()
    }

    /// Blocks that nobody has, kept for who asks for them by their keys.
    pub fn kept(&self) -> usize {
        self.kept.len()
    }

    /// A block for tokens of `owner`: a free one, or else the one that was kept longest.
    pub fn take(&mut self, owner: Key) -> Option<Taken> {
        let block = match self.free.pop() {
            Some(block) => block,
            None => {
                let (_, block) = self.kept.pop_first()?;
                self.lose(block);
                block
            }
        };
        let at = self.at_mut(block);
        at.references = 1;
        let wipe = at
            .owner
            .replace(owner)
            .is_some_and(|before| before != owner);
        Some(Taken { block, wipe })
    }

    /// One more chain has a held block.
    pub fn share(&mut self, block: u32) {
        let at = self.at_mut(block);
        debug_assert!(at.references > 0);
        at.references += 1;
    }

    /// Whether there is a block with this key.
    pub fn has(&self, key: &Key) -> bool {
        self.by_key.contains_key(key)
    }

    /// The block with this key, which one more chain has from now on.
    pub fn find(&mut self, key: &Key) -> Option<u32> {
        let block = *self.by_key.get(key)?;
        let at = &mut self.blocks[block as usize];
        if at.references == 0 {
            self.kept.remove(&at.kept_at);
        }
        at.references += 1;
        Some(block)
    }

    /// Whether its only chain may write into it.
    pub fn is_own(&self, block: u32) -> bool {
        let at = self.at(block);
        at.references == 1 && at.key.is_none()
    }

    /// A full block is found under this key from now on, and never written again. If another one is found under it
    /// already, that stays the one. `of` is what stands there.
    pub fn publish(&mut self, block: u32, key: Key, of: &Beginning<'_>) {
        debug_assert!(self.at(block).references > 0);
        debug_assert!(self.at(block).key.is_none_or(|own| own == key));
        if self.at(block).key.is_none() && !self.by_key.contains_key(&key) {
            self.by_key.insert(key, block);
            self.at_mut(block).key = Some(key);
            if let Some(changed) = &mut self.changed {
                changed.note(key);
            }
            if let Some(ledger) = &mut self.ledger {
                ledger.stored(key, of);
            }
        }
    }

    /// A chain has a block no more.
    pub fn release(&mut self, block: u32) {
        let clock = self.clock;
        let at = &mut self.blocks[block as usize];
        debug_assert!(at.references > 0);
        at.references -= 1;
        if at.references > 0 {
            return;
        }
        if at.key.is_some() {
            at.kept_at = clock;
            self.kept.insert(clock, block);
            self.clock += 1;
        } else {
            self.free.push(block);
        }
    }

    /// Keeps nothing any more.
    pub fn forget(&mut self) {
        for block in std::mem::take(&mut self.kept).into_values() {
            self.lose(block);
            self.free.push(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Key = [1; 32];
    const B: Key = [2; 32];

    const SOME: Beginning<'_> = Beginning {
        parent: None,
        depth: 0,
        tokens: &[],
        tenant: "",
    };

    fn take(pool: &mut BlockPool, owner: Key) -> (u32, bool) {
        let taken = pool.take(owner).expect("a block");
        (taken.block, taken.wipe)
    }

    #[test]
    fn blocks_go_round_and_are_wiped_between_owners() {
        let mut pool = BlockPool::new(2);
        assert_eq!(take(&mut pool, A), (0, false));
        assert_eq!(take(&mut pool, B), (1, false));
        assert_eq!(pool.take(A), None);
        pool.release(0);
        assert_eq!(take(&mut pool, A), (0, false));
        pool.release(1);
        assert_eq!(take(&mut pool, A), (1, true));
        assert_eq!(pool.available(), 0);
    }

    #[test]
    fn a_shared_block_stays_until_the_last_has_left() {
        let mut pool = BlockPool::new(1);
        let (block, _) = take(&mut pool, A);
        assert!(pool.is_own(block));
        pool.share(block);
        assert!(!pool.is_own(block));
        pool.release(block);
        assert_eq!(pool.available(), 0);
        pool.release(block);
        assert_eq!((pool.available(), pool.kept()), (1, 0));
    }

    #[test]
    fn what_has_a_key_is_kept_and_the_oldest_goes_first() {
        let mut pool = BlockPool::new(3);
        let keys: Vec<Key> = (10..13).map(|i| [i; 32]).collect();
        for key in &keys {
            let (block, _) = take(&mut pool, A);
            pool.publish(block, *key, &SOME);
            assert!(!pool.is_own(block));
        }
        // Found while held, and again when kept.
        assert_eq!(pool.find(&keys[1]), Some(1));
        pool.release(1);
        for block in [1, 0, 2] {
            pool.release(block);
        }
        assert_eq!((pool.available(), pool.kept()), (3, 3));
        // Used again: now 0 is the oldest.
        assert_eq!(pool.find(&keys[1]), Some(1));
        pool.release(1);
        assert_eq!(take(&mut pool, A), (0, false));
        assert_eq!(pool.find(&keys[0]), None);
        assert_eq!(take(&mut pool, B), (2, true));
        assert_eq!(pool.find(&keys[1]), Some(1));
        assert_eq!(pool.take(A), None);
    }

    #[test]
    fn the_first_block_under_a_key_stays_the_one() {
        let mut pool = BlockPool::new(2);
        let key = [9; 32];
        for _ in 0..2 {
            let (block, _) = take(&mut pool, A);
            pool.publish(block, key, &SOME);
        }
        assert_eq!(pool.find(&key), Some(0));
        assert!(pool.is_own(1));
        pool.release(1);
        assert_eq!((pool.available(), pool.kept()), (1, 0));
        pool.release(0);
        pool.release(0);
        assert_eq!((pool.available(), pool.kept()), (2, 1));
        pool.forget();
        assert_eq!((pool.available(), pool.kept()), (2, 0));
        assert_eq!(pool.find(&key), None);
    }
}

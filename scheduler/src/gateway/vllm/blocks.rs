//! Which blocks of prompts this host keeps, as one engine: those that any of its workers keeps.
//!
//! Each worker names blocks by hashes that only it can make. Here each has a hash over its tenant, the model and all
//! tokens up to its end, with a key that nobody else knows, so that the same tokens in two workers are one block.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    sync::Arc,
};

use hotcell_proto::{ids::ModelName, limits, v1::BlocksChanged};

/// Blocks of one worker that are believed at most, whatever it says of its cache; others are passed over.
const MOST_BLOCKS: usize = 1 << 17;
/// Tokens of one block at most.
const MOST_TOKENS: u32 = 1 << 10;
/// Tokens that one worker's cache has room for at most, whatever it says.
const MOST_ROOM: u64 = 1 << 22;

/// A block of a prompt.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub hash: i64,
    /// That of the block before it; none for a prompt's first.
    pub parent: Option<i64>,
    /// How many blocks are before it.
    pub depth: usize,
    pub tokens: Box<[u32]>,
    pub tenant: Box<str>,
}

/// What changed for this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// The first worker has it.
    Stored(Arc<Block>),
    /// No worker has it any more.
    Removed(Arc<Block>),
}

impl Change {
    pub(super) fn block(&self) -> &Arc<Block> {
        match self {
            Self::Stored(block) | Self::Removed(block) => block,
        }
    }
}

/// One worker's process, for as long as it is watched.
pub(super) type Source = u64;

/// What one worker says that it has.
#[derive(Debug)]
struct Told {
    /// Our hashes by its own.
    blocks: HashMap<u64, i64>,
    most: usize,
    /// Room of its cache, in tokens.
    room: u64,
    /// Tokens of each of its blocks, while it has any.
    block_tokens: u32,
}

#[derive(Debug)]
struct Held {
    block: Arc<Block>,
    /// How many workers have it.
    by: usize,
}

/// The blocks of one model in all workers.
#[derive(Debug)]
pub(super) struct Blocks {
    keys: RandomState,
    model: Option<ModelName>,
    sources: HashMap<Source, Told>,
    held: HashMap<i64, Held>,
    count: Source,
}

impl Blocks {
    pub(super) fn new() -> Self {
        Self {
            keys: RandomState::new(),
            model: None,
            sources: HashMap::new(),
            held: HashMap::new(),
            count: 0,
        }
    }

    /// The model that they are of.
    pub(super) fn model(&self) -> Option<&ModelName> {
        self.model.as_ref()
    }

    /// They are of this model from now on, and nothing is known.
    pub(super) fn begin(&mut self, model: Option<ModelName>) {
        self.model = model;
        self.sources.clear();
        self.held.clear();
    }

    /// A worker, whose cache has room for so many tokens, tells from now on what it has of a model. None if they are not of
    /// that model any more.
    pub(super) fn enter(&mut self, model: &ModelName, room: u64) -> Option<Source> {
        if self.model.as_ref() != Some(model) {
            return None;
        }
        self.count += 1;
        let told = Told {
            blocks: HashMap::new(),
            most: 0,
            room: room.min(MOST_ROOM),
            block_tokens: 0,
        };
        self.sources.insert(self.count, told);
        Some(self.count)
    }

    /// What a worker said. What makes no sense is passed over: blocks of odd sizes, of tenants that cannot be, after blocks
    /// that it does not have, and more than fit into its cache.
    pub(super) fn take(&mut self, source: Source, said: BlocksChanged) -> Vec<Change> {
        let mut changes = Vec::new();
        if said.reset {
            self.empty(source, &mut changes);
        }
        let Some(told) = self.sources.get_mut(&source) else {
            return changes;
        };
        if !(1..=MOST_TOKENS).contains(&said.block_tokens) {
            return changes;
        }
        // All of one size, so that so many blocks are so many tokens.
        if told.blocks.is_empty() {
            told.block_tokens = said.block_tokens;
        } else if told.block_tokens != said.block_tokens {
            return changes;
        }
        let room = told.room / u64::from(said.block_tokens);
        told.most = usize::try_from(room).unwrap_or(usize::MAX).min(MOST_BLOCKS);
        for hash in said.removed.into_iter().take(limits::MAX_BLOCKS_TOLD) {
            if let Some(hash) = told.blocks.remove(&hash) {
                release(&mut self.held, hash, &mut changes);
            }
        }
        let model = self.model.as_ref().map_or("", ModelName::as_str);
        for block in said.stored.into_iter().take(limits::MAX_BLOCKS_TOLD) {
            let fits = block.tokens.len() == said.block_tokens as usize
                && block.tenant.chars().count() <= limits::MAX_TENANT
                && told.blocks.len() < told.most
                && !told.blocks.contains_key(&block.hash);
            let parent = match block.parent {
                None => Ok(None),
                Some(parent) => told.blocks.get(&parent).copied().map(Some).ok_or(()),
            };
            let (true, Ok(parent)) = (fits, parent) else {
                continue;
            };
            let before = parent.and_then(|parent| self.held.get(&parent));
            // Nobody's prompt goes on with another one's.
            if before.is_some_and(|before| *before.block.tenant != *block.tenant) {
                continue;
            }
            let depth = before.map_or(0, |before| before.block.depth.saturating_add(1));
            let root = self.keys.hash_one((&block.tenant, model));
            let after = parent.map_or(root, i64::cast_unsigned);
            let hash = self.keys.hash_one((after, depth, &block.tokens));
            let hash = hash.cast_signed();
            told.blocks.insert(block.hash, hash);
            let held = self.held.entry(hash).or_insert_with(|| {
                let block = Arc::new(Block {
                    hash,
                    parent,
                    depth,
                    tokens: block.tokens.into(),
                    tenant: block.tenant.into(),
                });
                changes.push(Change::Stored(Arc::clone(&block)));
                Held { block, by: 0 }
            });
            held.by += 1;
        }
        changes
    }

    /// A worker died, or has the model no more.
    pub(super) fn leave(&mut self, source: Source) -> Vec<Change> {
        let mut changes = Vec::new();
        self.empty(source, &mut changes);
        self.sources.remove(&source);
        changes
    }

    fn empty(&mut self, source: Source, changes: &mut Vec<Change>) {
        let told = self.sources.get_mut(&source);
        let blocks = told.map(|told| std::mem::take(&mut told.blocks));
        for hash in blocks.unwrap_or_default().into_values() {
            release(&mut self.held, hash, changes);
        }
    }

    /// What a tenant has, blocks after those that are before them.
    pub(super) fn of(&self, tenant: &str) -> Vec<Arc<Block>> {
        let own = self
            .held
            .values()
            .filter(|held| *held.block.tenant == *tenant);
        let mut blocks: Vec<_> = own.map(|held| Arc::clone(&held.block)).collect();
        blocks.sort_unstable_by_key(|block| block.depth);
        blocks
    }
}

/// A worker has a block no more.
fn release(held: &mut HashMap<i64, Held>, hash: i64, changes: &mut Vec<Change>) {
    let Some(of) = held.get_mut(&hash) else {
        return;
    };
    of.by = of.by.saturating_sub(1);
    if of.by == 0
        && let Some(gone) = held.remove(&hash)
    {
        changes.push(Change::Removed(gone.block));
    }
}

#[cfg(test)]
mod tests {
    use hotcell_proto::v1::CachedBlock;

    use super::*;

    fn model() -> ModelName {
        ModelName::new("m").unwrap()
    }

    fn blocks() -> Blocks {
        let mut blocks = Blocks::new();
        blocks.begin(Some(model()));
        blocks
    }

    fn enter(blocks: &mut Blocks, room: u64) -> Source {
        blocks.enter(&model(), room).unwrap()
    }

    fn block(hash: u64, parent: Option<u64>, tokens: [u32; 2], tenant: &str) -> CachedBlock {
        CachedBlock {
            hash,
            parent,
            tokens: tokens.into(),
            tenant: tenant.into(),
        }
    }

    fn said(removed: &[u64], stored: Vec<CachedBlock>) -> BlocksChanged {
        BlocksChanged {
            reset: false,
            removed: removed.to_vec(),
            stored,
            block_tokens: 2,
        }
    }

    /// Tokens of each: those stored, then those removed.
    fn tokens(changes: &[Change]) -> (Vec<u32>, Vec<u32>) {
        let (mut stored, mut removed) = (Vec::new(), Vec::new());
        for change in changes {
            let to = match change {
                Change::Stored(_) => &mut stored,
                Change::Removed(_) => &mut removed,
            };
            to.extend(&*change.block().tokens);
        }
        removed.sort_unstable();
        (stored, removed)
    }

    #[test]
    fn a_block_is_stored_with_the_first_worker_and_removed_with_the_last() {
        let mut all = blocks();
        let (one, other) = (enter(&mut all, 100), enter(&mut all, 100));
        let chain = |a, b| vec![block(a, None, [1, 2], "t"), block(b, Some(a), [3, 4], "t")];
        let changes = all.take(one, said(&[], chain(10, 11)));
        assert_eq!(tokens(&changes), (vec![1, 2, 3, 4], vec![]));
        let (first, second) = (changes[0].block(), changes[1].block());
        assert_eq!((first.parent, second.parent), (None, Some(first.hash)));
        // The same tokens by other hashes.
        assert_eq!(all.take(other, said(&[], chain(77, 78))), []);
        assert_eq!(all.take(one, said(&[11], vec![])), []);
        let changes = all.take(other, said(&[78], vec![]));
        assert_eq!(tokens(&changes), (vec![], vec![3, 4]));
        assert_eq!(all.leave(one), []);
        assert_eq!(all.of("t").len(), 1);
        assert_eq!(tokens(&all.leave(other)), (vec![], vec![1, 2]));
        assert_eq!((all.held.len(), all.sources.len()), (0, 0));
        // Who left says nothing more, nor who has another model.
        assert_eq!(all.enter(&ModelName::new("n").unwrap(), 100), None);
        assert_eq!(all.take(one, said(&[], chain(10, 11))), []);
    }

    #[test]
    fn who_begins_anew_has_nothing_of_what_it_had() {
        let mut all = blocks();
        let one = enter(&mut all, 100);
        all.take(one, said(&[], vec![block(1, None, [1, 2], "t")]));
        let anew = BlocksChanged {
            reset: true,
            ..said(&[], vec![block(2, None, [5, 6], "t")])
        };
        assert_eq!(tokens(&all.take(one, anew)), (vec![5, 6], vec![1, 2]));
    }

    #[test]
    fn tenants_share_no_block_and_see_their_own() {
        let mut all = blocks();
        let one = enter(&mut all, 100);
        let both = vec![block(1, None, [1, 2], "t"), block(2, None, [1, 2], "u")];
        let changes = all.take(one, said(&[], both));
        assert_ne!(changes[0].block().hash, changes[1].block().hash);
        assert_eq!(all.of("u"), [Arc::clone(changes[1].block())]);
        assert_eq!(all.of(""), []);
        // Nor does one go on with another's.
        let mixed = vec![block(3, Some(1), [3, 4], "u")];
        assert_eq!(all.take(one, said(&[], mixed)), []);
    }

    #[test]
    fn what_makes_no_sense_is_passed_over() {
        let mut all = blocks();
        let one = enter(&mut all, 6);
        let long = "x".repeat(limits::MAX_TENANT + 1);
        for odd in [
            block(1, Some(9), [1, 2], "t"),
            block(1, None, [1, 2], &long),
            CachedBlock {
                tokens: vec![1, 2, 3],
                ..block(1, None, [1, 2], "t")
            },
        ] {
            assert_eq!(all.take(one, said(&[5], vec![odd])), []);
        }
        let huge = BlocksChanged {
            block_tokens: 0,
            ..said(&[], vec![block(1, None, [1, 2], "t")])
        };
        assert_eq!(all.take(one, huge), []);
        // Twice the same, and more than there is room for.
        let many = (0..9).map(|i| block(u64::from(i / 2), None, [i, i], "t"));
        let changes = all.take(one, said(&[], many.collect()));
        assert_eq!(tokens(&changes).0, [0, 0, 2, 2, 4, 4]);
        assert_eq!(all.take(one, said(&[7], vec![])), []);
    }

    #[test]
    fn a_worker_that_boasts_of_its_cache_is_believed_so_many_tokens() {
        let mut all = blocks();
        let one = enter(&mut all, u64::MAX);
        let say = |all: &mut Blocks, from: u64, tokens: u32| {
            let block = |hash| CachedBlock {
                tokens: vec![u32::try_from(hash).unwrap(); tokens as usize],
                ..block(hash, None, [0, 0], "t")
            };
            let told = (from..from + limits::MAX_BLOCKS_TOLD as u64).map(block);
            let said = BlocksChanged {
                block_tokens: tokens,
                ..said(&[], told.collect())
            };
            all.take(one, said).len()
        };
        let times = MOST_ROOM / u64::from(MOST_TOKENS) / limits::MAX_BLOCKS_TOLD as u64;
        for at in 0..times {
            let from = at * limits::MAX_BLOCKS_TOLD as u64;
            assert_eq!(say(&mut all, from, MOST_TOKENS), limits::MAX_BLOCKS_TOLD);
        }
        // Nor more by blocks of another size.
        for tokens in [MOST_TOKENS, 32] {
            assert_eq!(say(&mut all, 1 << 20, tokens), 0);
        }
    }
}

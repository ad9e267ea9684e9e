//! The paged cache of one model: which blocks a sequence's tokens lie in, and which of them it shares with others.
//!
//! A [`Chain`] is one sequence's blocks in the order of its tokens. Blocks are shared in two ways: by key, with all
//! chains of the same tenant that begin with the same tokens, now or later; and by [`Cache::fork`], where a block
//! need not be full. Who writes into a block that it shares gets a copy first.
//!
//! Layers that look equally far back are of one [`Kind`], which has a pool of blocks of its own, because those that look through
//! a window need only the last few. A beginning is of use if each kind has what the next row looks at of it.
//!
//! The key of a block is the SHA-256 of the key of the block before it and its tokens. The first one has the tenant's
//! root before it, which is drawn anew whenever a model is loaded, so that a key stands for model, cache dtype and
//! tenant too, and nobody can make one. So tenants never share a block, and a block that was another tenant's is
//! zeroed before it is read or written.

use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::{
    blocks::{BlockPool, Key},
    ledger::{self, Beginning, Change, Entries},
    useful::{Found, Useful},
};
use crate::model::run::KINDS;

/// Stands for a block that was given back, or never had, in a chain: there is none with this number, and kernels refuse it.
const GONE: u32 = u32::MAX;

/// One sequence's blocks.
#[derive(Debug, Default)]
pub struct Chain {
    root: Key,
    of: [Links; KINDS],
    /// How many blocks from the start on have keys.
    keyed: usize,
    /// The key of the last of them; the root if there is none.
    tip: Key,
}

/// A chain's blocks for one kind of layers.
#[derive(Clone, Debug, Default)]
struct Links {
    /// The blocks, the first token's first. Those before `gone` are not the chain's.
    blocks: Vec<u32>,
    gone: usize,
}

impl Links {
    fn held(&self) -> &[u32] {
        self.blocks.get(self.gone..).unwrap_or_default()
    }
}

impl Chain {
    /// One without blocks, of the tenant with this root.
    pub fn new(root: Key) -> Self {
        Self {
            root,
            tip: root,
            ..Self::default()
        }
    }

    /// Its blocks for a kind of layers; those before [`Chain::gone`] are not its own any more.
    pub fn blocks(&self, kind: usize) -> &[u32] {
        self.of.get(kind).map_or(&[], |links| &links.blocks)
    }

    /// How many of its blocks for a kind of layers were given back, from the first on.
    pub fn gone(&self, kind: usize) -> usize {
        self.of.get(kind).map_or(0, |links| links.gone)
    }

    /// How many blocks it has of a kind.
    pub fn held(&self, kind: usize) -> usize {
        self.of.get(kind).map_or(0, |links| links.held().len())
    }

    /// The root of its tenant.
    pub fn root(&self) -> Key {
        self.root
    }
}

/// Tokens of a chain for which there is to be room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// The first that is written.
    pub from: usize,
    /// The end of those that are known.
    pub to: usize,
    /// The end of those that are written next, for layers with a window: before what comes after them is written,
    /// other blocks are given back.
    pub soon: usize,
}

impl Room {
    /// For all of them at once.
    pub fn all(from: usize, to: usize) -> Self {
        Self { from, to, soon: to }
    }
}

/// What has to be done before a chain is written, and before anything else is asked of the cache, for one kind of layers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Blocks to zero, before anything is copied.
    pub wipe: Vec<u32>,
    /// Contents to copy: from a block, to a block.
    pub copy: Vec<(u32, u32)>,
    /// The first of the chain's blocks that changed; table entries from there on are new.
    pub changed: usize,
}

/// How many blocks a cache has for one kind of layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// All.
    pub blocks: usize,
    /// Blocks that chains have.
    pub used: usize,
    /// Blocks that no chain has, kept for those that begin alike.
    pub kept: usize,
}

/// Layers that look equally far back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// How many positions they look at, the row's own included; none: all.
    pub window: Option<usize>,
    /// Blocks that there are for them.
    pub blocks: usize,
}

/// The blocks of one kind of layers.
#[derive(Debug)]
struct Pool {
    pool: BlockPool,
    window: Option<usize>,
    block_len: usize,
}

impl Pool {
    /// The first block that a row at this position looks at.
    fn first_seen(&self, position: usize) -> usize {
        let first = |window| (position + 1).saturating_sub(window) / self.block_len;
        self.window.map_or(0, first)
    }

    /// How many blocks there have to be.
    fn wanted(&self, room: Room) -> usize {
        let to = match self.window {
            Some(_) => room.to.min(room.soon),
            None => room.to,
        };
        to.div_ceil(self.block_len)
    }

    /// Which of the blocks are written and not the chain's own.
    fn shared(&self, links: &Links, room: Room) -> impl Iterator<Item = usize> {
        let start = room.from / self.block_len;
        let end = self.wanted(room).min(links.blocks.len()).max(start);
        (start..end).filter(|&i| !self.pool.is_own(links.blocks[i]))
    }

    /// Blocks that [`Pool::ready`] would take.
    fn missing(&self, links: &Links, room: Room) -> usize {
        let more = self.wanted(room).saturating_sub(links.blocks.len());
        more + self.shared(links, room).count()
    }

    fn ready(&mut self, root: Key, links: &mut Links, room: Room) -> Option<Work> {
        let shared: Vec<usize> = self.shared(links, room).collect();
        let mut work = Work {
            changed: shared.first().copied().unwrap_or(links.blocks.len()),
            ..Work::default()
        };
        for i in shared {
            let block = self.take(root, &mut work)?;
            let before = std::mem::replace(&mut links.blocks[i], block);
            work.copy.push((before, block));
            // If it is kept now, it is the newest of those: there are enough others for the rest of this work.
            self.pool.release(before);
        }
        while links.blocks.len() < self.wanted(room) {
            let block = self.take(root, &mut work)?;
            links.blocks.push(block);
        }
        Some(work)
    }

    fn take(&mut self, root: Key, work: &mut Work) -> Option<u32> {
        let taken = self.pool.take(root)?;
        if taken.wipe {
            work.wipe.push(taken.block);
        }
        Some(taken.block)
    }
}

/// The blocks of one model's cache and what is in them.
#[derive(Debug)]
pub struct Cache {
    /// One for each kind of layers, at most [`KINDS`].
    pools: Vec<Pool>,
    /// Which of them notes what can be found.
    noted: usize,
    block_len: usize,
    secret: Key,
}

fn next_key(parent: &Key, tokens: &[u32]) -> Key {
    let mut hash = Sha256::new_with_prefix(parent);
    for token in tokens {
        hash.update(token.to_le_bytes());
    }
    hash.finalize().into()
}

impl Cache {
    /// An empty one for these kinds of layers. `secret` must be random: who knows it can tell what others asked.
    pub fn new(kinds: &[Kind], block_len: usize, secret: Key) -> Self {
        let block_len = block_len.max(1);
        // Those who watch are told of layers that look at everything: without what those have nothing is of use.
        let whole = kinds.iter().position(|kind| kind.window.is_none());
        let noted = whole.unwrap_or(0);
        let pool = |(at, kind): (usize, &Kind)| Pool {
            pool: match at == noted {
                true => BlockPool::new(kind.blocks).noted(),
                false => BlockPool::new(kind.blocks),
            },
            window: kind.window,
            block_len,
        };
        Self {
            pools: kinds.iter().take(KINDS).enumerate().map(pool).collect(),
            noted,
            block_len,
            secret,
        }
    }

    /// The root of a tenant's keys.
    pub fn root(&self, tenant: &str) -> Key {
        let hash = Sha256::new_with_prefix(self.secret).chain_update(tenant);
        hash.finalize().into()
    }

    /// What it has for each kind of layers.
    pub fn counts(&self) -> impl Iterator<Item = Counts> {
        self.pools.iter().map(|Pool { pool, .. }| Counts {
            blocks: pool.total(),
            used: pool.total() - pool.available(),
            kept: pool.kept(),
        })
    }

    /// A chain with all blocks that are there already for the first of `tokens`, and how many tokens that are. The
    /// last token is left to be computed, if need be in a block that is shared. `keys` are those of the tokens' first
    /// blocks, as far as they were needed before: who asks again has only those made that are new.
    pub fn open(&mut self, root: Key, tokens: &[u32], keys: &mut Vec<Key>) -> (Chain, usize) {
        let held = |blocks: usize| (blocks * self.block_len).min(tokens.len().saturating_sub(1));
        let mut tip = root;
        // How many of the last blocks are there, one after another; and how many from the start are of use.
        let (mut runs, mut useful) = ([0; KINDS], 0);
        for (before, tokens) in tokens.chunks_exact(self.block_len).enumerate() {
            if keys.len() == before {
                keys.push(next_key(&tip, tokens));
            }
            tip = keys[before];
            let count = before + 1;
            let mut whole = true;
            let mut enough = true;
            for (run, pool) in runs.iter_mut().zip(&self.pools) {
                *run = if pool.pool.has(&tip) { *run + 1 } else { 0 };
                whole &= pool.window.is_some() || *run == count;
                enough &= *run + pool.first_seen(held(count)) >= count;
            }
            if !whole {
                break;
            }
            if enough {
                useful = count;
            }
        }
        let keys = &keys[..useful];
        let held = held(useful);
        let mut chain = Chain::new(root);
        for (links, pool) in chain.of.iter_mut().zip(&mut self.pools) {
            links.gone = pool.first_seen(held).min(useful);
            links.blocks = vec![GONE; links.gone];
            let there = keys[links.gone..]
                .iter()
                .map_while(|key| pool.pool.find(key));
            links.blocks.extend(there);
            debug_assert_eq!(links.blocks.len(), useful);
        }
        chain.keyed = useful;
        chain.tip = keys.last().copied().unwrap_or(root);
        (chain, held)
    }

    /// Whether a chain has what the row after its first `tokens` tokens looks at, if they have been computed.
    pub fn can_fork(&self, of: &Chain, tokens: usize) -> bool {
        let count = tokens.div_ceil(self.block_len);
        let has = |(links, pool): (&Links, &Pool)| {
            links.gone <= pool.first_seen(tokens) && count <= links.blocks.len()
        };
        of.of.iter().zip(&self.pools).all(has)
    }

    /// A chain with the blocks that hold the first `tokens` tokens of another one. They must have been computed.
    /// None if something that the next row looks at was given back.
    pub fn fork(&mut self, of: &Chain, tokens: usize) -> Option<Chain> {
        if !self.can_fork(of, tokens) {
            return None;
        }
        let count = tokens.div_ceil(self.block_len);
        let mut chain = Chain::new(of.root);
        for ((links, of), pool) in chain.of.iter_mut().zip(&of.of).zip(&mut self.pools) {
            links.gone = pool.first_seen(tokens).min(count);
            links.blocks = vec![GONE; links.gone];
            links.blocks.extend(&of.blocks[links.gone..count]);
            links
                .held()
                .iter()
                .for_each(|&block| pool.pool.share(block));
        }
        // Keys are known up to the other one's tip only; before that they are found again when it publishes.
        if of.keyed <= tokens / self.block_len {
            (chain.keyed, chain.tip) = (of.keyed, of.tip);
        }
        Some(chain)
    }

    /// Whether there are the blocks that [`Cache::ready`] would take, and so many more.
    pub fn fits(&self, chain: &Chain, room: Room, more: usize) -> bool {
        let fits =
            |(links, pool): (_, &Pool)| pool.pool.available() >= pool.missing(links, room) + more;
        chain.of.iter().zip(&self.pools).all(fits)
    }

    /// Makes room in blocks of the chain's own. None, and nothing done, if there are too few. Otherwise what has to be done
    /// for each kind of layers.
    pub fn ready(&mut self, chain: &mut Chain, room: Room) -> Option<[Work; KINDS]> {
        if !self.fits(chain, room, 0) {
            return None;
        }
        let mut works: [Work; KINDS] = Default::default();
        let all = chain.of.iter_mut().zip(&mut self.pools);
        for ((links, pool), work) in all.zip(&mut works) {
            *work = pool.ready(chain.root, links, room)?;
        }
        Some(works)
    }

    /// The first `computed` of `tokens` are in the chain's blocks: those that are full can be shared from now on, with
    /// others of the same tenant.
    pub fn publish(&mut self, chain: &mut Chain, tokens: &[u32], computed: usize, tenant: &str) {
        let computed = computed.min(tokens.len());
        while (chain.keyed + 1) * self.block_len <= computed {
            let at = chain.keyed * self.block_len;
            let tokens = &tokens[at..at + self.block_len];
            let key = next_key(&chain.tip, tokens);
            let parent = (chain.keyed > 0).then_some(&chain.tip);
            let of = Beginning {
                parent,
                depth: chain.keyed,
                tokens,
                tenant,
            };
            for (links, pool) in chain.of.iter().zip(&mut self.pools) {
                if chain.keyed >= links.gone
                    && let Some(&block) = links.blocks.get(chain.keyed)
                {
                    pool.pool.publish(block, key, &of);
                }
            }
            chain.keyed += 1;
            chain.tip = key;
        }
    }

    /// The first `computed` tokens are in the chain's blocks: gives back those that no row after them looks at.
    pub fn trim(&mut self, chain: &mut Chain, computed: usize) {
        for (links, pool) in chain.of.iter_mut().zip(&mut self.pools) {
            // Those without keys yet stay until they have them.
            let end = pool.first_seen(computed).min(chain.keyed);
            let end = end.min(links.blocks.len());
            while links.gone < end {
                let block = std::mem::replace(&mut links.blocks[links.gone], GONE);
                pool.pool.release(block);
                links.gone += 1;
            }
        }
    }

    /// Gives back all blocks.
    pub fn close(&mut self, chain: Chain) {
        for (links, pool) in chain.of.iter().zip(&mut self.pools) {
            // The last one first: of what is kept, ends of prompts go before their beginnings.
            for &block in links.held().iter().rev() {
                pool.pool.release(block);
            }
        }
    }

    /// Somebody wants to know which blocks are found by their keys: see [`ledger::Ledger::ask`]. Where layers have windows
    /// it is told which of them are of use, as far as that was looked for: see [`ledger::Ledger::look`].
    pub fn ask(&mut self, watcher: &Arc<()>, begins: bool, reply: ledger::Reply) {
        let windows = self.pools.iter().any(|pool| pool.window.is_some());
        let Some(noted) = self.pools.get_mut(self.noted) else {
            return;
        };
        let Some(mut ledger) = noted.pool.ledger().take() else {
            return;
        };
        match windows {
            false => ledger.ask(watcher, begins, reply),
            true => ledger.look(
                watcher,
                begins,
                |kept, useful, anew| self.changed(kept, useful, anew),
                reply,
            ),
        }
        if let Some(noted) = self.pools.get_mut(self.noted) {
            *noted.pool.ledger() = Some(ledger);
        }
    }

    /// What changed of what is of use since that was asked last; all of it to who asks `anew`.
    fn changed(&mut self, kept: &Entries, useful: &mut Useful, anew: bool) -> Vec<Change> {
        let mut keys = Vec::new();
        let mut all = anew;
        for pool in &mut self.pools {
            match pool.pool.take_changed() {
                Some(changed) => {
                    all |= changed.all;
                    keys.extend(changed.keys);
                }
                None => all = true,
            }
        }
        if all {
            keys = useful.keys().chain(kept.keys().copied()).collect();
        }
        useful.update(&keys, kept, self)
    }

    /// Tells who asked what has changed, if anything has.
    pub fn tell(&mut self) {
        let noted = self.pools.get_mut(self.noted);
        let Some(ledger) = noted.and_then(|pool| pool.pool.ledger().as_mut()) else {
            return;
        };
        ledger.tell();
        if !ledger.is_looked_at() {
            for pool in &mut self.pools {
                pool.pool.forget_changed();
            }
        }
    }

    /// Keeps nothing any more.
    pub fn forget(&mut self) {
        for pool in &mut self.pools {
            pool.pool.forget();
        }
    }
}

impl Found for Cache {
    fn has(&self, kind: usize, key: &Key) -> bool {
        self.pools.get(kind).is_some_and(|pool| pool.pool.has(key))
    }

    fn first_seen(&self, kind: usize, blocks: usize) -> usize {
        let pool = self.pools.get(kind);
        pool.map_or(0, |pool| pool.first_seen(blocks * self.block_len))
    }

    fn most_seen(&self, kind: usize) -> Option<usize> {
        let window = self.pools.get(kind)?.window?;
        // It may begin and end amid a block.
        Some(window.div_ceil(self.block_len) + 1)
    }

    fn kinds(&self) -> usize {
        self.pools.len()
    }
}

#[cfg(test)]
mod tests;

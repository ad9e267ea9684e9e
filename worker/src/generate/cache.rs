//! The paged cache of one model: which blocks a sequence's tokens lie in, and which of them it shares with others.
//!
//! A [`Chain`] is one sequence's blocks in the order of its tokens. Blocks are shared in two ways: by key, with all
//! chains of the same tenant that begin with the same tokens, now or later; and by [`Cache::fork`], where a block
//! need not be full. Who writes into a block that it shares gets a copy first.
//!
//! The key of a block is the SHA-256 of the key of the block before it and its tokens. The first one has the tenant's
//! root before it, which is drawn anew whenever a model is loaded, so that a key stands for model, cache dtype and
//! tenant too, and nobody can make one. So tenants never share a block, and a block that was another tenant's is
//! zeroed before it is read or written.

use sha2::{Digest, Sha256};

use super::blocks::{BlockPool, Key};

/// One sequence's blocks.
#[derive(Debug, Default)]
pub struct Chain {
    root: Key,
    /// The blocks, the first token's first. Those before `gone` were given back.
    blocks: Vec<u32>,
    gone: usize,
    /// How many blocks from the start on have keys.
    keyed: usize,
    /// The key of the last of them; the root if there is none.
    tip: Key,
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

    /// Its blocks; those before [`Chain::gone`] are not its own any more.
    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// How many of its blocks were given back, from the first on.
    pub fn gone(&self) -> usize {
        self.gone
    }

    /// The root of its tenant.
    pub fn root(&self) -> Key {
        self.root
    }
}

/// What has to be done before a chain is written, and before anything else is asked of the cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Blocks to zero, before anything is copied.
    pub wipe: Vec<u32>,
    /// Contents to copy: from a block, to a block.
    pub copy: Vec<(u32, u32)>,
    /// The first of the chain's blocks that changed; table entries from there on are new.
    pub changed: usize,
}

/// How many blocks a cache has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// All.
    pub blocks: usize,
    /// Blocks that chains have.
    pub used: usize,
    /// Blocks that no chain has, kept for those that begin alike.
    pub kept: usize,
}

/// The blocks of one model's cache and what is in them.
#[derive(Debug)]
pub struct Cache {
    pool: BlockPool,
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
    /// An empty one. `secret` must be random: who knows it can tell what others asked.
    pub fn new(blocks: usize, block_len: usize, secret: Key) -> Self {
        Self {
            pool: BlockPool::new(blocks),
            block_len: block_len.max(1),
            secret,
        }
    }

    /// The root of a tenant's keys.
    pub fn root(&self, tenant: &str) -> Key {
        let hash = Sha256::new_with_prefix(self.secret).chain_update(tenant);
        hash.finalize().into()
    }

    /// Blocks for so many tokens.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_len)
    }

    /// Blocks that can be had.
    pub fn available(&self) -> usize {
        self.pool.available()
    }

    /// What it has.
    pub fn counts(&self) -> Counts {
        Counts {
            blocks: self.pool.total(),
            used: self.pool.total() - self.pool.available(),
            kept: self.pool.kept(),
        }
    }

    /// A chain with all blocks that are there already for the first of `tokens`, and how many tokens that are. The
    /// last token is left to be computed, if need be in a block that is shared.
    pub fn open(&mut self, root: Key, tokens: &[u32]) -> (Chain, usize) {
        let mut chain = Chain::new(root);
        for tokens in tokens.chunks_exact(self.block_len) {
            let key = next_key(&chain.tip, tokens);
            let Some(block) = self.pool.find(&key) else {
                break;
            };
            chain.blocks.push(block);
            chain.keyed += 1;
            chain.tip = key;
        }
        let held = chain.blocks.len() * self.block_len;
        (chain, held.min(tokens.len().saturating_sub(1)))
    }

    /// A chain with the blocks that hold the first `tokens` tokens of another one. They must have been computed.
    /// None if some of them were given back.
    pub fn fork(&mut self, of: &Chain, tokens: usize) -> Option<Chain> {
        let count = self.blocks_for(tokens);
        if of.gone > 0 || count > of.blocks.len() {
            return None;
        }
        let blocks = of.blocks[..count].to_vec();
        for &block in &blocks {
            self.pool.share(block);
        }
        let whole = tokens / self.block_len;
        // Keys are known up to the other one's tip only; before that they are found again when it publishes.
        let alike = of.keyed <= whole;
        Some(Chain {
            root: of.root,
            keyed: if alike { of.keyed } else { 0 },
            tip: if alike { of.tip } else { of.root },
            blocks,
            gone: 0,
        })
    }

    /// Blocks that [`Cache::ready`] would take.
    pub fn missing(&self, chain: &Chain, from: usize, to: usize) -> usize {
        let more = self.blocks_for(to).saturating_sub(chain.blocks.len());
        more + self.shared(chain, from, to).count()
    }

    /// Which of the chain's blocks are written for tokens `from..to` and not its own.
    fn shared(&self, chain: &Chain, from: usize, to: usize) -> impl Iterator<Item = usize> {
        let end = self.blocks_for(to).min(chain.blocks.len());
        let of_blocks = from / self.block_len..end.max(from / self.block_len);
        of_blocks.filter(|&i| !self.pool.is_own(chain.blocks[i]))
    }

    /// Makes room for tokens `from..to` in blocks of the chain's own. None, and nothing done, if there are too few.
    pub fn ready(&mut self, chain: &mut Chain, from: usize, to: usize) -> Option<Work> {
        if self.missing(chain, from, to) > self.pool.available() {
            return None;
        }
        let shared: Vec<usize> = self.shared(chain, from, to).collect();
        let mut work = Work {
            changed: shared.first().copied().unwrap_or(chain.blocks.len()),
            ..Work::default()
        };
        for i in shared {
            let block = self.take(chain.root, &mut work)?;
            let before = std::mem::replace(&mut chain.blocks[i], block);
            work.copy.push((before, block));
            // If it is kept now, it is the newest of those: there are enough others for the rest of this work.
            self.pool.release(before);
        }
        while chain.blocks.len() < self.blocks_for(to) {
            let block = self.take(chain.root, &mut work)?;
            chain.blocks.push(block);
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

    /// The first `computed` of `tokens` are in the chain's blocks: those that are full can be shared from now on.
    pub fn publish(&mut self, chain: &mut Chain, tokens: &[u32], computed: usize) {
        let computed = computed.min(tokens.len());
        while (chain.keyed + 1) * self.block_len <= computed && chain.keyed < chain.blocks.len() {
            let at = chain.keyed * self.block_len;
            let key = next_key(&chain.tip, &tokens[at..at + self.block_len]);
            if chain.keyed >= chain.gone {
                self.pool.publish(chain.blocks[chain.keyed], key);
            }
            chain.keyed += 1;
            chain.tip = key;
        }
    }

    /// Gives back the blocks all of whose tokens are before `position`: nobody looks that far back.
    pub fn trim(&mut self, chain: &mut Chain, position: usize) {
        // Those without keys yet stay until they have them.
        let end = (position / self.block_len).min(chain.keyed);
        while chain.gone < end {
            self.pool.release(chain.blocks[chain.gone]);
            chain.gone += 1;
        }
    }

    /// Gives back all blocks.
    pub fn close(&mut self, chain: Chain) {
        // The last one first: of what is kept, ends of prompts go before their beginnings.
        for &block in chain.blocks[chain.gone..].iter().rev() {
            self.pool.release(block);
        }
    }

    /// Keeps nothing any more.
    pub fn forget(&mut self) {
        self.pool.forget();
    }
}

#[cfg(test)]
mod tests;

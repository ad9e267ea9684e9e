//! Programs of chains against a model of the memory that knows who wrote what.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;
use tokio::sync::oneshot;

use super::{
    ledger::{Change, Kept},
    *,
};

const LEN: usize = 4;

/// What a cell of memory holds: whose chain wrote it, after which tokens. Equal histories have equal contents, as keys
/// and values do.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    tenant: u8,
    history: Vec<u32>,
}

struct Live {
    tenant: u8,
    tokens: Vec<u32>,
    computed: usize,
    chain: Chain,
}

struct Machine {
    cache: Cache,
    kinds: Vec<Kind>,
    /// By kind of layers and block.
    memory: Vec<Vec<Vec<Option<Entry>>>>,
    live: Vec<Live>,
    /// All keys that blocks were ever found by, and whose first tokens each stands for.
    keys: HashMap<Key, Entry>,
    watcher: Arc<()>,
    /// What the watcher was told that there is, by hash.
    told: HashMap<u64, Arc<Kept>>,
}

impl Machine {
    /// One kind of layers, without a window.
    fn new(blocks: usize) -> Self {
        let window = None;
        Self::of(&[Kind { window, blocks }])
    }

    fn of(kinds: &[Kind]) -> Self {
        let memory = |kind: &Kind| vec![vec![None; LEN]; kind.blocks];
        Self {
            cache: Cache::new(kinds, LEN, [7; 32]),
            kinds: kinds.to_vec(),
            memory: kinds.iter().map(memory).collect(),
            live: Vec::new(),
            keys: HashMap::new(),
            watcher: Arc::default(),
            told: HashMap::new(),
        }
    }

    /// Of the first kind.
    fn counts(&self) -> Counts {
        self.cache.counts().next().unwrap()
    }

    fn open(&mut self, tenant: u8, tokens: Vec<u32>) {
        let root = self.cache.root(&tenant.to_string());
        let (fresh, of_fresh) = self.cache.open(root, &tokens, &mut Vec::new());
        let blocks: Vec<_> = (0..KINDS).map(|kind| fresh.blocks(kind).to_vec()).collect();
        self.cache.close(fresh);
        // Who looked before, when it had fewer tokens, finds the same.
        let mut keys = Vec::new();
        let half = &tokens[..tokens.len() / 2];
        let (before, _) = self.cache.open(root, half, &mut keys);
        self.cache.close(before);
        let (chain, computed) = self.cache.open(root, &tokens, &mut keys);
        assert_eq!(computed, of_fresh);
        for (kind, blocks) in blocks.iter().enumerate() {
            assert_eq!(chain.blocks(kind), blocks);
        }
        self.live.push(Live {
            tenant,
            tokens,
            computed,
            chain,
        });
    }

    /// Computes the next tokens, as far as there are blocks. `guesses` more are written and found wrong.
    fn compute(&mut self, at: usize, count: usize, guesses: usize) {
        let live = &mut self.live[at];
        let (from, to) = (
            live.computed,
            (live.computed + count).min(live.tokens.len()),
        );
        let end = to + guesses;
        // More is known than is computed now.
        let room = Room {
            from,
            to: live.tokens.len().max(end),
            soon: end,
        };
        let Some(works) = self.cache.ready(&mut live.chain, room) else {
            return;
        };
        for (memory, work) in self.memory.iter_mut().zip(works) {
            for block in work.wipe {
                memory[block as usize].fill(None);
            }
            for (source, target) in work.copy {
                memory[target as usize] = memory[source as usize].clone();
            }
        }
        for position in from..end {
            let mut history = live.tokens[..position.min(to)].to_vec();
            // A wrong guess differs from whatever comes.
            let token = live.tokens.get(position).filter(|_| position < to);
            history.push(token.copied().unwrap_or(u32::MAX));
            for (kind, memory) in self.memory.iter_mut().enumerate() {
                let block = live.chain.blocks(kind)[position / LEN];
                memory[block as usize][position % LEN] = Some(Entry {
                    tenant: live.tenant,
                    history: history.clone(),
                });
            }
        }
        live.computed = to;
        let tenant = live.tenant.to_string();
        self.cache
            .publish(&mut live.chain, &live.tokens, to, &tenant);
        let mut key = live.chain.root;
        for (at, block) in live.tokens[..to].chunks_exact(LEN).enumerate() {
            key = next_key(&key, block);
            let entry = Entry {
                tenant: live.tenant,
                history: live.tokens[..(at + 1) * LEN].to_vec(),
            };
            self.keys.insert(key, entry);
        }
        self.cache.trim(&mut live.chain, to);
    }

    fn fork(&mut self, at: usize, tokens: usize, more: Vec<u32>) {
        let of = &self.live[at];
        let tokens = tokens.min(of.computed);
        let Some(chain) = self.cache.fork(&of.chain, tokens) else {
            return;
        };
        let mut all = of.tokens[..tokens].to_vec();
        all.extend(more);
        self.live.push(Live {
            tenant: of.tenant,
            tokens: all,
            computed: tokens,
            chain,
        });
    }

    fn close(&mut self, at: usize) {
        let live = self.live.swap_remove(at);
        self.cache.close(live.chain);
    }

    /// The watcher asks what changed; what it was told in all must be what is found now; where layers have windows, what is
    /// of use.
    fn replay(&mut self, begins: bool) {
        if begins {
            self.watcher = Arc::default();
        }
        let (reply, mut answer) = oneshot::channel();
        self.cache.ask(&self.watcher, begins, reply);
        self.cache.tell();
        if let Ok(changes) = answer.try_recv() {
            if changes.reset {
                self.told.clear();
            }
            for change in changes.list {
                match change {
                    Change::Stored(kept) => {
                        assert!(self.told.insert(kept.hash, kept).is_none(), "stored twice");
                    }
                    Change::Removed(hash) => assert!(self.told.remove(&hash).is_some()),
                }
            }
        }
        let noted = self.cache.noted;
        let there = self.keys.iter().map(|(key, entry)| (*key, entry.clone()));
        let mut there: Vec<_> = there.collect();
        there.retain(|(key, _)| self.cache.pools[noted].pool.has(key));
        if self.kinds.iter().any(|kind| kind.window.is_some()) {
            let useful = self.of_use(&there);
            there.retain(|(key, _)| useful.contains(key));
        }
        assert_eq!(self.told.len(), there.len());
        for (key, entry) in there {
            let hash = u64::from_le_bytes(key[..8].try_into().unwrap());
            let kept = &self.told[&hash];
            let from = entry.history.len() - LEN;
            assert_eq!(*kept.tokens, entry.history[from..]);
            assert_eq!(*kept.tenant, entry.tenant.to_string());
            assert_eq!(kept.depth, from / LEN);
            let root = self.cache.root(&kept.tenant);
            let parent = entry.history[..from].chunks(LEN);
            let parent = parent.fold(root, |key, block| next_key(&key, block));
            let parent = u64::from_le_bytes(parent[..8].try_into().unwrap());
            assert_eq!(kept.parent, (from > 0).then_some(parent));
        }
    }

    /// Blocks of beginnings that a prompt which goes on after one of these finds.
    fn of_use(&mut self, there: &[(Key, Entry)]) -> HashSet<Key> {
        let mut useful = HashSet::new();
        for (_, entry) in there {
            let root = self.cache.root(&entry.tenant.to_string());
            let longer = [&entry.history[..], &[0]].concat();
            let (chain, held) = self.cache.open(root, &longer, &mut Vec::new());
            self.cache.close(chain);
            let mut key = root;
            for block in longer[..held].chunks_exact(LEN) {
                key = next_key(&key, block);
                // Without layers that look at everything, what is behind the window may be gone.
                if !self.cache.pools[self.cache.noted].pool.has(&key) {
                    break;
                }
                useful.insert(key);
            }
        }
        useful
    }

    fn check(&self) {
        for (kind, counts) in self.cache.counts().enumerate() {
            let mut held: HashSet<u32> = HashSet::new();
            for live in &self.live {
                self.check_chain(kind, live);
                held.extend(&live.chain.blocks(kind)[live.chain.gone(kind)..]);
            }
            assert_eq!(counts.used, held.len(), "blocks that nobody has are held");
            assert!(counts.kept + counts.used <= counts.blocks);
        }
    }

    fn check_chain(&self, kind: usize, live: &Live) {
        let memory = &self.memory[kind];
        let (blocks, gone) = (live.chain.blocks(kind), live.chain.gone(kind));
        for block in &blocks[gone..] {
            for entry in memory[*block as usize].iter().flatten() {
                assert_eq!(entry.tenant, live.tenant, "another tenant's entry");
            }
        }
        assert!(blocks[..gone].iter().all(|&block| block == GONE));
        // What the next row looks at is there.
        let window = self.kinds[kind].window.unwrap_or(usize::MAX);
        assert!(gone * LEN <= (live.computed + 1).saturating_sub(window));
        for position in gone * LEN..live.computed {
            let entry = memory[blocks[position / LEN] as usize][position % LEN].as_ref();
            let entry = entry.expect("a position that was computed is written");
            assert_eq!(entry.tenant, live.tenant);
            assert_eq!(entry.history, live.tokens[..=position]);
        }
    }
}

#[derive(Clone, Debug)]
enum Op {
    Open(u8, Vec<u32>),
    Compute(usize, usize, usize),
    Push(usize, u32),
    Fork(usize, usize, Vec<u32>),
    Close(usize),
    Forget,
}

/// Layers without a window, with one, or of both kinds.
fn kinds() -> impl Strategy<Value = Vec<Kind>> {
    let kind = |window: Option<usize>| (1usize..12).prop_map(move |blocks| Kind { window, blocks });
    let windowed = (1usize..14).prop_flat_map(move |window| kind(Some(window)));
    prop_oneof![
        kind(None).prop_map(|kind| vec![kind]),
        windowed.clone().prop_map(|kind| vec![kind]),
        (kind(None), windowed).prop_map(|(whole, windowed)| vec![whole, windowed]),
    ]
}

fn tokens(most: usize) -> impl Strategy<Value = Vec<u32>> {
    // Few different ones, so that beginnings are alike.
    proptest::collection::vec(0u32..2, 1..most)
}

fn op() -> impl Strategy<Value = Op> {
    let at = 0usize..64;
    prop_oneof![
        4 => (0u8..3, tokens(20)).prop_map(|(tenant, tokens)| Op::Open(tenant, tokens)),
        8 => (at.clone(), 1usize..12, 0usize..6).prop_map(|(a, n, g)| Op::Compute(a, n, g)),
        4 => (at.clone(), 0u32..2).prop_map(|(a, t)| Op::Push(a, t)),
        2 => (at.clone(), 0usize..24, tokens(6)).prop_map(|(a, n, t)| Op::Fork(a, n, t)),
        4 => at.prop_map(Op::Close),
        1 => Just(Op::Forget),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Whatever is opened, forked, written, guessed and closed in whatever order: a chain reads what its own tokens
    /// wrote, nothing of another tenant; who watches is told what can be found; and in the end every block is there again.
    #[test]
    fn nobody_reads_what_is_not_theirs_and_nothing_leaks(
        kinds in kinds(), program in proptest::collection::vec(op(), 1..120),
    ) {
        let mut machine = Machine::of(&kinds);
        for (number, op) in program.into_iter().enumerate() {
            let count = machine.live.len();
            match op {
                Op::Open(tenant, tokens) => machine.open(tenant, tokens),
                Op::Forget => machine.cache.forget(),
                _ if count == 0 => {}
                Op::Compute(at, n, guesses) => machine.compute(at % count, n, guesses),
                Op::Push(at, token) => machine.live[at % count].tokens.push(token),
                Op::Fork(at, tokens, more) => machine.fork(at % count, tokens, more),
                Op::Close(at) => machine.close(at % count),
            }
            machine.check();
            // Some changes come together, and now and then the watcher begins anew.
            if number % 3 == 0 {
                machine.replay(number % 21 == 0);
            }
        }
        while !machine.live.is_empty() {
            machine.close(0);
        }
        machine.replay(false);
        prop_assert!(machine.cache.counts().all(|counts| counts.used == 0));
        machine.cache.forget();
        machine.replay(false);
        prop_assert!(machine.told.is_empty());
        for (kind, counts) in kinds.iter().zip(machine.cache.counts()) {
            prop_assert_eq!((counts.kept, counts.blocks), (0, kind.blocks));
        }
    }
}

#[test]
fn the_same_beginning_is_found_by_the_same_tenant_only() {
    let mut machine = Machine::new(16);
    let prompt: Vec<u32> = (0..10).collect();
    machine.open(0, prompt.clone());
    assert_eq!(machine.live[0].computed, 0);
    machine.compute(0, 10, 0);
    // While the first is there, and after it.
    for tenant in [0, 1, 0] {
        machine.open(tenant, prompt.clone());
        let cached = machine.live.last().unwrap().computed;
        assert_eq!(cached, if tenant == 0 { 8 } else { 0 });
        machine.check();
        while !machine.live.is_empty() {
            machine.close(0);
        }
    }
    let mut longer = prompt[..9].to_vec();
    longer[8] = 77;
    machine.open(0, longer);
    assert_eq!(machine.live[0].computed, 8);
    let mut other = prompt.clone();
    other[5] = 77;
    machine.open(0, other);
    assert_eq!(machine.live[1].computed, 4);
}

#[test]
fn the_last_token_of_a_known_prompt_is_computed_in_a_copy() {
    let mut machine = Machine::new(3);
    machine.open(0, (0..8).collect());
    machine.compute(0, 8, 0);
    machine.open(0, (0..8).collect());
    let second = &machine.live[1];
    assert_eq!(
        (second.computed, second.chain.blocks(0)),
        (7, &[0u32, 1][..])
    );
    assert!(machine.cache.fits(&second.chain, Room::all(7, 8), 0));
    assert!(!machine.cache.fits(&second.chain, Room::all(7, 8), 1));
    machine.compute(1, 1, 0);
    assert_eq!(machine.live[1].chain.blocks(0), [0, 2]);
    assert_eq!(machine.live[0].chain.blocks(0), [0, 1]);
    machine.check();
}

#[test]
fn a_fork_shares_until_either_writes() {
    let mut machine = Machine::new(4);
    machine.open(0, (0..6).collect());
    machine.compute(0, 6, 0);
    machine.fork(0, 6, vec![]);
    machine.fork(0, 6, vec![]);
    assert_eq!(machine.counts().used, 2);
    for (at, token) in [(0, 10), (1, 11)] {
        machine.live[at].tokens.push(token);
        machine.compute(at, 1, 0);
        machine.check();
    }
    // The third is alone with the block that all had.
    assert_eq!(machine.counts().used, 4);
    let tails: Vec<u32> = machine.live.iter().map(|l| l.chain.blocks(0)[1]).collect();
    assert_eq!(tails, [2, 3, 1]);
    machine.live[2].tokens.push(12);
    machine.compute(2, 1, 0);
    assert_eq!(machine.live[2].chain.blocks(0), [0, 1]);
    machine.check();
}

#[test]
fn too_few_blocks_change_nothing() {
    let mut machine = Machine::new(3);
    machine.open(0, (0..8).collect());
    machine.compute(0, 8, 0);
    machine.fork(0, 6, vec![1; 7]);
    let before = machine.live[1].chain.blocks(0).to_vec();
    let live = &mut machine.live[1];
    // A copy of the second block and two more, where one is left.
    assert!(!machine.cache.fits(&live.chain, Room::all(6, 13), 0));
    assert_eq!(machine.cache.ready(&mut live.chain, Room::all(6, 13)), None);
    assert_eq!(machine.live[1].chain.blocks(0), before);
    machine.check();
}

#[test]
fn what_lies_behind_the_window_is_given_back_and_can_be_found_again() {
    let kind = |window| Kind { window, blocks: 8 };
    let mut machine = Machine::of(&[kind(None), kind(Some(8))]);
    machine.open(0, (0..18).collect());
    machine.compute(0, 18, 0);
    // The next row, number 18, looks at 11 and what comes after it.
    assert_eq!([0, 1].map(|kind| machine.live[0].chain.gone(kind)), [0, 2]);
    let counts: Vec<Counts> = machine.cache.counts().collect();
    assert_eq!((counts[0].used, counts[0].kept), (5, 0));
    assert_eq!((counts[1].used, counts[1].kept), (3, 2));
    machine.check();
    // The same beginning, of which only the end is needed in layers with a window.
    machine.open(0, (0..18).collect());
    assert_eq!(machine.live[1].computed, 16);
    assert_eq!(machine.live[1].chain.gone(1), 2);
    machine.check();
    // A shorter one, of which the end is still kept.
    machine.open(0, (0..11).collect());
    assert_eq!(machine.live[2].computed, 8);
    machine.check();
}

#[test]
fn a_beginning_is_of_use_up_to_where_each_kind_has_what_the_next_row_looks_at() {
    let kind = |window, blocks| Kind { window, blocks };
    let mut machine = Machine::of(&[kind(None, 16), kind(Some(6), 4)]);
    machine.open(0, (0..24).collect());
    for _ in 0..6 {
        machine.compute(0, 4, 0);
    }
    assert_eq!(machine.live[0].chain.gone(1), 4);
    machine.close(0);
    // Of six blocks, the last four are kept for the layers with the window: 2, 3, 4 and 5.
    for (len, computed) in [(25, 24), (24, 23), (17, 16), (13, 0), (9, 0)] {
        machine.open(0, (0..len).collect());
        assert_eq!(machine.live[0].computed, computed, "{len} tokens");
        machine.check();
        machine.close(0);
    }
}

#[test]
fn keys_depend_on_tenant_secret_tokens_and_where_they_stand() {
    let a = Cache::new(&[], LEN, [1; 32]);
    let b = Cache::new(&[], LEN, [2; 32]);
    let mut seen = HashMap::new();
    for (i, key) in [
        a.root("x"),
        a.root("y"),
        a.root(""),
        b.root("x"),
        next_key(&a.root("x"), &[1, 2]),
        next_key(&a.root("x"), &[2, 1]),
        next_key(&a.root("y"), &[1, 2]),
        next_key(&next_key(&a.root("x"), &[1, 2]), &[1, 2]),
    ]
    .into_iter()
    .enumerate()
    {
        assert_eq!(seen.insert(key, i), None);
    }
}

//! Programs of chains against a model of the memory that knows who wrote what.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::*;

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
    memory: Vec<Vec<Option<Entry>>>,
    live: Vec<Live>,
}

impl Machine {
    fn new(blocks: usize) -> Self {
        Self {
            cache: Cache::new(blocks, LEN, [7; 32]),
            memory: vec![vec![None; LEN]; blocks],
            live: Vec::new(),
        }
    }

    fn open(&mut self, tenant: u8, tokens: Vec<u32>) {
        let root = self.cache.root(&tenant.to_string());
        let (chain, computed) = self.cache.open(root, &tokens);
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
        let Some(work) = self.cache.ready(&mut live.chain, from, end) else {
            return;
        };
        for block in work.wipe {
            self.memory[block as usize].fill(None);
        }
        for (source, target) in work.copy {
            self.memory[target as usize] = self.memory[source as usize].clone();
        }
        for position in from..end {
            let block = live.chain.blocks()[position / LEN];
            let mut history = live.tokens[..position.min(to)].to_vec();
            // A wrong guess differs from whatever comes.
            let token = live.tokens.get(position).filter(|_| position < to);
            history.push(token.copied().unwrap_or(u32::MAX));
            self.memory[block as usize][position % LEN] = Some(Entry {
                tenant: live.tenant,
                history,
            });
        }
        live.computed = to;
        self.cache.publish(&mut live.chain, &live.tokens, to);
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

    fn check(&self) {
        let mut held: HashSet<u32> = HashSet::new();
        for live in &self.live {
            let blocks = &live.chain.blocks()[live.chain.gone()..];
            held.extend(blocks);
            for block in blocks {
                for entry in self.memory[*block as usize].iter().flatten() {
                    assert_eq!(entry.tenant, live.tenant, "another tenant's entry");
                }
            }
            for position in live.chain.gone() * LEN..live.computed {
                let block = live.chain.blocks()[position / LEN];
                let entry = self.memory[block as usize][position % LEN].as_ref();
                let entry = entry.expect("a position that was computed is written");
                assert_eq!(entry.tenant, live.tenant);
                assert_eq!(entry.history, live.tokens[..=position]);
            }
        }
        let counts = self.cache.counts();
        assert_eq!(counts.used, held.len(), "blocks that nobody has are held");
        assert!(counts.kept + counts.used <= counts.blocks);
    }
}

#[derive(Clone, Debug)]
enum Op {
    Open(u8, Vec<u32>),
    Compute(usize, usize, usize),
    Push(usize, u32),
    Fork(usize, usize, Vec<u32>),
    Trim(usize, usize),
    Close(usize),
    Forget,
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
        1 => (at.clone(), 0usize..20).prop_map(|(a, n)| Op::Trim(a, n)),
        4 => at.prop_map(Op::Close),
        1 => Just(Op::Forget),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Whatever is opened, forked, written, guessed and closed in whatever order: a chain reads what its own tokens
    /// wrote, nothing of another tenant, and in the end every block is there again.
    #[test]
    fn nobody_reads_what_is_not_theirs_and_nothing_leaks(
        blocks in 1usize..12, program in proptest::collection::vec(op(), 1..120),
    ) {
        let mut machine = Machine::new(blocks);
        for op in program {
            let count = machine.live.len();
            match op {
                Op::Open(tenant, tokens) => machine.open(tenant, tokens),
                Op::Forget => machine.cache.forget(),
                _ if count == 0 => {}
                Op::Compute(at, n, guesses) => machine.compute(at % count, n, guesses),
                Op::Push(at, token) => machine.live[at % count].tokens.push(token),
                Op::Fork(at, tokens, more) => machine.fork(at % count, tokens, more),
                Op::Trim(at, position) => {
                    let live = &mut machine.live[at % count];
                    let position = position.min(live.computed);
                    machine.cache.trim(&mut live.chain, position);
                }
                Op::Close(at) => machine.close(at % count),
            }
            machine.check();
        }
        while !machine.live.is_empty() {
            machine.close(0);
        }
        prop_assert_eq!(machine.cache.available(), blocks);
        prop_assert_eq!(machine.cache.counts().used, 0);
        machine.cache.forget();
        prop_assert_eq!(machine.cache.counts().kept, 0);
        prop_assert_eq!(machine.cache.available(), blocks);
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
        (second.computed, second.chain.blocks()),
        (7, &[0u32, 1][..])
    );
    assert_eq!(machine.cache.missing(&second.chain, 7, 8), 1);
    machine.compute(1, 1, 0);
    assert_eq!(machine.live[1].chain.blocks(), [0, 2]);
    assert_eq!(machine.live[0].chain.blocks(), [0, 1]);
    machine.check();
}

#[test]
fn a_fork_shares_until_either_writes() {
    let mut machine = Machine::new(4);
    machine.open(0, (0..6).collect());
    machine.compute(0, 6, 0);
    machine.fork(0, 6, vec![]);
    machine.fork(0, 6, vec![]);
    assert_eq!(machine.cache.counts().used, 2);
    for (at, token) in [(0, 10), (1, 11)] {
        machine.live[at].tokens.push(token);
        machine.compute(at, 1, 0);
        machine.check();
    }
    // The third is alone with the block that all had.
    assert_eq!(machine.cache.counts().used, 4);
    let tails: Vec<u32> = machine.live.iter().map(|l| l.chain.blocks()[1]).collect();
    assert_eq!(tails, [2, 3, 1]);
    machine.live[2].tokens.push(12);
    machine.compute(2, 1, 0);
    assert_eq!(machine.live[2].chain.blocks(), [0, 1]);
    machine.check();
}

#[test]
fn too_few_blocks_change_nothing() {
    let mut machine = Machine::new(3);
    machine.open(0, (0..8).collect());
    machine.compute(0, 8, 0);
    machine.fork(0, 6, vec![1; 7]);
    let before = machine.live[1].chain.blocks().to_vec();
    let live = &mut machine.live[1];
    // A copy of the second block and two more, where one is left.
    assert_eq!(machine.cache.missing(&live.chain, 6, 13), 3);
    assert_eq!(machine.cache.ready(&mut live.chain, 6, 13), None);
    assert_eq!(machine.live[1].chain.blocks(), before);
    machine.check();
}

#[test]
fn what_lies_behind_the_window_is_given_back_and_can_be_found_again() {
    let mut machine = Machine::new(8);
    machine.open(0, (0..18).collect());
    machine.compute(0, 18, 0);
    let live = &mut machine.live[0];
    machine.cache.trim(&mut live.chain, 11);
    assert_eq!(live.chain.gone(), 2);
    let counts = machine.cache.counts();
    assert_eq!((counts.used, counts.kept), (3, 2));
    machine.check();
    machine.open(0, (0..18).collect());
    assert_eq!(machine.live[1].computed, 16);
    machine.check();
}

#[test]
fn keys_depend_on_tenant_secret_tokens_and_where_they_stand() {
    let a = Cache::new(1, LEN, [1; 32]);
    let b = Cache::new(1, LEN, [2; 32]);
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

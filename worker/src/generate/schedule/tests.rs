//! Decisions one by one, and whole crowds of requests in a simulated batch.

use proptest::prelude::*;

use super::*;

fn class(tenant: &str, priority: u32) -> Class {
    Class {
        tenant: tenant.into(),
        priority,
    }
}

fn want(id: u64, class: &Class, pending: usize) -> Want<'_> {
    Want {
        id,
        class,
        arrival: id,
        pending,
        flies: false,
    }
}

const fn steps_of(rows: usize) -> Budget {
    Budget {
        rows,
        beside: rows,
        draws: rows,
    }
}

const BUDGET: Budget = steps_of(128);

#[test]
fn those_that_draw_go_first_and_prompts_have_the_rest() {
    let a = class("a", 0);
    let mut schedule = Schedule::default();
    let wants = [want(0, &a, 1), want(1, &a, 500), want(2, &a, 1)];
    assert_eq!(schedule.grant(&wants, BUDGET), [(0, 1), (2, 1), (1, 126)]);
    let brief = Budget {
        beside: 32,
        ..BUDGET
    };
    assert_eq!(schedule.grant(&wants, brief), [(0, 1), (2, 1), (1, 32)]);
    // Nobody to keep waiting: all of it.
    assert_eq!(schedule.grant(&wants[1..2], brief), [(0, 128)]);
}

#[test]
fn those_that_draw_take_turns_in_groups_and_who_is_on_its_way_is_not_forgotten() {
    let (a, b) = (class("a", 0), class("b", 0));
    let mut schedule = Schedule::default();
    let pairs = Budget { draws: 2, ..BUDGET };
    let mut wants: Vec<Want<'_>> = (0..5).map(|id| want(id, &a, 1)).collect();
    assert_eq!(schedule.grant(&wants, pairs), [(0, 1), (1, 1)]);
    for first in [2, 4, 1, 3] {
        let group = [first, (first + 1) % 5];
        let before = [(first + 3) % 5, (first + 4) % 5];
        for (i, want) in wants.iter_mut().enumerate() {
            want.flies = before.contains(&i);
        }
        assert_eq!(schedule.grant(&wants, pairs), group.map(|i| (i, 1)));
    }
    // Two tenants' prompts have as many rows, though those of one are on their way in every second step.
    let mut rows = [0; 2];
    for step in 0..200 {
        let mut wants = [want(10, &a, 1000), want(11, &b, 1000)];
        wants[0].flies = step % 2 == 1;
        for (i, granted) in schedule.grant(&wants, steps_of(16)) {
            rows[i] += granted;
        }
    }
    assert!(rows[0].abs_diff(rows[1]) <= 16, "{rows:?}");
}

#[test]
fn a_short_prompt_does_not_wait_for_a_long_one_nor_the_other_way_round() {
    let a = class("a", 0);
    let mut schedule = Schedule::default();
    let long = want(0, &a, 4000);
    assert_eq!(
        schedule.grant(std::slice::from_ref(&long), BUDGET),
        [(0, 128)]
    );
    let wants = [long.clone(), want(1, &a, 40)];
    assert_eq!(schedule.grant(&wants, BUDGET), [(0, 88), (1, 40)]);
    // However many short ones come, the long one has a quarter, less a piece that it is owed.
    let mut wants = vec![long];
    wants.extend((1..20).map(|i| want(i, &a, 20)));
    let grants = schedule.grant(&wants, BUDGET);
    assert_eq!(grants[0].0, 0);
    assert!((24..=40).contains(&grants[0].1), "{grants:?}");
}

#[test]
fn a_short_prompt_ends_with_its_step_and_the_long_one_has_its_turn_later() {
    let a = class("a", 0);
    let mut schedule = Schedule::default();
    let budget = steps_of(20);
    let (mut long, mut whole) = (0, 0);
    for step in 1..=400 {
        let wants = [want(0, &a, 100_000), want(step, &a, 16)];
        let grants = schedule.grant(&wants, budget);
        long += grants.iter().find(|g| g.0 == 0).map_or(0, |g| g.1);
        whole += u32::from(grants.contains(&(1, 16)));
    }
    // Four rows are left in each step.
    assert!(whole > 300 && long >= 1600, "{whole} of 400, {long} rows");
}

#[test]
fn short_prompts_keep_no_long_one_from_its_turns_whoever_else_reads() {
    let (a, b) = (class("a", 0), class("b", 0));
    for rows in [16, 24, 32, 40] {
        let mut schedule = Schedule::default();
        let budget = steps_of(rows);
        let (mut long, mut steps) = (0, 0);
        for step in 0..1000u64 {
            let mut wants = vec![want(0, &a, 1_000_000), want(1, &b, 1_000_000)];
            wants.extend((0..8).map(|i| want(10 + 8 * step + i, &b, 8)));
            let grants = schedule.grant(&wants, budget);
            long += grants.iter().find(|g| g.0 == 1).map_or(0, |g| g.1);
            steps += 1;
        }
        // A quarter of its tenant's half.
        let least = rows * steps / 8 * 9 / 10;
        assert!(long >= least, "{rows}: {long} of {least} rows");
    }
}

#[test]
fn prompts_of_tenants_share_alike_and_priorities_by_their_weight() {
    let (a, b, high) = (class("a", 0), class("b", 0), class("a", 2));
    let mut schedule = Schedule::default();
    let mut wants: Vec<Want<'_>> = (0..9).map(|i| want(i, &a, 10_000)).collect();
    wants.push(want(9, &b, 10_000));
    wants.push(want(10, &high, 10_000));
    let mut got = [0; 11];
    for _ in 0..100 {
        for (i, rows) in schedule.grant(&wants, BUDGET) {
            got[i] += rows;
        }
    }
    let low: usize = got[..9].iter().sum();
    let all: usize = got.iter().sum();
    assert_eq!(all, 12_800);
    assert!(got[9].abs_diff(all / 2) <= 16, "{got:?}");
    assert!(got[10].abs_diff(4 * low) <= 80, "{got:?}");
}

#[test]
fn where_not_all_fit_they_take_turns() {
    let a = class("a", 0);
    let mut schedule = Schedule::default();
    let wants: Vec<Want<'_>> = (0..6).map(|i| want(i, &a, 1)).collect();
    let budget = steps_of(4);
    let mut got = [0; 6];
    for _ in 0..30 {
        for (i, rows) in schedule.grant(&wants, budget) {
            got[i] += rows;
        }
    }
    assert_eq!(got, [20; 6]);
    // One row for all, and a prompt.
    let mut wants = wants;
    wants.push(want(6, &a, 100));
    let mut got = [0; 7];
    for _ in 0..120 {
        for (i, rows) in schedule.grant(&wants, steps_of(1)) {
            got[i] += rows;
        }
    }
    assert_eq!(got, [10, 10, 10, 10, 10, 10, 60]);
}

#[test]
fn the_next_to_come_in_is_the_oldest_of_the_neediest_class() {
    let (a, b) = (class("a", 0), class("b", 0));
    let mut schedule = Schedule::default();
    let waiting = [
        Waiting {
            class: &a,
            arrival: 3,
        },
        Waiting {
            class: &b,
            arrival: 4,
        },
        Waiting {
            class: &a,
            arrival: 1,
        },
    ];
    for w in &waiting {
        schedule.arrived(w.class);
    }
    assert_eq!(schedule.next(&waiting), Some(2));
    schedule.worked(&a, 10);
    assert_eq!(schedule.next(&waiting), Some(1));
    schedule.worked(&b, 11);
    assert_eq!(schedule.next(&waiting), Some(2));
    assert_eq!(schedule.next(&[]), None);
}

#[test]
fn who_makes_room() {
    let holder = |priority, arrival| Holder {
        priority,
        arrival,
        preempted: 0,
        stalled: false,
    };
    let stalled = |h: Holder| Holder { stalled: true, ..h };
    let spared = |h: Holder| Holder { preempted: 2, ..h };
    let victim = |holders: &[Holder], needy| Schedule::victim(holders, needy);
    assert_eq!(victim(&[], 0), None);
    assert_eq!(
        victim(&[holder(0, 1), holder(0, 2), holder(1, 3)], 0),
        Some(1)
    );
    assert_eq!(
        victim(&[holder(1, 1), holder(0, 2), holder(1, 3)], 1),
        Some(1)
    );
    assert_eq!(victim(&[stalled(holder(7, 1)), holder(0, 2)], 1), Some(0));
    // One that is stalled itself does not ask for more, but were it so it would be no worse off.
    assert_eq!(victim(&[stalled(holder(7, 1)), holder(0, 2)], 0), Some(1));
    assert_eq!(victim(&[spared(holder(0, 2)), holder(1, 1)], 0), Some(1));
}

#[derive(Clone, Debug)]
struct Simulated {
    id: u64,
    class: Class,
    tokens: usize,
    computed: usize,
    end: usize,
    blocks: usize,
    preempted: u32,
}

/// A batch without a model.
struct World {
    schedule: Schedule,
    waiting: Vec<Simulated>,
    running: Vec<Simulated>,
    free: usize,
    tables: usize,
    budget: Budget,
    done: Vec<u64>,
    arrivals: u64,
}

const BLOCK: usize = 4;

impl World {
    fn new(blocks: usize, tables: usize, rows: usize) -> Self {
        Self {
            schedule: Schedule::default(),
            waiting: vec![],
            running: vec![],
            free: blocks,
            tables,
            budget: steps_of(rows),
            done: vec![],
            arrivals: 0,
        }
    }

    fn push(&mut self, class: &Class, prompt: usize, output: usize) -> u64 {
        self.schedule.arrived(class);
        let id = self.arrivals;
        self.arrivals += 1;
        self.waiting.push(Simulated {
            id,
            class: class.clone(),
            tokens: prompt,
            computed: 0,
            end: prompt + output,
            blocks: 0,
            preempted: 0,
        });
        id
    }

    fn admit(&mut self) {
        while self.running.len() < self.tables {
            let waiting: Vec<Waiting<'_>> = (self.waiting.iter())
                .map(|s| Waiting {
                    class: &s.class,
                    arrival: s.id,
                })
                .collect();
            let Some(at) = self.schedule.next(&waiting) else {
                return;
            };
            let needed = self.waiting[at].tokens.div_ceil(BLOCK);
            if self.free < needed + self.running.len() {
                return;
            }
            let mut s = self.waiting.remove(at);
            self.free -= needed;
            s.blocks = needed;
            self.schedule.worked(&s.class, s.tokens);
            self.running.push(s);
        }
    }

    fn grow(&mut self) {
        let mut i = 0;
        while i < self.running.len() {
            let s = &self.running[i];
            let missing = s.tokens.div_ceil(BLOCK).saturating_sub(s.blocks);
            if missing <= self.free {
                self.free -= missing;
                self.running[i].blocks += missing;
                i += 1;
                continue;
            }
            let holders: Vec<Holder> = (self.running.iter())
                .map(|s| Holder {
                    priority: s.class.priority,
                    arrival: s.id,
                    preempted: s.preempted,
                    stalled: false,
                })
                .collect();
            let victim = Schedule::victim(&holders, i).unwrap();
            assert!(self.running.len() > 1, "one alone has room");
            let mut s = self.running.remove(victim);
            self.free += s.blocks;
            (s.blocks, s.computed) = (0, 0);
            s.preempted += 1;
            self.waiting.push(s);
            i -= usize::from(victim < i);
        }
    }

    fn step(&mut self) {
        self.admit();
        self.grow();
        let wants: Vec<Want<'_>> = (self.running.iter())
            .map(|s| want(s.id, &s.class, s.tokens - s.computed))
            .collect();
        let grants = self.schedule.grant(&wants, self.budget);
        let rows: usize = grants.iter().map(|g| g.1).sum();
        assert!(rows <= self.budget.rows);
        assert!(rows > 0 || self.running.is_empty());
        for (i, rows) in grants {
            let s = &mut self.running[i];
            s.computed += rows;
            assert!(s.computed <= s.tokens);
            if s.computed == s.tokens {
                s.tokens += 1;
                self.schedule.worked(&s.class, 1);
            }
        }
        let ended = self.running.extract_if(.., |s| s.tokens >= s.end);
        for s in ended.collect::<Vec<_>>() {
            self.free += s.blocks;
            self.schedule.left(&s.class);
            self.done.push(s.id);
        }
    }

    fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }
}

#[test]
fn the_lowest_priority_moves_under_a_flood_of_the_highest_while_memory_is_short() {
    let (low, high) = (class("a", 0), class("a", 7));
    // One request needs up to ten blocks; eleven are there.
    let mut world = World::new(11, 4, 16);
    let patient = world.push(&low, 10, 30);
    let mut steps = 0;
    while !world.done.contains(&patient) {
        while world.waiting.len() < 5 {
            world.push(&high, 10, 30);
        }
        world.step();
        steps += 1;
        assert!(steps < 20_000, "{:?}", world.running);
    }
    // It had its share and no more: the others went by.
    assert!(world.done.len() > 5);
}

#[test]
fn a_tenant_with_one_request_is_not_kept_by_one_with_hundreds() {
    let (crowd, single) = (class("a", 7), class("b", 0));
    let mut world = World::new(64, 4, 16);
    for _ in 0..300 {
        world.push(&crowd, 40, 20);
    }
    for _ in 0..100 {
        world.step();
    }
    let one = world.push(&single, 40, 20);
    let before = world.done.len();
    while !world.done.contains(&one) {
        world.step();
    }
    // It comes in with the next place: two rounds of the others' at most.
    assert!(
        world.done.len() - before <= 12,
        "{}",
        world.done.len() - before
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Whoever comes, whenever, at whatever priority: all end, and everything is given back.
    #[test]
    fn everybody_ends(
        blocks in 10usize..40, tables in 1usize..8, rows in 1usize..40,
        crowd in proptest::collection::vec((0u8..3, 0u32..=7, 1usize..20, 1usize..20, 0usize..8), 1..40),
    ) {
        let mut world = World::new(blocks, tables, rows);
        let count = crowd.len();
        let mut bound = 100;
        for (tenant, priority, prompt, output, pause) in crowd {
            world.push(&class(&tenant.to_string(), priority), prompt, output);
            // Each time somebody makes room the work up to there is lost; ranks rise each time.
            bound += 20 * (prompt + output) + pause;
            for _ in 0..pause {
                world.step();
            }
        }
        let mut steps = 0;
        while !world.is_empty() {
            world.step();
            steps += 1;
            prop_assert!(steps < bound, "no end after {steps} steps: {:?} {:?}", world.running, world.waiting);
        }
        prop_assert_eq!(world.done.len(), count);
        prop_assert_eq!(world.free, blocks);
    }
}

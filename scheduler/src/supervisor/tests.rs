//! What a supervisor decides, event by event and over any course of them.

use proptest::prelude::*;

use super::*;

const POLICY: Policy = Policy {
    budget: 3,
    window: Duration::from_secs(60),
    backoff: Duration::from_millis(100),
    backoff_max: Duration::from_millis(350),
    start_timeout: Duration::from_secs(10),
    stop_timeout: Duration::from_secs(1),
};

fn segv() -> Death {
    Death::new(DeathKind::Signal { number: 11 }, "")
}

#[derive(Clone)]
struct Clock {
    state: State,
    now: Duration,
}

impl Clock {
    fn started() -> Self {
        let mut clock = Clock {
            state: State::default(),
            now: Duration::ZERO,
        };
        assert_eq!(clock.tell(Event::Begin), [Action::Spawn { epoch: 1 }]);
        clock
    }

    fn after(&mut self, ms: u64) -> &mut Self {
        self.now += Duration::from_millis(ms);
        self
    }

    fn tell(&mut self, event: Event) -> Vec<Action> {
        let (state, actions) = step(&POLICY, self.state.clone(), event, self.now);
        self.state = state;
        actions
    }

    fn dies(&mut self) -> Vec<Action> {
        self.tell(Event::Exited {
            death: segv(),
            jitter: 1.0,
        })
    }
}

fn died(pause_ms: Option<u64>) -> Action {
    Action::ReportDeath {
        death: segv(),
        pause: pause_ms.map(Duration::from_millis),
    }
}

#[test]
fn the_first_death_is_followed_by_a_spawn_at_once_and_later_ones_wait_longer_each() {
    let mut clock = Clock::started();
    clock.tell(Event::Ready);
    assert_eq!(clock.dies(), [died(Some(0)), Action::Spawn { epoch: 2 }]);
    clock.tell(Event::Ready);
    assert_eq!(clock.dies(), [died(Some(100))]);
    assert_eq!(clock.after(99).tell(Event::Tick), []);
    assert_eq!(
        clock.after(1).tell(Event::Tick),
        [Action::Spawn { epoch: 3 }]
    );
    assert_eq!(clock.dies(), [died(Some(200))]);
}

#[test]
fn a_worker_that_is_restarted_is_started_again_at_once_and_has_not_died() {
    let mut clock = Clock::started();
    assert_eq!(clock.tell(Event::Restart), [], "not before it is ready");
    clock.tell(Event::Ready);
    assert_eq!(clock.tell(Event::Restart), [Action::Terminate]);
    assert_eq!(clock.tell(Event::Restart), []);
    assert!(clock.state.is_hopeful());
    assert_eq!(clock.state.cause(segv()).kind, DeathKind::Stopped);
    assert_eq!(clock.after(1000).tell(Event::Tick), [Action::Kill]);
    assert_eq!(clock.dies(), [Action::Spawn { epoch: 2 }]);
    clock.tell(Event::Ready);
    assert_eq!(clock.state.deaths, 0);
    // The scheduler's end comes before.
    clock.tell(Event::Restart);
    assert_eq!(clock.tell(Event::Stop), []);
    assert_eq!(clock.dies(), []);
    assert!(clock.state.is_over());
}

#[test]
fn another_program_goes_on_with_what_is_remembered() {
    let mut clock = Clock::started();
    clock.tell(Event::Ready);
    clock.dies();
    clock.tell(Event::Ready);
    clock.after(1000);
    let past = clock.state.past(clock.now);
    let ago = Duration::from_millis(1000);
    assert_eq!(
        (past.epoch, past.deaths, &past.recent[..]),
        (2, 1, &[ago][..])
    );
    let next = |past: &Past, until| Clock {
        state: State::inherit(past.clone(), &POLICY, Duration::ZERO, until),
        now: Duration::ZERO,
    };
    // Its process lives on, and dies as the second one within the window.
    let until = Duration::from_secs(5);
    let mut alive = next(&past, Some(until));
    assert_eq!(alive.tell(Event::Begin), []);
    assert_eq!(alive.state.wake_at(), Some(until));
    alive.tell(Event::Ready);
    assert_eq!(alive.state.phase, Phase::Ready);
    assert_eq!(alive.dies(), [died(Some(100))]);
    // Without a process it is started, under the next number.
    let mut gone = next(&past, None);
    assert_eq!(gone.tell(Event::Begin), [Action::Spawn { epoch: 3 }]);
    // Out of use stays out of use until it is released.
    let quarantined = Past {
        quarantined: Some("died too often".into()),
        ..past
    };
    let mut out = next(&quarantined, None);
    assert_eq!(out.tell(Event::Begin), []);
    assert_eq!(out.state.past(out.now).quarantined, quarantined.quarantined);
    assert_eq!(out.tell(Event::Release), [Action::Spawn { epoch: 3 }]);
    // More than it would ever have remembered is not believed.
    let many = Past {
        recent: vec![Duration::ZERO; 1000],
        ..quarantined
    };
    let most = POLICY.budget as usize;
    assert_eq!(next(&many, None).state.recent.len(), most);
}

#[test]
fn past_the_budget_it_is_quarantined_and_stays_so() {
    let mut clock = Clock::started();
    for _ in 0..POLICY.budget {
        clock.dies();
        clock.after(1000).tell(Event::Tick);
    }
    let actions = clock.dies();
    assert!(
        matches!(&actions[..], [d, Action::ReportQuarantine { reason }]
            if *d == died(None) && reason.contains("4 times") && reason.contains("SIGSEGV"))
    );
    for event in [Event::Tick, Event::Ready, Event::Begin, Event::Progress] {
        assert_eq!(clock.after(100_000).tell(event), []);
    }
    assert!(matches!(clock.state.phase, Phase::Quarantined { .. }));
    assert!(!clock.state.is_hopeful());
}

#[test]
fn deaths_outside_the_window_are_forgotten() {
    let mut clock = Clock::started();
    for epoch in 2..40 {
        clock.after(60_000).tell(Event::Ready);
        assert_eq!(clock.dies(), [died(Some(0)), Action::Spawn { epoch }]);
    }
    assert_eq!(clock.state.deaths, 38);
}

#[test]
fn a_silent_start_is_killed_and_a_slow_one_is_not() {
    let mut clock = Clock::started();
    for _ in 0..10 {
        assert_eq!(clock.after(9_000).tell(Event::Progress), []);
    }
    assert_eq!(clock.after(9_999).tell(Event::Tick), []);
    assert_eq!(clock.after(1).tell(Event::Tick), [Action::Kill]);
    let actions = clock.tell(Event::Exited {
        death: Death::new(DeathKind::Signal { number: 9 }, ""),
        jitter: 0.0,
    });
    assert!(matches!(&actions[0], Action::ReportDeath { death, .. }
            if death.kind == DeathKind::Deadline && death.detail.contains("no sign of life")));
}

#[test]
fn what_is_hopeless_is_not_tried_again() {
    let mut clock = Clock::started();
    let death = Death::new(DeathKind::Protocol, "speaks protocol 2");
    let hopeless = true;
    assert_eq!(
        clock.tell(Event::Condemned { death, hopeless }),
        [Action::Kill]
    );
    clock.dies();
    assert!(matches!(clock.state.phase, Phase::Quarantined { .. }));
}

#[test]
fn stopping_asks_first_and_kills_after_a_second() {
    let mut clock = Clock::started();
    clock.tell(Event::Ready);
    assert_eq!(clock.tell(Event::Stop), [Action::Terminate]);
    assert_eq!(clock.after(1000).tell(Event::Tick), [Action::Kill]);
    assert_eq!(clock.dies(), []);
    assert!(clock.state.is_over());
}

/// A state in each phase, as events lead there, by its name.
fn phases() -> Vec<(&'static str, Clock)> {
    let after = |events: &[Event]| {
        let mut clock = Clock {
            state: State::default(),
            now: Duration::ZERO,
        };
        for event in events {
            clock.tell(event.clone());
        }
        clock
    };
    let [begin, ready] = [Event::Begin, Event::Ready];
    let die = || Event::Exited {
        death: segv(),
        jitter: 1.0,
    };
    vec![
        ("new", after(&[])),
        ("starting", after(std::slice::from_ref(&begin))),
        ("ready", after(&[begin.clone(), ready.clone()])),
        (
            "wedged",
            after(&[begin.clone(), condemned(DeathKind::Wedged, false)]),
        ),
        (
            "corrupt",
            after(&[begin.clone(), condemned(DeathKind::Corrupt, false)]),
        ),
        (
            "dead",
            after(&[begin.clone(), condemned(DeathKind::Protocol, false)]),
        ),
        (
            "hopeless",
            after(&[begin.clone(), condemned(DeathKind::Wedged, true)]),
        ),
        ("backoff", after(&[begin.clone(), die(), die()])),
        (
            "quarantined",
            after(&[begin.clone(), condemned(DeathKind::Protocol, true), die()]),
        ),
        ("restarting", after(&[begin.clone(), ready, Event::Restart])),
        ("draining", after(&[begin, Event::Stop])),
        ("stopped", after(&[Event::Stop])),
    ]
}

fn condemned(kind: DeathKind, hopeless: bool) -> Event {
    Event::Condemned {
        death: Death::new(kind, ""),
        hopeless,
    }
}

fn name(state: &State) -> &'static str {
    match &state.phase {
        Phase::New => "new",
        Phase::Starting { .. } => "starting",
        Phase::Ready => "ready",
        Phase::Draining { .. } => "draining",
        Phase::Restarting { .. } => "restarting",
        Phase::Wedged { .. } => "wedged",
        Phase::Corrupt { .. } => "corrupt",
        Phase::Dead {
            hopeless: false, ..
        } => "dead",
        Phase::Dead { hopeless: true, .. } => "hopeless",
        Phase::Backoff { .. } => "backoff",
        Phase::Quarantined { .. } => "quarantined",
        Phase::Stopped => "stopped",
    }
}

/// Every event in every phase: where it leads and what is done. What is not in the table changes nothing.
#[test]
fn each_event_in_each_phase_does_what_the_table_says() {
    let events = [
        ("begin", Event::Begin),
        ("progress", Event::Progress),
        ("ready", Event::Ready),
        ("wedge", condemned(DeathKind::Wedged, false)),
        ("wrong answer", condemned(DeathKind::Corrupt, false)),
        ("condemned", condemned(DeathKind::Protocol, false)),
        ("given up", condemned(DeathKind::Protocol, true)),
        (
            "exited",
            Event::Exited {
                death: segv(),
                jitter: 1.0,
            },
        ),
        ("release", Event::Release),
        ("restart", Event::Restart),
        ("stop", Event::Stop),
        ("tick", Event::Tick),
    ];
    let table: &[(&str, &str, &str, &str)] = &[
        ("new", "begin", "starting", "spawn"),
        ("new", "stop", "stopped", ""),
        ("starting", "ready", "ready", ""),
        ("starting", "wedge", "wedged", "kill"),
        ("starting", "wrong answer", "corrupt", "kill"),
        ("starting", "condemned", "dead", "kill"),
        ("starting", "given up", "hopeless", "kill"),
        ("starting", "exited", "starting", "death spawn"),
        ("starting", "stop", "draining", "terminate"),
        // Long after its patience ended.
        ("starting", "tick", "dead", "kill"),
        ("ready", "wedge", "wedged", "kill"),
        ("ready", "wrong answer", "corrupt", "kill"),
        ("ready", "condemned", "dead", "kill"),
        ("ready", "given up", "hopeless", "kill"),
        ("ready", "exited", "starting", "death spawn"),
        ("ready", "restart", "restarting", "terminate"),
        ("ready", "stop", "draining", "terminate"),
        ("restarting", "exited", "starting", "spawn"),
        ("restarting", "stop", "draining", ""),
        ("restarting", "tick", "restarting", "kill"),
        ("wedged", "exited", "starting", "death spawn"),
        ("wedged", "stop", "draining", ""),
        ("corrupt", "exited", "starting", "death spawn"),
        ("corrupt", "stop", "draining", ""),
        ("dead", "exited", "starting", "death spawn"),
        ("dead", "stop", "draining", ""),
        ("hopeless", "exited", "quarantined", "death quarantine"),
        ("hopeless", "stop", "draining", ""),
        ("backoff", "stop", "stopped", ""),
        ("backoff", "tick", "starting", "spawn"),
        ("quarantined", "release", "starting", "spawn"),
        ("quarantined", "stop", "stopped", ""),
        ("draining", "exited", "stopped", ""),
        ("draining", "tick", "draining", "kill"),
    ];
    for (phase, clock) in phases() {
        assert_eq!(name(&clock.state), phase);
        for (event_name, event) in &events {
            let mut clock = clock.clone();
            let actions = clock.after(30_000).tell(event.clone());
            let done: Vec<_> = actions
                .iter()
                .map(|action| match action {
                    Action::Spawn { .. } => "spawn",
                    Action::Terminate => "terminate",
                    Action::Kill => "kill",
                    Action::ReportDeath { .. } => "death",
                    Action::ReportQuarantine { .. } => "quarantine",
                })
                .collect();
            let row = table.iter().find(|r| (r.0, r.1) == (phase, event_name));
            let right = row.map_or((phase, ""), |r| (r.2, r.3));
            let found = (name(&clock.state), &*done.join(" "));
            assert_eq!(found, right, "{event_name} while {phase}");
        }
    }
    let known = |n: &str| phases().iter().any(|(p, _)| *p == n);
    assert!(table.iter().all(|r| known(r.0) && known(r.2)));
    assert!(table.iter().all(|r| events.iter().any(|(e, _)| *e == r.1)));
}

#[test]
fn wrong_answers_from_a_second_process_quarantine_the_device() {
    let mut clock = Clock::started();
    clock.tell(Event::Ready);
    clock.tell(condemned(DeathKind::Corrupt, false));
    assert!(clock.state.is_hopeful());
    let actions = clock.dies();
    assert!(
        matches!(&actions[..], [Action::ReportDeath { death, .. }, Action::Spawn { .. }]
            if death.kind == DeathKind::Corrupt)
    );
    // However long it lasts until then.
    clock.after(10_000_000).tell(Event::Ready);
    clock.tell(condemned(DeathKind::Corrupt, false));
    assert!(!clock.state.is_hopeful());
    let actions = clock.dies();
    assert!(
        matches!(&actions[..], [_, Action::ReportQuarantine { reason }] if reason.contains("2 processes"))
    );
    assert_eq!(clock.tell(Event::Release), [Action::Spawn { epoch: 3 }]);
    clock.tell(condemned(DeathKind::Corrupt, false));
    assert!(clock.state.is_hopeful(), "released, it starts afresh");
}

#[test]
fn one_that_is_released_has_its_whole_budget_again() {
    let mut clock = Clock::started();
    for _ in 0..3 {
        clock.tell(condemned(DeathKind::Protocol, true));
        clock.dies();
        assert!(matches!(clock.state.phase, Phase::Quarantined { .. }));
        let released = clock.tell(Event::Release);
        assert!(matches!(released[..], [Action::Spawn { .. }]));
        for _ in 0..POLICY.budget {
            clock.dies();
            clock.after(1000).tell(Event::Tick);
        }
        assert!(clock.state.is_hopeful());
    }
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        1 => Just(Event::Begin),
        1 => Just(Event::Progress),
        1 => Just(Event::Ready),
        1 => Just(Event::Tick),
        4 => any::<f64>().prop_map(|jitter| Event::Exited { death: segv(), jitter }),
        1 => Just(Event::Release),
        1 => Just(Event::Restart),
        2 => (any::<bool>(), 0..3usize).prop_map(|(hopeless, kind)| {
            let kind = [DeathKind::Wedged, DeathKind::Corrupt, DeathKind::Protocol][kind];
            Event::Condemned { death: Death::new(kind, ""), hopeless }
        }),
    ]
}

proptest! {
    /// Whatever happens in whatever order: epochs rise by one, there is at most one process, no more
    /// deaths than the budget allows fall into a window, and memory stays bounded.
    #[test]
    fn any_course_of_events_keeps_the_promises(
        course in proptest::collection::vec((event(), 0u64..40_000), 0..200),
        stop in any::<bool>(),
    ) {
        let mut clock = Clock { state: State::default(), now: Duration::ZERO };
        let (mut epoch, mut alive, mut spawns) = (0, false, Vec::new());
        // Wrong answers since the last release.
        let mut corrupt = 0;
        let stop = stop.then_some((Event::Stop, 0));
        for (event, ms) in course.into_iter().chain(stop) {
            if matches!(event, Event::Exited { .. }) {
                if !alive { continue; }
                alive = false;
                corrupt += u32::from(matches!(clock.state.phase, Phase::Corrupt { .. }));
            }
            if event == Event::Release && matches!(clock.state.phase, Phase::Quarantined { .. }) {
                // It starts afresh, whatever was before.
                spawns.clear();
                corrupt = 0;
            }
            let stopping = event == Event::Stop;
            // Asked for: no death, and none of the budget.
            let restarts = matches!(clock.state.phase, Phase::Restarting { .. });
            for action in clock.after(ms).tell(event) {
                match action {
                    Action::Spawn { epoch: e } => {
                        prop_assert!(!alive);
                        prop_assert_eq!(e, epoch + 1);
                        (epoch, alive) = (e, true);
                        if !restarts {
                            spawns.push(clock.now);
                        }
                    }
                    Action::Kill | Action::Terminate => prop_assert!(alive),
                    Action::ReportDeath { pause, .. } => prop_assert!(pause <= Some(POLICY.backoff_max)),
                    Action::ReportQuarantine { .. } => prop_assert!(!clock.state.is_hopeful()),
                }
            }
            prop_assert!(clock.state.recent.len() <= POLICY.budget as usize);
            prop_assert_eq!(clock.state.epoch, epoch);
            let over = matches!(name(&clock.state), "quarantined" | "stopped");
            prop_assert!(corrupt < MOST_CORRUPT || over);
            let runs = !matches!(name(&clock.state), "new" | "backoff" | "quarantined" | "stopped");
            prop_assert_eq!(runs, alive);
            if stopping {
                // Stop always ends it: at once, or with the process, which is killed when it takes too long.
                if alive {
                    prop_assert_eq!(clock.after(1000).tell(Event::Tick), [Action::Kill]);
                    prop_assert_eq!(clock.dies(), []);
                    alive = false;
                }
                prop_assert!(clock.state.is_over());
            }
        }
        for (i, &from) in spawns.iter().enumerate() {
            let within = spawns[i..].iter().take_while(|&&at| at - from < POLICY.window).count();
            prop_assert!(within <= POLICY.budget as usize + 1);
        }
    }
}

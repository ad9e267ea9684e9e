//! When a worker is started, given up or stopped: a function of (state, event, now), without effects.
//!
//! Time is the span since the scheduler began, and jitter comes in with the event, so that every course of
//! events can be replayed. `fleet` performs the actions.

use std::time::Duration;

use crate::death::{self, Death, DeathKind};

/// Bounds on restarting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Deaths within the window that are forgiven; one more quarantines the device.
    pub budget: u32,
    /// The window.
    pub window: Duration,
    /// Pause after the second death within the window; the first is followed by none, since the time until
    /// the next token is what a client sees of a death.
    pub backoff: Duration,
    /// Longest pause.
    pub backoff_max: Duration,
    /// How long a starting worker may show no sign of life.
    pub start_timeout: Duration,
    /// How long a stopping worker may take before it is killed.
    pub stop_timeout: Duration,
}

/// So many times that a device gave wrong answers, each on a new process, quarantine it.
const MOST_CORRUPT: u32 = 2;

/// Where in its life a worker is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Nothing was started yet.
    New,
    /// A process runs and is not ready; it is killed at `until` unless it shows a sign of life.
    Starting {
        /// When patience ends.
        until: Duration,
    },
    /// It serves. Whether it is busy decides nothing here, so there is no phase for it; who lists workers can tell by
    /// their running requests.
    Ready,
    /// It was told to end; it is killed at `until`.
    Draining {
        /// When patience ends.
        until: Duration,
    },
    /// It was killed because it made no steps any more, and is not reaped yet.
    Wedged {
        /// Which ones.
        death: Death,
    },
    /// It was killed because its answers were wrong, and is not reaped yet.
    Corrupt {
        /// Which ones.
        death: Death,
    },
    /// It was killed for something else, and is not reaped yet.
    Dead {
        /// Why.
        death: Death,
        /// Whether starting it again is pointless.
        hopeless: bool,
    },
    /// Reaped; the next one is spawned at `until`.
    Backoff {
        /// When.
        until: Duration,
    },
    /// Reaped, and not started again until somebody releases it.
    Quarantined {
        /// Why.
        reason: String,
    },
    /// Ended because the scheduler ends.
    Stopped,
}

/// All that is remembered about a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// Where it is.
    pub phase: Phase,
    /// Counts its processes, from 1.
    pub epoch: u64,
    /// Times it died.
    pub deaths: u32,
    /// When it died lately; at most one more than the budget.
    recent: Vec<Duration>,
    /// Times that its answers were wrong, since it was last released.
    corrupt: u32,
}

/// What happened to a worker.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// It is wanted for the first time.
    Begin,
    /// While starting, it showed a sign of life.
    Progress,
    /// It may serve.
    Ready,
    /// It must go: it could not start, broke a connection, hangs, or gave wrong answers, as the kind of death says.
    Condemned {
        /// Why.
        death: Death,
        /// Whether starting it again is pointless, such as for a wrong protocol version.
        hopeless: bool,
    },
    /// Its process has ended, or could not be made.
    Exited {
        /// How.
        death: Death,
        /// A random number from 0 to 1.
        jitter: f64,
    },
    /// Somebody lets it out of quarantine.
    Release,
    /// The scheduler ends.
    Stop,
    /// Time went by.
    Tick,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Start a process of this epoch.
    Spawn {
        /// The epoch.
        epoch: u64,
    },
    /// Ask the process to end (SIGTERM, connections closed).
    Terminate,
    /// Kill the process.
    Kill,
    /// Tell everyone that it died.
    ReportDeath {
        /// Why.
        death: Death,
        /// How long until the next one is spawned; none if never.
        pause: Option<Duration>,
    },
    /// Tell everyone that the device is out of use.
    ReportQuarantine {
        /// Why.
        reason: String,
    },
}

/// What the program before this one remembered about a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Past {
    /// Of its last process.
    pub epoch: u64,
    /// Times it died.
    pub deaths: u32,
    /// How long ago the last ones were.
    pub recent: Vec<Duration>,
    /// Times that its answers were wrong.
    pub corrupt: u32,
    /// Why it is out of use, if it is.
    pub quarantined: Option<String>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            phase: Phase::New,
            epoch: 0,
            deaths: 0,
            recent: Vec::new(),
            corrupt: 0,
        }
    }
}

impl State {
    /// Of a worker that another program kept until now. Its process lives on if it gives a sign of life before `until`;
    /// without one it is started on [`Event::Begin`], unless it is out of use.
    pub fn inherit(past: Past, policy: &Policy, now: Duration, until: Option<Duration>) -> Self {
        let phase = match (until, past.quarantined) {
            (Some(until), _) => Phase::Starting { until },
            (None, Some(reason)) => Phase::Quarantined { reason },
            (None, None) => Phase::New,
        };
        // As many as are ever remembered.
        let most = usize::try_from(policy.budget).unwrap_or(usize::MAX);
        let recent = past.recent.iter().filter(|ago| **ago < policy.window);
        Self {
            phase,
            epoch: past.epoch,
            deaths: past.deaths,
            // This clock may have begun after them.
            recent: recent
                .take(most)
                .map(|ago| now.saturating_sub(*ago))
                .collect(),
            corrupt: past.corrupt,
        }
    }

    /// What another program is to remember.
    pub fn past(&self, now: Duration) -> Past {
        Past {
            epoch: self.epoch,
            deaths: self.deaths,
            recent: self
                .recent
                .iter()
                .map(|at| now.saturating_sub(*at))
                .collect(),
            corrupt: self.corrupt,
            quarantined: match &self.phase {
                Phase::Quarantined { reason } => Some(reason.clone()),
                _ => None,
            },
        }
    }

    /// When [`Event::Tick`] is due.
    pub fn wake_at(&self) -> Option<Duration> {
        match self.phase {
            Phase::Starting { until } | Phase::Draining { until } | Phase::Backoff { until } => {
                Some(until)
            }
            _ => None,
        }
    }

    /// Whether nothing will ever happen to it again.
    pub fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Stopped)
    }

    /// Whether it serves or may come to serve.
    pub fn is_hopeful(&self) -> bool {
        match &self.phase {
            Phase::Dead { hopeless, .. } => !hopeless,
            Phase::Corrupt { .. } => self.corrupt + 1 < MOST_CORRUPT,
            Phase::Draining { .. } | Phase::Quarantined { .. } | Phase::Stopped => false,
            _ => true,
        }
    }

    /// What it was killed for, while it is not reaped yet.
    pub fn sentence(&self) -> Option<&Death> {
        match &self.phase {
            Phase::Wedged { death } | Phase::Corrupt { death } | Phase::Dead { death, .. } => {
                Some(death)
            }
            _ => None,
        }
    }

    /// What it died of if its process ended as `end`.
    pub fn cause(&self, end: Death) -> Death {
        match (self.sentence(), &self.phase) {
            (Some(sentence), _) => death::cause(sentence, end),
            (None, Phase::Draining { .. }) => Death::new(DeathKind::Stopped, end.to_string()),
            (None, _) => end,
        }
    }

    fn to(mut self, phase: Phase) -> Self {
        self.phase = phase;
        self
    }

    fn spawn(mut self, policy: &Policy, now: Duration) -> (State, Vec<Action>) {
        self.epoch += 1;
        let epoch = self.epoch;
        let until = now + policy.start_timeout;
        (
            self.to(Phase::Starting { until }),
            vec![Action::Spawn { epoch }],
        )
    }

    /// It is killed.
    fn condemn(self, death: Death, hopeless: bool) -> (State, Vec<Action>) {
        let phase = match death.kind {
            DeathKind::Wedged if !hopeless => Phase::Wedged { death },
            DeathKind::Corrupt if !hopeless => Phase::Corrupt { death },
            _ => Phase::Dead { death, hopeless },
        };
        (self.to(phase), vec![Action::Kill])
    }

    /// The state after a death, and what follows from it.
    fn bury(
        mut self,
        policy: &Policy,
        now: Duration,
        death: Death,
        hopeless: bool,
        jitter: f64,
    ) -> (State, Vec<Action>) {
        self.deaths = self.deaths.saturating_add(1);
        self.recent
            .retain(|&at| now.saturating_sub(at) < policy.window);
        self.recent.push(now);
        let lately = u32::try_from(self.recent.len()).unwrap_or(u32::MAX);
        if hopeless || lately > policy.budget {
            let why = if hopeless && self.corrupt >= MOST_CORRUPT {
                format!(
                    "wrong answers from {} processes, the last time: {death}",
                    self.corrupt
                )
            } else if hopeless {
                death.to_string()
            } else {
                format!(
                    "died {lately} times within {:?}, the last time: {death}",
                    policy.window
                )
            };
            self.recent.clear();
            let state = self.to(Phase::Quarantined {
                reason: why.clone(),
            });
            let actions = vec![
                Action::ReportDeath { death, pause: None },
                Action::ReportQuarantine { reason: why },
            ];
            return (state, actions);
        }
        let pause = pause(policy, lately, jitter);
        let report = Action::ReportDeath {
            death,
            pause: Some(pause),
        };
        if pause.is_zero() {
            let (state, mut actions) = self.spawn(policy, now);
            actions.insert(0, report);
            return (state, actions);
        }
        let until = now + pause;
        (self.to(Phase::Backoff { until }), vec![report])
    }
}

/// The pause after the `lately`-th death: none, then doubling, between half of it and the whole by jitter.
fn pause(policy: &Policy, lately: u32, jitter: f64) -> Duration {
    let Some(doublings) = lately.checked_sub(2) else {
        return Duration::ZERO;
    };
    let factor = 2u32.saturating_pow(doublings.min(30));
    let whole = policy
        .backoff
        .saturating_mul(factor)
        .min(policy.backoff_max);
    let jitter = if jitter.is_finite() {
        jitter.clamp(0.0, 1.0)
    } else {
        1.0
    };
    whole.mul_f64(0.5 + 0.5 * jitter)
}

/// One step of a worker's life. An event that does not fit the phase (a sign of life after the end, say)
/// changes nothing: events cross on their way.
pub fn step(policy: &Policy, state: State, event: Event, now: Duration) -> (State, Vec<Action>) {
    let stay = |state: State| (state, Vec::new());
    match (state.phase.clone(), event) {
        (Phase::New, Event::Begin) => state.spawn(policy, now),

        (Phase::Starting { .. }, Event::Progress) => {
            let until = now + policy.start_timeout;
            stay(state.to(Phase::Starting { until }))
        }
        (Phase::Starting { .. }, Event::Ready) => stay(state.to(Phase::Ready)),
        (Phase::Starting { until }, Event::Tick) if now >= until => {
            let silence = format!(
                "no sign of life for {:?} while starting",
                policy.start_timeout
            );
            state.condemn(Death::new(DeathKind::Deadline, silence), false)
        }
        (Phase::Starting { .. } | Phase::Ready, Event::Condemned { death, hopeless }) => {
            state.condemn(death, hopeless)
        }

        (Phase::Starting { .. } | Phase::Ready, Event::Exited { death, jitter }) => {
            state.bury(policy, now, death, false, jitter)
        }
        (Phase::Dead { hopeless, .. }, Event::Exited { death, jitter }) => {
            let death = state.cause(death);
            state.bury(policy, now, death, hopeless, jitter)
        }
        (Phase::Wedged { .. }, Event::Exited { death, jitter }) => {
            let death = state.cause(death);
            state.bury(policy, now, death, false, jitter)
        }
        (Phase::Corrupt { .. }, Event::Exited { death, jitter }) => {
            let death = state.cause(death);
            let mut state = state;
            state.corrupt = state.corrupt.saturating_add(1);
            let hopeless = state.corrupt >= MOST_CORRUPT;
            state.bury(policy, now, death, hopeless, jitter)
        }
        (Phase::Backoff { until }, Event::Tick) if now >= until => state.spawn(policy, now),

        (Phase::Starting { .. } | Phase::Ready, Event::Stop) => {
            let until = now + policy.stop_timeout;
            (state.to(Phase::Draining { until }), vec![Action::Terminate])
        }
        (Phase::Quarantined { .. }, Event::Release) => {
            let mut state = state;
            // Its past is not held against it; the epoch and the count of deaths go on.
            state.corrupt = 0;
            state.spawn(policy, now)
        }

        (Phase::Wedged { .. } | Phase::Corrupt { .. } | Phase::Dead { .. }, Event::Stop) => {
            let until = now + policy.stop_timeout;
            stay(state.to(Phase::Draining { until }))
        }
        (Phase::New | Phase::Backoff { .. } | Phase::Quarantined { .. }, Event::Stop) => {
            stay(state.to(Phase::Stopped))
        }
        (Phase::Draining { until }, Event::Tick) if now >= until => {
            // Again later, should the kernel take its time.
            let until = now + policy.stop_timeout;
            (state.to(Phase::Draining { until }), vec![Action::Kill])
        }
        (Phase::Draining { .. }, Event::Exited { .. }) => stay(state.to(Phase::Stopped)),

        _ => stay(state),
    }
}

#[cfg(test)]
mod tests {
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
            ("ready", "stop", "draining", "terminate"),
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
                for action in clock.after(ms).tell(event) {
                    match action {
                        Action::Spawn { epoch: e } => {
                            prop_assert!(!alive);
                            prop_assert_eq!(e, epoch + 1);
                            (epoch, alive) = (e, true);
                            spawns.push(clock.now);
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
}

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
    /// It serves.
    Ready,
    /// It was told to end; it is killed at `until`.
    Draining {
        /// When patience ends.
        until: Duration,
    },
    /// It was killed and is not reaped yet.
    Killed {
        /// Why.
        death: Death,
        /// Whether starting it again is pointless.
        hopeless: bool,
    },
    /// Dead; the next one is spawned at `until`.
    Backoff {
        /// When.
        until: Duration,
    },
    /// Dead for good.
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
    /// It must go: it could not start, or broke a connection.
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

impl Default for State {
    fn default() -> Self {
        Self {
            phase: Phase::New,
            epoch: 0,
            deaths: 0,
            recent: Vec::new(),
        }
    }
}

impl State {
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
            Phase::Killed { hopeless, .. } => !hopeless,
            Phase::Draining { .. } | Phase::Quarantined { .. } | Phase::Stopped => false,
            _ => true,
        }
    }

    /// What it died of if its process ended as `end`.
    pub fn cause(&self, end: Death) -> Death {
        match &self.phase {
            Phase::Killed { death, .. } => death::cause(death, end),
            Phase::Draining { .. } => Death::new(DeathKind::Stopped, end.to_string()),
            _ => end,
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
            let why = if hopeless {
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
            let death = Death::new(DeathKind::Deadline, silence);
            let hopeless = false;
            (
                state.to(Phase::Killed { death, hopeless }),
                vec![Action::Kill],
            )
        }
        (Phase::Starting { .. } | Phase::Ready, Event::Condemned { death, hopeless }) => (
            state.to(Phase::Killed { death, hopeless }),
            vec![Action::Kill],
        ),

        (Phase::Starting { .. } | Phase::Ready, Event::Exited { death, jitter }) => {
            state.bury(policy, now, death, false, jitter)
        }
        (Phase::Killed { hopeless, .. }, Event::Exited { death, jitter }) => {
            let death = state.cause(death);
            state.bury(policy, now, death, hopeless, jitter)
        }
        (Phase::Backoff { until }, Event::Tick) if now >= until => state.spawn(policy, now),

        (Phase::Starting { .. } | Phase::Ready, Event::Stop) => {
            let until = now + policy.stop_timeout;
            (state.to(Phase::Draining { until }), vec![Action::Terminate])
        }
        (Phase::Killed { .. }, Event::Stop) => {
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

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            1 => Just(Event::Begin),
            1 => Just(Event::Progress),
            1 => Just(Event::Ready),
            1 => Just(Event::Tick),
            4 => any::<f64>().prop_map(|jitter| Event::Exited { death: segv(), jitter }),
            1 => any::<bool>().prop_map(|hopeless| Event::Condemned { death: Death::new(DeathKind::Wedged, ""), hopeless }),
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
            let stop = stop.then_some((Event::Stop, 0));
            for (event, ms) in course.into_iter().chain(stop) {
                if matches!(event, Event::Exited { .. }) {
                    if !alive { continue; }
                    alive = false;
                }
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
            }
            for (i, &from) in spawns.iter().enumerate() {
                let within = spawns[i..].iter().take_while(|&&at| at - from < POLICY.window).count();
                prop_assert!(within <= POLICY.budget as usize + 1);
            }
        }
    }
}

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
    /// It was told to end so that another one takes its place; it is killed at `until`.
    Restarting {
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
    /// Somebody wants another process in its place.
    Restart,
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
            Phase::Starting { until }
            | Phase::Draining { until }
            | Phase::Restarting { until }
            | Phase::Backoff { until } => Some(until),
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
            (None, Phase::Draining { .. } | Phase::Restarting { .. }) => {
                Death::new(DeathKind::Stopped, end.to_string())
            }
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
        (Phase::Ready, Event::Restart) => {
            let until = now + policy.stop_timeout;
            (
                state.to(Phase::Restarting { until }),
                vec![Action::Terminate],
            )
        }
        (Phase::Restarting { .. }, Event::Stop) => {
            let until = now + policy.stop_timeout;
            stay(state.to(Phase::Draining { until }))
        }
        (Phase::Restarting { until }, Event::Tick) if now >= until => {
            // Again later, should the kernel take its time.
            let until = now + policy.stop_timeout;
            (state.to(Phase::Restarting { until }), vec![Action::Kill])
        }
        // It was told to: no death is counted. One that cannot be made again is one.
        (Phase::Restarting { .. }, Event::Exited { .. }) => state.spawn(policy, now),
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
mod tests;

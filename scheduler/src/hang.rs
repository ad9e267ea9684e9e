//! Whether a worker hangs: a function of what its black box said and when, without effects.
//!
//! A long prompt makes steps, and a long node makes progress within itself; a wedge does neither. An idle engine may
//! stand still for ever. The event loop, which answers calls, shows signs of life even when idle.

use std::time::Duration;

use hotcell_ipc::blackbox::{Doing, Pulse};

/// How long nothing may move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// An engine that has work.
    pub engine: Duration,
    /// The event loop.
    pub events: Duration,
}

impl Patience {
    /// So many times as long.
    #[must_use]
    pub fn times(self, factor: u32) -> Self {
        Self {
            engine: self.engine.saturating_mul(factor),
            events: self.events.saturating_mul(factor),
        }
    }

    /// How often to look, so that a hang is found not much later than it may be.
    pub fn interval(&self) -> Duration {
        let least = self.engine.min(self.events);
        (least / 8).clamp(Duration::from_millis(10), Duration::from_secs(1))
    }
}

/// The part of its patience after which a process that stands still is not asked for more.
const STALLED: u32 = 4;
/// After this time at the latest, however long one that hangs may live.
const STALLED_AT_MOST: Duration = Duration::from_millis(7_500);

/// What was seen of one process so far.
#[derive(Clone, Debug)]
pub struct Hang {
    last: Pulse,
    engine_since: Duration,
    events_since: Duration,
    stalled: bool,
}

impl Hang {
    /// Begins to watch at `now`.
    pub fn new(pulse: Pulse, now: Duration) -> Self {
        Self {
            last: pulse,
            engine_since: now,
            events_since: now,
            stalled: false,
        }
    }

    /// Takes in what the black box says at `now`; in words why the process hangs, if it does.
    pub fn look(&mut self, pulse: Pulse, now: Duration, patience: &Patience) -> Option<String> {
        // Loads have a bound of their own, and start before there is an event loop.
        let waits = matches!(
            pulse.doing,
            Some(Doing::Idle | Doing::Starting | Doing::Loading | Doing::Ending)
        );
        if waits || pulse.moved_since(&self.last) {
            self.engine_since = now;
        }
        if pulse.beat != self.last.beat || pulse.beat == 0 {
            self.events_since = now;
        }
        self.last = pulse;
        let stood = now.saturating_sub(self.engine_since);
        let silent = now.saturating_sub(self.events_since);
        let stalls = |patience: Duration| (patience / STALLED).min(STALLED_AT_MOST);
        self.stalled = stood >= stalls(patience.engine) || silent >= stalls(patience.events);
        if stood >= patience.engine {
            let doing = pulse
                .doing
                .map_or("in a state that there is not", Doing::name);
            return Some(format!(
                "its engine made no progress for {stood:.1?} ({doing})"
            ));
        }
        if silent >= patience.events {
            return Some(format!("its event loop stood still for {silent:.1?}"));
        }
        None
    }

    /// Whether nothing moved for a good part of the time that it may take: it may hang.
    pub fn is_stalled(&self) -> bool {
        self.stalled
    }
}

#[cfg(test)]
mod tests {
    use hotcell_ipc::blackbox::{self, Node, Reader, Writer};

    use super::*;

    const PATIENCE: Patience = Patience {
        engine: Duration::from_secs(10),
        events: Duration::from_secs(20),
    };

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    struct Watched {
        writer: Writer,
        reader: Reader,
        hang: Hang,
    }

    impl Watched {
        fn new() -> Self {
            let memory = blackbox::make().unwrap();
            let reader = Reader::open(&memory).unwrap();
            let writer = Writer::open(&memory, ["a"].into_iter()).unwrap();
            let hang = Hang::new(reader.pulse(), at(0));
            Self {
                writer,
                reader,
                hang,
            }
        }

        fn look(&mut self, seconds: u64) -> Option<String> {
            self.hang.look(self.reader.pulse(), at(seconds), &PATIENCE)
        }
    }

    #[test]
    fn an_idle_worker_may_stand_still_as_long_as_its_event_loop_lives() {
        let mut watched = Watched::new();
        watched.writer.doing(Doing::Idle);
        for minute in 1..100 {
            watched.writer.beat();
            assert_eq!(watched.look(minute * 15), None);
        }
        assert_eq!(watched.look(99 * 15 + 19), None);
        let why = watched.look(99 * 15 + 20).unwrap();
        assert!(why.contains("event loop"), "{why}");
    }

    #[test]
    fn one_that_stands_still_is_stalled_long_before_it_hangs() {
        let mut watched = Watched::new();
        watched.writer.doing(Doing::Stepping);
        for second in 1..8 {
            watched.writer.beat();
            assert_eq!(watched.look(second), None);
            // That it has something to do now was a move.
            assert_eq!(watched.hang.is_stalled(), second >= 4, "{second}");
        }
        watched.writer.stepped();
        assert_eq!(watched.look(8), None);
        assert!(!watched.hang.is_stalled());
        // So is one that answers nobody, whatever its engine does.
        for second in 9..15 {
            watched.writer.stepped();
            assert_eq!(watched.look(second), None);
        }
        assert!(watched.hang.is_stalled());
    }

    #[test]
    fn however_patient_one_is_what_stands_still_is_stalled_soon() {
        let mut watched = Watched::new();
        let patience = Patience {
            engine: Duration::from_secs(3600),
            events: Duration::from_secs(3600),
        };
        watched.writer.doing(Doing::Stepping);
        let look = |watched: &mut Watched, second| {
            let pulse = watched.reader.pulse();
            assert_eq!(watched.hang.look(pulse, at(second), &patience), None);
            watched.hang.is_stalled()
        };
        assert!(!look(&mut watched, 1));
        assert!(!look(&mut watched, 8));
        assert!(look(&mut watched, 9));
    }

    #[test]
    fn a_long_prompt_moves_and_a_wedge_does_not() {
        let mut watched = Watched::new();
        watched.writer.doing(Doing::Stepping);
        for second in 1..50 {
            let node = Node {
                step: second,
                op: 0,
                group: false,
            };
            match second % 3 {
                0 => watched.writer.stepped(),
                1 => watched.writer.enter(node),
                _ => watched.writer.progressed(),
            }
            assert_eq!(watched.look(9 * u64::from(second)), None);
        }
        let last = 9 * 49;
        assert_eq!(watched.look(last + 9), None);
        let why = watched.look(last + 10).unwrap();
        assert!(why.contains("10.0s (stepping)"), "{why}");
    }

    #[test]
    fn a_start_and_a_load_are_not_judged_here_and_nonsense_is_a_hang() {
        let mut watched = Watched::new();
        assert_eq!(watched.look(1000), None, "starting, no event loop yet");
        watched.writer.doing(Doing::Loading);
        assert_eq!(watched.look(2000), None);
        let mut nonsense = watched.reader.pulse();
        nonsense.doing = None;
        assert_eq!(watched.hang.look(nonsense, at(2001), &PATIENCE), None);
        let why = watched.hang.look(nonsense, at(2011), &PATIENCE);
        assert!(why.unwrap().contains("a state that there is not"));
    }

    #[test]
    fn one_looks_often_enough_and_not_too_often() {
        assert_eq!(PATIENCE.interval(), Duration::from_secs(1));
        let short = Patience {
            engine: Duration::from_millis(400),
            ..PATIENCE
        };
        assert_eq!(short.interval(), Duration::from_millis(50));
    }
}

//! Which requests are suspected of killing workers: a function of the deaths they ran in, without effects.
//!
//! A death speaks against every request that ran on that process, innocent ones too. Whoever ran in several is run
//! alone: a request that kills its worker even then, on a device that serves others, is poison, and the deaths it shared
//! with others are explained by it, so that they are held against nobody else.

use std::collections::{HashSet, VecDeque};

use hotcell_proto::v1;

use crate::testimony::Testimony;

/// Explained deaths that are remembered. An older one is forgotten, and who ran in it stays suspected: run alone
/// once more, nothing worse.
const EXPLAINED: usize = 1024;

/// When a request is suspected and when it is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Deaths that make a request a suspect.
    pub suspect_after: u32,
    /// Times a request may be continued.
    pub continuations: u32,
}

/// One process that died: its worker's name and which of its processes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Process {
    /// The worker's name.
    pub worker: String,
    /// Which of its processes.
    pub epoch: u64,
}

impl From<&Process> for v1::HeldProcess {
    fn from(process: &Process) -> Self {
        Self {
            worker: process.worker.clone(),
            epoch: process.epoch,
        }
    }
}

impl From<v1::HeldProcess> for Process {
    fn from(held: v1::HeldProcess) -> Self {
        Self {
            worker: held.worker,
            epoch: held.epoch,
        }
    }
}

/// A death as one request saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Witnessed {
    /// Whose.
    pub process: Process,
    /// Whether it was of a kind that a request may have caused.
    pub blames: bool,
    /// Whether no other request ran there.
    pub alone: bool,
    /// Whether it is known that devices do not do that to others ([`Testimony::is_sound`](crate::testimony::Testimony::is_sound)).
    pub sound: bool,
}

/// What is to become of a request whose worker died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// It goes on among others.
    GoOn,
    /// It goes on alone, on a worker that nobody else uses.
    Alone,
    /// It ends: it killed its worker with nobody else there, and not because the device kills whatever runs on it.
    Poison,
    /// It ends: it was continued as often as it may be.
    GiveUp,
}

/// The deaths one request ran in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    deaths: u32,
    /// Those that speak against it; bounded by the continuations.
    blamed: Vec<Process>,
    /// What had been told about devices before the first of them.
    since: Option<u64>,
    /// Devices on which it lost a worker of its own.
    alone_on: Vec<String>,
}

impl Record {
    /// As another program knew it.
    pub fn restore(deaths: u32, blamed: Vec<Process>) -> Self {
        Self {
            deaths,
            since: (!blamed.is_empty()).then_some(0),
            blamed,
            alone_on: Vec::new(),
        }
    }

    /// Workers that died under it, for whatever reason.
    pub fn deaths(&self) -> u32 {
        self.deaths
    }

    /// Takes note of a death, and decides.
    pub fn witness(&mut self, policy: &Policy, death: Witnessed, explained: &Explained) -> Next {
        self.deaths = self.deaths.saturating_add(1);
        let Witnessed {
            process,
            blames,
            alone,
            sound,
        } = death;
        if blames {
            if !self.blamed.contains(&process) {
                self.blamed.push(process);
            }
            if alone && sound {
                return Next::Poison;
            }
        }
        if self.deaths > policy.continuations {
            return Next::GiveUp;
        }
        match self.is_suspect(policy, explained) {
            true => Next::Alone,
            false => Next::GoOn,
        }
    }

    /// Whether so many deaths speak against it, not counting those that others explain.
    pub fn is_suspect(&self, policy: &Policy, explained: &Explained) -> bool {
        let against = self.blamed.iter().filter(|p| !explained.contains(p));
        against.count() >= policy.suspect_after as usize
    }

    /// Has a death that may be its doing be told of, on this device, and says whether a device is sound on which it lost
    /// a worker of its own: what others met with there may come to be known later.
    pub fn testify(
        &mut self,
        testimony: &mut Testimony,
        request: &str,
        device: &str,
        process: &Process,
        alone: bool,
    ) -> bool {
        let since = *self.since.get_or_insert_with(|| testimony.now());
        testimony.died(device, request, process);
        if alone && !self.alone_on.iter().any(|on| on == device) {
            self.alone_on.push(device.to_owned());
        }
        let mut alone_on = self.alone_on.iter();
        alone_on.any(|on| testimony.is_sound(on, request, since, &self.blamed))
    }

    /// Whether it lost a worker of its own on this device: another one may tell more.
    pub fn was_alone_on(&self, device: &str) -> bool {
        self.alone_on.iter().any(|on| on == device)
    }

    /// The deaths that speak against it.
    pub fn blamed(&self) -> &[Process] {
        &self.blamed
    }
}

/// Deaths that a poisonous request was found to have caused.
#[derive(Clone, Debug, Default)]
pub struct Explained {
    known: HashSet<Process>,
    order: VecDeque<Process>,
}

impl Explained {
    /// Holds a poisonous request's deaths against it alone.
    pub fn explain(&mut self, deaths: &[Process]) {
        for death in deaths {
            if self.known.insert(death.clone()) {
                self.order.push_back(death.clone());
            }
        }
        while self.order.len() > EXPLAINED {
            if let Some(oldest) = self.order.pop_front() {
                self.known.remove(&oldest);
            }
        }
    }

    /// All that are known, the oldest first.
    pub fn all(&self) -> impl Iterator<Item = &Process> {
        self.order.iter()
    }

    /// Whether this death is explained.
    pub fn contains(&self, death: &Process) -> bool {
        self.known.contains(death)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const POLICY: Policy = Policy {
        suspect_after: 2,
        continuations: 8,
    };

    fn process(epoch: u64) -> Process {
        Process {
            worker: "w0".into(),
            epoch,
        }
    }

    fn death(epoch: u64) -> Witnessed {
        Witnessed {
            process: process(epoch),
            blames: true,
            alone: false,
            sound: true,
        }
    }

    fn blameless(epoch: u64) -> Witnessed {
        Witnessed {
            blames: false,
            ..death(epoch)
        }
    }

    fn alone(epoch: u64) -> Witnessed {
        Witnessed {
            alone: true,
            ..death(epoch)
        }
    }

    #[test]
    fn what_becomes_of_a_request_follows_from_its_deaths() {
        use Next::{Alone, GiveUp, GoOn, Poison};
        let unsound = |epoch| Witnessed {
            sound: false,
            ..alone(epoch)
        };
        let alone_and_blameless = |epoch| Witnessed {
            blames: false,
            ..alone(epoch)
        };
        for (deaths, right) in [
            (vec![death(1)], vec![GoOn]),
            (vec![death(1), death(2)], vec![GoOn, Alone]),
            (
                vec![death(1), death(2), alone(3)],
                vec![GoOn, Alone, Poison],
            ),
            // Its worker was killed for want of memory, say: once more alone.
            (
                vec![death(1), death(2), alone_and_blameless(3), alone(4)],
                vec![GoOn, Alone, Alone, Poison],
            ),
            // It may be the device: once more alone, elsewhere if there is such a place.
            (
                vec![death(1), death(2), unsound(3), alone(4)],
                vec![GoOn, Alone, Alone, Poison],
            ),
            (
                [vec![death(1), death(2)], (3..=9).map(unsound).collect()].concat(),
                [vec![GoOn], vec![Alone; 7], vec![GiveUp]].concat(),
            ),
            ((1..=3).map(blameless).collect(), vec![GoOn; 3]),
            (
                (1..=9).map(blameless).collect(),
                [vec![GoOn; 8], vec![GiveUp]].concat(),
            ),
            // Heard of twice, counted once.
            (vec![death(1), death(1)], vec![GoOn, GoOn]),
        ] {
            let mut record = Record::default();
            let none = Explained::default();
            let said: Vec<_> = deaths
                .iter()
                .map(|d| record.witness(&POLICY, d.clone(), &none))
                .collect();
            assert_eq!(said, right, "{deaths:?}");
        }
    }

    #[test]
    fn whoever_shared_deaths_with_a_poisonous_request_is_cleared_of_them() {
        let (mut poison, mut innocent) = (Record::default(), Record::default());
        let mut explained = Explained::default();
        for epoch in [1, 2] {
            poison.witness(&POLICY, death(epoch), &explained);
            innocent.witness(&POLICY, death(epoch), &explained);
        }
        assert!(innocent.is_suspect(&POLICY, &explained));
        let end = poison.witness(&POLICY, alone(9), &explained);
        assert_eq!(end, Next::Poison);
        explained.explain(poison.blamed());
        assert!(!innocent.is_suspect(&POLICY, &explained));
        // What it ran in since then counts from the start.
        let next = innocent.witness(&POLICY, death(3), &explained);
        assert_eq!(next, Next::GoOn);
        let next = innocent.witness(&POLICY, death(4), &explained);
        assert_eq!(next, Next::Alone);
    }

    #[test]
    fn the_memory_of_explained_deaths_is_bounded() {
        let mut explained = Explained::default();
        for epoch in 0..3 * EXPLAINED as u64 {
            explained.explain(&[process(epoch)]);
        }
        assert_eq!(explained.known.len(), EXPLAINED);
        assert_eq!(explained.order.len(), EXPLAINED);
        assert!(explained.contains(&process(3 * EXPLAINED as u64 - 1)));
        assert!(!explained.contains(&process(0)));
    }

    proptest! {
        /// Whatever happens: nobody is poison who did not kill a worker alone, nobody is run alone with fewer
        /// deaths against it than that takes, every course ends, and what is remembered is bounded.
        #[test]
        fn any_course_of_deaths_is_judged_soberly(
            suspect_after in 1u32..5,
            continuations in 0u32..10,
            course in proptest::collection::vec((0u64..12, any::<bool>(), any::<bool>(), any::<bool>()), 0..30),
        ) {
            let policy = Policy { suspect_after, continuations };
            let (mut record, mut explained) = (Record::default(), Explained::default());
            let mut next = Next::GoOn;
            let mut against = HashSet::new();
            for (at, (epoch, blames, explains, sound)) in course.into_iter().enumerate() {
                if explains {
                    explained.explain(&[process(epoch)]);
                    against.remove(&epoch);
                    continue;
                }
                let alone = next == Next::Alone;
                let death = Witnessed { process: process(epoch), blames, alone, sound };
                next = record.witness(&policy, death, &explained);
                if blames && !explained.contains(&process(epoch)) {
                    against.insert(epoch);
                }
                prop_assert_eq!(next == Next::Poison, alone && blames && sound);
                match next {
                    Next::Alone => prop_assert!(against.len() >= suspect_after as usize),
                    Next::GoOn => prop_assert!(against.len() < suspect_after as usize),
                    Next::GiveUp => prop_assert_eq!(record.deaths(), continuations + 1),
                    Next::Poison => {}
                }
                prop_assert!(record.blamed().len() <= continuations as usize + 1);
                if matches!(next, Next::Poison | Next::GiveUp) {
                    return Ok(());
                }
                prop_assert!(at < 30 && record.deaths() <= continuations);
            }
        }
    }
}

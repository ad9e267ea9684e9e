//! Which saved graphs kill workers: what requests are suspected by, kept for as long as the graph is saved.
//!
//! A graph under whose calls several workers died runs alone from then on, each call on a throw-away worker, until a call
//! ended well there. One of which workers die even so is refused: by then it is known that nobody else did it.

use std::sync::{Mutex, MutexGuard, PoisonError};

use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
    v1::HeldProcess,
};

use crate::suspicion::{Next, Process, Record};

/// Workers of its own that die of a graph before it is refused.
const REFUSED_AFTER: u32 = 2;
/// Deaths that are remembered as speaking against it; of more, the newest.
const REMEMBERED: usize = 16;

#[derive(Clone, Debug, Default)]
struct Known {
    /// The deaths it ran in.
    record: Record,
    /// Those of them that are known to be its doing.
    deaths: u32,
}

/// What is known against one saved graph.
#[derive(Debug, Default)]
pub struct Suspect(Mutex<Known>);

impl Suspect {
    /// As another program knew it.
    pub(super) fn restore(deaths: u32, blamed: Vec<HeldProcess>) -> Self {
        let blamed = blamed.into_iter().take(REMEMBERED).map(Process::from);
        Self(Mutex::new(Known {
            record: Record::restore(0, blamed.collect()),
            deaths,
        }))
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For another program.
    pub(super) fn hold(&self) -> (u32, Vec<HeldProcess>) {
        let known = self.known();
        let blamed = known.record.blamed().iter().map(HeldProcess::from);
        (known.deaths, blamed.collect())
    }

    /// Workers that died of it while it ran there alone.
    pub fn deaths(&self) -> u32 {
        self.known().deaths
    }

    /// Whether it is refused.
    pub fn is_refused(&self) -> bool {
        self.deaths() >= REFUSED_AFTER
    }

    /// Whether it may run at all.
    ///
    /// # Errors
    /// [`Reason::GraphPoisoned`].
    pub(super) fn admit(&self, name: &ModelName) -> Result<(), Error> {
        let deaths = self.deaths();
        if deaths < REFUSED_AFTER {
            return Ok(());
        }
        let what = format!(
            "graph {name} is refused: {deaths} workers died of it with nothing else running there; save it anew, or \
             `hotcell graphs clear {name}`"
        );
        Err(Error::new(Reason::GraphPoisoned, what)
            .with("graph", name)
            .with("deaths", deaths))
    }

    /// Whether its next call runs alone; `suspects` judges a record.
    pub(super) fn is_alone(&self, suspects: impl Fn(&Record) -> bool) -> bool {
        let known = self.known();
        known.deaths > 0 || suspects(&known.record)
    }

    /// Takes note of a worker's death under a call, which `judge` does in a record.
    pub(super) fn witness(&self, judge: impl FnOnce(&mut Record) -> Next) {
        let mut known = self.known();
        if known.record.blamed().len() >= REMEMBERED {
            let blamed = known.record.blamed();
            let newest = blamed.iter().skip(REMEMBERED / 2).cloned().collect();
            known.record = Record::restore(0, newest);
        }
        if judge(&mut known.record) == Next::Poison {
            known.deaths = known.deaths.saturating_add(1);
        }
    }

    /// A call ended well with nothing else there: what others may have done is not held against it.
    pub(super) fn served_alone(&self) {
        self.known().record = Record::default();
    }

    /// Nothing is held against it any more.
    pub(super) fn clear(&self) {
        *self.known() = Known::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suspicion::{Explained, Policy, Witnessed};

    const POLICY: Policy = Policy {
        suspect_after: 2,
        continuations: 3,
    };

    fn dies(suspect: &Suspect, epoch: u64, alone: bool, explained: &Explained) {
        let death = Witnessed {
            process: Process {
                worker: "w0".into(),
                epoch,
            },
            blames: true,
            alone,
            sound: true,
        };
        suspect.witness(|record| record.witness(&POLICY, death, explained));
    }

    fn alone(suspect: &Suspect, explained: &Explained) -> bool {
        suspect.is_alone(|record| record.is_suspect(&POLICY, explained))
    }

    #[test]
    fn a_graph_is_refused_for_two_deaths_with_nobody_else_there_and_for_no_others() {
        let name = ModelName::new("g").unwrap();
        let (suspect, none) = (Suspect::default(), Explained::default());
        dies(&suspect, 1, false, &none);
        // Two calls tell of one death.
        dies(&suspect, 1, false, &none);
        assert!(!alone(&suspect, &none));
        dies(&suspect, 2, false, &none);
        assert!(alone(&suspect, &none) && suspect.admit(&name).is_ok());
        dies(&suspect, 3, true, &none);
        // Its own deaths are explained by itself; it stays alone all the same.
        let mut explained = Explained::default();
        for epoch in 1..=3 {
            explained.explain(&[Process {
                worker: "w0".into(),
                epoch,
            }]);
        }
        assert!(alone(&suspect, &explained) && suspect.admit(&name).is_ok());
        // A call that ends well forgives what others may have done, and nothing else.
        suspect.served_alone();
        assert!(alone(&suspect, &explained));
        let (deaths, blamed) = suspect.hold();
        let suspect = Suspect::restore(deaths, blamed);
        dies(&suspect, 4, true, &explained);
        let refused = suspect.admit(&name).unwrap_err();
        assert_eq!(refused.reason(), Reason::GraphPoisoned);
        assert_eq!(refused.get("graph"), Some("g"));
        suspect.clear();
        assert!(suspect.admit(&name).is_ok() && !alone(&suspect, &none));
    }

    #[test]
    fn what_is_remembered_is_bounded_and_innocence_is_believed() {
        let (suspect, none) = (Suspect::default(), Explained::default());
        for epoch in 0..1000 {
            dies(&suspect, epoch, false, &none);
        }
        let (_, blamed) = suspect.hold();
        assert!(blamed.len() <= REMEMBERED && blamed.iter().any(|death| death.epoch == 999));
        assert!(alone(&suspect, &none));
        assert!(suspect.admit(&ModelName::new("g").unwrap()).is_ok());
        suspect.served_alone();
        assert!(!alone(&suspect, &none));
    }
}

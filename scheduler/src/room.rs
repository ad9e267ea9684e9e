//! Whether a model fits into memory beside others, and which of them have to go for it: a function of values.

use std::{collections::BTreeMap, fmt, time::Duration};

use hotcell_proto::ids::ModelName;

/// What a model takes, as a dry run tells it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Bytes of its weights, which devices that share a memory have in common.
    pub weights: u64,
    /// Bytes that each device takes besides: the cache, and what computing takes.
    pub each: u64,
}

impl Footprint {
    /// Bytes in a memory that so many of its devices are in; none if none is.
    fn on(self, devices: u64) -> u64 {
        match devices {
            0 => 0,
            n => self.weights.saturating_add(self.each.saturating_mul(n)),
        }
    }

    /// Bytes on one device alone.
    pub fn alone(self) -> u64 {
        self.on(1)
    }
}

/// A model in memory, or about to be.
#[derive(Clone, Debug)]
pub struct Resident<'a> {
    /// Its name.
    pub model: &'a ModelName,
    /// What it takes.
    pub footprint: Footprint,
    /// On how many devices of each memory.
    pub devices: BTreeMap<&'a str, u64>,
    /// How long nobody has asked it; none if it may not go, because somebody does or because it is pinned.
    pub idle: Option<Duration>,
}

impl Resident<'_> {
    fn takes(&self, memory: &str) -> u64 {
        let devices = self.devices.get(memory).copied().unwrap_or(0);
        self.footprint.on(devices)
    }
}

/// There is no room, whatever goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// In which memory.
    pub memory: String,
    /// Bytes that the model takes there.
    pub needs: u64,
    /// Bytes there are.
    pub has: u64,
    /// Bytes of models that may not go.
    pub kept: u64,
}

impl Shortage {
    /// Whether it would not fit alone either.
    pub fn is_hopeless(&self) -> bool {
        self.needs > self.has
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        let Self {
            memory,
            needs,
            has,
            kept,
        } = self;
        write!(
            f,
            "it takes {} MiB of the {} MiB of {memory}",
            mib(*needs),
            mib(*has)
        )?;
        match self.is_hopeless() {
            true => Ok(()),
            false => write!(
                f,
                ", of which models in use or pinned take {} MiB",
                mib(*kept)
            ),
        }
    }
}

/// Which models have to go so that a new one fits: of those that may, the ones that were asked least recently. Memories are
/// told with their bytes.
///
/// # Errors
/// When it does not fit even if all go that may.
pub fn make_room<'a>(
    memories: &BTreeMap<&str, u64>,
    residents: &[Resident<'a>],
    new: &Resident<'_>,
) -> Result<Vec<&'a ModelName>, Shortage> {
    let taken = |of: &[&Resident<'a>], memory: &str| {
        of.iter()
            .fold(0u64, |sum, r| sum.saturating_add(r.takes(memory)))
    };
    let fits = |of: &[&Resident<'a>]| {
        memories.iter().find(|(memory, has)| {
            let needs = new.takes(memory);
            needs > 0 && taken(of, memory).saturating_add(needs) > **has
        })
    };
    let mut stay: Vec<_> = residents.iter().collect();
    let mut may_go: Vec<_> = residents.iter().filter(|r| r.idle.is_some()).collect();
    may_go.sort_by_key(|r| (r.idle, r.model));
    let mut gone = Vec::new();
    while let Some((memory, _)) = fits(&stay) {
        // The one that was idle the longest, if it helps there.
        let next = may_go.iter().rposition(|r| r.takes(memory) > 0);
        let Some(next) = next.map(|at| may_go.remove(at)) else {
            let (memory, has) = (*memory, memories.get(memory).copied().unwrap_or(0));
            return Err(Shortage {
                memory: memory.to_owned(),
                needs: new.takes(memory),
                has,
                kept: taken(&stay, memory),
            });
        };
        stay.retain(|r| r.model != next.model);
        gone.push(next.model);
    }
    Ok(gone)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn names() -> Vec<ModelName> {
        ["a", "b", "c", "d", "e"]
            .into_iter()
            .map(|n| ModelName::new(n).unwrap())
            .collect()
    }

    fn resident<'a>(
        model: &'a ModelName,
        (weights, each): (u64, u64),
        devices: &[(&'a str, u64)],
        idle: Option<u64>,
    ) -> Resident<'a> {
        Resident {
            model,
            footprint: Footprint { weights, each },
            devices: devices.iter().copied().collect(),
            idle: idle.map(Duration::from_secs),
        }
    }

    #[test]
    fn the_longest_idle_goes_first_and_no_more_than_has_to() {
        let n = names();
        let memories = BTreeMap::from([("host", 100)]);
        let all = [
            resident(&n[0], (20, 10), &[("host", 2)], Some(5)),
            resident(&n[1], (10, 0), &[("host", 1)], Some(9)),
            resident(&n[2], (30, 0), &[("host", 1)], None),
        ];
        let room = |weights| {
            let new = resident(&n[3], (weights, 0), &[("host", 1)], None);
            make_room(&memories, &all, &new)
        };
        // 20 + 2 × 10, 10 and 30 are taken.
        assert_eq!(room(20), Ok(vec![]));
        assert_eq!(room(21), Ok(vec![&n[1]]));
        assert_eq!(room(31), Ok(vec![&n[1], &n[0]]));
        let shortage = room(71).unwrap_err();
        assert_eq!((shortage.needs, shortage.kept), (71, 30));
        assert!(!shortage.is_hopeless());
        assert!(room(101).unwrap_err().is_hopeless());
    }

    #[test]
    fn a_model_elsewhere_is_left_alone() {
        let n = names();
        let memories = BTreeMap::from([("cuda:0", 50), ("cuda:1", 50)]);
        let all = [
            resident(&n[0], (40, 0), &[("cuda:0", 1)], Some(90)),
            resident(&n[1], (40, 0), &[("cuda:1", 1)], Some(1)),
        ];
        let new = resident(&n[2], (30, 0), &[("cuda:1", 1)], None);
        assert_eq!(make_room(&memories, &all, &new), Ok(vec![&n[1]]));
    }

    proptest! {
        #[test]
        fn what_stays_fits_and_nobody_goes_who_may_not(
            sizes in prop::collection::vec((0u64..60, 0u64..30, 1u64..3, prop::option::of(0u64..9)), 4),
            new in (0u64..80, 0u64..40),
        ) {
            let n = names();
            let memories = BTreeMap::from([("host", 100)]);
            let all: Vec<_> = sizes.iter().zip(&n).map(|(&(w, e, d, idle), name)| resident(name, (w, e), &[("host", d)], idle)).collect();
            let new = resident(&n[4], new, &[("host", 1)], None);
            match make_room(&memories, &all, &new) {
                Ok(gone) => {
                    let left: u64 = all.iter().filter(|r| !gone.contains(&r.model)).map(|r| r.takes("host")).sum();
                    prop_assert!(new.takes("host") == 0 || left + new.takes("host") <= 100);
                    prop_assert!(all.iter().filter(|r| r.idle.is_none()).all(|r| !gone.contains(&r.model)));
                }
                Err(shortage) => {
                    let kept: u64 = all.iter().filter(|r| r.idle.is_none()).map(|r| r.takes("host")).sum();
                    prop_assert_eq!(shortage.kept, kept);
                    prop_assert!(kept + shortage.needs > 100);
                }
            }
        }
    }
}

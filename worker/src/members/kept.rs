//! What members leave in the memory of their devices: of all of them together, or nothing.

use std::os::fd::{AsFd, OwnedFd};

use hotcell_ipc::descriptors::{DescriptorReceiver, DescriptorSender};
use hotcell_kernels::vault::Kept;

use super::{
    follow::collect,
    wire::{KeptTold, Left},
};
use crate::model::run::{Keeping, Keeps};

/// What members are to make of the memory of their devices.
#[derive(Default)]
pub struct Given {
    /// Whether weights are to be put there.
    pub(super) keeps: bool,
    /// What is there, by ranks, the leader's first; or nothing.
    pub(super) all: Vec<Kept>,
}

/// What they made of it.
pub struct Made {
    /// What was there.
    pub(super) given: Vec<Kept>,
    /// Of each but the leader.
    pub(super) others: Vec<Keeps>,
}

impl KeptTold {
    /// What is told of this.
    pub fn of(kept: &Kept) -> Self {
        Self {
            layout: kept.layout.clone(),
            bytes: kept.bytes,
            checksum: kept.checksum,
            pieces: kept.pieces.len(),
        }
    }

    /// What was told of these.
    pub fn with(self, pieces: Vec<OwnedFd>) -> Kept {
        Kept {
            layout: self.layout,
            bytes: self.bytes,
            checksum: self.checksum,
            pieces,
        }
    }
}

impl Left {
    /// What a member leaves, whose leader is to hold it.
    pub fn sent(keeps: Keeps, to: &DescriptorSender, model: u32) -> Self {
        let kept = keeps.kept.first().and_then(|kept| {
            let pieces: Vec<_> = kept.pieces.iter().map(AsFd::as_fd).collect();
            let sent = to.send(model.into(), &pieces);
            let sent = sent.inspect_err(|error| {
                tracing::warn!(%error, "weights end with this process");
            });
            sent.ok().map(|()| KeptTold::of(kept))
        });
        Self {
            found: keeps.found,
            damaged: keeps.damaged,
            bytes: keeps.bytes,
            kept,
        }
    }

    /// The same, as the leader takes it.
    pub fn received(self, from: &DescriptorReceiver, model: u32) -> Result<Keeps, String> {
        let mut kept = Vec::new();
        if let Some(told) = self.kept {
            let pieces = collect(from, model.into()).map_err(|error| error.to_string())?;
            if pieces.len() != told.pieces {
                return Err(format!(
                    "{} descriptors of {} pieces came",
                    pieces.len(),
                    told.pieces
                ));
            }
            kept.push(told.with(pieces));
        }
        Ok(Keeps {
            kept,
            found: self.found,
            damaged: self.damaged,
            bytes: self.bytes,
        })
    }
}

/// The leader's own part, and what all have. What is there of more or fewer members is of no use.
pub(super) fn divide(keeping: Keeping, members: usize) -> (Keeping, Given) {
    let Keeping::Weights(mut all) = keeping else {
        return (Keeping::Nothing, Given::default());
    };
    if all.len() != members {
        all.clear();
    }
    let own = match all.first().map(Kept::try_clone).transpose() {
        Ok(own) => own.into_iter().collect(),
        Err(error) => {
            tracing::warn!(%error, "weights that were kept on devices cannot be had");
            all.clear();
            Vec::new()
        }
    };
    (Keeping::Weights(own), Given { keeps: true, all })
}

impl Made {
    /// What became of all, this being the leader's.
    pub fn with(self, own: Keeps) -> Keeps {
        let all: Vec<Keeps> = std::iter::once(own).chain(self.others).collect();
        let (found, damaged) = (
            all.iter().all(|keeps| keeps.found),
            all.iter().any(|keeps| keeps.damaged),
        );
        let bytes = all.iter().map(|keeps| keeps.bytes).sum();
        let mut kept = Vec::new();
        if all.iter().any(|keeps| !keeps.kept.is_empty()) {
            let members = all.len();
            let mut given = self.given.into_iter().map(Some).collect::<Vec<_>>();
            given.resize_with(members, || None);
            for (keeps, given) in all.into_iter().zip(given) {
                // Who holds it is told of all, also of what it holds already.
                let there = given.filter(|_| keeps.found);
                kept.extend(keeps.kept.into_iter().next().or(there));
            }
            if kept.len() != members {
                kept.clear();
            }
        }
        Keeps {
            kept,
            found,
            damaged,
            bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(checksum: u64) -> Kept {
        Kept {
            layout: "l".to_owned(),
            bytes: 1,
            checksum,
            pieces: vec![],
        }
    }

    fn keeps(found: bool, new: Option<u64>) -> Keeps {
        Keeps {
            kept: new.map(kept).into_iter().collect(),
            found,
            damaged: false,
            bytes: 10,
        }
    }

    /// Whether all was found, and the checksums of what whoever holds it is told of.
    fn together(given: &[u64], own: Keeps, other: Keeps) -> (bool, Vec<u64>) {
        let made = Made {
            given: given.iter().map(|n| kept(*n)).collect(),
            others: vec![other],
        };
        let all = made.with(own);
        assert_eq!(all.bytes, 20);
        (all.found, all.kept.iter().map(|k| k.checksum).collect())
    }

    #[test]
    fn all_are_told_of_or_none() {
        let (is, new) = (true, false);
        assert_eq!(
            together(&[], keeps(new, Some(1)), keeps(new, Some(2))),
            (false, vec![1, 2])
        );
        assert_eq!(
            together(&[1, 2], keeps(is, None), keeps(is, None)),
            (true, vec![])
        );
        // One was damaged.
        assert_eq!(
            together(&[1, 2], keeps(is, None), keeps(new, Some(3))),
            (false, vec![1, 3])
        );
        assert_eq!(
            together(&[1, 2], keeps(new, Some(3)), keeps(is, None)),
            (false, vec![3, 2])
        );
        // One keeps nothing.
        assert_eq!(
            together(&[], keeps(new, Some(1)), keeps(new, None)),
            (false, vec![])
        );
    }

    #[test]
    fn what_other_numbers_of_members_left_is_of_no_use() {
        let left = |n: u64| Keeping::Weights((0..n).map(kept).collect());
        let (own, given) = divide(left(2), 2);
        assert!(matches!(own, Keeping::Weights(own) if own.len() == 1));
        assert_eq!((given.keeps, given.all.len()), (true, 2));
        for n in [0, 1, 3] {
            let (own, given) = divide(left(n), 2);
            assert!(matches!(own, Keeping::Weights(own) if own.is_empty()));
            assert_eq!((given.keeps, given.all.len()), (true, 0));
        }
        let (own, given) = divide(Keeping::Nothing, 2);
        assert!(matches!(own, Keeping::Nothing) && !given.keeps);
    }
}

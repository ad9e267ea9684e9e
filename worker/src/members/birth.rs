//! The processes, and what connects them.

use std::{
    io,
    os::{fd::OwnedFd, unix::net::UnixStream},
    sync::Arc,
    time::Instant,
};

use hotcell_ipc::{
    descriptors::descriptor_pair,
    fork::{self, Forked},
    memory::{SharedMapping, shared_memory},
};
use hotcell_kernels::{
    backend::{DeviceError, SharedRegion},
    communicator::{Communicator, Share},
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::model::run::{Division, Parts};

/// The memory of a communicator.
#[derive(Clone)]
struct Memory(Arc<SharedMapping>);

// SAFETY: mapped for as long as the value lives, and nobody makes references into it but to the counters, which all use
// as atomics.
unsafe impl SharedRegion for Memory {
    fn span(&self) -> (*mut u8, usize) {
        (self.0.start(), self.0.len())
    }
}

/// A way between the leader and a member.
pub(super) struct Link {
    /// What is to be done goes there, and what became of it comes back.
    pub orders: UnixStream,
    /// Models' files go there, and the memory of devices.
    pub files: OwnedFd,
    /// The memory of a member's device comes from there: what others write into, and what is to outlive it.
    pub door: OwnedFd,
}

/// What the leader has of the others.
pub struct Leads {
    memory: Memory,
    division: Division,
    pub(super) others: Vec<(Forked, Link)>,
    /// From when on they tell each other times.
    pub(super) since: Instant,
}

/// What a member has.
pub struct Member {
    memory: Memory,
    parts: Parts,
    pub(super) link: Link,
    /// As the leader's.
    pub(super) since: Instant,
}

/// On which side of a [`fork`] this process is.
pub enum Side {
    /// It is who forked.
    Leader(Leads),
    /// It is one of those that were made.
    Member(Member),
}

/// Whether the other end of a connection is gone.
pub(super) fn is_over(link: &UnixStream) -> bool {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let mut polled = [PollFd::new(link, PollFlags::empty())];
    matches!(poll(&mut polled, Some(&now)), Ok(1..))
}

/// Makes the other members of a communicator, in all so many, which divide their models so, as children that do not outlive
/// this process. It must be the only thread.
///
/// # Errors
/// What the system refuses.
pub fn fork(members: usize, division: Division) -> io::Result<Side> {
    let memory = shared_memory("communicator", Communicator::bytes(members) as u64)?;
    let memory = Memory(Arc::new(SharedMapping::of_memory(&memory)?));
    let since = Instant::now();
    let mut others = Vec::new();
    for rank in 1..members {
        let (ours, orders) = UnixStream::pair()?;
        let (to, files) = descriptor_pair()?;
        let (from, door) = descriptor_pair()?;
        let Some(child) = fork::fork()? else {
            // Those to members that were made before are the leader's.
            drop((others, ours, to, from));
            return Ok(Side::Member(Member {
                memory,
                parts: Parts {
                    share: Share { rank, members },
                    division,
                },
                link: Link {
                    orders,
                    files,
                    door,
                },
                since,
            }));
        };
        let link = Link {
            orders: ours,
            files: to,
            door: from,
        };
        others.push((child, link));
    }
    Ok(Side::Leader(Leads {
        memory,
        division,
        others,
        since,
    }))
}

impl Leads {
    /// The leader's end of their memory.
    ///
    /// # Errors
    /// [`DeviceError::Binding`].
    pub fn communicator(&self) -> Result<Communicator, DeviceError> {
        let others: Vec<UnixStream> = (self.others.iter())
            .filter_map(|(_, link)| link.orders.try_clone().ok())
            .collect();
        let share = self.parts().share;
        if others.len() + 1 < share.members {
            return Err(DeviceError::Binding("no descriptor is left".to_owned()));
        }
        let alive = move || !others.iter().any(is_over);
        Communicator::new(share, Box::new(self.memory.clone()), alive)
    }

    /// The leader's part.
    pub fn parts(&self) -> Parts {
        Parts {
            share: Share {
                rank: 0,
                members: self.others.len() + 1,
            },
            division: self.division,
        }
    }
}

impl Member {
    /// Its end of their memory.
    ///
    /// # Errors
    /// [`DeviceError::Binding`].
    pub fn communicator(&self) -> Result<Communicator, DeviceError> {
        let leader = self.link.orders.try_clone();
        let leader = leader.map_err(|error| DeviceError::Binding(error.to_string()))?;
        let alive = move || !is_over(&leader);
        Communicator::new(self.parts.share, Box::new(self.memory.clone()), alive)
    }

    /// Its part.
    pub fn parts(&self) -> Parts {
        self.parts
    }

    /// What returns once the leader is gone.
    ///
    /// # Errors
    /// What the system refuses.
    pub fn gone(&self) -> io::Result<impl FnOnce() + Send + 'static> {
        let leader = self.link.orders.try_clone()?;
        Ok(move || {
            let mut end = [PollFd::new(&leader, PollFlags::empty())];
            while !matches!(poll(&mut end, None), Ok(1..)) {}
        })
    }
}

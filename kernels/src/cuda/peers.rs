//! Memory of several devices that each of them reaches: where members of a communicator give each other their parts, without
//! the host.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    rc::Rc,
};

use super::{
    gpu::Gpu,
    mapped::{Mapped, May},
};
use crate::{backend::DeviceError, communicator::Share};

/// Bytes that a member gives the others at a time.
pub(super) const SLOT: usize = 4 << 20;

/// Members at most.
const MOST: usize = 16;

/// Bytes before the slots of an area (`gather.cu`).
const HEADER: usize = 4096;

/// Bytes of a member's area: two sets of slots, in turns.
fn bytes(share: Share) -> usize {
    HEADER + 2 * share.members * SLOT
}

/// A member's area, which the others will write into.
pub(super) struct Door {
    own: Mapped,
    share: Share,
}

impl Door {
    /// Makes it, of zeroes.
    ///
    /// # Errors
    /// When the device has no such memory, or too little.
    pub fn new(gpu: &Rc<Gpu>, share: Share) -> Result<Self, DeviceError> {
        let own = Mapped::new(gpu, bytes(share))?;
        gpu.zero(own.start(), own.bytes())?;
        gpu.synchronize()?;
        Ok(Self { own, share })
    }

    /// Descriptors of it.
    pub fn export(&self) -> Result<Vec<OwnedFd>, DeviceError> {
        self.own.export()
    }

    /// Opens those of all members, by ranks; at the own rank nothing is opened.
    ///
    /// # Errors
    /// When this device does not reach the memory of another one.
    pub fn reach(self, gpu: &Rc<Gpu>, doors: &[Vec<BorrowedFd<'_>>]) -> Result<Peers, DeviceError> {
        let Share { rank, members } = self.share;
        if doors.len() != members || members > MOST {
            let why = format!("{} doors of {members} members", doors.len());
            return Err(DeviceError::Binding(why));
        }
        let mut areas = [0; MOST];
        let mut others = Vec::new();
        for (of, (door, area)) in doors.iter().zip(&mut areas).enumerate() {
            if of == rank {
                *area = self.own.start();
                continue;
            }
            // Members have devices one after another.
            let number = gpu.owner as i64 + of as i64 - rank as i64;
            gpu.reaches(number)?;
            let other = Mapped::import(gpu, bytes(self.share), door)?;
            other.allow(May::Write)?;
            *area = other.start();
            others.push(other);
        }
        Ok(Peers {
            areas,
            share: self.share,
            _own: self.own,
            _others: others,
        })
    }
}

/// The areas of all members.
pub(super) struct Peers {
    /// Their addresses, as this device has them.
    pub areas: [u64; MOST],
    pub share: Share,
    _own: Mapped,
    _others: Vec<Mapped>,
}

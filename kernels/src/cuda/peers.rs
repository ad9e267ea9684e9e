//! Memory of several devices that each of them reaches: where members of a communicator give each other their parts, without
//! the host.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    rc::Rc,
};

use super::{
    buffer::Memory,
    gpu::{Arguments, Gpu, Grid},
    mapped::{Mapped, May},
};
use crate::{
    backend::{DeviceError, DeviceMemory},
    communicator::Share,
    part::overflow,
};

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
            own: self.own,
            _others: others,
        })
    }
}

/// The areas of all members.
pub(super) struct Peers {
    /// Their addresses, as this device has them.
    areas: [u64; MOST],
    pub share: Share,
    own: Mapped,
    _others: Vec<Mapped>,
}

/// What the kernels are called.
pub(super) const NAMES: [&str; 2] = ["give_part", "take_parts"];

/// Threads of a block, and bytes that one of them copies before there is another block.
const THREADS: u32 = 256;
const EACH: usize = 64;

/// Blocks at most: of those that wait, fewer than a device has processors.
const MOST_BLOCKS: usize = 64;

/// Bytes of a member's greeting.
const GREETING: usize = 4096;

/// Bytes from one member's word in an area to the next one's (`gather.cu`).
const FLAG: usize = 128;

/// What a member writes to all as it reaches for them.
fn greeting(rank: usize) -> Vec<u8> {
    (0..GREETING)
        .map(|i| (rank * 59 + i * 7 + 1) as u8)
        .collect()
}

fn int(n: usize) -> Result<u32, DeviceError> {
    u32::try_from(n).map_err(|_| overflow())
}

fn grid(bytes: usize, receivers: usize) -> Result<Grid, DeviceError> {
    let blocks = bytes.div_ceil(THREADS as usize * EACH);
    Ok(Grid {
        blocks: [int(blocks.clamp(1, MOST_BLOCKS))?, int(receivers)?, 1],
        threads: [THREADS, 1, 1],
        shared: 0,
    })
}

impl Peers {
    /// Gives all members [`SLOT`] bytes at most, in the order of the stream.
    ///
    /// # Errors
    /// What the driver says.
    pub fn give(&self, gpu: &Gpu, mine: u64, bytes: usize) -> Result<(), DeviceError> {
        let Share { rank, members } = self.share;
        let arguments = Arguments::default()
            .block(&self.areas)
            .word(mine)
            .word(bytes as u64)
            .word(SLOT as u64)
            .int(int(members)?)
            .int(int(rank)?);
        let [giving, _] = NAMES;
        // SAFETY: the kernel's arguments (gather.cu): so many bytes are there, and fit into a slot of each area.
        unsafe { gpu.launch(giving, grid(bytes, members)?, &arguments) }
    }

    /// Waits for what all give, in the order of the stream, which is bytes from `at` on of rows of `width`, and puts it to
    /// rows of all.
    ///
    /// # Errors
    /// What the driver says.
    pub fn take(
        &self,
        gpu: &Gpu,
        all: u64,
        (at, bytes): (usize, usize),
        width: usize,
    ) -> Result<(), DeviceError> {
        let Share { rank, members } = self.share;
        let arguments = Arguments::default()
            .block(&self.areas)
            .word(all)
            .word(at as u64)
            .word(bytes as u64)
            .word(width as u64)
            .word(SLOT as u64)
            .int(int(members)?)
            .int(int(rank)?);
        let everyone = bytes.saturating_mul(members);
        let [_, taking] = NAMES;
        // SAFETY: the kernel's arguments (gather.cu): as many bytes of each member have room in the output.
        unsafe { gpu.launch(taking, grid(everyone, 1)?, &arguments) }
    }

    /// Writes to all of them.
    ///
    /// # Errors
    /// What the driver says.
    pub fn greet(&self, gpu: &Rc<Gpu>) -> Result<(), DeviceError> {
        let mine = Memory::of(gpu, "a greeting", &greeting(self.share.rank), false)?;
        self.give(gpu, mine.start(), GREETING)?;
        gpu.synchronize()
    }

    /// Sees that all have written here, by reading: nobody is waited for.
    ///
    /// # Errors
    /// When one has not.
    pub fn met(&self, gpu: &Rc<Gpu>) -> Result<(), DeviceError> {
        let start = self.own.start();
        for of in 0..self.share.members {
            let mut word = [0; 8];
            let mut came = vec![0; GREETING];
            gpu.download(&mut word, start + (of * FLAG) as u64)?;
            gpu.download(&mut came, start + (HEADER + of * SLOT) as u64)?;
            // Others that have seen it may have given more; not into this slot before this one has.
            if u64::from_ne_bytes(word) == 0 || came != greeting(of) {
                return Err(DeviceError::Binding(format!(
                    "what member {of} wrote to the memory of this device has not come"
                )));
            }
        }
        // All is there: this ends the first meeting.
        let all = Memory::new(gpu, "greetings", GREETING * self.share.members)?;
        self.take(gpu, all.start(), (0, GREETING), GREETING)?;
        gpu.synchronize()?;
        let mut read = vec![0; all.bytes()];
        all.read(0, &mut read)?;
        let expected = (0..self.share.members).flat_map(greeting);
        match read.into_iter().eq(expected) {
            true => Ok(()),
            false => Err(DeviceError::Binding("greetings were mixed up".to_owned())),
        }
    }
}

//! Memory that another process shares with this one.

use std::rc::{Rc, Weak};

use hotcell_graph::{TensorSpec, op::ValueSpec};
use hotcell_ipc::memory::SharedMapping;
use hotcell_kernels::{
    backend::{Backend, Buffer, SharedRegion},
    cpu::CpuBackend,
    memory::ALIGNMENT,
};
use hotcell_proto::{
    error::{Error, Reason},
    limits, v1,
};

use super::{
    account::Charge,
    invalid,
    memory::Storage,
    quota,
    state::Session,
    tensor::Tensor,
    value::{State, Value},
};
use crate::{error::of_plan, repair::Guarded};

/// Memory of others, mapped.
pub enum Mapped {
    /// Made and sealed by the scheduler; all of it.
    Sealed(SharedMapping),
    /// A client's own, which it may shorten; the tensor's part of it.
    Client(Guarded),
}

impl Mapped {
    fn span(&self) -> (*mut u8, usize) {
        match self {
            Self::Sealed(mapping) => (mapping.start(), mapping.len()),
            Self::Client(guarded) => (guarded.mapping().start(), guarded.mapping().len()),
        }
    }

    /// Device and inode, and where in that the mapping begins.
    fn origin(&self) -> ((u64, u64), u64) {
        match self {
            Self::Sealed(mapping) => (mapping.memory(), 0),
            Self::Client(guarded) => guarded.mapping().origin(),
        }
    }

    fn is_clients(&self) -> bool {
        matches!(self, Self::Client(_))
    }
}

/// A mapping of it, and what the session pays for it.
pub struct Region {
    mapping: Mapped,
    _charge: Charge,
}

impl Region {
    /// Whether some of it went away while it was used: what was read there since is zeroes, and what was written is lost.
    pub fn is_lost(&self) -> bool {
        match &self.mapping {
            Mapped::Sealed(_) => false,
            Mapped::Client(guarded) => guarded.is_lost(),
        }
    }
}

/// What a call is answered whose memory went away.
pub fn lost() -> Error {
    let what = "shared memory was shortened while it was computed with; unregister it and register it again";
    Error::new(Reason::RegionChanged, what)
}

// SAFETY: the mapping stays where it is, readable and writable, until it is dropped: its length is sealed, or the signal
// handler puts other pages in the place of those that go away (`crate::repair`); nobody makes references into it but kernels, to numbers: those have no invalid values, what is read may be anything
// anyway, and what decides about memory (indices, results that a later node reads) is copied or computed elsewhere first.
unsafe impl SharedRegion for Region {
    fn span(&self) -> (*mut u8, usize) {
        self.mapping.span()
    }
}

/// A session's mappings that still live.
#[derive(Default)]
pub struct Mappings(Vec<Weak<Region>>);

/// Where in shared memory a tensor lies, whatever becomes of its values.
pub struct SharedPlace {
    buffer: Buffer,
    region: Rc<Region>,
    offset: usize,
    bytes: usize,
}

impl SharedPlace {
    /// The memory as a value's.
    pub fn storage(&self) -> Storage {
        let region = Rc::clone(&self.region);
        Storage::shared(self.buffer.clone(), region, self.offset, self.bytes)
    }

    /// The region that it is part of.
    pub fn region(&self) -> &Rc<Region> {
        &self.region
    }

    /// Whether a byte of it is also one of `other`, through whichever mapping.
    pub fn overlaps(&self, other: &SharedPlace) -> bool {
        self.overlaps_part(&other.region, other.offset, other.bytes)
    }

    /// The same of so many bytes of a region.
    pub fn overlaps_part(&self, region: &Region, offset: usize, bytes: usize) -> bool {
        let ((memory, base), (other, other_base)) =
            (self.region.mapping.origin(), region.mapping.origin());
        let range = |base: u64, offset: usize, bytes: usize| {
            let start = base.saturating_add(offset as u64);
            start..start.saturating_add(bytes as u64)
        };
        let (own, its) = (
            range(base, self.offset, self.bytes),
            range(other_base, offset, bytes),
        );
        memory == other && own.start < its.end && its.start < own.end
    }
}

impl Session {
    /// Makes a tensor of memory that another process shares.
    ///
    /// # Errors
    /// When it does not fit there, quotas or memory are short, or there are too many tensors or mappings.
    pub fn import_shared(
        &mut self,
        mapping: Mapped,
        spec: TensorSpec,
        bytes: usize,
        offset: u64,
    ) -> Result<v1::TensorInfo, Error> {
        self.room_for(1)?;
        let backend = self.pool.device().info().backend;
        if mapping.is_clients() && backend != CpuBackend.name() {
            let what = format!("a {backend} device does not compute in memory of clients");
            return Err(Error::new(Reason::OpUnsupported, what));
        }
        let living = self.mappings.0.iter().filter_map(Weak::upgrade);
        let of_kind = |region: &Rc<Region>| region.mapping.is_clients() == mapping.is_clients();
        let limit = match mapping.is_clients() {
            true => limits::MAX_SESSION_CLIENT_MAPPINGS,
            false => limits::MAX_SESSION_MAPPINGS,
        };
        if living.filter(of_kind).count() >= limit {
            return Err(quota("mappings of shared memory", limit));
        }
        self.mappings.0.retain(|m| m.strong_count() > 0);
        let id = self.fresh(None)?;
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        if !offset.is_multiple_of(ALIGNMENT) {
            let what = format!("{offset} is not a multiple of {ALIGNMENT}, as offsets must be");
            return Err(invalid(what));
        }
        // Of a client's memory only the tensor's part is mapped.
        let offset = match mapping.is_clients() {
            true => 0,
            false => offset,
        };
        let (_, len) = mapping.span();
        if offset.checked_add(bytes).is_none_or(|end| end > len) {
            let what = format!(
                "{bytes} bytes at {offset} are outside of the {len} bytes of shared memory"
            );
            return Err(invalid(what));
        }
        // Mapped pages are memory of this worker, whoever else sees them.
        let charge = self.pool.charge("the shared memory", len)?;
        let region = Rc::new(Region {
            mapping,
            _charge: charge,
        });
        let buffer = self.pool.device().import_shared(Rc::clone(&region) as _);
        let buffer = buffer.map_err(|e| of_plan(&e))?;
        self.mappings.0.push(Rc::downgrade(&region));
        let place = Rc::new(SharedPlace {
            buffer,
            region,
            offset,
            bytes,
        });
        let tensor = Tensor {
            spec: ValueSpec::Tensor(spec),
            bytes,
            value: Value::new(State::Ready(place.storage())),
            weight: None,
            shared: Some(place),
        };
        Ok(self.insert(id, tensor))
    }
}

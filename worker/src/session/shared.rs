//! Memory that another process shares with this one.

use std::rc::{Rc, Weak};

use hotcell_graph::{TensorSpec, op::ValueSpec};
use hotcell_ipc::memory::SharedMapping;
use hotcell_kernels::{
    backend::{Buffer, SharedRegion},
    memory::ALIGNMENT,
};
use hotcell_proto::{error::Error, v1};

use super::{
    account::Charge,
    invalid,
    memory::Storage,
    quota,
    state::Session,
    tensor::Tensor,
    value::{State, Value},
};
use crate::error::of_plan;

/// Mappings of one session at once.
const MAX_MAPPINGS: usize = 64;

/// A mapping of it, and what the session pays for it.
pub struct Region {
    mapping: SharedMapping,
    _charge: Charge,
}

// SAFETY: the mapping stays where it is, readable and writable, until it is dropped, and its length is sealed;
// nobody makes references into it but kernels, to numbers: those have no invalid values, what is read may be anything
// anyway, and what decides about memory (indices, results that a later node reads) is copied or computed elsewhere first.
unsafe impl SharedRegion for Region {
    fn span(&self) -> (*mut u8, usize) {
        (self.mapping.start(), self.mapping.len())
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

    /// Whether a byte of it is also one of `other`, through whichever mapping.
    pub fn overlaps(&self, other: &SharedPlace) -> bool {
        let end = |place: &SharedPlace| place.offset.saturating_add(place.bytes);
        self.is_in(&other.region) && self.offset < end(other) && other.offset < end(self)
    }

    /// Whether it is part of the memory that a region maps.
    pub fn is_in(&self, region: &Region) -> bool {
        self.region.mapping.is_of_same_memory(&region.mapping)
    }
}

impl Session {
    /// Makes a tensor of memory that another process shares.
    ///
    /// # Errors
    /// When it does not fit there, quotas or memory are short, or there are too many tensors or mappings.
    pub fn import_shared(
        &mut self,
        mapping: SharedMapping,
        spec: TensorSpec,
        bytes: usize,
        offset: u64,
    ) -> Result<v1::TensorInfo, Error> {
        self.room_for(1)?;
        self.mappings.0.retain(|m| m.strong_count() > 0);
        if self.mappings.0.len() >= MAX_MAPPINGS {
            return Err(quota("mappings of shared memory", MAX_MAPPINGS));
        }
        let id = self.fresh(None)?;
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        if !offset.is_multiple_of(ALIGNMENT) {
            let what = format!("{offset} is not a multiple of {ALIGNMENT}, as offsets must be");
            return Err(invalid(what));
        }
        if offset
            .checked_add(bytes)
            .is_none_or(|end| end > mapping.len())
        {
            let what = format!(
                "{bytes} bytes at {offset} are outside of the {} bytes of shared memory",
                mapping.len()
            );
            return Err(invalid(what));
        }
        // Mapped pages are memory of this worker, whoever else sees them.
        let charge = self.pool.charge("the shared memory", mapping.len())?;
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

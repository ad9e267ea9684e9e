//! Device memory in pieces that other processes can map too, and that outlives this one for as long as anybody holds a
//! descriptor of it: the driver's virtual memory (`cuMemCreate` and what goes with it in `cuda.h`).

use std::{
    ffi::{c_int, c_uint},
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    rc::Rc,
};

use cudarc::driver::sys::{
    CUdevice_attribute_enum as Attribute, CUmemAccess_flags_enum as Access, CUmemAccessDesc,
    CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationProp_st__bindgen_ty_1,
    CUmemAllocationType_enum as AllocationType, CUmemGenericAllocationHandle as Handle,
    CUmemLocation, CUmemLocationType_enum as LocationType,
};

use super::{
    driver::{Driver, call},
    gpu::Gpu,
};
use crate::backend::DeviceError;

/// Bytes of one piece at most. A device need not have so much in one place, and this process not so many descriptors.
const PIECE: usize = 1 << 30;

/// A descriptor of POSIX, as the driver exports it.
const DESCRIPTOR: c_uint = 1;

/// What may be done with mapped memory; the device holds to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum May {
    Read,
    Write,
}

/// Whether a device has such memory.
pub(super) fn has(driver: &Driver, number: c_int) -> Result<bool, DeviceError> {
    let device = driver.device(number)?;
    for what in [
        Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    ] {
        if driver.attribute(what, device)? == 0 {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Pieces of device memory at addresses that follow one another.
pub(super) struct Mapped {
    gpu: Rc<Gpu>,
    start: u64,
    /// All that is reserved: whole pieces.
    bytes: usize,
    /// Bytes of each piece, and its name in this process.
    pieces: Vec<(usize, Handle)>,
    /// Bytes of the pieces that are mapped.
    mapped: usize,
}

fn location(gpu: &Gpu) -> CUmemLocation {
    CUmemLocation {
        type_: LocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: gpu.owner as c_int,
    }
}

fn properties(gpu: &Gpu) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: AllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location: location(gpu),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

/// Bytes of the pieces that hold so many.
fn pieces_of(gpu: &Gpu, bytes: usize) -> Result<Vec<usize>, DeviceError> {
    let mut unit = 0;
    // The recommended one. The pointers are to values of the types that `cuda.h` names, here and below.
    call!(
        gpu.driver,
        cuMemGetAllocationGranularity(&mut unit, &properties(gpu), 1)
    )?;
    let unit = unit.max(1);
    let large = || DeviceError::OutOfMemory {
        what: "weights".to_owned(),
        bytes,
    };
    let mut left = bytes
        .max(1)
        .checked_next_multiple_of(unit)
        .ok_or_else(large)?;
    let piece = (PIECE / unit).max(1).checked_mul(unit).ok_or_else(large)?;
    let mut pieces = Vec::with_capacity(left / piece + 1);
    while left > 0 {
        pieces.push(left.min(piece));
        left -= left.min(piece);
    }
    Ok(pieces)
}

impl Mapped {
    /// Memory of at least so many bytes, with whatever was in it; it may be written.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn new(gpu: &Rc<Gpu>, bytes: usize) -> Result<Self, DeviceError> {
        let sizes = pieces_of(gpu, bytes)?;
        let mut memory = Self::reserve(gpu, sizes.iter().sum())?;
        for size in sizes {
            let mut handle = 0;
            let made = call!(
                gpu.driver,
                cuMemCreate(&mut handle, size, &properties(gpu), 0)
            );
            made.map_err(|error| match error {
                DeviceError::OutOfMemory { .. } => DeviceError::OutOfMemory {
                    what: "weights".to_owned(),
                    bytes,
                },
                error => error,
            })?;
            memory.map(size, handle)?;
        }
        memory.allow(May::Write)?;
        Ok(memory)
    }

    /// Memory of at least so many bytes that a process made as [`Mapped::new`] does; it may be read.
    ///
    /// # Errors
    /// When these are no descriptors of such memory, in the order of its pieces.
    pub fn import(
        gpu: &Rc<Gpu>,
        bytes: usize,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<Self, DeviceError> {
        let sizes = pieces_of(gpu, bytes)?;
        if sizes.len() != descriptors.len() {
            return Err(DeviceError::Binding(format!(
                "{} descriptors came for {} pieces of memory",
                descriptors.len(),
                sizes.len()
            )));
        }
        let mut memory = Self::reserve(gpu, sizes.iter().sum())?;
        for (size, descriptor) in sizes.into_iter().zip(descriptors) {
            let mut handle = 0;
            // The number of the descriptor stands where the pointer is.
            let number = std::ptr::without_provenance_mut(descriptor.as_raw_fd() as usize);
            call!(
                gpu.driver,
                cuMemImportFromShareableHandle(&mut handle, number, DESCRIPTOR)
            )?;
            // Refused where the piece is smaller.
            memory.map(size, handle)?;
        }
        memory.allow(May::Read)?;
        Ok(memory)
    }

    fn reserve(gpu: &Rc<Gpu>, bytes: usize) -> Result<Self, DeviceError> {
        let mut start = 0;
        call!(gpu.driver, cuMemAddressReserve(&mut start, bytes, 0, 0, 0))?;
        Ok(Self {
            gpu: Rc::clone(gpu),
            start,
            bytes,
            pieces: Vec::new(),
            mapped: 0,
        })
    }

    /// Maps the next piece, which is this one's from here on.
    fn map(&mut self, bytes: usize, handle: Handle) -> Result<(), DeviceError> {
        self.pieces.push((bytes, handle));
        let at = self.start + self.mapped as u64;
        // Within what was reserved, and nothing is mapped there.
        call!(self.gpu.driver, cuMemMap(at, bytes, 0, handle, 0))?;
        self.mapped += bytes;
        Ok(())
    }

    /// Says what may be done with all of it from now on.
    pub fn allow(&self, may: May) -> Result<(), DeviceError> {
        let access = CUmemAccessDesc {
            location: location(&self.gpu),
            flags: match may {
                May::Read => Access::CU_MEM_ACCESS_FLAGS_PROT_READ,
                May::Write => Access::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            },
        };
        for (at, bytes) in self.placed() {
            call!(self.gpu.driver, cuMemSetAccess(at, bytes, &access, 1))?;
        }
        Ok(())
    }

    /// Address and bytes of each piece that is mapped: the driver takes nothing that is not exactly one.
    fn placed(&self) -> impl Iterator<Item = (u64, usize)> {
        let mut at = 0;
        let pieces = self.pieces.iter().map(move |(bytes, _)| {
            let here = at;
            at += bytes;
            (here, *bytes)
        });
        let mapped = pieces.take_while(|(at, _)| *at < self.mapped);
        mapped.map(|(at, bytes)| (self.start + at as u64, bytes))
    }

    /// Address of the first byte.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Bytes of all pieces.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// A descriptor of each piece: as long as one of them is open, it stays.
    pub fn export(&self) -> Result<Vec<OwnedFd>, DeviceError> {
        let export = |(_, handle): &(usize, Handle)| {
            let mut number: c_int = -1;
            let to = (&raw mut number).cast();
            call!(
                self.gpu.driver,
                cuMemExportToShareableHandle(to, *handle, DESCRIPTOR, 0)
            )?;
            if number < 0 {
                let why = "the driver exports memory without a descriptor".to_owned();
                return Err(DeviceError::Binding(why));
            }
            // SAFETY: the driver has just opened it for this process.
            Ok(unsafe { OwnedFd::from_raw_fd(number) })
        };
        self.pieces.iter().map(export).collect()
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let driver = self.gpu.driver;
        // Who is asked to stop using memory must be done with it.
        let mut freed = self.gpu.synchronize();
        for (at, bytes) in self.placed() {
            let unmapped = call!(driver, cuMemUnmap(at, bytes));
            freed = freed.and(unmapped);
        }
        for (_, handle) in &self.pieces {
            let released = call!(driver, cuMemRelease(*handle));
            freed = freed.and(released);
        }
        let freed = freed.and(call!(driver, cuMemAddressFree(self.start, self.bytes)));
        if let Err(error) = freed {
            tracing::warn!(%error, "mapped memory of a device was not given back");
        }
    }
}

//! Backend, Device, BufferType, Buffer, Stream, Event: the nouns every backend implements.
//!
//! All of a device's work is issued by one thread at a time, so buffers, streams and plans are not
//! `Send`: the compiler keeps them with whoever owns the device.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    path::PathBuf,
    rc::Rc,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use thiserror::Error;

use hotcell_graph::{Graph, GraphError, op::Call};

use crate::{
    communicator::Communicator,
    gauges::Gauges,
    host::{SharedBytes, Staging},
    plan::{Plan, PlanHints, Planner, Prepared, Unfinished},
    vault::{Kept, Vault, Wish},
};

/// What went wrong on a device.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The graph is not one.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// Neither the device nor a decomposition can do it.
    #[error("the {backend} backend cannot run {op}: {why}")]
    Unsupported {
        /// The backend.
        backend: &'static str,
        /// The op.
        op: &'static str,
        /// Dtypes or shapes that it lacks.
        why: String,
    },
    /// The backend's library failed where it should not have.
    #[error("the {backend} backend failed in {op}: {why}")]
    Failed {
        /// The backend.
        backend: &'static str,
        /// The op, or what else it was about.
        op: &'static str,
        /// What it said.
        why: String,
    },
    /// Memory could not be had.
    #[error("{what} needs {bytes} bytes, more than there are")]
    OutOfMemory {
        /// What it was for.
        what: String,
        /// How much.
        bytes: usize,
    },
    /// A buffer does not fit the place it was bound to, or an access is outside of it.
    #[error("{0}")]
    Binding(String),
    /// An index tensor points outside of what it indexes.
    #[error("{op}: index {index} is not in [0, {bound})")]
    IndexOutOfRange {
        /// The op that read it.
        op: &'static str,
        /// The index.
        index: i64,
        /// Its bound.
        bound: usize,
    },
    /// The values that the execution met leave the op without a result.
    #[error("{op} has no result: {why}")]
    Undefined {
        /// The op.
        op: &'static str,
        /// What there is too little of.
        why: &'static str,
    },
    /// The execution was stopped ([`Plan::stop_when`]).
    #[error("the execution was stopped before its end")]
    Stopped,
    /// No backend or device of this name.
    #[error("there is no device {0:?}; `hotcell devices` lists what there is")]
    NoDevice(String),
}

/// What to do when a device is lost to this process; it may end it.
static ON_LOSS: OnceLock<fn(&str)> = OnceLock::new();

/// Says, once for the process, what happens when a device's library reports that it computes nothing any more in this
/// process: `handler` gets what it said. Until then, and when it returns, callers get [`DeviceError::Failed`].
pub fn on_loss(handler: fn(&str)) {
    let _ = ON_LOSS.set(handler);
}

/// A device is lost. The processor is not.
#[cfg(feature = "cuda")]
pub(crate) fn lose(why: &str) {
    if let Some(handler) = ON_LOSS.get() {
        handler(why);
    }
}

/// What a device is, as its probe found it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Unique on this host, for example `cpu:0`.
    pub id: String,
    /// Name of its backend.
    pub backend: &'static str,
    /// For people.
    pub description: String,
    /// Memory it can use, bytes; 0 when unknown.
    pub memory_bytes: u64,
    /// Cores it may use (CPU).
    pub cores: Vec<u32>,
    /// Instruction path or architecture its kernels use.
    pub path: String,
    /// Where it is on the bus, for example `0000:01:00.0`; empty when it is on none.
    pub pci_id: String,
    /// Whether its memory is the host's.
    pub integrated: bool,
    /// What its driver says of itself, as `MAJOR.MINOR`; empty when it has none.
    pub driver: String,
}

/// Bytes that a device's library uses in this process, by its own count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceUsage {
    /// In what lives.
    pub active: usize,
    /// The most that was active.
    pub peak: usize,
    /// Freed, and kept for what comes next.
    pub cached: usize,
}

/// A kind of memory a device allocates from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferType {
    /// Name, for example `host`.
    pub name: &'static str,
    /// Alignment of every buffer, bytes.
    pub alignment: usize,
    /// Largest single buffer, bytes.
    pub max_bytes: usize,
    /// Whether the host can address it.
    pub is_host: bool,
}

/// Files and folders that a backend's libraries open by their names; those that are not there are passed over.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Files {
    /// What is only read, or run as code, while the device is [loaded](Backend::load).
    pub read: Vec<PathBuf>,
    /// What is written meanwhile too: its libraries give their threads names.
    pub written: Vec<PathBuf>,
    /// What is only read, at any time.
    pub kept: Vec<PathBuf>,
    /// Devices, which are opened at any time, written, and asked for what only they know.
    pub devices: Vec<PathBuf>,
}

/// A way to reach devices of one kind.
pub trait Backend: Sync {
    /// Its name, the part of a device's id before the colon.
    fn name(&self) -> &'static str;

    /// The devices there are now.
    fn devices(&self) -> Vec<DeviceInfo>;

    /// Why there is no device, where that is no matter of course.
    fn why_none(&self) -> Option<String> {
        None
    }

    /// What its management library tells of its devices; none: there is none.
    ///
    /// # Errors
    /// When it does not start.
    fn gauges(&self) -> Result<Option<Box<dyn Gauges>>, DeviceError> {
        Ok(None)
    }

    /// What [`Backend::load`] and the device open.
    fn files(&self) -> Files {
        Files::default()
    }

    /// Loads what opening this device needs files for, because its process is about to give up opening any. Does nothing
    /// where there is no such thing, also when the device is not this backend's.
    ///
    /// # Errors
    /// What opening it would say.
    fn load(&self, _id: &str) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Opens a device with the cores it may use (empty: as probed).
    ///
    /// # Errors
    /// [`DeviceError::NoDevice`] when there is none of this id.
    fn open(&self, id: &str, cores: &[u32]) -> Result<Rc<dyn Device>, DeviceError>;
}

/// Bytes of the host that stay at one address, unchanged, while the value lives.
///
/// # Safety
/// `bytes` must return the same slice every time, valid until the value is dropped.
pub unsafe trait HostRegion {
    /// The bytes.
    fn bytes(&self) -> &[u8];
}

/// Memory of the host that another process may read and write at any time.
///
/// # Safety
/// `span` must return the same address and length every time, of memory that stays mapped and writable until the
/// value is dropped. No Rust reference may lead into it.
pub unsafe trait SharedRegion {
    /// First byte and length.
    fn span(&self) -> (*mut u8, usize);
}

/// An open device.
pub trait Device {
    /// What it is.
    fn info(&self) -> &DeviceInfo;

    /// The backend's and instruction path's part of the numerics class, for example `cpu/avx512/r1`.
    fn numerics(&self) -> String;

    /// Whether equal inputs give equal bits within a numerics class.
    fn reproducible(&self) -> bool;

    /// Whether it, and all that was made by it, must stay on the thread that opened it. Otherwise all of it together
    /// may be used by another thread while no other does.
    fn is_bound_to_thread(&self) -> bool {
        true
    }

    /// What it allocates from; the first is the default.
    fn buffer_types(&self) -> &'static [BufferType];

    /// Zeroed memory.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    fn allocate(&self, what: &str, bytes: usize) -> Result<Buffer, DeviceError>;

    /// Read-only memory that is the host's own, without a copy where the device can address it.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when a copy was needed and does not fit.
    fn import(&self, region: Rc<dyn HostRegion>) -> Result<Buffer, DeviceError>;

    /// Memory that another process shares, in place.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] when the device cannot address it.
    fn import_shared(&self, region: Rc<dyn SharedRegion>) -> Result<Buffer, DeviceError>;

    /// Memory that was filled elsewhere, without a copy where the device can address it.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when a copy was needed and does not fit.
    fn adopt(&self, what: &str, staging: Staging) -> Result<Buffer, DeviceError>;

    /// Whether weights can outlive this process in its memory: whether there is a [`Device::vault`].
    fn keeps_weights(&self) -> bool {
        false
    }

    /// Memory for a model's weights, which outlives this process for as long as somebody holds its descriptors; with the
    /// weights in it if what was `kept` is that memory, as it was left. `None`: this device has none.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    fn vault(
        &self,
        _wish: &Wish<'_>,
        _kept: Option<Kept>,
    ) -> Result<Option<Box<dyn Vault>>, DeviceError> {
        Ok(None)
    }

    /// Names of the ops it has kernels for, for some inputs at least.
    fn ops(&self) -> Vec<&'static str>;

    /// Whether it has a kernel for this call; what it lacks is decomposed.
    fn supports(&self, call: &Call<'_>) -> bool;

    /// Makes a plan.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] or [`DeviceError::OutOfMemory`].
    fn plan(&self, graph: &Graph, hints: &PlanHints) -> Result<Box<dyn Plan>, DeviceError>;

    /// Who prepares plans for it on other threads, with the trail that it leaves now; `None`: only [`Device::plan`] makes
    /// them.
    fn planner(&self) -> Option<Arc<dyn Planner>> {
        None
    }

    /// Makes a plan of what its [planner](Device::planner) prepared, with the same results as [`Device::plan`] has. Of
    /// the hints, only `allocate` and `max_bytes` count.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`], with what was prepared; [`DeviceError::Binding`] when it is of another device.
    fn finish(
        &self,
        prepared: Box<dyn Prepared>,
        hints: &PlanHints,
    ) -> Result<Box<dyn Plan>, Unfinished> {
        let _ = (prepared, hints);
        Err(Unfinished::foreign())
    }

    /// A new stream.
    fn stream(&self) -> Box<dyn Stream>;

    /// What its library uses, where it has memory of its own beside what it allocates here.
    fn usage(&self) -> Option<DeviceUsage> {
        None
    }

    /// Gives back memory that its library, or the process' allocator, keeps for what comes next.
    fn trim(&self) {}

    /// Keeps each thread that computes on one of the device's cores, in their order; first of all the caller's, which
    /// computes as well. A device without threads of its own has none to keep.
    ///
    /// # Errors
    /// [`DeviceError::Failed`] when one may not run there; then all go where the system has them.
    fn pin(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Plans made from now on [together](PlanHints::together) give their parts to the other members of a communicator.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] where it cannot.
    fn join(&self, _communicator: Communicator) -> Result<(), DeviceError> {
        Err(DeviceError::Unsupported {
            backend: self.info().backend,
            op: "all_gather",
            why: "devices of this backend compute no models together".to_owned(),
        })
    }

    /// What it has [joined](Device::join).
    fn communicator(&self) -> Option<Arc<Communicator>> {
        None
    }

    /// Makes memory that the other members of what it has [joined](Device::join) may write into: descriptors of it, for
    /// their [`Device::reach`]. None: their parts go through the host's memory.
    ///
    /// # Errors
    /// When there is no such memory to be had.
    fn door(&self) -> Result<Vec<OwnedFd>, DeviceError> {
        Ok(Vec::new())
    }

    /// Has plans made from now on give parts from device to device, through the doors of all members, by their ranks. No
    /// doors: through the host's memory. All members do the one or the other.
    ///
    /// # Errors
    /// When it does not reach one of them; then parts go through the host's memory.
    fn reach(&self, _doors: &[Vec<BorrowedFd<'_>>]) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Sees that what each member gave as it [reached](Device::reach) for the others has come here. To be asked once all
    /// have.
    ///
    /// # Errors
    /// When it has not: devices may say that they reach each other where what lies between them does not let them.
    fn met(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Plans made from now on leave this trail while they run. A device that cannot tell leaves none.
    fn leave(&self, _trail: Trail) {}
}

/// Where a device notes how far it is, for whoever watches it from another process, also after its end.
#[derive(Clone, Copy, Debug)]
pub struct Trail {
    /// Goes up with every execution, and with every piece of a long node.
    pub progress: &'static AtomicU64,
    /// The node that runs, packed by `pack`.
    pub node: &'static AtomicU64,
    /// Packs a plan's step, the op's place in the catalogue (`u16::MAX`: none), and whether several nodes are computed
    /// as one, of which the op is the last.
    pub pack: fn(step: u32, op: u16, group: bool) -> u64,
    /// While it is set, a device that runs behind (CUDA) waits for every step, so that the one that is noted is the one that
    /// runs: slow, for who looks for the one that kills.
    pub each: &'static AtomicBool,
}

impl Trail {
    /// Something moved. For the one thread of a process that computes part 0.
    pub(crate) fn progressed(&self) {
        // No need for a locked instruction: where other processes write it too, a count that is lost is one of many, and
        // whoever watches wants to see that it changes.
        let count = self.progress.load(Ordering::Relaxed);
        self.progress
            .store(count.wrapping_add(1), Ordering::Relaxed);
    }
}

/// An ordered queue of work.
pub trait Stream {
    /// Executes a plan for `rows` rows after all earlier work of this stream.
    ///
    /// # Errors
    /// What the plan says.
    fn execute(&mut self, plan: &mut dyn Plan, rows: usize) -> Result<(), DeviceError>;

    /// An event that happens when all earlier work is done.
    fn record(&mut self) -> Event;

    /// Work after this waits for the event, which another stream may have recorded.
    fn wait(&mut self, event: &Event);

    /// Waits until all earlier work is done.
    ///
    /// # Errors
    /// A device error of that work.
    fn synchronize(&mut self) -> Result<(), DeviceError>;
}

/// A point in a stream's order: a rising fence value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The stream that recorded it.
    pub stream: u64,
    /// How much work came before it.
    pub fence: u64,
}

/// Memory of a device. Clones share it.
#[derive(Clone)]
pub struct Buffer(Rc<dyn DeviceMemory>);

/// What a backend's memory can do.
pub trait DeviceMemory {
    /// Its size.
    fn bytes(&self) -> usize;
    /// Copies `data` to `offset`.
    ///
    /// # Errors
    /// [`DeviceError::Binding`] when it does not fit or the memory is read-only.
    fn write(&self, offset: usize, data: &[u8]) -> Result<(), DeviceError>;
    /// Copies from `offset` into `data`.
    ///
    /// # Errors
    /// [`DeviceError::Binding`] when it does not fit.
    fn read(&self, offset: usize, data: &mut [u8]) -> Result<(), DeviceError>;
    /// Its address, where the host can address it.
    fn host(&self) -> Option<HostSpan>;
    /// Its address on the device, where only that can address it.
    fn device(&self) -> Option<DeviceSpan> {
        None
    }
    /// See [`Buffer::share`].
    fn share(&self) -> Option<SharedBytes> {
        None
    }
    /// See [`Buffer::is_shared`].
    fn is_shared(&self) -> bool {
        false
    }
}

/// Memory that the host can address.
#[derive(Clone, Copy, Debug)]
pub struct HostSpan {
    /// First byte.
    pub start: *mut u8,
    /// Bytes.
    pub len: usize,
    /// Whether it may be written.
    pub writable: bool,
}

/// Memory that only a device can address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSpan {
    /// Which device's, as that counts devices of this process.
    pub owner: u64,
    /// Address of the first byte there.
    pub start: u64,
    /// Whether it may be written.
    pub writable: bool,
}

impl Buffer {
    /// Wraps a backend's memory.
    pub fn new(memory: Rc<dyn DeviceMemory>) -> Self {
        Self(memory)
    }

    /// Its size, bytes.
    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }

    /// Copies `data` to `offset`.
    ///
    /// # Errors
    /// [`DeviceError::Binding`] when it does not fit or the memory is read-only.
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<(), DeviceError> {
        self.0.write(offset, data)
    }

    /// Copies from `offset` into `data`.
    ///
    /// # Errors
    /// [`DeviceError::Binding`] when it does not fit.
    pub fn read(&self, offset: usize, data: &mut [u8]) -> Result<(), DeviceError> {
        self.0.read(offset, data)
    }

    /// Writes 32-bit integers at element `index`.
    ///
    /// # Errors
    /// See [`Buffer::write`].
    pub fn write_i32(&self, index: usize, values: &[i32]) -> Result<(), DeviceError> {
        // SAFETY: an i32 is four bytes without padding; u8 has no alignment or validity needs.
        let bytes =
            unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) };
        self.write(index.saturating_mul(4), bytes)
    }

    /// Reads f32 values from element `index`.
    ///
    /// # Errors
    /// See [`Buffer::read`].
    pub fn read_f32(&self, index: usize, values: &mut [f32]) -> Result<(), DeviceError> {
        let len = size_of_val(values);
        // SAFETY: every bit pattern is an f32, and the slice covers exactly its bytes.
        let bytes = unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), len) };
        self.read(index.saturating_mul(4), bytes)
    }

    /// Its address, where the host can address it.
    pub fn host(&self) -> Option<HostSpan> {
        self.0.host()
    }

    /// Its address on a device, where only that can address it.
    pub fn device(&self) -> Option<DeviceSpan> {
        self.0.device()
    }

    /// A share to read on other threads, where the memory can be shared. While there is one the buffer is
    /// read-only. It must not be asked for while a plan is bound to write the buffer.
    pub fn share(&self) -> Option<SharedBytes> {
        self.0.share()
    }

    /// Whether somebody still holds a share.
    pub fn is_shared(&self) -> bool {
        self.0.is_shared()
    }
}

//! The MLX backend: MLX through `mlx-rs`, on whatever it runs on here.
//!
//! On a Mac that is Metal, elsewhere the processor. Memory is the host's in both cases, so that what MLX has no op for
//! runs on the CPU backend's kernels in the same place.

mod array;
mod attention;
mod memory;
mod ops;
mod plan;
mod ran;
mod run;
mod weights;

use std::{cell::Cell, rc::Rc};

use hotcell_graph::{Graph, op::Call};
use mlx_rs::{Device as MlxSide, DeviceType};

use self::{
    plan::{MlxPlan, Side},
    ran::Tally,
    weights::Weights,
};
use crate::{
    backend::{
        Backend, Buffer, BufferType, Device, DeviceError, DeviceInfo, DeviceUsage, Event,
        HostRegion, SharedRegion, Stream, Trail,
    },
    cpu::{CpuBackend, CpuDevice},
    host::Staging,
    plan::{Plan, PlanHints},
};

pub use self::{
    array::of_words as error_of,
    memory::{clear_cache, memory},
    ran::Ran,
};

/// Name of the backend.
pub const NAME: &str = "mlx";

/// Goes up with every change that gives other bits.
const KERNEL_REVISION: u32 = 3;

/// The one device there is: MLX decides what it is.
const ID: &str = "mlx:0";

/// What part of the memory freed arrays may keep.
const CACHE_SHARE: usize = 16;

/// The MLX backend.
pub struct MlxBackend;

/// What MLX computes on: `metal` or `cpu`.
fn side() -> Result<&'static str, DeviceError> {
    let failed = array::failed("finding its device");
    let side = MlxSide::try_default().map_err(&failed)?;
    Ok(match side.get_type().map_err(&failed)? {
        DeviceType::Gpu => "metal",
        DeviceType::Cpu => "cpu",
    })
}

/// The library's version.
fn version() -> String {
    // SAFETY: makes an empty string, which the next call fills; freed below.
    let mut text = unsafe { mlx_sys::mlx_string_new() };
    // SAFETY: the string was made above; what it leads to ends with a zero byte and lives until it is freed.
    let version = unsafe {
        match mlx_sys::mlx_version(&mut text) {
            0 => std::ffi::CStr::from_ptr(mlx_sys::mlx_string_data(text))
                .to_string_lossy()
                .into_owned(),
            _ => "unknown".to_owned(),
        }
    };
    // SAFETY: made above, freed once.
    unsafe { mlx_sys::mlx_string_free(text) };
    version
}

/// Whether MLX computes at all: a sum, evaluated.
fn works() -> Result<(), DeviceError> {
    let one = array::from_f32(&[1.0, 2.0], &[2])?;
    let sum = one.add(&one).map_err(array::failed("a sum"))?;
    let right = array::with_bytes(&sum, |bytes| bytes == [0, 0, 0, 64, 0, 0, 128, 64])?;
    match right {
        true => Ok(()),
        false => Err(DeviceError::NoDevice(ID.to_owned())),
    }
}

/// Has MLX (0.32.2) compile nothing on the processor, where it asks a shell for `g++`, has it make a library of C++ in
/// `/tmp/mlx`, and loads what lies there under a name that anybody can foresee. A confined worker starts no program and opens
/// no file; where there is no `g++`, MLX computes op by op anyway. So plans have no compiled closures, and what stays of
/// `compile` for MLX's own ops is off.
fn without_compiler() -> Result<(), DeviceError> {
    if !cfg!(target_os = "linux") {
        return Ok(());
    }
    // SAFETY: takes nothing and sets a flag.
    match unsafe { mlx_sys::mlx_disable_compile() } {
        0 => Ok(()),
        _ => Err(DeviceError::NoDevice(ID.to_owned())),
    }
}

/// What there is, found without starting a thread: a probe and a worker are not confined yet.
fn look() -> Result<DeviceInfo, DeviceError> {
    // The first call of all: from now on failures come back instead of ending the process.
    let side = side()?;
    array::listen();
    // What it runs on without Metal is the processor, and Metal's memory is the host's.
    let host = CpuBackend.devices().into_iter().next();
    let host = host.ok_or_else(|| DeviceError::NoDevice(ID.to_owned()))?;
    Ok(DeviceInfo {
        id: ID.to_owned(),
        backend: NAME,
        description: format!("MLX {} ({side}) on {}", version(), host.description),
        memory_bytes: host.memory_bytes,
        cores: host.cores,
        path: side.to_owned(),
        pci_id: String::new(),
        integrated: true,
        driver: String::new(),
    })
}

impl Backend for MlxBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn devices(&self) -> Vec<DeviceInfo> {
        match look() {
            Ok(info) => vec![info],
            Err(error) => {
                tracing::warn!(%error, "MLX does not work here");
                vec![]
            }
        }
    }

    fn open(&self, id: &str, cores: &[u32]) -> Result<Rc<dyn Device>, DeviceError> {
        Ok(Self::open_device(id, cores)?)
    }
}

impl MlxBackend {
    /// As [`Backend::open`], for who wants to know more than other devices tell.
    ///
    /// # Errors
    /// As there.
    pub fn open_device(id: &str, cores: &[u32]) -> Result<Rc<MlxDevice>, DeviceError> {
        if id != ID {
            return Err(DeviceError::NoDevice(id.to_owned()));
        }
        let mut info = look()?;
        works()?;
        if !cores.is_empty() {
            info.cores = cores.to_vec();
        }
        // What MLX has no op for runs here, on the same cores.
        let cpu = CpuDevice::beside(cores)?;
        without_compiler()?;
        let device = MlxDevice {
            numerics: format!("{NAME}/{}/{}/r{KERNEL_REVISION}", info.path, version()),
            side: Side {
                // Metal has none.
                double: info.path == "cpu",
                memory: match usize::try_from(info.memory_bytes) {
                    Ok(0) | Err(_) => usize::MAX,
                    Ok(bytes) => bytes,
                },
                weights: Rc::<Weights>::default(),
                ran: Tally::new(),
                cpu,
            },
            info,
            streams: Cell::new(0),
            trail: Cell::new(None),
        };
        device.limit()?;
        Ok(Rc::new(device))
    }
}

/// MLX's device, and the processor beside it.
pub struct MlxDevice {
    info: DeviceInfo,
    numerics: String,
    side: Side,
    streams: Cell<u64>,
    trail: Cell<Option<Trail>>,
}

impl MlxDevice {
    /// Has MLX wait for what runs before it takes more than the device has, and keep little of what was freed: others
    /// live in the same memory. Neither bounds an array, so sizes are bounded before.
    fn limit(&self) -> Result<(), DeviceError> {
        if self.side.memory < usize::MAX {
            self.set_memory_limit(self.side.memory)?;
            self.set_cache_limit(self.side.memory / CACHE_SHARE)?;
        }
        Ok(())
    }

    /// What ran of an op since the device was opened, by whom.
    pub fn ran(&self, op: &str) -> Ran {
        self.side.ran.of(op)
    }

    /// Rows of the catalogue that MLX computes for no inputs and that mean nothing in other rows, and why.
    pub fn elsewhere() -> &'static [(&'static str, &'static str)] {
        ops::REST
    }

    /// Whether MLX itself computes this call; the rest is decomposed or runs on the CPU backend's kernels.
    pub fn is_native(&self, call: &Call<'_>) -> bool {
        ops::supports(call, self.side.double)
    }
}

impl Device for MlxDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn numerics(&self) -> String {
        self.numerics.clone()
    }

    /// MLX's kernels split sums by shape, so that a row's bits depend on how many rows there are.
    fn reproducible(&self) -> bool {
        false
    }

    fn buffer_types(&self) -> &'static [BufferType] {
        self.side.cpu.buffer_types()
    }

    fn allocate(&self, what: &str, bytes: usize) -> Result<Buffer, DeviceError> {
        self.side.cpu.allocate(what, bytes)
    }

    fn import(&self, region: Rc<dyn HostRegion>) -> Result<Buffer, DeviceError> {
        let imported = self.side.cpu.import(region)?;
        Ok(self.side.weights.keep(imported))
    }

    fn import_shared(&self, region: Rc<dyn SharedRegion>) -> Result<Buffer, DeviceError> {
        self.side.cpu.import_shared(region)
    }

    fn adopt(&self, what: &str, staging: Staging) -> Result<Buffer, DeviceError> {
        self.side.cpu.adopt(what, staging)
    }

    fn ops(&self) -> Vec<&'static str> {
        let mut names: Vec<_> = ops::names().chain(self.side.cpu.ops()).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    fn supports(&self, call: &Call<'_>) -> bool {
        self.is_native(call) || self.side.cpu.supports(call)
    }

    fn plan(&self, graph: &Graph, hints: &PlanHints) -> Result<Box<dyn Plan>, DeviceError> {
        Ok(Box::new(MlxPlan::new(
            graph,
            hints,
            &self.side,
            self.trail.get(),
        )?))
    }

    fn stream(&self) -> Box<dyn Stream> {
        self.streams.set(self.streams.get() + 1);
        Box::new(MlxStream {
            id: self.streams.get(),
            fence: 0,
        })
    }

    fn usage(&self) -> Option<DeviceUsage> {
        memory().ok()
    }

    fn trim(&self) {
        if let Err(error) = clear_cache() {
            tracing::warn!(%error, "MLX keeps what was freed");
        }
    }

    fn leave(&self, trail: Trail) {
        self.trail.set(Some(trail));
        self.side.cpu.leave(trail);
    }
}

/// A plan evaluates all it computed before it ends, so order and events are trivially kept.
struct MlxStream {
    id: u64,
    fence: u64,
}

impl Stream for MlxStream {
    fn execute(&mut self, plan: &mut dyn Plan, rows: usize) -> Result<(), DeviceError> {
        self.fence += 1;
        plan.execute(rows)
    }

    fn record(&mut self) -> Event {
        Event {
            stream: self.id,
            fence: self.fence,
        }
    }

    fn wait(&mut self, _: &Event) {}

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
}

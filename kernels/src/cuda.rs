//! The CUDA backend: NVIDIA's devices, through the driver that is there at run time.
//!
//! Nothing is linked and no toolkit is needed: the kernels are part of the program, compiled for every architecture. What
//! has no kernel here is decomposed, or computed by the CPU backend's kernels in copies.

mod also;
mod buffer;
mod ceilings;
mod driver;
mod gauges;
mod gpu;
mod image;
mod join;
mod mapped;
mod ops;
mod peers;
mod plan;
mod run;
mod timed;
mod vault;

use std::{
    cell::{Cell, RefCell},
    os::fd::{BorrowedFd, OwnedFd},
    path::PathBuf,
    rc::Rc,
    sync::Arc,
};

use hotcell_graph::{Graph, op::Call};

pub use self::ceilings::Ceilings;
use self::{
    buffer::{ALIGNMENT, Memory},
    driver::driver,
    gpu::Gpu,
    peers::Door,
    plan::{CudaPlan, Side},
};
use crate::{
    backend::{
        Backend, Buffer, BufferType, Device, DeviceError, DeviceInfo, Event, Files, HostRegion,
        SharedRegion, Stream, Trail,
    },
    communicator::Communicator,
    cpu::CpuDevice,
    gauges::Gauges,
    host::Staging,
    plan::{Plan, PlanHints},
    vault::{Kept, Vault, Wish},
};

/// Name of the backend.
pub const NAME: &str = "cuda";

/// Goes up with every change that gives other bits.
const KERNEL_REVISION: u32 = 4;

/// What the driver's libraries are made of and read when they start.
const LIBRARIES: &[&str] = &[
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/usr/local/cuda",
    "/usr/local/nvidia",
    "/opt/nvidia",
    "/etc/ld.so.cache",
    "/etc/nvidia",
    "/proc",
    "/sys",
    "/dev/shm",
];

/// Where threads have their names. The driver takes it for a failure of the system when it cannot write one, and does not start.
const THREADS: &str = "/proc/self/task";

/// What the driver reads of itself whenever it opens a device.
const DRIVER: &str = "/proc/driver/nvidia";

/// What the driver talks to besides the numbered devices.
const DEVICES: &[&str] = &[
    "/dev/nvidiactl",
    "/dev/nvidia-uvm",
    "/dev/nvidia-uvm-tools",
    "/dev/nvidia-modeset",
    "/dev/nvidia-caps",
    "/dev/null",
];

/// Numbered devices at most.
const MOST_DEVICES: u32 = 32;

/// The CUDA backend.
pub struct CudaBackend;

static BUFFER_TYPES: &[BufferType] = &[BufferType {
    name: "cuda",
    alignment: ALIGNMENT,
    max_bytes: isize::MAX as usize,
    is_host: false,
}];

impl CudaBackend {
    /// The devices there are, or why there is none.
    ///
    /// # Errors
    /// A sentence for people: no driver, one that is too old, or what it says.
    pub fn look() -> Result<Vec<DeviceInfo>, String> {
        let driver = driver()?;
        let count = driver.devices().map_err(|error| error.to_string())?;
        (0..count)
            .map(|number| gpu::look(driver, number).map_err(|error| error.to_string()))
            .collect()
    }

    /// Whether the table of kernels has one for this call, which needs no device to be known.
    pub fn has_kernel(call: &Call<'_>) -> bool {
        ops::has(call)
    }

    /// Opens a device.
    ///
    /// # Errors
    /// When there is none of this id, or the driver fails.
    pub fn open_device(id: &str, cores: &[u32]) -> Result<CudaDevice, DeviceError> {
        let (gpu, info) = Gpu::open(id)?;
        // What has no kernel here runs there.
        let cpu = CpuDevice::beside(cores)?;
        Ok(CudaDevice {
            numerics: format!("{NAME}/{}/r{KERNEL_REVISION}", info.path),
            side: Side {
                gpu: Rc::new(gpu),
                cpu,
                peers: RefCell::default(),
            },
            info,
            door: RefCell::default(),
            streams: RefCell::new(0),
            trail: Cell::new(None),
        })
    }
}

impl Backend for CudaBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn devices(&self) -> Vec<DeviceInfo> {
        Self::look().unwrap_or_else(|why| {
            tracing::warn!(%why, "CUDA does not work here");
            vec![]
        })
    }

    fn why_none(&self) -> Option<String> {
        Self::look().err()
    }

    fn gauges(&self) -> Result<Option<Box<dyn Gauges>>, DeviceError> {
        let found = gauges::Management::open()?;
        Ok(found.map(|found| Box::new(found) as Box<dyn Gauges>))
    }

    /// Where distributions and containers have the driver's libraries, what these read of the system, and the devices.
    fn files(&self) -> Files {
        let mut read: Vec<PathBuf> = LIBRARIES.iter().map(PathBuf::from).collect();
        let searched = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        read.extend(std::env::split_paths(&searched).filter(|path| path.is_absolute()));
        let named = DEVICES.iter().map(PathBuf::from);
        let numbered = (0..MOST_DEVICES).map(|n| PathBuf::from(format!("/dev/nvidia{n}")));
        Files {
            read,
            written: vec![PathBuf::from(THREADS)],
            kept: vec![PathBuf::from(DRIVER)],
            devices: named.chain(numbered).collect(),
        }
    }

    fn load(&self, id: &str) -> Result<(), DeviceError> {
        gpu::prepare(id)
    }

    fn open(&self, id: &str, cores: &[u32]) -> Result<Rc<dyn Device>, DeviceError> {
        Ok(Rc::new(Self::open_device(id, cores)?))
    }
}

/// One of NVIDIA's devices, and the processor beside it.
pub struct CudaDevice {
    info: DeviceInfo,
    numerics: String,
    side: Side,
    /// What the other members are to write into, until it is known whether they do.
    door: RefCell<Option<Door>>,
    streams: RefCell<u64>,
    trail: Cell<Option<Trail>>,
}

impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn numerics(&self) -> String {
        self.numerics.clone()
    }

    /// Kernels sum in an order that does not depend on how many rows there are.
    fn reproducible(&self) -> bool {
        true
    }

    fn buffer_types(&self) -> &'static [BufferType] {
        BUFFER_TYPES
    }

    fn allocate(&self, what: &str, bytes: usize) -> Result<Buffer, DeviceError> {
        let memory = Memory::new(&self.side.gpu, what, bytes)?;
        Ok(Buffer::new(Rc::new(memory)))
    }

    fn import(&self, region: Rc<dyn HostRegion>) -> Result<Buffer, DeviceError> {
        let memory = Memory::of(
            &self.side.gpu,
            "a copy of imported memory",
            region.bytes(),
            false,
        );
        Ok(Buffer::new(Rc::new(memory?)))
    }

    /// It stays the host's: plans copy what they read and write of it.
    fn import_shared(&self, region: Rc<dyn SharedRegion>) -> Result<Buffer, DeviceError> {
        self.side.cpu.import_shared(region)
    }

    fn adopt(&self, what: &str, staging: Staging) -> Result<Buffer, DeviceError> {
        let memory = Memory::of(&self.side.gpu, what, staging.bytes(), true)?;
        Ok(Buffer::new(Rc::new(memory)))
    }

    fn keeps_weights(&self) -> bool {
        let gpu = &self.side.gpu;
        let has = mapped::has(gpu.driver, gpu.owner as i32);
        has.unwrap_or_else(|error| {
            tracing::warn!(%error, "whether weights outlive this process is not known");
            false
        })
    }

    fn vault(
        &self,
        wish: &Wish<'_>,
        kept: Option<Kept>,
    ) -> Result<Option<Box<dyn Vault>>, DeviceError> {
        if !self.keeps_weights() {
            return Ok(None);
        }
        Ok(Some(vault::open(&self.side.gpu, wish, kept)?))
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
        let plan = CudaPlan::new(graph, hints, &self.side, self.trail.get())?;
        Ok(Box::new(plan))
    }

    fn stream(&self) -> Box<dyn Stream> {
        let mut streams = self.streams.borrow_mut();
        *streams += 1;
        Box::new(CudaStream {
            id: *streams,
            fence: 0,
        })
    }

    fn join(&self, communicator: Communicator) -> Result<(), DeviceError> {
        self.side.cpu.join(communicator)
    }

    fn communicator(&self) -> Option<Arc<Communicator>> {
        self.side.cpu.communicator()
    }

    fn door(&self) -> Result<Vec<OwnedFd>, DeviceError> {
        let Some(communicator) = self.communicator().filter(|_| self.keeps_weights()) else {
            return Ok(Vec::new());
        };
        let door = Door::new(&self.side.gpu, communicator.share())?;
        let exported = door.export()?;
        *self.door.borrow_mut() = Some(door);
        Ok(exported)
    }

    fn reach(&self, doors: &[Vec<BorrowedFd<'_>>]) -> Result<(), DeviceError> {
        *self.side.peers.borrow_mut() = None;
        let door = self.door.borrow_mut().take();
        if let Some(door) = door.filter(|_| !doors.is_empty()) {
            let peers = door.reach(&self.side.gpu, doors)?;
            peers.greet(&self.side.gpu)?;
            *self.side.peers.borrow_mut() = Some(Rc::new(peers));
        }
        Ok(())
    }

    fn met(&self) -> Result<(), DeviceError> {
        match &*self.side.peers.borrow() {
            Some(peers) => peers.met(&self.side.gpu),
            None => Ok(()),
        }
    }

    fn leave(&self, trail: Trail) {
        self.side.gpu.leave_crumbs_in(trail.node);
        self.trail.set(Some(trail));
        self.side.cpu.leave(trail);
    }
}

impl CudaDevice {
    /// Whether a kernel of the device computes this call; the rest is decomposed or runs on the CPU backend's kernels.
    pub fn is_native(&self, call: &Call<'_>) -> bool {
        ops::kernel(call, &self.side, false).is_some()
    }

    /// Ops of the nodes of a graph's plan that run on the CPU backend's kernels, between copies, in the order of the nodes.
    ///
    /// # Errors
    /// As for [`Device::plan`].
    pub fn elsewhere(&self, graph: &Graph) -> Result<Vec<&'static str>, DeviceError> {
        self.elsewhere_with(graph, &PlanHints::default())
    }

    /// The same of a plan with these hints.
    ///
    /// # Errors
    /// As for [`Device::plan`].
    pub fn elsewhere_with(
        &self,
        graph: &Graph,
        hints: &PlanHints,
    ) -> Result<Vec<&'static str>, DeviceError> {
        let dry = PlanHints {
            allocate: false,
            ..*hints
        };
        let plan = CudaPlan::new(graph, &dry, &self.side, None)?;
        Ok(plan.elsewhere().to_vec())
    }
}

/// A plan has run when its execution returns, because an index that it refused is told then. So order and events are
/// trivially kept.
struct CudaStream {
    id: u64,
    fence: u64,
}

impl Stream for CudaStream {
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

//! The CPU backend: every processor core group is a device.

mod apart;
mod buffer;
pub mod dequant;
pub mod draw;
mod elementwise;
pub mod encode;
mod fuse;
pub mod gemm;
pub mod lanes;
pub mod math;
pub mod matmul;
mod ops;
pub mod path;
mod plan;
pub mod pool;
pub mod quantize;

pub use matmul::pack;

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::Arc,
    thread,
};

use hotcell_graph::{Graph, op::Call};

use self::{
    buffer::{Imported, Owned, Volatile},
    path::CpuPath,
    plan::{CpuPlan, CpuPlanner, CpuPrepared},
    pool::Pool,
};
use crate::{
    backend::{
        Backend, Buffer, BufferType, Device, DeviceError, DeviceInfo, Event, HostRegion,
        SharedRegion, Stream, Trail,
    },
    communicator::Communicator,
    host::Staging,
    memory::ALIGNMENT,
    plan::{Plan, PlanHints, Planner, Prepared, Unfinished},
};

/// Name of the backend.
pub const NAME: &str = "cpu";

/// Environment variable that chooses the instruction path by name instead of by detection.
pub const PATH_VARIABLE: &str = "HOTCELL_CPU_PATH";

/// The CPU backend.
pub struct CpuBackend;

static BUFFER_TYPES: &[BufferType] = &[BufferType {
    name: "host",
    alignment: ALIGNMENT,
    max_bytes: isize::MAX as usize,
    is_host: true,
}];

fn chosen_path() -> CpuPath {
    let named = std::env::var(PATH_VARIABLE)
        .ok()
        .and_then(|name| CpuPath::from_name(&name));
    named
        .filter(|path| path.is_available())
        .unwrap_or_else(CpuPath::detect)
}

/// What a file of `/proc` says under a key.
fn field(file: &str, key: &str) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find(|l| l.starts_with(key))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// The cores that this thread may run on, by number, as far as Linux tells.
fn allowed_cores() -> Vec<u32> {
    let list = field("/proc/thread-self/status", "Cpus_allowed_list");
    list.map_or_else(Vec::new, |list| core_list(&list))
}

/// Reads `0-3,8`; the parts that are no numbers are passed over.
fn core_list(text: &str) -> Vec<u32> {
    let mut cores = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.trim().parse::<u16>(), last.trim().parse::<u16>()) {
            cores.extend((first..=last).map(u32::from));
        }
    }
    cores
}

/// The cores to compute on: those that this process may run on, and no more of them than its control group gives
/// it time for.
fn usable_cores() -> Vec<u32> {
    let count = thread::available_parallelism().map_or(1, |n| n.get());
    let mut cores = allowed_cores();
    if cores.is_empty() {
        cores = (0..u32::try_from(count).unwrap_or(1)).collect();
    }
    cores.truncate(count);
    cores
}

/// Total memory and the processor's model name, as Linux tells them; zero and a plain word elsewhere.
fn host_facts() -> (u64, String) {
    let memory = field("/proc/meminfo", "MemTotal")
        .and_then(|v| v.split_whitespace().next()?.parse::<u64>().ok())
        .map_or(0, |kib| kib.saturating_mul(1024));
    (
        memory,
        field("/proc/cpuinfo", "model name").unwrap_or_else(|| "processor".to_owned()),
    )
}

impl Backend for CpuBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn devices(&self) -> Vec<DeviceInfo> {
        let (memory_bytes, model) = host_facts();
        let cores = usable_cores();
        vec![DeviceInfo {
            id: format!("{NAME}:0"),
            backend: NAME,
            description: format!("{model}, {} cores", cores.len()),
            memory_bytes,
            cores,
            path: chosen_path().name().to_owned(),
            pci_id: String::new(),
            integrated: true,
            driver: String::new(),
        }]
    }

    /// Has the process ask for what an instruction path needs, which a confined one cannot.
    fn load(&self, _id: &str) -> Result<(), DeviceError> {
        chosen_path();
        Ok(())
    }

    /// Any number after `cpu:` opens: a scheduler may split the cores into as many devices as it likes.
    fn open(&self, id: &str, cores: &[u32]) -> Result<Rc<dyn Device>, DeviceError> {
        Self::opened(id, cores, chosen_path())
    }
}

impl CpuBackend {
    fn opened(id: &str, cores: &[u32], path: CpuPath) -> Result<Rc<dyn Device>, DeviceError> {
        let number = id
            .strip_prefix(NAME)
            .and_then(|rest| rest.strip_prefix(':'));
        if number.and_then(|n| n.parse::<u16>().ok()).is_none() {
            return Err(DeviceError::NoDevice(id.to_owned()));
        }
        let mut info = CpuBackend
            .devices()
            .into_iter()
            .next()
            .ok_or(DeviceError::NoDevice(id.to_owned()))?;
        info.id = id.to_owned();
        info.path = path.name().to_owned();
        if !cores.is_empty() {
            info.cores = cores.to_vec();
        }
        Ok(Rc::new(CpuDevice::new(info, path)?))
    }
}

/// Some cores of this host, and one instruction path.
pub struct CpuDevice {
    info: DeviceInfo,
    path: CpuPath,
    pool: Rc<RefCell<Pool>>,
    streams: RefCell<u64>,
    trail: Cell<Option<Trail>>,
    communicator: RefCell<Option<Arc<Communicator>>>,
}

impl CpuDevice {
    fn new(info: DeviceInfo, path: CpuPath) -> Result<Self, DeviceError> {
        let pool = Pool::new(info.cores.len()).map_err(|_| DeviceError::OutOfMemory {
            what: "a compute thread".to_owned(),
            bytes: 0,
        })?;
        let pool = Rc::new(RefCell::new(pool));
        Ok(Self {
            info,
            path,
            pool,
            streams: RefCell::new(0),
            trail: Cell::new(None),
            communicator: RefCell::default(),
        })
    }

    fn own_planner(&self) -> CpuPlanner {
        CpuPlanner {
            path: self.path,
            threads: self.pool.borrow().parts(),
            trail: self.trail.get(),
            communicator: self.communicator.borrow().clone(),
        }
    }

    /// The first device, for what a device of another backend has no kernel for: on a path whose bits are every path's, because
    /// that backend's numerics class does not name it.
    ///
    /// # Errors
    /// As of [`Backend::open`].
    pub fn beside(cores: &[u32]) -> Result<Rc<dyn Device>, DeviceError> {
        let path = match chosen_path() {
            // Tiles sum in an order of their own.
            CpuPath::Amx => CpuPath::Amx.vectors(),
            path => path,
        };
        CpuBackend::opened("cpu:0", cores, path)
    }

    /// A device of `threads` threads on one path, for tests and benchmarks.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn with_path(threads: u32, path: CpuPath) -> Result<Self, DeviceError> {
        let mut info = CpuBackend
            .devices()
            .into_iter()
            .next()
            .ok_or(DeviceError::NoDevice(NAME.to_owned()))?;
        info.cores = (0..threads).collect();
        info.path = path.name().to_owned();
        Self::new(info, path)
    }
}

impl Device for CpuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn pin(&self) -> Result<(), DeviceError> {
        let pool = Pool::pinned(&self.info.cores).map_err(|error| DeviceError::Failed {
            backend: NAME,
            op: "pin",
            why: error.to_string(),
        })?;
        *self.pool.borrow_mut() = pool;
        Ok(())
    }

    fn numerics(&self) -> String {
        // Every path gives the same bits (the kernels' tests compare them), but for [some weights](matmul::sums_by_tiles) on that of
        // AMX. The class names it all the same, because a stream that goes on after a crash of one path must not silently depend on that
        // proof.
        format!("{NAME}/{}/r{}", self.path, matmul::KERNEL_REVISION)
    }

    fn reproducible(&self) -> bool {
        true
    }

    fn is_bound_to_thread(&self) -> bool {
        false
    }

    fn buffer_types(&self) -> &'static [BufferType] {
        BUFFER_TYPES
    }

    fn allocate(&self, what: &str, bytes: usize) -> Result<Buffer, DeviceError> {
        self.adopt(what, Staging::new(what, bytes)?)
    }

    fn import(&self, region: Rc<dyn HostRegion>) -> Result<Buffer, DeviceError> {
        Ok(Buffer::new(Rc::new(Imported(region))))
    }

    fn import_shared(&self, region: Rc<dyn SharedRegion>) -> Result<Buffer, DeviceError> {
        Ok(Buffer::new(Rc::new(Volatile(region))))
    }

    fn adopt(&self, _: &str, Staging(memory): Staging) -> Result<Buffer, DeviceError> {
        Ok(Buffer::new(Rc::new(Owned::new(memory))))
    }

    fn ops(&self) -> Vec<&'static str> {
        ops::names().collect()
    }

    fn supports(&self, call: &Call<'_>) -> bool {
        ops::supports(call)
    }

    fn plan(&self, graph: &Graph, hints: &PlanHints) -> Result<Box<dyn Plan>, DeviceError> {
        let prepared = self.own_planner().prepare(graph, hints)?;
        self.finish(prepared, hints).map_err(|e| e.error)
    }

    fn planner(&self) -> Option<Arc<dyn Planner>> {
        Some(Arc::new(self.own_planner()))
    }

    fn finish(
        &self,
        prepared: Box<dyn Prepared>,
        hints: &PlanHints,
    ) -> Result<Box<dyn Plan>, Unfinished> {
        let prepared = prepared.into_any().downcast::<CpuPrepared>();
        let prepared = prepared.map_err(|_| Unfinished::foreign())?;
        let pool = Rc::clone(&self.pool);
        // More parts than the pool has threads would leave some undone.
        if !prepared.is_for(pool.borrow().parts(), self.path) {
            return Err(Unfinished::foreign());
        }
        match CpuPlan::finish(prepared, hints.allocate, hints.max_bytes, pool) {
            Ok(plan) => Ok(Box::new(plan)),
            Err((error, prepared)) => Err(Unfinished {
                error,
                prepared: Some(prepared),
            }),
        }
    }

    fn trim(&self) {
        // Pieces between those in use, which glibc would keep for good.
        #[cfg(all(target_os = "linux", target_env = "gnu"))]
        // SAFETY: it takes no pointers, and locks what it looks at.
        unsafe {
            libc::malloc_trim(0);
        }
    }

    fn stream(&self) -> Box<dyn Stream> {
        let mut streams = self.streams.borrow_mut();
        *streams += 1;
        Box::new(CpuStream {
            id: *streams,
            fence: 0,
        })
    }

    fn leave(&self, trail: Trail) {
        self.trail.set(Some(trail));
    }

    fn join(&self, communicator: Communicator) -> Result<(), DeviceError> {
        *self.communicator.borrow_mut() = Some(Arc::new(communicator));
        Ok(())
    }

    fn communicator(&self) -> Option<Arc<Communicator>> {
        self.communicator.borrow().clone()
    }
}

/// Work is done when it is issued, so order and events are trivially kept.
struct CpuStream {
    id: u64,
    fence: u64,
}

impl Stream for CpuStream {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cores_are_read() {
        assert_eq!(core_list("0-3,8"), [0, 1, 2, 3, 8]);
        assert_eq!(core_list("5"), [5]);
        assert_eq!(core_list("2-1,x,7-y,99999999999"), Vec::<u32>::new());
        assert_eq!(core_list(""), Vec::<u32>::new());
    }

    #[test]
    fn there_is_a_core_to_compute_on() {
        let (usable, allowed) = (usable_cores(), allowed_cores());
        assert!(!usable.is_empty());
        assert!(allowed.is_empty() || usable.iter().all(|core| allowed.contains(core)));
    }
}

//! What the driver knows: memory, kernels, what is being recorded.

use std::{
    alloc::{Layout, alloc, alloc_zeroed, dealloc},
    collections::{BTreeMap, HashMap},
    ffi::{CString, c_int, c_uint, c_void},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use crate::{config::config, pieces::Pieces};

/// Added to an address of device memory: what the processor cannot follow.
pub const TAG: u64 = 0xD << 60;

/// What memory holds that nobody has written.
const POISON: u8 = 0xCB;

const ALIGNMENT: usize = 256;

/// A kernel as the host's compiler made it: arguments, blocks, threads of a block, bytes of shared memory → a result.
type Run = unsafe extern "C" fn(*mut *mut c_void, *const c_uint, *const c_uint, c_uint) -> c_int;

/// A kernel.
pub struct Kernel {
    pub name: String,
    pub run: Run,
    /// Bytes of each argument.
    pub sizes: Vec<usize>,
}

/// Something for the device to do.
#[derive(Clone)]
pub enum Node {
    Kernel {
        kernel: Arc<Kernel>,
        blocks: [c_uint; 3],
        threads: [c_uint; 3],
        shared: c_uint,
        arguments: Vec<Vec<u64>>,
    },
    Set {
        at: u64,
        value: u8,
        bytes: usize,
    },
    Copy {
        to: u64,
        from: u64,
        bytes: usize,
    },
}

pub struct Event {
    pub is_timed: bool,
    /// When, by the device's clock, it happened last.
    pub happened: Option<Duration>,
}

#[derive(Default)]
pub struct State {
    /// Bytes of device memory that are taken.
    pub used: usize,
    /// Calls of each function.
    pub calls: HashMap<String, u32>,
    /// The result that all calls have, when the device is lost.
    pub lost: c_int,
    /// What streams have been given since they are recorded.
    pub recorded: HashMap<u64, Vec<Node>>,
    pub graphs: HashMap<u64, Vec<Node>>,
    pub events: HashMap<u64, Event>,
    /// Kernels that ran.
    pub ran: u32,
    /// Memory that other processes can map.
    pub pieces: Pieces,
    memory: BTreeMap<u64, usize>,
    pinned: HashMap<u64, usize>,
    functions: HashMap<u64, Arc<Kernel>>,
    names: u64,
}

/// The driver's state.
pub fn state() -> MutexGuard<'static, State> {
    static STATE: OnceLock<Mutex<State>> = OnceLock::new();
    let state = STATE.get_or_init(Mutex::default);
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes.max(1), ALIGNMENT).expect("a size that the driver has checked")
}

impl State {
    /// What the device's clock says.
    pub fn clock(&self) -> Duration {
        static BEGUN: OnceLock<Instant> = OnceLock::new();
        match config().clock {
            0 => BEGUN.get_or_init(Instant::now).elapsed(),
            ms => Duration::from_millis(ms.into()).saturating_mul(self.ran),
        }
    }

    /// A handle that nothing else has.
    pub fn name(&mut self) -> u64 {
        self.names += 0x10;
        0x1000 + self.names
    }

    pub fn allocate(&mut self, bytes: usize) -> u64 {
        // SAFETY: a layout of some bytes.
        let start = unsafe { alloc(layout(bytes)) };
        assert!(!start.is_null(), "the host is out of memory");
        // SAFETY: allocated above.
        unsafe { start.write_bytes(POISON, bytes) };
        let address = start.expose_provenance() as u64 | TAG;
        self.used += bytes;
        self.memory.insert(address, bytes);
        address
    }

    pub fn free(&mut self, address: u64) -> bool {
        let Some(bytes) = self.memory.remove(&address) else {
            return false;
        };
        self.used -= bytes;
        // SAFETY: allocated with this layout, and forgotten now.
        unsafe { dealloc(to_host(address), layout(bytes)) };
        true
    }

    pub fn pin(&mut self, bytes: usize) -> u64 {
        // SAFETY: a layout of some bytes.
        let start = unsafe { alloc_zeroed(layout(bytes)) };
        assert!(!start.is_null(), "the host is out of memory");
        let address = start.expose_provenance() as u64;
        self.pinned.insert(address, bytes);
        address
    }

    pub fn unpin(&mut self, address: u64) -> bool {
        let Some(bytes) = self.pinned.remove(&address) else {
            return false;
        };
        // SAFETY: allocated with this layout, and forgotten now.
        unsafe { dealloc(to_host(address), layout(bytes)) };
        true
    }

    /// Where bytes of device memory are that are read, or written; nothing for what is not all in one allocation, or may not be.
    pub fn host(&self, address: u64, bytes: usize, write: bool) -> Option<*mut u8> {
        if self.pieces.allows(address, bytes, write) && bytes > 0 {
            return Some(to_host(address));
        }
        let (start, len) = self.memory.range(..=address).next_back()?;
        let end = address.checked_add(bytes as u64)?;
        (end <= start + *len as u64).then(|| to_host(address))
    }

    /// A kernel's handle, by its name.
    pub fn function(&mut self, name: &str) -> Option<u64> {
        let kernel = Arc::new(find(name)?);
        let handle = self.name();
        self.functions.insert(handle, kernel);
        Some(handle)
    }

    pub fn kernel(&self, handle: u64) -> Option<Arc<Kernel>> {
        self.functions.get(&handle).cloned()
    }
}

pub fn to_host(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut((address & !TAG) as usize)
}

/// The library of kernels, opened once; nothing where there is none.
pub fn library() -> Option<usize> {
    static LIBRARY: OnceLock<Option<usize>> = OnceLock::new();
    *LIBRARY.get_or_init(|| {
        let path = CString::new(config().kernels.to_str()?).ok()?;
        // SAFETY: its initialisers are those of the kernels' sources.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        (!library.is_null()).then(|| library.expose_provenance())
    })
}

fn symbol(name: &str) -> Option<*mut c_void> {
    let name = CString::new(name).ok()?;
    let library = std::ptr::with_exposed_provenance_mut(library()?);
    // SAFETY: a library that stays open.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// A kernel `name` is `fk_name`, and `fk_name_size(i)` says how large its argument `i` is: 0 behind the last.
fn find(name: &str) -> Option<Kernel> {
    let run = symbol(&format!("fk_{name}"))?;
    let size = symbol(&format!("fk_{name}_size"))?;
    // SAFETY: the shim (kernels/cuda/shim) exports both with these types.
    let (run, size) = unsafe {
        (
            std::mem::transmute::<*mut c_void, Run>(run),
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int) -> c_int>(size),
        )
    };
    // SAFETY: as above.
    let sizes = (0..).map(|i| usize::try_from(unsafe { size(i) }).unwrap_or(0));
    Some(Kernel {
        name: name.to_owned(),
        run,
        sizes: sizes.take_while(|size| *size > 0).collect(),
    })
}

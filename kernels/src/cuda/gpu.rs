//! A device as this process has it: its context, one stream, its kernels, and memory that is copied through.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    ffi::{CString, c_int},
    ptr,
    sync::{Mutex, PoisonError, atomic::AtomicU64},
};

use cudarc::driver::sys::{
    CUcontext, CUdevice_attribute_enum as Attribute, CUdeviceptr, CUevent, CUfunction, CUgraphExec,
    CUmodule, CUstream,
};

use super::{
    NAME,
    driver::{Driver, driver},
    image::IMAGES,
};
use crate::backend::{DeviceError, DeviceInfo};

/// Bytes of one of the two halves of the memory that copies go through: while one is on its way the other is filled.
const HALF: usize = 2 << 20;

/// A context and its kernels, of which there is one for a device in a process, on whatever thread.
#[derive(Clone)]
struct Loaded {
    context: CUcontext,
    modules: Vec<CUmodule>,
}

// SAFETY: both are names of the driver's, which any thread may use; what belongs to a thread is which context is current.
unsafe impl Send for Loaded {}

/// What was loaded, by the device's number.
static LOADED: Mutex<Vec<(c_int, Loaded)>> = Mutex::new(Vec::new());

/// A device's number, by its id.
pub(super) fn number(id: &str) -> Option<c_int> {
    let digits = id.strip_prefix(NAME)?.strip_prefix(':')?;
    let number: u16 = digits.parse().ok()?;
    Some(number.into())
}

fn unknown(number: i64) -> DeviceError {
    DeviceError::NoDevice(format!("{NAME}:{number}"))
}

fn no_device(id: &str, why: impl std::fmt::Display) -> DeviceError {
    DeviceError::Failed {
        backend: NAME,
        op: "opening the device",
        why: format!("{id} cannot be used: {why}"),
    }
}

/// How many multiprocessors a device has.
const UNITS: Attribute = Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;

/// What is known of a device without a context on it.
pub(super) fn look(driver: &Driver, number: c_int) -> Result<DeviceInfo, DeviceError> {
    let device = driver.device(number)?;
    let capability = |what| driver.attribute(what, device);
    let major = capability(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = capability(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let units = driver.attribute(UNITS, device)?;
    let integrated = driver.attribute(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED, device)?;
    let (name, place) = (driver.device_name(device)?, driver.device_place(device)?);
    let memory = driver.device_memory(device)?;
    let version = format!("{}.{}", driver.version / 1000, driver.version % 1000 / 10);
    Ok(DeviceInfo {
        id: format!("{NAME}:{number}"),
        backend: NAME,
        description: format!(
            "{name} at {place}, {units} multiprocessors, driver for CUDA {version}"
        ),
        memory_bytes: memory as u64,
        cores: vec![],
        path: format!("sm_{major}{minor}"),
        pci_id: place,
        integrated: integrated != 0,
        driver: version,
    })
}

/// Makes the context and loads the kernels, once for a process.
fn load(driver: &Driver, number: c_int) -> Result<Loaded, DeviceError> {
    let mut all = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, there)) = all.iter().find(|(other, _)| *other == number) {
        return Ok(there.clone());
    }
    let context = driver.context(driver.device(number)?)?;
    driver.enter(context)?;
    let mut modules = Vec::new();
    for image in IMAGES {
        // SAFETY: the image is the one that was committed with this source.
        modules.push(unsafe { driver.module(image) }?);
    }
    let loaded = Loaded { context, modules };
    all.push((number, loaded.clone()));
    Ok(loaded)
}

/// All that opening a device opens files for.
pub(super) fn prepare(id: &str) -> Result<(), DeviceError> {
    let Some(number) = number(id) else {
        return Ok(());
    };
    let driver = driver().map_err(|why| no_device(id, why))?;
    load(driver, number).map(|_| ())
}

/// Where steps write indices that they refuse: a page of it.
const SLOTS: usize = 256;

/// An index that a kernel refused, as the kernels write it (`common.cuh`): there is one when the bound is above 0.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Slot {
    index: i64,
    bound: u64,
}

/// An index that a kernel refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    /// The number of the plan's step that refused it leaves this rest when it is divided by [`Fault::STEPS`].
    pub step: usize,
    /// The index.
    pub index: i64,
    /// What it must be below.
    pub bound: u64,
}

impl Fault {
    /// Steps that are told apart.
    pub const STEPS: usize = SLOTS;
}

/// A half of the memory that copies go through.
struct Half {
    start: *mut u8,
    /// Happens when the device is done with it.
    free: CUevent,
}

/// An open device. It belongs to the thread that opened it.
pub(super) struct Gpu {
    pub driver: &'static Driver,
    stream: CUstream,
    modules: Vec<CUmodule>,
    halves: [Half; 2],
    /// [`SLOTS`] of them, in memory that host and device share.
    faults: *mut Slot,
    functions: RefCell<HashMap<&'static str, Option<CUfunction>>>,
    /// Where the device finds the word that says which step it runs.
    crumbs: Cell<Option<CUdeviceptr>>,
    /// Its number.
    pub owner: u64,
}

impl Gpu {
    /// Opens a device on this thread.
    ///
    /// # Errors
    /// When there is none of this id, or the driver fails.
    pub fn open(id: &str) -> Result<(Self, DeviceInfo), DeviceError> {
        let number = number(id).ok_or_else(|| DeviceError::NoDevice(id.to_owned()))?;
        let driver = driver().map_err(|why| no_device(id, why))?;
        if number >= driver.devices()? {
            return Err(DeviceError::NoDevice(id.to_owned()));
        }
        let info = look(driver, number)?;
        let Loaded { context, modules } = load(driver, number)?;
        driver.enter(context)?;
        let half = || {
            Ok::<_, DeviceError>(Half {
                start: driver.allocate_pinned(HALF)?,
                free: driver.event()?,
            })
        };
        let faults = driver.allocate_pinned(SLOTS * size_of::<Slot>())?;
        let faults = faults.cast::<Slot>();
        // SAFETY: pinned memory is aligned to a page, and this is as large as the slots, for which zeros are a value.
        unsafe { faults.write_bytes(0, SLOTS) };
        let gpu = Self {
            driver,
            stream: driver.stream()?,
            modules,
            halves: [half()?, half()?],
            faults,
            functions: RefCell::default(),
            crumbs: Cell::default(),
            owner: number as u64,
        };
        Ok((gpu, info))
    }

    /// Waits for all that was given to the device.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        self.driver.synchronize(self.stream)
    }

    /// An event that tells when the device has come to here.
    pub fn timed_event(&self) -> Result<CUevent, DeviceError> {
        let event = self.driver.timed_event()?;
        match self.driver.record(event, self.stream) {
            Ok(()) => Ok(event),
            Err(error) => {
                self.driver.free_event(event)?;
                Err(error)
            }
        }
    }

    /// Sees that it reaches the memory of another device, by its number.
    ///
    /// # Errors
    /// When it does not, or there is none.
    pub fn reaches(&self, other: i64) -> Result<(), DeviceError> {
        let is = |number: i64| {
            let number = c_int::try_from(number).map_err(|_| unknown(number))?;
            self.driver.device(number)
        };
        match self.driver.reaches(is(self.owner as i64)?, is(other)?)? {
            true => Ok(()),
            false => Err(DeviceError::Failed {
                backend: NAME,
                op: "reaching another device",
                why: format!("{NAME}:{} does not reach {NAME}:{other}", self.owner),
            }),
        }
    }

    /// Copies to the device: what is given may change as soon as this returns.
    pub fn upload(&self, to: CUdeviceptr, data: &[u8]) -> Result<(), DeviceError> {
        for (i, chunk) in data.chunks(HALF).enumerate() {
            let half = &self.halves[i % 2];
            self.driver.wait(half.free)?;
            // SAFETY: the half is as large as a chunk, pinned until this device is dropped, and the device is done with it.
            unsafe { ptr::copy_nonoverlapping(chunk.as_ptr(), half.start, chunk.len()) };
            let at = to + (i * HALF) as u64;
            // SAFETY: as above; nobody writes the half before the event that follows.
            unsafe {
                self.driver
                    .upload(at, half.start, chunk.len(), self.stream)?;
            }
            self.driver.record(half.free, self.stream)?;
        }
        Ok(())
    }

    /// Copies from the device, after all that it was given before.
    pub fn download(&self, data: &mut [u8], from: CUdeviceptr) -> Result<(), DeviceError> {
        let take = |half: &Half, chunk: &mut [u8]| -> Result<(), DeviceError> {
            self.driver.wait(half.free)?;
            // SAFETY: the half is as large as a chunk, and the device is done with it.
            unsafe { ptr::copy_nonoverlapping(half.start, chunk.as_mut_ptr(), chunk.len()) };
            Ok(())
        };
        let mut before: Option<(&Half, &mut [u8])> = None;
        for (i, chunk) in data.chunks_mut(HALF).enumerate() {
            let half = &self.halves[i % 2];
            self.driver.wait(half.free)?;
            let at = from + (i * HALF) as u64;
            // SAFETY: the half is as large as a chunk; it is read after the event that follows.
            unsafe {
                self.driver
                    .download(half.start, at, chunk.len(), self.stream)?;
            }
            self.driver.record(half.free, self.stream)?;
            if let Some((half, chunk)) = before.replace((half, chunk)) {
                take(half, chunk)?;
            }
        }
        match before {
            Some((half, chunk)) => take(half, chunk),
            None => Ok(()),
        }
    }

    /// Copies within the device.
    pub fn copy(
        &self,
        to: CUdeviceptr,
        from: CUdeviceptr,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        match bytes {
            0 => Ok(()),
            _ => self.driver.copy(to, from, bytes, self.stream),
        }
    }

    /// Zeroes memory of the device.
    pub fn zero(&self, at: CUdeviceptr, bytes: usize) -> Result<(), DeviceError> {
        match bytes {
            0 => Ok(()),
            _ => self.driver.zero(at, bytes, self.stream),
        }
    }

    /// How many multiprocessors it has.
    pub fn multiprocessors(&self) -> Result<usize, DeviceError> {
        let number = c_int::try_from(self.owner).map_err(|_| unknown(self.owner as i64))?;
        let units = self.driver.attribute(UNITS, self.driver.device(number)?)?;
        Ok(usize::try_from(units).unwrap_or(1).max(1))
    }

    /// Whether there is a kernel of this name.
    pub fn has(&self, name: &'static str) -> bool {
        self.function(name).is_ok()
    }

    fn function(&self, name: &'static str) -> Result<CUfunction, DeviceError> {
        let missing = || DeviceError::Unsupported {
            backend: NAME,
            op: name,
            why: "this build's kernels lack it".to_owned(),
        };
        let found = *self.functions.borrow_mut().entry(name).or_insert_with(|| {
            let name = CString::new(name).ok()?;
            let mut modules = self.modules.iter();
            modules.find_map(|module| self.driver.function(*module, &name).ok())
        });
        found.ok_or_else(missing)
    }

    /// Starts a kernel. No blocks: nothing.
    ///
    /// # Safety
    /// The arguments must be the kernel's, and each address as large as it makes of it.
    pub unsafe fn launch(
        &self,
        name: &'static str,
        grid: Grid,
        arguments: &Arguments,
    ) -> Result<(), DeviceError> {
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        let function = self.function(name)?;
        let Grid {
            blocks,
            threads,
            shared,
        } = grid;
        let words = arguments.words.as_ptr();
        let starts = arguments.starts.iter();
        // SAFETY: each start is within the words.
        let pointer = |at: &usize| unsafe { words.add(*at) }.cast_mut().cast();
        let mut pointers: Vec<_> = starts.map(pointer).collect();
        // SAFETY: the caller's. The driver reads the arguments before it returns, and writes none.
        unsafe {
            let stream = self.stream;
            self.driver
                .launch(function, blocks, threads, shared, stream, &mut pointers)
        }
    }

    /// Has the device itself write to this word which step it runs ([`Gpu::leave_crumb`]). Where the driver gives it no
    /// way to, the host does when it gives the step, which may be long before.
    pub fn leave_crumbs_in(&self, word: &'static AtomicU64) {
        // Pages are what is mapped.
        const PAGE: usize = 4096;
        let at = word.as_ptr().addr() % PAGE;
        let page = word.as_ptr().cast::<u8>().wrapping_sub(at);
        match self.driver.map_page(page, PAGE) {
            Ok(page) => self.crumbs.set(Some(page + at as u64)),
            Err(error) => tracing::warn!(%error, "the device cannot say which step it runs"),
        }
    }

    /// Whether the device notes steps.
    pub fn leaves_crumbs(&self) -> bool {
        self.crumbs.get().is_some()
    }

    /// Has the device note a step when it comes to it. Whether it does.
    pub fn leave_crumb(&self, mark: u64) -> Result<bool, DeviceError> {
        let Some(address) = self.crumbs.get() else {
            return Ok(false);
        };
        let arguments = Arguments::default().word(address).word(mark);
        let once = Grid {
            blocks: [1; 3],
            threads: [1; 3],
            shared: 0,
        };
        // SAFETY: it writes one word, at an address that stays mapped.
        unsafe { self.launch("leave_crumb", once, &arguments) }.map(|()| true)
    }

    /// Where a step's kernels write an index that they refuse.
    pub fn fault_address(&self, step: usize) -> u64 {
        let base = self.faults.addr() as u64;
        base + (step % SLOTS * size_of::<Slot>()) as u64
    }

    /// Takes the first fault of what the device has done. After [`Gpu::synchronize`].
    pub fn take_fault(&self) -> Option<Fault> {
        let mut found = None;
        for step in 0..SLOTS {
            // SAFETY: within pinned memory of this device's; what would write it is done.
            let slot = unsafe { self.faults.add(step) };
            // SAFETY: as above.
            let Slot { index, bound } = unsafe { slot.read_volatile() };
            if bound > 0 {
                found = found.or(Some(Fault { step, index, bound }));
                // SAFETY: as above.
                unsafe { slot.write_volatile(Slot::default()) };
            }
        }
        found
    }

    /// Records what `give` gives the device, and does none of it.
    pub fn capture(
        &self,
        give: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<CUgraphExec, DeviceError> {
        self.driver.begin_capture(self.stream)?;
        let given = give();
        let recorded = self.driver.end_capture(self.stream);
        match given {
            Ok(()) => recorded,
            Err(error) => {
                if let Ok(graph) = recorded {
                    self.driver.free_graph(graph)?;
                }
                Err(error)
            }
        }
    }

    /// Runs a recording.
    pub fn replay(&self, graph: CUgraphExec) -> Result<(), DeviceError> {
        self.driver.launch_graph(graph, self.stream)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // Who is asked to stop using memory must be done with it.
        let mut freed = self.synchronize();
        for half in &self.halves {
            freed = freed.and(self.driver.free_pinned(half.start));
        }
        if let Err(error) = freed.and(self.driver.free_pinned(self.faults.cast())) {
            tracing::warn!(%error, "a device was not closed");
        }
    }
}

/// In how many parts a kernel runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grid {
    pub blocks: [u32; 3],
    pub threads: [u32; 3],
    /// Bytes of shared memory besides what the kernel declares.
    pub shared: u32,
}

/// A kernel's arguments in its order.
#[derive(Default)]
pub(super) struct Arguments {
    words: Vec<u64>,
    starts: Vec<usize>,
}

impl Arguments {
    /// An address, or a number of 64 bits.
    pub fn word(self, word: u64) -> Self {
        self.block(&[word])
    }

    /// A number of 32 bits.
    pub fn int(self, number: u32) -> Self {
        self.block(&[number.into()])
    }

    /// A structure of 64-bit numbers, by value.
    pub fn block(mut self, words: &[u64]) -> Self {
        self.starts.push(self.words.len());
        self.words.extend_from_slice(words);
        self
    }
}

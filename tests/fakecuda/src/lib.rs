//! A CUDA driver without a device.
//!
//! Device memory is the host's, behind addresses that fault when the processor follows them; streams do their work when it
//! is given; kernels are those of `kernels.so` beside this library, if it is there: the sources that a device runs, made by
//! the host's compiler. `fakecuda.conf` beside it says what devices there are, and what goes wrong when:
//!
//! ```text
//! devices = 1
//! memory = 1073741824
//! version = 13000
//! clock = 0
//! fail = cuLaunchKernel:3=700
//! ```
//!
//! `clock`: milliseconds that each kernel takes by the device's clock, which events tell; 0: as long as it takes.
//!
//! A `fail` names a function or a kernel, which of its calls or runs fails, and how: a result of `cuda.h`, `abort` for a SIGSEGV in the
//! driver, `hang` for a call that does not return. Results after which a device is lost stay the answer of all calls; of
//! a kernel's launch they come with the next one, as from a device.

#![allow(non_snake_case)] // the names of cuda.h

#[macro_use]
mod entries;

mod config;
mod nvml;
mod pieces;
mod state;

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    fs, ptr,
    sync::mpsc,
    thread,
    time::Duration,
};

use config::{Failure, config};
use state::{Event, Node, State, state};

const SUCCESS: c_int = 0;
const INVALID_VALUE: c_int = 1;
const OUT_OF_MEMORY: c_int = 2;
const NO_DEVICE: c_int = 100;
const INVALID_DEVICE: c_int = 101;
const OPERATING_SYSTEM: c_int = 304;
const INVALID_HANDLE: c_int = 400;
const NOT_FOUND: c_int = 500;
const ILLEGAL_ADDRESS: c_int = 700;

/// Results that stay.
const LOST: &[c_int] = &[214, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719];

/// What every call does first: counts, and fails where it is told to.
fn gate(name: &str) -> c_int {
    let (nth, lost) = {
        let mut state = state();
        let count = state.calls.entry(name.to_owned()).or_insert(0);
        *count += 1;
        (*count, state.lost)
    };
    for failure in &config().failures {
        if failure.function != name || failure.nth != nth {
            continue;
        }
        match failure.how {
            Failure::Abort => {
                // What a fault in a driver's own code does.
                // SAFETY: none; that is what it is for.
                unsafe { ptr::write_volatile(ptr::without_provenance_mut::<u8>(8), 1) }
            }
            Failure::Hang => loop {
                thread::sleep(Duration::from_secs(3600));
            },
            Failure::Result(result) if LOST.contains(&result) => {
                state().lost = result;
                // A launch does not know yet.
                return if name == "cuLaunchKernel" {
                    lost
                } else {
                    result
                };
            }
            Failure::Result(result) => return result,
        }
    }
    lost
}

/// Writes a string of at most `len` bytes, its zero included.
unsafe fn put(text: &str, to: *mut c_char, len: c_int) -> c_int {
    let most = usize::try_from(len).unwrap_or(0);
    if most <= text.len() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller has room for `len` bytes.
    unsafe {
        ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len());
        *to.add(text.len()) = 0;
    }
    SUCCESS
}

fn known(device: c_int) -> c_int {
    match (0..config().devices).contains(&device) {
        true => SUCCESS,
        false => INVALID_DEVICE,
    }
}

/// Has a thread and gives it a name, as NVIDIA's driver does when it begins; whether it could.
fn name_a_thread() -> bool {
    let (tell, told) = mpsc::channel();
    thread::spawn(move || {
        let _ = tell.send(unsafe { libc::gettid() });
        loop {
            thread::park();
        }
    });
    told.recv().is_ok_and(|thread| {
        let place = format!("/proc/self/task/{thread}/comm");
        fs::write(place, "fakecuda").is_ok()
    })
}

entries! {
    fn cuInit(_flags: c_uint) {
        match (name_a_thread(), config().devices) { (false, _) => OPERATING_SYSTEM, (true, 0) => NO_DEVICE, _ => SUCCESS }
    }
    fn cuDriverGetVersion(version: *mut c_int) { *version = config().version; SUCCESS }
    fn cuDeviceGetCount(count: *mut c_int) { *count = config().devices; SUCCESS }
    fn cuDeviceGet(device: *mut c_int, number: c_int) { *device = number; known(number) }
    fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) {
        match known(device) { SUCCESS => put("Fake H100", name, len), unknown => unknown }
    }
    fn cuDeviceGetPCIBusId(name: *mut c_char, len: c_int, device: c_int) {
        match known(device) { SUCCESS => put(&format!("0000:{:02x}:00.0", device + 1), name, len), unknown => unknown }
    }
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) { *bytes = config().memory; known(device) }
    fn cuDeviceGetAttribute(value: *mut c_int, what: c_int, device: c_int) {
        // Compute capability, multiprocessors, whether it is integrated, threads of a block, shared memory of one.
        *value = match what { 75 => 9, 76 => 0, 16 => 132, 18 => 0, 1 => 1024, 97 => 232_448, _ => 1 };
        known(device)
    }
    fn cuDeviceCanAccessPeer(does: *mut c_int, device: c_int, other: c_int) {
        *does = c_int::from(device != other);
        if known(device) == SUCCESS { known(other) } else { INVALID_DEVICE }
    }
    fn cuDevicePrimaryCtxRetain(context: *mut u64, device: c_int) {
        *context = 0xC0 + device as u64;
        known(device)
    }
    fn cuMemGetAllocationGranularity(unit: *mut usize, _properties: *const Properties, _option: c_uint) {
        *unit = pieces::UNIT;
        SUCCESS
    }
    fn cuMemCreate(handle: *mut u64, bytes: usize, properties: *const Properties, _flags: u64) {
        let mut state = state();
        // Pinned memory of a device, as a descriptor.
        let Properties { kind: 1, handles: 1, place: Place { kind: 1, id }, .. } = *properties else { return INVALID_VALUE };
        if known(id) != SUCCESS { return INVALID_VALUE; }
        if state.used + bytes > config().memory { return OUT_OF_MEMORY; }
        *handle = state.name();
        let handle = *handle;
        if !state.pieces.create(handle, bytes) { return INVALID_VALUE; }
        state.used += bytes;
        SUCCESS
    }
    fn cuMemRelease(handle: u64) {
        let mut state = state();
        let Some(bytes) = state.pieces.release(handle) else { return INVALID_VALUE };
        state.used -= bytes;
        SUCCESS
    }
    fn cuMemAddressReserve(address: *mut u64, bytes: usize, _alignment: usize, _at: u64, _flags: u64) {
        match state().pieces.reserve(bytes, state::TAG) {
            Some(reserved) => { *address = reserved; SUCCESS }
            None => INVALID_VALUE,
        }
    }
    fn cuMemAddressFree(address: u64, bytes: usize) { valid(state().pieces.unreserve(address, bytes)) }
    fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, _flags: u64) {
        valid(offset == 0 && state().pieces.map(address, bytes, handle))
    }
    fn cuMemUnmap(address: u64, bytes: usize) { valid(state().pieces.unmap(address, bytes)) }
    fn cuMemSetAccess(address: u64, bytes: usize, access: *const Access, count: usize) {
        let Access { place: Place { kind: 1, id }, flags } = *access else { return INVALID_VALUE };
        valid(count == 1 && known(id) == SUCCESS && state().pieces.allow(address, bytes, flags))
    }
    fn cuMemExportToShareableHandle(descriptor: *mut c_int, handle: u64, kind: c_uint, _flags: u64) {
        match state().pieces.export(handle) {
            Some(exported) if kind == 1 => { *descriptor = exported; SUCCESS }
            _ => INVALID_VALUE,
        }
    }
    fn cuMemImportFromShareableHandle(handle: *mut u64, descriptor: *mut c_void, kind: c_uint) {
        if kind != 1 { return INVALID_VALUE; }
        let mut state = state();
        *handle = state.name();
        let handle = *handle;
        let Some(bytes) = state.pieces.import(handle, descriptor.addr() as c_int) else { return INVALID_VALUE };
        state.used += bytes;
        SUCCESS
    }
    fn cuCtxSetCurrent(_context: u64) { SUCCESS }
    fn cuMemGetInfo_v2(free: *mut usize, all: *mut usize) {
        *all = config().memory;
        *free = config().memory - state().used;
        SUCCESS
    }
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) {
        let mut state = state();
        if bytes == 0 { return INVALID_VALUE; }
        if state.used + bytes > config().memory { return OUT_OF_MEMORY; }
        *address = state.allocate(bytes);
        SUCCESS
    }
    fn cuMemFree_v2(address: u64) { if state().free(address) { SUCCESS } else { INVALID_VALUE } }
    fn cuMemHostAlloc(address: *mut u64, bytes: usize, _flags: c_uint) { *address = state().pin(bytes); SUCCESS }
    fn cuMemFreeHost(address: u64) { if state().unpin(address) { SUCCESS } else { INVALID_VALUE } }
    fn cuMemHostRegister_v2(_address: u64, bytes: usize, _flags: c_uint) { if bytes > 0 { SUCCESS } else { INVALID_VALUE } }
    fn cuMemHostGetDevicePointer_v2(address: *mut u64, host: u64, _flags: c_uint) { *address = host; SUCCESS }
    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const u8, bytes: usize, _stream: u64) {
        match state().host(to, bytes, true) {
            Some(to) => { ptr::copy(from, to, bytes); SUCCESS }
            None => INVALID_VALUE,
        }
    }
    fn cuMemcpyDtoHAsync_v2(to: *mut u8, from: u64, bytes: usize, _stream: u64) {
        match state().host(from, bytes, false) {
            Some(from) => { ptr::copy(from, to, bytes); SUCCESS }
            None => INVALID_VALUE,
        }
    }
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) {
        submit(stream, Node::Copy { to, from, bytes })
    }
    fn cuMemsetD8Async(at: u64, value: u8, bytes: usize, stream: u64) { submit(stream, Node::Set { at, value, bytes }) }
    fn cuStreamCreate(stream: *mut u64, _flags: c_uint) { *stream = state().name(); SUCCESS }
    fn cuStreamSynchronize(stream: u64) {
        // Nothing may be waited for while it is recorded.
        if state().recorded.contains_key(&stream) { 900 } else { SUCCESS }
    }
    fn cuStreamBeginCapture_v2(stream: u64, _mode: c_uint) { state().recorded.insert(stream, Vec::new()); SUCCESS }
    fn cuStreamEndCapture(stream: u64, graph: *mut u64) {
        let mut state = state();
        let Some(nodes) = state.recorded.remove(&stream) else { return INVALID_HANDLE };
        *graph = state.name();
        state.graphs.insert(*graph, nodes);
        SUCCESS
    }
    fn cuGraphInstantiateWithFlags(ready: *mut u64, graph: u64, _flags: u64) {
        let mut state = state();
        let Some(nodes) = state.graphs.get(&graph).cloned() else { return INVALID_HANDLE };
        *ready = state.name();
        state.graphs.insert(*ready, nodes);
        SUCCESS
    }
    fn cuGraphLaunch(graph: u64, _stream: u64) {
        let Some(nodes) = state().graphs.get(&graph).cloned() else { return INVALID_HANDLE };
        nodes.iter().map(run).find(|result| *result != SUCCESS).unwrap_or(SUCCESS)
    }
    fn cuGraphExecDestroy(graph: u64) { if state().graphs.remove(&graph).is_some() { SUCCESS } else { INVALID_HANDLE } }
    fn cuGraphDestroy(graph: u64) { if state().graphs.remove(&graph).is_some() { SUCCESS } else { INVALID_HANDLE } }
    fn cuEventCreate(event: *mut u64, flags: c_uint) {
        const DISABLE_TIMING: c_uint = 2;
        let mut state = state();
        *event = state.name();
        state.events.insert(*event, Event { is_timed: flags & DISABLE_TIMING == 0, happened: None });
        SUCCESS
    }
    fn cuEventRecord(event: u64, _stream: u64) {
        let mut state = state();
        let now = state.clock();
        let Some(event) = state.events.get_mut(&event) else { return INVALID_HANDLE };
        event.happened = Some(now);
        SUCCESS
    }
    fn cuEventSynchronize(event: u64) { if state().events.contains_key(&event) { SUCCESS } else { INVALID_HANDLE } }
    fn cuEventElapsedTime(ms: *mut f32, from: u64, to: u64) {
        let state = state();
        let at = |event| state.events.get(&event).filter(|event| event.is_timed)?.happened;
        let (Some(from), Some(to)) = (at(from), at(to)) else { return INVALID_HANDLE };
        *ms = to.saturating_sub(from).as_secs_f32() * 1e3;
        SUCCESS
    }
    fn cuEventDestroy_v2(event: u64) {
        if state().events.remove(&event).is_some() { SUCCESS } else { INVALID_HANDLE }
    }
    fn cuModuleLoadData(module: *mut u64, _image: *const c_void) {
        // Whatever the image is, these are its kernels; later the process may be forbidden to open files.
        state::library();
        *module = state().name();
        SUCCESS
    }
    fn cuModuleGetFunction(function: *mut u64, _module: u64, name: *const c_char) {
        let name = CStr::from_ptr(name).to_string_lossy().into_owned();
        match state().function(&name) {
            Some(found) => { *function = found; SUCCESS }
            None => NOT_FOUND,
        }
    }
    fn cuLaunchKernel(function: u64, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared: c_uint,
        stream: u64, arguments: *mut *mut c_void, _extra: *mut *mut c_void) {
        let Some(kernel) = state().kernel(function) else { return INVALID_HANDLE };
        if bx * by * bz == 0 || bx * by * bz > 1024 || gx == 0 || gy == 0 || gz == 0 { return INVALID_VALUE; }
        let copied = kernel.sizes.iter().enumerate().map(|(i, size)| {
            let mut words = vec![0u64; size.div_ceil(8)];
            ptr::copy_nonoverlapping((*arguments.add(i)).cast::<u8>(), words.as_mut_ptr().cast(), *size);
            words
        });
        let arguments = copied.collect();
        submit(stream, Node::Kernel { kernel, blocks: [gx, gy, gz], threads: [bx, by, bz], shared, arguments })
    }
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Place {
    kind: c_int,
    id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Properties {
    kind: c_int,
    handles: c_int,
    place: Place,
    metadata: u64,
    flags: u64,
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Access {
    place: Place,
    flags: c_int,
}

fn valid(is: bool) -> c_int {
    if is { SUCCESS } else { INVALID_VALUE }
}

/// As in `cuda.h`. It tells also when the device is lost.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(result: c_int, name: *mut *const c_char) -> c_int {
    let text = match result {
        0 => c"CUDA_SUCCESS",
        1 => c"CUDA_ERROR_INVALID_VALUE",
        2 => c"CUDA_ERROR_OUT_OF_MEMORY",
        100 => c"CUDA_ERROR_NO_DEVICE",
        500 => c"CUDA_ERROR_NOT_FOUND",
        700 => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        719 => c"CUDA_ERROR_LAUNCH_FAILED",
        _ => return INVALID_VALUE,
    };
    // SAFETY: the caller's pointer is to a pointer.
    unsafe { *name = text.as_ptr() };
    SUCCESS
}

/// Does it, or records it.
fn submit(stream: u64, node: Node) -> c_int {
    if let Some(recorded) = state().recorded.get_mut(&stream) {
        recorded.push(node);
        return SUCCESS;
    }
    run(&node)
}

fn run(node: &Node) -> c_int {
    let lost = |state: &mut State, result| {
        state.lost = result;
        SUCCESS
    };
    let mut there = state();
    match node {
        Node::Set { at, value, bytes } => match there.host(*at, *bytes, true) {
            // SAFETY: that many bytes of an allocation.
            Some(at) => unsafe {
                ptr::write_bytes(at, *value, *bytes);
                SUCCESS
            },
            None => lost(&mut there, ILLEGAL_ADDRESS),
        },
        Node::Copy { to, from, bytes } => {
            match (
                there.host(*to, *bytes, true),
                there.host(*from, *bytes, false),
            ) {
                // SAFETY: as above.
                (Some(to), Some(from)) => unsafe {
                    ptr::copy(from, to, *bytes);
                    SUCCESS
                },
                _ => lost(&mut there, ILLEGAL_ADDRESS),
            }
        }
        Node::Kernel {
            kernel,
            blocks,
            threads,
            shared,
            arguments,
        } => {
            drop(there);
            // A device that does not come to an end, or faults: where it is, and not where it was told to.
            match gate(&kernel.name) {
                SUCCESS => {}
                result => return lost(&mut state(), result),
            }
            let pointer = |words: &Vec<u64>| words.as_ptr().cast_mut().cast::<c_void>();
            let mut pointers: Vec<*mut c_void> = arguments.iter().map(pointer).collect();
            // SAFETY: the arguments are of the sizes that the kernel has; what they say is the caller's.
            let result = unsafe {
                (kernel.run)(
                    pointers.as_mut_ptr(),
                    blocks.as_ptr(),
                    threads.as_ptr(),
                    *shared,
                )
            };
            match result {
                SUCCESS => {
                    state().ran += 1;
                    SUCCESS
                }
                result => lost(&mut state(), result),
            }
        }
    }
}

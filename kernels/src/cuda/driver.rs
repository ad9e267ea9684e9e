//! The driver's functions. `cudarc` finds and opens the library; each function is looked up by its name here, so that one
//! that an old driver lacks is a reason and no panic, and so that a result that nobody knows yet is a number.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    ptr,
    sync::OnceLock,
    time::Duration,
};

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec,
    CUmemAccessDesc, CUmemAllocationProp, CUmemGenericAllocationHandle, CUmodule, CUstream,
};

use super::NAME;
use crate::backend::{DeviceError, lose};

/// The oldest driver that runs what the kernels' compiler makes, as `cuDriverGetVersion` says it.
const OLDEST: c_int = 13_000;

/// The answer where no device is installed.
const NO_DEVICE: c_int = 100;

/// The answer when memory is short.
const OUT_OF_MEMORY: c_int = 2;

/// Answers after which the process computes nothing any more: `cuda.h` says of them that it "must be terminated and
/// relaunched"; and those of a device that is broken or gone.
const LOST: &[c_int] = &[
    4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 999,
];

macro_rules! functions {
    ($($name:ident($($argument:ty),*);)*) => {
        /// The functions that are used, by their names in `cuda.h`.
        #[allow(non_snake_case)]
        pub(super) struct Functions { $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> c_int,)* }

        impl Functions {
            /// Looks all of them up.
            ///
            /// # Errors
            /// Which one there is not.
            fn find() -> Result<Self, String> {
                // SAFETY: opening a library runs its initialisers, which is what is asked for.
                if !unsafe { sys::is_culib_present() } {
                    return Err("there is no libcuda here; it comes with NVIDIA's driver".to_owned());
                }
                // SAFETY: as above; it is there, so that nothing panics.
                let library = unsafe { sys::culib() };
                Ok(Self { $($name: {
                    // SAFETY: the type is the function's in `cuda.h`.
                    let found = unsafe {
                        library.get::<unsafe extern "C" fn($($argument),*) -> c_int>(stringify!($name).as_bytes())
                    };
                    *found.map_err(|_| format!("the driver lacks {}; install a newer one", stringify!($name)))?
                },)* })
            }
        }
    };
}

functions! {
    cuInit(c_uint);
    cuDriverGetVersion(*mut c_int);
    cuGetErrorName(c_int, *mut *const c_char);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut CUdevice, c_int);
    cuDeviceGetName(*mut c_char, c_int, CUdevice);
    cuDeviceTotalMem_v2(*mut usize, CUdevice);
    cuDeviceGetAttribute(*mut c_int, c_int, CUdevice);
    cuDeviceGetPCIBusId(*mut c_char, c_int, CUdevice);
    cuDeviceCanAccessPeer(*mut c_int, CUdevice, CUdevice);
    cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
    cuCtxSetCurrent(CUcontext);
    cuMemAlloc_v2(*mut CUdeviceptr, usize);
    cuMemFree_v2(CUdeviceptr);
    cuMemGetAllocationGranularity(*mut usize, *const CUmemAllocationProp, c_uint);
    cuMemCreate(*mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, u64);
    cuMemRelease(CUmemGenericAllocationHandle);
    cuMemAddressReserve(*mut CUdeviceptr, usize, usize, CUdeviceptr, u64);
    cuMemAddressFree(CUdeviceptr, usize);
    cuMemMap(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, u64);
    cuMemUnmap(CUdeviceptr, usize);
    cuMemSetAccess(CUdeviceptr, usize, *const CUmemAccessDesc, usize);
    cuMemExportToShareableHandle(*mut c_void, CUmemGenericAllocationHandle, c_uint, u64);
    cuMemImportFromShareableHandle(*mut CUmemGenericAllocationHandle, *mut c_void, c_uint);
    cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
    cuMemFreeHost(*mut c_void);
    cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    cuMemHostGetDevicePointer_v2(*mut CUdeviceptr, *mut c_void, c_uint);
    cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
    cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
    cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream);
    cuMemsetD8Async(CUdeviceptr, u8, usize, CUstream);
    cuStreamCreate(*mut CUstream, c_uint);
    cuStreamSynchronize(CUstream);
    cuStreamBeginCapture_v2(CUstream, c_uint);
    cuStreamEndCapture(CUstream, *mut CUgraph);
    cuGraphInstantiateWithFlags(*mut CUgraphExec, CUgraph, u64);
    cuGraphLaunch(CUgraphExec, CUstream);
    cuGraphExecDestroy(CUgraphExec);
    cuGraphDestroy(CUgraph);
    cuEventCreate(*mut CUevent, c_uint);
    cuEventRecord(CUevent, CUstream);
    cuEventSynchronize(CUevent);
    cuEventElapsedTime(*mut f32, CUevent, CUevent);
    cuEventDestroy_v2(CUevent);
    cuModuleLoadData(*mut CUmodule, *const c_void);
    cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
    cuLaunchKernel(CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void,
        *mut *mut c_void);
}

/// The driver, initialised.
pub(super) struct Driver {
    pub(super) functions: Functions,
    /// As `cuDriverGetVersion` says it: 13000 is 13.0.
    pub version: c_int,
}

/// Calls a function and makes an error of its answer.
macro_rules! call {
    ($driver:expr, $name:ident($($argument:expr),*)) => {
        // SAFETY: each use says why its arguments are what `cuda.h` asks for.
        $driver.check(stringify!($name), unsafe { ($driver.functions.$name)($($argument),*) })
    };
}
pub(super) use call;

/// The driver; initialised at the first call, of which the answer stays: it cannot be installed under a running process.
///
/// # Errors
/// Why it cannot be used.
pub(super) fn driver() -> Result<&'static Driver, String> {
    static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
    DRIVER.get_or_init(start).as_ref().map_err(Clone::clone)
}

fn start() -> Result<Driver, String> {
    let functions = Functions::find()?;
    let mut driver = Driver {
        functions,
        version: 0,
    };
    // SAFETY: the pointer is to a number of the right type. Asked before anything else, since an old driver may
    // refuse the rest for reasons that say less.
    let version = unsafe { (driver.functions.cuDriverGetVersion)(&mut driver.version) };
    let said = |driver: &Driver, result| format!("the driver refuses with {}", driver.name(result));
    if version != 0 {
        return Err(said(&driver, version));
    }
    let dotted = |v: c_int| format!("{}.{}", v / 1000, v % 1000 / 10);
    if driver.version < OLDEST {
        return Err(format!(
            "the driver is for CUDA {} and {} is needed; install version 580 or a newer one",
            dotted(driver.version),
            dotted(OLDEST),
        ));
    }
    // SAFETY: takes a number only.
    match unsafe { (driver.functions.cuInit)(0) } {
        0 => Ok(driver),
        NO_DEVICE => Err("the driver finds no device".to_owned()),
        result => Err(said(&driver, result)),
    }
}

fn failed(op: &'static str, why: String) -> DeviceError {
    DeviceError::Failed {
        backend: NAME,
        op,
        why,
    }
}

impl Driver {
    /// A result by its name in `cuda.h`.
    fn name(&self, result: c_int) -> String {
        let mut text: *const c_char = ptr::null();
        // SAFETY: the pointer is to a pointer; what it is set to is a string of the driver's, which stays.
        let known = unsafe { (self.functions.cuGetErrorName)(result, &mut text) } == 0;
        match known && !text.is_null() {
            true => {
                // SAFETY: as above; it ends with a zero byte.
                let name = unsafe { CStr::from_ptr(text) }.to_string_lossy();
                format!("{name} ({result})")
            }
            false => format!("error {result}"),
        }
    }

    /// An error, if the answer is one. One after which the device is lost ends the process, where someone said how
    /// ([`on_loss`](crate::backend::on_loss)).
    pub(super) fn check(&self, function: &'static str, result: c_int) -> Result<(), DeviceError> {
        match result {
            0 => Ok(()),
            OUT_OF_MEMORY => Err(DeviceError::OutOfMemory {
                what: function.to_owned(),
                bytes: 0,
            }),
            result if LOST.contains(&result) => {
                let name = self.name(result);
                lose(&format!("{NAME}: {function} says {name}"));
                Err(failed(
                    function,
                    format!("{name}; the device is lost to this process"),
                ))
            }
            result => Err(failed(function, self.name(result))),
        }
    }

    /// How many devices there are.
    pub fn devices(&self) -> Result<c_int, DeviceError> {
        let mut count = 0;
        // The pointer is to a number of the right type, as below.
        call!(self, cuDeviceGetCount(&mut count)).map(|()| count)
    }

    /// The device of this number.
    pub fn device(&self, number: c_int) -> Result<CUdevice, DeviceError> {
        let mut device = 0;
        call!(self, cuDeviceGet(&mut device, number)).map(|()| device)
    }

    /// A device's name.
    pub fn device_name(&self, device: CUdevice) -> Result<String, DeviceError> {
        let mut name: [c_char; 128] = [0; 128];
        // One byte less than there is room: the last stays zero whatever is written.
        call!(self, cuDeviceGetName(name.as_mut_ptr(), 127, device))?;
        Ok(text(&name))
    }

    /// Where a device is, for example `0000:01:00.0`.
    pub fn device_place(&self, device: CUdevice) -> Result<String, DeviceError> {
        let mut name: [c_char; 32] = [0; 32];
        // As above.
        call!(self, cuDeviceGetPCIBusId(name.as_mut_ptr(), 31, device))?;
        Ok(text(&name))
    }

    /// A device's memory, bytes.
    pub fn device_memory(&self, device: CUdevice) -> Result<usize, DeviceError> {
        let mut bytes = 0;
        call!(self, cuDeviceTotalMem_v2(&mut bytes, device)).map(|()| bytes)
    }

    /// A number about a device.
    pub fn attribute(
        &self,
        what: sys::CUdevice_attribute,
        device: CUdevice,
    ) -> Result<c_int, DeviceError> {
        let mut value = 0;
        call!(
            self,
            cuDeviceGetAttribute(&mut value, what as c_int, device)
        )
        .map(|()| value)
    }

    /// Whether a device reaches the memory of another one.
    pub fn reaches(&self, device: CUdevice, other: CUdevice) -> Result<bool, DeviceError> {
        let mut does = 0;
        call!(self, cuDeviceCanAccessPeer(&mut does, device, other)).map(|()| does != 0)
    }

    /// The device's context of this process, made at the first call. Never released: it ends with the process.
    pub fn context(&self, device: CUdevice) -> Result<CUcontext, DeviceError> {
        let mut context = ptr::null_mut();
        call!(self, cuDevicePrimaryCtxRetain(&mut context, device)).map(|()| context)
    }

    /// Has this thread's calls mean a context.
    pub fn enter(&self, context: CUcontext) -> Result<(), DeviceError> {
        call!(self, cuCtxSetCurrent(context))
    }

    /// Device memory, with whatever was in it.
    pub fn allocate(&self, bytes: usize) -> Result<CUdeviceptr, DeviceError> {
        let mut address = 0;
        call!(self, cuMemAlloc_v2(&mut address, bytes)).map(|()| address)
    }

    /// Gives device memory back, once.
    pub fn free(&self, address: CUdeviceptr) -> Result<(), DeviceError> {
        call!(self, cuMemFree_v2(address))
    }

    /// Memory of the host that the device reads and writes without a copy of the driver's, at the same address.
    pub fn allocate_pinned(&self, bytes: usize) -> Result<*mut u8, DeviceError> {
        let mut address = ptr::null_mut();
        // CU_MEMHOSTALLOC_DEVICEMAP
        call!(self, cuMemHostAlloc(&mut address, bytes, 2)).map(|()| address.cast())
    }

    /// Gives pinned memory back, once.
    pub fn free_pinned(&self, address: *mut u8) -> Result<(), DeviceError> {
        call!(self, cuMemFreeHost(address.cast()))
    }

    /// Has the device write to a page of the host's, which is mapped for as long as the process lives: its address there.
    pub fn map_page(&self, page: *mut u8, bytes: usize) -> Result<CUdeviceptr, DeviceError> {
        // CU_MEMHOSTREGISTER_DEVICEMAP
        call!(self, cuMemHostRegister_v2(page.cast(), bytes, 2))?;
        let mut address = 0;
        call!(
            self,
            cuMemHostGetDevicePointer_v2(&mut address, page.cast(), 0)
        )
        .map(|()| address)
    }

    /// A new stream that does not wait for the default one.
    pub fn stream(&self) -> Result<CUstream, DeviceError> {
        let mut stream = ptr::null_mut();
        // CU_STREAM_NON_BLOCKING
        call!(self, cuStreamCreate(&mut stream, 1)).map(|()| stream)
    }

    /// Waits for all of a stream's work.
    pub fn synchronize(&self, stream: CUstream) -> Result<(), DeviceError> {
        call!(self, cuStreamSynchronize(stream))
    }

    /// A new event, without a time.
    pub fn event(&self) -> Result<CUevent, DeviceError> {
        let mut event = ptr::null_mut();
        // CU_EVENT_DISABLE_TIMING
        call!(self, cuEventCreate(&mut event, 2)).map(|()| event)
    }

    /// A new event that says when it happened.
    pub fn timed_event(&self) -> Result<CUevent, DeviceError> {
        let mut event = ptr::null_mut();
        // CU_EVENT_DEFAULT
        call!(self, cuEventCreate(&mut event, 0)).map(|()| event)
    }

    /// How long after `from` another event happened, both of them timed, and done.
    pub fn elapsed(&self, from: CUevent, to: CUevent) -> Result<Duration, DeviceError> {
        let mut ms = 0.0f32;
        call!(self, cuEventElapsedTime(&mut ms, from, to))?;
        // Events of one stream are in order; what is no time is none.
        Ok(Duration::try_from_secs_f64(f64::from(ms) / 1e3).unwrap_or_default())
    }

    /// Forgets an event, once.
    pub fn free_event(&self, event: CUevent) -> Result<(), DeviceError> {
        call!(self, cuEventDestroy_v2(event))
    }

    /// The event happens after what the stream has now.
    pub fn record(&self, event: CUevent, stream: CUstream) -> Result<(), DeviceError> {
        call!(self, cuEventRecord(event, stream))
    }

    /// Waits for an event.
    pub fn wait(&self, event: CUevent) -> Result<(), DeviceError> {
        call!(self, cuEventSynchronize(event))
    }

    /// Copies to the device.
    ///
    /// # Safety
    /// `bytes` bytes must be readable at `from` until the stream has done it, and be the device's at `to`.
    pub unsafe fn upload(
        &self,
        to: CUdeviceptr,
        from: *const u8,
        bytes: usize,
        stream: CUstream,
    ) -> Result<(), DeviceError> {
        call!(self, cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, stream))
    }

    /// Copies from the device.
    ///
    /// # Safety
    /// `bytes` bytes must be writable at `to` until the stream has done it, and be the device's at `from`.
    pub unsafe fn download(
        &self,
        to: *mut u8,
        from: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) -> Result<(), DeviceError> {
        call!(self, cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, stream))
    }

    /// Copies within the device, whose addresses it checks.
    pub fn copy(
        &self,
        to: CUdeviceptr,
        from: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) -> Result<(), DeviceError> {
        call!(self, cuMemcpyDtoDAsync_v2(to, from, bytes, stream))
    }

    /// Zeroes memory of the device, whose addresses it checks.
    pub fn zero(&self, at: CUdeviceptr, bytes: usize, stream: CUstream) -> Result<(), DeviceError> {
        call!(self, cuMemsetD8Async(at, 0, bytes, stream))
    }

    /// Loads kernels into the thread's device.
    ///
    /// # Safety
    /// The image must be what the compiler made, whole.
    pub unsafe fn module(&self, image: &[u8]) -> Result<CUmodule, DeviceError> {
        let mut module = ptr::null_mut();
        call!(self, cuModuleLoadData(&mut module, image.as_ptr().cast())).map(|()| module)
    }

    /// A kernel of a module.
    pub fn function(&self, module: CUmodule, name: &CStr) -> Result<CUfunction, DeviceError> {
        let mut function = ptr::null_mut();
        call!(
            self,
            cuModuleGetFunction(&mut function, module, name.as_ptr())
        )
        .map(|()| function)
    }

    /// Starts a kernel.
    ///
    /// # Safety
    /// `arguments` must point to the kernel's parameters, of their types and in their order, and what these say must
    /// be so when the stream comes to it.
    pub unsafe fn launch(
        &self,
        function: CUfunction,
        blocks: [u32; 3],
        threads: [u32; 3],
        shared: u32,
        stream: CUstream,
        arguments: &mut [*mut c_void],
    ) -> Result<(), DeviceError> {
        let ([gx, gy, gz], [bx, by, bz]) = (blocks, threads);
        call!(
            self,
            cuLaunchKernel(
                function,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                shared,
                stream,
                arguments.as_mut_ptr(),
                ptr::null_mut()
            )
        )
    }

    /// From now on what this stream is given is recorded instead of done.
    pub fn begin_capture(&self, stream: CUstream) -> Result<(), DeviceError> {
        // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        call!(self, cuStreamBeginCapture_v2(stream, 1))
    }

    /// What was recorded, made ready to run.
    pub fn end_capture(&self, stream: CUstream) -> Result<CUgraphExec, DeviceError> {
        let mut graph = ptr::null_mut();
        call!(self, cuStreamEndCapture(stream, &mut graph))?;
        let mut ready = ptr::null_mut();
        let made = call!(self, cuGraphInstantiateWithFlags(&mut ready, graph, 0));
        // The ready one does not need it.
        call!(self, cuGraphDestroy(graph))?;
        made.map(|()| ready)
    }

    /// Runs a recording.
    pub fn launch_graph(&self, graph: CUgraphExec, stream: CUstream) -> Result<(), DeviceError> {
        call!(self, cuGraphLaunch(graph, stream))
    }

    /// Forgets a recording, once.
    pub fn free_graph(&self, graph: CUgraphExec) -> Result<(), DeviceError> {
        call!(self, cuGraphExecDestroy(graph))
    }
}

/// What a driver wrote into an array that began as zeros, of which it did not get the last.
fn text(written: &[c_char]) -> String {
    let bytes = written.iter().take_while(|c| **c != 0);
    let bytes: Vec<u8> = bytes.map(|c| *c as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

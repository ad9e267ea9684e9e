//! The management library of the same devices, for who opens this file as `libnvidia-ml.so.1`.
//!
//! A device's numbers go by its own: device 1 is a degree warmer than device 0. A file `fakecuda.fault` beside this
//! library, of a device's number and a code, is a fault of it, which is told once; the file is gone then. Device 0 tells
//! nothing of its power. One that fell off the bus
//! tells nothing any more, not even where it is.

use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    fs,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use super::{
    SUCCESS,
    config::{config, folder},
    put,
};

const INVALID_ARGUMENT: c_int = 2;
const NOT_SUPPORTED: c_int = 3;
const TIMEOUT: c_int = 10;
const LOST: c_int = 15;
/// The fault after which a device answers nothing any more.
const OFF_THE_BUS: u64 = 79;
const XID: u64 = 8;

/// `nvmlPciInfo_t`.
#[repr(C)]
pub struct Place {
    legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    id: c_uint,
    subsystem: c_uint,
    name: [c_char; 32],
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
pub struct Memory {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// `nvmlUtilization_t`.
#[repr(C)]
pub struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

/// `nvmlEventData_t`.
#[repr(C)]
pub struct Event {
    device: *mut c_void,
    kind: u64,
    data: u64,
    instance: c_uint,
    compute: c_uint,
}

/// A device's handle is its number and one more.
fn handle(number: u32) -> *mut c_void {
    std::ptr::without_provenance_mut(number as usize + 1)
}

fn number(device: *mut c_void) -> c_uint {
    (device.addr() - 1) as c_uint
}

/// Devices that are lost, as bits.
static GONE: AtomicU64 = AtomicU64::new(0);

/// The answer about a device that there is.
fn here(device: *mut c_void) -> c_int {
    match GONE.load(Relaxed) >> number(device) & 1 {
        0 => SUCCESS,
        _ => LOST,
    }
}

/// What the file says that a device's fault is, once.
fn fault() -> Option<(u32, u64)> {
    let path = folder().join("fakecuda.fault");
    let text = fs::read_to_string(&path).ok()?;
    let (device, code) = text.trim().split_once(' ')?;
    let fault = (device.parse().ok()?, code.parse().ok()?);
    fs::remove_file(path).ok()?;
    Some(fault)
}

entries! {
    fn nvmlInit_v2() { SUCCESS }
    fn nvmlShutdown() { SUCCESS }
    fn nvmlSystemGetDriverVersion(text: *mut c_char, len: c_uint) { put("580.00", text, len as c_int) }
    fn nvmlDeviceGetCount_v2(count: *mut c_uint) { *count = config().devices as c_uint; SUCCESS }
    fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut *mut c_void) {
        *device = handle(index);
        match (index as c_int) < config().devices { true => SUCCESS, false => INVALID_ARGUMENT }
    }
    fn nvmlDeviceGetUUID(device: *mut c_void, text: *mut c_char, len: c_uint) {
        put(&format!("GPU-fake-{}", number(device)), text, len as c_int)
    }
    fn nvmlDeviceGetPciInfo_v3(device: *mut c_void, place: *mut Place) {
        let bus = number(device) + 1;
        let mut name = [0; 32];
        put(&format!("00000000:{bus:02X}:00.0"), name.as_mut_ptr(), 32);
        *place = Place { legacy: [0; 16], domain: 0, bus, device: 0, id: 0, subsystem: 0, name };
        here(device)
    }
    fn nvmlDeviceGetUtilizationRates(device: *mut c_void, rates: *mut Utilization) {
        *rates = Utilization { gpu: 40 + number(device), memory: 0 };
        here(device)
    }
    fn nvmlDeviceGetMemoryInfo_v2(device: *mut c_void, memory: *mut Memory) {
        let total = config().memory as u64;
        let used = (u64::from(number(device)) + 1) << 20;
        *memory = Memory { version: (*memory).version, total, reserved: 0, free: total - used, used };
        here(device)
    }
    fn nvmlDeviceGetPowerUsage(device: *mut c_void, milliwatts: *mut c_uint) {
        *milliwatts = 250_500;
        match number(device) { 0 => NOT_SUPPORTED, _ => SUCCESS }
    }
    fn nvmlDeviceGetEnforcedPowerLimit(device: *mut c_void, milliwatts: *mut c_uint) {
        *milliwatts = 700_000;
        match number(device) { 0 => NOT_SUPPORTED, _ => SUCCESS }
    }
    fn nvmlDeviceGetTotalEnergyConsumption(_device: *mut c_void, millijoules: *mut u64) {
        *millijoules = 1_234_500;
        SUCCESS
    }
    fn nvmlDeviceGetTemperature(device: *mut c_void, _sensor: c_uint, degrees: *mut c_uint) {
        *degrees = 60 + number(device);
        here(device)
    }
    fn nvmlDeviceGetTotalEccErrors(_device: *mut c_void, kind: c_uint, _counter: c_uint, errors: *mut u64) {
        *errors = match kind { 0 => 3, _ => 1 };
        SUCCESS
    }
    fn nvmlDeviceGetSupportedEventTypes(_device: *mut c_void, kinds: *mut u64) { *kinds = XID; SUCCESS }
    fn nvmlEventSetCreate(set: *mut *mut c_void) { *set = handle(0); SUCCESS }
    fn nvmlEventSetFree(_set: *mut c_void) { SUCCESS }
    fn nvmlDeviceRegisterEvents(_device: *mut c_void, _kinds: u64, _set: *mut c_void) { SUCCESS }
    fn nvmlEventSetWait_v2(_set: *mut c_void, event: *mut Event, milliseconds: c_uint) {
        let until = Instant::now() + Duration::from_millis(milliseconds.into());
        loop {
            if let Some((device, code)) = fault() {
                if code == OFF_THE_BUS {
                    GONE.fetch_or(1 << device, Relaxed);
                }
                *event = Event { device: handle(device), kind: XID, data: code, instance: 0, compute: 0 };
                return SUCCESS;
            }
            if Instant::now() >= until {
                return TIMEOUT;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

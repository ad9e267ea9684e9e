//! The backends compiled in, by name.

use std::rc::Rc;

use crate::{
    backend::{Backend, Device, DeviceError, DeviceInfo},
    cpu,
};

/// Every backend of this build.
static BACKENDS: &[&dyn Backend] = &[&cpu::CpuBackend];

/// Every backend of this build.
pub fn backends() -> &'static [&'static dyn Backend] {
    BACKENDS
}

/// Every device of every backend.
pub fn devices() -> Vec<DeviceInfo> {
    BACKENDS.iter().flat_map(|b| b.devices()).collect()
}

/// Opens a device by id (`backend:number`).
///
/// # Errors
/// [`DeviceError::NoDevice`] when no backend has it.
pub fn open(id: &str, cores: &[u32]) -> Result<Rc<dyn Device>, DeviceError> {
    let name = id.split_once(':').map_or(id, |(name, _)| name);
    match BACKENDS.iter().find(|b| b.name() == name) {
        Some(backend) => backend.open(id, cores),
        None => Err(DeviceError::NoDevice(id.to_owned())),
    }
}

//! Backends by name, and the devices they have.

use std::{fmt, rc::Rc};

use crate::{
    backend::{Backend, Device, DeviceError, DeviceInfo},
    cpu,
};

/// Every backend of this build.
static BACKENDS: &[&dyn Backend] = &[&cpu::CpuBackend];

/// Where a program looks for devices; by default in every backend of this build.
#[derive(Clone, Copy)]
pub struct Registry(&'static [&'static dyn Backend]);

impl Registry {
    /// Only these backends. Of two with one name, the first counts.
    pub const fn of(backends: &'static [&'static dyn Backend]) -> Self {
        Self(backends)
    }

    /// Every device of every backend.
    pub fn devices(&self) -> Vec<DeviceInfo> {
        self.0.iter().flat_map(|b| b.devices()).collect()
    }

    /// Opens a device by id (`backend:number`).
    ///
    /// # Errors
    /// [`DeviceError::NoDevice`] when no backend has it.
    pub fn open(&self, id: &str, cores: &[u32]) -> Result<Rc<dyn Device>, DeviceError> {
        let name = id.split_once(':').map_or(id, |(name, _)| name);
        match self.0.iter().find(|b| b.name() == name) {
            Some(backend) => backend.open(id, cores),
            None => Err(DeviceError::NoDevice(id.to_owned())),
        }
    }
}

impl Default for Registry {
    fn default() -> Self {
        Self(BACKENDS)
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.0.iter().map(|b| b.name()))
            .finish()
    }
}

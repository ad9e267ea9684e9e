//! Backends by name, and the devices they have.

use std::{fmt, rc::Rc};

use crate::{
    backend::{Backend, Device, DeviceError, DeviceInfo, Files},
    cpu,
    gauges::Gauges,
};

/// Every backend of this build.
pub static BACKENDS: &[&dyn Backend] = &[&cpu::CpuBackend];

/// Where a program looks for devices; by default in every backend of this build.
#[derive(Clone, Copy)]
pub struct Registry(&'static [&'static dyn Backend]);

/// Two backends of a program have one name, by which a device could be either's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("two backends of this program are named {0:?}; give one of them another name")]
pub struct DuplicateBackend(pub &'static str);

impl Registry {
    /// Only these backends.
    ///
    /// # Errors
    /// [`DuplicateBackend`] when two of them have one name.
    pub fn of(backends: &'static [&'static dyn Backend]) -> Result<Self, DuplicateBackend> {
        for (i, backend) in backends.iter().enumerate() {
            if backends.iter().take(i).any(|b| b.name() == backend.name()) {
                return Err(DuplicateBackend(backend.name()));
            }
        }
        Ok(Self(backends))
    }

    /// Every device of every backend.
    pub fn devices(&self) -> Vec<DeviceInfo> {
        self.0.iter().flat_map(|b| b.devices()).collect()
    }

    /// Why there is no device, as far as a backend has to say something about it.
    pub fn why_none(&self) -> Option<String> {
        let said: Vec<String> = self.0.iter().filter_map(|b| b.why_none()).collect();
        (!said.is_empty()).then(|| said.join("; "))
    }

    /// What the management libraries tell that there are here.
    ///
    /// # Errors
    /// When one of them does not start.
    pub fn gauges(&self) -> Result<Vec<Box<dyn Gauges>>, DeviceError> {
        let all = self.0.iter().filter_map(|b| b.gauges().transpose());
        all.collect()
    }

    fn backend(&self, id: &str) -> Option<&'static dyn Backend> {
        let name = id.split_once(':').map_or(id, |(name, _)| name);
        self.0.iter().find(|b| b.name() == name).copied()
    }

    /// What loading and using a device opens.
    pub fn files(&self, id: &str) -> Files {
        self.backend(id).map(|b| b.files()).unwrap_or_default()
    }

    /// Loads what opening a device needs files for; see [`Backend::load`].
    ///
    /// # Errors
    /// What opening it would say.
    pub fn load(&self, id: &str) -> Result<(), DeviceError> {
        self.backend(id).map_or(Ok(()), |b| b.load(id))
    }

    /// Opens a device by id (`backend:number`).
    ///
    /// # Errors
    /// [`DeviceError::NoDevice`] when no backend has it.
    pub fn open(&self, id: &str, cores: &[u32]) -> Result<Rc<dyn Device>, DeviceError> {
        match self.backend(id) {
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

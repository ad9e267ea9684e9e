//! Backends by name, and the devices they have.

use std::{fmt, rc::Rc};

use crate::{
    backend::{Backend, Device, DeviceError, DeviceInfo},
    cpu,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::CpuBackend;

    /// A backend of another name.
    struct Other;

    impl Backend for Other {
        fn name(&self) -> &'static str {
            "other"
        }

        fn devices(&self) -> Vec<DeviceInfo> {
            vec![]
        }

        fn open(&self, id: &str, _: &[u32]) -> Result<Rc<dyn Device>, DeviceError> {
            Err(DeviceError::NoDevice(id.to_owned()))
        }
    }

    #[test]
    fn a_name_is_one_backend_s() {
        let two = Registry::of(&[&CpuBackend, &Other]).unwrap();
        assert_eq!(format!("{two:?}"), r#"["cpu", "other"]"#);
        let refused = Registry::of(&[&CpuBackend, &Other, &CpuBackend]).unwrap_err();
        assert_eq!(refused, DuplicateBackend("cpu"));
        assert!(refused.to_string().contains("\"cpu\""), "{refused}");
        // What this build has is a registry.
        assert!(Registry::of(BACKENDS).is_ok());
        for (id, known) in [("cpu:0", true), ("other:0", false), ("tpu:0", false)] {
            assert_eq!(two.open(id, &[0]).is_ok(), known, "{id}");
        }
    }
}

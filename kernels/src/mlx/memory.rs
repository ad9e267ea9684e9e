//! MLX's own memory: what it counts, and what bounds it. MLX has one allocator for the process, so a device that is opened
//! twice has one set of counters and limits.

use crate::{
    backend::{DeviceError, DeviceUsage},
    mlx::{MlxDevice, NAME, array},
};

/// What MLX counts now.
///
/// # Errors
/// When it does not say.
pub fn memory() -> Result<DeviceUsage, DeviceError> {
    let failed = array::failed("counting memory");
    Ok(DeviceUsage {
        active: mlx_rs::memory::active_memory().map_err(&failed)?,
        peak: mlx_rs::memory::peak_memory().map_err(&failed)?,
        cached: mlx_rs::memory::cache_memory().map_err(&failed)?,
    })
}

/// Gives back what MLX keeps for the next array.
///
/// # Errors
/// When MLX fails.
pub fn clear_cache() -> Result<(), DeviceError> {
    mlx_rs::memory::clear_cache().map_err(array::failed("clearing the cache"))
}

impl MlxDevice {
    /// Bytes in use from which on MLX waits for what runs before it takes more. It bounds no single array. Returns the
    /// limit before.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn set_memory_limit(&self, bytes: usize) -> Result<usize, DeviceError> {
        let failed = array::failed("limiting memory");
        mlx_rs::memory::set_memory_limit(bytes).map_err(failed)
    }

    /// Freed bytes that MLX keeps for the next array at most. Returns the limit before.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn set_cache_limit(&self, bytes: usize) -> Result<usize, DeviceError> {
        let failed = array::failed("limiting the cache");
        mlx_rs::memory::set_cache_limit(bytes).map_err(failed)
    }

    /// Bytes that stay in memory whatever else the machine needs, on Metal. Returns the limit before.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] where MLX runs on the processor, and when it is more than the system allows.
    pub fn set_wired_limit(&self, bytes: usize) -> Result<usize, DeviceError> {
        if self.info.path != "metal" {
            return Err(DeviceError::Unsupported {
                backend: NAME,
                op: "wired memory",
                why: "only Metal wires memory".to_owned(),
            });
        }
        let failed = array::failed("limiting wired memory");
        mlx_rs::memory::set_wired_limit(bytes).map_err(failed)
    }

    /// Starts the peak anew from what is in use.
    ///
    /// # Errors
    /// When MLX fails.
    pub fn reset_peak(&self) -> Result<(), DeviceError> {
        mlx_rs::memory::reset_peak_memory().map_err(array::failed("counting memory"))
    }

    /// Bytes of the forms that weights have for MLX, which are among those in use.
    pub fn prepared_bytes(&self) -> usize {
        self.side.weights.bytes()
    }
}

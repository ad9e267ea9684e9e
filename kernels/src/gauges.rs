//! What a device's management library tells: how busy and how healthy the devices of a host are.

use std::time::Duration;

use crate::backend::DeviceError;

/// What is told of one device at one moment; of what its library does not say, nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gauge {
    /// Where it is on the bus, as in [`DeviceInfo`](crate::backend::DeviceInfo).
    pub pci_id: String,
    /// Its name of its own, on whatever host it is.
    pub uuid: String,
    /// Share of the last moments in which it computed, 0 to 1.
    pub utilization: Option<f64>,
    /// Bytes of its memory.
    pub memory_bytes: Option<u64>,
    /// Bytes of it that are in use, by whatever process.
    pub memory_used_bytes: Option<u64>,
    /// What it takes now, watts.
    pub power_watts: Option<f64>,
    /// What it may take at most, watts.
    pub power_limit_watts: Option<f64>,
    /// What it has taken since its driver was loaded, joules.
    pub energy_joules: Option<f64>,
    /// Degrees Celsius.
    pub temperature: Option<f64>,
    /// Errors of its memory that were corrected since its driver was loaded.
    pub ecc_corrected: Option<u64>,
    /// Those that could not be.
    pub ecc_uncorrected: Option<u64>,
}

/// Something that went wrong with a device, as its driver told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Where the device is on the bus.
    pub pci_id: String,
    /// What went wrong, by the driver's number: NVIDIA's Xid ("XID Errors", docs.nvidia.com/deploy/xid-errors).
    pub code: u64,
    /// The same in words.
    pub what: String,
}

/// A management library that was opened.
pub trait Gauges {
    /// What it tells of each device now. One that it cannot reach is there by its place alone.
    fn read(&self) -> Vec<Gauge>;

    /// Waits for a device's fault, at most so long.
    ///
    /// # Errors
    /// When the library does not tell of faults, after that time.
    fn wait(&self, at_most: Duration) -> Result<Option<Fault>, DeviceError>;
}

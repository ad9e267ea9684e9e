//! NVIDIA's management library (NVML), which comes with the driver and is found at run time as that is.

use std::{thread, time::Duration};

use nvml_wrapper::{
    Device, EventSet, Nvml,
    bitmasks::event::EventTypes,
    enum_wrappers::device::{EccCounter, MemoryError, TemperatureSensor},
    enums::event::XidError,
    error::{NvmlError, NvmlErrorWithSource},
};

use super::NAME;
use crate::{
    backend::DeviceError,
    gauges::{Fault, Gauge, Gauges},
};

/// What NVML gives for a fault that it has no number for.
const UNKNOWN: u64 = 999;

/// What the faults are that are met most ("XID Errors", docs.nvidia.com/deploy/xid-errors).
const XIDS: &[(u64, &str)] = &[
    (13, "a kernel's fault in the graphics engine"),
    (31, "a kernel used memory that is not mapped"),
    (32, "the driver's commands were damaged"),
    (43, "the process's work was stopped"),
    (45, "the process's work was taken away"),
    (48, "an error of two bits in its memory"),
    (61, "a fault of its microcontroller"),
    (62, "a halt of its microcontroller"),
    (63, "rows of its memory were marked to be replaced"),
    (64, "rows of its memory could not be marked to be replaced"),
    (69, "a kernel's fault in the graphics engine's class"),
    (74, "an error of NVLink"),
    (79, "it has fallen off the bus"),
    (92, "many errors of its memory that were corrected"),
    (94, "an error of its memory that only its process has"),
    (95, "an error of its memory that all processes have"),
    (119, "its system processor does not answer"),
    (120, "a fault of its system processor"),
    (140, "errors of its memory that were not corrected"),
];

/// A fault by its number, in words.
fn in_words(code: u64) -> String {
    match XIDS.iter().find(|(known, _)| *known == code) {
        Some((_, what)) => format!("Xid {code}: {what}"),
        None => format!("Xid {code}"),
    }
}

/// NVML, for as long as the process lives.
pub(super) struct Management {
    nvml: &'static Nvml,
    /// As they were when it was opened: one that is lost does not say any more where it is.
    devices: Vec<Known>,
    /// Where faults are told; none: nowhere.
    faults: Option<EventSet<'static>>,
}

/// A device, and what does not change of it.
struct Known {
    device: Device<'static>,
    place: String,
    uuid: String,
}

fn failed(op: &'static str, error: &NvmlError) -> DeviceError {
    DeviceError::Failed {
        backend: NAME,
        op,
        why: error.to_string(),
    }
}

/// A device's place as CUDA's driver writes it.
fn place(device: &Device<'_>) -> Result<String, NvmlError> {
    let at = device.pci_info()?;
    Ok(format!(
        "{:04x}:{:02x}:{:02x}.0",
        at.domain, at.bus, at.device
    ))
}

/// A number in thousands of its unit.
fn thousandths(n: impl Into<f64>) -> f64 {
    n.into() / 1e3
}

impl Management {
    /// Finds the library; none: there is none.
    ///
    /// # Errors
    /// When it does not start.
    pub fn open() -> Result<Option<Self>, DeviceError> {
        let nvml = match Nvml::init() {
            Ok(nvml) => nvml,
            Err(NvmlError::LibloadingError(_)) => return Ok(None),
            Err(error) => return Err(failed("opening NVML", &error)),
        };
        // Faults are told for as long as it is open, and whoever opens it does nothing else.
        let nvml: &'static Nvml = Box::leak(Box::new(nvml));
        let count = nvml.device_count();
        let count = count.map_err(|error| failed("counting NVML's devices", &error))?;
        let devices = (0..count).filter_map(|index| {
            let device = nvml.device_by_index(index).ok()?;
            Some(Known {
                place: place(&device).ok()?,
                uuid: device.uuid().unwrap_or_default(),
                device,
            })
        });
        let devices = devices.collect();
        let mut this = Self {
            nvml,
            devices,
            faults: None,
        };
        this.faults = this.listen();
        Ok(Some(this))
    }

    /// Faults of every device that tells of them.
    fn listen(&self) -> Option<EventSet<'static>> {
        let wanted = EventTypes::CRITICAL_XID_ERROR;
        let tells = |device: &Device<'_>| {
            (device.supported_event_types()).is_ok_and(|types| types.contains(wanted))
        };
        let devices = self.devices.iter().map(|known| &known.device);
        let mut devices: Vec<_> = devices.filter(|device| tells(device)).collect();
        while !devices.is_empty() {
            match self.listen_to(&devices) {
                Ok(set) => return Some(set),
                Err((at, error)) => {
                    tracing::debug!(%error, "a device does not tell of its faults");
                    devices.remove(at);
                }
            }
        }
        None
    }

    /// Faults of these devices; where one refuses, which. What was to be told went with it.
    fn listen_to(
        &self,
        devices: &[&Device<'static>],
    ) -> Result<EventSet<'static>, (usize, NvmlErrorWithSource)> {
        let set = self
            .nvml
            .create_event_set()
            .map_err(|error| (0, error.into()))?;
        (devices.iter().enumerate()).try_fold(set, |set, (at, device)| {
            (device.register_events(EventTypes::CRITICAL_XID_ERROR, set))
                .map_err(|error| (at, error))
        })
    }
}

impl Gauges for Management {
    fn read(&self) -> Vec<Gauge> {
        let all = self.devices.iter().map(|known| {
            let device = &known.device;
            let memory = device.memory_info().ok();
            let errors = |which| device.total_ecc_errors(which, EccCounter::Volatile).ok();
            Gauge {
                pci_id: known.place.clone(),
                uuid: known.uuid.clone(),
                utilization: (device.utilization_rates().ok()).map(|u| f64::from(u.gpu) / 100.0),
                memory_bytes: memory.as_ref().map(|memory| memory.total),
                memory_used_bytes: memory.as_ref().map(|memory| memory.used),
                power_watts: device.power_usage().ok().map(thousandths),
                power_limit_watts: device.enforced_power_limit().ok().map(thousandths),
                energy_joules: (device.total_energy_consumption().ok())
                    .map(|joules| joules as f64 / 1e3),
                temperature: (device.temperature(TemperatureSensor::Gpu).ok()).map(f64::from),
                ecc_corrected: errors(MemoryError::Corrected),
                ecc_uncorrected: errors(MemoryError::Uncorrected),
            }
        });
        all.collect()
    }

    fn wait(&self, at_most: Duration) -> Result<Option<Fault>, DeviceError> {
        let millis = u32::try_from(at_most.as_millis()).unwrap_or(u32::MAX);
        let Some(faults) = &self.faults else {
            thread::sleep(at_most);
            return Ok(None);
        };
        match faults.wait(millis) {
            Ok(event) => Ok(event.event_data.and_then(|error| {
                let code = match error {
                    XidError::Value(code) => code,
                    XidError::Unknown => UNKNOWN,
                };
                // SAFETY: the handles are compared, and not used.
                let same =
                    |known: &&Known| unsafe { known.device.handle() == event.device.handle() };
                let known = self.devices.iter().find(same)?;
                Some(Fault {
                    pci_id: known.place.clone(),
                    code,
                    what: in_words(code),
                })
            })),
            Err(NvmlError::Timeout) => Ok(None),
            Err(error) => {
                // Whoever asks again at once would ask for ever.
                thread::sleep(at_most);
                Err(failed("waiting for faults", &error))
            }
        }
    }
}

//! Devices.

use hotcell_proto::v1;
use serde::Serialize;

/// `hotcell devices`.
#[derive(Serialize)]
pub(crate) struct DeviceView<'a> {
    id: &'a str,
    backend: &'a str,
    description: &'a str,
    memory_bytes: u64,
    cores: &'a [u32],
    path: &'a str,
    problem: &'a str,
    program: &'a str,
    pci_id: &'a str,
    integrated: bool,
    driver: &'a str,
    /// Devices that its worker computes with, too.
    members: &'a [String],
    gauge: Option<GaugeView<'a>>,
}

/// How a device is; null where nobody tells.
#[derive(Serialize)]
struct GaugeView<'a> {
    uuid: &'a str,
    utilization: Option<f64>,
    memory_bytes: Option<u64>,
    memory_used_bytes: Option<u64>,
    power_watts: Option<f64>,
    power_limit_watts: Option<f64>,
    energy_joules: Option<f64>,
    temperature: Option<f64>,
    ecc_corrected: Option<u64>,
    ecc_uncorrected: Option<u64>,
    faults: &'a [v1::DeviceFault],
}

impl<'a> From<&'a v1::DeviceGauge> for GaugeView<'a> {
    fn from(gauge: &'a v1::DeviceGauge) -> Self {
        Self {
            uuid: &gauge.uuid,
            utilization: gauge.utilization,
            memory_bytes: gauge.memory_bytes,
            memory_used_bytes: gauge.memory_used_bytes,
            power_watts: gauge.power_watts,
            power_limit_watts: gauge.power_limit_watts,
            energy_joules: gauge.energy_joules,
            temperature: gauge.temperature,
            ecc_corrected: gauge.ecc_corrected,
            ecc_uncorrected: gauge.ecc_uncorrected,
            faults: &gauge.faults,
        }
    }
}

impl<'a> From<&'a v1::Device> for DeviceView<'a> {
    fn from(d: &'a v1::Device) -> Self {
        Self {
            id: &d.id,
            backend: &d.backend,
            description: &d.description,
            memory_bytes: d.memory_bytes,
            cores: &d.cores,
            path: &d.path,
            problem: &d.problem,
            program: &d.program,
            pci_id: &d.pci_id,
            integrated: d.integrated,
            driver: &d.driver,
            members: &d.members,
            gauge: d.gauge.as_ref().map(GaugeView::from),
        }
    }
}

impl DeviceView<'_> {
    /// What a device is, and which others compute with it.
    pub(crate) fn described(device: &v1::Device, all: &[v1::Device]) -> String {
        let leader = all.iter().find(|d| d.members.contains(&device.id));
        match (leader, device.members.as_slice()) {
            (Some(leader), _) => format!("{}; computes with {}", device.description, leader.id),
            (None, []) => device.description.clone(),
            (None, members) => format!(
                "{}; computes with {}",
                device.description,
                members.join(", ")
            ),
        }
    }
}

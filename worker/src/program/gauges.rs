//! The program as who tells how devices are. A device's library may crash or hang in it, and takes nobody along.

use std::{
    io::{self, Write},
    time::{Duration, Instant},
};

use hotcell_kernels::{
    gauges::{Fault, Gauge, Gauges},
    registry::Registry,
};
use serde_json::{Value, json};

use super::fail;
use crate::exit::Exit;

/// Prints a line every so many milliseconds, and one as soon as something goes wrong with a device, until nobody reads
/// them.
pub(super) fn tell(registry: Registry, every: u64) -> Exit {
    let libraries = match registry.gauges() {
        Ok(libraries) if libraries.is_empty() => {
            let what = "there is no library here that tells how devices are";
            return fail(Exit::NoDevice, what);
        }
        Ok(libraries) => libraries,
        // Perhaps the next one finds it in order.
        Err(why) => return fail(Exit::DeviceError, why),
    };
    let every = Duration::from_millis(every);
    let mut faults = Vec::new();
    let mut said = String::new();
    loop {
        let told = print(&libraries, &faults);
        if let Err(error) = told {
            return match error.kind() {
                io::ErrorKind::BrokenPipe => Exit::Ok,
                _ => fail(Exit::Internal, format_args!("cannot print: {error}")),
            };
        }
        faults = wait(&libraries, every, &mut said);
    }
}

/// What goes wrong first, or nothing in that time. `said`: why nothing is told of faults, as it was said last.
fn wait(libraries: &[Box<dyn Gauges>], every: Duration, said: &mut String) -> Vec<Fault> {
    let until = Instant::now() + every;
    let mut faults = Vec::new();
    // More than one library would each have its part of the time.
    let share = every / u32::try_from(libraries.len()).unwrap_or(1).max(1);
    for library in libraries {
        let left = until.saturating_duration_since(Instant::now());
        match library.wait(share.min(left)) {
            Ok(fault) => faults.extend(fault),
            Err(error) => {
                let error = error.to_string();
                if *said != error {
                    eprintln!("error: {error}");
                    *said = error;
                }
            }
        }
    }
    faults
}

fn print(libraries: &[Box<dyn Gauges>], faults: &[Fault]) -> io::Result<()> {
    let devices: Vec<Value> = (libraries.iter())
        .flat_map(|library| library.read())
        .map(device)
        .collect();
    let faults: Vec<Value> = (faults.iter())
        .map(|fault| json!({ "pci_id": fault.pci_id, "code": fault.code, "what": fault.what }))
        .collect();
    let mut out = io::stdout().lock();
    writeln!(out, "{}", json!({ "devices": devices, "faults": faults }))?;
    out.flush()
}

/// What is not known is not there.
fn device(gauge: Gauge) -> Value {
    let mut told = json!({
        "pci_id": gauge.pci_id,
        "uuid": gauge.uuid,
        "utilization": gauge.utilization,
        "memory_bytes": gauge.memory_bytes,
        "memory_used_bytes": gauge.memory_used_bytes,
        "power_watts": gauge.power_watts,
        "power_limit_watts": gauge.power_limit_watts,
        "energy_joules": gauge.energy_joules,
        "temperature": gauge.temperature,
        "ecc_corrected": gauge.ecc_corrected,
        "ecc_uncorrected": gauge.ecc_uncorrected,
    });
    if let Some(fields) = told.as_object_mut() {
        fields.retain(|_, value| !value.is_null());
    }
    told
}

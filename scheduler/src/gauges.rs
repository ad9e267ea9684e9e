//! How devices are, as their management libraries tell: what a worker's program says when run as `gauges`.
//!
//! Such a library may crash or hang, so that this happens in a child, of which nothing else depends: one that ends is
//! started again, later and later.

use std::{
    collections::{BTreeMap, VecDeque},
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use hotcell_ipc::{
    child::ExitStatus,
    log::{BoundedLog, LogLimits},
    spawn::{Command, Output, Signal, Spawner},
};
use hotcell_proto::{
    exit::WorkerExit,
    limits,
    v1::{Device, DeviceFault, DeviceGauge},
};
use serde::Deserialize;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::task::AbortOnDropHandle;

use crate::{
    config::WorkerConfig,
    crash::{Crashes, millis, now},
    discover::{WORKER_ENVIRONMENT, clip, leader_of},
};

/// How old the last word may be.
const FRESH: Duration = Duration::from_secs(10);
/// The first and the longest wait before a child is started again.
const AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// How long a child may say nothing.
const SILENT: Duration = Duration::from_secs(30);
/// How long the last words of one that ended may take.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// Bytes of a line, and lines in a second.
const LINES: LogLimits = LogLimits {
    line_bytes: 64 << 10,
    lines: 1,
    lines_per_second: 50,
};
/// Faults that are kept of a device.
const FAULTS: usize = 16;

/// What a child prints in a line.
#[derive(Deserialize)]
struct Line {
    devices: Vec<Told>,
    faults: Vec<Fault>,
}

#[derive(Deserialize)]
struct Told {
    pci_id: String,
    #[serde(default)]
    uuid: String,
    utilization: Option<f64>,
    memory_bytes: Option<u64>,
    memory_used_bytes: Option<u64>,
    power_watts: Option<f64>,
    power_limit_watts: Option<f64>,
    energy_joules: Option<f64>,
    temperature: Option<f64>,
    ecc_corrected: Option<u64>,
    ecc_uncorrected: Option<u64>,
}

#[derive(Deserialize)]
struct Fault {
    pci_id: String,
    code: u64,
    #[serde(default)]
    what: String,
}

/// A device's place on the bus, of which programs write letters as they like.
fn place(pci_id: &str) -> String {
    clip(&pci_id.to_ascii_lowercase())
}

#[derive(Default)]
struct Known {
    gauge: DeviceGauge,
    /// When that was told; none: only faults were.
    told: Option<Instant>,
    /// The newest last.
    faults: VecDeque<DeviceFault>,
    /// How often each code was told.
    counts: BTreeMap<u64, u64>,
}

#[derive(Default)]
struct State {
    /// By their places.
    devices: BTreeMap<String, Known>,
    /// Ids of the devices at a place.
    ids: BTreeMap<String, String>,
    /// By their programs.
    children: BTreeMap<PathBuf, AbortOnDropHandle<()>>,
}

/// What is known of devices. Clones share it.
#[derive(Clone, Default)]
pub struct Gauges(Arc<Inner>);

#[derive(Default)]
struct Inner {
    /// None: nobody is asked.
    how: Option<(Spawner, WorkerConfig)>,
    state: Mutex<State>,
}

impl Gauges {
    /// Of devices that programs of these find.
    pub fn new(spawner: Spawner, config: WorkerConfig) -> Self {
        Self(Arc::new(Inner {
            how: Some((spawner, config)),
            state: Mutex::default(),
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Follows how these are, as far as they are on a bus. What goes wrong with them is noted in the reports of deaths.
    pub fn follow(&self, devices: &[Device], crashes: &Crashes) {
        let Some((spawner, config)) = &self.0.how else {
            return;
        };
        for device in devices.iter().filter(|device| !device.pci_id.is_empty()) {
            let program = config.program(device);
            let mut state = self.state();
            // What befalls a member ends the worker of its leader.
            let id = leader_of(&device.id, devices).map_or(&device.id, |leader| &leader.id);
            state.ids.insert(place(&device.pci_id), id.clone());
            if state.children.contains_key(&program) {
                continue;
            }
            let child = Child {
                spawner: spawner.clone(),
                program: program.clone(),
                // Who is followed does not keep who follows.
                gauges: Arc::downgrade(&self.0),
                crashes: crashes.clone(),
            };
            let child = AbortOnDropHandle::new(tokio::spawn(child.keep()));
            state.children.insert(program, child);
        }
    }

    /// How a device is now; none: nobody tells.
    pub fn of(&self, device: &Device) -> Option<DeviceGauge> {
        let state = self.state();
        let known = state.devices.get(&place(&device.pci_id))?;
        let faults = known.faults.iter().cloned().collect();
        let fresh = known.told.is_some_and(|told| told.elapsed() < FRESH);
        match fresh {
            true => Some(DeviceGauge {
                faults,
                ..known.gauge.clone()
            }),
            // It fell silent, perhaps of that.
            false if !known.faults.is_empty() => Some(DeviceGauge {
                uuid: known.gauge.uuid.clone(),
                faults,
                ..DeviceGauge::default()
            }),
            false => None,
        }
    }

    /// How often each fault of a device was told.
    pub fn faults(&self, device: &Device) -> BTreeMap<u64, u64> {
        let state = self.state();
        let known = state.devices.get(&place(&device.pci_id));
        known.map_or_else(BTreeMap::new, |known| known.counts.clone())
    }

    /// What went wrong with the device of this id in that time until now.
    pub fn recent_faults(&self, id: &str, time: Duration) -> Vec<DeviceFault> {
        let state = self.state();
        let here = state.ids.iter().filter(|(_, there)| *there == id);
        let all = here.filter_map(|(at, _)| state.devices.get(at));
        let since = now().saturating_sub(millis(time));
        all.flat_map(|known| &known.faults)
            .filter(|fault| fault.time_ms >= since)
            .cloned()
            .collect()
    }

    fn hear(&self, line: &str, crashes: &Crashes) -> serde_json::Result<()> {
        let line: Line = serde_json::from_str(line)?;
        let mut state = self.state();
        for told in line.devices.into_iter().take(limits::MAX_DEVICES) {
            let at = place(&told.pci_id);
            if state.devices.len() >= limits::MAX_DEVICES && !state.devices.contains_key(&at) {
                continue;
            }
            let known = state.devices.entry(at).or_default();
            known.told = Some(Instant::now());
            known.gauge = gauge(told);
        }
        for fault in line.faults.into_iter().take(FAULTS) {
            let at = place(&fault.pci_id);
            let fault = DeviceFault {
                time_ms: now(),
                code: fault.code,
                what: clip(&fault.what),
            };
            let Some(known) = state.devices.get_mut(&at) else {
                continue;
            };
            if known.counts.len() < FAULTS || known.counts.contains_key(&fault.code) {
                let count = known.counts.entry(fault.code).or_default();
                *count += 1;
                // The metrics have all of them.
                if count.is_power_of_two() {
                    tracing::error!(pci_id = at, code = fault.code, what = %fault.what, count, "a device's driver tells of a fault");
                }
            }
            if known.faults.len() >= FAULTS {
                known.faults.pop_front();
            }
            known.faults.push_back(fault.clone());
            if let Some(id) = state.ids.get(&at) {
                crashes.fault(id, fault);
            }
        }
        Ok(())
    }
}

/// A number of a stranger's; none that is no number.
fn finite(n: Option<f64>) -> Option<f64> {
    n.filter(|n| n.is_finite())
}

fn gauge(told: Told) -> DeviceGauge {
    DeviceGauge {
        uuid: clip(&told.uuid),
        utilization: finite(told.utilization),
        memory_bytes: told.memory_bytes,
        memory_used_bytes: told.memory_used_bytes,
        power_watts: finite(told.power_watts),
        power_limit_watts: finite(told.power_limit_watts),
        energy_joules: finite(told.energy_joules),
        temperature: finite(told.temperature),
        ecc_corrected: told.ecc_corrected,
        ecc_uncorrected: told.ecc_uncorrected,
        faults: Vec::new(),
    }
}

/// A program that tells.
struct Child {
    spawner: Spawner,
    program: PathBuf,
    gauges: Weak<Inner>,
    crashes: Crashes,
}

impl Child {
    /// Has it run until it says that there is nothing to tell.
    async fn keep(self) {
        let mut wait = AGAIN.0;
        loop {
            let begun = Instant::now();
            match self.run().await {
                Ok(ExitStatus::Code(code)) if code == WorkerExit::NoDevice.code() => return,
                Ok(status) => {
                    tracing::warn!(program = %self.program.display(), %status, "who tells how devices are ended");
                }
                Err(error) => {
                    tracing::warn!(program = %self.program.display(), %error, "nobody tells how devices are");
                }
            }
            if begun.elapsed() > AGAIN.1 {
                wait = AGAIN.0;
            }
            sleep(wait).await;
            wait = (wait * 2).min(AGAIN.1);
        }
    }

    /// Runs it once.
    async fn run(&self) -> std::io::Result<ExitStatus> {
        let mut command = Command::new(&self.program)
            .arg("gauges")
            .inherit_env(WORKER_ENVIRONMENT);
        command.stdout = Output::Pipe;
        // Dropping the child on the way out kills it.
        let mut child = self.spawner.spawn(command).await?;
        let mut tasks = Vec::new();
        let spoke = Arc::new(AtomicBool::new(false));
        if let Some(stderr) = child.stderr.take() {
            let said = |line: &str| tracing::debug!(target: "gauges", "{line}");
            tasks.push(BoundedLog::start(stderr, LogLimits::default(), said)?.1);
        }
        if let Some(stdout) = child.stdout.take() {
            let (gauges, crashes) = (self.gauges.clone(), self.crashes.clone());
            let mut wrong = false;
            let speaks = Arc::clone(&spoke);
            let hear = move |line: &str| {
                speaks.store(true, Ordering::Relaxed);
                let Some(gauges) = gauges.upgrade().map(Gauges) else {
                    return;
                };
                if let Err(error) = gauges.hear(line, &crashes)
                    && !std::mem::replace(&mut wrong, true)
                {
                    tracing::warn!(%error, "how devices are cannot be understood");
                }
            };
            tasks.push(BoundedLog::start(stdout, LINES, hear)?.1);
        }
        let mut tasks: Vec<_> = tasks.into_iter().map(AbortOnDropHandle::new).collect();
        let ended = loop {
            tokio::select! {
                ended = child.wait() => break ended?,
                () = sleep(SILENT) => {
                    if !spoke.swap(false, Ordering::Relaxed) {
                        tracing::warn!(program = %self.program.display(), "who tells how devices are hangs");
                        child.kill(Signal::KILL)?;
                    }
                }
            }
        };
        // What it said last may still be in the pipe.
        let last = async {
            for task in &mut tasks {
                let _ = task.await;
            }
        };
        let _ = timeout(LAST_WORDS, last).await;
        Ok(ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(pci_id: &str) -> Device {
        Device {
            pci_id: pci_id.to_owned(),
            ..Device::default()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_told_of_a_device_is_known_for_a_while() {
        let (gauges, crashes) = (Gauges::default(), Crashes::default());
        let line = r#"{"devices":[{"pci_id":"0000:0A:00.0","uuid":"GPU-1","utilization":0.5,"temperature":61}],"faults":[]}"#;
        gauges.hear(line, &crashes).unwrap();
        let told = gauges.of(&device("0000:0a:00.0")).unwrap();
        assert_eq!(
            (told.uuid.as_str(), told.utilization, told.temperature),
            ("GPU-1", Some(0.5), Some(61.0))
        );
        assert_eq!((told.power_watts, told.memory_bytes), (None, None));
        assert_eq!(gauges.of(&device("0000:0b:00.0")), None);
        tokio::time::advance(FRESH).await;
        assert_eq!(gauges.of(&device("0000:0a:00.0")), None);
    }

    #[tokio::test(start_paused = true)]
    async fn faults_are_counted_and_outlive_what_was_told() {
        let (gauges, crashes) = (Gauges::default(), Crashes::default());
        let line = r#"{"devices":[{"pci_id":"0000:01:00.0"}],"faults":[{"pci_id":"0000:01:00.0","code":79,"what":"Xid 79"},{"pci_id":"0000:09:00.0","code":1}]}"#;
        for _ in 0..2 * FAULTS {
            gauges.hear(line, &crashes).unwrap();
        }
        tokio::time::advance(FRESH).await;
        let told = gauges.of(&device("0000:01:00.0")).unwrap();
        assert_eq!(told.faults.len(), FAULTS);
        assert_eq!(
            (told.faults[0].code, told.faults[0].what.as_str()),
            (79, "Xid 79")
        );
        let counts = gauges.faults(&device("0000:01:00.0"));
        assert_eq!(counts, BTreeMap::from([(79, 2 * FAULTS as u64)]));
        // Nobody told that there is such a device.
        assert!(gauges.faults(&device("0000:09:00.0")).is_empty());
    }

    #[test]
    fn what_a_stranger_says_is_bounded() {
        let (gauges, crashes) = (Gauges::default(), Crashes::default());
        for line in [
            "",
            "{}",
            "[]",
            r#"{"devices":[{}],"faults":[]}"#,
            r#"{"devices":[{"pci_id":"x","memory_bytes":-1}],"faults":[]}"#,
        ] {
            assert!(gauges.hear(line, &crashes).is_err(), "{line}");
        }
        for n in 0..2 * limits::MAX_DEVICES {
            let line = format!(
                r#"{{"devices":[{{"pci_id":"{n}","uuid":"{}"}}],"faults":[]}}"#,
                "u".repeat(10_000)
            );
            gauges.hear(&line, &crashes).unwrap();
        }
        let state = gauges.state();
        assert_eq!(state.devices.len(), limits::MAX_DEVICES);
        assert!(
            state
                .devices
                .values()
                .all(|known| known.gauge.uuid.len() <= limits::MAX_WORD)
        );
    }
}

//! Which devices this host has: what the worker's program says when run as `probe`.
//!
//! Native libraries may crash or hang while they look for hardware, so that this happens in a child with a
//! deadline. A probe that fails gives a device with a problem, never a failure of the scheduler.

mod together;

use std::{io, path::Path, time::Duration};

use hotcell_ipc::{
    log::{BoundedLog, LogLimits},
    spawn::{Child, Command, Output, Spawner},
};
use hotcell_proto::{
    PROTOCOL_VERSION, limits,
    v1::{ConfinementLayer, Device, LayerState},
};
use serde::Deserialize;
use tokio::{io::AsyncReadExt, task::JoinSet};
use tokio_util::task::AbortOnDropHandle;

use crate::config::{BACKENDS_APART, DeviceChoice, WorkerConfig, program_apart};

/// Environment variables that a worker gets from ours.
pub const WORKER_ENVIRONMENT: [&str; 4] = [
    "RUST_BACKTRACE",
    "HOTCELL_CPU_PATH",
    // Where a container has the driver's library, and which devices it is to show.
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
];

/// How long the last words of a probe that ended may take.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Who a program is. Read first, so that one of another version is called that, whatever else it prints.
#[derive(Deserialize)]
struct Speaker {
    protocol: u32,
    #[serde(default)]
    version: String,
}

#[derive(Deserialize)]
struct Report {
    devices: Vec<Claimed>,
    #[serde(default)]
    confinement: Vec<Layer>,
}

#[derive(Deserialize)]
struct Layer {
    layer: String,
    state: String,
    #[serde(default)]
    detail: String,
}

/// What a probe found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Host {
    /// Its devices.
    pub devices: Vec<Device>,
    /// What of the confinement the kernel enforced on the probe itself; empty if it did not say.
    pub confinement: Vec<ConfinementLayer>,
}

impl Host {
    /// What stands against saying that workers can be confined here: the layers that are missing, and why; nothing if
    /// they can.
    pub fn unconfined(&self) -> Option<String> {
        if self.confinement.is_empty() {
            return Some("the probe does not say what confines it".to_owned());
        }
        let mut missing = self.confinement.iter().filter(|l| match l.state() {
            LayerState::InForce | LayerState::NotNeeded => false,
            LayerState::Missing | LayerState::Unspecified => true,
        });
        let said = |l: &ConfinementLayer| format!("without {} ({})", l.layer, l.detail);
        let first = said(missing.next()?);
        Some(missing.fold(first, |all, l| format!("{all}, {}", said(l))))
    }
}

#[derive(Deserialize)]
struct Claimed {
    id: String,
    backend: String,
    #[serde(default)]
    description: String,
    #[serde(default)]
    memory_bytes: u64,
    #[serde(default)]
    cores: Vec<u32>,
    #[serde(default)]
    path: String,
    #[serde(default)]
    pci_id: String,
    #[serde(default)]
    integrated: bool,
    #[serde(default)]
    driver: String,
}

/// Cuts a stranger's word to what may be kept of it: one line, [`limits::MAX_WORD`] bytes at most.
pub fn clip(word: &str) -> String {
    let mut out = String::new();
    for c in word.chars().map(|c| if c.is_control() { ' ' } else { c }) {
        if out.len() + c.len_utf8() > limits::MAX_WORD {
            break;
        }
        out.push(c);
    }
    out
}

/// A process's words about its confinement, as far as they may be kept.
pub fn layers(said: impl IntoIterator<Item = ConfinementLayer>) -> Vec<ConfinementLayer> {
    let clipped = said.into_iter().map(|l| ConfinementLayer {
        layer: clip(&l.layer),
        detail: clip(&l.detail),
        state: l.state,
    });
    clipped.take(limits::MAX_LAYERS).collect()
}

/// Reads what a probe printed.
///
/// # Errors
/// A sentence about what is wrong with it.
pub fn parse(printed: &[u8]) -> Result<Host, String> {
    let unexpected = |e| format!("its output is not the expected JSON: {e}");
    let speaker: Speaker = serde_json::from_slice(printed).map_err(unexpected)?;
    if speaker.protocol != PROTOCOL_VERSION {
        return Err(format!(
            "it is version {} and speaks protocol {}, this scheduler is version {} and speaks {PROTOCOL_VERSION}; install \
             both from one release",
            clip(&speaker.version),
            speaker.protocol,
            env!("CARGO_PKG_VERSION"),
        ));
    }
    let report: Report = serde_json::from_slice(printed).map_err(unexpected)?;
    if report.devices.len() > limits::MAX_DEVICES {
        return Err(format!(
            "it found {} devices, more than {}",
            report.devices.len(),
            limits::MAX_DEVICES
        ));
    }
    let mut devices: Vec<Device> = Vec::new();
    for found in report.devices {
        let backend = &found.backend;
        let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
        if !(1..=24).contains(&backend.len()) || !backend.bytes().all(plain) {
            return Err("a device's backend is no plain word".to_owned());
        }
        let number = found.id.strip_prefix(backend.as_str());
        let number = number.and_then(|rest| rest.strip_prefix(':'));
        let digits = |n: &str| (1..=6).contains(&n.len()) && n.bytes().all(|b| b.is_ascii_digit());
        if !number.is_some_and(digits) {
            return Err(format!(
                "a device of {backend} has the id {:?}, not {backend}:NUMBER",
                clip(&found.id)
            ));
        }
        if devices.iter().any(|d| d.id == found.id) {
            return Err(format!("it names device {} twice", found.id));
        }
        if found.cores.len() > 4096 {
            return Err(format!("device {} has too many cores", found.id));
        }
        devices.push(Device {
            id: found.id,
            backend: found.backend,
            description: clip(&found.description),
            memory_bytes: found.memory_bytes,
            cores: found.cores,
            path: clip(&found.path),
            problem: String::new(),
            program: String::new(),
            pci_id: clip(&found.pci_id),
            integrated: found.integrated,
            driver: clip(&found.driver),
            gauge: None,
            members: vec![],
        });
    }
    let said = report.confinement.into_iter().map(|l| ConfinementLayer {
        layer: l.layer,
        state: LayerState::from_str_name(&l.state)
            .unwrap_or_default()
            .into(),
        detail: l.detail,
    });
    Ok(Host {
        devices,
        confinement: layers(said),
    })
}

/// The device whose worker computes with this one, too, if it is another one's.
pub fn leader_of<'d>(id: &str, all: &'d [Device]) -> Option<&'d Device> {
    all.iter()
        .find(|d| d.members.iter().any(|member| member == id))
}

/// The devices that have a worker of their own: those that can be used and are not another one's members.
pub fn with_workers(all: &[Device]) -> impl Iterator<Item = &Device> {
    all.iter()
        .filter(move |d| d.problem.is_empty() && leader_of(&d.id, all).is_none())
}

/// The devices that get workers, by the configured choice.
pub fn choose(found: Vec<Device>, choice: DeviceChoice) -> Vec<Device> {
    let DeviceChoice::Cpu(count) = choice else {
        return found;
    };
    let cpu = |d: &Device| d.backend == "cpu" && d.problem.is_empty();
    let Some(whole) = found.iter().find(|d| cpu(d)) else {
        // Shows why there is none.
        return found;
    };
    (0..count).map(|index| share(whole, index, count)).collect()
}

/// Part `index` of `count` of a CPU device. Where there are fewer cores than parts, parts share cores.
fn share(whole: &Device, index: usize, count: usize) -> Device {
    let all = whole.cores.len();
    let cores = if all >= count {
        whole.cores[index * all / count..(index + 1) * all / count].to_vec()
    } else {
        whole
            .cores
            .get(index % all.max(1))
            .copied()
            .into_iter()
            .collect()
    };
    Device {
        id: format!("cpu:{index}"),
        memory_bytes: whole.memory_bytes / count as u64,
        cores,
        ..whole.clone()
    }
}

/// The devices of backends with a program of their own, being looked for. Nobody waits for a program that takes its time:
/// what it finds comes later, and until then the list says that it is looked for. Dropping it ends the programs.
#[derive(Debug, Default)]
pub struct Search {
    probes: JoinSet<Found>,
    awaited: Vec<Device>,
}

/// What one program answered.
#[derive(Debug)]
pub struct Found {
    /// Its name.
    pub program: String,
    /// The devices that it serves, or one that says why there is none.
    pub devices: Vec<Device>,
}

impl Found {
    /// Puts its devices in place of those that stood for them; returns those that can be used, and how many of these there
    /// were before.
    pub fn settle(self, devices: &mut Vec<Device>) -> (usize, Vec<Device>) {
        devices.retain(|d| d.program != self.program);
        let before = with_workers(devices).count();
        let mut usable: Vec<String> = Vec::new();
        for device in self.devices {
            if devices.len() >= limits::MAX_DEVICES || devices.iter().any(|d| d.id == device.id) {
                tracing::warn!(device = device.id, "one device too many");
                continue;
            }
            usable.push(device.id.clone());
            devices.push(device);
        }
        let own = with_workers(devices).filter(|d| usable.contains(&d.id));
        (before, own.cloned().collect())
    }
}

impl Search {
    /// Starts the programs that are installed, if it may be any device, but for those of which `known` has devices that can
    /// be used.
    pub fn begin(
        spawner: &Spawner,
        worker: &WorkerConfig,
        choice: DeviceChoice,
        deadline: Duration,
        known: &[Device],
    ) -> Self {
        let mut search = Self::default();
        for backend in BACKENDS_APART {
            let (name, path) = (program_apart(backend), worker.apart(backend));
            let serves = |d: &Device| d.program == name && d.problem.is_empty();
            // A link to nothing is there as well, and broken.
            let installed = path != worker.binary && path.symlink_metadata().is_ok();
            if choice != DeviceChoice::Auto || !installed || known.iter().any(serves) {
                continue;
            }
            let waits = format!("{name} has not said yet whether it can be used");
            search.awaited.push(broken(backend, &name, &waits));
            let (spawner, worker) = (spawner.clone(), worker.clone());
            search.probes.spawn(async move {
                let devices = probe_apart(&spawner, &worker, backend, deadline).await;
                Found {
                    program: name,
                    devices,
                }
            });
        }
        search
    }

    /// Puts a device into the list for each program that is being asked, in place of what is there of it.
    pub fn list(&self, devices: &mut Vec<Device>) {
        for awaited in &self.awaited {
            let found = Found {
                program: awaited.program.clone(),
                devices: vec![awaited.clone()],
            };
            found.settle(devices);
        }
    }

    /// The next program's answer; none once all have answered.
    pub async fn next(&mut self) -> Option<Found> {
        loop {
            match self.probes.join_next().await? {
                Ok(found) => return Some(found),
                Err(error) => tracing::error!(%error, "a search for devices broke off"),
            }
        }
    }
}

/// Runs `binary probe` and returns what it found; one device with a problem if it failed.
pub async fn probe(spawner: &Spawner, worker: &WorkerConfig, deadline: Duration) -> Host {
    let binary = &worker.binary;
    let found = run(spawner, binary, deadline).await;
    let (host, problem) = match found {
        Ok(host) if !host.devices.is_empty() => {
            return Host {
                devices: together::arranged(host.devices, worker),
                ..host
            };
        }
        Ok(host) => (host, "it found no device".to_owned()),
        Err(problem) => (Host::default(), problem),
    };
    tracing::warn!(binary = %binary.display(), %problem, "the probe failed");
    Host {
        devices: vec![broken("cpu", "", &said_by(binary, &problem))],
        ..host
    }
}

/// The devices of a backend that has a program of its own; one with a problem if its probe failed.
async fn probe_apart(
    spawner: &Spawner,
    worker: &WorkerConfig,
    backend: &str,
    deadline: Duration,
) -> Vec<Device> {
    let (name, binary) = (&program_apart(backend), &worker.apart(backend));
    let problem = match run(spawner, binary, deadline).await {
        // It speaks for its own backend only.
        Ok(host) => match host.devices.iter().find(|d| d.backend != backend) {
            Some(other) => format!("it claims {}, which is no device of {backend}", other.id),
            None if host.devices.is_empty() => "it found no device".to_owned(),
            None => {
                let served = |device| Device {
                    program: name.to_owned(),
                    ..device
                };
                let served = host.devices.into_iter().map(served).collect();
                return together::arranged(served, worker);
            }
        },
        Err(problem) => problem,
    };
    tracing::warn!(binary = %binary.display(), %problem, "the probe failed");
    vec![broken(backend, name, &said_by(binary, &problem))]
}

/// A problem with a program, by its name.
fn said_by(binary: &Path, problem: &str) -> String {
    let name = binary.file_name().unwrap_or(binary.as_os_str());
    format!("{}: {problem}", name.display())
}

fn broken(backend: &str, program: &str, problem: &str) -> Device {
    Device {
        id: format!("{backend}:0"),
        backend: backend.to_owned(),
        problem: clip(problem),
        program: program.to_owned(),
        ..Device::default()
    }
}

async fn run(spawner: &Spawner, binary: &Path, deadline: Duration) -> Result<Host, String> {
    let mut command = Command::new(binary)
        .arg("probe")
        .inherit_env(WORKER_ENVIRONMENT);
    command.stdout = Output::Pipe;
    let answer = async {
        let mut child = spawner
            .spawn(command)
            .await
            .map_err(|e| format!("cannot be started: {e}"))?;
        // Dropping the child on the way out kills it.
        output(&mut child).await
    };
    let printed = tokio::time::timeout(deadline, answer)
        .await
        .map_err(|_| format!("the probe took longer than {deadline:?}"))??;
    parse(&printed).map_err(|e| format!("the probe cannot be believed: {e}"))
}

async fn output(child: &mut Child) -> Result<Vec<u8>, String> {
    let failed = |e: io::Error| format!("cannot read from the probe: {e}");
    let log = child.stderr.take().and_then(|stderr| {
        let limits = LogLimits::default();
        BoundedLog::start(
            stderr,
            limits,
            |line| tracing::debug!(target: "probe", "{line}"),
        )
        .ok()
    });
    let mut printed = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        let file = tokio::net::unix::pipe::Receiver::from_owned_fd(stdout).map_err(failed)?;
        let mut bounded = file.take(limits::MAX_PROBE_BYTES as u64 + 1);
        bounded.read_to_end(&mut printed).await.map_err(failed)?;
    }
    if printed.len() > limits::MAX_PROBE_BYTES {
        return Err(format!(
            "the probe printed more than {} bytes",
            limits::MAX_PROBE_BYTES
        ));
    }
    let status = child.wait().await.map_err(failed)?;
    if !status.success() {
        let mut last = None;
        if let Some((log, drained)) = log {
            // What it said last says why, and may still be in the pipe.
            let drained = AbortOnDropHandle::new(drained);
            let _ = tokio::time::timeout(LAST_WORDS, drained).await;
            last = log.lines().pop();
        }
        let last = last.map(|l| format!(": {l}")).unwrap_or_default();
        return Err(format!("the probe ended with {status}{last}"));
    }
    Ok(printed)
}

#[cfg(test)]
mod tests;

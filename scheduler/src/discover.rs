//! Which devices this host has: what the worker's program says when run as `probe`.
//!
//! Native libraries may crash or hang while they look for hardware, so that this happens in a child with a
//! deadline. A probe that fails gives a device with a problem, never a failure of the scheduler.

use std::{io, path::Path, time::Duration};

use hotcell_ipc::{
    log::{BoundedLog, LogLimits},
    spawn::{Child, Command, Output, Spawner},
};
use hotcell_proto::{
    limits,
    v1::{ConfinementLayer, Device, LayerState},
};
use serde::Deserialize;
use tokio::io::AsyncReadExt;

use crate::config::{BACKENDS_APART, DeviceChoice, WorkerConfig};

/// Environment variables that a worker gets from ours.
pub const WORKER_ENVIRONMENT: [&str; 2] = ["RUST_BACKTRACE", "HOTCELL_CPU_PATH"];

#[derive(Deserialize)]
struct Report {
    devices: Vec<Found>,
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
struct Found {
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
    let report: Report = serde_json::from_slice(printed)
        .map_err(|e| format!("its output is not the expected JSON: {e}"))?;
    if report.devices.len() > limits::MAX_DEVICES {
        return Err(format!(
            "it found {} devices, more than {}",
            report.devices.len(),
            limits::MAX_DEVICES
        ));
    }
    let mut devices: Vec<Device> = Vec::new();
    for found in report.devices {
        let plain = |s: &str| {
            let allowed = |b: u8| b.is_ascii_alphanumeric() || b == b':' || b == b'-';
            (1..=32).contains(&s.len()) && s.bytes().all(allowed)
        };
        if !plain(&found.id) || !plain(&found.backend) {
            return Err("a device's id or backend is no plain word".to_owned());
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

/// What this host has: the devices of the worker's program and, if it may be any, those of backends with a program of
/// their own, where that is installed.
pub async fn look(
    spawner: &Spawner,
    worker: &WorkerConfig,
    choice: DeviceChoice,
    deadline: Duration,
) -> Host {
    let further = async {
        let mut found = Vec::new();
        for backend in BACKENDS_APART {
            let program = worker.program(backend);
            if choice == DeviceChoice::Auto && program != worker.binary && program.is_file() {
                found.extend(probe_apart(spawner, &program, backend, deadline).await);
            }
        }
        found
    };
    let (mut host, further) = tokio::join!(probe(spawner, &worker.binary, deadline), further);
    for device in further {
        let known = host.devices.iter().any(|d| d.id == device.id);
        if !known && host.devices.len() < limits::MAX_DEVICES {
            host.devices.push(device);
        }
    }
    host
}

/// Runs `binary probe` and returns what it found; one device with a problem if it failed.
pub async fn probe(spawner: &Spawner, binary: &Path, deadline: Duration) -> Host {
    match run(spawner, binary, deadline).await {
        Ok(host) if !host.devices.is_empty() => host,
        Ok(host) => Host {
            devices: vec![broken("cpu", "the probe found no device".to_owned())],
            ..host
        },
        Err(problem) => {
            tracing::warn!(binary = %binary.display(), %problem, "the probe failed");
            Host {
                devices: vec![broken("cpu", problem)],
                ..Host::default()
            }
        }
    }
}

/// The devices of a backend that has a program of its own; one with a problem if its probe failed.
async fn probe_apart(
    spawner: &Spawner,
    binary: &Path,
    backend: &str,
    deadline: Duration,
) -> Vec<Device> {
    let problem = match run(spawner, binary, deadline).await {
        // It speaks for its own backend only: the program of a device is found by it.
        Ok(mut host) => {
            host.devices.retain(|d| d.backend == backend);
            if !host.devices.is_empty() {
                return host.devices;
            }
            "the probe found no device".to_owned()
        }
        Err(problem) => problem,
    };
    tracing::warn!(binary = %binary.display(), %problem, "the probe failed");
    vec![broken(backend, problem)]
}

fn broken(backend: &str, problem: String) -> Device {
    Device {
        id: format!("{backend}:0"),
        backend: backend.to_owned(),
        problem: clip(&problem),
        ..Device::default()
    }
}

async fn run(spawner: &Spawner, binary: &Path, deadline: Duration) -> Result<Host, String> {
    let mut command = Command::new(binary)
        .arg("probe")
        .inherit_env(WORKER_ENVIRONMENT);
    command.stdout = Output::Pipe;
    let mut child = spawner
        .spawn(command)
        .await
        .map_err(|e| format!("cannot start {}: {e}", binary.display()))?;
    // Dropping the child on the way out kills it.
    let printed = tokio::time::timeout(deadline, output(&mut child))
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
        let last = log.and_then(|(log, _)| log.lines().pop());
        let last = last.map(|l| format!(": {l}")).unwrap_or_default();
        return Err(format!("the probe ended with {status}{last}"));
    }
    Ok(printed)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GOOD: &str = r#"{"devices":[{"id":"cpu:0","backend":"cpu","description":"a\nb","memory_bytes":8,
        "cores":[0,1,2],"path":"avx512"}]}"#;

    #[test]
    fn a_report_becomes_devices() {
        let devices = parse(GOOD.as_bytes()).unwrap().devices;
        assert_eq!(devices[0].id, "cpu:0");
        assert_eq!(devices[0].description, "a b");
    }

    #[test]
    fn a_host_confines_only_if_the_probe_says_that_nothing_is_missing() {
        let host = |layers: &str| {
            let words = GOOD.strip_suffix('}').unwrap();
            parse(format!("{words},\"confinement\":{layers}}}").as_bytes()).unwrap()
        };
        let layer =
            |name, state| format!(r#"{{"layer":"{name}","state":"{state}","detail":"why"}}"#);
        let sound = layer("seccomp", "LAYER_STATE_IN_FORCE");
        let spare = layer("user", "LAYER_STATE_NOT_NEEDED");
        assert_eq!(host(&format!("[{sound},{spare}]")).unconfined(), None);
        for state in ["LAYER_STATE_MISSING", "LAYER_STATE_OF_TOMORROW"] {
            let lacks = host(&format!("[{sound},{}]", layer("landlock", state)));
            assert_eq!(lacks.unconfined().unwrap(), "without landlock (why)");
        }
        assert!(host("[]").unconfined().is_some());
        let many = vec![sound; 2 * limits::MAX_LAYERS].join(",");
        assert_eq!(
            host(&format!("[{many}]")).confinement.len(),
            limits::MAX_LAYERS
        );
    }

    #[test]
    fn devices_share_the_cores() {
        let cores = |n| -> Vec<Vec<u32>> {
            let found = parse(GOOD.as_bytes()).unwrap().devices;
            let chosen = choose(found, DeviceChoice::Cpu(n));
            chosen.into_iter().map(|d| d.cores).collect()
        };
        assert_eq!(cores(1), [vec![0, 1, 2]]);
        assert_eq!(cores(2), [vec![0], vec![1, 2]]);
        assert_eq!(cores(4), [vec![0], vec![1], vec![2], vec![0]]);
        let found = parse(GOOD.as_bytes()).unwrap().devices;
        assert_eq!(choose(found.clone(), DeviceChoice::Auto), found);
    }

    #[test]
    fn a_report_that_cannot_be_believed_is_refused() {
        for bad in [
            "",
            "{}",
            "[1]",
            r#"{"devices":[{"id":"../x","backend":"cpu"}]}"#,
            r#"{"devices":[{"id":"a","backend":"cpu"},{"id":"a","backend":"cpu"}]}"#,
        ] {
            assert!(parse(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[tokio::test]
    async fn a_probe_that_fails_or_hangs_is_a_problem_and_nothing_more() {
        let spawner = Spawner::start().unwrap();
        let problem = async |program: &str, ms| {
            let found = probe(&spawner, Path::new(program), Duration::from_millis(ms)).await;
            found.devices[0].problem.clone()
        };
        assert!(
            problem("/no/such/program", 1000)
                .await
                .contains("cannot start")
        );
        assert!(problem("/bin/false", 5000).await.contains("exit code 1"));
        assert!(problem("/bin/echo", 5000).await.contains("believed"));
        let dir = tempfile::tempdir().unwrap();
        let hangs = dir.path().join("hangs");
        script(&hangs, "exec sleep 100");
        assert!(
            problem(hangs.to_str().unwrap(), 50)
                .await
                .contains("longer")
        );
    }

    /// Makes a program of a shell's lines.
    fn script(path: &Path, lines: &str) {
        std::fs::write(path, format!("#!/bin/sh\n{lines}\n")).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(path, mode).unwrap();
    }

    #[tokio::test]
    async fn a_backend_with_a_program_of_its_own_costs_its_device_only() {
        let spawner = Spawner::start().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let worker = WorkerConfig {
            binary: dir.path().join("hotcell-worker"),
            kv_cache: Default::default(),
            model_memory: None,
            log: "info",
            require_confinement: false,
            memory: None,
        };
        script(
            &worker.binary,
            &format!("printf %s '{}'", GOOD.replace('\n', " ")),
        );
        let look = async |choice| {
            let found = look(&spawner, &worker, choice, Duration::from_secs(5)).await;
            let about = |d: Device| (d.id, d.problem);
            found.devices.into_iter().map(about).collect::<Vec<_>>()
        };
        // Not installed: nothing is missed.
        assert_eq!(look(DeviceChoice::Auto).await.len(), 1);
        let apart = worker.program("mlx");
        script(
            &apart,
            "echo 'libmlx.so: cannot open shared object file' >&2; exit 127",
        );
        let found = look(DeviceChoice::Auto).await;
        assert_eq!(found[0], ("cpu:0".to_owned(), String::new()));
        assert_eq!(found[1].0, "mlx:0");
        assert!(
            found[1].1.contains("cannot open shared object"),
            "{found:?}"
        );
        // It speaks for no backend but its own.
        let both = r#"{"devices":[{"id":"mlx:0","backend":"mlx"},{"id":"cpu:7","backend":"cpu"}]}"#;
        script(&apart, &format!("echo '{both}'"));
        let found = look(DeviceChoice::Auto).await;
        assert_eq!(found[1], ("mlx:0".to_owned(), String::new()));
        assert_eq!(found.len(), 2);
        // Who asks for CPU devices gets those.
        assert_eq!(look(DeviceChoice::Cpu(1)).await.len(), 1);
    }

    proptest! {
        #[test]
        fn no_report_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn clipped_words_are_bounded(word in ".{0,400}") {
            prop_assert!(clip(&word).len() <= limits::MAX_WORD);
        }
    }
}

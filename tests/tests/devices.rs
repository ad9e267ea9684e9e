//! Backends with a worker's program of their own: one that is missing, broken, slow or a liar costs its devices only, and
//! `hotcell devices` says why. The programs here are a shell's lines; `worker/mlx/tests/system.rs` has the real one.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    fs,
    os::unix::{fs::PermissionsExt, fs::symlink},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use hotcell_client::v1;
use hotcell_proto::PROTOCOL_VERSION;
use hotcell_tests::cluster::{Cluster, SOON, all_have, binaries, kjv, lives, signal_pid};
use rustix::process::Signal;
use tempfile::TempDir;

/// The worker's program alone in a folder, and where MLX's would lie.
struct Installed {
    _folder: TempDir,
    worker: PathBuf,
    mlx: PathBuf,
}

fn installed() -> Installed {
    let folder = tempfile::tempdir().unwrap();
    let worker = folder.path().join("hotcell-worker");
    symlink(binaries().unwrap().join("hotcell-worker"), &worker).unwrap();
    let mlx = folder.path().join("hotcell-worker-mlx");
    Installed {
        _folder: folder,
        worker,
        mlx,
    }
}

fn script(path: &Path, lines: &str) {
    fs::write(path, format!("#!/bin/sh\n{lines}\n")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Lines that print a probe's report.
fn report(protocol: u32, devices: &str) -> String {
    format!(r#"echo '{{"version":"9.8.7","protocol":{protocol},"devices":[{devices}]}}'"#)
}

fn arguments<'a>(installed: &'a Installed, timeout: &'a str) -> [&'a str; 6] {
    [
        "--worker-binary",
        installed.worker.to_str().unwrap(),
        "--probe-timeout",
        timeout,
        "--restart-backoff",
        "1ms",
    ]
}

async fn start(installed: &Installed, timeout: &str) -> Cluster {
    Cluster::start(&arguments(installed, timeout))
        .await
        .unwrap()
}

/// A program that serves as the worker's does, on the processor, once it has been allowed to say that it found `mlx:0`.
struct Slow {
    /// What it was asked to do, and by which process: a line each.
    asked: PathBuf,
    /// What it waits for before it answers a probe.
    go: PathBuf,
}

impl Slow {
    fn install(installed: &Installed) -> Self {
        let [asked, go] = ["asked", "go"].map(|name| installed.mlx.with_file_name(name));
        let mlx = report(PROTOCOL_VERSION, r#"{"id":"mlx:0","backend":"mlx"}"#);
        let lines = format!(
            r#"echo "$$ $*" >> {asked}
if [ $1 = probe ]; then
    until [ -e {go} ]; do sleep 0.05; done
    {mlx}
    exit
fi
for word; do
    shift
    [ "$word" = mlx:0 ] && word=cpu:0
    set -- "$@" "$word"
done
exec {worker} "$@""#,
            go = go.display(),
            asked = asked.display(),
            worker = installed.worker.display(),
        );
        script(&installed.mlx, &lines);
        Self { asked, go }
    }

    fn asked(&self) -> String {
        fs::read_to_string(&self.asked).unwrap_or_default()
    }

    /// The processes that were asked what there is.
    fn probes(&self) -> Vec<u32> {
        let asked = self.asked();
        let probes = asked.lines().filter_map(|l| l.strip_suffix(" probe"));
        probes.map(|pid| pid.parse().unwrap()).collect()
    }

    /// Waits until so many have been asked.
    async fn probed(&self, count: usize) -> Vec<u32> {
        let began = Instant::now();
        while self.probes().len() < count {
            assert!(began.elapsed() < SOON, "{}", self.asked());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        self.probes()
    }

    fn answer(&self) {
        fs::write(&self.go, "").unwrap();
    }
}

/// The devices, once `mlx:0` is as wanted.
async fn devices(cluster: &Cluster, wanted: impl Fn(&v1::Device) -> bool) -> Vec<v1::Device> {
    let client = cluster.client().await.unwrap();
    let began = Instant::now();
    loop {
        let devices = client.devices().await.unwrap();
        if devices.iter().any(|d| d.id == "mlx:0" && wanted(d)) {
            return devices;
        }
        assert!(began.elapsed() < SOON, "{devices:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn is_awaited(device: &v1::Device) -> bool {
    device.problem.contains("has not said yet")
}

async fn serves(cluster: &Cluster) {
    let client = cluster.client().await.unwrap();
    client.load("kjv", kjv().to_str().unwrap()).await.unwrap();
    let prompt = hotcell_client::Prompt::Text("In the beginning".to_owned());
    let options = hotcell_client::GenerateOptions {
        max_tokens: 4,
        ..Default::default()
    };
    let done = client.generate(prompt, options).await.unwrap();
    assert!(!done.complete().await.unwrap().token_ids.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_is_wrong_with_a_program_is_told_and_the_processor_serves() {
    let mlx = r#"{"id":"mlx:0","backend":"mlx"}"#;
    let faults = [
        (
            "echo 'cannot open libmlx.so: No such file' >&2; exit 127",
            "exit code 127: cannot open libmlx.so: No such file",
        ),
        ("kill -SEGV $$", "SIGSEGV"),
        ("exec sleep 100", "took longer than 1s"),
        ("echo hello", "not the expected JSON"),
        ("exec yes", "printed more than"),
        (
            &report(PROTOCOL_VERSION + 1, mlx),
            "version 9.8.7 and speaks protocol",
        ),
        (&report(PROTOCOL_VERSION, ""), "found no device"),
        (
            &report(PROTOCOL_VERSION, r#"{"id":"cpu:1","backend":"cpu"}"#),
            "claims cpu:1",
        ),
        (
            &report(PROTOCOL_VERSION, r#"{"id":"cpu:0","backend":"mlx"}"#),
            "has the id \"cpu:0\"",
        ),
    ];
    for (lines, words) in faults {
        let installed = installed();
        script(&installed.mlx, lines);
        let cluster = start(&installed, "1s").await;
        let found = devices(&cluster, |d| !is_awaited(d)).await;
        let [cpu, mlx] = found.as_slice() else {
            panic!("{lines}: {found:?}");
        };
        assert_eq!((cpu.id.as_str(), cpu.problem.as_str()), ("cpu:0", ""));
        assert!(mlx.problem.starts_with("hotcell-worker-mlx: "), "{mlx:?}");
        assert!(mlx.problem.contains(words), "{lines}: {mlx:?}");
        let shown = cluster.hotcell(&["devices"]).unwrap();
        let shown = String::from_utf8(shown.stdout).unwrap();
        let line = shown.lines().find(|l| l.starts_with("mlx:0")).unwrap();
        assert!(line.contains(words), "{lines}: {shown}");
        let shown = cluster.hotcell(&["--json", "devices"]).unwrap();
        let shown: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
        let shown = &shown["devices"][1];
        assert_eq!(shown["problem"], mlx.problem);
        assert_eq!(shown["program"], "hotcell-worker-mlx");
        serves(&cluster).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_that_cannot_be_started_is_told() {
    let link = installed();
    symlink("/no/such/program", &link.mlx).unwrap();
    let plain = installed();
    fs::write(&plain.mlx, "#!/bin/sh\n").unwrap();
    for installed in [link, plain] {
        let cluster = start(&installed, "5s").await;
        let found = devices(&cluster, |d| !is_awaited(d)).await;
        assert!(found[1].problem.contains("cannot be started"), "{found:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_that_takes_its_time_holds_up_nobody() {
    let installed = installed();
    script(&installed.mlx, "exec sleep 100");
    let began = Instant::now();
    let cluster = start(&installed, "60s").await;
    serves(&cluster).await;
    assert!(began.elapsed() < Duration::from_secs(50));
    let found = devices(&cluster, is_awaited).await;
    assert_eq!(found[0].problem, "");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_that_is_found_late_has_its_models_and_its_own_program_also_after_a_death() {
    let installed = installed();
    let slow = Slow::install(&installed);
    let cluster = start(&installed, "60s").await;
    serves(&cluster).await;
    devices(&cluster, is_awaited).await;
    assert_eq!(cluster.workers(all_have("kjv")).await.unwrap().len(), 1);
    slow.answer();
    let two = |workers: &[v1::WorkerInfo]| workers.len() == 2 && all_have("kjv")(workers);
    let workers = cluster.workers(two).await.unwrap();
    let late = &workers[1];
    assert_eq!(late.lease.as_ref().unwrap().device, "mlx:0");
    assert_eq!(devices(&cluster, |d| d.problem.is_empty()).await.len(), 2);
    signal_pid(late.pid, Signal::KILL).unwrap();
    let again = |workers: &[v1::WorkerInfo]| two(workers) && workers[1].pid != late.pid;
    cluster.workers(again).await.unwrap();
    let asked = slow.asked();
    assert_eq!(asked.matches("--device mlx:0").count(), 2, "{asked}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_scheduler_that_takes_over_while_a_program_takes_its_time_asks_it_again() {
    let installed = installed();
    let slow = Slow::install(&installed);
    let cluster = start(&installed, "60s").await;
    serves(&cluster).await;
    devices(&cluster, is_awaited).await;
    let first = slow.probed(1).await;
    let before = cluster.workers(all_have("kjv")).await.unwrap();
    let client = cluster.client().await.unwrap();
    let options = hotcell_client::GenerateOptions {
        max_tokens: 300,
        ignore_eos: true,
        ..Default::default()
    };
    let stream = client.generate("In the beginning", options).await.unwrap();
    let whole = tokio::spawn(stream.complete());
    let mut command = cluster.takeover(&arguments(&installed, "60s")).unwrap();
    let said = tokio::task::spawn_blocking(move || command.output());
    let said = said.await.unwrap().unwrap();
    let words = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.status.success(), "{said:?}");
    assert!(
        words.contains("1 workers live on, 0 start anew"),
        "{words}\n{}",
        cluster.scheduler.log()
    );
    // Who was asked before is gone with who asked; the one who is asked now has not said anything yet.
    let probes = slow.probed(2).await;
    let began = Instant::now();
    while lives(first[0]) {
        assert!(began.elapsed() < SOON, "the first probe is left");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(lives(probes[1]));
    assert_eq!(devices(&cluster, is_awaited).await.len(), 2);
    // The processor's worker and its stream noticed nothing.
    let after = cluster.workers(all_have("kjv")).await.unwrap();
    assert_eq!((after.len(), after[0].pid), (1, before[0].pid));
    assert_eq!(whole.await.unwrap().unwrap().token_ids.len(), 300);
    slow.answer();
    let two = |workers: &[v1::WorkerInfo]| workers.len() == 2 && all_have("kjv")(workers);
    let workers = cluster.workers(two).await.unwrap();
    assert_eq!(workers[1].lease.as_ref().unwrap().device, "mlx:0");
    assert_eq!(devices(&cluster, |d| d.problem.is_empty()).await.len(), 2);
    assert_eq!(slow.probes(), probes, "{}", cluster.scheduler.log());
}

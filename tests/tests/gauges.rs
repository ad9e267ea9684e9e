//! What the management library of a driver without a device tells, through real processes: in metrics, commands and reports
//! of deaths; and that nothing depends on it.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    process::Command,
    time::{Duration, Instant},
};

use hotcell_client::v1;
use hotcell_tests::{
    cluster::{Cluster, SOON, binaries, children, free_address, signal_pid},
    fakecuda::FakeDriver,
};
use rustix::process::Signal;

/// A scheduler whose only workers are CUDA's, where it speaks HTTP, and their driver.
struct Host {
    cluster: Cluster,
    http: SocketAddr,
    driver: FakeDriver,
}

impl Host {
    /// With a driver that does as `conf` says.
    async fn start(conf: &str) -> Self {
        let driver = FakeDriver::new(conf).unwrap();
        let worker = driver.worker("hotcell-worker").unwrap();
        let http = free_address().unwrap();
        let arguments = [
            "--worker-binary",
            worker.to_str().unwrap(),
            "--http",
            &http.to_string(),
        ];
        let cluster = Cluster::start(&arguments).await.unwrap();
        let ready = |all: &[v1::WorkerInfo]| {
            !all.is_empty() && all.iter().all(|w| w.state() == v1::WorkerState::Ready)
        };
        cluster.workers(ready).await.unwrap();
        Self {
            cluster,
            http,
            driver,
        }
    }

    /// The metrics, once this is so.
    async fn metrics(&self, so: impl Fn(&str) -> bool) -> String {
        let begun = Instant::now();
        loop {
            let mut stream = TcpStream::connect(self.http).unwrap();
            let request = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
            stream.write_all(request).unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            if so(&text) {
                return text;
            }
            assert!(begun.elapsed() < SOON, "{text}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Who tells how devices are.
fn teller(cluster: &Cluster) -> Option<u32> {
    let all = children(cluster.scheduler.pid()).unwrap();
    all.into_iter().find(|pid| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).any(|word| word == b"gauges")
    })
}

fn is_told(text: &str) -> bool {
    text.contains("hotcell_device_temperature_celsius{")
}

#[tokio::test]
async fn devices_are_in_metrics_and_commands_as_their_library_tells() {
    let host = Host::start("devices = 2\n").await;
    let cluster = &host.cluster;
    let text = host.metrics(is_told).await;
    for line in [
        "hotcell_device_utilization_ratio{device=\"cuda:0\",uuid=\"GPU-fake-0\"} 0.4\n",
        "nv_gpu_utilization{gpu_uuid=\"GPU-fake-1\"} 0.41\n",
        "nv_gpu_memory_total_bytes{gpu_uuid=\"GPU-fake-0\"} 1073741824\n",
        "hotcell_device_memory_used_bytes{device=\"cuda:1\",uuid=\"GPU-fake-1\"} 2097152\n",
        "nv_gpu_power_usage{gpu_uuid=\"GPU-fake-1\"} 250.5\n",
        "nv_gpu_power_limit{gpu_uuid=\"GPU-fake-1\"} 700\n",
        "nv_energy_consumption{gpu_uuid=\"GPU-fake-0\"} 1234.5\n",
        "hotcell_device_temperature_celsius{device=\"cuda:0\",uuid=\"GPU-fake-0\"} 60\n",
        "hotcell_device_memory_errors_corrected_total{device=\"cuda:0\",uuid=\"GPU-fake-0\"} 3\n",
        "hotcell_device_memory_errors_uncorrected_total{device=\"cuda:1\",uuid=\"GPU-fake-1\"} 1\n",
    ] {
        assert!(text.contains(line), "{line}{text}");
    }
    // What it does not tell is not there.
    assert!(!text.contains("nv_gpu_power_usage{gpu_uuid=\"GPU-fake-0\"}"));
    let shown = cluster.hotcell(&["devices"]).unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(
        shown.contains("40 %, 1.0 MiB used, 60 °C, 1 memory errors\n"),
        "{shown}"
    );
    assert!(shown.contains("61 °C, 250 W, 1 memory errors\n"), "{shown}");
    let shown = cluster.hotcell(&["devices", "--json"]).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
    let gauge = &json["devices"][0]["gauge"];
    assert_eq!(
        (&gauge["uuid"], &gauge["temperature"]),
        (&"GPU-fake-0".into(), &60.0.into())
    );
    assert!(gauge["power_watts"].is_null());
}

#[tokio::test]
async fn who_tells_may_die_and_hang_and_comes_back() {
    let host = Host::start("fail = nvmlDeviceGetTemperature:2=hang\n").await;
    let cluster = &host.cluster;
    host.metrics(is_told).await;
    let before = cluster.workers(|_| true).await.unwrap().remove(0);
    // It hangs at its second line, and what it said is forgotten in time.
    host.metrics(|text| !is_told(text)).await;
    let first = teller(cluster).unwrap();
    signal_pid(first, Signal::KILL).unwrap();
    host.metrics(is_told).await;
    assert_ne!(teller(cluster), Some(first));
    let after = cluster.workers(|_| true).await.unwrap().remove(0);
    assert_eq!((after.pid, after.deaths), (before.pid, 0));
}

#[tokio::test]
async fn a_devices_fault_is_counted_and_is_in_the_report_of_the_death_it_brings() {
    let host = Host::start("devices = 2\n").await;
    let cluster = &host.cluster;
    host.metrics(is_told).await;
    host.driver.fault(0, 31).unwrap();
    host.metrics(|text| {
        text.contains(
            "hotcell_device_faults_total{device=\"cuda:0\",uuid=\"GPU-fake-0\",code=\"31\"} 1\n",
        )
    })
    .await;
    let client = cluster.client().await.unwrap();
    let workers = cluster.workers(|_| true).await.unwrap();
    let of = |device: &str| {
        let on = |w: &&v1::WorkerInfo| w.lease.as_ref().is_some_and(|l| l.device == device);
        workers.iter().find(on).unwrap().clone()
    };
    // The other device had no fault.
    for device in ["cuda:1", "cuda:0"] {
        signal_pid(of(device).pid, Signal::ABORT).unwrap();
    }
    let report = async |device: &str, faults: usize| {
        let begun = Instant::now();
        loop {
            let crashes = client.crashes().await.unwrap();
            let its = crashes.into_iter().find(|c| c.device == device);
            if let Some(its) = its.filter(|c| c.device_faults.len() >= faults) {
                break its;
            }
            assert!(begun.elapsed() < SOON);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let its = report("cuda:0", 1).await;
    assert_eq!(its.device_faults[0].code, 31);
    assert_eq!(report("cuda:1", 0).await.device_faults, []);
    // A driver may say so later.
    host.driver.fault(1, 79).unwrap();
    let its = report("cuda:1", 1).await;
    assert_eq!(
        its.device_faults[0].what,
        "Xid 79: it has fallen off the bus"
    );
    // It does not answer any more, and is there by its name.
    host.metrics(|text| {
        text.contains("uuid=\"GPU-fake-1\",code=\"79\"} 1\n")
            && !text.contains("hotcell_device_temperature_celsius{device=\"cuda:1\"")
    })
    .await;
    let shown = cluster.hotcell(&["crashes", "show", &its.id]).unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(
        shown.contains("device     Xid 79: it has fallen off the bus, told at "),
        "{shown}"
    );
    let shown = cluster.hotcell(&["devices"]).unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(
        shown.contains("Xid 31: a kernel used memory that is not mapped\n"),
        "{shown}"
    );
}

#[test]
fn where_no_library_is_nobody_tells_and_says_why() {
    for program in ["hotcell-worker", "hotcell-worker-cuda"] {
        let program = match program {
            "hotcell-worker" => binaries().unwrap().join(program),
            _ => hotcell_tests::fakecuda::worker().unwrap(),
        };
        // Where there is one it tells until nobody listens.
        if std::fs::exists("/dev/nvidiactl").unwrap() {
            continue;
        }
        let output = Command::new(&program).arg("gauges").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(4), "{said}");
        assert!(
            said.starts_with("error: ") && said.lines().count() == 1,
            "{said}"
        );
    }
}

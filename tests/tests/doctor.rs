//! What workers say of their confinement is what the kernel says of them; and where a layer is missing, that is told, or
//! is a reason not to start.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    fs::{read_link, read_to_string},
    io,
    os::unix::process::CommandExt,
    process::{Command, Output, Stdio},
};

use hotcell_proto::{exit::WorkerExit, v1};
use hotcell_tests::cluster::{Cluster, binaries, hotcell};
use serde_json::Value;

/// Every layer there is.
const LAYERS: [&str; 10] = [
    "no-new-privs",
    "session",
    "memory group",
    "user",
    "user namespace",
    "network namespace",
    "limits",
    "capabilities",
    "landlock",
    "seccomp",
];

/// The layers that somebody has in force.
fn in_force(layers: &[v1::ConfinementLayer]) -> Vec<&str> {
    let held = layers
        .iter()
        .filter(|l| l.state() == v1::LayerState::InForce);
    held.map(|l| l.layer.as_str()).collect()
}

fn detail<'a>(layers: &'a [v1::ConfinementLayer], name: &str) -> &'a str {
    &layers.iter().find(|l| l.layer == name).unwrap().detail
}

fn field(status: &str, name: &str) -> String {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap().split_whitespace().next().unwrap().to_owned()
}

/// Compares what a worker says with what the kernel says of it.
fn assert_honest(worker: &v1::WorkerInfo) {
    let layers = &worker.layers;
    let names: Vec<_> = layers.iter().map(|l| l.layer.as_str()).collect();
    assert_eq!(names, LAYERS);
    let held = in_force(layers);
    let file = |name: &str| read_to_string(format!("/proc/{}/{name}", worker.pid)).unwrap();
    let status = file("status");
    assert_eq!(
        field(&status, "NoNewPrivs:") == "1",
        held.contains(&"no-new-privs")
    );
    assert_eq!(field(&status, "Seccomp:") == "2", held.contains(&"seccomp"));
    let none = ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"]
        .iter()
        .all(|set| field(&status, set) == "0000000000000000");
    assert_eq!(none, held.contains(&"capabilities"));
    // Fields of stat after the name: state, parent, group, session, terminal.
    let stat = file("stat");
    let fields: Vec<_> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    let pid = worker.pid.to_string();
    let (group, session, terminal) = (fields[2], fields[3], fields[4]);
    let apart = session == pid || (group == pid && terminal == "0");
    assert_eq!(apart, held.contains(&"session"), "{stat}");
    let user = field(&status, "Uid:");
    let own = rustix::process::geteuid().as_raw().to_string();
    match held.contains(&"user") {
        true => assert!(user != own && user == detail(layers, "user"), "{user}"),
        false => assert_eq!(user, own),
    }
    for (kind, layer) in [("user", "user namespace"), ("net", "network namespace")] {
        let of = |pid: &str| read_link(format!("/proc/{pid}/ns/{kind}")).unwrap();
        let apart = of(&worker.pid.to_string()) != of("self");
        assert_eq!(apart, held.contains(&layer), "{layer}");
    }
    let limits = file("limits");
    let limit = |name: &str| field(&limits, name);
    // At 0 a program that collects core dumps would still be asked, and nobody but root can raise it.
    assert!(["0", "1"].contains(&limit("Max core file size").as_str()));
    assert_eq!(limit("Max file size"), "0");
    assert_eq!(limit("Max locked memory"), "0");
    if detail(layers, "limits").contains("threads") {
        assert!(limit("Max processes").parse::<u64>().is_ok());
    }
    // What it inherited.
    for variable in file("environ").split_terminator('\0') {
        let (name, _) = variable.split_once('=').unwrap();
        assert!(
            ["RUST_BACKTRACE", "HOTCELL_CPU_PATH"].contains(&name),
            "{name}"
        );
    }
    for open in std::fs::read_dir(format!("/proc/{}/fd", worker.pid)).unwrap() {
        let Ok(what) = read_link(open.unwrap().path()) else {
            continue;
        };
        let what = what.to_string_lossy();
        let is_file = what.starts_with('/') && !what.starts_with("/memfd:");
        assert!(!is_file || what == "/dev/null", "{what}");
    }
}

#[tokio::test]
async fn workers_say_of_their_confinement_what_the_kernel_says_of_them() {
    let cluster = Cluster::start(&["--devices", "cpu:2"]).await.unwrap();
    let ready = |all: &[v1::WorkerInfo]| {
        all.len() == 2 && all.iter().all(|w| w.state() == v1::WorkerState::Ready)
    };
    let workers = cluster.workers(ready).await.unwrap();
    workers.iter().for_each(assert_honest);
    let user = |w: &v1::WorkerInfo| detail(&w.layers, "user").to_owned();
    if in_force(&workers[0].layers).contains(&"user") {
        assert_ne!(user(&workers[0]), user(&workers[1]), "one user for both");
    }

    let output = cluster.hotcell(&["doctor", "--json"]).unwrap();
    let view: Value = serde_json::from_slice(&output.stdout).unwrap();
    let host = view["host"].as_array().unwrap();
    assert_eq!(host.len(), LAYERS.len());
    let states = |layers: &Value| -> Vec<(String, String)> {
        let word = |l: &Value, key: &str| l[key].as_str().unwrap().to_owned();
        let layers = layers.as_array().unwrap().iter();
        let all = layers.map(|l| (word(l, "layer"), word(l, "state")));
        // The probe needs no memory.
        all.filter(|(layer, _)| layer != "memory group").collect()
    };
    // What was tried on the probe is what came to be.
    for worker in view["workers"].as_array().unwrap() {
        assert_eq!(states(&worker["layers"]), states(&view["host"]));
    }
}

#[test]
fn the_doctor_needs_no_scheduler_that_runs() {
    let folder = hotcell_tests::cluster::private_folder().unwrap();
    let output = hotcell(folder.path())
        .unwrap()
        .arg("doctor")
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    for place in ["host", "w0"] {
        let rows = text.lines().filter(|line| line.starts_with(place)).count();
        assert_eq!(rows, LAYERS.len(), "{text}");
    }
}

/// Has a program find a kernel without landlock.
fn without_landlock(command: &mut Command) -> &mut Command {
    let old_kernel = || {
        let step = |code: u32, jt, jf, k: u32| libc::sock_filter {
            code: code as u16,
            jt,
            jf,
            k,
        };
        let (load, equal, answer) = (
            libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            libc::BPF_RET | libc::BPF_K,
        );
        let mut steps = [
            // The call's number comes first.
            step(load, 0, 0, 0),
            step(equal, 0, 1, libc::SYS_landlock_create_ruleset as u32),
            step(answer, 0, 0, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
            step(answer, 0, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let program = libc::sock_fprog {
            len: steps.len() as u16,
            filter: steps.as_mut_ptr(),
        };
        // SAFETY: the program and its steps outlive the calls.
        let done = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(
                    libc::PR_SET_SECCOMP,
                    libc::SECCOMP_MODE_FILTER,
                    &raw const program,
                ) == 0
        };
        match done {
            true => Ok(()),
            false => Err(io::Error::last_os_error()),
        }
    };
    // SAFETY: system calls and memory of its own only.
    unsafe { command.pre_exec(old_kernel) }
}

fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_layer_that_is_missing_is_told_and_a_reason_not_to_start_if_it_is_required() {
    let folder = hotcell_tests::cluster::private_folder().unwrap();
    let mut doctor = hotcell(folder.path()).unwrap();
    let output = without_landlock(doctor.args(["doctor", "--json"]))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", words(&output));
    let view: Value = serde_json::from_slice(&output.stdout).unwrap();
    for layers in [&view["host"], &view["workers"][0]["layers"]] {
        let layers = layers.as_array().unwrap();
        let landlock = layers.iter().find(|l| l["layer"] == "landlock").unwrap();
        assert_eq!(landlock["state"], "missing", "{landlock}");
        let seccomp = layers.iter().find(|l| l["layer"] == "seccomp").unwrap();
        assert_eq!(seccomp["state"], "in_force", "{seccomp}");
    }

    let mut scheduler = Command::new(binaries().unwrap().join("hotcell-scheduler"));
    scheduler
        .env_clear()
        .stdin(Stdio::null())
        .arg("--socket")
        .arg(folder.path().join("s.sock"))
        .arg("--require-confinement");
    let output = without_landlock(&mut scheduler).output().unwrap();
    assert_eq!(output.status.code(), Some(8), "{}", words(&output));
    assert!(
        words(&output).contains("without landlock (the kernel lacks it)"),
        "{}",
        words(&output)
    );

    let mut worker = Command::new(binaries().unwrap().join("hotcell-worker"));
    worker
        .env_clear()
        .stdin(Stdio::null())
        .arg("--listen")
        .arg(format!("unix:{}", folder.path().join("w.sock").display()))
        .arg("--require-confinement");
    let output = without_landlock(&mut worker).output().unwrap();
    assert_eq!(
        output.status.code(),
        Some(WorkerExit::Unconfined.code()),
        "{}",
        words(&output)
    );
    assert!(
        words(&output).contains("without landlock"),
        "{}",
        words(&output)
    );
}

#[tokio::test]
async fn where_nothing_is_missing_a_required_confinement_serves() {
    let folder = hotcell_tests::cluster::private_folder().unwrap();
    let output = hotcell(folder.path())
        .unwrap()
        .args(["doctor", "--json"])
        .output()
        .unwrap();
    let view: Value = serde_json::from_slice(&output.stdout).unwrap();
    let host = view["host"].as_array().unwrap();
    let complete = host.iter().all(|l| l["state"] != "missing");
    match Cluster::start(&["--require-confinement"]).await {
        Ok(cluster) => {
            assert!(complete, "{view}");
            let ready =
                |all: &[v1::WorkerInfo]| all.iter().all(|w| w.state() == v1::WorkerState::Ready);
            cluster.workers(ready).await.unwrap();
        }
        Err(error) => {
            assert!(!complete, "{error:#}");
            assert!(
                error.to_string().contains("confinement is required"),
                "{error:#}"
            );
        }
    }
}

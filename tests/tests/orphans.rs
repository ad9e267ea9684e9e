//! No orphans, no litter: whatever happens to the scheduler, its processes end with it, and the next one starts.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    collections::BTreeSet,
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use hotcell_client::{GenerateOptions, v1::WorkerState};
use hotcell_tests::{
    cluster::{Cluster, Process, SOON, all_have, binaries, golden, kjv, signal_pid},
    synthetic::{Measures, write},
};
use rustix::process::Signal;

/// Within this, no worker is left of a scheduler that was killed.
const MERCY: Duration = Duration::from_secs(1);

/// State and parent of a process, unless it is gone.
fn stat(pid: u32) -> Option<(char, u32)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program's name, in parentheses, may hold anything.
    let mut rest = stat.rsplit_once(") ")?.1.split_whitespace();
    let state = rest.next()?.chars().next()?;
    Some((state, rest.next()?.parse().ok()?))
}

fn runs(pid: u32) -> bool {
    // The dead one's body is whose who inherited it.
    stat(pid).is_some_and(|(state, _)| state != 'Z')
}

fn children(of: u32) -> BTreeSet<u32> {
    let processes = std::fs::read_dir("/proc").unwrap();
    let pids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|&pid| stat(pid).is_some_and(|(_, parent)| parent == of))
        .collect()
}

/// Kills the scheduler, and sees its workers end with it.
fn kill_and_look(scheduler: &mut Process, workers: &BTreeSet<u32>) {
    assert!(workers.iter().all(|&pid| runs(pid)), "{workers:?}");
    scheduler.signal(Signal::KILL).unwrap();
    scheduler.wait().unwrap();
    let killed = Instant::now();
    while let Some(pid) = workers.iter().find(|&&pid| runs(pid)) {
        let outlives = killed.elapsed() < MERCY;
        assert!(outlives, "worker {pid} outlives its scheduler");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Starts another scheduler where the first one was.
async fn again(cluster: &mut Cluster) {
    let mut command = Command::new(binaries().unwrap().join("hotcell-scheduler"));
    command
        .arg("--socket")
        .arg(&cluster.socket)
        .env_clear()
        .env("XDG_CONFIG_HOME", cluster.folder.path());
    cluster.scheduler = Process::start(&mut command).unwrap();
    let start = Instant::now();
    while cluster.client().await.is_err() {
        assert!(start.elapsed() < SOON, "{}", cluster.scheduler.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let ready = |w: &[hotcell_client::v1::WorkerInfo]| {
        !w.is_empty() && w.iter().all(|w| w.state() == WorkerState::Ready)
    };
    cluster.workers(ready).await.unwrap();
}

#[tokio::test]
async fn workers_and_standbys_end_with_a_killed_scheduler_also_in_the_middle_of_a_stream() {
    let arguments = ["--standby", "--devices", "cpu:2"];
    let mut cluster = Cluster::with_model("kjv", &kjv(), &arguments)
        .await
        .unwrap();
    let complete = |w: &[hotcell_client::v1::WorkerInfo]| {
        let count = |state| w.iter().filter(|w| w.state() == state).count();
        (count(WorkerState::Ready), count(WorkerState::Standby)) == (2, 2)
    };
    cluster.workers(complete).await.unwrap();
    let client = cluster.client().await.unwrap();
    let options = GenerateOptions {
        max_tokens: 2000,
        ignore_eos: true,
        ..GenerateOptions::default()
    };
    let mut stream = client.generate("In the beginning", options).await.unwrap();
    for _ in 0..5 {
        stream.next().await.unwrap().unwrap();
    }
    let workers = children(cluster.scheduler.pid());
    assert_eq!(workers.len(), 4);
    kill_and_look(&mut cluster.scheduler, &workers);
    again(&mut cluster).await;
}

#[tokio::test]
async fn a_stopped_worker_ends_with_a_killed_scheduler() {
    let mut cluster = Cluster::with_model("kjv", &kjv(), &[]).await.unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let workers = children(cluster.scheduler.pid());
    for &pid in &workers {
        signal_pid(pid, Signal::STOP).unwrap();
    }
    kill_and_look(&mut cluster.scheduler, &workers);
    again(&mut cluster).await;
}

#[tokio::test]
async fn a_loading_worker_ends_with_a_killed_scheduler() {
    let folder = hotcell_tests::cluster::private_folder().unwrap();
    let measures = Measures {
        hidden: 512,
        layers: 4,
        heads: 8,
        kv_heads: 8,
        inner: 1408,
        vocab: 4096,
        context: 256,
        tied: true,
    };
    write(folder.path(), &measures).unwrap();
    let mut cluster = Cluster::start(&[]).await.unwrap();
    let ready =
        |w: &[hotcell_client::v1::WorkerInfo]| w.iter().all(|w| w.state() == WorkerState::Ready);
    cluster.workers(ready).await.unwrap();
    let workers = children(cluster.scheduler.pid());
    assert_eq!(workers.len(), 1);
    // Stopped before it hears of the load, it is in the middle of it for as long as need be.
    for &pid in &workers {
        signal_pid(pid, Signal::STOP).unwrap();
    }
    let client = cluster.client().await.unwrap();
    let path = folder.path().to_str().unwrap().to_owned();
    let load = tokio::spawn(async move { client.load("big", &path).await });
    let looking = cluster.client().await.unwrap();
    let began = Instant::now();
    loop {
        let models = looking.models().await.unwrap();
        if models
            .iter()
            .any(|m| m.state() == hotcell_client::v1::ModelState::Loading)
        {
            break;
        }
        assert!(began.elapsed() < SOON, "{models:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for &pid in &workers {
        signal_pid(pid, Signal::CONT).unwrap();
    }
    kill_and_look(&mut cluster.scheduler, &workers);
    assert!(load.await.unwrap().is_err());
    again(&mut cluster).await;
}

// Not on one thread: the wait would keep this client's connections open, which a drain waits for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scheduler_reaps_what_it_starts_and_leaves_only_its_lock_behind() {
    let arguments = [
        "--standby",
        "--restart-budget",
        "1000",
        "--restart-backoff",
        "1ms",
    ];
    let mut cluster = Cluster::with_model("m", &golden("llama2"), &arguments)
        .await
        .unwrap();
    let complete = |w: &[hotcell_client::v1::WorkerInfo]| {
        w.len() == 2
            && w.iter()
                .all(|w| matches!(w.state(), WorkerState::Ready | WorkerState::Standby))
    };
    let descriptors = |pid: u32| {
        std::fs::read_dir(format!("/proc/{pid}/fd"))
            .unwrap()
            .count()
    };
    let scheduler = cluster.scheduler.pid();
    cluster.workers(complete).await.unwrap();
    let mut held = Vec::new();
    for _ in 0..6 {
        held.push(descriptors(scheduler));
        let old = children(scheduler);
        for &pid in &old {
            let _ = signal_pid(pid, Signal::KILL);
        }
        let anew = |w: &[hotcell_client::v1::WorkerInfo]| {
            complete(w) && w.iter().all(|w| !old.contains(&w.pid) && runs(w.pid))
        };
        cluster.workers(anew).await.unwrap();
    }
    let began = Instant::now();
    let dead = || {
        let children = children(scheduler);
        children
            .into_iter()
            .find(|&pid| stat(pid).is_some_and(|(state, _)| state == 'Z'))
    };
    while let Some(pid) = dead() {
        assert!(began.elapsed() < SOON, "{pid} is not reaped");
        std::thread::sleep(Duration::from_millis(5));
    }
    // A client's connection may be on its way out.
    let most = *held.iter().max().unwrap();
    let few = held[0] + 4;
    assert!(most <= few, "descriptors pile up: {held:?}");

    cluster.scheduler.signal(Signal::TERM).unwrap();
    assert!(cluster.scheduler.wait().unwrap().success());
    let left = std::fs::read_dir(cluster.folder.path()).unwrap();
    let left: BTreeSet<PathBuf> = left.map(|entry| entry.unwrap().path()).collect();
    let is_lock = |path: &PathBuf| path.extension().is_some_and(|e| e == "lock");
    assert!(left.iter().all(is_lock), "{left:?}");
}

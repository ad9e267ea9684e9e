//! Standby workers as one sees them from outside: they wait, take a dead worker's place, and are replaced.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use hotcell_client::{
    Address, Event, GenerateOptions,
    tensor::{Session, SessionOptions},
    v1::{self, WorkerState},
};
use hotcell_tests::cluster::{Cluster, all_have, golden, kjv, signal_pid};
use rustix::process::Signal;

fn find<'a>(workers: &'a [v1::WorkerInfo], id: &str) -> Option<&'a v1::WorkerInfo> {
    workers.iter().find(|w| w.id == id)
}

/// Whether w0 serves and its standby waits, both with these models and no others.
fn complete(models: &'static [&'static str]) -> impl Fn(&[v1::WorkerInfo]) -> bool {
    move |workers| {
        let is = |id: &str, state| {
            find(workers, id).is_some_and(|w| w.state() == state && w.models == models)
        };
        is("w0", WorkerState::Ready) && is("w0.standby", WorkerState::Standby)
    }
}

async fn cluster() -> (Cluster, Vec<v1::WorkerInfo>) {
    let cluster = Cluster::with_model("kjv", &kjv(), &["--standby"])
        .await
        .unwrap();
    let workers = cluster.workers(complete(&["kjv"])).await.unwrap();
    (cluster, workers)
}

fn sampled(tokens: u32) -> GenerateOptions {
    GenerateOptions {
        sampling: v1::Sampling {
            temperature: Some(0.9),
            frequency_penalty: Some(0.2),
            ..v1::Sampling::default()
        },
        seed: Some(11),
        max_tokens: tokens,
        ignore_eos: true,
        ..GenerateOptions::default()
    }
}

fn alive(pid: u32) -> bool {
    std::path::Path::new(&format!("/proc/{pid}")).exists()
}

#[tokio::test]
async fn a_standby_takes_a_dead_workers_place_and_its_streams() {
    let (cluster, workers) = cluster().await;
    let client = cluster.client().await.unwrap();
    let prompt = "In the beginning";
    let undisturbed = client.generate(prompt, sampled(60)).await.unwrap();
    let undisturbed = undisturbed.complete().await.unwrap();
    let mut before = workers;
    for at in [1, 20] {
        let own = find(&before, "w0").unwrap();
        let standby = find(&before, "w0.standby").unwrap();
        assert_eq!(standby.lease.as_ref().unwrap().device, "cpu:0");
        let mut stream = client.generate(prompt, sampled(60)).await.unwrap();
        let mut tokens = Vec::new();
        let mut survived = None;
        while let Some(event) = stream.next().await {
            match event.unwrap() {
                Event::Delta(delta) => tokens.extend(delta.token_ids),
                Event::Finished(finished) => survived = Some(finished.deaths_survived),
                Event::Accepted(_) => {}
            }
            if tokens.len() == at && alive(own.pid) {
                signal_pid(own.pid, Signal::KILL).unwrap();
            }
        }
        assert_eq!(tokens, undisturbed.token_ids);
        assert_eq!(survived, Some(1));
        let after = cluster.workers(complete(&["kjv"])).await.unwrap();
        let (promoted, next) = (
            find(&after, "w0").unwrap(),
            find(&after, "w0.standby").unwrap(),
        );
        assert_eq!(promoted.pid, standby.pid, "the standby was not used");
        assert_eq!(promoted.epoch, own.epoch + 1);
        assert_ne!(next.pid, standby.pid);
        // What a session is named after has to be what it is now.
        let address: Address = format!("unix:{}", cluster.socket.display())
            .parse()
            .unwrap();
        let session = Session::open(&address, SessionOptions::default())
            .await
            .unwrap();
        assert_eq!(session.describe().await.unwrap().worker, "w0");
        let two = session.full(1.0f32, &[]) + 1.0;
        assert_eq!(two.item::<f32>().await.unwrap(), 2.0);
        before = after;
    }
}

#[tokio::test]
async fn a_standby_loads_and_forgets_what_workers_do() {
    let (cluster, workers) = cluster().await;
    let client = cluster.client().await.unwrap();
    let tiny = golden("gguf/llama3-q8_0.gguf");
    client.load("tiny", tiny.to_str().unwrap()).await.unwrap();
    let loaded = cluster.workers(complete(&["kjv", "tiny"])).await.unwrap();
    client.unload("kjv").await.unwrap();
    let left = cluster.workers(complete(&["tiny"])).await.unwrap();
    for (now, then) in [(&loaded, &workers), (&left, &workers)] {
        let pid = |all| find(all, "w0.standby").unwrap().pid;
        assert_eq!(pid(now), pid(then), "a new process loaded it");
    }
    signal_pid(find(&left, "w0").unwrap().pid, Signal::KILL).unwrap();
    let promoted = cluster.workers(all_have("tiny")).await.unwrap();
    assert_eq!(find(&promoted, "w0").unwrap().models, ["tiny"]);
}

#[tokio::test]
async fn a_standby_that_dies_is_replaced_and_nobody_notices() {
    let (cluster, workers) = cluster().await;
    let (own, standby) = (
        find(&workers, "w0").unwrap().clone(),
        find(&workers, "w0.standby").unwrap().pid,
    );
    signal_pid(standby, Signal::KILL).unwrap();
    let replaced = |all: &[v1::WorkerInfo]| {
        complete(&["kjv"])(all) && find(all, "w0.standby").unwrap().pid != standby
    };
    let after = cluster.workers(replaced).await.unwrap();
    let now = find(&after, "w0").unwrap();
    assert_eq!(
        (now.pid, now.epoch, now.deaths),
        (own.pid, own.epoch, own.deaths)
    );
    // Killed again while nobody is there yet to take the place: it is started as without standbys.
    signal_pid(find(&after, "w0.standby").unwrap().pid, Signal::KILL).unwrap();
    signal_pid(own.pid, Signal::KILL).unwrap();
    let client = cluster.client().await.unwrap();
    let said = client.generate("Now", sampled(8)).await.unwrap();
    assert_eq!(said.complete().await.unwrap().token_ids.len(), 8);
}

// Not on one thread: the wait would keep this client's connections open, which a drain waits for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn standbys_end_with_their_scheduler() {
    let (mut cluster, workers) = cluster().await;
    cluster.scheduler.signal(Signal::TERM).unwrap();
    assert!(cluster.scheduler.wait().unwrap().success());
    for worker in &workers {
        assert!(!alive(worker.pid), "{} lives on", worker.id);
    }
}

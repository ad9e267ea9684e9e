//! Throw-away workers are confined as those that serve are.

use hotcell_client::{
    Client,
    control::Messages,
    v1::{self, captured},
};
use hotcell_tests::{cluster::report, fault::Trespass};

use super::long;

/// A throw-away worker that waits for a debugger, and lives as long as what it tells is listened to.
async fn held(client: &Client) -> (v1::CaptureHeld, Messages<v1::Captured>) {
    let request = v1::ReplayRequest {
        which: Some(v1::replay_request::Which::RequestId("again".to_owned())),
        // So long that it can be looked at.
        hold_ms: 600_000,
        hurry: true,
        ..v1::ReplayRequest::default()
    };
    let mut told = client.replay(request).await.unwrap();
    match told.next().await.unwrap().unwrap().kind {
        Some(captured::Kind::Held(held)) => (held, told),
        other => panic!("{other:?}"),
    }
}

/// What the kernel knows of how each thread of a process is confined.
fn confinement(pid: u32) -> Vec<Vec<String>> {
    const FIELDS: [&str; 8] = [
        "NoNewPrivs:",
        "Seccomp:",
        "Seccomp_filters:",
        "CapInh:",
        "CapPrm:",
        "CapEff:",
        "CapAmb:",
        "Groups:",
    ];
    let of = |thread: std::io::Result<std::fs::DirEntry>| {
        let path = thread.unwrap().path().join("status");
        let status = std::fs::read_to_string(path).unwrap();
        let field = |name: &&str| {
            let found = status.lines().find(|line| line.starts_with(*name));
            found
                .unwrap_or_else(|| panic!("no {name} in {status}"))
                .to_owned()
        };
        FIELDS.iter().map(field).collect()
    };
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    threads.map(of).collect()
}

#[tokio::test]
async fn a_throw_away_worker_is_confined_as_one_that_serves() {
    let cluster = super::fault_cluster().await;
    let client = cluster.client().await.unwrap();
    let stream = client.generate("Now", long("again")).await.unwrap();
    stream.complete().await.unwrap();
    let (replay, _told) = held(&client).await;
    assert!(replay.worker.starts_with("w0.replay"), "{}", replay.worker);
    let workers = cluster.workers(|_| true).await.unwrap();
    let of = |id: &str| workers.iter().find(|worker| worker.id == id).unwrap();
    let (aside, serves) = (of(&replay.worker), of("w0"));
    assert_eq!(aside.pid, replay.pid);

    // What the kernel says, of every thread.
    let (confined, known) = (confinement(replay.pid), confinement(serves.pid));
    assert!(confined.len() > 1, "{confined:?}");
    for thread in &confined {
        assert_eq!(thread[0], "NoNewPrivs:\t1");
        assert_eq!(thread[1], "Seccomp:\t2");
        assert_eq!(*thread, known[0]);
        for capabilities in &thread[3..7] {
            assert!(capabilities.ends_with("\t0000000000000000"), "{thread:?}");
        }
    }
    // What each says of itself.
    let layers = |worker: &v1::WorkerInfo| -> Vec<(String, v1::LayerState)> {
        let layers = worker.layers.iter();
        layers
            .map(|layer| (layer.layer.clone(), layer.state()))
            .collect()
    };
    assert_eq!(layers(aside), layers(serves));
    let all = layers(aside);
    for layer in ["no-new-privs", "landlock", "seccomp"] {
        assert!(all.iter().any(|(name, _)| name == layer), "{all:?}");
    }
}

#[tokio::test]
async fn a_throw_away_worker_can_open_no_file_and_reach_nobody() {
    let cluster = super::fault_cluster().await;
    let client = cluster.client().await.unwrap();
    let stream = client.generate("Now", long("again")).await.unwrap();
    stream.complete().await.unwrap();
    let serves = cluster.workers(|_| true).await.unwrap()[0].pid;
    // Refused, and it lives on.
    let (replay, told) = held(&client).await;
    for trespass in [
        Trespass::OpenPasswords,
        Trespass::OpenScheduler,
        Trespass::OpenNeighbour,
        Trespass::ReopenWeights,
        Trespass::CreateFile,
    ] {
        trespass.order(replay.pid).unwrap();
        let (what, worker) = trespass.told(&cluster).await.unwrap();
        let refused = format!("refused with {}", libc::EACCES);
        assert_eq!(what, refused, "{trespass:?}");
        assert!(worker.contains(&replay.worker), "{trespass:?}: {worker}");
    }
    assert!(hotcell_tests::cluster::lives(replay.pid));
    drop(told);
    // It dies of it.
    for (trespass, name) in [
        (Trespass::Socket, "socket"),
        (Trespass::Connect, "connect"),
        (Trespass::Execute, "execve"),
        (Trespass::KillScheduler, "kill"),
    ] {
        let (replay, _told) = held(&client).await;
        trespass.order(replay.pid).unwrap();
        let id = format!("{}.{}", replay.worker, replay.epoch);
        let report = report(&client, &id).await.unwrap();
        let words = format!("forbidden system call {name}(");
        assert!(
            report.reason.contains(&words),
            "{trespass:?}: {}",
            report.reason
        );
    }
    // Who serves has noticed nothing.
    let workers = cluster.workers(|_| true).await.unwrap();
    let w0 = workers.iter().find(|worker| worker.id == "w0").unwrap();
    assert_eq!((w0.pid, w0.deaths), (serves, 0));
}

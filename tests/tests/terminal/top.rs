//! `hotcell top`: what it shows while workers serve and die, and that it leaves the terminal as it was.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use hotcell_client::GenerateOptions;
use hotcell_tests::cluster::{Cluster, SOON, all_have, hotcell, is_own, kjv, signal_pid};
use rustix::process::Signal;
use tokio::task::JoinSet;

use super::screen::Terminal;

fn top(cluster: &Cluster) -> Terminal {
    top_every(cluster, "100ms")
}

/// The real command in a terminal, which looks again this often.
pub(super) fn top_every(cluster: &Cluster, every: &str) -> Terminal {
    let mut command = hotcell(cluster.folder.path()).unwrap();
    let address = format!("unix:{}", cluster.socket.display());
    command.args(["--address", &address, "top", "--every", every]);
    Terminal::start(command)
}

/// Streams that go on until they are dropped, one request after another for each of these names.
pub(super) async fn streams(cluster: &Cluster, names: &[&str]) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    for name in names {
        let (client, name) = (cluster.client().await.unwrap(), (*name).to_owned());
        tasks.spawn(async move {
            for number in 0.. {
                let options = GenerateOptions {
                    request_id: format!("{name}-{number}"),
                    ignore_eos: true,
                    ..GenerateOptions::default()
                };
                let stream = client.generate("In the beginning", options).await;
                stream.unwrap().complete().await.unwrap();
            }
        });
    }
    tasks
}

fn has_file(folder: &Path, ending: &str) -> bool {
    let mut files = std::fs::read_dir(folder).unwrap();
    files.any(|f| f.unwrap().path().extension().is_some_and(|e| e == ending))
}

#[tokio::test]
async fn a_host_is_watched_while_a_worker_dies() {
    let cluster = Cluster::with_model("kjv", &kjv(), &[]).await.unwrap();
    let client = cluster.client().await.unwrap();
    let mut top = top(&cluster);
    top.until("a worker", |t| {
        t.line("w0").get(1).is_some_and(|s| s == "ready")
    })
    .await;
    assert!(top.text().contains("1 workers"), "{}", top.text());
    // What it serves, while it serves it: one request after another. While the worker is drained none is taken.
    let drained = Arc::new(AtomicBool::new(false));
    let served = tokio::spawn({
        let drained = drained.clone();
        async move {
            for number in 0.. {
                let options = GenerateOptions {
                    request_id: format!("moses-{number}"),
                    ignore_eos: true,
                    ..GenerateOptions::default()
                };
                let ended = match client.generate("In the beginning", options).await {
                    Ok(stream) => stream.complete().await.map(|_| ()),
                    Err(error) => Err(error),
                };
                if let Err(error) = ended {
                    assert!(drained.load(Ordering::SeqCst), "{error}");
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        }
    });
    top.until("a request", |t| t.line("moses").contains(&"drawing".into()))
        .await;
    top.until("tokens", |t| {
        t.line("w0")
            .get(9)
            .is_some_and(|n| n.parse::<u64>().is_ok_and(|n| n > 0))
    })
    .await;
    // Another size: all of it is drawn anew.
    top.resize(30, 100);
    top.until("the keys at the foot", |t| {
        let text = t.text();
        text.lines()
            .nth(29)
            .is_some_and(|l| l.starts_with("q quit"))
    })
    .await;
    top.resize(40, 130);
    let workers = cluster.workers(all_have("kjv")).await.unwrap();
    let worker = workers.iter().find(|w| is_own(w)).unwrap();
    signal_pid(worker.pid, Signal::KILL).unwrap();
    top.until("its death", |t| t.text().contains("worker_died  w0"))
        .await;
    top.until("its next process", |t| {
        let line = t.line("w0");
        line.get(1).is_some_and(|s| s == "ready" || s == "busy")
            && line.get(3) != Some(&worker.pid.to_string())
    })
    .await;
    top.press("\r");
    top.until("the report", |t| {
        t.text().contains("Last death") && t.text().contains("w0.1")
    })
    .await;
    top.press("x");
    top.until("the workers again", |t| t.text().contains("WORKER"))
        .await;
    // It may be listed a moment before it can be looked into.
    let start = Instant::now();
    while !top.text().contains(".pftrace: ") {
        assert!(start.elapsed() < SOON, "{}", top.text());
        top.press("t");
        tokio::time::sleep(Duration::from_millis(1500)).await;
    }
    assert!(has_file(cluster.folder.path(), "pftrace"));
    // What is computed for the next request that comes.
    let start = Instant::now();
    while !top.text().contains(".hotcell: ") {
        assert!(start.elapsed() < SOON, "{}", top.text());
        top.press("c");
        tokio::time::sleep(Duration::from_millis(1500)).await;
    }
    assert!(has_file(cluster.folder.path(), "hotcell"));
    // Another process, under which its streams go on.
    let before = top.line("w0").get(3).cloned();
    top.press("R");
    top.until("another process", |t| {
        let line = t.line("w0");
        line.get(1).is_some_and(|s| s == "ready" || s == "busy") && line.get(3) != before.as_ref()
    })
    .await;
    // It gets no new requests: what runs ends, and the next one waits for nobody and fails.
    drained.store(true, Ordering::SeqCst);
    top.press("d");
    top.until("that it is drained", |t| {
        t.line("w0")
            .get(1)
            .is_some_and(|s| s == "drained" || s == "draining")
    })
    .await;
    top.press("r");
    top.until("that it serves again", |t| {
        t.line("w0")
            .get(1)
            .is_some_and(|s| s == "ready" || s == "busy")
    })
    .await;
    top.press("?");
    top.until("help", |t| {
        t.text().contains("the report of its last death")
    })
    .await;
    top.press("x");
    assert!(!served.is_finished(), "{:?}", served.await);
    served.abort();
    top.press("q");
    assert!(top.end().await.success());
}

#[tokio::test]
async fn devices_and_the_streams_of_all_workers_have_pages() {
    let cluster = Cluster::with_model("kjv", &kjv(), &["--devices", "cpu:2"])
        .await
        .unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let names = ["adam", "eve", "cain", "abel"];
    let mut tasks = streams(&cluster, &names).await;
    let mut top = top(&cluster);
    top.until("two devices", |t| t.text().contains("2 devices, 2 workers"))
        .await;
    top.press("s");
    // Whose they are, that they draw, and how fast.
    let drawn = |t: &Terminal, name: &str| {
        let line = t.line(&format!("{name}-"));
        let number = |at: usize| line.get(at).and_then(|n| n.parse::<f64>().ok());
        let draws = line.get(3).is_some_and(|state| state == "drawing")
            && number(4).is_some_and(|prompt| prompt > 0.0)
            && number(5).is_some_and(|tokens| tokens > 0.0)
            && number(6).is_some_and(|pace| pace > 0.0);
        draws.then(|| line[1].clone())
    };
    for name in names {
        top.until(name, |t| drawn(t, name).is_some()).await;
    }
    top.until("both workers", |t| {
        let all: BTreeSet<String> = names.iter().filter_map(|name| drawn(t, name)).collect();
        all == BTreeSet::from(["w0".to_owned(), "w1".to_owned()])
    })
    .await;
    assert!(
        top.text().contains("requests are under way"),
        "{}",
        top.text()
    );
    top.press("v");
    top.until("two devices", |t| {
        t.line("cpu:0").get(2).is_some_and(|w| w == "w0")
            && t.line("cpu:1").get(2).is_some_and(|w| w == "w1")
    })
    .await;
    let device = top.line("cpu:1");
    assert_eq!(device[1], "cpu", "{device:?}");
    assert!(device[3].parse::<f64>().unwrap() > 0.0, "{device:?}");
    assert!(device[5].parse::<f64>().unwrap() > 0.0, "{device:?}");
    assert!(device.contains(&"ok".to_owned()), "{device:?}");
    top.press("j");
    top.until("the worker of the other one", |t| {
        let line = t.line("w1");
        line.get(1).is_some_and(|word| word == "is") && line.contains(&"kjv".to_owned())
    })
    .await;
    // With little room, the same in few columns.
    top.resize(10, 40);
    top.until("few columns", |t| {
        let text = t.text();
        text.contains("HEALTH") && !text.contains("BACKEND") && !t.line("cpu:1").is_empty()
    })
    .await;
    top.press("s");
    top.until("streams in few columns", |t| {
        let few = |name: &&str| t.line(name).get(1).is_some_and(|state| state == "drawing");
        names.iter().any(few)
    })
    .await;
    top.press("x");
    top.resize(40, 130);
    top.until("the workers again", |t| t.text().contains("WORKER"))
        .await;
    assert!(tasks.try_join_next().is_none());
    top.press("q");
    assert!(top.end().await.success());
}

#[tokio::test]
async fn a_host_is_watched_over_tcp() {
    let address = hotcell_tests::cluster::free_address().unwrap().to_string();
    let arguments = ["--devices", "cpu:1", "--listen", &address];
    let cluster = Cluster::with_model("kjv", &kjv(), &arguments)
        .await
        .unwrap();
    let mut command = hotcell(cluster.folder.path()).unwrap();
    command.args(["--address", &address, "top", "--every", "100ms"]);
    let mut top = Terminal::start(command);
    top.until("a worker", |t| {
        t.line("w0").get(1).is_some_and(|s| s == "ready")
    })
    .await;
    // Without a token nobody looks into workers from there, and it says so.
    top.press("t");
    top.until("that it may not", |t| t.text().contains("--tokens"))
        .await;
    // Its devices it sees, and why it sees no streams.
    top.press("v");
    top.until("its device", |t| t.line("cpu:0").contains(&"ok".into()))
        .await;
    top.press("s");
    top.until("why there are none", |t| {
        t.line("w0:").iter().any(|word| word.contains("--tokens"))
    })
    .await;
    top.press("x");
    top.press("q");
    assert!(top.end().await.success());
}

#[tokio::test]
async fn whatever_ends_it_gives_the_terminal_back() {
    let mut cluster = Cluster::ready().await.unwrap();
    for signal in [Signal::TERM, Signal::HUP, Signal::INT] {
        let mut top = top(&cluster);
        top.until("a worker", |t| !t.line("w0").is_empty()).await;
        signal_pid(top.child.id(), signal).unwrap();
        assert!(top.end().await.success(), "{signal:?}");
    }
    let mut top = top(&cluster);
    top.until("a worker", |t| !t.line("w0").is_empty()).await;
    // A scheduler that is gone is waited for.
    cluster.scheduler.signal(Signal::TERM).unwrap();
    cluster.scheduler.wait().unwrap();
    top.until("that it is gone", |t| t.text().contains("does not answer"))
        .await;
    top.press("\u{3}");
    assert!(top.end().await.success());
    // Without a terminal there is nothing to draw on.
    let mut command = hotcell(cluster.folder.path()).unwrap();
    let output = command.arg("top").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("needs a terminal"), "{said}");
}

#[tokio::test]
async fn it_ends_with_its_terminal() {
    let cluster = Cluster::ready().await.unwrap();
    let starts = [Terminal::start, Terminal::start_detached];
    for (start, detached) in starts.into_iter().zip([false, true]) {
        let mut command = hotcell(cluster.folder.path()).unwrap();
        let address = format!("unix:{}", cluster.socket.display());
        // Nothing is drawn meanwhile that would tell.
        command.args(["--address", &address, "top", "--every", "1m"]);
        let top = start(command);
        top.until("a worker", |t| !t.line("w0").is_empty()).await;
        let status = top.close().await;
        assert!(status.success(), "detached: {detached}, {status}");
    }
}

/// Whether a thread of a process is in a call of `write`, now and a moment later.
fn writes(pid: u32) -> bool {
    let tasks = PathBuf::from(format!("/proc/{pid}/task"));
    let calls = || -> Vec<(OsString, String)> {
        let tasks = fs::read_dir(&tasks).into_iter().flatten().flatten();
        let call = |task: fs::DirEntry| {
            let call = fs::read_to_string(task.path().join("syscall")).ok()?;
            let is_write = call.split(' ').next() == Some(&libc::SYS_write.to_string());
            is_write.then(|| (task.file_name(), call))
        };
        tasks.filter_map(call).collect()
    };
    let before = calls();
    std::thread::sleep(Duration::from_millis(if before.is_empty() {
        0
    } else {
        200
    }));
    calls().iter().any(|call| before.contains(call))
}

#[tokio::test]
async fn a_terminal_that_stands_still_does_not_hold_it() {
    let cluster = Cluster::ready().await.unwrap();
    for signal in [Signal::TERM, Signal::INT] {
        let mut top = top(&cluster);
        top.until("a worker", |t| !t.line("w0").is_empty()).await;
        top.hold();
        // More than a terminal keeps for who reads it, one frame after another: fewer bytes where frames come late.
        let start = Instant::now();
        while !writes(top.child.id()) {
            assert!(
                start.elapsed() < 3 * SOON,
                "it never waits for its terminal"
            );
            for key in ["?", "x"] {
                top.press(key);
                tokio::time::sleep(Duration::from_millis(60)).await;
            }
        }
        signal_pid(top.child.id(), signal).unwrap();
        assert_eq!(top.ended().await.code(), Some(130), "{signal:?}");
        top.has_its_modes();
    }
}

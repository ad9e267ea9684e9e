//! Crash replay: the request that killed a worker kills a throw-away worker the same way, and the node is told.

use std::{
    io::{BufRead as _, BufReader},
    process::Stdio,
};

use hotcell_client::{Client, GenerateOptions, Prompt, v1};
use hotcell_tests::{
    cluster::{Cluster, SOON, all_have, is_own, signal_pid},
    fault::{CRASH, CRASH_NODE, POISON},
};

use rustix::process::Signal;

use super::{hotcell, long};

/// Waits until a worker computes with packed weights: whoever packs them reads them, too, and would die of [`CRASH`] first.
pub(super) async fn packed(client: &Client) {
    let begun = std::time::Instant::now();
    loop {
        let models = client.models().await.unwrap();
        let packed = &models[0].packed;
        let is_ready = |p: &v1::PackedInfo| p.state() == v1::PackedState::Ready;
        if packed.iter().any(|p| is_ready(p) && !p.workers.is_empty()) {
            break;
        }
        assert!(begun.elapsed() < SOON, "{packed:?}");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

/// The report of a worker that died of a request of this id, whose prompt is these tokens; all have the model again by then.
pub(super) async fn killed(
    cluster: &Cluster,
    model: &'static str,
    (id, prompt): (&str, &[u32]),
) -> v1::CrashReport {
    let client = cluster.client().await.unwrap();
    let options = GenerateOptions {
        deadline: Some(SOON * 2),
        ..long(id)
    };
    let prompt = Prompt::Ids(prompt.to_vec());
    let stream = client.generate(prompt, options).await.unwrap();
    stream.complete().await.unwrap_err();
    cluster.workers(all_have(model)).await.unwrap();
    let crash = client.crashes().await.unwrap().pop().unwrap();
    client.crash(&crash.id).await.unwrap()
}

/// The lines of JSON that the command says: where it was seen, what held there, and at last what came of it.
pub(super) fn lines(said: &str) -> Vec<serde_json::Value> {
    let line = |line| serde_json::from_str(line).unwrap();
    said.lines().map(line).collect()
}

#[tokio::test]
async fn a_request_that_kills_its_workers_does_so_again_and_harms_nobody_else() {
    let cluster = super::fault_cluster().await;
    let prompt = [&[0, 312][..], &POISON].concat();
    let crash = killed(&cluster, "kjv", ("poison", &prompt)).await;
    let deaths = cluster.workers(|_| true).await.unwrap()[0].deaths;

    let said = hotcell(&cluster, &["--json", "crashes", "replay", &crash.id]);
    let outcome = lines(&said).pop().unwrap();
    assert_eq!(outcome["request_id"], "poison", "{said}");
    assert_eq!(outcome["outcome"], "died", "{said}");
    assert_eq!(outcome["same"], true, "{said}");
    let worker = outcome["crash"]["worker"].as_str().unwrap();
    assert!(worker.starts_with("w0.replay"), "{said}");
    let said = hotcell(&cluster, &["crashes", "replay", &crash.id]);
    assert!(
        said.contains("died the same way: killed by SIGSEGV"),
        "{said}"
    );
    let after = cluster.workers(|_| true).await.unwrap();
    assert_eq!(after.iter().find(|w| w.id == "w0").unwrap().deaths, deaths);
}

#[tokio::test]
async fn a_crash_inside_a_kernel_is_named_by_its_node_when_it_is_run_again() {
    let cluster = super::fault_cluster().await;
    let client = cluster.client().await.unwrap();
    packed(&client).await;
    let prompt = [&[0, 312], &CRASH[..], &[17]].concat();
    let crash = killed(&cluster, "kjv", ("strikes", &prompt)).await;
    let seen = crash.blackbox.unwrap();
    let signal = seen.signal.unwrap();
    assert_eq!(signal.name, "SIGSEGV");
    assert!(signal.address != 0 && seen.node > 0, "{signal:?}");
    let said = hotcell(&cluster, &["--json", "crashes", "replay", &crash.id]);
    let outcome = lines(&said).pop().unwrap();
    assert_eq!(outcome["outcome"], "died", "{said}");
    let again = &outcome["crash"]["blackbox"];
    assert_eq!(again["signal"]["name"], "SIGSEGV", "{said}");
    // One of several threads may be in the node already while the black box still names the one before it.
    let node = again["node"].as_u64().unwrap();
    assert!(
        node.abs_diff(seen.node.into()) <= 1,
        "{node}, before {}",
        seen.node
    );
    let named = |op: &str| ["mul_mat", "swiglu"].contains(&op);
    assert!(
        named(&seen.op) && again["op"].as_str().is_some_and(named),
        "{said}"
    );
    // The model's node, of a plan of its body: the one that reads the memory, or the one before it.
    assert_eq!(
        (seen.part.as_str(), &again["part"]),
        ("body", &"body".into())
    );
    assert!(CRASH_NODE.contains("layers.3.mlp.down_proj"));
    let name = match again["op"].as_str() {
        Some("mul_mat") => "layers.3.mul_mat.6",
        _ => "layers.3.swiglu.0",
    };
    assert_eq!(outcome["node"], name, "{said}");
}

/// Attaches to a process for a while as a debugger would, which has it stand still for as long as it reads symbols, and
/// returns how that went.
fn attach(pid: u32) -> std::io::Result<()> {
    let pid = libc::pid_t::try_from(pid).unwrap();
    let ask = |request| {
        let none = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: it reads and writes no memory of ours.
        match unsafe { libc::ptrace(request, pid, none, none) } {
            0.. => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    let stopped = || {
        let mut status = 0;
        // SAFETY: `status` is written, and lives here.
        let waited = unsafe { libc::waitpid(pid, &mut status, libc::__WALL) };
        waited == pid && libc::WIFSTOPPED(status)
    };
    ask(libc::PTRACE_SEIZE)?;
    ask(libc::PTRACE_INTERRUPT)?;
    assert!(stopped());
    // Longer than anybody waits for an answer of one that is not looked into.
    std::thread::sleep(std::time::Duration::from_secs(4));
    ask(libc::PTRACE_CONT)?;
    std::thread::sleep(std::time::Duration::from_millis(300));
    // It may have died by then, which the same wait tells.
    let _ = ask(libc::PTRACE_INTERRUPT);
    if stopped() {
        let _ = ask(libc::PTRACE_DETACH);
    }
    Ok(())
}

const SCHED_IDLE: i32 = libc::SCHED_IDLE;

/// How each thread of a process is scheduled: `proc_pid_stat(5)`, the policy.
fn scheduling(pid: u32) -> Vec<i32> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let of = |thread: std::io::Result<std::fs::DirEntry>| {
        let line = std::fs::read_to_string(thread.unwrap().path().join("stat")).unwrap();
        // After the name, which may have spaces, the third field comes first.
        let (_, fields) = line.rsplit_once(')').unwrap();
        let fields: Vec<&str> = fields.split_whitespace().collect();
        fields[41 - 3].parse().unwrap()
    };
    let all: Vec<i32> = threads.map(of).collect();
    assert!(all.len() > 1, "{all:?}");
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_is_run_again_once_a_debugger_is_attached() {
    let cluster = super::fault_cluster().await;
    let prompt = [&[0, 312][..], &POISON].concat();
    let crash = killed(&cluster, "kjv", ("poison", &prompt)).await;
    let mut command = hotcell_tests::cluster::hotcell(cluster.folder.path()).unwrap();
    let address = format!("unix:{}", cluster.socket.display());
    command.args(["--address", &address, "--json", "crashes", "replay"]);
    command.args([&crash.id, "--gdb"]).stdout(Stdio::piped());
    let mut replay = command.spawn().unwrap();
    let mut said = BufReader::new(replay.stdout.take().unwrap()).lines();
    let mut next = || -> serde_json::Value {
        let line = said.next().unwrap().unwrap();
        serde_json::from_str(&line).unwrap()
    };
    let held = tokio::task::block_in_place(&mut next);
    let pid = held["pid"].as_u64().unwrap_or_else(|| panic!("{held}"));
    let pid = u32::try_from(pid).unwrap();
    assert_eq!(held["attach"], format!("gdb -p {pid} -ex continue"));
    assert_eq!(held["request_id"], "poison");
    // It waits for that, and for nothing else.
    tokio::time::sleep(std::time::Duration::from_millis(500)).await;
    let workers = cluster.workers(|_| true).await.unwrap();
    let its = workers.iter().find(|w| w.pid == pid).unwrap();
    assert_eq!(its.id, held["worker"].as_str().unwrap());
    // Whoever serves goes before it.
    let last = SCHED_IDLE;
    assert!(scheduling(pid).iter().all(|thread| *thread == last));
    let serves = workers.iter().find(|w| is_own(w)).unwrap();
    assert!(!scheduling(serves.pid).contains(&last));
    std::thread::spawn(move || attach(pid))
        .join()
        .unwrap()
        .unwrap();
    // Where it is seen comes before what came of it.
    let outcome = tokio::task::block_in_place(|| {
        std::iter::repeat_with(next).find(|line| line["outcome"].is_string())
    });
    let outcome = outcome.unwrap();
    assert_eq!(outcome["outcome"], "died", "{outcome}");
    assert_eq!(outcome["same"], true, "{outcome}");
    assert!(replay.wait().unwrap().success());
}

#[tokio::test]
async fn a_replay_that_hurries_takes_turns_with_who_serves() {
    let cluster = super::kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let stream = client.generate("Now", long("again")).await.unwrap();
    drop(stream.complete().await.unwrap());
    for hurry in [false, true] {
        let request = v1::ReplayRequest {
            which: Some(v1::replay_request::Which::RequestId("again".to_owned())),
            // So long that it can be looked at.
            hold_ms: 60_000,
            hurry,
            ..v1::ReplayRequest::default()
        };
        let mut told = client.replay(request).await.unwrap();
        let held = match told.next().await.unwrap().unwrap().kind {
            Some(v1::captured::Kind::Held(held)) => held,
            other => panic!("{other:?}"),
        };
        let idle = scheduling(held.pid)
            .into_iter()
            .filter(|thread| *thread == SCHED_IDLE);
        assert_eq!(idle.count() == 0, hurry);
    }
}

#[tokio::test]
async fn what_ran_when_a_worker_was_killed_runs_again_under_watchpoints() {
    let cluster = super::kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let mut stream = client.generate("Now", long("watched")).await.unwrap();
    stream.next().await.unwrap().unwrap();
    let worker = cluster.workers(all_have("kjv")).await.unwrap();
    signal_pid(worker[0].pid, Signal::KILL).unwrap();
    let tokens = stream.complete().await.unwrap().token_ids.len();
    let crash = client.crashes().await.unwrap().pop().unwrap();
    // However busy the machine is that this test runs on.
    let replay = ["crashes", "replay", &crash.id, "--hurry"];
    let replay = [&replay[..], &["--guard", "nan", "--guard"]].concat();

    let said = hotcell(
        &cluster,
        &[&["--json"], &replay[..], &["above=0", "--reveal"]].concat(),
    );
    let lines = lines(&said);
    let (outcome, told) = lines.split_last().unwrap();
    let hits = told.iter().filter(|line| line["condition"].is_string());
    let hits: Vec<&serde_json::Value> = hits.collect();
    assert_eq!(outcome["outcome"], "lived", "{said}");
    assert_eq!(outcome["tokens"], tokens, "{said}");
    let known: u64 = hits.iter().map(|hit| hit["missed"].as_u64().unwrap()).sum();
    // One for each token. What is left out after the last one that is told is counted nowhere.
    let last = hits.last().unwrap()["token"].as_u64().unwrap();
    assert_eq!(known + hits.len() as u64, last + 1, "{said}");
    assert!(last < tokens as u64, "{said}");
    for hit in &hits {
        assert_eq!(hit["condition"], "above=0", "{hit}");
        assert_eq!(hit["request_id"], "watched", "{hit}");
        assert!(hit["peak"].as_f64().unwrap() > 0.0, "{hit}");
        assert!(hit["further"].as_u64().unwrap() > 0, "{hit}");
    }
    // It is one of the model's first nodes that is named, in words too.
    let node = hits[0]["node"].as_str().unwrap();
    let said = hotcell(&cluster, &[&replay[..], &["above=0", "--reveal"]].concat());
    let named = |line: &str| line.starts_with("above=0 at ") && line.contains(node);
    assert!(said.lines().any(named), "{node}: {said}");
    // What does not hold is not told.
    let said = hotcell(&cluster, &[&replay[..], &["above=1e30"]].concat());
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.contains("lived, for all of its"), "{said}");
}

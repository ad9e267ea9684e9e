//! CUDA's worker on a driver without a device, through real processes: what there is, what it computes, how it ends.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    fs,
    os::unix::fs::{FileExt, symlink},
    path::PathBuf,
    time::{Duration, Instant},
};

use hotcell_client::{
    Address, Client, Completion, Event, GenerateOptions, Prompt, Reason,
    tensor::{Backend, BackendParams, DType, Tensor},
    v1::{self, TraceTrack},
};
use hotcell_tests::{
    answers::assert_same,
    cluster::{Cluster, SOON, all_have, binaries, children, golden, kjv, signal_pid},
    debugged::looked_into,
    fakecuda::FakeDriver,
};
use rustix::process::Signal;

/// A scheduler whose only workers are CUDA's, on a driver that does as `conf` says.
async fn cluster(conf: &str, arguments: &[&str]) -> (Cluster, FakeDriver) {
    let (driver, _) = FakeDriver::new(conf).unwrap().with_kernels().unwrap();
    let worker = driver.worker("hotcell-worker").unwrap();
    let worker = ["--worker-binary", worker.to_str().unwrap()];
    let cluster = Cluster::start(&[&worker, arguments].concat()).await;
    (cluster.unwrap(), driver)
}

fn is_ready(workers: &[v1::WorkerInfo]) -> bool {
    !workers.is_empty() && workers.iter().all(|w| w.state() == v1::WorkerState::Ready)
}

async fn session(cluster: &Cluster) -> Backend {
    let address: Address = format!("unix:{}", cluster.socket.display())
        .parse()
        .unwrap();
    let opened = Backend::open("cuda", BackendParams::at(address)).await;
    opened.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_computes_on_the_device() {
    let (cluster, _driver) = cluster("", &[]).await;
    let workers = cluster.workers(is_ready).await.unwrap();
    assert_eq!(workers[0].lease.as_ref().unwrap().device, "cuda:0");
    let shown = cluster.hotcell(&["devices"]).unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("Fake H100 at 0000:01:00.0"), "{shown}");
    let backend = session(&cluster).await;
    let session = backend.session();
    assert!(
        session.numerics().starts_with("cuda/sm_90/r"),
        "{}",
        session.numerics()
    );
    let x = session.arange(0.0, 1000.0, 1.0, DType::F32);
    let y = (&x * 2.0 + 1.0).reshape(&[10, 100]).transpose(&[1, 0]);
    let all = y.to_vec::<f32>().await.unwrap();
    let expected: Vec<f32> = (0..100)
        .flat_map(|column| (0..10).map(move |row| (row * 100 + column) as f32 * 2.0 + 1.0))
        .collect();
    assert_eq!(all, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_says_the_same_twice() {
    let (cluster, _driver) = cluster("", &[]).await;
    let client = cluster.client().await.unwrap();
    client.load("kjv", kjv().to_str().unwrap()).await.unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let said = async |temperature, top_k, top_p, logprobs| {
        let options = GenerateOptions {
            max_tokens: 12,
            sampling: v1::Sampling {
                temperature: Some(temperature),
                top_k,
                top_p,
                min_p: top_p.map(|p| p / 100.0),
                ..v1::Sampling::default()
            },
            // Each kind its own.
            seed: Some(3 + u64::from(top_k.unwrap_or(0)) + top_p.map_or(0, |_| 1)),
            logprobs,
            ..Default::default()
        };
        let prompt = Prompt::Text("In the beginning".to_owned());
        let stream = client.generate(prompt, options).await.unwrap();
        stream.complete().await.unwrap().token_ids
    };
    let mut seen: Vec<Vec<u32>> = Vec::new();
    for (temperature, top_k, top_p) in [
        (0.0, None, None),
        (1.0, None, None),
        (1.2, Some(7), None),
        (1.2, None, Some(0.9)),
        (1.5, Some(40), Some(0.7)),
    ] {
        let drawn = said(temperature, top_k, top_p, false).await;
        assert_eq!(drawn.len(), 12);
        // The device drew them; where log probabilities are wanted, the host does.
        for logprobs in [false, true] {
            assert_eq!(said(temperature, top_k, top_p, logprobs).await, drawn);
        }
        assert!(!seen.contains(&drawn), "{drawn:?}");
        seen.push(drawn);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn it_is_looked_into_like_any_other_and_its_own_clock_tells_what_nodes_take() {
    const SECOND: u64 = 1_000_000_000;
    // What nobody waits for: a second for each kernel.
    let (cluster, _driver) = cluster("clock = 1000\n", &[]).await;
    let client = cluster.client().await.unwrap();
    client.load("kjv", kjv().to_str().unwrap()).await.unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let cpu = Cluster::with_model("kjv", &kjv(), &["--devices", "cpu:1"]).await;
    let reference = cpu.unwrap();
    reference.workers(all_have("kjv")).await.unwrap();
    let reference = reference.client().await.unwrap();
    let begun = Instant::now();
    let spans = looked_into(&client, &reference, true, &["rms_norm", "mul_mat", "draw"])
        .await
        .unwrap();
    let nodes = spans
        .iter()
        .filter(|span| span.track() == TraceTrack::Nodes);
    let (mut count, mut sum) = (0, 0);
    for node in nodes {
        // Single floats of milliseconds.
        let rest = (node.duration_ns + SECOND / 4) % SECOND;
        assert!(rest < SECOND / 2, "{node:?}");
        // A copy is no kernel.
        count += u32::from(node.duration_ns > 0);
        sum += node.duration_ns;
    }
    // A step of the model has some sixty, of which nobody knows how many steps are seen whole.
    assert!(count > 50, "{count}");
    assert!(
        u128::from(sum) > begun.elapsed().as_nanos(),
        "{count} nodes"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_that_there_is_not_fails_a_call_and_no_process() {
    // Which of them is a client's is the worker's to know.
    let fails: String = (2..=6)
        .map(|nth| format!("fail = cuMemAlloc_v2:{nth}=2\n"))
        .collect();
    let (cluster, _driver) = cluster(&fails, &[]).await;
    let before = cluster.workers(is_ready).await.unwrap();
    let backend = session(&cluster).await;
    let session = backend.session();
    let mut refused = 0;
    for n in 1..=12usize {
        match session.full(n as f32, &[n]).to_vec::<f32>().await {
            Ok(all) => assert_eq!(all, vec![n as f32; n]),
            Err(error) => {
                assert_eq!(error.reason(), Reason::OutOfMemory, "{error:?}");
                refused += 1;
            }
        }
    }
    assert!((1..=5).contains(&refused), "{refused}");
    let after = cluster.workers(is_ready).await.unwrap();
    assert_eq!(after[0].pid, before[0].pid);
}

/// What is said of the first death of a worker in a session's first call, where this goes wrong.
async fn death(fail: &str, arguments: &[&str]) -> v1::CrashReport {
    let (cluster, _driver) = cluster(&format!("fail = {fail}\n"), arguments).await;
    cluster.workers(is_ready).await.unwrap();
    let backend = session(&cluster).await;
    let session = backend.session();
    let x = session.arange(0.0, 100.0, 1.0, DType::F32);
    let error = (&x * 2.0).to_vec::<f32>().await.unwrap_err();
    assert_eq!(error.reason(), Reason::WorkerLost, "{error:?}");
    let client = cluster.client().await.unwrap();
    let began = Instant::now();
    loop {
        if let Some(crash) = client.crashes().await.unwrap().pop() {
            // Another worker is there, for as long as nobody makes that call.
            cluster.workers(is_ready).await.unwrap();
            return crash;
        }
        assert!(began.elapsed() < SOON);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_that_is_lost_ends_the_process_with_its_own_code() {
    let crash = death("cuMemcpyDtoHAsync_v2:1=700", &[]).await;
    let text = format!("{crash:?}");
    assert!(text.contains("exit code 30"), "{text}");
    assert!(text.contains("CUDA_ERROR_ILLEGAL_ADDRESS (700)"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_crashes_ends_the_process() {
    let crash = death("cuMemcpyDtoHAsync_v2:1=abort", &[]).await;
    let text = format!("{crash:?}");
    assert!(text.contains("SIGSEGV"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_hangs_is_ended() {
    let patience = ["--hang-timeout", "2s"];
    let crash = death("cuMemcpyDtoHAsync_v2:1=hang", &patience).await;
    assert_eq!(crash.kind, "wedged", "{crash:?}");
    let seen = crash.blackbox.unwrap();
    assert_eq!((seen.doing.as_str(), seen.op.as_str()), ("tensors", "mul"));
}

/// What the black box says of a worker whose device does not come back from a kernel, in that kernel's run of this number: it
/// runs once in each call of a graph of forty steps, the thirtieth of which it is.
async fn hung(nth: usize) -> v1::BlackBox {
    let conf = format!("fail = softmax_f32:{nth}=hang\n");
    let (cluster, _driver) = cluster(&conf, &["--hang-timeout", "2s"]).await;
    cluster.workers(is_ready).await.unwrap();
    let backend = session(&cluster).await;
    let session = backend.session();
    let graph = session.compile(|inputs: &[Tensor]| {
        let mut y = inputs[0].exp();
        for step in 1..40 {
            // No two of them are one step.
            y = match step {
                30 => y.softmax(0),
                _ => y.flip(&[0]),
            };
        }
        vec![y]
    });
    let x = session.full(0.5_f32, &[64]);
    for _ in 1..nth {
        graph.call_eval(std::slice::from_ref(&x)).await.unwrap();
    }
    let error = graph.call_eval(&[x]).await.unwrap_err();
    assert_eq!(error.reason(), Reason::WorkerLost, "{error:?}");
    let client = cluster.client().await.unwrap();
    let began = Instant::now();
    let crash = loop {
        if let Some(crash) = client.crashes().await.unwrap().pop() {
            break crash;
        }
        assert!(began.elapsed() < SOON);
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert_eq!(crash.kind, "wedged", "{crash:?}");
    crash.blackbox.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_that_hangs_has_said_where_it_is() {
    // Each call has other memory, so that it is given step by step, and it is the very one.
    let seen = hung(2).await;
    assert_eq!((seen.node, seen.op.as_str()), (30, "softmax"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_that_is_run_again_names_the_kernel() {
    // In the thirtieth step or so of a model that has ten of them, which is a recording by then.
    let (cluster, _driver) = cluster("fail = add_rms_norm_f32:305=abort\n", &[]).await;
    let client = cluster.client().await.unwrap();
    client.load("kjv", kjv().to_str().unwrap()).await.unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let options = GenerateOptions {
        max_tokens: 40,
        ..Default::default()
    };
    let prompt = Prompt::Text("In the beginning".to_owned());
    let stream = client.generate(prompt, options).await.unwrap();
    stream.complete().await.unwrap();
    let crash = client.crashes().await.unwrap().pop().unwrap();
    let crash = client.crash(&crash.id).await.unwrap();
    let seen = crash.blackbox.unwrap();
    // The host gave it all at once; the device said where it was now and then.
    assert!(seen.node > 0 && seen.node.is_multiple_of(16), "{seen:?}");
    let said = cluster
        .hotcell(&["--json", "crashes", "replay", &crash.id])
        .unwrap();
    let said = String::from_utf8(said.stdout).unwrap();
    let outcome: serde_json::Value = serde_json::from_str(said.lines().last().unwrap()).unwrap();
    assert_eq!(outcome["outcome"], "died", "{said}");
    assert_eq!(outcome["crash"]["blackbox"]["op"], "rms_norm", "{said}");
    // The report had it some steps before that one.
    assert_eq!(outcome["same"], true, "{said}");
    let node = outcome["node"].as_str().unwrap();
    assert!(
        node.starts_with("layers.") && node.contains(".rms_norm."),
        "{said}"
    );
}

/// The devices of a scheduler with the processor's worker and CUDA's beside it, once that has said what there is.
async fn found(driver: &FakeDriver) -> Vec<v1::Device> {
    let worker = driver.folder().join("hotcell-worker");
    symlink(binaries().unwrap().join("hotcell-worker"), &worker).unwrap();
    let arguments = [
        "--worker-binary",
        worker.to_str().unwrap(),
        "--probe-timeout",
        "5s",
    ];
    let cluster = Cluster::start(&arguments).await.unwrap();
    let client = cluster.client().await.unwrap();
    let began = Instant::now();
    loop {
        let devices = client.devices().await.unwrap();
        if !devices
            .iter()
            .any(|d| d.problem.contains("has not said yet"))
        {
            assert_eq!(
                (devices[0].id.as_str(), devices[0].problem.as_str()),
                ("cpu:0", "")
            );
            return devices;
        }
        assert!(began.elapsed() < SOON, "{devices:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_with_a_driver_is_told_and_the_processor_is_there() {
    for (conf, words) in [
        ("devices = 0", "the driver finds no device"),
        (
            "version = 12040",
            "the driver is for CUDA 12.4 and 13.0 is needed",
        ),
        ("fail = cuInit:1=abort", "SIGSEGV"),
        ("fail = cuInit:1=999", "error 999"),
        ("fail = cuDeviceGetCount:1=hang", "took longer than 5s"),
    ] {
        let driver = FakeDriver::new(conf).unwrap();
        driver.worker("hotcell-worker-cuda").unwrap();
        let found = found(&driver).await;
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!(found[1].id, "cuda:0");
        assert!(found[1].problem.contains(words), "{conf}: {found:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn all_of_eight_devices_are_found() {
    let driver = FakeDriver::new("devices = 8").unwrap();
    driver.worker("hotcell-worker-cuda").unwrap();
    let found = found(&driver).await;
    let ids: Vec<&str> = found.iter().map(|d| d.id.as_str()).collect();
    let cuda = (0..8).map(|n| format!("cuda:{n}"));
    let expected: Vec<String> = std::iter::once("cpu:0".to_owned()).chain(cuda).collect();
    assert_eq!(ids, expected);
    assert!(found.iter().all(|d| d.problem.is_empty()), "{found:?}");
}

/// Descriptors of device memory that a process holds.
fn device_memory(pid: u32) -> Vec<PathBuf> {
    let open = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let paths = open.map(|entry| entry.unwrap().path());
    let is_memory = |path: &PathBuf| {
        fs::read_link(path).is_ok_and(|to| to.to_string_lossy().contains("fakecuda-memory"))
    };
    paths.filter(is_memory).collect()
}

/// A text of the bundled model's, of which the worker's process of this rank is killed in the middle. A token takes a while here.
async fn text(cluster: &Cluster, kills: Option<usize>) -> Vec<u32> {
    let client = cluster.client().await.unwrap();
    let options = GenerateOptions {
        max_tokens: 16,
        seed: Some(7),
        ..Default::default()
    };
    let prompt = Prompt::Text("In the beginning".to_owned());
    let mut stream = client.generate(prompt, options).await.unwrap();
    let (mut tokens, mut kills) = (Vec::new(), kills);
    while let Some(event) = stream.next().await {
        if let Event::Delta(delta) = event.unwrap() {
            tokens.extend(delta.token_ids);
        }
        if let Some(rank) = kills.filter(|_| tokens.len() >= 4) {
            kills = None;
            let worker = cluster.workers(all_have("kjv")).await.unwrap().remove(0);
            let members = [vec![worker.pid], children(worker.pid).unwrap()].concat();
            signal_pid(members[rank], Signal::KILL).unwrap();
        }
    }
    tokens
}

/// Bytes of weights that the worker says outlive it.
async fn kept_bytes(cluster: &Cluster) -> u64 {
    let workers = cluster.workers(all_have("kjv")).await.unwrap();
    let kept = workers[0]
        .memory
        .iter()
        .filter(|m| m.kind == "weights_kept");
    kept.map(|m| m.bytes).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn weights_stay_on_the_device_when_the_worker_dies() {
    let (cluster, _driver) = cluster("", &[]).await;
    let client = cluster.client().await.unwrap();
    client.load("kjv", kjv().to_str().unwrap()).await.unwrap();
    let before = kept_bytes(&cluster).await;
    assert!(before > 1 << 20, "{before}");
    assert_eq!(device_memory(cluster.scheduler.pid()).len(), 1);
    let expected = text(&cluster, None).await;
    for deaths in 1..=2 {
        assert_eq!(text(&cluster, Some(0)).await, expected);
        let log = cluster.scheduler.log();
        assert_eq!(log.matches(" found=true").count(), deaths, "{log}");
        assert_eq!(log.matches("weights outlive the worker").count(), 1);
        assert_eq!(kept_bytes(&cluster).await, before);
    }
    client.unload("kjv").await.unwrap();
    let held = device_memory(cluster.scheduler.pid());
    assert!(held.is_empty(), "the device's memory is not given back");
}

/// Changes a bit of what the scheduler holds.
fn damage(cluster: &Cluster) {
    damage_of(cluster, 0);
}

/// The same of one of what it holds.
fn damage_of(cluster: &Cluster, number: usize) {
    let held = device_memory(cluster.scheduler.pid()).remove(number);
    let memory = fs::File::options().read(true).write(true).open(held);
    let memory = memory.unwrap();
    let mut byte = [0];
    memory.read_exact_at(&mut byte, 100_000).unwrap();
    memory.write_all_at(&[byte[0] ^ 1], 100_000).unwrap();
}

/// Kills the worker, and returns once another process has the model.
async fn kill(cluster: &Cluster) {
    let worker = cluster.workers(all_have("kjv")).await.unwrap().remove(0);
    signal_pid(worker.pid, Signal::KILL).unwrap();
    another(cluster, worker.pid).await;
}

async fn another(cluster: &Cluster, pid: u32) {
    let other = |all: &[v1::WorkerInfo]| all_have("kjv")(all) && all[0].pid != pid;
    cluster.workers(other).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn weights_that_were_damaged_on_the_device_are_loaded_again() {
    let (cluster, _driver) = cluster("", &[]).await;
    let client = cluster.client().await.unwrap();
    client.load("kjv", kjv().to_str().unwrap()).await.unwrap();
    let expected = text(&cluster, None).await;
    // What it computed from the damaged weights nobody can take back; the next one loads them again.
    damage(&cluster);
    kill(&cluster).await;
    assert_eq!(text(&cluster, None).await, expected);
    let log = cluster.scheduler.log();
    assert!(log.contains("are damaged and loaded again"), "{log}");
    assert!(log.contains(" found=false"), "{log}");
    // What they are told of it is what it is now.
    assert_eq!(text(&cluster, Some(0)).await, expected);
    assert!(cluster.scheduler.log().contains(" found=true"));
}

#[tokio::test(flavor = "multi_thread")]
async fn who_computes_from_weights_that_were_damaged_is_replaced() {
    let (cluster, _driver) = cluster("", &[]).await;
    let client = cluster.client().await.unwrap();
    client.load("kjv", kjv().to_str().unwrap()).await.unwrap();
    let expected = text(&cluster, None).await;
    let options = GenerateOptions {
        max_tokens: 2,
        request_id: "again".to_owned(),
        ..Default::default()
    };
    let stream = client.generate("In the beginning", options).await.unwrap();
    stream.complete().await.unwrap();
    let before = cluster.workers(all_have("kjv")).await.unwrap().remove(0);
    damage(&cluster);
    // The worker of a replay is given the same memory, and looks.
    cluster.hotcell(&["debug", "replay", "again"]).unwrap();
    another(&cluster, before.pid).await;
    assert_eq!(text(&cluster, None).await, expected);
    let crash = client.crashes().await.unwrap().pop().unwrap();
    assert_eq!(crash.kind, "corrupt", "{}", crash.reason);
    assert!(crash.reason.contains("are damaged"), "{}", crash.reason);
    assert_eq!(text(&cluster, Some(0)).await, expected);
    assert!(cluster.scheduler.log().contains(" found=true"));
}

#[tokio::test(flavor = "multi_thread")]
async fn device_memory_that_kills_who_opens_it_is_given_up() {
    let (cluster, _driver) = cluster("fail = cuMemImportFromShareableHandle:1=abort\n", &[]).await;
    let client = cluster.client().await.unwrap();
    client.load("kjv", kjv().to_str().unwrap()).await.unwrap();
    let expected = text(&cluster, None).await;
    kill(&cluster).await;
    assert_eq!(text(&cluster, None).await, expected);
    assert!(cluster.scheduler.log().contains("kept is given up"));
    // Killed, and dead of what it was given; then there was nothing to be given.
    assert_eq!(client.crashes().await.unwrap().len(), 2);
    assert_eq!(device_memory(cluster.scheduler.pid()).len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_kept_in_vain_makes_room() {
    // The first memory that a process asks for is not there.
    let (cluster, _driver) = cluster("fail = cuMemCreate:1=2\n", &[]).await;
    let client = cluster.client().await.unwrap();
    let path = kjv();
    let refused = client.load("kjv", path.to_str().unwrap()).await;
    assert_eq!(refused.unwrap_err().reason(), Reason::OutOfMemory);
    client.load("kjv", path.to_str().unwrap()).await.unwrap();
    let expected = text(&cluster, None).await;
    damage(&cluster);
    kill(&cluster).await;
    assert_eq!(text(&cluster, None).await, expected);
    assert!(cluster.scheduler.log().contains("kept is given up"));
    assert_eq!(client.crashes().await.unwrap().len(), 1);
    assert_eq!(device_memory(cluster.scheduler.pid()).len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_exports_nothing_costs_only_that() {
    for refused in [
        "cuMemExportToShareableHandle:1=801",
        "cuMemImportFromShareableHandle:1=801",
    ] {
        let (cluster, _driver) = cluster(&format!("fail = {refused}\n"), &[]).await;
        let client = cluster.client().await.unwrap();
        client.load("kjv", kjv().to_str().unwrap()).await.unwrap();
        let expected = text(&cluster, None).await;
        assert_eq!(text(&cluster, Some(0)).await, expected, "{refused}");
        assert!(!cluster.scheduler.log().contains(" found=true"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_scheduler_holds_the_devices_memory() {
    let (cluster, driver) = cluster("", &[]).await;
    let client = cluster.client().await.unwrap();
    client.load("kjv", kjv().to_str().unwrap()).await.unwrap();
    let expected = text(&cluster, None).await;
    let worker = driver.folder().join("hotcell-worker");
    let worker = ["--worker-binary", worker.to_str().unwrap()];
    let taken = cluster.takeover(&worker).unwrap().output().unwrap();
    assert!(taken.status.success(), "{taken:?}");
    assert_eq!(text(&cluster, Some(0)).await, expected);
    let log = cluster.scheduler.log();
    assert!(log.contains(" found=true"), "{log}");
}

/// Two ways to divide a model among devices.
const DIVISIONS: [&str; 2] = ["--tensor-parallel", "--pipeline-parallel"];

/// Models that members divide in their ways: biases, one key head that nobody can share, caps, windows, experts, blocks.
const MODELS: [&str; 6] = [
    "qwen2",
    "gemma3-cap",
    "mistral",
    "qwen3_moe",
    "gguf/qwen3_moe-q8_0.gguf",
    "gguf/llama-k.gguf",
];

/// Answers of all models: greedy and drawn, of short and long prompts, with log probabilities and without.
async fn all_answers(cluster: &Cluster) -> Vec<Completion> {
    let client = cluster.client().await.unwrap();
    let mut all = answers(&client, "kjv").await;
    for (i, model) in MODELS.into_iter().enumerate() {
        let name = format!("m{i}");
        let path = golden(model);
        client.load(&name, path.to_str().unwrap()).await.unwrap();
        all.extend(answers(&client, &name).await);
        client.unload(&name).await.unwrap();
    }
    all
}

async fn answers(client: &Client, model: &str) -> Vec<Completion> {
    let mut all = Vec::new();
    for (prompt, temperature) in [(5, 0.0), (40, 1.0), (150, 1.0)] {
        let ids = (0..prompt).map(|i| 5 + i * 7 % 250).collect();
        let options = GenerateOptions {
            model: model.to_owned(),
            logprobs: prompt < 100,
            max_tokens: 10,
            sampling: v1::Sampling {
                temperature: Some(temperature),
                ..v1::Sampling::default()
            },
            seed: Some(3),
            ..Default::default()
        };
        let stream = client.generate(Prompt::Ids(ids), options).await.unwrap();
        all.push(stream.complete().await.unwrap());
    }
    all
}

/// A worker of two devices, with the bundled model.
async fn pair(conf: &str, division: &str) -> (Cluster, FakeDriver) {
    let arguments = [
        division,
        "2",
        "--restart-budget",
        "100",
        "--restart-backoff",
        "1ms",
        "--restart-backoff-max",
        "5ms",
    ];
    let (cluster, driver) = cluster(&format!("devices = 3\n{conf}"), &arguments).await;
    let client = cluster.client().await.unwrap();
    client.load("kjv", kjv().to_str().unwrap()).await.unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    (cluster, driver)
}

const DIRECT: &str = "devices give each other their parts";

#[tokio::test(flavor = "multi_thread")]
async fn devices_that_compute_together_give_the_bits_of_one() {
    let (one, _driver) = cluster("", &[]).await;
    let client = one.client().await.unwrap();
    client.load("kjv", kjv().to_str().unwrap()).await.unwrap();
    let alone = all_answers(&one).await;
    for (division, conf, direct) in [
        (DIVISIONS[0], "", true),
        // Devices that do not reach each other, or have no memory that others could.
        (DIVISIONS[0], "fail = cuDeviceCanAccessPeer:1=801\n", false),
        (DIVISIONS[0], "fail = cuMemCreate:1=801\n", false),
        (DIVISIONS[1], "", false),
    ] {
        let (two, _driver) = pair(conf, division).await;
        assert_eq!(two.workers(is_ready).await.unwrap().len(), 1);
        let shown = two.hotcell(&["devices"]).unwrap();
        let shown = String::from_utf8(shown.stdout).unwrap();
        assert!(shown.contains("computes with cuda:1"), "{shown}");
        assert!(shown.contains("left over"), "{shown}");
        let got = all_answers(&two).await;
        assert_eq!(got.len(), alone.len());
        for (got, expected) in got.iter().zip(&alone) {
            assert_same(got, expected, division);
        }
        let log = two.scheduler.log();
        assert_eq!(log.contains(DIRECT), direct, "{conf}: {log}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn weights_stay_on_all_devices_whichever_of_their_processes_dies() {
    for division in DIVISIONS {
        let (cluster, _driver) = pair("", division).await;
        let expected = text(&cluster, None).await;
        let before = kept_bytes(&cluster).await;
        assert_eq!(device_memory(cluster.scheduler.pid()).len(), 2);
        for (deaths, rank) in [0, 1, 1].into_iter().enumerate() {
            assert_eq!(text(&cluster, Some(rank)).await, expected, "{division}");
            let log = cluster.scheduler.log();
            let found = log.matches("weights were kept on the device").count();
            assert_eq!(found, deaths + 1, "{log}");
            assert_eq!(log.matches(" found=true").count(), deaths + 1, "{log}");
            assert_eq!(kept_bytes(&cluster).await, before);
        }
        // A replay has one device, and leaves alone what all of them keep.
        let client = cluster.client().await.unwrap();
        let options = GenerateOptions {
            max_tokens: 3,
            request_id: "again".to_owned(),
            ..Default::default()
        };
        let stream = client.generate("In the beginning", options).await.unwrap();
        stream.complete().await.unwrap();
        let replayed = cluster.hotcell(&["debug", "replay", "again"]).unwrap();
        assert!(replayed.status.success(), "{replayed:?}");
        assert_eq!(device_memory(cluster.scheduler.pid()).len(), 2);
        // Whichever device's part is damaged, it alone is loaded again, and all of it is found the next time.
        for (number, of) in [(0, 1), (1, 2)] {
            damage_of(&cluster, number);
            kill(&cluster).await;
            assert_eq!(text(&cluster, None).await, expected, "{division}");
            let log = cluster.scheduler.log();
            assert_eq!(log.matches("are damaged and loaded again").count(), of);
            assert_eq!(log.matches(" found=false").count(), of, "{log}");
            assert_eq!(text(&cluster, Some(0)).await, expected, "{division}");
            let log = cluster.scheduler.log();
            assert_eq!(log.matches(" found=true").count(), 3 + of, "{log}");
            assert_eq!(device_memory(cluster.scheduler.pid()).len(), 2);
        }
        client.unload("kjv").await.unwrap();
        assert!(device_memory(cluster.scheduler.pid()).is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_that_is_lost_amid_what_others_wait_for_is_one_workers_death() {
    let (calm, _driver) = pair("", DIVISIONS[0]).await;
    let expected = text(&calm, None).await;
    // Both meet the fault at the same place; or one waits for what never comes.
    for fail in ["give_part:300=700", "take_parts:300=700"] {
        let (cluster, _driver) = pair(&format!("fail = {fail}\n"), DIVISIONS[0]).await;
        let log = cluster.scheduler.log();
        assert!(log.contains(DIRECT), "{log}");
        assert_eq!(text(&cluster, None).await, expected, "{fail}");
        let client = cluster.client().await.unwrap();
        let crash = client.crashes().await.unwrap().pop().unwrap();
        assert!(crash.reason.starts_with("exit code 30"), "{}", crash.reason);
    }
}

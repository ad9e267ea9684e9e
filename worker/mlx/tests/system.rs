//! MLX beside the processor in one scheduler: discovery, generation, deaths.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use hotcell_client::{
    Client, Completion, Event, GenerateOptions, Generation, Prompt,
    v1::{self, TraceTrack},
};
use hotcell_tests::{
    cluster::{Cluster, SOON, all_have, binaries, kjv, signal_pid},
    debugged::looked_into,
};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

const PROMPT: &str = "In the beginning";

/// The worker that was built with these tests.
const OURS: &str = env!("CARGO_BIN_EXE_hotcell-worker-mlx");

/// A folder with the worker's program, and beside it ours as it is installed.
fn programs() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let worker = folder.path().join("hotcell-worker");
    symlink(binaries().unwrap().join("hotcell-worker"), &worker).unwrap();
    symlink(OURS, folder.path().join("hotcell-worker-mlx")).unwrap();
    (folder, worker)
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn greedy(tokens: u32) -> GenerateOptions {
    GenerateOptions {
        max_tokens: tokens,
        ignore_eos: true,
        seed: Some(0),
        ..GenerateOptions::default()
    }
}

async fn complete(client: &Client, options: &GenerateOptions) -> Completion {
    let prompt = Prompt::Text(PROMPT.to_owned());
    let stream = client.generate(prompt, options.clone()).await.unwrap();
    stream.complete().await.unwrap()
}

fn class(accepted: &v1::Accepted) -> v1::NumericsClass {
    accepted.numerics.clone().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn mlx_alone_draws_what_the_processor_draws_and_says_that_it_need_not() {
    let arguments = ["--worker-binary", OURS, "--kv-cache", "f32"];
    let mlx = Cluster::with_model("kjv", &kjv(), &arguments)
        .await
        .unwrap();
    let cpu = Cluster::with_model("kjv", &kjv(), &["--kv-cache", "f32"])
        .await
        .unwrap();
    let device = mlx
        .client()
        .await
        .unwrap()
        .devices()
        .await
        .unwrap()
        .remove(0);
    assert_eq!((device.id.as_str(), device.problem.as_str()), ("mlx:0", ""));
    assert!(device.description.starts_with("MLX 0.32.2 ("), "{device:?}");
    assert!(
        ["cpu", "metal"].contains(&device.path.as_str()),
        "{device:?}"
    );
    let options = greedy(256);
    let ours = complete(&mlx.client().await.unwrap(), &options).await;
    let theirs = complete(&cpu.client().await.unwrap(), &options).await;
    assert_eq!(ours.token_ids.len(), 256);
    assert_eq!(ours.token_ids, theirs.token_ids);
    assert_eq!(ours.text, theirs.text);
    let (ours, theirs) = (class(&ours.accepted), class(&theirs.accepted));
    // Device kind, the library's version, ours, the weights and how the cache is stored.
    let whole = format!("mlx/{}/0.32.2/r", device.path);
    assert!(ours.id.starts_with(&whole), "{ours:?}");
    let weights = format!("/w:{}/kv:f32", ours.model_hash);
    assert!(ours.id.ends_with(&weights), "{ours:?}");
    assert!(!ours.reproducible, "{ours:?}");
    assert!(
        theirs.id.starts_with("cpu/") && theirs.reproducible,
        "{theirs:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn it_is_looked_into_like_any_other() {
    let of = async |arguments: &[&str]| {
        let cluster = Cluster::with_model("kjv", &kjv(), arguments).await.unwrap();
        cluster.workers(all_have("kjv")).await.unwrap();
        cluster
    };
    let mlx = of(&["--worker-binary", OURS]).await;
    let cpu = of(&["--devices", "cpu:1"]).await;
    let (client, reference) = (mlx.client().await.unwrap(), cpu.client().await.unwrap());
    // MLX does not promise the same bits twice.
    let spans = looked_into(
        &client,
        &reference,
        false,
        &["rope", "cache_write", "mul_mat"],
    )
    .await
    .unwrap();
    let nodes: Vec<_> = spans
        .iter()
        .filter(|span| span.track() == TraceTrack::Nodes)
        .collect();
    assert!(nodes.iter().any(|node| node.duration_ns > 0), "{nodes:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_mlx_holds_is_told_with_the_workers_memory() {
    let arguments = ["--worker-binary", OURS];
    let cluster = Cluster::with_model("kjv", &kjv(), &arguments)
        .await
        .unwrap();
    let client = cluster.client().await.unwrap();
    complete(&client, &greedy(2)).await;
    let every = Duration::from_millis(50);
    let mut samples = client.watch_worker("", every).await.unwrap();
    let sample = samples.next().await.unwrap().unwrap();
    let bytes = |kind: &str| {
        let found = sample.memory.iter().find(|m| m.kind == kind);
        found.unwrap_or_else(|| panic!("{:?}", sample.memory)).bytes
    };
    // Its copies of the weights are in it; what it keeps is told even where it keeps nothing.
    assert!(bytes("library") >= bytes("weights"), "{:?}", sample.memory);
    bytes("library_kept");
}

/// The devices, once MLX's program has said what is with it.
async fn devices(client: &Client) -> Vec<v1::Device> {
    let began = Instant::now();
    loop {
        let devices = client.devices().await.unwrap();
        let waits = |d: &v1::Device| d.problem.contains("has not said yet");
        if !devices.iter().any(waits) {
            return devices;
        }
        assert!(began.elapsed() < SOON, "{devices:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Starts a scheduler, and checks that it lists MLX with a problem that has all of these words in it, and serves on the
/// processor.
async fn absent(worker: &Path, words: &[&str]) {
    let arguments = ["--worker-binary", text(worker)];
    let cluster = Cluster::with_model("kjv", &kjv(), &arguments)
        .await
        .unwrap();
    let client = cluster.client().await.unwrap();
    let devices = devices(&client).await;
    let [cpu, mlx] = devices.as_slice() else {
        panic!("{devices:?}");
    };
    assert_eq!((cpu.id.as_str(), cpu.problem.as_str()), ("cpu:0", ""));
    assert_eq!(mlx.id, "mlx:0");
    let shown = cluster.hotcell(&["devices"]).unwrap();
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    let line = shown.lines().find(|l| l.starts_with("mlx:0")).unwrap();
    for word in words {
        assert!(mlx.problem.contains(word), "{mlx:?}");
        assert!(line.contains(word), "{shown}");
    }
    println!("{}", mlx.problem);
    assert_eq!(complete(&client, &greedy(8)).await.token_ids.len(), 8);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_its_library_mlx_is_absent_with_the_reason_and_the_processor_serves() {
    let (folder, worker) = programs();
    // As if it had never been installed: the program asks for a library of another name.
    let program = fs::read(OURS).unwrap();
    let name = b"libmlx.so\0";
    let mut broken = program.clone();
    let places: Vec<usize> = program
        .windows(name.len())
        .enumerate()
        .filter(|(_, window)| window == name)
        .map(|(at, _)| at)
        .collect();
    assert!(!places.is_empty());
    for at in places {
        broken[at..at + name.len()].copy_from_slice(b"libmlX.so\0");
    }
    let path = folder.path().join("hotcell-worker-mlx");
    fs::remove_file(&path).unwrap();
    fs::write(&path, broken).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    absent(&worker, &["exit code 127", "libmlX.so"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_broken_library_mlx_is_absent_with_the_reason_and_the_processor_serves() {
    for (library, words) in [
        (&b""[..], ["libmlx.so", "too short"]),
        (&[b'x'; 4096][..], ["libmlx.so", "invalid ELF header"]),
    ] {
        let (folder, worker) = programs();
        // Beside the program it is found first, so that the program has to lie there itself.
        let path = folder.path().join("hotcell-worker-mlx");
        fs::remove_file(&path).unwrap();
        fs::copy(OURS, &path).unwrap();
        fs::write(folder.path().join("libmlx.so"), library).unwrap();
        absent(&worker, &words).await;
    }
}

/// A stream that has begun, and the tokens it gave so far.
struct Begun {
    stream: Generation,
    class: v1::NumericsClass,
}

async fn begin(client: &Client, options: &GenerateOptions) -> Begun {
    let prompt = Prompt::Text(PROMPT.to_owned());
    let mut stream = client.generate(prompt, options.clone()).await.unwrap();
    let Some(Ok(Event::Accepted(accepted))) = stream.next().await else {
        panic!("not accepted");
    };
    let Some(Ok(Event::Delta(_))) = stream.next().await else {
        panic!("no token");
    };
    let class = class(&accepted);
    Begun { stream, class }
}

/// The rest of a stream: the classes it went on in, and its end.
async fn rest(mut stream: Generation) -> (Vec<v1::NumericsClass>, v1::Finished) {
    let mut classes = Vec::new();
    loop {
        match stream.next().await.unwrap().unwrap() {
            Event::Delta(delta) => classes.extend(delta.numerics),
            Event::Finished(finished) => return (classes, finished),
            Event::Accepted(_) => panic!("accepted twice"),
        }
    }
}

/// Whether MLX's worker is there as well, which may come later, and both have the model.
fn two_have_it(workers: &[v1::WorkerInfo]) -> bool {
    workers.len() == 2 && all_have("kjv")(workers)
}

/// A cluster of both kinds, a stream that MLX serves, and those that it took to get one.
async fn both(folder: &Path, options: &GenerateOptions) -> (Cluster, u32, Begun, Vec<Begun>) {
    let worker = folder.join("hotcell-worker");
    let arguments = ["--worker-binary", text(&worker), "--restart-backoff", "1ms"];
    let cluster = Cluster::with_model("kjv", &kjv(), &arguments)
        .await
        .unwrap();
    let workers = cluster.workers(two_have_it).await.unwrap();
    let on_mlx = |w: &&v1::WorkerInfo| w.lease.as_ref().is_some_and(|l| l.device == "mlx:0");
    let pid = workers.iter().find(on_mlx).unwrap().pid;
    let mut others = Vec::new();
    let begun = begin_on_mlx(&cluster, options, &mut others).await;
    (cluster, pid, begun, others)
}

/// Who is served where is the scheduler's to say; of several, one is on MLX.
async fn begin_on_mlx(
    cluster: &Cluster,
    options: &GenerateOptions,
    others: &mut Vec<Begun>,
) -> Begun {
    let client = cluster.client().await.unwrap();
    for _ in 0..8 {
        let begun = begin(&client, options).await;
        if begun.class.id.starts_with("mlx/") {
            return begun;
        }
        others.push(begun);
    }
    panic!("no stream on MLX");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_whose_mlx_worker_dies_goes_on_in_the_next_one_and_the_processors_do_not_notice() {
    let (folder, _) = programs();
    let (cluster, pid, on_mlx, others) = both(folder.path(), &greedy(900)).await;
    signal_pid(pid, Signal::KILL).unwrap();
    let (classes, finished) = rest(on_mlx.stream).await;
    assert!(classes.is_empty(), "{classes:?}");
    assert_eq!(finished.deaths_survived, 1);
    assert!(!finished.receipt.unwrap().continued_across);
    for other in others {
        let (classes, finished) = rest(other.stream).await;
        assert!(classes.is_empty());
        assert_eq!(finished.deaths_survived, 0);
    }
    let workers = cluster.workers(two_have_it).await.unwrap();
    assert!(workers.iter().all(|w| w.pid != pid), "{workers:?}");
}

/// By the command, in four of its words: one of the two devices of a running scheduler beside the other.
#[tokio::test(flavor = "multi_thread")]
async fn the_command_compares_the_two_devices_node_by_node() {
    let (folder, _) = programs();
    let options = GenerateOptions {
        request_id: "compared".to_owned(),
        ..greedy(4)
    };
    let worker = folder.path().join("hotcell-worker");
    let arguments = ["--worker-binary", text(&worker)];
    let cluster = Cluster::with_model("kjv", &kjv(), &arguments)
        .await
        .unwrap();
    cluster.workers(two_have_it).await.unwrap();
    complete(&cluster.client().await.unwrap(), &options).await;
    let file = folder.path().join("compared.hotcell");
    let run = |arguments: &[&str]| {
        let output = cluster.hotcell(&[&["debug"], arguments].concat()).unwrap();
        let words = String::from_utf8([&output.stdout[..], &output.stderr].concat());
        (output.status.code(), output.stdout, words.unwrap())
    };
    let replay = [
        "replay",
        "compared",
        "--only-logits",
        "--reveal",
        "-o",
        text(&file),
    ];
    let (code, _, said) = run(&replay);
    assert_eq!(code, Some(0), "{said}");
    let sides = ["--backend", "cpu", "--backend", "mlx", "--json"];
    let (code, found, said) = run(&[&["compare", text(&file)], &sides[..]].concat());
    // Neither is wrong.
    assert_eq!(code, Some(0), "{said}");
    let found: Value = serde_json::from_slice(&found).unwrap();
    let classes = found["numerics_classes"].as_array().unwrap();
    for (class, device) in classes.iter().zip(["cpu/", "mlx/"]) {
        assert!(class.as_str().unwrap().starts_with(device), "{class}");
    }
    assert_eq!(
        (&found["tokens"], &found["first"]),
        (&4.into(), &Value::Null)
    );
    let nodes = found["nodes"].as_array().unwrap();
    assert!(nodes.len() > 50, "{said}");
    for node in nodes {
        assert_eq!(node["beyond"], 0, "{node}");
        let cosine = node["worst"]["cosine"].as_f64();
        assert!(cosine.is_none_or(|cosine| cosine > 0.999), "{node}");
    }
    // They are two devices: not all of it is the same to the bit.
    assert_eq!(found["equal"], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn where_mlx_is_gone_for_good_the_streams_that_allow_it_go_on_on_the_processor_and_no_others()
{
    let (folder, _) = programs();
    // Longer than the worker takes to be given up.
    let crossing = GenerateOptions {
        continue_across: true,
        ..greedy(900)
    };
    let (cluster, pid, on_mlx, mut others) = both(folder.path(), &crossing).await;
    let stays = begin_on_mlx(&cluster, &greedy(900), &mut others).await;
    fs::remove_file(folder.path().join("hotcell-worker-mlx")).unwrap();
    signal_pid(pid, Signal::KILL).unwrap();
    let (classes, finished) = rest(on_mlx.stream).await;
    let [class] = classes.as_slice() else {
        panic!("{classes:?}");
    };
    assert!(class.id.starts_with("cpu/"), "{class:?}");
    assert_eq!(finished.usage.unwrap().generated_tokens, 900);
    let receipt = finished.receipt.unwrap();
    assert!(receipt.continued_across);
    let mut stream = stays.stream;
    let error = loop {
        match stream.next().await {
            Some(Ok(Event::Delta(delta))) => assert!(delta.numerics.is_none(), "{delta:?}"),
            Some(Err(error)) => break error,
            other => panic!("{other:?}"),
        }
    };
    let said = error.to_string();
    assert!(said.contains("no worker"), "{said}");
    assert!(stream.next().await.is_none());
    for other in others {
        assert_eq!(rest(other.stream).await.1.deaths_survived, 0);
    }
}

/// The worker that ends on command.
fn faulty() -> PathBuf {
    let here = std::env::current_exe().unwrap();
    here.ancestors().nth(2).unwrap().join("examples/faulty")
}

/// Orders an end of it.
fn order(pid: u32, number: i32) {
    let pid = i32::try_from(pid).unwrap();
    // SAFETY: takes no pointers.
    let sent = unsafe { libc::kill(pid, libc::SIGRTMIN() + number) };
    assert_eq!(sent, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_ends_mlx_ends_its_worker_alone() {
    for (number, what) in [
        "an uncaught exception",
        "MLX's own error handler",
        "no memory",
    ]
    .into_iter()
    .enumerate()
    {
        let (folder, _) = programs();
        let path = folder.path().join("hotcell-worker-mlx");
        fs::remove_file(&path).unwrap();
        symlink(faulty(), &path).unwrap();
        let (cluster, pid, on_mlx, others) = both(folder.path(), &greedy(900)).await;
        order(pid, i32::try_from(number).unwrap());
        let (classes, finished) = rest(on_mlx.stream).await;
        assert!(classes.is_empty(), "{what}: {classes:?}");
        assert_eq!(finished.deaths_survived, 1, "{what}");
        for other in others {
            assert_eq!(rest(other.stream).await.1.deaths_survived, 0, "{what}");
        }
        let crashes = cluster.client().await.unwrap().crashes().await.unwrap();
        assert_eq!(crashes.len(), 1, "{what}: {crashes:?}");
        println!("{what}: {} ({})", crashes[0].kind, crashes[0].reason);
    }
}

//! Packed copies of models as one sees them from outside: made once, shared by all workers, found again, and never in the
//! way. Streams are the same with and without.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use hotcell_client::{
    Client, Event, GenerateOptions, Prompt,
    v1::{self, PackedInfo, PackedState},
};
use hotcell_tests::{
    answers::assert_same,
    cluster::{Cluster, SOON, all_have, binaries, golden, kjv, signal_pid},
    model::open,
    synthetic::{self, Measures},
};
use rustix::process::Signal;
use tempfile::TempDir;

/// 30 MB: copied into memory.
const SMALL: Measures = Measures {
    hidden: 512,
    layers: 4,
    heads: 8,
    kv_heads: 8,
    inner: 1408,
    vocab: 4096,
    context: 512,
    tied: true,
};

/// 110 MB: copied into a file.
const LARGE: Measures = Measures {
    hidden: 1024,
    inner: 2816,
    ..SMALL
};

fn model(measures: &Measures) -> TempDir {
    let folder = TempDir::new().unwrap();
    synthetic::write(folder.path(), measures).unwrap();
    folder
}

/// A folder that nobody else may look into.
fn private() -> TempDir {
    let folder = TempDir::new().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
    folder
}

fn greedy(tokens: u32) -> GenerateOptions {
    GenerateOptions {
        max_tokens: tokens,
        ignore_eos: true,
        seed: Some(5),
        logprobs: true,
        top_logprobs: 3,
        ..GenerateOptions::default()
    }
}

fn sampled(tokens: u32) -> GenerateOptions {
    GenerateOptions {
        sampling: v1::Sampling {
            temperature: Some(1.0),
            ..v1::Sampling::default()
        },
        ..greedy(tokens)
    }
}

/// Token ids, and the bits of all log-probabilities.
type Said = (Vec<u32>, Vec<u32>);

fn add(said: &mut Said, delta: &v1::Delta) {
    said.0.extend(&delta.token_ids);
    for one in &delta.logprobs {
        said.1.push(one.logprob.to_bits());
        said.1
            .extend(one.top.iter().flat_map(|c| [c.token, c.logprob.to_bits()]));
    }
}

async fn said(client: &Client, options: GenerateOptions) -> Said {
    let mut stream = client.generate("In the beginning", options).await.unwrap();
    let mut said = Said::default();
    while let Some(event) = stream.next().await {
        if let Event::Delta(delta) = event.unwrap() {
            add(&mut said, &delta);
        }
    }
    said
}

/// What a scheduler that packs nothing says.
async fn unpacked(path: &Path, options: &[GenerateOptions]) -> Vec<Said> {
    let cluster = Cluster::with_model("m", path, &["--no-pack"])
        .await
        .unwrap();
    let client = cluster.client().await.unwrap();
    let mut all = Vec::new();
    for one in options {
        all.push(said(&client, one.clone()).await);
    }
    let models = client.models().await.unwrap();
    assert_eq!(models[0].packed, [], "it packed all the same");
    all
}

async fn packed(client: &Client) -> Option<PackedInfo> {
    let models = client.models().await.unwrap();
    models.first()?.packed.first().cloned()
}

async fn until(
    cluster: &Cluster,
    client: &Client,
    wanted: impl Fn(&PackedInfo) -> bool,
) -> PackedInfo {
    let start = Instant::now();
    loop {
        let info = packed(client).await;
        if let Some(info) = info.clone().filter(&wanted) {
            return info;
        }
        let log = || cluster.scheduler.log();
        assert!(start.elapsed() < SOON, "{info:?}\n{}", log());
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Once these workers compute with a packed copy.
async fn used(cluster: &Cluster, client: &Client, workers: &[&str]) -> PackedInfo {
    let is = |info: &PackedInfo| info.state() == PackedState::Ready && info.workers == workers;
    until(cluster, client, is).await
}

async fn failed(cluster: &Cluster, client: &Client) -> PackedInfo {
    until(cluster, client, |info| info.state() == PackedState::Failed).await
}

/// Devices, inodes and names of a process's mappings whose name has this in it.
fn mappings(pid: u32, name: &str) -> BTreeSet<String> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let lines = maps.lines().filter(|line| line.contains(name));
    let file = |line: &str| {
        let mut words = line.split_whitespace().skip(3);
        format!("{:?}", (words.next(), words.next(), words.next()))
    };
    lines.map(file).collect()
}

/// Resident KiB of a process's mappings whose name has this in it.
fn resident(pid: u32, name: &str) -> u64 {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let (mut inside, mut sum) = (false, 0);
    for line in smaps.lines() {
        if let Some(rest) = line.strip_prefix("Rss:") {
            let kib: u64 = rest.trim().trim_end_matches(" kB").parse().unwrap();
            sum += if inside { kib } else { 0 };
        } else if line
            .split_whitespace()
            .next()
            .is_some_and(|w| w.contains('-'))
        {
            inside = line.contains(name);
        }
    }
    sum
}

/// Descriptors of a process that lead to something whose name has this in it.
fn open_files(pid: u32, name: &str) -> usize {
    let fds = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let targets = fds.filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
    targets
        .filter(|t| t.to_string_lossy().contains(name))
        .count()
}

/// Files in a folder with this ending.
fn files(folder: &Path, end: &str) -> Vec<PathBuf> {
    let all = fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
    all.filter(|p| p.extension().is_some_and(|e| e == end))
        .collect()
}

#[tokio::test]
async fn a_stream_does_not_notice_that_its_worker_changes_to_packed_weights() {
    let model = model(&SMALL);
    let options = [greedy(450), sampled(450)];
    let right = unpacked(model.path(), &options).await;
    assert!(right[0].1.len() >= 450, "no log-probabilities");
    let cluster = Cluster::with_model("m", model.path(), &[]).await.unwrap();
    let client = cluster.client().await.unwrap();
    let is_used = async || {
        let info = packed(&client).await;
        info.is_some_and(|info| info.workers == ["w0"])
    };
    let mut during = 0;
    for round in 0..20 {
        // One after the other, until one has seen the change: who packs may get little of a busy host.
        let mut used_before = is_used().await;
        for at in (0..options.len()).cycle().skip(round).take(100) {
            let stream = client.generate("In the beginning", options[at].clone());
            let mut stream = stream.await.unwrap();
            let (mut said, mut changed, mut deltas) = (Said::default(), false, 0);
            while let Some(event) = stream.next().await {
                match event.unwrap() {
                    Event::Delta(delta) => {
                        add(&mut said, &delta);
                        deltas += 1;
                        // Not at the first: it may be old.
                        if deltas % 8 == 0 && said.0.len() < 440 && !used_before && !changed {
                            changed = is_used().await;
                        }
                    }
                    Event::Finished(finished) => assert_eq!(finished.deaths_survived, 0),
                    Event::Accepted(_) => {}
                }
            }
            assert_eq!(said, right[at]);
            during += u32::from(changed);
            if used_before {
                break;
            }
            used_before = is_used().await;
        }
        if during >= 2 {
            break;
        }
        // Packed again the next time: memory goes with the model.
        client.unload("m").await.unwrap();
        let path = model.path().to_str().unwrap();
        client.load("m", path).await.unwrap();
    }
    assert!(during > 0, "no stream ran while the worker changed");
    assert_eq!(cluster.workers(all_have("m")).await.unwrap()[0].deaths, 0);
}

#[tokio::test]
async fn all_workers_and_those_that_come_after_them_share_one_copy() {
    let right = unpacked(&kjv(), &[greedy(40)]).await;
    let arguments = ["--devices", "cpu:2"];
    let cluster = Cluster::with_model("m", &kjv(), &arguments).await.unwrap();
    let client = cluster.client().await.unwrap();
    let info = used(&cluster, &client, &["w0", "w1"]).await;
    assert_eq!(info.packings, 1);
    assert!(info.bytes_total > 9_000_000 && info.bytes_done == info.bytes_total);
    let before = cluster.workers(all_have("m")).await.unwrap();
    let copy = mappings(before[0].pid, "hotcell-packed");
    assert_eq!(copy.len(), 1);
    assert_eq!(copy, mappings(before[1].pid, "hotcell-packed"));
    for worker in &before {
        signal_pid(worker.pid, Signal::KILL).unwrap();
    }
    let anew = |all: &[v1::WorkerInfo]| {
        all_have("m")(all)
            && all
                .iter()
                .zip(&before)
                .all(|(now, then)| now.epoch > then.epoch)
    };
    let after = cluster.workers(anew).await.unwrap();
    // They have it from the beginning: nobody waits here.
    let info = packed(&client).await.unwrap();
    assert_eq!(
        (info.packings, info.workers),
        (1, vec!["w0".to_owned(), "w1".to_owned()])
    );
    for worker in &after {
        assert_eq!(copy, mappings(worker.pid, "hotcell-packed"));
    }
    for _ in 0..2 {
        assert_eq!(said(&client, greedy(40)).await, right[0]);
    }
    let log = cluster.scheduler.log();
    assert_eq!(log.matches("weights packed").count(), 1, "{log}");
    client.unload("m").await.unwrap();
    let start = Instant::now();
    while open_files(cluster.scheduler.pid(), "hotcell-packed") > 0 {
        assert!(start.elapsed() < SOON, "the copy outlives the model");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for worker in &after {
        assert_eq!(mappings(worker.pid, "hotcell-packed").len(), 0);
    }
}

#[tokio::test]
async fn the_json_of_models_tells_of_copies() {
    let cluster = Cluster::with_model("m", &kjv(), &[]).await.unwrap();
    let client = cluster.client().await.unwrap();
    used(&cluster, &client, &["w0"]).await;
    let output = cluster.hotcell(&["models", "--json"]).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let packed = &json["models"][0]["packed"][0];
    assert_eq!(packed["state"], "ready");
    assert_eq!(packed["packings"], 1);
    assert_eq!(packed["workers"][0], "w0");
    assert_eq!(packed["layout"], "panel16-3");
}

#[tokio::test]
async fn a_worker_that_is_killed_while_it_packs_costs_its_streams_nothing() {
    let model = model(&LARGE);
    let right = unpacked(model.path(), &[greedy(450)]).await;
    for _ in 0..10 {
        if dies_while_it_packs(model.path(), &right[0]).await {
            return;
        }
    }
    panic!("it was too fast, ten times");
}

/// Kills a worker that packs and has a stream. Says whether it did both when it died.
async fn dies_while_it_packs(model: &Path, right: &Said) -> bool {
    let cache = private();
    let folder = cache.path().to_str().unwrap();
    // One death under a request would be enough for it to be run alone.
    let arguments = ["--pack-dir", folder, "--suspect-after", "1"];
    let cluster = Cluster::start(&arguments).await.unwrap();
    let client = cluster.client().await.unwrap();
    let workers = cluster
        .workers(|all| all.iter().all(|w| w.pid != 0))
        .await
        .unwrap();
    client.load("m", model.to_str().unwrap()).await.unwrap();
    let packing = |info: &PackedInfo| info.state() != PackedState::Waiting && info.bytes_done > 0;
    until(&cluster, &client, packing).await;
    let stream = client.generate("In the beginning", greedy(450));
    let mut stream = stream.await.unwrap();
    let (mut all, mut survived, mut struck, mut deaths) = (Said::default(), Vec::new(), false, 0);
    let mut seen = None;
    while let Some(event) = stream.next().await {
        match event.unwrap() {
            Event::Accepted(_) => {}
            Event::Delta(delta) => {
                add(&mut all, &delta);
                survived.extend(delta.survived);
            }
            Event::Finished(finished) => {
                deaths = finished.deaths_survived;
                survived.extend(finished.survived);
            }
        }
        if !all.0.is_empty() && !std::mem::replace(&mut struck, true) {
            signal_pid(workers[0].pid, Signal::STOP).unwrap();
            seen = packed(&client).await;
            signal_pid(workers[0].pid, Signal::KILL).unwrap();
        }
    }
    assert_eq!(all, *right);
    assert_eq!(survived.len(), deaths as usize);
    // It may have drawn all of it by then.
    if seen.is_none_or(|info| info.state() != PackedState::Packing) || deaths == 0 {
        return false;
    }
    // It did not go on alone, in a throw-away worker.
    let on: Vec<&str> = survived.iter().map(|s| s.continued_on.as_str()).collect();
    assert_eq!(on.len(), 1, "{on:?}");
    assert_eq!(on[0].split(' ').next(), Some("w0"));
    let info = used(&cluster, &client, &["w0"]).await;
    assert_eq!(info.packings, 1);
    assert_eq!(said(&client, greedy(450)).await, *right);
    // What was half done is gone.
    assert_eq!(files(cache.path(), "draft").len(), 0);
    assert_eq!(files(cache.path(), "packed").len(), 1);
    true
}

#[tokio::test]
async fn packing_is_given_up_when_it_kills_again_and_again() {
    let model = model(&LARGE);
    for _ in 0..10 {
        if kills_again_and_again(model.path()).await {
            return;
        }
    }
    panic!("it was too fast, ten times");
}

/// Kills whoever packs a model until nobody does any more. Says whether all of them were packing then.
async fn kills_again_and_again(model: &Path) -> bool {
    let cache = private();
    let folder = cache.path().to_str().unwrap();
    let cluster = Cluster::start(&["--pack-dir", folder]).await.unwrap();
    let client = cluster.client().await.unwrap();
    client.load("m", model.to_str().unwrap()).await.unwrap();
    let over = |info: &PackedInfo| match info.state() {
        PackedState::Packing => info.bytes_done > 0,
        state => state != PackedState::Waiting,
    };
    for attempt in 0.. {
        let info = until(&cluster, &client, over).await;
        if info.state() == PackedState::Ready {
            return false;
        }
        if info.state() == PackedState::Failed {
            assert_eq!(attempt, 3);
            break;
        }
        let workers = cluster.workers(|all| all[0].pid != 0).await.unwrap();
        signal_pid(workers[0].pid, Signal::KILL).unwrap();
        let gone = |all: &[v1::WorkerInfo]| all[0].epoch > workers[0].epoch;
        cluster.workers(gone).await.unwrap();
        // What was said of this attempt is not taken for the next one.
        until(&cluster, &client, |info| {
            !over(info) || info.state() != PackedState::Packing
        })
        .await;
    }
    cluster.workers(all_have("m")).await.unwrap();
    let info = packed(&client).await.unwrap();
    assert_eq!((info.packings, info.workers.len()), (0, 0));
    assert!(info.problem.contains("died"), "{}", info.problem);
    assert_eq!(said(&client, greedy(4)).await.0.len(), 4);
    assert_eq!(files(cache.path(), "draft").len(), 0);
    let table = cluster.hotcell(&["models"]).unwrap().stdout;
    let table = String::from_utf8(table).unwrap();
    assert!(table.contains("unpacked: "), "{table}");
    true
}

#[tokio::test]
async fn the_next_scheduler_finds_the_copy_and_nobody_keeps_the_original_in_memory() {
    let (model, cache) = (model(&LARGE), private());
    let right = unpacked(model.path(), &[greedy(40)]).await;
    let folder = cache.path().join("made/by it");
    let folder = folder.to_str().unwrap();
    let arguments = ["--pack-dir", folder, "--devices", "cpu:2"];
    for packings in [1, 0, 0] {
        let cluster = Cluster::with_model("m", model.path(), &arguments)
            .await
            .unwrap();
        let client = cluster.client().await.unwrap();
        let info = used(&cluster, &client, &["w0", "w1"]).await;
        assert_eq!(info.packings, packings, "{}", cluster.scheduler.log());
        for _ in 0..2 {
            assert_eq!(said(&client, greedy(40)).await, right[0]);
        }
        for worker in cluster.workers(all_have("m")).await.unwrap() {
            let (copy, original) = (".packed", "model.safetensors");
            assert!(resident(worker.pid, copy) > 90 << 10);
            // The embedding's rows, and what else is read where it is.
            let start = Instant::now();
            while resident(worker.pid, original) > 16 << 10 {
                let kib = resident(worker.pid, original);
                assert!(
                    start.elapsed() < SOON,
                    "{kib} KiB of {original} are resident"
                );
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        let mode = fs::metadata(folder).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }
    assert_eq!(files(Path::new(folder), "packed").len(), 1);
}

#[tokio::test]
async fn a_copy_that_is_none_is_not_used() {
    let (model, cache) = (model(&LARGE), private());
    let right = unpacked(model.path(), &[greedy(20)]).await;
    let folder = cache.path().to_str().unwrap();
    let arguments = ["--pack-dir", folder];
    let make = async || {
        let cluster = Cluster::with_model("m", model.path(), &arguments)
            .await
            .unwrap();
        let client = cluster.client().await.unwrap();
        let info = used(&cluster, &client, &["w0"]).await;
        assert_eq!(said(&client, greedy(20)).await, right[0]);
        assert_eq!(cluster.workers(all_have("m")).await.unwrap()[0].deaths, 0);
        info.packings
    };
    assert_eq!(make().await, 1);
    let copy = || files(cache.path(), "packed").remove(0);
    let length = fs::metadata(copy()).unwrap().len();
    let write = |path: &Path, bytes: &[u8]| {
        fs::write(path, bytes).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o400)).unwrap();
    };
    // Short; with one bit wrong; somebody else's.
    let shorter = fs::read(copy()).unwrap();
    write(&copy(), &shorter[..shorter.len() - 1]);
    assert_eq!(make().await, 1);
    let mut wrong = fs::read(copy()).unwrap();
    wrong[usize::try_from(length / 2).unwrap()] ^= 1;
    write(&copy(), &wrong);
    assert_eq!(make().await, 1);
    let path = copy();
    fs::remove_file(&path).unwrap();
    write(&path, &vec![0; usize::try_from(length).unwrap()]);
    assert_eq!(make().await, 1);
    assert_eq!(make().await, 0);
}

#[tokio::test]
async fn a_model_that_finds_no_room_goes_on_unpacked() {
    let model = model(&LARGE);
    let open = TempDir::new().unwrap();
    fs::set_permissions(open.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let full = private();
    let right = unpacked(model.path(), &[greedy(12)]).await;
    for (arguments, why) in [
        (
            vec![
                "--pack-dir",
                full.path().to_str().unwrap(),
                "--pack-limit",
                "0",
            ],
            "--pack-limit is 0",
        ),
        (
            vec!["--pack-dir", "/dev/null/packed"],
            "/dev/null/packed cannot be used",
        ),
        (
            vec!["--pack-dir", open.path().to_str().unwrap()],
            "chmod 700",
        ),
    ] {
        let cluster = Cluster::with_model("m", model.path(), &arguments)
            .await
            .unwrap();
        let client = cluster.client().await.unwrap();
        let info = failed(&cluster, &client).await;
        assert!(info.problem.contains(why), "{}", info.problem);
        assert_eq!(said(&client, greedy(12)).await, right[0]);
        // Neither tried nor said again for the next worker.
        let before = cluster.workers(all_have("m")).await.unwrap()[0].clone();
        signal_pid(before.pid, Signal::KILL).unwrap();
        let anew = |all: &[v1::WorkerInfo]| all_have("m")(all) && all[0].epoch > before.epoch;
        cluster.workers(anew).await.unwrap();
        assert_eq!(said(&client, greedy(12)).await, right[0]);
        let log = cluster.scheduler.log();
        assert_eq!(log.matches("goes on unpacked").count(), 1, "{log}");
    }
    assert_eq!(files(full.path(), "packed").len(), 0);
}

#[tokio::test]
async fn unloading_cuts_packing_short_and_leaves_nothing() {
    let (model, cache) = (model(&LARGE), private());
    let folder = cache.path().to_str().unwrap();
    let cluster = Cluster::start(&["--pack-dir", folder]).await.unwrap();
    let client = cluster.client().await.unwrap();
    let path = model.path().to_str().unwrap();
    client.load("m", path).await.unwrap();
    until(&cluster, &client, |info| info.bytes_done > 0).await;
    client.unload("m").await.unwrap();
    let start = Instant::now();
    let is_over = || {
        let open = open_files(cluster.scheduler.pid(), folder);
        // The folder itself is held open.
        files(cache.path(), "draft").is_empty() && open <= 1
    };
    while !is_over() {
        assert!(start.elapsed() < SOON, "{}", cluster.scheduler.log());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let log = cluster.scheduler.log();
    assert!(!log.contains("packing failed"), "{log}");
    client.load("m", path).await.unwrap();
    used(&cluster, &client, &["w0"]).await;
    assert_eq!(cluster.workers(all_have("m")).await.unwrap()[0].deaths, 0);
}

#[tokio::test]
async fn a_copy_in_memory_survives_a_takeover() {
    let cluster = Cluster::with_model("m", &kjv(), &[]).await.unwrap();
    let client = cluster.client().await.unwrap();
    let before = used(&cluster, &client, &["w0"]).await;
    let workers = cluster.workers(all_have("m")).await.unwrap();
    let copy = mappings(workers[0].pid, "hotcell-packed");
    let mut command = std::process::Command::new(binaries().unwrap().join("hotcell-scheduler"));
    command
        .args(["--takeover", "--socket"])
        .arg(&cluster.socket)
        .env_clear()
        .env("XDG_CONFIG_HOME", cluster.folder.path());
    let output = tokio::task::spawn_blocking(move || command.output());
    let output = output.await.unwrap().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{error}");
    let client = cluster.client().await.unwrap();
    let after = used(&cluster, &client, &["w0"]).await;
    assert_eq!(after, before);
    // The next worker gets the very same one.
    let now = cluster.workers(all_have("m")).await.unwrap();
    assert_eq!(now[0].pid, workers[0].pid);
    signal_pid(now[0].pid, Signal::KILL).unwrap();
    let anew = |all: &[v1::WorkerInfo]| all_have("m")(all) && all[0].epoch > now[0].epoch;
    let now = cluster.workers(anew).await.unwrap();
    assert_eq!(mappings(now[0].pid, "hotcell-packed"), copy);
    assert_eq!(packed(&client).await.unwrap(), before);
}

#[tokio::test]
async fn experts_are_packed_with_the_rest() {
    let path = golden("gguf/qwen3_moe-q8_0.gguf");
    let ask = async |client: &Client| {
        let prompt = Prompt::Ids((0..40).map(|i| 5 + i * 7 % 250).collect());
        let stream = client.generate(prompt, greedy(40)).await.unwrap();
        stream.complete().await.unwrap()
    };
    let right = {
        let cluster = Cluster::with_model("m", &path, &["--no-pack"])
            .await
            .unwrap();
        ask(&cluster.client().await.unwrap()).await
    };
    let cluster = Cluster::with_model("m", &path, &[]).await.unwrap();
    let client = cluster.client().await.unwrap();
    used(&cluster, &client, &["w0"]).await;
    assert_same(&ask(&client).await, &right, "packed");
    // The copy that the scheduler holds has them otherwise than the file.
    let fds = fs::read_dir(format!("/proc/{}/fd", cluster.scheduler.pid())).unwrap();
    let is_copy = |fd: &PathBuf| {
        fs::read_link(fd).is_ok_and(|to| to.to_string_lossy().contains("hotcell-packed"))
    };
    let mut fds = fds.map(|fd| fd.unwrap().path());
    let copy = fs::read(fds.find(is_copy).unwrap()).unwrap();
    let file = fs::read(&path).unwrap();
    assert_eq!(copy.len(), file.len());
    let source = open(&path).unwrap();
    for name in ["gate", "up", "down"] {
        let weight = format!("blk.0.ffn_{name}_exps.weight");
        let range = source.weights.get(&weight).unwrap().range.clone();
        assert_ne!(copy[range.clone()], file[range], "{weight}");
    }
}

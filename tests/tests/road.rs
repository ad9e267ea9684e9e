//! The whole road with real processes: scheduler, workers, clients.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{collections::HashSet, time::Duration};

use hotcell_client::{Client, Event, GenerateOptions, Prompt, Reason, v1};
use hotcell_tests::cluster::{
    Cluster, Process, SOON, all_have, binaries, counted, golden, kjv, signal_pid,
};
use rustix::process::Signal;

const PROMPT: &str = "In the beginning";

fn greedy(tokens: u32) -> GenerateOptions {
    GenerateOptions {
        max_tokens: tokens,
        ignore_eos: true,
        ..GenerateOptions::default()
    }
}

fn sampled(tokens: u32, seed: u64) -> GenerateOptions {
    GenerateOptions {
        sampling: v1::Sampling {
            temperature: Some(0.9),
            top_p: Some(0.95),
            repetition_penalty: Some(1.1),
            frequency_penalty: Some(0.2),
            ..v1::Sampling::default()
        },
        seed: Some(seed),
        ..greedy(tokens)
    }
}

async fn kjv_cluster(arguments: &[&str]) -> Cluster {
    let cluster = Cluster::with_model("kjv", &kjv(), arguments).await.unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    cluster
}

#[tokio::test]
async fn a_stream_begins_with_accepted_ends_with_finished_and_is_what_transformers_says() {
    let cluster = kjv_cluster(&["--kv-cache", "f32"]).await;
    let client = cluster.client().await.unwrap();
    let golden: serde_json::Value =
        serde_json::from_slice(&std::fs::read(kjv().join("golden.json")).unwrap()).unwrap();
    let ids = |key: &str| -> Vec<u32> {
        golden[key]
            .as_array()
            .unwrap()
            .iter()
            .map(|v| v.as_u64().unwrap() as u32)
            .collect()
    };
    let expected = ids("greedy");

    let mut stream = client
        .generate(
            golden["prompt"].as_str().unwrap(),
            greedy(expected.len() as u32),
        )
        .await
        .unwrap();
    let (mut events, mut text, mut tokens) = (0, String::new(), Vec::new());
    while let Some(event) = stream.next().await {
        match event.unwrap() {
            Event::Accepted(a) => {
                assert_eq!(events, 0);
                assert_eq!(a.prompt_ids, ids("ids"));
                assert_eq!(a.model, "kjv");
                let numerics = a.numerics.unwrap();
                assert!(
                    numerics.reproducible
                        && numerics.id.starts_with("cpu/")
                        && numerics.id.ends_with("/kv:f32")
                );
            }
            Event::Delta(d) => {
                assert!(d.token_ids.len() <= 1, "token by token");
                text.push_str(&d.text);
                tokens.extend(d.token_ids);
            }
            Event::Finished(f) => {
                assert_eq!(f.reason(), v1::FinishReason::MaxTokens);
                let usage = f.usage.unwrap();
                assert_eq!(usage.prompt_tokens as usize, ids("ids").len());
                assert_eq!(usage.generated_tokens as usize, expected.len());
                assert!(f.timings.unwrap().decode_ms > 0.0);
            }
        }
        events += 1;
    }
    assert_eq!(tokens, expected, "{text}");
    assert!(events >= expected.len() + 2);
}

#[tokio::test]
async fn requests_in_one_batch_get_what_they_get_alone() {
    let cluster = kjv_cluster(&[]).await;
    let client = cluster.client().await.unwrap();
    let prompts: [&'static str; 5] = [
        "And God said",
        "The LORD is my",
        "Now",
        "And it came to pass, that in the days of",
        "For",
    ];
    let mut alone = Vec::new();
    for (i, prompt) in prompts.iter().enumerate() {
        alone.push(
            client
                .generate(*prompt, sampled(24, i as u64))
                .await
                .unwrap()
                .complete()
                .await
                .unwrap(),
        );
    }
    let together = prompts.into_iter().enumerate().map(|(i, prompt)| {
        let client = client.clone();
        async move {
            // Join while others are at work.
            tokio::time::sleep(Duration::from_millis(7 * i as u64)).await;
            client
                .generate(prompt, sampled(24, i as u64))
                .await
                .unwrap()
                .complete()
                .await
                .unwrap()
        }
    });
    let handles: Vec<_> = together.map(tokio::spawn).collect();
    for (handle, alone) in handles.into_iter().zip(&alone) {
        let together = handle.await.unwrap();
        assert_eq!(together.token_ids, alone.token_ids);
        assert_eq!(together.text, alone.text);
    }
    let other = client
        .generate(prompts[0], sampled(24, 99))
        .await
        .unwrap()
        .complete()
        .await
        .unwrap();
    assert_ne!(
        other.token_ids, alone[0].token_ids,
        "another seed is another text"
    );
}

#[tokio::test]
async fn stop_strings_logprobs_and_text_agree_with_detokenised_ids() {
    let cluster = kjv_cluster(&[]).await;
    let client = cluster.client().await.unwrap();
    let all = client
        .generate(PROMPT, greedy(40))
        .await
        .unwrap()
        .complete()
        .await
        .unwrap();
    // A stop string from the middle of the text.
    let at = all.text.char_indices().nth(30).unwrap().0;
    let stop: String = all.text[at..].chars().take(6).collect();
    let options = GenerateOptions {
        stop: vec![stop.clone()],
        logprobs: true,
        top_logprobs: 3,
        ..greedy(40)
    };
    let cut = client
        .generate(PROMPT, options)
        .await
        .unwrap()
        .complete()
        .await
        .unwrap();
    assert_eq!(cut.finished.reason(), v1::FinishReason::StopString);
    assert_eq!(cut.finished.matched_stop, stop);
    assert_eq!(cut.text, all.text[..all.text.find(&stop).unwrap()]);
    assert_eq!(cut.logprobs.len(), cut.token_ids.len());
    for (logprob, token) in cut.logprobs.iter().zip(&cut.token_ids) {
        assert_eq!(logprob.token, *token);
        assert_eq!(logprob.top.len(), 3);
        assert_eq!(logprob.top[0].token, *token, "greedy is the most probable");
        assert!(logprob.logprob <= 0.0 && logprob.logprob == logprob.top[0].logprob);
    }
    let (prompt, text) = (all.accepted.prompt_ids.clone(), all.text.clone());
    let ids: Vec<u32> = prompt.iter().chain(&all.token_ids).copied().collect();
    assert_eq!(
        client.detokenize("kjv", ids, false).await.unwrap(),
        format!("{PROMPT}{text}")
    );
}

#[tokio::test]
async fn dropping_a_stream_frees_its_place_and_a_deadline_ends_one() {
    let cluster = kjv_cluster(&[]).await;
    let client = cluster.client().await.unwrap();
    let mut stream = client.generate(PROMPT, greedy(900)).await.unwrap();
    for _ in 0..3 {
        stream.next().await.unwrap().unwrap();
    }
    let running = |n: u32| move |w: &[v1::WorkerInfo]| w.iter().all(|w| w.running_requests == n);
    cluster.workers(running(1)).await.unwrap();
    drop(stream);
    cluster.workers(running(0)).await.unwrap();

    let options = GenerateOptions {
        deadline: Some(Duration::from_millis(60)),
        ..greedy(1000)
    };
    let error = client
        .generate(PROMPT, options)
        .await
        .unwrap()
        .complete()
        .await
        .unwrap_err();
    assert_eq!(error.reason(), Reason::DeadlineExceeded);
    cluster.workers(running(0)).await.unwrap();
}

#[tokio::test]
async fn a_reader_that_does_not_read_stops_only_its_own_stream() {
    let cluster = kjv_cluster(&[]).await;
    let client = cluster.client().await.unwrap();
    let mut idle = Vec::new();
    for _ in 0..8 {
        let mut stream = client.generate(PROMPT, greedy(1000)).await.unwrap();
        stream.next().await.unwrap().unwrap();
        idle.push(stream);
    }
    let other = cluster.client().await.unwrap();
    let done = tokio::time::timeout(SOON, async {
        other
            .generate("And God said", greedy(64))
            .await
            .unwrap()
            .complete()
            .await
            .unwrap()
    });
    assert_eq!(done.await.unwrap().token_ids.len(), 64);
    // The unread ones are complete when somebody reads them after all.
    let first = idle.remove(0);
    // All eight of them take their turns.
    let rest = tokio::time::timeout(8 * SOON, async move {
        let (mut stream, mut tokens) = (first, 0);
        while let Some(event) = stream.next().await {
            if let Event::Delta(d) = event.unwrap() {
                tokens += d.token_ids.len();
            }
        }
        tokens
    });
    assert_eq!(rest.await.unwrap(), 1000);
}

#[tokio::test]
async fn two_models_and_two_devices() {
    let cluster = kjv_cluster(&["--devices", "cpu:2"]).await;
    let client = cluster.client().await.unwrap();
    // A folder in three shards: handed over as a set of descriptors, whose index only the worker reads.
    let path = golden("llama3");
    client.load("tiny", path.to_str().unwrap()).await.unwrap();
    let workers = cluster.workers(all_have("tiny")).await.unwrap();
    assert_eq!(workers.len(), 2);
    let devices: HashSet<_> = workers
        .iter()
        .map(|w| w.lease.clone().unwrap().device)
        .collect();
    assert_eq!(devices.len(), 2);
    for worker in &workers {
        assert!(
            worker.confinement.contains("no-new-privs"),
            "{}",
            worker.confinement
        );
        assert!(
            worker.confinement.contains("seccomp"),
            "{}",
            worker.confinement
        );
    }
    let ask = |model: &str, prompt: Prompt| {
        let (client, options) = (
            client.clone(),
            GenerateOptions {
                model: model.to_owned(),
                ..greedy(16)
            },
        );
        async move {
            client
                .generate(prompt, options)
                .await
                .unwrap()
                .complete()
                .await
                .unwrap()
        }
    };
    let (a, b) = tokio::join!(
        ask("kjv", PROMPT.into()),
        ask("tiny", Prompt::Ids(vec![1, 2, 3]))
    );
    assert_eq!((a.token_ids.len(), b.token_ids.len()), (16, 16));
    let two = (
        ask("kjv", PROMPT.into()),
        ask("kjv", PROMPT.into()),
        ask("kjv", PROMPT.into()),
    );
    let (c, d, e) = tokio::join!(two.0, two.1, two.2);
    assert!(
        [c, d, e].iter().all(|x| x.token_ids == a.token_ids),
        "devices of one class agree"
    );
    client.unload("tiny").await.unwrap();
    let error = client
        .generate(
            Prompt::Ids(vec![1]),
            GenerateOptions {
                model: "tiny".into(),
                ..greedy(1)
            },
        )
        .await;
    let error = match error {
        Ok(stream) => stream.complete().await.unwrap_err(),
        Err(error) => error,
    };
    assert_eq!(error.reason(), Reason::ModelNotFound);
}

async fn sole_pid(cluster: &Cluster) -> u32 {
    cluster.workers(all_have("kjv")).await.unwrap()[0].pid
}

/// The promise that everything else serves: the worker may die at any token.
async fn killed_at_every_index(options: GenerateOptions) {
    let tokens = options.max_tokens as usize;
    let cluster = kjv_cluster(&[
        "--restart-budget",
        "1000",
        "--restart-backoff",
        "1ms",
        "--restart-backoff-max",
        "5ms",
    ])
    .await;
    let client = cluster.client().await.unwrap();
    let calm = client
        .generate(PROMPT, options.clone())
        .await
        .unwrap()
        .complete()
        .await
        .unwrap();
    assert_eq!(calm.token_ids.len(), tokens);
    assert_eq!(calm.finished.deaths_survived, 0);
    let mut deaths = 0;
    for kill_at in 0..=tokens {
        let pid = sole_pid(&cluster).await;
        let mut stream = client.generate(PROMPT, options.clone()).await.unwrap();
        let (mut got, mut text, mut killed) = (Vec::new(), String::new(), false);
        let mut finished = None;
        while let Some(event) = stream.next().await {
            match event.unwrap() {
                Event::Accepted(a) => assert_eq!(a.prompt_ids, calm.accepted.prompt_ids),
                Event::Delta(d) => {
                    text.push_str(&d.text);
                    got.extend(d.token_ids);
                }
                Event::Finished(f) => finished = Some(f),
            }
            if got.len() >= kill_at && !killed {
                killed = true;
                // It may be done already and about to serve the next index; then there is nothing to survive.
                let _ = signal_pid(pid, Signal::KILL);
            }
        }
        let finished = finished.unwrap();
        assert_eq!(got, calm.token_ids, "killed at {kill_at}");
        assert_eq!(text, calm.text, "killed at {kill_at}");
        assert_eq!(
            counted(&finished),
            counted(&calm.finished),
            "killed at {kill_at}"
        );
        assert_eq!(finished.reason, calm.finished.reason, "killed at {kill_at}");
        deaths += finished.deaths_survived;
        // The next index needs a living worker that is not the one just killed.
        cluster
            .workers(|w| all_have("kjv")(w) && w[0].pid != pid)
            .await
            .unwrap();
    }
    assert!(
        deaths as usize * 2 > tokens,
        "only {deaths} kills hit a running stream"
    );
}

#[tokio::test]
async fn a_greedy_stream_survives_a_kill_at_every_token() {
    killed_at_every_index(greedy(32)).await;
}

#[tokio::test]
async fn a_sampled_stream_with_penalties_survives_a_kill_at_every_token() {
    killed_at_every_index(sampled(32, 7)).await;
}

#[tokio::test]
async fn a_dead_worker_disturbs_no_other() {
    let cluster = kjv_cluster(&["--devices", "cpu:2"]).await;
    let client = cluster.client().await.unwrap();
    let calm = client
        .generate(PROMPT, greedy(900))
        .await
        .unwrap()
        .complete()
        .await
        .unwrap();
    let streams: Vec<_> = (0..6)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move {
                client
                    .generate(PROMPT, greedy(900))
                    .await
                    .unwrap()
                    .complete()
                    .await
            })
        })
        .collect();
    let workers = cluster
        .workers(|w| w.iter().all(|w| w.running_requests > 0))
        .await
        .unwrap();
    // Not SIGSEGV: Rust's handler for stack overflows swallows the first one that no fault caused.
    signal_pid(workers[0].pid, Signal::ABORT).unwrap();
    let mut survived = 0;
    for stream in streams {
        let done = stream.await.unwrap().unwrap();
        assert_eq!(done.token_ids, calm.token_ids);
        survived += done.finished.deaths_survived;
    }
    assert!(survived > 0, "nothing ran on the killed worker");
    let workers = cluster
        .workers(|w| all_have("kjv")(w) && w.iter().any(|w| w.deaths == 1))
        .await
        .unwrap();
    let dead = workers.iter().find(|w| w.deaths == 1).unwrap();
    assert!(dead.last_exit.contains("SIGABRT"), "{}", dead.last_exit);
    assert_eq!(dead.epoch, workers.iter().map(|w| w.epoch).max().unwrap());
}

// Clients hang up when they are told to, while this waits.
#[tokio::test(flavor = "multi_thread")]
async fn sigterm_drains_and_no_child_or_socket_is_left() {
    let mut cluster = kjv_cluster(&[]).await;
    let client = cluster.client().await.unwrap();
    let pid = sole_pid(&cluster).await;
    let mut stream = client.generate(PROMPT, greedy(100)).await.unwrap();
    stream.next().await.unwrap().unwrap();
    cluster.scheduler.signal(Signal::TERM).unwrap();
    let mut tokens = 0;
    while let Some(event) = stream.next().await {
        if let Event::Delta(d) = event.unwrap() {
            tokens += d.token_ids.len();
        }
    }
    assert_eq!(tokens, 100, "a running stream ends whole");
    drop((stream, client));
    // It waits for those that run, and not for its patience.
    let begun = std::time::Instant::now();
    assert!(cluster.scheduler.wait().unwrap().success());
    let log = cluster.scheduler.log();
    assert!(!log.contains(" in time"), "{log}");
    assert!(begun.elapsed() < Duration::from_secs(15), "{log}");
    assert!(!cluster.socket.exists());
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
}

#[tokio::test]
async fn killing_the_scheduler_takes_its_workers_along_and_a_new_one_starts_over_the_remains() {
    let mut cluster = kjv_cluster(&[]).await;
    let pid = sole_pid(&cluster).await;
    cluster.scheduler.signal(Signal::KILL).unwrap();
    cluster.scheduler.wait().unwrap();
    let start = std::time::Instant::now();
    while std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| !s.contains(") Z ")) {
        assert!(
            start.elapsed() < Duration::from_secs(1),
            "worker {pid} outlives its scheduler"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(cluster.socket.exists(), "the old socket is there");
    let mut command = std::process::Command::new(binaries().unwrap().join("hotcell-scheduler"));
    command
        .arg("--socket")
        .arg(&cluster.socket)
        .env_clear()
        .env("XDG_CONFIG_HOME", cluster.folder.path());
    cluster.scheduler = Process::start(&mut command).unwrap();
    let start = std::time::Instant::now();
    while cluster.client().await.is_err() {
        assert!(start.elapsed() < SOON);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_worker_alone_serves_the_same_client() {
    let folder = hotcell_tests::cluster::private_folder().unwrap();
    let socket = folder.path().join("worker.sock");
    let mut command = std::process::Command::new(binaries().unwrap().join("hotcell-worker"));
    command
        .arg("--listen")
        .arg(format!("unix:{}", socket.display()))
        .arg("--model")
        .arg(kjv());
    let worker = Process::start(&mut command).unwrap();
    let address = format!("unix:{}", socket.display()).parse().unwrap();
    let start = std::time::Instant::now();
    let client = loop {
        match Client::connect(&address).await {
            Ok(client) => break client,
            Err(_) => assert!(start.elapsed() < SOON, "{}", worker.log()),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let done = client
        .generate(PROMPT, greedy(8))
        .await
        .unwrap()
        .complete()
        .await
        .unwrap();
    assert_eq!(done.token_ids.len(), 8);
}

/// Resident pages of a process that lie in files, and those that are its own, in bytes.
fn resident(pid: u32, file: &str) -> (u64, u64) {
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let (mut inside, mut rss, mut private) = (false, 0, 0);
    for line in smaps.lines() {
        let first = line.split_whitespace().next().unwrap_or_default();
        if !first.ends_with(':') {
            inside = line.contains(file);
        } else if inside {
            let kib = || {
                line.split_whitespace()
                    .nth(1)
                    .unwrap()
                    .parse::<u64>()
                    .unwrap()
                    * 1024
            };
            match first {
                "Rss:" => rss += kib(),
                "Private_Clean:" | "Private_Dirty:" => private += kib(),
                _ => {}
            }
        }
    }
    (rss, private)
}

#[tokio::test]
async fn two_workers_share_the_pages_of_one_model() {
    // Those of packed copies they share as well, and then let go of these: `--test packing`.
    let cluster = kjv_cluster(&["--devices", "cpu:2", "--no-pack"]).await;
    let workers = cluster.workers(all_have("kjv")).await.unwrap();
    let size = std::fs::metadata(kjv().join("model.safetensors"))
        .unwrap()
        .len();
    for worker in &workers {
        let (rss, private) = resident(worker.pid, "model.safetensors");
        assert!(rss * 10 >= size * 9, "{rss} of {size} bytes are mapped in");
        assert!(
            private * 20 < size,
            "{private} bytes are private to worker {}",
            worker.id
        );
    }
}

/// Cores that each compute thread of a process may run on; the engine's first.
fn compute_cores(pid: u32) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let mut threads: Vec<(String, String)> = tasks
        .map(|task| {
            let task = task.unwrap().path();
            let name = std::fs::read_to_string(task.join("comm")).unwrap();
            let status = std::fs::read_to_string(task.join("status")).unwrap();
            let mut lines = status.lines();
            let allowed = lines.find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
            (name.trim().to_owned(), allowed.unwrap().trim().to_owned())
        })
        .filter(|(name, _)| name == "engine" || name.starts_with("compute-"))
        .collect();
    threads.sort_by_key(|(name, _)| (name != "engine", name.len(), name.clone()));
    threads.into_iter().map(|(_, cores)| cores).collect()
}

#[tokio::test]
async fn compute_threads_stay_on_cores_of_their_own_if_that_is_asked_for() {
    for flags in [&[][..], &["--pin"]] {
        let cluster = kjv_cluster(flags).await;
        let client = cluster.client().await.unwrap();
        let devices = client.devices().await.unwrap();
        let own: Vec<String> = devices[0].cores.iter().map(u32::to_string).collect();
        let workers = cluster.workers(all_have("kjv")).await.unwrap();
        let allowed = compute_cores(workers[0].pid);
        let pinned = !flags.is_empty() || own.len() == 1;
        assert_eq!(allowed == own, pinned, "{flags:?}: {allowed:?} of {own:?}");
        let answer = client.generate(PROMPT, greedy(20)).await.unwrap();
        let answer = answer.complete().await.unwrap();
        assert_eq!(answer.token_ids.len(), 20);
    }
}

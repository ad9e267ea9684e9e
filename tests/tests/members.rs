//! Workers of several processes, each of which computes a part of every model, of its columns or of its layers: the same
//! bits as one process, and to those outside one worker, whichever of them dies.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::time::{Duration, Instant};

use hotcell_client::{
    Client, Completion, EmbedOptions, Event, GenerateOptions, Grammar, Prompt, Reason,
    debug::Recording,
    v1::{self, condition, guard_event},
};
use hotcell_graph::{DType, GraphBuilder, Shape, TensorSpec};
use hotcell_tests::{
    answers::assert_same,
    cluster::{Cluster, SOON, all_have, children, golden, kjv, lives, signal_pid},
    conformance::{Executor, Remote, RunError},
    debugged::{of, put_together, spans},
    options::{drawn, greedy},
    rewritten::fused_experts,
};
use hotcell_worker::model::points::matches;
use rustix::process::Signal;
use tokio::task::JoinSet;

const TOKENS: u32 = 24;

/// Streams beside each other.
const STREAMS: u32 = 24;

/// The ways to divide a model.
const COLUMNS: &str = "--tensor-parallel";
const LAYERS: &str = "--pipeline-parallel";

/// Every family, biases, one key head that nobody can share, caps, windows, experts, blocks of several kinds, and scales of
/// rectangles that members cut through, of rows and of whole matrices.
const MODELS: [&str; 15] = [
    "llama2",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma3",
    "gemma3-cap",
    "qwen3_moe",
    "qwen3_moe-step",
    "gguf/qwen3_moe-q8_0.gguf",
    "gguf/llama-k.gguf",
    "gguf/llama3-q4_0.gguf",
    "gguf/llama3-q8_0.gguf",
    "qwen3-fp8",
    "qwen3_moe-fp8",
    "llama2-fp8",
];

fn ids(count: u32) -> Prompt {
    Prompt::Ids((0..count).map(|i| 5 + i * 7 % 250).collect())
}

async fn complete(client: &Client, prompt: &Prompt, options: &GenerateOptions) -> Completion {
    let stream = client.generate(prompt.clone(), options.clone()).await;
    stream.unwrap().complete().await.unwrap()
}

/// Answers of one model: short and long prompts, several at once that share one, and an embedding.
async fn answers(client: &Client, model: &str) -> (Vec<Completion>, Vec<f32>) {
    let of = |options: GenerateOptions| GenerateOptions {
        model: model.to_owned(),
        logprobs: true,
        top_logprobs: 3,
        ..options
    };
    let mut all = vec![
        complete(client, &ids(5), &of(greedy(TOKENS))).await,
        // A step that is computed piece by piece, and more than one step of a prompt.
        complete(client, &ids(100), &of(drawn(TOKENS, 8))).await,
        complete(client, &ids(150), &of(drawn(TOKENS, 7))).await,
    ];
    let together = (0..3).map(|branch| {
        let (client, options) = (client.clone(), of(drawn(TOKENS, 3)));
        let options = GenerateOptions { branch, ..options };
        tokio::spawn(async move { complete(&client, &ids(37), &options).await })
    });
    for answer in together.collect::<Vec<_>>() {
        all.push(answer.await.unwrap());
    }
    let options = EmbedOptions {
        model: model.to_owned(),
        mean: true,
        ..EmbedOptions::default()
    };
    let embedded = client.embed([ids(100)], options).await.unwrap();
    (all, embedded.embeddings[0].values.clone())
}

#[tokio::test]
async fn members_compute_the_bits_of_one_process() {
    let mut alone: Vec<(Vec<Completion>, Vec<f32>)> = Vec::new();
    let fused = fused_experts();
    // Most of these models have two layers: of three processes the first has none, of four the third neither.
    for (division, members) in [
        (COLUMNS, 1),
        (COLUMNS, 2),
        (COLUMNS, 4),
        (LAYERS, 2),
        (LAYERS, 3),
        (LAYERS, 4),
    ] {
        let cluster = Cluster::ready_with(&[division, &members.to_string()])
            .await
            .unwrap();
        let client = cluster.client().await.unwrap();
        let worker = cluster.workers(|w| w.len() == 1).await.unwrap()[0].pid;
        assert_eq!(children(worker).unwrap().len() + 1, members);
        let models = MODELS.map(|name| (name, golden(name)));
        let fused = ("fused experts", fused.path().to_owned());
        for (i, (model, path)) in models.into_iter().chain([fused]).enumerate() {
            client
                .load(&model_name(i), path.to_str().unwrap())
                .await
                .unwrap();
            let got = answers(&client, &model_name(i)).await;
            match alone.get(i) {
                None => alone.push(got),
                Some((completions, embedding)) => {
                    let what = format!("{model}, {division} {members}");
                    assert_eq!(got.1.len(), embedding.len());
                    assert_eq!(&got.1, embedding, "{what}");
                    for (got, alone) in got.0.iter().zip(completions) {
                        assert_same(got, alone, &what);
                    }
                }
            }
        }
        // Forgotten by all, and loaded again.
        client.unload(&model_name(0)).await.unwrap();
        let path = golden(MODELS[0]);
        client
            .load(&model_name(0), path.to_str().unwrap())
            .await
            .unwrap();
        let again = answers(&client, &model_name(0)).await;
        assert_same(&again.0[0], &alone[0].0[0], "loaded again");
    }
}

fn model_name(i: usize) -> String {
    format!("m{i}")
}

async fn kjv_cluster(division: &str, members: &str) -> Cluster {
    let arguments = [
        "--restart-budget",
        "1000",
        "--restart-backoff",
        "1ms",
        "--restart-backoff-max",
        "5ms",
        division,
        members,
    ];
    let cluster = Cluster::with_model("kjv", &kjv(), &arguments)
        .await
        .unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    cluster
}

#[tokio::test]
async fn a_stream_goes_on_whichever_member_dies() {
    let options = drawn(200, 9);
    let prompt = Prompt::from("In the beginning");
    let mut calm: Option<Vec<u32>> = None;
    // Four cannot share two key heads, and share the rest.
    for (division, members) in [(COLUMNS, 2), (COLUMNS, 4), (LAYERS, 2), (LAYERS, 3)] {
        let cluster = kjv_cluster(division, &members.to_string()).await;
        let client = cluster.client().await.unwrap();
        let whole = complete(&client, &prompt, &options).await;
        assert_eq!(whole.finished.deaths_survived, 0);
        let calm = calm.get_or_insert(whole.token_ids.clone());
        assert_eq!(calm, &whole.token_ids);
        for rank in 0..members {
            let leader = cluster.workers(all_have("kjv")).await.unwrap()[0].pid;
            let all = [vec![leader], children(leader).unwrap()].concat();
            assert_eq!(all.len(), members);
            let stream = client.generate(prompt.clone(), options.clone()).await;
            let mut stream = stream.unwrap();
            let mut tokens = Vec::new();
            while let Some(event) = stream.next().await {
                if let Event::Delta(delta) = event.unwrap() {
                    tokens.extend(delta.token_ids);
                    if tokens.len() == 3 {
                        signal_pid(all[rank], Signal::KILL).unwrap();
                    }
                }
            }
            assert_eq!(&tokens, calm, "{division}: member {rank} of {members} died");
            cluster
                .workers(|w| all_have("kjv")(w) && w[0].pid != leader)
                .await
                .unwrap();
            // Nobody is left of those that were.
            let begun = Instant::now();
            while all.iter().any(|pid| lives(*pid)) {
                assert!(begun.elapsed() < SOON, "{all:?}");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }
}

#[tokio::test]
async fn a_member_that_stops_is_a_hang_and_leaves_nothing_behind() {
    for division in [COLUMNS, LAYERS] {
        a_member_stops(division).await;
    }
}

async fn a_member_stops(division: &str) {
    let arguments = [division, "2", "--hang-timeout", "1s"];
    let cluster = Cluster::with_model("kjv", &kjv(), &arguments)
        .await
        .unwrap();
    let client = cluster.client().await.unwrap();
    let leader = cluster.workers(all_have("kjv")).await.unwrap()[0].pid;
    let member = children(leader).unwrap()[0];
    // Long enough that it is not over before the member is stopped, however late this test gets its turn.
    let options = drawn(1000, 9);
    let prompt = Prompt::from("In the beginning");
    let calm = complete(&client, &prompt, &options).await;
    let mut stream = client.generate(prompt, options).await.unwrap();
    let mut tokens = Vec::new();
    while let Some(event) = stream.next().await {
        match event.unwrap() {
            Event::Delta(delta) => {
                tokens.extend(delta.token_ids);
                if tokens.len() == 3 {
                    signal_pid(member, Signal::STOP).unwrap();
                }
            }
            Event::Finished(finished) => assert_eq!(finished.deaths_survived, 1),
            Event::Accepted(_) => {}
        }
    }
    assert_eq!(tokens, calm.token_ids);
    let begun = Instant::now();
    while lives(leader) || lives(member) {
        assert!(begun.elapsed() < SOON);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn all_members_compute_from_one_packed_copy() {
    let prompt = Prompt::from("In the beginning");
    let options = drawn(60, 4);
    let mut answers = Vec::new();
    for arguments in [&["--no-pack"][..], &[COLUMNS, "2"], &[LAYERS, "2"]] {
        let cluster = Cluster::with_model("kjv", &kjv(), arguments).await.unwrap();
        cluster.workers(all_have("kjv")).await.unwrap();
        let client = cluster.client().await.unwrap();
        let begun = Instant::now();
        while arguments.len() > 1
            && !cluster
                .scheduler
                .log()
                .contains("computes with packed weights")
        {
            assert!(begun.elapsed() < SOON, "{}", cluster.scheduler.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        answers.push(complete(&client, &prompt, &options).await);
        let worker = cluster.workers(all_have("kjv")).await.unwrap()[0].pid;
        for member in children(worker).unwrap() {
            let maps = std::fs::read_to_string(format!("/proc/{member}/maps")).unwrap();
            assert!(maps.contains("memfd:hotcell-packed"), "{maps}");
        }
    }
    for packed in &answers[1..] {
        assert_same(packed, &answers[0], "packed");
    }
}

#[tokio::test]
async fn a_member_that_dies_while_nobody_asks_for_anything_is_replaced() {
    let cluster = kjv_cluster(COLUMNS, "2").await;
    let leader = cluster.workers(all_have("kjv")).await.unwrap()[0].pid;
    let member = children(leader).unwrap()[0];
    signal_pid(member, Signal::SEGV).unwrap();
    cluster
        .workers(|w| all_have("kjv")(w) && w[0].pid != leader)
        .await
        .unwrap();
    let log = cluster.scheduler.log();
    assert!(log.contains("member 1 of 2 is gone"), "{log}");
    let client = cluster.client().await.unwrap();
    let answer = complete(&client, &Prompt::from("In the beginning"), &greedy(5)).await;
    assert_eq!(answer.token_ids.len(), 5);
}

#[tokio::test]
async fn how_a_member_died_is_how_its_worker_died() {
    for (division, busy) in [(COLUMNS, false), (COLUMNS, true), (LAYERS, true)] {
        dies_as_its_member(division, busy).await;
    }
}

async fn dies_as_its_member(division: &str, busy: bool) {
    let gone = "member 1 of 2 is gone";
    for (signal, reason, error) in [
        (Signal::KILL, "killed by SIGKILL", gone),
        (Signal::SEGV, "killed by SIGSEGV", gone),
        (Signal::ABORT, "killed by SIGABRT", gone),
        // What the system sends for a call that is not allowed.
        (Signal::SYS, "exit code 20", "forbidden system call"),
    ] {
        let cluster = kjv_cluster(division, "2").await;
        let client = cluster.client().await.unwrap();
        let leader = cluster.workers(all_have("kjv")).await.unwrap()[0].pid;
        let member = children(leader).unwrap()[0];
        // While it waits for orders, and while the leader waits for it.
        let busy = busy.then(|| {
            let options = drawn(1000, 5);
            let client = client.clone();
            tokio::spawn(
                async move { complete(&client, &"In the beginning".into(), &options).await },
            )
        });
        if busy.is_some() {
            // A death before it was accepted is told to nobody.
            let amid =
                |w: &[v1::WorkerInfo]| w.iter().any(|w| (1..950).contains(&w.outstanding_tokens));
            cluster.workers(amid).await.unwrap();
        }
        signal_pid(member, signal).unwrap();
        let begun = Instant::now();
        let crash = loop {
            if let Some(crash) = client.crashes().await.unwrap().pop() {
                break client.crash(&crash.id).await.unwrap();
            }
            assert!(begun.elapsed() < SOON);
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        assert!(crash.reason.starts_with(reason), "{}", crash.reason);
        let seen = crash.blackbox.unwrap();
        assert!(seen.error.starts_with(error), "{}", seen.error);
        // Its own backtrace, written before its leader knew.
        match signal {
            Signal::KILL => assert_eq!(seen.signal, None),
            _ => assert!(!seen.signal.unwrap().frames.is_empty()),
        }
        if let Some(busy) = busy {
            assert_eq!(busy.await.unwrap().finished.deaths_survived, 1);
        }
    }
}

/// Many streams of two models beside each other, of which some are left, looked at, or follow a grammar; what comes of those
/// that end, and how often one made room for another.
async fn beside_each_other(members: &str, room: &str) -> (Vec<Completion>, u64) {
    let arguments = [LAYERS, members, "--model-memory", room];
    let cluster = Cluster::with_model("kjv", &kjv(), &arguments)
        .await
        .unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let client = cluster.client().await.unwrap();
    let path = golden("gemma3-cap");
    let load = async || client.load("other", path.to_str().unwrap()).await.unwrap();
    load().await;
    let streams = (0..STREAMS).map(|i| {
        let client = client.clone();
        let follows = i % 8 == 1;
        let options = GenerateOptions {
            model: ["kjv", "other"][usize::from(i % 4 == 3)].to_owned(),
            grammar: follows.then(|| Grammar::Regex("[a-z ]{40,400}".to_owned())),
            ignore_eos: !follows,
            no_speculation: i % 3 == 0,
            tenant: format!("tenant {}", i % 2),
            deadline: Some(SOON),
            ..drawn(TOKENS * (2 + 5 * (i % 3)), u64::from(i))
        };
        tokio::spawn(async move { complete(&client, &ids(5 + i * 17 % 120), &options).await })
    });
    let streams: Vec<_> = streams.collect();
    // Those who come and go meanwhile, in all ways.
    let embedded = EmbedOptions {
        model: "kjv".to_owned(),
        ..EmbedOptions::default()
    };
    for i in 0..6u32 {
        let model = ["kjv", "other"][usize::from(i % 2 == 1)];
        let options = GenerateOptions {
            model: model.to_owned(),
            ..drawn(1000, 99)
        };
        let mut left = client.generate(ids(40), options).await.unwrap();
        left.next().await.unwrap().unwrap();
        if i < 2 {
            let looks = v1::CaptureOptions {
                layers: vec![0],
                tokens: 2,
                ..v1::CaptureOptions::default()
            };
            let wanted = v1::CaptureRequest {
                model: model.to_owned(),
                ..of(&format!("looked-at-{i}"), Some(looks))
            };
            let mut looks = client.capture(wanted).await.unwrap();
            let options = GenerateOptions {
                model: model.to_owned(),
                request_id: format!("looked-at-{i}"),
                ..greedy(20)
            };
            complete(&client, &ids(7), &options).await;
            looks.next().await.unwrap().unwrap();
        }
        client.embed([ids(30)], embedded.clone()).await.unwrap();
        drop(left);
    }
    let mut all = Vec::new();
    for stream in streams {
        all.push(stream.await.unwrap());
    }
    // One that is unloaded while it computes, and loaded again.
    let options = GenerateOptions {
        model: "other".to_owned(),
        ..drawn(2000, 7)
    };
    let mut more = Vec::new();
    for _ in 0..4 {
        more.push(client.generate(ids(9), options.clone()).await.unwrap());
    }
    more[0].next().await.unwrap().unwrap();
    client.unload("other").await.unwrap();
    drop(more);
    load().await;
    for model in ["other", "kjv"] {
        let options = GenerateOptions {
            model: model.to_owned(),
            ..drawn(TOKENS, 5)
        };
        all.push(complete(&client, &ids(9), &options).await);
    }
    let workers = client.workers().await.unwrap();
    assert_eq!(workers[0].epoch, 1, "nobody died");
    let caches = workers[0].caches.iter();
    (all, caches.map(|cache| cache.preemptions).sum())
}

#[tokio::test(flavor = "multi_thread")]
async fn steps_that_are_on_their_way_together_change_nobodys_tokens() {
    // Bytes that are enough for the longest request, and for far fewer of these than there are.
    let (alone, preempted) = beside_each_other("1", "6000000").await;
    assert!(preempted > 0);
    for (members, room) in [("2", "9300000"), ("3", "12500000")] {
        let (all, preempted) = beside_each_other(members, room).await;
        assert!(preempted > 0);
        for (i, (got, alone)) in all.iter().zip(&alone).enumerate() {
            assert_same(got, alone, &format!("stream {i}, {members} members"));
        }
    }
}

/// Sequences in a step, about, of eight streams that draw beside each other.
async fn sequences_in_a_step(members: &str) -> f64 {
    let cluster = kjv_cluster(LAYERS, members).await;
    let client = cluster.client().await.unwrap();
    let mut samples = client.watch_worker("", Duration::from_millis(50)).await;
    let samples = samples.as_mut().unwrap();
    let options = GenerateOptions {
        no_speculation: true,
        ..drawn(500, 3)
    };
    let mut streams = JoinSet::new();
    for branch in 0..8 {
        let (client, options) = (client.clone(), options.clone());
        let options = GenerateOptions { branch, ..options };
        streams.spawn(async move { complete(&client, &ids(9), &options).await });
    }
    let (mut sequences, mut steps) = (0, 0);
    let mut drawn = 0;
    while drawn < 8 * 500 {
        let sample = samples.next().await.unwrap().unwrap().steps.unwrap();
        assert_eq!(sample.missed, 0);
        drawn += sample.drawn;
        sequences += sample.sequences;
        steps += sample.count;
    }
    assert_eq!(streams.join_all().await.len(), 8);
    sequences as f64 / steps as f64
}

#[tokio::test]
async fn as_many_steps_are_on_their_way_as_there_are_processes_with_layers() {
    let alone = sequences_in_a_step("1").await;
    assert!(alone > 6.0, "{alone}");
    let divided = sequences_in_a_step("2").await;
    assert!((3.0..=4.5).contains(&divided), "{divided}");
}

#[tokio::test]
async fn who_leaves_while_steps_are_on_their_way_is_let_go() {
    let cluster = kjv_cluster(LAYERS, "2").await;
    let client = cluster.client().await.unwrap();
    let running = async || client.workers().await.unwrap()[0].caches[0].running;
    let begin = async |options: GenerateOptions| {
        let options = GenerateOptions {
            no_speculation: true,
            ..options
        };
        let mut stream = client.generate(ids(9), options).await.unwrap();
        stream.next().await.unwrap().unwrap();
        stream
    };
    // As long as the context lets them: nothing but leaving ends them soon.
    let stays = begin(drawn(1000, 1)).await;
    let leaves = begin(drawn(1000, 2)).await;
    drop(leaves);
    let begun = Instant::now();
    while running().await > 1 {
        assert!(begun.elapsed() < SOON);
    }
    assert_eq!(running().await, 1, "the other one has not ended");
    let late = GenerateOptions {
        deadline: Some(Duration::from_millis(100)),
        ..drawn(1000, 4)
    };
    let ended = match client.generate(ids(9), late).await {
        Ok(stream) => stream.complete().await.unwrap_err(),
        Err(error) => error,
    };
    assert_eq!(ended.reason(), Reason::DeadlineExceeded);
    let tokens = stays.complete().await.unwrap().token_ids.len();
    assert_eq!(tokens, 1000);
    assert_eq!(running().await, 0);
}

/// Whether a pattern is of a node's name, op or weight.
fn named(pattern: &str, node: &v1::CapturedNode) -> bool {
    let names = [&node.name, &node.op, &node.weight];
    names.iter().any(|name| matches(pattern, name))
}

/// All that is computed for a request: every node of every row.
async fn looked_at(client: &Client, model: &str) -> Recording {
    let options = v1::CaptureOptions {
        values: u32::MAX,
        tokens: 3,
        reveal: true,
        prefix: true,
        ..v1::CaptureOptions::default()
    };
    let wanted = v1::CaptureRequest {
        model: model.to_owned(),
        ..of(model, Some(options))
    };
    let looks = client.capture(wanted).await;
    let looks = tokio::spawn(put_together(looks.unwrap()));
    let options = GenerateOptions {
        request_id: model.to_owned(),
        model: model.to_owned(),
        ..greedy(6)
    };
    complete(client, &ids(20), &options).await;
    looks.await.unwrap().unwrap()
}

/// Where nodes of a pattern are hit in a request, and how large their values are there, to the bit.
async fn hits(client: &Client, model: &str, nodes: &str) -> Vec<(String, u64, u32, u32, u32)> {
    let guard = v1::GuardRequest {
        model: model.to_owned(),
        nodes: vec![nodes.to_owned()],
        conditions: vec![v1::Condition {
            kind: Some(condition::Kind::Above(0.0)),
        }],
        ..v1::GuardRequest::default()
    };
    let mut events = client.guard(guard).await.unwrap();
    events.next().await.unwrap().unwrap();
    let options = GenerateOptions {
        model: model.to_owned(),
        no_speculation: true,
        ..greedy(4)
    };
    let tokens = complete(client, &ids(3), &options).await.token_ids.len();
    let mut all = Vec::new();
    // The prompt's last row at least, and one for each token but the last.
    while all.len() < tokens {
        let event = tokio::time::timeout(SOON, events.next()).await.unwrap();
        if let Some(guard_event::Kind::Hit(hit)) = event.unwrap().unwrap().kind {
            let (peak, rms) = (hit.peak.to_bits(), hit.rms.to_bits());
            all.push((hit.node.unwrap().name, hit.position, peak, rms, hit.further));
        }
    }
    all
}

#[tokio::test]
async fn who_looks_at_a_model_sees_what_one_process_computes() {
    const LOOKED_AT: [&str; 4] = ["llama2", "gemma3-cap", "qwen3_moe", "gguf/llama3-q8_0.gguf"];
    // What makes logits is in no capture.
    const HEAD: &str = "head.*";
    // What is divided by columns, heads and experts, what comes of it, and what is not divided.
    const PATTERNS: [&str; 8] = [
        "mul_mat*",
        "rope",
        "layers.1.*",
        "swiglu",
        "add",
        "*o_proj*",
        "logits",
        HEAD,
    ];
    let fused = fused_experts();
    let mut alone = Vec::new();
    for (division, members) in [
        (COLUMNS, "1"),
        (COLUMNS, "2"),
        (COLUMNS, "4"),
        (LAYERS, "2"),
        (LAYERS, "3"),
    ] {
        let cluster = Cluster::ready_with(&[division, members]).await.unwrap();
        let client = cluster.client().await.unwrap();
        let mut all = Vec::new();
        let models = LOOKED_AT.map(|name| (name, golden(name)));
        let models = models.into_iter().chain([("fused", fused.path().into())]);
        for (i, (_, path)) in models.enumerate() {
            let name = model_name(i);
            client.load(&name, path.to_str().unwrap()).await.unwrap();
            let seen = looked_at(&client, &name).await;
            let mut hit = Vec::new();
            for pattern in PATTERNS {
                // Not every model has all of them.
                let names = seen.head.nodes.iter();
                if pattern == HEAD || names.clone().any(|n| named(pattern, n)) {
                    hit.push(hits(&client, &name, pattern).await);
                }
            }
            all.push((seen, hit));
        }
        if alone.is_empty() {
            alone = all;
            continue;
        }
        for (i, ((seen, hit), (expected, expected_hits))) in all.iter().zip(&alone).enumerate() {
            let model = LOOKED_AT.get(i).unwrap_or(&"fused experts");
            let what = format!("{model}, {division} {members}");
            assert_eq!(seen.head.nodes, expected.head.nodes, "{what}");
            assert_eq!(seen.tokens.len(), expected.tokens.len(), "{what}");
            let mut rows = 0;
            for (token, other) in seen.tokens.iter().zip(&expected.tokens) {
                assert_eq!(token.position, other.position, "{what}");
                assert_eq!(token.nodes.len(), other.nodes.len(), "{what}");
                for (row, other) in token.nodes.iter().zip(&other.nodes) {
                    let node = &seen.head.nodes[row.node as usize].name;
                    let same = (row.node, &row.hash) == (other.node, &other.hash);
                    assert!(same && !row.hash.is_empty(), "{what}: {node}");
                    assert!(row == other, "{what}: {node}");
                    rows += 1;
                }
            }
            assert!(rows > 500, "{what}: {rows}");
            assert!(expected_hits.len() >= 4, "{what}");
            assert_eq!(hit, expected_hits, "{what}");
        }
    }
}

#[test]
fn a_clients_graph_does_not_reach_the_other_members() {
    let mut remote = Remote::start_with(&[COLUMNS, "2"]).unwrap();
    let mut run = |members: Option<i64>| {
        let mut graph = GraphBuilder::new(1);
        let spec = TensorSpec::new(DType::U8, Shape::fixed(&[4]).unwrap()).unwrap();
        let x = graph.tensor("x", spec).unwrap();
        let y = match members {
            Some(members) => graph.all_gather(x, members).unwrap(),
            None => graph.flip(x, &[0]).unwrap(),
        };
        remote.run(&graph.finish(&[y]).unwrap(), 1, &[&[1, 2, 3, 4]])
    };
    match run(Some(2)) {
        Err(RunError::Plan(what)) => assert!(what.contains("all_gather"), "{what}"),
        other => panic!("{other:?}"),
    }
    // The worker is there still, and so is the session.
    assert_eq!(run(None).unwrap().outputs, [[4, 3, 2, 1]]);
    assert_eq!(run(Some(1)).unwrap().outputs, [[1, 2, 3, 4]]);
}

/// A trace of a model's nodes while it computes a long stream: spans of steps, and of nodes.
async fn traced(cluster: &Cluster) -> (Vec<v1::TraceSpan>, Vec<v1::TraceSpan>) {
    let client = cluster.client().await.unwrap();
    let options = GenerateOptions {
        max_tokens: 900,
        ignore_eos: true,
        no_speculation: true,
        ..GenerateOptions::default()
    };
    let stream = client.generate(ids(100), options).await.unwrap();
    let whole = tokio::spawn(stream.complete());
    let time = Duration::from_millis(300);
    let pieces = client.trace_worker("w0", time, true).await.unwrap();
    let spans = spans(pieces).await.unwrap();
    assert_eq!(whole.await.unwrap().unwrap().token_ids.len(), 900);
    let of = |track: v1::TraceTrack| {
        let its = spans.iter().filter(|span| span.track() == track);
        its.cloned().collect()
    };
    (of(v1::TraceTrack::Device), of(v1::TraceTrack::Nodes))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_has_the_nodes_of_all_members() {
    for (division, members) in [(COLUMNS, 2), (LAYERS, 3)] {
        let cluster = kjv_cluster(division, &members.to_string()).await;
        let begun = Instant::now();
        // How many products each member did in the steps of which all is told.
        let mut products: Vec<Vec<usize>> = Vec::new();
        // On a machine that others use a trace has few steps.
        while products.len() <= 4 {
            let (steps, nodes) = traced(&cluster).await;
            assert!(nodes.iter().all(|node| node.member < members));
            // Its clock is that of all: what began until the last step ended is inside of one. A member that waits for a
            // processor may end after its leader.
            let end = |span: &v1::TraceSpan| span.begin_ns + span.duration_ns;
            let last = steps.iter().map(end).max().unwrap_or(0);
            let holds = |step: &v1::TraceSpan, node: &v1::TraceSpan| {
                (step.begin_ns..end(step)).contains(&node.begin_ns)
            };
            let told: Vec<_> = nodes.iter().filter(|node| node.begin_ns < last).collect();
            let lost = told
                .iter()
                .filter(|node| !steps.iter().any(|step| holds(step, node)));
            let lost = lost.count();
            assert!(
                lost * 10 <= told.len(),
                "{division}: {lost} of {}",
                told.len()
            );
            let of_step = steps.iter().map(|step| {
                let of = |member| {
                    let its = told.iter().filter(|node| node.member == member);
                    its.filter(|node| node.name == "mul_mat" && holds(step, node))
                        .count()
                };
                (0..members).map(of).collect::<Vec<_>>()
            });
            products.extend(of_step.filter(|all| all.iter().all(|n| *n > 0)));
            assert!(
                begun.elapsed() < SOON,
                "{division}: {products:?} of {}",
                steps.len()
            );
        }
        if division == COLUMNS {
            // Each has its part of every product.
            let alike = |all: &Vec<usize>| all.iter().all(|n| *n == all[0]);
            assert!(products.iter().all(alike), "{products:?}");
        }
        // Nobody looks any more.
        let client = cluster.client().await.unwrap();
        let after = complete(&client, &ids(5), &greedy(TOKENS)).await;
        assert_eq!(after.token_ids.len(), TOKENS as usize);
    }
}

//! Streams that go on: kinds of requests under which the worker dies at every token, clients whose connection breaks,
//! schedulers that start anew.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use hotcell_client::{Client, Completion, Event, GenerateOptions, Generation, Prompt, Reason, v1};
use hotcell_tests::{
    answers::assert_same,
    cluster::{Cluster, Process, all_have, binaries, counted, kjv, signal_pid},
    options::{drawn, greedy},
    proxy::Proxy,
};
use rustix::process::Signal;

const PROMPT: &str = "In the beginning";
const TOKENS: u32 = 24;

async fn kjv_cluster() -> Cluster {
    let arguments = [
        "--restart-budget",
        "1000",
        "--restart-backoff",
        "1ms",
        "--restart-backoff-max",
        "5ms",
    ];
    let cluster = Cluster::with_model("kjv", &kjv(), &arguments)
        .await
        .unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    cluster
}

async fn complete(client: &Client, (prompt, options): &(Prompt, GenerateOptions)) -> Completion {
    let stream = client.generate(prompt.clone(), options.clone()).await;
    stream.unwrap().complete().await.unwrap()
}

/// One of each kind. Branches share prompt and seed.
async fn kinds(client: &Client) -> Vec<(&'static str, (Prompt, GenerateOptions))> {
    let all = complete(client, &(PROMPT.into(), greedy(TOKENS))).await;
    // From near the end, over the bounds of tokens.
    let start = all.text.char_indices().rev().nth(12).unwrap().0;
    let stop: String = all.text[start..].chars().take(7).collect();
    let logprobs = |options| GenerateOptions {
        logprobs: true,
        top_logprobs: 3,
        ..options
    };
    let branch = |branch| GenerateOptions {
        branch,
        ..drawn(TOKENS, 5)
    };
    let penalties = GenerateOptions {
        sampling: v1::Sampling {
            repetition_penalty: Some(1.2),
            presence_penalty: Some(0.3),
            frequency_penalty: Some(0.4),
            logit_bias: vec![v1::LogitBias {
                token: all.token_ids[0],
                bias: 2.0,
            }],
            ..drawn(TOKENS, 0).sampling
        },
        ..drawn(TOKENS, 3)
    };
    // More than two chunks of 128.
    let long: Vec<u32> = (0..300).map(|i| 300 + i * 7 % 700).collect();
    let text = || Prompt::from(PROMPT);
    vec![
        ("greedy", (text(), greedy(TOKENS))),
        ("sampled", (text(), drawn(TOKENS, 1))),
        ("penalties", (text(), penalties)),
        (
            "stop",
            (
                text(),
                GenerateOptions {
                    stop: vec![stop, "never in the text".into()],
                    ..logprobs(greedy(TOKENS))
                },
            ),
        ),
        ("logprobs", (text(), logprobs(drawn(TOKENS, 2)))),
        ("branch 0", (text(), branch(0))),
        ("branch 1", (text(), branch(1))),
        ("branch 2", (text(), branch(2))),
        (
            "long prompt",
            (Prompt::Ids(long), logprobs(drawn(TOKENS, 4))),
        ),
    ]
}

/// Reads on until so many tokens have come, or to the end.
async fn read(stream: &mut Generation, got: &mut Vec<Event>, tokens: usize) {
    let mut count = 0;
    while count < tokens {
        let Some(event) = stream.next().await else {
            return;
        };
        got.push(event.unwrap());
        if let Some(Event::Delta(delta)) = got.last() {
            count += delta.token_ids.len();
        }
    }
}

/// The answer that events are.
fn collect(events: Vec<Event>) -> Completion {
    let mut all = Completion {
        accepted: v1::Accepted::default(),
        text: String::new(),
        token_ids: Vec::new(),
        logprobs: Vec::new(),
        finished: v1::Finished::default(),
    };
    for event in events {
        match event {
            Event::Accepted(accepted) => all.accepted = accepted,
            Event::Delta(delta) => {
                all.text.push_str(&delta.text);
                all.token_ids.extend(delta.token_ids);
                all.logprobs.extend(delta.logprobs);
            }
            Event::Finished(finished) => all.finished = finished,
        }
    }
    all
}

#[tokio::test]
async fn every_kind_of_request_survives_a_kill_at_every_token() {
    let cluster = kjv_cluster().await;
    let client = cluster.client().await.unwrap();
    let kinds = kinds(&client).await;
    let mut calm = Vec::new();
    for (_, request) in &kinds {
        calm.push(complete(&client, request).await);
    }
    let branches: Vec<_> = calm[5..8].iter().map(|c| &c.token_ids).collect();
    assert!(branches[0] != branches[1] && branches[1] != branches[2]);
    assert_eq!(calm[3].finished.reason(), v1::FinishReason::StopString);
    let mut survived = 0;
    for kill_at in 0..=TOKENS as usize {
        let pid = cluster.workers(all_have("kjv")).await.unwrap()[0].pid;
        // All in one batch; the kind that leads changes.
        let lead = kill_at % kinds.len();
        let streams: Vec<_> = kinds
            .iter()
            .enumerate()
            .map(|(index, (_, (prompt, options)))| {
                let (client, prompt, options) = (client.clone(), prompt.clone(), options.clone());
                tokio::spawn(async move {
                    let mut stream = client.generate(prompt, options).await.unwrap();
                    let mut events = Vec::new();
                    if index == lead {
                        events.push(stream.next().await.unwrap().unwrap());
                        read(&mut stream, &mut events, kill_at).await;
                        // It may be done already; then there is nothing to survive.
                        let _ = signal_pid(pid, Signal::KILL);
                    }
                    read(&mut stream, &mut events, usize::MAX).await;
                    collect(events)
                })
            })
            .collect();
        for ((stream, calm), (kind, _)) in streams.into_iter().zip(&calm).zip(&kinds) {
            let got = stream.await.unwrap();
            assert_same(&got, calm, &format!("{kind}, killed at {kill_at}"));
            survived += got.finished.deaths_survived as usize;
        }
        cluster
            .workers(|w| all_have("kjv")(w) && w[0].pid != pid)
            .await
            .unwrap();
    }
    assert!(
        survived > TOKENS as usize * kinds.len() / 2,
        "only {survived} streams lost a worker"
    );
}

#[tokio::test]
async fn a_broken_connection_is_a_pause_wherever_it_breaks() {
    let cluster = kjv_cluster().await;
    let folder = tempfile::TempDir::new().unwrap();
    let proxy = Proxy::start(folder.path(), &cluster.socket).unwrap();
    let address = format!("unix:{}", proxy.socket.display()).parse().unwrap();
    let client = Client::connect(&address).await.unwrap();
    let kinds = kinds(&client).await;
    for (kind, request) in &kinds[2..5] {
        let calm = complete(&client, request).await;
        for cut_at in [0, 1, 2, 12, 23] {
            let (prompt, options) = request.clone();
            let mut stream = client.generate(prompt, options).await.unwrap();
            let mut events = vec![stream.next().await.unwrap().unwrap()];
            read(&mut stream, &mut events, cut_at).await;
            proxy.cut();
            read(&mut stream, &mut events, usize::MAX).await;
            assert_same(&collect(events), &calm, &format!("{kind}, cut at {cut_at}"));
        }
        // In the middle of messages, as often as it takes.
        // What each connection says of itself, the answer's beginning and its longest message fit into 1000 bytes. On a busy
        // machine all that was drawn meanwhile comes in one frame, of which nothing counts until it is whole: the fifth time.
        proxy.allow_in_turn([1000, 1000, 1000, 1000, 20_000]);
        proxy.cut();
        let before = proxy.connections();
        let (prompt, options) = request.clone();
        let options = GenerateOptions {
            request_id: format!("own-{}", options.seed.unwrap_or_default()),
            ..options
        };
        let mut stream = client.generate(prompt, options).await.unwrap();
        let mut events = Vec::new();
        read(&mut stream, &mut events, usize::MAX).await;
        assert_same(&collect(events), &calm, &format!("{kind}, in pieces"));
        let returns = stream.returns() as usize;
        assert!(returns > 0 && proxy.connections() > before + returns - 1);
        proxy.allow(u64::MAX);
        proxy.cut();
    }
    // Whoever leaves frees the worker, though the stream could have been come back to.
    let endless = GenerateOptions {
        max_tokens: 1000,
        ..greedy(TOKENS)
    };
    let mut stream = client.generate(PROMPT, endless).await.unwrap();
    let mut events = Vec::new();
    read(&mut stream, &mut events, 3).await;
    drop(stream);
    let idle = |w: &[v1::WorkerInfo]| w.iter().all(|w| w.running_requests == 0);
    cluster.workers(idle).await.unwrap();
}

#[tokio::test]
async fn another_process_goes_on_with_a_stream_by_its_id() {
    let cluster = kjv_cluster().await;
    let client = cluster.client().await.unwrap();
    let own = GenerateOptions {
        request_id: "mine".into(),
        ..drawn(TOKENS, 9)
    };
    let request = (Prompt::from(PROMPT), own.clone());
    let mut stream = client.generate(PROMPT, own).await.unwrap();
    let mut events = vec![stream.next().await.unwrap().unwrap()];
    read(&mut stream, &mut events, 5).await;
    let bytes: usize = events
        .iter()
        .map(|e| match e {
            Event::Delta(d) => d.text.len(),
            _ => 0,
        })
        .sum();
    drop((stream, client));

    let other = cluster.client().await.unwrap();
    let mut stream = other.attach("mine", 5, Some(bytes as u64)).await.unwrap();
    read(&mut stream, &mut events, usize::MAX).await;
    let joined = collect(events);
    // The same request again is the same stream, not another run.
    let again = complete(&other, &request).await;
    assert_same(&joined, &again, "joined");
    assert_eq!(again.finished.timings, joined.finished.timings);
    let differs = GenerateOptions {
        max_tokens: 3,
        ..request.1.clone()
    };
    let error = other.generate(PROMPT, differs).await.unwrap_err();
    assert_eq!(error.reason(), Reason::RequestExists);
    let unknown = other.attach("yours", 0, None).await.unwrap_err();
    assert_eq!(unknown.reason(), Reason::RequestNotFound);
    let calm = (
        Prompt::from(PROMPT),
        GenerateOptions {
            request_id: String::new(),
            ..request.1
        },
    );
    assert_same(&joined, &complete(&other, &calm).await, "calm");
}

#[tokio::test]
async fn a_stream_goes_on_with_a_scheduler_that_started_anew() {
    let models = format!("kjv={}", kjv().display());
    let mut cluster = Cluster::start(&["--models", &models]).await.unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let client = cluster.client().await.unwrap();
    let request = (
        Prompt::from(PROMPT),
        GenerateOptions {
            max_tokens: 600,
            logprobs: true,
            ..drawn(TOKENS, 11)
        },
    );
    let calm = complete(&client, &request).await;
    let (prompt, options) = request;
    let mut stream = client.generate(prompt, options).await.unwrap();
    let mut events = vec![stream.next().await.unwrap().unwrap()];
    read(&mut stream, &mut events, 7).await;
    cluster.scheduler.signal(Signal::KILL).unwrap();
    cluster.scheduler.wait().unwrap();
    let mut command = std::process::Command::new(binaries().unwrap().join("hotcell-scheduler"));
    command
        .arg("--socket")
        .arg(&cluster.socket)
        .args(["--models", &models])
        .env_clear()
        .env("XDG_CONFIG_HOME", cluster.folder.path());
    cluster.scheduler = Process::start(&mut command).unwrap();
    read(&mut stream, &mut events, usize::MAX).await;
    assert_eq!(stream.returns(), 1);
    let got = collect(events);
    assert_eq!(got.token_ids, calm.token_ids);
    assert_eq!(got.text, calm.text);
    assert_eq!(got.logprobs, calm.logprobs);
    assert_eq!(counted(&got.finished), counted(&calm.finished));
    let (receipt, calm) = (
        got.finished.receipt.unwrap(),
        calm.finished.receipt.unwrap(),
    );
    assert_eq!(receipt.output_hash, calm.output_hash);
    assert_eq!(receipt.request_hash, calm.request_hash);
    // It saw only a part of the text.
    assert!(receipt.text_hash.is_empty());
}

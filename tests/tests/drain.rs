//! A scheduler that is told to end gives its streams to another one, and their clients do not notice.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use hotcell_client::{
    Address, Client, Event, GenerateOptions, Generation, Grammar, Identity, Reason, v1,
};
use hotcell_tests::{
    cluster::{Cluster, SOON, all_have, free_address, hotcell, kjv, signal_pid},
    options::{drawn, greedy},
};
use rustix::process::Signal;
use serde_json::Value;
use tokio::sync::mpsc::Sender;

const PROMPT: &str = "In the beginning";
const TOKENS: u32 = 300;
/// So many that somebody can stop a stream before its end.
const LONG: u32 = 1000;
/// Tokens that each stream has before anything happens.
const FIRST: usize = 8;

/// A scheduler that serves the bundled model, and where it speaks HTTP.
struct Host {
    cluster: Cluster,
    http: SocketAddr,
}

impl Host {
    async fn start(arguments: &[&str]) -> Host {
        let http = free_address().unwrap();
        let address = http.to_string();
        let own = ["--devices", "cpu:1", "--http", &address];
        let arguments = [&own, arguments].concat();
        let cluster = Cluster::with_model("kjv", &kjv(), &arguments)
            .await
            .unwrap();
        cluster.workers(all_have("kjv")).await.unwrap();
        Host { cluster, http }
    }

    /// One that gives its streams to another one when it is told to end.
    async fn with_heir(heir: &str) -> Host {
        Host::with_heir_and(heir, &[]).await
    }

    async fn with_heir_and(heir: &str, more: &[&str]) -> Host {
        let drain = ["--drain-timeout", "120s", "--drain-to", heir];
        Host::start(&[&drain, more].concat()).await
    }

    fn address(&self) -> String {
        format!("unix:{}", self.cluster.socket.display())
    }

    async fn client(&self) -> Client {
        self.cluster.client().await.unwrap()
    }

    /// Sends its worker a signal.
    async fn signal_worker(&self, signal: Signal) {
        let workers = self.cluster.workers(|_| true).await.unwrap();
        signal_pid(workers[0].pid, signal).unwrap();
    }

    async fn running(&self, enough: impl Fn(u32) -> bool) {
        let running = |workers: &[v1::WorkerInfo]| enough(workers[0].running_requests);
        self.cluster.workers(running).await.unwrap();
    }

    /// Is told to end.
    fn terminate(&self) {
        self.cluster.scheduler.signal(Signal::TERM).unwrap();
    }

    /// What it logged, once it has ended in order.
    async fn log_of_end(mut self) -> String {
        // Not on this thread, on which clients have yet to hang up.
        let waited = tokio::task::spawn_blocking(move || {
            let status = self.cluster.scheduler.wait().unwrap();
            (status, self.cluster.scheduler.log())
        });
        let (status, log) = waited.await.unwrap();
        assert_eq!(status.code(), Some(0), "{log}");
        log
    }

    /// The sum of a metric's values.
    fn metric(&self, name: &str) -> f64 {
        let mut stream = TcpStream::connect(self.http).unwrap();
        stream
            .write_all(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            .unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let values = text.lines().filter(|line| line.starts_with(name));
        let values = values.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok());
        values.sum()
    }
}

async fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < SOON, "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// What a stream said.
#[derive(Debug, Default, PartialEq)]
struct Said {
    greeted: usize,
    ids: Vec<u32>,
    text: String,
    logprobs: Vec<v1::TokenLogprob>,
    end: Option<v1::Finished>,
}

impl Said {
    async fn hear(&mut self, stream: &mut Generation, tokens: usize) {
        while self.ids.len() < tokens {
            let Some(event) = stream.next().await else {
                return;
            };
            match event.unwrap() {
                Event::Accepted(_) => self.greeted += 1,
                Event::Delta(delta) => {
                    self.ids.extend(delta.token_ids);
                    self.text.push_str(&delta.text);
                    self.logprobs.extend(delta.logprobs);
                }
                Event::Finished(finished) => self.end = Some(finished),
            }
        }
    }

    /// But for how long it took, what was in whose cache, and who died.
    fn assert_same(&self, calm: &Said, what: &str) {
        assert_eq!(self.greeted, 1, "{what}");
        assert_eq!(self.ids, calm.ids, "{what}");
        assert_eq!(self.text, calm.text, "{what}");
        assert_eq!(self.logprobs, calm.logprobs, "{what}");
        let (end, calm) = (self.end.as_ref().unwrap(), calm.end.as_ref().unwrap());
        let said = |end: &v1::Finished| {
            let usage = end.usage.unwrap();
            let mut receipt = end.receipt.clone().unwrap();
            // With the hashes of all tokens and of the whole text.
            receipt.deaths_survived = 0;
            let counted = (usage.prompt_tokens, usage.generated_tokens);
            (end.reason, end.matched_stop.clone(), counted, receipt)
        };
        assert_eq!(said(end), said(calm), "{what}");
    }
}

/// Many tokens, drawn.
fn sampled(seed: u64) -> GenerateOptions {
    let repetition_penalty = Some(1.1);
    GenerateOptions {
        sampling: v1::Sampling {
            repetition_penalty,
            ..drawn(TOKENS, seed).sampling
        },
        ..drawn(TOKENS, seed)
    }
}

async fn all(client: &Client, options: &GenerateOptions) -> Said {
    let mut said = Said::default();
    let mut stream = client.generate(PROMPT, options.clone()).await.unwrap();
    said.hear(&mut stream, usize::MAX).await;
    said
}

/// One of each kind.
async fn kinds(client: &Client) -> Vec<(&'static str, GenerateOptions)> {
    let text = all(client, &greedy(TOKENS)).await.text;
    let start = text.char_indices().rev().nth(12).unwrap().0;
    let stop: String = text[start..].chars().take(7).collect();
    vec![
        ("greedy", greedy(TOKENS)),
        ("sampled", sampled(1)),
        (
            "stop",
            GenerateOptions {
                stop: vec![stop, "never in the text".into()],
                ..greedy(TOKENS)
            },
        ),
        (
            "logprobs",
            GenerateOptions {
                logprobs: true,
                top_logprobs: 3,
                ..sampled(2)
            },
        ),
        (
            "grammar",
            GenerateOptions {
                grammar: Some(Grammar::Regex("([a-z]+ ){200}".into())),
                ignore_eos: false,
                ..sampled(3)
            },
        ),
        (
            "branch 1",
            GenerateOptions {
                branch: 1,
                ..sampled(4)
            },
        ),
        (
            "branch 2",
            GenerateOptions {
                branch: 2,
                ..sampled(4)
            },
        ),
    ]
}

/// Reads a stream to its end, and tells once it has begun. Its connection never broke.
async fn reads(client: Client, options: GenerateOptions, begun: Sender<()>) -> Said {
    let mut stream = client.generate(PROMPT, options).await.unwrap();
    let mut said = Said::default();
    said.hear(&mut stream, FIRST).await;
    begun.send(()).await.unwrap();
    said.hear(&mut stream, usize::MAX).await;
    assert_eq!(stream.returns(), 0);
    said
}

/// Two continuations over OpenAI's protocol: their texts and ends.
fn openai(to: SocketAddr, begun: Option<Sender<()>>) -> [(String, String); 2] {
    let body = serde_json::json!({
        "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0.8, "seed": 7, "n": 2, "stream": true,
        "ignore_eos": true,
    })
    .to_string();
    let mut stream = TcpStream::connect(to).unwrap();
    write!(
        stream,
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut begun = begun;
    let mut said: [(String, String); 2] = Default::default();
    for line in BufReader::new(stream).lines() {
        let line = line.unwrap();
        let Some(event) = line.strip_prefix("data: ").filter(|e| *e != "[DONE]") else {
            continue;
        };
        let event: Value = serde_json::from_str(event).unwrap();
        for choice in event["choices"].as_array().unwrap() {
            let said = &mut said[choice["index"].as_u64().unwrap() as usize];
            said.0.push_str(choice["text"].as_str().unwrap_or_default());
            said.1
                .push_str(choice["finish_reason"].as_str().unwrap_or_default());
        }
        if said.iter().all(|(text, _)| text.len() > FIRST)
            && let Some(begun) = begun.take()
        {
            begun.blocking_send(()).unwrap();
        }
    }
    said
}

#[tokio::test]
async fn streams_of_every_kind_go_on_elsewhere_with_the_tokens_they_would_have_had() {
    let other = Host::start(&[]).await;
    let host = Host::with_heir(&other.address()).await;
    let client = host.client().await;
    let kinds = kinds(&client).await;
    let mut calm = Vec::new();
    for (_, options) in &kinds {
        calm.push(all(&client, options).await);
    }
    let stopped = calm[2].end.as_ref().unwrap();
    assert_eq!(stopped.reason(), v1::FinishReason::StopString);
    let http = host.http;
    let spoken = async |begun| {
        tokio::task::spawn_blocking(move || openai(http, begun))
            .await
            .unwrap()
    };
    let calm_openai = spoken(None).await;
    assert_eq!(calm_openai[1].1, "length");

    let (begun, mut have_begun) = tokio::sync::mpsc::channel(kinds.len() + 1);
    let streams: Vec<_> = kinds
        .iter()
        .map(|(_, o)| tokio::spawn(reads(client.clone(), o.clone(), begun.clone())))
        .collect();
    let streamed = tokio::task::spawn_blocking(move || openai(http, Some(begun)));
    for _ in 0..=kinds.len() {
        have_begun.recv().await.unwrap();
    }
    // None of them can end where it is.
    host.signal_worker(Signal::STOP).await;
    host.terminate();
    for ((stream, calm), (kind, _)) in streams.into_iter().zip(&calm).zip(&kinds) {
        let said = stream.await.unwrap();
        said.assert_same(calm, kind);
        assert_eq!(said.end.unwrap().deaths_survived, 0, "{kind}");
    }
    assert_eq!(streamed.await.unwrap(), calm_openai);
    drop(client);
    let count = kinds.len() + 2;
    let log = host.log_of_end().await;
    let told = format!("{count} of {count} requests went on at {}", other.address());
    assert!(log.contains(&told), "{log}");
    let served = other.metric("hotcell_requests_total");
    assert!(served >= count as f64, "{served}: {log}");
}

#[tokio::test]
async fn another_host_behind_tls_and_tokens_is_shown_who_asks() {
    let files = tempfile::tempdir().unwrap();
    let put = |name: &str, content: &str| {
        let path = files.path().join(name);
        fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let make = |name: &str, role: &str| -> Value {
        let made = hotcell(files.path())
            .unwrap()
            .args(["--json", "token", "new", name, "--role", role])
            .output()
            .unwrap();
        serde_json::from_slice(&made.stdout).unwrap()
    };
    let (all_tenants, one) = (make("drains", "admin"), make("someone", "use"));
    let lines = [&all_tenants, &one].map(|made| made["lines"].as_str().unwrap());
    let tokens = put("tokens.toml", &lines.join("\n"));
    let token = put("token", all_tenants["token"].as_str().unwrap());
    let of_one = put("of-one", one["token"].as_str().unwrap());
    let own = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let cert = put("cert.pem", &own.cert.pem());
    let key = put("key.pem", &own.signing_key.serialize_pem());
    let listen = free_address().unwrap().to_string();
    let door = ["--listen", &listen, "--tokens", &tokens];
    let tls = ["--tls-cert", &cert, "--tls-key", &key];
    let _other = Host::start(&[door, tls].concat()).await;
    let to = format!("https://{listen}");
    for (shown, taken) in [(Some(&token), 1), (Some(&of_one), 0), (None, 0)] {
        let mut more = vec!["--drain-to-ca", &cert];
        more.extend(
            shown
                .iter()
                .flat_map(|path| ["--drain-to-token-file", path]),
        );
        let host = Host::with_heir_and(&to, &more).await;
        let client = host.client().await;
        let calm = all(&client, &sampled(1)).await;
        let (begun, mut have_begun) = tokio::sync::mpsc::channel(1);
        let stream = tokio::spawn(reads(client.clone(), sampled(1), begun));
        have_begun.recv().await.unwrap();
        if taken > 0 {
            host.signal_worker(Signal::STOP).await;
        }
        host.terminate();
        stream.await.unwrap().assert_same(&calm, "over TLS");
        drop(client);
        let log = host.log_of_end().await;
        let told = format!("{taken} of 1 requests went on at {to}");
        assert!(log.contains(&told), "{log}");
        assert!(taken > 0 || !log.contains("; 0 times it refused"), "{log}");
        let warned = log.contains("may speak for all tenants");
        assert_eq!(warned, shown == Some(&of_one), "{log}");
        // It is refused before anything runs there.
        let refused = log.contains("may hand over the streams of its own tenant only");
        assert_eq!(refused, shown == Some(&of_one), "{log}");
    }
}

#[tokio::test]
async fn a_death_there_changes_nothing_either() {
    let other = Host::start(&[]).await;
    let host = Host::with_heir(&other.address()).await;
    let client = host.client().await;
    let long = GenerateOptions {
        max_tokens: LONG,
        ..sampled(1)
    };
    let calm = all(&client, &long).await;
    let (begun, mut have_begun) = tokio::sync::mpsc::channel(1);
    let stream = tokio::spawn(reads(client.clone(), long, begun));
    have_begun.recv().await.unwrap();
    host.signal_worker(Signal::STOP).await;
    host.terminate();
    other.running(|count| count > 0).await;
    other.signal_worker(Signal::KILL).await;
    let said = stream.await.unwrap();
    said.assert_same(&calm, "after a death");
    assert_eq!(said.end.unwrap().deaths_survived, 1);
    drop(client);
    host.log_of_end().await;
}

#[tokio::test]
async fn a_stream_comes_back_when_the_other_host_vanishes() {
    let other = Host::start(&[]).await;
    let host = Host::with_heir(&other.address()).await;
    let client = host.client().await;
    let long = GenerateOptions {
        max_tokens: 900,
        ..sampled(1)
    };
    let calm = all(&client, &long).await;
    let (begun, mut have_begun) = tokio::sync::mpsc::channel(1);
    let stream = tokio::spawn(reads(client.clone(), long, begun));
    have_begun.recv().await.unwrap();
    host.signal_worker(Signal::STOP).await;
    host.terminate();
    until("the other host took nothing", || {
        host.metric("hotcell_handed_over_total") == 1.0
    })
    .await;
    other.cluster.scheduler.signal(Signal::KILL).unwrap();
    host.signal_worker(Signal::CONT).await;
    stream.await.unwrap().assert_same(&calm, "come back");
    drop(client);
    let log = host.log_of_end().await;
    assert!(log.contains("1 of 1 requests went on at"), "{log}");
    assert!(!log.contains("; 0 times it refused"), "{log}");
}

#[tokio::test]
async fn where_nobody_takes_them_streams_end_as_ever() {
    let host = Host::with_heir("unix:/nowhere/hotcell.sock").await;
    let client = host.client().await;
    let calm = all(&client, &greedy(TOKENS)).await;
    let (begun, mut have_begun) = tokio::sync::mpsc::channel(1);
    let stream = tokio::spawn(reads(client.clone(), greedy(TOKENS), begun));
    have_begun.recv().await.unwrap();
    host.terminate();
    let said = stream.await.unwrap();
    said.assert_same(&calm, "alone");
    drop(client);
    let log = host.log_of_end().await;
    assert!(log.contains("0 of 1 requests went on at"), "{log}");
}

#[tokio::test]
async fn clients_follow_where_the_drain_ends_before_their_streams_do() {
    let other = Host::start(&[]).await;
    let heir = other.address();
    let host = Host::start(&["--drain-timeout", "2s", "--drain-to", &heir]).await;
    let client = host.client().await;
    let long = GenerateOptions {
        max_tokens: LONG,
        ..sampled(1)
    };
    let calm = all(&client, &long).await;
    let address = |text: &str| text.parse::<Address>().unwrap();
    let strange = address("unix:/somewhere/else.sock");
    let own = Identity::default;
    let follows = client.clone().following(address(&heir), own());
    let of_another_host = client.clone().following(strange, own());
    let mut streams = Vec::new();
    for client in [&follows, &of_another_host, &client] {
        let mut stream = client.generate(PROMPT, long.clone()).await.unwrap();
        let mut said = Said::default();
        said.hear(&mut stream, FIRST).await;
        streams.push((stream, said));
    }
    // None of them ends before the drain does.
    host.signal_worker(Signal::STOP).await;
    host.terminate();
    other.running(|count| count == 3).await;
    other.signal_worker(Signal::STOP).await;
    let [(mut follows, mut said), rest @ ..] = <[_; 3]>::try_from(streams).unwrap();
    for (mut stream, mut said) in rest {
        let error = loop {
            match stream.next().await.unwrap() {
                Ok(Event::Delta(delta)) => said.ids.extend(delta.token_ids),
                Ok(event) => panic!("{event:?}"),
                Err(error) => break error,
            }
        };
        assert_eq!(error.reason(), Reason::Draining);
        assert_eq!(error.get("continues_at"), Some(&heir[..]));
        assert!(said.ids.len() < LONG as usize);
    }
    other.signal_worker(Signal::CONT).await;
    said.hear(&mut follows, usize::MAX).await;
    assert_eq!(follows.returns(), 1);
    // No host said all of its text, so none vouches for it; what came is compared with the calm stream's itself.
    let mut calm = calm;
    let receipt = calm.end.as_mut().unwrap().receipt.as_mut().unwrap();
    receipt.text_hash.clear();
    said.assert_same(&calm, "followed");
    drop((client, follows));
    host.log_of_end().await;
}

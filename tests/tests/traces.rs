//! A request over HTTP in a trace of its client's, through a real scheduler and real workers, one of which is killed under it.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

#[path = "../../scheduler/tests/relay/collector.rs"]
mod collector;

use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader, Write},
    net::{SocketAddr, TcpStream},
    process::Command,
    sync::Arc,
    time::Duration,
};

use hotcell_client::GenerateOptions;
use hotcell_tests::cluster::{Cluster, SOON, all_have, binaries, free_address, kjv, signal_pid};
use opentelemetry_proto::tonic::{
    common::v1::any_value::Value,
    trace::v1::{Span, span::SpanKind},
};
use rustix::process::Signal;
use tokio::net::{TcpListener, TcpStream as Connection};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        ServerConfig,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    },
};

use collector::{Heard, hex};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";
/// Times that a worker is killed until one dies before its part is over.
const TRIES: usize = 20;

/// The request's own span, once it came, and all that came with it.
async fn request(heard: &Heard) -> (Span, Vec<Span>) {
    let came = async {
        loop {
            let all = heard.spans().clone();
            let own = all.iter().find(|span| span.kind() == SpanKind::Server);
            if let Some(own) = own {
                return (own.clone(), all);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(SOON, came).await.unwrap()
}

fn text(span: &Span, name: &str) -> Option<String> {
    let found = span.attributes.iter().find(|a| a.key == name)?;
    match found.value.clone()?.value? {
        Value::StringValue(text) => Some(text),
        Value::IntValue(number) => Some(number.to_string()),
        other => panic!("{name} is {other:?}"),
    }
}

/// Streams a completion; `begun` is called once its first token is there. The answer's `traceparent`, and all of it.
fn stream(to: SocketAddr, begun: impl FnOnce()) -> (String, String) {
    let body =
        r#"{"prompt": "In the beginning", "max_tokens": 200, "temperature": 0, "stream": true}"#;
    let mut connection = TcpStream::connect(to).unwrap();
    connection.set_read_timeout(Some(SOON)).unwrap();
    write!(
        connection,
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntraceparent: 00-{TRACE}-{PARENT}-01\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut begun = Some(begun);
    let mut all = String::new();
    for line in BufReader::new(connection).lines() {
        let line = line.unwrap();
        if line.starts_with("data: ")
            && let Some(begun) = begun.take()
        {
            begun();
        }
        all.push_str(&line);
        all.push('\n');
    }
    let place = all.lines().find_map(|l| l.strip_prefix("traceparent: "));
    (place.unwrap_or_default().to_owned(), all)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_over_http_whose_worker_is_killed_is_one_trace() {
    let heard = Heard::default();
    let collector = format!("http://{}", heard.listen().await);
    let http = free_address().unwrap();
    let address = http.to_string();
    let arguments = [
        "--devices",
        "cpu:1",
        "--http",
        &address,
        "--otlp-endpoint",
        &collector,
        "--restart-budget",
        "1000",
        "--restart-backoff",
        "1ms",
    ];
    let cluster = Cluster::with_model("kjv", &kjv(), &arguments)
        .await
        .unwrap();
    for _ in 0..TRIES {
        let workers = cluster.workers(all_have("kjv")).await.unwrap();
        heard.spans().clear();
        let pid = workers[0].pid;
        let (place, answer) = stream(http, || {
            // It may be gone already, of its own: then there is nothing to survive.
            let _ = signal_pid(pid, Signal::KILL);
        });
        assert!(answer.contains("data: [DONE]"), "{answer}");
        let (own, all) = request(&heard).await;
        assert_eq!(place, format!("00-{TRACE}-{}-01", hex(&own.span_id)));
        assert_eq!(hex(&own.parent_span_id), PARENT);
        assert!(all.iter().all(|span| hex(&span.trace_id) == TRACE));
        assert_eq!(own.name, "text_completion kjv");
        assert_eq!(
            text(&own, "gen_ai.operation.name").unwrap(),
            "text_completion"
        );
        if text(&own, "hotcell.deaths_survived").unwrap() == "0" {
            continue;
        }
        let mut parts: Vec<_> = all
            .iter()
            .filter(|span| span.name == "worker" && span.parent_span_id == own.span_id)
            .collect();
        parts.sort_by_key(|span| span.start_time_unix_nano);
        assert_eq!(parts.len(), 2, "{parts:?}");
        assert_eq!(text(parts[0], "error.type").unwrap(), "signal");
        assert_eq!(text(parts[1], "error.type"), None);
        let epochs: BTreeSet<_> = parts.iter().map(|s| text(s, "hotcell.epoch")).collect();
        assert_eq!(epochs.len(), 2);
        let tokens = |span: &Span, name: &str| text(span, name).unwrap().parse::<u32>().unwrap();
        let both: u32 = parts.iter().map(|s| tokens(s, "hotcell.tokens")).sum();
        assert_eq!(both, tokens(&own, "gen_ai.usage.output_tokens"));
        assert!(own.events.iter().any(|event| event.name == "worker_died"));
        let within = all.iter().filter(|s| s.parent_span_id == parts[1].span_id);
        let times: BTreeSet<_> = within.map(|span| span.name.as_str()).collect();
        assert_eq!(times, BTreeSet::from(["decode", "prefill", "queue"]));
        // The report of the death names the trace.
        let (worker, epoch) = (
            text(parts[0], "hotcell.worker").unwrap(),
            text(parts[0], "hotcell.epoch").unwrap(),
        );
        let crash = format!("{worker}.{epoch}");
        let shown = cluster.hotcell(&["crashes", "show", &crash]).unwrap();
        let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
        assert!(shown.contains(&format!("trace      {TRACE}\n")), "{shown}");
        return;
    }
    panic!("every stream was over before its worker died, {TRIES} times");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_another_program_goes_on_with_stays_in_its_trace() {
    let heard = Heard::default();
    let collector = format!("http://{}", heard.listen().await);
    let arguments = ["--devices", "cpu:1", "--otlp-endpoint", &collector];
    let cluster = Cluster::with_model("kjv", &kjv(), &arguments)
        .await
        .unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let client = cluster.client().await.unwrap();
    for _ in 0..TRIES {
        heard.spans().clear();
        let options = GenerateOptions {
            max_tokens: 300,
            ignore_eos: true,
            seed: Some(0),
            traceparent: format!("00-{TRACE}-{PARENT}-01"),
            ..GenerateOptions::default()
        };
        let mut stream = client.generate("In the beginning", options).await.unwrap();
        let place = stream.traceparent().unwrap().to_owned();
        assert!(place.starts_with(&format!("00-{TRACE}-")), "{place}");
        // Accepted, and the first token.
        for _ in 0..2 {
            stream.next().await.unwrap().unwrap();
        }
        let mut takeover = Command::new(binaries().unwrap().join("hotcell-scheduler"));
        takeover
            .args(["--takeover", "--socket"])
            .arg(&cluster.socket)
            .args(arguments)
            .env_clear()
            .env("XDG_CONFIG_HOME", cluster.folder.path())
            .current_dir(cluster.folder.path());
        let output = tokio::task::spawn_blocking(move || takeover.output());
        let output = output.await.unwrap().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        while let Some(event) = stream.next().await {
            event.unwrap();
        }
        let (own, all) = request(&heard).await;
        assert!(all.iter().all(|span| hex(&span.trace_id) == TRACE));
        assert_eq!(hex(&own.parent_span_id), PARENT);
        let taken = own
            .attributes
            .iter()
            .find(|a| a.key == "hotcell.taken_over");
        if taken.is_none() {
            continue;
        }
        assert_eq!(text(&own, "gen_ai.usage.output_tokens").unwrap(), "300");
        assert_eq!(text(&own, "hotcell.deaths_survived").unwrap(), "0");
        return;
    }
    panic!("every stream was over before the other program began, {TRIES} times");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_spans_are_sent_before_a_scheduler_ends() {
    let heard = Heard::default();
    let collector = format!("http://{}", heard.listen().await);
    let arguments = ["--devices", "cpu:1", "--otlp-endpoint", &collector];
    let mut cluster = Cluster::with_model("kjv", &kjv(), &arguments)
        .await
        .unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let client = cluster.client().await.unwrap();
    let options = GenerateOptions {
        max_tokens: 4,
        ..GenerateOptions::default()
    };
    let stream = client.generate("In the beginning", options).await.unwrap();
    stream.complete().await.unwrap();
    cluster.scheduler.signal(Signal::TERM).unwrap();
    let ended = tokio::task::spawn_blocking(move || cluster.scheduler.wait());
    assert!(ended.await.unwrap().unwrap().success());
    let all = heard.spans().clone();
    let own = all.iter().find(|span| span.kind() == SpanKind::Server);
    assert_eq!(own.unwrap().name, "text_completion kjv");
}

/// Speaks TLS in front of another address, and says where.
async fn in_front_of(address: SocketAddr, own: &rcgen::CertifiedKey<rcgen::KeyPair>) -> SocketAddr {
    let cert = CertificateDer::from_pem_slice(own.cert.pem().as_bytes()).unwrap();
    let key = own.signing_key.serialize_pem();
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
    let mut config = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(vec![cert], key)
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let front = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                // Who does not believe it leaves.
                let Ok(mut stream) = acceptor.accept(stream).await else {
                    return;
                };
                let mut behind = Connection::connect(address).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut stream, &mut behind).await;
            });
        }
    });
    front
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_over_tls_gets_spans_if_it_is_believed() {
    let own = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let other = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let files = tempfile::tempdir().unwrap();
    for (believed, comes) in [(&own, true), (&other, false)] {
        let ca = files.path().join("ca.pem");
        std::fs::write(&ca, believed.cert.pem()).unwrap();
        let heard = Heard::default();
        let front = in_front_of(heard.listen().await, &own).await;
        let collector = format!("https://{front}");
        let arguments = [
            "--devices",
            "cpu:1",
            "--otlp-endpoint",
            &collector,
            "--otlp-ca",
            ca.to_str().unwrap(),
        ];
        let mut cluster = Cluster::with_model("kjv", &kjv(), &arguments)
            .await
            .unwrap();
        cluster.workers(all_have("kjv")).await.unwrap();
        let client = cluster.client().await.unwrap();
        let options = GenerateOptions {
            max_tokens: 4,
            ..GenerateOptions::default()
        };
        let stream = client.generate("In the beginning", options).await.unwrap();
        stream.complete().await.unwrap();
        cluster.scheduler.signal(Signal::TERM).unwrap();
        let ended = tokio::task::spawn_blocking(move || {
            let status = cluster.scheduler.wait().unwrap();
            (status, cluster.scheduler.log())
        });
        let (status, log) = ended.await.unwrap();
        assert!(status.success(), "{log}");
        assert_eq!(!heard.spans().is_empty(), comes, "{log}");
        let warned = log.contains("the collector does not take traces");
        assert_eq!(warned, !comes, "{log}");
    }
}

//! The door for HTTP, as those see it who mean no good: whatever they send, they are told so or cut off, and others are served.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use hotcell_proto::limits;
use hotcell_tests::cluster::{Cluster, all_have, free_address, kjv};

/// Longer than the scheduler waits for anything that is sent here.
const PATIENCE: Duration = Duration::from_secs(60);

async fn cluster() -> (Cluster, SocketAddr) {
    let address = free_address().unwrap();
    let http = address.to_string();
    let arguments = ["--devices", "cpu:1", "--http", &http];
    let cluster = Cluster::with_model("kjv", &kjv(), &arguments)
        .await
        .unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    (cluster, address)
}

fn connect(to: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(to).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// What comes until the connection is closed.
fn rest(mut stream: TcpStream) -> String {
    let mut all = Vec::new();
    // It may be reset: what it did not read is thrown away.
    let _ = stream.read_to_end(&mut all);
    String::from_utf8_lossy(&all).into_owned()
}

/// Sends a request and gives all of the answer.
fn send(to: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = connect(to);
    // The server may have had enough before all of it is sent.
    let _ = stream.write_all(bytes);
    rest(stream)
}

fn post(path: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

fn status(answer: &str) -> &str {
    answer.split(' ').nth(1).unwrap_or_default()
}

/// A request that makes sense gets its answer.
fn serves(to: SocketAddr) {
    let body = br#"{"prompt": "In the beginning", "max_tokens": 4, "temperature": 0}"#;
    let answer = send(to, &post("/v1/completions", body));
    assert_eq!(status(&answer), "200", "{answer}");
    assert!(answer.contains(" God created"), "{answer}");
}

fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|l| l.strip_prefix("VmRSS:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[tokio::test(flavor = "multi_thread")]
async fn more_texts_than_a_worker_takes_at_once_have_their_vectors() {
    let (_cluster, to) = cluster().await;
    let texts = |count: usize| -> Vec<String> { (0..count).map(|i| format!("day {i}")).collect() };
    let ask = |path: &str, texts: &[String]| {
        let body = serde_json::json!({"model": "kjv", "input": texts});
        let answer = send(to, &post(path, body.to_string().as_bytes()));
        let body = answer.split_once("\r\n\r\n").unwrap().1;
        let value: serde_json::Value = serde_json::from_str(body).unwrap();
        (status(&answer).to_owned(), value)
    };
    let all = texts(2 * limits::MAX_EMBED_PROMPTS + 2);
    let (code, many) = ask("/v1/embeddings", &all);
    assert_eq!(code, "200", "{many}");
    assert_eq!(many["data"].as_array().unwrap().len(), all.len());
    let last = all.len() - 1;
    let (_, one) = ask("/v1/embeddings", &all[last..]);
    assert_eq!(many["data"][last]["index"], last);
    assert_eq!(many["data"][last]["embedding"], one["data"][0]["embedding"]);
    assert_ne!(many["data"][0]["embedding"], one["data"][0]["embedding"]);
    let (code, same) = ask("/api/embed", &all);
    assert_eq!(code, "200", "{same}");
    assert_eq!(same["embeddings"].as_array().unwrap().len(), all.len());
    assert_eq!(same["prompt_eval_count"], many["usage"]["prompt_tokens"]);
    let (code, refused) = ask("/v1/embeddings", &texts(limits::MAX_EMBED_INPUTS + 1));
    assert_eq!(code, "400", "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_whose_name_is_no_text_is_not_found() {
    let (_cluster, to) = cluster().await;
    let ask = |name: &str| {
        let head = format!(
            "GET /v1/models/{name} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        );
        send(to, head.as_bytes())
    };
    assert_eq!(status(&ask("kjv")), "200");
    let answer = ask("%ff");
    assert_eq!(status(&answer), "404", "{answer}");
    assert!(answer.contains("model_not_found"), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_that_make_no_sense_are_refused_in_words() {
    let (_cluster, to) = cluster().await;
    let deep = [vec![b'['; 200_000], vec![b']'; 200_000]].concat();
    let nested = format!(
        r#"{{"messages": [], "tools": {}}}"#,
        String::from_utf8(deep).unwrap()
    );
    for path in [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
        "/api/show",
        "/v2/models/kjv/infer",
        "/v2/models/kjv/generate",
        "/v2/models/kjv/generate_stream",
    ] {
        for body in [
            &b""[..],
            b"{",
            b"[]",
            b"{\"model\": 7}",
            b"{\"messages\": {}, \"prompt\": {}, \"input\": {}}",
            b"{\"model\": \"\xff\xfe\"}",
            b"\x00\x01\x02",
            nested.as_bytes(),
        ] {
            let answer = send(to, &post(path, body));
            let shown = String::from_utf8_lossy(&body[..body.len().min(40)]);
            assert_eq!(status(&answer), "400", "{path} {shown}: {answer}");
            assert!(answer.contains("error"), "{path} {shown}: {answer}");
        }
    }
    for path in [
        "/nothing",
        "/v1",
        "/v1/completions/x",
        "/hotcell.v1.Control/Explode",
    ] {
        let answer = send(to, &post(path, b"{}"));
        assert_eq!(status(&answer), "404", "{path}: {answer}");
    }
    serves(to);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_too_large_is_not_read() {
    let (cluster, to) = cluster().await;
    let pid = cluster.scheduler.pid();
    serves(to);
    let before = resident(pid);
    // As it says itself, and as it comes.
    for path in ["/v1/completions", "/v2/models/kjv/infer", "/api/chat"] {
        let said =
            format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 104857600\r\n\r\n");
        let answer = send(to, said.as_bytes());
        assert_eq!(status(&answer), "413", "{path}: {answer}");
    }
    let mut stream = connect(to);
    let head =
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    let piece = [&b"100000\r\n"[..], &vec![b' '; 1 << 20], b"\r\n"].concat();
    let pieces = limits::MAX_HTTP_BODY_BYTES >> 19;
    let sent = (0..pieces)
        .take_while(|_| stream.write_all(&piece).is_ok())
        .count();
    let answer = rest(stream);
    assert!(answer.is_empty() || status(&answer) == "413", "{answer}");
    assert!(!answer.is_empty() || sent < pieces, "all of it was read");
    // Heads.
    let many = "x: y\r\n".repeat(10_000);
    let long = format!("x: {}\r\n", "y".repeat(1 << 20));
    for headers in [many, long] {
        let request = format!("GET /healthz HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n");
        let answer = send(to, request.as_bytes());
        assert!(answer.is_empty() || status(&answer) == "431", "{answer}");
    }
    let path = format!(
        "GET /{} HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "a".repeat(1 << 20)
    );
    let answer = send(to, path.as_bytes());
    assert!(matches!(status(&answer), "" | "414" | "431"), "{answer}");
    let grown = resident(pid).saturating_sub(before);
    assert!(
        grown < 64 << 20,
        "the scheduler grew by {} MiB",
        grown >> 20
    );
    serves(to);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_sends_slowly_is_cut_off() {
    let (_cluster, to) = cluster().await;
    let began = Instant::now();
    let slow: Vec<_> = (0..64)
        .map(|_| {
            let mut stream = connect(to);
            stream.write_all(b"GET /healthz HTTP/1.1\r\nhost:").unwrap();
            stream
        })
        .collect();
    serves(to);
    for stream in slow {
        let answer = rest(stream);
        assert!(matches!(status(&answer), "" | "408"), "{answer}");
    }
    let bound = Duration::from_secs(limits::MAX_HTTP_HEAD_SECONDS);
    assert!(
        began.elapsed() >= bound / 2,
        "they were cut off for another reason"
    );
    let mut stream = connect(to);
    let half = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{\"prompt\":";
    stream.write_all(half).unwrap();
    let answer = rest(stream);
    assert_eq!(status(&answer), "408", "{answer}");
    serves(to);
}

/// Reads one answer whose head says how long it is.
fn answer(stream: &mut TcpStream) -> String {
    let mut all = Vec::new();
    let whole = |all: &[u8]| {
        let text = String::from_utf8_lossy(all).to_ascii_lowercase();
        let (head, body) = text.split_once("\r\n\r\n")?;
        let length = head.split_once("content-length: ")?.1;
        let length: usize = length.lines().next()?.trim().parse().ok()?;
        (body.len() >= length).then_some(())
    };
    while whole(&all).is_none() {
        let mut piece = [0; 4096];
        let read = stream.read(&mut piece).unwrap();
        assert!(read > 0, "{}", String::from_utf8_lossy(&all));
        all.extend_from_slice(&piece[..read]);
    }
    String::from_utf8_lossy(&all).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_may_wait_for_its_next_request_and_not_dawdle_over_it() {
    let (_cluster, to) = cluster().await;
    let whole = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let mut stream = connect(to);
    stream.write_all(whole).unwrap();
    assert_eq!(status(&answer(&mut stream)), "200");
    let head = Duration::from_secs(limits::MAX_HTTP_HEAD_SECONDS);
    std::thread::sleep(head + Duration::from_secs(2));
    stream.write_all(whole).unwrap();
    assert_eq!(status(&answer(&mut stream)), "200");
    // A byte now and then does not keep it.
    let began = Instant::now();
    for byte in &whole[..whole.len() - 4] {
        if stream.write_all(&[*byte]).is_err() || began.elapsed() > 2 * head {
            break;
        }
        std::thread::sleep(head / 20);
    }
    let took = began.elapsed();
    assert!(took >= head / 2 && took < 2 * head, "{took:?}");
    let end = rest(stream);
    assert!(matches!(status(&end), "" | "408"), "{end}");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_request_hides_in_another() {
    let (_cluster, to) = cluster().await;
    let hidden = "GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n";
    for smuggled in [
        // Both ways to say how long it is, of which a proxy in front may have believed the other one.
        format!("{head}content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n{hidden}"),
        format!("{head}transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n{hidden}"),
        // Two lengths, a length that is none, and an encoding that nobody knows.
        format!("{head}content-length: 0\r\ncontent-length: 60\r\n\r\n{hidden}"),
        format!("{head}content-length: +0\r\n\r\n{hidden}"),
        format!("{head}content-length: 0x0\r\n\r\n{hidden}"),
        format!("{head}transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n{hidden}"),
        format!("{head}transfer-encoding: xchunked\r\n\r\n0\r\n\r\n{hidden}"),
        format!("{head}transfer-encoding : chunked\r\n\r\n0\r\n\r\n{hidden}"),
        format!("{head}transfer-encoding: chunked\r\n\r\n0 \u{b}\r\n\r\n{hidden}"),
        // A line that goes on in the next one.
        format!("{head}x: y\r\n content-length: 60\r\n\r\n{hidden}"),
    ] {
        let answer = send(to, smuggled.as_bytes());
        assert!(!answer.contains("max_model_len"), "{smuggled}\n{answer}");
        assert!(
            matches!(status(&answer), "" | "400"),
            "{smuggled}\n{answer}"
        );
    }
    serves(to);
}

//! Web pages: Hotcell's own services in gRPC-Web's form (the protocol's document, PROTOCOL-WEB.md), and which pages may call.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use hotcell_client::v1;
use hotcell_tests::cluster::{Cluster, all_have, free_address, kjv};
use prost::Message;

const PAGE: &str = "https://app.example.com";

async fn cluster() -> (Cluster, SocketAddr) {
    let address = free_address().unwrap();
    let http = address.to_string();
    let arguments = ["--devices", "cpu:1", "--http", &http, "--web-origins", PAGE];
    let cluster = Cluster::with_model("kjv", &kjv(), &arguments).await;
    let cluster = cluster.unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    (cluster, address)
}

/// An answer over HTTP/1.1.
struct Answer {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines().filter_map(|l| l.split_once(": "));
        lines
            .find(|(n, _)| n.eq_ignore_ascii_case(name))
            .map(|(_, v)| v)
    }
}

/// The bytes of chunks (RFC 9112, section 7.1).
fn joined(mut chunks: &[u8]) -> Vec<u8> {
    let mut all = Vec::new();
    loop {
        let end = chunks.windows(2).position(|w| w == b"\r\n").unwrap();
        let size = std::str::from_utf8(&chunks[..end]).unwrap();
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            return all;
        }
        all.extend(&chunks[end + 2..][..size]);
        chunks = &chunks[end + 2 + size + 2..];
    }
}

fn call(to: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
    let mut stream = TcpStream::connect(to).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    let mut head = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n",
        body.len()
    );
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    stream
        .write_all(&[head.as_bytes(), b"\r\n", body].concat())
        .unwrap();
    let mut all = Vec::new();
    stream.read_to_end(&mut all).unwrap();
    let end = all.windows(4).position(|w| w == b"\r\n\r\n").unwrap();
    let head = String::from_utf8(all[..end].to_vec()).unwrap();
    let mut answer = Answer {
        status: head.split(' ').nth(1).unwrap().parse().unwrap(),
        head,
        body: all[end + 4..].to_vec(),
    };
    if answer.header("transfer-encoding") == Some("chunked") {
        answer.body = joined(&answer.body);
    }
    answer
}

/// A call of a method with one message: the messages of its answer, and its trailers.
fn web(to: SocketAddr, method: &str, message: &impl Message) -> (Vec<Vec<u8>>, String) {
    let message = message.encode_to_vec();
    let framed = [&[0][..], &(message.len() as u32).to_be_bytes(), &message].concat();
    let headers = [
        ("content-type", "application/grpc-web+proto"),
        ("x-grpc-web", "1"),
        ("origin", PAGE),
    ];
    let answer = call(to, "POST", method, &headers, &framed);
    assert_eq!(answer.status, 200, "{}", answer.head);
    assert_eq!(answer.header("access-control-allow-origin"), Some(PAGE));
    let (mut messages, mut trailers) = (Vec::new(), String::new());
    let mut rest = &answer.body[..];
    while let Some((kind, more)) = rest.split_first() {
        let size = u32::from_be_bytes(more[..4].try_into().unwrap()) as usize;
        let frame = more[4..4 + size].to_vec();
        rest = &more[4 + size..];
        match kind {
            0 => messages.push(frame),
            0x80 => trailers = String::from_utf8(frame).unwrap(),
            _ => panic!("frame of kind {kind}"),
        }
    }
    if trailers.is_empty() {
        // Of a call that failed at once they are headers.
        trailers = answer.head;
    }
    (messages, trailers)
}

#[tokio::test(flavor = "multi_thread")]
async fn our_services_speak_grpc_web() {
    let (_cluster, to) = cluster().await;
    let (messages, trailers) = web(
        to,
        "/hotcell.v1.Control/ListModels",
        &v1::ListModelsRequest {},
    );
    assert!(trailers.contains("grpc-status:0"), "{trailers}");
    let listed = v1::ListModelsResponse::decode(&messages[0][..]).unwrap();
    assert_eq!(listed.models[0].name, "kjv");

    let prompt = v1::prompt::Kind::Text("In the beginning".to_owned());
    let request = v1::GenerateRequest {
        prompt: Some(v1::Prompt { kind: Some(prompt) }),
        max_tokens: 9,
        ..v1::GenerateRequest::default()
    };
    let (messages, trailers) = web(to, "/hotcell.v1.Tokens/Generate", &request);
    assert!(trailers.contains("grpc-status:0"), "{trailers}");
    let events = messages
        .iter()
        .map(|m| v1::GenerateEvent::decode(&m[..]).unwrap());
    let text: String = events
        .filter_map(|event| match event.event? {
            v1::generate_event::Event::Delta(delta) => Some(delta.text),
            _ => None,
        })
        .collect();
    assert_eq!(text.trim(), "God created the heaven and the earth.");

    let unknown = v1::GenerateRequest {
        model: "nobody".to_owned(),
        ..request
    };
    let (messages, trailers) = web(to, "/hotcell.v1.Tokens/Generate", &unknown);
    assert!(messages.is_empty());
    assert!(trailers.contains("grpc-status: 5"), "{trailers}");
}

#[tokio::test(flavor = "multi_thread")]
async fn browsers_are_told_which_pages_may_call() {
    let (_cluster, to) = cluster().await;
    let ask = |origin| {
        let headers = [
            ("origin", origin),
            ("access-control-request-method", "POST"),
            (
                "access-control-request-headers",
                "authorization,content-type,x-grpc-web",
            ),
        ];
        call(to, "OPTIONS", "/v1/chat/completions", &headers, b"")
    };
    let told = ask(PAGE);
    assert_eq!(told.status, 200, "{}", told.head);
    assert_eq!(told.header("access-control-allow-origin"), Some(PAGE));
    let allowed = told.header("access-control-allow-headers").unwrap();
    assert!(allowed.contains("x-grpc-web"), "{allowed}");
    assert_eq!(
        ask("https://evil.example").header("access-control-allow-origin"),
        None
    );
    // Where no tokens are asked for, this machine's may.
    let here = "http://localhost:3000";
    let told = ask(here)
        .header("access-control-allow-origin")
        .map(str::to_owned);
    assert_eq!(told.as_deref(), Some(here));
    // Whoever is not asked beforehand is refused all the same.
    let body = br#"{"prompt": "In the beginning", "max_tokens": 4}"#;
    let from = |origin| call(to, "POST", "/v1/completions", &[("origin", origin)], body);
    assert_eq!(from(PAGE).status, 200);
    assert_eq!(from("https://evil.example").status, 403);
    let framed = [
        ("content-type", "application/grpc-web"),
        ("origin", "https://evil.example"),
    ];
    let refused = call(
        to,
        "POST",
        "/hotcell.v1.Control/ListModels",
        &framed,
        &[0; 5],
    );
    assert_eq!(refused.status, 403, "{}", refused.head);
}

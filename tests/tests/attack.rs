//! Strangers at the TCP door: whatever they send, others are served as before, and the scheduler does not grow.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    time::{Duration, Instant},
};

use hotcell_client::{Client, GenerateOptions, v1};
use hotcell_tests::{
    attack::{ATTACKS, Attack, Attacker},
    cluster::{Cluster, SOON, all_have, holds, kjv},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    time::{sleep, timeout},
};

/// Bytes that the scheduler may have more after all attacks than before: what each connection may begin before it is
/// counted, in a build without optimization. Without those bounds a flood of streams takes a gigabyte in seconds.
const GROWTH: i64 = 256 << 20;

fn free() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap()
}

async fn tokens(client: &Client) -> Vec<u32> {
    let options = GenerateOptions {
        max_tokens: 8,
        ..GenerateOptions::default()
    };
    let done = async {
        client
            .generate("In the beginning", options)
            .await?
            .complete()
            .await
    };
    timeout(SOON, done).await.unwrap().unwrap().token_ids
}

/// Attacks a door in every way, while `served` asks for what others are to have, and says so where it is not had.
async fn withstands(cluster: &Cluster, door: SocketAddr, served: impl AsyncFn(&str)) {
    let before = cluster.workers(all_have("kjv")).await.unwrap();
    let (bytes, _) = holds(cluster.scheduler.pid()).unwrap();
    for (seed, attack) in (1..).zip(ATTACKS) {
        let name = attack.name();
        let attacker = Attacker::start(attack, door, seed).unwrap();
        // Idle ones are nothing before they have all places.
        let enough = if attack == Attack::Idle { 1500 } else { 100 };
        let start = Instant::now();
        let mut rounds = 0;
        while rounds < 3 || attacker.blows() < enough {
            served(name).await;
            assert!(
                start.elapsed() < 10 * SOON,
                "{name}: {} blows",
                attacker.blows()
            );
            rounds += 1;
        }
        let (now, descriptors) = holds(cluster.scheduler.pid()).unwrap();
        println!(
            "{name}: {} KiB more, {descriptors} descriptors",
            (now - bytes) >> 10
        );
        assert!(now - bytes < GROWTH, "{name}: {bytes} bytes, then {now}");
        assert!(descriptors < 2000, "{name}: {descriptors}");
        // Its connections go with it.
        drop(attacker);
        let start = Instant::now();
        while holds(cluster.scheduler.pid()).unwrap().1 > 100 {
            assert!(
                start.elapsed() < SOON,
                "{name}: its connections are still there"
            );
            sleep(Duration::from_millis(20)).await;
        }
    }
    let after = cluster.workers(all_have("kjv")).await.unwrap();
    assert_eq!((after[0].pid, after[0].deaths), (before[0].pid, 0));
}

#[tokio::test]
async fn others_are_served_and_nothing_grows() {
    let address = free();
    let listen = address.to_string();
    let cluster = Cluster::with_model("kjv", &kjv(), &["--listen", &listen])
        .await
        .unwrap();
    let remote = listen.parse().unwrap();
    let old = Client::connect(&remote).await.unwrap();
    let right = tokens(&old).await;
    let served = async |name: &str| {
        assert_eq!(tokens(&old).await, right, "{name}");
        // Who comes in just now is served as well.
        let new = timeout(SOON, Client::connect(&remote)).await.unwrap();
        assert_eq!(tokens(&new.unwrap()).await, right, "{name}");
    };
    withstands(&cluster, address, served).await;
}

/// Asks the door for HTTP for a text, over a connection of its own.
async fn text(door: SocketAddr) -> String {
    let body = r#"{"prompt": "In the beginning", "max_tokens": 8, "temperature": 0}"#;
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut stream = TcpStream::connect(door).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let (_, json) = answer.rsplit_once("\r\n\r\n").unwrap();
    let told: serde_json::Value = serde_json::from_str(json).unwrap();
    told["choices"][0]["text"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn the_door_for_http_withstands_the_same() {
    let door = free();
    let http = door.to_string();
    let cluster = Cluster::with_model("kjv", &kjv(), &["--http", &http])
        .await
        .unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let right = text(door).await;
    assert!(right.starts_with(" God created"), "{right}");
    let served = async |name: &str| {
        let had = timeout(SOON, text(door)).await.unwrap();
        assert_eq!(had, right, "{name}");
    };
    withstands(&cluster, door, served).await;
}

/// Whether somebody at this address gets an answer to a first call.
async fn is_let_in(from: Ipv4Addr, address: SocketAddr) -> bool {
    let connector = tower::service_fn(move |_: http::Uri| async move {
        let socket = TcpSocket::new_v4()?;
        socket.bind((from, 0).into())?;
        let stream = socket.connect(address).await?;
        Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(stream))
    });
    let channel = tonic::transport::Endpoint::from_static("http://localhost")
        .connect_with_connector(connector)
        .await;
    let Ok(channel) = channel else { return false };
    let mut control = v1::control_client::ControlClient::new(channel);
    let answer = timeout(SOON, control.list_models(v1::ListModelsRequest::default()));
    answer.await.unwrap().is_ok()
}

#[tokio::test]
async fn an_address_whose_calls_come_to_nothing_is_shut_out_for_a_while_and_others_are_not() {
    let address = free();
    let listen = address.to_string();
    let cluster = Cluster::with_model("kjv", &kjv(), &["--listen", &listen])
        .await
        .unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    for attack in [Attack::Forged, Attack::Idle] {
        let theirs = attack.address();
        let others = Ipv4Addr::new(127, 0, 2, 1);
        assert!(is_let_in(theirs, address).await);
        let attacker = Attacker::start(attack, address, 7).unwrap();
        let start = Instant::now();
        while is_let_in(theirs, address).await {
            assert!(
                start.elapsed() < SOON,
                "{attack:?}: {} blows",
                attacker.blows()
            );
            assert!(is_let_in(others, address).await);
        }
        assert!(is_let_in(others, address).await);
        drop(attacker);
        let start = Instant::now();
        while !is_let_in(theirs, address).await {
            assert!(start.elapsed() < SOON, "{attack:?}: still out");
            sleep(Duration::from_millis(100)).await;
        }
        assert!(cluster.scheduler.log().contains(&theirs.to_string()));
    }
}

#[tokio::test]
async fn hundreds_of_clients_at_once_and_a_thousand_calls_are_no_attack() {
    let address = free();
    let listen = address.to_string();
    let cluster = Cluster::with_model("kjv", &kjv(), &["--listen", &listen])
        .await
        .unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let from = Ipv4Addr::new(127, 0, 2, 2);
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..300 {
        clients.spawn(is_let_in(from, address));
    }
    while let Some(let_in) = clients.join_next().await {
        assert!(let_in.unwrap());
    }
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let client = Client::connect(&listen.parse().unwrap()).await.unwrap();
        // Failures of a client that is also answered are borne.
        for number in 0..256 {
            let client = client.clone();
            calls.spawn(async move {
                match number % 2 {
                    0 => client.models().await.is_ok(),
                    _ => client.unload("nobody's").await.is_err(),
                }
            });
        }
    }
    while let Some(as_expected) = calls.join_next().await {
        assert!(as_expected.unwrap());
    }
    let client = Client::connect(&listen.parse().unwrap()).await.unwrap();
    assert_eq!(tokens(&client).await.len(), 8);
}

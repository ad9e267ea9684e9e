//! Strangers at the TCP door: whatever they send, others are served as before, and the scheduler does not grow.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{
    net::{SocketAddr, TcpListener},
    time::{Duration, Instant},
};

use hotcell_client::{Client, GenerateOptions};
use hotcell_tests::{
    attack::{ATTACKS, Attack, Attacker},
    cluster::{Cluster, SOON, all_have, holds, kjv},
};
use tokio::time::{sleep, timeout};

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

#[tokio::test]
async fn others_are_served_and_nothing_grows() {
    let address = free();
    let listen = address.to_string();
    let cluster = Cluster::with_model("kjv", &kjv(), &["--listen", &listen])
        .await
        .unwrap();
    let before = cluster.workers(all_have("kjv")).await.unwrap();
    let remote = listen.parse().unwrap();
    let old = Client::connect(&remote).await.unwrap();
    let right = tokens(&old).await;
    let (bytes, _) = holds(cluster.scheduler.pid()).unwrap();
    for (seed, attack) in (1..).zip(ATTACKS) {
        let name = attack.name();
        let attacker = Attacker::start(attack, address, seed).unwrap();
        // Idle ones are nothing before they have all places.
        let enough = if attack == Attack::Idle { 1500 } else { 100 };
        let start = Instant::now();
        let mut rounds = 0;
        while rounds < 3 || attacker.blows() < enough {
            assert_eq!(tokens(&old).await, right, "{name}");
            // Who comes in just now is served as well.
            let new = timeout(SOON, Client::connect(&remote)).await.unwrap();
            assert_eq!(tokens(&new.unwrap()).await, right, "{name}");
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

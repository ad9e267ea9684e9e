//! A worker that is drained: nothing new comes to it, what it has goes on, and it is given requests again.

use std::time::{Duration, Instant};

use hotcell_client::{Client, Event, GenerateOptions, Generation, Reason, v1::WorkerState};
use hotcell_tests::cluster::{Cluster, SOON};
use tokio::task::JoinHandle;

use super::{hotcell, kjv_cluster, long};

/// Every token is a step of its own: with guesses a fast machine is done with hundreds before anybody looks.
fn options(id: &str, tokens: u32) -> GenerateOptions {
    GenerateOptions {
        max_tokens: tokens,
        no_speculation: true,
        deadline: Some(SOON * 2),
        ..long(id)
    }
}

/// All tokens of a stream.
async fn tokens(client: &Client, id: &str, count: u32) -> Vec<u32> {
    let stream = client
        .generate("And God said", options(id, count))
        .await
        .unwrap();
    stream.complete().await.unwrap().token_ids
}

/// A stream that has begun to answer, and is read to its end beside us: all of its tokens.
async fn begun(client: &Client, id: &str, count: u32) -> JoinHandle<Vec<u32>> {
    let mut stream = client
        .generate("And God said", options(id, count))
        .await
        .unwrap();
    let mut answer = next(&mut stream).await.unwrap();
    while answer.is_empty() {
        answer = next(&mut stream).await.unwrap();
    }
    tokio::spawn(async move {
        while let Some(more) = next(&mut stream).await {
            answer.extend(more);
        }
        answer
    })
}

/// The tokens of a stream's next event; none: it is complete.
async fn next(stream: &mut Generation) -> Option<Vec<u32>> {
    match stream.next().await.unwrap().unwrap() {
        Event::Accepted(_) => Some(Vec::new()),
        Event::Delta(delta) => Some(delta.token_ids),
        Event::Finished(_) => None,
    }
}

/// The worker's state, as `hotcell ps` shows it.
fn shown(cluster: &Cluster, worker: &str) -> String {
    let said = hotcell(cluster, &["ps"]);
    let line = said.lines().find(|line| line.starts_with(worker));
    let words: Vec<&str> = line.unwrap().split_whitespace().collect();
    words[3].to_owned()
}

async fn until_shown(cluster: &Cluster, worker: &str, state: &str) {
    let begun = Instant::now();
    while shown(cluster, worker) != state {
        assert!(begun.elapsed() < SOON, "{}", hotcell(cluster, &["ps"]));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The worker that a stream runs on.
async fn busy(cluster: &Cluster) -> String {
    let all = cluster
        .workers(|all| all.iter().any(|w| w.running_requests > 0))
        .await
        .unwrap();
    let found = all.iter().find(|w| w.running_requests > 0);
    found.unwrap().id.clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_drained_worker_has_ends_there_or_goes_on_elsewhere() {
    let cluster = kjv_cluster(&["--devices", "cpu:2"]).await;
    let client = cluster.client().await.unwrap();
    let expected = tokens(&client, "calm", 950).await;

    // It ends in time where it is.
    let short = begun(&client, "short", 400).await;
    let first = busy(&cluster).await;
    assert_eq!(
        hotcell(&cluster, &["drain", &first]),
        format!("drained {first}\n")
    );
    assert_eq!(short.await.unwrap(), expected[..400]);
    until_shown(&cluster, &first, "drained").await;
    let of = |all: &[hotcell_client::v1::WorkerInfo], id: &str| {
        all.iter().find(|w| w.id == id).cloned().unwrap()
    };
    assert_eq!(
        of(&cluster.workers(|_| true).await.unwrap(), &first).epoch,
        1
    );

    // Several at once, which would be spread over both: all on the other one.
    let mut several = Vec::new();
    for number in 0..6 {
        let options = options(&format!("new-{number}"), 60);
        let stream = client.generate("And God said", options).await.unwrap();
        several.push(tokio::spawn(stream.complete()));
    }
    while several.iter().any(|stream| !stream.is_finished()) {
        let workers = cluster.workers(|_| true).await.unwrap();
        assert_eq!(of(&workers, &first).running_requests, 0);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    for stream in several {
        assert_eq!(stream.await.unwrap().unwrap().token_ids, expected[..60]);
    }
    let twice = cluster.hotcell(&["drain", &first]).unwrap();
    let said = String::from_utf8(twice.stderr).unwrap();
    assert!(
        !twice.status.success() && said.contains("not ready but drained"),
        "{said}"
    );

    // It is given requests again, and the other one none: what runs there too long goes on here.
    let long = begun(&client, "long", 950).await;
    let second = busy(&cluster).await;
    assert_ne!(second, first);
    client.release(&first).await.unwrap();
    client
        .drain(&second, Duration::from_millis(1))
        .await
        .unwrap();
    let moved = cluster
        .workers(|all| of(all, &second).epoch == 2 && of(all, &first).running_requests == 1)
        .await
        .unwrap();
    assert_eq!(of(&moved, &second).deaths, 0);
    assert_eq!(long.await.unwrap(), expected);
    until_shown(&cluster, &second, "drained").await;
    assert!(client.crashes().await.unwrap().is_empty());
    assert_eq!(
        hotcell(&cluster, &["release", &second]),
        format!("released {second}\n")
    );
    hotcell(&cluster, &["drain", &second, "--within", "30s"]);
    // Another process in its place serves as any other.
    hotcell(&cluster, &["restart", &second]);
    cluster
        .workers(|all| {
            of(all, &second).epoch == 3 && of(all, &second).state() == WorkerState::Ready
        })
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn where_there_is_no_other_worker_streams_go_on_in_another_process() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let expected = tokens(&client, "calm", 950).await;
    let moved = begun(&client, "moved", 950).await;
    assert_eq!(busy(&cluster).await, "w0");
    client.drain("w0", Duration::from_millis(1)).await.unwrap();
    let refused = client.generate("And God said", options("new", 5)).await;
    let refused = match refused {
        Ok(stream) => stream.complete().await.unwrap_err(),
        Err(error) => error,
    };
    assert_eq!(refused.reason(), Reason::NoWorker);
    assert!(
        refused.message().contains("hotcell release w0"),
        "{refused}"
    );
    let again = cluster
        .workers(|all| all[0].epoch == 2 && all[0].running_requests == 1)
        .await
        .unwrap();
    assert_eq!(again[0].state(), WorkerState::Draining);
    assert_eq!(moved.await.unwrap(), expected);
    until_shown(&cluster, "w0", "drained").await;
    client.release("w0").await.unwrap();
    assert_eq!(tokens(&client, "after", 20).await, expected[..20]);
    let ready = client.release("w0").await.unwrap_err();
    assert!(
        ready.message().contains("not quarantined or drained"),
        "{ready}"
    );
    let unknown = client
        .drain("w7", Duration::from_secs(1))
        .await
        .unwrap_err();
    assert_eq!(unknown.reason(), Reason::NoWorker);
    let long = client.drain("w0", Duration::from_secs(1 << 20)).await;
    assert_eq!(long.unwrap_err().reason(), Reason::InvalidArgument);
}

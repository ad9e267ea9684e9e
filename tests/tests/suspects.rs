//! Requests under which workers die, on real processes: who is run alone, who ends, and who goes on unharmed.
//!
//! What kills is this test: it sends SIGKILL to whichever worker a request runs on.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{cell::RefCell, time::Duration};

use hotcell_client::{Client, Completion, Event, GenerateOptions, Reason, v1};
use hotcell_tests::cluster::{Cluster, SOON, all_have, kjv, signal_pid};
use rustix::process::Signal;

async fn kjv_cluster(arguments: &[&str]) -> Cluster {
    let cluster = Cluster::with_model("kjv", &kjv(), arguments).await.unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    cluster
}

fn sampled(id: &str, tokens: u32, seed: u64) -> GenerateOptions {
    GenerateOptions {
        sampling: v1::Sampling {
            temperature: Some(0.9),
            top_p: Some(0.95),
            repetition_penalty: Some(1.1),
            ..v1::Sampling::default()
        },
        seed: Some(seed),
        max_tokens: tokens,
        ignore_eos: true,
        request_id: id.to_owned(),
        ..GenerateOptions::default()
    }
}

async fn complete(client: &Client, prompt: &'static str, options: GenerateOptions) -> Completion {
    let stream = client.generate(prompt, options).await.unwrap();
    stream.complete().await.unwrap()
}

async fn kill(client: &Client, worker: &str) {
    let workers = client.workers().await.unwrap();
    let Some(found) = workers.iter().find(|w| w.id == worker) else {
        return;
    };
    // It may be dying already.
    let _ = signal_pid(found.pid, Signal::KILL);
}

/// Kills the worker w0 now, and then every worker that `request` goes on with, `kills` in all. Notes those killed.
async fn hunt_down(cluster: &Cluster, request: &str, kills: usize, killed: &RefCell<Vec<String>>) {
    let client = cluster.client().await.unwrap();
    let mut events = client.watch().await.unwrap();
    kill(&client, "w0").await;
    killed.borrow_mut().push("w0".to_owned());
    while killed.borrow().len() < kills {
        let event = events.next().await.unwrap().unwrap();
        let about = format!("request {request} ");
        if event.kind() == v1::EventKind::StreamContinued && event.message.contains(&about) {
            kill(&client, &event.worker).await;
            killed.borrow_mut().push(event.worker);
        }
    }
}

/// The same; returns those killed.
async fn hunt(cluster: &Cluster, request: &str, kills: usize) -> Vec<String> {
    let killed = RefCell::default();
    hunt_down(cluster, request, kills, &killed).await;
    killed.into_inner()
}

#[tokio::test]
async fn a_poisonous_request_ends_and_those_who_shared_its_workers_go_on() {
    let cluster = kjv_cluster(&[]).await;
    let client = cluster.client().await.unwrap();
    let prompts: [&'static str; 4] = [
        "And God said",
        "The LORD is my",
        "Now",
        "And it came to pass",
    ];
    let mut undisturbed = Vec::new();
    for (i, prompt) in prompts.iter().enumerate() {
        undisturbed.push(complete(&client, prompt, sampled("", 400, i as u64)).await);
    }
    let good: Vec<_> = prompts
        .into_iter()
        .enumerate()
        .map(|(i, prompt)| {
            let client = client.clone();
            let options = sampled(&format!("good-{i}"), 400, i as u64);
            tokio::spawn(async move { complete(&client, prompt, options).await })
        })
        .collect();
    let mut evil = client
        .generate("In the beginning", sampled("evil", 900, 9))
        .await
        .unwrap();
    let mut said = 0;
    while said < 5 {
        if let Event::Delta(delta) = evil.next().await.unwrap().unwrap() {
            said += delta.token_ids.len();
        }
    }
    let killed = RefCell::default();
    let ended = async {
        loop {
            match evil.next().await.expect("ended without a status") {
                Ok(Event::Finished(_)) => panic!("it lived"),
                Ok(_) => {}
                Err(error) => break error,
            }
        }
    };
    let error = tokio::select! {
        error = ended => error,
        () = hunt_down(&cluster, "evil", usize::MAX, &killed) => panic!("nothing is left to hunt"),
        () = tokio::time::sleep(SOON) => panic!("it goes on after {killed:?}"),
    };
    let killed = killed.into_inner();
    assert_eq!(killed[..2], ["w0", "w0"]);
    // Once more alone, should nobody else have been served meanwhile.
    assert!((3..=8).contains(&killed.len()), "{killed:?}");
    assert!(killed[2..].iter().all(|w| w.starts_with("w0.solo")));
    assert_eq!(error.reason(), Reason::RequestPoisoned, "{error}");
    assert_eq!(error.get("request_id"), Some("evil"));
    assert!(error.message().contains("evil"), "{error}");
    for (handle, undisturbed) in good.into_iter().zip(undisturbed) {
        let done = handle.await.unwrap();
        assert_eq!(done.token_ids, undisturbed.token_ids);
        assert_eq!(done.text, undisturbed.text);
    }
    // Nothing of it is left but a worker that serves.
    let workers = cluster
        .workers(|w| w.len() == 1 && all_have("kjv")(w))
        .await
        .unwrap();
    assert_eq!(workers[0].deaths, 2);
    complete(&client, "Now", sampled("after", 8, 1)).await;
}

#[tokio::test]
async fn an_innocent_suspect_runs_alone_on_a_lease_of_its_own_and_ends_as_if_nothing_had_been() {
    let cluster = kjv_cluster(&[]).await;
    let client = cluster.client().await.unwrap();
    let undisturbed = complete(&client, "In the beginning", sampled("", 900, 9)).await;
    let mut events = client.watch().await.unwrap();
    let mut stream = client
        .generate("In the beginning", sampled("r", 900, 9))
        .await
        .unwrap();
    let mut tokens = Vec::new();
    while tokens.len() < 5 {
        if let Event::Delta(delta) = stream.next().await.unwrap().unwrap() {
            tokens.extend(delta.token_ids);
        }
    }
    hunt(&cluster, "r", 2).await;
    let alone = loop {
        let event = events.next().await.unwrap().unwrap();
        if event.kind() == v1::EventKind::WorkerStarted && event.worker.contains(".solo") {
            break event;
        }
    };
    // Held fast while it is looked at.
    let pid: u32 = alone
        .message
        .strip_prefix("process ")
        .unwrap()
        .parse()
        .unwrap();
    signal_pid(pid, Signal::STOP).unwrap();
    let workers = client.workers().await.unwrap();
    let info = workers.iter().find(|w| w.id == alone.worker).unwrap();
    let lease = info.lease.as_ref().unwrap();
    assert_eq!(
        (lease.device.as_str(), lease.trust_domain.as_str()),
        ("cpu:0", "suspect")
    );
    assert_eq!(info.pid, pid);
    signal_pid(pid, Signal::CONT).unwrap();
    let mut survived = None;
    while let Some(event) = stream.next().await {
        match event.unwrap() {
            Event::Delta(delta) => tokens.extend(delta.token_ids),
            Event::Finished(finished) => survived = Some(finished.deaths_survived),
            Event::Accepted(_) => panic!("accepted twice"),
        }
    }
    assert_eq!(tokens, undisturbed.token_ids);
    assert_eq!(survived, Some(2));
    cluster.workers(|all| all.len() == 1).await.unwrap();
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
}

#[tokio::test]
async fn whoever_is_told_to_suspect_later_does() {
    let cluster = kjv_cluster(&["--suspect-after", "4"]).await;
    let client = cluster.client().await.unwrap();
    let mut stream = client
        .generate("In the beginning", sampled("r", 900, 9))
        .await
        .unwrap();
    while !matches!(stream.next().await.unwrap().unwrap(), Event::Delta(_)) {}
    let hunting = hunt(&cluster, "r", 3);
    let killed = tokio::time::timeout(Duration::from_secs(30), hunting).await;
    assert_eq!(killed.unwrap(), ["w0", "w0", "w0"]);
    let finished = loop {
        if let Event::Finished(finished) = stream.next().await.unwrap().unwrap() {
            break finished;
        }
    };
    assert_eq!(finished.deaths_survived, 3);
}

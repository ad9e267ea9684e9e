//! What is known about a worker after its death, with real processes and real signals.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{path::Path, sync::Arc, time::Instant};

use hotcell_client::{Client, Event, GenerateOptions, v1};
use hotcell_tests::cluster::{Cluster, SOON, all_have, kjv, signal_pid};
use rustix::process::Signal;

async fn cluster(model: &Path, arguments: &[&str]) -> Cluster {
    let cluster = Cluster::with_model("kjv", model, arguments).await.unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    cluster
}

fn long() -> GenerateOptions {
    GenerateOptions {
        max_tokens: 400,
        ignore_eos: true,
        request_id: "the-one-that-ran".to_owned(),
        ..GenerateOptions::default()
    }
}

/// Does something to the worker's process once the first tokens of a stream are there, and returns the stream's ids.
async fn amid(cluster: &Cluster, act: impl FnOnce(u32)) -> Vec<u32> {
    let client = cluster.client().await.unwrap();
    let mut stream = client.generate("In the beginning", long()).await.unwrap();
    let (mut ids, mut act) = (Vec::new(), Some(act));
    while let Some(event) = stream.next().await {
        if let Event::Delta(delta) = event.unwrap() {
            ids.extend(delta.token_ids);
        }
        if ids.len() >= 3
            && let Some(act) = act.take()
        {
            act(client.workers().await.unwrap()[0].pid);
        }
    }
    assert!(act.is_none(), "the stream ended at once");
    ids
}

/// The report of the death that struck the request, once it tells what became of that.
async fn the_report(client: &Client) -> v1::CrashReport {
    let start = Instant::now();
    loop {
        let crashes = client.crashes().await.unwrap();
        let told =
            |r: &v1::AffectedRequest| r.request_id == "the-one-that-ran" && !r.outcome.is_empty();
        if let Some(crash) = crashes.iter().find(|c| c.requests.iter().any(told)) {
            return client.crash(&crash.id).await.unwrap();
        }
        assert!(start.elapsed() < SOON, "{crashes:#?}");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

async fn undisturbed(cluster: &Cluster) -> Vec<u32> {
    let client = cluster.client().await.unwrap();
    let options = GenerateOptions {
        request_id: String::new(),
        ..long()
    };
    let stream = client.generate("In the beginning", options).await.unwrap();
    stream.complete().await.unwrap().token_ids
}

#[tokio::test]
async fn a_crash_leaves_a_report_with_request_node_and_backtrace() {
    let folder = tempfile::tempdir().unwrap();
    let files = folder.path().join("crashes");
    let cluster = cluster(&kjv(), &["--crash-dir", files.to_str().unwrap()]).await;
    let expected = undisturbed(&cluster).await;
    let ids = amid(&cluster, |pid| signal_pid(pid, Signal::SEGV).unwrap()).await;
    assert_eq!(ids, expected);

    let client = cluster.client().await.unwrap();
    let report = the_report(&client).await;
    assert_eq!(
        (report.id.as_str(), report.kind.as_str()),
        ("w0.1", "signal")
    );
    assert!(
        report.reason.starts_with("killed by SIGSEGV"),
        "{}",
        report.reason
    );
    assert_eq!(report.models, ["kjv"]);
    let seen = report.blackbox.unwrap();
    assert_eq!(
        (seen.doing.as_str(), seen.model.as_str()),
        ("stepping", "kjv")
    );
    assert!(seen.steps > 0 && !seen.op.is_empty(), "{seen:#?}");
    assert_eq!(seen.running.len(), 1);
    assert_eq!(seen.running[0].request_id, "the-one-that-ran");
    assert!(seen.running[0].tokens > 3);
    let signal = seen.signal.unwrap();
    assert_eq!(signal.name, "SIGSEGV");
    assert!(!signal.frames.is_empty());
    let [request] = &report.requests[..] else {
        panic!("{:#?}", report.requests);
    };
    assert_eq!(request.request_id, "the-one-that-ran");
    assert!(request.generated >= 3);
    assert_eq!(request.outcome, "continued on w0 (epoch 2)");

    let shown = cluster.hotcell(&["crashes", "show", "w0.1"]).unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("backtrace   0 "), "{shown}");
    // The thread that got the signal waited for calls: its frames lead to the program's own.
    assert!(shown.contains("worker/src/program.rs"), "{shown}");
    let listed = cluster.hotcell(&["crashes", "list"]).unwrap();
    assert!(String::from_utf8(listed.stdout).unwrap().contains("w0.1"));
    let file = std::fs::read_dir(&files).unwrap().next().unwrap().unwrap();
    let text = std::fs::read_to_string(file.path()).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        json["blackbox"]["running"][0]["request_id"],
        "the-one-that-ran"
    );
}

#[tokio::test]
async fn a_worker_that_stands_still_is_replaced_and_its_stream_goes_on() {
    let cluster = cluster(&kjv(), &["--hang-timeout", "2s"]).await;
    let expected = undisturbed(&cluster).await;
    let ids = amid(&cluster, |pid| signal_pid(pid, Signal::STOP).unwrap()).await;
    assert_eq!(ids, expected);
    let client = cluster.client().await.unwrap();
    let report = the_report(&client).await;
    assert_eq!(report.kind, "wedged", "{}", report.reason);
    let outcome = &report.requests[0].outcome;
    assert!(outcome.starts_with("continued on w0 (epoch "), "{outcome}");
}

#[tokio::test]
async fn a_model_file_that_shrinks_is_blamed_and_nobody_else() {
    // Whichever of them hits upon it.
    for members in ["1", "2"] {
        a_file_shrinks(members).await;
    }
}

async fn a_file_shrinks(members: &str) {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    std::fs::create_dir(&model).unwrap();
    for file in std::fs::read_dir(kjv()).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), model.join(file.file_name())).unwrap();
    }
    let weights = std::fs::read_dir(&model)
        .unwrap()
        .map(|f| f.unwrap().path())
        .find(|p| p.extension().is_some_and(|e| e == "safetensors"))
        .unwrap();
    let cluster = cluster(
        &model,
        &["--continue-timeout", "2s", "--tensor-parallel", members],
    )
    .await;
    let client = cluster.client().await.unwrap();
    let mut stream = client.generate("In the beginning", long()).await.unwrap();
    let mut shrunk = false;
    let end = loop {
        match stream.next().await.unwrap() {
            Ok(Event::Delta(_)) if !shrunk => {
                let file = std::fs::OpenOptions::new().write(true).open(&weights);
                file.unwrap().set_len(4096).unwrap();
                shrunk = true;
            }
            // The worker was done before this test had its turn; the next one is not.
            Ok(Event::Finished(_)) => {
                assert!(shrunk);
                match client.generate("In the beginning", long()).await {
                    Ok(next) => stream = next,
                    Err(error) => break error,
                }
            }
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(shrunk);
    let crashes = client.crashes().await.unwrap();
    let first = crashes.last().unwrap();
    assert_eq!(first.kind, "model_changed", "{} / {end}", first.reason);
    let report = client.crash(&first.id).await.unwrap();
    assert!(report.reason.contains("changed"), "{}", report.reason);
    assert!(report.blackbox.unwrap().error.contains("shortened"));
}

#[tokio::test]
async fn a_death_is_a_pause_and_is_told_to_who_asks() {
    const GENERATE: [&str; 6] = [
        "--verbose",
        "generate",
        "--max-tokens",
        "1000",
        "--ignore-eos",
        "In the beginning",
    ];
    let cluster = Arc::new(cluster(&kjv(), &[]).await);
    let calm = cluster.hotcell(&GENERATE).unwrap();
    let client = cluster.client().await.unwrap();
    // It is another request that is to be struck.
    let idle = |w: &[v1::WorkerInfo]| w[0].running_requests == 0;
    cluster.workers(idle).await.unwrap();
    let other = Arc::clone(&cluster);
    let asked = tokio::task::spawn_blocking(move || other.hotcell(&GENERATE).unwrap());
    // Once it has some of its tokens: a death before it was accepted is told to nobody.
    let amid = |w: &[v1::WorkerInfo]| (1..950).contains(&w[0].outstanding_tokens);
    let pid = cluster.workers(amid).await.unwrap()[0].pid;
    signal_pid(pid, Signal::SEGV).unwrap();
    let told = asked.await.unwrap();
    assert!(told.status.success(), "{told:?}");
    assert_eq!(told.stdout, calm.stdout);
    let said = String::from_utf8(told.stderr).unwrap();
    let begins = "w0 (epoch 1) died (signal) after ";
    let line = said.lines().find(|line| line.starts_with(begins));
    let line = line.unwrap_or_else(|| panic!("{said}"));
    assert!(
        line.contains(" tokens; went on with w0 ") && line.ends_with(" ms later"),
        "{line}"
    );
    assert_eq!(client.workers().await.unwrap()[0].epoch, 2);
}

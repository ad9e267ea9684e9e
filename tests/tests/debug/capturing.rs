//! Captures into files: kept when what is captured dies, within a budget, on the disk as they come, and of the request that
//! meets a condition.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use hotcell_client::{
    GenerateOptions, Prompt,
    debug::Recording,
    v1::{self, TraceTrack, trace_piece},
};
use hotcell_proto::limits;
use hotcell_tests::{
    cluster::{Cluster, Process, SOON, all_have, hotcell, most_resident, signal_pid},
    debugged::{of, put_together},
    fault::{NAN_NODE, NAN_TOKEN},
    synthetic::{self, Measures},
};
use rustix::process::Signal;
use serde_json::Value;

use super::{kjv_cluster, long};

/// A capture that is about to begin, once it has said so.
pub(super) async fn capturing(
    cluster: &Cluster,
    arguments: &[&str],
    file: &Path,
    said: &str,
) -> Process {
    let mut command = hotcell(cluster.folder.path()).unwrap();
    let address = format!("unix:{}", cluster.socket.display());
    command.args(["--address", &address, "debug", "capture"]);
    command.args(arguments).arg("-o").arg(file);
    command.stdout(std::fs::File::create(file.with_extension("said")).unwrap());
    let capture = Process::start(&mut command).unwrap();
    let begun = Instant::now();
    while !capture.log().contains(said) {
        assert!(begun.elapsed() < SOON, "{}", capture.log());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    capture
}

/// What it said when it was done.
pub(super) fn result(file: &Path) -> String {
    std::fs::read_to_string(file.with_extension("said")).unwrap()
}

fn beyond(id: &str, tokens: u32) -> GenerateOptions {
    GenerateOptions {
        max_tokens: tokens,
        deadline: Some(SOON * 2),
        ..long(id)
    }
}

/// Bytes that a process holds in files without a name.
fn spooled(pid: u32) -> u64 {
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let unnamed = files.filter_map(|file| {
        let path = file.ok()?.path();
        let target = std::fs::read_link(&path).ok()?;
        let is_unnamed = target.to_string_lossy().ends_with(" (deleted)");
        let metadata = std::fs::metadata(&path).ok()?;
        (is_unnamed && metadata.is_file()).then_some(metadata.len())
    });
    unnamed.sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_captured_before_the_worker_died_is_kept_and_marked() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let mut attempts = 0..8;
    let (mut capture, file, mut whole, stream) = loop {
        // Whoever looks is behind those who serve, and on a busy host far behind: it has to have seen something by then.
        let id = format!("dies-{}", attempts.next().expect("a stream that is seen"));
        let file = cluster.folder.path().join(format!("{id}.hotcell"));
        let wanted = [id.as_str(), "--reveal", "--values", "all"];
        let mut capture = capturing(&cluster, &wanted, &file, "waiting").await;
        let stream = client.generate("In the beginning", beyond(&id, 900));
        let (mut stream, mut whole) = (stream.await.unwrap(), Vec::new());
        let seen = loop {
            if whole.len() >= 30 && spooled(capture.pid()) > 0 {
                break true;
            }
            match stream.next().await {
                Some(event) => {
                    if let hotcell_client::Event::Delta(delta) = event.unwrap() {
                        whole.extend(delta.token_ids);
                    }
                }
                None => break false,
            }
        };
        if seen {
            break (capture, file, whole, stream);
        }
        assert!(capture.wait().unwrap().success(), "{}", capture.log());
    };
    let seen = spooled(capture.pid());
    let pid = client.workers().await.unwrap()[0].pid;
    signal_pid(pid, Signal::KILL).unwrap();
    assert!(capture.wait().unwrap().success(), "{}", capture.log());
    let said = result(&file);
    assert!(said.contains("it broke off, and these are kept"), "{said}");
    assert!(said.contains("w0 died"), "{said}");
    let kept = Recording::read(&file).unwrap();
    let values = kept.tokens.iter().flat_map(|token| &token.nodes);
    let values: usize = values.map(|row| row.data.len()).sum();
    assert!(
        values as u64 >= seen && kept.end.is_none(),
        "{values} of {seen}"
    );
    // The request itself went on, and what was seen is what it drew.
    whole.extend(stream.complete().await.unwrap().token_ids);
    for token in &kept.tokens {
        assert!(token.token.is_some_and(|id| whole.contains(&id)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_capture_stays_within_its_budget_and_says_what_it_left_out() {
    const BUDGET: u64 = 300_000;
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let file = cluster.folder.path().join("small.hotcell");
    let budget = BUDGET.to_string();
    let arguments = [
        "--json",
        "debug",
        "capture",
        "small",
        "--values",
        "all",
        "-n",
        "20",
        "--max-bytes",
        &budget,
        "-o",
    ];
    let mut command = hotcell(cluster.folder.path()).unwrap();
    let address = format!("unix:{}", cluster.socket.display());
    let command = command
        .args(["--address", &address])
        .args(arguments)
        .arg(&file);
    let capture = command
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let waits = async {
        // Nothing says in JSON that it looks now: requests of its id come until one is seen.
        while !file.exists() {
            let stream = client
                .generate("In the beginning", beyond("small", 400))
                .await;
            if let Ok(stream) = stream {
                let _ = stream.complete().await;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(SOON * 2, waits).await.unwrap();
    let output = tokio::task::block_in_place(|| capture.wait_with_output()).unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let told: Value = serde_json::from_str(said.lines().last().unwrap()).unwrap();
    let kept = Recording::read(&file).unwrap();
    let rows = || kept.tokens.iter().flat_map(|token| &token.nodes);
    let bytes: u64 = rows().map(|row| row.data.len() as u64).sum();
    assert!(bytes > BUDGET / 2 && bytes <= BUDGET, "{bytes}");
    let size = |node: &v1::CapturedNode| 4 * node.dims.iter().product::<u64>();
    let of_token: u64 = kept.head.nodes.iter().map(size).sum();
    // Rows that tell the prompt are withheld, and are no loss.
    let left_out = told["left_out_bytes"].as_u64().unwrap();
    let all = of_token * kept.tokens.len() as u64;
    assert!(
        left_out > all / 2 && bytes + left_out <= all,
        "{left_out} of {all}: {told}"
    );
    let without = rows().filter(|row| row.data.is_empty() && !row.hash.is_empty());
    assert_eq!(told["left_out"].as_u64().unwrap(), without.count() as u64);
    assert!(rows().all(|row| row.hash.is_empty() || row.rms >= 0.0));
}

/// The most memory that a process had, as far as it was seen, until it ended.
fn most_until_it_ends(pid: u32) -> u64 {
    let mut most = 0;
    // Of one that ended there is no line.
    while let Ok(now) = most_resident(pid) {
        most = most.max(now);
        std::thread::sleep(Duration::from_millis(2));
    }
    most
}

#[tokio::test(flavor = "multi_thread")]
async fn values_go_to_the_disk_as_they_come() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let file = cluster.folder.path().join("large.hotcell");
    // What is reserved for a capture of nothing, to compare with.
    let mut sizes = Vec::new();
    for (id, values) in [("none", "0"), ("large", "all")] {
        let arguments = [
            id,
            "--values",
            values,
            "--max-bytes",
            "4294967296",
            "--reveal",
        ];
        let mut capture = capturing(&cluster, &arguments, &file, "waiting").await;
        let pid = capture.pid();
        let most = std::thread::spawn(move || most_until_it_ends(pid));
        let stream = client.generate("In the beginning", beyond(id, 900)).await;
        stream.unwrap().complete().await.unwrap();
        assert!(capture.wait().unwrap().success(), "{}", capture.log());
        sizes.push((
            most.join().unwrap(),
            std::fs::metadata(&file).unwrap().len(),
        ));
    }
    let [(none, small), (all, large)] = sizes[..] else {
        panic!("{sizes:?}");
    };
    let values = large - small;
    assert!(values > 24 << 20, "{sizes:?}");
    assert!(all < none + values / 2, "{sizes:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_request_that_meets_a_condition_is_captured() {
    let cluster = super::fault_cluster().await;
    let client = cluster.client().await.unwrap();
    let file = cluster.folder.path().join("met.hotcell");
    let arguments = [
        "--when",
        "nan",
        "--when",
        "above=1e30",
        "-n",
        "1",
        "--reveal",
    ];
    let mut capture = capturing(&cluster, &arguments, &file, "looking at").await;
    // One that meets none is passed.
    let healthy = client
        .generate("In the beginning", beyond("healthy", 20))
        .await;
    healthy.unwrap().complete().await.unwrap();
    let prompt = Prompt::Ids(vec![0, 312, NAN_TOKEN, 17]);
    // It may fail, since its logits are no numbers.
    if let Ok(stream) = client.generate(prompt, beyond("struck", 8)).await {
        let _ = stream.complete().await;
    }
    assert!(capture.wait().unwrap().success(), "{}", capture.log());
    let said = result(&file);
    assert!(
        said.contains("nan at layers.1.mul_mat.") && said.contains(NAN_NODE),
        "{said}"
    );
    let met = Recording::read(&file).unwrap();
    assert_eq!(met.tokens.len(), 1);
    let first = met.head.nodes.iter().zip(&met.tokens[0].nodes);
    let prompt = met
        .head
        .request
        .as_ref()
        .and_then(|request| request.prompt.as_ref());
    assert!(prompt.is_some() && first.count() > 50);
}

/// A model whose nodes' values are large: of a step's 128 rows they are more than a worker keeps.
const LARGE: Measures = Measures {
    hidden: 64,
    layers: 2,
    heads: 2,
    kv_heads: 2,
    inner: 1 << 17,
    vocab: 4096,
    context: 512,
    tied: true,
};

#[tokio::test(flavor = "multi_thread")]
async fn all_nodes_of_a_large_model_are_looked_at_in_smaller_steps() {
    let folder = tempfile::tempdir().unwrap();
    synthetic::write(folder.path(), &LARGE).unwrap();
    let cluster = Cluster::with_model("large", folder.path(), &["--devices", "cpu:1"]).await;
    let cluster = cluster.unwrap();
    cluster.workers(all_have("large")).await.unwrap();
    let client = cluster.client().await.unwrap();
    let prompt = || Prompt::Ids((0..120).map(|n| 300 + n * 7 % 3000).collect());
    let told = client.capture(of("large", None)).await.unwrap();
    let capture = tokio::spawn(put_together(told));
    let pieces = client.trace(v1::TraceRequest {
        steps: 3,
        ..v1::TraceRequest::default()
    });
    let mut pieces = pieces.await.unwrap();
    pieces.next().await.unwrap().unwrap();
    let stream = client.generate(prompt(), beyond("large", 3)).await;
    let drawn = stream.unwrap().complete().await.unwrap().token_ids;
    // After it: what it has read of its prompt nobody reads again.
    let undisturbed = client.generate(prompt(), beyond("after", 3)).await;
    let expected = undisturbed.unwrap().complete().await.unwrap().token_ids;
    assert_eq!(drawn, expected);
    let seen = capture.await.unwrap().unwrap();
    let size = |node: &v1::CapturedNode| 4 * node.dims.iter().product::<u64>();
    let row: u64 = seen.head.nodes.iter().map(size).sum();
    assert!(
        row * 128 > limits::MAX_TAP_BYTES as u64,
        "{row} bytes a row"
    );
    assert!(!seen.tokens.is_empty());
    let mut rows = Vec::new();
    while let Some(piece) = pieces.next().await {
        if let Some(trace_piece::Kind::Spans(some)) = piece.unwrap().kind {
            let steps = some
                .spans
                .into_iter()
                .filter(|s| s.track() == TraceTrack::Steps);
            rows.extend(steps.map(|step| u64::from(step.rows)));
        }
    }
    let most = limits::MAX_TAP_BYTES as u64 / row;
    assert!(
        rows.iter().all(|rows| *rows <= most + 2),
        "{rows:?}, {most}"
    );
    assert!(rows[0] + rows[1] >= 120, "{rows:?}");
}

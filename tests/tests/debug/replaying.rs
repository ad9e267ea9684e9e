//! Capturing and replaying: what was computed for a request comes again, bit by bit, in a throw-away worker; and where it
//! does not, the first node is named.

use std::{path::Path, time::Duration};

use hotcell_client::{
    Client, GenerateOptions, Prompt, Reason,
    debug::compare,
    v1::{self, replay_request},
};
use hotcell_tests::{
    cluster::{Cluster, SOON},
    debugged::{again, of, put_together},
    fault::{NAN_NODE, NAN_TOKEN, WRONG_NODE, WRONG_TOKEN},
};

use super::{hotcell, kjv_cluster, long};

fn all_nodes(tokens: u64) -> Option<v1::CaptureOptions> {
    Some(v1::CaptureOptions {
        tokens,
        reveal: true,
        ..v1::CaptureOptions::default()
    })
}

fn sampled(seed: u64) -> GenerateOptions {
    GenerateOptions {
        sampling: v1::Sampling {
            temperature: Some(0.9),
            top_p: Some(0.95),
            repetition_penalty: Some(1.1),
            ..v1::Sampling::default()
        },
        seed: Some(seed),
        max_tokens: 24,
        ignore_eos: true,
        request_id: format!("r{seed}"),
        deadline: Some(SOON),
        ..GenerateOptions::default()
    }
}

#[tokio::test]
async fn what_a_batch_computed_comes_again_bit_by_bit_in_a_throw_away_worker() {
    const REQUESTS: u64 = 8;
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let mut captures = Vec::new();
    for seed in 0..REQUESTS {
        let told = client.capture(of(&format!("r{seed}"), all_nodes(0))).await;
        captures.push(tokio::spawn(put_together(told.unwrap())));
    }
    let prompts = [
        "In the beginning",
        "And God said",
        "The LORD is my shepherd; I shall not want",
    ];
    let mut streams = Vec::new();
    for seed in 0..REQUESTS {
        let prompt = prompts[seed as usize % prompts.len()];
        let stream = client.generate(prompt, sampled(seed)).await.unwrap();
        streams.push(tokio::spawn(stream.complete()));
    }
    for (capture, stream) in captures.into_iter().zip(streams) {
        let tokens = stream.await.unwrap().unwrap().token_ids;
        let seen = capture.await.unwrap().unwrap();
        assert!(!seen.tokens.is_empty() && seen.end.is_some());
        for token in &seen.tokens {
            assert_eq!(token.token, Some(tokens[token.index as usize]));
            assert!(token.nodes.iter().all(|row| row.nan == 0 && row.rms >= 0.0));
        }
        let names: Vec<&str> = seen.head.nodes.iter().map(|n| n.name.as_str()).collect();
        assert!(names.contains(&"layers.4.mul_mat.6") && names.last() == Some(&"logits"));
        let told = client
            .replay(again(&seen, all_nodes(0)).unwrap())
            .await
            .unwrap();
        let replayed = put_together(told).await.unwrap();
        assert!(
            replayed.head.worker.starts_with("w0.replay"),
            "{}",
            replayed.head.worker
        );
        let compared = compare(&replayed, &seen);
        assert_eq!(compared.first, None);
        assert_eq!(compared.tokens, seen.tokens.len());
        assert_eq!(compared.rows, seen.tokens.len() * names.len());
    }
    let gone = cluster.workers(|all| all.len() == 1).await.unwrap();
    assert_eq!((gone[0].id.as_str(), gone[0].deaths), ("w0", 0));
}

#[tokio::test]
async fn a_request_runs_again_by_its_id_from_any_token() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let stream = client.generate("And God said", sampled(7)).await.unwrap();
    let tokens = stream.complete().await.unwrap().token_ids;
    for at in [0, 5, 23] {
        let request = v1::ReplayRequest {
            which: Some(replay_request::Which::RequestId("r7".to_owned())),
            at,
            options: all_nodes(0),
            ..v1::ReplayRequest::default()
        };
        let replayed = put_together(client.replay(request).await.unwrap())
            .await
            .unwrap();
        let ids: Vec<u32> = replayed.tokens.iter().filter_map(|t| t.token).collect();
        assert_eq!(ids, tokens[at as usize..]);
        let end = replayed.end.unwrap();
        assert_eq!((end.as_expected, end.differs_at), (24 - at, None));
    }
    let said = hotcell(
        &cluster,
        &[
            "debug",
            "replay",
            "r7",
            "--at",
            "20",
            "--until",
            "layers.0.mul_mat.0",
        ],
    );
    assert!(
        said.contains("token 20") && said.contains("layers.0.mul_mat.0 (model.layers.0"),
        "{said}"
    );
    assert!(
        !said.contains("layers.1.") && said.contains("same tokens: 4 of 4"),
        "{said}"
    );
    for (which, reason) in [
        ("r8", Reason::RequestNotFound),
        ("no/id", Reason::InvalidArgument),
    ] {
        let request = v1::ReplayRequest {
            which: Some(replay_request::Which::RequestId(which.to_owned())),
            ..v1::ReplayRequest::default()
        };
        assert_eq!(client.replay(request).await.unwrap_err().reason(), reason);
    }
}

#[tokio::test]
async fn a_request_runs_again_by_its_crash_report_and_on_a_backend() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let beyond = GenerateOptions {
        max_tokens: 200,
        ..sampled(11)
    };
    let mut stream = client.generate("And God said", beyond).await.unwrap();
    let mut drawn = 0;
    while drawn < 5 {
        if let hotcell_client::Event::Delta(delta) = stream.next().await.unwrap().unwrap() {
            drawn += delta.token_ids.len();
        }
    }
    let pid = client.workers().await.unwrap()[0].pid;
    hotcell_tests::cluster::signal_pid(pid, rustix::process::Signal::KILL).unwrap();
    let rest = stream.complete().await.unwrap().token_ids;
    assert_eq!(drawn + rest.len(), 200);
    let report = client.crashes().await.unwrap().pop().unwrap().id;
    let replay = ["debug", "replay", &report, "--backend", "cpu"];
    let said = hotcell(&cluster, &replay);
    assert!(said.contains("same tokens: 200 of 200"), "{said}");
    for (arguments, words) in [
        (
            ["debug", "replay", "r11", "--backend", "mlx"],
            "there are devices of cpu",
        ),
        (["debug", "replay", "w0.99", "--backend", "cpu"], "w0.99"),
    ] {
        let output = cluster.hotcell(&arguments).unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(words), "{said}");
    }
}

#[tokio::test]
async fn prompts_are_told_only_if_asked_for_and_values_within_their_budget() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let options = v1::CaptureOptions {
        layers: vec![3],
        tokens: 2,
        values: u32::MAX,
        max_bytes: 20_000,
        ..v1::CaptureOptions::default()
    };
    let told = client.capture(of("hidden", Some(options))).await.unwrap();
    let stream = client
        .generate("In the beginning", long("hidden"))
        .await
        .unwrap();
    let seen = put_together(told).await.unwrap();
    stream.cancel().await;
    let request = seen.head.request.as_ref().unwrap();
    assert!(request.prompt.is_none() && request.resume.is_none() && !seen.head.revealed);
    assert!(seen.tokens.iter().all(|token| token.token.is_none()));
    assert_eq!(seen.tokens.len(), 2);
    let (logits, nodes) = seen.head.nodes.split_last().unwrap();
    assert_eq!(logits.dims, [4096]);
    assert!(nodes.iter().all(|node| node.layer == Some(3)));
    let rows = seen.tokens.iter().flat_map(|token| &token.nodes);
    let kept: usize = rows.clone().map(|row| row.data.len()).sum();
    let end = seen.end.unwrap();
    assert!(kept <= 20_000 && end.left_out > 0, "{kept} {end:?}");
    let all: u64 = seen
        .head
        .nodes
        .iter()
        .map(|n| 4 * n.dims.iter().product::<u64>())
        .sum();
    assert_eq!(kept as u64 + end.left_out_bytes, 2 * all);
    for options in [
        v1::CaptureOptions {
            nodes: vec!["nothing-like-it".into()],
            ..v1::CaptureOptions::default()
        },
        v1::CaptureOptions {
            max_bytes: u64::MAX,
            ..v1::CaptureOptions::default()
        },
        v1::CaptureOptions {
            nodes: vec!["x".into(); 65],
            ..v1::CaptureOptions::default()
        },
    ] {
        let error = client.capture(of("r", Some(options))).await.unwrap_err();
        let wanted = [Reason::InvalidArgument, Reason::LimitExceeded];
        assert!(wanted.contains(&error.reason()), "{error}");
    }
}

/// A capture of a prompt that ends with this token, written to a file by the command.
async fn captured(cluster: &Cluster, token: u32, file: &Path) {
    let client = cluster.client().await.unwrap();
    let arguments = [
        "debug",
        "capture",
        "looked-at",
        "-n",
        "1",
        "--values",
        "all",
        "--reveal",
        "-o",
    ];
    let capture = tokio::task::block_in_place(|| {
        let mut command = hotcell_tests::cluster::hotcell(cluster.folder.path()).unwrap();
        let address = format!("unix:{}", cluster.socket.display());
        let command = command.arg("--address").arg(address).args(arguments);
        hotcell_tests::cluster::Process::start(command.arg(file)).unwrap()
    });
    // It says so once it looks.
    let start = std::time::Instant::now();
    while !capture.log().contains("waiting") {
        assert!(start.elapsed() < SOON, "{}", capture.log());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    ask(&client, token).await;
    let mut capture = capture;
    assert!(capture.wait().unwrap().success(), "{}", capture.log());
}

async fn ask(client: &Client, token: u32) {
    let options = GenerateOptions {
        max_tokens: 1,
        ..long("looked-at")
    };
    let prompt = Prompt::Ids(vec![0, 312, 17, token]);
    // One whose logits are no numbers fails; what was computed is seen nevertheless.
    if let Ok(stream) = client.generate(prompt, options).await {
        let _ = stream.complete().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_planted_nan_and_a_kernel_a_thousandth_off_are_found_by_name() {
    let healthy = kjv_cluster(&["--devices", "cpu:1"]).await;
    for (token, weight, layer) in [
        (WRONG_TOKEN, WRONG_NODE, "layers.2."),
        (NAN_TOKEN, NAN_NODE, "layers.1."),
    ] {
        let faulty = super::fault_cluster().await;
        let file = faulty.folder.path().join("bad.hotcell");
        captured(&faulty, token, &file).await;
        let path = file.to_str().unwrap();
        // Where it went wrong it comes again.
        let same = hotcell(&faulty, &["debug", "replay", path]);
        assert!(same.contains("same bits"), "{same}");
        let output = healthy
            .hotcell(&["--json", "debug", "replay", path])
            .unwrap();
        assert_eq!(output.status.code(), Some(9), "{output:?}");
        let lines = String::from_utf8(output.stdout).unwrap();
        let all: Vec<serde_json::Value> = lines
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        let compared = &all[all.len() - 2]["compared"];
        assert_eq!(compared["equal"], false);
        assert_eq!(compared["first"]["now"]["weight"], weight, "{compared}");
        let node = all[all.len() - 1]["error"]["metadata"]["node"]
            .as_str()
            .unwrap();
        assert!(node.starts_with(layer), "{node}");
        let before = &compared["first"]["before"];
        match token {
            NAN_TOKEN => assert_eq!(before["nan"], 256),
            _ => {
                let apart = compared["first"]["likeness"]["max_rel"].as_f64().unwrap();
                assert!((9e-4..1.1e-3).contains(&apart), "{apart}");
            }
        }
    }
}

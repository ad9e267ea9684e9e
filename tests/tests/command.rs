//! The `hotcell` command as a newcomer uses it.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use hotcell_proto::{receipt, v1};
use hotcell_tests::cluster::{Cluster, hotcell, kjv};

#[tokio::test]
async fn run_needs_nothing_and_prints_text() {
    let folder = tempfile::TempDir::new().unwrap();
    let output = hotcell(folder.path())
        .unwrap()
        .args(["run", "In the beginning", "--max-tokens", "24"])
        .output()
        .unwrap();
    let (out, err) = (
        String::from_utf8(output.stdout).unwrap(),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{err}");
    let words = out.split_whitespace().count();
    assert!(words >= 8, "{out:?} {err}");
    assert!(out.is_ascii(), "{out:?}");
}

#[tokio::test]
async fn a_copied_binary_still_has_its_model() {
    let folder = tempfile::TempDir::new().unwrap();
    let from = hotcell_tests::cluster::binaries().unwrap();
    for name in ["hotcell", "hotcell-scheduler", "hotcell-worker"] {
        std::fs::copy(from.join(name), folder.path().join(name)).unwrap();
    }
    let mut command = std::process::Command::new(folder.path().join("hotcell"));
    command
        .env_clear()
        .env("XDG_RUNTIME_DIR", folder.path())
        .env("XDG_CONFIG_HOME", folder.path().join("config"));
    let output = command
        .args(["run", "And God said", "--max-tokens", "8"])
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(!output.stdout.is_empty());
}

#[tokio::test]
async fn every_list_has_json() {
    let cluster = Cluster::with_model("kjv", &kjv(), &[]).await.unwrap();
    for command in ["ps", "devices", "models"] {
        let output = cluster.hotcell(&["--json", command]).unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(!value.is_null(), "{command}");
        let table = cluster.hotcell(&[command]).unwrap();
        assert!(
            !table.stdout.is_empty() && !table.stdout.contains(&0x1b),
            "{command} colours a pipe"
        );
    }
    let output = cluster
        .hotcell(&["--json", "generate", "And God said", "--max-tokens", "4"])
        .unwrap();
    let lines: Vec<serde_json::Value> = output
        .stdout
        .split(|b| *b == b'\n')
        .filter(|l| !l.is_empty())
        .map(|l| serde_json::from_slice(l).unwrap())
        .collect();
    assert!(lines.len() >= 6, "{lines:?}");
}

/// A receipt's file with one more change, so that it is what somebody else's run might have given.
fn forged(text: &str, index: usize, token: u32) -> String {
    let mut record: serde_json::Value = serde_json::from_str(text).unwrap();
    record["answer"]["token_ids"][index] = token.into();
    let ids: Vec<u32> = serde_json::from_value(record["answer"]["token_ids"].clone()).unwrap();
    let mut output = receipt::Output::new(&ids, 0);
    output.push(&[], record["answer"]["text"].as_str().unwrap());
    let (hash, _) = output.finish(v1::FinishReason::MaxTokens, "");
    record["receipt"]["output_hash"] = receipt::hex(&hash).into();
    record.to_string()
}

#[tokio::test]
async fn a_receipt_is_verified_by_running_the_request_again() {
    let cluster = Cluster::with_model("kjv", &kjv(), &[]).await.unwrap();
    let file = cluster.folder.path().join("answer.json");
    let path = file.to_str().unwrap();
    let sampling = ["--temperature", "0.9", "--top-p", "0.95", "-n", "16"];
    let generate = [
        &["generate", "And God said", "--receipt", path][..],
        &sampling,
    ]
    .concat();
    // Of a request that fails there is none; what was in the file stays.
    let fails = [
        "generate",
        "And God said",
        "--model",
        "nobody",
        "--receipt",
        path,
    ];
    assert_ne!(cluster.hotcell(&fails).unwrap().status.code(), Some(0));
    assert!(!file.exists());
    std::fs::write(&file, "something else").unwrap();
    assert_ne!(cluster.hotcell(&fails).unwrap().status.code(), Some(0));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "something else");
    let verify = |cluster: &Cluster| {
        let output = cluster.hotcell(&["verify", path]).unwrap();
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8(text).unwrap();
        (output.status.code().unwrap(), text)
    };
    assert!(cluster.hotcell(&generate).unwrap().status.success());
    let (code, words) = verify(&cluster);
    assert_eq!(code, 0, "{words}");
    assert!(words.starts_with("equal: 16 tokens, in cpu/"), "{words}");

    let written = std::fs::read_to_string(&file).unwrap();
    let record: serde_json::Value = serde_json::from_str(&written).unwrap();
    let right = record["answer"]["token_ids"][5].as_u64().unwrap() as u32;
    let other = right ^ 1;
    std::fs::write(&file, forged(&written, 5, other)).unwrap();
    let (code, words) = verify(&cluster);
    assert_eq!(code, 9, "{words}");
    let expected = format!("token 5 differs: the receipt has {other}, now it is {right}");
    assert!(words.contains(&expected), "{words}");

    std::fs::write(&file, written.replacen("\"branch\":0", "\"branch\":1", 1)).unwrap();
    let (code, words) = verify(&cluster);
    assert_eq!(code, 5, "{words}");
    assert!(words.contains("not as it was written"), "{words}");

    std::fs::write(&file, &written).unwrap();
    let elsewhere = Cluster::with_model("kjv", &kjv(), &["--kv-cache", "f32"])
        .await
        .unwrap();
    let (code, words) = verify(&elsewhere);
    assert_eq!(code, 9, "{words}");
    assert!(words.contains("numerics class"), "{words}");
}

//! The `hotcell` command as a newcomer uses it.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

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

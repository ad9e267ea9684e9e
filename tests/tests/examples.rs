//! The client's examples do what they say.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::process::Command;

use hotcell_client::v1;
use hotcell_tests::cluster::{Cluster, examples};

#[tokio::test]
async fn the_examples_run_to_their_ends() {
    let folder = examples().unwrap();
    let cluster = Cluster::start(&["--devices", "cpu:2"]).await.unwrap();
    let ready = |workers: &[v1::WorkerInfo]| {
        workers.len() == 2 && workers.iter().all(|w| w.state() == v1::WorkerState::Ready)
    };
    cluster.workers(ready).await.unwrap();
    let run = |name: &str| {
        let output = Command::new(folder.join(name))
            .env(
                "HOTCELL_ADDRESS",
                format!("unix:{}", cluster.socket.display()),
            )
            .output()
            .unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{name}: {said}{error}");
        said
    };
    // [[0, 1, 2], [3, 4, 5]] @ [[1, 0], [0, 1], [1, 1]] by hand.
    let said = run("remote_matmul");
    let product = "[[ 2.0000,  3.0000],\n [ 8.0000,  9.0000]]";
    assert!(
        said.contains(product) && said.contains("sum of all: 22"),
        "{said}"
    );

    let said = run("convnet");
    let scores = said.lines().map(|line| {
        let (_, score) = line.split_once(": ").unwrap();
        score.parse::<f64>().unwrap()
    });
    let scores: Vec<f64> = scores.collect();
    assert_eq!(scores.len(), 10, "{said}");
    assert!((scores.iter().sum::<f64>() - 1.0).abs() < 1e-3, "{said}");

    let said = run("attention");
    assert!(said.contains("1000 calls, "), "{said}");
    let last = said.lines().last().unwrap().rsplit(' ').next().unwrap();
    assert!(last.parse::<f64>().unwrap() > 0.0, "{said}");

    // Twice: the second one takes the first one's place.
    for _ in 0..2 {
        let said = run("saved_function");
        assert!(
            said.starts_with("layer: ") && said.ends_with(" bytes, 64 rows at most\n"),
            "{said}"
        );
    }

    let said = run("compare_workers");
    assert!(said.ends_with("w0 and w1 agree\n"), "{said}");
    assert!(
        said.contains("probabilities on w1: cosine 1.000000"),
        "{said}"
    );
}

//! Looking into a worker that serves, through the real binaries.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod aside;
mod capturing;
mod comparing;
mod conditions;
mod confined;
mod crashing;
mod draining;
mod dtypes;
mod guarding;
mod guards;
mod holding;
mod logits;
mod memory;
mod page;
mod places;
mod prompting;
mod proving;
mod reduced;
mod reducing;
mod replaying;
mod restarting;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../terminal/screen.rs"]
mod screen;
mod tracing;
mod unread;
mod watching;

use hotcell_client::GenerateOptions;
use hotcell_tests::cluster::{Cluster, all_have, kjv};

async fn kjv_cluster(arguments: &[&str]) -> Cluster {
    let cluster = Cluster::with_model("kjv", &kjv(), arguments).await.unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    cluster
}

/// A host of one worker that does what tests ask of it: wrong numbers, crashes.
async fn fault_cluster() -> Cluster {
    kjv_cluster(&["--worker-binary", comparing::FAULTY, "--devices", "cpu:1"]).await
}

fn long(id: &str) -> GenerateOptions {
    GenerateOptions {
        max_tokens: 400,
        ignore_eos: true,
        request_id: id.to_owned(),
        ..GenerateOptions::default()
    }
}

/// Standard output of the command, which must succeed.
fn hotcell(cluster: &Cluster, arguments: &[&str]) -> String {
    let output = cluster.hotcell(arguments).unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

//! Crash replay: the request that killed a worker kills a throw-away worker the same way, and the node is told.

use hotcell_client::{GenerateOptions, Prompt};
use hotcell_tests::{
    cluster::{Cluster, SOON, all_have, kjv},
    fault::POISON,
};

use super::{hotcell, long};

#[tokio::test]
async fn a_request_that_kills_its_workers_does_so_again_and_harms_nobody_else() {
    let arguments = [
        "--worker-binary",
        env!("CARGO_BIN_EXE_hotcell-worker-fault"),
        "--devices",
        "cpu:1",
    ];
    let cluster = Cluster::with_model("kjv", &kjv(), &arguments)
        .await
        .unwrap();
    cluster.workers(all_have("kjv")).await.unwrap();
    let client = cluster.client().await.unwrap();
    let prompt = Prompt::Ids([&[0, 312][..], &POISON].concat());
    let options = GenerateOptions {
        deadline: Some(SOON * 2),
        ..long("poison")
    };
    let stream = client.generate(prompt, options).await.unwrap();
    stream.complete().await.unwrap_err();
    cluster.workers(all_have("kjv")).await.unwrap();
    let deaths = cluster.workers(|_| true).await.unwrap()[0].deaths;

    let crash = client.crashes().await.unwrap().pop().unwrap();
    let said = hotcell(&cluster, &["--json", "crashes", "replay", &crash.id]);
    let outcome: serde_json::Value = serde_json::from_str(said.lines().next().unwrap()).unwrap();
    assert_eq!(outcome["request_id"], "poison", "{said}");
    assert_eq!(outcome["outcome"], "died", "{said}");
    assert_eq!(outcome["same"], true, "{said}");
    let worker = outcome["crash"]["worker"].as_str().unwrap();
    assert!(worker.starts_with("w0.replay"), "{said}");
    let said = hotcell(&cluster, &["crashes", "replay", &crash.id]);
    assert!(
        said.contains("died the same way: killed by SIGSEGV"),
        "{said}"
    );
    let after = cluster.workers(|_| true).await.unwrap();
    assert_eq!(after.iter().find(|w| w.id == "w0").unwrap().deaths, deaths);
}

//! Another process in a worker's place: streams go on there with the very tokens, and nothing has died.

use hotcell_client::{GenerateOptions, Reason};
use hotcell_tests::cluster::SOON;

use super::{hotcell, kjv_cluster, long};

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_is_restarted_under_a_stream_that_does_not_notice() {
    let cluster = kjv_cluster(&["--devices", "cpu:1"]).await;
    let client = cluster.client().await.unwrap();
    let options = |id: &str| GenerateOptions {
        max_tokens: 150,
        deadline: Some(SOON),
        ..long(id)
    };
    let calm = client
        .generate("And God said", options("calm"))
        .await
        .unwrap();
    let expected = calm.complete().await.unwrap().token_ids;
    let before = cluster.workers(|_| true).await.unwrap();
    let mut stream = client
        .generate("And God said", options("moved"))
        .await
        .unwrap();
    stream.next().await.unwrap().unwrap();
    assert_eq!(hotcell(&cluster, &["restart", "w0"]), "restarted w0\n");
    let moved = stream.complete().await.unwrap();
    assert_eq!(
        moved.token_ids[moved.token_ids.len() - 100..],
        expected[50..]
    );
    let after = cluster
        .workers(|all| all[0].epoch == before[0].epoch + 1 && all[0].models == ["kjv"])
        .await
        .unwrap();
    assert_ne!(after[0].pid, before[0].pid);
    assert_eq!(after[0].deaths, 0);
    assert!(client.crashes().await.unwrap().is_empty());
    let unknown = client.restart("w7").await.unwrap_err();
    assert_eq!(unknown.reason(), Reason::NoWorker);
}

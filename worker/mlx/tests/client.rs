//! What the client promises of tensors, with a worker linked with MLX behind a scheduler: the workspace's own tests of it, compiled
//! here once more.

#[path = "../../../tests/tests/tensor_functions.rs"]
mod functions;
#[path = "../../../tests/tests/tensor_lifetimes.rs"]
mod lifetimes;
#[path = "../../../tests/tests/tensor_pitfalls.rs"]
mod pitfalls;

/// Or all of the above would test another one.
#[tokio::test]
async fn the_worker_that_is_tested_is_linked_with_mlx() -> Result<(), Box<dyn std::error::Error>> {
    const WORKER: &[&str] = hotcell_tests::worker_tested!();
    let cluster = hotcell_tests::cluster::Cluster::ready_with(WORKER).await?;
    let devices = cluster.client().await?.devices().await?;
    let ids: Vec<&str> = devices.iter().map(|d| d.id.as_str()).collect();
    assert_eq!(ids, ["mlx:0"]);
    Ok(())
}

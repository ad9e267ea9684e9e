//! A short chaotic run; `cargo bench -p hotcell-tests --bench chaos` is the long one.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{path::PathBuf, time::Duration};

use hotcell_tests::chaos::{Plan, run};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_stream_ends_exact_or_with_a_status_that_a_fault_justifies() {
    let plan = Plan {
        worker: PathBuf::from(env!("CARGO_BIN_EXE_hotcell-worker-fault")),
        time: Duration::from_secs(6),
        every: Duration::from_millis(200),
        streams: 8,
        seed: 11,
    };
    let outcome = run(plan).await.unwrap();
    assert!(outcome.wrongs.is_empty(), "{outcome:#?}");
    assert_eq!(outcome.exact + outcome.justified, outcome.streams);
    assert_eq!((outcome.lost, outcome.duplicated, outcome.hung), (0, 0, 0));
    // Some of the streams' connections are gone in the end.
    assert!(outcome.descriptor_growth <= 0, "{outcome:#?}");
    assert!(
        outcome.continuations > 0,
        "nothing was broken: {outcome:#?}"
    );
}

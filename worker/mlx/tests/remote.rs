//! The op catalogue's conformance cases and ONNX's node tests on a worker linked with MLX, through a scheduler and gRPC.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::path::Path;

use hotcell_tests::{
    cluster::repository,
    conformance::{Executor, Remote, cases},
    listed::Tally,
    onnx::{
        case::{Case, archive},
        run::check,
    },
};

/// Cases of ONNX that no backend does, and those that MLX does not do besides: never more than before.
const ONNX_SKIPPED: usize = 274;

/// A scheduler whose only worker is ours.
fn remote() -> Remote {
    let remote = Remote::start_with(&["--worker-binary", env!("CARGO_BIN_EXE_hotcell-worker-mlx")]);
    let remote = remote.unwrap();
    assert_eq!(remote.devices().unwrap(), ["mlx:0"]);
    remote
}

fn list(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests")
        .join(name)
}

#[test]
fn every_case_of_the_catalogue_passes_over_grpc() {
    let mut remote = remote();
    let mut tally = Tally::read(&[], "").unwrap();
    for case in cases().unwrap() {
        let ended = case.check(&mut remote);
        tally.note(&case.to_string(), ended);
    }
    let passed = tally.end().unwrap();
    println!("{passed} cases of the catalogue passed");
    assert!(passed > 10_000, "{passed}");
    remote.check_empty().unwrap();
}

#[test]
fn single_op_cases_of_onnx_pass_over_grpc_unless_listed() {
    let mut remote = remote();
    let everywhere = repository().join("tests/onnx/skipped.txt");
    let mut tally = Tally::read(&[&everywhere, &list("onnx_skipped.txt")], ": ").unwrap();
    assert!(tally.listed() <= ONNX_SKIPPED);
    for archived in archive().unwrap() {
        let executor: &mut dyn Executor = &mut remote;
        let ended = Case::read(&archived).and_then(|case| check(&case, executor));
        tally.note(&archived.name, ended);
    }
    let passed = tally.end().unwrap();
    println!("{passed} of ONNX's single-op cases passed");
    assert!(passed > 1000, "{passed}");
    remote.check_empty().unwrap();
}

//! The op catalogue's conformance cases and ONNX's node tests on MLX, in this process.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::collections::BTreeMap;

use hotcell_kernels::{backend::Backend, mlx::MlxBackend};
use hotcell_tests::{
    conformance::{Local, cases},
    onnx::{
        case::{Case, archive},
        run::check,
    },
};

/// Where cases are listed that need not pass: what it is, `between`, and why; one to a line.
fn listed(file: &str, between: &str) -> BTreeMap<String, String> {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests")
        .join(file);
    let text = std::fs::read_to_string(path).unwrap();
    let lines = text
        .lines()
        .filter(|l| !l.is_empty() && !l.starts_with('#'));
    let pairs = lines.map(|l| l.split_once(between).unwrap());
    pairs
        .map(|(what, why)| (what.to_owned(), why.to_owned()))
        .collect()
}

fn local() -> Local {
    Local::new("mlx", || MlxBackend.open("mlx:0", &[])).unwrap()
}

/// Whether all that failed is listed and all that is listed failed.
fn settle(failed: BTreeMap<String, String>, listed: BTreeMap<String, String>, passed: usize) {
    let mut wrong: Vec<String> = Vec::new();
    for (what, why) in &failed {
        if !listed.contains_key(what) {
            wrong.push(format!("{what}: {why}"));
        }
    }
    for what in listed.keys().filter(|what| !failed.contains_key(*what)) {
        wrong.push(format!("{what}: is listed and passes, or is no case"));
    }
    println!("{passed} passed, {} listed", listed.len());
    assert!(
        wrong.is_empty(),
        "{} cases:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

#[test]
fn every_case_of_the_catalogue_passes_unless_listed() {
    let mut local = local();
    let (mut passed, mut failed) = (0, BTreeMap::new());
    for case in cases().unwrap() {
        match case.check(&mut local) {
            Ok(_) => passed += 1,
            Err(error) => {
                failed.insert(case.to_string(), format!("{error:#}"));
            }
        }
    }
    assert!(passed > 1000, "{passed} cases");
    settle(failed, listed("skipped.txt", " :: "), passed);
}

#[test]
fn single_op_cases_of_onnx_pass_unless_listed() {
    let mut local = local();
    // Those that no backend passes stand in the repository's own list, with reasons.
    let mut elsewhere = listed("../../../tests/onnx/skipped.txt", ": ");
    elsewhere.extend(listed("onnx_skipped.txt", ": "));
    let (mut passed, mut failed) = (0, BTreeMap::new());
    for archived in archive().unwrap() {
        let result = Case::read(&archived).and_then(|case| check(&case, &mut local));
        match result {
            Ok(()) => passed += 1,
            Err(error) => {
                failed.insert(archived.name.clone(), format!("{error:#}"));
            }
        }
    }
    assert!(passed > 1000, "{passed} cases");
    settle(failed, elsewhere, passed);
}

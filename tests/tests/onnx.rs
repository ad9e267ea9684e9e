//! ONNX's node tests through our ops: in this process, and on a worker over gRPC.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::{collections::BTreeMap, fs, rc::Rc};

use hotcell_kernels::{
    backend::Device,
    cpu::{CpuDevice, path::CpuPath},
};
use hotcell_tests::{
    cluster::repository,
    conformance::Local,
    conformance::{Executor, Remote},
    onnx::{
        case::{Case, archive},
        run::check,
    },
};

/// Cases that pass, of 1,325. Whoever makes one more pass raises it and lowers the other.
const PASSING: usize = 1051;
/// Cases that are listed: never more than before.
const SKIPPED: usize = 274;

/// Names of the cases that need not pass, with why, one to a line: `test_name: reason`.
fn skipped() -> BTreeMap<String, String> {
    let path = repository().join("tests/onnx/skipped.txt");
    let text = fs::read_to_string(path).unwrap();
    let lines = text
        .lines()
        .filter(|l| !l.is_empty() && !l.starts_with('#'));
    let mut found = BTreeMap::new();
    for line in lines {
        let (name, reason) = line.split_once(": ").unwrap();
        assert!(
            !reason.trim().is_empty(),
            "{name} is skipped without a reason"
        );
        let twice = found.insert(name.to_owned(), reason.to_owned());
        assert!(twice.is_none(), "{name} is listed twice");
    }
    found
}

#[test]
fn single_op_cases_pass_in_process_unless_listed() {
    let open = || Ok(Rc::new(CpuDevice::with_path(2, CpuPath::detect())?) as Rc<dyn Device>);
    pass_unless_listed(&mut Local::new("cpu", open).unwrap());
}

#[test]
fn single_op_cases_pass_over_grpc_unless_listed() {
    let mut remote = Remote::start().unwrap();
    pass_unless_listed(&mut remote);
    remote.check_empty().unwrap();
}

fn pass_unless_listed(executor: &mut dyn Executor) {
    let mut skipped = skipped();
    let listed = skipped.len();
    let (mut passed, mut wrong) = (0, Vec::new());
    for archived in archive().unwrap() {
        let name = archived.name.clone();
        let result = Case::read(&archived).and_then(|case| check(&case, executor));
        match (result, skipped.remove(&name)) {
            (Ok(()), None) => passed += 1,
            (Ok(()), Some(_)) => wrong.push(format!("{name}: passes, remove it from skipped.txt")),
            (Err(e), None) => wrong.push(format!("{name}: {e:#}")),
            (Err(_), Some(_)) => {}
        }
    }
    wrong.extend(
        skipped
            .into_keys()
            .map(|n| format!("{n}: listed, but there is no such case")),
    );
    println!("{passed} of ONNX's single-op cases passed");
    assert!(
        wrong.is_empty(),
        "{} cases:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert_eq!((passed, listed), (PASSING, SKIPPED), "passed and listed");
}

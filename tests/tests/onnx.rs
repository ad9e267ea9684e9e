//! ONNX's node tests through our ops: in this process, and on a worker over gRPC.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::rc::Rc;

use hotcell_kernels::{
    backend::Device,
    cpu::{CpuDevice, path::CpuPath},
};
use hotcell_tests::{
    cluster::repository,
    conformance::{Executor, Local, Remote},
    listed::Tally,
    onnx::{
        case::{Case, archive},
        run::check,
    },
};

/// Cases that pass, of 1,325. Whoever makes one more pass raises it and lowers the other.
const PASSING: usize = 1057;
/// Cases that are listed: never more than before.
const SKIPPED: usize = 268;

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
    let list = repository().join("tests/onnx/skipped.txt");
    let mut tally = Tally::read(&[&list], ": ").unwrap();
    let listed = tally.listed();
    for archived in archive().unwrap() {
        let ended = Case::read(&archived).and_then(|case| check(&case, executor));
        tally.note(&archived.name, ended);
    }
    let passed = tally.end().unwrap();
    println!("{passed} of ONNX's single-op cases passed");
    assert_eq!((passed, listed), (PASSING, SKIPPED), "passed and listed");
}

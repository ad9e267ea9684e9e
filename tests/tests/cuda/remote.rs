//! CUDA's worker through a scheduler and gRPC, and ONNX's node tests on CUDA.
//!
//! In this process all cases are run. Over gRPC it is every eighth, and the first of each row: what a kernel gives does not depend
//! on who asked for it, and how values travel is the same for all of a row.

use std::collections::BTreeSet;

use hotcell_tests::{
    cluster::repository,
    conformance::{Executor, Remote},
    fakecuda::{self, FakeDriver},
    listed::Tally,
    onnx::{
        case::{Case, archive},
        run::check,
    },
};

use super::{chosen, is_gpu, local};

/// One in so many is run over gRPC.
const EVERY: usize = 8;

/// A scheduler whose only workers are CUDA's, and what keeps their driver there.
fn remote() -> (Remote, Option<FakeDriver>) {
    let (worker, driver) = if is_gpu() {
        (fakecuda::worker().unwrap(), None)
    } else {
        let (driver, _) = FakeDriver::new("").unwrap().with_kernels().unwrap();
        (driver.worker("hotcell-worker").unwrap(), Some(driver))
    };
    let remote = Remote::start_with(&["--worker-binary", worker.to_str().unwrap()]).unwrap();
    let devices = remote.devices().unwrap();
    let are_ours = devices.iter().all(|device| device.starts_with("cuda:"));
    assert!(are_ours && !devices.is_empty(), "{devices:?}");
    (remote, driver)
}

#[test]
fn cases_give_on_a_worker_over_grpc_what_they_give_here() {
    let (mut remote, _driver) = remote();
    let mut local = local();
    let (mut seen, mut wrong, mut ran) = (BTreeSet::new(), Vec::new(), 0);
    for (n, case) in chosen().iter().enumerate() {
        if !seen.insert(case.op.clone()) && n % EVERY != 0 {
            continue;
        }
        // What is wrong with a value here as well is the other test's.
        let Ok(expected) = case.check(&mut local) else {
            continue;
        };
        ran += 1;
        match case.check(&mut remote) {
            Err(error) => wrong.push(format!("{case}: {error:#}")),
            Ok(outcome) if outcome != expected => {
                wrong.push(format!("{case}: other bits than in process"));
            }
            Ok(_) => {}
        }
    }
    println!("{ran} cases");
    assert!(
        wrong.is_empty(),
        "{} of {ran} cases:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    remote.check_empty().unwrap();
}

/// ONNX's cases that are run on an executor, and pass unless they are listed.
fn onnx(executor: &mut dyn Executor, every: usize) -> usize {
    let list = repository().join("tests/onnx/skipped.txt");
    let mut tally = Tally::read(&[&list], ": ").unwrap();
    for (n, archived) in archive().unwrap().iter().enumerate() {
        if n % every != 0 {
            tally.pass_over(&archived.name);
            continue;
        }
        let ended = Case::read(archived).and_then(|case| check(&case, executor));
        tally.note(&archived.name, ended);
    }
    tally.end().unwrap()
}

#[test]
fn single_op_cases_of_onnx_pass_in_process_unless_listed() {
    let passed = onnx(&mut local(), 1);
    println!("{passed} of ONNX's single-op cases passed");
    assert!(passed > 1000, "{passed}");
}

#[test]
fn single_op_cases_of_onnx_pass_over_grpc_unless_listed() {
    let (mut remote, _driver) = remote();
    let passed = onnx(&mut remote, EVERY);
    println!("{passed} of ONNX's single-op cases passed over gRPC");
    assert!(passed >= 1000 / EVERY, "{passed}");
    remote.check_empty().unwrap();
}

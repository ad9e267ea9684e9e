//! The probe names the cores that this process may use, not others.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

use std::process::Command;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

fn probed() -> Vec<u64> {
    let worker = env!("CARGO_BIN_EXE_hotcell-worker");
    let output = Command::new(worker).arg("probe").output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let cores = report["devices"][0]["cores"].as_array().unwrap();
    cores.iter().map(|core| core.as_u64().unwrap()).collect()
}

#[test]
fn only_the_cores_that_are_allowed_are_probed() {
    let mine = sched_getaffinity(None).unwrap();
    let last = (0..CpuSet::MAX_CPU).rev().find(|&core| mine.is_set(core));
    let last = last.unwrap();
    let mut one = CpuSet::new();
    one.set(last);
    // A child has the affinity of the thread that starts it, which is this test's own.
    sched_setaffinity(None, &one).unwrap();
    assert_eq!(probed(), [last as u64]);
    sched_setaffinity(None, &mine).unwrap();
    let all = probed();
    assert!(
        all.iter().all(|&core| mine.is_set(core as usize)),
        "{all:?}"
    );
    let count = std::thread::available_parallelism().unwrap().get();
    assert_eq!(all.len(), count.min(mine.count() as usize));
}

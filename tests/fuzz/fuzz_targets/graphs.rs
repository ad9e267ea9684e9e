//! `hotcell_tests::fuzz::case`: graphs that are grown, spoilt, planned and run. Bytes are only the number of a case here.

#![no_main]

use hotcell_tests::fuzz::{Runner, case};

std::thread_local! {
    static RUNNER: Runner = Runner::new().expect("a device of this machine");
}

libfuzzer_sys::fuzz_target!(init: drop(std::panic::take_hook()), |data: &[u8]| {
    let seed = data.iter().fold(0u64, |n, &byte| n << 8 | u64::from(byte));
    RUNNER.with(|runner| case(runner, seed));
});

//! `hotcell_tests::fuzz::targets`: graph.

#![no_main]

use hotcell_tests::fuzz::targets::named;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Some(target) = named("graph") {
        (target.run)(data);
    }
});

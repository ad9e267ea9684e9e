//! `hotcell_tests::fuzz::targets`: blackbox.

#![no_main]

use hotcell_tests::fuzz::targets::named;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Some(target) = named("blackbox") {
        (target.run)(data);
    }
});

//! `hotcell_tests::fuzz::targets`: parts.

#![no_main]

use hotcell_tests::fuzz::targets::named;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Some(target) = named("parts") {
        (target.run)(data);
    }
});

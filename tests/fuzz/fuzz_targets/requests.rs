//! `hotcell_tests::fuzz::targets`: requests.

#![no_main]

use hotcell_tests::fuzz::targets::named;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Some(target) = named("requests") {
        (target.run)(data);
    }
});

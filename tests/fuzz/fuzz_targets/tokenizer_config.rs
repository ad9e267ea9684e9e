//! `hotcell_tests::fuzz::targets`: tokenizer_config.

#![no_main]

use hotcell_tests::fuzz::targets::named;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Some(target) = named("tokenizer_config") {
        (target.run)(data);
    }
});

//! What all targets have in common.

/// The target of a name in [`hotcell_tests::fuzz::targets`].
#[macro_export]
macro_rules! target {
    ($name:literal) => {
        // libFuzzer's hook ends the process at every panic. Those of dependencies that the code catches are no findings; one
        // that leaves the target still is.
        libfuzzer_sys::fuzz_target!(init: drop(std::panic::take_hook()), |data: &[u8]| {
            if let Some(target) = hotcell_tests::fuzz::targets::named($name) {
                (target.run)(data);
            }
        });
    };
}

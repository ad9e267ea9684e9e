//! The CUDA kernels on a processor: compiled by g++ through `kernels/cuda/shim`, compared with the CPU backend, and once
//! more under AddressSanitizer and UBSan.
//!
//! Where g++ is missing these tests say so and end. What only a GPU can show is not shown: see `shim.h`.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod attention;
mod chosen;
#[path = "../common/mod.rs"]
mod common;
mod float8;
mod gather;
mod generic;
mod halves;
mod products;
mod rows;
mod sample;
mod shim;

use std::process::Command;

use shim::{SANITIZE, Shim};

/// Every test of this program again, on kernels that notice wrong addresses and undefined behaviour.
#[test]
fn all_of_it_under_sanitizers() {
    if std::env::var_os(SANITIZE).is_some() || Shim::get().is_none() {
        return;
    }
    // The library's allocations are only watched where the sanitizer's runtime comes first.
    let mut library = Command::new("g++");
    let library = library.arg("-print-file-name=libasan.so");
    let library = library.output().unwrap();
    let library = String::from_utf8(library.stdout).unwrap();
    let library = library.trim();
    if !std::path::Path::new(library).is_absolute() {
        println!("skipped: g++ has no libasan.so");
        return;
    }
    let program = std::env::current_exe().unwrap();
    let output = Command::new(program)
        .args(["--skip", "all_of_it_under_sanitizers"])
        .env("LD_PRELOAD", library)
        .env(
            "ASAN_OPTIONS",
            "detect_leaks=0:detect_stack_use_after_return=0",
        )
        .env("UBSAN_OPTIONS", "print_stacktrace=1")
        .env("HOTCELL_SHIM_REVERSE", "1")
        .env(SANITIZE, "1")
        .output()
        .unwrap();
    let (out, err) = (&output.stdout, &output.stderr);
    let (out, err) = (String::from_utf8_lossy(out), String::from_utf8_lossy(err));
    assert!(
        output.status.success() && out.contains("test result: ok"),
        "{out}\n{err}"
    );
}

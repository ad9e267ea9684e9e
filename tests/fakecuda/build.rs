//! Gives the library the name by which others ask for the driver.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Who opens it by its path once has whoever asks for this name get it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
}

//! Tells the linker where the program finds libmlx when it runs.

use std::env;

fn main() {
    // Where it is installed: beside the program, or in the library folder next to the program's.
    for place in ["$ORIGIN", "$ORIGIN/../lib/hotcell"] {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{place}");
    }
    // Where it was made ready on this machine (deploy/mlx-linux/setup). On a Mac it is linked into the program.
    if let Ok(library) = env::var("DEP_MLX_LIBRARY") {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{library}");
    }
    println!("cargo::rerun-if-env-changed=DEP_MLX_LIBRARY");
}

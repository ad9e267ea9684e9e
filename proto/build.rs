//! Compiles the `.proto` files with protox, so that no protoc has to be installed.

use std::{env, error::Error, path::PathBuf};

const FILES: &[&str] = &[
    "hotcell/v1/control.proto",
    "hotcell/v1/graph.proto",
    "hotcell/v1/tokens.proto",
    "hotcell/v1/worker.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=hotcell");
    let descriptors = PathBuf::from(env::var("OUT_DIR")?).join("hotcell.bin");
    let mut compiler = protox::Compiler::new(["."])?;
    compiler
        .include_source_info(true)
        .include_imports(true)
        .open_files(FILES)?;
    std::fs::write(descriptors, compiler.encode_file_descriptor_set())?;
    tonic_prost_build::configure().compile_fds(compiler.file_descriptor_set())?;
    Ok(())
}

//! Compiles the `.proto` files with protox, so that no protoc has to be installed.

use std::{env, error::Error, path::PathBuf};

const FILES: &[&str] = &["inference/grpc_service.proto", "vllm/vllm_engine.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=protos");
    let descriptors = PathBuf::from(env::var("OUT_DIR")?).join("gateways.bin");
    let mut compiler = protox::Compiler::new(["protos"])?;
    compiler
        .include_source_info(true)
        .include_imports(true)
        .open_files(FILES)?;
    std::fs::write(descriptors, compiler.encode_file_descriptor_set())?;
    tonic_prost_build::configure()
        // Tensors are passed on, not copied.
        .bytes(".inference")
        .compile_fds(compiler.file_descriptor_set())?;
    Ok(())
}

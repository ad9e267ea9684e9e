//! Compiles the `.proto` files with protox, so that no protoc has to be installed.

use std::{env, error::Error, path::PathBuf};

const FILES: &[&str] = &[
    "hotcell/v1/control.proto",
    "hotcell/v1/debug.proto",
    "hotcell/v1/graph.proto",
    "hotcell/v1/takeover.proto",
    "hotcell/v1/tensors.proto",
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
    // Bulk data arrives as a slice of the connection's buffer, not as a copy of it.
    let bulk = [
        ".hotcell.v1.UploadChunk.data",
        ".hotcell.v1.DownloadChunk.data",
        ".hotcell.v1.Operand.data",
        ".hotcell.v1.Output.data",
    ];
    // A crash report is a JSON file, too, and an inspection and a map of memory are printed as such.
    let told = [
        "CrashReport",
        "BlackBox",
        "RunningRequest",
        "SignalSite",
        "DeviceFault",
        "AffectedRequest",
        "Inspection",
        "InspectedFile",
        "Finding",
        "Inspected",
        "MetadataEntry",
        "TensorType",
        "ChatTemplateReport",
        "ModelSummary",
        "MemoryMap",
        "MemoryUse",
        "CacheStatus",
        "CacheLayers",
        "RequestMemory",
        "SessionMemory",
        "HeldHandle",
    ];
    // The header of a capture's file is JSON that is read again.
    let kept = [
        "GenerateRequest",
        "Prompt",
        "TokenIds",
        "Chat",
        "ChatMessage",
        "Tool",
        "ToolCall",
        "ToolCalls",
        "Sampling",
        "LogitBias",
        "Resume",
        "Grammar",
        "NumericsClass",
        "CaptureHead",
        "CapturedNode",
        "CaptureEnd",
    ];
    let build = bulk
        .into_iter()
        .fold(tonic_prost_build::configure(), |build, path| {
            build.bytes(path)
        });
    let build = told.into_iter().fold(build, |build, message| {
        let path = format!(".hotcell.v1.{message}");
        build.message_attribute(path, "#[derive(serde::Serialize)]")
    });
    // Files of versions that knew less are read, too.
    let later = [
        "CaptureHead.graph",
        "CapturedNode.output",
        "CaptureEnd.full",
    ];
    let build = later.into_iter().fold(build, |build, field| {
        let path = format!(".hotcell.v1.{field}");
        build.field_attribute(path, "#[serde(default)]")
    });
    kept.into_iter()
        .fold(build, |build, message| {
            // Its choices, too.
            let path = format!(".hotcell.v1.{message}");
            build.type_attribute(path, "#[derive(serde::Serialize, serde::Deserialize)]")
        })
        .compile_fds(compiler.file_descriptor_set())?;
    Ok(())
}

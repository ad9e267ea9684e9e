//! The protocols of gateways and serving systems that Hotcell speaks besides its own. Names and numbers are theirs, so
//! that their clients work unmodified; what a field means here is said where it is served, in the scheduler's gateways.
#![allow(missing_docs)] // Generated from others' definitions.

/// The Open Inference Protocol, version 2, with Triton's extensions.
pub mod inference {
    tonic::include_proto!("inference");
}

/// What the router SMG says to an engine of vLLM.
pub mod vllm {
    tonic::include_proto!("vllm.grpc.engine");
}

/// Descriptors of all of them, for reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/gateways.bin"));

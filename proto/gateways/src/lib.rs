//! The protocols of gateways and serving systems that Hotcell speaks besides its own. Names and numbers are theirs, so
//! that their clients work unmodified; what a field means here is said where it is served, in the scheduler's gateways.
#![allow(missing_docs)] // Generated from others' definitions.

/// The Open Inference Protocol, version 2, with Triton's extensions.
pub mod inference {
    tonic::include_proto!("inference");
}

/// As deep as the packages' names are, by which generated code finds what it needs of another package.
mod packages {
    pub mod smg {
        pub mod grpc {
            pub mod common {
                tonic::include_proto!("smg.grpc.common");
            }
        }
    }
    pub mod vllm {
        pub mod grpc {
            pub mod engine {
                tonic::include_proto!("vllm.grpc.engine");
            }
        }
    }
}

/// What the router SMG says alike to engines of every kind.
pub use packages::smg::grpc::common as smg;
/// What the router SMG says to an engine of vLLM.
pub use packages::vllm::grpc::engine as vllm;

/// Descriptors of all of them, for reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/gateways.bin"));

//! What crosses a process boundary in Hotcell: gRPC types, limits, errors, checked ids.
//!
//! Nothing here does I/O. Every other package depends on this one and it depends on none of them.

pub mod address;
pub mod deadline;
pub mod error;
pub mod exit;
pub mod ids;
pub mod limits;
pub mod plan_part;
pub mod receipt;
pub mod session;
pub mod token;

/// The gRPC package `hotcell.v1`, generated from `proto/hotcell/v1/*.proto`.
#[allow(missing_docs, clippy::all, clippy::unwrap_used)]
pub mod v1 {
    tonic::include_proto!("hotcell.v1");

    /// The encoded descriptors of this package, for server reflection.
    pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/hotcell.bin"));
}

/// Version of the conversation between scheduler and worker. They ship together, so it must be equal.
pub const PROTOCOL_VERSION: u32 = 1;

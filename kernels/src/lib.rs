//! Devices, and the programs that run on them.
//!
//! A [`backend::Backend`] lists devices; a [`backend::Device`] makes buffers, streams and plans; a
//! [`plan::Plan`] is the one unit of execution: made once from a verified graph, executed many times.

pub mod backend;
mod bound;
pub mod communicator;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod gauges;
pub mod host;
pub mod lower;
pub mod memory;
#[cfg(feature = "mlx")]
pub mod mlx;
#[cfg(any(feature = "cuda", feature = "mlx"))]
mod part;
pub mod plan;
mod reduction;
pub mod registry;
pub mod vault;

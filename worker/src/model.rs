//! Models: what they are made of, and how they are run.
//!
//! An architecture is written once against the graph builder; [`run`] makes plans of it for a device.

pub mod config;
pub mod llama;
pub mod run;
pub mod text;

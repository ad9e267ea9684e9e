//! Models: what they are made of, and how they are run.
//!
//! An architecture is written once against the graph builder; [`graph`] puts its layers together, and [`run`] makes
//! plans of them for a device.

pub mod config;
mod constants;
mod gemma3;
pub mod graph;
mod llama;
mod parts;
pub mod points;
mod qwen3_moe;
pub mod run;
pub mod text;
pub mod weave;

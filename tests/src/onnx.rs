//! ONNX's node tests, run through our ops: cases, their mapping onto the catalogue, comparison.
//!
//! `tests/onnx/README.md` says where the cases come from.

pub mod case;
pub mod compare;
pub mod map;
pub mod proto;
pub mod run;

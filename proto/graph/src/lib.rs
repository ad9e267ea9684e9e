//! Dtypes, shapes, the op catalogue, graphs and their verification.
//!
//! One row of [`op`] describes an op once; builder method, wire form, `verify` and lowering derive from it.

pub mod dtype;

pub use dtype::DType;

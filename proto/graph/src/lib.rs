//! Dtypes, shapes, the op catalogue, graphs and their verification.
//!
//! One row of [`op`] describes an op once; builder method, wire form, `verify` and lowering derive from it.

pub mod dtype;
pub mod graph;
pub mod op;
pub mod shape;
pub mod split;
pub mod wire;

pub use dtype::DType;
pub use graph::{Graph, GraphBuilder, GraphError, Value};
pub use hotcell_proto::limits::STEPS_PER_CRUMB;
pub use shape::{CacheSpec, Dim, Shape, TensorSpec};

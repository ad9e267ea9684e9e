//! The whole system from outside: helpers that tests and benchmarks share.

pub mod answers;
pub mod attack;
pub mod bench;
pub mod bundled;
pub mod chance;
pub mod chaos;
pub mod cluster;
pub mod conformance;
pub mod debugged;
pub mod fakecuda;
pub mod fault;
pub mod fuzz;
pub mod hostile;
pub mod killed;
pub mod layers;
pub mod listed;
pub mod model;
pub mod names;
pub mod onnx;
pub mod options;
pub mod proxy;
pub mod rewritten;
pub mod synthetic;

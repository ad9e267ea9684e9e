//! Remote tensors: lazy values that a worker computes.
//!
//! ```no_run
//! use hotcell_client::{Address, tensor::{Session, SessionOptions}};
//!
//! # async fn example() -> Result<(), hotcell_client::Error> {
//! let session = Session::open(&Address::from_environment()?, SessionOptions::default()).await?;
//! let a = session.tensor(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
//! let b = (&a.matmul(&a) + 1.0).softmax(-1);
//! println!("{:?}", b.to_vec::<f32>().await?);
//! # Ok(())
//! # }
//! ```
//!
//! A [`Tensor`] is an expression until something needs its value: [`Tensor::eval`], [`Session::eval`] or reading it. What is
//! wrong with an expression (shapes that do not fit, say) is known when it is built, kept in it, and returned by the call that
//! would compute it; nothing panics. Once evaluated, a tensor is a handle on the worker's memory, freed with its last clone.

mod array;
mod backend;
mod compare;
mod compile;
mod create;
mod download;
mod dump;
mod execute;
mod host;
mod io;
mod memory;
mod movement;
mod operators;
mod ops;
mod pipeline;
mod program;
mod session;
mod shared;
mod stream;
mod transfer;

pub use array::Tensor;
pub use backend::{Backend, BackendParams, DeviceMemory, FlashAttention, Placement};
pub use compare::{Comparison, Comparisons, Thresholds};
pub use compile::Compiled;
pub use dump::DumpOptions;
pub use host::{Element, HostTensor, Plain};
pub use hotcell_graph::{DType, Dim, Shape, TensorSpec};
pub use io::TensorFile;
pub use memory::Memory;
pub use ops::{ConvOptions, Layout, PoolKind, Reduce};
pub use pipeline::{Pending, Pipeline};
pub use session::{Lease, Session, SessionOptions};
pub use shared::SharedTensor;
pub use stream::{Event, Stream};

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
//!
//! What changes is a [`Cache`]: keys and values of attention, which a [`Step`] writes and reads in the order in which it is told to.
//!
//! A session ends with its worker: calls get [`Reason::WorkerLost`](crate::Reason::WorkerLost) then, and what it held is lost.
//! One that is opened with [`SessionOptions::recovery`] goes on in the next worker of the same numerics class, and calls only take
//! longer. There, tensors are made again when they are next needed, with equal bits: from bytes that this process keeps
//! for it (host data, files, keys, constants), as weights by their name, and by doing again the calls that made them, as far back
//! as need be. All ops are pure functions (random ones of their key), so that this is sound; the exceptions are refused with
//! [`Reason::TensorLost`](crate::Reason::TensorLost), which names the tensor and says why:
//!
//! - what [`Tensor::write`] overwrote in place, memory from [`Session::shared`], caches, and what was made of these afterwards;
//! - what is made of more bytes than [`Recovery::max_bytes`], or by more calls than are remembered.
//!
//! [`Tensor::checkpoint`] fetches a tensor's value, from which it can be made again in any case, and shortens the way back for what is
//! made of it later. A call is done again at most [`Recovery::tries`] times; no call takes part in the effects of another, so
//! that one whose worker dies at each try ends with an error and the session goes on.

mod array;
mod backend;
mod cache;
mod checked;
mod compare;
mod compile;
mod connection;
mod create;
mod download;
mod dump;
mod execute;
mod fourier;
mod host;
mod image;
mod io;
mod layers;
mod linear;
mod made;
mod memory;
mod movement;
mod operators;
mod ops;
mod pipeline;
mod place;
mod program;
mod quant;
mod random;
mod recent;
mod recipe;
mod recover;
mod recurrent;
#[cfg(test)]
mod rows;
mod run;
mod session;
mod shared;
mod spread;
mod step;
mod stream;
mod transfer;

pub use array::Tensor;
pub use backend::{Backend, BackendParams, DeviceMemory, FlashAttention, Placement};
pub use cache::Cache;
pub use compare::{Comparison, Comparisons, Thresholds};
pub use compile::Compiled;
pub use connection::Lease;
pub use dump::DumpOptions;
pub use host::{Element, HostTensor, Plain};
pub use hotcell_graph::{CacheSpec, DType, Dim, Shape, TensorSpec};
pub use image::Resample;
pub use io::TensorFile;
pub use layers::{AttentionOptions, RotaryForm, RotaryOptions};
pub use linear::Norm;
pub use memory::Memory;
pub use ops::{ConvOptions, Layout, Near, PoolKind, Reduce, Scan};
pub use pipeline::{Pending, Pipeline};
pub use quant::{QuantMode, Quantized};
pub use recover::Recovery;
pub use session::{Session, SessionOptions};
pub use shared::SharedTensor;
pub use spread::Spread;
pub use step::{PagedOptions, Pages, Step};
pub use stream::{Event, Stream};

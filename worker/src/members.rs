//! Several processes that compute one model together, each a part of it: of every layer (tensor parallelism: M. Shoeybi and
//! others 2019, "Megatron-LM"; here every number is computed whole by one of them, so that the results are those of one process), or
//! some of the layers (a pipeline).
//!
//! The worker that others know leads. It forks the others at its start, before it has threads or gives its freedom
//! away, and tells them all that its models' runners do; they meet in shared memory while they compute. Whichever of them
//! ends, all do: to those outside it is one worker.

mod birth;
mod doors;
mod follow;
mod kept;
mod lead;
mod wire;

pub use birth::{Leads, Member, Side, fork};
pub use follow::follow;
pub use kept::{Given, Made};
pub use lead::Members;

//! gRPC to commands, thin: `Tokens` and `Tensors` for everybody, `Worker` for the scheduler only.

mod blocks;
mod control;
mod embed;
mod tensors;
mod tokens;

pub use control::WorkerService;
pub use tensors::{TensorsService, server as tensors_server};
pub use tokens::TokensService;

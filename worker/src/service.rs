//! gRPC to commands, thin: `Tokens`, `Tensors` and `Debug` for everybody, `Worker` for the scheduler only.

mod blocks;
mod control;
mod debug;
mod embed;
mod tensors;
mod tokens;

pub use control::WorkerService;
pub use debug::{AUDIT, DebugService, server as debug_server};
pub use tensors::{TensorsService, server as tensors_server};
pub use tokens::TokensService;

//! gRPC to commands, thin: `Tokens` for everybody, `Worker` for the scheduler only.

mod control;
mod tokens;

pub use control::WorkerService;
pub use tokens::TokensService;

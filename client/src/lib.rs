//! Client of a Hotcell scheduler: connect, generate tokens, operate models and workers.
//!
//! ```no_run
//! use hotcell_client::{Address, Client, Event, GenerateOptions};
//!
//! # async fn example() -> Result<(), hotcell_client::Error> {
//! let client = Client::connect(&Address::from_environment()?).await?;
//! let mut stream = client
//!     .generate("In the beginning", GenerateOptions { max_tokens: 32, ..Default::default() })
//!     .await?;
//! while let Some(event) = stream.next().await {
//!     if let Event::Delta(delta) = event? {
//!         print!("{}", delta.text);
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Every failure is a [`hotcell_proto::error::Error`]: branch on its reason, show its message. A worker
//! run alone with `--listen` serves the same token calls, so the same client drives it.
//!
//! The `hotcell` command is [`cli`]; it is part of the library so that tests can drive it.

pub mod cli;
pub mod connect;
pub mod control;
pub mod debug;
pub mod graphs;
pub mod load;
pub mod local;
pub mod tensor;
pub mod text;
pub mod tokens;
mod whole;

pub use connect::{Address, Client, Identity};
pub use graphs::SaveGraph;
pub use hotcell_proto::{
    error::{Error, Reason},
    v1,
};
pub use text::EmbedOptions;
pub use tokens::{Completion, Event, GenerateOptions, Generation, Grammar, Prompt};

//! One process, one device: loads models, runs plans, streams tokens.

pub mod format;
pub mod generate;
pub mod model;
pub mod weights;

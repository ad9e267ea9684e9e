//! Generation: from rows of logits to streams of tokens.

pub mod batch;
pub mod blocks;
pub mod cache;
pub mod check;
pub mod embed;
pub mod fair;
pub mod grammar;
pub mod ledger;
pub mod logprobs;
pub mod lookup;
pub mod masks;
pub mod meaning;
pub mod pace;
pub mod sampler;
pub mod schedule;
pub mod sequence;
pub mod task;
mod useful;

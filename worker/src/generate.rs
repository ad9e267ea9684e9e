//! Generation: from rows of logits to streams of tokens.

pub mod batch;
pub mod blocks;
pub mod check;
pub mod logprobs;
pub mod random;
pub mod sampler;
pub mod sequence;

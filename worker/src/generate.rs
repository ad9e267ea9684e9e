//! Generation: from rows of logits to streams of tokens.

pub mod logprobs;
pub mod random;
pub mod sampler;

//! How tests ask for tokens: so many, whatever the model would rather say.

use hotcell_client::{GenerateOptions, v1};

/// The likeliest ones.
pub fn greedy(tokens: u32) -> GenerateOptions {
    GenerateOptions {
        max_tokens: tokens,
        ignore_eos: true,
        seed: Some(0),
        ..GenerateOptions::default()
    }
}

/// Drawn ones.
pub fn drawn(tokens: u32, seed: u64) -> GenerateOptions {
    GenerateOptions {
        sampling: v1::Sampling {
            temperature: Some(0.9),
            top_p: Some(0.95),
            ..v1::Sampling::default()
        },
        seed: Some(seed),
        ..greedy(tokens)
    }
}

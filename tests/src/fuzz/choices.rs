//! A case's decisions.

/// A stream of numbers that a seed decides.
pub use crate::chance::Chance as Choices;

/// The seed of case `index` of a run.
pub fn case_seed(run: u64, index: u64) -> u64 {
    Choices::new(run ^ index.wrapping_mul(0xd134_2543_de82_ef95)).number()
}

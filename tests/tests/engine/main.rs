//! The engine's batch, stepped by hand: whatever it shares, guesses, puts back or lets in first, nobody's tokens change.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod bench;
mod embed;
mod known;
mod memory;
mod prefix;
mod speculation;

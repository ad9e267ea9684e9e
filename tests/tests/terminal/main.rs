//! Commands that a person uses in a terminal.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod flicker;
mod prompt;
mod screen;
mod top;

//! Discovers devices, spawns one worker process on each, and relays token streams to them.
//!
//! Never here: a native backend, or a parser of model bytes, tokenizers, chat templates or graphs. Files are
//! handed over by descriptor, and all a worker says is treated as input from a stranger.

pub mod access;
pub mod admission;
pub mod audit;
pub mod config;
pub mod crash;
pub mod death;
mod dial;
pub mod digest;
pub mod discover;
pub mod elsewhere;
pub mod events;
pub mod exit;
pub mod fleet;
pub mod gateway;
pub mod gauges;
pub mod graphs;
pub mod hang;
pub mod inherit;
pub mod journal;
pub mod kept;
pub mod known;
pub mod manager;
pub mod meters;
pub mod onward;
pub mod packed;
pub mod placement;
pub mod policy;
pub mod prefixes;
mod rarely;
pub mod relay;
pub mod room;
pub mod run;
pub mod service;
pub mod store;
pub mod stream;
pub mod streams;
pub mod supervisor;
pub mod suspicion;
pub mod takeover;
pub mod tensors;
pub mod testimony;
pub mod text;
pub mod traces;
pub mod vault;
mod verdict;

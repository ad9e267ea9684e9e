//! One process, one device: loads models, runs plans, streams tokens.

pub mod config;
pub mod confine;
pub mod debug;
pub mod engine;
pub mod entropy;
pub mod error;
pub mod exit;
pub mod format;
pub mod generate;
pub mod host;
pub mod inspect;
pub mod last_words;
pub mod members;
pub mod model;
pub mod packing;
pub mod program;
pub mod repair;
pub mod serve;
pub mod service;
pub mod session;
pub mod text;
pub mod weights;

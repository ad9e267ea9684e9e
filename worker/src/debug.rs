//! Looking into this worker while it serves others: what it does, and what it computes.
//!
//! Nothing here happens unless somebody looks: steps ask one flag.

pub mod capture;
pub mod guard;
pub mod memory;
pub mod observer;
mod pieces;
mod row;
pub mod trace;
pub mod watch;
mod watched;

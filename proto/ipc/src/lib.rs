//! All operating-system calls that cross a process boundary: sealed memory and mappings, sockets and
//! descriptors, gRPC over connected sockets, child processes and their output. Linux only; a port is a second
//! file beside each of these.
//!
//! Whatever arrives from another process is treated as input from a stranger: lengths, counts and bytes are
//! checked, and a violation is an error, never a panic.

pub mod background;
pub mod blackbox;
pub mod child;
pub mod descriptors;
pub mod fork;
pub mod group;
pub mod handoff;
pub mod image;
pub mod inherit;
pub mod listen;
pub mod log;
pub mod memory;
pub mod notify;
pub mod oom;
pub mod signals;
pub mod socket;
pub mod spawn;
pub mod takeover;
pub mod terminal;
pub mod transport;
pub mod turns;
pub mod unsealed;
mod vfork;

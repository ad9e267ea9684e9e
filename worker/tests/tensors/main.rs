//! The tensor service with a real engine: every call, its refusals, and what is left afterwards.

#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod at_once;
mod caches;
mod calls;
mod lifetimes;
mod limits;
mod order;
mod plans;
mod refuse;
mod shared;
mod support;
mod targets;
mod turns;

//! Tensor sessions: what clients hold on the device, and the order in which their work is done.
//!
//! Everything here lives on the engine's thread but [`account`] and [`upload`], which others share. A handle leads
//! to a [`value::Value`], which is written once: whoever queues work captures the values that its handles lead to,
//! and whatever overwrites a tensor gives its handle a new value. So what is queued sees what was there when it was
//! queued, freeing a handle never takes memory from under it, and no order but the queue's has to be kept.

pub mod account;
pub mod call;
pub mod compile;
mod holdings;
pub mod memory;
pub mod plan;
pub mod plane;
pub mod read;
pub mod shared;
pub mod state;
mod submit;
pub mod tensor;
pub mod upload;
pub mod value;
pub mod work;

use hotcell_proto::error::{Error, Reason};

/// A refusal of a field's value.
pub(crate) fn invalid(what: impl Into<String>) -> Error {
    Error::new(Reason::InvalidArgument, what)
}

/// More than the session may have.
pub(crate) fn quota(what: &str, limit: usize) -> Error {
    let message = format!("the session may have {limit} {what} at most; free some first");
    Error::new(Reason::QuotaExceeded, message).with("limit", limit)
}

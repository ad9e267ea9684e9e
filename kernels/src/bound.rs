//! What the places of a plan are bound to, and whether that is sound.

use std::ops::Range;

use crate::{backend::Buffer, plan::Slot};

/// What a place is bound to.
pub(crate) struct Bound {
    /// Keeps the memory alive.
    #[cfg_attr(not(any(feature = "cuda", feature = "mlx")), expect(dead_code))]
    pub buffer: Buffer,
    /// Where in the buffer it begins.
    #[cfg_attr(not(any(feature = "cuda", feature = "mlx")), expect(dead_code))]
    pub offset: usize,
    /// Its addresses.
    pub range: Range<usize>,
    /// Rows for which it is large enough.
    pub rows: usize,
    /// Whether the graph writes it.
    pub written: bool,
    pub slot: Slot,
}

/// A slot whose memory overlaps another's while the graph writes at least one of the two. One pass over the
/// ranges in the order of their addresses: a graph may have very many slots.
pub(crate) fn overlap<'a>(bound: impl Iterator<Item = &'a Bound>) -> Option<Slot> {
    let mut all: Vec<&Bound> = bound.filter(|b| !b.range.is_empty()).collect();
    all.sort_unstable_by_key(|b| b.range.start);
    // Where the ranges so far end, and those that are written.
    let (mut end, mut written) = (0, 0);
    for b in all {
        if b.range.start < written || b.written && b.range.start < end {
            return Some(b.slot);
        }
        end = end.max(b.range.end);
        if b.written {
            written = written.max(b.range.end);
        }
    }
    None
}

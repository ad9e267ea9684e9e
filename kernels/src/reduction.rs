//! The order in which a reduction folds: a function of the shape alone, and the same on every device.
//!
//! Neighbouring axes that are both reduced or both kept act as one, so a shape is a list of alternating
//! runs. The innermost run is either reduced (contiguous rows) or kept (columns that are reduced over
//! rows). What one result needs is cut into chunks; chunks are reduced by any thread, and joined in their
//! order, in a second step where there are several. So the bits depend neither on threads nor on the
//! number of rows.

use hotcell_graph::Dim;

/// Columns below which several rows make one vector.
pub(crate) const NARROW: usize = 64;

/// Elements that one lane or column adds one after another before its sum is joined to others.
const DEPTH: usize = 256;

/// Lanes of a contiguous row.
pub(crate) const LANES: usize = 16;

/// Elements of one chunk of a contiguous row.
pub(crate) const ROW_CHUNK: usize = DEPTH * LANES;

/// Rows side by side in a vector of `k` columns: depends on the shape only, as it is part of the order.
pub(crate) fn phases(k: usize) -> usize {
    if k < NARROW {
        NARROW.div_ceil(k.max(1))
    } else {
        1
    }
}

/// Rows of `k` columns that make a chunk.
pub(crate) fn chunk_rows(k: usize) -> usize {
    DEPTH * phases(k)
}

/// Neighbouring axes as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// Product of the fixed sizes.
    pub fixed: usize,
    /// Times the rows of the execution.
    pub rows: bool,
    pub reduced: bool,
}

impl Span {
    pub fn at(self, rows: usize) -> usize {
        self.fixed.saturating_mul(if self.rows { rows } else { 1 })
    }
}

fn sizes<'a>(spans: impl Iterator<Item = &'a Span>, rows: usize) -> usize {
    spans.fold(1, |n: usize, span| n.saturating_mul(span.at(rows)))
}

/// What is reduced, made of alternating runs.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    /// The runs outside of the innermost matrix.
    pub outer: Vec<Span>,
    /// The innermost reduced run, `n` rows of …
    pub n: Span,
    /// … `k` columns: the innermost kept run, 1 when the innermost run is reduced.
    pub k: Span,
}

/// The sizes of an execution.
pub(crate) struct Sizes {
    pub outer: usize,
    pub n: usize,
    pub k: usize,
    /// Rows of a chunk.
    pub chunk: usize,
    pub chunks: usize,
}

impl Layout {
    pub fn new(dims: &[Dim], reduced: impl Fn(usize) -> bool) -> Self {
        let mut runs: Vec<Span> = vec![];
        for (axis, dim) in dims.iter().enumerate() {
            let (fixed, rows) = match *dim {
                Dim::Fixed(1) => continue,
                Dim::Fixed(n) => (n, false),
                Dim::Rows => (1, true),
            };
            let reduced = reduced(axis);
            match runs.last_mut() {
                Some(last) if last.reduced == reduced => {
                    last.fixed = last.fixed.saturating_mul(fixed);
                    last.rows |= rows;
                }
                _ => runs.push(Span {
                    fixed,
                    rows,
                    reduced,
                }),
            }
        }
        let one = |reduced| Span {
            fixed: 1,
            rows: false,
            reduced,
        };
        let k = runs.pop_if(|run| !run.reduced).unwrap_or(one(false));
        let n = runs.pop().unwrap_or(one(true));
        Self { outer: runs, n, k }
    }

    pub fn at(&self, rows: usize) -> Sizes {
        let (n, k) = (self.n.at(rows), self.k.at(rows));
        let chunk = if self.in_rows() {
            ROW_CHUNK
        } else {
            chunk_rows(k)
        };
        Sizes {
            outer: sizes(self.outer.iter(), rows),
            n,
            k,
            chunk,
            chunks: n.div_ceil(chunk).max(1),
        }
    }

    /// Whether the innermost run is reduced.
    pub fn in_rows(&self) -> bool {
        self.k.fixed == 1 && !self.k.rows
    }

    /// Whether chunks are results: one of each, and nothing is reduced outside of it.
    pub fn is_direct(&self, sizes: &Sizes) -> bool {
        sizes.chunks == 1 && self.outer.iter().all(|run| !run.reduced)
    }

    /// Sizes of the kept runs, and of the reduced ones, of a kind.
    pub fn count(&self, reduced: bool, rows: usize) -> usize {
        sizes(self.outer.iter().filter(|r| r.reduced == reduced), rows)
    }
}

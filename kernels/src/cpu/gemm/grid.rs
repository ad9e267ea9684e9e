//! How a batch of products is shared among threads.

use std::ops::Range;

use super::{
    OUTER, SWEEP,
    kernels::{TILE_COLUMNS, TILE_ROWS},
};

/// Multiplications below which one thread does it all.
const WORTH: usize = 1 << 15;

/// A batch of products cut into units of `rows` by `columns` pieces each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    batch: usize,
    m: usize,
    n: usize,
    rows: usize,
    columns: usize,
    parts: usize,
}

/// What one call of [`Gemm::run`](super::Gemm::run) computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Which product of the batch.
    pub batch: usize,
    /// Rows of its result.
    pub rows: Range<usize>,
    /// Columns of its result.
    pub columns: Range<usize>,
}

impl Unit {
    /// The unit in the blocks that a product takes anyway, each short enough to wait for.
    pub fn pieces(self) -> impl Iterator<Item = Unit> {
        let Unit {
            batch,
            rows,
            columns,
        } = self;
        blocks(rows, OUTER).flat_map(move |rows| {
            blocks(columns.clone(), SWEEP).map(move |columns| Unit {
                batch,
                rows: rows.clone(),
                columns,
            })
        })
    }
}

/// Pieces of `step`, the last of which is longer rather than short.
fn blocks(all: Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> {
    let count = (all.len() / step).max(1);
    (0..count).map(move |i| {
        let start = all.start + i * step;
        let end = if i + 1 == count {
            all.end
        } else {
            start + step
        };
        start..end
    })
}

/// The `i`-th of `pieces` nearly equal ranges of `0..n`, with starts at multiples of `step`.
fn piece(n: usize, step: usize, i: usize, pieces: usize) -> Range<usize> {
    let steps = n.div_ceil(step);
    let at = |i: usize| (steps * i / pieces * step).min(n);
    at(i)..at(i + 1)
}

/// Rows of a unit start at multiples of this: whole tiles, and whole registers of the weights' kernel.
const ROW_STEP: usize = 4 * TILE_ROWS;

impl Grid {
    /// Cuts `batch` products of `m` by `n` results and `k` steps each for `parts` threads. The operands are packed
    /// once per unit, so units are few and as square as may be.
    pub fn of(batch: usize, m: usize, n: usize, k: usize, parts: usize) -> Grid {
        let work = batch
            .saturating_mul(m)
            .saturating_mul(n)
            .saturating_mul(k.max(1));
        let parts = if work < WORTH { 1 } else { parts };
        let (mut rows, mut columns) = (1, 1);
        let (most_rows, most_columns) =
            (m.div_ceil(ROW_STEP).max(1), n.div_ceil(TILE_COLUMNS).max(1));
        loop {
            let units = batch.saturating_mul(rows).saturating_mul(columns);
            let even = units.is_multiple_of(parts) || units >= 4 * parts;
            let can_rows = rows < most_rows;
            let can_columns = columns < most_columns;
            if even || !(can_rows || can_columns) {
                break;
            }
            if can_rows && (m / rows >= n / columns || !can_columns) {
                rows += 1;
            } else {
                columns += 1;
            }
        }
        Grid {
            batch,
            m,
            n,
            rows,
            columns,
            parts,
        }
    }

    /// The units of one part, in the order of the results.
    pub fn units(self, part: usize) -> impl Iterator<Item = Unit> {
        let all = match self.m == 0 || self.n == 0 {
            true => 0,
            false => self.batch * self.rows * self.columns,
        };
        let mine = match part < self.parts {
            true => piece(all, 1, part, self.parts),
            false => 0..0,
        };
        mine.map(move |unit| {
            let (rest, column) = (unit / self.columns, unit % self.columns);
            Unit {
                batch: rest / self.rows,
                rows: piece(self.m, ROW_STEP, rest % self.rows, self.rows),
                columns: piece(self.n, TILE_COLUMNS, column, self.columns),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_result_belongs_to_one_part() {
        for (batch, m, n, parts) in [
            (1, 1024, 1024, 2),
            (1, 1, 5000, 3),
            (3, 100, 70, 2),
            (7, 5, 5, 16),
            (1, 2000, 1, 3),
            (1, 5000, 3, 1),
            (1, 3, 9000, 1),
            (0, 4, 4, 2),
            (2, 0, 9, 2),
            (1 << 40, 0, 1 << 20, 2),
            (1, 400, 300, 16),
        ] {
            let grid = Grid::of(batch, m, n, 4096, parts);
            let mut seen = vec![0; batch * m * n];
            for part in 0..parts {
                for unit in grid.units(part).flat_map(Unit::pieces) {
                    for row in unit.rows.clone() {
                        for column in unit.columns.clone() {
                            seen[(unit.batch * m + row) * n + column] += 1;
                        }
                    }
                }
            }
            assert!(seen.iter().all(|&s| s == 1), "{grid:?}");
        }
    }

    #[test]
    fn large_products_keep_every_part_busy() {
        for parts in 1..=16 {
            let grid = Grid::of(1, 1024, 1024, 1024, parts);
            let work = |part| -> usize {
                grid.units(part)
                    .map(|u| u.rows.len() * u.columns.len())
                    .sum()
            };
            let most = (0..parts).map(work).max().unwrap_or(0);
            assert!(most * parts <= 1024 * 1024 * 3 / 2, "{parts}: {most}");
        }
    }
}

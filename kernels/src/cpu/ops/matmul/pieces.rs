//! How the parts of a job share the columns and rows of a product.

use std::ops::Range;

use crate::cpu::{lanes::LANES, matmul::AtOnce};

/// Rows from which on parts take all pieces one after another, so that one on a slower processor has fewer of them. With fewer
/// rows each part's weights are one long stream of memory first, of so many tenths of all columns together, and pieces what is
/// left; with so few columns for each part there is nothing else.
const ROWS: usize = 32;
const FEW_COLUMNS: usize = 256;
const STREAM_TENTHS: usize = 8;
/// Columns of a piece are a multiple of this, where they can be: whole tiles of panels.
pub(super) const COLUMNS: usize = 32;
/// Of what is left a piece is one part's share divided by this, so that a part has long streams of memory at first, and at the
/// end others wait little for one on a slower processor; but no less than so many tiles of panels, where each part has so many
/// times as many.
const SHARE: usize = 2;
const LEAST: usize = 2;
const LEAST_TIMES: usize = 8;

/// Whether so many parts take pieces of a product; else each has its share.
pub(super) const fn are_taken(rows: usize, n: usize, parts: usize) -> bool {
    parts > 1 && (rows >= ROWS || n / parts >= FEW_COLUMNS)
}

/// Rows of a product that are multiplied at a time.
#[derive(Clone, Copy, Debug)]
struct Bands {
    rows: usize,
    height: usize,
    count: usize,
    /// Whether a thread keeps what it makes of a band's activations.
    kept: bool,
}

impl Bands {
    /// Of `rows` (above 0), as a path has them.
    fn of(rows: usize, at_once: Option<AtOnce>) -> Self {
        let (height, kept) = match at_once {
            None => (rows, false),
            // About as many in each, in whole tiles unless the last one had hardly any then.
            Some(AtOnce { rows: most, keeps }) => {
                let bands = rows.div_ceil(most.max(1));
                let even = rows.div_ceil(bands);
                let tiles = even.next_multiple_of(LANES);
                let last = rows.saturating_sub(tiles * (bands - 1));
                (if last < LANES { even } else { tiles }, keeps)
            }
        };
        Self {
            rows,
            height,
            count: rows.div_ceil(height),
            kept,
        }
    }

    fn range(&self, band: usize) -> Range<usize> {
        let start = band * self.height;
        start..self.rows.min(start + self.height)
    }
}

/// A product in pieces.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    bands: Bands,
    n: usize,
    /// Columns from one band's beginning to the next one's, where the bands of a product follow each other.
    wide: usize,
    pieces: Pieces,
}

impl Cut {
    /// Of `rows` (above 0) as a path has them, and `n` columns, in pieces of at most `most` of them for so many parts. They are a
    /// multiple of `least` where `most` is.
    pub fn new(
        rows: usize,
        at_once: Option<AtOnce>,
        n: usize,
        (most, least): (usize, usize),
        parts: usize,
    ) -> Self {
        let bands = Bands::of(rows, at_once);
        let wide = n.next_multiple_of(least);
        // Where a band's activations are kept, a part stays with the band. Else pieces of the same weights follow each other.
        let all = if bands.kept { bands.count * wide } else { n };
        let streams = rows < ROWS && bands.count == 1;
        Self {
            bands,
            n,
            wide,
            pieces: Pieces {
                n: all,
                most,
                least,
                parts,
                first: match streams {
                    true => n * STREAM_TENTHS / 10 / parts / least * least,
                    false => 0,
                },
            },
        }
    }

    /// Of all columns of all bands, or of all bands' next ones; none after the last.
    pub fn piece(&self, taken: usize) -> Taken {
        let bands = if self.bands.kept { 1 } else { self.bands.count };
        Taken {
            columns: self.pieces.range(taken / bands),
            band: taken % bands,
        }
    }

    /// Rows and columns of a piece.
    pub fn products(&self, taken: Taken) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let Taken { columns, band } = taken;
        let wide = if self.bands.kept { self.wide } else { self.n }.max(1);
        (columns.start / wide..columns.end.div_ceil(wide)).filter_map(move |crossed| {
            let start = columns.start.max(crossed * wide) - crossed * wide;
            let end = (columns.end - crossed * wide).min(self.n);
            (start < end).then(|| (self.bands.range(band + crossed), start..end))
        })
    }
}

/// A piece that a part has taken.
#[derive(Clone, Debug)]
pub(super) struct Taken {
    columns: Range<usize>,
    band: usize,
}

impl Taken {
    pub fn is_empty(&self) -> bool {
        self.columns.is_empty()
    }
}

/// Columns of a product, or of all its bands one after another, as parts take them: large pieces, and smaller and smaller ones.
#[derive(Clone, Copy, Debug)]
struct Pieces {
    n: usize,
    /// A piece has at most so many, and a multiple of the other (both above 0).
    most: usize,
    least: usize,
    parts: usize,
    /// Of the first piece of each part, where it is another one than of what is left.
    first: usize,
}

impl Pieces {
    /// Those of a piece; none after the last.
    fn range(&self, number: usize) -> Range<usize> {
        // As long as a share is larger than a piece may be, all are of one size.
        let shares = self.parts.saturating_mul(SHARE);
        let largest = match self.first {
            0 => (self.n / self.most).saturating_sub(shares).min(number),
            _ => 0,
        };
        let least = (self.n / (self.parts * self.least * LEAST_TIMES)).clamp(1, LEAST) * self.least;
        let mut range = 0..largest * self.most;
        for piece in largest..=number {
            let left = self.n - range.end;
            let share = match piece < self.parts && self.first > 0 {
                true => self.first,
                false => left / shares,
            };
            let columns = share.next_multiple_of(self.least).max(least);
            range = range.end..range.end + columns.min(self.most).min(left);
            if left == 0 {
                break;
            }
        }
        range
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_multiplied_with_every_column_once() {
        let kept = |rows| Some(AtOnce { rows, keeps: true });
        let not = |rows| Some(AtOnce { rows, keeps: false });
        for at_once in [None, kept(144), kept(288), kept(16), not(96), not(16)] {
            for rows in [1, 3, 31, 32, 33, 150, 481, 512] {
                for (n, most, least) in [
                    (0, 256, 32),
                    (1, 256, 32),
                    (75, 256, 32),
                    (2048, 512, 32),
                    (300, 256, 48),
                    (300, 256, 96),
                ] {
                    let parts = [1, 2, 3, 16][rows % 4];
                    let cut = Cut::new(rows, at_once, n, (most, least), parts);
                    assert!(cut.piece(usize::MAX).is_empty());
                    let mut times = vec![0; rows * n];
                    let taken = (0..).map(|number| cut.piece(number));
                    for (rows, columns) in taken
                        .take_while(|taken| !taken.is_empty())
                        .flat_map(|taken| cut.products(taken))
                    {
                        let what = format!("{rows:?}, {columns:?} of {cut:?}");
                        let whole = |column: usize| column == n || column.is_multiple_of(LANES);
                        assert!(whole(columns.start) && whole(columns.end), "{what}");
                        assert!(at_once.is_none_or(|a| rows.len() <= a.rows), "{what}");
                        for row in rows {
                            for column in columns.clone() {
                                times[row * n + column] += 1;
                            }
                        }
                    }
                    assert!(times.iter().all(|&t| t == 1), "{cut:?}");
                }
            }
        }
    }

    #[test]
    fn a_part_stays_with_the_rows_it_has_made_something_of() {
        let at_once = Some(AtOnce {
            rows: 144,
            keeps: true,
        });
        let cut = Cut::new(512, at_once, 2048, (4096, 32), 2);
        let mut bands = Vec::new();
        for number in 0.. {
            let taken = cut.piece(number);
            if taken.is_empty() {
                break;
            }
            bands.extend(cut.products(taken).map(|(rows, _)| rows.start / 128));
        }
        assert!(bands.is_sorted(), "{bands:?}");
    }

    #[test]
    fn pieces_are_all_columns_once_and_the_last_ones_are_small() {
        let cut = |n, columns, parts, first| -> Vec<Range<usize>> {
            let pieces = Pieces {
                n,
                most: columns,
                least: 32,
                parts,
                first,
            };
            let all = (0..).map(|number| pieces.range(number));
            assert!(pieces.range(usize::MAX).is_empty());
            all.take_while(|piece| !piece.is_empty()).collect()
        };
        for n in [1, 31, 32, 33, 256, 2048, 2560, 11_264, 32_003] {
            for columns in [32, 64, 160, 704] {
                for parts in [2, 3, 16] {
                    let pieces = cut(n, columns, parts, 0);
                    assert_eq!(pieces.first().map(|piece| piece.start), Some(0));
                    assert_eq!(pieces.last().map(|piece| piece.end), Some(n));
                    for (one, next) in pieces.iter().zip(&pieces[1..]) {
                        assert_eq!((one.end, one.len() % 32), (next.start, 0));
                        assert!(one.len() >= next.len(), "{one:?} before {next:?}");
                    }
                }
            }
        }
        let lengths = |columns, first| -> Vec<usize> {
            cut(2048, columns, 2, first)
                .into_iter()
                .map(|p| p.len())
                .collect()
        };
        assert_eq!(
            lengths(4096, 0),
            [512, 384, 288, 224, 160, 128, 96, 64, 64, 64, 64]
        );
        assert_eq!(
            lengths(256, 0),
            [256, 256, 256, 256, 256, 192, 160, 128, 96, 64, 64, 64]
        );
        assert_eq!(lengths(4096, 800), [800, 800, 128, 96, 64, 64, 64, 32]);
    }
}

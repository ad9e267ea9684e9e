//! Matrix multiplication as steps: quantise the activations once, multiply.

use std::ops::Range;

use hotcell_graph::{
    DType, Dim,
    op::{Call, ValueSpec},
};

use super::{Entry, split, split_if_worth, stays, unsupported};
use crate::{
    backend::DeviceError,
    cpu::{
        dequant::is_weight_dtype,
        lanes::LANES,
        matmul::{AtOnce, Kept, MulMat, rectangles, rows_at_once},
        plan::{Kernel, Launcher, Reg, Run},
        quantize::{Activation, prepare_row, scratch_bytes},
    },
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "mul_mat",
        supports: fits,
        launch: mul_mat,
    },
    Entry {
        op: "mul_mat_scaled",
        supports: fits,
        launch: mul_mat,
    },
];

fn parts_of(call: &Call<'_>) -> Option<(DType, Dim, usize, usize)> {
    let [ValueSpec::Tensor(x), ValueSpec::Tensor(w), ..] = call.inputs else {
        return None;
    };
    match (x.shape.dims(), w.shape.dims()) {
        (&[m, Dim::Fixed(k)], &[Dim::Fixed(n), _]) if x.dtype == DType::F32 => {
            Some((w.dtype, m, k, n))
        }
        _ => None,
    }
}

/// `x` f32 `[m, k]` and `w` `[n, k]` of a dtype that the kernels read.
fn fits(call: &Call<'_>) -> bool {
    parts_of(call).is_some_and(|(dtype, ..)| is_weight_dtype(dtype))
}

/// Activations that are worth sharing out.
const WORTH: usize = 4096;

/// Activations in the blocks that a weight type wants.
struct Prepare {
    x: Reg,
    out: Reg,
    dtype: DType,
    /// Rows are this times the second.
    m: (Dim, usize),
    k: usize,
    row_bytes: usize,
}

impl Kernel for Prepare {
    fn is_alone(&self, rows: usize) -> bool {
        let m = self.m.0.at(rows) * self.m.1;
        stays(m * self.k, self.k.max(1), WORTH)
    }

    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let m = self.m.0.at(run.rows) * self.m.1;
        let rows = split_if_worth(m * self.k, self.k.max(1), WORTH, part, parts);
        let rows = rows.start / self.k.max(1)..rows.end / self.k.max(1);
        let bytes = rows.start * self.row_bytes..rows.end * self.row_bytes;
        // SAFETY: sizes as the specs say; parts write rows of their own.
        let (x, out) = unsafe {
            (
                run.slice::<f32>(self.x, m * self.k),
                run.slice_mut::<u8>(self.out, bytes),
            )
        };
        for (row, scratch) in rows.zip(out.chunks_exact_mut(self.row_bytes.max(1))) {
            prepare_row(run.path, self.dtype, &x[row * self.k..][..self.k], scratch);
        }
    }
}

/// Multiplications between two looks at whether to stop: some tens of milliseconds.
const PIECE: usize = 1 << 32;
/// Columns of a piece are a multiple of this: whole groups of panels on every path.
const PIECE_COLUMNS: usize = 256;

/// Rows from which on parts take one piece after another, so that one on a slower processor has fewer of them. With fewer
/// rows a part's weights are one long stream of memory.
const TAKEN_ROWS: usize = 32;
/// Columns of a piece are a multiple of this, where they can be: whole tiles of panels.
const TAKEN_COLUMNS: usize = 32;
/// Of what is left a piece is one part's share divided by this, so that a part has long streams of memory at first, and at the
/// end others wait little for one on a slower processor; but no less than so many tiles of panels.
const TAKEN_SHARE: usize = 2;
const TAKEN_LEAST: usize = 2;

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
struct Cut {
    bands: Bands,
    n: usize,
    /// Columns from one band's beginning to the next one's, where the bands of a product follow each other.
    wide: usize,
    pieces: Pieces,
}

impl Cut {
    /// Of `n` columns, in pieces of at most `most` of them for so many parts. They are a multiple of `least` where `most` is.
    fn new(bands: Bands, n: usize, (most, least): (usize, usize), parts: usize) -> Self {
        let wide = n.next_multiple_of(least);
        // Where a band's activations are kept, a part stays with the band. Else pieces of the same weights follow each other.
        let all = if bands.kept { bands.count * wide } else { n };
        Self {
            bands,
            n,
            wide,
            pieces: Pieces {
                n: all,
                most,
                least,
                parts,
            },
        }
    }

    /// Of all columns of all bands, or of all bands' next ones; none after the last.
    fn piece(&self, taken: usize) -> Taken {
        let bands = if self.bands.kept { 1 } else { self.bands.count };
        Taken {
            columns: self.pieces.range(taken / bands),
            band: taken % bands,
        }
    }

    /// Rows and columns of a piece.
    fn products(&self, taken: Taken) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
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
struct Taken {
    columns: Range<usize>,
    band: usize,
}

impl Taken {
    fn is_empty(&self) -> bool {
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
}

impl Pieces {
    /// Those of a piece; none after the last.
    fn range(&self, number: usize) -> Range<usize> {
        let mut range = 0..0;
        for _ in 0..=number {
            let left = self.n - range.end;
            let share = left / (self.parts * TAKEN_SHARE);
            let columns = share
                .next_multiple_of(self.least)
                .max(TAKEN_LEAST * self.least);
            range = range.end..range.end + columns.min(self.most).min(left);
            if left == 0 {
                break;
            }
        }
        range
    }
}

/// Where the scales of weights are, and what each is for.
#[derive(Clone, Copy)]
pub(super) struct Scaled {
    pub reg: Reg,
    /// Rows of the whole matrix.
    n: usize,
    k: usize,
    /// Rows and columns of a rectangle.
    rows: usize,
    columns: usize,
}

impl Scaled {
    /// Those of a matrix `[n, k]`, in input `reg`. At most `most` rows are multiplied at a time.
    pub fn of(
        launcher: &mut Launcher,
        call: &Call<'_>,
        reg: Reg,
        [n, k]: [usize; 2],
        most: usize,
    ) -> Result<Self, DeviceError> {
        let size = |i: usize| {
            let size = call.int(i).ok().and_then(|v| usize::try_from(v).ok());
            size.filter(|v| *v > 0).ok_or_else(|| unsupported(call))
        };
        let room = rectangles::room(most, k);
        launcher.workspace(room.saturating_mul(size_of::<f32>()).next_multiple_of(64));
        launcher.aligned(reg);
        Ok(Self {
            reg,
            n,
            k,
            rows: size(0)?,
            columns: size(1)?,
        })
    }

    /// Whether the weights may be read packed.
    pub const fn fits_panels(&self) -> bool {
        rectangles::Scales::fit_panels(self.rows, self.columns, [self.n, self.k])
    }

    /// Scales of one matrix.
    pub const fn each(&self) -> usize {
        self.n.div_ceil(self.rows) * self.k.div_ceil(self.columns)
    }

    /// [`rectangles::run`] with the scales of matrix `matrix`, from its row `first` on.
    ///
    /// # Safety
    ///
    /// As for [`Kernel::run`] and [`MulMat::run`].
    pub unsafe fn run(
        &self,
        run: &Run<'_>,
        part: usize,
        product: &MulMat<'_>,
        [matrix, first]: [usize; 2],
        (n, out, out_stride): (Range<usize>, *mut f32, usize),
    ) {
        let each = self.each();
        // SAFETY: sizes as the specs say; the workspace is as large as was asked for, and this part's.
        unsafe {
            let all = run.slice::<f32>(self.reg, (matrix + 1) * each);
            let scales = rectangles::Scales {
                values: &all[matrix * each..],
                rows: self.rows,
                columns: self.columns,
                first,
            };
            let room = rectangles::room(product.rows, self.k);
            let room = std::slice::from_raw_parts_mut(run.workspace(part).cast(), room);
            rectangles::run(product, &scales, run.path, n, (out, out_stride), room);
        }
    }

    /// Outputs that go together are a multiple of this many: activations are multiplied with the scales once for each so many.
    /// Whole panels, or 1 where it makes no difference.
    fn together(&self) -> usize {
        let several = self.columns < self.k && self.rows < self.n;
        match several && self.rows <= MOST_TOGETHER && self.fits_panels() {
            true => self.rows,
            false => 1,
        }
    }
}

/// See [`Scaled::together`].
const MOST_TOGETHER: usize = 256;

struct Multiply {
    x: Reg,
    w: Reg,
    /// The weights' packed form, which may be bound.
    packed: Option<Reg>,
    prepared: Option<Reg>,
    scaled: Option<Scaled>,
    out: Reg,
    dtype: DType,
    m: Dim,
    k: usize,
    n: usize,
    weight_bytes: usize,
    prepared_bytes: usize,
}

impl Kernel for Multiply {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let rows = self.m.at(run.rows);
        if rows == 0 {
            return;
        }
        // SAFETY: sizes as the specs say; each part writes columns of its own in every row.
        unsafe {
            let packed = self.packed.filter(|&reg| run.has(reg));
            let kernel = MulMat {
                dtype: self.dtype,
                w: run.slice(packed.unwrap_or(self.w), self.weight_bytes),
                packed: packed.is_some(),
                k: self.k,
                x: run.slice(self.x, rows * self.k),
                x_stride: self.k,
                prepared: match self.prepared {
                    Some(reg) => run.slice(reg, rows * self.prepared_bytes),
                    None => &[],
                },
                rows,
            };
            // Which columns go together changes no bit.
            let columns = PIECE / rows.saturating_mul(self.k).max(1);
            let columns = columns.next_multiple_of(PIECE_COLUMNS).max(PIECE_COLUMNS);
            let out: *mut f32 = run.pointer(self.out).cast();
            let mut kept = Kept::default();
            let mut multiply = |rows: Range<usize>, piece: Range<usize>| {
                let (kernel, out) = (kernel.of_rows(rows.clone()), out.add(rows.start * self.n));
                match &self.scaled {
                    None => kernel.run_keeping(run.path, piece, (out, self.n), &mut kept),
                    Some(scaled) => {
                        scaled.run(run, part, &kernel, [0, 0], (piece, out, self.n));
                    }
                }
            };
            if rows >= TAKEN_ROWS && parts > 1 {
                let least = match &self.scaled {
                    None => TAKEN_COLUMNS,
                    Some(scaled) => TAKEN_COLUMNS.max(scaled.together()),
                };
                let at_once = rows_at_once(run.path, self.dtype, self.k).map(|at_once| AtOnce {
                    // Scales go into the activations, or the product is cut along them.
                    keeps: at_once.keeps && self.scaled.is_none(),
                    ..at_once
                });
                let bands = Bands::of(rows, at_once);
                let cut = Cut::new(bands, self.n, (columns, least), parts);
                loop {
                    let taken = cut.piece(run.take_piece());
                    if taken.is_empty() {
                        return;
                    }
                    for (rows, columns) in cut.products(taken) {
                        if run.stopped() {
                            return;
                        }
                        multiply(rows, columns);
                    }
                }
            }
            let n = split(self.n, 16, part, parts);
            for start in n.clone().step_by(columns) {
                if run.stopped() {
                    return;
                }
                let piece = start..n.end.min(start.saturating_add(columns));
                multiply(0..rows, piece);
            }
        }
    }
}

/// Bytes of `[n, k]` weights.
pub(super) fn weight_bytes(
    call: &Call<'_>,
    dtype: DType,
    n: usize,
    k: usize,
) -> Result<usize, DeviceError> {
    let bytes = dtype.row_bytes(k).and_then(|b| b.checked_mul(n));
    bytes.ok_or_else(|| unsupported(call))
}

/// `m.0 · m.1` rows of `x` in the blocks that weights of `dtype` want, made once for all who want them; `None` for those
/// that read numbers.
pub(super) fn prepared(
    launcher: &mut Launcher,
    dtype: DType,
    x: Reg,
    m: (Dim, usize),
    k: usize,
) -> Option<Reg> {
    let row_bytes = scratch_bytes(dtype, k);
    let what = match Activation::of(dtype) {
        Activation::F32 => return None,
        Activation::Q8 => "q8",
        Activation::Q8K => "q8k",
    };
    let rows = m.0.at(launcher.max_rows).saturating_mul(m.1);
    let bytes = rows.saturating_mul(row_bytes);
    Some(launcher.shared(what, &[x], bytes, |out| Prepare {
        x,
        out,
        dtype,
        m,
        k,
        row_bytes,
    }))
}

fn mul_mat(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (Some((dtype, m, k, n)), &[x, w, ref scales @ ..], &[out]) = (parts_of(call), ins, outs)
    else {
        return Err(unsupported(call));
    };
    let scaled = match *scales {
        [] => None,
        [reg, ..] => {
            let most = m.at(launcher.max_rows);
            Some(Scaled::of(launcher, call, reg, [n, k], most)?)
        }
    };
    let prepared_bytes = scratch_bytes(dtype, k);
    let weight_bytes = weight_bytes(call, dtype, n, k)?;
    let prepared = prepared(launcher, dtype, x, (m, 1), k);
    let packed = match scaled.is_none_or(|s| s.fits_panels()) {
        true => launcher.packed(w, dtype, n, k),
        false => None,
    };
    let kernel = Multiply {
        x,
        w,
        packed,
        prepared,
        scaled,
        out,
        dtype,
        m,
        k,
        n,
        weight_bytes,
        prepared_bytes,
    };
    let mut reads = vec![x, w];
    reads.extend(prepared.into_iter().chain(scaled.map(|s| s.reg)));
    launcher.aligned(x);
    launcher.step_with_bytes(kernel, &reads, &[out]);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_multiplied_with_every_column_once() {
        let kept = |rows| Some(AtOnce { rows, keeps: true });
        let not = |rows| Some(AtOnce { rows, keeps: false });
        for at_once in [None, kept(144), kept(288), kept(16), not(96), not(16)] {
            for rows in [32, 33, 150, 481, 512] {
                for (n, most, least) in [
                    (0, 256, 32),
                    (1, 256, 32),
                    (75, 256, 32),
                    (2048, 512, 32),
                    (300, 256, 48),
                    (300, 256, 96),
                ] {
                    let bands = Bands::of(rows, at_once);
                    let cut = Cut::new(bands, n, (most, least), [1, 2, 3, 16][rows % 4]);
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
        let cut = Cut::new(Bands::of(512, at_once), 2048, (4096, 32), 2);
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
        let cut = |n, columns, parts| -> Vec<Range<usize>> {
            let pieces = Pieces {
                n,
                most: columns,
                least: 32,
                parts,
            };
            let all = (0..).map(|number| pieces.range(number));
            assert!(pieces.range(usize::MAX).is_empty());
            all.take_while(|piece| !piece.is_empty()).collect()
        };
        for n in [1, 31, 32, 33, 256, 2048, 2560, 11_264, 32_003] {
            for columns in [32, 64, 160, 704] {
                for parts in [2, 3, 16] {
                    let pieces = cut(n, columns, parts);
                    assert_eq!(pieces.first().map(|piece| piece.start), Some(0));
                    assert_eq!(pieces.last().map(|piece| piece.end), Some(n));
                    for (one, next) in pieces.iter().zip(&pieces[1..]) {
                        assert_eq!((one.end, one.len() % 32), (next.start, 0));
                        assert!(one.len() >= next.len(), "{one:?} before {next:?}");
                    }
                }
            }
        }
        let lengths = |columns| -> Vec<usize> {
            cut(2048, columns, 2).into_iter().map(|p| p.len()).collect()
        };
        assert_eq!(
            lengths(4096),
            [512, 384, 288, 224, 160, 128, 96, 64, 64, 64, 64]
        );
        assert_eq!(
            lengths(256),
            [256, 256, 256, 256, 256, 192, 160, 128, 96, 64, 64, 64]
        );
    }
}

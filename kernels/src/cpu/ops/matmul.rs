//! Matrix multiplication as steps: quantise the activations once, multiply.

use std::ops::Range;

use hotcell_graph::{
    DType, Dim,
    op::{Call, ValueSpec},
};

mod pieces;

use super::{Entry, split, split_if_worth, stays, unsupported};
use crate::{
    backend::DeviceError,
    cpu::{
        dequant::is_weight_dtype,
        matmul::{AtOnce, Kept, MulMat, rectangles, rows_at_once},
        plan::{Kernel, Launcher, Reg, Run},
        quantize::{Activation, prepare_row, scratch_bytes},
    },
};
use pieces::Cut;

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
            if pieces::are_taken(rows, self.n, parts) {
                let least = match &self.scaled {
                    None => pieces::COLUMNS,
                    Some(scaled) => pieces::COLUMNS.max(scaled.together()),
                };
                let at_once = rows_at_once(run.path, self.dtype, self.k).map(|at_once| AtOnce {
                    // Scales go into the activations, or the product is cut along them.
                    keeps: at_once.keeps && self.scaled.is_none(),
                    ..at_once
                });
                let cut = Cut::new(rows, at_once, self.n, (columns, least), parts);
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

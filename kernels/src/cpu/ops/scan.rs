//! Running sums, products, maxima and minima.
//!
//! Rows are cut into chunks of a fixed length. Where there are fewer rows than threads like, a first step
//! finds the totals of chunks, so that threads can begin in the middle of a row.

use std::ops::Range;

use hotcell_graph::{
    DType, Dim,
    op::{Call, rules::normal_axis},
};

use super::{
    Entry,
    keys::{BF16_INFINITY, F16_INFINITY},
    reducers as r,
    scanners::{self as s, CHUNK, Mode, Scan, Settled, TILE},
    split, split_if_worth,
    strided::around,
    unsupported,
};
use crate::{
    backend::DeviceError,
    cpu::plan::{Kernel, Launcher, Reg, Run},
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "cumsum",
        supports: fits,
        launch: cumsum,
    },
    Entry {
        op: "cumprod",
        supports: fits,
        launch: cumprod,
    },
    Entry {
        op: "cummax",
        supports: fits,
        launch: cummax,
    },
    Entry {
        op: "cummin",
        supports: fits,
        launch: cummin,
    },
];

/// Elements below which one thread does it all.
const WORTH: usize = 16 << 10;

/// Rows per thread from which threads take rows, not pieces of them.
const MANY: usize = 4;

struct Running<S: Scan> {
    scan: S,
    x: Reg,
    out: Reg,
    /// Totals of the chunks of long rows; absent where nobody wants them.
    totals: Reg,
    dims: Vec<Dim>,
    axis: usize,
    mode: Mode,
}

/// How the chunks of long rows are shared.
struct Shares {
    /// Elements of a row.
    n: usize,
    rows: usize,
    chunks: usize,
    parts: usize,
}

impl Shares {
    /// Chunks of a row one after the other, row after row.
    fn of(&self, part: usize) -> Range<usize> {
        match self.by_rows() {
            true => {
                let rows = split(self.rows, 1, part, self.parts);
                rows.start * self.chunks..rows.end * self.chunks
            }
            false => split(self.rows * self.chunks, 1, part, self.parts),
        }
    }

    fn by_rows(&self) -> bool {
        self.rows >= MANY * self.parts || self.parts == 1
    }

    /// Chunks whose totals somebody needs before they are scanned.
    fn wanted(&self) -> usize {
        match self.by_rows() {
            true => 0,
            false => self.of(self.parts - 1).start,
        }
    }

    /// A chunk's elements among those of all rows.
    fn elements(&self, item: usize, mode: Mode) -> Range<usize> {
        let (row, chunk) = (item / self.chunks, item % self.chunks);
        let (start, end) = (chunk * CHUNK, self.n.min((chunk + 1) * CHUNK));
        let first = row * self.n;
        match mode.reverse {
            true => first + self.n - end..first + self.n - start,
            false => first + start..first + end,
        }
    }
}

impl<S: Scan> Running<S> {
    fn shares(&self, run: &Run<'_>, parts: usize) -> Option<Shares> {
        let (rows, n, k) = around(&self.dims, self.axis, run.rows);
        (S::PARTS && k == 1 && n > CHUNK).then(|| Shares {
            n,
            rows,
            chunks: n.div_ceil(CHUNK),
            parts,
        })
    }

    unsafe fn long_rows(&self, run: &Run<'_>, shares: &Shares, part: usize) {
        // SAFETY: the specs say this size.
        let x = unsafe { run.slice::<S::Of>(self.x, shares.rows * shares.n) };
        let totals: &[S::Acc] = match shares.wanted() {
            0 => &[],
            // SAFETY: the launch made it of this size at least; the step before filled what is wanted.
            wanted => unsafe { run.slice::<S::Acc>(self.totals, wanted) },
        };
        let range = shares.of(part);
        let row = range.start - range.start % shares.chunks;
        let before = totals.get(row..range.start).unwrap_or_default();
        let mut acc = before
            .iter()
            .fold(self.scan.identity(), |a, b| self.scan.fold(a, *b).settled());
        for item in range {
            if run.stopped() {
                return;
            }
            if item % shares.chunks == 0 {
                acc = self.scan.identity();
            }
            let elements = shares.elements(item, self.mode);
            // SAFETY: every chunk has results of its own.
            let out = unsafe { run.slice_mut::<S::Of>(self.out, elements.clone()) };
            let x = &x[elements];
            let total = self.scan.rows(run.path, x, x.len(), self.mode, acc, out);
            acc = self.scan.fold(acc, total.settled()).settled();
        }
    }

    unsafe fn short_rows(&self, run: &Run<'_>, rows: usize, n: usize, part: usize, parts: usize) {
        let range = split_if_worth(rows, 1, (WORTH / n).max(1), part, parts);
        let some = (CHUNK / n).max(1);
        for first in range.clone().step_by(some) {
            if run.stopped() {
                return;
            }
            let elements = first * n..range.end.min(first + some) * n;
            // SAFETY: the specs say this size.
            let x = unsafe { &run.slice::<S::Of>(self.x, rows * n)[elements.clone()] };
            // SAFETY: every row has results of its own.
            let out = unsafe { run.slice_mut::<S::Of>(self.out, elements) };
            self.scan
                .rows(run.path, x, n, self.mode, self.scan.identity(), out);
        }
    }
}

impl<S: Scan> Kernel for Running<S> {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let (outer, n, k) = around(&self.dims, self.axis, run.rows);
        if n * k == 0 {
            return;
        }
        if let Some(shares) = self.shares(run, parts) {
            // SAFETY: the caller's promise.
            return unsafe { self.long_rows(run, &shares, part) };
        }
        if k == 1 {
            // SAFETY: as above.
            return unsafe { self.short_rows(run, outer, n, part, parts) };
        }
        // Columns are apart, so their tiles may be as the threads like them.
        let tile = match outer * k.div_ceil(TILE) < 2 * parts {
            true => k.div_ceil(parts).next_multiple_of(64).min(TILE),
            false => TILE,
        };
        let tiles = k.div_ceil(tile);
        let worth = WORTH / n.saturating_mul(k.min(tile));
        let range = split_if_worth(outer * tiles, 1, worth.max(2), part, parts);
        for item in range {
            if run.stopped() {
                return;
            }
            let (o, first) = (item / tiles, item % tiles * tile);
            let (width, at) = (tile.min(k - first), o * n * k + first);
            let x = run.pointer(self.x).cast::<S::Of>().wrapping_add(at);
            let out = run.pointer(self.out).cast::<S::Of>().wrapping_add(at);
            // SAFETY: the specs say that these columns are in both places; every item has columns of its own.
            unsafe { self.scan.columns(run.path, x, out, n, k, width, self.mode) };
        }
    }
}

/// The step before: totals of the chunks whose successors another part scans.
struct Totals<S: Scan>(Running<S>);

impl<S: Scan> Kernel for Totals<S> {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let running = &self.0;
        let Some(shares) = running.shares(run, parts) else {
            return;
        };
        // SAFETY: the specs say this size.
        let x = unsafe { run.slice::<S::Of>(running.x, shares.rows * shares.n) };
        for item in split(shares.wanted(), 1, part, parts) {
            if run.stopped() {
                return;
            }
            let x = &x[shares.elements(item, running.mode)];
            let total = running.scan.total(run.path, x, running.mode).settled();
            // SAFETY: the launch made it of this size at least; every item has its own.
            unsafe { run.slice_mut::<S::Acc>(running.totals, item..item + 1)[0] = total };
        }
    }
}

fn fits(call: &Call<'_>) -> bool {
    call.tensor(0)
        .is_ok_and(|t| !t.dtype.is_block() && !matches!(t.dtype, DType::Bool | DType::C64))
}

fn cumsum(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    running(launcher, call, ins, outs, false)
}

fn cumprod(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    running(launcher, call, ins, outs, true)
}

fn running(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
    product: bool,
) -> Result<(), DeviceError> {
    let (&[x], &[out]) = (ins, outs) else {
        return Err(unsupported(call));
    };
    let t = call.tensor(0)?;
    let site = Site {
        axis: normal_axis(call.int(0)?, t.shape.rank()).ok_or_else(|| unsupported(call))?,
        mode: Mode {
            exclusive: call.bool(1)?,
            reverse: call.bool(2)?,
        },
        dims: t.shape.dims().to_vec(),
        launcher,
        x,
        out,
    };
    let known = match (t.dtype, product) {
        (DType::U8 | DType::I8, false) => site.step(s::Sum8),
        (DType::U16 | DType::I16, false) => site.step(s::Sum16),
        (DType::U32 | DType::I32, false) => site.step(s::Sum32),
        (DType::U64 | DType::I64, false) => site.step(s::Sum64),
        (DType::F16, false) => site.step(s::SumF16),
        (DType::BF16, false) => site.step(s::SumBf16),
        (DType::F32, false) => site.step(s::SumF32),
        (DType::F64, false) => site.step(s::SumF64),
        (DType::U8 | DType::I8, true) => site.step(s::Prod8),
        (DType::U16 | DType::I16, true) => site.step(s::Prod16),
        (DType::U32 | DType::I32, true) => site.step(s::Prod32),
        (DType::U64 | DType::I64, true) => site.step(s::Prod64),
        (DType::F16, true) => site.step(s::ProdF16),
        (DType::BF16, true) => site.step(s::ProdBf16),
        (DType::F32, true) => site.step(s::ProdF32),
        (DType::F64, true) => site.step(s::ProdF64),
        _ => None,
    };
    known.ok_or_else(|| unsupported(call))
}

fn cummax(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    extreme(launcher, call, ins, outs, 0)
}

fn cummin(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    extreme(launcher, call, ins, outs, -1)
}

/// `flip`: 0 for the greatest, −1 for the least.
fn extreme(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
    flip: i8,
) -> Result<(), DeviceError> {
    let (&[x], &[out]) = (ins, outs) else {
        return Err(unsupported(call));
    };
    let t = call.tensor(0)?;
    let site = Site {
        axis: normal_axis(call.int(0)?, t.shape.rank()).ok_or_else(|| unsupported(call))?,
        mode: Mode {
            exclusive: false,
            reverse: call.bool(1)?,
        },
        dims: t.shape.dims().to_vec(),
        launcher,
        x,
        out,
    };
    let max8 = |flip| s::Extreme8(r::Max8 { flip });
    let max16 = |flip| s::Extreme16(r::Max16 { flip });
    let max32 = |flip| s::Extreme32(r::Max32 { flip });
    let max64 = |flip| s::Extreme64(r::Max64 { flip });
    let (f16, f32, f64) = (i16::from(flip), i32::from(flip), i64::from(flip));
    let half = |infinity, nan| {
        s::ExtremeHalf(r::MaxHalf {
            flip: f16,
            infinity,
            nan,
        })
    };
    let known = match t.dtype {
        DType::U8 => site.step(max8(flip ^ i8::MIN)),
        DType::I8 => site.step(max8(flip)),
        DType::U16 => site.step(max16(f16 ^ i16::MIN)),
        DType::I16 => site.step(max16(f16)),
        DType::U32 => site.step(max32(f32 ^ i32::MIN)),
        DType::I32 => site.step(max32(f32)),
        DType::U64 => site.step(max64(f64 ^ i64::MIN)),
        DType::I64 => site.step(max64(f64)),
        DType::F16 => site.step(half(F16_INFINITY, 0x7e00)),
        DType::BF16 => site.step(half(BF16_INFINITY, 0x7fc0)),
        DType::F32 => site.step(s::ExtremeF32(r::MaxF32 { flip: f32 })),
        DType::F64 => site.step(s::ExtremeF64(r::MaxF64 { flip: f64 })),
        _ => None,
    };
    known.ok_or_else(|| unsupported(call))
}

/// A call's place in a plan.
struct Site<'a> {
    launcher: &'a mut Launcher,
    x: Reg,
    out: Reg,
    dims: Vec<Dim>,
    axis: usize,
    mode: Mode,
}

impl Site<'_> {
    /// Nothing if the totals are larger than memory.
    fn step<S: Scan>(self, scan: S) -> Option<()> {
        let (rows, n, k) = around(&self.dims, self.axis, self.launcher.max_rows);
        let shared = S::PARTS && k == 1 && n > CHUNK && self.launcher.parts > 1;
        let totals = match shared {
            true => {
                let chunks = rows.checked_mul(n.div_ceil(CHUNK))?;
                let bytes = chunks.checked_mul(size_of::<S::Acc>())?;
                self.launcher.scratch(bytes)
            }
            false => Reg::ABSENT,
        };
        let (x, out, mode, axis) = (self.x, self.out, self.mode, self.axis);
        let kernel = || Running {
            scan,
            x,
            out,
            totals,
            dims: self.dims.clone(),
            axis,
            mode,
        };
        match shared {
            true => {
                self.launcher.step(Totals(kernel()), &[x], &[totals]);
                self.launcher.step(kernel(), &[x, totals], &[out]);
            }
            false => self.launcher.step(kernel(), &[x], &[out]),
        }
        Some(())
    }
}

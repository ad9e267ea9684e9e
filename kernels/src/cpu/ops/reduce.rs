//! Reductions over any axes.
//!
//! Neighbouring axes that are both reduced or both kept act as one, so a shape is a list of alternating
//! runs. The innermost run is either reduced (contiguous rows) or kept (columns that are reduced over
//! rows). What one result needs is cut into chunks whose size follows from the shape alone; chunks are
//! reduced by any thread, and joined in their order, in a second step where there are several. So the
//! bits depend neither on threads nor on the number of rows.

use hotcell_graph::{
    DType, Dim,
    op::{Call, ValueSpec, rules::normal_axis},
};

use super::{
    Entry,
    keys::{BF16_INFINITY, F16_INFINITY},
    reducers::{self as r, ROW_CHUNK, Reducer, TILE, chunk_rows},
    split, split_if_worth, unsupported,
};
use crate::{
    backend::DeviceError,
    cpu::plan::{Kernel, Launcher, Reg, Run},
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "reduce_sum",
        supports: plain,
        launch: sum,
    },
    Entry {
        op: "reduce_prod",
        supports: plain,
        launch: product,
    },
    Entry {
        op: "reduce_max",
        supports: ordered,
        launch: max,
    },
    Entry {
        op: "reduce_min",
        supports: ordered,
        launch: min,
    },
    Entry {
        op: "reduce_any",
        supports: ordered,
        launch: any,
    },
    Entry {
        op: "reduce_all",
        supports: ordered,
        launch: all,
    },
];

/// Elements below which one thread does it all.
const WORTH: usize = 16 << 10;

fn dtype(call: &Call<'_>) -> Option<DType> {
    match call.inputs.first() {
        Some(ValueSpec::Tensor(t)) => Some(t.dtype),
        _ => None,
    }
}

fn plain(call: &Call<'_>) -> bool {
    dtype(call).is_some_and(|d| !d.is_block())
}

/// Whether the input's elements have an order.
pub(super) fn ordered(call: &Call<'_>) -> bool {
    dtype(call).is_some_and(|d| !d.is_block() && d != DType::C64)
}

/// Neighbouring axes as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    /// Product of the fixed sizes.
    fixed: usize,
    /// Times the rows of the execution.
    rows: bool,
    reduced: bool,
}

impl Span {
    fn at(self, rows: usize) -> usize {
        self.fixed.saturating_mul(if self.rows { rows } else { 1 })
    }
}

fn sizes<'a>(spans: impl Iterator<Item = &'a Span>, rows: usize) -> usize {
    spans.fold(1, |n: usize, span| n.saturating_mul(span.at(rows)))
}

/// What is reduced, made of alternating runs.
#[derive(Clone, Debug)]
struct Layout {
    /// The runs outside of the innermost matrix.
    outer: Vec<Span>,
    /// The innermost reduced run, `n` rows of …
    n: Span,
    /// … `k` columns: the innermost kept run, 1 when the innermost run is reduced.
    k: Span,
}

/// The sizes of an execution.
struct Sizes {
    outer: usize,
    n: usize,
    k: usize,
    /// Rows of a chunk.
    chunk: usize,
    chunks: usize,
}

impl Layout {
    fn new(dims: &[Dim], reduced: impl Fn(usize) -> bool) -> Self {
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

    fn at(&self, rows: usize) -> Sizes {
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
    fn in_rows(&self) -> bool {
        self.k.fixed == 1 && !self.k.rows
    }

    /// Sizes of the kept runs, and of the reduced ones, of a kind.
    fn count(&self, reduced: bool, rows: usize) -> usize {
        sizes(self.outer.iter().filter(|r| r.reduced == reduced), rows)
    }
}

/// The first step: reduces every chunk.
struct Chunks<R: Reducer> {
    reducer: R,
    op: &'static str,
    /// Nothing has no result.
    needs_one: bool,
    x: Reg,
    /// The result, or the chunks' results where there are several for one result.
    out: Reg,
    direct: bool,
    layout: Layout,
}

impl<R: Reducer> Chunks<R> {
    /// Stores results `at..` of chunks.
    ///
    /// # Safety
    /// As for [`Run::slice_mut`].
    unsafe fn store(&self, run: &Run<'_>, at: usize, parts: &[R::Part]) {
        let range = at..at + parts.len();
        // SAFETY: the caller's promise, for the type that the launch chose.
        unsafe {
            if self.direct {
                let out = run.slice_mut::<R::Out>(self.out, range);
                for (o, p) in out.iter_mut().zip(parts) {
                    *o = self.reducer.finish(*p);
                }
            } else {
                run.slice_mut::<R::Part>(self.out, range)
                    .copy_from_slice(parts);
            }
        }
    }

    /// Contiguous rows, one chunk each.
    unsafe fn short_rows(&self, run: &Run<'_>, x: &[R::In], s: &Sizes, part: usize, parts: usize) {
        const BATCH: usize = 64;
        let worth = WORTH / s.n.max(1);
        // Short rows' results share cache lines.
        let step = if s.n < 1024 { 64 } else { 1 };
        let range = split_if_worth(s.outer, step, worth.max(1), part, parts);
        let mut buffer = [self.reducer.widen(self.reducer.identity()); BATCH];
        for at in range.clone().step_by(BATCH) {
            if run.stopped() {
                return;
            }
            let rows = BATCH.min(range.end - at);
            let x = &x[at * s.n..(at + rows) * s.n];
            self.reducer.rows(run.path, x, s.n, &mut buffer[..rows]);
            // SAFETY: rows of this part.
            unsafe { self.store(run, at, &buffer[..rows]) };
        }
    }
}

impl<R: Reducer> Kernel for Chunks<R> {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let s = self.layout.at(run.rows);
        let kept = self.layout.count(false, run.rows).saturating_mul(s.k);
        let over = self.layout.count(true, run.rows).saturating_mul(s.n);
        if kept == 0 {
            return;
        }
        if self.needs_one && over == 0 && part == 0 {
            run.fail(DeviceError::Undefined {
                op: self.op,
                why: "an axis without elements has none",
            });
        }
        // SAFETY: the specs say this size.
        let x = unsafe { run.slice::<R::In>(self.x, s.outer * s.n * s.k) };
        if self.layout.in_rows() && s.chunks == 1 {
            // SAFETY: the caller's promise.
            return unsafe { self.short_rows(run, x, &s, part, parts) };
        }
        let tiles = s.k.div_ceil(TILE).max(1);
        let items = s.outer * s.chunks * tiles;
        let range = if x.len() < WORTH {
            split_if_worth(items, 1, usize::MAX, part, parts)
        } else {
            split(items, 1, part, parts)
        };
        let mut buffer = [self.reducer.widen(self.reducer.identity()); TILE];
        for item in range {
            if run.stopped() {
                return;
            }
            let (unit, first) = (item / tiles, item % tiles * TILE);
            let (outer, chunk) = (unit / s.chunks, unit % s.chunks);
            let rows = chunk * s.chunk..s.n.min((chunk + 1) * s.chunk);
            let x = &x[(outer * s.n + rows.start) * s.k..(outer * s.n + rows.end) * s.k];
            let out = &mut buffer[..TILE.min(s.k - first)];
            if self.layout.in_rows() {
                self.reducer.rows(run.path, x, x.len(), out);
            } else if s.k > 0 {
                self.reducer.columns(run.path, x, s.k, first, out);
            }
            // SAFETY: every item has results of its own.
            unsafe { self.store(run, unit * s.k + first, out) };
        }
    }
}

/// The second step: joins the chunks of every result, in order.
struct Join<R: Reducer> {
    reducer: R,
    chunks: Reg,
    out: Reg,
    layout: Layout,
}

impl<R: Reducer> Join<R> {
    /// The index of a unit from a counter over the kept runs and one over the reduced runs.
    fn unit(&self, mut kept: usize, mut reduced: usize, rows: usize) -> usize {
        let (mut at, mut stride) = (0, 1);
        for run in self.layout.outer.iter().rev() {
            let n = run.at(rows).max(1);
            let counter = if run.reduced { &mut reduced } else { &mut kept };
            at += *counter % n * stride;
            *counter /= n;
            stride *= n;
        }
        at
    }
}

impl<R: Reducer> Kernel for Join<R> {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        const WIDTH: usize = 256;
        let s = self.layout.at(run.rows);
        let kept = self.layout.count(false, run.rows);
        let reduced = self.layout.count(true, run.rows);
        if kept == 0 || s.k == 0 {
            return;
        }
        let per_result = reduced.saturating_mul(s.chunks);
        let tiles = s.k.div_ceil(WIDTH);
        let worth = 4096 / per_result.saturating_mul(s.k.min(WIDTH)).max(1);
        let range = split_if_worth(kept * tiles, 1, worth.max(2), part, parts);
        // SAFETY: the launch made it of this size at least.
        let chunks = unsafe { run.slice::<R::Part>(self.chunks, s.outer * s.chunks * s.k) };
        let r = self.reducer;
        let mut buffer = [r.widen(r.identity()); WIDTH];
        for item in range {
            if run.stopped() {
                return;
            }
            let (kept, first) = (item / tiles, item % tiles * WIDTH);
            let acc = &mut buffer[..WIDTH.min(s.k - first)];
            acc.fill(r.widen(r.identity()));
            for reduced in 0..reduced {
                let unit = self.unit(kept, reduced, run.rows);
                for chunk in 0..s.chunks {
                    let from = &chunks[(unit * s.chunks + chunk) * s.k + first..];
                    for (a, p) in acc.iter_mut().zip(from) {
                        *a = r.join(*a, *p);
                    }
                }
            }
            let at = kept * s.k + first;
            // SAFETY: every item has results of its own, of the type that the launch chose.
            let out = unsafe { run.slice_mut::<R::Out>(self.out, at..at + acc.len()) };
            for (o, a) in out.iter_mut().zip(acc) {
                *o = r.finish(*a);
            }
        }
    }
}

/// A call's place in a plan.
struct Site<'a, 'b> {
    launcher: &'a mut Launcher,
    call: &'a Call<'b>,
    x: Reg,
    out: Reg,
    needs_one: bool,
}

impl Site<'_, '_> {
    fn reduce<R: Reducer>(self, reducer: R) -> Result<(), DeviceError> {
        let call = self.call;
        let dims = call.tensor(0)?.shape.dims();
        let axes = call.ints(0)?.iter().map(|a| normal_axis(*a, dims.len()));
        let axes: Vec<Option<usize>> = axes.collect();
        let layout = Layout::new(dims, |a| axes.is_empty() || axes.contains(&Some(a)));
        let rows = self.launcher.max_rows;
        let s = layout.at(rows);
        let direct = s.chunks == 1 && layout.outer.iter().all(|r| !r.reduced);
        let target = if direct {
            self.out
        } else {
            let parts = s
                .outer
                .checked_mul(s.chunks)
                .and_then(|n| n.checked_mul(s.k)?.checked_mul(size_of::<R::Part>()));
            self.launcher
                .scratch(parts.ok_or_else(|| unsupported(call))?)
        };
        let chunks = Chunks {
            reducer,
            op: call.op.name,
            needs_one: self.needs_one,
            x: self.x,
            out: target,
            direct,
            layout: layout.clone(),
        };
        self.launcher.step(chunks, &[self.x], &[target]);
        if !direct {
            let join = Join {
                reducer,
                chunks: target,
                out: self.out,
                layout,
            };
            self.launcher.step(join, &[target], &[self.out]);
        }
        Ok(())
    }
}

fn site<'a, 'b>(
    launcher: &'a mut Launcher,
    call: &'a Call<'b>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(DType, Site<'a, 'b>), DeviceError> {
    let (&[x], &[out], Some(dtype)) = (ins, outs, dtype(call)) else {
        return Err(unsupported(call));
    };
    let site = Site {
        launcher,
        call,
        x,
        out,
        needs_one: false,
    };
    Ok((dtype, site))
}

fn sum(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (dtype, site) = site(launcher, call, ins, outs)?;
    match dtype {
        DType::Bool => site.reduce(r::SumBool {}),
        DType::U8 => site.reduce(r::SumU8 {}),
        DType::I8 => site.reduce(r::SumI8 {}),
        DType::U16 => site.reduce(r::SumU16 {}),
        DType::I16 => site.reduce(r::SumI16 {}),
        DType::U32 | DType::I32 => site.reduce(r::Sum32 {}),
        DType::U64 | DType::I64 => site.reduce(r::Sum64 {}),
        DType::F16 => site.reduce(r::SumF16),
        DType::BF16 => site.reduce(r::SumBf16),
        DType::F32 => site.reduce(r::SumF32),
        DType::F64 => site.reduce(r::SumF64),
        DType::C64 => site.reduce(r::SumC64),
        _ => Err(unsupported(call)),
    }
}

fn product(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (dtype, site) = site(launcher, call, ins, outs)?;
    match dtype {
        DType::Bool => site.reduce(r::ProdBool {}),
        DType::U8 => site.reduce(r::ProdU8 {}),
        DType::I8 => site.reduce(r::ProdI8 {}),
        DType::U16 => site.reduce(r::ProdU16 {}),
        DType::I16 => site.reduce(r::ProdI16 {}),
        DType::U32 | DType::I32 => site.reduce(r::Prod32 {}),
        DType::U64 | DType::I64 => site.reduce(r::Prod64 {}),
        DType::F16 => site.reduce(r::ProdF16),
        DType::BF16 => site.reduce(r::ProdBf16),
        DType::F32 => site.reduce(r::ProdF32),
        DType::F64 => site.reduce(r::ProdF64),
        DType::C64 => site.reduce(r::ProdC64),
        _ => Err(unsupported(call)),
    }
}

fn max(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    extreme(launcher, call, ins, outs, 0)
}

fn min(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    extreme(launcher, call, ins, outs, -1)
}

/// `flip`: 0 for the largest, −1 for the smallest element.
fn extreme(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
    flip: i8,
) -> Result<(), DeviceError> {
    let (dtype, site) = site(launcher, call, ins, outs)?;
    let site = Site {
        needs_one: true,
        ..site
    };
    let (f8, f16, f32, f64) = (flip, i16::from(flip), i32::from(flip), i64::from(flip));
    let half = |infinity: i16, nan| r::MaxHalf {
        flip: f16,
        infinity,
        nan,
    };
    match dtype {
        DType::Bool if flip == 0 => site.reduce(r::Any8 { mask: u8::MAX }),
        DType::Bool => site.reduce(r::All8 { mask: u8::MAX }),
        DType::U8 => site.reduce(r::Max8 { flip: f8 ^ i8::MIN }),
        DType::I8 => site.reduce(r::Max8 { flip: f8 }),
        DType::U16 => site.reduce(r::Max16 {
            flip: f16 ^ i16::MIN,
        }),
        DType::I16 => site.reduce(r::Max16 { flip: f16 }),
        DType::U32 => site.reduce(r::Max32 {
            flip: f32 ^ i32::MIN,
        }),
        DType::I32 => site.reduce(r::Max32 { flip: f32 }),
        DType::U64 => site.reduce(r::Max64 {
            flip: f64 ^ i64::MIN,
        }),
        DType::I64 => site.reduce(r::Max64 { flip: f64 }),
        DType::F16 => site.reduce(half(F16_INFINITY, 0x7e00)),
        DType::BF16 => site.reduce(half(BF16_INFINITY, 0x7fc0)),
        DType::F32 => site.reduce(r::MaxF32 { flip: f32 }),
        DType::F64 => site.reduce(r::MaxF64 { flip: f64 }),
        _ => Err(unsupported(call)),
    }
}

/// The bits of an element of a dtype that make it other than zero.
fn nonzero_mask(dtype: DType) -> u64 {
    match dtype {
        DType::F16 | DType::BF16 => 0x7fff,
        DType::F32 => 0x7fff_ffff,
        DType::F64 => 0x7fff_ffff_ffff_ffff,
        _ => u64::MAX,
    }
}

fn any(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (dtype, site) = site(launcher, call, ins, outs)?;
    let mask = nonzero_mask(dtype);
    match dtype.block_bytes() {
        1 => site.reduce(r::Any8 { mask: mask as u8 }),
        2 => site.reduce(r::Any16 { mask: mask as u16 }),
        4 => site.reduce(r::Any32 { mask: mask as u32 }),
        8 => site.reduce(r::Any64 { mask }),
        _ => Err(unsupported(call)),
    }
}

fn all(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (dtype, site) = site(launcher, call, ins, outs)?;
    let mask = nonzero_mask(dtype);
    match dtype.block_bytes() {
        1 => site.reduce(r::All8 { mask: mask as u8 }),
        2 => site.reduce(r::All16 { mask: mask as u16 }),
        4 => site.reduce(r::All32 { mask: mask as u32 }),
        8 => site.reduce(r::All64 { mask }),
        _ => Err(unsupported(call)),
    }
}

//! Softmax over an axis that is not the innermost: columns side by side.

use hotcell_graph::{
    DType, Dim,
    op::{Call, rules::normal_axis},
};

use super::{
    Entry,
    reducers::Reducer,
    reductions::narrow_float,
    split_if_worth,
    statistics::{LogSumExpBf16, LogSumExpF16, LogSumExpF32},
    strided::around,
    unsupported,
};
use crate::{
    backend::DeviceError,
    cpu::{
        lanes::{bf16_to_f32, dispatch, exp, f16_to_f32, f32_to_bf16, f32_to_f16},
        path::CpuPath,
        plan::{Kernel, Launcher, Reg, Run},
    },
    reduction::chunk_rows,
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "softmax",
        supports: narrow_float,
        launch: softmax,
    },
    Entry {
        op: "log_softmax",
        supports: narrow_float,
        launch: log_softmax,
    },
];

/// Elements below which one thread does it all.
const WORTH: usize = 2048;

/// Columns that go together at most.
const TILE: usize = 512;

/// Columns below which several rows make one vector: no fewer than reductions have.
const NARROW: usize = 256;

/// What becomes of an element once its column's maximum and sum of powers are known.
trait Columns: Reducer<Part = [f64; 2]> {
    /// Writes `x` less `most`, as a power of e over `under`, or less `under` if `log`.
    fn write(
        path: CpuPath,
        x: &[Self::In],
        most: &[f32],
        under: &[f32],
        log: bool,
        out: &mut [Self::In],
    );
}

#[inline(always)]
fn write_body<T: Copy>(
    (load, store): (impl Fn(T) -> f32, impl Fn(f32) -> T),
    x: &[T],
    most: &[f32],
    under: &[f32],
    log: bool,
    out: &mut [T],
) {
    let columns = x.iter().zip(most).zip(under).zip(out);
    // The same NaN whatever would make it.
    let put = |v: f32, under: f32| store(if under.is_nan() { f32::NAN } else { v });
    if log {
        for (((x, m), u), o) in columns {
            *o = put((load(*x) - m) - u, *u);
        }
    } else {
        for (((x, m), u), o) in columns {
            *o = put(exp(load(*x) - m) / u, *u);
        }
    }
}

macro_rules! columns {
    ($($name:ident: $of:ty, $load:expr, $store:expr;)*) => {$(
        impl Columns for $name {
            fn write(path: CpuPath, x: &[$of], most: &[f32], under: &[f32], log: bool, out: &mut [$of]) {
                #[inline(always)]
                fn body(x: &[$of], most: &[f32], under: &[f32], log: bool, out: &mut [$of]) {
                    write_body(($load, $store), x, most, under, log, out);
                }
                dispatch! {
                    fn run(x: &[$of], most: &[f32], under: &[f32], log: bool, out: &mut [$of]) = body;
                }
                run(path, x, most, under, log, out);
            }
        }
    )*};
}

fn same(v: f32) -> f32 {
    v
}

columns! {
    LogSumExpF32: f32, same, same;
    LogSumExpF16: u16, f16_to_f32, f32_to_f16;
    LogSumExpBf16: u16, bf16_to_f32, f32_to_bf16;
}

struct OverColumns<C: Columns> {
    columns: C,
    x: Reg,
    out: Reg,
    dims: Vec<Dim>,
    axis: usize,
    log: bool,
}

impl<C: Columns> OverColumns<C> {
    /// One tile of columns: `x` is their matrix of `k` columns.
    unsafe fn tile(&self, run: &Run<'_>, x: &[C::In], at: usize, k: usize, tile: (usize, usize)) {
        let (first, width) = tile;
        let mut known = [self.columns.nothing(); TILE];
        let mut more = known;
        for rows in x.chunks(chunk_rows(k) * k) {
            if run.stopped() {
                return;
            }
            let more = &mut more[..width];
            self.columns.columns(run.path, rows, k, first, more);
            for (a, b) in known.iter_mut().zip(more) {
                *a = self.columns.join(*a, *b);
            }
        }
        // Narrow rows several at a time: what belongs to their columns repeats.
        let repeats = if width == k && k < NARROW {
            TILE / k
        } else {
            1
        };
        let (mut most, mut under) = ([0.0; TILE], [0.0; TILE]);
        for (i, (m, u)) in most.iter_mut().zip(&mut under).enumerate() {
            let [greatest, sum] = known[i % width];
            *m = greatest as f32;
            *u = match greatest.is_finite() {
                false => f32::NAN,
                true if self.log => libm::log(sum) as f32,
                true => sum as f32,
            };
        }
        let step = repeats * k;
        for start in (0..x.len()).step_by(step) {
            let len = if repeats == 1 {
                width
            } else {
                step.min(x.len() - start)
            };
            let from = start + first..start + first + len;
            // SAFETY: the specs say this size; nobody else has these columns of these rows.
            let out = unsafe { run.slice_mut::<C::In>(self.out, at + from.start..at + from.end) };
            C::write(
                run.path,
                &x[from],
                &most[..len],
                &under[..len],
                self.log,
                out,
            );
        }
    }
}

impl<C: Columns> Kernel for OverColumns<C> {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let (outer, n, k) = around(&self.dims, self.axis, run.rows);
        if n * k == 0 {
            return;
        }
        let tiles = k.div_ceil(TILE);
        let worth = WORTH / n.saturating_mul(k.min(TILE));
        // SAFETY: the specs say this size.
        let x = unsafe { run.slice::<C::In>(self.x, outer * n * k) };
        for item in split_if_worth(outer * tiles, 1, worth.max(2), part, parts) {
            let (o, first) = (item / tiles, item % tiles * TILE);
            let at = o * n * k;
            let tile = (first, TILE.min(k - first));
            // SAFETY: every item has columns of its own.
            unsafe { self.tile(run, &x[at..at + n * k], at, k, tile) };
        }
    }
}

fn softmax(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    over_columns(launcher, call, ins, outs, false)
}

fn log_softmax(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    over_columns(launcher, call, ins, outs, true)
}

fn over_columns(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
    log: bool,
) -> Result<(), DeviceError> {
    fn step<C: Columns>(
        launcher: &mut Launcher,
        call: &Call<'_>,
        (x, out): (Reg, Reg),
        columns: C,
        log: bool,
    ) -> Result<(), DeviceError> {
        let t = call.tensor(0)?;
        let axis = normal_axis(call.int(0)?, t.shape.rank());
        let kernel = OverColumns {
            columns,
            x,
            out,
            dims: t.shape.dims().to_vec(),
            axis: axis.ok_or_else(|| unsupported(call))?,
            log,
        };
        launcher.step(kernel, &[x], &[out]);
        Ok(())
    }
    let (&[x], &[out]) = (ins, outs) else {
        return Err(unsupported(call));
    };
    match call.tensor(0)?.dtype {
        DType::F16 => step(launcher, call, (x, out), LogSumExpF16 {}, log),
        DType::BF16 => step(launcher, call, (x, out), LogSumExpBf16 {}, log),
        DType::F32 => step(launcher, call, (x, out), LogSumExpF32 {}, log),
        _ => Err(unsupported(call)),
    }
}

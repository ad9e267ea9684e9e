//! Where the largest and the smallest element is.

use hotcell_graph::{
    DType, Dim,
    op::{Call, rules::normal_axis},
};

use super::{
    Entry,
    keys::{BF16_INFINITY, F16_INFINITY, F32_INFINITY, F64_INFINITY, order16, order32, order64},
    reductions::ordered,
    split_if_worth,
    strided::around,
    unsupported,
};
use crate::{
    backend::DeviceError,
    cpu::{
        lanes::dispatch,
        path::CpuPath,
        plan::{Kernel, Launcher, Reg, Run},
    },
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "argmax",
        supports: fits,
        launch: argmax,
    },
    Entry {
        op: "argmin",
        supports: fits,
        launch: argmin,
    },
];

/// Columns that are searched together at most.
const TILE: usize = 2048;

/// Elements of a row between two looks at the largest so far: they stay in the nearest cache.
const CHUNK: usize = 2048;

/// How elements become keys; the largest key wins.
trait Keys: Copy + Send + Sync + 'static {
    /// An element, and its key.
    type Key: Copy + Ord;
    /// Below every key.
    const LOWEST: Self::Key;
    fn key(self, value: Self::Key) -> Self::Key;
    /// The first largest element of a row.
    fn row(self, path: CpuPath, x: &[Self::Key]) -> u32;
    /// The first largest element of columns `first..first + out.len()` of a matrix of `k` columns.
    fn columns(self, path: CpuPath, x: &[Self::Key], k: usize, first: usize, out: &mut [u32]);
}

#[inline(always)]
fn row_body<K: Keys>(keys: K, x: &[K::Key]) -> u32 {
    let mut best = K::LOWEST;
    let mut at = 0;
    for (c, chunk) in x.chunks(CHUNK).enumerate() {
        let mut most = K::LOWEST;
        for v in chunk {
            most = most.max(keys.key(*v));
        }
        // Only a larger one moves the place, so the first of equal ones stays.
        if most > best {
            best = most;
            let place = chunk.iter().position(|v| keys.key(*v) == most);
            at = c * CHUNK + place.unwrap_or(0);
        }
    }
    at as u32
}

/// Looks at one more row, the `i`-th.
#[inline(always)]
fn row_of_columns<K: Keys>(keys: K, i: usize, row: &[K::Key], best: &mut [K::Key], at: &mut [u32]) {
    for ((b, o), v) in best.iter_mut().zip(at).zip(row) {
        let key = keys.key(*v);
        let larger = key > *b;
        *b = if larger { key } else { *b };
        *o = if larger { i as u32 } else { *o };
    }
}

/// Looks at four more rows, from the `i`-th on: the best of each column stays in a register meanwhile.
#[inline(always)]
fn rows_of_columns<K: Keys>(
    keys: K,
    i: usize,
    rows: [&[K::Key]; 4],
    best: &mut [K::Key],
    at: &mut [u32],
) {
    let w = best.len();
    let [p, q, r, s] = rows;
    let (p, q, r, s, at) = (&p[..w], &q[..w], &r[..w], &s[..w], &mut at[..w]);
    let later = |a: (K::Key, u32), b: (K::Key, u32)| if b.0 > a.0 { b } else { a };
    for j in 0..w {
        // Among four keys in a tree; an earlier one stays where a later one is not larger.
        let i = i as u32;
        let low = later((keys.key(p[j]), i), (keys.key(q[j]), i.wrapping_add(1)));
        let high = later(
            (keys.key(r[j]), i.wrapping_add(2)),
            (keys.key(s[j]), i.wrapping_add(3)),
        );
        (best[j], at[j]) = later((best[j], at[j]), later(low, high));
    }
}

#[inline(always)]
fn columns_body<K: Keys>(keys: K, x: &[K::Key], k: usize, first: usize, out: &mut [u32]) {
    let mut best = [K::LOWEST; TILE];
    let best = &mut best[..out.len()];
    out.fill(0);
    let mut i = 0;
    let mut four = x.chunks_exact(4 * k);
    for rows in &mut four {
        let row = |i: usize| &rows[i * k + first..];
        rows_of_columns(keys, i, [row(0), row(1), row(2), row(3)], best, out);
        i += 4;
    }
    for row in four.remainder().chunks_exact(k) {
        row_of_columns(keys, i, &row[first..], best, out);
        i += 1;
    }
}

macro_rules! keys {
    ($($name:ident { $($field:ident),* }: $int:ident, |$s:ident, $v:ident| $key:expr;)*) => {$(
        #[derive(Clone, Copy)]
        struct $name { $($field: $int),* }

        impl Keys for $name {
            type Key = $int;
            const LOWEST: $int = $int::MIN;

            #[inline(always)]
            fn key(self, $v: $int) -> $int { let $s = self; $key }

            fn row(self, path: CpuPath, x: &[$int]) -> u32 {
                dispatch! {
                    fn run(keys: $name, x: &[$int]) -> u32 = row_body::<$name>;
                }
                run(path, self, x)
            }

            fn columns(self, path: CpuPath, x: &[$int], k: usize, first: usize, out: &mut [u32]) {
                dispatch! {
                    fn run(keys: $name, x: &[$int], k: usize, first: usize, out: &mut [u32]) = columns_body::<$name>;
                }
                run(path, self, x, k, first, out);
            }
        }
    )*};
}

// An integer's lowest key is never above the start; place 0 is the right answer then too.
keys! {
    Truth { flip }: i8, |s, v| i8::from(v != 0) ^ s.flip;
    Int8 { flip }: i8, |s, v| v ^ s.flip;
    Int16 { flip }: i16, |s, v| v ^ s.flip;
    Int32 { flip }: i32, |s, v| v ^ s.flip;
    Int64 { flip }: i64, |s, v| v ^ s.flip;
    Half { flip, infinity }: i16, |s, v| order16(v, s.infinity, s.flip);
    Single { flip }: i32, |s, v| order32(v, F32_INFINITY, s.flip);
    Double { flip }: i64, |s, v| order64(v, F64_INFINITY, s.flip);
}

struct Arg<K: Keys> {
    keys: K,
    op: &'static str,
    x: Reg,
    out: Reg,
    dims: Vec<Dim>,
    axis: usize,
}

impl<K: Keys> Kernel for Arg<K> {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let (outer, n, k) = around(&self.dims, self.axis, run.rows);
        if n == 0 && outer * k > 0 && part == 0 {
            run.fail(DeviceError::Undefined {
                op: self.op,
                why: "an axis without elements has none",
            });
        }
        if n * k == 0 {
            return;
        }
        // Columns are apart, so their tiles may be as the threads like them.
        let tile = match outer * k.div_ceil(TILE) < 2 * parts {
            true => k.div_ceil(parts).next_multiple_of(64).min(TILE),
            false => TILE,
        };
        let tiles = k.div_ceil(tile);
        let worth = (16 << 10) / n.saturating_mul(k.min(tile));
        let range = split_if_worth(outer * tiles, 1, worth.max(2), part, parts);
        // SAFETY: the specs say this size.
        let x = unsafe { run.slice::<K::Key>(self.x, outer * n * k) };
        for item in range {
            let (o, first) = (item / tiles, item % tiles * tile);
            let width = tile.min(k - first);
            let at = o * k + first;
            // SAFETY: every item has results of its own.
            let out = unsafe { run.slice_mut::<u32>(self.out, at..at + width) };
            let x = &x[o * n * k..][..n * k];
            if k == 1 {
                out[0] = self.keys.row(run.path, x);
            } else {
                self.keys.columns(run.path, x, k, first, out);
            }
        }
    }
}

fn fits(call: &Call<'_>) -> bool {
    ordered(call)
}

fn argmax(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    arg(launcher, call, ins, outs, 0)
}

fn argmin(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    arg(launcher, call, ins, outs, -1)
}

/// `flip`: 0 for the largest, −1 for the smallest element.
fn arg(
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
    let axis = normal_axis(call.int(0)?, t.shape.rank()).ok_or_else(|| unsupported(call))?;
    let longest = t.shape.dims().get(axis).map(|d| d.at(launcher.max_rows));
    if longest.is_none_or(|n| u32::try_from(n).is_err()) {
        return Err(unsupported(call));
    }
    fn step<K: Keys>(
        launcher: &mut Launcher,
        (x, out): (Reg, Reg),
        call: &Call<'_>,
        axis: usize,
        keys: K,
    ) -> Result<(), DeviceError> {
        let kernel = Arg {
            keys,
            op: call.op.name,
            x,
            out,
            dims: call.tensor(0)?.shape.dims().to_vec(),
            axis,
        };
        launcher.step(kernel, &[x], &[out]);
        Ok(())
    }
    let (f8, f16, f32, f64) = (flip, i16::from(flip), i32::from(flip), i64::from(flip));
    let half = |infinity| Half {
        flip: f16,
        infinity,
    };
    let at = (x, out);
    match t.dtype {
        DType::Bool => step(launcher, at, call, axis, Truth { flip: f8 }),
        DType::U8 => step(launcher, at, call, axis, Int8 { flip: f8 ^ i8::MIN }),
        DType::I8 => step(launcher, at, call, axis, Int8 { flip: f8 }),
        DType::U16 => step(
            launcher,
            at,
            call,
            axis,
            Int16 {
                flip: f16 ^ i16::MIN,
            },
        ),
        DType::I16 => step(launcher, at, call, axis, Int16 { flip: f16 }),
        DType::U32 => step(
            launcher,
            at,
            call,
            axis,
            Int32 {
                flip: f32 ^ i32::MIN,
            },
        ),
        DType::I32 => step(launcher, at, call, axis, Int32 { flip: f32 }),
        DType::U64 => step(
            launcher,
            at,
            call,
            axis,
            Int64 {
                flip: f64 ^ i64::MIN,
            },
        ),
        DType::I64 => step(launcher, at, call, axis, Int64 { flip: f64 }),
        DType::F16 => step(launcher, at, call, axis, half(F16_INFINITY)),
        DType::BF16 => step(launcher, at, call, axis, half(BF16_INFINITY)),
        DType::F32 => step(launcher, at, call, axis, Single { flip: f32 }),
        DType::F64 => step(launcher, at, call, axis, Double { flip: f64 }),
        _ => Err(unsupported(call)),
    }
}

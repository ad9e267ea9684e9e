//! Pooling: the greatest element or the mean of each window.

use half::{bf16, f16};
use hotcell_graph::{DType, op::Call};

use super::{Entry, split_if_worth, unsupported, window::Windows};
use crate::{
    backend::DeviceError,
    cpu::{
        gemm::{Element, Number},
        plan::{Kernel, Launcher, Reg, Run},
    },
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[Entry {
    op: "pool",
    supports: fits,
    launch: pool,
}];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Max,
    Average,
    AverageValid,
}

struct Pool {
    x: Reg,
    out: Reg,
    windows: Windows,
    kind: Kind,
}

fn parts_of(call: &Call<'_>) -> Option<(Windows, Kind)> {
    let kind = match call.name(0).ok()? {
        "max" => Kind::Max,
        "average" => Kind::Average,
        "average_valid" => Kind::AverageValid,
        _ => return None,
    };
    let window = call.ints(1).ok()?.iter().map(|&n| usize::try_from(n));
    let window = window.collect::<Result<Vec<_>, _>>().ok()?;
    let windows = Windows::of(call, &window, 2)?;
    (call.name(6).ok()? == "channels_first").then_some((windows, kind))
}

fn fits(call: &Call<'_>) -> bool {
    use DType::*;
    let float = |dtype| matches!(dtype, F32 | F64 | F16 | BF16);
    let int = |dtype| matches!(dtype, U8 | U16 | U32 | U64 | I8 | I16 | I32 | I64);
    parts_of(call).is_some_and(|(w, kind)| float(w.dtype) || kind == Kind::Max && int(w.dtype))
}

impl Pool {
    /// Gives `each` the places in `x` of every window of this part, and takes the result. Windows come with the
    /// number of places; places are ascending.
    ///
    /// # Safety
    ///
    /// As for [`Kernel::run`], and `T` is the dtype.
    unsafe fn windows<T: Copy + 'static, S>(
        &self,
        run: &Run<'_>,
        (part, parts): (usize, usize),
        start: S,
        add: impl Fn(S, T) -> S,
        end: impl Fn(S, f64) -> T,
    ) where
        S: Copy,
    {
        let (plane, plane_out) = (self.windows.plane(), self.windows.plane_out());
        let [a, b, c] = &self.windows.axes;
        let planes = self.windows.batch.at(run.rows) * self.windows.channels;
        let range = split_if_worth(planes * plane_out, 16, 2048, part, parts);
        // SAFETY: sizes as the specs say; parts write ranges of their own.
        let (x, out) = unsafe {
            (
                run.slice::<T>(self.x, planes * plane),
                run.slice_mut::<T>(self.out, range.clone()),
            )
        };
        let all = a.window as f64 * b.window as f64 * c.window as f64;
        for (i, out) in range.zip(out) {
            if run.stopped() {
                return;
            }
            let x = &x[i / plane_out * plane..][..plane];
            let [oa, ob, oc] = self.windows.place(i % plane_out);
            let (ta, tb, tc) = (a.taps(oa), b.taps(ob), c.taps(oc));
            let valid = (ta.len() * tb.len() * tc.len()) as f64;
            let at = |start: i64, tap: usize, dilation: usize| {
                (start + (tap * dilation) as i64) as usize
            };
            let mut state = start;
            for t in ta {
                let row = at(a.start(oa), t, a.dilation) * b.size;
                for t in tb.clone() {
                    let row = (row + at(b.start(ob), t, b.dilation)) * c.size;
                    for t in tc.clone() {
                        state = add(state, x[row + at(c.start(oc), t, c.dilation)]);
                    }
                }
            }
            let count = if self.kind == Kind::AverageValid {
                valid
            } else {
                all
            };
            *out = end(state, count);
        }
    }

    /// # Safety
    ///
    /// As for [`Kernel::run`], and `T` is the dtype.
    unsafe fn float<T: Element>(&self, run: &Run<'_>, part: (usize, usize)) {
        let max = |a: T::Sum, x: T| {
            let x = x.widen();
            if a > x || a.is_nan() { a } else { x }
        };
        let sum = |a: T::Sum, x: T| a + x.widen();
        // SAFETY: the caller's promise.
        unsafe {
            match self.kind {
                Kind::Max => {
                    self.windows(run, part, T::Sum::LEAST, max, |a, _| T::narrow(a.one_nan()))
                }
                _ => self.windows(run, part, T::Sum::ZERO, sum, |a, count| {
                    T::narrow((a / T::Sum::from_f64(count)).one_nan())
                }),
            }
        }
    }

    /// # Safety
    ///
    /// As for [`Kernel::run`], and `T` is the dtype; `least` its least value.
    unsafe fn int<T: Copy + Ord + 'static>(&self, run: &Run<'_>, part: (usize, usize), least: T) {
        // SAFETY: the caller's promise.
        unsafe { self.windows(run, part, least, T::max, |a, _| a) }
    }
}

impl Kernel for Pool {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let part = (part, parts);
        // SAFETY: the caller's promise.
        unsafe {
            match self.windows.dtype {
                DType::F32 => self.float::<f32>(run, part),
                DType::F64 => self.float::<f64>(run, part),
                DType::F16 => self.float::<f16>(run, part),
                DType::BF16 => self.float::<bf16>(run, part),
                DType::U8 => self.int(run, part, u8::MIN),
                DType::U16 => self.int(run, part, u16::MIN),
                DType::U32 => self.int(run, part, u32::MIN),
                DType::U64 => self.int(run, part, u64::MIN),
                DType::I8 => self.int(run, part, i8::MIN),
                DType::I16 => self.int(run, part, i16::MIN),
                DType::I32 => self.int(run, part, i32::MIN),
                DType::I64 => self.int(run, part, i64::MIN),
                // `fits` accepts no other.
                _ => {}
            }
        }
    }
}

fn pool(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (Some((windows, kind)), &[x], &[out]) = (parts_of(call), ins, outs) else {
        return Err(unsupported(call));
    };
    let kernel = Pool {
        x,
        out,
        windows,
        kind,
    };
    launcher.step(kernel, &[x], &[out]);
    Ok(())
}

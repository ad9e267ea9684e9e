//! Whether tensors are equal, or nearly: one pass over both, without the steps in between.

use hotcell_graph::{
    DType, Shape, TensorSpec,
    dtype::Kind,
    op::{Call, ValueSpec},
};

use super::{Entry, split_if_worth, unsupported};
use crate::{
    backend::DeviceError,
    cpu::{
        lanes::{bf16_to_f32, dispatch, f16_to_f32},
        path::CpuPath,
        plan::{Kernel, Launcher, Reg, Run},
    },
};

/// What this file has kernels for. Other dtypes and shapes are decomposed.
pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "is_close",
        supports: floats_fit,
        launch: is_close,
    },
    Entry {
        op: "all_close",
        supports: floats_fit,
        launch: all_close,
    },
    Entry {
        op: "array_equal",
        supports: equal_fits,
        launch: array_equal,
    },
];

/// Elements below which one thread does it all.
const WORTH: usize = 16 << 10;

/// Elements between two looks at whether more is to be known.
const CHUNK: usize = 8 << 10;

/// How far apart close numbers may be: `atol + rtol |b|`.
#[derive(Clone, Copy)]
struct Within {
    rtol: f32,
    atol: f32,
    equal_nan: bool,
}

/// Equality, which this is without any tolerance.
const EQUAL: Within = Within {
    rtol: 0.0,
    atol: 0.0,
    equal_nan: false,
};

#[inline(always)]
fn close(a: f32, b: f32, within: Within) -> bool {
    let near = (a - b).abs() <= b.abs() * within.rtol + within.atol;
    // Everything would be near an infinity, whose tolerance is infinite.
    let near = near & (b.abs() < f32::INFINITY);
    near | (a == b) | (within.equal_nan & a.is_nan() & b.is_nan())
}

#[inline(always)]
fn each_body<T: Copy>(load: impl Fn(T) -> f32, a: &[T], b: &[T], within: Within, out: &mut [u8]) {
    for ((a, b), o) in a.iter().zip(b).zip(out) {
        *o = close(load(*a), load(*b), within).into();
    }
}

#[inline(always)]
fn all_body<T: Copy>(load: impl Fn(T) -> f32, a: &[T], b: &[T], within: Within) -> bool {
    let mut apart = 0;
    for (a, b) in a.iter().zip(b) {
        apart |= u32::from(!close(load(*a), load(*b), within));
    }
    apart == 0
}

/// Elements that are compared.
trait Compared: Copy + Send + Sync + 'static {
    type Of: Copy;
    fn each(path: CpuPath, a: &[Self::Of], b: &[Self::Of], within: Within, out: &mut [u8]);
    fn all(path: CpuPath, a: &[Self::Of], b: &[Self::Of], within: Within) -> bool;
}

macro_rules! compared {
    ($($name:ident: $of:ty, $load:expr;)*) => {$(
        #[derive(Clone, Copy)]
        struct $name;

        impl Compared for $name {
            type Of = $of;

            fn each(path: CpuPath, a: &[$of], b: &[$of], within: Within, out: &mut [u8]) {
                #[inline(always)]
                fn body(a: &[$of], b: &[$of], within: Within, out: &mut [u8]) {
                    each_body($load, a, b, within, out);
                }
                dispatch! {
                    fn run(a: &[$of], b: &[$of], within: Within, out: &mut [u8]) = body;
                }
                run(path, a, b, within, out);
            }

            fn all(path: CpuPath, a: &[$of], b: &[$of], within: Within) -> bool {
                #[inline(always)]
                fn body(a: &[$of], b: &[$of], within: Within) -> bool {
                    all_body($load, a, b, within)
                }
                dispatch! {
                    fn run(a: &[$of], b: &[$of], within: Within) -> bool = body;
                }
                run(path, a, b, within)
            }
        }
    )*};
}

fn same(v: f32) -> f32 {
    v
}

compared! {
    Single: f32, same;
    Half: u16, f16_to_f32;
    Brain: u16, bf16_to_f32;
}

/// Bytes, which are equal or not.
#[derive(Clone, Copy)]
struct Bytes;

impl Compared for Bytes {
    type Of = u8;

    fn each(_: CpuPath, a: &[u8], b: &[u8], _: Within, out: &mut [u8]) {
        for ((a, b), o) in a.iter().zip(b).zip(out) {
            *o = (a == b).into();
        }
    }

    fn all(_: CpuPath, a: &[u8], b: &[u8], _: Within) -> bool {
        a == b
    }
}

struct Compare<C: Compared> {
    _compared: C,
    a: Reg,
    b: Reg,
    out: Reg,
    shape: Shape,
    /// Numbers that make an element.
    per_element: usize,
    within: Within,
    /// One answer per part, not one per element.
    all: bool,
}

impl<C: Compared> Kernel for Compare<C> {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let n = self.shape.elements(run.rows).unwrap_or(0) * self.per_element;
        let range = split_if_worth(n, 64, WORTH, part, parts);
        // SAFETY: the specs say these sizes.
        let (a, b) = unsafe { (run.slice::<C::Of>(self.a, n), run.slice::<C::Of>(self.b, n)) };
        let mut all = true;
        for start in range.clone().step_by(CHUNK) {
            let chunk = start..range.end.min(start + CHUNK);
            let (a, b) = (&a[chunk.clone()], &b[chunk.clone()]);
            if run.stopped() {
                return;
            }
            if self.all {
                all = C::all(run.path, a, b, self.within);
            } else {
                // SAFETY: parts write elements of their own.
                let out = unsafe { run.slice_mut::<u8>(self.out, chunk) };
                C::each(run.path, a, b, self.within, out);
            }
            if !all {
                break;
            }
        }
        if self.all {
            // SAFETY: the launch made it of one byte per part.
            unsafe { run.slice_mut::<u8>(self.out, part..part + 1)[0] = all.into() };
        }
    }
}

/// Whether all parts say so.
struct Agree {
    answers: Reg,
    out: Reg,
}

impl Kernel for Agree {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        if part == 0 {
            // SAFETY: one byte per part, and the result's only one.
            let (answers, out) = unsafe {
                (
                    run.slice::<u8>(self.answers, parts),
                    run.slice_mut::<u8>(self.out, 0..1),
                )
            };
            out[0] = answers.iter().all(|a| *a != 0).into();
        }
    }
}

/// The spec of two tensors that need neither casts nor a broadcast.
fn alike<'a>(call: &Call<'a>) -> Option<&'a TensorSpec> {
    match call.inputs {
        [ValueSpec::Tensor(a), ValueSpec::Tensor(b)] if a == b => Some(a),
        _ => None,
    }
}

fn is_narrow_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

fn floats_fit(call: &Call<'_>) -> bool {
    alike(call).is_some_and(|t| is_narrow_float(t.dtype))
}

fn equal_fits(call: &Call<'_>) -> bool {
    // Any byte but 0 is true, so bytes say nothing about bool.
    alike(call).is_some_and(|t| {
        is_narrow_float(t.dtype) || matches!(t.dtype.kind(), Kind::Signed | Kind::Unsigned)
    })
}

fn is_close(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    compare(launcher, call, ins, outs, tolerance(call)?, false)
}

fn all_close(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    compare(launcher, call, ins, outs, tolerance(call)?, true)
}

fn array_equal(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let equal_nan = call.bool(0)?;
    let within = Within { equal_nan, ..EQUAL };
    compare(launcher, call, ins, outs, within, true)
}

fn tolerance(call: &Call<'_>) -> Result<Within, DeviceError> {
    Ok(Within {
        rtol: call.float(0)? as f32,
        atol: call.float(1)? as f32,
        equal_nan: call.bool(2)?,
    })
}

fn compare(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
    within: Within,
    all: bool,
) -> Result<(), DeviceError> {
    let (Some(t), &[a, b], &[result]) = (alike(call), ins, outs) else {
        return Err(unsupported(call));
    };
    let out = match all {
        true => launcher.scratch(launcher.parts.max(1)),
        false => result,
    };
    fn step<C: Compared>(launcher: &mut Launcher, compare: Compare<C>) {
        let (a, b, out) = (compare.a, compare.b, compare.out);
        launcher.step(compare, &[a, b], &[out]);
    }
    macro_rules! step {
        ($compared:ident, $per_element:expr) => {
            step(
                launcher,
                Compare {
                    _compared: $compared,
                    a,
                    b,
                    out,
                    shape: t.shape.clone(),
                    per_element: $per_element,
                    within,
                    all,
                },
            )
        };
    }
    match t.dtype {
        DType::F32 => step!(Single, 1),
        DType::F16 => step!(Half, 1),
        DType::BF16 => step!(Brain, 1),
        dtype => step!(Bytes, dtype.block_bytes()),
    }
    if all {
        let agree = Agree {
            answers: out,
            out: result,
        };
        launcher.step(agree, &[out], &[result]);
    }
    Ok(())
}

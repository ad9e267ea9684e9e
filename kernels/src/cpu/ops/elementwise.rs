//! Elementwise kernels.

use hotcell_graph::{
    DType, Dim, Shape,
    op::{Call, ValueSpec},
};

use super::{Entry, split_if_worth, unsupported};
use crate::{
    backend::DeviceError,
    cpu::{
        lanes::{dispatch, exp},
        plan::{Kernel, Launcher, Reg, Run},
    },
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "add",
        supports: binary_fits,
        launch: add,
    },
    Entry {
        op: "mul",
        supports: binary_fits,
        launch: mul,
    },
    Entry {
        op: "silu",
        supports: all_f32,
        launch: silu,
    },
    Entry {
        op: "swiglu",
        supports: all_f32,
        launch: swiglu,
    },
];

/// Elements below which one thread does it all.
const WORTH: usize = 4096;

/// How the second operand repeats: its dims are the innermost dims of the first.
fn is_suffix(of: &Shape, shape: &Shape) -> bool {
    let ones = shape
        .dims()
        .iter()
        .take_while(|d| **d == Dim::Fixed(1))
        .count();
    let dims = &shape.dims()[ones..];
    of.dims().ends_with(dims)
}

fn shapes<'a>(call: &Call<'a>) -> Option<(&'a Shape, &'a Shape)> {
    match call.inputs {
        [ValueSpec::Tensor(a), ValueSpec::Tensor(b)] => Some((&a.shape, &b.shape)),
        _ => None,
    }
}

/// Whether one operand repeats along the other as a whole.
fn binary_fits(call: &Call<'_>) -> bool {
    all_f32(call) && shapes(call).is_some_and(|(a, b)| is_suffix(a, b) || is_suffix(b, a))
}

fn all_f32(call: &Call<'_>) -> bool {
    let f32 = |s: &ValueSpec| matches!(s, ValueSpec::Tensor(t) if t.dtype == DType::F32);
    call.inputs.iter().all(f32)
}

#[derive(Clone, Copy)]
enum Binary {
    Add,
    Mul,
    SwiGlu,
}

#[inline(always)]
fn silu_of(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `out = a op b` for as many elements as `out` has.
#[inline(always)]
fn binary_body(op: Binary, a: &[f32], b: &[f32], out: &mut [f32]) {
    let pairs = a.iter().zip(b).zip(out);
    match op {
        Binary::Add => pairs.for_each(|((a, b), o)| *o = a + b),
        Binary::Mul => pairs.for_each(|((a, b), o)| *o = a * b),
        Binary::SwiGlu => pairs.for_each(|((a, b), o)| *o = silu_of(*a) * b),
    }
}

#[inline(always)]
fn silu_body(x: &[f32], out: &mut [f32]) {
    x.iter().zip(out).for_each(|(x, o)| *o = silu_of(*x));
}

dispatch! {
    fn binary_rows(op: Binary, a: &[f32], b: &[f32], out: &mut [f32]) = binary_body;
}
dispatch! {
    fn silu_rows(x: &[f32], out: &mut [f32]) = silu_body;
}

struct BinaryKernel {
    op: Binary,
    /// The operand with the result's shape.
    a: Reg,
    /// The one that repeats every `period` elements.
    b: Reg,
    out: Reg,
    shape: Shape,
    /// `None`: as many elements as the result.
    period: Option<usize>,
}

impl Kernel for BinaryKernel {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let n = self.shape.elements(run.rows).unwrap_or(0);
        let period = self.period.unwrap_or(n);
        if n == 0 || period == 0 {
            return;
        }
        let range = split_if_worth(n, 16, WORTH, part, parts);
        // SAFETY: both operands have the sizes their specs say; parts write ranges of their own.
        let (a, b, out) = unsafe {
            (
                run.slice(self.a, n),
                run.slice(self.b, period),
                run.slice_mut(self.out, range.clone()),
            )
        };
        let mut done = 0;
        while done < out.len() {
            let at = range.start + done;
            let place = at % period;
            let len = (period - place).min(out.len() - done);
            binary_rows(
                run.path,
                self.op,
                &a[at..at + len],
                &b[place..place + len],
                &mut out[done..done + len],
            );
            done += len;
        }
    }
}

fn binary(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
    op: Binary,
) -> Result<(), DeviceError> {
    let (Some((sa, sb)), &[a, b], &[out]) = (shapes(call), ins, outs) else {
        return Err(unsupported(call));
    };
    // Both orders give the same bits: addition and multiplication commute.
    let (a, sa, b, sb) = if is_suffix(sa, sb) {
        (a, sa, b, sb)
    } else {
        (b, sb, a, sa)
    };
    let period = if sa == sb { None } else { sb.elements(1) };
    launcher.step(
        BinaryKernel {
            op,
            a,
            b,
            out,
            shape: sa.clone(),
            period,
        },
        &[a, b],
        &[out],
    );
    Ok(())
}

fn add(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    binary(launcher, call, ins, outs, Binary::Add)
}

fn mul(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    binary(launcher, call, ins, outs, Binary::Mul)
}

fn swiglu(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    binary(launcher, call, ins, outs, Binary::SwiGlu)
}

struct Silu {
    x: Reg,
    out: Reg,
    shape: Shape,
}

impl Kernel for Silu {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let n = self.shape.elements(run.rows).unwrap_or(0);
        let range = split_if_worth(n, 16, WORTH, part, parts);
        // SAFETY: both have `n` elements; parts write ranges of their own.
        let (x, out) = unsafe { (run.slice(self.x, n), run.slice_mut(self.out, range.clone())) };
        silu_rows(run.path, &x[range], out);
    }
}

fn silu(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (Some(ValueSpec::Tensor(t)), &[x], &[out]) = (call.inputs.first(), ins, outs) else {
        return Err(unsupported(call));
    };
    launcher.step(
        Silu {
            x,
            out,
            shape: t.shape.clone(),
        },
        &[x],
        &[out],
    );
    Ok(())
}

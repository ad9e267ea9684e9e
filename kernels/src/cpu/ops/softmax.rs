//! Softmax and layer normalisation over the innermost axis, a row at a time.
//!
//! Sums go over sixteen lanes in ascending order, then over the fixed tree, so a row's bits depend on the row alone.

use hotcell_graph::{
    DType, Shape, TensorSpec,
    op::{Call, ValueSpec},
};

use super::{Entry, reductions::narrow_float, split_if_worth, unsupported};
use crate::{
    backend::DeviceError,
    cpu::{
        lanes::{
            LANES, bf16_to_f32, dispatch, exp, f16_to_f32, f32_to_bf16, f32_to_f16, max16, sum16,
        },
        plan::{Kernel, Launcher, Reg, Run},
    },
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "softmax",
        supports: softmax_fits,
        launch: softmax,
    },
    Entry {
        op: "log_softmax",
        supports: softmax_fits,
        launch: log_softmax,
    },
    Entry {
        op: "layer_norm",
        supports: layer_norm_fits,
        launch: layer_norm,
    },
];

/// Elements below which one thread does it all.
const WORTH: usize = 2048;

/// Folds a row into sixteen lanes.
#[inline(always)]
fn lanes<T: Copy>(x: &[T], start: f32, step: impl Fn(f32, T) -> f32) -> [f32; LANES] {
    let mut lanes = [start; LANES];
    let (chunks, tail) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane = step(*lane, *v);
        }
    }
    for (lane, v) in lanes.iter_mut().zip(tail) {
        *lane = step(*lane, *v);
    }
    lanes
}

/// The largest of a row, which may lose a NaN: the sum of exponentials does not.
#[inline(always)]
fn largest<T: Copy>(x: &[T], load: impl Fn(T) -> f32) -> f32 {
    let step = |a: f32, b: T| {
        let b = load(b);
        if a > b { a } else { b }
    };
    max16(lanes(x, f32::NEG_INFINITY, step))
}

#[inline(always)]
fn softmax_body(x: &[f32], n: usize, out: &mut [f32]) {
    for (x, out) in x.chunks_exact(n).zip(out.chunks_exact_mut(n)) {
        let most = largest(x, |v| v);
        for (x, o) in x.iter().zip(&mut *out) {
            *o = exp(x - most);
        }
        let sum = sum16(lanes(out, 0.0, |a, b| a + b));
        if sum.is_nan() {
            out.fill(f32::NAN);
            continue;
        }
        for o in out {
            *o /= sum;
        }
    }
}

#[inline(always)]
fn log_softmax_body(x: &[f32], n: usize, out: &mut [f32]) {
    for (x, out) in x.chunks_exact(n).zip(out.chunks_exact_mut(n)) {
        let most = largest(x, |v| v);
        let sum = sum16(lanes(x, 0.0, |a, b| a + exp(b - most)));
        if sum.is_nan() {
            out.fill(f32::NAN);
            continue;
        }
        let log = libm::logf(sum);
        for (x, o) in x.iter().zip(out) {
            *o = (x - most) - log;
        }
    }
}

/// Softmax of sixteen-bit floats, or its logarithm, rounded once: what does not fit the result is computed again.
#[inline(always)]
fn half_body(
    (load, store): (impl Fn(u16) -> f32 + Copy, impl Fn(f32) -> u16),
    x: &[u16],
    n: usize,
    log: bool,
    out: &mut [u16],
) {
    for (x, out) in x.chunks_exact(n).zip(out.chunks_exact_mut(n)) {
        let most = largest(x, load);
        let sum = sum16(lanes(x, 0.0, |a, b| a + exp(load(b) - most)));
        if sum.is_nan() {
            out.fill(store(f32::NAN));
            continue;
        }
        let under = if log { libm::logf(sum) } else { sum };
        for (x, o) in x.iter().zip(out) {
            let down = load(*x) - most;
            *o = store(if log { down - under } else { exp(down) / under });
        }
    }
}

#[inline(always)]
fn f16_body(x: &[u16], n: usize, log: bool, out: &mut [u16]) {
    half_body((f16_to_f32, f32_to_f16), x, n, log, out);
}

#[inline(always)]
fn bf16_body(x: &[u16], n: usize, log: bool, out: &mut [u16]) {
    half_body((bf16_to_f32, f32_to_bf16), x, n, log, out);
}

/// Absent weights and biases are empty.
#[inline(always)]
fn layer_norm_body(x: &[f32], n: usize, weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) {
    for (x, out) in x.chunks_exact(n).zip(out.chunks_exact_mut(n)) {
        let near = sum16(lanes(x, 0.0, |a, b| a + b)) / n as f32;
        // Far from zero the sum has lost what the differences from it still show.
        let mean = near + sum16(lanes(x, 0.0, |a, b| a + (b - near))) / n as f32;
        let squares = lanes(x, 0.0, |a, b| (b - mean).mul_add(b - mean, a));
        let scale = 1.0 / (sum16(squares) / n as f32 + eps).sqrt();
        if scale.is_nan() {
            out.fill(f32::NAN);
            continue;
        }
        for (x, o) in x.iter().zip(&mut *out) {
            *o = (x - mean) * scale;
        }
        for (o, w) in out.iter_mut().zip(weight) {
            *o *= w;
        }
        for (o, b) in out.iter_mut().zip(bias) {
            *o += b;
        }
    }
}

dispatch! {
    fn softmax_rows(x: &[f32], n: usize, out: &mut [f32]) = softmax_body;
}
dispatch! {
    fn log_softmax_rows(x: &[f32], n: usize, out: &mut [f32]) = log_softmax_body;
}
dispatch! {
    fn f16_rows(x: &[u16], n: usize, log: bool, out: &mut [u16]) = f16_body;
}
dispatch! {
    fn bf16_rows(x: &[u16], n: usize, log: bool, out: &mut [u16]) = bf16_body;
}
dispatch! {
    fn layer_norm_rows(x: &[f32], n: usize, weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) = layer_norm_body;
}

/// What is done to each row.
enum Rows {
    Softmax,
    LogSoftmax,
    LayerNorm {
        weight: Option<Reg>,
        bias: Option<Reg>,
        eps: f32,
    },
}

/// Softmax of rows of sixteen-bit floats.
struct OverHalfRows {
    x: Reg,
    out: Reg,
    shape: Shape,
    n: usize,
    brain: bool,
    log: bool,
}

impl Kernel for OverHalfRows {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let elements = self.shape.elements(run.rows).unwrap_or(0);
        let range = split_if_worth(elements, self.n, WORTH, part, parts);
        // SAFETY: the specs say these sizes; parts write rows of their own.
        let (x, out) = unsafe {
            (
                run.slice::<u16>(self.x, elements),
                run.slice_mut::<u16>(self.out, range.clone()),
            )
        };
        let rows = if self.brain { bf16_rows } else { f16_rows };
        rows(run.path, &x[range], self.n, self.log, out);
    }
}

struct OverRows {
    x: Reg,
    out: Reg,
    shape: Shape,
    n: usize,
    rows: Rows,
}

impl Kernel for OverRows {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let n = self.n;
        let elements = self.shape.elements(run.rows).unwrap_or(0);
        let range = split_if_worth(elements, n, WORTH, part, parts);
        // SAFETY: the specs say these sizes; parts write rows of their own.
        let (x, out) = unsafe {
            (
                run.slice::<f32>(self.x, elements),
                run.slice_mut::<f32>(self.out, range.clone()),
            )
        };
        let x = &x[range];
        match self.rows {
            Rows::Softmax => softmax_rows(run.path, x, n, out),
            Rows::LogSoftmax => log_softmax_rows(run.path, x, n, out),
            Rows::LayerNorm { weight, bias, eps } => {
                let vector = |reg: Option<Reg>| match reg {
                    // SAFETY: as above.
                    Some(reg) => unsafe { run.slice::<f32>(reg, n) },
                    None => &[],
                };
                layer_norm_rows(run.path, x, n, vector(weight), vector(bias), eps, out);
            }
        }
    }
}

/// A tensor and the size of its innermost axis, if that has elements.
fn any_rows_of<'a>(call: &Call<'a>) -> Option<(&'a TensorSpec, usize)> {
    let Some(ValueSpec::Tensor(x)) = call.inputs.first() else {
        return None;
    };
    let n = x.shape.inner().filter(|n| *n > 0 && x.shape.rank() > 0)?;
    Some((x, n))
}

/// The same of an f32 tensor.
fn rows_of<'a>(call: &Call<'a>) -> Option<(&'a TensorSpec, usize)> {
    any_rows_of(call).filter(|(x, _)| x.dtype == DType::F32)
}

fn softmax_fits(call: &Call<'_>) -> bool {
    let axis = call.int(0).unwrap_or(0);
    let last = |x: &TensorSpec| axis == -1 || axis == x.shape.rank() as i64 - 1;
    narrow_float(call) && any_rows_of(call).is_some_and(|(x, _)| last(x))
}

fn layer_norm_fits(call: &Call<'_>) -> bool {
    let vector = |spec: &ValueSpec| match spec {
        ValueSpec::Tensor(t) => t.dtype == DType::F32,
        ValueSpec::Absent => true,
        ValueSpec::Cache(_) => false,
    };
    rows_of(call).is_some() && call.inputs.iter().all(vector)
}

/// Adds the step for sixteen-bit floats, if it is those.
fn half_rows(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
    log: bool,
) -> Option<()> {
    let (Some((t, n)), &[x], &[out]) = (any_rows_of(call), ins, outs) else {
        return None;
    };
    let brain = match t.dtype {
        DType::F16 => false,
        DType::BF16 => true,
        _ => return None,
    };
    let kernel = OverHalfRows {
        x,
        out,
        shape: t.shape.clone(),
        n,
        brain,
        log,
    };
    launcher.step(kernel, &[x], &[out]);
    Some(())
}

fn over_rows(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
    rows: Rows,
) -> Result<(), DeviceError> {
    let (Some((x, n)), Some(&reg), &[out]) = (rows_of(call), ins.first(), outs) else {
        return Err(unsupported(call));
    };
    let kernel = OverRows {
        x: reg,
        out,
        shape: x.shape.clone(),
        n,
        rows,
    };
    let given = ins.iter().copied().filter(|reg| *reg != Reg::ABSENT);
    launcher.step(kernel, &given.collect::<Vec<_>>(), &[out]);
    Ok(())
}

fn softmax(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    match half_rows(launcher, call, ins, outs, false) {
        Some(()) => Ok(()),
        None => over_rows(launcher, call, ins, outs, Rows::Softmax),
    }
}

fn log_softmax(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    match half_rows(launcher, call, ins, outs, true) {
        Some(()) => Ok(()),
        None => over_rows(launcher, call, ins, outs, Rows::LogSoftmax),
    }
}

fn layer_norm(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let given = |i: usize| ins.get(i).copied().filter(|reg| *reg != Reg::ABSENT);
    let rows = Rows::LayerNorm {
        weight: given(1),
        bias: given(2),
        eps: call.float(0)? as f32,
    };
    over_rows(launcher, call, ins, outs, rows)
}

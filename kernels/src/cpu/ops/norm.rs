//! Normalisation kernels.

use hotcell_graph::{
    DType, Shape,
    op::{Call, ValueSpec},
};

use super::{Entry, split_if_worth, stays, unsupported};
use crate::{
    backend::DeviceError,
    cpu::{
        lanes::{LANES, dispatch, sum16},
        plan::{Kernel, Launcher, Reg, Run},
    },
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[Entry {
    op: "rms_norm",
    supports: fits,
    launch: rms_norm,
}];

/// `x` f32 with a weight, f32 too.
fn fits(call: &Call<'_>) -> bool {
    matches!(
        call.inputs,
        [ValueSpec::Tensor(x), ValueSpec::Tensor(weight)]
            if x.dtype == DType::F32 && weight.dtype == DType::F32
    )
}

/// The sum of squares: lane `i mod 16` by fma in ascending order, lanes by the fixed tree. A tail is
/// padded with zeros, which change no lane.
#[inline(always)]
fn sum_of_squares(x: &[f32]) -> f32 {
    let mut sums = [0.0f32; LANES];
    let (chunks, tail) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (s, v) in sums.iter_mut().zip(chunk) {
            *s = v.mul_add(*v, *s);
        }
    }
    for (s, v) in sums.iter_mut().zip(tail) {
        *s = v.mul_add(*v, *s);
    }
    sum16(sums)
}

#[inline(always)]
fn rms_norm_body(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let n = weight.len();
    for (x, out) in x.chunks_exact(n).zip(out.chunks_exact_mut(n)) {
        let scale = 1.0 / (sum_of_squares(x) / n as f32 + eps).sqrt();
        for ((x, w), o) in x.iter().zip(weight).zip(out) {
            *o = x * scale * w;
        }
    }
}

dispatch! {
    fn rms_norm_rows(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) = rms_norm_body;
}

/// Elements that are worth sharing out.
const WORTH: usize = 2048;

struct RmsNorm {
    x: Reg,
    weight: Reg,
    out: Reg,
    shape: Shape,
    n: usize,
    eps: f32,
}

impl Kernel for RmsNorm {
    fn is_alone(&self, rows: usize) -> bool {
        stays(self.shape.elements(rows).unwrap_or(0), self.n, WORTH)
    }

    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let elements = self.shape.elements(run.rows).unwrap_or(0);
        let range = split_if_worth(elements, self.n, WORTH, part, parts);
        // SAFETY: the specs say these sizes; parts write rows of their own.
        let (x, w, out) = unsafe {
            (
                run.slice(self.x, elements),
                run.slice(self.weight, self.n),
                run.slice_mut(self.out, range.clone()),
            )
        };
        rms_norm_rows(run.path, &x[range], w, self.eps, out);
    }
}

fn rms_norm(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (Some(ValueSpec::Tensor(t)), &[x, weight], &[out]) = (call.inputs.first(), ins, outs)
    else {
        return Err(unsupported(call));
    };
    let n = t
        .shape
        .inner()
        .filter(|n| *n > 0)
        .ok_or_else(|| unsupported(call))?;
    let eps = call.float(0)? as f32;
    launcher.step(
        RmsNorm {
            x,
            weight,
            out,
            shape: t.shape.clone(),
            n,
            eps,
        },
        &[x, weight],
        &[out],
    );
    Ok(())
}

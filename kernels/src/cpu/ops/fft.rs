//! Fourier transforms along an axis, by rustfft's portable code: what it chooses depends on the length alone, so that the bits
//! are the same on every instruction path and for any number of threads.

use std::sync::Arc;

use hotcell_graph::{
    DType, Dim,
    op::{Call, rules::normal_axis},
};
use rustfft::{Fft, FftDirection, FftPlannerScalar, num_complex::Complex32};

use super::{Entry, split_if_worth, strided::around, unsupported};
use crate::{
    backend::DeviceError,
    cpu::plan::{Kernel, Launcher, Reg, Run},
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[Entry {
    op: "fft",
    supports: fits,
    launch: fft,
}];

/// Elements below which one thread does it all.
const WORTH: usize = 4096;

struct Transform {
    x: Reg,
    out: Reg,
    dims: Vec<Dim>,
    axis: usize,
    plan: Arc<dyn Fft<f32>>,
    /// What each result is multiplied by.
    factor: f32,
}

impl Kernel for Transform {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let (outer, n, k) = around(&self.dims, self.axis, run.rows);
        let lines = outer.saturating_mul(k);
        if lines == 0 || n != self.plan.len() {
            return;
        }
        let all = n + self.plan.get_inplace_scratch_len();
        // SAFETY: the launch asked for so many bytes per part, in pieces that are multiples of a cache line.
        let memory =
            unsafe { std::slice::from_raw_parts_mut(run.workspace(part).cast::<Complex32>(), all) };
        let (line, scratch) = memory.split_at_mut(n);
        for at in split_if_worth(lines, 1, (WORTH / n).max(2), part, parts) {
            if run.stopped() {
                return;
            }
            let first = at / k * n * k + at % k;
            let from = run.pointer(self.x).cast::<Complex32>().wrapping_add(first);
            let to = run
                .pointer(self.out)
                .cast::<Complex32>()
                .wrapping_add(first);
            for (i, value) in line.iter_mut().enumerate() {
                // SAFETY: the specs say that the line's elements lie there; c64 is two f32.
                *value = unsafe { from.wrapping_add(i * k).read() };
            }
            self.plan.process_with_scratch(line, scratch);
            for (i, value) in line.iter().enumerate() {
                // SAFETY: as above; every line has results of its own.
                unsafe { to.wrapping_add(i * k).write(value * self.factor) };
            }
        }
    }
}

fn fits(call: &Call<'_>) -> bool {
    call.tensor_of(0, DType::C64).is_ok()
}

fn fft(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (&[x], &[out]) = (ins, outs) else {
        return Err(unsupported(call));
    };
    let dims = call.tensor(0)?.shape.dims().to_vec();
    let axis = normal_axis(call.int(0)?, dims.len()).ok_or_else(|| unsupported(call))?;
    let n = match dims.get(axis) {
        Some(Dim::Fixed(n)) => *n,
        _ => return Err(unsupported(call)),
    };
    let (direction, factor) = match call.bool(1)? {
        false => (FftDirection::Forward, 1.0),
        true => (FftDirection::Inverse, 1.0 / n as f32),
    };
    let plan = FftPlannerScalar::new().plan_fft(n, direction);
    let elements = n + plan.get_inplace_scratch_len();
    launcher.workspace((elements * size_of::<Complex32>()).next_multiple_of(64));
    let kernel = Transform {
        x,
        out,
        dims,
        axis,
        plan,
        factor,
    };
    launcher.step(kernel, &[x], &[out]);
    Ok(())
}

//! Running log-sum-exp of f32.
//!
//! Each sequence keeps the greatest element so far and the sum of exponentials below that, with what rounding has
//! taken off it (W. Kahan), and goes from element to element: the bits depend on its elements alone. Sequences run
//! side by side; where they lie one after the other in memory, some of each are brought side by side first.

use hotcell_graph::{
    DType, Dim,
    op::{Call, rules::normal_axis},
};

use super::{
    Entry, split_if_worth,
    strided::{Axis, around, copy},
    unsupported,
};
use crate::{
    backend::DeviceError,
    cpu::{
        lanes::{dispatch, exp},
        math::Real,
        path::CpuPath,
        plan::{Kernel, Launcher, Reg, Run},
    },
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[Entry {
    op: "logcumsumexp",
    supports: fits,
    launch: logcumsumexp,
}];

/// Elements below which one thread does it all.
const WORTH: usize = 4 << 10;

/// Sequences side by side at most.
const WIDE: usize = 256;

/// Neighbours in memory from which sequences are side by side already.
const BESIDE: usize = 16;

/// Sequences that are brought side by side, and elements of each at a time: both ways fit the nearest cache.
const BROUGHT: usize = 64;
const DEEP: usize = 64;

/// The running values of sequences.
struct State {
    most: [f32; WIDE],
    sum: [f32; WIDE],
    lost: [f32; WIDE],
}

impl State {
    const NOTHING: Self = Self {
        most: [f32::NEG_INFINITY; WIDE],
        sum: [0.0; WIDE],
        lost: [0.0; WIDE],
    };
}

/// Takes in one more element of each sequence.
#[inline(always)]
fn step(state: &mut State, x: &[f32], out: &mut [f32]) {
    let n = x.len().min(out.len()).min(WIDE);
    let (x, out) = (&x[..n], &mut out[..n]);
    let (mosts, sums, losts) = (
        &mut state.most[..n],
        &mut state.sum[..n],
        &mut state.lost[..n],
    );
    for j in 0..n {
        let (v, most) = (x[j], mosts[j]);
        let grows = v > most;
        let (high, low) = if grows { (v, most) } else { (most, v) };
        // Equal infinities are no distance apart. A NaN stays one.
        let apart = if low == high { 0.0 } else { low - high };
        let e = exp(apart);
        let (scale, term) = if grows { (e, 1.0) } else { (1.0, e) };
        let sum = sums[j] * scale;
        let term = term - losts[j] * scale;
        let next = sum + term;
        losts[j] = (next - sum) - term;
        sums[j] = next;
        mosts[j] = high;
        out[j] = high + Real::log(next);
    }
}

/// Takes in `n` elements of `width` sequences, which lie side by side.
///
/// # Safety
/// `width` elements at each of `n` places `stride` apart may be read at `x` and written at `out`, and nobody else touches
/// what is written.
#[inline(always)]
unsafe fn steps_body(
    state: &mut State,
    x: *const f32,
    out: *mut f32,
    n: usize,
    stride: isize,
    width: usize,
) {
    for i in 0..n as isize {
        // SAFETY: the caller's promise.
        let (x, out) = unsafe {
            (
                std::slice::from_raw_parts(x.offset(i * stride), width),
                std::slice::from_raw_parts_mut(out.offset(i * stride), width),
            )
        };
        step(state, x, out);
    }
}

/// [`steps_body`].
///
/// # Safety
/// As there.
unsafe fn steps(
    path: CpuPath,
    state: &mut State,
    x: *const f32,
    out: *mut f32,
    n: usize,
    stride: isize,
    width: usize,
) {
    dispatch! {
        unsafe fn run(state: &mut State, x: *const f32, out: *mut f32, n: usize, stride: isize, width: usize) = steps_body;
    }
    // SAFETY: the caller's promise.
    unsafe { run(path, state, x, out, n, stride, width) }
}

struct Running {
    x: Reg,
    out: Reg,
    dims: Vec<Dim>,
    axis: usize,
    reverse: bool,
}

impl Running {
    /// Where the first element of a sequence of `n` is, `stride` apart, and how far the next one.
    fn way(&self, first: usize, n: usize, stride: usize) -> (usize, isize) {
        match self.reverse {
            true => (first + (n - 1) * stride, -(stride as isize)),
            false => (first, stride as isize),
        }
    }

    /// Sequences `many` at `first`, `apart` from one another, that are brought side by side.
    ///
    /// # Safety
    /// All their elements lie in both places, and nobody else touches these results.
    unsafe fn brought(
        &self,
        run: &Run<'_>,
        (first, many, apart): (usize, usize, usize),
        (n, stride): (usize, usize),
    ) {
        let mut state = State::NOTHING;
        let (mut here, mut done) = ([0.0f32; BROUGHT * DEEP], [0.0f32; BROUGHT * DEEP]);
        let (start, next) = self.way(first, n, stride);
        for i in (0..n).step_by(DEEP) {
            let deep = DEEP.min(n - i);
            let at = (start as isize + next * i as isize) as usize;
            let x = run.pointer(self.x).cast::<f32>().wrapping_add(at);
            let out = run.pointer(self.out).cast::<f32>().wrapping_add(at);
            let axis = |n: usize, from: isize, to: isize| Axis { n, from, to };
            let (apart, across) = (apart as isize, BROUGHT as isize);
            let there = [axis(many, apart, 1), axis(deep, next, across)];
            let back = [axis(deep, across, next), axis(many, 1, apart)];
            // SAFETY: the buffers have room for so many; the rest is the caller's promise.
            unsafe {
                let buffer = here.as_mut_ptr();
                copy(4, &there, x.cast_const().cast(), buffer.cast(), 0, 1);
                steps(
                    run.path,
                    &mut state,
                    here.as_ptr(),
                    done.as_mut_ptr(),
                    deep,
                    across,
                    many,
                );
                copy(4, &back, done.as_ptr().cast(), out.cast(), 0, 1);
            }
        }
    }
}

impl Kernel for Running {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let (outer, n, k) = around(&self.dims, self.axis, run.rows);
        if outer * n * k == 0 {
            return;
        }
        if k < BESIDE {
            // A group: the sequences of one column of some matrices.
            let group = BROUGHT.min(outer.div_ceil(parts));
            let groups = outer.div_ceil(group);
            let range = split_if_worth(groups * k, 1, (WORTH / (n * group)).max(2), part, parts);
            for item in range {
                if run.stopped() {
                    return;
                }
                let (first, column) = (item / k * group, item % k);
                let many = group.min(outer - first);
                let sequences = (first * n * k + column, many, n * k);
                // SAFETY: the specs say this size; every item has sequences of its own.
                unsafe { self.brought(run, sequences, (n, k)) };
            }
            return;
        }
        let tile = match outer * k.div_ceil(WIDE) < 2 * parts {
            true => k.div_ceil(parts).next_multiple_of(BESIDE).min(WIDE),
            false => WIDE,
        };
        let tiles = k.div_ceil(tile);
        let worth = WORTH / n.saturating_mul(tile.min(k));
        for item in split_if_worth(outer * tiles, 1, worth.max(2), part, parts) {
            if run.stopped() {
                return;
            }
            let (o, first) = (item / tiles, item % tiles * tile);
            let (at, next) = self.way(o * n * k + first, n, k);
            let x = run.pointer(self.x).cast::<f32>().wrapping_add(at);
            let out = run.pointer(self.out).cast::<f32>().wrapping_add(at);
            let mut state = State::NOTHING;
            // SAFETY: the specs say that these columns are in both places; every item has columns of its own.
            unsafe { steps(run.path, &mut state, x, out, n, next, tile.min(k - first)) };
        }
    }
}

fn fits(call: &Call<'_>) -> bool {
    call.tensor(0).is_ok_and(|t| t.dtype == DType::F32)
}

fn logcumsumexp(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (&[x], &[out]) = (ins, outs) else {
        return Err(unsupported(call));
    };
    let shape = &call.tensor(0)?.shape;
    let kernel = Running {
        x,
        out,
        dims: shape.dims().to_vec(),
        axis: normal_axis(call.int(0)?, shape.rank()).ok_or_else(|| unsupported(call))?,
        reverse: call.bool(1)?,
    };
    launcher.step(kernel, &[x], &[out]);
    Ok(())
}

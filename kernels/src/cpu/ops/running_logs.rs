//! Running log-sum-exp of f32.
//!
//! A sequence keeps a base and the sum of exponentials above it: what it gives is the base and the sum's logarithm. The
//! base is the greatest element so far, as of the last piece of fixed length that began; within a piece it stays, so
//! that no element waits for the one before it. An element that lies more than [`FAR`] above the base begins a piece of
//! its own with itself as base. So the bits depend on a sequence's elements so far alone, and never on those that follow.
//!
//! Long rows run by themselves: their exponentials are summed as [`scanners`](super::scanners) does. Other sequences run
//! side by side, from element to element; where they lie one after the other in memory, some of each are brought side by
//! side first.

use std::ops::Range;

use hotcell_graph::{
    DType, Dim,
    op::{Call, rules::normal_axis},
};

use super::{
    Entry,
    scanners::{Mode, Scan, SumF32},
    split_if_worth,
    strided::{Axis, around, copy},
    unsupported,
};
use crate::{
    backend::DeviceError,
    cpu::{
        lanes::{LANES, ask_for, ask_to_write, dispatch},
        math::{exp_down_to_normal as exp, log_of_normal as log},
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

/// How far an element may lie above the base: a sum of such exponentials is an f32, and its logarithm a small number, which
/// costs the result none of its bits.
const FAR: f32 = 16.0;

/// Elements of a row between two bases at most, and what a row has at least to run by itself.
const PIECE: usize = 1024;
const LONG: usize = 128;

/// Elements of sequences side by side between two bases.
const DEEP: usize = 16;

/// Sequences side by side at most.
const WIDE: usize = 128;

/// Rows in advance for which memory is asked: they are too far apart for the processor to find it by itself.
const AHEAD: usize = 4;

/// Neighbours in memory from which sequences are side by side already.
const BESIDE: usize = 16;

/// Sequences that are brought side by side, and elements of each at a time: both ways fit the nearest cache.
const BROUGHT: usize = 64;
const BROUGHT_DEEP: usize = 4 * DEEP;

/// What a sum of exponentials above `base` gives: a NaN where it is one.
#[inline(always)]
fn result(base: f32, sum: f32) -> f32 {
    // The sum is at least about 1, and finite; the logarithm does not know a NaN, the product does.
    sum.mul_add(0.0, base) + log(sum)
}

#[inline(always)]
fn above_body(x: &[f32], base: f32, next: *const f32, out: &mut [f32]) -> f32 {
    let mut most = [f32::NEG_INFINITY; LANES];
    let (groups, left) = x.as_chunks::<LANES>();
    let (outs, out_left) = out.as_chunks_mut::<LANES>();
    for (i, (out, x)) in outs.iter_mut().zip(groups).enumerate() {
        ask_for(next.wrapping_add(i * LANES));
        for l in 0..LANES {
            most[l] = if x[l] > most[l] { x[l] } else { most[l] };
            out[l] = exp(x[l] - base);
        }
    }
    let mut most = most.into_iter().fold(f32::NEG_INFINITY, f32::max);
    for (out, v) in out_left.iter_mut().zip(left) {
        most = if *v > most { *v } else { most };
        *out = exp(*v - base);
    }
    most
}

#[inline(always)]
fn results_body(sums: &[f32], base: f32, next: *const f32, out: &mut [f32]) {
    let (groups, left) = sums.as_chunks::<LANES>();
    let (outs, out_left) = out.as_chunks_mut::<LANES>();
    for (i, (out, sums)) in outs.iter_mut().zip(groups).enumerate() {
        ask_to_write(next.wrapping_add(i * LANES));
        for l in 0..LANES {
            out[l] = result(base, sums[l]);
        }
    }
    for (out, sum) in out_left.iter_mut().zip(left) {
        *out = result(base, *sum);
    }
}

dispatch! {
    /// Exponentials of what lies above the base; returns the greatest element, NaN left out. Memory is asked for what is there
    /// `next`, as long as this: it is a page away, and no processor runs ahead that far by itself.
    fn above(x: &[f32], base: f32, next: *const f32, out: &mut [f32]) -> f32 = above_body;
}
dispatch! {
    /// What the sums give; the same of what is written there next.
    fn results(sums: &[f32], base: f32, next: *const f32, out: &mut [f32]) = results_body;
}

/// A row, from one end to the other.
fn row(path: CpuPath, x: &[f32], reverse: bool, out: &mut [f32]) {
    let n = x.len().min(out.len());
    // Elements `from..to` in the order in which they come.
    let place = |from: usize, to: usize| match reverse {
        true => n - to..n - from,
        false => from..to,
    };
    let element = |i: usize| x[if reverse { n - 1 - i } else { i }];
    let mode = Mode {
        reverse,
        exclusive: false,
    };
    // Of nothing, and of infinitely little.
    let mut at = (0..n)
        .find(|i| element(*i) != f32::NEG_INFINITY)
        .unwrap_or(n);
    out[place(0, at)].fill(f32::NEG_INFINITY);
    if at == n {
        return;
    }
    let mut base = element(at);
    // In f64: it takes in many pieces, one after the other.
    let mut sum = 0.0f64;
    let (mut terms, mut sums) = ([0.0f32; PIECE], [0.0f32; PIECE]);
    while at < n && base < f32::INFINITY {
        let mut end = n.min(at + PIECE);
        let piece = &x[place(at, end)];
        // Beyond a row another one lies, or what nobody reads by asking for it.
        let next = |here: *const f32| match reverse {
            true => here.wrapping_sub(PIECE),
            false => here.wrapping_add(PIECE),
        };
        let all = &mut terms[..piece.len()];
        let most = above(path, piece, base, next(piece.as_ptr()), all);
        let near = most - base <= FAR;
        if !near {
            let far = (at..end).find(|i| element(*i) - base > FAR);
            end = far.unwrap_or(end);
        }
        let len = end - at;
        if len > 0 {
            // The first of them, in the order in which they come.
            let terms = match reverse {
                true => &all[piece.len() - len..],
                false => &all[..len],
            };
            let sums = &mut sums[..len];
            let total = SumF32.rows(path, terms, len, mode, sum as f32, sums);
            let out = &mut out[place(at, end)];
            let ahead = next(out.as_ptr());
            results(path, sums, base, ahead, out);
            sum += f64::from(total);
        }
        // The next one's base: what is far above, if that is why it begins.
        let next = match near {
            true => f32::max(base, most),
            false => element(end.min(n - 1)),
        };
        sum *= f64::from(exp(base - next));
        (base, at) = (next, end);
    }
    // Nothing is more than infinity, but a NaN stays. A base that is one says that the first element was.
    let mut lost = sum.is_nan() || base.is_nan();
    for i in at..n {
        lost |= element(i).is_nan();
        let i = if reverse { n - 1 - i } else { i };
        out[i] = if lost { f32::NAN } else { f32::INFINITY };
    }
}

/// The running values of sequences side by side: of each its base, the sum up to the last tile and what rounding has taken
/// off that (W. Kahan), the sum since then, and the greatest element.
struct State {
    base: [f32; WIDE],
    sum: [f32; WIDE],
    lost: [f32; WIDE],
    part: [f32; WIDE],
    most: [f32; WIDE],
}

impl State {
    const NOTHING: Self = Self {
        base: [f32::NEG_INFINITY; WIDE],
        sum: [0.0; WIDE],
        lost: [0.0; WIDE],
        part: [0.0; WIDE],
        most: [f32::NEG_INFINITY; WIDE],
    };

    /// Takes in one more element of each sequence as if it lay near its base: writes their sums, and the greatest so far.
    #[inline(always)]
    fn sums(&mut self, x: &[f32], next: *const f32, sums: &mut [f32]) {
        let n = x.len().min(WIDE);
        let (x, sums) = (&x[..n], &mut sums[..n]);
        let (base, sum) = (&self.base[..n], &self.sum[..n]);
        let (part, most) = (&mut self.part[..n], &mut self.most[..n]);
        for j in (0..n).step_by(LANES) {
            ask_for(next.wrapping_add(j));
        }
        for j in 0..n {
            most[j] = if x[j] > most[j] { x[j] } else { most[j] };
            part[j] += exp(x[j] - base[j]);
            sums[j] = sum[j] + part[j];
        }
    }

    /// Whether none of these sequences has an element in this tile that lies far above its base, or nowhere.
    #[inline(always)]
    fn near(&self, of: Range<usize>) -> bool {
        let (base, most, part) = (
            &self.base[of.clone()],
            &self.most[of.clone()],
            &self.part[of],
        );
        let mut near = true;
        for ((base, most), part) in base.iter().zip(most).zip(part) {
            // A NaN is in the sum.
            near &= *most - *base <= FAR && !part.is_nan();
        }
        near
    }

    /// What sums give, of the sequences from `first` on.
    #[inline(always)]
    fn results(&self, first: usize, sums: &[f32], next: *const f32, out: &mut [f32]) {
        let n = out.len().min(WIDE - first);
        let (base, sums, out) = (&self.base[first..first + n], &sums[..n], &mut out[..n]);
        for j in (0..n).step_by(LANES) {
            ask_to_write(next.wrapping_add(j));
        }
        for j in 0..n {
            out[j] = result(base[j], sums[j]);
        }
    }

    /// Takes in one more element of each sequence from `first` on, whatever they are.
    #[inline(always)]
    fn any(&mut self, first: usize, x: &[f32], out: &mut [f32]) {
        for (j, (x, out)) in (first..WIDE).zip(x.iter().zip(out)) {
            let x = *x;
            self.most[j] = if x > self.most[j] { x } else { self.most[j] };
            if self.base[j] == f32::NEG_INFINITY && x == f32::NEG_INFINITY {
                *out = x;
                continue;
            }
            let begins = self.base[j] == f32::NEG_INFINITY;
            if begins || x - self.base[j] > FAR {
                let so_far = match begins {
                    true => 0.0,
                    false => (self.sum[j] + self.part[j]) * exp(self.base[j] - x),
                };
                (self.base[j], self.sum[j]) = (x, so_far);
                (self.part[j], self.lost[j]) = (0.0, 0.0);
            }
            // Two infinities are no distance apart.
            let apart = if x == self.base[j] {
                0.0
            } else {
                x - self.base[j]
            };
            self.part[j] += exp(apart);
            *out = match self.base[j].is_nan() {
                true => f32::NAN,
                false => result(self.base[j], self.sum[j] + self.part[j]),
            };
        }
    }

    /// Ends a tile: its sum is joined, and its greatest elements become the bases.
    #[inline(always)]
    fn join(&mut self, n: usize) {
        let n = n.min(WIDE);
        let (base, most) = (&mut self.base[..n], &self.most[..n]);
        let (sum, lost, part) = (&mut self.sum[..n], &mut self.lost[..n], &mut self.part[..n]);
        for j in 0..n {
            let high = if most[j] > base[j] { most[j] } else { base[j] };
            // Two infinities are no distance apart.
            let apart = if high == base[j] { 0.0 } else { base[j] - high };
            let scale = exp(apart);
            let term = part[j] - lost[j];
            let next = sum[j] + term;
            lost[j] = ((next - sum[j]) - term) * scale;
            sum[j] = next * scale;
            part[j] = 0.0;
            base[j] = high;
        }
    }
}

/// Takes in `n` elements of `width` sequences, which lie side by side: first of all, or after a multiple of [`DEEP`].
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
    // Elements `i` of the sequences `of`.
    let row = |i: usize, of: Range<usize>| {
        let at = i as isize * stride;
        // SAFETY: the caller's promise, for each of these places.
        let x = unsafe { std::slice::from_raw_parts(x.offset(at).add(of.start), of.len()) };
        // SAFETY: as above; one such slice is used at a time.
        let out = unsafe { std::slice::from_raw_parts_mut(out.offset(at).add(of.start), of.len()) };
        (x, out)
    };
    let read_next = |i: usize| x.wrapping_offset((i + AHEAD) as isize * stride);
    let written_next = |i: usize| {
        out.wrapping_offset((i + AHEAD) as isize * stride)
            .cast_const()
    };
    let mut sums = [0.0; WIDE * DEEP];
    for first in (0..n).step_by(DEEP) {
        let mut tile = first..n.min(first + DEEP);
        // The first element of a sequence is its base.
        if state.base[..width].contains(&f32::NEG_INFINITY) {
            let (x, out) = row(first, 0..width);
            state.any(0, x, out);
            tile.start += 1;
        }
        let before = (state.part, state.most);
        for (i, sums) in tile.clone().zip(sums.chunks_exact_mut(width)) {
            state.sums(row(i, 0..width).0, read_next(i), sums);
        }
        if state.near(0..width) {
            for (i, sums) in tile.zip(sums.chunks_exact(width)) {
                state.results(0, sums, written_next(i), row(i, 0..width).1);
            }
        } else {
            for of in (0..width).step_by(LANES) {
                let of = of..width.min(of + LANES);
                let near = state.near(of.clone());
                if !near {
                    state.part[of.clone()].copy_from_slice(&before.0[of.clone()]);
                    state.most[of.clone()].copy_from_slice(&before.1[of.clone()]);
                }
                for (i, sums) in tile.clone().zip(sums.chunks_exact(width)) {
                    let (x, out) = row(i, of.clone());
                    match near {
                        true => state.results(of.start, &sums[of.clone()], out.as_ptr(), out),
                        false => state.any(of.start, x, out),
                    }
                }
            }
        }
        state.join(width);
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
        let (mut here, mut done) = (
            [0.0f32; BROUGHT * BROUGHT_DEEP],
            [0.0f32; BROUGHT * BROUGHT_DEEP],
        );
        let (start, next) = self.way(first, n, stride);
        for i in (0..n).step_by(BROUGHT_DEEP) {
            let deep = BROUGHT_DEEP.min(n - i);
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
        if k == 1 && n >= LONG {
            for item in split_if_worth(outer, 1, (WORTH / n).max(2), part, parts) {
                if run.stopped() {
                    return;
                }
                // SAFETY: the specs say this size; every item is a row of its own.
                let (x, out) = unsafe {
                    let x = run.pointer(self.x).cast::<f32>().add(item * n);
                    let out = run.pointer(self.out).cast::<f32>().add(item * n);
                    (
                        std::slice::from_raw_parts(x, n),
                        std::slice::from_raw_parts_mut(out, n),
                    )
                };
                row(run.path, x, self.reverse, out);
            }
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

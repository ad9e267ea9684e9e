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
        lanes::{LANES, ask_for_near, dispatch},
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
const WIDE: usize = 512;

/// Those of them whose bases and sums are in registers for a tile: neighbouring lines of each row.
const HELD: usize = 4 * LANES;

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

/// The greatest of some, NaN left out; and whether all lie at most [`FAR`] above the base, or nowhere.
#[inline(always)]
fn look_body(x: &[f32], base: f32) -> (f32, bool) {
    let mut most = [f32::NEG_INFINITY; LANES];
    let mut far = [false; LANES];
    let (groups, left) = x.as_chunks::<LANES>();
    for v in groups {
        for l in 0..LANES {
            most[l] = if v[l] > most[l] { v[l] } else { most[l] };
            far[l] |= v[l] - base > FAR;
        }
    }
    let mut far = far.contains(&true);
    let mut most = most.into_iter().fold(f32::NEG_INFINITY, f32::max);
    for v in left {
        most = if *v > most { *v } else { most };
        far |= *v - base > FAR;
    }
    (most, !far)
}

#[inline(always)]
fn above_body(x: &[f32], base: f32, out: &mut [f32]) {
    for (out, v) in out.iter_mut().zip(x) {
        *out = exp(*v - base);
    }
}

#[inline(always)]
fn results_body(sums: &[f32], base: f32, out: &mut [f32]) {
    for (out, sum) in out.iter_mut().zip(sums) {
        *out = result(base, *sum);
    }
}

dispatch! {
    fn look(x: &[f32], base: f32) -> (f32, bool) = look_body;
}
dispatch! {
    /// Exponentials of what lies above the base.
    fn above(x: &[f32], base: f32, out: &mut [f32]) = above_body;
}
dispatch! {
    fn results(sums: &[f32], base: f32, out: &mut [f32]) = results_body;
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
        let (most, near) = look(path, &x[place(at, end)], base);
        if !near {
            let far = (at..end).find(|i| element(*i) - base > FAR);
            end = far.unwrap_or(end);
        }
        let len = end - at;
        if len > 0 {
            let (terms, sums) = (&mut terms[..len], &mut sums[..len]);
            above(path, &x[place(at, end)], base, terms);
            let total = SumF32.rows(path, terms, len, mode, sum as f32, sums);
            results(path, sums, base, &mut out[place(at, end)]);
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

    /// Takes in some more elements of [`HELD`] sequences from `first` on, none of which lies far above its base.
    ///
    /// # Safety
    /// As [`steps_body`], of `n` elements.
    #[inline(always)]
    unsafe fn near(
        &mut self,
        first: usize,
        (x, out): (*const f32, *mut f32),
        n: usize,
        stride: isize,
    ) {
        let mut lanes = [[0.0; HELD]; 3];
        let there = first..first + HELD;
        for (lane, of) in lanes.iter_mut().zip([&self.base, &self.sum, &self.part]) {
            lane.copy_from_slice(&of[there.clone()]);
        }
        let [base, sum, mut part] = lanes;
        for i in 0..n as isize {
            // SAFETY: so many may be read and written there, says the caller.
            let (x, out) = unsafe {
                let x = x.offset(i * stride).add(first).cast::<[f32; HELD]>();
                let out = out.offset(i * stride).add(first).cast::<[f32; HELD]>();
                (x.read_unaligned(), &mut *out)
            };
            for l in 0..HELD {
                part[l] += exp(x[l] - base[l]);
                out[l] = result(base[l], sum[l] + part[l]);
            }
        }
        self.part[there].copy_from_slice(&part);
    }

    /// The same of the sequences from `first` on, one element of each.
    #[inline(always)]
    fn near_rest(&mut self, first: usize, x: &[f32], out: &mut [f32]) {
        for j in first..x.len().min(out.len()).min(WIDE) {
            self.part[j] += exp(x[j] - self.base[j]);
            out[j] = result(self.base[j], self.sum[j] + self.part[j]);
        }
    }

    /// Takes in one more element of each sequence, whatever they are.
    #[inline(always)]
    fn any(&mut self, x: &[f32], out: &mut [f32]) {
        for (j, (x, out)) in x.iter().zip(out).enumerate().take(WIDE) {
            let x = *x;
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

    /// Notes an element of each sequence as the greatest if it is. Whether all are near their base.
    #[inline(always)]
    fn look(&mut self, x: &[f32]) -> bool {
        let n = x.len().min(WIDE);
        let (x, base, most) = (&x[..n], &self.base[..n], &mut self.most[..n]);
        let mut near = true;
        for j in 0..n {
            most[j] = if x[j] > most[j] { x[j] } else { most[j] };
            near &= x[j] - base[j] <= FAR;
        }
        near
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
    // SAFETY: the caller's promise, for each of these places; here and below.
    let read =
        |i: usize| unsafe { std::slice::from_raw_parts(x.offset(i as isize * stride), width) };
    // SAFETY: as above.
    let write = |i: usize| unsafe {
        std::slice::from_raw_parts_mut(out.offset(i as isize * stride), width)
    };
    for first in (0..n).step_by(DEEP) {
        let tile = first..n.min(first + DEEP);
        let mut near = true;
        for i in tile.clone() {
            near &= state.look(read(i));
        }
        // Lanes are in registers for a tile.
        let whole = if near { width / HELD * HELD } else { 0 };
        for j in (0..whole).step_by(HELD) {
            let at = first as isize * stride;
            for i in tile.clone() {
                // The same row of the next tile: rows are too far apart for the processor to find it by itself.
                let next = x.wrapping_offset((i + DEEP) as isize * stride);
                for line in (j..j + HELD).step_by(LANES) {
                    ask_for_near(next.wrapping_add(line));
                }
            }
            // SAFETY: the caller's promise, for the places from the first one on.
            unsafe {
                let places = (x.offset(at), out.offset(at));
                state.near(j, places, tile.len(), stride);
            }
        }
        for i in tile {
            match near {
                true => state.near_rest(whole, read(i), write(i)),
                false => state.any(read(i), write(i)),
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

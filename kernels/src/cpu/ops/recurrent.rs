//! Recurrences over time: each head of each sequence has a state, in which it goes from time to time.
//!
//! A sum goes over sixteen lanes in ascending order, then over a fixed tree, and products are not fused: bits depend on the head alone.

use std::ops::{Add, Mul, Sub};

use hotcell_graph::{
    DType, Dim,
    op::{Call, ValueSpec},
};

use super::{Entry, split_if_worth, unsupported};
use crate::{
    backend::DeviceError,
    cpu::{
        math::Real,
        plan::{Kernel, Launcher, Reg, Run},
    },
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "gated_delta",
        supports: fits,
        launch: gated_delta,
    },
    Entry {
        op: "mamba2_scan",
        supports: fits,
        launch: mamba2,
    },
];

/// Lanes of a sum.
const LANES: usize = 16;
/// Multiplications below which one thread does it all.
const WORTH: usize = 1 << 14;

/// What it is computed in.
trait Number:
    Real + Default + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + 'static
{
}
impl Number for f32 {}
impl Number for f64 {}

/// The sum of products.
#[inline(always)]
fn dot<T: Number>(a: &[T], b: &[T]) -> T {
    let mut lanes = [T::default(); LANES];
    let (left, right) = (a.chunks(LANES), b.chunks(LANES));
    for (left, right) in left.zip(right) {
        for ((lane, &x), &y) in lanes.iter_mut().zip(left).zip(right) {
            *lane = *lane + x * y;
        }
    }
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        let (low, high) = lanes.split_at_mut(width);
        for (low, &high) in low.iter_mut().zip(&*high) {
            *low = *low + high;
        }
    }
    lanes[0]
}

/// One head's place in tensors of [sequences, time, heads, width].
#[derive(Clone, Copy)]
struct Line {
    sequence: usize,
    time: usize,
    heads: usize,
    head: usize,
    width: usize,
}

impl Line {
    /// Where its elements at time `t` begin.
    fn at(&self, t: usize) -> usize {
        ((self.sequence * self.time + t) * self.heads + self.head) * self.width
    }
}

/// Sizes that both share: sequences, time, heads and the heads or groups that these share, a state's rows and columns.
struct Sizes {
    sequences: Dim,
    time: usize,
    heads: usize,
    groups: usize,
    rows: usize,
    columns: usize,
}

impl Sizes {
    /// The lines of head `i` of all in heads of a width, in groups of another, and as one number.
    fn lines(&self, i: usize) -> (Line, Line, Line) {
        let (sequence, head) = (i / self.heads, i % self.heads);
        let line = |heads, head, width| Line {
            sequence,
            time: self.time,
            heads,
            head,
            width,
        };
        let group = head * self.groups / self.heads;
        (
            line(self.heads, head, self.rows),
            line(self.groups, group, self.columns),
            line(self.heads, head, 1),
        )
    }
}

/// Part of a place that is read.
///
/// # Safety
/// As for [`Run::slice`].
unsafe fn read<'a, T>(run: &'a Run<'_>, reg: Reg, at: usize, count: usize) -> &'a [T] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(run.pointer(reg).cast::<T>().wrapping_add(at), count) }
}

struct Scan<T> {
    sizes: Sizes,
    form: Form,
    state: Option<Reg>,
    out: Reg,
    after: Reg,
    kind: std::marker::PhantomData<fn() -> T>,
}

/// The inputs of each row but the state.
#[derive(Clone, Copy)]
enum Form {
    GatedDelta([Reg; 5]),
    Mamba2([Reg; 5], Option<Reg>),
}

impl<T: Number> Scan<T> {
    /// One time of head `i`: what the state becomes, and what comes out.
    ///
    /// # Safety
    /// The specs' sizes are those of the tensors, and nobody writes the inputs.
    unsafe fn step(&self, run: &Run<'_>, (i, t): (usize, usize), held: &mut [T], out: &mut [T]) {
        let z = &self.sizes;
        let (head, group, one) = z.lines(i);
        // SAFETY: the caller's promise; places are below the sizes.
        unsafe {
            let number = |reg: Reg, at: usize| read::<T>(run, reg, at, 1)[0];
            match self.form {
                Form::GatedDelta([q, k, v, g, beta]) => {
                    let q = read::<T>(run, q, group.at(t), z.columns);
                    let k = read::<T>(run, k, group.at(t), z.columns);
                    let v = read::<T>(run, v, head.at(t), z.rows);
                    let (g, beta) = (number(g, one.at(t)), number(beta, one.at(t)));
                    for ((row, &v), out) in held.chunks_exact_mut(z.columns).zip(v).zip(out) {
                        row.iter_mut().for_each(|s| *s = *s * g);
                        let delta = (v - dot(row, k)) * beta;
                        for (s, &k) in row.iter_mut().zip(k) {
                            *s = *s + delta * k;
                        }
                        *out = dot(row, q);
                    }
                }
                Form::Mamba2([x, dt, a, b, c], d) => {
                    let x = read::<T>(run, x, head.at(t), z.rows);
                    let b = read::<T>(run, b, group.at(t), z.columns);
                    let c = read::<T>(run, c, group.at(t), z.columns);
                    let dt = number(dt, one.at(t));
                    let decay = (dt * number(a, head.head)).exp();
                    let d = d.map(|d| number(d, head.head));
                    for ((row, &x), out) in held.chunks_exact_mut(z.columns).zip(x).zip(out) {
                        let input = dt * x;
                        for (s, &b) in row.iter_mut().zip(b) {
                            *s = *s * decay + input * b;
                        }
                        let y = dot(row, c);
                        *out = d.map_or(y, |d| y + d * x);
                    }
                }
            }
        }
    }
}

impl<T: Number> Kernel for Scan<T> {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let z = &self.sizes;
        let lines = z.sequences.at(run.rows).saturating_mul(z.heads);
        let size = z.rows * z.columns;
        let work = size.saturating_mul(z.time).max(1);
        for i in split_if_worth(lines, 1, (WORTH / work).max(2), part, parts) {
            // SAFETY: the specs say that there is a state for each line, and this part alone has it.
            let held = unsafe { run.slice_mut::<T>(self.after, i * size..(i + 1) * size) };
            match self.state {
                // SAFETY: as above.
                Some(state) => held.copy_from_slice(unsafe { read(run, state, i * size, size) }),
                None => held.fill(T::default()),
            }
            for t in 0..z.time {
                if run.stopped() {
                    return;
                }
                let at = z.lines(i).0.at(t);
                // SAFETY: as above; each line has results of its own.
                unsafe {
                    let out = run.slice_mut::<T>(self.out, at..at + z.rows);
                    match size {
                        // Of a state without columns nothing comes but what goes past it.
                        0 => self.past(run, i, t, out),
                        _ => self.step(run, (i, t), held, out),
                    }
                }
            }
        }
    }
}

impl<T: Number> Scan<T> {
    /// What comes out past a state of no numbers.
    ///
    /// # Safety
    /// As for [`Scan::step`].
    unsafe fn past(&self, run: &Run<'_>, i: usize, t: usize, out: &mut [T]) {
        out.fill(T::default());
        if let Form::Mamba2([x, ..], Some(d)) = self.form {
            let head = self.sizes.lines(i).0;
            // SAFETY: the caller's promise.
            let (x, d) = unsafe {
                let d = read::<T>(run, d, head.head, 1)[0];
                (read::<T>(run, x, head.at(t), self.sizes.rows), d)
            };
            for (out, &x) in out.iter_mut().zip(x) {
                *out = *out + d * x;
            }
        }
    }
}

/// All inputs of the dtype that it is computed in.
fn fits(call: &Call<'_>) -> bool {
    let mut dtypes = call.inputs.iter().filter_map(|spec| match spec {
        ValueSpec::Tensor(t) => Some(t.dtype),
        _ => None,
    });
    let first = dtypes.next();
    matches!(first, Some(DType::F32 | DType::F64)) && dtypes.all(|d| Some(d) == first)
}

/// Sizes of input `i`, which has four axes: the first one, and the others.
fn four(call: &Call<'_>, i: usize) -> Result<(Dim, [usize; 3]), DeviceError> {
    match *call.tensor(i)?.shape.dims() {
        [first, Dim::Fixed(a), Dim::Fixed(b), Dim::Fixed(c)] => Ok((first, [a, b, c])),
        _ => Err(unsupported(call)),
    }
}

/// Whether optional input `i` is given.
fn given(call: &Call<'_>, ins: &[Reg], i: usize) -> Result<Option<Reg>, DeviceError> {
    let there = call.optional(i)?.is_some();
    Ok(ins.get(i).copied().filter(|_| there))
}

fn gated_delta(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let &[q, k, v, g, beta, _] = ins else {
        return Err(unsupported(call));
    };
    let (sequences, [time, groups, columns]) = four(call, 0)?;
    let (_, [_, heads, rows]) = four(call, 2)?;
    let sizes = Sizes {
        sequences,
        time,
        heads,
        groups,
        rows,
        columns,
    };
    let form = Form::GatedDelta([q, k, v, g, beta]);
    let state = given(call, ins, 5)?;
    step(launcher, call, ins, outs, (sizes, form, state))
}

fn mamba2(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let &[x, dt, a, b, c, ..] = ins else {
        return Err(unsupported(call));
    };
    let (sequences, [time, heads, rows]) = four(call, 0)?;
    let (_, [_, groups, columns]) = four(call, 3)?;
    let sizes = Sizes {
        sequences,
        time,
        heads,
        groups,
        rows,
        columns,
    };
    let form = Form::Mamba2([x, dt, a, b, c], given(call, ins, 5)?);
    let state = given(call, ins, 6)?;
    step(launcher, call, ins, outs, (sizes, form, state))
}

fn step(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
    (sizes, form, state): (Sizes, Form, Option<Reg>),
) -> Result<(), DeviceError> {
    let &[out, after] = outs else {
        return Err(unsupported(call));
    };
    fn scan<T: Number>(
        (sizes, form, state): (Sizes, Form, Option<Reg>),
        out: Reg,
        after: Reg,
    ) -> Scan<T> {
        Scan {
            sizes,
            form,
            state,
            out,
            after,
            kind: std::marker::PhantomData,
        }
    }
    let reads: Vec<Reg> = (ins.iter().copied().zip(call.inputs))
        .filter(|(_, spec)| matches!(spec, ValueSpec::Tensor(_)))
        .map(|(reg, _)| reg)
        .collect();
    let parts = (sizes, form, state);
    match call.tensor(0)?.dtype {
        DType::F64 => launcher.step(scan::<f64>(parts, out, after), &reads, outs),
        _ => launcher.step(scan::<f32>(parts, out, after), &reads, outs),
    }
    Ok(())
}

//! Reductions that look at elements more than once, while they are near: variance and log-sum-exp.
//!
//! Lanes (or columns) hold two numbers each and take eight elements at a time, whose own mean or maximum is
//! found first. So memory is read once, and nothing is lost that a second pass over it would keep: variance
//! is merged as by Chan, Golub and LeVeque (1979), sums of powers are scaled as maxima rise.

use std::f32::consts::LOG2_E;

use super::reducers::{Reducer, TILE};
use crate::{
    cpu::{
        lanes::{
            LANES, ask_ahead, ask_for, bf16_to_f32, dispatch, f16_to_f32, f32_to_bf16, f32_to_f16,
        },
        path::CpuPath,
    },
    reduction::phases,
};

/// Lanes of a contiguous row: part of its order.
const WIDE: usize = 64;

/// The two numbers of each lane.
pub(super) type Lanes<'a> = (&'a [f32], &'a [f32]);

/// A statistic of f32 numbers.
pub(super) trait Statistic: Copy {
    /// Of many.
    type Part: Copy;
    /// What a lane begins with.
    const START: [f32; 2];
    /// Whether a lane's elements are taken less its first one: far from 0, their mean is too coarse.
    const CENTERED: bool;

    fn nothing() -> Self::Part;
    /// Takes eight more into a lane that has taken `count`.
    fn eight(count: f32, lane: [f32; 2], v: [f32; 8]) -> [f32; 2];
    /// Takes one more.
    fn one(count: f32, lane: [f32; 2], v: f32) -> [f32; 2];
    /// What lanes hold that have each taken `count`, less `center`.
    fn close(count: usize, lanes: Lanes<'_>, center: &[f32]) -> Self::Part;
    fn join(a: Self::Part, b: Self::Part) -> Self::Part;
    /// What `part` should be, of elements among which there is a NaN or not.
    #[inline(always)]
    fn settle(part: Self::Part, _any_nan: impl FnOnce() -> bool) -> Self::Part {
        part
    }
}

/// Lanes hold the mean and the sum of squared distances from it.
#[derive(Clone, Copy)]
pub(super) struct Moments;

/// How many, their mean, and the sum of squared distances from it.
pub(super) type Spread = [f64; 3];

/// The sum of eight.
#[inline(always)]
fn sum8(v: [f32; 8]) -> f32 {
    ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]))
}

/// The sum of many in f64, eight at a time.
#[inline(always)]
fn sum_of(values: impl Iterator<Item = f64>) -> f64 {
    let mut sums = [0.0; 8];
    for (i, v) in values.enumerate() {
        sums[i % 8] += v;
    }
    sums.iter().sum()
}

impl Statistic for Moments {
    type Part = Spread;
    const START: [f32; 2] = [0.0; 2];
    const CENTERED: bool = true;

    fn nothing() -> Spread {
        [0.0; 3]
    }

    #[inline(always)]
    fn eight(count: f32, [mean, squares]: [f32; 2], v: [f32; 8]) -> [f32; 2] {
        let near = sum8(v) * 0.125;
        let mut apart = [0.0; 8];
        for i in 0..8 {
            apart[i] = (v[i] - near) * (v[i] - near);
        }
        let between = near - mean;
        let share = 8.0 / (count + 8.0);
        [
            between.mul_add(share, mean),
            squares + (between * between).mul_add(count * share, sum8(apart)),
        ]
    }

    #[inline(always)]
    fn one(count: f32, [mean, squares]: [f32; 2], v: f32) -> [f32; 2] {
        let between = v - mean;
        let share = 1.0 / (count + 1.0);
        [
            between.mul_add(share, mean),
            (between * between).mul_add(count * share, squares),
        ]
    }

    #[inline(always)]
    fn close(count: usize, (means, squares): Lanes<'_>, center: &[f32]) -> Spread {
        let whole = |(m, c): (&f32, &f32)| f64::from(*m) + f64::from(*c);
        let means = || means.iter().zip(center).map(whole);
        let lanes = squares.len() as f64;
        let mean = sum_of(means()) / lanes;
        let apart = means().map(|m| m - mean);
        let between = sum_of(apart.map(|d| d * d)) * count as f64;
        let inside = sum_of(squares.iter().map(|s| f64::from(*s)));
        [count as f64 * lanes, mean, between + inside]
    }

    #[inline(always)]
    fn join(a: Spread, b: Spread) -> Spread {
        let count = a[0] + b[0];
        if a[0] == 0.0 || b[0] == 0.0 {
            return if a[0] == 0.0 { b } else { a };
        }
        let between = b[1] - a[1];
        let share = b[0] / count;
        [
            count,
            a[1] + between * share,
            a[2] + b[2] + between * between * a[0] * share,
        ]
    }
}

/// Lanes hold the maximum and the sum of powers of e, each less what [`shift`] makes of the maximum.
#[derive(Clone, Copy)]
pub(super) struct Powers;

/// −∞ would make NaN of what is as little. ∞ does: see [`Statistic::settle`].
#[inline(always)]
fn shift(most: f32) -> f32 {
    if most > f32::NEG_INFINITY { most } else { 0.0 }
}

/// `e^x` of no positive number. What is below `e^-86` stays there, which is nothing beside the maximum's 1.
///
/// Each step is written for all `N` before the next one, so that the compiler may put steps of others between those that wait for
/// one another. It does so for some.
#[inline(always)]
fn powers<const N: usize>(mut x: [f32; N]) -> [f32; N] {
    const MAGIC: f32 = 12_582_912.0;
    // 2^f by Remez's algorithm, 1.4 ulp; 1 where f is 0.
    const TERMS: [f32; 6] = [
        1.340_664_3e-3,
        9.617_693e-3,
        5.550_310_4e-2,
        2.402_265_2e-1,
        6.931_472_4e-1,
        1.0,
    ];
    let (mut shifted, mut p) = ([0.0; N], [1.559_467_8e-4_f32; N]);
    for x in &mut x {
        *x = if *x < -86.0 { -86.0 } else { *x };
    }
    // The rounded product costs a far power some bits, which is less than it weighs beside the maximum's 1.
    for i in 0..N {
        shifted[i] = x[i].mul_add(LOG2_E, MAGIC);
    }
    for i in 0..N {
        x[i] = x[i].mul_add(LOG2_E, MAGIC - shifted[i]);
    }
    for term in TERMS {
        for i in 0..N {
            p[i] = p[i].mul_add(x[i], term);
        }
    }
    // The bits of MAGIC end in 22 zeros, of which 9 stay. A factor, since a sum of bits would make numbers of NaNs.
    for i in 0..N {
        p[i] *= f32::from_bits((shifted[i].to_bits() << 23).wrapping_add(1.0_f32.to_bits()));
    }
    p
}

/// One of [`powers`].
#[inline(always)]
fn power(x: f32) -> f32 {
    let [power] = powers([x]);
    power
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

#[inline(always)]
fn largest8(v: [f32; 8]) -> f32 {
    larger(
        larger(larger(v[0], v[1]), larger(v[2], v[3])),
        larger(larger(v[4], v[5]), larger(v[6], v[7])),
    )
}

impl Statistic for Powers {
    type Part = [f64; 2];
    const START: [f32; 2] = [f32::NEG_INFINITY, 0.0];
    const CENTERED: bool = false;

    fn nothing() -> [f64; 2] {
        [f64::NEG_INFINITY, 0.0]
    }

    #[inline(always)]
    fn eight(_: f32, [most, sum]: [f32; 2], v: [f32; 8]) -> [f32; 2] {
        let next = larger(largest8(v), most);
        let down = shift(next);
        // No closure: what is not inlined would lack the path's instructions.
        let mut below = [0.0; 8];
        for i in 0..8 {
            below[i] = v[i] - down;
        }
        let before = sum * power(most - down);
        [next, before + sum8(powers(below))]
    }

    #[inline(always)]
    fn one(_: f32, [most, sum]: [f32; 2], v: f32) -> [f32; 2] {
        let next = larger(v, most);
        let down = shift(next);
        [next, sum * power(most - down) + power(v - down)]
    }

    #[inline(always)]
    fn close(_: usize, (most, sums): Lanes<'_>, _: &[f32]) -> [f64; 2] {
        // A column by itself: what follows would change nothing, and take its time for every one.
        if let ([most], [sum]) = (most, sums) {
            return [f64::from(*most), f64::from(*sum)];
        }
        let next = most.iter().copied().fold(f32::NEG_INFINITY, larger);
        let down = shift(next);
        let mut scaled = [0.0; WIDE];
        for ((o, m), s) in scaled.iter_mut().zip(most).zip(sums) {
            *o = s * power(m - down);
        }
        [next.into(), sum_of(scaled.iter().map(|s| f64::from(*s)))]
    }

    /// Powers less an infinite maximum are NaN, or not, and say nothing of the elements: this is too rare to look at each.
    #[inline(always)]
    fn settle([most, sum]: [f64; 2], any_nan: impl FnOnce() -> bool) -> [f64; 2] {
        if most < f64::INFINITY {
            return [most, sum];
        }
        [most, if any_nan() { f64::NAN } else { 1.0 }]
    }

    #[inline(always)]
    fn join(a: [f64; 2], b: [f64; 2]) -> [f64; 2] {
        let most = if a[0] > b[0] { a[0] } else { b[0] };
        let scaled = |part: [f64; 2]| match part[0] == most {
            true => part[1],
            false => part[1] * libm::exp(part[0] - most),
        };
        [most, scaled(a) + scaled(b)]
    }
}

/// An element less its lane's first, where that counts.
#[inline(always)]
fn less<S: Statistic>(v: f32, center: f32) -> f32 {
    if S::CENTERED { v - center } else { v }
}

/// A part of eight rows. No `map`: what it calls lacks the path's instructions, and costs as much as a row.
#[inline(always)]
fn part_of<T>(rows: [&[T]; 8], first: usize, w: usize) -> [&[T]; 8] {
    let [a, b, c, d, e, f, g, h] = rows;
    let last = first + w;
    [
        &a[first..last],
        &b[first..last],
        &c[first..last],
        &d[first..last],
        &e[first..last],
        &f[first..last],
        &g[first..last],
        &h[first..last],
    ]
}

/// Takes eight rows into the lanes of as many columns as each has.
#[inline(always)]
fn take_eight<S: Statistic, T: Copy>(
    load: impl Fn(T) -> f32,
    count: usize,
    (a, b): (&mut [f32], &mut [f32]),
    center: &[f32],
    rows: [&[T]; 8],
) {
    let w = a.len();
    let (b, center, rows) = (&mut b[..w], &center[..w], part_of(rows, 0, w));
    for j in 0..w {
        let mut eight = [0.0; 8];
        for i in 0..8 {
            eight[i] = less::<S>(load(rows[i][j]), center[j]);
        }
        [a[j], b[j]] = S::eight(count as f32, [a[j], b[j]], eight);
    }
}

/// Takes the rows of a matrix of `k` columns into the lanes of `a.len()` columns. How many that were.
#[inline(always)]
fn take_rows<S: Statistic, T: Copy>(
    load: impl Fn(T) -> f32 + Copy,
    [a, b, center]: [&mut [f32]; 3],
    x: &[T],
    k: usize,
    first: usize,
) -> usize {
    let w = a.len();
    let (b, center) = (&mut b[..w], &mut center[..w]);
    a.fill(S::START[0]);
    b.fill(S::START[1]);
    center.fill(0.0);
    if S::CENTERED && x.len() >= k {
        for (c, v) in center.iter_mut().zip(&x[first..][..w]) {
            *c = load(*v);
        }
    }
    let mut count = 0;
    let mut eight = x.chunks_exact(8 * k);
    for rows in &mut eight {
        // Elements one after the other are asked for in their order, which the processor then goes on with by itself; of
        // columns, those of the next eight rows.
        if w == k {
            ask_ahead(rows);
        }
        let next = rows.as_ptr().wrapping_add(8 * k + first);
        let mut each: [&[T]; 8] = [&[]; 8];
        for (i, row) in each.iter_mut().enumerate() {
            *row = &rows[i * k + first..][..w];
        }
        let rows = each;
        let whole = w / LANES * LANES;
        for j in (0..whole).step_by(LANES) {
            let near = part_of(rows, j, LANES);
            if w < k {
                for i in 0..8 {
                    ask_for(next.wrapping_add(i * k + j));
                }
            }
            let own = (&mut a[j..j + LANES], &mut b[j..j + LANES]);
            take_eight::<S, T>(load, count, own, &center[j..j + LANES], near);
        }
        let own = (&mut a[whole..], &mut b[whole..]);
        let left = part_of(rows, whole, w - whole);
        take_eight::<S, T>(load, count, own, &center[whole..], left);
        count += 8;
    }
    for row in eight.remainder().chunks_exact(k) {
        let row = &row[first..][..w];
        for j in 0..w {
            let v = less::<S>(load(row[j]), center[j]);
            [a[j], b[j]] = S::one(count as f32, [a[j], b[j]], v);
        }
        count += 1;
    }
    count
}

#[inline(always)]
fn row<S: Statistic, T: Copy>(load: impl Fn(T) -> f32 + Copy, x: &[T]) -> S::Part {
    let mut part = S::nothing();
    let (whole, tail) = x.split_at(x.len() / WIDE * WIDE);
    for piece in [whole, tail] {
        let w = piece.len().min(WIDE);
        if w > 0 {
            let mut lanes = [[0.0; WIDE]; 3];
            let [a, b, center] = lanes.each_mut().map(|lane| &mut lane[..w]);
            let count = take_rows::<S, T>(load, [&mut *a, &mut *b, &mut *center], piece, w, 0);
            part = S::join(part, S::close(count, (a, b), center));
        }
    }
    S::settle(part, || x.iter().any(|v| load(*v).is_nan()))
}

#[inline(always)]
fn columns<S: Statistic, T: Copy>(
    load: impl Fn(T) -> f32 + Copy,
    x: &[T],
    k: usize,
    first: usize,
    out: &mut [S::Part],
) {
    let mut lanes = [[0.0; TILE]; 3];
    let phases = phases(k);
    if phases == 1 {
        let [a, b, center] = lanes.each_mut().map(|lane| &mut lane[..out.len()]);
        let count = take_rows::<S, T>(load, [&mut *a, &mut *b, &mut *center], x, k, first);
        for (j, o) in out.iter_mut().enumerate() {
            *o = S::close(count, (&a[j..=j], &b[j..=j]), &center[j..=j]);
            *o = S::settle(*o, || any_nan(load, x, k, first + j));
        }
        return;
    }
    // Narrow rows lie side by side; those that do not fill the width come after.
    out.fill(S::nothing());
    let width = phases * k;
    let (whole, tail) = x.split_at(x.len() / width * width);
    for piece in [whole, tail] {
        let w = piece.len().min(width);
        if w == 0 {
            continue;
        }
        let [a, b, center] = lanes.each_mut().map(|lane| &mut lane[..w]);
        let count = take_rows::<S, T>(load, [&mut *a, &mut *b, &mut *center], piece, w, 0);
        for j in 0..w {
            let o = &mut out[j % k];
            let closed = S::close(count, (&a[j..=j], &b[j..=j]), &center[j..=j]);
            *o = S::join(*o, closed);
        }
    }
    for (j, o) in out.iter_mut().enumerate() {
        *o = S::settle(*o, || any_nan(load, x, k, first + j));
    }
}

/// Whether one is in a column.
#[cold]
fn any_nan<T: Copy>(load: impl Fn(T) -> f32, x: &[T], k: usize, column: usize) -> bool {
    let mut column = x.iter().skip(column).step_by(k);
    column.any(|v| load(*v).is_nan())
}

macro_rules! statistics {
    ($($name:ident { $($field:ident: $field_ty:ty),* } $statistic:ty: $in:ty, $load:expr, |$s:ident, $p:ident| $finish:expr;)*) => {$(
        #[derive(Clone, Copy)]
        pub(super) struct $name { $(pub $field: $field_ty),* }

        impl Reducer for $name {
            type In = $in;
            type Part = <$statistic as Statistic>::Part;
            type Out = $in;

            fn nothing(self) -> Self::Part { <$statistic>::nothing() }
            fn join(self, a: Self::Part, b: Self::Part) -> Self::Part { <$statistic>::join(a, b) }
            fn finish(self, $p: Self::Part) -> $in { let $s = self; let _ = $s; $finish }

            fn rows(self, path: CpuPath, x: &[$in], n: usize, out: &mut [Self::Part]) {
                #[inline(always)]
                fn body(x: &[$in], n: usize, out: &mut [<$statistic as Statistic>::Part]) {
                    if n == 0 {
                        return out.fill(<$statistic>::nothing());
                    }
                    for (x, o) in x.chunks_exact(n).zip(out) {
                        *o = row::<$statistic, $in>($load, x);
                    }
                }
                dispatch! {
                    fn run(x: &[$in], n: usize, out: &mut [<$statistic as Statistic>::Part]) = body;
                }
                run(path, x, n, out);
            }

            fn columns(self, path: CpuPath, x: &[$in], k: usize, first: usize, out: &mut [Self::Part]) {
                #[inline(always)]
                fn body(x: &[$in], k: usize, first: usize, out: &mut [<$statistic as Statistic>::Part]) {
                    columns::<$statistic, $in>($load, x, k, first, out);
                }
                dispatch! {
                    fn run(x: &[$in], k: usize, first: usize, out: &mut [<$statistic as Statistic>::Part]) = body;
                }
                run(path, x, k, first, out);
            }
        }
    )*};
}

/// Degrees of freedom that are lost, and whether the square root is wanted.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    pub ddof: f64,
    pub root: bool,
}

impl Wanted {
    fn of(self, [count, _, squares]: Spread) -> f64 {
        let variance = squares / (count - self.ddof).max(0.0);
        quiet(if self.root { variance.sqrt() } else { variance })
    }
}

fn log([most, sum]: [f64; 2]) -> f64 {
    let sum = if most.is_finite() || sum.is_nan() {
        most + libm::log(sum)
    } else {
        most
    };
    quiet(sum)
}

/// The same NaN whatever made it: its sign differs between instructions.
fn quiet(v: f64) -> f64 {
    if v.is_nan() { f64::NAN } else { v }
}

fn same(v: f32) -> f32 {
    v
}

statistics! {
    SpreadF32 { wanted: Wanted } Moments: f32, same, |s, p| s.wanted.of(p) as f32;
    SpreadF16 { wanted: Wanted } Moments: u16, f16_to_f32, |s, p| f32_to_f16(s.wanted.of(p) as f32);
    SpreadBf16 { wanted: Wanted } Moments: u16, bf16_to_f32, |s, p| f32_to_bf16(s.wanted.of(p) as f32);
    LogSumExpF32 {} Powers: f32, same, |_s, p| log(p) as f32;
    LogSumExpF16 {} Powers: u16, f16_to_f32, |_s, p| f32_to_f16(log(p) as f32);
    LogSumExpBf16 {} Powers: u16, bf16_to_f32, |_s, p| f32_to_bf16(log(p) as f32);
}

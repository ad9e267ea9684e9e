//! The inner loops: packing operands into panels, multiplying panels, and the sweep for few rows.
//!
//! A packed panel of `a` is `[k in sixteens][rows of a tile][16]`, one of `b` is `[k][columns of a tile]`.
//! Rows and columns that a tile lacks at the edge are there as zeros and are not stored.

#![expect(
    clippy::needless_range_loop,
    reason = "loops over fixed indices are what the compiler unrolls into registers"
)]

use std::ptr;

use super::vector::{Element, Load, Number, Vector};

/// Consecutive elements of one row of `a` that stay together when packed.
pub(in crate::cpu) const RUN: usize = 16;

/// Copies `rows` rows of `k` elements, `stride` apart, into panels of `tile` rows. The place must have room for
/// whole panels of whole runs.
pub(in crate::cpu) struct PackRows<T: Element> {
    pub from: *const T,
    pub stride: usize,
    pub rows: usize,
    pub k: usize,
    pub tile: usize,
    pub into: *mut T::Sum,
}

/// Copies `k` rows of `columns` elements, `stride` apart, into panels of `tile` columns.
pub(in crate::cpu) struct PackColumns<T: Element> {
    pub from: *const T,
    pub stride: usize,
    pub columns: usize,
    pub k: usize,
    pub tile: usize,
    pub into: *mut T::Sum,
}

/// Multiplies packed panels: `c (+)= a · b`, `c` with `stride` elements from row to row.
pub(in crate::cpu) struct Block<N> {
    pub a: *const N,
    pub b: *const N,
    pub c: *mut N,
    pub stride: usize,
    pub rows: usize,
    pub columns: usize,
    pub k: usize,
    /// Sums begin here, instead of going on from what is in `c`.
    pub first: bool,
    /// Sums end here: NaNs get their bits.
    pub last: bool,
}

/// `c = a · b` with `b` read where it lies, for few rows.
pub(in crate::cpu) struct Sweep<T: Element> {
    pub a: *const T,
    pub a_stride: usize,
    pub b: *const T,
    pub b_stride: usize,
    pub c: *mut T::Sum,
    pub c_stride: usize,
    pub rows: usize,
    pub columns: usize,
    pub k: usize,
}

/// Rounds rows of sums to the result's dtype.
pub(in crate::cpu) struct Round<T: Element> {
    pub from: *const T::Sum,
    pub from_stride: usize,
    pub to: *mut T,
    pub to_stride: usize,
    pub rows: usize,
    pub columns: usize,
}

/// # Safety
///
/// The processor has the instructions of `V`; the pointers are valid for what the sizes say.
#[inline(always)]
pub(in crate::cpu) unsafe fn pack_rows<V: Load<T, Lane = T::Sum>, T: Element>(job: &PackRows<T>) {
    let runs = job.k.div_ceil(RUN);
    for row in 0..job.rows.next_multiple_of(job.tile) {
        // SAFETY: rows below `rows` are readable for `k` elements; the panels have room.
        unsafe {
            let panel = row / job.tile * job.tile * runs * RUN;
            let mut into = job.into.add(panel + row % job.tile * RUN);
            if row >= job.rows {
                for _ in 0..runs {
                    ptr::write_bytes(into, 0, RUN);
                    into = into.add(job.tile * RUN);
                }
                continue;
            }
            let mut from = job.from.add(row * job.stride);
            for _ in 0..job.k / RUN {
                for i in (0..RUN).step_by(V::LANES) {
                    V::widen(from.add(i)).store(into.add(i));
                }
                from = from.add(RUN);
                into = into.add(job.tile * RUN);
            }
            for i in 0..job.k % RUN {
                into.add(i).write(from.add(i).read_unaligned().widen());
            }
        }
    }
}

/// # Safety
///
/// As for [`pack_rows`].
#[inline(always)]
pub(in crate::cpu) unsafe fn pack_columns<V: Load<T, Lane = T::Sum>, T: Element>(
    job: &PackColumns<T>,
) {
    let tile = job.tile;
    let whole = job.columns / tile;
    let rest = job.columns % tile;
    for k in 0..job.k {
        // SAFETY: the row is readable for `columns` elements; the panels have room.
        unsafe {
            let mut from = job.from.add(k * job.stride);
            let mut into = job.into.add(k * tile);
            for _ in 0..whole {
                for i in (0..tile).step_by(V::LANES) {
                    V::widen(from.add(i)).store(into.add(i));
                }
                from = from.add(tile);
                into = into.add(job.k * tile);
            }
            if rest > 0 {
                for i in 0..rest {
                    into.add(i).write(from.add(i).read_unaligned().widen());
                }
                ptr::write_bytes(into.add(rest), 0, tile - rest);
            }
        }
    }
}

/// # Safety
///
/// As for [`pack_rows`].
#[inline(always)]
pub(in crate::cpu) unsafe fn round<T: Element>(job: &Round<T>) {
    for row in 0..job.rows {
        // SAFETY: the rows are valid for `columns` elements, and the results are this thread's.
        let (from, to) = unsafe {
            (
                std::slice::from_raw_parts(job.from.add(row * job.from_stride), job.columns),
                job.to.add(row * job.to_stride),
            )
        };
        for (i, &sum) in from.iter().enumerate() {
            // SAFETY: as above.
            unsafe { to.add(i).write_unaligned(T::narrow(sum)) };
        }
    }
}

/// Panels of `C` rows (`A` and `B`: fewer, for the last ones) by panels of `P` registers.
///
/// # Safety
///
/// As for [`pack_rows`].
#[inline(always)]
pub(in crate::cpu) unsafe fn block<
    V: Vector,
    const A: usize,
    const B: usize,
    const C: usize,
    const P: usize,
>(
    job: &Block<V::Lane>,
) {
    let padded = job.k.next_multiple_of(RUN);
    let width = V::LANES * P;
    for j in (0..job.columns).step_by(width) {
        for i in (0..job.rows).step_by(C) {
            let rows = (job.rows - i).min(C);
            // SAFETY: panels of `C` rows and `width` columns are there; stores keep to `rows` and `columns`.
            unsafe {
                let tile = Block {
                    a: job.a.add(i * padded),
                    b: job.b.add(j * job.k),
                    c: job.c.add(i * job.stride + j),
                    rows,
                    columns: (job.columns - j).min(width),
                    ..*job
                };
                if rows <= A {
                    multiply::<V, A, C, P>(&tile);
                } else if rows <= B {
                    multiply::<V, B, C, P>(&tile);
                } else {
                    multiply::<V, C, C, P>(&tile);
                }
            }
        }
    }
}

/// Room for the largest tile.
const STAGE: usize = 12 * 32;

/// A tile of `R` rows out of a panel of `TILE`.
///
/// # Safety
///
/// As for [`block`].
#[inline(always)]
unsafe fn multiply<V: Vector, const R: usize, const TILE: usize, const P: usize>(
    job: &Block<V::Lane>,
) {
    let width = V::LANES * P;
    let Block { rows, columns, .. } = *job;
    if rows == R && columns == width {
        // SAFETY: the caller's promise.
        return unsafe { whole::<V, R, TILE, P>(job) };
    }
    // At the edge the tile is worked on in a place of its own, so that the loops have no conditions.
    const { assert!(R * V::LANES * P <= STAGE) };
    let mut stage = [V::Lane::ZERO; STAGE];
    // SAFETY: rows and columns that exist are copied; the stage has room for all.
    unsafe {
        let at = stage.as_mut_ptr();
        if !job.first {
            for r in 0..rows {
                ptr::copy_nonoverlapping(job.c.add(r * job.stride), at.add(r * width), columns);
            }
        }
        whole::<V, R, TILE, P>(&Block {
            c: at,
            stride: width,
            ..*job
        });
        for r in 0..rows {
            ptr::copy_nonoverlapping(at.add(r * width), job.c.add(r * job.stride), columns);
        }
    }
}

/// A tile all of which exists.
///
/// # Safety
///
/// As for [`block`].
#[inline(always)]
unsafe fn whole<V: Vector, const R: usize, const TILE: usize, const P: usize>(
    job: &Block<V::Lane>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[V::splat(V::Lane::ZERO); P]; R];
        if !job.first {
            load_tile(job.c, job.stride, &mut acc);
        }
        let (mut a, mut b) = (job.a, job.b);
        for _ in 0..job.k / RUN {
            for kk in 0..RUN {
                step::<V, R, P>(a.add(kk), b, &mut acc);
                b = b.add(V::LANES * P);
            }
            a = a.add(TILE * RUN);
        }
        for kk in 0..job.k % RUN {
            step::<V, R, P>(a.add(kk), b, &mut acc);
            b = b.add(V::LANES * P);
        }
        store_tile(job.c, job.stride, job.last, acc);
    }
}

/// One `k` for a tile.
///
/// # Safety
///
/// As for [`block`].
#[inline(always)]
unsafe fn step<V: Vector, const R: usize, const P: usize>(
    a: *const V::Lane,
    b: *const V::Lane,
    acc: &mut [[V; P]; R],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut columns = [V::splat(V::Lane::ZERO); P];
        for p in 0..P {
            columns[p] = V::load(b.add(p * V::LANES));
        }
        for r in 0..R {
            let a = V::splat(*a.add(r * RUN));
            for p in 0..P {
                acc[r][p] = V::fma(a, columns[p], acc[r][p]);
            }
        }
    }
}

/// # Safety
///
/// As for [`block`]; `R` rows of `P` registers are there.
#[inline(always)]
unsafe fn load_tile<V: Vector, const R: usize, const P: usize>(
    from: *const V::Lane,
    stride: usize,
    acc: &mut [[V; P]; R],
) {
    for r in 0..R {
        for p in 0..P {
            // SAFETY: the caller's promise.
            acc[r][p] = unsafe { V::load(from.add(r * stride + p * V::LANES)) };
        }
    }
}

/// # Safety
///
/// As for [`load_tile`].
#[inline(always)]
unsafe fn store_tile<V: Vector, const R: usize, const P: usize>(
    to: *mut V::Lane,
    stride: usize,
    last: bool,
    mut acc: [[V; P]; R],
) {
    // SAFETY: the caller's promise.
    unsafe {
        if last {
            for r in 0..R {
                for p in 0..P {
                    acc[r][p] = acc[r][p].one_nan();
                }
            }
        }
        for r in 0..R {
            for p in 0..P {
                acc[r][p].store(to.add(r * stride + p * V::LANES));
            }
        }
    }
}

/// Rows of `b` that one pass over `c` takes in.
const DEPTH: usize = 8;

/// # Safety
///
/// As for [`pack_rows`].
#[inline(always)]
pub(in crate::cpu) unsafe fn sweep<V: Load<T, Lane = T::Sum>, T: Element>(job: &Sweep<T>) {
    // SAFETY: the caller's promise.
    unsafe {
        if job.k == 0 {
            for row in 0..job.rows {
                for j in 0..job.columns {
                    job.c
                        .add(row * job.c_stride + j)
                        .write_unaligned(T::Sum::ZERO);
                }
            }
        }
        for k in (0..job.k).step_by(DEPTH) {
            for row in (0..job.rows).step_by(4) {
                match job.rows - row {
                    1 => sweep_rows::<V, T, 1>(job, row, k),
                    2 => sweep_rows::<V, T, 2>(job, row, k),
                    3 => sweep_rows::<V, T, 3>(job, row, k),
                    _ => sweep_rows::<V, T, 4>(job, row, k),
                }
            }
        }
    }
}

/// # Safety
///
/// As for [`sweep`]; there are `R` rows from `row` on.
#[inline(always)]
unsafe fn sweep_rows<V: Load<T, Lane = T::Sum>, T: Element, const R: usize>(
    job: &Sweep<T>,
    row: usize,
    k: usize,
) {
    let count = (job.k - k).min(DEPTH);
    let (first, last) = (k == 0, k + count == job.k);
    let mut a = [[T::Sum::ZERO; R]; DEPTH];
    for (kk, a) in a.iter_mut().enumerate().take(count) {
        for (r, a) in a.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *a = unsafe {
                job.a
                    .add((row + r) * job.a_stride + k + kk)
                    .read_unaligned()
            }
            .widen();
        }
    }
    // SAFETY: the caller's promise.
    unsafe {
        let b = job.b.add(k * job.b_stride);
        let c = job.c.add(row * job.c_stride);
        let mut j = 0;
        while j + 2 * V::LANES <= job.columns {
            sweep_tile::<V, T, R, 2>(job, &a, count, b.add(j), c.add(j), first, last);
            j += 2 * V::LANES;
        }
        while j + V::LANES <= job.columns {
            sweep_tile::<V, T, R, 1>(job, &a, count, b.add(j), c.add(j), first, last);
            j += V::LANES;
        }
        for j in j..job.columns {
            for r in 0..R {
                let c = c.add(r * job.c_stride + j);
                let mut sum = if first {
                    T::Sum::ZERO
                } else {
                    c.read_unaligned()
                };
                for (kk, a) in a.iter().enumerate().take(count) {
                    let b = b.add(kk * job.b_stride + j).read_unaligned();
                    sum = T::Sum::fma(a[r], b.widen(), sum);
                }
                c.write_unaligned(if last { sum.one_nan() } else { sum });
            }
        }
    }
}

/// # Safety
///
/// As for [`sweep`]; `P` registers of columns are there.
#[inline(always)]
unsafe fn sweep_tile<V: Load<T, Lane = T::Sum>, T: Element, const R: usize, const P: usize>(
    job: &Sweep<T>,
    a: &[[T::Sum; R]; DEPTH],
    count: usize,
    b: *const T,
    c: *mut T::Sum,
    first: bool,
    last: bool,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[V::splat(T::Sum::ZERO); P]; R];
        if !first {
            load_tile(c, job.c_stride, &mut acc);
        }
        if count == DEPTH {
            for (kk, a) in a.iter().enumerate() {
                sweep_step::<V, T, R, P>(a, b.add(kk * job.b_stride), &mut acc);
            }
        } else {
            for (kk, a) in a.iter().enumerate().take(count) {
                sweep_step::<V, T, R, P>(a, b.add(kk * job.b_stride), &mut acc);
            }
        }
        store_tile(c, job.c_stride, last, acc);
    }
}

/// One `k` of a sweep.
///
/// # Safety
///
/// As for [`sweep_tile`].
#[inline(always)]
unsafe fn sweep_step<V: Load<T, Lane = T::Sum>, T: Element, const R: usize, const P: usize>(
    a: &[T::Sum; R],
    b: *const T,
    acc: &mut [[V; P]; R],
) {
    for p in 0..P {
        // SAFETY: the caller's promise.
        unsafe {
            let b = V::widen(b.add(p * V::LANES));
            for r in 0..R {
                acc[r][p] = V::fma(V::splat(a[r]), b, acc[r][p]);
            }
        }
    }
}

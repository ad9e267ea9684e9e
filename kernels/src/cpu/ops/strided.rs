//! Copies between strided views: one engine for everything that only moves elements.
//!
//! Elements are bytes without a type and without an alignment. Axes that lie in one another are
//! merged, a short contiguous innermost axis becomes a wider element, and what is left is copied as
//! runs, as repeated elements, in square tiles (when source and result are contiguous along different
//! axes), or one by one.

use hotcell_graph::{Dim, Shape};

use super::split;

/// Axes of a view at most: those of a tensor.
pub(super) const MAX_AXES: usize = 8;

/// Fewer bytes than this stay on one thread.
const WORTH_BYTES: usize = 32 << 10;

/// One axis of a copy: its size, and the distance between its elements in the source and in the result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Axis {
    /// Elements.
    pub n: usize,
    /// Distance in the source, elements (bytes inside this file).
    pub from: isize,
    /// Distance in the result, elements (bytes inside this file).
    pub to: isize,
}

/// Distances between the elements of a dense row-major tensor. They do not depend on the row count, because
/// only the outermost axis can.
pub(super) fn strides(shape: &Shape) -> Vec<isize> {
    let mut strides = vec![1isize; shape.rank()];
    let mut next = 1isize;
    for (stride, dim) in strides.iter_mut().zip(shape.dims()).rev() {
        *stride = next;
        next = next.saturating_mul(dim.at(1).max(1) as isize);
    }
    strides
}

/// Elements before, along and after an axis.
pub(super) fn around(dims: &[Dim], axis: usize, rows: usize) -> (usize, usize, usize) {
    let product = |dims: &[Dim]| {
        let sizes = dims.iter().map(|d| d.at(rows));
        sizes.fold(1usize, usize::saturating_mul)
    };
    let (before, rest) = dims.split_at(axis.min(dims.len()));
    match rest.split_first() {
        Some((n, after)) => (product(before), n.at(rows), product(after)),
        None => (product(before), 1, 1),
    }
}

/// A short list of axes.
#[derive(Clone, Copy)]
struct Axes {
    axes: [Axis; MAX_AXES],
    rank: usize,
}

impl Axes {
    fn as_slice(&self) -> &[Axis] {
        &self.axes[..self.rank]
    }

    /// Merges axes that lie in one another; sizes of 1 vanish.
    fn collapse(axes: impl Iterator<Item = Axis>) -> Self {
        let mut out = Self {
            axes: [Axis::default(); MAX_AXES],
            rank: 0,
        };
        for axis in axes.take(MAX_AXES).filter(|a| a.n != 1) {
            let n = axis.n as isize;
            match out.axes[..out.rank].last_mut() {
                Some(last) if last.from == axis.from * n && last.to == axis.to * n => {
                    *last = Axis {
                        n: last.n * axis.n,
                        ..axis
                    };
                }
                _ => {
                    out.axes[out.rank] = axis;
                    out.rank += 1;
                }
            }
        }
        out
    }
}

/// Copies part `part` of `parts` of a view whose elements have `bytes` bytes (1, 2, 4 or 8).
///
/// # Safety
/// Every element of the view lies in memory that may be read at `from` and written at `to`, the two do not
/// overlap, and nobody else touches the result.
pub(super) unsafe fn copy(
    bytes: usize,
    axes: &[Axis],
    from: *const u8,
    to: *mut u8,
    part: usize,
    parts: usize,
) {
    let elements: usize = axes.iter().map(|a| a.n).product();
    let shared = elements * bytes >= WORTH_BYTES;
    if elements == 0 || (!shared && part > 0) {
        return;
    }
    let scaled = axes.iter().map(|a| Axis {
        n: a.n,
        from: a.from * bytes as isize,
        to: a.to * bytes as isize,
    });
    let mut view = Axes::collapse(scaled);
    let mut bytes = bytes;
    if let Some(&last) = view.as_slice().last() {
        let run = last.n * bytes;
        let dense = last.from == bytes as isize && last.to == last.from;
        if dense && matches!(run, 2 | 4 | 8 | 16) {
            bytes = run;
            view.rank -= 1;
        }
    }
    let (mut from, mut to) = (from, to);
    if shared && parts > 1 && view.rank > 0 {
        let axes = &mut view.axes[..view.rank];
        let largest = (0..axes.len()).max_by_key(|&a| (axes[a].n, axes.len() - a));
        let chosen = axes.iter().position(|a| a.n >= 4 * parts).or(largest);
        let chosen = chosen.unwrap_or(0);
        // Whole cache lines where parts meet in a line.
        let step = if chosen + 1 == axes.len() { 64 } else { 1 };
        let axis = &mut axes[chosen];
        let range = split(axis.n, step, part, parts);
        if range.is_empty() {
            return;
        }
        axis.n = range.len();
        from = from.wrapping_offset(axis.from * range.start as isize);
        to = to.wrapping_offset(axis.to * range.start as isize);
    } else if part > 0 {
        return;
    }
    // SAFETY: the caller's promise; this part's elements are a subset of the view.
    unsafe {
        match bytes {
            1 => walk::<1, 64>(view, from, to),
            2 => walk::<2, 32>(view, from, to),
            4 => walk::<4, 16>(view, from, to),
            8 => walk::<8, 8>(view, from, to),
            _ => walk::<16, 4>(view, from, to),
        }
    }
}

/// How the innermost axes are copied.
#[derive(Clone, Copy)]
enum Inner {
    Runs,
    Repeat,
    Tiles(Axis),
    Each,
}

/// Copies elements of `N` bytes, `T` to a line of the cache; strides are in bytes.
unsafe fn walk<const N: usize, const T: usize>(view: Axes, from: *const u8, to: *mut u8) {
    let mut outer = view;
    let mut take_last = || match outer.rank {
        0 => Axis {
            n: 1,
            from: N as isize,
            to: N as isize,
        },
        r => {
            outer.rank -= 1;
            outer.axes[r - 1]
        }
    };
    let last = take_last();
    let n = N as isize;
    let tiled = outer.as_slice().iter().position(|a| a.from == n && a.n > 3);
    let inner = match (last.from, last.to == n, tiled) {
        (f, true, _) if f == n => Inner::Runs,
        (0, true, _) => Inner::Repeat,
        (_, true, Some(at)) if last.n > 3 => {
            let rows = outer.axes[at];
            outer.axes.copy_within(at + 1..outer.rank, at);
            outer.rank -= 1;
            Inner::Tiles(rows)
        }
        _ => Inner::Each,
    };
    // The innermost of the outer axes has a plain loop, the rest count like an odometer.
    let middle = match outer.rank {
        0 => Axis {
            n: 1,
            from: 0,
            to: 0,
        },
        r => {
            outer.rank -= 1;
            outer.axes[r - 1]
        }
    };
    let mut at = [0usize; MAX_AXES];
    let (mut from, mut to) = (from, to);
    loop {
        for i in 0..middle.n as isize {
            let f = from.wrapping_offset(middle.from * i);
            let t = to.wrapping_offset(middle.to * i);
            // SAFETY: the caller's promise for the elements of these axes.
            unsafe {
                match inner {
                    Inner::Runs => std::ptr::copy_nonoverlapping(f, t, last.n * N),
                    Inner::Repeat => {
                        let value = f.cast::<[u8; N]>().read();
                        std::slice::from_raw_parts_mut(t.cast::<[u8; N]>(), last.n).fill(value);
                    }
                    Inner::Tiles(rows) => tiles::<N, T>(rows, last, f, t),
                    Inner::Each => each::<N>(last, f, t),
                }
            }
        }
        let mut axis = outer.rank;
        loop {
            let Some(next) = axis.checked_sub(1) else {
                return;
            };
            axis = next;
            let a = outer.axes[axis];
            at[axis] += 1;
            from = from.wrapping_offset(a.from);
            to = to.wrapping_offset(a.to);
            if at[axis] < a.n {
                break;
            }
            at[axis] = 0;
            from = from.wrapping_offset(-a.from * a.n as isize);
            to = to.wrapping_offset(-a.to * a.n as isize);
        }
    }
}

unsafe fn each<const N: usize>(axis: Axis, from: *const u8, to: *mut u8) {
    for i in 0..axis.n as isize {
        // SAFETY: the caller's promise.
        unsafe {
            let value = from.offset(axis.from * i).cast::<[u8; N]>().read();
            to.offset(axis.to * i).cast::<[u8; N]>().write(value);
        }
    }
}

/// `rows` is contiguous in the source, `columns` in the result: squares are read and written by whole lines.
unsafe fn tiles<const N: usize, const T: usize>(
    rows: Axis,
    columns: Axis,
    from: *const u8,
    to: *mut u8,
) {
    // Lines of a row of the source that are read before the next row's: fewer changes of page.
    let outer = 4 * T;
    for r0 in (0..rows.n).step_by(outer) {
        let r1 = rows.n.min(r0 + outer);
        for c0 in (0..columns.n).step_by(T) {
            let c1 = columns.n.min(c0 + T);
            for r in (r0..r1).step_by(T) {
                let (height, width) = (r1.min(r + T) - r, c1 - c0);
                let f = from
                    .wrapping_offset(columns.from * c0 as isize)
                    .wrapping_add(r * N);
                let t = to
                    .wrapping_offset(rows.to * r as isize)
                    .wrapping_add(c0 * N);
                let rest = |n, axis: Axis| Axis { n, ..axis };
                // SAFETY: the caller's promise; the tile lies inside both axes.
                unsafe {
                    if height == T && width == T {
                        match N {
                            1 => tile::<N, 16, T>(columns.from, rows.to, f, t),
                            2 => tile::<N, 8, T>(columns.from, rows.to, f, t),
                            4 => tile::<N, 4, T>(columns.from, rows.to, f, t),
                            8 => tile::<N, 2, T>(columns.from, rows.to, f, t),
                            _ => tile::<N, 1, T>(columns.from, rows.to, f, t),
                        }
                    } else {
                        for i in 0..height as isize {
                            let t = t.offset(rows.to * i);
                            each::<N>(rest(width, columns), f.offset(i * N as isize), t);
                        }
                    }
                }
            }
        }
    }
}

/// Transposes `T` × `T` elements of `N` bytes, which are lines of 64 bytes on both sides; `V` make a vector.
#[inline(always)]
unsafe fn tile<const N: usize, const V: usize, const T: usize>(
    from_stride: isize,
    to_stride: isize,
    from: *const u8,
    to: *mut u8,
) {
    let mut lines = [[Vector::default(); 4]; T];
    for c in (0..T).step_by(V) {
        for h in 0..T / V {
            let mut square = [Vector::default(); V];
            for (i, vector) in square.iter_mut().enumerate() {
                let at = from
                    .wrapping_offset(from_stride * (c + i) as isize)
                    .wrapping_add(h * 16);
                // SAFETY: the caller's promise: `T` elements lie in this line.
                *vector = unsafe { at.cast::<Vector>().read_unaligned() };
            }
            for (i, vector) in transposed::<N, V>(square).into_iter().enumerate() {
                lines[h * V + i][c / V] = vector;
            }
        }
    }
    for (r, line) in lines.iter().enumerate() {
        let to = to.wrapping_offset(to_stride * r as isize);
        // SAFETY: as above.
        unsafe { to.cast::<[Vector; 4]>().write_unaligned(*line) };
    }
}

/// A square of `V` vectors of `V` elements: interleaving the halves moves one bit of an element's address from
/// its vector's number to its place there, and one the other way.
#[inline(always)]
fn transposed<const N: usize, const V: usize>(mut square: [Vector; V]) -> [Vector; V] {
    for _ in 0..V.trailing_zeros() {
        let before = square;
        for i in 0..V / 2 {
            (square[2 * i], square[2 * i + 1]) = interleave::<N>(before[i], before[i + V / 2]);
        }
    }
    square
}

/// Sixteen bytes.
#[cfg(target_arch = "x86_64")]
type Vector = Sse;

/// Sixteen bytes in a register.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
struct Sse(std::arch::x86_64::__m128i);

#[cfg(target_arch = "x86_64")]
impl Default for Sse {
    #[inline(always)]
    fn default() -> Self {
        // SAFETY: every processor of this architecture has SSE2.
        Self(unsafe { std::arch::x86_64::_mm_setzero_si128() })
    }
}

/// The elements of `N` bytes of two vectors in turns.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn interleave<const N: usize>(Sse(a): Sse, Sse(b): Sse) -> (Sse, Sse) {
    use std::arch::x86_64::*;
    // SAFETY: every processor of this architecture has SSE2.
    let (low, high) = unsafe {
        match N {
            1 => (_mm_unpacklo_epi8(a, b), _mm_unpackhi_epi8(a, b)),
            2 => (_mm_unpacklo_epi16(a, b), _mm_unpackhi_epi16(a, b)),
            4 => (_mm_unpacklo_epi32(a, b), _mm_unpackhi_epi32(a, b)),
            _ => (_mm_unpacklo_epi64(a, b), _mm_unpackhi_epi64(a, b)),
        }
    };
    (Sse(low), Sse(high))
}

/// Sixteen bytes.
#[cfg(not(target_arch = "x86_64"))]
type Vector = [u8; 16];

/// The elements of `N` bytes of two vectors in turns.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn interleave<const N: usize>(a: Vector, b: Vector) -> (Vector, Vector) {
    let mut both = [0; 32];
    for (i, (a, b)) in a.chunks(N).zip(b.chunks(N)).enumerate() {
        both[2 * i * N..][..N].copy_from_slice(a);
        both[(2 * i + 1) * N..][..N].copy_from_slice(b);
    }
    let (mut low, mut high) = ([0; 16], [0; 16]);
    low.copy_from_slice(&both[..16]);
    high.copy_from_slice(&both[16..]);
    (low, high)
}

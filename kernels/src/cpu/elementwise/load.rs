//! How an operand repeats along a result, and how a tile of it is read.

use hotcell_graph::{Dim, Shape};

/// Axes that a tensor can have.
const MOST_AXES: usize = 8;

/// Where an operand's element for element `i` of the result is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Pattern {
    /// At `i`.
    Full,
    /// The only one there is.
    Scalar,
    /// At `i` modulo the period.
    Periodic(usize),
    /// By axes, outermost first: size and stride in elements. The outermost size is not looked at.
    Strided(Vec<(usize, usize)>),
}

impl Pattern {
    /// How `operand` broadcasts to `result` (NumPy's rule, which has been checked).
    pub fn new(operand: &Shape, result: &Shape) -> Self {
        // Innermost first, axes that go together merged.
        let mut axes: Vec<(usize, usize)> = Vec::new();
        let (mut elements, mut stretch) = (1usize, 1usize);
        for (back, &size) in result.dims().iter().rev().enumerate() {
            let own = operand.rank().checked_sub(back + 1);
            let own = own.map_or(Dim::Fixed(1), |axis| operand.dims()[axis]);
            if size == Dim::Fixed(1) {
                continue;
            }
            let stride = if own == size { elements } else { 0 };
            if let Dim::Fixed(n) = own {
                elements = elements.saturating_mul(n);
            }
            // The row dimension is outermost: its size is never needed.
            let size = size.at(1);
            match axes.last_mut() {
                Some((n, s)) if stride == s.saturating_mul(stretch) => {
                    *n = n.saturating_mul(size);
                    stretch = stretch.saturating_mul(size);
                }
                _ => {
                    axes.push((size, stride));
                    stretch = size;
                }
            }
        }
        axes.reverse();
        match axes.as_slice() {
            [] | [(_, 0)] => Pattern::Scalar,
            [(_, 1)] => Pattern::Full,
            [(_, 0), (n, 1)] => Pattern::Periodic(*n),
            _ => Pattern::Strided(axes),
        }
    }
}

/// Reads elements `at..at + n` of a strided operand. `None`: they were written to `out`; else they lie together
/// at the address.
///
/// # Safety
/// `base` leads to the operand's elements, `out` to room for `n`, and the axes to nothing outside.
pub(super) unsafe fn strided<T: Copy>(
    base: *const T,
    axes: &[(usize, usize)],
    at: usize,
    out: *mut T,
    n: usize,
) -> Option<*const T> {
    let mut place = [0usize; MOST_AXES];
    let mut rest = at;
    for (p, (size, _)) in place.iter_mut().zip(axes).skip(1).rev() {
        *p = rest % size;
        rest /= size;
    }
    place[0] = rest;
    let last = axes.len() - 1;
    let (inner, stride) = axes[last];
    let mut from: usize = place.iter().zip(axes).map(|(p, (_, s))| p * s).sum();
    let mut done = 0;
    while done < n {
        let run = if last == 0 { n } else { inner - place[last] }.min(n - done);
        // SAFETY: the caller's promise; `run` stays inside the innermost axis and inside `n`.
        unsafe {
            if stride == 0 {
                let value = *base.add(from);
                std::slice::from_raw_parts_mut(out.add(done), run).fill(value);
            } else if run == n {
                return Some(base.add(from));
            } else {
                std::ptr::copy_nonoverlapping(base.add(from), out.add(done), run);
            }
        }
        done += run;
        from -= place[last] * stride;
        place[last] = 0;
        for axis in (0..last).rev() {
            place[axis] += 1;
            from += axes[axis].1;
            if axis == 0 || place[axis] < axes[axis].0 {
                break;
            }
            from -= place[axis] * axes[axis].1;
            place[axis] = 0;
        }
    }
    None
}

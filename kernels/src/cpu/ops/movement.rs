//! Kernels that move elements: transpose, broadcast, slice and pad.

use hotcell_graph::{
    DType, Dim, Shape,
    op::{
        Call, ValueSpec,
        shape::{permutation, slice_of_axis},
    },
};

use super::{
    Entry,
    strided::{self, Axis, MAX_AXES, strides},
    unsupported,
};
use crate::{
    backend::DeviceError,
    cpu::plan::{Kernel, Launcher, Reg, Run},
};

/// What this file has kernels for.
pub(super) static ENTRIES: &[Entry] = &[
    // A copy, not the same memory: what is aligned for one dtype need not be for another.
    Entry {
        op: "bitcast",
        supports: plain,
        launch: bitcast,
    },
    Entry {
        op: "transpose",
        supports: plain,
        launch: transpose,
    },
    Entry {
        op: "broadcast_to",
        supports: plain,
        launch: broadcast_to,
    },
    Entry {
        op: "slice",
        supports: plain,
        launch: slice,
    },
    Entry {
        op: "pad",
        supports: pad_fits,
        launch: pad,
    },
];

/// Whether every tensor has elements that can be moved one by one.
pub(super) fn plain(call: &Call<'_>) -> bool {
    call.inputs.iter().all(|i| match i {
        ValueSpec::Tensor(t) => !t.dtype.is_block(),
        ValueSpec::Absent => true,
        ValueSpec::Cache(_) => false,
    })
}

/// The dtype and shape of a call's only result.
pub(super) fn result(call: &Call<'_>) -> Result<(DType, Shape), DeviceError> {
    let spec = (call.op.infer)(call)?.into_iter().next();
    let spec = spec.ok_or_else(|| unsupported(call))?;
    Ok((spec.dtype, spec.shape))
}

/// A copy between strided views: `out[…] = x[offset + …]`.
pub(super) struct Move {
    pub x: Reg,
    pub out: Reg,
    /// Of an element.
    pub bytes: usize,
    /// Sizes, and distances in the source and in the result.
    pub axes: Vec<(Dim, isize, isize)>,
    /// Where the source's first element lies, elements.
    pub from: isize,
    /// Where the result's first element lies, elements.
    pub to: isize,
}

impl Move {
    /// A copy of everything.
    pub(super) fn whole(x: Reg, out: Reg, bytes: usize, shape: &Shape) -> Self {
        let steps = strides(shape);
        let axes = shape.dims().iter().zip(&steps);
        Self {
            x,
            out,
            bytes,
            axes: axes.map(|(d, s)| (*d, *s, *s)).collect(),
            from: 0,
            to: 0,
        }
    }
}

/// The axes of an execution.
fn resolve(axes: &[(Dim, isize, isize)], rows: usize, to: &mut [Axis; MAX_AXES]) -> usize {
    for (axis, &(dim, from, stride)) in to.iter_mut().zip(axes) {
        *axis = Axis {
            n: dim.at(rows),
            from,
            to: stride,
        };
    }
    axes.len().min(MAX_AXES)
}

impl Kernel for Move {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        let mut axes = [Axis::default(); MAX_AXES];
        let rank = resolve(&self.axes, run.rows, &mut axes);
        let bytes = self.bytes as isize;
        let from = run.pointer(self.x).wrapping_offset(self.from * bytes);
        let to = run.pointer(self.out).wrapping_offset(self.to * bytes);
        // SAFETY: the launch made the views from the specs of both places; they are different places,
        // and parts copy elements of their own.
        unsafe { strided::copy(self.bytes, &axes[..rank], from, to, part, parts) };
    }
}

fn bitcast(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (&[x], &[out]) = (ins, outs) else {
        return Err(unsupported(call));
    };
    let t = call.tensor(0)?;
    let kernel = Move::whole(x, out, t.dtype.block_bytes(), &t.shape);
    launcher.step_with_bytes(kernel, &[x], &[out]);
    Ok(())
}

fn transpose(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (&[x], &[out]) = (ins, outs) else {
        return Err(unsupported(call));
    };
    let t = call.tensor(0)?;
    let (_, shape) = result(call)?;
    let (from, to) = (strides(&t.shape), strides(&shape));
    let order = permutation(call.ints(0)?, from.len()).ok_or_else(|| unsupported(call))?;
    let axes = shape.dims().iter().zip(order).zip(to);
    let kernel = Move {
        x,
        out,
        bytes: t.dtype.block_bytes(),
        axes: axes.map(|((d, a), to)| (*d, from[a], to)).collect(),
        from: 0,
        to: 0,
    };
    launcher.step_with_bytes(kernel, &[x], &[out]);
    Ok(())
}

fn broadcast_to(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (&[x], &[out]) = (ins, outs) else {
        return Err(unsupported(call));
    };
    let t = call.tensor(0)?;
    let (_, shape) = result(call)?;
    let to = strides(&shape);
    let before = shape
        .rank()
        .checked_sub(t.shape.rank())
        .ok_or_else(|| unsupported(call))?;
    // An axis of size 1 stays where it is; new axes are before the others.
    let kept = t.shape.dims().iter().zip(strides(&t.shape));
    let kept = kept.map(|(d, s)| if *d == Dim::Fixed(1) { 0 } else { s });
    let from = std::iter::repeat_n(0, before).chain(kept);
    let axes = shape.dims().iter().zip(from).zip(to);
    let kernel = Move {
        x,
        out,
        bytes: t.dtype.block_bytes(),
        axes: axes.map(|((d, from), to)| (*d, from, to)).collect(),
        from: 0,
        to: 0,
    };
    launcher.step_with_bytes(kernel, &[x], &[out]);
    Ok(())
}

fn slice(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (&[x], &[out]) = (ins, outs) else {
        return Err(unsupported(call));
    };
    let t = call.tensor(0)?;
    let (_, shape) = result(call)?;
    let bounds = call.ints(0)?.iter().zip(call.ints(1)?).zip(call.ints(2)?);
    let to = shape.dims().iter().zip(strides(&shape));
    let from = t.shape.dims().iter().zip(strides(&t.shape));
    let mut axes = Vec::with_capacity(shape.rank());
    let mut offset = 0isize;
    for (((dim, stride), (n, to)), ((start, stop), step)) in from.zip(to).zip(bounds) {
        if let Dim::Fixed(size) = *dim {
            let first = slice_of_axis(size, *start, *stop, *step).map_or(0, |(first, _)| first);
            offset += stride * first as isize;
        }
        // One element or none has no next one, however long the step.
        let single = matches!(n, Dim::Fixed(0 | 1));
        let step = if single { 0 } else { *step as isize };
        axes.push((*n, stride * step, to));
    }
    let kernel = Move {
        x,
        out,
        bytes: t.dtype.block_bytes(),
        axes,
        from: offset,
        to: 0,
    };
    launcher.step_with_bytes(kernel, &[x], &[out]);
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Constant,
    Edge,
    Reflect,
    Wrap,
}

/// Consecutive places of a padded axis that come from consecutive elements (or one element, or the value).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segment {
    to: usize,
    n: usize,
    /// First element and step; `None`: the padding value.
    from: Option<(usize, isize)>,
}

/// An axis with more places before and after its elements.
#[derive(Clone, Copy)]
struct Padded {
    n: usize,
    low: usize,
    high: usize,
    mode: Mode,
}

impl Padded {
    /// The segment that begins at place `at`, of which there may be as many as places.
    fn segment(self, at: usize) -> Option<Segment> {
        let Padded { n, low, high, mode } = self;
        let total = low + n + high;
        if at >= total {
            return None;
        }
        let inside = at >= low && at < low + n;
        // Places until this region of the axis ends.
        let region = if at < low {
            low - at
        } else if inside {
            low + n - at
        } else {
            total - at
        };
        // The place inside a period that begins with the axis.
        let phase = |period: usize| (at as i128 - low as i128).rem_euclid(period as i128) as usize;
        let (len, from) = match mode {
            _ if inside => (region, Some((at - low, 1))),
            Mode::Constant => (region, None),
            // One element repeats, whatever shows it.
            Mode::Wrap | Mode::Reflect if n < 2 => (region, Some((0, 0))),
            Mode::Edge => (region, Some((if at < low { 0 } else { n.max(1) - 1 }, 0))),
            Mode::Wrap => {
                let q = phase(n);
                (region.min(n - q), Some((q, 1)))
            }
            Mode::Reflect => {
                let period = 2 * (n - 1);
                let q = phase(period);
                if q < n - 1 {
                    (region.min(n - 1 - q), Some((q, 1)))
                } else {
                    (region.min(period - q), Some((period - q, -1)))
                }
            }
        };
        Some(Segment {
            to: at,
            n: len,
            from,
        })
    }

    fn segments(self) -> impl Iterator<Item = Segment> {
        let next = move |s: &Segment| self.segment(s.to + s.n);
        std::iter::successors(self.segment(0), next)
    }
}

struct PadAxis {
    n: Dim,
    from: isize,
    to: isize,
    /// `None`: the axis is copied as it is.
    padded: Option<Padded>,
    /// Size in the result.
    size: Dim,
}

struct Pad {
    x: Reg,
    value: Reg,
    out: Reg,
    bytes: usize,
    axes: Vec<PadAxis>,
}

/// What [`Pad::boxes`] hands down.
struct Boxes<'a> {
    x: *const u8,
    value: *const u8,
    out: *mut u8,
    rows: usize,
    part: usize,
    parts: usize,
    pad: &'a Pad,
}

impl Boxes<'_> {
    /// Every combination of segments is one strided copy.
    unsafe fn walk(&self, level: usize, axes: &mut [Axis; MAX_AXES], from: isize, to: isize) {
        let bytes = self.pad.bytes;
        let Some(axis) = self.pad.axes.get(level).filter(|_| level < MAX_AXES) else {
            let x = self.x.wrapping_offset(from * bytes as isize);
            let out = self.out.wrapping_offset(to * bytes as isize);
            // SAFETY: segments lie inside their axes; boxes do not overlap.
            unsafe { strided::copy(bytes, &axes[..level], x, out, self.part, self.parts) };
            return;
        };
        let Some(padded) = axis.padded else {
            axes[level] = Axis {
                n: axis.n.at(self.rows),
                from: axis.from,
                to: axis.to,
            };
            // SAFETY: the caller's promise.
            return unsafe { self.walk(level + 1, axes, from, to) };
        };
        for segment in padded.segments() {
            let to = to + axis.to * segment.to as isize;
            let Some((first, step)) = segment.from else {
                // Outside along this axis: the whole of the axes inside it is the value.
                axes[level] = Axis {
                    n: segment.n,
                    from: 0,
                    to: axis.to,
                };
                for (a, inner) in axes.iter_mut().zip(&self.pad.axes).skip(level + 1) {
                    *a = Axis {
                        n: inner.size.at(self.rows),
                        from: 0,
                        to: inner.to,
                    };
                }
                let mut fill = *axes;
                fill.iter_mut().for_each(|a| a.from = 0);
                let rank = self.pad.axes.len().min(MAX_AXES);
                let out = self.out.wrapping_offset(to * bytes as isize);
                // SAFETY: as above; all strides of the source are 0.
                unsafe {
                    strided::copy(bytes, &fill[..rank], self.value, out, self.part, self.parts);
                }
                continue;
            };
            axes[level] = Axis {
                n: segment.n,
                from: axis.from * step,
                to: axis.to,
            };
            // SAFETY: the caller's promise.
            unsafe { self.walk(level + 1, axes, from + axis.from * first as isize, to) };
        }
    }
}

impl Kernel for Pad {
    unsafe fn run(&self, run: &Run<'_>, part: usize, parts: usize) {
        static ZERO: [u8; 8] = [0; 8];
        if self.axes.iter().any(|axis| axis.size.at(run.rows) == 0) {
            return;
        }
        let boxes = Boxes {
            x: run.pointer(self.x),
            value: match self.value {
                Reg::ABSENT => ZERO.as_ptr(),
                value => run.pointer(value),
            },
            out: run.pointer(self.out),
            rows: run.rows,
            part,
            parts,
            pad: self,
        };
        let mut axes = [Axis::default(); MAX_AXES];
        // SAFETY: the launch made the axes from the specs; parts write elements of their own.
        unsafe { boxes.walk(0, &mut axes, 0, 0) };
    }
}

fn pad_fits(call: &Call<'_>) -> bool {
    let value = call.optional(1).ok().flatten().map(|v| v.dtype);
    let dtype = call.tensor(0).map(|t| t.dtype);
    plain(call) && dtype.is_ok_and(|d| value.is_none_or(|v| v == d))
}

fn pad(
    launcher: &mut Launcher,
    call: &Call<'_>,
    ins: &[Reg],
    outs: &[Reg],
) -> Result<(), DeviceError> {
    let (&[x, value], &[out]) = (ins, outs) else {
        return Err(unsupported(call));
    };
    let t = call.tensor(0)?;
    let (_, shape) = result(call)?;
    let mode = match call.name(2)? {
        "constant" => Mode::Constant,
        "edge" => Mode::Edge,
        "reflect" => Mode::Reflect,
        "wrap" => Mode::Wrap,
        _ => return Err(unsupported(call)),
    };
    let (low, high) = (call.ints(0)?, call.ints(1)?);
    let sizes = t.shape.dims().iter().zip(shape.dims());
    let steps = strides(&t.shape).into_iter().zip(strides(&shape));
    let axes = sizes.zip(steps).zip(low.iter().zip(high));
    let axes = axes.map(|(((n, size), (from, to)), (low, high))| {
        let padded = match (*n, *low, *high) {
            (Dim::Rows, ..) | (_, 0, 0) => None,
            (Dim::Fixed(n), low, high) => Some(Padded {
                n,
                low: low as usize,
                high: high as usize,
                mode,
            }),
        };
        PadAxis {
            n: *n,
            from,
            to,
            padded,
            size: *size,
        }
    });
    let kernel = Pad {
        x,
        value,
        out,
        bytes: t.dtype.block_bytes(),
        axes: axes.collect(),
    };
    let reads: &[Reg] = if value == Reg::ABSENT {
        &[x]
    } else {
        &[x, value]
    };
    launcher.step_with_bytes(kernel, reads, &[out]);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The elements that a padded axis shows, −1 for the value.
    fn shown(n: usize, low: usize, high: usize, mode: Mode) -> Vec<i64> {
        let mut out = vec![];
        for s in (Padded { n, low, high, mode }).segments() {
            assert_eq!(s.to, out.len());
            let at = |i: usize| s.from.map_or(-1, |(f, d)| f as i64 + d as i64 * i as i64);
            out.extend((0..s.n).map(at));
        }
        out
    }

    // Expected values: numpy.pad(numpy.arange(n), (low, high), mode).
    #[test]
    fn segments_are_numpys() {
        assert_eq!(shown(3, 2, 1, Mode::Constant), [-1, -1, 0, 1, 2, -1]);
        assert_eq!(shown(3, 2, 1, Mode::Edge), [0, 0, 0, 1, 2, 2]);
        assert_eq!(
            shown(3, 5, 6, Mode::Reflect),
            [1, 0, 1, 2, 1, 0, 1, 2, 1, 0, 1, 2, 1, 0]
        );
        assert_eq!(shown(1, 2, 1, Mode::Reflect), [0, 0, 0, 0]);
        assert_eq!(
            shown(3, 4, 5, Mode::Wrap),
            [2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1]
        );
        assert_eq!(shown(0, 1, 1, Mode::Constant), [-1, -1]);
    }
}

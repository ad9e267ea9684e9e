//! Where the windows of a convolution or a pooling lie.

use std::ops::Range;

use hotcell_graph::{
    DType, Dim,
    op::{Call, ValueSpec},
};

/// One spatial axis.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis {
    pub size: usize,
    pub window: usize,
    pub stride: usize,
    pub low: usize,
    pub dilation: usize,
    /// Size of the result.
    pub out: usize,
}

impl Axis {
    /// An axis that is not there.
    const ONE: Axis = Axis {
        size: 1,
        window: 1,
        stride: 1,
        low: 0,
        dilation: 1,
        out: 1,
    };

    /// The place of tap 0 of result `o`; may be in the padding.
    pub fn start(&self, o: usize) -> i64 {
        (o * self.stride) as i64 - self.low as i64
    }

    /// The taps of result `o` that are not in the padding: a window may be far larger than what it lies on.
    pub fn taps(&self, o: usize) -> Range<usize> {
        let (start, dilation) = (self.start(o), self.dilation as i64);
        let first = ((-start).max(0) + dilation - 1) / dilation;
        let room = self.size as i64 - start;
        let end = (room.max(0) + dilation - 1) / dilation;
        let end = (end as usize).min(self.window);
        (first as usize).min(end)..end
    }

    /// Whether the taps lie on the axis one to one, without padding.
    pub fn is_plain(&self) -> bool {
        self.window == 1 && self.stride == 1 && self.low == 0 && self.out == self.size
    }
}

/// An image with its channels first, and windows on it.
#[derive(Clone, Debug)]
pub(super) struct Windows {
    pub dtype: DType,
    /// Images.
    pub batch: Dim,
    pub channels: usize,
    /// Three axes; those that are missing come first.
    pub axes: [Axis; 3],
}

impl Windows {
    /// Reads input 0 and the four lists that begin at attribute `at`.
    pub fn of(call: &Call<'_>, window: &[usize], at: usize) -> Option<Windows> {
        let Some(ValueSpec::Tensor(x)) = call.inputs.first() else {
            return None;
        };
        let &[batch, Dim::Fixed(channels), ref spatial @ ..] = x.shape.dims() else {
            return None;
        };
        let mut axes = [Axis::ONE; 3];
        let skip = axes.len().checked_sub(spatial.len())?;
        for (i, axis) in axes.iter_mut().skip(skip).enumerate() {
            let get = |list: usize| usize::try_from(*call.ints(at + list).ok()?.get(i)?).ok();
            let (Dim::Fixed(size), &window) = (*spatial.get(i)?, window.get(i)?) else {
                return None;
            };
            let (stride, low, high, dilation) = (get(0)?, get(1)?, get(2)?, get(3)?);
            let span = dilation
                .checked_mul(window.checked_sub(1)?)?
                .checked_add(1)?;
            let padded = size.checked_add(low)?.checked_add(high)?;
            *axis = Axis {
                size,
                window,
                stride,
                low,
                dilation,
                out: padded.checked_sub(span)? / stride + 1,
            };
        }
        Some(Windows {
            dtype: x.dtype,
            batch,
            channels,
            axes,
        })
    }

    /// Elements of one channel of the input.
    pub fn plane(&self) -> usize {
        self.axes.iter().map(|axis| axis.size).product()
    }

    /// Elements of one channel of the result.
    pub fn plane_out(&self) -> usize {
        self.axes.iter().map(|axis| axis.out).product()
    }

    /// The place of element `i` of a result's channel along each axis.
    pub fn place(&self, i: usize) -> [usize; 3] {
        let [_, b, c] = self.axes;
        [i / c.out / b.out, i / c.out % b.out, i % c.out]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn taps_are_those_on_the_axis() {
        for size in 0..6 {
            for (window, stride, low, dilation) in
                [(3, 1, 1, 1), (2, 2, 3, 2), (5, 3, 0, 1), (4, 1, 9, 3)]
            {
                let axis = Axis {
                    size,
                    window,
                    stride,
                    low,
                    dilation,
                    out: 8,
                };
                for o in 0..8 {
                    let inside = |t: &usize| {
                        let at = (o * stride + t * dilation) as i64 - low as i64;
                        (0..size as i64).contains(&at)
                    };
                    let taps: Vec<usize> = (0..window).filter(inside).collect();
                    assert_eq!(axis.taps(o).collect::<Vec<_>>(), taps, "{axis:?} {o}");
                }
            }
        }
    }
}

//! Methods for images: columns of windows, transposed convolution, resampling, causal convolution.

use hotcell_graph::op::Attribute;

use super::{
    array::Tensor,
    ops::{ConvOptions, Layout, ints, name, one, window},
};

/// How a resampled element is made of those around its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resample {
    /// The nearest one.
    Nearest,
    /// Of two along each axis.
    Linear,
    /// Of four along each axis (Keys' cubic with −¾).
    Cubic,
}

impl Tensor {
    /// The windows of `[n, c, …]` as columns, `[n, c · window, places]`. Of the options, strides, padding and dilations count.
    pub fn im2col(&self, size: &[i64], options: &ConvOptions) -> Tensor {
        let mut attributes = vec![ints(size)];
        attributes.extend(window(options, size.len()));
        one("im2col", &[Some(self)], attributes)
    }

    /// The sums of columns where their windows lie on an image of these sizes: what [`Tensor::im2col`] takes apart.
    pub fn col2im(&self, sizes: &[i64], size: &[i64], options: &ConvOptions) -> Tensor {
        let mut attributes = vec![ints(sizes), ints(size)];
        attributes.extend(window(options, size.len()));
        one("col2im", &[Some(self)], attributes)
    }

    /// Transposed convolution with `weight` `[c, o/groups, …]`, or `[c, …, o/groups]` where channels are last; the result has
    /// `more` (empty: 0) elements at the end of each spatial axis.
    pub fn conv_transpose(
        &self,
        weight: &Tensor,
        bias: Option<&Tensor>,
        options: &ConvOptions,
        more: &[i64],
    ) -> Tensor {
        let rank = self.rank().unwrap_or(3) as i64;
        let axes = rank.saturating_sub(2).max(0);
        if options.layout == Layout::ChannelsLast {
            let first: Vec<i64> = [0, rank - 1].into_iter().chain(1..rank - 1).collect();
            let last: Vec<i64> = std::iter::once(0).chain(2..rank).chain([1]).collect();
            let options = ConvOptions {
                layout: Layout::ChannelsFirst,
                ..options.clone()
            };
            let (x, weight) = (self.transpose(&first), weight.transpose(&first));
            return x
                .conv_transpose(&weight, bias, &options, more)
                .transpose(&last);
        }
        let mut attributes = window(options, axes as usize);
        let more = match more.is_empty() {
            true => vec![0; axes as usize],
            false => more.to_vec(),
        };
        attributes.insert(3, Attribute::Ints(more));
        attributes.push(Attribute::Int(options.groups.max(1)));
        let inputs = [Some(self), Some(weight), bias];
        one("conv_transpose", &inputs, attributes)
    }

    /// `[n, c, …]` at other spatial sizes; `align_corners` puts the first and last elements onto each other.
    pub fn interpolate(&self, sizes: &[i64], mode: Resample, align_corners: bool) -> Tensor {
        let mode = match mode {
            Resample::Nearest => "nearest",
            Resample::Linear => "linear",
            Resample::Cubic => "cubic",
        };
        let attributes = vec![ints(sizes), name(mode), Attribute::Bool(align_corners)];
        one("interpolate", &[Some(self)], attributes)
    }

    /// Each channel of `[n, c, k − 1 + t]` convolved with its own `k` taps, `weight` `[c, k]`, as `[n, t, c]`.
    pub fn ssm_conv(&self, weight: &Tensor) -> Tensor {
        one("ssm_conv", &[Some(self), Some(weight)], vec![])
    }
}

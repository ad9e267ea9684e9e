//! Tensors as text.

use std::fmt::Write;

use hotcell_proto::error::Error;

use super::{
    array::Tensor,
    host::{HostTensor, Plain},
};

/// How a tensor is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DumpOptions {
    /// Digits after the point.
    pub precision: usize,
    /// Up to so many elements, all are printed.
    pub threshold: usize,
    /// Of longer tensors, so many at each end of an axis.
    pub edge_items: usize,
}

impl Default for DumpOptions {
    fn default() -> Self {
        Self {
            precision: 4,
            threshold: 1000,
            edge_items: 3,
        }
    }
}

impl Tensor {
    /// Its value as text: nested brackets, outermost axis first. It is computed if it was not.
    ///
    /// # Errors
    /// As [`Tensor::eval`].
    pub async fn dump(&self, options: DumpOptions) -> Result<String, Error> {
        if self.dtype()?.is_block() {
            return self.cast(super::DType::F32).fetch().await?.dump(options);
        }
        self.fetch().await?.dump(options)
    }
}

impl HostTensor {
    /// Its value as text; see [`Tensor::dump`].
    ///
    /// # Errors
    /// [`hotcell_proto::error::Reason::InvalidArgument`] for block types.
    pub fn dump(&self, options: DumpOptions) -> Result<String, Error> {
        let shape = self.shape();
        let printer = Printer {
            values: self.plain()?,
            elide: self.spec().shape.elements(0).unwrap_or(0) > options.threshold,
            options,
            shape: &shape,
        };
        let mut text = String::new();
        printer.axis(&mut text, 0, 0);
        Ok(text)
    }
}

struct Printer<'a> {
    values: Vec<Plain>,
    shape: &'a [usize],
    elide: bool,
    options: DumpOptions,
}

impl Printer<'_> {
    fn axis(&self, text: &mut String, depth: usize, index: usize) {
        let Some(&len) = self.shape.get(depth) else {
            return self.element(text, index);
        };
        text.push('[');
        let inner: usize = self.shape.iter().skip(depth + 1).product();
        let remaining = self.shape.len() - depth - 1;
        let edge = self.options.edge_items;
        let skipped = self.elide && len > edge.saturating_mul(2);
        let mut i = 0;
        while i < len {
            if skipped && i == edge {
                text.push_str("..., ");
                next_line(text, remaining, depth);
                i = len - edge;
                continue;
            }
            self.axis(text, depth + 1, index + i * inner);
            i += 1;
            if i < len {
                text.push_str(if remaining == 0 { ", " } else { "," });
                next_line(text, remaining, depth);
            }
        }
        text.push(']');
    }

    fn element(&self, text: &mut String, index: usize) {
        let Some(value) = self.values.get(index) else {
            return;
        };
        let digits = self.options.precision;
        let number = |v: f64| match v.is_sign_negative() && !v.is_nan() {
            true => format!("{v:.digits$}"),
            false => format!(" {v:.digits$}"),
        };
        // Writing to a string cannot fail.
        let _ = match value {
            Plain::Float(v) => write!(text, "{}", number(*v)),
            Plain::Int(v) if *v < 0 => write!(text, "{v}"),
            Plain::Int(v) => write!(text, " {v}"),
            Plain::Bool(v) => write!(text, " {v}"),
            Plain::Complex(re, im) => write!(text, "{}{im:+.digits$}i", number(*re)),
        };
    }
}

/// Between parts of rank r are r lines and the indent of the next bracket, between elements nothing.
fn next_line(text: &mut String, remaining: usize, depth: usize) {
    text.extend(std::iter::repeat_n('\n', remaining));
    let indent = if remaining > 0 { depth + 1 } else { 0 };
    text.extend(std::iter::repeat_n(' ', indent));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dump(values: &[f32], shape: &[usize], options: DumpOptions) -> String {
        HostTensor::from_slice(values, shape)
            .unwrap()
            .dump(options)
            .unwrap()
    }

    #[test]
    fn brackets_lines_and_signs() {
        let plain = DumpOptions::default();
        assert_eq!(dump(&[1.0, -2.5], &[2], plain), "[ 1.0000, -2.5000]");
        assert_eq!(
            dump(&[1.0, 2.0, 3.0, 4.0], &[2, 2], plain),
            "[[ 1.0000,  2.0000],\n [ 3.0000,  4.0000]]"
        );
        assert_eq!(
            dump(
                &[1.0, 2.0],
                &[2, 1, 1],
                DumpOptions {
                    precision: 0,
                    ..plain
                }
            ),
            "[[[ 1]],\n\n [[ 2]]]"
        );
        assert_eq!(dump(&[7.0], &[], plain), " 7.0000");
        assert_eq!(dump(&[], &[0], plain), "[]");
        let ints = HostTensor::from_slice(&[-1i64, 2], &[2]).unwrap();
        assert_eq!(ints.dump(plain).unwrap(), "[-1,  2]");
    }

    #[test]
    fn long_tensors_show_their_ends() {
        let options = DumpOptions {
            precision: 0,
            threshold: 5,
            edge_items: 2,
        };
        let values: Vec<f32> = (0..6).map(|v| v as f32).collect();
        assert_eq!(dump(&values, &[6], options), "[ 0,  1, ...,  4,  5]");
        // At the threshold all are shown.
        let options = DumpOptions {
            threshold: 6,
            ..options
        };
        assert_eq!(dump(&values, &[6], options), "[ 0,  1,  2,  3,  4,  5]");
    }

    /// As ollama's `ml.Dump` prints them (`ml/backend.go`): an elision is `..., ` on every axis, and then the lines of the axis.
    #[test]
    fn what_is_left_out_of_outer_axes_is_marked_as_on_the_innermost() {
        let options = DumpOptions {
            precision: 0,
            threshold: 5,
            edge_items: 1,
        };
        let values: Vec<f32> = (0..27).map(|v| v as f32 - 13.0).collect();
        assert_eq!(
            dump(&values[..9], &[3, 3], options),
            "[[-13, ..., -11],\n ..., \n [-7, ..., -5]]"
        );
        assert_eq!(
            dump(&values, &[3, 3, 3], options),
            "[[[-13, ..., -11],\n  ..., \n  [-7, ..., -5]],\n\n ..., \n\n \
             [[ 5, ...,  7],\n  ..., \n  [ 11, ...,  13]]]"
        );
        // Axes short enough are whole, whatever the others are.
        assert_eq!(
            dump(&values[..6], &[3, 2], options),
            "[[-13, -12],\n ..., \n [-9, -8]]"
        );
        let none = DumpOptions {
            edge_items: 0,
            ..options
        };
        assert_eq!(dump(&values[..6], &[6], none), "[..., ]");
        let all = DumpOptions {
            edge_items: usize::MAX,
            ..options
        };
        assert_eq!(
            dump(&values[..6], &[1, 6], all),
            "[[-13, -12, -11, -10, -9, -8]]"
        );
    }
}

//! Methods that choose or replace elements by where they stand, and that see their bits as others.

use hotcell_graph::{DType, Shape, op::Attribute};

use super::{
    array::{Tensor, of_graph},
    movement::Slices,
    ops::{ints, one},
};

impl Tensor {
    /// The bytes read as another dtype; the last axis has as many times more or fewer elements as they are narrower or wider.
    pub fn view(&self, dtype: DType) -> Tensor {
        one("bitcast", &[Some(self)], vec![Attribute::DType(dtype)])
    }

    /// On and below the `k`-th diagonal of the last two axes; 0 above.
    pub fn tril(&self, k: i64) -> Tensor {
        one("tril", &[Some(self)], vec![Attribute::Int(k)])
    }

    /// On and above the `k`-th diagonal of the last two axes; 0 below.
    pub fn triu(&self, k: i64) -> Tensor {
        one("triu", &[Some(self)], vec![Attribute::Int(k)])
    }

    /// Matrices with the last axis on their `k`-th diagonal and 0 elsewhere.
    pub fn diag(&self, k: i64) -> Tensor {
        one("diag", &[Some(self)], vec![Attribute::Int(k)])
    }

    /// The diagonals of the matrices along two axes, as the last axis.
    pub fn diagonal(&self, offset: i64, axis1: i64, axis2: i64) -> Tensor {
        let attributes = [offset, axis1, axis2].map(Attribute::Int);
        one("diagonal", &[Some(self)], attributes.to_vec())
    }

    /// The sum of a diagonal of the matrices along two axes.
    pub fn trace(&self, offset: i64, axis1: i64, axis2: i64) -> Tensor {
        self.diagonal(offset, axis1, axis2).sum(&[-1], false)
    }

    /// Moved along an axis; what leaves at one end comes in at the other.
    pub fn roll(&self, shift: i64, axis: i64) -> Tensor {
        let attributes = vec![Attribute::Int(shift), Attribute::Int(axis)];
        one("roll", &[Some(self)], attributes)
    }

    /// Element `offset + Σ indexᵢ · stridesᵢ` of the row-major elements; one outside of them is an error.
    pub fn as_strided(&self, shape: &[usize], strides: &[i64], offset: i64) -> Tensor {
        match Shape::fixed(shape) {
            Ok(shape) => {
                let attributes = vec![
                    Attribute::Shape(shape),
                    ints(strides),
                    Attribute::Int(offset),
                ];
                one("as_strided", &[Some(self)], attributes)
            }
            Err(error) => Tensor::wrong(self.0.session.clone(), of_graph(&error)),
        }
    }

    /// With `update`, which is broadcast, in the place of a slice. A new tensor: `self` is as it was.
    pub fn slice_update(&self, update: &Tensor, (starts, stops, steps): Slices<'_>) -> Tensor {
        let attributes = vec![ints(starts), ints(stops), ints(steps)];
        one("slice_update", &[Some(self), Some(update)], attributes)
    }

    /// The window of these sizes that begins at `starts` (integers, one per axis), which the worker reads.
    pub fn slice_dynamic(&self, starts: &Tensor, sizes: &[i64]) -> Tensor {
        one(
            "slice_dynamic",
            &[Some(self), Some(starts)],
            vec![ints(sizes)],
        )
    }

    /// With `update` in the place of the window that begins at `starts` (integers, one per axis), which the worker reads.
    pub fn slice_update_dynamic(&self, update: &Tensor, starts: &Tensor) -> Tensor {
        let inputs = [Some(self), Some(update), Some(starts)];
        one("slice_update_dynamic", &inputs, vec![])
    }

    /// The greatest along an axis up to each element, or from it on.
    pub fn cummax(&self, axis: i64, reverse: bool) -> Tensor {
        self.running("cummax", axis, reverse)
    }

    /// The least along an axis up to each element, or from it on.
    pub fn cummin(&self, axis: i64, reverse: bool) -> Tensor {
        self.running("cummin", axis, reverse)
    }

    /// `ln Σ eˣ` along an axis up to each element, or from it on.
    pub fn logcumsumexp(&self, axis: i64, reverse: bool) -> Tensor {
        self.running("logcumsumexp", axis, reverse)
    }

    fn running(&self, op: &str, axis: i64, reverse: bool) -> Tensor {
        let attributes = vec![Attribute::Int(axis), Attribute::Bool(reverse)];
        one(op, &[Some(self)], attributes)
    }

    /// Einstein summation, as `Tensor::einsum("ij,jk->ik", &[a, b])`.
    pub fn einsum(equation: &str, tensors: &[Tensor]) -> Tensor {
        let inputs: Vec<Option<&Tensor>> = tensors.iter().map(Some).collect();
        let equation = Attribute::Bytes(equation.as_bytes().to_vec());
        one("einsum", &inputs, vec![equation])
    }
}

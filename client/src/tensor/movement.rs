//! Methods that move, join, pick and place elements.

use hotcell_graph::{Dim, Shape, op::Attribute};
use hotcell_proto::error::Error;

use super::{
    array::{Tensor, invalid, of_graph},
    ops::{Reduce, ints, name, one},
};

/// Starts, stops and steps of a NumPy slice, an entry per axis.
pub(super) type Slices<'a> = (&'a [i64], &'a [i64], &'a [i64]);

impl Tensor {
    /// The same elements, row-major, under another shape; one axis may be −1.
    pub fn reshape(&self, shape: &[i64]) -> Tensor {
        match self.resolve(shape) {
            Ok(shape) => one("reshape", &[Some(self)], vec![Attribute::Shape(shape)]),
            Err(error) => Tensor::wrong(self.0.session.clone(), error),
        }
    }

    /// A shape in which one axis may be −1. The symbolic axis stays outermost when the shape's first axis is −1.
    fn resolve(&self, shape: &[i64]) -> Result<Shape, Error> {
        let spec = self.spec()?;
        let given = shape
            .iter()
            .skip(1)
            .try_fold(1usize, |n, &d| n.checked_mul(usize::try_from(d).ok()?));
        if let (true, Some(-1), Some(inner)) = (spec.shape.is_symbolic(), shape.first(), given)
            && spec.shape.elements_per_row() == Some(inner)
        {
            let rest = shape.iter().skip(1).map(|&d| Dim::Fixed(d as usize));
            return Shape::new(std::iter::once(Dim::Rows).chain(rest)).map_err(|e| of_graph(&e));
        }
        let size = self.size()?;
        let fits = || invalid(format!("{} cannot become {shape:?}", spec.shape));
        let known = shape.iter().filter(|d| **d != -1);
        let product = known
            .clone()
            .try_fold(1usize, |n, &d| n.checked_mul(usize::try_from(d).ok()?));
        let product = product.ok_or_else(fits)?;
        let missing = shape.len() - known.count();
        let free = match (missing, product) {
            (0, _) => 0,
            (1, 1..) if size.is_multiple_of(product) => size / product,
            _ => return Err(fits()),
        };
        let axis = |&d: &i64| Dim::Fixed(usize::try_from(d).unwrap_or(free));
        Shape::new(shape.iter().map(axis)).map_err(|e| of_graph(&e))
    }

    /// The axes in another order; none: reversed. Result axis `i` is axis `axes[i]`.
    pub fn transpose(&self, axes: &[i64]) -> Tensor {
        one("transpose", &[Some(self)], vec![ints(axes)])
    }

    /// Repeated along axes of size 1 and new outer axes.
    pub fn broadcast_to(&self, shape: &[usize]) -> Tensor {
        match Shape::fixed(shape) {
            Ok(shape) => one("broadcast_to", &[Some(self)], vec![Attribute::Shape(shape)]),
            Err(error) => Tensor::wrong(self.0.session.clone(), of_graph(&error)),
        }
    }

    /// NumPy's `x[start:stop:step, …]`, an entry per axis; negative numbers count from the end.
    pub fn slice(&self, (starts, stops, steps): Slices<'_>) -> Tensor {
        one(
            "slice",
            &[Some(self)],
            vec![ints(starts), ints(stops), ints(steps)],
        )
    }

    /// Elements `start..stop` of one axis.
    pub fn narrow(&self, axis: i64, start: i64, stop: i64) -> Tensor {
        let rank = match self.rank() {
            Ok(rank) => rank as i64,
            Err(error) => return Tensor::wrong(self.0.session.clone(), error),
        };
        let at = if axis < 0 { axis + rank } else { axis };
        let pick = |other: i64, this: i64| -> Vec<i64> {
            (0..rank)
                .map(|i| if i == at { this } else { other })
                .collect()
        };
        if !(0..rank).contains(&at) {
            let what = format!("there is no axis {axis} of {rank}");
            return Tensor::wrong(self.0.session.clone(), invalid(what));
        }
        self.slice((&pick(0, start), &pick(i64::MAX, stop), &pick(1, 1)))
    }

    /// Padded with zeros, or with `value`.
    pub fn pad(&self, low: &[i64], high: &[i64], value: Option<&Tensor>) -> Tensor {
        one(
            "pad",
            &[Some(self), value],
            vec![ints(low), ints(high), name("constant")],
        )
    }

    /// New axes of size 1 at these places of the result.
    pub fn expand_dims(&self, axes: &[i64]) -> Tensor {
        one("expand_dims", &[Some(self)], vec![ints(axes)])
    }

    /// Without these axes of size 1; none: without all.
    pub fn squeeze(&self, axes: &[i64]) -> Tensor {
        one("squeeze", &[Some(self)], vec![ints(axes)])
    }

    /// Axes `start..=end` as one.
    pub fn flatten(&self, start: i64, end: i64) -> Tensor {
        one(
            "flatten",
            &[Some(self)],
            vec![Attribute::Int(start), Attribute::Int(end)],
        )
    }

    /// Repeated as a whole along each axis.
    pub fn tile(&self, repeats: &[i64]) -> Tensor {
        one("tile", &[Some(self)], vec![ints(repeats)])
    }

    /// Each element of an axis repeated.
    pub fn repeat(&self, repeats: i64, axis: i64) -> Tensor {
        one(
            "repeat",
            &[Some(self)],
            vec![Attribute::Int(repeats), Attribute::Int(axis)],
        )
    }

    /// In reverse order along axes; none: along all.
    pub fn flip(&self, axes: &[i64]) -> Tensor {
        one("flip", &[Some(self)], vec![ints(axes)])
    }

    /// One after the other along an axis.
    pub fn concat(tensors: &[Tensor], axis: i64) -> Tensor {
        let inputs: Vec<Option<&Tensor>> = tensors.iter().map(Some).collect();
        one("concat", &inputs, vec![Attribute::Int(axis)])
    }

    /// One after the other along a new axis.
    pub fn stack(tensors: &[Tensor], axis: i64) -> Tensor {
        let inputs: Vec<Option<&Tensor>> = tensors.iter().map(Some).collect();
        one("stack", &inputs, vec![Attribute::Int(axis)])
    }

    /// Parts of these sizes along an axis.
    pub fn split(&self, sizes: &[i64], axis: i64) -> Vec<Tensor> {
        Tensor::apply(
            "split",
            &[Some(self)],
            vec![ints(sizes), Attribute::Int(axis)],
        )
    }

    /// Slices of an axis at `indices`.
    pub fn take(&self, indices: &Tensor, axis: i64) -> Tensor {
        one(
            "take",
            &[Some(self), Some(indices)],
            vec![Attribute::Int(axis)],
        )
    }

    /// Rows of `[n, k]`, which may be quantised, at i32 `[m]`, as f32 `[m, k]`.
    pub fn get_rows(&self, indices: &Tensor) -> Tensor {
        one("get_rows", &[Some(self), Some(indices)], vec![])
    }

    /// Slices at index tuples, the innermost axis of `indices`, within `batch_dims` outer axes that both share (ONNX GatherND).
    pub fn gather_nd(&self, indices: &Tensor, batch_dims: i64) -> Tensor {
        let attributes = vec![Attribute::Int(batch_dims)];
        one("gather_nd", &[Some(self), Some(indices)], attributes)
    }

    /// One element per index along an axis.
    pub fn take_along_axis(&self, indices: &Tensor, axis: i64) -> Tensor {
        one(
            "take_along_axis",
            &[Some(self), Some(indices)],
            vec![Attribute::Int(axis)],
        )
    }

    /// With `updates` put in at `indices` along an axis.
    pub fn scatter_along_axis(
        &self,
        indices: &Tensor,
        updates: &Tensor,
        axis: i64,
        reduce: Reduce,
    ) -> Tensor {
        let attributes = vec![Attribute::Int(axis), name(reduce.name())];
        one(
            "scatter_along_axis",
            &[Some(self), Some(indices), Some(updates)],
            attributes,
        )
    }

    /// With `updates` put in at index tuples, the innermost axis of `indices` (ONNX ScatterND).
    pub fn scatter_nd(&self, indices: &Tensor, updates: &Tensor, reduce: Reduce) -> Tensor {
        one(
            "scatter_nd",
            &[Some(self), Some(indices), Some(updates)],
            vec![name(reduce.name())],
        )
    }
}

//! A case with less of some axes.

use std::{collections::BTreeSet, ops::Range};

use hotcell_graph::{
    CacheSpec, Dim, GraphBuilder, Shape, TensorSpec,
    op::{Attribute, ValueSpec},
};

use super::Case;
use crate::tensor::HostTensor;

/// Values of all inputs.
pub(super) fn elements(case: &Case) -> usize {
    let sizes = case
        .inputs
        .iter()
        .map(|input| input.spec().shape.elements(0));
    sizes.fold(0, |sum, size| {
        sum.saturating_add(size.unwrap_or(usize::MAX))
    })
}

/// Axes that are cut together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Axes {
    /// All of this length, of every input, and in the shapes that ops are told.
    Of(usize),
    /// One axis of one input.
    One { input: usize, axis: usize },
}

impl Axes {
    fn has(self, input: usize, axis: usize, length: usize) -> bool {
        match self {
            Self::Of(same) => same == length,
            Self::One { input: i, axis: a } => (i, a) == (input, axis),
        }
    }

    /// Which of a case's axes they are: the input, the axis and its length.
    fn of(self, case: &Case) -> impl Iterator<Item = (usize, usize, usize)> {
        let all = case.inputs.iter().enumerate().flat_map(|(input, value)| {
            let shape = value.shape();
            let axes = shape.into_iter().enumerate();
            axes.map(move |(axis, length)| (input, axis, length))
        });
        all.filter(move |&(input, axis, length)| self.has(input, axis, length))
    }

    /// Their length, if it can be less.
    pub(super) fn length(self, case: &Case) -> Option<usize> {
        let length = self.of(case).map(|(.., length)| length).next();
        length.filter(|length| *length > 1)
    }

    /// What a piece must be a multiple of: whole blocks.
    pub(super) fn unit(self, case: &Case) -> usize {
        let blocks = self.of(case).map(|(input, axis, _)| {
            let value = case.inputs.get(input);
            value.map_or(1, |v| block(v.spec(), axis))
        });
        blocks.max().unwrap_or(1)
    }

    /// The same axes when they have another length.
    pub(super) fn now(self, length: usize) -> Self {
        match self {
            Self::Of(_) => Self::Of(length),
            one => one,
        }
    }
}

/// Elements that cannot be taken apart along an axis.
fn block(spec: &TensorSpec, axis: usize) -> usize {
    match axis + 1 == spec.shape.rank() {
        true => spec.dtype.block_len(),
        false => 1,
    }
}

/// The longest first, all of a length before each of them alone.
pub(super) fn all_axes(case: &Case) -> Vec<Axes> {
    let mut lengths = BTreeSet::new();
    let mut single = Vec::new();
    for (input, value) in case.inputs.iter().enumerate() {
        for (axis, length) in value.shape().into_iter().enumerate() {
            if length > 1 {
                lengths.insert(length);
                single.push(Axes::One { input, axis });
            }
        }
    }
    let together = lengths.into_iter().rev().map(Axes::Of);
    together.chain(single).collect()
}

/// A piece of a tensor along an axis.
pub(super) fn piece_of(
    tensor: &HostTensor,
    axis: usize,
    piece: &Range<usize>,
) -> Option<HostTensor> {
    let spec = tensor.spec();
    let dims = tensor.shape();
    let unit = block(spec, axis);
    if !piece.start.is_multiple_of(unit) || !piece.len().is_multiple_of(unit) {
        return None;
    }
    let inner: usize = dims.get(axis + 1..)?.iter().product();
    // Of whole blocks along the innermost axis, or rows of it.
    let step = match axis + 1 == dims.len() {
        true => spec.dtype.block_bytes(),
        false => spec.dtype.row_bytes(inner)?,
    };
    let whole = (dims.get(axis)? / unit).checked_mul(step)?;
    let (start, end) = (piece.start / unit * step, piece.end / unit * step);
    let mut bytes = Vec::new();
    for outer in tensor.bytes().chunks_exact(whole.max(1)) {
        bytes.extend_from_slice(outer.get(start..end)?);
    }
    let mut dims = dims;
    *dims.get_mut(axis)? = piece.len();
    let shape = Shape::fixed(&dims).ok()?;
    HostTensor::new(TensorSpec::new(spec.dtype, shape).ok()?, bytes).ok()
}

/// A case with a piece of some axes; none if the ops do not take that.
pub(super) fn sliced(case: &Case, axes: Axes, piece: &Range<usize>) -> Option<Case> {
    let mut inputs = case.inputs.clone();
    for (input, axis, _) in axes.of(case) {
        let value = inputs.get_mut(input)?;
        *value = piece_of(value, axis, piece)?;
    }
    let short = |n: usize| match axes {
        Axes::Of(length) if n == length => piece.len(),
        _ => n,
    };
    let shorter = |dim: &Dim| match dim {
        Dim::Fixed(n) => Dim::Fixed(short(*n)),
        dim => *dim,
    };
    let mut builder = GraphBuilder::new(0);
    let mut values = inputs.iter();
    for input in case.graph.inputs() {
        if let ValueSpec::Cache(spec) = input.spec {
            let spec = CacheSpec {
                kv_heads: short(spec.kv_heads),
                head_dim: short(spec.head_dim),
                ..spec
            };
            builder.cache(&input.name, spec).ok()?;
            continue;
        }
        let spec = values.next()?.spec().clone();
        match input.constant {
            true => builder.constant(&input.name, spec).ok()?,
            false => builder.tensor(&input.name, spec).ok()?,
        };
    }
    for node in case.graph.nodes() {
        let attributes = node.attributes.iter().map(|attribute| match attribute {
            Attribute::Shape(shape) => Shape::new(shape.dims().iter().map(shorter))
                .map(Attribute::Shape)
                .ok(),
            other => Some(other.clone()),
        });
        let attributes = attributes.collect::<Option<Vec<_>>>()?;
        // Nodes and their results have the numbers that they had.
        builder
            .apply(node.op, node.inputs.clone(), attributes)
            .ok()?;
    }
    let graph = builder.finish(case.graph.outputs()).ok()?;
    Some(Case { graph, inputs })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_along_any_axis() {
        let all: Vec<f32> = (0..24u8).map(f32::from).collect();
        let tensor = HostTensor::from_slice(&all, &[2, 3, 4]).unwrap();
        let piece = piece_of(&tensor, 1, &(1..3)).unwrap();
        assert_eq!(piece.shape(), [2, 2, 4]);
        assert_eq!(
            piece.to_vec::<f32>().unwrap()[..5],
            [4.0, 5.0, 6.0, 7.0, 8.0]
        );
        let piece = piece_of(&tensor, 2, &(3..4)).unwrap();
        assert_eq!(
            piece.to_vec::<f32>().unwrap(),
            [3.0, 7.0, 11.0, 15.0, 19.0, 23.0]
        );
        assert!(piece_of(&tensor, 3, &(0..1)).is_none());
        assert!(piece_of(&tensor, 2, &(3..5)).is_none());
    }
}

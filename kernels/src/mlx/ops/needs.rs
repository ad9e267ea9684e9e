//! What calls take besides their inputs and results, and how long they keep MLX: what MLX makes on its way to a result is
//! in no spec, and it allocates without asking. Upper bounds, so that a plan can be refused before anything is computed.

use hotcell_graph::{
    TensorSpec,
    op::{Call, ValueSpec},
};

use super::MOST_ELEMENTS;

/// What a call needs at a number of rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::mlx) struct Needs {
    /// Bytes besides inputs and results.
    pub bytes: usize,
    /// Products that are summed; 0 where each element is computed by itself.
    pub products: usize,
}

/// Elements of a tensor.
pub(in crate::mlx) fn elements(t: &TensorSpec, rows: usize) -> Option<usize> {
    t.shape.elements(rows)
}

/// A product of sizes, where MLX can have an array of so many elements.
pub(in crate::mlx) fn array_of(sizes: &[usize]) -> Option<usize> {
    product(sizes).filter(|n| *n <= MOST_ELEMENTS)
}

pub(in crate::mlx) fn product(sizes: &[usize]) -> Option<usize> {
    sizes
        .iter()
        .try_fold(1usize, |n, size| n.checked_mul(*size))
}

pub(in crate::mlx) fn sum(sizes: &[usize]) -> Option<usize> {
    sizes
        .iter()
        .try_fold(0usize, |n, size| n.checked_add(*size))
}

/// Bytes of a tensor in the dtype that is computed in: what is narrower is computed in f32.
fn widened(t: &TensorSpec, rows: usize) -> Option<usize> {
    let size = t.dtype.block_bytes().max(size_of::<f32>());
    product(&[elements(t, rows)?, size])
}

/// Bytes of all results.
fn results(call: &Call<'_>, rows: usize) -> Option<usize> {
    let all = (call.op.infer)(call).ok()?;
    all.iter()
        .try_fold(0usize, |n, t| n.checked_add(widened(t, rows)?))
}

/// Bytes of all inputs that are tensors.
fn inputs(call: &Call<'_>, rows: usize) -> Option<usize> {
    call.inputs.iter().try_fold(0usize, |n, spec| match spec {
        ValueSpec::Tensor(t) => n.checked_add(widened(t, rows)?),
        _ => Some(n),
    })
}

/// One of MLX's kernels, element by element, straight into the result.
pub(super) fn nothing(_: &Call<'_>, _: usize) -> Option<Needs> {
    Some(Needs::default())
}

/// One of MLX's ops, which may be two or three of its kernels: up to four arrays of bools, or one of numbers, on the way.
pub(super) fn one_more(call: &Call<'_>, rows: usize) -> Option<Needs> {
    bytes(results(call, rows)?)
}

/// A few of MLX's ops one after another: two of what they make live at a time, and the inputs in the dtype that is
/// computed in.
pub(super) fn several(call: &Call<'_>, rows: usize) -> Option<Needs> {
    let made = product(&[2, results(call, rows)?])?;
    bytes(sum(&[made, inputs(call, rows)?])?)
}

/// Greatest or least elements, in the dtype that is computed in: what is found, the same of the elements' bits, and which of the
/// two it is.
pub(super) fn extremes(call: &Call<'_>, rows: usize) -> Option<Needs> {
    let made = product(&[4, results(call, rows)?])?;
    bytes(sum(&[made, inputs(call, rows)?])?)
}

/// A kernel that copies the inputs first where their rows do not follow one another.
pub(super) fn copies(call: &Call<'_>, rows: usize) -> Option<Needs> {
    bytes(inputs(call, rows)?)
}

/// Where indices say: they are read, checked, and given to MLX as other integers, or rows are collected first.
pub(super) fn indices(call: &Call<'_>, rows: usize) -> Option<Needs> {
    let indices = checked(elements(call.tensor(1).ok()?, rows)?)?;
    bytes(sum(&[indices, results(call, rows)?])?)
}

/// Bytes that indices take while they are checked: as they are, as i64, as i32, and as MLX's.
pub(in crate::mlx) fn checked(count: usize) -> Option<usize> {
    product(&[8 + 8 + 4 + 4, count])
}

pub(in crate::mlx) fn bytes(bytes: usize) -> Option<Needs> {
    Some(Needs { bytes, products: 0 })
}

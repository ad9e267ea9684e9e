//! MLX's table: op → (supports, launch). What is not here, or not for such inputs, is decomposed or runs on the CPU
//! backend's kernels. Where MLX has an op of that name with another meaning, the entry's `supports` says what it is not for.

mod conv;
mod elementwise;
mod index;
mod matmul;
mod movement;
mod needs;
mod norm;
mod random;
mod reduce;
mod rest;
mod rope;
mod sort;

use hotcell_graph::{
    DType, TensorSpec,
    op::{Call, ValueSpec},
};
use mlx_rs::{Array, error::Exception};

pub(super) use self::{
    matmul::form_at,
    movement::sliced,
    needs::{Needs, array_of, checked, elements, product, sum},
    rest::REST,
};
use super::{array, attention, run::Cx};
use crate::backend::DeviceError;

/// Records a call: its results, not evaluated.
pub(super) type Launch = fn(&Cx<'_>) -> Result<Vec<Array>, DeviceError>;

/// One row of the table.
pub(super) struct Entry {
    pub op: &'static str,
    pub supports: fn(&Call<'_>) -> bool,
    /// What it takes at a number of rows, `None` where that, or an array on the way, is larger than MLX can have.
    pub needs: fn(&Call<'_>, usize) -> Option<Needs>,
    pub launch: Launch,
}

static TABLES: &[&[Entry]] = &[
    attention::ENTRIES,
    conv::ENTRIES,
    &elementwise::UNARY,
    &elementwise::BINARY,
    &elementwise::OTHERS,
    index::ENTRIES,
    matmul::ENTRIES,
    movement::ENTRIES,
    norm::ENTRIES,
    random::ENTRIES,
    &reduce::ENTRIES,
    &reduce::OTHERS,
    rope::ENTRIES,
    sort::ENTRIES,
];

/// Elements of a tensor at most: MLX's sizes are `i32`, and so are sums of them in some of its kernels.
const MOST_ELEMENTS: usize = i32::MAX as usize;

fn entries() -> impl Iterator<Item = &'static Entry> {
    TABLES.iter().copied().flatten()
}

fn entry(call: &Call<'_>, double: bool) -> Option<&'static Entry> {
    let has = |t: &TensorSpec| double || t.dtype != DType::F64;
    let inputs = call.inputs.iter().all(|spec| match spec {
        ValueSpec::Tensor(t) => has(t),
        _ => true,
    });
    let results = (call.op.infer)(call).is_ok_and(|all| all.iter().all(has));
    if !inputs || !results {
        return None;
    }
    entries().find(|e| e.op == call.op.name && (e.supports)(call))
}

/// Names of the ops in the table.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    entries().map(|e| e.op)
}

/// Whether MLX computes this call. `double`: whether it has f64.
pub(super) fn supports(call: &Call<'_>, double: bool) -> bool {
    entry(call, double).is_some()
}

/// What computes it.
pub(super) fn launch(call: &Call<'_>, double: bool) -> Option<Launch> {
    entry(call, double).map(|e| e.launch)
}

/// What it takes besides its inputs and results.
pub(super) fn needs(call: &Call<'_>, max_rows: usize, double: bool) -> Option<Needs> {
    (entry(call, double)?.needs)(call, max_rows)
}

/// Whether MLX computes this call and all sizes, also those on the way, are such as it can have, for any number of rows.
pub(super) fn fits(call: &Call<'_>, max_rows: usize, double: bool) -> bool {
    let small = |t: &TensorSpec| {
        // An axis of 0 does not excuse the others.
        let mut dims = t.shape.dims().iter();
        let elements = dims.try_fold(1usize, |n, d| n.checked_mul(d.at(max_rows).max(1)));
        elements.is_some_and(|n| n <= MOST_ELEMENTS)
    };
    let inputs = call.inputs.iter().all(|spec| match spec {
        ValueSpec::Tensor(t) => small(t),
        // Of a cache only what is gathered becomes an array.
        _ => true,
    });
    inputs
        && (call.op.infer)(call).is_ok_and(|all| all.iter().all(small))
        && needs(call, max_rows, double).is_some()
}

/// A call's one result.
fn one(cx: &Cx<'_>, made: Result<Array, Exception>) -> Result<Vec<Array>, DeviceError> {
    made.map(|array| vec![array])
        .map_err(array::failed(cx.op()))
}

/// Input `i`'s dtype, of a tensor.
pub(super) fn dtype(call: &Call<'_>, i: usize) -> Option<DType> {
    call.optional(i).ok().flatten().map(|t| t.dtype)
}

/// Whether all inputs that are given have one dtype, and `fits` it.
fn all_are(call: &Call<'_>, fits: impl Fn(DType) -> bool) -> bool {
    let mut dtypes = (0..call.inputs.len()).filter_map(|i| dtype(call, i));
    let first = dtypes.next();
    first.is_some_and(|first| fits(first) && dtypes.all(|d| d == first))
}

/// No kernel of MLX walks along an axis of 0 well: such calls have nothing to compute.
pub(super) fn has_elements(call: &Call<'_>) -> bool {
    use hotcell_graph::Dim;
    let some = |t: &TensorSpec| !t.shape.dims().contains(&Dim::Fixed(0));
    let inputs = call.inputs.iter().all(|spec| match spec {
        ValueSpec::Tensor(t) => some(t),
        _ => true,
    });
    inputs && (call.op.infer)(call).is_ok_and(|all| all.iter().all(some))
}

/// An axis counted from the front.
fn axis_of(axis: i64, rank: usize) -> Option<i32> {
    let rank = i64::try_from(rank).ok()?;
    let at = if axis < 0 { axis + rank } else { axis };
    i32::try_from(at).ok().filter(|_| (0..rank).contains(&at))
}

/// An array of one element, of this dtype.
pub(super) fn scalar(value: f64, dtype: DType) -> Result<Array, DeviceError> {
    let plain = array::from_bytes(&value.to_le_bytes(), DType::F64, &[])?;
    let to = array::dtype_of(dtype).ok_or_else(super::plan::overflow)?;
    plain.as_dtype(to).map_err(array::failed("a number"))
}

//! Sorting. Ascending order is stable and NaN counts as greater than every number, so that it comes last; descending
//! order is stable too and has NaN first.

use crate::{
    dtype::DType,
    graph::GraphError,
    op::{
        Call, Effect, ops,
        rules::{Specs, axis_of, one_of, real, row_error, size},
    },
    shape::{Dim, Shape, TensorSpec},
};

ops! {
    /// The elements along `axis` in ascending (`np.sort`) or descending order; `false` comes before `true`.
    sort(x; axis: Int(-8, 7), descending: Bool) -> one { shapes: "x", dtypes: "real or bool → x", effect: Effect::None, infer: sort_spec, decompose: None }

    /// Where along `axis` each element of the sorted `x` stands (`np.argsort`), of equal ones the first first.
    argsort(x; axis: Int(-8, 7), descending: Bool) -> one { shapes: "x", dtypes: "real or bool → u32", effect: Effect::None, infer: argsort_spec, decompose: None }

    /// The `k` largest or smallest elements along `axis`, best first, and where they stand; of equal ones the first
    /// first.
    topk(x; k: Int(0, 1 << 40), axis: Int(-8, 7), largest: Bool) -> two { shapes: "x with k along axis, twice", dtypes: "real or bool → x, u32", effect: Effect::None, infer: topk_spec, decompose: None }
}

/// Input 0, which must have an order, and the axis that attribute `i` names.
fn ordered<'a>(call: &Call<'a>, i: usize) -> Result<(&'a TensorSpec, usize), GraphError> {
    let x = real(call, 0)?;
    Ok((x, axis_of(call, call.int(i)?, x.shape.rank())?))
}

fn sort_spec(call: &Call<'_>) -> Specs {
    let (x, _) = ordered(call, 0)?;
    Ok(vec![x.clone()])
}

fn argsort_spec(call: &Call<'_>) -> Specs {
    let (x, _) = ordered(call, 0)?;
    one_of(call, DType::U32, x.shape.clone())
}

fn topk_spec(call: &Call<'_>) -> Specs {
    let (x, axis) = ordered(call, 1)?;
    let k = size(call, call.int(0)?)?;
    let mut dims = x.shape.dims().to_vec();
    match dims.get_mut(axis) {
        Some(Dim::Fixed(n)) if k <= *n => *n = k,
        Some(Dim::Rows) => return Err(row_error(call, "cut to k rows")),
        _ => {
            return Err(call.error(format_args!(
                "k is {k}, more than axis {axis} of {} has",
                x.shape
            )));
        }
    }
    let shape = Shape::new(dims)?;
    Ok(vec![
        TensorSpec::new(x.dtype, shape.clone())?,
        TensorSpec::new(DType::U32, shape)?,
    ])
}

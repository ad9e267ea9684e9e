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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::fit::testing::{int, table, yes};

    #[test]
    fn sorting_keeps_shapes_and_topk_cuts_them() {
        let last = [int(-1), yes(true)];
        table(
            &sort,
            &[
                (&["bf16[rows, 4]"], &last, "bf16[rows, 4]"),
                (&["bool[3]"], &last, "bool[3]"),
                (&["f32[rows, 4]"], &[int(0), yes(false)], "f32[rows, 4]"),
                (&["c64[3]"], &last, "!c64"),
                (&["q4_0[32]"], &last, "!q4_0"),
                (&["f32[]"], &last, "!no axis"),
            ],
        );
        table(
            &argsort,
            &[
                (&["f64[2, 0]"], &last, "u32[2, 0]"),
                (&["f64[2]"], &[int(1), yes(false)], "!no axis 1"),
            ],
        );
        let of = |k, axis| [int(k), int(axis), yes(true)];
        table(
            &topk,
            &[
                (&["f16[rows, 9]"], &of(3, -1), "f16[rows, 3] u32[rows, 3]"),
                (&["u8[4, 9]"], &of(0, 0), "u8[0, 9] u32[0, 9]"),
                (&["u8[4, 9]"], &of(4, 0), "u8[4, 9] u32[4, 9]"),
                (&["u8[4, 9]"], &of(5, 0), "!more than axis 0"),
                (&["f16[rows, 9]"], &of(3, 0), "!row dimension"),
                (&["c64[4, 9]"], &of(3, 0), "!c64"),
                (&["u8[4, 9]"], &of(-1, 0), "!integer in"),
            ],
        );
    }
}

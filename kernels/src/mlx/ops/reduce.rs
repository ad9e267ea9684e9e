//! Reductions and running sums. Of half precision they are computed in f32 and rounded once.

use hotcell_graph::{DType, op::Call};
use mlx_rs::{Array, error::Exception, ops};

use super::{Entry, axis_of, dtype, has_elements, needs, one};
use crate::{
    backend::DeviceError,
    mlx::{array, plan::overflow, run::Cx},
};

type OverAxes = fn(&Array, &[i32], bool) -> Result<Array, Exception>;

macro_rules! over_axes {
    ($($name:literal, $fits:path, $f:path;)*) => {
        [$(Entry { op: $name, supports: $fits, needs: needs::several, launch: |cx| over_axes(cx, |x, axes, keep| $f(x, axes, keep)) },)*]
    };
}

pub(super) static ENTRIES: [Entry; 8] = over_axes! {
    "reduce_sum", sums, ops::sum_axes;
    "reduce_prod", sums, ops::prod_axes;
    "reduce_max", real, ops::max_axes;
    "reduce_min", real, ops::min_axes;
    "reduce_all", real, ops::all_axes;
    "reduce_any", real, ops::any_axes;
    "mean", floats, ops::mean_axes;
    "logsumexp", up_to_single, ops::logsumexp_axes;
};

pub(super) static OTHERS: [Entry; 4] = [
    Entry {
        op: "argmax",
        supports: integers,
        needs: needs::several,
        launch: |cx| {
            arg(cx, |x, axis, keep| {
                ops::indexing::argmax_axis(x, axis, keep)
            })
        },
    },
    Entry {
        op: "argmin",
        supports: integers,
        needs: needs::several,
        launch: |cx| {
            arg(cx, |x, axis, keep| {
                ops::indexing::argmin_axis(x, axis, keep)
            })
        },
    },
    Entry {
        op: "cumsum",
        supports: numbers,
        needs: needs::several,
        launch: |cx| {
            running(cx, |x, axis, reverse, inclusive| {
                ops::cumsum(x, axis, reverse, inclusive)
            })
        },
    },
    Entry {
        op: "cumprod",
        supports: numbers,
        needs: needs::several,
        launch: |cx| {
            running(cx, |x, axis, reverse, inclusive| {
                ops::cumprod(x, axis, reverse, inclusive)
            })
        },
    },
];

fn real(call: &Call<'_>) -> bool {
    dtype(call, 0).is_some_and(|d| !d.is_block() && d != DType::C64) && has_elements(call)
}

fn numbers(call: &Call<'_>) -> bool {
    dtype(call, 0).is_some_and(|d| d.is_integer() || d.is_float()) && has_elements(call)
}

/// Of floats MLX does not find the first NaN.
fn integers(call: &Call<'_>) -> bool {
    dtype(call, 0).is_some_and(|d| d.is_integer() || d == DType::Bool) && has_elements(call)
}

/// Exponentials of f64 are those of f32 in MLX.
fn up_to_single(call: &Call<'_>) -> bool {
    floats(call) && dtype(call, 0) != Some(DType::F64)
}

fn floats(call: &Call<'_>) -> bool {
    dtype(call, 0).is_some_and(DType::is_float) && has_elements(call)
}

/// All but c64, whose products MLX does not reduce.
fn sums(call: &Call<'_>) -> bool {
    real(call)
}

/// In the dtype that several roundings are done in, and back.
fn widened(
    cx: &Cx<'_>,
    compute: impl FnOnce(&Array) -> Result<Array, Exception>,
) -> Result<Vec<Array>, DeviceError> {
    let x = cx.array(0)?;
    let from = cx.call().tensor(0)?.dtype;
    if from.working() == from {
        return one(cx, compute(&x));
    }
    let of = |d| array::dtype_of(d).ok_or_else(overflow);
    let to = cx.results().first().ok_or_else(overflow)?.dtype;
    let (work, to) = (of(from.working())?, of(to)?);
    let made = || compute(&x.as_dtype(work)?)?.as_dtype(to);
    one(cx, made())
}

fn over_axes(cx: &Cx<'_>, reduce: OverAxes) -> Result<Vec<Array>, DeviceError> {
    let call = cx.call();
    let rank = cx.dims(0)?.len();
    let axes: Option<Vec<i32>> = match call.ints(0)? {
        [] => (0..rank).map(|a| i32::try_from(a).ok()).collect(),
        axes => axes.iter().map(|a| axis_of(*a, rank)).collect(),
    };
    let (axes, keep) = (axes.ok_or_else(overflow)?, call.bool(1)?);
    widened(cx, |x| reduce(x, &axes, keep))
}

fn arg(
    cx: &Cx<'_>,
    find: impl FnOnce(&Array, i32, bool) -> Result<Array, Exception>,
) -> Result<Vec<Array>, DeviceError> {
    let x = cx.array(0)?;
    let axis = axis_of(cx.call().int(0)?, x.ndim()).ok_or_else(overflow)?;
    one(cx, find(&x, axis, cx.call().bool(1)?))
}

fn running(
    cx: &Cx<'_>,
    run: impl FnOnce(&Array, i32, bool, bool) -> Result<Array, Exception>,
) -> Result<Vec<Array>, DeviceError> {
    let call = cx.call();
    let axis = axis_of(call.int(0)?, cx.dims(0)?.len()).ok_or_else(overflow)?;
    let (exclusive, reverse) = (call.bool(1)?, call.bool(2)?);
    widened(cx, |x| run(x, axis, reverse, !exclusive))
}

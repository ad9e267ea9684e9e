//! Reductions and running sums. Of half precision they are computed in f32 and rounded once.

use hotcell_graph::{DType, op::Call};
use mlx_rs::{Array, Dtype, error::Exception, ops};

use super::{Entry, axis_of, dtype, has_elements, needs, one};
use crate::{
    backend::DeviceError,
    mlx::{array, plan::overflow, run::Cx},
};

type OverAxes = fn(&Array, &[i32], bool) -> Result<Array, Exception>;

macro_rules! over_axes {
    ($($name:literal, $fits:path, $needs:path, $f:path;)*) => {
        [$(Entry { op: $name, supports: $fits, needs: $needs, launch: |cx| over_axes(cx, |x, axes, keep| $f(x, axes, keep)) },)*]
    };
}

pub(super) static ENTRIES: [Entry; 8] = over_axes! {
    "reduce_sum", sums, needs::several, ops::sum_axes;
    "reduce_prod", sums, needs::several, ops::prod_axes;
    "reduce_max", real, needs::extremes, greatest;
    "reduce_min", real, needs::extremes, least;
    "reduce_all", real, needs::several, ops::all_axes;
    "reduce_any", real, needs::several, ops::any_axes;
    "mean", floats, needs::several, ops::mean_axes;
    "logsumexp", up_to_single, needs::several, ops::logsumexp_axes;
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

/// Integers as wide as MLX's floats, with a sign and without.
fn bits_of(dtype: Dtype) -> Option<(Dtype, Dtype)> {
    match dtype {
        Dtype::Float32 => Some((Dtype::Int32, Dtype::Uint32)),
        Dtype::Float64 => Some((Dtype::Int64, Dtype::Uint64)),
        _ => None,
    }
}

/// The greatest elements. Of zeros of both signs MLX gives either; the positive one is greater. Where the greatest element is
/// a zero there is none above it, so that of all bits, read without a sign, those of the positive zero are the least if it
/// is there, and otherwise those of the negative one.
fn greatest(x: &Array, axes: &[i32], keep: bool) -> Result<Array, Exception> {
    let greatest = ops::max_axes(x, axes, keep)?;
    match bits_of(x.dtype()) {
        Some((_, bits)) => with_sign(x, &greatest, bits, axes, keep),
        None => Ok(greatest),
    }
}

/// The least elements. Where that is a zero there is none below it: of all bits, read with a sign, those of the negative zero
/// are the least if it is there, and otherwise those of the positive one.
fn least(x: &Array, axes: &[i32], keep: bool) -> Result<Array, Exception> {
    let least = ops::min_axes(x, axes, keep)?;
    match bits_of(x.dtype()) {
        Some((bits, _)) => with_sign(x, &least, bits, axes, keep),
        None => Ok(least),
    }
}

/// What was found, where it is a zero with the sign of the least of all elements, read as the integers `bits`.
fn with_sign(
    x: &Array,
    found: &Array,
    bits: Dtype,
    axes: &[i32],
    keep: bool,
) -> Result<Array, Exception> {
    let zeros = ops::min_axes(x.view_dtype(bits)?, axes, keep)?.view_dtype(x.dtype())?;
    // Not a number is not false.
    ops::select(found.logical_not()?, zeros, found)
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

//! Ops that move elements and compute nothing.

use hotcell_graph::op::Call;
use mlx_rs::{Array, error::Exception, ops};

use super::{Entry, all_are, axis_of, dtype, has_elements, needs, one};
use crate::{
    backend::DeviceError,
    mlx::{array, plan::overflow, run::Cx},
};

pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "reshape",
        supports: plain,
        needs: needs::copies,
        launch: |cx| {
            let x = cx.array(0)?;
            one(cx, x.reshape(&cx.result_dims(0)?))
        },
    },
    Entry {
        op: "broadcast_to",
        supports: plain,
        needs: needs::nothing,
        launch: |cx| {
            let x = cx.array(0)?;
            one(cx, ops::broadcast_to(&*x, &cx.result_dims(0)?))
        },
    },
    Entry {
        op: "transpose",
        supports: plain,
        needs: needs::nothing,
        launch: transpose,
    },
    Entry {
        op: "slice",
        supports: forwards,
        needs: needs::nothing,
        launch: slice,
    },
    Entry {
        op: "concat",
        supports: concatenated,
        needs: needs::nothing,
        launch: concat,
    },
    Entry {
        op: "pad",
        supports: with_zeros,
        needs: needs::nothing,
        launch: pad,
    },
    Entry {
        op: "literal",
        supports: plain_result,
        needs: needs::nothing,
        launch: literal,
    },
];

fn plain(call: &Call<'_>) -> bool {
    dtype(call, 0).is_some_and(|d| !d.is_block()) && has_elements(call)
}

fn plain_result(call: &Call<'_>) -> bool {
    has_elements(call)
}

fn transpose(cx: &Cx<'_>) -> Result<Vec<Array>, DeviceError> {
    let x = cx.array(0)?;
    let rank = x.ndim();
    let call = cx.call();
    let axes: Option<Vec<i32>> = match call.ints(0)? {
        [] => (0..rank).rev().map(|a| i32::try_from(a).ok()).collect(),
        axes => axes.iter().map(|a| axis_of(*a, rank)).collect(),
    };
    one(cx, x.transpose_axes(&axes.ok_or_else(overflow)?))
}

/// Slices by positive steps; backwards it is the CPU backend's.
fn forwards(call: &Call<'_>) -> bool {
    plain(call) && call.ints(2).is_ok_and(|steps| steps.iter().all(|s| *s > 0))
}

/// Elements `from`, `from + step`, … of each axis, as many as `dims` says, which are there.
pub(in crate::mlx) fn sliced(
    x: &Array,
    from: &[i32],
    steps: &[i32],
    dims: &[i32],
) -> Result<Array, Exception> {
    let rank = x.ndim();
    if [from.len(), steps.len(), dims.len()] != [rank; 3] {
        return Err(Exception::custom("a slice of another rank"));
    }
    let each = from.iter().zip(steps).zip(dims).zip(x.shape());
    let stops: Option<Vec<i32>> = each
        .map(|(((from, step), n), size)| {
            let last = n.checked_sub(1)?.checked_mul(*step)?.checked_add(*from)?;
            (*from >= 0 && *step > 0 && *n > 0 && last < *size).then_some(last + 1)
        })
        .collect();
    let stops = stops.ok_or_else(|| Exception::custom("a slice outside"))?;
    // SAFETY: each list has as many numbers as it says, and the array is alive.
    array::made(|to, stream| unsafe {
        mlx_sys::mlx_slice(
            to,
            x.as_ptr(),
            from.as_ptr(),
            rank,
            stops.as_ptr(),
            rank,
            steps.as_ptr(),
            rank,
            stream,
        )
    })
}

fn slice(cx: &Cx<'_>) -> Result<Vec<Array>, DeviceError> {
    let x = cx.array(0)?;
    let call = cx.call();
    let (starts, steps) = (call.ints(0)?, call.ints(2)?);
    let dims = cx.result_dims(0)?;
    // Of an axis with one element the step does not matter, and may be any number.
    let each = starts.iter().zip(steps).zip(&dims).zip(x.shape());
    let places: Option<Vec<(i32, i32)>> = each
        .map(|(((start, step), n), size)| {
            let size = i64::from(*size);
            let from = if *start < 0 {
                start.saturating_add(size)
            } else {
                *start
            };
            let from = i32::try_from(from.clamp(0, size)).ok()?;
            let step = if *n == 1 {
                1
            } else {
                i32::try_from(*step).ok()?
            };
            Some((from, step))
        })
        .collect();
    let (from, steps): (Vec<i32>, Vec<i32>) = places.ok_or_else(overflow)?.into_iter().unzip();
    one(cx, sliced(&x, &from, &steps, &dims))
}

fn concatenated(call: &Call<'_>) -> bool {
    all_are(call, |d| !d.is_block()) && has_elements(call)
}

fn concat(cx: &Cx<'_>) -> Result<Vec<Array>, DeviceError> {
    let mut parts = Vec::new();
    for i in 0..cx.inputs() {
        parts.push(cx.array(i)?);
    }
    let rank = parts.first().map_or(0, |p| p.ndim());
    let axis = axis_of(cx.call().int(0)?, rank).ok_or_else(overflow)?;
    let parts: Vec<&Array> = parts.iter().map(|p| &**p).collect();
    one(cx, ops::concatenate(&parts, axis))
}

/// Zeros around, or a given value.
fn with_zeros(call: &Call<'_>) -> bool {
    plain(call) && call.name(2).is_ok_and(|mode| mode == "constant")
}

fn pad(cx: &Cx<'_>) -> Result<Vec<Array>, DeviceError> {
    let x = cx.array(0)?;
    let call = cx.call();
    let widths = |i: usize| -> Result<Vec<i32>, DeviceError> {
        let all = call.ints(i)?.iter().map(|w| i32::try_from(*w).ok());
        all.collect::<Option<_>>().ok_or_else(overflow)
    };
    let (low, high) = (widths(0)?, widths(1)?);
    let value = match cx.optional(1)? {
        Some(value) => value,
        None => {
            let zeros = vec![0; call.tensor(0)?.dtype.block_bytes()];
            std::rc::Rc::new(array::from_bytes(&zeros, call.tensor(0)?.dtype, &[])?)
        }
    };
    let (axes, rank) = ((0..low.len() as i32).collect::<Vec<_>>(), low.len());
    if high.len() != rank || x.ndim() != rank {
        return Err(overflow());
    }
    // SAFETY: each list has as many numbers as it says; the mode ends with a zero byte; the arrays are alive.
    let made = array::made(|to, stream| unsafe {
        mlx_sys::mlx_pad(
            to,
            x.as_ptr(),
            axes.as_ptr(),
            rank,
            low.as_ptr(),
            rank,
            high.as_ptr(),
            rank,
            value.as_ptr(),
            c"constant".as_ptr(),
            stream,
        )
    });
    one(cx, made)
}

fn literal(cx: &Cx<'_>) -> Result<Vec<Array>, DeviceError> {
    let call = cx.call();
    let made = array::from_bytes(call.bytes(2)?, call.dtype(0)?, &cx.result_dims(0)?)?;
    Ok(vec![made])
}

//! Convolution, which MLX has with the channels last.

use hotcell_graph::{DType, op::Call};
use mlx_rs::{Array, error::Exception};

use super::{
    Entry, all_are, has_elements,
    needs::{Needs, array_of, elements, product, sum},
    one,
};
use crate::{
    backend::DeviceError,
    mlx::{array, plan::overflow, run::Cx},
};

pub(super) static ENTRIES: &[Entry] = &[Entry {
    op: "conv",
    supports: single,
    needs: needed,
    launch: conv,
}];

/// Elements added at an end of an axis, at most: MLX copies what it pads.
const MOST_PADDED: i64 = 32;

/// f32 over one or two axes; groups in three are not MLX's. In two, groups and dilations are computed by a loop of MLX's
/// CPU library (0.32.2) that goes as far as the padding does, also where that is past the end of the result.
fn single(call: &Call<'_>) -> bool {
    let rank = call.tensor(0).map_or(0, |t| t.shape.rank());
    let all =
        |i: usize, is: fn(i64) -> bool| call.ints(i).is_ok_and(|all| all.iter().all(|n| is(*n)));
    let is_padded_little = |i| all(i, |n| n <= MOST_PADDED);
    let is_plain = all(3, |n| n == 1) && call.int(4).is_ok_and(|groups| groups == 1);
    all_are(call, |d| d == DType::F32)
        && (3..=4).contains(&rank)
        && has_elements(call)
        && is_padded_little(1)
        && is_padded_little(2)
        && (rank == 3 || is_plain)
}

/// MLX copies what it pads, and lays the window of every result side by side: a matrix that is larger than its inputs by
/// as much as windows overlap.
fn needed(call: &Call<'_>, rows: usize) -> Option<Needs> {
    let (x, w) = (call.tensor(0).ok()?, call.tensor(1).ok()?);
    let result = (call.op.infer)(call).ok()?;
    let result = elements(result.first()?, rows)?;
    let (low, high) = (call.ints(1).ok()?, call.ints(2).ok()?);
    let first = usize::from(call.name(5).ok()? != "channels_last") + 1;
    let mut padded = Vec::with_capacity(x.shape.rank());
    for (axis, dim) in x.shape.dims().iter().enumerate() {
        let at = axis.checked_sub(first);
        let ends = at.and_then(|at| Some((low.get(at)?, high.get(at)?)));
        let (low, high) = ends.unwrap_or((&0, &0));
        let ends = [usize::try_from(*low).ok()?, usize::try_from(*high).ok()?];
        padded.push(sum(&[dim.at(rows), sum(&ends)?])?);
    }
    let padded = array_of(&padded)?;
    let (outs, weights) = (w.shape.dims().first()?.at(rows), elements(w, rows)?);
    let window = weights.checked_div(outs)?;
    let groups = usize::try_from(call.int(4).ok()?).ok()?;
    let columns = array_of(&[result.checked_div(outs)?, window, groups])?;
    // Inputs and result with the channels last, and what is added to it.
    let turned = sum(&[elements(x, rows)?, weights, result, result])?;
    let floats = sum(&[padded, columns, turned])?;
    Some(Needs {
        bytes: product(&[floats, size_of::<f32>()])?,
        products: product(&[result, window])?,
    })
}

/// The axes with channels, the second, last: and back.
fn turned(rank: usize, back: bool) -> Option<Vec<i32>> {
    let rank = i32::try_from(rank).ok()?;
    Some(match back {
        false => std::iter::once(0).chain(2..rank).chain([1]).collect(),
        true => [0, rank - 1].into_iter().chain(1..rank - 1).collect(),
    })
}

fn conv(cx: &Cx<'_>) -> Result<Vec<Array>, DeviceError> {
    let call = cx.call();
    let (x, w, bias) = (cx.array(0)?, cx.array(1)?, cx.optional(2)?);
    let list = |i: usize| -> Result<Vec<i32>, DeviceError> {
        let all = call.ints(i)?.iter().map(|n| i32::try_from(*n).ok());
        all.collect::<Option<_>>().ok_or_else(overflow)
    };
    let (strides, low, high, dilations) = (list(0)?, list(1)?, list(2)?, list(3)?);
    let groups = i32::try_from(call.int(4)?).map_err(|_| overflow())?;
    let last = call.name(5)? == "channels_last";
    let spatial = x.ndim().checked_sub(2).ok_or_else(overflow)?;
    if [strides.len(), low.len(), high.len(), dilations.len()] != [spatial; 4] {
        return Err(overflow());
    }
    let ones = vec![1; spatial];
    let to_last = turned(x.ndim(), false).ok_or_else(overflow)?;
    let back = turned(x.ndim(), true).ok_or_else(overflow)?;
    let made = || -> Result<Array, Exception> {
        let (x, w) = match last {
            true => (x.contiguous()?, w.contiguous()?),
            false => (x.transpose_axes(&to_last)?, w.transpose_axes(&to_last)?),
        };
        // SAFETY: each list has as many numbers as it says, and the arrays are alive.
        let result = array::made(|to, stream| unsafe {
            mlx_sys::mlx_conv_general(
                to,
                x.as_ptr(),
                w.as_ptr(),
                strides.as_ptr(),
                spatial,
                low.as_ptr(),
                spatial,
                high.as_ptr(),
                spatial,
                dilations.as_ptr(),
                spatial,
                ones.as_ptr(),
                spatial,
                groups,
                false,
                stream,
            )
        })?;
        // The bias is of the channels, which are last here.
        let result = match &bias {
            Some(bias) => result.add(&**bias)?,
            None => result,
        };
        match last {
            true => Ok(result),
            false => result.transpose_axes(&back),
        }
    };
    one(cx, made())
}

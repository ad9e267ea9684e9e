//! Ops that read where indices say. MLX checks none of them, so all are read and checked first, and what MLX gets is
//! what was checked.

use hotcell_graph::op::Call;
use mlx_rs::{Array, ops::indexing};

use super::{Entry, axis_of, dtype, has_elements, one};
use crate::{
    backend::DeviceError,
    mlx::{array, plan::overflow, run::Cx},
};

pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "take",
        supports: plain,
        launch: take,
    },
    Entry {
        op: "take_along_axis",
        supports: plain,
        launch: take_along_axis,
    },
];

fn plain(call: &Call<'_>) -> bool {
    dtype(call, 0).is_some_and(|d| !d.is_block())
        && dtype(call, 1).is_some_and(|d| d.is_integer())
        && has_elements(call)
}

/// The array, the axis, and the checked indices along it.
fn read(cx: &Cx<'_>) -> Result<(std::rc::Rc<Array>, i32, Array), DeviceError> {
    let x = cx.array(0)?;
    let axis = axis_of(cx.call().int(0)?, x.ndim()).ok_or_else(overflow)?;
    let size = usize::try_from(axis).ok().and_then(|a| x.shape().get(a));
    let size = size
        .and_then(|n| usize::try_from(*n).ok())
        .ok_or_else(overflow)?;
    let indices = array::from_i32(&cx.indices(1, size)?, &cx.dims(1)?)?;
    Ok((x, axis, indices))
}

fn take(cx: &Cx<'_>) -> Result<Vec<Array>, DeviceError> {
    let (x, axis, indices) = read(cx)?;
    one(cx, x.take_axis(&indices, axis))
}

fn take_along_axis(cx: &Cx<'_>) -> Result<Vec<Array>, DeviceError> {
    let (x, axis, indices) = read(cx)?;
    one(cx, indexing::take_along_axis(&*x, &indices, axis))
}

//! Ops that read where indices say. MLX checks none of them, so all are read and checked first, and what MLX gets is
//! what was checked.

use hotcell_graph::op::Call;
use mlx_rs::{Array, ops::indexing};

use super::{Entry, axis_of, dtype, has_elements, needs, one};
use crate::{
    backend::DeviceError,
    mlx::{array, plan::overflow, run::Cx},
};

pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "take",
        supports: plain,
        needs: needs::indices,
        launch: take,
    },
    Entry {
        op: "take_along_axis",
        supports: plain,
        needs: needs::indices,
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

/// Whether whole rows are taken, as an embedding is: of a table in memory only those are read.
pub(super) fn is_of_rows(call: &Call<'_>) -> bool {
    let rank = call.tensor(0).map_or(0, |t| t.shape.rank());
    call.op.name == "take"
        && call.int(0).is_ok_and(|axis| axis_of(axis, rank) == Some(0))
        && call.tensor(0).is_ok_and(|t| !t.shape.is_symbolic())
}

fn take(cx: &Cx<'_>) -> Result<Vec<Array>, DeviceError> {
    if is_of_rows(&cx.call())
        && let Some(rows) = cx.taken_rows(0, 1)?
    {
        return Ok(vec![rows]);
    }
    let (x, axis, indices) = read(cx)?;
    one(cx, x.take_axis(&indices, axis))
}

fn take_along_axis(cx: &Cx<'_>) -> Result<Vec<Array>, DeviceError> {
    let (x, axis, indices) = read(cx)?;
    one(cx, indexing::take_along_axis(&*x, &indices, axis))
}

//! Sorting upwards; downwards, where equal ones stay in order as well, is the CPU backend's.

use hotcell_graph::{DType, op::Call};
use mlx_rs::{Array, ops};

use super::{Entry, axis_of, dtype, has_elements, needs, one};
use crate::{
    backend::DeviceError,
    mlx::{plan::overflow, run::Cx},
};

pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "sort",
        supports: upwards,
        needs: needs::copies,
        launch: |cx| {
            let (x, axis) = read(cx)?;
            one(cx, ops::sort_axis(&*x, axis))
        },
    },
    Entry {
        op: "argsort",
        supports: upwards,
        needs: needs::copies,
        launch: |cx| {
            let (x, axis) = read(cx)?;
            one(cx, ops::argsort_axis(&*x, axis))
        },
    },
];

fn upwards(call: &Call<'_>) -> bool {
    dtype(call, 0).is_some_and(|d| !d.is_block() && d != DType::C64)
        && call.bool(1).is_ok_and(|descending| !descending)
        && has_elements(call)
}

fn read(cx: &Cx<'_>) -> Result<(std::rc::Rc<Array>, i32), DeviceError> {
    let x = cx.array(0)?;
    let axis = axis_of(cx.call().int(0)?, x.ndim()).ok_or_else(overflow)?;
    Ok((x, axis))
}

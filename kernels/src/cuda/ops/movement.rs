//! Ops that move elements and compute nothing.

use hotcell_graph::{
    DType, Shape,
    op::{
        Call,
        rules::normal_axis,
        shape::{permutation, slice_of_axis},
    },
    shape::Dim,
};

use super::{
    Cx, Entry, Kernel, Made,
    elementwise::{copy, copy_name},
    layout::{broadcast, contiguous, dims_at, grid},
};
use crate::{backend::DeviceError, cuda::gpu::Arguments, part::overflow};

/// Ops whose result is their first input's bytes.
pub(super) static VIEWS: &[Entry] = &[
    view("reshape"),
    view("bitcast"),
    view("expand_dims"),
    view("squeeze"),
    view("flatten"),
];

const fn view(op: &'static str) -> Entry {
    Entry { op, make: whole }
}

pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        op: "broadcast_to",
        make: broadcast_to,
    },
    Entry {
        op: "transpose",
        make: transpose,
    },
    Entry {
        op: "slice",
        make: slice,
    },
    Entry {
        op: "concat",
        make: concat,
    },
    Entry {
        op: "pad",
        make: pad,
    },
];

/// The same bytes.
struct Whole {
    dtype: DType,
    shape: Shape,
}

fn whole(call: &Call<'_>) -> Option<Made> {
    let x = call.tensor(0).ok()?;
    let kernel = Whole {
        dtype: x.dtype,
        shape: x.shape.clone(),
    };
    Some((Box::new(kernel), vec![]))
}

impl Kernel for Whole {
    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let n = self.shape.elements(cx.rows).ok_or_else(overflow)?;
        let bytes = self.dtype.row_bytes(n).ok_or_else(overflow)?;
        cx.gpu.copy(cx.output(0)?, cx.input(0)?, bytes)
    }
}

/// From the sizes of the input's axes and the result's: the first element, and a stride for each axis of the result.
type View = dyn Fn(&[usize], &[usize]) -> Option<(i64, Vec<i64>)>;

/// Elements in places that strides name, from a first one on.
struct Strided {
    bytes: usize,
    x: Shape,
    result: Shape,
    view: Box<View>,
}

fn strided(
    call: &Call<'_>,
    view: impl Fn(&[usize], &[usize]) -> Option<(i64, Vec<i64>)> + 'static,
) -> Option<Made> {
    let x = call.tensor(0).ok()?;
    if x.dtype.is_block() {
        return None;
    }
    let bytes = x.dtype.block_bytes();
    let name = copy_name(bytes)?;
    let results = (call.op.infer)(call).ok()?;
    let kernel = Strided {
        bytes,
        x: x.shape.clone(),
        result: results.first()?.shape.clone(),
        view: Box::new(view),
    };
    Some((Box::new(kernel), vec![name]))
}

impl Kernel for Strided {
    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let (from, to) = (dims_at(&self.x, cx.rows), dims_at(&self.result, cx.rows));
        if to.contains(&0) {
            return Ok(());
        }
        let (first, strides) = (self.view)(&from, &to).ok_or_else(overflow)?;
        let at = first.checked_mul(self.bytes as i64).ok_or_else(overflow)?;
        let start = cx.input(0)?.wrapping_add_signed(at);
        copy(cx, self.bytes, &to, (start, strides), (cx.output(0)?, None))
    }
}

fn broadcast_to(call: &Call<'_>) -> Option<Made> {
    strided(call, |from, to| Some((0, broadcast(from, to))))
}

fn transpose(call: &Call<'_>) -> Option<Made> {
    let x = call.tensor(0).ok()?;
    let order = permutation(call.ints(0).ok()?, x.shape.rank())?;
    strided(call, move |from, _| {
        let own = contiguous(from);
        let turned = order.iter().map(|axis| own.get(*axis).copied());
        Some((0, turned.collect::<Option<_>>()?))
    })
}

fn slice(call: &Call<'_>) -> Option<Made> {
    let all = |i: usize| call.ints(i).ok().map(<[i64]>::to_vec);
    let (starts, stops, steps) = (all(0)?, all(1)?, all(2)?);
    let symbolic = call.tensor(0).ok()?.shape.dims().first() == Some(&Dim::Rows);
    strided(call, move |from, _| {
        let (mut first, mut strides) = (0i64, contiguous(from));
        for (axis, stride) in strides.iter_mut().enumerate() {
            // All of the rows, whatever their number is.
            if symbolic && axis == 0 {
                continue;
            }
            let (start, stop) = (*starts.get(axis)?, *stops.get(axis)?);
            let step = *steps.get(axis)?;
            let (begin, _) = slice_of_axis(*from.get(axis)?, start, stop, step)?;
            first = first.checked_add(stride.checked_mul(i64::try_from(begin).ok()?)?)?;
            // One element has no next one.
            *stride = stride.saturating_mul(step);
        }
        Some((first, strides))
    })
}

/// Tensors one after another along an axis.
struct Concat {
    bytes: usize,
    axis: usize,
    inputs: Vec<Shape>,
    result: Shape,
}

fn concat(call: &Call<'_>) -> Option<Made> {
    let first = call.tensor(0).ok()?;
    let mut inputs = Vec::new();
    for i in 0..call.inputs.len() {
        let t = call.tensor(i).ok()?;
        if t.dtype != first.dtype || t.dtype.is_block() {
            return None;
        }
        inputs.push(t.shape.clone());
    }
    let bytes = first.dtype.block_bytes();
    let name = copy_name(bytes)?;
    let results = (call.op.infer)(call).ok()?;
    let kernel = Concat {
        bytes,
        axis: normal_axis(call.int(0).ok()?, first.shape.rank())?,
        inputs,
        result: results.first()?.shape.clone(),
    };
    Some((Box::new(kernel), vec![name]))
}

impl Kernel for Concat {
    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let strides = contiguous(&dims_at(&self.result, cx.rows));
        let along = *strides.get(self.axis).ok_or_else(overflow)?;
        let mut at = cx.output(0)?;
        for (i, shape) in self.inputs.iter().enumerate() {
            let dims = dims_at(shape, cx.rows);
            let from = (cx.input(i)?, contiguous(&dims));
            copy(cx, self.bytes, &dims, from, (at, Some(strides.clone())))?;
            let here = *dims.get(self.axis).ok_or_else(overflow)? as i64;
            at = at.wrapping_add_signed(here.wrapping_mul(along).wrapping_mul(self.bytes as i64));
        }
        Ok(())
    }
}

/// Axes of a tensor that the kernel of [`Pad`] takes.
const AXES: usize = 8;

/// A tensor with more around it.
struct Pad {
    bytes: usize,
    mode: usize,
    x: Shape,
    result: Shape,
    low: Vec<u64>,
    has_value: bool,
}

fn pad(call: &Call<'_>) -> Option<Made> {
    let x = call.tensor(0).ok()?;
    let (bytes, name) = (x.dtype.block_bytes(), call.name(2).ok()?);
    let modes = ["constant", "edge", "reflect", "wrap"];
    let low = call.ints(0).ok()?.iter().map(|n| u64::try_from(*n).ok());
    let results = (call.op.infer)(call).ok()?;
    let kernel = Pad {
        bytes,
        mode: modes.iter().position(|mode| *mode == name)?,
        x: x.shape.clone(),
        result: results.first()?.shape.clone(),
        low: low.collect::<Option<_>>()?,
        has_value: call.optional(1).ok()?.is_some(),
    };
    let fits = !x.dtype.is_block() && matches!(bytes, 1 | 2 | 4 | 8) && x.shape.rank() <= AXES;
    fits.then(|| -> Made { (Box::new(kernel), vec!["pad"]) })
}

impl Kernel for Pad {
    fn launch(&self, cx: &Cx<'_>) -> Result<(), DeviceError> {
        let n = self.result.elements(cx.rows).ok_or_else(overflow)? as u64;
        let (from, to) = (dims_at(&self.x, cx.rows), dims_at(&self.result, cx.rows));
        let mut words = vec![self.bytes as u64, self.mode as u64, n, to.len() as u64];
        for dims in [&to, &from] {
            let size = |axis: usize| dims.get(axis).copied().unwrap_or(1);
            words.extend((0..AXES).map(|axis| size(axis) as u64));
        }
        words.extend((0..AXES).map(|axis| self.low.get(axis).copied().unwrap_or(0)));
        let value = if self.has_value { cx.input(1)? } else { 0 };
        let arguments = Arguments::default()
            .word(cx.output(0)?)
            .word(cx.input(0)?)
            .word(value)
            .block(&words);
        // SAFETY: the kernel's arguments (generic_elementwise.cu), of tensors of these shapes.
        unsafe { cx.gpu.launch("pad", grid(n), &arguments) }
    }
}

//! Ops that choose or replace elements by where they stand: triangles, diagonals, windows at fixed or computed places.
//!
//! All are compositions: places are counted out in integers, and `take` and the scatters, which check them, do the rest.

use crate::{
    dtype::DType,
    graph::{GraphBuilder, GraphError, Value},
    op::{
        Attribute, Call, Effect,
        fit::{Parts, dims_text, integers, shaped},
        ops,
        rules::{
            Specs, Values, axis_of, cast_to, one, one_of, plain, reshape_to, scalar, scalar_like,
            size_of, spec_of,
        },
        shape::slice_of_axis,
    },
    shape::{Dim, Shape, TensorSpec},
};

/// The farthest offset, shift or stride.
const MOST: i64 = 1 << 40;

ops! {
    /// `x` on and below the `k`-th diagonal of its last two axes, 0 above (NumPy's `tril`).
    tril(x; k: Int(-MOST, MOST)) -> one { shapes: "x […, m, n]", dtypes: "all but block types", effect: Effect::None, infer: triangle_spec, decompose: Some(tril_of_parts) }

    /// `x` on and above the `k`-th diagonal of its last two axes, 0 below (NumPy's `triu`).
    triu(x; k: Int(-MOST, MOST)) -> one { shapes: "x […, m, n]", dtypes: "all but block types", effect: Effect::None, infer: triangle_spec, decompose: Some(triu_of_parts) }

    /// Matrices with the last axis of `x` on their `k`-th diagonal and 0 elsewhere (NumPy's `diag` of vectors, ggml's `diag`).
    diag(x; k: Int(-MOST, MOST)) -> one { shapes: "[…, n] → […, n + |k|, n + |k|]", dtypes: "all but block types", effect: Effect::None, infer: diag_spec, decompose: Some(diag_of_parts) }

    /// The `offset`-th diagonals of the matrices along two axes, which they replace as the last axis (NumPy's `diagonal`).
    diagonal(x; offset: Int(-MOST, MOST), axis1: Int(-8, 7), axis2: Int(-8, 7)) -> one { shapes: "x without the two axes, then the diagonal's length", dtypes: "all but block types", effect: Effect::None, infer: diagonal_spec, decompose: Some(diagonal_of_parts) }

    /// `x` moved by `shift` along `axis`; what leaves at one end comes in at the other (NumPy's `roll`).
    roll(x; shift: Int(-MOST, MOST), axis: Int(-8, 7)) -> one { shapes: "x", dtypes: "all but block types", effect: Effect::None, infer: roll_spec, decompose: Some(roll_of_parts) }

    /// Element `offset + Σ indexᵢ · stridesᵢ` of the row-major elements of `x` (MLX's `as_strided`); a place outside of
    /// them is an error when the graph is built.
    as_strided(x; shape: Shape, strides: Ints(-MOST, MOST), offset: Int(0, MOST)) -> one { shapes: "shape", dtypes: "all but block types", effect: Effect::None, infer: as_strided_spec, decompose: Some(as_strided_of_parts) }

    /// `x` with `update`, which is broadcast, in the place of `x[starts : stops : steps]` (MLX's `slice_update`).
    slice_update(x, update; starts: Ints(i64::MIN, i64::MAX), stops: Ints(i64::MIN, i64::MAX), steps: Ints(i64::MIN, i64::MAX)) -> one { shapes: "x; update broadcasts to the slice", dtypes: "all but block types; update as x", effect: Effect::None, infer: update_spec, decompose: Some(update_of_parts) }

    /// The window of `x` of these `sizes` that begins at `starts` `[rank]`, where negative ones count from the end. A window
    /// that does not lie within `x` is an error of the execution.
    slice_dynamic(x, starts = index; sizes: Ints(0, MOST)) -> one { shapes: "sizes", dtypes: "x plain; starts integers → x", effect: Effect::None, infer: window_spec, decompose: Some(window_of_parts) }

    /// `x` with `update`, of as many axes, in the place of the window that begins at `starts` `[rank]`, as `slice_dynamic`
    /// has it.
    slice_update_dynamic(x, update, starts = index;) -> one { shapes: "x", dtypes: "x, update plain, equal; starts integers → x", effect: Effect::None, infer: update_window_spec, decompose: Some(update_window_of_parts) }
}

/// Sizes of the last two axes.
fn matrix(call: &Call<'_>, x: &TensorSpec) -> Result<(usize, usize), GraphError> {
    match x.shape.dims() {
        [.., m, n] => Ok((
            size_of(call, *m, "an axis of a matrix")?,
            size_of(call, *n, "an axis of a matrix")?,
        )),
        _ => Err(call.error(format_args!(
            "x must have two axes or more, not {}",
            x.shape
        ))),
    }
}

fn triangle_spec(call: &Call<'_>) -> Specs {
    let x = plain(call, 0)?;
    matrix(call, x)?;
    Ok(vec![x.clone()])
}

/// `start + i · step` for `n` places, along axis `axis` of `rank`, the others of size 1.
pub(crate) fn places(
    graph: &mut GraphBuilder,
    (start, step): (i64, i64),
    n: usize,
    axis: usize,
    rank: usize,
) -> Result<Value, GraphError> {
    let n64 = i64::try_from(n).map_err(|_| GraphError::NoResult)?;
    let flat = graph.arange(start as f64, step as f64, n64, DType::I64)?;
    let dims = (0..rank).map(|i| Dim::Fixed(if i == axis { n } else { 1 }));
    shaped(graph, flat, dims)
}

/// `x` where `keep` holds, 0 elsewhere.
fn kept(graph: &mut GraphBuilder, keep: Value, x: Value) -> Result<Value, GraphError> {
    let zero = scalar_like(graph, 0.0, x)?;
    graph.where_(keep, x, zero)
}

fn triangle(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
    lower: bool,
) -> Values {
    let (&[x], &[Attribute::Int(k)]) = (inputs, attributes) else {
        return Err(GraphError::NoResult);
    };
    let spec = spec_of(graph, x)?;
    let &[.., Dim::Fixed(m), Dim::Fixed(n)] = spec.shape.dims() else {
        return Err(GraphError::NoResult);
    };
    let row = places(graph, (k, 1), m, 0, 2)?;
    let column = places(graph, (0, 1), n, 1, 2)?;
    let keep = match lower {
        true => graph.less_equal(column, row)?,
        false => graph.greater_equal(column, row)?,
    };
    Ok(vec![kept(graph, keep, x)?])
}

fn tril_of_parts(graph: &mut GraphBuilder, inputs: &[Value], attributes: &[Attribute]) -> Values {
    triangle(graph, inputs, attributes, true)
}

fn triu_of_parts(graph: &mut GraphBuilder, inputs: &[Value], attributes: &[Attribute]) -> Values {
    triangle(graph, inputs, attributes, false)
}

fn diag_spec(call: &Call<'_>) -> Specs {
    let (x, k) = (plain(call, 0)?, call.int(0)?);
    let Some((&last, before)) = x.shape.dims().split_last() else {
        return Err(call.error("x must have an axis"));
    };
    let n = size_of(call, last, "a diagonal")?;
    let side = usize::try_from(k.unsigned_abs()).ok();
    let side = side.and_then(|k| n.checked_add(k));
    let side = side.ok_or_else(|| call.error(format_args!("{k} is too far from the diagonal")))?;
    let square = [Dim::Fixed(side), Dim::Fixed(side)];
    one(call, x.dtype, [before, &square].concat())
}

fn diag_of_parts(graph: &mut GraphBuilder, inputs: &[Value], attributes: &[Attribute]) -> Values {
    let (&[x], &[Attribute::Int(k)]) = (inputs, attributes) else {
        return Err(GraphError::NoResult);
    };
    let dims = spec_of(graph, x)?.shape.dims().to_vec();
    let Some((&Dim::Fixed(n), before)) = dims.split_last() else {
        return Err(GraphError::NoResult);
    };
    let side = n + k.unsigned_abs() as usize;
    let around = |by: i64| {
        let mut pads = vec![0; dims.len()];
        pads[dims.len() - 1] = by.max(0);
        pads
    };
    let rows = graph.pad(x, None, &around(-k), &around(k), "constant")?;
    let rows = shaped(
        graph,
        rows,
        [before, &[Dim::Fixed(side), Dim::Fixed(1)]].concat(),
    )?;
    let row = places(graph, (k, 1), side, 0, 2)?;
    let column = places(graph, (0, 1), side, 1, 2)?;
    let keep = graph.equal(column, row)?;
    Ok(vec![kept(graph, keep, rows)?])
}

/// Where the diagonal of an `m` by `n` matrix begins among its elements, and how long it is.
fn on_diagonal(m: usize, n: usize, offset: i64) -> (usize, usize) {
    let far = usize::try_from(offset.unsigned_abs()).unwrap_or(usize::MAX);
    let (m, n, first) = match offset < 0 {
        true => (m.saturating_sub(far), n, far.saturating_mul(n)),
        false => (m, n.saturating_sub(far), far),
    };
    (first, m.min(n))
}

/// The two axes of a diagonal, which must differ and be fixed.
fn two_axes(call: &Call<'_>) -> Result<(usize, usize), GraphError> {
    let rank = plain(call, 0)?.shape.rank();
    let (a, b) = (
        axis_of(call, call.int(1)?, rank)?,
        axis_of(call, call.int(2)?, rank)?,
    );
    match a == b {
        true => Err(call.error(format_args!("axis1 and axis2 are both {a}"))),
        false => Ok((a, b)),
    }
}

fn diagonal_spec(call: &Call<'_>) -> Specs {
    let x = plain(call, 0)?;
    let (a, b) = two_axes(call)?;
    let size = |axis: usize| match x.shape.dims().get(axis) {
        Some(dim) => size_of(call, *dim, "an axis of a diagonal"),
        None => Err(call.error("no such axis")),
    };
    let (_, length) = on_diagonal(size(a)?, size(b)?, call.int(0)?);
    let others = x.shape.dims().iter().enumerate();
    let others = others.filter(|(i, _)| *i != a && *i != b);
    let dims = others.map(|(_, d)| *d).chain([Dim::Fixed(length)]);
    one(call, x.dtype, dims)
}

fn diagonal_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let parts = Parts::of(&diagonal, graph, inputs, attributes)?;
    let call = parts.call();
    let ((a, b), offset) = (two_axes(&call)?, call.int(0)?);
    let dims = call.tensor(0)?.shape.dims().to_vec();
    let &[x] = inputs else {
        return Err(GraphError::NoResult);
    };
    let others: Vec<usize> = (0..dims.len()).filter(|i| *i != a && *i != b).collect();
    let order: Vec<i64> = others.iter().chain([&a, &b]).map(|&i| i as i64).collect();
    let x = graph.transpose(x, &order)?;
    let (m, n) = (dims[a].at(0), dims[b].at(0));
    let flat = others.iter().map(|&i| dims[i]).chain([Dim::Fixed(m * n)]);
    let x = shaped(graph, x, flat)?;
    let (first, length) = on_diagonal(m, n, offset);
    // Of nothing there is nothing to take, wherever it would begin.
    let first = if length == 0 { 0 } else { first as i64 };
    let at = places(graph, (first, n as i64 + 1), length, 0, 1)?;
    Ok(vec![graph.take(x, at, -1)?])
}

fn roll_spec(call: &Call<'_>) -> Specs {
    let x = plain(call, 0)?;
    let axis = axis_of(call, call.int(1)?, x.shape.rank())?;
    if let Some(dim) = x.shape.dims().get(axis) {
        size_of(call, *dim, "rolled")?;
    }
    Ok(vec![x.clone()])
}

/// `x[start..stop]` of one axis.
pub(crate) fn cut(
    graph: &mut GraphBuilder,
    x: Value,
    axis: usize,
    (start, stop): (usize, usize),
) -> Result<Value, GraphError> {
    let rank = spec_of(graph, x)?.shape.rank();
    let (mut starts, mut stops) = (vec![0; rank], vec![i64::MAX; rank]);
    if let (Some(first), Some(last)) = (starts.get_mut(axis), stops.get_mut(axis)) {
        (*first, *last) = (start as i64, stop as i64);
    }
    graph.slice(x, &starts, &stops, &vec![1; rank])
}

fn roll_of_parts(graph: &mut GraphBuilder, inputs: &[Value], attributes: &[Attribute]) -> Values {
    let parts = Parts::of(&roll, graph, inputs, attributes)?;
    let call = parts.call();
    let (x, shape) = (inputs[0], call.tensor(0)?.shape.clone());
    let axis = axis_of(&call, call.int(1)?, shape.rank())?;
    let n = shape.dims().get(axis).map_or(0, |d| d.at(0));
    let shift = match n {
        0 => 0,
        n => call.int(0)?.rem_euclid(n as i64) as usize,
    };
    if shift == 0 {
        return Ok(vec![graph.reshape(x, shape)?]);
    }
    let late = cut(graph, x, axis, (n - shift, n))?;
    let early = cut(graph, x, axis, (0, n - shift))?;
    Ok(vec![graph.concat(&[late, early], axis as i64)?])
}

/// The error for a tensor with the row dimension.
fn fixed(call: &Call<'_>, shape: &Shape, what: &str) -> Result<Vec<usize>, GraphError> {
    let dims = shape.dims().iter();
    dims.map(|d| size_of(call, *d, what)).collect()
}

fn as_strided_spec(call: &Call<'_>) -> Specs {
    let (x, shape, strides) = (plain(call, 0)?, call.shape(0)?, call.ints(1)?);
    let elements: usize = fixed(call, &x.shape, "read by strides")?.iter().product();
    let dims = fixed(call, shape, "read by strides")?;
    if strides.len() != dims.len() {
        return Err(call.error(format_args!(
            "{shape} needs {} strides, not {}",
            dims.len(),
            strides.len()
        )));
    }
    if !dims.contains(&0) {
        let (mut least, mut most) = (i128::from(call.int(2)?), i128::from(call.int(2)?));
        for (&n, &stride) in dims.iter().zip(strides) {
            let reach = (n as i128 - 1) * i128::from(stride);
            *(if reach < 0 { &mut least } else { &mut most }) += reach;
        }
        if least < 0 || most >= elements as i128 {
            return Err(call.error(format_args!(
                "reads places {least} to {most} of {elements} elements"
            )));
        }
    }
    one_of(call, x.dtype, shape.clone())
}

/// Flat places: `offset + Σ indexᵢ · stridesᵢ`, of this shape.
pub(crate) fn flat_places(
    graph: &mut GraphBuilder,
    dims: &[usize],
    strides: &[i64],
    offset: i64,
) -> Result<Value, GraphError> {
    let mut sum = scalar(graph, offset as f64, DType::I64)?;
    for (axis, (&n, &stride)) in dims.iter().zip(strides).enumerate() {
        let along = places(graph, (0, stride), n, axis, dims.len())?;
        sum = graph.add(sum, along)?;
    }
    Ok(sum)
}

fn as_strided_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let parts = Parts::of(&as_strided, graph, inputs, attributes)?;
    let call = parts.call();
    let dims = fixed(&call, call.shape(0)?, "read by strides")?;
    if dims.contains(&0) {
        let nothing = scalar_like(graph, 0.0, inputs[0])?;
        return Ok(vec![graph.broadcast_to(nothing, call.shape(0)?.clone())?]);
    }
    let elements = call.tensor(0)?.shape.elements(0).unwrap_or(0);
    let flat = graph.reshape(inputs[0], Shape::fixed(&[elements])?)?;
    let at = flat_places(graph, &dims, call.ints(1)?, call.int(2)?)?;
    Ok(vec![graph.take(flat, at, 0)?])
}

/// Of each axis of `x`: where the slice begins, by what it goes on and how many elements it has.
fn sliced(call: &Call<'_>, dims: &[usize]) -> Result<Vec<(usize, i64, usize)>, GraphError> {
    let lists = [call.ints(0)?, call.ints(1)?, call.ints(2)?];
    if lists.iter().any(|l| l.len() != dims.len()) {
        return Err(call.error(format_args!(
            "needs one start, stop and step for each of {} axes",
            dims.len()
        )));
    }
    let [starts, stops, steps] = lists;
    let axes = dims.iter().zip(starts).zip(stops).zip(steps);
    axes.map(|(((&n, &start), &stop), &step)| {
        let (first, count) =
            slice_of_axis(n, start, stop, step).ok_or_else(|| call.error("a step cannot be 0"))?;
        // A step that is never taken may be as long as it likes.
        Ok((first, if count > 1 { step } else { 1 }, count))
    })
    .collect()
}

/// Inputs 0 and 1, which must have one plain dtype.
fn alike<'a>(call: &Call<'a>) -> Result<(&'a TensorSpec, &'a TensorSpec), GraphError> {
    let (x, update) = (plain(call, 0)?, plain(call, 1)?);
    match x.dtype == update.dtype {
        true => Ok((x, update)),
        false => Err(call.error(format_args!(
            "update must be {} as x, not {}; cast it first",
            x.dtype, update.dtype
        ))),
    }
}

fn update_spec(call: &Call<'_>) -> Specs {
    let (x, update) = alike(call)?;
    let dims = fixed(call, &x.shape, "updated in part")?;
    let slices = sliced(call, &dims)?;
    let part: Vec<usize> = slices.iter().map(|s| s.2).collect();
    let part = Shape::fixed(&part).map_err(|e| call.error(e))?;
    if update.shape.broadcast(&part).ok().as_ref() != Some(&part) {
        return Err(call.error(format_args!(
            "update {} does not broadcast to the slice {part}",
            update.shape
        )));
    }
    Ok(vec![x.clone()])
}

/// `body` on what scatters take: c64, of which they have none, as the integers that its bits are.
fn in_bits(
    graph: &mut GraphBuilder,
    x: Value,
    update: Value,
    body: impl FnOnce(&mut GraphBuilder, Value, Value) -> Result<Value, GraphError>,
) -> Values {
    if spec_of(graph, x)?.dtype != DType::C64 {
        return Ok(vec![body(graph, x, update)?]);
    }
    let x = graph.bitcast(x, DType::U64)?;
    let update = graph.bitcast(update, DType::U64)?;
    let updated = body(graph, x, update)?;
    Ok(vec![graph.bitcast(updated, DType::C64)?])
}

fn update_of_parts(graph: &mut GraphBuilder, inputs: &[Value], attributes: &[Attribute]) -> Values {
    let parts = Parts::of(&slice_update, graph, inputs, attributes)?;
    let call = parts.call();
    let shape = call.tensor(0)?.shape.clone();
    let dims = fixed(&call, &shape, "updated in part")?;
    let slices = sliced(&call, &dims)?;
    let part: Vec<usize> = slices.iter().map(|s| s.2).collect();
    let (count, elements) = (part.iter().product(), dims.iter().product());
    let update = graph.broadcast_to(inputs[1], Shape::fixed(&part)?)?;
    let (mut strides, mut offset, mut stride) = (vec![0; dims.len()], 0i64, 1i64);
    for (i, (&n, &(first, step, _))) in dims.iter().zip(&slices).enumerate().rev() {
        strides[i] = step.saturating_mul(stride);
        offset = offset.saturating_add((first as i64).saturating_mul(stride));
        stride = stride.saturating_mul(n as i64);
    }
    if count == 0 {
        return Ok(vec![graph.reshape(inputs[0], shape)?]);
    }
    let at = flat_places(graph, &part, &strides, offset)?;
    in_bits(graph, inputs[0], update, |g, x, update| {
        let flat = g.reshape(x, Shape::fixed(&[elements])?)?;
        let update = g.reshape(update, Shape::fixed(&[count])?)?;
        let at = reshape_to(g, at, Shape::fixed(&[count])?)?;
        let updated = g.scatter_along_axis(flat, at, update, 0, "set")?;
        g.reshape(updated, shape)
    })
}

/// Checks that a window of these sizes can lie within `x`, and that `starts` has one place per axis.
fn window_of(
    call: &Call<'_>,
    x: &TensorSpec,
    sizes: &[usize],
    starts: usize,
) -> Result<(), GraphError> {
    let dims = fixed(call, &x.shape, "cut by a window")?;
    let starts = integers(call, starts)?;
    if starts.shape.dims() != [Dim::Fixed(dims.len())] {
        return Err(call.error(format_args!(
            "starts must be [{}], a place for each axis of x {}, not {}",
            dims.len(),
            x.shape,
            starts.shape
        )));
    }
    let fits = sizes.len() == dims.len() && sizes.iter().zip(&dims).all(|(s, d)| s <= d);
    match fits {
        true => Ok(()),
        false => Err(call.error(format_args!(
            "a window of {:?} does not lie within {}",
            sizes.get(..16).unwrap_or(sizes),
            dims_text(x.shape.dims())
        ))),
    }
}

fn sizes_of(call: &Call<'_>) -> Result<Vec<usize>, GraphError> {
    let sizes = call.ints(0)?.iter();
    sizes.map(|&n| crate::op::rules::size(call, n)).collect()
}

fn window_spec(call: &Call<'_>) -> Specs {
    let (x, sizes) = (plain(call, 0)?, sizes_of(call)?);
    window_of(call, x, &sizes, 1)?;
    one(call, x.dtype, sizes.into_iter().map(Dim::Fixed))
}

/// Places of the window along axis `axis`, i64 `[size]`: a start that is out of range stays so, whichever way.
fn window_places(
    graph: &mut GraphBuilder,
    starts: Value,
    (axis, n, size): (usize, usize, usize),
) -> Result<Value, GraphError> {
    let start = cut(graph, starts, 0, (axis, axis + 1))?;
    let end = scalar(graph, n as f64, DType::I64)?;
    let dtype = spec_of(graph, starts)?.dtype;
    let start = if dtype == DType::U64 {
        // What i64 does not hold is beyond every axis.
        let most = scalar(graph, n as f64, DType::U64)?;
        let start = graph.minimum(start, most)?;
        cast_to(graph, start, DType::I64)?
    } else {
        let start = cast_to(graph, start, DType::I64)?;
        let zero = scalar(graph, 0.0, DType::I64)?;
        let lowest = scalar(graph, -(n as f64) - 1.0, DType::I64)?;
        let start = graph.maximum(start, lowest)?;
        let start = graph.minimum(start, end)?;
        let negative = graph.less(start, zero)?;
        let turned = graph.add(start, end)?;
        let start = graph.where_(negative, turned, start)?;
        // Further below than the first: beyond the end, so that no element of the window is taken for a negative place.
        let below = graph.less(start, zero)?;
        graph.where_(below, end, start)?
    };
    let along = places(graph, (0, 1), size, 0, 1)?;
    graph.add(start, along)
}

fn window_of_parts(graph: &mut GraphBuilder, inputs: &[Value], attributes: &[Attribute]) -> Values {
    let parts = Parts::of(&slice_dynamic, graph, inputs, attributes)?;
    let call = parts.call();
    let (dims, sizes) = (
        fixed(&call, &call.tensor(0)?.shape, "cut by a window")?,
        sizes_of(&call)?,
    );
    let (&[mut x, starts], shape) = (inputs, Shape::fixed(&sizes)?) else {
        return Err(GraphError::NoResult);
    };
    for (axis, (&n, &size)) in dims.iter().zip(&sizes).enumerate() {
        let at = window_places(graph, starts, (axis, n, size))?;
        x = graph.take(x, at, axis as i64)?;
    }
    if x == inputs[0] {
        return Ok(vec![graph.reshape(x, shape)?]);
    }
    Ok(vec![x])
}

fn update_window_spec(call: &Call<'_>) -> Specs {
    let (x, update) = alike(call)?;
    let sizes = fixed(call, &update.shape, "a window")?;
    window_of(call, x, &sizes, 2)?;
    if x.shape.rank() == 0 {
        return Err(call.error("x must have an axis"));
    }
    Ok(vec![x.clone()])
}

fn update_window_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let parts = Parts::of(&slice_update_dynamic, graph, inputs, attributes)?;
    let call = parts.call();
    let dims = fixed(&call, &call.tensor(0)?.shape, "updated in part")?;
    let sizes = fixed(&call, &call.tensor(1)?.shape, "a window")?;
    let &[x, update, starts] = inputs else {
        return Err(GraphError::NoResult);
    };
    let whole = Shape::fixed(&[&sizes[..], &[1]].concat())?;
    let mut vectors = Vec::new();
    for (axis, (&n, &size)) in dims.iter().zip(&sizes).enumerate() {
        let at = window_places(graph, starts, (axis, n, size))?;
        let along = (0..=dims.len()).map(|i| Dim::Fixed(if i == axis { size } else { 1 }));
        let at = shaped(graph, at, along)?;
        vectors.push(graph.broadcast_to(at, whole.clone())?);
    }
    let at = graph.concat(&vectors, -1)?;
    in_bits(graph, x, update, |g, x, update| {
        g.scatter_nd(x, at, update, "set")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::fit::testing::{decomposes, int, ints, shape, table};

    #[test]
    fn parts_have_the_specs_and_read_where_the_row_says() {
        for dtype in ["bool", "i8", "bf16", "c64"] {
            let of = |dims: &str| format!("{dtype}[{dims}]");
            decomposes(&tril, &[&of("rows, 3, 4")], &[int(-1)]);
            decomposes(&triu, &[&of("0, 4")], &[int(9)]);
            decomposes(&diag, &[&of("rows, 3")], &[int(-2)]);
            decomposes(&diagonal, &[&of("rows, 3, 4")], &[int(1), int(2), int(1)]);
            decomposes(&roll, &[&of("rows, 4")], &[int(-5), int(1)]);
            decomposes(&roll, &[&of("0, 4")], &[int(1), int(0)]);
            let strided = [shape(&[2, 3]), ints(&[-1, 1]), int(3)];
            decomposes(&as_strided, &[&of("2, 3")], &strided);
            let cut = [ints(&[0, -1]), ints(&[9, i64::MIN]), ints(&[2, -1])];
            decomposes(&slice_update, &[&of("3, 4"), &of("4")], &cut);
            let window = [ints(&[2, 0])];
            decomposes(&slice_dynamic, &[&of("3, 4"), "u64[2]"], &window);
            let inputs = [&*of("3, 4"), &of("2, 4"), "i8[2]"];
            decomposes(&slice_update_dynamic, &inputs, &[]);
        }
    }

    #[test]
    fn what_lies_outside_is_refused() {
        let strided =
            |dims: &[usize], strides: &[i64], offset| [shape(dims), ints(strides), int(offset)];
        table(
            &as_strided,
            &[
                (&["f32[2, 3]"], &strided(&[6], &[1], 0), "f32[6]"),
                (&["f32[2, 3]"], &strided(&[6], &[1], 1), "!places 1 to 6"),
                (&["f32[2, 3]"], &strided(&[2], &[-1], 0), "!places -1 to 0"),
                (&["f32[2, 3]"], &strided(&[0], &[99], 99), "f32[0]"),
                (&["f32[rows, 3]"], &strided(&[1], &[1], 0), "!row dimension"),
            ],
        );
        table(
            &slice_dynamic,
            &[
                (&["f32[2, 3]", "i32[2]"], &[ints(&[2, 1])], "f32[2, 1]"),
                (&["f32[2, 3]", "i32[2]"], &[ints(&[3, 1])], "!lie within"),
                (&["f32[2, 3]", "i32[1]"], &[ints(&[2, 1])], "!each axis"),
                (&["f32[2, 3]", "f32[2]"], &[ints(&[2, 1])], "!integer"),
            ],
        );
    }
}

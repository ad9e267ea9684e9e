//! Ops that move elements or change the shape and compute nothing.

use crate::{
    dtype::DType,
    graph::{GraphBuilder, GraphError, Value},
    op::{
        Attribute, Call, Effect, OpRow, ops,
        rules::{self, Specs, Values},
    },
    shape::{Dim, Shape, TensorSpec},
};

ops! {
    /// The same elements in row-major order under another shape with as many elements.
    reshape(x; shape: Shape) -> one { shapes: "shape", dtypes: "any", effect: Effect::None, infer: reshape_spec, decompose: None }

    /// The bytes of `x`, little-endian, read as another dtype (MLX's `view`): the last axis has as many times more or fewer
    /// elements as they are narrower or wider.
    bitcast(x; dtype: DType) -> one { shapes: "x, the last axis by the ratio of the widths", dtypes: "all but block types → dtype, any but bool and block types", effect: Effect::None, infer: bitcast_spec, decompose: None }

    /// Axis `i` of the result is axis `axes[i]` of `x`; no axes reverse them all (NumPy's `transpose`).
    transpose(x; axes: Ints(-8, 7)) -> one { shapes: "x permuted; the row dimension stays first", dtypes: "all but block types", effect: Effect::None, infer: transpose_spec, decompose: None }

    /// `x` repeated to this shape as NumPy broadcasts.
    broadcast_to(x; shape: Shape) -> one { shapes: "shape", dtypes: "all but block types", effect: Effect::None, infer: broadcast_spec, decompose: None }

    /// `x[starts : stops : steps]` with one of each per axis (NumPy's slices): negative places count from the end, those
    /// outside are clipped, and a negative step goes backwards, for which a stop of the least integer is in front of
    /// everything.
    slice(x; starts: Ints(i64::MIN, i64::MAX), stops: Ints(i64::MIN, i64::MAX), steps: Ints(i64::MIN, i64::MAX)) -> one
    { shapes: "x with fewer along each axis; of the row dimension 0 up to the greatest integer by 1", dtypes: "all but block types", effect: Effect::None, infer: slice_spec, decompose: None }

    /// `low` more elements in front of and `high` after each axis (NumPy's `pad`): `value` (absent: 0), the `edge`'s, those
    /// that a mirror at the edge shows (`reflect`, without the edge itself), or those of the other end (`wrap`).
    pad(x, value = optional; low: Ints(0, 1 << 40), high: Ints(0, 1 << 40), mode: Name(&["constant", "edge", "reflect", "wrap"])) -> one
    { shapes: "low + x + high; the row dimension by 0", dtypes: "all but block types; value [] of the dtype of x", effect: Effect::None, infer: pad_spec, decompose: None }

    /// Axes of size 1, which the result's `axes` then are.
    expand_dims(x; axes: Ints(-8, 7)) -> one { shapes: "x with 1 at axes; not in front of the row dimension", dtypes: "any", effect: Effect::None, infer: expand_spec, decompose: Some(|g, x, a| reshaped_as(g, &expand_dims, x, a)) }

    /// `x` without `axes`, all of size 1; with none named, without all of size 1.
    squeeze(x; axes: Ints(-8, 7)) -> one { shapes: "x without axes", dtypes: "any", effect: Effect::None, infer: squeeze_spec, decompose: Some(|g, x, a| reshaped_as(g, &squeeze, x, a)) }

    /// Axes `start` to `end`, both included, as one (PyTorch's `flatten`); a scalar becomes `[1]`.
    flatten(x; start: Int(-8, 7), end: Int(-8, 7)) -> one { shapes: "x with the product of the axes", dtypes: "any", effect: Effect::None, infer: flatten_spec, decompose: Some(|g, x, a| reshaped_as(g, &flatten, x, a)) }

    /// `x` as a whole `repeats` times along each axis, counted from the last (NumPy's `tile`).
    tile(x; repeats: Ints(0, 1 << 40)) -> one { shapes: "repeats · x; the row dimension by 1", dtypes: "all but block types", effect: Effect::None, infer: tile_spec, decompose: Some(tile_of_parts) }

    /// Each element `repeats` times in a row along `axis` (NumPy's `repeat`).
    repeat(x; repeats: Int(0, 1 << 40), axis: Int(-8, 7)) -> one { shapes: "x with repeats · axis", dtypes: "all but block types", effect: Effect::None, infer: repeat_spec, decompose: Some(repeat_of_parts) }

    /// `x` backwards along `axes` (none named: all).
    flip(x; axes: Ints(-8, 7)) -> one { shapes: "x", dtypes: "all but block types", effect: Effect::None, infer: flip_spec, decompose: Some(flip_of_parts) }
}

fn reshape_spec(call: &Call<'_>) -> Specs {
    let (x, shape) = (call.tensor(0)?, call.shape(0)?);
    // Equal for one and for two rows means equal for all: both sides are linear in the rows.
    let equal = [1, 2]
        .iter()
        .all(|&r| x.shape.elements(r) == shape.elements(r));
    if !equal || x.shape.is_symbolic() != shape.is_symbolic() {
        return Err(call.error(format_args!("{} cannot become {shape}", x.shape)));
    }
    rules::one_of(call, x.dtype, shape.clone())
}

fn bitcast_spec(call: &Call<'_>) -> Specs {
    let (x, to) = (rules::plain(call, 0)?, call.dtype(0)?);
    if to.is_block() || to == DType::Bool {
        return Err(call.error(format_args!("bits cannot be read as {to}")));
    }
    let (from, into) = (x.dtype.block_bytes(), to.block_bytes());
    let mut dims = x.shape.dims().to_vec();
    if from != into {
        let fits = || {
            call.error(format_args!(
                "{x} has no last axis whose bytes are whole elements of {to}"
            ))
        };
        let last = dims.last_mut().ok_or_else(fits)?;
        let bytes = rules::size_of(call, *last, "read as another dtype")?.checked_mul(from);
        let bytes = bytes.filter(|n| n.is_multiple_of(into)).ok_or_else(fits)?;
        *last = Dim::Fixed(bytes / into);
    }
    rules::one(call, to, dims)
}

/// One result of these axes, whose first alone may be the row dimension.
fn moved(call: &Call<'_>, dtype: DType, dims: Vec<Dim>) -> Specs {
    if dims.iter().skip(1).any(|d| *d == Dim::Rows) {
        return Err(rules::row_error(call, "moved"));
    }
    rules::one(call, dtype, dims)
}

fn transpose_spec(call: &Call<'_>) -> Specs {
    let (x, axes) = (rules::plain(call, 0)?, call.ints(0)?);
    let dims = x.shape.dims();
    let order = permutation(axes, dims.len()).ok_or_else(|| {
        let shown = &axes[..axes.len().min(16)];
        call.error(format_args!(
            "{shown:?} must name each axis of {} once",
            x.shape
        ))
    })?;
    let dims = order.iter().filter_map(|&a| dims.get(a).copied());
    moved(call, x.dtype, dims.collect())
}

/// Which axis of the operand each axis of a transposed result is; `None` if `axes` are no order of `rank` axes.
pub fn permutation(axes: &[i64], rank: usize) -> Option<Vec<usize>> {
    if axes.is_empty() {
        return Some((0..rank).rev().collect());
    }
    // Each is there and none twice: as many as there are.
    if axes.len() != rank || rules::normal_axes(axes, rank).is_none() {
        return None;
    }
    axes.iter().map(|&a| rules::normal_axis(a, rank)).collect()
}

fn broadcast_spec(call: &Call<'_>) -> Specs {
    let (x, shape) = (rules::plain(call, 0)?, call.shape(0)?);
    if x.shape.broadcast(shape).ok().as_ref() != Some(shape) {
        return Err(call.error(format_args!("{} does not broadcast to {shape}", x.shape)));
    }
    rules::one_of(call, x.dtype, shape.clone())
}

/// Where a slice of an axis of `n` begins and how many elements it has (NumPy's rules); `None` for a step of 0.
/// A slice without elements begins at 0.
pub fn slice_of_axis(n: usize, start: i64, stop: i64, step: i64) -> Option<(usize, usize)> {
    let (size, step) = (i128::try_from(n).ok()?, i128::from(step));
    if step == 0 {
        return None;
    }
    // The first and last place that a bound can be clipped to.
    let (first, last) = if step > 0 { (0, size) } else { (-1, size - 1) };
    let place = |bound: i64| {
        let bound = i128::from(bound);
        let bound = if bound < 0 { bound + size } else { bound };
        bound.clamp(first, last)
    };
    let (start, stop) = (place(start), place(stop));
    let reach = if step > 0 { stop - start } else { start - stop };
    if reach <= 0 {
        return Some((0, 0));
    }
    let steps = (reach - 1) / step.abs() + 1;
    Some((usize::try_from(start).ok()?, usize::try_from(steps).ok()?))
}

/// Attribute `i`, one for each of `rank` axes.
fn per_axis<'a>(call: &Call<'a>, i: usize, rank: usize) -> Result<&'a [i64], GraphError> {
    let list = call.ints(i)?;
    if list.len() != rank {
        return Err(call.error(format_args!(
            "there must be one of each for each of {rank} axes, not {}",
            list.len()
        )));
    }
    Ok(list)
}

fn slice_spec(call: &Call<'_>) -> Specs {
    let x = rules::plain(call, 0)?;
    let rank = x.shape.rank();
    let (starts, stops, steps) = (
        per_axis(call, 0, rank)?,
        per_axis(call, 1, rank)?,
        per_axis(call, 2, rank)?,
    );
    let bounds = starts.iter().zip(stops).zip(steps);
    let dims = x.shape.dims().iter().zip(bounds);
    let dims = dims.map(|(dim, ((&start, &stop), &step))| match *dim {
        Dim::Rows if (start, stop, step) == (0, i64::MAX, 1) => Ok(Dim::Rows),
        Dim::Rows => Err(rules::row_error(call, "sliced")),
        Dim::Fixed(n) => slice_of_axis(n, start, stop, step)
            .map(|(_, count)| Dim::Fixed(count))
            .ok_or_else(|| call.error("a step cannot be 0")),
    });
    rules::one(call, x.dtype, dims.collect::<Result<Vec<_>, _>>()?)
}

fn pad_spec(call: &Call<'_>) -> Specs {
    let x = rules::plain(call, 0)?;
    let rank = x.shape.rank();
    let (low, high) = (per_axis(call, 0, rank)?, per_axis(call, 1, rank)?);
    let constant = call.name(2)? == "constant";
    if let Some(value) = call.optional(1)? {
        if !constant {
            return Err(call.error("value is for mode constant alone"));
        }
        if value.dtype != x.dtype || value.shape.rank() != 0 {
            return Err(call.error(format_args!("value must be {}[], not {value}", x.dtype)));
        }
    }
    let dims = x.shape.dims().iter().zip(low.iter().zip(high));
    let dims = dims.map(|(dim, (&low, &high))| match *dim {
        dim if (low, high) == (0, 0) => Ok(dim),
        Dim::Rows => Err(rules::row_error(call, "padded")),
        Dim::Fixed(0) if !constant => {
            Err(call.error("an axis of 0 has no elements to pad with; use mode constant"))
        }
        Dim::Fixed(n) => {
            let more = rules::size(call, low)?.checked_add(rules::size(call, high)?);
            let padded = more.and_then(|m| m.checked_add(n));
            padded
                .map(Dim::Fixed)
                .ok_or_else(|| call.error("its result is too large"))
        }
    });
    rules::one(call, x.dtype, dims.collect::<Result<Vec<_>, _>>()?)
}

fn expand_spec(call: &Call<'_>) -> Specs {
    let (x, axes) = (call.tensor(0)?, call.ints(0)?);
    if axes.is_empty() {
        return Ok(vec![x.clone()]);
    }
    let rank = x.shape.rank().saturating_add(axes.len());
    let axes = rules::axes_of(call, axes, rank)?;
    let mut old = x.shape.dims().iter().copied();
    let dims = (0..rank).filter_map(|i| match axes.contains(&i) {
        true => Some(Dim::Fixed(1)),
        false => old.next(),
    });
    moved(call, x.dtype, dims.collect())
}

fn squeeze_spec(call: &Call<'_>) -> Specs {
    let (x, axes) = (call.tensor(0)?, call.ints(0)?);
    let dims = x.shape.dims();
    let gone = if axes.is_empty() {
        let all = dims.iter().enumerate();
        all.filter(|(_, d)| **d == Dim::Fixed(1))
            .map(|(i, _)| i)
            .collect()
    } else {
        rules::axes_of(call, axes, dims.len())?
    };
    if gone.iter().any(|&a| dims.get(a) != Some(&Dim::Fixed(1))) {
        return Err(call.error(format_args!(
            "axes {gone:?} of {} must be of size 1",
            x.shape
        )));
    }
    let left = dims.iter().enumerate().filter(|(i, _)| !gone.contains(i));
    rules::one(call, x.dtype, left.map(|(_, d)| *d))
}

fn flatten_spec(call: &Call<'_>) -> Specs {
    let x = call.tensor(0)?;
    let dims = x.shape.dims();
    let rank = dims.len().max(1);
    let start = rules::axis_of(call, call.int(0)?, rank)?;
    let end = rules::axis_of(call, call.int(1)?, rank)?;
    if start > end {
        return Err(call.error(format_args!("axis {start} is not before axis {end}")));
    }
    let (before, rest) = dims.split_at(start.min(dims.len()));
    let (among, after) = rest.split_at((end - start + 1).min(rest.len()));
    let one = match *among {
        [Dim::Rows] => Dim::Rows,
        _ => {
            let sizes = among
                .iter()
                .map(|d| rules::size_of(call, *d, "merged with another axis"));
            let sizes = sizes.collect::<Result<Vec<_>, _>>()?;
            // No overflow: a shape's axes are small even where one of them is 0.
            Dim::Fixed(sizes.iter().fold(1usize, |n, m| n.saturating_mul(*m)))
        }
    };
    let dims = before
        .iter()
        .copied()
        .chain([one])
        .chain(after.iter().copied());
    rules::one(call, x.dtype, dims)
}

fn tile_spec(call: &Call<'_>) -> Specs {
    let (x, repeats) = (rules::plain(call, 0)?, call.ints(0)?);
    let dims = x.shape.dims();
    let rank = dims.len().max(repeats.len());
    if x.shape.is_symbolic() && rank > dims.len() {
        return Err(rules::row_error(call, "moved"));
    }
    let tiled = (0..rank).map(|i| {
        let dim = (i + dims.len()).checked_sub(rank).and_then(|j| dims.get(j));
        let times = (i + repeats.len())
            .checked_sub(rank)
            .and_then(|j| repeats.get(j));
        let (dim, times) = (
            dim.copied().unwrap_or(Dim::Fixed(1)),
            times.copied().unwrap_or(1),
        );
        repeated(call, dim, times)
    });
    rules::one(call, x.dtype, tiled.collect::<Result<Vec<_>, _>>()?)
}

/// An axis `times` over.
fn repeated(call: &Call<'_>, dim: Dim, times: i64) -> Result<Dim, GraphError> {
    match dim {
        dim if times == 1 => Ok(dim),
        Dim::Rows => Err(rules::row_error(call, "repeated")),
        Dim::Fixed(n) => rules::size(call, times)?
            .checked_mul(n)
            .map(Dim::Fixed)
            .ok_or_else(|| call.error("its result is too large")),
    }
}

fn repeat_spec(call: &Call<'_>) -> Specs {
    let x = rules::plain(call, 0)?;
    let axis = rules::axis_of(call, call.int(1)?, x.shape.rank())?;
    let times = call.int(0)?;
    let dims = x.shape.dims().iter().enumerate();
    let dims = dims.map(|(i, d)| match i == axis {
        true => repeated(call, *d, times),
        false => Ok(*d),
    });
    rules::one(call, x.dtype, dims.collect::<Result<Vec<_>, _>>()?)
}

fn flip_spec(call: &Call<'_>) -> Specs {
    let x = rules::plain(call, 0)?;
    let axes = rules::axes_of(call, call.ints(0)?, x.shape.rank())?;
    if x.shape.is_symbolic() && axes.contains(&0) {
        return Err(rules::row_error(call, "turned"));
    }
    Ok(vec![x.clone()])
}

/// The spec that `row` gives for these inputs: composites need its shape.
fn result_of(
    graph: &GraphBuilder,
    row: &'static OpRow,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Result<TensorSpec, GraphError> {
    let specs = inputs.iter().map(|&v| graph.spec(v));
    let specs = specs.collect::<Result<Vec<_>, _>>()?;
    let mut results = row.check(&specs, attributes)?;
    results.pop().ok_or(GraphError::NoResult)
}

/// A reshape to what the row's rule says.
fn reshaped_as(
    graph: &mut GraphBuilder,
    row: &'static OpRow,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let &[x] = inputs else {
        return Err(GraphError::NoResult);
    };
    let shape = result_of(graph, row, inputs, attributes)?.shape;
    Ok(vec![rules::reshape_to(graph, x, shape)?])
}

/// `times` copies of all that lies within `axis` and inwards, or, `each`, of what lies inwards of it, as a reshape, a
/// broadcast and a reshape of at most four axes.
fn copies(
    graph: &mut GraphBuilder,
    x: Value,
    axis: usize,
    times: usize,
    each: bool,
) -> Result<Value, GraphError> {
    let shape = rules::spec_of(graph, x)?.shape;
    let symbolic = usize::from(shape.is_symbolic());
    let split = if each { axis + 1 } else { axis }.max(symbolic);
    let dims = shape.dims();
    // Products cannot overflow: those of all axes of a shape are small.
    let product = |dims: &[Dim]| dims.iter().map(|d| d.at(1)).product::<usize>();
    let (outer, inner) = dims.split_at(split.min(dims.len()));
    let (rows, outer) = outer.split_at(symbolic.min(outer.len()));
    let (outer, inner) = (Dim::Fixed(product(outer)), Dim::Fixed(product(inner)));
    let wide = |times: usize| {
        let inward = [outer, Dim::Fixed(times), inner];
        Shape::new(rows.iter().copied().chain(inward))
    };
    let mut result = dims.to_vec();
    if let Some(Dim::Fixed(n)) = result.get_mut(axis) {
        *n = n.saturating_mul(times);
    }
    if result == dims {
        return Ok(x);
    }
    let x = rules::reshape_to(graph, x, wide(1)?)?;
    let x = graph.broadcast_to(x, wide(times)?)?;
    rules::reshape_to(graph, x, Shape::new(result)?)
}

fn tile_of_parts(graph: &mut GraphBuilder, inputs: &[Value], attributes: &[Attribute]) -> Values {
    let (&[x], [Attribute::Ints(repeats)]) = (inputs, attributes) else {
        return Err(GraphError::NoResult);
    };
    let shape = rules::spec_of(graph, x)?.shape;
    let missing = repeats.len().saturating_sub(shape.rank());
    let mut x = x;
    if missing > 0 {
        let ones = std::iter::repeat_n(Dim::Fixed(1), missing);
        let wider = Shape::new(ones.chain(shape.dims().iter().copied()))?;
        x = graph.reshape(x, wider)?;
    }
    let first = rules::spec_of(graph, x)?
        .shape
        .rank()
        .saturating_sub(repeats.len());
    let mut order: Vec<(usize, usize)> = Vec::new();
    for (i, &times) in repeats.iter().enumerate() {
        order.push((first + i, usize::try_from(times).unwrap_or(0)));
    }
    // Nothing first: what is left is nothing, however often it is repeated.
    order.sort_by_key(|(_, times)| *times);
    for (axis, times) in order.into_iter().filter(|(_, times)| *times != 1) {
        x = copies(graph, x, axis, times, false)?;
    }
    Ok(vec![x])
}

fn repeat_of_parts(graph: &mut GraphBuilder, inputs: &[Value], attributes: &[Attribute]) -> Values {
    let (&[x], &[Attribute::Int(times), Attribute::Int(axis)]) = (inputs, attributes) else {
        return Err(GraphError::NoResult);
    };
    let rank = rules::spec_of(graph, x)?.shape.rank();
    let axis = rules::normal_axis(axis, rank).ok_or(GraphError::NoResult)?;
    let times = usize::try_from(times).unwrap_or(0);
    Ok(vec![match times {
        1 => x,
        _ => copies(graph, x, axis, times, true)?,
    }])
}

fn flip_of_parts(graph: &mut GraphBuilder, inputs: &[Value], attributes: &[Attribute]) -> Values {
    let (&[x], [Attribute::Ints(axes)]) = (inputs, attributes) else {
        return Err(GraphError::NoResult);
    };
    let rank = rules::spec_of(graph, x)?.shape.rank();
    let axes = rules::normal_axes(axes, rank).ok_or(GraphError::NoResult)?;
    let (mut starts, mut stops, mut steps) = (vec![0; rank], vec![i64::MAX; rank], vec![1; rank]);
    for axis in axes {
        for (list, value) in [
            (&mut starts, i64::MAX),
            (&mut stops, i64::MIN),
            (&mut steps, -1),
        ] {
            if let Some(place) = list.get_mut(axis) {
                *place = value;
            }
        }
    }
    Ok(vec![graph.slice(x, &starts, &stops, &steps)?])
}

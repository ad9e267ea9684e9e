//! Reductions and running sums. `f16` and `bf16` accumulate in `f32` and round once.

use crate::{
    dtype::{DType, Kind},
    graph::{GraphBuilder, GraphError, Value},
    op::{
        Attribute, Call, Effect, ops,
        place::cut,
        rules::{self, Specs, Values},
    },
    shape::{Dim, Shape, TensorSpec},
};

ops! {
    /// The sum over `axes` (none named: all); 0 of nothing. Integers wrap.
    reduce_sum(x; axes: Ints(-8, 7), keep_dims: Bool) -> one
    { shapes: "x without axes, or 1 there", dtypes: "bool, i8, i16: i32; u8, u16: u32; other plain: x", effect: Effect::None, infer: sum_spec, decompose: None }

    /// The product over `axes` (none named: all); 1 of nothing. Integers wrap.
    reduce_prod(x; axes: Ints(-8, 7), keep_dims: Bool) -> one
    { shapes: "x without axes, or 1 there", dtypes: "bool, i8, i16: i32; u8, u16: u32; other plain: x", effect: Effect::None, infer: sum_spec, decompose: None }

    /// The greatest over `axes` (none named: all), NaN if one is; of nothing it is an error. −0 is less than +0 (on MLX's own
    /// kernels either may come).
    reduce_max(x; axes: Ints(-8, 7), keep_dims: Bool) -> one
    { shapes: "x without axes, or 1 there", dtypes: "all but c64 and block types: x", effect: Effect::None, infer: max_spec, decompose: None }

    /// The least over `axes` (none named: all), NaN if one is; of nothing it is an error. −0 is less than +0 (on MLX's own
    /// kernels either may come).
    reduce_min(x; axes: Ints(-8, 7), keep_dims: Bool) -> one
    { shapes: "x without axes, or 1 there", dtypes: "all but c64 and block types: x", effect: Effect::None, infer: max_spec, decompose: None }

    /// Whether none over `axes` (none named: all) is 0; true of nothing.
    reduce_all(x; axes: Ints(-8, 7), keep_dims: Bool) -> one
    { shapes: "x without axes, or 1 there", dtypes: "all but c64 and block types → bool", effect: Effect::None, infer: all_spec, decompose: None }

    /// Whether one over `axes` (none named: all) is not 0; false of nothing.
    reduce_any(x; axes: Ints(-8, 7), keep_dims: Bool) -> one
    { shapes: "x without axes, or 1 there", dtypes: "all but c64 and block types → bool", effect: Effect::None, infer: all_spec, decompose: None }

    /// Where along `axis` the greatest is, the first of equal ones; NaN is greater than all. Of nothing it is an error.
    argmax(x; axis: Int(-8, 7), keep_dims: Bool) -> one
    { shapes: "x without axis, or 1 there", dtypes: "all but c64 and block types → u32", effect: Effect::None, infer: arg_spec, decompose: None }

    /// Where along `axis` the least is, the first of equal ones; NaN is less than all. Of nothing it is an error.
    argmin(x; axis: Int(-8, 7), keep_dims: Bool) -> one
    { shapes: "x without axis, or 1 there", dtypes: "all but c64 and block types → u32", effect: Effect::None, infer: arg_spec, decompose: None }

    /// The mean over `axes` (none named: all); NaN of nothing.
    mean(x; axes: Ints(-8, 7), keep_dims: Bool) -> one
    { shapes: "x without axes, or 1 there", dtypes: "floats, c64: x; integers, bool: f32", effect: Effect::None, infer: mean_spec, decompose: Some(mean_of_parts) }

    /// `Σ(x − mean)² / (n − ddof)` over `axes` (none named: all) (NumPy's `var`).
    variance(x; axes: Ints(-8, 7), keep_dims: Bool, ddof: Int(0, 1 << 30)) -> one
    { shapes: "x without axes, or 1 there", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float_spec, decompose: Some(variance_of_parts) }

    /// The square root of `variance` (NumPy's `std`).
    standard_deviation(x; axes: Ints(-8, 7), keep_dims: Bool, ddof: Int(0, 1 << 30)) -> one
    { shapes: "x without axes, or 1 there", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float_spec, decompose: Some(deviation_of_parts) }

    /// `ln Σ eˣ` over `axes` (none named: all) without overflow; −∞ of axes of size 0.
    logsumexp(x; axes: Ints(-8, 7), keep_dims: Bool) -> one
    { shapes: "x without axes, or 1 there", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float_spec, decompose: Some(logsumexp_of_parts) }

    /// Sums of `x` along `axis` up to each element, or from it on if `reverse`; without itself if `exclusive`. Integers wrap.
    cumsum(x; axis: Int(-8, 7), exclusive: Bool, reverse: Bool) -> one
    { shapes: "x", dtypes: "integers, floats: x", effect: Effect::None, infer: running_spec, decompose: None }

    /// Products of `x` along `axis` up to each element, or from it on if `reverse`; without itself if `exclusive`. Integers
    /// wrap.
    cumprod(x; axis: Int(-8, 7), exclusive: Bool, reverse: Bool) -> one
    { shapes: "x", dtypes: "integers, floats: x", effect: Effect::None, infer: running_spec, decompose: None }

    /// The greatest of `x` along `axis` up to each element, or from it on if `reverse`; NaN from the first one on.
    cummax(x; axis: Int(-8, 7), reverse: Bool) -> one
    { shapes: "x; axis not the row dimension", dtypes: "integers, floats: x", effect: Effect::None, infer: doubling_spec, decompose: Some(cummax_of_parts) }

    /// The least of `x` along `axis` up to each element, or from it on if `reverse`; NaN from the first one on.
    cummin(x; axis: Int(-8, 7), reverse: Bool) -> one
    { shapes: "x; axis not the row dimension", dtypes: "integers, floats: x", effect: Effect::None, infer: doubling_spec, decompose: Some(cummin_of_parts) }

    /// `ln Σ eˣ` along `axis` up to each element, or from it on if `reverse`, without overflow.
    logcumsumexp(x; axis: Int(-8, 7), reverse: Bool) -> one
    { shapes: "x; axis not the row dimension", dtypes: "floats: x; integers: f32", effect: Effect::None, infer: logcumsumexp_spec, decompose: Some(logcumsumexp_of_parts) }
}

/// Whether there is certainly nothing to reduce.
fn of_nothing(shape: &Shape, axes: &[usize]) -> bool {
    axes.iter()
        .any(|a| shape.dims().get(*a) == Some(&Dim::Fixed(0)))
}

/// The axes left after a reduction.
fn left(shape: &Shape, axes: &[usize], keep: bool) -> Vec<Dim> {
    let dims = shape.dims().iter().enumerate();
    dims.filter_map(|(i, d)| match axes.contains(&i) {
        true => keep.then_some(Dim::Fixed(1)),
        false => Some(*d),
    })
    .collect()
}

/// The result of a reduction of `x` over the axes of attribute 0.
fn reduced(call: &Call<'_>, x: &TensorSpec, dtype: DType) -> Specs {
    let axes = rules::axes_of(call, call.ints(0)?, x.shape.rank())?;
    rules::one(call, dtype, left(&x.shape, &axes, call.bool(1)?))
}

/// The dtype that sums of this one have.
fn sum_dtype(dtype: DType) -> DType {
    match dtype {
        DType::Bool | DType::I8 | DType::I16 => DType::I32,
        DType::U8 | DType::U16 => DType::U32,
        other => other,
    }
}

fn sum_spec(call: &Call<'_>) -> Specs {
    let x = rules::plain(call, 0)?;
    reduced(call, x, sum_dtype(x.dtype))
}

fn max_spec(call: &Call<'_>) -> Specs {
    let x = rules::real(call, 0)?;
    let axes = rules::axes_of(call, call.ints(0)?, x.shape.rank())?;
    if of_nothing(&x.shape, &axes) {
        return Err(call.error(format_args!("{} has nothing along axes {axes:?}", x.shape)));
    }
    reduced(call, x, x.dtype)
}

fn all_spec(call: &Call<'_>) -> Specs {
    reduced(call, rules::real(call, 0)?, DType::Bool)
}

fn arg_spec(call: &Call<'_>) -> Specs {
    let x = rules::real(call, 0)?;
    let axis = rules::axis_of(call, call.int(0)?, x.shape.rank())?;
    if of_nothing(&x.shape, &[axis]) {
        return Err(call.error(format_args!("{} has nothing along axis {axis}", x.shape)));
    }
    let size = x.shape.dims().get(axis).map_or(0, |d| d.at(0));
    if u32::try_from(size).is_err() {
        return Err(call.error(format_args!(
            "axis {axis} of {} is too long for u32",
            x.shape
        )));
    }
    rules::one(call, DType::U32, left(&x.shape, &[axis], call.bool(1)?))
}

fn float_spec(call: &Call<'_>) -> Specs {
    let dtype = rules::promoted_float(call, 0)?;
    reduced(call, call.tensor(0)?, dtype)
}

fn mean_spec(call: &Call<'_>) -> Specs {
    match call.tensor(0)? {
        x if x.dtype == DType::C64 => reduced(call, x, x.dtype),
        _ => float_spec(call),
    }
}

fn running_spec(call: &Call<'_>) -> Specs {
    let x = rules::real(call, 0)?;
    if x.dtype.kind() == Kind::Bool {
        return Err(rules::dtype_error(call, x.dtype));
    }
    rules::axis_of(call, call.int(0)?, x.shape.rank())?;
    Ok(vec![x.clone()])
}

fn doubling_spec(call: &Call<'_>) -> Specs {
    let result = running_spec(call)?;
    let shape = &call.tensor(0)?.shape;
    let axis = rules::axis_of(call, call.int(0)?, shape.rank())?;
    match shape.dims().get(axis) {
        Some(dim) => rules::size_of(call, *dim, "run along").map(|_| result),
        None => Err(GraphError::NoResult),
    }
}

fn logcumsumexp_spec(call: &Call<'_>) -> Specs {
    doubling_spec(call)?;
    let dtype = rules::promoted_float(call, 0)?;
    rules::one_of(call, dtype, call.tensor(0)?.shape.clone())
}

/// Every element joined with all before it (after it, if `reverse`), by as many steps as the axis' length has bits: each joins
/// with what is twice as far away. The order is that of the length alone.
fn doubled(
    g: &mut GraphBuilder,
    x: Value,
    attributes: &[Attribute],
    join: fn(&mut GraphBuilder, Value, Value) -> Result<Value, GraphError>,
) -> Result<Value, GraphError> {
    let &[Attribute::Int(axis), Attribute::Bool(reverse)] = attributes else {
        return Err(GraphError::NoResult);
    };
    let shape = rules::spec_of(g, x)?.shape;
    let at = rules::normal_axis(axis, shape.rank()).ok_or(GraphError::NoResult)?;
    let n = shape.dims().get(at).map_or(0, |d| d.at(0));
    let (mut y, mut far) = (x, 1);
    while far < n {
        let (ends, tails) = match reverse {
            false => ((0, far), [(0, n - far), (far, n)]),
            true => ((n - far, n), [(far, n), (0, n - far)]),
        };
        let end = cut(g, y, at, ends)?;
        let (a, b) = (cut(g, y, at, tails[0])?, cut(g, y, at, tails[1])?);
        let joined = join(g, a, b)?;
        let parts = if reverse {
            [joined, end]
        } else {
            [end, joined]
        };
        y = g.concat(&parts, axis)?;
        far *= 2;
    }
    // A node of its own, where there was nothing to join.
    if far == 1 { g.reshape(y, shape) } else { Ok(y) }
}

fn cummax_of_parts(graph: &mut GraphBuilder, inputs: &[Value], attributes: &[Attribute]) -> Values {
    let x = *inputs.first().ok_or(GraphError::NoResult)?;
    Ok(vec![doubled(graph, x, attributes, GraphBuilder::maximum)?])
}

fn cummin_of_parts(graph: &mut GraphBuilder, inputs: &[Value], attributes: &[Attribute]) -> Values {
    let x = *inputs.first().ok_or(GraphError::NoResult)?;
    Ok(vec![doubled(graph, x, attributes, GraphBuilder::minimum)?])
}

fn logcumsumexp_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let own = match inputs {
        &[x] => rules::spec_of(graph, x)?.dtype,
        _ => return Err(GraphError::NoResult),
    };
    rules::rounded_once(graph, inputs, |g, inputs| match (inputs, attributes) {
        // Wider than it was: a device may do that by itself.
        (&[x], &[Attribute::Int(axis), Attribute::Bool(reverse)])
            if rules::spec_of(g, x)?.dtype != own =>
        {
            g.logcumsumexp(x, axis, reverse)
        }
        (&[x], _) => doubled(g, x, attributes, GraphBuilder::logaddexp),
        _ => Err(GraphError::NoResult),
    })
}

/// The operand and the attributes that the composites share.
fn parts<'a>(
    graph: &GraphBuilder,
    inputs: &[Value],
    attributes: &'a [Attribute],
) -> Result<(Value, TensorSpec, &'a [i64], bool), GraphError> {
    match (inputs, attributes) {
        (&[x], [Attribute::Ints(axes), Attribute::Bool(keep), ..]) => {
            Ok((x, rules::spec_of(graph, x)?, axes, *keep))
        }
        _ => Err(GraphError::NoResult),
    }
}

/// How many elements a reduction of this shape adds, less `ddof` but not less than 0, as a scalar of this dtype: a
/// constant, or counted where rows are among them.
fn count(
    graph: &mut GraphBuilder,
    shape: &Shape,
    axes: &[i64],
    ddof: i64,
    dtype: DType,
) -> Result<Value, GraphError> {
    let axes = rules::normal_axes(axes, shape.rank()).ok_or(GraphError::NoResult)?;
    let dims: Vec<Dim> = axes
        .iter()
        .filter_map(|a| shape.dims().get(*a).copied())
        .collect();
    let fixed: i64 = dims
        .iter()
        .try_fold(1i64, |n, d| n.checked_mul(i64::try_from(d.at(1)).ok()?))
        .unwrap_or(i64::MAX);
    if !dims.contains(&Dim::Rows) {
        return rules::scalar(graph, fixed.saturating_sub(ddof).max(0) as f64, dtype);
    }
    // In integers, which count exactly however many there are.
    let literal =
        |g: &mut GraphBuilder, n: i64| g.literal(DType::I64, Shape::default(), &n.to_le_bytes());
    let each = literal(graph, fixed)?;
    let each = graph.broadcast_to(each, Shape::new([Dim::Rows])?)?;
    let mut all = graph.reduce_sum(each, &[], false)?;
    if ddof != 0 {
        let (less, zero) = (literal(graph, ddof)?, literal(graph, 0)?);
        all = graph.sub(all, less)?;
        all = graph.maximum(all, zero)?;
    }
    graph.cast(all, dtype)
}

/// The mean in the dtype of `x`, which is one to compute in.
fn mean_of(g: &mut GraphBuilder, x: Value, axes: &[i64], keep: bool) -> Result<Value, GraphError> {
    let spec = rules::spec_of(g, x)?;
    let n = count(g, &spec.shape, axes, 0, spec.dtype)?;
    let sum = g.reduce_sum(x, axes, keep)?;
    g.div(sum, n)
}

fn mean_of_parts(graph: &mut GraphBuilder, inputs: &[Value], attributes: &[Attribute]) -> Values {
    let (_, _, axes, keep) = parts(graph, inputs, attributes)?;
    rules::rounded_once(graph, inputs, |g, inputs| match inputs {
        &[x] => mean_of(g, x, axes, keep),
        _ => Err(GraphError::NoResult),
    })
}

/// The variance in the dtype of `x`, which is one to compute in.
fn variance_of(
    g: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Result<Value, GraphError> {
    let (x, spec, axes, keep) = parts(g, inputs, attributes)?;
    let &[_, _, Attribute::Int(ddof)] = attributes else {
        return Err(GraphError::NoResult);
    };
    let center = mean_of(g, x, axes, true)?;
    let apart = g.sub(x, center)?;
    let squares = g.square(apart)?;
    let sum = g.reduce_sum(squares, axes, keep)?;
    let n = count(g, &spec.shape, axes, ddof, spec.dtype)?;
    g.div(sum, n)
}

fn variance_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    rules::rounded_once(graph, inputs, |g, inputs| {
        variance_of(g, inputs, attributes)
    })
}

fn deviation_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    rules::rounded_once(graph, inputs, |g, inputs| {
        let squared = variance_of(g, inputs, attributes)?;
        g.sqrt(squared)
    })
}

fn logsumexp_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    rules::rounded_once(graph, inputs, |g, inputs| {
        let (x, spec, axes, keep) = parts(g, inputs, attributes)?;
        let named = rules::normal_axes(axes, spec.shape.rank()).ok_or(GraphError::NoResult)?;
        if of_nothing(&spec.shape, &named) {
            let sum = g.reduce_sum(x, axes, keep)?;
            return g.log(sum);
        }
        let most = g.reduce_max(x, axes, true)?;
        // An infinite shift would make NaN of ∞ − ∞.
        let finite = g.is_finite(most)?;
        let zero = rules::scalar_like(g, 0.0, most)?;
        let shift = g.where_(finite, most, zero)?;
        let shifted = g.sub(x, shift)?;
        let powers = g.exp(shifted)?;
        let sum = g.reduce_sum(powers, axes, true)?;
        let log = g.log(sum)?;
        let result = g.add(log, shift)?;
        let shape = Shape::new(left(&spec.shape, &named, keep))?;
        rules::reshape_to(g, result, shape)
    })
}

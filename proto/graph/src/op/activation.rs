//! Activations and comparisons made of other elementwise ops. `f16` and `bf16` are computed in `f32` and rounded once.

use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_PI};

use crate::{
    dtype::{DType, Kind},
    graph::{GraphBuilder, GraphError, Value},
    op::{
        Attribute, Call, Effect, ops,
        rules::{self, Specs, Values},
    },
    shape::{Dim, Shape},
};

ops! {
    /// `max(x, 0)`; integers stay integers, and NaN NaN.
    relu(x;) -> one { shapes: "x", dtypes: "integers, floats: x", effect: Effect::None, infer: relu_spec, decompose: Some(relu_of_parts) }

    /// `x · Φ(x)` with the normal distribution's Φ by `erf` (Hendrycks & Gimpel 2016).
    gelu(x;) -> one { shapes: "x", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float, decompose: Some(gelu_of_parts) }

    /// `gelu` by `tanh`: `½x · (1 + tanh(√(2/π) · (x + 0.044715x³)))` (Hendrycks & Gimpel 2016).
    gelu_tanh(x;) -> one { shapes: "x", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float, decompose: Some(gelu_tanh_of_parts) }

    /// `gelu` by the logistic function: `x · σ(1.702x)` (Hendrycks & Gimpel 2016).
    gelu_quick(x;) -> one { shapes: "x", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float, decompose: Some(gelu_quick_of_parts) }

    /// `ln(1 + eˣ)` without overflow.
    softplus(x;) -> one { shapes: "x", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float, decompose: Some(softplus_of_parts) }

    /// `silu(gate) · up` (Shazeer 2020, without the matrices), equal shapes.
    swiglu(gate, up;) -> one { shapes: "gate = up", dtypes: "promote(gate, up): a float; integers, bool: f32", effect: Effect::None, infer: same_shapes, decompose: Some(swiglu_of_parts) }

    /// `gelu_tanh(gate) · up` (Shazeer 2020, without the matrices), equal shapes.
    geglu(gate, up;) -> one { shapes: "gate = up", dtypes: "promote(gate, up): a float; integers, bool: f32", effect: Effect::None, infer: same_shapes, decompose: Some(geglu_of_parts) }

    /// `g · σ(alpha · g) · (u + 1)` with `g = min(gate, limit)` and `u = up` held within ±`limit` (gpt-oss), equal shapes.
    swiglu_limit(gate, up; alpha: Float(-1e30, 1e30), limit: Float(0.0, 1e30)) -> one
    { shapes: "gate = up", dtypes: "promote(gate, up): a float; integers, bool: f32", effect: Effect::None, infer: same_shapes, decompose: Some(swiglu_limit_of_parts) }

    /// `min(max(x, low), high)` (NumPy's `clip`), NaN if one of them is. The bounds are cast to the dtype of `x`.
    clamp(x, low = optional, high = optional;) -> one
    { shapes: "broadcast(x, low, high)", dtypes: "all but c64 and block types: x", effect: Effect::None, infer: clamp_spec, decompose: Some(clamp_of_parts) }

    /// Whether `|a − b| ≤ atol + rtol · |b|`, as floats (NumPy's `isclose`); infinities of one sign are close, and NaN
    /// to NaN if `equal_nan`.
    is_close(a, b; rtol: Float(0.0, 1e30), atol: Float(0.0, 1e30), equal_nan: Bool) -> one
    { shapes: "broadcast(a, b)", dtypes: "all but c64 and block types → bool", effect: Effect::None, infer: is_close_spec, decompose: Some(is_close_of_parts) }

    /// Whether `is_close` everywhere (NumPy's `allclose`).
    all_close(a, b; rtol: Float(0.0, 1e30), atol: Float(0.0, 1e30), equal_nan: Bool) -> one
    { shapes: "[]", dtypes: "all but c64 and block types → bool", effect: Effect::None, infer: all_close_spec, decompose: Some(all_close_of_parts) }

    /// Whether the shapes and all elements are equal, compared as what they promote to (NumPy's `array_equal`); NaN equals
    /// NaN if `equal_nan`.
    array_equal(a, b; equal_nan: Bool) -> one
    { shapes: "[]", dtypes: "all but block types → bool", effect: Effect::None, infer: array_equal_spec, decompose: Some(array_equal_of_parts) }
}

fn relu_spec(call: &Call<'_>) -> Specs {
    let x = rules::real(call, 0)?;
    if x.dtype.kind() == Kind::Bool {
        return Err(rules::dtype_error(call, x.dtype));
    }
    Ok(vec![x.clone()])
}

fn float(call: &Call<'_>) -> Specs {
    let x = call.tensor(0)?;
    rules::one_of(call, rules::promoted_float(call, 0)?, x.shape.clone())
}

fn same_shapes(call: &Call<'_>) -> Specs {
    let (a, b) = (call.tensor(0)?, call.tensor(1)?);
    if a.shape != b.shape {
        return Err(call.error(format_args!(
            "shapes {} and {} must be equal",
            a.shape, b.shape
        )));
    }
    rules::one_of(call, rules::promoted_float(call, 0)?, a.shape.clone())
}

fn clamp_spec(call: &Call<'_>) -> Specs {
    let x = rules::real(call, 0)?;
    for bound in [1, 2] {
        if call.optional(bound)?.is_some() {
            rules::real(call, bound)?;
        }
    }
    rules::one_of(call, x.dtype, rules::broadcast(call)?)
}

fn is_close_spec(call: &Call<'_>) -> Specs {
    rules::promoted_float(call, 0)?;
    rules::one_of(call, DType::Bool, rules::broadcast(call)?)
}

fn all_close_spec(call: &Call<'_>) -> Specs {
    is_close_spec(call)?;
    rules::one_of(call, DType::Bool, Shape::default())
}

fn array_equal_spec(call: &Call<'_>) -> Specs {
    let (a, b) = (call.tensor(0)?, call.tensor(1)?);
    rules::promoted(call, 0)?;
    let differ = a.shape.dims().iter().zip(b.shape.dims());
    let mut differ = differ.filter(|(a, b)| a != b);
    // Whether the row dimension is of a fixed size is only known when there are rows.
    if a.shape.rank() == b.shape.rank()
        && differ
            .next()
            .is_some_and(|(a, b)| [*a, *b].contains(&Dim::Rows))
        && differ.next().is_none()
    {
        return Err(rules::row_error(call, "compared with a fixed size"));
    }
    rules::one_of(call, DType::Bool, Shape::default())
}

fn relu_of_parts(graph: &mut GraphBuilder, inputs: &[Value], _: &[Attribute]) -> Values {
    let &[x] = inputs else {
        return Err(GraphError::NoResult);
    };
    let zero = rules::scalar_like(graph, 0.0, x)?;
    Ok(vec![graph.maximum(x, zero)?])
}

/// A composite of one operand, in the working dtype.
fn one_operand(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    body: impl FnOnce(&mut GraphBuilder, Value) -> Result<Value, GraphError>,
) -> Values {
    rules::rounded_once(graph, inputs, |g, inputs| match inputs {
        &[x] => body(g, x),
        _ => Err(GraphError::NoResult),
    })
}

/// A composite of two operands, in the working dtype.
fn two_operands(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    body: impl FnOnce(&mut GraphBuilder, Value, Value) -> Result<Value, GraphError>,
) -> Values {
    rules::rounded_once(graph, inputs, |g, inputs| match inputs {
        &[a, b] => body(g, a, b),
        _ => Err(GraphError::NoResult),
    })
}

/// `x · factor`.
fn times(g: &mut GraphBuilder, x: Value, factor: f64) -> Result<Value, GraphError> {
    let factor = rules::scalar_like(g, factor, x)?;
    g.mul(x, factor)
}

/// `x + term`.
fn plus(g: &mut GraphBuilder, x: Value, term: f64) -> Result<Value, GraphError> {
    let term = rules::scalar_like(g, term, x)?;
    g.add(x, term)
}

/// `x · ½(1 + y)`.
fn half_and(g: &mut GraphBuilder, x: Value, y: Value) -> Result<Value, GraphError> {
    let one_more = plus(g, y, 1.0)?;
    let half = times(g, one_more, 0.5)?;
    g.mul(x, half)
}

fn gelu_of_parts(graph: &mut GraphBuilder, inputs: &[Value], _: &[Attribute]) -> Values {
    one_operand(graph, inputs, |g, x| {
        let scaled = times(g, x, FRAC_1_SQRT_2)?;
        let e = g.erf(scaled)?;
        half_and(g, x, e)
    })
}

fn tanh_form(g: &mut GraphBuilder, x: Value) -> Result<Value, GraphError> {
    let x2 = g.square(x)?;
    let x2 = times(g, x2, 0.044715)?;
    let inner = plus(g, x2, 1.0)?;
    let inner = g.mul(x, inner)?;
    let inner = times(g, inner, FRAC_2_PI.sqrt())?;
    let t = g.tanh(inner)?;
    half_and(g, x, t)
}

fn gelu_tanh_of_parts(graph: &mut GraphBuilder, inputs: &[Value], _: &[Attribute]) -> Values {
    one_operand(graph, inputs, tanh_form)
}

fn gelu_quick_of_parts(graph: &mut GraphBuilder, inputs: &[Value], _: &[Attribute]) -> Values {
    one_operand(graph, inputs, |g, x| {
        let scaled = times(g, x, 1.702)?;
        let s = g.sigmoid(scaled)?;
        g.mul(x, s)
    })
}

fn softplus_of_parts(graph: &mut GraphBuilder, inputs: &[Value], _: &[Attribute]) -> Values {
    one_operand(graph, inputs, |g, x| {
        let zero = rules::scalar_like(g, 0.0, x)?;
        g.logaddexp(x, zero)
    })
}

fn swiglu_of_parts(graph: &mut GraphBuilder, inputs: &[Value], _: &[Attribute]) -> Values {
    two_operands(graph, inputs, |g, gate, up| {
        let gated = g.silu(gate)?;
        g.mul(gated, up)
    })
}

fn geglu_of_parts(graph: &mut GraphBuilder, inputs: &[Value], _: &[Attribute]) -> Values {
    two_operands(graph, inputs, |g, gate, up| {
        let gated = tanh_form(g, gate)?;
        g.mul(gated, up)
    })
}

fn swiglu_limit_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let &[Attribute::Float(alpha), Attribute::Float(limit)] = attributes else {
        return Err(GraphError::NoResult);
    };
    two_operands(graph, inputs, |g, gate, up| {
        let high = rules::scalar_like(g, limit, gate)?;
        let low = rules::scalar_like(g, -limit, gate)?;
        let gate = g.minimum(gate, high)?;
        let up = g.clamp(up, Some(low), Some(high))?;
        let scaled = times(g, gate, alpha)?;
        let s = g.sigmoid(scaled)?;
        let gated = g.mul(gate, s)?;
        let up = plus(g, up, 1.0)?;
        g.mul(gated, up)
    })
}

fn clamp_of_parts(graph: &mut GraphBuilder, inputs: &[Value], _: &[Attribute]) -> Values {
    let &[x, low, high] = inputs else {
        return Err(GraphError::NoResult);
    };
    let dtype = rules::spec_of(graph, x)?.dtype;
    let mut held = x;
    if low != Value::Absent {
        let low = rules::cast_to(graph, low, dtype)?;
        held = graph.maximum(held, low)?;
    }
    if high != Value::Absent {
        let high = rules::cast_to(graph, high, dtype)?;
        held = graph.minimum(held, high)?;
    }
    Ok(vec![held])
}

/// `result`, or both operands NaN.
fn or_both_nan(
    g: &mut GraphBuilder,
    result: Value,
    a: Value,
    b: Value,
) -> Result<Value, GraphError> {
    // NaN alone differs from itself; `is_nan` has no c64.
    let (a, b) = (g.not_equal(a, a)?, g.not_equal(b, b)?);
    let both = g.logical_and(a, b)?;
    g.logical_or(result, both)
}

fn is_close_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let (
        &[a, b],
        &[
            Attribute::Float(rtol),
            Attribute::Float(atol),
            Attribute::Bool(equal_nan),
        ],
    ) = (inputs, attributes)
    else {
        return Err(GraphError::NoResult);
    };
    let dtype = rules::common(graph, inputs)?;
    let dtype = dtype.to_float().unwrap_or(dtype).working();
    let a = rules::cast_to(graph, a, dtype)?;
    let b = rules::cast_to(graph, b, dtype)?;
    let apart = graph.sub(a, b)?;
    let apart = graph.abs(apart)?;
    let size = graph.abs(b)?;
    let allowed = times(graph, size, rtol)?;
    let allowed = plus(graph, allowed, atol)?;
    let near = graph.less_equal(apart, allowed)?;
    // Everything would be near an infinity, whose tolerance is infinite.
    let finite = graph.is_finite(b)?;
    let near = graph.logical_and(near, finite)?;
    let same = graph.equal(a, b)?;
    let close = graph.logical_or(near, same)?;
    Ok(vec![match equal_nan {
        true => or_both_nan(graph, close, a, b)?,
        false => close,
    }])
}

fn all_close_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let close = graph.apply(&is_close, inputs.to_vec(), attributes.to_vec())?;
    let &[close] = close.as_slice() else {
        return Err(GraphError::NoResult);
    };
    Ok(vec![graph.reduce_all(close, &[], false)?])
}

fn array_equal_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let (&[a, b], &[Attribute::Bool(equal_nan)]) = (inputs, attributes) else {
        return Err(GraphError::NoResult);
    };
    if rules::spec_of(graph, a)?.shape != rules::spec_of(graph, b)?.shape {
        return Ok(vec![rules::scalar(graph, 0.0, DType::Bool)?]);
    }
    let mut same = graph.equal(a, b)?;
    if equal_nan {
        same = or_both_nan(graph, same, a, b)?;
    }
    Ok(vec![graph.reduce_all(same, &[], false)?])
}

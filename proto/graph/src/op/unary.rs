//! Elementwise ops on one tensor. `f16` and `bf16` are computed in `f32` and rounded once.

use crate::{
    dtype::{DType, Kind},
    graph::{GraphBuilder, GraphError, Value},
    op::{
        Attribute, Call, Effect, ops,
        rules::{self, Specs, Values},
    },
    shape::{Dim, TensorSpec},
};

ops! {
    /// `−x`; integers wrap.
    neg(x;) -> one { shapes: "x", dtypes: "integers, floats, c64: x", effect: Effect::None, infer: keep_complex, decompose: None }

    /// The absolute value; integers wrap, so that of the least one is itself. `c64` gives its `f32` magnitude.
    abs(x;) -> one { shapes: "x", dtypes: "integers, floats: x; c64: f32", effect: Effect::None, infer: abs_spec, decompose: None }

    /// −1, 0 or 1; NaN stays NaN and ±0 stays ±0.
    sign(x;) -> one { shapes: "x", dtypes: "integers, floats: x", effect: Effect::None, infer: keep, decompose: None }

    /// `x · x`; integers wrap.
    square(x;) -> one { shapes: "x", dtypes: "integers, floats, c64: x", effect: Effect::None, infer: keep_complex, decompose: None }

    /// The greatest whole number that is not above; integers are themselves.
    floor(x;) -> one { shapes: "x", dtypes: "integers, floats: x", effect: Effect::None, infer: keep, decompose: None }

    /// The least whole number that is not below; integers are themselves.
    ceil(x;) -> one { shapes: "x", dtypes: "integers, floats: x", effect: Effect::None, infer: keep, decompose: None }

    /// The nearest whole number, the even one of two (NumPy's `round`); integers are themselves.
    round(x;) -> one { shapes: "x", dtypes: "integers, floats: x", effect: Effect::None, infer: keep, decompose: None }

    /// The whole part, towards zero; integers are themselves.
    trunc(x;) -> one { shapes: "x", dtypes: "integers, floats: x", effect: Effect::None, infer: keep, decompose: None }

    /// `1 / x`, ∞ at 0.
    reciprocal(x;) -> one { shapes: "x", dtypes: "floats, c64: x; others: f32", effect: Effect::None, infer: float_complex,
      decompose: Some(|g, x, a| rules::promoting_float(g, &reciprocal, x, a)) }

    /// The square root; NaN below 0.
    sqrt(x;) -> one { shapes: "x", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float,
      decompose: Some(|g, x, a| rules::promoting_float(g, &sqrt, x, a)) }

    /// `1 / √x`; ∞ at 0.
    rsqrt(x;) -> one { shapes: "x", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float,
      decompose: Some(|g, x, a| rules::promoting_float(g, &rsqrt, x, a)) }

    /// `eˣ`.
    exp(x;) -> one { shapes: "x", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float,
      decompose: Some(|g, x, a| rules::promoting_float(g, &exp, x, a)) }

    /// `eˣ − 1`, exact near 0.
    expm1(x;) -> one { shapes: "x", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float,
      decompose: Some(|g, x, a| rules::promoting_float(g, &expm1, x, a)) }

    /// The natural logarithm; −∞ at 0, NaN below.
    log(x;) -> one { shapes: "x", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float,
      decompose: Some(|g, x, a| rules::promoting_float(g, &log, x, a)) }

    /// `ln(1 + x)`, exact near 0.
    log1p(x;) -> one { shapes: "x", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float,
      decompose: Some(|g, x, a| rules::promoting_float(g, &log1p, x, a)) }

    /// The logarithm of base 2; −∞ at 0, NaN below.
    log2(x;) -> one { shapes: "x", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float,
      decompose: Some(|g, x, a| rules::promoting_float(g, &log2, x, a)) }

    /// The sine of radians.
    sin(x;) -> one { shapes: "x", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float,
      decompose: Some(|g, x, a| rules::promoting_float(g, &sin, x, a)) }

    /// The cosine of radians.
    cos(x;) -> one { shapes: "x", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float,
      decompose: Some(|g, x, a| rules::promoting_float(g, &cos, x, a)) }

    /// The tangent of radians.
    tan(x;) -> one { shapes: "x", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float,
      decompose: Some(|g, x, a| rules::promoting_float(g, &tan, x, a)) }

    /// The arc sine; NaN outside [−1, 1].
    asin(x;) -> one { shapes: "x", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float,
      decompose: Some(|g, x, a| rules::promoting_float(g, &asin, x, a)) }

    /// The arc cosine; NaN outside [−1, 1].
    acos(x;) -> one { shapes: "x", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float,
      decompose: Some(|g, x, a| rules::promoting_float(g, &acos, x, a)) }

    /// The arc tangent.
    atan(x;) -> one { shapes: "x", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float,
      decompose: Some(|g, x, a| rules::promoting_float(g, &atan, x, a)) }

    /// The hyperbolic sine.
    sinh(x;) -> one { shapes: "x", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float,
      decompose: Some(|g, x, a| rules::promoting_float(g, &sinh, x, a)) }

    /// The hyperbolic cosine.
    cosh(x;) -> one { shapes: "x", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float,
      decompose: Some(|g, x, a| rules::promoting_float(g, &cosh, x, a)) }

    /// The hyperbolic tangent.
    tanh(x;) -> one { shapes: "x", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float,
      decompose: Some(|g, x, a| rules::promoting_float(g, &tanh, x, a)) }

    /// The inverse hyperbolic sine.
    asinh(x;) -> one { shapes: "x", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float,
      decompose: Some(|g, x, a| rules::promoting_float(g, &asinh, x, a)) }

    /// The inverse hyperbolic cosine; NaN below 1.
    acosh(x;) -> one { shapes: "x", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float,
      decompose: Some(|g, x, a| rules::promoting_float(g, &acosh, x, a)) }

    /// The inverse hyperbolic tangent; ±∞ at ±1, NaN outside.
    atanh(x;) -> one { shapes: "x", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float,
      decompose: Some(|g, x, a| rules::promoting_float(g, &atanh, x, a)) }

    /// The error function, `2/√π ∫₀ˣ e^(−t²) dt`.
    erf(x;) -> one { shapes: "x", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float,
      decompose: Some(|g, x, a| rules::promoting_float(g, &erf, x, a)) }

    /// The inverse of `erf`; ±∞ at ±1, NaN outside [−1, 1].
    erfinv(x;) -> one { shapes: "x", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float,
      decompose: Some(|g, x, a| rules::promoting_float(g, &erfinv, x, a)) }

    /// The logistic function, `σ(x) = 1 / (1 + e^(−x))`.
    sigmoid(x;) -> one { shapes: "x", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float,
      decompose: Some(|g, x, a| rules::promoting_float(g, &sigmoid, x, a)) }

    /// `x · σ(x)` (Elfwing et al. 2017; the same as swish with β = 1).
    silu(x;) -> one { shapes: "x", dtypes: "floats: x; integers, bool: f32", effect: Effect::None, infer: float,
      decompose: Some(|g, x, a| rules::promoting_float(g, &silu, x, a)) }

    /// Whether `x` is 0.
    logical_not(x;) -> one { shapes: "x", dtypes: "all but c64 and block types → bool", effect: Effect::None, infer: predicate, decompose: None }

    /// Whether `x` is NaN, which no integer is.
    is_nan(x;) -> one { shapes: "x", dtypes: "all but c64 and block types → bool", effect: Effect::None, infer: predicate, decompose: None }

    /// Whether `x` is ∞ or −∞, which no integer is.
    is_inf(x;) -> one { shapes: "x", dtypes: "all but c64 and block types → bool", effect: Effect::None, infer: predicate, decompose: None }

    /// Whether `x` is neither infinite nor NaN, as every integer is.
    is_finite(x;) -> one { shapes: "x", dtypes: "all but c64 and block types → bool", effect: Effect::None, infer: predicate, decompose: None }

    /// Each bit turned; of `bool` the logical not.
    bitwise_not(x;) -> one { shapes: "x", dtypes: "integers, bool: x", effect: Effect::None, infer: bits, decompose: None }

    /// `x` as another dtype. Float to integer truncates and saturates, NaN is 0; integer to integer wraps; anything to
    /// `bool` is `x ≠ 0` (NaN is true); `f16` and `bf16` round to nearest, ties to even, once, from `f64` too; of `c64`
    /// the real part is taken; block types dequantise, and are encoded by the rules of GGUF's own package (a block with a NaN or
    /// an infinity becomes one without a finite number).
    cast(x; dtype: DType) -> one { shapes: "x", dtypes: "any → dtype; block types only to floats; only floats to q4_0, q4_1, q5_0, q5_1, q8_0, mxfp4, tq1_0 and tq2_0, in whole blocks of the last axis", effect: Effect::None, infer: cast_spec,
      decompose: Some(cast_by_f32) }
}

fn keep_if(call: &Call<'_>, fits: impl Fn(Kind) -> bool) -> Result<TensorSpec, GraphError> {
    let t = call.tensor(0)?;
    if !fits(t.dtype.kind()) {
        return Err(rules::dtype_error(call, t.dtype));
    }
    Ok(t.clone())
}

fn keep(call: &Call<'_>) -> Specs {
    let number = |k| matches!(k, Kind::Unsigned | Kind::Signed | Kind::Float);
    Ok(vec![keep_if(call, number)?])
}

fn keep_complex(call: &Call<'_>) -> Specs {
    Ok(vec![keep_if(call, |k| {
        !matches!(k, Kind::Bool | Kind::Block)
    })?])
}

fn abs_spec(call: &Call<'_>) -> Specs {
    let mut specs = keep_complex(call)?;
    for t in specs.iter_mut().filter(|t| t.dtype == DType::C64) {
        t.dtype = DType::F32;
    }
    Ok(specs)
}

fn float(call: &Call<'_>) -> Specs {
    let x = call.tensor(0)?;
    rules::one_of(call, rules::promoted_float(call, 0)?, x.shape.clone())
}

fn float_complex(call: &Call<'_>) -> Specs {
    match call.tensor(0)? {
        t if t.dtype == DType::C64 => Ok(vec![t.clone()]),
        _ => float(call),
    }
}

fn predicate(call: &Call<'_>) -> Specs {
    rules::one_of(call, DType::Bool, rules::real(call, 0)?.shape.clone())
}

fn bits(call: &Call<'_>) -> Specs {
    let fits = |k| matches!(k, Kind::Bool | Kind::Unsigned | Kind::Signed);
    Ok(vec![keep_if(call, fits)?])
}

fn cast_spec(call: &Call<'_>) -> Specs {
    let (x, dtype) = (call.tensor(0)?, call.dtype(0)?);
    if dtype.is_block() {
        return encode_spec(call, x, dtype);
    }
    if x.dtype.is_block() && !dtype.is_float() {
        return Err(call.error(format_args!(
            "{} can only become a float, not {dtype}; cast to f32 first",
            x.dtype
        )));
    }
    rules::one_of(call, dtype, x.shape.clone())
}

fn encode_spec(call: &Call<'_>, x: &TensorSpec, dtype: DType) -> Specs {
    if !dtype.is_encoded() {
        let can = DType::ALL.iter().filter(|d| d.is_encoded());
        let can: Vec<&str> = can.map(|d| d.name()).collect();
        return Err(call.error(format_args!(
            "{dtype} can only be read; floats become {}",
            can.join(", ")
        )));
    }
    if !x.dtype.is_float() {
        return Err(call.error(format_args!(
            "{} cannot become {dtype}; cast to f32 first",
            x.dtype
        )));
    }
    let blocks = dtype.block_len();
    match x.shape.dims().last() {
        Some(Dim::Fixed(last)) if last.is_multiple_of(blocks) => {
            rules::one_of(call, dtype, x.shape.clone())
        }
        _ => Err(call.error(format_args!(
            "{x} cannot become {dtype}: its last axis must be whole blocks of {blocks}"
        ))),
    }
}

/// Block types by way of `f32`, which they dequantise to and are made of.
fn cast_by_f32(graph: &mut GraphBuilder, inputs: &[Value], attributes: &[Attribute]) -> Values {
    let &[x] = inputs else {
        return Err(GraphError::NoResult);
    };
    let from = rules::spec_of(graph, x)?.dtype;
    let x = match attributes {
        [Attribute::DType(to)]
            if from.is_block() && *to != DType::F32 || to.is_block() && from != DType::F32 =>
        {
            graph.cast(x, DType::F32)?
        }
        _ => x,
    };
    graph.apply(&cast, vec![x], attributes.to_vec())
}

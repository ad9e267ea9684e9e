//! Elementwise ops on two tensors, with NumPy broadcasting and promotion. `f16` and `bf16` are computed in `f32` and
//! rounded once.

use crate::{
    dtype::{DType, Kind},
    graph::{GraphBuilder, GraphError, Value},
    op::{
        Attribute, Call, Effect, OpRow, ops,
        rules::{self, Specs, Values},
    },
};

ops! {
    /// `a + b`; integers wrap.
    add(a, b;) -> one { shapes: "broadcast(a, b)", dtypes: "promote(a, b): an integer, float or c64", effect: Effect::None, infer: arithmetic_complex,
      decompose: Some(|g, x, a| rules::promoting(g, &add, x, a, 0)) }

    /// `a − b`; integers wrap.
    sub(a, b;) -> one { shapes: "broadcast(a, b)", dtypes: "promote(a, b): an integer, float or c64", effect: Effect::None, infer: arithmetic_complex,
      decompose: Some(|g, x, a| rules::promoting(g, &sub, x, a, 0)) }

    /// `a · b`; integers wrap.
    mul(a, b;) -> one { shapes: "broadcast(a, b)", dtypes: "promote(a, b): an integer, float or c64", effect: Effect::None, infer: arithmetic_complex,
      decompose: Some(|g, x, a| rules::promoting(g, &mul, x, a, 0)) }

    /// The greater; NaN if either is. Of equal ones (such as ±0) `b`.
    maximum(a, b;) -> one { shapes: "broadcast(a, b)", dtypes: "promote(a, b): bool, an integer or float", effect: Effect::None, infer: extremum,
      decompose: Some(|g, x, a| rules::promoting(g, &maximum, x, a, 0)) }

    /// The lesser; NaN if either is. Of equal ones (such as ±0) `b`.
    minimum(a, b;) -> one { shapes: "broadcast(a, b)", dtypes: "promote(a, b): bool, an integer or float", effect: Effect::None, infer: extremum,
      decompose: Some(|g, x, a| rules::promoting(g, &minimum, x, a, 0)) }

    /// `⌊a / b⌋`, towards −∞; of integers by 0 it is 0, and the least one by −1 itself.
    floor_divide(a, b;) -> one { shapes: "broadcast(a, b)", dtypes: "promote(a, b): an integer or float", effect: Effect::None, infer: arithmetic,
      decompose: Some(|g, x, a| rules::promoting(g, &floor_divide, x, a, 0)) }

    /// What `floor_divide` leaves, with the sign of `b` (NumPy's `remainder`); of integers by 0 it is 0.
    remainder(a, b;) -> one { shapes: "broadcast(a, b)", dtypes: "promote(a, b): an integer or float", effect: Effect::None, infer: arithmetic,
      decompose: Some(|g, x, a| rules::promoting(g, &remainder, x, a, 0)) }

    /// `a` to the power of `b`; integers wrap, and a negative exponent gives 0.
    pow(a, b;) -> one { shapes: "broadcast(a, b)", dtypes: "promote(a, b): an integer or float", effect: Effect::None, infer: arithmetic,
      decompose: Some(|g, x, a| rules::promoting(g, &pow, x, a, 0)) }

    /// `a / b`, true division.
    div(a, b;) -> one { shapes: "broadcast(a, b)", dtypes: "promote(a, b): a float or c64; integers, bool: f32", effect: Effect::None, infer: float_complex,
      decompose: Some(|g, x, a| rules::promoting_float(g, &div, x, a)) }

    /// The angle of the point `(b, a)`, in (−π, π].
    atan2(a, b;) -> one { shapes: "broadcast(a, b)", dtypes: "promote(a, b): a float; integers, bool: f32", effect: Effect::None, infer: float,
      decompose: Some(|g, x, a| rules::promoting_float(g, &atan2, x, a)) }

    /// `ln(eᵃ + eᵇ)` without overflow.
    logaddexp(a, b;) -> one { shapes: "broadcast(a, b)", dtypes: "promote(a, b): a float; integers, bool: f32", effect: Effect::None, infer: float,
      decompose: Some(|g, x, a| rules::promoting_float(g, &logaddexp, x, a)) }

    /// Whether `a = b`; NaN equals nothing.
    equal(a, b;) -> one { shapes: "broadcast(a, b)", dtypes: "all but block types, compared as promote(a, b) → bool", effect: Effect::None, infer: compare_complex,
      decompose: Some(|g, x, a| rules::promoting(g, &equal, x, a, 0)) }

    /// Whether `a ≠ b`, which NaN is of everything.
    not_equal(a, b;) -> one { shapes: "broadcast(a, b)", dtypes: "all but block types, compared as promote(a, b) → bool", effect: Effect::None, infer: compare_complex,
      decompose: Some(|g, x, a| rules::promoting(g, &not_equal, x, a, 0)) }

    /// Whether `a < b`; false with NaN.
    less(a, b;) -> one { shapes: "broadcast(a, b)", dtypes: "all but c64 and block types, compared as promote(a, b) → bool", effect: Effect::None, infer: compare,
      decompose: Some(|g, x, a| rules::promoting(g, &less, x, a, 0)) }

    /// Whether `a ≤ b`; false with NaN.
    less_equal(a, b;) -> one { shapes: "broadcast(a, b)", dtypes: "all but c64 and block types, compared as promote(a, b) → bool", effect: Effect::None, infer: compare,
      decompose: Some(|g, x, a| rules::promoting(g, &less_equal, x, a, 0)) }

    /// Whether `a > b`; false with NaN.
    greater(a, b;) -> one { shapes: "broadcast(a, b)", dtypes: "all but c64 and block types, compared as promote(a, b) → bool", effect: Effect::None, infer: compare,
      decompose: Some(|g, x, a| rules::promoting(g, &greater, x, a, 0)) }

    /// Whether `a ≥ b`; false with NaN.
    greater_equal(a, b;) -> one { shapes: "broadcast(a, b)", dtypes: "all but c64 and block types, compared as promote(a, b) → bool", effect: Effect::None, infer: compare,
      decompose: Some(|g, x, a| rules::promoting(g, &greater_equal, x, a, 0)) }

    /// Whether both are not 0.
    logical_and(a, b;) -> one { shapes: "broadcast(a, b)", dtypes: "all but c64 and block types → bool", effect: Effect::None, infer: compare,
      decompose: Some(|g, x, a| logical(g, &logical_and, x, a)) }

    /// Whether either is not 0.
    logical_or(a, b;) -> one { shapes: "broadcast(a, b)", dtypes: "all but c64 and block types → bool", effect: Effect::None, infer: compare,
      decompose: Some(|g, x, a| logical(g, &logical_or, x, a)) }

    /// Whether just one is not 0.
    logical_xor(a, b;) -> one { shapes: "broadcast(a, b)", dtypes: "all but c64 and block types → bool", effect: Effect::None, infer: compare,
      decompose: Some(|g, x, a| logical(g, &logical_xor, x, a)) }

    /// The bits that both have.
    bitwise_and(a, b;) -> one { shapes: "broadcast(a, b)", dtypes: "promote(a, b): an integer or bool", effect: Effect::None, infer: bits,
      decompose: Some(|g, x, a| rules::promoting(g, &bitwise_and, x, a, 0)) }

    /// The bits that either has.
    bitwise_or(a, b;) -> one { shapes: "broadcast(a, b)", dtypes: "promote(a, b): an integer or bool", effect: Effect::None, infer: bits,
      decompose: Some(|g, x, a| rules::promoting(g, &bitwise_or, x, a, 0)) }

    /// The bits that just one has.
    bitwise_xor(a, b;) -> one { shapes: "broadcast(a, b)", dtypes: "promote(a, b): an integer or bool", effect: Effect::None, infer: bits,
      decompose: Some(|g, x, a| rules::promoting(g, &bitwise_xor, x, a, 0)) }

    /// `a · 2ᵇ`; 0 when `b` is negative or not below the width.
    left_shift(a, b;) -> one { shapes: "broadcast(a, b)", dtypes: "promote(a, b): an integer", effect: Effect::None, infer: shift,
      decompose: Some(|g, x, a| rules::promoting(g, &left_shift, x, a, 0)) }

    /// `⌊a / 2ᵇ⌋`; when `b` is negative or not below the width 0, or −1 for a negative `a`.
    right_shift(a, b;) -> one { shapes: "broadcast(a, b)", dtypes: "promote(a, b): an integer", effect: Effect::None, infer: shift,
      decompose: Some(|g, x, a| rules::promoting(g, &right_shift, x, a, 0)) }

    /// `a` where `condition`, else `b`.
    where_ as "where"(condition, a, b;) -> one { shapes: "broadcast(condition, a, b)", dtypes: "condition bool; promote(a, b): any but a block type", effect: Effect::None, infer: where_spec,
      decompose: Some(|g, x, a| rules::promoting(g, &where_, x, a, 1)) }
}

/// The broadcast shape with what the operands promote to, if that is of such a kind.
fn promoted_if(call: &Call<'_>, fits: impl Fn(Kind) -> bool) -> Specs {
    let dtype = rules::promoted(call, 0)?;
    if !fits(dtype.kind()) {
        let (a, b) = (call.tensor(0)?.dtype, call.tensor(1)?.dtype);
        return Err(call.error(format_args!("{a} and {b} do not fit; cast first")));
    }
    rules::one_of(call, dtype, rules::broadcast(call)?)
}

fn arithmetic(call: &Call<'_>) -> Specs {
    promoted_if(call, |k| {
        matches!(k, Kind::Unsigned | Kind::Signed | Kind::Float)
    })
}

fn arithmetic_complex(call: &Call<'_>) -> Specs {
    promoted_if(call, |k| !matches!(k, Kind::Bool | Kind::Block))
}

fn extremum(call: &Call<'_>) -> Specs {
    promoted_if(call, |k| !matches!(k, Kind::Complex | Kind::Block))
}

fn bits(call: &Call<'_>) -> Specs {
    promoted_if(call, |k| {
        matches!(k, Kind::Bool | Kind::Unsigned | Kind::Signed)
    })
}

fn shift(call: &Call<'_>) -> Specs {
    let (a, b) = (call.tensor(0)?.dtype, call.tensor(1)?.dtype);
    if !a.is_integer() || !b.is_integer() {
        return Err(call.error(format_args!("{a} and {b} must be integers; cast first")));
    }
    promoted_if(call, |k| matches!(k, Kind::Unsigned | Kind::Signed))
}

fn float(call: &Call<'_>) -> Specs {
    let dtype = rules::promoted_float(call, 0)?;
    rules::one_of(call, dtype, rules::broadcast(call)?)
}

fn float_complex(call: &Call<'_>) -> Specs {
    match rules::promoted(call, 0)? {
        DType::C64 => rules::one_of(call, DType::C64, rules::broadcast(call)?),
        _ => float(call),
    }
}

fn compare(call: &Call<'_>) -> Specs {
    extremum(call)?;
    rules::one_of(call, DType::Bool, rules::broadcast(call)?)
}

fn compare_complex(call: &Call<'_>) -> Specs {
    rules::promoted(call, 0)?;
    rules::one_of(call, DType::Bool, rules::broadcast(call)?)
}

fn where_spec(call: &Call<'_>) -> Specs {
    call.tensor_of(0, DType::Bool)?;
    let dtype = rules::promoted(call, 1)?;
    rules::one_of(call, dtype, rules::broadcast(call)?)
}

/// Operands that differ become `bool`: not being 0 is all that counts, and no other dtype shows it of all.
fn logical(
    graph: &mut GraphBuilder,
    row: &'static OpRow,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let &[a, b] = inputs else {
        return Err(GraphError::NoResult);
    };
    let (a, b) = (
        rules::spec_of(graph, a)?.dtype,
        rules::spec_of(graph, b)?.dtype,
    );
    let dtype = if a == b { a } else { DType::Bool };
    rules::apply_as(graph, row, inputs, attributes, 0, dtype)
}

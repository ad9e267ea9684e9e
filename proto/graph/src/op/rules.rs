//! What the rows' rules and decompositions share: axes, broadcasting, promotion, constants.
//!
//!
//! Attributes come from strangers: nothing here panics or overflows whatever they are.

use std::collections::BTreeSet;

use crate::{
    dtype::{DType, Kind},
    graph::{GraphBuilder, GraphError, Value},
    op::{Attribute, Call, OpRow, ValueSpec},
    shape::{Dim, Shape, TensorSpec},
};

/// What a rule gives.
pub(crate) type Specs = Result<Vec<TensorSpec>, GraphError>;

/// What a decomposition gives.
pub(crate) type Values = Result<Vec<Value>, GraphError>;

/// The axis that `axis` names among `rank`, counted from the end when negative.
pub fn normal_axis(axis: i64, rank: usize) -> Option<usize> {
    let rank_signed = i64::try_from(rank).ok()?;
    let from_front = if axis < 0 {
        axis.checked_add(rank_signed)?
    } else {
        axis
    };
    usize::try_from(from_front).ok().filter(|a| *a < rank)
}

/// The axes that a list names among `rank`, ascending; all of them for an empty list. `None` when one of them
/// is not there or is there twice.
pub fn normal_axes(axes: &[i64], rank: usize) -> Option<Vec<usize>> {
    if axes.is_empty() {
        return Some((0..rank).collect());
    }
    let named: BTreeSet<usize> = axes
        .iter()
        .map(|&a| normal_axis(a, rank))
        .collect::<Option<_>>()?;
    (named.len() == axes.len()).then(|| named.into_iter().collect())
}

/// [`normal_axis`] of a call.
///
/// # Errors
/// When there is no such axis.
pub(crate) fn axis_of(call: &Call<'_>, axis: i64, rank: usize) -> Result<usize, GraphError> {
    normal_axis(axis, rank).ok_or_else(|| {
        call.error(format_args!(
            "there is no axis {axis} among {rank}; name one from -{rank} up to {rank}, which is not included"
        ))
    })
}

/// [`normal_axes`] of a call.
///
/// # Errors
/// When one of them is not there or is there twice.
pub(crate) fn axes_of(
    call: &Call<'_>,
    axes: &[i64],
    rank: usize,
) -> Result<Vec<usize>, GraphError> {
    normal_axes(axes, rank).ok_or_else(|| {
        let shown = &axes[..axes.len().min(16)];
        call.error(format_args!(
            "axes {shown:?} must each name another of {rank} axes"
        ))
    })
}

/// The error for an op that would move, cut or merge the row dimension.
pub(crate) fn row_error(call: &Call<'_>, what: &str) -> GraphError {
    call.error(format_args!(
        "the row dimension cannot be {what}; it stays the outermost axis as a whole"
    ))
}

/// The size of an axis that must be a number; `what` is what would happen to the row dimension.
///
/// # Errors
/// When it is the row dimension.
pub(crate) fn size_of(call: &Call<'_>, dim: Dim, what: &str) -> Result<usize, GraphError> {
    match dim {
        Dim::Fixed(n) => Ok(n),
        Dim::Rows => Err(row_error(call, what)),
    }
}

/// A size out of an attribute.
///
/// # Errors
/// When it is negative or does not fit.
pub(crate) fn size(call: &Call<'_>, n: i64) -> Result<usize, GraphError> {
    usize::try_from(n).map_err(|_| call.error(format_args!("{n} is no size")))
}

/// One result of this dtype and these axes.
///
/// # Errors
/// When no shape may have these axes.
pub(crate) fn one(call: &Call<'_>, dtype: DType, dims: impl IntoIterator<Item = Dim>) -> Specs {
    let shape = Shape::new(dims).map_err(|e| call.error(e))?;
    one_of(call, dtype, shape)
}

/// One result of this dtype and shape.
///
/// # Errors
/// When a block type does not fill its innermost axis.
pub(crate) fn one_of(call: &Call<'_>, dtype: DType, shape: Shape) -> Specs {
    let spec = TensorSpec::new(dtype, shape).map_err(|e| call.error(e))?;
    Ok(vec![spec])
}

/// NumPy broadcasting of all tensors among the inputs, absent ones left out.
///
/// # Errors
/// When they do not fit.
pub(crate) fn broadcast(call: &Call<'_>) -> Result<Shape, GraphError> {
    let mut shape = Shape::default();
    for i in 0..call.inputs.len() {
        if let Some(t) = call.optional(i)? {
            shape = shape.broadcast(&t.shape).map_err(|e| call.error(e))?;
        }
    }
    Ok(shape)
}

/// The error for an input of a dtype that the op does not take.
pub(crate) fn dtype_error(call: &Call<'_>, dtype: DType) -> GraphError {
    call.error(format_args!("{dtype} does not fit; cast first"))
}

/// Input `i`, of any dtype but a block type.
///
/// # Errors
/// When it is something else.
pub(crate) fn plain<'a>(call: &Call<'a>, i: usize) -> Result<&'a TensorSpec, GraphError> {
    let t = call.tensor(i)?;
    if t.dtype.is_block() {
        return Err(dtype_error(call, t.dtype));
    }
    Ok(t)
}

/// Input `i`, of any dtype but a block type and `c64`.
///
/// # Errors
/// When it is something else.
pub(crate) fn real<'a>(call: &Call<'a>, i: usize) -> Result<&'a TensorSpec, GraphError> {
    let t = plain(call, i)?;
    if t.dtype.kind() == Kind::Complex {
        return Err(dtype_error(call, t.dtype));
    }
    Ok(t)
}

/// What the dtypes of inputs `from..` promote to, absent ones left out.
///
/// # Errors
/// When one is a block type or a cache, or there is none.
pub(crate) fn promoted(call: &Call<'_>, from: usize) -> Result<DType, GraphError> {
    let mut common: Option<DType> = None;
    for i in from..call.inputs.len() {
        let Some(t) = call.optional(i)? else { continue };
        let next = t.dtype.promote(common.unwrap_or(t.dtype));
        common = Some(next.ok_or_else(|| dtype_error(call, t.dtype))?);
    }
    common.ok_or_else(|| call.error("there is no input"))
}

/// What inputs `from..` promote to as real numbers in floating point.
///
/// # Errors
/// When one is a block type or `c64`.
pub(crate) fn promoted_float(call: &Call<'_>, from: usize) -> Result<DType, GraphError> {
    let common = promoted(call, from)?;
    common.to_float().ok_or_else(|| dtype_error(call, common))
}

/// The spec of a value, a tensor, while decomposing.
///
/// # Errors
/// When it is none.
pub(crate) fn spec_of(graph: &GraphBuilder, value: Value) -> Result<TensorSpec, GraphError> {
    match graph.spec(value)? {
        ValueSpec::Tensor(t) => Ok(t),
        other => Err(GraphError::UnknownValue(format!("{other}"))),
    }
}

/// `x` as this dtype; `x` itself if it is.
///
/// # Errors
/// When there is no such cast.
pub(crate) fn cast_to(
    graph: &mut GraphBuilder,
    x: Value,
    dtype: DType,
) -> Result<Value, GraphError> {
    if x == Value::Absent || spec_of(graph, x)?.dtype == dtype {
        return Ok(x);
    }
    graph.cast(x, dtype)
}

/// `x` under this shape; `x` itself if it has it.
///
/// # Errors
/// When the elements are not as many.
pub(crate) fn reshape_to(
    graph: &mut GraphBuilder,
    x: Value,
    shape: Shape,
) -> Result<Value, GraphError> {
    if spec_of(graph, x)?.shape == shape {
        return Ok(x);
    }
    graph.reshape(x, shape)
}

/// The scalar `value` of this plain dtype, rounded once; integers saturate, `bool` is `value != 0`.
///
/// # Errors
/// For a block type.
pub(crate) fn scalar(
    graph: &mut GraphBuilder,
    value: f64,
    dtype: DType,
) -> Result<Value, GraphError> {
    let bytes = match dtype {
        DType::Bool => vec![u8::from(value != 0.0)],
        DType::U8 => (value as u8).to_le_bytes().to_vec(),
        DType::U16 => (value as u16).to_le_bytes().to_vec(),
        DType::U32 => (value as u32).to_le_bytes().to_vec(),
        DType::U64 => (value as u64).to_le_bytes().to_vec(),
        DType::I8 => (value as i8).to_le_bytes().to_vec(),
        DType::I16 => (value as i16).to_le_bytes().to_vec(),
        DType::I32 => (value as i32).to_le_bytes().to_vec(),
        DType::I64 => (value as i64).to_le_bytes().to_vec(),
        DType::F32 => (value as f32).to_le_bytes().to_vec(),
        DType::F64 => value.to_le_bytes().to_vec(),
        DType::C64 => [(value as f32).to_le_bytes(), [0; 4]].concat(),
        // The cast rounds to these once; literals of them would need a rounding of our own.
        _ => {
            let exact = scalar(graph, value, DType::F64)?;
            return graph.cast(exact, dtype);
        }
    };
    graph.literal(dtype, Shape::default(), &bytes)
}

/// The scalar `value` of the dtype of `x`.
///
/// # Errors
/// For a block type.
pub(crate) fn scalar_like(
    graph: &mut GraphBuilder,
    value: f64,
    x: Value,
) -> Result<Value, GraphError> {
    let dtype = spec_of(graph, x)?.dtype;
    scalar(graph, value, dtype)
}

/// `row` on its inputs, inputs `from..` cast to this dtype: how a primitive decomposes whose inputs may differ.
///
/// # Errors
/// When there is no such cast.
pub(crate) fn apply_as(
    graph: &mut GraphBuilder,
    row: &'static OpRow,
    inputs: &[Value],
    attributes: &[Attribute],
    from: usize,
    dtype: DType,
) -> Values {
    let mut same = inputs.to_vec();
    for x in same.iter_mut().skip(from) {
        *x = cast_to(graph, *x, dtype)?;
    }
    graph.apply(row, same, attributes.to_vec())
}

/// [`apply_as`] with what inputs `from..` promote to.
///
/// # Errors
/// When one of them is a block type.
pub(crate) fn promoting(
    graph: &mut GraphBuilder,
    row: &'static OpRow,
    inputs: &[Value],
    attributes: &[Attribute],
    from: usize,
) -> Values {
    let dtype = common(graph, inputs.get(from..).unwrap_or_default())?;
    apply_as(graph, row, inputs, attributes, from, dtype)
}

/// [`promoting`] for functions of real or complex numbers: integers become `f32`.
///
/// # Errors
/// When one of them is a block type.
pub(crate) fn promoting_float(
    graph: &mut GraphBuilder,
    row: &'static OpRow,
    inputs: &[Value],
    attributes: &[Attribute],
) -> Values {
    let dtype = common(graph, inputs)?;
    let dtype = dtype.to_float().unwrap_or(dtype);
    apply_as(graph, row, inputs, attributes, 0, dtype)
}

/// What the dtypes of these values promote to, absent ones left out.
///
/// # Errors
/// When one is a block type or there is none.
pub(crate) fn common(graph: &GraphBuilder, values: &[Value]) -> Result<DType, GraphError> {
    let mut common: Option<DType> = None;
    for &v in values.iter().filter(|v| **v != Value::Absent) {
        let dtype = spec_of(graph, v)?.dtype;
        let next = dtype.promote(common.unwrap_or(dtype));
        common = Some(next.ok_or(GraphError::NoResult)?);
    }
    common.ok_or(GraphError::NoResult)
}

/// A composite function of real numbers: `body` on the inputs as the dtype they promote to, `f16` and `bf16` as `f32`,
/// and one rounding of its result to the promoted dtype.
///
/// # Errors
/// When an input is no real tensor, or what `body` says.
pub(crate) fn rounded_once(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    body: impl FnOnce(&mut GraphBuilder, &[Value]) -> Result<Value, GraphError>,
) -> Values {
    let dtype = common(graph, inputs)?;
    let dtype = dtype.to_float().unwrap_or(dtype);
    let mut work = inputs.to_vec();
    for x in &mut work {
        *x = cast_to(graph, *x, dtype.working())?;
    }
    let result = body(graph, &work)?;
    Ok(vec![cast_to(graph, result, dtype)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_count_from_both_ends() {
        for (axis, rank, want) in [
            (0, 3, Some(0)),
            (2, 3, Some(2)),
            (-1, 3, Some(2)),
            (-3, 3, Some(0)),
            (3, 3, None),
            (-4, 3, None),
            (0, 0, None),
            (-1, 0, None),
            (i64::MIN, 8, None),
            (i64::MAX, 8, None),
        ] {
            assert_eq!(normal_axis(axis, rank), want, "{axis} of {rank}");
        }
        assert_eq!(normal_axes(&[], 3), Some(vec![0, 1, 2]));
        assert_eq!(normal_axes(&[], 0), Some(vec![]));
        assert_eq!(normal_axes(&[-1, 0], 3), Some(vec![0, 2]));
        assert_eq!(normal_axes(&[-1, 2], 3), None);
        assert_eq!(normal_axes(&[3], 3), None);
    }
}

//! What the rules and decompositions of the larger ops share beyond [`rules`](super::rules).

use crate::{
    dtype::DType,
    graph::{GraphBuilder, GraphError, Value},
    op::{
        Attribute, Call, OpRow, ValueSpec,
        rules::{cast_to, dtype_error, reshape_to},
    },
    shape::{Dim, Shape, TensorSpec},
};

/// Input `i`, which must be of a float dtype.
///
/// # Errors
/// When it is something else.
pub(crate) fn float<'a>(call: &Call<'a>, i: usize) -> Result<&'a TensorSpec, GraphError> {
    let t = call.tensor(i)?;
    match t.dtype.is_float() {
        true => Ok(t),
        false => Err(call.error(format_args!(
            "{} must be of a float dtype, not {}; cast it first",
            call.input_name(i),
            t.dtype
        ))),
    }
}

/// Input `i`, if it is given, which must be of a float dtype.
///
/// # Errors
/// When it is something else.
pub(crate) fn optional_float<'a>(
    call: &Call<'a>,
    i: usize,
) -> Result<Option<&'a TensorSpec>, GraphError> {
    match call.optional(i)? {
        Some(_) => float(call, i).map(Some),
        None => Ok(None),
    }
}

/// Input `i`, if it is given, which must be a vector of `n` floats.
///
/// # Errors
/// When it is something else.
pub(crate) fn optional_vector(call: &Call<'_>, i: usize, n: usize) -> Result<(), GraphError> {
    match optional_float(call, i)? {
        Some(t) if t.shape.dims() != [Dim::Fixed(n)] => Err(call.error(format_args!(
            "{} must be [{n}], not {}",
            call.input_name(i),
            t.shape
        ))),
        _ => Ok(()),
    }
}

/// Input `i`, which must be integers.
///
/// # Errors
/// When it is something else.
pub(crate) fn indices_of<'a>(call: &Call<'a>, i: usize) -> Result<&'a TensorSpec, GraphError> {
    let t = call.tensor(i)?;
    match t.dtype.is_integer() {
        true => Ok(t),
        false => Err(call.error(format_args!(
            "{} must be of an integer dtype, not {}",
            call.input_name(i),
            t.dtype
        ))),
    }
}

/// What two inputs' dtypes promote to.
///
/// # Errors
/// When one is a block type.
pub(crate) fn pair(call: &Call<'_>, a: DType, b: DType) -> Result<DType, GraphError> {
    let block = if a.is_block() { a } else { b };
    a.promote(b).ok_or_else(|| dtype_error(call, block))
}

/// Axes one after the other.
pub(crate) fn join(a: &[Dim], b: &[Dim]) -> Vec<Dim> {
    [a, b].concat()
}

/// Axes for a message.
pub(crate) fn dims_text(dims: &[Dim]) -> String {
    let dims: Vec<String> = dims.iter().map(ToString::to_string).collect();
    format!("[{}]", dims.join(", "))
}

/// The dtype of a normalisation's insides: f64 for f64, else f32.
pub(crate) fn inside(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// An op that is being decomposed: its row and the specs of its inputs.
pub(crate) struct Parts<'a> {
    op: &'static OpRow,
    specs: Vec<ValueSpec>,
    attributes: &'a [Attribute],
}

impl<'a> Parts<'a> {
    /// Looks up the inputs' specs.
    ///
    /// # Errors
    /// When one is of another graph.
    pub(crate) fn of(
        op: &'static OpRow,
        graph: &GraphBuilder,
        inputs: &[Value],
        attributes: &'a [Attribute],
    ) -> Result<Self, GraphError> {
        let specs = inputs.iter().map(|&v| graph.spec(v));
        Ok(Self {
            op,
            specs: specs.collect::<Result<_, _>>()?,
            attributes,
        })
    }

    /// The call that is decomposed.
    pub(crate) fn call(&self) -> Call<'_> {
        Call {
            op: self.op,
            inputs: &self.specs,
            attributes: self.attributes,
        }
    }
}

/// Input `i`, if it is given, as this dtype.
///
/// # Errors
/// When there is no such cast.
pub(crate) fn given(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    i: usize,
    dtype: DType,
) -> Result<Option<Value>, GraphError> {
    match inputs.get(i) {
        None | Some(Value::Absent) => Ok(None),
        Some(&v) => cast_to(graph, v, dtype).map(Some),
    }
}

/// `x` under these axes.
///
/// # Errors
/// When the elements are not as many.
pub(crate) fn shaped(
    graph: &mut GraphBuilder,
    x: Value,
    dims: impl IntoIterator<Item = Dim>,
) -> Result<Value, GraphError> {
    reshape_to(graph, x, Shape::new(dims)?)
}

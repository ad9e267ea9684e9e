//! Elementwise ops on f32 tensors.

use crate::{
    dtype::DType,
    graph::{GraphBuilder, GraphError, Value},
    op::{Attribute, Call, Effect, ops},
    shape::TensorSpec,
};

ops! {
    /// `a + b` with NumPy broadcasting, f32.
    add(a, b;) -> one { shapes: "broadcast(a, b)", dtypes: "promote(a, b)", effect: Effect::None, infer: binary, decompose: None }

    /// `a · b` with NumPy broadcasting, f32.
    mul(a, b;) -> one { shapes: "broadcast(a, b)", dtypes: "promote(a, b)", effect: Effect::None, infer: binary, decompose: None }

    /// `x · σ(x)` (Elfwing et al. 2017; the same as swish with β = 1), f32.
    silu(x;) -> one { shapes: "x", dtypes: "float: x; others: f32", effect: Effect::None, infer: unary, decompose: None }

    /// `silu(gate) · up` (Shazeer 2020, without the matrices), f32, equal shapes.
    swiglu(gate, up;) -> one { shapes: "gate = up", dtypes: "promote(gate, up)", effect: Effect::None, infer: same_shapes, decompose: Some(swiglu_of_parts) }
}

fn unary(call: &Call<'_>) -> Result<Vec<TensorSpec>, GraphError> {
    Ok(vec![call.tensor_of(0, DType::F32)?.clone()])
}

fn binary(call: &Call<'_>) -> Result<Vec<TensorSpec>, GraphError> {
    let (a, b) = (
        call.tensor_of(0, DType::F32)?,
        call.tensor_of(1, DType::F32)?,
    );
    let shape = a.shape.broadcast(&b.shape).map_err(|e| call.error(e))?;
    Ok(vec![TensorSpec::new(DType::F32, shape)?])
}

fn same_shapes(call: &Call<'_>) -> Result<Vec<TensorSpec>, GraphError> {
    let (a, b) = (
        call.tensor_of(0, DType::F32)?,
        call.tensor_of(1, DType::F32)?,
    );
    if a.shape != b.shape {
        return Err(call.error(format_args!(
            "shapes {} and {} must be equal",
            a.shape, b.shape
        )));
    }
    Ok(vec![a.clone()])
}

fn swiglu_of_parts(
    graph: &mut GraphBuilder,
    inputs: &[Value],
    _: &[Attribute],
) -> Result<Vec<Value>, GraphError> {
    let &[gate, up] = inputs else {
        return Err(GraphError::NoResult);
    };
    let gated = graph.silu(gate)?;
    Ok(vec![graph.mul(gated, up)?])
}

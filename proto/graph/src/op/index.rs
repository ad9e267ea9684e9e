//! Ops that read where an index tensor says. An index out of range is an error of the execution.

use crate::{
    dtype::DType,
    graph::GraphError,
    op::{Call, Effect, ops},
    shape::{Dim, Shape, TensorSpec},
};

ops! {
    /// Rows of `table` (`[n, k]`, any float or block dtype) at `indices` (i32 `[m]`, each in `[0, n)`),
    /// dequantised to f32 `[m, k]` (NumPy's `take` along axis 0).
    take(table, indices;) -> one { effect: Effect::None, infer: take_spec, decompose: None }
}

fn take_spec(call: &Call<'_>) -> Result<Vec<TensorSpec>, GraphError> {
    let (table, indices) = (call.tensor(0)?, call.tensor_of(1, DType::I32)?);
    if !(table.dtype.is_block() || matches!(table.dtype, DType::F32 | DType::F16 | DType::BF16)) {
        return Err(call.error(format_args!("table cannot be {}", table.dtype)));
    }
    match (table.shape.dims(), indices.shape.dims()) {
        (&[_, k @ Dim::Fixed(_)], &[m]) => {
            Ok(vec![TensorSpec::new(DType::F32, Shape::new([m, k])?)?])
        }
        _ => Err(call.error(format_args!(
            "table {} must be [n, k] and indices {} must be [m]",
            table.shape, indices.shape
        ))),
    }
}

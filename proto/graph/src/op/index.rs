//! Ops that read where an index tensor says. An index out of range is an error of the execution.

use crate::{
    dtype::DType,
    graph::GraphError,
    op::{Call, Effect, ops},
    shape::{Dim, Shape, TensorSpec},
};

ops! {
    /// Rows of `table` (`[n, k]`, any float or block dtype) at `indices` (i32 `[m]`, each in `[0, n)`),
    /// dequantised to f32 `[m, k]` (ggml's `get_rows`).
    get_rows(table, indices;) -> one { shapes: "[n, k], [m] → [m, k]", dtypes: "table f32, f16, bf16 or a block type; indices i32 → f32", effect: Effect::None, infer: get_rows_spec, decompose: None }
}

fn get_rows_spec(call: &Call<'_>) -> Result<Vec<TensorSpec>, GraphError> {
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

//! Matrix multiplication.

use crate::{
    dtype::DType,
    graph::GraphError,
    op::{Call, Effect, ops},
    shape::{Dim, Shape, TensorSpec},
};

ops! {
    /// `x @ wᵀ`: `x` f32 `[m, k]`, `w` `[n, k]` of any float or block dtype, result f32 `[m, n]`
    /// (ggml's `mul_mat`). Each output is summed in an order fixed by the dtype of `w` alone.
    mul_mat(x, w;) -> one { shapes: "[m, k], [n, k] → [m, n]", dtypes: "x f32; w f32, f16, bf16 or a block type → f32", effect: Effect::None, infer: mul_mat_spec, decompose: None }
}

fn mul_mat_spec(call: &Call<'_>) -> Result<Vec<TensorSpec>, GraphError> {
    let (x, w) = (call.tensor_of(0, DType::F32)?, call.tensor(1)?);
    if !(w.dtype.is_block() || matches!(w.dtype, DType::F32 | DType::F16 | DType::BF16)) {
        return Err(call.error(format_args!("w cannot be {}", w.dtype)));
    }
    match (x.shape.dims(), w.shape.dims()) {
        (&[m, Dim::Fixed(k)], &[n @ Dim::Fixed(_), Dim::Fixed(k2)]) if k == k2 => {
            Ok(vec![TensorSpec::new(DType::F32, Shape::new([m, n])?)?])
        }
        _ => Err(call.error(format_args!(
            "x {} and w {} must be [m, k] and [n, k]",
            x.shape, w.shape
        ))),
    }
}

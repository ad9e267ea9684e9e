//! Normalisations over the innermost axis.

use crate::{
    dtype::DType,
    graph::GraphError,
    op::{Call, Effect, ops},
    shape::{Dim, TensorSpec},
};

ops! {
    /// `x · w / √(mean(x²) + eps)` over the innermost axis (Zhang & Sennrich 2019); `x` f32 `[…, n]`,
    /// `weight` f32 `[n]`; the mean is summed in f32.
    rms_norm(x, weight; eps: Float(0.0, 1.0)) -> one { shapes: "x", dtypes: "f32", effect: Effect::None, infer: rms_norm_spec, decompose: None }
}

fn rms_norm_spec(call: &Call<'_>) -> Result<Vec<TensorSpec>, GraphError> {
    let (x, w) = (
        call.tensor_of(0, DType::F32)?,
        call.tensor_of(1, DType::F32)?,
    );
    let inner = x.shape.inner().filter(|n| *n > 0 && x.shape.rank() > 0);
    match (inner, w.shape.dims()) {
        (Some(n), [Dim::Fixed(m)]) if n == *m => Ok(vec![x.clone()]),
        _ => Err(call.error(format_args!(
            "weight {} must have the innermost axis of {}",
            w.shape, x.shape
        ))),
    }
}

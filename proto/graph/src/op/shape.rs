//! Ops that change the shape and move no element.

use crate::{
    graph::GraphError,
    op::{Call, Effect, ops},
    shape::TensorSpec,
};

ops! {
    /// The same elements in row-major order under another shape with as many elements.
    reshape(x; shape: Shape) -> one { shapes: "shape", dtypes: "any", effect: Effect::None, infer: reshape_spec, decompose: None }
}

fn reshape_spec(call: &Call<'_>) -> Result<Vec<TensorSpec>, GraphError> {
    let (x, shape) = (call.tensor(0)?, call.shape(0)?);
    // Equal for one and for two rows means equal for all: both sides are linear in the rows.
    let equal = [1, 2]
        .iter()
        .all(|&r| x.shape.elements(r) == shape.elements(r));
    if !equal || x.shape.is_symbolic() != shape.is_symbolic() {
        return Err(call.error(format_args!("{} cannot become {shape}", x.shape)));
    }
    Ok(vec![
        TensorSpec::new(x.dtype, shape.clone()).map_err(|e| call.error(e))?,
    ])
}

//! Activations and comparisons made of other elementwise ops. `f16` and `bf16` are computed in `f32` and rounded once.

use crate::{
    graph::{GraphBuilder, GraphError, Value},
    op::{
        Attribute, Call, Effect, ops,
        rules::{self, Specs, Values},
    },
};

ops! {
    /// `silu(gate) · up` (Shazeer 2020, without the matrices), equal shapes.
    swiglu(gate, up;) -> one { shapes: "gate = up", dtypes: "promote(gate, up): a float; integers, bool: f32", effect: Effect::None, infer: same_shapes, decompose: Some(swiglu_of_parts) }
}

fn same_shapes(call: &Call<'_>) -> Specs {
    let (a, b) = (call.tensor(0)?, call.tensor(1)?);
    if a.shape != b.shape {
        return Err(call.error(format_args!(
            "shapes {} and {} must be equal",
            a.shape, b.shape
        )));
    }
    rules::one_of(call, rules::promoted_float(call, 0)?, a.shape.clone())
}

fn swiglu_of_parts(graph: &mut GraphBuilder, inputs: &[Value], _: &[Attribute]) -> Values {
    rules::rounded_once(graph, inputs, |g, inputs| {
        let &[gate, up] = inputs else {
            return Err(GraphError::NoResult);
        };
        let gated = g.silu(gate)?;
        g.mul(gated, up)
    })
}
